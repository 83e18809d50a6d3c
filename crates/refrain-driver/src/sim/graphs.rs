//! Graphs: nodes and edges as built, and the flat form that runs in a random legal order.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ops::{SimOp, WorkFault};
use super::races::{AccessLog, SimAccess, describe};
use super::rng::SimRng;
use crate::api::{ConditionHandle, Dependency, EdgeKind, GraphHandle, NodeHandle, NodeKind};

/// Work of a node.
#[derive(Clone)]
pub(super) enum NodeWork {
    Op(SimOp, Option<WorkFault>),
    Child(Arc<GraphDef>),
    /// Repeats a body, which is a graph with a handle of its own.
    Loop(ConditionHandle, GraphHandle),
}

/// Condition of a loop.
pub(super) struct SimCondition {
    /// The graph whose loop may use it.
    pub(super) graph: GraphHandle,
    pub(super) initial: u32,
    pub(super) is_used: bool,
    pub(super) value: u32,
}

pub(super) type Conditions = BTreeMap<ConditionHandle, SimCondition>;

#[derive(Clone)]
pub(super) struct SimNode {
    pub(super) handle: NodeHandle,
    pub(super) work: NodeWork,
    pub(super) deps: Vec<Dependency>, // on earlier nodes of the same graph only
}

impl SimNode {
    pub(super) fn kind(&self) -> NodeKind {
        match &self.work {
            NodeWork::Op(op, _) => op.kind(),
            NodeWork::Child(_) => NodeKind::Child,
            NodeWork::Loop(..) => NodeKind::Loop,
        }
    }
}

/// A graph that can be edited and instantiated.
#[derive(Clone, Default)]
pub(super) struct GraphDef {
    pub(super) nodes: Vec<SimNode>,
}

impl GraphDef {
    pub(super) fn position(&self, node: NodeHandle) -> Option<usize> {
        // Handles are issued in ascending order, and nodes are only appended.
        self.nodes.binary_search_by_key(&node, |n| n.handle).ok()
    }

    pub(super) fn has_loop(&self) -> bool {
        self.nodes.iter().any(|n| n.kind() == NodeKind::Loop)
    }

    /// Whether the body of a loop may hold these nodes.
    pub(super) fn fits_in_a_loop(&self) -> bool {
        self.nodes.iter().all(|n| match &n.work {
            NodeWork::Op(op, _) => !matches!(op, SimOp::Host(_) | SimOp::Alloc(_) | SimOp::Free(_)),
            NodeWork::Child(def) => def.fits_in_a_loop(),
            NodeWork::Loop(..) => true,
        })
    }

    /// Marks the nodes in `of` and everything that they wait for, directly or indirectly.
    pub(super) fn ancestors(&self, of: &[Dependency]) -> Vec<bool> {
        let mut seen = vec![false; self.nodes.len()];
        let mut todo: Vec<usize> = of.iter().filter_map(|d| self.position(d.on)).collect();
        while let Some(i) = todo.pop() {
            if !std::mem::replace(&mut seen[i], true) {
                todo.extend(self.nodes[i].deps.iter().filter_map(|d| self.position(d.on)));
            }
        }
        seen
    }

    /// Returns a copy of the graph with new node handles.
    pub(super) fn renamed(&self, next_handle: &mut impl FnMut() -> u64) -> GraphDef {
        let mut nodes: Vec<SimNode> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let deps = node
                .deps
                .iter()
                .filter_map(|d| Some(Dependency { on: nodes[self.position(d.on)?].handle, kind: d.kind }));
            let deps = deps.collect();
            let work = match &node.work {
                NodeWork::Child(child) => NodeWork::Child(Arc::new(child.renamed(next_handle))),
                NodeWork::Op(..) | NodeWork::Loop(..) => node.work.clone(),
            };
            nodes.push(SimNode { handle: NodeHandle(next_handle()), work, deps });
        }
        GraphDef { nodes }
    }
}

/// A graph with a handle.
pub(super) struct GraphSlot {
    pub(super) def: Arc<GraphDef>,
    /// Set for a child obtained through its parent, which is borrowed and must not be destroyed.
    pub(super) parent: Option<GraphHandle>,
    /// Whether it is the body of a loop of its parent: it is filled through its own handle.
    pub(super) is_body: bool,
}

