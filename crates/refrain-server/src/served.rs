//! Served models: names, tokenizers, chat templates and defaults.

use crate::error::{ApiError, ServeError};
use crate::ids;
use axum::http::StatusCode;
use refrain::{ChatTemplate, EmbeddingUse, Message, Model, RenderOptions, SamplingParams, Tokenizer};
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
    /// How it embeds texts, if it does that instead of generating some.
    embedding: Option<EmbeddingUse>,
    created: u64,
}

impl ServedModel {
    /// A model by name.
    pub fn new(name: impl Into<String>, model: Model) -> Result<ServedModel, refrain::Error> {
        let (embedding, created) = (model.embedding()?, ids::unix_seconds());
        Ok(ServedModel { name: name.into(), model, base: None, template: None, embedding, created })
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

    /// How it embeds texts; `None` if it generates text.
    pub(crate) fn embedding(&self) -> Option<EmbeddingUse> {
        self.embedding
    }

    /// Refuses a model that generates no text.
    pub(crate) fn check_generates(&self) -> Result<(), ApiError> {
        if self.embedding.is_none() {
            return Ok(());
        }
        let message = format!("the model {} turns texts into vectors and generates no text", self.name);
        Err(ApiError::invalid("model", message).hint("use /v1/embeddings for it, or name another model"))
    }

    /// Elements of a vector of a text.
    pub(crate) fn n_elements(&self) -> usize {
        self.model.config().hidden
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
        // Adapters are part of their model's load.
        let loaded = self.base.as_ref().unwrap_or(&self.name);
        let of_workers = loads.filter(|load| load.model == *loaded && load.context > 0);
        let own = self.embedding.map_or(self.model.config().n_context, |how| how.max_tokens);
        of_workers.map(|load| load.context).min().unwrap_or(own)
    }

    /// Whether conversations can be rendered.
    pub(crate) fn has_template(&self) -> bool {
        self.template.is_some() || self.model.chat_template().is_some()
    }

    /// Renders a conversation. Blocks.
    pub(crate) fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ApiError> {
        self.check_generates()?;
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

    pub(crate) fn check_length(&self, text: &str, context: usize) -> Result<(), ApiError> {
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

    /// The names without those of adapters, whose requests count for the model that they share.
    pub(crate) fn loaded_names(&self) -> Vec<&str> {
        let loaded = self.all.iter().filter(|model| model.base().is_none());
        loaded.map(|model| model.name.as_str()).collect()
    }

    /// A model that embeds texts, by name; the first one if a request names none.
    pub(crate) fn find_embedding(
        &self,
        name: Option<&str>,
    ) -> Result<(Arc<ServedModel>, EmbeddingUse), ApiError> {
        let first = || self.all.iter().find(|model| model.embedding.is_some()).cloned();
        let found = match name {
            Some(_) => self.find(name)?,
            None => first().map_or_else(|| self.find(None), Ok)?,
        };
        if let Some(how) = found.embedding {
            return Ok((found, how));
        }
        let message =
            format!("the model {} generates text, and its files do not say how it embeds texts", found.name);
        let hint = match first() {
            Some(model) => format!("use the model {}", model.name),
            None => {
                "serve an embedding model beside it: refrain serve chat=MODEL embed=all-MiniLM-L6-v2".into()
            }
        };
        Err(ApiError::invalid("model", message).hint(hint))
    }

    /// A model by name; the first one that generates text if a request names none.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let found = match name {
            None => self.all.iter().find(|model| model.embedding.is_none()).or(self.all.first()),
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
