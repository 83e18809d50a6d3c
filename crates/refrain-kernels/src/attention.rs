//! Attention over the paged cache, split along the context.
//!
//! The grid is fixed when the plan is built. Each block reads the row's position on the device and derives
//! its part of the context from it, so one recording serves every length.

use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_graph::Attention;
use refrain_tensor::DType;

use bytemuck::{Pod, Zeroable};

use crate::error::{KernelError, OpCase};
use crate::kv::PageTables;
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, read_rows};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Query heads of one KV head per block.
const BLOCK_HEADS: usize = 8;
/// Threads per block.
const BLOCK: u32 = 128;
/// Head sizes with a kernel, each for sizes up to it.
const HEAD_DIMS: [usize; 3] = [128, 256, 512];
/// Minimum length of a split, in positions.
const MIN_SPLIT: usize = 32;
/// Merging more splits than this costs more than it gains.
const MAX_SPLITS: usize = 64;

/// `y[i, h] = softmax(scale * q[i, h] . k) v` over the positions visible to row `i`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Scale, window and soft cap.
    pub attention: Attention,
    /// `[n, n_heads, head_dim]` F32; each head is contiguous.
    pub q: BufView,
    /// `[n_blocks, n_kv_heads, kv_block, head_dim]`.
    pub k_cache: Buf,
    /// Like `k_cache`.
    pub v_cache: Buf,
    /// F16, BF16 or F32, or U8 with scales.
    pub cache_dtype: DType,
    /// `[n_blocks, n_kv_heads, kv_block]` F32: the scales of 8-bit keys and values.
    pub scales: Option<[Buf; 2]>,
    /// `[n]` I32, read at run time.
    pub positions: Buf,
    /// `[n]` I32, read at run time.
    pub seqs: Buf,
    /// `[n_seqs, max_blocks]` I32, read at run time.
    pub tables: Buf,
    /// `[n_heads]` F32: a score of each head that has no value; `None` for none.
    pub sinks: Option<Buf>,
    /// `[n, n_heads, head_dim]` F32.
    pub y: Buf,
    /// Scratch of [`attention_scratch_bytes`] bytes; unused when `n_splits` is 1.
    pub scratch: Option<Buf>,
    /// Number of rows.
    pub n: usize,
    /// Query heads, a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV blocks of the cache.
    pub n_blocks: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Positions per KV block.
    pub kv_block: usize,
    /// Elements per head: even, at most 512.
    pub head_dim: usize,
    /// Rows of the block tables.
    pub n_seqs: usize,
    /// Columns of the block tables.
    pub max_blocks: usize,
    /// Parallel splits of the context; [`attention_splits`] chooses a good number.
    pub n_splits: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Returns the number of splits that fills `n_sms` SMs, for contexts of up to `max_len` positions.
#[must_use]
pub fn attention_splits(n: usize, n_kv_heads: usize, max_len: usize, n_sms: u32) -> usize {
    let blocks = (n * n_kv_heads).max(1);
    (2 * n_sms as usize).div_ceil(blocks).min(max_len.div_ceil(MIN_SPLIT)).clamp(1, MAX_SPLITS)
}

/// Scratch size of [`Kernels::attention`].
#[must_use]
pub fn attention_scratch_bytes(n: usize, n_heads: usize, head_dim: usize, n_splits: usize) -> u64 {
    if n_splits <= 1 {
        return 0;
    }
    [n, n_heads, n_splits, head_dim + 2].iter().fold(4, |bytes: u64, &n| bytes.saturating_mul(n as u64))
}

/// Parameters of the split kernel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AttentionSizes {
    pub(crate) n_heads: u32,
    pub(crate) n_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) n_blocks: u32,
    pub(crate) kv_block: u32,
    pub(crate) n_seqs: u32,
    pub(crate) max_blocks: u32,
    pub(crate) n_splits: u32,
    /// Attention window in positions; 0 means unlimited.
    pub(crate) window: u32,
    pub(crate) scale: f32,
    /// Soft cap of the scores; 0 for none.
    pub(crate) softcap: f32,
}

