//! Handle to an engine, usable from any thread.

use crate::blocks::{BlockCounts, SharedPool};
use crate::constrain::ConstrainedText;
use crate::core::{Core, SequenceState};
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::mailbox::{Mailbox, ServerCall};
use crate::request::{AdapterId, Request, RequestId, Sequence, check_adapter};
use crate::runner::Runner;
use crate::schedule::PromptCounts;
use crate::serve::{Server, Submitted, serve};
use crate::slots::SlotCounts;
use crate::stream::{Channel, TokenStream};
use refrain_graph::Plan;
use refrain_models::Model;
use refrain_tensor::DType;
use std::borrow::Cow;
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;

/// Options of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Maximum number of running and waiting requests.
    pub max_requests: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { max_requests: 1024 }
    }
}

/// Load of an engine at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// Requests that take part in steps.
    pub n_running: usize,
    /// Requests waiting for capacity.
    pub n_waiting: usize,
    /// Number of preemptions so far.
    pub n_preempted: u64,
    /// Tokens of admitted requests so far, and how many of them the cache held.
    pub prompts: PromptCounts,
    /// KV blocks.
    pub blocks: BlockCounts,
    /// Slots of recurrent states; all 0 if the model has none.
    pub slots: SlotCounts,
}

/// A model on a device, served by its own thread. Clones are handles to the same engine.
///
/// Requests may come from any thread. All running requests take part in every step, with one token or one
/// prompt chunk each, up to the step's limits; the others wait. Decode steps are launched ahead where the
/// device feeds itself. A request whose consumer is not asking for more ([`Pace::OnDemand`](crate::Pace)) is
/// skipped until it asks. Every other method is a call that runs between two steps while its caller waits.
///
/// The thread ends and the device is released when the last handle and the last stream are dropped.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<EngineInner>,
}

/// A reference to an [`Engine`] that does not keep it alive.
#[derive(Clone)]
pub struct WeakEngine {
    inner: Weak<EngineInner>,
}

struct EngineInner {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
    options: EngineOptions,
    model: Arc<Model>,
    backend: &'static str,
    max_tokens: usize,
    kv_dtype: DType,
    blocks: SharedPool,
    has_draft_model: bool,
}

impl Engine {
    /// Starts a thread that serves a model on a device.
    pub fn new(runner: Box<dyn Runner>, options: EngineOptions) -> Result<Engine, EngineError> {
        Engine::start(runner, None, options)
    }

    /// Like [`Engine::new`], with a smaller model that guesses tokens for requests that ask for it
    /// ([`crate::DraftSource::Model`]). Both must give tokens the same meaning. A token that only one of them has is
    /// never guessed, and nothing is guessed after it.
    pub fn with_draft(
        runner: Box<dyn Runner>,
        draft: Box<dyn Runner>,
        options: EngineOptions,
    ) -> Result<Engine, EngineError> {
        if draft.model().has_slots() {
            return Err(EngineError::CannotDraft { arch: draft.model().config().arch.name() });
        }
        Engine::start(runner, Some(DraftModel::new(draft)), options)
    }

    fn start(
        runner: Box<dyn Runner>,
        draft_model: Option<DraftModel>,
        options: EngineOptions,
    ) -> Result<Engine, EngineError> {
        let has_draft_model = draft_model.is_some();
        let (model, backend, max_tokens) = (runner.model().clone(), runner.backend(), runner.max_tokens());
        let kv = *runner.kv();
        let core = Core::new(runner, kv.max_blocks * kv.kv_block);
        let blocks = core.blocks().clone();
        let mailbox = Arc::new(Mailbox::new());
        let thread = std::thread::Builder::new()
            .name("refrain-engine".into())
            .spawn({
                let mailbox = mailbox.clone();
                move || serve(core, draft_model, &mailbox)
            })
            .map_err(EngineError::Thread)?;
        let (thread, kv_dtype) = (Some(thread), kv.dtype);
        let inner = EngineInner {
            mailbox,
            thread,
            options,
            model,
            backend,
            max_tokens,
            kv_dtype,
            blocks,
            has_draft_model,
        };
        Ok(Engine { inner: Arc::new(inner) })
    }

