//! Random graphs for property tests of passes, plans and backends.

use crate::cases::half_plus_one;
use crate::eval::Feed;
use crate::fill::{Fill, tensor};
use refrain_graph::{
    Attention, Binary, Gate, Graph, GraphBuilder, GraphError, LoraOp, Op, Reduce, Rope, RopeStyle, State,
    StateId, TensorType, Unary, ValueId, View, Weight, WeightId,
};
use refrain_tensor::{DType, Layout, Shape};
use std::collections::HashMap;

/// Seed of one node: its kind, and three numbers that select operands and sizes.
pub type NodeSeed = [u16; 4];

/// A graph with its inputs.
#[derive(Clone, Debug)]
pub struct RandomGraph {
    /// The graph.
    pub graph: Graph,
    /// Weights, inputs and states, none of them zero.
    pub feed: Feed,
}

/// Builds the graph of a list of node seeds. Every list is valid: a seed without matching operands is
/// skipped. Host calls are only drawn if `with_host`.
///
/// Values stay within about a thousand, and views that would need a copy get one.
///
/// # Panics
/// If a rule of the IR refuses a node that this function considers valid.
pub fn random_graph(choices: &[NodeSeed], with_host: bool) -> RandomGraph {
    let mut draft = Draft::new();
    for choice in choices {
        if let Err(e) = draft.add(*choice, with_host) {
            panic!("{choice:?}: {e}");
        }
    }
    draft.finish().unwrap_or_else(|e| panic!("{e}"))
}

const N_TOKENS: usize = 3;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const WIDTH: usize = N_KV_HEADS * HEAD_DIM;
const N_ADAPTERS: usize = 2;
const RANK: usize = 3;
const MAX_ELEMENTS: usize = 256;
const MAX_BOUND: f32 = 1000.0;

struct Draft {
    builder: GraphBuilder,
    feed: Feed,
    // Float values that nodes choose their operands from.
    pool: Vec<ValueId>,
    layouts: HashMap<ValueId, Layout>,
    // Upper bound on the magnitude of each value.
    bounds: HashMap<ValueId, f32>,
    control: [ValueId; 3], // positions, seqs, tables
    ids: ValueId,
    adapters: ValueId,
    n_outputs: usize,
}

impl Draft {
    fn new() -> Draft {
        let float = |dims: &[usize]| TensorType { dtype: DType::F32, shape: shape(dims) };
        let cache = float(&[6, N_KV_HEADS, 2, HEAD_DIM]);
        let weight = |name: &str, ty| Weight { name: name.into(), ty };
        let weights = vec![
            weight("square", float(&[WIDTH, WIDTH])),
            weight("row", float(&[WIDTH])),
            weight("inv_freq", float(&[HEAD_DIM / 2])),
            weight("quantised", TensorType::new(DType::Q8_0, [4, 32])),
            weight("factors", float(&[N_ADAPTERS, RANK, WIDTH])),
        ];
        let states: Vec<State> = ["k", "v"].map(|n| State::paged(n, cache)).into();
        let feed = Feed {
            weights: weights
                .iter()
                .zip(1..)
                .map(|(w, i)| tensor(w.ty, &Fill::Uniform(-1.0, 1.0), i))
                .collect(),
            states: states
                .iter()
                .zip(11..)
                .map(|(s, i)| tensor(s.ty, &Fill::Uniform(-1.0, 1.0), i))
                .collect(),
            inputs: vec![],
        };
        let builder = GraphBuilder::new(weights, states);
        let unset = ValueId::from_idx(0);
        let (layouts, bounds) = (HashMap::new(), HashMap::new());
        let mut draft = Draft {
            builder,
            feed,
            pool: vec![],
            layouts,
            bounds,
            control: [unset; 3],
            ids: unset,
            adapters: unset,
            n_outputs: 0,
        };
        let ints = |dims: &[usize], values: &[i32]| {
            (TensorType { dtype: DType::I32, shape: shape(dims) }, Fill::Ints(values.to_vec()))
        };
        draft.control = [
            draft.input("positions", ints(&[N_TOKENS], &[4, -1, 2])),
            draft.input("seqs", ints(&[N_TOKENS], &[1, 0, 0])),
            draft.input("tables", ints(&[2, 3], &[3, 0, -1, 5, 1, 2])),
        ];
        draft.ids = draft.input("ids", ints(&[N_TOKENS], &[1, -1, 0]));
        let x = draft.input("x", (float(&[N_TOKENS, WIDTH]), Fill::Uniform(-1.0, 1.0)));
        let y = draft.input("y", (float(&[WIDTH]), Fill::Uniform(-1.0, 1.0)));
        draft.adapters = draft.input("adapters", ints(&[2], &[1, -1]));
        // Heads exist from the start, so that appends and attention are as frequent as other ops.
        let shape = [N_TOKENS, N_KV_HEADS, HEAD_DIM];
        let heads = draft.builder.reshape(x, &shape).unwrap_or_else(|e| panic!("{e}"));
        for value in [x, y, heads] {
            draft.keep(value, 1.0);
        }
        for w in 0..2 {
            let value = draft.builder.weight(WeightId::from_idx(w));
            draft.keep(value, 1.0);
        }
        draft
    }

