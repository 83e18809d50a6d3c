//! How a backend is set up.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use refrain_driver::Method;
use refrain_kernels::LoadOptions;

use crate::cache::{CacheOptions, GraphMode};
use crate::progress::LoadListener;
use crate::states::N_READ;

/// Rows that have a scratch block of their own at once.
const MAX_VERIFIED_ROWS: usize = 32;

/// Whether NVIDIA's library multiplies the rows of prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CublasLt {
    /// Where it is found in the usual places.
    #[default]
    IfFound,
    /// This file; the kernels of this engine if it does not open.
    At(PathBuf),
    /// The kernels of this engine, always.
    Never,
}

/// How a [`crate::CudaBackend`] works.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// What messages call the model.
    pub model: String,
    /// Whether steps run as graphs, and how graphs are recorded, kept and given up.
    pub graphs: CacheOptions,
    /// Times every launch with events; steps then run eagerly.
    pub profile: bool,
    /// Where kernels come from.
    pub kernels: LoadOptions,
    /// What multiplies the rows of prompts.
    pub cublaslt: CublasLt,
    /// The most bytes of arena that are set aside for steps larger than the first one compiled.
    pub arena_reserve_bytes: u64,
    /// The most bytes of arena a plan may have; `None`: what fits.
    pub arena_limit_bytes: Option<u64>,
    /// Sizes of step that graphs are made for; other steps are padded to the next one. A prompt has as many steps of the
    /// largest as it fills, and what is left is one more: another step costs as much as some hundred rows of padding.
    pub buckets: Vec<usize>,
    /// Numbers of sequences that graphs of decode steps are made for; others are padded to the next one.
    pub row_buckets: Vec<usize>,
    /// Decode steps that may be under way at once, at most 32: the next ones are sent before their tokens are asked for.
    pub ahead: usize,
    /// Compares every so many decode steps of a running text with their eager run; `None`: none of them.
    pub verify_every: Option<NonZeroU32>,
    /// Hears how much memory a model takes, before any is allocated, and how far its weights are.
    pub on_load: LoadListener,
    /// How long one step may take until its caller is told that the device gives no answer.
    pub step_limit: Duration,
    /// The same for making a plan ready: weights sent, graphs recorded and verified.
    pub compile_limit: Duration,
    /// How long a single driver call may take, whatever it belongs to; allocations and modules being loaded aside.
    pub call_limit: Duration,
    /// The same for starting and for taking weights over.
    pub load_limit: Duration,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            model: "another model".into(),
            graphs: CacheOptions::default(),
            profile: false,
            kernels: LoadOptions::default(),
            cublaslt: CublasLt::default(),
            arena_reserve_bytes: 256 << 20,
            arena_limit_bytes: None,
            buckets: vec![1, 8, 32, 128, 256, 512],
            row_buckets: vec![1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512],
            ahead: 4,
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
    /// The usual ones, with this mode and method.
    #[must_use]
    pub fn new(mode: GraphMode, method: Method) -> CudaOptions {
        let graphs = CacheOptions { mode, method, ..CacheOptions::default() };
        CudaOptions { graphs, ..CudaOptions::default() }
    }

    /// KV blocks beside the pool, on which graphs are verified: each row writes to one of its own, and all read a few
    /// others. More rows than [`MAX_VERIFIED_ROWS`] take turns, from one state that a graph is verified with to the next.
    pub(crate) fn scratch_blocks(&self) -> usize {
        let n_rows = self.row_buckets.iter().copied().max().unwrap_or(1);
        n_rows.min(MAX_VERIFIED_ROWS) + N_READ
    }
}
