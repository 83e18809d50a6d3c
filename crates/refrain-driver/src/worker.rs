//! The device thread: one thread owns a context, others send it work and wait with a deadline.
//!
//! Several handles may share the thread ([`Worker::share`]): the models of one device each have one. Work is done in the
//! order in which it was sent, and its time begins when it does: nobody is blamed for the work of others in front of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::current_call::CurrentCall;
use crate::device::{Context, Device};
use crate::error::{DriverError, panic_message};
use crate::protocol::busy::BusyState;

/// How long dropping a worker waits for its thread.
const DROP_LIMIT: Duration = Duration::from_secs(5);

/// How long one driver call may take before its caller is told, however long the work as a whole may take.
const CALL_LIMIT: Duration = Duration::from_secs(5);

type JobBody<S> = Box<dyn FnOnce(&mut S) + Send>;

/// Work that waits in line.
struct QueuedJob<S> {
    what: &'static str,
    work: JobBody<S>,
    handle: u64,
    limit: Duration,
    /// When its turn came.
    begun: Arc<OnceLock<Instant>>,
}

/// The job whose turn it is.
struct Running {
    handle: u64,
    since: Instant,
    limit: Duration,
}

/// A thread that owns a device and a state `S` (streams, memory, graphs), which never leaves it. It ends with its last
/// handle.
struct DeviceThread<S> {
    device: Device,
    jobs: Option<mpsc::Sender<QueuedJob<S>>>,
    thread: Option<JoinHandle<()>>,
    turn: Arc<BusyState>,
    running: Arc<Mutex<Option<Running>>>,
    n_handles: AtomicU64,
}

/// A handle to the thread that owns a device and a state `S`.
///
/// A call that is not answered by its deadline is reported to the caller ([`DriverError::NoAnswer`]) even though
/// nothing can unblock it; calls after it fail at once for as long as the thread is stuck. So is, much earlier, one
/// whose thread is in a driver call that does not return; allocations and modules being loaded may take their time.
pub struct Worker<S> {
    thread: Arc<DeviceThread<S>>,
    handle: u64,
    call_limit: Duration,
}

/// Finds a device thread as long as somebody has a handle to it.
pub struct WeakWorker<S>(Weak<DeviceThread<S>>);

impl<S> WeakWorker<S> {
    /// Whether the thread still has a handle.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// A handle of its own, if the thread is still there.
    #[must_use]
    pub fn upgrade(&self) -> Option<Worker<S>> {
        self.0.upgrade().map(Worker::of)
    }
}

