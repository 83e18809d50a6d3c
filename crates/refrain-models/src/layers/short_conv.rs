//! Gated short convolution: a filter over a few rows between two gates.

use super::Mixer;
use crate::error::ModelError;
use crate::state::{LayerState, SlotSpec};
use crate::step::StepBuilder;
use crate::weights::{Linear, WeightTable};
use refrain_graph::{Binary, GraphError, Op, Recurrent, ValueId, WeightId};
use refrain_tensor::DType;

/// `out(after(h) * conv(before(h) * x(h)))`, with a separate filter per channel.
#[derive(Debug)]
pub(crate) struct ShortConvLayer {
    width: usize,
    before: Linear, // [hidden, hidden]
    after: Linear,  // [hidden, hidden]
    x: Linear,      // [hidden, hidden]
    conv: WeightId, // [width * hidden]
    out: Linear,    // [hidden, hidden]
}

impl ShortConvLayer {
    /// Declares a layer under LFM2's names, where the three maps are one matrix.
    pub(crate) fn declare(w: &mut WeightTable<'_>, layer: usize, width: usize) -> Result<Mixer, ModelError> {
        let hidden = w.config.hidden;
        let parts = ["shortconv.before", "shortconv.after", "shortconv.x"].map(|part| (part, hidden));
        let [before, after, x] = w.fused(layer, ["shortconv.in_proj", "conv.in_proj"], parts, hidden)?;
        let conv = w.filters(layer, ["shortconv.conv.weight", "conv.conv.weight"], [hidden, width])?;
        let out = w.linear(layer, "shortconv.out_proj", [hidden, hidden], false)?;
        Ok(Mixer::ShortConv(ShortConvLayer { width, before, after, x, conv, out }))
    }

    pub(super) fn state(&self, hidden: usize) -> LayerState {
        let dims = vec![self.width - 1, hidden];
        LayerState::Slots(vec![SlotSpec { name: "conv_state", dims, dtype: DType::F32 }])
    }

    pub(super) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        h: ValueId,
    ) -> Result<ValueId, GraphError> {
        let (states, paging) = step.slots(layer);
        let before = step.linear(h, self.before, "conv_in")?;
        let after = step.linear(h, self.after, "conv_after")?;
        let x = step.linear(h, self.x, "conv_x")?;
        let x = step.builder.binary(Binary::Mul, before, x)?;
        let filters = step.weight(self.conv);
        let filters = step.builder.reshape(filters, &[self.width, step.config.hidden])?;
        let state = step.builder.state(states[0]);
        let op = Op::Recurrent(Recurrent::ShortConv(refrain_graph::ShortConv { silu: false }));
        let inputs = [&[state, x, filters][..], &paging].concat();
        let y = step.builder.node(op, &inputs, "short_conv")?[0];
        let y = step.builder.binary(Binary::Mul, after, y)?;
        step.linear(y, self.out, "conv_out")
    }
}
