//! Open requests: which worker serves them, which tokens were delivered, and which of them may be at fault.
//!
//! Everything here is pure: calls in, frames and updates out. A request whose workers failed [`MAX_DEATHS`] times without
//! a token in between fails. From [`SUSPECT_DEATHS`] on it is sent while nothing else new is, so that it fails alone.

use super::open::{OpenRequest, Taken, Work};
use super::options::Backoff;
use super::process::Failure;
use super::slot::Slot;
use crate::protocol::{self, FromWorker, MAX_TO_WORKER_BYTES, ToWorker, WireEvent, WireId};
use crate::tokens::{BackendStatus, LoadStatus, Refusal, RefusalKind, WorkerState};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// From this many failures of its workers on, a request is tried alone.
const SUSPECT_DEATHS: u32 = 2;
/// A request fails after this many failures of its workers without a token in between.
const MAX_DEATHS: u32 = 3;

/// All open requests and all workers.
pub(super) struct PoolState {
    pub(super) slots: Vec<Slot>,
    backoff: Backoff,
    requests: HashMap<WireId, OpenRequest>,
    /// Requests that no worker serves, in order. Cancelled ones may be among them.
    waiting: VecDeque<WireId>,
    last_id: WireId,
}

impl PoolState {
    pub(super) fn new(n_workers: usize, backoff: Backoff) -> PoolState {
        PoolState {
            slots: (0..n_workers).map(Slot::new).collect(),
            backoff,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            last_id: 0,
        }
    }

