//! Grammars of requests, compiled on a thread of their own.
//!
//! Submitting must not wait, but preparing a large vocabulary takes seconds and a grammar may take a while. So a request with
//! a grammar is submitted to its engine by this thread, once its grammar is compiled; its stream is pending until then.

use crate::engine::{EngineFailure, Progress, TokenSource, failure};
use crate::tokens::{TokenGrammar, TokenUpdate};
use refrain::{Error, Grammar, GrammarSource, Model};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;

/// Compiled grammars that are kept: many requests have the same one.
const MAX_KNOWN: usize = 64;

/// Submits a request once its grammar is compiled.
type Submit = Box<dyn FnOnce(Grammar) -> Result<Box<dyn TokenSource>, EngineFailure> + Send>;

/// The thread that compiles the grammars of one model. It ends when this handle is dropped.
pub(crate) struct GrammarThread {
    jobs: mpsc::Sender<CompileJob>,
}

struct CompileJob {
    source: GrammarSource,
    submit: Submit,
    pending: Arc<Mutex<PendingState>>,
}

enum PendingState {
    Waiting(Option<Waker>),
    Submitted(Box<dyn TokenSource>),
    Failed(EngineFailure),
    Over,
}

impl GrammarThread {
    /// Starts the thread. Progress is what shows that a worker with pending requests is not stuck.
    pub(crate) fn start(model: Model, progress: Progress) -> std::io::Result<GrammarThread> {
        let (jobs, received) = mpsc::channel::<CompileJob>();
        thread::Builder::new().name("grammars".into()).spawn(move || {
            let mut known: Vec<Grammar> = Vec::new();
            for CompileJob { source, submit, pending } in received {
                // The client may have left while others were compiled.
                if Arc::strong_count(&pending) == 1 {
                    continue;
                }
                if model.vocabulary().is_ok() {
                    progress.advance(1);
                }
                let submitted =
                    grammar(&model, &source, &mut known).map_err(|error| failure(&error)).and_then(submit);
                let next = match submitted {
                    Ok(stream) => PendingState::Submitted(stream),
                    Err(failed) => PendingState::Failed(failed),
                };
                let before = std::mem::replace(&mut *lock(&pending), next);
                progress.advance(1);
                if let PendingState::Waiting(Some(waker)) = before {
                    waker.wake();
                }
            }
        })?;
        Ok(GrammarThread { jobs })
    }

    /// A stream that begins when the grammar is compiled and the request submitted.
    pub(crate) fn submit(&self, grammar: &TokenGrammar, submit: Submit) -> Box<dyn TokenSource> {
        let pending = Arc::new(Mutex::new(PendingState::Waiting(None)));
        let job = CompileJob { source: source_of(grammar), submit, pending: pending.clone() };
        if self.jobs.send(job).is_err() {
            let failed = Error::Engine(refrain::EngineError::Stopped(refrain::Stopped::Closed));
            *lock(&pending) = PendingState::Failed(failure(&failed));
        }
        Box::new(PendingSource { state: pending })
    }
}

fn grammar(model: &Model, source: &GrammarSource, known: &mut Vec<Grammar>) -> Result<Grammar, Error> {
    let grammar = match known.iter().position(|grammar| grammar.source() == source) {
        Some(idx) => known.remove(idx),
        None => model.grammar(source)?,
    };
    if known.len() == MAX_KNOWN {
        known.remove(0);
    }
    known.push(grammar.clone());
    Ok(grammar)
}

fn source_of(grammar: &TokenGrammar) -> GrammarSource {
    match grammar.clone() {
        TokenGrammar::JsonObject => GrammarSource::JsonObject,
        TokenGrammar::JsonSchema(text) => GrammarSource::JsonSchema(text),
        TokenGrammar::Regex(text) => GrammarSource::Regex(text),
        TokenGrammar::Lark(text) => GrammarSource::Lark(text),
        TokenGrammar::JsonBetween { before, schema, after } => {
            GrammarSource::JsonBetween { before, schema, after }
        }
    }
}

struct PendingSource {
    state: Arc<Mutex<PendingState>>,
}

impl TokenSource for PendingSource {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<TokenUpdate, EngineFailure>>> {
        let mut state = lock(&self.state);
        match &mut *state {
            PendingState::Waiting(waker) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            PendingState::Submitted(stream) => stream.poll_next(context),
            PendingState::Failed(_) | PendingState::Over => {
                Poll::Ready(match std::mem::replace(&mut *state, PendingState::Over) {
                    PendingState::Failed(failed) => Some(Err(failed)),
                    _ => None,
                })
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
