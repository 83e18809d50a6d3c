//! Cases of batched-decode GEMM: many rows times packed or 16-bit weights.

use half::{bf16, f16};
use refrain_graph::{Gate, Op};
use refrain_kernels::{BatchArgs, LinearPart, Narrow, PACKED_DTYPES, pack};
use refrain_tensor::DType;
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, decode, f32s, normals, reference_f32};

/// Weights near the midpoint of two 16-bit numbers may round either way.
const DECODED: Tol = Tol::Whole(3e-3);
/// For 16-bit results.
const NARROW: Tol = Tol::Whole(1e-2);

pub fn batch() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in PACKED_DTYPES {
        // Every kernel, with whole tiles, tails of every kind, several weights, and more splits than ring
        // slots. Kernels of different dtypes differ only in decoding, and a case takes long on the host.
        let (k, more) = (128.max(dtype.block_len()), matches!(dtype, DType::Q8_0 | DType::Q4_K));
        cases.push(case(dtype, 7, &[33, 16, 1, 7], 3 * k, 2, None));
        cases.push(case(dtype, 5, &[36, 36], k, 1, Some(Gate::Silu)));
        if more {
            cases.push(case(dtype, 27, &[20, 9], k, 1, None));
            cases.push(case(dtype, 41, &[10], k, 1, None));
            cases.push(case(dtype, 2, &[5], k, 1, None));
            cases.push(case(dtype, 8, &[20], 20 * k, 1, None));
            cases.push(divided_case(dtype, 16, &[70, 40], 7 * k, 3, None, false));
            cases.push(case(dtype, 11, &[128, 128], 5 * k, 3, Some(Gate::GeluTanh)));
            cases.push(case(dtype, 32, &[129], 5 * k, 2, None));
            cases.push(case(dtype, 64, &[20], 7 * k, 4, None));
            cases.push(divided_case(dtype, 64, &[130], 5 * k, 2, None, false));
            cases.push(case(dtype, 33, &[68, 68], k, 1, Some(Gate::Silu)));
        }
    }
    for dtype in [DType::BF16, DType::F16] {
        cases.push(case(dtype, 7, &[33, 16, 1, 7], 384, 1, None));
        cases.push(case(dtype, 5, &[36, 36], 128, 1, Some(Gate::Silu)));
        cases.push(case(dtype, 2, &[128, 128], 1152, 2, Some(Gate::GeluTanh)));
        cases.push(case(dtype, 8, &[70], 2560, 3, None));
        // More tiles than blocks.
        cases.push(case(dtype, 8, &[4300], 128, 1, None));
        cases.push(case(dtype, 16, &[70, 40], 1664, 3, None));
        cases.push(case(dtype, 11, &[128, 128], 640, 1, Some(Gate::GeluTanh)));
        // More planes than slots, and odd numbers of planes.
        cases.push(case(dtype, 27, &[140, 9], 896, 1, None));
        cases.push(case(dtype, 33, &[68, 68], 384, 2, Some(Gate::Silu)));
        cases.push(case(dtype, 64, &[20], 128, 1, None));
    }
    cases.push(divided_case(DType::BF16, 16, &[70, 40], 1664, 3, None, false));
    // Several tiles of rows of x.
    cases.push(case(DType::Q4_K, 65, &[140], 512, 1, None));
    cases.push(case(DType::Q4_0, 130, &[20, 9], 384, 3, None));
    cases.push(case(DType::Q6_K, 129, &[128, 128], 256, 1, Some(Gate::Silu)));
    cases
}

/// Filler of unused plane rows: a number, so that planes can be compared.
const NOTHING: u8 = 0x3c;

/// Arranges 16-bit rows in planes, as the kernel reads them.
fn in_planes(x: &[u8], n_cols: usize, plane_rows: usize) -> Vec<u8> {
    let n_rows = (x.len() / 2 / n_cols).next_multiple_of(plane_rows);
    let mut planes = vec![NOTHING; 2 * n_rows * n_cols];
    for (i, bytes) in x.chunks_exact(2).enumerate() {
        let (row, column) = (i / n_cols, i % n_cols);
        // A plane has 16 chunks of all its rows, eight columns each, two from every 32.
        let (tile, plane) = (row / plane_rows, column / 128);
        let chunk = column % 32 / 2;
        let chunk = (tile * (n_cols / 128) + plane) * 16 + chunk;
        let at = (chunk * plane_rows + row % plane_rows) * 8 + column % 128 / 32 * 2 + column % 2;
        planes[2 * at..2 * at + 2].copy_from_slice(bytes);
    }
    planes
}

