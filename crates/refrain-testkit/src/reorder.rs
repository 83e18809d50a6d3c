//! The same graph with its independent nodes in another order.

use crate::fill::Rng;
use refrain_graph::{Graph, GraphBuilder, GraphError, Op, ValueId, ValueOrigin};
use std::collections::HashMap;

/// Returns an equivalent graph whose nodes are in a random order that respects data dependencies. Host calls
/// keep their order, which is part of a graph's meaning.
pub fn reordered(graph: &Graph, rng: &mut Rng) -> Result<Graph, GraphError> {
    let mut builder = GraphBuilder::new(graph.weights().to_vec(), graph.states().to_vec());
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
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
    let mut left = before(graph);
    let mut done = vec![false; left.len()];
    for _ in 0..left.len() {
        let ready: Vec<usize> = (0..left.len()).filter(|&i| !done[i] && left[i].is_empty()).collect();
        let next = ready[rng.below(ready.len())];
        let node = &graph.nodes()[next];
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let made = builder.node(node.op.clone(), &inputs, &node.label)?;
        map.extend(node.outputs.iter().copied().zip(made));
        done[next] = true;
        left.iter_mut().for_each(|before| before.retain(|&b| b != next));
    }
    for output in graph.outputs() {
        builder.output(&output.name, map[&output.value])?;
    }
    if let Some(step) = graph.step() {
        builder.declare_step(step.clone());
    }
    Ok(builder.finish())
}

/// For each node, the nodes that must precede it.
fn before(graph: &Graph) -> Vec<Vec<usize>> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.states().len()];
    let mut last_host = None;
    let mut all = Vec::new();
    for (idx, node) in graph.nodes().iter().enumerate() {
        let maker = |&v: &ValueId| match graph.value(v).origin {
            ValueOrigin::Node { node, .. } => Some(node.idx()),
            ValueOrigin::Input(_) | ValueOrigin::Weight(_) | ValueOrigin::State(_) => None,
        };
        let mut before: Vec<usize> = node.inputs.iter().filter_map(maker).collect();
        for state in node.inputs.iter().filter_map(|&v| graph.state_of(v)) {
            if !node.op.state_updates().is_empty() {
                before.extend(&readers[state.idx()]);
            }
            readers[state.idx()].push(idx);
        }
        if matches!(node.op, Op::HostCall(_)) {
            before.extend(last_host.replace(idx));
        }
        all.push(before);
    }
    all
}
