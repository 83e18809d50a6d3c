//! Attention over a KV cache, one block of keys at a time, with an online softmax.
//!
//! The keys that a query attends to are processed in chunks of [`KEY_CHUNK`], aligned to the first key of the
//! block. Each chunk rescales the accumulators by `e^(old max - new max)` and adds its contribution. The result
//! for a query depends on its own keys and on the chunk boundaries, not on other queries: if blocks begin at
//! multiples of [`KEY_CHUNK`], a token gets the same bits alone as in a batch.

use std::ops::Range;

use half::{bf16, f16};

use super::Level;
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// Keys per rescaling.
pub const KEY_CHUNK: usize = 32;

/// Cached rows of keys or values.
#[derive(Clone, Copy)]
pub enum KvRows<'a> {
    /// Half floats.
    F16(&'a [f16]),
    /// Bfloat16.
    Bf16(&'a [bf16]),
    /// Single-precision floats.
    F32(&'a [f32]),
}

impl KvRows<'_> {
    fn len(&self) -> usize {
        match self {
            KvRows::F16(rows) => rows.len(),
            KvRows::Bf16(rows) => rows.len(),
            KvRows::F32(rows) => rows.len(),
        }
    }
}

/// Keys and values of consecutive positions for one KV head.
#[derive(Clone, Copy)]
pub struct KvBlock<'a> {
    /// Row `i` is the `head_dim` elements from `i * stride`.
    pub keys: KvRows<'a>,
    /// Same layout as `keys`.
    pub values: KvRows<'a>,
    /// Elements between rows.
    pub stride: usize,
    /// Number of rows.
    pub n_keys: usize,
}

/// How scores are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Factor on `q · k`.
    pub scale: f32,
    /// `c` of the soft cap `c tanh(score / c)`.
    pub softcap: Option<f32>,
}

/// Accumulators of the online softmax for `n_q` queries.
pub struct AttendState<'a> {
    /// `[n_q]`, largest score so far.
    pub max: &'a mut [f32],
    /// `[n_q]`, sum of the weights.
    pub sum: &'a mut [f32],
    /// `[n_q, head_dim]`, weighted sum of the values.
    pub acc: &'a mut [f32],
}

impl AttendState<'_> {
    /// Resets the accumulators.
    pub fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Normalises the accumulated sums in place; a query without keys gets zeros.
    pub fn finish(&mut self, level: Level) {
        let head_dim = self.acc.len() / self.sum.len().max(1);
        for (acc, &sum) in self.acc.chunks_exact_mut(head_dim.max(1)).zip(self.sum.iter()) {
            let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
            super::elementwise::scale_inplace(level, acc, factor);
        }
    }
}

/// Adds a block of keys to the accumulators of `n_q` queries that share a KV head.
///
/// `q` is `[n_q, head_dim]`; query `i` attends to keys `visible[i]` of the block. Only those are read.
///
/// # Panics
/// If sizes do not match or a visible range exceeds the block.
pub fn attend_block(
    level: Level,
    scores: Scores,
    q: &[f32],
    head_dim: usize,
    kv: &KvBlock<'_>,
    visible: &[Range<usize>],
    state: &mut AttendState<'_>,
) {
    let n_q = visible.len();
    assert!(head_dim > 0 && q.len() == n_q * head_dim, "{n_q} queries of {head_dim} in {} floats", q.len());
    assert!(
        state.max.len() == n_q && state.sum.len() == n_q && state.acc.len() == q.len(),
        "state for {n_q} queries"
    );
    let need = if kv.n_keys == 0 { 0 } else { (kv.n_keys - 1) * kv.stride + head_dim };
    assert!(
        kv.keys.len() >= need && kv.values.len() >= need,
        "{} keys of {head_dim} need {need} elements",
        kv.n_keys
    );
    assert!(
        visible.iter().all(|v| v.end <= kv.n_keys),
        "a visible range exceeds the block of {} keys",
        kv.n_keys
    );
    let begin = visible.iter().filter(|v| !v.is_empty()).map(|v| v.start).min();
    let end = visible.iter().map(|v| v.end).max();
    let (Some(begin), Some(end)) = (begin, end) else { return };
    for chunk_start in (begin / KEY_CHUNK * KEY_CHUNK..end).step_by(KEY_CHUNK) {
        let chunk = chunk_start..end.min(chunk_start + KEY_CHUNK);
        let mut first = 0;
        while first < n_q {
            let n = if n_q - first >= 4 { 4 } else { 1 };
            let (q, seen) = (&q[first * head_dim..][..n * head_dim], &visible[first..first + n]);
            let state = AttendState {
                max: &mut state.max[first..first + n],
                sum: &mut state.sum[first..first + n],
                acc: &mut state.acc[first * head_dim..][..n * head_dim],
            };
            let chunk = chunk.clone();
            if n == 4 {
                level.dispatch(AttendChunk::<4> { scores, q, head_dim, kv, chunk, visible: seen, state });
            } else {
                level.dispatch(AttendChunk::<1> { scores, q, head_dim, kv, chunk, visible: seen, state });
            }
            first += n;
        }
    }
}

