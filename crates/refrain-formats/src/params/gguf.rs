//! Hyperparameters from GGUF metadata.

use super::rope::{LongRope, RopeParams, RopeScaling, Yarn};
use super::{Activation, Arch, Experts, LayerAttention, LayerSizes, ModelConfig, NormKind, ParamsFault};
use super::{DeltaNetSizes, PerLayerEmbedding, QueryTemperature, RecurrentLayers, VHeads};
use super::{checked_layers, default_head_dim, every_nth_attends, every_nth_full};
use super::{unless_alike, unless_all_rotate};
use crate::FormatError;
use crate::gguf::{FromValue, Gguf, Metadata, MetadataValue, StrArray};

/// Keys of one architecture: `{prefix}.{key}`.
struct Keys<'a> {
    meta: &'a Metadata,
    arch: Arch,
    /// The architecture's name in the file.
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    fn required<T: FromValue<'a>>(&self, key: &str) -> Result<T, FormatError> {
        self.meta.required(&format!("{}.{key}", self.prefix))
    }

    fn optional<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, FormatError> {
        self.meta.optional(&format!("{}.{key}", self.prefix))
    }

    /// Reads one number per layer: the key holds one for all layers or a list.
    fn per_layer(&self, key: &str, n_layers: usize) -> Result<Option<Vec<usize>>, FormatError> {
        let full = format!("{}.{key}", self.prefix);
        let Some(MetadataValue::Array(array)) = self.meta.get(&full) else {
            return Ok(self.optional(key)?.map(|one: usize| vec![one; n_layers]));
        };
        if array.len() != n_layers {
            return Err(self.blame(ParamsFault::LayerSizes { found: array.len(), n_layers }));
        }
        let size = |i| match array.get(i) {
            Some(value) => usize::from_value(&value).map_err(|fault| self.meta.fault(&full, fault)),
            None => Ok(0), // unreachable: the length was checked above
        };
        (0..n_layers).map(size).collect::<Result<_, _>>().map(Some)
    }

    /// Reads a factor that only some architectures have. 0 means none.
    fn scale(&self, key: &str, of: &[Arch]) -> Result<f32, FormatError> {
        let scale = if of.contains(&self.arch) { self.optional(key)? } else { None };
        Ok(scale.filter(|&scale: &f32| scale != 0.0).unwrap_or(1.0))
    }

    fn blame(&self, fault: ParamsFault) -> FormatError {
        FormatError::params(self.meta.file(), fault)
    }
}

