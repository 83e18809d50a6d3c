//! Attention among the rows of a step and its gradient, in blocks of rows and keys.
//!
//! Blocks have 64 rows and begin at multiples of 64, so results do not depend on the number of threads. A task
//! is a block of rows (of keys, for the gradients of keys and values) with all its heads, so it writes
//! contiguous rows.

use super::spread::{round, widen};
use super::{Operands, Tools, ValueCall, ValueOperand, Values};
use crate::simd::{
    self, BLOCK, Gathered, Level, NOTHING, SCORES, Side, dots, panels, product, score_grads, soften,
};
use refrain_graph::{RunError, SpanAttention};
use refrain_tensor::DType;
use std::ops::Range;

/// Sizes of the operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpanAttentionSizes {
    n: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    /// `head_dim` padded with zeros to a multiple of 16.
    d: usize,
}

impl SpanAttentionSizes {
    pub(super) fn of(q: &ValueOperand, k: &ValueOperand) -> SpanAttentionSizes {
        let head_dim = q.dim(2);
        let d = head_dim.next_multiple_of(16);
        SpanAttentionSizes { n: q.dim(0), n_heads: q.dim(1), n_kv_heads: k.dim(1), head_dim, d }
    }

    /// Number of query heads that share a KV head.
    fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    fn tile(&self) -> usize {
        BLOCK * self.d
    }

    /// Floats of scratch for the forward pass.
    pub(super) fn forward(&self, n_threads: usize) -> usize {
        n_threads * (3 * self.tile() + SCORES + BLOCK + self.group() * (2 * self.tile() + 2 * BLOCK))
    }

    /// Floats of scratch for the backward pass.
    pub(super) fn backward(&self, n_threads: usize) -> usize {
        let queries = 4 * self.tile() + self.group() * (3 * self.tile() + 2 * BLOCK);
        let keys = 9 * self.tile() + 2 * BLOCK;
        self.n * self.n_heads + n_threads * (2 * SCORES + queries.max(keys))
    }
}

/// An operand `[n, n_heads, head_dim]`.
#[derive(Clone, Copy)]
struct HeadRows<'a> {
    dtype: DType,
    bytes: &'a [u8],
    n_heads: usize,
    head_dim: usize,
    d: usize,
}

impl<'a> HeadRows<'a> {
    fn new(ops: &Operands<'a>, value: &ValueOperand, sizes: &SpanAttentionSizes) -> HeadRows<'a> {
        let Some(bytes) = ops.dense(value) else { unreachable!("attention never overwrites its input") };
        HeadRows { dtype: value.dtype, bytes, n_heads: value.dim(1), head_dim: sizes.head_dim, d: sizes.d }
    }

    /// Loads one head of a block of rows: `[64, d]`, padded with zeros.
    fn tile(&self, level: Level, block: usize, head: usize, to: &mut [f32]) {
        let size = self.dtype.block_bytes();
        let row_bytes = self.head_dim * size;
        for (i, to) in to.chunks_exact_mut(self.d).enumerate() {
            let at = ((block * BLOCK + i) * self.n_heads + head) * row_bytes;
            let (values, rest) = to.split_at_mut(self.head_dim);
            rest.fill(0.0);
            match self.bytes.get(at..at + row_bytes) {
                Some(bytes) => widen(level, self.dtype, bytes, values),
                None => values.fill(0.0),
            }
        }
    }
}

/// The keys that each row attends to.
struct VisibleKeys<'a> {
    attention: &'a SpanAttention,
    spans: &'a [i32],
    n: usize,
}

