//! RMS norms.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::Op;
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `y = x * rsqrt(mean(x^2) + eps) * w`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormArgs<'a> {
    /// `[.., n_cols]` F32 with contiguous rows.
    pub x: BufView,
    /// `[n_cols]` F32.
    pub w: Buf,
    /// `[n_rows, n_cols]` F32; may alias `x`.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `sum = a + b`, `y = sum * rsqrt(mean(sum^2) + eps) * w`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNormArgs<'a> {
    /// `[.., n_cols]` F32 with contiguous rows.
    pub a: BufView,
    /// Like `a`.
    pub b: BufView,
    /// `[n_cols]` F32.
    pub w: Buf,
    /// `[n_rows, n_cols]` F32; may alias `a`.
    pub sum: Buf,
    /// `[n_rows, n_cols]` F32; may alias `b`.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

impl Kernels {
    /// Builds the launch for [`RmsNormArgs`].
    pub fn rms_norm(&self, a: &RmsNormArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "rms_norm", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let (x, rows) = case.rows("x", &a.x, a.n_rows, a.n_cols)?;
        Ok(self
            .launch("rms_norm_f32", a.n_rows as u32, block(a.n_cols))?
            .step(a.step)
            .write(case.words("y", a.y, &[a.n_rows, a.n_cols])?)
            .read(x)
            .read(case.words("w", a.w, &[a.n_cols])?)
            .baked(Baked(rows))
            .baked(Baked(a.n_cols as u32))
            .baked(Baked(a.eps))
            .vouch(&case))
    }

    /// Builds the launch for [`AddRmsNormArgs`].
    pub fn add_rms_norm(&self, a: &AddRmsNormArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "add_rms_norm", dtype: a.a.dtype, shape: &shape };
        case.sizes()?;
        let (a_buf, a_rows) = case.rows("a", &a.a, a.n_rows, a.n_cols)?;
        let (right, b_rows) = case.rows("b", &a.b, a.n_rows, a.n_cols)?;
        Ok(self
            .launch("rms_norm_add_f32", a.n_rows as u32, block(a.n_cols))?
            .step(a.step)
            .write(case.words("sum", a.sum, &[a.n_rows, a.n_cols])?)
            .write(case.words("y", a.y, &[a.n_rows, a.n_cols])?)
            .read(a_buf)
            .read(right)
            .read(case.words("w", a.w, &[a.n_cols])?)
            .baked(Baked(a_rows))
            .baked(Baked(b_rows))
            .baked(Baked(a.n_cols as u32))
            .baked(Baked(a.eps))
            .vouch(&case))
    }
}

/// Threads per row: whole warps, no more than the row can use.
fn block(n_cols: usize) -> u32 {
    (n_cols.div_ceil(4).next_multiple_of(32)).clamp(32, 512) as u32
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    all.push(KernelEntry::new(KernelFamily::Norm, "rms_norm_f32", &[P, P, P, R, W, W], rms_norm));
    all.push(KernelEntry::new(
        KernelFamily::Norm,
        "rms_norm_add_f32",
        &[P, P, P, P, P, R, R, W, W],
        add_rms_norm,
    ));
}

fn rms_norm(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_rows, n_cols, eps) = (k.config().grid[0] as usize, count(k, 4)?, k.arg(5)?);
    let dims = [n_rows, n_cols];
    let x = Dense::f32(&read_rows(k, k.ptr(1)?, k.arg(3)?, n_rows, n_cols)?, &dims)?;
    let w = Dense::read(k, k.ptr(2)?, DType::F32, &[n_cols])?;
    let y = run_f32(&Op::RmsNorm { eps }, &[&x, &w], &dims)?;
    k.write(k.ptr(0)?, &y)
}

fn add_rms_norm(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_rows, n_cols, eps) = (k.config().grid[0] as usize, count(k, 7)?, k.arg(8)?);
    let dims = [n_rows, n_cols];
    let a = read_rows(k, k.ptr(2)?, k.arg(5)?, n_rows, n_cols)?;
    let b = read_rows(k, k.ptr(3)?, k.arg(6)?, n_rows, n_cols)?;
    let w = Dense::read(k, k.ptr(4)?, DType::F32, &[n_cols])?;
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    let y = run_f32(&Op::RmsNorm { eps }, &[&Dense::f32(&sum, &dims)?, &w], &dims)?;
    k.write(k.ptr(0)?, &sum)?;
    k.write(k.ptr(1)?, &y)
}
