//! What models need to know of themselves, in one form for every file format.

mod fault; // what can be wrong
mod generation; // how the authors want it sampled
mod gguf; // from GGUF metadata
mod hf; // from config.json
mod rope; // rotary embeddings
mod write; // to GGUF metadata and config.json

pub use fault::ParamsFault;
pub use generation::GenerationDefaults;
pub use rope::{LongRope, RopePairing, RopeParams, RopeScaling, Yarn};

use std::fmt;

/// An architecture that can be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// Llama 2 and 3, SmolLM2, TinyLlama, Mistral.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Qwen 3 with experts in every layer.
    Qwen3Moe,
    /// Gemma 3, text.
    Gemma3,
    /// Gemma 4, the text part.
    Gemma4,
    /// Gemma 2.
    Gemma2,
    /// Phi 3, 3.5 and 4.
    Phi3,
    /// Ministral 3.
    Mistral3,
    /// SmolLM 3.
    SmolLm3,
    /// OLMo 2 and 3.
    Olmo2,
    /// Granite 3, dense.
    Granite,
    /// GLM 4 of April 2025.
    Glm4,
    /// Command R7B and Command A.
    Cohere2,
    /// Qwen 3.5 and 3.6, the text part of their dense models.
    Qwen35,
    /// LFM2, dense.
    Lfm2,
}

impl Arch {
    /// Every architecture.
    pub const ALL: [Arch; 16] = [
        Arch::Llama,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::Qwen3Moe,
        Arch::Gemma3,
        Arch::Gemma4,
        Arch::Gemma2,
        Arch::Phi3,
        Arch::Mistral3,
        Arch::SmolLm3,
        Arch::Olmo2,
        Arch::Granite,
        Arch::Glm4,
        Arch::Cohere2,
        Arch::Qwen35,
        Arch::Lfm2,
    ];

    /// Other names in GGUF files. The text part of Qwen 3 VL is Qwen 3: rotations by three coordinates are those by one
    /// where all three are the same.
    const ALIASES: [(&str, Arch); 1] = [("qwen3vl", Arch::Qwen3)];

    /// The name, as GGUF files spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Qwen3Moe => "qwen3moe",
            Arch::Gemma3 => "gemma3",
            Arch::Gemma4 => "gemma4",
            Arch::Gemma2 => "gemma2",
            Arch::Phi3 => "phi3",
            Arch::Mistral3 => "mistral3",
            Arch::SmolLm3 => "smollm3",
            Arch::Olmo2 => "olmo2",
            Arch::Granite => "granite",
            Arch::Glm4 => "glm4",
            Arch::Cohere2 => "cohere2",
            Arch::Qwen35 => "qwen35",
            Arch::Lfm2 => "lfm2",
        }
    }

    /// Whether layers that attend norm their queries and keys.
    pub const fn has_qk_norm(self) -> bool {
        use Arch as A;
        matches!(self, A::Qwen3 | A::Qwen3Moe | A::Gemma3 | A::Gemma4 | A::Olmo2 | A::Qwen35 | A::Lfm2)
    }

    /// Whether it is one of the Gemma family: GeGLU, and an embedding that is scaled.
    pub const fn is_gemma(self) -> bool {
        matches!(self, Arch::Gemma2 | Arch::Gemma3 | Arch::Gemma4)
    }

    /// Whether GGUF files store the rows of queries and keys so that elements that are rotated together are neighbours,
    /// while Hugging Face folders store them half a head apart.
    pub const fn is_joined_in_gguf(self) -> bool {
        matches!(self, Arch::Llama | Arch::Mistral3 | Arch::SmolLm3 | Arch::Granite)
    }

    /// Which elements Hugging Face folders rotate together.
    pub const fn hf_rope_style(self) -> RopePairing {
        match self {
            Arch::Glm4 | Arch::Cohere2 => RopePairing::Norm,
            _ => RopePairing::Neox,
        }
    }

    /// Which elements GGUF files rotate together.
    pub const fn gguf_rope_style(self) -> RopePairing {
        if self.is_joined_in_gguf() { RopePairing::Norm } else { self.hf_rope_style() }
    }

    /// Every how many layers one sees all, where there is a window and nothing else is said; 0 where all slide.
    pub(crate) const fn usual_period(self) -> usize {
        match self {
            Arch::Gemma3 | Arch::Gemma4 => 6,
            Arch::Olmo2 | Arch::Cohere2 => 4,
            Arch::Gemma2 => 2,
            _ => 0,
        }
    }

    /// The architecture that GGUF files call so.
    pub fn from_name(name: &str) -> Option<Arch> {
        let alias = Arch::ALIASES.into_iter().find(|(alias, _)| *alias == name).map(|(_, arch)| arch);
        Arch::ALL.into_iter().find(|a| a.name() == name).or(alias)
    }

    pub(crate) fn known() -> String {
        Arch::ALL.map(Arch::name).join(", ")
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The non-linearity of the feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU by the tanh formula.
    GeluTanh,
}

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Divided by their root mean square.
    Rms,
    /// The same after their mean is subtracted: layer norm without biases.
    Layer,
}

