//! The models of a worker: loaded on demand within a memory budget, unloaded when idle.

use super::pump::{Pump, Source};
use super::{Link, spawn};
use crate::engine::{EngineFailure, Progress, Shelf, Title, TokenEngine, invalid};
use crate::protocol::{FromWorker, LastWords, WireEvent, WireId};
use crate::tokens::{EmbedRequest, FinishedBy, LoadStatus, Refusal, RefusalKind, TokenRequest, TokenUpdate};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// When a request for a model that does not fit beside busy ones may be tried again.
const RETRY_LOAD: Duration = Duration::from_secs(5);

/// All models that a worker may serve.
pub(crate) struct Models {
    state: Mutex<Vec<ModelState>>,
    /// Tokens of each model so far.
    n_tokens: Vec<AtomicU64>,
    budget: Option<u64>,
    pump: Pump,
    /// Models that requests wait for.
    wanted: mpsc::Sender<usize>,
    wanted_by_loader: Mutex<Option<mpsc::Receiver<usize>>>,
}

struct ModelState {
    name: String,
    /// Names under which it is served with an adapter.
    adapters: Vec<String>,
    at_start: bool,
    slot: ModelSlot,
    /// Requests whose streams the pump serves.
    n_open: usize,
    /// Orders idle models by their last use.
    last_used: u64,
    /// Counts of the times it was loaded before.
    past: LoadStatus,
    /// The last known load, while it is loaded.
    load: LoadStatus,
}

enum ModelSlot {
    Unloaded,
    Loading { waiting: Vec<WaitingRequest> },
    Loaded { engine: Arc<dyn TokenEngine>, n_bytes: u64 },
}

struct WaitingRequest {
    id: WireId,
    work: Work,
}

/// What a request asks for.
#[expect(clippy::large_enum_variant, reason = "most requests are for tokens, and few wait for a model")]
pub(super) enum Work {
    Tokens { request: TokenRequest, n_delivered: usize },
    Vectors { request: EmbedRequest },
}

impl Work {
    fn model(&self) -> &str {
        match self {
            Work::Tokens { request, .. } => &request.model,
            Work::Vectors { request } => &request.model,
        }
    }
}

impl ModelState {
    fn is_called(&self, name: &str) -> bool {
        self.name == name || self.adapters.iter().any(|adapter| adapter == name)
    }
}

