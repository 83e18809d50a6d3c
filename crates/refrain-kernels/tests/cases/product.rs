//! Cases of the decode GEMV with its fused operations, and of packing.

use refrain_graph::{Gate, Op, Unary};
use refrain_kernels::{PACKED_DTYPES, PackArgs, ProductArgs, ProductWeight, pack};
use refrain_tensor::DType;
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, decode, f32s, normals, reference_f32};

/// Sums of k products in f32 against f64.
const PLAIN: Tol = Tol::Whole(4e-6);
/// The same, plus quants halfway between two values, which may round either way: one step of the block's 127.
const ROUNDED: Tol = Tol::Whole(4e-3);

/// Operation on the row before the product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    Norm,
    AddNorm,
    AddNormedNorm,
}

struct Shape<'a> {
    dtypes: &'a [DType],
    ns: &'a [usize],
    k: usize,
    before: Before,
    gate: Option<Gate>,
    bias: bool,
}

pub fn product() -> Vec<Case> {
    let mut cases = Vec::new();
    let all = [DType::BF16, DType::F16].into_iter().chain(PACKED_DTYPES);
    for dtype in all {
        let unit = if dtype.block_len() == 256 { 256 } else { 32 };
        let plain = !dtype.is_quantized();
        let shape = |ns, k, before| Shape { dtypes: &[], ns, k, before, gate: None, bias: false };
        let mut add = |s: Shape<'_>| cases.push(case(&Shape { dtypes: &vec![dtype; s.ns.len()], ..s }));
        add(shape(&[5], unit, Before::Nothing));
        add(shape(&[33, 7, 9], 3 * unit, Before::Norm));
        add(shape(&[8], 5 * unit, Before::AddNorm));
        add(shape(&[17, 1], 18 * unit, Before::AddNormedNorm));
        // Blocks of several tiles, which their warps share.
        add(shape(&[2049], 4 * unit, Before::Nothing));
        // More chunks per warp than its ring holds, and warps that finish one shared tile and start another.
        add(shape(&[19], 65 * 256, Before::Nothing));
        add(Shape { gate: Some(Gate::Silu), ..shape(&[19, 19], 33 * 256, Before::Norm) });
        add(Shape { bias: true, ..shape(&[12, 4, 4], 2 * unit, Before::Norm) });
        // Nothing precedes the product, but it is not a bare one.
        add(Shape { bias: true, ..shape(&[12], 2 * unit, Before::Nothing) });
        add(shape(&[9, 5], unit, Before::Nothing));
        add(Shape { gate: Some(Gate::Silu), ..shape(&[43, 43], 6 * unit, Before::AddNorm) });
        add(Shape { gate: Some(Gate::GeluTanh), bias: true, ..shape(&[8, 8], unit, Before::Norm) });
        if plain {
            add(shape(&[10_571], 8, Before::Nothing));
            add(shape(&[3_432], 1_032, Before::Nothing));
            add(shape(&[6], 8, Before::Nothing));
            add(shape(&[3, 2], 584, Before::Norm));
        }
    }
    for other in [DType::Q4_K, DType::Q5_K] {
        let base = Shape {
            dtypes: &[other, other, DType::Q6_K],
            ns: &[24, 9, 10],
            k: 1024,
            before: Before::AddNorm,
            gate: None,
            bias: false,
        };
        cases.push(case(&base));
        cases.push(case(&Shape { dtypes: &[DType::Q6_K, other], ns: &[11, 16], ..base }));
    }
    // Rows long enough that every thread handles several parts.
    for dtype in [DType::BF16, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let (k, before) = (8192 + 256, Before::Nothing);
        cases.push(case(&Shape { dtypes: &[dtype], ns: &[19], k, before, gate: None, bias: false }));
        let before = Before::AddNormedNorm;
        cases.push(case(&Shape { dtypes: &[dtype], ns: &[4], k, before, gate: None, bias: false }));
    }
    cases
}

fn rounded(x: &[f32]) -> Vec<f32> {
    let mut out = x.to_vec();
    for block in out.chunks_mut(32) {
        let most = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        block.iter_mut().for_each(|v| *v = (*v * (127.0 / most)).round_ties_even() * (most / 127.0));
    }
    out
}

fn norm(x: &[f32], w: &[f32]) -> Vec<f32> {
    let (x_bytes, w_bytes, k) = (f32s(x), f32s(w), x.len());
    reference_f32(&Op::RmsNorm { eps: EPS }, &[dense(&[1, k], &x_bytes), dense(&[k], &w_bytes)], &[1, k])
}

const EPS: f32 = 1e-5;

fn dense<'a>(dims: &[usize], bytes: &'a [u8]) -> Operand<'a> {
    Operand(DType::F32, contiguous(dims), bytes)
}

