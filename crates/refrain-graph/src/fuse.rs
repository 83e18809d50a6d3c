//! Neighbours that run better as one node, and nodes that nobody reads.

use crate::graph::{Graph, NodeId, Origin, ValueId};
use crate::op::{Binary, Gate, Op, Unary};
use crate::{GraphBuilder, GraphError};
use std::collections::HashMap;

/// Joins `silu(g) * u` into a gate and `a + b` followed by its RMS norm into one node, and drops what is not needed
/// for an output or a state.
///
/// A value that others read stays available: the sum in front of a norm is an output of the joined node.
pub fn fuse(graph: &Graph) -> Result<Graph, GraphError> {
    let live = live_nodes(graph);
    let uses = count_uses(graph, &live);
    let mut builder = GraphBuilder::new(graph.weights().to_vec(), graph.states().to_vec());
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for (idx, value) in graph.values().iter().enumerate() {
        let id = ValueId::from_idx(idx);
        match value.origin {
            Origin::Input(i) => {
                let input = &graph.inputs()[i.idx()];
                map.insert(id, builder.input(&input.name, input.ty)?);
            }
            Origin::Weight(w) => drop(map.insert(id, builder.weight(w))),
            Origin::State(s) => drop(map.insert(id, builder.state(s))),
            Origin::Node { .. } => {}
        }
    }
    let mut skip = vec![false; graph.nodes().len()];
    for idx in 0..graph.nodes().len() {
        if !live[idx] || skip[idx] {
            continue;
        }
        let id = NodeId::from_idx(idx);
        let node = graph.node(id);
        let joined = join_gate(graph, id, &uses).or_else(|| join_add_norm(graph, id, &uses));
        let (op, inputs, outputs) = match joined {
            Some(joined) => {
                skip[joined.second.idx()] = true;
                (joined.op, joined.inputs, joined.outputs)
            }
            None => (node.op.clone(), node.inputs.clone(), node.outputs.clone()),
        };
        // A joined node stands where its first half stood; what its second half reads must be there by then.
        let Some(inputs) = inputs.iter().map(|v| map.get(v).copied()).collect::<Option<Vec<_>>>() else {
            unreachable!("{} reads a value that no earlier node makes", node.label);
        };
        let made = builder.node(op, &inputs, &node.label)?;
        map.extend(outputs.into_iter().zip(made));
    }
    for output in graph.outputs() {
        builder.output(&output.name, map[&output.value])?;
    }
    // Inputs and outputs were added in their order, so that ids and positions are the same.
    if let Some(step) = graph.step() {
        builder.declare_step(step.clone());
    }
    Ok(builder.finish())
}

struct Joined {
    op: Op,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    second: NodeId,
}

type Uses = HashMap<ValueId, Vec<NodeId>>;

// An output of the graph counts as a use by nobody in particular.
const READ_AFTER_STEP: NodeId = NodeId(u32::MAX);

fn live_nodes(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.nodes().len()];
    let mut stack: Vec<ValueId> = graph.outputs().iter().map(|o| o.value).collect();
    for node in graph.nodes() {
        if !node.op.state_updates().is_empty() || matches!(node.op, Op::HostCall(_)) {
            stack.extend(&node.outputs);
        }
    }
    // A host call without outputs is there for what it does.
    for (idx, node) in graph.nodes().iter().enumerate() {
        if node.outputs.is_empty() {
            live[idx] = true;
            stack.extend(&node.inputs);
        }
    }
    while let Some(value) = stack.pop() {
        if let Origin::Node { node, .. } = graph.value(value).origin
            && !std::mem::replace(&mut live[node.idx()], true)
        {
            stack.extend(&graph.node(node).inputs);
        }
    }
    live
}

fn count_uses(graph: &Graph, live: &[bool]) -> Uses {
    let mut uses = Uses::new();
    for (idx, node) in graph.nodes().iter().enumerate().filter(|(idx, _)| live[*idx]) {
        for &value in &node.inputs {
            uses.entry(value).or_default().push(NodeId::from_idx(idx));
        }
    }
    for output in graph.outputs() {
        uses.entry(output.value).or_default().push(READ_AFTER_STEP);
    }
    uses
}

fn only_use(uses: &Uses, value: ValueId) -> Option<NodeId> {
    match uses.get(&value).map(Vec::as_slice) {
        Some([one]) if *one != READ_AFTER_STEP => Some(*one),
        _ => None,
    }
}

/// `silu(g)` whose only reader is a product of the same shape. The other factor must exist before `silu` does.
fn join_gate(graph: &Graph, first: NodeId, uses: &Uses) -> Option<Joined> {
    let act = graph.node(first);
    let Op::Unary(function) = act.op else { return None };
    let gate = [(Unary::Silu, Gate::Silu), (Unary::GeluTanh, Gate::GeluTanh)]
        .into_iter()
        .find_map(|(unary, gate)| (unary == function).then_some(gate))?;
    let second = only_use(uses, act.outputs[0])?;
    let product = graph.node(second);
    if !matches!(product.op, Op::Binary(Binary::Mul)) {
        return None;
    }
    let up = *product.inputs.iter().find(|&&v| v != act.outputs[0])?;
    let same = graph.value(up).ty == graph.value(act.inputs[0]).ty;
    let known = made_before(graph, up, first);
    (same && known).then(|| Joined {
        op: Op::Gate(gate),
        inputs: vec![act.inputs[0], up],
        outputs: product.outputs.clone(),
        second,
    })
}

/// `a + b` read by an RMS norm.
fn join_add_norm(graph: &Graph, first: NodeId, uses: &Uses) -> Option<Joined> {
    let add = graph.node(first);
    if !matches!(add.op, Op::Binary(Binary::Add)) {
        return None;
    }
    let [a, b] = [add.inputs[0], add.inputs[1]];
    if graph.value(a).ty != graph.value(b).ty {
        return None;
    }
    let sum = add.outputs[0];
    let (second, eps) = uses.get(&sum)?.iter().filter(|&&n| n != READ_AFTER_STEP).find_map(|&n| {
        let node = graph.node(n);
        let Op::RmsNorm { eps } = node.op else { return None };
        (node.inputs[0] == sum).then_some((n, eps))
    })?;
    let norm = graph.node(second);
    made_before(graph, norm.inputs[1], first).then(|| Joined {
        op: Op::AddRmsNorm { eps },
        inputs: vec![a, b, norm.inputs[1]],
        outputs: vec![sum, norm.outputs[0]],
        second,
    })
}

fn made_before(graph: &Graph, value: ValueId, node: NodeId) -> bool {
    match graph.value(value).origin {
        Origin::Node { node: maker, .. } => maker < node,
        Origin::Input(_) | Origin::Weight(_) | Origin::State(_) => true,
    }
}
