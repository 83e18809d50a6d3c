//! `/v1/embeddings`.

use crate::app::{App, Caller, blocking};
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::keys::KeyUse;
use crate::served::ServedModel;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use refrain::EmbeddingUse;
use refrain_worker::{EmbedRequest, MAX_TEXTS};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How vectors are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Encoding {
    Float,
    /// Little-endian floats in base64: a quarter of the size, which the official clients ask for by themselves.
    Base64,
}

/// A checked request.
struct EmbedJob {
    model: Arc<ServedModel>,
    inputs: Vec<Vec<u32>>,
    encoding: Encoding,
    user: Option<String>,
}

pub(crate) async fn serve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let EmbedJob { model, inputs, encoding, user } = app.read(request, read).await?;
    let n_tokens: usize = inputs.iter().map(Vec::len).sum();
    let _key = caller.0.as_ref().map(|key| KeyUse::open(key, n_tokens)).transpose()?;
    let user = caller.user(user.as_deref());
    let n_texts = inputs.len();
    let request = EmbedRequest { model: model.name().to_owned(), inputs, user };
    let _open = app.open();
    let mut reply = app.backend.embed(request)?;
    app.metrics.n_prompt_tokens.fetch_add(n_tokens as u64, Ordering::Relaxed);
    let mut vectors = Vec::with_capacity(n_texts);
    while let Some(update) = reply.next().await {
        app.metrics.progress(Instant::now());
        vectors.push(update?.vector);
    }
    let body = blocking(move || Ok(written(&model, &vectors, encoding, n_tokens))).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Reads a request. Blocks.
fn read(app: &App, body: Value) -> Result<EmbedJob, ApiError> {
    let mut fields = Fields::body(body)?;
    let (model, how) = app.models.find_embedding(fields.string("model")?.as_deref())?;
    let encoding = match fields.string("encoding_format")?.as_deref() {
        None | Some("float") => Encoding::Float,
        Some("base64") => Encoding::Base64,
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let message = format!("encoding_format is {other:?}, must be \"float\" or \"base64\"");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let n_elements = model.n_elements();
    if let Some(n) = fields.count("dimensions", usize::MAX >> 1)?
        && n != n_elements
    {
        let message = format!("dimensions = {n} is not supported, the vectors have {n_elements} elements");
        let hint = "remove it; if the model was trained for shorter vectors, take the first elements of each and scale \
                    them to length 1";
        return Err(ApiError::unsupported("dimensions", message).hint(hint));
    }
    let cut = fields.int("truncate_prompt_tokens", -1, i64::MAX)?;
    // As in vLLM: -1 is as many as the model takes.
    let cut = cut.map(|n| usize::try_from(n).map_or(how.max_tokens, |n| n.min(how.max_tokens)));
    if cut == Some(0) {
        return Err(ApiError::invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 0, must be -1 or more",
        ));
    }
    let user = fields.string("user")?;
    let input = fields.required("input")?;
    fields.finish()?;
    let inputs = read_inputs(input, &InputRules { model: &model, how, cut })?;
    Ok(EmbedJob { model, inputs, encoding, user })
}

struct InputRules<'a> {
    model: &'a ServedModel,
    how: EmbeddingUse,
    cut: Option<usize>,
}

/// A text, a list of texts, a list of token ids, or a list of such lists.
fn read_inputs(input: Value, rules: &InputRules<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = match input {
        Value::String(text) => return Ok(vec![rules.text("input", &text)?]),
        Value::Array(list) => list,
        other => {
            let message = format!("input is {}, must be a text, token ids, or a list of those", kind(&other));
            return Err(ApiError::invalid("input", message));
        }
    };
    if list.first().is_some_and(Value::is_number) {
        return Ok(vec![rules.tokens("input", &list)?]);
    }
    if list.is_empty() || list.len() > MAX_TEXTS {
        let message = format!("input has {} texts, must have 1 to {MAX_TEXTS}", list.len());
        return Err(ApiError::invalid("input", message).hint("send the texts in several requests"));
    }
    let read = |(idx, value): (usize, &Value)| match value {
        Value::String(text) => rules.text(&format!("input[{idx}]"), text),
        Value::Array(list) => rules.tokens(&format!("input[{idx}]"), list),
        other => {
            let message = format!("input[{idx}] is {}, must be a text or a list of token ids", kind(other));
            Err(ApiError::invalid("input", message))
        }
    };
    list.iter().enumerate().map(read).collect()
}

impl InputRules<'_> {
    fn text(&self, path: &str, text: &str) -> Result<Vec<u32>, ApiError> {
        let max = self.cut.unwrap_or(self.how.max_tokens);
        if self.cut.is_none() {
            self.model
                .check_length(text, max)
                .map_err(|error| ApiError { param: Some("input".into()), ..error })?;
        }
        let (tokens, n_cut) = self.model.tokenizer().encode_cut(text, max).map_err(refrain::Error::from)?;
        match self.cut {
            None => self.check(path, tokens.len() + n_cut)?,
            Some(_) => self.check(path, tokens.len())?,
        }
        Ok(tokens)
    }

    fn tokens(&self, path: &str, list: &[Value]) -> Result<Vec<u32>, ApiError> {
        let n_vocab = self.model.n_vocab();
        let id =
            |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok()).filter(|v| (*v as usize) < n_vocab);
        let bad = |v: &Value| {
            let shown = if v.is_number() { v.to_string() } else { kind(v).to_owned() };
            let most = n_vocab.saturating_sub(1);
            let message = format!("{path} has {shown} in it, token ids are from 0 to {most}");
            // LangChain tokenizes with the vocabulary of OpenAI's models unless it is told not to.
            let hint = "send texts; for LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False";
            ApiError::invalid("input", message).hint(hint)
        };
        let mut tokens = list.iter().map(|v| id(v).ok_or_else(|| bad(v))).collect::<Result<Vec<_>, _>>()?;
        if let Some(max) = self.cut {
            tokens.truncate(max);
        }
        self.check(path, tokens.len())?;
        Ok(tokens)
    }

    fn check(&self, path: &str, n_tokens: usize) -> Result<(), ApiError> {
        let max = self.how.max_tokens;
        if n_tokens == 0 {
            return Err(
                ApiError::invalid("input", format!("{path} has no tokens")).hint("leave out empty texts")
            );
        }
        if n_tokens > max {
            let message = format!("{path} has {n_tokens} tokens, {} takes at most {max}", self.model.name());
            let error = ApiError::invalid("input", message)
                .hint("shorten the text, or set truncate_prompt_tokens to -1 to cut it");
            return Err(ApiError { code: Some("context_length_exceeded"), ..error });
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingItem<'a>>,
    model: &'a str,
    usage: Value,
}

#[derive(Serialize)]
struct EmbeddingItem<'a> {
    object: &'static str,
    index: usize,
    embedding: Written<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Written<'a> {
    Floats(&'a [f32]),
    Base64(String),
}

fn written(model: &ServedModel, vectors: &[Vec<f32>], encoding: Encoding, n_tokens: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(vectors.len());
    for (index, vector) in vectors.iter().enumerate() {
        let embedding = match encoding {
            Encoding::Float => Written::Floats(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                Written::Base64(STANDARD.encode(bytes))
            }
        };
        data.push(EmbeddingItem { object: "embedding", index, embedding });
    }
    let list = EmbeddingList {
        object: "list",
        data,
        model: model.name(),
        usage: json!({ "prompt_tokens": n_tokens, "total_tokens": n_tokens }),
    };
    let mut out = Vec::new();
    // Strings and finite numbers always become JSON.
    let _ = serde_json::to_writer(&mut out, &list);
    out
}
