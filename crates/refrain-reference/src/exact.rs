//! Ops in double precision.
//!
//! These define ops without rounding of inputs and outputs. Gradients are checked here against finite
//! differences. Ops that only training uses are computed here and rounded once.

use crate::dense::{In, Out, ReferenceError};
use crate::elementwise::apply;
use crate::philox::philox4x32;
use refrain_graph::{
    Binary, Compare, Dropout, Gate, Op, Reduce, Rope, RopeStyle, SpanAttention, TrainOp, Unary, View,
};
use refrain_tensor::{DType, Layout, Shape};

/// A contiguous array of numbers. It holds integers too: an f64 represents 32-bit integers exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct F64Array {
    /// Dimensions.
    pub shape: Shape,
    /// Elements in row-major order.
    pub values: Vec<f64>,
}

impl F64Array {
    /// Creates an array.
    ///
    /// # Panics
    /// If the number of values differs from the number of elements.
    pub fn new(shape: Shape, values: Vec<f64>) -> F64Array {
        assert_eq!(shape.n_elements(), values.len(), "values of an array {shape}");
        F64Array { shape, values }
    }

    fn of(input: &In<'_>) -> Result<F64Array, ReferenceError> {
        let values = if input.dtype == DType::I32 {
            input.to_i32()?.into_iter().map(f64::from).collect()
        } else if input.dtype == DType::U32 {
            input.to_u32()?.into_iter().map(f64::from).collect()
        } else {
            input.to_f32()?.into_iter().map(f64::from).collect()
        };
        Ok(F64Array { shape: input.layout.shape(), values })
    }

    fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    fn map(&self, f: impl Fn(f64) -> f64) -> F64Array {
        F64Array { shape: self.shape, values: self.values.iter().map(|&v| f(v)).collect() }
    }

    fn zip(&self, other: &F64Array, f: impl Fn(f64, f64) -> f64) -> F64Array {
        let values = self.values.iter().zip(&other.values).map(|(&a, &b)| f(a, b)).collect();
        F64Array { shape: self.shape, values }
    }

    /// The elements that a layout over this array selects.
    fn seen(&self, layout: &Layout) -> F64Array {
        F64Array { shape: layout.shape(), values: layout.indices().map(|i| self.values[i]).collect() }
    }

    fn broadcast(&self, shape: Shape) -> Result<F64Array, ReferenceError> {
        Ok(self.seen(&Layout::contiguous(self.shape).broadcast_to(shape)?))
    }

    fn rows(&self) -> std::slice::ChunksExact<'_, f64> {
        self.values.chunks_exact(self.shape.dim_back(0).max(1))
    }
}

/// Runs an op through double precision.
pub(crate) fn run(op: &Op, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    let inputs = inputs.iter().map(F64Array::of).collect::<Result<Vec<_>, _>>()?;
    for (made, out) in evaluate(op, &inputs)?.iter().zip(outputs) {
        if out.ty.dtype == DType::I32 {
            let words = made.values.iter().flat_map(|&v| (v as i32).to_le_bytes());
            out.bytes.iter_mut().zip(words).for_each(|(to, byte)| *to = byte);
        } else {
            out.store(&made.values.iter().map(|&v| v as f32).collect::<Vec<_>>())?;
        }
    }
    Ok(())
}

