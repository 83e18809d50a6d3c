//! Kernels whose operands may lie anywhere and be F32, F16 or BF16: those of training steps.
//!
//! Weights that are trained are states, and gradients are values like others, so nothing here depends on where an operand
//! lies. Elements are widened to F32 a piece at a time, computed there, and rounded once.

mod attention; // attention among rows
mod compile; // steps into calls
mod matrix; // products
mod optimise; // the optimiser and what it needs
mod rows; // ops on elements and rows
mod spread; // pieces of operands, over all threads

pub(crate) use compile::value_call;

use crate::memory::{Carved, MAX_OUTS, carve};
use crate::pool::Pool;
use crate::simd::Level;
use crate::weights::{CpuStates, CpuWeights, WeightEntry};
use refrain_graph::{AdamW, Binary, Dropout, Gate, Reduce, Rope, RunError, SpanAttention, Unary, WeightId};
use refrain_tensor::{DType, Layout};
use spread::{ReadOperand, WriteOperand};
use std::ops::Range;

/// Where the bytes of an operand's buffer lie.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ValueLoc {
    /// 32-bit words.
    Arena(Range<usize>),
    /// Bytes.
    Control(Range<usize>),
    State(usize),
    Weight(WeightId),
}

/// An operand.
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

    /// Elements of a row.
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

    /// The bytes of a dense operand in its buffer.
    fn span(&self) -> Range<usize> {
        let size = self.dtype.block_bytes();
        let start = self.layout.offset() * size;
        start..start + self.len() * size
    }
}

/// What a call computes.
#[derive(Clone, Debug)]
pub(crate) enum ValueOp {
    /// For each product of a batch, where its operands begin.
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
    /// `b` is as long as the output, or a row of it.
    Binary(Binary),
    Gate(Gate),
    GateGrad(Gate),
    Softmax,
    SoftmaxGrad,
    /// `table` counts the tables of angles.
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

/// An op with its operands.
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
            ValueOp::Binary(_) => "binary",
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

/// What a call may touch.
pub(crate) struct Values<'a> {
    pub pool: &'a Pool,
    pub level: Level,
    pub weights: &'a CpuWeights,
    pub states: &'a mut CpuStates,
    pub control: &'a [u8],
    /// Cosines and sines, one table after another.
    pub angles: &'a [Vec<f32>],
    /// As many floats as [`ValueCall::scratch`] asks for.
    pub scratch: &'a mut [f32],
    pub label: &'a str,
}

/// The operands of a call, as bytes.
struct Operands<'a> {
    weights: &'a CpuWeights,
    states: &'a CpuStates,
    control: &'a [u8],
    carved: Carved<'a>,
}

impl<'a> Operands<'a> {
    /// The whole buffer of an operand; `None` when an output has its place.
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

    /// The elements of a dense operand; `None` when an output has its place.
    fn dense(&self, value: &ValueOperand) -> Option<&'a [u8]> {
        Some(&self.buffer(value)?[value.span()])
    }

    /// 32-bit integers.
    fn ints(&self, value: &ValueOperand) -> &'a [i32] {
        match self.dense(value) {
            Some(bytes) => bytemuck::cast_slice(bytes),
            None => unreachable!("no output takes the place of integers"),
        }
    }

    /// A dense operand that is read `chunk` elements at a time. Where an output has its place, it holds what the output
    /// does.
    fn read(&self, call: &ValueCall, input: usize, chunk: usize) -> ReadOperand<'a> {
        let value = &call.ins[input];
        let held = call.outs.iter().position(|out| out.at == value.at).unwrap_or(usize::MAX);
        ReadOperand { dtype: value.dtype, bytes: self.dense(value), held, chunk }
    }

    /// The outputs, as bytes, each with its chunk.
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
            None => unreachable!("a call has as many outputs as it writes"),
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

    /// The operands, the scratch and what else the kernels of a call use side by side.
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

/// What kernels use besides their operands.
struct Tools<'a> {
    pool: &'a Pool,
    level: Level,
    angles: &'a [Vec<f32>],
    scratch: &'a mut [f32],
    label: &'a str,
}
