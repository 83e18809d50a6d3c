//! The device thread: one thread owns a context; others send it work and wait with a deadline.
//!
//! Several handles may share the thread ([`Worker::share`]), for example one per model on a device. Work runs in
//! the order in which it was sent. The time limit of a job starts when the job does, so it does not cover the jobs
//! queued before it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::current_call::CurrentCall;
use crate::device::{Context, Device};
use crate::error::{DriverError, panic_message};
use crate::protocol::busy::BusyState;

/// Time that dropping a worker waits for its thread.
const DROP_LIMIT: Duration = Duration::from_secs(5);

/// Time after which a single driver call counts as hung, whatever the limit of the job as a whole.
const CALL_LIMIT: Duration = Duration::from_secs(5);

type JobBody<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A job in the queue.
struct QueuedJob<S> {
    what: &'static str,
    work: JobBody<S>,
    handle: u64,
    limit: Duration,
    /// Set when the job starts.
    begun: Arc<OnceLock<Instant>>,
}

/// The job that is running.
struct Running {
    handle: u64,
    since: Instant,
    limit: Duration,
}

/// A thread that owns a device and a state `S` (streams, memory, graphs), which never leaves the thread. It ends
/// with its last handle.
struct DeviceThread<S> {
    device: Device,
    jobs: Option<mpsc::Sender<QueuedJob<S>>>,
    thread: Option<JoinHandle<()>>,
    busy: Arc<BusyState>,
    running: Arc<Mutex<Option<Running>>>,
    n_handles: AtomicU64,
}

/// A handle to the thread that owns a device and a state `S`.
///
/// A call without a reply by its deadline fails with [`DriverError::NoAnswer`], even though nothing can unblock the
/// thread; later calls fail at once for as long as the thread is stuck. If the thread hangs in a single driver
/// call, the error comes much earlier. Allocations and module loads do not count as hanging.
pub struct Worker<S> {
    thread: Arc<DeviceThread<S>>,
    handle: u64,
    call_limit: Duration,
}

/// A weak handle, which finds a device thread as long as somebody holds a [`Worker`].
pub struct WeakWorker<S>(Weak<DeviceThread<S>>);

impl<S> WeakWorker<S> {
    /// True if the thread still has a handle.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Returns a new handle, if the thread still has one.
    #[must_use]
    pub fn upgrade(&self) -> Option<Worker<S>> {
        self.0.upgrade().map(Worker::of)
    }
}

