//! GLM 4 of April 2025: norms at both ends of each branch, biases on queries, keys and values, half of each head rotated,
//! and gate and up as one tensor.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Sandwich, Attention::declare, FeedForward::fused)
    })
}
