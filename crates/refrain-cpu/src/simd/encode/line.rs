//! Types with minima: a line `scale * q + offset` for each sub-block.

use super::super::lanes::{GROUP, Simd};
use super::GroupEncoder;
use super::group::{Group, Lanes, get, inverse, negative, put, round, round_in};
use bytemuck::Pod;
use refrain_tensor::quant::search::rules::{AFFINE_STARTS, FLAT, MAX_FITS, MAX_ROUNDS, spread};
use refrain_tensor::quant::search::{Affine, AffineFit, AffineSpec, Fixed, Line, LineMultiple, Moments};
use refrain_tensor::quant::{BlockQ2K, BlockQ4_1, BlockQ4K, BlockQ5_1, BlockQ5K, F16Le};

/// Sums of weights and weighted values.
#[derive(Clone, Copy)]
struct FixedSums<F> {
    w: F,
    y: F,
}

/// Weighted sums over levels.
#[derive(Clone, Copy)]
struct LevelSums<F> {
    q: F,
    qq: F,
    yq: F,
}

/// A line and by how much it reduces the error.
#[derive(Clone, Copy)]
struct Candidate<F> {
    scale: F,
    offset: F,
    gain: F,
}

impl<F: Copy> Candidate<F> {
    #[inline(always)]
    fn take<S: Simd<F = F>>(&mut self, s: S, next: Candidate<F>) {
        let gain = s.pick_less(s.fsplat(0.0), next.scale, next.gain, s.fsplat(f32::NEG_INFINITY));
        self.scale = s.pick_less(self.gain, gain, next.scale, self.scale);
        self.offset = s.pick_less(self.gain, gain, next.offset, self.offset);
        self.gain = s.pick_less(self.gain, gain, gain, self.gain);
    }
}

/// Stores `x - by` and its products with the weights, and sums them.
#[inline(always)]
fn shift<S: Simd, const N: usize>(s: S, group: &mut Group<N>, h: usize, by: S::F) -> FixedSums<S::F> {
    let mut fixed = FixedSums { w: s.fsplat(0.0), y: s.fsplat(0.0) };
    for i in 0..N {
        let (y, w) = (s.fsub(get(s, &group.x[i], h), by), get(s, &group.w[i], h));
        let wy = s.fmul(w, y);
        fixed.w = s.fadd(fixed.w, w);
        fixed.y = s.fadd(fixed.y, wy);
        put(s, &mut group.y[i], h, y);
        put(s, &mut group.wx[i], h, wy);
    }
    fixed
}

/// Sums over the levels of `K` lines through the origin at once. With `CLAMP`, levels may lie above the highest.
#[inline(always)]
fn start_sums<S: Simd, const N: usize, const K: usize, const CLAMP: bool>(
    s: S,
    group: &Group<N>,
    h: usize,
    inv: [S::F; K],
    most: S::F,
) -> [LevelSums<S::F>; K] {
    let zero = s.fsplat(0.0);
    let mut sums = [LevelSums { q: zero, qq: zero, yq: zero }; K];
    for i in 0..N {
        let (y, w, wy) = (get(s, &group.y[i], h), get(s, &group.w[i], h), get(s, &group.wx[i], h));
        for k in 0..K {
            // y is not negative.
            let v = s.fmul(y, inv[k]);
            let q = round(s, if CLAMP { s.fmin(v, most) } else { v });
            let wq = s.fmul(w, q);
            sums[k].q = s.fadd(sums[k].q, wq);
            sums[k].qq = s.fadd(sums[k].qq, s.fmul(wq, q));
            sums[k].yq = s.fadd(sums[k].yq, s.fmul(wy, q));
        }
    }
    sums
}

/// Sums over the nearest levels of a line.
#[inline(always)]
fn level_sums<S: Simd, const N: usize>(
    s: S,
    group: &Group<N>,
    h: usize,
    inv: S::F,
    offset: S::F,
    most: S::F,
) -> LevelSums<S::F> {
    let zero = s.fsplat(0.0);
    let mut sums = LevelSums { q: zero, qq: zero, yq: zero };
    for i in 0..N {
        let (y, w, wy) = (get(s, &group.y[i], h), get(s, &group.w[i], h), get(s, &group.wx[i], h));
        let q = round_in(s, s.fmul(s.fsub(y, offset), inv), zero, most);
        let wq = s.fmul(w, q);
        sums.q = s.fadd(sums.q, wq);
        sums.qq = s.fadd(sums.qq, s.fmul(wq, q));
        sums.yq = s.fadd(sums.yq, s.fmul(wy, q));
    }
    sums
}

