//! Op cases, tolerances, golden files and guard zones for tests.
//!
//! [`cases`] returns the table of all op cases. A backend runs it against the reference and reports every failure by
//! name:
//!
//! ```no_run
//! # use refrain_graph::Graph;
//! # use refrain_tensor::HostTensor;
//! # use refrain_testkit::{Feed, cases, check_all};
//! # fn run_on_my_backend(_: &Graph, _: &Feed) -> Result<Vec<HostTensor>, String> { Ok(vec![]) }
//! check_all(&cases(), |graph, feed| run_on_my_backend(graph, feed));
//! ```
//!
//! Invariant: this crate is only a dev-dependency and never shipped.
//! Invariant: the same seed gives the same bytes on every machine.
//! Invariant: only the counting allocator uses `unsafe`.
#![deny(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

#[allow(unsafe_code)]
mod alloc; // allocation counters
mod case; // one op case
mod cases; // the case table
mod compare; // tolerances
mod data; // shared test data, goldens
mod eval; // reference evaluation of graphs
mod fill; // tensor values
mod guard; // guard zones around buffers
mod random; // random graphs
mod reorder; // the same graph with its nodes in another order

pub use alloc::CountingAllocator;
pub use case::{Arg, Case, CaseFailure, check_all, run_case};
pub use cases::cases;
pub use compare::{Mismatch, Tol, assert_close, compare};
pub use data::{load_golden, require_shared_data, shared_data};
pub use eval::{Feed, evaluate, evaluate_values};
pub use fill::{Fill, Rng, encode, tensor};
pub use guard::{Guarded, Trespass};
pub use random::{NodeSeed, RandomGraph, random_graph};
pub use reorder::reordered;
