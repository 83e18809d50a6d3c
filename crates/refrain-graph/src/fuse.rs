//! Fusion of nodes, and removal of dead ones.

use crate::graph::{Graph, NodeId, ValueId, ValueOrigin};
use crate::op::{Binary, Gate, Op, Unary};
use crate::schedule::{Dependencies, is_view, source};
use crate::train_op::TrainOp;
use crate::{GraphBuilder, GraphError};
use std::collections::HashMap;

/// Fuses `silu(g) * u` into a gate and `a + b` followed by its RMS norm into one node, and drops nodes that
/// no output or state needs.
///
/// Values with other readers stay available: the sum before a norm is an output of the fused node. The result
/// depends on the data flow, not on the order in which the graph was built. Nodes of the new graph are in
/// execution order.
pub fn fuse(graph: &Graph) -> Result<Graph, GraphError> {
    let live = live_nodes(graph);
    let order: Vec<NodeId> = Dependencies::of(graph).canonical().into_iter().map(NodeId::from_idx).collect();
    let joins = Joins::find(graph, &order, &live);
    let mut rebuilt = Rebuilt::new(graph)?;
    for &id in order.iter().filter(|id| live[id.idx()] && !joins.absorbed[id.idx()]) {
        let node = graph.node(id);
        match joins.at.get(&id) {
            Some(joined) => rebuilt.push(joined.op.clone(), &joined.inputs, &joined.outputs, &node.label)?,
            None => rebuilt.push(node.op.clone(), &node.inputs, &node.outputs, &node.label)?,
        }
    }
    rebuilt.finish()
}

/// Fuses the sum of two gradients into the node that computes one of them, if that is a matrix product of
/// values or the gradient of a norm. For backends whose kernels can accumulate ([`crate::Backend::adds`]).
/// Saves one rounding of the sum.
pub fn join_sums(graph: &Graph) -> Result<Graph, GraphError> {
    let live = live_nodes(graph);
    let order: Vec<NodeId> = Dependencies::of(graph).canonical().into_iter().map(NodeId::from_idx).collect();
    let uses = Uses::of(graph, &order, &live);
    let mut joins = Joins { at: HashMap::new(), absorbed: vec![false; graph.nodes().len()] };
    let mut place = vec![0; graph.nodes().len()];
    order.iter().enumerate().for_each(|(at, id)| place[id.idx()] = at);
    for &id in order.iter().filter(|id| live[id.idx()]) {
        if let Some((other, joined)) = add_to_made(graph, id, &uses, &joins, &place) {
            joins.absorbed[other.idx()] = true;
            joins.at.insert(id, joined);
        }
    }
    let mut rebuilt = Rebuilt::new(graph)?;
    for &id in order.iter().filter(|id| live[id.idx()] && !joins.absorbed[id.idx()]) {
        let node = graph.node(id);
        match joins.at.get(&id) {
            Some(joined) => rebuilt.push(joined.op.clone(), &joined.inputs, &joined.outputs, &node.label)?,
            None => rebuilt.push(node.op.clone(), &node.inputs, &node.outputs, &node.label)?,
        }
    }
    rebuilt.finish()
}

/// Matches a sum with one operand that is the first output of a node and has no other reader.
fn add_to_made(
    graph: &Graph,
    add: NodeId,
    uses: &Uses,
    joins: &Joins,
    place: &[usize],
) -> Option<(NodeId, JoinedNode)> {
    let node = graph.node(add);
    if !matches!(node.op, Op::Binary(Binary::Add)) {
        return None;
    }
    let &[left, right] = node.inputs.as_slice() else { return None };
    if graph.value(left).ty != graph.value(right).ty || left == right {
        return None;
    }
    [(right, left), (left, right)].into_iter().find_map(|(made, other)| {
        let ValueOrigin::Node { node: maker, output: 0 } = graph.value(made).origin else { return None };
        let by = graph.node(maker);
        if !uses.is_only(made, add) || joins.at.contains_key(&maker) || joins.absorbed[maker.idx()] {
            return None;
        }
        let outputs = node.outputs.clone();
        if matches!(by.op, Op::MatMul) {
            let [a, b] = [by.inputs[0], by.inputs[1]];
            let of_weight = matches!(graph.value(source(graph, b)).origin, ValueOrigin::Weight(_));
            let dtype = graph.value(made).ty.dtype;
            let types = [a, b].map(|value| graph.value(value).ty);
            let fits = types.iter().all(|ty| ty.shape.rank() == 2 && ty.dtype == dtype);
            let joined =
                JoinedNode { op: Op::Train(TrainOp::AddProduct), inputs: vec![other, a, b], outputs };
            return (!of_weight && fits).then_some((maker, joined));
        }
        let Op::Train(TrainOp::RmsNormGrad { eps, adds: false }) = by.op else { return None };
        // The gradient of the weights is then computed later, so nothing may read it before the sum.
        let later = uses.of_value(by.outputs[1]).iter().all(|reader| place[reader.idx()] > place[add.idx()]);
        let op = Op::Train(TrainOp::RmsNormGrad { eps, adds: true });
        let inputs = [by.inputs.as_slice(), &[other]].concat();
        let outputs = vec![outputs[0], by.outputs[1]];
        later.then_some((maker, JoinedNode { op, inputs, outputs }))
    })
}

