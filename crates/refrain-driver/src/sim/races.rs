//! Access logs, and detection of unordered work on the same bytes.

use std::collections::VecDeque;
use std::sync::Arc;

/// A byte range accessed by one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SimAccess {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) write: bool,
    /// True if the access came before the wait for programmatic dependencies.
    pub(super) early: bool,
}

impl SimAccess {
    pub(super) fn conflicts(&self, other: &SimAccess) -> bool {
        (self.write || other.write) && self.start < other.end && other.start < self.end
    }
}

/// The accesses of one launch, with adjacent ranges merged.
#[derive(Clone, Debug, Default)]
pub(super) struct AccessLog {
    accesses: Vec<SimAccess>,
}

/// Number of ranges at which a log is sorted and merged, which keeps element-wise twins affordable.
const COMPACT_AT: usize = 4096;

impl AccessLog {
    pub(super) fn push(&mut self, a: SimAccess) {
        if a.start == a.end {
            return;
        }
        if let Some(last) = self.accesses.last_mut()
            && (last.write, last.early) == (a.write, a.early)
            && a.start <= last.end
            && last.start <= a.end
        {
            last.start = last.start.min(a.start);
            last.end = last.end.max(a.end);
            return;
        }
        self.accesses.push(a);
        if self.accesses.len().is_multiple_of(COMPACT_AT) {
            self.compact();
        }
    }

    pub(super) fn touch(&mut self, start: u64, bytes: u64, write: bool) {
        self.push(SimAccess { start, end: start + bytes, write, early: false });
    }

    pub(super) fn extend(&mut self, other: &AccessLog) {
        other.accesses.iter().for_each(|&a| self.push(a));
    }

    pub(super) fn as_slice(&self) -> &[SimAccess] {
        &self.accesses
    }

    pub(super) fn compact(&mut self) {
        let mut all = std::mem::take(&mut self.accesses);
        all.sort_unstable_by_key(|a| (a.write, a.early, a.start));
        for a in all {
            match self.accesses.last_mut() {
                Some(last) if (last.write, last.early) == (a.write, a.early) && a.start <= last.end => {
                    last.end = last.end.max(a.end);
                }
                _ => self.accesses.push(a),
            }
        }
    }
}

/// Vector clock: one count per stream index.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn get(&self, idx: usize) -> u64 {
        self.0.get(idx).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, idx: usize, count: u64) {
        if self.0.len() <= idx {
            self.0.resize(idx + 1, 0);
        }
        self.0[idx] = count;
    }

    pub(super) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// Recent accesses of each stream, to compare with those of other streams.
#[derive(Default)]
pub(super) struct History {
    streams: Vec<VecDeque<Past>>,
}

struct Past {
    count: u64,
    access: SimAccess,
    what: Arc<str>,
}

/// Number of ranges kept per stream. Dropping older ones can only miss a race.
const MAX_PASTS: usize = 8192;

impl History {
    /// Compares work that just ran on stream `idx` at `clock` with earlier work on other streams, and stores it.
    pub(super) fn add(&mut self, idx: usize, clock: &Clock, log: &AccessLog, what: &str) -> Option<String> {
        let mut found = None;
        for (other, pasts) in self.streams.iter().enumerate().filter(|(i, _)| *i != idx) {
            for past in pasts.iter().rev().take_while(|p| p.count > clock.get(other)) {
                let hit = log.as_slice().iter().find(|a| a.conflicts(&past.access));
                if let Some(a) = hit.filter(|_| found.is_none()) {
                    found = Some(describe(&past.what, &past.access, what, a, "streams"));
                }
            }
        }
        if self.streams.len() <= idx {
            self.streams.resize_with(idx + 1, VecDeque::new);
        }
        let (count, what) = (clock.get(idx), Arc::<str>::from(what));
        let pasts = &mut self.streams[idx];
        pasts.extend(log.as_slice().iter().map(|&access| Past { count, access, what: what.clone() }));
        let excess = pasts.len().saturating_sub(MAX_PASTS);
        pasts.drain(..excess);
        found
    }

    /// Forgets accesses that all later work is ordered after. Only valid while nothing is queued.
    pub(super) fn forget_before(&mut self, host: &Clock) {
        for (idx, pasts) in self.streams.iter_mut().enumerate() {
            while pasts.front().is_some_and(|p| p.count <= host.get(idx)) {
                pasts.pop_front();
            }
        }
    }
}

/// Formats a race report.
pub(super) fn describe(a_what: &str, a: &SimAccess, b_what: &str, b: &SimAccess, between: &str) -> String {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    let verb = |x: &SimAccess| match (x.write, x.early) {
        (true, false) => "writes",
        (false, false) => "reads",
        (true, true) => "writes (before its dependency wait)",
        (false, true) => "reads (before its dependency wait)",
    };
    format!(
        "race between {between}: {a_what} {} and {b_what} {} the same {} bytes at {start:#x}, and nothing orders them",
        verb(a),
        verb(b),
        end - start
    )
}
