//! The CPU backend: SIMD kernels and a thread pool built for them.
//!
//! A compiled graph is a list of kernel calls over one arena. Matrix products read weights in their file
//! layout, or losslessly repacked in the order of access. Training steps, whose weights are states and whose
//! values may be F16 or BF16, have separate kernels (`values`). An op in a layout without a kernel runs its
//! reference implementation; [`CpuCompiled::kernels`] reports which calls do.
//!
//! Invariant: slow paths are reported; `unsafe` is confined to `simd` and `pool`.
//! Invariant: results do not depend on the number of threads.
#![deny(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

#[allow(unsafe_code)]
pub mod pool;
#[allow(unsafe_code)]
pub mod simd;

mod weights; // weights and states in memory
mod memory; // slices of the arena
mod compile; // steps to kernel calls
mod experts; // mixtures of experts
mod lora; // products with adapters
mod run; // execution of calls
mod attention; // the KV cache
mod recurrent; // recurrent layers
mod rows; // elementwise and row ops
mod values; // kernels of training steps
mod sample; // sampling
mod backend; // the Backend implementation
mod bandwidth; // memory bandwidth

pub use backend::{CpuBackend, CpuCompiled, CpuError};
pub use sample::sample_row;
pub use weights::{CpuStates, CpuWeights};
