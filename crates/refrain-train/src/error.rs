//! Errors of a training run.

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::learner::LearnError;
use crate::log::LogError;
use crate::tokenize::TokenizeError;
use std::path::PathBuf;

/// Errors before, between and after steps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// In the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// In the training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// In training a tokenizer.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// In saving or loading a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// In the log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// In a step.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A loss that is not finite: the run cannot continue.
    #[error("the loss of step {step} is not finite; the first value that is not finite is in {tensor}")]
    NotFinite {
        /// The step, counted from 0.
        step: u64,
        /// Name of a weight or a layer.
        tensor: String,
        /// The last checkpoint before it.
        checkpoint: Option<PathBuf>,
    },
    /// Gradients were not finite in too many consecutive steps.
    #[error(
        "{n} consecutive steps up to step {step} had gradients that are not finite; none of them was applied"
    )]
    NeverFinite {
        /// The step, counted from 0.
        step: u64,
        /// Number of consecutive steps.
        n: u64,
        /// The last checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// The run has failed before: its states are not those of its last successful step.
    #[error("the run failed at step {step} and cannot continue from there")]
    Ended {
        /// The step, counted from 0.
        step: u64,
        /// The last checkpoint before it.
        checkpoint: Option<PathBuf>,
    },
    /// The data is exhausted.
    #[error("there is no batch for step {step}")]
    NoData {
        /// The step, counted from 0.
        step: u64,
    },
    /// The report could not be written.
    #[error("{}: cannot write the report: {source}", path.display())]
    Report {
        /// Path of the report.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl TrainError {
    /// An action for the user.
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
                        format!("resume from {} with a lower learning rate or a smaller clip", path.display())
                    }
                    None => "restart with a lower learning rate, a longer warm-up or a smaller clip".into(),
                })
            }
            Self::Ended { checkpoint, .. } => Some(match checkpoint {
                Some(path) => format!("resume from {}", path.display()),
                None => "restart the run".into(),
            }),
            Self::NoData { .. } => None,
            Self::Report { .. } => {
                Some("check the disk space and the permissions; the log has all data of the report".into())
            }
        }
    }
}
