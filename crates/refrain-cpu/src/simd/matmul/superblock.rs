//! Tile kernels for weights in blocks of 256 against [`ActKind::Q8K`](crate::simd::ActKind) rows.
//!
//! A block has 8 or 16 parts, each with a small integer scale, and every 32 activations have a shift. Both are
//! part of the exact integer sum: at most 16 parts of 16 products of 32 · 127, scaled by at most 128 and
//! shifted by at most 3 bits, stay below 2^30. So do products of 62 · 127, scaled by at most 31.

use std::marker::PhantomData;

use super::block32::IQ4_VALUES;
use super::{SUMS, TileArgs, prefetch};
use crate::simd::acts::Q8KLayout;
use crate::simd::groups;
use crate::simd::lanes::{GROUP, Simd, SimdKernel, fsplat_at, splat_at};

/// A weight type in blocks of 256.
pub(super) trait SuperBlock {
    const TILE_BYTES: usize;
    /// Number of parts with their own scale: 8 or 16.
    const PARTS: usize;
    /// Offset of the unsigned quants: 0, or a power of two.
    const OFFSET: i32;
    /// Whether quants may exceed 127.
    const WIDE: bool;
    /// Whether each part has a minimum in addition to its scale.
    const MIN: bool;

    /// Scales and minima of the blocks in register `g`.
    /// # Safety
    /// `tile` points at a tile of this type, `g < 16 / LANES`.
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S>;

    /// Register `t < 64 / PARTS` holds elements `4 t .. 4 t + 4` of part `part` of each lane's block.
    /// # Safety
    /// As for `head`, `part < PARTS`.
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8];

    /// Scale of part `part`.
    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &BlockScales<S>, part: usize) -> S::I {
        byte(s, head.scales[part / 4], part % 4)
    }

    /// The exact sum over the parts of one block, for a single row: same result as [`block_dots`], with less
    /// unpacking of quants that are used only once.
    /// # Safety
    /// As for [`block_dots`].
    #[inline(always)]
    unsafe fn one_dot<S: Simd>(s: S, one: &One<S>) -> S::I
    where
        Self: Sized,
    {
        // SAFETY: by the contract of this function.
        unsafe { block_dots::<S, Self, 1>(s, one.tile, one.g, one.head, &[one.x], one.at, one.block_idx)[0] }
    }
}

/// Arguments of [`block_dots`] for a single row.
pub(super) struct One<'a, S: Simd> {
    tile: *const u8,
    g: usize,
    head: &'a BlockScales<S>,
    x: *const u8,
    at: &'a Q8KLayout,
    block_idx: usize,
}

impl<S: Simd> One<'_, S> {
    /// Prefetches a quarter of the next data.
    #[inline(always)]
    fn prefetch<B: SuperBlock>(&self, s: S, quarter: usize) {
        if self.g == 0 {
            let bytes = 64 * B::TILE_BYTES.div_ceil(64).div_ceil(4);
            prefetch(s, self.tile.wrapping_add(quarter * bytes), bytes.min(B::TILE_BYTES - quarter * bytes));
        }
    }

    /// Sum of part `part` of `B`, scaled and in the finest steps of the row.
    /// # Safety
    /// `part < PARTS`.
    #[inline(always)]
    unsafe fn scaled<B: SuperBlock>(&self, s: S, part: usize, dot: S::I) -> S::I {
        // SAFETY: block `block_idx` of the row exists, and the part is in it.
        let shift = unsafe { shift::<S, B>(s, self.x, self.at, self.block_idx, part) };
        s.shl_each(s.mul(dot, B::scale(s, self.head, part)), shift)
    }

    /// Broadcasts four activations of the row.
    /// # Safety
    /// `element + 4 <= 256`.
    #[inline(always)]
    unsafe fn x(&self, s: S, element: usize) -> S::I {
        // SAFETY: inside block `block_idx`, which exists.
        unsafe { splat_at(s, self.x.add(256 * self.block_idx + element)) }
    }
}

/// Scales and minima of a block, one byte per part.
pub(super) struct BlockScales<S: Simd> {
    d: S::F,
    d_min: S::F,
    scales: [S::I; 4],
    mins: [S::I; 4],
}

/// Adds a chunk of tiles to the sums of `M` rows.
pub(super) struct TileQ8K<B, const M: usize> {
    args: TileArgs<M>,
    block: PhantomData<B>,
}

