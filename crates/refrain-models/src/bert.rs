//! BERT, MiniLM and BGE: encoders with learned positions, whose layers normalise the sums of their branches and
//! the residual. Every layer norm and every linear map has a bias.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Norms, TextInputs};
use crate::weights::{HfNames, WeightTable};

/// Folders list the layers under `encoder.layer`.
pub(crate) const NAMES: HfNames = &[
    ("attn_q", "attention.self.query"),
    ("attn_k", "attention.self.key"),
    ("attn_v", "attention.self.value"),
    ("attn_output", "attention.output.dense"),
    ("attn_output_norm", "attention.output.LayerNorm"),
    ("ffn_up", "intermediate.dense"),
    ("ffn_down", "output.dense"),
    ("layer_output_norm", "output.LayerNorm"),
];

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    let text_inputs = Some(TextInputs::declare(w)?);
    let decoder = Decoder::of_blocks(w, |w, layer| {
        let mixer = AttentionLayer::declare(w, layer)?;
        let after_mixer_sum = Some(w.biased_norm(layer, "attn_output_norm")?);
        let ffn = FeedForward::plain(w, layer)?;
        let after_ffn_sum = Some(w.biased_norm(layer, "layer_output_norm")?);
        let norms = Norms { after_mixer_sum, after_ffn_sum, ..Norms::default() };
        Ok(DecoderLayer { norms, parallel: false, mixer, ffn, input: None, output_scale: 1.0 })
    })?;
    Ok(Decoder { text_inputs, ..decoder })
}
