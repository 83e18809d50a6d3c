//! Search for scales and minima with a small weighted squared error, for the encoders.
//!
//! A sub-block is fitted from several starting points: take the nearest levels for a scale, then the least-squares scale
//! (and minimum) for those levels. The best fit is refined by repeating both steps, neither of which can raise the
//! error. The starting points map the extreme values to the extreme levels, slightly beyond or slightly below, since
//! clipping one value often improves the precision of all others. The error of a least-squares fit follows from its
//! sums, so a starting point costs one pass over the values.
//!
//! The fitted scales of a block are then rounded to multiples of its f16 scale. Since rounding changes them, each
//! sub-block also tries the neighbouring multiples. Finally the f16 scales are fitted to the chosen multiples.
//!
//! Values are scaled by a power of two and weights by their largest, so that sums do not overflow. Within a sub-block all
//! arithmetic is f32, in the order in which it is written and without fused operations: vector code that computes one
//! sub-block per lane gets the same bits.

use super::block::{F16Le, Weighing};

/// Parameters of the search, which every implementation of it shares.
pub mod rules {
    /// Fractions of the full range that the starting points of a search for a scale cover.
    pub const COVERS: [f32; 6] = [1.06, 1.0, 0.96, 0.90, 0.83, 0.74];
    /// Starting points of a search for a scale and a minimum.
    pub const AFFINE_STARTS: usize = 8;
    /// Repetitions of both steps from the best starting point.
    pub const MAX_ROUNDS: usize = 1;
    /// Times that the f16 scales of a block are fitted to the chosen multiples.
    pub const MAX_FITS: usize = 2;
    /// Weights below this fraction of the largest are raised to it: a value without weight would be unbounded.
    pub const LEAST_WEIGHT: f32 = 1e-6;
    /// Blocks whose largest magnitude is below this decode to zeros, whatever the scale: half the least f16.
    pub const LEAST_PEAK: f32 = 1e-9;
    /// What an element of size zero weighs, in squares of the root mean square of its block.
    pub const SIZE_FLOOR: f32 = 2.0;
    /// Determinants below this fraction of their first product mean that all values are on one level.
    pub const FLAT: f32 = 1e-5;

    /// Levels that a starting point spreads the values over: from one more than there are to one fewer.
    pub const fn spread(start: usize, q_max: u8) -> f32 {
        q_max as f32 + 1.0 - 2.0 * start as f32 / (AFFINE_STARTS - 1) as f32
    }
}
use rules::{AFFINE_STARTS, COVERS, FLAT, LEAST_PEAK, LEAST_WEIGHT, MAX_FITS, MAX_ROUNDS, SIZE_FLOOR};

/// Largest sub-block.
const MAX_SUB: usize = 32;

