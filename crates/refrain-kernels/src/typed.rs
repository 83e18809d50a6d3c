//! Elements of any type: their codes, what may be read sixteen bytes at a time, and what twins of such kernels share.

use refrain_driver::Buf;
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_graph::{Op, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};

use crate::error::{OpCase, KernelError};
use crate::registry::lowercase;
use crate::twin::fault;
use crate::view::{RowLayout, BufView};

/// Float types that kernels compute with.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// The types of elements, each at its code (`eight.cuh`).
const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I32];

/// A kernel for one type of element.
pub(crate) fn named(kernel: &str, dtype: DType) -> String {
    format!("{kernel}_{}", lowercase(dtype))
}

/// The dtype of a code.
pub(crate) fn dtype_of(code: u32) -> KernelResult<DType> {
    TYPES.get(code as usize).copied().ok_or_else(|| fault(format!("no type has the code {code}")))
}

/// Whether a buffer starts at a multiple of sixteen bytes.
pub(crate) fn is_aligned(buf: Buf) -> bool {
    buf.offset().is_multiple_of(16)
}

/// Whether eight elements of a row at a time are sixteen bytes or two times that, in every row.
pub(crate) fn rows_are_wide(buf: Buf, rows: RowLayout, n_cols: usize) -> bool {
    is_aligned(buf)
        && [rows.inner_stride, rows.outer_stride, n_cols as u32].iter().all(|n| n.is_multiple_of(8))
}

impl OpCase<'_> {
    /// What kernels know a type by.
    pub(crate) fn code(&self, what: &'static str, dtype: DType) -> Result<u32, KernelError> {
        let at = TYPES.iter().position(|t| *t == dtype);
        at.map(|at| at as u32).ok_or_else(|| self.refuse(format!("{what} is {dtype}, no kernel reads that")))
    }

    /// A dense buffer of elements.
    pub(crate) fn elements(
        &self,
        what: &'static str,
        buf: Buf,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Buf, KernelError> {
        let size = dtype.block_bytes();
        let bytes = dims.iter().try_fold(size, |a, &b| a.checked_mul(b));
        self.buf(what, buf, bytes, size as u64)
    }

    /// Rows of floats of one type.
    pub(crate) fn float_rows(
        &self,
        what: &'static str,
        view: &BufView,
        [n_rows, n_cols]: [usize; 2],
    ) -> Result<(Buf, RowLayout), KernelError> {
        crate::require!(
            self,
            view.dtype == self.dtype && FLOATS.contains(&view.dtype),
            "{what} is {}, must be floats of one type",
            view.dtype
        );
        self.rows_of_any(what, view, n_rows, n_cols)
    }
}

/// A dense operand of a twin, with its type.
pub(crate) struct Typed {
    pub(crate) ty: TensorType,
    pub(crate) bytes: Vec<u8>,
}

impl Typed {
    pub(crate) fn new(dtype: DType, dims: &[usize], bytes: Vec<u8>) -> KernelResult<Typed> {
        Ok(Typed { ty: TensorType { dtype, shape: Shape::new(dims).map_err(fault)? }, bytes })
    }

    /// A dense tensor in memory.
    pub(crate) fn read(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        dims: &[usize],
    ) -> KernelResult<Typed> {
        let n: usize = dims.iter().product();
        Typed::new(dtype, dims, k.read(ptr, n * dtype.block_bytes())?)
    }

    /// Rows of consecutive elements, dense.
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

    /// The elements at some places behind a pointer.
    pub(crate) fn walked(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        places: impl Iterator<Item = usize> + Clone,
        dims: &[usize],
    ) -> KernelResult<Typed> {
        let size = dtype.block_bytes();
        let end = places.clone().max().map_or(0, |last| last + 1);
        // One look at the whole extent: a stray index is found all the same, and logging each element would be slow.
        let all = k.view::<u8>(ptr, end * size)?;
        Typed::new(dtype, dims, places.flat_map(|at| all[at * size..][..size].iter().copied()).collect())
    }

    pub(crate) fn input(&self) -> In<'_> {
        In { dtype: self.ty.dtype, layout: Layout::contiguous(self.ty.shape), bytes: &self.bytes }
    }
}

/// Runs the reference; the bytes of each output.
pub(crate) fn run_typed(
    op: &Op,
    inputs: &[&Typed],
    outputs: &[(DType, &[usize])],
) -> KernelResult<Vec<Vec<u8>>> {
    let inputs: Vec<In<'_>> = inputs.iter().map(|typed| typed.input()).collect();
    let mut made = Vec::with_capacity(outputs.len());
    for (dtype, dims) in outputs {
        let shape = Shape::new(dims).map_err(fault)?;
        made.push((TensorType { dtype: *dtype, shape }, vec![0; shape.n_elements() * dtype.block_bytes()]));
    }
    let mut outs: Vec<Out<'_>> = made.iter_mut().map(|(ty, bytes)| Out { ty: *ty, bytes }).collect();
    refrain_reference::run(op, &inputs, &mut outs).map_err(fault)?;
    Ok(made.into_iter().map(|(_, bytes)| bytes).collect())
}
