//! A vocabulary as data, in the form of GGUF files.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::error::{TokenizerError, excerpt};
use crate::FormatError;
use crate::gguf::{Array, FromValue, GgufWriter, Metadata, MetadataValue, StrArray};

/// Limit on the length of a token, above any in use. Merging is quadratic in it.
pub(super) const MAX_TOKEN_BYTES: usize = 4096;
/// Limit on the number of ids, ten times the largest vocabulary in use.
pub(super) const MAX_TOKENS: usize = 1 << 22;

/// Kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Replaces text without a token.
    Unknown,
    /// Control token, never part of users' text.
    Control,
    /// Added text, matched before anything else.
    UserDefined,
    /// Placeholder.
    Unused,
    /// One byte of a character without a token.
    Byte,
}

impl TokenKind {
    fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 | 1 => Self::Normal, // 0 is "undefined", written by early converters
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Returns GGUF's number of this kind.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Normal => 1,
            Self::Unknown => 2,
            Self::Control => 3,
            Self::UserDefined => 4,
            Self::Unused => 5,
            Self::Byte => 6,
        }
    }
}

/// Ids of the special tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the roles.
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>, // end of turn
    pub eom: Option<u32>, // end of message
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub sep: Option<u32>,
    pub cls: Option<u32>,
    pub mask: Option<u32>,
}

impl SpecialIds {
    fn named(&self) -> [(&'static str, Option<u32>); 9] {
        [
            ("bos", self.bos),
            ("eos", self.eos),
            ("eot", self.eot),
            ("eom", self.eom),
            ("unknown", self.unk),
            ("padding", self.pad),
            ("separator", self.sep),
            ("cls", self.cls),
            ("mask", self.mask),
        ]
    }
}

/// A vocabulary and its settings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VocabSpec {
    /// Kind of tokenizer: `gpt2`, `llama`, `bert` or `gemma4`.
    pub model: String,
    /// Pre-tokenizer of a byte-level vocabulary.
    pub pre: Option<String>,
    /// Texts by id.
    pub tokens: StrArray,
    /// Scores by id (SentencePiece).
    pub scores: Option<Vec<f32>>,
    /// GGUF's token types by id; all normal if absent.
    pub token_types: Option<Vec<i32>>,
    /// Merges in order, two tokens separated by a space (byte-level, and `gemma4`).
    pub merges: Option<StrArray>,
    /// Special tokens.
    pub specials: SpecialIds,
    /// Prepend BOS; depends on the kind if absent.
    pub add_bos: Option<bool>,
    /// Append EOS; no if absent.
    pub add_eos: Option<bool>,
    /// Append the separator; depends on the kind if absent.
    pub add_sep: Option<bool>,
    /// Prepend a space (SentencePiece); yes if absent.
    pub add_space_prefix: Option<bool>,
    /// Lower-case the text (WordPiece); yes if absent.
    pub lowercase: Option<bool>,
    /// Strip accents (WordPiece); same as `lowercase` if absent.
    pub strip_accents: Option<bool>,
    /// The model's chat template.
    pub chat_template: Option<String>,
}

