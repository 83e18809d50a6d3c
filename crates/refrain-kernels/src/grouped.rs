//! Expert layers of many rows on tensor cores: the rows of each expert times its weights, in tiles of rows
//! that the device finds from the router's choices.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::ExpertActivation;
use refrain_tensor::{DType, quant};

use crate::batch::packed_row;
use crate::batch_plan::Division;
use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::experts::{
    ActivationParams, Combined, ExpertSizes, ExpertWeight, MAX_CHOICES, MAX_EXPERTS, PlacedExperts,
    add_bias_at, bias, locate, params, weight_bytes,
};
use crate::gemm::GEMM_DTYPES;
use crate::load::Kernels;
use crate::narrow::{Narrowed, PLANE, narrow_at};
use crate::packed::{PACKED_DTYPES, Unit};
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::vouch::Vouch;

/// Row counts of tiles with a kernel.
const SIZES: [usize; 4] = [8, 16, 32, 64];
/// Rows of a tile for each hundred rows that an expert has on average. A second tile of an expert decodes its
/// weights again, so most experts should need one.
const PERCENT: usize = 125;
/// A choice without an expert.
const NOWHERE: u32 = u32::MAX;
const ALIGN: u64 = 256;

/// Sizes of an expert layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedSizes {
    /// Rows of the step.
    pub n_rows: usize,
    /// Choices per row.
    pub n_choices: usize,
    /// Number of experts.
    pub n_experts: usize,
    /// Columns of x, and of gate and up.
    pub k: usize,
    /// Rows of gate and up, and columns of down.
    pub inner: usize,
    /// Rows of down.
    pub n: usize,
}

impl GroupedSizes {
    fn pairs(&self) -> usize {
        self.n_rows.saturating_mul(self.n_choices)
    }

    fn of_down(&self) -> ExpertSizes {
        let GroupedSizes { n_rows, n_choices, n_experts, inner, n, .. } = *self;
        ExpertSizes { n_rows, n_choices, n_experts, n, k: inner, is_fixed: false }
    }

    fn of_gate(&self) -> ExpertSizes {
        ExpertSizes { n: self.inner, k: self.k, ..self.of_down() }
    }
}

/// Division of an expert layer into tiles. It depends only on sizes and GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedPlan {
    sizes: GroupedSizes,
    /// Rows of a tile.
    m: usize,
    /// The most tiles that any choice of experts needs.
    n_tiles: usize,
}

/// Parts of the scratch: offsets and bytes.
struct Areas {
    tiles: (u64, u64),
    pairs: (u64, u64),
    places: (u64, u64),
    /// Rows of x in planes, later the products of each choice.
    rows: (u64, u64),
    /// Rows that gate and up make, in planes.
    inner: (u64, u64),
}

impl GroupedPlan {
    /// Scratch size of [`Kernels::grouped`]. `None` on overflow.
    #[must_use]
    pub fn scratch_bytes(&self) -> Option<u64> {
        let last = self.areas()?.inner;
        last.0.checked_add(last.1)
    }

    /// The plan with another number of rows per tile, for comparisons: 8, 16, 32 or 64.
    #[must_use]
    pub fn with_tile_rows(self, m: usize) -> GroupedPlan {
        GroupedPlan { m, n_tiles: most_tiles(&self.sizes, m), ..self }
    }

    /// Rows of a tile.
    #[must_use]
    pub fn tile_rows(&self) -> usize {
        self.m
    }

    fn areas(&self) -> Option<Areas> {
        let (pairs, rows) = (self.sizes.pairs(), self.n_tiles.checked_mul(self.m)?);
        let bytes = |a: usize, b: usize, size: usize| {
            a.checked_mul(b)?.checked_mul(size)?.checked_next_multiple_of(ALIGN as usize)
        };
        let planes = |k: usize| bytes(rows, k.next_multiple_of(PLANE), 2);
        let products = bytes(pairs, self.sizes.n, 4)?;
        let sizes = [
            bytes(self.n_tiles, 2, 4)?.checked_add(ALIGN as usize)?,
            bytes(rows, 1, 4)?,
            bytes(pairs, 1, 4)?,
            planes(self.sizes.k)?.max(products),
            planes(self.sizes.inner)?,
        ];
        let mut at = 0_u64;
        let mut places = [(0, 0); 5];
        for (place, size) in places.iter_mut().zip(sizes) {
            *place = (at, size as u64);
            at = at.checked_add(size as u64)?;
        }
        let [tiles, pairs, places, rows, inner] = places;
        Some(Areas { tiles, pairs, places, rows, inner })
    }
}

