//! The rows of many sequences times packed weights.

use refrain_graph::{Gate, Op};
use refrain_kernels::{BatchArgs, LinearPart, Narrow, PACKED_DTYPES, pack};
use refrain_tensor::DType;
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, decode, f32s, normals, reference_f32};

/// Weights that lie near the middle between two numbers of 16 bits may be rounded to the other.
const DECODED: Tol = Tol::Whole(2e-3);
/// Results in 16 bits.
const NARROW: Tol = Tol::Whole(8e-3);

pub fn batch() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in PACKED_DTYPES {
        // Every kernel, whole tiles and tails of every kind; several parts, and more splits than a ring has stages. Kernels
        // of a dtype differ in its decoding alone: on the host a case takes long.
        let (k, more) = (128.max(dtype.block_len()), matches!(dtype, DType::Q8_0 | DType::Q4_K));
        cases.push(case(dtype, 7, &[33, 16, 1, 7], 3 * k, 2, None));
        cases.push(case(dtype, 27, &[20, 9], k, 1, None));
        cases.push(case(dtype, 5, &[36, 36], k, 1, Some(Gate::Silu)));
        if more {
            cases.push(case(dtype, 13, &[65], k, 1, None));
            cases.push(case(dtype, 41, &[10], k, 1, None));
            cases.push(case(dtype, 2, &[5], k, 1, None));
            cases.push(case(dtype, 8, &[20], 20 * k, 1, None));
            cases.push(case(dtype, 16, &[70, 40], 7 * k, 3, None));
            cases.push(case(dtype, 11, &[128, 128], k, 1, Some(Gate::GeluTanh)));
            cases.push(case(dtype, 32, &[129], 5 * k, 2, None));
            cases.push(case(dtype, 64, &[130], 5 * k, 2, None));
            cases.push(case(dtype, 33, &[68, 68], k, 1, Some(Gate::Silu)));
        }
    }
    cases
}

/// What planes hold where there is no row: numbers, so that they can be compared.
const NOTHING: u8 = 0x3c;

/// Rows of 16 bits as the kernel takes them.
fn in_planes(x: &[u8], n_cols: usize, plane_rows: usize) -> Vec<u8> {
    let mut planes = vec![NOTHING; 2 * plane_rows * n_cols];
    for (i, bytes) in x.chunks_exact(2).enumerate() {
        let (row, column) = (i / n_cols, i % n_cols);
        let (lane, chunk) = (column % 128 / 32, column % 32 / 8);
        let placed = 4 * chunk + lane;
        let placed = if row % 2 == 1 { placed ^ 4 } else { placed };
        let at = (column / 128 * plane_rows + row) * 128 + 8 * placed + column % 8;
        planes[2 * at..2 * at + 2].copy_from_slice(bytes);
    }
    planes
}

fn case(dtype: DType, m: usize, ns: &[usize], k: usize, n_splits: usize, gate: Option<Gate>) -> Case {
    let rows = DType::BF16;
    let plane_rows = [8, 16, 32, 64].into_iter().find(|&size| m <= size).unwrap();
    let x = encode(rows, &normals(m * k, 1));
    let x_values = f32s(&decode(rows, &x));
    let x = in_planes(&x, k, plane_rows);
    let (mut ys, mut weights) = (Vec::new(), Vec::new());
    for (i, &n) in ns.iter().enumerate() {
        let w = encode(dtype, &normals(n * k, 10 + i as u64));
        let values = f32s(&decode(rows, &encode(rows, &decode(dtype, &w))));
        let layout = contiguous(&[n, k]).transpose().unwrap();
        let operands =
            [Operand(DType::F32, contiguous(&[m, k]), &x_values), Operand(DType::F32, layout, &values)];
        ys.push(reference_f32(&Op::MatMul, &operands, &[m, n]));
        weights.push(pack(dtype, &w, n, k).unwrap());
    }
    let n_parts = ns.len();
    // Beside the rows in 16 bits.
    let wide = m % 2 == 1;
    let mut roles = Vec::new();
    match gate {
        Some(kind) => {
            let [gate, up] = [f32s(&ys[0]), f32s(&ys[1])];
            let operand = |bytes| Operand(DType::F32, contiguous(&[m, ns[0]]), bytes);
            let y = reference_f32(&Op::Gate(kind), &[operand(&gate), operand(&up)], &[m, ns[0]]);
            let mut after = encode(rows, &y);
            if ns[0].is_multiple_of(128) {
                after = in_planes(&after, ns[0], plane_rows);
            }
            // What lies behind m is left as it is.
            let (before, dtype) = (vec![NOTHING; after.len()], rows);
            roles.push(Role::InOut { before, after, dtype, tol: NARROW });
            roles.push(if wide { Role::Out(y, NARROW) } else { Role::In(vec![0xcd; 4 * ys[1].len()]) });
        }
        None => {
            roles.extend(ys.iter().map(|y| Role::Out(y.clone(), DECODED)));
        }
    }
    roles.extend(weights.into_iter().map(Role::In));
    roles.push(Role::In(x));
    roles.push(Role::Scratch(4 * n_splits * m * ns.iter().sum::<usize>()));
    let ns = ns.to_vec();
    let name = format!("batch {dtype} m={m} n={ns:?} k={k} splits={n_splits} {gate:?}");
    Case::new(name, roles, move |kernels, b, out| {
        let (x, scratch) = (b[2 * n_parts], Some(b[2 * n_parts + 1]));
        let parts: Vec<LinearPart> =
            (0..n_parts).map(|i| LinearPart { w: b[n_parts + i], y: b[i], n: ns[i] }).collect();
        let parts: Vec<LinearPart> = match gate {
            Some(_) => parts.iter().map(|part| LinearPart { y: b[1], ..*part }).collect(),
            None => parts,
        };
        let plan = kernels.batch_plan(dtype, m, &ns, k, gate.is_some()).unwrap().with_splits(n_splits, k);
        let plane_rows = if ns[0].is_multiple_of(128) { plan.shape().0 } else { 0 };
        let to = Narrow { y: b[0], dtype: rows, plane_rows, also_wide: wide };
        let gate = gate.map(|kind| (kind, to));
        kernels.batch(&BatchArgs { x, dtype, parts: &parts, m, k, plan, scratch, gate, step: "case" }, out)
    })
}
