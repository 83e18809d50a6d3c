//! The device thread: one thread owns a context, others send it work and wait with a deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{Context, Device};
use crate::error::{DriverError, panic_message};
use crate::inside::Inside;
use crate::protocol::turn::Turn;

/// How long dropping a worker waits for its thread.
const DROP_LIMIT: Duration = Duration::from_secs(5);

/// How long one driver call may take before its caller is told, however long the work as a whole may take.
const CALL_LIMIT: Duration = Duration::from_secs(5);

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A thread that owns a device and a state `S` (streams, memory, graphs), which never leaves it.
///
/// A call that is not answered by its deadline is reported to the caller ([`DriverError::NoAnswer`]) even though
/// nothing can unblock it; calls after it fail at once for as long as the thread is stuck. So is, much earlier, one
/// whose thread is in a driver call that does not return; allocations and modules being loaded may take their time.
pub struct Worker<S> {
    device: Device,
    jobs: Option<mpsc::Sender<(&'static str, Job<S>)>>,
    thread: Option<JoinHandle<()>>,
    turn: Arc<Turn>,
    call_limit: Duration,
}

impl Device {
    /// Starts the device thread. `init` runs there and makes the state.
    pub fn spawn<S: 'static>(
        &self,
        limit: Duration,
        init: impl FnOnce(&Context) -> Result<S, DriverError> + Send + 'static,
    ) -> Result<Worker<S>, DriverError> {
        let (jobs, queue) = mpsc::channel::<(&'static str, Job<S>)>();
        let (ready, started) = mpsc::channel();
        let turn = Arc::new(Turn::new());
        let (device, shown) = (self.clone(), Arc::clone(&turn));
        let body = move || {
            Inside::watch_this_thread();
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
                    for (what, job) in queue {
                        shown.begin(what);
                        job(&mut state);
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
        let worker = Worker { device, jobs, thread, turn, call_limit: CALL_LIMIT };
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
        self.device.shared.check_lost()?;
        if self.turn.is_stuck() {
            return Err(self.no_answer(what, Duration::ZERO));
        }
        let (answer, answered) = mpsc::channel();
        let job: Job<S> = Box::new(move |state| {
            // Unwind safety: the state belongs to the caller's closures; each keeps its own invariants.
            let result = catch_unwind(AssertUnwindSafe(|| f(state)))
                .unwrap_or_else(|payload| Err(panicked(what, &*payload)));
            // The caller may have given up.
            let _ = answer.send(result);
        });
        let gone = || DriverError::WorkerGone { what };
        self.jobs.as_ref().ok_or_else(gone)?.send((what, job)).map_err(|_| gone())?;
        match self.wait(&answered, limit) {
            Ok(result) => result,
            Err(None) => Err(gone()),
            Err(Some(waited)) => Err(self.no_answer(what, waited)),
        }
    }

    /// Sets how long a single driver call may take.
    pub fn set_call_limit(&mut self, limit: Duration) {
        self.call_limit = limit;
    }

    /// An answer, or how long there was none; `None` when there will never be one.
    fn wait<R>(&self, answered: &mpsc::Receiver<R>, limit: Duration) -> Result<R, Option<Duration>> {
        let shared = &self.device.shared;
        let look = || (shared.inside.look(), shared.api.n_done());
        let interval = (self.call_limit / 8).clamp(Duration::from_millis(1), Duration::from_millis(250));
        let start = Instant::now();
        let (mut seen, mut since) = (look(), start);
        loop {
            let left = limit.saturating_sub(start.elapsed());
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
            if hung || start.elapsed() >= limit {
                return Err(Some(start.elapsed()));
            }
        }
    }

    /// Sends `f` to the device thread without waiting for it: its sender hears of it through what the two share, and
    /// asks [`Worker::overdue`] when that takes too long. A panic in it is logged and ends nothing but `f`.
    pub fn post(
        &self,
        what: &'static str,
        f: impl FnOnce(&mut S) + Send + 'static,
    ) -> Result<(), DriverError> {
        self.device.shared.check_lost()?;
        if self.turn.is_stuck() {
            return Err(self.no_answer(what, Duration::ZERO));
        }
        let job: Job<S> = Box::new(move |state| {
            // Unwind safety: as in `call`.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(state))) {
                tracing::error!("{}", panicked(what, &*payload));
            }
        });
        let gone = || DriverError::WorkerGone { what };
        self.jobs.as_ref().ok_or_else(gone)?.send((what, job)).map_err(|_| gone())
    }

    /// The error of work that was posted and whose end did not show in time: the thread is stuck in it, or the device
    /// does not come to an end.
    #[must_use]
    pub fn overdue(&self, what: &'static str, waited: Duration) -> DriverError {
        if let Err(lost) = self.device.shared.check_lost() {
            return lost;
        }
        match self.turn.give_up() {
            Some(_) => self.no_answer(what, waited),
            None => DriverError::Timeout { what, waited, origin: self.device.shared.last() },
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
        self.device.shared.refuse_while_recording(what, bytes)?;
        self.call(what, limit, f)
    }

    /// The device it owns.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl<S> Worker<S> {
    fn no_answer(&self, what: &'static str, waited: Duration) -> DriverError {
        let mut busy = self.turn.give_up().unwrap_or("nothing").to_owned();
        if let (_, Some(call)) = self.device.shared.inside.look() {
            busy = format!("{busy}, in {call}");
        }
        let origin = self.device.shared.last();
        tracing::error!("the device thread gave no answer to {what:?} in {waited:?}; busy with {busy:?}");
        DriverError::NoAnswer { what, waited, busy, origin }
    }
}

impl<S> Drop for Worker<S> {
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
        write!(f, "Worker of {:?}", self.device)
    }
}

fn panicked(what: &str, payload: &(dyn std::any::Any + Send)) -> DriverError {
    DriverError::Panicked { what: what.to_owned(), message: panic_message(payload) }
}
