//! Ops of a mixture of experts: a router, and matrix products with the experts it chooses for each row.
//!
//! A choice is an expert of a row. The ids of choices are computed within the step, so no backend can check
//! them beforehand. A negative id is an empty choice. Kernels that cannot report an error treat an id past the
//! last expert as an empty choice too. Neither reads a weight.

use crate::infer::{InferError, RuleInputs};
use crate::op::{Indexing, TensorType};
use refrain_tensor::DType;

/// An op of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MoeOp {
    /// `logits[n, n_experts]` F32, then, depending on [`Route`], `bias[n_experts]` and `scales[n_experts]`
    /// (F32), then optionally `positions[n]` I32 -> `ids[n, n_choices]` I32 and `weights[n, n_choices]` F32, best choice first.
    Route(Route),
    /// `x[n, d]`, `ids[n, n_choices]` I32, `gate[n_experts, f, d]`, `up[n_experts, f, d]`, then with biases
    /// `gate_bias[n_experts, f]` and `up_bias[n_experts, f]` -> `[n, n_choices, f]`: gate and up projection of the row
    /// by each chosen expert, joined by the activation. An empty choice gives zeros.
    ///
    /// [`ExpertGate::joined`]: one weight `[n_experts, 2 f, d]` (and one bias `[n_experts, 2 f]`) holds the
    /// rows of the gate, then those of up.
    Gated(ExpertGate),
    /// `h[n, n_choices, f]`, `ids[n, n_choices]` I32, `weights[n, n_choices]` F32, `down[n_experts, d, f]`,
    /// then with biases `down_bias[n_experts, d]` -> `[n, d]`: the sum over a row's choices of the product with
    /// the chosen expert (plus the bias), times the choice's weight. An empty choice adds nothing.
    Summed {
        /// Whether experts have biases.
        biased: bool,
    },
}

/// How a router turns a row of logits into choices.
///
/// In order: compute the scores of all experts; add the bias for the comparison; drop whole groups; keep the
/// experts with the highest values, lower ids first in ties. The weights of the chosen experts are their scores
/// without the bias, divided by their sum, times `scale`, times the expert's own scale.
///
/// A row with a NaN, with an infinite largest logit, or with a NaN in the comparison has no valid choice: its
/// ids are `0..n_choices`, and all its weights are NaN. With positions, a row with a negative one is padding: its
/// ids are -1, and its weights are zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// Experts per row.
    pub n_choices: usize,
    /// Score function.
    pub score: RouteScore,
    /// Whether there is a bias input. It affects the choice but not the weights.
    pub biased: bool,
    /// Whether the last input is a scale per expert.
    pub scaled: bool,
    /// Restricts the choice to the best groups.
    pub groups: Option<RouteGroups>,
    /// Whether to divide the weights of a row by their sum.
    pub renormalise: bool,
    /// Factor on all weights.
    pub scale: f32,
}

/// Score function of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over the chosen experts only.
    SoftmaxOfChosen,
}

/// Groups of experts with consecutive ids. A group's value is the sum of its best experts; lower groups win
/// ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteGroups {
    /// Number of groups; divides the number of experts.
    pub n_groups: usize,
    /// Number of groups to keep.
    pub n_kept: usize,
    /// Number of experts whose values are summed.
    pub n_best: usize,
}

/// First half of an expert's feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertGate {
    /// Function that joins the two products.
    pub activation: ExpertActivation,
    /// Whether gate and up are one weight.
    pub joined: bool,
    /// Whether experts have biases.
    pub biased: bool,
}

