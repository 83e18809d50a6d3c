//! Q2_K: 256 elements of two bits in 16 sub-blocks, each with a four-bit scale and minimum.

use super::block::{Block, F16Le, Weighing, nibble};
use super::search::{Affine, AffineSpec, encode_affine};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q2_K: `x = d * scale * q - dmin * min`, q in 0..4, scale and min in 0..16 for each 16 elements.
///
/// ```text
/// byte  0        16                 80  82     84
///       | scales | qs               | d | dmin |
/// scales[s]: low nibble scale, high nibble min of elements 16 s to 16 s + 15
/// qs[32 h + l]: bits 2 g and 2 g + 1 are element 128 h + 32 g + l (h < 2, g < 4, l < 32)
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// Scale and minimum of each sub-block, four bits each.
    pub scales: [u8; 16],
    /// Levels, two bits each.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minima.
    pub dmin: F16Le,
}

const _: () = assert!(size_of::<BlockQ2K>() == DType::Q2_K.block_bytes());

impl BlockQ2K {
    /// Its sub-blocks and scales.
    pub const SPEC: AffineSpec = AffineSpec { sub_len: 16, q_max: 3, scale_max: 15 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Affine) -> BlockQ2K {
        let scales = from_fn(|s| fit.scales[s] | fit.mins[s] << 4);
        let qs = from_fn(|j| {
            let first = 128 * (j / 32) + j % 32;
            (0..4).fold(0, |byte, g| byte | fit.q[first + 32 * g] << (2 * g))
        });
        BlockQ2K { scales, qs, d: fit.d, dmin: fit.dmin }
    }
}

impl Block<256> for BlockQ2K {
    const DTYPE: DType = DType::Q2_K;

    fn decode(&self) -> [f32; 256] {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        from_fn(|i| {
            let scale = d * f32::from(nibble(self.scales[i / 16], 0));
            let min = dmin * f32::from(nibble(self.scales[i / 16], 1));
            let q = self.qs[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3;
            scale * f32::from(q) - min
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
