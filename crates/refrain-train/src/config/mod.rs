//! Training configuration from a TOML file, flags, or both.
//!
//! Each source is a [`ConfigOverlay`]; later sources override earlier ones key by key.
//! [`TrainConfig::validate`] then checks the result.

mod error; // errors
mod parse; // TOML, and suggestions for mistyped keys
mod validate; // ranges and conflicts
mod value; // value types

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use error::ConfigError;
pub(crate) use parse::nearest;
pub use value::{
    BadWord, Clip, EvalSource, Export, GraphChoice, LoraTable, LoraTargets, Masters, ModelShape, NewModel,
    OnLong, Order, Paths, Precision, Resume, ScheduleKind, TokenizerSource, TrainTokenizer,
};

/// A configuration key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigKey {
    /// Name in a configuration file; flags use `-` instead of `_`.
    pub name: &'static str,
    /// One-sentence description.
    pub about: &'static str,
}

/// Declares every key once; the configuration, the overlay, the defaults and [`KEYS`] are generated from it.
macro_rules! config {
    (
        $( #[doc = $doc:literal] $key:ident : $type:ty = $default:expr; )+
        optional: $( #[doc = $opt_doc:literal] $opt_key:ident : $opt_type:ty; )+
    ) => {
        /// Configuration of a training run. The fields are the keys of the configuration file.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct TrainConfig {
            $( #[doc = $doc] pub $key: $type, )+
            $( #[doc = $opt_doc] #[serde(skip_serializing_if = "Option::is_none")] pub $opt_key: Option<$opt_type>, )+
        }

        impl Default for TrainConfig {
            fn default() -> Self {
                Self { $( $key: $default, )+ $( $opt_key: None, )+ }
            }
        }

        /// The keys set by one source: a file, or the flags.
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct ConfigOverlay {
            $( #[doc = $doc] pub $key: Option<$type>, )+
            $( #[doc = $opt_doc] pub $opt_key: Option<$opt_type>, )+
        }

        impl ConfigOverlay {
            fn apply(self, config: &mut TrainConfig) {
                $( if let Some(value) = self.$key { config.$key = value; } )+
                $( if self.$opt_key.is_some() { config.$opt_key = self.$opt_key; } )+
            }
        }

        /// All keys, in the order of the reference page.
        pub const KEYS: &[ConfigKey] = &[
            $( ConfigKey { name: stringify!($opt_key), about: $opt_doc.trim_ascii() }, )+
            $( ConfigKey { name: stringify!($key), about: $doc.trim_ascii() }, )+
        ];
    };
}

config! {
    /// Training files: text, or JSONL (`.jsonl`, `.ndjson`).
    data: Paths = Paths::default();
    /// Tokens per row.
    context: usize = 256;
    /// Rows per micro-step.
    batch: usize = 8;
    /// Micro-steps whose gradients are accumulated before the optimiser runs.
    accumulate: usize = 1;
    /// Optimiser steps.
    steps: u64 = 1_000;
    /// Peak learning rate.
    lr: f64 = 3e-4;
    /// Learning rate that `cosine` and `linear` end at.
    min_lr: f64 = 0.0;
    /// Shape of the learning rate after warm-up: `cosine`, `linear` or `constant`.
    schedule: ScheduleKind = ScheduleKind::Cosine;
    /// Steps over which the learning rate rises to its peak.
    warmup: u64 = 0;
    /// AdamW's weight decay, on matrices and embeddings only.
    weight_decay: f64 = 0.1;
    /// AdamW's decay rates of the first and second moment.
    betas: [f64; 2] = [0.9, 0.95];
    /// Added to the denominator of AdamW's update.
    eps: f64 = 1e-8;
    /// Largest global gradient norm, or `none`.
    clip: Clip = Clip::Norm(1.0);
    /// Element type of weights and activations: `f32` or `bf16`.
    dtype: Precision = Precision::F32;
    /// Master weights for bf16 weights: `f32` or `none`.
    masters: Masters = Masters::F32;
    /// Order of the samples: `shuffle` or `file`.
    order: Order = Order::Shuffle;
    /// Seed of initial weights, shuffling and dropout.
    seed: u64 = 0;
    /// Fraction of activations that dropout zeroes.
    dropout: f64 = 0.0;
    /// Whether to recompute a layer's activations in the backward pass instead of keeping them.
    checkpoint_activations: bool = false;
    /// Device: `auto`, `cpu`, `cuda`, `cuda:N` or `sim`.
    device: String = "auto".to_owned();
    /// Checkpoints to keep, besides the best one.
    keep: usize = 3;
    /// What happens to a conversation longer than the context: `truncate` or `drop`.
    on_long: OnLong = OnLong::Truncate;
    /// How the trained model is written to `out`: `both`, `gguf`, `hf` or `none`.
    export: Export = Export::Both;
    /// Continue from a checkpoint: `true` for the latest one in `out`, or its folder.
    resume: Resume = Resume::Switch(false);
    optional:
    /// Model to start from: a GGUF file, a Hugging Face folder or a name.
    from: String;
    /// Model to create: the name of a shape, or a table of sizes.
    new: NewModel;
    /// Train low-rank adapters and keep the model frozen: a table of `rank`, `alpha`, `dropout`, `targets` and `rslora`.
    lora: LoraTable;
    /// Tokenizer: a `tokenizer.json`, or `{ train = { vocab_size = N } }`; without it, that of `from`, or one trained for `new`.
    tokenizer: TokenizerSource;
    /// Held-out data: a file, or the share of the training data to hold out.
    eval: EvalSource;
    /// Steps between two held-out losses.
    eval_every: u64;
    /// Steps between two checkpoints.
    save_every: u64;
    /// Steps between two samples.
    sample_every: u64;
    /// Prompt of the samples.
    sample_prompt: String;
    /// Whether steps must run as a graph: `auto`, `require` or `off`; without it, `require` on a GPU.
    graph: GraphChoice;
    /// JSONL log file; without it, `log.jsonl` in `out`.
    log: PathBuf;
    /// Folder for checkpoints, log, report and the trained model.
    out: PathBuf;
}

impl TrainConfig {
    /// Overrides its keys with those of `source`. `from` and `new` are mutually exclusive, so one of them in
    /// `source` replaces the other. The table `lora` is merged key by key.
    #[must_use]
    pub fn overlay(mut self, source: ConfigOverlay) -> Self {
        if source.from.is_some() {
            self.new = None;
        }
        if source.new.is_some() {
            self.from = None;
        }
        let mut source = source;
        source.lora = match (self.lora.take(), source.lora) {
            (Some(own), Some(over)) => Some(own.overlay(over)),
            (own, over) => over.or(own),
        };
        source.apply(&mut self);
        self
    }

    /// Tokens per optimiser step.
    pub fn tokens_per_step(&self) -> u64 {
        (self.context as u64).saturating_mul(self.batch as u64).saturating_mul(self.accumulate as u64)
    }
}

impl fmt::Display for ConfigKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
