//! The order in which nodes run, and where the plan is cut.
//!
//! A recording holds a run of nodes that only enqueue work. A node that needs the host ends it. Nodes are ordered so
//! that there are few cuts: host nodes that depend only on step inputs run before everything, so that the usual plan
//! with such a node is one host segment and one recordable segment.

use crate::graph::{Graph, NodeId, Origin};
use crate::op::Op;
use std::ops::Range;

/// What a segment may be run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// Every step in it can be recorded.
    Recordable,
    /// One step on the host, with the reason why it cannot be recorded.
    Host(&'static str),
}

/// A run of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// How it may run.
    pub kind: SegmentKind,
    /// Which steps of the plan it holds.
    pub steps: Range<usize>,
}

/// All nodes but views, in running order.
pub(crate) fn order(graph: &Graph) -> Vec<NodeId> {
    let n = graph.nodes().len();
    let mut waits_for = vec![0usize; n];
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); n];
    for (idx, before) in dependencies(graph).into_iter().enumerate() {
        waits_for[idx] = before.len();
        for b in before {
            followers[b].push(idx);
        }
    }
    let is_host: Vec<bool> = graph.nodes().iter().map(|node| node.not_capturable().is_some()).collect();
    let mut done = vec![false; n];
    let mut out = Vec::with_capacity(n);
    let mut host_turn = true;
    while out.len() < n {
        // In each turn the nodes of one kind run until none is ready, in the order in which they were built.
        let ready: Vec<usize> = (0..n).filter(|&i| !done[i] && waits_for[i] == 0).collect();
        // Views cost nothing and may hide a ready node of either kind behind them.
        let turn: Vec<usize> =
            ready.iter().copied().filter(|&i| is_host[i] == host_turn || is_view(graph, i)).collect();
        if turn.is_empty() {
            host_turn = !host_turn;
            continue;
        }
        let mut queue: std::collections::BTreeSet<usize> = turn.into_iter().collect();
        while let Some(i) = queue.pop_first() {
            done[i] = true;
            out.push(NodeId::from_idx(i));
            for &f in &followers[i] {
                waits_for[f] -= 1;
                if waits_for[f] == 0 && (is_host[f] == host_turn || is_view(graph, f)) {
                    queue.insert(f);
                }
            }
        }
        host_turn = !host_turn;
    }
    out.retain(|&id| !is_view(graph, id.idx()));
    out
}

/// Cuts an order into maximal recordable runs and single host steps.
pub(crate) fn cut(graph: &Graph, order: &[NodeId]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (i, &id) in order.iter().enumerate() {
        match graph.node(id).not_capturable() {
            Some(because) => segments.push(Segment { kind: SegmentKind::Host(because), steps: i..i + 1 }),
            None => match segments.last_mut() {
                Some(s) if s.kind == SegmentKind::Recordable => s.steps.end = i + 1,
                _ => segments.push(Segment { kind: SegmentKind::Recordable, steps: i..i + 1 }),
            },
        }
    }
    segments
}

fn is_view(graph: &Graph, idx: usize) -> bool {
    matches!(graph.nodes()[idx].op, Op::View(_))
}

/// For each node, the nodes that must run before it: those that make its inputs, and for a node that changes a state
/// also those that read the version it replaces. Host calls keep the order they were built in.
fn dependencies(graph: &Graph) -> Vec<Vec<usize>> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.states().len()];
    let mut last_host = None;
    let mut all = Vec::with_capacity(graph.nodes().len());
    for (idx, node) in graph.nodes().iter().enumerate() {
        let mut before: Vec<usize> = node
            .inputs
            .iter()
            .filter_map(|&v| match graph.value(v).origin {
                Origin::Node { node, .. } => Some(node.idx()),
                Origin::Input(_) | Origin::Weight(_) | Origin::State(_) => None,
            })
            .collect();
        let updated = node.op.state_updates().iter();
        for state in updated.filter_map(|(_, input)| graph.state_of(node.inputs[*input])) {
            before.append(&mut readers[state.idx()]);
        }
        for state in node.inputs.iter().filter_map(|&v| graph.state_of(v)) {
            readers[state.idx()].push(idx);
        }
        if node.not_capturable().is_some() {
            before.extend(last_host.replace(idx));
        }
        before.retain(|&b| b != idx);
        before.sort_unstable();
        before.dedup();
        all.push(before);
    }
    all
}
