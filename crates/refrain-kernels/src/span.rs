//! Attention among the rows of a step, each restricted to its document.

use bytemuck::{Pod, Zeroable};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, SpanAttention, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::gemm::GEMM_DTYPES;
use crate::load::Kernels;
use crate::matmul::{MATMUL_DTYPES, read_floats, write_floats};
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::twin::fault;
use crate::view::BufView;
use crate::vouch::Vouch;

/// Threads per block, as in `span.cuh`.
pub(crate) const BLOCK: u32 = 128;
/// Static shared memory of the tensor-core kernels: a span per row.
const DECLARED: usize = 1024;
/// Rows per tile of keys (or of queries, in the gradient of keys).
const TILE: usize = 64;
/// Rows per block of the exact kernels.
pub(crate) const EXACT_ROWS: usize = 4;
/// Maximum head size.
pub const MAX_SPAN_HEAD_DIM: usize = 256;
/// Head sizes with tensor-core kernels, each for sizes up to it, and the number of 16-row fragments per warp.
pub(crate) const SIZES: [(usize, usize); 3] = [(64, 2), (96, 1), (128, 1)];

/// Computes `y[n, n_heads, head_dim]` and the log-sum-exp of the scores.
#[derive(Clone, Copy, Debug)]
pub struct SpanArgs<'a> {
    /// Op.
    pub attention: SpanAttention,
    /// `[n, n_heads, head_dim]`, F32, F16 or BF16, in any layout.
    pub q: BufView,
    /// `[n, n_kv_heads, head_dim]` of the same dtype, in any layout.
    pub k: BufView,
    /// Like `k`.
    pub v: BufView,
    /// `[n, 2]` I32: first and end row of each row's document.
    pub spans: Buf,
    /// Shaped like `q`, contiguous.
    pub y: Buf,
    /// `[n, n_heads]` F32.
    pub lse: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Kernel parameters.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct SpanSizes {
    pub(crate) n: u32,
    pub(crate) n_heads: u32,
    pub(crate) n_kv_heads: u32,
    pub(crate) head_dim: u32,
    /// Attention window in rows for causal attention; 0 means unlimited.
    window: u32,
    causal: u32,
    scale: f32,
    /// Soft cap of the scores; 0 for none.
    softcap: f32,
    /// Row pairs per head.
    pub(crate) pitch: u32,
}

/// Strides in elements between rows, heads and elements.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct HeadStrides {
    row: u32,
    head: u32,
    element: u32,
}

/// Strides of queries, keys and values; for the gradient also of the incoming gradient and of the result.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Strides {
    pub(crate) q: HeadStrides,
    pub(crate) k: HeadStrides,
    pub(crate) v: HeadStrides,
    pub(crate) dy: HeadStrides,
    pub(crate) y: HeadStrides,
}

/// An input operand: its memory and strides.
pub(crate) struct HeadOperand {
    pub(crate) buf: Buf,
    pub(crate) strides: HeadStrides,
    /// Whether the tensor-core kernels can read it.
    pub(crate) is_aligned: bool,
}

impl SpanSizes {
    pub(crate) fn new(
        case: &OpCase<'_>,
        a: &SpanAttention,
        q: Shape,
        k: Shape,
    ) -> Result<SpanSizes, KernelError> {
        let (&[n, n_heads, head_dim], &[rows, n_kv_heads, width]) = (q.dims(), k.dims()) else {
            return Err(case.refuse(format!("queries have shape {q} and keys {k}")));
        };
        let fits = rows == n && width == head_dim && n_heads.is_multiple_of(n_kv_heads.max(1));
        crate::require!(case, fits && n_kv_heads > 0, "queries have shape {q} and keys {k}");
        case.u32("n * n_heads", n.saturating_mul(n_heads))?;
        crate::require!(
            case,
            head_dim <= MAX_SPAN_HEAD_DIM,
            "heads have at most {MAX_SPAN_HEAD_DIM} elements"
        );
        let window = a.window.filter(|_| a.causal).map_or(0, |w| w.clamp(1, i32::MAX as usize) as u32);
        Ok(SpanSizes {
            n: n as u32,
            n_heads: n_heads as u32,
            n_kv_heads: n_kv_heads as u32,
            head_dim: head_dim as u32,
            window,
            causal: u32::from(a.causal),
            scale: a.scale,
            softcap: a.softcap.unwrap_or(0.0),
            pitch: n.next_multiple_of(2) as u32,
        })
    }

