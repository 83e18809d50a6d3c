//! Bodies of requests, read field by field.
//!
//! Each field is taken out by name and checked; what remains at the end is not known and refused. So no field is ignored
//! silently, and every error names the field with its path.

use crate::error::ApiError;
use serde_json::{Map, Value};

/// An object of a request's body.
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Path of the object, with a final dot; empty for the body itself.
    path: String,
    /// Names that were asked for, to suggest the nearest one.
    known: Vec<&'static str>,
}

impl Fields {
    /// The fields of the body.
    pub(crate) fn body(value: Value) -> Result<Fields, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { map, path: String::new(), known: Vec::new() }),
            other => {
                Err(ApiError::invalid("body", format!("the body is {}, must be an object", kind(&other))))
            }
        }
    }

    /// The fields of a value within the body.
    pub(crate) fn of(value: Value, path: &str) -> Result<Fields, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { map, path: format!("{path}."), known: Vec::new() }),
            other => Err(ApiError::invalid(path, format!("{path} is {}, must be an object", kind(&other)))),
        }
    }

    /// Full path of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A field as it is. `null` counts as absent.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        self.map.remove(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, value: &Value, want: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(path.clone(), format!("{path} is {}, must be {want}", shown(value)))
    }

    /// A required field.
    pub(crate) fn required(&mut self, name: &'static str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| {
            let path = self.path(name);
            let error = ApiError::invalid(path.clone(), format!("{path} is missing"));
            ApiError { code: Some("missing_required_parameter"), ..error }
        })
    }

    pub(crate) fn string(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, &other, "a string")),
        }
    }

    pub(crate) fn bool(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, &other, "true or false")),
        }
    }

    /// A finite number.
    pub(crate) fn number(&mut self, name: &'static str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32) {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(name, &value, "a number")),
        }
    }

    /// A whole number within limits.
    pub(crate) fn int(&mut self, name: &'static str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Some clients send whole numbers as 1.0.
        let whole = value.as_i64().or_else(|| {
            let v = value.as_f64().filter(|v| v.fract() == 0.0 && v.abs() < 9e15)?;
            Some(v as i64)
        });
        match whole {
            Some(n) if (min..=max).contains(&n) => Ok(Some(n)),
            _ if max == i64::MAX => {
                Err(self.wrong(name, &value, &format!("a whole number of {min} or more")))
            }
            _ => Err(self.wrong(name, &value, &format!("a whole number from {min} to {max}"))),
        }
    }

    pub(crate) fn count(&mut self, name: &'static str, max: usize) -> Result<Option<usize>, ApiError> {
        let max = i64::try_from(max).unwrap_or(i64::MAX);
        Ok(self.int(name, 0, max)?.and_then(|n| usize::try_from(n).ok()))
    }

    pub(crate) fn list(&mut self, name: &'static str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, &other, "a list")),
        }
    }

    pub(crate) fn map(&mut self, name: &'static str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.wrong(name, &other, "an object")),
        }
    }

    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.take(name).map(|value| Fields::of(value, &path)).transpose()
    }

    /// Token ids.
    pub(crate) fn token_ids(&mut self, name: &'static str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let ids = list.iter().map(|v| v.as_u64().and_then(|v| u32::try_from(v).ok()));
        let path = self.path(name);
        let ids: Option<Vec<u32>> = ids.collect();
        ids.map(Some)
            .ok_or_else(|| ApiError::invalid(path.clone(), format!("{path} must be a list of token ids")))
    }

    /// Accepts fields that ask for nothing a server of local models does, such as storing a reply at the provider.
    pub(crate) fn without_effect(&mut self, names: &[&'static str]) {
        for name in names {
            self.take(name);
        }
    }

    /// Refuses a field unless it has a value that changes nothing.
    pub(crate) fn only(
        &mut self,
        name: &'static str,
        harmless: &[Value],
        hint: &'static str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !harmless.contains(&value) => {
                let path = self.path(name);
                let message = format!("{path} = {} is not supported", shown(&value));
                Err(ApiError::unsupported(path, message).hint(hint))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the remaining fields by name.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        // A field that is null asks for nothing, known or not.
        let Some(name) = self.map.iter().find(|(_, v)| !v.is_null()).map(|(name, _)| name) else {
            return Ok(());
        };
        let path = self.path(&shortened(name));
        let nearest = self.known.iter().map(|known| (strsim::jaro_winkler(name, known), known));
        let nearest = nearest.filter(|(score, _)| *score > 0.87).max_by(|a, b| a.0.total_cmp(&b.0));
        let hint = match nearest {
            Some((_, nearest)) => format!("did you mean {nearest}?"),
            None => "remove it; /openapi.json lists the supported fields".to_owned(),
        };
        let error = ApiError::unsupported(path.clone(), format!("the field {path} is not supported"));
        Err(ApiError { code: Some("unknown_parameter"), ..error }.hint(hint))
    }
}

/// A value in an error message, at most a few words long.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        Value::String(text) => format!("{:?}", shortened(text)),
        other => other.to_string(),
    }
}

fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 64;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// What a value is, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::body(value).unwrap()
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_path() {
        let mut body = fields(json!({ "outer": { "n": "many" } }));
        let error = body.object("outer").unwrap().unwrap().count("n", 8).unwrap_err();
        assert_eq!(error.to_string(), "outer.n is \"many\", must be a whole number from 0 to 8");
        assert_eq!(error.param.as_deref(), Some("outer.n"));
    }

    #[test]
    fn an_unknown_field_is_refused_by_name_with_the_nearest_one() {
        let mut body = fields(json!({ "temprature": 1, "gone": null }));
        body.number("temperature").unwrap();
        let error = body.finish().unwrap_err();
        assert_eq!(error.to_string(), "the field temprature is not supported");
        assert_eq!(error.hint.as_deref(), Some("did you mean temperature?"));
    }

    #[test]
    fn a_whole_number_may_be_written_as_a_float_but_not_out_of_range() {
        assert_eq!(fields(json!({ "n": 2.0 })).count("n", 8).unwrap(), Some(2));
        assert!(fields(json!({ "n": 2.5 })).count("n", 8).is_err());
        assert!(fields(json!({ "n": -1 })).count("n", 8).is_err());
        assert!(fields(json!({ "n": 1e300 })).count("n", 8).is_err());
        assert!(fields(json!({ "x": 1e300 })).number("x").is_err());
    }

    #[test]
    fn a_field_may_ask_for_what_happens_anyway() {
        let known = [json!("auto"), json!("default")];
        assert!(fields(json!({ "tier": "auto" })).only("tier", &known, "").is_ok());
        assert!(fields(json!({ "tier": null })).only("tier", &known, "").is_ok());
        assert!(fields(json!({ "tier": "flex" })).only("tier", &known, "").is_err());
    }
}
