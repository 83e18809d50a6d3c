//! Grammars that constrain generated text: JSON schemas, Lark grammars and regular expressions.
//!
//! A [`Vocabulary`] is built once per tokenizer. It compiles a [`GrammarSource`] into a [`Grammar`], which is checked: a
//! schema that nothing satisfies, an unsupported keyword or an expression that explodes is refused here, with its location.
//! A [`Matcher`] follows one generated text. Before each choice it says which tokens may come next ([`Matcher::mask`]), and
//! whether the text may end.
//!
//! ```
//! use refrain_grammar::{GrammarSource, Vocabulary};
//!
//! # fn main() -> Result<(), refrain_grammar::GrammarError> {
//! let words = [b"yes".as_slice(), b"no", b"maybe", b"\xff<end>"].map(<[u8]>::to_vec);
//! let vocabulary = Vocabulary::of_words(&words)?;
//! let grammar = vocabulary.compile(&GrammarSource::Regex("(yes|no)+".into()))?;
//! let mut matcher = grammar.matcher();
//! let mut mask = [0];
//! matcher.mask(&[3], &mut mask)?;
//! assert_eq!(mask, [0b0011]); // "yes" or "no"
//! matcher.accept(0)?;
//! matcher.mask(&[3], &mut mask)?;
//! assert_eq!(mask, [0b1011]); // another word, or the end
//! # Ok(())
//! # }
//! ```
//!
//! The parser is `llguidance`. This crate adds the vocabulary of Refrain's tokenizers, limits, the location of what is wrong
//! with a schema, and the rule that a text ends only where its grammar allows it.
//!
//! Invariant: no model, no device, no thread that outlives a call.
//! Invariant: nothing of a schema is ignored silently: a keyword is applied, or an annotation, or refused.
#![forbid(unsafe_code)]

mod source; // what a text must be
mod vocabulary; // bytes of every token
mod schema; // checks of JSON schemas
mod grammar; // compilation, with limits
mod matcher; // follows one text
mod error;

pub use error::GrammarError;
pub use grammar::Grammar;
pub use matcher::Matcher;
pub use source::{GrammarSource, MAX_SOURCE_BYTES};
pub use vocabulary::Vocabulary;
