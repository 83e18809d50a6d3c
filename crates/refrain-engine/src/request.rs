//! Requests to an engine, and their events.

use crate::constrain::Constraint;
use crate::core::{SequenceState, check_prompt, check_tokens};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::sampling::{MAX_TOP, SamplingParams, SamplingRow};
use crate::speculate::Speculation;
use refrain_models::Model;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A sequence of an engine. It keeps its KV between requests, so a continued conversation is not evaluated
/// again.
///
/// Clones are handles to the same sequence. Its blocks are released when the last handle is dropped and its
/// last request has ended.
#[derive(Clone, Debug)]
pub struct Sequence {
    cell: Arc<SequenceCell>,
}

#[derive(Debug)]
struct SequenceCell {
    /// `None` while one of its requests runs or waits.
    state: Mutex<Option<SequenceState>>,
    context: usize,
    adapter: Option<AdapterId>,
    ledger: Arc<Mutex<Ledger>>,
}

impl Sequence {
    pub(crate) fn new(state: SequenceState) -> Sequence {
        let (context, adapter, ledger) = (state.context, state.adapter, state.ledger.clone());
        Sequence { cell: Arc::new(SequenceCell { state: Mutex::new(Some(state)), context, adapter, ledger }) }
    }

    /// Maximum number of positions.
    pub fn context(&self) -> usize {
        self.cell.context
    }

    /// The adapter of all its requests, if it has one.
    pub fn adapter(&self) -> Option<AdapterId> {
        self.cell.adapter
    }

    /// The tokens whose KV is in the cache.
    pub fn tokens(&self) -> Result<Vec<u32>, EngineError> {
        self.with(|state| state.tokens().to_vec())
    }

    /// Number of leading prompt tokens that need not be evaluated again.
    pub fn n_cached(&self, prompt: &[u32]) -> Result<usize, EngineError> {
        self.with(|state| state.n_cached(prompt))
    }

    /// Forgets all tokens.
    pub fn clear(&self) -> Result<(), EngineError> {
        self.with(SequenceState::clear)
    }

    /// Records of every step of this sequence; also available while its request runs.
    pub fn ledger(&self) -> Ledger {
        lock(&self.cell.ledger).clone()
    }

    /// Resets the ledger.
    pub fn reset_ledger(&self) {
        *lock(&self.cell.ledger) = Ledger::new();
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut SequenceState) -> R) -> Result<R, EngineError> {
        lock(&self.cell.state).as_mut().map(f).ok_or(EngineError::SequenceBusy)
    }

    /// Takes the state for exclusive use; dropping the result returns it.
    pub(crate) fn hold(&self) -> Result<HeldSequence, EngineError> {
        let state = lock(&self.cell.state).take().ok_or(EngineError::SequenceBusy)?;
        Ok(HeldSequence { cell: self.cell.clone(), state: Some(state) })
    }
}

/// State of a busy sequence. Dropping it returns the state to the sequence.
pub(crate) struct HeldSequence {
    cell: Arc<SequenceCell>,
    state: Option<SequenceState>,
}

impl HeldSequence {
    pub(crate) fn state(&mut self) -> Option<&mut SequenceState> {
        self.state.as_mut()
    }

    /// Takes the state, to be returned with [`HeldSequence::put`].
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

/// Locks a mutex whose content is valid at every point, so poisoning can be ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies a request of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Identifies an adapter of an engine: its index in [`Model::adapter_names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId(pub u32);

impl AdapterId {
    /// Finds an adapter of a model by its name.
    pub fn find(model: &Model, name: &str) -> Result<AdapterId, EngineError> {
        let known = model.adapter_names();
        let found = known.iter().position(|other| other == name);
        found
            .map(|idx| AdapterId(idx as u32))
            .ok_or_else(|| EngineError::NoAdapterNamed { name: name.to_owned(), known: known.to_vec() })
    }
}

/// How far an engine runs ahead of the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Runs to the end. The stream buffers unread events: at most the request's tokens and prompt chunks.
    Free,
    /// Runs at most `lead` tokens ahead of the consumer, and evaluates one prompt chunk at a time. The engine
    /// serves other requests meanwhile.
    OnDemand {
        /// Tokens chosen before the consumer asks for them.
        lead: usize,
    },
}

