//! Primitives of a region: atomics, locks, a cell, threads, and spin limits.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
pub(super) use std::thread::{self, Thread};

/// Spins of a worker between the regions of a step before it starts to yield its core.
pub(super) const SPINS_IN_STEP: u32 = 4_000;
/// Yields before a worker parks even inside a step: the step is then waiting for something other than the pool.
pub(super) const YIELDS_IN_STEP: u32 = 2_000;
/// Spins outside a step: enough to bridge two regions in quick succession.
pub(super) const SPINS_IDLE: u32 = 200;

/// A cell with scoped accesses, which loom's version checks for conflicts.
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Gives read access to the value.
    #[inline]
    pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Gives write access to the value.
    #[inline]
    pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
