//! Llama 2 and 3, and architectures built like them.
//!
//! Pre-norm grouped-query attention with rotary positions, then a SwiGLU feed-forward. The configuration
//! covers the variations: biases (Qwen 2), head norms and experts (Qwen 3), windows (Mistral), queries scaled
//! by position (Ministral 3), layers without rotation (SmolLM 3), factors on embedding, branches and logits
//! (Granite).

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement};
use crate::weights::{HfNames, WeightTable};

pub(crate) const NAMES: HfNames = &[("ffn_norm", "post_attention_layernorm")];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        DecoderLayer::declare(w, layer, Placement::Pre, AttentionLayer::declare, FeedForward::of_config)
    })
}