fn case(s: &Shape<'_>) -> Case {
    let (k, before, gate) = (s.k, s.before, s.gate);
    let [a, b, inner, outer] = [1, 2, 3, 4].map(|seed| normals(k, seed));
    let mut sum = a.clone();
    if matches!(before, Before::AddNorm | Before::AddNormedNorm) {
        let added = if before == Before::AddNormedNorm { norm(&b, &inner) } else { b.clone() };
        sum.iter_mut().zip(&added).for_each(|(s, v)| *s += v);
    }
    let mut x = if before == Before::Nothing { sum.clone() } else { norm(&sum, &outer) };
    let quantised = s.dtypes[0].is_quantized();
    if quantised {
        x = rounded(&x);
    }
    let (tol, x_bytes) = (if quantised { ROUNDED } else { PLAIN }, f32s(&x));
    let (mut ys, mut weights, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for (i, (&dtype, &n)) in s.dtypes.iter().zip(s.ns).enumerate() {
        let w = encode(dtype, &normals(n * k, 10 + i as u64));
        let values = f32s(&decode(dtype, &w));
        let layout = contiguous(&[n, k]).transpose().unwrap();
        let operands = [dense(&[1, k], &x_bytes), Operand(DType::F32, layout, &values)];
        let mut y = reference_f32(&Op::MatMul, &operands, &[1, n]);
        let bias = normals(n, 20 + i as u64);
        if s.bias {
            y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        ys.push(y);
        biases.push(f32s(&bias));
        weights.push(if quantised { pack(dtype, &w, n, k).unwrap() } else { w });
    }
    if let Some(gate) = gate {
        let f = match gate {
            Gate::Silu => Unary::Silu,
            Gate::GeluTanh => Unary::GeluTanh,
        };
        let left = f32s(&ys[0]);
        let n = ys[0].len();
        let acted = reference_f32(&Op::Unary(f), &[dense(&[1, n], &left)], &[1, n]);
        ys = vec![acted.iter().zip(&ys[1]).map(|(l, r)| l * r).collect()];
    }
    let n_ys = ys.len();
    let mut roles: Vec<Role> = ys.into_iter().map(|y| Role::Out(y, tol)).collect();
    let n_weights = weights.len();
    roles.extend(weights.into_iter().map(Role::In));
    roles.extend(biases.into_iter().map(Role::In));
    roles.extend([&a, &b, &inner, &outer].map(|row| Role::In(f32s(row))));
    let has_sum = matches!(before, Before::AddNorm | Before::AddNormedNorm);
    roles.push(if has_sum { Role::Out(sum, PLAIN) } else { Role::Scratch(4 * k) });
    let (dtypes, ns, with_bias) = (s.dtypes.to_vec(), s.ns.to_vec(), s.bias);
    let name = format!("product {dtypes:?} n={ns:?} k={k} {before:?} {gate:?} bias={with_bias}");
    Case::new(name, roles, move |kernels, bufs, out| {
        let (w_at, bias_at) = (n_ys, n_ys + n_weights);
        let rows = bias_at + n_weights;
        let parts: Vec<ProductWeight> = (0..n_weights)
            .map(|i| ProductWeight {
                w: bufs[w_at + i],
                dtype: dtypes[i],
                bias: with_bias.then_some(bufs[bias_at + i]),
                y: bufs[i.min(n_ys - 1)],
                n: ns[i],
            })
            .collect();
        out.push(kernels.product(&ProductArgs {
            a: bufs[rows],
            b: has_sum.then_some(bufs[rows + 1]),
            inner: (before == Before::AddNormedNorm).then_some(bufs[rows + 2]),
            norm: (before != Before::Nothing).then_some(bufs[rows + 3]),
            eps: EPS,
            sum: has_sum.then_some(bufs[rows + 4]),
            parts: &parts,
            gate,
            k,
            // Only a GPU knows how long this takes.
            previous_tail: k.is_multiple_of(512).then_some(64 << 10),
            step: "case",
        })?);
        Ok(())
    })
}

pub fn packing() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in PACKED_DTYPES {
        for [n, blocks] in [[1, 1], [8, 2], [21, 5], [64, 9]] {
            let k = blocks * dtype.block_len();
            let file = encode(dtype, &normals(n * k, 7));
            let packed = pack(dtype, &file, n, k).unwrap();
            cases.push(Case::new(
                format!("pack {dtype} n={n} k={k}"),
                vec![Role::Exact(packed), Role::In(file)],
                move |kernels, b, out| {
                    let args = PackArgs { file: b[1], dtype, packed: b[0], n, k, step: "case" };
                    out.push(kernels.pack(&args)?);
                    Ok(())
                },
            ));
        }
    }
    cases
}
