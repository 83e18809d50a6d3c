//! Q4_0 and Q4_1: 32 elements of four bits under one scale.

use super::block::{Block, F16Le, Weighing, nibble};
use super::search::{Steps, encode_line, encode_scale, inverse, peak_idx, range};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q4_0: `x = d * (q - 8)`, q in 0..16.
///
/// ```text
/// byte  0   2                 18
///       | d | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: F16Le,
    /// Levels, four bits each.
    pub qs: [u8; 16],
}

/// Q4_1: `x = d * q + m`, q in 0..16.
///
/// ```text
/// byte  0   2   4                 20
///       | d | m | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: F16Le,
    /// Value of level 0.
    pub m: F16Le,
    /// Levels, four bits each.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == DType::Q4_0.block_bytes());
const _: () = assert!(size_of::<BlockQ4_1>() == DType::Q4_1.block_bytes());

impl BlockQ4_0 {
    /// Creates a block of these levels.
    pub fn pack(d: F16Le, q: &[u8; 32]) -> BlockQ4_0 {
        BlockQ4_0 { d, qs: pack_nibbles(q) }
    }
}

impl BlockQ4_1 {
    /// Creates a block of these levels.
    pub fn pack(d: F16Le, m: F16Le, q: &[u8; 32]) -> BlockQ4_1 {
        BlockQ4_1 { d, m, qs: pack_nibbles(q) }
    }
}

impl Block<32> for BlockQ4_0 {
    const DTYPE: DType = DType::Q4_0;

    fn decode(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        from_fn(|i| d * (f32::from(nibble(self.qs[i % 16], i / 16)) - 8.0))
    }

    /// Maps the value of largest magnitude to level -8, whatever its sign, since that side has one more level.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let d = values[peak_idx(values)] / -8.0;
        let inv = inverse(d);
        let q = values.map(|v| ((v * inv + 8.5) as u8).min(15));
        Some(Self::pack(F16Le::from_f32(d)?, &q))
    }

    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let (d, q) = encode_scale(values, weighing, &Steps { lo: -8, hi: 7 })?;
        Some(Self::pack(d, &q))
    }
}

impl Block<32> for BlockQ4_1 {
    const DTYPE: DType = DType::Q4_1;

    fn decode(&self) -> [f32; 32] {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        from_fn(|i| d * f32::from(nibble(self.qs[i % 16], i / 16)) + m)
    }

    /// Maps the smallest value to level 0 and the largest to level 15.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let (min, max) = range(values);
        let d = (max - min) / 15.0;
        let inv = inverse(d);
        let q = values.map(|v| (((v - min) * inv + 0.5) as u8).min(15));
        Some(Self::pack(F16Le::from_f32(d)?, F16Le::from_f32(min)?, &q))
    }

    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let (d, m, q) = encode_line(values, weighing, 15)?;
        Some(Self::pack(d, m, &q))
    }
}

/// Packs the low four bits of elements `j` and `16 + j` into one byte.
pub(super) fn pack_nibbles(q: &[u8; 32]) -> [u8; 16] {
    from_fn(|j| q[j] & 0x0f | q[16 + j] << 4)
}
