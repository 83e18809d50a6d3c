//! Ops of training steps only: gradients, the loss, the optimiser.
//!
//! The first input of a gradient op is the incoming gradient: a node runs right before its first reader,
//! operands from left to right, so recomputed values are not computed too early.

use crate::infer::{InferError, RuleInputs, infer_rope};
use crate::op::{Gate, Rope, SpanAttention, TensorType, Unary};
use refrain_tensor::{DType, Shape};
use std::sync::Arc;

/// An op of a training step. `dy` is the gradient of the loss with respect to an output `y`.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainOp {
    /// `dy`, `x` -> `dy * f'(x)`.
    UnaryGrad(Unary),
    /// `dy`, `gate`, `up` -> the gradients of `gate` and `up`.
    GateGrad(Gate),
    /// `dy[.., n]`, `y[.., n]` (the softmax) -> the gradient of the softmax's input.
    SoftmaxGrad,
    /// `dy[.., d]`, `x[.., d]`, `w[d]` -> the gradients of `x` and `w`. Sums over rows are in F32 and in a
    /// fixed order.
    RmsNormGrad {
        /// Added to the mean square.
        eps: f32,
        /// Whether the last input is another contribution to the gradient of `x`, to be added to it.
        adds: bool,
    },
    /// `c[m, n]`, `a[m, k]`, `b[k, n]` of one dtype -> `c + a b`, summed in F32 and rounded once.
    AddProduct,
    /// `dy[n, n_heads, head_dim]`, `positions[n]` I32, `inv_freq[n_dims / 2]` F32 -> `dy` rotated back: by the
    /// negative angle, with the same factor.
    RopeGrad(Rope),
    /// `dy`, `q`, `k`, `v`, `spans`, `y`, `lse` as in [`crate::Op::SpanAttention`] -> the gradients of `q`, `k`
    /// and `v`.
    SpanAttentionGrad(SpanAttention),
    /// `logits[n, vocab]`, `targets[n]` I32, `scale[1]` F32 -> `loss[n]` F32 and the gradient of the sum of the
    /// losses with respect to the logits, in their dtype. The loss of a row is
    /// `scale * -log softmax(logits)[target]`; a row with a negative target has none.
    ///
    /// The gradient overwrites the logits, so memory never holds both.
    CrossEntropy,
    /// `x`, `rng[4]` U32 (seed low, seed high, two words that count steps) -> `x` with some elements set to
    /// zero and the others divided by the keep probability. It is its own gradient.
    Dropout(Dropout),
    /// Any number of float tensors -> `[1]` F32: the sum of the squares of all elements.
    SumSquares,
    /// One step of AdamW over many tensors at once.
    AdamW(AdamW),
}

/// Parameters of [`TrainOp::Dropout`]. Element `i` is kept or dropped by word `i % 4` of Philox with the
/// counter `[i / 4, site, rng[2], rng[3]]` and the key `[rng[0], rng[1]]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an element is dropped.
    pub p: f32,
    /// Distinguishes this location in the model from others.
    pub site: u32,
}

/// Number of optimiser parameters.
pub const ADAM_PARAMS: usize = 10;

/// Index of each of the optimiser's parameters. They are in the control block, so nothing here is baked into a
/// recording. Differences and logarithms are computed on the host, in higher precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum AdamParam {
    /// Learning rate.
    Lr = 0,
    /// Decay of the first moment.
    Beta1 = 1,
    /// `1 - beta1`
    OneMinusBeta1 = 2,
    /// `ln(beta1)`
    LnBeta1 = 3,
    /// Decay of the second moment.
    Beta2 = 4,
    /// `1 - beta2`
    OneMinusBeta2 = 5,
    /// `ln(beta2)`
    LnBeta2 = 6,
    /// Added to the square root of the second moment.
    Eps = 7,
    /// Weight decay, for the tensors that decay.
    WeightDecay = 8,
    /// Maximum norm of all gradients together; larger ones are scaled down to it. 0: no limit.
    MaxNorm = 9,
}

/// AdamW over `n` tensors.
///
/// Inputs: `count[1]` I32 (state: steps that were applied), `params[ADAM_PARAMS]` F32, `sum_squares[1]` F32 (of all
/// gradients), then for each tensor its gradient, the weight (state), the F32 master of the weight if there are masters
/// (state), and the two moments (states). Outputs: the states, in the same order.
///
/// With `g` the gradient times `min(1, max_norm / (norm + 1e-6))`, `t = count + 1` and `w` the master or the weight:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `w = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`. All of it is in F32; each state
/// is rounded to its dtype once.
///
/// If the sum of squares is not finite, nothing is applied: weights, moments and count are unchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// Whether each tensor decays.
    pub decays: Arc<[bool]>,
    /// Whether weights have F32 masters.
    pub masters: bool,
    /// Whether gradients are F32 accumulators (states), which are zero afterwards whether or not the step is
    /// applied.
    pub clears: bool,
}

