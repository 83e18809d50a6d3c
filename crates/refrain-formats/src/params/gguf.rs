//! Hyperparameters from GGUF metadata.

use super::rope::{Rope, RopeScaling, RopeStyle, Yarn};
use super::{Activation, Arch, LayerAttention, ModelConfig, ParamsFault};
use super::{checked_layers, default_head_dim, every_nth_full};
use crate::FormatError;
use crate::gguf::{FromValue, Gguf, Metadata, StrArray};

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
        let n_kv_heads = keys.optional("attention.head_count_kv")?.unwrap_or(n_heads);
        let head_dim = head_dim(&keys, hidden, n_heads)?;
        if keys.optional::<u64>("expert_count")?.unwrap_or(0) > 0 {
            return Err(keys.blame(ParamsFault::Unsupported { what: "a mixture of experts" }));
        }
        let sliding_window = keys.optional("attention.sliding_window")?.filter(|&w: &usize| w > 0);
        let gemma = arch == Arch::Gemma3;
        let config = ModelConfig {
            arch,
            name: meta.optional::<&str>("general.name")?.map(str::to_owned),
            n_vocab: n_vocab(gguf, &keys)?,
            n_layers,
            hidden,
            ffn: keys.required("feed_forward_length")?,
            n_heads,
            n_kv_heads,
            head_dim,
            norm_eps: keys.required("attention.layer_norm_rms_epsilon")?,
            // Converters add the one of Gemma's norms to the weights.
            norm_offset: 0.0,
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            rope: rope(gguf, &keys, head_dim)?,
            sliding_window,
            layers: layers(&keys, n_layers, sliding_window)?,
            n_context: keys.required("context_length")?,
            tied_embeddings: !gguf.has_tensor("output.weight"),
            qkv_bias: gguf.has_tensor("blk.0.attn_q.bias"),
            attn_output_bias: gguf.has_tensor("blk.0.attn_output.bias"),
            ffn_bias: gguf.has_tensor("blk.0.ffn_up.bias"),
            qk_norm: matches!(arch, Arch::Qwen3 | Arch::Gemma3),
            attn_scale: attn_scale(&keys, n_layers, hidden, n_heads, head_dim)?,
            attn_softcap: keys.optional("attn_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            final_softcap: keys.optional("final_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            bos: meta.optional("tokenizer.ggml.bos_token_id")?,
            eos: end_tokens(meta)?,
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

fn head_dim(keys: &Keys<'_>, hidden: usize, n_heads: usize) -> Result<usize, FormatError> {
    let key = match keys.optional("attention.key_length")? {
        Some(dim) => dim,
        None => default_head_dim(hidden, n_heads).map_err(|f| keys.blame(f))?,
    };
    let value = keys.optional("attention.value_length")?.unwrap_or(key);
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
    use crate::gguf::{Array, Value};
    if window.is_none() {
        return Ok(vec![LayerAttention::Full; n_layers]);
    }
    let pattern = format!("{}.attention.sliding_window_pattern", keys.arch);
    if let Some(Value::Array(Array::Bool(slides))) = keys.meta.get(&pattern) {
        let layer = |&slides: &bool| if slides { LayerAttention::Sliding } else { LayerAttention::Full };
        return Ok(slides.iter().map(layer).collect());
    }
    let period = match keys.arch {
        Arch::Gemma3 => 6,
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 => 0,
    };
    Ok(every_nth_full(n_layers, keys.meta.optional(&pattern)?.unwrap_or(period)))
}

fn rope(gguf: &Gguf, keys: &Keys<'_>, head_dim: usize) -> Result<Rope, FormatError> {
    let gemma = keys.arch == Arch::Gemma3;
    let local_theta = keys.optional("rope.freq_base_swa")?;
    Ok(Rope {
        theta: keys.optional("rope.freq_base")?.unwrap_or(if gemma { 1e6 } else { 1e4 }),
        local_theta: local_theta.or(gemma.then_some(1e4)),
        scaling: scaling(keys)?,
        has_freq_factors: gguf.has_tensor("rope_freqs.weight"),
        dims: keys.optional("rope.dimension_count")?.unwrap_or(head_dim),
        // Converters permute the query and key rows of llama so that pairs are neighbours.
        style: match keys.arch {
            Arch::Llama => RopeStyle::Norm,
            Arch::Qwen2 | Arch::Qwen3 | Arch::Gemma3 => RopeStyle::Neox,
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
