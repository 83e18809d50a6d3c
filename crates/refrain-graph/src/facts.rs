//! What a pass knows of a graph: values through their views, and who reads them.

use crate::graph::{Graph, NodeId, ValueId, ValueOrigin};
use crate::op::Op;
use crate::plan::PlanError;
use refrain_tensor::{DType, Layout};

/// A value as an op sees it: whose elements, and where each of them lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The value whose elements these are; never a view.
    pub source: ValueId,
    /// Where that comes from.
    pub origin: ValueOrigin,
    /// Element type.
    pub dtype: DType,
    /// Where each element lies among those of the source.
    pub layout: Layout,
}

impl Seen {
    /// Whether these are elements of a weight.
    pub fn is_weight(&self) -> bool {
        matches!(self.origin, ValueOrigin::Weight(_))
    }
}

/// Views looked through, and readers.
pub(crate) struct GraphFacts<'g> {
    pub(crate) graph: &'g Graph,
    // For each value.
    seen: Vec<Seen>,
    // For each value the nodes that read it, directly or through views; a node once for each operand.
    readers: Vec<Vec<NodeId>>,
    // Whether a value, or a view of it, is an output.
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

    /// What a node shows if it is a view. A graph's values stand behind those they are made of.
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

    /// Inputs of a node from one on.
    pub(crate) fn inputs_from(&self, node: NodeId, first: usize) -> Vec<Seen> {
        self.graph.node(node).inputs[first..].iter().map(|&v| self.value(v)).collect()
    }

    /// The nodes that read an output, one entry for each operand.
    pub(crate) fn readers(&self, node: NodeId, output: usize) -> &[NodeId] {
        &self.readers[self.graph.node(node).outputs[output].idx()]
    }

    /// Whether one operand of one node is all that reads an output.
    pub(crate) fn is_only_reader(&self, reader: NodeId, node: NodeId, output: usize) -> bool {
        self.readers(node, output) == [reader] && !self.is_output(node, output)
    }

    pub(crate) fn is_output(&self, node: NodeId, output: usize) -> bool {
        self.is_output[self.graph.node(node).outputs[output].idx()]
    }

    /// The node that makes what is seen, and which of its outputs it is, if that is seen whole and in order. Its shape
    /// may be another one.
    pub(crate) fn producer(&self, seen: &Seen) -> Option<(NodeId, usize)> {
        let ValueOrigin::Node { node, output } = seen.origin else { return None };
        let whole = self.graph.value(seen.source).ty.shape.n_elements();
        let in_order = seen.layout.is_contiguous() && seen.layout.offset() == 0;
        (in_order && seen.layout.shape().n_elements() == whole).then_some((node, output))
    }

    /// As [`GraphFacts::producer`], of something that is seen in its own shape.
    pub(crate) fn producer_of_same(&self, seen: &Seen) -> Option<(NodeId, usize)> {
        let same = seen.layout.shape() == self.graph.value(seen.source).ty.shape;
        self.producer(seen).filter(|_| same)
    }
}
