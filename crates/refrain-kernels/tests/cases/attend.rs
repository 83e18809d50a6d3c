//! Cases of fused decode attention: norm, RoPE, append and attention in one launch.

use refrain_driver::{Buf, MemoryLayout};
use refrain_graph::{Attention, Op, Rope, RopeStyle, TensorType};
use refrain_kernels::{
    AttendArgs, AttendNorm, BufView, Narrow, RopeKvArgs, attend_counter_bytes, attend_scratch_bytes,
};
use refrain_tensor::DType;
use refrain_testkit::{Rng, Tol, encode};

use crate::bed::{
    Bed, Case, Operand, Role, contiguous, f32s, i32s, normals, reference, reference_f32, shape,
};

/// Parameters of a case; everything else is derived from them.
#[derive(Clone, Debug)]
pub struct Setup {
    pub dtype: DType,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub n_splits: usize,
    pub kv_block: usize,
    pub rope: Rope,
    pub attention: Attention,
    pub eps: Option<f32>,
    /// Whether values are normalised as well.
    pub norms_values: bool,
    /// Whether the caches already hold the keys and values of the rows' positions.
    pub stored: bool,
    /// Factor on the queries.
    pub gain: f32,
    /// Position of each row; row `i` belongs to sequence `n - 1 - i`, or `i` when `in_order`.
    pub positions: Vec<i32>,
    pub in_order: bool,
    /// Dtype of a 16-bit output, and whether F32 is written too.
    pub narrow: Option<(DType, bool)>,
    pub sinks: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            dtype: DType::F16,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 64,
            n_splits: 8,
            kv_block: 32,
            rope: Rope { style: RopeStyle::Neox, n_dims: 64, magnitude: 1.0 },
            attention: Attention { scale: 0.2, window: None, softcap: None },
            eps: None,
            norms_values: false,
            stored: false,
            gain: 1.0,
            positions: vec![0, 1, -1, 31, 32, 33, 255, 256],
            in_order: false,
            narrow: None,
            sinks: false,
        }
    }
}

