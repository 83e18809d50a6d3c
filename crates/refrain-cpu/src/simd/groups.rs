//! Tiles of the IQ2 and IQ3 types, decoded to bytes for each use.
//!
//! A tile is one block of 256 elements of 16 rows: 16 half floats, four words of 16 scales per row (odd, below 32), and
//! 64 words of levels plus [`LEVEL_OFFSET`] per row, words of adjacent rows side by side as in every tile. It takes
//! three to four times the bytes of the file, so weights are never kept in this form: tiles are made for a chunk that fits
//! in the L1 cache. All types share one form and one kernel, which differ only in a power of two.

use refrain_tensor::DType;
use refrain_tensor::quant::grid::{
    IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_S_LEVELS, IQ3_XXS_GRID, IQ3_XXS_LEVELS,
    even_signs, iq2_point, iq3_point,
};
use refrain_tensor::quant::{BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs};

use super::tile::TILE_ROWS;

/// Added to each level, whose magnitude is at most 62.
pub(crate) const LEVEL_OFFSET: i32 = 64;
/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = 2 * TILE_ROWS + 4 * TILE_ROWS * N_WORDS;
/// Scales and levels of a row.
const N_WORDS: usize = 4 + 64;

/// A block of 32 groups of eight elements, each with an odd scale.
trait GroupBlock: bytemuck::Pod {
    /// The block's scale, as in the file.
    fn d(&self) -> [u8; 2];
    /// Scale of the 16 elements of groups `2 t` and `2 t + 1` (t < 16), in 0..16.
    fn scale(&self, t: usize) -> u8;
    /// Magnitudes of group `g` in element order, and the bits of its negative elements.
    fn group(&self, g: usize) -> (u64, u8);
}

/// Writes the tiles of whole blocks of 16 rows of `dtype`: `n_blocks` blocks each, and as many tiles.
///
/// # Panics
/// If the dtype has no such tiles, or the sizes do not match.
pub(crate) fn make_tiles_of(dtype: DType, rows: &[&[u8]; TILE_ROWS], tiles: &mut [u8]) {
    match dtype {
        DType::IQ2_XXS => make_tiles::<BlockIq2Xxs>(rows, tiles),
        DType::IQ2_XS => make_tiles::<BlockIq2Xs>(rows, tiles),
        DType::IQ2_S => make_tiles::<BlockIq2S>(rows, tiles),
        DType::IQ3_XXS => make_tiles::<BlockIq3Xxs>(rows, tiles),
        DType::IQ3_S => make_tiles::<BlockIq3S>(rows, tiles),
        DType::F32
        | DType::F16
        | DType::BF16
        | DType::I32
        | DType::U32
        | DType::I64
        | DType::U8
        | DType::Q4_0
        | DType::Q4_1
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q8_0
        | DType::Q2_K
        | DType::Q3_K
        | DType::Q4_K
        | DType::Q5_K
        | DType::Q6_K
        | DType::IQ4_NL
        | DType::IQ4_XS
        | DType::MXFP4 => unreachable!("{dtype} is not made of groups"),
    }
}

fn make_tiles<B: GroupBlock>(rows: &[&[u8]; TILE_ROWS], tiles: &mut [u8]) {
    let block_bytes = size_of::<B>();
    assert!(rows.iter().all(|row| row.len() / block_bytes * TILE_BYTES == tiles.len()), "a tile per block");
    for (block_idx, tile) in tiles.chunks_exact_mut(TILE_BYTES).enumerate() {
        for (row_idx, row) in rows.iter().enumerate() {
            let block: &B = bytemuck::from_bytes(&row[block_idx * block_bytes..][..block_bytes]);
            put(block, row_idx, tile);
        }
    }
}

#[inline(always)]
fn put<B: GroupBlock>(block: &B, row_idx: usize, tile: &mut [u8]) {
    tile[2 * row_idx..2 * row_idx + 2].copy_from_slice(&block.d());
    let (words, _) = tile[2 * TILE_ROWS..].as_chunks_mut::<{ 4 * TILE_ROWS }>();
    let at = 4 * row_idx;
    for (j, word) in words[..4].iter_mut().enumerate() {
        let scales: [u8; 4] = std::array::from_fn(|t| 2 * block.scale(4 * j + t) + 1);
        word[at..at + 4].copy_from_slice(&scales);
    }
    for (g, pair) in words[4..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (magnitudes, signs) = block.group(g);
        let bytes = signed(magnitudes, signs).to_le_bytes();
        pair[0][at..at + 4].copy_from_slice(&bytes[..4]);
        pair[1][at..at + 4].copy_from_slice(&bytes[4..]);
    }
}

