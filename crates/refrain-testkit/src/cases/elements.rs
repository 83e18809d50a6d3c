//! Cases of views, copies, casts, host calls, and unary and binary elementwise functions.

use super::{FLOATS, quantised};
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{Binary, Gate, HostBuf, HostCall, HostCallError, HostFn, Op, TensorType, Unary, View};
use refrain_tensor::{DType, Shape};
use std::sync::Arc;

pub(super) fn moves() -> Vec<Case> {
    let mut cases = views();
    for dtype in FLOATS {
        for dims in [[1, 1, 1], [3, 5, 7], [2, 1, 129]] {
            let transposed = Arg::float(dtype, dims).view(View::Permute(vec![2, 0, 1]));
            cases.push(Case::one_node(
                format!("{dtype} permuted {dims:?}"),
                Op::Copy,
                Tol::Bits,
                vec![transposed],
            ));
        }
        for to in FLOATS {
            let name = format!("{dtype} to {to}, all magnitudes");
            let x = Arg::float(dtype, [5, 67]).fill(Fill::Wild);
            cases.push(Case::one_node(name, Op::Cast(to), Tol::Bits, vec![x]));
        }
    }
    for dtype in quantised() {
        let d = dtype.block_len();
        let swapped = Arg::weight(dtype, [3, 2, d]).view(View::Permute(vec![1, 0, 2]));
        cases.push(Case::one_node(
            format!("{dtype} outer dimensions swapped"),
            Op::Copy,
            Tol::Bits,
            vec![swapped],
        ));
        let sliced = Arg::weight(dtype, [3, 3 * d]).view(View::Slice { axis: 1, start: d, len: d });
        cases.push(Case::one_node(
            format!("{dtype} middle block of each row"),
            Op::Copy,
            Tol::Bits,
            vec![sliced],
        ));
        let transposed = Arg::weight(dtype, [3, d]).view(View::Permute(vec![1, 0]));
        let name = format!("{dtype} transposed, to F32");
        cases.push(Case::one_node(name, Op::Cast(DType::F32), Tol::Bits, vec![transposed]));
    }
    // Whole weights, as decoded in training steps, and rows that do not fill a tile.
    for dtype in quantised() {
        for to in FLOATS {
            let whole = Arg::weight(dtype, [19, 2 * dtype.block_len()]);
            let name = format!("{dtype} whole, to {to}");
            cases.push(Case::one_node(name, Op::Cast(to), Tol::Bits, vec![whole]));
        }
    }
    let ids = Arg::ints([3, 4], (0..12).collect()).view(View::Permute(vec![1, 0]));
    cases.push(Case::one_node("I32 transposed", Op::Copy, Tol::Bits, vec![ids]));
    let args = vec![Arg::float(DType::F32, [3, 5]).view(View::Permute(vec![1, 0]))];
    cases.push(Case::one_node("transposed input", Op::HostCall(half_plus_one()), Tol::Bits, args));
    cases
}

/// Views as outputs: results read after the step are contiguous, whatever the layout.
fn views() -> Vec<Case> {
    let x = || Arg::float(DType::F32, [4, 6]);
    let all = [
        ("to another rank", View::Reshape(Shape::from([2, 2, 3, 2]))),
        ("transposed", View::Permute(vec![1, 0])),
        ("inner columns", View::Slice { axis: 1, start: 2, len: 3 }),
        ("no rows", View::Slice { axis: 0, start: 4, len: 0 }),
        ("repeated", View::Broadcast(Shape::from([3, 4, 6]))),
    ];
    all.into_iter().map(|(name, view)| Case::one_node(name, Op::View(view), Tol::Bits, vec![x()])).collect()
}