impl GraphSlot {
    /// A graph that belongs to no other.
    pub(super) fn root(def: GraphDef) -> GraphSlot {
        GraphSlot { def: Arc::new(def), parent: None, is_body: false }
    }
}

struct FlatNode {
    op: SimOp,
    fault: Option<WorkFault>,
    deps: Vec<(usize, EdgeKind)>,
    /// What the node repeats, and while what holds.
    repeats: Option<(ConditionHandle, Arc<FlatGraph>)>,
}

/// A graph ready to run, with its children inlined and the order between any two nodes known.
pub(super) struct FlatGraph {
    nodes: Vec<FlatNode>,
    /// For each point (see [`point`]), the set of points before it; empty if all nodes form one chain.
    before: Vec<Vec<u64>>,
    chain: bool,
    /// Addresses that the graph's memory nodes allocate.
    pub(super) allocs: Vec<u64>,
    /// Conditions that get their initial value at each launch.
    pub(super) conditions: Vec<ConditionHandle>,
}

/// Index of a point in time. A node has two: the start of its early part (0) and the end of its main part (1). They
/// are ordered differently only under programmatic edges.
const fn point(node: usize, main: bool) -> usize {
    2 * node + main as usize
}

/// Maximum number of nodes for which races are checked, since the order is kept as a bit matrix.
const MAX_CHECKED_NODES: usize = 8192;

