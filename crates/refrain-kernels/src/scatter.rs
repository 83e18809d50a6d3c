//! Sums of rows that share an id: the gradient of an embedding.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::Op;
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::count;
use crate::typed::{FLOATS, Typed, is_aligned, named, rows_are_wide, run_typed};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `y[r]` is the sum of the rows of `x` with id `r`, in order; zero if no row has this id.
#[derive(Clone, Copy, Debug)]
pub struct ScatterAddRowsArgs<'a> {
    /// `[n]` I32 in device memory, read at run time; rows with a negative id are skipped.
    pub ids: Buf,
    /// `[n, d]` floats with contiguous rows.
    pub x: BufView,
    /// `[n_rows, d]` of the same dtype.
    pub y: Buf,
    /// Scratch of [`scatter_scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Rows of the result.
    pub n_rows: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

const BLOCK: u32 = 256;
/// Rows that a block ranks.
const RANKED: usize = 32;

/// Scratch size of [`Kernels::scatter_add_rows`].
#[must_use]
pub fn scatter_scratch_bytes(n: usize) -> u64 {
    8 * n as u64
}

impl Kernels {
    /// Pushes the two launches for [`ScatterAddRowsArgs`]. An id past the result is ignored on a GPU; the
    /// simulated device faults.
    pub fn scatter_add_rows(
        &self,
        a: &ScatterAddRowsArgs<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let d = a.x.layout.shape().dim_back(0);
        let n = a.x.layout.shape().n_elements() / d.max(1);
        let shape = [("n", n), ("n_rows", a.n_rows), ("d", d)];
        let case = OpCase { op: "scatter_add_rows", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let (x, rows) = case.float_rows("x", &a.x, [n, d])?;
        let ids = case.words("ids", a.ids, &[n])?;
        let scratch = case.words("scratch", a.scratch, &[2, n])?;
        let [order, sorted] = [scratch.slice(0, 4 * n as u64)?, scratch.slice(4 * n as u64, 4 * n as u64)?];
        launches.push(
            self.launch("scatter_rank", n.div_ceil(RANKED) as u32, BLOCK)?
                .step(a.step)
                .write(order)
                .write(sorted)
                .read(ids)
                .baked(Baked(n as u32))
                .vouch(&case),
        );
        let y = case.elements("y", a.y, a.x.dtype, &[a.n_rows, d])?;
        let wide = rows_are_wide(x, rows, d) && is_aligned(y);
        let block = (d.div_ceil(8) as u32).next_multiple_of(32).min(BLOCK);
        launches.push(
            self.launch(&named("scatter_sum", a.x.dtype), a.n_rows as u32, block)?
                .step(a.step)
                .write(y)
                .read(x)
                .read(order)
                .read(sorted)
                .baked(Baked(rows))
                .baked(Baked(n as u32))
                .baked(Baked(d as u32))
                .baked(Baked(u32::from(wide)))
                .vouch(&case),
        );
        Ok(())
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    all.push(KernelEntry::new(KernelFamily::Scatter, "scatter_rank", &[P, P, P, W], rank).unit("rank"));
    for dtype in FLOATS {
        let params = [P, P, P, P, size_of::<RowLayout>(), W, W, W];
        let entry = KernelEntry::new(KernelFamily::Scatter, named("scatter_sum", dtype), &params, move |k| {
            sum(k, dtype)
        });
        all.push(entry.unit(&lowercase(dtype)));
    }
}

fn rank(k: &mut SimKernel<'_>) -> KernelResult {
    let n = count(k, 3)?;
    let ids = k.read::<i32>(k.ptr(2)?, n)?;
    let mut order: Vec<u32> = (0..n as u32).collect();
    order.sort_by_key(|&i| ids[i as usize]);
    let sorted: Vec<i32> = order.iter().map(|&i| ids[i as usize]).collect();
    k.write(k.ptr(0)?, &order)?;
    k.write(k.ptr(1)?, &sorted)
}

fn sum(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (rows, n, d, n_rows) = (k.arg(4)?, count(k, 5)?, count(k, 6)?, k.config().grid[0] as usize);
    let x = Typed::rows(k, k.ptr(1)?, dtype, rows, &[n, d])?;
    let order = k.read::<u32>(k.ptr(2)?, n)?;
    let sorted = k.read::<i32>(k.ptr(3)?, n)?;
    let mut ids = vec![-1_i32; n];
    for (&row, &id) in order.iter().zip(&sorted) {
        ids[row as usize % n] = id;
    }
    let ids = Typed::new(DType::I32, &[n], bytemuck::pod_collect_to_vec(&ids))?;
    let y = run_typed(&Op::ScatterAddRows { n_rows }, &[&ids, &x], &[(dtype, &[n_rows, d])])?;
    k.write(k.ptr(0)?, &y[0])
}
