//! Cases of RoPE, KV append and attention over the paged cache.

use super::FLOATS;
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::{Fill, Rng};
use refrain_graph::{Attention, Op, PagedCaches, Rope, RopeStyle, View};
use refrain_tensor::DType;

pub(super) fn rope() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            for (head_dim, n_dims, magnitude) in [(2, 2, 1.0), (64, 64, 1.0), (10, 6, 1.0), (96, 96, 1.25)] {
                let op = Op::Rope(Rope { style, n_dims, magnitude });
                let positions = vec![0, 1, 7, -1, 1000, 131_071];
                let inv_freq: Vec<f32> =
                    (0..n_dims / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / n_dims as f32)).collect();
                let args = vec![
                    Arg::float(dtype, [6, 3, head_dim]),
                    Arg::ints([6], positions),
                    Arg::weight(DType::F32, [n_dims / 2]).fill(Fill::Floats(inv_freq)),
                ];
                let name = format!("{dtype} {style:?} {n_dims} of {head_dim}, times {magnitude}");
                // The angle is a multiple of a position beyond 2^17, where an f32 angle is off by 2^-7 of a
                // turn.
                cases.push(Case::one_node(name, op, Tol::Whole(1.5e-2).rounded_to(dtype), args));
            }
        }
        let op = Op::Rope(Rope { style: RopeStyle::Neox, n_dims: 8, magnitude: 1.0 });
        let args = vec![
            Arg::float(dtype, [5, 40]).view(View::Slice { axis: 1, start: 16, len: 16 }).view(heads(5, 2, 8)),
            Arg::ints([5], vec![0, 1, 2, 3, 63]),
            Arg::weight(DType::F32, [4]).fill(Fill::Floats(vec![1.0, 0.3, 0.1, 0.03])),
        ];
        let tol = Tol::Whole(1e-5).rounded_to(dtype);
        cases.push(Case::one_node(format!("{dtype} keys of a joined projection"), op, tol, args));
    }
    cases
}

fn heads(n: usize, n_heads: usize, head_dim: usize) -> View {
    View::Reshape(refrain_tensor::Shape::from([n, n_heads, head_dim]))
}

/// Block tables of several sequences.
struct CaseBlockTables {
    kv_block: usize,
    max_blocks: usize,
    n_blocks: usize,
    tables: Vec<i32>,
}

impl CaseBlockTables {
    /// Shuffled blocks for sequences of these lengths; unused entries are -1.
    fn new(kv_block: usize, lengths: &[usize], seed: u64) -> CaseBlockTables {
        let n_used: usize = lengths.iter().map(|l| l.div_ceil(kv_block)).sum();
        let n_blocks = n_used + 2;
        let max_blocks = lengths.iter().map(|l| l.div_ceil(kv_block)).max().unwrap_or(0) + 1;
        let mut blocks = Rng::new(seed).shuffled(n_blocks).into_iter();
        let mut tables = vec![-1; lengths.len() * max_blocks];
        for (seq, &length) in lengths.iter().enumerate() {
            for column in 0..length.div_ceil(kv_block) {
                tables[seq * max_blocks + column] = blocks.next().map_or(-1, |b| b as i32);
            }
        }
        CaseBlockTables { kv_block, max_blocks, n_blocks, tables }
    }

    fn tables(&self) -> Arg {
        Arg::ints([self.tables.len() / self.max_blocks, self.max_blocks], self.tables.clone())
    }

    fn scales(&self, n_kv_heads: usize) -> Arg {
        Arg::state(DType::F32, [self.n_blocks, n_kv_heads, self.kv_block])
    }

    fn cache(&self, dtype: DType, n_kv_heads: usize, head_dim: usize) -> Arg {
        Arg::state(dtype, [self.n_blocks, n_kv_heads, self.kv_block, head_dim])
    }
}

/// Every position of every sequence, shuffled: positions, then sequences.
fn all_rows(lengths: &[usize], seed: u64) -> (Vec<i32>, Vec<i32>) {
    let rows: Vec<(i32, i32)> =
        lengths.iter().enumerate().flat_map(|(s, &l)| (0..l).map(move |p| (p as i32, s as i32))).collect();
    Rng::new(seed).shuffled(rows.len()).into_iter().map(|i| rows[i]).unzip()
}

