//! Quantised matrices in BF16, for products on tensor cores.

use half::bf16;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, quant};

use crate::error::{Case, KernelError};
use crate::linear::LINEAR_DTYPES;
use crate::load::Kernels;
use crate::registry::{Entry, P, W};
use crate::source::Family;
use crate::twin::{count, fault};

const BLOCK: u32 = 256;

/// `y = w` in BF16.
#[derive(Clone, Copy, Debug)]
pub struct DequantArgs<'a> {
    /// Dense, as in the file.
    pub w: Buf,
    /// The dtype of `w`, quantised.
    pub dtype: DType,
    /// `[n]` BF16.
    pub y: Buf,
    /// Elements: whole blocks.
    pub n: usize,
    /// Names the step.
    pub step: &'a str,
}

impl Kernels {
    /// The launch of [`DequantArgs`].
    pub fn dequant(&self, a: &DequantArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n)];
        let case = Case { op: "dequant", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            a.dtype.is_quantized() && LINEAR_DTYPES.contains(&a.dtype),
            "no kernel decodes this dtype"
        );
        let block_len = a.dtype.block_len();
        crate::require!(case, a.n.is_multiple_of(block_len), "n must be whole blocks of {block_len}");
        let n_parts = (a.n / 8) as u32;
        Ok(self
            .launch(&name(a.dtype), n_parts.div_ceil(BLOCK), BLOCK)?
            .step(a.step)
            .write(case.buf("y", a.y, a.n.checked_mul(2), 16)?)
            .read(case.buf("w", a.w, a.dtype.bytes_for(a.n), 16)?)
            .baked(Baked(n_parts)))
    }
}

fn name(dtype: DType) -> String {
    format!("dequant_{}_bf16", dtype.name().to_ascii_lowercase())
}

pub(crate) fn entries(all: &mut Vec<Entry>) {
    for dtype in LINEAR_DTYPES.into_iter().filter(|d| d.is_quantized()) {
        all.push(Entry::new(Family::Dequant, name(dtype), &[P, P, W], move |k| twin(k, dtype)));
    }
}

fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let n = 8 * count(k, 2)?;
    let n_bytes = dtype.bytes_for(n).ok_or_else(|| fault("a matrix of partial blocks"))?;
    let mut values = vec![0.0; n];
    quant::dequantize(dtype, &k.view::<u8>(k.ptr(1)?, n_bytes)?, &mut values).map_err(fault)?;
    k.write(k.ptr(0)?, &values.into_iter().map(bf16::from_f32).collect::<Vec<_>>())
}
