//! The engine's thread: runs the steps that serve its requests.

use crate::constrain::{ConstrainedText, Followed, Place};
use crate::core::{Core, SequenceState};
use crate::decode::{DecodeRow, DecodedStep, LaunchPolicy, Lookahead};
use crate::draft_model::DraftModel;
use crate::engine::EngineLoad;
use crate::error::{EngineError, Stopped};
use crate::mailbox::Mailbox;
use crate::masks::{MaskThreads, TextSlot};
use crate::request::{FinishReason, HeldSequence, Request, RequestId, TokenEvent};
use crate::runner::TokenChoice;
use crate::sampling::SamplingRow;
use crate::schedule::{ActiveRequest, ScheduleLimits, Scheduler, StepRow};
use crate::speculate::{DraftSource, Speculator};
use crate::step::{Want, step_kind};
use crate::stream::{Channel, Demand};
use refrain_graph::StepKind;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Main function of the engine's thread.
pub(crate) fn serve(core: Core, draft_model: Option<DraftModel>, mailbox: &Mailbox) {
    let mut server = Server::new(core, draft_model);
    let served = catch_unwind(AssertUnwindSafe(|| server.serve_all(mailbox)));
    let why = served.unwrap_or_else(|panic| Stopped::Panicked { message: message_of(&*panic) });
    let (unseen, calls, mut open) = mailbox.stop(&why);
    unseen.into_iter().for_each(|submitted| server.accept(submitted));
    for id in server.jobs.keys().copied().collect::<Vec<_>>() {
        open.retain(|(other, _)| *other != id);
        server.fail(id, why.clone().into());
    }
    // A panic while a job ends can leave a channel without a job: its consumer must be notified too.
    for (_, channel) in open {
        channel.push(Err(why.clone().into()));
    }
    // Callers are notified when the senders of their results are dropped.
    drop(calls);
    // Dropping the remains of a device after a panic may panic again, with nobody left to report it to.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(server)));
}

pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// A request on its way to the engine's thread.
pub(crate) struct Submitted {
    active: ActiveRequest,
    job: RequestJob,
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
        (row, text): (SamplingRow, Option<ConstrainedText>),
        channel: Arc<Channel>,
    ) -> Submitted {
        // The last token is chosen but not evaluated.
        let n_positions = request.prompt.len().saturating_add(request.max_tokens.saturating_sub(1));
        let mut active =
            ActiveRequest::new(id, request.prompt.clone(), n_positions.min(state.context), state);
        (active.priority, active.user) = (request.priority, request.user);
        // A recurrent state covers all tokens, so it cannot be shared.
        active.shares = request.shares_prefix && held.is_none() && !active.state.table.has_slots();
        let (prefill, n_chosen, speculator) = (Duration::ZERO, 0, None);
        let text = text.map_or(TextSlot::None, |text| TextSlot::Here(Box::new(text)));
        let job = RequestJob { held, request, row, text, channel, prefill, n_chosen, speculator };
        Submitted { active, job }
    }
}

/// State of the engine's thread.
pub(crate) struct Server {
    pub(crate) core: Core,
    pub(crate) draft_model: Option<DraftModel>,
    pub(crate) scheduler: Scheduler,
    /// Each request's state other than its tokens and blocks, which the scheduler owns.
    pub(crate) jobs: BTreeMap<RequestId, RequestJob>,
    pub(crate) masks: MaskThreads,
    /// Time of a step in which nobody waits for masks.
    pub(crate) step_time: Duration,
    /// When the next step is likely to need its masks: rows wait for each other until then.
    pub(crate) masks_due: Instant,
}

/// A card reads its weights in the time that products of one to two hundred rows take, so this many prompt tokens cost a
/// decode step little.
const BESIDE_TOKENS: usize = 128;
/// Forced tokens that are worth a prompt of their own if the step after the chosen token is already in flight: that step
/// is lost, and the prompt costs more than a step.
const MIN_FORCED: usize = 4;

impl Server {
    fn new(core: Core, draft_model: Option<DraftModel>) -> Server {
        let limits =
            ScheduleLimits { n_tokens: core.max_tokens(), n_beside: BESIDE_TOKENS, n_rows: core.max_seqs() };
        let (scheduler, jobs, masks) = (Scheduler::new(limits), BTreeMap::new(), MaskThreads::new());
        let (step_time, masks_due) = (Duration::ZERO, Instant::now());
        Server { core, draft_model, scheduler, jobs, masks, step_time, masks_due }
    }

