//! Types without minima: one scale for each sub-block.

use super::super::lanes::{GROUP, Simd};
use super::GroupEncoder;
use super::group::{Group, Lanes, get, inverse, magnitude, put, round_in};
use bytemuck::Pod;
use refrain_tensor::quant::search::rules::{COVERS, MAX_FITS, MAX_ROUNDS};
use refrain_tensor::quant::search::{Multiple, Symmetric, SymmetricFit, SymmetricSpec};
use refrain_tensor::quant::{
    BlockIq4Nl, BlockIq4Xs, BlockQ3K, BlockQ4_0, BlockQ5_0, BlockQ6K, F16Le, IQ4_NL_VALUES,
};

/// Levels that a scale multiplies, as in the simple version.
trait VecLevels {
    const EXTREMES: [f32; 2];
    /// The level nearest to each lane.
    fn rounded<S: Simd>(s: S, v: S::F) -> S::F;
    /// The index of the level nearest to each lane.
    fn nearest<S: Simd>(s: S, v: S::F) -> S::I;
}

/// All integers from `LO` to `HI`.
struct Steps<const LO: i8, const HI: i8>;

impl<const LO: i8, const HI: i8> VecLevels for Steps<LO, HI> {
    const EXTREMES: [f32; 2] = [LO as f32, HI as f32];

    #[inline(always)]
    fn rounded<S: Simd>(s: S, v: S::F) -> S::F {
        round_in(s, v, s.fsplat(f32::from(LO)), s.fsplat(f32::from(HI)))
    }

    #[inline(always)]
    fn nearest<S: Simd>(s: S, v: S::F) -> S::I {
        s.sub(s.to_i(Self::rounded(s, v)), s.splat(LO.into()))
    }
}

/// The levels of IQ4_NL. Bins of width 8 from -128 on have at most one midpoint between levels each, their ends included.
struct Iq4Levels;

const N_BINS: usize = 32;

/// For each bin: the midpoint in it, the index of the level below it, and the levels on both sides.
const IQ4_BINS: [[f32; N_BINS]; 4] = {
    let mut bins = [[0.0; N_BINS]; 4];
    let mut bin = 0;
    while bin < N_BINS {
        // Midpoints are whole or half: all in halves.
        let (low, high) = (16 * bin as i32 - 256, 16 * bin as i32 - 240);
        let mut q = 0;
        while q < 15 && (IQ4_NL_VALUES[q] as i32 + IQ4_NL_VALUES[q + 1] as i32) < low {
            q += 1;
        }
        let above = if q < 15 { q + 1 } else { q };
        let middle = IQ4_NL_VALUES[q] as i32 + IQ4_NL_VALUES[above] as i32;
        let has_middle = q < 15 && middle <= high;
        bins[0][bin] = if has_middle { middle as f32 / 2.0 } else { f32::INFINITY };
        bins[1][bin] = q as f32;
        bins[2][bin] = IQ4_NL_VALUES[q] as f32;
        bins[3][bin] = IQ4_NL_VALUES[above] as f32;
        bin += 1;
    }
    bins
};

/// The bin of each lane. Next to the end of a bin, it may be the neighbour, which has the same levels there.
#[inline(always)]
fn iq4_bin<S: Simd>(s: S, v: S::F) -> S::I {
    let bin = s.fadd(s.fmul(v, s.fsplat(0.125)), s.fsplat(15.5));
    s.to_i(s.fmin(s.fmax(bin, s.fsplat(0.0)), s.fsplat(31.0)))
}

impl VecLevels for Iq4Levels {
    const EXTREMES: [f32; 2] = [IQ4_NL_VALUES[0] as f32, IQ4_NL_VALUES[15] as f32];

    #[inline(always)]
    fn rounded<S: Simd>(s: S, v: S::F) -> S::F {
        let bin = iq4_bin(s, v);
        let (below, above) = (s.lookup32(&IQ4_BINS[2], bin), s.lookup32(&IQ4_BINS[3], bin));
        s.pick_less(s.lookup32(&IQ4_BINS[0], bin), v, above, below)
    }

    #[inline(always)]
    fn nearest<S: Simd>(s: S, v: S::F) -> S::I {
        let bin = iq4_bin(s, v);
        let below = s.lookup32(&IQ4_BINS[1], bin);
        let above = s.fadd(below, s.fsplat(1.0));
        s.to_i(s.pick_less(s.lookup32(&IQ4_BINS[0], bin), v, above, below))
    }
}

