//! The network and its training step, built op by op, without a model of this library.
//!
//! ```text
//! ids ──► rows of the data ──► one row per source ──► linear + source embedding
//!                                                        │
//!          ┌─────────────── n_layers times ──────────────┘
//!          ├─ norm ─► q, k, v ─► q and k to length 1 ─► attention over the sources of a sample ─► linear ─► +
//!          └─ norm ─► linear ─► GELU ─► linear ─► +
//!                                                        │
//! loss ◄── cross-entropy ◄── linear ◄── norm ◄── mean over sources
//! ```

use refrain::graph::{
    ADAM_PARAMS, AdamW, Backend, Binary, Collected, ControlBlock, GradError, Graph, GraphBuilder, GraphError,
    InputId, Io, Op, Reduce, RunError, SpanAttention, State, StateId, StepQueue, TensorType, TrainOp, Unary,
    ValueId, Weight, WeightId, fuse, join_sums,
};
use refrain::{DType, train::AdamSettings};
use refrain_tensor::{Bytes, HostTensor, Shape, quant};

/// Added under the square roots of norms and lengths.
const EPS: f32 = 1e-6;
/// Scale of the cosine similarities in attention.
const SHARPNESS: f32 = 8.0;

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Samples per step.
    pub(crate) batch: usize,
    /// Sources per sample.
    pub(crate) n_sources: usize,
    /// Features per source.
    pub(crate) n_features: usize,
    pub(crate) width: usize,
    pub(crate) n_heads: usize,
    pub(crate) ffn: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_classes: usize,
    /// Element type of data, weights and activations.
    pub(crate) dtype: DType,
}

/// What a step computes from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Updates the weights.
    Learn,
    /// Outputs the gradients.
    Differentiate,
    /// Outputs the logits.
    Classify,
}

/// A trained tensor and its states.
#[derive(Clone, Debug)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    pub(crate) value: StateId,
    /// Master weight in F32, if the value has 16 bits.
    pub(crate) master: Option<StateId>,
    pub(crate) m: StateId,
    pub(crate) v: StateId,
}

/// The network: its sizes and its states.
#[derive(Clone, Debug)]
pub(crate) struct Net {
    pub(crate) sizes: Sizes,
    pub(crate) params: Vec<Param>,
    states: Vec<State>,
    /// Samples in the data.
    n_samples: usize,
}

/// A step's graph with its inputs and outputs.
pub(crate) struct NetStep {
    pub(crate) graph: Graph,
    ids: InputId,             // [batch] I32; -1 for padding
    targets: Option<InputId>, // [batch] I32; -1 where there is no target
    scale: Option<InputId>,   // [1] F32
    adam: Option<InputId>,    // [ADAM_PARAMS] F32
    spans: InputId,           // [batch * n_sources, 2] I32
}

impl Net {
    pub(crate) fn new(sizes: Sizes, n_samples: usize) -> Net {
        let (width, ffn) = (sizes.width, sizes.ffn);
        let mut list: Vec<(String, Vec<usize>)> = vec![
            ("in".into(), vec![width, sizes.n_features]),
            ("source".into(), vec![sizes.n_sources, width]),
        ];
        for layer in 0..sizes.n_layers {
            list.push((format!("{layer}.attn_norm"), vec![width]));
            list.extend(["q", "k", "v", "o"].map(|name| (format!("{layer}.{name}"), vec![width, width])));
            list.push((format!("{layer}.ffn_norm"), vec![width]));
            list.push((format!("{layer}.up"), vec![ffn, width]));
            list.push((format!("{layer}.down"), vec![width, ffn]));
        }
        list.push(("norm".into(), vec![width]));
        list.push(("head".into(), vec![sizes.n_classes, width]));
        list.push(("head_bias".into(), vec![sizes.n_classes]));
        let mut states = vec![State::whole("count", TensorType::new(DType::I32, [1]))];
        let mut params = Vec::with_capacity(list.len());
        for (name, dims) in list {
            let mut add = |part: &str, dtype| {
                states.push(State::whole(format!("{name}{part}"), tensor_type(dtype, &dims)));
                StateId::from_idx(states.len() - 1)
            };
            let value = add("", sizes.dtype);
            let master = (sizes.dtype != DType::F32).then(|| add(".master", DType::F32));
            let (m, v) = (add(".m", DType::F32), add(".v", DType::F32));
            params.push(Param { name, dims, value, master, m, v });
        }
        Net { sizes, params, states, n_samples }
    }

    pub(crate) fn n_parameters(&self) -> usize {
        self.params.iter().map(|param| param.dims.iter().product::<usize>()).sum()
    }

