//! Execution order of nodes, and the cuts between segments.
//!
//! A recording holds consecutive nodes that only enqueue work; a node that needs the host ends it. The order
//! minimises the number of cuts: host nodes that depend only on step inputs run first, so a typical plan with
//! such a node is one host segment and one recordable segment. A node with a late input begins a recording of its own,
//! so that the recording before it can be launched without that input.
//!
//! The order follows from the data dependencies: a node runs right before its first reader, operands from left
//! to right. The order in which a model builds independent nodes does not matter.

use crate::graph::{Graph, NodeId, StateId, ValueId, ValueOrigin};
use crate::op::Op;
use std::collections::BTreeSet;
use std::ops::Range;

/// How a segment can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// All its steps can be recorded.
    Recordable,
    /// One step on the host, and why it cannot be recorded.
    Host(&'static str),
}

/// Consecutive steps that run in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// How the segment can run.
    pub kind: SegmentKind,
    /// Its steps in the plan.
    pub steps: Range<usize>,
}

/// Returns the value behind views: the value itself, or the source of the view.
pub(crate) fn source(graph: &Graph, value: ValueId) -> ValueId {
    let mut value = value;
    while let ValueOrigin::Node { node, .. } = graph.value(value).origin
        && is_view(graph, node.idx())
    {
        value = graph.node(node).inputs[0];
    }
    value
}

/// Which nodes must run before which. Views are resolved: they have no dependencies and no dependents.
pub(crate) struct Dependencies {
    /// Per node, its predecessors: the producers of its operands from left to right, then the readers of the
    /// state version that it replaces, then the previous host call, because host calls keep their build order.
    pub(crate) before: Vec<Vec<usize>>,
    /// Start nodes of a walk from the results.
    roots: Vec<usize>,
}

impl Dependencies {
    pub(crate) fn of(graph: &Graph) -> Dependencies {
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.states().len()];
        let mut changes: Vec<(StateId, usize)> = Vec::new();
        let mut last_host = None;
        let mut all = Vec::with_capacity(graph.nodes().len());
        for (idx, node) in graph.nodes().iter().enumerate() {
            let mut before = Vec::new();
            if is_view(graph, idx) {
                all.push(before);
                continue;
            }
            for &input in &node.inputs {
                if let ValueOrigin::Node { node, .. } = graph.value(source(graph, input)).origin {
                    push_new(&mut before, node.idx());
                }
            }
            let updated = node.op.state_updates().into_iter();
            for state in updated.filter_map(|(_, input)| graph.state_of(node.inputs[input])) {
                readers[state.idx()].drain(..).for_each(|reader| push_new(&mut before, reader));
                changes.push((state, idx));
            }
            for state in node.inputs.iter().filter_map(|&v| graph.state_of(v)) {
                readers[state.idx()].push(idx);
            }
            if node.not_capturable().is_some()
                && let Some(host) = last_host.replace(idx)
            {
                push_new(&mut before, host);
            }
            before.retain(|&b| b != idx);
            all.push(before);
        }
        changes.sort_unstable();
        let wanted = graph.early().iter().copied().chain(graph.outputs().iter().map(|o| o.value));
        let makers = wanted.filter_map(|value| match graph.value(source(graph, value)).origin {
            ValueOrigin::Node { node, .. } => Some(node.idx()),
            ValueOrigin::Input(_) | ValueOrigin::Weight(_) | ValueOrigin::State(_) => None,
        });
        // The remaining nodes run for their side effects on the host, or are dead.
        let roots = makers.chain(changes.iter().map(|c| c.1)).chain(0..graph.nodes().len());
        let roots = roots.filter(|&idx| !is_view(graph, idx)).collect();
        Dependencies { before: all, roots }
    }

    /// Returns all nodes except views, each after its dependencies, in an order independent of the build order.
    pub(crate) fn canonical(&self) -> Vec<usize> {
        post_order(&self.before, self.roots.iter().copied())
    }

    /// Returns the direct successors of each node.
    pub(crate) fn after(&self) -> Vec<Vec<usize>> {
        let mut after = vec![Vec::new(); self.before.len()];
        for (idx, before) in self.before.iter().enumerate() {
            before.iter().for_each(|&b| after[b].push(idx));
        }
        after
    }

    /// Per node, how many recordable segments must have run once it is done, including its own.
    pub(crate) fn levels(&self, graph: &Graph) -> Vec<usize> {
        let is_host = |idx: usize| graph.nodes()[idx].not_capturable().is_some();
        let mut levels = vec![0; self.before.len()];
        // A graph's nodes are in a valid execution order.
        for (idx, before) in self.before.iter().enumerate() {
            levels[idx] = match is_host(idx) {
                true => before.iter().map(|&b| levels[b]).max().unwrap_or(0),
                false => {
                    before.iter().map(|&b| levels[b] + usize::from(is_host(b))).max().unwrap_or(0).max(1)
                }
            };
        }
        levels
    }
}

