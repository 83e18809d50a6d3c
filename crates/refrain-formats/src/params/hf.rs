//! Hyperparameters from `config.json`.

use super::rope::{Rope, RopeScaling, RopeStyle, Yarn};
use super::{
    Activation, Arch, Experts, LayerAttention, LayerSizes, ModelConfig, ParamsFault, PerLayerEmbedding,
};
use super::{checked_layers, default_head_dim, every_nth_full, unless_alike};
use crate::FormatError;
use crate::hf::{HfFolder, JsonObject};

/// What differs between the models that `config.json` can name; several of them are one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma3,
    Gemma4,
}

/// Multimodal models whose text part is one of the families: the entry of `architectures` and the `model_type`.
const MULTIMODAL: [(&str, &str); 1] = [("Gemma4ForConditionalGeneration", "gemma4")];

impl Family {
    const ALL: [Family; 7] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::Gemma3,
        Family::Gemma4,
    ];

    /// The entry of `architectures` and the `model_type`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Mistral => ("MistralForCausalLM", "mistral"),
            Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            Family::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            Family::Gemma4 => ("Gemma4ForCausalLM", "gemma4_text"),
        }
    }

    fn arch(self) -> Arch {
        match self {
            Family::Llama | Family::Mistral => Arch::Llama,
            Family::Qwen2 => Arch::Qwen2,
            Family::Qwen3 => Arch::Qwen3,
            Family::Qwen3Moe => Arch::Qwen3Moe,
            Family::Gemma3 => Arch::Gemma3,
            Family::Gemma4 => Arch::Gemma4,
        }
    }

    fn of(config: &JsonObject) -> Result<Family, FormatError> {
        let class = config.optional::<Vec<&str>>("architectures")?.and_then(|names| names.first().copied());
        let model_type = config.optional::<&str>("model_type")?;
        let by_class = |class| Family::ALL.into_iter().find(|f| f.names().0 == class);
        let by_type = |model_type| Family::ALL.into_iter().find(|f| f.names().1 == model_type);
        // The class has the last word: one model type also has heads for classification and the like.
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
        if let Some(generation) = folder.generation_config() {
            let more = generation.optional::<Vec<u32>>("eos_token_id")?.unwrap_or_default();
            config.eos.extend(more);
            config.eos.sort_unstable();
            config.eos.dedup();
        }
        Ok(config)
    }

    /// Reads a `config.json`. Sizes must be there; for the rest the defaults are those of `transformers`. Of a multimodal
    /// model the text part is read.
    pub fn from_hf_config(json: &JsonObject) -> Result<ModelConfig, FormatError> {
        let Some(text) = text_part(json)? else { return ModelConfig::from_text_config(json) };
        let mut config = ModelConfig::from_text_config(&text)?;
        let towers = [("vision_config", "images"), ("audio_config", "sound")];
        config.left_out =
            towers.iter().filter(|(key, _)| json.get(key).is_some()).map(|(_, of)| *of).collect();
        if config.eos.is_empty() {
            config.eos = json.optional("eos_token_id")?.unwrap_or_default();
        }
        Ok(config)
    }

    fn from_text_config(json: &JsonObject) -> Result<ModelConfig, FormatError> {
        let family = Family::of(json)?;
        let blame = |fault| FormatError::params(json.path(), fault);
        let gemma3 = family == Family::Gemma3;
        let gemma4 = family == Family::Gemma4;
        let gemma = gemma3 || gemma4;
        let n_layers = checked_layers(json.required("num_hidden_layers")?).map_err(blame)?;
        let hidden = json.required("hidden_size")?;
        let n_heads = json.required("num_attention_heads")?;
        let head_dim = match json.optional("head_dim")? {
            Some(dim) => dim,
            None if gemma => 256,
            None if family == Family::Qwen3 => 128,
            None => default_head_dim(hidden, n_heads).map_err(blame)?,
        };
        // Gemma 4 says "vision" where only the tokens of images see later ones.
        let sees_later = match gemma4 {
            true => json.optional("use_bidirectional_attention")?.is_some_and(|of: &str| of != "vision"),
            false => json.optional("use_bidirectional_attention")?.unwrap_or(false),
        };
        if sees_later {
            return Err(blame(ParamsFault::Unsupported { what: "attention to later tokens" }));
        }
        let (sliding_window, layers) = sliding(json, family, n_layers)?;
        let attention_bias = json.optional("attention_bias")?.unwrap_or(false);
        let query_scalar = json.optional("query_pre_attn_scalar")?.filter(|_| gemma3);
        let n_kv_heads = json.optional("num_key_value_heads")?.unwrap_or(n_heads);
        let usual = LayerSizes { n_kv_heads, head_dim, ffn: json.required("intermediate_size")? };
        let n_shared_kv = json.optional("num_kv_shared_layers")?.filter(|_| gemma4).unwrap_or(0);
        let sizes = match gemma4 {
            true => gemma4_sizes(json, &layers, usual, n_shared_kv)?,
            false => Vec::new(),
        };
        let config = ModelConfig {
            arch: family.arch(),
            name: json.optional::<&str>("_name_or_path")?.filter(|n| !n.is_empty()).map(str::to_owned),
            n_vocab: json.required("vocab_size")?,
            n_layers,
            hidden,
            ffn: usual.ffn,
            n_heads,
            n_kv_heads,
            head_dim,
            norm_eps: json.optional("rms_norm_eps")?.unwrap_or(1e-6),
            norm_offset: if gemma3 { 1.0 } else { 0.0 },
            activation: activation(json, family)?,
            rope: rope(json, family, head_dim, &layers, &sizes)?,
            sliding_window,
            layers,
            n_context: json.required("max_position_embeddings")?,
            tied_embeddings: json.optional("tie_word_embeddings")?.unwrap_or(gemma),
            qkv_bias: attention_bias || family == Family::Qwen2,
            attn_output_bias: attention_bias && family != Family::Qwen2,
            ffn_bias: json.optional("mlp_bias")?.unwrap_or(false),
            qk_norm: gemma || matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            attn_scale: if gemma4 { 1.0 } else { query_scalar.unwrap_or(head_dim as f32).sqrt().recip() },
            attn_softcap: json.optional("attn_logit_softcapping")?,
            final_softcap: json.optional("final_logit_softcapping")?,
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            bos: json.optional::<Vec<u32>>("bos_token_id")?.and_then(|ids| ids.first().copied()),
            eos: json.optional("eos_token_id")?.unwrap_or_default(),
            sizes: unless_alike(sizes),
            n_shared_kv,
            keys_as_values: gemma4 && json.optional("attention_k_eq_v")?.unwrap_or(false),
            per_layer: if gemma4 { per_layer(json)? } else { None },
            experts: experts(json, family, n_layers)?,
            left_out: Vec::new(),
        };
        config.validate().map_err(blame)
    }
}

