//! Shape and dtype rules, one arm per op.

use crate::op::{AttentionInputs, Op, Rope, SAMPLE_PARAMS, Sample, TensorType, View};
use crate::train_op::infer_span_attention;
use refrain_tensor::{DType, Layout, Shape, TensorError};

/// Why an op refuses its inputs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InferError {
    /// Wrong number of inputs.
    #[error("{op} takes {want} inputs, got {got}")]
    Arity {
        /// Name of the op.
        op: &'static str,
        /// Expected number.
        want: usize,
        /// Actual number.
        got: usize,
    },
    /// Wrong rank, dimension or dtype of an input.
    #[error("{op}: input {index} is {got}, expected {want}")]
    Input {
        /// Name of the op.
        op: &'static str,
        /// Index of the input.
        index: usize,
        /// Type of the input.
        got: TensorType,
        /// Expected type or shape.
        want: String,
    },
    /// An invalid view.
    #[error("{op}: {source}")]
    View {
        /// Name of the op.
        op: &'static str,
        /// Cause.
        source: TensorError,
    },
    /// A host function refused the types.
    #[error("{op}: {because}")]
    Host {
        /// Name of the call.
        op: &'static str,
        /// Reason from its author.
        because: String,
    },
}

/// Inputs of an op during inference.
pub(crate) struct RuleInputs<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [TensorType],
}

impl RuleInputs<'_> {
    pub(crate) fn arity(&self, want: usize) -> Result<(), InferError> {
        if self.inputs.len() == want {
            return Ok(());
        }
        Err(InferError::Arity { op: self.op, want, got: self.inputs.len() })
    }

    pub(crate) fn require(
        &self,
        index: usize,
        holds: bool,
        want: impl Into<String>,
    ) -> Result<(), InferError> {
        if holds {
            return Ok(());
        }
        Err(InferError::Input { op: self.op, index, got: self.inputs[index], want: want.into() })
    }

    /// Checks a result shape. Inputs without elements can have dimensions that a result cannot.
    pub(crate) fn shape(&self, dims: &[usize]) -> Result<Shape, InferError> {
        Shape::new(dims).map_err(|source| InferError::View { op: self.op, source })
    }

    pub(crate) fn float(&self, index: usize) -> Result<(), InferError> {
        self.require(index, self.inputs[index].dtype.is_float(), "F32, F16 or BF16")
    }

    pub(crate) fn exact(&self, index: usize, dtype: DType, dims: &[usize]) -> Result<(), InferError> {
        let t = self.inputs[index];
        self.require(index, t.dtype == dtype && t.shape.dims() == dims, format!("{dtype}{dims:?}"))
    }

    pub(crate) fn rank(&self, index: usize, rank: usize) -> Result<&[usize], InferError> {
        self.require(index, self.inputs[index].shape.rank() == rank, format!("{rank} dimensions"))?;
        Ok(self.inputs[index].shape.dims())
    }
}

