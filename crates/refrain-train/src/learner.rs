//! The step API: a model in training on one device.
//!
//! A [`Learner`] owns the states of the model (weights, masters, moments, step count), which live in the
//! backend, and the compiled steps that update them. A caller with its own training loop passes it batches;
//! [`crate::trainer`] is such a loop.
//!
//! Steps can be launched ahead: [`Learner::queue`] launches the next step while others run,
//! [`Learner::collect`] waits for the oldest one. A step depends on earlier steps only through the states, so
//! the results do not depend on when they are collected.

use refrain_graph::{
    ADAM_PARAMS, AdamParam, Backend, Collected, CompileError, ControlBlock, ControlError, GradError, Io,
    Plan, Ran, RunError, State, StateId, StepQueue, fuse, join_sums,
};
use refrain_models::{Model, ModelError, Param, TrainGraph, TrainInputs, TrainPhase, TrainSpec, TrainStates};
use refrain_tensor::{DType, HostTensor, TensorError, quant};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Rows of one micro-step, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct BatchRows<'a> {
    /// Token of each row; -1 for padding.
    pub tokens: &'a [i32],
    /// Target of each row; -1 for none.
    pub targets: &'a [i32],
    /// Position of each row in its document; -1 for padding.
    pub positions: &'a [i32],
    /// First row and end of each row's document; equal for padding.
    pub spans: &'a [[i32; 2]],
}

impl BatchRows<'_> {
    /// Number of rows with a target.
    pub fn n_targets(&self) -> usize {
        self.targets.iter().filter(|&&target| target >= 0).count()
    }
}

/// Parameters of the optimiser for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamSettings {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Maximum global gradient norm; larger gradients are scaled down. `None` disables clipping.
    pub clip: Option<f64>,
}

impl AdamSettings {
    /// Parameters in the layout of the step. Differences and logarithms are computed in double precision.
    pub fn params(&self) -> [f32; ADAM_PARAMS] {
        let mut params = [0.0; ADAM_PARAMS];
        let mut set = |param: AdamParam, value: f64| params[param as usize] = value as f32;
        let [beta1, beta2] = self.betas;
        set(AdamParam::Lr, self.lr);
        set(AdamParam::Beta1, beta1);
        set(AdamParam::OneMinusBeta1, 1.0 - beta1);
        set(AdamParam::LnBeta1, beta1.ln());
        set(AdamParam::Beta2, beta2);
        set(AdamParam::OneMinusBeta2, 1.0 - beta2);
        set(AdamParam::LnBeta2, beta2.ln());
        set(AdamParam::Eps, self.eps);
        set(AdamParam::WeightDecay, self.weight_decay);
        set(AdamParam::MaxNorm, self.clip.unwrap_or(0.0));
        params
    }
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the rows with targets.
    pub loss: f32,
    /// Global gradient norm before clipping. If it is not finite, the step was not applied.
    pub grad_norm: f32,
    /// How each micro-step ran.
    pub ran: Vec<Ran>,
}

impl StepOutcome {
    /// Whether the weights were updated.
    pub fn is_applied(&self) -> bool {
        self.grad_norm.is_finite()
    }
}

/// Errors of a learner.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The model has no training step.
    #[error(transparent)]
    Grad(#[from] GradError),
    /// The step does not compile for the device.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A step failed, or reading or writing a state did.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A batch does not match the step's size.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A weight cannot be decoded.
    #[error("{name}: {source}")]
    Tensor {
        /// Name of the weight.
        name: String,
        /// Why.
        source: TensorError,
    },
    /// The weights do not form a model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The number of batches is not the number that the step accumulates.
    #[error("a step takes {want} batches, {got} were given")]
    Batches {
        /// Batches per step.
        want: usize,
        /// Batches given.
        got: usize,
    },
    /// Steps are in flight where none are allowed.
    #[error("{n} steps are in flight and must be collected first")]
    InFlight {
        /// Number of steps.
        n: usize,
    },
    /// No step is queued to be collected.
    #[error("no step is queued")]
    NothingQueued,
    /// None of the step's rows has a target.
    #[error("none of the {n_rows} rows of the step has a target")]
    NoTargets {
        /// Number of rows.
        n_rows: usize,
    },
}