/// The text part of a multimodal model; `None` where the file is about a text model.
fn text_part(json: &JsonObject) -> Result<Option<JsonObject>, FormatError> {
    let class = json.optional::<Vec<&str>>("architectures")?.and_then(|names| names.first().copied());
    let model_type = json.optional::<&str>("model_type")?;
    let is_multimodal = MULTIMODAL.iter().any(|(known, of_type)| match class {
        Some(class) => class == *known,
        None => model_type == Some(of_type),
    });
    if is_multimodal { json.object("text_config") } else { Ok(None) }
}

/// Sizes of each layer. Files have the sizes of layers that see all under keys of their own, or an entry for each layer
/// that differs.
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

fn per_layer(json: &JsonObject) -> Result<Option<PerLayerEmbedding>, FormatError> {
    // A missing key means the default, `null` and 0 mean none.
    let dim = match json.optional("hidden_size_per_layer_input")? {
        None if !json.map().contains_key("hidden_size_per_layer_input") => 256,
        dim => dim.unwrap_or(0),
    };
    let n_vocab = json.optional("vocab_size_per_layer_input")?.unwrap_or(262_144);
    Ok((dim > 0).then_some(PerLayerEmbedding { n_vocab, dim }))
}

/// Experts, of which the two families have the keys under different names.
fn experts(json: &JsonObject, family: Family, n_layers: usize) -> Result<Option<Experts>, FormatError> {
    let size = |names: [&str; 2], usual: usize| -> Result<usize, FormatError> {
        let given = match json.optional(names[0])? {
            Some(size) => Some(size),
            None => json.optional(names[1])?,
        };
        Ok(given.unwrap_or(usual))
    };
    match family {
        Family::Qwen3Moe => {
            let dense = json.optional::<Vec<u32>>("mlp_only_layers")?.unwrap_or_default();
            let step = json.optional("decoder_sparse_step")?.unwrap_or(1_u32);
            let found = match (dense.iter().any(|&layer| (layer as usize) < n_layers), step) {
                (true, _) => Some("mlp_only_layers names layers without"),
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
            }))
        }
        Family::Gemma4 if json.optional("enable_moe_block")?.unwrap_or(false) => Ok(Some(Experts {
            n_experts: json.required("num_experts")?,
            n_choices: json.required("top_k_experts")?,
            ffn: json.required("moe_intermediate_size")?,
            renormalise: true,
        })),
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Gemma3 | Family::Gemma4 => {
            Ok(None)
        }
    }
}