impl Op {
    /// Returns the output types for these input types, or why there are none.
    pub fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, InferError> {
        let rule = RuleInputs { op: self.name(), inputs };
        match self {
            Op::View(view) => {
                rule.arity(1)?;
                let dense = Layout::contiguous(inputs[0].shape);
                let layout = view.apply(&dense).map_err(|source| InferError::View { op: rule.op, source })?;
                Ok(vec![TensorType { dtype: inputs[0].dtype, shape: layout.shape() }])
            }
            Op::Copy => {
                rule.arity(1)?;
                let whole = inputs[0].shape.dim_back(0).is_multiple_of(inputs[0].dtype.block_len());
                rule.require(0, whole, "rows of whole blocks")?;
                Ok(vec![inputs[0]])
            }
            Op::Cast(to) => {
                rule.arity(1)?;
                let integer = |dtype| dtype == DType::I32;
                rule.require(0, to.is_float() || integer(*to), format!("a cast to floats or I32, not {to}"))?;
                let from = inputs[0].dtype;
                let is_number = !is_integer(from) || (integer(from) && to.is_float());
                rule.require(0, is_number, "F32, F16, BF16, a quantised dtype, or I32 cast to floats")?;
                Ok(vec![TensorType { dtype: *to, shape: inputs[0].shape }])
            }
            Op::Unary(_) | Op::Softmax => {
                rule.arity(1)?;
                rule.float(0)?;
                Ok(vec![inputs[0]])
            }
            Op::Binary(_) => infer_binary(&rule),
            Op::Reduce { axis, .. } => {
                rule.arity(1)?;
                rule.float(0)?;
                let mut dims = inputs[0].shape.dims().to_vec();
                rule.require(0, *axis < dims.len(), format!("at least {} dimensions", axis + 1))?;
                dims[*axis] = 1;
                Ok(vec![TensorType { dtype: inputs[0].dtype, shape: rule.shape(&dims)? }])
            }
            Op::Compare(_) => {
                rule.arity(2)?;
                let comparable = inputs[0].dtype.is_float() || inputs[0].dtype == DType::I32;
                rule.require(0, comparable, "F32, F16, BF16 or I32")?;
                let ty = infer_broadcast(&rule, [0, 1])?;
                Ok(vec![TensorType { dtype: DType::I32, shape: ty.shape }])
            }
            Op::Select => {
                rule.arity(3)?;
                rule.require(0, inputs[0].dtype == DType::I32, "I32")?;
                rule.float(1)?;
                let both = infer_broadcast(&rule, [1, 2])?;
                let shape = inputs[0].shape.broadcast(&both.shape);
                rule.require(0, shape.is_some(), format!("a shape that broadcasts with {}", both.shape))?;
                Ok(vec![TensorType { dtype: both.dtype, shape: shape.unwrap_or(both.shape) }])
            }
            Op::Pick => {
                rule.arity(2)?;
                rule.float(0)?;
                let n = rule.rank(0, 2)?[0];
                rule.exact(1, DType::I32, &[n])?;
                Ok(vec![TensorType { dtype: inputs[0].dtype, shape: rule.shape(&[n, 1])? }])
            }
            Op::PlaceColumns { width } => {
                rule.arity(2)?;
                rule.float(1)?;
                let n = rule.rank(0, 1)?[0];
                rule.exact(0, DType::I32, &[n])?;
                rule.require(1, inputs[1].shape.dims() == [n, 1], format!("[{n}, 1]"))?;
                Ok(vec![TensorType { dtype: inputs[1].dtype, shape: rule.shape(&[n, *width])? }])
            }
            Op::Pad { axis, before, after } => {
                rule.arity(1)?;
                rule.float(0)?;
                let mut dims = inputs[0].shape.dims().to_vec();
                rule.require(0, *axis < dims.len(), format!("at least {} dimensions", axis + 1))?;
                dims[*axis] = dims[*axis].saturating_add(*before).saturating_add(*after);
                Ok(vec![TensorType { dtype: inputs[0].dtype, shape: rule.shape(&dims)? }])
            }
            Op::MatMul => infer_matmul(&rule),
            Op::GatherRows(to) => {
                rule.arity(2)?;
                let d = rule.rank(0, 2)?[1];
                let n = rule.rank(1, 1)?[0];
                rule.require(1, inputs[1].dtype == DType::I32, "I32")?;
                rule.require(
                    0,
                    to.is_float() && !is_integer(inputs[0].dtype),
                    "a table that is not of integers",
                )?;
                Ok(vec![TensorType { dtype: *to, shape: rule.shape(&[n, d])? }])
            }
            Op::ScatterAddRows { n_rows } => {
                rule.arity(2)?;
                rule.float(1)?;
                let (n, d) = (rule.rank(0, 1)?[0], rule.rank(1, 2)?[1]);
                rule.exact(0, DType::I32, &[n])?;
                rule.require(1, inputs[1].shape.dims() == [n, d], format!("{n} rows"))?;
                Ok(vec![TensorType { dtype: inputs[1].dtype, shape: rule.shape(&[*n_rows, d])? }])
            }
            Op::RmsNorm { .. } => {
                rule.arity(2)?;
                rule.float(0)?;
                rule.float(1)?;
                rule.require(
                    1,
                    inputs[1].shape.dims() == [inputs[0].shape.dim_back(0)],
                    "one weight per column",
                )?;
                Ok(vec![inputs[0]])
            }
            Op::AddRmsNorm { .. } => {
                rule.arity(3)?;
                rule.float(0)?;
                rule.require(1, inputs[1] == inputs[0], format!("{}", inputs[0]))?;
                rule.float(2)?;
                rule.require(
                    2,
                    inputs[2].shape.dims() == [inputs[0].shape.dim_back(0)],
                    "one weight per column",
                )?;
                Ok(vec![inputs[0], inputs[0]])
            }
            Op::Gate(_) => {
                rule.arity(2)?;
                rule.float(0)?;
                rule.require(1, inputs[1] == inputs[0], format!("{}", inputs[0]))?;
                Ok(vec![inputs[0]])
            }
            Op::Rope(rope) => infer_rope(&rule, rope),
            Op::KvAppend => {
                rule.arity(5)?;
                let cache = rule.rank(0, 4)?;
                let x = rule.rank(1, 3)?;
                rule.float(0)?;
                rule.float(1)?;
                rule.require(0, cache[2] > 0, "blocks of at least one position")?;
                rule.require(
                    1,
                    x[1] == cache[1] && x[2] == cache[3],
                    format!("[n, {}, {}]", cache[1], cache[3]),
                )?;
                rule.exact(2, DType::I32, &[x[0]])?;
                rule.exact(3, DType::I32, &[x[0]])?;
                rule.rank(4, 2)?;
                rule.require(4, inputs[4].dtype == DType::I32, "I32")?;
                Ok(vec![inputs[0]])
            }
            Op::KvAppendBytes => {
                rule.arity(6)?;
                let cache = rule.rank(0, 4)?;
                let x = rule.rank(2, 3)?;
                rule.require(
                    0,
                    inputs[0].dtype == DType::U8 && cache[2] > 0,
                    "U8, blocks of at least one position",
                )?;
                rule.exact(1, DType::F32, &cache[..3])?;
                rule.float(2)?;
                rule.require(
                    2,
                    x[1] == cache[1] && x[2] == cache[3],
                    format!("[n, {}, {}]", cache[1], cache[3]),
                )?;
                rule.exact(3, DType::I32, &[x[0]])?;
                rule.exact(4, DType::I32, &[x[0]])?;
                rule.rank(5, 2)?;
                rule.require(5, inputs[5].dtype == DType::I32, "I32")?;
                Ok(vec![inputs[0], inputs[1]])
            }
            Op::Attention(attention) => {
                let AttentionInputs { scales, sinks } = AttentionInputs::of(inputs.len());
                // An 8-bit cache comes with its scales.
                let in_bytes = scales.is_some() && inputs[1].dtype == DType::U8;
                let n_least = if in_bytes { 8 } else { 6 };
                if inputs.len() != n_least {
                    rule.arity(n_least + 1)?;
                }
                rule.require(0, attention.window != Some(0), "a window of at least one position")?;
                rule.float(0)?;
                let q = rule.rank(0, 3)?;
                let cache = rule.rank(1, 4)?;
                match scales {
                    Some(scales) => {
                        scales.into_iter().try_for_each(|i| rule.exact(i, DType::F32, &cache[..3]))?;
                    }
                    None => rule.float(1)?,
                }
                rule.require(1, cache[2] > 0, "blocks of at least one position")?;
                rule.require(2, inputs[2] == inputs[1], format!("{}", inputs[1]))?;
                let fits = cache[1] > 0 && q[1].is_multiple_of(cache[1]) && q[2] == cache[3];
                rule.require(0, fits, format!("heads in groups of {} of {} elements", cache[1], cache[3]))?;
                rule.exact(3, DType::I32, &[q[0]])?;
                rule.exact(4, DType::I32, &[q[0]])?;
                rule.rank(5, 2)?;
                rule.require(5, inputs[5].dtype == DType::I32, "I32")?;
                if let Some(sinks) = sinks {
                    rule.exact(sinks, DType::F32, &[q[1]])?;
                }
                Ok(vec![inputs[0]])
            }
            Op::SpanAttention(attention) => {
                rule.arity(4)?;
                infer_span_attention(&rule, attention, 0)
            }
            Op::Sample(sample) => infer_sample(&rule, *sample),
            Op::Accumulate => {
                rule.arity(2)?;
                rule.require(0, inputs[0].dtype == DType::F32, "F32")?;
                rule.float(1)?;
                let alike = inputs[1].shape == inputs[0].shape;
                rule.require(1, alike, format!("a shape of {}", inputs[0].shape))?;
                Ok(vec![inputs[0]])
            }
            Op::Moe(op) => op.infer(&rule),
            Op::Lora(op) => op.infer(&rule),
            Op::Recurrent(op) => op.infer(&rule),
            Op::Train(op) => op.infer(&rule),
            Op::HostCall(call) => {
                let host = |e: crate::op::HostCallError| InferError::Host { op: rule.op, because: e.0 };
                call.function.infer(inputs).map_err(host)
            }
        }
    }
}

