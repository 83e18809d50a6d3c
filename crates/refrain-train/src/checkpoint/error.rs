//! Errors of checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use super::FrozenBase;
use crate::storage::is_disk_full;

/// Errors of saving and loading checkpoints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// No disk space left. The previous checkpoint is intact.
    #[error("no space to save {n_bytes} bytes at {path}")]
    NoSpace {
        /// The file that was being written.
        path: PathBuf,
        /// Size of the whole checkpoint.
        n_bytes: u64,
    },
    /// A write failed. The previous checkpoint is intact.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A read failed.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another run saves in this folder.
    #[error("another run saves in {path}")]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has no checkpoint.
    #[error("{path} contains no checkpoint")]
    NotFound {
        /// The folder.
        path: PathBuf,
    },
    /// The pointer names a missing checkpoint.
    #[error("{path} points to {name:?}, which does not exist")]
    Pointer {
        /// The pointer.
        path: PathBuf,
        /// The checkpoint it names.
        name: String,
        /// Existing checkpoints.
        available: Vec<String>,
    },
    /// The tensors cannot be saved.
    #[error("cannot save {tensor} in {file}: {reason}")]
    BadTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Why.
        reason: String,
    },
    /// A file name that contains a path, or is already in use.
    #[error("{name:?} is not a valid name for a checkpoint file")]
    BadName {
        /// The name.
        name: String,
    },
    /// An unsupported version of the format.
    #[error("{path} has version {found}, the supported version is {known}")]
    Version {
        /// `state.json`.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The supported version.
        known: u32,
    },
    /// `state.json` is damaged.
    #[error("{path} is damaged: {reason}")]
    State {
        /// `state.json`.
        path: PathBuf,
        /// What is damaged.
        reason: String,
    },
    /// A file is missing.
    #[error("{path} is missing")]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file has the wrong size.
    #[error("{path} has {found} bytes, {expected} were saved")]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// The saved size.
        expected: u64,
    },
    /// A file's content has changed.
    #[error("{path} is damaged: its sha256 is {found}, {expected} was saved")]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Checksum of the file.
        found: String,
        /// Checksum that was saved.
        expected: String,
    },
    /// The adapter was trained on other weights.
    #[error("{path} was trained on {saved}, the adapter of this run is on {given}")]
    OtherBase {
        /// The folder of the checkpoint.
        path: PathBuf,
        /// The base it was trained on.
        saved: FrozenBase,
        /// The base of this run.
        given: FrozenBase,
    },
    /// The tensors do not match the model.
    #[error("{path} does not match the model: {}", .differences.join("; "))]
    Differs {
        /// The file.
        path: PathBuf,
        /// The differences: the first few, then a count.
        differences: Vec<String>,
    },
}

impl CheckpointError {
    /// An action for the user.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NoSpace { .. } => {
                "free some space, lower `keep`, or resume with another `out`; the previous checkpoint is intact"
            }
            Self::Write { .. } => "check the write permissions; the previous checkpoint is intact",
            Self::Read { .. } => "check the read permissions",
            Self::Busy { .. } => "wait until the other run has ended, or choose another `out`",
            Self::NotFound { .. } => {
                "give the folder of a checkpoint, or the `out` folder of a run that saved one"
            }
            Self::Pointer { available, .. } => {
                return available.last().map(|last| format!("resume from {last}"));
            }
            Self::BadTensor { .. } | Self::BadName { .. } => return None,
            Self::Version { .. } => "use the version of the program that wrote it",
            Self::State { .. } | Self::MissingFile { .. } | Self::Size { .. } | Self::Checksum { .. } => {
                "resume from an earlier checkpoint"
            }
            Self::OtherBase { saved, given, .. } if saved.name == given.name => {
                "the model has changed since the checkpoint was saved: restore the earlier model, or start a new run"
            }
            Self::OtherBase { saved, .. } => {
                return Some(format!("resume with the base model {}", saved.name));
            }
            Self::Differs { .. } => "resume with the model, dtype and optimiser of the checkpoint",
        };
        Some(text.to_owned())
    }

    pub(super) fn write(path: &Path, n_bytes: u64) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| {
            let path = path.to_owned();
            if is_disk_full(&source) { Self::NoSpace { path, n_bytes } } else { Self::Write { path, source } }
        }
    }

    pub(super) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Read { path: path.to_owned(), source }
    }
}
