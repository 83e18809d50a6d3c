//! Start and end of the pool's regions, in all interleavings (up to a bound on preemptions) and with every
//! value that the memory model allows a load to return. loom also reports unordered accesses to an `UnsafeCell`
//! and threads that wait forever: a lost wake-up.

#[path = "loom_common/mod.rs"]
mod sync;

#[expect(dead_code, reason = "the models know how many threads they have")]
#[path = "../src/pool/region.rs"]
mod region;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc; // not loom's, so that it does not order anything in a model

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread::{self, JoinHandle, Thread};

use region::PoolShared;

/// A thread that is joined by spinning. An `unpark` may arrive late, after its thread has moved on, and loom's
/// own `join` would take it for the end of the thread.
struct Joined {
    handle: JoinHandle<()>,
    ended: Arc<AtomicBool>,
}

impl Joined {
    fn spawn(body: impl FnOnce() + 'static) -> Joined {
        let ended = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ended);
        let handle = thread::spawn(move || {
            body();
            flag.store(true, Ordering::Release);
        });
        Joined { handle, ended }
    }

    fn join(self) {
        while !self.ended.load(Ordering::Acquire) {
            thread::yield_now();
        }
        self.handle.join().unwrap();
    }
}

/// The pool, reduced to its synchronisation.
struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<Joined>,
    wake: Vec<Thread>,
}

impl Pool {
    fn new(n_threads: usize) -> Pool {
        let shared = Arc::new(PoolShared::new(n_threads));
        let start = |worker_idx| {
            let shared = Arc::clone(&shared);
            Joined::spawn(move || region::work(&shared, worker_idx))
        };
        let workers: Vec<_> = (0..n_threads - 1).map(start).collect();
        let wake = workers.iter().map(|w| w.handle.thread().clone()).collect();
        Pool { shared, workers, wake }
    }

    fn run(&self, f: impl Fn(usize, usize) + Sync) {
        self.shared.run(&self.wake, f);
    }

    fn end(self) {
        self.shared.stop(&self.wake);
        self.workers.into_iter().for_each(Joined::join);
    }
}

/// One cell per thread of a region, like the rows of an output.
struct Rows(Vec<UnsafeCell<usize>>);

// SAFETY: loom checks that no two threads access a cell at the same time.
unsafe impl Sync for Rows {}

impl Rows {
    fn new(n: usize) -> Rows {
        Rows((0..n).map(|_| UnsafeCell::new(0)).collect())
    }

    fn add(&self, row_idx: usize, value: usize) {
        // SAFETY: as for `Sync`.
        self.0[row_idx].with_mut(|row| unsafe { *row += value });
    }

    fn values(&self) -> Vec<usize> {
        // SAFETY: as for `Sync`.
        self.0.iter().map(|row| row.with(|row| unsafe { *row })).collect()
    }
}

fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn regions(n_threads: usize, n_regions: usize) {
    let pool = Pool::new(n_threads);
    for value in 1..=n_regions {
        let rows = Rows::new(n_threads);
        pool.run(|thread_idx, n| {
            assert_eq!(n, n_threads);
            rows.add(thread_idx, value);
        });
        assert_eq!(rows.values(), vec![value; n_threads], "every thread has run the region once");
    }
    pool.end();
}

#[test]
fn regions_in_a_row_run_once_on_every_thread_and_end_when_all_have_left() {
    model(3, || regions(2, 2));
}

#[test]
fn a_region_wakes_and_waits_for_two_workers() {
    model(2, || regions(3, 1));
}

#[test]
fn acquire_and_release_suffice_to_start_and_end_a_region() {
    sync::FENCED.set(false);
    sync::PARKS_RETURN_EARLY.set(true);
    model(3, || regions(2, 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_up_lost_without_sequential_consistency_is_detected() {
    sync::FENCED.set(false);
    model(3, || regions(2, 1));
}

#[test]
fn a_step_that_begins_and_ends_around_sleeping_workers_loses_no_region() {
    model(3, || {
        let pool = Pool::new(2);
        let rows = Rows::new(2);
        pool.shared.begin_step(&pool.wake);
        pool.run(|thread_idx, _| rows.add(thread_idx, 1));
        pool.shared.end_step();
        assert_eq!(rows.values(), [1, 1]);
        pool.end();
    });
}

#[test]
fn a_pool_that_never_ran_ends() {
    model(3, || Pool::new(3).end());
}

#[test]
fn a_panic_on_a_worker_reaches_the_caller_and_the_pool_stays_usable() {
    model(3, || {
        let pool = Pool::new(2);
        let rows = Rows::new(2);
        let thrown = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|thread_idx, _| {
                rows.add(thread_idx, 1);
                if thread_idx == 1 {
                    resume_unwind(Box::new("a worker's"));
                }
            });
        }));
        assert_eq!(thrown.unwrap_err().downcast_ref(), Some(&"a worker's"));
        pool.run(|thread_idx, _| rows.add(thread_idx, 1));
        assert_eq!(rows.values(), [2, 2]);
        pool.end();
    });
}

#[test]
fn a_panic_on_the_caller_propagates_only_after_the_workers_have_left() {
    model(3, || {
        let pool = Pool::new(2);
        let rows = Rows::new(2);
        let thrown = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|thread_idx, _| match thread_idx {
                0 => resume_unwind(Box::new("the caller's")),
                _ => rows.add(thread_idx, 1),
            });
        }));
        assert_eq!(thrown.unwrap_err().downcast_ref(), Some(&"the caller's"));
        assert_eq!(rows.values(), [0, 1]);
        pool.end();
    });
}

#[test]
fn concurrent_callers_each_have_their_region_completed() {
    model(2, || {
        let pool = Arc::new(Pool::new(2));
        let region = |pool: &Pool| {
            let rows = Rows::new(2);
            pool.run(|thread_idx, n_threads| {
                (thread_idx..2).step_by(n_threads).for_each(|row_idx| rows.add(row_idx, 1));
            });
            assert_eq!(rows.values(), [1, 1]);
        };
        let shared = Arc::clone(&pool);
        let other = Joined::spawn(move || {
            region(&shared);
            drop(shared);
        });
        region(&pool);
        other.join();
        Arc::try_unwrap(pool).ok().expect("the other caller has left").end();
    });
}
