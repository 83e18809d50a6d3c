//! Checks moves and matrix products against simple loops.

use proptest::prelude::*;
use refrain_graph::{Binary, Gate, GraphBuilder, Op, Reduce, TensorType, Unary, View};
use refrain_reference::{In, Out, ReferenceError, run};
use refrain_tensor::{Bytes, DType, HostTensor, Layout, Shape, quant};
use refrain_testkit::{Fill, Tol, assert_close, encode, tensor};

fn host(dtype: DType, dims: &[usize], values: &[f32]) -> HostTensor {
    HostTensor::new(dtype, Shape::new(dims).unwrap(), Bytes::new(encode(dtype, values))).unwrap()
}

fn f32s(dims: &[usize], values: &[f32]) -> HostTensor {
    host(DType::F32, dims, values)
}

fn i32s(values: &[i32]) -> HostTensor {
    HostTensor::from_i32(Shape::from([values.len()]), values).unwrap()
}

fn random(dtype: DType, dims: &[usize], seed: u64) -> HostTensor {
    tensor(TensorType { dtype, shape: Shape::new(dims).unwrap() }, &Fill::Normal, seed)
}

fn viewed(t: &HostTensor, view: View) -> HostTensor {
    t.with_layout(view.apply(t.layout()).unwrap()).unwrap()
}

/// All outputs of an op as floats.
fn eval(op: &Op, inputs: &[&HostTensor]) -> Result<Vec<Vec<f32>>, ReferenceError> {
    let ins: Vec<In<'_>> = inputs.iter().map(|t| In::from(*t)).collect();
    let types = op.infer(&ins.iter().map(In::ty).collect::<Vec<_>>()).unwrap();
    let mut bytes: Vec<Vec<u8>> =
        types.iter().map(|t| vec![0xFF; t.dtype.bytes_for(t.shape.n_elements()).unwrap()]).collect();
    let mut outs: Vec<Out<'_>> = types.iter().zip(&mut bytes).map(|(&ty, bytes)| Out { ty, bytes }).collect();
    run(op, &ins, &mut outs)?;
    let decode = |(ty, bytes): (&TensorType, &Vec<u8>)| {
        let mut values = vec![0.0; ty.shape.n_elements()];
        quant::dequantize(ty.dtype, bytes, &mut values).unwrap();
        values
    };
    Ok(types.iter().zip(&bytes).map(decode).collect())
}

fn one(op: Op, inputs: &[&HostTensor]) -> Vec<f32> {
    eval(&op, inputs).unwrap().remove(0)
}

