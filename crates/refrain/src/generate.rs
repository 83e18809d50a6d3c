//! Text generation: a prompt goes in, text comes out as it is generated.

use crate::error::Error;
use crate::model::Model;
use crate::session::Session;
use refrain_cuda::LoopMode;
use refrain_engine::{
    AdapterId, Chosen, Constraint, FinishReason, Pace, Request, SamplingParams, StopFilter, StopOutcome,
    TokenEvent, TokenStream,
};
use refrain_formats::chat::{Message, RenderOptions};
use refrain_formats::tokenizer::DecodeStream;
use refrain_grammar::Grammar;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The text to continue.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Text, used as it is.
    Text(&'a str),
    /// A conversation, rendered with the model's chat template.
    Chat(&'a [Message], &'a RenderOptions),
    /// Token ids.
    Tokens(&'a [u32]),
}

/// Options of a generation.
#[derive(Clone, Debug, Default)]
pub struct Generate {
    /// Sampling parameters; [`Model::sampling`] when `None`: those that the authors recommend, with a random seed.
    pub sampling: Option<SamplingParams>,
    /// Maximum number of tokens; until the end of the turn when `None`.
    pub max_tokens: Option<usize>,
    /// Stop texts. They end the generation and are not part of the output.
    pub stop: Vec<String>,
    /// Continues past end-of-turn tokens.
    pub ignore_end: bool,
    /// A grammar that the text follows ([`Model::grammar`]). The text ends where the grammar allows it, and is complete if it
    /// ended with [`Finish::EndOfTurn`] or [`Finish::Complete`].
    pub grammar: Option<Grammar>,
    /// The adapter to apply, one of [`Model::with_loras`]. A session decides for all of its generations
    /// ([`SessionOptions::adapter`](crate::SessionOptions::adapter)).
    pub adapter: Option<String>,
    /// Cancels the generation before the next token once it is true.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// The next fragment of generated text.
#[derive(Clone, Debug, PartialEq)]
pub struct TextDelta {
    /// Text that is ready to be shown; empty while a character is incomplete or a stop text may follow.
    pub text: String,
    /// The token that produced it; `None` for text that was held back until the end.
    pub token: Option<u32>,
    /// Log-probability of the token.
    pub logprob: f32,
}

/// The reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    EndOfTurn,
    /// The grammar allows nothing more.
    Complete,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// A stop text appeared.
    StopText,
    /// The context is full.
    ContextFull,
    /// It was cancelled.
    Cancelled,
}

/// Measurements of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Why it ended; `None` while it runs.
    pub finish: Option<Finish>,
    /// Tokens in the prompt.
    pub n_prompt: usize,
    /// Tokens that had to be evaluated, because the cache did not hold them.
    pub n_evaluated: usize,
    /// Tokens generated, including an end-of-turn token.
    pub n_generated: usize,
    /// Time to the first token.
    pub prefill: Duration,
    /// Time for all later tokens.
    pub decode: Duration,
    /// Seed of the random choices: the same seed gives the same text.
    pub seed: u64,
}

/// Tokens that the engine may generate ahead of the iterator. Enough to never wait for the consumer, and few enough that
/// little work is lost when the output ends at a stop text or is cancelled.
const LEAD: usize = 4;

/// An iterator over generated text.
///
/// The prompt is evaluated when the first item is requested. From then on the engine's thread stays a few tokens ahead
/// of the iterator.
pub struct Generation<'s> {
    session: &'s mut Session,
    /// `None` once it is submitted, with the first item.
    request: Option<Request>,
    writer: Writer,
    on_prefill: Option<Box<dyn FnMut(usize, usize) + 's>>,
    on_full: Option<OnFullFn<'s>>,
}

/// Makes space in a full context: from the tokens generated so far to those of a shorter prompt, which ends in them.
/// `None` ends the generation.
pub(crate) type OnFullFn<'s> = Box<dyn FnMut(&Model, &[u32]) -> Result<Option<Vec<u32>>, Error> + 's>;

impl<'s> Generation<'s> {
    /// Everything about the prompt and the options is checked here, before anything is evaluated.
    pub(crate) fn new(
        session: &'s mut Session,
        prompt: Prompt<'_>,
        options: &Generate,
    ) -> Result<Self, Error> {
        let prompt = prompt.tokens(&session.model, session.context())?;
        let n_cached = session.sequence.n_cached(&prompt)?;
        let mut request = Request::new(&session.sequence, prompt);
        prepare(session, &mut request);
        let writer = Writer::new(&session.model, &mut request, n_cached, options)?;
        let refused = session.engine.check(&request);
        refused.map_err(|error| Error::with_limit(error, &session.model))?;
        Ok(Generation { request: Some(request), writer, on_prefill: None, on_full: None, session })
    }

    /// Reports prefill progress while the first item is awaited: tokens evaluated, and tokens in all.
    pub fn on_prefill(mut self, f: impl FnMut(usize, usize) + 's) -> Self {
        self.set_on_prefill(f);
        self
    }

    pub(crate) fn set_on_prefill(&mut self, f: impl FnMut(usize, usize) + 's) {
        self.on_prefill = Some(Box::new(f));
    }

