//! Batched-decode GEMM: 16-bit activation rows times packed or 16-bit weights, each weight read once.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Gate, Op};
use refrain_tensor::DType;

use crate::batch_plan::{BatchPlan, Division, MAX_BATCH_ROWS, variants};
use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::gemm::{self, GEMM_DTYPES};
use crate::linear::{LinearPart, MAX_PRODUCTS};
use crate::load::Kernels;
use crate::narrow::{Narrow, Narrowed, PLANE, narrow_at};
use crate::packed::{TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, lowercase};
use crate::twin::{Dense, fault, run_f32};
use crate::vouch::Vouch;

/// `y = x . w^T` for one or more `w`, with 16-bit rows and sums in F32.
#[derive(Clone, Copy, Debug)]
pub struct BatchArgs<'a> {
    /// `[m, k]` BF16, or F16 for F16 weights, in planes whose row count [`BatchPlan::shape`] returns.
    pub x: Buf,
    /// Dtype of every `w`: one of [`crate::PACKED_DTYPES`], packed, or one of [`GEMM_DTYPES`] in file layout.
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
    /// Gate that joins the two products, and its output rows, of the dtype of `x`. Requires clustered splits.
    pub gate: Option<(Gate, Narrow)>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
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
            n_tiles == 1 || (division.m == 128 && a.m <= MAX_BATCH_ROWS),
            "the plan is for {} rows",
            division.m
        );
        crate::require!(case, Division::all(a.dtype).contains(&division), "the plan is for another dtype");
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
        let blocks = division.n_blocks(tiles, n_splits, self.card());
        let grid = [case.u32("n", blocks)?, n_splits as u32, n_tiles as u32];
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
                let dtype = rows_dtype(a.dtype);
                crate::require!(case, to.dtype == dtype, "the gate writes {dtype} rows");
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
                    let bytes = weight_bytes(a.dtype, part.n, a.k);
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

/// Dtype of the rows that are multiplied with weights of a dtype.
fn rows_dtype(dtype: DType) -> DType {
    if dtype == DType::F16 { DType::F16 } else { DType::BF16 }
}

/// Bytes of a weight on the device.
fn weight_bytes(dtype: DType, n: usize, k: usize) -> Option<usize> {
    match GEMM_DTYPES.contains(&dtype) {
        true => n.checked_mul(k)?.checked_mul(2),
        false => packed_bytes(dtype, n, k),
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for (division, dtype) in variants() {
        let params = [P, P, P, P, P, P, P, P, P, P, P, size_of::<BatchParams>()];
        let entry = KernelEntry::new(division.family(), division.name(dtype), &params, move |k| {
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

/// Reads a row of 16-bit weights.
fn plain_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    for (v, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        let bits = u16::from_le_bytes([b[0], b[1]]);
        *v = if dtype == DType::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() };
    }
}

/// Writes whole sums to the first split and zeros to the others.
fn twin(k: &mut SimKernel<'_>, dtype: DType, plane_rows: usize) -> KernelResult {
    let p: BatchParams = k.arg(11)?;
    let (m, cols, n_splits) = (p.m as usize, p.k as usize, k.config().grid[1] as usize);
    let bytes_of = |n: usize| {
        weight_bytes(dtype, n, cols).ok_or_else(|| fault("a row ends inside a quantisation block"))
    };
    let ns: Vec<usize> = p.n.iter().map(|&n| n as usize).filter(|&n| n > 0).collect();
    let weights = ns.iter().enumerate().map(|(i, &n)| Ok((k.ptr(7 + i)?, bytes_of(n)?)));
    let weights = weights.collect::<KernelResult<Vec<_>>>()?;
    k.before_wait(|k| weights.iter().try_for_each(|&(at, bytes)| k.view::<u8>(at, bytes).map(|_| ())))?;
    // Rows past m are undefined.
    let planes = gemm::read(k, k.ptr(6)?, m.next_multiple_of(plane_rows) * cols, rows_dtype(dtype))?;
    let element = |i: usize| planes[narrow_at(i / cols, i % cols, cols, plane_rows)];
    let x: Vec<f32> = (0..m * cols).map(element).collect();
    let mut ys = Vec::new();
    for (&n, &(at, bytes)) in ns.iter().zip(&weights) {
        let mut y = vec![0.0_f32; m * n];
        let w = k.view::<u8>(at, bytes)?;
        let mut row = vec![0.0; cols];
        for j in 0..n {
            match GEMM_DTYPES.contains(&dtype) {
                true => plain_row(dtype, &w[2 * j * cols..], &mut row),
                false => packed_row(dtype, &w, j, &mut row)?,
            }
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
        let to = Narrowed { dtype: rows_dtype(dtype), n_cols: ns[0], plane_rows: p.narrow_rows as usize };
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