fn activation(json: &JsonObject, family: Family) -> Result<Activation, FormatError> {
    let found = match json.optional::<&str>("hidden_activation")? {
        Some(name) => Some(name),
        None => json.optional::<&str>("hidden_act")?,
    };
    match (family, found) {
        (Family::Gemma3 | Family::Gemma4, None | Some("gelu_pytorch_tanh")) => Ok(Activation::GeluTanh),
        (
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe,
            None | Some("silu" | "swish"),
        ) => Ok(Activation::Silu),
        (family, Some(found)) => {
            let gemma = matches!(family, Family::Gemma3 | Family::Gemma4);
            let expected = if gemma { "gelu_pytorch_tanh" } else { "silu" };
            let fault = ParamsFault::Activation { arch: family.arch(), found: found.into(), expected };
            Err(FormatError::params(json.path(), fault))
        }
    }
}

/// The window and what each layer attends to.
fn sliding(
    json: &JsonObject,
    family: Family,
    n_layers: usize,
) -> Result<(Option<usize>, Vec<LayerAttention>), FormatError> {
    let blame = |fault| FormatError::params(json.path(), fault);
    let full = vec![LayerAttention::Full; n_layers];
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe);
    let disabled = qwen && !json.optional("use_sliding_window")?.unwrap_or(false);
    // A missing key means the default of the family, `null` means none.
    let default = match family {
        Family::Mistral | Family::Gemma3 => Some(4096),
        Family::Gemma4 => Some(512),
        Family::Llama | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => None,
    };
    let window = match json.optional("sliding_window")? {
        _ if disabled || family == Family::Llama => None,
        None if !json.map().contains_key("sliding_window") => default,
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
        if let (Family::Gemma4, Some(last)) = (family, layers.last_mut()) {
            *last = LayerAttention::Full; // whatever the file says, as `transformers` has it
        }
        let slides = layers.contains(&LayerAttention::Sliding);
        return Ok((window.filter(|_| slides), layers));
    }
    if window.is_none() {
        return Ok((None, full));
    }
    let layers = match family {
        Family::Gemma4 => {
            let mut layers = every_nth_full(n_layers, 6);
            if let Some(last) = layers.last_mut() {
                *last = LayerAttention::Full;
            }
            layers
        }
        Family::Gemma3 => {
            let period =
                json.optional("sliding_window_pattern")?.or(json.optional("_sliding_window_pattern")?);
            every_nth_full(n_layers, period.unwrap_or(6))
        }
        // All layers alike, whatever `max_window_layers` says.
        Family::Qwen3Moe => vec![LayerAttention::Sliding; n_layers],
        Family::Qwen2 | Family::Qwen3 => {
            let first = json.optional("max_window_layers")?.unwrap_or(28);
            let kind = |l| if l >= first { LayerAttention::Sliding } else { LayerAttention::Full };
            (0..n_layers).map(kind).collect()
        }
        Family::Llama | Family::Mistral => vec![LayerAttention::Sliding; n_layers],
    };
    Ok((window.filter(|_| layers.contains(&LayerAttention::Sliding)), layers))
}