/// The best line for these levels; its gain is not a gain if there is none.
#[inline(always)]
fn line_of<S: Simd, const BELOW: bool>(
    s: S,
    sums: LevelSums<S::F>,
    fixed: FixedSums<S::F>,
    low: S::F,
) -> Candidate<S::F> {
    let LevelSums { q, qq, yq } = sums;
    let wqq = s.fmul(fixed.w, qq);
    let det = s.fsub(wqq, s.fmul(q, q));
    let slope = s.fsub(s.fmul(fixed.w, yq), s.fmul(fixed.y, q));
    let scale = s.fdiv(slope, det);
    let offset = s.fdiv(s.fsub(fixed.y, s.fmul(scale, q)), fixed.w);
    let gain = s.fdiv(s.fmul(slope, scale), fixed.w);
    let flat = s.fmul(s.fsplat(FLAT), wqq);
    if !BELOW {
        let gain = s.pick_less(flat, det, gain, s.fsplat(f32::NEG_INFINITY));
        return Candidate { scale, offset, gain };
    }
    // With an offset of zero.
    let two = s.fsplat(2.0);
    let zero_offset = negative(s, low);
    let zero_scale = s.fdiv(s.fadd(yq, s.fmul(low, q)), qq);
    let linear = s.fmul(two, s.fadd(s.fmul(zero_scale, yq), s.fmul(zero_offset, fixed.y)));
    let cross = s.fmul(s.fmul(two, zero_offset), q);
    let square = s.fmul(zero_scale, s.fadd(s.fmul(zero_scale, qq), cross));
    let zero_gain = s.fsub(s.fsub(linear, square), s.fmul(s.fmul(zero_offset, zero_offset), fixed.w));
    let zero_gain = s.fsub(zero_gain, s.fdiv(s.fmul(fixed.y, fixed.y), fixed.w));
    let (zero, above) = (s.fsplat(0.0), s.fadd(low, offset));
    let pick = |line: S::F, constrained: S::F| {
        s.pick_less(zero, above, constrained, s.pick_less(flat, det, line, constrained))
    };
    Candidate {
        scale: pick(scale, zero_scale),
        offset: pick(offset, zero_offset),
        gain: pick(gain, zero_gain),
    }
}

/// The line of each sub-block, in the lanes of part `h`.
#[inline(always)]
fn best_line<S: Simd, const N: usize, const BELOW: bool>(
    s: S,
    group: &mut Group<N>,
    h: usize,
    q_max: u8,
) -> [S::F; 2] {
    let zero = s.fsplat(0.0);
    let (mut low, mut high) = (s.fsplat(f32::INFINITY), s.fsplat(f32::NEG_INFINITY));
    for i in 0..N {
        let x = get(s, &group.x[i], h);
        low = s.fmin(x, low);
        high = s.fmax(x, high);
    }
    if BELOW {
        low = s.pick_less(zero, low, zero, low);
    }
    let fixed = shift(s, group, h, low);
    let most = s.fsplat(f32::from(q_max));
    let mut best = Candidate { scale: zero, offset: s.fdiv(fixed.y, fixed.w), gain: zero };
    if BELOW {
        let (above, none) = (s.fadd(low, best.offset), negative(s, low));
        let linear = s.fmul(s.fmul(s.fsplat(2.0), none), fixed.y);
        let gain = s.fsub(linear, s.fmul(s.fmul(none, none), fixed.w));
        let gain = s.fsub(gain, s.fdiv(s.fmul(fixed.y, fixed.y), fixed.w));
        best.offset = s.pick_less(zero, above, none, best.offset);
        best.gain = s.pick_less(zero, above, gain, best.gain);
    }
    let per_extent = inverse(s, s.fsub(high, low));
    if S::LANES == GROUP {
        try_starts::<S, N, 4, BELOW>(s, group, h, (fixed, low, per_extent, q_max), &mut best);
    } else {
        try_starts::<S, N, 2, BELOW>(s, group, h, (fixed, low, per_extent, q_max), &mut best);
    }
    // A lane that has stopped improving finds the same line again.
    for _ in 0..MAX_ROUNDS {
        let sums = level_sums(s, group, h, inverse(s, best.scale), best.offset, most);
        best.take(s, line_of::<S, BELOW>(s, sums, fixed, low));
    }
    [best.scale, s.fadd(low, best.offset)]
}

