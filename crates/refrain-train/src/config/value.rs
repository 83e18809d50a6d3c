//! Value types of the configuration.

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use refrain_models::{LoraSpec, Targets};

use super::parse::nearest;

/// Declares an enum of words: its variants, the words in files and flags, and parsing with suggestions.
macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident { $( #[doc = $variant_doc:literal] $variant:ident = $word:literal, )+ }) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            $( #[doc = $variant_doc] #[serde(rename = $word)] $variant, )+
        }

        impl $name {
            /// The words accepted in files and flags.
            pub const WORDS: &[&str] = &[$($word),+];
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $( Self::$variant => $word, )+ })
            }
        }

        impl FromStr for $name {
            type Err = BadWord;
            fn from_str(text: &str) -> Result<Self, BadWord> {
                match text {
                    $( $word => Ok(Self::$variant), )+
                    _ => Err(BadWord { found: text.to_owned(), words: Self::WORDS }),
                }
            }
        }
    };
}

/// A word that is not one of the choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadWord {
    found: String,
    words: &'static [&'static str],
}

impl fmt::Display for BadWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not one of {}", self.found, self.words.join(", "))?;
        match nearest(&self.found, self.words.iter().copied()) {
            Some(word) => write!(f, "; did you mean `{word}`?"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for BadWord {}

choice! {
    /// Shape of the learning rate after warm-up.
    ScheduleKind {
        /// A half cosine down to `min_lr`.
        Cosine = "cosine",
        /// Linear down to `min_lr`.
        Linear = "linear",
        /// Constant at the peak.
        Constant = "constant",
    }
}

choice! {
    /// Element type of weights and activations.
    Precision {
        /// 32-bit floats.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
    }
}

choice! {
    /// Master weights for bf16 weights.
    Masters {
        /// The optimiser updates f32 masters; bf16 weights are rounded from them.
        F32 = "f32",
        /// The optimiser updates the bf16 weights directly.
        None = "none",
    }
}

choice! {
    /// Order of the samples.
    Order {
        /// Documents packed into rows, in a new order each epoch.
        Shuffle = "shuffle",
        /// Sample i is tokens i·T to i·T + T of the files.
        File = "file",
    }
}

choice! {
    /// What happens to a conversation longer than the context.
    OnLong {
        /// Its end is truncated.
        Truncate = "truncate",
        /// It is dropped.
        Drop = "drop",
    }
}

choice! {
    /// Formats in which the trained model is written to `out`.
    Export {
        /// As `model.gguf`, and as a Hugging Face folder `model`.
        Both = "both",
        /// As `model.gguf`.
        Gguf = "gguf",
        /// As a Hugging Face folder `model`.
        Hf = "hf",
        /// Not exported: checkpoints only.
        None = "none",
    }
}

choice! {
    /// Whether steps must run as a graph.
    GraphChoice {
        /// Replay if the device can, and count the steps that were not replayed.
        Auto = "auto",
        /// Fail if a step cannot be replayed.
        Require = "require",
        /// Never replay.
        Off = "off",
    }
}

/// One or more paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Paths(pub Vec<PathBuf>);

impl Deref for Paths {
    type Target = [PathBuf];
    fn deref(&self) -> &[PathBuf] {
        &self.0
    }
}

impl<P: Into<PathBuf>> FromIterator<P> for Paths {
    fn from_iter<I: IntoIterator<Item = P>>(paths: I) -> Self {
        Self(paths.into_iter().map(Into::into).collect())
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a path or a list of paths")]
        enum OneOrMany {
            One(PathBuf),
            Many(Vec<PathBuf>),
        }
        Ok(match OneOrMany::deserialize(deserializer)? {
            OneOrMany::One(path) => Self(vec![path]),
            OneOrMany::Many(paths) => Self(paths),
        })
    }
}

/// Clipping of the global gradient norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Clip {
    /// Gradients are scaled down to this norm.
    Norm(f64),
    /// Gradients are not clipped.
    None,
}

impl Serialize for Clip {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Norm(norm) => serializer.serialize_f64(*norm),
            Self::None => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for Clip {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number above 0, or \"none\"")]
        enum RawClip {
            Norm(f64),
            Word(Word),
        }
        #[derive(Deserialize)]
        enum Word {
            #[serde(rename = "none")]
            None,
        }
        Ok(match RawClip::deserialize(deserializer)? {
            RawClip::Norm(norm) => Self::Norm(norm),
            RawClip::Word(Word::None) => Self::None,
        })
    }
}

impl FromStr for Clip {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            _ => text.parse().map(Self::Norm).map_err(|_| format!("`{text}` is neither a number nor `none`")),
        }
    }
}

