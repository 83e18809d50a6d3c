//! HTTP server for language models: OpenAI's and Anthropic's APIs over supervised workers.
//!
//! A sticky CUDA error cannot be repaired in the process that met it, so the server opens no device. Devices belong
//! to worker processes, which are replaced when they fail; open requests continue from their delivered tokens.
//!
//! Invariant: the server process opens no device and evaluates no model.
//! Invariant: between server and workers travel tokens, never text.
//! Invariant: every open request ends: with a finish reason or with an error that has a hint.
#![forbid(unsafe_code)]

mod tokens; // what the API asks for, and what comes back

pub use tokens::{
    BackendStatus, FinishedBy, LoadStatus, Refusal, RefusalKind, ReplySender, StepCounts, TokenBackend,
    TokenReply, TokenRequest, TokenSampling, TokenUpdate, WorkerState, WorkerStatus, token_reply,
};
