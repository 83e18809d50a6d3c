//! Errors of training data.

use std::io;
use std::path::PathBuf;

use refrain_formats::chat::ChatError;
use refrain_formats::tokenizer::TokenizerError;

/// What can be wrong with training data.
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
    /// A folder, pipe or device.
    #[error("{path} is not a file")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A file without anything to learn from.
    #[error("{path} is empty: {bytes} bytes, all of them blank")]
    Empty {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A byte that no text has.
    #[error("{path} is not a text: byte {byte:#04x} at offset {offset}")]
    Binary {
        /// The file.
        path: PathBuf,
        /// The byte.
        byte: u8,
        /// Where, counted from 0.
        offset: u64,
    },
    /// A JSON document where JSONL is expected.
    #[error("{path} is one JSON array, not one object a line")]
    JsonArray {
        /// The file.
        path: PathBuf,
    },
    /// A line that is not a JSON object.
    #[error("{path}, line {line}: {reason}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// What the parser says.
        reason: String,
    },
    /// A line too long to be a sample.
    #[error("{path}, line {line}: longer than {limit} bytes")]
    LongLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The bound on it.
        limit: u64,
    },
    /// An object that is no known kind of sample.
    #[error("{path}, line {line}: no known kind of sample, it has {}", keys(.found))]
    UnknownSample {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The keys of the object.
        found: Vec<String>,
    },
    /// A conversation that nobody answers.
    #[error("{path}, line {line}: the conversation of {n_messages} messages has no assistant part")]
    NoAssistant {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// Messages in it.
        n_messages: usize,
    },
    /// Conversations, but no template to write them with.
    #[error("{path}, line {line}: `messages` need a chat template, the tokenizer has none")]
    NoTemplate {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
    },
    /// The chat template itself is broken.
    #[error("the chat template cannot be used")]
    Template(#[source] ChatError),
    /// The tokenizer refuses a text.
    #[error("{path}: the text cannot be tokenized")]
    Tokenize {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TokenizerError,
    },
    /// Too many tokens or ids for their type.
    #[error("the vocabulary has {n_tokens} tokens, the limit is {limit}")]
    Vocabulary {
        /// Tokens of the vocabulary.
        n_tokens: usize,
        /// The bound on them.
        limit: usize,
    },
    /// Nothing is left after dropping.
    #[error("no sample is left: {dropped}")]
    NothingLeft {
        /// What was dropped and why, in words.
        dropped: String,
    },
    /// Fewer tokens than a row.
    #[error("the data has {n_tokens} tokens, a row of context {context} needs {}", context + 1)]
    TooShort {
        /// Tokens in the data.
        n_tokens: u64,
        /// Tokens of a row.
        context: usize,
    },
    /// A share to hold out that leaves one side empty.
    #[error("holding out {share} of {n_tokens} tokens leaves one side without a sample")]
    HeldOut {
        /// The share.
        share: f64,
        /// Tokens in the data.
        n_tokens: u64,
    },
    /// A position of other data.
    #[error(
        "the checkpoint was made with other data: its fingerprint is {found}, these files have {expected}"
    )]
    OtherData {
        /// Of the position.
        found: String,
        /// Of the data.
        expected: String,
    },
    /// A position outside the data.
    #[error("the data position {position} lies outside the data ({limit})")]
    Position {
        /// The number.
        position: u64,
        /// What it must be below.
        limit: u64,
    },
    /// The thread that prepares batches.
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
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Read { .. } | Self::NotAFile { .. } => "check the path, and that you may read the file",
            Self::Empty { .. } => "give a file with text in it",
            Self::Binary { .. } => "training reads UTF-8 text: unpack archives, convert other encodings",
            Self::JsonArray { .. } => "write one object a line, for example with `jq -c '.[]'`",
            Self::BadLine { .. } | Self::LongLine { .. } => "mend or remove the line",
            Self::UnknownSample { .. } => {
                "a sample has `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"
            }
            Self::NoAssistant { .. } => "add a message with the role `assistant`, or remove the line",
            Self::NoTemplate { .. } => {
                "use a model that has a chat template, or write `prompt` and `completion`"
            }
            Self::Template(_) => "use another chat template, or write `prompt` and `completion` without one",
            Self::Tokenize { source, .. } => return source.hint(),
            Self::Vocabulary { .. } => return None,
            Self::NothingLeft { .. } => "raise context, or set on_long = \"truncate\"",
            Self::TooShort { .. } => "lower context, or give more text",
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
    fn messages_carry_places_and_numbers_and_hints_are_actions() {
        let path = || PathBuf::from("a.jsonl");
        let shown = [
            (DataError::Empty { path: path(), bytes: 3 }, "a.jsonl is empty: 3 bytes, all of them blank"),
            (
                DataError::Binary { path: path(), byte: 7, offset: 9 },
                "a.jsonl is not a text: byte 0x07 at offset 9",
            ),
            (
                DataError::UnknownSample { path: path(), line: 2, found: vec!["a".into(), "b".into()] },
                "a.jsonl, line 2: no known kind of sample, it has `a`, `b`",
            ),
            (
                DataError::NoAssistant { path: path(), line: 2, n_messages: 3 },
                "a.jsonl, line 2: the conversation of 3 messages has no assistant part",
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
            let hint = error.hint().expect("a way out");
            assert!(!hint.ends_with('.') && !hint.starts_with(char::is_uppercase), "{hint}");
        }
    }
}
