//! Hyperparameters from `config.json`.

use super::rope::{LongRope, RopePairing, RopeParams, RopeScaling, Yarn};
use super::{Activation, Arch, Experts, LayerAttention, LayerSizes, ModelConfig, NormKind, ParamsFault};
use super::{DeltaNetSizes, PerLayerEmbedding, QueryTemperature, RecurrentLayers, VHeads};
use super::{checked_layers, default_head_dim, every_nth_attends, every_nth_full};
use super::{unless_alike, unless_all_rotate};
use crate::FormatError;
use crate::hf::{HfFolder, JsonObject};

/// Model families that `config.json` can name. Several of them share an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HfFamily {
    Llama,
    Mistral,
    Ministral3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3Vl,
    Gemma2,
    Gemma3,
    Gemma4,
    Phi3,
    SmolLm3,
    Olmo2,
    Olmo3,
    Granite,
    Glm4,
    Cohere2,
    Qwen35,
    Qwen35Moe,
    Lfm2,
    GptOss,
    Bert,
}

/// Multimodal models whose text part is one of the families, by the entry of `architectures` and the `model_type`.
const MULTIMODAL: [(&str, &str); 6] = [
    ("Gemma3ForConditionalGeneration", "gemma3"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ("Gemma4ForConditionalGeneration", "gemma4"),
    ("Mistral3ForConditionalGeneration", "mistral3"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
];

/// Defaults of `transformers` for missing keys.
struct FamilyDefaults {
    /// Head size; `None` for the hidden size divided by the number of heads.
    head_dim: Option<usize>,
    norm_eps: f32,
    theta: f32,
    /// Rotated share of a head.
    rotated: f32,
    window: Option<usize>,
    tied: bool,
    attention_bias: bool,
    /// Sizes that may be missing in the text part of a multimodal folder.
    sizes: Option<TextSizes>,
}

/// Vocabulary, heads and context.
#[derive(Clone, Copy)]
struct TextSizes {
    n_vocab: usize,
    n_heads: usize,
    n_kv_heads: usize,
    n_context: usize,
}

impl FamilyDefaults {
    /// Returns a size, which is required unless the family has a default.
    fn size(
        &self,
        json: &JsonObject,
        key: &str,
        default: fn(&TextSizes) -> usize,
    ) -> Result<usize, FormatError> {
        match (json.optional(key)?, &self.sizes) {
            (Some(size), _) => Ok(size),
            (None, Some(sizes)) => Ok(default(sizes)),
            (None, None) => json.required(key),
        }
    }
}

impl HfFamily {
    const ALL: [HfFamily; 22] = [
        HfFamily::Llama,
        HfFamily::Mistral,
        HfFamily::Ministral3,
        HfFamily::Qwen2,
        HfFamily::Qwen3,
        HfFamily::Qwen3Moe,
        HfFamily::Qwen3Vl,
        HfFamily::Gemma2,
        HfFamily::Gemma3,
        HfFamily::Gemma4,
        HfFamily::Phi3,
        HfFamily::SmolLm3,
        HfFamily::Olmo2,
        HfFamily::Olmo3,
        HfFamily::Granite,
        HfFamily::Glm4,
        HfFamily::Cohere2,
        HfFamily::Qwen35,
        HfFamily::Qwen35Moe,
        HfFamily::Lfm2,
        HfFamily::GptOss,
        HfFamily::Bert,
    ];

    /// Returns the entry of `architectures` and the `model_type`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            HfFamily::Llama => ("LlamaForCausalLM", "llama"),
            HfFamily::Mistral => ("MistralForCausalLM", "mistral"),
            HfFamily::Ministral3 => ("Ministral3ForCausalLM", "ministral3"),
            HfFamily::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            HfFamily::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            HfFamily::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            HfFamily::Qwen3Vl => ("Qwen3VLTextModel", "qwen3_vl_text"),
            HfFamily::Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            HfFamily::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            HfFamily::Gemma4 => ("Gemma4ForCausalLM", "gemma4_text"),
            HfFamily::Phi3 => ("Phi3ForCausalLM", "phi3"),
            HfFamily::SmolLm3 => ("SmolLM3ForCausalLM", "smollm3"),
            HfFamily::Olmo2 => ("Olmo2ForCausalLM", "olmo2"),
            HfFamily::Olmo3 => ("Olmo3ForCausalLM", "olmo3"),
            HfFamily::Granite => ("GraniteForCausalLM", "granite"),
            HfFamily::Glm4 => ("Glm4ForCausalLM", "glm4"),
            HfFamily::Cohere2 => ("Cohere2ForCausalLM", "cohere2"),
            HfFamily::Qwen35 => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
            HfFamily::Qwen35Moe => ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
            HfFamily::Lfm2 => ("Lfm2ForCausalLM", "lfm2"),
            HfFamily::GptOss => ("GptOssForCausalLM", "gpt_oss"),
            HfFamily::Bert => ("BertModel", "bert"),
        }
    }

    fn arch(self) -> Arch {
        match self {
            HfFamily::Llama | HfFamily::Mistral => Arch::Llama,
            HfFamily::Ministral3 => Arch::Mistral3,
            HfFamily::Qwen2 => Arch::Qwen2,
            HfFamily::Qwen3Moe => Arch::Qwen3Moe,
            HfFamily::Qwen3 | HfFamily::Qwen3Vl => Arch::Qwen3,
            HfFamily::Gemma2 => Arch::Gemma2,
            HfFamily::Gemma3 => Arch::Gemma3,
            HfFamily::Gemma4 => Arch::Gemma4,
            HfFamily::Phi3 => Arch::Phi3,
            HfFamily::SmolLm3 => Arch::SmolLm3,
            HfFamily::Olmo2 | HfFamily::Olmo3 => Arch::Olmo2,
            HfFamily::Granite => Arch::Granite,
            HfFamily::Glm4 => Arch::Glm4,
            HfFamily::Cohere2 => Arch::Cohere2,
            HfFamily::Qwen35 => Arch::Qwen35,
            HfFamily::Qwen35Moe => Arch::Qwen35Moe,
            HfFamily::Lfm2 => Arch::Lfm2,
            HfFamily::GptOss => Arch::GptOss,
            HfFamily::Bert => Arch::Bert,
        }
    }

    fn defaults(self) -> FamilyDefaults {
        let usual = FamilyDefaults {
            head_dim: None,
            norm_eps: 1e-6,
            theta: 1e4,
            rotated: 1.0,
            window: None,
            tied: false,
            attention_bias: false,
            sizes: None,
        };
        let gemma = FamilyDefaults { head_dim: Some(256), tied: true, ..usual };
        match self {
            HfFamily::Llama | HfFamily::Qwen2 | HfFamily::Granite => usual,
            HfFamily::Mistral => FamilyDefaults { window: Some(4096), ..usual },
            HfFamily::Ministral3 => {
                FamilyDefaults { head_dim: Some(128), norm_eps: 1e-5, theta: 1e6, ..usual }
            }
            HfFamily::Qwen3 | HfFamily::Qwen3Moe => FamilyDefaults { head_dim: Some(128), ..usual },
            HfFamily::Qwen3Vl => FamilyDefaults { head_dim: Some(128), theta: 5e5, ..usual },
            HfFamily::Gemma2 => FamilyDefaults { window: Some(4096), ..gemma },
            HfFamily::Gemma3 => {
                let sizes = TextSizes { n_vocab: 262_208, n_heads: 8, n_kv_heads: 4, n_context: 131_072 };
                FamilyDefaults { window: Some(4096), theta: 1e6, sizes: Some(sizes), ..gemma }
            }
            HfFamily::Gemma4 => FamilyDefaults { window: Some(512), theta: 1e6, ..gemma },
            HfFamily::Phi3 | HfFamily::Olmo2 => FamilyDefaults { norm_eps: 1e-5, ..usual },
            HfFamily::SmolLm3 => FamilyDefaults { theta: 2e6, tied: true, ..usual },
            HfFamily::Olmo3 => FamilyDefaults { norm_eps: 1e-5, theta: 5e5, window: Some(4096), ..usual },
            HfFamily::Glm4 => {
                let (head_dim, norm_eps) = (Some(128), 1.5625e-7);
                FamilyDefaults { head_dim, norm_eps, rotated: 0.5, attention_bias: true, ..usual }
            }
            HfFamily::Cohere2 => FamilyDefaults { norm_eps: 1e-5, window: Some(4096), tied: true, ..usual },
            HfFamily::Qwen35 | HfFamily::Qwen35Moe => {
                FamilyDefaults { head_dim: Some(256), rotated: 0.25, ..usual }
            }
            HfFamily::Bert => FamilyDefaults { norm_eps: 1e-12, tied: true, attention_bias: true, ..usual },
            HfFamily::Lfm2 => FamilyDefaults { norm_eps: 1e-5, theta: 1e6, tied: true, ..usual },
            HfFamily::GptOss => {
                let (head_dim, theta, window) = (Some(64), 150_000.0, Some(128));
                FamilyDefaults { head_dim, norm_eps: 1e-5, theta, window, attention_bias: true, ..usual }
            }
        }
    }

    /// Returns whether its class supports a sliding window.
    fn may_slide(self) -> bool {
        !matches!(
            self,
            HfFamily::Llama
                | HfFamily::Qwen3Vl
                | HfFamily::Olmo2
                | HfFamily::Granite
                | HfFamily::Glm4
                | HfFamily::Qwen35
                | HfFamily::Qwen35Moe
                | HfFamily::Lfm2
                | HfFamily::Bert
        )
    }

    fn of(config: &JsonObject) -> Result<HfFamily, FormatError> {
        let class = config.optional::<Vec<&str>>("architectures")?.and_then(|names| names.first().copied());
        let model_type = config.optional::<&str>("model_type")?;
        // These heads are ignored: only the encoder is used.
        let class = class.map(|class| match class {
            "BertForMaskedLM" | "BertForPreTraining" => "BertModel",
            class => class,
        });
        let by_class = |class| HfFamily::ALL.into_iter().find(|f| f.names().0 == class);
        let by_type = |model_type| HfFamily::ALL.into_iter().find(|f| f.names().1 == model_type);
        // The class decides: a model type includes variants such as classifiers.
        let (family, found) = match (class, model_type) {
            (Some(class), _) => (by_class(class), class),
            (None, Some(model_type)) => (by_type(model_type), model_type),
            (None, None) => return Err(FormatError::params(config.path(), ParamsFault::NoArch)),
        };
        family.ok_or_else(|| {
            FormatError::params(config.path(), ParamsFault::UnknownArch { found: found.into() })
        })
    }
}