    /// Called when the context is full, instead of ending the generation.
    pub(crate) fn on_full(&mut self, f: OnFullFn<'s>) {
        self.on_full = Some(f);
    }

    /// Measurements so far.
    pub fn summary(&self) -> &Summary {
        &self.writer.summary
    }

    /// Replaces the prompt by a shorter one that ends in what was generated. False where there is none.
    fn make_space(&mut self) -> Result<bool, Error> {
        let Some(on_full) = &mut self.on_full else { return Ok(false) };
        let Some(prompt) = on_full(&self.session.model, &self.writer.generated)? else { return Ok(false) };
        self.writer.end_request();
        let n_cached = self.session.sequence.n_cached(&prompt)?;
        self.writer.summary.n_evaluated += prompt.len() - n_cached;
        let mut request = Request::new(&self.session.sequence, prompt);
        prepare(self.session, &mut request);
        self.writer.limits.apply(&mut request, self.writer.summary.n_generated);
        self.request = Some(request);
        Ok(true)
    }
}

/// Sets what a session decides about its requests.
fn prepare(session: &Session, request: &mut Request) {
    request.pace = match session.loops {
        // A step may choose one token more than it has guesses.
        LoopMode::Host => Pace::OnDemand { lead: LEAD + session.speculation.max_draft() },
        // The whole reply is launched at once.
        LoopMode::Device => Pace::Free,
    };
    request.speculation = session.speculation.of_request();
}

impl Iterator for Generation<'_> {
    type Item = Result<TextDelta, Error>;

    fn next(&mut self) -> Option<Result<TextDelta, Error>> {
        loop {
            let began = Instant::now();
            if self.writer.is_over() {
                return None;
            }
            if !self.writer.is_cancelled()
                && let Some(request) = self.request.take()
            {
                match self.session.engine.submit(request) {
                    Ok(tokens) => self.writer.begin(tokens, began),
                    Err(error) => return self.writer.fail(error.into()),
                }
            }
            let mut report = |n_done, n_tokens| {
                if let Some(report) = &mut self.on_prefill {
                    report(n_done, n_tokens);
                }
            };
            match self.writer.advance(&self.session.model, &mut report) {
                Advance::Item(item) => return item,
                Advance::Full => match self.make_space() {
                    Ok(true) => {}
                    Ok(false) => return self.writer.end(Finish::ContextFull).map(Ok),
                    Err(error) => return self.writer.fail(error),
                },
            }
        }
    }
}

impl Prompt<'_> {
    /// The prompt's tokens. A text that is far too long for the context is refused before it is tokenized, which takes
    /// seconds and much memory for a large file.
    pub(crate) fn tokens(self, model: &Model, context: usize) -> Result<Vec<u32>, Error> {
        let tokenizer = model.tokenizer();
        Ok(match self {
            Prompt::Text(text) => {
                model.check_length(text.len(), context)?;
                tokenizer.encode(text, true, false)?
            }
            Prompt::Chat(messages, render) => {
                model.check_length(messages.iter().map(|message| message.content.len()).sum(), context)?;
                tokenizer.encode_chat(&model.render(messages, render)?)?
            }
            Prompt::Tokens(tokens) => tokens.to_vec(),
        })
    }
}

/// The parameters of a request, kept for one that continues it.
struct RequestLimits {
    sampling: SamplingParams,
    max_tokens: usize,
    end: Vec<u32>,
    grammar: Option<Grammar>,
}

impl RequestLimits {
    fn apply(&self, request: &mut Request, n_generated: usize) {
        request.sampling = self.sampling.clone();
        request.max_tokens = match self.max_tokens {
            usize::MAX => usize::MAX,
            max => max.saturating_sub(n_generated),
        };
        request.end.clone_from(&self.end);
        request.constraint = self.grammar.clone().map(|grammar| Constraint {
            // The prompt ends in what was generated.
            n_given: n_generated,
            ..Constraint::new(grammar)
        });
    }
}

/// The next item of a generation, or a context that holds no further token.
#[expect(
    clippy::large_enum_variant,
    reason = "matched where it is returned; a box would allocate for every token"
)]
enum Advance {
    Item(Option<Result<TextDelta, Error>>),
    Full,
}

/// Turns a request's tokens into text.
pub(crate) struct Writer {
    tokens: Option<TokenStream>,
    began: Instant,
    ignore_end: bool,
    cancel: Option<Arc<AtomicBool>>,
    text: DecodeStream,
    stop: StopFilter,
    limits: RequestLimits,
    generated: Vec<u32>,
    pub(crate) summary: Summary,
    failed: bool,
}