#[test]
fn products_of_small_matrices_have_known_values() {
    let a = f32s(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let b = f32s(&[3, 2], &[7.0, 8.0, 9.0, 10.0, 11.0, 12.0]);
    assert_eq!(one(Op::MatMul, &[&a, &b]), [58.0, 64.0, 139.0, 154.0]);
    let at = viewed(&a, View::Permute(vec![1, 0]));
    let bt = viewed(&b, View::Permute(vec![1, 0]));
    assert_eq!(one(Op::MatMul, &[&bt, &at]), [58.0, 139.0, 64.0, 154.0]);
}

/// `a[x, m, k] * b[y, k, n]` with broadcast batches, by definition.
fn naive(a: &HostTensor, b: &HostTensor, batch: &[usize]) -> Vec<f32> {
    let wide = |t: &HostTensor| {
        let shape = t.shape();
        let inner = &shape.dims()[shape.rank() - 2..];
        let layout = t.layout().broadcast_to(Shape::new(&[batch, inner].concat()).unwrap()).unwrap();
        (layout, t.with_layout(Layout::contiguous(Shape::from([stored(t)]))).unwrap().to_f32().unwrap())
    };
    let ((la, a), (lb, b)) = (wide(a), wide(b));
    let rank = batch.len() + 2;
    let (m, k, n) = (la.shape().dims()[rank - 2], la.shape().dims()[rank - 1], lb.shape().dims()[rank - 1]);
    let mut out = Vec::new();
    for outer in Layout::contiguous(Shape::new(batch).unwrap()).indices() {
        let mut index = vec![0; batch.len()];
        let mut left = outer;
        for axis in (0..batch.len()).rev() {
            (index[axis], left) = (left % batch[axis], left / batch[axis]);
        }
        for i in 0..m {
            for j in 0..n {
                let at = |r: usize, c: usize| [index.as_slice(), &[r, c]].concat();
                let term = |l: usize| f64::from(a[la.at(&at(i, l))]) * f64::from(b[lb.at(&at(l, j))]);
                out.push((0..k).map(term).sum::<f64>() as f32);
            }
        }
    }
    out
}

fn stored(t: &HostTensor) -> usize {
    t.bytes().as_slice().len() / t.dtype().block_bytes() * t.dtype().block_len()
}

#[test]
fn products_of_views_and_batches_match_the_definition() {
    let swap = || View::Permute(vec![1, 0]);
    let a = random(DType::F32, &[5, 7], 1);
    let plain = random(DType::F32, &[7, 4], 2);
    let turned = viewed(&random(DType::F32, &[4, 7], 3), swap());
    let columns = viewed(&random(DType::F32, &[7, 9], 4), View::Slice { axis: 1, start: 2, len: 4 });
    for b in [&plain, &turned, &columns] {
        assert_close(&one(Op::MatMul, &[&a, b]), &naive(&a, b, &[]), Tol::Bits);
    }
    let a = random(DType::F32, &[3, 1, 2, 5], 5);
    let b = random(DType::F32, &[4, 5, 6], 6);
    assert_close(&one(Op::MatMul, &[&a, &b]), &naive(&a, &b, &[3, 4]), Tol::Bits);
    let repeated = viewed(&random(DType::F32, &[1, 5, 6], 7), View::Broadcast(Shape::from([4, 5, 6])));
    assert_close(&one(Op::MatMul, &[&a, &repeated]), &naive(&a, &repeated, &[3, 4]), Tol::Bits);
}

#[test]
fn quantised_weights_multiply_like_their_decoded_numbers() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_quantized() || d.is_float()) {
        let k = 2 * dtype.block_len().max(16);
        let x = random(DType::F32, &[3, k], 8);
        let w = random(dtype, &[5, k], 9);
        let decoded = f32s(&[5, k], &w.to_f32().unwrap());
        let swap = |t: &HostTensor| viewed(t, View::Permute(vec![1, 0]));
        assert_eq!(one(Op::MatMul, &[&x, &swap(&w)]), one(Op::MatMul, &[&x, &swap(&decoded)]), "{dtype}");
    }
}

#[test]
fn gather_copies_rows_and_returns_zeros_for_negative_ids() {
    let table = f32s(&[3, 2], &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    let op = Op::GatherRows(DType::F32);
    assert_eq!(
        one(op.clone(), &[&table, &i32s(&[2, -1, 0, 2])]),
        [20.0, 21.0, 0.0, 0.0, 0.0, 1.0, 20.0, 21.0]
    );
    let error = eval(&op, &[&table, &i32s(&[0, 3])]).unwrap_err();
    assert_eq!(error.to_string(), "row is 3, must be below 3");
    let turned = viewed(&table, View::Permute(vec![1, 0]));
    assert_eq!(one(op.clone(), &[&turned, &i32s(&[1])]), [1.0, 11.0, 21.0]);
    let narrow = viewed(&table, View::Slice { axis: 1, start: 1, len: 1 });
    assert_eq!(one(op, &[&narrow, &i32s(&[2, 1])]), [21.0, 11.0]);
}

#[test]
fn gather_from_a_quantised_table_decodes_the_row() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_quantized()) {
        let d = dtype.block_len();
        let table = random(dtype, &[4, 2 * d], 3);
        let all = table.to_f32().unwrap();
        let got = one(Op::GatherRows(DType::F32), &[&table, &i32s(&[3, 1])]);
        assert_eq!(got, [&all[6 * d..8 * d], &all[2 * d..4 * d]].concat(), "{dtype}");
        let half = viewed(&table, View::Slice { axis: 1, start: d / 2, len: d });
        let got = one(Op::GatherRows(DType::F32), &[&half, &i32s(&[2])]);
        assert_eq!(got, all[4 * d + d / 2..][..d], "{dtype} from the middle of a block");
    }
}