    pub(crate) fn attention(&self) -> SpanAttention {
        SpanAttention {
            scale: self.scale,
            causal: self.causal != 0,
            window: (self.window > 0).then_some(self.window as usize),
            softcap: (self.softcap > 0.0).then_some(self.softcap),
        }
    }
}

impl OpCase<'_> {
    /// Checks an operand of attention: rows of heads, of the case's dtype.
    pub(crate) fn heads(
        &self,
        name: &'static str,
        view: &BufView,
        dims: &[usize],
    ) -> Result<HeadOperand, KernelError> {
        let shape = view.layout.shape();
        crate::require!(self, view.dtype == self.dtype, "{name} is {}, must have the dtype of q", view.dtype);
        crate::require!(self, shape.dims() == dims, "{name} is {shape}, must be {dims:?}");
        let buf = self.extent(name, view)?;
        self.u32("the extent", view.layout.end())?;
        let &[row, head, element] = view.layout.strides() else {
            return Err(self.refuse(format!("{name} is {shape}")));
        };
        let even = |n: usize| n.is_multiple_of(8);
        let is_aligned = (element == 1 || dims[2] == 1)
            && buf.offset().is_multiple_of(16)
            && (even(row) || dims[0] == 1)
            && (even(head) || dims[1] == 1);
        let strides = HeadStrides { row: row as u32, head: head as u32, element: element as u32 };
        Ok(HeadOperand { buf, strides, is_aligned })
    }
}

/// Head size of the tensor-core kernel for heads of this many elements, and its rows per block.
pub(crate) fn tile_for(dtype: DType, head_dim: usize) -> Option<(usize, usize)> {
    let fits = GEMM_DTYPES.contains(&dtype) && head_dim.is_multiple_of(8);
    let (size, times) = SIZES.into_iter().find(|(size, _)| fits && head_dim <= *size)?;
    Some((size, TILE * times))
}

/// Bytes of `n` padded rows of `size` 16-bit elements.
pub(crate) fn lines(n: usize, size: usize) -> u32 {
    (n * (2 * size + 16)) as u32
}

/// Whether a block can have this much dynamic shared memory besides the static part.
pub(crate) fn fits(card: &Card, bytes: u32) -> bool {
    bytes as usize + DECLARED <= card.shared_limit
}

/// Dynamic shared memory that launches may request; 0 if the GPU has too little.
pub(crate) fn if_fits(card: &Card, bytes: u32) -> u32 {
    if fits(card, bytes) { bytes } else { 0 }
}

fn shared_bytes((size, rows): (usize, usize)) -> u32 {
    lines(rows + 4 * TILE, size)
}

/// Returns why tensor-core kernels cannot read heads of this layout, assuming an aligned buffer.
fn unaligned(layout: &Layout) -> Option<String> {
    let (shape, strides) = (layout.shape(), layout.strides());
    let &[row, head, element] = strides else { return Some(format!("heads have shape {shape}")) };
    let even = |n: usize, dim: usize| n.is_multiple_of(8) || shape.dims()[dim] == 1;
    let is_aligned = element == 1 && layout.offset().is_multiple_of(8) && even(row, 0) && even(head, 1);
    let because = || {
        format!("heads with strides {strides:?} from element {} on are not 16-byte aligned", layout.offset())
    };
    (!is_aligned).then(because)
}

