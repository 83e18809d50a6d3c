//! Training: configuration, data, tokenizers, schedules, steps, checkpoints, logs, reports and memory
//! estimates.
//!
//! [`learner::Learner`] trains a model on one backend, one step at a time; [`trainer::Trainer`] is a run of
//! such steps over a [`data::Corpus`], with everything around it.
//!
//! Invariant: a run's batches are a function of its configuration, its files and its [`data::DataPosition`].
//! A resumed run sees the same batches as an uninterrupted one, on every platform.
//!
//! Invariant: bad input is an error with a location and a hint, or is dropped and counted; nothing is dropped
//! silently.
//!
//! Invariant: a checkpoint on disk is complete or absent.
#![forbid(unsafe_code)]

pub mod config; // files and flags
pub mod data; // from files to batches
pub mod tokenize; // training a tokenizer
pub mod schedule; // learning rate
pub mod memory; // memory estimate
pub mod learner; // the step API
pub mod flops; // floating-point operations of a step
pub mod trainer; // a run of steps
pub mod checkpoint; // saved state
pub mod log; // one line per step
pub mod report; // the log as an HTML page

mod error;
mod shape; // new models
mod storage; // atomic writes

pub use config::{ConfigOverlay, TrainConfig};
pub use error::TrainError;
pub use storage::{RealStorage, Storage, StorageFile};
