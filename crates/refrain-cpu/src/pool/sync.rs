//! What a region is made of: atomics, locks, a cell, threads, and how long to spin.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
pub(super) use std::thread::{self, Thread};

/// Spins before a worker that is between the regions of a step starts to give its core away.
pub(super) const SPINS_IN_STEP: u32 = 4_000;
/// Yields after that before it parks even inside a step: the step is waiting for something else than the pool.
pub(super) const YIELDS_IN_STEP: u32 = 2_000;
/// Spins outside a step: enough to join two regions that follow each other closely.
pub(super) const SPINS_IDLE: u32 = 200;

/// A cell whose uses have a beginning and an end, which loom's version checks against each other.
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Lends the value out for reading.
    #[inline]
    pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Lends the value out for writing.
    #[inline]
    pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
