//! Command R7B and Command A: attention and feed-forward in parallel after one layer norm, full-attention
//! layers without rotary embedding, and scaled logits.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Parallel, AttentionLayer::declare, FeedForward::gated)
    })
}
