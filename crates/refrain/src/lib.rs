//! Language models with captured CUDA graphs and a fast CPU backend.
//!
//! ```no_run
//! use refrain::{Generate, Model, Prompt, Session, SessionOptions};
//!
//! # fn main() -> Result<(), refrain::Error> {
//! let model = Model::open("model.gguf")?;
//! let mut session = Session::new(&model, &SessionOptions::default())?;
//! for delta in session.generate(Prompt::Text("Once upon a time"), &Generate::default())? {
//!     print!("{}", delta?.text);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] is opened once and may serve several [`Session`]s. A session evaluates prompts and generates text. It
//! keeps what it has evaluated, so the next turn of a conversation evaluates only new tokens; [`Chat`] keeps the
//! conversation itself. Sessions on the same device share one engine: the weights are loaded once, and each further
//! session adds the KV cache of its context. Sessions may be used from different threads. The last session of an engine
//! drops it.
//!
//! A [`Service`] serves many independent requests at once: they share one KV cache, and wait while it has no space.
//!
//! An [`Embedder`] turns texts into vectors.
//!
//! With the feature `pull`, `Model::pull` opens a model by name and downloads it first if necessary.
//!
//! Invariant: no clap, no TLS, no terminal.
#![forbid(unsafe_code)]

mod bench;
mod builtin;
mod chat;
mod embed;
mod engines;
mod error;
mod examine;
mod generate;
mod load;
mod merge;
mod model;
mod placement;
mod convert;
mod importance;
mod tensor_error;
mod planner;
#[cfg(feature = "pull")]
mod pull;
mod service;
mod session;
mod speculation;
pub mod train;

pub use bench::{
    BatchReport, BenchOptions, BenchReport, BenchTarget, CpuInfo, DecodeReport, Launches, ProcessMemory,
    Samples, bench,
};
pub use builtin::Builtin;
pub use chat::{Chat, ChatOptions, ChatReply, OnFull, Role};
pub use convert::{Loss, chat_template_of, convert_to_folder, quant_input};
pub use embed::{EmbedOptions, Embedder, Embedding, EmbeddingUse};
pub use error::Error;
pub use examine::{KernelReport, examine_kernels, free_memory, read_bandwidth};
pub use generate::{Finish, Generate, Generation, Prompt, Summary, TextDelta};
pub use importance::{ImportanceOptions, importance};
pub use load::{
    Arrivals, LoadMoment, LoadOptions, LoadReport, LoadRequest, LoadState, LoadTarget, LocalLoad,
    RequestProgress, run_load,
};
pub use merge::merge;
pub use model::{Model, NamedLora};
pub use placement::{ExpertNeeds, ExpertPlacement, TableNeeds, TablePlacement, host_free_bytes};
pub use planner::Planner;
pub use service::{Reply, Service, ServiceOptions};
pub use session::{Device, Session, SessionOptions};
pub use speculation::{DraftWeights, GuessSource, SpeculationOptions};
pub use tensor_error::{TensorDifference, tensor_differences};

pub use refrain_cpu::pool::PoolError;
pub use refrain_cuda::{
    Accounting, CacheStats, Compared, CudaError, GpuArch, GraphLine, GraphMode, KernelOrigin, KernelUnits,
    LoadEvent, LoadListener, LoopMode, Nvrtc, ProfileRow, ProfileSpan, ProfileStep, Status, Timeline, Upload,
};
pub use refrain_driver::Method;
pub use refrain_driver::sim::{FaultScript, FaultScriptError};
pub use refrain_driver::trial;
pub use refrain_engine::{
    AdapterId, BlockCounts, Comparison, Constraint, EngineError, EngineLoad, FinishReason, Ledger, MAX_DRAFT,
    MAX_TOP, MIN_WINDOW, Pace, Perplexity, PromptCounts, Request, SamplingError, SamplingParams,
    SpeculationPause, SpeculationTally, StepKind, StopFilter, StopOutcome, Stopped, Tally, TokenEvent,
    TokenStream, VectorStream,
};
pub use refrain_formats::chat::{
    ChatError, ChatTemplate, Message, Part, PartKind, RenderOptions, ThinkFilter, ThinkTags,
};
pub use refrain_formats::hf::QuantizedWeights;
pub use refrain_formats::params::{EmbeddingDefaults, GenerationDefaults, ModelConfig, Pooling};
pub use refrain_formats::tokenizer::{DecodeStream, Tokenizer, TokenizerSummary};
pub use refrain_formats::{FormatError, ModelFiles, TensorInfo};
pub use refrain_grammar::{Grammar, GrammarError, GrammarSource, Vocabulary};
pub use refrain_graph as graph;
#[cfg(feature = "pull")]
pub use refrain_hub as hub;
pub use refrain_models::{NamedShape, QuantMix, SHAPES};
pub use refrain_quant as quant;
pub use refrain_tensor::DType;

// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
