//! The device thread's current request, and whether a caller has given up on it.

use super::sync::{AtomicBool, Mutex, Ordering, lock};

/// State shared between the device thread and its callers.
pub(crate) struct BusyState {
    /// The request in progress.
    busy: Mutex<Option<&'static str>>,
    /// Set when a caller gives up on the request; cleared when the request ends after all.
    stuck: AtomicBool,
    ended: AtomicBool,
}

impl BusyState {
    pub(crate) fn new() -> BusyState {
        BusyState { busy: Mutex::new(None), stuck: AtomicBool::new(false), ended: AtomicBool::new(false) }
    }

    /// Marks the start of a request, on the device thread.
    pub(crate) fn begin(&self, what: &'static str) {
        *lock(&self.busy) = Some(what);
    }

    /// Marks the end of the request, on the device thread, possibly too late for its caller.
    pub(crate) fn finish(&self) {
        *lock(&self.busy) = None;
        // After the change above: callers give up under its lock, so a late end always clears the flag last.
        self.stuck.store(false, Ordering::Release);
    }

    /// Gives up on the current request and returns it. The thread counts as stuck until the request ends.
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

    /// Marks the end of the device thread, which accepts no more requests and owns nothing any more.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