    pub(crate) fn load(&self) -> EngineLoad {
        let (n_running, n_waiting) = self.scheduler.n_running_and_waiting();
        let (n_preempted, blocks) = (self.scheduler.n_preempted(), self.core.block_counts());
        let (prompts, slots) = (self.scheduler.prompts(), self.core.slot_counts());
        EngineLoad { n_running, n_waiting, n_preempted, prompts, blocks, slots }
    }

    /// Serves requests until the engine is closed or the device is lost.
    fn serve_all(&mut self, mailbox: &Mailbox) -> Stopped {
        loop {
            if let Some((submitted, calls, is_closed)) = mailbox.take() {
                submitted.into_iter().for_each(|submitted| self.accept(submitted));
                if is_closed {
                    return Stopped::Closed;
                }
                calls.into_iter().for_each(|call| call(self));
                self.apply_demand(mailbox);
            }
            if let Err(stopped) = self.take_masks(mailbox) {
                return stopped;
            }
            let plan = self.scheduler.plan();
            for (active, error) in plan.refused {
                mailbox.ended(active.id);
                if let Some(job) = self.jobs.remove(&active.id) {
                    job.fail(Some(active.state), error.into());
                }
            }
            let rows = &plan.rows[..];
            let verifies = self.has_guesses(rows);
            let done = match rows {
                [] => {
                    mailbox.wait();
                    continue;
                }
                _ if !verifies && self.can_decode_ahead(rows) => {
                    self.decode(mailbox, rows, LaunchPolicy::LaunchAhead)
                }
                _ => match self.rows_in_flight(rows) {
                    in_flight if in_flight.is_empty() && verifies => self.verify(mailbox, rows),
                    in_flight if in_flight.is_empty() => self.step(mailbox, rows),
                    // Collect the steps in flight first: they are what those rows would run next.
                    in_flight => {
                        self.scheduler.undo(rows);
                        self.decode(mailbox, &in_flight, LaunchPolicy::CollectOnly)
                    }
                },
            };
            if let Err(stopped) = done {
                return stopped;
            }
        }
    }

    fn accept(&mut self, Submitted { active, mut job }: Submitted) {
        job.speculator = job.request.speculation.take().map(|rules| {
            let model = match rules.source {
                DraftSource::Model => self.draft_model.as_ref(),
                DraftSource::Ngram | DraftSource::Custom(_) => None,
            };
            let cost = self.core.runner.verify_cost(model.map(DraftModel::model));
            Speculator::new(rules, cost)
        });
        self.jobs.insert(active.id, job);
        self.scheduler.submit(active);
    }

    /// Ends cancelled requests, and pauses those whose consumers are not asking for more. This handles
    /// consumers that change their demand; the demand after an event is handled when the event is delivered.
    fn apply_demand(&mut self, mailbox: &Mailbox) {
        let ids: Vec<RequestId> = self.jobs.keys().copied().collect();
        for id in ids {
            let Some(job) = self.jobs.get(&id) else { continue };
            let demand = job.channel.demand();
            if demand == Demand::Cancel {
                self.end(mailbox, id, FinishReason::Cancelled);
            } else if let Some(finish) = job.ends_at_once().filter(|_| demand == Demand::GoOn) {
                self.end(mailbox, id, finish);
            } else if let Some(active) = self.scheduler.get(id) {
                active.is_paused = demand == Demand::Pause;
            }
        }
    }

    /// Whether a step feeds itself, so that later steps can be launched ahead.
    fn can_decode_ahead(&self, rows: &[StepRow]) -> bool {
        let is_fed = |row: &StepRow| row.n_tokens == 1 && row.chooses;
        // The last token of a prompt looks like a decode step; alone, it is recorded as a prompt step.
        let is_prompt = match rows {
            [row] => self.jobs.get(&row.id).is_some_and(|job| job.n_chosen == 0),
            _ => false,
        };
        !is_prompt && rows.iter().all(is_fed)
    }

    /// The rows that have steps in flight.
    fn rows_in_flight(&self, rows: &[StepRow]) -> Vec<StepRow> {
        let is_ahead = |row: &&StepRow| {
            let active = self.scheduler.find(row.id).filter(|_| row.n_tokens == 1 && row.chooses);
            let last = active.and_then(|active| Some((active, *active.tokens.last()?)));
            last.is_some_and(|(active, token)| self.core.has_in_flight(&active.state, token))
        };
        rows.iter().filter(is_ahead).copied().collect()
    }

