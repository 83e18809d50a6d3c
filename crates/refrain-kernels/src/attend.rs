//! Decode attention in one launch: everything between the QKV projection and the output projection.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Attention, Op, Rope, RopeStyle};
use refrain_tensor::DType;

use crate::attention;
use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::kv::{PageSizes, PageTables, append};
use crate::load::Kernels;
use crate::narrow::{Narrow, Narrowed};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::tuning::AttendTuning;
use crate::twin::{Dense, fault, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Threads per block.
const BLOCK: u32 = 256;
const N_WARPS: u32 = BLOCK / 32;
/// Head sizes with a kernel, each for sizes up to it, and the maximum number of query heads per block.
const SIZES: [(usize, usize); 4] = [(64, 8), (128, 8), (256, 4), (512, 2)];
/// Numbers of query heads with a kernel, each for counts up to it.
const HEADS: [usize; 3] = [2, 4, 8];
/// Up to this context length, one block per head is enough. Beyond it, the kernel chooses by the actual
/// length.
const ALONE: usize = 128;
/// Counters per row and block of heads, one for each merging warp.
const COUNTERS: usize = 8;
/// Merging more splits than this costs more than it gains.
const MAX_SPLITS: usize = 128;
/// Maximum number of rows of [`Kernels::attend`].
pub const MAX_ATTEND_ROWS: usize = 1024;

/// Arguments for fused norm, RoPE, KV append and attention. Each row is the newest of its own sequence.
/// Combines [`crate::RmsNormArgs`] of queries and keys, [`crate::RopeKvArgs`] and [`crate::AttentionArgs`].
#[derive(Clone, Copy, Debug)]
pub struct AttendArgs<'a> {
    /// Rotated pairs, their number and the magnitude factor.
    pub rope: Rope,
    /// Scale, window and soft cap.
    pub attention: Attention,
    /// `[n, n_heads, head_dim]` F32; each head is contiguous.
    pub q: BufView,
    /// Keys and values, each `[n, n_kv_heads, head_dim]` F32; each head is contiguous. `None` if an earlier
    /// launch of the step has already appended them to the caches.
    pub kv: Option<[BufView; 2]>,
    /// RMS norm of each head. It applies to queries and keys before RoPE, and to values.
    pub norm: Option<AttendNorm>,
    /// `[n_heads]` F32: a score of each head that has no value; `None` for none.
    pub sinks: Option<Buf>,
    /// `[n, n_heads, head_dim]` F32.
    pub y: Buf,
    /// 16-bit copy of `y`, and whether `y` itself is written as well.
    pub narrow: Option<Narrow>,
    /// `[n_blocks, n_kv_heads, kv_block, head_dim]`, updated in place.
    pub k_cache: Buf,
    /// Like `k_cache`.
    pub v_cache: Buf,
    /// F16, BF16 or F32.
    pub cache_dtype: DType,
    /// `[n]` I32, read at run time.
    pub positions: Buf,
    /// `[n]` I32, read at run time; distinct for all rows that are not padding.
    pub seqs: Buf,
    /// `[n_seqs, max_blocks]` I32, read at run time.
    pub tables: Buf,
    /// `[n_dims / 2]` F32; constant during a step.
    pub inv_freq: Buf,
    /// Scratch of [`attend_scratch_bytes`] bytes; keeps nothing between launches. Unused when `n_splits` is
    /// 1.
    pub scratch: Option<Buf>,
    /// [`attend_counter_bytes`] bytes, zero before the first launch; every launch leaves them zero. Launches
    /// that may run concurrently need separate counters; others can share them. Unused when `n_splits` is 1.
    pub counters: Option<Buf>,
    /// Number of rows, at most [`MAX_ATTEND_ROWS`].
    pub n: usize,
    /// Query heads, a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV blocks of a cache.
    pub n_blocks: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Positions per KV block: a power of two, at least 16.
    pub kv_block: usize,
    /// Elements per head: a multiple of 8, at most 512.
    pub head_dim: usize,
    /// Rows of the block tables.
    pub n_seqs: usize,
    /// Columns of the block tables.
    pub max_blocks: usize,
    /// Splits per head, a power of two, at most 128; [`attend_splits`] chooses a good number.
    pub n_splits: usize,
    /// Launches at least one block per SM, some of which may have no work. The matmuls around this launch
    /// count on one block per SM, each taking half of it. If this launch occupied only some SMs, the next
    /// matmul would start with two blocks on some SMs and none on others, and so would all matmuls after it.
    /// If this launch has more blocks than SMs, the next launch waits for its end.
    pub fills: bool,
    /// Prefetches as much of the caches as shared memory holds, because the previous launch reads for long
    /// enough to hide it. Otherwise two thirds are prefetched: more would delay the loads that follow the
    /// dependency wait, queries first.
    pub early: bool,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Norm weights of [`AttendArgs`].
#[derive(Clone, Copy, Debug)]
pub struct AttendNorm {
    /// `[head_dim]` F32; constant during a step.
    pub q: Buf,
    /// Like `q`; `None` if keys are not normalised here.
    pub k: Option<Buf>,
    /// Like `q`; `None` if values are not normalised.
    pub v: Option<Buf>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Returns the number of splits per KV head that fills `n_sms` SMs, for contexts of up to `max_len`
/// positions.
#[must_use]
pub fn attend_splits(n: usize, n_kv_heads: usize, max_len: usize, n_sms: u32) -> usize {
    // A single block keeps an SM busy with its loads in flight. With several rows there are two blocks per
    // SM, since rows differ in length: blocks that a short row does not need end at once.
    let slots = if n > 1 { 2 * n_sms as usize } else { n_sms as usize };
    let filling = (slots / (n * n_kv_heads).max(1)).clamp(1, MAX_SPLITS);
    // The largest power of two up to it.
    if max_len <= ALONE { 1 } else { 1 << filling.ilog2() }
}

/// Scratch size of [`Kernels::attend`].
#[must_use]
pub fn attend_scratch_bytes(n: usize, n_heads: usize, head_dim: usize, n_splits: usize) -> u64 {
    if n_splits <= 1 {
        return 0;
    }
    // Every four elements carry a maximum and a sum, plus two spare words.
    [n, n_heads, n_splits, head_dim / 4 * 8].iter().fold(4, |bytes: u64, &n| bytes.saturating_mul(n as u64))
}

/// Size of the counters of [`Kernels::attend`]; they must be zero before the first launch.
#[must_use]
pub fn attend_counter_bytes(n: usize, n_heads: usize, n_splits: usize) -> u64 {
    if n_splits <= 1 {
        return 0;
    }
    // The number of head blocks never exceeds the number of heads.
    4 * (COUNTERS as u64).saturating_mul(n as u64).saturating_mul(n_heads as u64)
}

/// Kernel parameters.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct AttendParams {
    n_heads: u32,
    /// Query heads of one KV head per block.
    per_block: u32,
    /// `n_splits` is `1 << splits_shift`.
    splits_shift: u32,
    /// Attention window in positions; 0 means unlimited.
    window: u32,
    scale: f32,
    /// Soft cap of the scores; 0 for none.
    softcap: f32,
    n_dims: u32,
    interleaved: u32,
    magnitude: f32,
    eps: f32,
    kv_shift: u32,
    alone: u32,
    early: u32,
    warp_bytes: u32,
    narrow_bf16: u32,
    narrow_rows: u32,
    pages: PageSizes,
}

impl Kernels {
    /// Builds the launch for [`AttendArgs`]. Without a norm, the cache entries equal those of
    /// [`Kernels::rope_kv`] bit for bit. On a GPU, a sequence or block out of range is neither written nor
    /// attended to. The simulated device faults on it, on counters that are not zero, and on two rows of one
    /// sequence.
    pub fn attend(&self, a: &AttendArgs<'_>) -> Result<Launch, KernelError> {
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
        let case = OpCase { op: "attend", dtype: a.cache_dtype, shape: &shape };
        case.sizes()?;
        let (size, per_block) = check(&case, a)?;
        let cells = [a.n_blocks, a.n_kv_heads, a.kv_block, a.head_dim];
        let (q, q_rows) = case.rows("q", &a.q, a.n.saturating_mul(a.n_heads), a.head_dim)?;
        let rows = |name, view: &BufView| case.rows(name, view, a.n.saturating_mul(a.n_kv_heads), a.head_dim);
        let kv = match &a.kv {
            Some([k, v]) => Some([rows("k", k)?, rows("v", v)?]),
            None => None,
        };
        let n_groups = a.n_kv_heads * (a.n_heads / a.n_kv_heads).div_ceil(per_block);
        let blocks = a.n_splits * n_groups;
        let (blocks, alone) = grid_blocks(blocks, a.n, a.fills, self.card().n_sms);
        let grid = [case.u32("blocks", blocks)?, a.n as u32, 1];
        let warp_bytes = warp_bytes(self.card(), size, heads_of(per_block), a.cache_dtype);
        let sizes = sizes(&case, a, per_block, alone, warp_bytes)?;
        let launch = self.launch(&name(size, per_block, a.cache_dtype), grid, BLOCK)?;
        let launch = launch.shared(N_WARPS * warp_bytes);
        let launch = match a.narrow {
            Some(Narrow { also_wide: false, .. }) => launch.step(a.step).null(),
            _ => launch.step(a.step).write(case.words("y", a.y, &[a.n, a.n_heads, a.head_dim])?),
        };
        let launch = match (a.n_splits, a.scratch, a.counters) {
            (1, ..) => launch.null().null(),
            (_, Some(scratch), Some(counters)) => {
                let bytes = attend_scratch_bytes(a.n, a.n_heads, a.head_dim, a.n_splits);
                launch
                    .read_write(case.buf("scratch", scratch, usize::try_from(bytes).ok(), 16)?)
                    .read_write(case.words("counters", counters, &[a.n, n_groups, COUNTERS])?)
            }
            _ => return Err(case.refuse("more than one split needs scratch and counters".to_owned())),
        };
        let (k_cache, v_cache) =
            (case.cache("k_cache", a.k_cache, cells)?, case.cache("v_cache", a.v_cache, cells)?);
        let launch = match kv {
            Some([(k, _), (v, _)]) => launch.read_write(k_cache).read_write(v_cache).read(q).read(k).read(v),
            None => launch.read(k_cache).read(v_cache).read(q).null().null(),
        };
        let launch = launch
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("seqs", a.seqs, &[a.n])?)
            .read(case.words("tables", a.tables, &[a.n_seqs, a.max_blocks])?)
            .read(case.words("inv_freq", a.inv_freq, &[a.rope.n_dims / 2])?);
        let norms = [
            ("the norm of queries", a.norm.map(|norm| norm.q)),
            ("the norm of keys", a.norm.and_then(|norm| norm.k)),
            ("the norm of values", a.norm.and_then(|norm| norm.v)),
        ];
        let mut launch = launch;
        for (name, norm) in norms {
            launch = match norm {
                Some(norm) => launch.read(case.words(name, norm, &[a.head_dim])?),
                None => launch.null(),
            };
        }
        let launch = match a.narrow {
            None => launch.null(),
            Some(narrow) => launch.write(narrow.check(&case, a.n, a.n_heads * a.head_dim)?),
        };
        let [k_rows, v_rows] = kv.map_or([q_rows; 2], |kv| kv.map(|(_, rows)| rows));
        let launch = launch.baked(Baked(q_rows)).baked(Baked(k_rows)).baked(Baked(v_rows));
        let launch = attention::with_sinks(&case, launch.baked(Baked(sizes)), a.sinks, a.n_heads)?;
        Ok(launch.vouch(&case))
    }
}