impl ModelConfig {
    /// Reads the configuration of a folder.
    pub fn from_hf(folder: &HfFolder) -> Result<ModelConfig, FormatError> {
        let mut config = ModelConfig::from_hf_config(folder.config())?;
        folder.check_quantization()?;
        if let Some(generation) = folder.generation_config() {
            let more = generation.optional::<Vec<u32>>("eos_token_id")?.unwrap_or_default();
            config.eos.extend(more);
            config.eos.sort_unstable();
            config.eos.dedup();
        }
        Ok(config)
    }

    /// Reads a `config.json`. Sizes are required; other keys have the defaults of `transformers`. For a multimodal model,
    /// only the text part is read.
    pub fn from_hf_config(json: &JsonObject) -> Result<ModelConfig, FormatError> {
        let Some(text) = text_part(json)? else { return ModelConfig::from_text_config(json) };
        let mut config = ModelConfig::from_text_config(&text)?;
        if let (None, Some(tied)) = (text.get("tie_word_embeddings"), json.optional("tie_word_embeddings")?) {
            config.tied_embeddings = tied;
        }
        let towers = [("vision_config", "images"), ("audio_config", "sound")];
        config.left_out =
            towers.iter().filter(|(key, _)| json.get(key).is_some()).map(|(_, of)| *of).collect();
        if config.eos.is_empty() {
            config.eos = json.optional("eos_token_id")?.unwrap_or_default();
        }
        Ok(config)
    }

