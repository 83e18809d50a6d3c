//! Dequantisation of matrices to BF16, for tensor-core GEMMs.

use half::bf16;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, quant};

use crate::error::{KernelError, OpCase};
use crate::linear::LINEAR_DTYPES;
use crate::load::Kernels;
use crate::packed::{PACKED_DTYPES, TILE_ROWS, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::vouch::Vouch;

const BLOCK: u32 = 256;

/// `y = w` in BF16.
#[derive(Clone, Copy, Debug)]
pub struct DequantArgs<'a> {
    /// `[n, k]`: packed if its dtype is, else in its file layout.
    pub w: Buf,
    /// The dtype of `w`, quantised.
    pub dtype: DType,
    /// `[n, k]` BF16.
    pub y: Buf,
    /// Number of rows.
    pub n: usize,
    /// Columns, in whole quantisation blocks.
    pub k: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

impl Kernels {
    /// Builds the launch for [`DequantArgs`].
    pub fn dequant(&self, a: &DequantArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n), ("k", a.k)];
        let case = OpCase { op: "dequant", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let packed = PACKED_DTYPES.contains(&a.dtype);
        let known = packed || (a.dtype.is_quantized() && LINEAR_DTYPES.contains(&a.dtype));
        crate::require!(case, known, "no kernel decodes this dtype");
        let block_len = a.dtype.block_len();
        crate::require!(
            case,
            a.k.is_multiple_of(block_len),
            "k must be a multiple of the quantisation block, {block_len}"
        );
        let n_elements = a.n.checked_mul(a.k);
        let (bytes, grid) = match packed {
            true => (packed_bytes(a.dtype, a.n, a.k), a.n.div_ceil(TILE_ROWS)),
            false => {
                let parts = n_elements.unwrap_or(usize::MAX) / 8;
                (n_elements.and_then(|n| a.dtype.bytes_for(n)), parts.div_ceil(BLOCK as usize))
            }
        };
        Ok(self
            .launch(&name(a.dtype), case.u32("the grid", grid)?, BLOCK)?
            .step(a.step)
            .write(case.buf("y", a.y, n_elements.and_then(|n| n.checked_mul(2)), 16)?)
            .read(case.buf("w", a.w, bytes, 16)?)
            .baked(Baked(case.u32("n", a.n)?))
            .baked(Baked(case.u32("k", a.k)?))
            .vouch(&case))
    }
}

fn name(dtype: DType) -> String {
    format!("dequant_{}_bf16", lowercase(dtype))
}

/// Dtypes that [`DequantArgs`] accepts.
fn dtypes() -> impl Iterator<Item = DType> {
    PACKED_DTYPES.into_iter().chain(LINEAR_DTYPES.into_iter().filter(|d| d.is_quantized()))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in dtypes() {
        let entry =
            KernelEntry::new(KernelFamily::Dequant, name(dtype), &[P, P, W, W], move |k| twin(k, dtype));
        all.push(entry.unit(&lowercase(dtype)));
    }
}

fn twin(kernel: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n, k) = (count(kernel, 2)?, count(kernel, 3)?);
    let partial = || fault("the matrix ends inside a quantisation block");
    let mut values = vec![0.0; n * k];
    if PACKED_DTYPES.contains(&dtype) {
        let bytes = packed_bytes(dtype, n, k).ok_or_else(partial)?;
        let w = kernel.view::<u8>(kernel.ptr(1)?, bytes)?;
        for (row, out) in values.chunks_exact_mut(k).enumerate() {
            unpack_row(dtype, &w, row, k, out).ok_or_else(partial)?;
        }
    } else {
        let bytes = dtype.bytes_for(n * k).ok_or_else(partial)?;
        let w = kernel.view::<u8>(kernel.ptr(1)?, bytes)?;
        quant::dequantize(dtype, &w, &mut values).map_err(fault)?;
    }
    kernel.write(kernel.ptr(0)?, &values.into_iter().map(bf16::from_f32).collect::<Vec<_>>())
}
