//! What a backend holds and has done, for summaries and metrics.

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

/// Kernels, as they are compiled: in units of a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelUnits {
    /// Units that the binary or the cache has.
    pub n_ready: usize,
    /// Units in all.
    pub n_all: usize,
}

/// One graph in service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphLine {
    /// Tokens of its step.
    pub n_tokens: usize,
    /// Nodes.
    pub n_nodes: usize,
    /// Kernels among them.
    pub n_kernels: usize,
    /// How it was recorded.
    pub method: Method,
    /// How long that took.
    pub record_time: Duration,
    /// How long verification took.
    pub verify_time: Duration,
    /// Bytes compared for each control-block state.
    pub verified_bytes: u64,
    /// Bytes among them that no kernel had written in the last state.
    pub unwritten_bytes: u64,
    /// Whether it equals the eager run bit for bit.
    pub bit_exact: bool,
    /// Whether what it chooses is its next input, so that steps can be sent ahead.
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

/// What a backend holds and has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Bytes on the device.
    pub memory: Accounting,
    /// What other models of this process held there when a plan was last made ready.
    pub others: Vec<HeldBytes>,
    /// How the weights came to the device.
    pub upload: Upload,
    /// Graphs in service, by size of step.
    pub graphs: Vec<GraphLine>,
    /// Recordings, replays, failures.
    pub cache: CacheStats,
    /// Steps that were compared with their eager run while a text or a training run went on.
    pub compared: Compared,
    /// Steps that were queued.
    pub queued: QueueStats,
    /// Where the kernels came from.
    pub kernels: Option<KernelOrigin>,
    /// What multiplies the rows of prompts.
    pub prompt_products: Option<PromptProducts>,
    /// What runs as several launches where one was wished for, each with the name of its step and the reason.
    pub apart: Vec<String>,
    /// Timings of every launch so far; empty unless [`crate::CudaOptions::profile`] is on.
    pub profile: Vec<ProfileRow>,
    /// Bytes per second that the card's memory could deliver by its clock and width; `None` where they are unknown.
    pub peak_bytes_per_second: Option<f64>,
}
