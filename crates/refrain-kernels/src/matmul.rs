//! Matrix products of values: `y = a . b` for any strides, with broadcast outer dimensions.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, Layout, Shape};

use crate::blaslt::{BlasLtFactor, BlasLtShape};
use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, lowercase};
use crate::source::KernelFamily;
use crate::view::{BufView, Walk};
use crate::vouch::Vouch;

/// Dtypes of factors and result.
pub const MATMUL_DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Rows and columns of a 16-bit tile, and threads per block, as in `matmul.cu`.
const ROWS: usize = 64;
const COLS: usize = 128;
const BLOCK: u32 = 128;
const SHARED: u32 = 3 * (64 + 128) * 144;
/// Rows and columns of an F32 tile, and threads per block.
const SIDE: usize = 64;
const BLOCK_F32: u32 = 256;
/// 16-bit elements per copy.
const CHUNK: usize = 8;
const VECTOR_A: u32 = 1;
const VECTOR_B: u32 = 2;

/// `y[.., m, n] = a[.., m, k] . b[.., k, n] + c`, with sums in F32, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct MatMulArgs<'a> {
    /// One of [`MATMUL_DTYPES`], in any layout.
    pub a: BufView,
    /// The same dtype, in any layout; its outer dimensions broadcast with those of `a`.
    pub b: BufView,
    /// Contiguous, of the same dtype; may alias `c`.
    pub y: Buf,
    /// Addend, laid out like `y`, if any.
    pub c: Option<Buf>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Kernel parameters.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct MatMulSizes {
    m: u32,
    n: u32,
    k: u32,
    a_row: u32,
    a_col: u32,
    b_row: u32,
    b_col: u32,
    flags: u32,
}

/// Strides of a matrix: elements between rows and between columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrix {
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

impl Matrix {
    fn of(layout: &Layout) -> Option<Matrix> {
        let (shape, strides) = (layout.shape(), layout.strides());
        let rank = shape.rank();
        let &[rows, cols] = shape.dims().get(rank.checked_sub(2)?..)? else { return None };
        Some(Matrix { rows, cols, row: strides[rank - 2], col: strides[rank - 1] })
    }