/// Evaluates an op in double precision. Ops with a paged cache, sampling, expert routing, host calls and the
/// optimiser have no such definition.
pub fn evaluate(op: &Op, inputs: &[F64Array]) -> Result<Vec<F64Array>, ReferenceError> {
    let one = |array| Ok(vec![array]);
    match op {
        Op::View(view) => one(self::view(view, &inputs[0])?),
        Op::Copy => one(inputs[0].clone()),
        // Truncation to an integer is the only cast that changes a number here.
        Op::Cast(DType::I32) => one(inputs[0].map(f64::trunc)),
        Op::Cast(_) => one(inputs[0].clone()),
        Op::Unary(f) => one(inputs[0].map(|x| apply(*f, x))),
        Op::Binary(f) => one(binary(*f, &inputs[0], &inputs[1])?),
        Op::Reduce { kind, axis } => one(reduce(*kind, *axis, &inputs[0])?),
        Op::Compare(kind) => {
            let holds = |a: f64, b: f64| match kind {
                Compare::Equal => a == b,
                Compare::Less => a < b,
            };
            let (a, b) = both(&inputs[0], &inputs[1])?;
            one(a.zip(&b, |a, b| if holds(a, b) { 1.0 } else { 0.0 }))
        }
        Op::Select => {
            let (a, b) = both(&inputs[1], &inputs[2])?;
            let (mask, a) = both(&inputs[0], &a)?;
            let b = b.broadcast(a.shape)?;
            let chosen = mask.values.iter().zip(a.values.iter().zip(&b.values));
            let values = chosen.map(|(&m, (&a, &b))| if m == 0.0 { b } else { a }).collect();
            one(F64Array { shape: a.shape, values })
        }
        Op::Pick => {
            let rows = inputs[0].rows().zip(&inputs[1].values);
            let picked = rows.map(|(row, &id)| Ok(column(id, row.len())?.map_or(0.0, |id| row[id])));
            let values = picked.collect::<Result<Vec<f64>, ReferenceError>>()?;
            one(F64Array { shape: Shape::new(&[values.len(), 1])?, values })
        }
        Op::PlaceColumns { width } => {
            let mut values = vec![0.0; inputs[0].values.len() * width];
            for (row, (&id, &x)) in inputs[0].values.iter().zip(&inputs[1].values).enumerate() {
                if let Some(id) = column(id, *width)? {
                    values[row * width + id] = x;
                }
            }
            one(F64Array { shape: Shape::new(&[inputs[0].values.len(), *width])?, values })
        }
        Op::Pad { axis, before, after } => one(pad(&inputs[0], *axis, *before, *after)?),
        Op::Softmax => one(softmax(&inputs[0])),
        Op::MatMul => one(matmul(&inputs[0], &inputs[1])?),
        Op::GatherRows(_) => {
            let (table, d) = (&inputs[0], inputs[0].dims()[1]);
            let mut values = Vec::with_capacity(inputs[1].values.len() * d);
            for &id in &inputs[1].values {
                match column(id, table.dims()[0])? {
                    Some(row) => values.extend_from_slice(&table.values[row * d..][..d]),
                    None => values.extend(std::iter::repeat_n(0.0, d)),
                }
            }
            one(F64Array { shape: Shape::new(&[inputs[1].values.len(), d])?, values })
        }
        Op::ScatterAddRows { n_rows } => {
            let d = inputs[1].dims()[1];
            let mut values = vec![0.0; n_rows * d];
            for (&id, x) in inputs[0].values.iter().zip(inputs[1].rows()) {
                if let Some(row) = column(id, *n_rows)? {
                    values[row * d..][..d].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                }
            }
            one(F64Array { shape: Shape::new(&[*n_rows, d])?, values })
        }
        Op::RmsNorm { eps } => one(rms_norm(&inputs[0], &inputs[1], *eps)),
        Op::AddRmsNorm { eps } => {
            let sum = inputs[0].zip(&inputs[1], |a, b| a + b);
            let normed = rms_norm(&sum, &inputs[2], *eps);
            Ok(vec![sum, normed])
        }
        Op::Gate(kind) => one(inputs[0].zip(&inputs[1], |g, u| apply(activation(*kind), g) * u)),
        Op::Rope(rope) => one(turn(rope, inputs, 1.0)),
        Op::SpanAttention(attention) => span_attention(attention, inputs),
        Op::Train(TrainOp::UnaryGrad(f)) => one(inputs[0].zip(&inputs[1], |dy, x| dy * derivative(*f, x))),
        Op::Train(TrainOp::GateGrad(kind)) => {
            let [dy, gate, up] = [&inputs[0], &inputs[1], &inputs[2]];
            let f = activation(*kind);
            let d_up = dy.zip(gate, |dy, g| dy * apply(f, g));
            let d_gate = dy.zip(up, |dy, u| dy * u).zip(gate, |dy, g| dy * derivative(f, g));
            Ok(vec![d_gate, d_up])
        }
        Op::Train(TrainOp::SoftmaxGrad) => {
            let [dy, y] = [&inputs[0], &inputs[1]];
            let rows = dy.rows().zip(y.rows()).flat_map(|(dy, y)| {
                let dot: f64 = dy.iter().zip(y).map(|(dy, y)| dy * y).sum();
                dy.iter().zip(y).map(move |(dy, y)| y * (dy - dot))
            });
            one(F64Array { shape: y.shape, values: rows.collect() })
        }
        Op::Train(TrainOp::AddProduct) => {
            let product = matmul(&inputs[1], &inputs[2])?;
            one(product.zip(&inputs[0], |product, c| product + c))
        }
        Op::Train(TrainOp::RmsNormGrad { eps, adds }) => {
            let [dy, x, w] = [&inputs[0], &inputs[1], &inputs[2]];
            let d = w.values.len();
            let mut dx = Vec::with_capacity(x.values.len());
            let mut dw = vec![0.0; d];
            for (dy, x) in dy.rows().zip(x.rows()) {
                let r = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / d as f64 + f64::from(*eps)).sqrt();
                let dot: f64 = (0..d).map(|i| dy[i] * w.values[i] * x[i]).sum();
                dx.extend((0..d).map(|i| r * (dy[i] * w.values[i] - x[i] * r * r * dot / d as f64)));
                (0..d).for_each(|i| dw[i] += dy[i] * x[i] * r);
            }
            if *adds {
                dx.iter_mut().zip(&inputs[3].values).for_each(|(dx, more)| *dx += more);
            }
            Ok(vec![F64Array { shape: x.shape, values: dx }, F64Array { shape: w.shape, values: dw }])
        }
        Op::Train(TrainOp::RopeGrad(rope)) => one(turn(rope, inputs, -1.0)),
        Op::Train(TrainOp::SpanAttentionGrad(attention)) => span_attention_grad(attention, inputs),
        Op::Train(TrainOp::CrossEntropy) => cross_entropy(inputs),
        Op::Train(TrainOp::Dropout(dropout)) => {
            let keep = |(i, &x): (usize, &f64)| match keeps(dropout, &inputs[1].values, i) {
                true => x / (1.0 - f64::from(dropout.p)),
                false => 0.0,
            };
            let values = inputs[0].values.iter().enumerate().map(keep).collect();
            one(F64Array { shape: inputs[0].shape, values })
        }
        Op::Train(TrainOp::SumSquares) => {
            let sum = inputs.iter().flat_map(|x| &x.values).map(|v| v * v).sum();
            one(F64Array { shape: Shape::from([1]), values: vec![sum] })
        }
        Op::KvAppend
        | Op::KvAppendBytes
        | Op::Attention(_)
        | Op::Recurrent(_)
        | Op::Sample(_)
        | Op::Accumulate
        | Op::Moe(_)
        | Op::Lora(_)
        | Op::Train(TrainOp::AdamW(_))
        | Op::HostCall(_) => Err(ReferenceError::Unsupported {
            op: op.name(),
            because: "it has no definition in double precision".into(),
        }),
    }
}