impl FlatGraph {
    /// `body` looks up the body of a loop.
    pub(super) fn new(source: &GraphDef, body: &dyn Fn(GraphHandle) -> Option<Arc<GraphDef>>) -> FlatGraph {
        let mut nodes = Vec::new();
        flatten(source, &[], body, &mut nodes);
        let repeated = nodes.iter().filter_map(|n: &FlatNode| n.repeats.as_ref());
        let conditions = repeated.flat_map(|(c, body)| body.conditions.iter().chain([c])).copied().collect();
        let allocs = nodes
            .iter()
            .filter_map(|n: &FlatNode| if let SimOp::Alloc(start) = n.op { Some(start) } else { None })
            .collect();
        let chain = nodes
            .iter()
            .enumerate()
            .all(|(i, n)| i == 0 || n.deps.iter().any(|&(on, kind)| on + 1 == i && kind == EdgeKind::Full));
        let mut flat = FlatGraph { nodes, before: Vec::new(), chain, allocs, conditions };
        if !chain && flat.nodes.len() <= MAX_CHECKED_NODES {
            flat.before = flat.order_table();
        }
        flat
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn node(&self, i: usize) -> (&SimOp, Option<WorkFault>) {
        (&self.nodes[i].op, self.nodes[i].fault)
    }

    fn waits(&self, i: usize) -> bool {
        !matches!(&self.nodes[i].op, SimOp::Kernel(k) if !k.twin.waits)
    }

    fn starts_next_late(&self, i: usize) -> bool {
        matches!(&self.nodes[i].op, SimOp::Kernel(k) if k.twin.starts_next_late)
    }

    /// The points that a kernel waits for from inside.
    fn waited(&self, node: usize) -> impl Iterator<Item = usize> {
        let waits = self.waits(node);
        let deps = self.nodes[node].deps.iter();
        deps.filter(move |(_, kind)| waits && *kind == EdgeKind::Programmatic).map(|&(on, _)| point(on, true))
    }

    /// The direct predecessors of a point.
    fn direct(&self, node: usize, main: bool) -> Vec<usize> {
        if main {
            return self.waited(node).chain([point(node, false)]).collect();
        }
        let mut before = Vec::new();
        for &(on, kind) in &self.nodes[node].deps {
            before.push(point(on, kind == EdgeKind::Full));
            if kind == EdgeKind::Programmatic && self.starts_next_late(on) {
                before.extend(self.waited(on));
            }
        }
        before
    }

    fn order_table(&self) -> Vec<Vec<u64>> {
        let n_points = 2 * self.nodes.len();
        let mut before: Vec<Vec<u64>> = Vec::with_capacity(n_points);
        for node in 0..self.nodes.len() {
            for main in [false, true] {
                let mut row = vec![0u64; n_points.div_ceil(64)];
                for p in self.direct(node, main) {
                    row.iter_mut().zip(&before[p]).for_each(|(r, b)| *r |= b);
                    row[p / 64] |= 1 << (p % 64);
                }
                before.push(row);
            }
        }
        before
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        self.before[b][a / 64] >> (a % 64) & 1 == 1
    }

    /// Returns a random legal order of the nodes.
    pub(super) fn random_order(&self, rng: &mut SimRng) -> Vec<u32> {
        let n = self.nodes.len();
        if self.chain {
            return (0..n as u32).collect();
        }
        let mut after: Vec<Vec<usize>> = vec![Vec::new(); 2 * n];
        let mut n_missing = vec![0usize; 2 * n];
        for node in 0..n {
            for main in [false, true] {
                for p in self.direct(node, main) {
                    after[p].push(point(node, main));
                    n_missing[point(node, main)] += 1;
                }
            }
        }
        let mut ready: Vec<usize> = (0..2 * n).filter(|&p| n_missing[p] == 0).collect();
        let mut order = Vec::with_capacity(n);
        while !ready.is_empty() {
            let p = ready.swap_remove(rng.below(ready.len()));
            if p % 2 == 1 {
                order.push((p / 2) as u32);
            }
            for &q in &after[p] {
                n_missing[q] -= 1;
                if n_missing[q] == 0 {
                    ready.push(q);
                }
            }
        }
        order
    }

    /// Reports every unordered pair of nodes that accessed the same bytes.
    pub(super) fn races(&self, logs: &[AccessLog]) -> Vec<String> {
        if self.before.is_empty() {
            return Vec::new();
        }
        let mut all: Vec<(usize, SimAccess)> = logs
            .iter()
            .enumerate()
            .flat_map(|(node, log)| log.as_slice().iter().map(move |&a| (node, a)))
            .collect();
        all.sort_unstable_by_key(|(_, a)| a.start);
        let mut reports = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        let mut open: Vec<(usize, SimAccess)> = Vec::new();
        for (node, a) in all {
            open.retain(|(_, o)| o.end > a.start);
            for (other, o) in &open {
                let pair = (node.min(*other), node.max(*other));
                if node == *other || !a.conflicts(o) || self.ordered(*other, o, node, &a) {
                    continue;
                }
                if seen.insert(pair) {
                    let what = |i: usize| format!("{} (node {i})", self.nodes[i].op.what());
                    let ((x, ax), (y, ay)) =
                        if *other < node { ((*other, o), (node, &a)) } else { ((node, &a), (*other, o)) };
                    reports.push(describe(&what(x), ax, &what(y), ay, "graph nodes"));
                }
            }
            open.push((node, a));
        }
        reports
    }

    /// An early access lies between the two points of its node, so it follows another node's main point only if its
    /// own node's start does.
    fn ordered(&self, x: usize, ax: &SimAccess, y: usize, ay: &SimAccess) -> bool {
        self.is_before(point(x, true), point(y, !ay.early))
            || self.is_before(point(y, true), point(x, !ax.early))
    }
}

/// Appends the nodes of `def`, whose roots wait for `entry`. Returns the nodes to wait for at the end of the graph.
fn flatten(
    def: &GraphDef,
    entry: &[(usize, EdgeKind)],
    body: &dyn Fn(GraphHandle) -> Option<Arc<GraphDef>>,
    out: &mut Vec<FlatNode>,
) -> Vec<usize> {
    // Position of each node in the flat list; of a child graph, its last node.
    let mut positions: Vec<usize> = Vec::with_capacity(def.nodes.len());
    let mut has_dependent = vec![false; def.nodes.len()];
    for node in &def.nodes {
        let mut deps: Vec<(usize, EdgeKind)> = Vec::new();
        for d in &node.deps {
            if let Some(i) = def.position(d.on) {
                has_dependent[i] = true;
                deps.push((positions[i], d.kind));
            }
        }
        if node.deps.is_empty() {
            deps.extend_from_slice(entry);
        }
        match &node.work {
            NodeWork::Op(op, fault) => {
                out.push(FlatNode { op: op.clone(), fault: *fault, deps, repeats: None });
            }
            NodeWork::Child(child) => {
                let sinks = flatten(child, &deps, body, out);
                let sinks = sinks.into_iter().map(|i| (i, EdgeKind::Full));
                let deps = if child.nodes.is_empty() { deps } else { sinks.collect() };
                out.push(FlatNode { op: SimOp::Empty, fault: None, deps, repeats: None });
            }
            NodeWork::Loop(condition, handle) => {
                let inside = body(*handle).map(|def| (*condition, Arc::new(FlatGraph::new(&def, body))));
                out.push(FlatNode { op: SimOp::Empty, fault: None, deps, repeats: inside });
            }
        }
        positions.push(out.len() - 1);
    }
    (0..positions.len()).filter(|&i| !has_dependent[i]).map(|i| positions[i]).collect()
}

/// One launch of a graph in progress, or one run of a loop's body.
pub(super) struct GraphRun {
    pub(super) graph: Arc<FlatGraph>,
    order: Option<Vec<u32>>,
    next: usize,
    logs: Vec<AccessLog>,
    /// The loop that is running: its node, and the current run of its body.
    inside: Option<(usize, Box<GraphRun>)>,
    /// Races among the nodes of bodies that have ended.
    races: Vec<String>,
}

/// What a launch of a graph does next.
pub(super) enum Advance {
    /// Runs this node.
    Node(Arc<FlatGraph>, usize),
    /// Nothing: it has ended.
    Done,
    /// Repeats an empty body for ever.
    Endless,
}

impl GraphRun {
    pub(super) fn new(graph: Arc<FlatGraph>) -> GraphRun {
        let logs = vec![AccessLog::default(); graph.len()];
        GraphRun { graph, order: None, next: 0, logs, inside: None, races: Vec::new() }
    }

