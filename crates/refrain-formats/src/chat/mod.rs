//! Chat templates: from a conversation to the prompt text a model was trained on.
//!
//! Templates are Jinja as `transformers` runs it. They come with the model, so they are input like any other: a broken
//! one is an error with its line, one that never ends is cut off.

mod clock; // dates in prompts
mod error; // what can go wrong
mod python; // values as Python writes them
mod template; // rendering
mod think; // thinking parts of a reply

pub use error::ChatError;
pub use template::{ChatTemplate, Message, RenderOptions, SpecialTexts};
pub use think::{Part, PartKind, ThinkFilter, ThinkTags};
