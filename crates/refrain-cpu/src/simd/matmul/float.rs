//! Matrix products with float weights, directly from the rows of the file.
//!
//! Weights and activations are both read sequentially, in steps of 32 lanes. Element `i` of F32 and F16 weights
//! is widened, and its product is added to lane `i % 32` with one rounding. Elements `2 i` and `2 i + 1` of
//! BF16 weights are added to lane `i % 32` as in [`Simd::dot_bf16`]. At the end lane `i` is added to lane
//! `i + 16`, and the result is summed as in [`Simd::sum16`]. So the weights need no copy, and the bits depend
//! only on the two rows.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Acts, OutTile};
use crate::simd::Level;
use crate::simd::lanes::{GROUP, Simd, SimdKernel};
use crate::simd::weights::WeightMatrix;
use refrain_tensor::DType;

/// Number of lanes that a row is summed in.
const LANES: usize = 2 * GROUP;
/// Weight rows per pass over several activation rows.
const ROWS: usize = 4;
/// Maximum number of activation rows per pass over the same weight rows.
const MAX_X: usize = 128;
/// Maximum bytes of such activation rows: a large part of an L2 cache.
const X_BYTES: usize = 640 * 1024;
/// Steps of the weight rows that are copied to a contiguous buffer in the L1 cache.
const CHUNK: usize = 32;
/// Bytes of activations per step, for every type.
const X_STEP: usize = 4 * LANES;

/// A float weight type.
trait Float {
    /// Bytes of weights per step.
    const STEP: usize;

    /// Loads the weights of lanes `part * S::LANES ..` of a step, in the format of `dot`.
    /// # Safety
    /// `STEP` bytes are readable at `p`, `part < 32 / S::LANES`.
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::I;

    /// Adds the products of weights and activations to their lanes.
    fn dot<S: Simd>(s: S, acc: S::F, w: S::I, x: S::I) -> S::F;
}

/// Computes weight rows `rows` for every activation row.
///
/// # Panics
/// If the weights are not floats in the file layout.
pub(super) fn products(
    level: Level,
    w: &WeightMatrix<'_>,
    x: &Acts<'_>,
    rows: Range<usize>,
    out: &mut OutTile<'_>,
) {
    let x_block = (X_BYTES / x.row_bytes.max(1) / 12 * 12).clamp(12, MAX_X);
    let mut scratch = FloatScratch {
        weights: MaybeUninit::uninit(),
        lanes: MaybeUninit::uninit(),
        values: [0.0; MAX_X * ROWS],
    };
    for first_x in (0..x.m).step_by(x_block) {
        let xs = first_x..x.m.min(first_x + x_block);
        for first_row in rows.clone().step_by(ROWS) {
            let n_rows = ROWS.min(rows.end - first_row);
            let row = |i: usize| match w.file_row(first_row + i.min(n_rows - 1)) {
                Some(bytes) => bytes,
                None => panic!("float weights are always in the file layout"),
            };
            let group = RowGroup { rows: std::array::from_fn(row), n_rows, x, xs: xs.clone() };
            match w.dtype() {
                DType::F32 => level.dispatch(FloatRowProducts::<F32>::new(group, &mut scratch)),
                DType::F16 => level.dispatch(FloatRowProducts::<F16>::new(group, &mut scratch)),
                DType::BF16 => level.dispatch(FloatRowProducts::<Bf16>::new(group, &mut scratch)),
                DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 | DType::IQ4_NL => {
                    tiled(w)
                }
                DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => tiled(w),
                DType::MXFP4 | DType::IQ2_XXS | DType::IQ2_XS => tiled(w),
                DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => tiled(w),
                DType::IQ4_XS | DType::I32 | DType::U32 | DType::I64 | DType::U8 => tiled(w),
            }
            // A copy of constant length is one instruction; any other is a call.
            let (values, first_col) = (scratch.values.as_chunks::<ROWS>().0, first_row - rows.start);
            if n_rows == ROWS {
                xs.clone().zip(values).for_each(|(row, values)| out.store(row, first_col, values));
            } else {
                xs.clone().zip(values).for_each(|(row, values)| out.store(row, first_col, &values[..n_rows]));
            }
        }
    }
}

fn tiled(w: &WeightMatrix<'_>) -> ! {
    unreachable!("{} weights are not multiplied row by row", w.dtype())
}

/// Weight rows and activation rows; each is multiplied with each.
struct RowGroup<'a> {
    /// All of one length; rows from `n_rows` on are padding.
    rows: [&'a [u8]; ROWS],
    n_rows: usize,
    x: &'a Acts<'a>,
    /// At most [`MAX_X`].
    xs: Range<usize>,
}

#[repr(align(64))]
struct FloatScratch {
    /// A chunk of the weight rows. In the file, the rows are often at multiples of 4 KiB and evict each other
    /// from the cache.
    weights: MaybeUninit<[u8; CHUNK * ROWS * X_STEP]>,
    /// Lanes of each sum, by activation row, if there are several.
    lanes: MaybeUninit<[[f32; LANES]; MAX_X * ROWS]>,
    /// Sums, by activation row.
    values: [f32; MAX_X * ROWS],
}

