//! Reverse-mode differentiation: the backward pass as more nodes of the same graph.
//!
//! [`GraphBuilder::gradients`] walks the nodes from the loss back and appends, for each, what turns the gradients of its
//! outputs into those of its inputs. The result is an ordinary graph: fusion, planning and every backend see no
//! difference between forward and backward. Each op declares its rule in one exhaustive match below.
//!
//! Nodes that are appended read the incoming gradient first. A node runs right before what needs it, operands from left
//! to right, so a value that is computed again (see [`Recompute`]) is computed when the backward pass gets there.

use crate::graph::{Graph, GraphBuilder, GraphError, Node, NodeId, ValueId, ValueOrigin};
use crate::op::{Binary, Compare, Op, Reduce, Unary, View};
use crate::train_op::TrainOp;
use refrain_tensor::{DType, Shape};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Nodes whose results the backward pass computes again instead of keeping them: one range for each layer, in their
/// order. What a range reads from outside is kept.
pub type Recompute = [Range<usize>];

/// Why there is no gradient.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GradError {
    /// A value that gradients flow through is made by an op that has none.
    #[error("{label}: {op} has no gradient: {because}")]
    NotDifferentiable {
        /// Label of the node.
        label: String,
        /// Name of the op.
        op: &'static str,
        /// Why it has none.
        because: &'static str,
    },
    /// A node of the backward pass cannot be built.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// The gradient of the loss with respect to a value.
#[derive(Clone, Copy, Debug)]
enum Adjoint {
    /// 1 for each element.
    Ones,
    Value(ValueId),
}

impl GraphBuilder {
    /// Appends the backward pass of the sum of all elements of `loss`, and gives its gradient with respect to each of
    /// `wrt`; `None` where the loss does not depend on it. A gradient has the type of its value.
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

/// Why nothing flows through a router or the experts behind it.
const NO_EXPERTS: &str = "training of mixtures of experts is not supported";

struct Backward<'b> {
    builder: &'b mut GraphBuilder,
    /// Values that depend on what gradients are asked of.
    needed: HashSet<ValueId>,
    adjoints: HashMap<ValueId, Adjoint>,
    /// Values that were computed again, by what they repeat.
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

    /// Appends the nodes of a range once more; what follows reads their results instead.
    fn repeat(&mut self, range: Range<usize>) -> Result<(), GradError> {
        for idx in range {
            let node = self.graph().node(NodeId::from_idx(idx)).clone();
            // A state is changed once.
            if !node.op.state_updates().is_empty() || node.not_capturable().is_some() {
                continue;
            }
            let inputs: Vec<ValueId> = node.inputs.iter().map(|&value| self.current(value)).collect();
            let made = self.builder.node(node.op.clone(), &inputs, &format!("{}.again", node.label))?;
            self.again.extend(node.outputs.iter().copied().zip(made));
        }
        Ok(())
    }

    /// A value of the forward pass as the backward pass reads it.
    fn current(&self, value: ValueId) -> ValueId {
        self.again.get(&value).copied().unwrap_or(value)
    }

    /// The gradient of a value, once nothing adds to it any more.
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
                // What a weight gets from its last use waits for its first one, across the whole backward pass: better
                // as a gradient than as the larger values that it is made of.
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
        // The loss has its gradient already.
        if let (Some(Some(Adjoint::Ones)), Op::Train(TrainOp::CrossEntropy)) = (dys.first(), &node.op)
            && self.needed.contains(&node.inputs[0])
            && node.inputs[1..].iter().all(|input| !self.needed.contains(input))
        {
            let gradient = self.current(node.outputs[1]);
            return self.add(node.inputs[0], Adjoint::Value(gradient));
        }
        // A sum passes its gradient on as it is, and so do views of ones: nothing is computed for them.
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
                    let because = "one of the inputs that it depends on counts as a constant";
                    let (label, op) = (node.label.clone(), node.op.name());
                    return Err(GradError::NotDifferentiable { label, op, because });
                }
            }
        }
        Ok(())
    }

    /// The gradients of a node's inputs, given those of its outputs. `None` for an input that has none or whose gradient
    /// nobody asks for.
    fn rule(&mut self, node: &Node, dys: &[Option<Adjoint>]) -> Result<Vec<Option<ValueId>>, GradError> {
        let none = |because| {
            Err(GradError::NotDifferentiable { label: node.label.clone(), op: node.op.name(), because })
        };
        let label = format!("{}.grad", node.label);
        let needs: Vec<bool> = node.inputs.iter().map(|input| self.needed.contains(input)).collect();
        let ins: Vec<ValueId> = node.inputs.iter().map(|&value| self.current(value)).collect();
        let ty = |pass: &Backward<'_>, i: usize| pass.builder.ty(ins[i]);
        // The gradient of the first output: most ops have one.
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
            return none("only its first output is differentiated");
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
                _ => none("its input is not a float"),
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
                    // Elements that are as large share the gradient.
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
                    return none("only the output is differentiated, not the log-sum-exp");
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
            Op::Compare(_) => none("it is constant where it is smooth"),
            Op::KvAppend | Op::Attention(_) => {
                none("a paged cache is for generation; train with attention among the rows of a step")
            }
            Op::Recurrent(_) => none("recurrent layers are for generation; they have no backward pass yet"),
            Op::Sample(_) => none("a choice is not smooth"),
            Op::Moe(_) => none(NO_EXPERTS),
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
            ) => none("it is part of a backward pass already"),
            Op::HostCall(_) => none("it is a function on the host"),
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

    /// The dimensions in another order. Turning back what was turned gives the original.
    fn permute(&mut self, value: ValueId, order: &[usize]) -> Result<ValueId, GradError> {
        if let ValueOrigin::Node { node, .. } = self.graph().value(value).origin
            && let Op::View(View::Permute(first)) = &self.graph().node(node).op
            && order.iter().enumerate().all(|(to, &from)| first[from] == to)
        {
            return Ok(self.graph().node(node).inputs[0]);
        }
        Ok(self.builder.permute(value, order)?)
    }

    /// A frozen weight in another dtype is decoded once more rather than kept: the decoded weights of all layers would be
    /// larger than the model.
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

    /// The last two dimensions exchanged.
    fn transpose(&mut self, value: ValueId) -> Result<ValueId, GradError> {
        let rank = self.builder.ty(value).shape.rank();
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        self.permute(value, &order)
    }

    /// A value that can be reshaped: a copy of one whose elements do not lie in order.
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

    /// Sums what broadcasting repeated.
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
                // Where both are equal each has half of the gradient.
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

    /// `da = dy b^T` and `db = a^T dy`, summed over what was broadcast.
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
        // The product is taken the other way round and turned, so that the gradient of a weight, which enters transposed,
        // comes out as the weight lies.
        let (rows_a, rows_dy) = match b_ty.shape.rank() {
            // One matrix for all rows: their outer dimensions are more rows.
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

    /// Gradients flow through the sum, the norm, or both.
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
