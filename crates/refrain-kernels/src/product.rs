//! Decode GEMV: one activation row times weights, fused with the preceding norm and the following gate.

use bytemuck::{Pod, Zeroable};
use refrain_driver::api::DeviceInfo;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::Gate;
use refrain_tensor::{DType, quant};

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::load::{GpuArch, Kernels};
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::tuning::{ChunkTuning, ProductTuning, Tuning};
use crate::twin::fault;
use crate::vouch::Vouch;

/// Maximum number of weights per launch.
pub const MAX_PARTS: usize = 3;

/// Static shared memory of the compiled code in bytes, rounded up.
const STATIC_BYTES: usize = 4096;

/// One ring slot's worth of weights for a warp, and the warps per block.
#[derive(Clone, Copy, Debug)]
struct RingChunk {
    rows: usize,
    cols: usize,
    bytes: usize,
    warps: usize,
    /// Bytes of all warps' rings together.
    ring: usize,
}

impl RingChunk {
    fn of(dtype: DType, tuning: &ProductTuning) -> Option<RingChunk> {
        let (chunk, rows, cols, bytes) = match (dtype, Unit::of(dtype)) {
            (DType::BF16 | DType::F16, _) => (tuning.plain, 2, 1024, 4096),
            (DType::Q8_0, Some(unit)) => (tuning.q8_0, TILE_ROWS, unit.cols, unit.bytes),
            (_, Some(unit)) if unit.cols == 128 => (tuning.cols_128, TILE_ROWS, unit.cols, unit.bytes),
            (_, Some(unit)) => (tuning.cols_256, TILE_ROWS, unit.cols, unit.bytes),
            (_, None) => return None,
        };
        let ChunkTuning { units, warps, ring_bytes: ring } = chunk;
        Some(RingChunk { rows, cols: units * cols, bytes: units * bytes, warps, ring })
    }
}

/// Pairs of dtypes that may share a launch.
const PAIRS: [[DType; 2]; 2] = [[DType::Q4_K, DType::Q6_K], [DType::Q5_K, DType::Q6_K]];

/// Whether [`Kernels::product`] supports this dtype, packed if quantised, else in the file layout.
#[must_use]
pub fn has_product(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) || Unit::of(dtype).is_some()
}

/// A weight of [`ProductArgs`] with its output.
#[derive(Clone, Copy, Debug)]
pub struct ProductWeight {
    /// `[n, k]`: packed if quantised, else contiguous.
    pub w: Buf,
    /// Dtype of the weight; see [`has_product`].
    pub dtype: DType,
    /// `[n]` F32 bias, if any.
    pub bias: Option<Buf>,
    /// `[n]` F32. With a gate, only the first output is written.
    pub y: Buf,
    /// Rows of `w`.
    pub n: usize,
}

/// `y = x . w^T (+ bias)` for one or more `w` and one row x, or `y = act(x . w0^T) * (x . w1^T)`.
///
/// x is `a`, `a + b`, or the norm of either. For quantised weights, x is rounded to 8 bits in blocks of 32.
#[derive(Clone, Copy, Debug)]
pub struct ProductArgs<'a> {
    /// `[k]` F32.
    pub a: Buf,
    /// `[k]` F32, added to `a`.
    pub b: Option<Buf>,
    /// `[k]` F32 norm weights that no launch writes: `b` is first replaced by its RMS norm.
    pub inner: Option<Buf>,
    /// `[k]` F32 weights of the norm that produces x. No launch may write them: the kernel reads them before
    /// its dependency wait.
    pub norm: Option<Buf>,
    /// Added to the mean square of both norms.
    pub eps: f32,
    /// `[k]` F32: receives `a + b`.
    pub sum: Option<Buf>,
    /// At most [`MAX_PARTS`]; exactly two with a gate. All of one dtype, or of one of a few pairs.
    pub parts: &'a [ProductWeight],
    /// Gate that joins the two products.
    pub gate: Option<Gate>,
    /// Columns of every `w`.
    pub k: usize,
    /// [`Kernels::product_tail_bytes`] of the previous launch, if that is a long product and this one starts while
    /// it runs.
    pub previous_tail: Option<usize>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct ProductParams {
    k: u32,
    n: [u32; MAX_PARTS],
    /// Tiles per block; the first `extra` blocks have one more.
    tiles: u32,
    extra: u32,
    /// [`inverse`] of the number of chunks per tile.
    tile_inverse: u32,
    stages: u8,
    second: u8,
    gate: u8,
    /// Pacing of the initial prefetch: cycles between chunks, in units of four.
    pace: u8,
    inverse_k: f32,
    eps: f32,
    /// Chunks of the initial prefetch that do not wait for `late`.
    early: u32,
    /// Start of the remaining initial prefetch, in cycles from the start of a block.
    late: u32,
}