impl VocabSpec {
    /// Reads the `tokenizer.*` keys of a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let reader = SpecReader(metadata);
        let model: &str =
            reader.get("model")?.ok_or(TokenizerError::Missing { what: "tokenizer.ggml.model" })?;
        let tokens: &StrArray =
            reader.get("tokens")?.ok_or(TokenizerError::Missing { what: "tokenizer.ggml.tokens" })?;
        let template: Option<&str> = metadata.optional("tokenizer.chat_template").map_err(Box::new)?;
        Ok(Self {
            model: model.to_owned(),
            pre: reader.get::<&str>("pre")?.map(str::to_owned),
            tokens: tokens.clone(),
            scores: reader.get::<std::borrow::Cow<'_, [f32]>>("scores")?.map(|v| v.into_owned()),
            token_types: reader.get::<std::borrow::Cow<'_, [i32]>>("token_type")?.map(|v| v.into_owned()),
            merges: reader.get::<&StrArray>("merges")?.cloned(),
            specials: SpecialIds {
                bos: reader.get("bos_token_id")?,
                eos: reader.get("eos_token_id")?,
                eot: reader.get("eot_token_id")?,
                eom: reader.get("eom_token_id")?,
                unk: reader.get("unknown_token_id")?,
                pad: reader.get("padding_token_id")?,
                sep: reader.get("seperator_token_id")?, // misspelled in the format
                cls: reader.get("cls_token_id")?,
                mask: reader.get("mask_token_id")?,
            },
            add_bos: reader.get("add_bos_token")?,
            add_eos: reader.get("add_eos_token")?,
            add_sep: reader.get("add_sep_token")?,
            add_space_prefix: reader.get("add_space_prefix")?,
            lowercase: reader.get("normalizer.lowercase")?,
            strip_accents: reader.get("normalizer.strip_accents")?,
            chat_template: template.map(str::to_owned),
        })
    }

    /// Writes the `tokenizer.*` keys of a GGUF file. A model with more rows than the vocabulary has tokens gets place
    /// holders for the rest, as llama.cpp wants it.
    pub fn write_gguf(&self, writer: &mut GgufWriter, n_vocab: usize) -> Result<(), FormatError> {
        const UNUSED: i32 = 5;
        let n_tokens = self.tokens.len();
        let holders: Vec<String> = (n_tokens..n_vocab).map(|id| format!("[PAD{id}]")).collect();
        let mut set = |key: &str, value: Option<MetadataValue>| match value {
            Some(value) => writer.set(&format!("tokenizer.ggml.{key}"), value).map(drop),
            None => Ok(()),
        };
        set("model", Some(self.model.as_str().into()))?;
        set("pre", self.pre.as_deref().map(Into::into))?;
        let tokens: StrArray = self.tokens.iter().chain(holders.iter().map(String::as_str)).collect();
        set("tokens", Some(tokens.into()))?;
        let padded = |scores: &Vec<f32>| {
            let rest = std::iter::repeat_n(0.0, holders.len());
            MetadataValue::Array(Array::F32(scores.iter().copied().chain(rest).collect()))
        };
        set("scores", self.scores.as_ref().map(padded))?;
        let types = self.token_types.clone().unwrap_or_else(|| vec![1; n_tokens]);
        let types = types.into_iter().chain(std::iter::repeat_n(UNUSED, holders.len())).collect();
        set("token_type", Some(MetadataValue::Array(Array::I32(types))))?;
        set("merges", self.merges.clone().map(Into::into))?;
        let ids = [
            ("bos_token_id", self.specials.bos),
            ("eos_token_id", self.specials.eos),
            ("eot_token_id", self.specials.eot),
            ("eom_token_id", self.specials.eom),
            ("unknown_token_id", self.specials.unk),
            ("padding_token_id", self.specials.pad),
            ("seperator_token_id", self.specials.sep), // misspelled in the format
            ("cls_token_id", self.specials.cls),
            ("mask_token_id", self.specials.mask),
        ];
        for (key, id) in ids {
            set(key, id.map(Into::into))?;
        }
        let flags = [
            ("add_bos_token", self.add_bos),
            ("add_eos_token", self.add_eos),
            ("add_sep_token", self.add_sep),
            ("add_space_prefix", self.add_space_prefix),
            ("normalizer.lowercase", self.lowercase),
            ("normalizer.strip_accents", self.strip_accents),
        ];
        for (key, flag) in flags {
            set(key, flag.map(Into::into))?;
        }
        match &self.chat_template {
            Some(template) => writer.set("tokenizer.chat_template", template.as_str()).map(drop),
            None => Ok(()),
        }
    }

    /// Checks the lengths of the lists and the ids of special tokens.
    pub(super) fn check_sizes(&self) -> Result<(), TokenizerError> {
        let n_tokens = self.tokens.len();
        if n_tokens == 0 {
            return Err(TokenizerError::Missing { what: "any token" });
        }
        if n_tokens > MAX_TOKENS {
            return Err(TokenizerError::TooManyTokens { n_tokens, limit: MAX_TOKENS });
        }
        let lengths = [
            ("scores", self.scores.as_ref().map(Vec::len)),
            ("token types", self.token_types.as_ref().map(Vec::len)),
        ];
        for (what, length) in lengths {
            if let Some(n_found) = length.filter(|&n| n != n_tokens) {
                return Err(TokenizerError::LengthMismatch { what, n_found, n_tokens });
            }
        }
        for (what, id) in self.specials.named() {
            if let Some(id) = id.filter(|&id| id as usize >= n_tokens) {
                return Err(TokenizerError::SpecialOutside { what, id, n_tokens });
            }
        }
        Ok(())
    }

    /// Checks everything that does not depend on the kind of tokenizer.
    pub(super) fn check(&self) -> Result<Vocabulary<'_>, TokenizerError> {
        self.check_sizes()?;
        let n_tokens = self.tokens.len();
        let mut kinds = Vec::with_capacity(n_tokens);
        let mut ids = TextIndex::with_capacity(n_tokens);
        for (id, text) in self.tokens.iter().enumerate() {
            if text.len() > MAX_TOKEN_BYTES {
                return Err(TokenizerError::TokenTooLong { id, len: text.len(), limit: MAX_TOKEN_BYTES });
            }
            let number = self.token_types.as_ref().map_or(1, |types| types[id]);
            let kind = TokenKind::from_number(number)
                .ok_or(TokenizerError::UnknownTokenType { id, found: number })?;
            // Placeholders without text are common and never match.
            if !text.is_empty()
                && let Err(first) = ids.insert(&self.tokens, id as u32, text)
            {
                let text = excerpt(text);
                return Err(TokenizerError::DuplicateToken { text, first: first as usize, second: id });
            }
            kinds.push(kind);
        }
        Ok(Vocabulary { tokens: &self.tokens, kinds, ids })
    }
}

