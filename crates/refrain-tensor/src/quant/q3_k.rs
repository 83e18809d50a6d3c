//! Q3_K: 256 elements of three bits in 16 sub-blocks, each with a signed six-bit scale.

use super::block::{Block, F16Le, Weighing, nibble};
use super::search::{Steps, Symmetric, SymmetricSpec, encode_symmetric};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q3_K: `x = d * (scale - 32) * (q - 4)`, q in 0..8, scale in 0..64 for each 16 elements.
///
/// ```text
/// byte  0       32                 96       108 110
///       | hmask | qs               | scales | d |
/// qs[32 h + l]: bits 2 g and 2 g + 1 are bits 0 and 1 of element 128 h + 32 g + l (h < 2, g < 4, l < 32)
/// hmask[l]: bit k is bit 2 of element 32 k + l (k < 8)
/// scales[s] for s < 8: low nibble bits 0 to 3 of scale s, high nibble those of scale 8 + s
/// scales[8 + t] for t < 4: bits 2 u and 2 u + 1 are bits 4 and 5 of scale 4 u + t
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// Third bits.
    pub hmask: [u8; 32],
    /// Low two bits.
    pub qs: [u8; 64],
    /// Scales, six bits each.
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: F16Le,
}

const _: () = assert!(size_of::<BlockQ3K>() == DType::Q3_K.block_bytes());

impl BlockQ3K {
    /// The scale of each sub-block, in -32..32.
    pub fn unpack_scales(&self) -> [i8; 16] {
        from_fn(|s| {
            let low = nibble(self.scales[s % 8], s / 8);
            let high = self.scales[8 + s % 4] >> (2 * (s / 4)) & 3;
            (low | high << 4) as i8 - 32
        })
    }
}

impl BlockQ3K {
    /// Its sub-blocks and scales.
    pub const SPEC: SymmetricSpec = SymmetricSpec { sub_len: 16, scale_min: -32 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Symmetric) -> BlockQ3K {
        let stored = fit.scales.map(|s| (s + 32) as u8);
        let scales = from_fn(|j| match j {
            0..8 => stored[j] & 0x0f | stored[8 + j] << 4,
            _ => (0..4).fold(0, |byte, u| byte | stored[4 * u + j - 8] >> 4 << (2 * u)),
        });
        let qs = from_fn(|j| {
            let first = 128 * (j / 32) + j % 32;
            (0..4).fold(0, |byte, g| byte | (fit.q[first + 32 * g] & 3) << (2 * g))
        });
        let hmask = from_fn(|l| (0..8).fold(0, |byte, k| byte | fit.q[32 * k + l] >> 2 << k));
        BlockQ3K { hmask, qs, scales, d: fit.d }
    }
}

impl Block<256> for BlockQ3K {
    const DTYPE: DType = DType::Q3_K;

    fn decode(&self) -> [f32; 256] {
        let d = self.d.to_f32();
        let scales = self.unpack_scales().map(|s| d * f32::from(s));
        from_fn(|i| {
            let low = self.qs[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3;
            let high = self.hmask[i % 32] >> (i / 32) & 1;
            scales[i / 16] * (f32::from(low | high << 2) - 4.0)
        })
    }

    fn encode(values: &[f32; 256]) -> Option<Self> {
        Self::encode_weighted(values, Weighing::Flat)
    }

    /// Searches for scales with a small squared error; each element takes the nearest level for its scale.
    fn encode_weighted(values: &[f32; 256], weighing: Weighing<'_, 256>) -> Option<Self> {
        encode_symmetric(values, weighing, &Steps { lo: -4, hi: 3 }, Self::SPEC).map(|fit| Self::pack(&fit))
    }
}
