//! A parallel region, on both sides: the caller starts it and waits for its end; workers wait for a region, run
//! it and report completion.
//!
//! Invariant: atomics, locks, cells and threads come from `sync` only. `tests/loom_pool.rs` compiles this file
//! with loom's versions of them and runs it through all interleavings.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

use super::sync::{
    AtomicBool, AtomicU32, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, SPINS_IDLE, SPINS_IN_STEP,
    Thread, UnsafeCell, YIELDS_IN_STEP, spin_loop, thread,
};

/// Closure of a region, type-erased without allocation.
#[derive(Clone, Copy)]
struct RegionTask {
    data: *const (),
    call: unsafe fn(*const (), usize, usize),
}

impl RegionTask {
    const NONE: RegionTask = RegionTask { data: std::ptr::null(), call: |_, _, _| {} };

    fn new<F: Fn(usize, usize) + Sync>(f: &F) -> RegionTask {
        unsafe fn call<F: Fn(usize, usize) + Sync>(data: *const (), thread_idx: usize, n_threads: usize) {
            // SAFETY: `data` came from `&F` in `RegionTask::new`, and `PoolShared::run` keeps that borrow alive
            // for as long as any worker may call it.
            let f = unsafe { &*data.cast::<F>() };
            f(thread_idx, n_threads);
        }
        RegionTask { data: std::ptr::from_ref(f).cast(), call: call::<F> }
    }
}

/// State shared by the caller and the workers of a pool.
pub(super) struct PoolShared {
    /// Set while a region runs; the thread that set it owns `task`.
    busy: AtomicBool,
    /// Incremented for each region; a worker runs the task when it sees a new value.
    epoch: AtomicU32,
    /// Workers that have not finished the current region.
    remaining: AtomicUsize,
    task: UnsafeCell<RegionTask>,
    /// Number of live `StepGuard`s.
    in_step: AtomicUsize,
    stop: AtomicBool,
    asleep: Box<[AtomicBool]>,
    caller_asleep: AtomicBool,
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    n_threads: usize,
}

// SAFETY: `task` is written by the thread that holds `busy`, only while `remaining == 0`, and read by workers
// only between an epoch change (which the writer publishes after the write) and their decrement of `remaining`.
// The pointer in it is to a `Sync` closure. Every other field is `Sync` by itself.
unsafe impl Sync for PoolShared {}
// SAFETY: as above; nothing in it belongs to a particular thread.
unsafe impl Send for PoolShared {}

/// Locks even if a panic poisoned the mutex: the values in these mutexes are valid at every point.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Main loop of worker `worker_idx`.
pub(super) fn work(shared: &PoolShared, worker_idx: usize) {
    let mut seen = 0;
    loop {
        seen = shared.wait_for_epoch(seen, worker_idx);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch changed and we have not decremented `remaining` yet, so the writer does not touch
        // the cell (see `unsafe impl Sync`).
        let task = shared.task.with(|task| unsafe { *task });
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `PoolShared::run` keeps the closure alive until `remaining` is zero, which needs our
            // decrement below.
            unsafe { (task.call)(task.data, worker_idx + 1, shared.n_threads) }
        }));
        if let Err(payload) = result {
            lock(&shared.panic).get_or_insert(payload);
        }
        if shared.remaining.fetch_sub(1, Ordering::SeqCst) == 1 && shared.caller_asleep.load(Ordering::SeqCst)
        {
            // Clone the handle out of the lock: the caller may be about to lock it for the next region.
            let caller = lock(&shared.caller).clone();
            if let Some(caller) = caller {
                caller.unpark();
            }
        }
    }
}

impl PoolShared {
    /// For the caller and `n_threads - 1` workers.
    pub(super) fn new(n_threads: usize) -> PoolShared {
        PoolShared {
            busy: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            remaining: AtomicUsize::new(0),
            task: UnsafeCell::new(RegionTask::NONE),
            in_step: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            asleep: (1..n_threads).map(|_| AtomicBool::new(false)).collect(),
            caller_asleep: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            n_threads,
        }
    }

    pub(super) fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Begins a step: wakes `workers`, which then spin between regions.
    pub(super) fn begin_step(&self, workers: &[Thread]) {
        self.in_step.fetch_add(1, Ordering::SeqCst);
        self.wake_sleepers(workers);
    }

    pub(super) fn end_step(&self) {
        self.in_step.fetch_sub(1, Ordering::SeqCst);
    }

    /// Runs `f` as a region on this thread and all `workers`, or as `f(0, 1)` if another region is in progress.
    pub(super) fn run<F: Fn(usize, usize) + Sync>(&self, workers: &[Thread], f: F) {
        if workers.is_empty() || self.busy.swap(true, Ordering::Acquire) {
            f(0, 1);
            return;
        }
        // SAFETY: `busy` was false and is now ours, and the previous region ended with `remaining == 0`, so no
        // worker reads the cell until the epoch moves. The task borrows `f`; `run` keeps `f` alive until
        // `wait_for_workers` has seen every worker leave it, on the panic path too.
        self.task.with_mut(|task| unsafe { *task = RegionTask::new(&f) });
        self.remaining.store(workers.len(), Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake_sleepers(workers);

        let mine = panic::catch_unwind(AssertUnwindSafe(|| f(0, self.n_threads)));
        self.wait_for_workers();
        let theirs = lock(&self.panic).take();
        self.busy.store(false, Ordering::Release);
        if let Some(payload) = mine.err().or(theirs) {
            panic::resume_unwind(payload);
        }
    }

    /// Stops `workers`, which can then be joined.
    pub(super) fn stop(&self, workers: &[Thread]) {
        self.stop.store(true, Ordering::SeqCst);
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake_sleepers(workers);
    }

    fn wake_sleepers(&self, workers: &[Thread]) {
        for (asleep, worker) in self.asleep.iter().zip(workers) {
            // Pairs with the store in `PoolShared::sleep`: either we see the flag, or the worker sees the new
            // epoch.
            if asleep.load(Ordering::SeqCst) {
                worker.unpark();
            }
        }
    }

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
                spin_loop();
            } else if in_step && yields < YIELDS_IN_STEP {
                yields += 1;
                thread::yield_now();
            } else {
                self.sleep(seen, worker_idx);
                (spins, yields) = (0, 0);
            }
        }
    }

    /// Parks until woken; returns immediately if a region has started in the meantime. May return early, like
    /// `park`.
    fn sleep(&self, seen: u32, worker_idx: usize) {
        let asleep = &self.asleep[worker_idx];
        asleep.store(true, Ordering::SeqCst);
        // Pairs with `wake_sleepers`: if the caller changed the epoch before our store, we see it here; if it
        // changes the epoch later, it sees the flag and unparks us.
        if self.epoch.load(Ordering::SeqCst) == seen {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }

    /// Returns when every worker has left the current region.
    fn wait_for_workers(&self) {
        for _ in 0..SPINS_IN_STEP {
            if self.remaining.load(Ordering::Acquire) == 0 {
                return;
            }
            spin_loop();
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
