//! Hyperparameters of models, the same for every file format.

mod fault; // errors
mod embedding; // recommended pooling
mod generation; // recommended sampling
mod gguf; // from GGUF metadata
mod hf; // from config.json
mod rope; // rotary embeddings
mod write; // to GGUF metadata and config.json

pub use embedding::{EmbeddingDefaults, Pooling};
pub use fault::ParamsFault;
pub use generation::GenerationDefaults;
pub use rope::{LongRope, RopePairing, RopeParams, RopeScaling, Yarn};

use std::fmt;

/// A supported architecture.
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
    /// Qwen 3.5 and 3.6 with experts, the text part.
    Qwen35Moe,
    /// LFM2, dense.
    Lfm2,
    /// gpt-oss.
    GptOss,
    /// BERT, MiniLM, BGE: encoders that turn texts into vectors.
    Bert,
}

impl Arch {
    /// Every architecture.
    pub const ALL: [Arch; 19] = [
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
        Arch::Qwen35Moe,
        Arch::Lfm2,
        Arch::GptOss,
        Arch::Bert,
    ];

    /// Other names in GGUF files. The text part of Qwen 3 VL is Qwen 3: a rotation by three equal coordinates is a
    /// rotation by one.
    const ALIASES: [(&str, Arch); 1] = [("qwen3vl", Arch::Qwen3)];

    /// Returns the name in GGUF files.
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
            Arch::Qwen35Moe => "qwen35moe",
            Arch::Lfm2 => "lfm2",
            Arch::GptOss => "gpt-oss",
            Arch::Bert => "bert",
        }
    }

    /// Returns whether attention layers normalise their queries and keys.
    pub const fn has_qk_norm(self) -> bool {
        use Arch as A;
        let others = matches!(self, A::Qwen3 | A::Qwen3Moe | A::Gemma3 | A::Gemma4 | A::Olmo2 | A::Lfm2);
        others || self.is_qwen35()
    }

    /// Returns whether it is Qwen 3.5 or 3.6: most layers are gated DeltaNets.
    pub const fn is_qwen35(self) -> bool {
        matches!(self, Arch::Qwen35 | Arch::Qwen35Moe)
    }

    /// Returns whether it is an encoder: every token sees the whole text, and no next token follows.
    pub const fn is_encoder(self) -> bool {
        matches!(self, Arch::Bert)
    }

    /// Returns whether it belongs to the Gemma family: GeGLU and a scaled embedding.
    pub const fn is_gemma(self) -> bool {
        matches!(self, Arch::Gemma2 | Arch::Gemma3 | Arch::Gemma4)
    }

    /// Returns whether GGUF files store rotated pairs of queries and keys as neighbouring rows, while Hugging Face
    /// folders store them half a head apart.
    pub const fn is_joined_in_gguf(self) -> bool {
        matches!(self, Arch::Llama | Arch::Mistral3 | Arch::SmolLm3 | Arch::Granite)
    }

    /// Returns the pairing of rotated elements in Hugging Face folders.
    pub const fn hf_rope_style(self) -> RopePairing {
        match self {
            Arch::Glm4 | Arch::Cohere2 => RopePairing::Norm,
            _ => RopePairing::Neox,
        }
    }

    /// Returns the pairing of rotated elements in GGUF files.
    pub const fn gguf_rope_style(self) -> RopePairing {
        if self.is_joined_in_gguf() { RopePairing::Norm } else { self.hf_rope_style() }
    }

    /// Returns the default period of full-attention layers in models with a window; 0 if all layers use the window.
    pub(crate) const fn usual_period(self) -> usize {
        match self {
            Arch::Gemma3 | Arch::Gemma4 => 6,
            Arch::Olmo2 | Arch::Cohere2 => 4,
            Arch::Gemma2 | Arch::GptOss => 2,
            _ => 0,
        }
    }

    /// Returns the architecture with this name in GGUF files.
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

/// Activation function of the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// Exact GELU. Only encoders have it.
    GeluErf,
}

/// Kind of normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm.
    Rms,
    /// Layer norm; only encoders have biases.
    Layer,
}

/// Scaling of queries by position, which keeps attention sharp over long texts: `1 + beta * ln(1 + p)`, where `p` is the
/// position divided by the original context, rounded down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// Factor on the logarithm.
    pub beta: f32,
    /// Context of the original training.
    pub n_original_context: usize,
}

/// Attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerAttention {
    /// Full attention: all previous tokens.
    Full,
    /// A sliding window, including the current token.
    Sliding,
    /// None: a recurrent layer.
    Recurrent,
}

/// Kind and sizes of recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentLayers {
    /// Gated DeltaNets (Qwen 3.5).
    DeltaNet(DeltaNetSizes),
    /// Gated short convolutions (LFM2).
    ShortConv {
        /// Width of a channel's filter.
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
    /// Width of a channel's filter.
    pub conv_width: usize,
    /// Order of the value heads in the file.
    pub v_heads: VHeads,
    /// Whether the file stores the logarithm of the decay instead of the negated decay.
    pub decay_is_log: bool,
}