/// Returns the number of blocks for each of `n` rows, and whether the next launch must wait for this one to
/// end; see [`AttendArgs::fills`].
fn grid_blocks(blocks: usize, n: usize, fills: bool, n_sms: usize) -> (usize, bool) {
    let grid_blocks = if fills && n == 1 { blocks.max(n_sms) } else { blocks };
    (grid_blocks, fills && grid_blocks * n != n_sms)
}

/// Returns the head size of the kernel for these heads, and the number of heads per block.
fn check(case: &OpCase<'_>, a: &AttendArgs<'_>) -> Result<(usize, usize), KernelError> {
    crate::require!(case, a.cache_dtype.is_float(), "the cache must be F16, BF16 or F32");
    crate::require!(case, a.n <= MAX_ATTEND_ROWS, "the kernel takes at most {MAX_ATTEND_ROWS} rows");
    crate::require!(
        case,
        a.n_heads.is_multiple_of(a.n_kv_heads),
        "heads must be in groups of {}",
        a.n_kv_heads
    );
    crate::require!(
        case,
        a.n_splits.is_power_of_two() && a.n_splits <= MAX_SPLITS,
        "n_splits must be a power of two, at most {MAX_SPLITS}"
    );
    crate::require!(
        case,
        a.kv_block.is_power_of_two() && a.kv_block >= 16,
        "kv_block must be a power of two, at least 16"
    );
    let n_dims = a.rope.n_dims;
    crate::require!(
        case,
        n_dims.is_multiple_of(2) && n_dims > 0 && n_dims <= a.head_dim,
        "n_dims is {n_dims}, must be even and at most {}",
        a.head_dim
    );
    let found = SIZES.into_iter().find(|&(d, _)| a.head_dim <= d && a.head_dim.is_multiple_of(8));
    let (size, max_heads) =
        found.ok_or_else(|| case.refuse("head_dim must be a multiple of 8, at most 512".to_owned()))?;
    let group = a.n_heads / a.n_kv_heads;
    Ok((size, group.div_ceil(group.div_ceil(max_heads))))
}

