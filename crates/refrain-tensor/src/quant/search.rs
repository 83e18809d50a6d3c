//! Search for scales and minima with a small squared error, for the encoders.
//!
//! A sub-block is fitted by alternating two steps from several starting points: take the nearest levels for the
//! scale, then the least-squares scale (and minimum) for those levels, as long as the error falls. Neither step can
//! raise the error. The starting points map the extreme values to the extreme levels or slightly beyond, since
//! clipping one value often improves the precision of all others.
//!
//! The fitted scales of a block are then rounded to multiples of its f16 scale. Since rounding changes them, each
//! sub-block also tries the neighbouring multiples and keeps the pair with the smallest error.
//!
//! Sums are f64, so that no finite input overflows; a scale that is too large for f16 is detected when it is
//! rounded.

use super::block::F16Le;

/// Fractions of the full range that the starting points of a search cover.
const COVERS: [f32; 5] = [1.0, 0.93, 0.86, 0.78, 0.7];
/// Fractions of the range that the starting points of a search with minimum omit at either end.
const INSETS: [f32; 3] = [0.0, 0.06, 0.14];
/// Alternations per starting point; few improve after the third.
const MAX_ROUNDS: usize = 4;

/// Levels that a scale multiplies, indexed in ascending order.
pub(super) trait Levels {
    /// Index of the level nearest to `v`.
    fn nearest(&self, v: f32) -> u8;
    /// Level at an index.
    fn value(&self, q: u8) -> f32;
    /// The lowest level, which is negative, and the highest, which is positive.
    fn extremes(&self) -> [f32; 2];
}

/// All integers from `lo` to `hi`.
pub(super) struct Steps {
    pub(super) lo: i8,
    pub(super) hi: i8,
}

impl Levels for Steps {
    fn nearest(&self, v: f32) -> u8 {
        nearest_step(v - f32::from(self.lo), (self.hi - self.lo) as u8)
    }

    fn value(&self, q: u8) -> f32 {
        f32::from(q) + f32::from(self.lo)
    }

    fn extremes(&self) -> [f32; 2] {
        [f32::from(self.lo), f32::from(self.hi)]
    }
}

/// The shape of a block type without minima: signed scales in `scale_min..-scale_min`.
pub(super) struct SymmetricSpec {
    pub(super) sub_len: usize,
    pub(super) scale_min: i16,
}

/// A fitted block of `x = d * scale * level(q)`.
pub(super) struct Symmetric {
    pub(super) d: F16Le,
    pub(super) scales: [i16; 16], // [256 / sub_len], others unused
    pub(super) q: [u8; 256],      // level indices
}

/// The shape of a block type with minima: scales and minima in `0..=scale_max`, levels in `0..=q_max`.
pub(super) struct AffineSpec {
    pub(super) sub_len: usize,
    pub(super) q_max: u8,
    pub(super) scale_max: u8,
}

/// A fitted block of `x = d * scale * q - dmin * min`.
pub(super) struct Affine {
    pub(super) d: F16Le,
    pub(super) dmin: F16Le,
    pub(super) scales: [u8; 16], // [256 / sub_len], others unused
    pub(super) mins: [u8; 16],   // [256 / sub_len], others unused
    pub(super) q: [u8; 256],
}

