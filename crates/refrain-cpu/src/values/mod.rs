//! Kernels of training steps: operands of F32, F16 or BF16 at any location.
//!
//! Trained weights are states and gradients are ordinary values, so nothing here depends on an operand's
//! location. Elements are widened to F32 chunk by chunk, computed in F32, and rounded once.

mod attention; // attention among rows
mod compile; // steps to value calls
mod matrix; // matrix products
mod optimise; // optimiser, norms of gradients
mod rows; // elementwise and row ops
mod spread; // parallel loops over chunks

pub(crate) use compile::value_call;

use crate::memory::{Carved, MAX_OUTS, carve};
use crate::pool::Pool;
use crate::simd::Level;
use crate::weights::{CpuStates, CpuWeights, WeightEntry};
use refrain_graph::{AdamW, Binary, Dropout, Gate, Reduce, Rope, RunError, SpanAttention, Unary, WeightId};
use refrain_tensor::{DType, Layout};
use spread::{ReadOperand, WriteOperand};
use std::ops::Range;

/// Location of an operand's buffer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ValueLoc {
    /// Range of 32-bit words.
    Arena(Range<usize>),
    /// Range of bytes.
    Control(Range<usize>),
    State(usize),
    Weight(WeightId),
}

/// An operand of a value call.
#[derive(Clone, Debug)]
pub(crate) struct ValueOperand {
    pub at: ValueLoc,
    pub dtype: DType,
    pub layout: Layout,
}

impl ValueOperand {
    pub(crate) fn len(&self) -> usize {
        self.layout.shape().n_elements()
    }

    pub(crate) fn dim(&self, axis: usize) -> usize {
        self.layout.shape().dims()[axis]
    }

    /// Elements per row.
    fn width(&self) -> usize {
        match self.layout.shape().rank() {
            0 => 1,
            _ => self.layout.shape().dim_back(0),
        }
    }

    fn is_float(&self) -> bool {
        matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16)
    }

    fn is_dense_float(&self) -> bool {
        self.is_float() && self.layout.is_contiguous()
    }

    /// Byte range of a contiguous operand in its buffer.
    fn span(&self) -> Range<usize> {
        let size = self.dtype.block_bytes();
        let start = self.layout.offset() * size;
        start..start + self.len() * size
    }
}

/// Operation of a value call.
#[derive(Clone, Debug)]
pub(crate) enum ValueOp {
    /// `batch` holds the first elements of both operands, for each product.
    MatMul {
        m: usize,
        k: usize,
        n: usize,
        batch: Vec<[usize; 2]>,
    },
    Gather,
    Scatter,
    RmsNorm {
        eps: f32,
    },
    AddRmsNorm {
        eps: f32,
    },
    RmsNormGrad {
        eps: f32,
    },
    Unary(Unary),
    UnaryGrad(Unary),
    /// `b` has the size of the output, or is one row of it.
    Binary(Binary),
    /// `b` has one element for each row of the output.
    BinaryColumn(Binary),
    Gate(Gate),
    GateGrad(Gate),
    Softmax,
    SoftmaxGrad,
    /// `table` is an index into the angle tables.
    Rope {
        rope: Rope,
        table: usize,
        back: bool,
    },
    CrossEntropy,
    Dropout(Dropout),
    Reduce {
        kind: Reduce,
        outer: usize,
        n: usize,
        inner: usize,
    },
    Copy,
    Cast,
    /// A quantised weight as floats.
    Decode,
    Accumulate,
    SumSquares,
    AdamW(AdamW),
    SpanAttention(SpanAttention),
    SpanAttentionGrad(SpanAttention),
}

/// An operation with its operands.
#[derive(Clone, Debug)]
pub(crate) struct ValueCall {
    pub op: ValueOp,
    pub ins: Vec<ValueOperand>,
    pub outs: Vec<ValueOperand>,
}

