use refrain_formats::FormatError;
use refrain_graph::GraphError;
use refrain_tensor::{DType, Shape, TensorError};

/// Errors of building a model from its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The files could not be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A weight is missing.
    #[error("the model has no tensor {name:?}, which a {arch} model of {n_layers} layers needs")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// Architecture.
        arch: &'static str,
        /// Number of layers in the configuration.
        n_layers: usize,
    },
    /// A weight's shape does not match the hyperparameters.
    #[error("tensor {name:?} has shape {got}, the model's hyperparameters require {want}")]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// Its shape.
        got: Shape,
        /// The expected shape.
        want: Shape,
    },
    /// A weight with an integer type.
    #[error("tensor {name:?} has type {dtype}, which is not a valid type for weights")]
    TensorType {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// Experts of one layer with different types.
    #[error("tensor {name:?} has type {got}, the first expert of its layer has type {first}")]
    ExpertType {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        got: DType,
        /// Element type of the first expert.
        first: DType,
    },
    /// A matrix that cannot be split between rows.
    #[error(
        "tensor {name:?} cannot be split between rows: {n_cols} elements are not a multiple of the {dtype} block size"
    )]
    FusedRows {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        dtype: DType,
        /// Elements per row.
        n_cols: usize,
    },
    /// A table of rotary frequency divisors, which `config.json` cannot represent.
    #[error("config.json cannot represent the table of rotary frequencies in the GGUF file")]
    FreqFactors,
    /// An adapter tensor that is not part of LoRA.
    #[error("the adapter has a tensor {name:?}, which is neither lora_A nor lora_B of a module")]
    AdapterTensor {
        /// Name of the tensor.
        name: String,
    },
    /// One of the two factors of a module is missing.
    #[error("the adapter has no {half} for {module}")]
    AdapterHalf {
        /// Name of the module.
        module: String,
        /// `lora_A` or `lora_B`.
        half: String,
    },
    /// An adapter without tensors.
    #[error("the adapter has no tensors")]
    AdapterEmpty,
    /// A module that does not exist in the model.
    #[error(
        "the adapter belongs to {module}, which a {arch} model of {n_layers} layers does not have; its modules are {}",
        known.join(", ")
    )]
    AdapterModule {
        /// Name of the module.
        module: String,
        /// Architecture.
        arch: &'static str,
        /// Layers of the model.
        n_layers: usize,
        /// Names of the modules of a layer.
        known: Vec<String>,
    },
    /// A factor whose size does not match the model's map and the adapter's rank.
    #[error("the adapter's {module} has shape {got}, the model and the adapter's rank require {want}")]
    AdapterShape {
        /// Name of the factor.
        module: String,
        /// Its shape.
        got: Shape,
        /// The expected shape.
        want: Shape,
        /// The model that the adapter names as its base.
        base_model: Option<String>,
    },
    /// A second adapter on the same model.
    #[error("the model already has an adapter")]
    AdapterTwice,
    /// Two adapters of a bank with the same name.
    #[error("two adapters are named {name}")]
    BankName {
        /// The name.
        name: String,
    },
    /// A bank on an encoder.
    #[error("a {arch} model embeds texts: each of its adapters needs a model of its own")]
    BankOfEncoder {
        /// Architecture.
        arch: &'static str,
    },
    /// The graph of a step could not be built.
    #[error("the model's step cannot be built: {source}")]
    Graph {
        /// The cause.
        source: Box<GraphError>,
    },
    /// One of several adapters does not fit the model.
    #[error("adapter {name} cannot be used: {source}")]
    InBank {
        /// Name of the adapter.
        name: String,
        /// Why.
        source: Box<ModelError>,
    },
    /// A rank that is out of range for the model.
    #[error("rank {rank} is out of range for {module}: it must be at least 1 and at most {largest}")]
    AdapterRank {
        /// The rank.
        rank: usize,
        /// Name of the module.
        module: String,
        /// The largest useful rank.
        largest: usize,
    },
    /// A name that matches no linear map.
    #[error("no linear layer of the model is named {name:?}; its linear layers are {}", known.join(", "))]
    AdapterTarget {
        /// The name.
        name: String,
        /// Names of the linear maps.
        known: Vec<String>,
    },
    /// A weight that could not be converted.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// The cause.
        source: TensorError,
    },
}

impl ModelError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            ModelError::Format(e) => e.hint(),
            ModelError::MissingTensor { .. } => {
                Some("the file is incomplete or was converted incorrectly; download or convert it again".into())
            }
            ModelError::TensorShape { .. }
            | ModelError::TensorType { .. }
            | ModelError::ExpertType { .. }
            | ModelError::FusedRows { .. } => {
                Some("the file's metadata and tensors disagree; convert the model again".into())
            }
            ModelError::FreqFactors => {
                Some("export the model as GGUF, or start from its Hugging Face folder".into())
            }
            ModelError::AdapterTensor { .. } | ModelError::AdapterHalf { .. } | ModelError::AdapterEmpty => {
                Some(
                    "the adapter is incomplete or not a LoRA adapter; download it again, or train a LoRA adapter"
                        .into(),
                )
            }
            ModelError::AdapterModule { .. } => {
                Some("use the adapter with the model it was trained on".into())
            }
            ModelError::AdapterShape { base_model, .. } => Some(match base_model {
                Some(base) => format!("use the adapter with the model it was trained on: {base}"),
                None => "use the adapter with the model it was trained on".into(),
            }),
            ModelError::AdapterTwice => {
                Some("merge the first adapter into the model, then attach the second".into())
            }
            ModelError::BankName { .. } => Some("give each adapter its own name".into()),
            ModelError::BankOfEncoder { .. } => {
                Some("attach a single adapter, or merge it into the model".into())
            }
            ModelError::InBank { source, .. } => source.hint(),
            ModelError::AdapterRank { .. } => Some("use a smaller rank; 16 is usual".into()),
            ModelError::AdapterTarget { .. } => {
                Some("give some of those names, separated by commas, or use `all` or `attention`".into())
            }
            ModelError::Tensor { .. } | ModelError::Graph { .. } => None,
        }
    }
}
