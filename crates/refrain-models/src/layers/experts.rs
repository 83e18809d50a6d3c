//! Mixtures of experts: a router, and the experts it chooses for each row.

use crate::error::ModelError;
use crate::step::StepBuilder;
use crate::weights::WeightTable;
use refrain_formats::params::{Activation, Experts};
use refrain_graph::{
    ExpertActivation, ExpertGate, GraphError, MoeOp, Op, Route, RouteScore, ValueId, WeightId,
};

/// A router and its experts.
#[derive(Debug)]
pub(crate) struct Mixture {
    pub router: WeightId,              // [n_experts, hidden]
    pub router_bias: Option<WeightId>, // [n_experts]
    pub route: Route,
    /// Factor on each expert's routing weight, for [`Route::scaled`]: `[n_experts]`
    pub scales: Option<WeightId>,
    pub gate: ExpertGate,
    /// `[n_experts, ffn, hidden]` each; a single weight with twice as many rows for [`ExpertGate::joined`].
    pub gate_up: Vec<WeightId>,
    pub down: WeightId, // [n_experts, hidden, ffn]
    /// Of the projections in [`Mixture::gate_up`], then of `down`: `[n_experts, n_out]` each, or none at all.
    pub biases: Vec<WeightId>,
}

impl Mixture {
    /// Experts with separate gate and up projections, routed by a softmax over all experts, as in most
    /// models.
    pub(crate) fn declare(
        w: &mut WeightTable<'_>,
        layer: usize,
        experts: Experts,
    ) -> Result<Mixture, ModelError> {
        let hidden = w.config.hidden;
        let Experts { n_experts, ffn, .. } = experts;
        let router = w.matrix(layer, "ffn_gate_inp", [n_experts, hidden])?;
        let names = ["ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"];
        let (gate_up, down) = match w.optional_in_layer(layer, names, &[n_experts, 2 * ffn, hidden])? {
            Some(joint) => {
                let names = ["ffn_down_exps.weight", "mlp.experts.down_proj"];
                (vec![joint], w.in_layer(layer, names, &[n_experts, hidden, ffn])?)
            }
            None => {
                let mut part = |name, hf, dims| w.experts(layer, name, hf, dims);
                let gate = part("ffn_gate_exps", "mlp.experts.{}.gate_proj", [n_experts, ffn, hidden])?;
                let up = part("ffn_up_exps", "mlp.experts.{}.up_proj", [n_experts, ffn, hidden])?;
                let down = part("ffn_down_exps", "mlp.experts.{}.down_proj", [n_experts, hidden, ffn])?;
                (vec![gate, up], down)
            }
        };
        let joined = gate_up.len() == 1;
        Ok(Mixture {
            router,
            router_bias: None,
            biases: Vec::new(),
            route: Mixture::route(experts),
            scales: None,
            gate: ExpertGate { activation: activation(w.config.activation), joined, biased: false },
            gate_up,
            down,
        })
    }

    /// The expert that every token uses: a mixture of one, whose router gives it the sigmoid of its logit as weight.
    pub(crate) fn shared(w: &mut WeightTable<'_>, layer: usize, ffn: usize) -> Result<Mixture, ModelError> {
        let hidden = w.config.hidden;
        let names = ["ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"];
        let router = w.reshaped(layer, names, &[&[hidden], &[1, hidden]], &[1, hidden])?;
        let mut part = |gguf: &str, hf: &str, [n_out, n_in]: [usize; 2]| {
            let names = [format!("{gguf}.weight"), format!("mlp.shared_expert.{hf}.weight")];
            w.reshaped(layer, [&names[0], &names[1]], &[&[n_out, n_in]], &[1, n_out, n_in])
        };
        let gate = part("ffn_gate_shexp", "gate_proj", [ffn, hidden])?;
        let up = part("ffn_up_shexp", "up_proj", [ffn, hidden])?;
        let down = part("ffn_down_shexp", "down_proj", [hidden, ffn])?;
        let one = Experts { n_experts: 1, n_choices: 1, ffn, renormalise: false, shared_ffn: None };
        Ok(Mixture {
            router,
            router_bias: None,
            biases: Vec::new(),
            route: Route { score: RouteScore::Sigmoid, ..Mixture::route(one) },
            scales: None,
            gate: ExpertGate { activation: activation(w.config.activation), joined: false, biased: false },
            gate_up: vec![gate, up],
            down,
        })
    }

    /// The matrices of all experts.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = WeightId> {
        self.gate_up.iter().copied().chain([self.down])
    }

    /// Routing with weights from a softmax over all experts.
    pub(crate) fn route(experts: Experts) -> Route {
        Route {
            n_choices: experts.n_choices,
            score: RouteScore::Softmax,
            biased: false,
            scaled: false,
            groups: None,
            renormalise: experts.renormalise,
            scale: 1.0,
        }
    }

    /// Routes by `r[n_tokens, hidden]` and applies the chosen experts to `h[n_tokens, hidden]`.
    pub(crate) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        r: ValueId,
        h: ValueId,
    ) -> Result<ValueId, GraphError> {
        let router = step.weight(self.router);
        let bias = self.router_bias.map(|bias| step.weight(bias));
        let logits = step.builder.linear(r, router, bias, "ffn_gate_inp")?;
        let mut inputs = vec![logits];
        inputs.extend(self.scales.map(|scales| step.weight(scales)));
        // Padding must not read experts.
        inputs.extend(step.positions_of(logits));
        let [ids, weights] = step.builder.node(Op::Moe(MoeOp::Route(self.route)), &inputs, "ffn_route")?[..]
        else {
            unreachable!("a router has two outputs")
        };
        let mut inputs = vec![h, ids];
        inputs.extend(self.gate_up.iter().map(|&weight| step.weight(weight)));
        let (gate_biases, down_bias) = self.biases.split_at(self.biases.len().saturating_sub(1));
        inputs.extend(gate_biases.iter().map(|&bias| step.weight(bias)));
        let h = step.builder.node(Op::Moe(MoeOp::Gated(self.gate)), &inputs, "ffn_gate_up_exps")?[0];
        let mut inputs = vec![h, ids, weights, step.weight(self.down)];
        inputs.extend(down_bias.iter().map(|&bias| step.weight(bias)));
        let biased = !down_bias.is_empty();
        Ok(step.builder.node(Op::Moe(MoeOp::Summed { biased }), &inputs, "ffn_down_exps")?[0])
    }
}

fn activation(of: Activation) -> ExpertActivation {
    match of {
        Activation::Silu => ExpertActivation::Silu,
        Activation::GeluTanh => ExpertActivation::GeluTanh,
        Activation::GeluErf => unreachable!("only encoders have it, and they have no experts"),
    }
}