/// Returns the entry that an id names; `None` for a negative one.
fn column(id: f64, limit: usize) -> Result<Option<usize>, ReferenceError> {
    match id {
        id if id < 0.0 => Ok(None),
        id if id < limit as f64 => Ok(Some(id as usize)),
        id => Err(ReferenceError::OutOfRange { index: "row", got: id as i64, limit }),
    }
}

fn view(view: &View, x: &F64Array) -> Result<F64Array, ReferenceError> {
    Ok(x.seen(&view.apply(&Layout::contiguous(x.shape))?))
}

fn both(a: &F64Array, b: &F64Array) -> Result<(F64Array, F64Array), ReferenceError> {
    let shape = a.shape.broadcast(&b.shape).unwrap_or(a.shape);
    Ok((a.broadcast(shape)?, b.broadcast(shape)?))
}

fn binary(f: Binary, a: &F64Array, b: &F64Array) -> Result<F64Array, ReferenceError> {
    let (a, b) = both(a, b)?;
    Ok(a.zip(&b, |a, b| match f {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => a.max(b),
    }))
}

fn reduce(kind: Reduce, axis: usize, x: &F64Array) -> Result<F64Array, ReferenceError> {
    let dims = x.dims();
    let (n, inner) = (dims[axis], dims[axis + 1..].iter().product::<usize>());
    let mut shape = dims.to_vec();
    shape[axis] = 1;
    let shape = Shape::new(&shape)?;
    let one = |i: usize| {
        let (outer, inner_i) = (i / inner.max(1), i % inner.max(1));
        let column = (0..n).map(|j| x.values[(outer * n + j) * inner + inner_i]);
        match kind {
            Reduce::Sum => column.sum(),
            Reduce::Mean => column.sum::<f64>() / n as f64,
            Reduce::Max => column.fold(f64::NEG_INFINITY, f64::max),
        }
    };
    Ok(F64Array { shape, values: (0..shape.n_elements()).map(one).collect() })
}

