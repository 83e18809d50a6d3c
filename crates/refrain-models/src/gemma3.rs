//! Gemma 2, and the text part of Gemma 3: norms before and after attention and feed-forward, GeGLU, and a scaled embedding.
//! Gemma 3 norms queries and keys per head, and has five sliding layers to each full one with a rotary base of their own.
//! Gemma 2 caps scores and logits, and slides in every other layer.

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
