//! Which sequences take part in the next step, and with how many of their tokens.
//!
//! A step has a budget of tokens. Sequences that decode come first, one token each; prompts fill the rest, in pieces.
//! A waiting request is admitted when its prompt and one more block fit. When a running one needs a block and there is
//! none, the newest of the lowest priority is preempted: it gives its blocks up and evaluates its tokens again later,
//! with what the prefix cache still holds of them. A waiting request takes room only from lower priorities, and from
//! requests whose consumers have enough for now. One whose beginning another request is evaluating waits for it: requests
//! for several answers to one prompt evaluate it once.
//!
//! Why it always goes on: the oldest request of the highest priority is never preempted for another one, and a request
//! that could not finish alone is refused, so that one ends. A preempted request comes back only when another one has
//! left, so it is preempted at most once for each that does. Among those that wait, users take turns by what they were
//! served, and nobody overtakes the one whose turn it is.
//!
//! Sequences that were promised their blocks, as those of sessions are, are never preempted: it would free nothing that
//! others may have.
//!
//! Invariant: no clock, no randomness, no device. What is decided follows from the calls made.

use crate::blocks::OutOfBlocks;
use crate::core::SequenceState;
use crate::request::RequestId;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What bounds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduleLimits {
    /// Tokens of a step.
    pub(crate) n_tokens: usize,
    /// Sequences that run at once.
    pub(crate) n_rows: usize,
}

/// A request that runs or waits, as the scheduler sees it.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) id: RequestId,
    /// Higher is served and admitted earlier.
    pub(crate) priority: i32,
    /// Whose it is.
    pub(crate) user: u64,
    /// All tokens that are known: the prompt and what was chosen behind it. At least one of them is not evaluated.
    pub(crate) tokens: Vec<u32>,
    /// Positions that it can come to need.
    pub(crate) n_positions: usize,
    /// What is evaluated, and the blocks.
    pub(crate) state: SequenceState,
    /// Whether what it evaluates can be found by others, and the other way round.
    pub(crate) shares: bool,
    /// Whether its consumer has enough for now.
    pub(crate) is_paused: bool,
    /// How many had left when it was preempted.
    preempted_at: Option<u64>,
}

impl ActiveRequest {
    pub(crate) fn new(
        id: RequestId,
        tokens: Vec<u32>,
        n_positions: usize,
        state: SequenceState,
    ) -> ActiveRequest {
        ActiveRequest {
            id,
            priority: 0,
            user: 0,
            tokens,
            n_positions,
            state,
            shares: false,
            is_paused: false,
            preempted_at: None,
        }
    }

    /// Tokens that are known and not evaluated.
    pub(crate) fn n_left(&self) -> usize {
        self.tokens.len() - self.state.tokens.len()
    }

    /// Who goes first among those that run. Requests are numbered in the order they come.
    fn rank(&self) -> (Reverse<i32>, RequestId) {
        (Reverse(self.priority), self.id)
    }

    /// Whether it evaluates, in steps to come, whole blocks that another request begins with and does not hold.
    fn is_about_to_hold_more_of(&self, other: &ActiveRequest) -> bool {
        let may_share = self.shares && other.shares && self.state.table.root() == other.state.table.root();
        // The last token of the other one is evaluated in any case.
        let usable = &other.tokens[..other.tokens.len() - 1];
        let n_common = self.tokens.iter().zip(usable).take_while(|(a, b)| a == b).count();
        let kv_block = self.state.table.kv_block();
        let n_shared = n_common / kv_block * kv_block;
        may_share
            && !self.is_paused
            && n_shared > other.state.tokens.len().max(self.state.tokens.len() / kv_block * kv_block)
    }

    /// Gives up its blocks.
    fn clear(&mut self) {
        if !self.state.table.is_promised() {
            self.state.clear();
        }
    }
}

/// Tokens of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepRow {
    pub(crate) id: RequestId,
    /// The next so many of its tokens are evaluated.
    pub(crate) n_tokens: usize,
    /// Whether they are the last known ones, so that the next one is chosen.
    pub(crate) chooses: bool,
}

/// What the next step is.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// From the most important.
    pub(crate) rows: Vec<StepRow>,
    /// Requests that nothing can make room for any more, with what they lack.
    pub(crate) refused: Vec<(ActiveRequest, OutOfBlocks)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: ScheduleLimits,
    /// From the highest rank.
    running: Vec<ActiveRequest>,
    waiting: Vec<ActiveRequest>,
    /// Tokens that each user with a request was served, all beginning with the least of the others.
    served: BTreeMap<u64, u64>,
    /// Requests that have run and left.
    n_departed: u64,
    n_preempted: u64,
}