/// Queries that grow with their position, so that attention stays sharp over long texts: `1 + beta * ln(1 + p)` for the
/// `p`-th repetition of the original context, from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// Weight of the logarithm.
    pub beta: f32,
    /// Context of the first training.
    pub n_original_context: usize,
}

/// What a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerAttention {
    /// All tokens before.
    Full,
    /// The tokens of a sliding window, the present one included.
    Sliding,
    /// None: the layer is recurrent.
    Recurrent,
}

/// What recurrent layers are, and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentLayers {
    /// Gated DeltaNets (Qwen 3.5).
    DeltaNet(DeltaNetSizes),
    /// Gated short convolutions (LFM2).
    ShortConv {
        /// Elements of a channel's filter.
        width: usize,
    },
}

/// Sizes of gated DeltaNet layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetSizes {
    /// Heads of queries and keys; divides `n_heads`.
    pub n_key_heads: usize,
    /// Heads of values and states.
    pub n_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Elements of a channel's filter.
    pub conv_width: usize,
    /// How the file orders heads of values.
    pub v_heads: VHeads,
    /// Whether the file holds the logarithm of the decay instead of minus the decay.
    pub decay_is_log: bool,
}

impl DeltaNetSizes {
    /// Channels of the convolution: queries, keys and values.
    pub fn conv_dim(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.n_heads * self.value_dim
    }
}

/// The order of the heads of values that share key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VHeads {
    /// Those of one key head are neighbours, as in Hugging Face folders.
    Grouped,
    /// The first of every key head, then the second of every one, as in GGUF files.
    Tiled,
}

/// Sizes of one layer, where layers differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSizes {
    /// Key and value heads; divides the number of query heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of the feed-forward part.
    pub ffn: usize,
}

/// A second embedding, of which every layer gets a slice of its own (Gemma 4 E2B and E4B).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerEmbedding {
    /// Rows of its table.
    pub n_vocab: usize,
    /// Elements of one layer's slice; a row has as many for each layer.
    pub dim: usize,
}

/// A mixture of experts, which every layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a layer.
    pub n_experts: usize,
    /// Experts that a token goes through.
    pub n_choices: usize,
    /// Elements of an expert's feed-forward part.
    pub ffn: usize,
    /// Whether the weights of a token's experts sum to one.
    pub renormalise: bool,
}

