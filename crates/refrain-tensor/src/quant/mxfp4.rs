//! MXFP4: four-bit floats (E2M1) that share a power of two, as the OCP microscaling formats define them.

use super::block::{Block, nibble};
use super::q4::pack_nibbles;
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

    /// Tries the power of two that clips the largest magnitude, and its two neighbours.
    fn encode_weighted(values: &[f32; 32], weights: &[f32; 32]) -> Option<Self> {
        let plain = Self::encode(values)?;
        let fit = |e: u8| {
            let d = mxfp4_scale(e);
            let q = values.map(|v| nearest(d, v));
            let error = |i: usize| {
                let e = f64::from(values[i]) - f64::from(d * f32::from(MXFP4_VALUES[usize::from(q[i])]));
                f64::from(weights[i]) * e * e
            };
            ((0..32).map(error).sum::<f64>(), BlockMxfp4 { e, qs: pack_nibbles(&q) })
        };
        // 254 is the largest exponent that is not reserved.
        let near = plain.e.saturating_sub(1)..=plain.e.saturating_add(1).min(254);
        near.map(fit).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, block)| block)
    }
}

fn nearest(d: f32, v: f32) -> u8 {
    let error = |q: u8| (d * f32::from(MXFP4_VALUES[usize::from(q)]) - v).abs();
    (1..16).fold(0, |best, q| if error(q) < error(best) { q } else { best })
}
