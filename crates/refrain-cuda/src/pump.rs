//! A channel between the caller that collects tokens and the device thread that launches steps. The run
//! itself belongs to the caller ([`refrain_graph::Run`]).
//!
//! The device thread launches steps and counts them. Their results come through the ring, which the caller
//! polls directly, so that no token waits for a thread to wake up. A step is counted after its launch, and
//! the ring is polled only while a counted step is uncollected. So once all launched steps are collected, the
//! device thread can verify a graph, which writes to the ring.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use refrain_driver::{DriverError, Ring, Stream};
use refrain_graph::{Feedback, Ran, Reason};
use refrain_kernels::CommitEntry;

use crate::error::CudaError;
use crate::feed::payload_bytes;
use crate::repeat::STEPS_PER_BODY;

/// Shared state of caller and device thread; see the module's documentation.
#[derive(Default)]
pub(crate) struct Pump {
    ring: Mutex<Option<Ring>>,
    /// Rows of the run's steps.
    n_rows: AtomicUsize,
    /// Steps of the run that were launched.
    n_sent: AtomicU64,
    /// Launched steps known to be done.
    n_done: AtomicU64,
    /// Jobs posted to the device thread that have not finished.
    n_jobs: AtomicU64,
    /// Whether to launch no more steps of the run.
    stop: AtomicBool,
    /// Whether a loop was launched in the run: it may have ended with requested steps left.
    has_looped: AtomicBool,
    report: Mutex<RunReport>,
}

/// Results of one step.
#[derive(Debug)]
pub(crate) struct StepResults {
    /// One per row.
    pub(crate) entries: Vec<CommitEntry>,
    /// Most probable tokens with their log-probabilities, row by row.
    pub(crate) top: Vec<(u32, f32)>,
}

impl StepResults {
    fn of(payload: &[u8], n_rows: usize) -> StepResults {
        let (entries, lists) = payload.split_at((n_rows * size_of::<CommitEntry>()).min(payload.len()));
        let (ids, logprobs) = lists.split_at(lists.len() / 2);
        let ids: Vec<u32> = bytemuck::pod_collect_to_vec(ids);
        let logprobs: Vec<f32> = bytemuck::pod_collect_to_vec(logprobs);
        StepResults {
            entries: bytemuck::pod_collect_to_vec(entries),
            top: ids.into_iter().zip(logprobs).collect(),
        }
    }
}

/// The device thread's report on the run.
#[derive(Default)]
struct RunReport {
    /// How the uncollected steps ran, each with the number of consecutive steps.
    ran: VecDeque<(Ran, u64)>,
    failed: Option<PumpFailure>,
    /// Why the device does not repeat the steps, although that was requested.
    not_repeated: Option<Reason>,
}

impl RunReport {
    fn push(&mut self, ran: Ran, n: u64) {
        match self.ran.back_mut() {
            _ if n == 0 => {}
            Some((last, n_last)) if *last == ran => *n_last += n,
            _ => self.ran.push_back((ran, n)),
        }
    }

    fn pop(&mut self) -> Option<Ran> {
        let (ran, n) = self.ran.front_mut()?;
        *n -= 1;
        if *n > 0 {
            return Some(ran.clone());
        }
        self.ran.pop_front().map(|(ran, _)| ran)
    }

    /// Drops the last `n` steps.
    fn drop_last(&mut self, mut n: u64) {
        while n > 0
            && let Some((_, n_last)) = self.ran.back_mut()
        {
            let dropped = n.min(*n_last);
            (*n_last, n) = (*n_last - dropped, n - dropped);
            if *n_last == 0 {
                self.ran.pop_back();
            }
        }
    }
}

/// A further step of a loop, which needs no launch of its own.
const REPEATED: Ran = Ran::Replayed { n_launches: 0, n_host_steps: 0 };

/// The error that ended a run.
#[derive(Debug)]
struct PumpFailure {
    error: CudaError,
    /// Whether steps launched earlier may still complete.
    others_continue: bool,
}

impl Pump {
    /// Sets the ring of a new memory.
    pub(crate) fn install(&self, ring: Ring) {
        *lock(&self.ring) = Some(ring);
    }

    /// Drops the ring: its memory is going away.
    pub(crate) fn uninstall(&self) {
        *lock(&self.ring) = None;
    }

