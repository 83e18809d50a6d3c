//! Division of batched-decode GEMM among blocks: which kernel, and how many splits of `k`.

use refrain_driver::api::DeviceInfo;
use refrain_tensor::DType;

use crate::card::Card;
use crate::gemm::GEMM_DTYPES;
use crate::load::{GpuArch, Kernels};
use crate::narrow::PLANE;
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit};
use crate::registry::lowercase;
use crate::source::KernelFamily;
use crate::tuning::{BatchTuning, Tuning};

/// Maximum number of rows of x per launch.
pub const MAX_BATCH_ROWS: usize = 256;

/// Adding more splits than this costs more than it gains. Also the cluster size that every GPU supports.
const MAX_SPLITS: usize = 8;
/// Row counts of x with a kernel, each for counts up to it. Above the last one, the kernel loops over tiles
/// of that many rows.
const SIZES: [usize; 5] = [8, 16, 32, 64, 128];
/// Kernels for 16-bit weights: rows of x, and pieces of 16 rows of weights per tile, or 0 for `batch_direct.cuh`.
/// Larger batches are left to cuBLASLt.
const PLAIN: [(usize, usize); 4] = [(8, 1), (16, 2), (32, 0), (64, 0)];
/// Rows of a piece, planes of a step, and bytes of a slot, as in `batch_plain.cu`.
const PIECE_ROWS: usize = 16;
const STEP: usize = 4;
const PIECE_BYTES: usize = PIECE_ROWS * (STEP * 2 * PLANE + 16);
/// Compute warps, and bytes of the barriers in front of the rings, as in `batch.cuh`.
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
    /// Slots of the ring of x, one plane each; for 16-bit weights, the planes of a step.
    x_slots: usize,
    kind: DivisionKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DivisionKind {
    /// Packed weights, and 16-bit weights of experts: `batch.cuh`.
    Rings,
    /// 16-bit weights in tiles of this many pieces: `batch_plain.cu`.
    Pieces(usize),
    /// 16-bit weights through registers: `batch_direct.cuh`.
    Direct,
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
        Division { m, rows, planes, w_bytes: rows * row_bytes, x_slots, kind: DivisionKind::Rings }
    }

    /// The division of a kernel of `batch_plain.cu`, as in [`PLAIN`].
    fn plain(m: usize, pieces: usize) -> Division {
        let (x_slots, rows, kind) = match (m, pieces) {
            (32, 0) => (6, 16 * WARPS, DivisionKind::Direct),
            (_, 0) => (5, 16 * WARPS, DivisionKind::Direct),
            (8, _) => (3, PIECE_ROWS * pieces, DivisionKind::Pieces(pieces)),
            _ => (2, PIECE_ROWS * pieces, DivisionKind::Pieces(pieces)),
        };
        Division { m, rows, planes: 1, w_bytes: PIECE_BYTES, x_slots, kind }
    }

    /// The divisions of all kernels for weights of a dtype, by increasing rows of x.
    pub(crate) fn all(dtype: DType) -> Vec<Division> {
        match GEMM_DTYPES.contains(&dtype) {
            true => PLAIN.into_iter().map(|(m, pieces)| Division::plain(m, pieces)).collect(),
            false => SIZES.into_iter().filter_map(|m| Division::of(m, dtype)).collect(),
        }
    }

    /// The division for `m` rows on a GPU.
    fn for_rows(m: usize, dtype: DType, card: &Card) -> Option<Division> {
        let all = Division::all(dtype);
        let largest = all.last().filter(|last| !last.is_plain() && m <= MAX_BATCH_ROWS);
        let division = all.iter().find(|division| m <= division.m).or(largest)?;
        division.fits(card).then_some(*division)
    }

    /// Whether the kernel is in `batch_plain.cu`.
    pub(crate) fn is_plain(&self) -> bool {
        self.kind != DivisionKind::Rings
    }

    pub(crate) fn family(&self) -> KernelFamily {
        if self.is_plain() { KernelFamily::BatchPlain } else { KernelFamily::Batch }
    }

    pub(crate) fn shared_bytes(&self, tuning: BatchTuning) -> u32 {
        match self.kind {
            DivisionKind::Rings => self.rings_bytes(tuning),
            DivisionKind::Pieces(_) => {
                let sums = 4 * WARPS / 2 * self.m * (self.rows + 4);
                let others = HEAD_BYTES + self.x_slots * STEP * self.m * 2 * PLANE + sums;
                let n_slots = tuning.plain_shared_bytes.saturating_sub(others) / self.w_bytes;
                (others + n_slots * self.w_bytes) as u32
            }
            DivisionKind::Direct => (HEAD_BYTES + self.x_slots * self.m * 2 * PLANE) as u32,
        }
    }

    fn rings_bytes(&self, tuning: BatchTuning) -> u32 {
        let budget = if self.m == 128 { 2 * tuning.shared_bytes } else { tuning.shared_bytes };
        let x_bytes = HEAD_BYTES + self.x_slots * self.m * 2 * PLANE;
        (x_bytes + (budget.saturating_sub(x_bytes) / self.w_bytes).clamp(2, 6) * self.w_bytes) as u32
    }

    pub(crate) fn fits(&self, card: &Card) -> bool {
        // Elsewhere, nobody has compared the kernels for 16-bit weights with cuBLASLt.
        if self.is_plain() && card.tuning.measured_on.is_none() {
            return false;
        }
        let has_registers = self.m <= 64 || card.is_hopper;
        has_registers && self.shared_bytes(card.tuning.batch) as usize <= card.shared_limit
    }

    /// Resident blocks per SM.
    const fn per_sm(&self) -> usize {
        if self.m == 128 { 1 } else { 2 }
    }

    /// Producer warps issue the copies, next to the compute warps: one, a whole warpgroup where warps trade
    /// registers, and several where copies are many.
    pub(crate) const fn threads(&self) -> u32 {
        let producers = match self.kind {
            DivisionKind::Rings if self.m == 128 => 4,
            DivisionKind::Rings => 1,
            DivisionKind::Pieces(_) => 4,
            DivisionKind::Direct => 0,
        };
        32 * (WARPS as u32 + producers)
    }

    pub(crate) fn name(&self, dtype: DType) -> String {
        let (m, dtype) = (self.m, lowercase(dtype));
        match self.kind {
            DivisionKind::Rings => format!("batch_m{m}_{dtype}"),
            DivisionKind::Pieces(pieces) => format!("batch_plain_m{m}_h{pieces}_{dtype}"),
            DivisionKind::Direct => format!("batch_plain_m{m}_{dtype}"),
        }
    }
}

