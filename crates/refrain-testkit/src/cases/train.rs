//! Cases of backward passes: reductions along any dimension, scatters, comparisons, attention among rows,
//! gradients, loss and optimiser.

use super::FLOATS;
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{
    ADAM_PARAMS, AdamW, Compare, Dropout, Gate, GraphBuilder, GraphError, Op, Reduce, Rope, RopeStyle,
    SpanAttention, TrainOp, Unary, ValueId,
};
use refrain_tensor::DType;

/// All cases whose op a training step needs.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        cases.extend(reductions(dtype));
        cases.extend(moves(dtype));
        cases.extend(element_gradients(dtype));
        cases.extend(row_gradients(dtype));
        cases.extend(products(dtype));
        cases.extend(losses(dtype));
        cases.extend(dropout(dtype));
        cases.extend(optimiser(dtype));
    }
    for dtype in [DType::F32, DType::BF16] {
        cases.extend(attention(dtype));
    }
    cases.extend(integers());
    cases
}

/// Builds a case of one node. Float inputs are F32 and first rounded to `dtype`, as results of other nodes
/// would be.
fn case(name: impl Into<String>, op: Op, dtype: DType, tol: Tol, args: Vec<Arg>) -> Case {
    let (node, label) = (op.clone(), op.name());
    Case::build(name, op, tol, args, move |b, values| {
        let values = rounded(b, values, dtype)?;
        b.node(node, &values, label)
    })
}

/// Rounds F32 inputs with more than one element to `dtype`.
fn rounded(b: &mut GraphBuilder, values: &[ValueId], dtype: DType) -> Result<Vec<ValueId>, GraphError> {
    let round = |&value: &ValueId| match b.ty(value).dtype == DType::F32 && dtype != DType::F32 {
        true => b.cast(value, dtype),
        false => Ok(value),
    };
    values.iter().map(round).collect()
}

fn float(dims: &[usize]) -> Arg {
    Arg::float(DType::F32, shape(dims))
}

fn shape(dims: &[usize]) -> refrain_tensor::Shape {
    refrain_tensor::Shape::new(dims).unwrap_or_else(|e| panic!("{e}"))
}

fn reductions(dtype: DType) -> Vec<Case> {
    let tol = Tol::Whole(3e-6).rounded_to(dtype);
    let mut cases = Vec::new();
    for (dims, axis) in
        [(&[7, 129][..], 0), (&[300, 33], 0), (&[5, 3, 17], 1), (&[2, 3, 4, 5], 0), (&[1, 1], 0)]
    {
        for kind in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
            let name = format!("{dtype} {dims:?} along {axis}");
            cases.push(case(name, Op::Reduce { kind, axis }, dtype, tol, vec![float(dims)]));
        }
    }
    cases
}

fn moves(dtype: DType) -> Vec<Case> {
    let ids = |n: usize, below| Arg::ints(shape(&[n]), vec![]).fill(Fill::Ids { below, gaps: true });
    let sums = Tol::Whole(2e-6).rounded_to(dtype);
    let mut cases = vec![
        case(format!("{dtype}"), Op::Pick, dtype, Tol::Bits, vec![float(&[9, 13]), ids(9, 13)]),
        case(
            format!("{dtype}"),
            Op::PlaceColumns { width: 13 },
            dtype,
            Tol::Bits,
            vec![ids(9, 13), float(&[9, 1])],
        ),
    ];
    for (dims, axis, before, after) in [(&[5, 7][..], 1, 2, 3), (&[5, 7], 0, 1, 0), (&[3, 4, 5], 1, 0, 9)] {
        let name = format!("{dtype} {dims:?} along {axis}");
        cases.push(case(name, Op::Pad { axis, before, after }, dtype, Tol::Bits, vec![float(dims)]));
    }
    // Many rows with one id, few with others; more rows than ids, and fewer.
    for (n, n_rows, d) in [(1, 1, 1), (40, 5, 33), (9, 300, 64), (257, 64, 129)] {
        let name = format!("{dtype} {n} rows into {n_rows} of {d}");
        let op = Op::ScatterAddRows { n_rows };
        cases.push(case(name, op, dtype, sums, vec![ids(n, n_rows), float(&[n, d])]));
    }
    for kind in [Compare::Equal, Compare::Less] {
        let wild = |dims: &[usize]| float(dims).fill(Fill::Wild);
        let name = format!("{dtype}, broadcast");
        cases.push(case(name, Op::Compare(kind), dtype, Tol::Bits, vec![wild(&[6, 33]), wild(&[33])]));
    }
    let mask = || Arg::ints(shape(&[6, 1]), vec![0, 1, -1, 0, 5, 1]);
    cases.push(case(
        format!("{dtype}, broadcast"),
        Op::Select,
        dtype,
        Tol::Bits,
        vec![mask(), float(&[6, 33]), float(&[33])],
    ));
    cases
}

