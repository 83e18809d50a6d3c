//! Lowers mixture-of-experts ops to launches.

use refrain_driver::{Buf, Launch};
use refrain_graph::{
    ExpertChain, ExpertGate, Fusion, GroupQuery, MoeOp, NodeId, Op, Operand, Place, Route, Step, TensorType,
};
use refrain_kernels::{
    ExpertGateArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, GateRouter, GroupedArgs, GroupedPlan,
    GroupedSizes, KernelError, MAX_CHOICES, MAX_EXPERTS, MAX_ROUTE_GROUPS, MIN_SORTED_ROWS, PACKED_DTYPES,
    RouteArgs, expert_scratch_bytes, has_experts, joins_gate,
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

/// Largest number of experts, and of columns, for which the gate's blocks also run the router: their shared
/// memory holds both.
const MAX_JOINED: (usize, usize) = (1024, 16_384);

/// Whether experts run as one group: with their router for a few rows, and without it for many, so that tensor
/// cores can keep the rows between the products in 16 bits. Launches of a group may not overwrite each other's
/// inputs, so all buffers stay allocated.
pub(crate) fn fuses(query: &GroupQuery<'_>, chain: &ExpertChain) -> Fusion {
    let (gate, ids) = (query.input(chain.gated, 2), query.input(chain.gated, 1));
    let is_few = ids.layout.shape().dims()[0] < MIN_SORTED_ROWS;
    let (n_experts, k) = (gate.layout.shape().dims()[0], gate.layout.shape().dim_back(0));
    let joins = match chain.route.map(|route| query.op(route)) {
        None => !is_few && gate.dtype != DType::F32,
        Some(Op::Moe(MoeOp::Route(route))) => {
            is_few && joins_gate(route) && n_experts <= MAX_JOINED.0 && k <= MAX_JOINED.1
        }
        Some(_) => false,
    };
    if joins { Fusion::Joined } else { Fusion::Smaller }
}

/// An expert layer of many rows, from the router's choices to their weighted sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayer {
    pub(crate) gated: NodeId,
    pub(crate) summed: NodeId,
    pub(crate) plan: GroupedPlan,
}

/// Sizes of a layer with these halves.
pub(crate) fn layer_sizes(gated: &Step, summed: &Step, rules: ChoiceRules<'_>) -> GroupedSizes {
    let (Op::Moe(gate), Op::Moe(sum)) = (&gated.op, &summed.op) else { unreachable!("halves of experts") };
    let ExpertSizes { n_rows, n_choices, n_experts, n: inner, k, .. } = sizes(gate, gated, rules);
    GroupedSizes { n_rows, n_choices, n_experts, k, inner, n: sizes(sum, summed, rules).n }
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

    /// Experts of a few rows, with their router: two launches.
    pub(crate) fn routed_experts(
        &self,
        chain: &ExpertChain,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let (gated, summed) = (self.plan.step(chain.gated), self.plan.step(chain.summed));
        let route = chain.route.map(|route| self.plan.step(route));
        let (Some(Step { op: Op::Moe(MoeOp::Route(rule)), .. }), Op::Moe(MoeOp::Gated(gate))) =
            (route, &gated.op)
        else {
            unreachable!("chosen for these ops")
        };
        let Some(route) = route else { unreachable!("matched above") };
        let router = GateRouter {
            route: *rule,
            logits: self.dense(route, &route.inputs[0])?,
            scales: if rule.scaled { Some(self.vector(route, 1)?) } else { None },
            positions: self.route_positions(route, rule)?,
            weights: self.dense(route, &route.outputs[1])?,
        };
        self.gate(gated, gate, Some((router, &labels(&[route, gated]))), launches)?;
        let Op::Moe(op) = &summed.op else { unreachable!("chosen for these ops") };
        self.experts(summed, op, launches)
    }

    /// First half of experts, with its router if that is part of the launch.
    fn gate(
        &self,
        step: &Step,
        gate: &ExpertGate,
        router: Option<(GateRouter, &str)>,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let (first, second) = self.gate_weights(step, gate)?;
        let op = MoeOp::Gated(*gate);
        let bytes = scratch_bytes(&op, step, self.rules);
        let args = ExpertGateArgs {
            activation: gate.activation,
            x: self.dense(step, &step.inputs[0])?,
            ids: self.dense(step, &step.inputs[1])?,
            gate: first,
            up: second,
            y: self.dense(step, &step.outputs[0])?,
            sizes: sizes(&op, step, self.rules),
            scratch: if bytes > 0 { Some(self.areas.own.slice(0, bytes)?) } else { None },
            router: router.map(|(router, _)| router),
            step: router.map_or(step.label.as_str(), |(_, label)| label),
        };
        self.kernels.expert_gate(&args, launches)
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
            let mut vectors = 1..=route.n_vectors();
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
                positions: self.route_positions(step, route)?,
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
            MoeOp::Gated(gate) => self.gate(step, gate, None, launches),
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

    fn route_positions(&self, step: &Step, route: &Route) -> Result<Option<Buf>, KernelError> {
        let positions = route.positions(step.inputs.len()).map(|i| &step.inputs[i]);
        positions.map(|positions| self.dense(step, positions)).transpose()
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
