//! OpenAI's `/v1/responses`, without stored state: every request has the whole conversation.

use super::conversation::{
    Conversation, check_type, read_content, read_function, read_tool_choice, tool_call,
};
use super::generation::{Generation, Job, WholeChoice};
use super::params::{Params, read_format, token_limit};
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
    let job = app.read(request, read).await?;
    let wants_stream = job.params.stream;
    let generation = job.start(&app, &caller, "resp_")?;
    if wants_stream {
        return stream::respond(generation, ResponseEvents::default()).await;
    }
    let (choices, generation) = generation.collect().await?;
    let choice = choices.into_iter().next().unwrap_or_default();
    let output = items(&choice);
    Ok(Json(whole(&generation, &output, choice.finish.as_ref(), true)).into_response())
}

/// Reads a request. Blocks.
fn read(app: &App, body: Value) -> Result<Job, ApiError> {
    let mut fields = Fields::body(body)?;
    let model = app.models.find(fields.string("model")?.as_deref())?;
    let mut params = Params::new(&model);
    params.read_sampling(&mut fields, &model)?;
    params.max_tokens = token_limit(&mut fields, "max_output_tokens")?;
    params.stream = fields.bool("stream")?.unwrap_or(false);
    params.user = fields.string("user")?;
    let mut options = RenderOptions::default();
    if let Some(mut reasoning) = fields.object("reasoning")? {
        match reasoning.string("effort")?.as_deref() {
            None => {}
            Some("none") => options.thinking = Some(false),
            Some(effort @ ("minimal" | "low" | "medium" | "high")) => {
                options.thinking = Some(true);
                options.extra.insert("reasoning_effort".into(), effort.into());
            }
            Some(_) => {
                let message = "reasoning.effort must be none, minimal, low, medium or high";
                return Err(ApiError::invalid("reasoning.effort", message));
            }
        }
        // The reasoning itself is returned, which says more than a summary.
        reasoning.without_effect(&["summary", "generate_summary"]);
        reasoning.finish()?;
    }
    if let Some(mut text) = fields.object("text")? {
        if let Some(mut format) = text.object("format")? {
            params.grammar = read_format(&mut format, false)?;
            format.finish()?;
        }
        text.only("verbosity", &[json!("medium")], "ask for it in the instructions")?;
        text.finish()?;
    }
    let tools = read_tools(&mut fields)?;
    let tool_choice = read_tool_choice(&mut fields, tools.len())?;
    let single_call = fields.bool("parallel_tool_calls")? == Some(false);
    let mut messages = Vec::new();
    if let Some(text) = fields.string("instructions")? {
        messages.push(Message::new("system", text));
    }
    read_input(fields.required("input")?, &mut messages)?;
    let stateless = "this server stores no replies: send the whole conversation as input";
    fields.only("previous_response_id", &[], stateless)?;
    fields.only("conversation", &[], stateless)?;
    fields.only("background", &[json!(false)], stateless)?;
    fields.only("truncation", &[json!("disabled")], "shorten the input")?;
    fields.only("top_logprobs", &[json!(0)], "/v1/chat/completions returns log-probabilities")?;
    fields.only("include", &[json!([]), json!(["reasoning.encrypted_content"])], "remove it")?;
    fields.without_effect(&[
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "stream_options",
    ]);
    fields.finish()?;
    let conversation = Conversation { messages, tools, tool_choice, options, ..Conversation::default() };
    conversation.job(app, model, params, single_call)
}

fn read_tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    let tools = list.into_iter().enumerate().map(|(idx, tool)| {
        let mut tool = Fields::of(tool, &format!("tools[{idx}]"))?;
        check_type(&mut tool, "function")?;
        let function = read_function(&mut tool, "parameters")?;
        tool.finish()?;
        Ok(function)
    });
    tools.collect()
}