/// Division of a launch into chunks.
#[derive(Clone, Copy, Debug)]
struct Cut {
    first: DType,
    second: DType,
    warps: usize,
    /// Bytes of a ring slot, which holds one chunk.
    slot: usize,
    n_tiles: usize,
    grid: usize,
    tile_inverse: u32,
    /// Maximum number of chunks per warp.
    chunks_per_warp: usize,
    /// Ring slots per warp.
    stages: u8,
    /// Shared memory per block.
    shared: u32,
    /// Whether a block of the next launch fits on the same SM.
    shares_sm: bool,
}

/// Returns the dtypes of a launch: the first, and the other one if there are two.
fn dtypes(case: &OpCase<'_>, parts: &[ProductWeight]) -> Result<(DType, DType), KernelError> {
    let first = parts[0].dtype;
    let second = parts.iter().map(|p| p.dtype).find(|d| *d != first);
    let Some(second) = second else { return Ok((first, first)) };
    let pair = PAIRS.into_iter().find(|pair| parts.iter().all(|p| pair.contains(&p.dtype)));
    match pair {
        Some([a, b]) => Ok((a, b)),
        None => Err(case.refuse(format!("no kernel combines {first} and {second} in one launch"))),
    }
}

/// Whether weights of these dtypes can share a launch.
#[must_use]
pub fn products_join(dtypes: &[DType]) -> bool {
    let all_in = |set: &[DType]| dtypes.iter().all(|d| set.contains(d));
    dtypes.first().is_some_and(|first| has_product(*first) && all_in(&[*first]))
        || PAIRS.iter().any(|p| all_in(p))
}

/// Returns why the rows of [`Kernels::product`] are too long for the shared memory of a GPU; `None` if they
/// fit. The dtypes must share a launch: see [`products_join`].
#[must_use]
pub fn product_too_long(dtypes: &[DType], k: usize, card: &DeviceInfo) -> Option<String> {
    let (major, minor) = card.compute;
    let tuning = &Tuning::of(GpuArch { major, minor }).product;
    let chunks: Vec<RingChunk> = dtypes.iter().filter_map(|&dtype| RingChunk::of(dtype, tuning)).collect();
    let slot = chunks.iter().map(|chunk| chunk.bytes).max()?;
    let limit = product_limit(card.shared_block_bytes as usize);
    let need = block_bytes(chunks[0], slot, k, 1);
    (need > limit).then(|| format!("a block needs {need} bytes of shared memory, the GPU has {limit}"))
}

const fn product_limit(shared_block_bytes: usize) -> usize {
    shared_block_bytes.saturating_sub(STATIC_BYTES)
}

/// Shared memory of a block with this many ring slots per warp.
fn block_bytes(chunk: RingChunk, slot: usize, k: usize, stages: usize) -> usize {
    let is_plain = chunk.rows != TILE_ROWS;
    // Quantised: one byte per element and two floats per 32, rounded up to whole units.
    let x = if is_plain { 4 * k } else { k.next_multiple_of(256) / 4 * 5 };
    let barriers = (8 * chunk.warps * stages).next_multiple_of(128);
    chunk.warps * stages * slot + barriers + x.next_multiple_of(16)
}

