//! Small JSON files with typed access.

use super::fault::HfFault;
use crate::FormatError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Reads a JSON file of at most `most` bytes.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, most: u64) -> Result<T, FormatError> {
    let file = std::fs::File::open(path).map_err(|e| FormatError::io("open", path, e))?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| FormatError::io("read", path, e))?;
    if bytes.len() as u64 > most {
        return Err(FormatError::hf(path, HfFault::TooLarge { n_bytes: bytes.len() as u64, most }));
    }
    if bytes.is_empty() {
        return Err(FormatError::Empty { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes)
        .map_err(|e| FormatError::hf(path, HfFault::Json { message: e.to_string() }))
}

/// A JSON object from a file. Keys with the value `null` count as missing.
#[derive(Debug, Clone)]
pub struct JsonObject {
    path: PathBuf,
    prefix: String, // path of the object in the file, empty or ending in a dot
    map: Map<String, Value>,
}

impl JsonObject {
    /// Reads a file that holds one object.
    pub fn read(path: &Path) -> Result<JsonObject, FormatError> {
        const MOST: u64 = 16 << 20;
        JsonObject::new(path, read_json(path, MOST)?)
    }

    /// Reads a file that holds a list of objects.
    pub fn read_list(path: &Path) -> Result<Vec<JsonObject>, FormatError> {
        const MOST: u64 = 1 << 20;
        let list: Vec<Value> = read_json(path, MOST)?;
        list.into_iter().map(|value| JsonObject::new(path, value)).collect()
    }

    /// Wraps a value that was read from `path`.
    pub fn new(path: &Path, value: Value) -> Result<JsonObject, FormatError> {
        match value {
            Value::Object(map) => Ok(JsonObject { path: path.to_owned(), prefix: String::new(), map }),
            other => Err(FormatError::hf(path, HfFault::NotAnObject { found: kind(&other) })),
        }
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole object.
    pub fn map(&self) -> &Map<String, Value> {
        &self.map
    }

    /// Returns the value of a key, unless it is `null`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Returns the value of a key as a type; `None` if it is missing or `null`.
    pub fn optional<'a, T: FromJson<'a>>(&'a self, key: &str) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        T::from_json(value).map(Some).ok_or_else(|| self.wrong(key, T::EXPECTED, value))
    }

    /// Returns the value of a key as a type; an error if it is missing.
    pub fn required<'a, T: FromJson<'a>>(&'a self, key: &str) -> Result<T, FormatError> {
        let missing = || FormatError::hf(&self.path, HfFault::MissingKey { key: self.full(key) });
        self.optional(key)?.ok_or_else(missing)
    }

    /// Returns the object under a key.
    pub fn object(&self, key: &str) -> Result<Option<JsonObject>, FormatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                let prefix = format!("{}.", self.full(key));
                Ok(Some(JsonObject { path: self.path.clone(), prefix, map: map.clone() }))
            }
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn wrong(&self, key: &str, expected: &'static str, value: &Value) -> FormatError {
        let found = match value {
            Value::Number(n) => n.to_string(),
            other => kind(other).into(),
        };
        FormatError::hf(&self.path, HfFault::WrongType { key: self.full(key), expected, found })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A type that a JSON value can be read as.
pub trait FromJson<'a>: Sized {
    /// Name of the type in messages.
    const EXPECTED: &'static str;

    /// Converts a value; `None` if it has another type.
    fn from_json(value: &'a Value) -> Option<Self>;
}

impl FromJson<'_> for usize {
    const EXPECTED: &'static str = "a whole number, 0 or more";
    fn from_json(value: &Value) -> Option<usize> {
        u64::from_json(value)?.try_into().ok()
    }
}

impl FromJson<'_> for u64 {
    const EXPECTED: &'static str = "a whole number, 0 or more";
    fn from_json(value: &Value) -> Option<u64> {
        // Python writes some whole numbers as floats: 131072.0.
        let whole = |f: f64| (f >= 0.0 && f.fract() == 0.0 && f < 9.0e15).then_some(f as u64);
        value.as_u64().or_else(|| value.as_f64().and_then(whole))
    }
}

impl FromJson<'_> for u32 {
    const EXPECTED: &'static str = "a whole number from 0 to 2^32 - 1";
    fn from_json(value: &Value) -> Option<u32> {
        u64::from_json(value)?.try_into().ok()
    }
}

impl FromJson<'_> for f64 {
    const EXPECTED: &'static str = "a number";
    fn from_json(value: &Value) -> Option<f64> {
        value.as_f64()
    }
}

impl FromJson<'_> for f32 {
    const EXPECTED: &'static str = "a number";
    fn from_json(value: &Value) -> Option<f32> {
        value.as_f64().map(|v| v as f32)
    }
}

impl FromJson<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_json(value: &Value) -> Option<bool> {
        value.as_bool()
    }
}

impl<'a> FromJson<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_json(value: &'a Value) -> Option<&'a str> {
        value.as_str()
    }
}

impl<'a> FromJson<'a> for Vec<&'a str> {
    const EXPECTED: &'static str = "an array of strings";
    fn from_json(value: &'a Value) -> Option<Vec<&'a str>> {
        value.as_array()?.iter().map(Value::as_str).collect()
    }
}

impl FromJson<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of numbers";
    fn from_json(value: &Value) -> Option<Vec<f32>> {
        value.as_array()?.iter().map(f32::from_json).collect()
    }
}

/// Token ids, written as one number or as an array.
impl FromJson<'_> for Vec<u32> {
    const EXPECTED: &'static str = "a whole number or an array of them";
    fn from_json(value: &Value) -> Option<Vec<u32>> {
        match value {
            Value::Array(all) => all.iter().map(u32::from_json).collect(),
            one => u32::from_json(one).map(|id| vec![id]),
        }
    }
}
