//! Recorded graphs and their replay.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Pod;

use crate::api::{EdgeKind, ExecHandle, GraphHandle, NodeHandle, NodeKind, StreamHandle};
use crate::error::{DriverError, WorkOrigin};
use crate::memory::{Buf, Lease, Memory};
use crate::nodes::RecordedNodes;
use crate::queue::{Keep, call_origin};
use crate::record::{Method, OwnedGraph, RecordJob, RecordedLoop};
use crate::shared::{DeviceShared, Garbage};
use crate::stream::Stream;

/// A recorded step. It owns everything it points to (the memory, the modules, library handles), so replaying is
/// safe.
pub struct Graph {
    inner: Arc<GraphInner>,
    info: GraphInfo,
}

/// The state that must outlive every replay in flight. A stream keeps it alive until it has been waited for.
struct GraphInner {
    shared: Arc<DeviceShared>,
    exec: ExecHandle,
    memory: Arc<Memory>,
    _keep: Keep,
    n_replays: AtomicU64,
    name: Arc<str>,
    last_kernel: Arc<str>,
}

/// Description of a graph's content.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GraphInfo {
    /// The recording's name.
    pub name: String,
    /// The recording method.
    pub method: Method,
    /// Kind and label of each node; in call order for [`Method::Nodes`].
    pub nodes: Vec<(NodeKind, String)>,
    /// Edges by node index: from, to, kind.
    pub edges: Vec<(u32, u32, EdgeKind)>,
    /// Whether the nodes are the body of a loop, which a replay runs until its condition is 0.
    pub is_loop: bool,
    /// Time from the start of the recording to a graph ready for replay.
    pub record_time: Duration,
}

impl GraphInfo {
    /// Number of nodes of a kind.
    #[must_use]
    pub fn count(&self, kind: NodeKind) -> usize {
        self.nodes.iter().filter(|n| n.0 == kind).count()
    }

    /// Number of nodes of each kind that occurs.
    #[must_use]
    pub fn counts(&self) -> Vec<(NodeKind, usize)> {
        let mut kinds: Vec<NodeKind> = self.nodes.iter().map(|n| n.0).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds.into_iter().map(|k| (k, self.count(k))).collect()
    }

    /// Renders the graph for Graphviz; programmatic edges are dashed.
    #[must_use]
    pub fn dot(&self) -> String {
        let quote = |s: &str| s.replace('\\', "\\\\").replace('"', "\\\"");
        let mut out = format!("digraph \"{}\" {{\n  node [shape=box];\n", quote(&self.name));
        if self.is_loop {
            out.push_str("  label=\"body of a loop\";\n");
        }
        for (i, (kind, label)) in self.nodes.iter().enumerate() {
            let _ = writeln!(out, "  n{i} [label=\"{i}: {}\\n{kind:?}\"];", quote(label));
        }
        for (from, to, kind) in &self.edges {
            let style = if *kind == EdgeKind::Programmatic { " [style=dashed]" } else { "" };
            let _ = writeln!(out, "  n{from} -> n{to}{style};");
        }
        out.push_str("}\n");
        out
    }
}

impl Graph {
    /// The graph's content.
    #[must_use]
    pub fn info(&self) -> &GraphInfo {
        &self.info
    }

