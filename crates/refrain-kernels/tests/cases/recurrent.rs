//! Cases of recurrent layers whose slots already hold a state.

use refrain_driver::{Buf, MemoryLayout};
use refrain_graph::{GatedDelta, KeyHeads, Op, Recurrent, ShortConv, TensorType};
use refrain_kernels::{BufView, GatedDeltaArgs, ShortConvArgs, SlotArgs};
use refrain_tensor::{DType, Layout};
use refrain_testkit::Tol;

use crate::bed::{Bed, Case, Operand, Role, contiguous, dense, f32s, i32s, normals, reference, shape};

/// Sums of up to 256 products, and a sigmoid.
const TOL: Tol = Tol::Whole(2e-5);

/// Rows of several sequences, with padding among and after them.
struct Rows {
    positions: Vec<i32>,
    seqs: Vec<i32>,
    slots: Vec<i32>,
    n_slots: usize,
}

/// Builds rows from one chunk per sequence, each given by its first position and number of rows, followed by
/// padding rows at position -1.
fn rows(chunks: &[(i32, usize)], n_padding: usize, n_unused: usize) -> Rows {
    let n_seqs = chunks.len() + n_unused;
    let n_slots = 2 * n_seqs + 1;
    let (mut positions, mut seqs) = (Vec::new(), Vec::new());
    for (seq, &(first, n)) in chunks.iter().enumerate() {
        positions.extend(first..first + n as i32);
        seqs.extend(vec![seq as i32; n]);
        if seq == 0 {
            // A row that has ended, in the middle of a run.
            positions.push(-1);
            seqs.push(chunks.len() as i32 - 1);
        }
    }
    positions.extend(vec![-1; n_padding]);
    seqs.extend(vec![0; n_padding]);
    // Slots in reverse order; one sequence of several has none.
    let has_none = |seq: usize| chunks.len() > 2 && seq + 1 == chunks.len();
    let slots = (0..2 * n_seqs).map(|i| if has_none(i / 2) { -1 } else { (n_slots - 1 - i) as i32 });
    Rows { positions, seqs, slots: slots.collect(), n_slots }
}

fn shapes_of_rows() -> Vec<(&'static str, Rows)> {
    vec![
        ("one token", rows(&[(0, 1)], 0, 0)),
        ("one token after others", rows(&[(7, 1)], 0, 0)),
        ("a prompt of 70", rows(&[(0, 70)], 3, 0)),
        ("a chunk of 33 at an odd position", rows(&[(5, 33)], 0, 0)),
        several(),
        ("only padding", rows(&[], 2, 1)),
    ]
}

fn several() -> (&'static str, Rows) {
    ("several", rows(&[(4, 1), (0, 3), (9, 5), (11, 2), (0, 1), (3, 1)], 5, 1))
}

impl Rows {
    fn n(&self) -> usize {
        self.positions.len()
    }

    fn operands(&self) -> [Vec<u8>; 3] {
        [i32s(&self.positions), i32s(&self.seqs), i32s(&self.slots)]
    }

    fn args(&self, b: &[refrain_driver::Buf]) -> SlotArgs {
        let (n_tokens, n_seqs, n_slots) = (self.n(), self.slots.len() / 2, self.n_slots);
        SlotArgs { state: b[1], positions: b[2], seqs: b[3], slots: b[4], n_tokens, n_seqs, n_slots }
    }
}

pub fn short_conv() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, rows) in shapes_of_rows() {
        cases.push(conv_case(name, rows, 37, 4, true));
    }
    for (d, width, silu) in [(1, 2, false), (130, 3, true), (40, 8, false)] {
        let (name, rows) = several();
        cases.push(conv_case(name, rows, d, width, silu));
    }
    cases
}

fn conv_case(name: &str, rows: Rows, d: usize, width: usize, silu: bool) -> Case {
    let (n, conv) = (rows.n(), ShortConv { silu });
    // Some columns of wider rows.
    let layout = contiguous(&[n, d + 5]).slice(1, 3, d).unwrap();
    let x = f32s(&normals(n * (d + 5), 1));
    let w = f32s(&normals(width * d, 2));
    let state_dims = [rows.n_slots, width - 1, d];
    let before = f32s(&normals(state_dims.iter().product(), 3));
    let [positions, seqs, slots] = rows.operands();
    let inputs = [
        Operand(DType::F32, layout, &x),
        Operand(DType::F32, contiguous(&[width, d]), &w),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[slots.len() / 8, 2]), &slots),
    ];
    let (y, after) = run_reference(Recurrent::ShortConv(conv), &inputs, &[n, d], &state_dims, &before);
    let state = Role::InOut { before, after, dtype: DType::F32, tol: TOL };
    let roles = vec![
        Role::Out(y, TOL),
        state,
        Role::In(positions),
        Role::In(seqs),
        Role::In(slots),
        Role::In(x),
        Role::In(w),
    ];
    Case::new(format!("short_conv d={d} width={width}: {name}"), roles, move |kernels, b, out| {
        let (slots, x) = (rows.args(b), BufView { buf: b[5], dtype: DType::F32, layout });
        out.push(kernels.short_conv(&ShortConvArgs {
            slots,
            x,
            w: b[6],
            y: b[0],
            d,
            width,
            conv,
            step: "case",
        })?);
        Ok(())
    })
}

