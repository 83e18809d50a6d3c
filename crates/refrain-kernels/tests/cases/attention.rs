//! Cases of RoPE, KV append and attention over the cache.

use refrain_graph::{Attention, Op, Rope, RopeStyle, TensorType};
use refrain_kernels::{AttentionArgs, BufView, KvAppendArgs, RopeArgs, RopeKvArgs, attention_scratch_bytes};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Rng, Tol, encode};

use crate::bed::{
    Case, Operand, Role, contiguous, dense, f32s, i32s, normals, reference, reference_f32, shape,
};

/// Sine and cosine of an angle that was reduced in f64 and rounded to f32.
const ROPE: Tol = Tol::Whole(2e-6);
/// Two sums and an exponential in f32.
const ATTENTION: Tol = Tol::Whole(1e-5);

pub fn rope() -> Vec<Case> {
    let mut cases = Vec::new();
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for (n_dims, head_dim, magnitude) in
            [(64, 64, 1.0), (32, 80, 1.0), (2, 7, 0.5), (256, 256, 1.0), (512, 512, 1.0)]
        {
            let rope = Rope { style, n_dims, magnitude };
            cases.push(rope_case(rope, contiguous(&[4, 3, head_dim]), false));
            cases.push(rope_case(rope, contiguous(&[4, 3, head_dim]), true));
            // The query part of a fused row.
            cases.push(rope_case(rope, contiguous(&[4, 5, head_dim]).slice(1, 1, 3).unwrap(), false));
        }
    }
    cases
}

fn rope_case(rope: Rope, layout: Layout, in_place: bool) -> Case {
    let dims = [layout.shape().dims()[0], layout.shape().dims()[1], layout.shape().dims()[2]];
    let [n, n_heads, head_dim] = dims;
    let x = f32s(&normals(layout.end(), 1));
    let positions = i32s(&[0, 100_003, -1, 77]);
    let freqs: Vec<f32> =
        (0..rope.n_dims / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / rope.n_dims as f32)).collect();
    let inv_freq = f32s(&freqs);
    let inputs = [
        Operand(DType::F32, layout, &x),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::F32, contiguous(&[freqs.len()]), &inv_freq),
    ];
    let y = reference_f32(&Op::Rope(rope), &inputs, &dims);
    let first = match in_place {
        false => Role::Out(y, ROPE),
        true => Role::InOut { before: x.clone(), after: f32s(&y), dtype: DType::F32, tol: ROPE },
    };
    Case::new(
        format!("rope {rope:?} {} in_place={in_place}", layout.shape()),
        vec![first, Role::In(x), Role::In(positions), Role::In(inv_freq)],
        move |kernels, b, out| {
            let x = BufView { buf: b[usize::from(!in_place)], dtype: DType::F32, layout };
            let (positions, inv_freq) = (b[2], b[3]);
            let args = RopeArgs { rope, x, positions, inv_freq, y: b[0], n, n_heads, head_dim, step: "case" };
            out.push(kernels.rope(&args)?);
            Ok(())
        },
    )
}

pub fn kv_append() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for head_dim in [1, 16, 33, 300] {
            cases.push(kv_case(dtype, head_dim));
        }
    }
    for (head_dim, reach) in [(1, 1.0), (16, 1.0), (33, 1e30), (300, 1.0), (64, 1e-38)] {
        cases.push(kv_bytes_case(head_dim, reach));
    }
    cases
}

fn kv_case(dtype: DType, head_dim: usize) -> Case {
    let (n, n_blocks, n_kv_heads, kv_block, n_seqs, max_blocks) = (5, 6, 2, 4, 2, 3);
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let before = encode(dtype, &normals(cells.iter().product(), 2));
    let x = f32s(&normals(n * n_kv_heads * head_dim, 3));
    let (positions, seqs) = (i32s(&[0, 7, -1, 11, 4]), i32s(&[0, 1, 0, 0, 0]));
    let tables = i32s(&[5, 0, 3, 4, 2, -1]);
    let inputs = [
        Operand(DType::F32, contiguous(&[n, n_kv_heads, head_dim]), &x),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[n_seqs, max_blocks]), &tables),
    ];
    let mut outputs = [(TensorType::new(dtype, shape(&cells)), before.clone())];
    reference(&Op::KvAppend, &inputs, &mut outputs);
    let [(_, after)] = outputs;
    Case::new(
        format!("kv_append {dtype} head_dim={head_dim}"),
        vec![
            Role::InOut { before, after, dtype, tol: Tol::Bits },
            Role::In(x),
            Role::In(positions),
            Role::In(seqs),
            Role::In(tables),
        ],
        move |kernels, b, out| {
            out.push(kernels.kv_append(&KvAppendArgs {
                cache: b[0],
                cache_dtype: dtype,
                scales: None,
                x: dense(b[1], &[n, n_kv_heads, head_dim]),
                positions: b[2],
                seqs: b[3],
                tables: b[4],
                n,
                n_blocks,
                n_kv_heads,
                kv_block,
                head_dim,
                n_seqs,
                max_blocks,
                step: "case",
            })?);
            Ok(())
        },
    )
}

