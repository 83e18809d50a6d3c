//! Phi 3, 3.5 and 4: Llama with queries, keys and values in one tensor, and gate and up projections in
//! another. Only part of each head is rotated, with separate frequencies for long contexts.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[("ffn_norm", "post_attention_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Pre, AttentionLayer::fused, FeedForward::fused)
    })
}
