//! One step on one device.

use crate::error::EngineError;
use crate::sampling::{HISTORY, MAX_BIAS, SamplingRow};
use refrain_graph::{Backend, Committed, ControlBlock, Feedback, Filler, Io, Plan, Ran, Run, RunLimits};
use refrain_graph::{RunError, StepFlags, StepInputs, fuse};
use refrain_models::{Head, KvSpec, Model, SampleHead, StepSpec};
use refrain_tensor::DType;
use std::borrow::Cow;
use std::sync::Arc;

/// What to compute from a run of tokens besides filling the cache.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// Nothing: a piece of a prompt that goes on.
    Nothing,
    /// The logits after the last `n_rows` tokens.
    Logits {
        /// How many rows, from the end.
        n_rows: usize,
    },
    /// The token after the last one.
    Sample(&'a SamplingRow),
}

/// Tokens of one sequence to run through the model.
#[derive(Clone, Copy, Debug)]
pub struct StepRequest<'a> {
    /// The tokens, in order.
    pub tokens: &'a [u32],
    /// The position of the first.
    pub start: usize,
    /// The sequence's KV blocks.
    pub table: &'a [u32],
    /// What to compute.
    pub want: Want<'a>,
}

/// What came out of a step.
#[derive(Clone, Debug, Default)]
pub struct StepOut {
    /// The chosen token and the logarithm of its probability, if one was asked for.
    pub chosen: Option<(u32, f32)>,
    /// Logits, row by row, if they were asked for. Kept between steps so that its memory is used again.
    pub logits: Vec<f32>,
}

/// Where a run of decode steps ends by itself.
#[derive(Clone, Copy, Debug)]
pub struct RunEnd<'a> {
    /// Positions that the sequence may have.
    pub n_positions: usize,
    /// Tokens that end it.
    pub tokens: &'a [u32],
}

/// A model on a device.
pub trait Runner: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;
    /// Runs one step.
    fn step(&mut self, request: &StepRequest<'_>, out: &mut StepOut) -> Result<Ran, EngineError>;
    /// Begins a run of decode steps that feed themselves, at a request for one token and a choice, and sends none of
    /// them yet. Gives how many may be under way at once. A run before it must be finished.
    fn begin(&mut self, request: &StepRequest<'_>, end: RunEnd<'_>) -> Result<usize, EngineError>;
    /// Sends `n` more steps of the run; `table` covers their positions.
    fn send(&mut self, table: &[u32], n: usize) -> Result<(), EngineError>;
    /// Waits for the oldest step of the run that was not taken yet. After an error the run must be finished.
    fn take(&mut self) -> Result<Committed, EngineError>;
    /// Ends the run, if there is one: waits until no step of it is under way, and says how many nobody took.
    fn finish(&mut self) -> Result<usize, EngineError>;
    /// The plan of a step over `n_tokens` tokens that ends in sampling.
    fn plan(&mut self, n_tokens: usize) -> Result<&Plan, EngineError>;
    /// The kernels of that plan, each with the (first) step it runs.
    fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError>;
    /// How weights lie on the device, with the bytes of each layout.
    fn layouts(&self) -> Vec<(String, usize)>;
    /// The cache's measures.
    fn kv(&self) -> &KvSpec;
    /// Makes the cache `n_blocks` large and block tables `max_blocks` wide, and keeps what the cache holds. No run may
    /// be under way. Steps are compiled again when they are next needed.
    ///
    /// After [`EngineError::CannotGrow`] all is as it was.
    fn resize(&mut self, n_blocks: usize, max_blocks: usize) -> Result<(), EngineError>;
    /// The model.
    fn model(&self) -> &Arc<Model>;
    /// The most tokens a step may have.
    fn max_tokens(&self) -> usize;
}

/// How a runner is laid out.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Positions of the cache.
    pub context: usize,
    /// Positions in a KV block.
    pub kv_block: usize,
    /// Element type of the cache: F16, BF16 or F32.
    pub kv_dtype: DType,
    /// The most tokens in a step.
    pub max_tokens: usize,
}

impl Default for RunnerOptions {
    fn default() -> RunnerOptions {
        RunnerOptions { context: 4096, kv_block: 32, kv_dtype: DType::F16, max_tokens: 256 }
    }
}

