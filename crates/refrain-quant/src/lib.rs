//! Quantises models: which type each tensor gets, and the pass that encodes and writes a file.
//!
//! Invariant: the bytes of a file depend on its input and its options only, never on the number of threads.
//! Invariant: memory is bounded by the largest tensor; a file has its name only when it is complete.
#![forbid(unsafe_code)]

mod recipe; // file types such as Q4_K_M, and their rules
mod choose; // the type of each tensor of a model
mod encode; // one tensor, by all threads
mod pass; // one file
mod imatrix; // importance matrices
mod error; // errors

pub use choose::{Choice, Override, Reason};
pub use error::{ImatrixFault, QuantError};
pub use imatrix::{Imatrix, ImatrixEntry};
pub use pass::{Fetch, InputTensor, ModelInput, Options, Progress, QuantReport, QuantTensor, quantize_file};
pub use recipe::Recipe;
