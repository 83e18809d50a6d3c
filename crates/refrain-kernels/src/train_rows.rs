//! RMS norm, softmax, their gradients, and reductions, for every float dtype.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_graph::{Op, Reduce, TrainOp};
use refrain_tensor::{DType, Layout};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::fault;
use crate::typed::{FLOATS, Typed, dtype_of, is_aligned, named, rows_are_wide, run_typed};
use crate::view::{BufView, RowLayout, merge};
use crate::vouch::Vouch;

/// Weights of a norm.
#[derive(Clone, Copy, Debug)]
pub struct NormWeights {
    /// `[n_cols]`.
    pub buf: Buf,
    /// F32, or the dtype of the rows.
    pub dtype: DType,
}

/// `y = x * rsqrt(mean(x^2) + eps) * w`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct TypedRmsNormArgs<'a> {
    /// `[.., n_cols]` floats with contiguous rows.
    pub x: BufView,
    /// `[n_cols]`.
    pub w: NormWeights,
    /// `[n_rows, n_cols]` of the same dtype; may alias `x`.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `sum = a + b`, and `y` is its norm, row by row.
#[derive(Clone, Copy, Debug)]
pub struct TypedAddRmsNormArgs<'a> {
    /// `[.., n_cols]` floats with contiguous rows.
    pub a: BufView,
    /// Like `a`.
    pub b: BufView,
    /// `[n_cols]`.
    pub w: NormWeights,
    /// `[n_rows, n_cols]` of the same dtype; may alias `a`.
    pub sum: Buf,
    /// `[n_rows, n_cols]` of the same dtype; may alias `b`.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Gradients of a norm's rows and of its weights.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGradArgs<'a> {
    /// `[.., n_cols]` floats: gradient of the norm's output.
    pub dy: BufView,
    /// Like `dy`: input of the norm.
    pub x: BufView,
    /// `[n_cols]`.
    pub w: NormWeights,
    /// `[n_rows, n_cols]` of the type of `x`.
    pub dx: Buf,
    /// `[n_rows, n_cols]` of the dtype of `x`: addend to `dx`, if any.
    pub more: Option<Buf>,
    /// `[n_cols]`.
    pub dw: Buf,
    /// Dtype of `dw`.
    pub dw_dtype: DType,
    /// Scratch of [`rms_norm_grad_scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y` is the softmax of each row of `x`.
#[derive(Clone, Copy, Debug)]
pub struct TypedSoftmaxArgs<'a> {
    /// `[.., n_cols]` floats with contiguous rows.
    pub x: BufView,
    /// `[n_rows, n_cols]` of the same dtype; may alias `x` if that is contiguous.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Gradient of a softmax's input.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxGradArgs<'a> {
    /// `[.., n_cols]` floats: gradient of the softmax's output.
    pub dy: BufView,
    /// Like `dy`: output of the softmax.
    pub y: BufView,
    /// `[n_rows, n_cols]` of the same dtype; may alias `dy` or `y` if that is contiguous.
    pub dx: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_cols: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Sum, mean or maximum along one dimension.
#[derive(Clone, Copy, Debug)]
pub struct TypedReduceArgs<'a> {
    /// Sum, mean or maximum.
    pub kind: Reduce,
    /// F32, F16 or BF16. The inner dimensions are contiguous, and the outer ones share one stride.
    pub x: BufView,
    /// Reduced dimension.
    pub axis: usize,
    /// Contiguous, of the same dtype.
    pub y: Buf,
    /// Scratch of [`reduce_scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

