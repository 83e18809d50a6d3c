//! gpt-oss: attention with a sink for each head and a window in every other layer, and experts with biases, chosen by
//! their logits alone and joined by a clamped SwiGLU.
//!
//! Folders have the experts' gate and up projections in alternating rows. In MXFP4 their blocks and scales are separate
//! tensors; otherwise the matrices are transposed. Loading brings them into the layout of GGUF files, which takes
//! memory for a copy of the experts.

use crate::error::ModelError;
use crate::layers::{AttentionLayer, Decoder, DecoderLayer, FeedForward, Mixture, Norms};
use crate::weights::{ExpertPart, HfNames, WeightTable};
use refrain_formats::params::Experts;
use refrain_graph::{ExpertActivation, ExpertGate, Route, RouteScore};

pub(crate) const NAMES: HfNames =
    &[("post_attention_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.router")];

/// No folder has such a tensor: their joint one alternates rows.
const JOINED_IN_GGUF: &str = "mlp.experts.gate_up_exps";

/// `swiglu_alpha` and `swiglu_limit` of the published models; reading the configuration refuses others.
const ACTIVATION: ExpertActivation = ExpertActivation::ClampedSilu { alpha: 1.702, limit: 7.0 };

pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Decoder, ModelError> {
    Decoder::of_blocks(w, |w, layer| {
        let hidden = w.config.hidden;
        let before_mixer = Some(w.norm(layer, "attn_norm", hidden)?);
        let mixer = AttentionLayer::with_sinks(w, layer)?;
        let before_ffn = Some(w.norm(layer, "post_attention_norm", hidden)?);
        let ffn = experts(w, layer)?;
        let norms = Norms { before_mixer, before_ffn, ..Norms::default() };
        Ok(DecoderLayer { norms, parallel: false, mixer, ffn, input: None, output_scale: 1.0 })
    })
}

fn experts(w: &mut WeightTable<'_>, layer: usize) -> Result<FeedForward, ModelError> {
    let Some(experts) = w.config.experts else {
        unreachable!("both readers of configurations refuse this architecture without experts")
    };
    let Experts { n_experts, ffn, .. } = experts;
    let hidden = w.config.hidden;
    let router = w.matrix(layer, "ffn_gate_inp", [n_experts, hidden])?;
    let router_bias = w.scaled_vector(layer, ["ffn_gate_inp.bias", "mlp.router.bias"], n_experts, 1.0)?;
    let part = |name, hf_name, of: [usize; 2], rows| ExpertPart { name, hf_name, of, rows };
    let mut parts = vec![
        part("ffn_gate_exps", "gate_up_proj", [0, 2], [ffn, hidden]),
        part("ffn_up_exps", "gate_up_proj", [1, 2], [ffn, hidden]),
        part("ffn_down_exps", "down_proj", [0, 1], [hidden, ffn]),
    ];
    // GGUF files may have the rows of the gate, then those of up, in one tensor.
    let names = ["ffn_gate_up_exps.weight", JOINED_IN_GGUF];
    let joined = w.optional_in_layer(layer, names, &[n_experts, 2 * ffn, hidden])?;
    let (mut weights, mut biases) = (Vec::new(), Vec::new());
    if let Some(joined) = joined {
        let names = ["ffn_gate_up_exps.bias", JOINED_IN_GGUF];
        weights.push(joined);
        biases.push(w.expert_vectors(layer, names, [n_experts, 2 * ffn])?);
        parts.drain(..2);
    }
    for part in &parts {
        weights.push(w.part_of_experts(layer, n_experts, part)?);
        biases.push(w.bias_of_experts(layer, n_experts, part)?);
    }
    let down = weights.split_off(weights.len() - 1)[0];
    let gate_up = weights;
    Ok(FeedForward::Experts(Mixture {
        router,
        router_bias: Some(router_bias),
        route: Route { score: RouteScore::SoftmaxOfChosen, renormalise: false, ..Mixture::route(experts) },
        scales: None,
        gate: ExpertGate { activation: ACTIVATION, joined: joined.is_some(), biased: true },
        gate_up,
        down,
        biases,
    }))
}
