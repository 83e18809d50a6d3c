//! What is asked of an engine, and what it answers.

use crate::core::{SequenceState, check_prompt, check_tokens};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::sampling::{MAX_TOP, SamplingParams, SamplingRow};
use refrain_models::Model;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A sequence of an engine. Its KV stays between requests, so a conversation that goes on is not evaluated again.
///
/// Cloning gives another handle to the same sequence. Its blocks are free again when the last handle is dropped and the
/// last request of it has ended.
#[derive(Clone, Debug)]
pub struct Sequence {
    cell: Arc<SequenceCell>,
}

#[derive(Debug)]
struct SequenceCell {
    /// Away while a request of it runs or waits.
    state: Mutex<Option<SequenceState>>,
    context: usize,
    ledger: Arc<Mutex<Ledger>>,
}

impl Sequence {
    pub(crate) fn new(state: SequenceState) -> Sequence {
        let (context, ledger) = (state.context, state.ledger.clone());
        Sequence { cell: Arc::new(SequenceCell { state: Mutex::new(Some(state)), context, ledger }) }
    }

    /// Positions that it may have.
    pub fn context(&self) -> usize {
        self.cell.context
    }

    /// The tokens whose KV is in the cache.
    pub fn tokens(&self) -> Result<Vec<u32>, EngineError> {
        self.with(|state| state.tokens().to_vec())
    }

    /// How many tokens of a prompt's beginning need not be evaluated again.
    pub fn n_cached(&self, prompt: &[u32]) -> Result<usize, EngineError> {
        self.with(|state| state.n_cached(prompt))
    }

    /// Forgets all tokens.
    pub fn clear(&self) -> Result<(), EngineError> {
        self.with(SequenceState::clear)
    }

    /// How every step of this sequence ran; also while a request of it runs.
    pub fn ledger(&self) -> Ledger {
        lock(&self.cell.ledger).clone()
    }

    /// Forgets how its steps ran so far.
    pub fn reset_ledger(&self) {
        *lock(&self.cell.ledger) = Ledger::new();
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut SequenceState) -> R) -> Result<R, EngineError> {
        lock(&self.cell.state).as_mut().map(f).ok_or(EngineError::SequenceBusy)
    }

    /// Takes the state away; nobody else can have it until it is dropped.
    pub(crate) fn hold(&self) -> Result<HeldSequence, EngineError> {
        let state = lock(&self.cell.state).take().ok_or(EngineError::SequenceBusy)?;
        Ok(HeldSequence { cell: self.cell.clone(), state: Some(state) })
    }
}

/// The state of a sequence that is busy. Dropping it puts the state back.
pub(crate) struct HeldSequence {
    cell: Arc<SequenceCell>,
    state: Option<SequenceState>,
}

impl HeldSequence {
    pub(crate) fn state(&mut self) -> Option<&mut SequenceState> {
        self.state.as_mut()
    }

    /// The state, to be given back with [`HeldSequence::put`].
    pub(crate) fn take(&mut self) -> Option<SequenceState> {
        self.state.take()
    }

    pub(crate) fn put(&mut self, state: SequenceState) {
        self.state = Some(state);
    }
}

impl Drop for HeldSequence {
    fn drop(&mut self) {
        *lock(&self.cell.state) = self.state.take();
    }
}

/// A lock on what is valid at every point: a panic elsewhere does not take it away.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names a request of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Names an adapter of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId(pub u32);

/// How far an engine goes without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// To the end. The stream holds what was not taken: at most the request's tokens and pieces of its prompt.
    Free,
    /// At most that many tokens further than the consumer has asked for, and one piece of the prompt at a time. The
    /// engine serves other requests meanwhile.
    Asked {
        /// Tokens that are chosen before they are asked for.
        lead: usize,
    },
}

