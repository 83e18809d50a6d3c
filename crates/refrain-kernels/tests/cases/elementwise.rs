//! Cases of elementwise functions, gates, copies, casts and reductions.

use refrain_graph::{Binary, Gate, Op, Reduce, TensorType, Unary};
use refrain_kernels::{
    BinaryArgs, BufView, CastArgs, CopyArgs, GateArgs, ReduceArgs, SoftmaxArgs, UnaryArgs,
};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, dense, f32s, normals, reference, reference_f32, shape};

/// A few roundings per element.
const EACH: Tol = Tol::Each(2e-6);
/// For functions that cancel near zero.
const FUNCTION: Tol = Tol::Whole(2e-6);

/// Contiguous, permuted, sliced and repeated views of a 2 x 3 x 40 tensor.
fn views() -> Vec<(&'static str, Layout)> {
    let all = contiguous(&[2, 3, 40]);
    vec![
        ("dense", all),
        ("permuted", all.permute(&[2, 0, 1]).unwrap()),
        ("sliced", all.slice(2, 3, 17).unwrap().slice(1, 1, 2).unwrap()),
        ("repeated", all.slice(1, 2, 1).unwrap().broadcast_to(shape(&[2, 5, 40])).unwrap()),
        ("one", all.slice(0, 1, 1).unwrap().slice(1, 1, 1).unwrap().slice(2, 39, 1).unwrap()),
    ]
}

pub fn unary() -> Vec<Case> {
    let functions = [
        Unary::Neg,
        Unary::Exp,
        Unary::Log,
        Unary::Rsqrt,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Silu,
        Unary::GeluTanh,
        Unary::GeluErf,
        Unary::Affine { mul: -1.5, add: 0.25 },
        Unary::SoftCap(3.0),
    ];
    let mut cases: Vec<Case> =
        functions.iter().map(|&f| unary_case(f, "dense", contiguous(&[3, 333]))).collect();
    cases.extend(views().into_iter().map(|(name, layout)| unary_case(Unary::Silu, name, layout)));
    cases.push(far_left(Unary::Silu, &[-5.0, -20.0, -50.0, -80.0, 0.0, 40.0, 200.0]));
    cases.push(far_left(Unary::GeluTanh, &[-1.0, -3.0, -5.0, -5.6, 0.0, 6.0, 30.0]));
    cases.push(far_left(Unary::GeluErf, &[-1.0, -3.0, -5.0, -8.0, 0.0, 6.0, 30.0]));
    cases
}

/// The far left of a sigmoid: tiny but accurate, and zero only where an f32 must be.
fn far_left(f: Unary, x: &[f32]) -> Case {
    let n = x.len();
    let x = f32s(x);
    let y = reference_f32(&Op::Unary(f), &[Operand(DType::F32, contiguous(&[n]), &x)], &[n]);
    // The exponential amplifies the relative error of its argument by the argument.
    let tol = Tol::Each(3e-5);
    Case::new(
        format!("{} far left", f.name()),
        vec![Role::Out(y, tol), Role::In(x)],
        move |kernels, b, out| {
            out.push(kernels.unary(&UnaryArgs { f, x: dense(b[1], &[n]), y: b[0], step: "case" })?);
            Ok(())
        },
    )
}

fn unary_case(f: Unary, name: &str, layout: Layout) -> Case {
    let positive = matches!(f, Unary::Log | Unary::Rsqrt);
    let x = normals(layout.end().max(240), 1)
        .into_iter()
        .map(|v| if positive { v.abs() + 0.01 } else { 3.0 * v });
    let x = f32s(&x.collect::<Vec<_>>());
    let y = reference_f32(&Op::Unary(f), &[Operand(DType::F32, layout, &x)], layout.shape().dims());
    Case::new(
        format!("{} {name}", f.name()),
        vec![Role::Out(y, FUNCTION), Role::In(x)],
        move |kernels, b, out| {
            let x = BufView { buf: b[1], dtype: DType::F32, layout };
            out.push(kernels.unary(&UnaryArgs { f, x, y: b[0], step: "case" })?);
            Ok(())
        },
    )
}

pub fn binary() -> Vec<Case> {
    let mut cases = Vec::new();
    let row = contiguous(&[40]);
    for f in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max] {
        cases.push(binary_case(f, "dense", contiguous(&[2, 3, 40]), contiguous(&[2, 3, 40])));
        cases.push(binary_case(f, "with a row", contiguous(&[2, 3, 40]), row));
    }
    for (name, layout) in views() {
        let other = contiguous(layout.shape().dims());
        cases.push(binary_case(Binary::Add, name, layout, other));
        cases.push(binary_case(Binary::Sub, name, other, layout));
    }
    let outer = contiguous(&[1, 5, 1, 4, 1, 3]);
    cases.push(binary_case(Binary::Mul, "six dimensions", contiguous(&[2, 1, 3, 1, 2, 1]), outer));
    cases
}

fn binary_case(f: Binary, name: &str, a: Layout, b: Layout) -> Case {
    let result = a.shape().broadcast(&b.shape()).unwrap();
    let (left, right) = (f32s(&normals(a.end().max(240), 2)), f32s(&normals(b.end().max(240), 3)));
    let inputs = [Operand(DType::F32, a, &left), Operand(DType::F32, b, &right)];
    let y = reference_f32(&Op::Binary(f), &inputs, result.dims());
    Case::new(
        format!("{} {name}", f.name()),
        vec![Role::Out(y, Tol::Bits), Role::In(left), Role::In(right)],
        move |kernels, bufs, out| {
            let view = |i: usize, layout| BufView { buf: bufs[i], dtype: DType::F32, layout };
            let args =
                BinaryArgs { f, a: view(1, a), b: view(2, b), y: bufs[0], shape: result, step: "case" };
            out.push(kernels.binary(&args)?);
            Ok(())
        },
    )
}