/// `Q` queries and at most [`KEY_CHUNK`] keys. `attend_block` has checked all sizes.
struct AttendChunk<'a, const Q: usize> {
    scores: Scores,
    q: &'a [f32],
    head_dim: usize,
    kv: &'a KvBlock<'a>,
    chunk: Range<usize>,
    visible: &'a [Range<usize>],
    state: AttendState<'a>,
}

impl<const Q: usize> SimdKernel for AttendChunk<'_, Q> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AttendChunk { scores, q, head_dim, kv, chunk, visible, state } = self;
        let mut weights = [[f32::NEG_INFINITY; KEY_CHUNK]; Q];
        // Union of the keys that any query attends to; each query's own range is a subset.
        let seen = |r: usize| visible[r].start.max(chunk.start)..visible[r].end.min(chunk.end);
        let mut keys = chunk.end..chunk.end;
        for r in 0..Q {
            let seen = seen(r);
            if !seen.is_empty() {
                let end = if keys.is_empty() { seen.end } else { keys.end.max(seen.end) };
                keys = keys.start.min(seen.start)..end;
            }
        }
        if keys.is_empty() {
            return;
        }
        let mut partial = [[[0f32; GROUP]; GROUP]; Q];
        for first in (chunk.start..keys.end).step_by(GROUP) {
            let group = keys.start.max(first)..keys.end.min(first + GROUP);
            for key in group {
                let at = key * kv.stride;
                match kv.keys {
                    KvRows::F16(rows) => {
                        let row = rows.as_ptr().wrapping_add(at).cast();
                        key_products::<S, HalfRow, Q>(s, q, head_dim, row, key - first, &mut partial);
                    }
                    KvRows::Bf16(rows) => {
                        let row = rows.as_ptr().wrapping_add(at).cast();
                        key_products::<S, Bf16Row, Q>(s, q, head_dim, row, key - first, &mut partial);
                    }
                    KvRows::F32(rows) => {
                        let row = rows.as_ptr().wrapping_add(at).cast();
                        key_products::<S, FloatRow, Q>(s, q, head_dim, row, key - first, &mut partial);
                    }
                }
            }
            for r in 0..Q {
                let dots = s.sum16x16(&partial[r]);
                let weights = &mut weights[r][first - chunk.start..][..GROUP];
                let seen = seen(r);
                for (i, (weight, dot)) in weights.iter_mut().zip(dots).enumerate() {
                    // Elements outside the range are stale.
                    if seen.start <= first + i && first + i < seen.end {
                        *weight = score(dot, scores);
                    }
                }
            }
        }
        let mut factors = [1f32; Q];
        for r in 0..Q {
            if !seen(r).is_empty() {
                let (factor, sum) = soften(s, &mut weights[r], state.max[r]);
                state.max[r] = factor.1;
                state.sum[r] = state.sum[r].mul_add(factor.0, sum);
                factors[r] = factor.0;
            } else {
                weights[r] = [0.0; KEY_CHUNK];
            }
        }
        let all_seen = (0..Q).all(|r| seen(r) == keys);
        if all_seen {
            gather::<S, Q>(s, &weights, &factors, keys, chunk.start, kv, head_dim, state.acc);
        } else {
            for r in 0..Q {
                let acc = &mut state.acc[r * head_dim..][..head_dim];
                gather::<S, 1>(s, &[weights[r]], &[factors[r]], seen(r), chunk.start, kv, head_dim, acc);
            }
        }
    }
}

