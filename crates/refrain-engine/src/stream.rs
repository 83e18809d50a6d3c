//! Channel from the engine's thread to the consumer of a request.
//!
//! The engine never waits for a consumer: it pushes an event into a queue and continues. The queue is bounded
//! because a request has at most one event per token and per prompt chunk, and the context bounds both.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::request::{Pace, RequestId, TokenEvent, lock};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

type StreamItem = Result<TokenEvent, EngineError>;

/// The events of a request in order, then an end or an error, then nothing.
///
/// The iterator blocks. [`TokenStream::try_next`], [`TokenStream::next_timeout`] and
/// [`TokenStream::poll_next`] are for consumers that must not. Dropping the stream cancels the request.
pub struct TokenStream {
    channel: Arc<Channel>,
    engine: Engine,
    id: RequestId,
    is_over: bool,
}

impl TokenStream {
    pub(crate) fn new(channel: Arc<Channel>, engine: Engine, id: RequestId) -> TokenStream {
        TokenStream { channel, engine, id, is_over: false }
    }

    /// Identifies the request, for [`Engine::cancel`].
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Whether the end or an error was returned.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns the next event if it is available.
    pub fn try_next(&mut self) -> Option<StreamItem> {
        self.ask();
        let item = lock(&self.channel.state).pop();
        self.note(item)
    }

    /// Returns the next event if it arrives in time. Also `None` after the last event: see
    /// [`TokenStream::is_over`].
    pub fn next_timeout(&mut self, timeout: Duration) -> Option<StreamItem> {
        self.wait(Some(timeout))
    }

    /// The next event for async code, like `Stream::poll_next`. The engine's thread calls the waker, which
    /// must not block.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamItem>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        self.ask();
        let mut state = lock(&self.channel.state);
        match state.pop() {
            Some(item) => {
                drop(state);
                Poll::Ready(self.note(Some(item)))
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Cancels the request, and waits until it has ended and its sequence is free. Unread events are lost.
    pub fn stop(&mut self) {
        if !self.is_over {
            self.engine.cancel(self.id);
            while self.wait(None).is_some() {}
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Option<StreamItem> {
        if self.is_over {
            return None;
        }
        self.ask();
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let item = self.channel.wait(until);
        self.note(item)
    }

    /// Requests one more event, and wakes the engine if it waits for that.
    fn ask(&self) {
        if !self.is_over && lock(&self.channel.state).ask() {
            self.engine.wake();
        }
    }

    fn note(&mut self, item: Option<StreamItem>) -> Option<StreamItem> {
        self.is_over |= matches!(&item, Some(Ok(TokenEvent::End(_)) | Err(_)));
        item
    }
}

impl Iterator for TokenStream {
    type Item = StreamItem;

    fn next(&mut self) -> Option<StreamItem> {
        self.wait(None)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.is_over {
            self.engine.cancel(self.id);
        }
    }
}

/// Queue of one request's events.
pub(crate) struct Channel {
    state: Mutex<ChannelState>,
    arrived: Condvar,
}

struct ChannelState {
    events: VecDeque<StreamItem>,
    pace: Pace,
    n_pushed: usize,
    n_collected: usize,
    /// Events that the consumer has requested, including those it received.
    n_requested: usize,
    /// Number of events that may be buffered without being requested; tokens have a lead, prompt chunks have
    /// none.
    lead: usize,
    /// The engine is paused until the consumer requests more.
    is_paused: bool,
    is_cancelled: bool,
    /// A consumer sleeps until an event arrives.
    is_awaited: bool,
    waker: Option<Waker>,
}

/// What the consumer of a request wants the engine to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    GoOn,
    Pause,
    Cancel,
}

impl ChannelState {
    fn demand(&mut self) -> Demand {
        let has_enough =
            matches!(self.pace, Pace::OnDemand { .. }) && self.n_pushed >= self.n_requested + self.lead;
        self.is_paused = has_enough && !self.is_cancelled;
        match (self.is_cancelled, has_enough) {
            (true, _) => Demand::Cancel,
            (false, true) => Demand::Pause,
            (false, false) => Demand::GoOn,
        }
    }

    /// Requests one more event; true if the engine must be woken.
    fn ask(&mut self) -> bool {
        self.n_requested = self.n_collected + 1;
        self.is_paused && self.demand() == Demand::GoOn
    }

    fn pop(&mut self) -> Option<StreamItem> {
        let item = self.events.pop_front();
        self.n_collected += usize::from(item.is_some());
        item
    }
}

impl Channel {
    pub(crate) fn new(pace: Pace) -> Channel {
        let state = ChannelState {
            events: VecDeque::new(),
            pace,
            n_pushed: 0,
            n_collected: 0,
            n_requested: 0,
            lead: 0,
            is_paused: false,
            is_cancelled: false,
            is_awaited: false,
            waker: None,
        };
        Channel { state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Pushes an event and returns the consumer's demand.
    pub(crate) fn push(&self, item: StreamItem) -> Demand {
        let mut state = lock(&self.state);
        if let (Ok(TokenEvent::Token { .. }), Pace::OnDemand { lead }) = (&item, state.pace) {
            state.lead = lead;
        }
        state.events.push_back(item);
        state.n_pushed += 1;
        let (demand, waker) = (state.demand(), state.waker.take());
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        // Notify only a sleeping consumer: a wake-up is a system call.
        if is_awaited {
            self.arrived.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        demand
    }

    /// The consumer's demand; after [`Demand::Pause`] the engine is woken when it changes.
    pub(crate) fn demand(&self) -> Demand {
        lock(&self.state).demand()
    }

    /// Tokens that may be pushed now.
    pub(crate) fn n_free(&self) -> usize {
        let state = lock(&self.state);
        match state.pace {
            Pace::Free => usize::MAX,
            Pace::OnDemand { .. } => (state.n_requested + state.lead).saturating_sub(state.n_pushed),
        }
    }

    pub(crate) fn cancel(&self) {
        lock(&self.state).is_cancelled = true;
    }

    fn wait(&self, until: Option<Instant>) -> Option<StreamItem> {
        let mut state = lock(&self.state);
        loop {
            if let Some(item) = state.pop() {
                return Some(item);
            }
            state.is_awaited = true;
            state = match until {
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        state.is_awaited = false;
                        return None;
                    }
                    self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
