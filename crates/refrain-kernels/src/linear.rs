//! Linear layers: `y[m, n] = x[m, k] . w[n, k]^T`.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_tensor::{DType, quant};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault, read_rows};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Dtypes of weights that are used in their file layout; other quantised dtypes are packed
/// ([`crate::PACKED_DTYPES`]).
pub const LINEAR_DTYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q2_K,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
];

/// Maximum number of weights per launch.
pub const MAX_PRODUCTS: usize = 4;

/// A kernel variant: rows of `x` and output columns per warp.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    rows: usize,
    cols: usize,
}

const NARROW: Variant = Variant { name: "m1", rows: 1, cols: 1 };
/// Reads `x` half as often. Needs enough columns to fill the GPU at two per warp.
const WIDE: Variant = Variant { name: "m1c2", rows: 1, cols: 2 };
const TALL: Variant = Variant { name: "m8", rows: 8, cols: 1 };
const VARIANTS: [Variant; 3] = [NARROW, WIDE, TALL];
/// From this many columns on, two per warp still give at least two blocks per SM on the largest GPUs.
const WIDE_COLS: usize = 3072;
const BLOCK_WARPS: usize = 4;

/// A weight of [`LinearArgs`] with its output.
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
    /// `[.., m, k]` F32 with contiguous rows.
    pub x: BufView,
    /// Dtype of all weights, one of [`LINEAR_DTYPES`].
    pub w_dtype: DType,
    /// At most [`MAX_PRODUCTS`] weights.
    pub parts: &'a [LinearPart],
    /// Rows of `x`.
    pub m: usize,
    /// Columns of `x` and of every `w`.
    pub k: usize,
    /// No launch writes any `w`, so the kernel may read them before its dependencies have finished.
    pub w_is_fixed: bool,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Cumulative end column of each product.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct LinearEnds([u32; MAX_PRODUCTS]);

impl Kernels {
    /// Builds the launch for [`LinearArgs`]. The summation order of an output depends neither on `m` nor on
    /// the other products.
    pub fn linear(&self, a: &LinearArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = OpCase { op: "linear", dtype: a.w_dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, LINEAR_DTYPES.contains(&a.w_dtype), "no kernel supports this weight dtype");
        let n_parts = a.parts.len();
        crate::require!(
            case,
            n_parts <= MAX_PRODUCTS,
            "{n_parts} matrices, at most {MAX_PRODUCTS} fit in one launch"
        );
        crate::require!(case, a.parts.iter().all(|part| part.n > 0), "one of the matrices is empty");
        let block_len = a.w_dtype.block_len();
        crate::require!(
            case,
            a.k.is_multiple_of(block_len),
            "k must be a multiple of the quantisation block, {block_len}"
        );
        let (x, rows) = case.rows("x", &a.x, a.m, a.k)?;
        if a.w_dtype.is_quantized() {
            let aligned = |n: u64| n.is_multiple_of(16);
            let strides = [rows.inner_stride, rows.outer_stride];
            crate::require!(
                case,
                aligned(x.offset()) && (a.m == 1 || strides.iter().all(|&s| aligned(4 * u64::from(s)))),
                "rows of x start at byte {} with strides of {strides:?} elements, must be 16-byte aligned",
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
        crate::require!(case, grid[1] <= 65_535, "at most {} rows fit in one launch", 65_535 * variant.rows);
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
            let entry = KernelEntry::new(KernelFamily::Linear, name(dtype, variant), &params, move |k| {
                twin(k, dtype)
            });
            all.push(entry.unit(&lowercase(dtype)));
        }
    }
}

/// Decodes one weight row at a time: an f32 copy of a vocabulary matrix would not fit on a small machine.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (ends, m, cols) = (k.arg::<LinearEnds>(10)?, count(k, 11)?, count(k, 12)?);
    let row_bytes = dtype.bytes_for(cols).ok_or_else(|| fault("a row ends inside a quantisation block"))?;
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
