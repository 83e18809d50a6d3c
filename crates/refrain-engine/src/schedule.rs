//! Decides which sequences take part in the next step, and with how many tokens.
//!
//! A step has a token budget. Decoding sequences come first, with one token each; prompts fill the remaining
//! budget in chunks. Beside many decoding sequences the chunks are smaller, since each of them waits for the
//! step: their share of the budget is that of the prompts among all sequences. A waiting request is admitted when its prompt and one more block fit. When a running
//! request needs a block and none is left, the newest request of the lowest priority is preempted: it
//! releases its blocks and later evaluates its tokens again, except for those the prefix cache still holds. A
//! waiting request preempts only lower priorities, and requests whose consumers are not asking for more. A
//! request whose prefix another request is evaluating waits for it, so several completions of one prompt
//! evaluate the prompt once.
//!
//! Why there is always progress: the oldest request of the highest priority is never preempted by another
//! one, and a request that could not finish alone is refused, so that request ends. A preempted request is
//! readmitted only after another one has left, so it is preempted at most once per departure. Waiting users
//! take turns by the number of tokens served, and nobody overtakes the next in turn.
//!
//! Sequences with reserved blocks, such as those of sessions, are never preempted: that would free no block
//! that others could use.
//!
//! Invariant: no clock, no randomness, no device. Decisions depend only on the calls made.

use crate::blocks::OutOfBlocks;
use crate::core::SequenceState;
use crate::request::RequestId;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduleLimits {
    /// Tokens of a step.
    pub(crate) n_tokens: usize,
    /// Prompt tokens of a step that it has room for however many sequences decode.
    pub(crate) n_beside: usize,
    /// Maximum number of running sequences.
    pub(crate) n_rows: usize,
}

/// A running or waiting request, as the scheduler sees it.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) id: RequestId,
    /// Higher priorities are admitted and served first.
    pub(crate) priority: i32,
    /// The user it belongs to.
    pub(crate) user: u64,
    /// All known tokens: the prompt and the tokens chosen after it. At least one of them is not evaluated
    /// yet.
    pub(crate) tokens: Vec<u32>,
    /// Positions that it may need at most.
    pub(crate) n_positions: usize,
    /// Evaluated tokens and blocks.
    pub(crate) state: SequenceState,
    /// Whether it may share cached prefixes with other requests.
    pub(crate) shares: bool,
    /// Whether its consumer is not asking for more.
    pub(crate) is_paused: bool,
    /// The number of departed requests when it was preempted.
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

    /// Known tokens that are not evaluated yet.
    pub(crate) fn n_left(&self) -> usize {
        self.tokens.len() - self.state.tokens.len()
    }

    /// Order among running requests. Request ids increase in order of arrival.
    fn rank(&self) -> (Reverse<i32>, RequestId) {
        (Reverse(self.priority), self.id)
    }

    /// Whether it will evaluate whole blocks of another request's prefix that the other does not hold yet.
    fn is_about_to_hold_more_of(&self, other: &ActiveRequest) -> bool {
        let may_share = self.shares && other.shares && self.state.table.root() == other.state.table.root();
        // The other request always evaluates its last token itself.
        let usable = &other.tokens[..other.tokens.len() - 1];
        let n_common = self.tokens.iter().zip(usable).take_while(|(a, b)| a == b).count();
        let kv_block = self.state.table.kv_block();
        let n_shared = n_common / kv_block * kv_block;
        may_share
            && !self.is_paused
            && n_shared > other.state.tokens.len().max(self.state.tokens.len() / kv_block * kv_block)
    }

    /// Releases its blocks, unless they are reserved.
    fn clear(&mut self) {
        if !self.state.table.is_reserved() {
            self.state.clear();
        }
    }
}

/// Tokens of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepRow {
    pub(crate) id: RequestId,
    /// Number of its tokens to evaluate.
    pub(crate) n_tokens: usize,
    /// Whether these are its last known tokens, so that the next one is chosen.
    pub(crate) chooses: bool,
}

/// The next step.
#[derive(Debug, Default)]
pub(crate) struct StepSchedule {
    /// Highest rank first.
    pub(crate) rows: Vec<StepRow>,
    /// Requests for which no blocks can be freed any more, with the shortage.
    pub(crate) refused: Vec<(ActiveRequest, OutOfBlocks)>,
}

