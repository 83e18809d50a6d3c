//! Elementwise functions of any dtype, with broadcasting, and their gradients.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Binary, Compare, Dropout, Gate, Op, TrainOp, Unary};
use refrain_tensor::{DType, Layout, MAX_RANK, Shape};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::fault;
use crate::typed::{Typed, dtype_of, is_aligned, named, run_typed};
use crate::view::{BufView, merge};
use crate::vouch::Vouch;

/// The function applied to each element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MapOp {
    /// `f(a)`.
    Unary(Unary),
    /// `f(a, b)`.
    Binary(Binary),
    /// `f(a) * b`.
    Gate(Gate),
    /// I32: 1 where the comparison of `a` and `b` holds, else 0.
    Compare(Compare),
    /// `b` where `a` (I32) is not 0, else `c`.
    Select,
    /// `a` converted to the result's dtype.
    Cast,
    /// `a * f'(b)`.
    UnaryGrad(Unary),
    /// `a * c * f'(b)` and `a * f(b)`.
    GateGrad(Gate),
    /// `a` with dropout.
    Dropout {
        /// Dropout rule.
        dropout: Dropout,
        /// `[4]` U32 in device memory, read at run time.
        rng: Buf,
    },
}

/// One of [`MapOp`] over elements of any float dtype, or I32 where meaningful; computed in F32 and rounded
/// once.
#[derive(Clone, Copy, Debug)]
pub struct MapArgs<'a> {
    /// Function.
    pub op: MapOp,
    /// The op's inputs, each in a layout that broadcasts to `shape`.
    pub inputs: &'a [BufView],
    /// The op's outputs, contiguous, of `shape`. An output may alias an input that is contiguous and has this
    /// shape.
    pub outputs: &'a [Buf],
    /// Dtype of the outputs.
    pub dtype: DType,
    /// Shape of the outputs.
    pub shape: Shape,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Threads per block, each with eight elements.
const BLOCK: usize = 256;
const LANES: usize = 8;
/// Groups of eight elements per thread in the kernels for rows of one dtype.
const ROWS_AT_ONCE: usize = 2;
/// Dtypes with such kernels.
const ROWS_TYPES: [DType; 2] = [DType::F16, DType::BF16];

/// Row-major dimensions and strides of up to three operands. `types` holds the dtypes of result and operands,
/// one byte each.
#[derive(Clone, Copy, Debug, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
struct Map {
    rank: u32,
    dims: [u32; MAX_RANK],
    strides: [[u32; MAX_RANK]; 3],
    n: u32,
    wide: u32,
    types: u32,
}

impl Map {
    fn at(&self, operand: usize, mut i: usize) -> usize {
        let mut at = 0;
        for axis in (0..self.rank as usize).rev() {
            let dim = self.dims[axis] as usize;
            at += i % dim * self.strides[operand][axis] as usize;
            i /= dim;
        }
        at
    }

    fn dtype(&self, operand: usize) -> KernelResult<DType> {
        dtype_of(self.types >> (8 * operand) & 0xff)
    }

    /// Whether all operands are contiguous rows of the result's dtype, a 16-bit one.
    fn is_rows(&self, n_operands: usize) -> bool {
        let inner = (self.rank as usize).wrapping_sub(1);
        let is_one_type =
            |dtype: &DType| (0..=n_operands).all(|i| self.dtype(i).is_ok_and(|other| other == *dtype));
        self.wide != 0
            && matches!(self.rank, 1 | 2)
            && self.strides[..n_operands].iter().all(|strides| strides[inner] == 1)
            && ROWS_TYPES.iter().any(is_one_type)
    }
}

