//! Row gather: the embedding lookup.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, quant};

use crate::error::{KernelError, OpCase};
use crate::linear::LINEAR_DTYPES;
use crate::load::Kernels;
use crate::packed::{PACKED_DTYPES, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::vouch::Vouch;

/// `y[i] = table[ids[i]]`, dequantised; a negative id gives zeros.
#[derive(Clone, Copy, Debug)]
pub struct GatherRowsArgs<'a> {
    /// `[n_rows, d]`, dense or packed.
    pub table: Buf,
    /// Dtype of the table: one of [`LINEAR_DTYPES`], or of [`PACKED_DTYPES`] if packed.
    pub dtype: DType,
    /// Whether the table is in its packed layout ([`crate::pack`]).
    pub packed: bool,
    /// `[n_ids]` I32, in device memory, read at run time.
    pub ids: Buf,
    /// `[n_ids, d]` F32.
    pub y: Buf,
    /// Rows of the table.
    pub n_rows: usize,
    /// Columns of the table.
    pub d: usize,
    /// Number of gathered rows.
    pub n_ids: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Columns of an unquantised row per block.
const PART: usize = 2048;

impl Kernels {
    /// Builds the launch for [`GatherRowsArgs`]. An id past the table gives a row of NaN on a GPU; the
    /// simulated device faults.
    pub fn gather_rows(&self, a: &GatherRowsArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_ids", a.n_ids), ("n_rows", a.n_rows), ("d", a.d)];
        let case = OpCase { op: "gather_rows", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let block_len = a.dtype.block_len();
        crate::require!(
            case,
            a.d.is_multiple_of(block_len),
            "d must be a multiple of the quantisation block, {block_len}"
        );
        crate::require!(
            case,
            if a.packed { PACKED_DTYPES.contains(&a.dtype) } else { LINEAR_DTYPES.contains(&a.dtype) },
            "no kernel reads this dtype in this layout"
        );
        let bytes = match a.packed {
            true => packed_bytes(a.dtype, a.n_rows, a.d),
            false => a.n_rows.checked_mul(a.d).and_then(|n| a.dtype.bytes_for(n)),
        };
        let table = case.buf("table", a.table, bytes, 16)?;
        let ids = case.words("ids", a.ids, &[a.n_ids])?;
        let y_bytes = a.n_ids.checked_mul(a.d).and_then(|n| n.checked_mul(4));
        let y = case.buf("y", a.y, y_bytes, 16)?;
        // Several blocks load an unquantised row at once; see `gather.cu`.
        let parts = if a.dtype.is_quantized() { 1 } else { a.d.div_ceil(PART).max(1) };
        crate::require!(case, parts <= 65_535, "the grid takes at most {} columns", 65_535 * PART);
        Ok(self
            .launch(&name(a.dtype, a.packed), [a.n_ids as u32, parts as u32], 256)?
            .step(a.step)
            .write(y)
            .read(table)
            .read(ids)
            .baked(Baked(a.n_rows as u32))
            .baked(Baked(a.d as u32))
            .vouch(&case))
    }
}

fn name(dtype: DType, packed: bool) -> String {
    format!("gather_rows_{}", suffix(dtype, packed))
}

/// Suffix of the kernel and unit names.
fn suffix(dtype: DType, packed: bool) -> String {
    format!("{}{}", if packed { "packed_" } else { "" }, lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const PARAMS: [usize; 5] = [P, P, P, W, W];
    for dtype in LINEAR_DTYPES {
        let entry =
            KernelEntry::new(KernelFamily::Gather, name(dtype, false), &PARAMS, move |k| twin(k, dtype));
        all.push(entry.unit(&suffix(dtype, false)).releasing_next_after_wait());
    }
    for dtype in PACKED_DTYPES {
        let entry = KernelEntry::new(KernelFamily::Gather, name(dtype, true), &PARAMS, move |k| {
            packed_twin(k, dtype)
        });
        all.push(entry.unit(&suffix(dtype, true)).releasing_next_after_wait());
    }
}

fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n_rows, d, n_ids) = (count(k, 3)?, count(k, 4)?, k.config().grid[0] as usize);
    let row_bytes = dtype.bytes_for(d).ok_or_else(|| fault("a row ends inside a quantisation block"))?;
    let mut y = vec![0.0_f32; n_ids * d];
    for (id, row) in k.read::<i32>(k.ptr(2)?, n_ids)?.into_iter().zip(y.chunks_exact_mut(d)) {
        let Ok(id) = usize::try_from(id) else { continue };
        if id >= n_rows {
            return Err(fault(format!("row {id} is past a table of {n_rows} rows")));
        }
        let bytes = k.view::<u8>(k.ptr(1)?.add((id * row_bytes) as u64), row_bytes)?;
        quant::dequantize(dtype, &bytes, row).map_err(fault)?;
    }
    k.write(k.ptr(0)?, &y)
}

fn packed_twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n_rows, d, n_ids) = (count(k, 3)?, count(k, 4)?, k.config().grid[0] as usize);
    let bytes =
        packed_bytes(dtype, n_rows, d).ok_or_else(|| fault("a row ends inside a quantisation block"))?;
    let mut y = vec![0.0_f32; n_ids * d];
    for (id, row) in k.read::<i32>(k.ptr(2)?, n_ids)?.into_iter().zip(y.chunks_exact_mut(d)) {
        let Ok(id) = usize::try_from(id) else { continue };
        if id >= n_rows {
            return Err(fault(format!("row {id} is past a table of {n_rows} rows")));
        }
        let table = k.view::<u8>(k.ptr(1)?, bytes)?;
        unpack_row(dtype, &table, id, d, row).ok_or_else(|| fault("the row is past the table"))?;
    }
    k.write(k.ptr(0)?, &y)
}
