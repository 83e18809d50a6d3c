//! Cases of training matmuls and attention: values in any layout, rows in documents.

use refrain_graph::{Op, SpanAttention, TensorType, TrainOp};
use refrain_kernels::{BufView, MatMulArgs, SpanArgs, SpanGradArgs, span_grad_scratch_bytes};
use refrain_tensor::{DType, Layout};
use refrain_testkit::{Rng, Tol, encode};

use crate::bed::{Case, Operand, Role, contiguous, i32s, normals, reference, shape};

/// Sums in f32 against f64, and one rounding to the dtype.
fn rounded_once(dtype: DType) -> Tol {
    Tol::Whole(5e-6).rounded_to(dtype)
}

/// An output whose elements are not four bytes long.
fn out(bytes: Vec<u8>, dtype: DType, tol: Tol) -> Role {
    Role::InOut { before: vec![0xcd; bytes.len()], after: bytes, dtype, tol }
}

pub fn matmul() -> Vec<Case> {
    let mut cases = Vec::new();
    let turned = |dims: &[usize]| contiguous(dims).transpose().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Aligned and unaligned, whole tiles and tails, all dimensions of one.
        for (m, k, n) in [(1, 1, 1), (5, 33, 7), (64, 64, 128), (72, 136, 136), (67, 70, 131)] {
            for (a, b) in [
                (contiguous(&[m, k]), contiguous(&[k, n])),
                (contiguous(&[m, k]), turned(&[n, k])),
                (turned(&[k, m]), contiguous(&[k, n])),
                (turned(&[k, m]), turned(&[n, k])),
            ] {
                cases.push(matmul_case(dtype, a, b));
            }
        }
        // Slices of wider rows, at even and odd offsets.
        for start in [8, 3] {
            let a = contiguous(&[40, 96]).slice(1, start, 72).unwrap();
            let b = contiguous(&[72, 160]).slice(1, start, 130).unwrap();
            cases.push(matmul_case(dtype, a, b));
            let b = contiguous(&[130, 96]).slice(1, start, 72).unwrap().transpose().unwrap();
            cases.push(matmul_case(dtype, a, b));
        }
        // Every second element, and one repeated row.
        let every_second = contiguous(&[9, 40, 2]).slice(2, 1, 1).unwrap().reshape(shape(&[9, 40])).unwrap();
        cases.push(matmul_case(dtype, every_second, contiguous(&[40, 11])));
        let repeated = contiguous(&[1, 40]).broadcast_to(shape(&[9, 40])).unwrap();
        cases.push(matmul_case(dtype, repeated, turned(&[11, 40])));
        // Batches: separate matrices, one shared matrix on either side, heads in the middle.
        cases.push(matmul_case(dtype, contiguous(&[3, 5, 7]), contiguous(&[3, 7, 9])));
        cases.push(matmul_case(dtype, contiguous(&[3, 5, 24]), contiguous(&[24, 9])));
        cases.push(matmul_case(dtype, contiguous(&[5, 8]), contiguous(&[2, 3, 8, 9])));
        let heads = contiguous(&[2, 5, 3, 16]).permute(&[0, 2, 1, 3]).unwrap();
        let keys = contiguous(&[2, 6, 3, 16]).permute(&[0, 2, 3, 1]).unwrap();
        cases.push(matmul_case(dtype, heads, keys));
        cases.push(matmul_case(dtype, heads, contiguous(&[2, 1, 16, 10])));
    }
    cases
}