impl<B, const M: usize> TileQ8K<B, M> {
    pub(super) fn new(args: TileArgs<M>) -> Self {
        TileQ8K { args, block: PhantomData }
    }
}

impl<B: SuperBlock, const M: usize> SimdKernel for TileQ8K<B, M> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let TileArgs { tiles, n_blocks, x, k, first_block, sums } = self.args;
        let at = Q8KLayout::new(k);
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
                    let head = B::head(s, tile, g);
                    let dots = if M == 1 {
                        let one = One { tile, g, head: &head, x: x[0], at: &at, block_idx };
                        [B::one_dot(s, &one); M]
                    } else {
                        block_dots::<S, B, M>(s, tile, g, &head, &x, &at, block_idx)
                    };
                    for r in 0..M {
                        let d_x = fsplat_at(s, x[r].add(at.d + 4 * block_idx));
                        f[r] = s.fma(s.to_f(dots[r]), s.fmul(head.d, d_x), f[r]);
                        if B::MIN {
                            let mins = min_dots::<S, B>(s, &head, x[r], &at, block_idx);
                            let scale = s.fsub(s.fsplat(0.0), s.fmul(head.d_min, d_x));
                            f[r] = s.fma(s.to_f(mins), scale, f[r]);
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

/// The exact sums over the parts of one block, for each of `M` rows.
///
/// # Safety
/// As in [`TileQ8K::run`]: `tile` is a tile of `B`, and block `block_idx` of each row exists.
#[inline(always)]
unsafe fn block_dots<S: Simd, B: SuperBlock, const M: usize>(
    s: S,
    tile: *const u8,
    g: usize,
    head: &BlockScales<S>,
    x: &[*const u8; M],
    at: &Q8KLayout,
    block_idx: usize,
) -> [S::I; M] {
    let mut totals = [s.splat(0); M];
    // Not unrolled: the compiler would move the prefetches to the end, where the processor drops most of them.
    for part in 0..B::PARTS {
        // SAFETY: in bounds by the contract of this function.
        unsafe { part_dots::<S, B, M>(s, tile, g, head, x, at, block_idx, part, &mut totals) };
    }
    totals
}

/// Adds one part to the sums.
///
/// # Safety
/// As [`block_dots`], `part < PARTS`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the body of a loop")]
unsafe fn part_dots<S: Simd, B: SuperBlock, const M: usize>(
    s: S,
    tile: *const u8,
    g: usize,
    head: &BlockScales<S>,
    x: &[*const u8; M],
    at: &Q8KLayout,
    block_idx: usize,
    part: usize,
    totals: &mut [S::I; M],
) {
    if M == 1 && g == 0 {
        // Each line once, spread over the parts: the processor can have few lines in flight.
        let part_bytes = 64 * B::TILE_BYTES.div_ceil(64).div_ceil(B::PARTS);
        if part * part_bytes < B::TILE_BYTES {
            prefetch(s, tile.wrapping_add(part * part_bytes), part_bytes);
        }
    }
    let part_len = 256 / B::PARTS;
    // SAFETY: in bounds by the contract of this function.
    unsafe {
        let w = B::quants(s, tile, g, part);
        let scale = B::scale(s, head, part);
        for r in 0..M {
            let mut dot = if B::OFFSET == 0 {
                s.splat(0)
            } else if B::PARTS == 16 {
                let bias = splat_at(s, x[r].add(at.bias16 + 4 * (16 * block_idx + part)));
                if B::OFFSET > 32 {
                    s.shl(bias, (B::OFFSET / 32).trailing_zeros())
                } else {
                    s.sar(bias, (32 / B::OFFSET.max(1)).trailing_zeros())
                }
            } else {
                let bias = splat_at(s, x[r].add(at.bias32 + 4 * (8 * block_idx + part)));
                s.sar(bias, (128 / B::OFFSET.max(1)).trailing_zeros())
            };
            for (t, &w) in w.iter().enumerate().take(part_len / 4) {
                let x = splat_at(s, x[r].add(256 * block_idx + part_len * part + 4 * t));
                dot = if B::WIDE { s.dot8(dot, w, x) } else { s.dot7(dot, w, x) };
            }
            let shift = shift::<S, B>(s, x[r], at, block_idx, part);
            totals[r] = s.add(totals[r], s.shl_each(s.mul(dot, scale), shift));
        }
    }
}

/// Shift that converts the sum of a part to the finest steps of the row, in all lanes.
///
/// # Safety
/// Block `block_idx` of the row `x` exists, `part < PARTS`.
#[inline(always)]
unsafe fn shift<S: Simd, B: SuperBlock>(
    s: S,
    x: *const u8,
    at: &Q8KLayout,
    block_idx: usize,
    part: usize,
) -> S::I {
    // SAFETY: a block has eight shifts.
    unsafe { splat_at(s, x.add(at.shifts + 4 * (8 * block_idx + 8 * part / B::PARTS))) }
}

/// `Σ minimum · sum of the quants` over the parts of one block.
///
/// # Safety
/// Block `block_idx` of the row `x` exists.
#[inline(always)]
unsafe fn min_dots<S: Simd, B: SuperBlock>(
    s: S,
    head: &BlockScales<S>,
    x: *const u8,
    at: &Q8KLayout,
    block_idx: usize,
) -> S::I {
    let even_bytes = s.splat(0x00ff_00ff);
    let sums = if B::PARTS == 16 { at.sums16 + 32 * block_idx } else { at.sums32 + 16 * block_idx };
    let mut total = s.splat(0);
    for (i, &mins) in head.mins.iter().enumerate().take(B::PARTS / 4) {
        // SAFETY: `sums` is followed by two bytes for each part.
        unsafe {
            total = s.dot16(total, s.and(mins, even_bytes), splat_at(s, x.add(sums + 8 * i)));
            total = s.dot16(total, s.and(s.shr(mins, 8), even_bytes), splat_at(s, x.add(sums + 8 * i + 4)));
        }
    }
    total
}

/// Word `j` of the blocks in register `g`; the words start at `words`.
/// # Safety
/// The word is inside a tile.
#[inline(always)]
unsafe fn word<S: Simd>(s: S, words: *const u8, g: usize, j: usize) -> S::I {
    // SAFETY: inside the tile by the contract of this function.
    unsafe { s.load(words.add(64 * j + 4 * S::LANES * g)) }
}

/// Words `first .. first + N`.
/// # Safety
/// As [`word`].
#[inline(always)]
unsafe fn words<S: Simd, const N: usize>(s: S, words: *const u8, g: usize, first: usize) -> [S::I; N] {
    let mut out = [s.splat(0); N];
    for (j, out) in out.iter_mut().enumerate() {
        // SAFETY: inside the tile by the contract of this function.
        *out = unsafe { word(s, words, g, first + j) };
    }
    out
}

/// Byte `i` of each lane, unsigned.
#[inline(always)]
fn byte<S: Simd>(s: S, bytes: S::I, i: usize) -> S::I {
    s.and(s.shr(bytes, 8 * i as u32), s.splat(255))
}

/// The half floats before the words.
/// # Safety
/// `tile` points at a tile that begins with 16 half floats.
#[inline(always)]
unsafe fn lone_half<S: Simd>(s: S, tile: *const u8, g: usize) -> S::F {
    // SAFETY: inside the tile by the contract of this function.
    unsafe { s.load_f16(tile.add(2 * S::LANES * g)) }
}

/// Scale and minimum factor in one word, then the 12 bytes with eight 6-bit scales and eight 6-bit minima.
/// # Safety
/// `tile` points at a tile of Q4_K or Q5_K.
#[inline(always)]
unsafe fn head_6_bits<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
    // SAFETY: inside the tile by the contract of this function.
    let [pair, a, b, c] = unsafe { words(s, tile, g, 0) };
    let (six, low4, high2) = (s.splat(0x3f3f_3f3f), s.splat(0x0f0f_0f0f), s.splat(0x3030_3030));
    let last_scales = s.or(s.and(c, low4), s.and(s.shr(a, 2), high2));
    let last_mins = s.or(s.and(s.shr(c, 4), low4), s.and(s.shr(b, 2), high2));
    let zero = s.splat(0);
    BlockScales {
        d: s.f16_lo(pair),
        d_min: s.f16_lo(s.shr(pair, 16)),
        scales: [s.and(a, six), last_scales, zero, zero],
        mins: [s.and(b, six), last_mins, zero, zero],
    }
}

pub(super) struct Q4K;

impl SuperBlock for Q4K {
    const TILE_BYTES: usize = 16 * 144;
    const PARTS: usize = 8;
    const OFFSET: i32 = 0;
    const WIDE: bool = false;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        // SAFETY: by the contract of this function.
        unsafe { head_6_bits(s, tile, g) }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // Bytes 32 c .. 32 c + 32 hold part 2 c in their low nibbles and part 2 c + 1 in their high nibbles.
        let low = s.splat(0x0f0f_0f0f);
        let shift = 4 * (part % 2) as u32;
        // SAFETY: the quants are words 4 .. 36.
        let mut quants: [S::I; 8] = unsafe { words(s, tile, g, 4 + 8 * (part / 2)) };
        for quants in &mut quants {
            *quants = s.and(s.shr(*quants, shift), low);
        }
        quants
    }

    #[inline(always)]
    unsafe fn one_dot<S: Simd>(s: S, one: &One<S>) -> S::I {
        let (low, high) = (s.splat(0x0f0f_0f0f), s.splat(0xf0f0_f0f0_u32 as i32));
        let mut total = s.splat(0);
        for c in 0..4 {
            one.prefetch::<Q4K>(s, c);
            // SAFETY: the quants are words 4 .. 36; part `2 c + 1` ends at element `64 c + 64`.
            unsafe {
                let quants: [S::I; 8] = words(s, one.tile, one.g, 4 + 8 * c);
                let (mut even, mut odd) = (s.splat(0), s.splat(0));
                for (t, &quants) in quants.iter().enumerate() {
                    let x = one.x(s, 64 * c + 32 + 4 * t);
                    even = s.dot7(even, s.and(quants, low), one.x(s, 64 * c + 4 * t));
                    odd = if S::DOT8 {
                        // Sixteen times too large; one shift at the end corrects all.
                        s.dot8(odd, s.and(quants, high), x)
                    } else {
                        s.dot7(odd, s.and(s.shr(quants, 4), low), x)
                    };
                }
                if S::DOT8 {
                    odd = s.sar(odd, 4);
                }
                total = s.add(total, one.scaled::<Q4K>(s, 2 * c, even));
                total = s.add(total, one.scaled::<Q4K>(s, 2 * c + 1, odd));
            }
        }
        total
    }
}