    fn from_text_config(json: &JsonObject) -> Result<ModelConfig, FormatError> {
        let family = HfFamily::of(json)?;
        let blame = |fault| FormatError::params(json.path(), fault);
        let (arch, defaults) = (family.arch(), family.defaults());
        let gemma4 = family == HfFamily::Gemma4;
        // Families whose norms multiply by one plus the stored weight.
        let less_one = matches!(family, HfFamily::Gemma2 | HfFamily::Gemma3) || arch.is_qwen35();
        let lfm2 = family == HfFamily::Lfm2;
        let n_layers = checked_layers(json.required("num_hidden_layers")?).map_err(blame)?;
        let hidden = json.required("hidden_size")?;
        let n_heads = defaults.size(json, "num_attention_heads", |sizes| sizes.n_heads)?;
        let head_dim = match json.optional("head_dim")?.or(defaults.head_dim) {
            Some(dim) => dim,
            None => default_head_dim(hidden, n_heads).map_err(blame)?,
        };
        if arch.is_qwen35() && json.optional("attention_bias")?.unwrap_or(false) {
            return Err(blame(ParamsFault::Unsupported { what: "attention with biases and an output gate" }));
        }
        if family == HfFamily::Lfm2 && json.optional("conv_bias")?.unwrap_or(false) {
            return Err(blame(ParamsFault::Unsupported { what: "a short convolution with biases" }));
        }
        // In Gemma 4, "vision" means that only image tokens attend to later ones.
        let sees_later = match gemma4 {
            true => json.optional("use_bidirectional_attention")?.is_some_and(|of: &str| of != "vision"),
            false => json.optional("use_bidirectional_attention")?.unwrap_or(false),
        };
        if sees_later {
            return Err(blame(ParamsFault::Unsupported { what: "attention to later tokens" }));
        }
        let mut unrotated = unrotated(json, family, n_layers)?;
        let (sliding_window, layers) = match family {
            HfFamily::Qwen35 | HfFamily::Qwen35Moe | HfFamily::Lfm2 => {
                (None, recurrent_layers(json, family, n_layers)?)
            }
            _ => sliding(json, family, &unrotated)?,
        };
        if family == HfFamily::Cohere2 {
            unrotated = layers.iter().map(|layer| *layer == LayerAttention::Full).collect();
        }
        let attention_bias = json.optional("attention_bias")?.unwrap_or(defaults.attention_bias);
        let bert = family == HfFamily::Bert;
        if bert {
            check_bert(json)?;
        }
        let norm = if family == HfFamily::Cohere2 || bert { NormKind::Layer } else { NormKind::Rms };
        let norm_eps = match norm {
            NormKind::Rms => json.optional(if lfm2 { "norm_eps" } else { "rms_norm_eps" })?,
            NormKind::Layer => json.optional("layer_norm_eps")?,
        };
        let query_scalar = json.optional("query_pre_attn_scalar")?.filter(|_| less_one);
        let granite = |key| match family {
            HfFamily::Granite => json.optional(key).map(|factor| factor.unwrap_or(1.0f32)),
            _ => Ok(1.0),
        };
        // A missing key means Gemma 2's default; `null` means none.
        let softcap = |key, default| match json.optional(key)? {
            None if family == HfFamily::Gemma2 && !json.map().contains_key(key) => Ok(Some(default)),
            cap => Ok::<_, FormatError>(cap),
        };
        let n_kv_heads = match json.optional("num_key_value_heads")? {
            Some(n_kv_heads) => n_kv_heads,
            None => defaults.sizes.map_or(n_heads, |sizes| sizes.n_kv_heads),
        };
        let experts = experts(json, family, n_layers)?;
        let ffn = match (family, experts) {
            (HfFamily::Lfm2, _) => lfm2_ffn(json)?,
            // No layer has any other feed-forward block.
            (HfFamily::Qwen35Moe, Some(experts)) => experts.ffn,
            _ => json.required("intermediate_size")?,
        };
        let usual = LayerSizes { n_kv_heads, head_dim, ffn };
        let n_shared_kv = json.optional("num_kv_shared_layers")?.filter(|_| gemma4).unwrap_or(0);
        let sizes = match gemma4 {
            true => gemma4_sizes(json, &layers, usual, n_shared_kv)?,
            false => Vec::new(),
        };
        let config = ModelConfig {
            arch,
            name: json.optional("_name_or_path")?.map(crate::display_name).filter(|name| !name.is_empty()),
            n_vocab: defaults.size(json, "vocab_size", |sizes| sizes.n_vocab)?,
            n_layers,
            hidden,
            ffn: usual.ffn,
            n_heads,
            n_kv_heads,
            head_dim,
            norm,
            norm_eps: norm_eps.unwrap_or(defaults.norm_eps),
            norm_offset: if less_one { 1.0 } else { 0.0 },
            activation: activation(json, family)?,
            rope: rope(json, family, head_dim, &layers, &sizes)?,
            sliding_window,
            layers,
            n_context: defaults.size(json, "max_position_embeddings", |sizes| sizes.n_context)?,
            tied_embeddings: match json.optional("tie_embedding")?.filter(|_| lfm2) {
                Some(tied) => tied,
                None => json.optional("tie_word_embeddings")?.unwrap_or(defaults.tied),
            },
            qkv_bias: attention_bias || family == HfFamily::Qwen2,
            attn_output_bias: attention_bias && !matches!(family, HfFamily::Qwen2 | HfFamily::Glm4),
            ffn_bias: json.optional("mlp_bias")?.unwrap_or(bert),
            qk_norm: arch.has_qk_norm(),
            attn_scale: match family {
                HfFamily::Gemma4 => 1.0,
                HfFamily::Granite => granite("attention_multiplier")?,
                _ => query_scalar.unwrap_or(head_dim as f32).sqrt().recip(),
            },
            attn_softcap: softcap("attn_logit_softcapping", 50.0)?,
            final_softcap: softcap("final_logit_softcapping", 30.0)?,
            embedding_scale: match arch.is_gemma() {
                true => (hidden as f32).sqrt(),
                false => granite("embedding_multiplier")?,
            },
            residual_scale: granite("residual_multiplier")?,
            logit_scale: match family {
                HfFamily::Cohere2 => json.optional("logit_scale")?.unwrap_or(0.0625),
                _ => granite("logits_scaling")?.recip(),
            },
            unrotated: unless_all_rotate(unrotated),
            query_temperature: query_temperature(json, family)?,
            long_rope: long_rope(json, family)?,
            bos: json.optional::<Vec<u32>>("bos_token_id")?.and_then(|ids| ids.first().copied()),
            eos: json.optional("eos_token_id")?.unwrap_or_default(),
            sizes: unless_alike(sizes),
            n_shared_kv,
            keys_as_values: gemma4 && json.optional("attention_k_eq_v")?.unwrap_or(false),
            per_layer: if gemma4 { per_layer(json)? } else { None },
            experts,
            recurrent: recurrent(json, family)?,
            n_token_types: match bert {
                true => Some(json.optional("type_vocab_size")?.unwrap_or(2)),
                false => None,
            },
            left_out: Vec::new(),
        };
        config.validate().map_err(blame)
    }
}