impl Scheduler {
    pub(crate) fn new(limits: ScheduleLimits) -> Scheduler {
        let n_rows = limits.n_rows.clamp(1, limits.n_tokens.max(1));
        let limits = ScheduleLimits { n_rows, ..limits };
        let (running, waiting, served) = (Vec::new(), Vec::new(), BTreeMap::new());
        Scheduler { limits, running, waiting, served, n_departed: 0, n_preempted: 0 }
    }

    /// Adds a request; it waits.
    pub(crate) fn submit(&mut self, active: ActiveRequest) {
        let least = self.served.values().min().copied().unwrap_or(0);
        self.served.entry(active.user).or_insert(least);
        self.waiting.push(active);
    }

    pub(crate) fn get(&mut self, id: RequestId) -> Option<&mut ActiveRequest> {
        self.running.iter_mut().chain(&mut self.waiting).find(|active| active.id == id)
    }

    pub(crate) fn find(&self, id: RequestId) -> Option<&ActiveRequest> {
        self.running.iter().chain(&self.waiting).find(|active| active.id == id)
    }

    /// Takes a request out that has ended, was cancelled or failed.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<ActiveRequest> {
        let active = match self.running.iter().position(|active| active.id == id) {
            Some(at) => {
                self.n_departed += 1;
                self.running.remove(at)
            }
            None => self.waiting.remove(self.waiting.iter().position(|active| active.id == id)?),
        };
        if !self.running.iter().chain(&self.waiting).any(|other| other.user == active.user) {
            self.served.remove(&active.user);
        }
        Some(active)
    }

    /// Requests that run and that wait.
    pub(crate) fn n_running_and_waiting(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// How often a request had to give its blocks up.
    pub(crate) fn n_preempted(&self) -> u64 {
        self.n_preempted
    }

    /// Running requests, given by their sorted numbers, in that order.
    pub(crate) fn running_mut(&mut self, ids: &[RequestId]) -> Vec<&mut ActiveRequest> {
        let is_one = |active: &&mut ActiveRequest| ids.binary_search(&active.id).is_ok();
        let mut found: Vec<&mut ActiveRequest> = self.running.iter_mut().filter(is_one).collect();
        found.sort_unstable_by_key(|active| active.id);
        found
    }

    /// Notes that rows of a plan are not evaluated after all.
    pub(crate) fn take_back(&mut self, rows: &[StepRow]) {
        for row in rows {
            let user = self.find(row.id).map(|active| active.user);
            if let Some(served) = user.and_then(|user| self.served.get_mut(&user)) {
                *served = served.saturating_sub(row.n_tokens as u64);
            }
        }
    }

    /// Notes that the next tokens of a request were evaluated, and what was chosen behind them.
    pub(crate) fn advance(&mut self, id: RequestId, n_tokens: usize, chosen: Option<u32>) {
        let Some(active) = self.get(id) else { return };
        let start = active.state.tokens.len();
        let end = (start + n_tokens).min(active.tokens.len());
        active.state.tokens.extend_from_slice(&active.tokens[start..end]);
        if active.shares {
            active.state.table.publish(&active.state.tokens);
        }
        active.tokens.extend(chosen);
    }

    /// Decides on the next step. Every row of it has its blocks.
    pub(crate) fn plan(&mut self) -> Schedule {
        let mut plan = Schedule::default();
        let mut budget = self.limits.n_tokens;
        let before = self.n_preempted;
        let ranked: Vec<RequestId> = self.running.iter().map(|active| active.id).collect();
        for is_prompt in [false, true] {
            for &id in &ranked {
                // Preempted meanwhile, or not of this turn.
                let Some(active) = self.running.iter().find(|active| active.id == id) else { continue };
                let n_left = active.n_left();
                let is_full = budget == 0 || plan.rows.len() == self.limits.n_rows;
                if active.is_paused || (n_left > 1) != is_prompt || is_full {
                    continue;
                }
                if self.make_room(id, &mut plan, &mut budget) {
                    self.add_row(id, &mut plan, &mut budget);
                } else {
                    self.preempt(id, &mut plan, &mut budget);
                }
            }
        }
        // Who had to make room would only have to do so again.
        if self.n_preempted == before || plan.rows.is_empty() {
            while budget > 0 && self.has_row() && self.admit(&mut plan, &mut budget) {}
        }
        plan
    }

    /// Whether one more may run. Those that are paused take no part in a step.
    fn has_row(&self) -> bool {
        self.running.iter().filter(|active| !active.is_paused).count() < self.limits.n_rows
    }

    fn add_row(&mut self, id: RequestId, plan: &mut Schedule, budget: &mut usize) {
        let Some(active) = self.running.iter().find(|active| active.id == id) else { return };
        let (n_left, user) = (active.n_left(), active.user);
        let n_tokens = n_left.min(*budget);
        *budget -= n_tokens;
        *self.served.entry(user).or_default() += n_tokens as u64;
        plan.rows.push(StepRow { id, n_tokens, chooses: n_tokens == n_left });
    }

    /// Has blocks for all known tokens of a running request, if need be by preempting others.
    fn make_room(&mut self, id: RequestId, plan: &mut Schedule, budget: &mut usize) -> bool {
        loop {
            let Some(active) = self.running.iter_mut().find(|active| active.id == id) else { return false };
            // Steps of it that were sent ahead may be writing further on.
            if active.state.table.cover(active.tokens.len()).is_ok() {
                return true;
            }
            let (is_promised, rank) = (active.state.table.is_promised(), active.rank());
            match self.victim(|other| other.is_paused || is_promised || other.rank() > rank) {
                Some(victim) => self.preempt(victim, plan, budget),
                None => return false,
            }
        }
    }

    /// Whose blocks can be had: of those that may be asked, the paused first, then the lowest rank.
    fn victim(&self, may_ask: impl Fn(&ActiveRequest) -> bool) -> Option<RequestId> {
        let holders = self.running.iter().filter(|active| !active.state.table.is_promised());
        holders
            .filter(|active| may_ask(active))
            .max_by_key(|active| (active.is_paused, active.rank()))
            .map(|active| active.id)
    }

    /// Makes a running request wait again, without its blocks and without the row it may have.
    fn preempt(&mut self, id: RequestId, plan: &mut Schedule, budget: &mut usize) {
        let Some(at) = self.running.iter().position(|active| active.id == id) else { return };
        let mut active = self.running.remove(at);
        if let Some(row) = plan.rows.iter().position(|row| row.id == id) {
            *budget += plan.rows.remove(row).n_tokens;
        }
        self.n_preempted += 1;
        active.clear();
        active.preempted_at = Some(self.n_departed);
        self.waiting.push(active);
    }

    /// Lets the next waiting request run; false when there is none or it does not fit.
    fn admit(&mut self, plan: &mut Schedule, budget: &mut usize) -> bool {
        let Some(at) = self.next_waiting() else { return false };
        let active = &mut self.waiting[at];
        active.state.begin(&active.tokens);
        if active.shares {
            let n_held = active.state.table.reuse(&active.tokens, active.state.tokens.len());
            active.state.tokens.clear();
            active.state.tokens.extend_from_slice(&active.tokens[..n_held]);
        }
        let active = &self.waiting[at];
        if self.running.iter().any(|other| other.is_about_to_hold_more_of(active)) {
            // What it would evaluate is being evaluated.
            self.waiting[at].clear();
            return false;
        }
        let active = &mut self.waiting[at];
        let one_more = active.tokens.len() + active.state.table.kv_block();
        let fits = active.state.table.fit(one_more.min(active.n_positions).max(active.tokens.len()));
        let Err(error) = fits else {
            let mut active = self.waiting.remove(at);
            active.preempted_at = None;
            let id = active.id;
            let place = self.running.partition_point(|other| other.rank() < active.rank());
            self.running.insert(place, active);
            self.add_row(id, plan, budget);
            return true;
        };
        // What it found is free for others while it waits.
        active.clear();
        let (is_promised, priority) = (active.state.table.is_promised(), active.priority);
        let may_ask = |other: &ActiveRequest| other.is_paused || is_promised || other.priority < priority;
        if let Some(victim) = self.victim(may_ask) {
            self.preempt(victim, plan, budget);
            return true;
        }
        if self.running.iter().any(|active| !active.is_paused) {
            return false;
        }
        // Nobody is left who could make room.
        let id = self.waiting[at].id;
        plan.refused.extend(self.remove(id).map(|active| (active, error)));
        true
    }

    /// Whose turn it is, unless that one was preempted and nobody has left since.
    fn next_waiting(&self) -> Option<usize> {
        let key = |active: &ActiveRequest| {
            let served = self.served.get(&active.user).copied().unwrap_or(0);
            (Reverse(active.priority), served, active.id)
        };
        let waiting = self.waiting.iter().enumerate().filter(|(_, active)| !active.is_paused);
        let (at, next) = waiting.min_by_key(|(_, active)| key(active))?;
        let is_idle = self.running.iter().all(|active| active.is_paused);
        let may_run = next.preempted_at.is_none_or(|at| is_idle || self.n_departed > at);
        may_run.then_some(at)
    }
}

#[cfg(test)]
mod tests;