const BLOCK: u32 = 256;
const FINISH_BLOCK: u32 = 1024;
/// Maximum number of columns of a row that one warp handles.
const WARP_COLS: usize = 1024;
/// Rows per block in the warp-per-row kernels.
const WARPS: usize = 8;
/// Blocks that sum the weight gradient of a norm: two per SM of a large GPU.
const PARTS: usize = 256;
/// Target number of blocks for reducing columns.
const COLUMN_BLOCKS: usize = 512;
/// Columns per block.
const COLUMNS: usize = 256;
/// Minimum number of rows per block.
const SLICE: usize = 64;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct RowShape {
    a: RowLayout,
    b: RowLayout,
    n_rows: u32,
    n_cols: u32,
    wide: u32,
    w_is_f32: u32,
    eps: f32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Columns {
    n_outer: u32,
    n: u32,
    n_inner: u32,
    n_slices: u32,
    outer_stride: u32,
    stride: u32,
    wide: u32,
    kind: u32,
}

/// Blocks for the rows: one warp or one block per row.
fn blocks(n_rows: usize, n_cols: usize) -> usize {
    n_rows.div_ceil(if n_cols <= WARP_COLS { WARPS } else { 1 })
}

fn parts(n_rows: usize, n_cols: usize) -> usize {
    blocks(n_rows, n_cols).min(PARTS)
}

/// Scratch size of [`Kernels::rms_norm_grad`].
#[must_use]
pub fn rms_norm_grad_scratch_bytes(n_rows: usize, n_cols: usize) -> u64 {
    4 * parts(n_rows, n_cols) as u64 * n_cols as u64
}

/// Splits dimensions into the outer size, the axis and the inner size.
fn split_dims(dims: &[usize], axis: usize) -> [usize; 3] {
    [dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product()]
}

fn n_slices([n_outer, n, n_inner]: [usize; 3]) -> usize {
    let n_blocks = n_outer.saturating_mul(n_inner.div_ceil(COLUMNS)).max(1);
    (COLUMN_BLOCKS / n_blocks).clamp(1, n.div_ceil(SLICE).max(1))
}

/// Scratch size of [`Kernels::typed_reduce`]; 0 along the last dimension.
#[must_use]
pub fn reduce_scratch_bytes(dims: &[usize], axis: usize) -> u64 {
    let sizes = split_dims(dims, axis);
    match sizes[2] {
        1 => 0,
        n_inner => 4 * (sizes[0] as u64) * (n_slices(sizes) as u64) * n_inner as u64,
    }
}

/// Rows of one launch: one or two inputs, optional weights, and outputs.
struct RowCase<'a> {
    case: OpCase<'a>,
    shape: RowShape,
    inputs: Vec<Buf>,
}

impl<'a> RowCase<'a> {
    fn new(
        case: OpCase<'a>,
        views: &[(&'static str, &BufView)],
        w: Option<NormWeights>,
        [n_rows, n_cols]: [usize; 2],
    ) -> Result<RowCase<'a>, KernelError> {
        case.sizes()?;
        let mut shape = RowShape {
            n_rows: n_rows as u32,
            n_cols: n_cols as u32,
            wide: 1,
            w_is_f32: u32::from(w.is_some_and(|w| w.dtype == DType::F32)),
            ..RowShape::zeroed()
        };
        let mut inputs = Vec::new();
        for (i, (name, view)) in views.iter().enumerate() {
            let (buf, rows) = case.float_rows(name, view, [n_rows, n_cols])?;
            shape.wide &= u32::from(rows_are_wide(buf, rows, n_cols));
            *(if i == 0 { &mut shape.a } else { &mut shape.b }) = rows;
            inputs.push(buf);
        }
        if let Some(w) = w {
            crate::require!(
                case,
                w.dtype == DType::F32 || w.dtype == case.dtype,
                "w is {}, must be F32 or {}",
                w.dtype,
                case.dtype
            );
            let buf = case.elements("w", w.buf, w.dtype, &[n_cols])?;
            shape.wide &= u32::from(is_aligned(buf));
            inputs.push(buf);
        }
        Ok(RowCase { case, shape, inputs })
    }

    /// Checks an output of the rows' dtype; notes whether eight elements at a time can be written.
    fn output(&mut self, name: &'static str, buf: Buf, dims: &[usize]) -> Result<Buf, KernelError> {
        let buf = self.case.elements(name, buf, self.case.dtype, dims)?;
        self.shape.wide &= u32::from(is_aligned(buf));
        Ok(buf)
    }

    fn launch(
        &self,
        kernels: &Kernels,
        kernel: &str,
        (n_blocks, step): (usize, &str),
        outputs: &[Buf],
    ) -> Result<LaunchBuilder, KernelError> {
        let mut launch = kernels.launch(&named(kernel, self.case.dtype), n_blocks as u32, BLOCK)?.step(step);
        for y in outputs {
            launch = launch.write(*y);
        }
        for x in &self.inputs {
            launch = launch.read(*x);
        }
        Ok(launch.baked(Baked(self.shape)))
    }
}

impl Kernels {
    /// Builds the launch for [`TypedRmsNormArgs`].
    pub fn typed_rms_norm(&self, a: &TypedRmsNormArgs<'_>) -> Result<Launch, KernelError> {
        let (sizes, dims) = ([("n_rows", a.n_rows), ("n_cols", a.n_cols)], [a.n_rows, a.n_cols]);
        let case = OpCase { op: "rms_norm", dtype: a.x.dtype, shape: &sizes };
        let mut rows = RowCase::new(case, &[("x", &a.x)], Some(a.w), dims)?;
        rows.shape.eps = a.eps;
        let y = rows.output("y", a.y, &dims)?;
        let launch = rows.launch(self, "train_rms_norm", (blocks(a.n_rows, a.n_cols), a.step), &[y])?;
        Ok(launch.vouch(&rows.case))
    }

