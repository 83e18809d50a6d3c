//! The sink that records explicit nodes.

use std::sync::Arc;

use crate::api::{
    CaptureMode, ConditionHandle, CopyEnd, Dependency, DevicePtr, EdgeKind, GraphHandle, NodeHandle,
    NodeKind, StreamHandle, StreamKind,
};
use crate::depend::{Hazards, Touch};
use crate::error::{DriverError, WorkOrigin};
use crate::graph::memory_nodes;
use crate::launch::{Access, Launch};
use crate::memory::{Buf, BufAddress, Memory};
use crate::queue::{
    Keep, LibraryCall, LibraryStream, Queue, Recording, call_origin, copy_ends, library_origin, sealed,
};
use crate::record::{OwnedGraph, RecordJob, StreamCapture};
use crate::shared::DeviceShared;

/// Turns calls into nodes of a graph and derives the edges from the bytes they access.
pub(crate) struct NodeSink<'a> {
    job: &'a RecordJob<'a>,
    graph: GraphHandle,
    recording: Recording<'a>,
    state: NodeSinkState,
}

struct NodeSinkState {
    hazards: Hazards,
    nodes: Vec<(NodeHandle, NodeKind)>,
    edges: Vec<(u32, u32, EdgeKind)>,
    keep: Keep,
    params: Vec<u8>,
    side: Option<SideStream>,
}

/// Result of recording nodes, from which the graph is built.
pub(crate) struct RecordedNodes {
    pub(crate) log: Vec<(NodeKind, WorkOrigin)>,
    pub(crate) edges: Vec<(u32, u32, EdgeKind)>,
    pub(crate) keep: Keep,
    /// Whether a launch got the condition of the loop.
    pub(crate) has_condition: bool,
}

/// A stream on which library calls are captured.
struct SideStream {
    shared: Arc<DeviceShared>,
    handle: StreamHandle,
}

impl SideStream {
    fn create(shared: &Arc<DeviceShared>) -> Result<SideStream, DriverError> {
        let handle = shared.call("cuStreamCreate", |api| api.stream_create(StreamKind::NonBlocking))?;
        Ok(SideStream { shared: Arc::clone(shared), handle })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        self.shared.discard(crate::shared::Garbage::Stream(self.handle));
    }
}

impl<'a> NodeSink<'a> {
    /// Adds nodes to `graph`, which outlives the sink. It may be the body of a loop.
    pub(crate) fn new(
        job: &'a RecordJob<'a>,
        graph: GraphHandle,
        condition: Option<ConditionHandle>,
    ) -> NodeSink<'a> {
        let state = NodeSinkState {
            hazards: Hazards::default(),
            nodes: Vec::new(),
            edges: Vec::new(),
            keep: Keep::default(),
            params: Vec::new(),
            side: None,
        };
        NodeSink { job, graph, recording: Recording::new(job.watch, job.progress, condition), state }
    }

    pub(crate) fn finish(self) -> (Option<DriverError>, RecordedNodes) {
        let Recording { log, has_condition, .. } = self.recording;
        let nodes = RecordedNodes { log, edges: self.state.edges, keep: self.state.keep, has_condition };
        (self.recording.failed, nodes)
    }
}

impl NodeSinkState {
    /// Adds a node: finds its dependencies, creates it with `add`, and records the edges.
    fn add(
        &mut self,
        kind: NodeKind,
        touches: &[Touch],
        programmatic: bool,
        add: impl FnOnce(&[Dependency]) -> Result<NodeHandle, DriverError>,
    ) -> Result<(), DriverError> {
        let to = self.nodes.len() as u32;
        let mut deps = Vec::new();
        let from = self.hazards.add(touches);
        for &i in &from {
            let (on, from_kind) = self.nodes[i];
            // Only a kernel can allow its successor to start early.
            let early = programmatic && from_kind == NodeKind::Kernel;
            deps.push(Dependency { on, kind: if early { EdgeKind::Programmatic } else { EdgeKind::Full } });
        }
        let node = add(&deps)?;
        self.nodes.push((node, kind));
        self.edges.extend(from.iter().zip(&deps).map(|(&i, d)| (i as u32, to, d.kind)));
        Ok(())
    }
}

fn collect_touches(
    memory: &Memory,
    accesses: impl Iterator<Item = (Buf, Access)>,
) -> Result<Vec<Touch>, DriverError> {
    let mut out = Vec::new();
    for (buf, access) in accesses {
        let start = memory.resolve(buf)?.address();
        let touch = Touch { start, end: start + buf.len(), write: false };
        if access != Access::Write {
            out.push(touch);
        }
        if access != Access::Read {
            out.push(Touch { write: true, ..touch });
        }
    }
    Ok(out)
}

impl sealed::Sealed for NodeSink<'_> {}

