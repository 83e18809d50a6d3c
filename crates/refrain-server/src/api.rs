//! Endpoints.

pub(crate) mod chat; // OpenAI's chat completions
pub(crate) mod completions; // OpenAI's completions of plain prompts
pub(crate) mod messages; // Anthropic's messages
pub(crate) mod responses; // OpenAI's responses
pub(crate) mod embeddings; // vectors of texts
pub(crate) mod tokens; // tokenizing
pub(crate) mod openapi; // the description of all of it
pub(crate) mod info; // models, health, metrics

mod conversation; // messages and tools, whichever API they came through
mod generation; // from a checked request to its choices
mod logprobs; // log-probabilities in both of OpenAI's forms
mod params; // parameters that several endpoints share
mod stream; // server-sent events
