//! Tracks the driver call that the device thread is in. A call that does not return is noticed long before the
//! deadline of the work that it belongs to.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::sync::lock;

thread_local! {
    /// Only the device thread's calls are tracked; other threads, such as a health check, have their own deadlines.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// State shared between the device thread, which updates it, and its callers, which observe it.
pub(crate) struct CurrentCall {
    /// Number of calls begun plus number ended, so it is odd during a call.
    n: AtomicU64,
    what: Mutex<&'static str>,
}

impl CurrentCall {
    pub(crate) fn new() -> CurrentCall {
        CurrentCall { n: AtomicU64::new(0), what: Mutex::new("nothing") }
    }

    /// Enables tracking for the calls of this thread.
    pub(crate) fn watch_this_thread() {
        WATCHED.set(true);
    }

    /// Marks the beginning of a call; dropping the guard marks its end.
    #[inline]
    pub(crate) fn enter(&self, what: &'static str) -> Option<CallGuard<'_>> {
        if !WATCHED.get() {
            return None;
        }
        *lock(&self.what) = what;
        self.n.fetch_add(1, Ordering::AcqRel);
        Some(CallGuard(self))
    }

    /// Returns a counter that changes whenever a call begins or ends, and the current call, if any.
    pub(crate) fn observe(&self) -> (u64, Option<&'static str>) {
        let n = self.n.load(Ordering::Acquire);
        (n, (n % 2 == 1).then(|| *lock(&self.what)))
    }
}

/// Guard for a call in progress.
pub(crate) struct CallGuard<'a>(&'a CurrentCall);

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.n.fetch_add(1, Ordering::AcqRel);
    }
}