pub(super) fn kv_append() -> Vec<Case> {
    let mut cases = Vec::new();
    for (cache, x) in [
        (DType::F32, DType::F32),
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
    ] {
        let pages = CaseBlockTables::new(4, &[6, 1, 9], 3);
        let (mut positions, mut seqs) = all_rows(&[6, 1, 9], 4);
        // Padding rows with arbitrary sequences.
        positions.extend([-1, -1]);
        seqs.extend([-1, 99]);
        let n = positions.len();
        let args = vec![
            pages.cache(cache, 2, 5),
            Arg::float(x, [n, 2, 5]),
            Arg::ints([n], positions),
            Arg::ints([n], seqs),
            pages.tables(),
        ];
        cases.push(Case::one_node(
            format!("{x} into {cache}, three sequences and padding"),
            Op::KvAppend,
            Tol::Bits,
            args,
        ));
    }
    cases
}

/// Appends to an 8-bit cache, whose rows are rounded with a scale each.
pub(super) fn kv_append_bytes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (x, head_dim, reach) in [(DType::F32, 5, 3.0), (DType::F16, 64, 400.0), (DType::F32, 32, 1e-37)] {
        let pages = CaseBlockTables::new(4, &[6, 1, 9], 3);
        let (mut positions, mut seqs) = all_rows(&[6, 1, 9], 4);
        positions.extend([-1, -1]);
        seqs.extend([-1, 99]);
        let n = positions.len();
        let args = vec![
            pages.cache(DType::U8, 2, head_dim),
            pages.scales(2),
            Arg::float(x, [n, 2, head_dim]).fill(Fill::Uniform(-reach, reach)),
            Arg::ints([n], positions),
            Arg::ints([n], seqs),
            pages.tables(),
        ];
        let name = format!("{x} of {head_dim} up to {reach}, three sequences and padding");
        cases.push(Case::build(name, Op::KvAppendBytes, Tol::Bits, args, |b, v| {
            Ok(b.kv_append_bytes([v[0], v[1]], v[2], [v[3], v[4], v[5]])?.to_vec())
        }));
    }
    cases
}

struct AttentionShape {
    name: &'static str,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    kv_block: usize,
    lengths: &'static [usize],
    /// (sequence, position) of each query row.
    rows: &'static [(i32, i32)],
    window: Option<usize>,
    softcap: Option<f32>,
    /// Factor on the queries; large values make a single key dominate.
    sharpness: f32,
}

const PLAIN: AttentionShape = AttentionShape {
    name: "one row",
    n_heads: 1,
    n_kv_heads: 1,
    head_dim: 4,
    kv_block: 16,
    lengths: &[1],
    rows: &[(0, 0)],
    window: None,
    softcap: None,
    sharpness: 1.0,
};

pub(super) fn attention() -> Vec<Case> {
    const PREFILL: &[(i32, i32)] = &[(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6)];
    const BATCH: &[(i32, i32)] = &[(2, 40), (0, 4), (-1, -1), (1, 16), (7, -1), (0, 2)];
    let shapes = [
        PLAIN,
        AttentionShape {
            name: "prefill",
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 6,
            kv_block: 4,
            lengths: &[7],
            rows: PREFILL,
            ..PLAIN
        },
        AttentionShape {
            name: "batch with padding",
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 16,
            kv_block: 4,
            lengths: &[5, 17, 41],
            rows: BATCH,
            ..PLAIN
        },
        AttentionShape {
            name: "one kv head",
            n_heads: 5,
            head_dim: 64,
            lengths: &[33],
            rows: &[(0, 32), (0, 31)],
            ..PLAIN
        },
        AttentionShape {
            name: "long",
            n_heads: 2,
            head_dim: 32,
            kv_block: 32,
            lengths: &[700],
            rows: &[(0, 699), (0, 600)],
            ..PLAIN
        },
        AttentionShape {
            name: "window of one",
            head_dim: 8,
            lengths: &[9],
            rows: &[(0, 8), (0, 0)],
            window: Some(1),
            ..PLAIN
        },
        AttentionShape {
            name: "window across blocks",
            head_dim: 8,
            kv_block: 4,
            lengths: &[19],
            rows: &[(0, 18), (0, 3), (0, 6)],
            window: Some(7),
            ..PLAIN
        },
        AttentionShape {
            name: "window wider than the past",
            lengths: &[5],
            rows: &[(0, 4)],
            window: Some(100),
            ..PLAIN
        },
        AttentionShape {
            name: "softcap",
            head_dim: 8,
            lengths: &[12],
            rows: &[(0, 11)],
            softcap: Some(2.0),
            sharpness: 10.0,
            ..PLAIN
        },
        AttentionShape {
            name: "one key wins",
            head_dim: 16,
            lengths: &[21],
            rows: &[(0, 20), (0, 7)],
            sharpness: 500.0,
            ..PLAIN
        },
    ];
    let types = [
        (DType::F32, DType::F32),
        (DType::F32, DType::F16),
        (DType::F32, DType::BF16),
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::U8),
    ];
    shapes.iter().flat_map(|shape| types.map(|(q, kv)| attention_case(shape, q, kv))).collect()
}

