//! Ops of low-rank adapters (LoRA) in steps whose sequences have different ones.
//!
//! The factors of all adapters are stacked. A row belongs to a sequence, and each sequence has one adapter or
//! none (a negative id). A row without an adapter costs no read of a factor. Kernels that cannot report an
//! error treat a sequence or an adapter out of range as none.

use crate::infer::{InferError, RuleInputs};
use crate::op::{Indexing, TensorType};
use refrain_tensor::DType;

/// An op of low-rank adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraOp {
    /// `x[n, d]` F32, `a[n_adapters, r, d]` floats, `seqs[n]` I32, `adapters[n_seqs]` I32 -> `[n, r]` F32: the product of
    /// each row with the matrix of its adapter. Zeros for a row without one.
    Down,
    /// `y[n, f]` F32, `t[n, r]` F32, `b[n_adapters, r, f]` floats, `seqs[n]` I32, `adapters[n_seqs]` I32 -> `[n, f]`: `y`
    /// plus the product of each row of `t` with the matrix of its adapter. A row without an adapter keeps its bits.
    /// The matrix is transposed: it is short and wide, and kernels compute neighbouring columns together.
    Up,
}

impl LoraOp {
    /// Name of the op, for messages and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LoraOp::Down => "lora_down",
            LoraOp::Up => "lora_up",
        }
    }

    /// Input with the stacked factors. The sequences of the rows follow it, then the adapters of the sequences.
    #[must_use]
    pub fn factors(self) -> usize {
        match self {
            LoraOp::Down => 1,
            LoraOp::Up => 2,
        }
    }

    pub(crate) fn indexing(self) -> Vec<Indexing> {
        let factors = self.factors();
        let rows = |ids, table| Indexing::Rows { ids, table, axis: 0, strict: true };
        vec![rows(factors + 1, factors + 2), rows(factors + 2, factors)]
    }

    pub(crate) fn infer(self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        let factors = self.factors();
        rule.arity(factors + 3)?;
        for index in 0..factors {
            rule.rank(index, 2)?;
            rule.require(index, rule.inputs[index].dtype == DType::F32, "F32")?;
        }
        let n = rule.rank(0, 2)?[0];
        let stack = rule.rank(factors, 3)?;
        rule.float(factors)?;
        let (inner, [n_in, n_out]) = match self {
            LoraOp::Down => (0, [stack[2], stack[1]]),
            LoraOp::Up => (1, [stack[1], stack[2]]),
        };
        rule.require(inner, rule.inputs[inner].shape.dims() == [n, n_in], format!("[{n}, {n_in}]"))?;
        rule.exact(factors + 1, DType::I32, &[n])?;
        rule.rank(factors + 2, 1)?;
        rule.require(factors + 2, rule.inputs[factors + 2].dtype == DType::I32, "I32")?;
        let out = [n, n_out];
        if self == LoraOp::Up {
            rule.require(0, rule.inputs[0].shape.dims() == out, format!("{out:?}"))?;
        }
        Ok(vec![TensorType { dtype: DType::F32, shape: rule.shape(&out)? }])
    }
}
