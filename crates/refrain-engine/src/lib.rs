//! Requests, KV blocks, sampling policy and the ledger.
//!
//! An [`Engine`] is a handle to a thread that owns one model on one device behind the [`Runner`] trait. Any
//! thread submits a [`Request`] for tokens after a prompt and reads them from a [`TokenStream`]; all running
//! requests share each step. A [`Sequence`] keeps its KV from one request to the next and has reserved
//! capacity. Requests without one ([`Request::once`]) share the unreserved capacity, and the KV of common
//! prefixes. Every step is recorded in the [`Ledger`]. [`BackendRunner`] turns any [`refrain_graph::Backend`]
//! into a runner. [`Core`] is the same without the thread: one step at a time.
//!
//! ```
//! use refrain_engine::{Engine, EngineError, EngineOptions, Request, Runner, TokenEvent};
//!
//! # fn example(runner: Box<dyn Runner>) -> Result<(), EngineError> {
//! let engine = Engine::new(runner, EngineOptions::default())?;
//! let sequence = engine.open(4096)?;
//! let mut request = Request::new(&sequence, vec![1, 17, 5]);
//! request.max_tokens = 100;
//! for event in engine.submit(request)? {
//!     if let TokenEvent::Token { token, .. } = event? {
//!         println!("{token}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! An [`Embedder`] is a handle to a thread that turns texts into vectors.
//!
//! Invariant: this crate launches no kernels, speaks no HTTP and needs no async runtime.
//! Invariant: the engine's thread never waits for a consumer.
#![forbid(unsafe_code)]

mod blocks; // which sequence owns which KV blocks
mod slots; // which sequence owns which recurrent state
mod sampling; // how a token is chosen
mod step; // shape and inputs of a step
mod runner; // one step on one device
mod core; // prompts, tokens, positions
mod decode; // decode steps launched ahead
mod speculate; // where guessed tokens come from, and how many are worth checking
mod draft_model; // guesses of a smaller model
mod verify; // steps that check guessed tokens
mod request; // requests and their events
mod schedule; // which requests take part in the next step
mod stream; // events from the engine to a consumer
mod mailbox; // messages to the engine's thread
mod serve; // the engine's thread: steps of all running requests
mod engine; // handle to that thread
mod constrain; // requests whose text follows a grammar
mod masks; // threads that compute their masks
mod stop; // stop strings
mod perplexity; // how well a model predicts a text
mod embed; // vectors of texts
mod compare; // two models on a text
mod observe; // the activations that weights multiply
mod ledger; // how each step ran
mod error;

pub use blocks::{BlockCounts, BlockPool, ContentName, OutOfBlocks};
pub use compare::{Compared, Comparison, compare};
pub use constrain::Constraint;
pub use core::{Chosen, Core, SequenceState};
pub use decode::{DecodeRow, DecodedStep, LaunchPolicy, Lookahead};
pub use embed::{Embedder, EmbedderOptions, VectorStream};
pub use engine::{Engine, EngineLoad, EngineOptions, WeakEngine};
pub use error::{EngineError, Stopped};
pub use ledger::{Ledger, SpeculationTally, Tally};
pub use observe::{ObservedWeight, observe};
pub use perplexity::{MIN_WINDOW, Perplexity, PerplexityOptions, perplexity};
pub use refrain_graph::StepKind;
pub use request::{AdapterId, FinishReason, Pace, Request, RequestId, Sequence, TokenEvent};
pub use runner::{
    BackendRunner, DecodeProgress, RunMember, RunShape, Runner, RunnerOptions, StepOut, TokenChoice,
};
pub use sampling::{HISTORY, MAX_BIAS, MAX_TOP, SamplingError, SamplingParams, SamplingRow};
pub use schedule::PromptCounts;
pub use slots::{SlotCopy, SlotCounts};
pub use speculate::{
    DraftSource, Drafter, MAX_DRAFT, Speculation, SpeculationPause, VerifyCost, ngram_draft,
};
pub use step::{StepRequest, Want, step_kind};
pub use stop::{StopFilter, StopOutcome};
pub use stream::TokenStream;
