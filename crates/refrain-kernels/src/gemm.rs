//! GEMM of many rows on tensor cores: `y[m, n] = x[m, k] . w[n, k]^T`.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::linear::{LinearPart, MAX_PRODUCTS};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::count;
use crate::vouch::Vouch;

/// Dtypes that the tensor-core kernels multiply.
pub const GEMM_DTYPES: [DType; 2] = [DType::F16, DType::BF16];

/// Columns per block, elements of `k` per stage, and threads per block, as in `gemm.cu`.
const COLS: usize = 128;
const DEPTH: usize = 64;
const BLOCK: u32 = 128;
/// Elements per block of the reduction.
const REDUCE: usize = 1024;
/// Adding more splits than this costs more than it gains.
const MAX_SPLITS: usize = 16;
/// From this `k` on, splitting into tall tiles pays (measured on an H200).
const LONG: usize = 8192;

/// A kernel variant: rows per tile, and pipeline stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    rows: usize,
    stages: usize,
}

const LOW: Tile = Tile { rows: 64, stages: 4 };
const HIGH: Tile = Tile { rows: 128, stages: 3 };

impl Tile {
    fn shared_bytes(self) -> u32 {
        (self.stages * (self.rows + COLS) * 2 * DEPTH) as u32
    }

    fn name(self, dtype: DType) -> String {
        format!("gemm_m{}_{}", self.rows, lowercase(dtype))
    }
}

/// Division of a GEMM among blocks. It depends only on sizes and GPU, so results are reproducible bit for
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmPlan {
    tile: Tile,
    /// Splits of `k`, which run in parallel and are added afterwards.
    n_splits: usize,
    /// Elements of `k` per split.
    k_split: usize,
}

impl GemmPlan {
    /// Plans products of `m` rows with matrices of `ns` rows, on a GPU of `n_sms` SMs.
    #[must_use]
    pub fn new(m: usize, ns: &[usize], k: usize, n_sms: u32) -> GemmPlan {
        let columns: usize = ns.iter().map(|n| n.div_ceil(COLS)).sum();
        let blocks = |tile: Tile| columns.saturating_mul(m.div_ceil(tile.rows)).max(1);
        // Two blocks fit an SM. Tall tiles are better if there are enough of them for all SMs, or if splits
        // that are still long provide enough.
        let n_sms = n_sms as usize;
        let enough = 2 * blocks(HIGH) > 3 * n_sms || k >= LONG;
        let tile = if m > LOW.rows && enough { HIGH } else { LOW };
        let steps = k.div_ceil(DEPTH).max(1);
        // Each split has at least four stages.
        let target_splits = (2 * n_sms / blocks(tile)).clamp(1, MAX_SPLITS).min((steps / 4).max(1));
        let k_split = steps.div_ceil(target_splits) * DEPTH;
        GemmPlan { tile, n_splits: k.div_ceil(k_split).max(1), k_split }
    }

    /// Plans products of any number of rows in such a way that the sum of an output does not depend on it: the
    /// splits of `k` are those of a single row.
    #[must_use]
    pub fn for_any_rows(m: usize, ns: &[usize], k: usize, n_sms: u32) -> GemmPlan {
        let tile = if m > LOW.rows { HIGH } else { LOW };
        GemmPlan { tile, ..GemmPlan::new(1, ns, k, n_sms) }
    }

    /// Scratch size of [`Kernels::gemm`] for `n` columns in total.
    #[must_use]
    pub fn scratch_bytes(&self, m: usize, n: usize) -> u64 {
        match self.n_splits {
            1 => 0,
            splits => [m, n, splits].iter().fold(4, |bytes: u64, &n| bytes.saturating_mul(n as u64)),
        }
    }

    /// Rows per tile, and the number of splits.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.tile.rows, self.n_splits)
    }

    /// A plan with 128-row or 64-row tiles and a given number of splits, for comparisons.
    #[must_use]
    pub fn fixed(tall: bool, n_splits: usize, k: usize) -> GemmPlan {
        let k_split = k.div_ceil(DEPTH).div_ceil(n_splits.max(1)).max(1) * DEPTH;
        GemmPlan { tile: if tall { HIGH } else { LOW }, n_splits: k.div_ceil(k_split).max(1), k_split }
    }
}

/// `y = x . w^T` for one or more `w`, 16-bit with sums in F32.
#[derive(Clone, Copy, Debug)]
pub struct GemmArgs<'a> {
    /// `[m, k]`, dense.
    pub x: Buf,
    /// Dtype of `x` and of every `w`, one of [`GEMM_DTYPES`].
    pub dtype: DType,
    /// At most [`MAX_PRODUCTS`] weights.
    pub parts: &'a [LinearPart],
    /// Rows of `x`.
    pub m: usize,
    /// Columns of `x` and of every `w`, a multiple of 8.
    pub k: usize,
    /// Division among blocks.
    pub plan: GemmPlan,
    /// Scratch of [`GemmPlan::scratch_bytes`] bytes; unused with one split.
    pub scratch: Option<Buf>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Cumulative end column of each product.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct GemmEnds([u32; MAX_PRODUCTS]);