pub(super) struct Q5K;

impl SuperBlock for Q5K {
    const TILE_BYTES: usize = 16 * 176;
    const PARTS: usize = 8;
    const OFFSET: i32 = 0;
    const WIDE: bool = false;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        // SAFETY: by the contract of this function.
        unsafe { head_6_bits(s, tile, g) }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // Like Q4_K, with bit `part` of byte l of the preceding 32 as the fifth bit of element l.
        let (low, one) = (s.splat(0x0f0f_0f0f), s.splat(0x0101_0101));
        let shift = 4 * (part % 2) as u32;
        // SAFETY: the fifth bits are words 4 .. 12, the low bits words 12 .. 44.
        let (mut quants, fifth): ([S::I; 8], [S::I; 8]) =
            unsafe { (words(s, tile, g, 12 + 8 * (part / 2)), words(s, tile, g, 4)) };
        for (quants, fifth) in quants.iter_mut().zip(fifth) {
            let fifth = s.and(s.shr(fifth, part as u32), one);
            *quants = s.or(s.and(s.shr(*quants, shift), low), s.shl(fifth, 4));
        }
        quants
    }
}

pub(super) struct Q2K;

impl SuperBlock for Q2K {
    const TILE_BYTES: usize = 16 * 84;
    const PARTS: usize = 16;
    const OFFSET: i32 = 0;
    const WIDE: bool = false;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        let low = s.splat(0x0f0f_0f0f);
        // SAFETY: word 0 is the pair of half floats, words 1 .. 5 are the scales and minima.
        let (pair, mut scales): (_, [S::I; 4]) = unsafe { (word(s, tile, g, 0), words(s, tile, g, 1)) };
        let mut mins = scales;
        for (scales, mins) in scales.iter_mut().zip(&mut mins) {
            *mins = s.and(s.shr(*mins, 4), low);
            *scales = s.and(*scales, low);
        }
        BlockScales { d: s.f16_lo(pair), d_min: s.f16_lo(s.shr(pair, 16)), scales, mins }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // 32 bytes hold 128 elements: bits 2 i are elements 32 i .. 32 i + 32.
        let (low2, shift) = (s.splat(0x0303_0303), 2 * (part / 2 % 4) as u32);
        // SAFETY: the quants are words 5 .. 21.
        let bytes: [S::I; 4] = unsafe { words(s, tile, g, 5 + 8 * (part / 8) + 4 * (part % 2)) };
        let mut quants = [low2; 8];
        for (quants, bytes) in quants.iter_mut().zip(bytes) {
            *quants = s.and(s.shr(bytes, shift), low2);
        }
        quants
    }
}

