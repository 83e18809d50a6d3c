//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

use super::conversation::{Conversation, ToolChoice, read_content, read_function, tool_call};
use super::generation::{Generation, Job, WholeChoice};
use super::params::{Params, read_stop, token_limit};
use super::stream::{self, EventWriter, named_event};
use crate::app::{App, Caller};
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::ids;
use crate::text::{Delta, Finish};
use crate::tools::ToolCall;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use refrain::{Message, RenderOptions};
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn serve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let job = app.read(request, |app, body| read(app, body, true)).await?;
    let wants_stream = job.params.stream;
    let generation = job.start(&app, &caller, "msg_")?;
    if wants_stream {
        return stream::respond(generation, MessageEvents::default()).await;
    }
    let (choices, generation) = generation.collect().await?;
    let choice = choices.into_iter().next().unwrap_or_default();
    Ok(Json(whole(&generation, choice)).into_response())
}

pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let job = app.read(request, |app, body| read(app, body, false)).await?;
    Ok(Json(json!({ "input_tokens": job.prompts.iter().map(Vec::len).sum::<usize>() })))
}

/// Reads a request; one that only counts tokens has no parameters of a generation. Blocks.
fn read(app: &App, body: Value, generates: bool) -> Result<Job, ApiError> {
    let mut fields = Fields::body(body)?;
    let model = app.models.find(fields.string("model")?.as_deref())?;
    let mut params = Params::new(&model);
    if generates {
        params.read_sampling(&mut fields, &model)?;
        params.stop = read_stop(&mut fields, "stop_sequences")?;
        params.max_tokens = token_limit(&mut fields, "max_tokens")?;
        if params.max_tokens.is_none() {
            return Err(ApiError::invalid("max_tokens", "max_tokens is missing"));
        }
        params.stream = fields.bool("stream")?.unwrap_or(false);
        if let Some(mut metadata) = fields.object("metadata")? {
            params.user = metadata.string("user_id")?;
            metadata.finish()?;
        }
    }
    let mut options = RenderOptions::default();
    if let Some(mut thinking) = fields.object("thinking")? {
        options.thinking = match thinking.string("type")?.as_deref() {
            Some("enabled" | "adaptive") => Some(true),
            Some("disabled") => Some(false),
            _ => {
                let message = "thinking.type must be enabled, adaptive or disabled";
                return Err(ApiError::invalid("thinking.type", message));
            }
        };
        // The model decides how long it thinks; max_tokens limits thinking and answer together.
        thinking.without_effect(&["budget_tokens", "display"]);
        thinking.finish()?;
    }
    let tools = read_tools(&mut fields)?;
    let (tool_choice, single_call) = read_choice(&mut fields)?;
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        messages.push(Message::new("system", read_content(system, "system")?));
    }
    let list = fields.list("messages")?;
    let list = list.ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    for (idx, message) in list.into_iter().enumerate() {
        read_message(message, &format!("messages[{idx}]"), &mut messages)?;
    }
    fields.without_effect(&["service_tier", "cache_control"]);
    fields.finish()?;
    let conversation = Conversation { messages, tools, tool_choice, options, ..Conversation::default() };
    conversation.job(app, model, params, single_call)
}

fn read_tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    let tools = list.into_iter().enumerate().map(|(idx, tool)| {
        let path = format!("tools[{idx}]");
        let mut tool = Fields::of(tool, &path)?;
        tool.only("type", &[json!("custom")], "tools of the server are not supported")?;
        let function = read_function(&mut tool, "input_schema")?;
        tool.without_effect(&["cache_control", "eager_input_streaming"]);
        tool.finish()?;
        Ok(function)
    });
    tools.collect()
}

fn read_choice(fields: &mut Fields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, false)) };
    let single = choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    let kind = choice.string("type")?;
    let read = match kind.as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => ToolChoice::Named(choice.string("name")?.unwrap_or_default()),
        _ => {
            let message = "tool_choice.type must be auto, any, tool or none";
            return Err(ApiError::invalid("tool_choice.type", message));
        }
    };
    choice.finish()?;
    Ok((read, single))
}