/// A best candidate so far, of all lanes of a part.
#[derive(Clone, Copy)]
struct Best<F> {
    xv: F,
    vv: F,
    gain: F,
}

impl<F: Copy> Best<F> {
    #[inline(always)]
    fn take<S: Simd<F = F>>(&mut self, s: S, xv: F, vv: F) {
        let gain = s.fdiv(s.fmul(xv, xv), vv);
        self.xv = s.pick_less(self.gain, gain, xv, self.xv);
        self.vv = s.pick_less(self.gain, gain, vv, self.vv);
        self.gain = s.pick_less(self.gain, gain, gain, self.gain);
    }
}

/// Sums of `x v` and `v^2` for `K` scales at once.
#[inline(always)]
fn project<S: Simd, L: VecLevels, const N: usize, const K: usize>(
    s: S,
    group: &Group<N>,
    h: usize,
    inv: [S::F; K],
) -> ([S::F; K], [S::F; K]) {
    let (mut xv, mut vv) = ([s.fsplat(0.0); K], [s.fsplat(0.0); K]);
    for i in 0..N {
        let (x, w, wx) = (get(s, &group.x[i], h), get(s, &group.w[i], h), get(s, &group.wx[i], h));
        for k in 0..K {
            let v = L::rounded(s, s.fmul(x, inv[k]));
            xv[k] = s.fadd(xv[k], s.fmul(wx, v));
            vv[k] = s.fadd(vv[k], s.fmul(s.fmul(w, v), v));
        }
    }
    (xv, vv)
}

/// The scale of each sub-block, in the lanes of part `h`.
#[inline(always)]
fn best_scale<S: Simd, L: VecLevels, const N: usize>(s: S, group: &Group<N>, h: usize) -> S::F {
    /// Starting points of one pass: as many as hide the latency of sums.
    const AT_ONCE: usize = 3;
    let mut peak = get(s, &group.x[0], h);
    for i in 1..N {
        let x = get(s, &group.x[i], h);
        peak = s.pick_less(magnitude(s, peak), magnitude(s, x), x, peak);
    }
    let per_peak = inverse(s, peak);
    let mut best = Best { xv: s.fsplat(0.0), vv: s.fsplat(1.0), gain: s.fsplat(0.0) };
    for extreme in L::EXTREMES {
        for covers in COVERS.as_chunks::<AT_ONCE>().0 {
            let mut inv = [per_peak; AT_ONCE];
            for k in 0..AT_ONCE {
                inv[k] = s.fmul(per_peak, s.fsplat(extreme / covers[k]));
            }
            let (xv, vv) = project::<S, L, N, AT_ONCE>(s, group, h, inv);
            for k in 0..AT_ONCE {
                best.take(s, xv[k], vv[k]);
            }
        }
    }
    // A lane that has stopped improving finds the same sums again.
    for _ in 0..MAX_ROUNDS {
        let inv = inverse(s, s.fdiv(best.xv, best.vv));
        let ([xv], [vv]) = project::<S, L, N, 1>(s, group, h, [inv]);
        best.take(s, xv, vv);
    }
    s.fdiv(best.xv, best.vv)
}

const _: () = assert!(COVERS.len().is_multiple_of(3));

/// Writes the nearest levels for these scales.
#[inline(always)]
fn put_nearest<S: Simd, L: VecLevels, const N: usize>(s: S, group: &mut Group<N>, scales: &Lanes) {
    for h in 0..GROUP / S::LANES {
        let inv = inverse(s, get(s, scales, h));
        for word in 0..N / 4 {
            let mut q = [s.splat(0); 4];
            for b in 0..4 {
                q[b] = L::nearest(s, s.fmul(get(s, &group.x[4 * word + b], h), inv));
            }
            group.put_levels(s, word, h, q);
        }
    }
}

/// Blocks with one scale.
trait ScaleBlock: Pod {
    type Levels: VecLevels;
    fn pack(d: F16Le, q: &[u8; 32]) -> Self;
}

