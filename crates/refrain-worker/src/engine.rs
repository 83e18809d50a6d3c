//! What a worker serves requests with: an engine per model, from a shelf of models.
//!
//! The traits separate a worker from what chooses its tokens. [`ModelShelf`] is the real shelf; [`fake`](crate::fake) has
//! one without models, to measure and to test with.

use crate::embedder::EmbedEngine;
use crate::grammars::GrammarThread;
use crate::protocol::LastWords;
use crate::tokens::{
    EmbedRequest, FinishedBy, LoadStatus, Refusal, RefusalKind, StepCounts, TokenRequest, TokenUpdate,
};
use refrain::{
    AdapterId, Builtin, Constraint, CudaError, Embedder, EngineError, FinishReason, Ledger, LoadListener,
    Model, NamedLora, Request, SamplingParams, Service, ServiceOptions, StepKind, Stopped, TokenEvent,
    TokenStream,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// Counts whatever shows that a worker is not stuck.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Notes that something advanced.
    pub fn advance(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Number of advances so far.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A model on a device that serves requests for tokens.
pub trait TokenEngine: Send + Sync + 'static {
    /// Submits a request. The last `n_delivered` tokens of its prompt are tokens that an earlier engine chose for it: its
    /// limits on tokens include them. Must not wait for a step.
    fn submit(
        &self,
        request: TokenRequest,
        n_delivered: usize,
    ) -> Result<Box<dyn TokenSource>, EngineFailure>;

    /// Submits texts to embed, given as tokens. Must not wait for a step.
    fn embed(&self, request: EmbedRequest) -> Result<Box<dyn VectorSource>, EngineFailure> {
        Err(invalid(
            format!("{} generates text, and its files do not say how it embeds texts", request.model),
            "serve an embedding model beside it: refrain serve chat=MODEL embed=all-MiniLM-L6-v2",
        ))
    }

    /// Name of the backend.
    fn backend(&self) -> &str;

    /// The load. May wait for the end of a step. The name of the model is set by the caller.
    fn load(&self) -> Result<LoadStatus, EngineFailure>;
}

/// The updates of one request. Dropping it cancels the request.
pub trait TokenSource: Send {
    /// The next update; `None` after the end. The waker must not block.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<TokenUpdate, EngineFailure>>>;
}

/// The vectors of one request. Dropping it cancels the request.
pub trait VectorSource: Send {
    /// The vector of the next text; `None` after the last. The waker must not block.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Vec<f32>, EngineFailure>>>;
}

/// Why an engine did not do what it was asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineFailure {
    /// One request is at fault.
    Refused(Refusal),
    /// The engine is unusable: the worker must be replaced.
    Unusable(LastWords),
}

/// The models that a worker may load.
pub trait Shelf: Send + 'static {
    /// What loading decides.
    fn titles(&self) -> Vec<Title>;

    /// The memory that a model takes when it is loaded, in bytes.
    fn needs(&mut self, model_idx: usize) -> Result<u64, EngineFailure>;

    /// Loads a model. A refusal of kind [`RefusalKind::Busy`] says that the device's memory is short: another attempt is
    /// made if another model can be unloaded.
    fn load(&mut self, model_idx: usize, progress: &Progress) -> Result<Arc<dyn TokenEngine>, EngineFailure>;
}

/// A model on a shelf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Title {
    /// Name under which it is served.
    pub name: String,
    /// Names under which it is served with an adapter.
    pub adapters: Vec<String>,
    /// Loaded when the worker starts, instead of with the first request.
    pub at_start: bool,
}

/// A model to serve.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Name under which it is served.
    pub name: String,
    /// Its files.
    pub source: ModelSource,
    /// LoRA adapters, each of which is served under its own name. They share the loaded model.
    pub adapters: Vec<NamedLora>,
    /// Device, context and cache.
    pub options: ServiceOptions,
    /// Whether it is loaded when the worker starts.
    pub at_start: bool,
}

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A model of the library.
    Builtin(Builtin),
    /// A GGUF file or a Hugging Face folder.
    Path(PathBuf),
}

