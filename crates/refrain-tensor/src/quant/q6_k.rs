//! Q6_K: 256 elements of six bits in 16 sub-blocks, each with a signed eight-bit scale.

use super::block::{Block, F16Le, Weighing, nibble};
use super::search::{Steps, Symmetric, SymmetricSpec, encode_symmetric};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q6_K: `x = d * scale * (q - 32)`, q in 0..64, scale in -128..128 for each 16 elements.
///
/// ```text
/// byte  0                  128           192      208 210
///       | ql               | qh          | scales | d |
/// Element 128 h + 32 g + l (h < 2, g < 4, l < 32):
///   bits 0 to 3: nibble g / 2 (0 low, 1 high) of ql[64 h + 32 (g % 2) + l]
///   bits 4 and 5: bits 2 g and 2 g + 1 of qh[32 h + l]
/// scales[s]: of elements 16 s to 16 s + 15
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// Low four bits.
    pub ql: [u8; 128],
    /// High two bits.
    pub qh: [u8; 64],
    /// Scale of each sub-block.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: F16Le,
}

const _: () = assert!(size_of::<BlockQ6K>() == DType::Q6_K.block_bytes());

impl BlockQ6K {
    /// Its sub-blocks and scales.
    pub const SPEC: SymmetricSpec = SymmetricSpec { sub_len: 16, scale_min: -128 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Symmetric) -> BlockQ6K {
        let ql = from_fn(|j| {
            let first = 128 * (j / 64) + j % 64;
            fit.q[first] & 0x0f | fit.q[first + 64] << 4
        });
        let qh = from_fn(|j| {
            let first = 128 * (j / 32) + j % 32;
            (0..4).fold(0, |byte, g| byte | fit.q[first + 32 * g] >> 4 << (2 * g))
        });
        BlockQ6K { ql, qh, scales: fit.scales.map(|s| s as i8), d: fit.d }
    }
}

impl Block<256> for BlockQ6K {
    const DTYPE: DType = DType::Q6_K;

    fn decode(&self) -> [f32; 256] {
        let d = self.d.to_f32();
        from_fn(|i| {
            let (h, g, l) = (i / 128, i % 128 / 32, i % 32);
            let low = nibble(self.ql[64 * h + 32 * (g % 2) + l], g / 2);
            let high = self.qh[32 * h + l] >> (2 * g) & 3;
            d * f32::from(self.scales[i / 16]) * (f32::from(low | high << 4) - 32.0)
        })
    }

    fn encode(values: &[f32; 256]) -> Option<Self> {
        Self::encode_weighted(values, Weighing::Flat)
    }

    /// Searches for scales with a small squared error; each element takes the nearest level for its scale.
    fn encode_weighted(values: &[f32; 256], weighing: Weighing<'_, 256>) -> Option<Self> {
        encode_symmetric(values, weighing, &Steps { lo: -32, hi: 31 }, Self::SPEC).map(|fit| Self::pack(&fit))
    }
}
