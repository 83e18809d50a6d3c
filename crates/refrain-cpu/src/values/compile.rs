//! Compilation of a plan's steps into value calls.

use super::attention::SpanAttentionSizes;
use super::matrix::factor;
use super::spread::{CHUNK, chunk_of_rows, scratch_floats};
use super::{ValueCall, ValueLoc, ValueOp, ValueOperand};
use crate::compile::AngleTable;
use crate::simd::gemm_scratch;

use refrain_graph::{Op, Operand, Place, Plan, Rope, TrainOp, Weight};
use refrain_tensor::{DType, Shape};

/// Rows per partial sum of a sum over rows.
pub(super) const ROW_BLOCK: usize = 16;
/// Elements per partial sum of squares.
pub(super) const SQUARES: usize = 4096;

/// Returns the call for a step; `None` if no kernel supports its layouts or dtypes.
pub(crate) fn value_call(
    plan: &Plan,
    weights: &[Weight],
    step_idx: usize,
    tables: &mut Vec<AngleTable>,
) -> Option<ValueCall> {
    let step = &plan.steps()[step_idx];
    let value = |operand: &Operand| value(plan, weights, operand);
    let mut ins: Vec<ValueOperand> = step.inputs.iter().map(value).collect();
    let outs: Vec<ValueOperand> = step.outputs.iter().map(value).collect();
    if ins.iter().chain(&outs).any(|value| value.len() == 0) {
        return None;
    }
    let floats = |values: &[ValueOperand]| values.iter().all(ValueOperand::is_dense_float);
    let is_arena = |value: &ValueOperand| matches!(value.at, ValueLoc::Arena(_));
    // Index inputs in the control block were checked before the step; others are checked on use.
    let is_ints = |value: &ValueOperand| value.dtype == DType::I32 && value.layout.is_contiguous();
    let in_arena = outs.iter().all(|out| is_arena(out) && out.layout.is_contiguous());
    let op = match &step.op {
        Op::Accumulate => floats(&ins).then_some(ValueOp::Accumulate),
        Op::Train(TrainOp::AdamW(adam)) => {
            let are_states = outs.iter().all(|out| matches!(out.at, ValueLoc::State(_)));
            let is_held = (0..adam.decays.len()).all(|tensor| {
                let slots = adam.slots(tensor);
                let of_tensor = [slots.grad, slots.weight, slots.m, slots.v].into_iter().chain(slots.master);
                let is_computed = matches!(ins[slots.grad].at, ValueLoc::Arena(_) | ValueLoc::Control(_));
                of_tensor.into_iter().all(|i| ins[i].is_dense_float()) && (adam.clears || is_computed)
            });
            (are_states && is_held).then(|| ValueOp::AdamW(adam.clone()))
        }
        _ if !in_arena => None,
        Op::MatMul => matmul(&mut ins, &outs[0]),
        Op::GatherRows(_) => (ins[0].is_dense_float() && is_ints(&ins[1])).then_some(ValueOp::Gather),
        Op::ScatterAddRows { .. } => {
            (is_ints(&ins[0]) && ins[1].is_dense_float()).then_some(ValueOp::Scatter)
        }
        Op::RmsNorm { eps } => floats(&ins).then_some(ValueOp::RmsNorm { eps: *eps }),
        Op::AddRmsNorm { eps } => floats(&ins).then_some(ValueOp::AddRmsNorm { eps: *eps }),
        Op::Unary(f) => floats(&ins).then_some(ValueOp::Unary(*f)),
        Op::Binary(f) if is_column(&ins, &outs[0]) => floats(&ins).then_some(ValueOp::BinaryColumn(*f)),
        Op::Binary(f) => (floats(&ins) && is_row(&ins, &outs[0])).then_some(ValueOp::Binary(*f)),
        Op::Gate(f) => floats(&ins).then_some(ValueOp::Gate(*f)),
        Op::Softmax => floats(&ins).then_some(ValueOp::Softmax),
        Op::Rope(rope) => turn(rope, &ins, tables, false),
        Op::Reduce { kind, axis } => floats(&ins).then(|| {
            let shape = ins[0].layout.shape();
            let of = |dims: &[usize]| dims.iter().product();
            let (outer, inner) = (of(&shape.dims()[..*axis]), of(&shape.dims()[axis + 1..]));
            ValueOp::Reduce { kind: *kind, outer, n: shape.dims()[*axis], inner }
        }),
        Op::Copy => (ins[0].dtype.block_len() == 1).then_some(ValueOp::Copy),
        Op::Cast(_) if ins[0].dtype.is_quantized() => {
            let is_whole = ins[0].layout.is_contiguous() && ins[0].layout.offset() == 0;
            let is_blocks = CHUNK.is_multiple_of(ins[0].dtype.block_len());
            (is_whole && is_blocks && outs[0].is_float()).then_some(ValueOp::Decode)
        }
        Op::Cast(_) => (floats(&ins) && outs[0].is_float()).then_some(ValueOp::Cast),
        Op::SpanAttention(attention) => {
            let is_read = floats(&ins[..3]) && is_ints(&ins[3]);
            is_read.then_some(ValueOp::SpanAttention(*attention))
        }
        Op::Train(train) => match train {
            TrainOp::UnaryGrad(f) => floats(&ins).then_some(ValueOp::UnaryGrad(*f)),
            TrainOp::GateGrad(f) => floats(&ins).then_some(ValueOp::GateGrad(*f)),
            TrainOp::SoftmaxGrad => floats(&ins).then_some(ValueOp::SoftmaxGrad),
            // `join_sums` does not run for this backend.
            TrainOp::RmsNormGrad { adds: true, .. } | TrainOp::AddProduct => None,
            TrainOp::RmsNormGrad { eps, adds: false } => {
                floats(&ins).then_some(ValueOp::RmsNormGrad { eps: *eps })
            }
            TrainOp::RopeGrad(rope) => turn(rope, &ins, tables, true),
            TrainOp::SpanAttentionGrad(attention) => {
                let is_read = floats(&ins[..4]) && is_ints(&ins[4]) && floats(&ins[5..]);
                is_read.then_some(ValueOp::SpanAttentionGrad(*attention))
            }
            TrainOp::CrossEntropy => {
                let is_read = ins[0].is_dense_float() && is_ints(&ins[1]) && ins[2].is_dense_float();
                is_read.then_some(ValueOp::CrossEntropy)
            }
            TrainOp::Dropout(dropout) => {
                let is_read = ins[0].is_dense_float() && ins[1].layout.is_contiguous();
                is_read.then_some(ValueOp::Dropout(*dropout))
            }
            TrainOp::SumSquares => floats(&ins).then_some(ValueOp::SumSquares),
            TrainOp::AdamW(_) => None,
        },
        Op::View(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::Moe(_)
        | Op::Lora(_)
        | Op::KvAppend
        | Op::KvAppendBytes
        | Op::Attention(_)
        | Op::Recurrent(_)
        | Op::Sample(_)
        | Op::HostCall(_) => None,
    };
    Some(ValueCall { op: op?, ins, outs })
}

fn value(plan: &Plan, weights: &[Weight], operand: &Operand) -> ValueOperand {
    let buffer = plan.buffer(operand.buffer);
    let at = match buffer.place {
        Place::Arena { offset } => ValueLoc::Arena(offset / 4..(offset + buffer.bytes).div_ceil(4)),
        Place::Control { offset, .. } => ValueLoc::Control(offset..offset + buffer.bytes),
        Place::State(id) => ValueLoc::State(id.idx()),
        Place::Weight(id) => ValueLoc::Weight(id),
    };
    let dtype = match buffer.place {
        // Vectors were converted to F32 when loaded.
        Place::Weight(id) if weights[id.idx()].ty.shape.rank() < 2 => DType::F32,
        Place::Weight(_) | Place::Arena { .. } | Place::Control { .. } | Place::State(_) => operand.dtype,
    };
    ValueOperand { at, dtype, layout: operand.layout }
}

fn matmul(ins: &mut [ValueOperand], out: &ValueOperand) -> Option<ValueOp> {
    let (a, b) = (&ins[0], &ins[1]);
    let (m, k, n) =
        (a.layout.shape().dim_back(1), a.layout.shape().dim_back(0), b.layout.shape().dim_back(0));
    // A quantised weight that is not transposed: for the gradient of its activations.
    let is_decoded =
        b.dtype.is_quantized() && b.layout.is_contiguous() && n.is_multiple_of(b.dtype.block_len());
    if !a.is_float() || !out.is_float() || !(b.is_float() || (is_decoded && b.layout.offset() == 0)) {
        return None;
    }
    // With a single right operand, the outer dimensions of the left one are additional rows.
    let n_rows = a.len() / k.max(1);
    if b.layout.shape().rank() == 2
        && k > 0
        && let Ok(flat) = Shape::new(&[n_rows, k])
        && let Ok(layout) = a.layout.reshape(flat)
    {
        ins[0].layout = layout;
        let batch = vec![[layout.offset(), ins[1].layout.offset()]];
        return fits(ins, n_rows, k, n).then_some(ValueOp::MatMul { m: n_rows, k, n, batch });
    }
    let shape = out.layout.shape();
    let outer = shape.dims()[..shape.rank() - 2].to_vec();
    let starts = |value: &ValueOperand| -> Option<Vec<usize>> {
        let rank = value.layout.shape().rank();
        // First element of each matrix, including broadcast ones.
        let mut first = value.layout;
        for axis in [rank - 2, rank - 1] {
            first = first.slice(axis, 0, 1).ok()?;
        }
        let wide = Shape::new(&[&outer[..], &[1, 1]].concat()).ok()?;
        Some(first.broadcast_to(wide).ok()?.indices().collect())
    };
    let batch = starts(a)?.into_iter().zip(starts(b)?).map(|(a, b)| [a, b]).collect();
    fits(ins, m, k, n).then_some(ValueOp::MatMul { m, k, n, batch })
}

/// Whether rows or columns of both operands are contiguous.
fn fits(ins: &[ValueOperand], m: usize, k: usize, n: usize) -> bool {
    let side_by_side = |value: &ValueOperand, len: usize, turned: usize| {
        let x = factor(value, &[], 0, [len, k], turned);
        x.stride == 1 || x.k_stride == 1 || len <= 1 || k <= 1
    };
    side_by_side(&ins[0], m, 0) && side_by_side(&ins[1], n, 1)
}

/// Whether the second operand has the size of the output, or is one row of it.
fn is_row(ins: &[ValueOperand], out: &ValueOperand) -> bool {
    let row = ins[1].len();
    let is_row = ins[1].layout.shape().dim_back(0) == row && out.layout.shape().dim_back(0) == row;
    ins[0].len() == out.len() && (row == out.len() || (is_row && row > 0))
}

/// Whether the second operand has one element for each row of the output.
fn is_column(ins: &[ValueOperand], out: &ValueOperand) -> bool {
    let (a, b, y) = (ins[0].layout.shape(), ins[1].layout.shape(), out.layout.shape());
    let rank = y.rank();
    rank > 0
        && a == y
        && b.rank() == rank
        && b.dim_back(0) == 1
        && y.dim_back(0) > 1
        && b.dims()[..rank - 1] == y.dims()[..rank - 1]
}

fn turn(rope: &Rope, ins: &[ValueOperand], tables: &mut Vec<AngleTable>, back: bool) -> Option<ValueOp> {
    let (ValueLoc::Control(bytes), ValueLoc::Weight(inv_freq)) = (&ins[1].at, &ins[2].at) else {
        return None;
    };
    let is_whole = ins[1].layout.is_contiguous() && ins[2].layout.is_contiguous();
    if !ins[0].is_dense_float() || !is_whole || ins[2].layout.shape().rank() != 1 {
        return None;
    }
    let start = bytes.start / 4 + ins[1].layout.offset();
    let table = AngleTable {
        inv_freq: *inv_freq,
        positions: start..start + ins[1].len(),
        magnitude: rope.magnitude,
        n_dims: rope.n_dims,
        back,
    };
    let table = AngleTable::find(tables, table);
    Some(ValueOp::Rope { rope: *rope, table, back })
}

impl ValueCall {
    /// Floats of scratch that the call needs with this many threads.
    pub(crate) fn scratch(&self, n_threads: usize) -> usize {
        let d = self.ins.first().map_or(1, ValueOperand::width);
        let rows = chunk_of_rows(d);
        match &self.op {
            ValueOp::MatMul { k, n, .. } => gemm_scratch(*k, *n, n_threads),
            ValueOp::Gather => scratch_floats(&[rows], n_threads),
            ValueOp::Scatter => scratch_floats(&[super::rows::scatter_chunk(self.ins[1].width())], n_threads),
            ValueOp::RmsNorm { .. } => d + scratch_floats(&[rows, rows], n_threads),
            ValueOp::AddRmsNorm { .. } => d + scratch_floats(&[rows; 4], n_threads),
            ValueOp::RmsNormGrad { .. } => {
                let n_blocks = (self.ins[0].len() / d.max(1)).div_ceil(ROW_BLOCK);
                d + n_blocks * d + scratch_floats(&[ROW_BLOCK * d; 4], n_threads)
            }
            ValueOp::Decode => scratch_floats(&[CHUNK], n_threads),
            ValueOp::Unary(_) | ValueOp::Cast | ValueOp::Dropout(_) => scratch_floats(&[CHUNK; 2], n_threads),
            ValueOp::UnaryGrad(_) | ValueOp::Gate(_) | ValueOp::Accumulate => {
                scratch_floats(&[CHUNK; 3], n_threads)
            }
            ValueOp::GateGrad(_) => scratch_floats(&[CHUNK; 5], n_threads),
            ValueOp::Binary(_) => {
                let row = self.ins[1].len();
                let is_row = row < self.outs[0].len();
                let chunk = if is_row { chunk_of_rows(row) } else { CHUNK };
                if is_row {
                    row + scratch_floats(&[chunk; 2], n_threads)
                } else {
                    scratch_floats(&[chunk; 3], n_threads)
                }
            }
            ValueOp::BinaryColumn(_) => {
                let n = self.ins[1].len();
                let chunk = chunk_of_rows(self.outs[0].width());
                n + scratch_floats(&[chunk; 2], n_threads)
            }
            ValueOp::Softmax => scratch_floats(&[rows; 2], n_threads),
            ValueOp::SoftmaxGrad => scratch_floats(&[rows; 3], n_threads),
            ValueOp::Rope { .. } => {
                let x = &self.ins[0];
                scratch_floats(&[chunk_of_rows(x.dim(1) * x.dim(2)); 2], n_threads)
            }
            ValueOp::CrossEntropy => scratch_floats(&[rows, rows, rows / d.max(1)], n_threads),
            ValueOp::Reduce { n, inner: 1, .. } => {
                scratch_floats(&[chunk_of_rows(*n), chunk_of_rows(*n) / (*n).max(1)], n_threads)
            }
            ValueOp::Reduce { outer, n, inner, .. } => {
                outer * n.div_ceil(ROW_BLOCK) * inner + scratch_floats(&[*inner, *inner], n_threads)
            }
            ValueOp::Copy => 0,
            ValueOp::SumSquares => {
                let n_parts = |x: &ValueOperand| x.len().div_ceil(SQUARES);
                self.ins.iter().map(n_parts).max().unwrap_or(0) + scratch_floats(&[SQUARES, 1], n_threads)
            }
            ValueOp::AdamW(_) => scratch_floats(&[CHUNK; 9], n_threads),
            ValueOp::SpanAttention(_) => {
                SpanAttentionSizes::of(&self.ins[0], &self.ins[1]).forward(n_threads)
            }
            ValueOp::SpanAttentionGrad(_) => {
                SpanAttentionSizes::of(&self.ins[1], &self.ins[2]).backward(n_threads)
            }
        }
    }
}
