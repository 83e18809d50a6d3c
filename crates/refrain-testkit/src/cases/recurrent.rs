//! Cases of recurrent layers: sequences that start, that continue in a second node, and that have padding
//! around them.

use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::{Fill, Rng};
use refrain_graph::{
    GatedDelta, GraphBuilder, GraphError, KeyHeads, Op, Recurrent, ShortConv, ValueId, View,
};
use refrain_tensor::DType;

/// Chunks of several sequences: each has rows in a first node and continues in a second one, which reads the
/// state that the first wrote.
struct SequenceChunks {
    name: &'static str,
    /// Rows of each sequence in the two nodes.
    rows: &'static [[usize; 2]],
    /// Padding after the rows of each node.
    n_padding: usize,
}

const CHUNKS: [SequenceChunks; 4] = [
    SequenceChunks { name: "one token after one", rows: &[[1, 1]], n_padding: 0 },
    SequenceChunks { name: "a prompt, then a token", rows: &[[7, 1]], n_padding: 1 },
    SequenceChunks {
        name: "prompts and tokens of several",
        rows: &[[2, 5], [1, 1], [6, 2], [1, 3]],
        n_padding: 3,
    },
    SequenceChunks {
        name: "pieces shorter and longer than the filter",
        rows: &[[3, 2], [4, 9]],
        n_padding: 0,
    },
];

const N_SPARE: usize = 3;

impl SequenceChunks {
    fn n_slots(&self) -> usize {
        2 * self.rows.len() + N_SPARE
    }

