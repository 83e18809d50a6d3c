//! Matrix products and attention of a training step: operands of one dtype and any layout, rows in documents.
//!
//! These are products whose right operand is not a weight of a file, whose rows are in 16 bits, or whose
//! weight has a layout that the kernels for F32 rows do not read. cuBLASLt runs them if it is available and
//! accepts them, Refrain's own kernels otherwise.

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

/// The reason why no kernel multiplies values of these types.
pub(crate) fn unsupported_product(a: &TensorType, b: &TensorType) -> Option<&'static str> {
    let is_weight = LINEAR_DTYPES.contains(&b.dtype) || PACKED_DTYPES.contains(&b.dtype);
    match (a.dtype, b.dtype) {
        (a, b) if a == b && MATMUL_DTYPES.contains(&a) => None,
        (DType::F32, _) if !is_weight => Some("no kernel supports this dtype"),
        (DType::F32, _) if b.shape.rank() != 2 => Some("the right operand must be a single matrix"),
        (DType::F32, _) => None,
        _ => Some("rows in 16 bits need a right operand of the same dtype"),
    }
}

/// The reason why no kernel runs attention within documents on heads of this type.
pub(crate) fn unsupported_attention(q: &TensorType) -> Option<&'static str> {
    let fits = MATMUL_DTYPES.contains(&q.dtype) && q.shape.dim_back(0) <= MAX_SPAN_HEAD_DIM;
    (!fits).then_some("heads must have at most 256 elements of F32, F16 or BF16")
}

/// Scratch of a gradient of attention.
pub(crate) fn attention_grad_scratch(step: &Step) -> u64 {
    let q = step.inputs[1].layout.shape();
    span_grad_scratch_bytes(q.dims()[0], q.dims()[1])
}

/// The addend of a product, if any, and its two operands.
fn operands(step: &Step) -> (Option<&Operand>, [&Operand; 2]) {
    match matches!(step.op, Op::Train(TrainOp::AddProduct)) {
        true => (Some(&step.inputs[0]), [&step.inputs[1], &step.inputs[2]]),
        false => (None, [&step.inputs[0], &step.inputs[1]]),
    }
}

/// Whether a product is one of values, rather than of F32 rows with a weight.
fn is_of_values(a: DType, b: DType, b_layout: &Layout, is_weight: bool) -> bool {
    let as_declared =
        || b_layout.shape().rank() == 2 && b_layout.transpose().is_ok_and(|rows| rows.is_contiguous());
    a == b && MATMUL_DTYPES.contains(&a) && !(a == DType::F32 && is_weight && as_declared())
}

/// Like [`is_of_values`], for a step.
pub(crate) fn multiplies_values(plan: &Plan, step: &Step) -> bool {
    let (_, [a, b]) = operands(step);
    let is_weight = matches!(plan.buffer(b.buffer).place, Place::Weight(_));
    is_of_values(a.dtype, b.dtype, &b.layout, is_weight)
}

/// Whether any product of a group is one of values; each product of such a group then runs by itself.
pub(crate) fn multiply_values(query: &GroupQuery<'_>, products: &Products) -> bool {
    products.parts.iter().any(|part| {
        let (a, b): (Seen, Seen) = (query.input(part.product, 0), query.input(part.product, 1));
        is_of_values(a.dtype, b.dtype, &b.layout, b.is_weight())
    })
}

/// The reason why cuBLASLt does not run a product of values.
pub(crate) fn refused_by_library(blas: &BlasLt, step: &Step) -> Option<String> {
    let (_, [a, b]) = operands(step);
    match library_product(&a.layout, &b.layout, a.dtype) {
        Err(because) => Some(because),
        Ok(shape) => blas.check(shape).err().map(|error| error.to_string()),
    }
}

impl Lowering<'_> {
    /// A product of values on Refrain's own kernel.
    pub(crate) fn product_of_values(&self, step: &Step) -> Result<Launch, KernelError> {
        let (c, [a, b]) = operands(step);
        let (a, b) = (self.view(a)?, self.view(b)?);
        let c = c.map(|c| self.dense(step, c)).transpose()?;
        let y = self.dense(step, &step.outputs[0])?;
        self.kernels.matmul(&MatMulArgs { a, b, y, c, step: &step.label })
    }

    /// A product of values by cuBLASLt. It serves as its own rehearsal: while a plan is compiled, the
    /// contents of its output do not matter.
    pub(crate) fn library_product_of_values(
        &self,
        blas: &Arc<BlasLt>,
        step: &Step,
    ) -> Result<BlasLtProduct, KernelError> {
        let (c, [a, b]) = operands(step);
        let (a, b) = (self.view(a)?, self.view(b)?);
        let refuse = |because: String| KernelError::Unsupported {
            op: "matmul",
            dtype: a.dtype,
            shape: format!("{} by {}", a.layout.shape(), b.layout.shape()),
            because,
        };
        let shape = library_product(&a.layout, &b.layout, a.dtype).map_err(refuse)?;
        let from = |view: &refrain_kernels::BufView| {
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

    /// Attention within documents.
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

    /// Gradient of attention within documents.
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