impl View {
    /// Returns the layout of the view.
    pub fn apply(&self, layout: &Layout) -> Result<Layout, TensorError> {
        match self {
            View::Reshape(shape) => layout.reshape(*shape),
            View::Permute(order) => layout.permute(order),
            View::Slice { axis, start, len } => layout.slice(*axis, *start, *len),
            View::Broadcast(shape) => layout.broadcast_to(*shape),
        }
    }
}

fn infer_binary(rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
    rule.arity(2)?;
    rule.float(0)?;
    Ok(vec![infer_broadcast(rule, [0, 1])?])
}

/// Broadcast type of two inputs of one dtype.
fn infer_broadcast(rule: &RuleInputs<'_>, [i, j]: [usize; 2]) -> Result<TensorType, InferError> {
    let [a, b] = [rule.inputs[i], rule.inputs[j]];
    rule.require(j, a.dtype == b.dtype, format!("{}", a.dtype))?;
    let shape = a.shape.broadcast(&b.shape);
    rule.require(j, shape.is_some(), format!("a shape that broadcasts with {}", a.shape))?;
    Ok(TensorType { dtype: a.dtype, shape: shape.unwrap_or(a.shape) })
}

/// Rule of a rope and of its gradient.
pub(crate) fn infer_rope(rule: &RuleInputs<'_>, rope: &Rope) -> Result<Vec<TensorType>, InferError> {
    rule.arity(3)?;
    rule.float(0)?;
    let dims = rule.rank(0, 3)?;
    let even = rope.n_dims.is_multiple_of(2) && rope.n_dims <= dims[2] && rope.n_dims > 0;
    rule.require(0, even, format!("heads of at least {} elements", rope.n_dims))?;
    rule.exact(1, DType::I32, &[dims[0]])?;
    rule.exact(2, DType::F32, &[rope.n_dims / 2])?;
    Ok(vec![rule.inputs[0]])
}