pub(super) struct Q3K;

impl SuperBlock for Q3K {
    const TILE_BYTES: usize = 16 * 110;
    const PARTS: usize = 16;
    const OFFSET: i32 = 4;
    const WIDE: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        let (low4, low2) = (s.splat(0x0f0f_0f0f), s.splat(0x0303_0303));
        // SAFETY: the scales are words 0 .. 3; 16 half floats precede the words.
        let [a, b, c] = unsafe { words(s, tile.add(32), g, 0) };
        let mut scales = [a, b, s.shr(a, 4), s.shr(b, 4)];
        for (i, scales) in scales.iter_mut().enumerate() {
            let high = s.and(s.shr(c, 2 * i as u32), low2);
            *scales = s.or(s.and(*scales, low4), s.shl(high, 4));
        }
        // SAFETY: as above.
        let d = unsafe { lone_half(s, tile, g) };
        BlockScales { d, d_min: s.fsplat(0.0), scales, mins: [s.splat(0); 4] }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // Like Q2_K, with bit `part / 2` of byte l of the first 32 as the third bit.
        let (low2, one) = (s.splat(0x0303_0303), s.splat(0x0101_0101));
        let shift = 2 * (part / 2 % 4) as u32;
        // SAFETY: the third bits are words 3 .. 11, the low bits words 11 .. 27; 16 half floats precede the
        // words.
        let (bytes, third): ([S::I; 4], [S::I; 4]) = unsafe {
            let tile = tile.add(32);
            (words(s, tile, g, 11 + 8 * (part / 8) + 4 * (part % 2)), words(s, tile, g, 3 + 4 * (part % 2)))
        };
        let mut quants = [low2; 8];
        for t in 0..4 {
            let third = s.and(s.shr(third[t], (part / 2) as u32), one);
            quants[t] = s.or(s.and(s.shr(bytes[t], shift), low2), s.shl(third, 2));
        }
        quants
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &BlockScales<S>, part: usize) -> S::I {
        s.sub(byte(s, head.scales[part / 4], part % 4), s.splat(32))
    }
}

