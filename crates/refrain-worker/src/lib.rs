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

pub use tokens::{
    BackendStatus, EmbedRequest, FinishedBy, LoadStatus, Refusal, RefusalKind, ReplySender, StepCounts,
    TokenBackend, TokenGrammar, TokenReply, TokenRequest, TokenSampling, TokenUpdate, WorkerState,
    WorkerStatus, token_reply,
};
