//! The boundary between a server and the workers: requests for tokens, and the tokens that come back.
//!
//! A server turns text into a [`TokenRequest`] and a [`TokenReply`] into text. Whoever implements [`TokenBackend`] turns
//! one into the other: the worker pool in production, a fake in tests of the server.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// A request for tokens after a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenRequest {
    /// Name of the served model.
    pub model: String,
    /// All tokens before the first chosen one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: TokenSampling,
    /// Tokens that end the request; the one that does is still delivered.
    pub end: Vec<u32>,
    /// None of the first `min_tokens` tokens is an end token.
    pub min_tokens: usize,
    /// Maximum number of tokens; until the context is full when `None`.
    pub max_tokens: Option<usize>,
    /// Most probable tokens to return with each token.
    pub n_top_logprobs: usize,
    /// Higher priorities are served first.
    pub priority: i32,
    /// The user, for fairness between users.
    pub user: u64,
    /// What the text must match.
    pub grammar: Option<TokenGrammar>,
    /// Whether the KV blocks of the prompt are shared with other requests: those that have the same prefix.
    pub share_prefix: bool,
}

/// A constraint on the text of a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenGrammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that matches this JSON schema.
    JsonSchema(String),
    /// Text that matches this regular expression as a whole.
    Regex(String),
    /// Text that matches this Lark grammar.
    Lark(String),
    /// JSON that matches a schema, between fixed texts: a forced tool call.
    JsonBetween {
        /// Text before it. Control tokens are written by their names.
        before: String,
        /// The JSON schema.
        schema: String,
        /// Text after it.
        after: String,
    },
}

/// A request for embeddings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedRequest {
    /// Name of the served model.
    pub model: String,
    /// The tokens of each text.
    pub inputs: Vec<Vec<u32>>,
    /// The user, for fairness between users.
    pub user: u64,
}

/// Sampling parameters on the wire. The fields mean what those of [`refrain::SamplingParams`] mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "documented at `refrain::SamplingParams`")]
pub struct TokenSampling {
    pub temperature: f32,
    pub top_k: usize,
    pub top_p: f32,
    pub min_p: f32,
    pub repeat_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub penalty_window: usize,
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: u64,
}

/// An event of a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TokenUpdate {
    /// A chunk of the prompt was evaluated.
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
        /// Its log-probability.
        logprob: f32,
        /// The most probable tokens with their log-probabilities, as many as requested.
        top: Vec<(u32, f32)>,
    },
    /// The request has ended; no update follows.
    End(FinishedBy),
}

/// A vector of a reply, in the order of the texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VectorUpdate {
    /// The vector.
    pub vector: Vec<f32>,
    /// Whether it is that of the last text; no update follows.
    pub is_last: bool,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishedBy {
    /// An end token was chosen.
    EndToken,
    /// The grammar allows nothing more: the text is complete, without an end token.
    Complete,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The request was cancelled.
    Cancelled,
}

/// A request that was not served, or not to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Which kind of error it is; decides the HTTP status.
    pub kind: RefusalKind,
    /// What happened, with the numbers.
    pub message: String,
    /// An action that resolves it.
    pub hint: Option<String>,
    /// When a new attempt may succeed.
    pub retry_after: Option<Duration>,
}

/// Kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// The request can never be served: a parameter is wrong, or the prompt is too long.
    Invalid,
    /// No such model is served.
    UnknownModel,
    /// Too many requests are open.
    Busy,
    /// No worker can serve it now.
    Unavailable,
    /// It failed while it was served.
    Failed,
}

/// Serves requests for tokens.
pub trait TokenBackend: Send + Sync + 'static {
    /// Submits a request. What is known at once is refused here; later errors arrive through the reply. Must not block.
    fn submit(&self, request: TokenRequest) -> Result<TokenReply, Refusal>;

    /// Submits texts to embed; one vector per text comes back. What is known at once is refused here; later errors arrive
    /// through the reply. Must not block.
    fn embed(&self, request: EmbedRequest) -> Result<VectorReply, Refusal>;

    /// A snapshot of the workers. Must not block.
    fn status(&self) -> Arc<BackendStatus>;
}

/// A snapshot of all workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// The workers, in the order of their devices.
    pub workers: Vec<WorkerStatus>,
}