fn pad(x: &F64Array, axis: usize, before: usize, after: usize) -> Result<F64Array, ReferenceError> {
    let dims = x.dims();
    let mut shape = dims.to_vec();
    shape[axis] += before + after;
    let inner: usize = dims[axis + 1..].iter().product();
    let outer: usize = dims[..axis].iter().product();
    let mut values = Vec::with_capacity(outer * shape[axis] * inner);
    for i in 0..outer {
        values.extend(std::iter::repeat_n(0.0, before * inner));
        values.extend_from_slice(&x.values[i * dims[axis] * inner..][..dims[axis] * inner]);
        values.extend(std::iter::repeat_n(0.0, after * inner));
    }
    Ok(F64Array { shape: Shape::new(&shape)?, values })
}

fn softmax(x: &F64Array) -> F64Array {
    let mut values = Vec::with_capacity(x.values.len());
    for row in x.rows() {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        values.extend(row.iter().map(|v| (v - max).exp() / sum));
    }
    F64Array { shape: x.shape, values }
}

fn matmul(a: &F64Array, b: &F64Array) -> Result<F64Array, ReferenceError> {
    let (m, k, n) = (a.shape.dim_back(1), a.shape.dim_back(0), b.shape.dim_back(0));
    let outer = |x: &F64Array| Shape::new(&x.dims()[..x.dims().len() - 2]);
    let batch = outer(a)?;
    let batch = batch.broadcast(&outer(b)?).unwrap_or(batch);
    let wide =
        |x: &F64Array, rows, columns| x.broadcast(Shape::new(&[batch.dims(), &[rows, columns]].concat())?);
    let (a, b) = (wide(a, m, k)?, wide(b, k, n)?);
    let mut values = Vec::with_capacity(batch.n_elements() * m * n);
    for i in 0..batch.n_elements() * m {
        let (row, b) = (&a.values[i * k..][..k], &b.values[i / m.max(1) * k * n..][..k * n]);
        values.extend((0..n).map(|j| row.iter().enumerate().map(|(l, x)| x * b[l * n + j]).sum::<f64>()));
    }
    Ok(F64Array { shape: Shape::new(&[batch.dims(), &[m, n]].concat())?, values })
}

fn rms_norm(x: &F64Array, w: &F64Array, eps: f32) -> F64Array {
    let d = w.values.len();
    let mut values = Vec::with_capacity(x.values.len());
    for row in x.rows() {
        let r = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / d as f64 + f64::from(eps)).sqrt();
        values.extend(row.iter().zip(&w.values).map(|(v, w)| v * r * w));
    }
    F64Array { shape: x.shape, values }
}

fn activation(kind: Gate) -> Unary {
    match kind {
        Gate::Silu => Unary::Silu,
        Gate::GeluTanh => Unary::GeluTanh,
    }
}

/// `f'(x)`.
fn derivative(f: Unary, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Neg => -1.0,
        Unary::Exp => x.exp(),
        Unary::Log => 1.0 / x,
        Unary::Rsqrt => -0.5 / (x * x.sqrt()),
        Unary::Tanh => 1.0 - x.tanh().powi(2),
        Unary::Sigmoid => sigmoid(x) * sigmoid(-x),
        Unary::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        Unary::GeluTanh => {
            // x * sigmoid(2 u) with u = c (x + 0.044715 x^3).
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let u2 = 2.0 * c * (x + 0.044715 * x * x * x);
            let slope = 2.0 * c * (1.0 + 3.0 * 0.044715 * x * x);
            sigmoid(u2) + x * sigmoid(u2) * sigmoid(-u2) * slope
        }
        Unary::GeluErf => {
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) + x * density
        }
        Unary::Affine { mul, .. } => f64::from(mul),
        Unary::SoftCap(cap) => 1.0 - (x / f64::from(cap)).tanh().powi(2),
    }
}

