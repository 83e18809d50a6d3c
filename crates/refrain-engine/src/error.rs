use crate::perplexity::MIN_WINDOW;
use crate::{OutOfBlocks, SamplingError};
use refrain_grammar::GrammarError;
use refrain_graph::{CompileError, ControlError, GraphError, Reason, RunError};
use refrain_tensor::DType;

/// Errors of an engine.
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
    /// A step input does not match its layout.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The prompt exceeds the context.
    #[error("the prompt has {n_tokens} tokens, the context holds {context}")]
    PromptTooLong {
        /// Tokens in the prompt.
        n_tokens: usize,
        /// Positions in the context.
        context: usize,
    },
    /// No position of the context is left.
    #[error("the context of {context} tokens is full")]
    ContextFull {
        /// Positions in the context.
        context: usize,
    },
    /// The prompt was cancelled.
    #[error("the prompt was cancelled")]
    Cancelled,
    /// The text cannot follow its grammar.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// A grammar for another vocabulary.
    #[error("the grammar was compiled for {grammar} tokens, the model has {model}")]
    GrammarVocabulary {
        /// Tokens of the grammar.
        grammar: usize,
        /// Tokens of the model.
        model: usize,
    },
    /// More tokens of the text than the prompt has.
    #[error("{n_given} tokens of the prompt are given as text, it has {n_prompt}")]
    GivenTokens {
        /// Tokens given.
        n_given: usize,
        /// Tokens of the prompt.
        n_prompt: usize,
    },
    /// Biases forbid every token that the grammar allows.
    #[error(
        "all {n_banned} tokens that the grammar allows at position {position} are forbidden by the logit bias"
    )]
    NothingAllowed {
        /// Position of the choice.
        position: usize,
        /// Tokens that the grammar allows.
        n_banned: usize,
    },
    /// There is nothing to evaluate.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A step with more tokens than the maximum.
    #[error("the step has {}, the maximum is {max_tokens}", tokens(*n_tokens))]
    StepTooLarge {
        /// Tokens in the step.
        n_tokens: usize,
        /// Maximum number of tokens per step.
        max_tokens: usize,
    },
    /// More rows of logits than evaluated tokens.
    #[error("{n_rows} rows of logits were requested, the step has {}", tokens(*n_tokens))]
    TooManyRows {
        /// Rows requested.
        n_rows: usize,
        /// Tokens in the step.
        n_tokens: usize,
    },
    /// The sequence's blocks belong to another engine.
    #[error("the sequence belongs to another engine")]
    ForeignSequence,
    /// The sequence has a request that has not ended.
    #[error("the sequence is busy: its request has not ended")]
    SequenceBusy,
    /// The maximum number of requests is open.
    #[error("{n_requests} requests are running or waiting, the maximum is {max}")]
    QueueFull {
        /// Requests that have not ended.
        n_requests: usize,
        /// Maximum number of open requests.
        max: usize,
    },
    /// A context longer than the model supports.
    #[error("a context of {got} tokens was requested, the model supports 1 to {max}")]
    Context {
        /// Tokens requested.
        got: usize,
        /// Maximum context of the model.
        max: usize,
    },
    /// The backend cannot grow its cache.
    #[error("the KV cache of {backend} has {has} blocks and cannot grow to {need}")]
    CannotGrow {
        /// Name of the backend.
        backend: &'static str,
        /// Blocks in the cache.
        has: usize,
        /// Blocks required.
        need: usize,
    },
    /// The minimum number of tokens is above the maximum.
    #[error("at least {} must be written and at most {max}, which is fewer", tokens(*min))]
    TokenLimits {
        /// Minimum number of tokens.
        min: usize,
        /// Maximum number of tokens.
        max: usize,
    },
    /// A request that could not finish even if it ran alone.
    #[error(
        "the prompt has {n_prompt} tokens and {max_tokens} more were requested, the KV cache holds {context} for \
         one request"
    )]
    NeverFits {
        /// Tokens in the prompt.
        n_prompt: usize,
        /// Tokens requested after it.
        max_tokens: usize,
        /// Maximum positions per request.
        context: usize,
    },
    /// More top log-probabilities than the maximum.
    #[error("{got} top log-probabilities were requested, the maximum is {max}")]
    TopLogprobs {
        /// Top log-probabilities requested.
        got: usize,
        /// Maximum number of top log-probabilities.
        max: usize,
    },
    /// A number of guessed tokens out of range.
    #[error("{got} guessed tokens per step were requested, 1 to {max} are possible")]
    DraftTokens {
        /// Tokens requested.
        got: usize,
        /// Maximum number.
        max: usize,
    },
    /// A probability of acceptance that is none.
    #[error("an acceptance of {got} was requested, must be between 0 and 1")]
    ForcedAcceptance {
        /// The value.
        got: f32,
    },
    /// Speculation for a model whose state cannot be cut at a rejected guess.
    #[error("{arch} models cannot speculate: their recurrent state cannot go back behind a rejected guess")]
    CannotSpeculate {
        /// Architecture.
        arch: &'static str,
    },
    /// A draft model whose state cannot be cut at a rejected guess.
    #[error(
        "{arch} models cannot be draft models: their recurrent state cannot go back behind a rejected guess"
    )]
    CannotDraft {
        /// Architecture.
        arch: &'static str,
    },
    /// The request wants guesses for a text that follows a grammar, whose masks depend on every token before.
    #[error("a text that follows a grammar cannot be guessed ahead")]
    GuessedGrammar,
    /// The request wants the guesses of a draft model, and the engine has none.
    #[error("guesses of a draft model were requested, the engine has no draft model")]
    NoDraftModel,
    /// The request has the id of an adapter that does not exist.
    #[error("adapter id {id} was requested, the ids of the model's {} adapters begin at 0", known.len())]
    UnknownAdapter {
        /// The adapter's id.
        id: u32,
        /// Names of the adapters.
        known: Vec<String>,
    },
    /// No adapter has this name.
    #[error("the model has no adapter {name:?}")]
    NoAdapterNamed {
        /// The name.
        name: String,
        /// Names of the adapters.
        known: Vec<String>,
    },
    /// The request names another adapter than its sequence has.
    #[error(
        "adapter {requested} was requested for a sequence with {}",
        sequence.as_ref().map_or("none".to_owned(), |name| format!("adapter {name}"))
    )]
    AdapterOfSequence {
        /// Name of the requested adapter.
        requested: String,
        /// Name of the sequence's adapter.
        sequence: Option<String>,
    },
    /// The system could not start the engine's thread.
    #[error("the engine's thread could not be started")]
    Thread(#[source] std::io::Error),
    /// The engine has stopped.
    #[error("the engine has stopped: {0}")]
    Stopped(#[from] Stopped),
    /// The device chose a token that does not exist: its memory or its driver is faulty.
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
    /// No run of decode steps has begun.
    #[error("no run of decode steps has begun")]
    NoRun,
    /// The graph does not declare its step inputs, or a decode step's choice cannot become its next input.
    #[error("the graph does not declare the inputs of a decode step")]
    NoFeedback,
    /// No KV blocks are left.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
    /// A sampling parameter is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The model generates no text.
    #[error("{arch} models are encoders: they turn texts into vectors and generate no text")]
    Encoder {
        /// Architecture.
        arch: &'static str,
    },
    /// The model cannot turn a whole text into a vector.
    #[error("{arch} models cannot embed texts: {because}")]
    CannotEmbed {
        /// Architecture.
        arch: &'static str,
        /// Reason.
        because: &'static str,
    },
    /// Vectors are NaN or infinite.
    #[error("the vectors of {n_texts} texts are not finite")]
    NonFiniteVectors {
        /// Texts of the request.
        n_texts: usize,
    },
    /// A perplexity window that cannot be scored.
    #[error("a window of {window} tokens was requested, it {}", limits(*context))]
    Window {
        /// Tokens per window.
        window: usize,
        /// Positions in the context.
        context: usize,
    },
    /// The activations that a weight multiplies are not finite.
    #[error("the activations that {name:?} multiplies are not finite")]
    NonFiniteActivations {
        /// The weight.
        name: String,
    },
    /// Two models with different vocabularies cannot be compared token by token.
    #[error("the models have {first} and {second} tokens in their vocabularies")]
    Vocabularies {
        /// Tokens of the first.
        first: usize,
        /// Tokens of the second.
        second: usize,
    },
    /// The text is too short to score.
    #[error("the text has {}, one window needs {window}", tokens(*n_tokens))]
    TextTooShort {
        /// Tokens in the text.
        n_tokens: usize,
        /// Tokens per window.
        window: usize,
    },
}

/// Why an engine stopped. All its streams and callers receive it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Stopped {
    /// Its thread panicked.
    #[error("its thread panicked: {message}")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// The device's context is lost.
    #[error("{backend} lost its context at {label} with error {code}")]
    DeviceLost {
        /// Name of the backend.
        backend: &'static str,
        /// Label of the step.
        label: String,
        /// The driver's error code.
        code: u32,
    },
    /// Its last handle was dropped.
    #[error("it was shut down")]
    Closed,
}

