//! Command R7B and Command A: attention and feed-forward beside each other behind one layer norm, layers that see all
//! without rotation, and logits that are scaled.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Parallel, Attention::declare, FeedForward::gated)
    })
}