/// Refuses variants of BERT that the graph does not build.
fn check_bert(json: &JsonObject) -> Result<(), FormatError> {
    let refuse = |what| Err(FormatError::params(json.path(), ParamsFault::Unsupported { what }));
    if json.optional::<&str>("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
        return refuse("an encoder with relative positions");
    }
    if json.optional("is_decoder")?.unwrap_or(false) {
        return refuse("BERT as a decoder");
    }
    Ok(())
}

/// Returns the text part of a multimodal model; `None` for a text model.
fn text_part(json: &JsonObject) -> Result<Option<JsonObject>, FormatError> {
    let class = json.optional::<Vec<&str>>("architectures")?.and_then(|names| names.first().copied());
    let model_type = json.optional::<&str>("model_type")?;
    let is_multimodal = MULTIMODAL.iter().any(|(known, of_type)| match class {
        Some(class) => class == *known,
        None => model_type == Some(of_type),
    });
    if is_multimodal { json.object("text_config") } else { Ok(None) }
}

/// Returns the sizes of each layer. Files have separate keys for full-attention layers, or an entry per layer that
/// differs.
fn gemma4_sizes(
    json: &JsonObject,
    layers: &[LayerAttention],
    usual: LayerSizes,
    n_shared_kv: usize,
) -> Result<Vec<LayerSizes>, FormatError> {
    let own = json.object("per_layer_config")?;
    let global_dim = json.optional("global_head_dim")?.unwrap_or(512);
    let has_global_heads = json.optional("attention_k_eq_v")?.unwrap_or(false);
    let global_heads = json.optional("num_global_key_value_heads")?.filter(|_| has_global_heads);
    let doubles = json.optional("use_double_wide_mlp")?.unwrap_or(false);
    let n_own = layers.len().saturating_sub(n_shared_kv);
    let mut sizes = Vec::with_capacity(layers.len());
    for (idx, layer) in layers.iter().enumerate() {
        let mut size = usual;
        match &own {
            Some(own) => {
                if let Some(layer) = own.object(&idx.to_string())? {
                    size.head_dim = layer.optional("head_dim")?.unwrap_or(size.head_dim);
                    size.n_kv_heads = layer.optional("num_key_value_heads")?.unwrap_or(size.n_kv_heads);
                }
            }
            None if *layer == LayerAttention::Full => {
                size.head_dim = global_dim;
                size.n_kv_heads = global_heads.unwrap_or(size.n_kv_heads);
            }
            None => {}
        }
        if doubles && n_shared_kv > 0 && idx >= n_own {
            size.ffn = size.ffn.saturating_mul(2);
        }
        sizes.push(size);
    }
    Ok(sizes)
}