    /// Builds the launch for [`TypedAddRmsNormArgs`].
    pub fn typed_add_rms_norm(&self, a: &TypedAddRmsNormArgs<'_>) -> Result<Launch, KernelError> {
        let (sizes, dims) = ([("n_rows", a.n_rows), ("n_cols", a.n_cols)], [a.n_rows, a.n_cols]);
        let case = OpCase { op: "add_rms_norm", dtype: a.a.dtype, shape: &sizes };
        let mut rows = RowCase::new(case, &[("a", &a.a), ("b", &a.b)], Some(a.w), dims)?;
        rows.shape.eps = a.eps;
        let outputs = [rows.output("sum", a.sum, &dims)?, rows.output("y", a.y, &dims)?];
        let n_blocks = blocks(a.n_rows, a.n_cols);
        let launch = rows.launch(self, "train_rms_norm_add", (n_blocks, a.step), &outputs)?;
        Ok(launch.vouch(&rows.case))
    }

    /// Pushes the two launches for [`RmsNormGradArgs`].
    pub fn rms_norm_grad(
        &self,
        a: &RmsNormGradArgs<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let (sizes, dims) = ([("n_rows", a.n_rows), ("n_cols", a.n_cols)], [a.n_rows, a.n_cols]);
        let case = OpCase { op: "rms_norm_grad", dtype: a.x.dtype, shape: &sizes };
        let mut rows = RowCase::new(case, &[("dy", &a.dy), ("x", &a.x)], Some(a.w), dims)?;
        rows.shape.eps = a.eps;
        let dx = rows.output("dx", a.dx, &dims)?;
        let n_parts = parts(a.n_rows, a.n_cols);
        let scratch = rows.case.words("scratch", a.scratch, &[n_parts, a.n_cols])?;
        let more = match a.more {
            Some(more) => Some(rows.output("more", more, &dims)?),
            None => None,
        };
        let launch = rows.launch(self, "train_rms_norm_grad", (n_parts, a.step), &[dx, scratch])?;
        let launch = match more {
            Some(more) => launch.read(more),
            None => launch.null(),
        };
        launches.push(launch.vouch(&rows.case));
        let columns = Columns {
            n_outer: 1,
            n: a.n_rows as u32,
            n_inner: a.n_cols as u32,
            n_slices: n_parts as u32,
            ..Columns::zeroed()
        };
        let dw = rows.case.elements("dw", a.dw, a.dw_dtype, &[a.n_cols])?;
        launches.push(self.finish_columns(&rows.case, columns, scratch, (dw, a.dw_dtype), a.step)?);
        Ok(())
    }

    /// Builds the launch for [`TypedSoftmaxArgs`].
    pub fn typed_softmax(&self, a: &TypedSoftmaxArgs<'_>) -> Result<Launch, KernelError> {
        let (sizes, dims) = ([("n_rows", a.n_rows), ("n_cols", a.n_cols)], [a.n_rows, a.n_cols]);
        let case = OpCase { op: "softmax", dtype: a.x.dtype, shape: &sizes };
        let mut rows = RowCase::new(case, &[("x", &a.x)], None, dims)?;
        let y = rows.output("y", a.y, &dims)?;
        let launch = rows.launch(self, "train_softmax", (blocks(a.n_rows, a.n_cols), a.step), &[y])?;
        Ok(launch.vouch(&rows.case))
    }

    /// Builds the launch for [`SoftmaxGradArgs`].
    pub fn softmax_grad(&self, a: &SoftmaxGradArgs<'_>) -> Result<Launch, KernelError> {
        let (sizes, dims) = ([("n_rows", a.n_rows), ("n_cols", a.n_cols)], [a.n_rows, a.n_cols]);
        let case = OpCase { op: "softmax_grad", dtype: a.y.dtype, shape: &sizes };
        let mut rows = RowCase::new(case, &[("dy", &a.dy), ("y", &a.y)], None, dims)?;
        let dx = rows.output("dx", a.dx, &dims)?;
        let n_blocks = blocks(a.n_rows, a.n_cols);
        let launch = rows.launch(self, "train_softmax_grad", (n_blocks, a.step), &[dx])?;
        Ok(launch.vouch(&rows.case))
    }

