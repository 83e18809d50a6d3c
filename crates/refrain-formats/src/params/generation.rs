//! How the authors of a model want it sampled.

use super::gguf::end_tokens;
use crate::FormatError;
use crate::gguf::Metadata;
use crate::hf::HfFolder;

/// Recommendations that came with the model; `None` where the files say nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to draw tokens at all; `Some(false)` means always the likeliest one.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Only the likeliest so many tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability.
    pub top_p: Option<f32>,
    /// Only tokens at least this likely in proportion to the likeliest.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that appeared before.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end the reply.
    pub eos: Vec<u32>,
}

impl GenerationDefaults {
    /// From the `general.sampling.*` keys.
    pub fn from_gguf(meta: &Metadata) -> Result<GenerationDefaults, FormatError> {
        let key = |name: &str| format!("general.sampling.{name}");
        let defaults = GenerationDefaults {
            do_sample: None,
            temperature: meta.optional(&key("temp"))?,
            // 0 and below mean no limit.
            top_k: meta.optional(&key("top_k"))?.and_then(|k: i64| usize::try_from(k).ok()),
            top_p: meta.optional(&key("top_p"))?,
            min_p: meta.optional(&key("min_p"))?,
            repetition_penalty: meta.optional(&key("penalty_repeat"))?,
            eos: end_tokens(meta)?,
        };
        Ok(defaults.without_nonsense())
    }

    /// From `generation_config.json`.
    pub fn from_hf(folder: &HfFolder) -> Result<GenerationDefaults, FormatError> {
        let config_eos = folder.config().optional("eos_token_id")?;
        let Some(json) = folder.generation_config() else {
            return Ok(GenerationDefaults { eos: config_eos.unwrap_or_default(), ..Default::default() });
        };
        let defaults = GenerationDefaults {
            do_sample: json.optional("do_sample")?,
            temperature: json.optional("temperature")?,
            top_k: json.optional("top_k")?,
            top_p: json.optional("top_p")?,
            min_p: json.optional("min_p")?,
            repetition_penalty: json.optional("repetition_penalty")?,
            eos: json.optional("eos_token_id")?.or(config_eos).unwrap_or_default(),
        };
        Ok(defaults.without_nonsense())
    }

    /// A recommendation out of its range is no reason to refuse a model; it is left out and logged.
    fn without_nonsense(self) -> GenerationDefaults {
        let keep = |name, value: Option<f32>, low: f32, high: f32| {
            value.filter(|v| {
                let fits = (low..=high).contains(v);
                if !fits {
                    tracing::warn!(
                        name,
                        value = v,
                        low,
                        high,
                        "the model recommends a value out of range; ignored"
                    );
                }
                fits
            })
        };
        GenerationDefaults {
            temperature: keep("temperature", self.temperature, 0.0, 100.0),
            top_p: keep("top_p", self.top_p, 0.0, 1.0),
            min_p: keep("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty: keep("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, 100.0),
            ..self
        }
    }
}