/// The new graph, and the new id of each old value.
struct Rebuilt<'g> {
    graph: &'g Graph,
    builder: GraphBuilder,
    map: HashMap<ValueId, ValueId>,
}

impl<'g> Rebuilt<'g> {
    fn new(graph: &'g Graph) -> Result<Rebuilt<'g>, GraphError> {
        let mut builder = GraphBuilder::new(graph.weights().to_vec(), graph.states().to_vec());
        let mut map = HashMap::new();
        for (idx, value) in graph.values().iter().enumerate() {
            let new = match value.origin {
                ValueOrigin::Input(i) => {
                    let input = &graph.inputs()[i.idx()];
                    builder.input(&input.name, input.ty)?
                }
                ValueOrigin::Weight(w) => builder.weight(w),
                ValueOrigin::State(s) => builder.state(s),
                ValueOrigin::Node { .. } => continue,
            };
            map.insert(ValueId::from_idx(idx), new);
        }
        Ok(Rebuilt { graph, builder, map })
    }

    fn push(&mut self, op: Op, ins: &[ValueId], outs: &[ValueId], label: &str) -> Result<(), GraphError> {
        let inputs = ins.iter().map(|&v| self.value(v)).collect::<Result<Vec<_>, _>>()?;
        let made = self.builder.node(op, &inputs, label)?;
        self.map.extend(outs.iter().copied().zip(made));
        Ok(())
    }

    /// Maps a value to the new graph. Views are created on first use.
    fn value(&mut self, value: ValueId) -> Result<ValueId, GraphError> {
        let mut views = Vec::new();
        let mut at = value;
        while !self.map.contains_key(&at) {
            let ValueOrigin::Node { node, .. } = self.graph.value(at).origin else {
                unreachable!("inputs, weights and states were mapped first");
            };
            assert!(
                is_view(self.graph, node.idx()),
                "{} is read before it is computed",
                self.graph.node(node).label
            );
            views.push(node);
            at = self.graph.node(node).inputs[0];
        }
        for node in views.into_iter().rev().map(|id| self.graph.node(id)) {
            let made = self.builder.node(node.op.clone(), &[self.map[&node.inputs[0]]], &node.label)?;
            self.map.insert(node.outputs[0], made[0]);
        }
        Ok(self.map[&value])
    }

    fn finish(mut self) -> Result<Graph, GraphError> {
        for output in self.graph.outputs() {
            let value = self.value(output.value)?;
            self.builder.output(&output.name, value)?;
        }
        for value in self.graph.early().iter().filter_map(|value| self.map.get(value)) {
            self.builder.compute_early(*value);
        }
        // Inputs and outputs are added in their original order, so ids and positions match.
        if let Some(step) = self.graph.step() {
            self.builder.declare_step(step.clone());
        }
        Ok(self.builder.finish())
    }
}

struct JoinedNode {
    op: Op,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
}

/// Fused nodes by the node they replace, and the nodes absorbed into one.
struct Joins {
    at: HashMap<NodeId, JoinedNode>,
    absorbed: Vec<bool>,
}

impl Joins {
    fn find(graph: &Graph, order: &[NodeId], live: &[bool]) -> Joins {
        let uses = Uses::of(graph, order, live);
        let mut joins = Joins { at: HashMap::new(), absorbed: vec![false; graph.nodes().len()] };
        for &id in order.iter().filter(|id| live[id.idx()]) {
            if let Some((other, joined)) = gate(graph, id, &uses).or_else(|| add_norm(graph, id, &uses)) {
                joins.absorbed[other.idx()] = true;
                joins.at.insert(id, joined);
            }
        }
        joins
    }
}

/// Live readers of each value in canonical order, and the outputs.
struct Uses {
    readers: HashMap<ValueId, Vec<NodeId>>,
    outputs: Vec<ValueId>,
}

impl Uses {
    fn of(graph: &Graph, order: &[NodeId], live: &[bool]) -> Uses {
        let mut readers: HashMap<ValueId, Vec<NodeId>> = HashMap::new();
        let views = (0..graph.nodes().len()).filter(|&idx| is_view(graph, idx)).map(NodeId::from_idx);
        for id in order.iter().copied().chain(views).filter(|id| live[id.idx()]) {
            for &value in &graph.node(id).inputs {
                readers.entry(value).or_default().push(id);
            }
        }
        Uses { readers, outputs: graph.outputs().iter().map(|o| o.value).collect() }
    }

