//! Follows one generated text.

use crate::error::GrammarError;
use std::fmt;

/// Follows one generated text: which tokens may come next, and whether it may end.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    n_accepted: usize,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher").field("n_accepted", &self.n_accepted).finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher) -> Matcher {
        Matcher { inner, n_accepted: 0 }
    }

    /// Number of tokens so far.
    pub fn n_accepted(&self) -> usize {
        self.n_accepted
    }

    /// Appends a token to the text.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        match self.inner.try_consume_tokens(&[token]) {
            Ok(1) => {
                self.n_accepted += 1;
                Ok(())
            }
            Ok(_) => Err(GrammarError::NotAllowed { token, n_tokens: self.n_accepted }),
            Err(error) => Err(self.gave_up(&error)),
        }
    }

    /// Whether the text may end here.
    pub fn may_end(&mut self) -> Result<bool, GrammarError> {
        if self.inner.is_stopped() && !self.inner.is_error() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|error| self.gave_up(&error))
    }

    /// Whether the text must end here: nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }

    /// The tokens that must come next, in the tokenizer's own division of the text that they spell. Empty if there is a
    /// choice.
    pub fn forced(&mut self) -> Result<Vec<u32>, GrammarError> {
        if self.is_complete() {
            return Ok(Vec::new());
        }
        let tokens = self.inner.compute_ff_tokens();
        match self.inner.get_error() {
            Some(reason) => Err(GrammarError::Matching { n_tokens: self.n_accepted, reason }),
            None => Ok(tokens),
        }
    }

    /// Sets the bit of every token that may come next and clears all others, also those past the vocabulary. The tokens
    /// `end` end the text: their bits are set only where the text may end, whatever they spell. No bit is set if the text
    /// must end and `end` is empty.
    pub fn mask(&mut self, end: &[u32], mask: &mut [u32]) -> Result<(), GrammarError> {
        mask.fill(0);
        let may_end = self.may_end()?;
        if !self.is_complete() {
            // With nothing left to say, the parser stops with an error instead of an empty mask.
            let allowed = match self.inner.compute_mask() {
                Ok(allowed) => allowed,
                Err(error) => return Err(self.gave_up(&error)),
            };
            let words = allowed.as_slice();
            let n = words.len().min(mask.len());
            mask[..n].copy_from_slice(&words[..n]);
            if let Ok(env) = self.inner.tok_env() {
                env.tok_trie().eos_tokens().iter().for_each(|&id| set(mask, id, false));
            }
        }
        end.iter().for_each(|&id| set(mask, id, may_end));
        Ok(())
    }

    fn gave_up(&self, error: &dyn fmt::Display) -> GrammarError {
        let reason = first_line(&error.to_string());
        GrammarError::Matching { n_tokens: self.n_accepted, reason }
    }
}

fn set(mask: &mut [u32], id: u32, to: bool) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        let bit = 1 << (id % 32);
        *word = if to { *word | bit } else { *word & !bit };
    }
}

/// Messages of the parser without its internal state.
pub(crate) fn first_line(message: &str) -> String {
    let end = message.find("\n<").unwrap_or(message.len());
    message[..end].trim().to_owned()
}
