//! How a model's token vectors become the vector of a text.

use super::ParamsFault;
use crate::FormatError;
use crate::gguf::Metadata;
use crate::hf::{HfFolder, JsonObject};
use std::fmt;

/// How the vector of a text follows from those of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The mean over all tokens.
    Mean,
    /// The vector of the first token, `[CLS]`.
    Cls,
    /// The vector of the last token.
    Last,
}

impl Pooling {
    /// Every pooling.
    pub const ALL: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Recommended embedding settings. `None` where the files have none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EmbeddingDefaults {
    /// How tokens are pooled.
    pub pooling: Option<Pooling>,
    /// Maximum number of tokens of a text, including special tokens.
    pub max_tokens: Option<usize>,
}

impl EmbeddingDefaults {
    /// Reads `pooling_type` of the architecture.
    pub fn from_gguf(meta: &Metadata) -> Result<EmbeddingDefaults, FormatError> {
        let arch = meta.str("general.architecture")?;
        let pooling = match meta.optional::<u32>(&format!("{arch}.pooling_type"))? {
            None | Some(0) => None,
            Some(1) => Some(Pooling::Mean),
            Some(2) => Some(Pooling::Cls),
            Some(3) => Some(Pooling::Last),
            Some(_) => return Err(FormatError::params(meta.file(), unsupported(RANKING))),
        };
        Ok(EmbeddingDefaults { pooling, max_tokens: None })
    }

    /// Reads the files of sentence-transformers: `modules.json`, the configuration of the pooling module that it names
    /// (`1_Pooling` without the file), and the maximum length in `sentence_bert_config.json`.
    pub fn from_hf(folder: &HfFolder) -> Result<EmbeddingDefaults, FormatError> {
        if let Some(path) = folder.file("modules.json") {
            let modules = JsonObject::read_list(&path)?;
            for module in &modules {
                let kind = module.optional::<&str>("type")?.unwrap_or_default();
                let kind = kind.rsplit('.').next().unwrap_or_default();
                if !matches!(kind, "Transformer" | "Pooling" | "Normalize") {
                    return Err(FormatError::params(&path, unsupported(MODULE)));
                }
            }
        }
        let pooling = match folder.file("1_Pooling/config.json") {
            Some(path) => Some(pooling(&JsonObject::read(&path)?)?),
            None => None,
        };
        let max_tokens = match folder.file("sentence_bert_config.json") {
            Some(path) => JsonObject::read(&path)?.optional("max_seq_length")?.filter(|&n: &usize| n > 0),
            None => None,
        };
        Ok(EmbeddingDefaults { pooling, max_tokens })
    }
}

const RANKING: &str = "a model that ranks pairs of texts";
const MODULE: &str =
    "a sentence-transformers model with modules besides transformer, pooling and normalisation";
const POOLING: &str = "pooling other than by mean, first or last token";

fn unsupported(what: &'static str) -> ParamsFault {
    ParamsFault::Unsupported { what }
}

/// Exactly one mode must be on: several would be concatenated.
fn pooling(json: &JsonObject) -> Result<Pooling, FormatError> {
    let modes = [
        ("pooling_mode_mean_tokens", Pooling::Mean),
        ("pooling_mode_cls_token", Pooling::Cls),
        ("pooling_mode_lasttoken", Pooling::Last),
    ];
    let refuse = || FormatError::params(json.path(), unsupported(POOLING));
    // Newer files name the mode.
    if let Some(name) = json.optional::<&str>("pooling_mode")? {
        return Pooling::ALL
            .into_iter()
            .find(|p| p.name() == name.trim_end_matches("token"))
            .ok_or_else(refuse);
    }
    let others = ["max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"];
    let mut found = None;
    let mut n_on = 0;
    for (key, mode) in modes {
        if json.optional(key)?.unwrap_or(false) {
            (found, n_on) = (Some(mode), n_on + 1);
        }
    }
    for key in others {
        n_on += usize::from(json.optional(&format!("pooling_mode_{key}"))?.unwrap_or(false));
    }
    found.filter(|_| n_on == 1).ok_or_else(refuse)
}
