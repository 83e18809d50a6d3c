//! Hyperparameters from GGUF metadata.

use super::rope::{Rope, RopeScaling, RopeStyle, Yarn};
use super::{
    Activation, Arch, Experts, LayerAttention, LayerSizes, ModelConfig, ParamsFault, PerLayerEmbedding,
};
use super::{checked_layers, default_head_dim, every_nth_full, unless_alike};
use crate::FormatError;
use crate::gguf::{FromValue, Gguf, Metadata, StrArray, Value};

/// Keys of one architecture: `{arch}.{key}`.
struct Keys<'a> {
    meta: &'a Metadata,
    arch: Arch,
}

impl<'a> Keys<'a> {
    fn required<T: FromValue<'a>>(&self, key: &str) -> Result<T, FormatError> {
        self.meta.required(&format!("{}.{key}", self.arch))
    }

    fn optional<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, FormatError> {
        self.meta.optional(&format!("{}.{key}", self.arch))
    }

    /// A number for each layer: the key holds one for all of them, or a list.
    fn per_layer(&self, key: &str, n_layers: usize) -> Result<Option<Vec<usize>>, FormatError> {
        let full = format!("{}.{key}", self.arch);
        let Some(Value::Array(array)) = self.meta.get(&full) else {
            return Ok(self.optional(key)?.map(|one: usize| vec![one; n_layers]));
        };
        if array.len() != n_layers {
            return Err(self.blame(ParamsFault::LayerSizes { found: array.len(), n_layers }));
        }
        let size = |i| match array.get(i) {
            Some(value) => usize::from_value(&value).map_err(|fault| self.meta.fault(&full, fault)),
            None => Ok(0), // The length was compared above.
        };
        (0..n_layers).map(size).collect::<Result<_, _>>().map(Some)
    }

    fn blame(&self, fault: ParamsFault) -> FormatError {
        FormatError::params(self.meta.file(), fault)
    }
}

impl ModelConfig {
    /// Reads the metadata of a GGUF model, and from its tensors what the metadata leave out.
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, FormatError> {
        let meta = gguf.metadata();
        let name = meta.str("general.architecture")?;
        let unknown = || FormatError::params(meta.file(), ParamsFault::UnknownArch { found: name.into() });
        let arch = Arch::from_name(name).ok_or_else(unknown)?;
        let keys = Keys { meta, arch };
        let n_layers = checked_layers(keys.required("block_count")?).map_err(|f| keys.blame(f))?;
        let hidden = keys.required("embedding_length")?;
        let n_heads = keys.required("attention.head_count")?;
        let sliding_window = keys.optional("attention.sliding_window")?.filter(|&w: &usize| w > 0);
        let layers = layers(&keys, n_layers, sliding_window)?;
        if layers.len() != n_layers {
            return Err(keys.blame(ParamsFault::LayerTypes { found: layers.len(), n_layers }));
        }
        let sizes = sizes(&keys, &layers, hidden, n_heads)?;
        let LayerSizes { n_kv_heads, head_dim, ffn } = sizes[0];
        let gemma = matches!(arch, Arch::Gemma3 | Arch::Gemma4);
        let config = ModelConfig {
            arch,
            name: meta.optional::<&str>("general.name")?.map(str::to_owned),
            n_vocab: n_vocab(gguf, &keys)?,
            n_layers,
            hidden,
            ffn,
            n_heads,
            n_kv_heads,
            head_dim,
            norm_eps: keys.required("attention.layer_norm_rms_epsilon")?,
            // Converters add the one of Gemma's norms to the weights.
            norm_offset: 0.0,
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            rope: rope(gguf, &keys, &layers, &sizes)?,
            sliding_window,
            keys_as_values: keys_as_values(gguf, arch, &layers),
            layers,
            n_context: keys.required("context_length")?,
            tied_embeddings: !gguf.has_tensor("output.weight"),
            qkv_bias: gguf.has_tensor("blk.0.attn_q.bias"),
            attn_output_bias: gguf.has_tensor("blk.0.attn_output.bias"),
            ffn_bias: gguf.has_tensor("blk.0.ffn_up.bias"),
            qk_norm: gemma || matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe),
            attn_scale: attn_scale(&keys, n_layers, hidden, n_heads, head_dim)?,
            attn_softcap: keys.optional("attn_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            final_softcap: keys.optional("final_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            bos: meta.optional("tokenizer.ggml.bos_token_id")?,
            eos: end_tokens(meta)?,
            sizes: unless_alike(sizes),
            n_shared_kv: keys
                .optional("attention.shared_kv_layers")?
                .filter(|_| arch == Arch::Gemma4)
                .unwrap_or(0),
            per_layer: per_layer(gguf, &keys)?,
            experts: experts(&keys)?,
            left_out: Vec::new(),
        };
        config.validate().map_err(|f| keys.blame(f))
    }
}

