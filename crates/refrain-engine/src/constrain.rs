//! Requests whose text follows a grammar.
//!
//! The mask of a choice depends on the token before it. So it is computed as soon as that token is known, on a thread of
//! [`crate::masks`], while the device evaluates the token. Tokens that the grammar forces are appended at once and evaluated
//! together, like a short prompt, if that pays: not beside other requests, which such a prompt would interrupt, and not if they
//! are few and the next step is already launched. Then a forced token is a choice with a mask of one bit.

use crate::error::EngineError;
use crate::request::Request;
use crate::sampling::SamplingRow;
use refrain_grammar::{Grammar, GrammarError, Matcher};
use refrain_models::Model;
use std::collections::VecDeque;

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

/// What follows a chosen token.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Followed {
    /// Tokens that the grammar forces, to be appended at once.
    pub(crate) forced: Vec<u32>,
    /// Whether something is left to choose.
    pub(crate) is_open: bool,
}

/// Where a text is after a chosen token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Tokens before the next choice, without forced ones.
    pub(crate) position: usize,
    /// Number of forced tokens that may still be appended; `None` if the request ends here.
    pub(crate) n_left: Option<usize>,
    /// Fewer forced tokens than this are chosen one by one: evaluating them together would cost more.
    pub(crate) min_together: usize,
}

/// A text that follows a grammar.
#[derive(Debug)]
pub(crate) struct ConstrainedText {
    matcher: Matcher,
    forces: bool,
    /// The request's biases: some forbid tokens.
    rules: SamplingRow,
    end: Vec<u32>,
    /// Whether nothing is left to choose.
    is_complete: bool,
    /// Tokens before the next choice.
    position: usize,
    /// Mask of that choice.
    mask: Vec<u32>,
    /// Forced tokens that are chosen one by one. The matcher is past them.
    next: VecDeque<u32>,
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
        let mut text = ConstrainedText {
            matcher,
            // Forced tokens have no choice, so there is nothing to report about them.
            forces: constraint.forces && request.n_top_logprobs == 0,
            rules: row.clone(),
            end: request.end.clone(),
            is_complete: false,
            position: request.prompt.len(),
            mask: vec![0; n_vocab.div_ceil(32)],
            next: VecDeque::new(),
        };
        if constraint.n_given > 0 && request.max_tokens > 0 {
            // An interrupted text goes on as it would have: with what its last token forces.
            let before = text.matcher.clone();
            let forced = text.force(request.max_tokens)?;
            match text.may_choose(&forced) {
                true => text.next = forced.into(),
                // Banned tokens can only be appended, and there is no step to append them to.
                false => text.matcher = before,
            }
        }
        text.prepare()?;
        text.hand_over(row);
        Ok(Some(text))
    }

    /// Whether nothing is left to choose.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Appends a chosen token that does not end the text, and the tokens that the grammar forces after it. If something is
    /// left to choose and the request goes on, the next choice has to be prepared.
    pub(crate) fn follow(&mut self, chosen: u32, place: Place) -> Result<Followed, EngineError> {
        self.position = place.position;
        if let Some(next) = self.next.pop_front() {
            if next != chosen {
                let n_tokens = self.matcher.n_accepted() - self.next.len() - 1;
                return Err(GrammarError::NotAllowed { token: chosen, n_tokens }.into());
            }
            return Ok(Followed { forced: Vec::new(), is_open: self.is_open() });
        }
        self.matcher.accept(chosen)?;
        let Some(n_left) = place.n_left else {
            return Ok(Followed { forced: Vec::new(), is_open: self.is_open() });
        };
        let mut forced = self.force(n_left)?;
        if forced.len() < place.min_together && self.may_choose(&forced) {
            self.next = std::mem::take(&mut forced).into();
        }
        self.position += forced.len();
        Ok(Followed { forced, is_open: self.is_open() })
    }

    fn is_open(&self) -> bool {
        !self.next.is_empty() || !self.matcher.is_complete()
    }

    /// Whether the request's biases allow the choice of all these tokens, the first of them next.
    fn may_choose(&self, forced: &[u32]) -> bool {
        let is_banned = |(at, token): (usize, &u32)| self.rules.banned(at).any(|banned| banned == *token);
        !(self.position..).zip(forced).any(is_banned)
    }

    /// Appends the tokens that the grammar forces, at most `n_max`, and returns them. A token that ends the text is not
    /// appended as text.
    fn force(&mut self, n_max: usize) -> Result<Vec<u32>, EngineError> {
        let mut forced = if self.forces { self.matcher.forced()? } else { Vec::new() };
        let n_before_end = forced.iter().position(|token| self.end.contains(token)).unwrap_or(forced.len());
        forced.truncate(n_max.min(n_before_end));
        forced.iter().try_for_each(|token| self.matcher.accept(*token))?;
        Ok(forced)
    }

    /// Makes the mask of the next choice if that is a forced token.
    pub(crate) fn prepare_forced(&mut self) -> bool {
        let Some(next) = self.next.front() else { return false };
        self.mask.fill(0);
        if let Some(word) = self.mask.get_mut(*next as usize / 32) {
            *word = 1 << (next % 32);
        }
        true
    }

    /// Computes the mask of the next choice, which may take long. Returns false if there is nothing left to choose: the text
    /// is complete.
    pub(crate) fn prepare(&mut self) -> Result<bool, EngineError> {
        if self.prepare_forced() {
            return Ok(true);
        }
        self.is_complete = self.matcher.is_complete();
        if self.is_complete {
            return Ok(false);
        }
        self.matcher.mask(&self.end, &mut self.mask)?;
        let n_allowed = |mask: &[u32]| mask.iter().map(|word| word.count_ones()).sum::<u32>();
        let n_before = n_allowed(&self.mask);
        for banned in self.rules.banned(self.position) {
            if let Some(word) = self.mask.get_mut(banned as usize / 32) {
                *word &= !(1 << (banned % 32));
            }
        }
        match n_allowed(&self.mask) {
            0 if self.matcher.may_end()? => {
                self.is_complete = true;
                Ok(false)
            }
            0 => {
                let (position, n_banned) = (self.position, n_before as usize);
                Err(EngineError::NothingAllowed { position, n_banned })
            }
            _ => Ok(true),
        }
    }

    /// Puts the prepared mask into the row.
    pub(crate) fn hand_over(&mut self, row: &mut SamplingRow) {
        std::mem::swap(&mut self.mask, &mut row.mask);
        row.is_late = false;
    }

    /// Takes the row's mask back, to compute the next one into it.
    pub(crate) fn take_back(&mut self, row: &mut SamplingRow) {
        std::mem::swap(&mut self.mask, &mut row.mask);
        row.mask.clear();
        row.is_late = true;
    }
}
