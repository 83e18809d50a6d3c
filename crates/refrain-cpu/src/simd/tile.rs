//! Packed layout of weights: a tile is one block column of 16 rows, word by word.
//!
//! Word `j` (32 bits) of the block of row `i` is word `16 j + i` of the tile. A register then holds the same
//! word of adjacent rows and each lane sums one row: no sums across lanes, whatever the register width. A
//! half-float scale that leaves a block unaligned comes first, as 16 half floats. The words are in the order in
//! which kernels read them, which is the file's order for most types, because the hardware prefetcher only
//! follows sequential reads. Two changes save work in kernels: signed bytes (Q8_0) are stored plus 128, and the
//! fifth bits of Q5_0 and Q5_1 are arranged so that bit `t` of byte `b` belongs to element `4 t + b`. A tile
//! has as many bytes as its 16 blocks.

use half::bf16;
use refrain_tensor::DType;
use refrain_tensor::quant::mxfp4_scale;

use super::groups;
use super::lanes::{Simd, SimdKernel};

/// Rows per tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Layout of a dtype's blocks in the file and in a tile.
#[derive(Clone, Copy)]
pub(crate) struct TileSpec {
    /// Bytes per block in the file.
    pub(crate) block_bytes: usize,
    /// The scale before the words.
    scale: LoneScale,
    /// Offset of the words in the block.
    words_at: usize,
    /// Runs of words (first and count) that make up the tile, in order.
    runs: &'static [(usize, usize)],
    fixup: Fixup,
}

/// A scale that leaves a block unaligned: first in the tile, as 16 numbers of two bytes.
#[derive(Clone, Copy, PartialEq)]
enum LoneScale {
    None,
    /// A half float at this offset of the block.
    Half(usize),
    /// An exponent in the first byte, stored as BF16. The tile is larger than its blocks.
    Exponent,
}

#[derive(Clone, Copy, PartialEq)]
enum Fixup {
    None,
    /// Adds 128 to every byte.
    Unsigned,
    /// Reorders the bits of this word.
    FifthBits(usize),
    /// Decodes groups to bytes (see `groups`).
    Groups,
}

/// The scales of the parts. Then, for every other part of each half, the two words of low bits and the word of
/// high bits (four of each) that it shares with three more parts.
const Q6_K_RUNS: &[(usize, usize)] = &[
    (48, 4),
    (0, 4),
    (8, 4),
    (32, 4),
    (4, 4),
    (12, 4),
    (36, 4),
    (16, 4),
    (24, 4),
    (40, 4),
    (20, 4),
    (28, 4),
    (44, 4),
];

impl TileSpec {
    /// Returns the tile layout of `dtype`, or `None` if it has none.
    pub(crate) fn new(dtype: DType) -> Option<TileSpec> {
        let (scale, words_at, runs, fixup): (_, _, &[(usize, usize)], _) = match dtype {
            DType::Q4_0 | DType::IQ4_NL => (LoneScale::Half(0), 2, &[(0, 4)], Fixup::None),
            DType::Q4_1 => (LoneScale::None, 0, &[(0, 5)], Fixup::None),
            DType::Q5_0 => (LoneScale::Half(0), 2, &[(0, 5)], Fixup::FifthBits(0)),
            DType::Q5_1 => (LoneScale::None, 0, &[(0, 6)], Fixup::FifthBits(1)),
            DType::Q8_0 => (LoneScale::Half(0), 2, &[(0, 8)], Fixup::Unsigned),
            // Scale pair, scales of the parts, quants.
            DType::Q2_K => (LoneScale::None, 0, &[(20, 1), (0, 20)], Fixup::None),
            // Scales of the parts, third bits, low bits.
            DType::Q3_K => (LoneScale::Half(108), 0, &[(24, 3), (0, 24)], Fixup::None),
            DType::Q4_K => (LoneScale::None, 0, &[(0, 36)], Fixup::None),
            DType::Q5_K => (LoneScale::None, 0, &[(0, 44)], Fixup::None),
            DType::Q6_K => (LoneScale::Half(208), 0, Q6_K_RUNS, Fixup::None),
            DType::IQ4_XS => (LoneScale::None, 0, &[(0, 34)], Fixup::None),
            DType::MXFP4 => (LoneScale::Exponent, 1, &[(0, 4)], Fixup::None),
            DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => {
                (LoneScale::None, 0, &[], Fixup::Groups)
            }
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::I32 | DType::U32 | DType::I64 | DType::U8 => return None,
        };
        Some(TileSpec { block_bytes: dtype.block_bytes(), scale, words_at, runs, fixup })
    }

    fn n_words(&self) -> usize {
        self.runs.iter().map(|(_, n)| n).sum()
    }

    /// Bytes per tile.
    pub(crate) const fn tile_bytes(&self) -> usize {
        match (self.fixup, self.scale) {
            (Fixup::Groups, _) => groups::TILE_BYTES,
            (_, LoneScale::Exponent) => TILE_ROWS * (self.block_bytes + 1),
            _ => TILE_ROWS * self.block_bytes,
        }
    }

    /// Whether tiles take several times the bytes of the file, so that weights stay there.
    pub(crate) fn is_decoded_for_each_use(&self) -> bool {
        self.fixup == Fixup::Groups
    }
}

