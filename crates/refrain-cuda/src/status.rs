//! State and counters of a backend, for summaries and metrics.

use std::time::Duration;

use refrain_driver::{Graph, Method, NodeKind};
use refrain_kernels::KernelOrigin;

use crate::cache::CacheStats;
use crate::compare::Compared;
use crate::error::HeldBytes;
use crate::prefill::PromptProducts;
use crate::profile::ProfileRow;
use crate::queue::QueueStats;
use crate::resident::{Accounting, Upload};
use crate::verify::Verified;

/// Kernel units, which are compiled separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelUnits {
    /// Units that are in the binary or the cache.
    pub n_ready: usize,
    /// Total number of units.
    pub n_all: usize,
}

/// One graph in service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphLine {
    /// Tokens per step.
    pub n_tokens: usize,
    /// Nodes.
    pub n_nodes: usize,
    /// Kernel nodes.
    pub n_kernels: usize,
    /// Recording method.
    pub method: Method,
    /// Time to record.
    pub record_time: Duration,
    /// Time to verify.
    pub verify_time: Duration,
    /// Bytes compared per verification case.
    pub verified_bytes: u64,
    /// Compared bytes that no kernel had written in the last case.
    pub unwritten_bytes: u64,
    /// Whether the replay equals the eager run bit for bit.
    pub bit_exact: bool,
    /// Whether the step's choice is its next input, so that steps can be launched ahead.
    pub feeds_itself: bool,
}

impl GraphLine {
    pub(crate) fn new(graph: &Verified<Graph>, n_tokens: usize, feeds_itself: bool) -> GraphLine {
        let (info, report) = (graph.info(), graph.report());
        GraphLine {
            n_tokens,
            n_nodes: info.nodes.len(),
            n_kernels: info.count(NodeKind::Kernel),
            method: info.method,
            record_time: info.record_time,
            verify_time: report.took,
            verified_bytes: report.bytes,
            unwritten_bytes: report.unwritten_bytes,
            bit_exact: report.bit_exact,
            feeds_itself,
        }
    }
}

/// State and counters of a backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Bytes on the device.
    pub memory: Accounting,
    /// Memory that other models of this process held when a plan was last compiled.
    pub others: Vec<HeldBytes>,
    /// Statistics of the weight upload.
    pub upload: Upload,
    /// Graphs in service, by step size.
    pub graphs: Vec<GraphLine>,
    /// Counts of recordings, replays and failures.
    pub cache: CacheStats,
    /// Continuous verification of decode and training steps.
    pub compared: Compared,
    /// Statistics of queued steps.
    pub queued: QueueStats,
    /// Where the kernels came from.
    pub kernels: Option<KernelOrigin>,
    /// What runs the matrix products of prompts.
    pub prompt_products: Option<PromptProducts>,
    /// Whether the bits of a row depend on its own sequence alone ([`crate::CudaOptions::reproducible`]).
    pub reproducible: bool,
    /// Groups that run as several launches where one was possible, each with the label of its step and the
    /// reason.
    pub unfused: Vec<String>,
    /// Timings of every launch so far; empty unless [`crate::CudaOptions::profile`] is on.
    pub profile: Vec<ProfileRow>,
    /// Peak memory bandwidth in bytes per second, from the memory clock and bus width; `None` if these are
    /// unknown.
    pub peak_bytes_per_second: Option<f64>,
}