/// Decodes 4-bit weights like the kernel: the scale and the remaining minimum (8 * scale - min) are rounded
/// to 16 bits before quants minus 8 are multiplied.
pub fn four_bits(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
    let mut out = Vec::new();
    let mut push = |scale: f32, min: f32, quants: &mut dyn Iterator<Item = u8>| {
        let round = |v: f32| bf16::from_f32(v).to_f32();
        let (scale, left) = (round(scale), round(8.0 * scale - min));
        out.extend(quants.map(|q| round((f32::from(q) - 8.0) * scale + left)));
    };
    for block in bytes.chunks_exact(dtype.block_bytes()) {
        let d = half(block);
        let both = |quants: &[u8]| -> Vec<u8> {
            quants.iter().map(|b| b & 15).chain(quants.iter().map(|b| b >> 4)).collect()
        };
        match dtype {
            DType::Q4_0 => push(d, 8.0 * d, &mut both(&block[2..]).into_iter()),
            DType::Q4_1 => push(d, -half(&block[2..]), &mut both(&block[4..]).into_iter()),
            _ => {
                let (dmin, scales) = (half(&block[2..]), &block[4..16]);
                for j in 0..8 {
                    let (scale, min) = match j {
                        0..4 => (scales[j] & 63, scales[j + 4] & 63),
                        _ => (
                            scales[j + 4] & 15 | scales[j - 4] >> 6 << 4,
                            scales[j + 4] >> 4 | scales[j] >> 6 << 4,
                        ),
                    };
                    let quants = &block[16 + 32 * (j / 2)..][..32];
                    let shift = 4 * (j % 2);
                    let mut quants = quants.iter().map(|b| b >> shift & 15);
                    push(d * f32::from(scale), dmin * f32::from(min), &mut quants);
                }
            }
        }
    }
    out
}

fn case(dtype: DType, m: usize, ns: &[usize], k: usize, n_splits: usize, gate: Option<Gate>) -> Case {
    divided_case(dtype, m, ns, k, n_splits, gate, true)
}

fn divided_case(
    dtype: DType,
    m: usize,
    ns: &[usize],
    k: usize,
    n_splits: usize,
    gate: Option<Gate>,
    clustered: bool,
) -> Case {
    let is_plain = matches!(dtype, DType::BF16 | DType::F16);
    let rows = if dtype == DType::F16 { DType::F16 } else { DType::BF16 };
    let sums = if is_plain { Tol::Whole(5e-6) } else { DECODED };
    let plane_rows = [8, 16, 32, 64].into_iter().find(|&size| m <= size).unwrap_or(128);
    let x = encode(rows, &normals(m * k, 1));
    let x_values = f32s(&decode(rows, &x));
    let x = in_planes(&x, k, plane_rows);
    let (mut ys, mut weights) = (Vec::new(), Vec::new());
    for (i, &n) in ns.iter().enumerate() {
        let w = encode(dtype, &normals(n * k, 10 + i as u64));
        let values = match dtype {
            DType::Q4_0 | DType::Q4_1 | DType::Q4_K => f32s(&four_bits(dtype, &w)),
            _ => f32s(&decode(rows, &encode(rows, &decode(dtype, &w)))),
        };
        let layout = contiguous(&[n, k]).transpose().unwrap();
        let operands =
            [Operand(DType::F32, contiguous(&[m, k]), &x_values), Operand(DType::F32, layout, &values)];
        ys.push(reference_f32(&Op::MatMul, &operands, &[m, n]));
        weights.push(if is_plain { w } else { pack(dtype, &w, n, k).unwrap() });
    }
    let n_parts = ns.len();
    // Written in addition to the 16-bit rows.
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
            // Rows past m stay unchanged.
            let (before, dtype) = (vec![NOTHING; after.len()], rows);
            roles.push(Role::InOut { before, after, dtype, tol: NARROW });
            roles.push(if wide { Role::Out(y, NARROW) } else { Role::In(vec![0xcd; 4 * ys[1].len()]) });
        }
        None => {
            roles.extend(ys.iter().map(|y| Role::Out(y.clone(), sums)));
        }
    }
    roles.extend(weights.into_iter().map(Role::In));
    roles.push(Role::In(x));
    roles.push(Role::Scratch(4 * n_splits * m * ns.iter().sum::<usize>()));
    let ns = ns.to_vec();
    let name = format!("batch {dtype} m={m} n={ns:?} k={k} splits={n_splits} {gate:?} clustered={clustered}");
    Case::new(name, roles, move |kernels, b, out| {
        let (x, scratch) = (b[2 * n_parts], Some(b[2 * n_parts + 1]));
        let parts: Vec<LinearPart> =
            (0..n_parts).map(|i| LinearPart { w: b[n_parts + i], y: b[i], n: ns[i] }).collect();
        let parts: Vec<LinearPart> = match gate {
            Some(_) => parts.iter().map(|part| LinearPart { y: b[1], ..*part }).collect(),
            None => parts,
        };
        let plan = kernels.batch_plan(dtype, m, &ns, k, gate.is_some()).unwrap().with_splits(n_splits, k);
        let plan = if clustered { plan } else { plan.without_clusters() };
        let plane_rows = if ns[0].is_multiple_of(128) { plan.shape().0 } else { 0 };
        let to = Narrow { y: b[0], dtype: rows, plane_rows, also_wide: wide };
        let gate = gate.map(|kind| (kind, to));
        kernels.batch(&BatchArgs { x, dtype, parts: &parts, m, k, plan, scratch, gate, step: "case" }, out)
    })
}
