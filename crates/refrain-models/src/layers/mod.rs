//! Building blocks of layers.
//!
//! An architecture is a [`Decoder`]: each [`DecoderLayer`] has two branches, a mixer and a feed-forward part,
//! with norms around them. The architecture's file declares its building blocks; the graph of a step is built
//! from them here and nowhere else.

mod attention; // over a KV cache, or among the rows of a document
mod delta_net; // gated delta rule over a recurrent state
mod ffn; // feed-forward parts
mod experts; // mixtures of experts
mod short_conv; // gated short convolutions
mod text_inputs; // inputs of encoders

pub(crate) use attention::{AttentionLayer, HeadNorm, KeysValues, NormSpan};
pub(crate) use delta_net::DeltaNet;
pub(crate) use experts::Mixture;
pub(crate) use ffn::{DenseAndExperts, FeedForward, GatedFfn};
pub(crate) use short_conv::ShortConvLayer;
pub(crate) use text_inputs::TextInputs;

use crate::error::ModelError;
use crate::gemma4::{LayerInput, LayerInputs};
use crate::state::LayerState;
use crate::step::StepBuilder;
use crate::weights::WeightTable;
use refrain_formats::params::ModelConfig;
use refrain_graph::{GraphError, ValueId, WeightId};

/// The layers of a model.
#[derive(Debug)]
pub(crate) struct Decoder {
    pub blocks: Vec<DecoderLayer>,
    /// The per-layer embedding (Gemma 4).
    pub layer_inputs: Option<LayerInputs>,
    /// Embeddings of positions and token types (encoders).
    pub text_inputs: Option<TextInputs>,
}

/// One layer: maps `x[n_tokens, hidden]` to the same shape.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    pub norms: Norms,
    /// Whether the feed-forward part reads the same rows as the mixer.
    pub parallel: bool,
    pub mixer: Mixer,
    pub ffn: FeedForward,
    /// Third branch, fed by this layer's slice of [`Decoder::layer_inputs`].
    pub input: Option<LayerInput>,
    /// Factor on the residual at the end of the layer.
    pub output_scale: f32,
}

/// Sequence mixing; a model may combine several kinds.
#[derive(Debug)]
pub(crate) enum Mixer {
    Attention(AttentionLayer),
    DeltaNet(DeltaNet),
    ShortConv(ShortConvLayer),
}

/// Placement of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Before a branch: `x + f(norm(x))`.
    Pre,
    /// After a branch: `x + norm(f(x))`.
    Post,
    /// Before and after a branch: `x + norm(f(norm(x)))`.
    Sandwich,
    /// One norm before both branches, which run in parallel: `x + f(norm(x)) + g(norm(x))`.
    Parallel,
}

/// A layer norm with a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BiasedNorm {
    pub weight: WeightId, // [hidden]
    pub bias: WeightId,   // [hidden]
}

/// The norms of a layer, each `[hidden]`.
#[derive(Debug, Default)]
pub(crate) struct Norms {
    pub before_mixer: Option<WeightId>,
    pub after_mixer: Option<WeightId>,
    pub before_ffn: Option<WeightId>,
    pub after_ffn: Option<WeightId>,
    /// Norms of the residual after a branch has joined it: `norm(x + f(x))` (encoders).
    pub after_mixer_sum: Option<BiasedNorm>,
    pub after_ffn_sum: Option<BiasedNorm>,
}

impl Placement {
    fn before(self) -> bool {
        matches!(self, Placement::Pre | Placement::Sandwich)
    }

    fn after(self) -> bool {
        matches!(self, Placement::Post | Placement::Sandwich)
    }
}

