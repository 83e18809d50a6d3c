//! Readers of model files: valid input and errors.

mod common;
mod fuzz;
mod gguf_faults;
mod gguf_read;
mod gguf_split;
mod hf_folder;
mod params_gguf;
mod params_hf;
mod quantized;
mod source;
