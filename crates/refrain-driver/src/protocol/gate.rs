//! Who owns the device, whether it is being recorded on, and what waits to be freed.
//!
//! Only the owner begins and ends recordings and empties the bin; any thread may ask and may throw away.

use super::sync::{AtomicBool, AtomicU64, Mutex, Ordering, lock};

/// `G` is a driver object that is no longer needed.
pub(crate) struct RecordingGate<G> {
    /// The owning thread's tag, or 0.
    owner: AtomicU64,
    recording: AtomicBool,
    bin: Mutex<Vec<G>>,
}

impl<G> RecordingGate<G> {
    pub(crate) fn new() -> RecordingGate<G> {
        RecordingGate {
            owner: AtomicU64::new(0),
            recording: AtomicBool::new(false),
            bin: Mutex::new(Vec::new()),
        }
    }

    /// Makes the thread with this tag (not 0) the owner; false when there is one.
    pub(crate) fn claim(&self, tag: u64) -> bool {
        self.owner.compare_exchange(0, tag, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn is_owner(&self, tag: u64) -> bool {
        self.owner.load(Ordering::Acquire) == tag
    }

    /// Gives the ownership up.
    pub(crate) fn unclaim(&self) {
        self.owner.store(0, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Acquire)
    }

    pub(crate) fn set_recording(&self, recording: bool) {
        self.recording.store(recording, Ordering::Release);
    }

    /// Throws an object away, on the thread with this tag. It comes back when it is to be freed at once; it stays in
    /// the bin when something records or when this is not the owner.
    pub(crate) fn throw(&self, garbage: G, tag: u64) -> Option<G> {
        if self.is_recording() || !self.is_owner(tag) {
            lock(&self.bin).push(garbage);
            return None;
        }
        Some(garbage)
    }

    /// Puts objects into the bin in any case.
    pub(crate) fn keep(&self, garbage: impl IntoIterator<Item = G>) {
        lock(&self.bin).extend(garbage);
    }

    /// How many objects wait to be freed.
    pub(crate) fn n_kept(&self) -> usize {
        lock(&self.bin).len()
    }

    /// What the owner is to free now: nothing while it records. Taken in one go, so that the lock is not held over
    /// driver calls, which may take their time.
    pub(crate) fn empty(&self) -> Vec<G> {
        if self.is_recording() { Vec::new() } else { std::mem::take(&mut *lock(&self.bin)) }
    }
}
