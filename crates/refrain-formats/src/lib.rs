//! GGUF, safetensors, tokenizers and chat templates.
//!
//! Invariant: this crate knows no device and no network.
#![deny(unsafe_code)] // except in `mmap`

mod aligned;
mod atomic;
mod display;
mod error;
pub mod gguf;
pub mod hf;
mod mmap;
pub mod params;
mod source;
mod table;

pub use atomic::AtomicFile;
pub use display::display_name;
pub use error::FormatError;
pub use source::ModelFiles;
pub use table::TensorInfo;

pub mod chat;
pub mod tokenizer;
