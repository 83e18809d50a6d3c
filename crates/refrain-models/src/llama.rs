//! Llama 2 and 3, and those built like it.
//!
//! Pre-norm attention with grouped heads and rotary positions, then a SwiGLU feed-forward. The configuration has the rest:
//! biases (Qwen 2), norms of heads and experts (Qwen 3), windows (Mistral), queries that grow with their position (Ministral 3), layers
//! without rotation (SmolLM 3), factors on embedding, branches and logits (Granite).

use crate::error::ModelError;
use crate::layers::{Attention, Block, Decoder, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[("ffn_norm", "post_attention_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        Block::declare(w, layer, Placement::Pre, Attention::declare, FeedForward::of_config)
    })
}
