//! A model that turns texts into vectors, as an engine of a worker.

use crate::engine::{EngineFailure, TokenEngine, TokenSource, VectorSource, counts, failure, invalid};
use crate::tokens::{EmbedRequest, LoadStatus, TokenRequest};
use refrain::{EmbedOptions, Embedder, Error, Model, SessionOptions, StepKind, VectorStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

pub(crate) struct EmbedEngine {
    /// The model itself, then one for each of its adapters, by name.
    embedders: Vec<(String, Embedder)>,
    n_open: Arc<AtomicUsize>,
}

impl EmbedEngine {
    /// Loads at least one model.
    pub(crate) fn new(models: &[(String, Model)], session: &SessionOptions) -> Result<EmbedEngine, Error> {
        let options = EmbedOptions { session: session.clone(), cuts: false, ..EmbedOptions::default() };
        let embedder = |(name, model): &(String, Model)| Ok((name.clone(), Embedder::new(model, &options)?));
        let embedders = models.iter().map(embedder).collect::<Result<Vec<_>, Error>>()?;
        Ok(EmbedEngine { embedders, n_open: Arc::default() })
    }
}

impl TokenEngine for EmbedEngine {
    fn submit(&self, request: TokenRequest, _: usize) -> Result<Box<dyn TokenSource>, EngineFailure> {
        Err(invalid(
            format!("{} turns texts into vectors and generates no text", request.model),
            "use /v1/embeddings for this model",
        ))
    }

    fn embed(&self, request: EmbedRequest) -> Result<Box<dyn VectorSource>, EngineFailure> {
        let named = self.embedders.iter().find(|(name, _)| *name == request.model);
        let Some((_, embedder)) = named else { unreachable!("{} is not this model", request.model) };
        let stream = embedder.submit_tokens(request.inputs).map_err(|error| failure(&error))?;
        self.n_open.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(EmbedSource { stream, n_open: self.n_open.clone() }))
    }

    fn backend(&self) -> &str {
        self.embedders[0].1.backend()
    }

    fn load(&self) -> Result<LoadStatus, EngineFailure> {
        let mut load = LoadStatus {
            context: self.embedders[0].1.max_tokens(),
            n_running: self.n_open.load(Ordering::Relaxed),
            ..LoadStatus::default()
        };
        for (_, embedder) in &self.embedders {
            let ledger = embedder.ledger();
            let (n_prompt_tokens, steps) = (ledger.tally(StepKind::Embed).tokens, counts(&ledger));
            load.add_counts(&LoadStatus { n_prompt_tokens, steps, ..LoadStatus::default() });
        }
        Ok(load)
    }
}

struct EmbedSource {
    stream: VectorStream,
    n_open: Arc<AtomicUsize>,
}

impl VectorSource for EmbedSource {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Vec<f32>, EngineFailure>>> {
        let item = self.stream.poll_next(context);
        item.map(|item| Some(item?.map_err(|error| failure(&Error::Engine(error)))))
    }
}

impl Drop for EmbedSource {
    fn drop(&mut self) {
        self.n_open.fetch_sub(1, Ordering::Relaxed);
    }
}
