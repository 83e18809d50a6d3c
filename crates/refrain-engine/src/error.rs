use crate::{OutOfBlocks, SamplingError};
use refrain_graph::{CompileError, ControlError, GraphError, RunError};

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
    /// All KV blocks are taken.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
    /// A sampling parameter makes no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The text is too short to be scored.
    #[error("the text has {n_tokens} tokens, one window needs {window}")]
    TextTooShort {
        /// Tokens of the text.
        n_tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
}

impl EngineError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::PromptTooLong { n_tokens, .. } => {
                Some(format!("shorten the prompt, or raise the context to at least {} with -c", n_tokens + 1))
            }
            EngineError::ContextFull { .. } => Some("raise the context with -c, or start a new session".into()),
            EngineError::EmptyPrompt => Some("give a prompt of at least one token".into()),
            EngineError::TextTooShort { n_tokens, .. } => {
                Some(format!("give a longer text, or a window of at most {n_tokens} tokens with -c"))
            }
            EngineError::OutOfBlocks(_) => Some("end another session, or raise the context".into()),
            EngineError::UnknownToken { .. } => Some("use the tokenizer that belongs to the model".into()),
            EngineError::Graph(_)
            | EngineError::Compile(_)
            | EngineError::Run(_)
            | EngineError::Control(_)
            | EngineError::Cancelled
            | EngineError::Sampling(_) => None,
        }
    }
}