/// Returns 2^32 / `n` rounded up, or 0 for 1. The upper half of its product with m is m / n rounded down.
/// `None` if m may be too large for that.
fn inverse(n: usize, m: usize) -> Option<u32> {
    let fits = (n as u64).checked_mul(m as u64).is_some_and(|product| product < 1 << 32);
    fits.then(|| u32::try_from((1_u64 << 32).div_ceil(n as u64)).unwrap_or(0))
}

impl Kernels {
    /// Returns the bytes that an SM loads after the start of the launch of [`ProductArgs`]: x, and the
    /// weights that do not fit the initial rings. `None` if the next launch's blocks do not fit next to it on
    /// an SM.
    pub fn product_tail_bytes(&self, a: &ProductArgs<'_>) -> Result<Option<usize>, KernelError> {
        let shape = shape(a);
        let cut = self.cut(&case(a, &shape), a)?;
        let weights = cut.chunks_per_warp.saturating_sub(usize::from(cut.stages)) * cut.warps * cut.slot;
        let rows = if a.b.is_some() { 2 } else { 1 };
        Ok(cut.shares_sm.then(|| weights.saturating_add(4 * rows * a.k)))
    }

    fn cut(&self, case: &OpCase<'_>, a: &ProductArgs<'_>) -> Result<Cut, KernelError> {
        case.sizes()?;
        let n_parts = a.parts.len();
        crate::require!(
            case,
            n_parts <= MAX_PARTS,
            "{n_parts} matrices, at most {MAX_PARTS} fit in one launch"
        );
        crate::require!(case, a.parts.iter().all(|p| p.n > 0), "one of the matrices is empty");
        let (first, second) = dtypes(case, a.parts)?;
        let tuning = &self.card().tuning.product;
        let (Some(chunk), Some(other)) = (RingChunk::of(first, tuning), RingChunk::of(second, tuning)) else {
            return Err(case.refuse("no kernel supports this weight dtype".to_owned()));
        };
        let gated = a.gate.is_some();
        let same = a.parts.iter().all(|p| p.n == a.parts[0].n && p.dtype == first);
        crate::require!(
            case,
            !gated || (n_parts == 2 && same),
            "a gate needs two matrices of one shape and dtype"
        );
        let k_unit = if first.is_quantized() { first.block_len().max(second.block_len()) } else { 8 };
        crate::require!(case, a.k.is_multiple_of(k_unit), "k must be a multiple of {k_unit}");

        let tiles = |p: &ProductWeight| p.n.div_ceil(chunk.rows);
        let n_tiles: usize = if gated { tiles(&a.parts[0]) } else { a.parts.iter().map(tiles).sum() };
        let grid = n_tiles.min(self.card().n_sms);
        let of_tile = a.k.div_ceil(chunk.cols) * if gated { 2 } else { 1 };
        let of_block = n_tiles.div_ceil(grid).saturating_mul(of_tile);
        // The kernel multiplies a block's chunk count by a warp index and by the inverse.
        let Some(tile_inverse) = inverse(of_tile.max(chunk.warps), of_block).and(inverse(of_tile, of_block))
        else {
            return Err(case.refuse(format!("a block would have {of_block} chunks of weights")));
        };
        let weights = a.parts.iter().try_fold(0_usize, |sum, p| {
            weight_bytes(p.dtype, p.n, a.k).and_then(|bytes| sum.checked_add(bytes))
        });
        let chunks_per_warp = of_block.div_ceil(chunk.warps);
        let weights = weights.unwrap_or(usize::MAX);
        // Small products use no more ring slots than they fill.
        let max_stages = if weights < tuning.small_bytes { chunks_per_warp } else { usize::MAX };
        let (stages, shared, shares_sm) = self.product_shared(case, a.k, [chunk, other], max_stages)?;
        let (warps, slot) = (chunk.warps, chunk.bytes.max(other.bytes));
        Ok(Cut {
            first,
            second,
            warps,
            slot,
            n_tiles,
            grid,
            tile_inverse,
            chunks_per_warp,
            stages,
            shared,
            shares_sm,
        })
    }