    fn of_value(&self, value: ValueId) -> &[NodeId] {
        self.readers.get(&value).map_or(&[], Vec::as_slice)
    }

    fn is_only(&self, value: ValueId, reader: NodeId) -> bool {
        self.of_value(value) == [reader] && !self.outputs.contains(&value)
    }
}

fn live_nodes(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.nodes().len()];
    let mut stack: Vec<ValueId> = graph.outputs().iter().map(|o| o.value).collect();
    for node in graph.nodes() {
        if !node.op.state_updates().is_empty() || matches!(node.op, Op::HostCall(_)) {
            stack.extend(&node.outputs);
        }
    }
    // A host call without outputs runs for its side effects.
    for (idx, node) in graph.nodes().iter().enumerate() {
        if node.outputs.is_empty() {
            live[idx] = true;
            stack.extend(&node.inputs);
        }
    }
    while let Some(value) = stack.pop() {
        if let ValueOrigin::Node { node, .. } = graph.value(value).origin
            && !std::mem::replace(&mut live[node.idx()], true)
        {
            stack.extend(&graph.node(node).inputs);
        }
    }
    live
}

/// Matches a product of two factors where one is an activation of the other factor's shape with no other
/// reader. The gate replaces the product, where both factors are available.
fn gate(graph: &Graph, product: NodeId, uses: &Uses) -> Option<(NodeId, JoinedNode)> {
    let node = graph.node(product);
    if !matches!(node.op, Op::Binary(Binary::Mul)) {
        return None;
    }
    let &[left, right] = node.inputs.as_slice() else { return None };
    [(left, right), (right, left)].into_iter().find_map(|(activated, up)| {
        let ValueOrigin::Node { node: maker, .. } = graph.value(activated).origin else { return None };
        let Op::Unary(function) = graph.node(maker).op else { return None };
        let gate = [(Unary::Silu, Gate::Silu), (Unary::GeluTanh, Gate::GeluTanh)]
            .into_iter()
            .find_map(|(unary, gate)| (unary == function).then_some(gate))?;
        let x = graph.node(maker).inputs[0];
        let fits = uses.is_only(activated, product) && graph.value(up).ty == graph.value(x).ty;
        let joined = JoinedNode { op: Op::Gate(gate), inputs: vec![x, up], outputs: node.outputs.clone() };
        fits.then_some((maker, joined))
    })
}

/// Matches a sum that an RMS norm reads, if the norm's weights are available before any node runs. The fused
/// node replaces the sum, which others may read.
fn add_norm(graph: &Graph, add: NodeId, uses: &Uses) -> Option<(NodeId, JoinedNode)> {
    let node = graph.node(add);
    if !matches!(node.op, Op::Binary(Binary::Add)) {
        return None;
    }
    let [a, b] = [node.inputs[0], node.inputs[1]];
    if graph.value(a).ty != graph.value(b).ty {
        return None;
    }
    let sum = node.outputs[0];
    uses.of_value(sum).iter().find_map(|&reader| {
        let norm = graph.node(reader);
        let Op::RmsNorm { eps } = norm.op else { return None };
        let w = norm.inputs[1];
        let is_made = matches!(graph.value(source(graph, w)).origin, ValueOrigin::Node { .. });
        let fits = norm.inputs[0] == sum && !is_made;
        let outputs = vec![sum, norm.outputs[0]];
        fits.then(|| (reader, JoinedNode { op: Op::AddRmsNorm { eps }, inputs: vec![a, b, w], outputs }))
    })
}