    /// Clears the state of the last run, which must have nothing in flight.
    pub(crate) fn reset(&self) {
        self.n_sent.store(0, Ordering::Relaxed);
        self.n_done.store(0, Ordering::Relaxed);
        self.stop.store(false, Ordering::Relaxed);
        self.has_looped.store(false, Ordering::Relaxed);
        *lock(&self.report) = RunReport::default();
    }

    /// Asks the device thread to launch no more steps.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn n_sent(&self) -> u64 {
        self.n_sent.load(Ordering::Acquire)
    }

    /// Counts a launched step.
    pub(crate) fn sent(&self, ran: Ran) {
        lock(&self.report).push(ran, 1);
        self.n_sent.fetch_add(1, Ordering::Release);
    }

    /// Reserves the ring for a loop over `n` steps; false if it is full.
    pub(crate) fn begin_loop(&self, n: usize) -> bool {
        let began = lock(&self.ring).as_mut().is_some_and(|ring| ring.begin_loop(n as u64, STEPS_PER_BODY));
        if began && self.is_stopped() {
            // The caller has just requested that, and this loop may have missed it.
            self.stop_loop();
        }
        began
    }

    /// Undoes [`Pump::begin_loop`] for a loop that was not launched.
    pub(crate) fn cancel_loop(&self) {
        lock(&self.ring).as_mut().into_iter().for_each(|ring| ring.cancel_loop(STEPS_PER_BODY));
    }

    /// Counts the steps of a launched loop, as if it ran all of them.
    pub(crate) fn sent_loop(&self, n: usize) {
        let n = n as u64;
        self.has_looped.store(true, Ordering::Relaxed);
        let mut report = lock(&self.report);
        report.push(Ran::REPLAYED, 1);
        report.push(REPEATED, n.saturating_sub(1));
        drop(report);
        self.n_sent.fetch_add(n, Ordering::Release);
    }

    pub(crate) fn has_looped(&self) -> bool {
        self.has_looped.load(Ordering::Relaxed)
    }

    /// Asks the loop on the device to end.
    pub(crate) fn stop_loop(&self) {
        // Without a loop, the word may belong to one that is being verified.
        lock(&self.ring).as_ref().filter(|ring| ring.is_looping()).into_iter().for_each(Ring::stop_loop);
    }

    /// Whether a loop was launched that has not been closed.
    pub(crate) fn is_looping(&self) -> bool {
        lock(&self.ring).as_ref().is_some_and(Ring::is_looping)
    }

    /// Closes a loop that has ended, once `n_taken` steps include all of its results: steps that it did not run are
    /// not launched any more. False if there is no such loop.
    pub(crate) fn close_loop(&self, n_taken: u64) -> bool {
        let mut ring = lock(&self.ring);
        let Some(ring) = ring.as_mut().filter(|ring| ring.loop_end().is_some_and(|n| n <= n_taken)) else {
            return false;
        };
        let n_results = ring.end_loop().unwrap_or(n_taken);
        let n_excess = self.n_sent.load(Ordering::Relaxed).saturating_sub(n_results);
        lock(&self.report).drop_last(n_excess);
        self.n_sent.fetch_sub(n_excess, Ordering::Release);
        true
    }

    /// Notes why the device does not repeat the steps.
    pub(crate) fn not_repeated(&self, reason: Reason) {
        lock(&self.report).not_repeated = Some(reason);
    }

    /// Takes that reason.
    pub(crate) fn take_not_repeated(&self) -> Option<Reason> {
        lock(&self.report).not_repeated.take()
    }

    /// Reports that the run has failed; the first failure is kept.
    pub(crate) fn fail(&self, error: CudaError, others_continue: bool) {
        lock(&self.report).failed.get_or_insert(PumpFailure { error, others_continue });
    }

    /// Whether no more steps of the run may be launched.
    pub(crate) fn is_stopped(&self) -> bool {
        // Under the lock: `take_failure` stops the run before it removes the failure, so one of the two is
        // always visible.
        let report = lock(&self.report);
        report.failed.is_some() || self.stop.load(Ordering::Relaxed)
    }

    /// Whether only a failure is left of the run: not while results of steps launched before it are still to
    /// come.
    pub(crate) fn has_ended(&self, in_flight: bool) -> bool {
        let report = lock(&self.report);
        report.failed.as_ref().is_some_and(|f| !(f.others_continue && in_flight && !f.error.is_final()))
    }

    /// Takes the failure. Steps requested earlier are no longer launched.
    pub(crate) fn take_failure(&self) -> Option<CudaError> {
        let mut report = lock(&self.report);
        if report.failed.is_some() {
            self.stop();
        }
        report.failed.take().map(|failure| failure.error)
    }

    /// Records that the first `n` steps are done.
    pub(crate) fn done(&self, n: u64) {
        self.n_done.store(n, Ordering::Release);
    }

    /// Whether the step after the first `n_taken` is done without a result.
    pub(crate) fn has_lost(&self, n_taken: u64) -> bool {
        // In this order: a step's result is written before the step is done.
        self.n_done.load(Ordering::Acquire) > n_taken && !self.has_result() && !self.is_looping()
    }

    /// The results of the step after the first `n_taken`, and how it ran, if they are available.
    pub(crate) fn next(&self, n_taken: u64) -> Result<Option<(StepResults, Ran)>, CudaError> {
        if self.n_sent() <= n_taken {
            return Ok(None);
        }
        let results = self.try_take().map_err(CudaError::driver("collecting a token"))?;
        // The report was pushed before the step was counted.
        Ok(results.and_then(|results| Some((results, lock(&self.report).pop()?))))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.n_jobs.load(Ordering::Acquire) == 0
    }

    /// Guard of a job that is about to be posted; dropping it ends the job.
    pub(crate) fn job(self: &Arc<Self>) -> PostedJob {
        self.n_jobs.fetch_add(1, Ordering::AcqRel);
        PostedJob(Arc::clone(self))
    }

    fn has_result(&self) -> bool {
        lock(&self.ring).as_ref().is_some_and(Ring::has_next)
    }

    /// Results of the next step, if they are available.
    fn try_take(&self) -> Result<Option<StepResults>, DriverError> {
        let mut ring = lock(&self.ring);
        let Some(ring) = ring.as_mut().filter(|ring| ring.has_next()) else { return Ok(None) };
        let mut payload = vec![0; ring.payload_bytes()];
        let n_rows = self.n_rows.load(Ordering::Relaxed);
        Ok(ring.try_take(&mut payload)?.map(|_| StepResults::of(&payload, n_rows)))
    }

    /// Reserves a ring entry; false if the ring is full.
    pub(crate) fn reserve(&self) -> bool {
        lock(&self.ring).as_mut().is_some_and(Ring::reserve)
    }

    /// Results in flight or uncollected.
    pub(crate) fn n_pending(&self) -> u64 {
        lock(&self.ring).as_ref().map_or(0, Ring::n_pending)
    }

    /// Restarts the ring for steps with this feedback; the device's count must be reset to 0.
    pub(crate) fn restart(&self, feedback: &Feedback) -> Result<(), DriverError> {
        let mut ring = lock(&self.ring);
        self.n_rows.store(feedback.n_rows, Ordering::Relaxed);
        match &mut *ring {
            Some(ring) => ring.restart_with(payload_bytes(feedback)),
            None => Ok(()),
        }
    }

    /// Discards pending results. Nothing may write to the ring any more.
    pub(crate) fn discard(&self) {
        if let Some(ring) = &mut *lock(&self.ring) {
            ring.restart();
        }
    }

    /// Waits for the next results on the device thread and checks the stream for errors meanwhile. The ring
    /// stays unlocked between polls: a driver call that hangs must not block the caller.
    pub(crate) fn take(&self, stream: &mut Stream, limit: Duration) -> Result<StepResults, DriverError> {
        let began = Instant::now();
        let mut next_check = CHECK_INTERVAL;
        loop {
            if let Some(results) = self.try_take()? {
                return Ok(results);
            }
            let waited = began.elapsed();
            if waited >= next_check {
                let done = stream.is_done()?;
                if let Some(results) = self.try_take()? {
                    return Ok(results);
                }
                if done || waited >= limit {
                    return Err(DriverError::Timeout { what: "a step's result", waited, origin: None });
                }
                next_check = waited + CHECK_INTERVAL;
            }
            std::hint::spin_loop();
        }
    }
}

/// Interval at which the device thread checks for errors while it waits.
const CHECK_INTERVAL: Duration = Duration::from_micros(100);

/// A job posted to the device thread.
pub(crate) struct PostedJob(Arc<Pump>);

impl Drop for PostedJob {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = "see the log".to_owned();
            let source = DriverError::Panicked { what: "launching a step".into(), message };
            self.0.fail(CudaError::Driver { step: "launching a step".into(), source }, true);
        }
        self.0.n_jobs.fetch_sub(1, Ordering::AcqRel);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