/// Levels that a scale multiplies, indexed in ascending order.
pub(super) trait Levels {
    /// Index of the level nearest to `v`.
    fn nearest(&self, v: f32) -> u8;
    /// The level nearest to `v`.
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
#[derive(Clone, Copy, Debug)]
pub struct SymmetricSpec {
    /// Elements of a sub-block.
    pub sub_len: usize,
    /// The lowest multiple that a scale can be.
    pub scale_min: i16,
}

/// A fitted block of `x = d * scale * level(q)`.
#[derive(Clone, Debug)]
pub struct Symmetric {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of each sub-block: `[256 / sub_len]`, others unused.
    pub scales: [i16; 16],
    /// Level indices.
    pub q: [u8; 256],
}

/// The shape of a block type with minima: scales and minima in `0..=scale_max`, levels in `0..=q_max`.
#[derive(Clone, Copy, Debug)]
pub struct AffineSpec {
    /// Elements of a sub-block.
    pub sub_len: usize,
    /// The highest level.
    pub q_max: u8,
    /// The highest multiple that a scale or minimum can be.
    pub scale_max: u8,
}

/// A fitted block of `x = d * scale * q - dmin * min`.
#[derive(Clone, Debug)]
pub struct Affine {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minima.
    pub dmin: F16Le,
    /// Scale of each sub-block: `[256 / sub_len]`, others unused.
    pub scales: [u8; 16],
    /// Minimum of each sub-block: `[256 / sub_len]`, others unused.
    pub mins: [u8; 16],
    /// Levels.
    pub q: [u8; 256],
}

/// A block prepared for the search: values below 4 in magnitude and weights.
pub(super) struct Prepared<const N: usize> {
    pub(super) x: [f32; N],
    pub(super) w: [f32; N],
    pub(super) unit: f32, // a power of two
}

/// Scales a block and weighs its elements. An error of a large element is more often seen in the output than one of a small
/// element, so its weight grows with its size relative to the block.
pub(super) fn prepare<const N: usize>(
    values: &[f32; N],
    weighing: Weighing<'_, N>,
    sub_len: usize,
) -> Prepared<N> {
    let peak = values[peak_idx(values)].abs();
    // Halved so that the reciprocal of the largest power is not subnormal.
    let power = f32::from_bits((peak * 0.5).to_bits() & 0x7f80_0000);
    let (inv, unit) = if peak < LEAST_PEAK { (0.0, 1.0) } else { (1.0 / power, power) };
    let x = values.map(|v| v * inv);
    let mut w = [1.0; N];
    if let Weighing::Flat = weighing {
        return Prepared { x, w, unit };
    }
    let total: f32 = x.chunks_exact(sub_len).map(|sub| sub.iter().fold(0.0, |sum, x| sum + x * x)).sum();
    let per_mean = inverse(total * (1.0 / N as f32));
    for (w, x) in w.iter_mut().zip(&x) {
        *w = (SIZE_FLOOR + x * x * per_mean).sqrt();
    }
    if let Weighing::Importance(importance) = weighing {
        w.iter_mut().zip(importance).for_each(|(w, importance)| *w *= importance);
        let most = w.iter().fold(0.0f32, |most, &w| if w > most { w } else { most });
        let is_usable = most > 0.0 && most < f32::INFINITY;
        w = if is_usable { w.map(|w| above(w / most, LEAST_WEIGHT)) } else { [1.0; N] };
    }
    Prepared { x, w, unit }
}

fn above(v: f32, least: f32) -> f32 {
    if v > least { v } else { least }
}

/// Fits a block whose sub-blocks have only scales; `None` if `d` overflows.
pub(super) fn encode_symmetric(
    values: &[f32; 256],
    weighing: Weighing<'_, 256>,
    levels: &impl Levels,
    spec: SymmetricSpec,
) -> Option<Symmetric> {
    let Prepared { x, w, unit } = prepare(values, weighing, spec.sub_len);
    let subs = || x.chunks_exact(spec.sub_len).zip(w.chunks_exact(spec.sub_len));
    let n_subs = 256 / spec.sub_len;
    let mut fitted = [0.0; 16];
    for (scale, (x, w)) in fitted.iter_mut().zip(subs()) {
        *scale = best_scale(x, w, levels);
    }
    let mut fit = SymmetricFit::new(&fitted[..n_subs], unit, spec)?;
    for _ in 0..MAX_FITS {
        let mut round = [Multiple::default(); 16];
        for (s, (x, w)) in subs().enumerate() {
            round[s] = best_multiple(x, w, fitted[s], fit.step(), levels, spec);
        }
        let Some(better) = fit.take(&round[..n_subs]) else { break };
        // Only a fit for all levels: kept if the levels confirm it.
        let step = better.to_f32() / unit;
        let mut errors = [0.0; 16];
        for (s, (x, w)) in subs().enumerate() {
            errors[s] = symmetric_sums(x, w, step * f32::from(fit.scales[s]), levels)[0];
        }
        if !fit.confirm(better, &errors[..n_subs]) {
            break;
        }
    }
    let (d, scales) = (fit.d, fit.scales);
    let mut block = Symmetric { d, scales, q: [0; 256] };
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let inv = inverse(fit.step() * f32::from(scales[s]));
        for (q, &x) in q.iter_mut().zip(x) {
            *q = levels.nearest(x * inv);
        }
    }
    Some(block)
}

/// The best multiple of a block's scale for a sub-block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Multiple {
    /// The multiple.
    pub n: f32,
    /// The squared error.
    pub error: f32,
    /// Sums of `x v` and `v^2` over the levels v.
    pub sums: [f32; 2],
}

/// The scales of a block while they are fitted. Works with the numbers of all sub-blocks, so that every implementation of
/// the search can share it.
#[derive(Clone, Debug)]
pub struct SymmetricFit {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of each sub-block.
    pub scales: [i16; 16],
    unit: f32,
    error: f64,
}

