//! Cases of the kernels of a training step.

use refrain_graph::{
    ADAM_PARAMS, AdamW, Binary, Compare, Dropout, Gate, Op, Reduce, Rope, RopeStyle, TensorType, TrainOp,
    Unary,
};
use refrain_kernels::{
    AdamTensor, AdamWArgs, BufView, CrossEntropyArgs, Floats, MapArgs, MapOp, NormWeights, PadArgs, PickArgs,
    PlaceColumnsArgs, RmsNormGradArgs, ScatterAddRowsArgs, SoftmaxGradArgs, SumSquaresArgs,
    TypedAddRmsNormArgs, TypedGatherArgs, TypedReduceArgs, TypedRmsNormArgs, TypedRopeArgs, TypedSoftmaxArgs,
    reduce_scratch_bytes, rms_norm_grad_scratch_bytes, scatter_scratch_bytes, sum_squares_scratch_bytes,
};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, f32s, i32s, normals, reference, shape};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// An output buffer with expected bytes.
fn made(dtype: DType, bytes: Vec<u8>, tol: Tol) -> Role {
    if dtype == DType::I32 {
        return Role::Exact(bytes);
    }
    Role::InOut { before: vec![0xcd; bytes.len()], after: bytes, dtype, tol }
}

/// Runs the reference for outputs of the given types.
fn run(op: &Op, inputs: &[Operand<'_>], outputs: &[(DType, &[usize])]) -> Vec<Vec<u8>> {
    let empty = |&(dtype, dims): &(DType, &[usize])| {
        let ty = TensorType::new(dtype, shape(dims));
        (ty, vec![0; ty.shape.n_elements() * dtype.block_bytes()])
    };
    let mut outputs: Vec<_> = outputs.iter().map(empty).collect();
    reference(op, inputs, &mut outputs);
    outputs.into_iter().map(|(_, bytes)| bytes).collect()
}

/// Input of a case: dtype, layout and bytes.
type Input = (DType, Layout, Vec<u8>);

fn floats(dtype: DType, layout: Layout, seed: u64) -> Input {
    (dtype, layout, encode(dtype, &normals(layout.end().max(1), seed)))
}

/// A case of an elementwise function: the op of the launcher, the op of the reference, and the inputs.
fn map_case(name: String, map: MapOp, op: &Op, dtype: DType, tol: Tol, inputs: Vec<Input>) -> Case {
    let dims = inputs.iter().fold(shape(&[1]), |all, (_, layout, _)| all.broadcast(&layout.shape()).unwrap());
    let n_out = if matches!(map, MapOp::GateGrad(_)) { 2 } else { 1 };
    let operands: Vec<Operand<'_>> = inputs.iter().map(|(d, l, b)| Operand(*d, *l, b)).collect();
    let outputs = vec![(dtype, dims.dims()); n_out];
    let mut roles: Vec<Role> =
        run(op, &operands, &outputs).into_iter().map(|y| made(dtype, y, tol)).collect();
    let views: Vec<(DType, Layout)> = inputs.iter().map(|(dtype, layout, _)| (*dtype, *layout)).collect();
    roles.extend(inputs.into_iter().map(|(_, _, bytes)| Role::In(bytes)));
    Case::new(name, roles, move |kernels, b, out| {
        let view =
            |(i, &(dtype, layout)): (usize, &(DType, Layout))| BufView { buf: b[n_out + i], dtype, layout };
        let inputs: Vec<BufView> = views.iter().enumerate().map(view).collect();
        let args =
            MapArgs { op: map, inputs: &inputs, outputs: &b[..n_out], dtype, shape: dims, step: "case" };
        out.push(kernels.map(&args)?);
        Ok(())
    })
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
    Unary::Affine { mul: -1.5, add: 0.25 },
    Unary::SoftCap(3.0),
];

/// Contiguous and strided views of a 2 x 3 x 40 tensor: readable eight elements at a time, and only one by
/// one.
fn views() -> Vec<(&'static str, Layout)> {
    let all = contiguous(&[2, 3, 40]);
    vec![
        ("dense", all),
        ("permuted", all.permute(&[2, 0, 1]).unwrap()),
        ("sliced", all.slice(2, 3, 17).unwrap().slice(1, 1, 2).unwrap()),
        ("sliced in groups of eight", all.slice(2, 8, 16).unwrap()),
        ("repeated", all.slice(1, 2, 1).unwrap().broadcast_to(shape(&[2, 5, 40])).unwrap()),
        ("a column repeated", all.slice(2, 5, 1).unwrap().broadcast_to(shape(&[2, 3, 16])).unwrap()),
        ("one", all.slice(0, 1, 1).unwrap().slice(1, 1, 1).unwrap().slice(2, 39, 1).unwrap()),
    ]
}

pub fn map() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let tol = Tol::Whole(3e-6).rounded_to(dtype);
        for f in UNARY {
            let positive = matches!(f, Unary::Log | Unary::Rsqrt);
            for dims in [[3, 333], [5, 48]] {
                let mut x = floats(dtype, contiguous(&dims), 1);
                if positive {
                    let values = normals(dims[0] * dims[1], 1);
                    x.2 = encode(dtype, &values.iter().map(|v| v.abs() + 0.25).collect::<Vec<_>>());
                }
                let dy = floats(dtype, contiguous(&dims), 2);
                let name = |what: &str| format!("{} {what} {dtype} {dims:?}", f.name());
                let op = Op::Unary(f);
                cases.push(map_case(name(""), MapOp::Unary(f), &op, dtype, tol, vec![x.clone()]));
                let op = Op::Train(TrainOp::UnaryGrad(f));
                cases.push(map_case(name("gradient"), MapOp::UnaryGrad(f), &op, dtype, tol, vec![dy, x]));
            }
        }
        for (name, layout) in views() {
            let other = floats(dtype, contiguous(layout.shape().dims()), 4);
            let x = floats(dtype, layout, 3);
            let op = Op::Binary(Binary::Sub);
            let inputs = vec![x.clone(), other];
            let case_name = format!("sub {dtype} {name}");
            cases.push(map_case(case_name, MapOp::Binary(Binary::Sub), &op, dtype, tol, inputs));
            for to in [DType::F32, DType::F16, DType::BF16, DType::I32] {
                let inputs = vec![x.clone()];
                let case_name = format!("cast {dtype} to {to} {name}");
                cases.push(map_case(case_name, MapOp::Cast, &Op::Cast(to), to, Tol::Bits, inputs));
            }
        }
        for f in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max] {
            for (a, b) in [([6, 40], [1, 40]), ([6, 40], [6, 1]), ([7, 33], [1, 33]), ([7, 33], [7, 33])] {
                // A vector of weights is F32 whatever the dtype of the rows.
                let inputs = vec![floats(dtype, contiguous(&a), 5), floats(DType::F32, contiguous(&b), 6)];
                let name = format!("{} {dtype} {a:?} with F32 {b:?}", f.name());
                cases.push(map_case(name, MapOp::Binary(f), &Op::Binary(f), dtype, tol, inputs));
            }
        }
        for kind in [Gate::Silu, Gate::GeluTanh] {
            for n_cols in [40, 33] {
                let all = contiguous(&[5, 2 * n_cols]);
                let gate = floats(dtype, all.slice(1, 0, n_cols).unwrap(), 7);
                let up = floats(dtype, all.slice(1, n_cols, n_cols).unwrap(), 8);
                let name = format!("gate {kind:?} {dtype} {n_cols}");
                let inputs = vec![gate.clone(), up.clone()];
                cases.push(map_case(name, MapOp::Gate(kind), &Op::Gate(kind), dtype, tol, inputs));
                let dy = floats(dtype, contiguous(&[5, n_cols]), 9);
                let op = Op::Train(TrainOp::GateGrad(kind));
                let name = format!("gate {kind:?} gradient {dtype} {n_cols}");
                cases.push(map_case(name, MapOp::GateGrad(kind), &op, dtype, tol, vec![dy, gate, up]));
            }
        }
        // Contiguous rows of one dtype, more than the threads of a block handle, with a partial last group of
        // eight; values far from zero too.
        for kind in [Gate::Silu, Gate::GeluTanh] {
            let dims = [3, 1495];
            let [dy, up] = [13, 14].map(|seed| floats(dtype, contiguous(&dims), seed));
            let mut gate = floats(dtype, contiguous(&dims), 15);
            gate.2 =
                encode(dtype, &normals(dims[0] * dims[1], 15).iter().map(|v| 9.0 * v).collect::<Vec<_>>());
            let inputs = vec![gate.clone(), up.clone()];
            let name = format!("gate {kind:?} {dtype} dense");
            cases.push(map_case(name, MapOp::Gate(kind), &Op::Gate(kind), dtype, tol, inputs));
            let op = Op::Train(TrainOp::GateGrad(kind));
            let name = format!("gate {kind:?} gradient {dtype} dense");
            cases.push(map_case(name, MapOp::GateGrad(kind), &op, dtype, tol, vec![dy, gate, up]));
        }
        for kind in [Compare::Equal, Compare::Less] {
            let ones = |n: usize, by: usize| (0..n).map(|i| (i % by) as f32 - 2.0).collect::<Vec<_>>();
            let a = (dtype, contiguous(&[6, 40]), encode(dtype, &ones(240, 7)));
            let b = (dtype, contiguous(&[40]), encode(dtype, &ones(40, 5)));
            let name = format!("{kind:?} {dtype}");
            cases.push(map_case(
                name,
                MapOp::Compare(kind),
                &Op::Compare(kind),
                DType::I32,
                Tol::Bits,
                vec![a, b],
            ));
        }
        for dims in [[6, 40], [6, 33]] {
            let mask = (DType::I32, contiguous(&[6, 1]), i32s(&[0, 1, -1, 0, i32::MIN, 1]));
            let inputs =
                vec![mask, floats(dtype, contiguous(&dims), 10), floats(dtype, contiguous(&dims[1..]), 11)];
            let name = format!("select {dtype} {dims:?}");
            cases.push(map_case(name, MapOp::Select, &Op::Select, dtype, Tol::Bits, inputs));
        }
        for (p, n) in [(0.0, 15), (0.1, 4100), (0.75, 1030)] {
            let dropout = Dropout { p, site: 5 };
            let rng = (DType::U32, contiguous(&[4]), i32s(&[17, 3, 1_000_000, 2]));
            let inputs = vec![floats(dtype, contiguous(&[n]), 12), rng];
            cases.push(dropout_case(format!("dropout {p} {dtype} {n}"), dropout, dtype, inputs));
        }
        cases.push(accumulate(dtype));
    }
    let ints = || (DType::I32, contiguous(&[6]), i32s(&[0, 1, -7, 40_001, i32::MAX, i32::MIN]));
    for to in FLOATS {
        cases.push(map_case(
            format!("cast I32 to {to}"),
            MapOp::Cast,
            &Op::Cast(to),
            to,
            Tol::Bits,
            vec![ints()],
        ));
    }
    let special = [0.0, -0.5, 2.75, -1e20, 3e9, f32::NAN, f32::INFINITY, -2_147_483_648.0, 2_147_483_520.0];
    let x = (DType::F32, contiguous(&[9]), f32s(&special));
    let op = Op::Cast(DType::I32);
    cases.push(map_case("cast to I32, special".to_owned(), MapOp::Cast, &op, DType::I32, Tol::Bits, vec![x]));
    let op = Op::Compare(Compare::Less);
    let limit = (DType::I32, contiguous(&[1]), i32s(&[i32::MAX]));
    let inputs = vec![ints(), limit];
    cases.push(map_case(
        "less I32".to_owned(),
        MapOp::Compare(Compare::Less),
        &op,
        DType::I32,
        Tol::Bits,
        inputs,
    ));
    cases
}

