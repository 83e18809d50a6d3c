//! Cases of low-rank adapters.

use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{LoraOp, Op, View};
use refrain_tensor::DType;

/// Rows, sequences, adapters, rank, columns of the map's input and of its output.
#[derive(Clone, Copy)]
struct Sizes {
    n: usize,
    n_seqs: usize,
    n_adapters: usize,
    rank: usize,
    n_in: usize,
    n_out: usize,
}

impl Sizes {
    /// Sequences of the rows, with padding rows, and their adapters. Some have none.
    fn indices(&self) -> [Arg; 2] {
        let seq = |row: usize| if row % 7 == 5 { -1 } else { (row * self.n_seqs / self.n.max(1)) as i32 };
        let adapter = |seq: usize| match seq % 3 {
            1 => -1,
            _ => (seq * 2 % self.n_adapters) as i32,
        };
        [
            Arg::ints([self.n], (0..self.n).map(seq).collect()),
            Arg::ints([self.n_seqs], (0..self.n_seqs).map(adapter).collect()),
        ]
    }

    fn name(&self) -> String {
        let Sizes { n, n_seqs, n_adapters, rank, n_in, n_out } = self;
        format!("{n} rows of {n_seqs}, {n_adapters} of rank {rank}, {n_in} to {n_out}")
    }
}

pub(super) fn cases() -> Vec<Case> {
    let small = Sizes { n: 5, n_seqs: 5, n_adapters: 3, rank: 4, n_in: 96, n_out: 40 };
    let sizes = [
        small,
        Sizes { n: 1, n_seqs: 1, n_adapters: 1, rank: 1, n_in: 1, n_out: 1 },
        // A prompt and decode rows; odd sizes.
        Sizes { n: 45, n_seqs: 4, n_adapters: 2, rank: 7, n_in: 67, n_out: 33 },
        // One sequence with many rows.
        Sizes { n: 70, n_seqs: 1, n_adapters: 2, rank: 16, n_in: 256, n_out: 131 },
        // A rank above a warp's lanes, and long rows.
        Sizes { n: 3, n_seqs: 3, n_adapters: 4, rank: 72, n_in: 1032, n_out: 200 },
    ];
    let mut cases = Vec::new();
    for (sizes, dtype) in sizes.iter().flat_map(|sizes| super::FLOATS.map(|dtype| (sizes, dtype))) {
        let Sizes { n, n_adapters, rank, n_in, n_out, .. } = *sizes;
        let [seqs, adapters] = sizes.indices();
        let (tol, name) = (Tol::Whole(2e-6), format!("{dtype}, {}", sizes.name()));
        let a = Arg::weight(dtype, [n_adapters, rank, n_in]);
        let args = vec![Arg::float(DType::F32, [n, n_in]), a, seqs.clone(), adapters.clone()];
        cases.push(Case::one_node(name.clone(), Op::Lora(LoraOp::Down), tol, args));
        let (y, t) = (Arg::float(DType::F32, [n, n_out]), Arg::float(DType::F32, [n, rank]));
        let args = vec![y, t, Arg::weight(dtype, [n_adapters, rank, n_out]), seqs, adapters];
        cases.push(Case::one_node(name, Op::Lora(LoraOp::Up), tol, args));
    }
    // The maps of one input share a product: each takes its columns of `t`.
    let Sizes { n, n_adapters, rank, n_out, .. } = small;
    let [seqs, adapters] = small.indices();
    let columns = View::Slice { axis: 1, start: rank, len: rank };
    let t = Arg::float(DType::F32, [n, 3 * rank]).view(columns);
    let y = Arg::float(DType::F32, [n, n_out]).fill(Fill::Outliers);
    let args = vec![y, t, Arg::weight(DType::F32, [n_adapters, rank, n_out]), seqs, adapters];
    cases.push(Case::one_node("columns of a shared product", Op::Lora(LoraOp::Up), Tol::Whole(2e-6), args));
    cases
}
