//! Q5_0 and Q5_1: 32 elements of five bits with one scale; the fifth bits are stored separately.

use super::block::{Block, F16Le, Weighing, nibble};
use super::q4::pack_nibbles;
use super::search::{Steps, encode_line, encode_scale, inverse, peak_idx, range};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// Q5_0: `x = d * (q - 16)`, q in 0..32.
///
/// ```text
/// byte  0   2      6                 22
///       | d | qh   | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j (bits 0 to 3 of q)
/// qh: little-endian u32, bit i is bit 4 of element i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Scale.
    pub d: F16Le,
    /// Fifth bits.
    pub qh: [u8; 4],
    /// Low four bits.
    pub qs: [u8; 16],
}

/// Q5_1: `x = d * q + m`, q in 0..32.
///
/// ```text
/// byte  0   2   4      8                 24
///       | d | m | qh   | qs              |
/// qs[j]: low nibble element j, high nibble element 16 + j (bits 0 to 3 of q)
/// qh: little-endian u32, bit i is bit 4 of element i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: F16Le,
    /// Value of level 0.
    pub m: F16Le,
    /// Fifth bits.
    pub qh: [u8; 4],
    /// Low four bits.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ5_0>() == DType::Q5_0.block_bytes());
const _: () = assert!(size_of::<BlockQ5_1>() == DType::Q5_1.block_bytes());

impl BlockQ5_0 {
    /// Creates a block of these levels.
    pub fn pack(d: F16Le, q: &[u8; 32]) -> BlockQ5_0 {
        BlockQ5_0 { d, qh: pack_fifth_bits(q), qs: pack_nibbles(q) }
    }
}

impl BlockQ5_1 {
    /// Creates a block of these levels.
    pub fn pack(d: F16Le, m: F16Le, q: &[u8; 32]) -> BlockQ5_1 {
        BlockQ5_1 { d, m, qh: pack_fifth_bits(q), qs: pack_nibbles(q) }
    }
}

impl Block<32> for BlockQ5_0 {
    const DTYPE: DType = DType::Q5_0;

    fn decode(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        from_fn(|i| d * (level(&self.qs, self.qh, i) - 16.0))
    }

    /// Maps the value of largest magnitude to level -16, whatever its sign, since that side has one more level.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let d = values[peak_idx(values)] / -16.0;
        let inv = inverse(d);
        let q = values.map(|v| ((v * inv + 16.5) as u8).min(31));
        Some(Self::pack(F16Le::from_f32(d)?, &q))
    }

    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let (d, q) = encode_scale(values, weighing, &Steps { lo: -16, hi: 15 })?;
        Some(Self::pack(d, &q))
    }
}

impl Block<32> for BlockQ5_1 {
    const DTYPE: DType = DType::Q5_1;

    fn decode(&self) -> [f32; 32] {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        from_fn(|i| d * level(&self.qs, self.qh, i) + m)
    }

    /// Maps the smallest value to level 0 and the largest to level 31.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let (min, max) = range(values);
        let d = (max - min) / 31.0;
        let inv = inverse(d);
        let q = values.map(|v| (((v - min) * inv + 0.5) as u8).min(31));
        Some(Self::pack(F16Le::from_f32(d)?, F16Le::from_f32(min)?, &q))
    }

    fn encode_weighted(values: &[f32; 32], weighing: Weighing<'_, 32>) -> Option<Self> {
        let (d, m, q) = encode_line(values, weighing, 31)?;
        Some(Self::pack(d, m, &q))
    }
}

fn level(qs: &[u8; 16], qh: [u8; 4], i: usize) -> f32 {
    let fifth = (u32::from_le_bytes(qh) >> i & 1) as u8;
    f32::from(nibble(qs[i % 16], i / 16) | fifth << 4)
}

fn pack_fifth_bits(q: &[u8; 32]) -> [u8; 4] {
    q.iter().enumerate().fold(0u32, |bits, (i, &q)| bits | u32::from(q >> 4) << i).to_le_bytes()
}