pub(super) struct Q6K;

impl SuperBlock for Q6K {
    const TILE_BYTES: usize = 16 * 210;
    const PARTS: usize = 16;
    const OFFSET: i32 = 32;
    const WIDE: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        BlockScales {
            // SAFETY: 16 half floats precede the words.
            d: unsafe { lone_half(s, tile, g) },
            d_min: s.fsplat(0.0),
            // SAFETY: the scales are words 0 .. 4.
            scales: unsafe { words(s, tile.add(32), g, 0) },
            mins: [s.splat(0); 4],
        }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // Of each 128 elements, the low nibbles of 64 bytes are the first 64 and the high nibbles the others.
        // 32 bytes hold the upper two bits; those of element 32 i + l are bits 2 i of byte l.
        let (half, quarter, sixteen) = (part / 8, part / 2 % 4, part % 2);
        let first = 4 + 12 * (2 * half + sixteen);
        // SAFETY: from word 4 on, every four parts have eight words of low nibbles and four of high bits; 16
        // half floats precede the words.
        let (low, high): ([S::I; 4], [S::I; 4]) = unsafe {
            let tile = tile.add(32);
            (words(s, tile, g, first + 4 * (quarter % 2)), words(s, tile, g, first + 8))
        };
        let (low4, low2) = (s.splat(0x0f0f_0f0f), s.splat(0x0303_0303));
        let mut quants = [low4; 8];
        for t in 0..4 {
            let low = s.and(s.shr(low[t], 4 * (quarter / 2) as u32), low4);
            let high = s.and(s.shr(high[t], 2 * quarter as u32), low2);
            quants[t] = s.or(low, s.shl(high, 4));
        }
        quants
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &BlockScales<S>, part: usize) -> S::I {
        s.sar(s.shl(head.scales[part / 4], 24 - 8 * (part % 4) as u32), 24)
    }

    #[inline(always)]
    unsafe fn one_dot<S: Simd>(s: S, one: &One<S>) -> S::I {
        let (low4, high2) = (s.splat(0x0f0f_0f0f), s.splat(0x3030_3030));
        let mut total = s.splat(0);
        for four in 0..4 {
            one.prefetch::<Q6K>(s, four);
            // Parts of one half of the block that share these words: 0, 2, 4 and 6, or 1, 3, 5 and 7.
            let first_part = 8 * (four / 2) + four % 2;
            // SAFETY: words and activations as in `quants`; the row has a sum for each part.
            unsafe {
                let word: [S::I; 12] = words(s, one.tile.add(32), one.g, 4 + 12 * four);
                let mut dots = [s.splat(0); 4];
                for (quarter, dot) in dots.iter_mut().enumerate() {
                    let part = first_part + 2 * quarter;
                    *dot = splat_at(s, one.x.add(one.at.bias16 + 4 * (16 * one.block_idx + part)));
                }
                for t in 0..4 {
                    let (a, b, high) = (word[t], word[4 + t], word[8 + t]);
                    let quants = [
                        s.or(s.and(a, low4), s.and(s.shl(high, 4), high2)),
                        s.or(s.and(b, low4), s.and(s.shl(high, 2), high2)),
                        s.or(s.and(s.shr(a, 4), low4), s.and(high, high2)),
                        s.or(s.and(s.shr(b, 4), low4), s.and(s.shr(high, 2), high2)),
                    ];
                    for quarter in 0..4 {
                        let x = one.x(s, 16 * (first_part + 2 * quarter) + 4 * t);
                        dots[quarter] = s.dot7(dots[quarter], quants[quarter], x);
                    }
                }
                for (quarter, &dot) in dots.iter().enumerate() {
                    let part = first_part + 2 * quarter;
                    total = s.add(total, one.scaled::<Q6K>(s, part, dot));
                }
            }
        }
        total
    }
}