impl SymmetricFit {
    /// Starts from the scales of all sub-blocks; `None` if they are too large.
    pub fn new(fitted: &[f32], unit: f32, spec: SymmetricSpec) -> Option<SymmetricFit> {
        // The largest scale becomes the lowest multiple, whatever its sign, since that side has one more.
        let d = F16Le::from_f32(unit * fitted[peak_idx(fitted)] / f32::from(spec.scale_min))?;
        Some(SymmetricFit { d, scales: [0; 16], unit, error: f64::INFINITY })
    }

    /// The scale of the scales, for the scaled values.
    pub fn step(&self) -> f32 {
        self.d.to_f32() / self.unit
    }

    /// Takes multiples if they are better. Returns the least-squares scale for them if it differs.
    pub fn take(&mut self, round: &[Multiple]) -> Option<F16Le> {
        let error: f64 = round.iter().map(|m| f64::from(m.error)).sum();
        if error >= self.error {
            return None;
        }
        self.error = error;
        let mut sums = [0.0; 2];
        for (scale, m) in self.scales.iter_mut().zip(round) {
            let n = f64::from(m.n);
            *scale = m.n as i16;
            sums = [sums[0] + n * f64::from(m.sums[0]), sums[1] + n * n * f64::from(m.sums[1])];
        }
        let better = F16Le::from_f32((sums[0] / sums[1]) as f32 * self.unit).filter(|_| sums[1] > 0.0)?;
        (better != self.d).then_some(better)
    }

    /// Takes another scale if the errors of all sub-blocks are smaller with it.
    pub fn confirm(&mut self, better: F16Le, errors: &[f32]) -> bool {
        let error: f64 = errors.iter().map(|&e| f64::from(e)).sum();
        let is_better = error < self.error;
        if is_better {
            (self.d, self.error) = (better, error);
        }
        is_better
    }
}

fn best_multiple(
    x: &[f32],
    w: &[f32],
    fitted: f32,
    step: f32,
    levels: &impl Levels,
    spec: SymmetricSpec,
) -> Multiple {
    let (low, high) = (f32::from(spec.scale_min), f32::from(-spec.scale_min - 1));
    let centre = round_in(fitted * inverse(step), low, high);
    let mut best = Multiple { error: f32::INFINITY, ..Multiple::default() };
    for n in [centre, centre - 1.0, centre + 1.0] {
        let n = if n > low { n } else { low };
        let n = if n < high { n } else { high };
        let [error, xv, vv] = symmetric_sums(x, w, step * n, levels);
        if error < best.error {
            best = Multiple { n, error, sums: [xv, vv] };
        }
    }
    best
}

/// Fits a block whose sub-blocks have scales and minima; `None` if `d` or `dmin` overflows.
pub(super) fn encode_affine(
    values: &[f32; 256],
    weighing: Weighing<'_, 256>,
    spec: AffineSpec,
) -> Option<Affine> {
    let Prepared { x, w, unit } = prepare(values, weighing, spec.sub_len);
    let subs = || x.chunks_exact(spec.sub_len).zip(w.chunks_exact(spec.sub_len));
    let n_subs = 256 / spec.sub_len;
    let mut fits = [Line::default(); 16];
    for (fit, (x, w)) in fits.iter_mut().zip(subs()) {
        *fit = best_line(x, w, spec.q_max, true);
    }
    let mut fit = AffineFit::new(&fits[..n_subs], unit, spec)?;
    for _ in 0..=MAX_FITS {
        let mut round = [LineMultiple::default(); 16];
        for (s, (x, w)) in subs().enumerate() {
            round[s] = best_line_multiple(x, w, fits[s], fit.steps(), spec);
        }
        if !fit.take(&fits[..n_subs], &round[..n_subs]) {
            break;
        }
    }
    let [step, min_step] = fit.best_steps();
    let mut block = fit.block();
    let q = block.q.chunks_exact_mut(spec.sub_len);
    for (s, (x, q)) in x.chunks_exact(spec.sub_len).zip(q).enumerate() {
        let inv = inverse(step * f32::from(block.scales[s]));
        let min = min_step * f32::from(block.mins[s]);
        for (q, &x) in q.iter_mut().zip(x) {
            *q = round_in((x + min) * inv, 0.0, f32::from(spec.q_max)) as u8;
        }
    }
    Some(block)
}

