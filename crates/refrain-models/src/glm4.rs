//! GLM 4 (April 2025): norms before and after each branch, biases on queries, keys and values, half of each
//! head rotated, and gate and up projections in one tensor.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Sandwich, AttentionLayer::declare, FeedForward::fused)
    })
}