fn sizes(
    case: &OpCase<'_>,
    a: &AttendArgs<'_>,
    per_block: usize,
    alone: bool,
    warp_bytes: u32,
) -> Result<AttendParams, KernelError> {
    let window = a.attention.window.map_or(Ok(0), |w| case.u32("window", w.clamp(1, i32::MAX as usize)))?;
    Ok(AttendParams {
        n_heads: a.n_heads as u32,
        per_block: per_block as u32,
        splits_shift: a.n_splits.trailing_zeros(),
        window,
        scale: a.attention.scale,
        softcap: a.attention.softcap.unwrap_or(0.0),
        n_dims: a.rope.n_dims as u32,
        interleaved: u32::from(a.rope.style == RopeStyle::Interleaved),
        magnitude: a.rope.magnitude,
        eps: a.norm.map_or(0.0, |norm| norm.eps),
        kv_shift: a.kv_block.trailing_zeros(),
        alone: u32::from(alone),
        early: u32::from(a.early),
        warp_bytes,
        narrow_bf16: u32::from(a.narrow.is_some_and(|narrow| narrow.dtype == DType::BF16)),
        narrow_rows: a.narrow.map_or(0, |narrow| narrow.plane_rows as u32),
        pages: PageSizes {
            n_blocks: a.n_blocks as u32,
            n_kv_heads: a.n_kv_heads as u32,
            kv_block: a.kv_block as u32,
            head_dim: a.head_dim as u32,
            n_seqs: a.n_seqs as u32,
            max_blocks: a.max_blocks as u32,
        },
    })
}

