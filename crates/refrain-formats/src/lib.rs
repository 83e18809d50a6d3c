//! GGUF, safetensors, tokenizers and chat templates.
//!
//! Invariant: this crate knows no device and no network.
