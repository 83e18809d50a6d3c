//! The pump: collects the updates of all streams and writes them as frames.

use super::models::Models;
use super::{Link, spawn};
use crate::engine::{EngineFailure, Progress, TokenSource, VectorSource};
use crate::protocol::{
    self, FULL_FRAME_BYTES, FromWorker, LastWords, MAX_FROM_WORKER_BYTES, WireEvent, WireId,
};
use crate::tokens::{FinishedBy, TokenUpdate, VectorUpdate};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Updates of one stream in one pass. A stream with more stays ready, after the others.
const MAX_PER_PASS: usize = 16;

/// Handle to the pump's thread.
#[derive(Clone)]
pub(crate) struct Pump {
    shared: Arc<PumpShared>,
}

struct PumpShared {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    models: OnceLock<Arc<Models>>,
    link: Arc<Link>,
}

/// What the pump has to look at.
#[derive(Default)]
struct Inbox {
    added: Vec<AddedStream>,
    cancelled: Vec<WireId>,
    /// Streams with updates.
    ready: Vec<WireId>,
    /// Events that come from no stream.
    events: Vec<(WireId, WireEvent)>,
    is_asleep: bool,
}

struct AddedStream {
    id: WireId,
    model_idx: usize,
    source: Source,
}

/// Where the events of a stream come from.
pub(super) enum Source {
    Tokens(Box<dyn TokenSource>),
    Vectors { vectors: Box<dyn VectorSource>, n_left: usize },
}

impl Source {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<WireEvent, EngineFailure>>> {
        match self {
            Source::Tokens(tokens) => {
                tokens.poll_next(context).map(|item| item.map(|item| item.map(WireEvent::Update)))
            }
            Source::Vectors { vectors, n_left } => vectors.poll_next(context).map(|item| {
                item.map(|vector| {
                    *n_left = n_left.saturating_sub(1);
                    Ok(WireEvent::Vector(VectorUpdate { vector: vector?, is_last: *n_left == 0 }))
                })
            }),
        }
    }
}

impl PumpShared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, put: impl FnOnce(&mut Inbox)) {
        let mut inbox = self.lock();
        put(&mut inbox);
        // Waking a thread is a system call: once per pass is enough.
        let is_asleep = std::mem::take(&mut inbox.is_asleep);
        drop(inbox);
        if is_asleep {
            self.arrived.notify_one();
        }
    }
}

impl Pump {
    /// Starts the thread.
    pub(super) fn start(link: Arc<Link>, progress: Progress) -> io::Result<Pump> {
        let (inbox, arrived, models) = (Mutex::default(), Condvar::new(), OnceLock::new());
        let pump = Pump { shared: Arc::new(PumpShared { inbox, arrived, models, link: link.clone() }) };
        let shared = pump.shared.clone();
        let mut run = Run {
            shared,
            link,
            progress,
            streams: HashMap::new(),
            events: Vec::new(),
            n_bytes: 0,
            frame: Vec::new(),
            taken: Inbox::default(),
        };
        spawn("refrain-pump", move || run.serve())?;
        Ok(pump)
    }

    /// Tells the models when their streams end.
    pub(super) fn attend(&self, models: Arc<Models>) {
        // There is one call, before the first stream.
        let _ = self.shared.models.set(models);
    }

    pub(super) fn add(&self, id: WireId, model_idx: usize, source: Source) {
        self.shared.put(|inbox| {
            inbox.added.push(AddedStream { id, model_idx, source });
            inbox.ready.push(id);
        });
    }

    pub(super) fn cancel(&self, id: WireId) {
        self.shared.put(|inbox| inbox.cancelled.push(id));
    }

    /// Reports the failure of a request that has no stream.
    pub(super) fn fail(&self, id: WireId, failure: EngineFailure) {
        if let Some(event) = self.shared.link.event_of(failure) {
            self.report(id, event);
        }
    }

    pub(super) fn report(&self, id: WireId, event: WireEvent) {
        self.shared.put(|inbox| inbox.events.push((id, event)));
    }
}

/// A stream that the pump serves.
struct PumpedStream {
    model_idx: usize,
    source: Source,
    waker: Waker,
    wakes: Arc<StreamWaker>,
}

/// Puts a stream on the list of ready ones, once until the pump looks at it.
struct StreamWaker {
    id: WireId,
    is_listed: AtomicBool,
    shared: Arc<PumpShared>,
}

impl Wake for StreamWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.shared.put(|inbox| inbox.ready.push(self.id));
        }
    }
}

/// State of the pump's thread.
struct Run {
    shared: Arc<PumpShared>,
    link: Arc<Link>,
    progress: Progress,
    streams: HashMap<WireId, PumpedStream>,
    /// Events of the next frame, and an upper bound of their size.
    events: Vec<(WireId, WireEvent)>,
    n_bytes: usize,
    frame: Vec<u8>,
    /// Emptied after a pass, and exchanged for the next.
    taken: Inbox,
}

