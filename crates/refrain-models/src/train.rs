//! The graph of a training step: forward pass, loss, backward pass and update in one graph.
//!
//! During training a model's weights are states: a step reads them, and its last node, the optimiser, changes
//! them. Learning rate, betas, clipping and random state are step inputs, and the number of applied steps is
//! a state, so none of them is baked into a recorded step.

use crate::model::Model;
use crate::step::{Dropping, RowContext, StepBuilder};
use refrain_graph::{
    ADAM_PARAMS, AdamW, GradError, Graph, GraphBuilder, GraphError, InputId, Op, Reduce, State, StateId,
    TensorType, TrainOp, ValueId, Weight, WeightId,
};
use refrain_tensor::{DType, HostTensor};

/// How a model is trained; determines its states and the graph of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainSpec {
    /// Rows per step: all tokens of all its sequences.
    pub n_tokens: usize,
    /// Tokens of the longest sequence: some models use other rotary frequencies for long sequences.
    pub n_context: usize,
    /// Element type of weights, activations and gradients.
    pub dtype: DType,
    /// Whether weights have F32 masters, and F32 moments with them. No effect if `dtype` is F32.
    pub masters: bool,
    /// Whether gradients of several micro-steps are accumulated in F32 before one update.
    pub accumulates: bool,
    /// Probability of dropping an element that a layer's branches add to the residual; 0 for none.
    pub dropout: f32,
    /// Activation checkpointing: keep only the residual between layers, and recompute the remaining
    /// activations in the backward pass.
    pub recompute: bool,
}

/// What a step does after computing its loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainPhase {
    /// Nothing: held-out loss.
    Evaluate,
    /// Like `Evaluate`, with the output of every layer as an output of the graph, under the layer's name.
    Trace,
    /// Adds its gradients to the accumulators.
    Accumulate,
    /// Updates the weights from its gradients and the accumulated ones.
    Update,
}

/// A trained weight and its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// The weight in the model.
    pub weight: WeightId,
    /// Its current value.
    pub value: StateId,
    /// Its F32 master, if the current value is shorter.
    pub master: Option<StateId>,
    /// First moment.
    pub m: StateId,
    /// Second moment.
    pub v: StateId,
    /// Accumulated gradient, with accumulation.
    pub sum: Option<StateId>,
    /// Whether weight decay applies: to matrices, not to vectors.
    pub decays: bool,
}

/// The states of a model in training.
#[derive(Clone, Debug)]
pub struct TrainStates {
    /// All states, in order of their ids.
    pub states: Vec<State>,
    /// Number of applied steps.
    pub count: StateId,
    /// The trained weights, in the model's order.
    pub params: Vec<Param>,
}

/// Inputs and outputs of a training step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainInputs {
    /// Token of each row; -1 for padding.
    pub tokens: InputId, // [n_tokens] I32
    /// Target token of each row; -1 for none.
    pub targets: InputId, // [n_tokens] I32
    /// Position of each row in its document; -1 for padding.
    pub positions: InputId, // [n_tokens] I32
    /// First row and end of each row's document; equal for padding.
    pub spans: InputId, // [n_tokens, 2] I32
    /// Factor on each row's loss: 1 over the number of targets for a mean.
    pub scale: InputId, // [1] F32
    /// Low and high word of the seed and two words of the step counter, with dropout.
    pub rng: Option<InputId>, // [4] U32
    /// Optimiser parameters, laid out by [`refrain_graph::AdamParam`], in steps that update.
    pub adam: Option<InputId>, // [ADAM_PARAMS] F32
    /// Index of the loss among the graph's outputs.
    pub loss: usize, // [1, 1] F32
    /// Index of the sum of all squared gradients, in steps that update. If it is not finite, the step was not
    /// applied.
    pub sum_squares: Option<usize>, // [1] F32
}

/// A training step.
#[derive(Clone, Debug)]
pub struct TrainGraph {
    /// Its graph.
    pub graph: Graph,
    /// Its inputs and outputs.
    pub inputs: TrainInputs,
}

