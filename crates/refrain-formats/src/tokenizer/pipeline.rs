//! Text to ids with the `tokenizers` crate.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::TrainerWrapper;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Token, TokenizerImpl,
};

use super::error::TokenizerError;
use super::pieces::CHARS;
use super::scored::ScoredPieces;

/// Model that turns a word into ids.
#[derive(Debug)]
pub(super) enum TextModel {
    /// Merges or longest match.
    Library(ModelWrapper),
    /// Scores.
    Scored(ScoredPieces),
}

/// A model shared by two pipelines. The set of parsed control texts cannot change per call, and a second copy of a large
/// vocabulary would take a hundred megabytes.
#[derive(Debug, Clone)]
struct SharedModel(Arc<TextModel>);

/// Calls a method of either model.
macro_rules! of_model {
    ($model:expr, $method:ident ( $($arg:expr),* )) => {
        match &*$model.0 {
            TextModel::Library(model) => model.$method($($arg),*),
            TextModel::Scored(model) => model.$method($($arg),*),
        }
    };
}

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        of_model!(self, tokenize(sequence))
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        of_model!(self, token_to_id(token))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        of_model!(self, id_to_token(id))
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        of_model!(self, get_vocab())
    }

    fn get_vocab_size(&self) -> usize {
        of_model!(self, get_vocab_size())
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        of_model!(self, save(folder, prefix))
    }

    fn get_trainer(&self) -> TrainerWrapper {
        of_model!(self, get_trainer())
    }
}

type Pipeline =
    TokenizerImpl<SharedModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Parts of a pipeline.
pub(super) struct PipelineParts {
    pub(super) model: TextModel,
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Tokens that are matched anywhere in a text; special ones only if control texts are parsed.
    pub(super) added: Vec<AddedToken>,
    /// The model spells bytes as GPT-2 does and drops bytes without a token.
    pub(super) is_byte_level: bool,
}

/// Two pipelines: with and without parsing of control texts.
#[derive(Debug)]
pub(super) struct Pipelines {
    with_control: Pipeline,
    without_control: Pipeline,
    missing_bytes: Option<Box<[bool; 256]>>, // bytes without a token
}

impl Pipelines {
    pub(super) fn new(parts: PipelineParts) -> Result<Self, TokenizerError> {
        let missing_bytes = match &parts.model {
            TextModel::Library(model) if parts.is_byte_level => missing_bytes(model),
            TextModel::Library(_) | TextModel::Scored(_) => None,
        };
        let model = SharedModel(Arc::new(parts.model));
        let build = |added: Vec<AddedToken>| -> Result<Pipeline, TokenizerError> {
            let mut pipeline = Pipeline::new(model.clone());
            pipeline
                .with_normalizer(parts.normalizer.clone())
                .map_err(TokenizerError::library("set the normalizer"))?
                .with_pre_tokenizer(parts.pre_tokenizer.clone());
            pipeline.add_tokens(added).map_err(TokenizerError::library("add tokens"))?;
            Ok(pipeline)
        };
        let ordinary = parts.added.iter().filter(|token| !token.special).cloned().collect();
        Ok(Self { with_control: build(parts.added)?, without_control: build(ordinary)?, missing_bytes })
    }

    pub(super) fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizerError> {
        if let Some(missing) = &self.missing_bytes
            && let Some(offset) = text.bytes().position(|byte| missing[byte as usize])
        {
            // Dropped, as in other implementations: a stray control character must not abort a program.
            tracing::warn!(
                "dropping byte 0x{:02x} at offset {offset}: the vocabulary has no token for it",
                text.as_bytes()[offset]
            );
        }
        let pipeline = if parse_special { &self.with_control } else { &self.without_control };
        let encoding =
            pipeline.encode_fast(text, false).map_err(TokenizerError::library("tokenize the text"))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.with_control.token_to_id(text)
    }
}

fn missing_bytes(model: &ModelWrapper) -> Option<Box<[bool; 256]>> {
    if let ModelWrapper::BPE(bpe) = model
        && bpe.get_unk_token().is_some()
    {
        return None;
    }
    let missing = Box::new(CHARS.map(|c| model.token_to_id(c.encode_utf8(&mut [0; 4])).is_none()));
    missing.contains(&true).then_some(missing)
}
