//! The engine's thread: the steps in which it serves what it is sent.

use crate::core::{Core, SequenceState};
use crate::engine::EngineLoad;
use crate::error::{EngineError, Stopped};
use crate::follow::{Ahead, FollowRow, FollowedStep, Sends};
use crate::mailbox::Mailbox;
use crate::request::{FinishReason, HeldSequence, Request, RequestId, TokenEvent};
use crate::runner::Choice;
use crate::sampling::SamplingRow;
use crate::schedule::{ActiveRequest, ScheduleLimits, Scheduler, StepRow};
use crate::step::{Want, step_kind};
use crate::stream::{Channel, Demand};
use refrain_graph::StepKind;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// The life of the engine's thread.
pub(crate) fn serve(core: Core, mailbox: &Mailbox) {
    let mut server = Server::new(core);
    let served = catch_unwind(AssertUnwindSafe(|| server.serve_all(mailbox)));
    let why = served.unwrap_or_else(|panic| Stopped::Panicked { message: message_of(&*panic) });
    let (unseen, calls, mut open) = mailbox.stop(&why);
    unseen.into_iter().for_each(|submitted| server.take_in(submitted));
    for id in server.jobs.keys().copied().collect::<Vec<_>>() {
        open.retain(|(other, _)| *other != id);
        server.fail(id, why.clone().into());
    }
    // A panic in the middle of a job's end leaves a channel whose job is gone: its consumer must hear of it too.
    for (_, channel) in open {
        channel.push(Err(why.clone().into()));
    }
    // Callers hear of it when what would have answered them is dropped.
    drop(calls);
    // What is left of a device after a panic may throw once more, and nobody is left to hear it.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(server)));
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// A request on its way to the engine's thread.
pub(crate) struct Submitted {
    active: ActiveRequest,
    job: Job,
}

impl Submitted {
    pub(crate) fn channel(&self) -> &Arc<Channel> {
        &self.job.channel
    }

    pub(crate) fn new(
        id: RequestId,
        held: Option<HeldSequence>,
        state: SequenceState,
        request: Request,
        row: SamplingRow,
        channel: Arc<Channel>,
    ) -> Submitted {
        // The last token is chosen and not evaluated.
        let n_positions = request.prompt.len().saturating_add(request.max_tokens.saturating_sub(1));
        let mut active =
            ActiveRequest::new(id, request.prompt.clone(), n_positions.min(state.context), state);
        (active.priority, active.user) = (request.priority, request.user);
        // A recurrent state cannot be shared: it is that behind all tokens.
        active.shares = held.is_none() && !active.state.table.has_slots();
        if active.shares {
            // KV depends on the adapter too.
            active.state.table.set_root(request.adapter.map_or(0, |adapter| 1 + u64::from(adapter.0)));
        }
        let (prefill, n_chosen) = (Duration::ZERO, 0);
        Submitted { active, job: Job { held, request, row, channel, prefill, n_chosen } }
    }
}

/// What the engine's thread works with.
pub(crate) struct Server {
    pub(crate) core: Core,
    scheduler: Scheduler,
    /// What is known of each request besides its tokens and blocks, which the scheduler has.
    jobs: BTreeMap<RequestId, Job>,
}

impl Server {
    fn new(core: Core) -> Server {
        let limits = ScheduleLimits { n_tokens: core.max_tokens(), n_rows: core.max_seqs() };
        Server { core, scheduler: Scheduler::new(limits), jobs: BTreeMap::new() }
    }

    pub(crate) fn load(&self) -> EngineLoad {
        let (n_running, n_waiting) = self.scheduler.n_running_and_waiting();
        let (n_preempted, blocks) = (self.scheduler.n_preempted(), self.core.block_counts());
        EngineLoad { n_running, n_waiting, n_preempted, blocks, slots: self.core.slot_counts() }
    }

    /// Serves until nobody is left, or until the device is lost.
    fn serve_all(&mut self, mailbox: &Mailbox) -> Stopped {
        loop {
            if let Some((submitted, calls, is_closed)) = mailbox.take() {
                submitted.into_iter().for_each(|submitted| self.take_in(submitted));
                if is_closed {
                    return Stopped::Closed;
                }
                calls.into_iter().for_each(|call| call(self));
                self.look_at_demand(mailbox);
            }
            let plan = self.scheduler.plan();
            for (active, error) in plan.refused {
                mailbox.ended(active.id);
                if let Some(job) = self.jobs.remove(&active.id) {
                    job.fail(Some(active.state), error.into());
                }
            }
            let rows = &plan.rows[..];
            let done = match rows {
                [] => {
                    mailbox.wait();
                    continue;
                }
                _ if self.may_follow(rows) => self.follow(mailbox, rows, Sends::Ahead),
                _ => match self.ahead_of(rows) {
                    under_way if under_way.is_empty() => self.step(mailbox, rows),
                    // Steps that were sent are taken first: they are what the others would do now.
                    under_way => {
                        self.scheduler.take_back(rows);
                        self.follow(mailbox, &under_way, Sends::Nothing)
                    }
                },
            };
            if let Err(stopped) = done {
                return stopped;
            }
        }
    }

    fn take_in(&mut self, Submitted { active, job }: Submitted) {
        self.jobs.insert(active.id, job);
        self.scheduler.submit(active);
    }

    /// Ends what nobody wants any more, and leaves out for now who has enough. Consumers that change their mind are news;
    /// what they want after an event is known when it is passed on.
    fn look_at_demand(&mut self, mailbox: &Mailbox) {
        let ids: Vec<RequestId> = self.jobs.keys().copied().collect();
        for id in ids {
            let Some(job) = self.jobs.get(&id) else { continue };
            let demand = job.channel.demand();
            if demand == Demand::Cancel {
                self.end(mailbox, id, FinishReason::Cancelled);
            } else if job.request.max_tokens == 0 && demand == Demand::GoOn {
                self.end(mailbox, id, FinishReason::MaxTokens);
            } else if let Some(active) = self.scheduler.get(id) {
                active.is_paused = demand == Demand::Pause;
            }
        }
    }

    /// Whether a step is one that feeds itself, so that the next ones can be sent before their tokens are asked for.
    fn may_follow(&self, rows: &[StepRow]) -> bool {
        let is_fed = |row: &StepRow| {
            row.n_tokens == 1 && row.chooses && self.jobs.get(&row.id).is_some_and(|job| job.row.n_top == 0)
        };
        // The last token of a prompt looks like a decoded one; alone, it is entered as what it is.
        let is_prompt = match rows {
            [row] => self.jobs.get(&row.id).is_some_and(|job| job.n_chosen == 0),
            _ => false,
        };
        !is_prompt && rows.iter().all(is_fed)
    }

    /// The rows that have steps under way.
    fn ahead_of(&self, rows: &[StepRow]) -> Vec<StepRow> {
        let is_ahead = |row: &&StepRow| {
            let active = self.scheduler.find(row.id).filter(|_| row.n_tokens == 1 && row.chooses);
            let last = active.and_then(|active| Some((active, *active.tokens.last()?)));
            last.is_some_and(|(active, token)| self.core.is_ahead_of(&active.state, token))
        };
        rows.iter().filter(is_ahead).copied().collect()
    }

    /// One decode step of some requests, with more of them sent behind it.
    fn follow(&mut self, mailbox: &Mailbox, rows: &[StepRow], sends: Sends) -> Result<(), Stopped> {
        let mut ids: Vec<RequestId> = rows.iter().map(|row| row.id).collect();
        ids.sort_unstable();
        let jobs = self.jobs.iter_mut().filter(|(id, _)| ids.binary_search(id).is_ok());
        let actives = self.scheduler.running_mut(&ids);
        let mut follow: Vec<FollowRow<'_>> = actives
            .into_iter()
            .zip(jobs)
            .filter_map(|(active, (id, job))| {
                debug_assert_eq!(active.id, *id);
                let n_tokens = job.request.max_tokens - job.n_chosen;
                let ahead = Ahead { n_tokens, end: &job.request.end };
                let token = *active.tokens.last()?;
                Some(FollowRow { sequence: &mut active.state, token, row: &mut job.row, ahead })
            })
            .collect();
        let step = self.core.follow_rows(&mut follow, sends);
        drop(follow);
        match step {
            Ok(FollowedStep { choices, took }) => {
                for (id, choice) in ids.into_iter().zip(choices) {
                    let Some(choice) = choice else { continue };
                    let choice = choice.map(|chosen| Choice { chosen, top: Vec::new() });
                    // The sequence holds its token already.
                    let row = StepRow { id, n_tokens: 0, chooses: true };
                    self.deliver(mailbox, row, Some(choice), took)?;
                }
                Ok(())
            }
            // The scheduler makes room or says why not.
            Err(EngineError::OutOfBlocks(_)) => Ok(()),
            Err(error) => self.step_failed(mailbox, rows, error),
        }
    }

    /// One step of several requests.
    fn step(&mut self, mailbox: &Mailbox, rows: &[StepRow]) -> Result<(), Stopped> {
        self.core.settle();
        match self.try_step(rows) {
            Ok(took) => {
                let choices = self.core.take_choices().collect::<Vec<_>>();
                for (row, choice) in rows.iter().zip(choices) {
                    self.deliver(mailbox, *row, choice, took)?;
                }
                Ok(())
            }
            Err(error) => self.step_failed(mailbox, rows, error),
        }
    }

    fn step_failed(
        &mut self,
        mailbox: &Mailbox,
        rows: &[StepRow],
        error: EngineError,
    ) -> Result<(), Stopped> {
        match rows {
            [row] => self.failed(mailbox, row.id, error),
            [row, ..] if error.stops().is_some() => self.failed(mailbox, row.id, error),
            // A step can run twice: one by one, only those fail that cannot be run.
            _ => rows.iter().try_for_each(|row| self.step(mailbox, &[*row])),
        }
    }

    fn try_step(&mut self, rows: &[StepRow]) -> Result<Duration, EngineError> {
        for row in rows {
            let (Some(active), Some(job)) = (self.scheduler.get(row.id), self.jobs.get_mut(&row.id)) else {
                unreachable!("{} was scheduled", row.id)
            };
            self.core.restore(&mut active.state)?;
            let end = active.state.tokens.len() + row.n_tokens;
            job.row.advance(end, &active.tokens[..end]);
        }
        let (mut requests, mut ledgers) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        let mut is_prompt = false;
        for row in rows {
            let (Some(active), Some(job)) = (self.scheduler.find(row.id), self.jobs.get(&row.id)) else {
                unreachable!("{} was scheduled", row.id)
            };
            let start = active.state.tokens.len();
            let tokens = &active.tokens[start..start + row.n_tokens];
            let want = if row.chooses { Want::Sample(&job.row) } else { Want::Nothing };
            requests.push(active.state.request(tokens, want));
            ledgers.push(&active.state.ledger);
            is_prompt = job.n_chosen == 0;
        }
        // The last token of a prompt looks like a decoded one.
        let kind = if rows.len() == 1 && is_prompt { StepKind::Prompt } else { step_kind(&requests) };
        let took = self.core.step(kind, &requests, &ledgers)?;
        for row in rows {
            if let Some(active) = self.scheduler.get(row.id) {
                active.state.evaluated(row.n_tokens);
            }
        }
        Ok(took)
    }

    /// Passes on what a step came to for one request.
    fn deliver(
        &mut self,
        mailbox: &Mailbox,
        row: StepRow,
        choice: Option<Result<Choice, EngineError>>,
        took: Duration,
    ) -> Result<(), Stopped> {
        let choice = match choice.transpose() {
            Ok(choice) => choice,
            Err(error) => return self.failed(mailbox, row.id, error),
        };
        self.scheduler.advance(row.id, row.n_tokens, choice.as_ref().map(|choice| choice.chosen.token));
        let (Some(active), Some(job)) = (self.scheduler.get(row.id), self.jobs.get_mut(&row.id)) else {
            return Ok(());
        };
        if choice.is_some()
            && job.n_chosen == 0
            && let Err(error) = self.core.keep_state(&mut active.state)
        {
            return self.failed(mailbox, row.id, error);
        }
        let (demand, finish) = match choice {
            Some(choice) => job.chosen(choice, took, &active.state),
            None => (job.evaluated(active.state.tokens.len(), took), None),
        };
        active.is_paused = demand == Demand::Pause;
        if let Some(finish) = finish {
            self.end(mailbox, row.id, finish);
        }
        Ok(())
    }

    /// Ends a request. Whoever hears of it finds a complete ledger, and the sequence free. What is under way of it runs
    /// before anything that could be sent for the sequence or its blocks from here on.
    fn end(&mut self, mailbox: &Mailbox, id: RequestId, finish: FinishReason) {
        let (Some(active), Some(job)) = (self.scheduler.remove(id), self.jobs.remove(&id)) else { return };
        self.core.leave(&active.state);
        let channel = job.close(Some(active.state));
        mailbox.ended(id);
        channel.push(Ok(TokenEvent::End(finish)));
    }

    /// Ends a request with an error, and the engine where it cannot go on.
    fn failed(&mut self, mailbox: &Mailbox, id: RequestId, error: EngineError) -> Result<(), Stopped> {
        let stops = error.stops();
        if let Some(active) = self.scheduler.find(id) {
            self.core.leave(&active.state);
        }
        mailbox.ended(id);
        self.fail(id, error);
        stops.map_or(Ok(()), Err)
    }

    fn fail(&mut self, id: RequestId, error: EngineError) {
        let state = self.scheduler.remove(id).map(|active| active.state);
        if let Some(job) = self.jobs.remove(&id) {
            job.fail(state, error);
        }
    }
}

/// What is known of a request besides its tokens and blocks.
struct Job {
    held: Option<HeldSequence>,
    request: Request,
    row: SamplingRow,
    channel: Arc<Channel>,
    /// Time that the prompt's steps took.
    prefill: Duration,
    n_chosen: usize,
}

impl Job {
    /// Passes a piece of a prompt on; what the consumer wants next.
    fn evaluated(&mut self, n_done: usize, took: Duration) -> Demand {
        self.prefill += took;
        let n_tokens = self.request.prompt.len();
        match self.n_chosen {
            0 => self.channel.push(Ok(TokenEvent::Prompt { n_done, n_tokens })),
            // Behind the prompt, tokens are evaluated a second time after a preemption.
            _ => self.channel.demand(),
        }
    }

    /// Passes a choice on; what the consumer wants next, and whether the request has ended.
    fn chosen(
        &mut self,
        Choice { chosen, top }: Choice,
        took: Duration,
        state: &SequenceState,
    ) -> (Demand, Option<FinishReason>) {
        self.n_chosen += 1;
        let took = took + std::mem::take(&mut self.prefill);
        let finish = if self.request.end.contains(&chosen.token) {
            Some(FinishReason::EndToken)
        } else if self.n_chosen >= self.request.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if state.tokens.len() >= state.context {
            // The token in hand needs a position before the next can be chosen.
            Some(FinishReason::ContextFull)
        } else {
            None
        };
        let event = TokenEvent::Token { token: chosen.token, logprob: chosen.logprob, top, took };
        (self.channel.push(Ok(event)), finish)
    }

    /// Gives the sequence back, and the channel for the last event.
    fn close(self, state: Option<SequenceState>) -> Arc<Channel> {
        let Job { held, request, channel, .. } = self;
        if let (Some(mut held), Some(state)) = (held, state) {
            held.put(state);
        }
        drop(request);
        channel
    }

    fn fail(self, state: Option<SequenceState>, error: EngineError) {
        self.close(state).push(Err(error));
    }
}
