//! The pool: worker processes, their replacement, and the open requests.
//!
//! ```text
//!  submit ──► waiting ──► open on a worker ──► ended
//!                ▲              │
//!                └── it failed ─┘     the delivered tokens have become part of the prompt
//! ```
//!
//! The pool holds every open request with its delivered tokens, so a worker holds nothing that cannot be replaced. One
//! thread supervises all workers: it reads their events, replaces those that fail, and never waits for a client.

mod ledger; // open requests: who serves them
mod open; // one of them: what it asks for, what was delivered
mod options; // how many workers, deadlines, pauses
mod process; // one process: start, connection, end
mod slot; // one worker over all of its processes
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::request as test_request;

use crate::error::WorkerError;
use crate::protocol::{MAX_GRAMMAR_BYTES, MAX_PROMPT_TOKENS, MAX_TEXTS, WireId};
use crate::tokens::{
    BackendStatus, EmbedRequest, Refusal, RefusalKind, TokenBackend, TokenGrammar, TokenReply, TokenRequest,
    VectorReply, WorkerState, token_reply, vector_reply,
};
use ledger::PoolState;
use open::Work;
pub use options::{Backoff, Deadlines, PoolOptions, WorkerCommand};
use process::{Failure, Launch, Notice, SocketFolder};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// When a refused request may be tried again, if nothing better is known.
const RETRY: Duration = Duration::from_secs(1);

/// Worker processes that serve requests for tokens. Dropping the pool ends them.
pub struct WorkerPool {
    shared: Arc<PoolShared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// State that the API's threads and the pool's thread share.
struct PoolShared {
    options: PoolOptions,
    state: Mutex<PoolState>,
    status: Mutex<Arc<BackendStatus>>,
    /// Whether a worker was ready, or why the first one was not.
    started: watch::Sender<Option<Result<(), Refusal>>>,
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, state: &PoolState) {
        let status = Arc::new(state.status());
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

impl WorkerPool {
    /// Starts the workers. Returns at once: [`WorkerPool::started`] waits for the first that is ready.
    pub fn start(options: PoolOptions) -> Result<WorkerPool, WorkerError> {
        if options.n_workers == 0 || options.models.is_empty() {
            let (n_workers, n_models) = (options.n_workers, options.models.len());
            return Err(WorkerError::Empty { n_workers, n_models });
        }
        let folder = SocketFolder::make(options.socket_dir.as_deref())
            .map_err(|(path, source)| WorkerError::SocketFolder { path, source })?;
        let state = PoolState::new(options.n_workers, options.backoff);
        let shared = Arc::new(PoolShared {
            status: Mutex::new(Arc::new(state.status())),
            state: Mutex::new(state),
            started: watch::channel(None).0,
            options,
        });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(WorkerError::Pool)?;
        let (stop, stopped) = watch::channel(false);
        let supervised = shared.clone();
        let thread = std::thread::Builder::new()
            .name("refrain-pool".into())
            .spawn(move || {
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, supervise_all(supervised, folder, stopped));
            })
            .map_err(WorkerError::Pool)?;
        Ok(WorkerPool { shared, stop, thread: Some(thread) })
    }

    /// Waits until a worker is ready. An error says why the first process of every worker failed before it was ready; the
    /// pool goes on trying.
    pub async fn started(&self) -> Result<(), Refusal> {
        let mut started = self.shared.started.subscribe();
        match started.wait_for(Option::is_some).await.map(|result| result.clone()) {
            Ok(Some(result)) => result,
            // The sender lives as long as the pool.
            Ok(None) | Err(_) => Err(stopping()),
        }
    }

    /// Ends the workers: closes their connections, and kills those that have not ended after a moment. Open requests are
    /// refused. Blocks.
    pub fn stop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the pool's thread panicked");
        }
        let mut state = self.shared.lock();
        state.refuse_all(&stopping());
        self.shared.publish(&state);
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl WorkerPool {
    /// Opens a request. `make` gets what its reply calls when it is dropped.
    fn open<R>(&self, make: impl FnOnce(Box<dyn FnOnce() + Send>) -> (Work, R)) -> Result<R, Refusal> {
        let mut state = self.shared.lock();
        if *self.stop.borrow() {
            return Err(stopping());
        }
        let (n_open, max) = (state.n_open(), self.shared.options.max_requests);
        if n_open >= max {
            return Err(Refusal {
                kind: RefusalKind::Busy,
                message: format!("{n_open} requests are open, the maximum is {max}"),
                hint: Some("try again in a moment, or raise --max-requests".into()),
                retry_after: Some(RETRY),
            });
        }
        if let Some(refusal) = state.crash_loop(Instant::now()) {
            return Err(refusal);
        }
        let id: WireId = state.next_id();
        let shared: Weak<PoolShared> = Arc::downgrade(&self.shared);
        let (work, reply) = make(Box::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.lock().cancel(id);
            }
        }));
        state.add(id, work);
        Ok(reply)
    }
}

