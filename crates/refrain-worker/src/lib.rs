//! Worker processes that own devices, and the pool that supervises them.
//!
//! A sticky CUDA error cannot be repaired in the process that met it. So a server opens no device: devices belong to
//! worker processes, which are replaced when they fail, and open requests continue from their delivered tokens.
//!
//! Invariant: between a server and its workers travel tokens, never text.
//! Invariant: every open request ends: with a reason or with an error that has a hint.
//! Invariant: no HTTP and no terminal.
#![forbid(unsafe_code)]

mod tokens; // what a server asks for, and what comes back
mod protocol; // how both travel over a socket
mod pool; // the server's side: processes, their replacement, open requests
mod worker; // the other side: reads requests, writes events
mod engine; // what a worker chooses tokens with
mod embedder; // and what it turns texts into vectors with
mod grammars; // grammars of requests, compiled on a thread
pub mod fake; // an engine without a model
mod error;

pub use engine::{
    EngineFailure, ModelShelf, ModelSource, ModelSpec, Progress, Shelf, Title, TokenEngine, TokenSource,
    VectorSource,
};
pub use error::WorkerError;
pub use pool::{Backoff, Deadlines, PoolOptions, WorkerCommand, WorkerPool};
pub use protocol::{LastWords, MAX_PROMPT_TOKENS, MAX_TEXTS, PROTOCOL_VERSION, ProtocolError};
pub use tokens::{
    BackendStatus, EmbedRequest, FinishedBy, LoadStatus, Refusal, RefusalKind, Reply, ReplySender,
    StepCounts, TokenBackend, TokenGrammar, TokenReply, TokenRequest, TokenSampling, TokenUpdate, Update,
    VectorReply, VectorUpdate, WorkerState, WorkerStatus, token_reply, vector_reply,
};
pub use worker::{WorkerOptions, run_worker};
