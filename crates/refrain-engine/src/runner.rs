//! A model on a device: single steps, and runs of decode steps.

use crate::core::Chosen;
use crate::error::EngineError;
use crate::sampling::MAX_TOP;
use crate::slots::{N_PAIR, SlotCopy};
use crate::speculate::VerifyCost;
use crate::step::{
    StepRequest, Want, bucket, choice_rows, decode_spec, fill, fill_row, history_capacity, run_head,
    sample_head, spec,
};
use refrain_graph::{
    Backend, CommittedStep, ControlBlock, Feedback, Io, LateRows, Plan, Ran, Reason, RowLimits, Run,
};
use refrain_graph::{RunError, StateEdit, StateId, StateKind, StepFlags, StepInputs, fuse};
use refrain_models::{KvSpec, Model, StepSpec};
use refrain_tensor::DType;
use std::borrow::Cow;
use std::sync::Arc;

/// A choice with the most probable tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenChoice {
    /// The chosen token.
    pub chosen: Chosen,
    /// The most probable tokens with their log-probabilities, as many as requested.
    pub top: Vec<(u32, f32)>,
}

/// Output of a step.
#[derive(Debug, Default)]
pub struct StepOut {
    /// The choice of each request that asked for one. A row with non-finite logits fails alone.
    pub choices: Vec<Option<Result<TokenChoice, EngineError>>>,
    /// The choices after each token of a request that verifies guesses; empty for other requests.
    pub verified: Vec<Vec<Result<TokenChoice, EngineError>>>,
    /// Logits, row by row, if requested. Kept between steps to reuse the allocation.
    pub logits: Vec<f32>,
}

/// A sequence in a run of decode steps.
#[derive(Clone, Copy, Debug)]
pub struct RunMember<'a> {
    /// Its next token, and how the following token is chosen.
    pub request: StepRequest<'a>,
    /// Maximum number of positions.
    pub n_positions: usize,
    /// Maximum number of choices.
    pub n_choices: usize,
    /// Tokens that end the row.
    pub end: &'a [u32],
}

/// Size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    /// Number of rows; rows without a sequence are padding.
    pub n_rows: usize,
    /// Capacity of each row's history of recent tokens.
    pub n_history: usize,
    /// Whether choices depend on masks that become known while a step runs.
    pub is_masked: bool,
    /// Whether the most probable tokens are reported.
    pub has_top: bool,
}

impl RunMember<'_> {
    fn limits(&self) -> Result<RowLimits, EngineError> {
        let (Want::Sample(row), [_]) = (self.request.want, self.request.tokens) else {
            return Err(EngineError::NoRun);
        };
        let (window, history_next) = row.window(self.n_positions);
        Ok(RowLimits {
            n_positions: self.n_positions,
            n_choices: self.n_choices,
            end: self.end.to_vec(),
            window,
            history_next,
            lapsing: row.lapsing(),
        })
    }
}

