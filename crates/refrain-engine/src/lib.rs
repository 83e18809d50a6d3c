//! Requests, KV blocks, sampling policy and the ledger.
//!
//! An [`Engine`] is a handle to a thread that owns one model on one device behind the [`Runner`] trait. Any thread
//! submits a [`Request`] for tokens behind a prompt and reads them from a [`TokenStream`]; all requests that run share
//! each step. A [`Sequence`] keeps its KV from one request to the next and has room of its own; requests without one
//! ([`Request::once`]) share what is left, and the KV of common beginnings. Every step is entered in the [`Ledger`]. [`BackendRunner`] makes a runner of any
//! [`refrain_graph::Backend`]. [`Core`] is the same without the thread: one step at a time.
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
//! Invariant: this crate launches no kernel, speaks no HTTP and needs no asynchronous runtime.
//! Invariant: the engine's thread never waits for a consumer.
#![forbid(unsafe_code)]

mod blocks; // who owns which part of the cache
mod slots; // who has which recurrent state
mod sampling; // how a token is chosen
mod step; // what a step is asked
mod runner; // one step on one device
mod core; // prompts, tokens, positions
mod follow; // decode steps sent ahead
mod request; // what is asked for, and what comes back
mod schedule; // who takes part in the next step
mod stream; // the way from the engine to a consumer
mod mailbox; // what the engine's thread is sent
mod serve; // the engine's thread: steps of all who run
mod engine; // the handle to it
mod stop; // where a text ends
mod perplexity; // how well a model predicts a text
mod ledger; // how each step ran
mod error;

pub use blocks::{BlockCounts, BlockPool, ContentName, OutOfBlocks};
pub use core::{Chosen, Core, SequenceState};
pub use engine::{Engine, EngineLoad, EngineOptions, WeakEngine};
pub use error::{EngineError, Stopped};
pub use follow::{Ahead, FollowRow, FollowedStep, Sends};
pub use ledger::{Ledger, Tally};
pub use perplexity::{Perplexity, PerplexityOptions, perplexity};
pub use refrain_graph::StepKind;
pub use request::{AdapterId, FinishReason, Pace, Request, RequestId, Sequence, TokenEvent};
pub use runner::{BackendRunner, Choice, RunProgress, RunRow, RunShape, Runner, RunnerOptions, StepOut};
pub use sampling::{HISTORY, MAX_BIAS, MAX_TOP, SamplingError, SamplingParams, SamplingRow};
pub use slots::{SlotCopy, SlotCounts};
pub use step::{StepRequest, Want, step_kind};
pub use stop::{StopFilter, Verdict};
pub use stream::TokenStream;