impl Kernels {
    /// Pushes the launches for [`GemmArgs`]: one, plus a reduction if there are several splits.
    pub fn gemm(&self, a: &GemmArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = OpCase { op: "gemm", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, GEMM_DTYPES.contains(&a.dtype), "the tensor-core kernels take F16 and BF16");
        crate::require!(case, a.k.is_multiple_of(8), "k must be a multiple of 8");
        let n_parts = a.parts.len();
        crate::require!(
            case,
            n_parts <= MAX_PRODUCTS,
            "{n_parts} matrices, at most {MAX_PRODUCTS} fit in one launch"
        );
        crate::require!(case, a.parts.iter().all(|part| part.n > 0), "one of the matrices is empty");
        let columns: usize = a.parts.iter().map(|part| part.n.div_ceil(COLS)).sum();
        crate::require!(case, columns <= 65_535, "at most {} columns fit in one launch", 65_535 * COLS);
        let GemmPlan { tile, n_splits, k_split } = a.plan;
        crate::require!(
            case,
            n_splits <= 65_535 && (n_splits - 1).saturating_mul(k_split) < a.k && n_splits * k_split >= a.k,
            "the plan is for another k"
        );
        let partials = match (n_splits, a.scratch) {
            (1, _) => None,
            (_, Some(scratch)) => Some(case.words("scratch", scratch, &[n_splits, a.m, n])?),
            (_, None) => return Err(case.refuse("more than one split needs scratch".to_owned())),
        };
        let ends = GemmEnds::of(a.parts);
        let elements = |rows: usize| rows.checked_mul(a.k).and_then(|n| n.checked_mul(2));
        let grid = [a.m.div_ceil(tile.rows) as u32, columns as u32, n_splits as u32];
        let mut launch =
            self.launch(&tile.name(a.dtype), grid, BLOCK)?.step(a.step).shared(tile.shared_bytes());
        launch = outputs(&case, a.parts, a.m, launch, partials.is_some())?;
        launch = match partials {
            Some(partials) => launch.write(partials),
            None => launch.null(),
        };
        launch = launch.read(case.buf("x", a.x, elements(a.m), 16)?);
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                Some(part) => launch.read(case.buf("w", part.w, elements(part.n), 16)?),
                None => launch.null(),
            };
        }
        let words = [a.m, a.k, k_split].map(|n| n as u32);
        launch =
            launch.baked(Baked(ends)).baked(Baked(words[0])).baked(Baked(words[1])).baked(Baked(words[2]));
        launches.push(launch.vouch(&case));
        match partials {
            Some(partials) => self.add_splits(&case, a.parts, a.m, partials, n_splits, a.step, launches),
            None => Ok(()),
        }
    }

    /// Pushes the launch that adds the splits' partial sums.
    #[allow(clippy::too_many_arguments, reason = "shared by the GEMM and the batched-decode kernels")]
    pub(crate) fn add_splits(
        &self,
        case: &OpCase<'_>,
        parts: &[LinearPart],
        m: usize,
        partials: Buf,
        n_splits: usize,
        step: &str,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let n: usize = parts.iter().map(|part| part.n).sum();
        let blocks = case.u32("m * n", m * n)?.div_ceil(REDUCE as u32);
        let launch = self.launch("gemm_reduce_f32", blocks, (REDUCE / 4) as u32)?.step(step);
        let launch = outputs(case, parts, m, launch, false)?;
        let launch = launch.read(partials).baked(Baked(GemmEnds::of(parts)));
        let launch = launch.baked(Baked(case.u32("m", m)?)).baked(Baked(n_splits as u32));
        launches.push(launch.vouch(case));
        Ok(())
    }
}

fn outputs(
    case: &OpCase<'_>,
    parts: &[LinearPart],
    m: usize,
    mut launch: LaunchBuilder,
    unused: bool,
) -> Result<LaunchBuilder, KernelError> {
    for i in 0..MAX_PRODUCTS {
        launch = match parts.get(i) {
            Some(part) if !unused => launch.write(case.words("y", part.y, &[m, part.n])?),
            Some(_) | None => launch.null(),
        };
    }
    Ok(launch)
}