impl Kernels {
    /// Pushes the launches for [`AttentionArgs`]: one, plus a merge if there are several splits.
    pub fn attention(&self, a: &AttentionArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let shape = [
            ("n", a.n),
            ("n_heads", a.n_heads),
            ("head_dim", a.head_dim),
            ("n_blocks", a.n_blocks),
            ("n_kv_heads", a.n_kv_heads),
            ("kv_block", a.kv_block),
            ("n_seqs", a.n_seqs),
            ("max_blocks", a.max_blocks),
            ("n_splits", a.n_splits),
        ];
        let case = OpCase { op: "attention", dtype: a.cache_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            if a.scales.is_some() { a.cache_dtype == DType::U8 } else { a.cache_dtype.is_float() },
            "the cache must be F16, BF16 or F32, or U8 with scales"
        );
        crate::require!(
            case,
            a.n_heads.is_multiple_of(a.n_kv_heads),
            "heads must be in groups of {}",
            a.n_kv_heads
        );
        crate::require!(case, a.n_splits <= 65_535, "the grid takes at most 65535 splits");
        let size = HEAD_DIMS.into_iter().find(|&d| a.head_dim <= d && a.head_dim.is_multiple_of(2));
        let size = size.ok_or_else(|| case.refuse("head_dim must be even and at most 512".to_owned()))?;
        let cells = [a.n_blocks, a.n_kv_heads, a.kv_block, a.head_dim];
        let (q, rows) = case.rows("q", &a.q, a.n.saturating_mul(a.n_heads), a.head_dim)?;
        let y = case.words("y", a.y, &[a.n, a.n_heads, a.head_dim])?;
        let n_partials = a.n.saturating_mul(a.n_heads).saturating_mul(a.n_splits);
        let scratch = match (a.n_splits, a.scratch) {
            (1, _) => None,
            (_, Some(scratch)) => Some(case.words("scratch", scratch, &[n_partials, a.head_dim + 2])?),
            (_, None) => return Err(case.refuse("more than one split needs scratch".to_owned())),
        };
        let window =
            a.attention.window.map_or(Ok(0), |w| case.u32("window", w.clamp(1, i32::MAX as usize)))?;
        let sizes = AttentionSizes {
            n_heads: a.n_heads as u32,
            n_kv_heads: a.n_kv_heads as u32,
            head_dim: a.head_dim as u32,
            n_blocks: a.n_blocks as u32,
            kv_block: a.kv_block as u32,
            n_seqs: a.n_seqs as u32,
            max_blocks: a.max_blocks as u32,
            n_splits: a.n_splits as u32,
            window,
            scale: a.attention.scale,
            softcap: a.attention.softcap.unwrap_or(0.0),
        };
        let n_groups = a.n_kv_heads * (a.n_heads / a.n_kv_heads).div_ceil(BLOCK_HEADS);
        crate::require!(case, n_groups <= 65_535, "the grid takes at most 65535 groups of heads");
        let grid = [a.n as u32, n_groups as u32, a.n_splits as u32];
        let split = self.launch(&split_name(size, a.cache_dtype), grid, BLOCK)?.step(a.step);
        let split = match scratch {
            None => split.write(y).null(),
            Some(scratch) => split.null().write(scratch),
        };
        let split = split
            .read(q)
            .read(case.cache("k_cache", a.k_cache, cells)?)
            .read(case.cache("v_cache", a.v_cache, cells)?)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("seqs", a.seqs, &[a.n])?)
            .read(case.words("tables", a.tables, &[a.n_seqs, a.max_blocks])?)
            .baked(Baked(rows))
            .baked(Baked(sizes));
        let split = with_sinks(&case, split, a.sinks, a.n_heads)?;
        let split = match a.scales {
            None => split,
            Some([k, v]) => split.read(case.words("k_scales", k, &cells[..3])?).read(case.words(
                "v_scales",
                v,
                &cells[..3],
            )?),
        };
        launches.push(split.vouch(&case));
        if let Some(scratch) = scratch {
            let n_rows = case.u32("n * n_heads", a.n * a.n_heads)?;
            let combine = self
                .launch("attention_combine_f32", n_rows, BLOCK)?
                .step(a.step)
                .write(y)
                .read(scratch)
                .baked(Baked(sizes.head_dim))
                .baked(Baked(sizes.n_splits))
                .baked(Baked(sizes.n_heads));
            launches.push(with_sinks(&case, combine, a.sinks, a.n_heads)?.vouch(&case));
        }
        Ok(())
    }
}

