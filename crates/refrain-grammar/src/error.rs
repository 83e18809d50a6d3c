//! Errors of grammars.

/// A grammar that cannot be used, or a text that does not follow it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// No text.
    #[error("the {kind} is empty")]
    Empty {
        /// Kind of the grammar.
        kind: &'static str,
    },
    /// The text is too large.
    #[error("the {kind} has {n_bytes} bytes, at most {max_bytes} are allowed")]
    TooLarge {
        /// Kind of the grammar.
        kind: &'static str,
        /// Its size.
        n_bytes: usize,
        /// The maximum.
        max_bytes: usize,
    },
    /// Not JSON.
    #[error("the JSON schema is not valid JSON: {reason}")]
    NotJson {
        /// Message of the JSON parser, with line and column.
        reason: String,
    },
    /// More schemas in one schema than allowed.
    #[error("the JSON schema contains more than {max} schemas")]
    TooManySchemas {
        /// The maximum.
        max: usize,
    },
    /// Brackets nested too deeply.
    #[error("the {kind} has brackets nested more than {max} deep")]
    TooDeep {
        /// Kind of the grammar.
        kind: &'static str,
        /// The maximum.
        max: usize,
    },
    /// A schema that cannot be used.
    #[error("the JSON schema cannot be used at {location}: {reason}")]
    Schema {
        /// JSON pointer with a leading `#`.
        location: String,
        /// What is wrong there.
        reason: String,
    },
    /// A schema that no finite JSON value satisfies.
    #[error("no JSON value satisfies the schema at {location}: {reason}")]
    Unsatisfiable {
        /// JSON pointer with a leading `#`.
        location: String,
        /// Why.
        reason: String,
    },
    /// A Lark grammar or regular expression that cannot be used.
    #[error("the {kind} cannot be used: {reason}")]
    Invalid {
        /// Kind of the grammar.
        kind: &'static str,
        /// Message of the parser.
        reason: String,
    },
    /// The grammar accepts no text.
    #[error("no text matches the {kind}")]
    MatchesNothing {
        /// Kind of the grammar.
        kind: &'static str,
    },
    /// A grammar that exceeds a limit of the parser.
    #[error("the {kind} is too complex: {reason}")]
    TooComplex {
        /// Kind of the grammar.
        kind: &'static str,
        /// The limit.
        reason: String,
    },
    /// The parser gave up on a text.
    #[error("the grammar became too complex after {n_tokens} tokens: {reason}")]
    Matching {
        /// Tokens of the text so far.
        n_tokens: usize,
        /// The limit.
        reason: String,
    },
    /// A token that the grammar does not allow.
    #[error("token {token} is not allowed by the grammar after {n_tokens} tokens")]
    NotAllowed {
        /// The token.
        token: u32,
        /// Tokens of the text so far.
        n_tokens: usize,
    },
    /// A vocabulary that cannot be used.
    #[error("the vocabulary cannot be used with grammars: {reason}")]
    Vocabulary {
        /// What is wrong.
        reason: String,
    },
}

impl GrammarError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            GrammarError::Empty { kind } => return Some(format!("give a {kind} that is not empty")),
            GrammarError::TooLarge { max_bytes, .. } => {
                return Some(format!(
                    "shorten it to {max_bytes} bytes, for example by removing descriptions"
                ));
            }
            GrammarError::NotJson { .. } => "check it with a JSON parser such as jq",
            GrammarError::TooManySchemas { .. } => "split the schema, or request a part of it",
            GrammarError::TooDeep { .. } => "name parts with rules or $defs and refer to them",
            GrammarError::Schema { .. } => "remove or rewrite this part of the schema",
            GrammarError::Unsatisfiable { .. } => {
                "relax one of the conditions at this place, or make the property optional"
            }
            GrammarError::Invalid { .. } => "docs/guide/constrained-output.md describes what is supported",
            GrammarError::MatchesNothing { .. } => "make sure that at least one text matches it",
            GrammarError::TooComplex { .. } => {
                "use smaller numbers of repetitions, or fewer alternatives that begin alike"
            }
            GrammarError::Matching { .. } => {
                "make the grammar less ambiguous, or use smaller numbers of repetitions"
            }
            GrammarError::NotAllowed { .. } | GrammarError::Vocabulary { .. } => return None,
        };
        Some(hint.to_owned())
    }
}
