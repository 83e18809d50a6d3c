//! Activation rows, in the format that the matrix products of each weight type need.
//!
//! Quantisation is symmetric: a block's scale is `d = max|x| / 127`, and its quants are `x * (127 / max|x|)`
//! rounded to the nearest integer, ties to even, so they are in `-127..=127`. The bits are the same at every
//! level. A block whose largest magnitude is below 1e-35 becomes zeros. A block with an infinity or a NaN gets
//! the scale NaN, so that the product is NaN, as it would be in floating point.
//!
//! If 256 elements shared one scale, a few large ones would leave little precision for the others. So each
//! group of 32 elements uses steps that are up to eight times finer, by a power of two, as far as its own
//! largest magnitude allows.

use refrain_tensor::DType;

use super::Level;
use super::lanes::{Simd, SimdKernel};

/// Format of an activation row in a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    /// Unchanged; for F32 and F16 weights.
    F32,
    /// Rounded to bfloat16, with subnormals flushed to zero; for BF16 weights.
    Bf16,
    /// Blocks of 32 signed bytes with a float scale and their sum; for weights in blocks of 32.
    Q8,
    /// Blocks of 256 signed bytes with a float scale, a shift per 32 elements, and sums over 16 and 32
    /// elements; for weights in blocks of 256.
    Q8K,
}

impl ActKind {
    /// Number of elements per scale; `k` must be a multiple.
    pub const fn block_len(self) -> usize {
        match self {
            ActKind::F32 | ActKind::Bf16 => 1,
            ActKind::Q8 => 32,
            ActKind::Q8K => 256,
        }
    }
}

/// Returns the activation format for weights of `dtype`, or `None` if there is no matrix product for them.
pub fn act_kind(dtype: DType) -> Option<ActKind> {
    match dtype {
        DType::F32 | DType::F16 => Some(ActKind::F32),
        DType::BF16 => Some(ActKind::Bf16),
        DType::Q4_0
        | DType::Q4_1
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q8_0
        | DType::IQ4_NL
        | DType::MXFP4 => Some(ActKind::Q8),
        DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K | DType::IQ4_XS => {
            Some(ActKind::Q8K)
        }
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => Some(ActKind::Q8K),
        DType::I32 | DType::U32 | DType::I64 | DType::U8 => None,
    }
}

/// Returns the bytes of one activation row of `k` elements, a multiple of 64; `None` if `k` is not a whole
/// number of blocks or the size overflows.
pub fn act_bytes(kind: ActKind, k: usize) -> Option<usize> {
    if !k.is_multiple_of(kind.block_len()) || k > isize::MAX as usize / 16 {
        return None;
    }
    let bytes = match kind {
        // A whole number of steps of the product (see `float`); the last one is zero-padded.
        ActKind::F32 => k.next_multiple_of(32) * 4,
        ActKind::Bf16 => k.next_multiple_of(64) * 2,
        ActKind::Q8 => Q8Layout::new(k).bytes,
        ActKind::Q8K => Q8KLayout::new(k).bytes,
    };
    let lines = bytes.div_ceil(64);
    // Rows at multiples of 1 KiB would compete for the same sets of the L1 cache.
    Some(64 * if lines.is_multiple_of(16) { lines + 1 } else { lines })
}

/// Byte offsets of the parts of an [`ActKind::Q8`] row; the quants are at 0.
#[derive(Clone, Copy)]
pub(crate) struct Q8Layout {
    /// `f32` scale per block.
    pub(crate) d: usize,
    /// `i32` per block: -128 times the sum of the quants.
    pub(crate) bias: usize,
    /// `f32` per block: the scale times the sum of the quants.
    pub(crate) sum: usize,
    bytes: usize,
}

impl Q8Layout {
    pub(crate) const fn new(k: usize) -> Q8Layout {
        let n = k / 32;
        Q8Layout { d: k, bias: k + 4 * n, sum: k + 8 * n, bytes: k + 12 * n }
    }
}

/// Byte offsets of the parts of an [`ActKind::Q8K`] row; the quants are at 0.
#[derive(Clone, Copy)]
pub(crate) struct Q8KLayout {
    /// `f32` scale per block, for the finest steps.
    pub(crate) d: usize,
    /// 8 `i16` per block: sums of 32 quants in the finest steps, in the order 0 2 1 3 4 6 5 7 (see
    /// [`PAIR_ORDER`]).
    pub(crate) sums32: usize,
    /// 16 `i16` per block: sums of 16 quants in the finest steps, in the same order within each four.
    pub(crate) sums16: usize,
    /// 8 `i32` per block: -128 times the sum of 32 quants.
    pub(crate) bias32: usize,
    /// 16 `i32` per block: -32 times the sum of 16 quants.
    pub(crate) bias16: usize,
    /// 8 `i32` per block: left shift that converts the quants of 32 elements to the finest steps.
    pub(crate) shifts: usize,
    bytes: usize,
}

