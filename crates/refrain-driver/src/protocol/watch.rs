//! One thread watches another and may act (make a query) once a deadline has passed.
//!
//! The action runs outside the lock, since a driver call may be slow. Before the owner changes the watched value,
//! it waits for an action in progress, so the values passed to an action stay valid until it ends.

use std::time::Duration;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError, lock};

/// A watched value of type `A`.
pub(crate) struct Watch<A> {
    state: Mutex<WatchState<A>>,
    changed: Condvar,
}

struct WatchState<A> {
    armed: Option<A>,
    acting: bool,
    quit: bool,
}

/// Decision of the watching thread.
pub(crate) enum WatchDecision<Q> {
    /// Nothing to do until the watched value changes.
    Idle,
    /// Check again after this time.
    Wait(Duration),
    /// Act on this value now.
    Act(Q),
}

impl<A> Watch<A> {
    pub(crate) fn new() -> Watch<A> {
        let state = WatchState { armed: None, acting: false, quit: false };
        Watch { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Starts watching `armed`.
    pub(crate) fn arm(&self, armed: A) {
        lock(&self.state).armed = Some(armed);
        self.changed.notify_all();
    }

    /// Changes the watched value once no action is in progress. After `limit` it changes the value anyway and
    /// returns false.
    pub(crate) fn edit(&self, limit: Duration, edit: impl FnOnce(&mut A)) -> bool {
        let (mut state, timeout) = self
            .changed
            .wait_timeout_while(lock(&self.state), limit, |state| state.acting)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(armed) = &mut state.armed {
            edit(armed);
        }
        !(timeout.timed_out() && state.acting)
    }

    /// Stops watching.
    pub(crate) fn disarm(&self) {
        lock(&self.state).armed = None;
    }

    /// Ends [`Watch::run`].
    pub(crate) fn quit(&self) {
        lock(&self.state).quit = true;
        self.changed.notify_all();
    }

    /// Body of the watching thread. `decide` runs under the lock, `act` outside it.
    pub(crate) fn run<Q>(&self, mut decide: impl FnMut(&A) -> WatchDecision<Q>, mut act: impl FnMut(Q)) {
        let mut state = lock(&self.state);
        while !state.quit {
            state = match state.armed.as_ref().map_or(WatchDecision::Idle, &mut decide) {
                WatchDecision::Idle => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                WatchDecision::Wait(time) => {
                    self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
                }
                WatchDecision::Act(on) => {
                    state.acting = true;
                    drop(state);
                    act(on);
                    self.acted()
                }
            };
        }
    }

    fn acted(&self) -> MutexGuard<'_, WatchState<A>> {
        let mut state = lock(&self.state);
        state.acting = false;
        self.changed.notify_all();
        state
    }
}
