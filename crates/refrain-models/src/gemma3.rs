//! Gemma 2, and the text part of Gemma 3: norms before and after attention and feed-forward, GeGLU, and a
//! scaled embedding. Gemma 3 normalises queries and keys per head, and has five sliding-window layers per
//! full-attention layer, with separate rotary bases. Gemma 2 soft-caps scores and logits, and uses a sliding
//! window in every other layer.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Sandwich, AttentionLayer::declare, FeedForward::gated)
    })
}