/// Number of bits by which the finest steps are finer than those of the largest magnitude. With one more, sums
/// of 32 quants would not fit in 16 bits.
const FINER_BITS: u32 = 3;

impl Q8KLayout {
    pub(crate) const fn new(k: usize) -> Q8KLayout {
        let n = k / 256;
        Q8KLayout {
            d: k,
            sums32: k + 4 * n,
            sums16: k + 20 * n,
            bias32: k + 52 * n,
            bias16: k + 84 * n,
            shifts: k + 148 * n,
            bytes: k + 180 * n,
        }
    }
}

/// Masking every other byte of four leaves bytes 0 and 2, then 1 and 3, as 16-bit pairs; the sums are in the
/// same order.
const PAIR_ORDER: [usize; 4] = [0, 2, 1, 3];

/// Why an activation row could not be prepared.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ActError {
    /// The row is not a whole number of blocks.
    #[error("an activation row of {k} elements is not whole blocks of {block_len}")]
    NotWholeBlocks {
        /// Elements in the row.
        k: usize,
        /// Elements in a block.
        block_len: usize,
    },
    /// The destination has the wrong size.
    #[error("the prepared row needs {need} bytes, but the buffer has {got}")]
    BufferSize {
        /// Size that [`act_bytes`] returns.
        need: usize,
        /// Size of the buffer.
        got: usize,
    },
}

/// Prepares one activation row for matrix products; `dst` must have [`act_bytes`] bytes.
pub fn quantize_row(level: Level, kind: ActKind, src: &[f32], dst: &mut [u8]) -> Result<(), ActError> {
    let need = act_bytes(kind, src.len())
        .ok_or(ActError::NotWholeBlocks { k: src.len(), block_len: kind.block_len() })?;
    if dst.len() != need {
        return Err(ActError::BufferSize { need, got: dst.len() });
    }
    match kind {
        ActKind::F32 => {
            let (row, padding) = dst.split_at_mut(4 * src.len());
            for (bytes, x) in row.chunks_exact_mut(4).zip(src) {
                bytes.copy_from_slice(&x.to_le_bytes());
            }
            padding.fill(0);
        }
        ActKind::Bf16 => level.dispatch(RoundBf16 { src, dst }),
        ActKind::Q8 => level.dispatch(QuantizeQ8 { src, dst }),
        ActKind::Q8K => level.dispatch(QuantizeQ8K { src, dst }),
    }
    Ok(())
}

struct RoundBf16<'a> {
    src: &'a [f32],
    dst: &'a mut [u8],
}

impl SimdKernel for RoundBf16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // Plain Rust, which the compiler vectorises for the level.
        let (row, padding) = self.dst.split_at_mut(2 * self.src.len());
        for (bytes, x) in row.chunks_exact_mut(2).zip(self.src) {
            bytes.copy_from_slice(&round_bf16(*x).to_le_bytes());
        }
        padding.fill(0);
    }
}

/// The nearest bfloat16, ties to even; zero for subnormals, a quiet NaN for NaNs.
#[inline(always)]
fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let magnitude = bits & 0x7fff_ffff;
    let is_nan = magnitude > 0x7f80_0000;
    let kept = if is_nan { bits | 0x0040_0000 } else { rounded };
    // Flushes subnormals, like the dot product instruction.
    let is_normal = magnitude >= 0x0080_0000;
    ((if is_normal { kept } else { bits & 0x8000_0000 }) >> 16) as u16
}

struct QuantizeQ8<'a> {
    src: &'a [f32],
    dst: &'a mut [u8],
}

impl SimdKernel for QuantizeQ8<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let at = Q8Layout::new(self.src.len());
        for (block_idx, block) in self.src.chunks_exact(32).enumerate() {
            let (d, inverse) = scales(amax(s, block));
            let quants = &mut self.dst[32 * block_idx..][..32];
            let sum = quantize(s, block, inverse, quants);
            put(self.dst, at.d, block_idx, d.to_le_bytes());
            put(self.dst, at.bias, block_idx, (-128 * sum).to_le_bytes());
            put(self.dst, at.sum, block_idx, (d * sum as f32).to_le_bytes());
        }
    }
}

struct QuantizeQ8K<'a> {
    src: &'a [f32],
    dst: &'a mut [u8],
}