/// Tries all starting points, `K` in one pass: as many as there are registers for.
#[inline(always)]
fn try_starts<S: Simd, const N: usize, const K: usize, const BELOW: bool>(
    s: S,
    group: &Group<N>,
    h: usize,
    (fixed, low, per_extent, q_max): (FixedSums<S::F>, S::F, S::F, u8),
    best: &mut Candidate<S::F>,
) {
    let most = s.fsplat(f32::from(q_max));
    for first in (0..AFFINE_STARTS).step_by(K) {
        let mut inv = [per_extent; K];
        for k in 0..K {
            inv[k] = s.fmul(s.fsplat(spread(first + k, q_max)), per_extent);
        }
        // The largest value rounds to the highest level or below.
        let is_within = spread(first, q_max) < f32::from(q_max) + 0.4;
        let sums = match is_within {
            true => start_sums::<S, N, K, false>(s, group, h, inv, most),
            false => start_sums::<S, N, K, true>(s, group, h, inv, most),
        };
        for k in 0..K {
            best.take(s, line_of::<S, BELOW>(s, sums[k], fixed, low));
        }
    }
}

const _: () = assert!(AFFINE_STARTS.is_multiple_of(4));

/// Writes the nearest levels for these lines of x.
#[inline(always)]
fn put_nearest<S: Simd, const N: usize>(
    s: S,
    group: &mut Group<N>,
    scales: &Lanes,
    offsets: &Lanes,
    q_max: u8,
) {
    let (zero, most) = (s.fsplat(0.0), s.fsplat(f32::from(q_max)));
    for h in 0..GROUP / S::LANES {
        let (inv, offset) = (inverse(s, get(s, scales, h)), get(s, offsets, h));
        for word in 0..N / 4 {
            let mut q = [s.splat(0); 4];
            for b in 0..4 {
                let x = get(s, &group.x[4 * word + b], h);
                q[b] = s.to_i(round_in(s, s.fmul(s.fsub(x, offset), inv), zero, most));
            }
            group.put_levels(s, word, h, q);
        }
    }
}

/// Blocks with one scale and one minimum.
trait LineBlock: Pod {
    const Q_MAX: u8;
    fn pack(d: F16Le, m: F16Le, q: &[u8; 32]) -> Self;
}

#[inline(always)]
fn encode_line<S: Simd, B: LineBlock>(s: S, group: &mut Group<32>, blocks: &mut [B]) -> bool {
    let (mut scales, mut offsets) = ([0.0; GROUP], [0.0; GROUP]);
    for h in 0..GROUP / S::LANES {
        let [scale, offset] = best_line::<S, 32, false>(s, group, h, B::Q_MAX);
        let unit = get(s, &group.unit, h);
        put(s, &mut scales, h, s.fmul(scale, unit));
        put(s, &mut offsets, h, s.fmul(offset, unit));
    }
    let mut rounded = [(F16Le::default(), F16Le::default()); GROUP];
    for lane in 0..GROUP {
        let (Some(d), Some(m)) = (F16Le::from_f32(scales[lane]), F16Le::from_f32(offsets[lane])) else {
            return false;
        };
        rounded[lane] = (d, m);
        scales[lane] = d.to_f32() / group.unit[lane];
        offsets[lane] = m.to_f32() / group.unit[lane];
    }
    put_nearest(s, group, &scales, &offsets, B::Q_MAX);
    for (lane, block) in blocks.iter_mut().enumerate() {
        let (d, m) = rounded[lane];
        *block = B::pack(d, m, &group.levels(lane));
    }
    true
}

/// Blocks of 256 with multiples of a scale and a minimum.
trait AffineBlock: Pod {
    const SPEC: AffineSpec;
    fn pack(fit: &Affine) -> Self;
}

/// What [`best_line_multiple`] finds, for all lanes.
struct Found {
    n: Lanes,
    m: Lanes,
    error: Lanes,
    w: Lanes,
    y: Lanes,
    q: Lanes,
    qq: Lanes,
    yq: Lanes,
}