    /// The memory that it works on.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.inner.memory
    }

    /// Number of replays so far.
    #[must_use]
    pub fn n_replays(&self) -> u64 {
        self.inner.n_replays.load(Ordering::Relaxed)
    }

    /// Launches the whole recording at once, without waiting for it.
    ///
    /// The outputs borrow the lease, so they must be dropped before the next replay over the same memory, whether
    /// of this graph or of another one.
    ///
    /// ```compile_fail,E0499
    /// # use refrain_driver::*;
    /// # fn f(graph: &Graph, lease: &mut Lease, stream: &mut Stream, logits: Buf) -> Result<(), DriverError> {
    /// let out = graph.replay(lease, stream)?;
    /// graph.replay(lease, stream)?; // would overwrite the outputs that `out` reads
    /// out.read(stream, logits, &mut [0; 4])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0499
    /// # use refrain_driver::*;
    /// # fn f(one: &Graph, other: &Graph, lease: &mut Lease, stream: &mut Stream, logits: Buf)
    /// # -> Result<(), DriverError> {
    /// let out = one.replay(lease, stream)?;
    /// other.replay(lease, stream)?; // another graph over the same memory would overwrite them too
    /// out.read(stream, logits, &mut [0; 4])?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn replay<'l>(&self, lease: &'l mut Lease, stream: &mut Stream) -> Result<Outputs<'l>, DriverError> {
        let inner = &self.inner;
        if !Arc::ptr_eq(&inner.memory, lease.memory()) {
            return Err(inner.memory.foreign("the lease", lease.memory().id()));
        }
        stream.begin_use(lease)?;
        stream.keep.add(inner);
        let n = inner.n_replays.fetch_add(1, Ordering::Relaxed) + 1;
        inner.shared.set_last(WorkOrigin {
            step: Arc::clone(&inner.name),
            kernel: Arc::clone(&inner.last_kernel),
            replay: Some(n),
        });
        let (exec, handle) = (inner.exec, stream.handle());
        inner.shared.call("cuGraphLaunch", |api| api.exec_launch(exec, handle))?;
        Ok(Outputs::new(lease))
    }

    /// Builds a graph from a completed stream capture.
    pub(crate) fn finish_captured(
        job: &RecordJob<'_>,
        graph: OwnedGraph,
        target: Option<RecordedLoop>,
        keep: Keep,
        log: Vec<(NodeKind, WorkOrigin)>,
        stream: StreamHandle,
    ) -> Result<Graph, DriverError> {
        let shared = job.shared;
        let name = &job.options.name;
        check_memory_nodes(job, &graph)?;
        let nodes = shared.call("cuGraphGetNodes", |api| api.graph_nodes(graph.handle))?;
        if nodes.is_empty() {
            return Err(DriverError::EmptyRecording { name: name.clone() });
        }
        let has_library = log.iter().any(|(kind, _)| *kind == NodeKind::Child);
        if !has_library && nodes.len() != log.len() {
            let (n_enqueued, n_captured) = (log.len(), nodes.len());
            return Err(DriverError::CapturedNodeCount { name: name.clone(), n_enqueued, n_captured });
        }
        let edges = shared.call("cuGraphGetEdges", |api| api.graph_edges(graph.handle))?;
        let edges: Vec<(NodeHandle, NodeHandle, EdgeKind)> =
            edges.into_iter().map(|e| (e.from, e.to, e.kind)).collect();
        let order = chain(&nodes, &edges);
        let labels: Vec<(NodeKind, String)> = order
            .iter()
            .enumerate()
            .map(|(i, &(_, kind))| match log.get(i) {
                Some((logged, origin)) if !has_library && *logged == kind => (kind, origin.to_string()),
                _ => (kind, format!("{kind:?}")),
            })
            .collect();
        let index = |node: NodeHandle| order.iter().position(|n| n.0 == node).unwrap_or(0) as u32;
        let edges = edges.into_iter().map(|(from, to, kind)| (index(from), index(to), kind)).collect();
        if let Some(target) = &target {
            target.fill(shared, &graph)?;
        }
        let parts =
            RecordedParts { method: Method::Stream, keep, nodes: labels, edges, is_loop: target.is_some() };
        let graph = target.map_or(graph, |target| target.graph);
        Graph::instantiate(job, graph, parts, &log, stream)
    }

    /// Builds a graph from explicit nodes.
    pub(crate) fn finish_nodes(
        job: &RecordJob<'_>,
        own: Option<OwnedGraph>,
        target: Option<RecordedLoop>,
        nodes: RecordedNodes,
        stream: StreamHandle,
    ) -> Result<Graph, DriverError> {
        let is_loop = target.is_some();
        let graph = target.map(|target| target.graph).or(own).filter(|_| !nodes.log.is_empty());
        let Some(graph) = graph else {
            return Err(DriverError::EmptyRecording { name: job.options.name.clone() });
        };
        let labels = nodes.log.iter().map(|(kind, origin)| (*kind, origin.to_string())).collect();
        let RecordedNodes { log, edges, keep, .. } = nodes;
        let parts = RecordedParts { method: Method::Nodes, keep, nodes: labels, edges, is_loop };
        Graph::instantiate(job, graph, parts, &log, stream)
    }

    fn instantiate(
        job: &RecordJob<'_>,
        graph: OwnedGraph,
        parts: RecordedParts,
        log: &[(NodeKind, WorkOrigin)],
        stream: StreamHandle,
    ) -> Result<Graph, DriverError> {
        let RecordedParts { method, keep, nodes, edges, is_loop } = parts;
        let shared = job.shared;
        let exec = shared.call("cuGraphInstantiate", |api| api.graph_instantiate(graph.handle))?;
        let last = log.last().map_or_else(|| call_origin("nothing"), |(_, origin)| origin.clone());
        let inner = GraphInner {
            shared: Arc::clone(shared),
            exec,
            memory: Arc::clone(job.memory),
            _keep: keep,
            n_replays: AtomicU64::new(0),
            name: Arc::from(job.options.name.as_str()),
            last_kernel: last.kernel,
        };
        // From here on, dropping `inner` destroys the instance.
        shared.call("cuGraphUpload", |api| api.exec_upload(exec, stream))?;
        let info = GraphInfo {
            name: job.options.name.clone(),
            method,
            nodes,
            edges,
            is_loop,
            record_time: job.started.elapsed(),
        };
        Ok(Graph { inner: Arc::new(inner), info })
    }
}

