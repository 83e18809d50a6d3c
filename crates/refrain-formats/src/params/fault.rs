//! Faults of hyperparameters.

use super::Arch;
use crate::error::quoted;

/// A fault in the hyperparameters of a model.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields appear in the messages above them.
pub enum ParamsFault {
    #[error("unknown architecture {}, known are {}", quoted(found), Arch::known())]
    UnknownArch { found: String },
    #[error("neither \"architectures\" nor \"model_type\" names a known model")]
    NoArch,
    #[error("{name} is {value}, it must be from {low} to {high}")]
    Range { name: &'static str, value: usize, low: usize, high: usize },
    #[error("{name} is {value}, it must be a finite number above {above} and at most {most}")]
    Number { name: &'static str, value: f64, above: f64, most: f64 },
    #[error(
        "{n_heads} heads cannot share {n_kv_heads} key-value heads: the first must be a multiple of the second"
    )]
    Heads { n_heads: usize, n_kv_heads: usize },
    #[error(
        "{n_heads} heads of recurrent layers cannot share {n_key_heads} key heads: the first must be a multiple of the second"
    )]
    KeyHeads { n_heads: usize, n_key_heads: usize },
    #[error("some layers are recurrent, but their sizes are missing")]
    NoRecurrent,
    #[error("hidden size {hidden} is not a multiple of {n_heads} heads, and the head size is missing")]
    HeadDim { hidden: usize, n_heads: usize },
    #[error("head sizes of keys ({key}) and values ({value}) differ; only equal sizes are supported")]
    ValueDim { key: usize, value: usize },
    #[error(
        "rotary embedding over {dims} elements of heads of {head_dim}; it must be even and at most the head size"
    )]
    RopeDims { dims: usize, head_dim: usize },
    #[error("rope scaling {} is not supported, {} are", quoted(found), super::RopeScaling::KNOWN)]
    RopeScaling { found: String },
    #[error(
        "{found} {name} factors for a rotary embedding of {dims} elements, which needs {}",
        dims / 2
    )]
    RopeFactors { name: &'static str, found: usize, dims: usize },
    #[error("tensor {name:?}: {source}")]
    RopeTensor { name: &'static str, source: refrain_tensor::TensorError },
    #[error("longrope needs a list of short factors and a list of long ones")]
    NoRopeFactors,
    #[error("the list of rotated layers has length {found}, the model has {n_layers} layers")]
    Unrotated { found: usize, n_layers: usize },
    #[error("activation {} is not supported for {arch}, {expected} is", quoted(found))]
    Activation { arch: Arch, found: String, expected: &'static str },
    #[error("{what} is not supported")]
    Unsupported { what: &'static str },
    #[error("layer_types has length {found}, the model has {n_layers} layers")]
    LayerTypes { found: usize, n_layers: usize },
    #[error("a list of layer sizes has length {found}, the model has {n_layers} layers")]
    LayerSizes { found: usize, n_layers: usize },
    #[error("{n_shared} of {n_layers} layers share the keys and values of earlier ones, so none has its own")]
    SharedKv { n_shared: usize, n_layers: usize },
    #[error(
        "layer {layer} shares keys and values, but none of the first {n_own} layers has its kind and head size"
    )]
    SharedLayer { layer: usize, n_own: usize },
    #[error("{n_choices} experts per token, but a layer has {n_experts}")]
    Choices { n_choices: usize, n_experts: usize },
    #[error("{arch} models have experts in every layer, but {found}")]
    DenseLayers { arch: Arch, found: &'static str },
    #[error(
        "layer type {} is not supported, full_attention, sliding_attention, linear_attention and conv are",
        quoted(found)
    )]
    LayerType { found: String },
    #[error("some layers use a sliding window, but its size is missing")]
    NoWindow,
    #[error("{format} cannot hold the {what} of this {arch} model")]
    NoPlace { format: &'static str, arch: Arch, what: &'static str },
    #[error("the vocabulary size is missing: there is no key, token list or embedding")]
    NoVocab,
}

impl ParamsFault {
    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        use ParamsFault as F;
        let hint = match self {
            F::UnknownArch { .. } => "use a model of a known architecture".into(),
            F::RopeScaling { .. } | F::Activation { .. } | F::Unsupported { .. } => {
                format!("use a model of one of these architectures: {}", Arch::known())
            }
            F::DenseLayers { .. } | F::ValueDim { .. } | F::LayerType { .. } => {
                "the model uses a variant of its architecture that is not supported".into()
            }
            F::NoPlace { .. } => "export the model in the other format: GGUF or a Hugging Face folder".into(),
            F::NoArch => "fetch config.json of the model again; it must name the architecture".into(),
            F::Range { .. }
            | F::Number { .. }
            | F::Heads { .. }
            | F::HeadDim { .. }
            | F::KeyHeads { .. }
            | F::NoRecurrent
            | F::RopeDims { .. }
            | F::RopeFactors { .. }
            | F::NoRopeFactors
            | F::RopeTensor { .. }
            | F::Unrotated { .. }
            | F::LayerTypes { .. }
            | F::LayerSizes { .. }
            | F::SharedKv { .. }
            | F::Choices { .. }
            | F::SharedLayer { .. }
            | F::NoWindow
            | F::NoVocab => "the file is damaged or badly converted; fetch or convert it again".into(),
        };
        Some(hint)
    }
}
