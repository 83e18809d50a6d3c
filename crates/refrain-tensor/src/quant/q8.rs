//! Q8_0: 32 elements of eight bits with one scale.

use super::block::{Block, F16Le, Weighing};
use super::search::{inverse, peak_idx};
use crate::DType;
use bytemuck::{Pod, Zeroable};

/// Q8_0: `x = d * q`, q in -128..128.
///
/// ```text
/// byte  0   2                                 34
///       | d | qs                              |
/// qs[i]: element i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: F16Le,
    /// Levels.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_0>() == DType::Q8_0.block_bytes());

impl Block<32> for BlockQ8_0 {
    const DTYPE: DType = DType::Q8_0;

    fn decode(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        self.qs.map(|q| d * f32::from(q))
    }

    /// Maps the largest magnitude to 127; rounds ties away from zero.
    fn encode(values: &[f32; 32]) -> Option<Self> {
        let d = values[peak_idx(values)].abs() / 127.0;
        let inv = inverse(d);
        Some(BlockQ8_0 { d: F16Le::from_f32(d)?, qs: values.map(|v| (v * inv).round() as i8) })
    }

    /// As [`Block::encode`]: 255 levels leave a search nothing to gain.
    fn encode_weighted(values: &[f32; 32], _weighing: Weighing<'_, 32>) -> Option<Self> {
        Self::encode(values)
    }
}
