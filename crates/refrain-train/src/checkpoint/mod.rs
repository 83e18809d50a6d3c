//! Saved state: a folder that is whole or is not there.
//!
//! ```text
//! out/latest                     the name of the newest checkpoint
//! out/best                       the name of the one with the lowest held-out loss
//! out/step-00001000/state.json   step, data position, random state, configuration, and what the files hold
//! out/step-00001000/*.safetensors
//! ```
//!
//! `state.json` has the size and the SHA-256 of every file, and a seal over itself: a changed byte anywhere is found.

mod base; // the frozen weights of an adapter
mod error; // what can go wrong
mod load; // from a folder
mod save; // to a folder
mod store; // several, the oldest removed

use std::fmt;

use refrain_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::config::TrainConfig;
use crate::data::DataPosition;

pub use base::FrozenBase;
pub use error::CheckpointError;
pub use load::Checkpoint;
pub use save::Fetch;
pub use store::{CheckpointStore, SaveRequest};

/// The version of the layout.
pub const VERSION: u32 = 1;
const STATE: &str = "state.json";
/// Stands for the seal while it is computed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// What a run is, besides its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Steps that are done.
    pub step: u64,
    /// Where the next batch starts.
    pub position: DataPosition,
    /// Where random numbers go on.
    pub random: RandomState,
    /// The configuration of the run.
    pub config: TrainConfig,
    /// How far it has come.
    pub progress: RunProgress,
    /// The weights below its adapter; none where every weight is trained, or where an earlier program saved it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<FrozenBase>,
}

/// Where random numbers go on: they are a function of seed and counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomState {
    /// Seed.
    pub seed: u64,
    /// Counter of the next step.
    pub counter: u64,
}

/// How far a run has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunProgress {
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// The lowest held-out loss.
    pub best: Option<BestLoss>,
    /// Tokens seen.
    pub n_tokens: u64,
    /// Time spent in steps.
    pub seconds: f64,
}

/// The lowest held-out loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestLoss {
    /// Steps that were done.
    pub step: u64,
    /// The loss.
    pub loss: f64,
}

/// A tensor without its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name, unique in its file.
    pub name: String,
    /// Element type; not a quantised one.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of its elements; `None` where they overflow or the type cannot be saved.
    pub fn n_bytes(&self) -> Option<usize> {
        let n = self.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size))?;
        if self.dtype.is_quantized() { None } else { self.dtype.bytes_for(n) }
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype.name(), self.shape)
    }
}

/// A file of tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSpec {
    /// Its name, such as `weights.safetensors`.
    pub name: String,
    /// What it holds.
    pub tensors: Vec<TensorSpec>,
}

/// `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct StateFile {
    version: u32,
    seal: String,
    state: RunState,
    files: Vec<FileRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileRecord {
    name: String,
    n_bytes: u64,
    sha256: String,
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
