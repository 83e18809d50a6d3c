//! Tile kernels for weights in blocks of 32 against [`ActKind::Q8`](crate::simd::ActKind) rows.

use std::marker::PhantomData;

use refrain_tensor::quant::MXFP4_VALUES;

use super::{SUMS, TileArgs, prefetch};
use crate::simd::acts::Q8Layout;
use crate::simd::lanes::{GROUP, Simd, SimdKernel, fsplat_at, splat_at};

/// A weight type in blocks of 32.
pub(super) trait Block32 {
    const TILE_BYTES: usize;
    /// Offset of the unsigned quants: 0, or a power of two up to 128.
    const OFFSET: i32;
    /// Whether quants may exceed 127.
    const WIDE: bool;
    /// Whether a block has a minimum in addition to its scale.
    const MIN: bool;

    /// Scale and minimum of the blocks in register `g`.
    /// # Safety
    /// `tile` points at a tile of this type, `g < 16 / LANES`.
    unsafe fn scales<S: Simd>(s: S, tile: *const u8, g: usize) -> (S::F, S::F);

    /// Register `t` holds elements `4 t .. 4 t + 4` of each lane's block.
    /// # Safety
    /// As for `scales`.
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::I; 8];
}

/// Adds a chunk of tiles to the sums of `M` rows.
pub(super) struct TileQ8<B, const M: usize> {
    args: TileArgs<M>,
    block: PhantomData<B>,
}

impl<B, const M: usize> TileQ8<B, M> {
    pub(super) fn new(args: TileArgs<M>) -> Self {
        TileQ8 { args, block: PhantomData }
    }
}

impl<B: Block32, const M: usize> SimdKernel for TileQ8<B, M> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let TileArgs { tiles, n_blocks, x, k, first_block, sums } = self.args;
        let at = Q8Layout::new(k);
        for g in 0..GROUP / S::LANES {
            // SAFETY: `row_group` passes `n_blocks` tiles, rows of the layout `at` for `k`, blocks
            // `first_block .. first_block + n_blocks` of which exist, and `M * SUMS` floats of sums.
            unsafe {
                let sums = sums.add(g * S::LANES);
                let mut f = [s.fsplat(0.0); M];
                for (r, f) in f.iter_mut().enumerate() {
                    *f = s.fload(sums.add(r * SUMS));
                }
                for b in 0..n_blocks {
                    let tile = tiles.add(b * B::TILE_BYTES);
                    let block_idx = first_block + b;
                    if M == 1 && g == 0 {
                        prefetch(s, tile, B::TILE_BYTES);
                    }
                    let (d, min) = B::scales(s, tile, g);
                    let w = B::quants(s, tile, g);
                    for r in 0..M {
                        let mut dot = if B::OFFSET == 0 {
                            s.splat(0)
                        } else {
                            // The row holds -128 times the sum; the shift is exact.
                            let bias = splat_at(s, x[r].add(at.bias + 4 * block_idx));
                            s.sar(bias, (128 / B::OFFSET.max(1)).trailing_zeros())
                        };
                        for (t, &w) in w.iter().enumerate() {
                            let x = splat_at(s, x[r].add(32 * block_idx + 4 * t));
                            dot = if B::WIDE { s.dot8(dot, w, x) } else { s.dot7(dot, w, x) };
                        }
                        let d_x = fsplat_at(s, x[r].add(at.d + 4 * block_idx));
                        f[r] = s.fma(s.to_f(dot), s.fmul(d, d_x), f[r]);
                        if B::MIN {
                            f[r] = s.fma(min, fsplat_at(s, x[r].add(at.sum + 4 * block_idx)), f[r]);
                        }
                    }
                }
                for (r, &f) in f.iter().enumerate() {
                    s.fstore(sums.add(r * SUMS), f);
                }
            }
        }
    }
}

/// Word `j` of the blocks in register `g`; the words start at `words`.
/// # Safety
/// The word is inside a tile.
#[inline(always)]
unsafe fn word<S: Simd>(s: S, words: *const u8, g: usize, j: usize) -> S::I {
    // SAFETY: inside the tile by the contract of this function.
    unsafe { s.load(words.add(64 * j + 4 * S::LANES * g)) }
}

/// The half floats before the words.
/// # Safety
/// `tile` points at a tile that begins with 16 half floats.
#[inline(always)]
unsafe fn lone_half<S: Simd>(s: S, tile: *const u8, g: usize) -> (S::F, S::F) {
    // SAFETY: inside the tile by the contract of this function.
    (unsafe { s.load_f16(tile.add(2 * S::LANES * g)) }, s.fsplat(0.0))
}

/// Like [`lone_half`], with BF16 scales, which have the exponents of MXFP4.
/// # Safety
/// `tile` points at a tile that begins with 16 BF16 numbers.
#[inline(always)]
unsafe fn lone_bf16<S: Simd>(s: S, tile: *const u8, g: usize) -> (S::F, S::F) {
    // SAFETY: inside the tile by the contract of this function.
    (unsafe { s.load_bf16(tile.add(2 * S::LANES * g)) }, s.fsplat(0.0))
}

