//! Errors of the configuration.

use std::io;
use std::path::PathBuf;

/// Errors of a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is too large for a configuration.
    #[error("{path} has {bytes} bytes, a configuration has at most {limit}")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The maximum size.
        limit: u64,
    },
    /// The file is not TOML, or a value has the wrong type.
    #[error("the configuration cannot be read: {reason}")]
    Syntax {
        /// Location and cause, on several lines.
        reason: String,
    },
    /// An unknown key.
    #[error("line {line}: unknown key `{key}`")]
    UnknownKey {
        /// The key, including its table.
        key: String,
        /// Line in the file, counted from 1.
        line: usize,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// A value that is out of range.
    #[error("{key} is {found}, it must be {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// The valid range.
        expected: String,
        /// An action for the user.
        hint: &'static str,
    },
    /// A required key is missing.
    #[error("{what} is missing")]
    Missing {
        /// The key or keys.
        what: &'static str,
        /// An action for the user.
        hint: &'static str,
    },
    /// An unknown shape.
    #[error("there is no shape named `{name}`")]
    UnknownShape {
        /// The name.
        name: String,
        /// Known shapes.
        known: String,
        /// The most similar known shape.
        nearest: Option<String>,
    },
    /// Sizes that are not valid for a model.
    #[error("the sizes in `new` are not valid: {reason}")]
    Shape {
        /// The cause.
        reason: String,
    },
    /// Conflicting keys.
    #[error("{first} and {second} cannot be combined")]
    Conflict {
        /// One setting.
        first: &'static str,
        /// The other setting.
        second: &'static str,
        /// An action for the user.
        hint: &'static str,
    },
}

impl ConfigError {
    /// An action for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some("check the path and the read permissions".to_owned()),
            Self::TooLarge { .. } => {
                Some("check the path; training data belongs in the key `data`".to_owned())
            }
            Self::Syntax { .. } => Some("see docs/training.md for all keys and an example".to_owned()),
            Self::UnknownKey { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownKey { .. } => Some("see docs/training.md for all keys".to_owned()),
            Self::UnknownShape { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownShape { known, .. } => Some(format!("use one of {known}, or give a table of sizes")),
            Self::Shape { .. } => Some("see docs/training.md for an example of a table".to_owned()),
            Self::Value { hint, .. } | Self::Missing { hint, .. } | Self::Conflict { hint, .. } => {
                Some((*hint).to_owned())
            }
        }
    }
}
