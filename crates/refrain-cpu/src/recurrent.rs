//! Recurrent layers, whose state is in slots.

use crate::compile::ArenaRowLayout;
use crate::memory::Carved;
use crate::pool::Pool;
use crate::simd::{self, DeltaHead, Level};
use refrain_graph::{GatedDelta, RunError};
use std::ops::Range;

/// Locations of each row's slots. Ranges count words of the control block.
#[derive(Clone, Debug)]
pub(crate) struct SlotPaging {
    pub positions: Range<usize>, // [n]
    pub seqs: Range<usize>,      // [n]
    pub slots: Range<usize>,     // [n_seqs, 2]
    pub n_slots: usize,
}

/// Consecutive rows of one sequence.
pub(crate) struct SequenceChunk {
    rows: Range<usize>,
    /// Slot to read; `None` for a sequence that starts.
    read: Option<usize>,
    write: usize,
}

impl SlotPaging {
    /// Returns the first chunk at or after row `from`, skipping padding. Refuses indices that are out of range.
    fn next(&self, control: &[i32], from: usize, label: &str) -> Result<Option<SequenceChunk>, RunError> {
        let (positions, seqs) = (&control[self.positions.clone()], &control[self.seqs.clone()]);
        let slots = &control[self.slots.clone()];
        let refuse = |what, got: i32, limit| {
            Err(RunError::OutOfRange { label: label.into(), what, got: got.into(), limit })
        };
        let Some(first) = (from..positions.len()).find(|&row| positions[row] >= 0) else { return Ok(None) };
        let (position, seq, n_seqs) = (positions[first] as usize, seqs[first], slots.len() / 2);
        if usize::try_from(seq).map_or(true, |s| s >= n_seqs) {
            return refuse("sequence", seq, n_seqs);
        }
        let versions = &slots[2 * seq as usize..][..2];
        if let Some(&slot) =
            versions.iter().find(|&&s| usize::try_from(s).map_or(true, |s| s >= self.n_slots))
        {
            return refuse("slot", slot, self.n_slots);
        }
        if versions[0] == versions[1] {
            return refuse("second slot of a sequence", versions[1], self.n_slots);
        }
        let goes_on = |&row: &usize| positions[row] >= 0 && seqs[row] == seq;
        let n_rows = (first..positions.len()).take_while(goes_on).count();
        Ok(Some(SequenceChunk {
            rows: first..first + n_rows,
            read: (position > 0).then_some(versions[position % 2] as usize),
            write: versions[(position + 1) % 2] as usize,
        }))
    }

    /// Calls `f` with each chunk.
    pub(crate) fn each(
        &self,
        control: &[i32],
        label: &str,
        mut f: impl FnMut(&SequenceChunk),
    ) -> Result<(), RunError> {
        let mut from = 0;
        while let Some(chunk) = self.next(control, from, label)? {
            f(&chunk);
            from = chunk.rows.end;
        }
        Ok(())
    }
}

impl SequenceChunk {
    /// Returns the slot to read, if any, and the slot to write.
    fn slots<'s>(&self, state: &'s mut [f32], len: usize) -> (Option<&'s [f32]>, &'s mut [f32]) {
        let Some(read) = self.read else { return (None, &mut state[self.write * len..][..len]) };
        let (low, high) = state.split_at_mut(read.max(self.write) * len);
        match read < self.write {
            true => (Some(&low[read * len..][..len]), &mut high[..len]),
            false => (Some(&high[..len]), &mut low[self.write * len..][..len]),
        }
    }
}

/// Maximum filter width.
pub(crate) const MAX_WIDTH: usize = 8;