/// The hyperparameters of a model. Ranges are checked: sizes are positive, heads divide, nothing overflows.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub arch: Arch,
    /// The name the files give the model, where they do.
    pub name: Option<String>,
    /// Tokens of the vocabulary: rows of the embedding.
    pub n_vocab: usize,
    /// Layers.
    pub n_layers: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Elements of the feed-forward part.
    pub ffn: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// How rows are normed.
    pub norm: NormKind,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Added to the weights of RMS norms: 1 where the file stores them less one (Gemma in safetensors), else 0.
    pub norm_offset: f32,
    /// Non-linearity.
    pub activation: Activation,
    /// Rotary position embedding.
    pub rope: RopeParams,
    /// Tokens a sliding layer sees; `None` when every layer sees all.
    pub sliding_window: Option<usize>,
    /// What each layer attends to; `n_layers` entries.
    pub layers: Vec<LayerAttention>,
    /// Tokens the model was trained for.
    pub n_context: usize,
    /// Whether the output matrix is the embedding.
    pub tied_embeddings: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of the attention has a bias.
    pub attn_output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub ffn_bias: bool,
    /// Whether queries and keys are normed per head.
    pub qk_norm: bool,
    /// Factor on the scores: one over the square root of the head size, mostly.
    pub attn_scale: f32,
    /// `cap * tanh(score / cap)` on the scores.
    pub attn_softcap: Option<f32>,
    /// The same on the logits.
    pub final_softcap: Option<f32>,
    /// Factor on the embedding.
    pub embedding_scale: f32,
    /// Factor on what a branch adds to the residual.
    pub residual_scale: f32,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Layers whose queries and keys are not rotated; empty when all are.
    pub unrotated: Vec<bool>,
    /// Factor on queries by their position, where there is one.
    pub query_temperature: Option<QueryTemperature>,
    /// Divisors of the frequencies of [`RopeScaling::Long`].
    pub long_rope: Option<LongRope>,
    /// First token of a text, where the model wants one.
    pub bos: Option<u32>,
    /// Tokens that end a text or a turn.
    pub eos: Vec<u32>,
    /// The sizes of each layer, where they differ; empty when `n_kv_heads`, `head_dim` and `ffn` are those of all layers.
    pub sizes: Vec<LayerSizes>,
    /// Layers at the end that have no keys and values of their own: they attend to those of the last layer of their kind
    /// before them.
    pub n_shared_kv: usize,
    /// Whether layers that see all take their keys, before norm and rotation, for values (Gemma 4 31B).
    pub keys_as_values: bool,
    /// The second embedding, where there is one.
    pub per_layer: Option<PerLayerEmbedding>,
    /// The experts, where there are some: in place of the feed-forward part, or beside it (Gemma 4).
    pub experts: Option<Experts>,
    /// The sizes of recurrent layers, where there are some.
    pub recurrent: Option<RecurrentLayers>,
    /// Encoders of a multimodal model that are left out: only its text part is used.
    pub left_out: Vec<&'static str>,
}

impl ModelConfig {
    /// What layer `layer_idx` attends to.
    pub fn layer(&self, layer_idx: usize) -> LayerAttention {
        self.layers.get(layer_idx).copied().unwrap_or(LayerAttention::Full)
    }

