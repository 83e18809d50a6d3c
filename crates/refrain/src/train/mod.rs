//! Training: single steps in your own loop ([`StepLearner`]), or a whole run ([`Training`]).
//!
//! A run is described by a [`TrainConfig`]. [`Training::prepare`] reads model, tokenizer and data and estimates the memory.
//! [`Training::run`] opens the device and trains. Checkpoints, log, report and the trained model go to the run's folder.
//!
//! ```no_run
//! use refrain::train::{ConfigOverlay, TrainConfig, TrainEvent, TrainOptions, Training};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = TrainConfig::default().overlay(ConfigOverlay::from_toml(
//!     "new = 'llama-10m'\n data = 'stories.txt'\n out = 'run'",
//! )?);
//! let training = Training::prepare(config, TrainOptions::default(), &mut |_| {})?;
//! let finished = training.run(&|| false, &mut |event| {
//!     if let TrainEvent::Step { record, .. } = event {
//!         println!("step {}: loss {:.3}", record.step, record.loss);
//!     }
//! })?;
//! println!("{:?}", finished.exports);
//! # Ok(())
//! # }
//! ```

mod open; // opening a backend
mod setup; // model, tokenizer and data
mod run; // a run on a device
mod sample; // sampled text during a run
pub(crate) mod export; // the trained model as files
mod steps; // the step API on any device
mod peak; // peak FLOPS of a device
mod measure; // benchmarks of a step

pub use export::{ExportForm, Exported};
pub use measure::{LoraBench, TrainBench, TrainBenchReport, bench_steps};
pub use peak::peak_flops;
pub use run::Finished;
pub use setup::{Preparing, TrainOptions, Training, usual_graph};
pub use steps::{StepLearner, train_flops};

pub use refrain_models::{LoraSpec, Model as TrainedModel, Targets, TrainSpec};
pub use refrain_train::checkpoint::{BestLoss, Checkpoint, CheckpointError, FrozenBase, RunProgress};
pub use refrain_train::config::{
    Clip, ConfigError, EvalSource, Export, GraphChoice, KEYS, LoraTable, LoraTargets, Masters, ModelShape,
    NewModel, OnLong, Order, Paths, Precision, Resume, ScheduleKind, TokenizerSource, TrainTokenizer,
};
pub use refrain_train::data::{
    Corpus, CorpusOptions, DataError, DataReport, Encoder, Loader, LoaderOptions, Passes,
};
pub use refrain_train::learner::{AdamSettings, BatchRows, LearnError, Learner, StepOutcome};
pub use refrain_train::log::{EvalRecord, LogLine, StepRecord, read as read_log};
pub use refrain_train::memory::{Advice, MemoryEstimate, MemoryPart, MemorySize};
pub use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};
pub use refrain_train::trainer::{TrainData, TrainEvent, TrainSummary, Trainer};
pub use refrain_train::{ConfigOverlay, TrainConfig, TrainError};