/// A vocabulary with checked texts, types and special ids.
pub(super) struct Vocabulary<'a> {
    pub(super) tokens: &'a StrArray,
    pub(super) kinds: Vec<TokenKind>,
    pub(super) ids: TextIndex,
}

impl<'a> Vocabulary<'a> {
    /// Returns the text of a valid id.
    pub(super) fn text(&self, id: u32) -> &'a str {
        self.tokens.get(id as usize).unwrap_or_default()
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(self.tokens, text)
    }
}

/// Ids by text. Every call passes the same array of texts, so that a vocabulary is one allocation instead of one per
/// token.
pub(super) struct TextIndex {
    table: HashTable<u32>,
    hasher: RandomState,
}

impl TextIndex {
    fn with_capacity(n_tokens: usize) -> Self {
        Self { table: HashTable::with_capacity(n_tokens), hasher: RandomState::new() }
    }

    /// Adds an id. The error is an earlier id with the same text.
    fn insert(&mut self, tokens: &StrArray, id: u32, text: &str) -> Result<(), u32> {
        let hash_of = |&id: &u32| self.hasher.hash_one(tokens.get(id as usize).unwrap_or_default());
        let is_same = |&other: &u32| tokens.get(other as usize) == Some(text);
        match self.table.entry(self.hasher.hash_one(text), is_same, hash_of) {
            Entry::Occupied(first) => Err(*first.get()),
            Entry::Vacant(slot) => {
                slot.insert(id);
                Ok(())
            }
        }
    }

    pub(super) fn get(&self, tokens: &StrArray, text: &str) -> Option<u32> {
        let is_same = |&id: &u32| tokens.get(id as usize) == Some(text);
        self.table.find(self.hasher.hash_one(text), is_same).copied()
    }
}

struct SpecReader<'a>(&'a Metadata);

impl<'a> SpecReader<'a> {
    fn get<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, TokenizerError> {
        Ok(self.0.optional(&format!("tokenizer.ggml.{key}")).map_err(Box::new)?)
    }
}
