//! IQ4_NL and IQ4_XS: 4-bit indices into 16 non-uniform levels, which are denser near zero, where most weights are.

use super::block::{Block, F16Le, Weighing, nibble};
use super::q4::pack_nibbles;
use super::search::{Levels, Symmetric, SymmetricSpec, encode_scale, encode_symmetric};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// The levels of IQ4_NL and IQ4_XS.
pub const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// IQ4_NL: `x = d * IQ4_NL_VALUES[q]`, q in 0..16.
///
/// ```text
/// byte  0   2                 18
///       | d | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: F16Le,
    /// Level indices, four bits each.
    pub qs: [u8; 16],
}

/// IQ4_XS: `x = d * (scale - 32) * IQ4_NL_VALUES[q]`, q in 0..16, scale in 0..64 for each 32 elements.
///
/// ```text
/// byte  0   2          4          8                  136
///       | d | scales_h | scales_l | qs               |
/// scales_l[t]: low nibble bits 0 to 3 of scale 2 t, high nibble those of scale 2 t + 1
/// scales_h: little-endian u16, bits 2 s and 2 s + 1 are bits 4 and 5 of scale s
/// qs[16 s + j]: low nibble element 32 s + j, high nibble element 32 s + 16 + j (s < 8, j < 16)
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales.
    pub d: F16Le,
    /// High two bits of the scales.
    pub scales_h: [u8; 2],
    /// Low four bits of the scales.
    pub scales_l: [u8; 4],
    /// Level indices, four bits each.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockIq4Nl>() == DType::IQ4_NL.block_bytes());
const _: () = assert!(size_of::<BlockIq4Xs>() == DType::IQ4_XS.block_bytes());

impl BlockIq4Nl {
    /// Creates a block of these levels.
    pub fn pack(d: F16Le, q: &[u8; 32]) -> BlockIq4Nl {
        BlockIq4Nl { d, qs: pack_nibbles(q) }
    }
}

impl BlockIq4Xs {
    /// Its sub-blocks and scales.
    pub const SPEC: SymmetricSpec = SymmetricSpec { sub_len: 32, scale_min: -32 };

    /// Creates a block of a fit.
    pub fn pack(fit: &Symmetric) -> BlockIq4Xs {
        let stored: [u8; 8] = from_fn(|s| (fit.scales[s] + 32) as u8);
        let scales_l = from_fn(|t| stored[2 * t] & 0x0f | stored[2 * t + 1] << 4);
        let scales_h = (0..8).fold(0u16, |bits, s| bits | u16::from(stored[s] >> 4) << (2 * s)).to_le_bytes();
        let qs = from_fn(|j| {
            let first = 32 * (j / 16) + j % 16;
            fit.q[first] | fit.q[first + 16] << 4
        });
        BlockIq4Xs { d: fit.d, scales_h, scales_l, qs }
    }

    /// The scale of each sub-block, in -32..32.
    pub fn unpack_scales(&self) -> [i8; 8] {
        from_fn(|s| {
            let high = (u16::from_le_bytes(self.scales_h) >> (2 * s) & 3) as u8;
            (nibble(self.scales_l[s / 2], s % 2) | high << 4) as i8 - 32
        })
    }
}

impl Block<32> for BlockIq4Nl {
    const DTYPE: DType = DType::IQ4_NL;

    fn decode(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        from_fn(|i| d * level(nibble(self.qs[i % 16], i / 16)))
    }

    fn encode(values: &[f32; 32]) -> Option<Self> {
        Self::encode_weighted(values, Weighing::Flat)
    }

    /// Searches for a scale with a small squared error; each element takes the nearest level for the rounded scale.
    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let (d, q) = encode_scale(values, weighing, &Iq4Levels)?;
        Some(Self::pack(d, &q))
    }
}

impl Block<256> for BlockIq4Xs {
    const DTYPE: DType = DType::IQ4_XS;

    fn decode(&self) -> [f32; 256] {
        let d = self.d.to_f32();
        let scales = self.unpack_scales().map(|s| d * f32::from(s));
        from_fn(|i| scales[i / 32] * level(nibble(self.qs[16 * (i / 32) + i % 16], i % 32 / 16)))
    }

    fn encode(values: &[f32; 256]) -> Option<Self> {
        Self::encode_weighted(values, Weighing::Flat)
    }

    /// Searches for scales with a small squared error; each element takes the nearest level for its scale.
    fn encode_weighted(values: &[f32; 256], weighing: Weighing<'_, 256>) -> Option<Self> {
        encode_symmetric(values, weighing, &Iq4Levels, Self::SPEC).map(|fit| Self::pack(&fit))
    }
}

fn level(q: u8) -> f32 {
    f32::from(IQ4_NL_VALUES[usize::from(q)])
}

/// The levels of [`IQ4_NL_VALUES`].
struct Iq4Levels;

impl Levels for Iq4Levels {
    fn nearest(&self, v: f32) -> u8 {
        // The number of midpoints below v.
        IQ4_NL_VALUES.windows(2).map(|w| u8::from(v > (f32::from(w[0]) + f32::from(w[1])) / 2.0)).sum()
    }

    fn rounded(&self, v: f32) -> f32 {
        level(self.nearest(v))
    }

    fn extremes(&self) -> [f32; 2] {
        [level(0), level(15)]
    }
}