impl Kernels {
    /// Returns why attention of 16-bit heads, or its gradient, does not run on tensor cores for operands of
    /// these layouts in aligned buffers. `None` if it does, and for F32, which never does.
    #[must_use]
    pub fn span_obstacle(&self, dtype: DType, operands: &[Layout], is_grad: bool) -> Option<String> {
        if !GEMM_DTYPES.contains(&dtype) {
            return None;
        }
        let head_dim = operands.first().map_or(0, |q| q.shape().dim_back(0));
        let bytes = if is_grad { crate::span_grad::keys_bytes } else { shared_bytes };
        match tile_for(dtype, head_dim) {
            Some(tile) if fits(self.card(), bytes(tile)) => operands.iter().find_map(unaligned),
            Some(_) | None => Some(format!("this GPU has no kernel for heads of {head_dim} elements")),
        }
    }

    /// Builds the launch for [`SpanArgs`]. It runs on tensor cores for 16-byte aligned heads of 16-bit
    /// elements, in multiples of 8 up to 128; otherwise in the exact kernels.
    pub fn span_attention(&self, a: &SpanArgs<'_>) -> Result<Launch, KernelError> {
        let (q, k) = (a.q.layout.shape(), a.k.layout.shape());
        let dim = |shape: Shape, i: usize| shape.dims().get(i).copied().unwrap_or(0);
        let shape =
            [("n", dim(q, 0)), ("n_heads", dim(q, 1)), ("n_kv_heads", dim(k, 1)), ("head_dim", dim(q, 2))];
        let case = OpCase { op: "span_attention", dtype: a.q.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, MATMUL_DTYPES.contains(&a.q.dtype), "heads are F32, F16 or BF16");
        let sizes = SpanSizes::new(&case, &a.attention, q, k)?;
        let [n, n_heads, head_dim] = [dim(q, 0), dim(q, 1), dim(q, 2)];
        let of_q = case.heads("q", &a.q, q.dims())?;
        let (of_k, of_v) = (case.heads("k", &a.k, k.dims())?, case.heads("v", &a.v, k.dims())?);
        let all = [&of_q, &of_k, &of_v];
        let strides = Strides { q: of_q.strides, k: of_k.strides, v: of_v.strides, ..Strides::default() };
        let bytes = (n * n_heads).checked_mul(head_dim * a.q.dtype.block_bytes());
        let y = case.buf("y", a.y, bytes, a.q.dtype.block_bytes() as u64)?;
        let tile = tile_for(a.q.dtype, head_dim)
            .filter(|&tile| fits(self.card(), shared_bytes(tile)))
            .filter(|_| all.iter().all(|heads| heads.is_aligned) && y.offset().is_multiple_of(16));
        let launch = match tile {
            Some(tile) => {
                let n_blocks = n.div_ceil(tile.1);
                crate::require!(
                    case,
                    n_blocks <= 65_535,
                    "at most {} rows fit in one launch",
                    65_535 * tile.1
                );
                let grid = [n_heads as u32, n_blocks as u32];
                self.launch(&name(tile.0, a.q.dtype), grid, BLOCK)?.shared(shared_bytes(tile))
            }
            None => {
                let grid = (n * n_heads).div_ceil(EXACT_ROWS) as u32;
                self.launch(&format!("span_exact_{}", lowercase(a.q.dtype)), grid, BLOCK)?
            }
        };
        Ok(launch
            .step(a.step)
            .write(y)
            .write(case.words("lse", a.lse, &[n, n_heads])?)
            .read(of_q.buf)
            .read(of_k.buf)
            .read(of_v.buf)
            .read(case.words("spans", a.spans, &[n, 2])?)
            .baked(Baked(strides))
            .baked(Baked(sizes))
            .vouch(&case))
    }
}

fn name(size: usize, dtype: DType) -> String {
    format!("span_d{size}_{}", lowercase(dtype))
}

pub(crate) const STRIDES: usize = size_of::<Strides>();
pub(crate) const SIZES_BYTES: usize = size_of::<SpanSizes>();

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let params = [P, P, P, P, P, P, STRIDES, SIZES_BYTES];
    for dtype in MATMUL_DTYPES {
        let name = format!("span_exact_{}", lowercase(dtype));
        all.push(KernelEntry::new(KernelFamily::Span, name, &params, move |k| twin(k, dtype)).unit("exact"));
    }
    for dtype in GEMM_DTYPES {
        for (size, times) in SIZES {
            let entry =
                KernelEntry::new(KernelFamily::Span, name(size, dtype), &params, move |k| twin(k, dtype));
            let unit = format!("d{size}_{}", lowercase(dtype));
            all.push(entry.unit(&unit).shared(move |card| if_fits(card, shared_bytes((size, TILE * times)))));
        }
    }
}