impl<'a> VisibleKeys<'a> {
    /// Refuses spans that do not contain their row.
    fn new(
        attention: &'a SpanAttention,
        spans: &'a [i32],
        n: usize,
        label: &str,
    ) -> Result<VisibleKeys<'a>, RunError> {
        for (row, span) in spans.as_chunks::<2>().0.iter().enumerate() {
            let [first, end] = span.map(i64::from);
            let is_padding = first == end;
            if !is_padding && (first < 0 || end > n as i64 || first > row as i64 || end <= row as i64) {
                return Err(RunError::OutOfRange {
                    label: label.into(),
                    what: "span",
                    got: end,
                    limit: n + 1,
                });
            }
        }
        Ok(VisibleKeys { attention, spans, n })
    }

    fn span(&self, row: usize) -> Range<usize> {
        let [first, end] = [self.spans[2 * row], self.spans[2 * row + 1]];
        if first == end { 0..0 } else { first as usize..end as usize }
    }

    /// Keys that a row attends to; none past the last row.
    fn keys(&self, row: usize) -> Range<usize> {
        if row >= self.n {
            return 0..0;
        }
        let span = self.span(row);
        if span.is_empty() { 0..0 } else { self.attention.seen(row, [span.start, span.end]) }
    }

    /// Blocks of keys that any row of a block attends to.
    fn key_blocks(&self, block: usize) -> Range<usize> {
        let rows = (block * BLOCK..(block + 1) * BLOCK).map(|row| self.keys(row));
        blocks(rows)
    }

    /// Blocks of rows that attend to any key of a block.
    fn row_blocks(&self, block: usize) -> Range<usize> {
        let keys = block * BLOCK..self.n.min((block + 1) * BLOCK);
        blocks(keys.map(|key| {
            let span = self.span(key);
            match (self.attention.causal, self.attention.window) {
                _ if span.is_empty() => 0..0,
                (false, _) => span,
                (true, None) => key..span.end,
                (true, Some(window)) => key..span.end.min(key.saturating_add(window)),
            }
        }))
    }

    /// Calls `f(row, key)` for each pair of two blocks that is masked.
    fn hidden(&self, row_block: usize, key_block: usize, mut f: impl FnMut(usize, usize)) {
        let first_key = key_block * BLOCK;
        for row in 0..BLOCK {
            let keys = self.keys(row_block * BLOCK + row);
            let start = keys.start.clamp(first_key, first_key + BLOCK) - first_key;
            let end = keys.end.clamp(first_key, first_key + BLOCK) - first_key;
            let (start, end) = if start < end { (start, end) } else { (BLOCK, BLOCK) };
            (0..start).chain(end..BLOCK).for_each(|key| f(row, key));
        }
    }
}

/// Blocks that the ranges touch.
fn blocks(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let found = ranges.filter(|range| !range.is_empty());
    let (start, end) = found.fold((usize::MAX, 0), |(start, end), r| (start.min(r.start), end.max(r.end)));
    if start >= end { 0..0 } else { start / BLOCK..end.div_ceil(BLOCK) }
}

/// Splits `n` floats off the front of a slice.
fn take<'a>(from: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (part, rest) = std::mem::take(from).split_at_mut(n);
    *from = rest;
    part
}

/// Turns `q · k` into scores, in place.
fn score(level: Level, attention: &SpanAttention, scores: &mut [f32]) {
    simd::scale_inplace(level, scores, attention.scale);
    if let Some(cap) = attention.softcap {
        scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
    }
}

