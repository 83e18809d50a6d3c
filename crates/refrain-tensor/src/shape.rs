//! Shapes, stored inline so that they are `Copy`.

use crate::TensorError;
use std::fmt;

/// Maximum number of dimensions of a tensor.
pub const MAX_RANK: usize = 6;

/// The size of each dimension, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// Creates a shape; an error if it has too many dimensions or its element count overflows.
    pub fn new(dims: &[usize]) -> Result<Shape, TensorError> {
        if dims.len() > MAX_RANK {
            return Err(TensorError::RankTooHigh { rank: dims.len() });
        }
        // Zero-sized dimensions count as 1, so that an absurd extent next to a zero is rejected too.
        let mut n: usize = 1;
        for &d in dims {
            n = n.checked_mul(d.max(1)).ok_or_else(|| TensorError::TooLarge { dims: dims.to_vec() })?;
        }
        let mut inline = [1; MAX_RANK];
        inline[..dims.len()].copy_from_slice(dims);
        Ok(Shape { dims: inline, rank: dims.len() as u8 })
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Size of dimension `axis`, counted from the innermost: `dim_back(0)` is the row length.
    ///
    /// Dimensions beyond the rank are 1, as in broadcasting.
    pub fn dim_back(&self, axis: usize) -> usize {
        self.rank().checked_sub(axis + 1).map_or(1, |i| self.dims[i])
    }

    /// The common shape that both broadcast to, if there is one.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut dims = [1; MAX_RANK];
        for back in 0..rank {
            dims[rank - 1 - back] = match (self.dim_back(back), other.dim_back(back)) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Shape::new(&dims[..rank]).ok()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    /// Converts a shape written in code.
    ///
    /// # Panics
    /// If the array is longer than [`MAX_RANK`] or the element count overflows.
    fn from(dims: [usize; N]) -> Shape {
        Shape::new(&dims).unwrap_or_else(|e| panic!("{e}"))
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
