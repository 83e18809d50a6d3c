//! What the thread that takes tokens and the device thread that sends steps share: a channel between the two, no more.
//! The run itself is the taker's ([`refrain_graph::Run`]).
//!
//! The device thread sends steps and counts them; their results come through the ring, which the other thread looks at
//! itself, so that no token waits for a thread to wake up. A step is counted after it was sent, and the ring is looked at
//! only while a counted step has not been taken: the device thread can verify a graph, which writes to the ring, once
//! everything it sent was taken.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use refrain_driver::{DriverError, Ring, Stream};
use refrain_graph::Ran;
use refrain_kernels::CommitEntry;

use crate::error::CudaError;
use crate::feed::payload_bytes;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Pump {
    ring: Mutex<Option<Ring>>,
    /// Steps of the run that were sent.
    n_sent: AtomicU64,
    /// Steps among them that are done, as far as somebody looked.
    n_done: AtomicU64,
    /// Jobs posted to the device thread that have not ended.
    n_jobs: AtomicU64,
    /// No more steps of the run shall be sent.
    stop: AtomicBool,
    told: Mutex<Told>,
}

/// What the device thread tells about the run.
#[derive(Default)]
struct Told {
    /// How the steps that were sent and not taken ran.
    ran: VecDeque<Ran>,
    failed: Option<Failure>,
}

/// Why a run does not go on.
#[derive(Debug)]
struct Failure {
    error: CudaError,
    /// Whether steps that were sent before may still come to an end.
    others_go_on: bool,
}

impl Pump {
    /// Puts the ring of a new memory in place.
    pub(crate) fn install(&self, ring: Ring) {
        *lock(&self.ring) = Some(ring);
    }

    /// The memory is going away.
    pub(crate) fn uninstall(&self) {
        *lock(&self.ring) = None;
    }

    /// Forgets the last run. Nothing of it is under way.
    pub(crate) fn reset(&self) {
        self.n_sent.store(0, Ordering::Relaxed);
        self.n_done.store(0, Ordering::Relaxed);
        self.stop.store(false, Ordering::Relaxed);
        *lock(&self.told) = Told::default();
    }

