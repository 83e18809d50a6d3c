//! Requests whose text follows a grammar.
//!
//! The mask of a choice depends on the token before it. So it is computed on the engine's thread as soon as that token is
//! known, and such a request takes part in steps one by one. Tokens that the grammar forces are appended at once and
//! evaluated together, like a short prompt.

use crate::error::EngineError;
use crate::request::Request;
use crate::sampling::SamplingRow;
use refrain_grammar::{Grammar, Matcher};
use refrain_models::Model;

/// Has the text of a request follow a grammar.
#[derive(Clone, Debug)]
pub struct Constraint {
    /// The grammar, compiled for the model's vocabulary.
    pub grammar: Grammar,
    /// Number of tokens at the end of the prompt that already belong to the text: a request that continues an interrupted
    /// one.
    pub n_given: usize,
    /// Whether tokens that the grammar forces are appended without a choice. Their log-probability is 0.
    pub forces: bool,
}

impl Constraint {
    /// A grammar for a text that begins after the prompt.
    pub fn new(grammar: Grammar) -> Constraint {
        Constraint { grammar, n_given: 0, forces: true }
    }

    pub(crate) fn check(&self, model: &Model, n_prompt: usize) -> Result<(), EngineError> {
        if self.n_given > n_prompt {
            return Err(EngineError::GivenTokens { n_given: self.n_given, n_prompt });
        }
        let (grammar, model) = (self.grammar.n_tokens(), model.config().n_vocab);
        if grammar > model {
            return Err(EngineError::GrammarVocabulary { grammar, model });
        }
        Ok(())
    }
}

/// A text that follows a grammar.
#[derive(Debug)]
pub(crate) struct ConstrainedText {
    matcher: Matcher,
    forces: bool,
    /// Whether nothing is left to choose.
    is_complete: bool,
}

impl ConstrainedText {
    /// The text of a request so far, with the mask of its first choice in the row. Fails if the given tokens do not follow
    /// the grammar.
    pub(crate) fn of(
        request: &Request,
        row: &mut SamplingRow,
        n_vocab: usize,
    ) -> Result<Option<ConstrainedText>, EngineError> {
        let Some(constraint) = &request.constraint else { return Ok(None) };
        let mut matcher = constraint.grammar.matcher();
        let given = request.prompt.len().saturating_sub(constraint.n_given);
        request.prompt[given..].iter().try_for_each(|token| matcher.accept(*token))?;
        // Forced tokens have no choice, so there is nothing to report about them.
        let forces = constraint.forces && request.n_top_logprobs == 0;
        let mut text = ConstrainedText { matcher, forces, is_complete: false };
        text.prepare(row, &request.end, request.prompt.len(), n_vocab)?;
        Ok(Some(text))
    }

    /// Whether nothing is left to choose.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Appends a chosen token that does not end the text.
    pub(crate) fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        Ok(self.matcher.accept(token)?)
    }

    /// Appends the tokens that the grammar forces, at most `n_max`, and returns them. A token that ends the text is not
    /// appended as text.
    pub(crate) fn force(&mut self, n_max: usize, end: &[u32]) -> Result<Vec<u32>, EngineError> {
        let mut forced = if self.forces { self.matcher.forced()? } else { Vec::new() };
        let n_before_end = forced.iter().position(|token| end.contains(token)).unwrap_or(forced.len());
        forced.truncate(n_max.min(n_before_end));
        forced.iter().try_for_each(|token| self.matcher.accept(*token))?;
        Ok(forced)
    }

    /// Writes the mask of the choice at `position` into the row. Returns false if there is nothing left to choose: the text
    /// is complete.
    pub(crate) fn prepare(
        &mut self,
        row: &mut SamplingRow,
        end: &[u32],
        position: usize,
        n_vocab: usize,
    ) -> Result<bool, EngineError> {
        self.is_complete = self.matcher.is_complete();
        if self.is_complete {
            return Ok(false);
        }
        let mut mask = std::mem::take(&mut row.mask);
        mask.resize(n_vocab.div_ceil(32), 0);
        self.matcher.mask(end, &mut mask)?;
        let n_allowed = |mask: &[u32]| mask.iter().map(|word| word.count_ones()).sum::<u32>();
        let n_before = n_allowed(&mask);
        for banned in row.banned(position) {
            if let Some(word) = mask.get_mut(banned as usize / 32) {
                *word &= !(1 << (banned % 32));
            }
        }
        let n_after = n_allowed(&mask);
        row.mask = mask;
        match n_after {
            0 if self.matcher.may_end()? => {
                self.is_complete = true;
                Ok(false)
            }
            0 => Err(EngineError::NothingAllowed { position, n_banned: n_before as usize }),
            _ => Ok(true),
        }
    }
}
