//! `refrain inspect`: what is in a model's files.
pub(crate) use args::*;
mod args {}
