//! Cases of prefill: tensor-core GEMM and attention, and the 16-bit rows and weights that they read.

use refrain_graph::{Attention, Gate, Op, TensorType};
use refrain_kernels::{
    AddRmsNormArgs, AttentionArgs, BufView, DequantArgs, GateArgs, GemmArgs, GemmPlan, LINEAR_DTYPES,
    LinearPart, Narrow, PACKED_DTYPES, RmsNormArgs, pack,
};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Rng, Tol, encode};

use crate::bed::{
    Case, Operand, Role, contiguous, decode, dense, f32s, i32s, normals, reference, reference_f32, shape,
};

/// Sums of k products in f32 against f64.
const GEMM: Tol = Tol::Whole(5e-6);

/// Precision of a dtype: rounded results may fall on either side.
fn rounding(dtype: DType) -> Tol {
    Tol::Whole(if dtype == DType::F16 { 6e-4 } else { 5e-3 })
}

/// For attention: softmax weights are rounded too, and the simulated device does not round queries.
fn attending(dtype: DType) -> Tol {
    Tol::Whole(if dtype == DType::F16 { 4e-3 } else { 3e-2 })
}

pub fn gemm() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        // Whole tiles, tails of every kind, one row, few columns.
        for (m, ns, k) in [
            (64, &[128][..], 128),
            (16, &[8], 64),
            (1, &[1], 8),
            (70, &[130], 200),
            (33, &[129, 5, 64], 72),
            (65, &[3, 200, 1, 128], 264),
        ] {
            cases.push(gemm_case(dtype, m, ns, k, GemmPlan::fixed(false, 1, k)));
            cases.push(gemm_case(dtype, m, ns, k, GemmPlan::fixed(true, 1, k)));
        }
        cases.push(gemm_case(dtype, 130, &[40, 9], 520, GemmPlan::fixed(true, 4, 520)));
        cases.push(gemm_case(dtype, 37, &[131], 1000, GemmPlan::fixed(false, 3, 1000)));
        cases.push(gemm_case(dtype, 20, &[64, 16, 16], 576, GemmPlan::new(20, &[64, 16, 16], 576, 132)));
    }
    cases
}

fn gemm_case(dtype: DType, m: usize, ns: &[usize], k: usize, plan: GemmPlan) -> Case {
    let x = encode(dtype, &normals(m * k, 1));
    let x_values = f32s(&decode(dtype, &x));
    let n: usize = ns.iter().sum();
    let mut roles = vec![Role::In(x), Role::Scratch(plan.scratch_bytes(m, n) as usize)];
    for (i, &n) in ns.iter().enumerate() {
        let w = encode(dtype, &normals(n * k, 2 + i as u64));
        let w_layout = contiguous(&[n, k]).transpose().unwrap();
        let inputs = [Operand(DType::F32, contiguous(&[m, k]), &x_values), Operand(dtype, w_layout, &w)];
        let y = reference_f32(&Op::MatMul, &inputs, &[m, n]);
        roles.extend([Role::Out(y, GEMM), Role::In(w)]);
    }
    let ns = ns.to_vec();
    let name = format!("gemm {dtype} m={m} n={ns:?} k={k} {:?}", plan.shape());
    Case::new(name, roles, move |kernels, b, out| {
        let part = |(i, &n): (usize, &usize)| LinearPart { w: b[3 + 2 * i], y: b[2 + 2 * i], n };
        let parts: Vec<LinearPart> = ns.iter().enumerate().map(part).collect();
        let (x, scratch) = (b[0], Some(b[1]));
        kernels.gemm(&GemmArgs { x, dtype, parts: &parts, m, k, plan, scratch, step: "case" }, out)
    })
}

pub fn dequant() -> Vec<Case> {
    let case = |dtype: DType, n: usize, blocks: usize| {
        let k = blocks * dtype.block_len();
        let file = encode(dtype, &normals(n * k, 3));
        let y = encode(DType::BF16, &decode(dtype, &file));
        let w = if PACKED_DTYPES.contains(&dtype) { pack(dtype, &file, n, k).unwrap() } else { file };
        let name = format!("dequant {dtype} n={n} k={k}");
        Case::new(name, vec![Role::Exact(y), Role::In(w)], move |kernels, b, out| {
            out.push(kernels.dequant(&DequantArgs { w: b[1], dtype, y: b[0], n, k, step: "case" })?);
            Ok(())
        })
    };
    let all = PACKED_DTYPES.into_iter().chain(LINEAR_DTYPES.into_iter().filter(|d| d.is_quantized()));
    all.flat_map(|dtype| [case(dtype, 13, 5), case(dtype, 8, 17)]).collect()
}

