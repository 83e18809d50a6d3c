//! Cases of several rows times packed weights.

use refrain_graph::Op;
use refrain_kernels::{FewArgs, FewPart, FewRowsArgs, PACKED_DTYPES, few_bytes, pack};
use refrain_tensor::DType;
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, decode, f32s, normals, reference_f32};

/// A quant halfway between two values may round either way: one step of the block's 127.
const ROUNDED: Tol = Tol::Whole(4e-3);

pub fn few() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in PACKED_DTYPES {
        let unit = dtype.block_len();
        for (m, ns, blocks) in [
            (1, &[5][..], 1),
            (2, &[16], 2),
            (5, &[33, 7, 9], 3),
            (8, &[24, 8], 5),
            (8, &[17], 18),
            (9, &[40], 4),
            (16, &[1, 15, 31], 9),
        ] {
            cases.push(case(dtype, m, ns, blocks * unit, 1.0));
        }
    }
    // More tile pairs than the simulated GPU has resident blocks, so that blocks process several; and rows of
    // many units.
    cases.push(case(DType::Q4_K, 8, &[4300, 200], 256, 1.0));
    cases.push(case(DType::Q8_0, 3, &[1100, 1200], 160, 1.0));
    for dtype in [DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        cases.push(case(dtype, 8, &[19], 8192 + 256, 1.0));
        cases.push(case(dtype, 11, &[19], 8192 + 256, 1.0));
    }
    cases.push(case(DType::Q5_0, 4, &[20], 96, 0.0));
    cases
}

fn rounded(x: &[f32]) -> Vec<f32> {
    let mut out = x.to_vec();
    for block in out.chunks_mut(32) {
        let most = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        if most > 0.0 {
            block.iter_mut().for_each(|v| *v = (*v * (127.0 / most)).round_ties_even() * (most / 127.0));
        }
    }
    out
}

/// Rows of normal numbers, the second one scaled by `second`.
fn case(dtype: DType, m: usize, ns: &[usize], k: usize, second: f32) -> Case {
    let mut x = normals(m * k, 1);
    x.iter_mut().skip(k).take(k).for_each(|v| *v *= second);
    let x_bytes = f32s(&rounded(&x));
    let mut roles = Vec::new();
    let mut weights = Vec::new();
    for (i, &n) in ns.iter().enumerate() {
        let w = encode(dtype, &normals(n * k, 10 + i as u64));
        let values = f32s(&decode(dtype, &w));
        let layout = contiguous(&[n, k]).transpose().unwrap();
        let operands =
            [Operand(DType::F32, contiguous(&[m, k]), &x_bytes), Operand(DType::F32, layout, &values)];
        roles.push(Role::Out(reference_f32(&Op::MatMul, &operands, &[m, n]), ROUNDED));
        weights.push(pack(dtype, &w, n, k).unwrap());
    }
    roles.extend(weights.into_iter().map(Role::In));
    roles.push(Role::In(f32s(&x)));
    roles.push(Role::Scratch(few_bytes(m, k).unwrap()));
    let ns = ns.to_vec();
    let name = format!("few {dtype} m={m} n={ns:?} k={k} second={second}");
    Case::new(name, roles, move |kernels, bufs, out| {
        let (n_parts, x, rows) = (ns.len(), bufs[2 * ns.len()], bufs[2 * ns.len() + 1]);
        let parts: Vec<FewPart> =
            (0..n_parts).map(|i| FewPart { w: bufs[n_parts + i], y: bufs[i], n: ns[i] }).collect();
        out.push(kernels.few_rows(&FewRowsArgs { x, rows, m, k, is_fixed: false, step: "case" })?);
        out.push(kernels.few(&FewArgs {
            rows,
            dtype,
            parts: &parts,
            m,
            k,
            is_fixed: false,
            step: "case",
        })?);
        Ok(())
    })
}