pub fn attend() -> Vec<Case> {
    let base = Setup::default;
    let mut all = Vec::new();
    // Boundaries of blocks and splits, padding, and more positions than minimum-length splits hold.
    let rows = [
        vec![0, 1, -1, 31, 32, 33, 255, 256],
        vec![257, 511, 512, 513, 767, 768, 769, 1100],
        vec![15, 16, 17, 126, 127, 128, 129, -1],
        vec![1022, 1023, 1024],
    ];
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for positions in &rows {
            all.push(Setup { dtype, positions: positions.clone(), ..base() });
        }
    }
    for n_splits in [1, 2, 4, 64] {
        all.push(Setup { n_splits, positions: rows[1].clone(), in_order: true, ..base() });
    }
    for (head_dim, n_dims) in
        [(8, 8), (48, 16), (64, 32), (80, 80), (96, 64), (128, 128), (192, 2), (256, 256)]
    {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            let rope = Rope { style, n_dims, magnitude: 0.8 };
            let positions = vec![3, 300, 1000];
            all.push(Setup { head_dim, rope, positions, ..base() });
        }
        let rope = Rope { style: RopeStyle::Neox, n_dims, magnitude: 1.0 };
        for dtype in [DType::F16, DType::F32] {
            let (eps, positions) = (Some(1e-6), vec![0, 513]);
            all.push(Setup { dtype, head_dim, rope, eps, positions, n_heads: 16, n_kv_heads: 2, ..base() });
        }
    }
    // Heads of more than 256 elements, normalised values, and keys and values stored by another launch.
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for (head_dim, n_heads, n_kv_heads) in [(512, 6, 2), (264, 2, 2), (64, 8, 1)] {
            let rope = Rope { style: RopeStyle::Neox, n_dims: head_dim, magnitude: 1.0 };
            let attention = Attention { scale: 0.05, ..base().attention };
            let (eps, positions) = (Some(1e-6), vec![0, 40, -1, 600]);
            let own =
                Setup { dtype, head_dim, n_heads, n_kv_heads, rope, attention, eps, positions, ..base() };
            all.push(Setup { norms_values: true, ..own.clone() });
            all.push(Setup { stored: true, ..own.clone() });
            let attention = Attention { window: Some(33), ..attention };
            all.push(Setup { stored: true, attention, eps: None, n_splits: 1, ..own });
        }
    }
    for group in [1, 2, 3, 4, 5, 7, 8, 12, 16] {
        let positions = vec![40, 600, -1];
        all.push(Setup { n_heads: 2 * group, positions: positions.clone(), ..base() });
        let rope = Rope { style: RopeStyle::Interleaved, n_dims: 128, magnitude: 1.0 };
        all.push(Setup { n_heads: group, n_kv_heads: 1, head_dim: 128, rope, positions, ..base() });
    }
    for (i, window) in [1, 2, 15, 16, 17, 256, 300, 5000].into_iter().enumerate() {
        let attention = Attention { window: Some(window), ..base().attention };
        all.push(Setup { attention, positions: rows[i % 2].clone(), ..base() });
    }
    for kv_block in [16, 128] {
        all.push(Setup { kv_block, positions: rows[1].clone(), eps: Some(1e-5), ..base() });
    }
    // 16-bit outputs, and more rows than the GPU has SMs per head.
    for (i, narrow) in
        [(DType::BF16, false), (DType::F16, false), (DType::BF16, true)].into_iter().enumerate()
    {
        let n = if i == 0 { 70 } else { 9 };
        let (n_splits, positions) = (1 << i, (0..n).map(|row| row * 7 % 90 - 1).collect());
        all.push(Setup { narrow: Some(narrow), n_splits, positions, ..base() });
    }
    let attention = Attention { softcap: Some(2.0), ..base().attention };
    all.push(Setup { attention, positions: rows[1].clone(), ..base() });
    for (i, dtype) in [DType::F16, DType::BF16, DType::F32].into_iter().enumerate() {
        for window in [None, Some(128)] {
            let attention = Attention { window, ..base().attention };
            let sunk = Setup { dtype, attention, sinks: true, n_heads: 12, n_kv_heads: 2, ..base() };
            all.push(Setup { n_splits: 1 << (3 * i), positions: rows[i].clone(), ..sunk });
        }
    }
    // Queries that overflow 16 bits, and queries that partly underflow to zero.
    for (gain, dtype) in [(1e7, DType::F16), (1e-9, DType::F16), (1e7, DType::BF16)] {
        let attention = Attention { scale: 0.2 / gain, ..base().attention };
        all.push(Setup { dtype, gain, attention, positions: vec![40, 600, 1000], ..base() });
    }
    // More tiles per warp than lanes look up at once, more blocks than the length needs, and rows that need
    // different numbers of blocks.
    let long = [(1, vec![9_000]), (2, vec![17_000]), (64, vec![5_000]), (64, vec![9_000, 1_100, 5_000])];
    for (n_splits, positions) in long {
        let (n_heads, n_kv_heads, head_dim) = (2, 1, 8);
        let rope = Rope { n_dims: 8, ..base().rope };
        all.push(Setup { n_heads, n_kv_heads, head_dim, n_splits, rope, positions, ..base() });
    }
    all.into_iter().map(case).collect()
}

/// Inputs of a setup and the reference's outputs, per buffer.
struct Made {
    roles: Vec<Role>,
    n_blocks: usize,
    max_blocks: usize,
}

/// A key that the reference rounds the other way is off by one unit of the cache dtype, and so are the
/// results.
fn tolerances(dtype: DType) -> (Tol, Tol) {
    match dtype {
        DType::BF16 => (Tol::Whole(8e-3), Tol::Whole(2e-3)),
        DType::F16 => (Tol::Whole(1e-3), Tol::Whole(3e-4)),
        _ => (Tol::Whole(4e-6), Tol::Whole(2e-5)),
    }
}

