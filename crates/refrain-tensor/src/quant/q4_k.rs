//! Q4_K: 256 elements of four bits in eight sub-blocks, each with a six-bit scale and minimum.

use super::block::{Block, F16Le, Weighing, nibble};
use super::search::{Affine, AffineSpec, encode_affine};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q4_K: `x = d * scale * q - dmin * min`, q in 0..16, scale and min in 0..64 for each 32 elements.
///
/// ```text
/// byte  0   2      4        16                  144
///       | d | dmin | scales | qs                |
/// scales: see `unpack_scales_and_mins`
/// qs[32 h + l]: low nibble element 64 h + l, high nibble element 64 h + 32 + l (h < 4, l < 32)
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minima.
    pub dmin: F16Le,
    /// Scales and minima, six bits each.
    pub scales: [u8; 12],
    /// Levels, four bits each.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ4K>() == DType::Q4_K.block_bytes());

/// Unpacks the scales and minima of the eight sub-blocks of Q4_K and Q5_K, each in 0..64.
///
/// ```text
/// byte      bits 7 6                  bits 5 4 3 2 1 0
/// t         bits 5 4 of scale 4 + t   scale t              (t < 4)
/// 4 + t     bits 5 4 of min 4 + t     min t
/// byte      bits 7 6 5 4              bits 3 2 1 0
/// 8 + t     bits 3..0 of min 4 + t    bits 3..0 of scale 4 + t
/// ```
pub fn unpack_scales_and_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let unpack = |first: usize, high: usize| {
        from_fn(|s| match s {
            0..4 => packed[first + s] & 0x3f,
            _ => nibble(packed[4 + s], high) | packed[first + s - 4] >> 6 << 4,
        })
    };
    (unpack(0, 0), unpack(4, 1))
}

/// Inverse of [`unpack_scales_and_mins`], for the first eight of each.
pub(super) fn pack_scales_and_mins(scales: &[u8; 16], mins: &[u8; 16]) -> [u8; 12] {
    from_fn(|j| match j {
        0..4 => scales[j] | scales[4 + j] >> 4 << 6,
        4..8 => mins[j - 4] | mins[j] >> 4 << 6,
        _ => scales[j - 4] & 0x0f | mins[j - 4] << 4,
    })
}

/// Packs the low four bits of the elements in the layout of Q4_K and Q5_K.
pub(super) fn pack_nibbles_64(q: &[u8; 256]) -> [u8; 128] {
    from_fn(|j| {
        let first = 64 * (j / 32) + j % 32;
        q[first] & 0x0f | q[first + 32] << 4
    })
}

impl BlockQ4K {
    /// Its sub-blocks and scales.
    pub const SPEC: AffineSpec = AffineSpec { sub_len: 32, q_max: 15, scale_max: 63 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Affine) -> BlockQ4K {
        let scales = pack_scales_and_mins(&fit.scales, &fit.mins);
        BlockQ4K { d: fit.d, dmin: fit.dmin, scales, qs: pack_nibbles_64(&fit.q) }
    }
}

impl Block<256> for BlockQ4K {
    const DTYPE: DType = DType::Q4_K;

    fn decode(&self) -> [f32; 256] {
        let (scales, mins) = unpack_scales_and_mins(&self.scales);
        let scales = scales.map(|s| self.d.to_f32() * f32::from(s));
        let mins = mins.map(|m| self.dmin.to_f32() * f32::from(m));
        from_fn(|i| {
            let q = nibble(self.qs[32 * (i / 64) + i % 32], i % 64 / 32);
            scales[i / 32] * f32::from(q) - mins[i / 32]
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