    /// Asks the device thread to send no more steps.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn n_sent(&self) -> u64 {
        self.n_sent.load(Ordering::Acquire)
    }

    /// Counts a step that was sent.
    pub(crate) fn sent(&self, ran: Ran) {
        lock(&self.told).ran.push_back(ran);
        self.n_sent.fetch_add(1, Ordering::Release);
    }

    /// Says that the run does not go on; the first failure stands.
    pub(crate) fn fail(&self, error: CudaError, others_go_on: bool) {
        lock(&self.told).failed.get_or_insert(Failure { error, others_go_on });
    }

    /// Whether the run does not go on: no more of it may be sent.
    pub(crate) fn is_stopped(&self) -> bool {
        // Under the lock, so that a failure is always seen here: as one, or as taken.
        let told = lock(&self.told);
        told.failed.is_some() || self.stop.load(Ordering::Relaxed)
    }

    /// Whether a failure is all that is left of the run: not while steps that were sent before it are still to come.
    pub(crate) fn is_over(&self, under_way: bool) -> bool {
        let told = lock(&self.told);
        told.failed.as_ref().is_some_and(|f| !(f.others_go_on && under_way && !f.error.is_final()))
    }

    /// Takes the failure. What was asked for before is not sent any more.
    pub(crate) fn take_failure(&self) -> Option<CudaError> {
        let mut told = lock(&self.told);
        if told.failed.is_some() {
            self.stop();
        }
        told.failed.take().map(|failure| failure.error)
    }

    /// Notes that the first `n` steps are done.
    pub(crate) fn done(&self, n: u64) {
        self.n_done.store(n, Ordering::Release);
    }

    /// Whether the step behind the first `n_taken` is done and has left no result.
    pub(crate) fn has_lost(&self, n_taken: u64) -> bool {
        // Asked in this order, since its result comes before the step is done.
        self.n_done.load(Ordering::Acquire) > n_taken && !self.has_result()
    }

    /// The results of the step behind the first `n_taken`, one for each row, and how it ran, if they are there.
    pub(crate) fn next(&self, n_taken: u64) -> Result<Option<(Vec<CommitEntry>, Ran)>, CudaError> {
        if self.n_sent() <= n_taken {
            return Ok(None);
        }
        let entries = self.try_take().map_err(CudaError::driver("taking a token"))?;
        // It was told before the step was counted.
        Ok(entries.and_then(|entries| Some((entries, lock(&self.told).ran.pop_front()?))))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.n_jobs.load(Ordering::Acquire) == 0
    }

    /// A job that is about to be posted; it ends when the guard is dropped.
    pub(crate) fn job(self: &Arc<Self>) -> PostedJob {
        self.n_jobs.fetch_add(1, Ordering::AcqRel);
        PostedJob(Arc::clone(self))
    }

    fn has_result(&self) -> bool {
        lock(&self.ring).as_ref().is_some_and(Ring::has_next)
    }

    /// The results of the next step, if they are there.
    fn try_take(&self) -> Result<Option<Vec<CommitEntry>>, DriverError> {
        let mut ring = lock(&self.ring);
        let Some(ring) = ring.as_mut().filter(|ring| ring.has_next()) else { return Ok(None) };
        let mut entries = vec![CommitEntry::zeroed(); ring.payload_bytes() / size_of::<CommitEntry>()];
        Ok(ring.try_take(bytemuck::cast_slice_mut(&mut entries))?.map(|_| entries))
    }

    /// Counts a result that will come; false when there is no room for it.
    pub(crate) fn reserve(&self) -> bool {
        lock(&self.ring).as_mut().is_some_and(Ring::reserve)
    }

    /// Results that are on their way or not taken.
    pub(crate) fn n_pending(&self) -> u64 {
        lock(&self.ring).as_ref().map_or(0, Ring::n_pending)
    }

    /// Begins the ring anew, for steps of so many rows; the device's count must become 0.
    pub(crate) fn restart(&self, n_rows: usize) -> Result<(), DriverError> {
        match &mut *lock(&self.ring) {
            Some(ring) => ring.restart_with(payload_bytes(n_rows)),
            None => Ok(()),
        }
    }

    /// Forgets what was on its way. Nothing writes to the ring any more.
    pub(crate) fn forget(&self) {
        if let Some(ring) = &mut *lock(&self.ring) {
            ring.restart();
        }
    }

    /// Waits for the next results on the device thread, and looks for errors of the stream meanwhile. The ring is free
    /// for the other thread all the while: a driver call that does not return must not hold it.
    pub(crate) fn take(&self, stream: &mut Stream, limit: Duration) -> Result<Vec<CommitEntry>, DriverError> {
        let began = Instant::now();
        let mut next_look = LOOK;
        loop {
            if let Some(entries) = self.try_take()? {
                return Ok(entries);
            }
            let waited = began.elapsed();
            if waited >= next_look {
                let done = stream.is_done()?;
                if let Some(entries) = self.try_take()? {
                    return Ok(entries);
                }
                if done || waited >= limit {
                    return Err(DriverError::Timeout { what: "a step's result", waited, origin: None });
                }
                next_look = waited + LOOK;
            }
            std::hint::spin_loop();
        }
    }
}

/// How often the device thread looks for errors while it waits.
const LOOK: Duration = Duration::from_micros(100);

/// A job posted to the device thread.
pub(crate) struct PostedJob(Arc<Pump>);

impl Drop for PostedJob {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = "see the log".to_owned();
            let source = DriverError::Panicked { what: "sending a step".into(), message };
            self.0.fail(CudaError::Driver { step: "sending a step".into(), source }, true);
        }
        self.0.n_jobs.fetch_sub(1, Ordering::AcqRel);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