/// `y[row] = sum over choices of weight * (f(x . gate^T, x . up^T) . down^T)` with the weights of each choice.
#[derive(Clone, Copy, Debug)]
pub struct GroupedArgs<'a> {
    /// The division, from [`Kernels::grouped_plan`] for these dtypes.
    pub plan: GroupedPlan,
    /// Activation that joins gate and up.
    pub activation: ExpertActivation,
    /// `[n_rows, k]` F32.
    pub x: Buf,
    /// `[n_rows, n_choices]` I32.
    pub ids: Buf,
    /// `[n_rows, n_choices]` F32.
    pub weights: Buf,
    /// Gate weights.
    pub gate: ExpertWeight,
    /// Up weights, with the dtype and rows of `gate`.
    pub up: ExpertWeight,
    /// Down weights.
    pub down: ExpertWeight,
    /// `[n_rows, n]` F32.
    pub y: Buf,
    /// Scratch of [`GroupedPlan::scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Name of the step that the launches belong to.
    pub step: &'a str,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct GroupedParams {
    expert_bytes: u64,
    k: u32,
    n: u32,
    bias_stride: u32,
    activation: ActivationParams,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct PlanesParams {
    k: u32,
    padded: u32,
    n_choices: u32,
    m: u32,
}

/// Each expert with rows has at most one tile that is not full.
fn most_tiles(s: &GroupedSizes, m: usize) -> usize {
    let pairs = s.pairs();
    (pairs + pairs.min(s.n_experts) * (m - 1)) / m
}

fn division(dtype: DType, m: usize) -> Option<Division> {
    match GEMM_DTYPES.contains(&dtype) {
        true => Some(Division::of_16_bits(m)),
        false => Division::of(m, dtype),
    }
}

/// Whether matrices of `n` rows and `k` columns have a kernel.
fn has_grouped(dtype: DType, n: usize, k: usize) -> bool {
    division(dtype, SIZES[0]).is_some() && n.is_multiple_of(8) && k.is_multiple_of(8.max(dtype.block_len()))
}

impl Kernels {
    /// Minimum number of rows of an expert layer on tensor cores.
    #[must_use]
    pub fn grouped_min_rows(&self) -> usize {
        self.card().tuning.grouped.min_rows
    }

    /// Plans an expert layer; `None` if the GPU has no kernel for it.
    #[must_use]
    pub fn grouped_plan(&self, sizes: GroupedSizes, gate: DType, down: DType) -> Option<GroupedPlan> {
        let card = self.card();
        let pairs = sizes.pairs();
        let known = has_grouped(gate, sizes.inner, sizes.k)
            && has_grouped(down, sizes.n, sizes.inner)
            && sizes.n_choices <= MAX_CHOICES
            && (1..=MAX_EXPERTS).contains(&sizes.n_experts)
            && (1..=65_535).contains(&pairs);
        let mean = pairs.checked_mul(PERCENT)?.div_ceil(100 * sizes.n_experts.max(1));
        let has_shared = |m: usize| {
            [gate, down].iter().all(|&dtype| division(dtype, m).is_some_and(|division| division.fits(card)))
        };
        let wanted = SIZES.into_iter().find(|&m| mean <= m).unwrap_or(SIZES[SIZES.len() - 1]);
        let m = SIZES.into_iter().rev().find(|&m| m <= wanted && has_shared(m)).filter(|_| known)?;
        let plan = GroupedPlan { sizes, m, n_tiles: most_tiles(&sizes, m) };
        plan.scratch_bytes().map(|_| plan)
    }

