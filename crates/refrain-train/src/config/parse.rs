//! Parses TOML into an overlay.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use toml::{Spanned, Table, Value};

use super::value::{LoraTable, ModelShape};
use super::{ConfigError, ConfigOverlay, KEYS};

/// A configuration has a few hundred bytes. A larger file is most likely data.
const MAX_BYTES: u64 = 1 << 20;

impl ConfigOverlay {
    /// Reads a configuration file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes > MAX_BYTES {
            return Err(ConfigError::TooLarge { path: path.to_owned(), bytes, limit: MAX_BYTES });
        }
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(failed)?;
        Self::from_toml(&text)
    }

    /// Parses a configuration.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        check_keys(text)?;
        toml::from_str(text).map_err(|error| syntax(&error))
    }
}

fn syntax(error: &toml::de::Error) -> ConfigError {
    ConfigError::Syntax { reason: error.to_string().trim_end().to_owned() }
}

/// Rejects unknown keys and suggests the most similar known key.
fn check_keys(text: &str) -> Result<(), ConfigError> {
    let table: BTreeMap<Spanned<String>, Value> = toml::from_str(text).map_err(|error| syntax(&error))?;
    for (key, value) in &table {
        let start = key.span().start.min(text.len());
        let line = 1 + text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count();
        let name = key.get_ref().as_str();
        known("", name, line, KEYS.iter().map(|key| key.name))?;
        match (name, value) {
            ("new", Value::Table(shape)) => {
                known_all("new.", shape, line, ModelShape::KEYS)?;
            }
            ("lora", Value::Table(lora)) => known_all("lora.", lora, line, LoraTable::KEYS)?,
            ("tokenizer", Value::Table(tokenizer)) => {
                known_all("tokenizer.", tokenizer, line, &["train"])?;
                if let Some(Value::Table(train)) = tokenizer.get("train") {
                    known_all("tokenizer.train.", train, line, &["vocab_size"])?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn known_all(table: &str, found: &Table, line: usize, keys: &[&str]) -> Result<(), ConfigError> {
    found.keys().try_for_each(|key| known(table, key, line, keys.iter().copied()))
}

fn known<'a>(
    table: &str,
    key: &str,
    line: usize,
    mut keys: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), ConfigError> {
    if keys.clone().any(|known| known == key) {
        return Ok(());
    }
    let nearest = nearest(key, &mut keys).map(|nearest| format!("{table}{nearest}"));
    Err(ConfigError::UnknownKey { key: format!("{table}{key}"), line, nearest })
}

/// Finds the most similar word to a mistyped one, if any is similar enough.
pub(crate) fn nearest<'a>(typed: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const LEAST: f64 = 0.7;
    let typed = typed.to_ascii_lowercase().replace('-', "_");
    let scored = words.into_iter().map(|word| (strsim::jaro_winkler(&typed, word), word));
    scored.filter(|(score, _)| *score >= LEAST).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, word)| word)
}
