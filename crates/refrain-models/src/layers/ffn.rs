//! Feed-forward parts.

use super::Mixture;
use crate::error::ModelError;
use crate::step::StepBuilder;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{Activation, Experts};
use refrain_graph::{Gate, GraphError, Unary, ValueId, WeightId};

/// The feed-forward part of a layer, applied to each row independently.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Gated(GatedFfn),
    Plain(PlainFfn),
    Experts(Mixture),
    DenseAndExperts(Box<DenseAndExperts>),
    /// An expert for every token, and those that the router chooses: their sum.
    SharedAndExperts(Box<[Mixture; 2]>),
}

/// A dense part and experts in parallel (Gemma 4 26B-A4B): `norm(dense(h)) + norm(experts(norm(x)))`.
#[derive(Debug)]
pub(crate) struct DenseAndExperts {
    pub dense: GatedFfn,
    pub after_dense: WeightId, // [hidden]
    /// Norm of the residual for the router.
    pub before_router: WeightId, // [hidden]
    pub before_experts: WeightId, // [hidden]
    pub experts: Mixture,
    pub after_experts: WeightId, // [hidden]
}

/// `down(f(gate(x)) * up(x))`
#[derive(Debug)]
pub(crate) struct GatedFfn {
    pub function: Gate,
    pub gate: Linear, // [ffn, hidden]
    pub up: Linear,   // [ffn, hidden]
    pub down: Linear, // [hidden, ffn]
}

/// `down(f(up(x)))`
#[derive(Debug)]
pub(crate) struct PlainFfn {
    pub function: Unary,
    pub up: Linear,   // [ffn, hidden]
    pub down: Linear, // [hidden, ffn]
}

impl FeedForward {
    /// A part without a gate.
    pub(crate) fn plain(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        let c = w.config;
        let ffn = c.layer_sizes(layer).ffn;
        let function = match c.activation {
            Activation::Silu => Unary::Silu,
            Activation::GeluTanh => Unary::GeluTanh,
            Activation::GeluErf => Unary::GeluErf,
        };
        let up = w.linear(layer, "ffn_up", [ffn, c.hidden], c.ffn_bias)?;
        let down = w.linear(layer, "ffn_down", [c.hidden, ffn], c.ffn_bias)?;
        Ok(FeedForward::Plain(PlainFfn { function, up, down }))
    }

    /// A gated part with the configured sizes and activation.
    pub(crate) fn gated(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        GatedFfn::declare(w, layer).map(FeedForward::Gated)
    }

    /// The same with up and gate projections stored as one tensor, gate first.
    pub(crate) fn fused(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        let ffn = w.config.layer_sizes(layer).ffn;
        let parts = [("ffn_gate", ffn), ("ffn_up", ffn)];
        let maps = w.fused(layer, ["ffn_up", "mlp.gate_up_proj"], parts, w.config.hidden)?;
        GatedFfn::of(w, layer, maps).map(FeedForward::Gated)
    }

    /// Experts if the configuration has any, otherwise a gated part.
    pub(crate) fn of_config(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        match w.config.experts {
            Some(experts @ Experts { shared_ffn: Some(shared), .. }) => {
                let experts = Mixture::declare(w, layer, experts)?;
                let shared = Mixture::shared(w, layer, shared)?;
                Ok(FeedForward::SharedAndExperts(Box::new([shared, experts])))
            }
            Some(experts) => Ok(FeedForward::Experts(Mixture::declare(w, layer, experts)?)),
            None => FeedForward::gated(w, layer),
        }
    }

    /// The experts that a router chooses from; `None` if there are none.
    pub(crate) fn routed(&self) -> Option<&Mixture> {
        match self {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::DenseAndExperts(both) => Some(&both.experts),
            FeedForward::SharedAndExperts(both) => Some(&both[1]),
            FeedForward::Gated(_) | FeedForward::Plain(_) => None,
        }
    }

    /// Maps the normalised residual `h[n_tokens, hidden]` to the same shape; `x` is the residual itself.
    pub(super) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        x: ValueId,
        h: ValueId,
    ) -> Result<ValueId, GraphError> {
        match self {
            FeedForward::Gated(ffn) => ffn.build(step, h),
            FeedForward::Plain(ffn) => ffn.build(step, h),
            FeedForward::Experts(experts) => experts.build(step, h, h),
            FeedForward::DenseAndExperts(both) => both.build(step, x, h),
            FeedForward::SharedAndExperts(both) => {
                let [shared, experts] = &**both;
                let experts = experts.build(step, h, h)?;
                let shared = shared.build(step, h, h)?;
                step.add(experts, shared)
            }
        }
    }
}

impl DenseAndExperts {
    fn build(&self, step: &mut StepBuilder<'_>, x: ValueId, h: ValueId) -> Result<ValueId, GraphError> {
        let dense = self.dense.build(step, h)?;
        let dense = step.norm(dense, self.after_dense, "post_ffn_norm_1")?;
        let r = step.norm(x, self.before_router, "ffn_router_norm")?;
        let h = step.norm(x, self.before_experts, "ffn_norm_2")?;
        let h = self.experts.build(step, r, h)?;
        let h = step.norm(h, self.after_experts, "post_ffn_norm_2")?;
        step.add(dense, h)
    }
}

impl PlainFfn {
    fn build(&self, step: &mut StepBuilder<'_>, h: ValueId) -> Result<ValueId, GraphError> {
        let h = step.linear(h, self.up, "ffn_up")?;
        let h = step.builder.unary(self.function, h)?;
        step.linear(h, self.down, "ffn_down")
    }
}

impl GatedFfn {
    pub(crate) fn declare(w: &mut WeightTable<'_>, layer: usize) -> Result<GatedFfn, ModelError> {
        let c = w.config;
        let ffn = c.layer_sizes(layer).ffn;
        let gate = w.linear(layer, "ffn_gate", [ffn, c.hidden], c.ffn_bias)?;
        let up = w.linear(layer, "ffn_up", [ffn, c.hidden], c.ffn_bias)?;
        GatedFfn::of(w, layer, [gate, up])
    }

    /// Completes a gated part whose gate and up projections are declared.
    fn of(w: &mut WeightTable<'_>, layer: usize, [gate, up]: [Linear; 2]) -> Result<GatedFfn, ModelError> {
        let c = w.config;
        let function = match c.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
            Activation::GeluErf => unreachable!("only encoders have it, and they have no gate"),
        };
        let down = w.linear(layer, "ffn_down", [c.hidden, c.layer_sizes(layer).ffn], c.ffn_bias)?;
        Ok(GatedFfn { function, gate, up, down })
    }

    fn build(&self, step: &mut StepBuilder<'_>, h: ValueId) -> Result<ValueId, GraphError> {
        let up = step.linear(h, self.up, "ffn_up")?;
        let gate = step.linear(h, self.gate, "ffn_gate")?;
        // A single node, so that the backward pass keeps the two matrix products and no intermediate.
        let h = step.builder.gate(self.function, gate, up)?;
        step.linear(h, self.down, "ffn_down")
    }
}
