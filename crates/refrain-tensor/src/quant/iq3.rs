//! IQ3_XXS and IQ3_S: groups of four magnitudes as points of a grid, with a sign for each element.

use super::block::{F16Le, nibble};
use super::grid::{IQ3_S_GRID, IQ3_S_LEVELS, IQ3_XXS_GRID, IQ3_XXS_LEVELS, even_signs, iq3_point};
use super::iq2::signed;
use crate::DType;
use bytemuck::{Pod, Zeroable};

/// IQ3_XXS: `x = d / 4 * (2 scale + 1) * sign * magnitude`, 256 points, scale in 0..16 for each 32 elements, seven sign
/// bits for each eight elements.
///
/// ```text
/// byte  0   2        66               98
///       | d | qs     | signs_scales   |
/// qs[j]: point of elements 4 j .. 4 j + 3 (j < 64)
/// signs_scales[4 s ..]: little-endian u32, bits 7 g to 7 g + 6 are the signs of elements 32 s + 8 g .., bits 28
///                       to 31 the scale (s < 8, g < 4)
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3Xxs {
    /// Scale of the scales.
    pub d: F16Le,
    /// Points.
    pub qs: [u8; 64],
    /// Signs and scales.
    pub signs_scales: [u8; 32],
}

/// IQ3_S: `x = d * (2 scale + 1) * sign * magnitude`, 512 points, scale in 0..16 for each 32 elements.
///
/// ```text
/// byte  0   2        66   74      106      110
///       | d | qs     | qh | signs | scales |
/// qs[j]: bits 0 to 7 of the point of elements 4 j .. 4 j + 3 (j < 64)
/// qh[j / 8]: bit j % 8 is bit 8 of that point
/// signs[g]: bit i is the sign of element 8 g + i
/// scales[t]: low nibble elements 64 t .., high nibble elements 64 t + 32 ..
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3S {
    /// Scale of the scales.
    pub d: F16Le,
    /// Low eight bits of the points.
    pub qs: [u8; 64],
    /// High bits of the points.
    pub qh: [u8; 8],
    /// Signs.
    pub signs: [u8; 32],
    /// Scales, four bits each.
    pub scales: [u8; 4],
}

const _: () = assert!(size_of::<BlockIq3Xxs>() == DType::IQ3_XXS.block_bytes());
const _: () = assert!(size_of::<BlockIq3S>() == DType::IQ3_S.block_bytes());

impl BlockIq3Xxs {
    /// Scale (0..16) and levels of group `g` of eight elements (g < 32).
    pub fn group(&self, g: usize) -> (u8, [i8; 8]) {
        let bits = u32::from_le_bytes(self.signs_scales.as_chunks::<4>().0[g / 4]);
        let point = |j: usize| iq3_point(&IQ3_XXS_LEVELS, IQ3_XXS_GRID[usize::from(self.qs[j])]);
        let signs = even_signs((bits >> (7 * (g % 4)) & 0x7f) as u8);
        ((bits >> 28) as u8, signed(join(point(2 * g), point(2 * g + 1)), signs))
    }

    /// Decodes the elements.
    pub fn decode(&self) -> [f32; 256] {
        decode(|g| self.group(g), |scale| self.d.to_f32() * (0.5 + scale) * 0.5)
    }
}

impl BlockIq3S {
    /// Scale (0..16) and levels of group `g` of eight elements (g < 32).
    pub fn group(&self, g: usize) -> (u8, [i8; 8]) {
        let point = |j: usize| {
            let high = usize::from(self.qh[j / 8] >> (j % 8) & 1);
            iq3_point(&IQ3_S_LEVELS, IQ3_S_GRID[usize::from(self.qs[j]) | high << 8])
        };
        (nibble(self.scales[g / 8], g % 8 / 4), signed(join(point(2 * g), point(2 * g + 1)), self.signs[g]))
    }

    /// Decodes the elements.
    pub fn decode(&self) -> [f32; 256] {
        decode(|g| self.group(g), |scale| self.d.to_f32() * (1.0 + 2.0 * scale))
    }
}

fn join(a: [u8; 4], b: [u8; 4]) -> [u8; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

fn decode(group: impl Fn(usize) -> (u8, [i8; 8]), scale_of: impl Fn(f32) -> f32) -> [f32; 256] {
    let mut values = [0.0; 256];
    for (g, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (scale, levels) = group(g);
        let scale = scale_of(f32::from(scale));
        *values = levels.map(|level| scale * f32::from(level));
    }
    values
}
