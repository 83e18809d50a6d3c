//! Threads that compute the masks of constrained choices while the device evaluates the tokens before them.
//!
//! A text travels to a thread and back, so nobody else can touch it meanwhile. Results come back in any order; those of
//! requests that have ended are dropped. Threads are started when there is work for them and end with the engine.

use crate::constrain::ConstrainedText;
use crate::error::{EngineError, Stopped};
use crate::request::{RequestId, lock};
use crate::serve::message_of;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Threads beyond these help little: masks are short, and a step rarely has more of them.
const MAX_THREADS: usize = 8;

struct Task {
    id: RequestId,
    text: Box<ConstrainedText>,
}

/// A text whose next choice is prepared.
pub(crate) struct Prepared {
    pub(crate) id: RequestId,
    /// Whether something is left to choose, with the text if it is still whole.
    pub(crate) result: Result<(Box<ConstrainedText>, bool), EngineError>,
}

/// How long to wait for a result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Not at all.
    None,
    /// Until this time.
    Until(Instant),
    /// As long as it takes.
    Unlimited,
}

/// See the module documentation.
pub(crate) struct MaskThreads {
    tasks: Sender<Task>,
    queue: Arc<Mutex<Receiver<Task>>>,
    results: Receiver<Prepared>,
    report: Sender<Prepared>,
    /// Tasks without a result yet.
    n_open: usize,
    n_threads: usize,
}

impl MaskThreads {
    pub(crate) fn new() -> MaskThreads {
        let ((tasks, queue), (report, results)) = (channel(), channel());
        MaskThreads { tasks, queue: Arc::new(Mutex::new(queue)), results, report, n_open: 0, n_threads: 0 }
    }

    /// Has the next choice of a text prepared.
    pub(crate) fn prepare(&mut self, id: RequestId, text: Box<ConstrainedText>) {
        self.n_open += 1;
        if self.n_threads < self.n_open.min(max_threads()) {
            self.start_thread();
        }
        let task = match self.n_threads {
            0 => Some(Task { id, text }),
            _ => self.tasks.send(Task { id, text }).err().map(|unsent| unsent.0),
        };
        if let Some(task) = task {
            // Cannot fail: this end of the channel lives as long as the other.
            let _ = self.report.send(task.run());
        }
    }

    fn start_thread(&mut self) {
        let (queue, report) = (Arc::clone(&self.queue), self.report.clone());
        let work = move || {
            loop {
                // Blocks with the lock held: the next task goes to the thread that waits, the others wait for the lock.
                let Ok(task) = lock(&queue).recv() else { return };
                if report.send(task.run()).is_err() {
                    return;
                }
            }
        };
        // If the system has no more threads, those there are do the work, or the caller.
        let started = std::thread::Builder::new().name("refrain-mask".into()).spawn(work);
        self.n_threads += usize::from(started.is_ok());
    }

    /// The next result; `None` if there is none, or none in time.
    pub(crate) fn next(&mut self, patience: Patience) -> Option<Prepared> {
        if self.n_open == 0 {
            return None;
        }
        let result = match patience {
            Patience::None => self.results.try_recv().ok(),
            Patience::Unlimited => self.results.recv().ok(),
            Patience::Until(until) => {
                match self.results.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(result) => Some(result),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
                }
            }
        }?;
        self.n_open -= 1;
        Some(result)
    }
}

fn max_threads() -> usize {
    let n_cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    n_cores.saturating_sub(1).clamp(1, MAX_THREADS)
}

impl Task {
    fn run(self) -> Prepared {
        let Task { id, mut text } = self;
        let result = catch_unwind(AssertUnwindSafe(|| text.prepare()));
        let result = match result {
            Ok(Ok(is_open)) => Ok((text, is_open)),
            Ok(Err(error)) => Err(error),
            Err(panic) => Err(Stopped::Panicked { message: message_of(&*panic) }.into()),
        };
        Prepared { id, result }
    }
}