/// The best multiples of a block's two scales for a sub-block.
#[derive(Clone, Copy, Debug, Default)]
pub struct LineMultiple {
    /// Multiple of the scale.
    pub n: f32,
    /// Multiple of the minimum.
    pub m: f32,
    /// The squared error.
    pub error: f32,
    /// Sums over the sub-block, of values without the offset of their fitted line.
    pub fixed: Fixed,
    /// Sums over the levels.
    pub moments: Moments,
}

/// The scales and minima of a block while they are fitted; shared like [`SymmetricFit`].
#[derive(Clone, Debug)]
pub struct AffineFit {
    unit: f32,
    next: [F16Le; 2],
    best: [F16Le; 2],
    scales: [u8; 16],
    mins: [u8; 16],
    error: f64,
}

impl AffineFit {
    /// Starts from the lines of all sub-blocks; `None` if they are too large.
    pub fn new(fits: &[Line], unit: f32, spec: AffineSpec) -> Option<AffineFit> {
        let most = |value: fn(&Line) -> f32| fits.iter().map(value).fold(0.0f32, f32::max);
        let d = F16Le::from_f32(unit * most(|fit| fit.scale) / f32::from(spec.scale_max))?;
        let dmin = F16Le::from_f32(unit * most(|fit| -fit.offset) / f32::from(spec.scale_max))?;
        let error = f64::INFINITY;
        Some(AffineFit { unit, next: [d, dmin], best: [d, dmin], scales: [0; 16], mins: [0; 16], error })
    }

    /// The scales of scales and minima to try, for the scaled values.
    pub fn steps(&self) -> [f32; 2] {
        self.next.map(|d| d.to_f32() / self.unit)
    }

    /// Those of the best multiples so far.
    pub fn best_steps(&self) -> [f32; 2] {
        self.best.map(|d| d.to_f32() / self.unit)
    }

    /// Takes multiples if they are better. Returns whether other scales fit them better, which are then the next to try.
    pub fn take(&mut self, fits: &[Line], round: &[LineMultiple]) -> bool {
        let error: f64 = round.iter().map(|m| f64::from(m.error)).sum();
        if error >= self.error {
            return false;
        }
        (self.error, self.best) = (error, self.next);
        let mut normal = [0.0f64; 5];
        for (s, (fit, multiple)) in fits.iter().zip(round).enumerate() {
            (self.scales[s], self.mins[s]) = (multiple.n as u8, multiple.m as u8);
            let (n, m, base) = (f64::from(multiple.n), f64::from(multiple.m), f64::from(fit.offset));
            let [q, qq, zq] = [multiple.moments.q, multiple.moments.qq, multiple.moments.yq].map(f64::from);
            let [w, z] = [multiple.fixed.w, multiple.fixed.y].map(f64::from);
            normal[0] += n * n * qq;
            normal[1] += n * m * q;
            normal[2] += m * m * w;
            normal[3] += n * (zq + base * q);
            normal[4] += m * (z + base * w);
        }
        let Some(next) = solve_steps(normal, self.unit) else { return false };
        self.next = next;
        self.next != self.best
    }

