//! From tokens to text: decoding, stop texts, thinking and tool calls.

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::served::ServedModel;
use crate::tools::{ToolCall, ToolDelta, ToolFormat, ToolParser};
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt as _};
use refrain::{DecodeStream, PartKind, StopFilter, StopOutcome, ThinkFilter};
use refrain_worker::{FinishedBy, Refusal, RefusalKind, TokenReply, TokenUpdate};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended its turn.
    EndToken,
    /// A token of the request's stop list was chosen.
    StopToken(u32),
    /// A stop text appeared.
    StopText(String),
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The model called tools and ended its turn.
    ToolCalls,
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprob {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
}

/// What has been added to a reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Thinking.
    pub(crate) reasoning: String,
    /// The answer.
    pub(crate) text: String,
    /// Complete tool calls.
    pub(crate) calls: Vec<ToolCall>,
    /// The tokens, if log-probabilities were asked for.
    pub(crate) logprobs: Vec<TokenLogprob>,
    /// Number of tokens.
    pub(crate) n_tokens: usize,
    /// Of those, how many were thinking.
    pub(crate) n_reasoning: usize,
    /// Set in the last delta.
    pub(crate) finish: Option<Finish>,
}

impl Delta {
    /// Whether a client has something to see.
    fn is_empty(&self) -> bool {
        self.reasoning.is_empty()
            && self.text.is_empty()
            && self.calls.is_empty()
            && self.logprobs.is_empty()
            && self.finish.is_none()
    }
}

/// How tokens become text, the same for all choices of a request.
pub(crate) struct TextRules {
    pub(crate) model: Arc<ServedModel>,
    /// Tokens that end the reply; their text is not shown.
    pub(crate) end: Vec<u32>,
    /// Of those, the ones that the request named.
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop: Vec<String>,
    /// Stop texts are not looked for in the first tokens.
    pub(crate) min_tokens: usize,
    /// The stop text is part of the reply.
    pub(crate) include_stop: bool,
    /// Show control tokens.
    pub(crate) with_special: bool,
    /// Separates thinking from the answer.
    pub(crate) think: Option<ThinkFilter>,
    pub(crate) tools: Option<ToolFormat>,
    /// At most one tool call.
    pub(crate) single_call: bool,
    /// Keep log-probabilities.
    pub(crate) logprobs: bool,
}

/// One choice of a reply, as text. Dropping it cancels the request.
pub(crate) struct TextReply {
    /// `None` once it has ended.
    reply: Option<TokenReply>,
    rules: Arc<TextRules>,
    decode: DecodeStream,
    splitter: Splitter,
    n_tokens: usize,
    /// Tokens without text of their own, such as half a character: they count in the next delta.
    pending: Delta,
    /// An error that arrived together with text: it follows that text.
    failed: Option<Refusal>,
    timing: Timing,
}

impl TextReply {
    pub(crate) fn new(reply: TokenReply, rules: Arc<TextRules>, metrics: Arc<Metrics>) -> TextReply {
        let tokenizer = rules.model.tokenizer();
        // Some families mark tool calls by control tokens.
        let with_special = rules.with_special || rules.tools.is_some();
        let decode = if with_special { tokenizer.stream_with_special() } else { tokenizer.stream() };
        let splitter = Splitter::new(&rules);
        let timing = Timing::start(metrics);
        TextReply {
            reply: Some(reply),
            rules,
            decode,
            splitter,
            n_tokens: 0,
            pending: Delta::default(),
            failed: None,
            timing,
        }
    }