/// The scheduler; see the module documentation.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: ScheduleLimits,
    /// Highest rank first.
    running: Vec<ActiveRequest>,
    waiting: Vec<ActiveRequest>,
    /// Tokens served to each user with a request. A new user starts at the minimum of the others.
    served: BTreeMap<u64, u64>,
    /// Number of requests that have run and left.
    n_departed: u64,
    n_preempted: u64,
    prompts: PromptCounts,
}

/// Tokens of admitted requests. A preempted request counts again when it is readmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptCounts {
    /// Known tokens of the requests.
    pub n_tokens: u64,
    /// Those that need not be evaluated, because the cache holds them.
    pub n_cached: u64,
}

impl Scheduler {
    pub(crate) fn new(limits: ScheduleLimits) -> Scheduler {
        let n_rows = limits.n_rows.clamp(1, limits.n_tokens.max(1));
        let limits = ScheduleLimits { n_rows, ..limits };
        let (running, waiting, served) = (Vec::new(), Vec::new(), BTreeMap::new());
        let prompts = PromptCounts::default();
        Scheduler { limits, running, waiting, served, n_departed: 0, n_preempted: 0, prompts }
    }

    /// Adds a waiting request.
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

    /// Removes a request that has ended, was cancelled or failed.
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

    /// Numbers of running and waiting requests.
    pub(crate) fn n_running_and_waiting(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Tokens of admitted requests so far.
    pub(crate) fn prompts(&self) -> PromptCounts {
        self.prompts
    }

    /// Number of preemptions.
    pub(crate) fn n_preempted(&self) -> u64 {
        self.n_preempted
    }

    /// Running requests for the given sorted ids, in that order.
    pub(crate) fn running_mut(&mut self, ids: &[RequestId]) -> Vec<&mut ActiveRequest> {
        let is_one = |active: &&mut ActiveRequest| ids.binary_search(&active.id).is_ok();
        let mut found: Vec<&mut ActiveRequest> = self.running.iter_mut().filter(is_one).collect();
        found.sort_unstable_by_key(|active| active.id);
        found
    }

    /// Reverts the accounting for rows of a plan that are not evaluated after all.
    pub(crate) fn undo(&mut self, rows: &[StepRow]) {
        for row in rows {
            let user = self.find(row.id).map(|active| active.user);
            if let Some(served) = user.and_then(|user| self.served.get_mut(&user)) {
                *served = served.saturating_sub(row.n_tokens as u64);
            }
        }
    }

    /// Counts rows that a step evaluated for a request in addition to those of the plan.
    pub(crate) fn charge(&mut self, id: RequestId, n_tokens: usize) {
        let user = self.find(id).map(|active| active.user);
        if let Some(served) = user.and_then(|user| self.served.get_mut(&user)) {
            *served += n_tokens as u64;
        }
    }

    /// Records that the next tokens of a request were evaluated, and the token chosen after them.
    pub(crate) fn advance(&mut self, id: RequestId, n_tokens: usize, chosen: Option<u32>) {
        let Some(active) = self.get(id) else { return };
        let start = active.state.tokens.len();
        let end = (start + n_tokens).min(active.tokens.len());
        active.state.tokens.extend_from_slice(&active.tokens[start..end]);
        if active.shares {
            active.state.table.publish(&active.state.tokens);
        }
        active.state.table.leave_window(active.state.tokens.len());
        active.tokens.extend(chosen);
    }

    /// Plans the next step. All of its rows have their blocks.
    pub(crate) fn plan(&mut self) -> StepSchedule {
        let mut plan = StepSchedule::default();
        let mut budget = self.limits.n_tokens;
        let before = self.n_preempted;
        let ranked: Vec<RequestId> = self.running.iter().map(|active| active.id).collect();
        for is_prompt in [false, true] {
            if is_prompt {
                budget = budget.min(self.prompt_budget(plan.rows.len()));
            }
            for &id in &ranked {
                // Preempted by an earlier row, or not part of this pass.
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
        // After a preemption nothing is admitted: it would only be preempted again.
        if self.n_preempted == before || plan.rows.is_empty() {
            while budget > 0 && self.has_row() && self.admit(&mut plan, &mut budget) {}
        }
        plan
    }

    /// Maximum number of prompt tokens beside decoding sequences.
    fn prompt_budget(&self, n_decoding: usize) -> usize {
        let n_running = self.running.iter().filter(|active| !active.is_paused && active.n_left() > 1).count();
        let n_waiting = self.waiting.iter().filter(|active| !active.is_paused).count();
        let n_prompts = n_running + n_waiting;
        let share = self.limits.n_tokens.saturating_mul(n_prompts) / (n_decoding + n_prompts).max(1);
        share.max(self.limits.n_beside)
    }

    /// Whether one more request may run. Paused requests take no part in steps.
    fn has_row(&self) -> bool {
        self.running.iter().filter(|active| !active.is_paused).count() < self.limits.n_rows
    }

    fn add_row(&mut self, id: RequestId, plan: &mut StepSchedule, budget: &mut usize) {
        let Some(active) = self.running.iter().find(|active| active.id == id) else { return };
        let (n_left, user) = (active.n_left(), active.user);
        let n_tokens = n_left.min(*budget);
        *budget -= n_tokens;
        *self.served.entry(user).or_default() += n_tokens as u64;
        plan.rows.push(StepRow { id, n_tokens, chooses: n_tokens == n_left });
    }

    /// Allocates blocks for all known tokens of a running request, preempting others if necessary.
    fn make_room(&mut self, id: RequestId, plan: &mut StepSchedule, budget: &mut usize) -> bool {
        loop {
            let Some(active) = self.running.iter_mut().find(|active| active.id == id) else { return false };
            // Steps launched ahead may be writing past its tokens.
            if active.state.table.cover(active.tokens.len()).is_ok() {
                return true;
            }
            let (is_reserved, rank) = (active.state.table.is_reserved(), active.rank());
            match self.victim(|other| other.is_paused || is_reserved || other.rank() > rank) {
                Some(victim) => self.preempt(victim, plan, budget),
                None => return false,
            }
        }
    }

    /// The running request to preempt among the eligible ones: paused first, then lowest rank.
    fn victim(&self, may_ask: impl Fn(&ActiveRequest) -> bool) -> Option<RequestId> {
        let holders = self.running.iter().filter(|active| !active.state.table.is_reserved());
        holders
            .filter(|active| may_ask(active))
            .max_by_key(|active| (active.is_paused, active.rank()))
            .map(|active| active.id)
    }

    /// Moves a running request back to waiting, without its blocks and without its row in the plan.
    fn preempt(&mut self, id: RequestId, plan: &mut StepSchedule, budget: &mut usize) {
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

    /// Admits the next waiting request. Returns false if there is none or it does not fit.
    fn admit(&mut self, plan: &mut StepSchedule, budget: &mut usize) -> bool {
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
            // Another request is already evaluating its prefix.
            self.waiting[at].clear();
            return false;
        }
        let active = &mut self.waiting[at];
        let one_more = active.tokens.len() + active.state.table.kv_block();
        let fits = active.state.table.fit(one_more.min(active.n_positions).max(active.tokens.len()));
        let Err(error) = fits else {
            let mut active = self.waiting.remove(at);
            active.preempted_at = None;
            self.prompts.n_tokens += active.tokens.len() as u64;
            self.prompts.n_cached += active.state.tokens.len() as u64;
            let id = active.id;
            let place = self.running.partition_point(|other| other.rank() < active.rank());
            self.running.insert(place, active);
            self.add_row(id, plan, budget);
            return true;
        };
        // Cached blocks it found are available to others while it waits.
        active.clear();
        let (is_reserved, priority) = (active.state.table.is_reserved(), active.priority);
        let may_ask = |other: &ActiveRequest| other.is_paused || is_reserved || other.priority < priority;
        if let Some(victim) = self.victim(may_ask) {
            self.preempt(victim, plan, budget);
            return true;
        }
        if self.running.iter().any(|active| !active.is_paused) {
            return false;
        }
        // No other request could free blocks.
        let id = self.waiting[at].id;
        plan.refused.extend(self.remove(id).map(|active| (active, error)));
        true
    }

    /// Index of the next waiting request in turn, unless it was preempted and no request has left since.
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
