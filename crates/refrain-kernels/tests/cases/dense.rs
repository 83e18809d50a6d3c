//! Cases of linear layers, embeddings and norms.

use refrain_graph::Op;
use refrain_kernels::{
    AddRmsNormArgs, BufView, GatherRowsArgs, LINEAR_DTYPES, LinearArgs, LinearPart, PACKED_DTYPES,
    RmsNormArgs, pack,
};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Tol, encode};

use crate::bed::{
    Case, Operand, Role, contiguous, dense, f32s, i32s, normals, reference, reference_f32, shape,
};

/// Sums of k products in f32 against f64: a few units of 2^-24 times the square root of k.
const LINEAR: Tol = Tol::Whole(3e-6);
/// One sum, one square root and two multiplications.
const NORM: Tol = Tol::Whole(2e-6);

pub fn linear() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in LINEAR_DTYPES {
        let shapes: &[[usize; 3]] = match dtype.block_len() {
            1 => &[[1, 5, 7], [1, 9, 264], [3, 33, 129], [9, 6, 64], [8, 3, 1000], [2, 1, 1]],
            32 => &[[1, 5, 32], [1, 33, 352], [3, 6, 96], [9, 7, 576], [17, 2, 64]],
            _ => &[[1, 5, 256], [2, 9, 512], [8, 3, 1024], [9, 6, 768]],
        };
        cases.extend(shapes.iter().map(|&dims| linear_case(dtype, dims, 0)));
        cases.push(linear_case(dtype, [5, 6, 256], 32));
    }
    cases
}

/// A linear layer with `gap` elements between the rows of x and before the first.
fn linear_case(dtype: DType, [m, n, k]: [usize; 3], gap: usize) -> Case {
    let x = normals(m * (k + gap), 1);
    let w = encode(dtype, &normals(n * k, 2));
    let layout = match gap {
        0 => contiguous(&[m, k]),
        _ => contiguous(&[m, k + gap]).slice(1, gap, k).unwrap(),
    };
    let (x_bytes, w_layout) = (f32s(&x), contiguous(&[n, k]).transpose().unwrap());
    let inputs = [Operand(DType::F32, layout, &x_bytes), Operand(dtype, w_layout, &w)];
    let y = reference_f32(&Op::MatMul, &inputs, &[m, n]);
    Case::new(
        format!("linear {dtype} m={m} n={n} k={k} gap={gap}"),
        vec![Role::Out(y, LINEAR), Role::In(x_bytes.clone()), Role::In(w.clone())],
        move |kernels, b, out| {
            let x = BufView { buf: b[1], dtype: DType::F32, layout };
            let parts = &[LinearPart { w: b[2], y: b[0], n }];
            out.push(kernels.linear(&LinearArgs {
                x,
                w_dtype: dtype,
                parts,
                m,
                k,
                w_is_fixed: true,
                step: "case",
            })?);
            Ok(())
        },
    )
}

/// Several products that share x: narrow ones, ones wide enough for two columns per warp, and ones with
/// several rows.
pub fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in LINEAR_DTYPES {
        cases.push(products_case(dtype, 1, &[9, 3, 4], 256));
        cases.push(products_case(dtype, 9, &[5, 1, 2, 6], 256));
    }
    for dtype in [DType::F32, DType::BF16, DType::Q2_K, DType::IQ3_S] {
        // Products end between the two columns of a warp, and the last warps have no column.
        cases.push(products_case(dtype, 1, &[1533, 1540], 256));
    }
    cases.push(products_case(DType::F16, 1, &[2000, 1075], 35));
    cases
}

fn products_case(dtype: DType, m: usize, ns: &[usize], k: usize) -> Case {
    let x = f32s(&normals(m * k, 1));
    let mut roles = vec![Role::In(x.clone())];
    for (i, &n) in ns.iter().enumerate() {
        let w = encode(dtype, &normals(n * k, 2 + i as u64));
        let w_layout = contiguous(&[n, k]).transpose().unwrap();
        let inputs = [Operand(DType::F32, contiguous(&[m, k]), &x), Operand(dtype, w_layout, &w)];
        let y = reference_f32(&Op::MatMul, &inputs, &[m, n]);
        roles.extend([Role::Out(y, LINEAR), Role::In(w)]);
    }
    let ns = ns.to_vec();
    Case::new(format!("products {dtype} m={m} n={ns:?} k={k}"), roles, move |kernels, b, out| {
        let part = |(i, &n): (usize, &usize)| LinearPart { w: b[2 + 2 * i], y: b[1 + 2 * i], n };
        let parts: Vec<LinearPart> = ns.iter().enumerate().map(part).collect();
        let x = dense(b[0], &[m, k]);
        out.push(kernels.linear(&LinearArgs {
            x,
            w_dtype: dtype,
            parts: &parts,
            m,
            k,
            w_is_fixed: true,
            step: "case",
        })?);
        Ok(())
    })
}