/// Rotates heads by their positions, forwards or backwards.
fn turn(rope: &Rope, inputs: &[F64Array], direction: f64) -> F64Array {
    let [x, positions, inv_freq] = [&inputs[0], &inputs[1], &inputs[2]];
    let (n_heads, head_dim) = (x.dims()[1], x.dims()[2]);
    let mut y = x.clone();
    for (head, values) in y.values.chunks_exact_mut(head_dim).enumerate() {
        let position = positions.values[head / n_heads];
        if position < 0.0 {
            continue;
        }
        for (i, freq) in inv_freq.values.iter().enumerate() {
            let (a, b) = match rope.style {
                RopeStyle::Neox => (i, i + rope.n_dims / 2),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (sin, cos) = (position * freq * direction).sin_cos();
            let magnitude = f64::from(rope.magnitude);
            let (u, v) = (values[a], values[b]);
            values[a] = (u * cos - v * sin) * magnitude;
            values[b] = (u * sin + v * cos) * magnitude;
        }
    }
    y
}

/// Operands of attention, indexed by row and head.
struct SpanHeads<'a> {
    attention: &'a SpanAttention,
    q: &'a F64Array,
    k: &'a F64Array,
    v: &'a F64Array,
    spans: &'a F64Array,
}

impl<'a> SpanHeads<'a> {
    fn new(attention: &'a SpanAttention, inputs: &'a [F64Array]) -> SpanHeads<'a> {
        SpanHeads { attention, q: &inputs[0], k: &inputs[1], v: &inputs[2], spans: &inputs[3] }
    }

    fn n_heads(&self) -> usize {
        self.q.dims()[1]
    }

    fn head_dim(&self) -> usize {
        self.q.dims()[2]
    }

    /// Returns the rows visible to a row.
    fn seen(&self, row: usize) -> Result<std::ops::Range<usize>, ReferenceError> {
        let n = self.q.dims()[0];
        let [first, end] = [self.spans.values[2 * row], self.spans.values[2 * row + 1]];
        if first == end {
            return Ok(0..0);
        }
        if first < 0.0 || end > n as f64 || first > row as f64 || end <= row as f64 {
            return Err(ReferenceError::OutOfRange { index: "span", got: end as i64, limit: n + 1 });
        }
        Ok(self.attention.seen(row, [first as usize, end as usize]))
    }

    fn query_at(&self, row: usize, head: usize) -> usize {
        (row * self.n_heads() + head) * self.head_dim()
    }

    fn key_at(&self, row: usize, head: usize) -> usize {
        let n_kv_heads = self.k.dims()[1];
        (row * n_kv_heads + head / (self.n_heads() / n_kv_heads)) * self.head_dim()
    }

    /// Returns the score of a key for a query, and its derivative with respect to the dot product.
    fn score(&self, row: usize, head: usize, key: usize) -> (f64, f64) {
        let d = self.head_dim();
        let q = &self.q.values[self.query_at(row, head)..][..d];
        let k = &self.k.values[self.key_at(key, head)..][..d];
        let scale = f64::from(self.attention.scale);
        let score = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * scale;
        match self.attention.softcap.map(f64::from) {
            Some(cap) => (cap * (score / cap).tanh(), scale * (1.0 - (score / cap).tanh().powi(2))),
            None => (score, scale),
        }
    }
}