    /// Pushes the launches for [`GroupedArgs`].
    pub fn grouped(&self, a: &GroupedArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let s = &a.plan.sizes;
        let shape = [
            ("n_rows", s.n_rows),
            ("n_choices", s.n_choices),
            ("n_experts", s.n_experts),
            ("k", s.k),
            ("inner", s.inner),
            ("n", s.n),
        ];
        let case = OpCase { op: "grouped", dtype: a.gate.dtype, shape: &shape };
        case.sizes()?;
        self.check_grouped(&case, a)?;
        let pairs = s.pairs();
        let (areas, bytes) = match (a.plan.areas(), a.plan.scratch_bytes()) {
            (Some(areas), Some(bytes)) => (areas, bytes),
            _ => return Err(case.refuse("the scratch size overflows".to_owned())),
        };
        let scratch = case.buf("scratch", a.scratch, usize::try_from(bytes).ok(), 16)?;
        let area = |(at, len): (u64, u64)| scratch.slice(at, len);
        let lists =
            Lists { tiles: area(areas.tiles)?, pairs: area(areas.pairs)?, places: area(areas.places)? };
        let (rows, inner) = (area(areas.rows)?, area(areas.inner)?);
        let products = rows.slice(0, 4 * (pairs * s.n) as u64)?;
        let ids = case.words("ids", a.ids, &[pairs])?;
        let x = case.buf("x", a.x, s.n_rows.checked_mul(s.k).and_then(|n| n.checked_mul(4)), 16)?;
        let weights = case.words("weights", a.weights, &[pairs])?;
        let y = case.words("y", a.y, &[s.n_rows, s.n])?;

        launches.push(self.grouped_tiles(&case, a, &lists, ids)?);
        launches.push(self.grouped_planes(&case, a, rows, x, lists.places)?);
        let (of_gate, of_down) = (s.of_gate(), s.of_down());
        let gate = Product {
            s: &of_gate,
            dtype: a.gate.dtype,
            weights: [Some(locate(&case, &of_gate, &a.gate)?), Some(locate(&case, &of_gate, &a.up)?)],
            biases: [bias(&case, &of_gate, &a.gate)?, bias(&case, &of_gate, &a.up)?],
            rows: a.gate.rows,
            x: rows,
            out: inner,
        };
        launches.push(self.grouped_product(&case, a, &lists, &gate)?);
        let down = Product {
            s: &of_down,
            dtype: a.down.dtype,
            weights: [Some(locate(&case, &of_down, &a.down)?), None],
            biases: [None, None],
            rows: a.down.rows,
            x: inner,
            out: products,
        };
        launches.push(self.grouped_product(&case, a, &lists, &down)?);
        let combined = Combined { y, z: products, ids, weights, bias: bias(&case, &of_down, &a.down)? };
        let params = params(&case, &of_down, &a.down, 0, s.inner)?;
        launches.push(self.expert_combine(&case, &combined, &of_down, params, a.step)?);
        Ok(())
    }

    fn check_grouped(&self, case: &OpCase<'_>, a: &GroupedArgs<'_>) -> Result<(), KernelError> {
        let (s, m) = (&a.plan.sizes, a.plan.m);
        crate::require!(case, s.n_choices <= MAX_CHOICES, "a row has at most {MAX_CHOICES} choices");
        crate::require!(case, s.n_experts <= MAX_EXPERTS, "a layer has at most {MAX_EXPERTS} experts");
        let pairs = s.pairs();
        crate::require!(case, pairs <= 65_535, "{pairs} choices in total, at most 65535 fit in one launch");
        let same = a.gate.dtype == a.up.dtype && a.gate.rows == a.up.rows;
        crate::require!(case, same, "gate and up must be of one dtype and shape");
        let biases = a.gate.bias.is_some() == a.up.bias.is_some();
        crate::require!(case, biases, "gate and up must both have biases, or neither");
        let known = has_grouped(a.gate.dtype, s.inner, s.k) && has_grouped(a.down.dtype, s.n, s.inner);
        crate::require!(
            case,
            known,
            "no kernel supports {} and {} of these sizes",
            a.gate.dtype,
            a.down.dtype
        );
        let is_plan = SIZES.contains(&m) && a.plan.n_tiles == most_tiles(s, m);
        crate::require!(case, is_plan, "there are no tiles of {m} rows");
        for dtype in [a.gate.dtype, a.down.dtype] {
            let fits = division(dtype, m).is_some_and(|division| division.fits(self.card()));
            crate::require!(case, fits, "tiles of {m} rows and {dtype} do not fit the GPU's shared memory");
        }
        Ok(())
    }