/// Every position of both sequences, so that the whole cache is written.
fn kv_bytes_case(head_dim: usize, reach: f32) -> Case {
    let (n_blocks, n_kv_heads, kv_block, n_seqs, max_blocks) = (6, 2, 4, 2, 3);
    let n = n_blocks * kv_block;
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let mut x: Vec<f32> = normals(n * n_kv_heads * head_dim, 3).iter().map(|v| v * reach).collect();
    (x[0], x[head_dim]) = (f32::NAN, f32::INFINITY);
    let x = f32s(&x);
    let rows: Vec<i32> = Rng::new(9).shuffled(n).into_iter().map(|i| i as i32).collect();
    let positions = i32s(&rows.iter().map(|i| i % 12).collect::<Vec<_>>());
    let seqs = i32s(&rows.iter().map(|i| i / 12).collect::<Vec<_>>());
    let tables = i32s(&[5, 0, 3, 4, 2, 1]);
    let inputs = [
        Operand(DType::F32, contiguous(&[n, n_kv_heads, head_dim]), &x),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[n_seqs, max_blocks]), &tables),
    ];
    let n_cells: usize = cells.iter().product();
    let mut outputs = [
        (TensorType::new(DType::U8, shape(&cells)), vec![0; n_cells]),
        (TensorType::new(DType::F32, shape(&cells[..3])), vec![0; 4 * n_cells / head_dim]),
    ];
    reference(&Op::KvAppendBytes, &inputs, &mut outputs);
    let [(_, bytes), (_, scales)] = outputs;
    Case::new(
        format!("kv_append_bytes head_dim={head_dim} reach={reach}"),
        vec![
            Role::Exact(bytes),
            Role::Exact(scales),
            Role::In(x),
            Role::In(positions),
            Role::In(seqs),
            Role::In(tables),
        ],
        move |kernels, b, out| {
            out.push(kernels.kv_append(&KvAppendArgs {
                cache: b[0],
                cache_dtype: DType::U8,
                scales: Some(b[1]),
                x: dense(b[2], &[n, n_kv_heads, head_dim]),
                positions: b[3],
                seqs: b[4],
                tables: b[5],
                n,
                n_blocks,
                n_kv_heads,
                kv_block,
                head_dim,
                n_seqs,
                max_blocks,
                step: "case",
            })?);
            Ok(())
        },
    )
}

pub fn rope_kv() -> Vec<Case> {
    let mut cases = Vec::new();
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for (n_dims, head_dim, in_place) in [(64, 64, true), (32, 80, false), (2, 7, true)] {
                let rope = Rope { style, n_dims, magnitude: 1.0 };
                cases.push(rope_kv_case(rope, dtype, head_dim, in_place));
            }
        }
    }
    cases
}

