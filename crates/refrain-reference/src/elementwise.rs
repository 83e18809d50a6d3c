//! Elementwise and row-wise ops.

use crate::dense::{In, Out, ReferenceError};
use refrain_graph::{Binary, Gate, Reduce, Unary};

pub(crate) fn unary(f: Unary, x: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let y: Vec<f32> = x.to_f32()?.into_iter().map(|x| apply(f, f64::from(x)) as f32).collect();
    out.store(&y)
}

pub(crate) fn apply(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Neg => -x,
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            // 0.5 * x * (1 + tanh(inner)), in a form that does not cancel for very negative x.
            x / (1.0 + (-2.0 * inner).exp())
        }
        // 0.5 * x * (1 + erf(x / sqrt(2))), in a form that does not cancel for negative x.
        Unary::GeluErf => 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
        Unary::Affine { mul, add } => f64::from(mul) * x + f64::from(add),
        Unary::SoftCap(cap) => f64::from(cap) * (x / f64::from(cap)).tanh(),
    }
}

pub(crate) fn binary(f: Binary, a: &In<'_>, b: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let shape = out.ty.shape;
    let wide = |x: &In<'_>| -> Result<Vec<f32>, ReferenceError> {
        Ok(In { layout: x.layout.broadcast_to(shape)?, ..*x }.to_f32()?)
    };
    let (a, b) = (wide(a)?, wide(b)?);
    let y: Vec<f32> = a
        .into_iter()
        .zip(b)
        .map(|(a, b)| match f {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Max => a.max(b),
        })
        .collect();
    out.store(&y)
}

pub(crate) fn reduce(kind: Reduce, x: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let d = x.layout.shape().dim_back(0);
    let x = x.to_f32()?;
    // The output determines the number of rows: a row without elements still has a sum.
    let y: Vec<f32> = (0..out.ty.shape.n_elements())
        .map(|i| {
            let row = &x[i * d..][..d];
            let sum: f64 = row.iter().map(|&v| f64::from(v)).sum();
            match kind {
                Reduce::Sum => sum as f32,
                Reduce::Mean => (sum / d as f64) as f32,
                Reduce::Max => row.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            }
        })
        .collect();
    out.store(&y)
}

pub(crate) fn softmax(x: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let d = x.layout.shape().dim_back(0);
    let mut y = x.to_f32()?;
    for row in y.chunks_exact_mut(d.max(1)) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exps: Vec<f64> = row.iter().map(|&v| (f64::from(v) - f64::from(max)).exp()).collect();
        let sum: f64 = exps.iter().sum();
        for (v, e) in row.iter_mut().zip(exps) {
            *v = (e / sum) as f32;
        }
    }
    out.store(&y)
}

pub(crate) fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(w.len().max(1)) {
        let mean = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / w.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        y.extend(row.iter().zip(w).map(|(&v, &w)| (f64::from(v) * scale * f64::from(w)) as f32));
    }
    y
}

pub(crate) fn gate(kind: Gate, gate: &In<'_>, up: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let f = match kind {
        Gate::Silu => Unary::Silu,
        Gate::GeluTanh => Unary::GeluTanh,
    };
    let (gate, up) = (gate.to_f32()?, up.to_f32()?);
    let y: Vec<f32> =
        gate.iter().zip(&up).map(|(&g, &u)| (apply(f, f64::from(g)) * f64::from(u)) as f32).collect();
    out.store(&y)
}

/// Adds `x` to the state, which the output already contains.
pub(crate) fn accumulate(x: &In<'_>, state: &mut Out<'_>) -> Result<(), ReferenceError> {
    let layout = refrain_tensor::Layout::contiguous(state.ty.shape);
    let before = In { dtype: state.ty.dtype, layout, bytes: state.bytes }.to_f32()?;
    let sum: Vec<f32> = before.iter().zip(x.to_f32()?).map(|(a, b)| a + b).collect();
    state.store(&sum)
}
