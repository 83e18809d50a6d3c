//! A model that learns, on one device: the step API.
//!
//! A [`Learner`] owns the states of a model that is trained (weights, masters, moments, the count of steps) where the
//! backend keeps them, and the compiled steps that change them. A caller with a loop of its own gives it batches; the
//! [`crate::trainer`] is such a loop.

use refrain_graph::{
    ADAM_PARAMS, AdamParam, Backend, CompileError, ControlBlock, ControlError, GradError, Io, Plan, Ran,
    RunError, State, StateId, fuse, join_sums,
};
use refrain_models::{Model, ModelError, Param, TrainGraph, TrainInputs, TrainPhase, TrainSpec, TrainStates};
use refrain_tensor::{DType, HostTensor, TensorError, quant};
use std::borrow::Cow;
use std::sync::Arc;

/// The rows of one micro-step, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Token of each row; -1 for padding.
    pub tokens: &'a [i32],
    /// What follows each row; -1 where that is not learnt.
    pub targets: &'a [i32],
    /// Position of each row in its document; -1 for padding.
    pub positions: &'a [i32],
    /// First row and end of each row's document; both the same for padding.
    pub spans: &'a [[i32; 2]],
}

impl Rows<'_> {
    /// Rows that are learnt from.
    pub fn n_targets(&self) -> usize {
        self.targets.iter().filter(|&&target| target >= 0).count()
    }
}

/// The optimiser's parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamSettings {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of matrices.
    pub weight_decay: f64,
    /// The largest norm of all gradients together; larger ones are scaled down. `None`: as they are.
    pub clip: Option<f64>,
}

impl AdamSettings {
    /// As the step takes them. Differences and logarithms are taken in double precision.
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

/// What a step found.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss of the rows that were learnt from.
    pub loss: f32,
    /// The norm of all gradients together, before clipping. Not finite: the step was not applied.
    pub grad_norm: f32,
    /// How each micro-step ran.
    pub ran: Vec<Ran>,
}

impl StepOutcome {
    /// Whether the weights were changed.
    pub fn is_applied(&self) -> bool {
        self.grad_norm.is_finite()
    }
}

/// Why a learner failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The model has no training step.
    #[error(transparent)]
    Grad(#[from] GradError),
    /// The step does not compile for the device.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A step, or reading and writing states, failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A batch is not of the step's size.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A weight cannot be read as numbers.
    #[error("{name}: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// Why.
        source: TensorError,
    },
    /// The weights do not make a model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A step got another number of batches than it accumulates.
    #[error("a step takes {want} batches, got {got}")]
    Batches {
        /// Batches of a step.
        want: usize,
        /// Batches that came.
        got: usize,
    },
    /// None of a step's rows has a target.
    #[error("none of the {n_rows} rows of the step has a target: there is nothing to learn from")]
    NoTargets {
        /// Rows.
        n_rows: usize,
    },
}

impl LearnError {
    /// What to do about it.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            LearnError::Compile(error) => error.hint().map(Cow::from),
            LearnError::Run(error) => error.hint().map(Cow::from),
            LearnError::NoTargets { .. } => Some(
                "look at what marks the parts that are learnt: a conversation needs replies of the assistant"
                    .into(),
            ),
            LearnError::Model(error) => error.hint().map(Cow::from),
            LearnError::Grad(_)
            | LearnError::Control(_)
            | LearnError::Tensor { .. }
            | LearnError::Batches { .. } => None,
        }
    }
}

/// A compiled step and its inputs.
struct Step<B: Backend> {
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: TrainInputs,
}

impl<B: Backend> Step<B> {
    fn new(backend: &B, TrainGraph { graph, inputs }: &TrainGraph) -> Result<Step<B>, LearnError> {
        let mut graph = fuse(graph).map_err(GradError::from)?;
        if backend.adds() {
            graph = join_sums(&graph).map_err(GradError::from)?;
        }
        let compiled = backend.compile(&graph)?;
        let control = ControlBlock::new(backend.plan(&compiled).control());
        Ok(Step { compiled, control, inputs: inputs.clone() })
    }

    fn fill(&mut self, rows: &Rows<'_>, scale: f32) -> Result<(), LearnError> {
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

    fn read(&self, backend: &mut B, output: usize) -> Result<f32, LearnError> {
        let mut value = [0f32];
        backend.read(&self.compiled, output, bytemuck::cast_slice_mut(&mut value))?;
        Ok(value[0])
    }
}

/// A model that learns, on one backend.
pub struct Learner<B: Backend> {
    // Compiled steps go before the backend that made them.
    update: Step<B>,
    accumulate: Option<Step<B>>,
    evaluate: Option<Step<B>>,
    weights: B::Weights,
    states: B::States,
    backend: B,
    model: Arc<Model>,
    spec: TrainSpec,
    table: TrainStates,
    n_batches: usize,
}

impl<B: Backend> Learner<B> {
    /// Prepares a model to be trained by steps of `n_batches` batches of `spec.n_tokens` rows. It starts from the model's
    /// own weights.
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
        let update = Step::new(&backend, &model.train_graph(&spec, TrainPhase::Update)?)?;
        let accumulate = match spec.accumulates {
            true => Some(Step::new(&backend, &model.train_graph(&spec, TrainPhase::Accumulate)?)?),
            false => None,
        };
        let evaluate = None;
        let mut learner =
            Learner { update, accumulate, evaluate, weights, states, backend, model, spec, table, n_batches };
        for idx in 0..learner.table.params.len() {
            let param = learner.table.params[idx];
            let tensor = learner.model.tensors()[param.weight.idx()].clone();
            learner.set_param(&param, &tensor)?;
        }
        Ok(learner)
    }