    /// The best block, without its levels.
    pub fn block(&self) -> Affine {
        let [d, dmin] = self.best;
        Affine { d, dmin, scales: self.scales, mins: self.mins, q: [0; 256] }
    }
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

/// Rounds the scale and minimum of a sub-block to multiples of the block's, to the best near its fit.
fn best_line_multiple(
    x: &[f32],
    w: &[f32],
    fit: Line,
    [step, min_step]: [f32; 2],
    spec: AffineSpec,
) -> LineMultiple {
    let mut z = [0.0; MAX_SUB];
    let z = &mut z[..x.len()];
    z.iter_mut().zip(x).for_each(|(z, x)| *z = x - fit.offset);
    let fixed = Fixed::of(z, w);
    let zz = z.iter().zip(w).fold(0.0, |sum, (z, w)| sum + w * z * z);
    let min_inv = inverse(min_step);
    let most = f32::from(spec.scale_max);
    let centre = round_in(fit.scale * inverse(step), 0.0, most);
    let fit_min = round_in(-fit.offset * min_inv, 0.0, most);
    let mut best = LineMultiple { error: f32::INFINITY, fixed, ..LineMultiple::default() };
    for n in [centre, centre - 1.0, centre + 1.0] {
        let n = above(n, 0.0);
        let n = if n < most { n } else { most };
        let scale = step * n;
        let mut m = fit_min;
        for _ in 0..2 {
            let moments = Moments::of(z, w, inverse(scale), (-m * min_step) - fit.offset, spec.q_max);
            // The best minimum for these levels.
            let offset = (fixed.y - scale * moments.q) / fixed.w;
            m = round_in(-(offset + fit.offset) * min_inv, 0.0, most);
            let offset = (-m * min_step) - fit.offset;
            let error = zz - 2.0 * (scale * moments.yq + offset * fixed.y)
                + scale * (scale * moments.qq + 2.0 * offset * moments.q)
                + offset * offset * fixed.w;
            if error < best.error {
                best = LineMultiple { n, m, error, moments, fixed };
            }
        }
    }
    best
}

/// Finds the scale, of either sign, and the levels with a small squared error. Returns the scale as an f16, `None` if it
/// overflows.
pub(super) fn encode_scale<const N: usize>(
    values: &[f32; N],
    weighing: Weighing<'_, N>,
    levels: &impl Levels,
) -> Option<(F16Le, [u8; N])> {
    let Prepared { x, w, unit } = prepare(values, weighing, N);
    let d = F16Le::from_f32(unit * best_scale(&x, &w, levels))?;
    let inv = inverse(d.to_f32() / unit);
    Some((d, x.map(|x| levels.nearest(x * inv))))
}

/// Finds the scale, the offset and the levels from 0 to `q_max` with a small squared error. Returns scale and offset as
/// f16s, `None` if they overflow.
pub(super) fn encode_line<const N: usize>(
    values: &[f32; N],
    weighing: Weighing<'_, N>,
    q_max: u8,
) -> Option<(F16Le, F16Le, [u8; N])> {
    let Prepared { x, w, unit } = prepare(values, weighing, N);
    let line = best_line(&x, &w, q_max, false);
    let (d, m) = (F16Le::from_f32(line.scale * unit)?, F16Le::from_f32(line.offset * unit)?);
    let (inv, min) = (inverse(d.to_f32() / unit), m.to_f32() / unit);
    Some((d, m, x.map(|x| round_in((x - min) * inv, 0.0, f32::from(q_max)) as u8)))
}

/// Sums of `x v` and `v^2` over levels v, whose least-squares scale is their ratio.
#[derive(Clone, Copy)]
struct Projection {
    xv: f32,
    vv: f32,
}

impl Projection {
    fn of(x: &[f32], w: &[f32], inv: f32, levels: &impl Levels) -> Projection {
        let (mut xv, mut vv) = (0.0, 0.0);
        for (&x, &w) in x.iter().zip(w) {
            let v = levels.rounded(x * inv);
            xv += w * x * v;
            vv += w * v * v;
        }
        Projection { xv, vv }
    }

    /// Reduction of the sum of x^2 by the best scale for these levels; NaN if all of them are zero.
    fn gain(self) -> f32 {
        self.xv * self.xv / self.vv
    }
}

fn best_scale(x: &[f32], w: &[f32], levels: &impl Levels) -> f32 {
    let per_peak = inverse(x[peak_idx(x)]);
    let mut best = Projection { xv: 0.0, vv: 1.0 };
    let mut best_gain = 0.0;
    for extreme in levels.extremes() {
        for cover in COVERS {
            let next = Projection::of(x, w, per_peak * (extreme / cover), levels);
            if next.gain() > best_gain {
                (best, best_gain) = (next, next.gain());
            }
        }
    }
    for _ in 0..MAX_ROUNDS {
        let next = Projection::of(x, w, inverse(best.xv / best.vv), levels);
        if next.gain() > best_gain {
            (best, best_gain) = (next, next.gain());
        } else {
            break;
        }
    }
    best.xv / best.vv
}

/// A fitted `x = scale * q + offset`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    /// Distance of two levels.
    pub scale: f32,
    /// Value of level 0.
    pub offset: f32,
}

/// Sums of weights and weighted values, which do not depend on levels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed {
    /// Weights.
    pub w: f32,
    /// Values.
    pub y: f32,
}

