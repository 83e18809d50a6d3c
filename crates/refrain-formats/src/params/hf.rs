//! Hyperparameters from `config.json`.

use super::rope::{Rope, RopeScaling, RopeStyle, Yarn};
use super::{Activation, Arch, LayerAttention, ModelConfig, ParamsFault};
use super::{checked_layers, default_head_dim, every_nth_full};
use crate::FormatError;
use crate::hf::{HfFolder, JsonObject};

/// What differs between the models that `config.json` can name; several of them are one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
}

impl Family {
    const ALL: [Family; 5] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Gemma3];

    /// The entry of `architectures` and the `model_type`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Mistral => ("MistralForCausalLM", "mistral"),
            Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
        }
    }

    fn arch(self) -> Arch {
        match self {
            Family::Llama | Family::Mistral => Arch::Llama,
            Family::Qwen2 => Arch::Qwen2,
            Family::Qwen3 => Arch::Qwen3,
            Family::Gemma3 => Arch::Gemma3,
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

    /// Reads a `config.json`. Sizes must be there; for the rest the defaults are those of `transformers`.
    pub fn from_hf_config(json: &JsonObject) -> Result<ModelConfig, FormatError> {
        let family = Family::of(json)?;
        let blame = |fault| FormatError::params(json.path(), fault);
        let gemma = family == Family::Gemma3;
        let n_layers = checked_layers(json.required("num_hidden_layers")?).map_err(blame)?;
        let hidden = json.required("hidden_size")?;
        let n_heads = json.required("num_attention_heads")?;
        let head_dim = match json.optional("head_dim")? {
            Some(dim) => dim,
            None if gemma => 256,
            None if family == Family::Qwen3 => 128,
            None => default_head_dim(hidden, n_heads).map_err(blame)?,
        };
        if json.optional("use_bidirectional_attention")?.unwrap_or(false) {
            return Err(blame(ParamsFault::Unsupported { what: "attention to later tokens" }));
        }
        let (sliding_window, layers) = sliding(json, family, n_layers)?;
        let attention_bias = json.optional("attention_bias")?.unwrap_or(false);
        let query_scalar = json.optional("query_pre_attn_scalar")?.filter(|_| gemma);
        let config = ModelConfig {
            arch: family.arch(),
            name: json.optional::<&str>("_name_or_path")?.filter(|n| !n.is_empty()).map(str::to_owned),
            n_vocab: json.required("vocab_size")?,
            n_layers,
            hidden,
            ffn: json.required("intermediate_size")?,
            n_heads,
            n_kv_heads: json.optional("num_key_value_heads")?.unwrap_or(n_heads),
            head_dim,
            norm_eps: json.optional("rms_norm_eps")?.unwrap_or(1e-6),
            norm_offset: if gemma { 1.0 } else { 0.0 },
            activation: activation(json, family)?,
            rope: rope(json, family, head_dim)?,
            sliding_window,
            layers,
            n_context: json.required("max_position_embeddings")?,
            tied_embeddings: json.optional("tie_word_embeddings")?.unwrap_or(gemma),
            qkv_bias: attention_bias || family == Family::Qwen2,
            attn_output_bias: attention_bias && family != Family::Qwen2,
            ffn_bias: json.optional("mlp_bias")?.unwrap_or(false),
            qk_norm: matches!(family, Family::Qwen3 | Family::Gemma3),
            attn_scale: query_scalar.unwrap_or(head_dim as f32).sqrt().recip(),
            attn_softcap: json.optional("attn_logit_softcapping")?,
            final_softcap: json.optional("final_logit_softcapping")?,
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            bos: json.optional::<Vec<u32>>("bos_token_id")?.and_then(|ids| ids.first().copied()),
            eos: json.optional("eos_token_id")?.unwrap_or_default(),
        };
        config.validate().map_err(blame)
    }
}

fn activation(json: &JsonObject, family: Family) -> Result<Activation, FormatError> {
    let found = match json.optional::<&str>("hidden_activation")? {
        Some(name) => Some(name),
        None => json.optional::<&str>("hidden_act")?,
    };
    match (family, found) {
        (Family::Gemma3, None | Some("gelu_pytorch_tanh")) => Ok(Activation::GeluTanh),
        (Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3, None | Some("silu" | "swish")) => {
            Ok(Activation::Silu)
        }
        (family, Some(found)) => {
            let expected = if family == Family::Gemma3 { "gelu_pytorch_tanh" } else { "silu" };
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
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    let disabled = qwen && !json.optional("use_sliding_window")?.unwrap_or(false);
    // A missing key means the default of these two families, `null` means none.
    let has_default = matches!(family, Family::Mistral | Family::Gemma3);
    let window = match json.optional("sliding_window")? {
        _ if disabled || family == Family::Llama => None,
        None if has_default && !json.map().contains_key("sliding_window") => Some(4096),
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
        let layers = types.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
        let slides = layers.contains(&LayerAttention::Sliding);
        return Ok((window.filter(|_| slides), layers));
    }
    if window.is_none() {
        return Ok((None, full));
    }
    let layers = match family {
        Family::Gemma3 => {
            let period =
                json.optional("sliding_window_pattern")?.or(json.optional("_sliding_window_pattern")?);
            every_nth_full(n_layers, period.unwrap_or(6))
        }
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
fn rope(json: &JsonObject, family: Family, head_dim: usize) -> Result<Rope, FormatError> {
    let gemma = family == Family::Gemma3;
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
    Ok(Rope {
        theta: theta.unwrap_or(if gemma { 1e6 } else { 1e4 }),
        local_theta: local_theta.or(local_default).filter(|_| gemma),
        scaling: scaling_json.map_or(Ok(RopeScaling::None), |s| scaling(&s, json))?,
        has_freq_factors: false,
        dims: partial.map_or(head_dim, |p| (head_dim as f32 * p) as usize),
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
