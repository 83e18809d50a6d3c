//! Errors of the configuration.

use std::io;
use std::path::PathBuf;

/// What can be wrong with a configuration.
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
    /// The file is larger than any configuration.
    #[error("{path} has {bytes} bytes, a configuration has at most {limit}")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The bound on it.
        limit: u64,
    },
    /// The file is not TOML, or a value has the wrong type.
    #[error("the configuration cannot be read: {reason}")]
    Syntax {
        /// Where and why, over several lines.
        reason: String,
    },
    /// A key that does not exist.
    #[error("line {line}: unknown key `{key}`")]
    UnknownKey {
        /// The key, with its table.
        key: String,
        /// Line in the file, counted from 1.
        line: usize,
        /// The known key it resembles most.
        nearest: Option<String>,
    },
    /// A value outside its range.
    #[error("{key} is {found}, it must be {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// The range.
        expected: String,
        /// What to do.
        hint: &'static str,
    },
    /// A key that is needed.
    #[error("{what} is missing")]
    Missing {
        /// The key or keys.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A shape that does not exist.
    #[error("no shape is called `{name}`")]
    UnknownShape {
        /// What was asked for.
        name: String,
        /// Those that exist.
        known: String,
        /// The one it resembles most.
        nearest: Option<String>,
    },
    /// Sizes that no model can have.
    #[error("no model can have the sizes in `new`: {reason}")]
    Shape {
        /// Which, and why.
        reason: String,
    },
    /// Keys that exclude each other.
    #[error("{first} and {second} exclude each other")]
    Conflict {
        /// One setting.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// What to do.
        hint: &'static str,
    },
}

impl ConfigError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some("check the path, and that you may read the file".to_owned()),
            Self::TooLarge { .. } => Some("give the configuration first, data with --data".to_owned()),
            Self::Syntax { .. } => Some("docs/training.md has every key, and an example".to_owned()),
            Self::UnknownKey { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownKey { .. } => Some("docs/training.md has every key".to_owned()),
            Self::UnknownShape { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownShape { known, .. } => Some(format!("known are {known}; or give a table of sizes")),
            Self::Shape { .. } => Some("docs/training.md has an example of a table".to_owned()),
            Self::Value { hint, .. } | Self::Missing { hint, .. } | Self::Conflict { hint, .. } => {
                Some((*hint).to_owned())
            }
        }
    }
}
