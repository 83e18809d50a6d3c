//! Rows of recurrent layers: a short convolution, and the gated delta rule of one head.

use super::Level;
use super::elementwise::load16;
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// Stores a register at `at`; lanes past the end are dropped.
#[inline(always)]
pub(super) fn store_some<S: Simd>(s: S, to: &mut [f32], at: usize, value: S::F) {
    if at + S::LANES <= to.len() {
        // SAFETY: the LANES floats from `at` are inside the slice.
        unsafe { s.fstore(to.as_mut_ptr().add(at), value) };
        return;
    }
    let mut lanes = [0f32; GROUP];
    // SAFETY: a register is at most 16 floats.
    unsafe { s.fstore(lanes.as_mut_ptr(), value) };
    let n = to.len().saturating_sub(at);
    to[at..].copy_from_slice(&lanes[..n]);
}

struct ConvRow<'a> {
    rows: &'a [&'a [f32]],
    w: &'a [f32],
    silu: bool,
    out: &'a mut [f32],
}

impl SimdKernel for ConvRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ConvRow { rows, w, silu, out } = self;
        let d = out.len();
        for at in (0..d).step_by(S::LANES) {
            let mut sum = s.fsplat(0.0);
            for (row, w) in rows.iter().zip(w.chunks_exact(d)) {
                sum = s.fma(load16::<S, 0>(s, row, at, 0), load16::<S, 0>(s, w, at, 0), sum);
            }
            let y = if silu { math::silu(s, sum) } else { sum };
            store_some(s, out, at, y);
        }
    }
}

/// One row of a causal convolution: `out[c] = f(Σ w[j][c] rows[j][c])`, summed starting with the oldest row. An
/// empty row counts as zeros.
///
/// # Panics
/// If a row is neither empty nor as long as `out`, or `w` does not have one filter element per row and channel.
pub fn short_conv_row(level: Level, rows: &[&[f32]], w: &[f32], silu: bool, out: &mut [f32]) {
    let d = out.len();
    let fits = rows.iter().all(|row| row.is_empty() || row.len() == d) && w.len() == rows.len() * d;
    assert!(fits, "{} rows and a filter of {} elements for {d} channels", rows.len(), w.len());
    level.dispatch(ConvRow { rows, w, silu, out });
}

/// Inputs of the gated delta rule for one row and one head.
pub struct DeltaHead<'a> {
    /// Normalised and scaled.
    pub q: &'a [f32], // [k_dim]
    /// Normalised.
    pub k: &'a [f32], // [k_dim]
    /// Values.
    pub v: &'a [f32], // [v_dim]
    /// Decay of the state.
    pub keep: f32,
    /// Factor on the update.
    pub beta: f32,
    /// Previous state, if it is not already in `state`.
    pub before: Option<&'a [f32]>, // [v_dim, k_dim]
}

struct DeltaRow<'a> {
    head: DeltaHead<'a>,
    state: &'a mut [f32],
    y: &'a mut [f32],
}

impl SimdKernel for DeltaRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DeltaRow { head: DeltaHead { q, k, v, keep, beta, before }, state, y } = self;
        let k_dim = k.len();
        for (j, (state, y)) in state.chunks_exact_mut(k_dim).zip(y).enumerate() {
            if let Some(before) = before {
                state.copy_from_slice(&before[j * k_dim..][..k_dim]);
            }
            let mut sums = [s.fsplat(0.0); 4];
            for at in (0..k_dim).step_by(GROUP) {
                for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                    *sum = s.fma(load16::<S, 0>(s, state, at, g), load16::<S, 0>(s, k, at, g), *sum);
                }
            }
            let change = beta * (v[j] - keep * s.sum16(sums));
            let (keep, change) = (s.fsplat(keep), s.fsplat(change));
            let mut sums = [s.fsplat(0.0); 4];
            for at in (0..k_dim).step_by(GROUP) {
                for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                    if at + g * S::LANES >= k_dim {
                        continue;
                    }
                    let kept = s.fmul(load16::<S, 0>(s, state, at, g), keep);
                    let new = s.fma(load16::<S, 0>(s, k, at, g), change, kept);
                    store_some(s, state, at + g * S::LANES, new);
                    *sum = s.fma(new, load16::<S, 0>(s, q, at, g), *sum);
                }
            }
            *y = s.sum16(sums);
        }
    }
}

/// `S = keep S; S += beta (v - S k) kᵀ; y = S q`, with sums in 16 accumulators.
///
/// # Panics
/// If lengths do not match.
pub fn gated_delta_row(level: Level, head: DeltaHead<'_>, state: &mut [f32], y: &mut [f32]) {
    let (k_dim, v_dim) = (head.k.len(), head.v.len());
    let len = k_dim * v_dim;
    let fits = k_dim > 0
        && head.q.len() == k_dim
        && y.len() == v_dim
        && state.len() == len
        && head.before.is_none_or(|before| before.len() == len);
    assert!(fits, "keys of {k_dim}, values of {v_dim}, a state of {} and {} results", state.len(), y.len());
    level.dispatch(DeltaRow { head, state, y });
}