/// Returns the `HEADS` entry that covers this many heads per block.
fn heads_of(per_block: usize) -> usize {
    HEADS.into_iter().find(|&h| per_block <= h).unwrap_or(per_block)
}

fn name(size: usize, per_block: usize, dtype: DType) -> String {
    format!("attend_d{size}_h{}_{}", heads_of(per_block), lowercase(dtype))
}

/// Shared memory per warp in bytes: the ring, which the partial results overwrite later, or the partial
/// results alone.
fn warp_bytes(card: &Card, size: usize, heads: usize, dtype: DType) -> u32 {
    let AttendTuning { ring_bytes, small_ring_bytes, large_shared_bytes } = card.tuning.attend;
    let ring = if card.shared_limit >= large_shared_bytes { ring_bytes } else { small_ring_bytes };
    (if dtype != DType::F32 && size <= 128 { ring } else { 4 * heads * size }) as u32
}

/// Every kernel: cache dtype, head size and heads per block.
fn all_kernels() -> impl Iterator<Item = (DType, usize, usize)> {
    [DType::F16, DType::BF16, DType::F32].into_iter().flat_map(|dtype| {
        SIZES.into_iter().flat_map(move |(size, max_heads)| {
            HEADS.into_iter().filter(move |&h| h <= max_heads).map(move |heads| (dtype, size, heads))
        })
    })
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    let params = [P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, R, R, R, size_of::<AttendParams>(), P];
    for (dtype, size, heads) in all_kernels() {
        let name = name(size, heads, dtype);
        let entry = KernelEntry::new(KernelFamily::Attend, name, &params, move |k| twin(k, dtype));
        let shared = move |card: &Card| N_WARPS * warp_bytes(card, size, heads, dtype);
        all.push(entry.unit(&format!("d{size}_{}", lowercase(dtype))).shared(shared));
    }
}

