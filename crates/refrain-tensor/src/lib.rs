//! Dtypes, shapes, strided views, host tensors and quantised block codecs.
//!
//! Invariant: this crate knows no device and does no input or output.
//! Invariant: every view (reshape, permute, slice, broadcast) changes only the [`Layout`], for every dtype.
#![forbid(unsafe_code)]

mod dtype;
mod error;
mod host;
mod layout;
pub mod quant;
mod row8;
mod shape;

pub use dtype::DType;
pub use error::TensorError;
pub use host::{Bytes, HostTensor, Owner};
pub use layout::Layout;
pub use row8::{row_from_bytes, row_scale, row_to_bytes};
pub use shape::{MAX_RANK, Shape};
