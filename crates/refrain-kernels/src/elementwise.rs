//! Unary and binary elementwise functions, and gates.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Binary, Gate, Op, Unary};
use refrain_tensor::{DType, Shape};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, read_rows, run_f32};
use crate::view::{BufView, RowLayout, Walk};
use crate::vouch::Vouch;

/// Elements per block.
pub(crate) const BLOCK: usize = 256;

/// `y = f(x)`, element by element.
#[derive(Clone, Copy, Debug)]
pub struct UnaryArgs<'a> {
    /// The function.
    pub f: Unary,
    /// F32, in any layout.
    pub x: BufView,
    /// Contiguous F32 of the same shape; may be `x` if that is contiguous.
    pub y: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y = f(a, b)`, element by element.
#[derive(Clone, Copy, Debug)]
pub struct BinaryArgs<'a> {
    /// The function.
    pub f: Binary,
    /// F32, in any layout that broadcasts to `shape`.
    pub a: BufView,
    /// Like `a`.
    pub b: BufView,
    /// Contiguous F32 of `shape`; may be `a` or `b` if that is contiguous and has this shape.
    pub y: Buf,
    /// The shape of the result.
    pub shape: Shape,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y = f(gate) * up`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct GateArgs<'a> {
    /// The activation.
    pub kind: Gate,
    /// `[.., n_cols]` F32, with contiguous rows.
    pub gate: BufView,
    /// Like `gate`.
    pub up: BufView,
    /// `[n_rows, n_cols]` F32; may be `gate` or `up` if that is contiguous.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

impl Kernels {
    /// Builds the launch for [`UnaryArgs`].
    pub fn unary(&self, a: &UnaryArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.x.layout.shape().n_elements();
        let shape = [("n", n)];
        let case = OpCase { op: a.f.name(), dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.x.dtype == DType::F32, "x must be F32");
        let walk = case.walk(a.x.layout.shape(), &a.x.layout, None)?;
        let [p0, p1] = match a.f {
            Unary::Affine { mul, add } => [mul, add],
            Unary::SoftCap(cap) => [cap, 0.0],
            Unary::Neg
            | Unary::Exp
            | Unary::Log
            | Unary::Rsqrt
            | Unary::Tanh
            | Unary::Sigmoid
            | Unary::Silu
            | Unary::GeluTanh
            | Unary::GeluErf => [0.0; 2],
        };
        Ok(self
            .launch(&unary_name(a.f), n.div_ceil(BLOCK) as u32, BLOCK as u32)?
            .step(a.step)
            .write(case.words("y", a.y, &[n])?)
            .read(case.extent("x", &a.x)?)
            .baked(Baked(walk))
            .baked(Baked(n as u32))
            .baked(Baked(p0))
            .baked(Baked(p1))
            .vouch(&case))
    }

    /// Builds the launch for [`BinaryArgs`].
    pub fn binary(&self, a: &BinaryArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.shape.n_elements();
        let shape = [("n", n)];
        let case = OpCase { op: a.f.name(), dtype: a.a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.a.dtype == DType::F32 && a.b.dtype == DType::F32, "a and b must be F32");
        let walk = case.walk(a.shape, &a.a.layout, Some(&a.b.layout))?;
        Ok(self
            .launch(&binary_name(a.f), n.div_ceil(BLOCK) as u32, BLOCK as u32)?
            .step(a.step)
            .write(case.words("y", a.y, &[n])?)
            .read(case.extent("a", &a.a)?)
            .read(case.extent("b", &a.b)?)
            .baked(Baked(walk))
            .baked(Baked(n as u32))
            .vouch(&case))
    }

    /// Builds the launch for [`GateArgs`].
    pub fn gate(&self, a: &GateArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("n_cols", a.n_cols)];
        let case = OpCase { op: "gate", dtype: a.gate.dtype, shape: &shape };
        case.sizes()?;
        let (gate, gate_rows) = case.rows("gate", &a.gate, a.n_rows, a.n_cols)?;
        let (up, up_rows) = case.rows("up", &a.up, a.n_rows, a.n_cols)?;
        let n = case.u32("the number of elements", a.n_rows.saturating_mul(a.n_cols))?;
        Ok(self
            .launch(gate_name(a.kind), n.div_ceil(BLOCK as u32), BLOCK as u32)?
            .step(a.step)
            .write(case.words("y", a.y, &[a.n_rows, a.n_cols])?)
            .read(gate)
            .read(up)
            .baked(Baked(gate_rows))
            .baked(Baked(up_rows))
            .baked(Baked(a.n_rows as u32))
            .baked(Baked(a.n_cols as u32))
            .vouch(&case))
    }
}

