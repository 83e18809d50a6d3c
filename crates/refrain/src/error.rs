//! Errors of the library.

use crate::model::Model;
use refrain_cpu::pool::PoolError;
use refrain_cuda::CudaError;
use refrain_engine::{EngineError, SamplingError};
use refrain_formats::FormatError;
use refrain_formats::chat::ChatError;
use refrain_formats::tokenizer::TokenizerError;
use refrain_grammar::GrammarError;
use refrain_models::ModelError;
use refrain_quant::QuantError;
use refrain_tensor::DType;
use refrain_train::TrainError;
use refrain_train::learner::LearnError;
use refrain_train::memory::MemorySize;
use std::path::PathBuf;

/// Any error of the library, with a hint where there is a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The files could not be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The files do not make up a model.
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
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The model has no chat template.
    #[error("{model} has no chat template: it only continues text")]
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
    /// A model does not fit on its device, and its per-layer embeddings could be kept elsewhere.
    #[error("{source}; {} of the weights are the table of per-layer embeddings", MemorySize(*table_bytes))]
    TableOnDevice {
        /// The allocation that failed.
        source: EngineError,
        /// Bytes of the table.
        table_bytes: u64,
    },
    /// A grammar cannot be used.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// One of several adapters cannot be read.
    #[error("adapter {name} in {folder} cannot be read: {source}")]
    Adapter {
        /// Its name.
        name: String,
        /// Its folder.
        folder: String,
        /// Why.
        source: Box<Error>,
    },
    /// A device was to repeat the steps of a reply, and the model runs on the CPU.
    #[error("the steps of a reply can be repeated by a CUDA device only, and the model runs on the CPU")]
    LoopOnCpu,
    /// A model does not fit on its device, and its experts could be kept in host memory.
    #[error("{source}; {} of the weights are experts, of which a token reads few", MemorySize(*expert_bytes))]
    ExpertsOnDevice {
        /// The allocation that failed.
        source: EngineError,
        /// Bytes of the experts.
        expert_bytes: u64,
    },
    /// Experts that are to be kept in host memory do not fit there.
    #[error(
        "the experts need {} of pinned host memory, {} are free",
        MemorySize(*expert_bytes),
        MemorySize(*free_bytes)
    )]
    ExpertsOnHost {
        /// Bytes of the experts.
        expert_bytes: u64,
        /// Free bytes of the host.
        free_bytes: u64,
    },
    /// A sampling parameter is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The requested context is outside the model's range.
    #[error("the context is {got} tokens, {model} takes 1 to {most}")]
    Context {
        /// Requested tokens.
        got: usize,
        /// Tokens that the model was trained for.
        most: usize,
        /// Name of the model.
        model: String,
    },
    /// The model generates no text.
    #[error("{model} is an encoder: it turns texts into vectors and generates no text")]
    Encoder {
        /// Name of the model.
        model: String,
    },
    /// Nothing says how a decoder's tokens become the vector of a text.
    #[error("{model} generates text, and its files do not say how it embeds texts")]
    NoPooling {
        /// Name of the model.
        model: String,
    },
    /// A text to embed has no tokens.
    #[error("text {number} of {n_texts} is empty, and {model} adds no tokens of its own")]
    EmptyText {
        /// Its number, from 1.
        number: usize,
        /// Number of texts.
        n_texts: usize,
        /// Name of the model.
        model: String,
    },
    /// A text to embed is longer than the limit.
    #[error("text {number} of {n_texts} has {n_tokens} tokens, {model} takes at most {max_tokens}")]
    TextTooLong {
        /// Its number, from 1.
        number: usize,
        /// Number of texts.
        n_texts: usize,
        /// Its tokens.
        n_tokens: usize,
        /// The limit.
        max_tokens: usize,
        /// Name of the model.
        model: String,
    },
    /// The prompt does not fit the context.
    #[error("the prompt has {n_tokens} tokens, the context holds {context}")]
    PromptTooLong {
        /// Tokens in the prompt.
        n_tokens: usize,
        /// Positions of the context.
        context: usize,
        /// Tokens that the model was trained for.
        most: usize,
    },
    /// The prompt is so long that it was refused before it was tokenized.
    #[error("the prompt has {n_bytes} bytes, a context of {context} tokens holds at most {max_bytes}")]
    PromptBytes {
        /// Bytes of the prompt.
        n_bytes: usize,
        /// Bytes of the longest prompt that might fit.
        max_bytes: usize,
        /// Positions of the context.
        context: usize,
    },
    /// A measurement needs a longer context than the model takes, or than it was given.
    #[error("the measurement needs a context of {needed} tokens, {limit} are available")]
    BenchContext {
        /// Tokens needed.
        needed: usize,
        /// Tokens of the given context or, without one, of the model.
        limit: usize,
        /// The model's limit.
        most: usize,
    },
    /// No kernel reads a KV cache of this type.
    #[error("a KV cache cannot have elements of {got}")]
    KvDtype {
        /// The requested type.
        got: DType,
    },
    /// Training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A model could not be pulled.
    #[cfg(feature = "pull")]
    #[error(transparent)]
    Hub(#[from] refrain_hub::HubError),
    /// A training run does not fit the device's memory.
    #[error("training needs about {}, {device} has {} free", MemorySize(*needed_bytes), MemorySize(*free_bytes))]
    TrainMemory {
        /// Name of the device.
        device: String,
        /// Estimated bytes that the run needs.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
        /// Settings that would make it smaller.
        advice: Vec<String>,
    },
    /// The folder already has checkpoints of another run.
    #[error("{} already has checkpoints of another run", .folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
    },
    /// The trained tokenizer of a resumed run is missing.
    #[error("{} has no tokenizer.json, and the run was started with one", .folder.display())]
    TokenizerGone {
        /// The folder that should hold it.
        folder: PathBuf,
    },
    /// The scale of an adapter is not a finite number.
    #[error("an adapter cannot be scaled by {got}")]
    AdapterScale {
        /// The scale.
        got: f64,
    },
    /// A merged model can only have a float type.
    #[error("a merged model cannot have weights of {got}")]
    MergeType {
        /// The requested type.
        got: DType,
    },
    /// The output of a merge exists already.
    #[error("{} already exists", .path.display())]
    MergeExists {
        /// File or folder.
        path: PathBuf,
    },
    /// A model could not be quantised.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The tokens of a draft model are not those of the model.
    #[error("{draft} cannot guess for {model}: it has {} tokens, {model} has {}", .sizes[1], .sizes[0])]
    DraftVocabulary {
        /// Name of the model.
        model: String,
        /// Name of the draft model.
        draft: String,
        /// Tokens of both.
        sizes: [usize; 2],
    },
    /// A token of a draft model means something else.
    #[error("{draft} cannot guess for {model}: token {token} is {:?} in it and {:?} in {model}", .texts[1], .texts[0])]
    DraftTokenTexts {
        /// Name of the model.
        model: String,
        /// Name of the draft model.
        draft: String,
        /// The first token that differs.
        token: u32,
        /// Its texts.
        texts: [String; 2],
    },
    /// Speculation while steps are compared with their eager run.
    #[error("speculation is not possible while decode steps are compared with their eager run")]
    SpeculationCompared,
    /// Two models split a text differently.
    #[error("the models split the text differently, from token {at} on")]
    Tokenizers {
        /// The first token that differs.
        at: usize,
    },
    /// Files hold tensors that the converted model would not have.
    #[error("the conversion would lose {}", lost_list(.names))]
    Lost {
        /// Their names.
        names: Vec<String>,
    },
    /// The tokenizer's vocabulary is larger than the model's.
    #[error("the tokenizer has {tokenizer} tokens, the model has only {model}")]
    Vocabulary {
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
}