    fn input(&mut self, name: &str, (ty, fill): (TensorType, Fill)) -> ValueId {
        self.feed.inputs.push(tensor(ty, &fill, 21 + self.feed.inputs.len() as u64));
        self.builder.input(name, ty).unwrap_or_else(|e| panic!("{e}"))
    }

    fn keep(&mut self, value: ValueId, bound: f32) {
        self.bounds.insert(value, bound);
        self.pool.push(value);
    }

    fn ty(&self, value: ValueId) -> TensorType {
        self.builder.ty(value)
    }

    fn dims(&self, value: ValueId) -> Vec<usize> {
        self.ty(value).shape.dims().to_vec()
    }

    /// Picks a matching value of the pool, preferring later ones.
    fn pick(&self, n: u16, fits: impl Fn(&Draft, ValueId) -> bool) -> Option<ValueId> {
        let fitting: Vec<ValueId> = self.pool.iter().copied().filter(|&v| fits(self, v)).collect();
        let n = n as usize;
        let recent = fitting.len().saturating_sub(4);
        let (from, len) =
            if n.is_multiple_of(4) { (0, fitting.len()) } else { (recent, fitting.len() - recent) };
        (len > 0).then(|| fitting[from + n / 4 % len])
    }

    fn add(&mut self, [kind, a, b, c]: NodeSeed, with_host: bool) -> Result<(), GraphError> {
        match kind % 24 {
            0..=2 => self.unary(a, b),
            3..=6 => self.binary(a, b, c),
            7..=10 => self.view(a, b, c),
            11 => self.rows(a, b),
            12..=14 => self.norm(a, b, c),
            15 => self.gate(a, b),
            16 if b % 4 == 1 => self.products(a, b),
            16 if b % 4 == 3 => self.adapter(a, b),
            16 => self.matmul(a, b),
            17 => self.move_rows(a, b),
            18 => self.rope(a, b),
            19 => self.append(a, b),
            20 => self.attention(a, b),
            21 => self.chain(a, b, c),
            22 if with_host => self.host(a),
            _ => self.output(a),
        }
    }

    fn node(&mut self, op: Op, inputs: &[ValueId], bound: f32) -> Result<(), GraphError> {
        for value in self.builder.node(op.clone(), inputs, op.name())? {
            self.keep(value, bound);
        }
        Ok(())
    }

    fn bound(&self, value: ValueId) -> f32 {
        self.bounds.get(&value).copied().unwrap_or(1.0)
    }

    fn unary(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        let grown = self.bound(x);
        let (f, bound) = match b % 7 {
            0 => (Unary::Neg, grown),
            1 => (Unary::Sigmoid, 1.0),
            2 => (Unary::Silu, grown),
            3 => (Unary::GeluTanh, grown),
            4 => (Unary::GeluErf, grown),
            5 => (Unary::Affine { mul: 0.5, add: 0.25 }, grown / 2.0 + 0.25),
            _ => (Unary::Tanh, 1.0),
        };
        self.node(Op::Unary(f), &[x], bound)
    }

    fn binary(&mut self, a: u16, b: u16, c: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        let fits = |d: &Draft, v: ValueId| {
            let both = d.ty(x).shape.broadcast(&d.ty(v).shape);
            d.ty(x).dtype == d.ty(v).dtype && both.is_some_and(|s| s.n_elements() <= MAX_ELEMENTS)
        };
        let Some(y) = self.pick(b, fits) else { return Ok(()) };
        let (p, q) = (self.bound(x), self.bound(y));
        let (f, bound) = match c % 4 {
            0 => (Binary::Add, p + q),
            1 => (Binary::Sub, p + q),
            2 => (Binary::Max, p.max(q)),
            _ => (Binary::Mul, p * q),
        };
        if bound > MAX_BOUND {
            return self.node(Op::Unary(Unary::Tanh), &[x], 1.0);
        }
        let inputs = if c % 8 < 4 { [x, y] } else { [y, x] };
        self.node(Op::Binary(f), &inputs, bound)
    }