    /// The next delta; `None` after the last one. Everything that has arrived is one delta. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        loop {
            if let Some(refusal) = self.failed.take() {
                self.reply = None;
                self.timing.metrics.ended("error");
                return Some(Err(refusal.into()));
            }
            let first = self.reply.as_mut()?.next().await;
            let mut delta = std::mem::take(&mut self.pending);
            let n_before = delta.n_tokens;
            self.take(first.unwrap_or_else(|| Err(ended_early())), &mut delta);
            let ready = self.reply.as_mut().map(TokenReply::ready).unwrap_or_default();
            for update in ready {
                if delta.finish.is_some() || self.failed.is_some() {
                    break;
                }
                self.take(update, &mut delta);
            }
            self.timing.arrived(delta.n_tokens - n_before);
            if let Some(finish) = &delta.finish {
                // The rest of the reply is not wanted: this cancels it if it goes on.
                self.reply = None;
                self.timing.metrics.finished(finish);
            }
            if !delta.is_empty() {
                return Some(Ok(delta));
            }
            self.pending = delta;
        }
    }

    /// Waits for a while, so that more tokens arrive, but not longer than until the end.
    async fn gather(&mut self, pause: Duration) {
        if let Some(reply) = &self.reply {
            // Running out of time is the usual case.
            let _ = tokio::time::timeout(pause, reply.over()).await;
        }
    }

    fn take(&mut self, update: Result<TokenUpdate, Refusal>, delta: &mut Delta) {
        match update {
            Ok(TokenUpdate::Prompt { .. }) => {}
            Ok(TokenUpdate::Token { token, logprob, top }) => {
                if self.rules.logprobs {
                    delta.logprobs.push(TokenLogprob { token, logprob, top });
                }
                self.token(token, delta);
            }
            Ok(TokenUpdate::End(by)) => self.end(by, delta),
            Err(refusal) => self.failed = Some(refusal),
        }
    }

    fn token(&mut self, token: u32, delta: &mut Delta) {
        self.n_tokens += 1;
        delta.n_tokens += 1;
        if self.rules.end.contains(&token) {
            self.splitter.stop_token = Some(token);
            return;
        }
        let looks_for_stops = self.n_tokens > self.rules.min_tokens;
        let text = self.decode.push(token);
        if let Some(stop) = self.splitter.text(text, looks_for_stops, delta) {
            self.finish(Finish::StopText(stop), delta);
        }
        delta.n_reasoning += usize::from(self.splitter.is_thinking());
    }

    fn end(&mut self, by: FinishedBy, delta: &mut Delta) {
        let finish = match by {
            FinishedBy::EndToken => match self.splitter.stop_token {
                Some(token) if self.rules.stop_ids.contains(&token) => Finish::StopToken(token),
                _ => Finish::EndToken,
            },
            // The reply is whole, as if the model had ended its turn.
            FinishedBy::Complete => Finish::EndToken,
            FinishedBy::MaxTokens => Finish::MaxTokens,
            FinishedBy::ContextFull => Finish::ContextFull,
            FinishedBy::Cancelled => {
                self.failed = Some(cancelled());
                return;
            }
        };
        if let Finish::StopToken(token) = finish
            && self.rules.include_stop
        {
            let text = self.decode.push(token);
            self.splitter.text(text, false, delta);
        }
        let held = self.decode.finish();
        match self.splitter.text(held, true, delta) {
            Some(stop) => self.finish(Finish::StopText(stop), delta),
            None => self.finish(finish, delta),
        }
    }

    fn finish(&mut self, finish: Finish, delta: &mut Delta) {
        self.splitter.finish(delta);
        let called = self.splitter.n_calls > 0;
        let ends_turn = matches!(finish, Finish::EndToken | Finish::StopToken(_));
        delta.finish = Some(if called && ends_turn { Finish::ToolCalls } else { finish });
    }
}

fn ended_early() -> Refusal {
    Refusal {
        kind: RefusalKind::Failed,
        message: "the reply ended without a reason".into(),
        hint: Some("send the request again".into()),
        retry_after: None,
    }
}

fn cancelled() -> Refusal {
    Refusal {
        kind: RefusalKind::Unavailable,
        message: "the server cancelled the request".into(),
        hint: Some("send the request again when the server is ready".into()),
        retry_after: None,
    }
}

/// Splits decoded text into thinking, answer and tool calls, up to a stop text.
struct Splitter {
    stop: Option<StopFilter>,
    stops: Vec<String>,
    include_stop: bool,
    /// The whole text so far, to tell which stop text ended it. Empty without stop texts.
    whole: String,
    /// How much of it has passed the filter.
    n_passed: usize,
    think: Option<ThinkFilter>,
    tools: Option<ToolParser>,
    single_call: bool,
    n_calls: usize,
    stop_token: Option<u32>,
}

impl Splitter {
    fn new(rules: &TextRules) -> Splitter {
        let has_stops = !rules.stop.is_empty();
        Splitter {
            stop: has_stops.then(|| StopFilter::new(&rules.stop)),
            stops: rules.stop.clone(),
            include_stop: rules.include_stop,
            whole: String::new(),
            n_passed: 0,
            think: rules.think.clone(),
            tools: rules.tools.clone().map(ToolParser::new),
            single_call: rules.single_call,
            n_calls: 0,
            stop_token: None,
        }
    }

    fn is_thinking(&self) -> bool {
        self.think.as_ref().is_some_and(ThinkFilter::is_thinking)
    }

    /// Adds decoded text; returns the stop text that ends the reply.
    fn text(&mut self, text: &str, looks_for_stops: bool, delta: &mut Delta) -> Option<String> {
        if text.is_empty() {
            return None;
        }
        let Some(filter) = &mut self.stop else {
            self.pass(text, delta);
            return None;
        };
        self.whole.push_str(text);
        if !looks_for_stops {
            self.n_passed += text.len();
            self.pass(text, delta);
            return None;
        }
        match filter.push(text) {
            StopOutcome::Pass(passed) => {
                self.n_passed += passed.len();
                self.pass(&passed, delta);
                None
            }
            StopOutcome::Stop(passed) => {
                self.n_passed += passed.len();
                let after = self.whole.get(self.n_passed..).unwrap_or_default();
                let found = self.stops.iter().filter(|stop| after.starts_with(stop.as_str()));
                let stop = found.max_by_key(|stop| stop.len()).cloned().unwrap_or_default();
                let shown = if self.include_stop { passed + &stop } else { passed };
                self.pass(&shown, delta);
                self.stop = None;
                Some(stop)
            }
        }
    }