impl Error {
    /// The error of loading a model whose per-layer embeddings are on the device and could be kept elsewhere.
    pub(crate) fn with_table(source: EngineError, table_bytes: u64) -> Error {
        match cuda_cause(&source) {
            Some(CudaError::DoesNotFit(_)) => Error::TableOnDevice { source, table_bytes },
            _ => Error::Engine(source),
        }
    }

    /// The error of loading a model whose experts are on the device and could be kept in host memory.
    pub(crate) fn with_experts(source: EngineError, expert_bytes: u64) -> Error {
        match cuda_cause(&source) {
            Some(CudaError::DoesNotFit(_)) => Error::ExpertsOnDevice { source, expert_bytes },
            _ => Error::Engine(source),
        }
    }

    /// Adds the model's limit to the error of a prompt that does not fit: a larger context helps only below it.
    pub(crate) fn with_limit(source: EngineError, model: &Model) -> Error {
        match source {
            EngineError::PromptTooLong { n_tokens, context } => {
                Error::PromptTooLong { n_tokens, context, most: model.config().n_context }
            }
            other => Error::Engine(other),
        }
    }

    /// The error of the CUDA device that caused this one, if one did.
    pub fn cuda(&self) -> Option<&CudaError> {
        match self {
            Error::Cuda(error) => Some(error),
            Error::Engine(error)
            | Error::TableOnDevice { source: error, .. }
            | Error::ExpertsOnDevice { source: error, .. } => cuda_cause(error),
            Error::Train(error) => learn_cause(error).and_then(|cause| cuda_cause(cause)),
            _ => None,
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
                Some("continue a text with it, or chat with an instruction-tuned model".into())
            }
            Error::Pool(e) => e.hint().map(Into::into),
            Error::Cuda(e) => e.hint(),
            Error::Engine(e) => cuda_cause(e).and_then(CudaError::hint).or_else(|| e.hint()),
            Error::TableOnDevice { .. } => {
                Some("keep the table in pinned memory, or leave it in the mapped file on the host".into())
            }
            Error::Grammar(e) => e.hint(),
            Error::Adapter { .. } => {
                Some("check the path: an adapter is a folder with adapter_config.json and adapter_model.safetensors".into())
            }
            Error::LoopOnCpu => {
                Some("choose a CUDA device, or let the host launch the steps; `refrain doctor` shows what is missing".into())
            }
            Error::ExpertsOnDevice { .. } => {
                Some("keep the experts in pinned host memory, or use a model with smaller weights".into())
            }
            Error::ExpertsOnHost { .. } => {
                Some("free host memory, or use a model with smaller weights".into())
            }
            Error::Sampling(e) => Some(e.hint()),
            Error::Encoder { .. } => Some("embed texts with it, or generate with another model".into()),
            Error::NoPooling { .. } => Some(
                "name a pooling if it was trained to embed texts, or use an encoder such as all-MiniLM-L6-v2"
                    .into(),
            ),
            Error::EmptyText { .. } => Some("leave out empty texts".into()),
            Error::TextTooLong { .. } => Some("shorten the text, or allow texts to be cut".into()),
            Error::Context { most, .. } => Some(format!("use a context of 1 to {most} tokens")),
            Error::PromptTooLong { n_tokens, most, .. } if n_tokens < most => {
                Some(format!("shorten the prompt, or use a context of at least {} tokens", n_tokens + 1))
            }
            Error::PromptTooLong { most, .. } => {
                Some(format!("shorten the prompt: the model takes at most {most} tokens"))
            }
            Error::PromptBytes { .. } => Some("shorten the prompt, or split it into several".into()),
            Error::BenchContext { needed, most, .. } if needed <= most => {
                Some(format!("use a context of {needed} tokens, or measure fewer"))
            }
            Error::BenchContext { .. } => {
                Some("measure a shorter prompt, fewer decoded tokens or a smaller depth".into())
            }
            Error::KvDtype { .. } => Some("use F16, BF16, F32, or U8 for 8-bit rows with scales".into()),
            #[cfg(feature = "pull")]
            Error::Hub(e) => e.hint(),
            Error::Train(e) => learn_cause(e)
                .and_then(|cause| cuda_cause(cause))
                .and_then(CudaError::hint)
                .or_else(|| e.hint()),
            Error::TrainMemory { advice, .. } if advice.is_empty() => Some("use a smaller model".into()),
            Error::TrainMemory { advice, .. } => Some(advice.join("; ")),
            Error::Occupied { .. } => Some("resume that run, or use another folder".into()),
            Error::TokenizerGone { .. } => Some("restore it, or set it as the run's tokenizer".into()),
            Error::AdapterScale { .. } => {
                Some("use a finite number; 1 applies the adapter as it was trained".into())
            }
            Error::MergeType { .. } => Some("use F32, F16 or BF16".into()),
            Error::MergeExists { .. } => Some("remove it, or write to another path".into()),
            Error::Quant(e) => e.hint(),
            Error::DraftVocabulary { .. } | Error::DraftTokenTexts { .. } => Some(
                "use a smaller model of the same family as the draft, or n-gram guesses, which need no model".into(),
            ),
            Error::SpeculationCompared => Some(
                "compare without speculation; graphs of verify steps are compared when they are recorded".into(),
            ),
            Error::Tokenizers { .. } => Some("compare files of the same model".into()),
            Error::Lost { .. } => {
                Some("convert the text part of a multimodal model by allowing that loss; other tensors mean that the model needs something that is not supported".into())
            }
            Error::Vocabulary { .. } => Some("use the tokenizer that belongs to the model".into()),
        }
    }
}

/// Names the first few lost tensors.
fn lost_list(names: &[String]) -> String {
    const SHOWN: usize = 6;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    let more = names.len().saturating_sub(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let noun = if names.len() == 1 { "tensor" } else { "tensors" };
    format!("{} {noun}: {}{more}", names.len(), shown.join(", "))
}

/// The error of the step that ended a training run, if one did.
fn learn_cause(error: &TrainError) -> Option<&(dyn std::error::Error + 'static)> {
    match error {
        TrainError::Learn(LearnError::Run(error)) => Some(error),
        TrainError::Learn(LearnError::Compile(error)) => Some(error),
        _ => None,
    }
}

/// The CUDA error that caused another error, if one did: its hint is more specific.
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