impl Queue for NodeSink<'_> {
    fn launch(&mut self, launch: &Launch) -> Result<(), DriverError> {
        let NodeSink { job, graph, recording, state } = self;
        let condition = recording.condition;
        recording.has_condition |= launch.takes_condition();
        recording.step(NodeKind::Kernel, launch.origin(), || {
            let mut params = std::mem::take(&mut state.params);
            launch.pack(job.shared, job.memory, condition, &mut params)?;
            let touched = collect_touches(job.memory, launch.accesses())?;
            let config = launch.config(job.options.overlap);
            state.keep.add(launch.function().module());
            let function = launch.function().handle();
            let result = state.add(NodeKind::Kernel, &touched, config.programmatic, |deps| {
                job.shared.call("cuGraphAddKernelNode", |api| {
                    api.graph_add_kernel(*graph, deps, function, &config, &params)
                })
            });
            state.params = params;
            result
        })
    }

    fn copy(&mut self, dst: Buf, src: Buf) -> Result<(), DriverError> {
        let NodeSink { job, graph, recording, state } = self;
        let (to, from, bytes) = copy_ends(job.memory, dst, src)?;
        if bytes == 0 {
            return Ok(());
        }
        let end = |address| match address {
            BufAddress::Device(p) => CopyEnd::Device(p),
            BufAddress::Host(p) => CopyEnd::Host(p),
        };
        recording.step(NodeKind::Memcpy, call_origin("copy"), || {
            let touched =
                collect_touches(job.memory, [(src, Access::Read), (dst, Access::Write)].into_iter())?;
            state.add(NodeKind::Memcpy, &touched, false, |deps| {
                // SAFETY: host ends are pinned and inside `job.memory`, which the graph keeps alive; the host
                // accesses pinned regions only atomically, through `pinned`.
                job.shared.call("cuGraphAddMemcpyNode", |api| unsafe {
                    api.graph_add_memcpy(*graph, deps, end(to), end(from), bytes)
                })
            })
        })
    }

    fn fill(&mut self, dst: Buf, byte: u8) -> Result<(), DriverError> {
        let NodeSink { job, graph, recording, state } = self;
        let to = DevicePtr(job.memory.resolve(dst)?.address());
        if dst.is_empty() {
            return Ok(());
        }
        recording.step(NodeKind::Memset, call_origin("fill"), || {
            let touched = collect_touches(job.memory, std::iter::once((dst, Access::Write)))?;
            state.add(NodeKind::Memset, &touched, false, |deps| {
                job.shared.call("cuGraphAddMemsetNode", |api| {
                    api.graph_add_memset(*graph, deps, to, byte, dst.len())
                })
            })
        })
    }

    fn library(&mut self, call: &LibraryCall<'_>) -> Result<(), DriverError> {
        let NodeSink { job, graph, recording, state } = self;
        recording.step(NodeKind::Child, library_origin(call), || {
            let reads = call.reads.iter().map(|&b| (b, Access::Read));
            let writes = call.writes.iter().map(|&b| (b, Access::Write));
            let touched = collect_touches(job.memory, reads.chain(writes))?;
            if let Some(keep) = &call.keep {
                state.keep.add_dyn(keep);
            }
            let side = match &state.side {
                Some(side) => side.handle,
                None => state.side.insert(SideStream::create(job.shared)?).handle,
            };
            let child = capture_library(job, side, call)?;
            state.add(NodeKind::Child, &touched, false, |deps| {
                job.shared
                    .call("cuGraphAddChildGraphNode", |api| api.graph_add_child(*graph, deps, child.handle))
            })
        })
    }
}

/// Captures one library call on the side stream, as a separate graph.
fn capture_library(
    job: &RecordJob<'_>,
    side: StreamHandle,
    call: &LibraryCall<'_>,
) -> Result<OwnedGraph, DriverError> {
    let mode = if job.options.global { CaptureMode::Global } else { CaptureMode::ThreadLocal };
    let capture = StreamCapture::begin(job.shared, side, mode)?;
    // Registered during the call only, even if it panics: the watchdog must not query a stream that no longer
    // exists.
    let watched = WatchedStream::new(job, side);
    let mut stream = LibraryStream { memory: job.memory, stream: side };
    let outcome = (call.run)(&mut stream);
    drop(watched);
    let ended = capture.end();
    outcome?;
    let child = ended.map_err(|(error, _)| error)?;
    let n_nodes = memory_nodes(job.shared, child.handle)?;
    if n_nodes > 0 {
        return Err(DriverError::MemoryNodes { name: job.options.name.clone(), n_nodes });
    }
    Ok(child)
}

/// Registers a stream with the watchdog for as long as it lives.
struct WatchedStream<'a>(&'a RecordJob<'a>);

impl<'a> WatchedStream<'a> {
    fn new(job: &'a RecordJob<'a>, stream: StreamHandle) -> WatchedStream<'a> {
        job.watch.set_stream(Some(stream));
        WatchedStream(job)
    }
}

impl Drop for WatchedStream<'_> {
    fn drop(&mut self) {
        self.0.watch.set_stream(None);
    }
}