/// Reads a message. Results of tools become messages of their own, as chat templates expect them.
fn read_message(value: Value, path: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role = fields.string("role")?.unwrap_or_default();
    if !matches!(role.as_str(), "user" | "assistant") {
        let path = format!("{path}.role");
        let message = format!("{path} must be user or assistant");
        return Err(ApiError::invalid(path, message).hint("the system prompt is a field of its own: system"));
    }
    let content = fields.required("content")?;
    fields.finish()?;
    let path = format!("{path}.content");
    let blocks = match content {
        Value::String(text) => {
            messages.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => {
            let message = format!("{path} is {}, must be a text or a list of blocks", kind(&other));
            return Err(ApiError::invalid(path, message));
        }
    };
    let mut read = Blocks::default();
    for (idx, block) in blocks.into_iter().enumerate() {
        read.block(block, &format!("{path}[{idx}]"))?;
    }
    messages.extend(read.results);
    if !read.texts.is_empty() || !read.calls.is_empty() {
        let mut message = Message::new(role, read.texts.join("\n"));
        if !read.calls.is_empty() {
            message.extra.insert("tool_calls".into(), Value::Array(read.calls));
        }
        if !read.thinking.is_empty() {
            message.extra.insert("reasoning_content".into(), read.thinking.into());
        }
        messages.push(message);
    }
    Ok(())
}

#[derive(Default)]
struct Blocks {
    texts: Vec<String>,
    thinking: String,
    calls: Vec<Value>,
    results: Vec<Message>,
}

impl Blocks {
    fn block(&mut self, block: Value, path: &str) -> Result<(), ApiError> {
        let mut block = Fields::of(block, path)?;
        let kind = block.string("type")?.unwrap_or_default();
        let missing =
            |name: &str| ApiError::invalid(format!("{path}.{name}"), format!("{path}.{name} is missing"));
        match kind.as_str() {
            "text" => self.texts.push(block.string("text")?.ok_or_else(|| missing("text"))?),
            "thinking" => self.thinking.push_str(&block.string("thinking")?.unwrap_or_default()),
            "tool_use" => {
                let id = block.string("id")?.unwrap_or_default();
                let name = block.required("name")?;
                let input = block.take("input");
                self.calls.push(tool_call(&id, name, input));
            }
            "tool_result" => {
                let content = block.take("content").unwrap_or_else(|| json!(""));
                let mut message = Message::new("tool", read_content(content, &format!("{path}.content"))?);
                let id = block.string("tool_use_id")?.ok_or_else(|| missing("tool_use_id"))?;
                message.extra.insert("tool_call_id".into(), id.into());
                if block.bool("is_error")? == Some(true) {
                    message.content.insert_str(0, "Error: ");
                }
                self.results.push(message);
            }
            _ => {
                let kind: String = kind.chars().take(64).collect();
                let message = format!("{path}.type = {kind} is not supported");
                return Err(ApiError::unsupported(format!("{path}.type"), message).hint("send text only"));
            }
        }
        block.without_effect(&["cache_control", "citations", "signature"]);
        block.finish()
    }
}

fn stop_reason(finish: Option<&Finish>) -> (&'static str, Value) {
    match finish {
        Some(Finish::MaxTokens) => ("max_tokens", Value::Null),
        Some(Finish::ContextFull) => ("model_context_window_exceeded", Value::Null),
        Some(Finish::ToolCalls) => ("tool_use", Value::Null),
        Some(Finish::StopText(text)) => ("stop_sequence", json!(text)),
        Some(Finish::EndToken | Finish::StopToken(_)) | None => ("end_turn", Value::Null),
    }
}

fn usage(generation: &Generation) -> Value {
    json!({ "input_tokens": generation.usage.n_prompt, "output_tokens": generation.usage.n_reply })
}

fn tool_use(call: &ToolCall, input: Value) -> Value {
    json!({ "type": "tool_use", "id": ids::fresh("toolu_"), "name": call.name, "input": input })
}

fn whole(generation: &Generation, choice: WholeChoice) -> Value {
    let mut content = Vec::new();
    if !choice.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": choice.reasoning, "signature": "" }));
    }
    if !choice.text.is_empty() || (choice.calls.is_empty() && content.is_empty()) {
        content.push(json!({ "type": "text", "text": choice.text }));
    }
    for call in &choice.calls {
        // The parser of tool calls has checked that it is an object.
        let input = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        content.push(tool_use(call, input));
    }
    let (reason, sequence) = stop_reason(choice.finish.as_ref());
    json!({
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.model.name(),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(generation),
    })
}

/// The events of a message: blocks that are opened, grow and are closed.
#[derive(Default)]
struct MessageEvents {
    n_blocks: usize,
    open: Option<BlockKind>,
    finish: Option<Finish>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
}

impl MessageEvents {
    fn close(&mut self, out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            let stop = json!({ "type": "content_block_stop", "index": self.n_blocks - 1 });
            named_event("content_block_stop", &stop, out);
        }
    }

    fn start_block(&mut self, block: Value, out: &mut Vec<u8>) {
        let start = json!({ "type": "content_block_start", "index": self.n_blocks, "content_block": block });
        named_event("content_block_start", &start, out);
        self.n_blocks += 1;
    }

    fn grow(&self, delta: Value, out: &mut Vec<u8>) {
        let grown = json!({ "type": "content_block_delta", "index": self.n_blocks - 1, "delta": delta });
        named_event("content_block_delta", &grown, out);
    }

    fn text(&mut self, kind: BlockKind, text: &str, out: &mut Vec<u8>) {
        if text.is_empty() {
            return;
        }
        if self.open != Some(kind) {
            self.close(out);
            let block = match kind {
                BlockKind::Thinking => json!({ "type": "thinking", "thinking": "", "signature": "" }),
                BlockKind::Text => json!({ "type": "text", "text": "" }),
            };
            self.start_block(block, out);
            self.open = Some(kind);
        }
        let delta = match kind {
            BlockKind::Thinking => json!({ "type": "thinking_delta", "thinking": text }),
            BlockKind::Text => json!({ "type": "text_delta", "text": text }),
        };
        self.grow(delta, out);
    }
}

impl EventWriter for MessageEvents {
    fn start(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        let message = json!({
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.model.name(),
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(generation),
        });
        named_event("message_start", &json!({ "type": "message_start", "message": message }), out);
    }

    fn delta(&mut self, _generation: &Generation, _choice: usize, delta: Delta, out: &mut Vec<u8>) {
        self.text(BlockKind::Thinking, &delta.reasoning, out);
        self.text(BlockKind::Text, &delta.text, out);
        for call in &delta.calls {
            self.close(out);
            self.start_block(tool_use(call, json!({})), out);
            self.grow(json!({ "type": "input_json_delta", "partial_json": call.arguments }), out);
            // So that it is closed like the others.
            self.open = Some(BlockKind::Text);
            self.close(out);
        }
        self.finish = delta.finish.or(self.finish.take());
    }

    fn end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        self.close(out);
        let (reason, sequence) = stop_reason(self.finish.as_ref());
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        let last = json!({ "type": "message_delta", "delta": delta, "usage": usage(generation) });
        named_event("message_delta", &last, out);
        named_event("message_stop", &json!({ "type": "message_stop" }), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        named_event("error", &error.anthropic(), out);
    }
}
