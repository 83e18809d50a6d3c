//! A group: 16 sub-blocks, one per lane, scaled and weighed.

use super::super::lanes::{GROUP, Simd};
use refrain_tensor::quant::search::rules::{LEAST_PEAK, LEAST_WEIGHT, SIZE_FLOOR};

/// One float for each sub-block.
pub(super) type Lanes = [f32; GROUP];

/// Largest magnitude of a finite float, as bits.
const LARGEST: i32 = 0x7f7f_ffff;

/// Sub-blocks of `N` elements.
#[repr(align(64))]
pub(super) struct Group<const N: usize> {
    pub(super) x: [Lanes; N],
    pub(super) w: [Lanes; N],
    /// Weights times values.
    pub(super) wx: [Lanes; N],
    /// Working space.
    pub(super) y: [Lanes; N],
    /// A power of two, by which values were divided.
    pub(super) unit: Lanes,
    /// Levels: element 4 i + b is byte b of word i.
    pub(super) words: [[u32; GROUP]; 8],
}

/// Loads part `h` of the lanes.
#[inline(always)]
pub(super) fn get<S: Simd>(s: S, lanes: &Lanes, h: usize) -> S::F {
    assert!(h < GROUP / S::LANES);
    // SAFETY: LANES floats from part h on are within the 16 lanes.
    unsafe { s.fload(lanes.as_ptr().add(h * S::LANES)) }
}

/// Stores part `h` of the lanes.
#[inline(always)]
pub(super) fn put<S: Simd>(s: S, lanes: &mut Lanes, h: usize, v: S::F) {
    assert!(h < GROUP / S::LANES);
    // SAFETY: LANES floats from part h on are within the 16 lanes.
    unsafe { s.fstore(lanes.as_mut_ptr().add(h * S::LANES), v) }
}

/// Stores part `h` of words.
#[inline(always)]
pub(super) fn put_words<S: Simd>(s: S, words: &mut [u32; GROUP], h: usize, v: S::I) {
    assert!(h < GROUP / S::LANES);
    // SAFETY: LANES words from part h on are within the 16 words.
    unsafe { s.store(words.as_mut_ptr().add(h * S::LANES).cast(), v) }
}

/// `1 / v`, or 0 where that is not finite.
#[inline(always)]
pub(super) fn inverse<S: Simd>(s: S, v: S::F) -> S::F {
    let inv = s.fdiv(s.fsplat(1.0), v);
    s.pick_less(magnitude(s, inv), s.fsplat(f32::INFINITY), inv, s.fsplat(0.0))
}

#[inline(always)]
pub(super) fn magnitude<S: Simd>(s: S, v: S::F) -> S::F {
    s.as_f(s.and(s.as_i(v), s.splat(0x7fff_ffff)))
}

#[inline(always)]
pub(super) fn negative<S: Simd>(s: S, v: S::F) -> S::F {
    s.as_f(s.xor(s.as_i(v), s.splat(i32::MIN)))
}

/// Rounds to the nearest integer, ties to even, below 2^22.
#[inline(always)]
pub(super) fn round<S: Simd>(s: S, v: S::F) -> S::F {
    const NO_FRACTION: f32 = 12_582_912.0;
    s.fsub(s.fadd(v, s.fsplat(NO_FRACTION)), s.fsplat(NO_FRACTION))
}

/// Clamps and rounds.
#[inline(always)]
pub(super) fn round_in<S: Simd>(s: S, v: S::F, low: S::F, high: S::F) -> S::F {
    round(s, s.fmin(s.fmax(v, low), high))
}

/// Combines the lanes of each block in order.
#[inline(always)]
fn across(lanes: &mut Lanes, n_subs: usize, zero: f32, add: impl Fn(f32, f32) -> f32) {
    if n_subs > 1 {
        for block in lanes.chunks_exact_mut(n_subs) {
            let mut total = zero;
            for &lane in block.iter() {
                total = add(total, lane);
            }
            block.fill(total);
        }
    }
}

impl<const N: usize> Group<N> {
    #[inline(always)]
    pub(super) fn new() -> Group<N> {
        let none = [[0.0; GROUP]; N];
        Group { x: none, w: none, wx: none, y: none, unit: [0.0; GROUP], words: [[0; GROUP]; 8] }
    }

