//! Elementwise and row ops, in place where the plan lets an output overwrite an input.
//!
//! An input that is `None` is already in the output.

use crate::simd::{self, Level};
use refrain_graph::{Binary, Gate, Rope, RopeStyle, Unary};

pub(crate) fn unary(level: Level, f: Unary, x: &mut [f32]) {
    let each = |x: &mut [f32], f: fn(f32) -> f32| x.iter_mut().for_each(|v| *v = f(*v));
    match f {
        Unary::Neg => each(x, |v| -v),
        Unary::Exp => simd::exp_inplace(level, x),
        Unary::Log => each(x, f32::ln),
        Unary::Rsqrt => each(x, |v| 1.0 / v.sqrt()),
        Unary::Tanh => each(x, f32::tanh),
        Unary::Sigmoid => each(x, |v| 1.0 / (1.0 + (-v).exp())),
        Unary::Silu => each(x, silu),
        Unary::GeluTanh => each(x, gelu_tanh),
        Unary::GeluErf => simd::gelu_erf_inplace(level, x),
        Unary::Affine { mul, add: 0.0 } => simd::scale_inplace(level, x, mul),
        Unary::Affine { mul, add } => x.iter_mut().for_each(|v| *v = *v * mul + add),
        Unary::SoftCap(cap) => x.iter_mut().for_each(|v| *v = cap * (*v / cap).tanh()),
    }
}

fn silu(v: f32) -> f32 {
    // The exponential never overflows in this form; for very negative `v` the result is tiny, not zero.
    let e = (-v.abs()).exp();
    if v < 0.0 { v * e / (1.0 + e) } else { v / (1.0 + e) }
}

fn gelu_tanh(v: f32) -> f32 {
    // `sqrt(2 / pi)`
    const ROOT: f32 = 0.797_884_6;
    0.5 * v * (1.0 + (ROOT * (v + 0.044_715 * v * v * v)).tanh())
}

/// `out = f(a, b)`; `b` has the size of the output, or is a row of `row` elements that is broadcast.
pub(crate) fn binary(
    level: Level,
    f: Binary,
    a: Option<&[f32]>,
    b: Option<&[f32]>,
    row: usize,
    out: &mut [f32],
) {
    let of = move |a: f32, b: f32| match f {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => a.max(b),
    };
    match (a, b) {
        (a, Some(b)) => {
            if let Some(a) = a {
                out.copy_from_slice(a);
            }
            for out in out.chunks_exact_mut(row.max(1)) {
                match f {
                    Binary::Add => simd::add_inplace(level, out, b),
                    Binary::Mul => simd::mul_inplace(level, out, b),
                    Binary::Sub | Binary::Div | Binary::Max => {
                        out.iter_mut().zip(b).for_each(|(o, b)| *o = of(*o, *b));
                    }
                }
            }
        }
        (Some(a), None) => out.iter_mut().zip(a).for_each(|(o, a)| *o = of(*a, *o)),
        (None, None) => out.iter_mut().for_each(|o| *o = of(*o, *o)),
    }
}

/// `out = f(a, b)` for one `b`.
pub(crate) fn with_scalar(f: Binary, a: &[f32], b: f32, out: &mut [f32]) {
    let pairs = out.iter_mut().zip(a);
    match f {
        Binary::Add => pairs.for_each(|(o, a)| *o = a + b),
        Binary::Sub => pairs.for_each(|(o, a)| *o = a - b),
        Binary::Mul => pairs.for_each(|(o, a)| *o = a * b),
        Binary::Div => pairs.for_each(|(o, a)| *o = a / b),
        Binary::Max => pairs.for_each(|(o, a)| *o = a.max(b)),
    }
}

/// `out = f(gate) * up`.
pub(crate) fn gate(level: Level, f: Gate, gate: Option<&[f32]>, up: Option<&[f32]>, out: &mut [f32]) {
    match (f, gate, up) {
        (Gate::Silu, Some(g), Some(u)) => simd::silu_mul(level, g, u, out),
        (Gate::GeluTanh, Some(g), Some(u)) => simd::gelu_tanh_mul(level, g, u, out),
        (Gate::Silu, None, Some(u)) => simd::silu_mul_inplace(level, out, u),
        (Gate::GeluTanh, None, Some(u)) => simd::gelu_tanh_mul_inplace(level, out, u),
        // These two cases are rare: the plan overwrites the gate rather than `up`.
        (f, Some(g), None) => out.iter_mut().zip(g).for_each(|(o, g)| *o *= activation(f)(*g)),
        (f, None, None) => out.iter_mut().for_each(|o| *o *= activation(f)(*o)),
    }
}

fn activation(f: Gate) -> fn(f32) -> f32 {
    match f {
        Gate::Silu => silu,
        Gate::GeluTanh => gelu_tanh,
    }
}

/// Rotates the heads of one token in place. `angles` holds `n_dims / 2` cosines, then the sines.
pub(crate) fn rope(level: Level, rope: &Rope, heads: &mut [f32], head_dim: usize, angles: &[f32]) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    for head in heads.chunks_exact_mut(head_dim) {
        match rope.style {
            RopeStyle::Neox => simd::rope_neox(level, head, cos, sin),
            RopeStyle::Interleaved => simd::rope_interleaved(level, head, cos, sin),
        }
    }
}

/// Computes the angles of one token, in f64 to keep large positions exact. `sign` multiplies the sines.
pub(crate) fn rope_angles(angles: &mut [f32], position: i32, inv_freq: &[f32], [magnitude, sign]: [f32; 2]) {
    let (cosines, sines) = angles.split_at_mut(inv_freq.len());
    for ((c, s), &freq) in cosines.iter_mut().zip(sines).zip(inv_freq) {
        let (sin, cos) = (f64::from(position) * f64::from(freq)).sin_cos();
        *c = (cos * f64::from(magnitude)) as f32;
        *s = (sin * f64::from(magnitude * sign)) as f32;
    }
}

/// `f'(x)`
pub(crate) fn derivative(f: Unary, x: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Neg => -1.0,
        Unary::Exp => x.exp(),
        Unary::Log => 1.0 / x,
        Unary::Rsqrt => -0.5 / (x * x.sqrt()),
        Unary::Tanh => 1.0 - x.tanh().powi(2),
        Unary::Sigmoid => sigmoid(x) * sigmoid(-x),
        Unary::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        Unary::GeluTanh => {
            // `x sigmoid(2 u)` with `u = √(2/π) (x + 0.044715 x³)`
            let twice = 1.595_769 * (x + 0.044_715 * x * x * x);
            let slope = 1.595_769 * (1.0 + 3.0 * 0.044_715 * x * x);
            sigmoid(twice) + x * sigmoid(twice) * sigmoid(-twice) * slope
        }
        Unary::GeluErf => {
            // `1 / sqrt(2 pi)`
            const DENSITY: f32 = 0.398_942_3;
            0.5 * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2) + x * DENSITY * (-0.5 * x * x).exp()
        }
        Unary::Affine { mul, .. } => mul,
        Unary::SoftCap(cap) => 1.0 - (x / cap).tanh().powi(2),
    }
}
