//! IQ2_XXS, IQ2_XS and IQ2_S: groups of eight magnitudes as points of a grid, with a sign for each element.
//!
//! All three are `x = d / 8 * (2 scale + 1) * sign * magnitude`, scale in 0..16. They differ in the size of the grid,
//! the number of elements per scale, and in whether the number of negative signs of a group is always even.

use super::block::{F16Le, nibble};
use super::grid::{IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, even_signs, iq2_point};
use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::array::from_fn;

/// IQ2_XXS: 256 points, one scale for each 32 elements, seven sign bits for each group.
///
/// ```text
/// byte  0   2                  66
///       | d | qs               |
/// qs[8 s + g]: point of group g of sub-block s (s < 8, g < 4)
/// qs[8 s + 4 ..]: little-endian u32, bits 7 g to 7 g + 6 are the signs of group g, bits 28 to 31 the scale
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xxs {
    /// Scale of the scales.
    pub d: F16Le,
    /// Points, signs and scales.
    pub qs: [u8; 64],
}

/// IQ2_XS: 512 points, one scale for each 16 elements, seven sign bits for each group.
///
/// ```text
/// byte  0   2                  66       74
///       | d | qs               | scales |
/// qs[2 g ..]: little-endian u16 of group g, bits 0 to 8 its point, bits 9 to 15 its signs (g < 32)
/// scales[t]: low nibble elements 32 t .., high nibble elements 32 t + 16 ..
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xs {
    /// Scale of the scales.
    pub d: F16Le,
    /// Points and signs.
    pub qs: [u8; 64],
    /// Scales, four bits each.
    pub scales: [u8; 8],
}

/// IQ2_S: 1024 points, one scale for each 16 elements, eight sign bits for each group.
///
/// ```text
/// byte  0   2     34      66   74       82
///       | d | qs  | signs | qh | scales |
/// qs[g]: bits 0 to 7 of the point of group g (g < 32)
/// signs[g]: bit i is the sign of element 8 g + i
/// qh[g / 4]: bits 2 (g % 4) and above are bits 8 and 9 of the point of group g
/// scales[t]: low nibble elements 32 t .., high nibble elements 32 t + 16 ..
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2S {
    /// Scale of the scales.
    pub d: F16Le,
    /// Low eight bits of the points.
    pub qs: [u8; 32],
    /// Signs.
    pub signs: [u8; 32],
    /// High two bits of the points.
    pub qh: [u8; 8],
    /// Scales, four bits each.
    pub scales: [u8; 8],
}

const _: () = assert!(size_of::<BlockIq2Xxs>() == DType::IQ2_XXS.block_bytes());
const _: () = assert!(size_of::<BlockIq2Xs>() == DType::IQ2_XS.block_bytes());
const _: () = assert!(size_of::<BlockIq2S>() == DType::IQ2_S.block_bytes());

/// Signed levels of eight elements, and the scale that multiplies them.
pub(super) fn signed(magnitudes: [u8; 8], signs: u8) -> [i8; 8] {
    from_fn(|i| if signs >> i & 1 == 1 { -(magnitudes[i] as i8) } else { magnitudes[i] as i8 })
}

impl BlockIq2Xxs {
    /// Scale (0..16) and levels of group `g` of eight elements (g < 32).
    pub fn group(&self, g: usize) -> (u8, [i8; 8]) {
        let sub = &self.qs.as_chunks::<8>().0[g / 4];
        let bits = u32::from_le_bytes([sub[4], sub[5], sub[6], sub[7]]);
        let point = iq2_point(IQ2_XXS_GRID[usize::from(sub[g % 4])]);
        ((bits >> 28) as u8, signed(point, even_signs((bits >> (7 * (g % 4)) & 0x7f) as u8)))
    }

    /// Decodes the elements.
    pub fn decode(&self) -> [f32; 256] {
        decode(self.d, |g| self.group(g))
    }
}

impl BlockIq2Xs {
    /// Scale (0..16) and levels of group `g` of eight elements (g < 32).
    pub fn group(&self, g: usize) -> (u8, [i8; 8]) {
        let bits = u16::from_le_bytes(self.qs.as_chunks::<2>().0[g]);
        let point = iq2_point(IQ2_XS_GRID[usize::from(bits & 511)]);
        (nibble(self.scales[g / 4], g % 4 / 2), signed(point, even_signs((bits >> 9) as u8)))
    }

    /// Decodes the elements.
    pub fn decode(&self) -> [f32; 256] {
        decode(self.d, |g| self.group(g))
    }
}

impl BlockIq2S {
    /// Scale (0..16) and levels of group `g` of eight elements (g < 32).
    pub fn group(&self, g: usize) -> (u8, [i8; 8]) {
        let high = usize::from(self.qh[g / 4] >> (2 * (g % 4)) & 3);
        let point = iq2_point(IQ2_S_GRID[usize::from(self.qs[g]) | high << 8]);
        (nibble(self.scales[g / 4], g % 4 / 2), signed(point, self.signs[g]))
    }

    /// Decodes the elements.
    pub fn decode(&self) -> [f32; 256] {
        decode(self.d, |g| self.group(g))
    }
}

fn decode(d: F16Le, group: impl Fn(usize) -> (u8, [i8; 8])) -> [f32; 256] {
    let mut values = [0.0; 256];
    for (g, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (scale, levels) = group(g);
        let scale = d.to_f32() * (0.5 + f32::from(scale)) * 0.25;
        *values = levels.map(|level| scale * f32::from(level));
    }
    values
}
