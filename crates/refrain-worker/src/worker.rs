//! A worker: the process that owns a device and serves the requests of one server.
//!
//! ```text
//!  socket ──► reader ──submit──► engine of a model ──wakes──► pump ──one frame per step──► socket
//!                └──not loaded──► loader ──waiting requests──►          heartbeat ────────►
//! ```
//!
//! No thread waits for a client, and none per request exists. The engine's thread wakes the pump once a step's results are
//! out; the pump collects them from all streams and writes one frame. A worker ends when its socket closes, so it never
//! outlives its server.

mod models; // loading, unloading, waiting requests
mod pump; // from streams to frames
mod pulse; // heartbeats and the load

use crate::engine::{EngineFailure, Progress, Shelf};
use crate::error::WorkerError;
use crate::protocol::{self, FrameBuffer, FromWorker, LastWords, MAX_FROM_WORKER_BYTES, ToWorker, WireEvent};
use crate::tokens::FinishedBy;
use models::{Models, Work};
use pump::Pump;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Options of a worker.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The socket on which the server listens for this worker.
    pub socket: PathBuf,
    /// Maximum memory of the loaded models in bytes: their weights and caches. Without a limit, a model is unloaded only
    /// when the device refuses memory for another one.
    pub memory_budget: Option<u64>,
    /// Time between two heartbeats.
    pub heartbeat: Duration,
    /// The build in the hello, which must be the server's.
    pub build: String,
}

impl WorkerOptions {
    /// The usual options.
    pub fn new(socket: impl Into<PathBuf>) -> WorkerOptions {
        WorkerOptions {
            socket: socket.into(),
            memory_budget: None,
            heartbeat: Duration::from_millis(200),
            build: protocol::build().to_owned(),
        }
    }
}

/// Serves the server behind a socket until it closes the socket. The process must exit after an error: threads may still be
/// stuck in a lost device.
pub fn run_worker(shelf: impl Shelf, options: &WorkerOptions) -> Result<(), WorkerError> {
    let path = &options.socket;
    let broken = |source| WorkerError::Socket { path: path.clone(), source };
    let mut socket = UnixStream::connect(path).map_err(broken)?;
    let link = Arc::new(Link::new(socket.try_clone().map_err(broken)?));
    let mut buffer = FrameBuffer::new(protocol::MAX_TO_WORKER_BYTES);
    link.write(&protocol::hello(&options.build)).map_err(broken)?;
    loop {
        match fill(&mut socket, &mut buffer).map_err(broken)? {
            0 => return Ok(()),
            _ if buffer.next_hello(&options.build)? => break,
            _ => {}
        }
    }
    let progress = Progress::default();
    let pump = Pump::start(link.clone(), progress.clone()).map_err(WorkerError::Thread)?;
    let models = Models::new(&shelf.titles(), options.memory_budget, pump.clone());
    pump.attend(models.clone());
    pulse::start(models.clone(), link.clone(), progress.clone(), options.heartbeat)
        .map_err(WorkerError::Thread)?;
    models.start_loader(shelf, link.clone(), progress).map_err(WorkerError::Thread)?;
    let served = serve(&mut socket, &mut buffer, &models, &pump, path);
    match link.last_words() {
        // The socket was closed by the failure itself.
        Some(words) => Err(words.into()),
        None => served,
    }
}

/// Handles messages until the server closes the socket.
fn serve(
    socket: &mut UnixStream,
    buffer: &mut FrameBuffer,
    models: &Models,
    pump: &Pump,
    path: &Path,
) -> Result<(), WorkerError> {
    loop {
        while let Some(message) = buffer.next::<ToWorker<'static>>()? {
            match message {
                ToWorker::Submit { id, n_delivered, request } => {
                    models.submit(id, Work::Tokens { request: request.into_owned(), n_delivered });
                }
                ToWorker::Embed { id, request } => {
                    models.submit(id, Work::Vectors { request: request.into_owned() });
                }
                ToWorker::Cancel { id } => match models.cancel_waiting(id) {
                    true => {
                        pump.report(id, WireEvent::Update(crate::TokenUpdate::End(FinishedBy::Cancelled)))
                    }
                    false => pump.cancel(id),
                },
            }
        }
        match fill(socket, buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if is_gone(&error) => return Ok(()),
            Err(source) => return Err(WorkerError::Socket { path: path.to_owned(), source }),
        }
    }
}

/// Reads what has arrived; 0 at the end.
fn fill(socket: &mut UnixStream, buffer: &mut FrameBuffer) -> io::Result<usize> {
    loop {
        match socket.read(buffer.spare()) {
            Ok(n) => {
                buffer.filled(n);
                return Ok(n);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether the server is gone.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// The socket's writing end, which several threads share.
pub(crate) struct Link {
    socket: Mutex<UnixStream>,
    closer: Option<UnixStream>,
    last_words: Mutex<Option<LastWords>>,
}

impl Link {
    fn new(socket: UnixStream) -> Link {
        // A second handle closes the socket while a write waits in the first.
        let closer = socket.try_clone().ok();
        Link { socket: Mutex::new(socket), closer, last_words: Mutex::new(None) }
    }

    /// Writes whole frames. An error means that the server is gone, which the reader notices as well.
    pub(crate) fn write(&self, frames: &[u8]) -> io::Result<()> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).write_all(frames)
    }

    pub(crate) fn send(&self, message: &FromWorker) {
        let mut frame = Vec::new();
        match protocol::encode(message, MAX_FROM_WORKER_BYTES, &mut frame) {
            // The reader notices that the server is gone.
            Ok(()) => drop(self.write(&frame)),
            Err(error) => tracing::error!(%error, "a message to the server is lost"),
        }
    }

    /// Ends the worker: reports why, and lets the reader find the socket closed.
    pub(crate) fn fail(&self, words: LastWords) {
        let mut last = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some() {
            return;
        }
        *last = Some(words.clone());
        drop(last);
        self.send(&FromWorker::Failed(words));
        if let Some(closer) = &self.closer {
            // It may be closed already.
            let _ = closer.shutdown(std::net::Shutdown::Both);
        }
    }

    fn last_words(&self) -> Option<LastWords> {
        self.last_words.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The event of a failed request. A failure of the engine ends the worker, and the request goes on in another one.
    pub(crate) fn event_of(&self, failure: EngineFailure) -> Option<WireEvent> {
        match failure {
            EngineFailure::Refused(refusal) => Some(WireEvent::Refused(refusal)),
            EngineFailure::Unusable(words) => {
                self.fail(words);
                None
            }
        }
    }
}

/// Starts a thread that ends with the process.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.into()).spawn(run).map(drop)
}