impl DeltaNetSizes {
    /// Returns the number of channels of the convolution: queries, keys and values.
    pub fn conv_dim(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.n_heads * self.value_dim
    }
}

/// Order of the value heads that share key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VHeads {
    /// Value heads of one key head are adjacent, as in Hugging Face folders.
    Grouped,
    /// First value head of every key head, then the second of every one, as in GGUF files.
    Tiled,
}

/// Sizes of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSizes {
    /// Key and value heads; divides the number of query heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of the feed-forward block.
    pub ffn: usize,
}

/// A second embedding with a separate slice for every layer (Gemma 4 E2B and E4B).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerEmbedding {
    /// Rows of the table.
    pub n_vocab: usize,
    /// Elements of one layer's slice. A row holds one slice per layer.
    pub dim: usize,
}

/// A mixture of experts in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts per token.
    pub n_choices: usize,
    /// Elements of an expert's feed-forward block.
    pub ffn: usize,
    /// Whether the weights of a token's experts sum to one.
    pub renormalise: bool,
    /// Elements of the feed-forward block that every token passes besides, weighted by a gate of its own.
    pub shared_ffn: Option<usize>,
}

/// Hyperparameters of a model. They are validated: sizes are positive, heads divide evenly, nothing overflows.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub arch: Arch,
    /// Name of the model in its files, as one printable line.
    pub name: Option<String>,
    /// Size of the vocabulary: rows of the embedding.
    pub n_vocab: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Elements of the feed-forward block.
    pub ffn: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Kind of normalisation.
    pub norm: NormKind,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Offset of the weights of RMS norms: 1 if the file stores them minus one (Gemma in safetensors), otherwise 0.
    pub norm_offset: f32,
    /// Activation function.
    pub activation: Activation,
    /// Rotary position embedding.
    pub rope: RopeParams,
    /// Size of the sliding window; `None` if every layer has full attention.
    pub sliding_window: Option<usize>,
    /// Attention of each layer; `n_layers` entries.
    pub layers: Vec<LayerAttention>,
    /// Context length of the training.
    pub n_context: usize,
    /// Whether the output projection is the embedding.
    pub tied_embeddings: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub attn_output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub ffn_bias: bool,
    /// Whether queries and keys are normalised per head.
    pub qk_norm: bool,
    /// Factor on attention scores, usually one over the square root of the head size.
    pub attn_scale: f32,
    /// Soft cap of attention scores: `cap * tanh(score / cap)`.
    pub attn_softcap: Option<f32>,
    /// Soft cap of the logits.
    pub final_softcap: Option<f32>,
    /// Factor on the embedding.
    pub embedding_scale: f32,
    /// Factor on the output of a branch, before it is added to the residual stream.
    pub residual_scale: f32,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Whether each layer's queries and keys are left unrotated; empty if all layers are rotated.
    pub unrotated: Vec<bool>,
    /// Scaling of queries by position, if any.
    pub query_temperature: Option<QueryTemperature>,
    /// Divisors of the frequencies of [`RopeScaling::Long`].
    pub long_rope: Option<LongRope>,
    /// First token of a text, if the model uses one.
    pub bos: Option<u32>,
    /// Tokens that end a text or a turn.
    pub eos: Vec<u32>,
    /// Sizes of each layer; empty if `n_kv_heads`, `head_dim` and `ffn` apply to all layers.
    pub sizes: Vec<LayerSizes>,
    /// Number of last layers without their own keys and values. Each uses those of the last earlier layer of its kind.
    pub n_shared_kv: usize,
    /// Whether full-attention layers use their keys, before norm and rotation, as values (Gemma 4 31B).
    pub keys_as_values: bool,
    /// Per-layer embedding, if any.
    pub per_layer: Option<PerLayerEmbedding>,
    /// Experts, if any. They replace the feed-forward block or run next to it (Gemma 4).
    pub experts: Option<Experts>,
    /// Recurrent layers, if any.
    pub recurrent: Option<RecurrentLayers>,
    /// Rows of the table of token types; `None` unless it is an encoder. Only the first row is used.
    pub n_token_types: Option<usize>,
    /// Inputs whose encoders are ignored: only the text part of a multimodal model is used.
    pub left_out: Vec<&'static str>,
}

impl ModelConfig {
    /// Returns the attention of a layer.
    pub fn layer(&self, layer_idx: usize) -> LayerAttention {
        self.layers.get(layer_idx).copied().unwrap_or(LayerAttention::Full)
    }

    /// Returns the bytes of a 16-bit KV cache for a context. Recurrent states, which do not grow, are not included.
    pub fn kv_bytes(&self, n_context: usize) -> u64 {
        const KEYS_AND_VALUES: u64 = 2;
        const ELEMENT_BYTES: u64 = 2;
        let owns =
            |&layer: &usize| self.layer(layer) != LayerAttention::Recurrent && self.kv_layer(layer) == layer;
        let elements = |layer| {
            let sizes = self.layer_sizes(layer);
            sizes.n_kv_heads as u64 * sizes.head_dim as u64
        };
        let per_token: u64 = (0..self.n_layers).filter(owns).map(elements).sum();
        KEYS_AND_VALUES * ELEMENT_BYTES * per_token * n_context as u64
    }