    fn pass(&mut self, text: &str, delta: &mut Delta) {
        if text.is_empty() {
            return;
        }
        match &mut self.think {
            None => self.answer(text, delta),
            Some(think) => {
                for part in think.push(text) {
                    self.part(part.kind, &part.text, delta);
                }
            }
        }
    }

    fn part(&mut self, kind: PartKind, text: &str, delta: &mut Delta) {
        match kind {
            PartKind::Thinking => delta.reasoning.push_str(text),
            PartKind::Answer => self.answer(text, delta),
        }
    }

    fn answer(&mut self, text: &str, delta: &mut Delta) {
        match &mut self.tools {
            None => delta.text.push_str(text),
            Some(tools) => {
                let found = tools.push(text);
                self.found(found, delta);
            }
        }
    }

    fn found(&mut self, found: ToolDelta, delta: &mut Delta) {
        delta.text.push_str(&found.text);
        for call in found.calls {
            if !(self.single_call && self.n_calls > 0) {
                delta.calls.push(call);
            }
            self.n_calls += 1;
        }
    }

    /// Passes on what was held back.
    fn finish(&mut self, delta: &mut Delta) {
        if let Some(held) = self.stop.take().map(|mut stop| stop.finish()) {
            self.pass(&held, delta);
        }
        if let Some(part) = self.think.take().and_then(ThinkFilter::finish) {
            self.part(part.kind, &part.text, delta);
        }
        if let Some(found) = self.tools.take().map(ToolParser::finish) {
            self.found(found, delta);
        }
    }
}

/// Times of a choice.
struct Timing {
    metrics: Arc<Metrics>,
    submitted: Instant,
    /// When the last token arrived.
    last: Option<Instant>,
    is_over: bool,
}

impl Timing {
    fn start(metrics: Arc<Metrics>) -> Timing {
        metrics.n_waiting.fetch_add(1, Ordering::Relaxed);
        Timing { metrics, submitted: Instant::now(), last: None, is_over: false }
    }

    /// Updates have arrived, with this many tokens among them.
    fn arrived(&mut self, n_tokens: usize) {
        let now = Instant::now();
        self.metrics.progress(now);
        if n_tokens == 0 {
            return;
        }
        self.metrics.n_generated_tokens.fetch_add(n_tokens as u64, Ordering::Relaxed);
        match self.last.replace(now) {
            None => {
                self.stop_waiting();
                let first = now - self.submitted;
                self.metrics.first_token.record(first);
                self.metrics.recent_first.record(first);
            }
            Some(last) => {
                let each = (now - last) / u32::try_from(n_tokens).unwrap_or(u32::MAX);
                self.metrics.inter_token.record_n(each, n_tokens as u64);
                self.metrics.recent_inter.record(each);
            }
        }
    }

    fn stop_waiting(&mut self) {
        if !self.is_over {
            self.is_over = true;
            self.metrics.n_waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        self.stop_waiting();
    }
}

/// The choices of a request, as they arrive.
pub(crate) enum Choices {
    /// One choice, the usual case.
    One(Box<TextReply>),
    /// Several choices.
    Many(SelectAll<BoxStream<'static, (usize, Result<Delta, ApiError>)>>),
}

impl Choices {
    pub(crate) fn new(mut replies: Vec<TextReply>) -> Choices {
        if replies.len() == 1
            && let Some(reply) = replies.pop()
        {
            return Choices::One(Box::new(reply));
        }
        let numbered = replies.into_iter().enumerate().map(|(idx, reply)| {
            let deltas = stream::unfold(Box::new(reply), |mut reply| async move {
                reply.next().await.map(|delta| (delta, reply))
            });
            deltas.map(move |delta| (idx, delta)).boxed()
        });
        Choices::Many(stream::select_all(numbered))
    }

    /// Waits for a while, so that the next delta has more tokens.
    pub(crate) async fn gather(&mut self, pause: Duration) {
        match self {
            Choices::One(reply) => reply.gather(pause).await,
            Choices::Many(_) => tokio::time::sleep(pause).await,
        }
    }

    /// The next delta with the index of its choice; `None` when all have ended. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Option<(usize, Result<Delta, ApiError>)> {
        match self {
            Choices::One(reply) => reply.next().await.map(|delta| (0, delta)),
            Choices::Many(replies) => replies.next().await,
        }
    }
}
