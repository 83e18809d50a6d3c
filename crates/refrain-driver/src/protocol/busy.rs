//! What the device thread is busy with, and whether a caller gave up on it.

use super::sync::{AtomicBool, Mutex, Ordering, lock};

/// Between the device thread and its callers.
pub(crate) struct BusyState {
    /// The request that is being worked on.
    busy: Mutex<Option<&'static str>>,
    /// Set when a caller gave up on it; reset when it ends after all.
    stuck: AtomicBool,
    ended: AtomicBool,
}

impl BusyState {
    pub(crate) fn new() -> BusyState {
        BusyState { busy: Mutex::new(None), stuck: AtomicBool::new(false), ended: AtomicBool::new(false) }
    }

    /// The device thread begins a request.
    pub(crate) fn begin(&self, what: &'static str) {
        *lock(&self.busy) = Some(what);
    }

    /// The device thread has done it, maybe too late for its caller.
    pub(crate) fn finish(&self) {
        *lock(&self.busy) = None;
        // After the change above, under whose lock callers give up: a late end always has the last word.
        self.stuck.store(false, Ordering::Release);
    }

    /// A caller has waited long enough. Returns what the thread is busy with; it counts as stuck until that ends.
    pub(crate) fn give_up(&self) -> Option<&'static str> {
        let busy = lock(&self.busy);
        if busy.is_some() {
            self.stuck.store(true, Ordering::Release);
        }
        *busy
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire)
    }

    /// The device thread takes no more requests and owns nothing any more.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
