//! Options of a pool.

use crate::protocol;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Makes the command that starts worker `idx`, which connects to the socket at the given path.
pub type WorkerCommand = Arc<dyn Fn(usize, &Path) -> Command + Send + Sync>;

/// Options of a pool.
#[derive(Clone)]
pub struct PoolOptions {
    /// Number of worker processes: one per device.
    pub n_workers: usize,
    /// Starts a worker.
    pub command: WorkerCommand,
    /// Names of the served models.
    pub models: Vec<String>,
    /// Maximum number of open requests; further ones are refused.
    pub max_requests: usize,
    /// Folder for the sockets; a new one in the system's folder for temporary files when `None`.
    pub socket_dir: Option<PathBuf>,
    /// The build that workers must be of.
    pub build: String,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// Pauses before a failed worker is replaced.
    pub backoff: Backoff,
}

impl PoolOptions {
    /// The usual options.
    pub fn new(
        models: Vec<String>,
        command: impl Fn(usize, &Path) -> Command + Send + Sync + 'static,
    ) -> PoolOptions {
        PoolOptions {
            n_workers: 1,
            command: Arc::new(command),
            models,
            max_requests: 1024,
            socket_dir: None,
            build: protocol::build().to_owned(),
            deadlines: Deadlines::default(),
            backoff: Backoff::default(),
        }
    }
}

/// How long a worker may take. A worker that misses a deadline is killed and replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// From the start of the process to its hello.
    pub hello: Duration,
    /// From the hello until the models of the start are loaded, and for each model that is loaded later.
    pub load: Duration,
    /// Between two messages. Workers send several heartbeats a second.
    pub silence: Duration,
    /// Between two signs of progress while requests run. One step must fit: the chunk of a long prompt on a slow CPU takes
    /// seconds.
    pub stall: Duration,
    /// For reading a message that was sent to it.
    pub write: Duration,
    /// From the end of its connection to the end of its process. It is killed then, which is no failure.
    pub exit: Duration,
}

impl Default for Deadlines {
    fn default() -> Deadlines {
        let seconds = Duration::from_secs;
        Deadlines {
            hello: seconds(10),
            load: seconds(600),
            silence: seconds(10),
            stall: seconds(60),
            write: seconds(10),
            exit: seconds(2),
        }
    }
}

/// Pauses between processes that fail soon after their start. The first replacement starts at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Pause after the second failure in a row; each further one doubles it.
    pub first: Duration,
    /// Longest pause.
    pub longest: Duration,
    /// Failures in a row from which requests are refused instead of waiting for the next process. A process that delivers
    /// a token ends the row.
    pub crash_loop: u32,
}

impl Default for Backoff {
    fn default() -> Backoff {
        let (first, longest) = (Duration::from_millis(250), Duration::from_secs(30));
        Backoff { first, longest, crash_loop: 5 }
    }
}

impl Backoff {
    /// Pause before the process after `n_failures` in a row.
    pub(super) fn pause(&self, n_failures: u32) -> Duration {
        match n_failures {
            0 | 1 => Duration::ZERO,
            n => self.first.saturating_mul(1_u32.checked_shl(n - 2).unwrap_or(u32::MAX)).min(self.longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff::default();
        let pauses = [1, 2, 3, 4, 8, 9, 33, u32::MAX].map(|n| backoff.pause(n).as_millis());
        assert_eq!(pauses, [0, 250, 500, 1000, 16_000, 30_000, 30_000, 30_000]);
    }
}