    /// A handle that does not keep the engine alive.
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine { inner: Arc::downgrade(&self.inner) }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.inner.model
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend
    }

    /// Element type of the KV cache.
    pub fn kv_dtype(&self) -> DType {
        self.inner.kv_dtype
    }

    /// Maximum number of tokens per step.
    pub fn max_tokens(&self) -> usize {
        self.inner.max_tokens
    }

    /// Opens a sequence with capacity for `context` positions.
    ///
    /// Capacity is never shared: the cache has enough blocks for the maximum size of every open sequence. If
    /// it is too small, it grows between two steps, and block tables become as wide as the longest sequence
    /// requires; steps are then recompiled. It never shrinks: the capacity of a dropped sequence is reused by
    /// the next one. A backend that cannot grow its cache fails with [`EngineError::CannotGrow`].
    pub fn open(&self, context: usize) -> Result<Sequence, EngineError> {
        self.open_with(context, None)
    }

    /// Like [`Engine::open`], with an adapter for all requests of the sequence.
    pub fn open_with(&self, context: usize, adapter: Option<AdapterId>) -> Result<Sequence, EngineError> {
        check_adapter(self.model(), adapter)?;
        let max = self.model().config().n_context;
        if context == 0 || context > max {
            return Err(EngineError::Context { got: context, max });
        }
        self.inner.mailbox.check()?;
        if let Some(table) = self.inner.blocks.reserve(context) {
            return Ok(Sequence::new(SequenceState::new(table, context, adapter)));
        }
        self.call(move |server| server.core.open_reserved(context, adapter))?.map(Sequence::new)
    }

    /// Opens a sequence that starts with the tokens of another one and shares its full blocks, so their
    /// common prefix is evaluated once. The fork has the same adapter and capacity for `context` positions of its own.
    pub fn fork(&self, sequence: &Sequence, context: usize) -> Result<Sequence, EngineError> {
        let fork = self.open_with(context, sequence.adapter())?;
        sequence.with(|from| {
            if !from.table.belongs_to(&self.inner.blocks) {
                return Err(EngineError::ForeignSequence);
            }
            fork.with(|to| from.share_with(to))
        })??;
        Ok(fork)
    }

    /// Checks everything about a request that does not depend on other requests: the prompt, its length, and every
    /// parameter. [`Engine::submit`] does the same.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        request.check(self.model(), self.inner.has_draft_model, self.context_of(request))
    }

    fn context_of(&self, request: &Request) -> usize {
        match &request.sequence {
            Some(sequence) => sequence.context(),
            None => self.model().config().n_context.min(self.inner.blocks.max_positions()),
        }
    }

    /// Submits a request. Invalid requests are rejected here, before anything is evaluated.
    pub fn submit(&self, request: Request) -> Result<TokenStream, EngineError> {
        let blocks = &self.inner.blocks;
        let context = self.context_of(&request);
        request.check(self.model(), self.inner.has_draft_model, context)?;
        let mut row = request.row()?;
        let text = ConstrainedText::of(&request, &mut row, self.model().config().n_vocab)?;
        let channel = Arc::new(Channel::new(request.pace));
        let max = self.inner.options.max_requests;
        let id = self.inner.mailbox.submit(max, |id| {
            let mut held = request.sequence.as_ref().map(Sequence::hold).transpose()?;
            let state = match &mut held {
                Some(held) => held.take().ok_or(EngineError::SequenceBusy)?,
                None => SequenceState::new(blocks.table(), context, request.adapter),
            };
            if !state.table.belongs_to(blocks) {
                if let Some(held) = &mut held {
                    held.put(state);
                }
                return Err(EngineError::ForeignSequence);
            }
            Ok(Submitted::new(id, held, state, request, (row, text), channel.clone()))
        })?;
        Ok(TokenStream::new(channel, self.clone(), id))
    }

    /// Ends a request before its next step; its stream ends with
    /// [`FinishReason::Cancelled`](crate::FinishReason). Does nothing if the request has already ended.
    pub fn cancel(&self, id: RequestId) {
        self.inner.mailbox.cancel(id);
    }

    /// Evaluates tokens after those a sequence holds, at most [`Engine::max_tokens`] of them, and writes the
    /// logits of the last `n_rows` to `into`. With 0 rows it only fills the cache.
    pub fn logits(
        &self,
        sequence: &Sequence,
        tokens: &[u32],
        n_rows: usize,
        into: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        let (mut held, tokens, mut rows) = (sequence.hold()?, tokens.to_vec(), std::mem::take(into));
        let (done, rows) = self.call(move |server| {
            let state = held.state().ok_or(EngineError::SequenceBusy);
            let done = state.and_then(|state| server.core.logits_into(state, &tokens, n_rows, &mut rows));
            (done, rows)
        })?;
        *into = rows;
        done
    }

    /// Plan of a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, EngineError> {
        self.call(move |server| server.core.plan(n_tokens).cloned())?
    }

    /// Kernels of that plan, each with the index of the (first) step it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        self.call(move |server| server.core.kernels(n_tokens))?
    }

    /// Layouts of the weights on the device, with the bytes of each.
    pub fn layouts(&self) -> Result<Vec<(String, usize)>, EngineError> {
        self.call(|server| server.core.layouts())
    }

    /// Records of every step of every sequence.
    pub fn ledger(&self) -> Result<Ledger, EngineError> {
        self.call(|server| server.core.ledger().clone())
    }

    /// Records of the draft model's steps; `None` without one.
    pub fn draft_ledger(&self) -> Result<Option<Ledger>, EngineError> {
        self.call(|server| server.draft_model.as_ref().map(|model| model.ledger().clone()))
    }

    /// Current load.
    pub fn load(&self) -> Result<EngineLoad, EngineError> {
        self.call(|server| server.load())
    }

    /// Runs a closure on the engine's thread between two steps and waits for its result.
    fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Server) -> R + Send + 'static,
    ) -> Result<R, EngineError> {
        let (answer, answered) = mpsc::sync_channel(1);
        // The receiver is gone only if its thread panicked.
        let call: ServerCall = Box::new(move |server| drop(answer.send(f(server))));
        self.inner.mailbox.call(call)?;
        answered.recv().map_err(|_| self.inner.mailbox.why_stopped().into())
    }

    pub(crate) fn wake(&self) {
        self.inner.mailbox.wake();
    }
}

impl WeakEngine {
    /// Returns the engine if a handle to it still exists.
    pub fn upgrade(&self) -> Option<Engine> {
        self.inner.upgrade().map(|inner| Engine { inner })
    }
}

impl Drop for EngineInner {
    fn drop(&mut self) {
        self.mailbox.close();
        // The last handle may be dropped on the engine's own thread, by a waker that held it.
        let thread = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(thread) = thread {
            // The thread catches its panics, so there is none to propagate.
            let _ = thread.join();
        }
    }
}
