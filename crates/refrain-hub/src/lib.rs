//! Model names, pulling and the local store.
//!
//! Invariant: this crate never parses a model.