/// RoPE of queries and keys, in place or not, with padding and out-of-order blocks.
fn rope_kv_case(rope: Rope, dtype: DType, head_dim: usize, in_place: bool) -> Case {
    let (n, n_heads, n_blocks, n_kv_heads, kv_block, n_seqs, max_blocks) = (5, 6, 6, 2, 4, 2, 3);
    let (positions, seqs) = (i32s(&[0, 7, -1, 11, 4]), i32s(&[0, 1, 0, 0, 0]));
    let tables = i32s(&[5, 0, 3, 4, 2, -1]);
    let freqs: Vec<f32> = (0..rope.n_dims / 2).map(|i| 1.0 / (1.0 + i as f32)).collect();
    let inv_freq = f32s(&freqs);
    let x = |heads: usize, seed: u64| f32s(&normals(n * heads * head_dim, seed));
    let (q, k, v) = (x(n_heads, 1), x(n_kv_heads, 2), x(n_kv_heads, 3));
    let turned = |x: &[u8], heads: usize| {
        let inputs = [
            Operand(DType::F32, contiguous(&[n, heads, head_dim]), x),
            Operand(DType::I32, contiguous(&[n]), &positions),
            Operand(DType::F32, contiguous(&[freqs.len()]), &inv_freq),
        ];
        reference_f32(&Op::Rope(rope), &inputs, &[n, heads, head_dim])
    };
    let (q_out, k_out) = (turned(&q, n_heads), turned(&k, n_kv_heads));
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let appended = |x: &[u8], seed: u64, tol: Tol| {
        let before = encode(dtype, &normals(cells.iter().product(), seed));
        let inputs = [
            Operand(DType::F32, contiguous(&[n, n_kv_heads, head_dim]), x),
            Operand(DType::I32, contiguous(&[n]), &positions),
            Operand(DType::I32, contiguous(&[n]), &seqs),
            Operand(DType::I32, contiguous(&[n_seqs, max_blocks]), &tables),
        ];
        let mut outputs = [(TensorType::new(dtype, shape(&cells)), before.clone())];
        reference(&Op::KvAppend, &inputs, &mut outputs);
        let [(_, after)] = outputs;
        Role::InOut { before, after, dtype, tol }
    };
    // A key that the reference rounds the other way is off by one unit of the cache dtype.
    let cache_tol = match dtype {
        DType::BF16 => Tol::Whole(8e-3),
        DType::F16 => Tol::Whole(1e-3),
        _ => ROPE,
    };
    let k_cache = appended(&f32s(&k_out), 4, cache_tol);
    let v_cache = appended(&v, 5, Tol::Bits);
    let out = |x: &[u8], y: Vec<f32>| match in_place {
        false => Role::Out(y, ROPE),
        true => Role::InOut { before: x.to_vec(), after: f32s(&y), dtype: DType::F32, tol: ROPE },
    };
    let roles = vec![
        out(&q, q_out),
        out(&k, k_out),
        k_cache,
        v_cache,
        Role::In(q),
        Role::In(k),
        Role::In(v),
        Role::In(positions),
        Role::In(seqs),
        Role::In(tables),
        Role::In(inv_freq),
    ];
    let name = format!("rope_kv {rope:?} {dtype} head_dim={head_dim} in_place={in_place}");
    Case::new(name, roles, move |kernels, b, out| {
        let [q, k] = if in_place { [b[0], b[1]] } else { [b[4], b[5]] };
        out.push(kernels.rope_kv(&RopeKvArgs {
            rope,
            q: dense(q, &[n, n_heads, head_dim]),
            k: dense(k, &[n, n_kv_heads, head_dim]),
            v: dense(b[6], &[n, n_kv_heads, head_dim]),
            q_out: b[0],
            k_out: b[1],
            k_cache: b[2],
            v_cache: b[3],
            cache_dtype: dtype,
            positions: b[7],
            seqs: b[8],
            tables: b[9],
            inv_freq: b[10],
            n,
            n_heads,
            n_blocks,
            n_kv_heads,
            kv_block,
            head_dim,
            n_seqs,
            max_blocks,
            step: "case",
        })?);
        Ok(())
    })
}

/// Sinks below, among and far above the scores.
pub(crate) fn sinks_of(n_heads: usize) -> Vec<f32> {
    (0..n_heads).map(|head| [0.7, -90.0, 3.0, 1.5, 200.0, -0.5][head % 6]).collect()
}

#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    n_splits: usize,
    sinks: bool,
}

pub fn attention() -> Vec<Case> {
    let plain = Attention { scale: 0.2, window: None, softcap: None };
    let base =
        Shape { dtype: DType::F16, n_heads: 4, n_kv_heads: 2, head_dim: 64, n_splits: 3, sinks: false };
    let mut cases = Vec::new();
    // Positions around the boundaries of tiles and splits, and padding.
    let positions = [0, 31, -1, 32, 33, 63, 64, 95, 96, 97, 200, 299];
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for n_splits in [1, 3, 64] {
            cases.push(attention_case(plain, Shape { dtype, n_splits, ..base }, &positions));
        }
        cases.push(attention_case(plain, Shape { dtype, head_dim: 256, ..base }, &positions));
        cases.push(attention_case(plain, Shape { dtype, head_dim: 512, ..base }, &positions));
    }
    for (head_dim, n_splits) in [(2, 1), (64, 3), (130, 3), (512, 3)] {
        let shape = Shape { dtype: DType::U8, head_dim, n_splits, ..base };
        cases.push(attention_case(plain, shape, &positions));
    }
    let in_bytes = Shape { dtype: DType::U8, ..base };
    cases.push(attention_case(Attention { window: Some(31), ..plain }, in_bytes, &positions));
    for head_dim in [2, 80, 96, 128, 130] {
        cases.push(attention_case(plain, Shape { head_dim, ..base }, &positions));
    }
    for (n_heads, n_kv_heads) in [(1, 1), (9, 3), (8, 1), (18, 2)] {
        cases.push(attention_case(plain, Shape { n_heads, n_kv_heads, ..base }, &positions));
    }
    for window in [1, 31, 100, 1000] {
        cases.push(attention_case(Attention { window: Some(window), ..plain }, base, &positions));
    }
    cases.push(attention_case(Attention { softcap: Some(2.0), ..plain }, base, &positions));
    for (n_splits, dtype) in
        [(1, DType::F16), (3, DType::F32), (64, DType::BF16), (1, DType::U8), (3, DType::U8)]
    {
        let sunk = Shape { sinks: true, n_heads: 18, n_splits, dtype, ..base };
        cases.push(attention_case(plain, sunk, &positions));
        let windowed = Attention { window: Some(20), softcap: Some(2.0), ..plain };
        cases.push(attention_case(windowed, sunk, &positions));
    }
    cases
}