pub fn narrow() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for also_wide in [false, true] {
            cases.push(norm_case(dtype, contiguous(&[3, 1028]), also_wide));
            cases.push(norm_case(dtype, contiguous(&[4, 5, 64]).slice(1, 1, 3).unwrap(), also_wide));
            cases.push(add_case(dtype, [5, 300], also_wide));
            for kind in [Gate::Silu, Gate::GeluTanh] {
                cases.push(gate_case(dtype, kind, also_wide));
            }
        }
        cases.push(rows_case(dtype, contiguous(&[9, 1028])));
        cases.push(rows_case(dtype, contiguous(&[5, 3, 80]).slice(1, 1, 2).unwrap()));
    }
    cases
}

/// The 16-bit output and, if requested, the F32 output.
fn results(y: &[f32], dtype: DType, also_wide: bool) -> [Role; 2] {
    let after = encode(dtype, y);
    let narrow = Role::InOut { before: vec![0xcd; after.len()], after, dtype, tol: rounding(dtype) };
    let wide = if also_wide { Role::Out(y.to_vec(), Tol::Whole(2e-6)) } else { Role::Scratch(0) };
    [narrow, wide]
}

fn rows_case(dtype: DType, layout: Layout) -> Case {
    let n_cols = layout.shape().dim_back(0);
    let n_rows = layout.shape().n_elements() / n_cols;
    let x = f32s(&normals(layout.end(), 4));
    let ty = TensorType::new(dtype, layout.shape());
    let mut outputs = [(ty, vec![0; 2 * layout.shape().n_elements()])];
    reference(&Op::Cast(dtype), &[Operand(DType::F32, layout, &x)], &mut outputs);
    let [(_, y)] = outputs;
    Case::new(
        format!("narrow_rows {dtype} {}", layout.shape()),
        vec![Role::Exact(y), Role::In(x)],
        move |kernels, b, out| {
            let (x, to) = (
                BufView { buf: b[1], dtype: DType::F32, layout },
                Narrow { y: b[0], dtype, plane_rows: 0, also_wide: false },
            );
            out.push(kernels.narrow_rows(&x, n_rows, n_cols, &to, "case")?);
            Ok(())
        },
    )
}

fn norm_case(dtype: DType, layout: Layout, also_wide: bool) -> Case {
    let n_cols = layout.shape().dim_back(0);
    let n_rows = layout.shape().n_elements() / n_cols;
    let (x, w) = (f32s(&normals(layout.end(), 4)), f32s(&normals(n_cols, 5)));
    let inputs = [Operand(DType::F32, layout, &x), Operand(DType::F32, contiguous(&[n_cols]), &w)];
    let y = reference_f32(&Op::RmsNorm { eps: 1e-5 }, &inputs, layout.shape().dims());
    let [narrow, wide] = results(&y, dtype, also_wide);
    Case::new(
        format!("narrow_rms_norm {dtype} {} also_wide={also_wide}", layout.shape()),
        vec![narrow, wide, Role::In(x), Role::In(w)],
        move |kernels, b, out| {
            let x = BufView { buf: b[2], dtype: DType::F32, layout };
            let args = RmsNormArgs { x, w: b[3], y: b[1], n_rows, n_cols, eps: 1e-5, step: "case" };
            out.push(kernels.narrow_rms_norm(&args, &Narrow { y: b[0], dtype, plane_rows: 0, also_wide })?);
            Ok(())
        },
    )
}