impl Values<'_> {
    pub(super) fn span_attention(
        &mut self,
        call: &ValueCall,
        attention: &SpanAttention,
        arena: &mut [f32],
    ) -> Result<(), RunError> {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, label, .. } = tools;
        let sizes = SpanAttentionSizes::of(&call.ins[0], &call.ins[1]);
        let [q, k, v] = [0, 1, 2].map(|i| HeadRows::new(&ops, &call.ins[i], &sizes));
        let seen = VisibleKeys::new(attention, ops.ints(&call.ins[3]), sizes.n, label)?;
        let size = call.outs[0].dtype.block_bytes();
        let y_chunk = BLOCK * sizes.n_heads * sizes.head_dim;
        let [y, lse] = Operands::writes(&mut ops.carved.outs, call, [y_chunk, BLOCK * sizes.n_heads]);
        let outs = [(y.bytes, y_chunk * size), (lse.bytes, BLOCK * sizes.n_heads * 4)];
        pool.zip_chunks(outs, scratch, |block, [y, lse], local| {
            let lse: &mut [f32] = bytemuck::cast_slice_mut(lse);
            let forward = Forward { level, attention, sizes, seen: &seen, q, k, v };
            for kv_head in 0..sizes.n_kv_heads {
                forward.block(block, kv_head, local, |head, row, values, row_lse| {
                    let at = (row * sizes.n_heads + head) * sizes.head_dim * size;
                    if let Some(to) = y.get_mut(at..at + sizes.head_dim * size) {
                        round(level, q.dtype, values, to);
                        lse[row * sizes.n_heads + head] = row_lse;
                    }
                });
            }
        });
        Ok(())
    }

    pub(super) fn span_attention_grad(
        &mut self,
        call: &ValueCall,
        attention: &SpanAttention,
        arena: &mut [f32],
    ) -> Result<(), RunError> {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, label, .. } = tools;
        let sizes = SpanAttentionSizes::of(&call.ins[1], &call.ins[2]);
        let [dy, q, k, v] = [0, 1, 2, 3].map(|i| HeadRows::new(&ops, &call.ins[i], &sizes));
        let y = HeadRows::new(&ops, &call.ins[5], &sizes);
        let seen = VisibleKeys::new(attention, ops.ints(&call.ins[4]), sizes.n, label)?;
        let Some(lse) = ops.dense(&call.ins[6]) else { unreachable!("attention never overwrites its input") };
        let lse: &[f32] = bytemuck::cast_slice(lse);
        let size = q.dtype.block_bytes();
        let (mean, local) = scratch.split_at_mut(sizes.n * sizes.n_heads);
        pool.zip_chunks([(&mut *mean, BLOCK * sizes.n_heads)], local, |block, [mean], local| {
            row_means(level, [dy, y], block, local, mean);
        });
        let q_chunk = BLOCK * sizes.n_heads * sizes.head_dim * size;
        let k_chunk = BLOCK * sizes.n_kv_heads * sizes.head_dim * size;
        let [dq, dk, dv] = Operands::writes(&mut ops.carved.outs, call, [0; 3]);
        let backward = SpanBackward { level, attention, sizes, seen: &seen, dy, q, k, v, lse, mean: &*mean };
        pool.zip_chunks([(dq.bytes, q_chunk)], local, |block, [dq], local| {
            for kv_head in 0..sizes.n_kv_heads {
                backward.queries(block, kv_head, local, |head, tile| {
                    store(level, q, sizes.n_heads, head, tile, dq);
                });
            }
        });
        pool.zip_chunks([(dk.bytes, k_chunk), (dv.bytes, k_chunk)], local, |block, [dk, dv], local| {
            for kv_head in 0..sizes.n_kv_heads {
                let [dk_tile, dv_tile] = backward.keys(block, kv_head, local);
                store(level, k, sizes.n_kv_heads, kv_head, dk_tile, dk);
                store(level, v, sizes.n_kv_heads, kv_head, dv_tile, dv);
            }
        });
        Ok(())
    }
}

/// Rounds one head of a block of rows and stores it.
fn store(level: Level, like: HeadRows<'_>, n_heads: usize, head: usize, tile: &[f32], to: &mut [u8]) {
    let row_bytes = like.head_dim * like.dtype.block_bytes();
    for (row, values) in tile.chunks_exact(like.d).enumerate() {
        let at = (row * n_heads + head) * row_bytes;
        if let Some(to) = to.get_mut(at..at + row_bytes) {
            round(level, like.dtype, &values[..like.head_dim], to);
        }
    }
}

/// Sum of `dy y` for each row of a block and each head: `[64, n_heads]`.
fn row_means(level: Level, [dy, y]: [HeadRows<'_>; 2], block: usize, local: &mut [f32], mean: &mut [f32]) {
    let tile = BLOCK * dy.d;
    let mut local = local;
    let [rows, dy_panels, y_panels] = [(); 3].map(|()| take(&mut local, tile));
    let sums = take(&mut local, BLOCK);
    for head in 0..dy.n_heads {
        dy.tile(level, block, head, rows);
        panels(level, rows, dy.d, dy_panels);
        y.tile(level, block, head, rows);
        panels(level, rows, dy.d, y_panels);
        dots(level, dy_panels, y_panels, dy.d, sums);
        let column = mean[head..].iter_mut().step_by(dy.n_heads);
        column.zip(&*sums).for_each(|(mean, sum)| *mean = *sum);
    }
}

struct Forward<'a> {
    level: Level,
    attention: &'a SpanAttention,
    sizes: SpanAttentionSizes,
    seen: &'a VisibleKeys<'a>,
    q: HeadRows<'a>,
    k: HeadRows<'a>,
    v: HeadRows<'a>,
}

