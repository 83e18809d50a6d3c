//! Products with the low-rank adapter of each row's sequence.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{LoraOp, Op};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::twin::{Dense, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Factors of all adapters, and the adapter of each row.
#[derive(Clone, Copy, Debug)]
pub struct LoraArgs<'a> {
    /// `[n_adapters, rank, width]`, of `dtype`.
    pub factors: Buf,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// `[n]` I32: sequence of each row.
    pub seqs: Buf,
    /// `[n_seqs]` I32: adapter of each sequence; negative for none.
    pub adapters: Buf,
    /// Rows.
    pub n: usize,
    /// Sequences.
    pub n_seqs: usize,
    /// Adapters.
    pub n_adapters: usize,
    /// Rows of a factor.
    pub rank: usize,
    /// Columns of a factor.
    pub width: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct LoraSizes {
    n: u32,
    n_seqs: u32,
    n_adapters: u32,
    rank: u32,
    width: u32,
    tile: u32,
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows of a factor per block of `lora_down`, for one row and for a tile of them.
const RANKS: [usize; 2] = [4, 8];
/// Columns per block of `lora_up`.
const COLUMNS: usize = 512;
/// Fewer rows are computed by a block each: decode rows usually have different adapters, which a block would
/// read one after another. Rows of prompts share theirs.
const MANY_ROWS: usize = 96;
/// Rows of a tile in `lora.cu`.
const TILE: usize = 4;

impl LoraArgs<'_> {
    fn shape(&self) -> [(&'static str, usize); 5] {
        [
            ("n", self.n),
            ("n_seqs", self.n_seqs),
            ("n_adapters", self.n_adapters),
            ("rank", self.rank),
            ("width", self.width),
        ]
    }

    fn sizes(&self) -> LoraSizes {
        let tile = if self.n < MANY_ROWS { 1 } else { TILE };
        let [n, n_seqs, n_adapters, rank, width, tile] =
            [self.n, self.n_seqs, self.n_adapters, self.rank, self.width, tile].map(|n| n as u32);
        LoraSizes { n, n_seqs, n_adapters, rank, width, tile }
    }

    /// Returns the checked factors, sequences and adapters.
    fn check(&self, case: &OpCase<'_>) -> Result<[Buf; 3], KernelError> {
        case.sizes()?;
        crate::require!(case, DTYPES.contains(&self.dtype), "factors must be F32, F16 or BF16");
        let bytes = [self.n_adapters, self.rank, self.width]
            .iter()
            .try_fold(self.dtype.block_bytes(), |bytes, n| bytes.checked_mul(*n));
        Ok([
            case.buf("factors", self.factors, bytes, 16)?,
            case.words("seqs", self.seqs, &[self.n])?,
            case.words("adapters", self.adapters, &[self.n_seqs])?,
        ])
    }
}

impl Kernels {
    /// Builds the launch of [`LoraOp::Down`]: `x[n, width]` to `t[n, rank]`. An index out of range counts as no
    /// adapter; the simulated device faults.
    pub fn lora_down(&self, a: &LoraArgs<'_>, x: &BufView, t: Buf) -> Result<Launch, KernelError> {
        let shape = a.shape();
        let case = OpCase { op: "lora_down", dtype: a.dtype, shape: &shape };
        let [factors, seqs, adapters] = a.check(&case)?;
        let (x, rows) = case.rows("x", x, a.n, a.width)?;
        let sizes = a.sizes();
        let ranks = if sizes.tile == 1 { RANKS[0] } else { RANKS[1] };
        let n_parts = a.rank.div_ceil(ranks);
        crate::require!(case, n_parts <= 65_535, "the grid takes at most rank {}", 65_535 * ranks);
        let grid = [sizes.n.div_ceil(sizes.tile), n_parts as u32];
        Ok(self
            .launch(&format!("lora_down_{}", lowercase(a.dtype)), grid, 256)?
            .step(a.step)
            .write(case.words("t", t, &[a.n, a.rank])?)
            .read(x)
            .read(factors)
            .read(seqs)
            .read(adapters)
            .baked(Baked(rows))
            .baked(Baked(sizes))
            .vouch(&case))
    }

    /// Builds the launch of [`LoraOp::Up`]: `t[n, rank]` to `y[n, width]`, added to `y0`, which may be `y`. An index out of
    /// range counts as no adapter; the simulated device faults.
    pub fn lora_up(
        &self,
        a: &LoraArgs<'_>,
        t: &BufView,
        y0: &BufView,
        y: Buf,
    ) -> Result<Launch, KernelError> {
        let shape = a.shape();
        let case = OpCase { op: "lora_up", dtype: a.dtype, shape: &shape };
        let [factors, seqs, adapters] = a.check(&case)?;
        let (t, t_rows) = case.rows("t", t, a.n, a.rank)?;
        let (y0, y_rows) = case.rows("y0", y0, a.n, a.width)?;
        let bytes = a.n.checked_mul(a.width).and_then(|n| n.checked_mul(4));
        let y = case.buf("y", y, bytes, 16)?;
        let n_parts = a.width.div_ceil(COLUMNS);
        crate::require!(case, n_parts <= 65_535, "the grid takes at most {} columns", 65_535 * COLUMNS);
        let sizes = a.sizes();
        let grid = [sizes.n.div_ceil(sizes.tile), n_parts as u32];
        Ok(self
            .launch(&format!("lora_up_{}", lowercase(a.dtype)), grid, 64)?
            .step(a.step)
            .write(y)
            .read(y0)
            .read(t)
            .read(factors)
            .read(seqs)
            .read(adapters)
            .baked(Baked(y_rows))
            .baked(Baked(t_rows))
            .baked(Baked(sizes))
            .vouch(&case))
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    const S: usize = size_of::<LoraSizes>();
    for dtype in DTYPES {
        let unit = lowercase(dtype);
        let entry = |name: String, params: &[usize], twin: fn(&mut SimKernel<'_>, DType) -> KernelResult| {
            KernelEntry::new(KernelFamily::Lora, name, params, move |k| twin(k, dtype)).unit(&unit)
        };
        all.push(entry(format!("lora_down_{unit}"), &[P, P, P, P, P, R, S], down));
        all.push(entry(format!("lora_up_{unit}"), &[P, P, P, P, P, P, R, R, S], up));
    }
}

/// The rows that have an adapter, the factors of these adapters, and for each of these rows the number of its factor.
struct TwinRows {
    rows: Vec<usize>,
    factors: Dense,
    adapters: Dense,
    seqs: Dense,
}

impl TwinRows {
    /// Reads no factor that no row has; `None` if there are no rows with an adapter.
    fn read(
        k: &SimKernel<'_>,
        dtype: DType,
        s: &LoraSizes,
        [factors, seqs, adapters]: [usize; 3],
    ) -> KernelResult<Option<TwinRows>> {
        let [n, n_seqs, rank, width] = [s.n, s.n_seqs, s.rank, s.width].map(|n| n as usize);
        let (seqs, ids) = (k.read::<i32>(k.ptr(seqs)?, n)?, k.read::<i32>(k.ptr(adapters)?, n_seqs)?);
        let (mut rows, mut used, mut of_rows) = (Vec::new(), Vec::new(), Vec::new());
        for (row, seq) in seqs.iter().enumerate() {
            let Ok(seq) = usize::try_from(*seq) else { continue };
            let id = ids.get(seq).ok_or_else(|| crate::twin::fault(format!("sequence {seq} of {n_seqs}")))?;
            let Ok(id) = u32::try_from(*id) else { continue };
            if id >= s.n_adapters {
                return Err(crate::twin::fault(format!("adapter {id} of {}", s.n_adapters)));
            }
            let at = used.iter().position(|known| *known == id).unwrap_or_else(|| {
                used.push(id);
                used.len() - 1
            });
            rows.push(row);
            of_rows.push(at as i32);
        }
        if rows.is_empty() {
            return Ok(None);
        }
        let bytes = dtype.block_bytes() * rank * width;
        let mut stack = Vec::with_capacity(used.len() * bytes);
        for id in &used {
            stack
                .extend_from_slice(&k.view::<u8>(k.ptr(factors)?.add(u64::from(*id) * bytes as u64), bytes)?);
        }
        let each: Vec<i32> = (0..rows.len() as i32).collect();
        let words = |values: &[i32]| Dense::of(DType::I32, &[values.len()], bytemuck::cast_slice(values));
        Ok(Some(TwinRows {
            factors: Dense::of(dtype, &[used.len(), rank, width], &stack)?,
            adapters: words(&of_rows)?,
            seqs: words(&each)?,
            rows,
        }))
    }

    /// Those of all rows.
    fn pick(&self, all: &[f32], n_cols: usize) -> KernelResult<Dense> {
        let picked: Vec<f32> =
            self.rows.iter().flat_map(|row| &all[row * n_cols..][..n_cols]).copied().collect();
        Dense::f32(&picked, &[self.rows.len(), n_cols])
    }
}

fn down(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let s: LoraSizes = k.arg(6)?;
    let [n, rank, width] = [s.n, s.rank, s.width].map(|n| n as usize);
    let mut t = vec![0.0; n * rank];
    if let Some(rows) = TwinRows::read(k, dtype, &s, [2, 3, 4])? {
        let x = rows.pick(&read_rows(k, k.ptr(1)?, k.arg(5)?, n, width)?, width)?;
        let inputs = [&x, &rows.factors, &rows.seqs, &rows.adapters];
        let made = run_f32(&Op::Lora(LoraOp::Down), &inputs, &[rows.rows.len(), rank])?;
        for (row, made) in rows.rows.iter().zip(made.chunks_exact(rank)) {
            t[row * rank..][..rank].copy_from_slice(made);
        }
    }
    k.write(k.ptr(0)?, &t)
}

fn up(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let s: LoraSizes = k.arg(8)?;
    let [n, rank, width] = [s.n, s.rank, s.width].map(|n| n as usize);
    let mut y = read_rows(k, k.ptr(1)?, k.arg(6)?, n, width)?;
    if let Some(rows) = TwinRows::read(k, dtype, &s, [3, 4, 5])? {
        let t = rows.pick(&read_rows(k, k.ptr(2)?, k.arg(7)?, n, rank)?, rank)?;
        let y0 = rows.pick(&y, width)?;
        let inputs = [&y0, &t, &rows.factors, &rows.seqs, &rows.adapters];
        let made = run_f32(&Op::Lora(LoraOp::Up), &inputs, &[rows.rows.len(), width])?;
        for (row, made) in rows.rows.iter().zip(made.chunks_exact(width)) {
            y[row * width..][..width].copy_from_slice(made);
        }
    }
    k.write(k.ptr(0)?, &y)
}
