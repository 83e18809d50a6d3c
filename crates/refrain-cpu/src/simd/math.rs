//! Elementary functions on registers.

use super::lanes::Simd;

/// `e^x`, with an error of at most 1.5 ulp (1 ulp for subnormal results). 0 below -104, infinity above 89; NaN
/// stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Both functions keep NaN in this argument order.
    let x = s.fmin(s.fsplat(89.0), s.fmax(s.fsplat(-104.0), x));
    let n = s.to_i(s.fmul(x, s.fsplat(std::f32::consts::LOG2_E)));
    let n_f = s.to_f(n);
    // ln 2 in two parts; the first has enough zero bits that its product with n is exact.
    let r = s.fma(n_f, s.fsplat(-0.693_145_75), x);
    let r = s.fma(n_f, s.fsplat(-1.428_606_8e-6), r);
    // (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]: the minimax polynomial of Cephes expf.
    let mut p = s.fsplat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.fsplat(c));
    }
    let y = s.fma(s.fmul(r, r), p, s.fadd(r, s.fsplat(1.0)));
    // 2^n in two factors, since n reaches 128 and -150.
    let half = s.sar(n, 1);
    s.fmul(s.fmul(y, power_of_2(s, half)), power_of_2(s, s.sub(n, half)))
}

/// `2^n`, for `-127 <= n <= 127`.
#[inline(always)]
fn power_of_2<S: Simd>(s: S, n: S::I) -> S::F {
    s.as_f(s.shl(s.add(n, s.splat(127)), 23))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    let minus = s.fsub(s.fsplat(0.0), x);
    s.fdiv(x, s.fadd(s.fsplat(1.0), exp(s, minus)))
}

/// The tanh approximation of GELU, `x / 2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, computed as
/// `x / (1 + e^(-2 ...))`.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let cubic = s.fma(s.fmul(s.fmul(x, x), s.fsplat(0.044_715)), x, x);
    let minus_2z = s.fmul(cubic, s.fsplat(-1.595_769));
    s.fdiv(x, s.fadd(s.fsplat(1.0), exp(s, minus_2z)))
}

/// `erfc(z / √2) / 2` for `z >= 0`: the upper tail of the standard normal distribution. The relative error is
/// below 2e-7, and up to `z² / 2` times that of [`exp`] in the far tail. Numerical Recipes, `erfcc`.
#[inline(always)]
pub(crate) fn half_erfc<S: Simd>(s: S, z: S::F) -> S::F {
    let one = s.fsplat(1.0);
    // `t = 1 / (1 + |x| / 2)` with `x = z / √2`.
    let t = s.fdiv(one, s.fma(z, s.fsplat(std::f32::consts::FRAC_1_SQRT_2 / 2.0), one));
    let mut p = s.fsplat(0.170_872_77);
    for c in [
        -0.822_152_23,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = s.fma(p, t, s.fsplat(c));
    }
    let tail = exp(s, s.fma(s.fmul(z, z), s.fsplat(-0.5), p));
    s.fmul(s.fmul(t, tail), s.fsplat(0.5))
}

/// GELU, `x / 2 (1 + erf(x / √2))`, computed as `max(x, 0) - |x| erfc(|x| / √2) / 2`.
#[inline(always)]
pub(crate) fn gelu_erf<S: Simd>(s: S, x: S::F) -> S::F {
    let zero = s.fsplat(0.0);
    // Both keep NaN in this argument order.
    let size = s.fmax(s.fsub(zero, x), x);
    let finite = s.fmin(s.fsplat(f32::MAX), size);
    s.fsub(s.fmax(zero, x), s.fmul(finite, half_erfc(s, finite)))
}