impl Forward<'_> {
    /// Attention of a block of rows, for the heads that share a KV head. Passes each result to
    /// `done(head, row, values, lse)`.
    fn block(
        &self,
        block: usize,
        kv_head: usize,
        local: &mut [f32],
        mut done: impl FnMut(usize, usize, &[f32], f32),
    ) {
        let Forward { level, attention, sizes, seen, .. } = *self;
        let (d, group) = (sizes.d, sizes.group());
        let mut local = local;
        let [k_rows, v_rows, k_panels] = [(); 3].map(|()| take(&mut local, sizes.tile()));
        let (scores, factor) = (take(&mut local, SCORES), take(&mut local, BLOCK));
        let (q_panels, acc) =
            (take(&mut local, group * sizes.tile()), take(&mut local, group * sizes.tile()));
        let (max, sum) = (take(&mut local, group * BLOCK), take(&mut local, group * BLOCK));
        for (i, q_panels) in q_panels.chunks_exact_mut(sizes.tile()).enumerate() {
            self.q.tile(level, block, kv_head * group + i, k_rows);
            panels(level, k_rows, d, q_panels);
        }
        acc.fill(0.0);
        max.fill(NOTHING);
        sum.fill(0.0);
        for key_block in seen.key_blocks(block) {
            self.k.tile(level, key_block, kv_head, k_rows);
            self.v.tile(level, key_block, kv_head, v_rows);
            panels(level, k_rows, d, k_panels);
            for i in 0..group {
                let q_panels = &q_panels[i * sizes.tile()..][..sizes.tile()];
                let acc = &mut acc[i * sizes.tile()..][..sizes.tile()];
                let (max, sum) = (&mut max[i * BLOCK..][..BLOCK], &mut sum[i * BLOCK..][..BLOCK]);
                let sides = [Side::panels(k_panels, d), Side::panels(q_panels, d)];
                product(level, d, sides, [BLOCK / 16; 2], scores, BLOCK, false);
                score(level, attention, scores);
                seen.hidden(block, key_block, |row, key| scores[key * BLOCK + row] = f32::NEG_INFINITY);
                soften(level, scores, Gathered { max, sum }, factor);
                for (acc, &factor) in acc.chunks_exact_mut(d).zip(&*factor) {
                    simd::scale_inplace(level, acc, factor);
                }
                let sides = [Side::rows(scores, BLOCK), Side::rows(v_rows, d)];
                product(level, BLOCK, sides, [BLOCK / 16, d / 16], acc, d, true);
            }
        }
        for (i, acc) in acc.chunks_exact_mut(sizes.tile()).enumerate() {
            for (row, acc) in acc.chunks_exact_mut(d).enumerate() {
                let (max, sum) = (max[i * BLOCK + row], sum[i * BLOCK + row]);
                let is_any = sum != 0.0;
                simd::scale_inplace(level, acc, if is_any { 1.0 / sum } else { 0.0 });
                let lse = if is_any { max + sum.ln() } else { f32::NEG_INFINITY };
                done(kv_head * group + i, row, &acc[..sizes.head_dim], lse);
            }
        }
    }
}

struct SpanBackward<'a> {
    level: Level,
    attention: &'a SpanAttention,
    sizes: SpanAttentionSizes,
    seen: &'a VisibleKeys<'a>,
    dy: HeadRows<'a>,
    q: HeadRows<'a>,
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    lse: &'a [f32],  // [n, n_heads]
    mean: &'a [f32], // [n, n_heads]
}

