//! Feed-forward parts.

use super::Mixture;
use crate::error::ModelError;
use crate::step::Step;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::Activation;
use refrain_graph::{Gate, GraphError, ValueId, WeightId};

/// What a layer does to each row by itself.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Gated(GatedFfn),
    Experts(Mixture),
    DenseAndExperts(Box<DenseAndExperts>),
}

/// A dense part and experts side by side (Gemma 4 26B-A4B): `norm(dense(h)) + norm(experts(norm(x)))`.
#[derive(Debug)]
pub(crate) struct DenseAndExperts {
    pub dense: GatedFfn,
    pub after_dense: WeightId, // [hidden]
    /// The norm of the residual that the router reads.
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

impl FeedForward {
    /// A gated one of the sizes and with the function of the configuration.
    pub(crate) fn gated(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        GatedFfn::declare(w, layer).map(FeedForward::Gated)
    }

    /// The same with the gate and what is gated as one tensor in the file, in this order.
    pub(crate) fn fused(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        let ffn = w.config.layer_sizes(layer).ffn;
        let parts = [("ffn_gate", ffn), ("ffn_up", ffn)];
        let maps = w.fused(layer, ["ffn_up", "mlp.gate_up_proj"], parts, w.config.hidden)?;
        GatedFfn::of(w, layer, maps).map(FeedForward::Gated)
    }

    /// Experts where the configuration has some, else a gated one.
    pub(crate) fn of_config(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        match w.config.experts {
            Some(experts) => Ok(FeedForward::Experts(Mixture::declare(w, layer, experts)?)),
            None => FeedForward::gated(w, layer),
        }
    }

    /// The normed residual `h[n_tokens, hidden]` -> the same; `x` is the residual.
    pub(super) fn build(&self, step: &mut Step<'_>, x: ValueId, h: ValueId) -> Result<ValueId, GraphError> {
        match self {
            FeedForward::Gated(ffn) => ffn.build(step, h),
            FeedForward::Experts(experts) => experts.build(step, h, h),
            FeedForward::DenseAndExperts(both) => both.build(step, x, h),
        }
    }
}

impl DenseAndExperts {
    fn build(&self, step: &mut Step<'_>, x: ValueId, h: ValueId) -> Result<ValueId, GraphError> {
        let dense = self.dense.build(step, h)?;
        let dense = step.norm(dense, self.after_dense, "post_ffn_norm_1")?;
        let r = step.norm(x, self.before_router, "ffn_router_norm")?;
        let h = step.norm(x, self.before_experts, "ffn_norm_2")?;
        let h = self.experts.build(step, r, h)?;
        let h = step.norm(h, self.after_experts, "post_ffn_norm_2")?;
        step.add(dense, h)
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

    /// The rest of one whose gate and what is gated are declared.
    fn of(w: &mut WeightTable<'_>, layer: usize, [gate, up]: [Linear; 2]) -> Result<GatedFfn, ModelError> {
        let c = w.config;
        let function = match c.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        let down = w.linear(layer, "ffn_down", [c.hidden, c.layer_sizes(layer).ffn], c.ffn_bias)?;
        Ok(GatedFfn { function, gate, up, down })
    }

    fn build(&self, step: &mut Step<'_>, h: ValueId) -> Result<ValueId, GraphError> {
        let up = step.linear(h, self.up, "ffn_up")?;
        let gate = step.linear(h, self.gate, "ffn_gate")?;
        // As one node, so that the backward pass keeps the two products and nothing between.
        let h = step.builder.gate(self.function, gate, up)?;
        step.linear(h, self.down, "ffn_down")
    }
}