/// Runs the four ops one after the other.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let s = k.arg::<AttendParams>(19)?;
    let n = k.config().grid[1] as usize;
    let [n_heads, n_kv_heads, head_dim] =
        [s.n_heads, s.pages.n_kv_heads, s.pages.head_dim].map(|n| n as usize);
    check_state(k, n, &s)?;
    read_early(k, n, &s, dtype)?;
    let positions = Dense::read(k, k.ptr(8)?, DType::I32, &[n])?;
    let inv_freq = Dense::read(k, k.ptr(11)?, DType::F32, &[s.n_dims as usize / 2])?;
    let style = if s.interleaved == 0 { RopeStyle::Neox } else { RopeStyle::Interleaved };
    let rope = Op::Rope(Rope { style, n_dims: s.n_dims as usize, magnitude: s.magnitude });
    let normed = |k: &SimKernel<'_>, [x, norm, rows]: [usize; 3], heads: usize| {
        let x = read_rows(k, k.ptr(x)?, k.arg(rows)?, n * heads, head_dim)?;
        if k.arg::<u64>(norm)? == 0 {
            return Ok(x);
        }
        let dims = [n, heads, head_dim];
        let w = Dense::read(k, k.ptr(norm)?, DType::F32, &[head_dim])?;
        run_f32(&Op::RmsNorm { eps: s.eps }, &[&Dense::f32(&x, &dims)?, &w], &dims)
    };
    let rotated = |x: Vec<f32>, heads: usize| {
        let dims = [n, heads, head_dim];
        run_f32(&rope, &[&Dense::f32(&x, &dims)?, &positions, &inv_freq], &dims)
    };
    let q = rotated(normed(k, [5, 12, 16], n_heads)?, n_heads)?;
    let pointers = [k.ptr(8)?, k.ptr(9)?, k.ptr(10)?];
    if k.arg::<u64>(6)? != 0 {
        let keys = rotated(normed(k, [6, 13, 17], n_kv_heads)?, n_kv_heads)?;
        let values = normed(k, [7, 14, 18], n_kv_heads)?;
        let caches = [(k.ptr(3)?, keys.as_slice()), (k.ptr(4)?, values.as_slice())];
        append(k, dtype, &caches, pointers, n, &s.pages)?;
    }
    let sizes = attention::AttentionSizes {
        n_heads: s.n_heads,
        n_kv_heads: s.pages.n_kv_heads,
        head_dim: s.pages.head_dim,
        n_blocks: s.pages.n_blocks,
        kv_block: s.pages.kv_block,
        n_seqs: s.pages.n_seqs,
        max_blocks: s.pages.max_blocks,
        n_splits: 1,
        window: s.window,
        scale: s.scale,
        softcap: s.softcap,
    };
    let [positions, seqs, tables] = pointers;
    let sinks = attention::read_sinks(k, 20, n_heads)?;
    let pointers = [k.ptr(3)?, k.ptr(4)?, positions, seqs, tables];
    let y = attention::unsplit(k, &sizes, dtype, &q, pointers, &sinks)?;
    let dtype = if s.narrow_bf16 != 0 { DType::BF16 } else { DType::F16 };
    let to = Narrowed { dtype, n_cols: n_heads * head_dim, plane_rows: s.narrow_rows as usize };
    if k.arg::<u64>(15)? == 0 { k.write(k.ptr(0)?, &y) } else { to.write(k, &y, 15, Some(0)) }
}

