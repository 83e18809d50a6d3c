//! Parallel compilation of kernel units.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use crate::error::KernelError;
use crate::load::GpuArch;
use crate::source::KernelUnit;
use crate::tuning::Tuning;

/// Each compilation takes several hundred MB while it runs.
const MAX_THREADS: usize = 32;

/// A compiler of kernel units, shared by several threads.
pub(crate) trait Compiler: Sync {
    /// Cache key of a unit's code; covers everything that the code depends on.
    fn key(&self, unit: KernelUnit) -> String;
    /// The code of a unit.
    fn compile(&self, unit: KernelUnit) -> Result<Vec<u8>, KernelError>;
    /// Architecture that the code is for.
    fn arch(&self) -> GpuArch;
    /// Tuning that the code is compiled with.
    fn tuning(&self) -> &'static Tuning;
}

/// Progress of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compiling {
    /// Units compiled so far.
    pub n_done: usize,
    /// Units to compile.
    pub n_total: usize,
}

/// One thread per core available to this process.
pub(crate) fn n_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS)
}

/// Compiles units on several threads and calls `on_progress` on the calling thread. The first failure stops the
/// compilation: units not yet started are skipped.
pub(crate) fn compile(
    compiler: &dyn Compiler,
    units: &[KernelUnit],
    n_threads: usize,
    on_progress: &mut dyn FnMut(Compiling),
) -> Result<Vec<Vec<u8>>, KernelError> {
    let n_total = units.len();
    let mut code = vec![Vec::new(); n_total];
    let next = &AtomicUsize::new(0);
    if n_total > 0 {
        on_progress(Compiling { n_done: 0, n_total });
    }
    std::thread::scope(|scope| {
        let (sender, results) = channel();
        for _ in 0..n_threads.clamp(1, n_total.max(1)) {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some((idx, unit)) = take(units, next) {
                    // The receiver is gone once one compilation has failed.
                    if sender.send((idx, compiler.compile(unit))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (n_before, (idx, result)) in results.into_iter().enumerate() {
            code[idx] = result?;
            on_progress(Compiling { n_done: n_before + 1, n_total });
        }
        Ok(code)
    })
}

fn take(units: &[KernelUnit], next: &AtomicUsize) -> Option<(usize, KernelUnit)> {
    let idx = next.fetch_add(1, Ordering::Relaxed);
    units.get(idx).map(|unit| (idx, *unit))
}
