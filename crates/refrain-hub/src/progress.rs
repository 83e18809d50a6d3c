use std::time::Duration;

use crate::Licence;

/// Events of a pull, in order.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// The pull starts.
    Plan {
        /// The requested name.
        name: &'a str,
        /// A repository on the hub, or packages of a package index.
        from: &'a str,
        /// Number of files to download.
        n_files: usize,
        /// Bytes to download.
        bytes: u64,
        /// Licence of the model, if known.
        licence: Option<&'a Licence>,
    },
    /// A file starts. `done` is above zero if an earlier download is resumed.
    Start {
        /// The file's name.
        file: &'a str,
        /// Bytes downloaded earlier.
        done: u64,
        /// Size of the file in bytes.
        total: u64,
    },
    /// Progress of the current file. It may decrease after [`ProgressEvent::Restart`].
    At {
        /// Bytes downloaded so far.
        done: u64,
    },
    /// The current file is complete and verified.
    Done {
        /// The file's name.
        file: &'a str,
    },
    /// Waits for another process that is pulling the same file.
    Waiting {
        /// The file's name.
        file: &'a str,
    },
    /// The connection failed. Another attempt follows after a pause.
    Retry {
        /// The file's name.
        file: &'a str,
        /// Number of the next attempt, from 2.
        attempt: u32,
        /// Maximum number of attempts.
        limit: u32,
        /// The pause.
        after: Duration,
        /// Cause of the failure.
        because: &'a str,
    },
    /// The downloaded bytes are wrong. The file is downloaded again.
    Restart {
        /// The file's name.
        file: &'a str,
        /// The fault.
        because: &'a str,
    },
    /// One source failed. The next one is tried.
    Fallback {
        /// The source that failed.
        from: &'a str,
        /// The next source.
        to: &'a str,
        /// Cause of the failure.
        because: &'a str,
    },
}

/// Observer of a pull.
pub trait Progress {
    /// Called for each event, from the pulling thread.
    fn on(&mut self, event: ProgressEvent<'_>);

    /// Polled several times a second. `true` aborts the pull with [`HubError::Cancelled`](crate::HubError::Cancelled).
    /// Downloaded bytes are kept, and the next pull resumes.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn on(&mut self, _event: ProgressEvent<'_>) {}
}

impl<F: FnMut(ProgressEvent<'_>)> Progress for F {
    fn on(&mut self, event: ProgressEvent<'_>) {
        self(event);
    }
}
