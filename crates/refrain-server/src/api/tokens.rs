//! `/tokenize` and `/detokenize`, as vLLM has them.

use super::chat::read_template_options;
use super::conversation::{Conversation, read_messages, read_tools};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use axum::Json;
use axum::extract::{Request, State};
use refrain::RenderOptions;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    app.read(request, read).await.map(Json)
}

/// A text, or a conversation as the chat template renders it. Blocks.
fn read(app: &App, body: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::body(body)?;
    let model = app.models.find(fields.string("model")?.as_deref())?;
    // Longer texts than the context may be counted, within the limit on bodies.
    let context = model.context(&app.backend.status());
    let any_length = usize::MAX >> 8;
    let (prompt, messages) = (fields.string("prompt")?, fields.list("messages")?);
    let tokens = match (prompt, messages) {
        (Some(text), None) => match fields.bool("add_special_tokens")?.unwrap_or(true) {
            true => model.text_tokens(&text, any_length)?,
            false => model.tokenizer().encode(&text, false, false).map_err(refrain::Error::from)?,
        },
        (None, Some(list)) => {
            let mut options = RenderOptions::default();
            read_template_options(&mut fields, &mut options)?;
            let (messages, tools) = (read_messages(list)?, read_tools(&mut fields)?);
            let conversation = Conversation { messages, tools, options, ..Conversation::default() };
            conversation.render(&model, any_length)?.tokens
        }
        _ => {
            let error = ApiError::invalid("prompt", "either prompt or messages must be given");
            return Err(error);
        }
    };
    let with_texts = fields.bool("return_token_strs")?.unwrap_or(false);
    fields.finish()?;
    let texts = with_texts.then(|| tokens.iter().map(|token| model.token_text(*token).0).collect::<Vec<_>>());
    Ok(json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens, "token_strs": texts }))
}

pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    app.read(request, |app, body| {
        let mut fields = Fields::body(body)?;
        let model = app.models.find(fields.string("model")?.as_deref())?;
        let tokens = fields.token_ids("tokens")?;
        let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
        fields.finish()?;
        let n_vocab = model.n_vocab();
        if let Some(token) = tokens.iter().find(|token| **token as usize >= n_vocab) {
            let message =
                format!("tokens has {token} in it, token ids are from 0 to {}", n_vocab.saturating_sub(1));
            return Err(ApiError::invalid("tokens", message));
        }
        let text = model.tokenizer().decode_with_special(&tokens).map_err(refrain::Error::from)?;
        Ok(Json(json!({ "prompt": text })))
    })
    .await
}
