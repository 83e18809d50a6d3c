//! The paged KV cache: appends and attention.

use crate::compile::Paging;
use crate::pool::Pool;
use crate::simd::{AttendState, KvBlock, KvRows, Level, Scores, attend_block, f32_to_bf16, f32_to_f16};
use half::{bf16, f16};
use refrain_graph::{Attention, RunError};
use refrain_tensor::DType;
use refrain_tensor::{row_from_bytes, row_scale, row_to_bytes};
use std::cell::RefCell;
use std::ops::Range;

/// Cache locations of a step's rows. Constructed only after all indices in the control block were checked.
pub(crate) struct BlockPages<'a> {
    paging: &'a Paging,
    positions: &'a [i32],
    seqs: &'a [i32],
    tables: &'a [i32],
}

impl<'a> BlockPages<'a> {
    /// Refuses positions, sequences and blocks that are out of range. Each row accesses the last `reach` positions up to its
    /// own, or all if `None`; earlier blocks may be gone.
    pub(crate) fn new(
        paging: &'a Paging,
        control: &'a [i32],
        label: &str,
        reach: Option<usize>,
    ) -> Result<BlockPages<'a>, RunError> {
        let (positions, seqs) = (&control[paging.positions.clone()], &control[paging.seqs.clone()]);
        let pages = BlockPages { paging, positions, seqs, tables: &control[paging.tables.clone()] };
        let refuse = |what, got: i32, limit| {
            Err(RunError::OutOfRange { label: label.into(), what, got: got.into(), limit })
        };
        let n_seqs = pages.tables.len() / paging.max_blocks.max(1);
        for (&position, &seq) in positions.iter().zip(seqs) {
            let Ok(position_idx) = usize::try_from(position) else { continue };
            if usize::try_from(seq).map_or(true, |s| s >= n_seqs) {
                return refuse("sequence", seq, n_seqs);
            }
            let n_needed = position_idx / paging.kv_block + 1;
            if n_needed > paging.max_blocks {
                return refuse("position", position, paging.max_blocks * paging.kv_block);
            }
            let first = reach.map_or(0, |reach| (position_idx + 1).saturating_sub(reach) / paging.kv_block);
            let table = &pages.tables[seq as usize * paging.max_blocks..][first..n_needed];
            if let Some(&block) =
                table.iter().find(|&&b| usize::try_from(b).map_or(true, |b| b >= paging.n_blocks))
            {
                return refuse("KV block", block, paging.n_blocks);
            }
        }
        Ok(pages)
    }

    fn block(&self, seq: i32, column: usize) -> usize {
        self.tables[seq as usize * self.paging.max_blocks + column] as usize
    }

    /// First element of a head's rows in a block.
    fn start(&self, block: usize, kv_head: usize) -> usize {
        (block * self.paging.n_kv_heads + kv_head) * self.paging.kv_block * self.paging.head_dim
    }
}

/// Writes a step's rows to the cache.
pub(crate) fn kv_append(level: Level, pages: &BlockPages<'_>, dtype: DType, x: &[f32], cache: &mut [u8]) {
    let Paging { n_kv_heads, kv_block, head_dim, .. } = *pages.paging;
    for (row, (&position, &seq)) in pages.positions.iter().zip(pages.seqs).enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let block = pages.block(seq, position / kv_block);
        for head in 0..n_kv_heads {
            let src = &x[(row * n_kv_heads + head) * head_dim..][..head_dim];
            let at = pages.start(block, head) + position % kv_block * head_dim;
            let to = at..at + head_dim;
            if dtype == DType::F16 {
                f32_to_f16(level, src, &mut bytemuck::cast_slice_mut::<u8, f16>(cache)[to]);
            } else if dtype == DType::BF16 {
                f32_to_bf16(level, src, &mut bytemuck::cast_slice_mut::<u8, bf16>(cache)[to]);
            } else {
                bytemuck::cast_slice_mut::<u8, f32>(cache)[to].copy_from_slice(src);
            }
        }
    }
}

/// Writes a step's rows to an 8-bit cache.
pub(crate) fn kv_append_bytes(pages: &BlockPages<'_>, x: &[f32], cache: &mut [u8]) {
    let head_dim = pages.paging.head_dim;
    each_row(pages, x, |to, x| row_to_bytes(x, &mut cache[to * head_dim..][..head_dim]));
}

/// Writes the scales of a step's rows.
pub(crate) fn kv_append_scales(pages: &BlockPages<'_>, x: &[f32], scales: &mut [f32]) {
    each_row(pages, x, |to, x| scales[to] = row_scale(x));
}

/// Calls `write` with each head of each row, and the index of its row in the cache.
fn each_row(pages: &BlockPages<'_>, x: &[f32], mut write: impl FnMut(usize, &[f32])) {
    let Paging { n_kv_heads, kv_block, head_dim, .. } = *pages.paging;
    for (row, (&position, &seq)) in pages.positions.iter().zip(pages.seqs).enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let block = pages.block(seq, position / kv_block);
        for head in 0..n_kv_heads {
            let to = (block * n_kv_heads + head) * kv_block + position % kv_block;
            write(to, &x[(row * n_kv_heads + head) * head_dim..][..head_dim]);
        }
    }
}