/// Division of a matmul among blocks. It depends only on sizes and GPU, so results are reproducible bit for
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    pub(crate) division: Division,
    /// Splits of `k`, which run in parallel and are added afterwards.
    pub(crate) n_splits: usize,
    /// Units per split.
    pub(crate) per_split: usize,
    /// Whether the splits of a tile form a cluster and add their partial sums themselves.
    pub(crate) clustered: bool,
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
        if !k.is_multiple_of(PLANE.max(dtype.block_len())) {
            return None;
        }
        let division = Division::for_rows(m, dtype, card)?;
        let per_tile = if gated { division.rows / 2 } else { division.rows };
        let tiles: usize =
            if gated { ns[0].div_ceil(per_tile) } else { ns.iter().map(|n| n.div_ceil(per_tile)).sum() };
        let tiles = tiles * m.div_ceil(division.m);
        let units = k.div_ceil(division.planes * PLANE).max(1);
        let clustered = card.has_clusters;
        let n_splits = match division.is_plain() {
            true => division.few_splits(tiles, units, card),
            false => division.splits(tiles, units, gated, card)?,
        };
        let plan = BatchPlan { division, n_splits: 1, per_split: units, clustered };
        Some(plan.with_splits(n_splits, k))
    }
}

impl Division {
    /// Blocks of each split: those that take one tile after another are no more than run at once.
    pub(crate) fn n_blocks(&self, tiles: usize, n_splits: usize, card: &Card) -> usize {
        match self.kind {
            DivisionKind::Pieces(_) if n_splits == 1 => {
                tiles.min(card.tuning.batch.plain_blocks * card.n_sms)
            }
            DivisionKind::Pieces(_) | DivisionKind::Direct | DivisionKind::Rings => tiles,
        }
    }

    /// The best number of splits. The cost is in units: every block adds a prologue and an epilogue, and partial
    /// sums are read once more.
    fn splits(&self, tiles: usize, units: usize, gated: bool, card: &Card) -> Option<usize> {
        let clustered = card.has_clusters;
        let max_splits = if gated && !clustered { 1 } else { MAX_SPLITS.min(units) };
        let cost = |splits: usize| {
            let per_split = units.div_ceil(splits);
            let n_splits = units.div_ceil(per_split);
            let concurrent = match clustered {
                true => concurrent_clusters(card.n_sms, self.per_sm(), n_splits),
                false => (card.n_sms * self.per_sm() / n_splits).max(1),
            };
            let rounds = tiles.div_ceil(concurrent);
            2 * rounds * (per_split + 1) + if splits > 1 { 1 + splits / 2 } else { 0 }
        };
        (1..=max_splits).min_by_key(|&splits| cost(splits))
    }

    /// The number of splits for 16-bit weights: as many as fit the SMs at once, of at least a step each.
    fn few_splits(&self, tiles: usize, planes: usize, card: &Card) -> usize {
        // The splits of few tiles leave half of each SM to the next launch.
        let per_sm = if self.kind == DivisionKind::Direct { 2 } else { 1 };
        let fits = |splits: usize| splits * tiles <= per_sm * card.n_sms && splits * STEP <= planes;
        [8, 4, 2].into_iter().find(|&splits| card.has_clusters && fits(splits)).unwrap_or(1)
    }
}

/// Every kernel.
pub(crate) fn variants() -> impl Iterator<Item = (Division, DType)> {
    let dtypes = PACKED_DTYPES.into_iter().chain(GEMM_DTYPES);
    dtypes.flat_map(|dtype| Division::all(dtype).into_iter().map(move |division| (division, dtype)))
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
                // For kernels of 64 rows and more, and for 16-bit weights, `Division::fits` checks the GPU.
                let is_checked = division.m >= 64 || division.is_plain();
                let large = Card::with_shared(227 << 10, tuning);
                assert!(!division.is_plain() || division.fits(&large) == tuning.measured_on.is_some());
                assert!(
                    fits || (is_checked && tuning.measured_on.is_none()) || division.m >= 64,
                    "{} on {:?}: {shared}",
                    division.name(dtype),
                    tuning.measured_on
                );
            }
        }
    }
}
