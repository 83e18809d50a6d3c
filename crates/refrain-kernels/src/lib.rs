//! CUDA kernels, their compilation and their typed launchers.
//!
//! Invariant: nothing here allocates device memory or waits.