pub fn gated_delta() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, rows) in shapes_of_rows() {
        cases.push(delta_case(name, rows, [2, 6], [20, 18], KeyHeads::Tiled));
    }
    for (heads, k_dim, v_dim, key_heads) in [
        ([1, 1], 1, 1, KeyHeads::Grouped),
        ([2, 4], 64, 7, KeyHeads::Grouped),
        ([1, 2], 128, 17, KeyHeads::Grouped),
        ([1, 1], 200, 5, KeyHeads::Tiled),
    ] {
        let (name, rows) = several();
        cases.push(delta_case(name, rows, heads, [k_dim, v_dim], key_heads));
    }
    cases
}

fn delta_case(
    name: &str,
    rows: Rows,
    [n_key_heads, n_heads]: [usize; 2],
    [k_dim, v_dim]: [usize; 2],
    key_heads: KeyHeads,
) -> Case {
    let n = rows.n();
    let delta = GatedDelta { scale: (k_dim as f32).powf(-0.5), eps: 1e-6, key_heads };
    let (keys, values) = (n_key_heads * k_dim, n_heads * v_dim);
    let width = 2 * keys + values;
    // Queries, keys and values as a convolution outputs them: parts of one row.
    let x = f32s(&normals(n * width, 1));
    let part = |start: usize, heads: usize, dim: usize| -> Layout {
        let columns = contiguous(&[n, width]).slice(1, start, heads * dim).unwrap();
        columns.reshape(shape(&[n, heads, dim])).unwrap()
    };
    let layouts =
        [part(0, n_key_heads, k_dim), part(keys, n_key_heads, k_dim), part(2 * keys, n_heads, v_dim)];
    let (a, b) = (f32s(&normals(n * n_heads, 2)), f32s(&normals(n * n_heads, 4)));
    let decay: Vec<f32> = normals(n_heads, 5).iter().map(|x| -0.3 * x.abs()).collect();
    let (decay, dt_bias) = (f32s(&decay), f32s(&normals(n_heads, 6)));
    let state_dims = [rows.n_slots, n_heads, v_dim, k_dim];
    let before = f32s(&normals(state_dims.iter().product(), 7));
    let [positions, seqs, slots] = rows.operands();
    let gate = contiguous(&[n, n_heads]);
    let inputs = [
        Operand(DType::F32, layouts[0], &x),
        Operand(DType::F32, layouts[1], &x),
        Operand(DType::F32, layouts[2], &x),
        Operand(DType::F32, gate, &a),
        Operand(DType::F32, gate, &b),
        Operand(DType::F32, contiguous(&[n_heads]), &decay),
        Operand(DType::F32, contiguous(&[n_heads]), &dt_bias),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[slots.len() / 8, 2]), &slots),
    ];
    let op = Recurrent::GatedDelta(delta);
    let (y, after) = run_reference(op, &inputs, &[n, n_heads, v_dim], &state_dims, &before);
    let state = Role::InOut { before, after, dtype: DType::F32, tol: TOL };
    let mut roles = vec![Role::Out(y, TOL), state];
    roles.extend([positions, seqs, slots, x, a, b, decay, dt_bias].map(Role::In));
    let name =
        format!("gated_delta {n_heads}/{n_key_heads} heads of {k_dim} and {v_dim} {key_heads:?}: {name}");
    Case::new(name, roles, move |kernels, bufs, out| {
        let view = |buf, layout| BufView { buf, dtype: DType::F32, layout };
        out.push(kernels.gated_delta(&GatedDeltaArgs {
            slots: rows.args(bufs),
            q: view(bufs[5], layouts[0]),
            k: view(bufs[5], layouts[1]),
            v: view(bufs[5], layouts[2]),
            a: view(bufs[6], gate),
            b: view(bufs[7], gate),
            decay: bufs[8],
            dt_bias: bufs[9],
            y: bufs[0],
            n_key_heads,
            n_heads,
            k_dim,
            v_dim,
            delta,
            step: "case",
        })?);
        Ok(())
    })
}

