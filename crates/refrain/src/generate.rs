//! Text behind a prompt, piece by piece.

use crate::error::Error;
use crate::model::Model;
use crate::session::Session;
use refrain_engine::{
    Chosen, FinishReason, Pace, Request, SamplingParams, StopFilter, TokenEvent, TokenStream, Verdict,
};
use refrain_formats::chat::{Message, RenderOptions};
use refrain_formats::tokenizer::DecodeStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What to continue.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// A text, as it is.
    Text(&'a str),
    /// A conversation, through the model's chat template.
    Chat(&'a [Message], &'a RenderOptions),
    /// Tokens.
    Tokens(&'a [u32]),
}

/// How to generate.
#[derive(Clone, Debug, Default)]
pub struct Generate {
    /// How tokens are chosen; the model's own parameters when `None`.
    pub sampling: Option<SamplingParams>,
    /// The most tokens to generate; to the end of the turn when `None`.
    pub max_tokens: Option<usize>,
    /// Texts that end the generation; they are not part of the result.
    pub stop: Vec<String>,
    /// Goes on behind end-of-turn tokens.
    pub ignore_end: bool,
    /// Ends the generation when it becomes true, before the next token.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// A piece of generated text.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Text that is ready to be shown; empty while a character is incomplete or a stop text may be coming.
    pub text: String,
    /// The token that led to it; `None` for what was held back to the end.
    pub token: Option<u32>,
    /// The logarithm of the token's probability.
    pub logprob: f32,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    EndOfTurn,
    /// As many tokens as were asked for.
    MaxTokens,
    /// A stop text appeared.
    StopText,
    /// The context is full.
    ContextFull,
    /// It was cancelled.
    Cancelled,
}

/// What a generation took.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Why it ended; `None` while it goes on.
    pub finish: Option<Finish>,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens of the prompt that had to be evaluated.
    pub n_evaluated: usize,
    /// Tokens generated, an end-of-turn token included.
    pub n_generated: usize,
    /// Time to the first token.
    pub prefill: Duration,
    /// Time of all later tokens.
    pub decode: Duration,
}

/// Tokens that the engine may be ahead of the iterator. It shall not wait for whoever shows the text, and little of what
/// it does shall be lost when the text ends at a stop text or is broken off.
const LEAD: usize = 4;

/// An iterator over generated text.
///
/// The prompt is evaluated when the first piece is asked for. From then on the engine's thread is a few tokens ahead of
/// what is asked for, and no further.
pub struct Generation<'s> {
    session: &'s mut Session,
    /// Until it is submitted, with the first piece.
    request: Option<Request>,
    writer: Writer,
    on_prefill: Option<Box<dyn FnMut(usize, usize) + 's>>,
}

impl<'s> Generation<'s> {
    pub(crate) fn new(
        session: &'s mut Session,
        prompt: Prompt<'_>,
        options: &Generate,
    ) -> Result<Self, Error> {
        let prompt = prompt.tokens(&session.model)?;
        let n_cached = session.sequence.n_cached(&prompt)?;
        let mut request = Request::new(&session.sequence, prompt);
        request.pace = Pace::Asked { lead: LEAD };
        let writer = Writer::new(&session.model, &mut request, n_cached, options)?;
        Ok(Generation { request: Some(request), writer, on_prefill: None, session })
    }

    /// Hears how many tokens of the prompt are evaluated, of how many, while the first piece is awaited.
    pub fn on_prefill(mut self, f: impl FnMut(usize, usize) + 's) -> Self {
        self.on_prefill = Some(Box::new(f));
        self
    }

    /// What the generation took so far.
    pub fn summary(&self) -> &Summary {
        &self.writer.summary
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Result<Piece, Error>> {
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
        self.writer.piece(&self.session.model, &mut report)
    }
}

impl Prompt<'_> {
    pub(crate) fn tokens(self, model: &Model) -> Result<Vec<u32>, Error> {
        let tokenizer = model.tokenizer();
        Ok(match self {
            Prompt::Text(text) => tokenizer.encode(text, true, false)?,
            Prompt::Chat(messages, render) => tokenizer.encode_chat(&model.render(messages, render)?)?,
            Prompt::Tokens(tokens) => tokens.to_vec(),
        })
    }
}

