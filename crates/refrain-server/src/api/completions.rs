//! `/v1/completions`.

use super::generation::{Generation, Job, WholeChoice, finish_reason, stop_reason};
use super::logprobs;
use super::params::{Params, token_limit, top_count};
use super::stream::{self, EventWriter, event};
use crate::app::{App, Caller};
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::served::ServedModel;
use crate::text::Delta;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// What OpenAI's API generates if nothing else is asked for.
const USUAL_MAX_TOKENS: usize = 16;
/// Maximum number of prompts of a request.
const MAX_PROMPTS: usize = 256;

pub(crate) async fn serve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (job, echo) = app.read(request, read).await?;
    let (wants_stream, wants_usage) = (job.params.stream, job.params.include_usage);
    let with_logprobs = job.params.n_top.is_some();
    let n_per_prompt = job.params.n;
    let generation = job.start(&app, &caller, "cmpl-")?;
    if wants_stream {
        let offsets = vec![0; generation.n_choices];
        let events = CompletionEvents { wants_usage, with_logprobs, offsets, echo, n_per_prompt };
        return stream::respond(generation, events).await;
    }
    let (mut choices, generation) = generation.collect().await?;
    for (idx, choice) in choices.iter_mut().enumerate() {
        if let Some(prompt) = echo.get(idx / n_per_prompt) {
            choice.text.insert_str(0, prompt);
        }
    }
    Ok(axum::Json(whole(&generation, choices, with_logprobs)).into_response())
}

/// Reads a request, and the texts of its prompts if they are to be part of the reply. Blocks.
fn read(app: &App, body: Value) -> Result<(Job, Vec<String>), ApiError> {
    let mut fields = Fields::body(body)?;
    let model = app.models.find(fields.string("model")?.as_deref())?;
    let mut params = Params::read(&mut fields, &model)?;
    params.max_tokens = Some(token_limit(&mut fields, "max_tokens")?.unwrap_or(USUAL_MAX_TOKENS));
    params.n_top = top_count(&mut fields, "logprobs")?;
    let context = model.context(&app.backend.status());
    let prompts = read_prompts(fields.required("prompt")?, &model, context)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    if echo && params.n_top.is_some() {
        let error = ApiError::unsupported("echo", "log-probabilities of the prompt are not supported");
        return Err(error.hint("remove logprobs or echo"));
    }
    fields.only(
        "suffix",
        &[json!("")],
        "models that fill in the middle take their own markers in the prompt",
    )?;
    let n = params.n;
    fields.only("best_of", &[json!(n)], "use n, and choose among the replies")?;
    fields.finish()?;
    let texts = match echo {
        false => Vec::new(),
        true => prompts.iter().map(|prompt| detokenize(&model, prompt)).collect::<Result<_, _>>()?,
    };
    Ok((Job { model, prompts, params, think: None, tools: None, single_call: false }, texts))
}

fn detokenize(model: &ServedModel, tokens: &[u32]) -> Result<String, ApiError> {
    Ok(model.tokenizer().decode(tokens).map_err(refrain::Error::from)?)
}

/// A text, a list of texts, a list of token ids, or a list of such lists.
fn read_prompts(value: Value, model: &ServedModel, context: usize) -> Result<Vec<Vec<u32>>, ApiError> {
    let invalid = |message: String| ApiError::invalid("prompt", message);
    let list = match value {
        Value::String(text) => return Ok(vec![model.text_tokens(&text, context)?]),
        Value::Array(list) => list,
        other => return Err(invalid(format!("prompt is {}, must be a text or token ids", kind(&other)))),
    };
    let ids = |list: &[Value]| -> Result<Vec<u32>, ApiError> {
        let id = |v: &Value| {
            v.as_u64().and_then(|v| u32::try_from(v).ok()).filter(|v| (*v as usize) < model.n_vocab())
        };
        let bad = |v: &Value| {
            let n_vocab = model.n_vocab();
            let shown = if v.is_number() { v.to_string() } else { kind(v).to_owned() };
            invalid(format!(
                "prompt has {shown} in it, token ids are from 0 to {}",
                n_vocab.saturating_sub(1)
            ))
        };
        list.iter().map(|v| id(v).ok_or_else(|| bad(v))).collect()
    };
    if list.first().is_some_and(Value::is_number) {
        return Ok(vec![ids(&list)?]);
    }
    if list.is_empty() || list.len() > MAX_PROMPTS {
        return Err(invalid(format!("prompt has {} prompts, must have 1 to {MAX_PROMPTS}", list.len())));
    }
    let prompt = |value: &Value| match value {
        Value::String(text) => model.text_tokens(text, context),
        Value::Array(list) => ids(list),
        other => {
            Err(invalid(format!("prompt has {} in it, must be texts or lists of token ids", kind(other))))
        }
    };
    list.iter().map(prompt).collect()
}

fn whole(generation: &Generation, choices: Vec<WholeChoice>, with_logprobs: bool) -> Value {
    let choices = choices.into_iter().enumerate().map(|(idx, choice)| {
        let logprobs = with_logprobs.then(|| logprobs::plain(&generation.model, &choice.logprobs, &mut 0));
        json!({
            "index": idx,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish.as_ref()),
            "stop_reason": stop_reason(choice.finish.as_ref()),
        })
    });
    let choices: Vec<Value> = choices.collect();
    json!({
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.model.name(),
        "choices": choices,
        "usage": generation.usage.json(),
    })
}

struct CompletionEvents {
    wants_usage: bool,
    with_logprobs: bool,
    /// Length of each choice's text so far, for log-probabilities.
    offsets: Vec<usize>,
    echo: Vec<String>,
    n_per_prompt: usize,
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
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    stop_reason: Value,
}

impl CompletionEvents {
    fn chunk(
        &self,
        generation: &Generation,
        choices: &[ChunkChoice<'_>],
        usage: Option<Value>,
        out: &mut Vec<u8>,
    ) {
        let chunk = Chunk {
            id: &generation.id,
            object: "text_completion",
            created: generation.created,
            model: generation.model.name(),
            choices,
            usage: usage.or(self.wants_usage.then_some(Value::Null)),
        };
        event(&chunk, out);
    }
}

impl EventWriter for CompletionEvents {
    fn start(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        if self.echo.is_empty() {
            return;
        }
        for index in 0..generation.n_choices {
            let text = self.echo[index / self.n_per_prompt].as_str();
            let choice =
                ChunkChoice { index, text, logprobs: None, finish_reason: None, stop_reason: Value::Null };
            self.chunk(generation, &[choice], None, out);
        }
    }

    fn delta(&mut self, generation: &Generation, choice: usize, delta: Delta, out: &mut Vec<u8>) {
        let logprobs = self
            .with_logprobs
            .then(|| logprobs::plain(&generation.model, &delta.logprobs, &mut self.offsets[choice]));
        let finish = delta.finish.as_ref();
        let choice = ChunkChoice {
            index: choice,
            text: &delta.text,
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