/// A snapshot of one worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Its index.
    pub idx: usize,
    /// Process id of the current process, if one runs.
    pub pid: Option<u32>,
    /// Name of the backend, once it is known.
    pub backend: String,
    /// What it is doing.
    pub state: WorkerState,
    /// Processes that were started to replace a failed one.
    pub n_restarts: u64,
    /// Why the last process was replaced.
    pub last_failure: Option<String>,
    /// The models it has loaded.
    pub models: Vec<LoadStatus>,
}

/// What a worker is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerState {
    /// The process starts or loads a model.
    Starting,
    /// It serves requests.
    Ready,
    /// The next process is started after a delay, because the last ones failed soon after their start.
    BackingOff {
        /// Processes that failed in a row.
        n_failures: u32,
    },
    /// It was told to stop.
    Stopped,
}

/// The load of one model on one worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadStatus {
    /// Name of the served model.
    pub model: String,
    /// Maximum number of tokens of one request.
    pub context: usize,
    /// Requests that take part in steps.
    pub n_running: usize,
    /// Requests waiting for capacity.
    pub n_waiting: usize,
    /// Preemptions so far.
    pub n_preempted: u64,
    /// KV blocks in all.
    pub kv_blocks: usize,
    /// KV blocks held by requests.
    pub kv_blocks_used: usize,
    /// Prompt tokens that were found in the prefix cache so far.
    pub n_prefix_hit_tokens: u64,
    /// Prompt tokens of all requests so far.
    pub n_prompt_tokens: u64,
    /// Tokens generated so far.
    pub n_generated_tokens: u64,
    /// Steps so far.
    pub steps: StepCounts,
}

impl LoadStatus {
    /// Adds the counts of an earlier time, of the same model in another process for example.
    pub(crate) fn add_counts(&mut self, past: &LoadStatus) {
        // The numbers of a process that is not trusted must not overflow.
        let add = |sum: &mut u64, n: u64| *sum = sum.saturating_add(n);
        add(&mut self.n_preempted, past.n_preempted);
        add(&mut self.n_prefix_hit_tokens, past.n_prefix_hit_tokens);
        add(&mut self.n_prompt_tokens, past.n_prompt_tokens);
        add(&mut self.n_generated_tokens, past.n_generated_tokens);
        add(&mut self.steps.replayed, past.steps.replayed);
        add(&mut self.steps.eager, past.steps.eager);
        add(&mut self.steps.failed, past.steps.failed);
        add(&mut self.steps.guessed, past.steps.guessed);
        add(&mut self.steps.accepted, past.steps.accepted);
        for (label, n) in &past.steps.reasons {
            match self.steps.reasons.iter_mut().find(|(other, _)| other == label) {
                Some((_, sum)) => add(sum, *n),
                None => self.steps.reasons.push((label.clone(), *n)),
            }
        }
    }
}

/// How the steps of a model ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCounts {
    /// Steps replayed as graphs.
    pub replayed: u64,
    /// Steps that ran eagerly.
    pub eager: u64,
    /// Steps that failed.
    pub failed: u64,
    /// Guessed tokens that were checked.
    pub guessed: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Why steps were not replayed: the label of the reason, and how many.
    pub reasons: Vec<(String, u64)>,
}