    fn grouped_tiles(
        &self,
        case: &OpCase<'_>,
        a: &GroupedArgs<'_>,
        lists: &Lists,
        ids: Buf,
    ) -> Result<Launch, KernelError> {
        let GroupedPlan { sizes: s, m, n_tiles } = a.plan;
        Ok(self
            .launch("grouped_tiles_i32", case.u32("n_experts", s.n_experts)?, 256)?
            .shared(4 * s.n_experts as u32)
            .step(a.step)
            .write(lists.tiles)
            .write(lists.pairs)
            .write(lists.places)
            .read(ids)
            .baked(Baked(s.pairs() as u32))
            .baked(Baked(case.u32("tiles", n_tiles)?))
            .baked(Baked(m as u32))
            .vouch(case))
    }

    fn grouped_planes(
        &self,
        case: &OpCase<'_>,
        a: &GroupedArgs<'_>,
        planes: Buf,
        x: Buf,
        places: Buf,
    ) -> Result<Launch, KernelError> {
        let s = &a.plan.sizes;
        let padded = s.k.next_multiple_of(PLANE);
        let params = PlanesParams {
            k: case.u32("k", s.k)?,
            padded: case.u32("k", padded)?,
            n_choices: s.n_choices as u32,
            m: a.plan.m as u32,
        };
        Ok(self
            .launch("grouped_planes_bf16", [padded.div_ceil(1024) as u32, s.n_rows as u32], 256)?
            .step(a.step)
            .write(planes)
            .read(x)
            .read(places)
            .baked(Baked(params))
            .vouch(case))
    }

    fn grouped_product(
        &self,
        case: &OpCase<'_>,
        a: &GroupedArgs<'_>,
        lists: &Lists,
        of: &Product<'_>,
    ) -> Result<Launch, KernelError> {
        let GroupedPlan { m, n_tiles, .. } = a.plan;
        let Some(division) = division(of.dtype, m) else { unreachable!("checked with the plan") };
        let [Some(first), second] = &of.weights else { unreachable!("there is a first weight") };
        let n_blocks = match second {
            Some(_) => of.s.n.next_multiple_of(PLANE) / (division.rows / 2),
            None => of.s.n.div_ceil(division.rows),
        };
        let mut launch = self
            .launch(&name(of.dtype, m), [n_blocks as u32, n_tiles as u32], division.threads())?
            .shared(division.shared_bytes(self.card().tuning.batch))
            .step(a.step);
        launch = match second {
            Some(_) => launch.null().write(of.out),
            None => launch.write(of.out).null(),
        };
        launch = launch.read(of.x).read(lists.tiles).read(lists.pairs);
        for w in &of.weights {
            launch = match w {
                Some(w) => launch.read(w.all.slice(w.start, w.all.len() - w.start)?),
                None => launch.null(),
            };
        }
        for bias in of.biases {
            launch = match bias {
                Some(bias) => launch.read(bias),
                None => launch.null(),
            };
        }
        let params = GroupedParams {
            expert_bytes: first.expert_bytes,
            k: case.u32("k", of.s.k)?,
            n: case.u32("n", of.s.n)?,
            bias_stride: case.u32("rows", of.rows)?,
            activation: ActivationParams::of(a.activation),
        };
        Ok(launch.baked(Baked(params)).vouch(case))
    }
}

/// The sorted choices on the device.
struct Lists {
    tiles: Buf,
    pairs: Buf,
    places: Buf,
}

