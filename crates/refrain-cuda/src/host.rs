//! Host steps between segments, and operands in host memory.

use std::borrow::Cow;

use refrain_driver::{Buf, Stream};
use refrain_graph::{HostBuf, Op, Operand, Place, Plan, Step};

use crate::error::CudaError;
use crate::resident::{HostModel, ResidentMemory};

/// Runs one host step: copies its inputs from the device and its outputs to where the next segment reads
/// them.
pub(crate) fn run(
    step: &Step,
    plan: &Plan,
    resident: &mut ResidentMemory,
    model: &HostModel,
    stream: &mut Stream,
    control: &[u8],
) -> Result<(), CudaError> {
    let Op::HostCall(call) = &step.op else { return Ok(()) };
    let mut inputs = Vec::with_capacity(step.inputs.len());
    for operand in &step.inputs {
        inputs.push(dense_bytes(step, plan, (resident, model, control), stream, operand)?);
    }
    let ins: Vec<HostBuf<'_>> =
        step.inputs.iter().zip(&inputs).map(|(operand, bytes)| HostBuf { ty: operand.ty(), bytes }).collect();
    let mut outputs: Vec<Vec<u8>> =
        step.outputs.iter().map(|o| vec![0; plan.buffer(o.buffer).bytes]).collect();
    let mut outs: Vec<&mut [u8]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    let failed = |because: String| CudaError::Host { label: step.label.clone(), because };
    call.function.call(&ins, &mut outs).map_err(|e| failed(e.to_string()))?;
    for (operand, bytes) in step.outputs.iter().zip(&outputs) {
        let sent = resident
            .buffer(plan, operand.buffer)
            .and_then(|buf| stream.upload_ahead(&mut resident.lease, buf, bytes));
        sent.map_err(CudaError::driver(&step.label))?;
    }
    Ok(())
}

/// Contiguous elements of an output, read once the step is done; `whole` is the output's buffer.
pub(crate) fn output_bytes(
    plan: &Plan,
    resident: &ResidentMemory,
    stream: &mut Stream,
    operand: &Operand,
    whole: Buf,
) -> Result<Vec<u8>, CudaError> {
    let unfit = || CudaError::Mismatch {
        what: "outputs",
        because: format!("{} extends past the end of its buffer", operand.ty()),
    };
    if resident.is_packed(plan, operand) {
        let because = format!("{} is a packed weight, which cannot be read", operand.ty());
        return Err(CudaError::Mismatch { what: "outputs", because });
    }
    let (layout, dtype) = (&operand.layout, resident.dtype(plan, operand));
    let mut fetch = |start: usize, end: usize| {
        let mut bytes = vec![0; end.saturating_sub(start)];
        stream.download(&resident.lease, whole.slice(start as u64, bytes.len() as u64)?, &mut bytes)?;
        Ok(bytes)
    };
    if layout.is_contiguous() {
        let start = dtype.bytes_for(layout.offset()).ok_or_else(unfit)?;
        let len = dtype.bytes_for(layout.shape().n_elements()).ok_or_else(unfit)?;
        return fetch(start, start + len).map_err(CudaError::driver("reading results"));
    }
    let size = dtype.block_bytes();
    let bytes = fetch(0, layout.end() * size).map_err(CudaError::driver("reading results"))?;
    let mut out = Vec::with_capacity(layout.shape().n_elements() * size);
    for idx in layout.indices() {
        out.extend_from_slice(bytes.get(idx * size..(idx + 1) * size).ok_or_else(unfit)?);
    }
    Ok(out)
}

/// Contiguous elements of an operand. Borrowed if the host has them in this layout, since a table may be
/// large.
fn dense_bytes<'h>(
    step: &Step,
    plan: &Plan,
    (resident, model, control): (&ResidentMemory, &'h HostModel, &'h [u8]),
    stream: &mut Stream,
    operand: &Operand,
) -> Result<Cow<'h, [u8]>, CudaError> {
    let buffer = plan.buffer(operand.buffer);
    let bytes: Cow<'h, [u8]> = match buffer.place {
        Place::Control { offset, .. } => {
            Cow::Borrowed(control.get(offset..offset + buffer.bytes).unwrap_or_default())
        }
        // As in the file: weights never change, and a table may be too large for the device.
        Place::Weight(id) => Cow::Borrowed(model.tensors.get(id.idx()).map_or(&[], |t| t.bytes().as_slice())),
        Place::Arena { .. } | Place::State(_) => {
            let mut copy = vec![0; buffer.bytes];
            let read = resident
                .buffer(plan, operand.buffer)
                .and_then(|buf| stream.download(&resident.lease, buf, &mut copy));
            read.map_err(CudaError::driver(&step.label))?;
            Cow::Owned(copy)
        }
    };
    let (layout, dtype) = (&operand.layout, operand.dtype);
    let n_bytes = bytes.len();
    let unfit = || CudaError::Host {
        label: step.label.clone(),
        because: format!("an input {} extends past the end of its {n_bytes} bytes", operand.ty()),
    };
    if layout.is_contiguous() {
        let (start, len) = (dtype.bytes_for(layout.offset()), dtype.bytes_for(layout.shape().n_elements()));
        let range = start.zip(len).map(|(start, len)| start..start + len).ok_or_else(unfit)?;
        return match bytes {
            Cow::Borrowed(bytes) => bytes.get(range).map(Cow::Borrowed).ok_or_else(unfit),
            Cow::Owned(bytes) => bytes.get(range).map(|part| Cow::Owned(part.to_vec())).ok_or_else(unfit),
        };
    }
    let size = dtype.block_bytes();
    let mut out = Vec::with_capacity(layout.shape().n_elements() * size);
    for idx in layout.indices() {
        out.extend_from_slice(bytes.get(idx * size..(idx + 1) * size).ok_or_else(unfit)?);
    }
    Ok(Cow::Owned(out))
}