/// Models in files.
#[derive(Debug)]
pub struct ModelShelf {
    specs: Vec<ModelSpec>,
}

impl ModelShelf {
    /// A shelf of these models.
    pub fn new(specs: Vec<ModelSpec>) -> ModelShelf {
        ModelShelf { specs }
    }

    fn open(&self, model_idx: usize) -> Result<(Model, &ModelSpec), refrain::Error> {
        let spec = &self.specs[model_idx];
        let model = match &spec.source {
            ModelSource::Builtin(builtin) => builtin.open()?,
            ModelSource::Path(path) => Model::open(path)?,
        };
        // Texts to embed are packed without regard to adapters: see `embedders`.
        match spec.adapters.is_empty() || model.embedding()?.is_some() {
            true => Ok((model, spec)),
            false => Ok((model.with_loras(&spec.adapters)?, spec)),
        }
    }

    /// A model that embeds texts, and a model of its own for each of its adapters, by the names of all.
    fn embedders(model: &Model, spec: &ModelSpec) -> Result<Vec<(String, Model)>, refrain::Error> {
        let mut models = vec![(spec.name.clone(), model.clone())];
        for NamedLora { name, folder, scale } in &spec.adapters {
            models.push((name.clone(), model.with_lora(folder, *scale)?));
        }
        Ok(models)
    }
}

impl Shelf for ModelShelf {
    fn titles(&self) -> Vec<Title> {
        let title = |spec: &ModelSpec| Title {
            name: spec.name.clone(),
            adapters: spec.adapters.iter().map(|adapter| adapter.name.clone()).collect(),
            at_start: spec.at_start,
        };
        self.specs.iter().map(title).collect()
    }

    fn needs(&mut self, model_idx: usize) -> Result<u64, EngineFailure> {
        let (model, spec) =
            self.open(model_idx).map_err(|error| not_loaded(&self.specs[model_idx], &error))?;
        let needs = match model.embedding() {
            Ok(Some(_)) => ModelShelf::embedders(&model, spec)
                .map(|models| models.iter().map(|(_, model)| Embedder::memory_needs(model)).sum()),
            Ok(None) => Service::memory_needs(&model, &spec.options),
            Err(error) => Err(error),
        };
        needs.map_err(|error| not_loaded(spec, &error))
    }

    fn load(&mut self, model_idx: usize, progress: &Progress) -> Result<Arc<dyn TokenEngine>, EngineFailure> {
        let refused = |error| not_loaded(&self.specs[model_idx], &error);
        let (model, spec) = self.open(model_idx).map_err(refused)?;
        progress.advance(1);
        let (mut options, loading) = (spec.options.clone(), progress.clone());
        options.session.on_load = LoadListener::new(move |_| loading.advance(1));
        if model.embedding().map_err(refused)?.is_some() {
            // Its files say how long its texts may be: the context is that of models that generate text.
            options.session.context = None;
            let models = ModelShelf::embedders(&model, spec).map_err(refused)?;
            return Ok(Arc::new(EmbedEngine::new(&models, &options.session).map_err(refused)?));
        }
        let service = Service::new(&model, &options).map_err(refused)?;
        let grammars = GrammarThread::start(model.clone(), progress.clone()).map_err(|error| {
            let message = format!("the thread for grammars cannot be started: {error}");
            EngineFailure::Unusable(LastWords { lost_device: false, message, hint: None })
        })?;
        Ok(Arc::new(ServiceEngine { service, grammars }))
    }
}

/// The failure to load a model.
fn not_loaded(spec: &ModelSpec, error: &refrain::Error) -> EngineFailure {
    let failure = failure(error);
    let EngineFailure::Refused(refusal) = failure else { return failure };
    let kind = match error.cuda() {
        Some(CudaError::DoesNotFit(_)) => RefusalKind::Busy,
        _ => RefusalKind::Unavailable,
    };
    let message = format!("model {} cannot be loaded: {}", spec.name, refusal.message);
    EngineFailure::Refused(Refusal { kind, message, ..refusal })
}

