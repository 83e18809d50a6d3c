//! Batched-decode GEMM: 16-bit activation rows times packed weights, each weight read once. 16-bit weights
//! are left to cuBLASLt, which already reaches memory bandwidth.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::{DeviceInfo, DevicePtr};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Gate, Op};
use refrain_tensor::DType;

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::gemm;
use crate::linear::{LinearPart, MAX_PRODUCTS};
use crate::load::{GpuArch, Kernels};
use crate::narrow::{Narrow, Narrowed, PLANE, narrow_at};
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::tuning::{BatchTuning, Tuning};
use crate::twin::{Dense, fault, run_f32};
use crate::vouch::Vouch;

/// Maximum number of rows of x per launch.
pub const MAX_BATCH_ROWS: usize = 256;

/// Adding more splits than this costs more than it gains. Also the cluster size that every GPU supports.
const MAX_SPLITS: usize = 8;
/// Row counts of x with a kernel, each for counts up to it. Above the last one, the kernel loops over tiles
/// of that many rows.
const SIZES: [usize; 5] = [8, 16, 32, 64, 128];
/// Compute warps, and bytes of the barriers in front of the rings, as in `batch.cu`.
const WARPS: usize = 8;
const HEAD_BYTES: usize = 256;

/// Division of a kernel's block into rows, ring slots and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// Maximum number of rows of x.
    pub(crate) m: usize,
    /// Weight rows per block.
    pub(crate) rows: usize,
    /// Planes of x per unit of weights.
    pub(crate) planes: usize,
    /// Bytes of a slot in the weight ring, which holds one unit of every row.
    w_bytes: usize,
    /// Slots of the ring of x, one plane each.
    x_slots: usize,
}

impl Division {
    /// The division of the kernel for up to `m` rows; `None` if no kernel supports the dtype.
    pub(crate) fn of(m: usize, dtype: DType) -> Option<Division> {
        let unit = Unit::of(dtype)?;
        Some(Division::of_rows(m, unit.cols / PLANE, unit.bytes / TILE_ROWS))
    }

    /// The division for weights of 16 bits, a plane at a time; rows are padded in shared memory.
    pub(crate) fn of_16_bits(m: usize) -> Division {
        Division::of_rows(m, 1, 2 * PLANE + 16)
    }

    /// The division for weights with `row_bytes` bytes of a unit per row.
    fn of_rows(m: usize, planes: usize, row_bytes: usize) -> Division {
        let rows = if m == 128 { 256 } else { 128 };
        let x_slots = match m {
            8 | 16 => 4 * planes,
            32 => 4,
            64 if row_bytes >= 210 => 2,
            _ => 3,
        };
        Division { m, rows, planes, w_bytes: rows * row_bytes, x_slots }
    }

    /// The division for `m` rows on a GPU.
    fn for_rows(m: usize, dtype: DType, card: &Card) -> Option<Division> {
        let size = SIZES.into_iter().find(|&size| m <= size).unwrap_or(SIZES[SIZES.len() - 1]);
        Division::of(size, dtype).filter(|division| m <= MAX_BATCH_ROWS && division.fits(card))
    }

    pub(crate) fn shared_bytes(&self, tuning: BatchTuning) -> u32 {
        let budget = if self.m == 128 { 2 * tuning.shared_bytes } else { tuning.shared_bytes };
        let x_bytes = HEAD_BYTES + self.x_slots * self.m * 2 * PLANE;
        (x_bytes + (budget.saturating_sub(x_bytes) / self.w_bytes).clamp(2, 6) * self.w_bytes) as u32
    }

    pub(crate) fn fits(&self, card: &Card) -> bool {
        let has_registers = self.m <= 64 || card.is_hopper;
        has_registers && self.shared_bytes(card.tuning.batch) as usize <= card.shared_limit
    }

    /// Resident blocks per SM.
    const fn per_sm(&self) -> usize {
        if self.m == 128 { 1 } else { 2 }
    }

    /// One producer warp issues the copies, next to the compute warps. Where warps trade registers, that
    /// takes a whole warpgroup.
    pub(crate) const fn threads(&self) -> u32 {
        32 * (WARPS as u32 + if self.m == 128 { 4 } else { 1 })
    }

    fn name(&self, dtype: DType) -> String {
        format!("batch_m{}_{}", self.m, lowercase(dtype))
    }
}

/// Division of a matmul among blocks. It depends only on sizes and GPU, so results are reproducible bit for
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    division: Division,
    /// Splits of `k`, which run in parallel and are added afterwards.
    n_splits: usize,
    /// Units per split.
    per_split: usize,
    /// Whether the splits of a tile form a cluster and add their partial sums themselves.
    clustered: bool,
}

