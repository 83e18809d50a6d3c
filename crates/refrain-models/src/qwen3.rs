//! Qwen 3, dense: Llama's layer, with queries and keys normed per head before they are rotated.

use crate::error::ModelError;
use crate::step::{Architecture, Step};
use crate::weights::{HfNames, Linear, WeightTable};
use refrain_graph::{GraphError, Unary, ValueId, WeightId};

pub(crate) const LAYER_NAMES: HfNames = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

#[derive(Debug)]
pub(crate) struct Qwen3 {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    attn_norm: WeightId, // [hidden]
    q: Linear,           // [n_heads * head_dim, hidden]
    k: Linear,           // [n_kv_heads * head_dim, hidden]
    v: Linear,           // [n_kv_heads * head_dim, hidden]
    q_norm: WeightId,    // [head_dim]
    k_norm: WeightId,    // [head_dim]
    o: Linear,           // [hidden, n_heads * head_dim]
    ffn_norm: WeightId,  // [hidden]
    gate: Linear,        // [ffn, hidden]
    up: Linear,          // [ffn, hidden]
    down: Linear,        // [hidden, ffn]
}

impl Qwen3 {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Qwen3, ModelError> {
        let c = w.config;
        let (q_rows, kv_rows) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let mut layers = Vec::with_capacity(c.n_layers);
        for i in 0..c.n_layers {
            layers.push(Layer {
                attn_norm: w.norm(i, "attn_norm", c.hidden)?,
                q: w.linear(i, "attn_q", [q_rows, c.hidden], c.qkv_bias)?,
                k: w.linear(i, "attn_k", [kv_rows, c.hidden], c.qkv_bias)?,
                v: w.linear(i, "attn_v", [kv_rows, c.hidden], c.qkv_bias)?,
                q_norm: w.norm(i, "attn_q_norm", c.head_dim)?,
                k_norm: w.norm(i, "attn_k_norm", c.head_dim)?,
                o: w.linear(i, "attn_output", [c.hidden, q_rows], c.attn_output_bias)?,
                ffn_norm: w.norm(i, "ffn_norm", c.hidden)?,
                gate: w.linear(i, "ffn_gate", [c.ffn, c.hidden], c.ffn_bias)?,
                up: w.linear(i, "ffn_up", [c.ffn, c.hidden], c.ffn_bias)?,
                down: w.linear(i, "ffn_down", [c.hidden, c.ffn], c.ffn_bias)?,
            });
        }
        Ok(Qwen3 { layers })
    }
}

impl Architecture for Qwen3 {
    fn layer(&self, step: &mut Step<'_>, layer: usize, x: ValueId) -> Result<ValueId, GraphError> {
        let w = &self.layers[layer];
        let h = step.norm(x, w.attn_norm, "attn_norm")?;
        let q = step.heads(h, w.q, "attn_q")?;
        let k = step.heads(h, w.k, "attn_k")?;
        let v = step.heads(h, w.v, "attn_v")?;
        let q = step.norm(q, w.q_norm, "attn_q_norm")?;
        let k = step.norm(k, w.k_norm, "attn_k_norm")?;
        let q = step.rope(q, layer)?;
        let k = step.rope(k, layer)?;
        let h = step.attend(layer, [q, k, v])?;
        let h = step.linear(h, w.o, "attn_output")?;
        let h = step.branch(h)?;
        let x = step.add(x, h)?;

        let h = step.norm(x, w.ffn_norm, "ffn_norm")?;
        let h = step.gated_ffn(h, Unary::Silu, [w.gate, w.up, w.down])?;
        let h = step.branch(h)?;
        step.add(x, h)
    }
}