    /// Builds the launch for [`ProductArgs`].
    pub fn product(&self, a: &ProductArgs<'_>) -> Result<Launch, KernelError> {
        let shape = shape(a);
        let case = case(a, &shape);
        let cut = self.cut(&case, a)?;
        let Cut { first, second, grid, n_tiles, .. } = cut;
        let gated = a.gate.is_some();
        crate::require!(case, a.inner.is_none() || a.b.is_some(), "the inner norm needs b");
        crate::require!(case, a.sum.is_none() || a.b.is_some(), "the sum output needs b");
        let tuning = &self.card().tuning.product;
        let pace = pace(tuning, cut.slot, gated);
        let previous_tail = a.previous_tail.filter(|&tail| cut.shares_sm && tail <= tuning.late_bytes_max);
        let chunks = usize::from(cut.stages).min(cut.chunks_per_warp) * cut.warps;
        let (early, late) =
            filling(tuning, chunks as u32, pace, previous_tail.and_then(|tail| self.card().cycles_of(tail)));
        let mut launch = self
            .launch(&name(a.kind(), first, second), case.u32("n", grid)?, 32 * cut.warps as u32)?
            .shared(cut.shared)
            .step(a.step);
        let row = |name, buf: Buf, n| case.buf(name, buf, usize::checked_mul(n, 4), 16);
        for i in 0..MAX_PARTS {
            launch = match a.parts.get(i) {
                Some(part) => {
                    launch.read(case.buf("w", part.w, weight_bytes(part.dtype, part.n, a.k), 16)?)
                }
                None => launch.null(),
            };
        }
        let mut params = ProductParams {
            k: case.u32("k", a.k)?,
            n: [0; MAX_PARTS],
            tiles: (n_tiles / grid) as u32,
            extra: (n_tiles % grid) as u32,
            tile_inverse: cut.tile_inverse,
            stages: cut.stages,
            second: 0,
            gate: a.gate.map_or(0, gate_code),
            pace,
            inverse_k: 1.0 / a.k as f32,
            eps: a.eps,
            early,
            late,
        };
        for (i, part) in a.parts.iter().enumerate() {
            params.n[i] = case.u32("n", part.n)?;
            params.second |= u8::from(part.dtype != first) << i;
        }
        launch = launch.baked(Baked(params)).read(row("a", a.a, a.k)?);
        for (name, buf) in [("b", a.b), ("inner", a.inner), ("norm", a.norm)] {
            launch = match buf {
                Some(buf) => launch.read(row(name, buf, a.k)?),
                None => launch.null(),
            };
        }
        launch = match a.sum {
            Some(sum) => launch.write(row("sum", sum, a.k)?),
            None => launch.null(),
        };
        for i in 0..MAX_PARTS {
            launch = match a.parts.get(i).filter(|_| i == 0 || !gated) {
                Some(part) => launch.write(case.words("y", part.y, &[part.n])?),
                None => launch.null(),
            };
        }
        for i in 0..MAX_PARTS {
            launch = match a.parts.get(i).and_then(|p| p.bias.map(|bias| (bias, p.n))) {
                Some((bias, n)) => launch.read(case.words("bias", bias, &[n])?),
                None => launch.null(),
            };
        }
        Ok(launch.vouch(&case))
    }

    /// Returns the ring slots per warp (at most `max_stages`), the shared memory per block, and whether a block of
    /// the next launch fits on the same SM.
    fn product_shared(
        &self,
        case: &OpCase<'_>,
        k: usize,
        [chunk, other]: [RingChunk; 2],
        max_stages: usize,
    ) -> Result<(u8, u32, bool), KernelError> {
        let slot = chunk.bytes.max(other.bytes);
        let bytes = |stages: usize| block_bytes(chunk, slot, k, stages);
        let limit = product_limit(self.card().shared_limit);
        let half = (self.card().shared_sm / 2).saturating_sub(STATIC_BYTES);
        let wanted = (chunk.ring / (chunk.warps * slot)).min(max_stages).clamp(1, 64);
        let fits = |available: usize, stages: usize| bytes(stages) <= available.min(limit);
        // A long x may leave less than two chunks per warp in half an SM's shared memory. Then the block
        // takes the whole SM.
        let shared_sm_stages = (wanted.min(2)..=wanted).rev().find(|&stages| fits(half, stages));
        let Some(stages) =
            shared_sm_stages.or_else(|| (1..=wanted.min(2)).rev().find(|&stages| fits(limit, stages)))
        else {
            let need = bytes(1);
            return Err(
                case.refuse(format!("a block needs {need} bytes of shared memory, the GPU has {limit}"))
            );
        };
        Ok((stages as u8, bytes(stages) as u32, shared_sm_stages.is_some()))
    }
}