impl Models {
    pub(super) fn new(titles: &[Title], budget: Option<u64>, pump: Pump) -> Arc<Models> {
        let state = |title: &Title| ModelState {
            name: title.name.clone(),
            adapters: title.adapters.clone(),
            at_start: title.at_start,
            slot: ModelSlot::Unloaded,
            n_open: 0,
            last_used: 0,
            past: LoadStatus::default(),
            load: LoadStatus::default(),
        };
        let (wanted, receiver) = mpsc::channel();
        Arc::new(Models {
            state: Mutex::new(titles.iter().map(state).collect()),
            n_tokens: titles.iter().map(|_| AtomicU64::new(0)).collect(),
            budget,
            pump,
            wanted,
            wanted_by_loader: Mutex::new(Some(receiver)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ModelState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a request to its model's engine, after loading the model if necessary.
    pub(super) fn submit(&self, id: WireId, work: Work) {
        let mut models = self.lock();
        let Some(idx) = models.iter().position(|model| model.is_called(work.model())) else {
            drop(models);
            return self.pump.report(id, WireEvent::Refused(unknown_model(work.model())));
        };
        let waiting = WaitingRequest { id, work };
        match &mut models[idx].slot {
            ModelSlot::Loaded { .. } => self.open(&mut models[idx], idx, waiting),
            ModelSlot::Loading { waiting: others } => others.push(waiting),
            slot @ ModelSlot::Unloaded => {
                *slot = ModelSlot::Loading { waiting: vec![waiting] };
                // The loader lives as long as the process.
                let _ = self.wanted.send(idx);
            }
        }
    }

    /// Opens a request's stream on a loaded model.
    fn open(&self, model: &mut ModelState, idx: usize, request: WaitingRequest) {
        let ModelSlot::Loaded { engine, .. } = &model.slot else { return };
        let WaitingRequest { id, work } = request;
        let source = match work {
            Work::Tokens { request, n_delivered } => {
                if let Some(by) = finished(&request, n_delivered) {
                    return self.pump.report(id, WireEvent::Update(TokenUpdate::End(by)));
                }
                engine.submit(request, n_delivered).map(Source::Tokens)
            }
            Work::Vectors { request } => {
                let n_left = request.inputs.len();
                engine.embed(request).map(|vectors| Source::Vectors { vectors, n_left })
            }
        };
        match source {
            Ok(source) => {
                model.n_open += 1;
                self.pump.add(id, idx, source);
            }
            Err(failure) => self.pump.fail(id, failure),
        }
    }

    /// Ends a request that waits for its model; false if there is none.
    pub(super) fn cancel_waiting(&self, id: WireId) -> bool {
        let mut models = self.lock();
        models.iter_mut().any(|model| match &mut model.slot {
            ModelSlot::Loading { waiting } => {
                let n_before = waiting.len();
                waiting.retain(|request| request.id != id);
                waiting.len() < n_before
            }
            ModelSlot::Unloaded | ModelSlot::Loaded { .. } => false,
        })
    }

    /// Notes that a stream has ended.
    pub(super) fn ended(&self, idx: usize) {
        let mut models = self.lock();
        let now = 1 + models.iter().map(|model| model.last_used).max().unwrap_or(0);
        if let Some(model) = models.get_mut(idx) {
            model.n_open = model.n_open.saturating_sub(1);
            model.last_used = now;
        }
    }

    pub(super) fn count_token(&self, idx: usize) {
        if let Some(n) = self.n_tokens.get(idx) {
            n.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn is_loading(&self) -> bool {
        self.lock().iter().any(|model| matches!(model.slot, ModelSlot::Loading { .. }))
    }

    /// The loaded engines, for a thread that may wait for them.
    pub(super) fn engines(&self) -> Vec<(usize, Arc<dyn TokenEngine>)> {
        let engine = |(idx, model): (usize, &ModelState)| match &model.slot {
            ModelSlot::Loaded { engine, .. } => Some((idx, engine.clone())),
            ModelSlot::Unloaded | ModelSlot::Loading { .. } => None,
        };
        self.lock().iter().enumerate().filter_map(engine).collect()
    }

    pub(super) fn set_load(&self, idx: usize, load: LoadStatus) {
        if let Some(model) = self.lock().get_mut(idx)
            && matches!(model.slot, ModelSlot::Loaded { .. })
        {
            model.load = load;
        }
    }

    /// The load of the models that are loaded or were, with all counts since the start of the worker.
    pub(super) fn loads(&self) -> Vec<LoadStatus> {
        let models = self.lock();
        let load = |(idx, model): (usize, &ModelState)| {
            if !matches!(model.slot, ModelSlot::Loaded { .. }) {
                return None;
            }
            let mut load = model.load.clone();
            load.add_counts(&model.past);
            load.model.clone_from(&model.name);
            load.n_generated_tokens = self.n_tokens[idx].load(Ordering::Relaxed);
            Some(load)
        };
        models.iter().enumerate().filter_map(load).collect()
    }

    /// Starts the thread that loads models: first those of the start, then those that requests ask for.
    pub(super) fn start_loader(
        self: &Arc<Models>,
        shelf: impl Shelf,
        link: Arc<Link>,
        progress: Progress,
    ) -> io::Result<()> {
        let receiver = self.wanted_by_loader.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut loader = Loader { shelf, models: self.clone(), link, progress };
        spawn("refrain-loader", move || {
            if loader.load_at_start() {
                receiver.into_iter().flatten().for_each(|idx| loader.load_wanted(idx));
            }
        })
    }
}

fn unknown_model(name: &str) -> Refusal {
    Refusal {
        kind: RefusalKind::UnknownModel,
        message: format!("this worker serves no model {name}"),
        hint: None,
        retry_after: None,
    }
}

/// How a request ended whose last token was delivered, but not its end.
fn finished(request: &TokenRequest, n_delivered: usize) -> Option<FinishedBy> {
    let last = request.prompt.last().filter(|_| n_delivered > 0)?;
    if request.end.contains(last) {
        return Some(FinishedBy::EndToken);
    }
    request.max_tokens.is_some_and(|max| n_delivered >= max).then_some(FinishedBy::MaxTokens)
}

/// State of the thread that loads models.
struct Loader<S> {
    shelf: S,
    models: Arc<Models>,
    link: Arc<Link>,
    progress: Progress,
}

impl<S: Shelf> Loader<S> {
    /// Loads the models of the start and reports that the worker is ready. If one cannot be loaded, the worker ends.
    fn load_at_start(&mut self) -> bool {
        let idxs: Vec<usize> = {
            let mut models = self.models.lock();
            let at_start = |model: &&mut ModelState| model.at_start;
            for model in models.iter_mut().filter(at_start) {
                // Requests may arrive before the worker is ready.
                if let ModelSlot::Unloaded = model.slot {
                    model.slot = ModelSlot::Loading { waiting: Vec::new() };
                }
            }
            (0..models.len()).filter(|idx| models[*idx].at_start).collect()
        };
        let mut backend = String::new();
        for idx in idxs {
            match self.load(idx) {
                Ok(engine) => engine.backend().clone_into(&mut backend),
                Err(EngineFailure::Unusable(words)) => {
                    self.link.fail(words);
                    return false;
                }
                Err(EngineFailure::Refused(Refusal { message, hint, .. })) => {
                    self.link.fail(LastWords { lost_device: false, message, hint });
                    return false;
                }
            }
        }
        self.link.send(&FromWorker::Ready { backend });
        true
    }

    /// Loads a model that requests wait for. If it cannot be loaded, they are refused.
    fn load_wanted(&mut self, idx: usize) {
        if self.models.engines().iter().any(|(loaded, _)| *loaded == idx) {
            return;
        }
        let refusal = match self.load(idx) {
            Ok(_) => return,
            Err(EngineFailure::Unusable(words)) => return self.link.fail(words),
            Err(EngineFailure::Refused(refusal)) => refusal,
        };
        let mut models = self.models.lock();
        if let ModelSlot::Loading { waiting } = std::mem::replace(&mut models[idx].slot, ModelSlot::Unloaded)
        {
            for request in waiting {
                self.models.pump.report(request.id, WireEvent::Refused(refusal.clone()));
            }
        }
    }

    /// Loads a model, after unloading idle ones if there is not enough memory, and opens the streams that wait for it.
    fn load(&mut self, idx: usize) -> Result<Arc<dyn TokenEngine>, EngineFailure> {
        let n_bytes = self.shelf.needs(idx)?;
        self.make_room(idx, n_bytes)?;
        let engine = loop {
            match self.shelf.load(idx, &self.progress) {
                Ok(engine) => break engine,
                // The device refused the memory that the budget would allow.
                Err(EngineFailure::Refused(Refusal { kind: RefusalKind::Busy, .. }))
                    if self.unload_idle() => {}
                Err(EngineFailure::Refused(refusal)) if refusal.kind == RefusalKind::Busy => {
                    return Err(EngineFailure::Refused(self.does_not_fit(refusal)));
                }
                Err(failure) => return Err(failure),
            }
        };
        let load = engine.load().unwrap_or_default();
        let mut models = self.models.lock();
        let loaded = ModelSlot::Loaded { engine: engine.clone(), n_bytes };
        let model = &mut models[idx];
        model.load = load;
        if let ModelSlot::Loading { waiting } = std::mem::replace(&mut model.slot, loaded) {
            waiting.into_iter().for_each(|request| self.models.open(model, idx, request));
        }
        Ok(engine)
    }

    /// Unloads idle models, the least recently used first, until a model of `n_bytes` fits the budget.
    fn make_room(&mut self, idx: usize, n_bytes: u64) -> Result<(), EngineFailure> {
        let Some(budget) = self.models.budget else { return Ok(()) };
        loop {
            let used: u64 = self.loaded().iter().map(|(_, n_bytes, _)| n_bytes).sum();
            if n_bytes > budget {
                let name = self.models.lock()[idx].name.clone();
                return Err(invalid(
                    format!(
                        "model {name} needs {}, the memory budget is {}",
                        mebibytes(n_bytes),
                        mebibytes(budget)
                    ),
                    "raise the memory budget, or serve it with a shorter context or a smaller cache",
                ));
            }
            if used.saturating_add(n_bytes) <= budget {
                return Ok(());
            }
            if !self.unload_idle() {
                let name = self.models.lock()[idx].name.clone();
                let message = format!(
                    "model {name} needs {}, {} of the memory budget of {} are in use",
                    mebibytes(n_bytes),
                    mebibytes(used),
                    mebibytes(budget)
                );
                let (kind, retry_after) = (RefusalKind::Unavailable, Some(RETRY_LOAD));
                let refusal = Refusal { kind, message, hint: None, retry_after };
                return Err(EngineFailure::Refused(self.does_not_fit(refusal)));
            }
        }
    }

    /// A refusal with what holds the memory.
    fn does_not_fit(&self, refusal: Refusal) -> Refusal {
        let busy: Vec<String> = self
            .loaded()
            .into_iter()
            .map(|(name, n_bytes, n_open)| format!("{name} ({}, {n_open} open requests)", mebibytes(n_bytes)))
            .collect();
        if busy.is_empty() {
            return Refusal { kind: RefusalKind::Unavailable, ..refusal };
        }
        Refusal {
            kind: RefusalKind::Unavailable,
            message: format!("{}; loaded are {}", refusal.message, busy.join(", ")),
            hint: Some(
                "try again when a loaded model has no open request, or raise the memory budget".into(),
            ),
            retry_after: Some(RETRY_LOAD),
        }
    }

    /// Name, bytes and open requests of the loaded models.
    fn loaded(&self) -> Vec<(String, u64, usize)> {
        let loaded = |model: &ModelState| match &model.slot {
            ModelSlot::Loaded { n_bytes, .. } => Some((model.name.clone(), *n_bytes, model.n_open)),
            ModelSlot::Unloaded | ModelSlot::Loading { .. } => None,
        };
        self.models.lock().iter().filter_map(loaded).collect()
    }

    /// Unloads the least recently used model without open requests; false if there is none.
    fn unload_idle(&self) -> bool {
        let mut models = self.models.lock();
        let is_idle =
            |model: &&mut ModelState| model.n_open == 0 && matches!(model.slot, ModelSlot::Loaded { .. });
        let Some(model) = models.iter_mut().filter(is_idle).min_by_key(|model| model.last_used) else {
            return false;
        };
        let load = std::mem::take(&mut model.load);
        model.past.add_counts(&load);
        let slot = std::mem::replace(&mut model.slot, ModelSlot::Unloaded);
        tracing::info!(model = model.name, "unloaded to make room");
        drop(models);
        // Waits for the engine's thread. The pulse may hold the engine a little longer.
        drop(slot);
        true
    }
}

fn mebibytes(n_bytes: u64) -> String {
    format!("{:.1} MiB", n_bytes as f64 / f64::from(1 << 20))
}
