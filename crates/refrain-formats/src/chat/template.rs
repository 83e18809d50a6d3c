//! Rendering of a conversation with a model's own template.

use std::sync::Arc;
use std::time::SystemTime;

use minijinja::machinery;
use minijinja::syntax::SyntaxConfig;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::budget::Budget;
use super::error::{ChatError, Stop};
use super::eval::Interpreter;
use super::program::{self, Body, Name};
use super::value::Val;

/// The longest templates in use have about 30,000 bytes.
const MAX_SOURCE_BYTES: usize = 1 << 16;
/// Stack for parsing, per byte of the source. The parser recurses along chains such as `a.b.c` without a limit of its
/// own: a byte can add one level, and a level takes less than a kilobyte.
const STACK_BYTES_PER_BYTE: usize = 2048;
/// Stack for rendering: the depth of a template is limited, and a level takes less than 32 KiB even in debug builds.
const RENDER_STACK_BYTES: usize = 64 << 20;
const NAME: &str = "chat_template";

/// Texts of the special tokens that a template may use. Absent ones are undefined in the template.
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
    /// Speaker: `system`, `user`, `assistant`, `tool`, or another role that the template knows.
    pub role: String,
    /// Text of the turn.
    pub content: String,
    /// Further fields that some templates read: `tool_calls`, `reasoning_content`, `name`.
    #[serde(flatten)]
    pub extra: Map<String, serde_json::Value>,
}

impl Message {
    /// Creates a turn of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

/// Options of a rendering.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt with the opening of the assistant's turn, so that the model answers.
    pub add_generation_prompt: bool,
    /// Turns thinking on or off (`enable_thinking`, `thinking`). `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Time that `strftime_now` reports, in UTC. `None` is the current time.
    pub now: Option<SystemTime>,
    /// Further variables, such as `tools` or `date_string`. They override the ones above.
    pub extra: Map<String, serde_json::Value>,
}

impl Default for RenderOptions {
    /// A prompt that the model answers: the assistant's turn is opened.
    fn default() -> Self {
        Self { add_generation_prompt: true, thinking: None, now: None, extra: Map::new() }
    }
}

/// A model's chat template, parsed once.
///
/// A rendering is limited in steps, in live memory and in depth, so any template ends in a prompt or an error.
pub struct ChatTemplate {
    program: Result<Body, ChatError>,
    specials: SpecialTexts,
}

impl ChatTemplate {
    /// Parses a template.
    pub fn new(source: &str, specials: SpecialTexts) -> Result<Self, ChatError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(ChatError::TooLong { len: source.len(), limit: MAX_SOURCE_BYTES });
        }
        let program = on_large_stack((1 << 20) + source.len() * STACK_BYTES_PER_BYTE, || {
            let source = without_generation_tags(source);
            // Blocks are trimmed as `transformers` sets Jinja up.
            let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
            let template = syntax.and_then(|syntax| machinery::parse(&source, NAME, syntax));
            template.map_err(|e| ChatError::syntax(&e)).and_then(|template| program::lower(&template))
        })??;
        Ok(Self { program: Ok(program), specials })
    }

    /// Parses a template and keeps an error until the template is used. The template of a model that is used for raw
    /// completion may be broken.
    pub fn deferred(source: &str, specials: SpecialTexts) -> Self {
        Self::new(source, specials)
            .unwrap_or_else(|error| Self { program: Err(error), specials: SpecialTexts::default() })
    }

    /// The source of a template that refuses every conversation with a reason, in place of one that cannot be read.
    pub fn unusable(because: &str) -> String {
        format!("{{{{ raise_exception({because:?}) }}}}")
    }

    /// Renders the prompt of a conversation.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        let program = self.program.as_ref().map_err(ChatError::clone)?;
        on_large_stack(RENDER_STACK_BYTES, || {
            let budget = Budget::new(input_bytes(messages, options));
            let variables = self.variables(messages, options, &budget)?;
            let now = options.now.unwrap_or_else(SystemTime::now);
            Interpreter::new(&budget, now, variables)?.render(program)
        })?
        .map_err(ChatError::from)
    }

    fn variables(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        budget: &Budget,
    ) -> Result<Vec<(Name, Val)>, Stop> {
        let messages: Result<Vec<Val>, Stop> =
            messages.iter().map(|message| message.to_val(budget)).collect();
        let mut variables: Vec<(Name, Val)> = vec![
            ("messages".into(), Val::list(budget, messages?)?),
            // Defined but empty, as `transformers` passes them: templates test `tools is not none`.
            ("tools".into(), Val::None),
            ("documents".into(), Val::None),
            ("add_generation_prompt".into(), Val::Bool(options.add_generation_prompt)),
        ];
        let SpecialTexts { bos, eos, unk, pad } = &self.specials;
        for (name, text) in [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)] {
            if let Some(text) = text {
                variables.push((name.into(), Val::str(budget, text)?));
            }
        }
        if let Some(thinking) = options.thinking {
            variables.push(("enable_thinking".into(), Val::Bool(thinking)));
            variables.push(("thinking".into(), Val::Bool(thinking)));
        }
        for (name, value) in &options.extra {
            let value = Val::from_json(budget, value, 0)?;
            variables.retain(|(known, _)| **known != **name);
            variables.push((Arc::from(name.as_str()), value));
        }
        Ok(variables)
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("specials", &self.specials).finish_non_exhaustive()
    }
}

impl Message {
    fn to_val(&self, budget: &Budget) -> Result<Val, Stop> {
        let entry = |name: &str, value| Ok::<_, Stop>((Val::str(budget, name)?, value));
        let mut entries = vec![
            entry("role", Val::str(budget, &self.role)?)?,
            entry("content", Val::str(budget, &self.content)?)?,
        ];
        for (name, value) in &self.extra {
            entries.push(entry(name, Val::from_json(budget, value, 1)?)?);
        }
        Val::map(budget, entries)
    }
}

/// Bytes that a conversation brings along, roughly.
fn input_bytes(messages: &[Message], options: &RenderOptions) -> usize {
    let json_bytes = |map: &Map<String, serde_json::Value>| -> usize {
        map.iter().map(|(name, value)| name.len() + value.to_string().len()).sum()
    };
    let of_message = |m: &Message| 256 + m.role.len() + m.content.len() + json_bytes(&m.extra);
    messages.iter().map(of_message).sum::<usize>() + json_bytes(&options.extra)
}

/// Runs the template engine on a stack that is deep enough. It is address space: only the part that a template needs is
/// ever touched.
fn on_large_stack<T: Send>(need_bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(need_bytes).spawn_scoped(scope, work);
        let thread = thread.map_err(|_| ChatError::NoStack { need_bytes })?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which mark the assistant's text for training, with an
/// `{% if true %}` block.
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
    fn generation_tags_become_blocks_without_effect() {
        let source = "a{%- generation -%}\n b {% endgeneration %}{% if x %}{% endif %} {% open";
        let plain = "a{%- if true -%}\n b {% endif %}{% if x %}{% endif %} {% open";
        assert_eq!(without_generation_tags(source), plain);
    }
}