impl ModelConfig {
    /// Reads the metadata of a GGUF model. Missing keys are derived from its tensors.
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, FormatError> {
        let meta = gguf.metadata();
        let name = meta.str("general.architecture")?;
        let unknown = || FormatError::params(meta.file(), ParamsFault::UnknownArch { found: name.into() });
        let arch = Arch::from_name(name).ok_or_else(unknown)?;
        let keys = Keys { meta, arch, prefix: name };
        let n_blocks: usize = keys.required("block_count")?;
        // Layers for multi-token prediction follow the others and are ignored.
        let n_more = keys.optional("nextn_predict_layers")?.filter(|_| arch.is_qwen35()).unwrap_or(0);
        let n_layers = checked_layers(n_blocks.saturating_sub(n_more)).map_err(|f| keys.blame(f))?;
        let hidden = keys.required("embedding_length")?;
        let n_heads = keys.required("attention.head_count")?;
        let sliding_window = keys.optional("attention.sliding_window")?.filter(|&w: &usize| w > 0);
        let layers = layers(&keys, n_layers, sliding_window)?;
        if layers.len() != n_layers {
            return Err(keys.blame(ParamsFault::LayerTypes { found: layers.len(), n_layers }));
        }
        let sizes = sizes(&keys, &layers, hidden, n_heads)?;
        let LayerSizes { n_kv_heads, head_dim, ffn } = sizes[0];
        let norm = if matches!(arch, Arch::Cohere2 | Arch::Bert) { NormKind::Layer } else { NormKind::Rms };
        let rope = rope(gguf, &keys, &layers, &sizes)?;
        let logit_scale = keys.scale("logit_scale", &[Arch::Granite, Arch::Cohere2])?;
        let config = ModelConfig {
            arch,
            name: meta.optional("general.name")?.map(crate::display_name).filter(|name| !name.is_empty()),
            n_vocab: n_vocab(gguf, &keys)?,
            n_layers,
            hidden,
            ffn,
            n_heads,
            n_kv_heads,
            head_dim,
            norm,
            norm_eps: keys.required(match norm {
                NormKind::Rms => "attention.layer_norm_rms_epsilon",
                NormKind::Layer => "attention.layer_norm_epsilon",
            })?,
            // Converters add Gemma's offset of 1 to the weights.
            norm_offset: 0.0,
            activation: match arch {
                Arch::Bert => Activation::GeluErf,
                _ if arch.is_gemma() => Activation::GeluTanh,
                _ => Activation::Silu,
            },
            query_temperature: query_temperature(&keys, &rope)?,
            long_rope: long_rope(gguf, &rope)?,
            rope,
            sliding_window,
            keys_as_values: keys_as_values(gguf, arch, &layers),
            unrotated: unrotated(arch, &layers),
            layers,
            n_context: keys.required("context_length")?,
            tied_embeddings: !gguf.has_tensor("output.weight"),
            qkv_bias: gguf.has_tensor("blk.0.attn_q.bias"),
            attn_output_bias: gguf.has_tensor("blk.0.attn_output.bias"),
            ffn_bias: gguf.has_tensor("blk.0.ffn_up.bias"),
            qk_norm: arch.has_qk_norm(),
            attn_scale: attn_scale(&keys, n_layers, hidden, n_heads, head_dim)?,
            attn_softcap: keys.optional("attn_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            final_softcap: keys.optional("final_logit_softcapping")?.filter(|&cap: &f32| cap != 0.0),
            embedding_scale: match arch.is_gemma() {
                true => (hidden as f32).sqrt(),
                false => keys.scale("embedding_scale", &[Arch::Granite])?,
            },
            residual_scale: keys.scale("residual_scale", &[Arch::Granite])?,
            // Granite stores a divisor.
            logit_scale: if arch == Arch::Granite { logit_scale.recip() } else { logit_scale },
            bos: meta.optional("tokenizer.ggml.bos_token_id")?,
            eos: end_tokens(meta)?,
            sizes: unless_alike(sizes),
            n_shared_kv: keys
                .optional("attention.shared_kv_layers")?
                .filter(|_| arch == Arch::Gemma4)
                .unwrap_or(0),
            per_layer: per_layer(gguf, &keys)?,
            experts: experts(&keys)?,
            recurrent: recurrent(&keys)?,
            n_token_types: match gguf.tensor_info("token_types.weight").filter(|_| arch.is_encoder()) {
                Some(table) => table.shape().dims().first().copied(),
                None => arch.is_encoder().then_some(2),
            },
            // The encoders are in a separate file.
            left_out: if name == "qwen3vl" { vec!["images"] } else { Vec::new() },
        };
        config.validate().map_err(|f| keys.blame(f))
    }
}

/// Returns the tokens for end of text, turn and message, without duplicates.
pub(super) fn end_tokens(meta: &Metadata) -> Result<Vec<u32>, FormatError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(meta.optional::<u32>(key)?.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}

/// Returns the number of rows of the embedding, which may be padded, else the vocabulary size.
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

/// Returns the sizes of every layer, at least one entry.
fn sizes(
    keys: &Keys<'_>,
    layers: &[LayerAttention],
    hidden: usize,
    n_heads: usize,
) -> Result<Vec<LayerSizes>, FormatError> {
    let n_layers = layers.len();
    let head_dim = head_dim(keys, "", default_head_dim(hidden, n_heads))?;
    if keys.arch != Arch::Gemma4 {
        let n_kv_heads = match keys.arch {
            // A list with zeros for layers without attention.
            Arch::Lfm2 => {
                let heads = keys.per_layer("attention.head_count_kv", n_layers)?;
                heads.and_then(|heads| heads.into_iter().max()).filter(|&n| n > 0).unwrap_or(n_heads)
            }
            _ => keys.optional("attention.head_count_kv")?.unwrap_or(n_heads),
        };
        let ffn = match keys.arch {
            // Converters write it only if config.json has it, and no layer uses it.
            Arch::Qwen35Moe => keys.required("expert_feed_forward_length")?,
            _ => keys.required("feed_forward_length")?,
        };
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
        LayerAttention::Full | LayerAttention::Recurrent => head_dim,
        LayerAttention::Sliding => local_dim,
    };
    let all = layers.iter().map(head_dim).zip(n_kv_heads).zip(ffn);
    Ok(all.map(|((head_dim, n_kv_heads), ffn)| LayerSizes { n_kv_heads, head_dim, ffn }).collect())
}

/// Returns whether full-attention layers use their keys as values: they have no value matrix.
fn keys_as_values(gguf: &Gguf, arch: Arch, layers: &[LayerAttention]) -> bool {
    let full = layers.iter().position(|layer| *layer == LayerAttention::Full);
    let full = full.filter(|_| arch == Arch::Gemma4);
    full.is_some_and(|layer| !gguf.has_tensor(&format!("blk.{layer}.attn_v.weight")))
}

/// Reads the experts of a mixture. The weights of a token's experts sum to one unless a key says otherwise.
fn experts(keys: &Keys<'_>) -> Result<Option<Experts>, FormatError> {
    let n_experts: usize = keys.optional("expert_count")?.unwrap_or(0);
    match keys.arch {
        Arch::Qwen3Moe | Arch::Qwen35Moe | Arch::GptOss if n_experts == 0 => {
            let found = "the number of experts is zero or missing";
            return Err(keys.blame(ParamsFault::DenseLayers { arch: keys.arch, found }));
        }
        Arch::Qwen3Moe | Arch::Qwen35Moe | Arch::GptOss | Arch::Gemma4 if n_experts > 0 => {}
        Arch::Gemma4 => return Ok(None),
        _ => {
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
        shared_ffn: match keys.arch {
            Arch::Qwen35Moe => Some(keys.required("expert_shared_feed_forward_length")?),
            _ => None,
        },
    }))
}

