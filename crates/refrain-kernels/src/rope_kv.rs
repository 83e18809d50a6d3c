//! RoPE and KV append in one launch: everything between the QKV projection and attention.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, Rope, RopeStyle};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::kv::{PageSizes, append};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P};
use crate::source::KernelFamily;
use crate::twin::{Dense, fault, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Fuses [`crate::RopeArgs`] of queries and keys with [`crate::KvAppendArgs`] of rotated keys and values.
#[derive(Clone, Copy, Debug)]
pub struct RopeKvArgs<'a> {
    /// Rotated pairs, their number and the magnitude factor.
    pub rope: Rope,
    /// `[n, n_heads, head_dim]` F32; each head is contiguous.
    pub q: BufView,
    /// `[n, n_kv_heads, head_dim]` F32; each head is contiguous.
    pub k: BufView,
    /// Like `k`.
    pub v: BufView,
    /// `[n, n_heads, head_dim]` F32; may alias `q` if that is contiguous, and overlaps nothing else.
    pub q_out: Buf,
    /// `[n, n_kv_heads, head_dim]` F32; may alias `k` if that is contiguous, and overlaps nothing else.
    pub k_out: Buf,
    /// `[n_blocks, n_kv_heads, kv_block, head_dim]`, updated in place.
    pub k_cache: Buf,
    /// Like `k_cache`.
    pub v_cache: Buf,
    /// F16, BF16 or F32.
    pub cache_dtype: DType,
    /// `[n]` I32, read at run time.
    pub positions: Buf,
    /// `[n]` I32, read at run time.
    pub seqs: Buf,
    /// `[n_seqs, max_blocks]` I32, read at run time.
    pub tables: Buf,
    /// `[n_dims / 2]` F32.
    pub inv_freq: Buf,
    /// Number of rows.
    pub n: usize,
    /// Query heads per row.
    pub n_heads: usize,
    /// KV blocks of a cache.
    pub n_blocks: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Positions per KV block.
    pub kv_block: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Rows of the block tables.
    pub n_seqs: usize,
    /// Columns of the block tables.
    pub max_blocks: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Kernel parameters.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct RopeKvSizes {
    n: u32,
    n_heads: u32,
    n_dims: u32,
    magnitude: f32,
    pages: PageSizes,
}

const BLOCK: u32 = 128;

impl Kernels {
    /// Builds the launch for [`RopeKvArgs`]; the results equal those of the four separate launches bit for
    /// bit.
    pub fn rope_kv(&self, a: &RopeKvArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [
            ("n", a.n),
            ("n_heads", a.n_heads),
            ("n_blocks", a.n_blocks),
            ("n_kv_heads", a.n_kv_heads),
            ("kv_block", a.kv_block),
            ("head_dim", a.head_dim),
            ("n_seqs", a.n_seqs),
            ("max_blocks", a.max_blocks),
        ];
        let case = OpCase { op: "rope_kv", dtype: a.cache_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.cache_dtype.is_float(), "the cache must be F16, BF16 or F32");
        let n_dims = a.rope.n_dims;
        crate::require!(
            case,
            n_dims.is_multiple_of(2) && n_dims > 0 && n_dims <= a.head_dim,
            "n_dims is {n_dims}, must be even and at most {}",
            a.head_dim
        );
        let (n_q, n_kv) = (a.n.saturating_mul(a.n_heads), a.n.saturating_mul(a.n_kv_heads));
        let (q, q_rows) = case.rows("q", &a.q, n_q, a.head_dim)?;
        let (k, k_rows) = case.rows("k", &a.k, n_kv, a.head_dim)?;
        let (v, v_rows) = case.rows("v", &a.v, n_kv, a.head_dim)?;
        let cells = [a.n_blocks, a.n_kv_heads, a.kv_block, a.head_dim];
        // One thread per rotated pair, per remaining element, and per element of a value.
        let per_head = a.head_dim - n_dims / 2;
        let rotated = n_q.saturating_add(n_kv).saturating_mul(per_head);
        let n_threads =
            case.u32("the number of elements", rotated.saturating_add(n_kv.saturating_mul(a.head_dim)))?;
        let sizes = RopeKvSizes {
            n: a.n as u32,
            n_heads: a.n_heads as u32,
            n_dims: n_dims as u32,
            magnitude: a.rope.magnitude,
            pages: PageSizes {
                n_blocks: a.n_blocks as u32,
                n_kv_heads: a.n_kv_heads as u32,
                kv_block: a.kv_block as u32,
                head_dim: a.head_dim as u32,
                n_seqs: a.n_seqs as u32,
                max_blocks: a.max_blocks as u32,
            },
        };
        Ok(self
            .launch(&name(a.rope.style, a.cache_dtype), n_threads.div_ceil(BLOCK), BLOCK)?
            .step(a.step)
            .write(case.words("q_out", a.q_out, &[a.n, a.n_heads, a.head_dim])?)
            .write(case.words("k_out", a.k_out, &[a.n, a.n_kv_heads, a.head_dim])?)
            .read_write(case.cache("k_cache", a.k_cache, cells)?)
            .read_write(case.cache("v_cache", a.v_cache, cells)?)
            .read(q)
            .read(k)
            .read(v)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("seqs", a.seqs, &[a.n])?)
            .read(case.words("tables", a.tables, &[a.n_seqs, a.max_blocks])?)
            .read(case.words("inv_freq", a.inv_freq, &[n_dims / 2])?)
            .baked(Baked(q_rows))
            .baked(Baked(k_rows))
            .baked(Baked(v_rows))
            .baked(Baked(sizes))
            .vouch(&case))
    }
}