    fn data_type(&self) -> TensorType {
        let Sizes { n_sources, n_features, dtype, .. } = self.sizes;
        TensorType::new(dtype, [self.n_samples, n_sources * n_features])
    }

    /// The graph of a step.
    pub(crate) fn step(&self, phase: Phase) -> Result<NetStep, GradError> {
        let Sizes { batch, n_sources, n_classes, .. } = self.sizes;
        let data = Weight { name: "data".into(), ty: self.data_type() };
        let mut b = GraphBuilder::new(vec![data], self.states.clone());
        let ids = b.input("ids", TensorType::new(DType::I32, [batch]))?;
        let spans = b.input("spans", TensorType::new(DType::I32, [batch * n_sources, 2]))?;
        let mut step = NetStep {
            ids: b.input_id(ids),
            spans: b.input_id(spans),
            targets: None,
            scale: None,
            adam: None,
            graph: GraphBuilder::new(vec![], vec![]).finish(),
        };
        let logits = self.logits(&mut b, ids, spans)?;
        if phase == Phase::Classify {
            let logits = b.cast(logits, DType::F32)?;
            b.output("logits", logits)?;
            return Ok(NetStep { graph: b.finish(), ..step });
        }
        let targets = b.input("targets", TensorType::new(DType::I32, [batch]))?;
        let scale = b.input("scale", TensorType::new(DType::F32, [1]))?;
        (step.targets, step.scale) = (Some(b.input_id(targets)), Some(b.input_id(scale)));
        debug_assert_eq!(b.ty(logits).shape.dims(), [batch, n_classes]);
        let entropy = Op::Train(TrainOp::CrossEntropy);
        let losses = b.node(entropy, &[logits, targets, scale], "cross_entropy")?[0];
        let row = b.reshape(losses, &[1, batch])?;
        let loss = b.node(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[row], "loss")?[0];
        b.output("loss", loss)?;
        let values: Vec<ValueId> = self.params.iter().map(|param| b.state(param.value)).collect();
        let gradients: Vec<ValueId> = b.gradients(losses, &values, &[])?.into_iter().flatten().collect();
        assert_eq!(gradients.len(), values.len(), "the loss depends on every parameter");
        if phase == Phase::Differentiate {
            for (param, gradient) in self.params.iter().zip(gradients) {
                let gradient = b.cast(gradient, DType::F32)?;
                b.output(&param.name, gradient)?;
            }
            return Ok(NetStep { graph: b.finish(), ..step });
        }
        let adam = b.input("adam", TensorType::new(DType::F32, [ADAM_PARAMS]))?;
        step.adam = Some(b.input_id(adam));
        let squares = b.node(Op::Train(TrainOp::SumSquares), &gradients, "sum_squares")?[0];
        b.output("sum_squares", squares)?;
        let mut inputs = vec![b.state(StateId::from_idx(0)), adam, squares];
        for (param, gradient) in self.params.iter().zip(gradients) {
            inputs.extend([gradient, b.state(param.value)]);
            inputs.extend(param.master.map(|master| b.state(master)));
            inputs.extend([b.state(param.m), b.state(param.v)]);
        }
        let decays = self.params.iter().map(|param| param.dims.len() > 1).collect();
        let masters = self.sizes.dtype != DType::F32;
        b.node(Op::Train(TrainOp::AdamW(AdamW { decays, masters, clears: false })), &inputs, "adamw")?;
        Ok(NetStep { graph: b.finish(), ..step })
    }

