//! 16-bit rows for tensor cores, written directly by casts, norms and gates.

use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_graph::{Gate, Op};
use refrain_tensor::DType;

use crate::elementwise::GateArgs;
use crate::error::{KernelError, OpCase};
use crate::gemm::GEMM_DTYPES;
use crate::load::Kernels;
use crate::norm::{AddRmsNormArgs, RmsNormArgs};
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

const BLOCK: u32 = 256;
/// Columns per plane.
pub(crate) const PLANE: usize = 128;
/// Columns per block of the two-dimensional kernels.
const BLOCK_COLS: u32 = 4 * BLOCK;

/// Destination of 16-bit rows.
#[derive(Clone, Copy, Debug)]
pub struct Narrow {
    /// `[n_rows, n_cols]`.
    pub y: Buf,
    /// F16 or BF16.
    pub dtype: DType,
    /// 0 for contiguous rows. Otherwise the rows per plane, as in [`crate::BatchArgs`]: a power of two, with
    /// `n_cols` a multiple of 128. Additional rows go to further planes.
    pub plane_rows: usize,
    /// Whether the F32 result is written too.
    pub also_wide: bool,
}

impl Narrow {
    pub(crate) fn check(&self, case: &OpCase<'_>, n_rows: usize, n_cols: usize) -> Result<Buf, KernelError> {
        crate::require!(case, GEMM_DTYPES.contains(&self.dtype), "the 16-bit output must be F16 or BF16");
        crate::require!(case, n_cols.is_multiple_of(4), "n_cols must be a multiple of 4");
        crate::require!(case, n_rows <= 65_535, "at most 65535 rows fit in one launch");
        let planes_fit =
            self.plane_rows == 0 || (self.plane_rows.is_power_of_two() && n_cols.is_multiple_of(PLANE));
        crate::require!(
            case,
            planes_fit,
            "planes of {} rows need columns in multiples of 128 and a power of two of rows",
            self.plane_rows
        );
        let n_rows = n_rows.next_multiple_of(self.plane_rows.max(1));
        case.buf("narrow y", self.y, n_rows.checked_mul(n_cols).and_then(|n| n.checked_mul(2)), 16)
    }

    fn name(&self, what: &str) -> String {
        name(what, self.dtype)
    }
}

/// Checks that every row is 16-byte aligned.
pub(crate) fn aligned(
    case: &OpCase<'_>,
    what: &'static str,
    view: &BufView,
    n_rows: usize,
    n_cols: usize,
) -> Result<(Buf, RowLayout), KernelError> {
    let (buf, rows) = case.rows(what, view, n_rows, n_cols)?;
    let strides = [rows.inner_stride, rows.outer_stride];
    crate::require!(
        case,
        buf.offset().is_multiple_of(16) && (n_rows == 1 || strides.iter().all(|s| s.is_multiple_of(4))),
        "rows of {what} start at byte {} with strides of {strides:?} elements, must be 16-byte aligned",
        buf.offset()
    );
    Ok((buf, rows))
}

fn wide(
    case: &OpCase<'_>,
    launch: LaunchBuilder,
    narrow: &Narrow,
    y: Buf,
    dims: [usize; 2],
) -> Result<LaunchBuilder, KernelError> {
    if !narrow.also_wide {
        return Ok(launch.null());
    }
    let bytes = dims[0].checked_mul(dims[1]).and_then(|n| n.checked_mul(4));
    Ok(launch.write(case.buf("y", y, bytes, 16)?))
}

impl Kernels {
    /// Builds the launch for `y = x` in 16 bits, rounded to nearest even.
    pub fn narrow_rows(
        &self,
        x: &BufView,
        n_rows: usize,
        n_cols: usize,
        to: &Narrow,
        step: &str,
    ) -> Result<Launch, KernelError> {
        let shape = [("n_rows", n_rows), ("n_cols", n_cols)];
        let case = OpCase { op: "narrow_rows", dtype: x.dtype, shape: &shape };
        case.sizes()?;
        let y = to.check(&case, n_rows, n_cols)?;
        let (x, rows) = aligned(&case, "x", x, n_rows, n_cols)?;
        let grid = [(n_cols as u32).div_ceil(BLOCK_COLS), n_rows as u32];
        Ok(self
            .launch(&to.name("rows"), grid, BLOCK)?
            .step(step)
            .write(y)
            .read(x)
            .baked(Baked(rows))
            .baked(Baked(n_cols as u32))
            .baked(Baked(to.plane_rows as u32))
            .vouch(&case))
    }

