//! The worker side of the pool: waiting for a region, running it, reporting back.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};

/// Spins before a worker that is between the regions of a step starts to give its core away.
const SPINS_IN_STEP: u32 = 4_000;
/// Yields after that before it parks even inside a step: the step is waiting for something else than the pool.
const YIELDS_IN_STEP: u32 = 2_000;
/// Spins outside a step: enough to join two regions that follow each other closely.
const SPINS_IDLE: u32 = 200;

/// A region's closure, type-erased without allocation.
#[derive(Clone, Copy)]
pub(super) struct Task {
    data: *const (),
    call: unsafe fn(*const (), usize, usize),
}

impl Task {
    pub(super) const NONE: Task = Task { data: std::ptr::null(), call: |_, _, _| {} };

    pub(super) fn new<F: Fn(usize, usize) + Sync>(f: &F) -> Task {
        unsafe fn call<F: Fn(usize, usize) + Sync>(data: *const (), thread_idx: usize, n_threads: usize) {
            // SAFETY: `data` came from `&F` in `Task::new`, and `Pool::run` keeps that borrow alive for as long as
            // any worker may call it.
            let f = unsafe { &*data.cast::<F>() };
            f(thread_idx, n_threads);
        }
        Task { data: std::ptr::from_ref(f).cast(), call: call::<F> }
    }
}

pub(super) struct Shared {
    /// Moves on by one for each region; a worker runs the task when it sees a number it has not run.
    pub(super) epoch: AtomicU32,
    /// Workers that have not finished the current region.
    pub(super) remaining: AtomicUsize,
    pub(super) task: UnsafeCell<Task>,
    /// Number of living `Step` guards.
    pub(super) in_step: AtomicUsize,
    pub(super) stop: AtomicBool,
    pub(super) asleep: Box<[AtomicBool]>,
    pub(super) caller_asleep: AtomicBool,
    pub(super) caller: Mutex<Option<Thread>>,
    pub(super) panic: Mutex<Option<Box<dyn Any + Send>>>,
    pub(super) n_threads: usize,
}

// SAFETY: `task` is written by the thread that holds `Pool::busy`, only while `remaining == 0`, and read by workers
// only between an epoch change (which the writer publishes after the write) and their decrement of `remaining`.
// The pointer in it is to a `Sync` closure. Every other field is `Sync` by itself.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to a particular thread.
unsafe impl Send for Shared {}

/// A lock that a panic elsewhere cannot take away: what these mutexes hold is valid at every point.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of worker `worker_idx`.
pub(super) fn work(shared: &Shared, worker_idx: usize) {
    let mut seen = 0;
    loop {
        seen = shared.wait_for_epoch(seen, worker_idx);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch moved and we have not decremented `remaining` yet, so the writer does not touch the
        // cell (see `unsafe impl Sync`).
        let task = unsafe { *shared.task.get() };
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `Pool::run` keeps the closure alive until `remaining` is zero, which needs our decrement below.
            unsafe { (task.call)(task.data, worker_idx + 1, shared.n_threads) }
        }));
        if let Err(payload) = result {
            lock(&shared.panic).get_or_insert(payload);
        }
        if shared.remaining.fetch_sub(1, Ordering::SeqCst) == 1 && shared.caller_asleep.load(Ordering::SeqCst)
        {
            // Cloned out of the lock: the caller may be on its way to take it for the next region.
            let caller = lock(&shared.caller).clone();
            if let Some(caller) = caller {
                caller.unpark();
            }
        }
    }
}

impl Shared {
    fn wait_for_epoch(&self, seen: u32, worker_idx: usize) -> u32 {
        let (mut spins, mut yields) = (0, 0);
        loop {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            let in_step = self.in_step.load(Ordering::Relaxed) > 0;
            if spins < if in_step { SPINS_IN_STEP } else { SPINS_IDLE } {
                spins += 1;
                std::hint::spin_loop();
            } else if in_step && yields < YIELDS_IN_STEP {
                yields += 1;
                thread::yield_now();
            } else {
                self.sleep(seen, worker_idx);
                (spins, yields) = (0, 0);
            }
        }
    }

    /// Parks until woken; returns at once if a region began meanwhile. May return early, like `park`.
    fn sleep(&self, seen: u32, worker_idx: usize) {
        let asleep = &self.asleep[worker_idx];
        asleep.store(true, Ordering::SeqCst);
        // Pairs with `wake_sleepers`: a caller that moved the epoch before our store is seen here, one that moves it
        // after sees the flag and unparks.
        if self.epoch.load(Ordering::SeqCst) == seen {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }

    /// Returns when every worker has left the current region.
    pub(super) fn wait_for_workers(&self) {
        for _ in 0..SPINS_IN_STEP {
            if self.remaining.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS_IN_STEP {
            if self.remaining.load(Ordering::Acquire) == 0 {
                return;
            }
            thread::yield_now();
        }
        *lock(&self.caller) = Some(thread::current());
        self.caller_asleep.store(true, Ordering::SeqCst);
        while self.remaining.load(Ordering::SeqCst) != 0 {
            thread::park();
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }
}

/// Cores that have at least one hardware thread, where the system tells.
pub(super) fn physical_cores() -> Option<usize> {
    let mut siblings = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()? {
        let path = entry.ok()?.path().join("topology/thread_siblings_list");
        if let Ok(list) = std::fs::read_to_string(path) {
            siblings.insert(list);
        }
    }
    (!siblings.is_empty()).then_some(siblings.len())
}