fn dropout_case(name: String, dropout: Dropout, dtype: DType, inputs: Vec<Input>) -> Case {
    let dims = inputs[0].1.shape();
    let operands: Vec<Operand<'_>> = inputs.iter().map(|(d, l, b)| Operand(*d, *l, b)).collect();
    let y = run(&Op::Train(TrainOp::Dropout(dropout)), &operands, &[(dtype, dims.dims())]).remove(0);
    let tol = Tol::Each(1e-6).rounded_to(dtype);
    let layout = inputs[0].1;
    let mut roles = vec![made(dtype, y, tol)];
    roles.extend(inputs.into_iter().map(|(_, _, bytes)| Role::In(bytes)));
    Case::new(name, roles, move |kernels, b, out| {
        let x = BufView { buf: b[1], dtype, layout };
        let op = MapOp::Dropout { dropout, rng: b[2] };
        let args = MapArgs { op, inputs: &[x], outputs: &b[..1], dtype, shape: dims, step: "case" };
        out.push(kernels.map(&args)?);
        Ok(())
    })
}

/// An F32 sum that accumulates in place.
fn accumulate(dtype: DType) -> Case {
    let n = 3000;
    let (sum, x) = (normals(n, 13), floats(dtype, contiguous(&[n]), 14));
    let values = crate::bed::decode(dtype, &x.2);
    let after: Vec<f32> = sum.iter().zip(&values).map(|(a, b)| a + b).collect();
    let state = Role::InOut { before: f32s(&sum), after: f32s(&after), dtype: DType::F32, tol: Tol::Bits };
    Case::new(format!("accumulate {dtype}"), vec![state, Role::In(x.2)], move |kernels, b, out| {
        let state = BufView { buf: b[0], dtype: DType::F32, layout: contiguous(&[n]) };
        let x = BufView { buf: b[1], dtype, layout: contiguous(&[n]) };
        out.push(kernels.map(&MapArgs {
            op: MapOp::Binary(Binary::Add),
            inputs: &[state, x],
            outputs: &b[..1],
            dtype: DType::F32,
            shape: shape(&[n]),
            step: "case",
        })?);
        Ok(())
    })
}

