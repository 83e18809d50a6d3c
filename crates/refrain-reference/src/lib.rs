//! Reference implementation of every op.
//!
//! Everything is decoded to f32, computed one element at a time with sums in f64, and rounded once to the
//! output's dtype. It is slow and easy to check by eye. Every fast implementation is tested against it, and
//! the simulated device runs it.
//!
//! Invariant: clarity before speed; nothing here is optimised.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod adamw;
mod attention;
mod dense;
mod elementwise;
pub mod exact;
mod lora;
mod moe;
mod philox;
mod recurrent;
mod sample;

pub use dense::{In, Out, ReferenceError};
pub use moe::route_row;
pub use philox::{philox4x32, uniform};
pub use sample::{Sampling, apply_bias_and_penalties, apply_mask, most_probable, sample_row};

use refrain_graph::{HostBuf, Op, TrainOp};
use refrain_tensor::DType;

/// Runs an op.
///
/// `inputs` are the node's inputs, except those that an output updates in place: the cache that `KvAppend`
/// changes is `outputs[0]`, which must hold its previous contents before the call.
pub fn run(op: &Op, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    match op {
        Op::View(_) => {
            Err(ReferenceError::Unsupported { op: op.name(), because: "a view is not run".into() })
        }
        Op::Copy => dense::copy(&inputs[0], &mut outputs[0]),
        Op::Cast(DType::I32) => exact::run(op, inputs, outputs),
        Op::Cast(_) if inputs[0].dtype == DType::I32 => exact::run(op, inputs, outputs),
        Op::Cast(_) => outputs[0].store(&inputs[0].to_f32()?),
        Op::Unary(f) => elementwise::unary(*f, &inputs[0], &mut outputs[0]),
        Op::Binary(f) => elementwise::binary(*f, &inputs[0], &inputs[1], &mut outputs[0]),
        Op::Reduce { kind, axis } if axis + 1 == inputs[0].layout.shape().rank() => {
            elementwise::reduce(*kind, &inputs[0], &mut outputs[0])
        }
        Op::Train(TrainOp::AdamW(adam)) => adamw::adamw(adam, inputs, outputs),
        Op::Reduce { .. }
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::ScatterAddRows { .. }
        | Op::SpanAttention(_)
        | Op::Train(_) => exact::run(op, inputs, outputs),
        Op::Moe(op) => moe::run(op, inputs, outputs),
        Op::Lora(op) => lora::run(*op, inputs, &mut outputs[0]),
        Op::Softmax => elementwise::softmax(&inputs[0], &mut outputs[0]),
        Op::MatMul => dense::matmul(&inputs[0], &inputs[1], &mut outputs[0]),
        Op::GatherRows(_) => dense::gather_rows(&inputs[0], &inputs[1], &mut outputs[0]),
        Op::RmsNorm { eps } => {
            let y = elementwise::rms_norm(&inputs[0].to_f32()?, &inputs[1].to_f32()?, *eps);
            outputs[0].store(&y)
        }
        Op::AddRmsNorm { eps } => {
            let (a, b) = (inputs[0].to_f32()?, inputs[1].to_f32()?);
            let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            outputs[0].store(&sum)?;
            // The norm is of the rounded sum, as if the two ops were separate nodes.
            let layout = refrain_tensor::Layout::contiguous(outputs[0].ty.shape);
            let rounded = In { dtype: outputs[0].ty.dtype, layout, bytes: outputs[0].bytes }.to_f32()?;
            outputs[1].store(&elementwise::rms_norm(&rounded, &inputs[2].to_f32()?, *eps))
        }
        Op::Gate(kind) => elementwise::gate(*kind, &inputs[0], &inputs[1], &mut outputs[0]),
        Op::Rope(rope) => attention::rope(rope, inputs, &mut outputs[0]),
        Op::KvAppend => attention::kv_append(inputs, &mut outputs[0]),
        Op::KvAppendBytes => attention::kv_append_bytes(inputs, outputs),
        Op::Attention(attention) => attention::attention(attention, inputs, &mut outputs[0]),
        Op::Recurrent(op) => recurrent::recurrent(op, inputs, outputs),
        Op::Sample(op) => sample::sample(*op, inputs, outputs),
        Op::Accumulate => elementwise::accumulate(&inputs[0], &mut outputs[0]),
        Op::HostCall(call) => {
            let dense: Vec<Vec<u8>> = inputs.iter().map(In::to_dense).collect::<Result<_, _>>()?;
            let bufs: Vec<HostBuf<'_>> =
                inputs.iter().zip(&dense).map(|(i, bytes)| HostBuf { ty: i.ty(), bytes }).collect();
            let mut outs: Vec<&mut [u8]> = outputs.iter_mut().map(|o| &mut *o.bytes).collect();
            call.function.call(&bufs, &mut outs).map_err(ReferenceError::Host)
        }
    }
}
