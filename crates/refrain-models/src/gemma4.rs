//! Gemma 4, the text part of its dense models: E2B, E4B and 31B.
//!
//! Like Gemma 3, with heads of one size in sliding layers and of another in layers that see all, scores that are not
//! scaled, and values that are normed. The last layers may attend to the keys and values of an earlier layer of their kind.
//! E2B and E4B have a second embedding, of which every layer gets a slice, gated by its residual. A layer ends with a factor
//! on all of its residual.

use crate::error::ModelError;
use crate::step::{Architecture, Step};
use crate::weights::{HfNames, Linear, WeightTable};
use refrain_formats::params::{LayerAttention, LayerSizes};
use refrain_graph::{Gate, GraphError, Unary, ValueId, WeightId};
use std::collections::BTreeMap;

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
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
];

#[derive(Debug)]
pub(crate) struct Gemma4 {
    layers: Vec<Layer>,
    per_layer: Option<PerLayer>,
}

/// The second embedding.
#[derive(Debug)]
struct PerLayer {
    table: WeightId, // [vocab, n_layers * dim]
    proj: Linear,    // [n_layers * dim, hidden]
    norm: WeightId,  // [dim]
    dim: usize,
}

#[derive(Debug)]
struct Layer {
    sizes: LayerSizes,
    attn_norm: WeightId, // [hidden]
    q: Linear,           // [n_heads * head_dim, hidden]
    q_norm: WeightId,    // [head_dim]
    kv: Option<KeysValues>,
    o: Linear,                // [hidden, n_heads * head_dim]
    post_attn_norm: WeightId, // [hidden]
    ffn_norm: WeightId,       // [hidden]
    gate: Linear,             // [ffn, hidden]
    up: Linear,               // [ffn, hidden]
    down: Linear,             // [hidden, ffn]
    post_ffn_norm: WeightId,  // [hidden]
    own: Option<OwnInput>,
    scale: f32,
}

/// Keys and values of a layer that has its own.
#[derive(Debug)]
struct KeysValues {
    k: Linear,         // [n_kv_heads * head_dim, hidden]
    v: Option<Linear>, // the same; without it values are the keys before norm and rotation
    k_norm: WeightId,  // [head_dim]
    ones: WeightId,    // [head_dim]: values are normed without weights
}

/// How a layer takes its slice of the second embedding.
#[derive(Debug)]
struct OwnInput {
    gate: Linear,   // [dim, hidden]
    proj: Linear,   // [hidden, dim]
    norm: WeightId, // [hidden]
}

impl Gemma4 {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Gemma4, ModelError> {
        let c = w.config;
        let per_layer = match c.per_layer {
            Some(per_layer) => Some(PerLayer::declare(w, per_layer.n_vocab, per_layer.dim)?),
            None => None,
        };
        let mut ones = BTreeMap::new();
        let mut layers = Vec::with_capacity(c.n_layers);
        for i in 0..c.n_layers {
            let sizes = c.layer_sizes(i);
            let q_rows = c.n_heads * sizes.head_dim;
            let has_kv = c.kv_layer(i) == i;
            layers.push(Layer {
                sizes,
                attn_norm: w.norm(i, "attn_norm", c.hidden)?,
                q: w.linear(i, "attn_q", [q_rows, c.hidden], c.qkv_bias)?,
                q_norm: w.norm(i, "attn_q_norm", sizes.head_dim)?,
                kv: if has_kv { Some(KeysValues::declare(w, i, &mut ones)?) } else { None },
                o: w.linear(i, "attn_output", [c.hidden, q_rows], c.attn_output_bias)?,
                post_attn_norm: w.norm(i, "post_attention_norm", c.hidden)?,
                ffn_norm: w.norm(i, "ffn_norm", c.hidden)?,
                gate: w.linear(i, "ffn_gate", [sizes.ffn, c.hidden], c.ffn_bias)?,
                up: w.linear(i, "ffn_up", [sizes.ffn, c.hidden], c.ffn_bias)?,
                down: w.linear(i, "ffn_down", [c.hidden, sizes.ffn], c.ffn_bias)?,
                post_ffn_norm: w.norm(i, "post_ffw_norm", c.hidden)?,
                own: match c.per_layer {
                    Some(per_layer) => Some(OwnInput::declare(w, i, per_layer.dim)?),
                    None => None,
                },
                scale: w.layer_scalar(i)?,
            });
        }
        Ok(Gemma4 { layers, per_layer })
    }
}

impl PerLayer {
    fn declare(w: &mut WeightTable<'_>, n_vocab: usize, dim: usize) -> Result<PerLayer, ModelError> {
        let c = w.config;
        let width = c.n_layers * dim;
        let (table, proj) =
            ("model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight");
        let weight = w.global("per_layer_model_proj.weight", proj, &[width, c.hidden])?;
        Ok(PerLayer {
            table: w.global("per_layer_token_embd.weight", table, &[n_vocab, width])?,
            proj: Linear { weight, bias: None },
            norm: w.global_norm(
                "per_layer_proj_norm.weight",
                "model.per_layer_projection_norm.weight",
                dim,
            )?,
            dim,
        })
    }
}