pub fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        // One warp and one block per row, aligned and unaligned, more than a thread holds.
        for dims in
            [[1, 3], [5, 31], [9, 768], [70, 64], [67, 328], [3, 1000], [2, 1032], [3, 1031], [2, 8208]]
        {
            for w_dtype in [DType::F32, dtype] {
                cases.extend(norms(dtype, w_dtype, dims));
            }
            cases.extend(softmax(dtype, dims));
        }
        // More rows than blocks.
        cases.extend(norms(dtype, dtype, [2100, 8]));
        cases.extend(norms(dtype, dtype, [2100, 5]));
        for (dims, axis) in [
            (&[7, 129][..], 0),
            (&[300, 40], 0),
            (&[5, 3, 17], 1),
            (&[2, 70, 264], 1),
            (&[2, 3, 4, 5], 0),
            (&[1, 1], 0),
            (&[5, 31], 1),
            (&[9, 2064], 1),
            (&[3, 5, 1], 1),
        ] {
            for kind in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
                cases.push(reduce(dtype, kind, contiguous(dims), axis));
            }
        }
        let wide = contiguous(&[70, 48]);
        cases.push(reduce(dtype, Reduce::Sum, wide.slice(1, 8, 32).unwrap(), 0));
        cases.push(reduce(dtype, Reduce::Sum, wide.slice(1, 3, 32).unwrap(), 0));
        cases.push(reduce(dtype, Reduce::Max, wide.slice(1, 3, 32).unwrap(), 1));
    }
    cases
}

