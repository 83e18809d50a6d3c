//! Channel from the embedder's thread to a caller.
//!
//! The thread never waits for a caller. The queue is bounded by the number of the caller's texts.

use super::EmbedderInner;
use crate::error::{EngineError, Stopped};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The vectors of a caller's texts in order, then nothing; or an error, then nothing.
///
/// The iterator blocks; [`VectorStream::poll_next`] does not. Dropping the stream cancels the texts that no step has taken.
pub struct VectorStream {
    shared: Arc<VectorChannel>,
    n_left: usize,
    /// Keeps the thread alive.
    _embedder: Option<Arc<EmbedderInner>>,
}

/// The other end of a [`VectorStream`]. Dropped early, it ends the stream with an error.
pub(super) struct VectorSink {
    shared: Arc<VectorChannel>,
}

pub(super) fn vector_channel(
    n_texts: usize,
    embedder: Option<Arc<EmbedderInner>>,
) -> (VectorSink, VectorStream) {
    let shared = Arc::new(VectorChannel { state: Mutex::default(), arrived: Condvar::new() });
    let stream = VectorStream { shared: shared.clone(), n_left: n_texts, _embedder: embedder };
    (VectorSink { shared }, stream)
}

struct VectorChannel {
    state: Mutex<VectorState>,
    arrived: Condvar,
}

#[derive(Default)]
struct VectorState {
    vectors: VecDeque<Vec<f32>>,
    failure: Option<EngineError>,
    is_closed: bool,
    is_cancelled: bool,
    waker: Option<Waker>,
}

impl VectorChannel {
    fn lock(&self) -> MutexGuard<'_, VectorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, put: impl FnOnce(&mut VectorState)) {
        let mut state = self.lock();
        put(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.arrived.notify_one();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl VectorState {
    fn pop(&mut self) -> Option<Result<Vec<f32>, EngineError>> {
        if let Some(vector) = self.vectors.pop_front() {
            return Some(Ok(vector));
        }
        let closed = || self.is_closed.then_some(EngineError::Stopped(Stopped::Closed));
        self.failure.take().or_else(closed).map(Err)
    }
}

impl VectorSink {
    pub(super) fn push(&self, vectors: Vec<Vec<f32>>) {
        self.shared.put(|state| state.vectors.extend(vectors));
    }

    pub(super) fn fail(&self, error: EngineError) {
        self.shared.put(|state| {
            state.failure.get_or_insert(error);
        });
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.shared.lock().is_cancelled
    }
}

impl Drop for VectorSink {
    fn drop(&mut self) {
        self.shared.put(|state| state.is_closed = true);
    }
}

impl VectorStream {
    /// The next vector for async code, like `Stream::poll_next`. The embedder's thread calls the waker, which must not
    /// block.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Vec<f32>, EngineError>>> {
        if self.n_left == 0 {
            return Poll::Ready(None);
        }
        let mut state = self.shared.lock();
        let Some(item) = state.pop() else {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        drop(state);
        Poll::Ready(Some(self.note(item)))
    }

    fn note(&mut self, item: Result<Vec<f32>, EngineError>) -> Result<Vec<f32>, EngineError> {
        self.n_left = if item.is_ok() { self.n_left - 1 } else { 0 };
        item
    }
}

impl Iterator for VectorStream {
    type Item = Result<Vec<f32>, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.n_left == 0 {
            return None;
        }
        let mut state = self.shared.lock();
        let item = loop {
            match state.pop() {
                Some(item) => break item,
                None => state = self.shared.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        Some(self.note(item))
    }
}

impl Drop for VectorStream {
    fn drop(&mut self) {
        self.shared.lock().is_cancelled = true;
    }
}