/// Returns which layers are recurrent: by a name for each, or all except every n-th.
fn recurrent_layers(
    json: &JsonObject,
    family: HfFamily,
    n_layers: usize,
) -> Result<Vec<LayerAttention>, FormatError> {
    let blame = |fault| FormatError::params(json.path(), fault);
    let lfm2 = family == HfFamily::Lfm2;
    let Some(types) = json.optional::<Vec<&str>>("layer_types")? else {
        if !lfm2 {
            return Ok(every_nth_attends(n_layers, json.optional("full_attention_interval")?.unwrap_or(4)));
        }
        let attending = json.optional::<Vec<u32>>("full_attn_idxs")?;
        let is_full = |layer| attending.as_ref().is_none_or(|list| list.contains(&(layer as u32)));
        let kind = |layer| if is_full(layer) { LayerAttention::Full } else { LayerAttention::Recurrent };
        return Ok((0..n_layers).map(kind).collect());
    };
    let kind = |name: &&str| match *name {
        "full_attention" => Ok(LayerAttention::Full),
        "linear_attention" if !lfm2 => Ok(LayerAttention::Recurrent),
        "conv" if lfm2 => Ok(LayerAttention::Recurrent),
        other => Err(blame(ParamsFault::LayerType { found: other.into() })),
    };
    types.iter().map(kind).collect()
}

fn recurrent(json: &JsonObject, family: HfFamily) -> Result<Option<RecurrentLayers>, FormatError> {
    Ok(match family {
        HfFamily::Qwen35 | HfFamily::Qwen35Moe => Some(RecurrentLayers::DeltaNet(delta_net(json)?)),
        HfFamily::Lfm2 => {
            Some(RecurrentLayers::ShortConv { width: json.optional("conv_L_cache")?.unwrap_or(3) })
        }
        _ => None,
    })
}

