//! Reductions and softmax over the last dimension.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, Reduce};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `y[r]` is the sum, mean or maximum of row `r`.
#[derive(Clone, Copy, Debug)]
pub struct ReduceArgs<'a> {
    /// Sum, mean or maximum.
    pub kind: Reduce,
    /// `[.., n_cols]` F32 with contiguous rows.
    pub x: BufView,
    /// `[n_rows]` F32.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y` is the softmax of each row of `x`.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxArgs<'a> {
    /// `[.., n_cols]` F32 with contiguous rows.
    pub x: BufView,
    /// `[n_rows, n_cols]` F32; may alias `x` if that is contiguous.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

const BLOCK: u32 = 256;

impl Kernels {
    /// Builds the launch for [`ReduceArgs`].
    pub fn reduce(&self, a: &ReduceArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "reduce", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let (x, rows) = case.rows("x", &a.x, a.n_rows, a.n_cols)?;
        Ok(self
            .launch(name(a.kind), a.n_rows as u32, BLOCK)?
            .step(a.step)
            .write(case.words("y", a.y, &[a.n_rows])?)
            .read(x)
            .baked(Baked(rows))
            .baked(Baked(a.n_cols as u32))
            .vouch(&case))
    }

    /// Builds the launch for [`SoftmaxArgs`].
    pub fn softmax(&self, a: &SoftmaxArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "softmax", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let (x, rows) = case.rows("x", &a.x, a.n_rows, a.n_cols)?;
        Ok(self
            .launch("softmax_f32", a.n_rows as u32, BLOCK)?
            .step(a.step)
            .write(case.words("y", a.y, &[a.n_rows, a.n_cols])?)
            .read(x)
            .baked(Baked(rows))
            .baked(Baked(a.n_cols as u32))
            .vouch(&case))
    }
}

fn name(kind: Reduce) -> &'static str {
    match kind {
        Reduce::Sum => "reduce_sum_f32",
        Reduce::Mean => "reduce_mean_f32",
        Reduce::Max => "reduce_max_f32",
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const PARAMS: [usize; 4] = [P, P, size_of::<RowLayout>(), W];
    for kind in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
        all.push(KernelEntry::new(KernelFamily::Rows, name(kind), &PARAMS, move |k| {
            twin(k, &Op::Reduce { kind, axis: 1 }, true)
        }));
    }
    all.push(KernelEntry::new(KernelFamily::Rows, "softmax_f32", &PARAMS, |k| twin(k, &Op::Softmax, false)));
}

fn twin(k: &mut SimKernel<'_>, op: &Op, reduces: bool) -> KernelResult {
    let (n_rows, n_cols) = (k.config().grid[0] as usize, count(k, 3)?);
    let x = Dense::f32(&read_rows(k, k.ptr(1)?, k.arg(2)?, n_rows, n_cols)?, &[n_rows, n_cols])?;
    let y = run_f32(op, &[&x], &[n_rows, if reduces { 1 } else { n_cols }])?;
    k.write(k.ptr(0)?, &y)
}