/// A runner over any backend: a compiled graph for each size of step, made when it is first needed.
pub struct BackendRunner<B: Backend> {
    backend: B,
    model: Arc<Model>,
    weights: Arc<B::Weights>,
    states: B::States,
    kv: KvSpec,
    max_tokens: usize,
    // Most recently used last. Prompts end in pieces of any size, so old sizes are dropped.
    compiled: Vec<Prepared<B>>,
    run: Option<(StepSpec, Run)>,
}

struct Prepared<B: Backend> {
    spec: StepSpec,
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: StepInputs,
}

// Decode, full prompt pieces, and some of the sizes that prompts ended in; where there are buckets all of them, with and
// without a choice behind the last row.
const MIN_COMPILED: usize = 8;

impl<B: Backend> BackendRunner<B> {
    /// Brings a model to a device. Its weights are used from where they were mapped, or uploaded, as the backend likes.
    pub fn new(
        backend: B,
        model: Arc<Model>,
        options: RunnerOptions,
    ) -> Result<BackendRunner<B>, EngineError> {
        let weights = Arc::new(backend.load(model.weights(), model.tensors().to_vec())?);
        BackendRunner::with_weights(backend, model, weights, options)
    }

    /// A runner over weights that another one of the same model has loaded, on a backend that can use them.
    pub fn with_weights(
        backend: B,
        model: Arc<Model>,
        weights: Arc<B::Weights>,
        options: RunnerOptions,
    ) -> Result<BackendRunner<B>, EngineError> {
        let max_blocks = options.context.div_ceil(options.kv_block);
        let kv =
            KvSpec { n_blocks: max_blocks, kv_block: options.kv_block, max_blocks, dtype: options.kv_dtype };
        let states = backend.allocate(&model.states(&kv))?;
        let most = backend.buckets().last().copied().unwrap_or(usize::MAX);
        let max_tokens = options.max_tokens.clamp(1, most.max(1));
        Ok(BackendRunner { backend, model, weights, states, kv, max_tokens, compiled: Vec::new(), run: None })
    }

    /// The weights, for another runner of the same model.
    pub fn weights(&self) -> &Arc<B::Weights> {
        &self.weights
    }

    /// The backend.
    pub fn inner(&self) -> &B {
        &self.backend
    }

    /// A step of at least `n_tokens`, of a size that the backend likes.
    fn spec(&self, n_tokens: usize, want: &Want<'_>) -> StepSpec {
        let (n_choices, head) = match want {
            Want::Nothing => (0, Head::None),
            Want::Logits { n_rows } => (*n_rows, Head::Logits),
            Want::Sample(_) => (1, SAMPLE),
        };
        StepSpec::of_one(bucket(self.backend.buckets(), n_tokens), n_choices, head)
    }

    /// The step of that many tokens that ends in a choice.
    fn prepare_choice(&mut self, n_tokens: usize) -> Result<usize, EngineError> {
        self.prepare(StepSpec::of_one(bucket(self.backend.buckets(), n_tokens), 1, SAMPLE))
    }

    /// Index into `compiled`, which is always the last.
    fn prepare(&mut self, spec: StepSpec) -> Result<usize, EngineError> {
        if let Some(i) = self.compiled.iter().position(|c| c.spec == spec) {
            let last = self.compiled.len() - 1;
            self.compiled[i..].rotate_left(1);
            return Ok(last);
        }
        let graph = fuse(&self.model.graph(&spec, &self.kv)?)?;
        let compiled = self.backend.compile(&graph)?;
        let plan = self.backend.plan(&compiled);
        let inputs = plan.step_inputs().cloned().ok_or(EngineError::NoFeedback)?;
        let control = ControlBlock::new(plan.control());
        if self.compiled.len() >= MIN_COMPILED.max(2 * self.backend.buckets().len() + 1) {
            self.compiled.remove(0);
        }
        self.compiled.push(Prepared { spec, compiled, control, inputs });
        Ok(self.compiled.len() - 1)
    }

    fn non_finite(&self, position: usize) -> EngineError {
        EngineError::NonFinite { position, kv_dtype: self.kv.dtype }
    }