impl SimdKernel for QuantizeQ8K<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let at = Q8KLayout::new(self.src.len());
        for (block_idx, block) in self.src.chunks_exact(256).enumerate() {
            let mut largest = [0.0f32; 8];
            for (largest, part) in largest.iter_mut().zip(block.chunks_exact(32)) {
                *largest = amax(s, part);
            }
            // The bits of magnitudes compare like the magnitudes, with infinity and NaN largest.
            let all = f32::from_bits(largest.iter().fold(0, |most, part| most.max(part.to_bits())));
            let (d, inverse) = scales(all);
            let (mut sums16, mut sums32) = ([0i32; 16], [0i32; 8]);
            for (i, &largest) in largest.iter().enumerate() {
                let finer =
                    (1..=FINER_BITS).take_while(|&bits| largest * (1 << bits) as f32 <= all).count() as u32;
                let shift = FINER_BITS - finer;
                put(self.dst, at.shifts, 8 * block_idx + i, shift.to_le_bytes());
                for half in [2 * i, 2 * i + 1] {
                    let quants = &mut self.dst[256 * block_idx + 16 * half..][..16];
                    let x = &block[16 * half..][..16];
                    let sum = quantize(s, x, inverse * (1 << finer) as f32, quants);
                    put(self.dst, at.bias16, 16 * block_idx + half, (-32 * sum).to_le_bytes());
                    sums16[half] = sum << shift;
                    sums32[i] += sum;
                }
                put(self.dst, at.bias32, 8 * block_idx + i, (-128 * sums32[i]).to_le_bytes());
                sums32[i] <<= shift;
            }
            put(self.dst, at.d, block_idx, (d / (1 << FINER_BITS) as f32).to_le_bytes());
            for i in 0..16 {
                let paired = sums16[i / 4 * 4 + PAIR_ORDER[i % 4]] as i16;
                put(self.dst, at.sums16, 16 * block_idx + i, paired.to_le_bytes());
            }
            for i in 0..8 {
                let paired = sums32[i / 4 * 4 + PAIR_ORDER[i % 4]] as i16;
                put(self.dst, at.sums32, 8 * block_idx + i, paired.to_le_bytes());
            }
        }
    }
}

/// Writes element `idx` of the array that starts at byte `base`.
#[inline(always)]
fn put<const N: usize>(dst: &mut [u8], base: usize, idx: usize, bytes: [u8; N]) {
    dst[base + N * idx..][..N].copy_from_slice(&bytes);
}

/// Returns the scale and the inverse for quants, from the bits of the largest magnitude.
#[inline(always)]
fn scales(amax: f32) -> (f32, f32) {
    if !amax.is_finite() {
        (f32::NAN, 0.0)
    } else if amax < 1e-35 {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    }
}

/// Largest magnitude of a block whose length is a multiple of 16; not finite if any element is not.
#[inline(always)]
fn amax<S: Simd>(s: S, block: &[f32]) -> f32 {
    // As integers, magnitudes compare correctly and NaN is above infinity.
    let magnitude = s.splat(0x7fff_ffff);
    let mut max = s.splat(0);
    for x in block.chunks_exact(S::LANES) {
        // SAFETY: `chunks_exact` gives LANES floats.
        let x = s.as_i(unsafe { s.fload(x.as_ptr()) });
        max = s.max(max, s.and(x, magnitude));
    }
    f32::from_bits(lanes(s, max)[..S::LANES].iter().fold(0, |a, &b| a.max(b)) as u32)
}

/// Quantises a multiple of 16 elements and returns the sum of the quants.
#[inline(always)]
fn quantize<S: Simd>(s: S, src: &[f32], inverse: f32, dst: &mut [u8]) -> i32 {
    let inverse_all = s.fsplat(inverse);
    let mut sum = s.splat(0);
    for (x, q) in src.chunks_exact(S::LANES).zip(dst.chunks_exact_mut(S::LANES)) {
        // SAFETY: `chunks_exact` gives LANES floats to read and LANES bytes to write; a zero inverse marks a
        // block whose elements may not be finite, so they are not loaded.
        unsafe {
            let x = if inverse == 0.0 { s.fsplat(0.0) } else { s.fload(x.as_ptr()) };
            let quants = s.to_i(s.fmul(x, inverse_all));
            sum = s.add(sum, quants);
            s.store_i8(q.as_mut_ptr(), quants);
        }
    }
    lanes(s, sum)[..S::LANES].iter().sum()
}

#[inline(always)]
fn lanes<S: Simd>(s: S, a: S::I) -> [i32; 16] {
    let mut out = [0i32; 16];
    // SAFETY: a register is at most 64 bytes, and so is `out`.
    unsafe { s.store(out.as_mut_ptr().cast(), a) };
    out
}