/// Old files have `rope_theta` beside `rope_scaling`, new ones all of it in `rope_parameters`, which for models with
/// two kinds of layers has one object for each kind.
fn rope(
    json: &JsonObject,
    family: Family,
    head_dim: usize,
    layers: &[LayerAttention],
    sizes: &[LayerSizes],
) -> Result<Rope, FormatError> {
    let gemma = matches!(family, Family::Gemma3 | Family::Gemma4);
    let mut theta = json.optional("rope_theta")?;
    let mut local_theta = json.optional("rope_local_base_freq")?;
    let mut scaling_json = json.object("rope_scaling")?;
    if let Some(parameters) = json.object("rope_parameters")? {
        let full = parameters.object("full_attention")?.unwrap_or_else(|| parameters.clone());
        if let Some(sliding) = parameters.object("sliding_attention")? {
            local_theta = sliding.optional("rope_theta")?.or(local_theta);
            if scaling(&sliding, json)? != RopeScaling::None {
                let what = "rope scaling in sliding layers";
                return Err(FormatError::params(json.path(), ParamsFault::Unsupported { what }));
            }
        }
        theta = full.optional("rope_theta")?.or(theta);
        scaling_json = Some(full);
    }
    let partial: Option<f32> = json.optional("partial_rotary_factor")?;
    let local_default = gemma.then_some(1e4);
    if family == Family::Gemma4 {
        // Heads are rotated whole: what does not turn has a frequency of 0.
        let of = |kind| layers.iter().zip(sizes).find(|(layer, _)| **layer == kind).map(|(_, s)| s.head_dim);
        let share = RopeScaling::Proportional { share: 0.25, factor: 1.0 };
        return Ok(Rope {
            theta: theta.unwrap_or(1e6),
            local_theta: local_theta.or(local_default),
            scaling: scaling_json.map_or(Ok(share), |s| scaling(&s, json))?,
            has_freq_factors: false,
            dims: of(LayerAttention::Full).unwrap_or(head_dim),
            local_dims: of(LayerAttention::Sliding),
            style: RopeStyle::Neox,
        });
    }
    Ok(Rope {
        theta: theta.unwrap_or(if gemma { 1e6 } else { 1e4 }),
        local_theta: local_theta.or(local_default).filter(|_| gemma),
        scaling: scaling_json.map_or(Ok(RopeScaling::None), |s| scaling(&s, json))?,
        has_freq_factors: false,
        dims: partial.map_or(head_dim, |p| (head_dim as f32 * p) as usize),
        local_dims: None,
        style: RopeStyle::Neox,
    })
}

fn scaling(rope: &JsonObject, config: &JsonObject) -> Result<RopeScaling, FormatError> {
    let kind = match rope.optional::<&str>("rope_type")? {
        Some(kind) => kind,
        None => rope.optional::<&str>("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::None),
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

fn yarn_attention_factor(rope: &JsonObject, factor: f32) -> Result<f32, FormatError> {
    if let Some(given) = rope.optional("attention_factor")? {
        return Ok(given);
    }
    let mscale = |m: f32| if factor > 1.0 { 0.1 * m * factor.ln() + 1.0 } else { 1.0 };
    let (one, all) = (rope.optional("mscale")?, rope.optional("mscale_all_dim")?);
    Ok(match (one, all) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(one) / mscale(all),
        _ => Yarn::recommended_attention_factor(factor),
    })
}