fn add_case(dtype: DType, dims: [usize; 2], also_wide: bool) -> Case {
    let [n_rows, n_cols] = dims;
    let n = n_rows * n_cols;
    let (a, b, w) = (f32s(&normals(n, 6)), f32s(&normals(n, 7)), f32s(&normals(n_cols, 8)));
    let layout = contiguous(&dims);
    let inputs = [
        Operand(DType::F32, layout, &a),
        Operand(DType::F32, layout, &b),
        Operand(DType::F32, contiguous(&[n_cols]), &w),
    ];
    let ty = TensorType::new(DType::F32, shape(&dims));
    let mut outputs = [(ty, vec![0; 4 * n]), (ty, vec![0; 4 * n])];
    reference(&Op::AddRmsNorm { eps: 1e-6 }, &inputs, &mut outputs);
    let [(_, sum), (_, y)] = outputs;
    let [narrow, wide] = results(&decode(DType::F32, &y), dtype, also_wide);
    // In place, as plans do it.
    let sum = Role::InOut { before: a, after: sum, dtype: DType::F32, tol: Tol::Bits };
    Case::new(
        format!("narrow_add_rms_norm {dtype} {dims:?} also_wide={also_wide}"),
        vec![narrow, wide, sum, Role::In(b), Role::In(w)],
        move |kernels, bufs, out| {
            let args = AddRmsNormArgs {
                a: dense(bufs[2], &dims),
                b: dense(bufs[3], &dims),
                w: bufs[4],
                sum: bufs[2],
                y: bufs[1],
                n_rows,
                n_cols,
                eps: 1e-6,
                step: "case",
            };
            out.push(
                kernels
                    .narrow_add_rms_norm(&args, &Narrow { y: bufs[0], dtype, plane_rows: 0, also_wide })?,
            );
            Ok(())
        },
    )
}

fn gate_case(dtype: DType, kind: Gate, also_wide: bool) -> Case {
    let dims = [3, 1100];
    let n = dims[0] * dims[1];
    let (gate, up) = (f32s(&normals(n, 9)), f32s(&normals(n, 10)));
    let layout = contiguous(&dims);
    let inputs = [Operand(DType::F32, layout, &gate), Operand(DType::F32, layout, &up)];
    let y = reference_f32(&Op::Gate(kind), &inputs, &dims);
    let [narrow, wide] = results(&y, dtype, also_wide);
    Case::new(
        format!("narrow_gate {kind:?} {dtype} also_wide={also_wide}"),
        vec![narrow, wide, Role::In(gate), Role::In(up)],
        move |kernels, b, out| {
            let (gate, up) = (dense(b[2], &dims), dense(b[3], &dims));
            let [n_rows, n_cols] = dims;
            let args = GateArgs { kind, gate, up, y: b[1], n_rows, n_cols, step: "case" };
            out.push(kernels.narrow_gate(&args, &Narrow { y: b[0], dtype, plane_rows: 0, also_wide })?);
            Ok(())
        },
    )
}

/// Expected digests from independent scalar code that processes one word at a time.
pub fn digest() -> Vec<Case> {
    let mixed = |word: u64, at: u64| {
        let mut h = word.wrapping_add(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(at + 1));
        for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
            h = (h ^ h >> 33).wrapping_mul(factor);
        }
        h ^ h >> 33
    };
    let case = |n: usize| {
        let x: Vec<u8> = (0..n).map(|i| (i * 7 + i / 255) as u8).collect();
        let mut y = vec![[0_u64; 2]; n.div_ceil(65_536)];
        for at in (0..n).step_by(8) {
            let mut word = [0; 8];
            let bytes = &x[at..n.min(at + 8)];
            word[..bytes.len()].copy_from_slice(bytes);
            let chunk = &mut y[at / 65_536];
            chunk[0] = chunk[0].wrapping_add(mixed(u64::from_le_bytes(word), at as u64));
            chunk[1] += bytes.iter().filter(|b| **b == 0xff).count() as u64;
        }
        let y = y.into_iter().flatten().flat_map(u64::to_le_bytes).collect();
        Case::new(format!("digest of {n}"), vec![Role::Exact(y), Role::In(x)], |kernels, b, out| {
            out.push(kernels.digester()?.launch(b[1], b[0])?);
            Ok(())
        })
    };
    [1, 8, 4096, 65_536, 131_085].into_iter().map(case).collect()
}

#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    kv_block: usize,
    /// Outputs: F32, a 16-bit dtype, or both.
    narrow: Option<(DType, bool)>,
    sinks: bool,
}