/// A request to an engine for tokens after a prompt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The sequence to continue, with its own blocks. The prefix of the prompt that it holds is not evaluated
    /// again. Without one, the request gets a temporary sequence in the unreserved part of the cache: it may
    /// have to wait for blocks, and shares the blocks of prefixes that it has in common with other such
    /// requests.
    pub sequence: Option<Sequence>,
    /// All tokens before the first chosen one, including those the sequence already holds.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Tokens that end the request; the one that does is still returned.
    pub end: Vec<u32>,
    /// Minimum number of tokens: none of the first `min_tokens` is an end token.
    pub min_tokens: usize,
    /// Maximum number of tokens; with 0 the prompt is not evaluated either.
    pub max_tokens: usize,
    /// Number of top log-probabilities returned with each token, at most [`MAX_TOP`].
    pub n_top_logprobs: usize,
    /// Has the text follow a grammar.
    pub constraint: Option<Constraint>,
    /// The adapter to apply, of those attached to the model. A request with a sequence has the sequence's adapter, and
    /// may name no other.
    pub adapter: Option<AdapterId>,
    /// Higher priorities are served first and preempt lower ones. Requests of equal priority take turns by
    /// user.
    pub priority: i32,
    /// The user, for fairness between users.
    pub user: u64,
    /// Whether a request without a sequence shares the blocks of common prefixes with other requests. Sharing shows
    /// others, by how soon their first token comes, that a prompt was evaluated before.
    pub shares_prefix: bool,
    /// How far the engine runs ahead of the consumer.
    pub pace: Pace,
    /// Guessed tokens to check; none by default.
    pub speculation: Option<Speculation>,
}

impl Request {
    /// A request for tokens after `prompt` in an existing sequence, until its context is full, with the
    /// default sampling parameters.
    pub fn new(sequence: &Sequence, prompt: Vec<u32>) -> Request {
        Request { sequence: Some(sequence.clone()), ..Request::once(prompt) }
    }

    /// A request with a temporary sequence that ends with it.
    pub fn once(prompt: Vec<u32>) -> Request {
        Request {
            sequence: None,
            prompt,
            sampling: SamplingParams::default(),
            end: Vec::new(),
            min_tokens: 0,
            max_tokens: usize::MAX,
            n_top_logprobs: 0,
            constraint: None,
            adapter: None,
            priority: 0,
            user: 0,
            shares_prefix: true,
            pace: Pace::Free,
            speculation: None,
        }
    }

    /// Rejects an invalid request before anybody waits for it. `context` is the sequence's context. A request
    /// without a sequence must be able to finish within it, unless it has no token limit.
    pub(crate) fn check(
        &self,
        model: &Model,
        has_draft_model: bool,
        context: usize,
    ) -> Result<(), EngineError> {
        // A request without a token limit ends where the context does, after at least one token.
        let max_tokens = if self.max_tokens == usize::MAX { 1 } else { self.max_tokens };
        // The last token is chosen but not evaluated.
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
            return Err(EngineError::TopLogprobs { got: self.n_top_logprobs, max: MAX_TOP });
        }
        if let Some(speculation) = &self.speculation {
            speculation.check(model, has_draft_model)?;
        }
        if let Some(constraint) = &self.constraint {
            constraint.check(model, self.prompt.len())?;
            if self.speculation.is_some() {
                return Err(EngineError::GuessedGrammar);
            }
        }
        check_adapter(model, self.adapter)?;
        match (&self.sequence, self.adapter) {
            (Some(sequence), Some(adapter)) if sequence.adapter() != Some(adapter) => {
                let known = model.adapter_names();
                let of =
                    |AdapterId(id)| known.get(id as usize).cloned().unwrap_or_else(|| format!("number {id}"));
                let sequence = sequence.adapter().map(of);
                Err(EngineError::AdapterOfSequence { requested: of(adapter), sequence })
            }
            _ => Ok(()),
        }
    }

    /// The sampling row of the request: forbids end tokens for the first `min_tokens` choices.
    pub(crate) fn row(&self) -> Result<SamplingRow, EngineError> {
        let mut row = SamplingRow::new(&self.sampling);
        row.n_top = self.n_top_logprobs;
        if self.min_tokens > 0 && !self.end.is_empty() {
            row.forbid(&self.end, self.prompt.len().saturating_add(self.min_tokens))?;
        }
        Ok(row)
    }
}

/// Refuses an adapter that the model does not have.
pub(crate) fn check_adapter(model: &Model, adapter: Option<AdapterId>) -> Result<(), EngineError> {
    let known = model.adapter_names();
    match adapter {
        Some(AdapterId(id)) if id as usize >= known.len() => {
            Err(EngineError::UnknownAdapter { id, known: known.to_vec() })
        }
        _ => Ok(()),
    }
}

/// An event of a token stream.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// A chunk of the prompt other than the last was evaluated.
    Prompt {
        /// Prompt tokens in the cache.
        n_done: usize,
        /// Tokens of the prompt.
        n_tokens: usize,
    },
    /// A token was chosen.
    Token {
        /// The token.
        token: u32,
        /// Its log-probability under the model.
        logprob: f32,
        /// The most probable tokens with their log-probabilities, as many as requested.
        top: Vec<(u32, f32)>,
        /// Duration: for the first token that of the prompt's steps, for the others as in the ledger.
        took: Duration,
    },
    /// The request has ended. No event follows.
    End(FinishReason),
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token was chosen.
    EndToken,
    /// The grammar allows nothing more: the text is complete, without an end token.
    Complete,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// No position of the context is left.
    ContextFull,
    /// The request was cancelled, or its stream was dropped.
    Cancelled,
}