/// Fits a block whose sub-blocks have only scales; `None` if `d` overflows.
pub(super) fn encode_symmetric(
    x: &[f32; 256],
    levels: &impl Levels,
    spec: SymmetricSpec,
) -> Option<Symmetric> {
    let mut fitted = [0.0; 16];
    for (scale, x) in fitted.iter_mut().zip(x.chunks_exact(spec.sub_len)) {
        *scale = fit_scale(x, levels);
    }
    // Map the largest scale to the lowest multiple, whatever its sign, since that side has one more.
    let d = F16Le::from_f32(fitted[peak_idx(&fitted)] / f32::from(spec.scale_min))?;
    let (step, inv) = (d.to_f32(), inverse(d.to_f32()));
    let mut block = Symmetric { d, scales: [0; 16], q: [0; 256] };
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let centre = (fitted[s] * inv).round() as i16;
        let near = (centre.saturating_sub(1)..=centre.saturating_add(1))
            .map(|n| n.clamp(spec.scale_min, -spec.scale_min - 1))
            .map(|n| (n, symmetric_error(x, step * f32::from(n), levels)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        block.scales[s] = near.map_or(0, |(n, _)| n);
        let inv = inverse(step * f32::from(block.scales[s]));
        for (q, &x) in q.iter_mut().zip(x) {
            *q = levels.nearest(x * inv);
        }
    }
    Some(block)
}

/// Fits a block whose sub-blocks have scales and minima; `None` if `d` or `dmin` overflows.
pub(super) fn encode_affine(x: &[f32; 256], spec: AffineSpec) -> Option<Affine> {
    let (mut scales, mut mins) = ([0.0f32; 16], [0.0f32; 16]);
    for (s, x) in x.chunks_exact(spec.sub_len).enumerate() {
        (scales[s], mins[s]) = fit_scale_and_min(x, spec.q_max);
    }
    let d = F16Le::from_f32(range(&scales).1 / f32::from(spec.scale_max))?;
    let dmin = F16Le::from_f32(range(&mins).1 / f32::from(spec.scale_max))?;
    let (step, min_step) = (d.to_f32(), dmin.to_f32());
    let mut block = Affine { d, dmin, scales: [0; 16], mins: [0; 16], q: [0; 256] };
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let near = |fitted: f32, inv: f32| {
            let centre = nearest_step(fitted * inv, spec.scale_max);
            centre.saturating_sub(1)..=(centre + 1).min(spec.scale_max)
        };
        let near_mins = near(mins[s], inverse(min_step));
        let best = near(scales[s], inverse(step))
            .flat_map(|n| near_mins.clone().map(move |m| (n, m)))
            .map(|(n, m)| (n, m, affine_error(x, step * f32::from(n), min_step * f32::from(m), spec.q_max)))
            .min_by(|a, b| a.2.total_cmp(&b.2));
        (block.scales[s], block.mins[s]) = best.map_or((0, 0), |(n, m, _)| (n, m));
        let inv = inverse(step * f32::from(block.scales[s]));
        let min = min_step * f32::from(block.mins[s]);
        for (q, &x) in q.iter_mut().zip(x) {
            *q = nearest_step((x + min) * inv, spec.q_max);
        }
    }
    Some(block)
}

/// Finds a scale, of either sign, for which the nearest levels have a small squared error.
pub(super) fn fit_scale(x: &[f32], levels: &impl Levels) -> f32 {
    let peak = x[peak_idx(x)];
    let (mut best, mut best_gain) = (0.0, 0.0);
    for extreme in levels.extremes() {
        for cover in COVERS {
            let mut scale = peak / extreme * cover;
            let mut last_gain = 0.0;
            for _ in 0..MAX_ROUNDS {
                let inv = inverse(scale);
                let (mut sum_xv, mut sum_vv) = (0.0, 0.0);
                for &x in x {
                    let v = f64::from(levels.value(levels.nearest(x * inv)));
                    sum_xv += f64::from(x) * v;
                    sum_vv += v * v;
                }
                // Reduction of the sum of x^2 by the best scale for these levels.
                let gain = if sum_vv > 0.0 { sum_xv * sum_xv / sum_vv } else { 0.0 };
                if gain <= last_gain {
                    break;
                }
                (scale, last_gain) = ((sum_xv / sum_vv) as f32, gain);
            }
            if last_gain > best_gain {
                (best, best_gain) = (scale, last_gain);
            }
        }
    }
    best
}

