//! Appending keys or values to the paged cache.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, row_scale, row_to_bytes};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P};
use crate::source::KernelFamily;
use crate::twin::{fault, read_rows};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `cache[tables[seqs[i]][positions[i] / kv_block], h, positions[i] % kv_block] = x[i, h]`; rows with a
/// negative position are skipped.
#[derive(Clone, Copy, Debug)]
pub struct KvAppendArgs<'a> {
    /// `[n_blocks, n_kv_heads, kv_block, head_dim]`, updated in place.
    pub cache: Buf,
    /// F16, BF16 or F32, or U8 with scales.
    pub cache_dtype: DType,
    /// `[n_blocks, n_kv_heads, kv_block]` F32, updated in place: the scales of an 8-bit cache.
    pub scales: Option<Buf>,
    /// `[n, n_kv_heads, head_dim]` F32; each head is contiguous.
    pub x: BufView,
    /// `[n]` I32, read at run time.
    pub positions: Buf,
    /// `[n]` I32, read at run time.
    pub seqs: Buf,
    /// `[n_seqs, max_blocks]` I32, read at run time.
    pub tables: Buf,
    /// Number of rows.
    pub n: usize,
    /// KV blocks of the cache.
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

impl OpCase<'_> {
    /// Checks a whole cache `[n_blocks, n_kv_heads, kv_block, head_dim]`.
    pub(crate) fn cache(
        &self,
        name: &'static str,
        cache: Buf,
        cells: [usize; 4],
    ) -> Result<Buf, KernelError> {
        let bytes = cells.iter().try_fold(self.dtype.block_bytes(), |x, &y| x.checked_mul(y));
        self.buf(name, cache, bytes, 16)
    }
}

impl Kernels {
    /// Builds the launch for [`KvAppendArgs`]. A position, sequence or block out of range is not written on a
    /// GPU; the simulated device faults.
    pub fn kv_append(&self, a: &KvAppendArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [
            ("n", a.n),
            ("n_blocks", a.n_blocks),
            ("n_kv_heads", a.n_kv_heads),
            ("kv_block", a.kv_block),
            ("head_dim", a.head_dim),
            ("n_seqs", a.n_seqs),
            ("max_blocks", a.max_blocks),
        ];
        let case = OpCase { op: "kv_append", dtype: a.cache_dtype, shape: &shape };
        case.sizes()?;
        let in_bytes = a.scales.is_some();
        crate::require!(
            case,
            if in_bytes { a.cache_dtype == DType::U8 } else { a.cache_dtype.is_float() },
            "the cache must be F16, BF16 or F32, or U8 with scales"
        );
        let cells = [a.n_blocks, a.n_kv_heads, a.kv_block, a.head_dim];
        let (x, rows) = case.rows("x", &a.x, a.n.saturating_mul(a.n_kv_heads), a.head_dim)?;
        crate::require!(case, a.n_kv_heads <= 65_535, "the grid takes at most 65535 heads");
        let launch = self
            .launch(&name(a.cache_dtype), [a.n as u32, a.n_kv_heads as u32], block(a.head_dim))?
            .step(a.step)
            .read_write(case.cache("cache", a.cache, cells)?);
        let launch = match a.scales {
            None => launch,
            Some(scales) => launch.read_write(case.words("scales", scales, &cells[..3])?),
        };
        Ok(launch
            .read(x)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("seqs", a.seqs, &[a.n])?)
            .read(case.words("tables", a.tables, &[a.n_seqs, a.max_blocks])?)
            .baked(Baked(rows))
            .baked(Baked(PageSizes {
                n_blocks: a.n_blocks as u32,
                n_kv_heads: a.n_kv_heads as u32,
                kv_block: a.kv_block as u32,
                head_dim: a.head_dim as u32,
                n_seqs: a.n_seqs as u32,
                max_blocks: a.max_blocks as u32,
            }))
            .vouch(&case))
    }
}

fn block(head_dim: usize) -> u32 {
    head_dim.next_multiple_of(32).min(256) as u32
}

fn name(dtype: DType) -> String {
    match dtype {
        DType::U8 => "kv_append_bytes_f32".into(),
        dtype => format!("kv_append_{}", dtype.name().to_ascii_lowercase()),
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let params = [P, P, P, P, P, size_of::<RowLayout>(), size_of::<PageSizes>()];
        all.push(KernelEntry::new(KernelFamily::Kv, name(dtype), &params, move |k| twin(k, dtype)));
    }
    let params = [P, P, P, P, P, P, size_of::<RowLayout>(), size_of::<PageSizes>()];
    all.push(KernelEntry::new(KernelFamily::Kv, name(DType::U8), &params, twin_of_bytes));
}

/// Sizes of a cache and its block tables, as a kernel parameter.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PageSizes {
    pub(crate) n_blocks: u32,
    pub(crate) n_kv_heads: u32,
    pub(crate) kv_block: u32,
    pub(crate) head_dim: u32,
    pub(crate) n_seqs: u32,
    pub(crate) max_blocks: u32,
}