impl ValueCall {
    pub(crate) fn name(&self) -> &'static str {
        match &self.op {
            ValueOp::MatMul { .. } => "matmul",
            ValueOp::Gather => "gather",
            ValueOp::Scatter => "scatter_add_rows",
            ValueOp::RmsNorm { .. } => "rms_norm",
            ValueOp::AddRmsNorm { .. } => "add_rms_norm",
            ValueOp::RmsNormGrad { .. } => "rms_norm_grad",
            ValueOp::Unary(_) => "unary",
            ValueOp::UnaryGrad(_) => "unary_grad",
            ValueOp::Binary(_) | ValueOp::BinaryColumn(_) => "binary",
            ValueOp::Gate(_) => "gate",
            ValueOp::GateGrad(_) => "gate_grad",
            ValueOp::Softmax => "softmax",
            ValueOp::SoftmaxGrad => "softmax_grad",
            ValueOp::Rope { back: false, .. } => "rope",
            ValueOp::Rope { back: true, .. } => "rope_grad",
            ValueOp::CrossEntropy => "cross_entropy",
            ValueOp::Dropout(_) => "dropout",
            ValueOp::Reduce { .. } => "reduce",
            ValueOp::Copy => "copy",
            ValueOp::Cast => "cast",
            ValueOp::Decode => "decode",
            ValueOp::Accumulate => "accumulate",
            ValueOp::SumSquares => "sum_squares",
            ValueOp::AdamW(_) => "adamw",
            ValueOp::SpanAttention(_) => "span_attention",
            ValueOp::SpanAttentionGrad(_) => "span_attention_grad",
        }
    }
}

/// Everything that value calls access besides the arena.
pub(crate) struct Values<'a> {
    pub pool: &'a Pool,
    pub level: Level,
    pub weights: &'a CpuWeights,
    pub states: &'a mut CpuStates,
    pub control: &'a [u8],
    /// Cosines and sines, one table per entry.
    pub angles: &'a [Vec<f32>],
    /// At least [`ValueCall::scratch`] floats.
    pub scratch: &'a mut [f32],
    pub label: &'a str,
}

/// Operands of a call, as bytes.
struct Operands<'a> {
    weights: &'a CpuWeights,
    states: &'a CpuStates,
    control: &'a [u8],
    carved: Carved<'a>,
}

impl<'a> Operands<'a> {
    /// Whole buffer of an operand; `None` if an output overwrites it.
    fn buffer(&self, value: &ValueOperand) -> Option<&'a [u8]> {
        match &value.at {
            ValueLoc::Arena(words) => Some(bytemuck::cast_slice(self.carved.read(words)?)),
            ValueLoc::Control(bytes) => Some(&self.control[bytes.clone()]),
            ValueLoc::State(idx) => Some(self.states.get(*idx)),
            ValueLoc::Weight(id) => Some(match self.weights.entry(*id) {
                WeightEntry::Vector(values) => bytemuck::cast_slice(values),
                WeightEntry::Matrix { tensor, .. } => tensor.bytes().as_slice(),
            }),
        }
    }

    /// Elements of a contiguous operand; `None` if an output overwrites it.
    fn dense(&self, value: &ValueOperand) -> Option<&'a [u8]> {
        Some(&self.buffer(value)?[value.span()])
    }

    /// A contiguous operand of 32-bit integers.
    fn ints(&self, value: &ValueOperand) -> &'a [i32] {
        match self.dense(value) {
            Some(bytes) => bytemuck::cast_slice(bytes),
            None => unreachable!("no output overwrites integers"),
        }
    }

    /// A contiguous operand read in chunks of `chunk` elements. If an output overwrites it, the output still
    /// holds it.
    fn read(&self, call: &ValueCall, input: usize, chunk: usize) -> ReadOperand<'a> {
        let value = &call.ins[input];
        let held = call.outs.iter().position(|out| out.at == value.at).unwrap_or(usize::MAX);
        ReadOperand { dtype: value.dtype, bytes: self.dense(value), held, chunk }
    }

    /// The outputs, as bytes, with their chunk sizes.
    fn writes<'b, const N: usize>(
        outs: &'b mut [&'a mut [f32]],
        call: &ValueCall,
        chunks: [usize; N],
    ) -> [WriteOperand<'b>; N] {
        let mut outs = outs.iter_mut().zip(&call.outs);
        chunks.map(|chunk| match outs.next() {
            Some((words, value)) => {
                let bytes = &mut bytemuck::cast_slice_mut::<f32, u8>(words)[value.span()];
                WriteOperand { dtype: value.dtype, bytes, chunk }
            }
            None => unreachable!("a call writes each of its outputs"),
        })
    }
}

