//! HTTP server for language models: OpenAI's and Anthropic's APIs over supervised workers.
//!
//! The server turns requests into tokens and tokens into replies. Tokens come from a [`refrain_worker::TokenBackend`]:
//! the pool of worker processes in production, a fake in tests.
//!
//! Invariant: the server process opens no device and evaluates no model.
//! Invariant: every open request ends: with a finish reason or with an error that has a hint.
#![forbid(unsafe_code)]