/// The best multiples of a block's scale and minimum, in the lanes of part `h`.
#[inline(always)]
fn best_line_multiple<S: Simd, const N: usize>(
    s: S,
    group: &mut Group<N>,
    h: usize,
    [fit_scale, fit_offset]: [S::F; 2],
    [step, min_step]: [S::F; 2],
    (found, spec): (&mut Found, AffineSpec),
) {
    let (zero, two) = (s.fsplat(0.0), s.fsplat(2.0));
    let (most, q_max) = (s.fsplat(f32::from(spec.scale_max)), s.fsplat(f32::from(spec.q_max)));
    let fixed = shift(s, group, h, fit_offset);
    let mut zz = zero;
    for i in 0..N {
        zz = s.fadd(zz, s.fmul(get(s, &group.wx[i], h), get(s, &group.y[i], h)));
    }
    let min_inv = inverse(s, min_step);
    let centre = round_in(s, s.fmul(fit_scale, inverse(s, step)), zero, most);
    let fit_min = round_in(s, s.fmul(negative(s, fit_offset), min_inv), zero, most);
    let (mut best_n, mut best_m, mut best_error) = (zero, zero, s.fsplat(f32::INFINITY));
    let mut best = LevelSums { q: zero, qq: zero, yq: zero };
    for by in [0.0, -1.0, 1.0] {
        let n = s.fmin(s.fmax(s.fadd(centre, s.fsplat(by)), zero), most);
        let scale = s.fmul(step, n);
        let inv = inverse(s, scale);
        let mut m = fit_min;
        for _ in 0..2 {
            let offset = s.fsub(s.fmul(negative(s, m), min_step), fit_offset);
            let sums = level_sums(s, group, h, inv, offset, q_max);
            // The best minimum for these levels.
            let offset = s.fdiv(s.fsub(fixed.y, s.fmul(scale, sums.q)), fixed.w);
            m = round_in(s, s.fmul(negative(s, s.fadd(offset, fit_offset)), min_inv), zero, most);
            let offset = s.fsub(s.fmul(negative(s, m), min_step), fit_offset);
            let linear = s.fadd(s.fmul(scale, sums.yq), s.fmul(offset, fixed.y));
            let cross = s.fmul(s.fmul(two, offset), sums.q);
            let square = s.fmul(scale, s.fadd(s.fmul(scale, sums.qq), cross));
            let error = s.fadd(s.fsub(zz, s.fmul(two, linear)), square);
            let error = s.fadd(error, s.fmul(s.fmul(offset, offset), fixed.w));
            best_n = s.pick_less(error, best_error, n, best_n);
            best_m = s.pick_less(error, best_error, m, best_m);
            best.q = s.pick_less(error, best_error, sums.q, best.q);
            best.qq = s.pick_less(error, best_error, sums.qq, best.qq);
            best.yq = s.pick_less(error, best_error, sums.yq, best.yq);
            best_error = s.pick_less(error, best_error, error, best_error);
        }
    }
    put(s, &mut found.n, h, best_n);
    put(s, &mut found.m, h, best_m);
    put(s, &mut found.error, h, best_error);
    put(s, &mut found.w, h, fixed.w);
    put(s, &mut found.y, h, fixed.y);
    put(s, &mut found.q, h, best.q);
    put(s, &mut found.qq, h, best.qq);
    put(s, &mut found.yq, h, best.yq);
}

impl Found {
    #[inline(always)]
    fn new() -> Found {
        let none = [0.0; GROUP];
        Found { n: none, m: none, error: none, w: none, y: none, q: none, qq: none, yq: none }
    }

    #[inline(always)]
    fn at(&self, lane: usize) -> LineMultiple {
        LineMultiple {
            n: self.n[lane],
            m: self.m[lane],
            error: self.error[lane],
            fixed: Fixed { w: self.w[lane], y: self.y[lane] },
            moments: Moments { q: self.q[lane], qq: self.qq[lane], yq: self.yq[lane] },
        }
    }
}

