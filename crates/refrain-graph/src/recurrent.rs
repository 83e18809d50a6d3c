//! Ops of recurrent layers, whose state is in slots.
//!
//! A slot state is `[n_slots, ..]`. Each sequence has two slots, its two *versions*, in a row of
//! `slots[n_seqs, 2]`. The rows of a sequence are contiguous in a step, in the order of their positions, and
//! sequences are in the order of their numbers. With `p` the position of a sequence's first row in the step,
//! the step reads version `p % 2` and writes the other: running it twice gives the same result. After a step of
//! one row the next step reads the version just written, since its position is one higher, so steps that feed
//! themselves never change `slots`. A sequence whose first row has position 0 starts from zeros, whatever its
//! slots hold. Rows with a negative position are padding: they write no slot and give zeros.

use crate::infer::{InferError, RuleInputs};
use crate::op::TensorType;
use refrain_tensor::DType;

/// An op of a recurrent layer. `paging` is `positions[n]`, `seqs[n]`, `slots[n_seqs, 2]`, all I32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recurrent {
    /// `state[n_slots, width - 1, d]` F32 (state), `x[n, d]`, `w[width, d]` F32, `paging` -> `y[n, d]` like `x`, and
    /// `state`.
    ///
    /// A causal convolution with one filter per channel: `y[i]` is `f` of the sum over `j` of
    /// `w[j] x[i - width + 1 + j]`. The slot holds the last inputs before the step, oldest first.
    ShortConv(ShortConv),
    /// `state[n_slots, n_heads, v_dim, k_dim]` F32 (state), `q[n, n_key_heads, k_dim]`, `k` like `q`,
    /// `v[n, n_heads, v_dim]`, `a[n, n_heads]`, `b[n, n_heads]`, `decay[n_heads]` F32, `dt_bias[n_heads]` F32, `paging`
    /// -> `y` like `v`, and `state`.
    ///
    /// The gated delta rule, per head and row by row:
    ///
    /// ```text
    /// q = scale * q / |q|,  k = k / |k|                 |x| = sqrt(sum of x^2 + eps)
    /// S = exp(decay * softplus(a + dt_bias)) * S
    /// S = S + sigmoid(b) * (v - S k) k^T
    /// y = S q
    /// ```
    GatedDelta(GatedDelta),
}

/// A short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConv {
    /// Whether to apply SiLU to the result.
    pub silu: bool,
}

/// The gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDelta {
    /// Factor on the normalised queries.
    pub scale: f32,
    /// Added to the sum of squares of queries and keys before the square root.
    pub eps: f32,
    /// Assignment of key heads to heads.
    pub key_heads: KeyHeads,
}

/// How heads share key heads; there are at most as many key heads as heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyHeads {
    /// Adjacent heads share one: head `h` of `n` uses `h / (n / n_key_heads)`.
    Grouped,
    /// Head `h` uses `h % n_key_heads`, as GGUF files order them.
    Tiled,
}

impl KeyHeads {
    /// Returns the key head of a head.
    pub fn of(self, head: usize, n_heads: usize, n_key_heads: usize) -> usize {
        match self {
            KeyHeads::Grouped => head / (n_heads / n_key_heads.max(1)).max(1),
            KeyHeads::Tiled => head % n_key_heads.max(1),
        }
    }
}

impl Recurrent {
    /// Index of the positions input; sequences and slots follow it.
    pub fn positions(&self) -> usize {
        match self {
            Recurrent::ShortConv(_) => 3,
            Recurrent::GatedDelta(_) => 8,
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Recurrent::ShortConv(_) => "short_conv",
            Recurrent::GatedDelta(_) => "gated_delta",
        }
    }

    pub(crate) fn infer(&self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        rule.arity(self.positions() + 3)?;
        let inputs = rule.inputs;
        rule.require(0, inputs[0].dtype == DType::F32, "F32")?;
        let y = match self {
            Recurrent::ShortConv(_) => {
                let (state, x, w) = (rule.rank(0, 3)?, rule.rank(1, 2)?, rule.rank(2, 2)?);
                rule.float(1)?;
                let is_filter = inputs[2].dtype == DType::F32 && w[1] == x[1] && w[0] >= 2;
                rule.require(2, is_filter, format!("F32[width, {}], with a width of at least 2", x[1]))?;
                let fits = state[1] + 1 == w[0] && state[2] == x[1];
                rule.require(0, fits, format!("slots of [{}, {}]", w[0] - 1, x[1]))?;
                1
            }
            Recurrent::GatedDelta(_) => {
                let (state, q, v) = (rule.rank(0, 4)?, rule.rank(1, 3)?, rule.rank(3, 3)?);
                rule.float(1)?;
                rule.require(2, inputs[2] == inputs[1], format!("{}", inputs[1]))?;
                rule.require(3, inputs[3].dtype == inputs[1].dtype, format!("{}", inputs[1].dtype))?;
                let n = q[0];
                rule.require(3, v[0] == n, format!("{n} rows"))?;
                let shares = q[1] > 0 && v[1].is_multiple_of(q[1]);
                rule.require(3, shares, format!("heads that share {} key heads evenly", q[1]))?;
                rule.require(1, q[2] > 0, "keys of at least one element")?;
                let slot = [v[1], v[2], q[2]];
                rule.require(0, state[1..] == slot, format!("slots of {slot:?}"))?;
                for i in [4, 5] {
                    rule.float(i)?;
                    rule.require(i, inputs[i].shape.dims() == [n, v[1]], format!("[{n}, {}]", v[1]))?;
                }
                rule.exact(6, DType::F32, &[v[1]])?;
                rule.exact(7, DType::F32, &[v[1]])?;
                3
            }
        };
        let n = inputs[y].shape.dims()[0];
        let paging = self.positions();
        rule.exact(paging, DType::I32, &[n])?;
        rule.exact(paging + 1, DType::I32, &[n])?;
        let slots = rule.rank(paging + 2, 2)?;
        let is_table = inputs[paging + 2].dtype == DType::I32 && slots[1] == 2;
        rule.require(paging + 2, is_table, "I32[n_seqs, 2]")?;
        Ok(vec![inputs[y], inputs[0]])
    }
}