impl Drop for GraphInner {
    fn drop(&mut self) {
        self.shared.discard(Garbage::Exec(self.exec));
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph {:?} ({}, {:?})", self.info.name, self.info.method, self.info.counts())
    }
}

/// What a recording consists of, besides the driver's graph.
struct RecordedParts {
    method: Method,
    keep: Keep,
    nodes: Vec<(NodeKind, String)>,
    edges: Vec<(u32, u32, EdgeKind)>,
    is_loop: bool,
}

fn check_memory_nodes(job: &RecordJob<'_>, graph: &OwnedGraph) -> Result<(), DriverError> {
    match memory_nodes(job.shared, graph.handle)? {
        0 => Ok(()),
        n_nodes => Err(DriverError::MemoryNodes { name: job.options.name.clone(), n_nodes }),
    }
}

/// Counts the allocation and free nodes of a graph, including its child graphs.
pub(crate) fn memory_nodes(shared: &DeviceShared, graph: GraphHandle) -> Result<usize, DriverError> {
    let mut count = 0;
    for (node, kind) in shared.call("cuGraphGetNodes", |api| api.graph_nodes(graph))? {
        match kind {
            NodeKind::MemAlloc | NodeKind::MemFree => count += 1,
            NodeKind::Child => {
                let child = shared.call("cuGraphChildGraphNodeGetGraph", |api| api.graph_child(node))?;
                count += memory_nodes(shared, child)?;
            }
            _ => {}
        }
    }
    Ok(count)
}

/// Orders the nodes as a capture without forks recorded them, each after its dependency. After a fork, the
/// remaining nodes follow in the driver's order.
fn chain(
    nodes: &[(NodeHandle, NodeKind)],
    edges: &[(NodeHandle, NodeHandle, EdgeKind)],
) -> Vec<(NodeHandle, NodeKind)> {
    use std::collections::{HashMap, HashSet};
    let kinds: HashMap<NodeHandle, NodeKind> = nodes.iter().copied().collect();
    let next: HashMap<NodeHandle, NodeHandle> = edges.iter().map(|e| (e.0, e.1)).collect();
    let waits: HashSet<NodeHandle> = edges.iter().map(|e| e.1).collect();
    let mut seen = HashSet::new();
    let mut order = Vec::with_capacity(nodes.len());
    for &(root, _) in nodes.iter().filter(|n| !waits.contains(&n.0)).chain(nodes) {
        let mut at = Some(root);
        while let Some(node) = at.filter(|n| seen.insert(*n)) {
            order.extend(kinds.get(&node).map(|&kind| (node, kind)));
            at = next.get(&node).copied();
        }
    }
    order
}

/// The results of a run or replay. It borrows the lease, so nothing can overwrite the results while it lives.
#[derive(Debug)]
pub struct Outputs<'l> {
    lease: &'l Lease,
}

impl<'l> Outputs<'l> {
    pub(crate) fn new(lease: &'l mut Lease) -> Outputs<'l> {
        Outputs { lease }
    }

    /// Waits for the stream and copies a buffer to the host.
    pub fn read(&self, stream: &mut Stream, buf: Buf, bytes: &mut [u8]) -> Result<(), DriverError> {
        stream.download(self.lease, buf, bytes)
    }

    /// Waits for the stream and reads a buffer as values of type `T`.
    pub fn values<T: Pod>(&self, stream: &mut Stream, buf: Buf) -> Result<Vec<T>, DriverError> {
        // Checks the handle before allocating by its length.
        self.lease.memory().resolve(buf)?;
        let mut values = vec![T::zeroed(); buf.len() as usize / size_of::<T>().max(1)];
        self.read(stream, buf, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}