pub(super) fn functions() -> Vec<Case> {
    let mut cases = Vec::new();
    let odd = [[1, 1], [7, 129], [2, 4096]];
    for dtype in FLOATS {
        for (f, fill) in unary_functions() {
            let tol = Tol::Whole(2e-6).rounded_to(dtype);
            for dims in odd {
                let x = Arg::float(dtype, dims).fill(fill.clone());
                cases.push(Case::one_node(format!("{dtype} {dims:?}"), Op::Unary(f), tol, vec![x]));
            }
            let x = Arg::float(dtype, [6, 5]).fill(fill).view(View::Permute(vec![1, 0]));
            cases.push(Case::one_node(format!("{dtype} transposed"), Op::Unary(f), tol, vec![x]));
        }
        for f in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max] {
            cases.extend(binary(f, dtype));
        }
        for kind in [Gate::Silu, Gate::GeluTanh] {
            for dims in odd {
                let args =
                    vec![Arg::float(dtype, dims).fill(Fill::Uniform(-8.0, 8.0)), Arg::float(dtype, dims)];
                let tol = Tol::Whole(2e-6).rounded_to(dtype);
                cases.push(Case::one_node(format!("{dtype} {dims:?}"), Op::Gate(kind), tol, args));
            }
            // The two halves of one projection, as fused gate and up weights produce them.
            let half = |start| Arg::float(dtype, [3, 66]).view(View::Slice { axis: 1, start, len: 33 });
            let tol = Tol::Whole(2e-6).rounded_to(dtype);
            cases.push(Case::one_node(
                format!("{dtype} sliced"),
                Op::Gate(kind),
                tol,
                vec![half(0), half(33)],
            ));
        }
    }
    let far = Arg::float(DType::F32, [8])
        .fill(Fill::Floats(vec![-1e30, -200.0, -89.0, -0.0, 0.0, 89.0, 200.0, 1e30]));
    for f in [
        Unary::Sigmoid,
        Unary::Silu,
        Unary::GeluTanh,
        Unary::GeluErf,
        Unary::Tanh,
        Unary::Exp,
        Unary::SoftCap(30.0),
    ] {
        cases.push(Case::one_node("far out", Op::Unary(f), Tol::Each(1e-5), vec![far.clone()]));
    }
    cases
}

fn unary_functions() -> [(Unary, Fill); 11] {
    let around_zero = || Fill::Uniform(-6.0, 6.0);
    [
        (Unary::Neg, Fill::Wild),
        (Unary::Exp, around_zero()),
        (Unary::Log, Fill::Uniform(0.01, 100.0)),
        (Unary::Rsqrt, Fill::Uniform(0.01, 100.0)),
        (Unary::Tanh, around_zero()),
        (Unary::Sigmoid, around_zero()),
        (Unary::Silu, around_zero()),
        (Unary::GeluTanh, around_zero()),
        (Unary::GeluErf, around_zero()),
        (Unary::Affine { mul: -1.5, add: 0.25 }, Fill::Wild),
        (Unary::SoftCap(30.0), Fill::Uniform(-100.0, 100.0)),
    ]
}

fn binary(f: Binary, dtype: DType) -> Vec<Case> {
    let tol = Tol::Each(2e-7).rounded_to(dtype);
    // Away from zero, because of the division.
    let arg = |dims: &[usize]| {
        let shape = Shape::new(dims).unwrap_or_else(|e| panic!("{e}"));
        Arg::float(dtype, shape).fill(Fill::Uniform(0.5, 3.0))
    };
    let case = |name: &str, args| Case::one_node(format!("{dtype} {name}"), Op::Binary(f), tol, args);
    vec![
        case("one element", vec![arg(&[1]), arg(&[1])]),
        case("odd", vec![arg(&[7, 129]), arg(&[7, 129])]),
        case("row on rows", vec![arg(&[5, 33]), arg(&[33])]),
        case("column on rows", vec![arg(&[7, 129]), arg(&[7, 1])]),
        case("column on rows of heads", vec![arg(&[2, 3, 33]), arg(&[2, 3, 1])]),
        case("column on columns", vec![arg(&[5, 1]), arg(&[5, 33])]),
        case("column on a square", vec![arg(&[4, 4]), arg(&[4, 1])]),
        case("column on squares", vec![arg(&[2, 4, 4]), arg(&[4, 1])]),
        case("both broadcast", vec![arg(&[3, 1, 4]), arg(&[1, 5, 1])]),
        case("scalar on the left", vec![arg(&[]), arg(&[3, 3])]),
        case("transposed on the right", vec![arg(&[4, 9]), arg(&[9, 4]).view(View::Permute(vec![1, 0]))]),
        case(
            "inner columns",
            vec![arg(&[4, 9]).view(View::Slice { axis: 1, start: 3, len: 5 }), arg(&[4, 5])],
        ),
    ]
}

/// Host function for tests: `x / 2 + 1` in F32.
pub(crate) fn half_plus_one() -> HostCall {
    struct HalfPlusOne;
    impl HostFn for HalfPlusOne {
        fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
            match inputs {
                [x] if x.dtype == DType::F32 => Ok(vec![*x]),
                _ => Err(HostCallError(format!("needs one F32 input, got {inputs:?}"))),
            }
        }
        fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
            let (from, to) = (inputs[0].bytes.as_chunks::<4>().0, outputs[0].as_chunks_mut::<4>().0);
            for (from, to) in from.iter().zip(to) {
                *to = (f32::from_le_bytes(*from) / 2.0 + 1.0).to_le_bytes();
            }
            Ok(())
        }
    }
    HostCall {
        name: "half_plus_one",
        because: "it runs on the host by definition",
        function: Arc::new(HalfPlusOne),
    }
}
