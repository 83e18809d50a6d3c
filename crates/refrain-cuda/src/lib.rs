//! Runs compiled plans on one CUDA device, real or simulated.
//!
//! Invariant: nothing in this crate is `unsafe`; device pointers live in `refrain-driver`.
//! Invariant: a segment is recorded whole or refused with a reason; nothing is skipped silently.
//! Invariant: only a graph that was verified against the eager run is replayed.
//! Invariant: an op, dtype or shape without a kernel is an error when the plan is built; nothing falls back to the CPU.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod error; // what can go wrong
mod reason; // the driver's errors as reasons
mod warm; // what a step enqueues
mod verify; // is a graph the same as the eager run
mod cache; // graphs by key

pub use cache::{CacheOptions, CacheStats, GraphCache, GraphMode, Site};
pub use error::CudaError;
pub use reason::{Stage, reason_of};
pub use verify::{Case, Check, N_CASES, Verified, VerifyError, VerifyReport, verify};
pub use warm::{Space, WarmPlan, Work};
