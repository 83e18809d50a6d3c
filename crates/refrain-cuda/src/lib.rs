//! Runs compiled plans on one CUDA device, real or simulated.
//!
//! Invariant: nothing in this crate is `unsafe`; device pointers live in `refrain-driver`.
