//! The only crate that speaks to a CUDA driver, real or simulated.
//!
//! Invariant: a stream that is being recorded can only be enqueued to.
