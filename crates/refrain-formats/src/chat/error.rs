//! Errors of chat templates.

use std::error::Error as _;
use std::fmt;

/// What can go wrong between a conversation and its prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template source does not parse.
    #[error("chat template does not parse, line {line}: {reason}")]
    Syntax {
        /// Line in the template, counted from 1.
        line: usize,
        /// What the parser objects to.
        reason: String,
    },
    /// The template fails while it renders this conversation.
    #[error("chat template fails at line {line}: {reason}")]
    Render {
        /// Line in the template, counted from 1.
        line: usize,
        /// What went wrong there.
        reason: String,
    },
    /// The template itself rejects the conversation (`raise_exception`).
    #[error("chat template refuses this conversation (line {line}): {reason}")]
    Refused {
        /// Line in the template, counted from 1.
        line: usize,
        /// The template author's words.
        reason: String,
    },
    /// The template runs longer than any sensible one.
    #[error("chat template stopped after {steps} steps (line {line})")]
    Runaway {
        /// The bound on steps.
        steps: u64,
        /// Line it had reached, counted from 1.
        line: usize,
    },
    /// The source is too long to be a chat template.
    #[error("chat template is {len} bytes long, the limit is {limit}")]
    TooLong {
        /// Bytes of the source.
        len: usize,
        /// The bound on them.
        limit: usize,
    },
    /// The system has no room for the template engine.
    #[error("cannot reserve {need_bytes} bytes of stack for the chat template")]
    NoStack {
        /// Address space needed.
        need_bytes: usize,
    },
}

impl ChatError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Refused { .. } => {
                Some("change the conversation (many templates want user and assistant to alternate)")
            }
            _ => Some("complete the raw prompt without the chat template (--raw)"),
        }
    }

    pub(super) fn syntax(error: &minijinja::Error) -> Self {
        Self::Syntax { line: error.line().unwrap_or(1), reason: reason(error) }
    }

    pub(super) fn render(error: &minijinja::Error, steps: u64) -> Self {
        // The deepest error says what happened; the ones around it only which construct it happened in.
        let mut deepest = error;
        let mut raised = None;
        let mut source = error.source();
        while let Some(current) = source {
            if let Some(inner) = current.downcast_ref::<minijinja::Error>() {
                deepest = inner;
            }
            if let Some(inner) = current.downcast_ref::<Raised>() {
                raised = Some(inner.0.clone());
            }
            source = current.source();
        }
        let line = deepest.line().or(error.line()).unwrap_or(1);
        match raised {
            Some(reason) => Self::Refused { line, reason },
            None if deepest.kind() == minijinja::ErrorKind::OutOfFuel => Self::Runaway { steps, line },
            None => Self::Render { line, reason: reason(deepest) },
        }
    }
}

fn reason(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Marks an error made by a template's own `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}
