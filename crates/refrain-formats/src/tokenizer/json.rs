//! Structure of `tokenizer.json` and `tokenizer_config.json`.
//!
//! The `tokenizers` crate has a reader too, but it panics on some damaged files.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use tokenizers::AddedToken;

use crate::chat::ChatTemplate;

/// `tokenizer.json`.
#[derive(Deserialize)]
pub(super) struct TokenizerJson {
    pub(super) model: ModelJson,
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedWithId>,
    #[serde(default)]
    pub(super) normalizer: Json,
    #[serde(default)]
    pub(super) pre_tokenizer: Json,
    #[serde(default)]
    pub(super) post_processor: Json,
    #[serde(default)]
    pub(super) decoder: Json,
}

#[derive(Deserialize)]
pub(super) struct ModelJson {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) vocab: Vocab,
    pub(super) merges: Option<Vec<Merge>>,
    pub(super) unk_token: Option<String>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    pub(super) max_input_chars_per_word: Option<usize>,
    pub(super) fuse_unk: Option<bool>,
    pub(super) byte_fallback: Option<bool>,
    pub(super) ignore_merges: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct AddedWithId {
    pub(super) id: u32,
    #[serde(flatten)]
    pub(super) token: AddedToken,
}

/// Two tokens, as a pair or separated by a space.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Line(String),
    Pair(String, String),
}

impl Merge {
    pub(super) fn split(&self) -> Option<(&str, &str)> {
        match self {
            Self::Line(line) => line.split_once(' '),
            Self::Pair(left, right) => Some((left, right)),
        }
    }
}

/// Ids by text; empty if the file has a list (Unigram).
#[derive(Default)]
pub(super) struct Vocab(pub(super) HashMap<String, u32>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = Vocab;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
        let mut ids = HashMap::new();
        while let Some((text, id)) = map.next_entry()? {
            ids.insert(text, id);
        }
        Ok(Vocab(ids))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Vocab::default())
    }
}

/// The used keys of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
pub(super) struct Config {
    pub(super) bos_token: Option<TokenText>,
    pub(super) eos_token: Option<TokenText>,
    pub(super) unk_token: Option<TokenText>,
    pub(super) pad_token: Option<TokenText>,
    pub(super) sep_token: Option<TokenText>,
    pub(super) cls_token: Option<TokenText>,
    pub(super) mask_token: Option<TokenText>,
    pub(super) add_bos_token: Option<bool>,
    pub(super) add_eos_token: Option<bool>,
    pub(super) chat_template: Option<Template>,
}

/// A token's text, plain or with settings.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum TokenText {
    Plain(String),
    Settings { content: String },
}

impl TokenText {
    pub(super) fn get(&self) -> &str {
        match self {
            Self::Plain(text) | Self::Settings { content: text } => text,
        }
    }
}

/// One template, or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Template {
    Source(String),
    Named(Vec<NamedTemplate>),
    /// Something else. It spoils only chats, so it must not spoil the tokenizer.
    Other(IgnoredAny),
}

#[derive(Deserialize)]
pub(super) struct NamedTemplate {
    name: String,
    template: String,
}

impl Template {
    pub(super) fn into_source(self) -> Option<String> {
        match self {
            Self::Source(source) => Some(source),
            Self::Other(_) => {
                Some(ChatTemplate::unusable("chat_template is neither a text nor a list of named texts"))
            }
            Self::Named(all) => all.into_iter().find(|one| one.name == "default").map(|one| one.template),
        }
    }
}