/// A text, or a list of messages, calls of tools and their results.
fn read_input(input: Value, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let items = match input {
        Value::String(text) => {
            messages.push(Message::new("user", text));
            return Ok(());
        }
        Value::Array(items) => items,
        other => {
            let message = format!("input is {}, must be a text or a list", kind(&other));
            return Err(ApiError::invalid("input", message));
        }
    };
    for (idx, item) in items.into_iter().enumerate() {
        let path = format!("input[{idx}]");
        let mut item = Fields::of(item, &path)?;
        item.without_effect(&["id", "status"]);
        let item_type = item.string("type")?.unwrap_or_else(|| "message".into());
        match item_type.as_str() {
            "message" => {
                let role = match item.string("role")?.as_deref() {
                    Some("developer" | "system") => "system",
                    Some("user") => "user",
                    Some("assistant") => "assistant",
                    _ => {
                        let path = format!("{path}.role");
                        let message = format!("{path} must be user, assistant, system or developer");
                        return Err(ApiError::invalid(path, message));
                    }
                };
                let content = item.required("content")?;
                messages.push(Message::new(role, read_content(content, &format!("{path}.content"))?));
            }
            "function_call" => {
                let id = item.string("call_id")?.unwrap_or_default();
                let (name, arguments) = (item.required("name")?, item.take("arguments"));
                let mut message = Message::new("assistant", "");
                let calls = vec![tool_call(&id, name, arguments)];
                message.extra.insert("tool_calls".into(), Value::Array(calls));
                messages.push(message);
            }
            "function_call_output" => {
                let output = item.required("output")?;
                let mut message = Message::new("tool", read_content(output, &format!("{path}.output"))?);
                if let Some(id) = item.string("call_id")? {
                    message.extra.insert("tool_call_id".into(), id.into());
                }
                messages.push(message);
            }
            // Templates drop earlier reasoning; some clients send it back.
            "reasoning" => item.without_effect(&["summary", "content", "encrypted_content"]),
            other => {
                let other: String = other.chars().take(64).collect();
                let message = format!("{path}.type = {other} is not supported");
                return Err(ApiError::unsupported(format!("{path}.type"), message));
            }
        }
        item.finish()?;
    }
    Ok(())
}

