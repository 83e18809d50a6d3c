//! Kernels of attention among rows: matrix products of blocks, an online softmax over them, and its gradient.
//!
//! A block is 64 rows or 64 keys. Scores of a block are stored as `[key, row]` or as `[row, key]`, whichever
//! the next product can read without a transpose. Sums over keys or rows run in order, so the bits are the same
//! at every level.

use super::Level;
use super::gemm::{Sums, tile};
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// Rows or keys per block.
pub(crate) const BLOCK: usize = 64;
/// Scores of a block of rows with a block of keys.
pub(crate) const SCORES: usize = BLOCK * BLOCK;
const GROUPS: usize = BLOCK / GROUP;

/// Initial maximum of a row: below any score, and finite, so that differences are finite.
pub(crate) const NOTHING: f32 = f32::MIN;

/// Operand of a block product: groups of 16 adjacent rows (or columns) for each `k`.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub data: &'a [f32],
    /// Floats between consecutive `k`.
    pub step: usize,
    /// Floats between groups of 16.
    pub group: usize,
}

impl<'a> Side<'a> {
    /// An operand in the panels of [`panels`], of rows of `d`.
    pub(crate) fn panels(data: &'a [f32], d: usize) -> Side<'a> {
        Side { data, step: GROUP, group: GROUP * d }
    }

    /// Rows of `width` floats, one for each `k`.
    pub(crate) fn rows(data: &'a [f32], width: usize) -> Side<'a> {
        Side { data, step: width, group: GROUP }
    }

    fn fits(&self, k: usize, n_groups: usize) -> bool {
        k > 0 && n_groups > 0 && (k - 1) * self.step + (n_groups - 1) * self.group + GROUP <= self.data.len()
    }
}

struct SpanProduct<'a> {
    k: usize,
    a: Side<'a>,
    b: Side<'a>,
    n_groups: [usize; 2],
    out: &'a mut [f32],
    stride: usize,
    add: bool,
}

impl SimdKernel for SpanProduct<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let SpanProduct { k, a, b, n_groups: [n_rows, n_cols], out, stride, add } = self;
        for col in 0..n_cols {
            for row in 0..n_rows {
                // SAFETY: `product` has checked that both sides have `k` steps of these groups, and that the
                // output has rows and columns for them.
                unsafe {
                    let to = out.as_mut_ptr().add(row * GROUP * stride + col * GROUP);
                    let sums = Sums { to, stride, n_rows: GROUP, n_cols: GROUP, add };
                    let left = a.data.as_ptr().add(row * a.group);
                    let right = b.data.as_ptr().add(col * b.group);
                    tile(s, k, (left, a.step), (right, b.step), sums);
                }
            }
        }
    }
}

/// `out[16 rows, 16 cols] = a · b`, or added to `out`; `n_groups` counts groups of 16 rows and of 16 columns.
///
/// # Panics
/// If sizes do not match.
pub(crate) fn product(
    level: Level,
    k: usize,
    [a, b]: [Side<'_>; 2],
    n_groups: [usize; 2],
    out: &mut [f32],
    stride: usize,
    add: bool,
) {
    let [n_rows, n_cols] = n_groups;
    assert!(a.fits(k, n_rows) && b.fits(k, n_cols), "operands of a block of {n_groups:?} over {k}");
    assert!(n_cols * GROUP <= stride && n_rows * GROUP * stride <= out.len(), "results of {n_groups:?}");
    level.dispatch(SpanProduct { k, a, b, n_groups, out, stride, add });
}

struct PanelTranspose<'a> {
    rows: &'a [f32],
    d: usize,
    out: &'a mut [f32],
}

impl SimdKernel for PanelTranspose<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for group in 0..GROUPS {
            let mut rows = [std::ptr::null(); GROUP];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = self.rows[(group * GROUP + i) * self.d..].as_ptr().cast();
            }
            let to = self.out[group * GROUP * self.d..][..GROUP * self.d].as_mut_ptr();
            // SAFETY: 16 rows of `d` floats, and space for as many.
            unsafe { s.transpose(&rows, self.d, to.cast()) };
        }
    }
}

/// Packs a block of rows of `d` floats into panels: `[d, 16]` for every 16 rows.
///
/// # Panics
/// If a slice has another size.
pub(crate) fn panels(level: Level, rows: &[f32], d: usize, out: &mut [f32]) {
    assert!(rows.len() == BLOCK * d && out.len() == BLOCK * d, "a block of rows of {d}");
    level.dispatch(PanelTranspose { rows, d, out });
}

/// Accumulators of the online softmax of a block of rows.
pub(crate) struct Gathered<'a> {
    /// `[64]`, largest score so far.
    pub max: &'a mut [f32],
    /// `[64]`, sum of the weights.
    pub sum: &'a mut [f32],
}

struct Soften<'a> {
    scores: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    factor: &'a mut [f32],
}

