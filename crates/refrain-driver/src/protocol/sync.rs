//! The atomics and locks that the protocols are made of.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in this crate leaves a guarded value half changed when it panics.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