    fn logits(&self, b: &mut GraphBuilder, ids: ValueId, spans: ValueId) -> Result<ValueId, GraphError> {
        let Sizes { batch, n_sources, n_features, width, n_heads, n_layers, dtype, .. } = self.sizes;
        let (n_rows, head_dim) = (batch * n_sources, width / n_heads);
        let param = |b: &GraphBuilder, name: &str| {
            let found = self.params.iter().find(|param| param.name == name);
            b.state(found.unwrap_or_else(|| panic!("no parameter {name}")).value)
        };
        let data = b.weight(WeightId::from_idx(0));
        let x = b.gather_rows(data, ids, dtype)?;
        let x = b.reshape(x, &[n_rows, n_features])?;
        let w = param(b, "in");
        let x = b.linear(x, w, None, "in")?;
        let x = b.reshape(x, &[batch, n_sources, width])?;
        let source = param(b, "source");
        let x = b.add(x, source)?;
        let mut x = b.reshape(x, &[n_rows, width])?;
        for layer in 0..n_layers {
            b.scope(layer.to_string());
            let of = |b: &GraphBuilder, name: &str| param(b, &format!("{layer}.{name}"));
            let norm = of(b, "attn_norm");
            let y = b.rms_norm(x, norm, EPS, "attn_norm")?;
            let mut heads = [y; 3];
            for (head, name) in heads.iter_mut().zip(["q", "k", "v"]) {
                let w = of(b, name);
                let rows = b.linear(y, w, None, name)?;
                *head = b.reshape(rows, &[n_rows, n_heads, head_dim])?;
            }
            let [q, k, v] = heads;
            let (q, k) = (unit(b, q, "q_length")?, unit(b, k, "k_length")?);
            let attention = SpanAttention { scale: SHARPNESS, causal: false, window: None, softcap: None };
            let y = b.node(Op::SpanAttention(attention), &[q, k, v, spans], "attention")?[0];
            let y = b.reshape(y, &[n_rows, width])?;
            let w = of(b, "o");
            let y = b.linear(y, w, None, "o")?;
            x = b.add(x, y)?;
            let norm = of(b, "ffn_norm");
            let y = b.rms_norm(x, norm, EPS, "ffn_norm")?;
            let w = of(b, "up");
            let y = b.linear(y, w, None, "up")?;
            let y = b.unary(Unary::GeluTanh, y)?;
            let w = of(b, "down");
            let y = b.linear(y, w, None, "down")?;
            x = b.add(x, y)?;
        }
        b.scope("");
        let x = b.reshape(x, &[batch, n_sources, width])?;
        let x = b.node(Op::Reduce { kind: Reduce::Mean, axis: 1 }, &[x], "pool")?[0];
        let x = b.reshape(x, &[batch, width])?;
        let norm = param(b, "norm");
        let x = b.rms_norm(x, norm, EPS, "norm")?;
        let (w, bias) = (param(b, "head"), param(b, "head_bias"));
        b.linear(x, w, Some(bias), "head")
    }
}

/// Rows of length 1: `x / sqrt(sum(x²) + eps)` over the last of three dimensions.
fn unit(b: &mut GraphBuilder, x: ValueId, label: &str) -> Result<ValueId, GraphError> {
    let squares = b.binary(Binary::Mul, x, x)?;
    let sum = b.node(Op::Reduce { kind: Reduce::Sum, axis: 2 }, &[squares], label)?[0];
    let sum = b.unary(Unary::Affine { mul: 1.0, add: EPS }, sum)?;
    let factor = b.unary(Unary::Rsqrt, sum)?;
    b.binary(Binary::Mul, x, factor)
}

fn tensor_type(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType { dtype, shape: Shape::new(dims).expect("a few dimensions") }
}

/// Numbers as bytes in F32 or BF16.
pub(crate) fn rounded(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype == DType::BF16 {
        true => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        false => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// A compiled step and its control block.
struct Compiled<B: Backend> {
    compiled: B::Compiled,
    control: ControlBlock,
    inputs: NetStep,
}

impl<B: Backend> Compiled<B> {
    fn new(backend: &B, net: &Net, phase: Phase) -> Result<Compiled<B>, Box<dyn std::error::Error>> {
        let inputs = net.step(phase)?;
        let mut graph = fuse(&inputs.graph)?;
        if backend.adds() {
            graph = join_sums(&graph)?;
        }
        let compiled = backend.compile(&graph)?;
        let mut control = ControlBlock::new(backend.plan(&compiled).control());
        let n = net.sizes.n_sources as i32;
        let spans: Vec<i32> = (0..net.sizes.batch as i32)
            .flat_map(|sample| [n * sample, n * (sample + 1)].repeat(n as usize))
            .collect();
        control.set_i32(inputs.spans, &spans)?;
        Ok(Compiled { compiled, control, inputs })
    }

    fn fill(&mut self, ids: &[i32], targets: &[i32]) -> Result<(), Box<dyn std::error::Error>> {
        self.control.set_i32(self.inputs.ids, ids)?;
        let n_targets = targets.iter().filter(|target| **target >= 0).count().max(1);
        if let (Some(at), Some(scale)) = (self.inputs.targets, self.inputs.scale) {
            self.control.set_i32(at, targets)?;
            self.control.set_f32(scale, &[1.0 / n_targets as f32])?;
        }
        Ok(())
    }
}

/// The network on a backend, with its data.
pub(crate) struct Classifier<B: Backend> {
    // Compiled steps are dropped before their backend.
    learn: Compiled<B>,
    classify: Compiled<B>,
    weights: B::Weights,
    states: B::States,
    pub(crate) backend: B,
    pub(crate) net: Net,
    queue: StepQueue,
}

/// Values of each parameter, by name.
type Named = Vec<(String, Vec<f32>)>;

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) loss: f32,
    pub(crate) grad_norm: f32,
    pub(crate) ran: refrain::graph::Ran,
}

