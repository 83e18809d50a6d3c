//! Products with weights: `y[m, n] = x[m, k] . w[n, k]^T`.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_tensor::{DType, quant};

use crate::error::{OpCase, KernelError};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault, read_rows};
use crate::view::{RowLayout, BufView};
use crate::vouch::Vouch;

/// The dtypes of weights that are used as they are in the file; the other quantised ones are packed
/// ([`crate::PACKED_DTYPES`]).
pub const LINEAR_DTYPES: [DType; 7] =
    [DType::F32, DType::F16, DType::BF16, DType::Q2_K, DType::Q3_K, DType::IQ4_NL, DType::IQ4_XS];

/// How many weights one launch multiplies with.
pub const MAX_PRODUCTS: usize = 4;

/// A kernel: how many rows of `x` and how many columns of the results a warp has.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    rows: usize,
    cols: usize,
}

const NARROW: Variant = Variant { name: "m1", rows: 1, cols: 1 };
/// Reads `x` half as often; for so many columns that the card is full all the same.
const WIDE: Variant = Variant { name: "m1c2", rows: 1, cols: 2 };
const TALL: Variant = Variant { name: "m8", rows: 8, cols: 1 };
const VARIANTS: [Variant; 3] = [NARROW, WIDE, TALL];
/// From this many columns on, two to a warp are at least two blocks for each multiprocessor of the largest cards.
const WIDE_COLS: usize = 3072;
const BLOCK_WARPS: usize = 4;

/// One of the products of a [`LinearArgs`].
#[derive(Clone, Copy, Debug)]
pub struct LinearPart {
    /// `[n, k]`, dense.
    pub w: Buf,
    /// `[m, n]` F32.
    pub y: Buf,
    /// Rows of `w`.
    pub n: usize,
}

/// `y = x . w^T` for one or more `w`.
#[derive(Clone, Copy, Debug)]
pub struct LinearArgs<'a> {
    /// `[.., m, k]` F32, rows of consecutive elements.
    pub x: BufView,
    /// The dtype of all weights, one of [`LINEAR_DTYPES`].
    pub w_dtype: DType,
    /// At most [`MAX_PRODUCTS`].
    pub parts: &'a [LinearPart],
    /// Rows of `x`.
    pub m: usize,
    /// Columns of `x` and of every `w`.
    pub k: usize,
    /// No launch writes any `w`: they are weights, and may be read before what the launch depends on has ended.
    pub w_is_fixed: bool,
    /// Names the step.
    pub step: &'a str,
}

/// Where the columns of each product end, counted over all of them.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct LinearEnds([u32; MAX_PRODUCTS]);

impl Kernels {
    /// The launch of [`LinearArgs`]. Each output's sum has the same order, whatever `m` is and whatever is beside it.
    pub fn linear(&self, a: &LinearArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = OpCase { op: "linear", dtype: a.w_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, LINEAR_DTYPES.contains(&a.w_dtype), "no kernel multiplies with this dtype");
        let n_parts = a.parts.len();
        crate::require!(
            case,
            n_parts <= MAX_PRODUCTS,
            "{n_parts} products, at most {MAX_PRODUCTS} go in one launch"
        );
        crate::require!(case, a.parts.iter().all(|part| part.n > 0), "one of the products is empty");
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
        let variant = match a.m {
            1 if n >= WIDE_COLS => WIDE,
            1 => NARROW,
            _ => TALL,
        };
        let grid = [
            case.u32("n", n)?.div_ceil((BLOCK_WARPS * variant.cols) as u32),
            a.m.div_ceil(variant.rows) as u32,
        ];
        crate::require!(case, grid[1] <= 65_535, "at most {} rows go in one launch", 65_535 * variant.rows);
        let (kernel, block) = (name(a.w_dtype, variant), 32 * BLOCK_WARPS as u32);
        let mut launch = match a.w_is_fixed {
            true => self.launch(&kernel, grid, block)?,
            false => LaunchBuilder::new(&self.get(&kernel)?.function, grid, block),
        };
        launch = launch.step(a.step);
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                Some(part) => launch.write(case.words("y", part.y, &[a.m, part.n])?),
                None => launch.null(),
            };
        }
        launch = launch.read(x);
        let (mut ends, mut end) = (LinearEnds([0; MAX_PRODUCTS]), 0);
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                Some(part) => {
                    end += part.n;
                    let bytes = part.n.checked_mul(a.k).and_then(|n| a.w_dtype.bytes_for(n));
                    launch.read(case.buf("w", part.w, bytes, 16)?)
                }
                None => launch.null(),
            };
            ends.0[i] = end as u32;
        }
        let launch = launch.baked(Baked(rows)).baked(Baked(ends));
        Ok(launch.baked(Baked(a.m as u32)).baked(Baked(a.k as u32)).vouch(&case))
    }
}

fn name(dtype: DType, variant: Variant) -> String {
    format!("linear_{}_{}", variant.name, lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in LINEAR_DTYPES {
        for variant in VARIANTS {
            let params = [P, P, P, P, P, P, P, P, P, size_of::<RowLayout>(), size_of::<LinearEnds>(), W, W];
            let entry = KernelEntry::new(KernelFamily::Linear, name(dtype, variant), &params, move |k| twin(k, dtype));
            all.push(entry.unit(&lowercase(dtype)));
        }
    }
}

/// Weights are decoded a row at a time: a vocabulary's worth of them in f32 would not fit a small machine.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (ends, m, cols) = (k.arg::<LinearEnds>(10)?, count(k, 11)?, count(k, 12)?);
    let row_bytes = dtype.bytes_for(cols).ok_or_else(|| fault("rows of partial blocks"))?;
    let mut begin = 0;
    let mut parts = Vec::with_capacity(MAX_PRODUCTS);
    for (i, end) in ends.0.into_iter().map(|end| end as usize).enumerate().filter(|(_, end)| *end > 0) {
        if end > begin {
            parts.push((k.ptr(i)?, k.ptr(5 + i)?, end - begin));
        }
        begin = end;
    }
    k.before_wait(|k| parts.iter().try_for_each(|&(_, w, n)| k.view::<u8>(w, n * row_bytes).map(|_| ())))?;
    let x = read_rows(k, k.ptr(4)?, k.arg(9)?, m, cols)?;
    for (y_at, w_at, n) in parts {
        let mut y = vec![0.0_f32; m * n];
        let mut row = vec![0.0; cols];
        {
            let w = k.view::<u8>(w_at, n * row_bytes)?;
            for (j, bytes) in w.chunks_exact(row_bytes).enumerate() {
                quant::dequantize(dtype, bytes, &mut row).map_err(fault)?;
                for (i, x) in x.chunks_exact(cols).enumerate() {
                    y[i * n + j] =
                        x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;
                }
            }
        }
        k.write(y_at, &y)?;
    }
    Ok(())
}
