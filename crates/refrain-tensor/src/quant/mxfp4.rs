//! MXFP4: four-bit floats (E2M1) that share a power of two, as the OCP microscaling formats define them.

use super::block::{Block, Weighing, nibble};
use super::q4::pack_nibbles;
use super::search::{Prepared, peak_idx, prepare, rules::LEAST_PEAK};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Twice the values of the sixteen E2M1 floats. Negative zero is stored but decoded as zero.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// MXFP4: `x = 2^(e - 128) * MXFP4_VALUES[q]`, q in 0..16.
///
/// ```text
/// byte  0   1                 17
///       | e | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMxfp4 {
    /// Exponent of the scale.
    pub e: u8,
    /// Level indices, four bits each.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockMxfp4>() == DType::MXFP4.block_bytes());

/// Half of the scale with this exponent (E8M0), `2^(e - 128)`: the levels are twice the floats. Exact, also where it is
/// subnormal. 255, which the format reserves, is decoded like its neighbours, as in the `gguf` package.
pub const fn mxfp4_scale(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => (e as u32 - 1) << 23,
    })
}

impl BlockMxfp4 {
    /// Creates a block of these levels.
    pub fn pack(e: u8, q: &[u8; 32]) -> BlockMxfp4 {
        BlockMxfp4 { e, qs: pack_nibbles(q) }
    }
}

impl Block<32> for BlockMxfp4 {
    const DTYPE: DType = DType::MXFP4;

    fn decode(&self) -> [f32; 32] {
        let d = mxfp4_scale(self.e);
        from_fn(|i| d * f32::from(MXFP4_VALUES[usize::from(nibble(self.qs[i % 16], i / 16))]))
    }

    /// The scale maps the largest magnitude to an exponent of 2, so values above 6 of its 8 units are clipped; each
    /// element takes the nearest level, the earlier one in a tie.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let peak = values.iter().fold(0f32, |peak, v| peak.max(v.abs()));
        // 2 below the exponent of the peak; 0 for the smallest magnitudes, and for subnormals.
        let e = ((peak.to_bits() >> 23) as u8).saturating_sub(2);
        let d = mxfp4_scale(e);
        let q = values.map(|v| nearest(d, v));
        Some(BlockMxfp4 { e, qs: pack_nibbles(&q) })
    }

    /// Tries the power of two that clips the largest magnitude, and its two neighbours; each element takes the nearest
    /// level, in a tie one with an even mantissa.
    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let plain = Self::encode(values)?;
        if values[peak_idx(values)].abs() < LEAST_PEAK {
            return Some(plain);
        }
        let Prepared { x, w, .. } = prepare(values, weighing, 32);
        let (mut best, mut best_error) = (plain, f32::INFINITY);
        // The largest of x is in 2..4.
        for (factor, e) in [(2.0, plain.e), (4.0, plain.e - 1), (1.0, plain.e + 1)] {
            let mut error = 0.0;
            for (&x, &w) in x.iter().zip(&w) {
                let e = x.abs() - rounded(x.abs() * factor) * (1.0 / factor);
                error += w * e * e;
            }
            if error < best_error {
                best_error = error;
                let code = |x: f32| code(rounded(x.abs() * factor)) | if x < 0.0 { 8 } else { 0 };
                best = Self::pack(e, &x.map(code));
            }
        }
        Some(best)
    }
}

fn nearest(d: f32, v: f32) -> u8 {
    let error = |q: u8| (d * f32::from(MXFP4_VALUES[usize::from(q)]) - v).abs();
    (1..16).fold(0, |best, q| if error(q) < error(best) { q } else { best })
}

/// The float nearest to `a`, which is not negative: 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
fn rounded(a: f32) -> f32 {
    /// Adding it leaves no bits for a fraction.
    const NO_FRACTION: f32 = 12_582_912.0;
    let a = if a < 6.0 { a } else { 6.0 };
    let step = if a < 2.0 {
        0.5
    } else if a < 4.0 {
        1.0
    } else {
        2.0
    };
    (a + NO_FRACTION * step) - NO_FRACTION * step
}

/// The index of a float that is not negative.
fn code(float: f32) -> u8 {
    let index = if float < 2.5 {
        2.0 * float
    } else if float < 5.0 {
        float + 2.0
    } else {
        7.0
    };
    index as u8
}
