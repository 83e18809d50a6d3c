//! The error of a training run.

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::log::LogError;
use crate::tokenize::TokenizeError;

/// What can go wrong before, between and after steps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Training a tokenizer.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// Saving or loading a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
}

impl TrainError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.hint(),
            Self::Data(error) => error.hint(),
            Self::Tokenize(error) => error.hint(),
            Self::Checkpoint(error) => error.hint(),
            Self::Log(error) => error.hint(),
        }
    }
}
