//! Q5_K: Q4_K plus a fifth bit per element.

use super::block::{Block, F16Le, Weighing, nibble};
use super::q4_k::{pack_nibbles_64, pack_scales_and_mins, unpack_scales_and_mins};
use super::search::{Affine, AffineSpec, encode_affine};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q5_K: `x = d * scale * q - dmin * min`, q in 0..32, scale and min in 0..64 for each 32 elements.
///
/// ```text
/// byte  0   2      4        16      48                  176
///       | d | dmin | scales | qh    | qs                |
/// scales: see `unpack_scales_and_mins`
/// qs[32 h + l]: low nibble element 64 h + l, high nibble element 64 h + 32 + l (h < 4, l < 32)
/// qh[l]: bit k is bit 4 of element 32 k + l (k < 8)
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minima.
    pub dmin: F16Le,
    /// Scales and minima, six bits each.
    pub scales: [u8; 12],
    /// Fifth bits.
    pub qh: [u8; 32],
    /// Low four bits.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ5K>() == DType::Q5_K.block_bytes());

impl BlockQ5K {
    /// Its sub-blocks and scales.
    pub const SPEC: AffineSpec = AffineSpec { sub_len: 32, q_max: 31, scale_max: 63 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Affine) -> BlockQ5K {
        let scales = pack_scales_and_mins(&fit.scales, &fit.mins);
        let qh = from_fn(|l| (0..8).fold(0, |byte, k| byte | fit.q[32 * k + l] >> 4 << k));
        BlockQ5K { d: fit.d, dmin: fit.dmin, scales, qh, qs: pack_nibbles_64(&fit.q) }
    }
}

impl Block<256> for BlockQ5K {
    const DTYPE: DType = DType::Q5_K;

    fn decode(&self) -> [f32; 256] {
        let (scales, mins) = unpack_scales_and_mins(&self.scales);
        let scales = scales.map(|s| self.d.to_f32() * f32::from(s));
        let mins = mins.map(|m| self.dmin.to_f32() * f32::from(m));
        from_fn(|i| {
            let low = nibble(self.qs[32 * (i / 64) + i % 32], i % 64 / 32);
            let high = self.qh[i % 32] >> (i / 32) & 1;
            scales[i / 32] * f32::from(low | high << 4) - mins[i / 32]
        })
    }

    fn encode(values: &[f32; 256]) -> Option<Self> {
        Self::encode_weighted(values, Weighing::Flat)
    }

    /// Searches for scales and minima with a small squared error; each element takes the nearest level for them.
    fn encode_weighted(values: &[f32; 256], weighing: Weighing<'_, 256>) -> Option<Self> {
        encode_affine(values, weighing, Self::SPEC).map(|fit| Self::pack(&fit))
    }
}