    /// Runs one decode step of some requests and launches more of them ahead. While masks are computed, the device
    /// evaluates the tokens before them.
    fn decode(
        &mut self,
        mailbox: &Mailbox,
        rows: &[StepRow],
        mut policy: LaunchPolicy,
    ) -> Result<(), Stopped> {
        let mut rows = rows.to_vec();
        if rows.iter().any(|row| self.is_late(row)) {
            if policy != LaunchPolicy::CollectOnly {
                let launched = self.with_decode_rows(&rows, |core, rows| core.launch_rows(rows, policy));
                match launched {
                    Ok(()) => policy = LaunchPolicy::CollectOnly,
                    Err(EngineError::OutOfBlocks(_)) => return Ok(()),
                    Err(error) => return self.step_failed(mailbox, &rows, error),
                }
            }
            self.await_masks(mailbox, &mut rows)?;
            if rows.is_empty() {
                return Ok(());
            }
        }
        let mut ids: Vec<RequestId> = rows.iter().map(|row| row.id).collect();
        ids.sort_unstable();
        match self.with_decode_rows(&rows, |core, rows| core.decode_rows(rows, policy)) {
            Ok(DecodedStep { choices, tops, took }) => {
                // Without a choice, nothing ran.
                if choices.iter().any(Option::is_some) {
                    self.expect_masks(took);
                }
                let chosen =
                    ids.into_iter().zip(choices).zip(tops).map(|((id, choice), top)| (id, choice, top));
                // Masks take longest, so the texts that need one go first.
                let is_masked = |id: &RequestId| self.jobs.get(id).is_some_and(|job| job.row.is_masked());
                let (masked, free): (Vec<_>, Vec<_>) = chosen.partition(|(id, ..)| is_masked(id));
                for (id, choice, top) in masked.into_iter().chain(free) {
                    let Some(choice) = choice else { continue };
                    let choice = choice.map(|chosen| TokenChoice { chosen, top });
                    // The sequence already holds its token.
                    let row = StepRow { id, n_tokens: 0, chooses: true };
                    self.deliver(mailbox, row, Some(choice), took)?;
                }
                Ok(())
            }
            // The scheduler frees blocks or refuses the request.
            Err(EngineError::OutOfBlocks(_)) => Ok(()),
            Err(error) => self.step_failed(mailbox, &rows, error),
        }
    }