impl Model {
    /// The states of a model in training.
    pub fn train_states(&self, spec: &TrainSpec) -> TrainStates {
        let mut states = vec![State::whole("count", TensorType::new(DType::I32, [1]))];
        let mut params = Vec::new();
        let masters = spec.masters && spec.dtype != DType::F32;
        for (idx, weight) in
            self.weights().iter().enumerate().filter(|(idx, _)| self.is_trained(WeightId::from_idx(*idx)))
        {
            let mut add = |part: &str, dtype| {
                let ty = TensorType { dtype, shape: weight.ty.shape };
                states.push(State::whole(format!("{}{part}", weight.name), ty));
                StateId::from_idx(states.len() - 1)
            };
            let moment = if masters { DType::F32 } else { spec.dtype };
            params.push(Param {
                weight: WeightId::from_idx(idx),
                value: add("", spec.dtype),
                master: masters.then(|| add(".master", DType::F32)),
                m: add(".m", moment),
                v: add(".v", moment),
                sum: spec.accumulates.then(|| add(".sum", DType::F32)),
                decays: weight.ty.shape.rank() >= 2,
            });
        }
        TrainStates { states, count: StateId::from_idx(0), params }
    }

    /// The frozen weights and their values, which are the weights of a training step's graph.
    pub fn frozen(&self) -> (Vec<Weight>, Vec<HostTensor>) {
        let all = self.weights().iter().zip(self.tensors()).enumerate();
        all.filter(|(idx, _)| !self.is_trained(WeightId::from_idx(*idx)))
            .map(|(_, (w, t))| (w.clone(), t.clone()))
            .unzip()
    }

    /// Builds the graph of a training step.
    pub fn train_graph(&self, spec: &TrainSpec, phase: TrainPhase) -> Result<TrainGraph, GradError> {
        if self.config().arch.is_encoder() {
            let because = "an encoder predicts no next token";
            let label = format!("training step of {}", self.config().arch);
            return Err(GradError::NotDifferentiable { label, op: "cross_entropy", because });
        }
        if self.has_slots() {
            let because = "recurrent layers have no backward pass";
            let label = format!("training step of {}", self.config().arch);
            return Err(GradError::NotDifferentiable { label, op: "gated_delta", because });
        }
        let TrainStates { states, count, params } = self.train_states(spec);
        let mut builder = GraphBuilder::new(self.frozen().0, states);
        let per_token = TensorType::new(DType::I32, [spec.n_tokens]);
        let tokens = builder.input("tokens", per_token)?;
        let targets = builder.input("targets", per_token)?;
        let positions = builder.input("positions", per_token)?;
        let spans = builder.input("spans", TensorType::new(DType::I32, [spec.n_tokens, 2]))?;
        let scale = builder.input("scale", TensorType::new(DType::F32, [1]))?;
        let learns = matches!(phase, TrainPhase::Accumulate | TrainPhase::Update);
        let drops = spec.dropout > 0.0 || self.attached().is_some_and(|attached| attached.dropout() > 0.0);
        let drops = drops && learns;
        let rng = match drops {
            true => Some(builder.input("rng", TensorType::new(DType::U32, [4]))?),
            false => None,
        };
        let adam = match phase {
            TrainPhase::Update => Some(builder.input("adam", TensorType::new(DType::F32, [ADAM_PARAMS]))?),
            TrainPhase::Evaluate | TrainPhase::Trace | TrainPhase::Accumulate => None,
        };
        let id = |value: ValueId| builder.input_id(value);
        let mut inputs = TrainInputs {
            tokens: id(tokens),
            targets: id(targets),
            positions: id(positions),
            spans: id(spans),
            scale: id(scale),
            rng: rng.map(id),
            adam: adam.map(id),
            loss: 0,
            sum_squares: None,
        };
        let dropout = rng.map(|rng| Dropping { p: spec.dropout, rng, n_sites: 0 });
        let rows = RowContext::Documents { spans, dropout, n_context: spec.n_context };
        let weights = self.train_values(&builder, &params);
        let context = [tokens, positions];
        let (shared, config) = (self.shared(), self.config());
        let mut step = StepBuilder::of_documents(config, shared, builder, weights, spec.dtype, context, rows);
        step.attached = self.attached();
        let (loss, layers) = self.loss(&mut step, targets, scale, phase == TrainPhase::Trace)?;
        let mut builder = step.builder;
        let total = builder.reshape(loss, &[1, spec.n_tokens])?;
        let total = builder.node(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[total], "loss")?[0];
        builder.output("loss", total)?;
        inputs.loss = builder.n_outputs() - 1;
        if !learns {
            return Ok(TrainGraph { graph: builder.finish(), inputs });
        }
        let values: Vec<ValueId> = params.iter().map(|p| builder.state(p.value)).collect();
        let recompute = if spec.recompute { layers.as_slice() } else { &[] };
        let gradients = builder.gradients(loss, &values, recompute)?;
        let mut sums = Vec::with_capacity(params.len());
        for ((param, gradient), value) in params.iter().zip(gradients).zip(&values) {
            // A weight that this model does not use stays unchanged.
            let gradient = match gradient {
                Some(gradient) => gradient,
                None => {
                    let zero = refrain_graph::Unary::Affine { mul: 0.0, add: 0.0 };
                    builder.unary(zero, *value)?
                }
            };
            sums.push(match param.sum {
                None => gradient,
                Some(sum) => {
                    let sum = builder.state(sum);
                    builder.node(Op::Accumulate, &[sum, gradient], "accumulate")?[0]
                }
            });
        }
        if let (TrainPhase::Update, Some(adam)) = (phase, adam) {
            // From the last layer to the first, in the order of the backward pass.
            let last_first: Vec<ValueId> = sums.iter().rev().copied().collect();
            let squares = builder.node(Op::Train(TrainOp::SumSquares), &last_first, "sum_squares")?[0];
            builder.output("sum_squares", squares)?;
            inputs.sum_squares = Some(builder.n_outputs() - 1);
            self.update(&mut builder, spec, [count], &params, &sums, [adam, squares])?;
        }
        Ok(TrainGraph { graph: builder.finish(), inputs })
    }