/// Inputs of [`AdamW`] for one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdamSlots {
    /// The gradient.
    pub grad: usize,
    /// The weight.
    pub weight: usize,
    /// Its master.
    pub master: Option<usize>,
    /// The first moment.
    pub m: usize,
    /// The second moment.
    pub v: usize,
}

impl AdamW {
    /// Input with the step count.
    pub const COUNT: usize = 0;
    /// Input with the parameters.
    pub const PARAMS: usize = 1;
    /// Input with the sum of the gradients' squares.
    pub const SUM_SQUARES: usize = 2;

    /// Number of inputs.
    pub fn n_inputs(&self) -> usize {
        3 + self.decays.len() * self.stride()
    }

    /// Inputs of a tensor.
    pub fn slots(&self, tensor: usize) -> AdamSlots {
        let grad = 3 + tensor * self.stride();
        let m = grad + 2 + usize::from(self.masters);
        AdamSlots { grad, weight: grad + 1, master: self.masters.then_some(grad + 2), m, v: m + 1 }
    }

    fn stride(&self) -> usize {
        4 + usize::from(self.masters)
    }

    /// Inputs that the step changes, in the order of the outputs.
    pub fn changed(&self) -> Vec<usize> {
        let of_tensor = |tensor: usize| {
            let AdamSlots { grad, weight, master, m, v } = self.slots(tensor);
            let grad = self.clears.then_some(grad);
            grad.into_iter().chain([weight]).chain(master).chain([m, v])
        };
        std::iter::once(AdamW::COUNT).chain((0..self.decays.len()).flat_map(of_tensor)).collect()
    }

    pub(crate) fn state_updates(&self) -> Vec<(usize, usize)> {
        self.changed().into_iter().enumerate().collect()
    }
}

impl TrainOp {
    /// Name of the op, for messages and tables.
    pub fn name(&self) -> &'static str {
        match self {
            TrainOp::UnaryGrad(_) => "unary_grad",
            TrainOp::GateGrad(_) => "gate_grad",
            TrainOp::SoftmaxGrad => "softmax_grad",
            TrainOp::RmsNormGrad { .. } => "rms_norm_grad",
            TrainOp::AddProduct => "add_product",
            TrainOp::RopeGrad(_) => "rope_grad",
            TrainOp::SpanAttentionGrad(_) => "span_attention_grad",
            TrainOp::CrossEntropy => "cross_entropy",
            TrainOp::Dropout(_) => "dropout",
            TrainOp::SumSquares => "sum_squares",
            TrainOp::AdamW(_) => "adamw",
        }
    }

    /// Types of the outputs.
    pub(crate) fn infer(&self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        let ins = rule.inputs;
        match self {
            TrainOp::UnaryGrad(_) | TrainOp::SoftmaxGrad => {
                rule.arity(2)?;
                rule.float(0)?;
                rule.require(1, ins[1] == ins[0], format!("{}", ins[0]))?;
                Ok(vec![ins[0]])
            }
            TrainOp::GateGrad(_) => {
                rule.arity(3)?;
                rule.float(0)?;
                rule.require(1, ins[1] == ins[0], format!("{}", ins[0]))?;
                rule.require(2, ins[2] == ins[0], format!("{}", ins[0]))?;
                Ok(vec![ins[0], ins[0]])
            }
            TrainOp::AddProduct => {
                rule.arity(3)?;
                (0..3).try_for_each(|i| rule.float(i))?;
                let (a, b) = (rule.rank(1, 2)?, rule.rank(2, 2)?);
                rule.require(1, ins[1].dtype == ins[0].dtype, format!("{}", ins[0].dtype))?;
                rule.require(2, ins[2].dtype == ins[0].dtype && b[0] == a[1], format!("{} rows", a[1]))?;
                rule.require(0, ins[0].shape.dims() == [a[0], b[1]], format!("[{}, {}]", a[0], b[1]))?;
                Ok(vec![ins[0]])
            }
            TrainOp::RmsNormGrad { adds, .. } => {
                rule.arity(3 + usize::from(*adds))?;
                if *adds {
                    rule.require(3, ins[3] == ins[0], format!("{}", ins[0]))?;
                }
                rule.float(0)?;
                rule.require(1, ins[1] == ins[0], format!("{}", ins[0]))?;
                rule.float(2)?;
                let columns = ins[0].shape.rank() >= 1 && ins[2].shape.dims() == [ins[0].shape.dim_back(0)];
                rule.require(2, columns, "one weight per column")?;
                Ok(vec![ins[0], ins[2]])
            }
            TrainOp::RopeGrad(rope) => infer_rope(rule, rope),
            TrainOp::SpanAttentionGrad(attention) => {
                rule.arity(7)?;
                let outs = infer_span_attention(rule, attention, 1)?;
                rule.require(0, ins[0] == outs[0], format!("{}", outs[0]))?;
                rule.require(5, ins[5] == outs[0], format!("{}", outs[0]))?;
                rule.require(6, ins[6] == outs[1], format!("{}", outs[1]))?;
                Ok(vec![ins[1], ins[2], ins[3]])
            }
            TrainOp::CrossEntropy => {
                rule.arity(3)?;
                rule.float(0)?;
                let n = rule.rank(0, 2)?[0];
                rule.exact(1, DType::I32, &[n])?;
                rule.exact(2, DType::F32, &[1])?;
                Ok(vec![TensorType { dtype: DType::F32, shape: rule.shape(&[n])? }, ins[0]])
            }
            TrainOp::Dropout(dropout) => {
                rule.arity(2)?;
                rule.float(0)?;
                rule.require(0, (0.0..1.0).contains(&dropout.p), "a probability of at least 0 and below 1")?;
                rule.exact(1, DType::U32, &[4])?;
                Ok(vec![ins[0]])
            }
            TrainOp::SumSquares => {
                if ins.is_empty() {
                    return Err(InferError::Arity { op: rule.op, want: 1, got: 0 });
                }
                (0..ins.len()).try_for_each(|i| rule.float(i))?;
                Ok(vec![TensorType { dtype: DType::F32, shape: Shape::from([1]) }])
            }
            TrainOp::AdamW(adam) => infer_adamw(rule, adam),
        }
    }
}