impl LearnError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            LearnError::Compile(error) => error.hint().map(Cow::from),
            LearnError::Run(error) => error.hint().map(Cow::from),
            LearnError::NoTargets { .. } => {
                Some("check the targets: a conversation needs assistant messages".into())
            }
            LearnError::Model(error) => error.hint().map(Cow::from),
            LearnError::Grad(_)
            | LearnError::Control(_)
            | LearnError::Tensor { .. }
            | LearnError::Batches { .. }
            | LearnError::InFlight { .. }
            | LearnError::NothingQueued => None,
        }
    }
}

/// A compiled step and its inputs.
struct CompiledTrainStep<B: Backend> {
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: TrainInputs,
}

impl<B: Backend> CompiledTrainStep<B> {
    fn new(
        backend: &B,
        TrainGraph { graph, inputs }: &TrainGraph,
    ) -> Result<CompiledTrainStep<B>, LearnError> {
        let mut graph = fuse(graph).map_err(GradError::from)?;
        if backend.adds() {
            graph = join_sums(&graph).map_err(GradError::from)?;
        }
        let compiled = backend.compile(&graph)?;
        let control = ControlBlock::new(backend.plan(&compiled).control());
        Ok(CompiledTrainStep { compiled, control, inputs: inputs.clone() })
    }

    fn fill(&mut self, rows: &BatchRows<'_>, scale: f32) -> Result<(), LearnError> {
        let (control, inputs) = (&mut self.control, &self.inputs);
        control.set_i32(inputs.tokens, rows.tokens)?;
        control.set_i32(inputs.targets, rows.targets)?;
        control.set_i32(inputs.positions, rows.positions)?;
        control.set_i32(inputs.spans, rows.spans.as_flattened())?;
        control.set_f32(inputs.scale, &[scale])?;
        Ok(())
    }

    fn run(
        &mut self,
        backend: &mut B,
        weights: &B::Weights,
        states: &mut B::States,
    ) -> Result<Ran, LearnError> {
        let io = Io { weights, states, control: self.control.bytes() };
        Ok(backend.run(&mut self.compiled, io)?)
    }

    /// Queues the step; it returns its loss, and the sum of squares if it has one.
    fn queue(
        &mut self,
        backend: &mut B,
        weights: &B::Weights,
        states: &mut B::States,
        queue: &mut StepQueue,
    ) -> Result<(), LearnError> {
        let io = Io { weights, states, control: self.control.bytes() };
        let both = [self.inputs.loss, self.inputs.sum_squares.unwrap_or(0)];
        let outputs = &both[..1 + usize::from(self.inputs.sum_squares.is_some())];
        Ok(backend.queue(&mut self.compiled, io, outputs, queue)?)
    }

    fn read(&self, backend: &mut B, output: usize) -> Result<f32, LearnError> {
        let mut value = [0f32];
        backend.read(&self.compiled, output, bytemuck::cast_slice_mut(&mut value))?;
        Ok(value[0])
    }
}

/// A queued step, with the results of its micro-steps collected so far.
#[derive(Debug, Default)]
struct QueuedStep {
    loss: f32,
    sum_squares: Option<f32>,
    ran: Vec<Ran>,
}

impl QueuedStep {
    fn add(&mut self, micro: Collected) {
        let value = |i: usize| {
            let bytes = micro.outputs.get(i).and_then(|bytes| bytes.first_chunk::<4>());
            bytes.map(|bytes| f32::from_le_bytes(*bytes))
        };
        self.loss += value(0).unwrap_or(f32::NAN);
        self.sum_squares = value(1).or(self.sum_squares);
        self.ran.push(micro.ran);
    }

