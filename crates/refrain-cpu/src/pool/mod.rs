//! One thread pool made for running the steps of a plan.
//!
//! A step is a few hundred short parallel regions in a row. Between the regions of a step workers spin, so that a
//! region starts in well under a microsecond; between steps they park and cost nothing. The caller is thread 0.
//!
//! Invariant: a region allocates nothing, and returns only after every thread has left it, panics included.
//! Invariant: the pool has as many threads at work as it was made with, and its callers: one that finds it busy works alone.

mod cores; // how many threads suit the machine
mod region; // how a region starts and ends
mod split; // ways to divide work
mod sync; // what a region is made of

pub use split::{Chunks, Zipped, chunk_range, static_range};

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle, Thread};

use region::PoolShared;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A pool needs the caller at least.
    #[error("a pool needs at least 1 thread, 0 were asked for")]
    NoThreads,
    /// The system refused a thread.
    #[error("worker thread {started} of {wanted} could not be started")]
    Spawn {
        /// Workers running so far.
        started: usize,
        /// Workers asked for.
        wanted: usize,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl PoolError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PoolError::NoThreads => Some("pass --threads 1 or more, or leave it out"),
            PoolError::Spawn { .. } => Some("pass a smaller --threads, or raise the process limit"),
        }
    }
}

/// Threads that suit this machine: what the scheduler and the cgroup allow, without a second thread per core.
///
/// A second hardware thread on a core adds no memory bandwidth and no multiplier, so it only slows a step down.
pub fn default_threads() -> usize {
    let allowed = thread::available_parallelism().map_or(1, |n| n.get());
    cores::physical_cores().map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// A fixed set of threads that run parallel regions together.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let pool = refrain_cpu::pool::Pool::new(2)?;
/// let sum = AtomicUsize::new(0);
/// let step = pool.step();
/// pool.run(|thread_idx, n_threads| {
///     for i in refrain_cpu::pool::static_range(10, 1, thread_idx, n_threads) {
///         sum.fetch_add(i, Ordering::Relaxed);
///     }
/// });
/// drop(step);
/// assert_eq!(sum.into_inner(), 45);
/// # Ok::<(), refrain_cpu::pool::PoolError>(())
/// ```
pub struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
    /// The same threads as `workers`, for waking them without touching the handles.
    wake: Vec<Thread>,
}

impl Pool {
    /// A pool of `n_threads`, the caller of [`Pool::run`] included.
    pub fn new(n_threads: usize) -> Result<Pool, PoolError> {
        if n_threads == 0 {
            return Err(PoolError::NoThreads);
        }
        let mut pool = Pool {
            shared: Arc::new(PoolShared::new(n_threads)),
            workers: Vec::with_capacity(n_threads - 1),
            wake: Vec::with_capacity(n_threads - 1),
        };
        for worker_idx in 0..n_threads - 1 {
            let shared = Arc::clone(&pool.shared);
            // On failure `pool` is dropped, which stops and joins the workers that did start.
            let handle = thread::Builder::new()
                .name(format!("refrain-cpu-{}", worker_idx + 1))
                .spawn(move || region::work(&shared, worker_idx))
                .map_err(|source| PoolError::Spawn { started: worker_idx, wanted: n_threads - 1, source })?;
            pool.wake.push(handle.thread().clone());
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// The pool of `n_threads` that the whole process shares; made for the first who asks, gone with the last.
    ///
    /// Callers on several threads may use it at once: a region that finds it busy runs on its caller alone.
    pub fn shared(n_threads: usize) -> Result<Arc<Pool>, PoolError> {
        static POOLS: Mutex<Vec<(usize, Weak<Pool>)>> = Mutex::new(Vec::new());
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(_, pool)| pool.strong_count() > 0);
        let known = pools.iter().find(|(n, _)| *n == n_threads).and_then(|(_, pool)| pool.upgrade());
        if let Some(pool) = known {
            return Ok(pool);
        }
        let pool = Arc::new(Pool::new(n_threads)?);
        pools.push((n_threads, Arc::downgrade(&pool)));
        Ok(pool)
    }

    /// Threads in the pool, the caller included.
    pub fn n_threads(&self) -> usize {
        self.shared.n_threads()
    }

    /// Keeps the workers spinning, not parked, until the guard is dropped. Steps may nest.
    pub fn step(&self) -> StepGuard<'_> {
        self.shared.begin_step(&self.wake);
        StepGuard { pool: self }
    }

    /// Runs `f(thread_idx, n_threads)` on every thread and returns when all have finished.
    ///
    /// A region begun while another one is under way, from inside it or from another thread, runs on the calling
    /// thread alone as `f(0, 1)`: so `f` must take its share from `n_threads`, as [`static_range`] does.
    ///
    /// # Panics
    /// If `f` panics on any thread, the first panic is carried to the caller after all threads have finished.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, f: F) {
        self.shared.run(&self.wake, f);
    }

    /// Calls `f(chunk_idx, chunk)` for consecutive chunks of `data` of `chunk_len` elements (the last may be
    /// shorter), spread over the threads. Who computes a chunk is not fixed; what `f` writes must not depend on it.
    pub fn chunks_mut<T: Send, F: Fn(usize, &mut [T]) + Sync>(&self, data: &mut [T], chunk_len: usize, f: F) {
        let chunks = Chunks::new(data, chunk_len);
        self.run(|_, _| {
            while let Some((chunk_idx, chunk)) = chunks.next() {
                f(chunk_idx, chunk);
            }
        });
    }

    /// Calls `f(chunk_idx, chunks, own)` for chunk number `chunk_idx` of each slice, spread over the threads; beside each
    /// slice stands how many elements a chunk of it has. `own` is cut into one part for each thread, which holds what the
    /// thread left there: who computes a chunk is not fixed, and what `f` writes to the chunks must not depend on it.
    pub fn zip_chunks<T: Send, O: Send, const N: usize>(
        &self,
        slices: [(&mut [T], usize); N],
        own: &mut [O],
        f: impl Fn(usize, [&mut [T]; N], &mut [O]) + Sync,
    ) {
        let (chunks, own) = (Zipped::new(slices), split::ThreadParts::new(own, self.n_threads()));
        self.run(|thread_idx, _| {
            // SAFETY: a region calls this once for each thread, whose index is below the number of threads.
            let own = unsafe { own.part(thread_idx) };
            while let Some((chunk_idx, chunks)) = chunks.next() {
                f(chunk_idx, chunks, own);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop(&self.wake);
        for worker in self.workers.drain(..) {
            // A worker catches what its regions throw, so there is no panic to pass on.
            let _ = worker.join();
        }
    }
}

/// While this lives, the pool's workers spin between regions. Made by [`Pool::step`].
#[must_use = "the workers park again when the step is dropped"]
pub struct StepGuard<'a> {
    pool: &'a Pool,
}

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        self.pool.shared.end_step();
    }
}