    /// Calls `f` with the decode rows of some requests, in the order of their ids.
    fn with_decode_rows<R>(
        &mut self,
        rows: &[StepRow],
        f: impl FnOnce(&mut Core, &mut [DecodeRow<'_>]) -> R,
    ) -> R {
        let mut ids: Vec<RequestId> = rows.iter().map(|row| row.id).collect();
        ids.sort_unstable();
        let jobs = self.jobs.iter_mut().filter(|(id, _)| ids.binary_search(id).is_ok());
        let actives = self.scheduler.running_mut(&ids);
        let mut decode_rows: Vec<DecodeRow<'_>> = actives
            .into_iter()
            .zip(jobs)
            .filter_map(|(active, (id, job))| {
                debug_assert_eq!(active.id, *id);
                let n_tokens = job.request.max_tokens - job.n_chosen;
                let n_ahead = job.speculator.as_ref().map_or(usize::MAX, |speculator| speculator.n_ahead());
                let n_tokens = n_tokens.min(n_ahead);
                let ahead = Lookahead { n_tokens, end: &job.request.end };
                let token = *active.tokens.last()?;
                Some(DecodeRow { sequence: &mut active.state, token, row: &mut job.row, ahead })
            })
            .collect();
        f(&mut self.core, &mut decode_rows)
    }

    /// Runs one step of several requests.
    pub(crate) fn step(&mut self, mailbox: &Mailbox, rows: &[StepRow]) -> Result<(), Stopped> {
        self.core.drain();
        let rows = &self.rows_with_masks(mailbox, rows)?[..];
        if rows.is_empty() {
            return Ok(());
        }
        match self.try_step(rows) {
            Ok(took) => {
                self.expect_masks_at_once();
                let choices = self.core.take_choices().collect::<Vec<_>>();
                for (row, choice) in rows.iter().zip(choices) {
                    self.deliver(mailbox, *row, choice, took)?;
                }
                Ok(())
            }
            Err(error) => self.step_failed(mailbox, rows, error),
        }
    }

    pub(crate) fn step_failed(
        &mut self,
        mailbox: &Mailbox,
        rows: &[StepRow],
        error: EngineError,
    ) -> Result<(), Stopped> {
        match rows {
            [row] => self.request_failed(mailbox, row.id, error),
            [row, ..] if error.stops().is_some() => self.request_failed(mailbox, row.id, error),
            // A step can be repeated: run one by one, only the requests at fault fail.
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
        // The last token of a prompt looks like a decode step.
        let kind = if rows.len() == 1 && is_prompt { StepKind::Prompt } else { step_kind(&requests) };
        let took = self.core.step(kind, &requests, &ledgers)?;
        for row in rows {
            if let Some(active) = self.scheduler.get(row.id) {
                active.state.evaluated(row.n_tokens);
            }
        }
        Ok(took)
    }

    /// Delivers the result of a step to one request.
    pub(crate) fn deliver(
        &mut self,
        mailbox: &Mailbox,
        row: StepRow,
        choice: Option<Result<TokenChoice, EngineError>>,
        took: Duration,
    ) -> Result<(), Stopped> {
        let choice = match choice.transpose() {
            Ok(choice) => choice,
            Err(error) => return self.request_failed(mailbox, row.id, error),
        };
        self.scheduler.advance(row.id, row.n_tokens, choice.as_ref().map(|choice| choice.chosen.token));
        let min_together = match self.scheduler.n_running_and_waiting().0 {
            0 | 1 if self.core.has_steps_in_flight() => MIN_FORCED,
            0 | 1 => 1,
            _ => usize::MAX,
        };
        let (Some(active), Some(job)) = (self.scheduler.get(row.id), self.jobs.get_mut(&row.id)) else {
            return Ok(());
        };
        if choice.is_some()
            && job.n_chosen == 0
            && let Err(error) = self.core.keep_state(&mut active.state)
        {
            return self.request_failed(mailbox, row.id, error);
        }
        let followed = choice.as_ref().and_then(|choice| {
            let (n_tokens, context) = (active.tokens.len(), active.state.context);
            job.follow(choice.chosen.token, n_tokens, context, min_together).transpose()
        });
        let (mut demand, mut finish) = match choice {
            Some(choice) => job.chosen(choice, took, &active.state),
            None => (job.evaluated(active.state.tokens.len(), took), None),
        };
        let goes_on = match followed {
            Some(Ok(followed)) => {
                (demand, finish) = job.append(followed, active, (demand, finish));
                finish.is_none()
            }
            Some(Err(error)) => return self.request_failed(mailbox, row.id, error),
            None => false,
        };
        active.is_paused = demand == Demand::Pause;
        if goes_on && let Some(text) = job.send_text() {
            self.masks.prepare(row.id, text);
        }
        if let Some(finish) = finish {
            self.end(mailbox, row.id, finish);
        }
        Ok(())
    }

    /// Ends a request. Its consumer then finds a complete ledger and a free sequence. Its in-flight steps run
    /// before anything launched later for the sequence or its blocks.
    pub(crate) fn end(&mut self, mailbox: &Mailbox, id: RequestId, finish: FinishReason) {
        let (Some(active), Some(job)) = (self.scheduler.remove(id), self.jobs.remove(&id)) else { return };
        self.forget_drafts(id);
        self.core.leave(&active.state);
        let channel = job.close(Some(active.state));
        mailbox.ended(id);
        channel.push(Ok(TokenEvent::End(finish)));
    }

    /// Fails a request, and stops the engine if the error is fatal.
    pub(crate) fn request_failed(
        &mut self,
        mailbox: &Mailbox,
        id: RequestId,
        error: EngineError,
    ) -> Result<(), Stopped> {
        let stops = error.stops();
        if let Some(active) = self.scheduler.find(id) {
            self.core.leave(&active.state);
        }
        mailbox.ended(id);
        self.fail(id, error);
        stops.map_or(Ok(()), Err)
    }

    fn fail(&mut self, id: RequestId, error: EngineError) {
        self.forget_drafts(id);
        let state = self.scheduler.remove(id).map(|active| active.state);
        if let Some(job) = self.jobs.remove(&id) {
            job.fail(state, error);
        }
    }
}

/// State of a request other than its tokens and blocks.
pub(crate) struct RequestJob {
    held: Option<HeldSequence>,
    pub(crate) request: Request,
    pub(crate) row: SamplingRow,
    /// Its text, if that follows a grammar.
    pub(crate) text: TextSlot,
    pub(crate) channel: Arc<Channel>,
    /// Duration of the work before its next token: the prompt's steps, or a draft model's.
    pub(crate) prefill: Duration,
    pub(crate) n_chosen: usize,
    /// Its guesses, if it speculates.
    pub(crate) speculator: Option<Speculator>,
}

impl RequestJob {
    /// Why the request ends before anything is evaluated.
    fn ends_at_once(&self) -> Option<FinishReason> {
        let is_complete = match &self.text {
            TextSlot::Here(text) => self.n_chosen == 0 && text.is_complete(),
            TextSlot::None | TextSlot::Away => false,
        };
        match () {
            () if self.request.max_tokens == 0 => Some(FinishReason::MaxTokens),
            () => is_complete.then_some(FinishReason::Complete),
        }
    }

    /// Delivers the progress of a prompt and returns the consumer's demand.
    fn evaluated(&mut self, n_done: usize, took: Duration) -> Demand {
        self.prefill += took;
        let n_tokens = self.request.prompt.len();
        match self.n_chosen {
            0 => self.channel.push(Ok(TokenEvent::Prompt { n_done, n_tokens })),
            // After the prompt, tokens are evaluated again following a preemption.
            _ => self.channel.demand(),
        }
    }

    /// Delivers a choice. Returns the consumer's demand, and the reason if the request has ended.
    fn chosen(
        &mut self,
        TokenChoice { chosen, top }: TokenChoice,
        took: Duration,
        state: &SequenceState,
    ) -> (Demand, Option<FinishReason>) {
        self.n_chosen += 1;
        if let Some(speculator) = &mut self.speculator {
            speculator.decoded();
        }
        let took = took + std::mem::take(&mut self.prefill);
        let finish = if self.request.end.contains(&chosen.token) {
            Some(FinishReason::EndToken)
        } else if self.n_chosen >= self.request.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if state.tokens.len() >= state.context {
            // The chosen token needs a position before the next can be chosen.
            Some(FinishReason::ContextFull)
        } else {
            None
        };
        let event = TokenEvent::Token { token: chosen.token, logprob: chosen.logprob, top, took };
        (self.channel.push(Ok(event)), finish)
    }

    /// Has the text follow a token that was just chosen, after which the request has `n_tokens` tokens in all. `None` without
    /// a grammar, or if the token ends the text.
    fn follow(
        &mut self,
        chosen: u32,
        n_tokens: usize,
        context: usize,
        min_together: usize,
    ) -> Result<Option<Followed>, EngineError> {
        let TextSlot::Here(text) = &mut self.text else { return Ok(None) };
        if self.request.end.contains(&chosen) {
            return Ok(None);
        }
        // This one is not counted yet. Each forced token needs a position.
        let n_left = (self.request.max_tokens - self.n_chosen - 1).min(context.saturating_sub(n_tokens));
        let is_over = self.n_chosen + 1 >= self.request.max_tokens || n_tokens > context;
        let place = Place { position: n_tokens, n_left: (!is_over).then_some(n_left), min_together };
        text.follow(chosen, place).map(Some)
    }

    /// The text, to have its next choice prepared. A choice that is already determined is prepared here.
    fn send_text(&mut self) -> Option<Box<ConstrainedText>> {
        let mut text = match std::mem::replace(&mut self.text, TextSlot::Away) {
            TextSlot::Here(text) => text,
            other @ (TextSlot::None | TextSlot::Away) => {
                self.text = other;
                return None;
            }
        };
        text.take_back(&mut self.row);
        if text.prepare_forced() {
            text.hand_over(&mut self.row);
            self.text = TextSlot::Here(text);
            return None;
        }
        Some(text)
    }

    /// Appends and delivers the tokens that the grammar forces. A complete text ends the request, also at its last token.
    fn append(
        &mut self,
        Followed { forced, is_open }: Followed,
        active: &mut ActiveRequest,
        (mut demand, mut finish): (Demand, Option<FinishReason>),
    ) -> (Demand, Option<FinishReason>) {
        for token in forced {
            active.tokens.push(token);
            self.n_chosen += 1;
            let event = TokenEvent::Token { token, logprob: 0.0, top: Vec::new(), took: Duration::ZERO };
            demand = self.channel.push(Ok(event));
        }
        if finish.is_none() && self.n_chosen >= self.request.max_tokens {
            finish = Some(FinishReason::MaxTokens);
        }
        (demand, if is_open { finish } else { Some(FinishReason::Complete) })
    }

    /// Returns the sequence to its owner, and the channel for the last event.
    fn close(self, state: Option<SequenceState>) -> Arc<Channel> {
        let RequestJob { held, request, channel, .. } = self;
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
