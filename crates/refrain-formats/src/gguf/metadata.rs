//! Key-value metadata of a GGUF file.

use super::fault::{GgufFault, GgufLocation};
use super::value::{Array, FromValue, MetadataValue, StrArray};
use crate::FormatError;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// All metadata of a file, in file order, with an index by key.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    file: PathBuf,
    entries: Vec<(Box<str>, MetadataValue)>,
    by_key: Vec<u32>, // indices of `entries`, sorted by key
}

impl Metadata {
    /// Builds the index by key. The error is a key that appears twice.
    pub(crate) fn new(file: &Path, entries: Vec<(Box<str>, MetadataValue)>) -> Result<Metadata, Box<str>> {
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        by_key.sort_unstable_by(|&a, &b| entries[a as usize].0.cmp(&entries[b as usize].0));
        for pair in by_key.windows(2) {
            if entries[pair[0] as usize].0 == entries[pair[1] as usize].0 {
                return Err(entries[pair[0] as usize].0.clone());
            }
        }
        Ok(Metadata { file: file.to_owned(), entries, by_key })
    }

    /// The file it was read from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Iterates over keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetadataValue)> {
        self.entries.iter().map(|(k, v)| (&**k, v))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        let found = self.by_key.binary_search_by(|&i| (*self.entries[i as usize].0).cmp(key)).ok()?;
        Some(&self.entries[self.by_key[found] as usize].1)
    }

    /// Returns the value of a key as a type. `None` if the key is missing, an error if the value does not fit the type.
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, FormatError> {
        let value = self.get(key).map(T::from_value).transpose();
        value.map_err(|fault| self.fault(key, fault))
    }

    /// Returns the value of a key as a type; an error if the key is missing.
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, FormatError> {
        self.optional(key)?.ok_or_else(|| self.fault(key, GgufFault::Missing))
    }

    /// Returns a required `u32`, from any integer type.
    pub fn u32(&self, key: &str) -> Result<u32, FormatError> {
        self.required(key)
    }

    /// Returns a required `u64`, from any integer type.
    pub fn u64(&self, key: &str) -> Result<u64, FormatError> {
        self.required(key)
    }

    /// Returns a required `i32`, from any integer type.
    pub fn i32(&self, key: &str) -> Result<i32, FormatError> {
        self.required(key)
    }

    /// Returns a required `f32`, from any number type.
    pub fn f32(&self, key: &str) -> Result<f32, FormatError> {
        self.required(key)
    }

    /// Returns a required `f64`, from any number type.
    pub fn f64(&self, key: &str) -> Result<f64, FormatError> {
        self.required(key)
    }

    /// Returns a required bool.
    pub fn bool(&self, key: &str) -> Result<bool, FormatError> {
        self.required(key)
    }

    /// Returns a required string.
    pub fn str(&self, key: &str) -> Result<&str, FormatError> {
        self.required(key)
    }

    /// Returns a required array of any type.
    pub fn array(&self, key: &str) -> Result<&Array, FormatError> {
        self.required(key)
    }

    /// Returns a required array of strings.
    pub fn strings(&self, key: &str) -> Result<&StrArray, FormatError> {
        self.required(key)
    }

    /// Returns a required array of integers, borrowed if they are i32.
    pub fn i32s(&self, key: &str) -> Result<Cow<'_, [i32]>, FormatError> {
        self.required(key)
    }

    /// Returns a required array of floats, borrowed if they are f32.
    pub fn f32s(&self, key: &str) -> Result<Cow<'_, [f32]>, FormatError> {
        self.required(key)
    }

    /// Returns an error about the value of a key.
    pub(crate) fn fault(&self, key: &str, fault: GgufFault) -> FormatError {
        FormatError::gguf(&self.file, GgufLocation::Key(key.to_owned()), fault)
    }
}