    pub(super) fn n_open(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn next_id(&mut self) -> WireId {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn status(&self) -> BackendStatus {
        BackendStatus { workers: self.slots.iter().map(Slot::status).collect() }
    }

    /// Opens a request.
    pub(super) fn add(&mut self, id: WireId, work: Work) {
        self.requests.insert(id, OpenRequest { work, worker_idx: None, n_deaths: 0 });
        self.waiting.push_back(id);
        self.dispatch(Instant::now());
    }

    /// Ends a request that nobody reads any more.
    pub(super) fn cancel(&mut self, id: WireId) {
        let Some(open) = self.requests.remove(&id) else { return };
        let Some(idx) = open.worker_idx else {
            self.waiting.retain(|waiting| *waiting != id);
            return;
        };
        let mut frame = Vec::new();
        if protocol::encode(&ToWorker::Cancel { id }, MAX_TO_WORKER_BYTES, &mut frame).is_ok() {
            self.slots[idx].send(frame);
        }
        self.closed(idx, id);
    }

    /// A worker no longer serves a request.
    fn closed(&mut self, idx: usize, id: WireId) {
        let slot = &mut self.slots[idx];
        slot.open.remove(&id);
        if slot.trial == Some(id) {
            slot.trial = None;
            self.dispatch(Instant::now());
        }
    }

    /// Refuses every open request.
    pub(super) fn refuse_all(&mut self, refusal: &Refusal) {
        self.waiting.clear();
        for (id, open) in self.requests.drain() {
            if let Some(idx) = open.worker_idx {
                self.slots[idx].open.remove(&id);
            }
            open.work.refuse(refusal.clone());
        }
    }

    /// Why requests are refused at once: all workers fail soon after their start.
    pub(super) fn crash_loop(&self, now: Instant) -> Option<Refusal> {
        let is_looping = |slot: &Slot| slot.n_failures() >= self.backoff.crash_loop && !slot.is_ready();
        if !self.slots.iter().all(is_looping) {
            return None;
        }
        let slot = self.slots.iter().min_by_key(|slot| slot.next_start)?;
        let why = slot.status.last_failure.as_deref().unwrap_or("for no known reason");
        Some(Refusal {
            kind: RefusalKind::Unavailable,
            message: format!("the worker failed {} times in a row, last because {why}", slot.n_failures()),
            hint: Some("the server's log has the reasons; a new process is tried after a pause".into()),
            retry_after: slot.next_start.map(|at| at.saturating_duration_since(now)),
        })
    }

    /// Gives waiting requests to workers that are ready.
    fn dispatch(&mut self, now: Instant) {
        loop {
            let is_free = |slot: &Slot| slot.is_ready() && slot.trial.is_none();
            let free = self.slots.iter().enumerate().filter(|(_, slot)| is_free(slot));
            let Some((idx, _)) = free.min_by_key(|(_, slot)| slot.open.len()) else { return };
            // Requests without suspicion go first: a suspect keeps others waiting.
            let innocent = self.waiting.iter().position(|id| self.is_innocent(*id));
            let Some(id) = self.waiting.remove(innocent.unwrap_or(0)) else { return };
            if innocent.is_none() {
                self.slots[idx].trial = Some(id);
            }
            self.send(id, idx, now);
        }
    }

    fn is_innocent(&self, id: WireId) -> bool {
        self.requests.get(&id).is_some_and(|open| open.n_deaths < SUSPECT_DEATHS)
    }

    fn send(&mut self, id: WireId, idx: usize, now: Instant) {
        let Some(open) = self.requests.get_mut(&id) else { return };
        let mut frame = Vec::new();
        if let Err(error) = protocol::encode(&open.work.message(id), MAX_TO_WORKER_BYTES, &mut frame) {
            let refusal = Refusal {
                kind: RefusalKind::Invalid,
                message: format!("the request cannot be sent to a worker: {error}"),
                hint: Some("shorten the prompt".into()),
                retry_after: None,
            };
            open.work.refuse(refusal);
            self.requests.remove(&id);
            if self.slots[idx].trial == Some(id) {
                self.slots[idx].trial = None;
            }
            return;
        }
        open.worker_idx = Some(idx);
        open.work.starts();
        self.slots[idx].opens(id, frame, now);
    }

    /// Handles a message of a worker. Returns whether the status has changed and whether the worker has become ready.
    pub(super) fn message(
        &mut self,
        idx: usize,
        message: FromWorker,
        served: &[String],
        now: Instant,
    ) -> (bool, bool) {
        let slot = &mut self.slots[idx];
        slot.heard(now);
        match message {
            FromWorker::Ready { backend } => {
                slot.status.backend = backend;
                slot.status.state = WorkerState::Ready;
                slot.advanced(now);
                self.dispatch(now);
                (true, true)
            }
            FromWorker::Heartbeat { progress, is_loading, mut models } => {
                models.retain(|load: &LoadStatus| served.contains(&load.model));
                slot.heartbeat(progress, is_loading, models, now);
                (true, false)
            }
            FromWorker::Events(events) => {
                slot.advanced(now);
                if let Err(how) = self.events(idx, events) {
                    self.slots[idx].kill(Failure::BrokeRules(how));
                }
                (false, false)
            }
            // The connection ends with it.
            FromWorker::Failed(_) => (false, false),
        }
    }

    /// Delivers events. Those of one request usually follow each other, and are delivered together.
    fn events(&mut self, idx: usize, events: Vec<(WireId, WireEvent)>) -> Result<(), &'static str> {
        let mut events = events.into_iter().peekable();
        let mut of_one = Vec::new();
        while let Some((id, event)) = events.next() {
            of_one.push(event);
            while let Some((_, event)) = events.next_if(|(other, _)| *other == id) {
                of_one.push(event);
            }
            let open = self.requests.get_mut(&id).filter(|open| open.worker_idx == Some(idx));
            let Some(open) = open else {
                // It was cancelled.
                of_one.clear();
                continue;
            };
            let Taken { has_delivered, is_over, broken } = open.work.take(of_one.drain(..));
            if has_delivered {
                open.n_deaths = 0;
                self.slots[idx].delivered();
            }
            if is_over {
                self.requests.remove(&id);
                self.closed(idx, id);
            } else if has_delivered && self.slots[idx].trial == Some(id) {
                self.slots[idx].trial = None;
                self.dispatch(Instant::now());
            }
            if let Some(how) = broken {
                return Err(how);
            }
        }
        Ok(())
    }

    /// A worker's process is gone: its requests wait for another one. Returns how many there are.
    pub(super) fn gone(&mut self, idx: usize, failure: &Failure, now: Instant) -> usize {
        let slot = &mut self.slots[idx];
        slot.gone(failure, now);
        if slot.n_failures() > 0 {
            slot.next_start = Some(now + self.backoff.pause(slot.n_failures()));
        }
        let mut moved: Vec<WireId> = slot.open.drain().collect();
        moved.sort_unstable();
        let n_moved = moved.len();
        for id in moved.into_iter().rev() {
            let Some(open) = self.requests.get_mut(&id) else { continue };
            open.worker_idx = None;
            if !matches!(failure, Failure::Closed) {
                open.n_deaths += 1;
            }
            if open.n_deaths >= MAX_DEATHS {
                open.work.refuse(killer(open.n_deaths, failure));
                self.requests.remove(&id);
            } else {
                self.waiting.push_front(id);
            }
        }
        if let Some(refusal) = self.crash_loop(now) {
            self.refuse_all(&refusal);
        }
        self.dispatch(now);
        n_moved
    }
}

/// The refusal of a request whose workers fail.
fn killer(n_deaths: u32, failure: &Failure) -> Refusal {
    Refusal {
        kind: RefusalKind::Failed,
        message: format!("{n_deaths} workers in a row failed while they served this request: {failure}"),
        hint: failure.hint().or_else(|| Some("the request may be what makes them fail: report it".into())),
        retry_after: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::tests::request;
    use crate::tokens::{TokenReply, TokenUpdate, token_reply};
    use tokio::sync::mpsc;

    fn open(state: &mut PoolState) -> (WireId, TokenReply) {
        let id = state.next_id();
        let (sender, reply) = token_reply(|| {});
        state.add(id, Work::tokens(request(&[1], 100), sender));
        (id, reply)
    }

    fn ready(state: &mut PoolState) {
        let now = Instant::now();
        state.slots[0].starts(mpsc::unbounded_channel().0, now, 0);
        state.message(0, FromWorker::Ready { backend: "test".into() }, &[], now);
    }

    #[test]
    fn suspects_are_tried_one_by_one_after_all_others() {
        let mut state = PoolState::new(1, Backoff::default());
        let suspects: Vec<_> = (0..3).map(|_| open(&mut state)).collect();
        for _ in 0..SUSPECT_DEATHS {
            ready(&mut state);
            assert_eq!(state.slots[0].open.len(), 3);
            state.gone(0, &Failure::Exited(None), Instant::now());
        }
        let innocent: Vec<_> = (0..2).map(|_| open(&mut state)).collect();
        ready(&mut state);
        assert!(innocent.iter().all(|(id, _)| state.slots[0].open.contains(id)));
        for (n_before, (id, _)) in suspects.iter().enumerate() {
            assert_eq!((state.slots[0].trial, state.slots[0].open.len()), (Some(*id), n_before + 3));
            let update = TokenUpdate::Token { token: 1, logprob: 0.0, top: Vec::new() };
            let events = vec![(*id, WireEvent::Update(update))];
            state.message(0, FromWorker::Events(events), &[], Instant::now());
        }
        assert_eq!((state.slots[0].trial, state.waiting.len()), (None, 0));
    }

    #[test]
    fn a_suspect_that_is_cancelled_or_fails_lets_the_next_one_go() {
        let mut state = PoolState::new(1, Backoff::default());
        let suspects: Vec<_> = (0..3).map(|_| open(&mut state)).collect();
        for _ in 0..SUSPECT_DEATHS {
            ready(&mut state);
            state.gone(0, &Failure::Exited(None), Instant::now());
        }
        ready(&mut state);
        state.cancel(suspects[0].0);
        assert_eq!(state.slots[0].trial, Some(suspects[1].0));
        state.gone(0, &Failure::Exited(None), Instant::now());
        assert!(!state.requests.contains_key(&suspects[1].0), "three workers failed during it");
        ready(&mut state);
        assert_eq!(state.slots[0].trial, Some(suspects[2].0));
    }
}