    /// Returns the sliding window of a layer, if it has one.
    pub fn window(&self, layer_idx: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.layer(layer_idx) == LayerAttention::Sliding)
    }

    /// Returns the sizes of a layer.
    pub fn layer_sizes(&self, layer_idx: usize) -> LayerSizes {
        let usual = LayerSizes { n_kv_heads: self.n_kv_heads, head_dim: self.head_dim, ffn: self.ffn };
        self.sizes.get(layer_idx).copied().unwrap_or(usual)
    }

    /// Returns the layer whose keys and values a layer uses: itself or an earlier one.
    pub fn kv_layer(&self, layer_idx: usize) -> usize {
        let n_own = self.n_layers.saturating_sub(self.n_shared_kv);
        let alike = |layer: &usize| self.layer(*layer) == self.layer(layer_idx);
        match layer_idx < n_own {
            true => layer_idx,
            false => (0..n_own).rev().find(alike).unwrap_or(layer_idx),
        }
    }

    /// Returns the number of rotated elements of a head in a layer.
    pub fn rope_dims(&self, layer_idx: usize) -> usize {
        match self.layer(layer_idx) {
            LayerAttention::Sliding => self.rope.local_dims.unwrap_or(self.rope.dims),
            LayerAttention::Full | LayerAttention::Recurrent => self.rope.dims,
        }
    }

    /// Returns whether a layer rotates its queries and keys.
    pub fn rotates(&self, layer_idx: usize) -> bool {
        !self.unrotated.get(layer_idx).copied().unwrap_or(false)
    }

    /// Returns the base of the rotary embedding in a layer.
    pub fn rope_theta(&self, layer_idx: usize) -> f32 {
        match (self.layer(layer_idx), self.rope.local_theta) {
            (LayerAttention::Sliding, Some(local)) => local,
            _ => self.rope.theta,
        }
    }

    /// Returns the scaling of the rotary embedding in a layer. Sliding-window layers with their own base are not scaled.
    pub fn rope_scaling(&self, layer_idx: usize) -> RopeScaling {
        match (self.layer(layer_idx), self.rope.local_theta) {
            (LayerAttention::Sliding, Some(_)) => RopeScaling::None,
            _ => self.rope.scaling,
        }
    }

    /// Checks all sizes, before anything is allocated from them.
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
        if let Some(n_token_types) = self.n_token_types {
            check_range("the number of token types", n_token_types, 1 << 16)?;
        }
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

    /// Checks the lists of the rotary embedding.
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

    /// Checks the sizes of layers against each other.
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
            // Encoders rotate nothing.
            let rotates = !self.arch.is_encoder();
            if rotates && (dims == 0 || dims > head_dim || !dims.is_multiple_of(2)) {
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
            if let Some(shared) = experts.shared_ffn {
                check_range("the feed-forward size of the shared expert", shared, 1 << 24)?;
            }
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
    // NaN fails the comparison and is refused.
    if v > above && v <= most { Ok(()) } else { Err(ParamsFault::Number { name, value: v, above, most }) }
}

/// Checks the number of layers before a list of that length is allocated.
fn checked_layers(n_layers: usize) -> Result<usize, ParamsFault> {
    check_range("the number of layers", n_layers, MAX_LAYERS).map(|()| n_layers)
}

/// Every `period`-th layer has full attention, the others a sliding window.
fn every_nth_full(n_layers: usize, period: usize) -> Vec<LayerAttention> {
    let is_full = |layer: usize| period != 0 && (layer + 1).is_multiple_of(period);
    (0..n_layers).map(|l| if is_full(l) { LayerAttention::Full } else { LayerAttention::Sliding }).collect()
}

/// Returns the list unless all layers are rotated.
fn unless_all_rotate(unrotated: Vec<bool>) -> Vec<bool> {
    if unrotated.contains(&true) { unrotated } else { Vec::new() }
}

/// Every `period`-th layer has full attention, the others are recurrent.
fn every_nth_attends(n_layers: usize, period: usize) -> Vec<LayerAttention> {
    let is_full = |layer: usize| period != 0 && (layer + 1).is_multiple_of(period);
    (0..n_layers).map(|l| if is_full(l) { LayerAttention::Full } else { LayerAttention::Recurrent }).collect()
}

/// Returns the sizes of layers unless all are equal.
fn unless_alike(sizes: Vec<LayerSizes>) -> Vec<LayerSizes> {
    if sizes.windows(2).all(|pair| pair[0] == pair[1]) { Vec::new() } else { sizes }
}

/// Returns the head size for files without a key for it.
fn default_head_dim(hidden: usize, n_heads: usize) -> Result<usize, ParamsFault> {
    if n_heads == 0 || !hidden.is_multiple_of(n_heads) {
        return Err(ParamsFault::HeadDim { hidden, n_heads });
    }
    Ok(hidden / n_heads)
}