/// The levels plus the offset: `64 + m` or `64 - m` for each byte.
#[inline(always)]
fn signed(magnitudes: u64, signs: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let negative = SIGN_BYTES[usize::from(signs)];
    // For a magnitude below 64, 64 - m is (m ^ 63) + 1; no byte carries.
    (magnitudes ^ negative & (63 * ONES)) + (negative & ONES) + (!negative & (64 * ONES))
}

/// For each byte, 0xff where its bit is set.
static SIGN_BYTES: [u64; 256] = {
    let mut table = [0; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut i = 0;
        while i < 8 {
            if bits >> i & 1 == 1 {
                table[bits] |= 0xff << (8 * i);
            }
            i += 1;
        }
        bits += 1;
    }
    table
};

const fn iq2_table<const N: usize>(grid: &[u16; N]) -> [u64; N] {
    let mut table = [0; N];
    let mut i = 0;
    while i < N {
        table[i] = u64::from_le_bytes(iq2_point(grid[i]));
        i += 1;
    }
    table
}

const fn iq3_table<const N: usize>(levels: &[u8; 8], grid: &[u16; N]) -> [u32; N] {
    let mut table = [0; N];
    let mut i = 0;
    while i < N {
        table[i] = u32::from_le_bytes(iq3_point(levels, grid[i]));
        i += 1;
    }
    table
}

static IQ2_XXS: [u64; 256] = iq2_table(&IQ2_XXS_GRID);
static IQ2_XS: [u64; 512] = iq2_table(&IQ2_XS_GRID);
static IQ2_S: [u64; 1024] = iq2_table(&IQ2_S_GRID);
static IQ3_XXS: [u32; 256] = iq3_table(&IQ3_XXS_LEVELS, &IQ3_XXS_GRID);
static IQ3_S: [u32; 512] = iq3_table(&IQ3_S_LEVELS, &IQ3_S_GRID);

fn nibble(byte: u8, high: usize) -> u8 {
    byte >> (4 * high) & 15
}

fn word_of(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn joined(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl GroupBlock for BlockIq2Xxs {
    fn d(&self) -> [u8; 2] {
        self.d.0
    }
    #[inline(always)]
    fn scale(&self, t: usize) -> u8 {
        self.qs[8 * (t / 2) + 7] >> 4
    }
    #[inline(always)]
    fn group(&self, g: usize) -> (u64, u8) {
        let bits = word_of(&self.qs, 8 * (g / 4) + 4);
        let point = IQ2_XXS[usize::from(self.qs[8 * (g / 4) + g % 4])];
        (point, even_signs((bits >> (7 * (g % 4)) & 0x7f) as u8))
    }
}

impl GroupBlock for BlockIq2Xs {
    fn d(&self) -> [u8; 2] {
        self.d.0
    }
    #[inline(always)]
    fn scale(&self, t: usize) -> u8 {
        nibble(self.scales[t / 2], t % 2)
    }
    #[inline(always)]
    fn group(&self, g: usize) -> (u64, u8) {
        let bits = u16::from_le_bytes([self.qs[2 * g], self.qs[2 * g + 1]]);
        (IQ2_XS[usize::from(bits & 511)], even_signs((bits >> 9) as u8))
    }
}

impl GroupBlock for BlockIq2S {
    fn d(&self) -> [u8; 2] {
        self.d.0
    }
    #[inline(always)]
    fn scale(&self, t: usize) -> u8 {
        nibble(self.scales[t / 2], t % 2)
    }
    #[inline(always)]
    fn group(&self, g: usize) -> (u64, u8) {
        let high = usize::from(self.qh[g / 4] >> (2 * (g % 4)) & 3);
        (IQ2_S[usize::from(self.qs[g]) | high << 8], self.signs[g])
    }
}

impl GroupBlock for BlockIq3Xxs {
    fn d(&self) -> [u8; 2] {
        self.d.0
    }
    #[inline(always)]
    fn scale(&self, t: usize) -> u8 {
        self.signs_scales[4 * (t / 2) + 3] >> 4
    }
    #[inline(always)]
    fn group(&self, g: usize) -> (u64, u8) {
        let bits = word_of(&self.signs_scales, 4 * (g / 4));
        let point = |j: usize| IQ3_XXS[usize::from(self.qs[j])];
        (joined(point(2 * g), point(2 * g + 1)), even_signs((bits >> (7 * (g % 4)) & 0x7f) as u8))
    }
}

impl GroupBlock for BlockIq3S {
    fn d(&self) -> [u8; 2] {
        self.d.0
    }
    #[inline(always)]
    fn scale(&self, t: usize) -> u8 {
        nibble(self.scales[t / 4], t % 4 / 2)
    }
    #[inline(always)]
    fn group(&self, g: usize) -> (u64, u8) {
        let point = |j: usize| {
            let high = usize::from(self.qh[j / 8] >> (j % 8) & 1);
            IQ3_S[usize::from(self.qs[j]) | high << 8]
        };
        (joined(point(2 * g), point(2 * g + 1)), self.signs[g])
    }
}