impl Device {
    /// Starts the device thread. `init` runs there and creates the state.
    pub fn spawn<S: 'static>(
        &self,
        limit: Duration,
        init: impl FnOnce(&Context) -> Result<S, DriverError> + Send + 'static,
    ) -> Result<Worker<S>, DriverError> {
        let (jobs, queue) = mpsc::channel::<QueuedJob<S>>();
        let (ready, started) = mpsc::channel();
        let busy = Arc::new(BusyState::new());
        let running = Arc::new(Mutex::new(None));
        let (device, status, current) = (self.clone(), Arc::clone(&busy), Arc::clone(&running));
        let body = move || {
            CurrentCall::watch_this_thread();
            status.begin("starting");
            // Unwind safety: after a panic, nothing of `init` is used.
            let made = catch_unwind(AssertUnwindSafe(|| {
                let ctx = device.context()?;
                let state = init(&ctx)?;
                Ok((ctx, state))
            }))
            .unwrap_or_else(|payload| Err(panicked("starting", &*payload)));
            status.finish();
            match made {
                Ok((ctx, mut state)) => {
                    // If the caller has given up, the queue is closed and the loop ends at once.
                    let _ = ready.send(Ok(()));
                    for QueuedJob { what, work, handle, limit, begun } in queue {
                        status.begin(what);
                        let since = *begun.get_or_init(Instant::now);
                        *lock(&current) = Some(Running { handle, since, limit });
                        work(&mut state);
                        *lock(&current) = None;
                        status.finish();
                    }
                    drop(state);
                    drop(ctx);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
            drop(device);
            status.end();
        };
        let thread = std::thread::Builder::new()
            .name("refrain-device".to_owned())
            .spawn(body)
            .map_err(DriverError::caller)?;
        let (device, jobs, thread) = (self.clone(), Some(jobs), Some(thread));
        let n_handles = AtomicU64::new(0);
        let worker = Worker::of(Arc::new(DeviceThread { device, jobs, thread, busy, running, n_handles }));
        match started.recv_timeout(limit) {
            Ok(result) => result.map(|()| worker),
            Err(_) => Err(worker.no_answer("starting", limit)),
        }
    }
}

impl<S: 'static> Worker<S> {
    /// Runs `f` on the device thread and waits for its result, for at most `limit`. A job that is then still queued
    /// or running is not cancelled: it runs in its turn, and its result is dropped.
    pub fn call<R: Send + 'static>(
        &self,
        what: &'static str,
        limit: Duration,
        f: impl FnOnce(&mut S) -> Result<R, DriverError> + Send + 'static,
    ) -> Result<R, DriverError> {
        let (reply, replies) = mpsc::channel();
        let work: JobBody<S> = Box::new(move |state| {
            // Unwind safety: the state belongs to the caller's closures, which keep its invariants.
            let result = catch_unwind(AssertUnwindSafe(|| f(state)))
                .unwrap_or_else(|payload| Err(panicked(what, &*payload)));
            // The caller may have given up waiting.
            let _ = reply.send(result);
        });
        let begun = self.send(what, limit, work)?;
        match self.wait(&replies, &begun, limit) {
            Ok(result) => result,
            Err(None) => Err(DriverError::WorkerGone { what }),
            Err(Some(waited)) => Err(self.no_answer(what, waited)),
        }
    }

    /// Sets the time after which a single driver call counts as hung.
    pub fn set_call_limit(&mut self, limit: Duration) {
        self.call_limit = limit;
    }

    /// Returns another handle to the same thread.
    #[must_use]
    pub fn share(&self) -> Worker<S> {
        Worker::of(Arc::clone(&self.thread))
    }

    /// Returns a weak handle, which does not keep the thread alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakWorker<S> {
        WeakWorker(Arc::downgrade(&self.thread))
    }

    /// Queues a job; the returned cell is set when the job starts.
    fn send(
        &self,
        what: &'static str,
        limit: Duration,
        work: JobBody<S>,
    ) -> Result<Arc<OnceLock<Instant>>, DriverError> {
        self.device().shared.check_lost()?;
        if self.thread.busy.is_stuck() {
            return Err(self.no_answer(what, Duration::ZERO));
        }
        let begun = Arc::<OnceLock<Instant>>::default();
        let job = QueuedJob { what, work, handle: self.handle, limit, begun: Arc::clone(&begun) };
        let gone = || DriverError::WorkerGone { what };
        self.thread.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        Ok(begun)
    }

    /// Waits for the reply. The error is the time waited, or `None` if the thread has ended.
    fn wait<R>(
        &self,
        replies: &mpsc::Receiver<R>,
        begun: &OnceLock<Instant>,
        limit: Duration,
    ) -> Result<R, Option<Duration>> {
        let shared = &self.device().shared;
        let observe = || (shared.current_call.observe(), shared.api.n_done());
        let interval = (self.call_limit / 8).clamp(Duration::from_millis(1), Duration::from_millis(250));
        let start = Instant::now();
        let (mut seen, mut since) = (observe(), start);
        loop {
            let left = limit.saturating_sub(begun.get().map_or(Duration::ZERO, Instant::elapsed));
            match replies.recv_timeout(left.min(interval)) {
                Ok(reply) => return Ok(reply),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(None),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let now = observe();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            let hung = now.0.1.is_some() && since.elapsed() >= self.call_limit;
            // While this job is queued, the deadline of the running job counts.
            let overdue = match begun.get() {
                Some(begun) => begun.elapsed() >= limit,
                None => self.thread.is_overdue(),
            };
            if hung || overdue {
                return Err(Some(start.elapsed()));
            }
        }
    }

    /// True if the thread is running a job of another handle that is not overdue; this handle's jobs wait for it.
    #[must_use]
    pub fn is_serving_another(&self) -> bool {
        let running = lock(&self.thread.running);
        running.as_ref().is_some_and(|r| r.handle != self.handle && r.since.elapsed() < r.limit)
    }

    /// Sends `f` to the device thread without waiting for it. The sender learns of its end through shared state,
    /// and calls [`Worker::overdue`] if that takes too long. Jobs queued after `f` wait for it for at most `limit`.
    /// A panic in `f` is logged and ends only `f`.
    pub fn post(
        &self,
        what: &'static str,
        limit: Duration,
        f: impl FnOnce(&mut S) + Send + 'static,
    ) -> Result<(), DriverError> {
        let work: JobBody<S> = Box::new(move |state| {
            // Unwind safety: as in `call`.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(state))) {
                tracing::error!("{}", panicked(what, &*payload));
            }
        });
        self.send(what, limit, work).map(drop)
    }

    /// Returns the error for a posted job that did not complete in time: the thread is stuck in it, or the device
    /// does not finish its work.
    #[must_use]
    pub fn overdue(&self, what: &'static str, waited: Duration) -> DriverError {
        if let Err(lost) = self.device().shared.check_lost() {
            return lost;
        }
        match self.thread.busy.give_up() {
            Some(_) => self.no_answer(what, waited),
            None => DriverError::Timeout { what, waited, origin: self.device().shared.last() },
        }
    }

    /// Like [`Worker::call`], for work that conflicts with a recording (an upload, an allocation, a wait). While
    /// the device thread is recording, the job is refused at once instead of being queued.
    pub fn call_unless_recording<R: Send + 'static>(
        &self,
        what: &'static str,
        bytes: u64,
        limit: Duration,
        f: impl FnOnce(&mut S) -> Result<R, DriverError> + Send + 'static,
    ) -> Result<R, DriverError> {
        self.device().shared.refuse_while_recording(what, bytes)?;
        self.call(what, limit, f)
    }
}