    /// The value of each weight of the model: the state that holds it, or a weight of the new graph.
    fn train_values(&self, builder: &GraphBuilder, params: &[Param]) -> Vec<ValueId> {
        let mut n_frozen = 0;
        let value = |idx: usize| match params.iter().find(|p| p.weight.idx() == idx) {
            Some(param) => builder.state(param.value),
            None => {
                n_frozen += 1;
                builder.weight(WeightId::from_idx(n_frozen - 1))
            }
        };
        (0..self.weights().len()).map(value).collect()
    }

    /// Builds the loss of each row, and the nodes of each layer.
    fn loss(
        &self,
        step: &mut StepBuilder<'_>,
        targets: ValueId,
        scale: ValueId,
        traces: bool,
    ) -> Result<(ValueId, Vec<std::ops::Range<usize>>), GraphError> {
        let mut x = self.begin(step)?;
        if traces {
            step.builder.output("token_embd", x)?;
        }
        let mut layers = Vec::with_capacity(self.config().n_layers);
        for layer in 0..self.config().n_layers {
            let first = step.builder.graph().nodes().len();
            step.scope(format!("blk.{layer}"));
            x = self.layer(step, layer, x)?;
            layers.push(first..step.builder.graph().nodes().len());
            if traces {
                step.builder.output(&format!("blk.{layer}"), x)?;
            }
        }
        step.scope("");
        let logits = step.logits(x)?;
        let op = Op::Train(TrainOp::CrossEntropy);
        let loss = step.builder.node(op, &[logits, targets, scale], "cross_entropy")?[0];
        Ok((loss, layers))
    }

    fn update(
        &self,
        builder: &mut GraphBuilder,
        spec: &TrainSpec,
        [count]: [StateId; 1],
        params: &[Param],
        sums: &[ValueId],
        [adam, squares]: [ValueId; 2],
    ) -> Result<(), GraphError> {
        let masters = params.iter().any(|p| p.master.is_some());
        let mut inputs = vec![builder.state(count), adam, squares];
        for (param, &sum) in params.iter().zip(sums) {
            inputs.push(sum);
            inputs.push(builder.state(param.value));
            inputs.extend(param.master.map(|master| builder.state(master)));
            inputs.extend([builder.state(param.m), builder.state(param.v)]);
        }
        let decays = params.iter().map(|p| p.decays).collect();
        let op = Op::Train(TrainOp::AdamW(AdamW { decays, masters, clears: spec.accumulates }));
        builder.node(op, &inputs, "adamw")?;
        Ok(())
    }
}
