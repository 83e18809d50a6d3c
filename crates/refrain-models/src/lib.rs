//! One file per architecture, as graph builders, and the maps from weight names.
//!
//! A [`Model`] knows its hyperparameters and its weights, and builds the graph of a step of any size from them.
//! Weights are named as GGUF names them; for Hugging Face folders each architecture has a table of the other names.
//!
//! Invariant: no file here names a backend.
#![forbid(unsafe_code)]

mod model; // hyperparameters and weights, made into graphs
mod state; // what layers keep between steps
mod layers; // the pieces that layers are made of
mod step; // what every architecture's step has in common
mod weights; // finding, checking and naming weights
mod train; // steps that learn
mod host_rows; // tables that stay on the host
mod adapter; // LoRA beside linear maps
mod rope; // frequencies of rotary embeddings
mod init; // weights to start training from
mod export; // back to files
mod shapes; // random weights of well-known sizes
mod error;

mod cohere2;
mod gemma3;
mod gemma4;
mod glm4;
mod llama;
mod olmo2;
mod phi3;
mod lfm2;
mod qwen35;

pub use adapter::{Adapter, AdapterPart, LoraSpec, Targets};
pub use error::ModelError;
pub use model::{Head, KvSpec, Model, SampleHead, StepSpec};
pub use rope::inverse_frequencies;
pub use shapes::{NamedShape, QuantMix, SHAPES};
pub use state::{KvGeometry, KvScales, LayerKv, LayerState, SlotSpec, StateTable};
pub use train::{Param, TrainGraph, TrainInputs, TrainPhase, TrainSpec, TrainStates};
pub use weights::TensorSource;
