//! OLMo 2 and 3: norms only after each branch, and queries and keys normalised over all heads. In OLMo 3,
//! three of four layers use a sliding window and unscaled rotary frequencies.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Post, AttentionLayer::with_row_norms, FeedForward::gated)
    })
}