impl Run {
    fn serve(&mut self) {
        // The reader notices that the server is gone, and ends the worker.
        while self.pass().is_ok() {}
    }

    /// Waits until there is something to do, and does it.
    fn pass(&mut self) -> io::Result<()> {
        let mut inbox = self.wait();
        for (id, event) in inbox.events.drain(..) {
            self.push(id, event)?;
        }
        for AddedStream { id, model_idx, source } in inbox.added.drain(..) {
            let shared = self.shared.clone();
            let wakes = Arc::new(StreamWaker { id, is_listed: true.into(), shared });
            let stream = PumpedStream { model_idx, source, waker: wakes.clone().into(), wakes };
            self.streams.insert(id, stream);
        }
        for id in inbox.cancelled.drain(..) {
            // A request that has ended needs no second end.
            if self.end(id) {
                self.push(id, WireEvent::Update(TokenUpdate::End(FinishedBy::Cancelled)))?;
            }
        }
        for id in inbox.ready.drain(..) {
            self.collect(id)?;
        }
        self.taken = inbox;
        self.flush()
    }

    fn wait(&mut self) -> Inbox {
        let mut inbox = self.shared.lock();
        while inbox.ready.is_empty() && inbox.events.is_empty() && inbox.cancelled.is_empty() {
            inbox.is_asleep = true;
            inbox = self.shared.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        inbox.is_asleep = false;
        std::mem::replace(&mut inbox, std::mem::take(&mut self.taken))
    }

    /// Collects the updates of a stream.
    fn collect(&mut self, id: WireId) -> io::Result<()> {
        for _ in 0..MAX_PER_PASS {
            let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
            // From here on an update lists the stream again.
            stream.wakes.is_listed.store(false, Ordering::Release);
            let event = match stream.source.poll_next(&mut Context::from_waker(&stream.waker)) {
                Poll::Pending => return Ok(()),
                Poll::Ready(None) => {
                    self.end(id);
                    return Ok(());
                }
                Poll::Ready(Some(Ok(event))) => {
                    let is_token = matches!(event, WireEvent::Update(TokenUpdate::Token { .. }));
                    if let (true, Some(models)) = (is_token, self.shared.models.get()) {
                        models.count_token(stream.model_idx);
                    }
                    event
                }
                Poll::Ready(Some(Err(failure))) => match self.link.event_of(failure) {
                    Some(event) => event,
                    None => return Ok(()),
                },
            };
            // The model is idle before the server hears of the end.
            let is_last = event.is_last() && self.end(id);
            self.push(id, event)?;
            if is_last {
                return Ok(());
            }
        }
        if let Some(stream) = self.streams.get(&id) {
            stream.wakes.wake_by_ref();
        }
        Ok(())
    }

    /// Drops a stream, if it is there. Its model may be unloaded from then on.
    fn end(&mut self, id: WireId) -> bool {
        let Some(PumpedStream { model_idx, source, .. }) = self.streams.remove(&id) else { return false };
        drop(source);
        if let Some(models) = self.shared.models.get() {
            models.ended(model_idx);
        }
        true
    }

    /// Adds an event to the next frame, and writes a full one.
    fn push(&mut self, id: WireId, event: WireEvent) -> io::Result<()> {
        self.n_bytes += size_of_event(&event);
        self.events.push((id, event));
        if self.n_bytes >= FULL_FRAME_BYTES { self.flush() } else { Ok(()) }
    }

    /// Writes the events as one frame.
    fn flush(&mut self) -> io::Result<()> {
        if self.events.is_empty() {
            return Ok(());
        }
        self.progress.advance(self.events.len() as u64);
        self.n_bytes = 0;
        self.frame.clear();
        let message = FromWorker::Events(std::mem::take(&mut self.events));
        let encoded = protocol::encode(&message, MAX_FROM_WORKER_BYTES, &mut self.frame);
        if let FromWorker::Events(mut events) = message {
            events.clear();
            self.events = events;
        }
        if let Err(error) = encoded {
            let message = format!("the events of a step cannot be sent: {error}");
            self.link.fail(LastWords { lost_device: false, message, hint: None });
            return Err(io::Error::other(error));
        }
        self.link.write(&self.frame)
    }
}

/// An upper bound of an event's size on the wire.
fn size_of_event(event: &WireEvent) -> usize {
    // Ids, tags, tokens and lengths take at most ten bytes each.
    match event {
        WireEvent::Update(TokenUpdate::Token { top, .. }) => 44 + 9 * top.len(),
        WireEvent::Update(_) => 32,
        WireEvent::Vector(update) => 32 + size_of_val(&*update.vector),
        WireEvent::Refused(refusal) => {
            80 + refusal.message.len() + refusal.hint.as_ref().map_or(0, String::len)
        }
    }
}
