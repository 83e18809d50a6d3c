//! loom's versions of the primitives in `src/pool/sync.rs`.

use std::cell::Cell;

pub(super) use loom::cell::UnsafeCell;
pub(super) use loom::hint::spin_loop;
pub(super) use loom::sync::atomic::Ordering;
pub(super) use loom::sync::{Mutex, MutexGuard};
pub(super) use loom::thread::Thread;
pub(super) use std::sync::PoisonError;

// As few as possible while still reaching every branch: rounds of spinning differ only in their timing, which
// loom varies anyway.
pub(super) const SPINS_IN_STEP: u32 = 1;
pub(super) const YIELDS_IN_STEP: u32 = 1;
pub(super) const SPINS_IDLE: u32 = 0;

thread_local! {
    /// Whether accesses are sequentially consistent, see [`order`]. loom runs a model on the thread that
    /// started it.
    pub(super) static FENCED: Cell<bool> = const { Cell::new(true) };
    /// Whether `park` returns without an `unpark`, which is allowed.
    pub(super) static PARKS_RETURN_EARLY: Cell<bool> = const { Cell::new(false) };
}

pub(super) mod thread {
    pub(crate) use loom::thread::{current, yield_now};

    pub(crate) fn park() {
        if super::PARKS_RETURN_EARLY.get() { yield_now() } else { loom::thread::park() }
    }
}

/// loom treats a sequentially consistent access as acquire and release, and so loses wake-ups that no machine
/// loses. A fence before each access, which loom models exactly, is how compilers implement it on weakly
/// ordered machines. The fence orders slightly more than the access does; models without fences, in which no
/// wake-up is needed, cover the difference.
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