/// Makes text of a request's tokens.
pub(crate) struct Writer {
    tokens: Option<TokenStream>,
    began: Instant,
    ignore_end: bool,
    cancel: Option<Arc<AtomicBool>>,
    text: DecodeStream,
    stop: StopFilter,
    pub(crate) summary: Summary,
    failed: bool,
}

impl Writer {
    /// Fills in what the options say of a request whose prompt is known. The engine gets it with [`Writer::begin`].
    pub(crate) fn new(
        model: &Model,
        request: &mut Request,
        n_cached: usize,
        options: &Generate,
    ) -> Result<Writer, Error> {
        let tokenizer = model.tokenizer();
        request.sampling = options.sampling.clone().unwrap_or_else(|| model.sampling());
        request.sampling.check(model.config().n_vocab)?;
        request.max_tokens = options.max_tokens.unwrap_or(usize::MAX);
        if !options.ignore_end {
            request.end = tokenizer.end_of_generation().to_vec();
        }
        let summary = Summary {
            finish: None,
            n_prompt: request.prompt.len(),
            n_evaluated: request.prompt.len() - n_cached,
            n_generated: 0,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        };
        Ok(Writer {
            tokens: None,
            began: Instant::now(),
            ignore_end: options.ignore_end,
            cancel: options.cancel.clone(),
            text: tokenizer.stream(),
            stop: StopFilter::new(&options.stop),
            summary,
            failed: false,
        })
    }

    /// The request was submitted.
    pub(crate) fn begin(&mut self, tokens: TokenStream, began: Instant) {
        (self.tokens, self.began) = (Some(tokens), began);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.failed || self.summary.finish.is_some()
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    pub(crate) fn fail(&mut self, error: Error) -> Option<Result<Piece, Error>> {
        self.failed = true;
        Some(Err(error))
    }

    /// The next piece; `None` behind the last.
    pub(crate) fn piece(
        &mut self,
        model: &Model,
        report: &mut dyn FnMut(usize, usize),
    ) -> Option<Result<Piece, Error>> {
        if self.is_over() {
            return None;
        }
        if self.is_cancelled() {
            return self.end(Finish::Cancelled).map(Ok);
        }
        let chosen = match self.token(report) {
            Ok(Ok(chosen)) => chosen,
            Ok(Err(finish)) => return self.end(finish).map(Ok),
            Err(error) => return self.fail(error),
        };
        self.summary.n_generated += 1;
        if !self.ignore_end && model.tokenizer().is_end_of_generation(chosen.token) {
            return self.end(Finish::EndOfTurn).map(Ok);
        }
        let piece = |text| Piece { text, token: Some(chosen.token), logprob: chosen.logprob };
        match self.stop.push(self.text.push(chosen.token)) {
            Verdict::Pass(text) => Some(Ok(piece(text))),
            Verdict::Stop(text) => {
                self.end_request();
                self.summary.finish = Some(Finish::StopText);
                Some(Ok(piece(text)))
            }
        }
    }

    /// The next token, or why there is none.
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

    /// Ends the generation and gives what was held back.
    fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.end_request();
        let (text, finish) = match self.stop.push(self.text.finish()) {
            Verdict::Pass(text) => (text + &self.stop.finish(), finish),
            Verdict::Stop(text) => (text, Finish::StopText),
        };
        self.summary.finish = Some(finish);
        (!text.is_empty()).then_some(Piece { text, token: None, logprob: 0.0 })
    }

    /// Leaves no step in flight, a complete ledger, and a session that can go on.
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
        FinishReason::MaxTokens => Finish::MaxTokens,
        FinishReason::ContextFull => Finish::ContextFull,
        FinishReason::Cancelled => Finish::Cancelled,
    }
}
