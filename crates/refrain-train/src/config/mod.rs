//! What the user asks for: a TOML file, flags, or both.
//!
//! Each source is a [`ConfigOverlay`]; the later one wins, key by key. [`TrainConfig::validate`] then checks the whole.

mod error; // what can be wrong
mod parse; // TOML, and the nearest key to a mistyped one
mod validate; // ranges and contradictions
mod value; // values that are more than a number

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
pub struct Key {
    /// Its name in a file; flags have `-` in place of `_`.
    pub name: &'static str,
    /// One sentence about it.
    pub about: &'static str,
}

/// Declares every key once: the configuration, the overlay, the defaults and [`KEYS`] follow from it.
macro_rules! config {
    (
        $( #[doc = $doc:literal] $key:ident : $type:ty = $default:expr; )+
        optional: $( #[doc = $opt_doc:literal] $opt_key:ident : $opt_type:ty; )+
    ) => {
        /// A training run. The fields are the keys of the configuration file.
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

        /// The keys that one source sets: a file, or the flags.
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

        /// Every key, in the order of the reference page.
        pub const KEYS: &[Key] = &[
            $( Key { name: stringify!($opt_key), about: $opt_doc.trim_ascii() }, )+
            $( Key { name: stringify!($key), about: $doc.trim_ascii() }, )+
        ];
    };
}

config! {
    /// Training files: text, or JSONL (`.jsonl`, `.ndjson`).
    data: Paths = Paths::default();
    /// Tokens of a row.
    context: usize = 256;
    /// Rows of a micro-step.
    batch: usize = 8;
    /// Micro-steps whose gradients are added up before the optimiser runs.
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
    /// AdamW's two decay rates of the moments.
    betas: [f64; 2] = [0.9, 0.95];
    /// AdamW's term in the denominator.
    eps: f64 = 1e-8;
    /// Largest global gradient norm, or `none`.
    clip: Clip = Clip::Norm(1.0);
    /// Element type of weights and activations: `f32` or `bf16`.
    dtype: Precision = Precision::F32;
    /// Master weights beside bf16 ones: `f32` or `none`.
    masters: Masters = Masters::F32;
    /// Order of the samples: `shuffle` or `file`.
    order: Order = Order::Shuffle;
    /// Seed of initial weights, shuffling and dropout.
    seed: u64 = 0;
    /// Share of activations that dropout zeroes.
    dropout: f64 = 0.0;
    /// Whether a layer's activations are computed again in the backward pass instead of being kept.
    checkpoint_activations: bool = false;
    /// Device: `auto`, `cpu`, `cuda`, `cuda:N` or `sim`.
    device: String = "auto".to_owned();
    /// Checkpoints to keep, besides the best one.
    keep: usize = 3;
    /// What becomes of a conversation longer than the context: `truncate` or `drop`.
    on_long: OnLong = OnLong::Truncate;
    /// How the trained model is written to `out`: `both`, `gguf`, `hf` or `none`.
    export: Export = Export::Both;
    /// Continue from a checkpoint: `true` for the latest one in `out`, or its folder.
    resume: Resume = Resume::Switch(false);
    optional:
    /// Model to start from: a GGUF file, a Hugging Face folder or a name.
    from: String;
    /// Model to make: the name of a shape, or a table of sizes.
    new: NewModel;
    /// Train low-rank adapters and leave the model as it is: a table of `rank`, `alpha`, `dropout`, `targets` and `rslora`.
    lora: LoraTable;
    /// Tokenizer: a `tokenizer.json`, or `{ train = { vocab_size = N } }`; without it, that of `from`, or one trained for `new`.
    tokenizer: TokenizerSource;
    /// Held-out data: a file, or the share of the training data to hold out.
    eval: EvalSource;
    /// Steps between two held-out losses.
    eval_every: u64;
    /// Steps between two checkpoints.
    save_every: u64;
    /// Steps between two sampled texts.
    sample_every: u64;
    /// Text that samples continue.
    sample_prompt: String;
    /// Whether steps must run as a graph: `auto`, `require` or `off`; without it, `require` on a GPU.
    graph: GraphChoice;
    /// JSONL log file; without it, `log.jsonl` in `out`.
    log: PathBuf;
    /// Folder for checkpoints, log, report and the trained model.
    out: PathBuf;
}

impl TrainConfig {
    /// The configuration with the keys of `source` in place of its own. `from` and `new` exclude each other, so one of
    /// them in `source` takes the place of the other. The table `lora` is taken over key by key.
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

    /// Tokens that one optimiser step sees.
    pub fn tokens_per_step(&self) -> u64 {
        (self.context as u64).saturating_mul(self.batch as u64).saturating_mul(self.accumulate as u64)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
