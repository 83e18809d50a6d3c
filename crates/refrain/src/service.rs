//! A model on a device that serves many requests at once.

use crate::engines::{MonitoredEngine, Room, lone_engine};
use crate::error::Error;
use crate::generate::{Generate, Piece, Prompt, Summary, Writer};
use crate::model::Model;
use crate::session::SessionOptions;
use refrain_cuda::{Monitor, Status};
use refrain_engine::{Engine, EngineLoad, Ledger, Request};
use std::time::Instant;

/// How a service is laid out.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Where it runs, with the tokens that one request may have, prompt and reply together.
    pub session: SessionOptions,
    /// Requests that take part in one step, at most.
    pub max_seqs: usize,
    /// Requests that may be running or waiting; a further one is refused.
    pub max_requests: usize,
    /// Tokens that the KV cache holds for all of them; as many as all that run may have, but no more than 32,768 unless
    /// one needs that, when `None`.
    pub kv_tokens: Option<usize>,
}

impl Default for ServiceOptions {
    fn default() -> ServiceOptions {
        ServiceOptions {
            session: SessionOptions::default(),
            max_seqs: 32,
            max_requests: 1024,
            kv_tokens: None,
        }
    }
}

const USUAL_KV_TOKENS: usize = 32_768;

/// A model on a device that serves many requests at once, from any thread. Cloning gives another handle to it.
///
/// All requests that run share each step, so that the weights are read once for all of them. Requests with a common
/// beginning share its KV. Those for which there is no room wait.
///
/// ```no_run
/// # fn main() -> Result<(), refrain::Error> {
/// use refrain::{Generate, Model, Prompt, Service, ServiceOptions};
///
/// let service = Service::new(&Model::builtin()?, &ServiceOptions::default())?;
/// let stories: Vec<_> = ["Once upon a time", "The little dog"]
///     .iter()
///     .map(|text| service.submit(Prompt::Text(text), &Generate::default()))
///     .collect::<Result<_, _>>()?;
/// for story in stories {
///     println!("{}", story.text()?.0);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Service {
    model: Model,
    engine: Engine,
    monitor: Option<Monitor>,
    context: usize,
}

impl Service {
    /// Brings a model to a device.
    pub fn new(model: &Model, options: &ServiceOptions) -> Result<Service, Error> {
        let max_seqs = options.max_seqs.max(1);
        let room = |context: usize| Room {
            context,
            n_positions: options.kv_tokens.unwrap_or(USUAL_KV_TOKENS.min(max_seqs * context)),
            max_seqs,
            n_recurrent: max_seqs,
            max_requests: options.max_requests,
        };
        let (made, room) = lone_engine(model.weights(), model.name(), &options.session, room)?;
        model.files().release();
        let MonitoredEngine { engine, monitor, .. } = made;
        Ok(Service { model: model.clone(), engine, monitor, context: room.context })
    }

    /// Asks for text behind a prompt. What cannot be served is refused here; everything else shows in the reply.
    pub fn submit(&self, prompt: Prompt<'_>, options: &Generate) -> Result<Reply, Error> {
        let mut request = Request::once(prompt.tokens(&self.model)?);
        let mut writer = Writer::new(&self.model, &mut request, 0, options)?;
        writer.begin(self.engine.submit(request)?, Instant::now());
        Ok(Reply { writer, model: self.model.clone() })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// Tokens that one request may have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// How much it has to do at this moment.
    pub fn load(&self) -> Result<EngineLoad, Error> {
        Ok(self.engine.load()?)
    }

    /// How every step ran.
    pub fn ledger(&self) -> Result<Ledger, Error> {
        Ok(self.engine.ledger()?)
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}

/// What a service answers: an iterator over pieces of text. Dropping it cancels the request.
pub struct Reply {
    writer: Writer,
    model: Model,
}

impl Reply {
    /// What it took so far. Tokens of the prompt that were found in the cache count as evaluated.
    pub fn summary(&self) -> &Summary {
        &self.writer.summary
    }

    /// Waits for all of the text, and gives it with what it took.
    pub fn text(mut self) -> Result<(String, Summary), Error> {
        let mut text = String::new();
        for piece in self.by_ref() {
            text += &piece?.text;
        }
        Ok((text, self.writer.summary.clone()))
    }
}

impl Iterator for Reply {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Result<Piece, Error>> {
        self.writer.piece(&self.model, &mut |_, _| {})
    }
}
