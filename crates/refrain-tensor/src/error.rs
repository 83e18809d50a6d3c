use crate::{DType, Layout, MAX_RANK, Shape};

/// Errors about shapes, views and the bytes of tensors.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// Too many dimensions.
    #[error("a shape has {rank} dimensions, at most {MAX_RANK} are supported")]
    RankTooHigh {
        /// Requested dimensions.
        rank: usize,
    },
    /// The element count overflows.
    #[error("a tensor of dimensions {dims:?} has too many elements to count")]
    TooLarge {
        /// Requested dimensions.
        dims: Vec<usize>,
    },
    /// The element counts differ.
    #[error("cannot reshape {from} ({} elements) to {to} ({} elements)", from.n_elements(), to.n_elements())]
    Reshape {
        /// Shape of the tensor.
        from: Shape,
        /// Requested shape.
        to: Shape,
    },
    /// The strides do not permit the shape without a copy.
    #[error("{to} is not a view of {} with strides {:?}; copy it first", from.shape(), from.strides())]
    NotAView {
        /// Layout of the tensor.
        from: Layout,
        /// Requested shape.
        to: Shape,
    },
    /// The order is not a permutation of the dimensions.
    #[error("{order:?} is not a permutation of the dimensions of {shape}")]
    Permute {
        /// Shape of the tensor.
        shape: Shape,
        /// Requested order.
        order: Vec<usize>,
    },
    /// The slice exceeds the tensor.
    #[error("slice {start}..{start}+{len} of dimension {axis} lies outside {shape}")]
    Slice {
        /// Shape of the tensor.
        shape: Shape,
        /// Sliced dimension.
        axis: usize,
        /// First index.
        start: usize,
        /// Number of indices.
        len: usize,
    },
    /// The shapes do not broadcast.
    #[error("{from} does not broadcast to {to}")]
    Broadcast {
        /// Shape of the tensor.
        from: Shape,
        /// Requested shape.
        to: Shape,
    },
    /// The rows are not whole blocks.
    #[error("{dtype} stores blocks of {} elements, but the rows of {shape} are not whole blocks", dtype.block_len())]
    PartialBlocks {
        /// Element type.
        dtype: DType,
        /// Shape of the tensor.
        shape: Shape,
    },
    /// The number of bytes does not match the shape.
    #[error("{dtype} {shape} needs {need_bytes} bytes, got {got_bytes}")]
    ByteCount {
        /// Element type.
        dtype: DType,
        /// Shape of the tensor.
        shape: Shape,
        /// Bytes that the shape needs.
        need_bytes: usize,
        /// Bytes given.
        got_bytes: usize,
    },
    /// The dtype does not support the operation.
    #[error("{dtype} cannot be {verb}")]
    Unsupported {
        /// Element type.
        dtype: DType,
        /// Past participle of the operation.
        verb: &'static str,
    },
    /// A value is not finite and cannot be encoded.
    #[error("element {index} is {value}; only finite values can be encoded as {dtype}")]
    NotFinite {
        /// Target element type.
        dtype: DType,
        /// Index of the value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A value exceeds the range of the type or of its block's f16 scale.
    #[error("element {index} is {value:e}, too large for {dtype}")]
    OutOfRange {
        /// Target element type.
        dtype: DType,
        /// Index of the value, or of the largest value in its block.
        index: usize,
        /// The value.
        value: f32,
    },
    /// Not enough memory for a decoded tensor.
    #[error("not enough memory for {n_elements} F32 elements")]
    NoMemory {
        /// Elements of the tensor.
        n_elements: usize,
    },
}
