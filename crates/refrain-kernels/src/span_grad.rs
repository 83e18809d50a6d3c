//! Gradient of attention among rows.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::SpanAttention;
use refrain_tensor::{DType, Shape};

use crate::error::{KernelError, OpCase};
use crate::gemm::GEMM_DTYPES;
use crate::load::Kernels;
use crate::matmul::{MATMUL_DTYPES, write_floats};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::span::{
    BLOCK, EXACT_ROWS, SIZES, SIZES_BYTES, STRIDES, SpanSizes, Strides, fits, if_fits, lines, read_heads,
    read_spans, tile_for,
};
use crate::view::BufView;
use crate::vouch::Vouch;

/// Pairs of row and head per block of the first launch.
const PAIRS: usize = 64;

/// Computes the gradients of `q`, `k` and `v`.
#[derive(Clone, Copy, Debug)]
pub struct SpanGradArgs<'a> {
    /// Op.
    pub attention: SpanAttention,
    /// `[n, n_heads, head_dim]`, F32, F16 or BF16, in any layout: the gradient of `y`.
    pub dy: BufView,
    /// Query rows of the same dtype and shape.
    pub q: BufView,
    /// `[n, n_kv_heads, head_dim]`.
    pub k: BufView,
    /// Like `k`.
    pub v: BufView,
    /// `[n, 2]` I32: first and end row of each row's document.
    pub spans: Buf,
    /// Output of the attention, in any layout.
    pub y: BufView,
    /// `[n, n_heads]` F32.
    pub lse: Buf,
    /// Shaped like `q`, contiguous.
    pub dq: Buf,
    /// Shaped like `k`, contiguous.
    pub dk: Buf,
    /// Shaped like `v`, contiguous.
    pub dv: Buf,
    /// Scratch of [`span_grad_scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Scratch size of [`Kernels::span_attention_grad`].
#[must_use]
pub fn span_grad_scratch_bytes(n: usize, n_heads: usize) -> u64 {
    8 * (n.next_multiple_of(2) as u64).saturating_mul(n_heads as u64)
}

pub(crate) fn keys_bytes((size, rows): (usize, usize)) -> u32 {
    lines(2 * rows + 256, size) + 1024
}

fn queries_bytes((size, rows): (usize, usize)) -> u32 {
    lines(2 * rows + 256, size)
}

