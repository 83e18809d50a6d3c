//! Checkpoints: folders that are either complete or absent.
//!
//! ```text
//! out/latest                     the name of the newest checkpoint
//! out/best                       the name of the one with the lowest held-out loss
//! out/step-00001000/state.json   step, data position, random state, configuration and file checksums
//! out/step-00001000/*.safetensors
//! ```
//!
//! `state.json` stores the size and the SHA-256 of every file, and a checksum of itself, so any changed byte is
//! detected.

mod base; // the frozen base of an adapter
mod error; // errors
mod load; // reading and verifying
mod save; // writing
mod store; // the checkpoints of a run

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

/// Version of the format.
pub const VERSION: u32 = 1;
const STATE: &str = "state.json";
/// Placeholder for the seal while it is computed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// State of a run, besides its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Completed steps.
    pub step: u64,
    /// Position of the next batch in the data.
    pub position: DataPosition,
    /// State of the random number generator.
    pub random: RandomState,
    /// Configuration of the run.
    pub config: TrainConfig,
    /// Progress of the run.
    pub progress: RunProgress,
    /// Base weights of its adapter; `None` if every weight is trained, or if an older version saved it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<FrozenBase>,
}

/// State of the counter-based random number generator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomState {
    /// Seed.
    pub seed: u64,
    /// Counter of the next step.
    pub counter: u64,
}

/// Progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunProgress {
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// The lowest held-out loss.
    pub best: Option<BestLoss>,
    /// Tokens seen.
    pub n_tokens: u64,
    /// Time spent in steps, in seconds.
    pub seconds: f64,
}

/// The lowest held-out loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestLoss {
    /// Completed steps.
    pub step: u64,
    /// The loss.
    pub loss: f64,
}

/// Name, type and shape of a tensor.
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
    /// Size of its elements in bytes; `None` on overflow or for a type that cannot be saved.
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
    /// Its tensors.
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