/// Returns the feed-forward size of LFM2. The file stores the size of an ungated layer.
fn lfm2_ffn(json: &JsonObject) -> Result<usize, FormatError> {
    let size: usize = match json.optional("block_ff_dim")? {
        Some(size) => size,
        None => json.required("intermediate_size")?,
    };
    if !json.optional("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(size);
    }
    let two_thirds = (2.0 * size as f64 / 3.0) as usize;
    let multiplier: f32 = json.optional("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple: usize = json.optional("block_multiple_of")?.unwrap_or(256);
    let size = (f64::from(multiplier) * two_thirds as f64) as usize;
    Ok(size.checked_next_multiple_of(multiple.max(1)).unwrap_or(size))
}

/// Reads the sizes of recurrent layers.
fn delta_net(json: &JsonObject) -> Result<DeltaNetSizes, FormatError> {
    Ok(DeltaNetSizes {
        n_key_heads: json.optional("linear_num_key_heads")?.unwrap_or(16),
        n_heads: json.optional("linear_num_value_heads")?.unwrap_or(32),
        key_dim: json.optional("linear_key_head_dim")?.unwrap_or(128),
        value_dim: json.optional("linear_value_head_dim")?.unwrap_or(128),
        conv_width: json.optional("linear_conv_kernel_dim")?.unwrap_or(4),
        v_heads: VHeads::Grouped,
        decay_is_log: true,
    })
}

fn per_layer(json: &JsonObject) -> Result<Option<PerLayerEmbedding>, FormatError> {
    // A missing key means the default; `null` and 0 mean none.
    let dim = match json.optional("hidden_size_per_layer_input")? {
        None if !json.map().contains_key("hidden_size_per_layer_input") => 256,
        dim => dim.unwrap_or(0),
    };
    let n_vocab = json.optional("vocab_size_per_layer_input")?.unwrap_or(262_144);
    Ok((dim > 0).then_some(PerLayerEmbedding { n_vocab, dim }))
}

/// Reads the experts. Families use different keys.
fn experts(json: &JsonObject, family: HfFamily, n_layers: usize) -> Result<Option<Experts>, FormatError> {
    let size = |names: [&str; 2], usual: usize| -> Result<usize, FormatError> {
        let given = match json.optional(names[0])? {
            Some(size) => Some(size),
            None => json.optional(names[1])?,
        };
        Ok(given.unwrap_or(usual))
    };
    match family {
        HfFamily::Qwen3Moe => {
            let dense = json.optional::<Vec<u32>>("mlp_only_layers")?.unwrap_or_default();
            let step = json.optional("decoder_sparse_step")?.unwrap_or(1_u32);
            let found = match (dense.iter().any(|&layer| (layer as usize) < n_layers), step) {
                (true, _) => Some("mlp_only_layers lists dense layers"),
                (false, 1) => None,
                (false, _) => Some("decoder_sparse_step is not 1"),
            };
            if let Some(found) = found {
                let fault = ParamsFault::DenseLayers { arch: Arch::Qwen3Moe, found };
                return Err(FormatError::params(json.path(), fault));
            }
            Ok(Some(Experts {
                n_experts: size(["num_experts", "num_local_experts"], 128)?,
                n_choices: size(["num_experts_per_tok", "num_experts_per_tok"], 8)?,
                ffn: size(["moe_intermediate_size", "moe_intermediate_size"], 768)?,
                renormalise: json.optional("norm_topk_prob")?.unwrap_or(false),
                shared_ffn: None,
            }))
        }
        HfFamily::Qwen35Moe => Ok(Some(Experts {
            n_experts: size(["num_experts", "num_local_experts"], 256)?,
            n_choices: size(["num_experts_per_tok", "num_experts_per_tok"], 8)?,
            ffn: size(["moe_intermediate_size", "moe_intermediate_size"], 512)?,
            renormalise: true,
            shared_ffn: Some(json.optional("shared_expert_intermediate_size")?.unwrap_or(512)),
        })),
        HfFamily::GptOss => {
            // The functions of the graph have these constants.
            for (key, usual) in [("swiglu_alpha", 1.702_f32), ("swiglu_limit", 7.0)] {
                if json.optional(key)?.is_some_and(|found: f32| found != usual) {
                    let what = "experts with an unusual swiglu_alpha or swiglu_limit";
                    return Err(FormatError::params(json.path(), ParamsFault::Unsupported { what }));
                }
            }
            Ok(Some(Experts {
                n_experts: size(["num_local_experts", "num_experts"], 128)?,
                n_choices: size(["num_experts_per_tok", "experts_per_token"], 4)?,
                ffn: json.required("intermediate_size")?,
                renormalise: true,
                shared_ffn: None,
            }))
        }
        HfFamily::Gemma4 if json.optional("enable_moe_block")?.unwrap_or(false) => Ok(Some(Experts {
            n_experts: json.required("num_experts")?,
            n_choices: json.required("top_k_experts")?,
            ffn: json.required("moe_intermediate_size")?,
            renormalise: true,
            shared_ffn: None,
        })),
        _ => Ok(None),
    }
}

fn activation(json: &JsonObject, family: HfFamily) -> Result<Activation, FormatError> {
    let found = match json.optional::<&str>("hidden_activation")? {
        Some(name) => Some(name),
        None => json.optional::<&str>("hidden_act")?,
    };
    let gemma = family.arch().is_gemma();
    if family == HfFamily::Bert {
        return match found {
            None | Some("gelu") => Ok(Activation::GeluErf),
            Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some(found) => {
                let (found, expected) = (found.into(), "gelu");
                let fault = ParamsFault::Activation { arch: Arch::Bert, found, expected };
                Err(FormatError::params(json.path(), fault))
            }
        };
    }
    match found {
        None | Some("gelu_pytorch_tanh") if gemma => Ok(Activation::GeluTanh),
        None | Some("silu" | "swish") if !gemma => Ok(Activation::Silu),
        found => {
            let found = found.unwrap_or_default().into();
            let expected = if gemma { "gelu_pytorch_tanh" } else { "silu" };
            let fault = ParamsFault::Activation { arch: family.arch(), found, expected };
            Err(FormatError::params(json.path(), fault))
        }
    }
}

/// Returns the layers without rotary embedding, for families that have a key for it.
fn unrotated(json: &JsonObject, family: HfFamily, n_layers: usize) -> Result<Vec<bool>, FormatError> {
    if family != HfFamily::SmolLm3 {
        return Ok(vec![false; n_layers]);
    }
    let Some(rotated) = json.optional::<Vec<u32>>("no_rope_layers")? else {
        let interval = json.optional("no_rope_layer_interval")?.unwrap_or(4usize);
        return Ok((0..n_layers).map(|l| interval != 0 && (l + 1).is_multiple_of(interval)).collect());
    };
    if rotated.len() < n_layers {
        let fault = ParamsFault::Unrotated { found: rotated.len(), n_layers };
        return Err(FormatError::params(json.path(), fault));
    }
    Ok(rotated[..n_layers].iter().map(|&is_rotated| is_rotated == 0).collect())
}

/// Returns the sliding window and the attention of each layer.
fn sliding(
    json: &JsonObject,
    family: HfFamily,
    unrotated: &[bool],
) -> Result<(Option<usize>, Vec<LayerAttention>), FormatError> {
    let blame = |fault| FormatError::params(json.path(), fault);
    let n_layers = unrotated.len();
    let full = vec![LayerAttention::Full; n_layers];
    let asks = matches!(family, HfFamily::Qwen2 | HfFamily::Qwen3 | HfFamily::Qwen3Moe | HfFamily::SmolLm3);
    let disabled = asks && !json.optional("use_sliding_window")?.unwrap_or(false);
    // A missing key means the family's default; `null` means none.
    let window = match json.optional("sliding_window")? {
        _ if disabled || !family.may_slide() => None,
        None if !json.map().contains_key("sliding_window") => family.defaults().window,
        window => window,
    };
    if let Some(types) = json.optional::<Vec<&str>>("layer_types")? {
        if types.len() != n_layers {
            return Err(blame(ParamsFault::LayerTypes { found: types.len(), n_layers }));
        }
        let kind = |name: &&str| match *name {
            "full_attention" => Ok(LayerAttention::Full),
            "sliding_attention" => Ok(LayerAttention::Sliding),
            other => Err(blame(ParamsFault::LayerType { found: other.into() })),
        };
        let mut layers = types.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
        if let (HfFamily::Gemma4, Some(last)) = (family, layers.last_mut()) {
            *last = LayerAttention::Full; // `transformers` overrides the file as well
        }
        let slides = layers.contains(&LayerAttention::Sliding);
        return Ok((window.filter(|_| slides), layers));
    }
    if window.is_none() {
        return Ok((None, full));
    }
    let slides_where = |slides: &dyn Fn(usize) -> bool| {
        let kind = |l| if slides(l) { LayerAttention::Sliding } else { LayerAttention::Full };
        (0..n_layers).map(kind).collect()
    };
    let layers = match family {
        HfFamily::Gemma4 => {
            let mut layers = every_nth_full(n_layers, 6);
            if let Some(last) = layers.last_mut() {
                *last = LayerAttention::Full;
            }
            layers
        }
        HfFamily::Gemma3 | HfFamily::Cohere2 => {
            let period =
                json.optional("sliding_window_pattern")?.or(json.optional("_sliding_window_pattern")?);
            every_nth_full(n_layers, period.unwrap_or(family.arch().usual_period()))
        }
        // All layers are alike: `max_window_layers` is ignored.
        HfFamily::Qwen3Moe => vec![LayerAttention::Sliding; n_layers],
        HfFamily::Gemma2 | HfFamily::Olmo3 | HfFamily::GptOss => {
            every_nth_full(n_layers, family.arch().usual_period())
        }
        HfFamily::Qwen2 | HfFamily::Qwen3 => {
            let first = json.optional("max_window_layers")?.unwrap_or(28);
            slides_where(&|l| l >= first)
        }
        HfFamily::SmolLm3 => slides_where(&|l| unrotated[l]),
        HfFamily::Mistral | HfFamily::Ministral3 | HfFamily::Phi3 => vec![LayerAttention::Sliding; n_layers],
        HfFamily::Llama | HfFamily::Qwen3Vl | HfFamily::Olmo2 | HfFamily::Granite | HfFamily::Glm4 => full,
        // These families have no window; their other layers are recurrent.
        HfFamily::Qwen35 | HfFamily::Qwen35Moe | HfFamily::Lfm2 | HfFamily::Bert => full,
    };
    Ok((window.filter(|_| layers.contains(&LayerAttention::Sliding)), layers))
}

/// Reads the rotary embedding. Old files have `rope_theta` and `rope_scaling`; new ones have `rope_parameters`, with one
/// object per kind of layer where there are two.
fn rope(
    json: &JsonObject,
    family: HfFamily,
    head_dim: usize,
    layers: &[LayerAttention],
    sizes: &[LayerSizes],
) -> Result<RopeParams, FormatError> {
    let mut theta = json.optional("rope_theta")?;
    let mut local_theta = json.optional("rope_local_base_freq")?;
    let mut scaling_json = json.object("rope_scaling")?;
    let mut partial: Option<f32> = json.optional("partial_rotary_factor")?;
    if let Some(parameters) = json.object("rope_parameters")? {
        let full = parameters.object("full_attention")?.unwrap_or_else(|| parameters.clone());
        if let Some(sliding) = parameters.object("sliding_attention")? {
            local_theta = sliding.optional("rope_theta")?.or(local_theta);
            if self::scaling(&sliding, json, family)? != RopeScaling::None {
                let what = "rope scaling in sliding layers";
                return Err(FormatError::params(json.path(), ParamsFault::Unsupported { what }));
            }
        }
        theta = full.optional("rope_theta")?.or(theta);
        partial = full.optional("partial_rotary_factor")?.or(partial);
        scaling_json = Some(full);
    }
    let defaults = family.defaults();
    let theta = theta.unwrap_or(defaults.theta);
    let scaling = |default| match &scaling_json {
        Some(rope) => scaling(rope, json, family),
        None => Ok(default),
    };
    if family == HfFamily::Gemma4 {
        // Whole heads are rotated: unrotated pairs have a frequency of 0.
        let of = |kind| layers.iter().zip(sizes).find(|(layer, _)| **layer == kind).map(|(_, s)| s.head_dim);
        let share = RopeScaling::Proportional { share: 0.25, factor: 1.0 };
        return Ok(RopeParams {
            theta,
            local_theta: local_theta.or(Some(1e4)),
            scaling: scaling(share)?,
            has_freq_factors: false,
            dims: of(LayerAttention::Full).unwrap_or(head_dim),
            local_dims: of(LayerAttention::Sliding),
            style: RopePairing::Neox,
        });
    }
    Ok(RopeParams {
        theta,
        local_theta: match family {
            HfFamily::Gemma3 => local_theta.or(Some(1e4)),
            // OLMo 3 scales only full-attention layers.
            HfFamily::Olmo3 => local_theta.or(Some(theta)),
            _ => None,
        },
        scaling: scaling(RopeScaling::None)?,
        has_freq_factors: false,
        dims: (head_dim as f32 * partial.unwrap_or(defaults.rotated)) as usize,
        local_dims: None,
        style: family.arch().hf_rope_style(),
    })
}

/// Reads the scaling of the frequencies.
fn rope_parameters(json: &JsonObject) -> Result<Option<JsonObject>, FormatError> {
    Ok(json.object("rope_parameters")?.or(json.object("rope_scaling")?))
}

fn query_temperature(json: &JsonObject, family: HfFamily) -> Result<Option<QueryTemperature>, FormatError> {
    let Some(rope) = rope_parameters(json)?.filter(|_| family == HfFamily::Ministral3) else {
        return Ok(None);
    };
    let beta = rope.optional("llama_4_scaling_beta")?.filter(|&beta: &f32| beta != 0.0);
    let Some(beta) = beta else { return Ok(None) };
    let n_original_context = rope.required("original_max_position_embeddings")?;
    Ok(Some(QueryTemperature { beta, n_original_context }))
}

fn long_rope(json: &JsonObject, family: HfFamily) -> Result<Option<LongRope>, FormatError> {
    let Some(rope) = rope_parameters(json)?.filter(|_| family == HfFamily::Phi3) else { return Ok(None) };
    match (rope.optional("short_factor")?, rope.optional("long_factor")?) {
        (Some(short), Some(long)) => Ok(Some(LongRope { short, long })),
        _ => Ok(None),
    }
}

fn scaling(rope: &JsonObject, config: &JsonObject, family: HfFamily) -> Result<RopeScaling, FormatError> {
    let kind = match rope.optional::<&str>("rope_type")? {
        Some(kind) => kind,
        None => rope.optional::<&str>("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        // Older folders of Phi 3 use other names for longrope.
        "longrope" => longrope(rope, config),
        "su" | "yarn" if family == HfFamily::Phi3 => longrope(rope, config),
        "linear" => Ok(RopeScaling::Linear { factor: rope.required("factor")? }),
        "proportional" => Ok(RopeScaling::Proportional {
            share: rope.optional("partial_rotary_factor")?.unwrap_or(1.0),
            factor: rope.optional("factor")?.unwrap_or(1.0),
        }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: rope.required("factor")?,
            low_freq_factor: rope.required("low_freq_factor")?,
            high_freq_factor: rope.required("high_freq_factor")?,
            n_original_context: rope.required("original_max_position_embeddings")?,
        }),
        "yarn" => {
            let n_context = config.required("max_position_embeddings")?;
            let original = "original_max_position_embeddings";
            let n_original_context =
                rope.optional(original)?.or(config.optional(original)?).unwrap_or(n_context);
            let ratio = n_context as f32 / n_original_context as f32;
            let factor = rope.optional("factor")?.unwrap_or(ratio);
            Ok(RopeScaling::Yarn(Yarn {
                factor,
                n_original_context,
                beta_fast: rope.optional("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.optional("beta_slow")?.unwrap_or(1.0),
                attention_factor: yarn_attention_factor(rope, factor)?,
                truncate: rope.optional("truncate")?.unwrap_or(true),
            }))
        }
        other => Err(FormatError::params(config.path(), ParamsFault::RopeScaling { found: other.into() })),
    }
}

fn longrope(rope: &JsonObject, config: &JsonObject) -> Result<RopeScaling, FormatError> {
    let n_context: usize = config.required("max_position_embeddings")?;
    let original = "original_max_position_embeddings";
    let n_original_context = rope.optional(original)?.or(config.optional(original)?).unwrap_or(n_context);
    let ratio = n_context as f32 / n_original_context as f32;
    let factor = rope.optional("factor")?.unwrap_or(ratio);
    let attention_factor = match rope.optional("attention_factor")? {
        Some(given) => given,
        None => LongRope::recommended_attention_factor(factor, n_original_context),
    };
    Ok(RopeScaling::Long { n_original_context, attention_factor })
}

fn yarn_attention_factor(rope: &JsonObject, factor: f32) -> Result<f32, FormatError> {
    if let Some(given) = rope.optional("attention_factor")? {
        return Ok(given);
    }
    let mscale = |m: f32| Yarn::magnitude(factor, m);
    let (one, all) = (rope.optional("mscale")?, rope.optional("mscale_all_dim")?);
    Ok(match (one, all) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(one) / mscale(all),
        _ => Yarn::recommended_attention_factor(factor),
    })
}
