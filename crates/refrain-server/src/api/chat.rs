//! `/v1/chat/completions`.

use super::conversation::{Conversation, read_messages, read_tool_choice, read_tools};
use super::generation::{Generation, Job, WholeChoice, finish_reason, stop_reason};
use super::logprobs;
use super::params::{Params, token_limit, top_count};
use super::stream::{self, EventWriter, event};
use crate::app::{App, Caller};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::ids;
use crate::text::Delta;
use crate::tools::ToolCall;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use refrain::RenderOptions;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn serve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let job = app.read(request, read).await?;
    let (wants_stream, wants_usage) = (job.params.stream, job.params.include_usage);
    let with_logprobs = job.params.n_top.is_some();
    let generation = job.start(&app, &caller, "chatcmpl-")?;
    if wants_stream {
        let n_calls = vec![0; generation.n_choices];
        return stream::respond(generation, ChatEvents { wants_usage, with_logprobs, n_calls }).await;
    }
    let (choices, generation) = generation.collect().await?;
    Ok(axum::Json(whole(&generation, choices, with_logprobs)).into_response())
}

/// Reads a request. Blocks.
fn read(app: &App, body: Value) -> Result<Job, ApiError> {
    let mut fields = Fields::body(body)?;
    let model = app.models.find(fields.string("model")?.as_deref())?;
    let mut params = Params::read(&mut fields, &model)?;
    let (newer, older) =
        (token_limit(&mut fields, "max_completion_tokens")?, token_limit(&mut fields, "max_tokens")?);
    params.max_tokens = newer.or(older);
    let n_top = top_count(&mut fields, "top_logprobs")?;
    params.n_top = match (fields.bool("logprobs")?.unwrap_or(false), n_top) {
        (true, n_top) => Some(n_top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(
                ApiError::invalid("top_logprobs", "top_logprobs needs logprobs").hint("set logprobs to true")
            );
        }
    };
    let tools = read_tools(&mut fields)?;
    let tool_choice = read_tool_choice(&mut fields, tools.len())?;
    let single_call = fields.bool("parallel_tool_calls")? == Some(false);
    let mut options = RenderOptions::default();
    read_template_options(&mut fields, &mut options)?;
    let list = fields.list("messages")?;
    let list = list.ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    let messages = read_messages(list)?;
    fields.without_effect(&["store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"]);
    fields.only("modalities", &[json!(["text"])], "text is the only modality")?;
    fields.finish()?;
    let conversation = Conversation { messages, tools, tool_choice, options, ..Conversation::default() };
    conversation.job(app, model, params, single_call)
}

/// Reads the variables of the chat template.
pub(crate) fn read_template_options(
    fields: &mut Fields,
    options: &mut RenderOptions,
) -> Result<(), ApiError> {
    if let Some(mut extra) = fields.map("chat_template_kwargs")? {
        // Templates spell it in two ways; the option sets both.
        if let Some(Value::Bool(thinking)) = extra.get("enable_thinking").or(extra.get("thinking")) {
            options.thinking = Some(*thinking);
        }
        for name in ["messages", "tools", "bos_token", "eos_token"] {
            if extra.remove(name).is_some() {
                let param = format!("chat_template_kwargs.{name}");
                return Err(ApiError::invalid(param.clone(), format!("{param} belongs to the server")));
            }
        }
        options.extra = extra;
    }
    match fields.string("reasoning_effort")?.as_deref() {
        None => {}
        Some("none") => options.thinking = Some(false),
        Some(effort @ ("minimal" | "low" | "medium" | "high")) => {
            options.thinking.get_or_insert(true);
            options.extra.insert("reasoning_effort".into(), effort.into());
        }
        Some(_) => {
            let message = "reasoning_effort must be none, minimal, low, medium or high";
            return Err(ApiError::invalid("reasoning_effort", message));
        }
    }
    if let Some(add) = fields.bool("add_generation_prompt")? {
        options.add_generation_prompt = add;
    }
    fields.only("continue_final_message", &[json!(false)], "use /v1/completions to continue a text")
}