    /// Pushes the one or two launches for [`TypedReduceArgs`].
    pub fn typed_reduce(
        &self,
        a: &TypedReduceArgs<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let shape = a.x.layout.shape();
        let axis = a.axis.min(shape.rank().saturating_sub(1));
        let dims = split_dims(shape.dims(), axis);
        let [n_outer, n, n_inner] = dims;
        let sizes = [("n_outer", n_outer), ("n", n), ("n_inner", n_inner)];
        let case = OpCase { op: "reduce", dtype: a.x.dtype, shape: &sizes };
        case.sizes()?;
        crate::require!(case, FLOATS.contains(&a.x.dtype), "x is {}, must be F32, F16 or BF16", a.x.dtype);
        let kind = KINDS.iter().position(|kind| *kind == a.kind).map_or(0, |at| at as u32);
        let strides = case.strides_at_axis(&a.x.layout, axis)?;
        if n_inner == 1 {
            let rows = RowLayout { n_inner: n_outer as u32, inner_stride: strides[0], outer_stride: 0 };
            crate::require!(case, strides[1] == 1 || n == 1, "x has strided rows; copy it first");
            let buf = case.extent("x", &a.x)?;
            let y = case.elements("y", a.y, a.x.dtype, &[n_outer])?;
            let wide = u32::from(rows_are_wide(buf, rows, n));
            let row_shape =
                RowShape { a: rows, n_rows: n_outer as u32, n_cols: n as u32, wide, ..RowShape::zeroed() };
            let kernel = named("train_reduce_rows", a.x.dtype);
            let launch = self.launch(&kernel, blocks(n_outer, n) as u32, BLOCK)?.step(a.step);
            let launch = launch.write(y).read(buf).baked(Baked(row_shape)).baked(Baked(kind));
            launches.push(launch.vouch(&case));
            return Ok(());
        }
        let buf = case.extent("x", &a.x)?;
        let is_wide = is_aligned(buf)
            && n_inner.is_multiple_of(8)
            && strides.iter().all(|stride| stride.is_multiple_of(8));
        let columns = Columns {
            n_outer: n_outer as u32,
            n: n as u32,
            n_inner: n_inner as u32,
            n_slices: n_slices(dims) as u32,
            outer_stride: strides[0],
            stride: strides[1],
            wide: u32::from(is_wide),
            kind,
        };
        case.u32("the number of results", n_outer.saturating_mul(n_inner))?;
        let n_slices = columns.n_slices as usize;
        let n_blocks = n_outer.saturating_mul(n_slices).saturating_mul(n_inner.div_ceil(COLUMNS));
        let n_blocks = case.u32("the number of blocks", n_blocks)?;
        let scratch = case.words("scratch", a.scratch, &[n_outer, n_slices, n_inner])?;
        let launch = self.launch(&named("train_reduce_columns", a.x.dtype), n_blocks, BLOCK)?.step(a.step);
        launches.push(launch.write(scratch).read(buf).baked(Baked(columns)).vouch(&case));
        let y = case.elements("y", a.y, a.x.dtype, &[n_outer, n_inner])?;
        launches.push(self.finish_columns(&case, columns, scratch, (y, a.x.dtype), a.step)?);
        Ok(())
    }

    fn finish_columns(
        &self,
        case: &OpCase<'_>,
        columns: Columns,
        parts: Buf,
        (y, dtype): (Buf, DType),
        step: &str,
    ) -> Result<Launch, KernelError> {
        let n = columns.n_outer * columns.n_inner;
        Ok(self
            .launch("train_finish_columns", n.div_ceil(32), FINISH_BLOCK)?
            .step(step)
            .write(y)
            .read(parts)
            .baked(Baked(columns))
            .baked(Baked(case.code("the result", dtype)?))
            .vouch(case))
    }
}

impl OpCase<'_> {
    /// Strides of the outer dimensions and of `axis`; the inner dimensions must be contiguous.
    pub(crate) fn strides_at_axis(&self, layout: &Layout, axis: usize) -> Result<[u32; 2], KernelError> {
        let (dims, strides) = (layout.shape(), layout.strides());
        let dims = dims.dims();
        let refuse = || self.refuse(format!("strides of {strides:?} along dimension {axis}; copy it first"));
        match merge(&dims[axis + 1..], &[&strides[axis + 1..]]).as_slice() {
            [] | [(_, [1, ..])] => {}
            _ => return Err(refuse()),
        }
        let outer = match merge(&dims[..axis], &[&strides[..axis]]).as_slice() {
            [] => 0,
            [(_, [stride, ..])] => *stride,
            _ => return Err(refuse()),
        };
        Ok([self.u32("a stride", outer)?, self.u32("a stride", strides[axis])?])
    }
}