fn push_new(list: &mut Vec<usize>, idx: usize) {
    if !list.contains(&idx) {
        list.push(idx);
    }
}

/// Lists each index after its predecessors, visiting the roots from left to right.
fn post_order(before: &[Vec<usize>], roots: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut seen = vec![false; before.len()];
    let mut out = Vec::with_capacity(before.len());
    let mut stack: Vec<(usize, usize)> = Vec::new();
    for root in roots {
        if std::mem::replace(&mut seen[root], true) {
            continue;
        }
        stack.push((root, 0));
        while let Some((idx, next)) = stack.last_mut() {
            match before[*idx].get(*next) {
                Some(&b) => {
                    *next += 1;
                    if !std::mem::replace(&mut seen[b], true) {
                        stack.push((b, 0));
                    }
                }
                None => {
                    out.push(*idx);
                    stack.pop();
                }
            }
        }
    }
    out
}

/// Orders all nodes except views for execution. Nodes of a unit run consecutively, in the unit's order. `units`
/// holds each node except views once, and no unit depends on itself through another.
pub(crate) fn order(graph: &Graph, dependencies: &Dependencies, units: &[Vec<NodeId>]) -> Vec<NodeId> {
    let mut unit_of = vec![usize::MAX; graph.nodes().len()];
    for (unit, nodes) in units.iter().enumerate() {
        nodes.iter().for_each(|node| unit_of[node.idx()] = unit);
    }
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); units.len()];
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); units.len()];
    for (unit, nodes) in units.iter().enumerate() {
        for &b in nodes.iter().flat_map(|node| &dependencies.before[node.idx()]) {
            if unit_of[b] != unit && !before[unit].contains(&unit_of[b]) {
                before[unit].push(unit_of[b]);
                after[unit_of[b]].push(unit);
            }
        }
    }
    let ranked = post_order(&before, dependencies.roots.iter().map(|&idx| unit_of[idx]));
    let mut rank = vec![0; units.len()];
    ranked.iter().enumerate().for_each(|(r, &unit)| rank[unit] = r);
    let is_host = |unit: usize| graph.node(units[unit][0]).not_capturable().is_some();
    let mut waits_for: Vec<usize> = before.iter().map(Vec::len).collect();
    // Ranks of ready units, on the device and on the host.
    let mut ready = [BTreeSet::new(), BTreeSet::new()];
    for unit in (0..units.len()).filter(|&unit| waits_for[unit] == 0) {
        ready[usize::from(is_host(unit))].insert(rank[unit]);
    }
    let mut out = Vec::with_capacity(graph.nodes().len());
    // Each round runs one kind until none of it is ready.
    let mut turn = 1;
    while ready.iter().any(|ready| !ready.is_empty()) {
        while let Some(r) = ready[turn].pop_first() {
            let unit = ranked[r];
            out.extend(&units[unit]);
            for &a in &after[unit] {
                waits_for[a] -= 1;
                if waits_for[a] == 0 {
                    ready[usize::from(is_host(a))].insert(rank[a]);
                }
            }
        }
        turn = 1 - turn;
    }
    assert!(waits_for.iter().all(|&n| n == 0), "units of nodes depend on each other");
    out
}

/// Cuts an order into recordable segments and single host steps. A segment ends where the host is needed, and before an
/// op with a late input.
pub(crate) fn cut(graph: &Graph, order: &[NodeId]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (i, &id) in order.iter().enumerate() {
        match graph.node(id).not_capturable() {
            Some(because) => segments.push(Segment { kind: SegmentKind::Host(because), steps: i..i + 1 }),
            None => match segments.last_mut() {
                Some(s) if s.kind == SegmentKind::Recordable && graph.node(id).op.late_input().is_none() => {
                    s.steps.end = i + 1;
                }
                _ => segments.push(Segment { kind: SegmentKind::Recordable, steps: i..i + 1 }),
            },
        }
    }
    segments
}

pub(crate) fn is_view(graph: &Graph, idx: usize) -> bool {
    matches!(graph.nodes()[idx].op, Op::View(_))
}