fn name(style: RopeStyle, dtype: DType) -> String {
    let style = match style {
        RopeStyle::Neox => "neox",
        RopeStyle::Interleaved => "interleaved",
    };
    format!("rope_kv_{style}_{}", dtype.name().to_ascii_lowercase())
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let params = [P, P, P, P, P, P, P, P, P, P, P, R, R, R, size_of::<RopeKvSizes>()];
            all.push(KernelEntry::new(KernelFamily::Rope, name(style, dtype), &params, move |k| {
                twin(k, style, dtype)
            }));
        }
    }
}

fn twin(k: &mut SimKernel<'_>, style: RopeStyle, dtype: DType) -> KernelResult {
    let sizes = k.arg::<RopeKvSizes>(14)?;
    let [n, n_heads, n_dims] = [sizes.n, sizes.n_heads, sizes.n_dims].map(|n| n as usize);
    let [n_kv_heads, head_dim] = [sizes.pages.n_kv_heads, sizes.pages.head_dim].map(|n| n as usize);
    if n_dims > head_dim {
        return Err(fault("n_dims exceeds head_dim"));
    }
    let rope = Op::Rope(Rope { style, n_dims, magnitude: sizes.magnitude });
    let positions = Dense::read(k, k.ptr(7)?, DType::I32, &[n])?;
    let inv_freq = Dense::read(k, k.ptr(10)?, DType::F32, &[n_dims / 2])?;
    let rotated = |k: &SimKernel<'_>, ptr: usize, rows: usize, n_heads: usize| {
        let dims = [n, n_heads, head_dim];
        let x = Dense::f32(&read_rows(k, k.ptr(ptr)?, k.arg(rows)?, n * n_heads, head_dim)?, &dims)?;
        run_f32(&rope, &[&x, &positions, &inv_freq], &dims)
    };
    let (q, keys) = (rotated(k, 4, 11, n_heads)?, rotated(k, 5, 12, n_kv_heads)?);
    let values = read_rows(k, k.ptr(6)?, k.arg(13)?, n * n_kv_heads, head_dim)?;
    k.write(k.ptr(0)?, &q)?;
    k.write(k.ptr(1)?, &keys)?;
    let caches = [(k.ptr(2)?, keys.as_slice()), (k.ptr(3)?, values.as_slice())];
    let pointers = [k.ptr(7)?, k.ptr(8)?, k.ptr(9)?];
    append(k, dtype, &caches, pointers, n, &sizes.pages)
}