fn matmul_case(dtype: DType, a: Layout, b: Layout) -> Case {
    let [left, right] = [(a, 1), (b, 2)].map(|(l, seed)| encode(dtype, &normals(l.end(), seed)));
    let inputs = [Operand(dtype, a, &left), Operand(dtype, b, &right)];
    let operand = |l: &Layout| TensorType { dtype, shape: l.shape() };
    let ty = Op::MatMul.infer(&[operand(&a), operand(&b)]).unwrap()[0];
    let mut outputs = [(ty, vec![0; dtype.block_bytes() * ty.shape.n_elements()])];
    reference(&Op::MatMul, &inputs, &mut outputs);
    let [(_, y)] = outputs;
    let name = format!("matmul {dtype} {a:?} by {b:?}");
    let roles = vec![out(y, dtype, rounded_once(dtype)), Role::In(left), Role::In(right)];
    Case::new(name, roles, move |kernels, bufs, launches| {
        let (a, b) = (BufView { buf: bufs[1], dtype, layout: a }, BufView { buf: bufs[2], dtype, layout: b });
        launches.push(kernels.matmul(&MatMulArgs { a, b, y: bufs[0], c: None, step: "case" })?);
        Ok(())
    })
}

/// Rows of an attention case: their documents and the layout of heads.
#[derive(Clone)]
struct Rows {
    dtype: DType,
    heads: [usize; 2],
    head_dim: usize,
    spans: Vec<[i32; 2]>,
    /// Whether queries, keys and values are parts of one row, with NaN between them.
    joined: bool,
}

/// Documents of these lengths, followed by padding.
fn documents(lengths: &[usize], padding: usize) -> Vec<[i32; 2]> {
    let mut spans = Vec::new();
    for &len in lengths {
        let first = spans.len() as i32;
        spans.extend(std::iter::repeat_n([first, first + len as i32], len));
    }
    spans.extend(std::iter::repeat_n([0, 0], padding));
    spans
}

/// Documents of random lengths that fill `n` rows, with padding among them.
fn random_documents(n: usize, seed: u64) -> Vec<[i32; 2]> {
    let mut rng = Rng::new(seed);
    let mut spans: Vec<[i32; 2]> = Vec::new();
    while spans.len() < n {
        let len = (1 + rng.below(60)).min(n - spans.len());
        let first = spans.len() as i32;
        let span = if rng.below(5) == 0 { [7, 7] } else { [first, first + len as i32] };
        spans.extend(std::iter::repeat_n(span, len));
    }
    spans
}

fn attention_rows() -> Vec<(SpanAttention, Rows)> {
    let plain = SpanAttention { scale: 0.25, causal: true, window: None, softcap: None };
    let both_ways = SpanAttention { causal: false, ..plain };
    let windowed = |window| SpanAttention { window: Some(window), ..plain };
    let mut rows = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let base =
            Rows { dtype, heads: [2, 1], head_dim: 64, spans: documents(&[70, 1, 69], 5), joined: false };
        rows.push((plain, base.clone()));
        rows.push((plain, Rows { joined: true, spans: documents(&[135], 0), ..base.clone() }));
        rows.push((both_ways, Rows { spans: random_documents(131, 3), ..base.clone() }));
        rows.push((windowed(9), Rows { heads: [3, 3], spans: random_documents(77, 4), ..base.clone() }));
        for head_dim in [8, 40, 72, 128] {
            let spans = random_documents(67, head_dim as u64);
            rows.push((plain, Rows { head_dim, heads: [4, 2], spans, ..base.clone() }));
        }
        // Four blocks of rows.
        let four = Rows { heads: [1, 1], head_dim: 72, spans: documents(&[40, 160], 0), ..base.clone() };
        rows.push((plain, four));
        // Unsuitable for tensor cores.
        rows.push((plain, Rows { head_dim: 5, spans: documents(&[9, 30], 1), ..base.clone() }));
        rows.push((both_ways, Rows { head_dim: 136, spans: documents(&[21], 0), ..base.clone() }));
        let capped = SpanAttention { softcap: Some(1.5), scale: -0.25, ..plain };
        rows.push((capped, Rows { spans: documents(&[40, 33], 0), ..base.clone() }));
        let turned = SpanAttention { scale: -0.25, ..windowed(50) };
        rows.push((turned, Rows { spans: documents(&[3, 90], 2), joined: true, ..base.clone() }));
        rows.push((
            plain,
            Rows { heads: [1, 1], head_dim: 16, spans: documents(&[1, 2], 0), ..base.clone() },
        ));
        rows.push((plain, Rows { spans: documents(&[], 3), ..base }));
    }
    rows
}