impl Kernels {
    /// Pushes the launches for [`SpanGradArgs`]: row sums, then the gradients of keys and values, then that
    /// of queries.
    pub fn span_attention_grad(
        &self,
        a: &SpanGradArgs<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let (q, k, dtype) = (a.q.layout.shape(), a.k.layout.shape(), a.q.dtype);
        let dim = |shape: Shape, i: usize| shape.dims().get(i).copied().unwrap_or(0);
        let [n, n_heads, head_dim, n_kv_heads] = [dim(q, 0), dim(q, 1), dim(q, 2), dim(k, 1)];
        let shape = [("n", n), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim)];
        let case = OpCase { op: "span_attention_grad", dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, MATMUL_DTYPES.contains(&dtype), "heads are F32, F16 or BF16");
        let sizes = SpanSizes::new(&case, &a.attention, q, k)?;
        let (of_q, of_k, of_v) = (
            case.heads("q", &a.q, q.dims())?,
            case.heads("k", &a.k, k.dims())?,
            case.heads("v", &a.v, k.dims())?,
        );
        let (of_dy, of_y) = (case.heads("dy", &a.dy, q.dims())?, case.heads("y", &a.y, q.dims())?);
        let size = dtype.block_bytes();
        let result = |name, buf, heads: usize| {
            case.buf(name, buf, (n * heads).checked_mul(head_dim * size), size as u64)
        };
        let (dq, dk, dv) =
            (result("dq", a.dq, n_heads)?, result("dk", a.dk, n_kv_heads)?, result("dv", a.dv, n_kv_heads)?);
        let pairs = usize::try_from(span_grad_scratch_bytes(n, n_heads)).ok();
        let pairs = case.buf("scratch", a.scratch, pairs, 16)?;
        let spans = case.words("spans", a.spans, &[n, 2])?;
        let lse = case.words("lse", a.lse, &[n, n_heads])?;
        let strides =
            Strides { q: of_q.strides, k: of_k.strides, v: of_v.strides, dy: of_dy.strides, y: of_y.strides };
        let aligned = [&of_q, &of_k, &of_v, &of_dy].iter().all(|heads| heads.is_aligned)
            && [dq, dk, dv].iter().all(|buf| buf.offset().is_multiple_of(16));
        let tile = tile_for(dtype, head_dim).filter(|&tile| aligned && fits(self.card(), keys_bytes(tile)));
        if let Some((_, rows)) = tile {
            crate::require!(
                case,
                n.div_ceil(rows) <= 65_535,
                "at most {} rows fit in one launch",
                65_535 * rows
            );
        }
        let name = lowercase(dtype);
        let grid = (n * n_heads).div_ceil(PAIRS) as u32;
        launches.push(
            self.launch(&format!("span_grad_pairs_{name}"), grid, BLOCK)?
                .step(a.step)
                .write(pairs)
                .read(of_dy.buf)
                .read(of_y.buf)
                .read(lse)
                .baked(Baked(strides))
                .baked(Baked(sizes))
                .vouch(&case),
        );
        let side = |side: &str, heads: usize, shared: fn((usize, usize)) -> u32| match tile {
            Some(tile) => {
                let grid = [heads as u32, n.div_ceil(tile.1) as u32];
                let kernel = format!("span_grad_{side}_d{}_{name}", tile.0);
                Ok(self.launch(&kernel, grid, BLOCK)?.shared(shared(tile)))
            }
            None => {
                let grid = (n * heads).div_ceil(EXACT_ROWS) as u32;
                self.launch(&format!("span_grad_{side}_exact_{name}"), grid, BLOCK)
            }
        };
        for launch in [
            side("keys", n_kv_heads, keys_bytes)?.write(dk).write(dv),
            side("queries", n_heads, queries_bytes)?.write(dq),
        ] {
            launches.push(
                launch
                    .step(a.step)
                    .read(of_dy.buf)
                    .read(of_q.buf)
                    .read(of_k.buf)
                    .read(of_v.buf)
                    .read(spans)
                    .read(pairs)
                    .baked(Baked(strides))
                    .baked(Baked(sizes))
                    .vouch(&case),
            );
        }
        Ok(())
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let of_pairs = [P, P, P, P, STRIDES, SIZES_BYTES];
    let of_keys = [P, P, P, P, P, P, P, P, STRIDES, SIZES_BYTES];
    let of_queries = [P, P, P, P, P, P, P, STRIDES, SIZES_BYTES];
    let new = |name: String, params: &[usize], twin: fn(&mut SimKernel<'_>, DType) -> KernelResult, dtype| {
        KernelEntry::new(KernelFamily::SpanGrad, name, params, move |k| twin(k, dtype))
    };
    for dtype in MATMUL_DTYPES {
        let name = lowercase(dtype);
        let exact = [
            new(format!("span_grad_pairs_{name}"), &of_pairs, pairs, dtype),
            new(format!("span_grad_keys_exact_{name}"), &of_keys, keys, dtype),
            new(format!("span_grad_queries_exact_{name}"), &of_queries, queries, dtype),
        ];
        all.extend(exact.map(|entry| entry.unit("exact")));
    }
    for dtype in GEMM_DTYPES {
        for (size, times) in SIZES {
            let (tile, name) = ((size, 64 * times), lowercase(dtype));
            let unit = |side: &str| format!("{side}_d{size}_{name}");
            let entry = new(format!("span_grad_keys_d{size}_{name}"), &of_keys, keys, dtype);
            all.push(entry.unit(&unit("keys")).shared(move |card| if_fits(card, keys_bytes(tile))));
            let entry = new(format!("span_grad_queries_d{size}_{name}"), &of_queries, queries, dtype);
            all.push(entry.unit(&unit("queries")).shared(move |card| if_fits(card, queries_bytes(tile))));
        }
    }
}

fn pairs(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (strides, s): (Strides, SpanSizes) = (k.arg(4)?, k.arg(5)?);
    let [n, n_heads, head_dim, pitch] = [s.n, s.n_heads, s.head_dim, s.pitch].map(|n| n as usize);
    let dims = [n, n_heads, head_dim];
    let dy = read_heads(k, k.ptr(1)?, strides.dy, dims, dtype)?;
    let y = read_heads(k, k.ptr(2)?, strides.y, dims, dtype)?;
    let lse: Vec<f32> = k.read(k.ptr(3)?, n * n_heads)?;
    let mut pairs = vec![[0.0_f32; 2]; n_heads * pitch];
    for (i, (dy, y)) in dy.chunks_exact(head_dim).zip(y.chunks_exact(head_dim)).enumerate() {
        if lse[i] == f32::NEG_INFINITY {
            continue;
        }
        let sum: f64 = dy.iter().zip(y).map(|(a, b)| a * b).sum();
        pairs[i % n_heads * pitch + i / n_heads] = [lse[i] * std::f32::consts::LOG2_E, sum as f32];
    }
    k.write(k.ptr(0)?, pairs.as_flattened())
}