    fn outcome(self) -> StepOutcome {
        let grad_norm = self.sum_squares.unwrap_or(f32::NAN).sqrt();
        StepOutcome { loss: self.loss, grad_norm, ran: self.ran }
    }
}

/// A model in training on one backend.
pub struct Learner<B: Backend> {
    // Compiled steps must be dropped before the backend that made them.
    update: CompiledTrainStep<B>,
    accumulate: Option<CompiledTrainStep<B>>,
    evaluate: Option<CompiledTrainStep<B>>,
    weights: B::Weights,
    states: B::States,
    backend: B,
    model: Arc<Model>,
    spec: TrainSpec,
    table: TrainStates,
    n_batches: usize,
    /// Micro-steps in flight.
    queue: StepQueue,
    /// Steps that are queued but not collected, oldest first.
    queued: VecDeque<QueuedStep>,
}

impl<B: Backend> Learner<B> {
    /// Prepares a model for training with steps of `n_batches` batches of `spec.n_tokens` rows, starting from
    /// the model's weights.
    pub fn new(
        backend: B,
        model: Arc<Model>,
        spec: TrainSpec,
        n_batches: usize,
    ) -> Result<Learner<B>, LearnError> {
        let spec = TrainSpec { accumulates: n_batches > 1, ..spec };
        let table = model.train_states(&spec);
        let (weights, tensors) = model.frozen();
        let weights = backend.load(&weights, tensors)?;
        let states = backend.allocate(&table.states)?;
        let update = CompiledTrainStep::new(&backend, &model.train_graph(&spec, TrainPhase::Update)?)?;
        let accumulate = match spec.accumulates {
            true => {
                Some(CompiledTrainStep::new(&backend, &model.train_graph(&spec, TrainPhase::Accumulate)?)?)
            }
            false => None,
        };
        let evaluate = None;
        let (queue, queued) = (StepQueue::new(), VecDeque::new());
        let mut learner = Learner {
            update,
            accumulate,
            evaluate,
            weights,
            states,
            backend,
            model,
            spec,
            table,
            n_batches,
            queue,
            queued,
        };
        for idx in 0..learner.table.params.len() {
            let param = learner.table.params[idx];
            let tensor = learner.model.tensors()[param.weight.idx()].clone();
            learner.set_param(&param, &tensor)?;
        }
        Ok(learner)
    }

    /// The model that training started from.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The training specification.
    pub fn spec(&self) -> &TrainSpec {
        &self.spec
    }

