//! Gemma 4, the text part: E2B, E4B, 31B and 26B-A4B.
//!
//! Differences to Gemma 3: sliding-window and full-attention layers have different head sizes, scores are not
//! scaled, and values are normalised. The last layers may attend to the keys and values of an earlier layer
//! of their kind. E2B and E4B have a per-layer embedding: every layer gets a slice of it, gated by the
//! residual. Each layer ends by scaling its whole residual. 26B-A4B has experts next to the dense
//! feed-forward part, routed by the residual before it.

use crate::error::ModelError;
use crate::layers::{
    AttentionLayer, Decoder, DecoderLayer, DenseAndExperts, FeedForward, GatedFfn, HeadNorm, KeysValues,
    Mixer, Mixture, NormSpan, Placement,
};
use crate::step::StepBuilder;
use crate::weights::{HfNames, Linear, WeightTable};
use refrain_formats::params::{Experts, LayerAttention, LayerSizes};
use refrain_graph::{ExpertActivation, ExpertGate, Gate, GraphError, Route, ValueId, WeightId};
use std::collections::BTreeMap;

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("ffn_gate_inp", "router.proj"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
];

/// The per-layer embedding.
#[derive(Debug)]
pub(crate) struct LayerInputs {
    pub table: WeightId, // [vocab, n_layers * dim]
    proj: Linear,        // [n_layers * dim, hidden]
    norm: WeightId,      // [dim]
    dim: usize,
    n_layers: usize,
}

/// Projection of a layer's slice of the per-layer embedding.
#[derive(Debug)]
pub(crate) struct LayerInput {
    gate: Linear,   // [dim, hidden]
    proj: Linear,   // [hidden, dim]
    norm: WeightId, // [hidden]
}

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    let c = w.config;
    let layer_inputs = match c.per_layer {
        Some(per_layer) => Some(LayerInputs::declare(w, per_layer.n_vocab, per_layer.dim)?),
        None => None,
    };
    let mut ones = BTreeMap::new();
    let mut blocks = Vec::with_capacity(c.n_layers);
    for layer in 0..c.n_layers {
        let mixer = |w: &mut WeightTable<'_>, layer| attention(w, layer, &mut ones);
        let mut block = DecoderLayer::declare(w, layer, Placement::Sandwich, mixer, feed_forward)?;
        if let Some(per_layer) = c.per_layer {
            block.input = Some(LayerInput::declare(w, layer, per_layer.dim)?);
        }
        block.output_scale = w.layer_scalar(layer)?;
        blocks.push(block);
    }
    Ok(Decoder { blocks, layer_inputs, text_inputs: None })
}

/// A dense feed-forward part, plus experts if the configuration has any.
fn feed_forward(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
    let c = w.config;
    let Some(experts) = c.experts else { return FeedForward::gated(w, layer) };
    let Experts { n_experts, ffn, .. } = experts;
    let hidden = c.hidden;
    let dense = GatedFfn::declare(w, layer)?;
    let after_dense = w.norm(layer, "post_ffw_norm_1", hidden)?;
    let before_router = w.scaled_vector(
        layer,
        ["ffn_gate_inp.scale", "router.scale"],
        hidden,
        (hidden as f32).sqrt().recip(),
    )?;
    let router = w.matrix(layer, "ffn_gate_inp", [n_experts, hidden])?;
    let before_experts = w.norm(layer, "pre_ffw_norm_2", hidden)?;
    let names = ["ffn_gate_up_exps.weight", "experts.gate_up_proj"];
    let gate_up = w.in_layer(layer, names, &[n_experts, 2 * ffn, hidden])?;
    let names = ["ffn_down_exps.weight", "experts.down_proj"];
    let down = w.in_layer(layer, names, &[n_experts, hidden, ffn])?;
    let scales =
        w.scaled_vector(layer, ["ffn_down_exps.scale", "router.per_expert_scale"], n_experts, 1.0)?;
    let after_experts = w.norm(layer, "post_ffw_norm_2", hidden)?;
    let experts = Mixture {
        router,
        route: Route { scaled: true, ..Mixture::route(experts) },
        router_bias: None,
        biases: Vec::new(),
        scales: Some(scales),
        gate: ExpertGate { activation: ExpertActivation::GeluTanh, joined: true, biased: false },
        gate_up: vec![gate_up],
        down,
    };
    Ok(FeedForward::DenseAndExperts(Box::new(DenseAndExperts {
        dense,
        after_dense,
        before_router,
        before_experts,
        experts,
        after_experts,
    })))
}