impl Writer {
    /// Fills in a request from the options. [`Writer::begin`] takes the stream of the submitted request.
    pub(crate) fn new(
        model: &Model,
        request: &mut Request,
        n_cached: usize,
        options: &Generate,
    ) -> Result<Writer, Error> {
        let tokenizer = model.tokenizer();
        let sampling = options.sampling.clone().unwrap_or_else(|| model.sampling());
        sampling.check(model.config().n_vocab)?;
        let end = if options.ignore_end { Vec::new() } else { tokenizer.end_of_generation().to_vec() };
        let seed = sampling.seed;
        let max_tokens = options.max_tokens.unwrap_or(usize::MAX);
        let limits = RequestLimits { sampling, max_tokens, end, grammar: options.grammar.clone() };
        limits.apply(request, 0);
        if let Some(name) = &options.adapter {
            request.adapter = Some(AdapterId::find(model.weights(), name)?);
        }
        let summary = Summary {
            finish: None,
            n_prompt: request.prompt.len(),
            n_evaluated: request.prompt.len() - n_cached,
            n_generated: 0,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            seed,
        };
        Ok(Writer {
            tokens: None,
            began: Instant::now(),
            ignore_end: options.ignore_end,
            cancel: options.cancel.clone(),
            text: tokenizer.stream(),
            stop: StopFilter::new(&options.stop),
            limits,
            generated: Vec::new(),
            summary,
            failed: false,
        })
    }

    /// Starts reading the tokens of the submitted request.
    pub(crate) fn begin(&mut self, tokens: TokenStream, began: Instant) {
        (self.tokens, self.began) = (Some(tokens), began);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.failed || self.summary.finish.is_some()
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    pub(crate) fn fail(&mut self, error: Error) -> Option<Result<TextDelta, Error>> {
        self.failed = true;
        Some(Err(error))
    }

    /// The next fragment; `None` after the last.
    pub(crate) fn next(&mut self, model: &Model) -> Option<Result<TextDelta, Error>> {
        match self.advance(model, &mut |_, _| {}) {
            Advance::Item(item) => item,
            Advance::Full => self.end(Finish::ContextFull).map(Ok),
        }
    }

    fn advance(&mut self, model: &Model, report: &mut dyn FnMut(usize, usize)) -> Advance {
        if self.is_over() {
            return Advance::Item(None);
        }
        if self.is_cancelled() {
            return Advance::Item(self.end(Finish::Cancelled).map(Ok));
        }
        let chosen = match self.token(report) {
            Ok(Ok(chosen)) => chosen,
            Ok(Err(Finish::ContextFull)) => return Advance::Full,
            Ok(Err(finish)) => return Advance::Item(self.end(finish).map(Ok)),
            Err(error) => return Advance::Item(self.fail(error)),
        };
        self.summary.n_generated += 1;
        self.generated.push(chosen.token);
        if !self.ignore_end && model.tokenizer().is_end_of_generation(chosen.token) {
            return Advance::Item(self.end(Finish::EndOfTurn).map(Ok));
        }
        let delta = |text| TextDelta { text, token: Some(chosen.token), logprob: chosen.logprob };
        Advance::Item(match self.stop.push(self.text.push(chosen.token)) {
            StopOutcome::Pass(text) => Some(Ok(delta(text))),
            StopOutcome::Stop(text) => {
                self.end_request();
                self.summary.finish = Some(Finish::StopText);
                Some(Ok(delta(text)))
            }
        })
    }

    /// The next token, or the reason why there is none.
    fn token(&mut self, report: &mut dyn FnMut(usize, usize)) -> Result<Result<Chosen, Finish>, Error> {
        loop {
            let Some(event) = self.tokens.as_mut().and_then(Iterator::next) else {
                return Ok(Err(Finish::Cancelled));
            };
            match event? {
                TokenEvent::Prompt { n_done, n_tokens } => {
                    report(n_done, n_tokens);
                    if self.is_cancelled() {
                        return Ok(Err(Finish::Cancelled));
                    }
                }
                TokenEvent::Token { token, logprob, took, .. } => {
                    match self.summary.n_generated {
                        0 => self.summary.prefill = self.began.elapsed(),
                        _ => self.summary.decode += took,
                    }
                    return Ok(Ok(Chosen { token, logprob }));
                }
                TokenEvent::End(reason) => return Ok(Err(finish_of(reason))),
            }
        }
    }

    /// Ends the generation and returns the text that was held back.
    fn end(&mut self, finish: Finish) -> Option<TextDelta> {
        self.end_request();
        let (text, finish) = match self.stop.push(self.text.finish()) {
            StopOutcome::Pass(text) => (text + &self.stop.finish(), finish),
            StopOutcome::Stop(text) => (text, Finish::StopText),
        };
        self.summary.finish = Some(finish);
        (!text.is_empty()).then_some(TextDelta { text, token: None, logprob: 0.0 })
    }

    /// Ends the request: no step is in flight afterwards, the ledger is complete, and the session can be used again.
    fn end_request(&mut self) {
        if let Some(mut tokens) = self.tokens.take() {
            tokens.stop();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end_request();
    }
}

fn finish_of(reason: FinishReason) -> Finish {
    match reason {
        FinishReason::EndToken => Finish::EndOfTurn,
        FinishReason::Complete => Finish::Complete,
        FinishReason::MaxTokens => Finish::MaxTokens,
        FinishReason::ContextFull => Finish::ContextFull,
        FinishReason::Cancelled => Finish::Cancelled,
    }
}