    /// Transposes sub-blocks into lanes.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&mut self, s: S, subs: &[&[f32]; GROUP]) {
        transpose(s, subs, &mut self.x);
    }

    /// Divides each block by a power of two, so that its largest value is below 4; `false` if one is not finite.
    #[inline(always)]
    pub(super) fn scale<S: Simd>(&mut self, s: S, n_subs: usize) -> bool {
        let mut peaks = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            // Bits of magnitudes are in the order of their values, infinities and NaN last.
            let mut peak = s.splat(0);
            for i in 0..N {
                peak = s.max(peak, s.and(s.as_i(get(s, &self.x[i], h)), s.splat(0x7fff_ffff)));
            }
            put(s, &mut peaks, h, s.as_f(peak));
        }
        let mut largest = 0;
        for peak in peaks {
            largest = largest.max(peak.to_bits() as i32);
        }
        if largest > LARGEST {
            return false;
        }
        across(&mut peaks, n_subs, 0.0, |a, b| if b > a { b } else { a });
        for h in 0..GROUP / S::LANES {
            let peak = get(s, &peaks, h);
            let halved = s.as_i(s.fmul(peak, s.fsplat(0.5)));
            let power = s.as_f(s.and(halved, s.splat(0x7f80_0000)));
            let (zero, one, least) = (s.fsplat(0.0), s.fsplat(1.0), s.fsplat(LEAST_PEAK));
            let inv = s.pick_less(peak, least, zero, s.fdiv(one, power));
            put(s, &mut self.unit, h, s.pick_less(peak, least, one, power));
            for i in 0..N {
                let x = s.fmul(get(s, &self.x[i], h), inv);
                put(s, &mut self.x[i], h, x);
            }
        }
        true
    }

    /// Computes weights, from the size of values and their importance.
    #[inline(always)]
    pub(super) fn weigh<S: Simd>(&mut self, s: S, n_subs: usize, importance: Option<&[&[f32]; GROUP]>) {
        let mut sums = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            let mut sum = s.fsplat(0.0);
            for i in 0..N {
                let x = get(s, &self.x[i], h);
                sum = s.fadd(sum, s.fmul(x, x));
            }
            put(s, &mut sums, h, sum);
        }
        across(&mut sums, n_subs, 0.0, |a, b| a + b);
        for h in 0..GROUP / S::LANES {
            let mean = s.fmul(get(s, &sums, h), s.fsplat(1.0 / (N * n_subs) as f32));
            let per_mean = inverse(s, mean);
            for i in 0..N {
                let x = get(s, &self.x[i], h);
                let w = s.fsqrt(s.fadd(s.fsplat(SIZE_FLOOR), s.fmul(s.fmul(x, x), per_mean)));
                put(s, &mut self.w[i], h, w);
                put(s, &mut self.wx[i], h, s.fmul(w, x));
            }
        }
        if let Some(importance) = importance {
            self.weigh_by(s, n_subs, importance);
        }
    }

    #[inline(always)]
    fn weigh_by<S: Simd>(&mut self, s: S, n_subs: usize, importance: &[&[f32]; GROUP]) {
        transpose(s, importance, &mut self.y);
        let mut most = [0.0; GROUP];
        for h in 0..GROUP / S::LANES {
            let mut peak = s.fsplat(0.0);
            for i in 0..N {
                let w = s.fmul(get(s, &self.w[i], h), get(s, &self.y[i], h));
                put(s, &mut self.w[i], h, w);
                peak = s.fmax(w, peak);
            }
            put(s, &mut most, h, peak);
        }
        across(&mut most, n_subs, 0.0, |a, b| if b > a { b } else { a });
        for h in 0..GROUP / S::LANES {
            let most = get(s, &most, h);
            let (zero, one, infinity) = (s.fsplat(0.0), s.fsplat(1.0), s.fsplat(f32::INFINITY));
            for i in 0..N {
                let w = s.fmax(s.fdiv(get(s, &self.w[i], h), most), s.fsplat(LEAST_WEIGHT));
                let w = s.pick_less(zero, most, s.pick_less(most, infinity, w, one), one);
                put(s, &mut self.w[i], h, w);
                put(s, &mut self.wx[i], h, s.fmul(w, get(s, &self.x[i], h)));
            }
        }
    }

    /// Stores four levels as the bytes of a word.
    #[inline(always)]
    pub(super) fn put_levels<S: Simd>(&mut self, s: S, word: usize, h: usize, q: [S::I; 4]) {
        let low = s.or(q[0], s.shl(q[1], 8));
        let high = s.or(s.shl(q[2], 16), s.shl(q[3], 24));
        put_words(s, &mut self.words[word], h, s.or(low, high));
    }

    /// The levels of one sub-block.
    #[inline(always)]
    pub(super) fn levels(&self, lane: usize) -> [u8; N] {
        let mut levels = [0; N];
        for (i, bytes) in levels.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.words[i][lane].to_le_bytes();
        }
        levels
    }

    /// The levels of a block, whose first sub-block is in `lane`.
    #[inline(always)]
    pub(super) fn block_levels(&self, lane: usize) -> [u8; 256] {
        let mut levels = [0; 256];
        for (sub, levels) in levels.as_chunks_mut::<N>().0.iter_mut().enumerate() {
            *levels = self.levels(lane + sub);
        }
        levels
    }
}

#[inline(always)]
fn transpose<S: Simd, const N: usize>(s: S, subs: &[&[f32]; GROUP], to: &mut [Lanes; N]) {
    let mut rows = [std::ptr::null(); GROUP];
    for (row, sub) in rows.iter_mut().zip(subs) {
        *row = sub[..N].as_ptr().cast();
    }
    // SAFETY: each row has N floats, and `to` has space for N columns of 16.
    unsafe { s.transpose(&rows, N, to.as_mut_ptr().cast()) };
}
