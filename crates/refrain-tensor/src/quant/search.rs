//! Search for scales and minima with a small weighted squared error, for the encoders.
//!
//! A sub-block is fitted from many starting points: take the nearest levels for a scale, then the least-squares scale
//! (and minimum) for those levels. The best fit is refined by repeating both steps, neither of which can raise the
//! error. The starting points map the extreme values to the extreme levels, slightly beyond or slightly below, since
//! clipping one value often improves the precision of all others. The error of a least-squares fit follows from its
//! sums, so a starting point costs one pass over the values.
//!
//! The fitted scales of a block are then rounded to multiples of its f16 scale. Since rounding changes them, each
//! sub-block also tries the neighbouring multiples. Finally the f16 scales are fitted to the chosen multiples.
//!
//! Values are scaled by a power of two and weights by their largest, so that sums do not overflow. Sums are kept in
//! lanes that are added in a fixed order: the bits do not depend on the width of the machine's vectors.

use super::block::F16Le;

/// Fractions of the full range that the starting points of a search cover.
const COVERS: [f32; 9] = [1.06, 1.0, 0.96, 0.92, 0.88, 0.84, 0.79, 0.74, 0.68];
/// Fractions of the range that the starting points of a search with minimum cover, as multiples of one level.
const AFFINE_STARTS: usize = 12;
/// Repetitions of both steps from the best starting point.
const MAX_ROUNDS: usize = 4;
/// Weights below this fraction of the largest are raised to it: a value without weight would be unbounded.
const LEAST_WEIGHT: f32 = 1e-6;
/// Blocks whose largest magnitude is below this decode to zeros, whatever the scale: half the least f16.
const LEAST_PEAK: f32 = 1e-9;
const LANES: usize = 8;

/// Levels that a scale multiplies, indexed in ascending order.
pub(super) trait Levels {
    /// Index of the level nearest to `v`.
    fn nearest(&self, v: f32) -> u8;
    /// The level nearest to `v`; ties may go either way.
    fn rounded(&self, v: f32) -> f32;
    /// The lowest level, which is negative, and the highest, which is positive.
    fn extremes(&self) -> [f32; 2];
}

/// All integers from `lo` to `hi`.
pub(super) struct Steps {
    pub(super) lo: i8,
    pub(super) hi: i8,
}

impl Levels for Steps {
    #[inline(always)]
    fn nearest(&self, v: f32) -> u8 {
        (self.rounded(v) - f32::from(self.lo)) as u8
    }

