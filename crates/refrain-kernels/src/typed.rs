//! Elements of any dtype: their codes, 16-byte access, and helpers of the twins.

use refrain_driver::Buf;
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_graph::{Op, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};

use crate::error::{KernelError, OpCase};
use crate::registry::lowercase;
use crate::twin::fault;
use crate::view::{BufView, RowLayout};

/// Float dtypes that kernels compute with.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Element dtypes, indexed by their code (`eight.cuh`).
const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I32];

/// Name of a kernel for one element dtype.
pub(crate) fn named(kernel: &str, dtype: DType) -> String {
    format!("{kernel}_{}", lowercase(dtype))
}

/// Dtype of a code.
pub(crate) fn dtype_of(code: u32) -> KernelResult<DType> {
    TYPES.get(code as usize).copied().ok_or_else(|| fault(format!("no dtype has code {code}")))
}

/// Whether a buffer is 16-byte aligned.
pub(crate) fn is_aligned(buf: Buf) -> bool {
    buf.offset().is_multiple_of(16)
}

/// Whether eight elements at a time are one or two aligned 16-byte accesses in every row.
pub(crate) fn rows_are_wide(buf: Buf, rows: RowLayout, n_cols: usize) -> bool {
    is_aligned(buf)
        && [rows.inner_stride, rows.outer_stride, n_cols as u32].iter().all(|n| n.is_multiple_of(8))
}

impl OpCase<'_> {
    /// Code of a dtype in kernel parameters.
    pub(crate) fn code(&self, name: &'static str, dtype: DType) -> Result<u32, KernelError> {
        let at = TYPES.iter().position(|t| *t == dtype);
        at.map(|at| at as u32).ok_or_else(|| self.refuse(format!("{name} is {dtype}, which no kernel reads")))
    }

    /// Checks a contiguous buffer of elements.
    pub(crate) fn elements(
        &self,
        name: &'static str,
        buf: Buf,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Buf, KernelError> {
        let size = dtype.block_bytes();
        let bytes = dims.iter().try_fold(size, |a, &b| a.checked_mul(b));
        self.buf(name, buf, bytes, size as u64)
    }

    /// Checks rows of floats of one dtype.
    pub(crate) fn float_rows(
        &self,
        name: &'static str,
        view: &BufView,
        [n_rows, n_cols]: [usize; 2],
    ) -> Result<(Buf, RowLayout), KernelError> {
        crate::require!(
            self,
            view.dtype == self.dtype && FLOATS.contains(&view.dtype),
            "{name} is {}, must be F32, F16 or BF16 like the other operands",
            view.dtype
        );
        self.rows_of_any(name, view, n_rows, n_cols)
    }
}

/// A contiguous operand of a twin, with its dtype.
pub(crate) struct Typed {
    pub(crate) ty: TensorType,
    pub(crate) bytes: Vec<u8>,
}

impl Typed {
    pub(crate) fn new(dtype: DType, dims: &[usize], bytes: Vec<u8>) -> KernelResult<Typed> {
        Ok(Typed { ty: TensorType { dtype, shape: Shape::new(dims).map_err(fault)? }, bytes })
    }

    /// Reads a contiguous tensor.
    pub(crate) fn read(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        dims: &[usize],
    ) -> KernelResult<Typed> {
        let n: usize = dims.iter().product();
        Typed::new(dtype, dims, k.read(ptr, n * dtype.block_bytes())?)
    }

    /// Reads rows contiguously.
    pub(crate) fn rows(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        rows: RowLayout,
        dims: &[usize],
    ) -> KernelResult<Typed> {
        let n_cols = dims.last().copied().unwrap_or(1);
        let n_rows = dims.iter().product::<usize>() / n_cols.max(1);
        let size = dtype.block_bytes();
        let mut bytes = Vec::with_capacity(n_rows * n_cols * size);
        for row in 0..n_rows {
            let at = ptr.add((size * rows.start(row)) as u64);
            bytes.extend_from_slice(&k.view::<u8>(at, n_cols * size)?);
        }
        Typed::new(dtype, dims, bytes)
    }

    /// Reads the elements at the given indices from a pointer.
    pub(crate) fn walked(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        indices: impl Iterator<Item = usize> + Clone,
        dims: &[usize],
    ) -> KernelResult<Typed> {
        let size = dtype.block_bytes();
        let end = indices.clone().max().map_or(0, |last| last + 1);
        // One access covers the whole extent: it still catches a stray index, and logging every element would
        // be slow.
        let all = k.view::<u8>(ptr, end * size)?;
        Typed::new(dtype, dims, indices.flat_map(|at| all[at * size..][..size].iter().copied()).collect())
    }

    pub(crate) fn input(&self) -> In<'_> {
        In { dtype: self.ty.dtype, layout: Layout::contiguous(self.ty.shape), bytes: &self.bytes }
    }
}

/// Runs the reference and returns the bytes of each output.
pub(crate) fn run_typed(
    op: &Op,
    inputs: &[&Typed],
    outputs: &[(DType, &[usize])],
) -> KernelResult<Vec<Vec<u8>>> {
    let inputs: Vec<In<'_>> = inputs.iter().map(|typed| typed.input()).collect();
    let mut buffers = Vec::with_capacity(outputs.len());
    for (dtype, dims) in outputs {
        let shape = Shape::new(dims).map_err(fault)?;
        buffers
            .push((TensorType { dtype: *dtype, shape }, vec![0; shape.n_elements() * dtype.block_bytes()]));
    }
    let mut outs: Vec<Out<'_>> = buffers.iter_mut().map(|(ty, bytes)| Out { ty: *ty, bytes }).collect();
    refrain_reference::run(op, &inputs, &mut outs).map_err(fault)?;
    Ok(buffers.into_iter().map(|(_, bytes)| bytes).collect())
}
