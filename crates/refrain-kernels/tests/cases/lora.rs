//! Cases of low-rank adapters.

use refrain_driver::Buf;
use refrain_graph::{LoraOp, Op};
use refrain_kernels::{BufView, LoraArgs};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, decode, dense, f32s, i32s, normals, reference_f32};

const TOL: Tol = Tol::Whole(2e-6);

/// Rows with the adapters of their sequences.
struct Rows {
    name: &'static str,
    seqs: Vec<i32>,
    adapters: Vec<i32>,
}

fn rows() -> Vec<Rows> {
    let prompts = |lens: &[usize]| -> Vec<i32> {
        lens.iter().enumerate().flat_map(|(seq, &n)| vec![seq as i32; n]).chain([-1, -1]).collect()
    };
    vec![
        Rows { name: "one row", seqs: vec![0], adapters: vec![2] },
        Rows { name: "one row without", seqs: vec![0], adapters: vec![-1] },
        Rows { name: "decode", seqs: vec![0, 1, 2, -1, 4], adapters: vec![1, -1, 2, 0, 1] },
        // Tiles with one adapter, with several, and with none.
        Rows { name: "prompts", seqs: prompts(&[61, 2, 1, 37, 3]), adapters: vec![0, 2, 1, -1, 2] },
    ]
}

/// Rank, inputs and outputs.
const SIZES: [[usize; 3]; 4] = [[1, 1, 1], [8, 264, 520], [5, 67, 33], [40, 96, 1024]];

pub fn lora() -> Vec<Case> {
    let mut cases = Vec::new();
    let all = rows();
    let pairs = all.iter().flat_map(|rows| SIZES.map(|sizes| (rows, sizes)));
    for (idx, (rows, sizes)) in pairs.enumerate() {
        // Every type with aligned rows and with odd ones.
        let dtype = [DType::F32, DType::F16, DType::BF16][idx % 3];
        cases.push(down(rows, dtype, sizes));
        cases.push(up(rows, dtype, sizes, idx % 2 == 0));
        cases.push(up(rows, DType::BF16, sizes, idx % 2 == 1));
    }
    cases
}

const N_ADAPTERS: usize = 3;

fn args<'a>(rows: &Rows, dtype: DType, [rank, width]: [usize; 2], b: [Buf; 3]) -> LoraArgs<'a> {
    let [factors, seqs, adapters] = b;
    let (n, n_seqs) = (rows.seqs.len(), rows.adapters.len());
    LoraArgs { factors, dtype, seqs, adapters, n, n_seqs, n_adapters: N_ADAPTERS, rank, width, step: "case" }
}

fn factors(dtype: DType, dims: [usize; 2], seed: u64) -> Vec<u8> {
    encode(dtype, &normals(N_ADAPTERS * dims[0] * dims[1], seed))
}

fn down(rows: &Rows, dtype: DType, [rank, d, _]: [usize; 3]) -> Case {
    let n = rows.seqs.len();
    // Some columns of wider rows.
    let layout = contiguous(&[n, d + 3]).slice(1, 2, d).unwrap();
    let (x, a) = (f32s(&normals(n * (d + 3), 1)), factors(dtype, [rank, d], 2));
    let (seqs, adapters) = (i32s(&rows.seqs), i32s(&rows.adapters));
    let inputs = [
        Operand(DType::F32, layout, &x),
        Operand(dtype, contiguous(&[N_ADAPTERS, rank, d]), &a),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[rows.adapters.len()]), &adapters),
    ];
    let t = reference_f32(&Op::Lora(LoraOp::Down), &inputs, &[n, rank]);
    let name = format!("lora_down {dtype} {rank} of {d}: {}", rows.name);
    let rows = Rows { seqs: rows.seqs.clone(), adapters: rows.adapters.clone(), ..*rows };
    let roles = vec![Role::Out(t, TOL), Role::In(x), Role::In(a), Role::In(seqs), Role::In(adapters)];
    Case::new(name, roles, move |kernels, b, out| {
        let x = BufView { buf: b[1], dtype: DType::F32, layout };
        out.push(kernels.lora_down(&args(&rows, dtype, [rank, d], [b[2], b[3], b[4]]), &x, b[0])?);
        Ok(())
    })
}

fn up(rows: &Rows, dtype: DType, [rank, _, f]: [usize; 3], in_place: bool) -> Case {
    let n = rows.seqs.len();
    let t_layout: Layout = contiguous(&[n, 3 * rank]).slice(1, rank, rank).unwrap();
    let (y0, t) = (f32s(&normals(n * f, 3)), f32s(&normals(n * 3 * rank, 4)));
    let b = factors(dtype, [rank, f], 5);
    let (seqs, adapters) = (i32s(&rows.seqs), i32s(&rows.adapters));
    let inputs = [
        Operand(DType::F32, contiguous(&[n, f]), &y0),
        Operand(DType::F32, t_layout, &t),
        Operand(dtype, contiguous(&[N_ADAPTERS, rank, f]), &b),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[rows.adapters.len()]), &adapters),
    ];
    let y = reference_f32(&Op::Lora(LoraOp::Up), &inputs, &[n, f]);
    let place = if in_place { "in place" } else { "beside" };
    let name = format!("lora_up {dtype} {rank} to {f} {place}: {}", rows.name);
    let rows = Rows { seqs: rows.seqs.clone(), adapters: rows.adapters.clone(), ..*rows };
    let result = match in_place {
        true => {
            let after = f32s(&y);
            assert_eq!(decode(DType::F32, &after), y);
            Role::InOut { before: y0.clone(), after, dtype: DType::F32, tol: TOL }
        }
        false => Role::Out(y, TOL),
    };
    let roles = vec![result, Role::In(y0), Role::In(t), Role::In(b), Role::In(seqs), Role::In(adapters)];
    Case::new(name, roles, move |kernels, b, out| {
        let t = BufView { buf: b[2], dtype: DType::F32, layout: t_layout };
        let y0 = dense(if in_place { b[0] } else { b[1] }, &[n, f]);
        out.push(kernels.lora_up(&args(&rows, dtype, [rank, f], [b[3], b[4], b[5]]), &t, &y0, b[0])?);
        Ok(())
    })
}