/// One of the two products.
struct Product<'a> {
    s: &'a ExpertSizes,
    dtype: DType,
    weights: [Option<PlacedExperts>; 2],
    biases: [Option<Buf>; 2],
    /// Rows of an expert's matrix.
    rows: usize,
    x: Buf,
    out: Buf,
}

fn name(dtype: DType, m: usize) -> String {
    format!("grouped_m{m}_{}", lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const F: KernelFamily = KernelFamily::Grouped;
    let tiles = KernelEntry::new(F, "grouped_tiles_i32", &[P, P, P, P, W, W, W], tiles_twin);
    all.push(tiles.unit("lists").shared(|_| 4 * MAX_EXPERTS as u32));
    let planes =
        KernelEntry::new(F, "grouped_planes_bf16", &[P, P, P, size_of::<PlanesParams>()], planes_twin);
    all.push(planes.unit("lists"));
    for dtype in GEMM_DTYPES.into_iter().chain(PACKED_DTYPES) {
        for m in SIZES {
            let Some(division) = division(dtype, m) else { unreachable!("every size has a kernel") };
            let params = [P, P, P, P, P, P, P, P, P, size_of::<GroupedParams>()];
            let entry = KernelEntry::new(F, name(dtype, m), &params, move |k| product_twin(k, dtype, m));
            // GPUs with less shared memory per block never use this kernel.
            let shared =
                move |card: &Card| division.shared_bytes(card.tuning.batch).min(card.shared_limit as u32);
            all.push(entry.unit(&lowercase(dtype)).shared(shared));
        }
    }
}

fn tiles_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_experts, n_pairs) = (k.config().grid[0] as usize, count(k, 4)?);
    let (most, m) = (count(k, 5)?, count(k, 6)?);
    let ids: Vec<i32> = k.read(k.ptr(3)?, n_pairs)?;
    let mut places = vec![NOWHERE; n_pairs];
    let mut n_tiles = 0;
    for expert in 0..n_experts {
        let mine: Vec<usize> = (0..n_pairs).filter(|&pair| ids[pair] == expert as i32).collect();
        for tile in mine.chunks(m) {
            let entry = [expert as u32, tile.len() as u32];
            k.write(k.ptr(0)?.add(8 * n_tiles as u64), &entry)?;
            let pairs: Vec<u32> = tile.iter().map(|&pair| pair as u32).collect();
            k.write(k.ptr(1)?.add(4 * (n_tiles * m) as u64), &pairs)?;
            tile.iter().enumerate().for_each(|(i, &pair)| places[pair] = (n_tiles * m + i) as u32);
            n_tiles += 1;
        }
    }
    k.write(k.ptr(0)?.add(8 * most as u64), &[n_tiles as u32])?;
    k.write(k.ptr(2)?, &places)
}

fn planes_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (p, n_rows): (PlanesParams, usize) = (k.arg(3)?, k.config().grid[1] as usize);
    let (cols, padded, n_choices) = (p.k as usize, p.padded as usize, p.n_choices as usize);
    let places: Vec<u32> = k.read(k.ptr(2)?, n_rows * n_choices)?;
    let to = Narrowed { dtype: DType::BF16, n_cols: padded, plane_rows: p.m as usize };
    for (row, places) in places.chunks_exact(n_choices).enumerate() {
        let mut x: Vec<f32> = k.read(k.ptr(1)?.add(4 * (row * cols) as u64), cols)?;
        x.resize(padded, 0.0);
        for &place in places.iter().filter(|&&place| place != NOWHERE) {
            to.write_row(k, place as usize, &x, 0)?;
        }
    }
    Ok(())
}

/// A row of a matrix as the kernel multiplies it: in BF16, or as `batch.cu` decodes it.
fn weight_row(dtype: DType, w: &[u8], row: usize, out: &mut [f32]) -> KernelResult {
    if Unit::of(dtype).is_some() && !GEMM_DTYPES.contains(&dtype) {
        return packed_row(dtype, w, row, out);
    }
    let size = 2 * out.len();
    quant::dequantize(dtype, &w[row * size..(row + 1) * size], out).map_err(fault)?;
    out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    Ok(())
}

