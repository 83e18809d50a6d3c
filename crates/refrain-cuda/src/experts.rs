//! Lowers mixture-of-experts ops to launches.

use refrain_driver::{Buf, Launch};
use refrain_graph::{ExpertGate, MoeOp, NodeId, Op, Operand, Place, Step, TensorType};
use refrain_kernels::{
    ExpertGateArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, GroupedArgs, GroupedPlan, GroupedSizes,
    KernelError, MAX_CHOICES, MAX_EXPERTS, MAX_ROUTE_GROUPS, PACKED_DTYPES, RouteArgs, expert_scratch_bytes,
    has_experts,
};
use refrain_tensor::DType;

use crate::lower::Lowering;
use crate::prefill::labels;
use crate::rules::ChoiceRules;

/// The reason why no kernel supports an op with these inputs.
pub(crate) fn unsupported(op: &MoeOp, ins: &[TensorType]) -> Option<&'static str> {
    let no = |bad: bool, because| bad.then_some(because);
    let weights = match op {
        MoeOp::Route(route) => {
            let groups = route.groups.map_or(0, |groups| groups.n_groups);
            let n_experts = ins[0].shape.dim_back(0);
            return no(route.n_choices > MAX_CHOICES, "more than 64 experts per row")
                .or(no(groups > MAX_ROUTE_GROUPS, "more than 64 groups of experts"))
                .or(no(n_experts > MAX_EXPERTS, "more than 4096 experts"));
        }
        MoeOp::Gated(gate) => 2..2 + gate.n_weights(),
        MoeOp::Summed { .. } => 3..4,
    };
    let of = &ins[weights.clone()];
    let tiles = |ty: &TensorType| match op {
        // Gate and up rows each start on a tile boundary.
        MoeOp::Gated(ExpertGate { joined: true, .. }) => ty.shape.dims()[1].is_multiple_of(16),
        MoeOp::Gated(_) | MoeOp::Summed { .. } | MoeOp::Route(_) => ty.shape.dims()[1].is_multiple_of(8),
    };
    let is_packed = |ty: &TensorType| PACKED_DTYPES.contains(&ty.dtype);
    no(ins[0].dtype != DType::F32, "activations must be F32")
        .or(no(ins[1].shape.dim_back(0) > MAX_CHOICES, "more than 64 experts per row"))
        .or(no(!of.iter().all(|ty| has_experts(ty.dtype)), "no kernel reads experts of this dtype"))
        .or(no(of.iter().any(|ty| ty.dtype != of[0].dtype), "gate and up must have one dtype"))
        .or(no(
            of.iter().any(|ty| is_packed(ty) && !tiles(ty)),
            "the rows of a quantised expert must be a multiple of 8",
        ))
        .or(no(ins[weights.end..].iter().any(|ty| ty.dtype != DType::F32), "biases of experts must be F32"))
}

fn sizes(op: &MoeOp, step: &Step, rules: ChoiceRules<'_>) -> ExpertSizes {
    let (x, ids) = (step.inputs[0].layout.shape(), step.inputs[1].layout.shape());
    let weight = match op {
        MoeOp::Summed { .. } => &step.inputs[3],
        MoeOp::Gated(_) | MoeOp::Route(_) => &step.inputs[2],
    };
    ExpertSizes {
        n_rows: ids.dims()[0],
        n_choices: ids.dims()[1],
        n_experts: weight.layout.shape().dims()[0],
        n: step.outputs[0].layout.shape().dim_back(0),
        k: x.dim_back(0),
        is_fixed: rules.reproducible,
    }
}

/// Scratch that the launches of a step share.
pub(crate) fn scratch_bytes(op: &MoeOp, step: &Step, rules: ChoiceRules<'_>) -> u64 {
    let n_products = match op {
        MoeOp::Route(_) => return 0,
        MoeOp::Gated(_) => 2,
        MoeOp::Summed { .. } => 1,
    };
    expert_scratch_bytes(&sizes(op, step, rules), n_products).unwrap_or(u64::MAX)
}

/// An expert layer of many rows, from the router's choices to their weighted sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayer {
    pub(crate) gated: NodeId,
    pub(crate) summed: NodeId,
    pub(crate) plan: GroupedPlan,
}

/// Sizes of the layer that two steps form, if they are its halves.
pub(crate) fn layer_sizes(gated: &Step, summed: &Step, rules: ChoiceRules<'_>) -> Option<GroupedSizes> {
    let (Op::Moe(gate @ MoeOp::Gated(_)), Op::Moe(sum @ MoeOp::Summed { .. })) = (&gated.op, &summed.op)
    else {
        return None;
    };
    let same = |a: &Operand, b: &Operand| a.buffer == b.buffer && a.layout == b.layout;
    let joins = same(&gated.outputs[0], &summed.inputs[0]) && same(&gated.inputs[1], &summed.inputs[1]);
    let (first, second) = (sizes(gate, gated, rules), sizes(sum, summed, rules));
    let ExpertSizes { n_rows, n_choices, n_experts, n: inner, k, .. } = first;
    let is_one = joins && second.n_experts == n_experts && second.k == inner;
    is_one.then_some(GroupedSizes { n_rows, n_choices, n_experts, k, inner, n: second.n })
}

