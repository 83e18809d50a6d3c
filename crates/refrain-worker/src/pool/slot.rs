//! A worker over all of its processes: which one runs, what it holds, and how it does.

use super::options::Deadlines;
use super::process::{Control, Failure};
use crate::protocol::WireId;
use crate::tokens::{LoadStatus, WorkerState, WorkerStatus};
use std::collections::HashSet;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// A process that was ready and ran for this long did not fail soon after its start, also if it had no requests.
const RAN_WELL: Duration = Duration::from_secs(60);

/// A worker.
pub(super) struct Slot {
    /// What the API shows. `models` are those of the current process.
    pub(super) status: WorkerStatus,
    /// Counts of earlier processes, by model.
    past: Vec<LoadStatus>,
    /// Orders to the current process.
    control: Option<mpsc::UnboundedSender<Control>>,
    /// Requests that the current process serves.
    pub(super) open: HashSet<WireId>,
    /// The request that may be the reason of failures. Nothing else is sent until it has made progress.
    pub(super) trial: Option<WireId>,
    /// Processes that failed in a row without delivering a token.
    n_failures: u32,
    /// When the next process starts, while it backs off.
    pub(super) next_start: Option<Instant>,
    connected: Option<Instant>,
    last_message: Instant,
    progress: u64,
    last_progress: Instant,
    is_loading: bool,
    is_killed: bool,
}

impl Slot {
    pub(super) fn new(idx: usize) -> Slot {
        let now = Instant::now();
        let status = WorkerStatus {
            idx,
            pid: None,
            backend: String::new(),
            state: WorkerState::Starting,
            n_restarts: 0,
            last_failure: None,
            models: Vec::new(),
        };
        Slot {
            status,
            past: Vec::new(),
            control: None,
            open: HashSet::new(),
            trial: None,
            n_failures: 0,
            next_start: None,
            connected: None,
            last_message: now,
            progress: 0,
            last_progress: now,
            is_loading: false,
            is_killed: false,
        }
    }

    /// A process is being started.
    pub(super) fn starts(&mut self, control: mpsc::UnboundedSender<Control>, now: Instant, generation: u64) {
        self.control = Some(control);
        self.status.state = WorkerState::Starting;
        self.status.n_restarts = generation;
        self.next_start = None;
        self.connected = None;
        self.is_loading = false;
        self.is_killed = false;
        self.forgive(now);
    }

    pub(super) fn connected(&mut self, now: Instant) {
        self.connected = Some(now);
        self.forgive(now);
    }

    /// Starts all deadlines again.
    pub(super) fn forgive(&mut self, now: Instant) {
        self.last_message = now;
        self.last_progress = now;
        self.connected = self.connected.map(|_| now);
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.last_message = now;
    }

    /// It delivered something.
    pub(super) fn advanced(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// It delivered a token: whatever made processes fail is over.
    pub(super) fn delivered(&mut self) {
        self.n_failures = 0;
    }

    pub(super) fn heartbeat(
        &mut self,
        progress: u64,
        is_loading: bool,
        models: Vec<LoadStatus>,
        now: Instant,
    ) {
        if progress != self.progress || is_loading != self.is_loading {
            self.advanced(now);
        }
        (self.progress, self.is_loading, self.status.models) = (progress, is_loading, models);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.state == WorkerState::Ready && !self.is_killed
    }

    pub(super) fn n_failures(&self) -> u32 {
        self.n_failures
    }

    /// Gives a request to the process. It has been idle until now, so the wait for progress starts here.
    pub(super) fn opens(&mut self, id: WireId, frame: Vec<u8>, now: Instant) {
        if self.open.is_empty() {
            self.advanced(now);
        }
        self.open.insert(id);
        self.order(Control::Send(frame));
    }

    pub(super) fn send(&self, frame: Vec<u8>) {
        self.order(Control::Send(frame));
    }

    pub(super) fn kill(&mut self, failure: Failure) {
        self.is_killed = true;
        self.order(Control::Kill(failure));
    }

    pub(super) fn close(&self) {
        self.order(Control::Close);
    }

    fn order(&self, control: Control) {
        if let Some(orders) = &self.control {
            // A process that has ended reports it, and its requests move on.
            let _ = orders.send(control);
        }
    }

    /// The deadline that the process has missed.
    pub(super) fn missed(&self, deadlines: &Deadlines, now: Instant) -> Option<Failure> {
        // The deadline for the hello is the connection's.
        let connected = self.connected.filter(|_| !self.is_killed)?;
        if now - self.last_message > deadlines.silence {
            return Some(Failure::Silent { within: deadlines.silence });
        }
        if self.status.state != WorkerState::Ready {
            let within = deadlines.load;
            return (now - connected > within).then_some(Failure::NotLoaded { within });
        }
        let within = if self.is_loading { deadlines.load } else { deadlines.stall };
        let n_open = self.open.len();
        (n_open > 0 && now - self.last_progress > within).then_some(Failure::Stalled { within, n_open })
    }

    /// The process is gone.
    pub(super) fn gone(&mut self, failure: &Failure, now: Instant) {
        let ran_well = self.status.state == WorkerState::Ready
            && self.connected.is_some_and(|since| now.saturating_duration_since(since) > RAN_WELL);
        if ran_well {
            self.n_failures = 0;
        }
        self.control = None;
        self.connected = None;
        self.trial = None;
        self.status.pid = None;
        for load in std::mem::take(&mut self.status.models) {
            match self.past.iter_mut().find(|past| past.model == load.model) {
                Some(past) => past.add_counts(&load),
                None => self.past.push(load),
            }
        }
        if let Failure::Closed = failure {
            self.status.state = WorkerState::Stopped;
            return;
        }
        self.n_failures = self.n_failures.saturating_add(1);
        self.status.last_failure = Some(failure.to_string());
        self.status.state = match self.n_failures {
            1 => WorkerState::Starting,
            n_failures => WorkerState::BackingOff { n_failures },
        };
    }

    /// What the API shows: counts since the start of the pool.
    pub(super) fn status(&self) -> WorkerStatus {
        let mut status = self.status.clone();
        for load in &mut status.models {
            if let Some(past) = self.past.iter().find(|past| past.model == load.model) {
                load.add_counts(past);
            }
        }
        // Counters never go back, also while the next process starts.
        for past in &self.past {
            if !status.models.iter().any(|load| load.model == past.model) {
                let gone = LoadStatus {
                    n_running: 0,
                    n_waiting: 0,
                    kv_blocks: 0,
                    kv_blocks_used: 0,
                    ..past.clone()
                };
                status.models.push(gone);
            }
        }
        status
    }
}