impl Values<'_> {
    /// Runs a call.
    pub(crate) fn run(&mut self, call: &ValueCall, arena: &mut [f32]) -> Result<(), RunError> {
        match &call.op {
            ValueOp::MatMul { m, k, n, batch } => self.matmul(call, [*m, *k, *n], batch, arena),
            ValueOp::Gather => self.gather(call, arena)?,
            ValueOp::Scatter => self.scatter(call, arena)?,
            ValueOp::RmsNorm { eps } => self.rms_norm(call, *eps, arena),
            ValueOp::AddRmsNorm { eps } => self.add_rms_norm(call, *eps, arena),
            ValueOp::RmsNormGrad { eps } => self.rms_norm_grad(call, *eps, arena),
            ValueOp::Unary(f) => self.unary(call, *f, arena),
            ValueOp::UnaryGrad(f) => self.unary_grad(call, *f, arena),
            ValueOp::Binary(f) => self.binary(call, *f, arena),
            ValueOp::BinaryColumn(f) => self.binary_column(call, *f, arena),
            ValueOp::Gate(f) => self.gate(call, *f, arena),
            ValueOp::GateGrad(f) => self.gate_grad(call, *f, arena),
            ValueOp::Softmax => self.softmax(call, arena),
            ValueOp::SoftmaxGrad => self.softmax_grad(call, arena),
            ValueOp::Rope { rope, table, .. } => self.rope(call, rope, *table, arena),
            ValueOp::CrossEntropy => self.cross_entropy(call, arena)?,
            ValueOp::Dropout(dropout) => self.dropout(call, dropout, arena),
            ValueOp::Reduce { kind, outer, n, inner } => {
                self.reduce(call, *kind, [*outer, *n, *inner], arena);
            }
            ValueOp::Copy => self.copy(call, arena),
            ValueOp::Cast => self.cast(call, arena),
            ValueOp::Decode => self.decode(call, arena),
            ValueOp::Accumulate => self.accumulate(call, arena),
            ValueOp::SumSquares => self.sum_squares(call, arena),
            ValueOp::AdamW(adam) => self.adamw(call, adam, arena),
            ValueOp::SpanAttention(attention) => self.span_attention(call, attention, arena)?,
            ValueOp::SpanAttentionGrad(attention) => self.span_attention_grad(call, attention, arena)?,
        }
        Ok(())
    }

    /// Borrows the operands and the tools of a call at the same time.
    fn open<'b>(&'b mut self, outs: &[ValueOperand], arena: &'b mut [f32]) -> (Operands<'b>, Tools<'b>) {
        let mut ranges: [Range<usize>; MAX_OUTS] = std::array::from_fn(|_| 0..0);
        for (range, out) in ranges.iter_mut().zip(outs) {
            if let ValueLoc::Arena(words) = &out.at {
                *range = words.clone();
            }
        }
        let carved = carve(arena, &ranges[..outs.len()]);
        let operands = Operands { weights: self.weights, states: self.states, control: self.control, carved };
        let tools = Tools {
            pool: self.pool,
            level: self.level,
            angles: self.angles,
            scratch: self.scratch,
            label: self.label,
        };
        (operands, tools)
    }
}

/// Pool, scratch and other context of a kernel.
struct Tools<'a> {
    pool: &'a Pool,
    level: Level,
    angles: &'a [Vec<f32>],
    scratch: &'a mut [f32],
    label: &'a str,
}
