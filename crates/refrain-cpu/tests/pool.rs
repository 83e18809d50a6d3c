//! The thread pool: coverage, panics, nesting, and a long mix of steps and regions.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use refrain_cpu::pool::{Chunks, Pool, PoolError, chunk_range, default_threads, static_range};

#[test]
fn every_thread_runs_a_region_once() {
    for n_threads in 1..=5 {
        let pool = Pool::new(n_threads).unwrap();
        for _ in 0..200 {
            let ran: Vec<AtomicUsize> = (0..n_threads).map(|_| AtomicUsize::new(0)).collect();
            pool.run(|thread_idx, n| {
                assert_eq!(n, n_threads);
                ran[thread_idx].fetch_add(1, Ordering::Relaxed);
            });
            assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn the_next_region_sees_the_writes_of_a_region() {
    let pool = Pool::new(3).unwrap();
    let mut data = vec![0u64; 4096];
    let step = pool.step();
    for round in 0..2_000u64 {
        pool.chunks_mut(&mut data, 100, |chunk_idx, chunk| {
            for (i, v) in chunk.iter_mut().enumerate() {
                assert_eq!(*v, if round == 0 { 0 } else { round - 1 + (chunk_idx * 100 + i) as u64 });
                *v = round + (chunk_idx * 100 + i) as u64;
            }
        });
    }
    drop(step);
}

#[test]
fn no_mix_of_steps_and_idle_times_loses_a_region() {
    let pool = Pool::new(4).unwrap();
    let total = AtomicU64::new(0);
    let mut want = 0;
    for round in 0..300u64 {
        let step = (round % 3 != 0).then(|| pool.step());
        for _ in 0..round % 7 {
            pool.run(|thread_idx, _| {
                total.fetch_add(thread_idx as u64 + 1, Ordering::Relaxed);
            });
            want += 10;
        }
        if round % 11 == 0 {
            // Long enough for the workers to park, so that waking them is tested too.
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(step);
    }
    assert_eq!(total.into_inner(), want);
}

#[test]
fn a_region_waits_for_a_slow_worker() {
    let pool = Pool::new(2).unwrap();
    let done = AtomicUsize::new(0);
    pool.run(|thread_idx, _| {
        if thread_idx == 1 {
            std::thread::sleep(Duration::from_millis(60));
        }
        done.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(done.into_inner(), 2);
}

#[test]
fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_stays_usable() {
    let pool = Pool::new(3).unwrap();
    for guilty in 0..3 {
        let finished = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|thread_idx, _| {
                if thread_idx == guilty {
                    panic!("thread {guilty} gave up");
                }
                finished.fetch_add(1, Ordering::SeqCst);
            });
        }));
        let payload = result.unwrap_err();
        assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("thread {guilty} gave up"));
        assert_eq!(finished.into_inner(), 2);
    }
    let everywhere = catch_unwind(AssertUnwindSafe(|| pool.run(|_, _| panic!("all"))));
    assert_eq!(everywhere.unwrap_err().downcast_ref::<&str>(), Some(&"all"));
    let count = AtomicUsize::new(0);
    pool.run(|_, _| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(count.into_inner(), 3);
}

#[test]
fn a_nested_region_runs_on_the_calling_thread() {
    let pool = Pool::new(2).unwrap();
    let inner = AtomicUsize::new(0);
    pool.run(|_, _| {
        pool.run(|thread_idx, n_threads| {
            assert_eq!((thread_idx, n_threads), (0, 1));
            inner.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(inner.into_inner(), 2);
}

#[test]
fn regions_from_many_threads_all_complete() {
    let pool = Pool::new(2).unwrap();
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    pool.run(|thread_idx, n_threads| {
                        total.fetch_add(static_range(60, 1, thread_idx, n_threads).len(), Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 4 * 500 * 60);
}

#[test]
fn static_ranges_cover_everything_once_at_aligned_cuts() {
    for n in [0, 1, 15, 16, 17, 100, 2048, 49152] {
        for align in [1, 16] {
            for n_parts in [1, 2, 3, 8, 200] {
                let mut next = 0;
                for part in 0..n_parts {
                    let range = static_range(n, align, part, n_parts);
                    assert_eq!(range.start, next);
                    assert!(range.end == n || range.end.is_multiple_of(align));
                    next = range.end;
                }
                assert_eq!(next, n);
            }
        }
    }
    assert_eq!(static_range(usize::MAX, 16, 1, 2).end, usize::MAX);
    assert_eq!(chunk_range(10, 4, 2), Some(8..10));
    assert_eq!(chunk_range(10, 4, 3), None);
}

#[test]
fn chunks_are_handed_out_once_each() {
    let mut data = [0u8; 103];
    let chunks = Chunks::new(&mut data, 10);
    let mut seen = Vec::new();
    while let Some((chunk_idx, chunk)) = chunks.next() {
        chunk.fill(1);
        seen.push((chunk_idx, chunk.len()));
    }
    assert_eq!(seen.len(), 11);
    assert_eq!(seen[10], (10, 3));
    assert_eq!(data, [1; 103]);
}

#[test]
fn zero_threads_are_refused_and_the_default_fits_the_machine() {
    assert!(matches!(Pool::new(0), Err(PoolError::NoThreads)));
    let n = default_threads();
    assert!(n >= 1 && n <= std::thread::available_parallelism().unwrap().get());
}

#[test]
fn users_of_the_same_number_of_threads_share_a_pool_while_one_of_them_lives() {
    let (one, two) = (Pool::shared(3).unwrap(), Pool::shared(3).unwrap());
    assert!(Arc::ptr_eq(&one, &two));
    assert_eq!(Pool::shared(2).unwrap().n_threads(), 2);
    assert!(matches!(Pool::shared(0), Err(PoolError::NoThreads)));
    let gone = Arc::downgrade(&one);
    drop((one, two));
    assert!(gone.upgrade().is_none());
    assert_eq!(Pool::shared(3).unwrap().n_threads(), 3);
}

#[test]
fn zipped_chunks_match_and_each_thread_has_its_own_part() {
    for n_threads in [1, 2, 5] {
        let pool = Pool::new(n_threads).unwrap();
        let (mut a, mut b) = (vec![0usize; 1003], vec![0usize; 11]);
        let mut own = vec![0usize; 3 * n_threads];
        pool.zip_chunks([(&mut a, 100), (&mut b, 1)], &mut own, |chunk_idx, [a, b], own| {
            assert_eq!((a.len(), b.len(), own.len()), (if chunk_idx == 10 { 3 } else { 100 }, 1, 3));
            a.fill(chunk_idx + 1);
            b[0] += chunk_idx + 1;
            own[2] += 1;
        });
        assert!(a.iter().enumerate().all(|(i, &v)| v == i / 100 + 1), "{a:?}");
        assert!(b.iter().enumerate().all(|(i, &v)| v == i + 1), "{b:?}");
        assert_eq!(own.iter().sum::<usize>(), 11, "each chunk is counted in one thread's part: {own:?}");
        // A slice that is shorter than the others gives empty chunks at the end.
        let n = AtomicUsize::new(0);
        pool.zip_chunks([(&mut a, 500), (&mut b, 1)], &mut own, |chunk_idx, [a, b], _| {
            assert_eq!((a.is_empty(), b.len()), (chunk_idx > 2, 1));
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.into_inner(), 11);
    }
}