/// Two appends fill the caches, then attention reads them.
fn attention_case(shape: &AttentionShape, q: DType, kv: DType) -> Case {
    let &AttentionShape { n_heads, n_kv_heads, head_dim, lengths, .. } = shape;
    let pages = CaseBlockTables::new(shape.kv_block, lengths, 5);
    let (positions, seqs) = all_rows(lengths, 6);
    let (n_past, n) = (positions.len(), shape.rows.len());
    let scale = 1.0 / (head_dim as f32).sqrt();
    let attention = Attention { scale, window: shape.window, softcap: shape.softcap };
    let reach = 2.0 * shape.sharpness;
    let args = vec![
        Arg::float(q, [n, n_heads, head_dim]).fill(Fill::Uniform(-reach, reach)),
        pages.cache(kv, n_kv_heads, head_dim),
        pages.cache(kv, n_kv_heads, head_dim),
        Arg::ints([n], shape.rows.iter().map(|r| r.1).collect()),
        Arg::ints([n], shape.rows.iter().map(|r| r.0).collect()),
        pages.tables(),
        Arg::float(DType::F32, [n_past, n_kv_heads, head_dim]),
        Arg::float(DType::F32, [n_past, n_kv_heads, head_dim]),
        Arg::ints([n_past], positions),
        Arg::ints([n_past], seqs),
        pages.scales(n_kv_heads),
        pages.scales(n_kv_heads),
    ];
    let in_bytes = kv == DType::U8;
    let mut args: Vec<Arg> = args.into_iter().take(if in_bytes { 12 } else { 10 }).collect();
    let name = format!("{}, {q} over {kv}", shape.name);
    // Scores in the hundreds cost a few bits of the exponential's argument.
    let tol = Tol::Whole(if shape.sharpness > 100.0 { 1e-3 } else { 2e-5 }).rounded_to(q);
    // Every other shape has sinks: among the scores, far below and far above them.
    if n_heads.is_multiple_of(2) {
        let sinks = (0..n_heads).map(|head| [0.5, 2.0, -90.0, 200.0][head % 4]).collect();
        args.push(Arg::weight(DType::F32, [n_heads]).fill(Fill::Floats(sinks)));
    }
    Case::build(name, Op::Attention(attention), tol, args, |b, v| {
        let (past, places) = ([v[8], v[9], v[5]], [v[3], v[4], v[5]]);
        if in_bytes {
            let k = b.kv_append_bytes([v[1], v[10]], v[6], past)?;
            let v_cache = b.kv_append_bytes([v[2], v[11]], v[7], past)?;
            let caches = PagedCaches { rows: [k[0], v_cache[0]], scales: Some([k[1], v_cache[1]]) };
            return Ok(vec![b.attention_over(attention, v[0], caches, places, v.get(12).copied())?]);
        }
        let k = b.kv_append(v[1], v[6], past)?;
        let v_cache = b.kv_append(v[2], v[7], past)?;
        let caches = PagedCaches { rows: [k, v_cache], scales: None };
        Ok(vec![b.attention_over(attention, v[0], caches, places, v.get(10).copied())?])
    })
}