fn norms(dtype: DType, w_dtype: DType, [n_rows, n_cols]: [usize; 2]) -> Vec<Case> {
    let dims = [n_rows, n_cols];
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
    let x = encode(dtype, &normals(n_rows * n_cols, 1));
    let other = encode(dtype, &normals(n_rows * n_cols, 2));
    let w = encode(w_dtype, &normals(n_cols, 3).iter().map(|v| 1.0 + 0.1 * v).collect::<Vec<_>>());
    let rows = |bytes| Operand(dtype, contiguous(&dims), bytes);
    let weights = || Operand(w_dtype, contiguous(&[n_cols]), &w);
    let eps = 1e-5;
    let name = |what: &str| format!("{what} {dtype} by {w_dtype} {dims:?}");
    let y = run(&Op::RmsNorm { eps }, &[rows(&x), weights()], &[(dtype, &dims)]).remove(0);
    // In place.
    let roles = vec![
        Role::InOut { before: x.clone(), after: y, dtype, tol: tol.rounded_to(dtype) },
        Role::In(w.clone()),
    ];
    let view = move |buf| BufView::dense(buf, dtype, shape(&dims));
    let norm = Case::new(name("rms norm"), roles, move |kernels, b, out| {
        let w = NormWeights { buf: b[1], dtype: w_dtype };
        let args = TypedRmsNormArgs { x: view(b[0]), w, y: b[0], n_rows, n_cols, eps, step: "case" };
        out.push(kernels.typed_rms_norm(&args)?);
        Ok(())
    });
    let made_by =
        run(&Op::AddRmsNorm { eps }, &[rows(&x), rows(&other), weights()], &[(dtype, &dims), (dtype, &dims)]);
    let [sum, y] = [made_by[0].clone(), made_by[1].clone()];
    let roles = vec![
        Role::InOut { before: x.clone(), after: sum, dtype, tol },
        Role::InOut { before: other.clone(), after: y, dtype, tol: tol.rounded_to(dtype) },
        Role::In(w.clone()),
    ];
    let add = Case::new(name("add and rms norm"), roles, move |kernels, b, out| {
        out.push(kernels.typed_add_rms_norm(&TypedAddRmsNormArgs {
            a: view(b[0]),
            b: view(b[1]),
            w: NormWeights { buf: b[2], dtype: w_dtype },
            sum: b[0],
            y: b[1],
            n_rows,
            n_cols,
            eps,
            step: "case",
        })?);
        Ok(())
    });
    let op = Op::Train(TrainOp::RmsNormGrad { eps, adds: false });
    let made_by = run(&op, &[rows(&other), rows(&x), weights()], &[(dtype, &dims), (w_dtype, &[n_cols])]);
    let roles = vec![
        made(dtype, made_by[0].clone(), tol.rounded_to(dtype)),
        made(w_dtype, made_by[1].clone(), Tol::Whole(2e-5).rounded_to(w_dtype)),
        Role::In(other),
        Role::In(x),
        Role::In(w),
        Role::Scratch(rms_norm_grad_scratch_bytes(n_rows, n_cols) as usize),
    ];
    let grad = Case::new(name("rms norm gradient"), roles, move |kernels, b, out| {
        let args = RmsNormGradArgs {
            dy: view(b[2]),
            x: view(b[3]),
            w: NormWeights { buf: b[4], dtype: w_dtype },
            dx: b[0],
            more: None,
            dw: b[1],
            dw_dtype: w_dtype,
            scratch: b[5],
            n_rows,
            n_cols,
            eps,
            step: "case",
        };
        kernels.rms_norm_grad(&args, out)
    });
    vec![norm, add, grad]
}