impl SimdKernel for Soften<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Soften { scores, max, sum, factor } = self;
        let scores = scores.as_mut_ptr();
        for row in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: `soften` has checked that there are 64 by 64 scores and 64 of everything else.
            unsafe {
                let old = s.fload(max.as_ptr().add(row));
                let mut new = old;
                for key in 0..BLOCK {
                    new = s.fmax(s.fload(scores.add(key * BLOCK + row)), new);
                }
                let mut total = s.fsplat(0.0);
                for key in 0..BLOCK {
                    let at = scores.add(key * BLOCK + row);
                    let weight = math::exp(s, s.fsub(s.fload(at), new));
                    s.fstore(at, weight);
                    total = s.fadd(total, weight);
                }
                let shrink = math::exp(s, s.fsub(old, new));
                s.fstore(factor.as_mut_ptr().add(row), shrink);
                s.fstore(max.as_mut_ptr().add(row), new);
                let before = s.fload(sum.as_ptr().add(row));
                s.fstore(sum.as_mut_ptr().add(row), s.fma(before, shrink, total));
            }
        }
    }
}

/// Turns scores `[key, row]` into weights. Writes to `factor` by what the previous accumulators of each row
/// must be multiplied.
///
/// # Panics
/// If a slice does not have the size of a block.
pub(crate) fn soften(level: Level, scores: &mut [f32], rows: Gathered<'_>, factor: &mut [f32]) {
    let Gathered { max, sum } = rows;
    let is_block = max.len() == BLOCK && sum.len() == BLOCK && factor.len() == BLOCK;
    assert!(scores.len() == SCORES && is_block, "a block of scores");
    level.dispatch(Soften { scores, max, sum, factor });
}

struct ScoreGrads<'a> {
    scores: &'a mut [f32],
    slopes: &'a mut [f32],
    lse: &'a [f32],
    mean: &'a [f32],
    scale: f32,
    cap: f32,
    along: bool,
}

impl SimdKernel for ScoreGrads<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ScoreGrads { scores, slopes, lse, mean, scale, cap, along } = self;
        let (scale, one, per_cap) = (s.fsplat(scale), s.fsplat(1.0), s.fsplat(1.0 / cap));
        for line in 0..BLOCK {
            for at in (0..BLOCK).step_by(S::LANES) {
                // SAFETY: `score_grads` has checked that both have 64 by 64 elements and the row values 64.
                unsafe {
                    let (lse, mean) = match along {
                        true => (s.fload(lse.as_ptr().add(at)), s.fload(mean.as_ptr().add(at))),
                        false => (s.fsplat(*lse.as_ptr().add(line)), s.fsplat(*mean.as_ptr().add(line))),
                    };
                    let (p_at, d_at) = (
                        scores.as_mut_ptr().add(line * BLOCK + at),
                        slopes.as_mut_ptr().add(line * BLOCK + at),
                    );
                    let score = s.fload(p_at);
                    let weight = math::exp(s, s.fsub(score, lse));
                    let mut slope = s.fmul(s.fmul(weight, s.fsub(s.fload(d_at), mean)), scale);
                    if cap > 0.0 {
                        let t = s.fmul(score, per_cap);
                        slope = s.fmul(slope, s.fsub(one, s.fmul(t, t)));
                    }
                    s.fstore(p_at, weight);
                    s.fstore(d_at, slope);
                }
            }
        }
    }
}

/// Turns scores into weights, and gradients of weights into those of `q · k`. Both blocks are `[key, row]` if
/// `along`, otherwise `[row, key]`; `lse` and `mean` (the sum of `dy y`) are per row. `cap` is 0 for none.
///
/// # Panics
/// If a slice does not have the size of a block.
pub(crate) fn score_grads(
    level: Level,
    [scores, slopes]: [&mut [f32]; 2],
    [lse, mean]: [&[f32]; 2],
    [scale, cap]: [f32; 2],
    along: bool,
) {
    assert!(scores.len() == SCORES && slopes.len() == SCORES, "blocks of scores");
    assert!(lse.len() == BLOCK && mean.len() == BLOCK, "a block of rows");
    level.dispatch(ScoreGrads { scores, slopes, lse, mean, scale, cap, along });
}

struct Dots<'a> {
    a: &'a [f32],
    b: &'a [f32],
    d: usize,
    out: &'a mut [f32],
}

impl SimdKernel for Dots<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Dots { a, b, d, out } = self;
        for row in (0..BLOCK).step_by(S::LANES) {
            let first = row / GROUP * GROUP * d + row % GROUP;
            let mut sum = s.fsplat(0.0);
            for k in 0..d {
                // SAFETY: `dots` has checked that both are panels of 64 rows of `d`, and a register is part of
                // one `k`.
                unsafe {
                    let at = first + k * GROUP;
                    sum = s.fma(s.fload(a.as_ptr().add(at)), s.fload(b.as_ptr().add(at)), sum);
                }
            }
            // SAFETY: 64 floats.
            unsafe { s.fstore(out.as_mut_ptr().add(row), sum) };
        }
    }
}

/// Dot products of the rows of two blocks in panels, each in one chain like [`product`], so that subtracting
/// one from a product cancels exactly.
///
/// # Panics
/// If a slice does not have the size of a block.
pub(crate) fn dots(level: Level, a: &[f32], b: &[f32], d: usize, out: &mut [f32]) {
    assert!(a.len() == BLOCK * d && b.len() == BLOCK * d && out.len() == BLOCK, "blocks of rows of {d}");
    level.dispatch(Dots { a, b, d, out });
}
