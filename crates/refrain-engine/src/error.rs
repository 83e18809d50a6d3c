use crate::perplexity::MIN_WINDOW;
use crate::{OutOfBlocks, SamplingError};
use refrain_graph::{CompileError, ControlError, GraphError, Reason, RunError};
use refrain_tensor::DType;

/// Why an engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model's graph could not be built.
    #[error("the model's graph could not be built")]
    Graph(#[from] GraphError),
    /// The backend refused the graph.
    #[error("the step could not be compiled")]
    Compile(#[from] CompileError),
    /// A step failed.
    #[error("the step failed")]
    Run(#[from] RunError),
    /// A step input does not fit its place.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The prompt does not fit.
    #[error("the prompt has {n_tokens} tokens, the context holds {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        n_tokens: usize,
        /// Positions of the context.
        context: usize,
    },
    /// No position is left.
    #[error("the context of {context} tokens is full")]
    ContextFull {
        /// Positions of the context.
        context: usize,
    },
    /// It was broken off.
    #[error("the prompt was broken off")]
    Cancelled,
    /// There is nothing to evaluate.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token the model does not know.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// More tokens than one step takes.
    #[error("the step has {n_tokens} tokens, it may have {max_tokens}")]
    StepTooLarge {
        /// Tokens of the step.
        n_tokens: usize,
        /// The most tokens of a step.
        max_tokens: usize,
    },
    /// Logits of more tokens than are evaluated.
    #[error("{n_rows} rows of logits were asked for, the step has {n_tokens} tokens")]
    TooManyRows {
        /// Rows asked for.
        n_rows: usize,
        /// Tokens of the step.
        n_tokens: usize,
    },
    /// The session's blocks are another engine's.
    #[error("the session belongs to another engine")]
    ForeignSession,
    /// The device chose a token that does not exist: its memory or its driver is broken.
    #[error("the device chose token {token} after position {position}, the vocabulary has {vocab}")]
    BadChoice {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
        /// Position of the token before it.
        position: usize,
    },
    /// The logits after a token are NaN or infinite.
    #[error("the logits after position {position} are not finite")]
    NonFinite {
        /// Position of the token.
        position: usize,
        /// Element type of the KV cache.
        kv_dtype: DType,
    },
    /// A step of a run was asked for, and none was begun.
    #[error("no run of decode steps has begun")]
    NoRun,
    /// The graph does not say what its inputs mean, or a decode step's choice cannot become its next input.
    #[error("the step's inputs are not declared as those of a decode step")]
    NoFeedback,
    /// All KV blocks are taken.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
    /// A sampling parameter makes no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A window that cannot be scored.
    #[error("a window of {window} tokens was asked for, it {}", limits(*context))]
    Window {
        /// Tokens of a window.
        window: usize,
        /// Positions of the context.
        context: usize,
    },
    /// The text is too short to be scored.
    #[error("the text has {n_tokens} tokens, one window needs {window}")]
    TextTooShort {
        /// Tokens of the text.
        n_tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
}

/// What a window may have. The context may have been made for a window that is too small.
fn limits(context: usize) -> String {
    if context <= MIN_WINDOW {
        return format!("needs at least {MIN_WINDOW}");
    }
    format!("may have {MIN_WINDOW} to {context}")
}

impl EngineError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::PromptTooLong { n_tokens, .. } => {
                let need = n_tokens + 1;
                Some(format!(
                    "shorten the prompt, or raise the context to {need} with -c where the model takes it"
                ))
            }
            EngineError::ContextFull { .. } => {
                Some("raise the context with -c, or start a new session".into())
            }
            EngineError::EmptyPrompt => Some("give a prompt of at least one token".into()),
            EngineError::TextTooShort { n_tokens, window } if *n_tokens < MIN_WINDOW => Some(format!(
                "give a text of at least {window} tokens, or of {MIN_WINDOW} with a window of {MIN_WINDOW} (-c)"
            )),
            EngineError::TextTooShort { n_tokens, .. } => {
                Some(format!("give a longer text, or a window of at most {n_tokens} tokens with -c"))
            }
            EngineError::BadChoice { .. } => {
                Some("the device computes nonsense: try again, or run on another device".into())
            }
            EngineError::NonFinite { kv_dtype: DType::F16, .. } => Some(
                "a KV cache of F16 overflows above 65504: use one of BF16 or F32; if that does not help, \
                 the weights are damaged"
                    .into(),
            ),
            EngineError::NonFinite { .. } => Some("the weights may be damaged: get the model again".into()),
            EngineError::OutOfBlocks(_) => Some("end another session, or raise the context".into()),
            EngineError::UnknownToken { .. } => Some("use the tokenizer that belongs to the model".into()),
            EngineError::StepTooLarge { max_tokens, .. } => {
                Some(format!("evaluate the tokens in pieces of at most {max_tokens}"))
            }
            EngineError::TooManyRows { n_tokens, .. } => Some(format!("ask for at most {n_tokens} rows")),
            EngineError::ForeignSession => Some("use a session with the engine that opened it".into()),
            EngineError::Window { context, .. } if *context <= MIN_WINDOW => {
                Some(format!("pass -c with at least {MIN_WINDOW} tokens"))
            }
            EngineError::Window { context, .. } => {
                Some(format!("pass -c with {MIN_WINDOW} to {context} tokens"))
            }
            EngineError::Compile(error) => error.hint(),
            EngineError::Run(error) => error.hint(),
            EngineError::Graph(_)
            | EngineError::Control(_)
            | EngineError::Cancelled
            | EngineError::NoRun
            | EngineError::NoFeedback
            | EngineError::Sampling(_) => None,
        }
    }

    /// What the ledger says about a step that ended in this error: all of it, down to the first cause.
    pub fn reason(&self) -> Reason {
        match self {
            EngineError::Run(error) => error.reason(),
            other => Reason::step_failed(other),
        }
    }
}
