//! The way from the engine's thread to whoever waits for tokens.
//!
//! The engine never waits for a consumer: it puts an event into a queue and goes on. The queue cannot grow without
//! bound, because a request has no more events than tokens and pieces of its prompt, and a context bounds both.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::request::{Pace, RequestId, TokenEvent, lock};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

type Item = Result<TokenEvent, EngineError>;

/// What comes of a request: events in order, then an end or an error, then nothing.
///
/// As an iterator it waits. [`TokenStream::try_next`], [`TokenStream::next_timeout`] and [`TokenStream::poll_next`] are
/// for those who cannot. Dropping it cancels the request.
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

    /// Names the request, for [`Engine::cancel`].
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Whether the end or an error was given.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The next event, if it is there.
    pub fn try_next(&mut self) -> Option<Item> {
        self.ask();
        let item = lock(&self.channel.state).pop();
        self.note(item)
    }

    /// The next event, if it comes in time. `None` also when nothing will come any more: see [`TokenStream::is_over`].
    pub fn next_timeout(&mut self, timeout: Duration) -> Option<Item> {
        self.wait(Some(timeout))
    }

    /// The next event for asynchronous code, as `Stream::poll_next` of the usual crates. The engine's thread calls the
    /// waker, which must not block.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Item>> {
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

    /// Cancels the request, and waits until it has ended and its sequence is free. Events that were not taken are lost.
    pub fn stop(&mut self) {
        if !self.is_over {
            self.engine.cancel(self.id);
            while self.wait(None).is_some() {}
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Option<Item> {
        if self.is_over {
            return None;
        }
        self.ask();
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let item = self.channel.wait(until);
        self.note(item)
    }

    /// Tells the engine that one more event is wanted, if it waits for that.
    fn ask(&self) {
        if !self.is_over && lock(&self.channel.state).ask() {
            self.engine.wake();
        }
    }

    fn note(&mut self, item: Option<Item>) -> Option<Item> {
        self.is_over |= matches!(&item, Some(Ok(TokenEvent::End(_)) | Err(_)));
        item
    }
}

impl Iterator for TokenStream {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
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

/// Events of one request on their way.
pub(crate) struct Channel {
    state: Mutex<ChannelState>,
    came: Condvar,
}

struct ChannelState {
    events: VecDeque<Item>,
    pace: Pace,
    n_pushed: usize,
    n_taken: usize,
    /// Events that the consumer has asked for, those it took included.
    n_asked: usize,
    /// How many events may be there that were not asked for; tokens have a lead, pieces of a prompt have none.
    lead: usize,
    /// The engine stopped here until more is asked for.
    is_paused: bool,
    is_cancelled: bool,
    /// Somebody sleeps until an event comes.
    is_awaited: bool,
    waker: Option<Waker>,
}

/// What the consumer of a request wants of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    GoOn,
    Pause,
    Cancel,
}

impl ChannelState {
    fn demand(&mut self) -> Demand {
        let has_enough = matches!(self.pace, Pace::Asked { .. }) && self.n_pushed >= self.n_asked + self.lead;
        self.is_paused = has_enough && !self.is_cancelled;
        match (self.is_cancelled, has_enough) {
            (true, _) => Demand::Cancel,
            (false, true) => Demand::Pause,
            (false, false) => Demand::GoOn,
        }
    }

    /// Asks for one more event; true if the engine must hear of it.
    fn ask(&mut self) -> bool {
        self.n_asked = self.n_taken + 1;
        self.is_paused && self.demand() == Demand::GoOn
    }

    fn pop(&mut self) -> Option<Item> {
        let item = self.events.pop_front();
        self.n_taken += usize::from(item.is_some());
        item
    }
}

impl Channel {
    pub(crate) fn new(pace: Pace) -> Channel {
        let state = ChannelState {
            events: VecDeque::new(),
            pace,
            n_pushed: 0,
            n_taken: 0,
            n_asked: 0,
            lead: 0,
            is_paused: false,
            is_cancelled: false,
            is_awaited: false,
            waker: None,
        };
        Channel { state: Mutex::new(state), came: Condvar::new() }
    }

    /// Puts an event in and says what the consumer wants next.
    pub(crate) fn push(&self, item: Item) -> Demand {
        let mut state = lock(&self.state);
        if let (Ok(TokenEvent::Token { .. }), Pace::Asked { lead }) = (&item, state.pace) {
            state.lead = lead;
        }
        state.events.push_back(item);
        state.n_pushed += 1;
        let (demand, waker) = (state.demand(), state.waker.take());
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        // Nobody is woken who does not sleep: a wake-up is a system call.
        if is_awaited {
            self.came.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        demand
    }

    /// What the consumer wants; after [`Demand::Pause`] the engine is woken when that changes.
    pub(crate) fn demand(&self) -> Demand {
        lock(&self.state).demand()
    }

    pub(crate) fn cancel(&self) {
        lock(&self.state).is_cancelled = true;
    }

    fn wait(&self, until: Option<Instant>) -> Option<Item> {
        let mut state = lock(&self.state);
        loop {
            if let Some(item) = state.pop() {
                return Some(item);
            }
            state.is_awaited = true;
            state = match until {
                None => self.came.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        state.is_awaited = false;
                        return None;
                    }
                    self.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