fn per_layer(gguf: &Gguf, keys: &Keys<'_>) -> Result<Option<PerLayerEmbedding>, FormatError> {
    let dim = keys.optional("embedding_length_per_layer_input")?;
    let Some(dim) = dim.filter(|&dim: &usize| dim > 0 && keys.arch == Arch::Gemma4) else { return Ok(None) };
    let table = gguf.tensor_info("per_layer_token_embd.weight").filter(|t| t.shape().rank() == 2);
    let n_vocab = table.map_or_else(|| n_vocab(gguf, keys), |t| Ok(t.shape().dims()[0]))?;
    Ok(Some(PerLayerEmbedding { n_vocab, dim }))
}

/// Reads the head size from a pair of keys; `kind` is the suffix of their names.
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

/// Returns the factor on attention scores. Gemma 2 and 3 27B, recognised by their 46 and 62 layers, scale by the hidden
/// size per head instead of the head size. The reference converter writes no key for it; its loader goes by the number
/// of layers as well.
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
    let per_head = match (keys.arch, n_layers) {
        (Arch::Gemma2, 46) | (Arch::Gemma3, 62) => hidden as f32 / n_heads as f32,
        _ => head_dim as f32,
    };
    Ok(per_head.sqrt().recip())
}

/// Returns the layers without rotary embedding, which no key lists: every fourth layer of SmolLM 3 and the
/// full-attention layers of Command R.
fn unrotated(arch: Arch, layers: &[LayerAttention]) -> Vec<bool> {
    let unrotated = |(idx, layer): (usize, &LayerAttention)| match arch {
        Arch::SmolLm3 => (idx + 1).is_multiple_of(4),
        Arch::Cohere2 => *layer == LayerAttention::Full,
        _ => false,
    };
    unless_all_rotate(layers.iter().enumerate().map(unrotated).collect())
}