impl GemmEnds {
    fn of(parts: &[LinearPart]) -> GemmEnds {
        let mut ends = GemmEnds([0; MAX_PRODUCTS]);
        let mut end = 0;
        for i in 0..MAX_PRODUCTS {
            end += parts.get(i).map_or(0, |part| part.n);
            ends.0[i] = end as u32;
        }
        ends
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const ENDS: usize = size_of::<GemmEnds>();
    for dtype in GEMM_DTYPES {
        for tile in [LOW, HIGH] {
            let params = [P, P, P, P, P, P, P, P, P, P, ENDS, W, W, W];
            let entry =
                KernelEntry::new(KernelFamily::Gemm, tile.name(dtype), &params, move |k| twin(k, dtype));
            all.push(entry.unit(&lowercase(dtype)).shared(move |_| tile.shared_bytes()));
        }
    }
    let entry = KernelEntry::new(KernelFamily::Gemm, "gemm_reduce_f32", &[P, P, P, P, P, ENDS, W, W], reduce);
    all.push(entry.unit("reduce"));
}

/// First column and number of columns of each product.
fn parts(ends: GemmEnds) -> Vec<(usize, usize)> {
    let begins = std::iter::once(0).chain(ends.0);
    begins.zip(ends.0).map(|(begin, end)| (begin as usize, (end - begin) as usize)).collect()
}

pub(crate) fn read(k: &SimKernel<'_>, at: DevicePtr, n: usize, dtype: DType) -> KernelResult<Vec<f32>> {
    Ok(match dtype {
        DType::F16 => k.view::<f16>(at, n)?.iter().map(|v| v.to_f32()).collect(),
        _ => k.view::<bf16>(at, n)?.iter().map(|v| v.to_f32()).collect(),
    })
}

/// Rounds the sum of each split to F32, so that results depend on the division of `k` as they do on a GPU.
fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (ends, m, cols, k_split) = (k.arg::<GemmEnds>(10)?, count(k, 11)?, count(k, 12)?, count(k, 13)?);
    let (n, n_splits) = (ends.0[MAX_PRODUCTS - 1] as usize, k.config().grid[2] as usize);
    let x = read(k, k.ptr(5)?, m * cols, dtype)?;
    let mut partials = vec![0.0_f32; if n_splits > 1 { n_splits * m * n } else { 0 }];
    for (i, (begin, n_part)) in parts(ends).into_iter().enumerate().filter(|(_, (_, n))| *n > 0) {
        let w = read(k, k.ptr(6 + i)?, n_part * cols, dtype)?;
        let sum = |row: usize, col: usize, split: usize| {
            let range = split * k_split..((split + 1) * k_split).min(cols);
            let (x, w) = (&x[row * cols..][range.clone()], &w[col * cols..][range]);
            x.iter().zip(w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
        };
        let rows = (0..m).flat_map(|row| (0..n_part).map(move |col| (row, col)));
        if n_splits == 1 {
            let y: Vec<f32> = rows.map(|(row, col)| sum(row, col, 0)).collect();
            k.write(k.ptr(i)?, &y)?;
            continue;
        }
        for ((row, col), split) in rows.flat_map(|at| (0..n_splits).map(move |split| (at, split))) {
            partials[(split * m + row) * n + begin + col] = sum(row, col, split);
        }
    }
    if n_splits > 1 { k.write(k.ptr(4)?, &partials) } else { Ok(()) }
}

fn reduce(k: &mut SimKernel<'_>) -> KernelResult {
    let (ends, m, n_splits) = (k.arg::<GemmEnds>(5)?, count(k, 6)?, count(k, 7)?);
    let n = ends.0[MAX_PRODUCTS - 1] as usize;
    let partials: Vec<f32> = k.read(k.ptr(4)?, n_splits * m * n)?;
    let sum = |at: usize| partials.iter().skip(at).step_by(m * n).sum::<f32>();
    for (i, (begin, n_part)) in parts(ends).into_iter().enumerate().filter(|(_, (_, n))| *n > 0) {
        let at = |j: usize| j / n_part * n + begin + j % n_part;
        let y: Vec<f32> = (0..m * n_part).map(|j| sum(at(j))).collect();
        k.write(k.ptr(i)?, &y)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_covers_k_and_fills_the_gpu_without_more_splits_than_stages() {
        for (m, n, k) in
            [(16, 64, 8), (512, 2048, 2048), (512, 8192, 2048), (32, 512, 14336), (512, 14336, 4096)]
        {
            let plan = GemmPlan::new(m, &[n], k, 132);
            assert!(plan.k_split.is_multiple_of(DEPTH));
            assert!((plan.n_splits - 1) * plan.k_split < k && plan.n_splits * plan.k_split >= k, "{plan:?}");
        }
        assert_eq!(GemmPlan::new(512, &[8192], 2048, 132).shape(), (128, 1));
        assert_eq!(GemmPlan::new(512, &[2048], 8192, 132).shape(), (128, 4));
        assert_eq!(GemmPlan::new(16, &[64], 8, 132).shape(), (64, 1));
        assert!(GemmPlan::new(32, &[2048], 2048, 132).n_splits > 4);
    }
}
