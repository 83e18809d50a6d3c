//! Tile kernels for float weights, widened exactly and summed in `f32`.

use std::marker::PhantomData;

use super::{SUMS, TileArgs, prefetch};
use crate::simd::lanes::{GROUP, Kernel, Simd, fsplat_at};
use crate::simd::tile::TILE_ROWS;

/// A float weight type.
pub(super) trait Float {
    const TILE_BYTES: usize;

    /// Four consecutive elements of the rows of register `g`.
    /// # Safety
    /// `tile` points at a tile of this type, `g < 16 / LANES`.
    unsafe fn four<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::F; 4];
}

/// Adds a chunk of tiles to the sums of `M` rows.
pub(super) struct TileFloat<B, const M: usize> {
    args: TileArgs<M>,
    block: PhantomData<B>,
}

impl<B, const M: usize> TileFloat<B, M> {
    pub(super) fn new(args: TileArgs<M>) -> Self {
        TileFloat { args, block: PhantomData }
    }
}

impl<B: Float, const M: usize> Kernel for TileFloat<B, M> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let TileArgs { tiles, n_blocks, x, first_block, sums, .. } = self.args;
        for g in 0..GROUP / S::LANES {
            // SAFETY: `row_group` passes `n_blocks` tiles, rows of floats padded to whole fours, fours `first_block ..
            // first_block + n_blocks` of which exist, and `M * SUMS` floats of sums.
            unsafe {
                let sums = sums.add(g * S::LANES);
                let (mut even, mut odd) = ([s.fsplat(0.0); M], [s.fsplat(0.0); M]);
                for r in 0..M {
                    even[r] = s.fload(sums.add(r * SUMS));
                    odd[r] = s.fload(sums.add(r * SUMS + TILE_ROWS));
                }
                for b in 0..n_blocks {
                    let tile = tiles.add(b * B::TILE_BYTES);
                    if M == 1 && g == 0 {
                        prefetch(s, tile, B::TILE_BYTES);
                    }
                    let w = B::four(s, tile, g);
                    let at = 16 * (first_block + b);
                    for r in 0..M {
                        even[r] = s.fma(w[0], fsplat_at(s, x[r].add(at)), even[r]);
                        odd[r] = s.fma(w[1], fsplat_at(s, x[r].add(at + 4)), odd[r]);
                        even[r] = s.fma(w[2], fsplat_at(s, x[r].add(at + 8)), even[r]);
                        odd[r] = s.fma(w[3], fsplat_at(s, x[r].add(at + 12)), odd[r]);
                    }
                }
                for r in 0..M {
                    s.fstore(sums.add(r * SUMS), even[r]);
                    s.fstore(sums.add(r * SUMS + TILE_ROWS), odd[r]);
                }
            }
        }
    }
}

/// Word `j` of the lanes of register `g`.
/// # Safety
/// The word is inside a tile.
#[inline(always)]
unsafe fn word<S: Simd>(s: S, tile: *const u8, g: usize, j: usize) -> S::I {
    // SAFETY: inside the tile by the contract of this function.
    unsafe { s.load(tile.add(64 * j + 4 * S::LANES * g)) }
}

pub(super) struct F32;

impl Float for F32 {
    const TILE_BYTES: usize = 256;

    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::F; 4] {
        // SAFETY: four words, one for each element.
        unsafe {
            [
                s.as_f(word(s, tile, g, 0)),
                s.as_f(word(s, tile, g, 1)),
                s.as_f(word(s, tile, g, 2)),
                s.as_f(word(s, tile, g, 3)),
            ]
        }
    }
}

pub(super) struct F16;

impl Float for F16 {
    const TILE_BYTES: usize = 128;

    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::F; 4] {
        // SAFETY: two words, each with two elements.
        let (a, b) = unsafe { (word(s, tile, g, 0), word(s, tile, g, 1)) };
        [s.f16_lo(a), s.f16_lo(s.shr(a, 16)), s.f16_lo(b), s.f16_lo(s.shr(b, 16))]
    }
}

pub(super) struct Bf16;

impl Float for Bf16 {
    const TILE_BYTES: usize = 128;

    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, tile: *const u8, g: usize) -> [S::F; 4] {
        // A bfloat16 is the upper half of the float with the same value.
        let high = s.splat(0xffff_0000_u32 as i32);
        // SAFETY: two words, each with two elements.
        let (a, b) = unsafe { (word(s, tile, g, 0), word(s, tile, g, 1)) };
        [s.as_f(s.shl(a, 16)), s.as_f(s.and(a, high)), s.as_f(s.shl(b, 16)), s.as_f(s.and(b, high))]
    }
}