fn attention_case(attention: Attention, s: Shape, positions: &[i32]) -> Case {
    let Shape { dtype, n_heads, n_kv_heads, head_dim, n_splits, sinks } = s;
    let sink_bytes = f32s(&sinks_of(n_heads));
    let (n, kv_block, n_seqs, max_blocks) = (positions.len(), 16, 2, 19);
    let n_blocks = n_seqs * max_blocks;
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let n_cells = cells.iter().product();
    let in_bytes = dtype == DType::U8;
    let cache = |seed: u64| match in_bytes {
        true => Rng::new(seed).shuffled(n_cells).into_iter().map(|i| i as u8).collect(),
        false => encode(dtype, &normals(n_cells, seed)),
    };
    let (k, v) = (cache(4), cache(5));
    let scales = |seed: u64| -> Vec<u8> {
        f32s(&normals(n_cells / head_dim, seed).iter().map(|v| v.abs() / 64.0).collect::<Vec<_>>())
    };
    let (k_scales, v_scales) = (scales(8), scales(9));
    let q = f32s(&normals(n * n_heads * head_dim, 6));
    let order: Vec<i32> = Rng::new(7).shuffled(n_blocks).into_iter().map(|b| b as i32).collect();
    let seqs: Vec<i32> = (0..n).map(|i| (i % n_seqs) as i32).collect();
    let (tables, seqs, positions) = (i32s(&order), i32s(&seqs), i32s(positions));
    let mut inputs = vec![
        Operand(DType::F32, contiguous(&[n, n_heads, head_dim]), &q),
        Operand(dtype, contiguous(&cells), &k),
        Operand(dtype, contiguous(&cells), &v),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[n_seqs, max_blocks]), &tables),
        Operand(DType::F32, contiguous(&cells[..3]), &k_scales),
        Operand(DType::F32, contiguous(&cells[..3]), &v_scales),
    ];
    inputs.truncate(if in_bytes { 8 } else { 6 });
    if sinks {
        inputs.push(Operand(DType::F32, contiguous(&[n_heads]), &sink_bytes));
    }
    let y = reference_f32(&Op::Attention(attention), &inputs, &[n, n_heads, head_dim]);
    let scratch = attention_scratch_bytes(n, n_heads, head_dim, n_splits) as usize;
    Case::new(
        format!(
            "attention {dtype} {n_heads}/{n_kv_heads} heads of {head_dim}, {n_splits} splits, window {:?}, cap {:?}, \
             sinks {sinks}",
            attention.window, attention.softcap
        ),
        vec![
            Role::Out(y, ATTENTION),
            Role::In(q),
            Role::In(k),
            Role::In(v),
            Role::In(positions),
            Role::In(seqs),
            Role::In(tables),
            Role::Scratch(scratch),
            Role::In(k_scales),
            Role::In(v_scales),
            Role::In(sink_bytes),
        ],
        move |kernels, b, out| {
            let args = AttentionArgs {
                sinks: sinks.then_some(b[10]),
                attention,
                q: dense(b[1], &[n, n_heads, head_dim]),
                k_cache: b[2],
                v_cache: b[3],
                cache_dtype: dtype,
                scales: in_bytes.then_some([b[8], b[9]]),
                positions: b[4],
                seqs: b[5],
                tables: b[6],
                y: b[0],
                scratch: (n_splits > 1).then_some(b[7]),
                n,
                n_heads,
                n_blocks,
                n_kv_heads,
                kv_block,
                head_dim,
                n_seqs,
                max_blocks,
                n_splits,
                step: "case",
            };
            kernels.attention(&args, out)
        },
    )
}