/// Adds the sinks, or a null pointer, as the next argument.
pub(crate) fn with_sinks(
    case: &OpCase<'_>,
    launch: LaunchBuilder,
    sinks: Option<Buf>,
    n_heads: usize,
) -> Result<LaunchBuilder, KernelError> {
    Ok(match sinks {
        Some(sinks) => launch.read(case.words("sinks", sinks, &[n_heads])?),
        None => launch.null(),
    })
}

/// Sinks of a kernel's argument; empty if it is null.
pub(crate) fn read_sinks(k: &SimKernel<'_>, argument: usize, n_heads: usize) -> KernelResult<Vec<f32>> {
    if k.arg::<u64>(argument)? == 0 { Ok(Vec::new()) } else { k.read(k.ptr(argument)?, n_heads) }
}

/// Weight of a head's sink, relative to the largest score.
fn sink_weight(sinks: &[f32], head: usize, max: f64) -> f64 {
    if sinks.is_empty() { 0.0 } else { (f64::from(sinks[head % sinks.len()]) - max).exp() }
}

fn split_name(head_dim: usize, dtype: DType) -> String {
    format!("attention_split_d{head_dim}_{}", dtype.name().to_ascii_lowercase())
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for size in HEAD_DIMS {
            let params = [P, P, P, P, P, P, P, P, size_of::<RowLayout>(), size_of::<AttentionSizes>(), P];
            let entry =
                KernelEntry::new(KernelFamily::Attention, split_name(size, dtype), &params, move |k| {
                    split(k, dtype)
                });
            all.push(entry.unit(&lowercase(dtype)));
        }
    }
    for size in HEAD_DIMS {
        let params = [P, P, P, P, P, P, P, P, size_of::<RowLayout>(), size_of::<AttentionSizes>(), P, P, P];
        let name = split_name(size, DType::U8);
        let entry = KernelEntry::new(KernelFamily::Attention, name, &params, |k| split(k, DType::U8));
        all.push(entry.unit("u8"));
    }
    let entry =
        KernelEntry::new(KernelFamily::Attention, "attention_combine_f32", &[P, P, W, W, W, P], combine);
    all.push(entry.unit("combine"));
}

/// Rounds the partial result of each split to F32, so that results depend on the division of the context as they do
/// on a GPU.
fn split(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let s: AttentionSizes = k.arg(9)?;
    let [n_heads, head_dim, n_splits] = [s.n_heads as usize, s.head_dim as usize, s.n_splits as usize];
    let n = k.config().grid[0] as usize;
    let q = read_rows(k, k.ptr(2)?, k.arg(8)?, n * n_heads, head_dim)?;
    let pointers = [k.ptr(3)?, k.ptr(4)?, k.ptr(5)?, k.ptr(6)?, k.ptr(7)?];
    let scales_at = if dtype == DType::U8 { Some([k.ptr(11)?, k.ptr(12)?]) } else { None };
    if n_splits == 1 {
        let y = of_rows(k, &s, dtype, &q, pointers, scales_at, &read_sinks(k, 10, n_heads)?)?;
        return k.write(k.ptr(0)?, &y);
    }
    let mut partials = vec![0.0_f32; n * n_heads * n_splits * head_dim];
    let mut scales = vec![[f32::NEG_INFINITY, 0.0]; n * n_heads * n_splits];
    each_head(k, &s, dtype, &q, pointers, scales_at, |head, q, keys, values| {
        let part = (keys.len() / head_dim).div_ceil(n_splits).max(MIN_SPLIT) * head_dim;
        for (split, (keys, values)) in keys.chunks(part).zip(values.chunks(part)).enumerate() {
            let Partial { max, sum, weighted } = attend(&s, q, keys, values);
            let at = head * n_splits + split;
            scales[at] = [max as f32, sum as f32];
            let to = &mut partials[at * head_dim..][..head_dim];
            to.iter_mut().zip(weighted).for_each(|(to, v)| *to = v as f32);
        }
    })?;
    let scratch = k.ptr(1)?;
    k.write(scratch, &partials)?;
    k.write(scratch.add(4 * partials.len() as u64), &scales)
}