fn softmax(dtype: DType, [n_rows, n_cols]: [usize; 2]) -> Vec<Case> {
    let dims = [n_rows, n_cols];
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
    let x = encode(dtype, &normals(n_rows * n_cols, 4));
    let dy = encode(dtype, &normals(n_rows * n_cols, 5));
    let y = run(&Op::Softmax, &[Operand(dtype, contiguous(&dims), &x)], &[(dtype, &dims)]).remove(0);
    let operands = [Operand(dtype, contiguous(&dims), &dy), Operand(dtype, contiguous(&dims), &y)];
    let dx = run(&Op::Train(TrainOp::SoftmaxGrad), &operands, &[(dtype, &dims)]).remove(0);
    let view = move |buf| BufView::dense(buf, dtype, shape(&dims));
    let forward = vec![Role::InOut { before: x, after: y.clone(), dtype, tol }];
    let backward = vec![Role::InOut { before: dy, after: dx, dtype, tol }, Role::In(y)];
    vec![
        Case::new(format!("softmax {dtype} {dims:?}"), forward, move |kernels, b, out| {
            let args = TypedSoftmaxArgs { x: view(b[0]), y: b[0], n_rows, n_cols, step: "case" };
            out.push(kernels.typed_softmax(&args)?);
            Ok(())
        }),
        Case::new(format!("softmax gradient {dtype} {dims:?}"), backward, move |kernels, b, out| {
            let (dy, y) = (view(b[0]), view(b[1]));
            let args = SoftmaxGradArgs { dy, y, dx: b[0], n_rows, n_cols, step: "case" };
            out.push(kernels.softmax_grad(&args)?);
            Ok(())
        }),
    ]
}

fn reduce(dtype: DType, kind: Reduce, layout: Layout, axis: usize) -> Case {
    let (_, _, x) = floats(dtype, layout, 6);
    let dims = layout.shape();
    let mut small = dims.dims().to_vec();
    small[axis] = 1;
    let y = run(&Op::Reduce { kind, axis }, &[Operand(dtype, layout, &x)], &[(dtype, &small)]).remove(0);
    let tol = if kind == Reduce::Max { Tol::Bits } else { Tol::Whole(1e-5).rounded_to(dtype) };
    let n_scratch = reduce_scratch_bytes(dims.dims(), axis) as usize;
    let roles = vec![made(dtype, y, tol), Role::In(x), Role::Scratch(n_scratch)];
    let name = format!("{kind:?} {dtype} {layout:?} along {axis}");
    Case::new(name, roles, move |kernels, b, out| {
        let x = BufView { buf: b[1], dtype, layout };
        let args = TypedReduceArgs { kind, x, axis, y: b[0], scratch: b[2], step: "case" };
        kernels.typed_reduce(&args, out)
    })
}

pub fn moves() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for d in [40, 33, 1032, 1030] {
            for table_dtype in FLOATS {
                cases.push(gather(dtype, table_dtype, d));
            }
        }
        for n_cols in [13, 40] {
            cases.push(pick(dtype, n_cols));
        }
        for width in [1, 13, 40, 2064] {
            cases.push(place(dtype, width));
        }
        for (dims, axis, before, after) in [
            (&[5, 7][..], 1, 2, 3),
            (&[5, 16], 1, 8, 24),
            (&[5, 7], 0, 1, 0),
            (&[3, 4, 5], 1, 0, 9),
            (&[2, 3000], 1, 0, 8),
        ] {
            cases.push(pad(dtype, contiguous(dims), axis, before, after));
        }
        cases.push(pad(dtype, contiguous(&[5, 48]).slice(1, 8, 16).unwrap(), 1, 0, 8));
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            for (n_dims, head_dim) in [(6, 8), (16, 24), (64, 64), (8, 8)] {
                for is_inverse in [false, true] {
                    cases.push(rope(dtype, style, [n_dims, head_dim], is_inverse, 4));
                }
            }
        }
    }
    // Enough rows that a thread rotates more heads than it loads at once.
    cases.push(rope(DType::BF16, RopeStyle::Neox, [60, 62], true, 1450));
    cases
}

fn gather(dtype: DType, table_dtype: DType, d: usize) -> Case {
    // More rows than a block gathers.
    let ids = [3, 0, -1, 4, 3, 1, 2, -7, 0, 4, 4, 1];
    let n_ids = ids.len();
    let table = encode(table_dtype, &normals(5 * d, 1));
    let ids = i32s(&ids);
    let operands =
        [Operand(table_dtype, contiguous(&[5, d]), &table), Operand(DType::I32, contiguous(&[n_ids]), &ids)];
    let y = run(&Op::GatherRows(dtype), &operands, &[(dtype, &[n_ids, d])]).remove(0);
    let roles = vec![Role::Exact(y), Role::In(table), Role::In(ids)];
    Case::new(format!("gather {table_dtype} to {dtype} {d}"), roles, move |kernels, b, out| {
        out.push(kernels.typed_gather(&TypedGatherArgs {
            table: b[1],
            table_dtype,
            ids: b[2],
            y: b[0],
            dtype,
            n_rows: 5,
            d,
            n_ids,
            step: "case",
        })?);
        Ok(())
    })
}

