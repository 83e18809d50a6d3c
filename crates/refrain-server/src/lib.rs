//! HTTP server for language models: OpenAI's and Anthropic's APIs over supervised workers.
//!
//! ```text
//!  connection ──► gate ──► endpoint ──► fields ──► tokens ──► backend
//!                 keys,     chat, …      checked    template,
//!                 limits                 by name    tokenizer
//!
//!  events or JSON ◄── text ◄── tokens of all choices
//!                     stop texts, thinking, tool calls
//! ```
//!
//! The server turns requests into tokens and tokens into replies. Tokens come from a [`refrain_worker::TokenBackend`]:
//! the pool of worker processes in production, a fake in tests.
//!
//! Invariant: the server process opens no device and evaluates no model.
//! Invariant: every open request ends: with a finish reason or with an error that has a hint.
//! Invariant: a field of a request is honoured or refused by name, never ignored.
#![forbid(unsafe_code)]

mod serve; // connections: accepting, limits, draining
mod app; // what all requests share, and the routes
mod keys; // who may send requests
mod api; // one file per endpoint
mod page; // the web page
mod fields; // bodies, field by field
mod text; // from tokens to text
mod tools; // tool calls in that text
mod served; // models by name
mod metrics;
mod ids;
mod error;

pub use error::{ApiError, ServeError};
pub use keys::ApiKeys;
pub use serve::{KeyReplacer, Server, ServerOptions, TlsFiles};
pub use served::ServedModel;
