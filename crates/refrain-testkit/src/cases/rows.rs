//! Cases of row ops: reductions, softmax, norms, gathers.

use super::{FLOATS, quantised};
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{Op, Reduce, View};
use refrain_tensor::DType;

/// Accumulators start at zero, like all states.
pub(super) fn accumulate() -> Vec<Case> {
    let case = |dims: [usize; 2]| {
        let args = vec![Arg::state(DType::F32, dims), Arg::float(DType::F32, dims).fill(Fill::Outliers)];
        Case::one_node(format!("{dims:?}"), Op::Accumulate, Tol::Whole(0.0), args)
    };
    [[1, 1], [7, 129], [3, 4097]].map(case).into()
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let tol = Tol::Whole(2e-6).rounded_to(dtype);
        for (dims, fill) in [
            ([1, 1], Fill::Normal),
            ([7, 129], Fill::Normal),
            ([3, 4097], Fill::Outliers),
            ([2, 31], Fill::Uniform(30.0, 31.0)),
        ] {
            let x = || Arg::float(dtype, dims).fill(fill.clone());
            for kind in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
                cases.push(Case::one_node(
                    format!("{dtype} {dims:?}"),
                    Op::Reduce { kind, axis: 1 },
                    tol,
                    vec![x()],
                ));
            }
            cases.push(Case::one_node(format!("{dtype} {dims:?}"), Op::Softmax, tol, vec![x()]));
            let w = || Arg::weight(DType::F32, [dims[1]]).fill(Fill::Uniform(0.5, 1.5));
            let norm = Op::RmsNorm { eps: 1e-5 };
            cases.push(Case::one_node(format!("{dtype} {dims:?}"), norm, tol, vec![x(), w()]));
            let add_norm = Op::AddRmsNorm { eps: 1e-6 };
            // The norm may use the sum before or after rounding to 16 bits.
            let tol = Tol::Whole(2e-6).rounded_to(dtype).rounded_to(dtype);
            cases.push(Case::one_node(format!("{dtype} {dims:?}"), add_norm, tol, vec![x(), x(), w()]));
        }
        let heads = Arg::float(dtype, [5, 2, 16]).view(View::Permute(vec![1, 0, 2]));
        let w = Arg::weight(dtype, [16]);
        let name = format!("{dtype} heads, permuted, weight in {dtype}");
        cases.push(Case::one_node(name, Op::RmsNorm { eps: 1e-6 }, tol, vec![heads, w]));
        cases.extend(gathers(dtype));
    }
    cases.extend(extremes());
    for dtype in quantised() {
        let d = 2 * dtype.block_len();
        let args = vec![Arg::weight(dtype, [11, d]), ids(11)];
        cases.push(Case::one_node(format!("{dtype} table"), Op::GatherRows(DType::F32), Tol::Bits, args));
    }
    cases
}

fn ids(below: usize) -> Arg {
    Arg::ints([9], vec![]).fill(Fill::Ids { below, gaps: true })
}

fn gathers(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for to in FLOATS {
        let args = vec![Arg::weight(dtype, [13, 33]), ids(13)];
        cases.push(Case::one_node(format!("{dtype} table to {to}"), Op::GatherRows(to), Tol::Bits, args));
    }
    let columns = Arg::weight(dtype, [13, 33]).view(View::Slice { axis: 1, start: 5, len: 7 });
    cases.push(Case::one_node(
        format!("{dtype} some columns"),
        Op::GatherRows(DType::F32),
        Tol::Bits,
        vec![columns, ids(13)],
    ));
    let transposed = Arg::weight(dtype, [7, 13]).view(View::Permute(vec![1, 0]));
    let op = Op::GatherRows(DType::F32);
    cases.push(Case::one_node(format!("{dtype} transposed table"), op, Tol::Bits, vec![transposed, ids(13)]));
    cases
}

/// Values at which a careless kernel overflows, divides by zero or forgets to subtract the maximum.
fn extremes() -> Vec<Case> {
    let tol = Tol::Whole(2e-6);
    let floats = |dims: [usize; 2], values: Vec<f32>| Arg::float(DType::F32, dims).fill(Fill::Floats(values));
    let masked = vec![f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 2.0, 3.0];
    let large = vec![1e4, 1e4 - 1.0, -1e4, 88.0, 0.0];
    let w = || Arg::weight(DType::F32, [5]);
    let norm = Op::RmsNorm { eps: 1e-5 };
    vec![
        Case::one_node("masked", Op::Softmax, tol, vec![floats([1, 5], masked.clone())]),
        Case::one_node("large", Op::Softmax, tol, vec![floats([1, 5], large)]),
        Case::one_node(
            "masked",
            Op::Reduce { kind: Reduce::Max, axis: 1 },
            Tol::Bits,
            vec![floats([1, 5], masked)],
        ),
        Case::one_node(
            "all negative",
            Op::Reduce { kind: Reduce::Max, axis: 1 },
            Tol::Bits,
            vec![floats([1, 3], vec![-3.0, -1.5, -2.0])],
        ),
        Case::one_node("zeros", norm.clone(), tol, vec![floats([2, 5], vec![0.0; 10]), w()]),
        Case::one_node("squares beyond half precision", norm, tol, vec![floats([1, 5], vec![1e5; 5]), w()]),
    ]
}
