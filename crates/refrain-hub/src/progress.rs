use std::time::Duration;

use crate::Licence;

/// What happens during a pull, in the order it happens.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// What will be fetched, from where, and under which licence.
    Plan {
        /// The model's name as asked for.
        name: &'a str,
        /// A repository on the hub, or packages of a package index.
        from: &'a str,
        /// Number of files still to fetch.
        n_files: usize,
        /// Bytes still to fetch.
        bytes: u64,
        /// The terms the model comes under, where they are known.
        licence: Option<&'a Licence>,
    },
    /// A file begins; `done` is above zero when an earlier download is continued.
    Start {
        /// The file's name.
        file: &'a str,
        /// Bytes already here.
        done: u64,
        /// Bytes of the whole file.
        total: u64,
    },
    /// So many bytes of the current file are here. May fall back after [`ProgressEvent::Restart`].
    At {
        /// Bytes here by now.
        done: u64,
    },
    /// The current file is complete and its checksum is right.
    Done {
        /// The file's name.
        file: &'a str,
    },
    /// Another process is pulling the same file; this one waits for it.
    Waiting {
        /// The file's name.
        file: &'a str,
    },
    /// The connection failed; another attempt follows after a pause.
    Retry {
        /// The file's name.
        file: &'a str,
        /// Number of the coming attempt, from 2.
        attempt: u32,
        /// Number of attempts at most.
        limit: u32,
        /// The pause.
        after: Duration,
        /// What went wrong.
        because: &'a str,
    },
    /// What was downloaded so far is useless; the file is fetched anew.
    Restart {
        /// The file's name.
        file: &'a str,
        /// What was wrong with it.
        because: &'a str,
    },
    /// One source failed and the next one is tried.
    Fallback {
        /// The source that failed.
        from: &'a str,
        /// The source that is tried next.
        to: &'a str,
        /// What went wrong.
        because: &'a str,
    },
}

/// Watches a pull; the command line draws bars with it.
pub trait Progress {
    /// Called for each event, from the pulling thread.
    fn on(&mut self, event: ProgressEvent<'_>);

    /// Asked several times a second; `true` ends the pull with [`HubError::Cancelled`](crate::HubError::Cancelled).
    /// What was downloaded stays, and the next pull continues from there.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Watches nothing.
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
