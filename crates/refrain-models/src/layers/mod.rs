//! The pieces that layers are made of.
//!
//! An architecture is a [`Decoder`]: for each layer a [`Block`] of two branches, a mixer and a feed-forward part, with norms
//! around them. Its file declares which pieces it has; the graph of a step follows from them, here and nowhere else.

mod attention; // queries, keys and values over a cache or among rows
mod delta_net; // the gated delta rule over a state
mod ffn; // feed-forward parts
mod experts; // mixtures of experts
mod short_conv; // a filter over a few rows

pub(crate) use attention::{Attention, HeadNorm, KeysValues, NormSpan};
pub(crate) use delta_net::DeltaNet;
pub(crate) use experts::Mixture;
pub(crate) use ffn::{DenseAndExperts, FeedForward, GatedFfn};
pub(crate) use short_conv::ShortConv;

use crate::error::ModelError;
use crate::gemma4::{LayerInput, LayerInputs};
use crate::state::LayerState;
use crate::step::Step;
use crate::weights::WeightTable;
use refrain_formats::params::ModelConfig;
use refrain_graph::{GraphError, ValueId, WeightId};

/// The layers of a model.
#[derive(Debug)]
pub(crate) struct Decoder {
    pub blocks: Vec<Block>,
    /// What layers get besides the residual (Gemma 4).
    pub layer_inputs: Option<LayerInputs>,
}

/// One layer: `x[n_tokens, hidden]` -> the same.
#[derive(Debug)]
pub(crate) struct Block {
    pub norms: Norms,
    /// Whether the feed-forward part gets the rows that the mixer gets.
    pub parallel: bool,
    pub mixer: Mixer,
    pub ffn: FeedForward,
    /// A third branch, from this layer's slice of [`Decoder::layer_inputs`].
    pub input: Option<LayerInput>,
    /// Factor on the residual when the layer ends.
    pub output_scale: f32,
}

/// How the rows of a step see each other; a model may have several kinds of layers.
#[derive(Debug)]
pub(crate) enum Mixer {
    Attention(Attention),
    DeltaNet(DeltaNet),
    ShortConv(ShortConv),
}

/// Where a layer norms its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// What enters a branch: `x + f(norm(x))`.
    Pre,
    /// What a branch adds: `x + norm(f(x))`.
    Post,
    /// Both ends of a branch: `x + norm(f(norm(x)))`.
    Sandwich,
    /// What enters both branches, which run beside each other: `x + f(norm(x)) + g(norm(x))`.
    Parallel,
}

/// The norms of a layer, each `[hidden]`.
#[derive(Debug, Default)]
pub(crate) struct Norms {
    pub before_mixer: Option<WeightId>,
    pub after_mixer: Option<WeightId>,
    pub before_ffn: Option<WeightId>,
    pub after_ffn: Option<WeightId>,
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
    /// Declares layer after layer, for architectures that have nothing besides.
    pub(crate) fn of_blocks(
        w: &mut WeightTable<'_>,
        block: impl Fn(&mut WeightTable<'_>, usize) -> Result<Block, ModelError>,
    ) -> Result<Decoder, ModelError> {
        let blocks = (0..w.config.n_layers).map(|layer| block(w, layer)).collect::<Result<_, _>>()?;
        Ok(Decoder { blocks, layer_inputs: None })
    }

    /// What a layer keeps between steps.
    pub(crate) fn state(&self, config: &ModelConfig, layer: usize) -> LayerState {
        match &self.blocks[layer].mixer {
            Mixer::Attention(attention) => attention.state(config, layer),
            Mixer::DeltaNet(net) => net.state(),
            Mixer::ShortConv(conv) => conv.state(config.hidden),
        }
    }

    /// The table of which a step reads one row a token, and which therefore need not be on the device.
    pub(crate) fn token_table(&self) -> Option<WeightId> {
        self.layer_inputs.as_ref().map(|inputs| inputs.table)
    }
}

impl Block {
    /// A layer of a mixer and a feed-forward part, with norms where `placement` has them. Weights get their ids in the
    /// order of computation.
    pub(crate) fn declare(
        w: &mut WeightTable<'_>,
        layer: usize,
        placement: Placement,
        mixer: impl FnOnce(&mut WeightTable<'_>, usize) -> Result<Mixer, ModelError>,
        ffn: impl FnOnce(&mut WeightTable<'_>, usize) -> Result<FeedForward, ModelError>,
    ) -> Result<Block, ModelError> {
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
        let norms = Norms { before_mixer, after_mixer, before_ffn, after_ffn };
        Ok(Block { norms, parallel, mixer, ffn, input: None, output_scale: 1.0 })
    }

    pub(crate) fn build(&self, step: &mut Step<'_>, layer: usize, x: ValueId) -> Result<ValueId, GraphError> {
        let norms = &self.norms;
        let mixed = step.residual_norm(x, norms.before_mixer, "attn_norm")?;
        let h = self.mixer.build(step, layer, mixed)?;
        let h = step.branch_norm(h, norms.after_mixer, "post_attn_norm")?;
        let x = step.join(x, h)?;

        let h = match self.parallel {
            true => mixed,
            false => step.residual_norm(x, norms.before_ffn, "ffn_norm")?,
        };
        let h = self.ffn.build(step, x, h)?;
        let h = step.branch_norm(h, norms.after_ffn, "post_ffn_norm")?;
        let x = step.join(x, h)?;

        let x = match &self.input {
            Some(input) => input.build(step, layer, x)?,
            None => x,
        };
        step.scaled(x, self.output_scale)
    }
}

impl Mixer {
    /// `h[n_tokens, hidden]` -> the same.
    fn build(&self, step: &mut Step<'_>, layer: usize, h: ValueId) -> Result<ValueId, GraphError> {
        match self {
            Mixer::Attention(attention) => attention.build(step, layer, h),
            Mixer::DeltaNet(net) => net.build(step, layer, h),
            Mixer::ShortConv(conv) => conv.build(step, layer, h),
        }
    }
}
