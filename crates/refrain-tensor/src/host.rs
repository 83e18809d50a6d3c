//! Tensors in host memory, over owned, shared or memory-mapped bytes.

use crate::{DType, Layout, Shape, TensorError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A range of shared bytes, from a vector or a mapped file.
///
/// Cloning shares the bytes. Mapped weights are used in place, without a copy.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Owner>,
    range: Range<usize>,
}

/// Owner of shared bytes.
pub trait Owner: AsRef<[u8]> + Send + Sync {
    /// Hints that the bytes in `range` are unlikely to be read again. Their content must not change.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }

    /// True if [`Owner::evict`] frees memory, because the bytes can be reloaded.
    fn can_evict(&self) -> bool {
        false
    }

    /// Frees the memory of the bytes in `range`, if possible. Their content must not change: reading them again
    /// only takes longer.
    fn evict(&self, range: Range<usize>) {
        self.release(range);
    }
}

/// An owner that keeps its bytes in memory.
struct PlainOwner<T>(T);

impl<T: AsRef<[u8]>> AsRef<[u8]> for PlainOwner<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<T: AsRef<[u8]> + Send + Sync> Owner for PlainOwner<T> {}

impl Bytes {
    /// Wraps all bytes of an owner, such as a `Vec<u8>` or a memory map.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Bytes {
        Bytes::shared(Arc::new(PlainOwner(owner)))
    }

    /// Wraps all bytes of a shared owner.
    pub fn shared(owner: Arc<dyn Owner>) -> Bytes {
        let range = 0..(*owner).as_ref().len();
        Bytes { owner, range }
    }

    /// Returns a subrange; `None` if it is out of range.
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Bytes { owner: self.owner.clone(), range: start..start + range.len() })
    }

    /// Hints that these bytes are unlikely to be read again. Bytes of a mapped file then need not stay in memory;
    /// if read again, they are reloaded from the file.
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }

    /// True if [`Bytes::evict`] frees memory.
    pub fn can_evict(&self) -> bool {
        self.owner.can_evict()
    }

    /// Like [`Bytes::release`], but also drops the file's pages from the page cache. For machines whose device
    /// shares the host's memory.
    pub fn evict(&self) {
        self.owner.evict(self.range.clone());
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}

/// A tensor in host memory.
#[derive(Clone, Debug)]
pub struct HostTensor {
    dtype: DType,
    layout: Layout,
    bytes: Bytes,
}

impl HostTensor {
    /// Creates a contiguous tensor over exactly the bytes that it needs. Rows of quantised types must be whole
    /// blocks.
    pub fn new(dtype: DType, shape: Shape, bytes: Bytes) -> Result<HostTensor, TensorError> {
        if !shape.dim_back(0).is_multiple_of(dtype.block_len()) {
            return Err(TensorError::PartialBlocks { dtype, shape });
        }
        let need = dtype.bytes_for(shape.n_elements()).ok_or(TensorError::PartialBlocks { dtype, shape })?;
        let got = bytes.as_slice().len();
        if need != got {
            return Err(TensorError::ByteCount { dtype, shape, need_bytes: need, got_bytes: got });
        }
        Ok(HostTensor { dtype, layout: Layout::contiguous(shape), bytes })
    }

    /// Creates a contiguous F32 tensor.
    pub fn from_f32(shape: Shape, values: &[f32]) -> Result<HostTensor, TensorError> {
        HostTensor::new(DType::F32, shape, Bytes::new(bytemuck::cast_slice(values).to_vec()))
    }

    /// Creates a contiguous I32 tensor.
    pub fn from_i32(shape: Shape, values: &[i32]) -> Result<HostTensor, TensorError> {
        HostTensor::new(DType::I32, shape, Bytes::new(bytemuck::cast_slice(values).to_vec()))
    }

    /// Creates another view of the same bytes.
    pub fn with_layout(&self, layout: Layout) -> Result<HostTensor, TensorError> {
        let n_stored = self.bytes.as_slice().len() / self.dtype.block_bytes() * self.dtype.block_len();
        if layout.end() > n_stored {
            let need_bytes = layout.end().div_ceil(self.dtype.block_len()) * self.dtype.block_bytes();
            let got_bytes = self.bytes.as_slice().len();
            return Err(TensorError::ByteCount {
                dtype: self.dtype,
                shape: layout.shape(),
                need_bytes,
                got_bytes,
            });
        }
        Ok(HostTensor { dtype: self.dtype, layout, bytes: self.bytes.clone() })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Logical shape.
    pub fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// Mapping from indices to elements.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tensor's storage, including bytes that the layout does not reach.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}