/// End of text, of turn and of message, each once.
pub(super) fn end_tokens(meta: &Metadata) -> Result<Vec<u32>, FormatError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(meta.optional::<u32>(key)?.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}

/// The embedding has the last word: vocabularies are padded.
fn n_vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<usize, FormatError> {
    if let Some(embedding) = gguf.tensor_info("token_embd.weight").filter(|t| t.shape().rank() == 2) {
        return Ok(embedding.shape().dims()[0]);
    }
    if let Some(n) = keys.optional("vocab_size")? {
        return Ok(n);
    }
    let tokens = keys.meta.optional::<&StrArray>("tokenizer.ggml.tokens")?;
    tokens.map(StrArray::len).ok_or_else(|| keys.blame(ParamsFault::NoVocab))
}

/// The sizes of every layer, of which there is at least one.
fn sizes(
    keys: &Keys<'_>,
    layers: &[LayerAttention],
    hidden: usize,
    n_heads: usize,
) -> Result<Vec<LayerSizes>, FormatError> {
    let n_layers = layers.len();
    let head_dim = head_dim(keys, "", default_head_dim(hidden, n_heads))?;
    if keys.arch != Arch::Gemma4 {
        let n_kv_heads = keys.optional("attention.head_count_kv")?.unwrap_or(n_heads);
        let ffn = keys.required("feed_forward_length")?;
        return Ok(vec![LayerSizes { n_kv_heads, head_dim, ffn }; n_layers.max(1)]);
    }
    let local_dim = self::head_dim(keys, "_swa", Ok(head_dim))?;
    let n_kv_heads =
        keys.per_layer("attention.head_count_kv", n_layers)?.unwrap_or_else(|| vec![n_heads; n_layers]);
    let ffn = match keys.per_layer("feed_forward_length", n_layers)? {
        Some(ffn) => ffn,
        None => vec![keys.required("feed_forward_length")?],
    };
    let head_dim = |layer: &LayerAttention| match layer {
        LayerAttention::Full => head_dim,
        LayerAttention::Sliding => local_dim,
    };
    let all = layers.iter().map(head_dim).zip(n_kv_heads).zip(ffn);
    Ok(all.map(|((head_dim, n_kv_heads), ffn)| LayerSizes { n_kv_heads, head_dim, ffn }).collect())
}

/// Layers that see all and have no matrix for values take their keys.
fn keys_as_values(gguf: &Gguf, arch: Arch, layers: &[LayerAttention]) -> bool {
    let full = layers.iter().position(|layer| *layer == LayerAttention::Full);
    let full = full.filter(|_| arch == Arch::Gemma4);
    full.is_some_and(|layer| !gguf.has_tensor(&format!("blk.{layer}.attn_v.weight")))
}

/// Experts, in the architectures that have them. Weights of a token's experts sum to one in all of these, unless a key
/// says otherwise.
fn experts(keys: &Keys<'_>) -> Result<Option<Experts>, FormatError> {
    let n_experts: usize = keys.optional("expert_count")?.unwrap_or(0);
    match keys.arch {
        Arch::Qwen3Moe if n_experts == 0 => {
            let found = "the number of experts is zero or not given";
            return Err(keys.blame(ParamsFault::DenseLayers { arch: keys.arch, found }));
        }
        Arch::Qwen3Moe | Arch::Gemma4 if n_experts > 0 => {}
        Arch::Gemma4 => return Ok(None),
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe | Arch::Gemma3 => {
            let what = "a mixture of experts";
            return match n_experts {
                0 => Ok(None),
                _ => Err(keys.blame(ParamsFault::Unsupported { what })),
            };
        }
    }
    Ok(Some(Experts {
        n_experts,
        n_choices: keys.required("expert_used_count")?,
        ffn: keys.required("expert_feed_forward_length")?,
        renormalise: keys.optional("expert_weights_norm")?.unwrap_or(true),
    }))
}

fn per_layer(gguf: &Gguf, keys: &Keys<'_>) -> Result<Option<PerLayerEmbedding>, FormatError> {
    let dim = keys.optional("embedding_length_per_layer_input")?;
    let Some(dim) = dim.filter(|&dim: &usize| dim > 0 && keys.arch == Arch::Gemma4) else { return Ok(None) };
    let table = gguf.tensor_info("per_layer_token_embd.weight").filter(|t| t.shape().rank() == 2);
    let n_vocab = table.map_or_else(|| n_vocab(gguf, keys), |t| Ok(t.shape().dims()[0]))?;
    Ok(Some(PerLayerEmbedding { n_vocab, dim }))
}