impl<B: Backend> Classifier<B> {
    /// Uploads the data, with one row per id, and the initial values.
    pub(crate) fn new(
        backend: B,
        net: Net,
        data: &[f32],
        init: &dyn Fn(&Param) -> Vec<f32>,
    ) -> Result<Classifier<B>, Box<dyn std::error::Error>> {
        let ty = net.data_type();
        let data = HostTensor::new(ty.dtype, ty.shape, Bytes::new(rounded(data, ty.dtype)))?;
        let weights = backend.load(&[Weight { name: "data".into(), ty }], vec![data])?;
        let mut states = backend.allocate(&net.states)?;
        let learn = Compiled::new(&backend, &net, Phase::Learn)?;
        let classify = Compiled::new(&backend, &net, Phase::Classify)?;
        for param in &net.params {
            let values = init(param);
            backend.write_state(&mut states, param.value, &rounded(&values, net.sizes.dtype))?;
            if let Some(master) = param.master {
                backend.write_state(&mut states, master, &rounded(&values, DType::F32))?;
            }
        }
        Ok(Classifier { learn, classify, weights, states, backend, net, queue: StepQueue::new() })
    }

    /// Maximum number of steps in flight.
    pub(crate) fn depth(&self) -> usize {
        self.backend.queue_depth()
    }

    /// Queues a step after those in flight.
    pub(crate) fn queue(
        &mut self,
        ids: &[i32],
        targets: &[i32],
        adam: &AdamSettings,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.learn.fill(ids, targets)?;
        if let Some(at) = self.learn.inputs.adam {
            self.learn.control.set_f32(at, &adam.params())?;
        }
        let io = Io { weights: &self.weights, states: &mut self.states, control: self.learn.control.bytes() };
        Ok(self.backend.queue(&mut self.learn.compiled, io, &[0, 1], &mut self.queue)?)
    }

    /// Waits for the oldest step in flight.
    pub(crate) fn collect(&mut self) -> Result<Found, RunError> {
        let Collected { ran, outputs } = self.backend.collect(&mut self.queue)?;
        let number = |i: usize| outputs[i].first_chunk::<4>().map_or(f32::NAN, |b| f32::from_le_bytes(*b));
        Ok(Found { loss: number(0), grad_norm: number(1).sqrt(), ran })
    }

    /// The class of each sample of a batch.
    pub(crate) fn classes(&mut self, ids: &[i32]) -> Result<Vec<usize>, Box<dyn std::error::Error>> {
        self.classify.fill(ids, &[])?;
        let control = self.classify.control.bytes();
        let io = Io { weights: &self.weights, states: &mut self.states, control };
        self.backend.run(&mut self.classify.compiled, io)?;
        let n = self.net.sizes.n_classes;
        let mut logits = vec![0f32; ids.len() * n];
        self.backend.read(&self.classify.compiled, 0, bytemuck::cast_slice_mut(&mut logits))?;
        let best = |row: &[f32]| (0..n).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0);
        Ok(logits.chunks_exact(n).map(best).collect())
    }

    /// The gradient of every parameter, by name.
    #[allow(dead_code, reason = "for the test that compares them with PyTorch's")]
    pub(crate) fn gradients(
        &mut self,
        ids: &[i32],
        targets: &[i32],
    ) -> Result<Named, Box<dyn std::error::Error>> {
        let mut step = Compiled::new(&self.backend, &self.net, Phase::Differentiate)?;
        step.fill(ids, targets)?;
        let io = Io { weights: &self.weights, states: &mut self.states, control: step.control.bytes() };
        self.backend.run(&mut step.compiled, io)?;
        let mut found = Vec::new();
        for (i, param) in self.net.params.iter().enumerate() {
            let mut gradient = vec![0f32; param.dims.iter().product()];
            self.backend.read(&step.compiled, i + 1, bytemuck::cast_slice_mut(&mut gradient))?;
            found.push((param.name.clone(), gradient));
        }
        Ok(found)
    }

    /// The current value of every parameter, by name.
    #[allow(dead_code, reason = "for the test that compares them with PyTorch's")]
    pub(crate) fn values(&self) -> Result<Named, Box<dyn std::error::Error>> {
        let mut found = Vec::new();
        for param in &self.net.params {
            let id = param.master.unwrap_or(param.value);
            let ty = self.net.states[id.idx()].ty;
            let mut bytes = vec![0; ty.dtype.bytes_for(ty.shape.n_elements()).unwrap_or(0)];
            self.backend.read_state(&self.states, id, &mut bytes)?;
            let mut values = vec![0.0; ty.shape.n_elements()];
            quant::dequantize(ty.dtype, &bytes, &mut values)?;
            found.push((param.name.clone(), values));
        }
        Ok(found)
    }
}