#[test]
fn copies_of_quantised_views_move_whole_blocks_or_refuse() {
    let w = random(DType::Q8_0, &[2, 3, 64], 4);
    let values = w.to_f32().unwrap();
    let swapped = viewed(&w, View::Permute(vec![1, 0, 2]));
    let row = |i: usize, j: usize| &values[(i * 3 + j) * 64..][..64];
    let want = [row(0, 0), row(1, 0), row(0, 1), row(1, 1), row(0, 2), row(1, 2)].concat();
    assert_eq!(one(Op::Copy, &[&swapped]), want);
    let off = viewed(&w, View::Slice { axis: 2, start: 16, len: 32 });
    let error = eval(&Op::Copy, &[&off]).unwrap_err().to_string();
    assert_eq!(error, "Q8_0 stores blocks of 32 elements, but the rows of [2, 3, 32] are not whole blocks");
}

#[test]
fn casts_round_to_nearest_even() {
    let x = f32s(&[4], &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65_520.0, -0.0]);
    assert_eq!(one(Op::Cast(DType::BF16), &[&x])[..2], [1.0, 1.0 + 4.0 / 256.0]);
    let half = one(Op::Cast(DType::F16), &[&x]);
    assert_eq!(half[2], f32::INFINITY);
    assert!(half[3] == 0.0 && half[3].is_sign_negative());
}

#[test]
fn functions_have_their_known_values() {
    let x = f32s(&[3], &[-2.0, 0.0, 3.0]);
    let cases: [(Unary, [f64; 3]); 9] = [
        (Unary::Neg, [2.0, 0.0, -3.0]),
        (Unary::Exp, [0.135_335_283, 1.0, 20.085_536_9]),
        (Unary::Tanh, [-0.964_027_580, 0.0, 0.995_054_754]),
        (Unary::Sigmoid, [0.119_202_922, 0.5, 0.952_574_127]),
        (Unary::Silu, [-0.238_405_844, 0.0, 2.857_722_380]),
        (Unary::GeluTanh, [-0.045_402_306, 0.0, 2.996_362_607]),
        (Unary::GeluErf, [-0.045_500_264, 0.0, 2.995_950_306]),
        (Unary::Affine { mul: 2.0, add: 1.0 }, [-3.0, 1.0, 7.0]),
        (Unary::SoftCap(2.0), [-1.523_188_312, 0.0, 1.810_296_507]),
    ];
    for (f, want) in cases {
        assert_close(&one(Op::Unary(f), &[&x]), &want.map(|v| v as f32), Tol::Each(1e-6));
    }
    let y = f32s(&[2], &[4.0, std::f32::consts::E]);
    assert_close(&one(Op::Unary(Unary::Rsqrt), &[&y])[..1], &[0.5], Tol::Bits);
    assert_close(&one(Op::Unary(Unary::Log), &[&y])[1..], &[1.0], Tol::Each(1e-7));
}

#[test]
fn binaries_broadcast_from_the_right() {
    let a = f32s(&[2, 1], &[8.0, 2.0]);
    let b = f32s(&[3], &[1.0, 2.0, 4.0]);
    assert_eq!(one(Op::Binary(Binary::Add), &[&a, &b]), [9.0, 10.0, 12.0, 3.0, 4.0, 6.0]);
    assert_eq!(one(Op::Binary(Binary::Sub), &[&a, &b]), [7.0, 6.0, 4.0, 1.0, 0.0, -2.0]);
    assert_eq!(one(Op::Binary(Binary::Mul), &[&a, &b]), [8.0, 16.0, 32.0, 2.0, 4.0, 8.0]);
    assert_eq!(one(Op::Binary(Binary::Div), &[&a, &b]), [8.0, 4.0, 2.0, 2.0, 1.0, 0.5]);
    assert_eq!(one(Op::Binary(Binary::Max), &[&a, &b]), [8.0, 8.0, 8.0, 2.0, 2.0, 4.0]);
}