/// Finds a non-negative scale and minimum for which `scale * q - min` has a small squared error.
fn fit_scale_and_min(x: &[f32], q_max: u8) -> (f32, f32) {
    let (low, high) = range(x);
    // Minima are not negative, so level 0 is at or below zero.
    let low = low.min(0.0);
    let extent = high - low;
    // Start with the solution for a constant sub-block: a single level at its value.
    let (mut best, mut best_error) = ((0.0, -low), affine_error(x, 0.0, -low, q_max));
    for inset_low in INSETS {
        for inset_high in INSETS {
            let start =
                (extent * (1.0 - inset_low - inset_high) / f32::from(q_max), -low - extent * inset_low);
            let (fit, error) = alternate(x, q_max, start);
            if error < best_error {
                (best, best_error) = (fit, error);
            }
        }
    }
    best
}

/// Alternates between levels and scale with minimum, as long as the error falls.
fn alternate(x: &[f32], q_max: u8, (mut scale, mut min): (f32, f32)) -> ((f32, f32), f64) {
    min = min.max(0.0);
    let mut error = affine_error(x, scale, min, q_max);
    for _ in 0..MAX_ROUNDS {
        let Some((next_scale, next_min)) = least_squares(x, scale, min, q_max) else {
            break;
        };
        let next_error = affine_error(x, next_scale, next_min, q_max);
        if next_error >= error {
            break;
        }
        (scale, min, error) = (next_scale, next_min, next_error);
    }
    ((scale, min), error)
}

/// Least-squares scale and minimum for the levels that are nearest for `scale` and `min`.
fn least_squares(x: &[f32], scale: f32, min: f32, q_max: u8) -> Option<(f32, f32)> {
    let n = x.len() as f64;
    let inv = inverse(scale);
    let (mut sum_q, mut sum_qq, mut sum_x, mut sum_xq) = (0.0, 0.0, 0.0, 0.0);
    for &x in x {
        let q = f64::from(nearest_step((x + min) * inv, q_max));
        let x = f64::from(x);
        sum_q += q;
        sum_qq += q * q;
        sum_x += x;
        sum_xq += x * q;
    }
    let det = n * sum_qq - sum_q * sum_q;
    if det <= 0.0 {
        return None; // All values are on one level.
    }
    let scale = (n * sum_xq - sum_q * sum_x) / det;
    let min = (scale * sum_q - sum_x) / n;
    let (scale, min) = if min < 0.0 { (sum_xq / sum_qq, 0.0) } else { (scale, min) };
    (scale > 0.0).then_some((scale as f32, min as f32))
}

fn symmetric_error(x: &[f32], scale: f32, levels: &impl Levels) -> f64 {
    let inv = inverse(scale);
    x.iter()
        .map(|&x| f64::from(x) - f64::from(scale * levels.value(levels.nearest(x * inv))))
        .map(|e| e * e)
        .sum()
}

fn affine_error(x: &[f32], scale: f32, min: f32, q_max: u8) -> f64 {
    let inv = inverse(scale);
    let decoded = |x: f32| scale * f32::from(nearest_step((x + min) * inv, q_max)) - min;
    x.iter().map(|&x| f64::from(x) - f64::from(decoded(x))).map(|e| e * e).sum()
}

/// Rounds `v` to an integer in `0..=max`.
fn nearest_step(v: f32, max: u8) -> u8 {
    // The cast truncates towards zero, saturates, and maps NaN to 0.
    ((v + 0.5) as u8).min(max)
}

/// Returns `1 / scale`, or 0 if that is not finite: such a scale is 0 as an f16, whatever the levels.
pub(super) fn inverse(scale: f32) -> f32 {
    let inv = 1.0 / scale;
    if inv.is_finite() { inv } else { 0.0 }
}

/// Index of the first value of largest magnitude.
pub(super) fn peak_idx(x: &[f32]) -> usize {
    let mut peak = 0;
    for (i, v) in x.iter().enumerate() {
        if v.abs() > x[peak].abs() {
            peak = i;
        }
    }
    peak
}

/// Smallest and largest value.
pub(super) fn range(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &v| (min.min(v), max.max(v)))
}
