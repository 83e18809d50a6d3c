//! Language models with captured CUDA graphs and a fast CPU backend.
//!
//! Invariant: no clap, no TLS, no terminal.