fn pick(dtype: DType, n_cols: usize) -> Case {
    let layout = contiguous(&[5, n_cols + 3]).slice(1, 1, n_cols).unwrap();
    let (_, _, x) = floats(dtype, layout, 2);
    let ids = i32s(&[0, -5, 12, 3, 7]);
    let operands = [Operand(dtype, layout, &x), Operand(DType::I32, contiguous(&[5]), &ids)];
    let y = run(&Op::Pick, &operands, &[(dtype, &[5, 1])]).remove(0);
    let roles = vec![Role::Exact(y), Role::In(x), Role::In(ids)];
    Case::new(format!("pick {dtype} {n_cols}"), roles, move |kernels, b, out| {
        let x = BufView { buf: b[1], dtype, layout };
        out.push(kernels.pick(&PickArgs { x, ids: b[2], y: b[0], step: "case" })?);
        Ok(())
    })
}

fn place(dtype: DType, width: usize) -> Case {
    let n_rows = 5;
    let x = encode(dtype, &normals(n_rows, 3));
    let ids = i32s(&[0, -5, width as i32 - 1, 0, width as i32 / 2]);
    let operands = [Operand(DType::I32, contiguous(&[5]), &ids), Operand(dtype, contiguous(&[5, 1]), &x)];
    let y = run(&Op::PlaceColumns { width }, &operands, &[(dtype, &[5, width])]).remove(0);
    let roles = vec![Role::Exact(y), Role::In(ids), Role::In(x)];
    Case::new(format!("place {dtype} {width}"), roles, move |kernels, b, out| {
        let args = PlaceColumnsArgs { ids: b[1], x: b[2], dtype, y: b[0], n_rows, width, step: "case" };
        out.push(kernels.place_columns(&args)?);
        Ok(())
    })
}

fn pad(dtype: DType, layout: Layout, axis: usize, before: usize, after: usize) -> Case {
    let (_, _, x) = floats(dtype, layout, 4);
    let mut dims = layout.shape().dims().to_vec();
    dims[axis] += before + after;
    let op = Op::Pad { axis, before, after };
    let y = run(&op, &[Operand(dtype, layout, &x)], &[(dtype, &dims)]).remove(0);
    let name = format!("pad {dtype} {layout:?} along {axis} {before} {after}");
    Case::new(name, vec![Role::Exact(y), Role::In(x)], move |kernels, b, out| {
        let x = BufView { buf: b[1], dtype, layout };
        out.push(kernels.pad(&PadArgs { x, axis, before, after, y: b[0], step: "case" })?);
        Ok(())
    })
}

fn rope(dtype: DType, style: RopeStyle, [n_dims, head_dim]: [usize; 2], is_inverse: bool, n: usize) -> Case {
    let n_heads = 6;
    let dims = [n, n_heads, head_dim];
    let rope = Rope { style, n_dims, magnitude: 1.25 };
    let x = encode(dtype, &normals(n * n_heads * head_dim, 5));
    let positions: Vec<i32> = (0..n).map(|i| [0, 3, -1, 1000][i % 4] + 4 * (i / 4) as i32).collect();
    let positions = i32s(&positions);
    let freqs: Vec<f32> = (0..n_dims / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / n_dims as f32)).collect();
    let freqs = f32s(&freqs);
    let op = if is_inverse { Op::Train(TrainOp::RopeGrad(rope)) } else { Op::Rope(rope) };
    let operands = [
        Operand(dtype, contiguous(&dims), &x),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::F32, contiguous(&[n_dims / 2]), &freqs),
    ];
    let y = run(&op, &operands, &[(dtype, &dims)]).remove(0);
    let tol = Tol::Whole(2e-6).rounded_to(dtype);
    let roles = vec![Role::InOut { before: x, after: y, dtype, tol }, Role::In(positions), Role::In(freqs)];
    let name = format!("rope {style:?} {dtype} {n_dims} of {head_dim} back={is_inverse}");
    Case::new(name, roles, move |kernels, b, out| {
        out.push(kernels.typed_rope(&TypedRopeArgs {
            rope,
            is_inverse,
            x: BufView::dense(b[0], dtype, shape(&dims)),
            positions: b[1],
            inv_freq: b[2],
            y: b[0],
            n,
            n_heads,
            head_dim,
            step: "case",
        })?);
        Ok(())
    })
}

pub fn scatter() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        // One row, ids for every row, no ids, many rows with one id, more than one tile of rows.
        for (n, n_rows, d) in
            [(1, 1, 1), (40, 5, 33), (9, 70, 64), (300, 40, 136), (600, 3, 8), (2500, 90, 8)]
        {
            cases.push(scatter_case(dtype, n, n_rows, d));
        }
    }
    cases
}

