//! LFM2, dense: most layers are gated short convolutions; the others are attention with per-head norms of
//! queries and keys.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Placement, ShortConvLayer};
use crate::weights::{HfNames, WeightTable};
use refrain_formats::params::{LayerAttention, RecurrentLayers};

pub(crate) const NAMES: HfNames = &[
    ("attn_norm", "operator_norm"),
    ("attn_output", "self_attn.out_proj"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_up", "feed_forward.w3"),
    ("ffn_down", "feed_forward.w2"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        let mixer = |w: &mut WeightTable<'_>, layer| match (w.config.layer(layer), w.config.recurrent) {
            (LayerAttention::Recurrent, Some(RecurrentLayers::ShortConv { width })) => {
                ShortConvLayer::declare(w, layer, width)
            }
            _ => AttentionLayer::declare(w, layer),
        };
        DecoderLayer::declare(w, layer, Placement::Pre, mixer, FeedForward::gated)
    })
}