#[inline(always)]
fn encode_scale<S: Simd, B: ScaleBlock>(s: S, group: &mut Group<32>, blocks: &mut [B]) -> bool {
    let mut scales = [0.0; GROUP];
    for h in 0..GROUP / S::LANES {
        let scale = best_scale::<S, B::Levels, 32>(s, group, h);
        put(s, &mut scales, h, s.fmul(get(s, &group.unit, h), scale));
    }
    let mut d = [F16Le::default(); GROUP];
    for lane in 0..GROUP {
        let Some(rounded) = F16Le::from_f32(scales[lane]) else { return false };
        d[lane] = rounded;
        scales[lane] = rounded.to_f32() / group.unit[lane];
    }
    put_nearest::<S, B::Levels, 32>(s, group, &scales);
    for (lane, block) in blocks.iter_mut().enumerate() {
        *block = B::pack(d[lane], &group.levels(lane));
    }
    true
}

/// Blocks of 256 with multiples of one scale.
trait SymmetricBlock: Pod {
    type Levels: VecLevels;
    const SPEC: SymmetricSpec;
    fn pack(fit: &Symmetric) -> Self;
}

/// The best multiples of a block's scale, in the lanes of part `h`.
#[inline(always)]
fn best_multiple<S: Simd, L: VecLevels, const N: usize>(
    s: S,
    group: &Group<N>,
    h: usize,
    fitted: S::F,
    step: S::F,
    spec: SymmetricSpec,
) -> [S::F; 4] {
    let (low, high) = (s.fsplat(f32::from(spec.scale_min)), s.fsplat(f32::from(-spec.scale_min - 1)));
    let centre = round_in(s, s.fmul(fitted, inverse(s, step)), low, high);
    let zero = s.fsplat(0.0);
    let (mut best, mut best_sums) = ([zero, s.fsplat(f32::INFINITY)], [zero; 2]);
    for by in [0.0, -1.0, 1.0] {
        let n = s.fmin(s.fmax(s.fadd(centre, s.fsplat(by)), low), high);
        let [error, xv, vv] = symmetric_sums::<S, L, N>(s, group, h, s.fmul(step, n));
        let old = best[1];
        best[0] = s.pick_less(error, old, n, best[0]);
        best_sums[0] = s.pick_less(error, old, xv, best_sums[0]);
        best_sums[1] = s.pick_less(error, old, vv, best_sums[1]);
        best[1] = s.pick_less(error, old, error, old);
    }
    [best[0], best[1], best_sums[0], best_sums[1]]
}

/// The squared error, and sums of `x v` and `v^2`, for the nearest levels v.
#[inline(always)]
fn symmetric_sums<S: Simd, L: VecLevels, const N: usize>(
    s: S,
    group: &Group<N>,
    h: usize,
    scale: S::F,
) -> [S::F; 3] {
    let inv = inverse(s, scale);
    let mut sums = [s.fsplat(0.0); 3];
    for i in 0..N {
        let (x, w, wx) = (get(s, &group.x[i], h), get(s, &group.w[i], h), get(s, &group.wx[i], h));
        let v = L::rounded(s, s.fmul(x, inv));
        let e = s.fsub(x, s.fmul(scale, v));
        sums[0] = s.fadd(sums[0], s.fmul(s.fmul(w, e), e));
        sums[1] = s.fadd(sums[1], s.fmul(wx, v));
        sums[2] = s.fadd(sums[2], s.fmul(s.fmul(w, v), v));
    }
    sums
}