fn query_temperature(keys: &Keys<'_>, rope: &RopeParams) -> Result<Option<QueryTemperature>, FormatError> {
    let beta = keys.optional("attention.temperature_scale")?;
    let Some(beta) = beta.filter(|&beta: &f32| beta != 0.0 && keys.arch == Arch::Mistral3) else {
        return Ok(None);
    };
    let n_original_context = match rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.n_original_context,
        _ => keys.required("rope.scaling.original_context_length")?,
    };
    Ok(Some(QueryTemperature { beta, n_original_context }))
}

const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";

fn long_rope(gguf: &Gguf, rope: &RopeParams) -> Result<Option<LongRope>, FormatError> {
    let RopeScaling::Long { .. } = rope.scaling else { return Ok(None) };
    let list = |name| {
        let wrap = |source| FormatError::params(gguf.path(), ParamsFault::RopeTensor { name, source });
        gguf.tensor(name)?.to_f32().map_err(wrap)
    };
    Ok(Some(LongRope { short: list(SHORT_FACTORS)?, long: list(LONG_FACTORS)? }))
}

/// Returns the attention of each layer: by the file's pattern, or by the architecture's usual one.
fn layers(
    keys: &Keys<'_>,
    n_layers: usize,
    window: Option<usize>,
) -> Result<Vec<LayerAttention>, FormatError> {
    use crate::gguf::Array;
    if keys.arch.is_qwen35() {
        return recurrent_layers(keys, n_layers);
    }
    if keys.arch == Arch::Lfm2 {
        return lfm2_layers(keys, n_layers);
    }
    if window.is_none() {
        return Ok(vec![LayerAttention::Full; n_layers]);
    }
    let pattern = format!("{}.attention.sliding_window_pattern", keys.prefix);
    if let Some(MetadataValue::Array(Array::Bool(slides))) = keys.meta.get(&pattern) {
        let layer = |&slides: &bool| if slides { LayerAttention::Sliding } else { LayerAttention::Full };
        return Ok(slides.iter().map(layer).collect());
    }
    let period = keys.arch.usual_period();
    Ok(every_nth_full(n_layers, keys.meta.optional(&pattern)?.unwrap_or(period)))
}