pub fn flash() -> Vec<Case> {
    let plain = Attention { scale: 0.2, window: None, softcap: None };
    let base = Shape {
        dtype: DType::F16,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 64,
        kv_block: 16,
        narrow: None,
        sinks: false,
    };
    let mut cases = Vec::new();
    // A prompt from its start, a prompt that continues an earlier chunk, and trailing padding.
    let prompt: Vec<i32> = (0..70).collect();
    let later: Vec<i32> = (90..150).chain([-1, -1, -1]).collect();
    // Out of order, around tile boundaries, alternating between two sequences.
    let mixed = [0, 31, -1, 32, 33, 63, 64, 95, 96, 97, 200, 299, 127, 128, 5, 1, 250];
    for dtype in [DType::F16, DType::BF16] {
        for head_dim in [16, 64, 80, 96, 128, 256, 272, 512] {
            // Scores grow with head_dim; a sharper softmax would test the rounding of queries.
            let scale = if head_dim > 256 { 0.1 } else { 0.2 };
            cases.push(flash_case(
                Attention { scale, ..plain },
                Shape { dtype, head_dim, ..base },
                &later,
                1,
            ));
        }
        cases.push(flash_case(
            Attention { scale: 0.1, window: Some(70), ..plain },
            Shape { dtype, head_dim: 512, narrow: Some((dtype, true)), ..base },
            &mixed,
            2,
        ));
        cases.push(flash_case(plain, Shape { dtype, ..base }, &prompt, 1));
        cases.push(flash_case(plain, Shape { dtype, ..base }, &mixed, 2));
        for narrow in [(DType::F16, false), (DType::BF16, true)] {
            cases.push(flash_case(plain, Shape { dtype, narrow: Some(narrow), ..base }, &later, 1));
        }
    }
    for (n_heads, n_kv_heads) in [(1, 1), (4, 2), (6, 2)] {
        cases.push(flash_case(plain, Shape { n_heads, n_kv_heads, kv_block: 32, ..base }, &prompt, 1));
    }
    for window in [1, 64, 100, 1000] {
        let windowed = Attention { window: Some(window), ..plain };
        cases.push(flash_case(windowed, base, &later, 1));
        cases.push(flash_case(windowed, base, &mixed, 2));
    }
    // More sequences in a tile of rows than blocks share them, padding among them, and tiles with few.
    let crowd: Vec<i32> = (0..100).map(|i| if i % 7 == 3 { -1 } else { i * 37 % 130 }).collect();
    for n_seqs in [3, 17, 100] {
        cases.push(flash_case(plain, base, &crowd, n_seqs));
    }
    let wide = Shape { dtype: DType::BF16, head_dim: 512, narrow: Some((DType::BF16, false)), ..base };
    cases.push(flash_case(Attention { scale: 0.1, ..plain }, wide, &crowd, 40));
    let sunk = Shape { n_heads: 6, n_kv_heads: 2, sinks: true, ..base };
    cases.push(flash_case(Attention { window: Some(33), ..plain }, sunk, &crowd, 20));
    cases.push(flash_case(Attention { softcap: Some(2.0), ..plain }, base, &later, 1));
    cases.push(flash_case(Attention { window: Some(9), softcap: Some(2.0), ..plain }, base, &mixed, 2));
    for (dtype, window) in [(DType::F16, None), (DType::BF16, Some(33))] {
        let sunk = Shape { dtype, n_heads: 6, sinks: true, ..base };
        cases.push(flash_case(Attention { window, ..plain }, sunk, &later, 1));
        cases.push(flash_case(Attention { window, softcap: Some(2.0), ..plain }, sunk, &mixed, 2));
    }
    cases
}

/// Positions that no row attends to hold NaN, so reading one is visible.
fn poisoned(
    dtype: DType,
    s: &Shape,
    attention: Attention,
    (tables, max_blocks): (&[i32], usize),
    rows: &[(i32, i32)],
    seed: u64,
) -> Vec<u8> {
    let n_blocks = tables.len();
    let row_len = s.head_dim;
    let mut values = encode(dtype, &normals(n_blocks * s.n_kv_heads * s.kv_block * row_len, seed));
    let mut seen = vec![false; n_blocks * s.kv_block];
    for &(position, seq) in rows.iter().filter(|(p, _)| *p >= 0) {
        let first = attention.window.map_or(0, |w| (position as usize + 1).saturating_sub(w));
        for p in first..=position as usize {
            seen[tables[seq as usize * max_blocks + p / s.kv_block] as usize * s.kv_block + p % s.kv_block] =
                true;
        }
    }
    for (cell, _) in seen.iter().enumerate().filter(|(_, seen)| !**seen) {
        for head in 0..s.n_kv_heads {
            let row = (cell / s.kv_block * s.n_kv_heads + head) * s.kv_block + cell % s.kv_block;
            values[2 * row * row_len..][..2 * row_len].fill(0xff);
        }
    }
    values
}

