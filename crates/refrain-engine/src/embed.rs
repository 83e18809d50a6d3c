//! Embedding: texts in, one vector per text out, from any thread.
//!
//! An embedding step is stateless, so it needs no scheduler: the thread packs the waiting texts of all callers
//! into steps, and pads each step to one of a few sizes. A text is never split.

mod queue; // waiting texts, and whose turn it is
mod stream; // vectors on their way to a caller

use crate::core::check_tokens;
use crate::error::{EngineError, Stopped};
use crate::ledger::Ledger;
use queue::{EmbedJob, JobQueue};
use refrain_graph::{Backend, ControlBlock, Filler, Io, Ran, RunError, StepKind, fuse};
use refrain_models::{EmbedGraph, EmbedInputs, EmbedSpec, Model, PoolInputs, Pooling};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;
pub use stream::VectorStream;
use stream::vector_channel;

/// Options of an embedder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedderOptions {
    /// How the vector of a text follows from those of its tokens.
    pub pooling: Pooling,
    /// Whether vectors are scaled to length 1.
    pub normalizes: bool,
    /// Maximum number of tokens of a text, at most the model's positions.
    pub max_tokens: usize,
    /// Tokens that a step may have; steps for longer texts are as large as the text.
    pub step_tokens: usize,
}

/// Tokens per text that a step has capacity for: texts are longer on average.
const TOKENS_PER_TEXT: usize = 4;
/// Maximum number of texts per step.
const MAX_TEXTS: usize = 1024;
/// Compiled steps kept, the most recently used ones.
const MAX_COMPILED: usize = 12;
/// Smallest step on a device with graphs. Smaller ones would take as long.
const MIN_BUCKET: usize = 32;

/// A model on a device that turns texts into vectors. Clones are handles to the same embedder.
///
/// The thread ends and the device is released when the last handle is dropped.
#[derive(Clone)]
pub struct Embedder {
    inner: Arc<EmbedderInner>,
}

struct EmbedderInner {
    jobs: Mutex<Option<mpsc::Sender<EmbedJob>>>,
    thread: Option<JoinHandle<()>>,
    model: Arc<Model>,
    backend: &'static str,
    max_tokens: usize,
    ledger: Arc<Mutex<Ledger>>,
}

impl Drop for EmbedderInner {
    fn drop(&mut self) {
        drop(self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.take() {
            // A panic was already reported to every caller.
            let _ = thread.join();
        }
    }
}

impl Embedder {
    /// Loads a model onto a device and starts the thread that serves it.
    pub fn new<B>(backend: B, model: Arc<Model>, options: EmbedderOptions) -> Result<Embedder, EngineError>
    where
        B: Backend + Send + 'static,
        B::Weights: Send,
        B::States: Send,
        B::Compiled: Send,
    {
        if let Some(because) = model.cannot_embed() {
            return Err(EngineError::CannotEmbed { arch: model.config().arch.name(), because });
        }
        let max = model.config().n_context;
        if options.max_tokens == 0 || options.max_tokens > max {
            return Err(EngineError::Context { got: options.max_tokens, max });
        }
        let name = backend.name();
        let ledger = Arc::new(Mutex::new(Ledger::new()));
        let mut runner = EmbedRunner::new(backend, model.clone(), options, ledger.clone())?;
        // The smallest step is compiled here, so that a device that cannot run it fails at once.
        runner.prepare(1)?;
        let (jobs, waiting) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("refrain-embed".into())
            .spawn(move || runner.serve(&waiting))
            .map_err(EngineError::Thread)?;
        let (jobs, thread) = (Mutex::new(Some(jobs)), Some(thread));
        let (backend, max_tokens) = (name, options.max_tokens);
        Ok(Embedder { inner: Arc::new(EmbedderInner { jobs, thread, model, backend, max_tokens, ledger }) })
    }

    /// Embeds texts, given as tokens, and waits for their vectors.
    pub fn embed(&self, texts: Vec<Vec<u32>>) -> Result<Vec<Vec<f32>>, EngineError> {
        self.submit(texts)?.collect()
    }

    /// Submits texts, given as tokens. Texts that can never be embedded are refused here; later errors arrive through the
    /// stream.
    pub fn submit(&self, texts: Vec<Vec<u32>>) -> Result<VectorStream, EngineError> {
        for tokens in &texts {
            if tokens.is_empty() {
                return Err(EngineError::EmptyPrompt);
            }
            let (n_tokens, context) = (tokens.len(), self.inner.max_tokens);
            if n_tokens > context {
                return Err(EngineError::PromptTooLong { n_tokens, context });
            }
            check_tokens(&self.inner.model, tokens)?;
        }
        let (sink, stream) = vector_channel(texts.len(), Some(self.inner.clone()));
        let closed = || EngineError::Stopped(Stopped::Closed);
        let jobs = self.inner.jobs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        jobs.ok_or_else(closed)?.send(EmbedJob { texts, sink }).map_err(|_| closed())?;
        Ok(stream)
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.inner.model
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend
    }

