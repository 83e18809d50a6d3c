//! Aborts recordings that take too long.
//!
//! The watchdog never ends a capture itself. If it did, the owner's next launch would execute instead of being
//! captured. It queries the capturing stream from its own thread, which invalidates the capture, so that the
//! owner's next launch fails. It also sets a flag that every enqueue checks first.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::api::StreamHandle;
use crate::error::{DriverError, Lost, WorkOrigin};
use crate::protocol::sync::lock;
use crate::protocol::watch::{Watch, WatchDecision};
use crate::shared::DeviceShared;

/// Time that the owner waits for the watchdog to finish a query in progress.
const QUERY_LIMIT: Duration = Duration::from_secs(5);

/// One per device. Its thread starts with the first recording.
pub(crate) struct Watchdog {
    state: Arc<WatchdogState>,
    started: AtomicBool,
}

struct WatchdogState {
    watch: Watch<Armed>,
    fired: AtomicU64,
}

struct Armed {
    deadline: Instant,
    limit: Duration,
    stream: Option<StreamHandle>,
    shared: Weak<DeviceShared>,
    progress: Arc<RecordingProgress>,
}

/// State shared between a recording and the watchdog.
pub(crate) struct RecordingProgress {
    expired: AtomicBool,
    name: String,
    last: Mutex<(usize, Option<WorkOrigin>)>,
}

impl RecordingProgress {
    pub(crate) fn new(name: &str) -> Arc<RecordingProgress> {
        Arc::new(RecordingProgress {
            expired: AtomicBool::new(false),
            name: name.to_owned(),
            last: Mutex::new((0, None)),
        })
    }

    /// True once the deadline has passed.
    #[inline]
    pub(crate) fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    /// Notes the work that is about to be enqueued.
    pub(crate) fn note(&self, origin: WorkOrigin) {
        let mut last = lock(&self.last);
        last.0 += 1;
        last.1 = Some(origin);
    }

    /// Number of calls enqueued, and the last one.
    pub(crate) fn last_enqueued(&self) -> (usize, Option<WorkOrigin>) {
        lock(&self.last).clone()
    }
}

impl Watchdog {
    pub(crate) fn new() -> Watchdog {
        let state = WatchdogState { watch: Watch::new(), fired: AtomicU64::new(0) };
        Watchdog { state: Arc::new(state), started: AtomicBool::new(false) }
    }

    /// Number of recordings aborted.
    pub(crate) fn fired(&self) -> u64 {
        self.state.fired.load(Ordering::Relaxed)
    }

    /// Watches a recording until the returned guard is dropped.
    pub(crate) fn arm(
        &self,
        shared: &Arc<DeviceShared>,
        limit: Duration,
        progress: &Arc<RecordingProgress>,
    ) -> WatchGuard {
        if !self.started.swap(true, Ordering::AcqRel) {
            let state = Arc::clone(&self.state);
            let thread =
                std::thread::Builder::new().name("refrain-watchdog".to_owned()).spawn(move || state.run());
            if let Err(error) = thread {
                // Every enqueue checks the clock as well, so a recording is still bounded between two calls.
                tracing::warn!("cannot start the watchdog thread: {error}");
                self.started.store(false, Ordering::Release);
            }
        }
        let now = Instant::now();
        let deadline = now.checked_add(limit).unwrap_or(now + Duration::from_secs(86_400));
        let armed = Armed {
            deadline,
            limit,
            stream: None,
            shared: Arc::downgrade(shared),
            progress: Arc::clone(progress),
        };
        self.state.watch.arm(armed);
        WatchGuard {
            state: Arc::clone(&self.state),
            shared: Arc::clone(shared),
            deadline,
            limit,
            progress: Arc::clone(progress),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.state.watch.quit();
    }
}

/// Guard of a recording under watch.
pub(crate) struct WatchGuard {
    state: Arc<WatchdogState>,
    shared: Arc<DeviceShared>,
    deadline: Instant,
    limit: Duration,
    progress: Arc<RecordingProgress>,
}

impl WatchGuard {
    /// The error for a recording past its deadline.
    pub(crate) fn deadline_error(&self) -> DriverError {
        let (n_enqueued, last) = self.progress.last_enqueued();
        DriverError::RecordingDeadline {
            name: self.progress.name.clone(),
            limit: self.limit,
            n_enqueued,
            last,
        }
    }

    /// Sets or clears the stream being captured. Waits for a query of the watchdog in progress, so that the stream
    /// outlives it.
    pub(crate) fn set_stream(&self, stream: Option<StreamHandle>) {
        if !self.state.watch.edit(QUERY_LIMIT, |armed| armed.stream = stream) {
            let origin = self.progress.last_enqueued().1;
            self.shared.lose(Lost { code: None, call: "cuStreamQuery by the watchdog", origin });
        }
        self.shared.set_recorded_stream(stream);
    }

    /// True once the recording must stop. Also checks the clock, in case the watchdog thread is late.
    pub(crate) fn expired(&self) -> bool {
        self.progress.expired() || Instant::now() >= self.deadline
    }
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.set_stream(None);
        self.state.watch.disarm();
    }
}

impl WatchdogState {
    fn run(&self) {
        self.watch.run(
            |armed| self.decide(armed),
            |(stream, shared)| {
                if let (Some(stream), Some(shared)) = (stream, shared) {
                    // Only the side effect matters: the query returns 900 and invalidates the capture. `shared` is
                    // dropped before the lock is taken again, because the drop of the last handle takes it too.
                    let _ = shared.raw(|api| api.stream_query(stream));
                }
            },
        );
    }

    fn decide(&self, armed: &Armed) -> WatchDecision<(Option<StreamHandle>, Option<Arc<DeviceShared>>)> {
        let now = Instant::now();
        if armed.progress.expired() {
            return WatchDecision::Idle;
        }
        if armed.deadline > now {
            return WatchDecision::Wait(armed.deadline - now);
        }
        armed.progress.expired.store(true, Ordering::Release);
        self.fired.fetch_add(1, Ordering::Relaxed);
        let (n, last) = armed.progress.last_enqueued();
        let last = last.map_or_else(|| "nothing".to_owned(), |o| o.to_string());
        tracing::error!(
            "recording {:?} exceeded its limit of {:?}; calls enqueued: {n}, last: {last}",
            armed.progress.name,
            armed.limit
        );
        WatchDecision::Act((armed.stream, armed.shared.upgrade()))
    }
}
