//! The CPU backend: SIMD kernels and a thread pool made for them.
//!
//! A compiled graph is a list of calls over one arena. Products with weights take the weights as
//! the file has them, or repacked without loss into the order in which they are read. Training steps, whose weights are
//! states and whose values may be F16 or BF16, have kernels of their own (`values`). An op in a layout that has no
//! kernel of its own runs as its reference version; [`CpuCompiled::kernels`] tells which calls do.
//!
//! Invariant: no slow path is hidden; `unsafe` lives in `simd` and `pool` alone.
//! Invariant: results do not depend on the number of threads.
#![deny(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

#[allow(unsafe_code)]
pub mod pool;
#[allow(unsafe_code)]
pub mod simd;

mod weights; // where weights lie
mod memory; // slices of the arena
mod compile; // steps into calls
mod experts; // mixtures of experts
mod run; // calls, one after another
mod attention; // the KV cache
mod recurrent; // slots
mod rows; // ops on rows
mod values; // operands of any float type, for training
mod sample; // choosing a token
mod backend; // all of it behind the trait
mod bandwidth; // what memory can deliver

pub use backend::{CpuBackend, CpuCompiled, CpuError};
pub use sample::sample_row;
pub use weights::{CpuStates, CpuWeights};
