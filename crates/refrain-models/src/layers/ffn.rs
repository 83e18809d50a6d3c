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
        Ok(FeedForward::Gated(GatedFfn {
            function: match c.activation {
                Activation::Silu => Gate::Silu,
                Activation::GeluTanh => Gate::GeluTanh,
            },
            gate: w.linear(layer, "ffn_gate", [ffn, c.hidden], c.ffn_bias)?,
            up: w.linear(layer, "ffn_up", [ffn, c.hidden], c.ffn_bias)?,
            down: w.linear(layer, "ffn_down", [c.hidden, ffn], c.ffn_bias)?,
        }))
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