/// Reads rows of heads contiguously.
pub(crate) fn read_heads(
    k: &SimKernel<'_>,
    at: DevicePtr,
    strides: HeadStrides,
    dims: [usize; 3],
    dtype: DType,
) -> KernelResult<Vec<f64>> {
    let [row, head, element] = [strides.row, strides.head, strides.element].map(|n| n as usize);
    let end = (dims[0] - 1) * row + (dims[1] - 1) * head + (dims[2] - 1) * element + 1;
    let values = read_floats(k, at, end, dtype)?;
    let mut out = Vec::with_capacity(dims.iter().product());
    for i in 0..dims[0] {
        for h in 0..dims[1] {
            out.extend((0..dims[2]).map(|d| values[i * row + h * head + d * element]));
        }
    }
    Ok(out)
}

/// Reads spans. Spans that do not contain their row or end past the step become padding.
pub(crate) fn read_spans(k: &SimKernel<'_>, at: DevicePtr, n: usize) -> KernelResult<Vec<[i32; 2]>> {
    let mut spans: Vec<[i32; 2]> = k.read(at, n)?;
    for (row, span) in spans.iter_mut().enumerate() {
        let [first, end] = span.map(i64::from);
        let holds = first >= 0 && first <= row as i64 && (row as i64) < end && end <= n as i64;
        if !holds {
            *span = [0, 0];
        }
    }
    Ok(spans)
}

fn in_f32(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|&v| (v as f32).to_le_bytes()).collect()
}

fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (strides, s): (Strides, SpanSizes) = (k.arg(6)?, k.arg(7)?);
    let [n, n_heads, n_kv_heads, head_dim] = [s.n, s.n_heads, s.n_kv_heads, s.head_dim].map(|n| n as usize);
    let (dims, kv_dims) = ([n, n_heads, head_dim], [n, n_kv_heads, head_dim]);
    let inputs = [
        in_f32(&read_heads(k, k.ptr(2)?, strides.q, dims, dtype)?),
        in_f32(&read_heads(k, k.ptr(3)?, strides.k, kv_dims, dtype)?),
        in_f32(&read_heads(k, k.ptr(4)?, strides.v, kv_dims, dtype)?),
        bytemuck::cast_slice(&read_spans(k, k.ptr(5)?, n)?).to_vec(),
    ];
    let shapes = [&dims[..], &kv_dims, &kv_dims, &[n, 2]];
    let operands = inputs.iter().zip(shapes).enumerate().map(|(i, (bytes, dims))| {
        let dtype = if i == 3 { DType::I32 } else { DType::F32 };
        Ok(In { dtype, layout: Layout::contiguous(Shape::new(dims).map_err(fault)?), bytes })
    });
    let operands = operands.collect::<KernelResult<Vec<In<'_>>>>()?;
    let ty =
        |dims: &[usize]| Shape::new(dims).map(|shape| TensorType { dtype: DType::F32, shape }).map_err(fault);
    let (mut y, mut lse) = (vec![0; 4 * n * n_heads * head_dim], vec![0; 4 * n * n_heads]);
    let mut outs = [Out { ty: ty(&dims)?, bytes: &mut y }, Out { ty: ty(&[n, n_heads])?, bytes: &mut lse }];
    refrain_reference::run(&Op::SpanAttention(s.attention()), &operands, &mut outs).map_err(fault)?;
    let y: Vec<f64> = bytemuck::pod_collect_to_vec::<u8, f32>(&y).into_iter().map(f64::from).collect();
    write_floats(k, k.ptr(0)?, &y, dtype)?;
    k.write(k.ptr(1)?, &lse)
}
