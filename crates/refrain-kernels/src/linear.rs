//! Products with a weight: `y[m, n] = x[m, k] . w[n, k]^T`.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, quant};

use crate::error::{Case, KernelError};
use crate::load::Kernels;
use crate::registry::{Entry, P, W};
use crate::source::Family;
use crate::twin::{count, fault, read_rows};
use crate::view::{Rows, View};

/// The dtypes a weight may have.
pub const LINEAR_DTYPES: [DType; 15] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
];

/// Rows of `x` that one block multiplies at once, by kernel variant.
const TILES: [usize; 2] = [1, 8];
/// Output columns of a block: one warp each.
const BLOCK_COLS: usize = 4;

/// `y = x . w^T`.
#[derive(Clone, Copy, Debug)]
pub struct LinearArgs<'a> {
    /// `[.., m, k]` F32, rows of consecutive elements.
    pub x: View,
    /// `[n, k]`, dense.
    pub w: Buf,
    /// The weight's dtype, one of [`LINEAR_DTYPES`].
    pub w_dtype: DType,
    /// `[m, n]` F32.
    pub y: Buf,
    /// Rows of `x`.
    pub m: usize,
    /// Rows of `w`.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// Names the step.
    pub step: &'a str,
}

impl Kernels {
    /// The launch of [`LinearArgs`]. Each output's sum has the same order, whatever `m` is.
    pub fn linear(&self, a: &LinearArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("m", a.m), ("n", a.n), ("k", a.k)];
        let case = Case { op: "linear", dtype: a.w_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, LINEAR_DTYPES.contains(&a.w_dtype), "no kernel multiplies with this dtype");
        let block_len = a.w_dtype.block_len();
        crate::require!(case, a.k.is_multiple_of(block_len), "k must be whole blocks of {block_len}");
        let (x, rows) = case.rows("x", &a.x, a.m, a.k)?;
        if a.w_dtype.is_quantized() {
            let aligned = |n: u64| n.is_multiple_of(16);
            let strides = [rows.inner_stride, rows.outer_stride];
            crate::require!(
                case,
                aligned(x.offset()) && (a.m == 1 || strides.iter().all(|&s| aligned(4 * u64::from(s)))),
                "rows of x start at byte {} in strides of {strides:?} elements, must be at multiples of 16 bytes",
                x.offset()
            );
        }
        let w = case.buf("w", a.w, a.n.checked_mul(a.k).and_then(|n| a.w_dtype.bytes_for(n)), 16)?;
        let y = case.words("y", a.y, &[a.m, a.n])?;
        let tile = if a.m == 1 { TILES[0] } else { TILES[1] };
        let grid = [case.u32("n", a.n.div_ceil(BLOCK_COLS))?, case.u32("m", a.m.div_ceil(tile))?];
        crate::require!(case, grid[1] <= 65_535, "at most {} rows go in one launch", 65_535 * tile);
        Ok(Launch::new(self.get(&name(a.w_dtype, tile))?, grid, 32 * BLOCK_COLS as u32)
            .step(a.step)
            .write(y)
            .read(x)
            .read(w)
            .baked(Baked(rows))
            .baked(Baked(a.m as u32))
            .baked(Baked(a.n as u32))
            .baked(Baked(a.k as u32)))
    }
}

fn name(dtype: DType, tile: usize) -> String {
    format!("linear_m{tile}_{}", dtype.name().to_ascii_lowercase())
}

pub(crate) fn entries(all: &mut Vec<Entry>) {
    for dtype in LINEAR_DTYPES {
        for tile in TILES {
            let params = [P, P, P, size_of::<Rows>(), W, W, W];
            all.push(Entry::new(Family::Linear, name(dtype, tile), &params, move |k| twin(k, dtype)));
        }
    }
}

/// Weights are decoded a row at a time: a vocabulary's worth of them in f32 would not fit a small machine.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (m, n, cols) = (count(k, 4)?, count(k, 5)?, count(k, 6)?);
    let x = read_rows(k, k.ptr(1)?, k.arg(3)?, m, cols)?;
    let row_bytes = dtype.bytes_for(cols).ok_or_else(|| fault("rows of partial blocks"))?;
    let mut y = vec![0.0_f32; m * n];
    {
        let w = k.view::<u8>(k.ptr(2)?, n * row_bytes)?;
        let mut row = vec![0.0; cols];
        for (j, bytes) in w.chunks_exact(row_bytes).enumerate() {
            quant::dequantize(dtype, bytes, &mut row).map_err(fault)?;
            for (i, x) in x.chunks_exact(cols).enumerate() {
                y[i * n + j] =
                    x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;
            }
        }
    }
    k.write(k.ptr(0)?, &y)
}
