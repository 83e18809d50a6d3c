//! A model on a device: one step, or a run of them.

use crate::core::Chosen;
use crate::error::EngineError;
use crate::sampling::MAX_TOP;
use crate::slots::{N_PAIR, SlotCopy};
use crate::step::{
    StepRequest, Want, bucket, choice_rows, decode_spec, fill, fill_row, history_places, sample_head, spec,
};
use refrain_graph::{Backend, CommittedStep, ControlBlock, Feedback, Io, Plan, Ran, RowLimits, Run};
use refrain_graph::{RunError, StateEdit, StateId, StateKind, StepFlags, StepInputs, fuse};
use refrain_models::{KvSpec, Model, StepSpec};
use refrain_tensor::DType;
use std::borrow::Cow;
use std::sync::Arc;

/// A choice with the most probable tokens beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// What was chosen.
    pub chosen: Chosen,
    /// The most probable tokens with the logarithms of their probabilities, as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// What came out of a step.
#[derive(Debug, Default)]
pub struct StepOut {
    /// For each request its choice, where it asked for one. A row whose logits make no sense fails alone.
    pub choices: Vec<Option<Result<Choice, EngineError>>>,
    /// Logits, row by row, if they were asked for. Kept between steps so that its memory is used again.
    pub logits: Vec<f32>,
}

/// A sequence that takes part in a run of decode steps.
#[derive(Clone, Copy, Debug)]
pub struct RunRow<'a> {
    /// Its next token, and how the one behind it is chosen.
    pub request: StepRequest<'a>,
    /// Positions that it may have.
    pub n_positions: usize,
    /// Choices that it may make.
    pub n_choices: usize,
    /// Tokens that end it.
    pub end: &'a [u32],
}

/// The size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    /// Rows; those that nobody is in are padding.
    pub n_rows: usize,
    /// Places for recent tokens of each.
    pub n_history: usize,
}

