//! The error of a training run.

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::learner::LearnError;
use crate::log::LogError;
use crate::tokenize::TokenizeError;
use std::path::PathBuf;

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
    /// A step.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A loss that is not finite: the run cannot go on from here.
    #[error("the loss of step {step} is not finite; the first number that is not is in {tensor}")]
    NotFinite {
        /// The step, counted from 0.
        step: u64,
        /// A weight, or a layer.
        tensor: String,
        /// The last checkpoint before it.
        checkpoint: Option<PathBuf>,
    },
    /// Gradients were not finite again and again.
    #[error("{n} steps up to step {step} had gradients that are not finite; none of them was applied")]
    NeverFinite {
        /// The step, counted from 0.
        step: u64,
        /// Steps in a row.
        n: u64,
        /// The last checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// The run had failed before: its states are not those of its last good step.
    #[error("the run failed at step {step} and cannot go on from there")]
    Ended {
        /// The step, counted from 0.
        step: u64,
        /// The last checkpoint before it.
        checkpoint: Option<PathBuf>,
    },
    /// The data ended.
    #[error("there is no batch for step {step}")]
    NoData {
        /// The step, counted from 0.
        step: u64,
    },
    /// The report could not be written.
    #[error("{}: the report could not be written: {source}", path.display())]
    Report {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
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
            Self::Learn(error) => error.hint().map(Into::into),
            Self::NotFinite { checkpoint, .. } | Self::NeverFinite { checkpoint, .. } => {
                Some(match checkpoint {
                    Some(path) => {
                        format!("go on from {} with a lower learning rate or a smaller clip", path.display())
                    }
                    None => {
                        "start again with a lower learning rate, a longer warm-up or a smaller clip".into()
                    }
                })
            }
            Self::Ended { checkpoint, .. } => Some(match checkpoint {
                Some(path) => format!("go on from {}", path.display()),
                None => "start it again".into(),
            }),
            Self::NoData { .. } => None,
            Self::Report { .. } => Some("the log has all that the report shows".into()),
        }
    }
}