impl Decoder {
    /// Declares the layers one by one, for architectures without additional parts.
    pub(crate) fn of_blocks(
        w: &mut WeightTable<'_>,
        block: impl Fn(&mut WeightTable<'_>, usize) -> Result<DecoderLayer, ModelError>,
    ) -> Result<Decoder, ModelError> {
        let blocks = (0..w.config.n_layers).map(|layer| block(w, layer)).collect::<Result<_, _>>()?;
        Ok(Decoder { blocks, layer_inputs: None, text_inputs: None })
    }

    /// State that a layer keeps between steps.
    pub(crate) fn state(&self, config: &ModelConfig, layer: usize) -> LayerState {
        match &self.blocks[layer].mixer {
            Mixer::Attention(attention) => attention.state(config, layer),
            Mixer::DeltaNet(net) => net.state(),
            Mixer::ShortConv(conv) => conv.state(config.hidden),
        }
    }

    /// The table of which a step reads one row per token, and which therefore need not be on the device.
    pub(crate) fn token_table(&self) -> Option<WeightId> {
        self.layer_inputs.as_ref().map(|inputs| inputs.table)
    }
}

impl DecoderLayer {
    /// Declares a layer with a mixer, a feed-forward part, and norms as `placement` says. Weight ids follow
    /// the order of computation.
    pub(crate) fn declare(
        w: &mut WeightTable<'_>,
        layer: usize,
        placement: Placement,
        mixer: impl FnOnce(&mut WeightTable<'_>, usize) -> Result<Mixer, ModelError>,
        ffn: impl FnOnce(&mut WeightTable<'_>, usize) -> Result<FeedForward, ModelError>,
    ) -> Result<DecoderLayer, ModelError> {
        let hidden = w.config.hidden;
        let parallel = placement == Placement::Parallel;
        let norm = |w: &mut WeightTable<'_>, name: &str, is_there: bool| match is_there {
            true => w.norm(layer, name, hidden).map(Some),
            false => Ok(None),
        };
        let before_mixer = norm(w, "attn_norm", placement.before() || parallel)?;
        let mixer = mixer(w, layer)?;
        let after_mixer = norm(w, "post_attention_norm", placement.after())?;
        let before_ffn = norm(w, "ffn_norm", placement.before())?;
        let ffn = ffn(w, layer)?;
        let after_ffn = norm(w, "post_ffw_norm", placement.after())?;
        let norms = Norms { before_mixer, after_mixer, before_ffn, after_ffn, ..Norms::default() };
        Ok(DecoderLayer { norms, parallel, mixer, ffn, input: None, output_scale: 1.0 })
    }

    pub(crate) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        x: ValueId,
    ) -> Result<ValueId, GraphError> {
        let norms = &self.norms;
        let mixed = step.residual_norm(x, norms.before_mixer, "attn_norm")?;
        let h = self.mixer.build(step, layer, mixed)?;
        let h = step.branch_norm(h, norms.after_mixer, "post_attn_norm")?;
        let x = step.join(x, h)?;
        let x = step.sum_norm(x, norms.after_mixer_sum, "attn_output_norm")?;

        let h = match self.parallel {
            true => mixed,
            false => step.residual_norm(x, norms.before_ffn, "ffn_norm")?,
        };
        let h = self.ffn.build(step, x, h)?;
        let h = step.branch_norm(h, norms.after_ffn, "post_ffn_norm")?;
        let x = step.join(x, h)?;
        let x = step.sum_norm(x, norms.after_ffn_sum, "layer_output_norm")?;

        let x = match &self.input {
            Some(input) => input.build(step, layer, x)?,
            None => x,
        };
        step.scaled(x, self.output_scale)
    }
}

impl Mixer {
    /// Maps `h[n_tokens, hidden]` to the same shape.
    fn build(&self, step: &mut StepBuilder<'_>, layer: usize, h: ValueId) -> Result<ValueId, GraphError> {
        match self {
            Mixer::Attention(attention) => attention.build(step, layer, h),
            Mixer::DeltaNet(net) => net.build(step, layer, h),
            Mixer::ShortConv(conv) => conv.build(step, layer, h),
        }
    }
}