    #[inline(always)]
    fn rounded(&self, v: f32) -> f32 {
        round_in(v, f32::from(self.lo), f32::from(self.hi))
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

/// A block prepared for the search: values of at most 2 in magnitude, weights of at most 1.
struct Prepared<const N: usize> {
    x: [f32; N],
    w: [f32; N],
    unit: f32, // a power of two
}

/// Prepares a block; `None` if it decodes to zeros.
fn prepare<const N: usize>(x: &[f32; N], w: &[f32; N]) -> Option<Prepared<N>> {
    let peak = x[peak_idx(x)].abs();
    if peak < LEAST_PEAK {
        return None;
    }
    // Halved so that the reciprocal of the largest power is not subnormal.
    let unit = f32::from_bits((peak * 0.5).to_bits() & 0x7f80_0000);
    let inv = 1.0 / unit;
    let most = w.iter().fold(0.0f32, |most, &w| if w > most { w } else { most });
    let (by, least) = if most > 0.0 && most.is_finite() { (most, LEAST_WEIGHT) } else { (1.0, 1.0) };
    let weight = |w: f32| {
        let w = w / by;
        if w > least { w } else { least }
    };
    Some(Prepared { x: x.map(|v| v * inv * 0.5), w: w.map(weight), unit: unit * 2.0 })
}

/// Fits a block whose sub-blocks have only scales; `None` if `d` overflows.
pub(super) fn encode_symmetric(
    x: &[f32; 256],
    w: &[f32; 256],
    levels: &impl Levels,
    spec: SymmetricSpec,
) -> Option<Symmetric> {
    let zero = levels.nearest(0.0);
    let Some(Prepared { x, w, unit }) = prepare(x, w) else {
        let d = F16Le::default();
        return Some(Symmetric { d, scales: [0; 16], q: [zero; 256] });
    };
    let subs = || x.chunks_exact(spec.sub_len).zip(w.chunks_exact(spec.sub_len));
    let mut fitted = [0.0; 16];
    for (scale, (x, w)) in fitted.iter_mut().zip(subs()) {
        *scale = best_scale(x, w, levels);
    }
    // Map the largest scale to the lowest multiple, whatever its sign, since that side has one more.
    let mut d = F16Le::from_f32(unit * fitted[peak_idx(&fitted)] / f32::from(spec.scale_min))?;
    let (mut scales, mut error) = ([0; 16], f64::INFINITY);
    for _ in 0..2 {
        let step = d.to_f32() / unit;
        let inv = inverse(step);
        let (mut next, mut next_error, mut sums) = ([0; 16], 0.0, [0.0; 2]);
        for (s, (x, w)) in subs().enumerate() {
            let centre =
                round_in(fitted[s] * inv, spec.scale_min.into(), (-spec.scale_min - 1).into()) as i16;
            let mut best = (f64::INFINITY, 0, [0.0; 2]);
            for n in centre - 1..=centre + 1 {
                let n = n.clamp(spec.scale_min, -spec.scale_min - 1);
                let scale = step * f32::from(n);
                let [error, xv, vv] = symmetric_sums(x, w, scale, levels);
                if error < best.0 {
                    best = (error, n, [f64::from(n) * xv, f64::from(n) * f64::from(n) * vv]);
                }
            }
            next[s] = best.1;
            next_error += best.0;
            sums = [sums[0] + best.2[0], sums[1] + best.2[1]];
        }
        if next_error >= error {
            break;
        }
        (scales, error) = (next, next_error);
        let better = F16Le::from_f32((sums[0] / sums[1]) as f32 * unit).filter(|_| sums[1] > 0.0);
        match better {
            // Only a fit for all levels: kept if the next round confirms it.
            Some(better) if better != d => {
                let step = better.to_f32() / unit;
                let total: f64 = subs()
                    .enumerate()
                    .map(|(s, (x, w))| symmetric_sums(x, w, step * f32::from(scales[s]), levels)[0])
                    .sum();
                if total >= error {
                    break;
                }
                (d, error) = (better, total);
            }
            _ => break,
        }
    }
    let mut block = Symmetric { d, scales, q: [0; 256] };
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let inv = inverse(d.to_f32() / unit * f32::from(block.scales[s]));
        for (q, &x) in q.iter_mut().zip(x) {
            *q = levels.nearest(x * inv);
        }
    }
    Some(block)
}

/// Fits a block whose sub-blocks have scales and minima; `None` if `d` or `dmin` overflows.
pub(super) fn encode_affine(x: &[f32; 256], w: &[f32; 256], spec: AffineSpec) -> Option<Affine> {
    let Some(Prepared { x, w, unit }) = prepare(x, w) else {
        let zero = F16Le::default();
        return Some(Affine { d: zero, dmin: zero, scales: [0; 16], mins: [0; 16], q: [0; 256] });
    };
    let subs = || x.chunks_exact(spec.sub_len).zip(w.chunks_exact(spec.sub_len));
    let (mut fits, mut fixed) = ([Line::default(); 16], [Fixed::default(); 16]);
    for (s, (x, w)) in subs().enumerate() {
        fixed[s] = Fixed::of(x, w);
        fits[s] = best_line(x, w, &fixed[s], spec.q_max, true);
    }
    let most = |value: fn(&Line) -> f32| fits.iter().map(value).fold(0.0f32, f32::max);
    let d = F16Le::from_f32(unit * most(|fit| fit.scale) / f32::from(spec.scale_max))?;
    let dmin = F16Le::from_f32(unit * most(|fit| -fit.offset) / f32::from(spec.scale_max))?;
    let mut best = affine_multiples(&x, &w, &fits, &fixed, [d, dmin], unit, &spec);
    for _ in 0..2 {
        let Some([d, dmin]) = best.steps.filter(|steps| *steps != best.used) else { break };
        let next = affine_multiples(&x, &w, &fits, &fixed, [d, dmin], unit, &spec);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    let [d, dmin] = best.used;
    let mut block = Affine { d, dmin, scales: best.scales, mins: best.mins, q: [0; 256] };
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let inv = inverse(d.to_f32() / unit * f32::from(block.scales[s]));
        let min = dmin.to_f32() / unit * f32::from(block.mins[s]);
        for (q, &x) in q.iter_mut().zip(x) {
            *q = round_in((x + min) * inv, 0.0, f32::from(spec.q_max)) as u8;
        }
    }
    Some(block)
}

/// Multiples of a block's two scales.
struct Multiples {
    used: [F16Le; 2],
    scales: [u8; 16],
    mins: [u8; 16],
    error: f64,
    /// The least-squares scales for these multiples.
    steps: Option<[F16Le; 2]>,
}

/// Rounds the scales and minima of sub-blocks to multiples of the block's, each to the best near its fit.
fn affine_multiples(
    x: &[f32; 256],
    w: &[f32; 256],
    fits: &[Line; 16],
    fixed: &[Fixed; 16],
    used: [F16Le; 2],
    unit: f32,
    spec: &AffineSpec,
) -> Multiples {
    let [step, min_step] = used.map(|d| d.to_f32() / unit);
    let (inv, min_inv) = (inverse(step), inverse(min_step));
    let most = f32::from(spec.scale_max);
    let mut all = Multiples { used, scales: [0; 16], mins: [0; 16], error: 0.0, steps: None };
    let mut normal = [0.0f64; 5];
    for (s, (x, w)) in x.chunks_exact(spec.sub_len).zip(w.chunks_exact(spec.sub_len)).enumerate() {
        let centre = round_in(fits[s].scale * inv, 0.0, most);
        let fit_min = round_in(-fits[s].offset * min_inv, 0.0, most);
        let mut best = (f64::INFINITY, 0.0, 0.0, Moments::default());
        for n in [centre - 1.0, centre, centre + 1.0] {
            if n < 0.0 || n > most {
                continue;
            }
            let scale = step * n;
            let mut min = fit_min;
            for _ in 0..2 {
                let moments = Moments::of(x, w, inverse(scale), -min * min_step, spec.q_max);
                // The best minimum for these levels.
                let offset = moments.offset(&fixed[s], f64::from(scale));
                let next = round_in((-offset) as f32 * min_inv, 0.0, most);
                let error = moments.error(&fixed[s], scale.into(), (-next * min_step).into());
                if error < best.0 {
                    best = (error, n, next, moments);
                }
                if next == min {
                    break;
                }
                min = next;
            }
        }
        let (error, n, m, moments) = best;
        (all.scales[s], all.mins[s]) = (n as u8, m as u8);
        all.error += error;
        let (n, m) = (f64::from(n), f64::from(m));
        normal[0] += n * n * moments.qq;
        normal[1] += n * m * moments.q;
        normal[2] += m * m * fixed[s].w;
        normal[3] += n * moments.xq;
        normal[4] += m * fixed[s].x;
    }
    all.steps = solve_steps(normal, unit);
    all
}

/// Solves `x = d * n * q - dmin * m` for the steps.
fn solve_steps([nn, nm, mm, nx, mx]: [f64; 5], unit: f32) -> Option<[F16Le; 2]> {
    let det = nn * mm - nm * nm;
    let (d, dmin) = if det > 1e-9 * nn * mm {
        ((nx * mm - nm * mx) / det, (nx * nm - nn * mx) / det)
    } else if nn > 0.0 {
        (nx / nn, 0.0)
    } else {
        return None;
    };
    if d <= 0.0 || dmin < 0.0 {
        return None;
    }
    Some([F16Le::from_f32(d as f32 * unit)?, F16Le::from_f32(dmin as f32 * unit)?])
}

/// Finds a scale, of either sign, for which the nearest levels have a small squared error.
pub(super) fn fit_scale<const N: usize>(x: &[f32; N], w: &[f32; N], levels: &impl Levels) -> f32 {
    prepare(x, w).map_or(0.0, |block| block.unit * best_scale(&block.x, &block.w, levels))
}

/// Finds a scale and an offset for which levels from 0 to `q_max` have a small squared error.
pub(super) fn fit_line<const N: usize>(x: &[f32; N], w: &[f32; N], q_max: u8) -> [f32; 2] {
    prepare(x, w).map_or([0.0; 2], |block| {
        let fixed = Fixed::of(&block.x, &block.w);
        let line = best_line(&block.x, &block.w, &fixed, q_max, false);
        [line.scale * block.unit, line.offset * block.unit]
    })
}

fn best_scale(x: &[f32], w: &[f32], levels: &impl Levels) -> f32 {
    let peak = x[peak_idx(x)];
    let (mut best, mut best_gain) = (0.0, 0.0);
    for extreme in levels.extremes() {
        for cover in COVERS {
            let [sum_xv, sum_vv] = project(x, w, inverse(peak / extreme * cover), levels);
            // Reduction of the sum of x^2 by the best scale for these levels.
            let gain = if sum_vv > 0.0 { sum_xv * sum_xv / sum_vv } else { 0.0 };
            if gain > best_gain {
                (best, best_gain) = ((sum_xv / sum_vv) as f32, gain);
            }
        }
    }
    for _ in 0..MAX_ROUNDS {
        let [sum_xv, sum_vv] = project(x, w, inverse(best), levels);
        let gain = if sum_vv > 0.0 { sum_xv * sum_xv / sum_vv } else { 0.0 };
        if gain <= best_gain {
            break;
        }
        (best, best_gain) = ((sum_xv / sum_vv) as f32, gain);
    }
    best
}

/// A fitted `x = scale * q + offset`.
#[derive(Clone, Copy, Default)]
struct Line {
    scale: f32,
    offset: f32,
}

/// Sums that do not depend on levels.
#[derive(Clone, Copy, Default)]
struct Fixed {
    w: f64,
    x: f64,
    xx: f64,
}

impl Fixed {
    fn of(x: &[f32], w: &[f32]) -> Fixed {
        let [w, x, xx] = sums(x, w, |x, w| [w, w * x, w * x * x]);
        Fixed { w, x, xx }
    }
}

/// Sums over the levels q of a sub-block.
#[derive(Clone, Copy, Default)]
struct Moments {
    q: f64,
    qq: f64,
    xq: f64,
}

impl Moments {
    fn of(x: &[f32], w: &[f32], inv: f32, offset: f32, q_max: u8) -> Moments {
        let most = f32::from(q_max);
        let [q, qq, xq] = sums(x, w, |x, w| {
            let q = round_in((x - offset) * inv, 0.0, most);
            let wq = w * q;
            [wq, wq * q, wq * x]
        });
        Moments { q, qq, xq }
    }

