//! Tensors in host memory, over bytes that are owned, shared or mapped from a file.

use crate::{DType, Layout, Shape, TensorError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A range of shared bytes: a vector, or part of a mapped file.
///
/// Cloning shares the bytes. Mapped weights are used where they lie in the file.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Owner>,
    range: Range<usize>,
}

/// Who holds bytes that others share.
pub trait Owner: AsRef<[u8]> + Send + Sync {
    /// Hears that the bytes in `range` will hardly be read again. They must stay what they are.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }

    /// Whether [`Owner::evict`] frees memory: the bytes can be had again from elsewhere.
    fn can_evict(&self) -> bool {
        false
    }

    /// Gives up the memory of the bytes in `range`, where that is possible. They must stay what they are: who reads
    /// them again waits for them.
    fn evict(&self, range: Range<usize>) {
        self.release(range);
    }
}

/// An owner that keeps its bytes where they are.
struct PlainOwner<T>(T);

impl<T: AsRef<[u8]>> AsRef<[u8]> for PlainOwner<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<T: AsRef<[u8]> + Send + Sync> Owner for PlainOwner<T> {}

impl Bytes {
    /// All bytes of an owner, such as a `Vec<u8>` or a memory map.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Bytes {
        Bytes::shared(Arc::new(PlainOwner(owner)))
    }

    /// All bytes of an owner that others share.
    pub fn shared(owner: Arc<dyn Owner>) -> Bytes {
        let range = 0..(*owner).as_ref().len();
        Bytes { owner, range }
    }

    /// A part of these bytes; `None` when it lies outside.
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Bytes { owner: self.owner.clone(), range: start..start + range.len() })
    }

    /// Tells the owner that these bytes will hardly be read again: those of a mapped file need not stay in memory, and
    /// come back from the file when they are.
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }

    /// Whether [`Bytes::evict`] frees memory.
    pub fn can_evict(&self) -> bool {
        self.owner.can_evict()
    }

    /// As [`Bytes::release`], and the system's own copy of a file's pages goes too. For machines on which a device uses
    /// the host's memory.
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
    /// A dense tensor over exactly the bytes it needs. Rows of quantised types must be whole blocks.
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

    /// A dense F32 tensor.
    pub fn from_f32(shape: Shape, values: &[f32]) -> Result<HostTensor, TensorError> {
        HostTensor::new(DType::F32, shape, Bytes::new(bytemuck::cast_slice(values).to_vec()))
    }

    /// A dense I32 tensor.
    pub fn from_i32(shape: Shape, values: &[i32]) -> Result<HostTensor, TensorError> {
        HostTensor::new(DType::I32, shape, Bytes::new(bytemuck::cast_slice(values).to_vec()))
    }

    /// Another view of the same bytes.
    pub fn with_layout(&self, layout: Layout) -> Result<HostTensor, TensorError> {
        let have = self.bytes.as_slice().len() / self.dtype.block_bytes() * self.dtype.block_len();
        if layout.end() > have {
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

    /// Where each element lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The bytes behind the tensor, whatever part of them the layout shows.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}
