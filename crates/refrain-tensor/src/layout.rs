//! Strided layouts, which map the index of each element to its position in storage.

use crate::{MAX_RANK, Shape, TensorError};

/// A shape with strides and an offset, all in elements.
///
/// Flat indices count *elements* of the storage. For a block-quantised dtype, element `i` is number `i % block_len`
/// of block `i / block_len`, so every view is valid for every dtype. A kernel that needs whole blocks checks
/// [`Layout::rows_are_contiguous`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    strides: [usize; MAX_RANK],
    offset: usize,
}

impl Layout {
    /// Creates the contiguous row-major layout of a shape.
    pub fn contiguous(shape: Shape) -> Layout {
        let mut strides = [0; MAX_RANK];
        let mut step = 1;
        for (axis, &dim) in shape.dims().iter().enumerate().rev() {
            strides[axis] = step;
            step *= dim.max(1);
        }
        Layout { shape, strides, offset: 0 }
    }

    /// The logical shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.shape.rank()]
    }

    /// The flat index of the first element.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// True if the elements are contiguous in row-major order, at any offset. An empty view counts as contiguous.
    pub fn is_contiguous(&self) -> bool {
        if self.shape.n_elements() == 0 {
            return true;
        }
        let mut step = 1;
        for (&dim, &stride) in self.shape.dims().iter().zip(self.strides()).rev() {
            if dim != 1 && stride != step {
                return false;
            }
            step *= dim;
        }
        true
    }

    /// True if the innermost dimension is contiguous.
    pub fn rows_are_contiguous(&self) -> bool {
        match self.shape.rank() {
            0 => true,
            rank => self.shape.dims()[rank - 1] <= 1 || self.strides[rank - 1] == 1,
        }
    }

    /// One past the largest flat index of the layout; 0 if it is empty.
    pub fn end(&self) -> usize {
        if self.shape.n_elements() == 0 {
            return 0;
        }
        let reach: usize = self.shape.dims().iter().zip(self.strides()).map(|(&d, &s)| (d - 1) * s).sum();
        self.offset + reach + 1
    }

    /// The flat index of the element at `index`.
    ///
    /// # Panics
    /// In debug builds, if `index` is outside the shape.
    pub fn at(&self, index: &[usize]) -> usize {
        debug_assert_eq!(index.len(), self.shape.rank());
        debug_assert!(
            index.iter().zip(self.shape.dims()).all(|(i, d)| i < d),
            "{index:?} outside {:?}",
            self.shape
        );
        self.offset + index.iter().zip(self.strides()).map(|(i, s)| i * s).sum::<usize>()
    }

    /// Iterates over the flat indices of all elements, in row-major order of the shape.
    pub fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let n = self.shape.n_elements();
        let mut index = [0usize; MAX_RANK];
        let rank = self.shape.rank();
        (0..n).map(move |_| {
            let flat = self.offset + (0..rank).map(|a| index[a] * self.strides[a]).sum::<usize>();
            for axis in (0..rank).rev() {
                index[axis] += 1;
                if index[axis] < self.shape.dims()[axis] {
                    break;
                }
                index[axis] = 0;
            }
            flat
        })
    }

    /// Returns a view of the same elements with another shape, if that needs no copy.
    pub fn reshape(&self, shape: Shape) -> Result<Layout, TensorError> {
        if shape.n_elements() != self.shape.n_elements() {
            return Err(TensorError::Reshape { from: self.shape, to: shape });
        }
        if shape.n_elements() == 0 {
            return Ok(Layout { offset: self.offset, ..Layout::contiguous(shape) });
        }
        // Old dimensions are merged into runs of constant stride; each run must be split exactly by new dimensions.
        let mut runs: Vec<(usize, usize)> = Vec::with_capacity(MAX_RANK); // (elements, stride), outermost first
        for (&dim, &stride) in self.shape.dims().iter().zip(self.strides()) {
            if dim == 1 {
                continue;
            }
            match runs.last_mut() {
                Some((n, s)) if *s == dim * stride => (*n, *s) = (*n * dim, stride),
                _ => runs.push((dim, stride)),
            }
        }
        let mut strides = [0; MAX_RANK];
        let mut run = runs.pop();
        let mut step = run.map_or(1, |r| r.1);
        let mut left = run.map_or(1, |r| r.0);
        for (axis, &dim) in shape.dims().iter().enumerate().rev() {
            if left == 1 && dim != 1 {
                run = runs.pop();
                (left, step) = run.unwrap_or((1, 1));
            }
            strides[axis] = step;
            if !left.is_multiple_of(dim) {
                return Err(TensorError::NotAView { from: *self, to: shape });
            }
            left /= dim;
            step *= dim;
        }
        Ok(Layout { shape, strides, offset: self.offset })
    }

    /// Reorders the dimensions: dimension `i` of the result is dimension `order[i]` of `self`.
    pub fn permute(&self, order: &[usize]) -> Result<Layout, TensorError> {
        let rank = self.shape.rank();
        let mut seen = [false; MAX_RANK];
        let valid =
            order.len() == rank && order.iter().all(|&a| a < rank && !std::mem::replace(&mut seen[a], true));
        if !valid {
            return Err(TensorError::Permute { shape: self.shape, order: order.to_vec() });
        }
        let mut dims = [1; MAX_RANK];
        let mut strides = [0; MAX_RANK];
        for (to, &from) in order.iter().enumerate() {
            dims[to] = self.shape.dims()[from];
            strides[to] = self.strides[from];
        }
        Ok(Layout { shape: Shape::new(&dims[..rank])?, strides, offset: self.offset })
    }

    /// Swaps the last two dimensions.
    pub fn transpose(&self) -> Result<Layout, TensorError> {
        let rank = self.shape.rank();
        if rank < 2 {
            return Err(TensorError::Permute { shape: self.shape, order: vec![] });
        }
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 1, rank - 2);
        self.permute(&order)
    }

    /// Selects `len` indices of dimension `axis`, beginning with `start`.
    pub fn slice(&self, axis: usize, start: usize, len: usize) -> Result<Layout, TensorError> {
        let rank = self.shape.rank();
        let fits = axis < rank && start.checked_add(len).is_some_and(|end| end <= self.shape.dims()[axis]);
        if !fits {
            return Err(TensorError::Slice { shape: self.shape, axis, start, len });
        }
        let mut dims = [1; MAX_RANK];
        dims[..rank].copy_from_slice(self.shape.dims());
        dims[axis] = len;
        let offset = self.offset + start * self.strides[axis];
        Ok(Layout { shape: Shape::new(&dims[..rank])?, strides: self.strides, offset })
    }

    /// Broadcasts to `shape`: repeats dimensions of size 1 and adds outer ones.
    pub fn broadcast_to(&self, shape: Shape) -> Result<Layout, TensorError> {
        if self.shape.broadcast(&shape) != Some(shape) {
            return Err(TensorError::Broadcast { from: self.shape, to: shape });
        }
        let mut strides = [0; MAX_RANK];
        for back in 0..self.shape.rank() {
            let from = self.shape.rank() - 1 - back;
            let to = shape.rank() - 1 - back;
            strides[to] = if self.shape.dims()[from] == 1 { 0 } else { self.strides[from] };
        }
        Ok(Layout { shape, strides, offset: self.offset })
    }
}