    /// Whether rows are contiguous (`true`) or columns (`false`); `None` if neither.
    fn has_rows(&self) -> Option<bool> {
        // A single row or column is contiguous both ways; the other stride decides.
        match (self.cols == 1 || self.col == 1, self.rows == 1 || self.row == 1) {
            (true, true) => Some(self.cols > 1 || self.rows == 1),
            (true, false) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    /// Elements between consecutive contiguous runs; 0 if there is one run or if it repeats.
    fn pitch(&self, has_rows: bool) -> usize {
        let (n, pitch) = if has_rows { (self.rows, self.row) } else { (self.cols, self.col) };
        if n == 1 { 0 } else { pitch }
    }
}

/// Layouts of a product, resolved to matrices and batch dimensions.
#[derive(Clone, Copy, Debug)]
struct BatchedProduct {
    a: Matrix,
    b: Matrix,
    a_layout: Layout,
    batch: Shape,
}

/// A layout's outer dimensions, with one element per matrix.
fn outer(layout: &Layout) -> Option<Layout> {
    let rank = layout.shape().rank();
    layout.slice(rank.checked_sub(2)?, 0, 1).and_then(|l| l.slice(rank - 1, 0, 1)).ok()
}

impl BatchedProduct {
    fn new(a: &Layout, b: &Layout) -> Option<BatchedProduct> {
        let a = &flattened(a, b);
        let batch = outer(a)?.shape().broadcast(&outer(b)?.shape())?;
        let (a_matrix, b_matrix) = (Matrix::of(a)?, Matrix::of(b)?);
        let fits = a_matrix.cols == b_matrix.rows;
        fits.then_some(BatchedProduct { a: a_matrix, b: b_matrix, a_layout: *a, batch })
    }
}

/// Flattens the batch into rows if all matrices of `a` share one `b` and their rows are evenly spaced.
fn flattened(a: &Layout, b: &Layout) -> Layout {
    let one_matrix = b.shape().dims().iter().rev().skip(2).all(|&n| n == 1);
    let cols = a.shape().dim_back(0);
    let all = Shape::new(&[a.shape().n_elements() / cols.max(1), cols]);
    match all.ok().filter(|_| one_matrix && cols > 0).and_then(|all| a.reshape(all).ok()) {
        Some(flat) => flat,
        None => *a,
    }
}

/// Returns the product in cuBLASLt terms, for buffers that are 64-byte aligned, or the reason why it has
/// none.
pub fn library_product(a: &Layout, b: &Layout, dtype: DType) -> Result<BlasLtShape, String> {
    let Some(product) = BatchedProduct::new(a, b) else {
        return Err("the shapes of the factors do not match".to_owned());
    };
    let (m, n, k) = (product.a.rows, product.b.cols, product.a.cols);
    let n_batch = product.batch.n_elements();
    let factor = |matrix: &Matrix, layout: &Layout| {
        let strided = || format!("a factor has strides {:?}", layout.strides());
        let has_rows = matrix.has_rows().ok_or_else(strided)?;
        let (run, n_runs) = if has_rows { (matrix.cols, matrix.rows) } else { (matrix.rows, matrix.cols) };
        let pitch = if n_runs == 1 { run } else { matrix.pitch(has_rows) };
        if pitch < run {
            return Err(strided());
        }
        let broadcast = outer(layout).and_then(|l| l.broadcast_to(product.batch).ok()).ok_or_else(strided)?;
        // Requires one stride between matrices, in row-major order of the outer dimensions.
        let dims = product.batch.dims();
        let inner = dims.iter().zip(broadcast.strides()).rev().find(|(n, _)| **n > 1).map_or(0, |(_, s)| *s);
        let (mut step, mut even) = (1, true);
        for (&n, &stride) in dims.iter().zip(broadcast.strides()).rev().filter(|(n, _)| **n > 1) {
            even &= stride == step * inner;
            step *= n;
        }
        even.then_some(BlasLtFactor { has_rows, pitch, batch_stride: inner }).ok_or_else(strided)
    };
    let (of_a, of_b) = (factor(&product.a, &product.a_layout)?, factor(&product.b, b)?);
    let size = dtype.block_bytes();
    let offsets =
        [a.offset(), b.offset(), of_a.batch_stride, of_b.batch_stride, if n_batch > 1 { m * n } else { 0 }];
    let align = offsets.iter().map(|&n| 1_usize << (n * size).trailing_zeros().min(6)).min().unwrap_or(1);
    Ok(BlasLtShape { dtype, out: dtype, m, n, k, n_batch, a: of_a, b: of_b, align })
}

impl Kernels {
    /// Builds the launch for [`MatMulArgs`].
    pub fn matmul(&self, a: &MatMulArgs<'_>) -> Result<Launch, KernelError> {
        let bad = || KernelError::Unsupported {
            op: "matmul",
            dtype: a.a.dtype,
            shape: format!("{} by {}", a.a.layout.shape(), a.b.layout.shape()),
            because: "the shapes of the factors do not match".to_owned(),
        };
        let product = BatchedProduct::new(&a.a.layout, &a.b.layout).ok_or_else(bad)?;
        let (m, n, k) = (product.a.rows, product.b.cols, product.a.cols);
        let n_batch = product.batch.n_elements();
        let shape = [("n_batch", n_batch), ("m", m), ("n", n), ("k", k)];
        let case = OpCase { op: "matmul", dtype: a.a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, MATMUL_DTYPES.contains(&a.a.dtype), "factors are F32, F16 or BF16");
        crate::require!(case, a.b.dtype == a.a.dtype, "b is {}, must have the dtype of a", a.b.dtype);
        let outers = outer(&product.a_layout).zip(outer(&a.b.layout)).ok_or_else(bad)?;
        let batch = case.walk(product.batch, &outers.0, Some(&outers.1))?;
        let (a_buf, b_buf) = (case.extent("a", &a.a)?, case.extent("b", &a.b)?);
        case.u32("the extent of a", a.a.layout.end())?;
        case.u32("the extent of b", a.b.layout.end())?;
        let elements = [n_batch, m, n].iter().try_fold(a.a.dtype.block_bytes(), |x, &y| x.checked_mul(y));
        let y = case.buf("y", a.y, elements, a.a.dtype.block_bytes() as u64)?;
        let is_f32 = a.a.dtype == DType::F32;
        let [rows, cols] = if is_f32 { [SIDE, SIDE] } else { [ROWS, COLS] };
        let grid = [m.div_ceil(rows), n.div_ceil(cols), n_batch];
        let limit = |n: usize| n <= 65_535;
        crate::require!(case, limit(grid[1]), "at most {} columns fit in one launch", 65_535 * cols);
        crate::require!(case, limit(n_batch), "at most 65535 matrices fit in one launch");
        let deep = [product.a.has_rows() != Some(false), product.b.has_rows() == Some(false)];
        let is_vector = |matrix: &Matrix, buf: Buf, strides: &[u32]| {
            let even = |n: usize| n.is_multiple_of(CHUNK);
            buf.offset().is_multiple_of(16)
                && strides.iter().all(|&s| even(s as usize))
                && matrix.has_rows().is_some_and(|has_rows| even(matrix.pitch(has_rows)))
        };
        let flag = |on: bool, flag: u32| if on && !is_f32 { flag } else { 0 };
        // A matrix with neither contiguous rows nor contiguous columns is read element by element.
        let sizes = MatMulSizes {
            m: m as u32,
            n: n as u32,
            k: k as u32,
            a_row: product.a.row as u32,
            a_col: product.a.col as u32,
            b_row: product.b.row as u32,
            b_col: product.b.col as u32,
            flags: flag(is_vector(&product.a, a_buf, &batch.a), VECTOR_A)
                | flag(is_vector(&product.b, b_buf, &batch.b), VECTOR_B),
        };
        let grid = grid.map(|n| n as u32);
        let launch = match is_f32 {
            true => self.launch("matmul_f32", grid, BLOCK_F32)?,
            false => self.launch(&name(a.a.dtype, deep), grid, BLOCK)?.shared(SHARED),
        };
        let launch = launch.step(a.step).write(y).read(a_buf).read(b_buf);
        let launch = launch.baked(Baked(batch)).baked(Baked(sizes));
        let launch = match a.c {
            Some(c) => launch.read(case.buf("c", c, elements, a.a.dtype.block_bytes() as u64)?),
            None => launch.null(),
        };
        Ok(launch.vouch(&case))
    }
}

/// Kernel name; `a` and `b` say whether each factor is contiguous along `k`.
fn name(dtype: DType, [a, b]: [bool; 2]) -> String {
    let word = |deep: bool| if deep { "deep" } else { "flat" };
    format!("matmul_{}_{}_{}", word(a), word(b), lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let params = [P, P, P, size_of::<Walk>(), size_of::<MatMulSizes>(), P];
    let entry = KernelEntry::new(KernelFamily::MatMul, "matmul_f32", &params, |k| twin(k, DType::F32));
    all.push(entry.unit("f32"));
    for dtype in [DType::F16, DType::BF16] {
        for a in [true, false] {
            for b in [true, false] {
                let kernel = name(dtype, [a, b]);
                let entry = KernelEntry::new(KernelFamily::MatMul, &kernel, &params, move |k| twin(k, dtype));
                all.push(entry.unit(kernel.trim_start_matches("matmul_")).shared(|_| SHARED));
            }
        }
    }
}

/// Reads floats from an address as f64.
pub(crate) fn read_floats(
    k: &SimKernel<'_>,
    at: DevicePtr,
    n: usize,
    dtype: DType,
) -> KernelResult<Vec<f64>> {
    Ok(match dtype {
        DType::F16 => k.view::<f16>(at, n)?.iter().map(|v| v.to_f64()).collect(),
        DType::BF16 => k.view::<bf16>(at, n)?.iter().map(|v| v.to_f64()).collect(),
        _ => k.view::<f32>(at, n)?.iter().map(|&v| f64::from(v)).collect(),
    })
}

/// Writes numbers, rounding each once to F32 and then to the dtype.
pub(crate) fn write_floats(
    k: &mut SimKernel<'_>,
    at: DevicePtr,
    values: &[f64],
    dtype: DType,
) -> KernelResult {
    let values = values.iter().map(|&v| v as f32);
    match dtype {
        DType::F16 => k.write(at, &values.map(f16::from_f32).collect::<Vec<_>>()),
        DType::BF16 => k.write(at, &values.map(bf16::from_f32).collect::<Vec<_>>()),
        _ => k.write(at, &values.collect::<Vec<f32>>()),
    }
}

fn twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (walk, s): (Walk, MatMulSizes) = (k.arg(3)?, k.arg(4)?);
    let [m, n, depth] = [s.m, s.n, s.k].map(|n| n as usize);
    let [a_row, a_col, b_row, b_col] = [s.a_row, s.a_col, s.b_row, s.b_col].map(|n| n as usize);
    let n_batch = k.config().grid[2] as usize;
    let mut y = Vec::with_capacity(n_batch * m * n);
    for z in 0..n_batch {
        let (a_at, b_at) = walk.at(z);
        let size = dtype.block_bytes() as u64;
        let a_end = (m - 1) * a_row + (depth - 1) * a_col + 1;
        let b_end = (depth - 1) * b_row + (n - 1) * b_col + 1;
        let a = read_floats(k, k.ptr(1)?.add(size * a_at as u64), a_end, dtype)?;
        let b = read_floats(k, k.ptr(2)?.add(size * b_at as u64), b_end, dtype)?;
        for i in 0..m {
            for j in 0..n {
                y.push((0..depth).map(|d| a[i * a_row + d * a_col] * b[d * b_row + j * b_col]).sum::<f64>());
            }
        }
    }
    if k.ptr(5)?.0 != 0 {
        let c = read_floats(k, k.ptr(5)?, y.len(), dtype)?;
        y.iter_mut().zip(c).for_each(|(y, c)| *y += c);
    }
    write_floats(k, k.ptr(0)?, &y, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(dims: &[usize]) -> Layout {
        Layout::contiguous(Shape::new(dims).unwrap())
    }

    #[test]
    fn the_library_accepts_any_matrix_layout_and_a_single_batch_stride() {
        let shape = |a: &Layout, b: &Layout| library_product(a, b, DType::BF16);
        let nt = shape(&dense(&[5, 8]), &dense(&[7, 8]).transpose().unwrap()).unwrap();
        assert_eq!((nt.m, nt.n, nt.k, nt.n_batch), (5, 7, 8, 1));
        assert!(nt.a.has_rows && !nt.b.has_rows);
        assert_eq!((nt.a.pitch, nt.b.pitch, nt.align), (8, 8, 64));
        let tn = shape(&dense(&[8, 5]).transpose().unwrap(), &dense(&[8, 7])).unwrap();
        assert!(!tn.a.has_rows && tn.b.has_rows);
        assert_eq!((tn.a.pitch, tn.b.pitch), (5, 7));
        // A slice of wider rows.
        let part = dense(&[5, 24]).slice(1, 8, 8).unwrap();
        let sliced = shape(&part, &dense(&[8, 7])).unwrap();
        assert_eq!((sliced.a.pitch, sliced.align), (24, 16));
        // One matrix shared by all: the rows form a single product.
        let flat = shape(&dense(&[3, 5, 8]), &dense(&[8, 7])).unwrap();
        assert_eq!((flat.m, flat.n_batch), (15, 1));
        let batched = shape(&dense(&[3, 5, 8]), &dense(&[3, 8, 7])).unwrap();
        assert_eq!((batched.n_batch, batched.a.batch_stride, batched.b.batch_stride), (3, 40, 56));
        assert_eq!(batched.align, 2, "matrices are 35 two-byte results apart");
        let one_a = shape(&dense(&[5, 8]), &dense(&[3, 8, 7])).unwrap();
        assert_eq!((one_a.n_batch, one_a.a.batch_stride), (3, 0));
        // Heads as a middle dimension: two strides.
        let heads = dense(&[2, 5, 3, 8]).permute(&[0, 2, 1, 3]).unwrap();
        let right = dense(&[2, 3, 8, 7]);
        assert!(shape(&heads, &right).unwrap_err().contains("strides"), "{:?}", shape(&heads, &right));
        // Every second element, and one repeated row.
        let every_second = dense(&[5, 8, 2]).slice(2, 0, 1).unwrap().reshape(Shape::new(&[5, 8]).unwrap());
        assert!(shape(&every_second.unwrap(), &dense(&[8, 7])).is_err());
        let repeated = dense(&[1, 8]).broadcast_to(Shape::new(&[5, 8]).unwrap()).unwrap();
        assert!(shape(&repeated, &dense(&[8, 7])).is_err());
    }
}