    /// Maximum number of tokens of a text.
    pub fn max_tokens(&self) -> usize {
        self.inner.max_tokens
    }

    /// The ledger of all steps.
    pub fn ledger(&self) -> Ledger {
        self.inner.ledger.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct CompiledEmbedStep<B: Backend> {
    n_tokens: usize,
    n_texts: usize,
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: EmbedInputs,
}

struct EmbedRunner<B: Backend> {
    backend: B,
    model: Arc<Model>,
    weights: B::Weights,
    states: B::States,
    options: EmbedderOptions,
    /// Most recently used last.
    compiled: Vec<CompiledEmbedStep<B>>,
    ledger: Arc<Mutex<Ledger>>,
}

impl<B: Backend> EmbedRunner<B> {
    fn new(
        backend: B,
        model: Arc<Model>,
        options: EmbedderOptions,
        ledger: Arc<Mutex<Ledger>>,
    ) -> Result<EmbedRunner<B>, EngineError> {
        let weights = backend.load(model.weights(), model.tensors().to_vec())?;
        let states = backend.allocate(&[])?;
        Ok(EmbedRunner { backend, model, weights, states, options, compiled: Vec::new(), ledger })
    }

    /// Serves jobs until the last handle is dropped. After a panic, every caller gets its message.
    fn serve(mut self, inbox: &mpsc::Receiver<EmbedJob>) {
        let mut queue = JobQueue::default();
        loop {
            if queue.is_empty() {
                match inbox.recv() {
                    Ok(job) => queue.push(job),
                    Err(_) => return,
                }
            }
            inbox.try_iter().for_each(|job| queue.push(job));
            queue.drop_cancelled();
            let served = catch_unwind(AssertUnwindSafe(|| self.run_next(&mut queue)));
            let Err(panic) = served else { continue };
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let message = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            let error = || EngineError::Stopped(Stopped::Panicked { message: message.clone() });
            queue.fail_all(error);
            // The state of the backend is unknown.
            inbox.iter().for_each(|job| job.sink.fail(error()));
            return;
        }
    }

    /// Runs one step with the next texts.
    fn run_next(&mut self, queue: &mut JobQueue) {
        let step_tokens = self.options.step_tokens;
        let Some(next) = queue.next_step(step_tokens, capacity(step_tokens)) else { return };
        // Short texts need a step with capacity for their number.
        let n_tokens = next.n_tokens.max(TOKENS_PER_TEXT * next.n_texts().saturating_sub(1));
        let ran = self.step(&queue.texts(&next), n_tokens);
        queue.finish(&next, ran);
    }

    /// Returns an index into `compiled`, which is always the last.
    fn prepare(&mut self, n_tokens: usize) -> Result<usize, EngineError> {
        let n_tokens = size(n_tokens, self.backend.buckets().is_empty());
        if let Some(i) = self.compiled.iter().position(|c| c.n_tokens == n_tokens) {
            self.compiled[i..].rotate_left(1);
            return Ok(self.compiled.len() - 1);
        }
        let EmbedderOptions { pooling, normalizes, max_tokens, .. } = self.options;
        let n_texts = capacity(n_tokens);
        let spec = EmbedSpec { n_tokens, n_texts, n_context: max_tokens, pooling, normalizes };
        let EmbedGraph { graph, inputs } = self.model.embed_graph(&spec)?;
        let compiled = self.backend.compile(&fuse(&graph)?)?;
        let control = ControlBlock::new(self.backend.plan(&compiled).control());
        if self.compiled.len() == MAX_COMPILED {
            self.compiled.remove(0);
        }
        self.compiled.push(CompiledEmbedStep { n_tokens, n_texts, compiled, control, inputs });
        Ok(self.compiled.len() - 1)
    }

    /// Runs one step and enters it in the ledger.
    fn step(&mut self, texts: &[&[u32]], n_tokens: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        let idx = self.prepare(n_tokens)?;
        let began = Instant::now();
        let ran = self.compiled[idx].fill(texts).map_err(EngineError::from).and_then(|()| self.run(idx));
        let n_tokens = texts.iter().map(|text| text.len()).sum();
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        match &ran {
            Ok(ran) => ledger.ran(StepKind::Embed, n_tokens, began.elapsed(), ran),
            Err(EngineError::Run(error)) => {
                ledger.failed(StepKind::Embed, began.elapsed(), &error.reason());
            }
            Err(_) => {}
        }
        drop(ledger);
        ran?;
        Ok(self.read(idx, texts.len())?)
    }

    fn run(&mut self, idx: usize) -> Result<Ran, EngineError> {
        let CompiledEmbedStep { compiled, control, .. } = &mut self.compiled[idx];
        let io = Io { weights: &self.weights, states: &mut self.states, control: control.bytes() };
        Ok(self.backend.run(compiled, io)?)
    }

    fn read(&mut self, idx: usize, n: usize) -> Result<Vec<Vec<f32>>, RunError> {
        let CompiledEmbedStep { compiled, inputs, n_texts, .. } = &self.compiled[idx];
        let hidden = self.model.config().hidden;
        let mut vectors = vec![0f32; n_texts * hidden];
        self.backend.read(compiled, inputs.vectors, bytemuck::cast_slice_mut(&mut vectors))?;
        Ok(vectors.chunks_exact(hidden).take(n).map(<[f32]>::to_vec).collect())
    }
}

impl<B: Backend> CompiledEmbedStep<B> {
    /// Writes the texts one after another; the remaining rows are padding.
    fn fill(&mut self, texts: &[&[u32]]) -> Result<(), refrain_graph::ControlError> {
        let EmbedInputs { tokens, positions, spans, pool, .. } = self.inputs;
        let n_rows: usize = texts.iter().map(|text| text.len()).sum();
        let first = |idx: usize| texts[..idx].iter().map(|text| text.len()).sum::<usize>();
        let firsts: Vec<usize> = (0..texts.len()).map(first).collect();
        let mut filler = Filler::new(&mut self.control);
        filler.padded(tokens, texts.iter().copied().flatten().map(|&token| token as i32))?;
        filler.padded(positions, texts.iter().flat_map(|text| 0..text.len() as i32))?;
        let span = |(text, &first): (&&[u32], &usize)| {
            let (first, n) = (first as i32, text.len());
            std::iter::repeat_n([first, first + n as i32], n)
        };
        let used = texts.iter().zip(&firsts).flat_map(span).flatten();
        let padding = std::iter::repeat_n(0, 2 * (self.n_tokens - n_rows));
        filler.padded(spans, used.chain(padding))?;
        match pool {
            PoolInputs::Mean { texts: of_row, shares } => {
                let rows = texts.iter().enumerate().flat_map(|(idx, text)| vec![idx as i32; text.len()]);
                filler.padded(of_row, rows)?;
                let mut values = vec![0f32; self.n_texts];
                values.iter_mut().zip(texts).for_each(|(share, text)| *share = 1.0 / text.len() as f32);
                self.control.set_f32(shares, &values)
            }
            PoolInputs::Row { rows, first } => {
                let last = |(text, &at): (&&[u32], &usize)| (at + text.len() - 1) as i32;
                let of_text = |pair: (&&[u32], &usize)| if first { *pair.1 as i32 } else { last(pair) };
                filler.padded(rows, texts.iter().zip(&firsts).map(of_text)).map(drop)
            }
        }
    }
}

/// Maximum number of texts in a step of this size.
fn capacity(n_tokens: usize) -> usize {
    (n_tokens / TOKENS_PER_TEXT + 1).min(MAX_TEXTS)
}

/// Size of the step for this many rows. Without graphs, compiling costs little, so that sizes are at most an
/// eighth apart.
fn size(n_tokens: usize, is_cheap: bool) -> usize {
    let power = n_tokens.next_power_of_two();
    match is_cheap {
        true => n_tokens.next_multiple_of((power / 16).max(8)),
        false => power.max(MIN_BUCKET),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_capacity_for_its_texts() {
        for n_tokens in 1..5000 {
            for is_cheap in [false, true] {
                let size = size(n_tokens, is_cheap);
                assert!(size >= n_tokens && size <= n_tokens * 9 / 8 + 8 || !is_cheap, "{n_tokens}: {size}");
                assert!(size < 2 * n_tokens || size <= MIN_BUCKET, "{n_tokens}: {size}");
                assert!(capacity(size) >= capacity(n_tokens));
            }
        }
        for n in 1..MAX_TEXTS {
            assert!(capacity((TOKENS_PER_TEXT * (n - 1)).max(1)) >= n, "{n}");
        }
    }
}
