//! Reverse-mode differentiation: appends the backward pass to the graph.
//!
//! [`GraphBuilder::gradients`] walks the nodes backwards from the loss and appends, for each, the nodes that
//! compute the gradients of its inputs from those of its outputs. The result is an ordinary graph: fusion,
//! planning and backends do not distinguish forward from backward. Each op declares its rule in the
//! exhaustive match below.
//!
//! Appended nodes read the incoming gradient first. A node is scheduled right before its first reader,
//! operands from left to right, so a recomputed value (see [`Recompute`]) is computed when the backward pass
//! reaches it.

use crate::graph::{Graph, GraphBuilder, GraphError, Node, NodeId, ValueId, ValueOrigin};
use crate::op::{Binary, Compare, Op, Reduce, Unary, View};
use crate::train_op::TrainOp;
use refrain_tensor::{DType, Shape};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Ranges of nodes that the backward pass recomputes instead of keeping their results: one per layer, in
/// order. Values that a range reads from outside are kept.
pub type Recompute = [Range<usize>];

/// Why a gradient cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GradError {
    /// A gradient would have to pass through an op that has none.
    #[error("{label}: {op} has no gradient: {because}")]
    NotDifferentiable {
        /// Label of the node.
        label: String,
        /// Name of the op.
        op: &'static str,
        /// Reason.
        because: &'static str,
    },
    /// A node of the backward pass could not be built.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// Gradient of the loss with respect to a value.
#[derive(Clone, Copy, Debug)]
enum Adjoint {
    /// 1 for each element.
    Ones,
    Value(ValueId),
}

impl GraphBuilder {
    /// Appends the backward pass of the sum of all elements of `loss`. Returns the gradient with respect to
    /// each value in `wrt`, in the type of that value; `None` if the loss does not depend on it.
    pub fn gradients(
        &mut self,
        loss: ValueId,
        wrt: &[ValueId],
        recompute: &Recompute,
    ) -> Result<Vec<Option<ValueId>>, GradError> {
        let scope = self.replace_scope(String::new());
        let mut pass = Backward::new(self, loss, wrt);
        let made = pass.run(recompute);
        let found = made.and_then(|()| wrt.iter().map(|value| pass.finished(*value)).collect());
        self.replace_scope(scope);
        found
    }
}

/// Why no gradient passes through a router or its experts.
const NO_EXPERTS: &str = "training of mixtures of experts is not supported";

struct Backward<'b> {
    builder: &'b mut GraphBuilder,
    /// Values that depend on one of `wrt`.
    needed: HashSet<ValueId>,
    adjoints: HashMap<ValueId, Adjoint>,
    /// Recomputed values, by the value they replace.
    again: HashMap<ValueId, ValueId>,
    n_forward: usize,
}