/// `ones` caches the all-ones norm weights of norms without weights, by head size.
fn attention(
    w: &mut WeightTable<'_>,
    layer: usize,
    ones: &mut BTreeMap<usize, WeightId>,
) -> Result<Mixer, ModelError> {
    let c = w.config;
    let of_heads = |weight| HeadNorm { weight, span: NormSpan::Head };
    let LayerSizes { n_kv_heads, head_dim, .. } = c.layer_sizes(layer);
    let q_rows = c.n_heads * head_dim;
    let q = w.linear(layer, "attn_q", [q_rows, c.hidden], c.qkv_bias)?;
    let q_norm = Some(of_heads(w.norm(layer, "attn_q_norm", head_dim)?));
    let kv = match c.kv_layer(layer) == layer {
        true => {
            let dims = [n_kv_heads * head_dim, c.hidden];
            let takes_keys = c.keys_as_values && c.layer(layer) == LayerAttention::Full;
            let k = w.linear(layer, "attn_k", dims, c.qkv_bias)?;
            let v = if takes_keys { None } else { Some(w.linear(layer, "attn_v", dims, c.qkv_bias)?) };
            let k_norm = Some(of_heads(w.norm(layer, "attn_k_norm", head_dim)?));
            let ones = match ones.get(&head_dim) {
                Some(&known) => known,
                None => {
                    let new = w.derived(&format!("ones.{head_dim}"), &vec![1.0; head_dim])?;
                    ones.insert(head_dim, new);
                    new
                }
            };
            Some(KeysValues { k, v, k_norm, v_norm: Some(of_heads(ones)) })
        }
        false => None,
    };
    let o = w.linear(layer, "attn_output", [c.hidden, q_rows], c.attn_output_bias)?;
    Ok(Mixer::Attention(AttentionLayer { head_dim, q, q_norm, gate: None, kv, o, sinks: None }))
}

impl LayerInputs {
    fn declare(w: &mut WeightTable<'_>, n_vocab: usize, dim: usize) -> Result<LayerInputs, ModelError> {
        let c = w.config;
        let width = c.n_layers * dim;
        let (table, proj) =
            ("model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight");
        let weight = w.global("per_layer_model_proj.weight", proj, &[width, c.hidden])?;
        Ok(LayerInputs {
            table: w.global("per_layer_token_embd.weight", table, &[n_vocab, width])?,
            proj: Linear { weight, bias: None },
            norm: w.global_norm(
                "per_layer_proj_norm.weight",
                "model.per_layer_projection_norm.weight",
                dim,
            )?,
            dim,
            n_layers: c.n_layers,
        })
    }

    /// Computes `(norm(proj(x) / sqrt(hidden)) + sqrt(dim) * table[token]) / sqrt(2)` from the embedded
    /// tokens `x[n_tokens, hidden]`: `[n_layers, n_tokens, dim]`, of which [`StepBuilder::own_input`] gives
    /// each layer its slice.
    pub(crate) fn build(&self, step: &mut StepBuilder<'_>, x: ValueId) -> Result<ValueId, GraphError> {
        let hidden = step.config.hidden as f32;
        let context = step.linear(x, self.proj, "per_layer_proj")?;
        let context = step.apart(context, self.n_layers, self.dim)?;
        // Scaling the input of a norm by `s` is the same as scaling epsilon by `1 / s²`.
        let eps = step.config.norm_eps * hidden;
        let context = step.norm_with(context, self.norm, eps, "per_layer_proj_norm")?;
        let rows = step.token_rows(self.table)?;
        let rows = step.scaled(rows, (self.dim as f32).sqrt())?;
        let rows = step.apart(rows, self.n_layers, self.dim)?;
        let both = step.add(context, rows)?;
        // Layer dimension first, so that each layer's slice is contiguous.
        let by_layer = step.builder.permute(both, &[1, 0, 2])?;
        step.scaled(by_layer, 0.5f32.sqrt())
    }
}

impl LayerInput {
    fn declare(w: &mut WeightTable<'_>, layer: usize, dim: usize) -> Result<LayerInput, ModelError> {
        let hidden = w.config.hidden;
        Ok(LayerInput {
            gate: w.linear(layer, "inp_gate", [dim, hidden], false)?,
            proj: w.linear(layer, "proj", [hidden, dim], false)?,
            norm: w.norm(layer, "post_norm", hidden)?,
        })
    }

    /// Adds the layer's slice to the residual `x[n_tokens, hidden]`.
    pub(crate) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        x: ValueId,
    ) -> Result<ValueId, GraphError> {
        let own = step.own_input(layer)?;
        let gate = step.linear(x, self.gate, "inp_gate")?;
        let h = step.builder.gate(Gate::GeluTanh, gate, own)?;
        let h = step.linear(h, self.proj, "proj")?;
        let h = step.norm(h, self.norm, "post_norm")?;
        step.add(x, h)
    }
}
