//! Dtypes, shapes, strided views, host tensors and quantised block codecs.
//!
//! Invariant: this crate knows no device and does no input or output.
