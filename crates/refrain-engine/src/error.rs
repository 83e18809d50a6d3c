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
    /// The sequence's blocks are another engine's.
    #[error("the sequence belongs to another engine")]
    ForeignSequence,
    /// A request of the sequence has not ended.
    #[error("the sequence is busy: a request of it has not ended")]
    SequenceBusy,
    /// As many requests as may be open have not ended.
    #[error("{n_requests} requests are running or waiting, {most} may")]
    QueueFull {
        /// Requests that have not ended.
        n_requests: usize,
        /// How many there may be.
        most: usize,
    },
    /// A sequence of a length that the model does not have.
    #[error("a sequence of {got} tokens was asked for, the model takes 1 to {most}")]
    Context {
        /// Tokens asked for.
        got: usize,
        /// Tokens the model was trained for.
        most: usize,
    },
    /// The backend's cache has the size it was made with.
    #[error("the KV cache of {backend} has {has} blocks and cannot grow to {need}")]
    CannotGrow {
        /// Name of the backend.
        backend: &'static str,
        /// Blocks it has.
        has: usize,
        /// Blocks it would need.
        need: usize,
    },
    /// More tokens at least than at most.
    #[error("at least {min} tokens were asked for, and at most {max}")]
    TokenLimits {
        /// The fewest tokens.
        min: usize,
        /// The most tokens.
        max: usize,
    },
    /// A request that could not end even if it were alone.
    #[error(
        "the prompt has {n_prompt} tokens and {max_tokens} were asked for behind it, the KV cache holds {context} for \
         one request"
    )]
    NeverFits {
        /// Tokens of the prompt.
        n_prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Positions that one request can have.
        context: usize,
    },
    /// More of the most probable tokens than a step lists.
    #[error("the {got} most probable tokens were asked for, at most {most} are given")]
    TopLogprobs {
        /// Tokens asked for.
        got: usize,
        /// Tokens that can be given.
        most: usize,
    },
    /// The engine has no adapters.
    #[error("adapter {id} was asked for, the engine has none")]
    UnknownAdapter {
        /// Its number.
        id: u32,
    },
    /// The system refused the engine a thread.
    #[error("the engine's thread could not be started")]
    Thread(#[source] std::io::Error),
    /// The engine serves nobody any more.
    #[error("the engine has stopped: {0}")]
    Stopped(#[from] Stopped),
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

/// Why an engine serves nobody any more. All its streams and callers hear it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Stopped {
    /// Its thread panicked.
    #[error("its thread panicked: {message}")]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// The device's context is lost.
    #[error("{backend} lost its context at {label} with error {code}")]
    DeviceLost {
        /// Name of the backend.
        backend: &'static str,
        /// Label of the step.
        label: String,
        /// The driver's code.
        code: u32,
    },
    /// Nobody holds it any more.
    #[error("it was shut down")]
    Closed,
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
            EngineError::ForeignSequence => Some("use a sequence with the engine that opened it".into()),
            EngineError::SequenceBusy => Some("wait for the end of its request, or cancel it".into()),
            EngineError::QueueFull { .. } => Some("try again when a request has ended".into()),
            EngineError::Context { most, .. } => Some(format!("ask for 1 to {most} tokens")),
            EngineError::CannotGrow { .. } => {
                Some("end another sequence, or make an engine with a larger cache".into())
            }
            EngineError::TokenLimits { max, .. } => Some(format!("ask for at least 0 to {max} tokens")),
            EngineError::NeverFits { .. } => {
                Some("shorten the prompt, ask for fewer tokens, or make an engine with a larger cache".into())
            }
            EngineError::TopLogprobs { most, .. } => Some(format!("ask for at most {most} of them")),
            EngineError::UnknownAdapter { .. } => Some("ask for no adapter".into()),
            EngineError::Stopped(Stopped::DeviceLost { .. }) => {
                Some("start the program again, or run on another device".into())
            }
            EngineError::Stopped(_) => Some("open another session".into()),
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
            | EngineError::Thread(_)
            | EngineError::Sampling(_) => None,
        }
    }

    /// Why the engine cannot go on after this error, if it cannot.
    pub(crate) fn stops(&self) -> Option<Stopped> {
        match self {
            EngineError::Run(RunError::ContextLost { backend, label, code, .. }) => {
                Some(Stopped::DeviceLost { backend, label: label.clone(), code: *code })
            }
            EngineError::Compile(CompileError::ContextLost { backend, code, .. }) => {
                Some(Stopped::DeviceLost { backend, label: "preparing a plan".into(), code: *code })
            }
            _ => None,
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
