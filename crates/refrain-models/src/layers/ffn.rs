//! Feed-forward parts.

use crate::error::ModelError;
use crate::step::Step;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::Activation;
use refrain_graph::{Gate, GraphError, ValueId};

/// What a layer does to each row by itself.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Gated(GatedFfn),
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
        let c = w.config;
        let ffn = c.layer_sizes(layer).ffn;
        let gate = w.linear(layer, "ffn_gate", [ffn, c.hidden], c.ffn_bias)?;
        let up = w.linear(layer, "ffn_up", [ffn, c.hidden], c.ffn_bias)?;
        FeedForward::of(w, layer, [gate, up])
    }

    /// The same with the gate and what is gated as one tensor in the file, in this order.
    pub(crate) fn fused(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
        let ffn = w.config.layer_sizes(layer).ffn;
        let parts = [("ffn_gate", ffn), ("ffn_up", ffn)];
        let maps = w.fused(layer, ["ffn_up", "mlp.gate_up_proj"], parts, w.config.hidden)?;
        FeedForward::of(w, layer, maps)
    }

    fn of(w: &mut WeightTable<'_>, layer: usize, [gate, up]: [Linear; 2]) -> Result<FeedForward, ModelError> {
        let c = w.config;
        let function = match c.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        let down = w.linear(layer, "ffn_down", [c.hidden, c.layer_sizes(layer).ffn], c.ffn_bias)?;
        Ok(FeedForward::Gated(GatedFfn { function, gate, up, down }))
    }

    /// `h[n_tokens, hidden]` -> the same.
    pub(super) fn build(&self, step: &mut Step<'_>, h: ValueId) -> Result<ValueId, GraphError> {
        match self {
            FeedForward::Gated(ffn) => ffn.build(step, h),
        }
    }
}

impl GatedFfn {
    fn build(&self, step: &mut Step<'_>, h: ValueId) -> Result<ValueId, GraphError> {
        let up = step.linear(h, self.up, "ffn_up")?;
        let gate = step.linear(h, self.gate, "ffn_gate")?;
        // As one node, so that the backward pass keeps the two products and nothing between.
        let h = step.builder.gate(self.function, gate, up)?;
        step.linear(h, self.down, "ffn_down")
    }
}