fn flash_case(attention: Attention, s: Shape, positions: &[i32], n_seqs_used: usize) -> Case {
    let Shape { dtype, n_heads, n_kv_heads, head_dim, kv_block, narrow, sinks } = s;
    let sink_bytes = f32s(&super::attention::sinks_of(n_heads));
    let (n, n_seqs, max_blocks) = (positions.len(), n_seqs_used, 304 / kv_block);
    let n_blocks = n_seqs * max_blocks;
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let order: Vec<i32> = Rng::new(7).shuffled(n_blocks).into_iter().map(|b| b as i32).collect();
    let seqs: Vec<i32> = (0..n).map(|i| (i % n_seqs_used) as i32).collect();
    let rows: Vec<(i32, i32)> = positions.iter().copied().zip(seqs.iter().copied()).collect();
    let k = poisoned(dtype, &s, attention, (&order, max_blocks), &rows, 4);
    let v = poisoned(dtype, &s, attention, (&order, max_blocks), &rows, 5);
    let q = f32s(&normals(n * n_heads * head_dim, 6));
    // The queries as the kernel sees them.
    let rounded = f32s(&decode(dtype, &encode(dtype, &decode(DType::F32, &q))));
    let (tables, seqs, positions) = (i32s(&order), i32s(&seqs), i32s(positions));
    let mut inputs = vec![
        Operand(DType::F32, contiguous(&[n, n_heads, head_dim]), &rounded),
        Operand(dtype, contiguous(&cells), &k),
        Operand(dtype, contiguous(&cells), &v),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs),
        Operand(DType::I32, contiguous(&[n_seqs, max_blocks]), &tables),
    ];
    if sinks {
        inputs.push(Operand(DType::F32, contiguous(&[n_heads]), &sink_bytes));
    }
    let y = reference_f32(&Op::Attention(attention), &inputs, &[n, n_heads, head_dim]);
    let wide = match narrow {
        Some((_, false)) => Role::Scratch(0),
        _ => Role::Out(y.clone(), attending(dtype)),
    };
    let small = match narrow {
        None => Role::Scratch(0),
        Some((to, _)) => {
            let after = encode(to, &y);
            let tol = if dtype == DType::BF16 || to == DType::BF16 { DType::BF16 } else { DType::F16 };
            Role::InOut { before: vec![0xcd; after.len()], after, dtype: to, tol: attending(tol) }
        }
    };
    let name = format!(
        "flash {dtype} {n_heads}/{n_kv_heads} heads of {head_dim}, {n} rows of {n_seqs_used}, window {:?}, cap {:?}, \
         narrow {narrow:?}, sinks {sinks}",
        attention.window, attention.softcap
    );
    let roles = vec![
        wide,
        small,
        Role::In(q),
        Role::In(k),
        Role::In(v),
        Role::In(positions),
        Role::In(seqs),
        Role::In(tables),
        Role::In(sink_bytes),
    ];
    Case::new(name, roles, move |kernels, b, out| {
        let args = AttentionArgs {
            sinks: sinks.then_some(b[8]),
            attention,
            q: dense(b[2], &[n, n_heads, head_dim]),
            k_cache: b[3],
            v_cache: b[4],
            cache_dtype: dtype,
            scales: None,
            positions: b[5],
            seqs: b[6],
            tables: b[7],
            y: b[0],
            scratch: None,
            n,
            n_heads,
            n_blocks,
            n_kv_heads,
            kv_block,
            head_dim,
            n_seqs,
            max_blocks,
            n_splits: 1,
            step: "case",
        };
        assert!(kernels.has_flash(dtype, head_dim));
        let to = narrow.map(|(dtype, also_wide)| Narrow { y: b[1], dtype, plane_rows: 0, also_wide });
        out.push(kernels.flash(&args, to.as_ref())?);
        Ok(())
    })
}
