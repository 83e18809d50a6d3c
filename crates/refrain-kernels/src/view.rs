//! Operands of launchers, and the two stride patterns that kernels support.

use bytemuck::{Pod, Zeroable};
use refrain_driver::Buf;
use refrain_tensor::{DType, Layout, MAX_RANK, Shape};

use crate::error::{KernelError, OpCase};

/// A buffer seen through a layout: a plan's operand with an address.
#[derive(Clone, Copy, Debug)]
pub struct BufView {
    /// The whole buffer.
    pub buf: Buf,
    /// Element type.
    pub dtype: DType,
    /// Layout of the elements in the buffer.
    pub layout: Layout,
}

impl BufView {
    /// A contiguous tensor at the start of a buffer.
    #[must_use]
    pub fn dense(buf: Buf, dtype: DType, shape: Shape) -> BufView {
        BufView { buf, dtype, layout: Layout::contiguous(shape) }
    }
}

/// Layout of contiguous rows: row `r` starts at `r / n_inner * outer_stride + r % n_inner * inner_stride`.
#[derive(Clone, Copy, Debug, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RowLayout {
    pub(crate) n_inner: u32,
    pub(crate) inner_stride: u32,
    pub(crate) outer_stride: u32,
}

impl RowLayout {
    /// Index of a row's first element.
    pub(crate) fn start(self, row: usize) -> usize {
        let n_inner = self.n_inner as usize;
        row / n_inner * self.outer_stride as usize + row % n_inner * self.inner_stride as usize
    }
}

/// Indexing of one or two operands over up to six dimensions; elements are numbered in row-major order.
#[derive(Clone, Copy, Debug, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Walk {
    pub(crate) rank: u32,
    pub(crate) dims: [u32; MAX_RANK],
    pub(crate) a: [u32; MAX_RANK],
    pub(crate) b: [u32; MAX_RANK],
}

impl Walk {
    /// Flat indices of element `i` in both operands.
    pub(crate) fn at(&self, mut i: usize) -> (usize, usize) {
        let (mut a, mut b) = (0, 0);
        for axis in (0..self.rank as usize).rev() {
            let dim = self.dims[axis] as usize;
            a += i % dim * self.a[axis] as usize;
            b += i % dim * self.b[axis] as usize;
            i /= dim;
        }
        (a, b)
    }
}