impl SpanBackward<'_> {
    /// Loads the values of a block's rows for one head.
    fn of_rows(&self, values: &[f32], block: usize, head: usize, to: &mut [f32]) {
        for (i, to) in to.iter_mut().enumerate() {
            let at = (block * BLOCK + i) * self.sizes.n_heads + head;
            *to = values.get(at).copied().unwrap_or(0.0);
        }
    }

    fn limits(&self) -> [f32; 2] {
        [self.attention.scale, self.attention.softcap.unwrap_or(0.0)]
    }

    /// Gradients of a block of queries, for the heads that share a KV head. Passes each to `done(head, tile)`.
    fn queries(&self, block: usize, kv_head: usize, local: &mut [f32], mut done: impl FnMut(usize, &[f32])) {
        let SpanBackward { level, attention, sizes, seen, .. } = *self;
        let (d, group, tile) = (sizes.d, sizes.group(), sizes.tile());
        let mut local = local;
        let [k_rows, v_rows, k_panels, v_panels] = [(); 4].map(|()| take(&mut local, tile));
        let [scores, slopes] = [(); 2].map(|()| take(&mut local, SCORES));
        let [q_panels, dy_panels, dq] = [(); 3].map(|()| take(&mut local, group * tile));
        let [lse, mean] = [(); 2].map(|()| take(&mut local, group * BLOCK));
        for i in 0..group {
            let head = kv_head * group + i;
            self.q.tile(level, block, head, k_rows);
            panels(level, k_rows, d, &mut q_panels[i * tile..][..tile]);
            self.dy.tile(level, block, head, k_rows);
            panels(level, k_rows, d, &mut dy_panels[i * tile..][..tile]);
            self.of_rows(self.lse, block, head, &mut lse[i * BLOCK..][..BLOCK]);
            self.of_rows(self.mean, block, head, &mut mean[i * BLOCK..][..BLOCK]);
        }
        dq.fill(0.0);
        for key_block in seen.key_blocks(block) {
            self.k.tile(level, key_block, kv_head, k_rows);
            self.v.tile(level, key_block, kv_head, v_rows);
            panels(level, k_rows, d, k_panels);
            panels(level, v_rows, d, v_panels);
            for i in 0..group {
                let q_panels = &q_panels[i * tile..][..tile];
                let dy_panels = &dy_panels[i * tile..][..tile];
                let sides = [Side::panels(k_panels, d), Side::panels(q_panels, d)];
                product(level, d, sides, [BLOCK / 16; 2], scores, BLOCK, false);
                score(level, attention, scores);
                let sides = [Side::panels(v_panels, d), Side::panels(dy_panels, d)];
                product(level, d, sides, [BLOCK / 16; 2], slopes, BLOCK, false);
                let rows = [&lse[i * BLOCK..][..BLOCK], &mean[i * BLOCK..][..BLOCK]];
                score_grads(level, [&mut *scores, &mut *slopes], rows, self.limits(), true);
                seen.hidden(block, key_block, |row, key| slopes[key * BLOCK + row] = 0.0);
                let sides = [Side::rows(slopes, BLOCK), Side::rows(k_rows, d)];
                let dq = &mut dq[i * tile..][..tile];
                product(level, BLOCK, sides, [BLOCK / 16, d / 16], dq, d, true);
            }
        }
        for (i, dq) in dq.chunks_exact(tile).enumerate() {
            done(kv_head * group + i, dq);
        }
    }

    /// Gradients of a block of keys and of values, for one KV head.
    fn keys<'o>(&self, block: usize, kv_head: usize, local: &'o mut [f32]) -> [&'o [f32]; 2] {
        let SpanBackward { level, attention, sizes, seen, .. } = *self;
        let (d, group, tile) = (sizes.d, sizes.group(), sizes.tile());
        let mut local = local;
        let [k_panels, v_panels, dk, dv] = [(); 4].map(|()| take(&mut local, tile));
        let [q_rows, dy_rows, q_panels, dy_panels] = [(); 4].map(|()| take(&mut local, tile));
        let [scores, slopes] = [(); 2].map(|()| take(&mut local, SCORES));
        let [lse, mean] = [(); 2].map(|()| take(&mut local, BLOCK));
        self.k.tile(level, block, kv_head, q_rows);
        panels(level, q_rows, d, k_panels);
        self.v.tile(level, block, kv_head, q_rows);
        panels(level, q_rows, d, v_panels);
        dk.fill(0.0);
        dv.fill(0.0);
        for head in kv_head * group..(kv_head + 1) * group {
            for row_block in seen.row_blocks(block) {
                self.q.tile(level, row_block, head, q_rows);
                self.dy.tile(level, row_block, head, dy_rows);
                panels(level, q_rows, d, q_panels);
                panels(level, dy_rows, d, dy_panels);
                self.of_rows(self.lse, row_block, head, lse);
                self.of_rows(self.mean, row_block, head, mean);
                let sides = [Side::panels(q_panels, d), Side::panels(k_panels, d)];
                product(level, d, sides, [BLOCK / 16; 2], scores, BLOCK, false);
                score(level, attention, scores);
                let sides = [Side::panels(dy_panels, d), Side::panels(v_panels, d)];
                product(level, d, sides, [BLOCK / 16; 2], slopes, BLOCK, false);
                score_grads(level, [&mut *scores, &mut *slopes], [lse, mean], self.limits(), false);
                seen.hidden(row_block, block, |row, key| {
                    scores[row * BLOCK + key] = 0.0;
                    slopes[row * BLOCK + key] = 0.0;
                });
                let sides = [Side::rows(scores, BLOCK), Side::rows(dy_rows, d)];
                product(level, BLOCK, sides, [BLOCK / 16, d / 16], dv, d, true);
                let sides = [Side::rows(slopes, BLOCK), Side::rows(q_rows, d)];
                product(level, BLOCK, sides, [BLOCK / 16, d / 16], dk, d, true);
            }
        }
        [&*dk, &*dv]
    }
}
