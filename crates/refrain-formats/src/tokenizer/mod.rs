//! Tokenizers: text to token ids and back.
//!
//! The `tokenizers` crate does the encoding. This module builds its pipelines from the vocabulary of a GGUF file or from
//! the files of a Hugging Face folder, tracks special tokens, and decodes ids as they stream.

mod build; // pipelines from a vocabulary
mod error; // errors
mod files; // pipelines from tokenizer.json
mod form; // conversion between file formats
mod json; // structure of tokenizer.json
pub mod long; // texts of any length
mod pieces; // bytes of every token
mod pipeline; // text to ids
mod pre; // pre-tokenizers
mod scored; // text to ids by scores (SentencePiece)
mod spec; // a vocabulary as data
mod stream; // ids to text
mod summary; // kind and size of a vocabulary

use std::sync::Arc;

pub use error::TokenizerError;
pub use form::{TokenizerFiles, TokenizerForm};
pub use long::LongEncoder;
pub use pre::known_pre_tokenizers;
pub use spec::{SpecialIds, TokenKind, VocabSpec};
pub use stream::DecodeStream;
pub use summary::TokenizerSummary;

use crate::chat::SpecialTexts;
use crate::gguf::Metadata;
use pieces::PieceTable;
use pipeline::Pipelines;

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    pipelines: Pipelines,
    pieces: Arc<PieceTable>,
    specials: SpecialIds,
    prefix: Vec<u32>,  // ids before a text, such as BOS
    suffix: Vec<u32>,  // ids after a text
    end_ids: Vec<u32>, // sorted
    chat_template: Option<String>,
}

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        Self::from_spec(&VocabSpec::from_gguf(metadata)?)
    }

    /// Builds the tokenizer of a vocabulary.
    pub fn from_spec(spec: &VocabSpec) -> Result<Self, TokenizerError> {
        build::tokenizer(spec)
    }

    /// Builds the tokenizer of a Hugging Face folder from the contents of `tokenizer.json` and `tokenizer_config.json`.
    pub fn from_files(tokenizer_json: &[u8], config_json: Option<&[u8]>) -> Result<Self, TokenizerError> {
        files::tokenizer(tokenizer_json, config_json)
    }

    /// Encodes a text.
    ///
    /// `add_special` adds BOS and similar tokens if the model uses them. `parse_special` turns texts such as
    /// `<|im_end|>` into control tokens; leave it off for users' text, so that it stays text.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.pipelines.encode(text, parse_special)?;
        if !add_special || (self.prefix.is_empty() && self.suffix.is_empty()) {
            return Ok(ids);
        }
        Ok([self.prefix.as_slice(), &ids, &self.suffix].concat())
    }

    /// Encodes a text like [`encode`](Self::encode), in parts and on all cores.
    ///
    /// The ids are the same unless [`LongEncoder::n_forced`] counts splits, and memory is bounded.
    pub fn encode_long<'a>(
        &'a self,
        text: &'a str,
        add_special: bool,
        parse_special: bool,
    ) -> LongEncoder<'a> {
        let encoder = LongEncoder::new(self, text, parse_special);
        match add_special {
            true => encoder.with_special(&self.prefix, &self.suffix),
            false => encoder,
        }
    }

    /// Encodes a text with the special tokens around it, cut to `max_tokens`: the last tokens of the text are dropped,
    /// special tokens are kept. Returns how many were dropped.
    pub fn encode_cut(&self, text: &str, max_tokens: usize) -> Result<(Vec<u32>, usize), TokenizerError> {
        let mut ids = self.encode(text, true, false)?;
        let n_cut = ids.len().saturating_sub(max_tokens);
        if n_cut > 0 {
            let end = ids.len() - self.suffix.len();
            ids.drain(end.saturating_sub(n_cut)..end);
            ids.truncate(max_tokens);
        }
        Ok((ids, n_cut))
    }

    /// Encodes a rendered chat template. Control texts become tokens, and BOS is added if the model uses it and the
    /// template has not.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode(rendered, false, true)?;
        match self.specials.bos {
            Some(bos) if self.add_bos() && ids.first() != Some(&bos) => Ok([&[bos], ids.as_slice()].concat()),
            _ => Ok(ids),
        }
    }

    /// Decodes ids without control tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_by(DecodeStream::new(self.pieces.clone(), self.pieces.space_in_front(), false), ids)
    }

    /// Decodes ids including control tokens.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_by(DecodeStream::new(self.pieces.clone(), self.pieces.space_in_front(), true), ids)
    }

    fn decode_by(&self, mut stream: DecodeStream, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut text = String::new();
        for &id in ids {
            if id as usize >= self.vocab_size() {
                return Err(TokenizerError::UnknownId { id, n_tokens: self.vocab_size() });
            }
            text.push_str(stream.push(id));
        }
        text.push_str(stream.finish());
        Ok(text)
    }

    /// Returns a decoder for generated ids, without control tokens.
    pub fn stream(&self) -> DecodeStream {
        DecodeStream::new(self.pieces.clone(), false, false)
    }

    /// Like [`Tokenizer::stream`], including control tokens.
    pub fn stream_with_special(&self) -> DecodeStream {
        DecodeStream::new(self.pieces.clone(), false, true)
    }

    /// Returns the bytes of a token, which may be an incomplete character.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.pieces.bytes(id)
    }

    /// Returns the kind of a token.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.pieces.kind(id)
    }

    /// Returns the id of a token by its text in the vocabulary, such as `<|im_end|>`.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.pipelines.token_id(text)
    }

    /// Returns the number of ids.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The special tokens.
    pub fn specials(&self) -> &SpecialIds {
        &self.specials
    }

    /// Beginning-of-text token.
    pub fn bos(&self) -> Option<u32> {
        self.specials.bos
    }

    /// End-of-text token.
    pub fn eos(&self) -> Option<u32> {
        self.specials.eos
    }

    /// Returns whether `add_special` prepends BOS.
    pub fn add_bos(&self) -> bool {
        self.specials.bos.is_some_and(|bos| self.prefix.first() == Some(&bos))
    }

    /// The sorted ids that end generation: end of text, turn and message.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_ids
    }

    /// Returns whether an id ends generation.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_ids.binary_search(&id).is_ok()
    }

    /// Adds ids that end generation, such as those of `generation_config.json`. Unknown ids are ignored.
    pub fn add_end_of_generation(&mut self, ids: &[u32]) {
        self.end_ids.extend(ids.iter().filter(|&&id| (id as usize) < self.pieces.len()));
        self.end_ids.sort_unstable();
        self.end_ids.dedup();
    }

    /// The chat template stored with the vocabulary.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the texts of special tokens for the chat template.
    pub fn special_texts(&self) -> SpecialTexts {
        let text = |id: Option<u32>| id.and_then(|id| self.pieces.text(id));
        SpecialTexts {
            bos: text(self.specials.bos),
            eos: text(self.specials.eos),
            unk: text(self.specials.unk),
            pad: text(self.specials.pad),
        }
    }
}