impl RunRow<'_> {
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
    /// Runs one step: tokens of different sequences, each followed by what it asks for.
    fn step(&mut self, requests: &[StepRequest<'_>], out: &mut StepOut) -> Result<Ran, EngineError>;
    /// The size that the next step of so many sequences should have, whose penalties look at so many tokens. Asked once a
    /// step: a size that is not ready yet is made ready when it was wanted for a while, and until then a larger one that is
    /// ready serves.
    fn run_shape(&mut self, n_seqs: usize, n_history: usize) -> RunShape;
    /// Begins a run of decode steps of that size that feed themselves, with sequences in its first rows, and sends none of
    /// them yet. Gives how many may be under way at once. A run before it must be finished.
    fn begin(&mut self, rows: &[RunRow<'_>], shape: RunShape) -> Result<usize, EngineError>;
    /// Puts a sequence into a row of the run that nobody is in, from the next step that is sent on.
    fn set_row(&mut self, row: usize, with: &RunRow<'_>) -> Result<(), EngineError>;
    /// Makes a row padding, from the next step that is sent on.
    fn clear_row(&mut self, row: usize) -> Result<(), EngineError>;
    /// Gives a row the blocks of the steps that are sent from now on. What it had before must be the beginning of that.
    fn set_table(&mut self, row: usize, table: &[u32]) -> Result<(), EngineError>;
    /// Sends `n` more steps of the run; the tables cover their positions as far as rows can go.
    fn send(&mut self, n: usize) -> Result<(), EngineError>;
    /// Waits for the oldest step of the run that was not taken yet. After an error the run must be finished.
    fn take(&mut self) -> Result<CommittedStep, EngineError>;
    /// How far the run is; nothing of it was sent or taken where there is none.
    fn progress(&self) -> RunProgress;
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
    /// Makes the cache `n_blocks` large, block tables `max_blocks` wide and recurrent states `n_slots` long, and keeps what they hold. No run may
    /// be under way. Steps are compiled again when they are next needed.
    ///
    /// After [`EngineError::CannotGrow`] all is as it was.
    fn resize(&mut self, n_blocks: usize, max_blocks: usize, n_slots: usize) -> Result<(), EngineError>;
    /// Copies one slot of every recurrent state onto another, behind the steps that were sent.
    fn copy_slot(&mut self, copy: SlotCopy) -> Result<(), EngineError>;
    /// The model.
    fn model(&self) -> &Arc<Model>;
    /// The most tokens a step may have.
    fn max_tokens(&self) -> usize;
    /// The most sequences a step may have.
    fn max_seqs(&self) -> usize;
}

/// Steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunProgress {
    /// Steps that were sent.
    pub n_sent: u64,
    /// Steps among them that were taken.
    pub n_taken: u64,
}

impl RunProgress {
    /// Steps that were sent and not taken.
    pub fn n_under_way(self) -> usize {
        self.n_sent.saturating_sub(self.n_taken) as usize
    }
}

/// How a runner is laid out.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Positions that one sequence may have.
    pub context: usize,
    /// Positions of the cache, which sequences share; at least those of one sequence.
    pub n_positions: usize,
    /// Positions in a KV block.
    pub kv_block: usize,
    /// Element type of the cache: F16, BF16 or F32.
    pub kv_dtype: DType,
    /// The most tokens in a step.
    pub max_tokens: usize,
    /// The most sequences in a step.
    pub max_seqs: usize,
    /// Sequences that may have recurrent states at once, where the model has recurrent layers; each is many times as large
    /// as a KV block. 0: as many as the cache makes likely.
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

/// A runner over any backend: a compiled graph for each size of step, made when it is first needed.
pub struct BackendRunner<B: Backend> {
    backend: B,
    model: Arc<Model>,
    weights: Arc<B::Weights>,
    states: B::States,
    kv: KvSpec,
    max_tokens: usize,
    max_seqs: usize,
    // Most recently used last. Prompts end in pieces of any size, so old sizes are dropped.
    compiled: Vec<Prepared<B>>,
    run: Option<(StepSpec, Run)>,
    /// The size of run that is not ready, and how many steps in a row have wanted it.
    missing: Option<(RunShape, usize)>,
}

struct Prepared<B: Backend> {
    spec: StepSpec,
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: StepInputs,
}

/// KV blocks that a sequence is likely to hold: for each so many there is room for a recurrent state.
const LIKELY_BLOCKS: usize = 8;
/// Steps that are kept compiled where there are no buckets: decode, full prompt pieces, and some of the sizes that prompts
/// ended in.
const MIN_COMPILED: usize = 8;
/// The same for small steps, which decode any number of sequences.
const MAX_COMPILED: usize = 96;
/// Steps that want a size of run before it is made ready, where another one serves meanwhile: everybody waits for that.
const PATIENCE: usize = 32;
/// Bytes that more than [`MIN_COMPILED`] of them may take.
const COMPILED_BYTES: usize = 128 << 20;

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
        let n_blocks = options.n_positions.div_ceil(options.kv_block).max(max_blocks);
        let most = |buckets: &[usize]| buckets.last().copied().unwrap_or(usize::MAX).max(1);
        let max_tokens = options.max_tokens.clamp(1, most(backend.buckets()));
        let max_seqs = options.max_seqs.clamp(1, most(backend.row_buckets()).min(max_tokens));
        let n_recurrent = match (model.has_slots(), options.n_recurrent) {
            (false, _) => 0,
            (true, 0) => max_seqs.min((n_blocks / LIKELY_BLOCKS).max(1)),
            (true, n) => n,
        };
        // One of them may be opened, which takes one more.
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

    /// The backend.
    pub fn inner(&self) -> &B {
        &self.backend
    }

    /// The step of that many tokens that ends in a choice.
    fn prepare_choice(&mut self, n_tokens: usize) -> Result<usize, EngineError> {
        self.prepare(StepSpec::of_one(bucket(self.backend.buckets(), n_tokens), 1, sample_head(0, 0)))
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
        self.compiled.push(Prepared { spec, compiled, control, inputs });
        while self.compiled.len() > MIN_COMPILED && !self.may_keep_all() {
            self.compiled.remove(0);
        }
        Ok(self.compiled.len() - 1)
    }

    /// Where there are buckets, all of them: of one sequence with and without a choice, of decoded rows, and of mixed
    /// steps.
    fn may_keep_all(&self) -> bool {
        let (n_sizes, n_rows) = (self.backend.buckets().len(), self.backend.row_buckets().len());
        if n_sizes > 0 {
            return self.compiled.len() <= 2 * n_sizes + 1 + n_rows + n_sizes * n_sizes;
        }
        let arena = |p: &Prepared<B>| self.backend.plan(&p.compiled).arena_bytes();
        self.compiled.len() <= MAX_COMPILED
            && self.compiled.iter().map(arena).sum::<usize>() <= COMPILED_BYTES
    }

    fn read_choices(
        &mut self,
        idx: usize,
        requests: &[StepRequest<'_>],
        out: &mut StepOut,
    ) -> Result<(), EngineError> {
        let Prepared { compiled, inputs, spec, .. } = &self.compiled[idx];
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
        let mut rows = choice_rows(inputs, requests);
        for request in requests {
            let Want::Sample(sampling) = request.want else {
                out.choices.push(None);
                continue;
            };
            let Some(at) = rows.next() else { unreachable!("there is one for each choice") };
            let (token, logprob, position) = (tokens[at], logprobs[at], request.last_position());
            let top = ids.iter().copied().zip(probs.iter().copied()).skip(at * MAX_TOP).take(sampling.n_top);
            out.choices.push(Some(match () {
                () if !logprob.is_finite() => Err(self.non_finite(position)),
                () if token as usize >= vocab => Err(EngineError::BadChoice { token, vocab, position }),
                () => Ok(Choice { chosen: Chosen { token, logprob }, top: top.collect() }),
            }));
        }
        Ok(())
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

    fn step(&mut self, requests: &[StepRequest<'_>], out: &mut StepOut) -> Result<Ran, EngineError> {
        let spec = spec(requests, self.backend.buckets(), self.backend.row_buckets());
        let idx = self.prepare(spec)?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, requests)?;
        let io = Io { weights: &*self.weights, states: &mut self.states, control: control.bytes() };
        let ran = self.backend.run(compiled, io)?;
        out.choices.clear();
        if let ([StepRequest { want: Want::Logits { n_rows }, .. }], Some(logits)) = (requests, inputs.logits)
        {
            out.logits.resize(n_rows * self.model.config().n_vocab, 0.0);
            self.backend.read(compiled, logits, bytemuck::cast_slice_mut(&mut out.logits))?;
        }
        self.read_choices(idx, requests, out)?;
        Ok(ran)
    }

    fn run_shape(&mut self, n_seqs: usize, n_history: usize) -> RunShape {
        let n_history = history_places(n_history);
        let shape = |n_rows: usize| RunShape { n_rows, n_history };
        if n_seqs <= 1 {
            return shape(1);
        }
        let wanted = bucket(self.backend.row_buckets(), n_seqs);
        let is_ready = |n: usize| self.compiled.iter().any(|c| c.spec == decode_spec(n, n_history));
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

    fn begin(&mut self, rows: &[RunRow<'_>], shape: RunShape) -> Result<usize, EngineError> {
        let requests: Vec<StepRequest<'_>> = rows.iter().map(|row| row.request).collect();
        let limits = rows.iter().map(|row| row.limits().map(Some)).collect::<Result<Vec<_>, _>>()?;
        let spec = match shape.n_rows.max(rows.len()) {
            0 | 1 => StepSpec::of_one(bucket(self.backend.buckets(), 1), 1, sample_head(shape.n_history, 0)),
            n_rows => decode_spec(n_rows, shape.n_history),
        };
        let idx = self.prepare(spec)?;
        let Prepared { compiled, control, inputs, .. } = &mut self.compiled[idx];
        fill(inputs, control, &requests)?;
        let feedback = Feedback::of(self.backend.plan(compiled)).ok_or(EngineError::NoFeedback)?;
        self.run = Some((spec, Run::new(feedback, control.clone(), limits)));
        Ok(self.backend.ahead(compiled).max(1))
    }

    fn set_row(&mut self, row: usize, with: &RunRow<'_>) -> Result<(), EngineError> {
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

    fn send(&mut self, n: usize) -> Result<(), EngineError> {
        let (backend, weights, states, compiled, run) = self.running()?;
        Ok(backend.send(compiled, weights, states, run, n)?)
    }

    fn take(&mut self) -> Result<CommittedStep, EngineError> {
        let (backend, _, _, compiled, run) = self.running()?;
        let step = backend.take(compiled, run)?;
        let vocab = self.model.config().n_vocab;
        let is_bad =
            |c: &&refrain_graph::Committed| c.token as usize >= vocab && !c.flags.has(StepFlags::NON_FINITE);
        if let Some(bad) = step.rows.iter().flatten().find(is_bad) {
            let (token, position) = (bad.token, bad.position);
            // A device that makes up tokens may be lost without having said so yet: that is what to report then.
            self.finish()?;
            return Err(EngineError::BadChoice { token, vocab, position });
        }
        Ok(step)
    }

    fn progress(&self) -> RunProgress {
        let run = self.run.as_ref().map(|(_, run)| run);
        run.map_or_else(RunProgress::default, |run| RunProgress {
            n_sent: run.n_sent(),
            n_taken: run.n_taken(),
        })
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