/// Attention of query rows; `pointers` are the parameters of keys, values, positions, sequences and tables.
pub(crate) fn unsplit(
    k: &SimKernel<'_>,
    s: &AttentionSizes,
    dtype: DType,
    q: &[f32],
    pointers: [DevicePtr; 5],
    sinks: &[f32],
) -> KernelResult<Vec<f32>> {
    of_rows(k, s, dtype, q, pointers, None, sinks)
}

fn of_rows(
    k: &SimKernel<'_>,
    s: &AttentionSizes,
    dtype: DType,
    q: &[f32],
    pointers: [DevicePtr; 5],
    scales: Option<[DevicePtr; 2]>,
    sinks: &[f32],
) -> KernelResult<Vec<f32>> {
    let mut y = vec![0.0_f32; q.len()];
    each_head(k, s, dtype, q, pointers, scales, |head, q, keys, values| {
        let Partial { max, sum, weighted } = attend(s, q, keys, values);
        let sum = sum + sink_weight(sinks, head, max);
        let to = &mut y[head * q.len()..][..q.len()];
        to.iter_mut().zip(weighted).for_each(|(to, v)| *to = (v / sum) as f32);
    })?;
    Ok(y)
}

/// Calls `with` for each head of each row that has a position: its index over all rows, its query, and the keys and
/// values that it attends to.
fn each_head(
    k: &SimKernel<'_>,
    s: &AttentionSizes,
    dtype: DType,
    q: &[f32],
    pointers: [DevicePtr; 5],
    scales: Option<[DevicePtr; 2]>,
    mut with: impl FnMut(usize, &[f32], &[f32], &[f32]),
) -> KernelResult {
    let [n_heads, head_dim] = [s.n_heads as usize, s.head_dim as usize];
    let n = q.len() / (n_heads * head_dim);
    let [k_cache, v_cache, positions, seqs, tables] = pointers;
    let pages = PageTables {
        tables: k.read(tables, (s.n_seqs * s.max_blocks) as usize)?,
        n_seqs: s.n_seqs as usize,
        max_blocks: s.max_blocks as usize,
        n_blocks: s.n_blocks as usize,
        kv_block: s.kv_block as usize,
    };
    let (positions, seqs) = (k.read::<i32>(positions, n)?, k.read::<i32>(seqs, n)?);
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let kv = Rows1 { s, pages: &pages, seq: seqs[row], position, dtype };
        for kv_head in 0..s.n_kv_heads as usize {
            let [k_scales, v_scales] = scales.map_or([None; 2], |scales| scales.map(Some));
            let keys = kv.read(k, k_cache, k_scales, kv_head)?;
            let values = kv.read(k, v_cache, v_scales, kv_head)?;
            let group = n_heads / s.n_kv_heads as usize;
            for head in row * n_heads + kv_head * group..row * n_heads + (kv_head + 1) * group {
                with(head, &q[head * head_dim..][..head_dim], &keys, &values);
            }
        }
    }
    Ok(())
}

/// The rows of one cache that a position attends to.
struct Rows1<'a> {
    s: &'a AttentionSizes,
    pages: &'a PageTables,
    seq: i32,
    position: usize,
    dtype: DType,
}

