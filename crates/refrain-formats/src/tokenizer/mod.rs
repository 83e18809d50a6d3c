//! Text to token ids and back.
//!
//! The work is done by the `tokenizers` crate. This module turns a GGUF file's vocabulary, or the files of a Hugging
//! Face folder, into its pipelines, knows which tokens are special, and turns ids back into text while they stream.

mod build; // from a vocabulary to pipelines
mod error; // what can go wrong
mod files; // from tokenizer.json and tokenizer_config.json
mod form; // from one form of file to the other
mod json; // the shape of those files
mod pieces; // the bytes of every token
mod pipeline; // text to ids
mod pre; // how words are cut before merging
mod scored; // text to ids by scores, as SentencePiece does it
mod spec; // a vocabulary as data
mod stream; // ids to text
mod summary; // what a vocabulary is, without a tokenizer

use std::sync::Arc;

pub use error::TokenizerError;
pub use form::{TokenizerFiles, TokenizerForm};
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
    prefix: Vec<u32>,  // what goes in front of a text, such as BOS
    suffix: Vec<u32>,  // what goes behind it
    end_ids: Vec<u32>, // sorted
    chat_template: Option<String>,
}

impl Tokenizer {
    /// The tokenizer inside a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        Self::from_spec(&VocabSpec::from_gguf(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    pub fn from_spec(spec: &VocabSpec) -> Result<Self, TokenizerError> {
        build::tokenizer(spec)
    }

    /// The tokenizer of a Hugging Face folder, from the contents of `tokenizer.json` and `tokenizer_config.json`.
    pub fn from_files(tokenizer_json: &[u8], config_json: Option<&[u8]>) -> Result<Self, TokenizerError> {
        files::tokenizer(tokenizer_json, config_json)
    }

    /// The ids of a text.
    ///
    /// With `add_special`, BOS and the like are put around it where the model uses them. With `parse_special`, texts
    /// such as `<|im_end|>` become their control tokens; without, they are text like any other, which is what text
    /// from users needs.
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

    /// The ids of a rendered chat template: control texts become tokens, and BOS is added where the model uses one
    /// and the template has not put it there.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode(rendered, false, true)?;
        match self.specials.bos {
            Some(bos) if self.add_bos() && ids.first() != Some(&bos) => Ok([&[bos], ids.as_slice()].concat()),
            _ => Ok(ids),
        }
    }

    /// The text of a whole sequence of ids, without control tokens; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_by(DecodeStream::new(self.pieces.clone(), self.pieces.space_in_front(), false), ids)
    }

    /// The text of a whole sequence of ids with control tokens written out.
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

    /// A decoder for ids as they are generated after a prompt; control tokens give no text.
    pub fn stream(&self) -> DecodeStream {
        DecodeStream::new(self.pieces.clone(), false, false)
    }

    /// Like [`Tokenizer::stream`], with control tokens written out.
    pub fn stream_with_special(&self) -> DecodeStream {
        DecodeStream::new(self.pieces.clone(), false, true)
    }

    /// The bytes a token stands for; not always whole characters.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.pieces.bytes(id)
    }

    /// What sort of token an id is.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.pieces.kind(id)
    }

    /// The id of a token named by its text in the vocabulary, such as `<|im_end|>`.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.pipelines.token_id(text)
    }

    /// How many ids there are.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The tokens with a role of their own.
    pub fn specials(&self) -> &SpecialIds {
        &self.specials
    }

    /// Begin of text.
    pub fn bos(&self) -> Option<u32> {
        self.specials.bos
    }

    /// End of text.
    pub fn eos(&self) -> Option<u32> {
        self.specials.eos
    }

    /// Whether a text starts with BOS when special tokens are added.
    pub fn add_bos(&self) -> bool {
        self.specials.bos.is_some_and(|bos| self.prefix.first() == Some(&bos))
    }

    /// The ids after which generation ends, sorted: end of text, of turn and of message.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_ids
    }

    /// Whether generation ends with this id.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_ids.binary_search(&id).is_ok()
    }

    /// Adds ids after which generation ends, such as those of `generation_config.json`; unknown ids are ignored.
    pub fn add_end_of_generation(&mut self, ids: &[u32]) {
        self.end_ids.extend(ids.iter().filter(|&&id| (id as usize) < self.pieces.len()));
        self.end_ids.sort_unstable();
        self.end_ids.dedup();
    }

    /// The chat template that came with the vocabulary.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The texts of special tokens, for the chat template.
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