/// Returns the output and the state afterwards.
fn run_reference(
    op: Recurrent,
    inputs: &[Operand<'_>],
    y_dims: &[usize],
    state_dims: &[usize],
    before: &[u8],
) -> (Vec<f32>, Vec<u8>) {
    let y_type = TensorType::new(DType::F32, shape(y_dims));
    let y = vec![0; 4 * y_type.shape.n_elements()];
    let mut outputs = [(y_type, y), (TensorType::new(DType::F32, shape(state_dims)), before.to_vec())];
    reference(&Op::Recurrent(op), inputs, &mut outputs);
    let [(_, y), (_, after)] = outputs;
    (crate::bed::decode(DType::F32, &y), after)
}

/// A prompt has the same bits in one launch and in several.
pub fn same_bits_however_split(bed: &mut Bed) {
    let ([n_key_heads, n_heads], k_dim, v_dim, n) = ([2, 4], 100, 20, 45);
    let (keys, values) = (n_key_heads * k_dim, n_heads * v_dim);
    let slot = n_heads * v_dim * k_dim;
    let inputs = [keys, keys, values, n_heads, n_heads].map(|width| normals(n * width, width as u64));
    let mut layout = MemoryLayout::new("split");
    let words =
        [n * keys, n * keys, n * values, n * n_heads, n * n_heads, n_heads, n, n, 4, n * values, 2 * slot];
    let regions = words.map(|words| layout.device("words", 4 * words as u64));
    let memory = bed.plan(&layout);
    let [q, k, v, a, b, vector, positions, seqs, slots, y, state] = regions.map(|region| memory.buf(region));
    let mut lease = memory.lease().unwrap();
    for (buf, values) in [q, k, v, a, b].into_iter().zip(&inputs) {
        bed.stream.upload(&mut lease, buf, &f32s(values)).unwrap();
    }
    bed.stream.upload(&mut lease, vector, &f32s(&vec![-0.3; n_heads])).unwrap();
    bed.stream.upload(&mut lease, positions, &i32s(&(0..n as i32).collect::<Vec<_>>())).unwrap();
    bed.stream.upload(&mut lease, seqs, &i32s(&vec![0; n])).unwrap();
    bed.stream.upload(&mut lease, slots, &i32s(&[0, 1, 1, 0])).unwrap();
    let mut run = |splits: &[usize]| {
        bed.stream.upload(&mut lease, state, &f32s(&normals(2 * slot, 7))).unwrap();
        let mut first = 0;
        let mut launches = Vec::new();
        for (i, &rows) in splits.iter().enumerate() {
            // A launch reads what the one before wrote: slot i % 2, whatever the parity of its first position.
            let slots = slots.slice(8 * ((i + first) % 2) as u64, 8).unwrap();
            let part = |buf: Buf, width: usize| {
                buf.slice((4 * first * width) as u64, (4 * rows * width) as u64).unwrap()
            };
            let view =
                |buf, dims: &[usize]| dense(part(buf, dims.iter().product()), &[&[rows], dims].concat());
            launches.push(
                bed.kernels
                    .gated_delta(&GatedDeltaArgs {
                        slots: SlotArgs {
                            state,
                            positions: part(positions, 1),
                            seqs: part(seqs, 1),
                            slots,
                            n_tokens: rows,
                            n_seqs: 1,
                            n_slots: 2,
                        },
                        q: view(q, &[n_key_heads, k_dim]),
                        k: view(k, &[n_key_heads, k_dim]),
                        v: view(v, &[n_heads, v_dim]),
                        a: view(a, &[n_heads]),
                        b: view(b, &[n_heads]),
                        decay: vector,
                        dt_bias: vector,
                        y: part(y, values),
                        n_key_heads,
                        n_heads,
                        k_dim,
                        v_dim,
                        delta: GatedDelta { scale: 0.1, eps: 1e-6, key_heads: KeyHeads::Tiled },
                        step: "split",
                    })
                    .unwrap(),
            );
            first += rows;
        }
        let out = bed
            .stream
            .run(&mut lease, false, |queue| launches.iter().try_for_each(|l| queue.launch(l)))
            .unwrap();
        let rows: Vec<u32> = out.values(&mut bed.stream, y).unwrap();
        let states: Vec<u32> = out.values(&mut bed.stream, state).unwrap();
        (rows, states[splits.len() % 2 * slot..][..slot].to_vec())
    };
    let whole = run(&[n]);
    for splits in [&[1, 44][..], &[16, 29], &[19, 7, 19], &[1, 1, 43], &[44, 1]] {
        assert!(run(splits) == whole, "{splits:?}");
    }
}
