//! Qwen 3.5 and 3.6, the text part: three of four layers are gated DeltaNets; the others
//! are attention with an output gate, rotating a quarter of each head. Layers are pre-norm with SwiGLU; the
//! norm before the feed-forward part is named `post_attention_norm` in GGUF files too. Models with experts have one more that
//! every token uses, weighted by the sigmoid of a gate.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, DeltaNet, FeedForward, Norms};
use crate::weights::{HfNames, WeightTable};
use refrain_formats::params::{LayerAttention, RecurrentLayers};

pub(crate) const NAMES: HfNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_out", "linear_attn.out_proj"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        let hidden = w.config.hidden;
        let before_mixer = Some(w.norm(layer, "attn_norm", hidden)?);
        let mixer = match (w.config.layer(layer), w.config.recurrent) {
            (LayerAttention::Recurrent, Some(RecurrentLayers::DeltaNet(sizes))) => {
                DeltaNet::declare(w, layer, sizes)?
            }
            _ => AttentionLayer::gated(w, layer)?,
        };
        let before_ffn = Some(w.norm(layer, "post_attention_norm", hidden)?);
        let ffn = FeedForward::of_config(w, layer)?;
        let norms = Norms { before_mixer, before_ffn, ..Norms::default() };
        Ok(DecoderLayer { norms, parallel: false, mixer, ffn, input: None, output_scale: 1.0 })
    })
}
