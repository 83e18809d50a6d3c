//! Op cases, tolerances, golden files and gates for tests.
//!
//! Invariant: never shipped.