impl Device {
    /// Starts the device thread. `init` runs there and makes the state.
    pub fn spawn<S: 'static>(
        &self,
        limit: Duration,
        init: impl FnOnce(&Context) -> Result<S, DriverError> + Send + 'static,
    ) -> Result<Worker<S>, DriverError> {
        let (jobs, queue) = mpsc::channel::<QueuedJob<S>>();
        let (ready, started) = mpsc::channel();
        let turn = Arc::new(BusyState::new());
        let running = Arc::new(Mutex::new(None));
        let (device, shown, now) = (self.clone(), Arc::clone(&turn), Arc::clone(&running));
        let body = move || {
            CurrentCall::watch_this_thread();
            shown.begin("starting");
            // Unwind safety: after a panic nothing of `init` is used.
            let made = catch_unwind(AssertUnwindSafe(|| {
                let ctx = device.context()?;
                let state = init(&ctx)?;
                Ok((ctx, state))
            }))
            .unwrap_or_else(|payload| Err(panicked("starting", &*payload)));
            shown.finish();
            match made {
                Ok((ctx, mut state)) => {
                    // The caller may have given up; then the queue is closed and the loop ends at once.
                    let _ = ready.send(Ok(()));
                    for QueuedJob { what, work, handle, limit, begun } in queue {
                        shown.begin(what);
                        let since = *begun.get_or_init(Instant::now);
                        *lock(&now) = Some(Running { handle, since, limit });
                        work(&mut state);
                        *lock(&now) = None;
                        shown.finish();
                    }
                    drop(state);
                    drop(ctx);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
            drop(device);
            shown.end();
        };
        let thread = std::thread::Builder::new()
            .name("refrain-device".to_owned())
            .spawn(body)
            .map_err(DriverError::caller)?;
        let (device, jobs, thread) = (self.clone(), Some(jobs), Some(thread));
        let n_handles = AtomicU64::new(0);
        let worker = Worker::of(Arc::new(DeviceThread { device, jobs, thread, turn, running, n_handles }));
        match started.recv_timeout(limit) {
            Ok(result) => result.map(|()| worker),
            Err(_) => Err(worker.no_answer("starting", limit)),
        }
    }
}

impl<S: 'static> Worker<S> {
    /// Runs `f` on the device thread and waits for its result, at most `limit`. What is still waiting in line or
    /// running then is not taken back: it is done when its turn comes, and its result is dropped.
    pub fn call<R: Send + 'static>(
        &self,
        what: &'static str,
        limit: Duration,
        f: impl FnOnce(&mut S) -> Result<R, DriverError> + Send + 'static,
    ) -> Result<R, DriverError> {
        let (answer, answered) = mpsc::channel();
        let work: JobBody<S> = Box::new(move |state| {
            // Unwind safety: the state belongs to the caller's closures; each keeps its own invariants.
            let result = catch_unwind(AssertUnwindSafe(|| f(state)))
                .unwrap_or_else(|payload| Err(panicked(what, &*payload)));
            // The caller may have given up.
            let _ = answer.send(result);
        });
        let begun = self.send(what, limit, work)?;
        match self.wait(&answered, &begun, limit) {
            Ok(result) => result,
            Err(None) => Err(DriverError::WorkerGone { what }),
            Err(Some(waited)) => Err(self.no_answer(what, waited)),
        }
    }

    /// Sets how long a single driver call may take.
    pub fn set_call_limit(&mut self, limit: Duration) {
        self.call_limit = limit;
    }

    /// Another handle to the same thread.
    #[must_use]
    pub fn share(&self) -> Worker<S> {
        Worker::of(Arc::clone(&self.thread))
    }

    /// A way to find the thread again that does not keep it alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakWorker<S> {
        WeakWorker(Arc::downgrade(&self.thread))
    }

    /// Puts work in line; says when its turn comes.
    fn send(
        &self,
        what: &'static str,
        limit: Duration,
        work: JobBody<S>,
    ) -> Result<Arc<OnceLock<Instant>>, DriverError> {
        self.device().shared.check_lost()?;
        if self.thread.turn.is_stuck() {
            return Err(self.no_answer(what, Duration::ZERO));
        }
        let begun = Arc::<OnceLock<Instant>>::default();
        let job = QueuedJob { what, work, handle: self.handle, limit, begun: Arc::clone(&begun) };
        let gone = || DriverError::WorkerGone { what };
        self.thread.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        Ok(begun)
    }

    /// An answer, or how long there was none; `None` when there will never be one.
    fn wait<R>(
        &self,
        answered: &mpsc::Receiver<R>,
        begun: &OnceLock<Instant>,
        limit: Duration,
    ) -> Result<R, Option<Duration>> {
        let shared = &self.device().shared;
        let look = || (shared.current_call.observe(), shared.api.n_done());
        let interval = (self.call_limit / 8).clamp(Duration::from_millis(1), Duration::from_millis(250));
        let start = Instant::now();
        let (mut seen, mut since) = (look(), start);
        loop {
            let left = limit.saturating_sub(begun.get().map_or(Duration::ZERO, Instant::elapsed));
            match answered.recv_timeout(left.min(interval)) {
                Ok(answer) => return Ok(answer),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(None),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let now = look();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            let hung = now.0.1.is_some() && since.elapsed() >= self.call_limit;
            // While it waits in line, the deadline is that of the work in front of it.
            let overdue = match begun.get() {
                Some(begun) => begun.elapsed() >= limit,
                None => self.thread.is_overdue(),
            };
            if hung || overdue {
                return Err(Some(start.elapsed()));
            }
        }
    }

    /// Whether the thread does the work of another handle, which is not overdue: what this one has sent waits for it.
    #[must_use]
    pub fn is_serving_another(&self) -> bool {
        let running = lock(&self.thread.running);
        running.as_ref().is_some_and(|r| r.handle != self.handle && r.since.elapsed() < r.limit)
    }

    /// Sends `f` to the device thread without waiting for it: its sender hears of it through what the two share, and
    /// asks [`Worker::overdue`] when that takes too long. Whoever is behind it in line waits for it at most `limit`. A
    /// panic in it is logged and ends nothing but `f`.
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

    /// The error of work that was posted and whose end did not show in time: the thread is stuck in it, or the device
    /// does not come to an end.
    #[must_use]
    pub fn overdue(&self, what: &'static str, waited: Duration) -> DriverError {
        if let Err(lost) = self.device().shared.check_lost() {
            return lost;
        }
        match self.thread.turn.give_up() {
            Some(_) => self.no_answer(what, waited),
            None => DriverError::Timeout { what, waited, origin: self.device().shared.last() },
        }
    }

    /// Like [`Worker::call`], for work that does not go with a recording (an upload, an allocation, a wait): while the
    /// device thread records, it is refused at once instead of waiting in line.
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
        let mut busy = self.thread.turn.give_up().unwrap_or("nothing").to_owned();
        if let (_, Some(call)) = self.device().shared.current_call.observe() {
            busy = format!("{busy}, in {call}");
        }
        let origin = self.device().shared.last();
        tracing::error!("the device thread gave no answer to {what:?} in {waited:?}; busy with {busy:?}");
        DriverError::NoAnswer { what, waited, busy, origin }
    }
}

impl<S> DeviceThread<S> {
    /// Whether the work at hand takes longer than it may.
    fn is_overdue(&self) -> bool {
        lock(&self.running).as_ref().is_some_and(|running| running.since.elapsed() >= running.limit)
    }
}

impl<S> Drop for DeviceThread<S> {
    fn drop(&mut self) {
        self.jobs = None;
        let Some(thread) = self.thread.take() else { return };
        let limit = if self.turn.is_stuck() { Duration::ZERO } else { DROP_LIMIT };
        let start = Instant::now();
        while !self.turn.has_ended() && !thread.is_finished() {
            if start.elapsed() >= limit {
                // A thread inside a driver call cannot be ended; it is left to itself.
                tracing::warn!("the device thread did not end and is left behind");
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        // Finished or about to: joining does not wait for a driver call any more.
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