/// What is asked of an engine: tokens behind a prompt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The sequence to continue, whose blocks are its own. What it holds of the prompt's beginning is not evaluated
    /// again. Without one the request has a sequence for itself, in what is left of the cache: it may have to wait for
    /// blocks, and shares those of beginnings that other such requests have in common with it.
    pub sequence: Option<Sequence>,
    /// All tokens that come before the first one chosen, those that the sequence holds included.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Tokens that end the request; the one that does is still given.
    pub end: Vec<u32>,
    /// The fewest tokens: none of the first `min_tokens` is an end token.
    pub min_tokens: usize,
    /// The most tokens; with 0 the prompt is not evaluated either.
    pub max_tokens: usize,
    /// How many of the most probable tokens are given with each choice, at most [`MAX_TOP`].
    pub n_top_logprobs: usize,
    /// The adapter to apply; only `None` is served.
    pub adapter: Option<AdapterId>,
    /// Higher is more urgent: served first, and room is taken from lower ones. Among equal ones users take turns.
    pub priority: i32,
    /// Whose request it is.
    pub user: u64,
    /// How far the engine goes without being asked.
    pub pace: Pace,
}

impl Request {
    /// A request for tokens behind `prompt` in a sequence that goes on, until its context is full, by the usual sampling
    /// parameters.
    pub fn new(sequence: &Sequence, prompt: Vec<u32>) -> Request {
        Request { sequence: Some(sequence.clone()), ..Request::once(prompt) }
    }

    /// A request with a sequence that ends with it.
    pub fn once(prompt: Vec<u32>) -> Request {
        Request {
            sequence: None,
            prompt,
            sampling: SamplingParams::default(),
            end: Vec::new(),
            min_tokens: 0,
            max_tokens: usize::MAX,
            n_top_logprobs: 0,
            adapter: None,
            priority: 0,
            user: 0,
            pace: Pace::Free,
        }
    }

    /// Refuses what cannot be served, before anybody waits for it. A sequence has `context` positions; a request without
    /// one must be able to end in them, or have no end of its own.
    pub(crate) fn check(&self, model: &Model, context: usize) -> Result<(), EngineError> {
        // Without a limit of its own it ends where the context does, behind one token at least.
        let max_tokens = if self.max_tokens == usize::MAX { 1 } else { self.max_tokens };
        // The last token is chosen and not evaluated.
        let n_positions = self.prompt.len().saturating_add(max_tokens.saturating_sub(1));
        if self.sequence.is_none() && n_positions > context {
            return Err(EngineError::NeverFits { n_prompt: self.prompt.len(), max_tokens, context });
        }
        check_prompt(model, &self.prompt, context)?;
        self.sampling.check(model.config().n_vocab)?;
        check_tokens(model, &self.end)?;
        if self.min_tokens > self.max_tokens {
            return Err(EngineError::TokenLimits { min: self.min_tokens, max: self.max_tokens });
        }
        if self.n_top_logprobs > MAX_TOP {
            return Err(EngineError::TopLogprobs { got: self.n_top_logprobs, most: MAX_TOP });
        }
        match self.adapter {
            Some(AdapterId(id)) => Err(EngineError::UnknownAdapter { id }),
            None => Ok(()),
        }
    }

    /// How tokens are chosen: no end token among the first ones.
    pub(crate) fn row(&self) -> Result<SamplingRow, EngineError> {
        let mut row = SamplingRow::new(&self.sampling);
        row.n_top = self.n_top_logprobs;
        if self.min_tokens > 0 && !self.end.is_empty() {
            row.forbid(&self.end, self.prompt.len().saturating_add(self.min_tokens))?;
        }
        Ok(row)
    }
}

/// What a stream gives.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// A piece of the prompt that is not the last was evaluated.
    Prompt {
        /// Tokens of the prompt that are in the cache.
        n_done: usize,
        /// Tokens of the prompt.
        n_tokens: usize,
    },
    /// A token was chosen.
    Token {
        /// The token.
        token: u32,
        /// The logarithm of its probability under the model.
        logprob: f32,
        /// The most probable tokens with the logarithms of their probabilities, as many as were asked for.
        top: Vec<(u32, f32)>,
        /// The time it took: of the first one that of the prompt's steps, of the others as the ledger has it.
        took: Duration,
    },
    /// The request has ended. Nothing comes after it.
    End(FinishReason),
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token was chosen.
    EndToken,
    /// As many tokens as were asked for.
    MaxTokens,
    /// No position of the context is left.
    ContextFull,
    /// It was cancelled, or its stream dropped.
    Cancelled,
}