/// Scale and minimum in one word.
/// # Safety
/// `tile` points at a tile whose first word is a pair of half floats.
#[inline(always)]
unsafe fn half_pair<S: Simd>(s: S, tile: *const u8, g: usize) -> (S::F, S::F) {
    // SAFETY: inside the tile by the contract of this function.
    let pair = unsafe { word(s, tile, g, 0) };
    (s.f16_lo(pair), s.f16_lo(s.shr(pair, 16)))
}

/// Sixteen bytes per row: the low nibbles are the first half of the block, the high nibbles the second.
/// # Safety
/// `words` points at four words of a tile.
#[inline(always)]
unsafe fn nibbles<S: Simd>(s: S, words: *const u8, g: usize) -> [S::I; 8] {
    let low = s.splat(0x0f0f_0f0f);
    let mut quants = [low; 8];
    for t in 0..4 {
        // SAFETY: inside the tile by the contract of this function.
        let bytes = unsafe { word(s, words, g, t) };
        quants[t] = s.and(bytes, low);
        quants[t + 4] = s.and(s.shr(bytes, 4), low);
    }
    quants
}

/// Like [`nibbles`], with the fifth bits in the preceding word.
/// # Safety
/// `words` points at five words of a tile.
#[inline(always)]
unsafe fn nibbles_and_fifth<S: Simd>(s: S, words: *const u8, g: usize) -> [S::I; 8] {
    // SAFETY: inside the tile by the contract of this function.
    unsafe {
        let mut quants = nibbles(s, words.add(64), g);
        let fifth = word(s, words, g, 0);
        for (t, quants) in quants.iter_mut().enumerate() {
            let bit = s.and(s.shr(fifth, t as u32), s.splat(0x0101_0101));
            *quants = s.or(*quants, s.shl(bit, 4));
        }
        quants
    }
}

/// Bytes, unchanged.
/// # Safety
/// `words` points at eight words of a tile.
#[inline(always)]
unsafe fn whole_bytes<S: Simd>(s: S, words: *const u8, g: usize) -> [S::I; 8] {
    let mut quants = [s.splat(0); 8];
    for (t, quants) in quants.iter_mut().enumerate() {
        // SAFETY: inside the tile by the contract of this function.
        *quants = unsafe { word(s, words, g, t) };
    }
    quants
}

/// Like [`nibbles`], looked up in [`IQ4_VALUES`].
///
/// # Safety
/// As for [`nibbles`].
#[inline(always)]
unsafe fn iq4_nibbles<S: Simd>(s: S, words: *const u8, g: usize) -> [S::I; 8] {
    // SAFETY: by the contract of this function.
    let mut quants = unsafe { nibbles(s, words, g) };
    for quants in &mut quants {
        *quants = s.lookup(&IQ4_VALUES, *quants);
    }
    quants
}

/// Like [`nibbles`], looked up in [`MXFP4_LEVELS`].
///
/// # Safety
/// As for [`nibbles`].
#[inline(always)]
unsafe fn mxfp4_nibbles<S: Simd>(s: S, words: *const u8, g: usize) -> [S::I; 8] {
    // SAFETY: by the contract of this function.
    let mut quants = unsafe { nibbles(s, words, g) };
    for quants in &mut quants {
        *quants = s.lookup(&MXFP4_LEVELS, *quants);
    }
    quants
}

macro_rules! block32 {
    ($name:ident: $bytes:expr, offset $offset:expr, min $min:expr, $scales:ident, $quants:ident from $at:expr) => {
        #[allow(non_camel_case_types)]
        pub(super) struct $name;
        impl Block32 for $name {
            const TILE_BYTES: usize = 16 * $bytes;
            const OFFSET: i32 = $offset;
            const WIDE: bool = $offset == 128;
            const MIN: bool = $min;
            #[inline(always)]
            unsafe fn scales<S: Simd>(s: S, tile: *const u8, g: usize) -> (S::F, S::F) {
                // SAFETY: tiles of this type begin with their scales (see `TileSpec::new`).
                unsafe { $scales(s, tile, g) }
            }
            #[inline(always)]
            unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::I; 8] {
                // SAFETY: `TileSpec::new` puts the quants there, after 16 half floats or a word of pairs.
                unsafe { $quants(s, tile.add($at), g) }
            }
        }
    };
}

block32!(Q4_0: 18, offset 8, min false, lone_half, nibbles from 32);
block32!(Q4_1: 20, offset 0, min true, half_pair, nibbles from 64);
block32!(Q5_0: 22, offset 16, min false, lone_half, nibbles_and_fifth from 32);
block32!(Q5_1: 24, offset 0, min true, half_pair, nibbles_and_fifth from 64);
block32!(Q8_0: 34, offset 128, min false, lone_half, whole_bytes from 32);
block32!(Iq4Nl: 18, offset 128, min false, lone_half, iq4_nibbles from 32);

block32!(Mxfp4: 18, offset 16, min false, lone_bf16, mxfp4_nibbles from 32);

/// Levels of MXFP4, plus 16.
const MXFP4_LEVELS: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (MXFP4_VALUES[i] as i32 + 16) as u8;
        i += 1;
    }
    table
};

/// Values that the nibbles of IQ4_NL and IQ4_XS stand for, plus 128.
pub(super) const IQ4_VALUES: [u8; 16] = {
    const SIGNED: [i32; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (SIGNED[i] + 128) as u8;
        i += 1;
    }
    table
};
