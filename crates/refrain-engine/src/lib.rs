//! Sessions, KV blocks, sampling policy and the ledger.
//!
//! An [`Engine`] owns one model on one device behind the [`Runner`] trait, hands out KV blocks to [`Session`]s, and
//! enters every step in the [`Ledger`]. [`BackendRunner`] makes a runner of any [`refrain_graph::Backend`].
//!
//! Invariant: this crate launches no kernel and speaks no HTTP.
#![forbid(unsafe_code)]

mod blocks; // who owns which part of the cache
mod sampling; // how a token is chosen
mod runner; // one step on one device
mod session; // prompts, tokens, positions
mod follow; // one token after the other
mod stop; // where a text ends
mod perplexity; // how well a model predicts a text
mod ledger; // how each step ran
mod error;

pub use blocks::{BlockPool, OutOfBlocks};
pub use error::EngineError;
pub use follow::Ahead;
pub use ledger::{Ledger, Tally};
pub use perplexity::{Perplexity, PerplexityOptions, perplexity};
pub use refrain_graph::StepKind;
pub use runner::{BackendRunner, RunEnd, Runner, RunnerOptions, StepOut, StepRequest, Want};
pub use sampling::{HISTORY, MAX_BIAS, SamplingError, SamplingParams, SamplingRow};
pub use session::{Chosen, Engine, Session};
pub use stop::{StopFilter, Verdict};