fn element_gradients(dtype: DType) -> Vec<Case> {
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
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
        Unary::SoftCap(2.0),
    ];
    let mut cases = Vec::new();
    for f in functions {
        let positive = matches!(f, Unary::Log | Unary::Rsqrt);
        let fill = if positive { Fill::Uniform(0.25, 4.0) } else { Fill::Normal };
        let args = vec![float(&[7, 33]), float(&[7, 33]).fill(fill)];
        cases.push(case(format!("{dtype} {}", f.name()), Op::Train(TrainOp::UnaryGrad(f)), dtype, tol, args));
    }
    for kind in [Gate::Silu, Gate::GeluTanh] {
        for dims in [[1, 1], [5, 129], [3, 256]] {
            let args = vec![float(&dims), float(&dims), float(&dims)];
            let name = format!("{dtype} {kind:?} {dims:?}");
            cases.push(case(name, Op::Train(TrainOp::GateGrad(kind)), dtype, tol, args));
        }
    }
    cases
}

fn row_gradients(dtype: DType) -> Vec<Case> {
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
    let mut cases = Vec::new();
    // The gradient of a one-element norm is almost zero: a difference that cancels.
    for dims in [&[1, 3][..], &[7, 129], &[70, 768], &[5, 3, 64]] {
        let d = dims[dims.len() - 1];
        let args = [float(dims), float(dims), float(&[d]).fill(Fill::Uniform(0.5, 1.5))];
        for adds in [false, true] {
            let op = Op::Train(TrainOp::RmsNormGrad { eps: 1e-5, adds });
            let name = format!("{dtype} {dims:?}{}", if adds { " and more" } else { "" });
            let more = adds.then(|| float(dims));
            let args = args.iter().cloned().chain(more).collect();
            cases.push(case(name, op, dtype, tol, args));
        }
        let args = vec![float(dims), float(dims).fill(Fill::Uniform(0.0, 1.0))];
        cases.push(case(format!("{dtype} {dims:?}"), Op::Train(TrainOp::SoftmaxGrad), dtype, tol, args));
    }
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        let op = Op::Train(TrainOp::RopeGrad(Rope { style, n_dims: 6, magnitude: 1.25 }));
        let positions = Arg::ints(shape(&[4]), vec![0, 3, -1, 1000]);
        let frequencies = Arg::weight(DType::F32, shape(&[3])).fill(Fill::Floats(vec![1.0, 0.1, 0.01]));
        let args = vec![float(&[4, 3, 8]), positions, frequencies];
        let round = move |b: &mut GraphBuilder, v: &[ValueId]| {
            let dy = rounded(b, &v[..1], dtype)?[0];
            b.node(op.clone(), &[dy, v[1], v[2]], "rope_grad")
        };
        let op = Op::Train(TrainOp::RopeGrad(Rope { style, n_dims: 6, magnitude: 1.25 }));
        cases.push(Case::build(format!("{dtype} {style:?}"), op, tol, args, round));
    }
    cases
}

/// Matrix products of values, none of them a weight, in every layout of a backward pass.
fn products(dtype: DType) -> Vec<Case> {
    let tol = Tol::Whole(1e-5).rounded_to(dtype);
    let mut cases = Vec::new();
    for (m, k, n) in [(1, 1, 1), (5, 33, 7), (64, 48, 80), (130, 65, 129)] {
        for (name, a, b) in
            [("NN", [m, k], [k, n]), ("NT", [m, k], [n, k]), ("TN", [k, m], [k, n]), ("TT", [k, m], [n, k])]
        {
            let args = vec![float(&a), float(&b)];
            let product = move |builder: &mut GraphBuilder, v: &[ValueId]| {
                let v = rounded(builder, v, dtype)?;
                let mut turned = |value, turn: bool| match turn {
                    true => builder.permute(value, &[1, 0]),
                    false => Ok(value),
                };
                let (left, right) = (turned(v[0], a != [m, k])?, turned(v[1], b != [k, n])?);
                builder.node(Op::MatMul, &[left, right], "matmul")
            };
            cases.push(Case::build(
                format!("{dtype} {name} {m} x {k} x {n}"),
                Op::MatMul,
                tol,
                args,
                product,
            ));
        }
    }
    let args = vec![float(&[3, 5, 7]), float(&[3, 7, 9])];
    cases.push(case(format!("{dtype} batched"), Op::MatMul, dtype, tol, args));
    for (m, k, n) in [(1, 1, 1), (5, 33, 7), (64, 48, 80), (130, 64, 128)] {
        let args = vec![float(&[m, n]), float(&[m, k]), float(&[k, n])];
        let op = || Op::Train(TrainOp::AddProduct);
        cases.push(case(format!("{dtype} {m} x {k} x {n}"), op(), dtype, tol, args));
        let args = vec![float(&[m, n]), float(&[k, m]), float(&[n, k])];
        let turned = move |builder: &mut GraphBuilder, v: &[ValueId]| {
            let v = rounded(builder, v, dtype)?;
            let (a, b) = (builder.permute(v[1], &[1, 0])?, builder.permute(v[2], &[1, 0])?);
            builder.node(Op::Train(TrainOp::AddProduct), &[v[0], a, b], "add_product")
        };
        cases.push(Case::build(format!("{dtype} TT {m} x {k} x {n}"), op(), tol, args, turned));
    }
    cases
}