    /// The run, with the compiled step that it is of.
    #[expect(clippy::type_complexity, reason = "the parts of one struct, borrowed apart")]
    fn running(
        &mut self,
    ) -> Result<(&mut B, &B::Weights, &mut B::States, &mut B::Compiled, &mut Run), EngineError> {
        let (Some((spec, run)), compiled) = (&mut self.run, &mut self.compiled) else {
            return Err(EngineError::NoRun);
        };
        let prepared = compiled.iter_mut().find(|c| c.spec == *spec).ok_or(EngineError::NoRun)?;
        Ok((&mut self.backend, &self.weights, &mut self.states, &mut prepared.compiled, run))
    }
}

impl<B: Backend + Send> Runner for BackendRunner<B>
where
    B::Weights: Send + Sync,
    B::States: Send,
    B::Compiled: Send,
{
    fn backend(&self) -> &'static str {
        self.backend.name()
    }

    fn step(&mut self, request: &StepRequest<'_>, out: &mut StepOut) -> Result<Ran, EngineError> {
        let idx = self.prepare(self.spec(request.tokens.len(), &request.want))?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, request)?;
        let io = Io { weights: &*self.weights, states: &mut self.states, control: control.bytes() };
        let ran = self.backend.run(compiled, io)?;
        out.chosen = None;
        if let (Want::Logits { n_rows }, Some(logits)) = (request.want, inputs.logits) {
            out.logits.resize(n_rows * self.model.config().n_vocab, 0.0);
            self.backend.read(compiled, logits, bytemuck::cast_slice_mut(&mut out.logits))?;
        }
        if let (Want::Sample(_), Some(sampling)) = (request.want, &inputs.sampling) {
            let (mut token, mut logprob) = ([0u32], [0f32]);
            self.backend.read(compiled, sampling.token, bytemuck::cast_slice_mut(&mut token))?;
            self.backend.read(compiled, sampling.logprob, bytemuck::cast_slice_mut(&mut logprob))?;
            if !logprob[0].is_finite() {
                return Err(self.non_finite(request.start + request.tokens.len() - 1));
            }
            let vocab = self.model.config().n_vocab;
            if token[0] as usize >= vocab {
                let position = request.start + request.tokens.len() - 1;
                return Err(EngineError::BadChoice { token: token[0], vocab, position });
            }
            out.chosen = Some((token[0], logprob[0]));
        }
        Ok(ran)
    }

    fn begin(&mut self, request: &StepRequest<'_>, end: RunEnd<'_>) -> Result<usize, EngineError> {
        let Want::Sample(row) = request.want else { return Err(EngineError::NoRun) };
        let spec = self.spec(request.tokens.len(), &request.want);
        let idx = self.prepare(spec)?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, request)?;
        let feedback = Feedback::of(self.backend.plan(compiled)).ok_or(EngineError::NoFeedback)?;
        let (window, history_next) = row.window();
        let limits =
            RunLimits { n_positions: end.n_positions, end: end.tokens.to_vec(), window, history_next };
        self.run = Some((spec, Run::new(feedback, control.clone(), limits)));
        Ok(self.backend.ahead(compiled).max(1))
    }

    fn send(&mut self, table: &[u32], n: usize) -> Result<(), EngineError> {
        let (backend, weights, states, compiled, run) = self.running()?;
        run.set_table(table);
        Ok(backend.send(compiled, weights, states, run, n)?)
    }

    fn take(&mut self) -> Result<Committed, EngineError> {
        let (backend, _, _, compiled, run) = self.running()?;
        let committed = backend.take(compiled, run)?;
        let (token, position, vocab) = (committed.token, committed.position, self.model.config().n_vocab);
        if committed.flags.has(StepFlags::NON_FINITE) {
            return Err(self.non_finite(position));
        }
        if token as usize >= vocab {
            // A device that makes up tokens may be lost without having said so yet: that is what to report then.
            self.finish()?;
            return Err(EngineError::BadChoice { token, vocab, position });
        }
        Ok(committed)
    }

    fn finish(&mut self) -> Result<usize, EngineError> {
        if self.run.is_none() {
            return Ok(0);
        }
        let (backend, _, _, compiled, run) = self.running()?;
        let finished = backend.finish(compiled, run);
        self.run = None;
        Ok(finished?)
    }

    fn plan(&mut self, n_tokens: usize) -> Result<&Plan, EngineError> {
        let idx = self.prepare_choice(n_tokens)?;
        Ok(self.backend.plan(&self.compiled[idx].compiled))
    }

    fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        let idx = self.prepare_choice(n_tokens)?;
        Ok(self.backend.kernels(&self.compiled[idx].compiled))
    }

    fn layouts(&self) -> Vec<(String, usize)> {
        self.backend.layouts(&self.weights)
    }

    fn kv(&self) -> &KvSpec {
        &self.kv
    }

    fn resize(&mut self, n_blocks: usize, max_blocks: usize) -> Result<(), EngineError> {
        let kv = KvSpec { n_blocks, max_blocks, ..self.kv };
        if n_blocks != self.kv.n_blocks {
            self.backend.resize(&mut self.states, &self.model.states(&kv)).map_err(|error| match error {
                RunError::CannotResize { backend } => {
                    EngineError::CannotGrow { backend, has: self.kv.n_blocks, need: n_blocks }
                }
                other => other.into(),
            })?;
        }
        self.kv = kv;
        self.compiled.clear();
        Ok(())
    }

    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}

