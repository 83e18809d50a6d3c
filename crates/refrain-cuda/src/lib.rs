//! Runs compiled plans on one CUDA device, real or simulated.
//!
//! [`CudaBackend`] implements [`refrain_graph::Backend`]. A plan's recordable segments become [`WarmPlan`]s: launches
//! over one planned memory. [`GraphCache`] records each once, [`verify`] compares the recording with the eager run, and
//! from then on a step is one replay; when something fails, that graph alone is given up, for a while, with a
//! [`refrain_graph::Reason`]. Host steps run between segments. Everything happens on one device thread.
//!
//! A decode step feeds itself: its last kernel makes the chosen token the next step's input, and tells the host through a
//! ring in pinned memory. So steps are sent before their tokens are asked for, and nothing waits for the host between.
//! Steps with control blocks of their own, such as those of a training run, are queued: each is sent before the results of
//! the one before are known, and those come back through pinned slots, in order.
//!
//! ```
//! use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
//! use refrain_driver::{DeviceKind, Method, sim::SimOptions};
//! use refrain_graph::Backend;
//!
//! # fn main() -> Result<(), refrain_cuda::CudaError> {
//! let options = CudaOptions::new(GraphMode::Require, Method::Stream);
//! let backend = CudaBackend::open(DeviceKind::Sim(SimOptions::default()), options)?;
//! assert_eq!(backend.name(), "sim");
//! # Ok(())
//! # }
//! ```
//!
//! Invariant: nothing in this crate is `unsafe`: it enqueues launches that `refrain-kernels` vouches for, over handles that
//! `refrain-driver` resolves.
//! Invariant: a segment is recorded whole or refused with a reason; nothing is skipped silently.
//! Invariant: only a graph that was verified against the eager run is replayed.
//! Invariant: an op, dtype or shape without a kernel is an error when the plan is built; nothing falls back to the CPU.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod error; // what can go wrong
mod reason; // the driver's errors as reasons
mod warm; // what a step enqueues
mod saved; // what is put back after a graph was tried out
mod verify; // is a graph the same as the eager run
mod cache; // graphs by key
mod progress; // what is heard while a model is loaded
mod options; // how a backend works
mod pump; // between who takes tokens and who sends steps
mod feed; // what a step that feeds itself has on the device
mod resident; // what lies on the device
mod group; // which groups have kernels
mod fused; // products of one row and what is around them
mod attend; // from the rotation of queries to attention, for one row
mod few; // a few rows of packed weights
mod prefill; // products of many rows
mod train_products; // products and attention of a training step
mod tasks; // which kernels a plan is
mod lower; // tasks into launches
mod train; // those of a training step
mod experts; // those of mixtures of experts
mod states; // what a graph is verified with
mod host; // steps on the host
mod traffic; // how many bytes it takes
mod profile; // where the time goes
mod status; // for summaries
mod machine; // what the device thread does for a model
mod owner; // what the models on a device share
mod follow; // decode steps one after the other
mod compare; // steps compared with their eager run as a text or a training run goes on
mod queue; // steps with control blocks of their own, sent ahead
mod backend; // the way in

pub use backend::{CudaBackend, CudaCompiled, CudaStates, CudaWeights, Monitor};
pub use cache::{CacheOptions, CacheStats, GraphCache, GraphMode, Site};
pub use compare::Compared;
pub use error::{CudaError, HeldBytes, MemoryRefusal};
pub use options::{CublasLt, CudaOptions};
pub use prefill::PromptProducts;
pub use profile::{ProfileRow, ProfileSpan, ProfileStep, Timeline};
pub use progress::{LoadEvent, LoadListener};
pub use queue::QueueStats;
pub use reason::{Stage, reason_of};
pub use resident::{Accounting, Upload};
pub use status::{GraphLine, KernelUnits, Status};
pub use verify::{Case, Check, N_CASES, Verified, VerifyError, VerifyReport, verify};
pub use warm::{Space, WarmPlan, Work};

pub use refrain_kernels::{Arch, KernelError, KernelOrigin, Nvrtc, prebuilt_archs};
