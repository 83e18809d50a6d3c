//! The handle to an engine: from any thread, to the one that owns the device.

use crate::blocks::{BlockCounts, SharedPool};
use crate::core::{Core, SequenceState};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::mailbox::{Call, Mailbox};
use crate::request::{Request, RequestId, Sequence};
use crate::runner::Runner;
use crate::serve::{Server, Submitted, serve};
use crate::slots::SlotCounts;
use crate::stream::{Channel, TokenStream};
use refrain_graph::Plan;
use refrain_models::Model;
use refrain_tensor::DType;
use std::borrow::Cow;
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;

/// How an engine serves.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Requests that may be running or waiting at once.
    pub max_requests: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { max_requests: 1024 }
    }
}

/// What an engine has to do at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// Requests that take part in steps.
    pub n_running: usize,
    /// Requests that wait for room.
    pub n_waiting: usize,
    /// How often a request had to give its blocks up so far.
    pub n_preempted: u64,
    /// KV blocks.
    pub blocks: BlockCounts,
    /// Recurrent states, where the model has such.
    pub slots: SlotCounts,
}

/// A model on a device, served by a thread of its own. Cloning gives another handle to the same engine.
///
/// Requests come from any thread. All that run take part in every step, one token each or a piece of their prompts, as
/// many as the device takes at once; the others wait. Decode steps are sent ahead where the device feeds itself. A request
/// whose consumer has enough for now ([`Pace::Asked`](crate::Pace)) is left out until it asks. Everything else is a call:
/// it is made between two steps and its caller waits for it.
///
/// The thread ends, and the device is free, when the last handle and the last stream are dropped.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<EngineInner>,
}

/// An [`Engine`] that this does not keep alive.
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
}

impl Engine {
    /// Starts a thread that serves a model on a device.
    pub fn new(runner: Box<dyn Runner>, options: EngineOptions) -> Result<Engine, EngineError> {
        let (model, backend, max_tokens) = (runner.model().clone(), runner.backend(), runner.max_tokens());
        let kv = *runner.kv();
        let core = Core::new(runner, kv.max_blocks * kv.kv_block);
        let blocks = core.blocks().clone();
        let mailbox = Arc::new(Mailbox::new());
        let thread = std::thread::Builder::new()
            .name("refrain-engine".into())
            .spawn({
                let mailbox = mailbox.clone();
                move || serve(core, &mailbox)
            })
            .map_err(EngineError::Thread)?;
        let (thread, kv_dtype) = (Some(thread), kv.dtype);
        let inner = EngineInner { mailbox, thread, options, model, backend, max_tokens, kv_dtype, blocks };
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

    /// The most tokens that one step takes.
    pub fn max_tokens(&self) -> usize {
        self.inner.max_tokens
    }

    /// A new sequence with room for `context` positions.
    ///
    /// Room is never shared: the cache has as many blocks as all open sequences may come to need. Where it is too small
    /// it grows, between two steps, and block tables become as wide as the longest sequence needs; steps are then
    /// compiled again. It does not shrink: a sequence that is dropped leaves its room to the next one. A backend that
    /// cannot grow its cache answers with [`EngineError::CannotGrow`].
    pub fn open(&self, context: usize) -> Result<Sequence, EngineError> {
        let most = self.model().config().n_context;
        if context == 0 || context > most {
            return Err(EngineError::Context { got: context, most });
        }
        self.inner.mailbox.check()?;
        if let Some(table) = self.inner.blocks.reserve(context) {
            return Ok(Sequence::new(SequenceState::new(table, context)));
        }
        self.call(move |server| server.core.open_reserved(context))?.map(Sequence::new)
    }

    /// A new sequence that holds what another one does, in the same blocks as far as those are full: what both go on with
    /// is evaluated once. It has room for `context` positions of its own.
    pub fn fork(&self, sequence: &Sequence, context: usize) -> Result<Sequence, EngineError> {
        let fork = self.open(context)?;
        sequence.with(|from| {
            if !from.table.belongs_to(&self.inner.blocks) {
                return Err(EngineError::ForeignSequence);
            }
            fork.with(|to| from.share_with(to))
        })??;
        Ok(fork)
    }

    /// Asks for tokens. What cannot be served is refused here, before anything is evaluated.
    pub fn submit(&self, request: Request) -> Result<TokenStream, EngineError> {
        let blocks = &self.inner.blocks;
        let context = match &request.sequence {
            Some(sequence) => sequence.context(),
            None => self.model().config().n_context.min(blocks.most_positions()),
        };
        request.check(self.model(), context)?;
        let row = request.row()?;
        let channel = Arc::new(Channel::new(request.pace));
        let most = self.inner.options.max_requests;
        let id = self.inner.mailbox.submit(most, |id| {
            let mut held = request.sequence.as_ref().map(Sequence::hold).transpose()?;
            let state = match &mut held {
                Some(held) => held.take().ok_or(EngineError::SequenceBusy)?,
                None => SequenceState::new(blocks.table(), context),
            };
            if !state.table.belongs_to(blocks) {
                if let Some(held) = &mut held {
                    held.put(state);
                }
                return Err(EngineError::ForeignSequence);
            }
            Ok(Submitted::new(id, held, state, request, row, channel.clone()))
        })?;
        Ok(TokenStream::new(channel, self.clone(), id))
    }

    /// Ends a request before its next step; its stream ends with [`FinishReason::Cancelled`](crate::FinishReason). One
    /// that has ended is not touched.
    pub fn cancel(&self, id: RequestId) {
        self.inner.mailbox.cancel(id);
    }

    /// Evaluates tokens behind what a sequence holds, at most [`Engine::max_tokens`] of them, and puts the logits after
    /// the last `n_rows` in `into`. With no rows it only fills the cache.
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

    /// The plan of a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, EngineError> {
        self.call(move |server| server.core.plan(n_tokens).cloned())?
    }

    /// The kernels of that plan, each with the (first) step it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        self.call(move |server| server.core.kernels(n_tokens))?
    }

    /// How weights lie on the device, with the bytes of each layout.
    pub fn layouts(&self) -> Result<Vec<(String, usize)>, EngineError> {
        self.call(|server| server.core.layouts())
    }

    /// How every step of every sequence ran.
    pub fn ledger(&self) -> Result<Ledger, EngineError> {
        self.call(|server| server.core.ledger().clone())
    }

    /// How much it has to do at this moment.
    pub fn load(&self) -> Result<EngineLoad, EngineError> {
        self.call(|server| server.load())
    }

    /// Makes a call on the engine's thread, between two steps, and waits for its result.
    fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Server) -> R + Send + 'static,
    ) -> Result<R, EngineError> {
        let (answer, answered) = mpsc::sync_channel(1);
        // Whoever asked may be gone only if it panicked.
        let call: Call = Box::new(move |server| drop(answer.send(f(server))));
        self.inner.mailbox.call(call)?;
        answered.recv().map_err(|_| self.inner.mailbox.why_stopped().into())
    }

    pub(crate) fn wake(&self) {
        self.inner.mailbox.wake();
    }
}

impl WeakEngine {
    /// The engine, if somebody still holds it.
    pub fn upgrade(&self) -> Option<Engine> {
        self.inner.upgrade().map(|inner| Engine { inner })
    }
}

impl Drop for EngineInner {
    fn drop(&mut self) {
        self.mailbox.close();
        // The last handle may go on the engine's own thread, with a waker that held it.
        let thread = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(thread) = thread {
            // It catches what it throws, so there is no panic to pass on.
            let _ = thread.join();
        }
    }
}