/// Operands that both gradient kernels read.
struct GradOperands {
    s: SpanSizes,
    dy: Vec<f64>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    spans: Vec<[i32; 2]>,
    pairs: Vec<f32>,
}

impl GradOperands {
    /// Reads the operands from parameter `first` on.
    fn read(k: &SimKernel<'_>, first: usize, dtype: DType) -> KernelResult<GradOperands> {
        let (strides, s): (Strides, SpanSizes) = (k.arg(first + 6)?, k.arg(first + 7)?);
        let [n, n_heads, n_kv_heads, head_dim] =
            [s.n, s.n_heads, s.n_kv_heads, s.head_dim].map(|n| n as usize);
        let (dims, kv_dims) = ([n, n_heads, head_dim], [n, n_kv_heads, head_dim]);
        Ok(GradOperands {
            s,
            dy: read_heads(k, k.ptr(first)?, strides.dy, dims, dtype)?,
            q: read_heads(k, k.ptr(first + 1)?, strides.q, dims, dtype)?,
            k: read_heads(k, k.ptr(first + 2)?, strides.k, kv_dims, dtype)?,
            v: read_heads(k, k.ptr(first + 3)?, strides.v, kv_dims, dtype)?,
            spans: read_spans(k, k.ptr(first + 4)?, n)?,
            pairs: k.read(k.ptr(first + 5)?, 2 * n_heads * s.pitch as usize)?,
        })
    }

    /// Calls `f` for each query and visible key, with their indices, the softmax weight and the gradient of
    /// the score.
    fn each(&self, mut f: impl FnMut(usize, usize, f64, f64)) {
        let [n, n_heads, n_kv_heads, d] =
            [self.s.n, self.s.n_heads, self.s.n_kv_heads, self.s.head_dim].map(|n| n as usize);
        let attention = self.s.attention();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for row in 0..n {
            let [first, end] = self.spans[row];
            if first == end {
                continue;
            }
            for head in 0..n_heads {
                let query = (row * n_heads + head) * d;
                let pair = 2 * (head * self.s.pitch as usize + row);
                let [lse, sum] = [self.pairs[pair], self.pairs[pair + 1]].map(f64::from);
                for other in attention.seen(row, [first as usize, end as usize]) {
                    let key = (other * n_kv_heads + head / (n_heads / n_kv_heads)) * d;
                    let scale = f64::from(attention.scale);
                    let score = dot(&self.q[query..][..d], &self.k[key..][..d]) * scale;
                    let (score, slope) = match attention.softcap.map(f64::from) {
                        Some(cap) => {
                            let t = (score / cap).tanh();
                            (cap * t, scale * (1.0 - t * t))
                        }
                        None => (score, scale),
                    };
                    let p = (score * std::f64::consts::LOG2_E - lse).exp2();
                    let ds = p * (dot(&self.dy[query..][..d], &self.v[key..][..d]) - sum) * slope;
                    f(query, key, p, ds);
                }
            }
        }
    }
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

fn keys(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let operands = GradOperands::read(k, 2, dtype)?;
    let d = operands.s.head_dim as usize;
    let [mut dk, mut dv] = [vec![0.0; operands.k.len()], vec![0.0; operands.v.len()]];
    operands.each(|query, key, p, ds| {
        add(&mut dk[key..][..d], ds, &operands.q[query..]);
        add(&mut dv[key..][..d], p, &operands.dy[query..]);
    });
    write_floats(k, k.ptr(0)?, &dk, dtype)?;
    write_floats(k, k.ptr(1)?, &dv, dtype)
}

fn queries(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let operands = GradOperands::read(k, 1, dtype)?;
    let d = operands.s.head_dim as usize;
    let mut dq = vec![0.0; operands.q.len()];
    operands.each(|query, key, _, ds| add(&mut dq[query..][..d], ds, &operands.k[key..]));
    write_floats(k, k.ptr(0)?, &dq, dtype)
}