/// A number of tokens with its noun.
fn tokens(n: usize) -> String {
    if n == 1 { "1 token".to_owned() } else { format!("{n} tokens") }
}

/// Limits of a window. A context below the minimum leaves no valid window.
fn limits(context: usize) -> String {
    if context <= MIN_WINDOW {
        return format!("needs at least {MIN_WINDOW} tokens");
    }
    format!("may have {MIN_WINDOW} to {context} tokens")
}

impl EngineError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::PromptTooLong { n_tokens, .. } => {
                let need = n_tokens + 1;
                Some(format!(
                    "shorten the prompt, or raise the context to {need} tokens if the model supports it"
                ))
            }
            EngineError::ContextFull { .. } => Some("raise the context, or start a new session".into()),
            EngineError::Encoder { .. } => Some("embed texts with it, or generate with another model".into()),
            EngineError::CannotEmbed { .. } => Some(
                "use an encoder such as all-MiniLM-L6-v2, or a model with attention in every layer".into(),
            ),
            EngineError::NonFiniteVectors { .. } => {
                Some("the weights may be damaged: download the model again".into())
            }
            EngineError::EmptyPrompt => Some("give a prompt of at least one token".into()),
            EngineError::NonFiniteActivations { .. } => {
                Some("the weights may be damaged: download the model again".into())
            }
            EngineError::Vocabularies { .. } => Some("compare files of the same model".into()),
            EngineError::TextTooShort { n_tokens, window } if *n_tokens < MIN_WINDOW => Some(format!(
                "give a text of at least {window} tokens, or of {MIN_WINDOW} tokens with a window of {MIN_WINDOW}"
            )),
            EngineError::TextTooShort { n_tokens, .. } => {
                Some(format!("give a longer text, or a window of at most {n_tokens} tokens"))
            }
            EngineError::BadChoice { .. } => {
                Some("the device returns invalid results: try again, or run on another device".into())
            }
            EngineError::NonFinite { kv_dtype: DType::F16, .. } => Some(
                "an F16 KV cache overflows above 65504: use BF16 or F32; if that does not help, \
                 the weights are damaged"
                    .into(),
            ),
            EngineError::NonFinite { .. } => {
                Some("the weights may be damaged: download the model again".into())
            }
            EngineError::OutOfBlocks(_) => Some("end another session, or make the KV cache larger".into()),
            EngineError::UnknownToken { .. } => Some("use the tokenizer that belongs to the model".into()),
            EngineError::StepTooLarge { max_tokens, .. } => {
                Some(format!("evaluate the tokens in chunks of at most {max_tokens}"))
            }
            EngineError::TooManyRows { n_tokens, .. } => Some(format!("request at most {n_tokens} rows")),
            EngineError::ForeignSequence => Some("use a sequence with the engine that opened it".into()),
            EngineError::SequenceBusy => Some("wait until its request ends, or cancel it".into()),
            EngineError::QueueFull { .. } => Some("try again after a request has ended".into()),
            EngineError::Context { max, .. } => Some(format!("request 1 to {max} tokens")),
            EngineError::CannotGrow { .. } => {
                Some("end another sequence, or make an engine with a larger cache".into())
            }
            EngineError::TokenLimits { max, .. } => Some(format!("request a minimum of 0 to {max} tokens")),
            EngineError::NeverFits { .. } => {
                Some("shorten the prompt, request fewer tokens, or make an engine with a larger cache".into())
            }
            EngineError::TopLogprobs { max, .. } => Some(format!("request at most {max}")),
            EngineError::DraftTokens { max, .. } => Some(format!("request 1 to {max}; 4 to {max} are usual")),
            EngineError::ForcedAcceptance { .. } => Some("give a probability, 0.7 for example".into()),
            EngineError::CannotSpeculate { .. } => Some("generate without speculation".into()),
            EngineError::CannotDraft { .. } => {
                Some("use a draft model with attention in every layer, or n-gram guesses".into())
            }
            EngineError::GuessedGrammar => Some("leave out the guesses or the grammar".into()),
            EngineError::NoDraftModel => Some("give a draft model, or use n-gram guesses".into()),
            EngineError::UnknownAdapter { known, .. } | EngineError::NoAdapterNamed { known, .. } => {
                Some(match known.is_empty() {
                    true => "leave out the adapter: the model was loaded without named adapters".into(),
                    false => format!("its adapters are {}", known.join(", ")),
                })
            }
            EngineError::AdapterOfSequence { .. } => {
                Some("open another sequence with that adapter: the KV of a sequence depends on it".into())
            }
            EngineError::Stopped(Stopped::DeviceLost { .. }) => {
                Some("restart the program, or run on another device".into())
            }
            EngineError::Stopped(_) => Some("open another session".into()),
            EngineError::Window { context, .. } if *context <= MIN_WINDOW => {
                Some(format!("use a context of at least {MIN_WINDOW} tokens"))
            }
            EngineError::Window { context, .. } => {
                Some(format!("use a window of {MIN_WINDOW} to {context} tokens"))
            }
            EngineError::Grammar(error) => error.hint(),
            EngineError::GrammarVocabulary { .. } => Some("compile the grammar for this model".into()),
            EngineError::GivenTokens { n_prompt, .. } => Some(format!("give at most {n_prompt} tokens")),
            EngineError::NothingAllowed { .. } => Some("forbid fewer tokens, or relax the grammar".into()),
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

    /// Returns why the engine has stopped, if this error says that or stops it.
    pub fn stops(&self) -> Option<Stopped> {
        match self {
            EngineError::Stopped(stopped) => Some(stopped.clone()),
            EngineError::Run(RunError::ContextLost { backend, label, code, .. }) => {
                Some(Stopped::DeviceLost { backend, label: label.clone(), code: *code })
            }
            EngineError::Compile(CompileError::ContextLost { backend, code, .. }) => {
                Some(Stopped::DeviceLost { backend, label: "preparing a plan".into(), code: *code })
            }
            _ => None,
        }
    }

    /// The ledger's reason for a step that failed with this error, down to the root cause.
    pub fn reason(&self) -> Reason {
        match self {
            EngineError::Run(error) => error.reason(),
            other => Reason::step_failed(other),
        }
    }
}
