//! A thread pool built for running the steps of a plan.
//!
//! A step is a few hundred short parallel regions in a row. Between the regions of a step the workers spin, so
//! that a region starts in well under a microsecond. Between steps they park and cost nothing. The caller is
//! thread 0.
//!
//! Invariant: a region does not allocate, and returns only after every thread has left it, even on panic.
//! Invariant: at most the pool's threads and its callers run. A caller that finds the pool busy works alone.

mod cores; // number of threads for this machine
mod region; // start and end of a region
mod split; // dividing work among threads
mod sync; // atomics, locks, cells, spin limits

pub use split::{Chunks, Zipped, chunk_range, static_range};

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle, Thread};

use region::PoolShared;

/// Why a pool could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A pool needs at least the calling thread.
    #[error("a pool needs at least 1 thread, but 0 were requested")]
    NoThreads,
    /// The system refused a thread.
    #[error("worker thread {started} of {wanted} could not be started")]
    Spawn {
        /// Workers started so far.
        started: usize,
        /// Workers requested.
        wanted: usize,
        /// Error from the system.
        #[source]
        source: std::io::Error,
    },
}

impl PoolError {
    /// Suggested fix, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PoolError::NoThreads => Some("use at least 1 thread"),
            PoolError::Spawn { .. } => Some("use fewer threads, or raise the process limit"),
        }
    }
}

/// Default number of threads: as many as the scheduler and the cgroup allow, but one per core.
///
/// A second hardware thread on a core adds neither memory bandwidth nor multipliers, so it only slows a step
/// down.
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
    /// The threads of `workers`, to wake them without their join handles.
    wake: Vec<Thread>,
}

impl Pool {
    /// Returns a pool of `n_threads`, including the caller of [`Pool::run`].
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
            // On failure `pool` is dropped, which stops and joins the workers that started.
            let handle = thread::Builder::new()
                .name(format!("refrain-cpu-{}", worker_idx + 1))
                .spawn(move || region::work(&shared, worker_idx))
                .map_err(|source| PoolError::Spawn { started: worker_idx, wanted: n_threads - 1, source })?;
            pool.wake.push(handle.thread().clone());
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Returns the pool of `n_threads` that the whole process shares. It lives from the first to the last user.
    ///
    /// Several threads may use it concurrently: a region that finds it busy runs on its caller alone.
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

    /// Number of threads in the pool, including the caller.
    pub fn n_threads(&self) -> usize {
        self.shared.n_threads()
    }

    /// Keeps the workers spinning instead of parking until the guard is dropped. Steps may nest.
    pub fn step(&self) -> StepGuard<'_> {
        self.shared.begin_step(&self.wake);
        StepGuard { pool: self }
    }

    /// Runs `f(thread_idx, n_threads)` on every thread and returns when all have finished.
    ///
    /// A region that starts while another is in progress, inside it or on another thread, runs on the calling
    /// thread alone as `f(0, 1)`. So `f` must derive its share from `n_threads`, as [`static_range`] does.
    ///
    /// # Panics
    /// If `f` panics on any thread, the first panic resumes on the caller after all threads have finished.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, f: F) {
        self.shared.run(&self.wake, f);
    }

    /// Calls `f(chunk_idx, chunk)` on consecutive chunks of `data` of `chunk_len` elements (the last may be
    /// shorter), in parallel. The assignment of chunks to threads varies, so results must not depend on it.
    pub fn chunks_mut<T: Send, F: Fn(usize, &mut [T]) + Sync>(&self, data: &mut [T], chunk_len: usize, f: F) {
        let chunks = Chunks::new(data, chunk_len);
        self.run(|_, _| {
            while let Some((chunk_idx, chunk)) = chunks.next() {
                f(chunk_idx, chunk);
            }
        });
    }

    /// Calls `f(chunk_idx, chunks, local)` with chunk `chunk_idx` of each slice, in parallel. Each slice comes
    /// with its number of elements per chunk. `local` is split into one part per thread, whose content persists
    /// between the thread's calls. The assignment of chunks to threads varies, so results must not depend on
    /// it.
    pub fn zip_chunks<T: Send, O: Send, const N: usize>(
        &self,
        slices: [(&mut [T], usize); N],
        local: &mut [O],
        f: impl Fn(usize, [&mut [T]; N], &mut [O]) + Sync,
    ) {
        let (chunks, local) = (Zipped::new(slices), split::ThreadParts::new(local, self.n_threads()));
        self.run(|thread_idx, _| {
            // SAFETY: a region calls this once per thread, with an index below the number of threads.
            let local = unsafe { local.part(thread_idx) };
            while let Some((chunk_idx, chunks)) = chunks.next() {
                f(chunk_idx, chunks, local);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop(&self.wake);
        for worker in self.workers.drain(..) {
            // Workers catch panics in regions, so there is no panic to propagate.
            let _ = worker.join();
        }
    }
}

/// Keeps the pool's workers spinning between regions while it lives. Created by [`Pool::step`].
#[must_use = "the workers park again when the step is dropped"]
pub struct StepGuard<'a> {
    pool: &'a Pool,
}

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        self.pool.shared.end_step();
    }
}