fn stopping() -> Refusal {
    let message = "the server is stopping".into();
    let hint = Some("send the request to another server, or again when this one is back".into());
    Refusal { kind: RefusalKind::Unavailable, message, hint, retry_after: Some(RETRY) }
}

impl TokenBackend for WorkerPool {
    fn submit(&self, request: TokenRequest) -> Result<TokenReply, Refusal> {
        check(&request, &self.shared.options)?;
        self.open(|on_cancel| {
            let (sender, reply) = token_reply(on_cancel);
            (Work::tokens(request, sender), reply)
        })
    }

    fn embed(&self, request: EmbedRequest) -> Result<VectorReply, Refusal> {
        check_embed(&request, &self.shared.options)?;
        self.open(|on_cancel| {
            let (sender, reply) = vector_reply(on_cancel);
            (Work::vectors(request, sender), reply)
        })
    }

    fn status(&self) -> Arc<BackendStatus> {
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn invalid(message: String, hint: &str) -> Result<(), Refusal> {
    Err(Refusal { kind: RefusalKind::Invalid, message, hint: Some(hint.to_owned()), retry_after: None })
}

fn check_model(model: &str, options: &PoolOptions) -> Result<(), Refusal> {
    if options.models.iter().any(|served| served == model) {
        return Ok(());
    }
    Err(Refusal {
        kind: RefusalKind::UnknownModel,
        message: format!("no worker serves a model {model}"),
        hint: Some(format!("served models: {}", options.models.join(", "))),
        retry_after: None,
    })
}

/// Refuses texts that no worker could embed.
fn check_embed(request: &EmbedRequest, options: &PoolOptions) -> Result<(), Refusal> {
    check_model(&request.model, options)?;
    let n_texts = request.inputs.len();
    if n_texts == 0 || n_texts > MAX_TEXTS {
        return invalid(format!("the request has {n_texts} texts, must have 1 to {MAX_TEXTS}"), "split it");
    }
    let n_tokens: usize = request.inputs.iter().map(Vec::len).sum();
    if n_tokens > MAX_PROMPT_TOKENS {
        let message = format!("the texts have {n_tokens} tokens, the maximum is {MAX_PROMPT_TOKENS}");
        return invalid(message, "split the request");
    }
    Ok(())
}

/// Refuses what no worker could serve.
fn check(request: &TokenRequest, options: &PoolOptions) -> Result<(), Refusal> {
    check_model(&request.model, options)?;
    if request.prompt.len() > MAX_PROMPT_TOKENS {
        let message =
            format!("the prompt has {} tokens, the maximum is {MAX_PROMPT_TOKENS}", request.prompt.len());
        return invalid(message, "shorten the prompt");
    }
    let n_grammar_bytes = request.grammar.as_ref().map_or(0, |grammar| match grammar {
        TokenGrammar::JsonObject => 0,
        TokenGrammar::JsonSchema(text) | TokenGrammar::Regex(text) | TokenGrammar::Lark(text) => text.len(),
        TokenGrammar::JsonBetween { before, schema, after } => before.len() + schema.len() + after.len(),
    });
    if n_grammar_bytes > MAX_GRAMMAR_BYTES {
        let message = format!("the grammar has {n_grammar_bytes} bytes, the maximum is {MAX_GRAMMAR_BYTES}");
        return invalid(message, "use a smaller schema or grammar");
    }
    Ok(())
}

/// Runs all workers until the pool stops.
async fn supervise_all(shared: Arc<PoolShared>, folder: SocketFolder, stop: watch::Receiver<bool>) {
    let folder = std::rc::Rc::new(folder);
    let mut workers = JoinSet::new();
    for idx in 0..shared.options.n_workers {
        let (shared, folder, stop) = (shared.clone(), folder.clone(), stop.clone());
        workers.spawn_local(async move { supervise(&shared, idx, &folder, stop).await });
    }
    let patrol = patrol(&shared);
    let ended = async { while workers.join_next().await.is_some() {} };
    tokio::select! {
        () = ended => {}
        () = patrol => {}
    }
}

/// Runs one process after the other for a worker.
async fn supervise(
    shared: &Arc<PoolShared>,
    idx: usize,
    folder: &SocketFolder,
    mut stop: watch::Receiver<bool>,
) {
    let options = &shared.options;
    for generation in 0.. {
        if *stop.borrow() {
            break;
        }
        let (control, orders) = mpsc::unbounded_channel();
        {
            let mut state = shared.lock();
            state.slots[idx].starts(control, Instant::now(), generation);
            shared.publish(&state);
        }
        let launch = Launch {
            idx,
            socket: folder.socket(idx, generation),
            command: options.command.clone(),
            build: options.build.clone(),
            deadlines: options.deadlines,
        };
        let run = process::run(launch, orders, |notice| handle(shared, idx, notice));
        tokio::pin!(run);
        tokio::select! {
            () = &mut run => {}
            _ = stop.wait_for(|stop| *stop) => {
                shared.lock().slots[idx].close();
                run.await;
            }
        }
        let pause = {
            let state = shared.lock();
            options.backoff.pause(state.slots[idx].n_failures())
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
    let mut state = shared.lock();
    state.slots[idx].status.state = WorkerState::Stopped;
    shared.publish(&state);
}

/// Handles what a worker process reports.
fn handle(shared: &PoolShared, idx: usize, notice: Notice) {
    let now = Instant::now();
    let mut state = shared.lock();
    match notice {
        Notice::Started { pid } => state.slots[idx].status.pid = Some(pid),
        Notice::Connected => state.slots[idx].connected(now),
        Notice::Message(message) => {
            let (is_news, is_ready) = state.message(idx, message, &shared.options.models, now);
            if is_ready {
                tracing::info!(worker = idx, "ready");
                shared.publish(&state);
                shared.started.send_if_modified(|started| {
                    let is_first = started.is_none();
                    *started = Some(Ok(()));
                    is_first
                });
            }
            // Events arrive with every step: they change nothing in the status.
            if !is_news {
                return;
            }
        }
        Notice::Gone(failure) => gone(shared, &mut state, idx, &failure, now),
    }
    shared.publish(&state);
}

fn gone(shared: &PoolShared, state: &mut PoolState, idx: usize, failure: &Failure, now: Instant) {
    let pid = state.slots[idx].status.pid;
    let n_moved = state.gone(idx, failure, now);
    if let Failure::Closed = failure {
        return;
    }
    tracing::warn!(worker = idx, pid, n_moved, "worker failed: {failure}");
    if state.slots.iter().all(|slot| slot.n_failures() > 0) {
        let refusal = Refusal {
            kind: RefusalKind::Unavailable,
            message: format!("the worker failed before it was ready: {failure}"),
            hint: failure.hint(),
            retry_after: None,
        };
        shared.started.send_if_modified(|started| {
            let is_first = started.is_none();
            started.get_or_insert(Err(refusal));
            is_first
        });
    }
}

/// Ends workers that miss a deadline.
async fn patrol(shared: &PoolShared) {
    let deadlines = &shared.options.deadlines;
    let shortest = deadlines.silence.min(deadlines.stall).min(deadlines.load);
    let period = (shortest / 8).clamp(Duration::from_millis(5), Duration::from_millis(250));
    let mut last = Instant::now();
    loop {
        tokio::time::sleep(period).await;
        let now = Instant::now();
        let mut state = shared.lock();
        // This process itself was suspended, or starved: the workers' messages wait to be read.
        let late = now.saturating_duration_since(last).saturating_sub(period);
        last = now;
        if late > shortest / 2 {
            state.slots.iter_mut().for_each(|slot| slot.forgive(now));
            continue;
        }
        for slot in &mut state.slots {
            if let Some(failure) = slot.missed(deadlines, now) {
                slot.kill(failure);
            }
        }
    }
}