fn scatter_case(dtype: DType, n: usize, n_rows: usize, d: usize) -> Case {
    let ids: Vec<i32> = (0..n).map(|i| (i * 7919 % 101 % (n_rows + 1)) as i32 - 1).collect();
    let (ids, x) = (i32s(&ids), encode(dtype, &normals(n * d, 1)));
    let operands = [Operand(DType::I32, contiguous(&[n]), &ids), Operand(dtype, contiguous(&[n, d]), &x)];
    let y = run(&Op::ScatterAddRows { n_rows }, &operands, &[(dtype, &[n_rows, d])]).remove(0);
    let roles = vec![
        made(dtype, y, Tol::Whole(2e-6).rounded_to(dtype)),
        Role::In(ids),
        Role::In(x),
        Role::Scratch(scatter_scratch_bytes(n) as usize),
    ];
    Case::new(format!("{n} rows into {n_rows} of {d} {dtype}"), roles, move |kernels, b, out| {
        let x = BufView::dense(b[2], dtype, shape(&[n, d]));
        let args = ScatterAddRowsArgs { ids: b[1], x, y: b[0], scratch: b[3], n_rows, step: "case" };
        kernels.scatter_add_rows(&args, out)
    })
}

pub fn loss() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        // Less than one thread holds, more than all threads hold, aligned and unaligned.
        for (n, vocab, spread) in
            [(1, 1, 1.0), (7, 33, 1.0), (3, 4104, 10.0), (2, 4099, 3.0), (3, 520, 900.0), (2, 33_000, 2.0)]
        {
            cases.push(loss_case(dtype, n, vocab, spread));
        }
    }
    cases
}

fn loss_case(dtype: DType, n: usize, vocab: usize, spread: f32) -> Case {
    let logits: Vec<f32> = normals(n * vocab, 1).iter().map(|v| spread * v).collect();
    let x = encode(dtype, &logits);
    let targets: Vec<i32> = (0..n).map(|i| if i % 4 == 3 { -1 } else { (i * 7919 % vocab) as i32 }).collect();
    let (targets, scale) = (i32s(&targets), f32s(&[0.125]));
    let operands = [
        Operand(dtype, contiguous(&[n, vocab]), &x),
        Operand(DType::I32, contiguous(&[n]), &targets),
        Operand(DType::F32, contiguous(&[1]), &scale),
    ];
    let op = Op::Train(TrainOp::CrossEntropy);
    let made_by = run(&op, &operands, &[(DType::F32, &[n]), (dtype, &[n, vocab])]);
    let tol = Tol::Whole(5e-6).rounded_to(dtype);
    let roles = vec![
        made(DType::F32, made_by[0].clone(), Tol::Whole(5e-6)),
        Role::InOut { before: x, after: made_by[1].clone(), dtype, tol },
        Role::In(targets),
        Role::In(scale),
    ];
    Case::new(format!("cross entropy {dtype} {n} x {vocab}"), roles, move |kernels, b, out| {
        out.push(kernels.cross_entropy(&CrossEntropyArgs {
            logits: BufView::dense(b[1], dtype, shape(&[n, vocab])),
            targets: b[2],
            scale: b[3],
            loss: b[0],
            dx: b[1],
            step: "case",
        })?);
        Ok(())
    })
}

pub fn optimiser() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        cases.push(squares(dtype, vec![1]));
        cases.push(squares(dtype, vec![903, 3, 85, 20_000]));
        // As many tensors as a table holds.
        cases.push(squares(dtype, (0..128).map(|i| 1 + i % 11).collect()));
        for masters in [false, true] {
            for clears in [false, true] {
                for sum_squares in [0.25, 1600.0, f32::INFINITY, f32::NAN] {
                    cases.push(adamw(dtype, masters, clears, sum_squares, &[231, 5, 8193]));
                }
            }
        }
    }
    let many: Vec<usize> = (0..64).map(|i| 1 + i % 19).collect();
    cases.push(adamw(DType::BF16, true, false, 0.25, &many));
    // Tensors of several kinds: some have a multiple of four elements, some more than a chunk.
    for (clears, sum_squares) in [(false, 0.25), (true, 1600.0), (true, f32::NAN), (false, f32::INFINITY)] {
        cases.push(adamw(DType::BF16, true, clears, sum_squares, &[8, 5, 9220, 8192, 231]));
    }
    cases
}

/// More tensors than a table holds: several independent launches.
pub fn many_tensors() -> Vec<Case> {
    let ns = |n: usize| (0..n).map(|i| 1 + i % 19).collect::<Vec<usize>>();
    vec![squares(DType::BF16, ns(131)), adamw(DType::BF16, true, false, 0.25, &ns(67))]
}