    /// [`Kernels::rms_norm`] with a 16-bit result.
    pub fn narrow_rms_norm(&self, a: &RmsNormArgs<'_>, to: &Narrow) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "narrow_rms_norm", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let y = to.check(&case, a.n_rows, a.n_cols)?;
        let (x, rows) = aligned(&case, "x", &a.x, a.n_rows, a.n_cols)?;
        let launch = self.launch(&to.name("rms_norm"), a.n_rows as u32, BLOCK)?.step(a.step).write(y);
        Ok(wide(&case, launch, to, a.y, [a.n_rows, a.n_cols])?
            .read(x)
            .read(case.buf("w", a.w, a.n_cols.checked_mul(4), 16)?)
            .baked(Baked(rows))
            .baked(Baked(a.n_cols as u32))
            .baked(Baked(to.plane_rows as u32))
            .baked(Baked(a.eps))
            .vouch(&case))
    }

    /// [`Kernels::add_rms_norm`] with a 16-bit norm.
    pub fn narrow_add_rms_norm(&self, a: &AddRmsNormArgs<'_>, to: &Narrow) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "narrow_add_rms_norm", dtype: a.a.dtype, shape: &shape };
        case.sizes()?;
        let y = to.check(&case, a.n_rows, a.n_cols)?;
        let (a_buf, a_rows) = aligned(&case, "a", &a.a, a.n_rows, a.n_cols)?;
        let (right, b_rows) = aligned(&case, "b", &a.b, a.n_rows, a.n_cols)?;
        let words = a.n_rows.checked_mul(a.n_cols).and_then(|n| n.checked_mul(4));
        let launch = self
            .launch(&to.name("add_rms_norm"), a.n_rows as u32, BLOCK)?
            .step(a.step)
            .write(case.buf("sum", a.sum, words, 16)?)
            .write(y);
        Ok(wide(&case, launch, to, a.y, [a.n_rows, a.n_cols])?
            .read(a_buf)
            .read(right)
            .read(case.buf("w", a.w, a.n_cols.checked_mul(4), 16)?)
            .baked(Baked(a_rows))
            .baked(Baked(b_rows))
            .baked(Baked(a.n_cols as u32))
            .baked(Baked(to.plane_rows as u32))
            .baked(Baked(a.eps))
            .vouch(&case))
    }

    /// [`Kernels::gate`] with a 16-bit result.
    pub fn narrow_gate(&self, a: &GateArgs<'_>, to: &Narrow) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "narrow_gate", dtype: a.gate.dtype, shape: &shape };
        case.sizes()?;
        let y = to.check(&case, a.n_rows, a.n_cols)?;
        let (gate, gate_rows) = aligned(&case, "gate", &a.gate, a.n_rows, a.n_cols)?;
        let (up, up_rows) = aligned(&case, "up", &a.up, a.n_rows, a.n_cols)?;
        let grid = [(a.n_cols as u32).div_ceil(BLOCK_COLS), a.n_rows as u32];
        let launch = self.launch(&to.name(gate_name(a.kind)), grid, BLOCK)?.step(a.step).write(y);
        Ok(wide(&case, launch, to, a.y, [a.n_rows, a.n_cols])?
            .read(gate)
            .read(up)
            .baked(Baked(gate_rows))
            .baked(Baked(up_rows))
            .baked(Baked(a.n_cols as u32))
            .baked(Baked(to.plane_rows as u32))
            .vouch(&case))
    }
}

fn name(what: &str, dtype: DType) -> String {
    format!("narrow_{what}_{}", dtype.name().to_ascii_lowercase())
}

fn gate_name(kind: Gate) -> &'static str {
    match kind {
        Gate::Silu => "gate_silu",
        Gate::GeluTanh => "gate_gelu_tanh",
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    for dtype in GEMM_DTYPES {
        let mut add = |what: &str, params: &[usize], twin: fn(&mut SimKernel<'_>, DType) -> KernelResult| {
            all.push(KernelEntry::new(KernelFamily::Narrow, name(what, dtype), params, move |k| {
                twin(k, dtype)
            }));
        };
        add("rows", &[P, P, R, W, W], rows);
        add("rms_norm", &[P, P, P, P, R, W, W, W], rms_norm);
        add("add_rms_norm", &[P, P, P, P, P, P, R, R, W, W, W], add_rms_norm);
        add("gate_silu", &[P, P, P, P, R, R, W, W], |k, dtype| gate(k, Gate::Silu, dtype));
        add("gate_gelu_tanh", &[P, P, P, P, R, R, W, W], |k, dtype| gate(k, Gate::GeluTanh, dtype));
    }
}

/// Index of an element among rows of `n_cols` columns; see `planes.cuh`.
pub(crate) fn narrow_at(row: usize, column: usize, n_cols: usize, plane_rows: usize) -> usize {
    if plane_rows == 0 {
        return row * n_cols + column;
    }
    let (tile, column_of_plane) = (row / plane_rows, column % PLANE);
    let (lane, four, element) = (column_of_plane / 32, column_of_plane % 32 / 4, column % 4);
    let chunk = tile * n_cols / 8 + column / PLANE * (PLANE / 8) + 2 * four + element / 2;
    (chunk * plane_rows + row % plane_rows) * 8 + 2 * lane + element % 2
}

