use refrain_formats::FormatError;
use refrain_tensor::{DType, Shape, TensorError};

/// Why a model cannot be made from its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The files could not be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A weight is not there.
    #[error("the model has no tensor {name:?}, which a {arch} model of {n_layers} layers needs")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// Architecture.
        arch: &'static str,
        /// Layers the file promises.
        n_layers: usize,
    },
    /// A weight has another shape than the hyperparameters ask for.
    #[error("tensor {name:?} is {got}, the model's sizes ask for {want}")]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// Its shape.
        got: Shape,
        /// The shape that fits.
        want: Shape,
    },
    /// A weight of whole numbers.
    #[error("tensor {name:?} is of type {dtype}, which no weight can be")]
    TensorType {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// Experts of one layer in several types.
    #[error("tensor {name:?} is of type {got}, the first expert of its layer is of type {first}")]
    ExpertType {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        got: DType,
        /// That of the first.
        first: DType,
    },
    /// A matrix that cannot be cut between rows.
    #[error(
        "tensor {name:?} cannot be cut between its rows: {n_cols} elements are no whole blocks of {dtype}"
    )]
    FusedRows {
        /// Name of the tensor.
        name: String,
        /// Its element type.
        dtype: DType,
        /// Elements of a row.
        n_cols: usize,
    },
    /// A table of divisors of rotary frequencies, which `config.json` cannot hold.
    #[error("config.json cannot hold the table of rotary frequencies that came with the GGUF file")]
    FreqFactors,
    /// A tensor in an adapter that is no part of LoRA.
    #[error("the adapter has a tensor {name:?}, which is neither lora_A nor lora_B of a module")]
    AdapterTensor {
        /// Name of the tensor.
        name: String,
    },
    /// One of the two factors of a module is not there.
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
    /// A module that the model does not have.
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
        /// Names of modules that a layer has.
        known: Vec<String>,
    },
    /// A factor of another size than the model's map and the adapter's rank ask for.
    #[error("the adapter's {module} is {got}, the model and the adapter's rank ask for {want}")]
    AdapterShape {
        /// Name of the factor.
        module: String,
        /// Its shape.
        got: Shape,
        /// The shape that fits.
        want: Shape,
        /// The model that the adapter was trained on, as it says.
        base_model: Option<String>,
    },
    /// A second adapter.
    #[error("the model has an adapter already")]
    AdapterTwice,
    /// A rank that no adapter of the model can have.
    #[error("a rank of {rank} for {module}: it must be at least 1 and at most {largest}")]
    AdapterRank {
        /// The rank.
        rank: usize,
        /// Name of the module.
        module: String,
        /// The largest rank that makes a difference.
        largest: usize,
    },
    /// A name that no linear map has.
    #[error("no linear layer of the model is called {name:?}; there are {}", known.join(", "))]
    AdapterTarget {
        /// The name.
        name: String,
        /// Names of linear maps.
        known: Vec<String>,
    },
    /// A weight that could not be brought into the form that is used.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// What is wrong.
        source: TensorError,
    },
}

impl ModelError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ModelError::Format(e) => e.hint(),
            ModelError::MissingTensor { .. } => {
                Some("the file is incomplete or was converted wrongly; download or convert it again".into())
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
                    "the adapter is incomplete or of another kind; get it again, or train a LoRA adapter"
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
                Some("merge the first adapter into the model with `refrain merge`".into())
            }
            ModelError::AdapterRank { .. } => Some("16 is a usual rank".into()),
            ModelError::AdapterTarget { .. } => {
                Some("name some of those, separated by commas, or say `all` or `attention`".into())
            }
            ModelError::Tensor { .. } => None,
        }
    }
}
