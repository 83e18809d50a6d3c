//! Training: configuration, data, tokenizers, schedules, steps, checkpoints, logs, reports and the memory estimate.
//!
//! [`learner::Learner`] is a model that learns on one backend, one step at a time; [`trainer::Trainer`] is a run of such
//! steps over a [`data::Corpus`], with everything around it.
//!
//! Invariant: what a run sees is a function of its configuration, its files and its [`data::DataPosition`]. A run that
//! is resumed sees what it would have seen, on every platform.
//! Invariant: bad input is an error with a place and a hint, or is dropped and counted; nothing is dropped silently.
//! Invariant: a checkpoint on disk is whole or is not there.
#![forbid(unsafe_code)]

pub mod config; // what the user asks for
pub mod data; // files to batches
pub mod tokenize; // a tokenizer of the training texts
pub mod schedule; // learning rate of a step
pub mod memory; // the estimate before the start
pub mod learner; // one step
pub mod flops; // what a step computes
pub mod trainer; // a run of steps
pub mod checkpoint; // saved state
pub mod log; // one line a step
pub mod report; // the log as a page

mod error;
mod shape; // the model to make
mod storage; // files that are whole or not there

pub use config::{ConfigOverlay, TrainConfig};
pub use error::TrainError;
pub use storage::{RealStorage, Storage, StorageFile};