fn span_attention(attention: &SpanAttention, inputs: &[F64Array]) -> Result<Vec<F64Array>, ReferenceError> {
    let heads = SpanHeads::new(attention, inputs);
    let (n, n_heads, d) = (heads.q.dims()[0], heads.n_heads(), heads.head_dim());
    let mut y = vec![0.0; heads.q.values.len()];
    let mut lse = vec![f64::NEG_INFINITY; n * n_heads];
    for row in 0..n {
        let seen = heads.seen(row)?;
        if seen.is_empty() {
            continue;
        }
        for head in 0..n_heads {
            let scores: Vec<f64> = seen.clone().map(|key| heads.score(row, head, key).0).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            lse[row * n_heads + head] = max + total.ln();
            for (key, score) in seen.clone().zip(&scores) {
                let p = (score - max).exp() / total;
                let v = &heads.v.values[heads.key_at(key, head)..][..d];
                let y = &mut y[heads.query_at(row, head)..][..d];
                y.iter_mut().zip(v).for_each(|(y, v)| *y += p * v);
            }
        }
    }
    let lse = F64Array { shape: Shape::new(&[n, n_heads])?, values: lse };
    Ok(vec![F64Array { shape: heads.q.shape, values: y }, lse])
}

fn span_attention_grad(
    attention: &SpanAttention,
    inputs: &[F64Array],
) -> Result<Vec<F64Array>, ReferenceError> {
    let (dy, y, lse) = (&inputs[0], &inputs[5], &inputs[6]);
    let heads = SpanHeads::new(attention, &inputs[1..5]);
    let (n, n_heads, d) = (heads.q.dims()[0], heads.n_heads(), heads.head_dim());
    let mut dq = vec![0.0; heads.q.values.len()];
    let [mut dk, mut dv] = [vec![0.0; heads.k.values.len()], vec![0.0; heads.k.values.len()]];
    for row in 0..n {
        let seen = heads.seen(row)?;
        for head in 0..n_heads {
            let at = heads.query_at(row, head);
            let dy = &dy.values[at..][..d];
            let mean: f64 = dy.iter().zip(&y.values[at..][..d]).map(|(dy, y)| dy * y).sum();
            for key in seen.clone() {
                let key_at = heads.key_at(key, head);
                let (score, slope) = heads.score(row, head, key);
                let p = (score - lse.values[row * n_heads + head]).exp();
                let dot: f64 = dy.iter().zip(&heads.v.values[key_at..][..d]).map(|(dy, v)| dy * v).sum();
                let d_score = p * (dot - mean) * slope;
                for i in 0..d {
                    dv[key_at + i] += p * dy[i];
                    dq[at + i] += d_score * heads.k.values[key_at + i];
                    dk[key_at + i] += d_score * heads.q.values[at + i];
                }
            }
        }
    }
    let like = |x: &F64Array, values| F64Array { shape: x.shape, values };
    Ok(vec![like(heads.q, dq), like(heads.k, dk), like(heads.v, dv)])
}

fn cross_entropy(inputs: &[F64Array]) -> Result<Vec<F64Array>, ReferenceError> {
    let (logits, targets, scale) = (&inputs[0], &inputs[1], inputs[2].values[0]);
    let mut loss = Vec::with_capacity(targets.values.len());
    let mut gradient = Vec::with_capacity(logits.values.len());
    for (row, &target) in logits.rows().zip(&targets.values) {
        let Some(target) = column(target, row.len())? else {
            loss.push(0.0);
            gradient.extend(std::iter::repeat_n(0.0, row.len()));
            continue;
        };
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + row.iter().map(|v| (v - max).exp()).sum::<f64>().ln();
        loss.push(scale * (lse - row[target]));
        let is_target = |i: usize| if i == target { 1.0 } else { 0.0 };
        gradient.extend(row.iter().enumerate().map(|(i, v)| scale * ((v - lse).exp() - is_target(i))));
    }
    let loss = F64Array { shape: targets.shape, values: loss };
    Ok(vec![loss, F64Array { shape: logits.shape, values: gradient }])
}

/// Whether dropout keeps an element.
pub(crate) fn keeps(dropout: &Dropout, rng: &[f64], element: usize) -> bool {
    let word = |i: usize| rng[i] as u32;
    let counter = [(element / 4) as u32, dropout.site, word(2), word(3)];
    let random = philox4x32(counter, [word(0), word(1)])[element % 4];
    (random >> 8) as f32 * (1.0 / 16_777_216.0) >= dropout.p
}
