//! Text behind a prompt, piece by piece.

use crate::error::Error;
use crate::session::Session;
use refrain_engine::{
    Ahead, Chosen, Engine, EngineError, SamplingParams, SamplingRow, StepKind, StopFilter, Verdict,
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

/// An iterator over generated text.
pub struct Generation<'s> {
    session: &'s mut Session,
    prompt: Vec<u32>,
    row: SamplingRow,
    max_tokens: usize,
    ignore_end: bool,
    cancel: Option<Arc<AtomicBool>>,
    stream: DecodeStream,
    stop: StopFilter,
    last: Option<u32>,
    summary: Summary,
    failed: bool,
    on_prefill: Option<Box<dyn FnMut(usize, usize) + 's>>,
}

impl<'s> Generation<'s> {
    pub(crate) fn new(
        session: &'s mut Session,
        prompt: Prompt<'_>,
        options: &Generate,
    ) -> Result<Self, Error> {
        let tokenizer = session.model.tokenizer();
        let prompt = match prompt {
            Prompt::Text(text) => tokenizer.encode(text, true, false)?,
            Prompt::Chat(messages, render) => {
                tokenizer.encode_chat(&session.model.render(messages, render)?)?
            }
            Prompt::Tokens(tokens) => tokens.to_vec(),
        };
        let sampling = options.sampling.clone().unwrap_or_else(|| session.model.sampling());
        sampling.check(session.model.config().n_vocab)?;
        let held = session.sequence.tokens();
        let shared = held.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let summary = Summary {
            finish: None,
            n_prompt: prompt.len(),
            n_evaluated: prompt.len() - shared.min(prompt.len().saturating_sub(1)),
            n_generated: 0,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        };
        Ok(Generation {
            prompt,
            row: SamplingRow::new(&sampling),
            max_tokens: options.max_tokens.unwrap_or(usize::MAX),
            ignore_end: options.ignore_end,
            cancel: options.cancel.clone(),
            stream: tokenizer.stream(),
            stop: StopFilter::new(&options.stop),
            last: None,
            summary,
            failed: false,
            on_prefill: None,
            session,
        })
    }

    /// Hears how many tokens of the prompt are evaluated, of how many, while the first piece is awaited.
    pub fn on_prefill(mut self, f: impl FnMut(usize, usize) + 's) -> Self {
        self.on_prefill = Some(Box::new(f));
        self
    }

    /// What the generation took so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    fn step(&mut self) -> Result<Chosen, Error> {
        let began = Instant::now();
        let Session { engine, sequence, model, .. } = &mut *self.session;
        match self.last {
            None => {
                let n = self.prompt.len();
                let mut report = self.on_prefill.take();
                let cancel = self.cancel.clone();
                let chosen = engine.prompt(sequence, &self.prompt, &mut self.row, |done| {
                    if let Some(report) = &mut report {
                        report(done, n);
                    }
                    !cancel.as_ref().is_some_and(|c| c.load(Ordering::Relaxed))
                })?;
                self.summary.prefill = began.elapsed();
                Ok(chosen)
            }
            Some(token) => {
                let spent = |engine: &Engine| engine.ledger().tally(StepKind::Decode).total;
                let (before, n_generated) = (spent(engine), self.summary.n_generated);
                let end = if self.ignore_end { &[] } else { model.tokenizer().end_of_generation() };
                let ahead = Ahead { n_tokens: self.max_tokens - n_generated, end };
                let chosen = engine.follow(sequence, token, &mut self.row, &ahead)?;
                self.summary.decode += spent(engine).saturating_sub(before);
                Ok(chosen)
            }
        }
    }

    /// Ends the generation and gives what was held back.
    fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.session.engine.settle();
        let (text, finish) = match self.stop.push(self.stream.finish()) {
            Verdict::Pass(text) => (text + &self.stop.finish(), finish),
            Verdict::Stop(text) => (text, Finish::StopText),
        };
        self.summary.finish = Some(finish);
        (!text.is_empty()).then_some(Piece { text, token: None, logprob: 0.0 })
    }

    fn reason_to_end(&self) -> Option<Finish> {
        let cancelled = self.cancel.as_ref().is_some_and(|c| c.load(Ordering::Relaxed));
        if cancelled {
            return Some(Finish::Cancelled);
        }
        if self.summary.n_generated >= self.max_tokens {
            return Some(Finish::MaxTokens);
        }
        // The token in hand needs a position before the next can be chosen.
        let full = self.last.is_some() && self.session.sequence.tokens().len() >= self.session.context();
        full.then_some(Finish::ContextFull)
    }
}

impl Drop for Generation<'_> {
    /// One that is dropped half way leaves no step under way, and a ledger that is complete.
    fn drop(&mut self) {
        self.session.engine.settle();
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Result<Piece, Error>> {
        if self.failed || self.summary.finish.is_some() {
            return None;
        }
        if let Some(finish) = self.reason_to_end() {
            return self.end(finish).map(Ok);
        }
        let chosen = match self.step() {
            Ok(chosen) => chosen,
            Err(Error::Engine(EngineError::Cancelled)) => return self.end(Finish::Cancelled).map(Ok),
            Err(error) => {
                self.failed = true;
                return Some(Err(error));
            }
        };
        self.summary.n_generated += 1;
        self.last = Some(chosen.token);
        if !self.ignore_end && self.session.model.tokenizer().is_end_of_generation(chosen.token) {
            return self.end(Finish::EndOfTurn).map(Ok);
        }
        let piece = |text| Piece { text, token: Some(chosen.token), logprob: chosen.logprob };
        match self.stop.push(self.stream.push(chosen.token)) {
            Verdict::Pass(text) => Some(Ok(piece(text))),
            Verdict::Stop(text) => {
                self.session.engine.settle();
                self.summary.finish = Some(Finish::StopText);
                Some(Ok(piece(text)))
            }
        }
    }
}
