//! Errors of quantising.

use crate::recipe::Recipe;
use refrain_formats::FormatError;
use refrain_tensor::{DType, TensorError};
use std::path::PathBuf;

/// An error of quantising a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A file could not be read or written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Weights could not be produced.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// No such type.
    #[error("{name:?} is not a type")]
    UnknownType {
        /// The name.
        name: String,
    },
    /// Not of the form `PATTERN=TYPE`.
    #[error("{text:?} is not of the form PATTERN=TYPE")]
    OverrideForm {
        /// The text.
        text: String,
    },
    /// A pattern that is not a regular expression.
    #[error("{pattern:?} is not a regular expression")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The error in it.
        #[source]
        source: Box<regex::Error>,
    },
    /// A pattern that matches no tensor.
    #[error("no tensor's name matches {pattern:?}")]
    PatternUnused {
        /// The pattern.
        pattern: String,
    },
    /// A file that was quantised before.
    #[error("{n} tensors are already quantised, the first is {first:?} ({dtype})")]
    Requantize {
        /// How many.
        n: usize,
        /// Name of the first.
        first: String,
        /// Its type.
        dtype: DType,
    },
    /// A tensor that cannot be encoded.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        source: TensorError,
    },
    /// The destination is one of the model's own files.
    #[error("{} is a file of the model itself", path.display())]
    Overwrite {
        /// The destination.
        path: PathBuf,
    },
    /// The importance matrix is not one, or is not of this model.
    #[error("{}: {fault}", path.display())]
    Imatrix {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: ImatrixFault,
    },
}

/// What is wrong with an importance matrix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImatrixFault {
    /// Another kind of file.
    #[error("not an importance matrix: it is a GGUF file of type {found:?}")]
    Kind {
        /// Its `general.type`.
        found: String,
    },
    /// Neither a GGUF file nor the older binary form.
    #[error("not an importance matrix: {what} at byte {at}")]
    Binary {
        /// What was found.
        what: &'static str,
        /// Where.
        at: u64,
    },
    /// One of a tensor's two parts is missing.
    #[error("{tensor:?} has no {part}")]
    Part {
        /// The tensor.
        tensor: String,
        /// `in_sum2` or `counts`.
        part: &'static str,
    },
    /// Values that no activations give.
    #[error("{tensor:?} has a value that is negative or not finite")]
    Value {
        /// The tensor.
        tensor: String,
    },
    /// A tensor of the model has other sizes.
    #[error("it has {got} values for {tensor:?}, the model needs {need}")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its values.
        got: usize,
        /// Columns of the tensor, times its experts.
        need: usize,
    },
    /// None of its tensors is in the model.
    #[error("none of its {n} tensors is in the model")]
    OtherModel {
        /// Its tensors.
        n: usize,
    },
}

impl QuantError {
    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        match self {
            QuantError::Format(error) => error.hint(),
            QuantError::UnknownType { name } => Some(types_hint(name)),
            QuantError::OverrideForm { .. } => Some("for example --tensor-type attn_v=q8_0".into()),
            QuantError::Pattern { .. } => Some("dots match any character: blk\\.0\\. is a dot".into()),
            QuantError::PatternUnused { .. } => Some("refrain inspect --tensors lists the names".into()),
            QuantError::Requantize { .. } => Some(
                "start from the F32, F16 or BF16 model, or pass --requantize and accept the added error"
                    .into(),
            ),
            QuantError::Tensor { name, source: TensorError::NotFinite { .. } } => Some(format!(
                "the model is damaged or its training diverged; --allow-nonfinite keeps {name} as it is"
            )),
            QuantError::Tensor { name, source: TensorError::OutOfRange { .. } } => {
                Some(format!("--tensor-type '^{}$=bf16' keeps it wide", name.replace('.', "\\.")))
            }
            QuantError::Overwrite { .. } => Some("choose another name with -o".into()),
            QuantError::Imatrix { .. } => Some("make one for this model with refrain imatrix".into()),
            QuantError::Source(_) | QuantError::Tensor { .. } => None,
        }
    }
}

/// Names the nearest type, then all.
fn types_hint(name: &str) -> String {
    const NEAR: f64 = 0.6;
    let score =
        |recipe: &&Recipe| strsim::normalized_damerau_levenshtein(&name.to_uppercase(), recipe.name());
    let nearest = Recipe::all()
        .iter()
        .filter(|recipe| score(recipe) >= NEAR)
        .max_by(|a, b| score(a).total_cmp(&score(b)))
        .map_or_else(String::new, |recipe| format!("did you mean {}? ", recipe.name()));
    let all: Vec<&str> = Recipe::all().iter().map(|recipe| recipe.name()).collect();
    format!("{nearest}types are {}", all.join(", "))
}