fn squares(dtype: DType, ns: Vec<usize>) -> Case {
    let tensors: Vec<Vec<u8>> =
        ns.iter().enumerate().map(|(i, &n)| encode(dtype, &normals(n, i as u64))).collect();
    let operands: Vec<Operand<'_>> =
        tensors.iter().zip(&ns).map(|(bytes, &n)| Operand(dtype, contiguous(&[n]), bytes)).collect();
    let sum = run(&Op::Train(TrainOp::SumSquares), &operands, &[(DType::F32, &[1])]).remove(0);
    let n_scratch = sum_squares_scratch_bytes(ns.iter().copied()) as usize;
    let mut roles = vec![made(DType::F32, sum, Tol::Each(2e-6)), Role::Scratch(n_scratch)];
    roles.extend(tensors.into_iter().map(Role::In));
    Case::new(format!("squares of {} tensors {dtype}", ns.len()), roles, move |kernels, b, out| {
        let floats = |(i, &n): (usize, &usize)| (Floats { buf: b[2 + i], dtype }, n);
        let tensors: Vec<_> = ns.iter().enumerate().map(floats).collect();
        let args = SumSquaresArgs { tensors: &tensors, sum: b[0], scratch: b[1], step: "case" };
        kernels.sum_squares(&args, out)
    })
}

fn adam_params() -> Vec<f32> {
    let (beta1, beta2) = (0.9f64, 0.95f64);
    let params = [1e-2, beta1, 1.0 - beta1, beta1.ln(), beta2, 1.0 - beta2, beta2.ln(), 1e-8, 0.1, 1.0];
    assert_eq!(params.len(), ADAM_PARAMS);
    params.map(|v| v as f32).to_vec()
}

/// The third step of several tensors, one without weight decay.
fn adamw(dtype: DType, masters: bool, clears: bool, sum_squares: f32, ns: &[usize]) -> Case {
    let ns = ns.to_vec();
    let adam = AdamW { decays: (0..ns.len()).map(|i| i % 3 != 1).collect(), masters, clears };
    let grad_dtype = if clears { DType::F32 } else { dtype };
    let moment = if masters { DType::F32 } else { dtype };
    let (params, squares) = (f32s(&adam_params()), f32s(&[sum_squares]));
    let one = contiguous(&[1]);
    let mut inputs =
        vec![(DType::F32, contiguous(&[ADAM_PARAMS]), params.clone()), (DType::F32, one, squares.clone())];
    let mut states = vec![(DType::I32, 1, i32s(&[2]))];
    for (i, &n) in ns.iter().enumerate() {
        let values = |salt: u64| normals(n, 10 * i as u64 + salt);
        let grad = encode(grad_dtype, &values(0));
        match clears {
            true => states.push((grad_dtype, n, grad)),
            false => inputs.push((grad_dtype, contiguous(&[n]), grad)),
        }
        states.push((dtype, n, encode(dtype, &values(1))));
        if masters {
            states.push((DType::F32, n, f32s(&values(1))));
        }
        states.push((moment, n, encode(moment, &values(2).iter().map(|v| 0.1 * v).collect::<Vec<_>>())));
        states.push((moment, n, encode(moment, &values(3).iter().map(|v| v * v).collect::<Vec<_>>())));
    }
    let operands: Vec<Operand<'_>> = inputs.iter().map(|(d, l, b)| Operand(*d, *l, b)).collect();
    let ty = |dtype, n: usize| TensorType::new(dtype, shape(&[n]));
    let mut after: Vec<_> = states.iter().map(|(d, n, bytes)| (ty(*d, *n), bytes.clone())).collect();
    reference(&Op::Train(TrainOp::AdamW(adam.clone())), &operands, &mut after);
    // A skipped step leaves every bit unchanged.
    let tol = |dtype| match sum_squares.is_finite() {
        true => Tol::Whole(5e-6).rounded_to(dtype),
        false => Tol::Bits,
    };
    let mut roles: Vec<Role> = Vec::new();
    for ((dtype, _, before), (_, after)) in states.iter().zip(after) {
        roles.push(match *dtype == DType::I32 {
            true => Role::InOut { before: before.clone(), after, dtype: DType::F32, tol: Tol::Bits },
            false => Role::InOut { before: before.clone(), after, dtype: *dtype, tol: tol(*dtype) },
        });
    }
    let n_states = roles.len();
    roles.extend(inputs.iter().map(|(_, _, bytes)| Role::In(bytes.clone())));
    let name = format!("adamw {dtype} masters={masters} clears={clears} {sum_squares} {} tensors", ns.len());
    Case::new(name, roles, move |kernels, b, out| {
        let (mut state, mut grad) = (1, n_states + 2);
        let next = |at: &mut usize, dtype| {
            *at += 1;
            Floats { buf: b[*at - 1], dtype }
        };
        let mut tensors = Vec::new();
        for (i, &n) in ns.iter().enumerate() {
            let grad = if clears { next(&mut state, grad_dtype) } else { next(&mut grad, grad_dtype) };
            let weight = next(&mut state, dtype);
            let master = masters.then(|| next(&mut state, DType::F32).buf);
            let (m, v) = (next(&mut state, moment), next(&mut state, moment));
            tensors.push(AdamTensor { n, grad, weight, master, m, v, decays: adam.decays[i] });
        }
        let args = AdamWArgs {
            count: b[0],
            params: b[n_states],
            sum_squares: b[n_states + 1],
            tensors: &tensors,
            clears,
            step: "case",
        };
        kernels.adamw(&args, out)
    })
}
