//! What passes know about a graph: values with views resolved, and the readers of each value.

use crate::graph::{Graph, NodeId, ValueId, ValueOrigin};
use crate::op::Op;
use crate::plan::PlanError;
use refrain_tensor::{DType, Layout};

/// A value with its views resolved: the source and the layout of its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Value that holds the elements; never a view.
    pub source: ValueId,
    /// Origin of the source.
    pub origin: ValueOrigin,
    /// Element type.
    pub dtype: DType,
    /// Layout of the elements within the source.
    pub layout: Layout,
}

impl Seen {
    /// Whether the source is a weight.
    pub fn is_weight(&self) -> bool {
        matches!(self.origin, ValueOrigin::Weight(_))
    }
}

/// Resolved views and readers of a graph.
pub(crate) struct GraphFacts<'g> {
    pub(crate) graph: &'g Graph,
    // Per value.
    seen: Vec<Seen>,
    // Per value, the nodes that read it, directly or through views; a node appears once per operand.
    readers: Vec<Vec<NodeId>>,
    // Per value, whether it or a view of it is an output.
    is_output: Vec<bool>,
}

impl<'g> GraphFacts<'g> {
    pub(crate) fn of(graph: &'g Graph) -> Result<GraphFacts<'g>, PlanError> {
        let n = graph.values().len();
        let (seen, readers, is_output) = (Vec::with_capacity(n), vec![Vec::new(); n], vec![false; n]);
        let mut facts = GraphFacts { graph, seen, readers, is_output };
        for (idx, value) in graph.values().iter().enumerate() {
            let (source, layout) = (ValueId::from_idx(idx), Layout::contiguous(value.ty.shape));
            let whole = Seen { source, origin: value.origin, dtype: value.ty.dtype, layout };
            facts.seen.push(match value.origin {
                ValueOrigin::Node { node, .. } => facts.through_view(node)?.unwrap_or(whole),
                ValueOrigin::Input(_) | ValueOrigin::Weight(_) | ValueOrigin::State(_) => whole,
            });
        }
        for (idx, node) in graph.nodes().iter().enumerate() {
            if !matches!(node.op, Op::View(_)) {
                for &input in &node.inputs {
                    facts.readers[facts.seen[input.idx()].source.idx()].push(NodeId::from_idx(idx));
                }
            }
        }
        for output in graph.outputs() {
            facts.is_output[facts.seen[output.value.idx()].source.idx()] = true;
        }
        Ok(facts)
    }

    /// Resolves a node if it is a view. A graph's values come after the values they are made from.
    fn through_view(&self, id: NodeId) -> Result<Option<Seen>, PlanError> {
        let node = self.graph.node(id);
        let Op::View(view) = &node.op else { return Ok(None) };
        let of = self.seen[node.inputs[0].idx()];
        let layout = view
            .apply(&of.layout)
            .map_err(|source| PlanError::NotAView { label: node.label.clone(), source })?;
        Ok(Some(Seen { layout, ..of }))
    }

    pub(crate) fn value(&self, value: ValueId) -> Seen {
        self.seen[value.idx()]
    }

    pub(crate) fn input(&self, node: NodeId, i: usize) -> Seen {
        self.value(self.graph.node(node).inputs[i])
    }

    pub(crate) fn output(&self, node: NodeId, i: usize) -> Seen {
        self.value(self.graph.node(node).outputs[i])
    }

    /// Inputs of a node, starting at `first`.
    pub(crate) fn inputs_from(&self, node: NodeId, first: usize) -> Vec<Seen> {
        self.graph.node(node).inputs[first..].iter().map(|&v| self.value(v)).collect()
    }

    /// Nodes that read an output, one entry per operand.
    pub(crate) fn readers(&self, node: NodeId, output: usize) -> &[NodeId] {
        &self.readers[self.graph.node(node).outputs[output].idx()]
    }

    /// Whether `reader` is the only reader of an output, with a single operand.
    pub(crate) fn is_only_reader(&self, reader: NodeId, node: NodeId, output: usize) -> bool {
        self.readers(node, output) == [reader] && !self.is_output(node, output)
    }

    pub(crate) fn is_output(&self, node: NodeId, output: usize) -> bool {
        self.is_output[self.graph.node(node).outputs[output].idx()]
    }

    /// Returns the node and output that produce the source, if all its elements are seen in order. The shape
    /// may differ.
    pub(crate) fn producer(&self, seen: &Seen) -> Option<(NodeId, usize)> {
        let ValueOrigin::Node { node, output } = seen.origin else { return None };
        let whole = self.graph.value(seen.source).ty.shape.n_elements();
        let in_order = seen.layout.is_contiguous() && seen.layout.offset() == 0;
        (in_order && seen.layout.shape().n_elements() == whole).then_some((node, output))
    }

    /// Like [`GraphFacts::producer`], but the shape must be the same.
    pub(crate) fn producer_of_same(&self, seen: &Seen) -> Option<(NodeId, usize)> {
        let same = seen.layout.shape() == self.graph.value(seen.source).ty.shape;
        self.producer(seen).filter(|_| same)
    }
}
