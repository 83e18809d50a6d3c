//! Prefill attention over the paged cache, on tensor cores.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Launch};
use refrain_graph::{Attention, Op};
use refrain_tensor::DType;

use crate::attention::{AttentionArgs, with_sinks};
use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::gemm::GEMM_DTYPES;
use crate::load::Kernels;
use crate::narrow::{Narrow, aligned};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::twin::{Dense, read_rows, run_f32};
use crate::view::RowLayout;
use crate::vouch::Vouch;

/// Rows and threads per block, as in `flash.cu`.
const ROWS: usize = 64;
const BLOCK: u32 = 128;
/// Head sizes with a kernel, each for sizes up to it.
const HEAD_DIMS: [usize; 5] = [64, 96, 128, 256, 512];
/// Maximum number of output columns per block.
const MAX_OUT: usize = 256;
/// Bytes of the structure that follows the tiles in shared memory.
const SHARED: usize = 2072;
/// Maximum number of blocks that share the sequences of a tile.
const MAX_SHARES: usize = 16;
/// Blocks of a launch, beyond which sharing gains nothing: many of them find no sequence to walk for.
const MANY_BLOCKS: usize = 4096;

/// Kernel parameters.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct FlashSizes {
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    n_blocks: u32,
    kv_block: u32,
    n_seqs: u32,
    max_blocks: u32,
    n: u32,
    /// Attention window in positions; 0 means unlimited.
    window: u32,
    scale: f32,
    /// Soft cap of the scores; 0 for none.
    softcap: f32,
    /// 16-bit output: 1 for F16, 2 for BF16, 0 for none.
    narrow: u32,
    /// Blocks that share the sequences of a tile of rows.
    n_shares: u32,
}

fn shared_bytes(size: usize) -> u32 {
    let out = size.min(MAX_OUT);
    (2 * ROWS * (2 * size + 16) + ROWS * (2 * out + 16) + SHARED) as u32
}

/// Whether the shared memory of a block suffices for the kernel of a head size; the kernel declares no static
/// shared memory.
fn fits(card: &Card, size: usize) -> bool {
    shared_bytes(size) as usize <= card.shared_limit
}

fn size_for(head_dim: usize) -> Option<usize> {
    HEAD_DIMS.into_iter().find(|&d| head_dim <= d && head_dim.is_multiple_of(16))
}

impl Kernels {
    /// Whether [`Kernels::flash`] supports this head size and cache dtype on this GPU.
    #[must_use]
    pub fn has_flash(&self, cache_dtype: DType, head_dim: usize) -> bool {
        let size = size_for(head_dim).filter(|_| GEMM_DTYPES.contains(&cache_dtype));
        size.is_some_and(|size| fits(self.card(), size))
    }