    fn view(&mut self, a: u16, b: u16, c: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        let (dims, c) = (self.dims(x), c as usize);
        let n: usize = dims.iter().product();
        let view = match b % 5 {
            0 => match n.is_multiple_of(WIDTH) {
                true if c % 2 == 0 => View::Reshape(shape(&[n / WIDTH, N_KV_HEADS, HEAD_DIM])),
                true => View::Reshape(shape(&[n / WIDTH, WIDTH])),
                false => View::Reshape(shape(&[n])),
            },
            1 if dims.len() > 1 => {
                let mut order: Vec<usize> = (0..dims.len()).collect();
                order.rotate_left(1 + c % (dims.len() - 1));
                View::Permute(order)
            }
            2 if n * 2 <= MAX_ELEMENTS && dims.len() < 4 => {
                View::Broadcast(shape(&[&[2], dims.as_slice()].concat()))
            }
            _ if !dims.is_empty() => {
                let axis = c % dims.len();
                let start = c / 4 % dims[axis];
                View::Slice { axis, start, len: 1 + c / 32 % (dims[axis] - start) }
            }
            _ => View::Reshape(shape(&[1])),
        };
        let bound = self.bound(x);
        let (mut x, mut from) = (x, self.layout(x));
        let layout = match view.apply(&from) {
            Ok(layout) => layout,
            Err(_) => {
                x = self.builder.copy(x)?;
                from = self.layout(x);
                view.apply(&from).map_err(|source| GraphError::Shape { label: "view".into(), source })?
            }
        };
        let value = self.builder.node(Op::View(view), &[x], "view")?[0];
        self.layouts.insert(value, layout);
        self.keep(value, bound);
        Ok(())
    }

    fn layout(&self, value: ValueId) -> Layout {
        self.layouts.get(&value).copied().unwrap_or_else(|| Layout::contiguous(self.ty(value).shape))
    }