fn make(s: &Setup) -> Made {
    let Setup { dtype, n_heads, n_kv_heads, head_dim, kv_block, .. } = *s;
    let n = s.positions.len();
    let longest = s.positions.iter().copied().max().unwrap_or(0) as usize + 1;
    let max_blocks = longest.div_ceil(kv_block) + 1;
    let n_blocks = n * max_blocks + 3;
    let cells = [n_blocks, n_kv_heads, kv_block, head_dim];
    let order: Vec<i32> = Rng::new(7).shuffled(n_blocks).into_iter().map(|b| b as i32).collect();
    let seqs: Vec<i32> = (0..n).map(|i| if s.in_order { i } else { n - 1 - i } as i32).collect();
    let (tables, seqs_bytes, positions) = (i32s(&order[..n * max_blocks]), i32s(&seqs), i32s(&s.positions));
    let freqs: Vec<f32> = (0..s.rope.n_dims / 2).map(|i| 1.0 / (1.0 + i as f32)).collect();
    let inv_freq = f32s(&freqs);
    let norms = [normals(head_dim, 8), normals(head_dim, 9)].map(|w| f32s(&w));
    let turned = |x: &[f32], heads: usize, norm: &[u8]| {
        let dims = [n, heads, head_dim];
        let mut bytes = f32s(x);
        if let Some(eps) = s.eps {
            let inputs = [
                Operand(DType::F32, contiguous(&dims), &bytes),
                Operand(DType::F32, contiguous(&[head_dim]), norm),
            ];
            bytes = f32s(&reference_f32(&Op::RmsNorm { eps }, &inputs, &dims));
        }
        let inputs = [
            Operand(DType::F32, contiguous(&dims), &bytes),
            Operand(DType::I32, contiguous(&[n]), &positions),
            Operand(DType::F32, contiguous(&[freqs.len()]), &inv_freq),
        ];
        f32s(&reference_f32(&Op::Rope(s.rope), &inputs, &dims))
    };
    // Rows of a fused projection: queries, then keys, then values.
    let row_heads = n_heads + 2 * n_kv_heads;
    let mut fused = normals(n * row_heads * head_dim, 6);
    let queries = fused.chunks_exact_mut(row_heads * head_dim).flat_map(|row| &mut row[..n_heads * head_dim]);
    queries.for_each(|x| *x *= s.gain);
    let part = |first: usize, heads: usize| -> Vec<f32> {
        let rows = fused.chunks_exact(row_heads * head_dim);
        rows.flat_map(|row| row[first * head_dim..(first + heads) * head_dim].to_vec()).collect()
    };
    let q = turned(&part(0, n_heads), n_heads, &norms[0]);
    let keys = turned(&part(n_heads, n_kv_heads), n_kv_heads, &norms[1]);
    let mut values = f32s(&part(n_heads + n_kv_heads, n_kv_heads));
    if let Some(eps) = s.eps.filter(|_| s.norms_values) {
        let dims = [n, n_kv_heads, head_dim];
        let inputs = [
            Operand(DType::F32, contiguous(&dims), &values),
            Operand(DType::F32, contiguous(&[head_dim]), &norms[1]),
        ];
        values = f32s(&reference_f32(&Op::RmsNorm { eps }, &inputs, &dims));
    }
    let appended = |x: &[u8], seed: u64| {
        let before = poisoned(s, &seqs, &order, max_blocks, n_blocks, seed);
        let inputs = [
            Operand(DType::F32, contiguous(&[n, n_kv_heads, head_dim]), x),
            Operand(DType::I32, contiguous(&[n]), &positions),
            Operand(DType::I32, contiguous(&[n]), &seqs_bytes),
            Operand(DType::I32, contiguous(&[n, max_blocks]), &tables),
        ];
        let mut outputs = [(TensorType::new(dtype, shape(&cells)), before.clone())];
        reference(&Op::KvAppend, &inputs, &mut outputs);
        let [(_, after)] = outputs;
        (if s.stored { after.clone() } else { before }, after)
    };
    let ((k_before, k_after), (v_before, v_after)) = (appended(&keys, 4), appended(&values, 5));
    let sinks = f32s(&super::attention::sinks_of(n_heads));
    let mut inputs = vec![
        Operand(DType::F32, contiguous(&[n, n_heads, head_dim]), &q),
        Operand(dtype, contiguous(&cells), &k_after),
        Operand(dtype, contiguous(&cells), &v_after),
        Operand(DType::I32, contiguous(&[n]), &positions),
        Operand(DType::I32, contiguous(&[n]), &seqs_bytes),
        Operand(DType::I32, contiguous(&[n, max_blocks]), &tables),
    ];
    if s.sinks {
        inputs.push(Operand(DType::F32, contiguous(&[n_heads]), &sinks));
    }
    let y = reference_f32(&Op::Attention(s.attention), &inputs, &[n, n_heads, head_dim]);
    let (cache_tol, tol) = tolerances(dtype);
    let scratch = attend_scratch_bytes(n, n_heads, head_dim, s.n_splits) as usize;
    let counters = vec![0; attend_counter_bytes(n, n_heads, s.n_splits).max(4) as usize];
    let narrow = s.narrow.map_or(DType::F16, |(dtype, _)| dtype);
    let (narrow_before, narrow_after) = (vec![0xcd; 2 * y.len()], encode(narrow, &y));
    let narrow_role = match s.narrow {
        Some(_) => {
            let tol = tolerances(narrow).0;
            Role::InOut { before: narrow_before, after: narrow_after, dtype: narrow, tol }
        }
        None => Role::In(narrow_before),
    };
    let [q_norm, k_norm] = norms;
    let roles = vec![
        match s.narrow {
            Some((_, false)) => Role::In(vec![0xcd; 4 * y.len()]),
            _ => Role::Out(y, tol),
        },
        Role::Scratch(scratch),
        // Zero before and after.
        Role::In(counters),
        Role::InOut { before: k_before, after: k_after, dtype, tol: cache_tol },
        Role::InOut {
            before: v_before,
            after: v_after,
            dtype,
            tol: if s.norms_values { cache_tol } else { Tol::Bits },
        },
        Role::In(f32s(&fused)),
        Role::In(positions),
        Role::In(seqs_bytes),
        Role::In(tables),
        Role::In(inv_freq),
        Role::In(q_norm),
        Role::In(k_norm),
        narrow_role,
        Role::In(sinks),
    ];
    Made { roles, n_blocks, max_blocks }
}

