//! Errors of training data.

use std::io;
use std::path::PathBuf;

use refrain_formats::chat::ChatError;
use refrain_formats::tokenizer::TokenizerError;

/// Errors of training data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The path is a folder, pipe or device.
    #[error("{path} is not a file")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A file without content.
    #[error("{path} is empty: {bytes} bytes, all of them whitespace")]
    Empty {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A byte that is not valid in text.
    #[error("{path} is not text: byte {byte:#04x} at offset {offset}")]
    Binary {
        /// The file.
        path: PathBuf,
        /// The byte.
        byte: u8,
        /// Its offset, counted from 0.
        offset: u64,
    },
    /// A JSON array where JSONL is expected.
    #[error("{path} is one JSON array, not one object per line")]
    JsonArray {
        /// The file.
        path: PathBuf,
    },
    /// A line that is not a valid sample.
    #[error("{path}, line {line}: {reason}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The cause.
        reason: String,
    },
    /// A line that is too long for a sample.
    #[error("{path}, line {line}: the line is longer than {limit} bytes")]
    LongLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The maximum length.
        limit: u64,
    },
    /// An object of an unknown kind.
    #[error("{path}, line {line}: unknown kind of sample with {}", keys(.found))]
    UnknownSample {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The keys of the object.
        found: Vec<String>,
    },
    /// A conversation without an assistant message.
    #[error("{path}, line {line}: the conversation has no assistant message, {n_messages} in total")]
    NoAssistant {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// Number of messages.
        n_messages: usize,
    },
    /// Conversations, but no chat template.
    #[error("{path}, line {line}: `messages` requires a chat template, the tokenizer has none")]
    NoTemplate {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
    },
    /// The chat template is invalid.
    #[error("the chat template cannot be used")]
    Template(#[source] ChatError),
    /// The tokenizer failed on a text.
    #[error("{path}: cannot tokenize the text")]
    Tokenize {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TokenizerError,
    },
    /// The vocabulary is too large.
    #[error("the vocabulary has {n_tokens} tokens, the limit is {limit}")]
    Vocabulary {
        /// Tokens in the vocabulary.
        n_tokens: usize,
        /// The maximum.
        limit: usize,
    },
    /// No sample is left after dropping.
    #[error("no sample is left: {dropped}")]
    NothingLeft {
        /// What was dropped and why.
        dropped: String,
    },
    /// Less data than one row.
    #[error("the data has {n_tokens} tokens, a row of context {context} needs {}", context + 1)]
    TooShort {
        /// Tokens in the data.
        n_tokens: u64,
        /// Tokens per row.
        context: usize,
    },
    /// A held-out share that leaves one side empty.
    #[error("holding out {share} of {n_tokens} tokens leaves one side without a sample")]
    HeldOut {
        /// The share.
        share: f64,
        /// Tokens in the data.
        n_tokens: u64,
    },
    /// The position belongs to other data.
    #[error(
        "the checkpoint was made with other data: its fingerprint is {found}, these files have {expected}"
    )]
    OtherData {
        /// Fingerprint in the checkpoint.
        found: String,
        /// Fingerprint of the data.
        expected: String,
    },
    /// The position is outside the data.
    #[error("the data position {position} is outside the data, which ends at {limit}")]
    Position {
        /// The position.
        position: u64,
        /// The exclusive upper bound.
        limit: u64,
    },
    /// The data thread failed.
    #[error("the data thread {what}")]
    Thread {
        /// What happened.
        what: String,
    },
}

fn keys(found: &[String]) -> String {
    match found {
        [] => "no keys".to_owned(),
        found => format!("`{}`", found.join("`, `")),
    }
}

impl DataError {
    /// An action for the user.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Read { .. } | Self::NotAFile { .. } => "check the path and the read permissions",
            Self::Empty { .. } => "give a file that contains text",
            Self::Binary { .. } => "use UTF-8 text: unpack archives, and convert other encodings",
            Self::JsonArray { .. } => "write one object per line, for example with `jq -c '.[]'`",
            Self::BadLine { .. } | Self::LongLine { .. } => "fix or remove the line",
            Self::UnknownSample { .. } => {
                "give each sample `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"
            }
            Self::NoAssistant { .. } => "add a message with the role `assistant`, or remove the line",
            Self::NoTemplate { .. } => {
                "use a model that has a chat template, or write `prompt` and `completion`"
            }
            Self::Template(_) => "use another chat template, or write `prompt` and `completion` without one",
            Self::Tokenize { source, .. } => return source.hint(),
            Self::Vocabulary { .. } => return None,
            Self::NothingLeft { .. } => "raise context, or set on_long = \"truncate\"",
            Self::TooShort { .. } => "lower context, or give more data",
            Self::HeldOut { .. } => "hold out another share, or give a held-out file",
            Self::OtherData { .. } | Self::Position { .. } => {
                "resume with the files, tokenizer, context, order and seed of the checkpoint"
            }
            Self::Thread { .. } => return None,
        };
        Some(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_locations_and_numbers_and_hints_are_actions() {
        let path = || PathBuf::from("a.jsonl");
        let shown = [
            (
                DataError::Empty { path: path(), bytes: 3 },
                "a.jsonl is empty: 3 bytes, all of them whitespace",
            ),
            (
                DataError::Binary { path: path(), byte: 7, offset: 9 },
                "a.jsonl is not text: byte 0x07 at offset 9",
            ),
            (
                DataError::UnknownSample { path: path(), line: 2, found: vec!["a".into(), "b".into()] },
                "a.jsonl, line 2: unknown kind of sample with `a`, `b`",
            ),
            (
                DataError::NoAssistant { path: path(), line: 2, n_messages: 3 },
                "a.jsonl, line 2: the conversation has no assistant message, 3 in total",
            ),
            (
                DataError::TooShort { n_tokens: 5, context: 8 },
                "the data has 5 tokens, a row of context 8 needs 9",
            ),
            (
                DataError::OtherData { found: "x".into(), expected: "y".into() },
                "the checkpoint was made with other data: its fingerprint is x, these files have y",
            ),
        ];
        for (error, message) in shown {
            assert_eq!(error.to_string(), message);
            let hint = error.hint().expect("a hint");
            assert!(!hint.ends_with('.') && !hint.starts_with(char::is_uppercase), "{hint}");
        }
    }
}