    /// The window of layer `layer_idx`, if it slides.
    pub fn window(&self, layer_idx: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.layer(layer_idx) == LayerAttention::Sliding)
    }

    /// The sizes of layer `layer_idx`.
    pub fn layer_sizes(&self, layer_idx: usize) -> LayerSizes {
        let usual = LayerSizes { n_kv_heads: self.n_kv_heads, head_dim: self.head_dim, ffn: self.ffn };
        self.sizes.get(layer_idx).copied().unwrap_or(usual)
    }

    /// The layer whose keys and values layer `layer_idx` attends to: itself, or an earlier one.
    pub fn kv_layer(&self, layer_idx: usize) -> usize {
        let n_own = self.n_layers.saturating_sub(self.n_shared_kv);
        let alike = |layer: &usize| self.layer(*layer) == self.layer(layer_idx);
        match layer_idx < n_own {
            true => layer_idx,
            false => (0..n_own).rev().find(alike).unwrap_or(layer_idx),
        }
    }

    /// Elements of a head that layer `layer_idx` rotates.
    pub fn rope_dims(&self, layer_idx: usize) -> usize {
        match self.layer(layer_idx) {
            LayerAttention::Sliding => self.rope.local_dims.unwrap_or(self.rope.dims),
            LayerAttention::Full | LayerAttention::Recurrent => self.rope.dims,
        }
    }

    /// Whether layer `layer_idx` rotates its queries and keys.
    pub fn rotates(&self, layer_idx: usize) -> bool {
        !self.unrotated.get(layer_idx).copied().unwrap_or(false)
    }

    /// The base of the rotary embedding in layer `layer_idx`.
    pub fn rope_theta(&self, layer_idx: usize) -> f32 {
        match (self.layer(layer_idx), self.rope.local_theta) {
            (LayerAttention::Sliding, Some(local)) => local,
            _ => self.rope.theta,
        }
    }

    /// The scaling of the rotary embedding in layer `layer_idx`: none where sliding layers have a base of their own.
    pub fn rope_scaling(&self, layer_idx: usize) -> RopeScaling {
        match (self.layer(layer_idx), self.rope.local_theta) {
            (LayerAttention::Sliding, Some(_)) => RopeScaling::None,
            _ => self.rope.scaling,
        }
    }

    /// Refuses sizes that no model has, before anything is allocated by them.
    pub fn validate(self) -> Result<ModelConfig, ParamsFault> {
        let sizes = [
            ("the vocabulary size", self.n_vocab, 1 << 24),
            ("the number of layers", self.n_layers, MAX_LAYERS),
            ("the hidden size", self.hidden, 1 << 20),
            ("the feed-forward size", self.ffn, 1 << 24),
            ("the number of heads", self.n_heads, 1 << 16),
            ("the number of key-value heads", self.n_kv_heads, 1 << 16),
            ("the head size", self.head_dim, 1 << 16),
            ("the context length", self.n_context, 1 << 31),
            ("the sliding window", self.sliding_window.unwrap_or(1), 1 << 31),
        ];
        for (name, value, high) in sizes {
            check_range(name, value, high)?;
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(ParamsFault::Heads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads });
        }
        check_number("the norm epsilon", self.norm_eps, 0.0, 1.0)?;
        check_number("the attention scale", self.attn_scale, 0.0, 1e6)?;
        check_number("the embedding scale", self.embedding_scale, 0.0, 1e6)?;
        check_number("the residual scale", self.residual_scale, 0.0, 1e6)?;
        check_number("the logit scale", self.logit_scale, 0.0, 1e6)?;
        check_number("the attention softcap", self.attn_softcap.unwrap_or(1.0), 0.0, 1e9)?;
        check_number("the final softcap", self.final_softcap.unwrap_or(1.0), 0.0, 1e9)?;
        self.rope.validate()?;
        self.validate_rotations()?;
        if self.layers.len() != self.n_layers {
            return Err(ParamsFault::LayerTypes { found: self.layers.len(), n_layers: self.n_layers });
        }
        match &self.recurrent {
            None if self.layers.contains(&LayerAttention::Recurrent) => return Err(ParamsFault::NoRecurrent),
            None => {}
            Some(RecurrentLayers::DeltaNet(net)) => net.validate()?,
            Some(RecurrentLayers::ShortConv { width }) => check_filter(*width)?,
        }
        if self.sliding_window.is_none() && self.layers.contains(&LayerAttention::Sliding) {
            return Err(ParamsFault::NoWindow);
        }
        self.validate_layers()?;
        Ok(self)
    }

    /// Refuses lists about rotations of another length than they are about.
    fn validate_rotations(&self) -> Result<(), ParamsFault> {
        if let Some(temperature) = self.query_temperature {
            check_number("the query temperature", temperature.beta, 0.0, 1e6)?;
            check_range("the original context length", temperature.n_original_context, 1 << 31)?;
        }
        if !self.unrotated.is_empty() && self.unrotated.len() != self.n_layers {
            let (found, n_layers) = (self.unrotated.len(), self.n_layers);
            return Err(ParamsFault::Unrotated { found, n_layers });
        }
        match (&self.long_rope, self.rope.scaling) {
            (Some(factors), RopeScaling::Long { .. }) => factors.validate(self.rope.dims),
            (None, RopeScaling::Long { .. }) => Err(ParamsFault::NoRopeFactors),
            (_, _) => Ok(()),
        }
    }

    /// Refuses layers that do not fit together.
    fn validate_layers(&self) -> Result<(), ParamsFault> {
        if !self.sizes.is_empty() && self.sizes.len() != self.n_layers {
            return Err(ParamsFault::LayerSizes { found: self.sizes.len(), n_layers: self.n_layers });
        }
        if self.n_shared_kv >= self.n_layers {
            let (n_shared, n_layers) = (self.n_shared_kv, self.n_layers);
            return Err(ParamsFault::SharedKv { n_shared, n_layers });
        }
        for layer in 0..self.n_layers {
            let LayerSizes { n_kv_heads, head_dim, ffn } = self.layer_sizes(layer);
            check_range("the number of key-value heads of a layer", n_kv_heads, 1 << 16)?;
            check_range("the head size of a layer", head_dim, 1 << 16)?;
            check_range("the feed-forward size of a layer", ffn, 1 << 24)?;
            if !self.n_heads.is_multiple_of(n_kv_heads) {
                return Err(ParamsFault::Heads { n_heads: self.n_heads, n_kv_heads });
            }
            let dims = self.rope_dims(layer);
            if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
                return Err(ParamsFault::RopeDims { dims, head_dim });
            }
            let from = self.kv_layer(layer);
            let own = self.n_layers - self.n_shared_kv;
            let heads = |l: usize| (self.layer_sizes(l).n_kv_heads, self.layer_sizes(l).head_dim);
            if from >= own && layer >= own || heads(from) != heads(layer) {
                return Err(ParamsFault::SharedLayer { layer, n_own: own });
            }
        }
        if let Some(experts) = self.experts {
            check_range("the number of experts", experts.n_experts, 1 << 16)?;
            check_range("the number of experts of a token", experts.n_choices, 1 << 10)?;
            check_range("the feed-forward size of an expert", experts.ffn, 1 << 24)?;
            if experts.n_choices > experts.n_experts {
                let Experts { n_experts, n_choices, .. } = experts;
                return Err(ParamsFault::Choices { n_choices, n_experts });
            }
        }
        if let Some(per_layer) = self.per_layer {
            check_range("the vocabulary size of the per-layer embedding", per_layer.n_vocab, 1 << 24)?;
            check_range("the size of the per-layer embedding", per_layer.dim, 1 << 16)?;
        }
        Ok(())
    }
}

