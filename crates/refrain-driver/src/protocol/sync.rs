//! Atomics and locks of the protocols.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Safe after a panic: nothing in this crate leaves a guarded value half changed.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
