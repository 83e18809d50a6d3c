//! The graph of a training step: forward, loss, backward and update as one graph.
//!
//! While a model is trained its weights are states: a step reads them, and its last node, the optimiser, changes them.
//! Learning rate, betas, clipping and random state are inputs of the step, the number of steps that were applied is a
//! state, so nothing of them is fixed when the step is recorded.

use crate::model::Model;
use crate::step::{Dropping, RowContext, Step};
use refrain_graph::{
    ADAM_PARAMS, AdamW, GradError, Graph, GraphBuilder, GraphError, InputId, Op, Reduce, State, StateId,
    TensorType, TrainOp, ValueId, Weight, WeightId,
};
use refrain_tensor::{DType, HostTensor};

/// How a model is trained: what decides which states there are and what a step looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainSpec {
    /// Rows of a step: all tokens of all its sequences.
    pub n_tokens: usize,
    /// Tokens of its longest sequence: models may rotate long ones by other frequencies.
    pub n_context: usize,
    /// Element type of weights, activations and gradients.
    pub dtype: DType,
    /// Whether weights have masters in F32, and moments in F32 with them. Of no use when `dtype` is F32 anyway.
    pub masters: bool,
    /// Whether gradients of several micro-steps are summed, in F32, before one update.
    pub accumulates: bool,
    /// Probability to drop an element of what a layer's branches add to the residual; 0 for none.
    pub dropout: f32,
    /// Keep only what goes from layer to layer, and compute the rest again in the backward pass.
    pub recompute: bool,
}

/// What a step does after its loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainPhase {
    /// Nothing: the loss of text that is not learnt from.
    Evaluate,
    /// Like `Evaluate`, with what every layer made as outputs, by the layer's name.
    Trace,
    /// Adds its gradients to the accumulators.
    Accumulate,
    /// Updates the weights, by its gradients and what was accumulated.
    Update,
}

/// A weight that is trained, and its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// The weight in the model.
    pub weight: WeightId,
    /// Its present value.
    pub value: StateId,
    /// The value in F32, where the present one is shorter.
    pub master: Option<StateId>,
    /// First moment.
    pub m: StateId,
    /// Second moment.
    pub v: StateId,
    /// Sum of gradients, where they are accumulated.
    pub sum: Option<StateId>,
    /// Whether it decays: matrices do, vectors do not.
    pub decays: bool,
}

/// The states of a model that is trained.
#[derive(Clone, Debug)]
pub struct TrainStates {
    /// All states, in the order of their ids.
    pub states: Vec<State>,
    /// How many steps were applied.
    pub count: StateId,
    /// The trained weights, in the model's order.
    pub params: Vec<Param>,
}

/// The inputs of a training step, and where its results are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainInputs {
    /// Token of each row; -1 for padding.
    pub tokens: InputId, // [n_tokens] I32
    /// What follows each row; -1 where that is not learnt.
    pub targets: InputId, // [n_tokens] I32
    /// Position of each row in its document; -1 for padding.
    pub positions: InputId, // [n_tokens] I32
    /// First row and end of each row's document; both the same for padding.
    pub spans: InputId, // [n_tokens, 2] I32
    /// Factor on the loss of each row: 1 over the number of targets for a mean.
    pub scale: InputId, // [1] F32
    /// Seed low, seed high and two words that count steps, where elements are dropped.
    pub rng: Option<InputId>, // [4] U32
    /// Parameters of the optimiser, laid out by [`refrain_graph::AdamParam`], where it runs.
    pub adam: Option<InputId>, // [ADAM_PARAMS] F32
    /// Which output of the graph is the loss.
    pub loss: usize, // [1, 1] F32
    /// Which is the sum of all squared gradients, where the optimiser runs. Not finite: the step was not applied.
    pub sum_squares: Option<usize>, // [1] F32
}

/// A training step.
#[derive(Clone, Debug)]
pub struct TrainGraph {
    /// Its graph.
    pub graph: Graph,
    /// What its inputs and outputs mean.
    pub inputs: TrainInputs,
}

impl Model {
    /// The states that a model has while it is trained.
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

    /// Weights that are not trained, with their values: what a training step's graph has for weights.
    pub fn frozen(&self) -> (Vec<Weight>, Vec<HostTensor>) {
        let all = self.weights().iter().zip(self.tensors()).enumerate();
        all.filter(|(idx, _)| !self.is_trained(WeightId::from_idx(*idx)))
            .map(|(_, (w, t))| (w.clone(), t.clone()))
            .unzip()
    }

    /// The graph of a training step.
    pub fn train_graph(&self, spec: &TrainSpec, phase: TrainPhase) -> Result<TrainGraph, GradError> {
        if self.has_slots() {
            let because = "recurrent layers are for generation; they have no backward pass yet";
            let label = format!("a step that trains {}", self.config().arch);
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
        let mut step = Step::of_documents(config, shared, builder, weights, spec.dtype, context, rows);
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
            // A weight that this model does not use keeps still.
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
            // From the last layer to the first, as the backward pass finds them.
            let last_first: Vec<ValueId> = sums.iter().rev().copied().collect();
            let squares = builder.node(Op::Train(TrainOp::SumSquares), &last_first, "sum_squares")?[0];
            builder.output("sum_squares", squares)?;
            inputs.sum_squares = Some(builder.n_outputs() - 1);
            self.update(&mut builder, spec, [count], &params, &sums, [adam, squares])?;
        }
        Ok(TrainGraph { graph: builder.finish(), inputs })
    }

    /// The value to take for each weight of the model: the state that holds it, or a weight of the new graph.
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

    /// The loss of each row, and the nodes of each layer.
    fn loss(
        &self,
        step: &mut Step<'_>,
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