fn losses(dtype: DType) -> Vec<Case> {
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
    let op = || Op::Train(TrainOp::CrossEntropy);
    let mut cases = Vec::new();
    for (n, vocab, fill) in [
        (1, 1, Fill::Normal),
        (7, 33, Fill::Normal),
        (5, 4099, Fill::Uniform(-30.0, 30.0)),
        (3, 1000, Fill::Outliers),
    ] {
        let targets = Arg::ints(shape(&[n]), vec![]).fill(Fill::Ids { below: vocab, gaps: true });
        let scale = Arg::float(DType::F32, [1]).fill(Fill::Floats(vec![0.125]));
        let args = vec![float(&[n, vocab]).fill(fill), targets, scale];
        let build = move |b: &mut GraphBuilder, v: &[ValueId]| {
            let logits = rounded(b, &v[..1], dtype)?[0];
            b.node(Op::Train(TrainOp::CrossEntropy), &[logits, v[1], v[2]], "cross_entropy")
        };
        cases.push(Case::build(format!("{dtype} {n} x {vocab}"), op(), tol, args, build));
    }
    cases
}

fn dropout(dtype: DType) -> Vec<Case> {
    let tol = Tol::Each(1e-6).rounded_to(dtype);
    let rng = || Arg::ints(shape(&[4]), vec![17, 3, 1_000_000, 0]).dtype(DType::U32);
    let of = |p: f32, dims: &[usize]| {
        let op = Op::Train(TrainOp::Dropout(Dropout { p, site: 5 }));
        case(format!("{dtype} {p} {dims:?}"), op, dtype, tol, vec![float(dims), rng()])
    };
    vec![of(0.0, &[3, 5]), of(0.1, &[7, 33]), of(0.75, &[1030])]
}

fn optimiser(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let squares = |dims: Vec<Vec<usize>>| {
        let args = dims.iter().map(|dims| float(dims)).collect();
        let name = format!("{dtype} {dims:?}");
        case(name, Op::Train(TrainOp::SumSquares), dtype, Tol::Each(2e-6), args)
    };
    cases.push(squares(vec![vec![1]]));
    cases.push(squares(vec![vec![7, 129], vec![3], vec![5, 1, 17], vec![40_000]]));
    let shapes = [vec![7, 33], vec![5], vec![1025]];
    for masters in [false, true] {
        for clears in [false, true] {
            // A 16-bit master weight is a contradiction, and so is a 16-bit accumulator.
            if (masters && dtype == DType::F32) || (clears && !masters && dtype != DType::F32) {
                continue;
            }
            for (norm, count) in [(0.5, "small"), (40.0, "clipped"), (f32::INFINITY, "not finite")] {
                let adam = AdamW { decays: vec![true, false, true].into(), masters, clears };
                let mut args = vec![
                    Arg::state(DType::I32, [1]),
                    Arg::float(DType::F32, [ADAM_PARAMS]).fill(Fill::Floats(adam_params())),
                    Arg::float(DType::F32, [1]).fill(Fill::Floats(vec![norm * norm])),
                ];
                for dims in &shapes {
                    let moment = if masters { DType::F32 } else { dtype };
                    args.push(match clears {
                        true => Arg::state(DType::F32, shape(dims)),
                        false => float(dims),
                    });
                    args.push(Arg::state(dtype, shape(dims)));
                    args.extend(masters.then(|| Arg::state(DType::F32, shape(dims))));
                    args.extend([Arg::state(moment, shape(dims)), Arg::state(moment, shape(dims))]);
                }
                let name = format!("{dtype}, masters {masters}, accumulators {clears}, {count}");
                let op = Op::Train(TrainOp::AdamW(adam));
                let node = op.clone();
                let build = move |b: &mut GraphBuilder, values: &[ValueId]| {
                    let mut values = values.to_vec();
                    for value in &mut values[3..] {
                        let is_gradient = b.ty(*value).dtype == DType::F32 && !clears;
                        if is_gradient && dtype != DType::F32 && b.is_input(*value) {
                            *value = b.cast(*value, dtype)?;
                        }
                    }
                    b.node(node.clone(), &values, "adamw")
                };
                // All states are initially zero, so a second step follows that starts from the first one's
                // results.
                cases.push(Case::build(name, op, Tol::Each(3e-6).rounded_to(dtype), args, build));
            }
        }
    }
    cases
}