/// Rules for `q`, `k`, `v` and `spans`, starting at input `first`.
pub(crate) fn infer_span_attention(
    rule: &RuleInputs<'_>,
    attention: &SpanAttention,
    first: usize,
) -> Result<Vec<TensorType>, InferError> {
    let [q, k] = [rule.inputs[first], rule.inputs[first + 1]];
    rule.float(first)?;
    rule.require(first, attention.window != Some(0), "a window of at least one row")?;
    let dims = rule.rank(first, 3)?;
    let kv = rule.rank(first + 1, 3)?;
    rule.require(
        first + 1,
        k.dtype == q.dtype && kv[0] == dims[0],
        format!("{} rows of {}", dims[0], q.dtype),
    )?;
    let fits = kv[1] > 0 && dims[1].is_multiple_of(kv[1]) && kv[2] == dims[2];
    rule.require(first, fits, format!("heads in groups of {} of {} elements", kv[1], kv[2]))?;
    rule.require(first + 2, rule.inputs[first + 2] == k, format!("{k}"))?;
    rule.exact(first + 3, DType::I32, &[dims[0], 2])?;
    Ok(vec![q, TensorType { dtype: DType::F32, shape: rule.shape(&[dims[0], dims[1]])? }])
}

fn infer_adamw(rule: &RuleInputs<'_>, adam: &AdamW) -> Result<Vec<TensorType>, InferError> {
    rule.arity(adam.n_inputs())?;
    rule.exact(AdamW::COUNT, DType::I32, &[1])?;
    rule.exact(AdamW::PARAMS, DType::F32, &[ADAM_PARAMS])?;
    rule.exact(AdamW::SUM_SQUARES, DType::F32, &[1])?;
    for tensor in 0..adam.decays.len() {
        let AdamSlots { grad, weight, master, m, v } = adam.slots(tensor);
        let shape = rule.inputs[weight].shape;
        for index in [weight, grad, m, v] {
            rule.float(index)?;
            rule.require(index, rule.inputs[index].shape == shape, format!("a shape of {shape}"))?;
        }
        if let Some(master) = master {
            rule.exact(master, DType::F32, shape.dims())?;
        }
        if adam.clears {
            rule.exact(grad, DType::F32, shape.dims())?;
        }
    }
    Ok(adam.changed().into_iter().map(|input| rule.inputs[input]).collect())
}