const UNARY: [Unary; 11] = [
    Unary::Neg,
    Unary::Exp,
    Unary::Log,
    Unary::Rsqrt,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Silu,
    Unary::GeluTanh,
    Unary::GeluErf,
    Unary::Affine { mul: 1.0, add: 0.0 },
    Unary::SoftCap(1.0),
];
const BINARY: [Binary; 5] = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max];

fn unary_name(f: Unary) -> String {
    format!("unary_{}_f32", f.name())
}

fn binary_name(f: Binary) -> String {
    format!("binary_{}_f32", f.name())
}

fn gate_name(kind: Gate) -> &'static str {
    match kind {
        Gate::Silu => "gate_silu_f32",
        Gate::GeluTanh => "gate_gelu_tanh_f32",
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const WALK: usize = size_of::<Walk>();
    const R: usize = size_of::<RowLayout>();
    for f in UNARY {
        all.push(KernelEntry::new(
            KernelFamily::Elementwise,
            unary_name(f),
            &[P, P, WALK, W, W, W],
            move |k| unary(k, f),
        ));
    }
    for f in BINARY {
        all.push(KernelEntry::new(
            KernelFamily::Elementwise,
            binary_name(f),
            &[P, P, P, WALK, W],
            move |k| binary(k, f),
        ));
    }
    for kind in [Gate::Silu, Gate::GeluTanh] {
        let params = [P, P, P, R, R, W, W];
        all.push(KernelEntry::new(KernelFamily::Elementwise, gate_name(kind), &params, move |k| {
            gate(k, kind)
        }));
    }
}

fn unary(k: &mut SimKernel<'_>, f: Unary) -> KernelResult {
    let (walk, n) = (k.arg::<Walk>(2)?, count(k, 3)?);
    let f = match f {
        Unary::Affine { .. } => Unary::Affine { mul: k.arg(4)?, add: k.arg(5)? },
        Unary::SoftCap(_) => Unary::SoftCap(k.arg(4)?),
        Unary::Neg
        | Unary::Exp
        | Unary::Log
        | Unary::Rsqrt
        | Unary::Tanh
        | Unary::Sigmoid
        | Unary::Silu
        | Unary::GeluTanh
        | Unary::GeluErf => f,
    };
    let x: Vec<f32> = walked(k, 1, n, |i| walk.at(i).0)?;
    let y = run_f32(&Op::Unary(f), &[&Dense::f32(&x, &[n])?], &[n])?;
    k.write(k.ptr(0)?, &y)
}

fn binary(k: &mut SimKernel<'_>, f: Binary) -> KernelResult {
    let (walk, n) = (k.arg::<Walk>(3)?, count(k, 4)?);
    let a: Vec<f32> = walked(k, 1, n, |i| walk.at(i).0)?;
    let b: Vec<f32> = walked(k, 2, n, |i| walk.at(i).1)?;
    let y = run_f32(&Op::Binary(f), &[&Dense::f32(&a, &[n])?, &Dense::f32(&b, &[n])?], &[n])?;
    k.write(k.ptr(0)?, &y)
}

/// Reads the elements of pointer parameter `param` at the indices that `at` returns.
pub(crate) fn walked<T: bytemuck::Pod>(
    k: &SimKernel<'_>,
    param: usize,
    n: usize,
    at: impl Fn(usize) -> usize,
) -> KernelResult<Vec<T>> {
    let ptr = k.ptr(param)?;
    let end = (0..n).map(&at).max().map_or(0, |last| last + 1);
    // One access covers the whole extent: it still catches a stray index, and logging every element would be
    // slow.
    let all = k.view::<T>(ptr, end)?;
    Ok((0..n).map(|i| all[at(i)]).collect())
}

fn gate(k: &mut SimKernel<'_>, kind: Gate) -> KernelResult {
    let (n_rows, n_cols) = (count(k, 5)?, count(k, 6)?);
    let dims = [n_rows, n_cols];
    let gate = Dense::f32(&read_rows(k, k.ptr(1)?, k.arg(3)?, n_rows, n_cols)?, &dims)?;
    let up = Dense::f32(&read_rows(k, k.ptr(2)?, k.arg(4)?, n_rows, n_cols)?, &dims)?;
    let y = run_f32(&Op::Gate(kind), &[&gate, &up], &dims)?;
    k.write(k.ptr(0)?, &y)
}