/// An operand in its own buffer: `[n, heads, head_dim]`.
struct Operands {
    layout: Layout,
    bytes: Vec<u8>,
}

impl Rows {
    fn n(&self) -> usize {
        self.spans.len()
    }

    /// Rows past the last document and gaps between the parts of a row hold NaN.
    fn operand(&self, heads: usize, seed: u64) -> Operands {
        let (n, d) = (self.n(), self.head_dim);
        let layout = match self.joined {
            true => contiguous(&[n, heads + 2, d]).slice(1, 1, heads).unwrap(),
            false => contiguous(&[n, heads, d]),
        };
        let size = self.dtype.block_bytes();
        let mut bytes = vec![0xff; size * if self.joined { n * (heads + 2) * d } else { n * heads * d }];
        let values = encode(self.dtype, &normals(n * heads * d, seed));
        let last = self.spans.iter().rposition(|[first, end]| first < end).map_or(0, |last| last + 1);
        let indices: Vec<usize> = layout.indices().collect();
        for (i, at) in indices.into_iter().enumerate().take(last * heads * d) {
            bytes[at * size..][..size].copy_from_slice(&values[i * size..][..size]);
        }
        Operands { layout, bytes }
    }

    fn operands(&self) -> [Operands; 4] {
        let [n_heads, n_kv_heads] = self.heads;
        [(n_heads, 1), (n_heads, 2), (n_kv_heads, 3), (n_kv_heads, 4)]
            .map(|(heads, seed)| self.operand(heads, seed))
    }

    fn name(&self, op: &str, attention: &SpanAttention) -> String {
        let Rows { dtype, heads, head_dim, joined, .. } = self;
        format!("{op} {dtype} n={} {heads:?} of {head_dim} joined={joined} {attention:?}", self.n())
    }

    /// The reference's `y` and log-sum-exp.
    fn forward(&self, attention: SpanAttention, [_, q, k, v]: &[Operands; 4]) -> [Vec<u8>; 2] {
        let spans: Vec<i32> =
            self.spans.iter().flat_map(|&[a, b]| if a < b { [a, b] } else { [0, 0] }).collect();
        let spans = i32s(&spans);
        let dims = [self.n(), self.heads[0], self.head_dim];
        let inputs = [q, k, v].map(|x| Operand(self.dtype, x.layout, &x.bytes));
        let spans = Operand(DType::I32, contiguous(&[self.n(), 2]), &spans);
        let [q, k, v] = inputs;
        let size = self.dtype.block_bytes();
        let mut outputs = [
            (TensorType::new(self.dtype, shape(&dims)), vec![0; size * dims.iter().product::<usize>()]),
            (TensorType::new(DType::F32, shape(&dims[..2])), vec![0; 4 * dims[0] * dims[1]]),
        ];
        reference(&Op::SpanAttention(attention), &[q, k, v, spans], &mut outputs);
        outputs.map(|(_, bytes)| bytes)
    }
}

pub fn attention() -> Vec<Case> {
    let mut cases: Vec<Case> =
        attention_rows().into_iter().map(|(attention, rows)| attention_case(attention, rows)).collect();
    // Invalid spans count as padding.
    let plain = SpanAttention { scale: 0.25, causal: true, window: None, softcap: None };
    for dtype in [DType::F32, DType::BF16] {
        let mut spans = documents(&[30, 40], 0);
        spans[..10].fill([-4, 20]);
        spans[10..20].fill([0, 71]);
        spans[20..25].fill([i32::MIN, i32::MAX]);
        spans[25..30].fill([40, 70]);
        cases.push(attention_case(plain, Rows { dtype, heads: [2, 1], head_dim: 64, spans, joined: false }));
    }
    cases
}