impl Lowering<'_> {
    /// An expert layer on tensor cores.
    pub(crate) fn expert_layer(
        &self,
        layer: &ExpertLayer,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let (gated, summed) = (self.plan.step(layer.gated), self.plan.step(layer.summed));
        let (Op::Moe(MoeOp::Gated(gate)), Op::Moe(MoeOp::Summed { biased })) = (&gated.op, &summed.op) else {
            unreachable!("chosen for these ops")
        };
        let (first, second) = self.gate_weights(gated, gate)?;
        let bytes = layer.plan.scratch_bytes().unwrap_or(u64::MAX);
        let args = GroupedArgs {
            plan: layer.plan,
            activation: gate.activation,
            x: self.dense(gated, &gated.inputs[0])?,
            ids: self.dense(gated, &gated.inputs[1])?,
            weights: self.dense(summed, &summed.inputs[2])?,
            gate: first,
            up: second,
            down: self.expert_weight(summed, 3, biased.then_some(4))?,
            y: self.dense(summed, &summed.outputs[0])?,
            scratch: self.areas.own.slice(0, bytes)?,
            step: &labels(&[gated, summed]),
        };
        self.kernels.grouped(&args, launches)
    }

    /// Gate and up of a step.
    fn gate_weights(
        &self,
        step: &Step,
        gate: &ExpertGate,
    ) -> Result<(ExpertWeight, ExpertWeight), KernelError> {
        let bias = |i: usize| if gate.biased { Some(2 + gate.n_weights() + i) } else { None };
        let first = self.expert_weight(step, 2, bias(0))?;
        Ok(match gate.joined {
            true => (first, ExpertWeight { first: first.rows / 2, ..first }),
            false => (first, self.expert_weight(step, 3, bias(1))?),
        })
    }

    pub(crate) fn experts(
        &self,
        step: &Step,
        op: &MoeOp,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let dense = |i: usize| self.dense(step, &step.inputs[i]);
        let out = |i: usize| self.dense(step, &step.outputs[i]);
        let label = step.label.as_str();
        if let MoeOp::Route(route) = op {
            let shape = step.inputs[0].layout.shape();
            let mut vectors = 1..step.inputs.len();
            let mut vector = |is_there: bool| match vectors.next().filter(|_| is_there) {
                Some(i) => self.vector(step, i).map(Some),
                None => Ok(None),
            };
            let bias = if route.biased { vector(true)? } else { None };
            launches.push(self.kernels.route(&RouteArgs {
                route: *route,
                logits: dense(0)?,
                bias,
                scales: vector(route.scaled)?,
                ids: out(0)?,
                weights: out(1)?,
                n: shape.dims()[0],
                n_experts: shape.dims()[1],
                step: label,
            })?);
            return Ok(());
        }
        let sizes = sizes(op, step, self.rules);
        let bytes = scratch_bytes(op, step, self.rules);
        let scratch = if bytes > 0 { Some(self.areas.own.slice(0, bytes)?) } else { None };
        match op {
            MoeOp::Gated(gate) => {
                let (first, second) = self.gate_weights(step, gate)?;
                let args = ExpertGateArgs {
                    activation: gate.activation,
                    x: dense(0)?,
                    ids: dense(1)?,
                    gate: first,
                    up: second,
                    y: out(0)?,
                    sizes,
                    scratch,
                    step: label,
                };
                self.kernels.expert_gate(&args, launches)
            }
            MoeOp::Summed { biased } => {
                let args = ExpertSumArgs {
                    x: dense(0)?,
                    ids: dense(1)?,
                    weights: dense(2)?,
                    down: self.expert_weight(step, 3, biased.then_some(4))?,
                    y: out(0)?,
                    sizes,
                    scratch,
                    step: label,
                };
                self.kernels.expert_sum(&args, launches)
            }
            MoeOp::Route(_) => unreachable!("lowered above"),
        }
    }

    fn expert_weight(&self, step: &Step, i: usize, bias: Option<usize>) -> Result<ExpertWeight, KernelError> {
        let operand = &step.inputs[i];
        Ok(ExpertWeight {
            w: self.expert_bytes(step, operand)?,
            dtype: self.resident.dtype(self.plan, operand),
            rows: operand.layout.shape().dims()[1],
            first: 0,
            bias: bias.map(|i| self.dense(step, &step.inputs[i])).transpose()?,
        })
    }

    fn expert_bytes(&self, step: &Step, operand: &Operand) -> Result<Buf, KernelError> {
        let is_weight = matches!(self.plan.buffer(operand.buffer).place, Place::Weight(_));
        match is_weight && self.resident.is_packed(self.plan, operand) {
            true => self.packed(step, operand, operand.layout),
            false => self.dense(step, operand),
        }
    }
}
