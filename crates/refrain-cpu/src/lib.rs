//! The CPU backend: SIMD kernels and a thread pool made for them.
//!
//! Invariant: no slow path is hidden; `unsafe` lives in `simd` and `pool` alone.
