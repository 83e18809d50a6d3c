//! What the twins share: reading operands from simulated memory, running the reference, writing the result back.

use refrain_driver::api::{Code, DevicePtr};
use refrain_driver::sim::{Fault, KernelResult, SimKernel};
use refrain_graph::{Op, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};

use crate::view::RowLayout;

/// A fault of the twin's own making: the values it was given make no sense.
pub(crate) fn fault(what: impl std::fmt::Display) -> Fault {
    Fault::new(Code::LAUNCH_FAILED, what.to_string())
}

/// A word parameter as a count.
pub(crate) fn count(k: &SimKernel<'_>, i: usize) -> KernelResult<usize> {
    k.arg::<u32>(i).map(|n| n as usize)
}

/// A dense operand in memory of its own.
pub(crate) struct Dense {
    dtype: DType,
    shape: Shape,
    bytes: Vec<u8>,
}

impl Dense {
    /// Reads a dense tensor.
    pub(crate) fn read(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        dims: &[usize],
    ) -> KernelResult<Dense> {
        let shape = Shape::new(dims).map_err(fault)?;
        let n = dtype.bytes_for(shape.n_elements()).ok_or_else(|| fault("a tensor of partial blocks"))?;
        Ok(Dense { dtype, shape, bytes: k.read(ptr, n)? })
    }

    /// F32 values with a shape.
    pub(crate) fn f32(values: &[f32], dims: &[usize]) -> KernelResult<Dense> {
        let shape = Shape::new(dims).map_err(fault)?;
        Ok(Dense { dtype: DType::F32, shape, bytes: bytemuck::cast_slice(values).to_vec() })
    }

    pub(crate) fn input(&self) -> In<'_> {
        In { dtype: self.dtype, layout: Layout::contiguous(self.shape), bytes: &self.bytes }
    }
}

/// Rows of an F32 view, dense.
pub(crate) fn read_rows(
    k: &SimKernel<'_>,
    ptr: DevicePtr,
    rows: RowLayout,
    n_rows: usize,
    n_cols: usize,
) -> KernelResult<Vec<f32>> {
    let mut out = Vec::with_capacity(n_rows * n_cols);
    for row in 0..n_rows {
        out.extend_from_slice(&k.view::<f32>(ptr.add(4 * rows.start(row) as u64), n_cols)?);
    }
    Ok(out)
}

/// Runs a reference op whose one output is F32.
pub(crate) fn run_f32(op: &Op, inputs: &[&Dense], dims: &[usize]) -> KernelResult<Vec<f32>> {
    let inputs: Vec<In<'_>> = inputs.iter().map(|d| d.input()).collect();
    let shape = Shape::new(dims).map_err(fault)?;
    let mut bytes = vec![0; 4 * shape.n_elements()];
    let out = Out { ty: TensorType { dtype: DType::F32, shape }, bytes: &mut bytes };
    refrain_reference::run(op, &inputs, &mut [out]).map_err(fault)?;
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}