fn infer_matmul(rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
    rule.arity(2)?;
    rule.float(0)?;
    let [a, b] = [rule.inputs[0], rule.inputs[1]];
    rule.require(0, a.shape.rank() >= 2, "at least two dimensions")?;
    rule.require(1, b.shape.rank() >= 2 && !is_integer(b.dtype), "a matrix that is not of integers")?;
    let k = a.shape.dim_back(0);
    rule.require(1, b.shape.dim_back(1) == k, format!("{k} rows"))?;
    let outer = |s: Shape| Shape::new(&s.dims()[..s.rank() - 2]);
    let batch = outer(a.shape).ok().zip(outer(b.shape).ok()).and_then(|(x, y)| x.broadcast(&y));
    rule.require(1, batch.is_some(), format!("outer dimensions that broadcast with {}", a.shape))?;
    let mut dims = batch.map_or_else(Vec::new, |s| s.dims().to_vec());
    dims.extend([a.shape.dim_back(1), b.shape.dim_back(0)]);
    Ok(vec![TensorType { dtype: a.dtype, shape: rule.shape(&dims)? }])
}

fn infer_sample(rule: &RuleInputs<'_>, sample: Sample) -> Result<Vec<TensorType>, InferError> {
    rule.arity(6 + usize::from(sample.masked))?;
    let (n, vocab) = (rule.rank(0, 2)?[0], rule.rank(0, 2)?[1]);
    rule.require(0, rule.inputs[0].dtype == DType::F32, "F32")?;
    rule.exact(1, DType::F32, &[n, SAMPLE_PARAMS])?;
    rule.exact(2, DType::U32, &[n, 4])?;
    let width = rule.rank(3, 2)?[1];
    rule.exact(3, DType::I32, &[n, width])?;
    let n_bias = rule.rank(4, 2)?[1];
    rule.exact(4, DType::I32, &[n, n_bias])?;
    rule.exact(5, DType::F32, &[n, n_bias])?;
    if sample.masked {
        rule.exact(6, DType::U32, &[n, vocab.div_ceil(32)])?;
    }
    rule.require(0, sample.n_top <= vocab, format!("at least {} tokens", sample.n_top))?;
    let mut outputs = vec![TensorType::new(DType::I32, [n]), TensorType::new(DType::F32, [n])];
    if sample.n_top > 0 {
        let top = |dtype| Ok(TensorType { dtype, shape: rule.shape(&[n, sample.n_top])? });
        outputs.extend([top(DType::I32)?, top(DType::F32)?]);
    }
    Ok(outputs)
}

fn is_integer(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::U32 | DType::I64 | DType::U8)
}
