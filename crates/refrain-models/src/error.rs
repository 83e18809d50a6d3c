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
    /// A table of divisors of rotary frequencies, which `config.json` cannot hold.
    #[error("config.json cannot hold the table of rotary frequencies that came with the GGUF file")]
    FreqFactors,
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
            ModelError::TensorShape { .. } | ModelError::TensorType { .. } => {
                Some("the file's metadata and tensors disagree; convert the model again".into())
            }
            ModelError::FreqFactors => {
                Some("export the model as GGUF, or start from its Hugging Face folder".into())
            }
            ModelError::Tensor { .. } => None,
        }
    }
}