fn call_json(call: &ToolCall, idx: Option<usize>) -> Value {
    let mut value = json!({
        "id": ids::fresh("call_"),
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments },
    });
    if let Some(idx) = idx {
        value["index"] = json!(idx);
    }
    value
}

fn whole(generation: &Generation, choices: Vec<WholeChoice>, with_logprobs: bool) -> Value {
    let choices = choices.into_iter().enumerate().map(|(idx, choice)| {
        let has_calls = !choice.calls.is_empty();
        let content = if has_calls && choice.text.is_empty() { Value::Null } else { json!(choice.text) };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !choice.reasoning.is_empty() {
            message["reasoning"] = json!(choice.reasoning);
            message["reasoning_content"] = json!(choice.reasoning);
        }
        if has_calls {
            message["tool_calls"] = choice.calls.iter().map(|call| call_json(call, None)).collect();
        }
        let logprobs = with_logprobs.then(|| logprobs::chat(&generation.model, &choice.logprobs));
        json!({
            "index": idx,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish.as_ref()),
            "stop_reason": stop_reason(choice.finish.as_ref()),
        })
    });
    let choices: Vec<Value> = choices.collect();
    json!({
        "id": generation.id,
        "object": "chat.completion",
        "created": generation.created,
        "model": generation.model.name(),
        "choices": choices,
        "usage": generation.usage.json(),
    })
}

struct ChatEvents {
    wants_usage: bool,
    with_logprobs: bool,
    /// Tool calls of each choice so far.
    n_calls: Vec<usize>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: ChunkDelta<'a>,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    stop_reason: Value,
}

#[derive(Default, Serialize)]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

impl ChatEvents {
    fn chunk(
        &self,
        generation: &Generation,
        choices: &[ChunkChoice<'_>],
        usage: Option<Value>,
        out: &mut Vec<u8>,
    ) {
        let chunk = Chunk {
            id: &generation.id,
            object: "chat.completion.chunk",
            created: generation.created,
            model: generation.model.name(),
            choices,
            usage: usage.or(self.wants_usage.then_some(Value::Null)),
        };
        event(&chunk, out);
    }
}

impl EventWriter for ChatEvents {
    fn start(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        for index in 0..generation.n_choices {
            let delta = ChunkDelta { role: Some("assistant"), content: Some(""), ..ChunkDelta::default() };
            let choice =
                ChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: Value::Null };
            self.chunk(generation, &[choice], None, out);
        }
    }

    fn delta(&mut self, generation: &Generation, choice: usize, delta: Delta, out: &mut Vec<u8>) {
        let reasoning = Some(delta.reasoning.as_str()).filter(|text| !text.is_empty());
        let first = self.n_calls[choice];
        self.n_calls[choice] += delta.calls.len();
        let calls = delta.calls.iter().enumerate().map(|(idx, call)| call_json(call, Some(first + idx)));
        let content = Some(delta.text.as_str()).filter(|text| !text.is_empty());
        let finish = delta.finish.as_ref();
        let logprobs = self.with_logprobs.then(|| logprobs::chat(&generation.model, &delta.logprobs));
        let choice = ChunkChoice {
            index: choice,
            delta: ChunkDelta {
                role: None,
                content,
                reasoning,
                reasoning_content: reasoning,
                tool_calls: calls.collect(),
            },
            logprobs,
            finish_reason: finish_reason(finish),
            stop_reason: stop_reason(finish),
        };
        self.chunk(generation, &[choice], None, out);
    }

    fn end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        if self.wants_usage {
            self.chunk(generation, &[], Some(generation.usage.json()), out);
        }
        out.extend(b"data: [DONE]\n\n");
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        event(&error.openai(), out);
        out.extend(b"data: [DONE]\n\n");
    }
}