struct FloatRowProducts<'a, B> {
    group: RowGroup<'a>,
    scratch: &'a mut FloatScratch,
    weights: PhantomData<B>,
}

impl<'a, B: Float> FloatRowProducts<'a, B> {
    fn new(group: RowGroup<'a>, scratch: &'a mut FloatScratch) -> Self {
        assert!(group.xs.len() <= MAX_X && group.rows.iter().all(|r| r.len() == group.rows[0].len()));
        let n_steps = group.rows[0].len().div_ceil(B::STEP);
        assert!(n_steps * X_STEP <= group.x.row_bytes, "the activations are padded to whole steps");
        FloatRowProducts { group, scratch, weights: PhantomData }
    }
}

impl<B: Float> SimdKernel for FloatRowProducts<'_, B> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RowGroup { rows, n_rows, x, xs } = self.group;
        let (n_whole, rest) = (rows[0].len() / B::STEP, rows[0].len() % B::STEP);
        // The partial last step of each row, zero-padded.
        let mut tails = [[0u8; X_STEP]; ROWS];
        if rest > 0 {
            for (tail, row) in tails.iter_mut().zip(rows) {
                tail[..rest].copy_from_slice(&row[n_whole * B::STEP..]);
            }
        }
        if xs.len() == 1 {
            let x = x.row(xs.start);
            for i in 0..n_rows {
                // SAFETY: each row has `n_whole` steps, each tail has one, and the activations have all of
                // them, as `new` has checked.
                unsafe {
                    let mut acc = [s.fsplat(0.0); 8];
                    dot_steps::<S, B>(s, &mut acc, rows[i].as_ptr(), x, n_whole);
                    if rest > 0 {
                        dot_steps::<S, B>(s, &mut acc, tails[i].as_ptr(), x.add(n_whole * X_STEP), 1);
                    }
                    self.scratch.values[i] = fold(s, &acc);
                }
            }
            return;
        }
        let weights = self.scratch.weights.as_mut_ptr().cast::<u8>();
        let lanes = self.scratch.lanes.as_mut_ptr().cast::<f32>();
        let n_steps = n_whole + usize::from(rest > 0);
        for first in (0..n_steps).step_by(CHUNK) {
            let chunk = WeightChunk { weights, n: CHUNK.min(n_steps - first), first, lanes };
            // SAFETY: a chunk has space for its steps, and the lanes for all `xs`. Steps before `n_whole` are
            // in the rows, the last one is in the tails, and all are in the activations. The first chunk
            // initialises the lanes.
            unsafe {
                for step in 0..chunk.n {
                    for r in 0..ROWS {
                        let at = (first + step) * B::STEP;
                        let w =
                            if first + step < n_whole { rows[r].as_ptr().add(at) } else { tails[r].as_ptr() };
                        for part in 0..LANES / S::LANES {
                            s.store(chunk.weights_at::<S>(part, step, r), B::load(s, w, part));
                        }
                    }
                }
                add_chunk::<S, B>(s, x, &xs, &chunk);
            }
        }
        if n_steps > 0 {
            // SAFETY: the lanes of `xs` were written.
            unsafe { fold_all(s, lanes, &mut self.scratch.values[..xs.len() * ROWS]) };
        }
    }
}

/// Some steps of [`ROWS`] weight rows.
struct WeightChunk {
    /// By register, see `weights_at`.
    weights: *mut u8,
    /// Number of steps, at most [`CHUNK`].
    n: usize,
    /// Index of its first step in the rows.
    first: usize,
    /// The lanes of activation row `i` and weight row `j` begin at `(i * ROWS + j) * LANES`.
    lanes: *mut f32,
}

impl WeightChunk {
    /// Address of the register for a part of a step of a row, in the order that `tile` reads.
    #[inline(always)]
    fn weights_at<S: Simd>(&self, part: usize, step: usize, row: usize) -> *mut u8 {
        self.weights.wrapping_add(4 * S::LANES * ((part * CHUNK + step) * ROWS + row))
    }
}

/// Adds a chunk to the lanes of activation rows `xs`.
///
/// # Safety
/// The chunk's weights are initialised, its steps are readable in the activation rows, and the lanes are
/// writable. The lanes are initialised unless these are the first steps.
#[inline(always)]
unsafe fn add_chunk<S: Simd, B: Float>(s: S, x: &Acts<'_>, xs: &Range<usize>, chunk: &WeightChunk) {
    let row = |i: usize| x.row(i).wrapping_add(chunk.first * X_STEP);
    let mut i = xs.start;
    while i < xs.end {
        // SAFETY: by the contract of this function; `lanes` are those of rows `i ..`.
        unsafe {
            let lanes = chunk.lanes.add((i - xs.start) * ROWS * LANES);
            let left = xs.end - i;
            if left == 1 {
                tile::<S, B, 1>(s, chunk, [row(i)], lanes);
                i += 1;
            } else if left == 2 || S::LANES < GROUP {
                // Eight sums and their operands fit into 16 registers.
                tile::<S, B, 2>(s, chunk, [row(i), row(i + 1)], lanes);
                i += 2;
            } else if left < 6 || !S::BF16 {
                // Widened weights and activations take registers too.
                tile::<S, B, 3>(s, chunk, [row(i), row(i + 1), row(i + 2)], lanes);
                i += 3;
            } else {
                let x = [row(i), row(i + 1), row(i + 2), row(i + 3), row(i + 4), row(i + 5)];
                tile::<S, B, 6>(s, chunk, x, lanes);
                i += 6;
            }
        }
    }
}