/// A cache that is NaN wherever no row attends: after its position, at the slot of the new key and value,
/// before its window, and in unused blocks.
fn poisoned(
    s: &Setup,
    seqs: &[i32],
    order: &[i32],
    max_blocks: usize,
    n_blocks: usize,
    seed: u64,
) -> Vec<u8> {
    let row = s.head_dim * s.dtype.block_bytes();
    let mut cache = vec![0xff; n_blocks * s.n_kv_heads * s.kv_block * row];
    for (i, &position) in s.positions.iter().enumerate() {
        let first = s.attention.window.map_or(0, |w| (position + 1 - w as i32).max(0));
        let n = (position - first).max(0) as usize;
        let rows = encode(s.dtype, &normals(n * s.n_kv_heads * s.head_dim, seed + 10 * i as u64));
        for (j, row_bytes) in rows.chunks_exact(row).enumerate() {
            let (p, head) = (first as usize + j / s.n_kv_heads, j % s.n_kv_heads);
            let id = order[seqs[i] as usize * max_blocks + p / s.kv_block] as usize;
            let at = ((id * s.n_kv_heads + head) * s.kv_block + p % s.kv_block) * row;
            cache[at..at + row].copy_from_slice(row_bytes);
        }
    }
    cache
}

/// Views of queries, keys and values in fused rows.
fn parts(buf: Buf, n: usize, [n_heads, n_kv_heads, head_dim]: [usize; 3]) -> [BufView; 3] {
    let fused = contiguous(&[n, n_heads + 2 * n_kv_heads, head_dim]);
    [(0, n_heads), (n_heads, n_kv_heads), (n_heads + n_kv_heads, n_kv_heads)].map(|(first, heads)| BufView {
        buf,
        dtype: DType::F32,
        layout: fused.slice(1, first, heads).unwrap(),
    })
}

fn case(s: Setup) -> Case {
    let Made { roles, n_blocks, max_blocks } = make(&s);
    let name = format!("{s:?}");
    Case::new(name, roles, move |kernels, b, out| {
        let Setup { n_heads, n_kv_heads, head_dim, .. } = s;
        let n = s.positions.len();
        let [q, k, v] = parts(b[5], n, [n_heads, n_kv_heads, head_dim]);
        out.push(kernels.attend(&AttendArgs {
            rope: s.rope,
            attention: s.attention,
            q,
            kv: (!s.stored).then_some([k, v]),
            norm: s.eps.map(|eps| AttendNorm {
                q: b[10],
                k: (!s.stored).then_some(b[11]),
                v: s.norms_values.then_some(b[11]),
                eps,
            }),
            sinks: s.sinks.then_some(b[13]),
            y: b[0],
            narrow: s.narrow.map(|(dtype, also_wide)| Narrow { y: b[12], dtype, plane_rows: 0, also_wide }),
            k_cache: b[3],
            v_cache: b[4],
            cache_dtype: s.dtype,
            positions: b[6],
            seqs: b[7],
            tables: b[8],
            inv_freq: b[9],
            scratch: (s.n_splits > 1).then_some(b[1]),
            counters: (s.n_splits > 1).then_some(b[2]),
            n,
            n_heads,
            n_blocks,
            n_kv_heads,
            kv_block: s.kv_block,
            head_dim,
            n_seqs: n,
            max_blocks,
            n_splits: s.n_splits,
            fills: s.n_splits <= 2,
            early: s.n_heads > s.n_kv_heads,
            step: "case",
        })?);
        Ok(())
    })
}