#[inline(always)]
fn encode_affine<S: Simd, B: AffineBlock, const N: usize>(
    s: S,
    group: &mut Group<N>,
    blocks: &mut [B],
) -> bool {
    let n_subs = 256 / N;
    let (mut scales, mut offsets) = ([0.0; GROUP], [0.0; GROUP]);
    for h in 0..GROUP / S::LANES {
        let [scale, offset] = best_line::<S, N, true>(s, group, h, B::SPEC.q_max);
        put(s, &mut scales, h, scale);
        put(s, &mut offsets, h, offset);
    }
    let mut lines = [Line::default(); GROUP];
    for (lane, line) in lines.iter_mut().enumerate() {
        *line = Line { scale: scales[lane], offset: offsets[lane] };
    }
    let mut fits: [Option<AffineFit>; 2] = [None, None];
    for (b, fit) in fits.iter_mut().enumerate().take(GROUP / n_subs) {
        *fit = AffineFit::new(&lines[b * n_subs..][..n_subs], group.unit[b * n_subs], B::SPEC);
        if fit.is_none() {
            return false;
        }
    }
    let mut is_done = [false; 2];
    for _ in 0..=MAX_FITS {
        let (mut step, mut min_step) = ([0.0; GROUP], [0.0; GROUP]);
        for lane in 0..GROUP {
            [step[lane], min_step[lane]] = fits[lane / n_subs].as_ref().map_or([0.0; 2], AffineFit::steps);
        }
        let mut found = Found::new();
        for h in 0..GROUP / S::LANES {
            let line = [get(s, &scales, h), get(s, &offsets, h)];
            let steps = [get(s, &step, h), get(s, &min_step, h)];
            best_line_multiple(s, group, h, line, steps, (&mut found, B::SPEC));
        }
        for (b, fit) in fits.iter_mut().enumerate() {
            let Some(fit) = fit else { continue };
            if is_done[b] {
                continue;
            }
            let mut multiples = [LineMultiple::default(); GROUP];
            for (sub, multiple) in multiples.iter_mut().enumerate().take(n_subs) {
                *multiple = found.at(b * n_subs + sub);
            }
            is_done[b] = !fit.take(&lines[b * n_subs..][..n_subs], &multiples[..n_subs]);
        }
        if is_done[..GROUP / n_subs].iter().all(|&done| done) {
            break;
        }
    }
    for lane in 0..GROUP {
        if let Some(fit) = &fits[lane / n_subs] {
            let ([step, min_step], block) = (fit.best_steps(), fit.block());
            scales[lane] = step * f32::from(block.scales[lane % n_subs]);
            offsets[lane] = -(min_step * f32::from(block.mins[lane % n_subs]));
        }
    }
    put_nearest(s, group, &scales, &offsets, B::SPEC.q_max);
    for (b, (block, fit)) in blocks.iter_mut().zip(&fits).enumerate() {
        if let Some(fit) = fit {
            *block = B::pack(&Affine { q: group.block_levels(b * n_subs), ..fit.block() });
        }
    }
    true
}

macro_rules! line_blocks {
    ($($block:ty: $q_max:literal;)*) => {$(
        impl LineBlock for $block {
            const Q_MAX: u8 = $q_max;

            #[inline(always)]
            fn pack(d: F16Le, m: F16Le, q: &[u8; 32]) -> Self {
                <$block>::pack(d, m, q)
            }
        }

        impl GroupEncoder<32, 1> for $block {
            #[inline(always)]
            fn encode<S: Simd>(s: S, group: &mut Group<32>, blocks: &mut [Self]) -> bool {
                encode_line(s, group, blocks)
            }
        }
    )*};
}

macro_rules! affine_blocks {
    ($($block:ty: $n:literal;)*) => {$(
        impl AffineBlock for $block {
            const SPEC: AffineSpec = <$block>::SPEC;

            #[inline(always)]
            fn pack(fit: &Affine) -> Self {
                <$block>::pack(fit)
            }
        }

        impl GroupEncoder<$n, { 256 / $n }> for $block {
            #[inline(always)]
            fn encode<S: Simd>(s: S, group: &mut Group<$n>, blocks: &mut [Self]) -> bool {
                encode_affine(s, group, blocks)
            }
        }
    )*};
}

line_blocks! {
    BlockQ4_1: 15;
    BlockQ5_1: 31;
}

affine_blocks! {
    BlockQ2K: 16;
    BlockQ4K: 32;
    BlockQ5K: 32;
}
