//! Chat templates: from a conversation to the prompt text that a model was trained on.
//!
//! Templates are Jinja as `transformers` runs it. They come with the model and are untrusted input: a broken one is an
//! error with its line. A rendering is limited in steps, in live memory and in depth, so that no template can hang or
//! exhaust the machine. `minijinja` parses templates; it does not run them, because it cannot limit memory.

mod template; // from messages to a prompt
mod program; // the parsed template
mod eval; // statements, expressions and calls
mod ops; // operators
mod filters; // `value | filter`
mod predicates; // `value is test`
mod methods; // `value.method()`
mod value; // values and their memory
mod budget; // limits on steps, memory and depth
mod python; // values as Python writes them
mod clock; // dates in prompts
mod think; // the thinking part of a reply
mod error; // errors

pub use error::ChatError;
pub use template::{ChatTemplate, Message, RenderOptions, SpecialTexts};
pub use think::{Part, PartKind, ThinkFilter, ThinkTags};