    /// Finds the next node to run. The first call begins the launch.
    pub(super) fn advance(&mut self, rng: &mut SimRng, conditions: &mut Conditions) -> Advance {
        if self.order.is_none() {
            for handle in &self.graph.conditions {
                conditions.get_mut(handle).into_iter().for_each(|c| c.value = c.initial);
            }
        }
        self.next_node(rng, conditions)
    }

    fn next_node(&mut self, rng: &mut SimRng, conditions: &Conditions) -> Advance {
        loop {
            if let Some((_, run)) = &mut self.inside {
                match run.next_node(rng, conditions) {
                    Advance::Done => {}
                    other => return other,
                }
            }
            let node = match self.inside.take() {
                Some((node, run)) => {
                    let (log, races) = run.finish();
                    self.logs[node].extend(&log);
                    self.logs[node].compact();
                    self.races.extend(races);
                    node
                }
                None => {
                    let order = self.order.get_or_insert_with(|| self.graph.random_order(rng));
                    let Some(&node) = order.get(self.next) else { return Advance::Done };
                    self.next += 1;
                    node as usize
                }
            };
            let Some((condition, body)) = &self.graph.nodes[node].repeats else {
                return Advance::Node(Arc::clone(&self.graph), node);
            };
            if conditions.get(condition).is_some_and(|c| c.value != 0) {
                if body.len() == 0 {
                    return Advance::Endless;
                }
                self.inside = Some((node, Box::new(GraphRun::new(Arc::clone(body)))));
            }
        }
    }

    /// Stores what a node accessed that [`GraphRun::advance`] named last.
    pub(super) fn log(&mut self, node: usize, log: AccessLog) {
        match &mut self.inside {
            Some((_, run)) => run.log(node, log),
            None => self.logs[node] = log,
        }
    }

    /// Returns all accesses of the run and the races among them.
    pub(super) fn finish(self) -> (AccessLog, Vec<String>) {
        let mut races = self.races;
        races.extend(self.graph.races(&self.logs));
        let mut all = AccessLog::default();
        self.logs.iter().for_each(|log| all.extend(log));
        all.compact();
        (all, races)
    }
}