fn product_twin(k: &mut SimKernel<'_>, dtype: DType, m: usize) -> KernelResult {
    let p: GroupedParams = k.arg(9)?;
    let (n, cols, most) = (p.n as usize, p.k as usize, k.config().grid[1] as usize);
    let gated = k.ptr(6)?.0 != 0;
    let n_tiles = k.read::<u32>(k.ptr(3)?.add(8 * most as u64), 1)?[0] as usize;
    let tiles: Vec<u32> = k.read(k.ptr(3)?, 2 * n_tiles)?;
    let partial = || fault("a row ends inside a quantisation block");
    let bytes = weight_bytes(dtype, n, cols).ok_or_else(partial)?;
    let padded = n.next_multiple_of(PLANE);
    let to = Narrowed { dtype: DType::BF16, n_cols: padded, plane_rows: m };
    for (tile, of) in tiles.chunks_exact(2).enumerate() {
        let (expert, n_of) = (of[0] as usize, of[1] as usize);
        let pairs: Vec<u32> = k.read(k.ptr(4)?.add(4 * (tile * m) as u64), n_of)?;
        let x = (0..n_of).map(|i| plane_row(k, tile * m + i, cols, m)).collect::<KernelResult<Vec<_>>>()?;
        let mut sums = [vec![0.0_f32; n_of * n], vec![0.0_f32; n_of * n]];
        for (which, sums) in sums.iter_mut().enumerate().take(if gated { 2 } else { 1 }) {
            let w = k.view::<u8>(k.ptr(5 + which)?.add(expert as u64 * p.expert_bytes), bytes)?;
            let mut row = vec![0.0; cols];
            for j in 0..n {
                weight_row(dtype, &w, j, &mut row)?;
                for (i, x) in x.iter().enumerate() {
                    let dot: f64 = x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    sums[i * n + j] = dot as f32;
                }
            }
        }
        let [mut first, mut second] = sums;
        for (i, &pair) in pairs.iter().enumerate() {
            let first = &mut first[i * n..(i + 1) * n];
            if !gated {
                k.write(k.ptr(0)?.add(4 * (pair as usize * n) as u64), first)?;
                continue;
            }
            let second = &mut second[i * n..(i + 1) * n];
            let at = expert * p.bias_stride as usize;
            add_bias_at(k, 7, at, first)?;
            add_bias_at(k, 8, at, second)?;
            let mut y = p.activation.join(first, second);
            y.resize(padded, 0.0);
            to.write_row(k, tile * m + i, &y, 1)?;
        }
    }
    Ok(())
}

/// Reads a row of planes.
fn plane_row(k: &SimKernel<'_>, row: usize, cols: usize, m: usize) -> KernelResult<Vec<f32>> {
    let padded = cols.next_multiple_of(PLANE);
    let mut out = vec![0.0; padded];
    for plane in 0..padded / PLANE {
        for chunk in 0..16 {
            let first = plane * PLANE + 2 * chunk;
            let at = k.ptr(2)?.add(2 * narrow_at(row, first, padded, m) as u64);
            let eight: Vec<u16> = k.read(at, 8)?;
            for (i, bits) in eight.into_iter().enumerate() {
                out[first + 32 * (i / 2) + i % 2] = bf16::from_bits(bits).to_f32();
            }
        }
    }
    out.truncate(cols);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_choice_of_experts_fits_the_tiles() {
        // The most tiles: each expert has a row more than whole tiles, as long as there are rows.
        for (n_rows, n_choices, n_experts) in [(16, 2, 7), (512, 8, 128), (40, 1, 3), (17, 4, 200)] {
            let s = GroupedSizes { n_rows, n_choices, n_experts, k: 8, inner: 8, n: 8 };
            for m in SIZES {
                let alone = s.pairs().min(n_experts);
                let tiles = alone + (s.pairs() - alone) / m;
                assert_eq!(tiles, most_tiles(&s, m), "{s:?} in tiles of {m}");
            }
        }
    }
}