/// The head size under a pair of keys; `kind` is the end of their names.
fn head_dim(keys: &Keys<'_>, kind: &str, default: Result<usize, ParamsFault>) -> Result<usize, FormatError> {
    let key = match keys.optional(&format!("attention.key_length{kind}"))? {
        Some(dim) => dim,
        None => default.map_err(|f| keys.blame(f))?,
    };
    let value = keys.optional(&format!("attention.value_length{kind}"))?.unwrap_or(key);
    if key != value {
        return Err(keys.blame(ParamsFault::ValueDim { key, value }));
    }
    Ok(key)
}

/// Gemma 3 27B, known by its 62 layers, scales by its hidden size per head instead of its head size. No key says so
/// in files of the reference converter, so its loader decides by the layers as well.
fn attn_scale(
    keys: &Keys<'_>,
    n_layers: usize,
    hidden: usize,
    n_heads: usize,
    head_dim: usize,
) -> Result<f32, FormatError> {
    if let Some(scale) = keys.optional("attention.scale")?.filter(|&s: &f32| s != 0.0) {
        return Ok(scale);
    }
    if keys.arch == Arch::Gemma4 {
        return Ok(1.0);
    }
    let per_head = if keys.arch == Arch::Gemma3 && n_layers == 62 {
        hidden as f32 / n_heads as f32
    } else {
        head_dim as f32
    };
    Ok(per_head.sqrt().recip())
}

/// Gemma 3 sees all in every sixth layer; other architectures slide in all layers when they have a window.
fn layers(
    keys: &Keys<'_>,
    n_layers: usize,
    window: Option<usize>,
) -> Result<Vec<LayerAttention>, FormatError> {
    use crate::gguf::Array;
    if window.is_none() {
        return Ok(vec![LayerAttention::Full; n_layers]);
    }
    let pattern = format!("{}.attention.sliding_window_pattern", keys.arch);
    if let Some(Value::Array(Array::Bool(slides))) = keys.meta.get(&pattern) {
        let layer = |&slides: &bool| if slides { LayerAttention::Sliding } else { LayerAttention::Full };
        return Ok(slides.iter().map(layer).collect());
    }
    let period = match keys.arch {
        Arch::Gemma3 | Arch::Gemma4 => 6,
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe => 0,
    };
    Ok(every_nth_full(n_layers, keys.meta.optional(&pattern)?.unwrap_or(period)))
}

fn rope(
    gguf: &Gguf,
    keys: &Keys<'_>,
    layers: &[LayerAttention],
    sizes: &[LayerSizes],
) -> Result<Rope, FormatError> {
    let head_dim = |kind| layers.iter().position(|layer| *layer == kind).map(|layer| sizes[layer].head_dim);
    let [full, local] = [LayerAttention::Full, LayerAttention::Sliding].map(head_dim);
    let local_dims = match keys.arch {
        Arch::Gemma4 => keys.optional("rope.dimension_count_swa")?.or(local),
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe | Arch::Gemma3 => None,
    };
    let gemma = matches!(keys.arch, Arch::Gemma3 | Arch::Gemma4);
    let local_theta = keys.optional("rope.freq_base_swa")?;
    Ok(Rope {
        theta: keys.optional("rope.freq_base")?.unwrap_or(if gemma { 1e6 } else { 1e4 }),
        local_theta: local_theta.or(gemma.then_some(1e4)),
        scaling: scaling(keys)?,
        has_freq_factors: gguf.has_tensor("rope_freqs.weight"),
        dims: keys.optional("rope.dimension_count")?.or(full).unwrap_or(sizes[0].head_dim),
        local_dims,
        // Converters permute the query and key rows of llama so that pairs are neighbours.
        style: match keys.arch {
            Arch::Llama => RopeStyle::Norm,
            Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe | Arch::Gemma3 | Arch::Gemma4 => RopeStyle::Neox,
        },
    })
}

fn scaling(keys: &Keys<'_>) -> Result<RopeScaling, FormatError> {
    let factor = match keys.optional("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.optional("rope.scale_linear")?, // the key of old converters
    };
    let factor = factor.filter(|&f: &f32| f != 0.0 && f != 1.0);
    let kind = keys.optional("rope.scaling.type")?.unwrap_or("linear");
    match (kind, factor) {
        ("none", _) | ("linear" | "yarn", None) => Ok(RopeScaling::None),
        ("linear", Some(factor)) => Ok(RopeScaling::Linear { factor }),
        ("yarn", Some(factor)) => {
            let n_original_context = match keys.optional("rope.scaling.original_context_length")? {
                Some(n) => n,
                None => keys.required("context_length")?,
            };
            let own = keys
                .optional("rope.scaling.yarn_attn_factor")?
                .or(keys.optional("rope.scaling.attn_factor")?);
            Ok(RopeScaling::Yarn(Yarn {
                factor,
                n_original_context,
                beta_fast: keys.optional("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.optional("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: own.unwrap_or(1.0) * Yarn::recommended_attention_factor(factor),
                truncate: true,
            }))
        }
        (other, _) => Err(keys.blame(ParamsFault::RopeScaling { found: other.into() })),
    }
}