/// Marks what the kernel reads before its dependency wait: weights, and the caches before each row's own
/// position. It also reads positions, sequences and tables early, but only as a guess: after the wait it
/// discards cache loads that do not match them.
fn read_early(k: &mut SimKernel<'_>, n: usize, s: &AttendParams, dtype: DType) -> KernelResult {
    let [n_kv_heads, head_dim, kv_block] =
        [s.pages.n_kv_heads, s.pages.head_dim, s.pages.kv_block].map(|n| n as usize);
    let pages = PageTables {
        tables: k.read(k.ptr(10)?, (s.pages.n_seqs * s.pages.max_blocks) as usize)?,
        n_seqs: s.pages.n_seqs as usize,
        max_blocks: s.pages.max_blocks as usize,
        n_blocks: s.pages.n_blocks as usize,
        kv_block,
    };
    let (positions, seqs) = (k.read::<i32>(k.ptr(8)?, n)?, k.read::<i32>(k.ptr(9)?, n)?);
    let caches = [k.ptr(3)?, k.ptr(4)?];
    k.before_wait(|k| {
        k.view::<f32>(k.ptr(11)?, s.n_dims as usize / 2)?;
        for norm in [k.ptr(12)?, k.ptr(13)?, k.ptr(14)?] {
            if norm.0 != 0 {
                k.view::<f32>(norm, head_dim)?;
            }
        }
        for (&position, &seq) in positions.iter().zip(&seqs).filter(|(position, _)| **position > 0) {
            let end = position as usize;
            let begin = if s.window == 0 { 0 } else { (end + 1).saturating_sub(s.window as usize) };
            for column in begin / kv_block..end.div_ceil(kv_block) {
                let (from, to) = (begin.max(column * kv_block), end.min((column + 1) * kv_block));
                if from >= to {
                    continue;
                }
                let (block, at) = pages.find(seq, from)?;
                for row in (0..n_kv_heads).map(|head| (block * n_kv_heads + head) * kv_block + at) {
                    let row_bytes = head_dim * dtype.block_bytes();
                    for cache in caches {
                        k.view::<u8>(cache.add((row * row_bytes) as u64), (to - from) * row_bytes)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// Checks what the kernel assumes but cannot check.
fn check_state(k: &SimKernel<'_>, n: usize, s: &AttendParams) -> KernelResult {
    let (positions, seqs) = (k.read::<i32>(k.ptr(8)?, n)?, k.read::<i32>(k.ptr(9)?, n)?);
    let rows: Vec<usize> = (0..n).filter(|&i| positions[i] >= 0).collect();
    if let Some(i) = (1..rows.len()).find(|&i| rows[..i].iter().any(|&j| seqs[j] == seqs[rows[i]])) {
        return Err(fault(format!("two rows belong to sequence {}", seqs[rows[i]])));
    }
    if k.arg::<u64>(2)? != 0 {
        let n_groups = s.pages.n_kv_heads * (s.n_heads / s.pages.n_kv_heads).div_ceil(s.per_block);
        let counters: Vec<u32> = k.read(k.ptr(2)?, n * n_groups as usize * COUNTERS)?;
        if let Some(i) = counters.iter().position(|&c| c != 0) {
            return Err(fault(format!("counter {i} is {} before the launch, must be 0", counters[i])));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Card, N_WARPS, all_kernels, grid_blocks, warp_bytes};
    use crate::load::GpuArch;
    use crate::tuning::Tuning;

    #[test]
    fn rings_leave_space_for_static_shared_memory_on_every_tuned_gpu() {
        for kib in [99, 163, 227] {
            let card = Card::with_shared(kib << 10, Tuning::of(GpuArch { major: 9, minor: 0 }));
            for (dtype, size, heads) in all_kernels() {
                // Queries, key and value in f32, queries in two parts, the warps' partial results, and a
                // margin.
                let declared = 4 * (heads + 2) * size + 64 * size + 2048;
                let dynamic = (N_WARPS * warp_bytes(&card, size, heads, dtype)) as usize;
                let name = super::name(size, heads, dtype);
                assert!(
                    dynamic + declared <= card.shared_limit,
                    "{name}: {dynamic} and {declared} bytes of {kib} KiB"
                );
            }
        }
    }

    #[test]
    fn a_row_has_a_block_on_every_sm_or_the_next_launch_waits() {
        assert_eq!(grid_blocks(128, 1, true, 132), (132, false));
        assert_eq!(grid_blocks(132, 1, true, 132), (132, false));
        assert_eq!(grid_blocks(256, 1, true, 132), (256, true));
        assert_eq!(grid_blocks(66, 2, true, 132), (66, false));
        assert_eq!(grid_blocks(32, 2, true, 132), (32, true));
        assert_eq!(grid_blocks(8, 1, false, 132), (8, false));
    }
}