/// Held-out data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a file, or a share of the training data such as 0.05")]
pub enum EvalSource {
    /// The fraction of the training data to hold out, from its end.
    Share(f64),
    /// A separate file.
    File(PathBuf),
}

impl FromStr for EvalSource {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Self::File(text.into()), Self::Share))
    }
}

/// Where a run resumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected true, false, or the folder of a checkpoint")]
pub enum Resume {
    /// From the latest checkpoint of `out`, or from the start.
    Switch(bool),
    /// From this checkpoint.
    From(PathBuf),
}

impl FromStr for Resume {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Self::From(text.into()), Self::Switch))
    }
}

/// Source of the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected the path of a tokenizer.json, or { train = { vocab_size = N } }")]
pub enum TokenizerSource {
    /// A `tokenizer.json`, its folder, or a model.
    Path(PathBuf),
    /// Trained on the training texts.
    Train {
        /// Parameters of the training.
        train: TrainTokenizer,
    },
}

/// Parameters of a tokenizer to train.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainTokenizer {
    /// Vocabulary size, including special tokens and the 256 bytes.
    pub vocab_size: usize,
}

impl FromStr for TokenizerSource {
    type Err = String;
    /// Parses `train:N` or a path.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(size) = text.strip_prefix("train:") else { return Ok(Self::Path(text.into())) };
        let vocab_size = size
            .parse()
            .map_err(|_| format!("`{size}` is not a number of tokens; use for example train:8192"))?;
        Ok(Self::Train { train: TrainTokenizer { vocab_size } })
    }
}

/// A model to create.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected the name of a shape, or a table with arch, n_layers, hidden, ffn and n_heads"
)]
pub enum NewModel {
    /// A shape by name.
    Named(String),
    /// A table of sizes.
    Shape(ModelShape),
}

impl FromStr for NewModel {
    type Err = std::convert::Infallible;
    /// A flag takes a name; a table of sizes requires a file.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self::Named(text.to_owned()))
    }
}

/// Sizes of a model to create.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Architecture, by its GGUF name.
    pub arch: String,
    /// Number of layers.
    pub n_layers: usize,
    /// Size of the residual stream.
    pub hidden: usize,
    /// Size of the feed-forward part.
    pub ffn: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of KV heads; defaults to the number of query heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_kv_heads: Option<usize>,
    /// Head size; defaults to `hidden / n_heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Vocabulary size; defaults to the tokenizer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_vocab: Option<usize>,
    /// Whether the output head is tied to the embedding; defaults to true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tied_embeddings: Option<bool>,
    /// Base of the rotary embedding; defaults to 10,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Epsilon of the norms; defaults to 1e-5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
}

impl ModelShape {
    /// The keys of the table.
    pub const KEYS: &[&str] = &[
        "arch",
        "n_layers",
        "hidden",
        "ffn",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "n_vocab",
        "tied_embeddings",
        "rope_theta",
        "norm_eps",
    ];
}

/// The `lora` table: trains low-rank adapters and keeps the model frozen. All keys are optional.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraTable {
    /// Rank of the adapters; defaults to 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Numerator of the scale `alpha / rank`; defaults to 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Fraction of the adapters' inputs that dropout zeroes; defaults to 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Linear layers that get an adapter: `all`, `attention`, or names; defaults to all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<LoraTargets>,
    /// Whether the scale is `alpha / sqrt(rank)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rslora: Option<bool>,
}

/// Linear layers, as one word or a list of names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LoraTargets {
    /// `all`, `attention`, or comma-separated names.
    Word(String),
    /// Names.
    List(Vec<String>),
}

impl LoraTable {
    /// The keys of the table.
    pub const KEYS: &[&str] = &["rank", "alpha", "dropout", "targets", "rslora"];

    /// Overrides its keys with those of another table.
    #[must_use]
    pub fn overlay(self, over: LoraTable) -> LoraTable {
        LoraTable {
            rank: over.rank.or(self.rank),
            alpha: over.alpha.or(self.alpha),
            dropout: over.dropout.or(self.dropout),
            targets: over.targets.or(self.targets),
            rslora: over.rslora.or(self.rslora),
        }
    }

    /// The adapter specification of the table.
    pub fn spec(&self) -> LoraSpec {
        let targets = match &self.targets {
            None => Targets::All,
            Some(LoraTargets::Word(word)) => Targets::of_word(word),
            Some(LoraTargets::List(names)) => Targets::Modules(names.clone()),
        };
        LoraSpec {
            rank: self.rank.unwrap_or(16),
            alpha: self.alpha.unwrap_or(32.0),
            rslora: self.rslora.unwrap_or(false),
            dropout: self.dropout.unwrap_or(0.0),
            targets,
        }
    }
}
