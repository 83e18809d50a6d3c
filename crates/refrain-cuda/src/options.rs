//! Options of a backend.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use refrain_driver::Method;
use refrain_kernels::KernelLoadOptions;

use crate::cache::{CacheOptions, GraphMode};
use crate::progress::LoadListener;
use crate::states::N_READ;

/// Maximum number of rows with a scratch block of their own.
const MAX_VERIFIED_ROWS: usize = 32;

/// Whether cuBLASLt runs the matrix products of prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CublasLt {
    /// If it is found in the usual locations.
    #[default]
    IfFound,
    /// This file; falls back to Refrain's own kernels if it cannot be opened.
    At(PathBuf),
    /// Always use Refrain's own kernels.
    Never,
}

/// Who repeats the steps of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LoopMode {
    /// The host launches each step.
    #[default]
    Host,
    /// A graph on the device repeats the step, as long as a single sequence is decoded; otherwise the host does, and the
    /// ledger says why.
    Device,
}

impl std::fmt::Display for LoopMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LoopMode::Host => "host",
            LoopMode::Device => "device",
        })
    }
}

/// Options of a [`crate::CudaBackend`].
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Name of the model in messages.
    pub model: String,
    /// Whether steps run as graphs, and how graphs are recorded, cached and retried.
    pub graphs: CacheOptions,
    /// Whether to time every launch with events; steps then run eagerly.
    pub profile: bool,
    /// Where to load kernels from.
    pub kernels: KernelLoadOptions,
    /// Whether cuBLASLt runs the matrix products of prompts.
    pub cublaslt: CublasLt,
    /// Whether the bits of a row must depend on its own sequence alone: not on the other rows, on the bucket, or
    /// on how a prompt is divided into steps. Every number of rows then runs the same kernels with the same
    /// order of additions, at a cost.
    pub reproducible: bool,
    /// Maximum arena bytes reserved for steps larger than the first one compiled.
    pub arena_reserve_bytes: u64,
    /// Maximum arena bytes of a plan; `None` for whatever fits.
    pub arena_limit_bytes: Option<u64>,
    /// Step sizes that graphs are recorded for; other steps are padded to the next one. A prompt is split
    /// into as many steps of the largest size as it fills, plus one for the remainder: a further step costs
    /// as much as several hundred rows of padding.
    pub buckets: Vec<usize>,
    /// Row counts that decode graphs are recorded for; others are padded to the next one.
    pub row_buckets: Vec<usize>,
    /// Maximum number of decode steps in flight, up to 32: steps are launched before the caller requests
    /// their tokens.
    pub ahead: usize,
    /// Who repeats decode steps.
    pub loops: LoopMode,
    /// Interval, in steps, at which decode and training steps are compared with their eager run; `None` for
    /// never.
    pub verify_every: Option<NonZeroU32>,
    /// Callback for planned memory, before it is allocated, and for upload and compilation progress.
    pub on_load: LoadListener,
    /// Time limit of one step before its caller gets a timeout.
    pub step_limit: Duration,
    /// Time limit of compiling a plan, including recording and verifying its graphs.
    pub compile_limit: Duration,
    /// Time limit of a single driver call, except allocations and module loading.
    pub call_limit: Duration,
    /// Time limit of starting and of uploading weights.
    pub load_limit: Duration,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            model: "another model".into(),
            graphs: CacheOptions::default(),
            profile: false,
            kernels: KernelLoadOptions::default(),
            cublaslt: CublasLt::default(),
            reproducible: false,
            arena_reserve_bytes: 256 << 20,
            arena_limit_bytes: None,
            buckets: vec![1, 8, 32, 128, 256, 512],
            row_buckets: vec![1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512],
            ahead: 4,
            loops: LoopMode::default(),
            verify_every: None,
            on_load: LoadListener::default(),
            step_limit: Duration::from_secs(60),
            compile_limit: Duration::from_secs(120),
            call_limit: Duration::from_secs(5),
            load_limit: Duration::from_secs(900),
        }
    }
}

impl CudaOptions {
    /// Defaults with this mode and method.
    #[must_use]
    pub fn new(mode: GraphMode, method: Method) -> CudaOptions {
        let graphs = CacheOptions { mode, method, ..CacheOptions::default() };
        CudaOptions { graphs, ..CudaOptions::default() }
    }

    /// Number of KV blocks in addition to the pool, on which graphs are verified: each row writes to its own
    /// block, and all rows read a few others. If there are more than [`MAX_VERIFIED_ROWS`] rows, they take
    /// turns from one verification case to the next.
    pub(crate) fn scratch_blocks(&self) -> usize {
        let n_rows = self.row_buckets.iter().copied().max().unwrap_or(1);
        n_rows.min(MAX_VERIFIED_ROWS) + N_READ
    }
}
