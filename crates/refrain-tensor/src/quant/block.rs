use crate::DType;
use bytemuck::{Pod, Zeroable};
use half::f16;

/// A block of a quantised type: `N` elements in their file layout.
pub trait Block<const N: usize>: Pod {
    /// The dtype that consists of these blocks.
    const DTYPE: DType;

    /// Decodes the elements.
    fn decode(&self) -> [f32; N];

    /// Encodes finite `values`, with rounding; `None` if they are too large for the block's scales.
    fn encode(values: &[f32; N]) -> Option<Self>;

    /// Encodes finite `values` with a small squared error; `None` if they are too large for the block's scales.
    fn encode_weighted(values: &[f32; N], weighing: Weighing<'_, N>) -> Option<Self>;
}

/// How much the error of each element of a block counts.
#[derive(Clone, Copy, Debug)]
pub enum Weighing<'a, const N: usize> {
    /// All the same.
    Flat,
    /// More for large elements.
    Size,
    /// More for large elements, times these factors, which are not negative.
    Importance(&'a [f32; N]),
}

/// An f16 within a block: little-endian, without alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16Le(pub [u8; 2]);

impl F16Le {
    /// Converts exactly.
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }

    /// Rounds to the nearest f16, ties to even; `None` if the result is not finite.
    pub fn from_f32(value: f32) -> Option<F16Le> {
        let value = f16::from_f32(value);
        value.is_finite().then(|| F16Le(value.to_le_bytes()))
    }
}

/// Returns the low (`high` = 0) or high (`high` = 1) four bits.
pub(super) fn nibble(byte: u8, high: usize) -> u8 {
    byte >> (4 * high) & 0x0f
}