impl MapOp {
    fn kernel(&self) -> &'static str {
        match self {
            MapOp::Unary(_) => "map_unary",
            MapOp::Binary(_) => "map_binary",
            MapOp::Gate(_) => "map_gate",
            MapOp::Compare(_) => "map_compare",
            MapOp::Select => "map_select",
            MapOp::Cast => "map_cast",
            MapOp::UnaryGrad(_) => "map_unary_grad",
            MapOp::GateGrad(_) => "map_gate_grad",
            MapOp::Dropout { .. } => "map_dropout",
        }
    }

    /// Whether a kernel for rows of one dtype exists.
    fn has_rows(&self) -> bool {
        matches!(self, MapOp::Binary(_) | MapOp::Gate(_) | MapOp::GateGrad(_))
    }

    /// Number of inputs and outputs.
    fn arity(&self) -> [usize; 2] {
        match self {
            MapOp::Unary(_) | MapOp::Cast | MapOp::Dropout { .. } => [1, 1],
            MapOp::Binary(_) | MapOp::Gate(_) | MapOp::Compare(_) | MapOp::UnaryGrad(_) => [2, 1],
            MapOp::Select => [3, 1],
            MapOp::GateGrad(_) => [3, 2],
        }
    }

    /// Function code, and two numeric arguments.
    fn params(&self) -> (u32, [f32; 2]) {
        match *self {
            MapOp::Unary(f) | MapOp::UnaryGrad(f) => (code_of(&UNARY, f, Unary::name), unary_params(f)),
            MapOp::Binary(f) => (code_of(&BINARY, f, Binary::name), [0.0; 2]),
            MapOp::Gate(Gate::Silu) | MapOp::GateGrad(Gate::Silu) => (0, [0.0; 2]),
            MapOp::Gate(Gate::GeluTanh) | MapOp::GateGrad(Gate::GeluTanh) => (1, [0.0; 2]),
            MapOp::Compare(Compare::Equal) => (0, [0.0; 2]),
            MapOp::Compare(Compare::Less) => (1, [0.0; 2]),
            MapOp::Select | MapOp::Cast => (0, [0.0; 2]),
            MapOp::Dropout { dropout: Dropout { p, site }, .. } => {
                (site, [p, (1.0 / (1.0 - f64::from(p))) as f32])
            }
        }
    }
}

fn code_of<T: Copy>(all: &[T], f: T, name: fn(T) -> &'static str) -> u32 {
    all.iter().position(|&other| name(other) == name(f)).map_or(u32::MAX, |at| at as u32)
}

fn unary_params(f: Unary) -> [f32; 2] {
    match f {
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
    }
}