#[inline(always)]
fn score(dot: f32, scores: Scores) -> f32 {
    let score = dot * scores.scale;
    match scores.softcap {
        Some(cap) => cap * (score / cap).tanh(),
        None => score,
    }
}

/// Turns scores into weights. Returns the factor for the previous accumulators with the new maximum, and the
/// sum of the weights.
#[inline(always)]
fn soften<S: Simd>(s: S, weights: &mut [f32; KEY_CHUNK], old_max: f32) -> ((f32, f32), f32) {
    let max = weights.iter().fold(old_max, |a, &b| if b > a { b } else { a });
    let mut sums = [s.fsplat(0.0); 4];
    for at in (0..KEY_CHUNK).step_by(GROUP) {
        for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
            // SAFETY: KEY_CHUNK is a multiple of 16, and `g` runs over the registers of sixteen floats.
            unsafe {
                let p = weights.as_mut_ptr().add(at + g * S::LANES);
                let w = math::exp(s, s.fsub(s.fload(p), s.fsplat(max)));
                s.fstore(p, w);
                *sum = s.fadd(*sum, w);
            }
        }
    }
    let mut factor = [0f32; GROUP];
    // SAFETY: a register is at most 16 floats.
    unsafe { s.fstore(factor.as_mut_ptr(), math::exp(s, s.fsplat(old_max - max))) };
    ((factor[0], max), s.sum16(sums))
}

/// Element type of a cache row.
pub(super) trait CacheRow {
    const BYTES: usize;
    /// # Safety
    /// `LANES` elements are readable at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F;
    /// # Safety
    /// One element is readable at `p`.
    unsafe fn one(p: *const u8) -> f32;
}

pub(super) struct HalfRow;

impl CacheRow for HalfRow {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: readable by the contract of this function.
        unsafe { s.load_f16(p) }
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: readable by the contract of this function.
        unsafe { p.cast::<f16>().read_unaligned() }.to_f32()
    }
}

pub(super) struct Bf16Row;

impl CacheRow for Bf16Row {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: readable by the contract of this function.
        unsafe { s.load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: readable by the contract of this function.
        unsafe { p.cast::<bf16>().read_unaligned() }.to_f32()
    }
}

pub(super) struct FloatRow;

impl CacheRow for FloatRow {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: readable by the contract of this function.
        unsafe { s.fload(p.cast()) }
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: readable by the contract of this function.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
}

/// Register `g` of 16 elements starting at `at` in a row of `head_dim`, zero-padded at the end.
#[inline(always)]
pub(super) fn row16<S: Simd, R: CacheRow>(
    s: S,
    row: *const u8,
    at: usize,
    g: usize,
    head_dim: usize,
) -> S::F {
    let begin = at + g * S::LANES;
    if begin + S::LANES <= head_dim {
        // SAFETY: `row` is a row of `head_dim` elements, checked in `attend_block`.
        return unsafe { R::load(s, row.add(R::BYTES * begin)) };
    }
    let mut padded = [0u8; 4 * GROUP];
    if begin < head_dim {
        // SAFETY: the elements from `begin` to the end of the row; fewer than LANES, so they fit.
        unsafe {
            let n_bytes = R::BYTES * (head_dim - begin);
            std::ptr::copy_nonoverlapping(row.add(R::BYTES * begin), padded.as_mut_ptr(), n_bytes);
        }
    }
    // SAFETY: a register is at most 64 bytes.
    unsafe { R::load(s, padded.as_ptr()) }
}

