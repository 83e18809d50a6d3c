//! Which driver call the device thread is in, seen from its callers: a call that does not return is noticed long before
//! the work it belongs to would be late.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::sync::lock;

thread_local! {
    /// Only the device thread's calls are watched; other threads (a health check) have deadlines of their own.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Between the device thread and its callers.
pub(crate) struct CurrentCall {
    /// Calls begun and ended: odd inside one.
    n: AtomicU64,
    what: Mutex<&'static str>,
}

impl CurrentCall {
    pub(crate) fn new() -> CurrentCall {
        CurrentCall { n: AtomicU64::new(0), what: Mutex::new("nothing") }
    }

    /// Has this thread's calls watched from now on.
    pub(crate) fn watch_this_thread() {
        WATCHED.set(true);
    }

    /// A call begins; it ends when the result is dropped.
    #[inline]
    pub(crate) fn enter(&self, what: &'static str) -> Option<CallGuard<'_>> {
        if !WATCHED.get() {
            return None;
        }
        *lock(&self.what) = what;
        self.n.fetch_add(1, Ordering::AcqRel);
        Some(CallGuard(self))
    }

    /// A number that changes whenever a call begins or ends, and the call that it is in, if any.
    pub(crate) fn look(&self) -> (u64, Option<&'static str>) {
        let n = self.n.load(Ordering::Acquire);
        (n, (n % 2 == 1).then(|| *lock(&self.what)))
    }
}

/// A call that has not returned.
pub(crate) struct CallGuard<'a>(&'a CurrentCall);

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.n.fetch_add(1, Ordering::AcqRel);
    }
}
