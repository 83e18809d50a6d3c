//! Kind and size of a vocabulary, without building a tokenizer.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

use super::build::check_model;
use super::error::TokenizerError;
use super::files::{CONFIG, JSON, parse};
use super::json::Config;
use super::pre::Pre;
use super::spec::VocabSpec;
use crate::gguf::Metadata;

/// Kind and size of a vocabulary. Token texts, merges and patterns are not checked, so it also works on broken ones.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenizerSummary {
    /// Kind of tokenizer, as named in the files.
    pub kind: String,
    /// Number of ids.
    pub n_tokens: usize,
    /// Whether it includes a chat template.
    pub has_chat_template: bool,
}

impl TokenizerSummary {
    /// Summarises the vocabulary of a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let spec = VocabSpec::from_gguf(metadata)?;
        spec.check_sizes()?;
        check_model(&spec.model)?;
        if spec.model == "gpt2" {
            Pre::by_name(spec.pre.as_deref())?;
        }
        let kind = match spec.pre {
            Some(pre) => format!("{} ({pre})", spec.model),
            None => spec.model,
        };
        let has_chat_template = spec.chat_template.is_some();
        Ok(Self { kind, n_tokens: spec.tokens.len(), has_chat_template })
    }

    /// Summarises `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder.
    pub fn from_files(tokenizer_json: &[u8], config_json: Option<&[u8]>) -> Result<Self, TokenizerError> {
        let file: Outline = parse(JSON, tokenizer_json)?;
        let config: Config = config_json.map(|bytes| parse(CONFIG, bytes)).transpose()?.unwrap_or_default();
        let added = file.added_tokens.iter().map(|added| added.id as usize + 1).max();
        let n_tokens = file.model.vocab.0.max(added.unwrap_or(0));
        if n_tokens == 0 {
            return Err(TokenizerError::Missing { what: "any token" });
        }
        let kind = file.model.kind.unwrap_or_else(|| "unknown kind".to_owned());
        let has_chat_template = config.chat_template.and_then(|template| template.into_source()).is_some();
        Ok(Self { kind, n_tokens, has_chat_template })
    }
}

/// The parts of `tokenizer.json` that a summary needs.
#[derive(Deserialize)]
struct Outline {
    model: ModelOutline,
    #[serde(default)]
    added_tokens: Vec<AddedId>,
}

#[derive(Deserialize)]
struct ModelOutline {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: VocabSize,
}

#[derive(Deserialize)]
struct AddedId {
    id: u32,
}

/// The highest id plus one.
struct VocabSize(usize);

impl<'de> Deserialize<'de> for VocabSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

struct SizeVisitor;

impl<'de> Visitor<'de> for SizeVisitor {
    type Value = VocabSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabSize, A::Error> {
        let mut n_tokens = 0;
        while let Some((_, id)) = map.next_entry::<IgnoredAny, u32>()? {
            n_tokens = n_tokens.max(id as usize + 1);
        }
        Ok(VocabSize(n_tokens))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<VocabSize, A::Error> {
        let mut n_tokens = 0;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            n_tokens += 1;
        }
        Ok(VocabSize(n_tokens))
    }
}