impl BatchPlan {
    /// Scratch size of [`Kernels::batch`] for `m` rows and `n` columns in total.
    #[must_use]
    pub fn scratch_bytes(&self, m: usize, n: usize) -> u64 {
        match self.n_splits {
            1 => 0,
            _ if self.clustered => 0,
            splits => [m, n, splits].iter().fold(4, |bytes: u64, &n| bytes.saturating_mul(n as u64)),
        }
    }

    /// Rows per plane of x, and the number of splits.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.division.m, self.n_splits)
    }

    /// The plan with a given number of splits, for comparisons.
    #[must_use]
    pub fn with_splits(self, n_splits: usize, k: usize) -> BatchPlan {
        let units = k.div_ceil(self.division.planes * PLANE).max(1);
        let per_split = units.div_ceil(n_splits.max(1));
        BatchPlan { n_splits: units.div_ceil(per_split), per_split, ..self }
    }

    /// The plan with splits added by a separate launch, as on GPUs without clusters.
    #[must_use]
    pub fn without_clusters(self) -> BatchPlan {
        BatchPlan { clustered: false, ..self }
    }
}

/// `y = x . w^T` for one or more `w`, with 16-bit rows and sums in F32.
#[derive(Clone, Copy, Debug)]
pub struct BatchArgs<'a> {
    /// `[m, k]` BF16, in planes whose row count [`BatchPlan::shape`] returns.
    pub x: Buf,
    /// Dtype of every `w`: one of [`PACKED_DTYPES`], packed.
    pub dtype: DType,
    /// At most [`MAX_PRODUCTS`]. With a gate there are two of equal size, and the first one's `y` receives
    /// the F32 result if it is wanted.
    pub parts: &'a [LinearPart],
    /// Rows of `x`, at most [`MAX_BATCH_ROWS`].
    pub m: usize,
    /// Columns of `x` and of every `w`: a multiple of 128, in whole quantisation blocks.
    pub k: usize,
    /// The division, from [`Kernels::batch_plan`].
    pub plan: BatchPlan,
    /// Scratch of [`BatchPlan::scratch_bytes`] bytes; unused with one split.
    pub scratch: Option<Buf>,
    /// Gate that joins the two products, and its BF16 output rows. Requires clustered splits.
    pub gate: Option<(Gate, Narrow)>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Number of clusters of this size that run concurrently. All blocks of a cluster run on one group of SMs
/// (GPC). Occupancy by cluster size shows that an H200 has six groups of 18 SMs and two of 12; other GPUs are
/// assumed to be divided alike.
fn concurrent_clusters(n_sms: usize, per_sm: usize, n_blocks: usize) -> usize {
    let in_groups = |sms: usize| sms * per_sm / n_blocks;
    ((6 * in_groups(18) + 2 * in_groups(12)) * n_sms / 132).max(1)
}