/// Block tables that map a sequence's positions to KV blocks.
pub(crate) struct PageTables {
    pub(crate) tables: Vec<i32>,
    pub(crate) n_seqs: usize,
    pub(crate) max_blocks: usize,
    pub(crate) n_blocks: usize,
    pub(crate) kv_block: usize,
}

impl PageTables {
    /// Returns the block that holds a position, and the row within the block.
    pub(crate) fn find(&self, seq: i32, position: usize) -> KernelResult<(usize, usize)> {
        let (seq_idx, column) = (usize::try_from(seq).unwrap_or(usize::MAX), position / self.kv_block);
        if seq_idx >= self.n_seqs || column >= self.max_blocks {
            return Err(fault(format!(
                "position {position} of sequence {seq} is outside tables of {} x {} blocks",
                self.n_seqs, self.max_blocks
            )));
        }
        let block = self.tables[seq_idx * self.max_blocks + column];
        match usize::try_from(block) {
            Ok(b) if b < self.n_blocks => Ok((b, position % self.kv_block)),
            _ => Err(fault(format!("KV block {block} is past a cache of {} blocks", self.n_blocks))),
        }
    }
}

fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n, sizes) = (k.config().grid[0] as usize, k.arg::<PageSizes>(6)?);
    let n_rows = n * sizes.n_kv_heads as usize;
    let x = read_rows(k, k.ptr(1)?, k.arg(5)?, n_rows, sizes.head_dim as usize)?;
    let (cache, pointers) = (k.ptr(0)?, [k.ptr(2)?, k.ptr(3)?, k.ptr(4)?]);
    append(k, dtype, &[(cache, &x)], pointers, n, &sizes)
}

fn twin_of_bytes(k: &mut SimKernel<'_>) -> KernelResult {
    let (n, s) = (k.config().grid[0] as usize, k.arg::<PageSizes>(7)?);
    let size = |n: u32| n as usize;
    let [n_heads, head_dim, kv_block] = [s.n_kv_heads, s.head_dim, s.kv_block].map(size);
    let x = read_rows(k, k.ptr(2)?, k.arg(6)?, n * n_heads, head_dim)?;
    let [n_seqs, max_blocks, n_blocks] = [s.n_seqs, s.max_blocks, s.n_blocks].map(size);
    let tables = k.read(k.ptr(5)?, n_seqs * max_blocks)?;
    let pages = PageTables { tables, n_seqs, max_blocks, n_blocks, kv_block };
    let (positions, seqs) = (k.read::<i32>(k.ptr(3)?, n)?, k.read::<i32>(k.ptr(4)?, n)?);
    let (cache, scales) = (k.ptr(0)?, k.ptr(1)?);
    let mut bytes = vec![0; head_dim];
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let (block, at) = pages.find(seqs[row], position)?;
        for head in 0..n_heads {
            let to = (block * n_heads + head) * kv_block + at;
            let x = &x[(row * n_heads + head) * head_dim..][..head_dim];
            row_to_bytes(x, &mut bytes);
            k.write(cache.add((to * head_dim) as u64), &bytes)?;
            k.write(scales.add(4 * to as u64), &[row_scale(x)])?;
        }
    }
    Ok(())
}

/// Writes rows into caches; `pointers` are the parameters of positions, sequences and tables.
pub(crate) fn append(
    k: &mut SimKernel<'_>,
    dtype: DType,
    caches: &[(DevicePtr, &[f32])],
    pointers: [DevicePtr; 3],
    n: usize,
    sizes: &PageSizes,
) -> KernelResult {
    let size = |n: u32| n as usize;
    let [n_heads, head_dim, kv_block] = [sizes.n_kv_heads, sizes.head_dim, sizes.kv_block].map(size);
    let [n_seqs, max_blocks, n_blocks] = [sizes.n_seqs, sizes.max_blocks, sizes.n_blocks].map(size);
    let [positions, seqs, tables] = pointers;
    let tables = k.read(tables, n_seqs * max_blocks)?;
    let pages = PageTables { tables, n_seqs, max_blocks, n_blocks, kv_block };
    let (positions, seqs) = (k.read::<i32>(positions, n)?, k.read::<i32>(seqs, n)?);
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let (block, at) = pages.find(seqs[row], position)?;
        for head in 0..n_heads {
            let start = ((block * n_heads + head) * kv_block + at) * head_dim;
            for (cache, x) in caches {
                let to = cache.add((start * dtype.block_bytes()) as u64);
                store(k, dtype, to, &x[(row * n_heads + head) * head_dim..][..head_dim])?;
            }
        }
    }
    Ok(())
}

fn store(k: &mut SimKernel<'_>, dtype: DType, to: DevicePtr, x: &[f32]) -> KernelResult {
    match dtype {
        DType::F16 => k.write(to, &x.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
        DType::BF16 => k.write(to, &x.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => k.write(to, x),
    }
}