    /// The model it started from.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// How it is trained.
    pub fn spec(&self) -> &TrainSpec {
        &self.spec
    }

    /// The states and what they are.
    pub fn table(&self) -> &TrainStates {
        &self.table
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The plan of a whole step.
    pub fn plan(&self) -> &Plan {
        self.backend.plan(&self.update.compiled)
    }

    /// One step: gradients of all batches, clipping, update.
    ///
    /// `random` seeds dropout: the same numbers drop the same elements.
    pub fn step(
        &mut self,
        batches: &[Rows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<StepOutcome, LearnError> {
        if batches.len() != self.n_batches {
            return Err(LearnError::Batches { want: self.n_batches, got: batches.len() });
        }
        let n_targets: usize = batches.iter().map(Rows::n_targets).sum();
        if n_targets == 0 {
            return Err(LearnError::NoTargets { n_rows: batches.len() * self.spec.n_tokens });
        }
        let scale = 1.0 / n_targets as f32;
        let mut ran = Vec::with_capacity(batches.len());
        let (mut loss, mut sum_squares) = (0.0f32, f32::NAN);
        for (i, rows) in batches.iter().enumerate() {
            let is_last = i + 1 == batches.len();
            let step = match &mut self.accumulate {
                Some(step) if !is_last => step,
                _ => &mut self.update,
            };
            step.fill(rows, scale)?;
            if let Some(id) = step.inputs.rng {
                // Each batch of a step drops other elements.
                let [low, high, count, _] = random;
                step.control.set_u32(id, &[low, high, count, i as u32])?;
            }
            if let Some(id) = step.inputs.adam {
                step.control.set_f32(id, &adam.params())?;
            }
            ran.push(step.run(&mut self.backend, &self.weights, &mut self.states)?);
            loss += step.read(&mut self.backend, step.inputs.loss)?;
            if let Some(output) = step.inputs.sum_squares {
                sum_squares = step.read(&mut self.backend, output)?;
            }
        }
        Ok(StepOutcome { loss, grad_norm: sum_squares.sqrt(), ran })
    }

    /// The summed loss of rows that are not learnt from, and how many of them have a target.
    pub fn evaluate(&mut self, rows: &Rows<'_>) -> Result<(f64, usize), LearnError> {
        if self.evaluate.is_none() {
            let graph = self.model.train_graph(&self.spec, TrainPhase::Evaluate)?;
            self.evaluate = Some(Step::new(&self.backend, &graph)?);
        }
        let Some(step) = &mut self.evaluate else { unreachable!("made above") };
        let n_targets = rows.n_targets();
        step.fill(rows, 1.0)?;
        step.run(&mut self.backend, &self.weights, &mut self.states)?;
        Ok((step.read(&mut self.backend, step.inputs.loss)?.into(), n_targets))
    }

    /// Where the first number that is not finite is: the name of a weight, or of the layer whose result has it. For
    /// messages, after a loss was not finite; slow.
    pub fn first_not_finite(&mut self, batches: &[Rows<'_>]) -> Result<String, LearnError> {
        for param in &self.table.params {
            let name = &self.table.states[param.value.idx()].name;
            let wrap = |source| LearnError::Tensor { name: name.clone(), source };
            if self.weight(param)?.to_f32().map_err(wrap)?.iter().any(|v| !v.is_finite()) {
                return Ok(name.clone());
            }
        }
        let graph = self.model.train_graph(&self.spec, TrainPhase::Trace)?;
        let names: Vec<String> = graph.graph.outputs().iter().map(|output| output.name.clone()).collect();
        let mut step = Step::new(&self.backend, &graph)?;
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

    /// What a state holds.
    pub fn state(&self, id: StateId) -> Result<Vec<u8>, LearnError> {
        let mut bytes = vec![0; state_bytes(&self.table.states[id.idx()])];
        self.backend.read_state(&self.states, id, &mut bytes)?;
        Ok(bytes)
    }

    /// Puts values into a state, as [`Learner::state`] gave them.
    pub fn set_state(&mut self, id: StateId, bytes: &[u8]) -> Result<(), LearnError> {
        Ok(self.backend.write_state(&mut self.states, id, bytes)?)
    }

    /// The present value of a trained weight, in F32: the master where there is one.
    pub fn weight(&self, param: &Param) -> Result<HostTensor, LearnError> {
        let id = param.master.unwrap_or(param.value);
        let State { name, ty, .. } = &self.table.states[id.idx()];
        let wrap = |source| LearnError::Tensor { name: name.clone(), source };
        let mut values = vec![0.0; ty.shape.n_elements()];
        quant::dequantize(ty.dtype, &self.state(id)?, &mut values).map_err(wrap)?;
        HostTensor::from_f32(ty.shape, &values).map_err(wrap)
    }

    /// The model as it is now: every weight in F32, from its master where there is one.
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

/// Numbers in one of the three float types.
fn rounded(values: &[f32], dtype: DType) -> Vec<u8> {
    if dtype == DType::BF16 {
        return values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
    }
    if dtype == DType::F16 {
        return values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    }
    bytemuck::cast_slice(values).to_vec()
}