/// Whether a GPU has a kernel for `m` rows of `k` columns with weights of this dtype.
#[must_use]
pub fn has_batch(dtype: DType, m: usize, k: usize, card: &DeviceInfo) -> bool {
    let arch = GpuArch { major: card.compute.0, minor: card.compute.1 };
    let card = Card::new(card, Tuning::of(arch));
    Division::for_rows(m, dtype, &card).is_some() && k.is_multiple_of(PLANE.max(dtype.block_len()))
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct BatchParams {
    m: u32,
    k: u32,
    n: [u32; MAX_PRODUCTS],
    per_split: u32,
    gate: u32,
    narrow_rows: u32,
}

impl Kernels {
    /// Plans the multiplication of `m` rows with matrices of `ns` rows; `None` if this GPU has no kernel for
    /// it.
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
        let division = Division::for_rows(m, dtype, card)?;
        if !k.is_multiple_of(PLANE.max(dtype.block_len())) {
            return None;
        }
        let per_tile = if gated { division.rows / 2 } else { division.rows };
        let tiles: usize =
            if gated { ns[0].div_ceil(per_tile) } else { ns.iter().map(|n| n.div_ceil(per_tile)).sum() };
        let tiles = tiles * m.div_ceil(division.m);
        let units = k.div_ceil(division.planes * PLANE).max(1);
        let clustered = card.has_clusters;
        let max_splits = if gated && !clustered { 1 } else { MAX_SPLITS.min(units) };
        // Cost in units: every block adds a prologue and an epilogue, and partial sums are read once more.
        let cost = |splits: usize| {
            let per_split = units.div_ceil(splits);
            let n_splits = units.div_ceil(per_split);
            let concurrent = match clustered {
                true => concurrent_clusters(card.n_sms, division.per_sm(), n_splits),
                false => (card.n_sms * division.per_sm() / n_splits).max(1),
            };
            let rounds = tiles.div_ceil(concurrent);
            2 * rounds * (per_split + 1) + if splits > 1 { 1 + splits / 2 } else { 0 }
        };
        let n_splits = (1..=max_splits).min_by_key(|&splits| cost(splits))?;
        let plan = BatchPlan { division, n_splits: 1, per_split: units, clustered };
        Some(plan.with_splits(n_splits, k))
    }

    /// Pushes the launches for [`BatchArgs`]: one, plus a reduction if there are several splits.
    pub fn batch(&self, a: &BatchArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = OpCase { op: "batch", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let BatchPlan { division, n_splits, per_split, clustered } = a.plan;
        let n_parts = a.parts.len();
        let block_len = a.dtype.block_len();
        let n_tiles = a.m.div_ceil(division.m);
        crate::require!(
            case,
            n_tiles == 1 || (division.m == SIZES[SIZES.len() - 1] && a.m <= MAX_BATCH_ROWS),
            "the plan is for {} rows",
            division.m
        );
        crate::require!(
            case,
            Division::of(division.m, a.dtype) == Some(division),
            "the plan is for another dtype"
        );
        crate::require!(
            case,
            a.k.is_multiple_of(PLANE.max(block_len)),
            "k must be a multiple of {PLANE}, in whole quantisation blocks"
        );
        crate::require!(
            case,
            n_parts <= MAX_PRODUCTS,
            "{n_parts} matrices, at most {MAX_PRODUCTS} fit in one launch"
        );
        crate::require!(case, a.parts.iter().all(|part| part.n > 0), "one of the matrices is empty");
        let units = a.k.div_ceil(division.planes * PLANE);
        crate::require!(
            case,
            (n_splits - 1).saturating_mul(per_split) < units && n_splits * per_split >= units,
            "the plan is for another k"
        );
        let gated = a.gate.is_some();
        let gate_is_wide = a.gate.is_some_and(|(_, to)| to.also_wide);
        crate::require!(
            case,
            !gated || ((n_splits == 1 || clustered) && n_parts == 2 && a.parts[0].n == a.parts[1].n),
            "a gate needs two matrices of equal size, and clusters if there are several splits"
        );
        let partials = match (n_splits, a.scratch) {
            (1, _) => None,
            _ if clustered => None,
            (_, Some(scratch)) => Some(case.words("scratch", scratch, &[n_splits, a.m, n])?),
            (_, None) => return Err(case.refuse("more than one split needs scratch".to_owned())),
        };
        let per_tile = if gated { division.rows / 2 } else { division.rows };
        let tiled = if gated { &a.parts[..1] } else { a.parts };
        let tiles: usize = tiled.iter().map(|part| part.n.div_ceil(per_tile)).sum();
        let grid = [case.u32("n", tiles)?, n_splits as u32, n_tiles as u32];
        let mut launch = self
            .launch(&division.name(a.dtype), grid, division.threads())?
            .shared(division.shared_bytes(self.card().tuning.batch))
            .step(a.step);
        if n_splits > 1 && clustered {
            launch = launch.cluster([1, n_splits as u32, 1]);
        }
        for i in 0..MAX_PRODUCTS {
            launch = match a.parts.get(i) {
                // With a gate, the first output is the gate's result.
                Some(part) if partials.is_none() && (!gated || (i == 0 && gate_is_wide)) => {
                    let words = a.m.checked_mul(part.n).and_then(|n| n.checked_mul(4));
                    launch.write(case.buf("y", part.y, words, if gated { 16 } else { 4 })?)
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
                crate::require!(case, to.dtype == DType::BF16, "the gate writes BF16 rows");
                launch.write(to.check(&case, a.m, a.parts[0].n)?)
            }
            None => launch.null(),
        };
        launch = launch.read(case.buf("x", a.x, elements(n_tiles * division.m, a.k), 16)?);
        let mut params = BatchParams {
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

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for (division, dtype) in variants() {
        let params = [P, P, P, P, P, P, P, P, P, P, P, size_of::<BatchParams>()];
        let entry = KernelEntry::new(KernelFamily::Batch, division.name(dtype), &params, move |k| {
            twin(k, dtype, division.m)
        });
        // GPUs with less shared memory per block never use this kernel.
        let shared =
            move |card: &Card| division.shared_bytes(card.tuning.batch).min(card.shared_limit as u32);
        all.push(entry.unit(&lowercase(dtype)).shared(shared));
    }
}

/// Unpacks a row into the 16-bit numbers that the kernel multiplies.
pub(crate) fn packed_row(dtype: DType, packed: &[u8], row: usize, out: &mut [f32]) -> KernelResult {
    let k = out.len();
    if matches!(dtype, DType::Q4_0 | DType::Q4_1 | DType::Q4_K) {
        four_bits_row(dtype, packed, row, out);
        return Ok(());
    }
    unpack_row(dtype, packed, row, k, out).ok_or_else(|| fault("a row ends inside a quantisation block"))?;
    out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    Ok(())
}

/// 4-bit quants: the distance from the centre 8 is exact; the scale and the remaining minimum are rounded.
fn four_bits_row(dtype: DType, packed: &[u8], row: usize, out: &mut [f32]) {
    let Some(unit) = Unit::of(dtype) else { unreachable!("{dtype} is packed") };
    let tile = row / TILE_ROWS * out.len().div_ceil(unit.cols);
    for (i, out) in out.chunks_exact_mut(32).enumerate() {
        let (of_unit, sub) = (32 * i / unit.cols, i % (unit.cols / 32));
        let unit = &packed[(tile + of_unit) * unit.bytes..][..unit.bytes];
        let (plane, lane) = (sub / 4, 4 * (row % TILE_ROWS) + sub % 4);
        let half = |at: usize| f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32();
        let (scale, min) = match dtype {
            DType::Q4_0 => (half(512 + 2 * lane), 8.0 * half(512 + 2 * lane)),
            DType::Q4_1 => (half(512 + 4 * lane), -half(514 + 4 * lane)),
            _ => {
                let (bytes, row) = (&unit[1024 + 4 * lane + 2 * plane..], 1152 + 4 * (row % TILE_ROWS));
                (half(row) * f32::from(bytes[0]), half(row + 2) * f32::from(bytes[1]))
            }
        };
        let round = |v: f32| bf16::from_f32(v).to_f32();
        let (scale, offset) = (round(scale), round(scale.mul_add(8.0, -min)));
        let nibbles = &unit[512 * plane + 16 * lane..][..16];
        for (e, v) in out.iter_mut().enumerate() {
            let quant = nibbles[e % 16] >> (4 * (e / 16)) & 15;
            *v = round((f32::from(quant) - 8.0).mul_add(scale, offset));
        }
    }
}

/// Writes whole sums to the first split and zeros to the others.
fn twin(k: &mut SimKernel<'_>, dtype: DType, plane_rows: usize) -> KernelResult {
    let p: BatchParams = k.arg(11)?;
    let (m, cols, n_splits) = (p.m as usize, p.k as usize, k.config().grid[1] as usize);
    let bytes_of = |n: usize| {
        packed_bytes(dtype, n, cols).ok_or_else(|| fault("a row ends inside a quantisation block"))
    };
    let ns: Vec<usize> = p.n.iter().map(|&n| n as usize).filter(|&n| n > 0).collect();
    let weights = ns.iter().enumerate().map(|(i, &n)| Ok((k.ptr(7 + i)?, bytes_of(n)?)));
    let weights = weights.collect::<KernelResult<Vec<_>>>()?;
    k.before_wait(|k| weights.iter().try_for_each(|&(at, bytes)| k.view::<u8>(at, bytes).map(|_| ())))?;
    // Rows past m are undefined.
    let planes = gemm::read(k, k.ptr(6)?, m.next_multiple_of(plane_rows) * cols, DType::BF16)?;
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
    if k.ptr(4)? == DevicePtr(0) {
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
    fn stages_fit_the_gpus_they_are_chosen_for() {
        for (division, dtype) in variants() {
            for tuning in Tuning::ALL {
                let shared = division.shared_bytes(tuning.batch) as usize;
                let limit = if tuning.measured_on.is_some() { 227 << 10 } else { 99 << 10 };
                // Two blocks per SM share less than 228 KiB, and each reserves 1 KiB for the system.
                let fits = shared <= limit
                    && (division.per_sm() == 1 || tuning.measured_on.is_none() || shared <= 113 << 10);
                // For kernels of 64 rows and more, `Division::fits` checks the GPU.
                assert!(
                    fits || division.m >= 64,
                    "{} on {:?}: {shared}",
                    division.name(dtype),
                    tuning.measured_on
                );
            }
        }
    }
}
