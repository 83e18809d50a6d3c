//! A model that turns texts into vectors, as an engine of a worker.

use crate::engine::{EngineFailure, TokenEngine, TokenSource, VectorSource, counts, failure, invalid};
use crate::tokens::{EmbedRequest, LoadStatus, TokenRequest};
use refrain::{EmbedOptions, Embedder, Error, Model, SessionOptions, StepKind, VectorStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

pub(crate) struct EmbedEngine {
    embedder: Embedder,
    n_open: Arc<AtomicUsize>,
}

impl EmbedEngine {
    pub(crate) fn new(model: &Model, session: SessionOptions) -> Result<EmbedEngine, Error> {
        let options = EmbedOptions { session, cuts: false, ..EmbedOptions::default() };
        Ok(EmbedEngine { embedder: Embedder::new(model, &options)?, n_open: Arc::default() })
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
        let stream = self.embedder.submit_tokens(request.inputs).map_err(|error| failure(&error))?;
        self.n_open.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(EmbedSource { stream, n_open: self.n_open.clone() }))
    }

    fn backend(&self) -> &str {
        self.embedder.backend()
    }

    fn load(&self) -> Result<LoadStatus, EngineFailure> {
        let ledger = self.embedder.ledger();
        Ok(LoadStatus {
            context: self.embedder.max_tokens(),
            n_running: self.n_open.load(Ordering::Relaxed),
            n_prompt_tokens: ledger.tally(StepKind::Embed).tokens,
            steps: counts(&ledger),
            ..LoadStatus::default()
        })
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
