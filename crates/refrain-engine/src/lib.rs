//! Sessions, KV blocks, sampling policy and the ledger.
//!
//! Invariant: this crate launches no kernel and speaks no HTTP.
