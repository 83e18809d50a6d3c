//! Errors of workers and of the pool.

use crate::protocol::{LastWords, ProtocolError};
use std::io;
use std::path::PathBuf;

/// Errors of a worker process, and of starting a pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The server's socket could not be used.
    #[error("the socket {path} cannot be used")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The server sent something that is not of this protocol.
    #[error("the server and this worker do not understand each other")]
    Protocol(#[from] ProtocolError),
    /// A thread could not be started.
    #[error("a thread of the worker could not be started")]
    Thread(#[source] io::Error),
    /// The device's context is lost.
    #[error("the device is lost: {message}")]
    DeviceLost {
        /// What happened.
        message: String,
        /// An action that may resolve it.
        hint: Option<String>,
    },
    /// The engine of a model has stopped, or a model that is loaded at the start could not be.
    #[error("{message}")]
    Failed {
        /// What happened.
        message: String,
        /// An action that may resolve it.
        hint: Option<String>,
    },
    /// The folder for the workers' sockets could not be made.
    #[error("the folder for sockets {path} cannot be made")]
    SocketFolder {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The pool's thread could not be started.
    #[error("the pool of workers could not be started")]
    Pool(#[source] io::Error),
    /// A pool without workers or without models.
    #[error("a pool needs at least one worker and one model, got {n_workers} and {n_models}")]
    Empty {
        /// Workers.
        n_workers: usize,
        /// Models.
        n_models: usize,
    },
}

impl WorkerError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            WorkerError::DeviceLost { hint, .. } | WorkerError::Failed { hint, .. } => hint.clone(),
            WorkerError::Protocol(error) => error.hint(),
            WorkerError::SocketFolder { .. } => Some("use a folder that this user may write to".into()),
            WorkerError::Thread(_) | WorkerError::Pool(_) => {
                Some("raise the limits on processes and open files".into())
            }
            WorkerError::Socket { .. } => Some("let the server start its workers".into()),
            WorkerError::Empty { .. } => None,
        }
    }
}

impl From<LastWords> for WorkerError {
    fn from(LastWords { lost_device, message, hint }: LastWords) -> WorkerError {
        match lost_device {
            true => WorkerError::DeviceLost { message, hint },
            false => WorkerError::Failed { message, hint },
        }
    }
}
