//! Runs compiled plans on one CUDA device, real or simulated.
//!
//! [`CudaBackend`] implements [`refrain_graph::Backend`]. A plan's recordable segments become [`WarmPlan`]s:
//! launches over one planned memory. [`GraphCache`] records each segment once, [`verify`] compares the
//! recording with the eager run, and from then on a step is a single replay. When something fails, only that
//! graph is taken out of service, for a while, with a [`refrain_graph::Reason`]. Host steps run between
//! segments. All work happens on one device thread.
//!
//! A decode step feeds itself: its last kernel writes the chosen token as the next step's input and reports
//! it to the host through a ring in pinned memory. Steps can therefore be launched before the caller requests
//! their tokens, and the device never waits for the host between them. Steps with control blocks of their
//! own, such as training steps, are queued: each is launched before the results of the previous one are
//! known. Results return in order through pinned slots.
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
//! Invariant: nothing in this crate is `unsafe`: it enqueues launches that `refrain-kernels` has checked,
//! over handles that `refrain-driver` resolves.
//! Invariant: a segment is recorded whole or refused with a reason; nothing is skipped silently.
//! Invariant: only a graph that was verified against the eager run is replayed.
//! Invariant: an op, dtype or shape without a kernel is an error when the plan is built; nothing falls back to the CPU.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod error; // errors
mod reason; // maps driver errors to reasons
mod warm; // the launches of a step
mod saved; // saves and restores memory around a verification
mod verify; // compares a graph with the eager run
mod cache; // graphs by key
mod progress; // load progress events
mod options; // backend options
mod pump; // hand-off between the caller's thread and the device thread
mod feed; // device memory of steps that feed themselves
mod resident; // weights, states and working memory on the device
mod rules; // how the number of rows may decide which kernels run
mod group; // which node groups have kernels
mod fused; // fused matrix products of one row
mod attend; // fused attention for one token of each sequence
mod few; // packed weights times a few rows
mod prefill; // matrix products of many rows
mod train_products; // matrix products and attention of training steps
mod tasks; // chooses the kernels of a plan
mod lower; // lowers tasks to launches
mod train; // lowers training ops
mod experts; // lowers mixture-of-experts ops
mod states; // inputs and states for verification
mod host; // host steps
mod traffic; // bytes moved by a step
mod profile; // time per launch
mod status; // status for summaries
mod device_model; // a model's state on the device thread
mod owner; // device thread and what the models on a device share
mod follow; // runs of decode steps
mod repeat; // runs whose steps the device repeats
mod compare; // continuous verification during decoding and training
mod queue; // steps with their own control blocks, launched ahead
mod backend; // the `Backend` implementation

pub use backend::{CudaBackend, CudaCompiled, CudaStates, CudaWeights, Monitor};
pub use cache::{CacheOptions, CacheStats, GraphCache, GraphMode, Site};
pub use compare::Compared;
pub use error::{CudaError, HeldBytes, MemoryRefusal};
pub use options::{CublasLt, CudaOptions, LoopMode};
pub use prefill::PromptProducts;
pub use profile::{ProfileRow, ProfileSpan, ProfileStep, Timeline};
pub use progress::{LoadEvent, LoadListener};
pub use queue::QueueStats;
pub use reason::{Stage, reason_of};
pub use resident::{Accounting, Upload};
pub use status::{GraphLine, KernelUnits, Status};
pub use verify::{N_CASES, Verified, VerifyCase, VerifyError, VerifyReport, VerifySetup, verify};
pub use warm::{Space, WarmPlan, Work};

pub use refrain_kernels::{GpuArch, KernelError, KernelOrigin, Nvrtc, prebuilt_archs};