/// Checks that `attend` and `rope_kv` write the same bits to separate caches, at near and far positions.
pub fn same_bits_as_rope_kv(bed: &mut Bed) {
    let (n_heads, n_kv_heads, head_dim, kv_block, n_blocks) = (4, 2, 96, 16, 8);
    let dims = [n_heads, n_kv_heads, head_dim];
    for dtype in [DType::F16, DType::F32] {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            let rope = Rope { style, n_dims: 64, magnitude: 1.25 };
            let cells = n_blocks * n_kv_heads * kv_block * head_dim * dtype.block_bytes();
            let max_blocks = 6_000;
            let mut layout = MemoryLayout::new("bits");
            let regions = [
                ("fused", 4 * 8 * head_dim),
                ("q", 4 * n_heads * head_dim),
                ("k", 4 * n_kv_heads * head_dim),
                ("y", 4 * n_heads * head_dim),
                ("k apart", cells),
                ("v apart", cells),
                ("k at once", cells),
                ("v at once", cells),
                ("position", 4),
                ("seq", 4),
                ("table", 4 * max_blocks),
                ("inv_freq", 4 * 32),
            ]
            .map(|(name, bytes)| layout.device(name, bytes as u64));
            let memory = bed.plan(&layout);
            let b = regions.map(|r| memory.buf(r));
            let mut lease = memory.lease().unwrap();
            let freqs: Vec<f32> = (0..32).map(|i| 10_000_f32.powf(-(i as f32) / 32.0)).collect();
            let mut set = |buf: Buf, bytes: &[u8]| bed.stream.upload(&mut lease, buf, bytes).unwrap();
            set(b[0], &f32s(&normals(8 * head_dim, 1)));
            set(b[9], &i32s(&[0]));
            set(b[10], &i32s(&(0..max_blocks as i32).map(|i| i % n_blocks as i32).collect::<Vec<_>>()));
            set(b[11], &f32s(&freqs));
            b[4..8].iter().for_each(|&cache| set(cache, &vec![0; cells]));
            let [q, k, v] = parts(b[0], 1, dims);
            let apart = bed.kernels.rope_kv(&RopeKvArgs {
                rope,
                q,
                k,
                v,
                q_out: b[1],
                k_out: b[2],
                k_cache: b[4],
                v_cache: b[5],
                cache_dtype: dtype,
                positions: b[8],
                seqs: b[9],
                tables: b[10],
                inv_freq: b[11],
                n: 1,
                n_heads,
                n_blocks,
                n_kv_heads,
                kv_block,
                head_dim,
                n_seqs: 1,
                max_blocks,
                step: "apart",
            });
            let at_once = bed.kernels.attend(&AttendArgs {
                rope,
                attention: Attention { scale: 0.1, window: Some(3), softcap: None },
                q,
                kv: Some([k, v]),
                norm: None,
                sinks: None,
                y: b[3],
                narrow: None,
                k_cache: b[6],
                v_cache: b[7],
                cache_dtype: dtype,
                positions: b[8],
                seqs: b[9],
                tables: b[10],
                inv_freq: b[11],
                scratch: None,
                counters: None,
                n: 1,
                n_heads,
                n_blocks,
                n_kv_heads,
                kv_block,
                head_dim,
                n_seqs: 1,
                max_blocks,
                n_splits: 1,
                fills: true,
                early: true,
                step: "at once",
            });
            let launches = [apart.unwrap(), at_once.unwrap()];
            for position in [0, 1, 77, 4_095, 95_999] {
                bed.stream.upload(&mut lease, b[8], &i32s(&[position])).unwrap();
                bed.stream.run(&mut lease, true, |q| launches.iter().try_for_each(|l| q.launch(l))).unwrap();
                let mut get = |buf: Buf| {
                    let mut bytes = vec![0; cells];
                    bed.stream.download(&lease, buf, &mut bytes).unwrap();
                    bytes
                };
                let [keys, values] = [[b[4], b[6]], [b[5], b[7]]].map(|pair| pair.map(&mut get));
                assert!(keys[0] == keys[1], "keys, {dtype} {style:?} at {position}");
                assert!(values[0] == values[1], "values, {dtype} {style:?} at {position}");
                assert!(keys[0].iter().any(|&b| b != 0), "nothing was written");
            }
        }
    }
}
