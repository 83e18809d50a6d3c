//! What a generated text must be.

use crate::error::GrammarError;
use serde::{Deserialize, Serialize};

/// Maximum size of a grammar's text.
pub const MAX_SOURCE_BYTES: usize = 1 << 20;

/// What a generated text must be.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GrammarSource {
    /// JSON that satisfies a schema, given as JSON text.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A context-free grammar in the Lark syntax of llguidance.
    Lark(String),
    /// A regular expression for the whole text, in the syntax of the `regex` crate.
    Regex(String),
    /// JSON that satisfies a schema, between fixed texts: a tool call.
    JsonBetween {
        /// Text before it. The name of a control token, such as `<tool_call>`, stands for the token.
        before: String,
        /// The schema, as JSON text.
        schema: String,
        /// Text after it.
        after: String,
    },
}

impl GrammarSource {
    /// Name of its kind, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            GrammarSource::JsonSchema(_) | GrammarSource::JsonBetween { .. } => "JSON schema",
            GrammarSource::JsonObject => "JSON object",
            GrammarSource::Lark(_) => "grammar",
            GrammarSource::Regex(_) => "regular expression",
        }
    }

    fn text(&self) -> Option<&str> {
        match self {
            GrammarSource::JsonSchema(text) | GrammarSource::Lark(text) | GrammarSource::Regex(text) => {
                Some(text)
            }
            GrammarSource::JsonBetween { schema, .. } => Some(schema),
            GrammarSource::JsonObject => None,
        }
    }

    /// Rejects an empty or too large text.
    pub(crate) fn check(&self) -> Result<(), GrammarError> {
        let kind = self.kind();
        match self.text() {
            Some(text) if text.trim().is_empty() => Err(GrammarError::Empty { kind }),
            Some(text) if text.len() > MAX_SOURCE_BYTES => {
                Err(GrammarError::TooLarge { kind, n_bytes: text.len(), max_bytes: MAX_SOURCE_BYTES })
            }
            _ => Ok(()),
        }
    }
}