/// The 16 partial sums of one key with each of `Q` queries, stored in row `slot` of each query's part.
#[inline(always)]
fn key_products<S: Simd, R: CacheRow, const Q: usize>(
    s: S,
    q: &[f32],
    head_dim: usize,
    row: *const u8,
    slot: usize,
    partial: &mut [[[f32; GROUP]; GROUP]; Q],
) {
    for g in 0..GROUP / S::LANES {
        let mut sums = [s.fsplat(0.0); Q];
        let whole = head_dim / GROUP * GROUP;
        for at in (0..whole).step_by(GROUP) {
            let begin = at + g * S::LANES;
            // SAFETY: `begin + LANES <= head_dim`, `row` is a row of that length and `q` holds `Q` of them, as
            // `attend_block` has checked.
            unsafe {
                let key = R::load(s, row.add(R::BYTES * begin));
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = s.fma(s.fload(q.as_ptr().add(r * head_dim + begin)), key, *sum);
                }
            }
        }
        if whole < head_dim {
            let key = row16::<S, R>(s, row, whole, g, head_dim);
            for (r, sum) in sums.iter_mut().enumerate() {
                let q = &q[r * head_dim..][..head_dim];
                *sum = s.fma(super::elementwise::load16::<S, 0>(s, q, whole, g), key, *sum);
            }
        }
        for (partial, sum) in partial.iter_mut().zip(sums) {
            // SAFETY: register `g` of sixteen floats.
            unsafe { s.fstore(partial[slot].as_mut_ptr().add(g * S::LANES), sum) };
        }
    }
}

/// `acc = acc * factor + Σ weight · value` over `keys`, for `Q` queries.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the inner loop of a kernel, called in two places")]
fn gather<S: Simd, const Q: usize>(
    s: S,
    weights: &[[f32; KEY_CHUNK]; Q],
    factors: &[f32; Q],
    keys: Range<usize>,
    chunk_start: usize,
    kv: &KvBlock<'_>,
    head_dim: usize,
    acc: &mut [f32],
) {
    macro_rules! gather_as {
        ($row:ty, $rows:expr) => {{
            let rows = $rows.as_ptr().cast();
            gather_rows::<S, $row, Q>(s, weights, factors, keys, chunk_start, rows, kv.stride, head_dim, acc);
        }};
    }
    match kv.values {
        KvRows::F16(rows) => gather_as!(HalfRow, rows),
        KvRows::Bf16(rows) => gather_as!(Bf16Row, rows),
        KvRows::F32(rows) => gather_as!(FloatRow, rows),
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the inner loop of a kernel, called in two places")]
fn gather_rows<S: Simd, R: CacheRow, const Q: usize>(
    s: S,
    weights: &[[f32; KEY_CHUNK]; Q],
    factors: &[f32; Q],
    keys: Range<usize>,
    chunk_start: usize,
    rows: *const u8,
    stride: usize,
    head_dim: usize,
    acc: &mut [f32],
) {
    // Four registers per query at a time, as many accumulators as fit in the register file.
    const WIDTH: usize = 4;
    for begin in (0..head_dim).step_by(WIDTH * S::LANES) {
        if begin + WIDTH * S::LANES <= head_dim {
            let mut sums = [[s.fsplat(0.0); Q]; WIDTH];
            // SAFETY: `begin + WIDTH * LANES` is within the rows of the cache and of `acc`, whose sizes
            // `attend_block` has checked.
            unsafe {
                let acc = acc.as_mut_ptr().add(begin);
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = s.fmul(s.fload(acc.add(r * head_dim + i * S::LANES)), s.fsplat(factors[r]));
                    }
                }
                for key in keys.clone() {
                    let row = rows.add(R::BYTES * (key * stride + begin));
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let value = R::load(s, row.add(R::BYTES * i * S::LANES));
                        for (r, sum) in sums.iter_mut().enumerate() {
                            *sum = s.fma(s.fsplat(weights[r][key - chunk_start]), value, *sum);
                        }
                    }
                }
                for (i, sums) in sums.iter().enumerate() {
                    for (r, &sum) in sums.iter().enumerate() {
                        s.fstore(acc.add(r * head_dim + i * S::LANES), sum);
                    }
                }
            }
        } else {
            // The remainder of a head, element by element, with the same operations in the same order.
            for d in begin..head_dim {
                for r in 0..Q {
                    let mut sum = acc[r * head_dim + d] * factors[r];
                    for key in keys.clone() {
                        // SAFETY: an element of a row of the cache, whose size `attend_block` has checked.
                        let value = unsafe { R::one(rows.add(R::BYTES * (key * stride + d))) };
                        sum = weights[r][key - chunk_start].mul_add(value, sum);
                    }
                    acc[r * head_dim + d] = sum;
                }
            }
        }
    }
}