/// In the order of the kernels' codes.
const KINDS: [Reduce; 3] = [Reduce::Sum, Reduce::Mean, Reduce::Max];

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const S: usize = size_of::<RowShape>();
    const C: usize = size_of::<Columns>();
    type Twin = fn(&mut SimKernel<'_>, DType) -> KernelResult;
    let kernels: [(&str, &str, &[usize], Twin); 7] = [
        ("norm", "train_rms_norm", &[P, P, P, S], rms_norm),
        ("norm", "train_rms_norm_add", &[P, P, P, P, P, S], add_rms_norm),
        ("norm_grad", "train_rms_norm_grad", &[P, P, P, P, P, S, P], rms_norm_grad),
        ("softmax", "train_softmax", &[P, P, S], softmax),
        ("softmax", "train_softmax_grad", &[P, P, P, S], softmax_grad),
        ("reduce", "train_reduce_rows", &[P, P, S, W], reduce_rows),
        ("reduce", "train_reduce_columns", &[P, P, C], reduce_columns),
    ];
    for dtype in FLOATS {
        for (unit, name, params, twin) in kernels {
            let entry = KernelEntry::new(KernelFamily::TrainRows, named(name, dtype), params, move |k| {
                twin(k, dtype)
            });
            all.push(entry.unit(&named(unit, dtype)));
        }
    }
    let entry =
        KernelEntry::new(KernelFamily::TrainRows, "train_finish_columns", &[P, P, C, W], finish_columns);
    all.push(entry.unit("finish"));
}

/// Returns the shape at a parameter, the rows' dimensions and the dtype of the weights.
fn shape(k: &SimKernel<'_>, i: usize, dtype: DType) -> KernelResult<(RowShape, [usize; 2], DType)> {
    let shape: RowShape = k.arg(i)?;
    let w_dtype = if shape.w_is_f32 != 0 { DType::F32 } else { dtype };
    Ok((shape, [shape.n_rows as usize, shape.n_cols as usize], w_dtype))
}

fn rms_norm(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, w_dtype) = shape(k, 3, dtype)?;
    let x = Typed::rows(k, k.ptr(1)?, dtype, shape.a, &dims)?;
    let w = Typed::read(k, k.ptr(2)?, w_dtype, &dims[1..])?;
    let y = run_typed(&Op::RmsNorm { eps: shape.eps }, &[&x, &w], &[(dtype, &dims)])?;
    k.write(k.ptr(0)?, &y[0])
}

fn add_rms_norm(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, w_dtype) = shape(k, 5, dtype)?;
    let a = Typed::rows(k, k.ptr(2)?, dtype, shape.a, &dims)?;
    let b = Typed::rows(k, k.ptr(3)?, dtype, shape.b, &dims)?;
    let w = Typed::read(k, k.ptr(4)?, w_dtype, &dims[1..])?;
    let outputs = [(dtype, &dims[..]); 2];
    let results = run_typed(&Op::AddRmsNorm { eps: shape.eps }, &[&a, &b, &w], &outputs)?;
    k.write(k.ptr(0)?, &results[0])?;
    k.write(k.ptr(1)?, &results[1])
}

/// Writes all sums to the first partial result.
fn rms_norm_grad(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, w_dtype) = shape(k, 5, dtype)?;
    let n_parts = k.config().grid[0] as usize;
    let dy = Typed::rows(k, k.ptr(2)?, dtype, shape.a, &dims)?;
    let x = Typed::rows(k, k.ptr(3)?, dtype, shape.b, &dims)?;
    let w = Typed::read(k, k.ptr(4)?, w_dtype, &dims[1..])?;
    let more = match k.ptr(6)?.0 {
        0 => None,
        _ => Some(Typed::read(k, k.ptr(6)?, dtype, &dims)?),
    };
    let op = Op::Train(TrainOp::RmsNormGrad { eps: shape.eps, adds: more.is_some() });
    let inputs: Vec<&Typed> = [&dy, &x, &w].into_iter().chain(&more).collect();
    let mut results = run_typed(&op, &inputs, &[(dtype, &dims), (DType::F32, &dims[1..])])?;
    results[1].resize(4 * n_parts * dims[1], 0);
    k.write(k.ptr(0)?, &results[0])?;
    k.write(k.ptr(1)?, &results[1])
}