    /// The states and their roles.
    pub fn table(&self) -> &TrainStates {
        &self.table
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The plan of a step that updates.
    pub fn plan(&self) -> &Plan {
        self.backend.plan(&self.update.compiled)
    }

    /// Maximum number of steps in flight; 1 on a device that runs every step synchronously.
    pub fn depth(&self) -> usize {
        self.backend.queue_depth().max(1)
    }

    /// Number of steps that are queued but not collected.
    pub fn n_queued(&self) -> usize {
        self.queued.len()
    }

    /// Runs one step: gradients of all batches, clipping, update. No other step may be in flight.
    ///
    /// `random` seeds dropout: equal values drop the same elements.
    pub fn step(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<StepOutcome, LearnError> {
        if !self.queued.is_empty() {
            return Err(LearnError::InFlight { n: self.queued.len() });
        }
        self.queue(batches, adam, random)?;
        self.collect()
    }

    /// Launches a step after those in flight, without waiting if the device can: it does not depend on their
    /// results. At most [`Learner::depth`] steps may be in flight.
    ///
    /// A rejected step (too many in flight, wrong number of batches, no targets) changes nothing. After any
    /// other error, nothing is in flight. Steps whose outcome was not collected may or may not have been
    /// applied, and gradient accumulators may hold part of a step: continue from a checkpoint.
    pub fn queue(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<(), LearnError> {
        if batches.len() != self.n_batches {
            return Err(LearnError::Batches { want: self.n_batches, got: batches.len() });
        }
        let n_targets: usize = batches.iter().map(BatchRows::n_targets).sum();
        if n_targets == 0 {
            return Err(LearnError::NoTargets { n_rows: batches.len() * self.spec.n_tokens });
        }
        if self.queued.len() >= self.depth() {
            return Err(LearnError::InFlight { n: self.queued.len() });
        }
        self.queued.push_back(QueuedStep::default());
        let sent = self.send(batches, adam, random, 1.0 / n_targets as f32);
        if sent.is_err() {
            self.forget();
        }
        sent
    }

    fn send(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
        scale: f32,
    ) -> Result<(), LearnError> {
        for (i, rows) in batches.iter().enumerate() {
            while self.queue.len() >= self.depth() {
                self.collect_micro()?;
            }
            let is_last = i + 1 == batches.len();
            let step = match &mut self.accumulate {
                Some(step) if !is_last => step,
                _ => &mut self.update,
            };
            step.fill(rows, scale)?;
            if let Some(id) = step.inputs.rng {
                // Each batch of a step drops different elements.
                let [low, high, count, _] = random;
                step.control.set_u32(id, &[low, high, count, i as u32])?;
            }
            if let Some(id) = step.inputs.adam {
                step.control.set_f32(id, &adam.params())?;
            }
            step.queue(&mut self.backend, &self.weights, &mut self.states, &mut self.queue)?;
        }
        Ok(())
    }

    /// Waits for the oldest step in flight. For errors see [`Learner::queue`].
    pub fn collect(&mut self) -> Result<StepOutcome, LearnError> {
        let Some(step) = self.queued.front() else { return Err(LearnError::NothingQueued) };
        for _ in step.ran.len()..self.n_batches {
            if let Err(error) = self.collect_micro() {
                self.forget();
                return Err(error);
            }
        }
        self.queued.pop_front().map(QueuedStep::outcome).ok_or(LearnError::NothingQueued)
    }

    /// Waits until nothing is in flight and discards the outcomes. Returns the number of steps; they may have
    /// been applied.
    pub fn abandon(&mut self) -> Result<usize, LearnError> {
        let n = std::mem::take(&mut self.queued).len();
        self.backend.abandon(&mut self.queue)?;
        Ok(n)
    }

    /// Waits for the oldest micro-step in flight.
    fn collect_micro(&mut self) -> Result<(), LearnError> {
        let micro = self.backend.collect(&mut self.queue)?;
        let n_batches = self.n_batches;
        if let Some(step) = self.queued.iter_mut().find(|step| step.ran.len() < n_batches) {
            step.add(micro);
        }
        Ok(())
    }

    /// Discards the steps in flight after an error, which is the one to report.
    fn forget(&mut self) {
        if let Err(error) = self.abandon() {
            tracing::debug!("steps in flight after a failed one: {error}");
        }
    }

    /// Summed loss of held-out rows, and the number of rows with a target.
    pub fn evaluate(&mut self, rows: &BatchRows<'_>) -> Result<(f64, usize), LearnError> {
        if self.evaluate.is_none() {
            let graph = self.model.train_graph(&self.spec, TrainPhase::Evaluate)?;
            self.evaluate = Some(CompiledTrainStep::new(&self.backend, &graph)?);
        }
        let Some(step) = &mut self.evaluate else { unreachable!("it was created above") };
        let n_targets = rows.n_targets();
        step.fill(rows, 1.0)?;
        step.run(&mut self.backend, &self.weights, &mut self.states)?;
        Ok((step.read(&mut self.backend, step.inputs.loss)?.into(), n_targets))
    }

    /// Locates the first value that is not finite: the name of a weight, or of the layer whose output
    /// contains it. Slow; for messages after a non-finite loss.
    pub fn first_not_finite(&mut self, batches: &[BatchRows<'_>]) -> Result<String, LearnError> {
        for param in &self.table.params {
            let name = &self.table.states[param.value.idx()].name;
            let wrap = |source| LearnError::Tensor { name: name.clone(), source };
            if self.weight(param)?.to_f32().map_err(wrap)?.iter().any(|v| !v.is_finite()) {
                return Ok(name.clone());
            }
        }
        let graph = self.model.train_graph(&self.spec, TrainPhase::Trace)?;
        let names: Vec<String> = graph.graph.outputs().iter().map(|output| output.name.clone()).collect();
        let mut step = CompiledTrainStep::new(&self.backend, &graph)?;
        for rows in batches {
            step.fill(rows, 1.0)?;
            step.run(&mut self.backend, &self.weights, &mut self.states)?;
            for (output, name) in names.iter().enumerate() {
                let ty = self.backend.plan(&step.compiled).outputs()[output].ty();
                let wrap = |source| LearnError::Tensor { name: name.clone(), source };
                let mut bytes = vec![0; ty.dtype.bytes_for(ty.shape.n_elements()).unwrap_or(0)];
                self.backend.read(&step.compiled, output, &mut bytes)?;
                let mut values = vec![0.0; ty.shape.n_elements()];
                quant::dequantize(ty.dtype, &bytes, &mut values).map_err(wrap)?;
                if values.iter().any(|v| !v.is_finite()) {
                    return Ok(name.clone());
                }
            }
        }
        Ok("the backward pass".into())
    }

    /// Reads a state.
    pub fn state(&self, id: StateId) -> Result<Vec<u8>, LearnError> {
        let mut bytes = vec![0; state_bytes(&self.table.states[id.idx()])];
        self.backend.read_state(&self.states, id, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes a state, in the format of [`Learner::state`].
    pub fn set_state(&mut self, id: StateId, bytes: &[u8]) -> Result<(), LearnError> {
        Ok(self.backend.write_state(&mut self.states, id, bytes)?)
    }

    /// Current value of a trained weight in F32, from its master if there is one.
    pub fn weight(&self, param: &Param) -> Result<HostTensor, LearnError> {
        let id = param.master.unwrap_or(param.value);
        let State { name, ty, .. } = &self.table.states[id.idx()];
        let wrap = |source| LearnError::Tensor { name: name.clone(), source };
        let mut values = vec![0.0; ty.shape.n_elements()];
        quant::dequantize(ty.dtype, &self.state(id)?, &mut values).map_err(wrap)?;
        HostTensor::from_f32(ty.shape, &values).map_err(wrap)
    }

    /// The model with its current weights in F32, from their masters if there are any.
    pub fn trained(&self) -> Result<Model, LearnError> {
        let values: Result<Vec<_>, LearnError> =
            self.table.params.iter().map(|param| Ok((param.weight, self.weight(param)?))).collect();
        Ok(self.model.with_values(values?)?)
    }

    fn set_param(&mut self, param: &Param, tensor: &HostTensor) -> Result<(), LearnError> {
        let name = &self.table.states[param.value.idx()].name;
        let wrap = |source| LearnError::Tensor { name: name.clone(), source };
        let values = tensor.to_f32().map_err(wrap)?;
        for id in [Some(param.value), param.master].into_iter().flatten() {
            let bytes = rounded(&values, self.table.states[id.idx()].ty.dtype);
            self.backend.write_state(&mut self.states, id, &bytes)?;
        }
        Ok(())
    }
}

fn state_bytes(state: &State) -> usize {
    state.ty.dtype.bytes_for(state.ty.shape.n_elements()).unwrap_or(0)
}

/// Converts numbers to one of the three float types.
fn rounded(values: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; 2 * values.len()];
    let words = bytes.as_chunks_mut::<2>().0.iter_mut().zip(values);
    if dtype == DType::BF16 {
        words.for_each(|(word, v)| *word = half::bf16::from_f32(*v).to_le_bytes());
        return bytes;
    }
    if dtype == DType::F16 {
        words.for_each(|(word, v)| *word = half::f16::from_f32(*v).to_le_bytes());
        return bytes;
    }
    bytemuck::cast_slice(values).to_vec()
}
