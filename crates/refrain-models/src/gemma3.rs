//! Gemma 3, text: norms before and after attention and feed-forward, queries and keys normed per head, five sliding
//! layers to each full one with a rotary base of their own, GeGLU, and a scaled embedding.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Sandwich, Attention::declare, FeedForward::gated)
    })
}