impl Rows1<'_> {
    fn read(
        &self,
        k: &SimKernel<'_>,
        cache: DevicePtr,
        scales: Option<DevicePtr>,
        kv_head: usize,
    ) -> KernelResult<Vec<f32>> {
        let head_dim = self.s.head_dim as usize;
        let first = match self.s.window as usize {
            0 => 0,
            window => (self.position + 1).saturating_sub(window),
        };
        let mut out = Vec::with_capacity((self.position + 1 - first) * head_dim);
        for p in first..=self.position {
            let (block, at) = self.pages.find(self.seq, p)?;
            let row = (block * self.s.n_kv_heads as usize + kv_head) * self.pages.kv_block + at;
            let from = cache.add((row * head_dim * self.dtype.block_bytes()) as u64);
            if let Some(scales) = scales {
                let scale = k.view::<f32>(scales.add(4 * row as u64), 1)?[0];
                out.extend(k.view::<u8>(from, head_dim)?.iter().map(|&v| f32::from(v as i8) * scale));
                continue;
            }
            match self.dtype {
                DType::F16 => out.extend(k.view::<f16>(from, head_dim)?.iter().map(|v| v.to_f32())),
                DType::BF16 => out.extend(k.view::<bf16>(from, head_dim)?.iter().map(|v| v.to_f32())),
                _ => out.extend_from_slice(&k.view::<f32>(from, head_dim)?),
            }
        }
        Ok(out)
    }
}

/// Attention over a part of the context, before it is divided by the sum of the weights.
struct Partial {
    /// The largest score, to which weights are relative.
    max: f64,
    /// Sum of the weights.
    sum: f64,
    /// Weighted sum of the values.
    weighted: Vec<f64>,
}

fn attend(s: &AttentionSizes, q: &[f32], keys: &[f32], values: &[f32]) -> Partial {
    let score = |key: &[f32]| {
        let dot: f64 = q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let score = dot * f64::from(s.scale);
        if s.softcap > 0.0 { f64::from(s.softcap) * (score / f64::from(s.softcap)).tanh() } else { score }
    };
    let scores: Vec<f64> = keys.chunks_exact(q.len()).map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let weighted = |i: usize| -> f64 {
        values.chunks_exact(q.len()).zip(&weights).map(|(v, w)| w * f64::from(v[i])).sum()
    };
    Partial { max, sum: weights.iter().sum(), weighted: (0..q.len()).map(weighted).collect() }
}

fn combine(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_rows, head_dim, n_splits) = (k.config().grid[0] as usize, count(k, 2)?, count(k, 3)?);
    let sinks = read_sinks(k, 5, count(k, 4)?)?;
    let scratch = k.ptr(1)?;
    let partials: Vec<f32> = k.read(scratch, n_rows * n_splits * head_dim)?;
    let scales: Vec<[f32; 2]> = k.read(scratch.add(4 * partials.len() as u64), n_rows * n_splits)?;
    let mut y = vec![0.0_f32; n_rows * head_dim];
    for row in 0..n_rows {
        let scales = &scales[row * n_splits..][..n_splits];
        let max = scales.iter().map(|s| s[0]).fold(f32::NEG_INFINITY, f32::max);
        if scales.iter().all(|s| s[1] == 0.0) {
            continue;
        }
        let weights: Vec<f64> = scales.iter().map(|s| (f64::from(s[0]) - f64::from(max)).exp()).collect();
        let total: f64 = scales.iter().zip(&weights).map(|(s, w)| w * f64::from(s[1])).sum();
        let total = total + sink_weight(&sinks, row, f64::from(max));
        for i in 0..head_dim {
            let at = |split: usize| f64::from(partials[(row * n_splits + split) * head_dim + i]);
            y[row * head_dim + i] = ((0..n_splits).map(|s| weights[s] * at(s)).sum::<f64>() / total) as f32;
        }
    }
    k.write(k.ptr(0)?, &y)
}