/// Function that joins an expert's gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`
    Silu,
    /// `gelu(gate) * up`, with the tanh approximation.
    GeluTanh,
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u` = up clamped to `-limit..limit`.
    ClampedSilu {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Upper bound of the gate, and of the magnitude of up.
        limit: f32,
    },
}

impl ExpertActivation {
    /// Computes the function in double precision.
    #[must_use]
    pub fn apply(self, gate: f64, up: f64) -> f64 {
        match self {
            ExpertActivation::Silu => gate / (1.0 + (-gate).exp()) * up,
            ExpertActivation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate * gate * gate);
                gate / (1.0 + (-2.0 * inner).exp()) * up
            }
            ExpertActivation::ClampedSilu { alpha, limit } => {
                let limit = f64::from(limit);
                // NaN must stay NaN.
                let g = if gate > limit { limit } else { gate };
                let u = if up.is_nan() { up } else { up.clamp(-limit, limit) };
                g / (1.0 + (-f64::from(alpha) * g).exp()) * (u + 1.0)
            }
        }
    }
}

impl ExpertGate {
    /// Number of weights after the ids.
    #[must_use]
    pub fn n_weights(&self) -> usize {
        if self.joined { 1 } else { 2 }
    }
}

impl MoeOp {
    /// Name of the op, for messages and tables.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            MoeOp::Route(_) => "route",
            MoeOp::Gated(_) => "expert_gate",
            MoeOp::Summed { .. } => "expert_sum",
        }
    }

    pub(crate) fn indexing(&self) -> Vec<Indexing> {
        let experts = |table| vec![Indexing::Rows { ids: 1, table, axis: 0, strict: true }];
        match self {
            MoeOp::Route(_) => Vec::new(),
            MoeOp::Gated(_) => experts(2),
            MoeOp::Summed { .. } => experts(3),
        }
    }

    pub(crate) fn infer(&self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        match self {
            MoeOp::Route(route) => route.infer(rule),
            MoeOp::Gated(gate) => gate.infer(rule),
            MoeOp::Summed { biased } => infer_summed(rule, *biased),
        }
    }
}

impl Route {
    /// Index of the positions, if a router with this many inputs has them: after logits, bias and scales.
    #[must_use]
    pub fn positions(&self, n_inputs: usize) -> Option<usize> {
        let n_others = self.n_vectors() + 1;
        (n_inputs == n_others + 1).then_some(n_others)
    }

    /// Number of vectors after the logits.
    #[must_use]
    pub fn n_vectors(&self) -> usize {
        usize::from(self.biased) + usize::from(self.scaled)
    }

    fn infer(&self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        let positions = self.positions(rule.inputs.len());
        rule.arity(1 + self.n_vectors() + usize::from(positions.is_some()))?;
        let (n, n_experts) = (rule.rank(0, 2)?[0], rule.rank(0, 2)?[1]);
        rule.require(0, rule.inputs[0].dtype == DType::F32, "F32")?;
        for index in 1..=self.n_vectors() {
            rule.exact(index, DType::F32, &[n_experts])?;
        }
        if let Some(index) = positions {
            rule.exact(index, DType::I32, &[n])?;
        }
        let k = self.n_choices;
        rule.require(0, (1..=n_experts).contains(&k), format!("at least the {k} experts to choose"))?;
        if let Some(g) = self.groups {
            let divides = g.n_groups > 0 && n_experts.is_multiple_of(g.n_groups);
            rule.require(0, divides, format!("{} groups of one size", g.n_groups))?;
            let size = n_experts / g.n_groups;
            let fits = (1..=g.n_groups).contains(&g.n_kept) && (1..=size).contains(&g.n_best);
            let want = format!("groups of which {} can stay, judged by {} experts", g.n_kept, g.n_best);
            rule.require(0, fits, want)?;
            let enough = g.n_kept * size >= k;
            rule.require(0, enough, format!("{} groups with at least {k} experts", g.n_kept))?;
        }
        let shape = rule.shape(&[n, k])?;
        Ok(vec![TensorType { dtype: DType::I32, shape }, TensorType { dtype: DType::F32, shape }])
    }
}

impl ExpertGate {
    fn infer(&self, rule: &RuleInputs<'_>) -> Result<Vec<TensorType>, InferError> {
        let n_weights = self.n_weights();
        rule.arity(2 + n_weights * (1 + usize::from(self.biased)))?;
        rule.float(0)?;
        let (n, d) = (rule.rank(0, 2)?[0], rule.rank(0, 2)?[1]);
        let k = rule.rank(1, 2)?[1];
        rule.exact(1, DType::I32, &[n, k])?;
        let (n_experts, rows) = (rule.rank(2, 3)?[0], rule.rank(2, 3)?[1]);
        for index in 2..2 + n_weights {
            experts(rule, index, [n_experts, rows, d])?;
        }
        rule.require(
            2,
            !self.joined || rows.is_multiple_of(2),
            "an even number of rows, half for the gate and half for up",
        )?;
        for index in 2 + n_weights..rule.inputs.len() {
            rule.float(index)?;
            bias(rule, index, [n_experts, rows])?;
        }
        let f = if self.joined { rows / 2 } else { rows };
        Ok(vec![TensorType { dtype: rule.inputs[0].dtype, shape: rule.shape(&[n, k, f])? }])
    }
}

fn infer_summed(rule: &RuleInputs<'_>, biased: bool) -> Result<Vec<TensorType>, InferError> {
    rule.arity(4 + usize::from(biased))?;
    rule.float(0)?;
    let h = rule.rank(0, 3)?;
    let (n, k, f) = (h[0], h[1], h[2]);
    rule.exact(1, DType::I32, &[n, k])?;
    rule.exact(2, DType::F32, &[n, k])?;
    let (n_experts, d) = (rule.rank(3, 3)?[0], rule.rank(3, 3)?[1]);
    experts(rule, 3, [n_experts, d, f])?;
    if biased {
        rule.float(4)?;
        bias(rule, 4, [n_experts, d])?;
    }
    Ok(vec![TensorType { dtype: rule.inputs[0].dtype, shape: rule.shape(&[n, d])? }])
}

/// Checks a weight with one matrix per expert, of any dtype that matrix products support.
fn experts(rule: &RuleInputs<'_>, index: usize, dims: [usize; 3]) -> Result<(), InferError> {
    let ty = rule.inputs[index];
    let numbers = ty.dtype.is_float() || ty.dtype.is_quantized();
    rule.require(index, numbers, "matrices that are not of integers")?;
    rule.require(index, ty.shape.dims() == dims, format!("{dims:?}"))
}

fn bias(rule: &RuleInputs<'_>, index: usize, dims: [usize; 2]) -> Result<(), InferError> {
    rule.require(index, rule.inputs[index].shape.dims() == dims, format!("{dims:?}"))
}