/// A service as an engine of a worker.
struct ServiceEngine {
    service: Service,
    grammars: GrammarThread,
}

impl ServiceEngine {
    /// The adapter that is served under a name; `None` for the model itself.
    fn adapter(&self, name: &str) -> Option<AdapterId> {
        let known = self.service.model().adapter_names();
        known.iter().position(|other| other == name).map(|idx| AdapterId(idx as u32))
    }
}

impl TokenEngine for ServiceEngine {
    fn submit(
        &self,
        request: TokenRequest,
        n_delivered: usize,
    ) -> Result<Box<dyn TokenSource>, EngineFailure> {
        let adapter = self.adapter(&request.model);
        let Some(grammar) = request.grammar.clone() else {
            return open(&self.service, continuation(request, n_delivered, adapter), n_delivered);
        };
        let service = self.service.clone();
        let submit = move |grammar| {
            let mut request = continuation(request, n_delivered, adapter);
            request.constraint = Some(Constraint { n_given: n_delivered, ..Constraint::new(grammar) });
            open(&service, request, n_delivered)
        };
        Ok(self.grammars.submit(&grammar, Box::new(submit)))
    }

    fn backend(&self) -> &str {
        self.service.backend()
    }

    fn load(&self) -> Result<LoadStatus, EngineFailure> {
        let load = self.service.load().map_err(|error| failure(&error))?;
        let steps = counts(&self.service.ledger().map_err(|error| failure(&error))?);
        Ok(LoadStatus {
            model: String::new(),
            context: self.service.context(),
            n_running: load.n_running,
            n_waiting: load.n_waiting,
            n_preempted: load.n_preempted,
            kv_blocks: load.blocks.total,
            kv_blocks_used: load.blocks.used,
            n_prefix_hit_tokens: load.prompts.n_cached,
            n_prompt_tokens: load.prompts.n_tokens,
            // The worker counts them as it sends them.
            n_generated_tokens: 0,
            steps,
        })
    }
}

/// How the steps of a ledger ran.
pub(crate) fn counts(ledger: &Ledger) -> StepCounts {
    let guesses = ledger.speculation();
    let mut steps =
        StepCounts { guessed: guesses.drafted, accepted: guesses.accepted, ..StepCounts::default() };
    for tally in StepKind::ALL.map(|kind| ledger.tally(kind)) {
        steps.replayed += tally.replayed;
        steps.eager += tally.eager;
        steps.failed += tally.failed;
        for (label, n, _) in tally.reasons() {
            match steps.reasons.iter_mut().find(|(other, _)| other == label) {
                Some((_, sum)) => *sum += n,
                None => steps.reasons.push((label.to_owned(), n)),
            }
        }
    }
    steps
}

fn open(
    service: &Service,
    request: Request,
    n_delivered: usize,
) -> Result<Box<dyn TokenSource>, EngineFailure> {
    match service.submit_tokens(request) {
        Ok(stream) => Ok(Box::new(ServiceSource { stream })),
        // The earlier worker failed between the last token and the end.
        Err(refrain::Error::Engine(EngineError::PromptTooLong { .. })) if n_delivered > 0 => {
            Ok(Box::new(Ended(Some(FinishedBy::ContextFull))))
        }
        Err(error) => Err(failure(&error)),
    }
}

/// The request that goes on where another one was interrupted.
///
/// Random numbers depend on the seed and the position, penalties look at the prompt, and end tokens are forbidden up to a
/// position. All of these are the same when delivered tokens become part of the prompt, if the limits shrink with it.
fn continuation(request: TokenRequest, n_delivered: usize, adapter: Option<AdapterId>) -> Request {
    let TokenRequest { prompt, sampling, end, min_tokens, max_tokens, n_top_logprobs, .. } = request;
    let mut out = Request::once(prompt);
    out.adapter = adapter;
    out.sampling = SamplingParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repeat_penalty: sampling.repeat_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        penalty_window: sampling.penalty_window,
        logit_bias: sampling.logit_bias,
        seed: sampling.seed,
    };
    out.end = end;
    out.min_tokens = min_tokens.saturating_sub(n_delivered);
    out.max_tokens = max_tokens.map_or(usize::MAX, |max| max.saturating_sub(n_delivered));
    out.n_top_logprobs = n_top_logprobs;
    out.priority = request.priority;
    out.user = request.user;
    out.shares_prefix = request.share_prefix;
    out
}