fn reasoning_item(id: &str, text: &str) -> Value {
    let content = json!([{ "type": "reasoning_text", "text": text }]);
    json!({ "id": id, "type": "reasoning", "summary": [], "content": content })
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn message_item(id: &str, status: &str, parts: Vec<Value>) -> Value {
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": parts })
}

fn call_item(call: &ToolCall, arguments: &str, status: &str, ids: &(String, String)) -> Value {
    json!({
        "id": ids.0,
        "type": "function_call",
        "status": status,
        "call_id": ids.1,
        "name": call.name,
        "arguments": arguments,
    })
}

fn call_ids() -> (String, String) {
    (ids::fresh("fc_"), ids::fresh("call_"))
}

fn items(choice: &WholeChoice) -> Vec<Value> {
    let mut items = Vec::new();
    if !choice.reasoning.is_empty() {
        items.push(reasoning_item(&ids::fresh("rs_"), &choice.reasoning));
    }
    if !choice.text.is_empty() || choice.calls.is_empty() {
        items.push(message_item(&ids::fresh("msg_"), "completed", vec![text_part(&choice.text)]));
    }
    items.extend(choice.calls.iter().map(|call| call_item(call, &call.arguments, "completed", &call_ids())));
    items
}

/// The response object, while it is made or at its end.
fn whole(generation: &Generation, output: &[Value], finish: Option<&Finish>, is_over: bool) -> Value {
    let cut = matches!(finish, Some(Finish::MaxTokens | Finish::ContextFull));
    let status = match (is_over, cut) {
        (false, _) => "in_progress",
        (true, true) => "incomplete",
        (true, false) => "completed",
    };
    let usage = is_over.then(|| {
        let usage = generation.usage;
        json!({
            "input_tokens": usage.n_prompt,
            "input_tokens_details": { "cached_tokens": 0 },
            "output_tokens": usage.n_reply,
            "output_tokens_details": { "reasoning_tokens": usage.n_reasoning },
            "total_tokens": usage.n_prompt + usage.n_reply,
        })
    });
    json!({
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": status,
        "model": generation.model.name(),
        "output": output,
        "error": null,
        "incomplete_details": (is_over && cut).then(|| json!({ "reason": "max_output_tokens" })),
        "instructions": null,
        "metadata": {},
        "parallel_tool_calls": true,
        "temperature": null,
        "top_p": null,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    })
}

/// The events of a response: items that are added, grow and are done.
#[derive(Default)]
struct ResponseEvents {
    n_events: u64,
    done: Vec<Value>,
    open: Option<OpenItem>,
    finish: Option<Finish>,
}

struct OpenItem {
    id: String,
    is_reasoning: bool,
    text: String,
}

impl ResponseEvents {
    fn event(&mut self, name: &str, mut value: Value, out: &mut Vec<u8>) {
        value["type"] = json!(name);
        value["sequence_number"] = json!(self.n_events);
        self.n_events += 1;
        named_event(name, &value, out);
    }

    fn add(&mut self, item: Value, out: &mut Vec<u8>) {
        let added = json!({ "output_index": self.done.len(), "item": item });
        self.event("response.output_item.added", added, out);
    }

    fn done(&mut self, item: Value, out: &mut Vec<u8>) {
        let done = json!({ "output_index": self.done.len(), "item": item.clone() });
        self.event("response.output_item.done", done, out);
        self.done.push(item);
    }

    fn text(&mut self, is_reasoning: bool, text: &str, out: &mut Vec<u8>) {
        if text.is_empty() {
            return;
        }
        if self.open.as_ref().is_none_or(|open| open.is_reasoning != is_reasoning) {
            self.close(out);
            let id = ids::fresh(if is_reasoning { "rs_" } else { "msg_" });
            let item = match is_reasoning {
                true => json!({ "id": id, "type": "reasoning", "summary": [], "content": [] }),
                false => message_item(&id, "in_progress", Vec::new()),
            };
            self.add(item, out);
            if !is_reasoning {
                let part = json!({
                    "item_id": id, "output_index": self.done.len(), "content_index": 0, "part": text_part(""),
                });
                self.event("response.content_part.added", part, out);
            }
            self.open = Some(OpenItem { id, is_reasoning, text: String::new() });
        }
        let output_index = self.done.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let delta = json!({
            "item_id": open.id, "output_index": output_index, "content_index": 0, "delta": text, "logprobs": [],
        });
        let name = if is_reasoning { "response.reasoning_text.delta" } else { "response.output_text.delta" };
        self.event(name, delta, out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(OpenItem { id, is_reasoning, text }) = self.open.take() else { return };
        let place = json!({ "item_id": id, "output_index": self.done.len(), "content_index": 0 });
        let with = |name: &str, value: Value| {
            let mut event = place.clone();
            event[name] = value;
            event
        };
        if is_reasoning {
            self.event("response.reasoning_text.done", with("text", json!(text)), out);
            return self.done(reasoning_item(&id, &text), out);
        }
        let mut done = with("text", json!(text));
        done["logprobs"] = json!([]);
        self.event("response.output_text.done", done, out);
        self.event("response.content_part.done", with("part", text_part(&text)), out);
        self.done(message_item(&id, "completed", vec![text_part(&text)]), out);
    }
}

impl EventWriter for ResponseEvents {
    fn start(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        let response = whole(generation, &[], None, false);
        self.event("response.created", json!({ "response": response.clone() }), out);
        self.event("response.in_progress", json!({ "response": response }), out);
    }

    fn delta(&mut self, _generation: &Generation, _choice: usize, delta: Delta, out: &mut Vec<u8>) {
        self.text(true, &delta.reasoning, out);
        self.text(false, &delta.text, out);
        for call in &delta.calls {
            self.close(out);
            let ids = call_ids();
            self.add(call_item(call, "", "in_progress", &ids), out);
            let place = json!({ "item_id": ids.0, "output_index": self.done.len() });
            let mut grown = place.clone();
            grown["delta"] = json!(call.arguments);
            self.event("response.function_call_arguments.delta", grown, out);
            let mut done = place;
            done["arguments"] = json!(call.arguments);
            done["name"] = json!(call.name);
            self.event("response.function_call_arguments.done", done, out);
            self.done(call_item(call, &call.arguments, "completed", &ids), out);
        }
        self.finish = delta.finish.or(self.finish.take());
    }

    fn end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        self.close(out);
        let response = whole(generation, &self.done, self.finish.as_ref(), true);
        let is_cut = response["status"] == "incomplete";
        let name = if is_cut { "response.incomplete" } else { "response.completed" };
        self.event(name, json!({ "response": response }), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        let value = json!({ "code": error.code, "message": error.to_string(), "param": error.param });
        self.event("error", value, out);
    }
}