/// 16-bit rows that a kernel writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrowed {
    pub(crate) dtype: DType,
    pub(crate) n_cols: usize,
    pub(crate) plane_rows: usize,
}

impl Narrowed {
    /// Writes values through argument `y`, and unrounded through argument `wide` unless that is null.
    pub(crate) fn write(
        self,
        k: &mut SimKernel<'_>,
        values: &[f32],
        y: usize,
        wide: Option<usize>,
    ) -> KernelResult {
        if self.plane_rows == 0 {
            k.write(k.ptr(y)?, &values.iter().map(|&v| self.bits(v)).collect::<Vec<_>>())?;
        } else {
            // Padding rows of a plane keep their contents.
            for (row, values) in values.chunks_exact(self.n_cols).enumerate() {
                self.write_row(k, row, values, y)?;
            }
        }
        let wide = wide.map(|wide| k.ptr(wide)).transpose()?;
        match wide.filter(|wide| *wide != DevicePtr(0)) {
            Some(wide) => k.write(wide, values),
            None => Ok(()),
        }
    }

    /// Writes one row in planes through argument `y`.
    pub(crate) fn write_row(
        self,
        k: &mut SimKernel<'_>,
        row: usize,
        values: &[f32],
        y: usize,
    ) -> KernelResult {
        let y = k.ptr(y)?;
        for (plane, chunk) in (0..self.n_cols / PLANE).flat_map(|plane| (0..16).map(move |c| (plane, c))) {
            let first = plane * PLANE + 2 * chunk;
            let eight: Vec<u16> = (0..8).map(|i| self.bits(values[first + 32 * (i / 2) + i % 2])).collect();
            k.write(y.add(2 * narrow_at(row, first, self.n_cols, self.plane_rows) as u64), &eight)?;
        }
        Ok(())
    }

    fn bits(self, v: f32) -> u16 {
        if self.dtype == DType::F16 { f16::from_f32(v).to_bits() } else { bf16::from_f32(v).to_bits() }
    }
}

fn rows(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n_rows, n_cols) = (k.config().grid[1] as usize, count(k, 3)?);
    let x = read_rows(k, k.ptr(1)?, k.arg(2)?, n_rows, n_cols)?;
    Narrowed { dtype, n_cols, plane_rows: count(k, 4)? }.write(k, &x, 0, None)
}

fn rms_norm(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n_rows, n_cols, eps) = (k.config().grid[0] as usize, count(k, 5)?, k.arg(7)?);
    let dims = [n_rows, n_cols];
    let x = Dense::f32(&read_rows(k, k.ptr(2)?, k.arg(4)?, n_rows, n_cols)?, &dims)?;
    let w = Dense::read(k, k.ptr(3)?, DType::F32, &[n_cols])?;
    let y = run_f32(&Op::RmsNorm { eps }, &[&x, &w], &dims)?;
    Narrowed { dtype, n_cols, plane_rows: count(k, 6)? }.write(k, &y, 0, Some(1))
}

fn add_rms_norm(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n_rows, n_cols, eps) = (k.config().grid[0] as usize, count(k, 8)?, k.arg(10)?);
    let dims = [n_rows, n_cols];
    let a = read_rows(k, k.ptr(3)?, k.arg(6)?, n_rows, n_cols)?;
    let b = read_rows(k, k.ptr(4)?, k.arg(7)?, n_rows, n_cols)?;
    let w = Dense::read(k, k.ptr(5)?, DType::F32, &[n_cols])?;
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    let y = run_f32(&Op::RmsNorm { eps }, &[&Dense::f32(&sum, &dims)?, &w], &dims)?;
    k.write(k.ptr(0)?, &sum)?;
    Narrowed { dtype, n_cols, plane_rows: count(k, 9)? }.write(k, &y, 1, Some(2))
}

fn gate(k: &mut SimKernel<'_>, kind: Gate, dtype: DType) -> KernelResult {
    let (n_rows, n_cols) = (k.config().grid[1] as usize, count(k, 6)?);
    let dims = [n_rows, n_cols];
    let gate = Dense::f32(&read_rows(k, k.ptr(2)?, k.arg(4)?, n_rows, n_cols)?, &dims)?;
    let up = Dense::f32(&read_rows(k, k.ptr(3)?, k.arg(5)?, n_rows, n_cols)?, &dims)?;
    let y = run_f32(&Op::Gate(kind), &[&gate, &up], &dims)?;
    Narrowed { dtype, n_cols, plane_rows: count(k, 7)? }.write(k, &y, 0, Some(1))
}