impl DeltaNetSizes {
    fn validate(&self) -> Result<(), ParamsFault> {
        check_range("the number of key heads of recurrent layers", self.n_key_heads, 1 << 12)?;
        check_range("the number of heads of recurrent layers", self.n_heads, 1 << 12)?;
        check_range("the key size of recurrent layers", self.key_dim, 256)?;
        check_range("the value size of recurrent layers", self.value_dim, 1 << 12)?;
        check_filter(self.conv_width)?;
        match self.n_heads.is_multiple_of(self.n_key_heads) {
            true => Ok(()),
            false => Err(ParamsFault::KeyHeads { n_heads: self.n_heads, n_key_heads: self.n_key_heads }),
        }
    }
}

fn check_filter(value: usize) -> Result<(), ParamsFault> {
    let name = "the width of the short convolution";
    if (2..=8).contains(&value) { Ok(()) } else { Err(ParamsFault::Range { name, value, low: 2, high: 8 }) }
}

const MAX_LAYERS: usize = 4096;

fn check_range(name: &'static str, value: usize, high: usize) -> Result<(), ParamsFault> {
    if (1..=high).contains(&value) { Ok(()) } else { Err(ParamsFault::Range { name, value, low: 1, high }) }
}

fn check_number(name: &'static str, value: f32, above: f64, most: f64) -> Result<(), ParamsFault> {
    let v = f64::from(value);
    // A comparison with NaN is false, so that it is refused here too.
    if v > above && v <= most { Ok(()) } else { Err(ParamsFault::Number { name, value: v, above, most }) }
}

/// The number of layers, checked before a list of that length is made.
fn checked_layers(n_layers: usize) -> Result<usize, ParamsFault> {
    check_range("the number of layers", n_layers, MAX_LAYERS).map(|()| n_layers)
}

/// Every `period`-th layer sees all, the others slide.
fn every_nth_full(n_layers: usize, period: usize) -> Vec<LayerAttention> {
    let is_full = |layer: usize| period != 0 && (layer + 1).is_multiple_of(period);
    (0..n_layers).map(|l| if is_full(l) { LayerAttention::Full } else { LayerAttention::Sliding }).collect()
}

/// Which layers are not rotated, or nothing where all are rotated.
fn unless_all_rotate(unrotated: Vec<bool>) -> Vec<bool> {
    if unrotated.contains(&true) { unrotated } else { Vec::new() }
}

/// Every `period`-th layer sees all, the others are recurrent.
fn every_nth_attends(n_layers: usize, period: usize) -> Vec<LayerAttention> {
    let is_full = |layer: usize| period != 0 && (layer + 1).is_multiple_of(period);
    (0..n_layers).map(|l| if is_full(l) { LayerAttention::Full } else { LayerAttention::Recurrent }).collect()
}

/// The sizes of layers, or nothing where all are alike.
fn unless_alike(sizes: Vec<LayerSizes>) -> Vec<LayerSizes> {
    if sizes.windows(2).all(|pair| pair[0] == pair[1]) { Vec::new() } else { sizes }
}

/// The head size where no key gives it.
fn default_head_dim(hidden: usize, n_heads: usize) -> Result<usize, ParamsFault> {
    if n_heads == 0 || !hidden.is_multiple_of(n_heads) {
        return Err(ParamsFault::HeadDim { hidden, n_heads });
    }
    Ok(hidden / n_heads)
}