/// Returns which layers are recurrent: by a flag for each, or all except every n-th.
fn recurrent_layers(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<LayerAttention>, FormatError> {
    use crate::gguf::Array;
    let list = format!("{}.attention.recurrent_layers", keys.arch);
    if let Some(MetadataValue::Array(Array::Bool(recurrent))) = keys.meta.get(&list) {
        let kind = |&is: &bool| if is { LayerAttention::Recurrent } else { LayerAttention::Full };
        return Ok(recurrent.iter().take(n_layers).map(kind).collect());
    }
    Ok(every_nth_attends(n_layers, keys.optional("full_attention_interval")?.unwrap_or(4)))
}

/// Layers without key heads are convolutions.
fn lfm2_layers(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<LayerAttention>, FormatError> {
    let heads = keys.per_layer("attention.head_count_kv", n_layers)?.unwrap_or_else(|| vec![1; n_layers]);
    let kind = |&n: &usize| if n == 0 { LayerAttention::Recurrent } else { LayerAttention::Full };
    Ok(heads.iter().map(kind).collect())
}

fn recurrent(keys: &Keys<'_>) -> Result<Option<RecurrentLayers>, FormatError> {
    Ok(match keys.arch {
        Arch::Qwen35 | Arch::Qwen35Moe => Some(RecurrentLayers::DeltaNet(delta_net(keys)?)),
        Arch::Lfm2 => Some(RecurrentLayers::ShortConv { width: keys.required("shortconv.l_cache")? }),
        _ => None,
    })
}

/// Reads the sizes of recurrent layers. Converters write value heads tiled and the decay in its final form.
fn delta_net(keys: &Keys<'_>) -> Result<DeltaNetSizes, FormatError> {
    let n_heads: usize = keys.required("ssm.time_step_rank")?;
    let inner: usize = keys.required("ssm.inner_size")?;
    if n_heads == 0 || !inner.is_multiple_of(n_heads) {
        return Err(keys.blame(ParamsFault::HeadDim { hidden: inner, n_heads }));
    }
    Ok(DeltaNetSizes {
        n_key_heads: keys.required("ssm.group_count")?,
        n_heads,
        key_dim: keys.required("ssm.state_size")?,
        value_dim: inner / n_heads,
        conv_width: keys.required("ssm.conv_kernel")?,
        v_heads: VHeads::Tiled,
        decay_is_log: false,
    })
}

fn rope(
    gguf: &Gguf,
    keys: &Keys<'_>,
    layers: &[LayerAttention],
    sizes: &[LayerSizes],
) -> Result<RopeParams, FormatError> {
    let head_dim = |kind| layers.iter().position(|layer| *layer == kind).map(|layer| sizes[layer].head_dim);
    let [full, local] = [LayerAttention::Full, LayerAttention::Sliding].map(head_dim);
    let local_dims = match keys.arch {
        Arch::Gemma4 => keys.optional("rope.dimension_count_swa")?.or(local),
        _ => None,
    };
    let gemma = matches!(keys.arch, Arch::Gemma3 | Arch::Gemma4);
    let theta = keys.optional("rope.freq_base")?.unwrap_or(if gemma { 1e6 } else { 1e4 });
    let local_theta = keys.optional("rope.freq_base_swa")?;
    // OLMo 3 scales only full-attention layers.
    let is_local = keys.arch == Arch::Olmo2 && local.is_some();
    Ok(RopeParams {
        theta,
        local_theta: local_theta.or(gemma.then_some(1e4)).or(is_local.then_some(theta)),
        scaling: scaling(gguf, keys)?,
        has_freq_factors: gguf.has_tensor("rope_freqs.weight"),
        dims: keys.optional("rope.dimension_count")?.or(full).unwrap_or(sizes[0].head_dim),
        local_dims,
        style: keys.arch.gguf_rope_style(),
    })
}

fn scaling(gguf: &Gguf, keys: &Keys<'_>) -> Result<RopeScaling, FormatError> {
    if gguf.has_tensor(LONG_FACTORS) {
        return Ok(RopeScaling::Long {
            n_original_context: keys.required("rope.scaling.original_context_length")?,
            attention_factor: keys.optional("rope.scaling.attn_factor")?.unwrap_or(1.0),
        });
    }
    let factor = match keys.optional("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.optional("rope.scale_linear")?, // key of old converters
    };
    let factor = factor.filter(|&f: &f32| f != 0.0 && f != 1.0);
    let kind = keys.optional("rope.scaling.type")?.unwrap_or("linear");
    match (kind, factor) {
        ("none", _) | ("linear" | "yarn", None) => Ok(RopeScaling::None),
        ("longrope", _) => Err(keys.blame(ParamsFault::NoRopeFactors)),
        ("linear", Some(factor)) => Ok(RopeScaling::Linear { factor }),
        ("yarn", Some(factor)) => {
            let n_original_context = match keys.optional("rope.scaling.original_context_length")? {
                Some(n) => n,
                None => keys.required("context_length")?,
            };
            let multiplier = keys.optional("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
            let usual = Yarn::recommended_attention_factor(factor) / Yarn::magnitude(factor, multiplier);
            let on_top = keys.optional("rope.scaling.attn_factor")?.unwrap_or(1.0);
            // Converters write the complete factor of config.json. A value of 1 stands for the recommended factor.
            let whole = keys.optional("rope.scaling.yarn_attn_factor")?.filter(|&whole: &f32| whole != 1.0);
            Ok(RopeScaling::Yarn(Yarn {
                factor,
                n_original_context,
                beta_fast: keys.optional("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.optional("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: whole.unwrap_or(usual * on_top),
                // Files have no key for it.
                truncate: keys.arch != Arch::GptOss,
            }))
        }
        (other, _) => Err(keys.blame(ParamsFault::RopeScaling { found: other.into() })),
    }
}
