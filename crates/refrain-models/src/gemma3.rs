//! Gemma 3, text: norms before and after attention and feed-forward, queries and keys normed per head, five sliding
//! layers to each full one with a rotary base of their own, GeGLU, and a scaled embedding.

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
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

#[derive(Debug)]
pub(crate) struct Gemma3 {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    attn_norm: WeightId,      // [hidden]
    q: Linear,                // [n_heads * head_dim, hidden]
    k: Linear,                // [n_kv_heads * head_dim, hidden]
    v: Linear,                // [n_kv_heads * head_dim, hidden]
    q_norm: WeightId,         // [head_dim]
    k_norm: WeightId,         // [head_dim]
    o: Linear,                // [hidden, n_heads * head_dim]
    post_attn_norm: WeightId, // [hidden]
    ffn_norm: WeightId,       // [hidden]
    gate: Linear,             // [ffn, hidden]
    up: Linear,               // [ffn, hidden]
    down: Linear,             // [hidden, ffn]
    post_ffn_norm: WeightId,  // [hidden]
}

impl Gemma3 {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Gemma3, ModelError> {
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
                post_attn_norm: w.norm(i, "post_attention_norm", c.hidden)?,
                ffn_norm: w.norm(i, "ffn_norm", c.hidden)?,
                gate: w.linear(i, "ffn_gate", [c.ffn, c.hidden], c.ffn_bias)?,
                up: w.linear(i, "ffn_up", [c.ffn, c.hidden], c.ffn_bias)?,
                down: w.linear(i, "ffn_down", [c.hidden, c.ffn], c.ffn_bias)?,
                post_ffn_norm: w.norm(i, "post_ffw_norm", c.hidden)?,
            });
        }
        Ok(Gemma3 { layers })
    }
}

impl Architecture for Gemma3 {
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
        let h = step.norm(h, w.post_attn_norm, "post_attn_norm")?;
        let h = step.branch(h)?;
        let x = step.add(x, h)?;

        let h = step.norm(x, w.ffn_norm, "ffn_norm")?;
        let h = step.gated_ffn(h, Unary::GeluTanh, [w.gate, w.up, w.down])?;
        let h = step.norm(h, w.post_ffn_norm, "post_ffn_norm")?;
        let h = step.branch(h)?;
        step.add(x, h)
    }
}
