//! Ownership of the device, whether it is being recorded on, and objects waiting to be freed.
//!
//! Only the owner begins and ends recordings and empties the bin. Any thread may query the state and discard
//! objects.

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

    /// Makes the thread with this non-zero tag the owner; false if there is an owner already.
    pub(crate) fn claim(&self, tag: u64) -> bool {
        self.owner.compare_exchange(0, tag, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn is_owner(&self, tag: u64) -> bool {
        self.owner.load(Ordering::Acquire) == tag
    }

    /// Releases ownership.
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

    /// Discards an object on the thread with this tag. Returns it if the caller must free it now; puts it into the
    /// bin if a recording is in progress or this is not the owner's thread.
    pub(crate) fn discard(&self, garbage: G, tag: u64) -> Option<G> {
        if self.is_recording() || !self.is_owner(tag) {
            lock(&self.bin).push(garbage);
            return None;
        }
        Some(garbage)
    }

    /// Puts objects into the bin unconditionally.
    pub(crate) fn keep(&self, garbage: impl IntoIterator<Item = G>) {
        lock(&self.bin).extend(garbage);
    }

    /// Number of objects waiting to be freed.
    pub(crate) fn n_kept(&self) -> usize {
        lock(&self.bin).len()
    }

    /// Returns the objects that the owner must free now; none during a recording. Takes all of them at once, so
    /// that the lock is not held during slow driver calls.
    pub(crate) fn empty(&self) -> Vec<G> {
        if self.is_recording() { Vec::new() } else { std::mem::take(&mut *lock(&self.bin)) }
    }
}
