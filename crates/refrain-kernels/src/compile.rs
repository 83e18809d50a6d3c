//! Units to code, on all cores.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use crate::error::KernelError;
use crate::load::GpuArch;
use crate::source::KernelUnit;
use crate::tuning::Tuning;

/// Each compilation takes some hundred MB while it runs.
const MAX_THREADS: usize = 32;

/// What makes code of units. Several threads use one.
pub(crate) trait Compiler: Sync {
    /// A name for a unit's code, made of all that the code depends on.
    fn key(&self, unit: KernelUnit) -> String;
    /// The code of a unit.
    fn compile(&self, unit: KernelUnit) -> Result<Vec<u8>, KernelError>;
    /// What the code is for.
    fn arch(&self) -> GpuArch;
    /// What it is compiled with.
    fn tuning(&self) -> &'static Tuning;
}

/// How far a compilation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compiling {
    /// Units that are compiled.
    pub n_done: usize,
    /// Units to compile.
    pub n_total: usize,
}

/// One thread for each core, as far as they are allowed to this process.
pub(crate) fn n_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS)
}

/// Compiles units on several threads; what `hear` gets comes on this one. The first failure ends it: units that were not
/// begun are left.
pub(crate) fn compile(
    compiler: &dyn Compiler,
    units: &[KernelUnit],
    n_threads: usize,
    hear: &mut dyn FnMut(Compiling),
) -> Result<Vec<Vec<u8>>, KernelError> {
    let n_total = units.len();
    let mut code = vec![Vec::new(); n_total];
    let next = &AtomicUsize::new(0);
    if n_total > 0 {
        hear(Compiling { n_done: 0, n_total });
    }
    std::thread::scope(|scope| {
        let (sender, results) = channel();
        for _ in 0..n_threads.clamp(1, n_total.max(1)) {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some((idx, unit)) = take(units, next) {
                    // Nobody receives once one has failed.
                    if sender.send((idx, compiler.compile(unit))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (n_before, (idx, result)) in results.into_iter().enumerate() {
            code[idx] = result?;
            hear(Compiling { n_done: n_before + 1, n_total });
        }
        Ok(code)
    })
}

fn take(units: &[KernelUnit], next: &AtomicUsize) -> Option<(usize, KernelUnit)> {
    let idx = next.fetch_add(1, Ordering::Relaxed);
    units.get(idx).map(|unit| (idx, *unit))
}
