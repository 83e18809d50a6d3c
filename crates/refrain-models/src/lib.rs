//! Model architectures as graph builders, one file each, and their weight names.
//!
//! A [`Model`] holds hyperparameters and weights, and builds from them the graph of a step of any size.
//! Weights have GGUF names; each architecture has a table of the corresponding Hugging Face names.
//!
//! Invariant: no file here names a backend.
#![forbid(unsafe_code)]

mod model; // hyperparameters, weights and graphs
mod state; // state of layers between steps
mod layers; // building blocks of layers
mod step; // the parts of a step that all architectures share
mod weights; // finding, checking and naming weights
mod train; // training steps
mod embed; // steps that turn texts into vectors
mod host_rows; // tables that stay on the host
mod adapter; // LoRA adapters
mod bank; // several adapters, one per sequence
mod rope; // rotary embedding frequencies
mod init; // initial weights for training
mod export; // writing model files
mod export_hf; // tensors of folders
mod export_recurrent; // tensors of recurrent layers
mod shapes; // well-known shapes with random weights
mod error;

mod bert;
mod cohere2;
mod gemma3;
mod gemma4;
mod glm4;
mod llama;
mod olmo2;
mod phi3;
mod gpt_oss;
mod lfm2;
mod qwen35;

pub use adapter::{Adapter, AdapterPart, LoraSpec, Targets};
pub use bank::BankAdapter;
pub use embed::{EmbedGraph, EmbedInputs, EmbedSpec, PoolInputs};
pub use error::ModelError;
pub use export::{GgufContents, GgufTensor};
pub use model::{Head, KvSpec, Model, SampleHead, StepSpec};
pub use refrain_formats::params::Pooling;
pub use rope::inverse_frequencies;
pub use shapes::{NamedShape, QuantMix, SHAPES};
pub use state::{KvGeometry, KvScales, LayerKv, LayerState, SlotSpec, StateTable};
pub use train::{Param, TrainGraph, TrainInputs, TrainPhase, TrainSpec, TrainStates};
pub use weights::TensorSource;