impl OpCase<'_> {
    /// The bytes of a view, from its first to its last element.
    pub(crate) fn extent(&self, name: &'static str, view: &BufView) -> Result<Buf, KernelError> {
        let size = view.dtype.block_bytes();
        crate::require!(
            self,
            !view.dtype.is_quantized(),
            "{name} is {}, which cannot be strided",
            view.dtype
        );
        let (start, end) = (view.layout.offset(), view.layout.end());
        let bytes = end.checked_mul(size);
        self.buf(name, view.buf, bytes, 1)?;
        crate::require!(
            self,
            (view.buf.offset() + (start * size) as u64).is_multiple_of(size as u64),
            "{name} is not aligned to its element size"
        );
        Ok(view.buf.slice((start * size) as u64, ((end - start) * size) as u64)?)
    }

    /// An F32 view as `n_rows` contiguous rows of `n_cols` elements.
    pub(crate) fn rows(
        &self,
        name: &'static str,
        view: &BufView,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<(Buf, RowLayout), KernelError> {
        crate::require!(self, view.dtype == DType::F32, "{name} is {}, must be F32", view.dtype);
        self.rows_of_any(name, view, n_rows, n_cols)
    }

    /// A view of any dtype as contiguous rows of `n_cols` elements.
    pub(crate) fn rows_of_any(
        &self,
        name: &'static str,
        view: &BufView,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<(Buf, RowLayout), KernelError> {
        let shape = view.layout.shape();
        let n_elements = shape.n_elements();
        crate::require!(
            self,
            shape.dim_back(0) == n_cols && n_rows.checked_mul(n_cols) == Some(n_elements),
            "{name} has shape {shape}, must be {n_rows} rows of {n_cols}"
        );
        crate::require!(self, view.layout.rows_are_contiguous(), "{name} has strided rows; copy it first");
        let Some((n_inner, [inner, outer])) = strides_of_rows(&view.layout) else {
            return Err(self.refuse(format!("{name} has rows with more than two strides; copy it first")));
        };
        let rows = RowLayout {
            n_inner: self.u32("a row count", n_inner)?,
            inner_stride: self.u32("a row stride", inner)?,
            outer_stride: self.u32("a row stride", outer)?,
        };
        Ok((self.extent(name, view)?, rows))
    }

    /// Builds the indexing of `shape` with one or two operands broadcast to it.
    pub(crate) fn walk(&self, shape: Shape, a: &Layout, b: Option<&Layout>) -> Result<Walk, KernelError> {
        let fit = |l: &Layout| l.broadcast_to(shape).map_err(|e| self.refuse(e.to_string()));
        let (a, b) = (fit(a)?, b.map(fit).transpose()?);
        let zeros = [0; MAX_RANK];
        let b_strides = b.as_ref().map_or(&zeros[..shape.rank()], |b| b.strides());
        let runs = merge(shape.dims(), &[a.strides(), b_strides]);
        let mut walk = Walk { rank: runs.len() as u32, dims: [1; 6], a: [0; 6], b: [0; 6] };
        for (axis, (n, strides)) in runs.iter().enumerate() {
            walk.dims[axis] = self.u32("a dimension", *n)?;
            walk.a[axis] = self.u32("a stride", strides[0])?;
            walk.b[axis] = self.u32("a stride", strides[1])?;
        }
        self.u32("the number of elements", shape.n_elements())?;
        [Some(&a), b.as_ref()]
            .into_iter()
            .flatten()
            .try_for_each(|l| self.u32("the extent", l.end()).map(|_| ()))?;
        Ok(walk)
    }
}

/// Number of rows at one stride, that stride, and the stride between such groups; `None` if there are more
/// strides.
fn strides_of_rows(layout: &Layout) -> Option<(usize, [usize; 2])> {
    let shape = layout.shape();
    let rank = shape.rank().max(1);
    let dims = &shape.dims()[..rank - 1];
    match merge(dims, &[&layout.strides()[..rank - 1]]).as_slice() {
        [] => Some((1, [shape.dim_back(0), 0])),
        [(n, s)] => Some((*n, [s[0], 0])),
        [(_, outer), (n, inner)] => Some((*n, [inner[0], outer[0]])),
        _ => None,
    }
}

/// Returns why kernels that write 16-bit rows, and prefill attention, cannot read F32 rows of this layout in
/// an aligned buffer: they load 16 bytes at a time. `None` if they can.
#[must_use]
pub fn unaligned_rows(layout: &Layout) -> Option<String> {
    let shape = layout.shape();
    let (n_cols, n_elements) = (shape.dim_back(0), shape.n_elements());
    let n_rows = n_elements / n_cols.max(1);
    if !layout.rows_are_contiguous() {
        return Some("its rows are strided".to_owned());
    }
    let Some((_, strides)) = strides_of_rows(layout) else {
        return Some("its rows have more than two strides".to_owned());
    };
    let is_aligned = n_cols.is_multiple_of(4)
        && layout.offset().is_multiple_of(4)
        && (n_rows == 1 || strides.iter().all(|s| s.is_multiple_of(4)));
    (!is_aligned).then(|| {
        let offset = layout.offset();
        format!("rows of {n_cols} elements with strides {strides:?} from element {offset} on are not 16-byte aligned")
    })
}

/// Dimensions of up to three operands, outermost first, merged where all strides allow it; dimensions of size
/// 1 are left out.
pub(crate) fn merge(dims: &[usize], strides: &[&[usize]]) -> Vec<(usize, [usize; 3])> {
    let mut runs: Vec<(usize, [usize; 3])> = Vec::with_capacity(dims.len());
    for (axis, &dim) in dims.iter().enumerate().filter(|(_, d)| **d != 1) {
        let mut step = [0; 3];
        strides.iter().zip(&mut step).for_each(|(s, to)| *to = s[axis]);
        match runs.last_mut() {
            Some((n, s)) if s.iter().zip(&step).all(|(outer, inner)| *outer == dim * inner) => {
                *n *= dim;
                *s = step;
            }
            _ => runs.push((dim, step)),
        }
    }
    runs
}
