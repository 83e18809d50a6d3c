//! Products of the rows of many sequences with packed weights: up to 64 rows in 16 bits, each weight read once. Weights of 16
//! bits are left to the library, which is as fast as memory.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use refrain_driver::api::DeviceInfo;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Gate, Op};
use refrain_tensor::DType;

use crate::card::Card;
use crate::error::{Case, KernelError};
use crate::gemm;
use crate::linear::{LinearPart, MAX_PRODUCTS};
use crate::load::{Arch, Kernels};
use crate::narrow::{Narrow, Narrowed, PLANE, narrow_at};
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{Entry, P, lowercase};
use crate::source::Family;
use crate::tuning::{BatchTuning, Tuning};
use crate::twin::{Dense, fault, run_f32};
use crate::vouch::Vouch;

/// The most rows that one launch multiplies.
pub const MAX_BATCH_ROWS: usize = 64;

/// More splits than this cost more to add than they gain.
const MAX_SPLITS: usize = 16;
/// Rows of x there are kernels for, each for all up to it.
const SIZES: [usize; 4] = [8, 16, 32, 64];

/// How a block of a kernel is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// The most rows of x.
    m: usize,
    warps: usize,
    /// Rows of weights.
    rows: usize,
    /// Planes of a stage.
    planes: usize,
    /// Bytes of a stage.
    stage: usize,
}

impl Division {
    /// Of the kernel for `m` rows at most, `None` where no kernel has this dtype.
    fn of(m: usize, dtype: DType) -> Option<Division> {
        let unit = Unit::of(dtype)?;
        let unit_planes = unit.cols / PLANE;
        let warps = if m == 64 { 16 } else { 8 };
        let groups = match m {
            8 => 2,
            16 => 4,
            _ => 8,
        };
        let (rows, planes) = (16 * groups, (warps / groups).max(unit_planes));
        let weights = rows / TILE_ROWS * (planes / unit_planes) * unit.bytes;
        Some(Division { m, warps, rows, planes, stage: weights + m * planes * 2 * PLANE })
    }

    fn shared_bytes(&self, tuning: BatchTuning) -> u32 {
        let room = if self.m == 64 { 2 * tuning.shared_bytes } else { tuning.shared_bytes };
        ((room / self.stage).clamp(2, 6) * self.stage) as u32
    }

    fn fits(&self, card: &Card) -> bool {
        self.shared_bytes(card.tuning.batch) as usize <= card.shared_limit
    }

    /// Blocks that a multiprocessor has at a time.
    const fn per_sm(&self) -> usize {
        if self.m == 64 { 1 } else { 2 }
    }

    fn name(&self, dtype: DType) -> String {
        format!("batch_m{}_{}", self.m, lowercase(dtype))
    }
}

/// How products are divided among blocks: fixed by their sizes and the card, so that their bits are too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    division: Division,
    /// Parts of `k` that run side by side and are added afterwards.
    n_splits: usize,
    /// Stages of a split.
    per_split: usize,
}

impl BatchPlan {
    /// Scratch that [`Kernels::batch`] needs for `m` rows and `n` columns in all.
    #[must_use]
    pub fn scratch_bytes(&self, m: usize, n: usize) -> u64 {
        match self.n_splits {
            1 => 0,
            splits => [m, n, splits].iter().fold(4, |bytes: u64, &n| bytes.saturating_mul(n as u64)),
        }
    }

    /// Rows of the planes that x lies in, and splits.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.division.m, self.n_splits)
    }

    /// With as many splits, to compare.
    #[must_use]
    pub fn with_splits(self, n_splits: usize, k: usize) -> BatchPlan {
        let stages = k.div_ceil(self.division.planes * PLANE).max(1);
        let per_split = stages.div_ceil(n_splits.max(1));
        BatchPlan { n_splits: stages.div_ceil(per_split), per_split, ..self }
    }
}

