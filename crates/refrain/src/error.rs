use refrain_cpu::pool::PoolError;
use refrain_cuda::CudaError;
use refrain_engine::{EngineError, SamplingError};
use refrain_formats::FormatError;
use refrain_formats::chat::ChatError;
use refrain_formats::tokenizer::TokenizerError;
use refrain_models::ModelError;
use refrain_tensor::DType;
use refrain_train::TrainError;
use refrain_train::learner::LearnError;
use refrain_train::memory::Size;
use std::path::PathBuf;

/// Why something could not be done, with a hint where there is a way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The files could not be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The files do not make a model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer is missing, broken or of an unknown kind.
    #[error("the tokenizer cannot be used: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The folder has no tokenizer.
    #[error("{folder} has no tokenizer.json")]
    NoTokenizer {
        /// The folder.
        folder: String,
    },
    /// The chat template is broken or refused the messages.
    #[error("the chat template failed: {0}")]
    Chat(#[from] ChatError),
    /// A chat was asked for, the model has no template for one.
    #[error("{model} has no chat template: it completes text")]
    NoChatTemplate {
        /// Name of the model.
        model: String,
    },
    /// Threads could not be started.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The CUDA device cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A step failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A model does not fit on its device, and a table that need not be there is part of it.
    #[error("{source}; {} of the weights are the table of per-layer embeddings", Size(*table_bytes))]
    TableOnDevice {
        /// What did not fit.
        source: EngineError,
        /// Bytes of the table.
        table_bytes: u64,
    },
    /// A sampling parameter makes no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The context asked for makes no sense.
    #[error("a context of {got} tokens was asked for, {model} takes 1 to {most}")]
    Context {
        /// Tokens asked for.
        got: usize,
        /// Tokens the model was trained for.
        most: usize,
        /// Name of the model.
        model: String,
    },
    /// The KV cache was asked for in a type that no kernel reads.
    #[error("a KV cache cannot have elements of {got}")]
    KvDtype {
        /// The type asked for.
        got: DType,
    },
    /// Training.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A run does not fit into the device's memory.
    #[error("training needs about {}, {device} has {} free", Size(*needed_bytes), Size(*free_bytes))]
    TrainMemory {
        /// Name of the device.
        device: String,
        /// Bytes that the run needs, as estimated.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
        /// What would make it smaller.
        advice: Vec<String>,
    },
    /// The folder of a run has checkpoints of an earlier one.
    #[error("{} has checkpoints of an earlier run", .folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
    },
    /// A trained tokenizer that a resumed run needs is gone.
    #[error("{} has no tokenizer.json, which the run was started with", .folder.display())]
    TokenizerGone {
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// A factor on an adapter that is no number.
    #[error("an adapter cannot be scaled by {got}")]
    AdapterScale {
        /// The factor.
        got: f64,
    },
    /// A merged model was asked for in a type that is no float.
    #[error("a merged model cannot have weights of {got}")]
    MergeType {
        /// The type asked for.
        got: DType,
    },
    /// A merged model would replace something.
    #[error("{} exists already", .path.display())]
    MergeExists {
        /// File or folder.
        path: PathBuf,
    },
    /// The tokenizer's vocabulary is larger than the model's.
    #[error("the tokenizer has {tokenizer} tokens, the model only {model}")]
    Vocabulary {
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
}

impl Error {
    /// A failure to bring a model to a device that has a table there which could be elsewhere.
    pub(crate) fn with_table(source: EngineError, table_bytes: u64) -> Error {
        match cuda_cause(&source) {
            Some(CudaError::DoesNotFit(_)) => Error::TableOnDevice { source, table_bytes },
            _ => Error::Engine(source),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Format(e) => e.hint(),
            Error::Model(e) => e.hint(),
            Error::Tokenizer(e) => e.hint(),
            Error::NoTokenizer { .. } => {
                Some("download tokenizer.json from the model's repository into the folder".into())
            }
            Error::Chat(e) => e.hint().map(Into::into),
            Error::NoChatTemplate { .. } => {
                Some("use `refrain run` to complete a text, or an instruction-tuned model to chat".into())
            }
            Error::Pool(e) => e.hint().map(Into::into),
            Error::Cuda(e) => e.hint(),
            Error::Engine(e) => cuda_cause(e).and_then(CudaError::hint).or_else(|| e.hint()),
            Error::TableOnDevice { .. } => Some(
                "keep the table in pinned memory with --ple pinned, or where the file is mapped with --ple host"
                    .into(),
            ),
            Error::Sampling(e) => Some(e.hint()),
            Error::Context { most, .. } => Some(format!("ask for 1 to {most} tokens (-c)")),
            Error::KvDtype { .. } => Some("F16, BF16 and F32 are known (--kv)".into()),
            Error::Train(e) => learn_cause(e)
                .and_then(|cause| cuda_cause(cause))
                .and_then(CudaError::hint)
                .or_else(|| e.hint()),
            Error::TrainMemory { advice, .. } if advice.is_empty() => Some("take a smaller model".into()),
            Error::TrainMemory { advice, .. } => Some(advice.join("; ")),
            Error::Occupied { .. } => Some("go on with it (--resume), or name another folder (--out)".into()),
            Error::TokenizerGone { .. } => Some("put it back, or name it as the run's tokenizer".into()),
            Error::AdapterScale { .. } => {
                Some("give a finite number; 1 is as the adapter was trained".into())
            }
            Error::MergeType { .. } => Some("F32, F16 and BF16 are known (--type)".into()),
            Error::MergeExists { .. } => Some("remove it, or name another place (-o)".into()),
            Error::Vocabulary { .. } => Some("use the tokenizer that belongs to the model".into()),
        }
    }
}

/// The error of a step, if one is behind a run's.
fn learn_cause(error: &TrainError) -> Option<&(dyn std::error::Error + 'static)> {
    match error {
        TrainError::Learn(LearnError::Run(error)) => Some(error),
        TrainError::Learn(LearnError::Compile(error)) => Some(error),
        _ => None,
    }
}

/// What a CUDA device said, if it is behind an error: it knows better what to do.
fn cuda_cause<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e CudaError> {
    type Shared = std::sync::Arc<dyn std::error::Error + Send + Sync>;
    let mut next = error.source();
    while let Some(cause) = next {
        let shared = cause.downcast_ref::<Shared>().and_then(|shared| shared.downcast_ref::<CudaError>());
        if let Some(cuda) = cause.downcast_ref::<CudaError>().or(shared) {
            return Some(cuda);
        }
        next = cause.source();
    }
    None
}
