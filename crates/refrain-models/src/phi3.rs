//! Phi 3, 3.5 and 4: Llama with queries, keys and values as one tensor, and gate and up as another. A part of each head is
//! rotated, with other frequencies for long texts.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[("ffn_norm", "post_attention_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Pre, Attention::fused, FeedForward::fused)
    })
}