struct ServiceSource {
    stream: TokenStream,
}

impl TokenSource for ServiceSource {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<TokenUpdate, EngineFailure>>> {
        self.stream.poll_next(context).map(|item| {
            let event = match item? {
                Ok(event) => event,
                Err(error) => return Some(Err(failure(&refrain::Error::Engine(error)))),
            };
            Some(Ok(match event {
                TokenEvent::Prompt { n_done, n_tokens } => TokenUpdate::Prompt { n_done, n_tokens },
                TokenEvent::Token { token, logprob, top, .. } => TokenUpdate::Token { token, logprob, top },
                TokenEvent::End(FinishReason::EndToken) => TokenUpdate::End(FinishedBy::EndToken),
                TokenEvent::End(FinishReason::Complete) => TokenUpdate::End(FinishedBy::Complete),
                TokenEvent::End(FinishReason::MaxTokens) => TokenUpdate::End(FinishedBy::MaxTokens),
                TokenEvent::End(FinishReason::ContextFull) => TokenUpdate::End(FinishedBy::ContextFull),
                TokenEvent::End(FinishReason::Cancelled) => TokenUpdate::End(FinishedBy::Cancelled),
            }))
        })
    }
}

/// A request that has ended.
struct Ended(Option<FinishedBy>);

impl TokenSource for Ended {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<TokenUpdate, EngineFailure>>> {
        Poll::Ready(self.0.take().map(|by| Ok(TokenUpdate::End(by))))
    }
}

pub(crate) fn invalid(message: String, hint: &str) -> EngineFailure {
    let (kind, hint) = (RefusalKind::Invalid, Some(hint.to_owned()));
    EngineFailure::Refused(Refusal { kind, message, hint, retry_after: None })
}

/// Sorts an error of the library: one request is at fault, or the engine is.
pub(crate) fn failure(error: &refrain::Error) -> EngineFailure {
    let (message, hint) = (chain(error), error.hint());
    let unusable = |lost_device| {
        EngineFailure::Unusable(LastWords { lost_device, message: message.clone(), hint: hint.clone() })
    };
    if loses_device(error) {
        return unusable(true);
    }
    let refrain::Error::Engine(error) = error else {
        return EngineFailure::Refused(Refusal {
            kind: match error {
                refrain::Error::Grammar(_) => RefusalKind::Invalid,
                _ => RefusalKind::Failed,
            },
            message,
            hint,
            retry_after: None,
        });
    };
    let kind = match error {
        EngineError::Stopped(_) => return unusable(false),
        EngineError::QueueFull { .. } => RefusalKind::Busy,
        EngineError::PromptTooLong { .. }
        | EngineError::EmptyPrompt
        | EngineError::UnknownToken { .. }
        | EngineError::TokenLimits { .. }
        | EngineError::NeverFits { .. }
        | EngineError::TopLogprobs { .. }
        | EngineError::UnknownAdapter { .. }
        | EngineError::Grammar(_)
        | EngineError::NothingAllowed { .. }
        | EngineError::Sampling(_) => RefusalKind::Invalid,
        _ => RefusalKind::Failed,
    };
    EngineFailure::Refused(Refusal { kind, message, hint, retry_after: None })
}

fn loses_device(error: &refrain::Error) -> bool {
    if matches!(error, refrain::Error::Engine(EngineError::Stopped(Stopped::DeviceLost { .. }))) {
        return true;
    }
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        if let Some(refrain::graph::RunError::ContextLost { .. }) = cause.downcast_ref() {
            return true;
        }
        if let Some(refrain::graph::CompileError::ContextLost { .. }) = cause.downcast_ref() {
            return true;
        }
        next = cause.source();
    }
    false
}

/// An error with its causes, as one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
