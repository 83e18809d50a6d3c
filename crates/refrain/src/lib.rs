//! Language models with captured CUDA graphs and a fast CPU backend.
//!
//! ```no_run
//! use refrain::{Generate, Model, Prompt, Session, SessionOptions};
//!
//! # fn main() -> Result<(), refrain::Error> {
//! let model = Model::open("model.gguf")?;
//! let mut session = Session::new(&model, &SessionOptions::default())?;
//! for piece in session.generate(Prompt::Text("Once upon a time"), &Generate::default())? {
//!     print!("{}", piece?.text);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] is opened once and may serve several [`Session`]s. A session evaluates prompts and generates text; it
//! remembers what it has evaluated, so a conversation that goes on is not evaluated again. Sessions on the same device
//! share one engine: the weights are there once, and each further session adds the KV cache of its context. They may be
//! used from different threads. The engine goes with the last of its sessions.
//!
//! A [`Service`] is for many requests at once that have nothing to remember: they share one KV cache, and wait where there
//! is no room in it.
//!
//! Invariant: no clap, no TLS, no terminal.
#![forbid(unsafe_code)]

mod bench;
mod builtin;
mod engines;
mod error;
mod examine;
mod generate;
mod merge;
mod model;
mod placement;
mod planner;
mod service;
mod session;
pub mod train;

pub use bench::{
    BatchReport, BenchOptions, BenchReport, BenchTarget, CpuInfo, DecodeReport, Launches, Resident, Samples,
    bench,
};
pub use builtin::Builtin;
pub use error::Error;
pub use examine::{KernelReport, examine_kernels, free_memory, read_bandwidth};
pub use generate::{Finish, Generate, Generation, Piece, Prompt, Summary};
pub use merge::merge;
pub use model::Model;
pub use placement::{TableNeeds, TablePlacement, host_free_bytes};
pub use planner::Planner;
pub use service::{Reply, Service, ServiceOptions};
pub use session::{Device, Session, SessionOptions};

pub use refrain_cuda::{
    Accounting, Arch, CacheStats, Compared, CudaError, GraphLine, GraphMode, KernelOrigin, KernelUnits,
    LoadEvent, LoadListener, Nvrtc, ProfileRow, ProfileSpan, ProfileStep, Status, Timeline, Upload,
};
pub use refrain_driver::Method;
pub use refrain_driver::sim::{FaultScript, FaultScriptError};
pub use refrain_driver::trial;
pub use refrain_engine::{
    BlockCounts, EngineError, EngineLoad, Ledger, Perplexity, SamplingError, SamplingParams, StepKind, Tally,
};
pub use refrain_formats::chat::{
    ChatTemplate, Message, Part, PartKind, RenderOptions, ThinkFilter, ThinkTags,
};
pub use refrain_formats::params::{GenerationDefaults, ModelConfig};
pub use refrain_formats::tokenizer::{DecodeStream, Tokenizer, TokenizerSummary};
pub use refrain_formats::{FormatError, ModelFiles, TensorInfo};
pub use refrain_graph as graph;
pub use refrain_models::{NamedShape, QuantMix, SHAPES};
pub use refrain_tensor::DType;

// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
