//! Threads that compute the masks of constrained choices while the device evaluates the tokens before them.
//!
//! A text travels to a thread and back, so nobody else can touch it meanwhile. Results come back in any order; those of
//! requests that have ended are dropped. Threads are started when there is work for them and end with the engine.

use crate::constrain::ConstrainedText;
use crate::error::{EngineError, Stopped};
use crate::mailbox::Mailbox;
use crate::request::{FinishReason, RequestId, lock};
use crate::schedule::StepRow;
use crate::serve::{Server, message_of};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Threads beyond these help little: masks are short, and a step rarely has more of them.
const MAX_THREADS: usize = 8;
/// Time that rows wait for the masks of others in any case: most masks take less.
const MASK_WAIT: Duration = Duration::from_micros(300);

/// The text of a request.
pub(crate) enum TextSlot {
    /// It follows no grammar.
    None,
    Here(Box<ConstrainedText>),
    /// Its next mask is being computed.
    Away,
}

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
                self.results.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
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

impl Server {
    /// Whether a row needs a mask that is still being computed.
    pub(crate) fn is_late(&self, row: &StepRow) -> bool {
        row.chooses && self.jobs.get(&row.id).is_some_and(|job| job.row.is_late)
    }

    /// Estimates when the step that runs now needs its masks, from the time of the last one. Steps that waited for masks
    /// took longer than the device needs, so shorter times count at once and longer ones little by little.
    pub(crate) fn expect_masks(&mut self, took: Duration) {
        self.step_time = match took < self.step_time || self.step_time.is_zero() {
            true => took,
            false => self.step_time + (took - self.step_time) / 16,
        };
        // The rest is for getting the masks to the device before its body ends.
        self.masks_due = Instant::now() + MASK_WAIT.max(self.step_time * 7 / 8);
    }

    /// After a step that is not launched ahead: the device waits.
    pub(crate) fn expect_masks_at_once(&mut self) {
        self.masks_due = Instant::now() + MASK_WAIT;
    }

    /// Hands over the masks that are there.
    pub(crate) fn take_masks(&mut self, mailbox: &Mailbox) -> Result<(), Stopped> {
        while self.take_mask(mailbox, Patience::None)? {}
        Ok(())
    }

    /// Waits for the masks of rows until the device is likely to need them, and after that until one row can go on: the
    /// others are late. Rows whose request ends meanwhile are removed.
    pub(crate) fn await_masks(&mut self, mailbox: &Mailbox, rows: &mut Vec<StepRow>) -> Result<(), Stopped> {
        loop {
            rows.retain(|row| self.jobs.contains_key(&row.id));
            let n_late = rows.iter().filter(|row| self.is_late(row)).count();
            let patience = match rows.len() {
                _ if n_late == 0 => return Ok(()),
                n if n == n_late => Patience::Unlimited,
                _ => Patience::Until(self.masks_due),
            };
            if !self.take_mask(mailbox, patience)? {
                return Ok(());
            }
        }
    }

    /// Hands over the next mask that is computed; false if there is none in time.
    fn take_mask(&mut self, mailbox: &Mailbox, patience: Patience) -> Result<bool, Stopped> {
        let Some(Prepared { id, result }) = self.masks.next(patience) else { return Ok(false) };
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(true) };
        match result {
            Ok((mut text, is_open)) => {
                text.hand_over(&mut job.row);
                job.text = TextSlot::Here(text);
                if !is_open {
                    self.end(mailbox, id, FinishReason::Complete);
                }
            }
            Err(error) => self.request_failed(mailbox, id, error)?,
        }
        Ok(true)
    }

    /// The rows whose choice can be made now. The others are left out of the step.
    pub(crate) fn rows_with_masks(
        &mut self,
        mailbox: &Mailbox,
        rows: &[StepRow],
    ) -> Result<Vec<StepRow>, Stopped> {
        let mut rows = rows.to_vec();
        self.await_masks(mailbox, &mut rows)?;
        let (late, ready): (Vec<StepRow>, Vec<StepRow>) = rows.into_iter().partition(|row| self.is_late(row));
        self.scheduler.undo(&late);
        Ok(ready)
    }
}
