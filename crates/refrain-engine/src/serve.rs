//! The engine's thread: what it is sent, and the steps in which it serves it.

use crate::core::{Core, SequenceState};
use crate::engine::EngineLoad;
use crate::error::{EngineError, Stopped};
use crate::follow::Ahead;
use crate::request::{FinishReason, HeldSequence, Request, RequestId, TokenEvent, lock};
use crate::runner::{Choice, StepRequest, Want, step_kind};
use crate::sampling::SamplingRow;
use crate::schedule::{ActiveRequest, ScheduleLimits, Scheduler, StepRow};
use crate::stream::{Channel, Demand};
use refrain_graph::StepKind;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Something to do between two steps.
pub(crate) type Call = Box<dyn FnOnce(&mut Server) + Send>;

/// What handles and the engine's thread share.
pub(crate) struct Mailbox {
    mail: Mutex<Mail>,
    came: Condvar,
    stopped: Condvar,
    /// Whether there is anything new. Looked at after every step, so without the lock.
    is_new: AtomicBool,
}

/// Channels of requests that have not ended.
type OpenChannels = Vec<(RequestId, Arc<Channel>)>;

#[derive(Default)]
struct Mail {
    submitted: Vec<Submitted>,
    calls: Vec<Call>,
    n_submitted: u64,
    /// Channels of the requests that have not ended, from the oldest.
    open: OpenChannels,
    is_closed: bool,
    stopped: Option<Stopped>,
}

impl Mail {
    fn check(&self) -> Result<(), EngineError> {
        self.stopped.clone().map_or(Ok(()), |stopped| Err(stopped.into()))
    }
}

impl Mailbox {
    pub(crate) fn new() -> Mailbox {
        Mailbox {
            mail: Mutex::new(Mail::default()),
            came: Condvar::new(),
            stopped: Condvar::new(),
            is_new: AtomicBool::new(false),
        }
    }

    /// Adds a request if fewer than `most` are open. They are numbered in the order they come.
    pub(crate) fn submit(
        &self,
        most: usize,
        make: impl FnOnce(RequestId) -> Result<Submitted, EngineError>,
    ) -> Result<RequestId, EngineError> {
        self.send(|mail| {
            let n_requests = mail.open.len();
            if n_requests >= most {
                return Err(EngineError::QueueFull { n_requests, most });
            }
            let id = RequestId(mail.n_submitted);
            let submitted = make(id)?;
            mail.n_submitted += 1;
            mail.open.push((id, submitted.job.channel.clone()));
            mail.submitted.push(submitted);
            Ok(id)
        })
    }

    pub(crate) fn call(&self, call: Call) -> Result<(), EngineError> {
        self.send(|mail| {
            mail.calls.push(call);
            Ok(())
        })
    }

    fn send<R>(&self, add: impl FnOnce(&mut Mail) -> Result<R, EngineError>) -> Result<R, EngineError> {
        let mut mail = lock(&self.mail);
        mail.check()?;
        let added = add(&mut mail)?;
        self.notify();
        Ok(added)
    }