/// What replies consist of.
pub trait Update: sealed::Sealed {
    /// Whether no update follows.
    fn is_last(&self) -> bool;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for TokenUpdate {}

impl Update for TokenUpdate {
    fn is_last(&self) -> bool {
        matches!(self, TokenUpdate::End(_))
    }
}

impl sealed::Sealed for VectorUpdate {}

impl Update for VectorUpdate {
    fn is_last(&self) -> bool {
        self.is_last
    }
}

/// The updates of one request, for the API. Dropping it cancels the request.
pub struct Reply<U> {
    shared: Arc<ReplyQueue<U>>,
}

/// The reply to a request for tokens.
pub type TokenReply = Reply<TokenUpdate>;

/// The reply to a request for embeddings.
pub type VectorReply = Reply<VectorUpdate>;

/// The other end of a [`Reply`], for whoever serves the request. Clones write to the same reply.
pub struct ReplySender<U = TokenUpdate> {
    shared: Arc<ReplyQueue<U>>,
}

impl<U> Clone for ReplySender<U> {
    fn clone(&self) -> Self {
        ReplySender { shared: self.shared.clone() }
    }
}

/// Makes a reply to a request for tokens, and its sender. `on_cancel` is called once, when the reply is dropped before its
/// end; it must not block.
pub fn token_reply(on_cancel: impl FnOnce() + Send + 'static) -> (ReplySender, TokenReply) {
    reply(on_cancel)
}

/// Makes a reply to a request for embeddings, as [`token_reply`] does for tokens.
pub fn vector_reply(on_cancel: impl FnOnce() + Send + 'static) -> (ReplySender<VectorUpdate>, VectorReply) {
    reply(on_cancel)
}

fn reply<U>(on_cancel: impl FnOnce() + Send + 'static) -> (ReplySender<U>, Reply<U>) {
    let state = ReplyState { updates: VecDeque::new(), is_over: false, on_cancel: Some(Box::new(on_cancel)) };
    let shared =
        Arc::new(ReplyQueue { state: Mutex::new(state), arrived: Notify::new(), over: Notify::new() });
    (ReplySender { shared: shared.clone() }, Reply { shared })
}

/// Unread updates. Their number is bounded by the tokens or texts of the request, so the sender never waits for the reader.
struct ReplyQueue<U> {
    state: Mutex<ReplyState<U>>,
    arrived: Notify,
    over: Notify,
}

struct ReplyState<U> {
    updates: VecDeque<Result<U, Refusal>>,
    /// The end or an error was sent.
    is_over: bool,
    on_cancel: Option<Box<dyn FnOnce() + Send>>,
}

impl<U> ReplyQueue<U> {
    fn lock(&self) -> MutexGuard<'_, ReplyState<U>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<U: Update> ReplySender<U> {
    /// Delivers updates in order. Nothing is delivered after an end or an error.
    pub fn send(&self, updates: impl IntoIterator<Item = Result<U, Refusal>>) {
        let mut state = self.shared.lock();
        for update in updates {
            if state.is_over {
                break;
            }
            state.is_over = update.as_ref().map_or(true, Update::is_last);
            state.updates.push_back(update);
        }
        let is_over = state.is_over;
        drop(state);
        self.shared.arrived.notify_one();
        if is_over {
            self.shared.over.notify_one();
        }
    }
}

impl<U> Reply<U> {
    /// The next update; `None` after the end or an error. Safe to cancel: no update is lost.
    pub async fn next(&mut self) -> Option<Result<U, Refusal>> {
        loop {
            let arrived = self.shared.arrived.notified();
            {
                let mut state = self.shared.lock();
                match state.updates.pop_front() {
                    Some(update) => return Some(update),
                    None if state.is_over => return None,
                    None => {}
                }
            }
            arrived.await;
        }
    }

    /// Waits for the end or an error, which may still be unread. Costs nothing for each update.
    pub async fn over(&self) {
        let over = self.shared.over.notified();
        if !self.shared.lock().is_over {
            over.await;
        }
    }

    /// The updates that have arrived, without waiting.
    pub fn ready(&mut self) -> VecDeque<Result<U, Refusal>> {
        std::mem::take(&mut self.shared.lock().updates)
    }
}

impl<U> Drop for Reply<U> {
    fn drop(&mut self) {
        let on_cancel = {
            let mut state = self.shared.lock();
            let on_cancel = state.on_cancel.take();
            on_cancel.filter(|_| !state.is_over)
        };
        if let Some(on_cancel) = on_cancel {
            on_cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn token(token: u32) -> Result<TokenUpdate, Refusal> {
        Ok(TokenUpdate::Token { token, logprob: 0.0, top: Vec::new() })
    }

    #[tokio::test]
    async fn updates_arrive_in_order_and_nothing_follows_the_end() {
        let (sender, mut reply) = token_reply(|| panic!("a reply that has ended is not cancelled"));
        let reader = tokio::spawn(async move {
            let mut got = Vec::new();
            while let Some(update) = reply.next().await {
                got.push(update);
            }
            got
        });
        tokio::task::yield_now().await;
        sender.send([token(1)]);
        tokio::task::yield_now().await;
        sender.send([token(2), Ok(TokenUpdate::End(FinishedBy::MaxTokens)), token(3)]);
        sender.send([token(4)]);
        let end = Ok(TokenUpdate::End(FinishedBy::MaxTokens));
        assert_eq!(reader.await.unwrap(), [token(1), token(2), end]);
    }

    #[test]
    fn dropping_an_open_reply_cancels_once() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let (sender, mut reply) = token_reply(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        sender.send([token(1)]);
        assert_eq!(reply.ready().len(), 1);
        drop(reply);
        sender.send([token(2)]);
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