pub(super) struct Iq4Xs;

impl SuperBlock for Iq4Xs {
    const TILE_BYTES: usize = 16 * 136;
    const PARTS: usize = 8;
    const OFFSET: i32 = 128;
    const WIDE: bool = true;
    const MIN: bool = false;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        // SAFETY: word 0 is a half float and the high bits of the scales, word 1 their low nibbles.
        let (first, low) = unsafe { (word(s, tile, g, 0), word(s, tile, g, 1)) };
        let zero = s.splat(0);
        let (d, high) = (s.f16_lo(first), s.shr(first, 16));
        BlockScales { d, d_min: s.fsplat(0.0), scales: [low, high, zero, zero], mins: [zero; 4] }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        let low = s.splat(0x0f0f_0f0f);
        // SAFETY: the quants are words 2 .. 34, four to a part.
        let bytes: [S::I; 4] = unsafe { words(s, tile, g, 2 + 4 * part) };
        let mut quants = [low; 8];
        for t in 0..4 {
            quants[t] = s.lookup(&IQ4_VALUES, s.and(bytes[t], low));
            quants[t + 4] = s.lookup(&IQ4_VALUES, s.and(s.shr(bytes[t], 4), low));
        }
        quants
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &BlockScales<S>, part: usize) -> S::I {
        let low = s.and(s.shr(head.scales[0], 4 * part as u32), s.splat(15));
        let high = s.and(s.shr(head.scales[1], 2 * part as u32), s.splat(3));
        s.sub(s.or(low, s.shl(high, 4)), s.splat(32))
    }
}

/// The IQ2 and IQ3 types, as decoded by [`groups`](crate::simd::groups); scales are multiples of `d / DIVISOR`.
pub(super) struct Groups<const DIVISOR: u32>;

impl<const DIVISOR: u32> SuperBlock for Groups<DIVISOR> {
    const TILE_BYTES: usize = groups::TILE_BYTES;
    const PARTS: usize = 16;
    const OFFSET: i32 = groups::LEVEL_OFFSET;
    const WIDE: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    unsafe fn head<S: Simd>(s: S, tile: *const u8, g: usize) -> BlockScales<S> {
        BlockScales {
            // SAFETY: 16 half floats precede the words. The divisor is a power of two, so the product is exact.
            d: s.fmul(unsafe { lone_half(s, tile, g) }, s.fsplat(1.0 / DIVISOR as f32)),
            d_min: s.fsplat(0.0),
            // SAFETY: the scales are words 0 .. 4.
            scales: unsafe { words(s, tile.add(32), g, 0) },
            mins: [s.splat(0); 4],
        }
    }

    #[inline(always)]
    unsafe fn quants<S: Simd>(s: S, tile: *const u8, g: usize, part: usize) -> [S::I; 8] {
        // SAFETY: the levels are words 4 .. 68, four to a part.
        let levels: [S::I; 4] = unsafe { words(s, tile.add(32), g, 4 + 4 * part) };
        std::array::from_fn(|t| levels[t % 4])
    }
}