#[inline(always)]
fn encode_symmetric<S: Simd, B: SymmetricBlock, const N: usize>(
    s: S,
    group: &mut Group<N>,
    blocks: &mut [B],
) -> bool {
    let n_subs = 256 / N;
    let mut fitted = [0.0; GROUP];
    for h in 0..GROUP / S::LANES {
        put(s, &mut fitted, h, best_scale::<S, B::Levels, N>(s, group, h));
    }
    let mut fits: [Option<SymmetricFit>; 2] = [None, None];
    for (b, fit) in fits.iter_mut().enumerate().take(GROUP / n_subs) {
        *fit = SymmetricFit::new(&fitted[b * n_subs..][..n_subs], group.unit[b * n_subs], B::SPEC);
        if fit.is_none() {
            return false;
        }
    }
    let mut is_done = [false; 2];
    for _ in 0..MAX_FITS {
        let mut step = [0.0; GROUP];
        for (lane, step) in step.iter_mut().enumerate() {
            *step = fits[lane / n_subs].as_ref().map_or(0.0, SymmetricFit::step);
        }
        let mut round = [[0.0; GROUP]; 4];
        for h in 0..GROUP / S::LANES {
            let (fitted, step) = (get(s, &fitted, h), get(s, &step, h));
            let best = best_multiple::<S, B::Levels, N>(s, group, h, fitted, step, B::SPEC);
            for k in 0..4 {
                put(s, &mut round[k], h, best[k]);
            }
        }
        let mut better = [None; 2];
        let mut scales = [0.0; GROUP];
        for (b, fit) in fits.iter_mut().enumerate() {
            let Some(fit) = fit else { continue };
            if is_done[b] {
                continue;
            }
            let mut multiples = [Multiple::default(); GROUP];
            for (sub, multiple) in multiples.iter_mut().enumerate().take(n_subs) {
                let lane = b * n_subs + sub;
                let sums = [round[2][lane], round[3][lane]];
                *multiple = Multiple { n: round[0][lane], error: round[1][lane], sums };
            }
            better[b] = fit.take(&multiples[..n_subs]);
            is_done[b] = better[b].is_none();
            if let Some(better) = better[b] {
                let step = better.to_f32() / group.unit[b * n_subs];
                for sub in 0..n_subs {
                    scales[b * n_subs + sub] = step * f32::from(fit.scales[sub]);
                }
            }
        }
        if better == [None; 2] {
            break;
        }
        let mut errors = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            let scale = get(s, &scales, h);
            put(s, &mut errors, h, symmetric_sums::<S, B::Levels, N>(s, group, h, scale)[0]);
        }
        for (b, fit) in fits.iter_mut().enumerate() {
            if let (Some(fit), Some(better)) = (fit, better[b]) {
                is_done[b] = !fit.confirm(better, &errors[b * n_subs..][..n_subs]);
            }
        }
    }
    let mut scales = [0.0; GROUP];
    for (lane, scale) in scales.iter_mut().enumerate() {
        let fit = fits[lane / n_subs].as_ref();
        *scale = fit.map_or(0.0, |fit| fit.step() * f32::from(fit.scales[lane % n_subs]));
    }
    put_nearest::<S, B::Levels, N>(s, group, &scales);
    for (b, (block, fit)) in blocks.iter_mut().zip(&fits).enumerate() {
        if let Some(fit) = fit {
            let q = group.block_levels(b * n_subs);
            *block = B::pack(&Symmetric { d: fit.d, scales: fit.scales, q });
        }
    }
    true
}

macro_rules! scale_blocks {
    ($($block:ty: $levels:ty;)*) => {$(
        impl ScaleBlock for $block {
            type Levels = $levels;

            #[inline(always)]
            fn pack(d: F16Le, q: &[u8; 32]) -> Self {
                <$block>::pack(d, q)
            }
        }

        impl GroupEncoder<32, 1> for $block {
            #[inline(always)]
            fn encode<S: Simd>(s: S, group: &mut Group<32>, blocks: &mut [Self]) -> bool {
                encode_scale(s, group, blocks)
            }
        }
    )*};
}

macro_rules! symmetric_blocks {
    ($($block:ty: $levels:ty, $n:literal;)*) => {$(
        impl SymmetricBlock for $block {
            type Levels = $levels;
            const SPEC: SymmetricSpec = <$block>::SPEC;

            #[inline(always)]
            fn pack(fit: &Symmetric) -> Self {
                <$block>::pack(fit)
            }
        }

        impl GroupEncoder<$n, { 256 / $n }> for $block {
            #[inline(always)]
            fn encode<S: Simd>(s: S, group: &mut Group<$n>, blocks: &mut [Self]) -> bool {
                encode_symmetric(s, group, blocks)
            }
        }
    )*};
}

scale_blocks! {
    BlockQ4_0: Steps<-8, 7>;
    BlockQ5_0: Steps<-16, 15>;
    BlockIq4Nl: Iq4Levels;
}

symmetric_blocks! {
    BlockQ3K: Steps<-4, 3>, 16;
    BlockQ6K: Steps<-32, 31>, 16;
    BlockIq4Xs: Iq4Levels, 32;
}