fn adam_params() -> Vec<f32> {
    let (beta1, beta2) = (0.9f64, 0.95f64);
    [1e-2, beta1, 1.0 - beta1, beta1.ln(), beta2, 1.0 - beta2, beta2.ln(), 1e-8, 0.1, 1.0]
        .map(|v| v as f32)
        .to_vec()
}

fn attention(dtype: DType) -> Vec<Case> {
    let plain = SpanAttention { scale: 0.25, causal: true, window: None, softcap: None };
    let spans = |lengths: &[usize], padding: usize| {
        let mut spans = Vec::new();
        for &len in lengths {
            let first = spans.len() / 2;
            (0..len).for_each(|_| spans.extend([first as i32, (first + len) as i32]));
        }
        (0..padding).for_each(|_| spans.extend([0, 0]));
        spans
    };
    let mut cases = Vec::new();
    for (name, op, heads, head_dim, lengths, padding) in [
        ("one row", plain, [1, 1], 16, vec![1, 2], 0),
        ("one document", plain, [2, 2], 64, vec![33], 0),
        ("documents and padding", plain, [4, 2], 64, vec![5, 40, 1, 19], 3),
        ("window", SpanAttention { window: Some(7), ..plain }, [4, 1], 32, vec![30, 11], 0),
        ("softcap", SpanAttention { softcap: Some(1.5), ..plain }, [2, 1], 64, vec![17], 1),
        ("both directions", SpanAttention { causal: false, ..plain }, [3, 3], 48, vec![12, 12, 12], 0),
        ("wide heads", plain, [2, 1], 128, vec![70, 10], 0),
    ] {
        let n = lengths.iter().sum::<usize>() + padding;
        let qkv = || {
            [
                float(&[n, heads[0], head_dim]),
                float(&[n, heads[1], head_dim]),
                float(&[n, heads[1], head_dim]),
            ]
        };
        let ints = || Arg::ints(shape(&[n, 2]), spans(&lengths, padding));
        let name = format!("{dtype} {name}");
        let tol = Tol::Whole(1e-5).rounded_to(dtype).rounded_to(dtype);
        let args = qkv().into_iter().chain([ints()]).collect();
        cases.push(case(&name, Op::SpanAttention(op), dtype, tol, args));
        let args = [float(&[n, heads[0], head_dim])].into_iter().chain(qkv()).chain([ints()]).collect();
        let backward = move |b: &mut GraphBuilder, v: &[ValueId]| {
            let v = rounded(b, v, dtype)?;
            let made = b.node(Op::SpanAttention(op), &v[1..5], "forward")?;
            let inputs = [&v[..], &made[..]].concat();
            b.node(Op::Train(TrainOp::SpanAttentionGrad(op)), &inputs, "backward")
        };
        let op = Op::Train(TrainOp::SpanAttentionGrad(op));
        // The kernels also round probabilities and their gradients for the tensor cores.
        let tol = (0..5).fold(Tol::Whole(2e-5), |tol, _| tol.rounded_to(dtype));
        cases.push(Case::build(name, op, tol, args, backward));
    }
    cases
}

fn integers() -> Vec<Case> {
    let ints = || Arg::ints(shape(&[6]), vec![0, 1, -7, 40_000, i32::MAX, i32::MIN]);
    let floats = vec![0.0, -0.5, 2.75, -1e20, 3e9, f32::NAN];
    vec![
        Case::one_node("I32 to F32", Op::Cast(DType::F32), Tol::Bits, vec![ints()]),
        Case::one_node(
            "F32 to I32",
            Op::Cast(DType::I32),
            Tol::Bits,
            vec![Arg::float(DType::F32, [6]).fill(Fill::Floats(floats))],
        ),
        Case::one_node(
            "I32",
            Op::Compare(Compare::Less),
            Tol::Bits,
            vec![ints(), Arg::ints(shape(&[1]), vec![1])],
        ),
    ]
}
