//! Training.
#![forbid(unsafe_code)]

pub mod learner; // the step API