/// A model on a device.
pub trait Runner: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;
    /// Runs one step: tokens of several sequences, each followed by the requested output.
    fn step(&mut self, requests: &[StepRequest<'_>], out: &mut StepOut) -> Result<Ran, EngineError>;
    /// Returns the size that the next step should have for as many sequences as `wanted` has rows, whose penalties look
    /// back as many tokens as its history has. Call it once per step: a size that is not compiled yet is compiled only after
    /// several steps in a row have requested it; until then, a larger compiled size serves.
    fn run_shape(&mut self, wanted: RunShape) -> RunShape;
    /// Begins a run of self-feeding decode steps of that size, with the sequences in its first rows, without
    /// launching any. Returns how many steps may be in flight at once. A previous run must be finished first.
    fn begin(&mut self, rows: &[RunMember<'_>], shape: RunShape) -> Result<usize, EngineError>;
    /// Puts a sequence into a free row of the run, starting with the next launched step.
    fn set_row(&mut self, row: usize, with: &RunMember<'_>) -> Result<(), EngineError>;
    /// Makes a row padding, starting with the next launched step.
    fn clear_row(&mut self, row: usize) -> Result<(), EngineError>;
    /// Sets a row's block table for the steps launched from here on. Its previous table must be a prefix of
    /// the new one, except for leading blocks that are gone from the new one because no later step attends to
    /// them; their entries are out of range.
    fn set_table(&mut self, row: usize, table: &[u32]) -> Result<(), EngineError>;
    /// Launches `n` more steps of the run; the tables must cover their positions as far as the rows can
    /// advance.
    fn launch(&mut self, n: usize) -> Result<(), EngineError>;
    /// Whether the oldest uncollected step of the run needs masks before it can be collected.
    fn awaits_masks(&self) -> bool;
    /// Gives that step its masks, and launches the rest of it.
    fn supply(&mut self, late: LateRows) -> Result<(), EngineError>;
    /// Waits for the oldest uncollected step of the run. After an error the run must be finished.
    fn collect(&mut self) -> Result<CommittedStep, EngineError>;
    /// Progress of the run; zero if there is none.
    fn progress(&self) -> DecodeProgress;
    /// Takes the reason why the steps of the run are launched one by one, if the device was to repeat them.
    fn take_not_repeated(&mut self) -> Option<Reason> {
        None
    }
    /// Ends the run, if there is one: waits until no step is in flight, and returns how many steps were not
    /// collected.
    fn finish(&mut self) -> Result<usize, EngineError>;
    /// Plan of a step over `n_tokens` tokens that ends in sampling.
    fn plan(&mut self, n_tokens: usize) -> Result<&Plan, EngineError>;
    /// Kernels of that plan, each with the index of the (first) step it runs.
    fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError>;
    /// Layouts of the weights on the device, with the bytes of each.
    fn layouts(&self) -> Vec<(String, usize)>;
    /// Dimensions of the KV cache.
    fn kv(&self) -> &KvSpec;
    /// Resizes the cache to `n_blocks` blocks, block tables to `max_blocks` and recurrent states to
    /// `n_slots`, keeping their contents. No run may be active. Steps are recompiled when they are next
    /// needed.
    ///
    /// After [`EngineError::CannotGrow`] nothing has changed.
    fn resize(&mut self, n_blocks: usize, max_blocks: usize, n_slots: usize) -> Result<(), EngineError>;
    /// Copies one slot of every recurrent state onto another, ordered after the steps already launched.
    fn copy_slot(&mut self, copy: SlotCopy) -> Result<(), EngineError>;
    /// Cost of verify steps relative to decode steps of one sequence, with the draft model that makes the guesses, if
    /// one does. Decides how many guesses are checked.
    fn verify_cost(&self, draft: Option<&Model>) -> VerifyCost;
    /// The model.
    fn model(&self) -> &Arc<Model>;
    /// Maximum number of tokens per step.
    fn max_tokens(&self) -> usize;
    /// Maximum number of sequences per step.
    fn max_seqs(&self) -> usize;
}

/// Progress of a run, in steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeProgress {
    /// Steps launched.
    pub n_launched: u64,
    /// Steps collected.
    pub n_collected: u64,
}

impl DecodeProgress {
    /// Steps launched and not yet collected.
    pub fn n_in_flight(self) -> usize {
        self.n_launched.saturating_sub(self.n_collected) as usize
    }
}

/// Options of a runner.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Maximum positions per sequence.
    pub context: usize,
    /// Positions in the cache, shared by all sequences; at least `context`.
    pub n_positions: usize,
    /// Positions in a KV block.
    pub kv_block: usize,
    /// Element type of the cache: F16, BF16, F32, or U8 for signed bytes with a scale per head and position.
    pub kv_dtype: DType,
    /// Maximum number of tokens per step.
    pub max_tokens: usize,
    /// Maximum number of sequences per step.
    pub max_seqs: usize,
    /// Number of sequences that may have recurrent states at once, if the model has recurrent layers; a state
    /// is many times as large as a KV block. 0 derives it from the size of the cache.
    pub n_recurrent: usize,
}

impl Default for RunnerOptions {
    fn default() -> RunnerOptions {
        RunnerOptions {
            context: 4096,
            n_positions: 0,
            kv_block: 32,
            kv_dtype: DType::F16,
            max_tokens: 256,
            max_seqs: 64,
            n_recurrent: 0,
        }
    }
}

/// A runner over any backend. It compiles a graph for each size of step when it is first needed.
pub struct BackendRunner<B: Backend> {
    backend: B,
    model: Arc<Model>,
    weights: Arc<B::Weights>,
    states: B::States,
    kv: KvSpec,
    max_tokens: usize,
    max_seqs: usize,
    // Most recently used last. The last chunk of a prompt may have any size, so old sizes are evicted.
    compiled: Vec<PreparedStep<B>>,
    run: Option<(StepSpec, Run)>,
    /// The run size that is not compiled yet, and how many consecutive steps have requested it.
    missing: Option<(RunShape, usize)>,
}

struct PreparedStep<B: Backend> {
    spec: StepSpec,
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: StepInputs,
}

/// KV blocks that a typical sequence holds: the cache has one recurrent state per so many blocks.
const LIKELY_BLOCKS: usize = 8;
/// Compiled steps kept for a backend without buckets: decode, full prompt chunks, and some sizes of last
/// chunks.
const MIN_COMPILED: usize = 8;
/// The same for small steps, which decode any number of sequences.
const MAX_COMPILED: usize = 96;
/// Consecutive steps that must request a run size before it is compiled while a larger one serves: compiling
/// stalls every sequence.
const PATIENCE: usize = 32;
/// Maximum arena bytes of all compiled steps beyond the first [`MIN_COMPILED`].
const COMPILED_BYTES: usize = 128 << 20;

impl<B: Backend> BackendRunner<B> {
    /// Loads a model onto a device. The backend uses the mapped weights in place or uploads them.
    pub fn new(
        backend: B,
        model: Arc<Model>,
        options: RunnerOptions,
    ) -> Result<BackendRunner<B>, EngineError> {
        let weights = Arc::new(backend.load(model.weights(), model.tensors().to_vec())?);
        BackendRunner::with_weights(backend, model, weights, options)
    }

    /// A runner over weights that another runner of the same model has loaded, on a backend that can share
    /// them.
    pub fn with_weights(
        backend: B,
        model: Arc<Model>,
        weights: Arc<B::Weights>,
        options: RunnerOptions,
    ) -> Result<BackendRunner<B>, EngineError> {
        if model.config().arch.is_encoder() {
            return Err(EngineError::Encoder { arch: model.config().arch.name() });
        }
        let max_blocks = options.context.div_ceil(options.kv_block);
        let n_blocks = options.n_positions.div_ceil(options.kv_block).max(max_blocks);
        let most = |buckets: &[usize]| buckets.last().copied().unwrap_or(usize::MAX).max(1);
        let max_tokens = options.max_tokens.clamp(1, most(backend.buckets()));
        let max_seqs = options.max_seqs.clamp(1, most(backend.row_buckets()).min(max_tokens));
        let n_recurrent = match (model.has_slots(), options.n_recurrent) {
            (false, _) => 0,
            (true, 0) => max_seqs.min((n_blocks / LIKELY_BLOCKS).max(1)),
            (true, n) => n,
        };
        // One of them may be an opened sequence, which needs one more slot.
        let n_slots = if n_recurrent == 0 { 0 } else { N_PAIR * n_recurrent + 1 };
        let kv =
            KvSpec { n_blocks, kv_block: options.kv_block, max_blocks, n_slots, dtype: options.kv_dtype };
        let states = backend.allocate(&model.states(&kv))?;
        Ok(BackendRunner {
            backend,
            model,
            weights,
            states,
            kv,
            max_tokens,
            max_seqs,
            compiled: Vec::new(),
            run: None,
            missing: None,
        })
    }

    /// The weights, for another runner of the same model.
    pub fn weights(&self) -> &Arc<B::Weights> {
        &self.weights
    }

    /// The wrapped backend.
    pub fn inner(&self) -> &B {
        &self.backend
    }

    /// Prepares the step for `n_tokens` tokens that ends in a choice.
    fn prepare_choice(&mut self, n_tokens: usize) -> Result<usize, EngineError> {
        self.prepare(StepSpec::of_one(bucket(self.backend.buckets(), n_tokens), 1, sample_head(0, 0, false)))
    }

    /// Returns an index into `compiled`, which is always the last.
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
        self.compiled.push(PreparedStep { spec, compiled, control, inputs });
        while self.compiled.len() > MIN_COMPILED && !self.may_keep_all() {
            self.compiled.remove(0);
        }
        Ok(self.compiled.len() - 1)
    }

    /// With buckets, all steps are kept: one sequence with and without a choice, decode rows, and mixed
    /// steps.
    fn may_keep_all(&self) -> bool {
        let (n_sizes, n_rows) = (self.backend.buckets().len(), self.backend.row_buckets().len());
        if n_sizes > 0 {
            // Each with and without masks; verify steps of one sequence and of several, each in powers of two.
            return self.compiled.len() <= 2 * (2 * n_sizes + 1 + 3 * n_rows + n_sizes * n_sizes);
        }
        let arena = |p: &PreparedStep<B>| self.backend.plan(&p.compiled).arena_bytes();
        self.compiled.len() <= MAX_COMPILED
            && self.compiled.iter().map(arena).sum::<usize>() <= COMPILED_BYTES
    }

    fn read_choices(
        &mut self,
        idx: usize,
        requests: &[StepRequest<'_>],
        out: &mut StepOut,
    ) -> Result<(), EngineError> {
        let PreparedStep { compiled, inputs, spec, .. } = &self.compiled[idx];
        let Some(sampling) = &inputs.sampling else {
            out.choices.extend(requests.iter().map(|_| None));
            return Ok(());
        };
        let n = spec.shape.n_choices;
        let (mut tokens, mut logprobs) = (vec![0u32; n], vec![0f32; n]);
        self.backend.read(compiled, sampling.token, bytemuck::cast_slice_mut(&mut tokens))?;
        self.backend.read(compiled, sampling.logprob, bytemuck::cast_slice_mut(&mut logprobs))?;
        let (mut ids, mut probs) = (Vec::new(), Vec::new());
        if let Some([top_ids, top_logprobs]) = sampling.top {
            (ids, probs) = (vec![0u32; n * MAX_TOP], vec![0f32; n * MAX_TOP]);
            self.backend.read(compiled, top_ids, bytemuck::cast_slice_mut(&mut ids))?;
            self.backend.read(compiled, top_logprobs, bytemuck::cast_slice_mut(&mut probs))?;
        }
        let vocab = self.model.config().n_vocab;
        let choice = |at: usize, position: usize, n_top: usize| {
            let (token, logprob) = (tokens[at], logprobs[at]);
            let top = ids.iter().copied().zip(probs.iter().copied()).skip(at * MAX_TOP).take(n_top);
            match () {
                () if !logprob.is_finite() => Err(self.non_finite(position)),
                () if token as usize >= vocab => Err(EngineError::BadChoice { token, vocab, position }),
                () => Ok(TokenChoice { chosen: Chosen { token, logprob }, top: top.collect() }),
            }
        };
        let mut firsts = choice_rows(inputs, requests);
        for request in requests {
            let rows = request.sampled();
            let first = if rows.is_empty() { None } else { firsts.next() };
            let position = |idx: usize| request.last_position() + 1 + idx - rows.len();
            let choices = first.into_iter().flat_map(|first| {
                rows.iter().enumerate().map(move |(idx, row)| choice(first + idx, position(idx), row.n_top))
            });
            match request.want {
                Want::Nothing | Want::Logits { .. } => out.choices.push(None),
                Want::Sample(_) => out.choices.push(choices.last()),
                Want::Verify(_) => {
                    out.verified[out.choices.len()] = choices.collect();
                    out.choices.push(None);
                }
            }
        }
        Ok(())
    }

    fn non_finite(&self, position: usize) -> EngineError {
        EngineError::NonFinite { position, kv_dtype: self.kv.dtype }
    }

    /// The run, and the compiled step it repeats.
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

    fn step(&mut self, requests: &[StepRequest<'_>], out: &mut StepOut) -> Result<Ran, EngineError> {
        let spec = spec(requests, self.backend.buckets(), self.backend.row_buckets());
        let idx = self.prepare(spec)?;
        let PreparedStep { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, requests)?;
        let io = Io { weights: &*self.weights, states: &mut self.states, control: control.bytes() };
        let ran = self.backend.run(compiled, io)?;
        out.choices.clear();
        out.verified.clear();
        out.verified.resize_with(requests.len(), Vec::new);
        if let ([StepRequest { want: Want::Logits { n_rows }, .. }], Some(logits)) = (requests, inputs.logits)
        {
            out.logits.resize(n_rows * self.model.config().n_vocab, 0.0);
            self.backend.read(compiled, logits, bytemuck::cast_slice_mut(&mut out.logits))?;
        }
        self.read_choices(idx, requests, out)?;
        Ok(ran)
    }

    fn run_shape(&mut self, wanted: RunShape) -> RunShape {
        let n_seqs = wanted.n_rows;
        let n_history = history_capacity(wanted.n_history);
        let shape = |n_rows: usize| RunShape { n_rows, n_history, ..wanted };
        if n_seqs <= 1 {
            return shape(1);
        }
        let wanted = bucket(self.backend.row_buckets(), n_seqs);
        let is_ready = |n: usize| self.compiled.iter().any(|c| c.spec == decode_spec(shape(n)));
        let larger = |n: &usize| (wanted + 1..=2 * wanted).contains(n) && is_ready(*n);
        let serving = match is_ready(wanted) {
            true => None,
            false => self.backend.row_buckets().iter().copied().find(larger),
        };
        let Some(serving) = serving else {
            self.missing = None;
            return shape(wanted);
        };
        let n_before = self.missing.filter(|(missing, _)| *missing == shape(wanted)).map_or(0, |(_, n)| n);
        self.missing = Some((shape(wanted), n_before + 1));
        shape(if n_before < PATIENCE { serving } else { wanted })
    }

    fn begin(&mut self, rows: &[RunMember<'_>], shape: RunShape) -> Result<usize, EngineError> {
        let requests: Vec<StepRequest<'_>> = rows.iter().map(|row| row.request).collect();
        let limits = rows.iter().map(|row| row.limits().map(Some)).collect::<Result<Vec<_>, _>>()?;
        let spec = match shape.n_rows.max(rows.len()) {
            0 | 1 => StepSpec::of_one(bucket(self.backend.buckets(), 1), 1, run_head(shape)),
            n_rows => decode_spec(RunShape { n_rows, ..shape }),
        };
        let idx = self.prepare(spec)?;
        let PreparedStep { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, &requests)?;
        let feedback = Feedback::of(self.backend.plan(compiled)).ok_or(EngineError::NoFeedback)?;
        self.run = Some((spec, Run::new(feedback, control.clone(), limits)));
        Ok(self.backend.ahead(compiled).max(1))
    }

    fn set_row(&mut self, row: usize, with: &RunMember<'_>) -> Result<(), EngineError> {
        let limits = with.limits()?;
        let (Some((spec, run)), compiled) = (&mut self.run, &self.compiled) else {
            return Err(EngineError::NoRun);
        };
        let prepared = compiled.iter().find(|c| c.spec == *spec).ok_or(EngineError::NoRun)?;
        run.set_row(row, limits, |control| fill_row(&prepared.inputs, control, row, &with.request))
    }

    fn clear_row(&mut self, row: usize) -> Result<(), EngineError> {
        let (_, run) = self.run.as_mut().ok_or(EngineError::NoRun)?;
        run.clear_row(row);
        Ok(())
    }

    fn set_table(&mut self, row: usize, table: &[u32]) -> Result<(), EngineError> {
        let (_, run) = self.run.as_mut().ok_or(EngineError::NoRun)?;
        run.set_table(row, table);
        Ok(())
    }

    fn launch(&mut self, n: usize) -> Result<(), EngineError> {
        let (backend, weights, states, compiled, run) = self.running()?;
        Ok(backend.send(compiled, weights, states, run, n)?)
    }

    fn awaits_masks(&self) -> bool {
        self.run.as_ref().is_some_and(|(_, run)| run.awaits_masks())
    }

    fn supply(&mut self, late: LateRows) -> Result<(), EngineError> {
        let (backend, weights, states, compiled, run) = self.running()?;
        Ok(backend.supply(compiled, weights, states, run, late)?)
    }

    fn collect(&mut self) -> Result<CommittedStep, EngineError> {
        let (backend, _, _, compiled, run) = self.running()?;
        let step = backend.take(compiled, run)?;
        let vocab = self.model.config().n_vocab;
        let is_bad =
            |c: &&refrain_graph::Committed| c.token as usize >= vocab && !c.flags.has(StepFlags::NON_FINITE);
        if let Some(bad) = step.rows.iter().flatten().find(is_bad) {
            let (token, position) = (bad.token, bad.position);
            // A device that returns invalid tokens may be lost without having reported it; then report that
            // instead.
            self.finish()?;
            return Err(EngineError::BadChoice { token, vocab, position });
        }
        Ok(step)
    }

    fn progress(&self) -> DecodeProgress {
        let run = self.run.as_ref().map(|(_, run)| run);
        run.map_or_else(DecodeProgress::default, |run| DecodeProgress {
            n_launched: run.n_sent(),
            n_collected: run.n_taken(),
        })
    }

    fn take_not_repeated(&mut self) -> Option<Reason> {
        let (backend, _, _, compiled, _) = self.running().ok()?;
        backend.take_not_repeated(compiled)
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

    fn resize(&mut self, n_blocks: usize, max_blocks: usize, n_slots: usize) -> Result<(), EngineError> {
        let kv = KvSpec { n_blocks, max_blocks, n_slots, ..self.kv };
        if (n_blocks, n_slots) != (self.kv.n_blocks, self.kv.n_slots) {
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

    fn copy_slot(&mut self, SlotCopy { from, to }: SlotCopy) -> Result<(), EngineError> {
        let states = self.model.states(&self.kv);
        let in_slots = states.iter().enumerate().filter(|(_, state)| state.kind == StateKind::Slots);
        let copy = |(idx, _)| StateEdit::Copy { state: StateId::from_idx(idx), from: from..from + 1, to };
        let edits: Vec<StateEdit> = in_slots.map(copy).collect();
        Ok(self.backend.edit_states(&mut self.states, &edits)?)
    }

    fn verify_cost(&self, draft: Option<&Model>) -> VerifyCost {
        match self.backend.row_buckets().is_empty() {
            true => VerifyCost::on_cpu(&self.model, draft),
            false => VerifyCost::on_device(&self.model, draft),
        }
    }

    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn max_seqs(&self) -> usize {
        self.max_seqs
    }
}