/// Kernel that packs the tiles of `n_blocks` consecutive blocks of 16 rows.
pub(crate) struct MakeTiles<'a> {
    spec: TileSpec,
    rows: &'a [*const u8; 16],
    n_blocks: usize,
    dst: *mut u8,
}

impl<'a> MakeTiles<'a> {
    /// # Safety
    /// `n_blocks` blocks are readable at each of `rows`, and as many tiles are writable at `dst`, until the
    /// kernel has run.
    pub(crate) unsafe fn new(
        spec: TileSpec,
        rows: &'a [*const u8; 16],
        n_blocks: usize,
        dst: *mut u8,
    ) -> Self {
        MakeTiles { spec, rows, n_blocks, dst }
    }
}

impl SimdKernel for MakeTiles<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MakeTiles { spec, rows, n_blocks, dst } = self;
        if spec.scale == LoneScale::None && spec.fixup == Fixup::None && spec.runs.len() == 1 {
            // SAFETY: without an unaligned half float, blocks consist of words, and tiles are contiguous like
            // blocks.
            unsafe { s.transpose(rows, spec.n_words() * n_blocks, dst) };
            return;
        }
        for block_idx in 0..n_blocks {
            let block = block_idx * spec.block_bytes;
            // SAFETY: all reads are inside block `block_idx` of a row and all writes inside its tile, by the
            // contract of `new`: a tile is 32 bytes of halves, if any, and 64 per word.
            unsafe {
                let mut words = dst.add(block_idx * spec.tile_bytes());
                if spec.scale != LoneScale::None {
                    for (i, row) in rows.iter().enumerate() {
                        let scale = match spec.scale {
                            LoneScale::Half(at) => row.add(block + at).cast::<[u8; 2]>().read(),
                            LoneScale::None | LoneScale::Exponent => {
                                bf16::from_f32(mxfp4_scale(row.add(block).read())).to_le_bytes()
                            }
                        };
                        words.add(2 * i).cast::<[u8; 2]>().write(scale);
                    }
                    words = words.add(32);
                }
                let mut to = words;
                for &(first, n) in spec.runs {
                    let mut from = *rows;
                    for from in &mut from {
                        *from = from.add(block + spec.words_at + 4 * first);
                    }
                    s.transpose(&from, n, to);
                    to = to.add(64 * n);
                }
                fix(s, spec, words);
            }
        }
    }
}

/// # Safety
/// `words` points at the words of a tile of `spec`.
#[inline(always)]
unsafe fn fix<S: Simd>(s: S, spec: TileSpec, words: *mut u8) {
    match spec.fixup {
        Fixup::None => {}
        Fixup::Groups => unreachable!("made by `groups`"),
        Fixup::Unsigned => {
            let high_bits = s.splat(i32::from_le_bytes([0x80; 4]));
            for at in (0..64 * spec.n_words()).step_by(4 * S::LANES) {
                // SAFETY: `at` runs over the registers of the tile's words.
                unsafe { s.store(words.add(at), s.xor(s.load(words.add(at)), high_bits)) };
            }
        }
        Fixup::FifthBits(word) => {
            for at in (64 * word..64 * (word + 1)).step_by(4 * S::LANES) {
                // SAFETY: `at` runs over the registers of that word.
                unsafe { s.store(words.add(at), spread_fifth_bits(s, s.load(words.add(at)))) };
            }
        }
    }
}

/// Moves bit `4 t + b` to bit `8 b + t`.
#[inline(always)]
fn spread_fifth_bits<S: Simd>(s: S, bits: S::I) -> S::I {
    let mut out = s.splat(0);
    for t in 0..8 {
        // The product puts bit b of the four at bits b, b + 7, b + 14 and b + 21, one of which is 8 b.
        let four = s.and(s.shr(bits, 4 * t), s.splat(15));
        let spread = s.and(s.mul(four, s.splat(0x0020_4081)), s.splat(0x0101_0101));
        out = s.or(out, s.shl(spread, t));
    }
    out
}

impl TileSpec {
    /// Restores the block of row `row` of a tile in the file layout.
    pub(crate) fn unpack_block(&self, tile: &[u8], row: usize, block: &mut [u8]) {
        let scale = [tile[2 * row], tile[2 * row + 1]];
        let words = match self.scale {
            LoneScale::Half(at) => {
                block[at..at + 2].copy_from_slice(&scale);
                &tile[32..]
            }
            LoneScale::Exponent => {
                block[0] = match u16::from_le_bytes(scale) {
                    0x20 => 0,
                    normal => (normal >> 7) as u8 + 1,
                };
                &tile[32..]
            }
            LoneScale::None => tile,
        };
        let order = self.runs.iter().flat_map(|&(first, n)| first..first + n);
        for (j, in_block) in order.enumerate() {
            let at = 64 * j + 4 * row;
            let mut word = u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
            match self.fixup {
                Fixup::None | Fixup::Groups => {}
                Fixup::Unsigned => word ^= 0x8080_8080,
                Fixup::FifthBits(fifth) if fifth == j => {
                    word = (0..32).map(|i| (word >> (i % 4 * 8 + i / 4) & 1) << i).sum();
                }
                Fixup::FifthBits(_) => {}
            }
            block[self.words_at + 4 * in_block..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}