/// `y = x . w^T` for one or more `w`, of rows in 16 bits with sums in F32.
#[derive(Clone, Copy, Debug)]
pub struct BatchArgs<'a> {
    /// `[m, k]` BF16, in planes of as many rows as [`BatchPlan::shape`] says.
    pub x: Buf,
    /// Of every `w`: one of [`PACKED_DTYPES`], packed.
    pub dtype: DType,
    /// At most [`MAX_PRODUCTS`]; with a gate two of the same size, and the first's `y` is where its result goes in F32 if
    /// that is wanted.
    pub parts: &'a [LinearPart],
    /// Rows of `x`, at most [`MAX_BATCH_ROWS`].
    pub m: usize,
    /// Columns of `x` and of every `w`: a multiple of 128, and whole blocks.
    pub k: usize,
    /// How it is divided: from [`Kernels::batch_plan`].
    pub plan: BatchPlan,
    /// [`BatchPlan::scratch_bytes`]; unused with one split.
    pub scratch: Option<Buf>,
    /// The gate that joins both products, with the rows in BF16 that come of it. There are no splits then.
    pub gate: Option<(Gate, Narrow)>,
    /// Names the step.
    pub step: &'a str,
}

/// Whether a card has a kernel for `m` rows of `k` columns and weights of a dtype.
#[must_use]
pub fn has_batch(dtype: DType, m: usize, k: usize, card: &DeviceInfo) -> bool {
    let division = SIZES.into_iter().find(|&size| m <= size).and_then(|size| Division::of(size, dtype));
    let arch = Arch { major: card.compute.0, minor: card.compute.1 };
    let card = Card::new(card, Tuning::of(arch));
    division.is_some_and(|division| division.fits(&card)) && k.is_multiple_of(PLANE.max(dtype.block_len()))
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Params {
    m: u32,
    k: u32,
    n: [u32; MAX_PRODUCTS],
    per_split: u32,
    gate: u32,
    narrow_rows: u32,
}

impl Kernels {
    /// How products of `m` rows with matrices of `ns` rows are divided; `None` where there is no kernel for them on this
    /// card.
    #[must_use]
    pub fn batch_plan(
        &self,
        dtype: DType,
        m: usize,
        ns: &[usize],
        k: usize,
        gated: bool,
    ) -> Option<BatchPlan> {
        let card = self.card();
        let division = Division::of(SIZES.into_iter().find(|&size| m <= size)?, dtype)?;
        if !division.fits(card) || !k.is_multiple_of(PLANE.max(dtype.block_len())) {
            return None;
        }
        let per_tile = if gated { division.rows / 2 } else { division.rows };
        let tiles: usize =
            if gated { ns[0].div_ceil(per_tile) } else { ns.iter().map(|n| n.div_ceil(per_tile)).sum() };
        let stages = k.div_ceil(division.planes * PLANE).max(1);
        let places = card.n_sms * division.per_sm();
        let most = if gated { 1 } else { MAX_SPLITS.min(stages) };
        // In stages: each block has a start and an end, and splits are read once more.
        let cost = |splits: usize| {
            let per_split = stages.div_ceil(splits);
            let rounds = (tiles * stages.div_ceil(per_split)).div_ceil(places);
            2 * rounds * (per_split + 1) + if splits > 1 { 3 + splits / 2 } else { 0 }
        };
        let n_splits = (1..=most).min_by_key(|&splits| cost(splits))?;
        let plan = BatchPlan { division, n_splits: 1, per_split: stages };
        Some(plan.with_splits(n_splits, k))
    }

    /// Pushes the launches of [`BatchArgs`]: one, and a second that adds when there are several splits.
    pub fn batch(&self, a: &BatchArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = Case { op: "batch", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let BatchPlan { division, n_splits, per_split } = a.plan;
        let n_parts = a.parts.len();
        let block_len = a.dtype.block_len();
        crate::require!(case, a.m <= division.m, "it was planned for {} rows", division.m);
        crate::require!(
            case,
            Division::of(division.m, a.dtype) == Some(division),
            "it was planned for another dtype"
        );
        crate::require!(
            case,
            a.k.is_multiple_of(8.max(block_len)),
            "k must be whole blocks, and a multiple of 8"
        );
        crate::require!(
            case,
            n_parts <= MAX_PRODUCTS,
            "{n_parts} products, at most {MAX_PRODUCTS} go in one launch"
        );
        crate::require!(case, a.parts.iter().all(|part| part.n > 0), "one of the products is empty");
        let stages = a.k.div_ceil(division.planes * PLANE);
        crate::require!(
            case,
            (n_splits - 1).saturating_mul(per_split) < stages && n_splits * per_split >= stages,
            "it was planned for another k"
        );
        let gated = a.gate.is_some();
        let gate_is_wide = a.gate.is_some_and(|(_, to)| to.also_wide);
        crate::require!(
            case,
            !gated || (n_splits == 1 && n_parts == 2 && a.parts[0].n == a.parts[1].n),
            "a gate joins two products of one size, without splits"
        );
        let partials = match (n_splits, a.scratch) {
            (1, _) => None,
            (_, Some(scratch)) => Some(case.words("scratch", scratch, &[n_splits, a.m, n])?),
            (_, None) => return Err(case.refuse("several splits need scratch".to_owned())),
        };
        let per_tile = if gated { division.rows / 2 } else { division.rows };
        let tiled = if gated { &a.parts[..1] } else { a.parts };
        let tiles: usize = tiled.iter().map(|part| part.n.div_ceil(per_tile)).sum();
        let grid = [case.u32("n", tiles)?, n_splits as u32, 1];
        let mut launch = self
            .launch(&division.name(a.dtype), grid, 32 * (division.warps as u32 + 1))?
            .shared(division.shared_bytes(self.card().tuning.batch))
            .step(a.step);
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                // With a gate the first is its result.
                Some(part) if partials.is_none() && (!gated || (i == 0 && gate_is_wide)) => {
                    launch.write(case.words("y", part.y, &[a.m, part.n])?)
                }
                Some(_) | None => launch.null(),
            };
        }
        launch = match partials {
            Some(partials) => launch.write(partials),
            None => launch.null(),
        };
        let elements = |rows: usize, columns: usize| rows.checked_mul(columns).and_then(|n| n.checked_mul(2));
        launch = match a.gate {
            Some((_, to)) => {
                crate::require!(case, to.dtype == DType::BF16, "the gate's rows are BF16");
                launch.write(to.check(&case, a.m, a.parts[0].n)?)
            }
            None => launch.null(),
        };
        launch = launch.read(case.buf("x", a.x, elements(division.m, a.k), 16)?);
        let mut params = Params {
            m: case.u32("m", a.m)?,
            k: case.u32("k", a.k)?,
            n: [0; MAX_PRODUCTS],
            per_split: per_split as u32,
            gate: match a.gate {
                None => 0,
                Some((Gate::Silu, _)) => 1,
                Some((Gate::GeluTanh, _)) => 2,
            },
            narrow_rows: a.gate.map_or(0, |(_, to)| to.plane_rows as u32),
        };
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                Some(part) => {
                    params.n[i] = case.u32("n", part.n)?;
                    let bytes = packed_bytes(a.dtype, part.n, a.k);
                    launch.read(case.buf("w", part.w, bytes, 16)?)
                }
                None => launch.null(),
            };
        }
        launches.push(launch.baked(Baked(params)).vouch(&case));
        match partials {
            Some(partials) => self.add_splits(&case, a.parts, a.m, partials, n_splits, a.step, launches),
            None => Ok(()),
        }
    }
}