pub fn gate() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [Gate::Silu, Gate::GeluTanh] {
        // Two contiguous tensors, and the two halves of a fused row.
        for fused in [false, true] {
            let (n_rows, n_cols) = (3, 333);
            let all = contiguous(&[n_rows, 2 * n_cols]);
            let [gate, up] = match fused {
                true => [all.slice(1, 0, n_cols).unwrap(), all.slice(1, n_cols, n_cols).unwrap()],
                false => [contiguous(&[n_rows, n_cols]); 2],
            };
            let (x, z) = (f32s(&normals(n_rows * 2 * n_cols, 4)), f32s(&normals(n_rows * 2 * n_cols, 5)));
            let second = if fused { &x } else { &z };
            let inputs = [Operand(DType::F32, gate, &x), Operand(DType::F32, up, second)];
            let y = reference_f32(&Op::Gate(kind), &inputs, &[n_rows, n_cols]);
            cases.push(Case::new(
                format!("gate {kind:?} fused={fused}"),
                vec![Role::Out(y, FUNCTION), Role::In(x), Role::In(z)],
                move |kernels, b, out| {
                    let view = |i: usize, layout| BufView { buf: b[i], dtype: DType::F32, layout };
                    let (gate, up) = (view(1, gate), view(if fused { 1 } else { 2 }, up));
                    out.push(kernels.gate(&GateArgs {
                        kind,
                        gate,
                        up,
                        y: b[0],
                        n_rows,
                        n_cols,
                        step: "case",
                    })?);
                    Ok(())
                },
            ));
        }
    }
    cases
}

pub fn copies() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, layout) in views() {
        for dtype in [DType::U8, DType::F16, DType::BF16, DType::I32, DType::F32] {
            let x: Vec<u8> = (0..240 * dtype.block_bytes()).map(|i| (i * 37 % 251) as u8).collect();
            let n = layout.shape().n_elements() * dtype.block_bytes();
            let mut outputs = [(TensorType { dtype, shape: layout.shape() }, vec![0; n])];
            reference(&Op::Copy, &[Operand(dtype, layout, &x)], &mut outputs);
            let [(_, y)] = outputs;
            cases.push(Case::new(
                format!("copy {dtype} {name}"),
                vec![Role::Exact(y), Role::In(x)],
                move |kernels, b, out| {
                    let x = BufView { buf: b[1], dtype, layout };
                    out.push(kernels.copy(&CopyArgs { x, y: b[0], step: "case" })?);
                    Ok(())
                },
            ));
        }
        for from in FLOATS {
            cases.extend(FLOATS.map(|to| cast_case(from, to, name, layout)));
        }
    }
    cases
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn cast_case(from: DType, to: DType, name: &str, layout: Layout) -> Case {
    let mut values = normals(240, 6);
    // Ties, numbers too small and too large for f16, and both zeros.
    let special = [1.000_488_3, 1.003_906_2, 1e-8, -3e-6, 0.0, -0.0, 65_519.0, 65_505.0];
    values[..8].copy_from_slice(&special);
    values[100..108].copy_from_slice(&special);
    let x = encode(from, &values);
    let n = layout.shape().n_elements() * to.block_bytes();
    let mut outputs = [(TensorType { dtype: to, shape: layout.shape() }, vec![0; n])];
    reference(&Op::Cast(to), &[Operand(from, layout, &x)], &mut outputs);
    let [(_, y)] = outputs;
    Case::new(
        format!("cast {from} to {to} {name}"),
        vec![Role::Exact(y), Role::In(x)],
        move |kernels, b, out| {
            let x = BufView { buf: b[1], dtype: from, layout };
            out.push(kernels.cast(&CastArgs { x, y: b[0], to, step: "case" })?);
            Ok(())
        },
    )
}

pub fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for [n_rows, n_cols] in [[1, 1], [5, 31], [3, 1000], [2, 257]] {
        let x = f32s(&normals(n_rows * n_cols, 7));
        let operand = || Operand(DType::F32, contiguous(&[n_rows, n_cols]), &x);
        for kind in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
            let y = reference_f32(&Op::Reduce { kind, axis: 1 }, &[operand()], &[n_rows, 1]);
            let tol = if kind == Reduce::Max { Tol::Bits } else { Tol::Whole(1e-5) };
            cases.push(Case::new(
                format!("reduce {kind:?} {n_rows}x{n_cols}"),
                vec![Role::Out(y, tol), Role::In(x.clone())],
                move |kernels, b, out| {
                    let x = dense(b[1], &[n_rows, n_cols]);
                    out.push(kernels.reduce(&ReduceArgs {
                        kind,
                        x,
                        y: b[0],
                        n_rows,
                        n_cols,
                        step: "case",
                    })?);
                    Ok(())
                },
            ));
        }
        let y = reference_f32(&Op::Softmax, &[operand()], &[n_rows, n_cols]);
        cases.push(Case::new(
            format!("softmax {n_rows}x{n_cols}"),
            vec![Role::InOut { before: x.clone(), after: f32s(&y), dtype: DType::F32, tol: EACH }],
            move |kernels, b, out| {
                let x = dense(b[0], &[n_rows, n_cols]);
                out.push(kernels.softmax(&SoftmaxArgs { x, y: b[0], n_rows, n_cols, step: "case" })?);
                Ok(())
            },
        ));
    }
    cases
}
