//! OLMo 2 and 3: branches are normed where they join the residual and not where they begin, and queries and keys are normed
//! over all heads. OLMo 3 slides in three layers of four, in which its rotations are not scaled.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Post, Attention::with_row_norms, FeedForward::gated)
    })
}