/// Adds a chunk to the lanes of `M` activation rows, one register of each sum at a time.
///
/// # Safety
/// As [`add_chunk`].
#[inline(always)]
unsafe fn tile<S: Simd, B: Float, const M: usize>(
    s: S,
    chunk: &WeightChunk,
    x: [*const u8; M],
    lanes: *mut f32,
) {
    for part in 0..LANES / S::LANES {
        // SAFETY: by the contract of this function; the parts of a sum are contiguous.
        unsafe {
            let mut acc = [[s.fsplat(0.0); M]; ROWS];
            if chunk.first > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (m, acc) in acc.iter_mut().enumerate() {
                        *acc = s.fload(lanes.add((m * ROWS + r) * LANES + part * S::LANES));
                    }
                }
            }
            for step in 0..chunk.n {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = s.load(chunk.weights_at::<S>(part, step, r));
                    for (acc, x) in acc.iter_mut().zip(x) {
                        let x = s.load(x.add(step * X_STEP + 4 * S::LANES * part));
                        *acc = B::dot(s, *acc, w, x);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (m, &acc) in acc.iter().enumerate() {
                    s.fstore(lanes.add((m * ROWS + r) * LANES + part * S::LANES), acc);
                }
            }
        }
    }
}

/// Adds `n` steps of one weight row and one activation row to the lanes, in the first `32 / LANES` registers.
///
/// # Safety
/// `n` steps are readable at `w` and at `x`.
#[inline(always)]
unsafe fn dot_steps<S: Simd, B: Float>(s: S, acc: &mut [S::F; 8], w: *const u8, x: *const u8, n: usize) {
    for step in 0..n {
        for (part, acc) in acc.iter_mut().enumerate().take(LANES / S::LANES) {
            // SAFETY: inside the steps.
            unsafe {
                let w = B::load(s, w.add(step * B::STEP), part);
                let x = s.load(x.add(step * X_STEP + 4 * S::LANES * part));
                *acc = B::dot(s, *acc, w, x);
            }
        }
    }
}

/// Sum of all lanes.
#[inline(always)]
fn fold<S: Simd>(s: S, acc: &[S::F; 8]) -> f32 {
    let mut halves = [s.fsplat(0.0); 4];
    for (g, half) in halves.iter_mut().enumerate().take(GROUP / S::LANES) {
        *half = s.fadd(acc[g], acc[g + GROUP / S::LANES]);
    }
    s.sum16(halves)
}

/// Like [`fold`], for many sums with contiguous lanes.
///
/// # Safety
/// `32 * values.len()` floats are readable at `lanes`.
#[inline(always)]
unsafe fn fold_all<S: Simd>(s: S, lanes: *const f32, values: &mut [f32]) {
    for (i, values) in values.chunks_mut(GROUP).enumerate() {
        let mut halves = [[0f32; GROUP]; GROUP];
        for (j, halves) in halves.iter_mut().enumerate().take(values.len()) {
            for g in (0..GROUP).step_by(S::LANES) {
                // SAFETY: the lanes of sum `16 i + j`.
                unsafe {
                    let low = lanes.add((GROUP * i + j) * LANES + g);
                    s.fstore(halves.as_mut_ptr().add(g), s.fadd(s.fload(low), s.fload(low.add(GROUP))));
                }
            }
        }
        let sums = s.sum16x16(&halves);
        match values.as_chunks_mut() {
            ([all], []) => *all = sums,
            _ => values.copy_from_slice(&sums[..values.len()]),
        }
    }
}

struct F32;

impl Float for F32 {
    const STEP: usize = 4 * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::I {
        // SAFETY: inside the step.
        unsafe { s.load(p.add(4 * S::LANES * part)) }
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::F, w: S::I, x: S::I) -> S::F {
        s.fma(s.as_f(w), s.as_f(x), acc)
    }
}

struct F16;

impl Float for F16 {
    const STEP: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::I {
        // SAFETY: inside the step.
        unsafe { s.as_i(s.load_f16(p.add(2 * S::LANES * part))) }
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::F, w: S::I, x: S::I) -> S::F {
        s.fma(s.as_f(w), s.as_f(x), acc)
    }
}

struct Bf16;

impl Float for Bf16 {
    const STEP: usize = 4 * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::I {
        // SAFETY: inside the step.
        unsafe { s.load(p.add(4 * S::LANES * part)) }
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::F, w: S::I, x: S::I) -> S::F {
        s.dot_bf16(acc, w, x)
    }
}