    /// Positions, sequences and slots of a node. Slots are shuffled. The second node reads the slot that the
    /// first one wrote; an odd first position swaps the columns of the table.
    fn paging(&self, node: usize) -> (usize, [Arg; 3]) {
        let order = Rng::new(11).shuffled(self.n_slots());
        let (mut positions, mut seqs, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        for (seq, rows) in self.rows.iter().enumerate() {
            let first = if node == 0 { 0 } else { rows[0] };
            positions.extend((first..first + rows[node]).map(|p| p as i32));
            seqs.extend((0..rows[node]).map(|_| seq as i32));
            let (read, write) = (order[2 * seq + node] as i32, order[2 * seq + 1 - node] as i32);
            slots.extend(if first % 2 == 0 { [read, write] } else { [write, read] });
        }
        positions.extend((0..self.n_padding).map(|_| -1));
        seqs.extend((0..self.n_padding).map(|_| 0));
        let (n, n_seqs) = (positions.len(), self.rows.len());
        (n, [Arg::ints([n], positions), Arg::ints([n], seqs), Arg::ints([n_seqs, 2], slots)])
    }

    /// Two nodes over one state. `rows` builds the operands that vary by row, `shared` are the others.
    fn case(
        &self,
        name: String,
        op: Recurrent,
        tol: Tol,
        state: Arg,
        rows: impl Fn(usize) -> Vec<Arg>,
        shared: Vec<Arg>,
    ) -> Case {
        let mut args = vec![state];
        let n_shared = shared.len();
        args.extend(shared);
        let mut n_own = 0;
        for node in 0..2 {
            let (n, paging) = self.paging(node);
            let own = rows(n);
            n_own = own.len();
            args.extend(own);
            args.extend(paging);
        }
        let build = move |b: &mut GraphBuilder, values: &[ValueId]| -> Result<Vec<ValueId>, GraphError> {
            let shared = &values[1..1 + n_shared];
            let mut state = values[0];
            let mut outputs = Vec::new();
            for (node, own) in values[1 + n_shared..].chunks_exact(n_own + 3).enumerate() {
                let (rows, paging) = own.split_at(n_own);
                let inputs = [&[state], rows, shared, paging].concat();
                let made = b.node(Op::Recurrent(op), &inputs, ["first", "second"][node])?;
                outputs.push(made[0]);
                state = made[1];
            }
            outputs.push(state);
            Ok(outputs)
        };
        Case::build(name, Op::Recurrent(op), tol, args, build)
    }
}

/// Filter weights.
fn filter(width: usize, d: usize) -> Arg {
    Arg::weight(DType::F32, [width * d]).view(View::Reshape([width, d].into()))
}

pub(super) fn short_conv() -> Vec<Case> {
    let mut cases = Vec::new();
    for chunks in &CHUNKS {
        for (dtype, d, width, silu) in [
            (DType::F32, 1, 4, true),
            (DType::F32, 37, 4, true),
            (DType::F32, 130, 3, false),
            (DType::F32, 8, 2, false),
            (DType::BF16, 66, 4, true),
        ] {
            let state = Arg::slots([chunks.n_slots(), width - 1, d]);
            let name = format!("{dtype}, {d} channels, width {width}, silu {silu}: {}", chunks.name);
            let op = Recurrent::ShortConv(ShortConv { silu });
            let w = filter(width, d);
            // The state between nodes is not rounded.
            let tol = Tol::Whole(2e-6).rounded_to(dtype);
            cases.push(chunks.case(name, op, tol, state, |n| vec![Arg::float(dtype, [n, d])], vec![w]));
        }
    }
    let op = Recurrent::ShortConv(ShortConv { silu: true });
    let seen =
        |n: usize| vec![Arg::float(DType::F32, [n, 40]).view(View::Slice { axis: 1, start: 8, len: 24 })];
    let (state, w) = (Arg::slots([CHUNKS[2].n_slots(), 3, 24]), filter(4, 24));
    cases.push(CHUNKS[2].case(
        "F32, some columns of its rows".into(),
        op,
        Tol::Whole(2e-6),
        state,
        seen,
        vec![w],
    ));
    cases
}

struct DeltaHeads {
    n_key_heads: usize,
    n_heads: usize,
    k_dim: usize,
    v_dim: usize,
    key_heads: KeyHeads,
    dtype: DType,
    /// Whether all heads are parts of one row, as a convolution outputs them.
    joined: bool,
}

pub(super) fn gated_delta() -> Vec<Case> {
    use KeyHeads::{Grouped, Tiled};
    let heads = |n_key_heads, n_heads, k_dim, v_dim, key_heads| {
        let (dtype, joined) = (DType::F32, false);
        DeltaHeads { n_key_heads, n_heads, k_dim, v_dim, key_heads, dtype, joined }
    };
    let shapes = [
        heads(1, 1, 1, 1, Grouped),
        heads(2, 4, 16, 24, Grouped),
        DeltaHeads { joined: true, ..heads(2, 6, 20, 9, Tiled) },
        DeltaHeads { joined: true, ..heads(1, 2, 128, 128, Grouped) },
        DeltaHeads { dtype: DType::BF16, ..heads(2, 4, 40, 8, Tiled) },
        heads(1, 1, 200, 3, Grouped),
    ];
    let mut cases = Vec::new();
    for shape in &shapes {
        for chunks in &CHUNKS {
            cases.push(delta_case(shape, chunks, 1.0, "as usual"));
        }
    }
    // Gates that forget everything and nothing, and zero keys.
    for (gates, name) in [(40.0, "gates at their ends"), (0.0, "gates in the middle")] {
        cases.push(delta_case(&shapes[1], &CHUNKS[2], gates, name));
    }
    cases
}

fn delta_case(shape: &DeltaHeads, chunks: &SequenceChunks, gates: f32, values: &str) -> Case {
    let &DeltaHeads { n_key_heads, n_heads, k_dim, v_dim, key_heads, dtype, joined } = shape;
    let delta = GatedDelta { scale: (k_dim as f32).powf(-0.5), eps: 1e-6, key_heads };
    let name = format!(
        "{dtype}, {n_heads} heads of {v_dim}, {n_key_heads} key heads of {k_dim} {key_heads:?}, {values}: {}",
        chunks.name
    );
    let rows = |n: usize| {
        let (keys, own) = (n_key_heads * k_dim, n_heads * v_dim);
        let part = |start: usize, len: usize, dims: [usize; 3]| match joined {
            true => Arg::float(dtype, [n, 2 * keys + own + 3])
                .view(View::Slice { axis: 1, start, len })
                .view(View::Reshape(dims.into())),
            false => Arg::float(dtype, dims),
        };
        let gate = || Arg::float(DType::F32, [n, n_heads]).fill(Fill::Uniform(-gates, gates));
        vec![
            part(3, keys, [n, n_key_heads, k_dim]),
            part(3 + keys, keys, [n, n_key_heads, k_dim]),
            part(3 + 2 * keys, own, [n, n_heads, v_dim]),
            gate(),
            gate(),
        ]
    };
    let shared = vec![
        Arg::weight(DType::F32, [n_heads]).fill(Fill::Uniform(-8.0, -0.01)),
        Arg::weight(DType::F32, [n_heads]),
    ];
    let state = Arg::slots([chunks.n_slots(), n_heads, v_dim, k_dim]);
    chunks.case(name, Recurrent::GatedDelta(delta), Tol::Whole(1e-5).rounded_to(dtype), state, rows, shared)
}