impl Kernels {
    /// Builds the launch for [`MapArgs`].
    pub fn map(&self, a: &MapArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.shape.n_elements();
        let shape = [("n", n)];
        let case = OpCase { op: a.op.kernel(), dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let [n_in, n_out] = a.op.arity();
        crate::require!(
            case,
            a.inputs.len() == n_in && a.outputs.len() == n_out,
            "{} operands and {} results, must be {n_in} and {n_out}",
            a.inputs.len(),
            a.outputs.len()
        );
        let is_integer = |view: &BufView| view.dtype == DType::I32;
        let types_fit = match a.op {
            MapOp::Compare(_) => {
                is_integer(&a.inputs[0]) == is_integer(&a.inputs[1]) && a.dtype == DType::I32
            }
            MapOp::Select => is_integer(&a.inputs[0]) && !a.inputs[1..].iter().any(is_integer),
            MapOp::Cast => true,
            MapOp::Unary(_)
            | MapOp::Binary(_)
            | MapOp::Gate(_)
            | MapOp::UnaryGrad(_)
            | MapOp::GateGrad(_)
            | MapOp::Dropout { .. } => !a.inputs.iter().any(is_integer) && a.dtype.is_float(),
        };
        crate::require!(case, types_fit, "no kernel supports integers here");
        let mut map = case.map(a.shape, a.inputs)?;
        map.types = case.code("the result", a.dtype)?;
        for (i, input) in a.inputs.iter().enumerate() {
            map.types |= case.code("an operand", input.dtype)? << (8 * (i + 1));
        }
        let outputs = a.outputs.iter().map(|&y| case.elements("y", y, a.dtype, &[n]));
        let outputs = outputs.collect::<Result<Vec<Buf>, _>>()?;
        let inputs = a.inputs.iter().map(|x| case.extent("an operand", x));
        let mut inputs = inputs.collect::<Result<Vec<Buf>, _>>()?;
        map.wide = u32::from(map.wide != 0 && outputs.iter().all(|y| is_aligned(*y)));
        let (kernel, at_once) = match a.op.has_rows() && map.is_rows(n_in) {
            true => (named(&format!("{}_rows", a.op.kernel()), a.dtype), ROWS_AT_ONCE),
            false => (a.op.kernel().to_owned(), 1),
        };
        let n_blocks = n.div_ceil(BLOCK * LANES * at_once) as u32;
        let mut launch = self.launch(&kernel, n_blocks, BLOCK as u32)?.step(a.step);
        for i in 0..2 {
            launch = match outputs.get(i) {
                Some(y) => launch.write(*y),
                None => launch.null(),
            };
        }
        if let MapOp::Dropout { rng, .. } = a.op {
            inputs.extend([inputs[0], case.words("rng", rng, &[4])?]);
        }
        for i in 0..3 {
            launch = match inputs.get(i) {
                Some(x) => launch.read(*x),
                None => launch.null(),
            };
        }
        let (f, [p0, p1]) = a.op.params();
        Ok(launch.baked(Baked(map)).baked(Baked(f)).baked(Baked(p0)).baked(Baked(p1)).vouch(&case))
    }
}

impl OpCase<'_> {
    /// Builds the walk over `shape` with up to three operands broadcast to it. `wide` is set if eight
    /// elements at a time are adjacent, or are one broadcast element.
    fn map(&self, shape: Shape, views: &[BufView]) -> Result<Map, KernelError> {
        let fit = |view: &BufView| view.layout.broadcast_to(shape).map_err(|e| self.refuse(e.to_string()));
        let layouts = views.iter().map(fit).collect::<Result<Vec<Layout>, _>>()?;
        let strides: Vec<&[usize]> = layouts.iter().map(Layout::strides).collect();
        let runs = merge(shape.dims(), &strides);
        let n = self.u32("the number of elements", shape.n_elements())?;
        let mut map = Map { rank: runs.len() as u32, n, ..Map::zeroed() };
        for (axis, (n, strides)) in runs.iter().enumerate() {
            map.dims[axis] = self.u32("a dimension", *n)?;
            for (operand, stride) in strides.iter().enumerate() {
                map.strides[operand][axis] = self.u32("a stride", *stride)?;
            }
        }
        layouts.iter().try_for_each(|l| self.u32("the extent", l.end()).map(|_| ()))?;
        let inner_is_whole = runs.len() < 2 || runs.last().is_some_and(|(n, _)| n.is_multiple_of(LANES));
        let is_wide = |(operand, view): (usize, &BufView)| {
            let strides = || runs.iter().rev().map(move |(_, strides)| strides[operand]);
            let start = view.buf.offset() + (view.layout.offset() * view.dtype.block_bytes()) as u64;
            match strides().next() {
                None | Some(0) => true,
                Some(1) => {
                    start.is_multiple_of(16) && strides().skip(1).all(|stride| stride.is_multiple_of(LANES))
                }
                Some(_) => false,
            }
        };
        map.wide = u32::from(inner_is_whole && views.iter().enumerate().all(is_wide));
        Ok(map)
    }
}