fn attention_case(attention: SpanAttention, rows: Rows) -> Case {
    let operands = rows.operands();
    let (n, given) = (rows.n(), rows.spans.clone());
    let is_good =
        |row: usize, [a, b]: [i32; 2]| a >= 0 && a <= row as i32 && (row as i32) < b && b <= n as i32;
    let good = given.iter().enumerate().map(|(i, &s)| if is_good(i, s) { s } else { [0, 0] }).collect();
    let [y, lse] = Rows { spans: good, ..rows.clone() }.forward(attention, &operands);
    let tol = Tol::Whole(1e-5).rounded_to(rows.dtype).rounded_to(rows.dtype);
    let lse =
        Role::InOut { before: vec![0xcd; lse.len()], after: lse, dtype: DType::F32, tol: Tol::Whole(1e-5) };
    let spans: Vec<i32> = given.into_iter().flatten().collect();
    let name = rows.name("span_attention", &attention);
    let [_, q, k, v] = operands;
    let layouts = [q.layout, k.layout, v.layout];
    let roles = vec![
        out(y, rows.dtype, tol),
        lse,
        Role::In(i32s(&spans)),
        Role::In(q.bytes),
        Role::In(k.bytes),
        Role::In(v.bytes),
    ];
    Case::new(name, roles, move |kernels, b, launches| {
        let view = |i: usize| BufView { buf: b[3 + i], dtype: rows.dtype, layout: layouts[i] };
        launches.push(kernels.span_attention(&SpanArgs {
            attention,
            q: view(0),
            k: view(1),
            v: view(2),
            spans: b[2],
            y: b[0],
            lse: b[1],
            step: "case",
        })?);
        Ok(())
    })
}

pub fn attention_grad() -> Vec<Case> {
    attention_rows().into_iter().map(|(attention, rows)| grad_case(attention, rows)).collect()
}

fn grad_case(attention: SpanAttention, rows: Rows) -> Case {
    let operands = rows.operands();
    let [y, lse] = rows.forward(attention, &operands);
    let [dy, q, k, v] = operands;
    let (n, [n_heads, n_kv_heads], dtype) = (rows.n(), rows.heads, rows.dtype);
    let spans: Vec<i32> = rows.spans.iter().flat_map(|&[a, b]| if a < b { [a, b] } else { [0, 0] }).collect();
    let spans = i32s(&spans);
    let dense = contiguous(&[n, n_heads, rows.head_dim]);
    let inputs = [
        Operand(dtype, dy.layout, &dy.bytes),
        Operand(dtype, q.layout, &q.bytes),
        Operand(dtype, k.layout, &k.bytes),
        Operand(dtype, v.layout, &v.bytes),
        Operand(DType::I32, contiguous(&[n, 2]), &spans),
        Operand(dtype, dense, &y),
        Operand(DType::F32, contiguous(&[n, n_heads]), &lse),
    ];
    let mut outputs = [n_heads, n_kv_heads, n_kv_heads].map(|heads| {
        let dims = [n, heads, rows.head_dim];
        (TensorType::new(dtype, shape(&dims)), vec![0; dtype.block_bytes() * dims.iter().product::<usize>()])
    });
    reference(&Op::Train(TrainOp::SpanAttentionGrad(attention)), &inputs, &mut outputs);
    let tol = Tol::Whole(2e-5).rounded_to(dtype).rounded_to(dtype).rounded_to(dtype);
    let mut roles: Vec<Role> = outputs.into_iter().map(|(_, bytes)| out(bytes, dtype, tol)).collect();
    roles.push(Role::Scratch(span_grad_scratch_bytes(n, n_heads) as usize));
    let layouts = [dy.layout, q.layout, k.layout, v.layout, dense];
    roles.extend([dy.bytes, q.bytes, k.bytes, v.bytes, y, spans, lse].map(Role::In));
    let name = rows.name("span_attention_grad", &attention);
    Case::new(name, roles, move |kernels, b, launches| {
        let view = |i: usize| BufView { buf: b[4 + i], dtype, layout: layouts[i] };
        let args = SpanGradArgs {
            attention,
            dy: view(0),
            q: view(1),
            k: view(2),
            v: view(3),
            spans: b[9],
            y: view(4),
            lse: b[10],
            dq: b[0],
            dk: b[1],
            dv: b[2],
            scratch: b[3],
            step: "case",
        };
        kernels.span_attention_grad(&args, launches)
    })
}