impl Fixed {
    fn of(y: &[f32], w: &[f32]) -> Fixed {
        let mut fixed = Fixed::default();
        for (&y, &w) in y.iter().zip(w) {
            fixed.w += w;
            fixed.y += w * y;
        }
        fixed
    }
}

/// Weighted sums over the levels q of a sub-block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moments {
    /// Levels.
    pub q: f32,
    /// Their squares.
    pub qq: f32,
    /// Their products with the values.
    pub yq: f32,
}

impl Moments {
    fn of(y: &[f32], w: &[f32], inv: f32, offset: f32, q_max: u8) -> Moments {
        let most = f32::from(q_max);
        let mut moments = Moments::default();
        for (&y, &w) in y.iter().zip(w) {
            let q = round_in((y - offset) * inv, 0.0, most);
            moments.q += w * q;
            moments.qq += w * q * q;
            moments.yq += w * y * q;
        }
        moments
    }

    /// The best line for these levels and by how much it reduces the error of the mean. `low` is what the values y were
    /// reduced by; NaN if there is no such line.
    fn line(&self, fixed: &Fixed, low: f32, is_below_zero: bool) -> (Line, f32) {
        let Moments { q, qq, yq } = *self;
        let det = fixed.w * qq - q * q;
        let slope = fixed.w * yq - fixed.y * q;
        let scale = slope / det;
        let line = Line { scale, offset: (fixed.y - scale * q) / fixed.w };
        let is_flat = !(det > FLAT * (fixed.w * qq));
        if !is_flat && !(is_below_zero && low + line.offset > 0.0) {
            return (line, slope * scale / fixed.w);
        }
        if !is_below_zero {
            return (line, f32::NAN);
        }
        // The offset is zero.
        let offset = -low;
        let scale = (yq + low * q) / qq;
        let gain = 2.0 * (scale * yq + offset * fixed.y)
            - scale * (scale * qq + 2.0 * offset * q)
            - offset * offset * fixed.w
            - fixed.y * fixed.y / fixed.w;
        (Line { scale, offset }, gain)
    }
}

/// Finds a line with a scale that is not negative; its offset is zero or below if `is_below_zero`.
fn best_line(x: &[f32], w: &[f32], q_max: u8, is_below_zero: bool) -> Line {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for &x in x {
        low = if x < low { x } else { low };
        high = above(x, high);
    }
    let low = if is_below_zero && low > 0.0 { 0.0 } else { low };
    let mut y = [0.0; MAX_SUB];
    let y = &mut y[..x.len()];
    y.iter_mut().zip(x).for_each(|(y, x)| *y = x - low);
    let fixed = Fixed::of(y, w);
    // Start with the solution for a constant sub-block: a single level at its value.
    let mut best = Line { scale: 0.0, offset: fixed.y / fixed.w };
    let mut best_gain = 0.0;
    if is_below_zero && low + best.offset > 0.0 {
        best.offset = -low;
        best_gain =
            2.0 * best.offset * fixed.y - best.offset * best.offset * fixed.w - fixed.y * fixed.y / fixed.w;
    }
    let per_extent = inverse(high - low);
    for start in 0..AFFINE_STARTS {
        let moments = Moments::of(y, w, rules::spread(start, q_max) * per_extent, 0.0, q_max);
        let (line, gain) = moments.line(&fixed, low, is_below_zero);
        if gain > best_gain && line.scale > 0.0 {
            (best, best_gain) = (line, gain);
        }
    }
    for _ in 0..MAX_ROUNDS {
        let moments = Moments::of(y, w, inverse(best.scale), best.offset, q_max);
        let (line, gain) = moments.line(&fixed, low, is_below_zero);
        if gain > best_gain && line.scale > 0.0 {
            (best, best_gain) = (line, gain);
        } else {
            break;
        }
    }
    Line { scale: best.scale, offset: low + best.offset }
}

/// The squared error, and sums of `x v` and `v^2`, for the nearest levels v.
fn symmetric_sums(x: &[f32], w: &[f32], scale: f32, levels: &impl Levels) -> [f32; 3] {
    let inv = inverse(scale);
    let mut sums = [0.0; 3];
    for (&x, &w) in x.iter().zip(w) {
        let v = levels.rounded(x * inv);
        let e = x - scale * v;
        sums[0] += w * e * e;
        sums[1] += w * x * v;
        sums[2] += w * v * v;
    }
    sums
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
