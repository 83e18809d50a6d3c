//! Products and attention of a training step: factors in one dtype and any layout, rows in documents.
//!
//! A product is one of these when no weight of a file is its second factor, when its rows are in 16 bits, or when the
//! weight lies as the kernels for F32 rows do not read it. It goes to cuBLASLt where that is there and takes it, and to a
//! kernel of this engine otherwise.

use std::sync::Arc;

use refrain_driver::Launch;
use refrain_graph::{
    GroupQuery, Op, Operand, Place, Plan, Products, Seen, SpanAttention, Step, TensorType, TrainOp,
};
use refrain_kernels::{
    BlasLt, BlasLtProduct, KernelError, LINEAR_DTYPES, MATMUL_DTYPES, MAX_SPAN_HEAD_DIM, MatMulArgs,
    PACKED_DTYPES, SpanArgs, SpanGradArgs, library_product, span_grad_scratch_bytes,
};
use refrain_tensor::{DType, Layout};

use crate::lower::Lowering;

/// Why no kernel multiplies values of these types.
pub(crate) fn unsupported_product(a: &TensorType, b: &TensorType) -> Option<&'static str> {
    let is_weight = LINEAR_DTYPES.contains(&b.dtype) || PACKED_DTYPES.contains(&b.dtype);
    match (a.dtype, b.dtype) {
        (a, b) if a == b && MATMUL_DTYPES.contains(&a) => None,
        (DType::F32, _) if !is_weight => Some("no kernel multiplies with this dtype"),
        (DType::F32, _) if b.shape.rank() != 2 => Some("the second factor is one matrix"),
        (DType::F32, _) => None,
        _ => Some("rows in 16 bits are multiplied with their own dtype"),
    }
}

/// Why no kernel attends among rows of this type.
pub(crate) fn unsupported_attention(q: &TensorType) -> Option<&'static str> {
    let fits = MATMUL_DTYPES.contains(&q.dtype) && q.shape.dim_back(0) <= MAX_SPAN_HEAD_DIM;
    (!fits).then_some("heads have at most 256 elements, F32, F16 or BF16")
}

/// Scratch of a gradient of attention.
pub(crate) fn attention_grad_scratch(step: &Step) -> u64 {
    let q = step.inputs[1].layout.shape();
    span_grad_scratch_bytes(q.dims()[0], q.dims()[1])
}

/// What is added to a product, if anything, and its factors.
fn factors(step: &Step) -> (Option<&Operand>, [&Operand; 2]) {
    if matches!(step.op, Op::Train(TrainOp::AddProduct)) {
        (Some(&step.inputs[0]), [&step.inputs[1], &step.inputs[2]])
    } else {
        (None, [&step.inputs[0], &step.inputs[1]])
    }
}

/// Whether a product is one of values rather than of F32 rows with a weight.
fn is_of_values(a: DType, b: DType, b_layout: &Layout, is_weight: bool) -> bool {
    let as_declared =
        || b_layout.shape().rank() == 2 && b_layout.transpose().is_ok_and(|rows| rows.is_contiguous());
    a == b && MATMUL_DTYPES.contains(&a) && !(a == DType::F32 && is_weight && as_declared())
}

/// The same of a step.
pub(crate) fn multiplies_values(plan: &Plan, step: &Step) -> bool {
    let (_, [a, b]) = factors(step);
    let is_weight = matches!(plan.buffer(b.buffer).place, Place::Weight(_));
    is_of_values(a.dtype, b.dtype, &b.layout, is_weight)
}

/// Whether any product of a group is one of values; each then runs by itself.
pub(crate) fn multiply_values(query: &GroupQuery<'_>, products: &Products) -> bool {
    products.parts.iter().any(|part| {
        let (a, b): (Seen, Seen) = (query.input(part.product, 0), query.input(part.product, 1));
        is_of_values(a.dtype, b.dtype, &b.layout, b.is_weight())
    })
}

/// Why the library does not take a product of values.
pub(crate) fn refused_by_library(blas: &BlasLt, step: &Step) -> Option<String> {
    let (_, [a, b]) = factors(step);
    match library_product(&a.layout, &b.layout, a.dtype) {
        Err(because) => Some(because),
        Ok(shape) => blas.check(shape).err().map(|error| error.to_string()),
    }
}

impl Lowering<'_> {
    /// A product of values by a kernel of this engine.
    pub(crate) fn product_of_values(&self, step: &Step) -> Result<Launch, KernelError> {
        let (c, [a, b]) = factors(step);
        let (a, b) = (self.view(a)?, self.view(b)?);
        let c = c.map(|c| self.dense(step, c)).transpose()?;
        let y = self.dense(step, &step.outputs[0])?;
        self.kernels.matmul(&MatMulArgs { a, b, y, c, step: &step.label })
    }

    /// The same by the library. Its rehearsal is the product itself: whatever is where the result will be is of no use
    /// while a plan is made ready.
    pub(crate) fn library_product_of_values(
        &self,
        blas: &Arc<BlasLt>,
        step: &Step,
    ) -> Result<BlasLtProduct, KernelError> {
        let (c, [a, b]) = factors(step);
        let (a, b) = (self.view(a)?, self.view(b)?);
        let refuse = |because: String| KernelError::Unsupported {
            op: "matmul",
            dtype: a.dtype,
            shape: format!("{} by {}", a.layout.shape(), b.layout.shape()),
            because,
        };
        let shape = library_product(&a.layout, &b.layout, a.dtype).map_err(refuse)?;
        let from = |view: &refrain_kernels::View| {
            let start = (view.layout.offset() * view.dtype.block_bytes()) as u64;
            view.buf.slice(start, view.buf.len().saturating_sub(start))
        };
        let y = self.dense(step, &step.outputs[0])?;
        let product = blas.product(shape, [from(&a)?, from(&b)?, y, self.areas.library], &step.label)?;
        match c {
            Some(c) => product.adding(self.dense(step, c)?),
            None => Ok(product),
        }
    }

    /// Attention among rows.
    pub(crate) fn span_attention(
        &self,
        step: &Step,
        attention: SpanAttention,
    ) -> Result<Launch, KernelError> {
        let view = |i: usize| self.view(&step.inputs[i]);
        self.kernels.span_attention(&SpanArgs {
            attention,
            q: view(0)?,
            k: view(1)?,
            v: view(2)?,
            spans: self.dense(step, &step.inputs[3])?,
            y: self.dense(step, &step.outputs[0])?,
            lse: self.dense(step, &step.outputs[1])?,
            step: &step.label,
        })
    }

    /// Its gradient.
    pub(crate) fn span_attention_grad(
        &self,
        step: &Step,
        attention: SpanAttention,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let view = |i: usize| self.view(&step.inputs[i]);
        let out = |i: usize| self.dense(step, &step.outputs[i]);
        let args = SpanGradArgs {
            attention,
            dy: view(0)?,
            q: view(1)?,
            k: view(2)?,
            v: view(3)?,
            spans: self.dense(step, &step.inputs[4])?,
            y: view(5)?,
            lse: self.dense(step, &step.inputs[6])?,
            dq: out(0)?,
            dk: out(1)?,
            dv: out(2)?,
            scratch: self.areas.own.slice(0, attention_grad_scratch(step))?,
            step: &step.label,
        };
        self.kernels.span_attention_grad(&args, launches)
    }
}
