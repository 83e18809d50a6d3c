//! Sampling settings that the authors of a model recommend.

use super::gguf::end_tokens;
use crate::FormatError;
use crate::gguf::Metadata;
use crate::hf::HfFolder;

/// Recommended sampling settings. `None` where the files have none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to sample; `Some(false)` means greedy decoding.
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to sample from.
    pub top_k: Option<usize>,
    /// Cumulative probability of the most likely tokens to sample from.
    pub top_p: Option<f32>,
    /// Minimum probability of a token, relative to the most likely one.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens that have appeared.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end the reply.
    pub eos: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads the `general.sampling.*` keys.
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
        Ok(defaults.in_range())
    }

    /// Reads `generation_config.json`.
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
        Ok(defaults.in_range())
    }

    /// Drops and logs values that are out of range: a bad recommendation is no reason to refuse a model.
    fn in_range(self) -> GenerationDefaults {
        let keep = |name, value: Option<f32>, low: f32, high: f32| {
            value.filter(|v| {
                let fits = (low..=high).contains(v);
                if !fits {
                    tracing::warn!(
                        name,
                        value = v,
                        low,
                        high,
                        "ignoring a recommended value that is out of range"
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
