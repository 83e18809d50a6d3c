//! What a training step multiplies and attends: values in any layout, rows in documents.

use refrain_graph::{Op, TensorType};
use refrain_kernels::{MatMulArgs, View};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, normals, reference, shape};

/// Sums in f32 against f64, and one rounding to the dtype.
fn rounded_once(dtype: DType) -> Tol {
    Tol::Whole(5e-6).rounded_to(dtype)
}

/// An output whose elements have another size than four bytes.
fn out(bytes: Vec<u8>, dtype: DType, tol: Tol) -> Role {
    Role::InOut { before: vec![0xcd; bytes.len()], after: bytes, dtype, tol }
}

pub fn matmul() -> Vec<Case> {
    let mut cases = Vec::new();
    let turned = |dims: &[usize]| contiguous(dims).transpose().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Aligned and not, whole tiles and tails, one of everything.
        for (m, k, n) in [(1, 1, 1), (5, 33, 7), (64, 64, 128), (72, 136, 136), (67, 70, 131)] {
            for (a, b) in [
                (contiguous(&[m, k]), contiguous(&[k, n])),
                (contiguous(&[m, k]), turned(&[n, k])),
                (turned(&[k, m]), contiguous(&[k, n])),
                (turned(&[k, m]), turned(&[n, k])),
            ] {
                cases.push(matmul_case(dtype, a, b));
            }
        }
        // Parts of wider rows, at even and odd places.
        for start in [8, 3] {
            let a = contiguous(&[40, 96]).slice(1, start, 72).unwrap();
            let b = contiguous(&[72, 160]).slice(1, start, 130).unwrap();
            cases.push(matmul_case(dtype, a, b));
            let b = contiguous(&[130, 96]).slice(1, start, 72).unwrap().transpose().unwrap();
            cases.push(matmul_case(dtype, a, b));
        }
        // Every second element; one row again and again.
        let every_second = contiguous(&[9, 40, 2]).slice(2, 1, 1).unwrap().reshape(shape(&[9, 40])).unwrap();
        cases.push(matmul_case(dtype, every_second, contiguous(&[40, 11])));
        let repeated = contiguous(&[1, 40]).broadcast_to(shape(&[9, 40])).unwrap();
        cases.push(matmul_case(dtype, repeated, turned(&[11, 40])));
        // Batches: of their own, of one matrix for all on either side, of heads in the middle.
        cases.push(matmul_case(dtype, contiguous(&[3, 5, 7]), contiguous(&[3, 7, 9])));
        cases.push(matmul_case(dtype, contiguous(&[3, 5, 24]), contiguous(&[24, 9])));
        cases.push(matmul_case(dtype, contiguous(&[5, 8]), contiguous(&[2, 3, 8, 9])));
        let heads = contiguous(&[2, 5, 3, 16]).permute(&[0, 2, 1, 3]).unwrap();
        let keys = contiguous(&[2, 6, 3, 16]).permute(&[0, 2, 3, 1]).unwrap();
        cases.push(matmul_case(dtype, heads, keys));
        cases.push(matmul_case(dtype, heads, contiguous(&[2, 1, 16, 10])));
    }
    cases
}

fn matmul_case(dtype: DType, a: Layout, b: Layout) -> Case {
    let [left, right] = [(a, 1), (b, 2)].map(|(l, seed)| encode(dtype, &normals(l.end(), seed)));
    let inputs = [Operand(dtype, a, &left), Operand(dtype, b, &right)];
    let operand = |l: &Layout| TensorType { dtype, shape: l.shape() };
    let ty = Op::MatMul.infer(&[operand(&a), operand(&b)]).unwrap()[0];
    let mut outputs = [(ty, vec![0; dtype.block_bytes() * ty.shape.n_elements()])];
    reference(&Op::MatMul, &inputs, &mut outputs);
    let [(_, y)] = outputs;
    let name = format!("matmul {dtype} {a:?} by {b:?}");
    let roles = vec![out(y, dtype, rounded_once(dtype)), Role::In(left), Role::In(right)];
    Case::new(name, roles, move |kernels, bufs, launches| {
        let (a, b) = (View { buf: bufs[1], dtype, layout: a }, View { buf: bufs[2], dtype, layout: b });
        launches.push(kernels.matmul(&MatMulArgs { a, b, y: bufs[0], step: "case" })?);
        Ok(())
    })
}
