//! An engine of this process as the target of a load.

use super::{LoadRequest, LoadState, LoadTarget, RequestProgress};
use crate::bench::BenchTarget;
use crate::engines::{MonitoredEngine, lone_engine};
use crate::error::Error;
use crate::service::{Service, ServiceOptions};
use refrain_cuda::{Monitor, Status};
use refrain_engine::{Engine, EngineError, Ledger, Request, SamplingParams, TokenEvent, TokenStream};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;

/// Sends a load to an engine of this process. One thread reads all replies, so that the load takes little of the machine it
/// measures.
pub struct LocalLoad {
    name: String,
    engine: Engine,
    monitor: Option<Monitor>,
    to_pump: Sender<PumpCall>,
    pump: Option<JoinHandle<()>>,
}

enum PumpCall {
    Send(LoadRequest, RequestProgress),
    Ready(u64),
    Stop,
}

impl LocalLoad {
    /// Loads a model onto a device for the load alone. The model needs no tokenizer.
    pub fn open(
        target: &BenchTarget<'_>,
        options: &ServiceOptions,
        mut progress: impl FnMut(&str),
    ) -> Result<LocalLoad, Error> {
        let (name, weights) = target.load(&mut progress)?;
        progress("loading the model");
        let room = |context| options.capacity(context);
        let (made, _) = lone_engine(&weights, &name, &options.session, room)?;
        target.release();
        let MonitoredEngine { engine, monitor, .. } = made;
        LocalLoad::new(name, engine, monitor)
    }

    /// Sends the load to a service, alongside its other requests.
    pub fn of_service(service: &Service) -> Result<LocalLoad, Error> {
        let (engine, monitor) = service.monitored_engine();
        LocalLoad::new(service.model().name().to_owned(), engine.clone(), monitor.cloned())
    }

    fn new(name: String, engine: Engine, monitor: Option<Monitor>) -> Result<LocalLoad, Error> {
        let (to_pump, calls) = channel();
        let pump = LoadPump { engine: engine.clone(), to_self: to_pump.clone(), open: BTreeMap::new() };
        let thread = std::thread::Builder::new().name("refrain-load".into()).spawn(move || pump.run(&calls));
        let thread = thread.map_err(EngineError::Thread)?;
        Ok(LocalLoad { name, engine, monitor, to_pump, pump: Some(thread) })
    }

    /// Name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of different tokens.
    pub fn n_vocab(&self) -> usize {
        self.engine.model().config().n_vocab
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// How the steps ran.
    pub fn ledger(&self) -> Result<Ledger, Error> {
        Ok(self.engine.ledger()?)
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}

impl LoadTarget for LocalLoad {
    fn send(&self, request: LoadRequest, progress: RequestProgress) {
        if let Err(unsent) = self.to_pump.send(PumpCall::Send(request, progress))
            && let PumpCall::Send(_, progress) = unsent.0
        {
            progress.fail("the thread that reads replies has ended".into());
        }
    }

    fn state(&self) -> Option<LoadState> {
        let load = self.engine.load().ok()?;
        let kv_used = load.blocks.used as f64 / load.blocks.total.max(1) as f64;
        Some(LoadState { n_running: load.n_running, n_waiting: load.n_waiting, kv_used })
    }
}

impl Drop for LocalLoad {
    fn drop(&mut self) {
        // A thread that has ended needs no message, and its panic cannot be reported here.
        let _ = self.to_pump.send(PumpCall::Stop);
        if let Some(thread) = self.pump.take() {
            let _ = thread.join();
        }
    }
}

struct LoadPump {
    engine: Engine,
    to_self: Sender<PumpCall>,
    open: BTreeMap<u64, OpenStream>,
}

struct OpenStream {
    stream: TokenStream,
    progress: RequestProgress,
    waker: Waker,
}

/// Tells the pump that a stream has events. The engine's thread calls it.
struct StreamWaker {
    id: u64,
    to_pump: Mutex<Sender<PumpCall>>,
}

impl Wake for StreamWaker {
    fn wake(self: Arc<Self>) {
        let to_pump = self.to_pump.lock().unwrap_or_else(PoisonError::into_inner);
        // The pump ends only when nobody waits for its streams.
        let _ = to_pump.send(PumpCall::Ready(self.id));
    }
}

impl LoadPump {
    fn run(mut self, calls: &Receiver<PumpCall>) {
        let mut next = 0;
        for call in calls {
            match call {
                PumpCall::Send(request, progress) => {
                    next += 1;
                    self.submit(next, request, progress);
                }
                PumpCall::Ready(id) => self.read(id),
                PumpCall::Stop => return,
            }
        }
    }

    fn submit(&mut self, id: u64, request: LoadRequest, progress: RequestProgress) {
        let mut once = Request::once(request.prompt);
        (once.sampling, once.max_tokens) = (SamplingParams::greedy(), request.n_reply);
        match self.engine.submit(once) {
            Err(error) => progress.fail(error.to_string()),
            Ok(stream) => {
                let to_pump = Mutex::new(self.to_self.clone());
                let waker = Waker::from(Arc::new(StreamWaker { id, to_pump }));
                self.open.insert(id, OpenStream { stream, progress, waker });
                self.read(id);
            }
        }
    }

    /// Reads everything that has arrived.
    fn read(&mut self, id: u64) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let mut n_tokens = 0;
        let ended = loop {
            match open.stream.poll_next(&mut Context::from_waker(&open.waker)) {
                Poll::Pending => break None,
                Poll::Ready(Some(Ok(TokenEvent::Token { .. }))) => n_tokens += 1,
                Poll::Ready(Some(Ok(TokenEvent::Prompt { .. }))) => {}
                Poll::Ready(Some(Ok(TokenEvent::End(_))) | None) => break Some(Ok(())),
                Poll::Ready(Some(Err(error))) => break Some(Err(error)),
            }
        };
        if n_tokens > 0 {
            open.progress.tokens(n_tokens);
        }
        let Some(ended) = ended else { return };
        let Some(open) = self.open.remove(&id) else { return };
        match ended {
            Ok(()) => open.progress.end(),
            Err(error) => open.progress.fail(error.to_string()),
        }
    }
}
