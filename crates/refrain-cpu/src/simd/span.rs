//! The parts of attention among rows: products of blocks, a running softmax over them, and its gradient.
//!
//! A block is 64 rows or 64 keys. Scores of a block lie as `[key, row]` or as `[row, key]`, whichever lets the product
//! that follows read them as they lie. Sums over keys or rows run in their order, so the bits are the same at every level.

use super::Level;
use super::gemm::{Sums, tile};
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// Rows or keys that are handled together.
pub(crate) const BLOCK: usize = 64;
/// Scores of a block of rows with a block of keys.
pub(crate) const SCORES: usize = BLOCK * BLOCK;
const GROUPS: usize = BLOCK / GROUP;

/// A row that has seen nothing yet: less than any score, and finite, so that differences are.
pub(crate) const NOTHING: f32 = f32::MIN;

/// Sixteen neighbouring rows (or columns) of an operand for each `k`.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub data: &'a [f32],
    /// Floats from one `k` to the next.
    pub step: usize,
    /// Floats from one group of sixteen to the next.
    pub group: usize,
}

impl<'a> Side<'a> {
    /// Panels as [`panels`] makes them, of rows of `d`.
    pub(crate) fn panels(data: &'a [f32], d: usize) -> Side<'a> {
        Side { data, step: GROUP, group: GROUP * d }
    }

    /// Rows of `width` floats, each for one `k`.
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
                // SAFETY: `product` has checked that both sides have `k` steps of these groups, and that the output has
                // rows and columns for them.
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

/// `out[16 rows, 16 cols] = a · b`, or added to it; `n_groups` counts sixteens of rows and of columns.
///
/// # Panics
/// If the sizes do not fit together.
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
            // SAFETY: sixteen rows of `d` floats, and room for as many.
            unsafe { s.transpose(&rows, self.d, to.cast()) };
        }
    }
}

/// A block of rows of `d` floats into panels: for each sixteen rows, `[d, 16]`.
///
/// # Panics
/// If either has another size.
pub(crate) fn panels(level: Level, rows: &[f32], d: usize, out: &mut [f32]) {
    assert!(rows.len() == BLOCK * d && out.len() == BLOCK * d, "a block of rows of {d}");
    level.dispatch(PanelTranspose { rows, d, out });
}

/// What a block of rows has gathered so far.
pub(crate) struct Gathered<'a> {
    /// `[64]`, the largest score.
    pub max: &'a mut [f32],
    /// `[64]`, the sum of weights.
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

/// Scores `[key, row]` into weights; `factor` is what was gathered before for each row to be multiplied with.
///
/// # Panics
/// If a slice is not of a block's size.
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
                // SAFETY: `score_grads` has checked that there are 64 by 64 of both and 64 of what belongs to rows.
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

/// Scores into weights, and gradients of weights into those of `q · k`. Both blocks are `[key, row]` if `along`, else
/// `[row, key]`; `lse` and `mean` (the sum of `dy y`) belong to rows. `cap` is 0 where there is none.
///
/// # Panics
/// If a slice is not of a block's size.
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
                // SAFETY: `dots` has checked that both are panels of 64 rows of `d`, and a register is a part of one `k`.
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

/// The sum of products of each row of two blocks in panels, in one chain as [`product`] has it: what is subtracted from a
/// product then cancels where it should.
///
/// # Panics
/// If a slice is not of a block's size.
pub(crate) fn dots(level: Level, a: &[f32], b: &[f32], d: usize, out: &mut [f32]) {
    assert!(a.len() == BLOCK * d && b.len() == BLOCK * d && out.len() == BLOCK, "blocks of rows of {d}");
    level.dispatch(Dots { a, b, d, out });
}
