use crate::{DType, Layout, MAX_RANK, Shape};

/// What can be wrong with a shape, a view or the bytes behind a tensor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// More dimensions than supported.
    #[error("{rank} dimensions, at most {MAX_RANK} are supported")]
    RankTooHigh {
        /// Dimensions asked for.
        rank: usize,
    },
    /// The element count overflows.
    #[error("a tensor of dimensions {dims:?} has too many elements to count")]
    TooLarge {
        /// Dimensions asked for.
        dims: Vec<usize>,
    },
    /// Element counts differ.
    #[error("cannot reshape {from} ({} elements) to {to} ({} elements)", from.n_elements(), to.n_elements())]
    Reshape {
        /// Shape of the tensor.
        from: Shape,
        /// Shape asked for.
        to: Shape,
    },
    /// The strides do not allow the shape without a copy.
    #[error("{to} is not a view of {} with strides {:?}; copy it first", from.shape(), from.strides())]
    NotAView {
        /// Layout of the tensor.
        from: Layout,
        /// Shape asked for.
        to: Shape,
    },
    /// Not a permutation of the dimensions.
    #[error("{order:?} is not an order of the dimensions of {shape}")]
    Permute {
        /// Shape of the tensor.
        shape: Shape,
        /// Order asked for.
        order: Vec<usize>,
    },
    /// A slice outside the tensor.
    #[error("slice {start}..{start}+{len} of dimension {axis} lies outside {shape}")]
    Slice {
        /// Shape of the tensor.
        shape: Shape,
        /// Dimension sliced.
        axis: usize,
        /// First entry.
        start: usize,
        /// Entries.
        len: usize,
    },
    /// Shapes that do not broadcast.
    #[error("{from} does not broadcast to {to}")]
    Broadcast {
        /// Shape of the tensor.
        from: Shape,
        /// Shape asked for.
        to: Shape,
    },
    /// Rows that are not whole blocks.
    #[error("{dtype} stores blocks of {} elements, rows of {shape} are not whole blocks", dtype.block_len())]
    PartialBlocks {
        /// Element type.
        dtype: DType,
        /// Shape of the tensor.
        shape: Shape,
    },
    /// Too few or too many bytes.
    #[error("{dtype} {shape} needs {need_bytes} bytes, got {got_bytes}")]
    ByteCount {
        /// Element type.
        dtype: DType,
        /// Shape of the tensor.
        shape: Shape,
        /// Bytes the shape needs.
        need_bytes: usize,
        /// Bytes there are.
        got_bytes: usize,
    },
    /// An operation that only plain dtypes have.
    #[error("{dtype} cannot be {verb}")]
    Unsupported {
        /// Element type.
        dtype: DType,
        /// What was asked for.
        verb: &'static str,
    },
    /// A value that cannot be encoded.
    #[error("element {index} is {value}; only finite values can be encoded as {dtype}")]
    NotFinite {
        /// Element type asked for.
        dtype: DType,
        /// Place of the value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A value beyond what the type, or the f16 scale of its block, can hold.
    #[error("element {index} is {value:e}, too large for {dtype}")]
    OutOfRange {
        /// Element type asked for.
        dtype: DType,
        /// Place of the value, or of the largest in its block.
        index: usize,
        /// The value.
        value: f32,
    },
    /// No memory for a decoded tensor.
    #[error("no memory for {n_elements} elements of F32")]
    NoMemory {
        /// Elements of the tensor.
        n_elements: usize,
    },
}