/// Maximum shared memory per block.
fn limit(card: &Card) -> usize {
    product_limit(card.shared_limit)
}

/// Properties of a product that are compiled into its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProductVariant {
    /// One weight without bias, and x is `a` itself.
    Bare,
    /// Two weights, joined by a gate.
    Gated,
    /// Anything else.
    Several,
}

impl ProductArgs<'_> {
    fn kind(&self) -> ProductVariant {
        let is_bare = matches!(self.parts, [ProductWeight { bias: None, .. }]);
        if self.gate.is_some() {
            ProductVariant::Gated
        } else if is_bare && self.b.is_none() && self.norm.is_none() {
            ProductVariant::Bare
        } else {
            ProductVariant::Several
        }
    }
}

/// Sizes that identify a product in errors.
fn shape(a: &ProductArgs<'_>) -> [(&'static str, usize); 3] {
    let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
    [("m", 1), ("n", n), ("k", a.k)]
}

fn case<'a>(a: &ProductArgs<'_>, shape: &'a [(&'static str, usize)]) -> OpCase<'a> {
    OpCase { op: "product", dtype: a.parts.first().map_or(DType::F32, |p| p.dtype), shape }
}

/// Computes [`ProductParams::pace`] for a chunk size in bytes.
fn pace(tuning: &ProductTuning, bytes: usize, gated: bool) -> u8 {
    let fours = bytes * if gated { tuning.gated_pace } else { tuning.pace } / (64 * 4);
    if fours < 255 { fours as u8 } else { 255 }
}

/// Computes [`ProductParams::early`] and [`ProductParams::late`] for a number of chunks. `previous_cycles` is the time
/// in cycles for which the previous launch still reads, if known.
fn filling(tuning: &ProductTuning, chunks: u32, pace: u8, previous_cycles: Option<usize>) -> (u32, u32) {
    let Some(cycles) = previous_cycles else { return (chunks, 0) };
    let half = chunks.div_ceil(2);
    let late = cycles.saturating_add(tuning.late_cycles).min(tuning.late_cycles_max) as u32;
    (half, late.max(4 * u32::from(pace) * half))
}

fn weight_bytes(dtype: DType, n: usize, k: usize) -> Option<usize> {
    match dtype.is_quantized() {
        true => packed_bytes(dtype, n, k),
        false => n.checked_mul(k).and_then(|n| dtype.bytes_for(n)),
    }
}

const fn gate_code(gate: Gate) -> u8 {
    match gate {
        Gate::Silu => 1,
        Gate::GeluTanh => 2,
    }
}

/// Every kernel: its variant, and its one or two dtypes.
fn launches() -> impl Iterator<Item = (ProductVariant, [DType; 2])> {
    let one = [DType::BF16, DType::F16].into_iter().chain(PACKED_DTYPES);
    let kinds = |d: DType| {
        [ProductVariant::Bare, ProductVariant::Gated, ProductVariant::Several].map(|kind| (kind, [d, d]))
    };
    one.flat_map(kinds).chain(PAIRS.map(|pair| (ProductVariant::Several, pair)))
}

fn name(kind: ProductVariant, first: DType, second: DType) -> String {
    let kind = match kind {
        ProductVariant::Bare => "bare",
        ProductVariant::Gated => "gated",
        ProductVariant::Several => "several",
    };
    format!("product_{kind}_{}", suffix(first, second))
}