/// The smallest bucket that holds `n_tokens`; a step larger than all of them keeps its size.
fn bucket(buckets: &[usize], n_tokens: usize) -> usize {
    buckets.iter().copied().find(|&b| b >= n_tokens).unwrap_or(n_tokens)
}

const SAMPLE: Head =
    Head::Sample(SampleHead { n_history: HISTORY, n_bias: MAX_BIAS, masked: false, n_top: 0 });

/// Puts a request in place as the step's only sequence.
fn fill(
    inputs: &StepInputs,
    control: &mut ControlBlock,
    request: &StepRequest<'_>,
) -> Result<(), EngineError> {
    let n = request.tokens.len();
    let mut filler = Filler::new(control);
    filler.padded(inputs.tokens, request.tokens.iter().map(|&t| t as i32))?;
    filler.padded(inputs.positions, (request.start..request.start + n).map(|p| p as i32))?;
    filler.padded(inputs.seqs, std::iter::repeat_n(0, inputs.shape.n_tokens))?;
    if let Some(tables) = inputs.tables {
        filler.padded(tables, request.table.iter().map(|&b| b as i32))?;
    }
    if let Some(rows) = inputs.rows {
        let n_rows = inputs.shape.n_choices.min(n);
        filler.padded(rows, (n - n_rows..n).map(|r| r as i32))?;
    }
    if let (Want::Sample(row), Some(sampling)) = (request.want, &inputs.sampling) {
        filler.row(sampling.params, 0, &row.params)?;
        filler.row(sampling.rng, 0, &row.rng)?;
        filler.row(sampling.history, 0, &row.history)?;
        filler.row(sampling.bias_ids, 0, &row.bias_ids)?;
        filler.row(sampling.bias, 0, &row.bias)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_graph::{GraphBuilder, PlanOptions, StepKind, StepShape, TensorType};

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_it_or_its_own_size() {
        let buckets = [1, 8, 32];
        let sizes = [1, 2, 8, 9, 32, 33].map(|n| bucket(&buckets, n));
        assert_eq!(sizes, [1, 8, 8, 32, 32, 33]);
        assert_eq!(bucket(&[], 7), 7);
    }

    #[test]
    fn padding_has_neither_token_nor_position_and_the_wanted_rows_are_those_of_the_request() {
        let mut b = GraphBuilder::new(vec![], vec![]);
        let mut input = |name: &str, n: usize| {
            let value = b.input(name, TensorType::new(DType::I32, [n])).unwrap();
            b.input_id(value)
        };
        // Names mean nothing: what an input is for is declared.
        let (tokens, positions, seqs) = (input("a", 4), input("b", 4), input("c", 4));
        let rows = Some(input("d", 2));
        let shape = StepShape { kind: StepKind::Prompt, n_tokens: 4, n_seqs: 1, n_choices: 2 };
        let (tables, adapters, sampling, logits) = (None, None, None, None);
        let inputs = StepInputs { shape, tokens, positions, seqs, tables, adapters, rows, sampling, logits };
        let plan = Plan::new(&b.finish(), PlanOptions { align: 16, ..PlanOptions::default() }).unwrap();
        let mut control = ControlBlock::new(plan.control());
        let want = Want::Logits { n_rows: 2 };
        let request = StepRequest { tokens: &[7, 8, 9], start: 20, table: &[0], want };
        fill(&inputs, &mut control, &request).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [7, 8, 9, -1]);
        assert_eq!(words[4..8], [20, 21, 22, -1]);
        assert_eq!(words[12..14], [1, 2]);
    }
}
