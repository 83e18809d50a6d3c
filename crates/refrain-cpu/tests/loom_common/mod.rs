//! loom's versions of what `src/pool/sync.rs` has.

use std::cell::Cell;

pub(super) use loom::cell::UnsafeCell;
pub(super) use loom::hint::spin_loop;
pub(super) use loom::sync::atomic::Ordering;
pub(super) use loom::sync::{Mutex, MutexGuard};
pub(super) use loom::thread::Thread;
pub(super) use std::sync::PoisonError;

// As short as can be, and still through every branch: a round of spinning differs from the one before it only in
// when it happens, and that is loom's choice anyway.
pub(super) const SPINS_IN_STEP: u32 = 1;
pub(super) const YIELDS_IN_STEP: u32 = 1;
pub(super) const SPINS_IDLE: u32 = 0;

thread_local! {
    /// Whether sequentially consistent accesses are, see [`order`]. loom runs a model on the thread that asked for it.
    pub(super) static FENCED: Cell<bool> = const { Cell::new(true) };
    /// Whether `park` returns without an `unpark`, which it may.
    pub(super) static PARKS_RETURN_EARLY: Cell<bool> = const { Cell::new(false) };
}

pub(super) mod thread {
    pub(crate) use loom::thread::{current, yield_now};

    pub(crate) fn park() {
        if super::PARKS_RETURN_EARLY.get() { yield_now() } else { loom::thread::park() }
    }
}

/// loom takes a sequentially consistent access for acquire and release, and so loses wake-ups that no machine loses. A
/// fence before each, which loom knows exactly, is how compilers make them on weakly ordered machines. It orders a
/// little more than the access does; models without fences, in which no wake-up is needed, cover that.
fn order(order: Ordering) -> Ordering {
    if order == Ordering::SeqCst && FENCED.get() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
    order
}

macro_rules! atomic {
    ($name:ident, $value:ty, $($op:ident)*) => {
        pub(super) struct $name(loom::sync::atomic::$name);

        impl $name {
            pub(super) fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            pub(super) fn load(&self, with: Ordering) -> $value {
                self.0.load(order(with))
            }

            $(pub(super) fn $op(&self, value: $value, with: Ordering) -> $value {
                self.0.$op(value, order(with))
            })*
        }
    };
}

macro_rules! stored {
    ($name:ident, $value:ty) => {
        impl $name {
            pub(super) fn store(&self, value: $value, with: Ordering) {
                self.0.store(value, order(with));
            }
        }
    };
}

atomic!(AtomicBool, bool, swap);
atomic!(AtomicU32, u32, fetch_add);
atomic!(AtomicUsize, usize, fetch_add fetch_sub);
stored!(AtomicBool, bool);
stored!(AtomicUsize, usize);
