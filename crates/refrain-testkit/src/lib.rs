//! Op cases, tolerances, golden files and gates for tests.
//!
//! [`cases`] is the one table of op cases. A backend runs all of it against the reference and reports every failure
//! by name:
//!
//! ```no_run
//! # use refrain_graph::Graph;
//! # use refrain_tensor::HostTensor;
//! # use refrain_testkit::{Feed, cases, check_all};
//! # fn run_on_my_backend(_: &Graph, _: &Feed) -> Result<Vec<HostTensor>, String> { Ok(vec![]) }
//! check_all(&cases(), |graph, feed| run_on_my_backend(graph, feed));
//! ```
//!
//! Invariant: never shipped; a dev-dependency only.
//! Invariant: the same seed gives the same bytes on every machine.
//! Invariant: `unsafe` only in the allocator that counts.
#![deny(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

#[allow(unsafe_code)]
mod alloc; // how often a piece of code allocates
mod case; // one case, and how it is run
mod cases; // all of them
mod compare; // when two tensors count as equal
mod data; // files beside the repository, goldens
mod eval; // what a graph means
mod fill; // values for tensors
mod guard; // bytes around buffers
mod random; // graphs that nobody would write
mod reorder; // the same graph, built in another order

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