pub fn gather() -> Vec<Case> {
    let case = |dtype: DType, d: usize, packed: bool| {
        let table = encode(dtype, &normals(11 * d, 3));
        let ids = i32s(&[3, 0, -1, 10, 3]);
        let inputs =
            [Operand(dtype, contiguous(&[11, d]), &table), Operand(DType::I32, contiguous(&[5]), &ids)];
        let y = reference_f32(&Op::GatherRows(DType::F32), &inputs, &[5, d]);
        let table = if packed { pack(dtype, &table, 11, d).unwrap() } else { table };
        Case::new(
            format!("gather_rows {dtype} d={d} packed={packed}"),
            vec![Role::Out(y, Tol::Bits), Role::In(table), Role::In(ids)],
            move |kernels, b, out| {
                let args = GatherRowsArgs {
                    table: b[1],
                    dtype,
                    packed,
                    ids: b[2],
                    y: b[0],
                    n_rows: 11,
                    d,
                    n_ids: 5,
                    step: "case",
                };
                out.push(kernels.gather_rows(&args)?);
                Ok(())
            },
        )
    };
    let mut cases: Vec<Case> = LINEAR_DTYPES.iter().map(|&dtype| case(dtype, 768, false)).collect();
    cases.extend([
        case(DType::F32, 7, false),
        case(DType::F16, 33, false),
        case(DType::F16, 2049, false),
        case(DType::BF16, 4104, false),
        case(DType::F32, 2056, false),
        case(DType::IQ3_XXS, 256, false),
    ]);
    cases.extend(PACKED_DTYPES.iter().map(|&dtype| case(dtype, 1280, true)));
    cases.extend([case(DType::Q8_0, 32, true), case(DType::Q5_1, 576, true)]);
    cases
}

pub fn norms() -> Vec<Case> {
    let mut cases: Vec<Case> =
        [[1, 1], [7, 33], [3, 576], [2, 5000]].into_iter().map(|d| rms_case(contiguous(&d), false)).collect();
    cases.push(rms_case(contiguous(&[3, 64]), true));
    // Heads in a slice of a fused row, as in query norms.
    cases.push(rms_case(contiguous(&[3, 5, 16]).slice(1, 1, 3).unwrap(), false));
    for (dims, in_place) in [([1, 9], false), ([5, 300], false), ([4, 1024], true)] {
        cases.push(add_case(dims, in_place));
    }
    cases
}

fn rms_case(layout: Layout, in_place: bool) -> Case {
    let n_cols = layout.shape().dim_back(0);
    let n_rows = layout.shape().n_elements() / n_cols;
    // The view may cover part of a larger tensor.
    let (x, w) = (f32s(&normals(layout.end() + 7, 4)), f32s(&normals(n_cols, 5)));
    let inputs = [Operand(DType::F32, layout, &x), Operand(DType::F32, contiguous(&[n_cols]), &w)];
    let y = reference_f32(&Op::RmsNorm { eps: 1e-5 }, &inputs, layout.shape().dims());
    let roles = match in_place {
        false => vec![Role::Out(y, NORM), Role::In(x), Role::In(w)],
        true => {
            let before = x[..4 * y.len()].to_vec();
            let both = Role::InOut { before, after: f32s(&y), dtype: DType::F32, tol: NORM };
            vec![both, Role::Scratch(0), Role::In(w)]
        }
    };
    Case::new(format!("rms_norm {} in_place={in_place}", layout.shape()), roles, move |kernels, b, out| {
        let x = BufView { buf: b[usize::from(!in_place)], dtype: DType::F32, layout };
        out.push(kernels.rms_norm(&RmsNormArgs {
            x,
            w: b[2],
            y: b[0],
            n_rows,
            n_cols,
            eps: 1e-5,
            step: "case",
        })?);
        Ok(())
    })
}

fn add_case(dims: [usize; 2], in_place: bool) -> Case {
    let [n_rows, n_cols] = dims;
    let n = n_rows * n_cols;
    let (a, b, w) = (f32s(&normals(n, 6)), f32s(&normals(n, 7)), f32s(&normals(n_cols, 8)));
    let layout = contiguous(&dims);
    let inputs = [
        Operand(DType::F32, layout, &a),
        Operand(DType::F32, layout, &b),
        Operand(DType::F32, contiguous(&[n_cols]), &w),
    ];
    let ty = refrain_graph::TensorType::new(DType::F32, shape(&dims));
    let mut outputs = [(ty, vec![0; 4 * n]), (ty, vec![0; 4 * n])];
    reference(&Op::AddRmsNorm { eps: 1e-6 }, &inputs, &mut outputs);
    let [(_, sum), (_, y)] = outputs;
    let out = |after: Vec<u8>, before: &[u8], tol| match in_place {
        false => Role::Out(crate::bed::decode(DType::F32, &after), tol),
        true => Role::InOut { before: before.to_vec(), after, dtype: DType::F32, tol },
    };
    let (sum, y) = (out(sum, &a, Tol::Bits), out(y, &b, NORM));
    Case::new(
        format!("add_rms_norm {dims:?} in_place={in_place}"),
        vec![sum, y, Role::In(a), Role::In(b), Role::In(w)],
        move |kernels, bufs, out| {
            let [a, b] = if in_place { [bufs[0], bufs[1]] } else { [bufs[2], bufs[3]] };
            let args = AddRmsNormArgs {
                a: dense(a, &dims),
                b: dense(b, &dims),
                w: bufs[4],
                sum: bufs[0],
                y: bufs[1],
                n_rows,
                n_cols,
                eps: 1e-6,
                step: "case",
            };
            out.push(kernels.add_rms_norm(&args)?);
            Ok(())
        },
    )
}