/// In the order of the kernels' function codes.
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
const GATES: [Gate; 2] = [Gate::Silu, Gate::GeluTanh];
const COMPARISONS: [Compare; 2] = [Compare::Equal, Compare::Less];

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const PARAMS: [usize; 9] = [P, P, P, P, P, size_of::<Map>(), W, W, W];
    type Meaning = fn(&SimKernel<'_>) -> KernelResult<(Op, [usize; 2])>;
    let kernels: [(&str, &str, Meaning); 9] = [
        ("unary", "map_unary", |k| Ok((Op::Unary(unary(k)?), [1, 1]))),
        ("binary", "map_binary", |k| Ok((Op::Binary(chosen(k, &BINARY)?), [2, 1]))),
        ("binary", "map_gate", |k| Ok((Op::Gate(chosen(k, &GATES)?), [2, 1]))),
        ("other", "map_compare", |k| Ok((Op::Compare(chosen(k, &COMPARISONS)?), [2, 1]))),
        ("other", "map_select", |_| Ok((Op::Select, [3, 1]))),
        ("other", "map_cast", |k| Ok((Op::Cast(k.arg::<Map>(5)?.dtype(0)?), [1, 1]))),
        ("unary_grad", "map_unary_grad", |k| Ok((Op::Train(TrainOp::UnaryGrad(unary(k)?)), [2, 1]))),
        ("gate_grad", "map_gate_grad", |k| Ok((Op::Train(TrainOp::GateGrad(chosen(k, &GATES)?)), [3, 2]))),
        ("other", "map_dropout", |k| {
            let dropout = Dropout { p: k.arg(7)?, site: k.arg(6)? };
            Ok((Op::Train(TrainOp::Dropout(dropout)), [1, 1]))
        }),
    ];
    for (_, name, meaning) in kernels {
        for dtype in ROWS_TYPES.iter().filter(|_| ["map_binary", "map_gate", "map_gate_grad"].contains(&name))
        {
            let name = named(&format!("{name}_rows"), *dtype);
            let entry = KernelEntry::new(KernelFamily::Map, name, &PARAMS, move |k| twin(k, meaning(k)?));
            all.push(entry.unit(&named("rows", *dtype)));
        }
    }
    for (unit, name, meaning) in kernels {
        all.push(
            KernelEntry::new(KernelFamily::Map, name, &PARAMS, move |k| twin(k, meaning(k)?)).unit(unit),
        );
    }
}

fn chosen<T: Copy>(k: &SimKernel<'_>, all: &[T]) -> KernelResult<T> {
    let f = k.arg::<u32>(6)?;
    all.get(f as usize).copied().ok_or_else(|| fault(format!("no function has code {f}")))
}

fn unary(k: &SimKernel<'_>) -> KernelResult<Unary> {
    Ok(match chosen(k, &UNARY)? {
        Unary::Affine { .. } => Unary::Affine { mul: k.arg(7)?, add: k.arg(8)? },
        Unary::SoftCap(_) => Unary::SoftCap(k.arg(7)?),
        f @ (Unary::Neg
        | Unary::Exp
        | Unary::Log
        | Unary::Rsqrt
        | Unary::Tanh
        | Unary::Sigmoid
        | Unary::Silu
        | Unary::GeluTanh
        | Unary::GeluErf) => f,
    })
}

fn twin(k: &mut SimKernel<'_>, (op, [n_in, n_out]): (Op, [usize; 2])) -> KernelResult {
    let map = k.arg::<Map>(5)?;
    let dims = [map.n as usize];
    let mut inputs = Vec::new();
    for operand in 0..n_in {
        let indices = (0..dims[0]).map(|i| map.at(operand, i));
        inputs.push(Typed::walked(k, k.ptr(2 + operand)?, map.dtype(operand + 1)?, indices, &dims)?);
    }
    if matches!(op, Op::Train(TrainOp::Dropout(_))) {
        inputs.push(Typed::read(k, k.ptr(4)?, DType::U32, &[4])?);
    }
    let outputs = vec![(map.dtype(0)?, &dims[..]); n_out];
    let results = run_typed(&op, &inputs.iter().collect::<Vec<_>>(), &outputs)?;
    results.iter().enumerate().try_for_each(|(i, bytes)| k.write(k.ptr(i)?, bytes))
}