    /// Builds the launch for [`AttentionArgs`] with many rows; splits and scratch are unused. Queries and
    /// softmax weights are rounded to the cache's dtype. With `narrow`, the output is 16-bit, plus F32 if
    /// `narrow` requests it.
    pub fn flash(&self, a: &AttentionArgs<'_>, narrow: Option<&Narrow>) -> Result<Launch, KernelError> {
        let shape = [
            ("n", a.n),
            ("n_heads", a.n_heads),
            ("head_dim", a.head_dim),
            ("n_blocks", a.n_blocks),
            ("n_kv_heads", a.n_kv_heads),
            ("kv_block", a.kv_block),
            ("n_seqs", a.n_seqs),
            ("max_blocks", a.max_blocks),
        ];
        let case = OpCase { op: "flash", dtype: a.cache_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, GEMM_DTYPES.contains(&a.cache_dtype), "the cache must be F16 or BF16");
        let is_dense = narrow.is_none_or(|narrow| narrow.plane_rows == 0);
        crate::require!(case, is_dense, "16-bit rows must be contiguous");
        let size = size_for(a.head_dim);
        let size =
            size.ok_or_else(|| case.refuse("head_dim must be a multiple of 16, at most 512".to_owned()))?;
        crate::require!(
            case,
            a.n_heads.is_multiple_of(a.n_kv_heads),
            "heads must be in groups of {}",
            a.n_kv_heads
        );
        let n_tiles = a.n.div_ceil(ROWS);
        crate::require!(case, n_tiles <= 65_535, "at most {} rows fit in one launch", 65_535 * ROWS);
        let context = a.max_blocks.saturating_mul(a.kv_block);
        case.u32("the context", context)?;
        let cells = [a.n_blocks, a.n_kv_heads, a.kv_block, a.head_dim];
        let (q, rows) = aligned(&case, "q", &a.q, a.n.saturating_mul(a.n_heads), a.head_dim)?;
        let window =
            a.attention.window.map_or(Ok(0), |w| case.u32("window", w.clamp(1, i32::MAX as usize)))?;
        let parts = size.div_ceil(MAX_OUT);
        let n_unshared = (a.n_heads * n_tiles * parts).max(1);
        let n_shares = (MANY_BLOCKS / n_unshared).clamp(1, MAX_SHARES.min(a.n_seqs.max(1))) as u32;
        let sizes = FlashSizes {
            n_heads: a.n_heads as u32,
            n_kv_heads: a.n_kv_heads as u32,
            head_dim: a.head_dim as u32,
            n_blocks: a.n_blocks as u32,
            kv_block: a.kv_block as u32,
            n_seqs: a.n_seqs as u32,
            max_blocks: a.max_blocks as u32,
            n: a.n as u32,
            window,
            scale: a.attention.scale,
            softcap: a.attention.softcap.unwrap_or(0.0),
            narrow: narrow.map_or(0, |n| if n.dtype == DType::F16 { 1 } else { 2 }),
            n_shares,
        };
        let n_values = [a.n, a.n_heads, a.head_dim].iter().try_fold(1_usize, |x, &y| x.checked_mul(y));
        let bytes_of = |size: usize| n_values.and_then(|n| n.checked_mul(size));
        let mut launch = self
            .launch(
                &name(size, a.cache_dtype),
                [a.n_heads as u32, n_tiles as u32, parts as u32 * n_shares],
                BLOCK,
            )?
            .step(a.step)
            .shared(shared_bytes(size));
        launch = match narrow {
            Some(narrow) if !narrow.also_wide => launch.null(),
            Some(_) | None => launch.write(case.buf("y", a.y, bytes_of(4), 8)?),
        };
        launch = match narrow {
            Some(narrow) => {
                crate::require!(
                    case,
                    GEMM_DTYPES.contains(&narrow.dtype),
                    "the 16-bit output must be F16 or BF16"
                );
                launch.write(case.buf("narrow y", narrow.y, bytes_of(2), 16)?)
            }
            None => launch.null(),
        };
        let launch = launch
            .read(q)
            .read(case.cache("k_cache", a.k_cache, cells)?)
            .read(case.cache("v_cache", a.v_cache, cells)?)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("seqs", a.seqs, &[a.n])?)
            .read(case.words("tables", a.tables, &[a.n_seqs, a.max_blocks])?)
            .baked(Baked(rows))
            .baked(Baked(sizes));
        Ok(with_sinks(&case, launch, a.sinks, a.n_heads)?.vouch(&case))
    }
}

fn name(size: usize, dtype: DType) -> String {
    format!("flash_d{size}_{}", lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in GEMM_DTYPES {
        for size in HEAD_DIMS {
            let params = [P, P, P, P, P, P, P, P, size_of::<RowLayout>(), size_of::<FlashSizes>(), P];
            let entry =
                KernelEntry::new(KernelFamily::Flash, name(size, dtype), &params, move |k| twin(k, dtype));
            let shared = move |card: &Card| if fits(card, size) { shared_bytes(size) } else { 0 };
            all.push(entry.unit(&format!("d{size}_{}", lowercase(dtype))).shared(shared));
        }
    }
}

/// Runs the reference implementation over both caches in full.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let s: FlashSizes = k.arg(9)?;
    let [n, n_heads, head_dim] = [s.n, s.n_heads, s.head_dim].map(|n| n as usize);
    let cells = [s.n_blocks, s.n_kv_heads, s.kv_block, s.head_dim].map(|n| n as usize);
    let [n_seqs, max_blocks] = [s.n_seqs, s.max_blocks].map(|n| n as usize);
    let dims = [n, n_heads, head_dim];
    let q = Dense::f32(&read_rows(k, k.ptr(2)?, k.arg(8)?, n * n_heads, head_dim)?, &dims)?;
    let mut inputs = vec![
        q,
        Dense::read(k, k.ptr(3)?, dtype, &cells)?,
        Dense::read(k, k.ptr(4)?, dtype, &cells)?,
        Dense::read(k, k.ptr(5)?, DType::I32, &[n])?,
        Dense::read(k, k.ptr(6)?, DType::I32, &[n])?,
        Dense::read(k, k.ptr(7)?, DType::I32, &[n_seqs, max_blocks])?,
    ];
    if k.arg::<u64>(10)? != 0 {
        inputs.push(Dense::read(k, k.ptr(10)?, DType::F32, &[n_heads])?);
    }
    let some = |on: bool| on.then_some(());
    let attention = Attention {
        scale: s.scale,
        window: some(s.window > 0).map(|()| s.window as usize),
        softcap: some(s.softcap > 0.0).map(|()| s.softcap),
    };
    let y = run_f32(&Op::Attention(attention), &inputs.iter().collect::<Vec<_>>(), &dims)?;
    let (wide, narrow) = (k.ptr(0)?, k.ptr(1)?);
    if wide != DevicePtr(0) {
        k.write(wide, &y)?;
    }
    match s.narrow {
        1 => k.write(narrow, &y.into_iter().map(f16::from_f32).collect::<Vec<_>>()),
        2 => k.write(narrow, &y.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => Ok(()),
    }
}
