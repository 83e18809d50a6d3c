//! Llama 2 and 3, and those built like it: SmolLM2, TinyLlama, Mistral (with its sliding window).
//!
//! Pre-norm attention with grouped heads and rotary positions, then a SwiGLU feed-forward. Biases come with the
//! configuration, as in Qwen 2 and 2.5, and so do norms of heads and experts, as in Qwen 3.

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[("ffn_norm", "post_attention_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Pre, Attention::declare, FeedForward::of_config)
    })
}
