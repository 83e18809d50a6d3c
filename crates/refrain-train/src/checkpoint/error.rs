//! Errors of checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use super::FrozenBase;
use crate::storage::is_disk_full;

/// What can go wrong when state is saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// No room. What was saved before is still there.
    #[error("no room to save {n_bytes} bytes at {path}")]
    NoSpace {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes of the whole checkpoint.
        n_bytes: u64,
    },
    /// A write failed. What was saved before is still there.
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
    /// Another run saves here.
    #[error("another run saves in {path}")]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// There is none.
    #[error("{path} holds no checkpoint")]
    NotFound {
        /// The folder.
        path: PathBuf,
    },
    /// The pointer leads nowhere.
    #[error("{path} names {name:?}, which is not there")]
    Pointer {
        /// The pointer.
        path: PathBuf,
        /// What it names.
        name: String,
        /// Checkpoints that are there.
        available: Vec<String>,
    },
    /// The tensors cannot be saved as given.
    #[error("{file} cannot hold {tensor}: {reason}")]
    BadTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Why.
        reason: String,
    },
    /// A file name that is a path, or is taken.
    #[error("{name:?} is no name for a file of a checkpoint")]
    BadName {
        /// The name.
        name: String,
    },
    /// Another version of the layout.
    #[error("{path} has version {found}, this program reads version {known}")]
    Version {
        /// `state.json`.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version of this program.
        known: u32,
    },
    /// `state.json` is damaged.
    #[error("{path} is damaged: {reason}")]
    State {
        /// `state.json`.
        path: PathBuf,
        /// In which way.
        reason: String,
    },
    /// A file is missing.
    #[error("{path} is missing")]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file has another size.
    #[error("{path} has {found} bytes, {expected} were saved")]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// The size that was saved.
        expected: u64,
    },
    /// A file has other bytes.
    #[error("{path} is damaged: its sha256 is {found}, {expected} was saved")]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Of its bytes.
        found: String,
        /// Of the bytes that were saved.
        expected: String,
    },
    /// The adapter was trained over other weights.
    #[error("{path} belongs to {saved}, but this run has {given} below its adapter")]
    OtherBase {
        /// The folder of the checkpoint.
        path: PathBuf,
        /// The weights it was trained over.
        saved: FrozenBase,
        /// The weights of this run.
        given: FrozenBase,
    },
    /// The tensors are not those of the model.
    #[error("{path} does not fit the model: {}", .differences.join("; "))]
    Differs {
        /// The file.
        path: PathBuf,
        /// What differs; the first few, then a count.
        differences: Vec<String>,
    },
}

impl CheckpointError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NoSpace { .. } => {
                "free some space, lower `keep`, or resume with another `out`; the previous checkpoint is whole"
            }
            Self::Write { .. } => "check that you may write there; the previous checkpoint is whole",
            Self::Read { .. } => "check that you may read it",
            Self::Busy { .. } => "wait until it has ended, or choose another `out`",
            Self::NotFound { .. } => "give the folder of a checkpoint, or the `out` of a run that saved one",
            Self::Pointer { available, .. } => {
                return available.last().map(|last| format!("resume from {last}"));
            }
            Self::BadTensor { .. } | Self::BadName { .. } => return None,
            Self::Version { .. } => "use the version of the program that wrote it",
            Self::State { .. } | Self::MissingFile { .. } | Self::Size { .. } | Self::Checksum { .. } => {
                "resume from an earlier checkpoint"
            }
            Self::OtherBase { saved, given, .. } if saved.name == given.name => {
                "the model has changed since it was saved: bring the earlier one back, or start a new run"
            }
            Self::OtherBase { saved, .. } => return Some(format!("resume over {}", saved.name)),
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
