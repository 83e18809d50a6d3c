use crate::DType;
use bytemuck::{Pod, Zeroable};
use half::f16;

/// One block of a quantised type: `N` elements in the bytes that files hold.
pub trait Block<const N: usize>: Pod {
    /// The type that is made of these blocks.
    const DTYPE: DType;

    /// The elements.
    fn decode(&self) -> [f32; N];

    /// A block that decodes to about `values`, which are finite; `None` when they are too large for its scales.
    fn encode(values: &[f32; N]) -> Option<Self>;
}

/// An f16 in a block: little-endian, at any address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16Le(pub [u8; 2]);

impl F16Le {
    /// The value, exactly.
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }

    /// The nearest f16, ties to even; `None` when it is not finite.
    pub fn from_f32(value: f32) -> Option<F16Le> {
        let value = f16::from_f32(value);
        value.is_finite().then(|| F16Le(value.to_le_bytes()))
    }
}

/// Low (`high` = 0) or high (`high` = 1) four bits.
pub(super) fn nibble(byte: u8, high: usize) -> u8 {
    byte >> (4 * high) & 0x0f
}
