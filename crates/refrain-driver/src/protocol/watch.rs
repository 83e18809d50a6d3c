//! One thread watches what another does, and may act on it (a query) past a deadline.
//!
//! The act happens outside the lock, since a driver call may take its time. So the owner, before it changes what is
//! watched, waits until no act is under way: what the act was given stays valid until it is over.

use std::time::Duration;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError, lock};

/// `A` is what is watched.
pub(crate) struct Watch<A> {
    state: Mutex<WatchState<A>>,
    changed: Condvar,
}

struct WatchState<A> {
    armed: Option<A>,
    acting: bool,
    quit: bool,
}

/// What the watching thread decides.
pub(crate) enum WatchDecision<Q> {
    /// There is nothing to do until something changes.
    Idle,
    /// There may be something to do after this long.
    Wait(Duration),
    /// Act on this, now.
    Act(Q),
}

impl<A> Watch<A> {
    pub(crate) fn new() -> Watch<A> {
        let state = WatchState { armed: None, acting: false, quit: false };
        Watch { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Has `armed` watched from now on.
    pub(crate) fn arm(&self, armed: A) {
        lock(&self.state).armed = Some(armed);
        self.changed.notify_all();
    }

    /// Changes what is watched, when no act is under way. False when one still is after `limit`: then it is changed
    /// all the same.
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

    /// Has nothing watched any more.
    pub(crate) fn disarm(&self) {
        lock(&self.state).armed = None;
    }

    /// Ends [`Watch::run`].
    pub(crate) fn quit(&self) {
        lock(&self.state).quit = true;
        self.changed.notify_all();
    }

    /// The life of the watching thread. `look` runs under the lock, `act` outside it.
    pub(crate) fn run<Q>(&self, mut look: impl FnMut(&A) -> WatchDecision<Q>, mut act: impl FnMut(Q)) {
        let mut state = lock(&self.state);
        while !state.quit {
            state = match state.armed.as_ref().map_or(WatchDecision::Idle, &mut look) {
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