#[test]
fn reductions_norms_and_softmax_have_known_values() {
    let x = f32s(&[2, 4], &[1.0, 2.0, 3.0, 4.0, -1.0, -1.0, -1.0, -1.0]);
    assert_eq!(one(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[&x]), [10.0, -4.0]);
    assert_eq!(one(Op::Reduce { kind: Reduce::Mean, axis: 1 }, &[&x]), [2.5, -1.0]);
    assert_eq!(one(Op::Reduce { kind: Reduce::Max, axis: 1 }, &[&x]), [4.0, -1.0]);
    let soft = one(Op::Softmax, &[&x]);
    assert_close(&soft[..4], &[0.032_058_604, 0.087_144_32, 0.236_882_82, 0.643_914_2], Tol::Each(1e-6));
    assert_eq!(soft[4..], [0.25; 4]);
    let w = f32s(&[4], &[1.0, 1.0, 2.0, -1.0]);
    let norm = one(Op::RmsNorm { eps: 0.0 }, &[&x, &w]);
    let rms = 7.5f32.sqrt();
    assert_close(&norm[..4], &[1.0 / rms, 2.0 / rms, 6.0 / rms, -4.0 / rms], Tol::Each(1e-6));
    assert_eq!(norm[4..], [-1.0, -1.0, -2.0, 1.0]);
    let both = eval(&Op::AddRmsNorm { eps: 0.5 }, &[&x, &x, &w]).unwrap();
    assert_eq!(both[0], x.to_f32().unwrap().iter().map(|v| v * 2.0).collect::<Vec<_>>());
    assert_close(&both[1], &one(Op::RmsNorm { eps: 0.5 }, &[&f32s(&[2, 4], &both[0]), &w]), Tol::Bits);
    let gated = one(Op::Gate(Gate::Silu), &[&x, &x]);
    assert_close(&gated[..1], &[0.731_058_6], Tol::Each(1e-6));
}

#[test]
fn empty_rows_have_a_sum() {
    let x = f32s(&[3, 0], &[]);
    assert_eq!(one(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[&x]), [0.0; 3]);
    assert_eq!(one(Op::Reduce { kind: Reduce::Max, axis: 1 }, &[&x]), [f32::NEG_INFINITY; 3]);
    assert_eq!(one(Op::GatherRows(DType::F32), &[&x, &i32s(&[2, 1])]), [0f32; 0]);
}

#[test]
fn sixteen_bit_floats_are_computed_in_f32_and_rounded_once() {
    let [a, b] = [1, 2].map(|seed| random(DType::BF16, &[4, 8], seed));
    let wide = |t: &HostTensor| f32s(&[4, 8], &t.to_f32().unwrap());
    let full = one(Op::Binary(Binary::Mul), &[&wide(&a), &wide(&b)]);
    let rounded = one(Op::Cast(DType::BF16), &[&f32s(&[4, 8], &full)]);
    assert_eq!(one(Op::Binary(Binary::Mul), &[&a, &b]), rounded);
}

#[test]
fn views_have_no_reference() {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let x = b.input("x", TensorType::new(DType::F32, [2])).unwrap();
    b.reshape(x, &[2, 1]).unwrap();
    let graph = b.finish();
    let error = run(&graph.nodes()[0].op, &[], &mut []).unwrap_err();
    assert_eq!(error.to_string(), "reshape has no reference: a view is not run");
}

fn small_dims() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0usize..4, 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_reference_runs_everything_that_a_shape_rule_accepts(
        which in 0usize..9,
        dims in prop::collection::vec(small_dims(), 3),
        same in any::<bool>(),
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
    ) {
        let ops = [
            Op::Copy,
            Op::Cast(DType::F16),
            Op::Unary(Unary::Silu),
            Op::Binary(Binary::Add),
            Op::Reduce { kind: Reduce::Mean, axis: 1 },
            Op::Softmax,
            Op::MatMul,
            Op::RmsNorm { eps: 0.1 },
            Op::AddRmsNorm { eps: 0.1 },
        ];
        let op = &ops[which];
        let row = vec![dims[0].last().copied().unwrap_or(1)];
        let dims = if same { vec![dims[0].clone(), if which == 7 { row.clone() } else { dims[0].clone() }, row] } else { dims };
        let arity = [1, 1, 1, 2, 1, 1, 2, 2, 3][which];
        let inputs: Vec<HostTensor> = dims[..arity].iter().zip(1..).map(|(d, i)| random(dtype, d, i)).collect();
        let types: Vec<TensorType> = inputs.iter().map(|t| TensorType { dtype, shape: t.shape() }).collect();
        if op.infer(&types).is_ok() {
            prop_assert!(eval(op, &inputs.iter().collect::<Vec<_>>()).is_ok());
        }
    }
}