    fn rows(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |d, v| !d.dims(v).is_empty()) else { return Ok(()) };
        let bound = self.bound(x);
        let last = self.dims(x).len() - 1;
        match b % 4 {
            0 => self.node(Op::Reduce { kind: Reduce::Mean, axis: last }, &[x], bound),
            1 => self.node(Op::Reduce { kind: Reduce::Max, axis: last }, &[x], bound),
            _ => self.node(Op::Softmax, &[x], 1.0),
        }
    }

    fn norm(&mut self, a: u16, b: u16, c: u16) -> Result<(), GraphError> {
        let has_weight = |d: &Draft, v: ValueId| d.dims(v).last() == Some(&WIDTH);
        let Some(x) = self.pick(a, has_weight) else { return Ok(()) };
        let is_row = |d: &Draft, v: ValueId| d.dims(v) == [WIDTH];
        let Some(w) = self.pick(c, is_row) else { return Ok(()) };
        // A large eps keeps the norm from amplifying the noise of a cancelled sum.
        let eps = 0.1;
        let norm_bound = self.bound(w) * (WIDTH as f32).sqrt();
        if b.is_multiple_of(3) {
            return self.node(Op::RmsNorm { eps }, &[x, w], norm_bound);
        }
        let Some(y) = self.pick(b, |d, v| d.ty(v) == d.ty(x)) else { return Ok(()) };
        let bound = self.bound(x) + self.bound(y);
        if bound.max(norm_bound) > MAX_BOUND {
            return Ok(());
        }
        if b % 3 == 1 {
            return self.node(Op::AddRmsNorm { eps }, &[x, y, w], bound.max(norm_bound));
        }
        let sum = self.builder.add(x, y)?;
        self.keep(sum, bound);
        self.node(Op::RmsNorm { eps }, &[sum, w], norm_bound)
    }

    fn gate(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        let Some(y) = self.pick(b, |d, v| d.ty(v) == d.ty(x)) else { return Ok(()) };
        let bound = self.bound(x) * self.bound(y);
        if bound > MAX_BOUND {
            return Ok(());
        }
        let (gate, unary) = match b % 2 {
            0 => (Gate::Silu, Unary::Silu),
            _ => (Gate::GeluTanh, Unary::GeluTanh),
        };
        if b.is_multiple_of(3) {
            return self.node(Op::Gate(gate), &[x, y], bound);
        }
        // Two separate nodes, for the pass that fuses them.
        let act = self.builder.unary(unary, x)?;
        if b.is_multiple_of(5) {
            let bound = self.bound(x);
            self.keep(act, bound);
        }
        self.node(Op::Binary(Binary::Mul), &[act, y], bound)
    }

    fn matmul(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |d, v| d.dims(v).len() >= 2) else { return Ok(()) };
        let k = self.ty(x).shape.dim_back(0);
        let fits = |d: &Draft, v: ValueId| {
            d.dims(v).len() == 2
                && d.dims(v)[0] == k
                && d.ty(x).shape.n_elements() / k * d.dims(v)[1] <= MAX_ELEMENTS
        };
        if k == 32 && b.is_multiple_of(2) {
            let w = self.builder.weight(WeightId::from_idx(3));
            let product = self.builder.linear(x, w, None, "quantised")?;
            let bound = self.bound(x) * 32.0;
            self.keep(product, bound);
            return self.node(Op::Unary(Unary::Tanh), &[product], 1.0);
        }
        let Some(y) = self.pick(b, fits) else { return Ok(()) };
        let bound = self.bound(x) * self.bound(y) * k as f32;
        if bound > MAX_BOUND {
            return self.node(Op::Unary(Unary::Tanh), &[x], 1.0);
        }
        self.node(Op::MatMul, &[x, y], bound)
    }

    /// Products that share rows, as in models: after a norm or not, with biases or not, joined by a gate or
    /// not.
    fn products(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let fits = |d: &Draft, v: ValueId| {
            d.ty(v).dtype == DType::F32
                && matches!(d.dims(v).as_slice(), [n, WIDTH] if n * WIDTH <= MAX_ELEMENTS)
        };
        let Some(x) = self.pick(a, fits) else { return Ok(()) };
        let [square, row] = [0, 1].map(|w| self.builder.weight(WeightId::from_idx(w)));
        let (rows, bound) = match b % 8 < 4 {
            true => (self.builder.rms_norm(x, row, 0.1, "rows")?, (WIDTH as f32).sqrt()),
            false => (x, self.bound(x)),
        };
        if bound * WIDTH as f32 > MAX_BOUND.sqrt() {
            return self.node(Op::Unary(Unary::Tanh), &[rows], 1.0);
        }
        let (bias, bound) = ((b % 16 < 8).then_some(row), bound * WIDTH as f32 + 1.0);
        let left = self.builder.linear(rows, square, bias, "left")?;
        let right = self.builder.linear(rows, square, bias, "right")?;
        if b.is_multiple_of(3) {
            return self.node(Op::Gate(Gate::Silu), &[right, left], bound * bound);
        }
        self.keep(left, bound);
        self.keep(right, bound);
        Ok(())
    }

    fn move_rows(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        let bound = self.bound(x);
        match b % 3 {
            0 => self.node(Op::Copy, &[x], bound),
            1 => {
                let to = if self.ty(x).dtype == DType::F32 { DType::BF16 } else { DType::F32 };
                self.node(Op::Cast(to), &[x], bound * 1.01)
            }
            _ => {
                let is_table = |d: &Draft, v: ValueId| d.dims(v).len() == 2 && d.dims(v)[0] >= 2;
                let Some(table) = self.pick(a, is_table) else { return Ok(()) };
                let bound = self.bound(table);
                self.node(Op::GatherRows(DType::F32), &[table, self.ids], bound * 1.01)
            }
        }
    }

    fn adapter(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let fits = |d: &Draft, v: ValueId| {
            d.dims(v) == [N_TOKENS, WIDTH] && d.ty(v).dtype == DType::F32 && d.layout(v).is_contiguous()
        };
        let (Some(x), Some(y)) = (self.pick(a, fits), self.pick(b, fits)) else { return Ok(()) };
        let t_bound = self.bound(x) * WIDTH as f32;
        let bound = self.bound(y) + t_bound * RANK as f32;
        if bound > MAX_BOUND {
            return Ok(());
        }
        let factors = self.builder.weight(WeightId::from_idx(4));
        let rows = [factors, self.control[1], self.adapters];
        let down = [&[x][..], &rows].concat();
        let t = self.builder.node(Op::Lora(LoraOp::Down), &down, "lora_down")?[0];
        self.node(Op::Lora(LoraOp::Up), &[&[y, t][..], &rows].concat(), bound)
    }

    fn rope(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |d, v| is_heads(&d.dims(v))) else { return Ok(()) };
        let style = if b.is_multiple_of(2) { RopeStyle::Neox } else { RopeStyle::Interleaved };
        let rope = Rope { style, n_dims: HEAD_DIM, magnitude: 1.0 };
        let inv_freq = self.builder.weight(WeightId::from_idx(2));
        let bound = self.bound(x) * 1.5;
        if bound > MAX_BOUND {
            return Ok(());
        }
        self.node(Op::Rope(rope), &[x, self.control[0], inv_freq], bound)
    }

    fn append(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let fits = |d: &Draft, v: ValueId| d.dims(v) == [N_TOKENS, N_KV_HEADS, HEAD_DIM] && d.bound(v) < 30.0;
        let Some(x) = self.pick(a, fits) else { return Ok(()) };
        let state = self.builder.state(StateId::from_idx(usize::from(b % 2)));
        self.builder.kv_append(state, x, self.control)?;
        Ok(())
    }

    fn attention(&mut self, a: u16, b: u16) -> Result<(), GraphError> {
        let fits = |d: &Draft, v: ValueId| is_heads(&d.dims(v)) && d.dims(v)[1].is_multiple_of(N_KV_HEADS);
        let Some(q) = self.pick(a, fits) else { return Ok(()) };
        let caches = [0, 1].map(|i| self.builder.state(StateId::from_idx(i)));
        let window = if b.is_multiple_of(2) { None } else { Some(2) };
        let attention = Attention { scale: 0.5, window, softcap: None };
        let value = self.builder.attention(attention, q, caches, self.control)?;
        self.keep(value, 30.0);
        Ok(())
    }

    /// RoPE of queries and keys, KV append and attention, as in models.
    fn chain(&mut self, a: u16, b: u16, c: u16) -> Result<(), GraphError> {
        let fits = |d: &Draft, v: ValueId| {
            let is_heads = d.dims(v) == [N_TOKENS, N_KV_HEADS, HEAD_DIM];
            is_heads && d.ty(v).dtype == DType::F32 && d.bound(v) < 15.0
        };
        let picked = [a, b, c].map(|n| self.pick(n, fits));
        let [Some(q), Some(k), Some(v)] = picked else { return Ok(()) };
        let rope = Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 };
        let inv_freq = self.builder.weight(WeightId::from_idx(2));
        let bound = self.bound(q) * 1.5;
        let q = self.builder.rope(rope, q, self.control[0], inv_freq)?;
        let k = self.builder.rope(rope, k, self.control[0], inv_freq)?;
        if b.is_multiple_of(3) {
            self.keep(q, bound);
        }
        let mut append = |i: usize, x: ValueId| {
            let cache = self.builder.state(StateId::from_idx(i));
            self.builder.kv_append(cache, x, self.control)
        };
        let caches = [append(0, k)?, append(1, v)?];
        let attention = Attention { scale: 0.5, window: None, softcap: None };
        let value = self.builder.attention(attention, q, caches, self.control)?;
        self.keep(value, 30.0);
        Ok(())
    }

    fn host(&mut self, a: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |d, v| d.ty(v).dtype == DType::F32) else { return Ok(()) };
        let bound = self.bound(x) / 2.0 + 1.0;
        self.node(Op::HostCall(half_plus_one()), &[x], bound)
    }

    fn output(&mut self, a: u16) -> Result<(), GraphError> {
        let Some(x) = self.pick(a, |_, _| true) else { return Ok(()) };
        self.n_outputs += 1;
        self.builder.output(&format!("out{}", self.n_outputs), x)
    }

    fn finish(mut self) -> Result<RandomGraph, GraphError> {
        if let Some(&last) = self.pool.last() {
            self.builder.output("last", last)?;
        }
        for (i, name) in ["k", "v"].into_iter().enumerate() {
            let state = self.builder.state(StateId::from_idx(i));
            self.builder.output(name, state)?;
        }
        Ok(RandomGraph { graph: self.builder.finish(), feed: self.feed })
    }
}

fn is_heads(dims: &[usize]) -> bool {
    matches!(dims, [N_TOKENS, n_heads, HEAD_DIM] if *n_heads > 0)
}

fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap_or_else(|e| panic!("{e}"))
}
