//! Errors of chat templates.

/// An error between a conversation and its prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template source does not parse.
    #[error("chat template does not parse, line {line}: {reason}")]
    Syntax {
        /// Line in the template, counted from 1.
        line: usize,
        /// The parser's complaint.
        reason: String,
    },
    /// The template fails on this conversation.
    #[error("chat template fails at line {line}: {reason}")]
    Render {
        /// Line in the template, counted from 1.
        line: usize,
        /// The failed operation.
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
    /// The template takes too many steps.
    #[error("chat template stopped after {steps} steps (line {line})")]
    Runaway {
        /// The limit on steps.
        steps: u64,
        /// Line it had reached, counted from 1.
        line: usize,
    },
    /// The template holds too much memory at once.
    #[error("chat template needs more than {} MiB of memory (line {line})", .limit_bytes / 1_048_576)]
    OutOfMemory {
        /// The limit on live bytes.
        limit_bytes: usize,
        /// Line it had reached, counted from 1.
        line: usize,
    },
    /// Macro calls, expressions or values are nested too deeply.
    #[error("chat template is nested more than {limit} levels deep (line {line})")]
    TooDeep {
        /// The limit on levels.
        limit: usize,
        /// Line it had reached, counted from 1.
        line: usize,
    },
    /// The source is too long to be a chat template.
    #[error("chat template is {len} bytes long, the limit is {limit}")]
    TooLong {
        /// Bytes of the source.
        len: usize,
        /// The limit on them.
        limit: usize,
    },
    /// No address space for the stack of the template engine.
    #[error("cannot reserve {need_bytes} bytes of stack for the chat template")]
    NoStack {
        /// Address space needed.
        need_bytes: usize,
    },
}

impl ChatError {
    /// An action that may help.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Refused { .. } => {
                Some("change the conversation (many templates want user and assistant to alternate)")
            }
            _ => Some("complete a raw prompt, without the chat template"),
        }
    }

    pub(super) fn syntax(error: &minijinja::Error) -> Self {
        let reason = match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        };
        Self::Syntax { line: error.line().unwrap_or(1), reason }
    }
}

/// The end of a rendering before its last statement.
#[derive(Debug)]
pub(super) struct Stop {
    kind: StopKind,
    line: Option<usize>,
}

#[derive(Debug)]
pub(super) enum StopKind {
    Failed { reason: String },
    Refused { reason: String },
    Steps { limit: u64 },
    Memory { limit_bytes: usize },
    Depth { limit: usize },
}

impl Stop {
    /// A failure of the template.
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        StopKind::Failed { reason: shortened(reason.into(), 300) }.into()
    }

    /// The line, unless a deeper one is known already.
    pub(super) fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line as usize);
        self
    }
}

/// Cuts off a message, which may quote values of the template.
fn shortened(mut text: String, max_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max_chars) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

impl From<StopKind> for Stop {
    fn from(kind: StopKind) -> Self {
        Self { kind, line: None }
    }
}

impl From<Stop> for ChatError {
    fn from(Stop { kind, line }: Stop) -> Self {
        let line = line.unwrap_or(1);
        match kind {
            StopKind::Failed { reason } => Self::Render { line, reason },
            StopKind::Refused { reason } => Self::Refused { line, reason: shortened(reason, 2000) },
            StopKind::Steps { limit } => Self::Runaway { steps: limit, line },
            StopKind::Memory { limit_bytes } => Self::OutOfMemory { limit_bytes, line },
            StopKind::Depth { limit } => Self::TooDeep { limit, line },
        }
    }
}
