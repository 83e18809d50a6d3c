//! Speculation: guessed tokens that a model checks several at a time.

use crate::error::Error;
use crate::model::Model;
use refrain_engine::{DraftSource, EngineError, MAX_DRAFT, Speculation};
use refrain_models::{NamedShape, QuantMix};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

/// Where guesses come from.
#[derive(Clone, Debug, Default)]
pub enum GuessSource {
    /// Nothing is guessed.
    #[default]
    None,
    /// What followed the last tokens where they occurred before, in the prompt or in the reply.
    Ngram,
    /// A smaller model with the same vocabulary, on the same device.
    Model(DraftWeights),
}

/// Speculation of a session or service: guessed tokens are checked with one step of the model, which reads its weights
/// once, and those that it would have chosen itself are kept. The text of a seed stays the same.
#[derive(Clone, Debug, Default)]
pub struct SpeculationOptions {
    /// Where guesses come from.
    pub source: GuessSource,
    /// Maximum number of guesses per step, 1 to [`MAX_DRAFT`]; that maximum when `None`. The acceptance seen decides how
    /// many are made, down to none where they cost more than they save.
    pub max_draft: Option<usize>,
    /// Checks as many guesses as there are in every step, whatever they cost and however many are accepted.
    pub is_fixed: bool,
    /// For measurements of models with random weights: keeps each guess with this probability, whatever the model says.
    /// The text is meaningless.
    pub forced_acceptance: Option<f32>,
}

/// A draft model.
#[derive(Clone)]
pub struct DraftWeights {
    pub(crate) name: String,
    pub(crate) weights: Arc<refrain_models::Model>,
    /// `None` for random weights.
    model: Option<Model>,
}

impl fmt::Debug for DraftWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DraftWeights").field("name", &self.name).finish_non_exhaustive()
    }
}

impl DraftWeights {
    /// An opened model.
    pub fn of(model: &Model) -> DraftWeights {
        let (name, weights) = (model.name().to_owned(), model.weights().clone());
        DraftWeights { name, weights, model: Some(model.clone()) }
    }

    /// Random weights of a well-known shape, to measure speed.
    pub fn random(shape: &NamedShape, mix: QuantMix) -> Result<DraftWeights, Error> {
        let weights = Arc::new(refrain_models::Model::random(shape, mix)?);
        Ok(DraftWeights { name: shape.name.to_string(), weights, model: None })
    }
}

impl SpeculationOptions {
    /// The speculation of a request; `None` without guesses.
    pub(crate) fn of_request(&self) -> Option<Speculation> {
        let source = match self.source {
            GuessSource::None => return None,
            GuessSource::Ngram => DraftSource::Ngram,
            GuessSource::Model(_) => DraftSource::Model,
        };
        let (max_draft, forced_acceptance) = (self.max_draft(), self.forced_acceptance);
        let is_adaptive = !self.is_fixed;
        Some(Speculation { max_draft, is_adaptive, forced_acceptance, source })
    }

    /// Whether anything is guessed.
    pub fn is_on(&self) -> bool {
        !matches!(self.source, GuessSource::None)
    }

    /// Maximum number of guesses per step; 0 without guesses.
    pub(crate) fn max_draft(&self) -> usize {
        match self.source {
            GuessSource::None => 0,
            GuessSource::Ngram | GuessSource::Model(_) => self.max_draft.unwrap_or(MAX_DRAFT),
        }
    }

    /// The draft model, if there is one.
    pub(crate) fn draft(&self) -> Option<&DraftWeights> {
        match &self.source {
            GuessSource::Model(draft) => Some(draft),
            GuessSource::None | GuessSource::Ngram => None,
        }
    }

    /// Refuses what cannot work with a model, before anything is loaded.
    pub(crate) fn check(
        &self,
        weights: &refrain_models::Model,
        name: &str,
        verify_every: Option<NonZeroU32>,
    ) -> Result<(), Error> {
        if !self.is_on() {
            return Ok(());
        }
        if verify_every.is_some() {
            return Err(Error::SpeculationCompared);
        }
        let got = self.max_draft();
        if got == 0 || got > MAX_DRAFT {
            return Err(EngineError::DraftTokens { got, max: MAX_DRAFT }.into());
        }
        if weights.has_slots() {
            return Err(EngineError::CannotSpeculate { arch: weights.config().arch.name() }.into());
        }
        let Some(draft) = self.draft() else { return Ok(()) };
        if draft.weights.config().arch.is_encoder() {
            return Err(Error::Encoder { model: draft.name.clone() });
        }
        if draft.weights.has_slots() {
            return Err(EngineError::CannotDraft { arch: draft.weights.config().arch.name() }.into());
        }
        let sizes = [weights, &draft.weights].map(|weights| weights.config().n_vocab);
        if draft.model.is_none() && sizes[0] != sizes[1] {
            let (model, draft) = (name.to_owned(), draft.name.clone());
            return Err(Error::DraftVocabulary { model, draft, sizes });
        }
        Ok(())
    }

    /// Refuses a draft model whose tokens mean something else.
    pub(crate) fn check_tokens(&self, model: &Model) -> Result<(), Error> {
        let Some(draft) = self.draft().and_then(|draft| draft.model.as_ref()) else { return Ok(()) };
        let [ours, theirs] = [model, draft].map(Model::tokenizer);
        let sizes = [ours, theirs].map(|tokenizer| tokenizer.vocab_size());
        let names = || (model.name().to_owned(), draft.name().to_owned());
        if sizes[0] != sizes[1] {
            let (model, draft) = names();
            return Err(Error::DraftVocabulary { model, draft, sizes });
        }
        match (0..sizes[0] as u32).find(|&id| ours.piece(id) != theirs.piece(id)) {
            Some(token) => {
                let (model, draft) = names();
                let text =
                    |piece: Option<&[u8]>| String::from_utf8_lossy(piece.unwrap_or_default()).into_owned();
                let texts = [ours, theirs].map(|tokenizer| text(tokenizer.piece(token)));
                Err(Error::DraftTokenTexts { model, draft, token, texts })
            }
            None => Ok(()),
        }
    }
}