impl KeysValues {
    /// `ones` holds the weights of norms that have none, by head size.
    fn declare(
        w: &mut WeightTable<'_>,
        layer: usize,
        ones: &mut BTreeMap<usize, WeightId>,
    ) -> Result<KeysValues, ModelError> {
        let c = w.config;
        let LayerSizes { n_kv_heads, head_dim, .. } = c.layer_sizes(layer);
        let dims = [n_kv_heads * head_dim, c.hidden];
        let takes_keys = c.keys_as_values && c.layer(layer) == LayerAttention::Full;
        Ok(KeysValues {
            k: w.linear(layer, "attn_k", dims, c.qkv_bias)?,
            v: if takes_keys { None } else { Some(w.linear(layer, "attn_v", dims, c.qkv_bias)?) },
            k_norm: w.norm(layer, "attn_k_norm", head_dim)?,
            ones: match ones.get(&head_dim) {
                Some(&known) => known,
                None => {
                    let new = w.derived(&format!("ones.{head_dim}"), &vec![1.0; head_dim])?;
                    ones.insert(head_dim, new);
                    new
                }
            },
        })
    }
}

impl OwnInput {
    fn declare(w: &mut WeightTable<'_>, layer: usize, dim: usize) -> Result<OwnInput, ModelError> {
        let hidden = w.config.hidden;
        Ok(OwnInput {
            gate: w.linear(layer, "inp_gate", [dim, hidden], false)?,
            proj: w.linear(layer, "proj", [hidden, dim], false)?,
            norm: w.norm(layer, "post_norm", hidden)?,
        })
    }
}

impl Architecture for Gemma4 {
    fn token_table(&self) -> Option<WeightId> {
        self.per_layer.as_ref().map(|per_layer| per_layer.table)
    }

    /// `(norm(proj(x) / sqrt(hidden)) + sqrt(dim) * table[token]) / sqrt(2)`
    fn inputs(&self, step: &mut Step<'_>, x: ValueId) -> Result<Option<ValueId>, GraphError> {
        let Some(w) = &self.per_layer else { return Ok(None) };
        let (n_layers, hidden) = (self.layers.len(), step.config.hidden as f32);
        let context = step.linear(x, w.proj, "per_layer_proj")?;
        let context = step.apart(context, n_layers, w.dim)?;
        // A factor on what is normed is one over its square on epsilon.
        let eps = step.config.norm_eps * hidden;
        let context = step.norm_with(context, w.norm, eps, "per_layer_proj_norm")?;
        let rows = step.token_rows(w.table)?;
        let rows = step.scaled(rows, (w.dim as f32).sqrt())?;
        let rows = step.apart(rows, n_layers, w.dim)?;
        let both = step.add(context, rows)?;
        // Layers first: what a layer reads then lies together.
        let by_layer = step.builder.permute(both, &[1, 0, 2])?;
        step.scaled(by_layer, 0.5f32.sqrt()).map(Some)
    }

    fn layer(&self, step: &mut Step<'_>, layer: usize, x: ValueId) -> Result<ValueId, GraphError> {
        let w = &self.layers[layer];
        let head_dim = w.sizes.head_dim;
        let h = step.norm(x, w.attn_norm, "attn_norm")?;
        let q = step.heads_of(h, w.q, head_dim, "attn_q")?;
        let q = step.norm(q, w.q_norm, "attn_q_norm")?;
        let q = step.rope(q, layer)?;
        let kv = match &w.kv {
            Some(w) => {
                let k = step.heads_of(h, w.k, head_dim, "attn_k")?;
                let v = match w.v {
                    Some(v) => step.heads_of(h, v, head_dim, "attn_v")?,
                    None => k,
                };
                let k = step.norm(k, w.k_norm, "attn_k_norm")?;
                let v = step.norm(v, w.ones, "attn_v_norm")?;
                Some([step.rope(k, layer)?, v])
            }
            None => None,
        };
        let h = step.attend_over(layer, q, kv)?;
        let h = step.linear(h, w.o, "attn_output")?;
        let h = step.norm(h, w.post_attn_norm, "post_attn_norm")?;
        let h = step.branch(h)?;
        let x = step.add(x, h)?;

        let h = step.norm(x, w.ffn_norm, "ffn_norm")?;
        let h = step.gated_ffn(h, Unary::GeluTanh, [w.gate, w.up, w.down])?;
        let h = step.norm(h, w.post_ffn_norm, "post_ffn_norm")?;
        let h = step.branch(h)?;
        let mut x = step.add(x, h)?;

        if let Some(w) = &w.own {
            let own = step.own_input(layer)?;
            let gate = step.linear(x, w.gate, "inp_gate")?;
            let h = step.builder.gate(Gate::GeluTanh, gate, own)?;
            let h = step.linear(h, w.proj, "proj")?;
            let h = step.norm(h, w.norm, "post_norm")?;
            x = step.add(x, h)?;
        }
        step.scaled(x, w.scale)
    }
}