    /// Fails when the engine serves nobody any more.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        lock(&self.mail).check()
    }

    pub(crate) fn cancel(&self, id: RequestId) {
        let mail = lock(&self.mail);
        if let Some((_, channel)) = mail.open.iter().find(|(open, _)| *open == id) {
            channel.cancel();
            self.notify();
        }
    }

    pub(crate) fn close(&self) {
        lock(&self.mail).is_closed = true;
        self.wake();
    }

    /// Makes the thread look at what its requests want.
    pub(crate) fn wake(&self) {
        let _mail = lock(&self.mail);
        self.notify();
    }

    /// Only with the lock held: between its last look and its sleep the thread holds it.
    fn notify(&self) {
        self.is_new.store(true, Ordering::Release);
        self.came.notify_one();
    }

    /// Why the thread has ended; waits for the end if it is near.
    pub(crate) fn why_stopped(&self) -> Stopped {
        let mut mail = lock(&self.mail);
        loop {
            match &mail.stopped {
                Some(stopped) => return stopped.clone(),
                None => mail = self.stopped.wait(mail).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn is_new(&self) -> bool {
        self.is_new.load(Ordering::Acquire)
    }

    /// Waits until there is something new.
    fn wait(&self) {
        let mut mail = lock(&self.mail);
        while !self.is_new() {
            mail = self.came.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// All that is new, if anything is, and whether the engine is to end.
    fn take(&self) -> Option<(Vec<Submitted>, Vec<Call>, bool)> {
        if !self.is_new() {
            return None;
        }
        let mut mail = lock(&self.mail);
        self.is_new.store(false, Ordering::Release);
        Some((std::mem::take(&mut mail.submitted), std::mem::take(&mut mail.calls), mail.is_closed))
    }

    fn ended(&self, id: RequestId) {
        lock(&self.mail).open.retain(|(open, _)| *open != id);
    }

    /// From here on nothing is taken in; gives what nobody has looked at, and the channels of all that has not ended.
    fn stop(&self, why: &Stopped) -> (Vec<Submitted>, Vec<Call>, OpenChannels) {
        let mut mail = lock(&self.mail);
        mail.stopped = Some(why.clone());
        self.stopped.notify_all();
        let open = std::mem::take(&mut mail.open);
        (std::mem::take(&mut mail.submitted), std::mem::take(&mut mail.calls), open)
    }
}

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
    pub(crate) fn new(
        id: RequestId,
        held: Option<HeldSequence>,
        state: SequenceState,
        request: Request,
        (row, endless): (SamplingRow, Option<SamplingRow>),
        channel: Arc<Channel>,
    ) -> Submitted {
        // The last token is chosen and not evaluated.
        let n_positions = request.prompt.len().saturating_add(request.max_tokens.saturating_sub(1));
        let mut active =
            ActiveRequest::new(id, request.prompt.clone(), n_positions.min(state.context), state);
        (active.priority, active.user) = (request.priority, request.user);
        active.shares = held.is_none();
        if active.shares {
            // KV depends on the adapter too.
            active.state.table.set_root(request.adapter.map_or(0, |adapter| 1 + u64::from(adapter.0)));
        }
        let (prefill, n_chosen) = (Duration::ZERO, 0);
        Submitted { active, job: Job { held, request, row, endless, channel, prefill, n_chosen } }
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
        EngineLoad { n_running, n_waiting, n_preempted, blocks }
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
            let done = match plan.rows[..] {
                [] => {
                    mailbox.wait();
                    continue;
                }
                [row] if self.may_run_ahead(row) => self.run_ahead(mailbox, row.id),
                _ => self.step(mailbox, &plan.rows),
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

    /// Whether a step is one of a sequence that is alone and goes on, so that the next ones can be sent before their
    /// tokens are asked for.
    fn may_run_ahead(&self, row: StepRow) -> bool {
        let has_begun = self.jobs.get(&row.id).is_some_and(|job| job.n_chosen > 0 && job.row.n_top == 0);
        has_begun && row.n_tokens == 1 && row.chooses && self.scheduler.is_alone(row.id)
    }

    /// Decode steps of one request, until it ends, has enough for now, or something new has come.
    fn run_ahead(&mut self, mailbox: &Mailbox, id: RequestId) -> Result<(), Stopped> {
        loop {
            let (Some(active), Some(job)) = (self.scheduler.get(id), self.jobs.get_mut(&id)) else {
                return Ok(());
            };
            let Some(&last) = active.tokens.last() else { return Ok(()) };
            let (choice, took) = match job.decode(&mut self.core, &mut active.state, last) {
                Ok(decoded) => decoded,
                // The scheduler makes room or says why not.
                Err(EngineError::OutOfBlocks(_)) => return Ok(()),
                Err(error) => return self.failed(mailbox, id, error),
            };
            active.tokens.push(choice.chosen.token);
            if active.shares {
                active.state.table.publish(&active.state.tokens);
            }
            let (demand, finish) = job.chosen(choice, took, &active.state);
            active.is_paused = demand == Demand::Pause;
            if let Some(finish) = finish {
                self.end(mailbox, id, finish);
                return Ok(());
            }
            if demand != Demand::GoOn || mailbox.is_new() {
                return Ok(());
            }
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
            Err(error) => match rows {
                [row] => self.failed(mailbox, row.id, error),
                [row, ..] if error.stops().is_some() => self.failed(mailbox, row.id, error),
                // A step can run twice: one by one, only those fail that cannot be run.
                _ => rows.iter().try_for_each(|row| self.step(mailbox, &[*row])),
            },
        }
    }

    fn try_step(&mut self, rows: &[StepRow]) -> Result<Duration, EngineError> {
        for row in rows {
            let (Some(active), Some(job)) = (self.scheduler.get(row.id), self.jobs.get_mut(&row.id)) else {
                unreachable!("{} was scheduled", row.id)
            };
            let end = active.state.tokens.len() + row.n_tokens;
            job.rules().0.advance(end, &active.tokens[..end]);
        }
        let (mut requests, mut ledgers) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        let mut is_prompt = false;
        for row in rows {
            let (Some(active), Some(job)) = (self.scheduler.find(row.id), self.jobs.get(&row.id)) else {
                unreachable!("{} was scheduled", row.id)
            };
            let start = active.state.tokens.len();
            let tokens = &active.tokens[start..start + row.n_tokens];
            let want = if row.chooses { Want::Sample(job.rules_now()) } else { Want::Nothing };
            requests.push(StepRequest { tokens, start, table: active.state.table.blocks(), want });
            ledgers.push(&active.state.ledger);
            is_prompt = job.n_chosen == 0;
        }
        // The last token of a prompt looks like a decoded one.
        let kind = if rows.len() == 1 && is_prompt { StepKind::Prompt } else { step_kind(&requests) };
        self.core.step(kind, &requests, &ledgers)
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

    /// Ends a request. Whoever hears of it finds no step of it under way, a complete ledger, and the sequence free.
    fn end(&mut self, mailbox: &Mailbox, id: RequestId, finish: FinishReason) {
        let (Some(active), Some(job)) = (self.scheduler.remove(id), self.jobs.remove(&id)) else { return };
        self.core.settle_of(&active.state);
        let channel = job.close(Some(active.state));
        mailbox.ended(id);
        channel.push(Ok(TokenEvent::End(finish)));
    }

    /// Ends a request with an error, and the engine where it cannot go on.
    fn failed(&mut self, mailbox: &Mailbox, id: RequestId, error: EngineError) -> Result<(), Stopped> {
        let stops = error.stops();
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
    /// How the first tokens are chosen, where no end token may be among them.
    endless: Option<SamplingRow>,
    channel: Arc<Channel>,
    /// Time that the prompt's steps took.
    prefill: Duration,
    n_chosen: usize,
}

impl Job {
    /// How the next token is chosen, and for how many tokens that stays so.
    fn rules(&mut self) -> (&mut SamplingRow, usize) {
        let min_left = self.request.min_tokens.saturating_sub(self.n_chosen);
        match &mut self.endless {
            Some(endless) if min_left > 0 => (endless, min_left),
            _ => (&mut self.row, self.request.max_tokens - self.n_chosen),
        }
    }

    fn rules_now(&self) -> &SamplingRow {
        match &self.endless {
            Some(endless) if self.request.min_tokens > self.n_chosen => endless,
            _ => &self.row,
        }
    }

    /// The next token of a sequence that is alone.
    fn decode(
        &mut self,
        core: &mut Core,
        state: &mut SequenceState,
        last: u32,
    ) -> Result<(Choice, Duration), EngineError> {
        let end = std::mem::take(&mut self.request.end);
        // Nothing is sent ahead beyond where other rules begin.
        let (row, n_tokens) = self.rules();
        let decoded = core.follow_timed(state, last, row, &Ahead { n_tokens, end: &end });
        self.request.end = end;
        decoded.map(|(chosen, took)| (Choice { chosen, top: Vec::new() }, took))
    }

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