/// Short convolution of one chunk: `y[n, d]`, `w[width, d]`, a state of `[n_slots, width - 1, d]`.
pub(crate) fn short_conv(
    pool: &Pool,
    level: Level,
    chunk: &SequenceChunk,
    (x, w, silu): (ArenaRows<'_>, &[f32], bool),
    state: &mut [f32],
    y: &mut [f32],
) {
    let d = x.at.len;
    let n_before = w.len() / d.max(1) - 1;
    let (read, write) = chunk.slots(state, n_before * d);
    let first = chunk.rows.start;
    // Input `lag` rows before row `i` of the chunk; empty means zeros.
    let input = |i: usize, lag: usize| match i.checked_sub(lag) {
        Some(i) => x.row(first + i),
        None => read.map_or(&[][..], |slot| &slot[(n_before + i - lag) * d..][..d]),
    };
    let rows = &mut y[first * d..chunk.rows.end * d];
    let one = |i: usize, out: &mut [f32]| {
        let seen: [&[f32]; MAX_WIDTH] =
            std::array::from_fn(|j| if j <= n_before { input(i, n_before - j) } else { &[] });
        simd::short_conv_row(level, &seen[..=n_before], w, silu, out);
    };
    match chunk.rows.len() {
        1 => one(0, rows),
        _ => pool.chunks_mut(rows, d, one),
    }
    let n = chunk.rows.len();
    for (j, to) in write.chunks_exact_mut(d).enumerate() {
        let from = input(n - 1, n_before - 1 - j);
        match from.is_empty() {
            true => to.fill(0.0),
            false => to.copy_from_slice(from),
        }
    }
}

/// Maximum key dimension.
pub(crate) const MAX_K_DIM: usize = 256;

/// Operands of the gated delta rule.
#[derive(Clone, Debug)]
pub(crate) struct DeltaOperands {
    pub q: ArenaRowLayout, // [n, n_key_heads, k_dim]
    pub k: ArenaRowLayout,
    pub v: ArenaRowLayout, // [n, n_heads, v_dim]
    pub a: ArenaRowLayout, // [n, n_heads]
    pub b: ArenaRowLayout,
    pub n_key_heads: usize,
    pub n_heads: usize,
}

/// Rows in the arena.
#[derive(Clone, Copy)]
pub(crate) struct ArenaRows<'a> {
    at: &'a ArenaRowLayout,
    data: &'a [f32],
}

impl<'a> ArenaRows<'a> {
    pub(crate) fn new(carved: &Carved<'a>, at: &'a ArenaRowLayout) -> ArenaRows<'a> {
        let Some(data) = carved.read(&at.range()) else { unreachable!("its rows are never overwritten") };
        ArenaRows { at, data }
    }

    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.at.stride..][..self.at.len]
    }
}

/// The gated delta rule over one chunk, row by row; the heads of a row run in parallel.
pub(crate) fn gated_delta(
    (pool, level): (&Pool, Level),
    chunk: &SequenceChunk,
    (delta, operands): (&GatedDelta, &DeltaOperands),
    [q, k, v, a, b]: [ArenaRows<'_>; 5],
    [decay, dt_bias]: [&[f32]; 2],
    state: &mut [f32],
    y: &mut [f32],
) {
    let &DeltaOperands { n_key_heads, n_heads, .. } = operands;
    let (k_dim, v_dim) = (q.at.len / n_key_heads, v.at.len / n_heads);
    let head_len = k_dim * v_dim;
    let (mut read, write) = chunk.slots(state, n_heads * head_len);
    if read.is_none() {
        write.fill(0.0);
    }
    for row in chunk.rows.clone() {
        let (q, k, v, a, b) = (q.row(row), k.row(row), v.row(row), a.row(row), b.row(row));
        let y = &mut y[row * n_heads * v_dim..][..n_heads * v_dim];
        let before = read.take();
        pool.zip_chunks([(&mut *write, head_len), (y, v_dim)], &mut [0u8; 0], |head, [state, y], _| {
            let at = delta.key_heads.of(head, n_heads, n_key_heads) * k_dim;
            let (mut unit_q, mut unit_k) = ([0f32; MAX_K_DIM], [0f32; MAX_K_DIM]);
            let (unit_q, unit_k) = (&mut unit_q[..k_dim], &mut unit_k[..k_dim]);
            normalise(level, &q[at..at + k_dim], delta.scale, delta.eps, unit_q);
            normalise(level, &k[at..at + k_dim], 1.0, delta.eps, unit_k);
            let dt = a[head] + dt_bias[head];
            let softplus = dt.max(0.0) + (-dt.abs()).exp().ln_1p();
            let head = DeltaHead {
                q: unit_q,
                k: unit_k,
                v: &v[head * v_dim..][..v_dim],
                keep: (decay[head] * softplus).exp(),
                beta: 1.0 / (1.0 + (-b[head]).exp()),
                before: before.map(|slot| &slot[head * head_len..][..head_len]),
            };
            simd::gated_delta_row(level, head, state, y);
        });
    }
}

/// `to = scale * x / sqrt(sum of x^2 + eps)`.
fn normalise(level: Level, x: &[f32], scale: f32, eps: f32, to: &mut [f32]) {
    to.copy_from_slice(x);
    simd::scale_inplace(level, to, scale / (simd::dot(level, x, x) + eps).sqrt());
}
