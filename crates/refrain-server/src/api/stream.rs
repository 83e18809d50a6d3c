//! Server-sent events.

use super::generation::Generation;
use crate::error::ApiError;
use crate::text::Delta;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior};

/// A comment is sent this often, so that proxies and clients see that the connection lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The reply's head waits this long for the first token, so that an error before it has a status of its own.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);

/// Writes the events of one API.
pub(crate) trait EventWriter: Send + 'static {
    /// Writes what comes before the first delta.
    fn start(&mut self, generation: &Generation, out: &mut Vec<u8>);
    /// Writes a delta of a choice.
    fn delta(&mut self, generation: &Generation, choice: usize, delta: Delta, out: &mut Vec<u8>);
    /// Writes what comes after the last delta.
    fn end(&mut self, generation: &Generation, out: &mut Vec<u8>);
    /// Writes an error, which ends the stream.
    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>);
}

/// Appends an event without a name.
pub(crate) fn event(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend(b"data: ");
    // Strings and numbers always become JSON.
    let _ = serde_json::to_writer(&mut *out, value);
    out.extend(b"\n\n");
}

/// Appends an event with a name.
pub(crate) fn named_event(name: &str, value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend(b"event: ");
    out.extend(name.as_bytes());
    out.push(b'\n');
    event(value, out);
}

/// The longest pause between two events of a reply that has more tokens. A person does not see it.
const MAX_PAUSE: Duration = Duration::from_millis(10);
/// Part of that pause for each open request: writing to a socket costs more than everything else about a token.
const PAUSE_PER_REQUEST: Duration = Duration::from_micros(100);
/// Shorter pauses gain nothing: a timer costs as much.
const MIN_PAUSE: Duration = Duration::from_millis(1);

struct EventStream<W> {
    generation: Generation,
    writer: W,
    pulse: Interval,
    first: Option<Option<(usize, Result<Delta, ApiError>)>>,
    is_over: bool,
    /// When the last event was made.
    last: Option<Instant>,
}

/// Streams a generation. An error before the first token is returned.
pub(crate) async fn respond(
    mut generation: Generation,
    mut writer: impl EventWriter,
) -> Result<Response, ApiError> {
    let first = tokio::time::timeout(HEAD_PATIENCE, generation.choices.next()).await.ok();
    if let Some(Some((_, Err(error)))) = first {
        return Err(error);
    }
    let mut pulse = tokio::time::interval_at(Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
    pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut head = Vec::new();
    writer.start(&generation, &mut head);
    let events = EventStream { generation, writer, pulse, first, is_over: false, last: None };
    let head = stream::iter((!head.is_empty()).then(|| Ok::<_, Infallible>(Bytes::from(head))));
    let events = stream::unfold(events, |mut events| async move {
        let bytes = events.next().await?;
        Some((Ok(bytes), events))
    });
    let body = Body::from_stream(futures_util::StreamExt::chain(head, events));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would collect the events otherwise.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, body).into_response())
}

impl<W: EventWriter> EventStream<W> {
    /// With many open requests, waits until several tokens can be sent as one event. The first token and the end never wait.
    async fn gather(&mut self) {
        let Some(last) = self.last else { return };
        let n_open = u32::try_from(self.generation.n_open()).unwrap_or(u32::MAX);
        let pause = PAUSE_PER_REQUEST.saturating_mul(n_open).min(MAX_PAUSE).saturating_sub(last.elapsed());
        if pause >= MIN_PAUSE {
            self.generation.choices.gather(pause).await;
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        self.gather().await;
        let next = match self.first.take() {
            Some(first) => first,
            None => tokio::select! {
                biased;
                next = self.generation.choices.next() => next,
                _ = self.pulse.tick() => return Some(Bytes::from_static(b": waiting\n\n")),
            },
        };
        self.last = Some(Instant::now());
        let mut out = Vec::with_capacity(512);
        match next {
            Some((choice, Ok(delta))) => {
                self.generation.count(&delta);
                self.writer.delta(&self.generation, choice, delta, &mut out);
            }
            Some((_, Err(error))) => {
                self.is_over = true;
                self.writer.error(&error, &mut out);
            }
            None => {
                self.is_over = true;
                self.writer.end(&self.generation, &mut out);
            }
        }
        Some(Bytes::from(out))
    }
}
