//! One step on one device.

use crate::error::EngineError;
use crate::sampling::{HISTORY, MAX_BIAS, SamplingRow};
use refrain_graph::{Backend, Committed, ControlBlock, ControlLayout, Feedback, InputId, Io, Plan, Ran};
use refrain_graph::{Run, RunError, RunLimits, fuse};
use refrain_models::{Head, KvSpec, Model, StepSpec};
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
    scratch: Vec<i32>,
}

struct Prepared<B: Backend> {
    spec: StepSpec,
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: Inputs,
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
        let kv = KvSpec {
            n_blocks: max_blocks,
            kv_block: options.kv_block,
            max_blocks,
            n_seqs: 1,
            dtype: options.kv_dtype,
        };
        let states = backend.allocate(&model.states(&kv))?;
        let most = backend.buckets().last().copied().unwrap_or(usize::MAX);
        let max_tokens = options.max_tokens.clamp(1, most.max(1));
        Ok(BackendRunner {
            backend,
            model,
            weights,
            states,
            kv,
            max_tokens,
            compiled: Vec::new(),
            run: None,
            scratch: Vec::new(),
        })
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
    fn spec(&self, n_tokens: usize, head: Head) -> StepSpec {
        StepSpec { n_tokens: bucket(self.backend.buckets(), n_tokens), head, act: DType::F32 }
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
        let layout = self.backend.plan(&compiled).control().clone();
        if self.compiled.len() >= MIN_COMPILED.max(2 * self.backend.buckets().len() + 1) {
            self.compiled.remove(0);
        }
        let (control, inputs) = (ControlBlock::new(&layout), Inputs::find(&layout));
        self.compiled.push(Prepared { spec, compiled, control, inputs });
        Ok(self.compiled.len() - 1)
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
        let head = match request.want {
            Want::Nothing => Head::None,
            Want::Logits { n_rows } => Head::Logits { n_rows },
            Want::Sample(_) => Head::Sample { history: HISTORY, n_bias: MAX_BIAS },
        };
        let idx = self.prepare(self.spec(request.tokens.len(), head))?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        inputs.fill(control, request, &mut self.scratch)?;
        let io = Io { weights: &*self.weights, states: &mut self.states, control: control.bytes() };
        let ran = self.backend.run(compiled, io)?;
        out.chosen = None;
        match request.want {
            Want::Nothing => {}
            Want::Logits { n_rows } => {
                out.logits.resize(n_rows * self.model.config().n_vocab, 0.0);
                let logits = output(&self.backend, compiled, "logits")?;
                self.backend.read(compiled, logits, bytemuck::cast_slice_mut(&mut out.logits))?;
            }
            Want::Sample(_) => {
                let (mut token, mut logprob) = ([0i32], [0f32]);
                let places =
                    [output(&self.backend, compiled, "token")?, output(&self.backend, compiled, "logprob")?];
                self.backend.read(compiled, places[0], bytemuck::cast_slice_mut(&mut token))?;
                self.backend.read(compiled, places[1], bytemuck::cast_slice_mut(&mut logprob))?;
                out.chosen = Some((token[0] as u32, logprob[0]));
            }
        }
        Ok(ran)
    }

    fn begin(&mut self, request: &StepRequest<'_>, end: RunEnd<'_>) -> Result<usize, EngineError> {
        let Want::Sample(row) = request.want else { return Err(EngineError::NoRun) };
        let spec = self.spec(request.tokens.len(), Head::Sample { history: HISTORY, n_bias: MAX_BIAS });
        let idx = self.prepare(spec)?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        inputs.fill(control, request, &mut self.scratch)?;
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
        Ok(backend.take(compiled, run)?)
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
        let head = Head::Sample { history: HISTORY, n_bias: MAX_BIAS };
        let idx = self.prepare(self.spec(n_tokens, head))?;
        Ok(self.backend.plan(&self.compiled[idx].compiled))
    }

    fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        let head = Head::Sample { history: HISTORY, n_bias: MAX_BIAS };
        let idx = self.prepare(self.spec(n_tokens, head))?;
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

fn output<B: Backend>(backend: &B, compiled: &B::Compiled, name: &'static str) -> Result<usize, EngineError> {
    backend.plan(compiled).output(name).ok_or(EngineError::NoOutput { name })
}

/// The smallest bucket that holds `n_tokens`; a step larger than all of them keeps its size.
fn bucket(buckets: &[usize], n_tokens: usize) -> usize {
    buckets.iter().copied().find(|&b| b >= n_tokens).unwrap_or(n_tokens)
}

/// Where each step input lies; `None` for inputs that this graph does not have.
struct Inputs {
    tokens: Option<InputId>,
    positions: Option<InputId>,
    seqs: Option<InputId>,
    tables: Option<InputId>,
    rows: Option<InputId>,
    params: Option<InputId>,
    rng: Option<InputId>,
    history: Option<InputId>,
    bias_ids: Option<InputId>,
    bias: Option<InputId>,
}

impl Inputs {
    fn find(layout: &ControlLayout) -> Inputs {
        Inputs {
            tokens: layout.find("tokens"),
            positions: layout.find("positions"),
            seqs: layout.find("seqs"),
            tables: layout.find("tables"),
            rows: layout.find("rows"),
            params: layout.find("params"),
            rng: layout.find("rng"),
            history: layout.find("history"),
            bias_ids: layout.find("bias_ids"),
            bias: layout.find("bias"),
        }
    }

    fn fill(
        &self,
        control: &mut ControlBlock,
        request: &StepRequest<'_>,
        scratch: &mut Vec<i32>,
    ) -> Result<(), EngineError> {
        let n = request.tokens.len();
        let mut set = |id: Option<InputId>, values: &mut dyn Iterator<Item = i32>| {
            let Some(id) = id else { return Ok(()) };
            scratch.clear();
            scratch.extend(values.take(control.layout().slot(id).ty.shape.n_elements()));
            control.set_i32(id, scratch)
        };
        // Rows beyond the request's are padding: no token, no position.
        set(self.tokens, &mut request.tokens.iter().map(|&t| t as i32).chain(std::iter::repeat(-1)))?;
        let positions = (request.start..request.start + n).map(|p| p as i32);
        set(self.positions, &mut positions.chain(std::iter::repeat(-1)))?;
        set(self.seqs, &mut std::iter::repeat(0))?;
        // Places without a block hold -1, so that a read beyond the sequence is refused, not answered.
        set(self.tables, &mut request.table.iter().map(|&b| b as i32).chain(std::iter::repeat(-1)))?;
        let n_rows = match request.want {
            Want::Logits { n_rows } => n_rows,
            Want::Nothing | Want::Sample(_) => 1,
        };
        set(self.rows, &mut (n - n_rows.min(n)..n).map(|r| r as i32))?;
        let Want::Sample(row) = request.want else { return Ok(()) };
        set(self.history, &mut row.history.iter().copied())?;
        set(self.bias_ids, &mut row.bias_ids.iter().copied())?;
        if let Some(id) = self.params {
            control.set_f32(id, &row.params)?;
        }
        if let Some(id) = self.rng {
            control.set_u32(id, &row.rng)?;
        }
        if let Some(id) = self.bias {
            control.set_f32(id, &row.bias)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_graph::{Input, TensorType};

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_it_or_its_own_size() {
        let buckets = [1, 8, 32];
        let sizes = [1, 2, 8, 9, 32, 33].map(|n| bucket(&buckets, n));
        assert_eq!(sizes, [1, 8, 8, 32, 32, 33]);
        assert_eq!(bucket(&[], 7), 7);
    }

    #[test]
    fn padding_has_neither_token_nor_position_and_the_wanted_rows_are_those_of_the_request() {
        let input = |name: &str, n: usize| Input { name: name.into(), ty: TensorType::new(DType::I32, [n]) };
        let layout =
            ControlLayout::new(&[input("tokens", 4), input("positions", 4), input("rows", 2)], 16).unwrap();
        let mut control = ControlBlock::new(&layout);
        let want = Want::Logits { n_rows: 2 };
        let request = StepRequest { tokens: &[7, 8, 9], start: 20, table: &[0], want };
        Inputs::find(&layout).fill(&mut control, &request, &mut Vec::new()).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [7, 8, 9, -1]);
        assert_eq!(words[4..8], [20, 21, 22, -1]);
        assert_eq!(words[8..10], [1, 2]);
    }
}