fn softmax(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, _) = shape(k, 2, dtype)?;
    let x = Typed::rows(k, k.ptr(1)?, dtype, shape.a, &dims)?;
    let y = run_typed(&Op::Softmax, &[&x], &[(dtype, &dims)])?;
    k.write(k.ptr(0)?, &y[0])
}

fn softmax_grad(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, _) = shape(k, 3, dtype)?;
    let dy = Typed::rows(k, k.ptr(1)?, dtype, shape.a, &dims)?;
    let y = Typed::rows(k, k.ptr(2)?, dtype, shape.b, &dims)?;
    let dx = run_typed(&Op::Train(TrainOp::SoftmaxGrad), &[&dy, &y], &[(dtype, &dims)])?;
    k.write(k.ptr(0)?, &dx[0])
}

fn kind(code: u32) -> KernelResult<Reduce> {
    KINDS.get(code as usize).copied().ok_or_else(|| fault(format!("no reduction has code {code}")))
}

fn reduce_rows(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (shape, dims, _) = shape(k, 2, dtype)?;
    let op = Op::Reduce { kind: kind(k.arg(3)?)?, axis: 1 };
    let x = Typed::rows(k, k.ptr(1)?, dtype, shape.a, &dims)?;
    let y = run_typed(&op, &[&x], &[(dtype, &[dims[0], 1])])?;
    k.write(k.ptr(0)?, &y[0])
}

/// Reduces all rows in the first slice.
fn reduce_columns(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let c: Columns = k.arg(2)?;
    let [n_outer, n, n_inner, n_slices] = [c.n_outer, c.n, c.n_inner, c.n_slices].map(|n| n as usize);
    let index_of = |i: usize| {
        let (outer, j, inner) = (i / n_inner / n, i / n_inner % n, i % n_inner);
        outer * c.outer_stride as usize + j * c.stride as usize + inner
    };
    let dims = [n_outer, n, n_inner];
    let x = Typed::walked(k, k.ptr(1)?, dtype, (0..n_outer * n * n_inner).map(index_of), &dims)?;
    let (whole, neutral) = match kind(c.kind)? {
        Reduce::Sum | Reduce::Mean => (Reduce::Sum, 0.0_f32),
        Reduce::Max => (Reduce::Max, f32::NEG_INFINITY),
    };
    let op = Op::Reduce { kind: whole, axis: 1 };
    let results = run_typed(&op, &[&x], &[(DType::F32, &[n_outer, 1, n_inner])])?;
    let results: Vec<f32> = bytemuck::pod_collect_to_vec(&results[0]);
    let mut parts = Vec::with_capacity(n_outer * n_slices * n_inner);
    for outer in results.chunks_exact(n_inner) {
        parts.extend_from_slice(outer);
        parts.extend(std::iter::repeat_n(neutral, (n_slices - 1) * n_inner));
    }
    k.write(k.ptr(0)?, &parts)
}

fn finish_columns(k: &mut SimKernel<'_>) -> KernelResult {
    let (c, dtype): (Columns, DType) = (k.arg(2)?, dtype_of(k.arg(3)?)?);
    let kind = kind(c.kind)?;
    let dims = [c.n_outer, c.n_slices, c.n_inner].map(|n| n as usize);
    let mut parts = Typed::read(k, k.ptr(1)?, DType::F32, &dims)?;
    if kind == Reduce::Mean {
        // The mean is over all rows, not over the slices.
        let scale = f64::from(c.n_slices) / f64::from(c.n);
        let scaled = parts.input().to_f32().map_err(fault)?;
        let scaled: Vec<f32> = scaled.iter().map(|&v| (f64::from(v) * scale) as f32).collect();
        parts.bytes = bytemuck::pod_collect_to_vec(&scaled);
    }
    let op = Op::Reduce { kind, axis: 1 };
    let results = run_typed(&op, &[&parts], &[(dtype, &[dims[0], 1, dims[2]])])?;
    k.write(k.ptr(0)?, &results[0])
}
