//! Cases of matrix products.

use super::{FLOATS, quantised};
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{Op, View};
use refrain_tensor::{DType, Shape};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let transposed = |dtype, n: usize, k: usize| Arg::weight(dtype, [n, k]).view(View::Permute(vec![1, 0]));
    for dtype in FLOATS {
        let tol = Tol::Whole(4e-6).rounded_to(dtype);
        for [m, k, n] in [[1, 1, 1], [1, 33, 7], [5, 129, 67], [17, 64, 3], [33, 96, 40], [0, 32, 5]] {
            for weight in FLOATS {
                let args = vec![Arg::float(dtype, [m, k]), transposed(weight, n, k)];
                let name = format!("{dtype} by {weight} weight, {m}x{k}x{n}");
                cases.push(Case::one_node(name, Op::MatMul, tol, args));
            }
        }
        let plain = vec![Arg::float(dtype, [5, 9]), Arg::float(dtype, [9, 11])];
        cases.push(Case::one_node(format!("{dtype} as it lies"), Op::MatMul, tol, plain));
        let swapped = |dims| Arg::float(dtype, dims).view(View::Permute(vec![1, 0]));
        let both = vec![swapped([9, 5]), swapped([11, 9])];
        cases.push(Case::one_node(format!("{dtype} both transposed"), Op::MatMul, tol, both));
        let batches = vec![Arg::float(dtype, [3, 1, 4, 5]), Arg::float(dtype, [2, 5, 6])];
        cases.push(Case::one_node(format!("{dtype} broadcast batches"), Op::MatMul, tol, batches));
        let heads = Arg::float(dtype, [6, 2, 8]).view(View::Permute(vec![1, 0, 2]));
        let repeated = Arg::float(dtype, [1, 8, 3]).view(View::Broadcast(Shape::from([2, 8, 3])));
        cases.push(Case::one_node(
            format!("{dtype} heads by a repeated view"),
            Op::MatMul,
            tol,
            vec![heads, repeated],
        ));
        let rows = Arg::float(dtype, [7, 40]).view(View::Slice { axis: 0, start: 6, len: 1 });
        let name = format!("{dtype} last row alone");
        cases.push(Case::one_node(name, Op::MatMul, tol, vec![rows, transposed(dtype, 19, 40)]));
    }
    for dtype in quantised() {
        let d = dtype.block_len();
        for [m, k, n] in [[1, 2 * d, 5], [3, d, 1], [9, 3 * d, 33]] {
            let args = vec![Arg::float(DType::F32, [m, k]), transposed(dtype, n, k)];
            cases.push(Case::one_node(
                format!("{dtype} weight, {m}x{k}x{n}"),
                Op::MatMul,
                Tol::Whole(4e-6),
                args,
            ));
        }
        let outliers = Arg::float(DType::F32, [2, 2 * d]).fill(Fill::Outliers);
        let args = vec![outliers, transposed(dtype, 7, 2 * d)];
        cases.push(Case::one_node(format!("{dtype} weight, outliers"), Op::MatMul, Tol::Whole(4e-6), args));
        // One projection as a slice of a fused weight.
        let part = Arg::weight(dtype, [12, d]).view(View::Slice { axis: 0, start: 5, len: 4 });
        let args = vec![Arg::float(DType::F32, [2, d]), part.view(View::Permute(vec![1, 0]))];
        cases.push(Case::one_node(format!("{dtype} rows of a weight"), Op::MatMul, Tol::Whole(4e-6), args));
    }
    cases
}
