//! Served models: names, tokenizers, chat templates and defaults.

use crate::error::{ApiError, ServeError};
use crate::ids;
use axum::http::StatusCode;
use refrain::{ChatTemplate, Message, Model, RenderOptions, SamplingParams, Tokenizer};
use refrain_worker::BackendStatus;
use std::sync::Arc;

/// A model under the name that clients use. Its weights stay in the mapped file: the server only tokenizes.
pub struct ServedModel {
    name: String,
    model: Model,
    /// The model that an adapter is applied to.
    base: Option<String>,
    /// Replaces the model's own template.
    template: Option<ChatTemplate>,
    created: u64,
}

impl ServedModel {
    /// A model by name.
    pub fn new(name: impl Into<String>, model: Model) -> ServedModel {
        ServedModel { name: name.into(), model, base: None, template: None, created: ids::unix_seconds() }
    }

    /// The model with an adapter; tokenizer and template are those of the base.
    #[must_use]
    pub fn with_base(self, base: impl Into<String>) -> ServedModel {
        ServedModel { base: Some(base.into()), ..self }
    }

    /// Replaces the chat template.
    #[must_use]
    pub fn with_template(self, template: ChatTemplate) -> ServedModel {
        ServedModel { template: Some(template), ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }

    pub(crate) fn n_vocab(&self) -> usize {
        self.model.config().n_vocab
    }

    /// The authors' recommendations with a random seed.
    pub(crate) fn sampling(&self) -> SamplingParams {
        self.model.sampling()
    }

    /// Maximum number of tokens of a request: what the workers say, or what the model was trained for.
    pub(crate) fn context(&self, status: &BackendStatus) -> usize {
        let loads = status.workers.iter().flat_map(|worker| &worker.models);
        let of_workers = loads.filter(|load| load.model == self.name && load.context > 0);
        of_workers.map(|load| load.context).min().unwrap_or(self.model.config().n_context)
    }

    /// Whether conversations can be rendered.
    pub(crate) fn has_template(&self) -> bool {
        self.template.is_some() || self.model.chat_template().is_some()
    }

    /// Renders a conversation. Blocks.
    pub(crate) fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ApiError> {
        let rendered = match &self.template {
            Some(template) => template.render(messages, options).map_err(refrain::Error::from),
            None => self.model.render(messages, options),
        };
        rendered.map_err(|error| match &error {
            refrain::Error::NoChatTemplate { .. } => {
                ApiError::invalid("model", error.to_string()).hint("use /v1/completions for this model")
            }
            _ => ApiError { param: Some("messages".into()), ..ApiError::from(error) },
        })
    }

    /// Tokenizes a rendered conversation. Blocks.
    pub(crate) fn chat_tokens(&self, rendered: &str, context: usize) -> Result<Vec<u32>, ApiError> {
        self.check_length(rendered, context)?;
        Ok(self.tokenizer().encode_chat(rendered).map_err(refrain::Error::from)?)
    }

    /// Tokenizes a text with the tokens that the model expects before it. Blocks.
    pub(crate) fn text_tokens(&self, text: &str, context: usize) -> Result<Vec<u32>, ApiError> {
        self.check_length(text, context)?;
        Ok(self.model.text_tokens(text)?)
    }

    fn check_length(&self, text: &str, context: usize) -> Result<(), ApiError> {
        self.model.check_length(text.len(), context).map_err(|error| ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::from(error).hint("shorten the prompt")
        })
    }

    /// The text of a token, which may be an incomplete character.
    pub(crate) fn token_text(&self, token: u32) -> (String, &[u8]) {
        let bytes = self.tokenizer().piece(token).unwrap_or_default();
        (String::from_utf8_lossy(bytes).into_owned(), bytes)
    }
}

/// All served models.
pub(crate) struct Models {
    all: Vec<Arc<ServedModel>>,
}

impl Models {
    pub(crate) fn new(models: Vec<ServedModel>) -> Result<Models, ServeError> {
        for (idx, model) in models.iter().enumerate() {
            if models.iter().take(idx).any(|other| other.name == model.name) {
                return Err(ServeError::SameName { name: model.name.clone() });
            }
        }
        Ok(Models { all: models.into_iter().map(Arc::new).collect() })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<ServedModel>> {
        self.all.iter()
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.all.iter().map(|model| model.name.as_str()).collect()
    }

    /// A model by name; the first one if a request names none.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let found = match name {
            None => self.all.first(),
            Some(name) => self.all.iter().find(|model| model.name == name),
        };
        found.cloned().ok_or_else(|| {
            let name: String = name.unwrap_or_default().chars().take(200).collect();
            let message = format!("the model `{name}` is not served");
            let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
            let served = self.names().join(", ");
            ApiError { param: Some("model".into()), ..error }.hint(format!("served models: {served}"))
        })
    }
}