    /// The best offset for a scale.
    fn offset(&self, fixed: &Fixed, scale: f64) -> f64 {
        (fixed.x - scale * self.q) / fixed.w
    }

    fn error(&self, fixed: &Fixed, scale: f64, offset: f64) -> f64 {
        fixed.xx - 2.0 * (scale * self.xq + offset * fixed.x)
            + scale * (scale * self.qq + 2.0 * offset * self.q)
            + offset * offset * fixed.w
    }

    /// The best line for these levels and its error.
    fn line(&self, fixed: &Fixed, is_below_zero: bool) -> Option<(Line, f64)> {
        if self.qq <= 0.0 {
            return None;
        }
        let det = fixed.w * self.qq - self.q * self.q;
        // With all values on one level, any offset fits.
        let is_flat = det <= 1e-12 * fixed.w * self.qq;
        if is_flat && !is_below_zero {
            return None;
        }
        let mut scale = if is_flat { 0.0 } else { (fixed.w * self.xq - fixed.x * self.q) / det };
        let mut offset = self.offset(fixed, scale);
        if is_flat || is_below_zero && offset > 0.0 {
            (scale, offset) = (self.xq / self.qq, 0.0);
        }
        let line = Line { scale: scale as f32, offset: offset as f32 };
        (scale > 0.0).then(|| (line, self.error(fixed, scale, offset)))
    }
}

/// Finds a line with a scale that is not negative; its offset is zero or below if `is_below_zero`.
fn best_line(x: &[f32], w: &[f32], fixed: &Fixed, q_max: u8, is_below_zero: bool) -> Line {
    let (mut low, high) = range(x);
    if is_below_zero && low > 0.0 {
        low = 0.0;
    }
    // Start with the solution for a constant sub-block: a single level at its value.
    let offset = if is_below_zero { (fixed.x / fixed.w).min(0.0) } else { fixed.x / fixed.w };
    let constant = Line { scale: 0.0, offset: offset as f32 };
    let mut best = (constant, Moments::default().error(fixed, 0.0, offset));
    let extent = high - low;
    if extent <= 0.0 {
        return constant;
    }
    let levels = f32::from(q_max);
    for start in 0..AFFINE_STARTS {
        // From one level more than there are to one fewer.
        let spread = levels + 1.0 - 2.0 * start as f32 / (AFFINE_STARTS - 1) as f32;
        if spread < 1.0 {
            continue;
        }
        let moments = Moments::of(x, w, spread / extent, low, q_max);
        match moments.line(fixed, is_below_zero) {
            Some(fit) if fit.1 < best.1 => best = fit,
            _ => {}
        }
    }
    for _ in 0..MAX_ROUNDS {
        let Line { scale, offset } = best.0;
        if scale == 0.0 {
            break;
        }
        match Moments::of(x, w, inverse(scale), offset, q_max).line(fixed, is_below_zero) {
            Some(fit) if fit.1 < best.1 => best = fit,
            _ => break,
        }
    }
    best.0
}

/// Sums of `x v` and `v^2` for the nearest levels v.
fn project(x: &[f32], w: &[f32], inv: f32, levels: &impl Levels) -> [f64; 2] {
    sums(x, w, |x, w| {
        let v = levels.rounded(x * inv);
        let wv = w * v;
        [wv * x, wv * v]
    })
}

/// The squared error, and sums of `x v` and `v^2`, for the nearest levels v.
fn symmetric_sums(x: &[f32], w: &[f32], scale: f32, levels: &impl Levels) -> [f64; 3] {
    let inv = inverse(scale);
    sums(x, w, |x, w| {
        let v = levels.rounded(x * inv);
        let (e, wv) = (x - scale * v, w * v);
        [w * e * e, wv * x, wv * v]
    })
}

/// Adds terms of all values and weights, whose number is a multiple of the lanes.
#[inline(always)]
fn sums<const S: usize>(x: &[f32], w: &[f32], term: impl Fn(f32, f32) -> [f32; S]) -> [f64; S] {
    let mut all = [[0.0f32; LANES]; S];
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            let term = term(x[lane], w[lane]);
            for s in 0..S {
                all[s][lane] += term[s];
            }
        }
    }
    all.map(|lanes| lanes.iter().map(|&sum| f64::from(sum)).sum())
}

/// Clamps and rounds to the nearest integer, ties to even. The limits are integers below 2^22.
#[inline(always)]
pub(super) fn round_in(v: f32, low: f32, high: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves no bits for a fraction. Unlike `round_ties_even`, this needs no SSE4.1.
    const NO_FRACTION: f32 = 12_582_912.0;
    let v = if v > low { v } else { low };
    let v = if v < high { v } else { high };
    (v + NO_FRACTION) - NO_FRACTION
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
