//! Errors of tokenizers and their vocabularies.

use crate::FormatError;

/// An error of a vocabulary, or of encoding a text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The metadata cannot be read.
    #[error(transparent)]
    Metadata(#[from] Box<FormatError>),
    /// A kind of tokenizer that is not supported.
    #[error("tokenizer model {found:?} is not supported (known: {})", known.join(", "))]
    UnknownModel {
        /// Name in the file.
        found: String,
        /// Supported names.
        known: &'static [&'static str],
    },
    /// A pre-tokenizer that is not supported.
    #[error("pre-tokenizer {found:?} is not supported (known: {})", known.join(", "))]
    UnknownPre {
        /// Name in the file.
        found: String,
        /// Supported names.
        known: Vec<&'static str>,
    },
    /// The file has no vocabulary.
    #[error("no tokenizer: {what} is missing")]
    Missing {
        /// The missing key or field.
        what: &'static str,
    },
    /// Arrays of different lengths.
    #[error("vocabulary has {n_tokens} tokens but {n_found} {what}")]
    LengthMismatch {
        /// Content of the other array.
        what: &'static str,
        /// Its length.
        n_found: usize,
        /// Tokens in the vocabulary.
        n_tokens: usize,
    },
    /// A tokenizer that the other file format cannot represent.
    #[error("this tokenizer cannot be written as {form}: {because}")]
    NoForm {
        /// Target format: a GGUF vocabulary or `tokenizer.json`.
        form: &'static str,
        /// The reason.
        because: String,
    },
    /// Too many tokens.
    #[error("vocabulary needs {n_tokens} ids, the limit is {limit}")]
    TooManyTokens {
        /// Ids needed.
        n_tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// An overlong token.
    #[error("token {id} is {len} bytes long, the limit is {limit}")]
    TokenTooLong {
        /// Id of the token.
        id: usize,
        /// Its length in bytes.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// Two tokens with the same text.
    #[error("token {text:?} has two ids, {first} and {second}")]
    DuplicateToken {
        /// The text.
        text: String,
        /// The lower id.
        first: usize,
        /// The higher id.
        second: usize,
    },
    /// Two tokens with the same id.
    #[error("id {id} belongs to two tokens, {first:?} and {second:?}")]
    DuplicateId {
        /// The id.
        id: u32,
        /// Text of the first token.
        first: String,
        /// Text of the second token.
        second: String,
    },
    /// An unknown token type.
    #[error("token {id} has unknown type {found} (known: 1 to 6)")]
    UnknownTokenType {
        /// Id of the token.
        id: usize,
        /// Its type.
        found: i32,
    },
    /// A score that is NaN.
    #[error("token {id} has the score {found}")]
    BadScore {
        /// Id of the token.
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
        /// Index of the merge, from 0.
        index: usize,
        /// Its text, shortened.
        found: String,
    },
    /// A merge with a token that is not in the vocabulary.
    #[error("merge {index} names {token:?}, which is not in the vocabulary")]
    MergeUnknownToken {
        /// Index of the merge, from 0.
        index: usize,
        /// The missing token, shortened.
        token: String,
    },
    /// A tokenizer file that does not parse.
    #[error("{file} cannot be read: {reason}")]
    BadFile {
        /// The file.
        file: &'static str,
        /// Position and reason.
        reason: String,
    },
    /// An unsupported part of `tokenizer.json`.
    #[error("tokenizer.json has a {part} that is not supported: {found}")]
    Unsupported {
        /// Kind of the part: model, decoder and so on.
        part: &'static str,
        /// Name or description of the part.
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
    /// The tokenizers library returned an error.
    #[error("cannot {doing}: {reason}")]
    Library {
        /// Attempted operation.
        doing: &'static str,
        /// Message of the library.
        reason: String,
    },
}

impl TokenizerError {
    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Metadata(error) => error.hint(),
            Self::UnknownModel { .. } | Self::UnknownPre { .. } | Self::Unsupported { .. } => {
                Some("use a model with a supported tokenizer".to_owned())
            }
            Self::Missing { .. } => Some("use a model file that includes its tokenizer".to_owned()),
            Self::NoForm { .. } => Some("export the model in the format it was opened from".to_owned()),
            Self::UnknownId { .. } | Self::Library { .. } => None,
            _ => {
                Some("the file is damaged or was converted incorrectly; fetch or convert it again".to_owned())
            }
        }
    }

    pub(super) fn library(doing: &'static str) -> impl Fn(tokenizers::Error) -> Self {
        move |error| Self::Library { doing, reason: error.to_string() }
    }
}

/// Shortens a text for a message.
pub(super) fn excerpt(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}