/// Suffix of the kernel and unit names, from the dtypes.
fn suffix(first: DType, second: DType) -> String {
    match first == second {
        true => lowercase(first),
        false => format!("{}_{}", lowercase(first), lowercase(second)),
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let params = [P, P, P, size_of::<ProductParams>(), P, P, P, P, P, P, P, P, P, P, P];
    for (kind, [first, second]) in launches() {
        let kernel = name(kind, first, second);
        let unit = suffix(first, second);
        let entry =
            KernelEntry::new(KernelFamily::Product, kernel, &params, move |k| twin(k, kind, first, second));
        all.push(entry.unit(&unit).shared(|card| limit(card) as u32));
    }
}

/// Rounds a row to blocks of 32 signed bytes like the kernel, and converts it back.
fn round_to_bytes(x: &mut [f32]) {
    for block in x.chunks_mut(32) {
        let max_abs = block.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
        let max_abs = f32::from_bits(max_abs);
        if max_abs < 1e-35 {
            block.fill(0.0);
            continue;
        }
        let (inverse, d) = (127.0 / max_abs, max_abs * (1.0 / 127.0));
        for v in block {
            *v = if max_abs < 8e37 { (*v * inverse).round_ties_even() * d } else { f32::NAN };
        }
    }
}

fn rms(values: &[f32], eps: f32) -> f32 {
    let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    (1.0 / (squares / values.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// Returns x before the norm's scale, that scale (the kernel applies it after the product), and `a + b`.
fn make_x(k: &SimKernel<'_>, p: &ProductParams, quantised: bool) -> KernelResult<(Vec<f32>, f32, Vec<f32>)> {
    let n = p.k as usize;
    let row = |i: usize| -> KernelResult<Option<Vec<f32>>> {
        let at = k.ptr(i)?;
        if at.0 == 0 { Ok(None) } else { k.read(at, n).map(Some) }
    };
    let mut sum = row(4)?.ok_or_else(|| fault("a is missing"))?;
    if let Some(mut b) = row(5)? {
        if let Some(inner) = row(6)? {
            let scale = rms(&b, p.eps);
            b.iter_mut().zip(&inner).for_each(|(b, w)| *b = *b * scale * w);
        }
        sum.iter_mut().zip(&b).for_each(|(a, b)| *a += b);
    }
    let (mut x, mut scale) = (sum.clone(), 1.0);
    if let Some(norm) = row(7)? {
        scale = rms(&sum, p.eps);
        x.iter_mut().zip(&norm).for_each(|(x, w)| *x *= w);
    }
    if quantised {
        round_to_bytes(&mut x);
    }
    Ok((x, scale, sum))
}

fn twin(k: &mut SimKernel<'_>, kind: ProductVariant, first: DType, second: DType) -> KernelResult {
    let p: ProductParams = k.arg(3)?;
    let has = |args: &[usize]| args.iter().any(|&i| k.ptr(i).is_ok_and(|at| at.0 != 0));
    // The compiled variants ignore operands that they do not have.
    let is_of_kind = match kind {
        ProductVariant::Bare => p.gate == 0 && p.n[1] == 0 && !has(&[5, 6, 7, 8, 12, 13, 14]),
        ProductVariant::Gated => p.gate != 0,
        ProductVariant::Several => p.gate == 0,
    };
    if !is_of_kind {
        return Err(fault(format!("this is not a {kind:?} product")));
    }
    let cols = p.k as usize;
    let partial = || fault("a row ends inside a quantisation block");
    let mut parts = Vec::with_capacity(MAX_PARTS);
    for (i, n) in p.n.into_iter().map(|n| n as usize).enumerate().filter(|(_, n)| *n > 0) {
        let dtype = if p.second >> i & 1 == 1 { second } else { first };
        let bytes = weight_bytes(dtype, n, cols).ok_or_else(partial)?;
        parts.push((i, dtype, n, k.ptr(i)?, bytes));
    }
    k.before_wait(|k| {
        let norm = k.ptr(7)?;
        if norm.0 != 0 {
            k.view::<f32>(norm, cols)?;
        }
        parts.iter().try_for_each(|&(_, _, _, w, bytes)| k.view::<u8>(w, bytes).map(|_| ()))
    })?;
    let (x, scale, sum) = make_x(k, &p, first.is_quantized())?;
    if k.ptr(8)?.0 != 0 {
        k.write(k.ptr(8)?, &sum)?;
    }
    let mut results = Vec::with_capacity(MAX_PARTS);
    for &(i, dtype, n, w, bytes) in &parts {
        let mut y = vec![0.0_f32; n];
        {
            let w = k.view::<u8>(w, bytes)?;
            let mut row = vec![0.0; cols];
            for (j, y) in y.iter_mut().enumerate() {
                match dtype.is_quantized() {
                    true => unpack_row(dtype, &w, j, cols, &mut row).ok_or_else(partial)?,
                    false => {
                        let from = &w[2 * j * cols..2 * (j + 1) * cols];
                        quant::dequantize(dtype, from, &mut row).map_err(fault)?;
                    }
                }
                let dot: f64 = x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                *y = (dot * f64::from(scale)) as f32;
            }
        }
        if k.ptr(12 + i)?.0 != 0 {
            let bias: Vec<f32> = k.read(k.ptr(12 + i)?, n)?;
            y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        results.push((i, y));
    }
    if let (1 | 2, [(_, gate), (_, up)]) = (p.gate, results.as_slice()) {
        let y: Vec<f32> = gate.iter().zip(up).map(|(g, u)| activation(*g, p.gate) * u).collect();
        return k.write(k.ptr(9)?, &y);
    }
    results.iter().try_for_each(|(i, y)| k.write(k.ptr(9 + *i)?, y))
}

fn activation(x: f32, gate: u8) -> f32 {
    let x = f64::from(x);
    let y = match gate {
        1 => x / (1.0 + (-x).exp()),
        _ => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh()),
    };
    y as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_driver::sim::{SimDriver, SimOptions};

    #[test]
    fn multiplying_by_the_inverse_divides() {
        for n in [2, 3, 5, 7, 16, 28, 112, 1000] {
            let m_max = 1 << 20;
            let inverse = u64::from(inverse(n, m_max).unwrap());
            for m in (0..m_max).step_by(17).chain([m_max - 1, n, n - 1, 2 * n - 1]) {
                assert_eq!(((m as u64 * inverse) >> 32) as usize, m / n, "{m} / {n}");
            }
        }
        assert_eq!(inverse(1, 1 << 20), Some(0));
        assert_eq!(inverse(1 << 16, 1 << 16), None);
    }

    #[test]
    fn after_a_long_launch_half_of_the_prefetch_is_delayed_and_never_precedes_the_first_half() {
        let tuning = Tuning::of(GpuArch { major: 9, minor: 0 }).product;
        let filling = |chunks, pace, cycles| filling(&tuning, chunks, pace, cycles);
        assert_eq!(filling(64, 18, None), (64, 0));
        assert_eq!(filling(64, 18, Some(5000)), (32, 2000 + 5000));
        assert_eq!(filling(5, 255, Some(0)), (3, 4 * 255 * 3));
        assert_eq!(filling(1, 18, Some(0)), (1, 2000));
        assert_eq!(filling(64, 18, Some(usize::MAX)), (32, 100_000));
    }

    #[test]
    fn a_row_that_does_not_fit_shared_memory_is_too_long() {
        let sim = SimDriver::new(SimOptions::default());
        let device = refrain_driver::Device::simulated(&sim).unwrap();
        let mut card = device.info().clone();
        card.shared_block_bytes = 227 << 10;
        assert_eq!(product_too_long(&[DType::BF16, DType::BF16], 4096, &card), None);
        assert_eq!(product_too_long(&[DType::Q4_K, DType::Q6_K], 65_536, &card), None);
        let because = product_too_long(&[DType::BF16], 60_000, &card).unwrap();
        assert_eq!(because, "a block needs 272896 bytes of shared memory, the GPU has 228352");
    }

    #[test]
    fn only_known_pairs_of_dtypes_share_a_launch() {
        assert!(products_join(&[DType::BF16, DType::BF16]));
        assert!(products_join(&[DType::Q6_K, DType::Q4_K]));
        assert!(!products_join(&[DType::Q8_0, DType::Q4_K]));
        assert!(!products_join(&[DType::F32, DType::F32]));
    }
}
