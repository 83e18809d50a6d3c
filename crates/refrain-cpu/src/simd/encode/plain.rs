//! Q8_0, whose scale follows from the largest value, and MXFP4, whose scale is a power of two.

use super::super::lanes::{GROUP, Simd};
use super::GroupEncoder;
use super::group::{Group, Lanes, get, inverse, magnitude, put};
use refrain_tensor::quant::{BlockMxfp4, BlockQ8_0, F16Le};

impl GroupEncoder<32, 1> for BlockQ8_0 {
    const RAW: bool = true;

    #[inline(always)]
    fn encode<S: Simd>(s: S, group: &mut Group<32>, blocks: &mut [Self]) -> bool {
        let mut scales = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            let mut peak = s.splat(0);
            for i in 0..32 {
                peak = s.max(peak, s.as_i(magnitude(s, get(s, &group.x[i], h))));
            }
            let scale = s.fdiv(s.as_f(peak), s.fsplat(127.0));
            put(s, &mut scales, h, scale);
            let inv = inverse(s, scale);
            for word in 0..8 {
                let mut q = [s.splat(0); 4];
                for b in 0..4 {
                    let v = s.fmul(get(s, &group.x[4 * word + b], h), inv);
                    q[b] = s.and(round_away(s, v), s.splat(0xff));
                }
                group.put_levels(s, word, h, q);
            }
        }
        for (lane, block) in blocks.iter_mut().enumerate() {
            // Infinite or NaN if a value is.
            let Some(d) = F16Le::from_f32(scales[lane]) else { return false };
            *block = BlockQ8_0 { d, qs: bytemuck::cast(group.levels(lane)) };
        }
        true
    }
}

/// The nearest integer, ties away from zero, for magnitudes below 2^22.
#[inline(always)]
fn round_away<S: Simd>(s: S, v: S::F) -> S::I {
    let size = magnitude(s, v);
    let even = s.to_f(s.to_i(size));
    let size = s.pick_less(s.fsub(size, even), s.fsplat(0.5), even, s.fadd(even, s.fsplat(1.0)));
    let sign = s.and(s.as_i(v), s.splat(i32::MIN));
    s.to_i(s.as_f(s.or(s.as_i(size), sign)))
}

impl GroupEncoder<32, 1> for BlockMxfp4 {
    #[inline(always)]
    fn encode<S: Simd>(s: S, group: &mut Group<32>, blocks: &mut [Self]) -> bool {
        /// The power of two that clips the largest value, which is in 2..4, and its neighbours.
        const FACTORS: [f32; 3] = [2.0, 4.0, 1.0];
        let mut factors: Lanes = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            let (mut best, mut best_error) = (s.fsplat(0.0), s.fsplat(f32::INFINITY));
            for factor in FACTORS {
                let mut sum = s.fsplat(0.0);
                for i in 0..32 {
                    let (x, w) = (magnitude(s, get(s, &group.x[i], h)), get(s, &group.w[i], h));
                    let level = rounded(s, s.fmul(x, s.fsplat(factor)));
                    let e = s.fsub(x, s.fmul(level, s.fsplat(1.0 / factor)));
                    sum = s.fadd(sum, s.fmul(s.fmul(w, e), e));
                }
                best = s.pick_less(sum, best_error, s.fsplat(factor), best);
                best_error = s.pick_less(sum, best_error, sum, best_error);
            }
            put(s, &mut factors, h, best);
            for word in 0..8 {
                let mut q = [s.splat(0); 4];
                for b in 0..4 {
                    let x = get(s, &group.x[4 * word + b], h);
                    let index = code(s, rounded(s, s.fmul(magnitude(s, x), best)));
                    let sign = s.pick_less(x, s.fsplat(0.0), s.fsplat(8.0), s.fsplat(0.0));
                    q[b] = s.to_i(s.fadd(index, sign));
                }
                group.put_levels(s, word, h, q);
            }
        }
        for (lane, block) in blocks.iter_mut().enumerate() {
            // Values that were too small to be scaled are not below the scales of this type.
            if group.x.iter().all(|x| x[lane] == 0.0) {
                return false;
            }
            // The unit is half the power of the largest value, and the exponent two below it.
            let plain = (group.unit[lane].to_bits() >> 23) as u8 - 1;
            let e = match factors[lane] {
                4.0 => plain - 1,
                1.0 => plain + 1,
                _ => plain,
            };
            *block = BlockMxfp4::pack(e, &group.levels(lane));
        }
        true
    }
}

/// The float of MXFP4 nearest to a value that is not negative, in a tie one with an even mantissa.
#[inline(always)]
fn rounded<S: Simd>(s: S, a: S::F) -> S::F {
    const NO_FRACTION: f32 = 12_582_912.0;
    let a = s.fmin(a, s.fsplat(6.0));
    let above = s.pick_less(a, s.fsplat(4.0), s.fsplat(NO_FRACTION), s.fsplat(2.0 * NO_FRACTION));
    let shift = s.pick_less(a, s.fsplat(2.0), s.fsplat(0.5 * NO_FRACTION), above);
    s.fsub(s.fadd(a, shift), shift)
}

/// The index of a float that is not negative.
#[inline(always)]
fn code<S: Simd>(s: S, float: S::F) -> S::F {
    let above = s.pick_less(float, s.fsplat(5.0), s.fadd(float, s.fsplat(2.0)), s.fsplat(7.0));
    s.pick_less(float, s.fsplat(2.5), s.fadd(float, float), above)
}
