//! Helpers of the twins: read operands from simulated memory, run the reference, write the result back.

use refrain_driver::api::{Code, DevicePtr};
use refrain_driver::sim::{Fault, KernelResult, SimKernel};
use refrain_graph::{Op, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};

use crate::view::RowLayout;

/// A fault raised by the twin itself, for invalid input values.
pub(crate) fn fault(reason: impl std::fmt::Display) -> Fault {
    Fault::new(Code::LAUNCH_FAILED, reason.to_string())
}

/// Reads a word parameter as a count.
pub(crate) fn count(k: &SimKernel<'_>, i: usize) -> KernelResult<usize> {
    k.arg::<u32>(i).map(|n| n as usize)
}

/// A contiguous operand with its own storage.
pub(crate) struct Dense {
    dtype: DType,
    shape: Shape,
    bytes: Vec<u8>,
}

impl Dense {
    /// Reads a contiguous tensor.
    pub(crate) fn read(
        k: &SimKernel<'_>,
        ptr: DevicePtr,
        dtype: DType,
        dims: &[usize],
    ) -> KernelResult<Dense> {
        let shape = Shape::new(dims).map_err(fault)?;
        let n = dtype
            .bytes_for(shape.n_elements())
            .ok_or_else(|| fault("the tensor ends inside a quantisation block"))?;
        Ok(Dense { dtype, shape, bytes: k.read(ptr, n)? })
    }

    /// Creates an operand from its bytes and a shape.
    pub(crate) fn of(dtype: DType, dims: &[usize], bytes: &[u8]) -> KernelResult<Dense> {
        Ok(Dense { dtype, shape: Shape::new(dims).map_err(fault)?, bytes: bytes.to_vec() })
    }

    /// Creates an operand from F32 values and a shape.
    pub(crate) fn f32(values: &[f32], dims: &[usize]) -> KernelResult<Dense> {
        let shape = Shape::new(dims).map_err(fault)?;
        Ok(Dense { dtype: DType::F32, shape, bytes: bytemuck::cast_slice(values).to_vec() })
    }

    pub(crate) fn input(&self) -> In<'_> {
        In { dtype: self.dtype, layout: Layout::contiguous(self.shape), bytes: &self.bytes }
    }
}

/// Reads the rows of an F32 view contiguously.
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

/// Runs a reference op with a single F32 output.
pub(crate) fn run_f32(op: &Op, inputs: &[&Dense], dims: &[usize]) -> KernelResult<Vec<f32>> {
    let inputs: Vec<In<'_>> = inputs.iter().map(|d| d.input()).collect();
    let shape = Shape::new(dims).map_err(fault)?;
    let mut bytes = vec![0; 4 * shape.n_elements()];
    let out = Out { ty: TensorType { dtype: DType::F32, shape }, bytes: &mut bytes };
    refrain_reference::run(op, &inputs, &mut [out]).map_err(fault)?;
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}
