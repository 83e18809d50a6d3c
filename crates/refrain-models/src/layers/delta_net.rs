//! Gated DeltaNet: a short convolution over queries, keys and values, then the gated delta rule over a
//! fixed-size state.

use super::Mixer;
use crate::error::ModelError;
use crate::state::{LayerState, SlotSpec};
use crate::step::StepBuilder;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{DeltaNetSizes, VHeads};
use refrain_graph::{Gate, GatedDelta, GraphError, KeyHeads, Op, Recurrent, ShortConv, ValueId, WeightId};
use refrain_tensor::DType;

/// A gated DeltaNet layer. `conv_dim` is `2 * n_key_heads * key_dim + n_heads * value_dim`.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    sizes: DeltaNetSizes,
    qkv: Linear,       // [conv_dim, hidden]
    z: Linear,         // [n_heads * value_dim, hidden]
    gates: Linear,     // [2 * n_heads, hidden]: alpha (decay), then beta (write strength)
    conv: WeightId,    // [conv_width * conv_dim]
    decay: WeightId,   // [n_heads]
    dt_bias: WeightId, // [n_heads]
    norm: WeightId,    // [value_dim]
    out: Linear,       // [hidden, n_heads * value_dim]
}

/// Added to the squared norms of queries and keys before the square root.
const UNIT_EPS: f32 = 1e-6;

impl DeltaNet {
    /// Declares a layer with the configured sizes, under Qwen 3.5's names.
    pub(crate) fn declare(
        w: &mut WeightTable<'_>,
        layer: usize,
        sizes: DeltaNetSizes,
    ) -> Result<Mixer, ModelError> {
        let hidden = w.config.hidden;
        let DeltaNetSizes { n_heads, conv_width, .. } = sizes;
        let (conv_dim, values) = (sizes.conv_dim(), n_heads * sizes.value_dim);
        let qkv = w.linear(layer, "attn_qkv", [conv_dim, hidden], false)?;
        let z = w.linear(layer, "attn_gate", [values, hidden], false)?;
        let gates = w.stacked(layer, ["ssm_alpha", "ssm_beta"], [n_heads, hidden])?;
        let names = ["ssm_conv1d.weight", "linear_attn.conv1d.weight"];
        let conv = w.filters(layer, names, [conv_dim, conv_width])?;
        let names = ["ssm_a", "linear_attn.A_log"];
        let mut decay = w.values(layer, names, &[&[n_heads]])?;
        if sizes.decay_is_log {
            decay.iter_mut().for_each(|a| *a = -a.exp());
        }
        let decay = w.fixed_vector(layer, names, &decay)?;
        let mut vector = |names, n: usize| {
            let values = w.values(layer, names, &[&[n]])?;
            w.fixed_vector(layer, names, &values)
        };
        let dt_bias = vector(["ssm_dt.bias", "linear_attn.dt_bias"], n_heads)?;
        let norm = vector(["ssm_norm.weight", "linear_attn.norm.weight"], sizes.value_dim)?;
        let out = w.linear(layer, "ssm_out", [hidden, values], false)?;
        Ok(Mixer::DeltaNet(DeltaNet { sizes, qkv, z, gates, conv, decay, dt_bias, norm, out }))
    }

    pub(super) fn state(&self) -> LayerState {
        let DeltaNetSizes { n_heads, key_dim, value_dim, conv_width, .. } = self.sizes;
        let slot = |name, dims: &[usize]| SlotSpec { name, dims: dims.to_vec(), dtype: DType::F32 };
        LayerState::Slots(vec![
            slot("conv_state", &[conv_width - 1, self.sizes.conv_dim()]),
            slot("delta_state", &[n_heads, value_dim, key_dim]),
        ])
    }

    pub(super) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        h: ValueId,
    ) -> Result<ValueId, GraphError> {
        let DeltaNetSizes { n_key_heads, n_heads, key_dim, value_dim, conv_width, v_heads, .. } = self.sizes;
        let (states, paging) = step.slots(layer);
        let qkv = step.linear(h, self.qkv, "attn_qkv")?;
        let z = step.linear(h, self.z, "attn_gate")?;
        let gates = step.linear(h, self.gates, "ssm_alpha_beta")?;
        let a = step.builder.slice(gates, 1, 0, n_heads)?;
        let b = step.builder.slice(gates, 1, n_heads, n_heads)?;

        let conv_dim = self.sizes.conv_dim();
        let filters = step.weight(self.conv);
        let filters = step.builder.reshape(filters, &[conv_width, conv_dim])?;
        let state = step.builder.state(states[0]);
        let op = Op::Recurrent(Recurrent::ShortConv(ShortConv { silu: true }));
        let inputs = [&[state, qkv, filters][..], &paging].concat();
        let qkv = step.builder.node(op, &inputs, "short_conv")?[0];

        let keys = n_key_heads * key_dim;
        let q = step.columns(qkv, 0, [n_key_heads, key_dim])?;
        let k = step.columns(qkv, keys, [n_key_heads, key_dim])?;
        let v = step.columns(qkv, 2 * keys, [n_heads, value_dim])?;
        let key_heads = match v_heads {
            VHeads::Grouped => KeyHeads::Grouped,
            VHeads::Tiled => KeyHeads::Tiled,
        };
        let scale = (key_dim as f32).sqrt().recip();
        let op = Op::Recurrent(Recurrent::GatedDelta(GatedDelta { scale, eps: UNIT_EPS, key_heads }));
        let state = step.builder.state(states[1]);
        let (decay, dt_bias) = (step.weight(self.decay), step.weight(self.dt_bias));
        let inputs = [&[state, q, k, v, a, b, decay, dt_bias][..], &paging].concat();
        let y = step.builder.node(op, &inputs, "gated_delta")?[0];

        let y = step.norm(y, self.norm, "ssm_norm")?;
        let y = step.flat(y)?;
        let y = step.builder.gate(Gate::Silu, z, y)?;
        step.linear(y, self.out, "ssm_out")
    }
}