fn variants() -> impl Iterator<Item = (Division, DType)> {
    SIZES.into_iter().flat_map(move |m| {
        PACKED_DTYPES.into_iter().filter_map(move |dtype| Some((Division::of(m, dtype)?, dtype)))
    })
}

pub(crate) fn entries(all: &mut Vec<Entry>) {
    for (division, dtype) in variants() {
        let params = [P, P, P, P, P, P, P, P, P, P, P, size_of::<Params>()];
        let entry =
            Entry::new(Family::Batch, division.name(dtype), &params, move |k| twin(k, dtype, division.m));
        // A card whose blocks have less is never given this one.
        let shared =
            move |card: &Card| division.shared_bytes(card.tuning.batch).min(card.shared_limit as u32);
        all.push(entry.unit(&lowercase(dtype)).shared(shared));
    }
}

/// A packed row as the numbers of 16 bits that are multiplied.
fn packed_row(dtype: DType, packed: &[u8], row: usize, out: &mut [f32]) -> KernelResult {
    let k = out.len();
    unpack_row(dtype, packed, row, k, out).ok_or_else(|| fault("rows of partial blocks"))?;
    out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    Ok(())
}

/// The whole sums in the first split; the others are zeros.
fn twin(k: &mut SimKernel<'_>, dtype: DType, plane_rows: usize) -> KernelResult {
    let p: Params = k.arg(11)?;
    let (m, cols, n_splits) = (p.m as usize, p.k as usize, k.config().grid[1] as usize);
    let bytes_of = |n: usize| packed_bytes(dtype, n, cols).ok_or_else(|| fault("rows of partial blocks"));
    let ns: Vec<usize> = p.n.iter().map(|&n| n as usize).filter(|&n| n > 0).collect();
    let weights = ns.iter().enumerate().map(|(i, &n)| Ok((k.ptr(7 + i)?, bytes_of(n)?)));
    let weights = weights.collect::<KernelResult<Vec<_>>>()?;
    k.before_wait(|k| weights.iter().try_for_each(|&(at, bytes)| k.view::<u8>(at, bytes).map(|_| ())))?;
    // Rows behind m may hold anything.
    let planes = gemm::read(k, k.ptr(6)?, plane_rows * cols, DType::BF16)?;
    let element = |i: usize| planes[narrow_at(i / cols, i % cols, cols, plane_rows)];
    let x: Vec<f32> = (0..m * cols).map(element).collect();
    let mut ys = Vec::new();
    for (&n, &(at, bytes)) in ns.iter().zip(&weights) {
        let mut y = vec![0.0_f32; m * n];
        let w = k.view::<u8>(at, bytes)?;
        let mut row = vec![0.0; cols];
        for j in 0..n {
            packed_row(dtype, &w, j, &mut row)?;
            for (i, x) in x.chunks_exact(cols).enumerate() {
                let dot: f64 = x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                y[i * n + j] = dot as f32;
            }
        }
        ys.push(y);
    }
    if p.gate != 0 {
        let (kind, dims) = (if p.gate == 1 { Gate::Silu } else { Gate::GeluTanh }, [m, ns[0]]);
        let [gate, up] = [Dense::f32(&ys[0], &dims)?, Dense::f32(&ys[1], &dims)?];
        let y = run_f32(&Op::Gate(kind), &[&gate, &up], &dims)?;
        let to = Narrowed { dtype: DType::BF16, n_cols: ns[0], plane_rows: p.narrow_rows as usize };
        return to.write(k, &y, 5, Some(0));
    }
    if n_splits == 1 {
        return ys.iter().enumerate().try_for_each(|(i, y)| k.write(k.ptr(i)?, y));
    }
    let n: usize = ns.iter().sum();
    let mut partials = vec![0.0_f32; n_splits * m * n];
    let mut begin = 0;
    for (y, &n_part) in ys.iter().zip(&ns) {
        for (row, y) in y.chunks_exact(n_part).enumerate() {
            partials[row * n + begin..][..n_part].copy_from_slice(y);
        }
        begin += n_part;
    }
    k.write(k.ptr(4)?, &partials)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn stages_fit_the_cards_that_are_given_them() {
        for (division, dtype) in variants() {
            for tuning in Tuning::ALL {
                let shared = division.shared_bytes(tuning.batch) as usize;
                let limit = if tuning.measured_on.is_some() { 227 << 10 } else { 99 << 10 };
                // Two blocks of a multiprocessor have less than 228 KiB between them, 1 KiB of each the card's own.
                let fits = shared <= limit
                    && (division.per_sm() == 1 || tuning.measured_on.is_none() || shared <= 113 << 10);
                assert!(
                    fits || division.m == 64,
                    "{} on {:?}: {shared}",
                    division.name(dtype),
                    tuning.measured_on
                );
            }
        }
    }
}