/// Key and value caches of a layer.
#[derive(Clone, Copy)]
pub(crate) struct Caches<'a> {
    pub dtype: DType,
    pub keys: &'a [u8],
    pub values: &'a [u8],
    /// Scales of 8-bit keys and values.
    pub scales: Option<[&'a [f32]; 2]>,
}

thread_local! {
    /// Keys and values of a block of an 8-bit cache, read back.
    static READ_BACK: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Reads the visible rows of a block back from an 8-bit cache. Allocates only when a larger block comes.
fn read_back(to: &mut Vec<f32>, bytes: &[u8], scales: &[f32], seen: Range<usize>, head_dim: usize) {
    if to.len() < bytes.len() {
        to.resize(bytes.len(), 0.0);
    }
    for row in seen {
        let at = row * head_dim..(row + 1) * head_dim;
        row_from_bytes(&bytes[at.clone()], scales[row], &mut to[at]);
    }
}

impl<'a> Caches<'a> {
    fn rows(&self, cache: &'a [u8], rows: Range<usize>) -> KvRows<'a> {
        if self.dtype == DType::F16 {
            KvRows::F16(&bytemuck::cast_slice(cache)[rows])
        } else if self.dtype == DType::BF16 {
            KvRows::Bf16(&bytemuck::cast_slice(cache)[rows])
        } else {
            KvRows::F32(&bytemuck::cast_slice(cache)[rows])
        }
    }
}

/// Maximum number of query heads per task; they share a KV head.
const MAX_GROUP: usize = 32;

/// Attention of every row over the positions of its sequence. A task is a row and some of its heads; the result
/// does not depend on the split.
pub(crate) fn attend(
    pool: &Pool,
    level: Level,
    pages: &BlockPages<'_>,
    attention: &Attention,
    heads: AttendHeads<'_>,
    caches: Caches<'_>,
    out: &mut [f32],
) {
    let AttendHeads { q, n_heads, sinks } = heads;
    let Paging { n_kv_heads, head_dim, .. } = *pages.paging;
    let group = n_heads / n_kv_heads;
    // A whole group reads each key once. Single heads keep all threads busy when there are few tasks.
    let n_tasks = pages.positions.len() * n_kv_heads;
    let heads = if n_tasks >= 2 * pool.n_threads() && group <= MAX_GROUP { group } else { 1 };
    pool.chunks_mut(out, heads * head_dim, |task, out| {
        let first_head = task * heads;
        let (row, head) = (first_head / n_heads, first_head % n_heads);
        let q = &q[first_head * head_dim..][..heads * head_dim];
        let sinks = sinks.map(|sinks| &sinks[head..head + heads]);
        attend_row(level, pages, attention, (q, sinks), caches, [row, head / group], out);
    });
}

/// Queries of a step.
#[derive(Clone, Copy)]
pub(crate) struct AttendHeads<'a> {
    pub q: &'a [f32], // [n, n_heads, head_dim]
    pub n_heads: usize,
    /// A score of each head that takes part in its softmax but has no value.
    pub sinks: Option<&'a [f32]>, // [n_heads]
}

/// Heads of one row that share a KV head, with their sinks.
fn attend_row(
    level: Level,
    pages: &BlockPages<'_>,
    attention: &Attention,
    (q, sinks): (&[f32], Option<&[f32]>),
    caches: Caches<'_>,
    [row, kv_head]: [usize; 2],
    out: &mut [f32],
) {
    let Paging { kv_block, head_dim, .. } = *pages.paging;
    let n_q = q.len() / head_dim;
    let (mut max, mut sum) = ([0.0; MAX_GROUP], [0.0; MAX_GROUP]);
    let mut state = AttendState { max: &mut max[..n_q], sum: &mut sum[..n_q], acc: out };
    state.reset();
    if let Some(sinks) = sinks {
        // As if a first chunk had held only the sink, with a value of zero.
        state.max.copy_from_slice(sinks);
        state.sum.fill(1.0);
    }
    if let Ok(position) = usize::try_from(pages.positions[row]) {
        let first = attention.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let scores = Scores { scale: attention.scale, softcap: attention.softcap };
        for column in first / kv_block..=position / kv_block {
            let start = column * kv_block;
            let seen = first.saturating_sub(start)..(position + 1 - start).min(kv_block);
            let at = pages.start(pages.block(pages.seqs[row], column), kv_head);
            let rows = at..at + kv_block * head_dim;
            let visible: [Range<usize>; MAX_GROUP] = std::array::from_fn(|_| seen.clone());
            let mut add = |keys: KvRows<'_>, values: KvRows<'_>| {
                let kv = KvBlock { keys, values, stride: head_dim, n_keys: kv_block };
                attend_block(level, scores, q, head_dim, &kv, &visible[..n_q], &mut state);
            };
            let Some([k_scales, v_scales]) = caches.scales else {
                add(caches.rows(caches.keys, rows.clone()), caches.rows(caches.values, rows));
                continue;
            };
            let of_rows = at / head_dim..at / head_dim + kv_block;
            READ_BACK.with_borrow_mut(|[keys, values]| {
                read_back(
                    keys,
                    &caches.keys[rows.clone()],
                    &k_scales[of_rows.clone()],
                    seen.clone(),
                    head_dim,
                );
                read_back(values, &caches.values[rows.clone()], &v_scales[of_rows], seen, head_dim);
                add(KvRows::F32(&keys[..rows.len()]), KvRows::F32(&values[..rows.len()]));
            });
        }
    }
    state.finish(level);
}
