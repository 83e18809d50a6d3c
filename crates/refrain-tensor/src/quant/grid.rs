//! Grids of the IQ2 and IQ3 types: the points that groups of magnitudes are rounded to.
//!
//! A grid has far fewer points than there are combinations of levels, so an index needs two or three bits for each
//! magnitude. The points are part of the format; `tools/quant_grids.py` writes them to `grids.bin`.

/// Points of IQ2_XXS.
pub static IQ2_XXS_GRID: [u16; 256] = points(0);
/// Points of IQ2_XS.
pub static IQ2_XS_GRID: [u16; 512] = points(256);
/// Points of IQ2_S.
pub static IQ2_S_GRID: [u16; 1024] = points(768);
/// Points of IQ3_XXS.
pub static IQ3_XXS_GRID: [u16; 256] = points(1792);
/// Points of IQ3_S.
pub static IQ3_S_GRID: [u16; 512] = points(2048);

/// Magnitudes of the IQ2 types.
pub const IQ2_LEVELS: [u8; 4] = [8, 25, 43, 0];
/// Magnitudes of IQ3_XXS.
pub const IQ3_XXS_LEVELS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Magnitudes of IQ3_S.
pub const IQ3_S_LEVELS: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// The eight magnitudes of a point of an IQ2 grid.
pub const fn iq2_point(point: u16) -> [u8; 8] {
    let mut magnitudes = [0; 8];
    let mut i = 0;
    while i < 8 {
        magnitudes[i] = IQ2_LEVELS[(point >> (2 * i) & 3) as usize];
        i += 1;
    }
    magnitudes
}

/// The four magnitudes of a point of an IQ3 grid with these levels.
pub const fn iq3_point(levels: &[u8; 8], point: u16) -> [u8; 4] {
    let mut magnitudes = [0; 4];
    let mut i = 0;
    while i < 4 {
        magnitudes[i] = levels[(point >> (3 * i) & 7) as usize];
        i += 1;
    }
    magnitudes
}

/// The signs that seven bits stand for, one bit per element: the eighth makes their number even.
pub const fn even_signs(seven: u8) -> u8 {
    seven | (seven.count_ones() as u8 & 1) << 7
}

const fn points<const N: usize>(first: usize) -> [u16; N] {
    const BYTES: [u8; 5120] = *include_bytes!("grids.bin");
    let mut points = [0; N];
    let mut i = 0;
    while i < N {
        points[i] = u16::from_le_bytes([BYTES[2 * (first + i)], BYTES[2 * (first + i) + 1]]);
        i += 1;
    }
    points
}
