//! Errors of tokenizers and their vocabularies.

use crate::FormatError;

/// What can be wrong with a vocabulary, or with a text for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The metadata cannot be read.
    #[error(transparent)]
    Metadata(#[from] Box<FormatError>),
    /// A kind of tokenizer that is not supported.
    #[error("tokenizer model {found:?} is not supported (known: {})", known.join(", "))]
    UnknownModel {
        /// What the file says.
        found: String,
        /// What is supported.
        known: &'static [&'static str],
    },
    /// A pre-tokenizer that is not supported.
    #[error("pre-tokenizer {found:?} is not supported (known: {})", known.join(", "))]
    UnknownPre {
        /// What the file says.
        found: String,
        /// What is supported.
        known: Vec<&'static str>,
    },
    /// The file has no vocabulary.
    #[error("no tokenizer: {what} is missing")]
    Missing {
        /// The key or field that should be there.
        what: &'static str,
    },
    /// Arrays that belong together differ in length.
    #[error("vocabulary has {n_tokens} tokens but {n_found} {what}")]
    LengthMismatch {
        /// What the other array holds.
        what: &'static str,
        /// Its length.
        n_found: usize,
        /// Tokens in the vocabulary.
        n_tokens: usize,
    },
    /// A tokenizer that the other form of file cannot hold.
    #[error("this tokenizer cannot be written as {form}: {because}")]
    NoForm {
        /// Where it should go: a GGUF vocabulary, or `tokenizer.json`.
        form: &'static str,
        /// Why not.
        because: String,
    },
    /// More tokens than any model has.
    #[error("vocabulary needs {n_tokens} ids, the limit is {limit}")]
    TooManyTokens {
        /// Ids needed.
        n_tokens: usize,
        /// The bound on them.
        limit: usize,
    },
    /// A token too long to be one.
    #[error("token {id} is {len} bytes long, the limit is {limit}")]
    TokenTooLong {
        /// Which token.
        id: usize,
        /// Its length in bytes.
        len: usize,
        /// The bound on it.
        limit: usize,
    },
    /// Two tokens with one text.
    #[error("token {text:?} has two ids, {first} and {second}")]
    DuplicateToken {
        /// The text.
        text: String,
        /// The lower id.
        first: usize,
        /// The higher id.
        second: usize,
    },
    /// Two tokens with one id.
    #[error("id {id} belongs to two tokens, {first:?} and {second:?}")]
    DuplicateId {
        /// The id.
        id: u32,
        /// One text.
        first: String,
        /// The other.
        second: String,
    },
    /// A token type that is not in the format.
    #[error("token {id} has unknown type {found} (known: 1 to 6)")]
    UnknownTokenType {
        /// Which token.
        id: usize,
        /// Its type.
        found: i32,
    },
    /// A score that is not a number.
    #[error("token {id} has the score {found}")]
    BadScore {
        /// Which token.
        id: usize,
        /// Its score.
        found: f32,
    },
    /// A special token outside the vocabulary.
    #[error("{what} token has id {id}, the vocabulary has {n_tokens}")]
    SpecialOutside {
        /// Its role.
        what: &'static str,
        /// Its id.
        id: u32,
        /// Tokens in the vocabulary.
        n_tokens: usize,
    },
    /// A merge that is not two tokens.
    #[error("merge {index} is not two tokens with a blank between them: {found:?}")]
    BadMerge {
        /// Which merge, counted from 0.
        index: usize,
        /// Its text, shortened.
        found: String,
    },
    /// A merge of tokens, or into a token, that is not there.
    #[error("merge {index} names {token:?}, which is not in the vocabulary")]
    MergeUnknownToken {
        /// Which merge, counted from 0.
        index: usize,
        /// The token that is missing, shortened.
        token: String,
    },
    /// A tokenizer file that does not parse.
    #[error("{file} cannot be read: {reason}")]
    BadFile {
        /// Which file.
        file: &'static str,
        /// Where and why.
        reason: String,
    },
    /// A part of `tokenizer.json` that is not supported.
    #[error("tokenizer.json has a {part} that is not supported: {found}")]
    Unsupported {
        /// Model, decoder, and so on.
        part: &'static str,
        /// What it is.
        found: String,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {n_tokens}")]
    UnknownId {
        /// The id.
        id: u32,
        /// Tokens in the vocabulary.
        n_tokens: usize,
    },
    /// The tokenizers library refused.
    #[error("cannot {doing}: {reason}")]
    Library {
        /// What was tried.
        doing: &'static str,
        /// Its answer.
        reason: String,
    },
}

impl TokenizerError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Metadata(error) => error.hint(),
            Self::UnknownModel { .. } | Self::UnknownPre { .. } | Self::Unsupported { .. } => {
                Some("use a model of one of the known kinds".to_owned())
            }
            Self::Missing { .. } => Some("use a model file that comes with its tokenizer".to_owned()),
            Self::NoForm { .. } => Some("export the model in the form that it was opened from".to_owned()),
            Self::UnknownId { .. } | Self::Library { .. } => None,
            _ => Some("the file is damaged or was converted wrongly: fetch or convert it again".to_owned()),
        }
    }

    pub(super) fn library(doing: &'static str) -> impl Fn(tokenizers::Error) -> Self {
        move |error| Self::Library { doing, reason: error.to_string() }
    }
}

/// The start of a text, short enough for a message.
pub(super) fn excerpt(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}