impl<'b> Backward<'b> {
    fn new(builder: &'b mut GraphBuilder, loss: ValueId, wrt: &[ValueId]) -> Backward<'b> {
        let graph = builder.graph();
        let mut needed: HashSet<ValueId> = wrt.iter().copied().collect();
        for node in graph.nodes() {
            if node.inputs.iter().any(|input| needed.contains(input)) {
                needed.extend(&node.outputs);
            }
        }
        let n_forward = graph.nodes().len();
        let adjoints = HashMap::from([(loss, Adjoint::Ones)]);
        Backward { builder, needed, adjoints, again: HashMap::new(), n_forward }
    }

    fn run(&mut self, recompute: &Recompute) -> Result<(), GradError> {
        for idx in (0..self.n_forward).rev() {
            if let Some(range) = recompute.iter().find(|range| range.end == idx + 1 && !range.is_empty()) {
                self.repeat(range.clone())?;
            }
            let node = self.graph().nodes()[idx].clone();
            let dys: Vec<Option<Adjoint>> =
                node.outputs.iter().map(|output| self.adjoints.get(output).copied()).collect();
            let flows = dys.iter().any(Option::is_some)
                && node.inputs.iter().any(|input| self.needed.contains(input));
            if flows {
                self.node(&node, &dys)?;
            }
        }
        Ok(())
    }

    fn graph(&self) -> &Graph {
        self.builder.graph()
    }

    /// Appends a copy of each node in a range; the backward pass reads the copies' results from then on.
    fn repeat(&mut self, range: Range<usize>) -> Result<(), GradError> {
        for idx in range {
            let node = self.graph().node(NodeId::from_idx(idx)).clone();
            // A state changes only once per step.
            if !node.op.state_updates().is_empty() || node.not_capturable().is_some() {
                continue;
            }
            let inputs: Vec<ValueId> = node.inputs.iter().map(|&value| self.current(value)).collect();
            let made = self.builder.node(node.op.clone(), &inputs, &format!("{}.again", node.label))?;
            self.again.extend(node.outputs.iter().copied().zip(made));
        }
        Ok(())
    }

    /// Value to read in the backward pass for a value of the forward pass.
    fn current(&self, value: ValueId) -> ValueId {
        self.again.get(&value).copied().unwrap_or(value)
    }

    /// Gradient of a value, once all contributions have been added.
    fn finished(&mut self, value: ValueId) -> Result<Option<ValueId>, GradError> {
        match self.adjoints.get(&value).copied() {
            None => Ok(None),
            Some(adjoint) => Ok(Some(self.materialise(adjoint, value)?)),
        }
    }

    fn materialise(&mut self, adjoint: Adjoint, like: ValueId) -> Result<ValueId, GradError> {
        match adjoint {
            Adjoint::Value(value) => Ok(value),
            Adjoint::Ones => {
                let like = self.current(like);
                Ok(self.builder.unary(Unary::Affine { mul: 0.0, add: 1.0 }, like)?)
            }
        }
    }

    fn add(&mut self, value: ValueId, adjoint: Adjoint) -> Result<(), GradError> {
        let sum = match self.adjoints.get(&value).copied() {
            None => adjoint,
            Some(known) => {
                let known = self.materialise(known, value)?;
                let more = self.materialise(adjoint, value)?;
                // A weight's gradient is accumulated from its last use to its first, which spans the backward
                // pass. Computing it early keeps one gradient alive instead of the larger operands.
                if !matches!(self.graph().value(value).origin, ValueOrigin::Node { .. }) {
                    self.builder.compute_early(known);
                }
                Adjoint::Value(self.builder.add(known, more)?)
            }
        };
        self.adjoints.insert(value, sum);
        Ok(())
    }

    fn node(&mut self, node: &Node, dys: &[Option<Adjoint>]) -> Result<(), GradError> {
        // Cross-entropy computes its gradient in the forward pass.
        if let (Some(Some(Adjoint::Ones)), Op::Train(TrainOp::CrossEntropy)) = (dys.first(), &node.op)
            && self.needed.contains(&node.inputs[0])
            && node.inputs[1..].iter().all(|input| !self.needed.contains(input))
        {
            let gradient = self.current(node.outputs[1]);
            return self.add(node.inputs[0], Adjoint::Value(gradient));
        }
        // A sum passes its gradient through unchanged, and views of ones are ones: no node is needed.
        if let ([Some(Adjoint::Ones)], Op::View(View::Reshape(_) | View::Permute(_)) | Op::Copy) =
            (dys, &node.op)
        {
            return self.add(node.inputs[0], Adjoint::Ones);
        }
        if let ([Some(Adjoint::Ones)], Op::Reduce { kind: Reduce::Sum, .. }) = (dys, &node.op) {
            return self.add(node.inputs[0], Adjoint::Ones);
        }
        let gradients = self.rule(node, dys)?;
        for (&input, gradient) in node.inputs.iter().zip(gradients) {
            match gradient {
                _ if !self.needed.contains(&input) => {}
                Some(gradient) => self.add(input, Adjoint::Value(gradient))?,
                None if !self.builder.ty(input).dtype.is_float() => {}
                None => {
                    let because = "the gradient is wanted for an input that it treats as constant";
                    let (label, op) = (node.label.clone(), node.op.name());
                    return Err(GradError::NotDifferentiable { label, op, because });
                }
            }
        }
        Ok(())
    }

    /// Gradients of a node's inputs from those of its outputs. `None` for an input that has none or whose
    /// gradient is not needed.
    fn rule(&mut self, node: &Node, dys: &[Option<Adjoint>]) -> Result<Vec<Option<ValueId>>, GradError> {
        let none = |because| {
            Err(GradError::NotDifferentiable { label: node.label.clone(), op: node.op.name(), because })
        };
        let label = format!("{}.grad", node.label);
        let needs: Vec<bool> = node.inputs.iter().map(|input| self.needed.contains(input)).collect();
        let ins: Vec<ValueId> = node.inputs.iter().map(|&value| self.current(value)).collect();
        let ty = |pass: &Backward<'_>, i: usize| pass.builder.ty(ins[i]);
        // Gradient of the first output; most ops have only one.
        let first = match dys.first().copied().flatten() {
            Some(adjoint) => Some(self.materialise(adjoint, node.outputs[0])?),
            None => None,
        };
        let Some(dy) = first else {
            if matches!(node.op, Op::AddRmsNorm { .. }) {
                return self.add_rms_norm(node, dys, &ins, &label);
            }
            if matches!(node.op, Op::Moe(_)) {
                return none(NO_EXPERTS);
            }
            return none("only its first output is differentiable");
        };
        match &node.op {
            Op::View(view) => {
                let shape = ty(self, 0).shape;
                let dx = match view {
                    View::Reshape(_) => {
                        let dy = self.dense(dy)?;
                        self.one(Op::View(View::Reshape(shape)), &[dy], &label)?
                    }
                    View::Permute(order) => {
                        let mut back = vec![0; order.len()];
                        order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
                        self.permute(dy, &back)?
                    }
                    View::Slice { axis, start, len } => {
                        let after = shape.dims()[*axis] - start - len;
                        self.one(Op::Pad { axis: *axis, before: *start, after }, &[dy], &label)?
                    }
                    View::Broadcast(_) => self.sum_to(dy, shape, &label)?,
                };
                Ok(vec![Some(dx)])
            }
            Op::Copy => Ok(vec![Some(dy)]),
            Op::Cast(_) => match ty(self, 0).dtype {
                from if from.is_float() => Ok(vec![Some(self.one(Op::Cast(from), &[dy], &label)?)]),
                _ => none("its input is not floating-point"),
            },
            Op::Unary(Unary::Neg) => Ok(vec![Some(self.one(Op::Unary(Unary::Neg), &[dy], &label)?)]),
            Op::Unary(Unary::Affine { mul, .. }) => {
                let scale = Op::Unary(Unary::Affine { mul: *mul, add: 0.0 });
                Ok(vec![Some(self.one(scale, &[dy], &label)?)])
            }
            Op::Unary(f) => {
                Ok(vec![Some(self.one(Op::Train(TrainOp::UnaryGrad(*f)), &[dy, ins[0]], &label)?)])
            }
            Op::Binary(f) => self.binary(*f, node, dy, &ins, &needs, &label),
            Op::Reduce { kind, axis } => {
                let x = ty(self, 0);
                let dx = match kind {
                    Reduce::Sum => dy,
                    Reduce::Mean => {
                        let mul = 1.0 / x.shape.dims()[*axis] as f32;
                        self.one(Op::Unary(Unary::Affine { mul, add: 0.0 }), &[dy], &label)?
                    }
                    // Tied elements share the gradient.
                    Reduce::Max => {
                        let y = self.current(node.outputs[0]);
                        let mask = self.one(Op::Compare(Compare::Equal), &[ins[0], y], &label)?;
                        let mask = self.one(Op::Cast(x.dtype), &[mask], &label)?;
                        let n = self.one(Op::Reduce { kind: Reduce::Sum, axis: *axis }, &[mask], &label)?;
                        let share = self.one(Op::Binary(Binary::Div), &[dy, n], &label)?;
                        return Ok(vec![Some(self.one(Op::Binary(Binary::Mul), &[share, mask], &label)?)]);
                    }
                };
                Ok(vec![Some(self.one(Op::View(View::Broadcast(x.shape)), &[dx], &label)?)])
            }
            Op::Select => {
                let zeros = self.one(Op::Unary(Unary::Affine { mul: 0.0, add: 0.0 }), &[dy], &label)?;
                let mut gradients = vec![None];
                for (i, inputs) in [(1, [ins[0], dy, zeros]), (2, [ins[0], zeros, dy])] {
                    gradients.push(match needs[i] {
                        true => {
                            let gradient = self.one(Op::Select, &inputs, &label)?;
                            Some(self.sum_to(gradient, ty(self, i).shape, &label)?)
                        }
                        false => None,
                    });
                }
                Ok(gradients)
            }
            Op::Pick => {
                let width = ty(self, 0).shape.dims()[1];
                Ok(vec![Some(self.one(Op::PlaceColumns { width }, &[ins[1], dy], &label)?), None])
            }
            Op::PlaceColumns { .. } => Ok(vec![None, Some(self.one(Op::Pick, &[dy, ins[0]], &label)?)]),
            Op::Pad { axis, before, .. } => {
                let len = ty(self, 0).shape.dims()[*axis];
                let slice = Op::View(View::Slice { axis: *axis, start: *before, len });
                Ok(vec![Some(self.one(slice, &[dy], &label)?)])
            }
            Op::Softmax => {
                let y = self.current(node.outputs[0]);
                Ok(vec![Some(self.one(Op::Train(TrainOp::SoftmaxGrad), &[dy, y], &label)?)])
            }
            Op::MatMul => self.matmul(dy, &ins, &needs, &label),
            Op::GatherRows(_) => {
                let table = ty(self, 0);
                if !table.dtype.is_float() {
                    return none("its table is quantised");
                }
                let scatter = Op::ScatterAddRows { n_rows: table.shape.dims()[0] };
                let rows = self.one(scatter, &[ins[1], dy], &label)?;
                Ok(vec![Some(self.cast(rows, table.dtype)?), None])
            }
            Op::ScatterAddRows { .. } => {
                let gather = Op::GatherRows(ty(self, 1).dtype);
                Ok(vec![None, Some(self.one(gather, &[dy, ins[0]], &label)?)])
            }
            Op::RmsNorm { eps } => {
                let op = Op::Train(TrainOp::RmsNormGrad { eps: *eps, adds: false });
                let made = self.builder.node(op, &[dy, ins[0], ins[1]], &label)?;
                Ok(vec![Some(made[0]), Some(made[1])])
            }
            Op::AddRmsNorm { .. } => self.add_rms_norm(node, dys, &ins, &label),
            Op::Gate(kind) => {
                let op = Op::Train(TrainOp::GateGrad(*kind));
                let made = self.builder.node(op, &[dy, ins[0], ins[1]], &label)?;
                Ok(vec![Some(made[0]), Some(made[1])])
            }
            Op::Rope(rope) => {
                let op = Op::Train(TrainOp::RopeGrad(*rope));
                Ok(vec![Some(self.one(op, &[dy, ins[1], ins[2]], &label)?), None, None])
            }
            Op::SpanAttention(attention) => {
                if dys.get(1).is_some_and(Option::is_some) {
                    return none("only its first output is differentiable, not the log-sum-exp");
                }
                let [y, lse] = [node.outputs[0], node.outputs[1]].map(|value| self.current(value));
                let op = Op::Train(TrainOp::SpanAttentionGrad(*attention));
                let inputs = [dy, ins[0], ins[1], ins[2], ins[3], y, lse];
                let made = self.builder.node(op, &inputs, &label)?;
                Ok(vec![Some(made[0]), Some(made[1]), Some(made[2]), None])
            }
            Op::Train(TrainOp::CrossEntropy) => {
                let gradient = self.current(node.outputs[1]);
                let rows = [ty(self, 0).shape.dims()[0], 1];
                let dy = self.dense(dy)?;
                let dy = self.builder.reshape(dy, &rows)?;
                let dy = self.cast(dy, ty(self, 0).dtype)?;
                let logits = self.one(Op::Binary(Binary::Mul), &[dy, gradient], &label)?;
                Ok(vec![Some(logits), None, None])
            }
            Op::Train(TrainOp::Dropout(_)) => {
                Ok(vec![Some(self.one(node.op.clone(), &[dy, ins[1]], &label)?), None])
            }
            Op::Compare(_) => none("its output is piecewise constant"),
            Op::KvAppend | Op::KvAppendBytes | Op::Attention(_) => {
                none("paged caches are for inference only; train with attention among the rows of a step")
            }
            Op::Recurrent(_) => none("recurrent layers are for inference only"),
            Op::Sample(_) => none("sampling is not differentiable"),
            Op::Moe(_) => none(NO_EXPERTS),
            Op::Lora(_) => {
                none("adapters of several sequences are for inference only; attach the one to train")
            }
            Op::Accumulate | Op::Train(TrainOp::AdamW(_)) => none("it changes a state"),
            Op::Train(
                TrainOp::UnaryGrad(_)
                | TrainOp::GateGrad(_)
                | TrainOp::SoftmaxGrad
                | TrainOp::RmsNormGrad { .. }
                | TrainOp::AddProduct
                | TrainOp::RopeGrad(_)
                | TrainOp::SpanAttentionGrad(_)
                | TrainOp::SumSquares,
            ) => none("it is already part of a backward pass"),
            Op::HostCall(_) => none("it is a host function"),
        }
    }

    fn one(&mut self, op: Op, inputs: &[ValueId], label: &str) -> Result<ValueId, GradError> {
        Ok(self.builder.node(op, inputs, label)?[0])
    }

    fn cast(&mut self, value: ValueId, to: DType) -> Result<ValueId, GradError> {
        match self.builder.ty(value).dtype == to {
            true => Ok(value),
            false => Ok(self.builder.cast(value, to)?),
        }
    }

    /// Permutes the dimensions. The inverse of an existing permutation returns its input.
    fn permute(&mut self, value: ValueId, order: &[usize]) -> Result<ValueId, GradError> {
        if let ValueOrigin::Node { node, .. } = self.graph().value(value).origin
            && let Op::View(View::Permute(first)) = &self.graph().node(node).op
            && order.iter().enumerate().all(|(to, &from)| first[from] == to)
        {
            return Ok(self.graph().node(node).inputs[0]);
        }
        Ok(self.builder.permute(value, order)?)
    }

    /// Decodes a frozen weight again instead of keeping its decoded form: the decoded weights of all layers
    /// would be larger than the model.
    fn decoded_again(&mut self, value: ValueId) -> Result<ValueId, GradError> {
        let ValueOrigin::Node { node, .. } = self.graph().value(value).origin else { return Ok(value) };
        let Node { op, inputs, label, .. } = self.graph().node(node).clone();
        let source = match (&op, inputs.as_slice()) {
            (Op::Cast(_), &[weight]) if self.is_weight(weight) => weight,
            (Op::View(_), &[viewed]) => match self.decoded_again(viewed)? {
                same if same == viewed => return Ok(value),
                again => again,
            },
            _ => return Ok(value),
        };
        self.one(op, &[source], &format!("{label}.again"))
    }

    fn is_weight(&self, value: ValueId) -> bool {
        matches!(self.graph().value(value).origin, ValueOrigin::Weight(_))
    }

    /// Swaps the last two dimensions.
    fn transpose(&mut self, value: ValueId) -> Result<ValueId, GradError> {
        let rank = self.builder.ty(value).shape.rank();
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        self.permute(value, &order)
    }

    /// Returns a value that can be reshaped: a copy if the elements are not in order.
    fn dense(&mut self, value: ValueId) -> Result<ValueId, GradError> {
        let mut at = value;
        loop {
            let ValueOrigin::Node { node, .. } = self.graph().value(at).origin else { return Ok(value) };
            let Op::View(view) = &self.graph().node(node).op else { return Ok(value) };
            match view {
                View::Reshape(_) => at = self.graph().node(node).inputs[0],
                View::Permute(_) | View::Slice { .. } | View::Broadcast(_) => {
                    return Ok(self.builder.copy(value)?);
                }
            }
        }
    }

    /// Sums over broadcast dimensions.
    fn sum_to(&mut self, value: ValueId, shape: Shape, label: &str) -> Result<ValueId, GradError> {
        let mut value = value;
        let dims = self.builder.ty(value).shape;
        let extra = dims.rank() - shape.rank();
        for (axis, &n) in dims.dims().iter().enumerate() {
            let is_repeated = n != 1 && (axis < extra || shape.dims()[axis - extra] == 1);
            if is_repeated {
                value = self.one(Op::Reduce { kind: Reduce::Sum, axis }, &[value], label)?;
            }
        }
        if self.builder.ty(value).shape != shape {
            let dense = self.dense(value)?;
            value = self.builder.reshape(dense, shape.dims())?;
        }
        Ok(value)
    }

    fn binary(
        &mut self,
        f: Binary,
        node: &Node,
        dy: ValueId,
        ins: &[ValueId],
        needs: &[bool],
        label: &str,
    ) -> Result<Vec<Option<ValueId>>, GradError> {
        let mut gradients = vec![None, None];
        for i in (0..2).filter(|&i| needs[i]) {
            let (this, other) = (ins[i], ins[1 - i]);
            let wide = match (f, i) {
                (Binary::Add, _) | (Binary::Sub, 0) => dy,
                (Binary::Sub, _) => self.one(Op::Unary(Unary::Neg), &[dy], label)?,
                (Binary::Mul, _) => self.one(Op::Binary(Binary::Mul), &[dy, other], label)?,
                (Binary::Div, 0) => self.one(Op::Binary(Binary::Div), &[dy, other], label)?,
                (Binary::Div, _) => {
                    let y = self.current(node.outputs[0]);
                    let product = self.one(Op::Binary(Binary::Mul), &[dy, y], label)?;
                    let quotient = self.one(Op::Binary(Binary::Div), &[product, this], label)?;
                    self.one(Op::Unary(Unary::Neg), &[quotient], label)?
                }
                // Equal elements each get half of the gradient.
                (Binary::Max, _) => {
                    let to = Op::Cast(self.builder.ty(dy).dtype);
                    let larger = self.one(Op::Compare(Compare::Less), &[other, this], label)?;
                    let larger = self.one(to.clone(), &[larger], label)?;
                    let equal = self.one(Op::Compare(Compare::Equal), &[other, this], label)?;
                    let equal = self.one(to, &[equal], label)?;
                    let half = self.one(Op::Unary(Unary::Affine { mul: 0.5, add: 0.0 }), &[equal], label)?;
                    let share = self.builder.add(larger, half)?;
                    self.one(Op::Binary(Binary::Mul), &[dy, share], label)?
                }
            };
            gradients[i] = Some(self.sum_to(wide, self.builder.ty(this).shape, label)?);
        }
        Ok(gradients)
    }

    /// `da = dy b^T` and `db = a^T dy`, summed over broadcast dimensions.
    fn matmul(
        &mut self,
        dy: ValueId,
        ins: &[ValueId],
        needs: &[bool],
        label: &str,
    ) -> Result<Vec<Option<ValueId>>, GradError> {
        let [a, b] = [ins[0], ins[1]];
        let (a_ty, b_ty) = (self.builder.ty(a), self.builder.ty(b));
        let da = match needs[0] {
            true => {
                let b = if needs[1] { b } else { self.decoded_again(b)? };
                let turned = self.transpose(b)?;
                let da = self.one(Op::MatMul, &[dy, turned], label)?;
                Some(self.sum_to(da, a_ty.shape, label)?)
            }
            false => None,
        };
        if !needs[1] {
            return Ok(vec![da, None]);
        }
        // Computes the transposed product and transposes the result: the gradient of a weight, which enters
        // transposed, then comes out in the weight's layout.
        let (rows_a, rows_dy) = match b_ty.shape.rank() {
            // `b` is one matrix for all rows, so the outer dimensions fold into the rows.
            2 if a_ty.shape.rank() > 2 => {
                let flat = |pass: &mut Backward<'_>, x: ValueId| -> Result<ValueId, GradError> {
                    let shape = pass.builder.ty(x).shape;
                    let columns = shape.dim_back(0);
                    let dense = pass.dense(x)?;
                    Ok(pass.builder.reshape(dense, &[shape.n_elements() / columns.max(1), columns])?)
                };
                (flat(self, a)?, flat(self, dy)?)
            }
            _ => (a, dy),
        };
        let turned = self.transpose(rows_dy)?;
        let db_turned = self.one(Op::MatMul, &[turned, rows_a], label)?;
        let db = self.transpose(db_turned)?;
        let db = self.sum_to(db, b_ty.shape, label)?;
        Ok(vec![da, Some(self.cast(db, b_ty.dtype)?)])
    }

    /// Gradients may arrive through the sum, the norm, or both.
    fn add_rms_norm(
        &mut self,
        node: &Node,
        dys: &[Option<Adjoint>],
        ins: &[ValueId],
        label: &str,
    ) -> Result<Vec<Option<ValueId>>, GradError> {
        let Op::AddRmsNorm { eps } = node.op else { unreachable!("called for this op alone") };
        let mut sum = match dys[0] {
            Some(adjoint) => Some(self.materialise(adjoint, node.outputs[0])?),
            None => None,
        };
        let mut weight = None;
        if let Some(adjoint) = dys[1] {
            let dy = self.materialise(adjoint, node.outputs[1])?;
            let x = self.current(node.outputs[0]);
            let op = Op::Train(TrainOp::RmsNormGrad { eps, adds: false });
            let made = self.builder.node(op, &[dy, x, ins[2]], label)?;
            sum = Some(match sum {
                Some(sum) => self.builder.add(sum, made[0])?,
                None => made[0],
            });
            weight = Some(made[1]);
        }
        Ok(vec![sum, sum, weight])
    }
}
