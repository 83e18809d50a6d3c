//! Rendering a conversation with a model's own template.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::error::{ChatError, Raised};
use super::{clock, python};

/// Steps a rendering may take. A long conversation takes some ten thousand.
const MAX_STEPS: u64 = 1_000_000;
/// The longest templates in use have about 30,000 bytes.
const MAX_SOURCE_BYTES: usize = 1 << 16;
/// Stack for parsing, per byte of the source. The parser recurses along chains such as `a.b.c` without a bound of its
/// own; a byte can add one level, and a level takes less than a kilobyte.
const STACK_BYTES_PER_BYTE: usize = 2048;
/// Stack for rendering: values nested in a loop are dropped level by level.
const RENDER_STACK_BYTES: usize = 1 << 28;
const NAME: &str = "chat_template";

/// Texts of the special tokens a template may name; absent ones stay undefined in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTexts {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// `unk_token`.
    pub unk: Option<String>,
    /// `pad_token`.
    pub pad: Option<String>,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
    /// Further fields some templates read: `tool_calls`, `reasoning_content`, `name`.
    #[serde(flatten)]
    pub extra: Map<String, serde_json::Value>,
}

impl Message {
    /// A turn that is only text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

/// How to render.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenderOptions {
    /// End with the opening of the assistant's turn, so that the model answers.
    pub add_generation_prompt: bool,
    /// Ask for thinking (`enable_thinking`, `thinking`), or ask for none; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// The time templates see through `strftime_now`, read as UTC; the present when `None`.
    pub now: Option<SystemTime>,
    /// Further variables, such as `tools` or `date_string`; they win over the ones set here.
    pub extra: Map<String, serde_json::Value>,
}

/// A model's chat template, parsed once.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: SpecialTexts,
}

impl ChatTemplate {
    /// Parses a template.
    pub fn new(source: &str, specials: SpecialTexts) -> Result<Self, ChatError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(ChatError::TooLong { len: source.len(), limit: MAX_SOURCE_BYTES });
        }
        let environment = on_large_stack((1 << 20) + source.len() * STACK_BYTES_PER_BYTE, || {
            let mut environment = environment()?;
            environment.add_template_owned(NAME, without_generation_tags(source))?;
            Ok(environment)
        })?
        .map_err(|e| ChatError::syntax(&e))?;
        Ok(Self { environment, specials })
    }

    /// The prompt for a conversation.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        on_large_stack(RENDER_STACK_BYTES, || {
            let context = self.context(messages, options);
            self.environment.get_template(NAME).and_then(|template| template.render(context))
        })?
        .map_err(|e| ChatError::render(&e, MAX_STEPS))
    }

    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let now = options.now.unwrap_or_else(SystemTime::now);
        let mut pairs = vec![
            ("messages", Value::from(Serde(messages))),
            // Defined but empty, as `transformers` passes them: templates ask `tools is not none`.
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
            ("strftime_now", Value::from_function(move |format: &str| clock::strftime(now, format))),
        ];
        for (name, text) in [
            ("bos_token", &self.specials.bos),
            ("eos_token", &self.specials.eos),
            ("unk_token", &self.specials.unk),
            ("pad_token", &self.specials.pad),
        ] {
            if let Some(text) = text {
                pairs.push((name, Value::from(text.as_str())));
            }
        }
        if let Some(thinking) = options.thinking {
            pairs.push(("enable_thinking", Value::from(thinking)));
            pairs.push(("thinking", Value::from(thinking)));
        }
        pairs.extend(options.extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        Value::from_pairs(pairs)
    }
}

/// Runs the template engine with room to recurse. The stack is address space; only what a template needs is ever
/// touched.
fn on_large_stack<T: Send>(need_bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(need_bytes).spawn_scoped(scope, work);
        let thread = thread.map_err(|_| ChatError::NoStack { need_bytes })?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// Jinja as `transformers` sets it up: blocks trimmed, loop controls, Python's methods, no escaping.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_formatter(|out, _, value| {
        let written = match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&python::to_str(value)),
        };
        written.map_err(Error::from)
    });
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", |value: &Value| python::to_str(value));
    environment.add_function("raise_exception", |reason: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, reason.clone()).with_source(Raised(reason)))
    });
    Ok(environment)
}

/// Replaces `{% generation %}` and its end, which mark the assistant's text for training, by a block that does nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(len) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let inner = &tag[2..2 + len];
        let name = inner.trim_matches(['-', '+', ' ', '\t', '\r', '\n']);
        let replacement = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                out.push_str("{%");
                out.push_str(&inner.replacen(name, replacement, 1));
                out.push_str("%}");
                rest = &tag[len + 4..];
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_blocks_that_do_nothing() {
        let source = "a{%- generation -%}\n b {% endgeneration %}{% if x %}{% endif %} {% open";
        let plain = "a{%- if true -%}\n b {% endif %}{% if x %}{% endif %} {% open";
        assert_eq!(without_generation_tags(source), plain);
    }
}