impl<S> Worker<S> {
    fn of(thread: Arc<DeviceThread<S>>) -> Worker<S> {
        let handle = thread.n_handles.fetch_add(1, Ordering::Relaxed);
        Worker { thread, handle, call_limit: CALL_LIMIT }
    }

    /// The device that the thread owns.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.thread.device
    }

    fn no_answer(&self, what: &'static str, waited: Duration) -> DriverError {
        let mut busy = self.thread.busy.give_up().unwrap_or("nothing").to_owned();
        if let (_, Some(call)) = self.device().shared.current_call.observe() {
            busy = format!("{busy}, in {call}");
        }
        let origin = self.device().shared.last();
        tracing::error!("the device thread did not reply to {what:?} within {waited:?}; busy with {busy:?}");
        DriverError::NoAnswer { what, waited, busy, origin }
    }
}

impl<S> DeviceThread<S> {
    /// True if the running job has exceeded its limit.
    fn is_overdue(&self) -> bool {
        lock(&self.running).as_ref().is_some_and(|running| running.since.elapsed() >= running.limit)
    }
}

impl<S> Drop for DeviceThread<S> {
    fn drop(&mut self) {
        self.jobs = None;
        let Some(thread) = self.thread.take() else { return };
        let limit = if self.busy.is_stuck() { Duration::ZERO } else { DROP_LIMIT };
        let start = Instant::now();
        while !self.busy.has_ended() && !thread.is_finished() {
            if start.elapsed() >= limit {
                // A thread inside a driver call cannot be stopped, so it is detached.
                tracing::warn!("the device thread did not end and was detached");
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        // The thread has finished or is about to; joining does not wait for a driver call.
        let _ = thread.join();
    }
}

impl<S> std::fmt::Debug for Worker<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Worker of {:?}", self.device())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panicked(what: &str, payload: &(dyn std::any::Any + Send)) -> DriverError {
    DriverError::Panicked { what: what.to_owned(), message: panic_message(payload) }
}
