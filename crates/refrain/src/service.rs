//! Services: a model on a device that serves many requests at once.

use crate::engines::{EngineCapacity, MonitoredEngine, lone_engine, needed_bytes};
use crate::error::Error;
use crate::generate::{Generate, Prompt, Summary, TextDelta, Writer};
use crate::model::Model;
use crate::session::SessionOptions;
use crate::speculation::SpeculationOptions;
use refrain_cuda::{Monitor, Status};
use refrain_engine::{Engine, EngineLoad, Ledger, Request, TokenStream};
use std::time::Instant;

/// Options of a service.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Device and cache. The context is that of one request, prompt and reply together.
    pub session: SessionOptions,
    /// Maximum number of sequences in one step.
    pub max_seqs: usize,
    /// Maximum number of running and waiting requests; further ones are refused.
    pub max_requests: usize,
    /// Capacity of the KV cache in tokens, for all requests. When `None`: enough for all sequences of a step, up to 32,768
    /// or the context of one request.
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

impl ServiceOptions {
    pub(crate) fn capacity(&self, context: usize) -> EngineCapacity {
        let max_seqs = self.max_seqs.max(1);
        EngineCapacity {
            context,
            n_positions: self.kv_tokens.unwrap_or(USUAL_KV_TOKENS.min(max_seqs.saturating_mul(context))),
            max_seqs,
            n_recurrent: max_seqs,
            max_requests: self.max_requests,
        }
    }
}

/// A model on a device that serves many requests at once, from any thread. Clones are handles to the same service.
///
/// Running requests share each step, so that the weights are read once for all of them. Requests with a common prefix
/// share its KV blocks. Requests wait while the KV cache has no space for them.
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
    speculation: SpeculationOptions,
}

impl Service {
    /// Loads a model onto a device.
    pub fn new(model: &Model, options: &ServiceOptions) -> Result<Service, Error> {
        let speculation = options.session.speculation.clone();
        speculation.check_tokens(model)?;
        let room = |context| options.capacity(context);
        let (made, room) = lone_engine(model.weights(), model.name(), &options.session, room)?;
        model.files().release();
        let MonitoredEngine { engine, monitor, .. } = made;
        Ok(Service { model: model.clone(), engine, monitor, context: room.context, speculation })
    }

    /// The bytes that the weights and the KV cache of a service take, with those of its draft model. Activations and kernels
    /// come on top.
    pub fn memory_needs(model: &Model, options: &ServiceOptions) -> Result<u64, Error> {
        let room = |context| options.capacity(context);
        needed_bytes(model.weights(), model.name(), &options.session, room)
    }

    /// Submits a prompt. A request that can never be served is refused here; later errors are returned by the reply.
    pub fn submit(&self, prompt: Prompt<'_>, options: &Generate) -> Result<Reply, Error> {
        let mut request = Request::once(prompt.tokens(&self.model, self.context)?);
        request.speculation = self.speculation.of_request();
        let mut writer = Writer::new(&self.model, &mut request, 0, options)?;
        writer.begin(self.engine.submit(request)?, Instant::now());
        Ok(Reply { writer, model: self.model.clone() })
    }

    /// Submits a request for tokens. A request that can never be served is refused here; later errors are returned by the
    /// stream. A request without speculation gets that of the service.
    pub fn submit_tokens(&self, mut request: Request) -> Result<TokenStream, Error> {
        request.speculation = request.speculation.or_else(|| self.speculation.of_request());
        Ok(self.engine.submit(request)?)
    }

    pub(crate) fn monitored_engine(&self) -> (&Engine, Option<&Monitor>) {
        (&self.engine, self.monitor.as_ref())
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// Maximum number of tokens of one request, prompt and reply together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The number of running and waiting requests, and of KV blocks in use.
    pub fn load(&self) -> Result<EngineLoad, Error> {
        Ok(self.engine.load()?)
    }

    /// The ledger of all steps: how many were replayed, and why others were not.
    pub fn ledger(&self) -> Result<Ledger, Error> {
        Ok(self.engine.ledger()?)
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}

/// The reply to a request: an iterator over its text. Dropping it cancels the request.
pub struct Reply {
    writer: Writer,
    model: Model,
}

impl Reply {
    /// Measurements so far. Prompt tokens that were found in the cache count as evaluated.
    pub fn summary(&self) -> &Summary {
        &self.writer.summary
    }

    /// Waits for the whole text and returns it with its measurements.
    pub fn text(mut self) -> Result<(String, Summary), Error> {
        let mut text = String::new();
        for piece in self.by_ref() {
            text += &piece?.text;
        }
        Ok((text, self.writer.summary.clone()))
    }
}

impl Iterator for Reply {
    type Item = Result<TextDelta, Error>;

    fn next(&mut self) -> Option<Result<TextDelta, Error>> {
        self.writer.next(&self.model)
    }
}
