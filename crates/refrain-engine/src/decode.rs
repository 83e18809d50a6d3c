//! Decoding one token per sequence at a time, with the next steps launched ahead.
//!
//! A decode step feeds itself: the token it chooses is the next step's input. Steps are therefore launched
//! before their tokens are requested, and the device does not wait for the host between two tokens. Sequences
//! join and leave between steps; a joining sequence waits for the steps that are already in flight. Steps
//! that turn out to be unneeded have only written KV past the end of a sequence. Its blocks can still be
//! released: a new owner writes them in later steps, and steps run in launch order.
//!
//! In a run with masks, each step waits for those of its rows: the first part of a step is launched ahead, the rest once
//! the masks are there. A row whose mask is late sits out the choice of the step.
//!
//! The runner owns the run and its rows. This module tracks which sequence is in which row.

use crate::core::{Chosen, Core, SequenceState, check_tokens};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::request::lock;
use crate::runner::{DecodeProgress, RunMember, RunShape};
use crate::sampling::SamplingRow;
use crate::step::Want;
use refrain_graph::{Committed, LateRows, Ran, StepFlags, StepKind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the caller is known to need besides the next token: bounds how far steps may be launched ahead.
#[derive(Clone, Copy, Debug)]
pub struct Lookahead<'a> {
    /// Maximum number of tokens that will be requested, the next one included.
    pub n_tokens: usize,
    /// Tokens that end the generation: none will be requested after them.
    pub end: &'a [u32],
}

impl Lookahead<'_> {
    /// The next token only.
    pub const NONE: Lookahead<'static> = Lookahead { n_tokens: 1, end: &[] };
}

/// A sequence, the token to evaluate next, and how the one after it is chosen.
#[derive(Debug)]
pub struct DecodeRow<'a> {
    /// The sequence.
    pub sequence: &'a mut SequenceState,
    /// The token to evaluate: the one after those the sequence holds.
    pub token: u32,
    /// How the following token is chosen.
    pub row: &'a mut SamplingRow,
    /// What the caller needs after that.
    pub ahead: Lookahead<'a>,
}

impl DecodeRow<'_> {
    /// Number of choices that the caller needs and that fit into the context.
    fn n_wanted(&self) -> usize {
        self.ahead.n_tokens.max(1).min(self.sequence.context - self.sequence.tokens.len())
    }

    fn run_row(&self) -> RunMember<'_> {
        let tokens = std::slice::from_ref(&self.token);
        RunMember {
            request: self.sequence.request(tokens, Want::Sample(self.row)),
            n_positions: self.sequence.context,
            n_choices: self.n_wanted(),
            end: self.ahead.end,
        }
    }
}

/// Whether a step may be followed by further launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchPolicy {
    /// Launch as many steps as may be in flight.
    LaunchAhead,
    /// Launch nothing: collect the steps in flight, because other work follows.
    CollectOnly,
}

/// Result of a step for each requested row.
#[derive(Debug)]
pub struct DecodedStep {
    /// The chosen token; the sequence now holds the token before it. `None` for a row that joins after the
    /// steps in flight, and for one whose mask is late. Non-finite logits fail only their own row.
    pub choices: Vec<Option<Result<Chosen, EngineError>>>,
    /// The most probable tokens of each row with their log-probabilities, as many as it requested.
    pub tops: Vec<Vec<(u32, f32)>>,
    /// Duration recorded in the ledger for the step.
    pub took: Duration,
}

/// Choices of a [`DecodedStep`].
type Choices = Vec<Option<Result<Chosen, EngineError>>>;

/// Most probable tokens of a [`DecodedStep`].
type Tops = Vec<Vec<(u32, f32)>>;

/// Assignment of sequences to the rows of a run. The runner tracks the run's progress ([`DecodeProgress`]).
pub(crate) struct ActiveRun {
    rows: Vec<Option<ActiveRunRow>>,
    shape: RunShape,
    /// Maximum number of steps in flight.
    max_in_flight: usize,
    /// When the last result was collected, if others were in flight then.
    last_collected: Option<Instant>,
}

/// A sequence in a row of the run.
struct ActiveRunRow {
    sequence: u64,
    /// Records its steps, in addition to the core's ledger.
    ledger: Arc<Mutex<Ledger>>,
    sampling: SamplingRow,
    end: Vec<u32>,
    /// Index of its first step in the run.
    first_step: u64,
    /// Tokens that the sequence held at that step.
    start: usize,
    /// One past its last possible position.
    end_position: usize,
    n_collected: usize,
    /// Input token of its oldest uncollected step.
    next: u32,
    has_ended: bool,
}

impl ActiveRunRow {
    fn new(of: &DecodeRow<'_>, first_step: u64) -> ActiveRunRow {
        let start = of.sequence.tokens.len();
        ActiveRunRow {
            sequence: of.sequence.id,
            ledger: of.sequence.ledger.clone(),
            sampling: of.row.clone(),
            end: of.ahead.end.to_vec(),
            first_step,
            start,
            end_position: start + of.n_wanted(),
            n_collected: 0,
            next: of.token,
            has_ended: false,
        }
    }

    /// Whether its next step evaluates this token of this sequence.
    fn expects(&self, sequence: &SequenceState, token: u32) -> bool {
        !self.has_ended
            && self.sequence == sequence.id
            && self.start + self.n_collected == sequence.tokens.len()
            && self.next == token
    }

    /// Whether its next step is the one that a caller requests.
    fn matches(&self, row: &DecodeRow<'_>) -> bool {
        self.expects(row.sequence, row.token)
            && self.end == row.ahead.end
            && self.sampling.has_rules_of(row.row)
    }

    /// In-flight steps that it takes part in.
    fn n_in_flight(&self, run: DecodeProgress) -> u64 {
        run.n_launched.saturating_sub(run.n_collected.max(self.first_step))
    }

    /// Positions that it requires for the first `n_launched` steps of the run.
    fn n_positions(&self, n_launched: u64) -> usize {
        let n_steps = usize::try_from(n_launched.saturating_sub(self.first_step)).unwrap_or(usize::MAX);
        self.start.saturating_add(n_steps).min(self.end_position)
    }
}

impl ActiveRun {
    /// Whether the device repeats the step by itself.
    fn is_repeated(&self) -> bool {
        self.max_in_flight == usize::MAX
    }

    /// Index of the sequence's row, if the row's next step is the requested one.
    fn find(&self, row: &DecodeRow<'_>) -> Option<usize> {
        let idx = row.sequence.run_row;
        self.rows.get(idx)?.as_ref().is_some_and(|member| member.matches(row)).then_some(idx)
    }
}

impl Core {
    /// Evaluates one token and chooses the next.
    pub fn decode(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
    ) -> Result<Chosen, EngineError> {
        self.decode_ahead(sequence, token, row, &Lookahead::NONE)
    }

    /// Evaluates one token, chooses the next, and launches steps for the tokens that the caller will request
    /// later.
    ///
    /// Those steps serve the next call if it passes the token chosen here with the same sampling. The result
    /// of any other call does not depend on them. When no more tokens are needed, [`Core::drain`] waits for the
    /// steps in flight.
    pub fn decode_ahead(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Lookahead<'_>,
    ) -> Result<Chosen, EngineError> {
        let mut rows = [DecodeRow { sequence, token, row, ahead: *ahead }];
        let step = self.decode_rows(&mut rows, LaunchPolicy::LaunchAhead)?;
        step.choices.into_iter().next().flatten().unwrap_or(Err(EngineError::NoRun))
    }

    /// Like [`Core::decode_ahead`], for one step of several sequences. Sequences that were not in the last
    /// step join; those that were and are not passed here leave. A joining sequence waits for the few steps
    /// in flight; the others get a token from every call.
    ///
    /// An error applies to the whole step and leaves every sequence unchanged.
    pub fn decode_rows(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        policy: LaunchPolicy,
    ) -> Result<DecodedStep, EngineError> {
        for row in rows.iter() {
            self.check_sequence(row.sequence)?;
            check_tokens(self.model(), &[row.token])?;
            if row.sequence.tokens.len() >= row.sequence.context {
                return Err(EngineError::ContextFull { context: row.sequence.context });
            }
        }
        let began = Instant::now();
        let began = self.active_run.as_ref().and_then(|f| f.last_collected).unwrap_or(began);
        let step = self.try_decode_rows(rows, policy);
        let took = began.elapsed();
        match step {
            Ok((choices, tops, ran)) => {
                self.record_step(rows, &choices, ran.as_ref(), took);
                Ok(DecodedStep { choices, tops, took })
            }
            Err(error) => Err(self.decode_failed(rows, error, took)),
        }
    }

    /// Ends the run after an error, which counts as that of a step.
    fn decode_failed(&mut self, rows: &[DecodeRow<'_>], error: EngineError, took: Duration) -> EngineError {
        let reason = error.reason();
        self.ledger.failed(StepKind::Decode, took, &reason);
        // Which sequence made a shared step fail is unknown until they run one by one.
        if let [row] = rows {
            lock(&row.sequence.ledger).failed(StepKind::Decode, took, &reason);
        }
        let (active_run, run) = (self.active_run.take(), self.runner.progress());
        // A second error of the same run adds nothing; its in-flight steps stay out of the ledger.
        if let (Ok(n), Some(active_run)) = (self.runner.finish(), active_run) {
            self.record_discarded(&active_run, run, n as u64);
        }
        error
    }

    /// Launches the steps that [`Core::decode_rows`] would launch for these rows, and collects none. Their masks need not
    /// be known. An error ends the run and is that of the step.
    pub(crate) fn launch_rows(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        policy: LaunchPolicy,
    ) -> Result<(), EngineError> {
        let began = Instant::now();
        let launched = self.assign_rows(rows, policy).and_then(|(row_idxs, policy)| match policy {
            LaunchPolicy::LaunchAhead => self.top_up(rows, &row_idxs),
            LaunchPolicy::CollectOnly => Ok(()),
        });
        match (launched, &mut self.active_run) {
            (Ok(()), Some(active_run)) => {
                active_run.last_collected.get_or_insert(began);
                Ok(())
            }
            (Ok(()), None) => Ok(()),
            (Err(error), _) => Err(self.decode_failed(rows, error, began.elapsed())),
        }
    }

    /// Waits until no launched step is in flight, and records those that nobody needed as discarded in the
    /// ledger. Every other method that runs steps calls this first.
    pub fn drain(&mut self) {
        self.note_not_repeated();
        let Some(active_run) = self.active_run.take() else { return };
        let run = self.runner.progress();
        match self.runner.finish() {
            Ok(n) => self.record_discarded(&active_run, run, n as u64),
            // The caller sees the error again if it still matters.
            Err(error) => {
                let reason = error.reason();
                self.ledger.failed(StepKind::Decode, Duration::ZERO, &reason);
                for row in active_run.rows.iter().flatten() {
                    lock(&row.ledger).failed(StepKind::Decode, Duration::ZERO, &reason);
                }
            }
        }
    }

    /// Removes a sequence from the run. If it was the only one, no step is in flight afterwards. Otherwise
    /// the steps in flight continue for the others, and its row is padding in every later step.
    pub(crate) fn leave(&mut self, sequence: &SequenceState) {
        let Some(active_run) = &mut self.active_run else { return };
        let is_of = |row: &Option<ActiveRunRow>| row.as_ref().is_some_and(|f| f.sequence == sequence.id);
        let Some(idx) = active_run.rows.iter().position(is_of) else { return };
        let is_other = |row: &ActiveRunRow| !row.has_ended && row.sequence != sequence.id;
        if !active_run.rows.iter().flatten().any(is_other) || self.clear_row(idx).is_err() {
            self.drain();
        }
    }

    /// Whether steps are in flight.
    pub(crate) fn has_steps_in_flight(&self) -> bool {
        self.active_run.is_some() && self.runner.progress().n_in_flight() > 0
    }

    /// Whether in-flight steps evaluate this token of the sequence.
    pub(crate) fn has_in_flight(&self, sequence: &SequenceState, token: u32) -> bool {
        let in_flight = self.active_run.as_ref().filter(|_| self.runner.progress().n_in_flight() > 0);
        in_flight.is_some_and(|f| f.rows.iter().flatten().any(|row| row.expects(sequence, token)))
    }

    fn try_decode_rows(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        policy: LaunchPolicy,
    ) -> Result<(Choices, Tops, Option<Ran>), EngineError> {
        let (row_idxs, policy) = self.assign_rows(rows, policy)?;
        match policy {
            LaunchPolicy::LaunchAhead => self.top_up(rows, &row_idxs)?,
            LaunchPolicy::CollectOnly
                if self.active_run.is_none() || self.runner.progress().n_in_flight() == 0 =>
            {
                return Ok((rows.iter().map(|_| None).collect(), vec![Vec::new(); rows.len()], None));
            }
            LaunchPolicy::CollectOnly => {}
        }
        let step = self.runner.progress().n_collected;
        let held = if self.runner.awaits_masks() { self.supply(rows, &row_idxs, step)? } else { Vec::new() };
        let committed_step = self.runner.collect()?;
        let committed = &committed_step.rows;
        let mut tops = vec![Vec::new(); rows.len()];
        let Some(active_run) = &mut self.active_run else { return Err(EngineError::NoRun) };
        active_run.last_collected = (self.runner.progress().n_in_flight() > 0).then(Instant::now);
        let kv_dtype = self.runner.kv().dtype;
        let mut choices = Vec::with_capacity(rows.len());
        for ((of, row_idx), top) in rows.iter_mut().zip(row_idxs).zip(&mut tops) {
            let row = row_idx.and_then(|idx| Some((active_run.rows[idx].as_mut()?, committed.get(idx)?)));
            let takes_part = |idx: &usize| !held.contains(idx);
            let is_in_step = row_idx.as_ref().is_some_and(takes_part);
            let Some((row, committed)) = row.filter(|(row, _)| is_in_step && row.first_step <= step) else {
                choices.push(None);
                continue;
            };
            let Some(Committed { token, logprob, position, flags }) = *committed else {
                return Err(EngineError::NoRun);
            };
            row.n_collected += 1;
            (row.next, row.has_ended) = (token, flags != StepFlags::default());
            choices.push(Some(match flags.has(StepFlags::NON_FINITE) {
                true => Err(EngineError::NonFinite { position, kv_dtype }),
                false => {
                    of.sequence.tokens.push(of.token);
                    let listed = row_idx.map_or(&[][..], |idx| committed_step.top_of(idx));
                    top.extend_from_slice(&listed[..of.row.n_top.min(listed.len())]);
                    // The device has not advanced past the row's end.
                    if let Some(slots) = of.sequence.table.slots_mut().filter(|_| row.has_ended) {
                        slots.ended_at(position + 1);
                    }
                    Ok(Chosen { token, logprob })
                }
            }));
        }
        if let [Some(Err(_))] = choices[..]
            && let Some(Some(Err(error))) = choices.pop()
        {
            return Err(error);
        }
        Ok((choices, tops, Some(committed_step.ran)))
    }

    /// Gives the next step its masks. Rows without one yet are held; returns them.
    fn supply(
        &mut self,
        rows: &[DecodeRow<'_>],
        row_idxs: &[Option<usize>],
        step: u64,
    ) -> Result<Vec<usize>, EngineError> {
        let Some(active_run) = &self.active_run else { return Err(EngineError::NoRun) };
        let mut late = LateRows::default();
        for (row, idx) in rows.iter().zip(row_idxs).filter_map(|(row, idx)| Some((&*row.row, (*idx)?))) {
            let is_in_step = active_run.rows[idx].as_ref().is_some_and(|member| member.first_step <= step);
            match row.is_masked() && is_in_step {
                true if row.is_late => late.held.push(idx),
                true => late.masks.push((idx, row.mask.clone())),
                false => {}
            }
        }
        let held = late.held.clone();
        self.runner.supply(late)?;
        Ok(held)
    }

    /// Finds each sequence's row in the run or assigns one; rows of other sequences are cleared. A run of
    /// another size begins only once all steps of the last one are collected, so nothing is launched until
    /// then.
    fn assign_rows(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        policy: LaunchPolicy,
    ) -> Result<(Vec<Option<usize>>, LaunchPolicy), EngineError> {
        let n_history = rows.iter().map(|row| row.row.n_history(row.sequence.context)).max().unwrap_or(0);
        let is_masked = rows.iter().any(|row| row.row.is_masked());
        let has_top = rows.iter().any(|row| row.row.n_top > 0);
        let wanted = RunShape { n_rows: rows.len(), n_history, is_masked, has_top };
        let shape = self.runner.run_shape(wanted);
        if let Some(active_run) = &self.active_run {
            let mut row_idxs: Vec<Option<usize>> = rows.iter().map(|row| active_run.find(row)).collect();
            if row_idxs.iter().any(Option::is_some) {
                let mut is_requested = vec![false; active_run.rows.len()];
                row_idxs.iter().flatten().for_each(|idx| is_requested[*idx] = true);
                let is_stale = |idx: &usize| active_run.rows[*idx].is_some() && !is_requested[*idx];
                let stale: Vec<usize> = (0..active_run.rows.len()).filter(is_stale).collect();
                let (is_fitting, n_in_flight) =
                    (active_run.shape == shape, self.runner.progress().n_in_flight());
                stale.into_iter().try_for_each(|idx| self.clear_row(idx))?;
                // Earlier steps may have advanced a recurrent state past the sequence's tokens. It is
                // restored only when a run begins, so such a sequence cannot join now.
                let is_whole = |(row, row_idx): (&DecodeRow<'_>, &Option<usize>)| {
                    row_idx.is_some() || row.sequence.table.holds_state(row.sequence.tokens.len())
                };
                let may_join = rows.iter().zip(&row_idxs).all(is_whole);
                // A run that the device repeats by itself has its whole reply in flight: nobody waits for that.
                let is_repeated = self.active_run.as_ref().is_some_and(ActiveRun::is_repeated);
                if policy != LaunchPolicy::CollectOnly && is_fitting && may_join {
                    for (row, row_idx) in
                        rows.iter_mut().zip(&mut row_idxs).filter(|(_, row_idx)| row_idx.is_none())
                    {
                        *row_idx = Some(self.join(row)?);
                    }
                    return Ok((row_idxs, policy));
                }
                if !is_repeated && (policy == LaunchPolicy::CollectOnly || n_in_flight > 0) {
                    return Ok((row_idxs, LaunchPolicy::CollectOnly));
                }
            }
        }
        self.drain();
        if policy == LaunchPolicy::CollectOnly {
            return Ok((vec![None; rows.len()], policy));
        }
        for (idx, DecodeRow { sequence, row, token, .. }) in rows.iter_mut().enumerate() {
            sequence.table.fit(sequence.tokens.len() + 1)?;
            self.restore(sequence)?;
            sequence.run_row = idx;
            advance(sequence, *token, row);
        }
        let run_rows: Vec<RunMember<'_>> = rows.iter().map(DecodeRow::run_row).collect();
        let max = self.runner.begin(&run_rows, shape)?;
        let mut members: Vec<_> = rows.iter().map(|row| Some(ActiveRunRow::new(row, 0))).collect();
        members.resize_with(shape.n_rows.max(rows.len()), || None);
        self.active_run = Some(ActiveRun { rows: members, shape, max_in_flight: max, last_collected: None });
        self.note_not_repeated();
        Ok(((0..rows.len()).map(Some).collect(), policy))
    }

    /// Gives a sequence a free row, starting after the steps already launched.
    fn join(&mut self, row: &mut DecodeRow<'_>) -> Result<usize, EngineError> {
        let Some(active_run) = &mut self.active_run else { return Err(EngineError::NoRun) };
        let idx = active_run.rows.iter().position(Option::is_none).ok_or(EngineError::NoRun)?;
        row.sequence.table.cover(row.sequence.tokens.len() + 1)?;
        advance(row.sequence, row.token, row.row);
        self.runner.set_row(idx, &row.run_row())?;
        row.sequence.run_row = idx;
        active_run.rows[idx] = Some(ActiveRunRow::new(row, self.runner.progress().n_launched));
        Ok(idx)
    }

    /// Makes a row padding. Its in-flight steps count as discarded.
    fn clear_row(&mut self, idx: usize) -> Result<(), EngineError> {
        let Some(active_run) = &mut self.active_run else { return Ok(()) };
        let Some(row) = active_run.rows[idx].take() else { return Ok(()) };
        lock(&row.ledger).discarded(StepKind::Decode, row.n_in_flight(self.runner.progress()));
        self.runner.clear_row(idx)
    }

    /// Launches steps in batches: the device gets more once only half of the maximum is still in flight.
    fn top_up(&mut self, rows: &mut [DecodeRow<'_>], row_idxs: &[Option<usize>]) -> Result<(), EngineError> {
        let Some(active_run) = &mut self.active_run else { return Err(EngineError::NoRun) };
        let run = self.runner.progress();
        let in_flight = run.n_in_flight();
        // Launch until the longest row is done; shorter rows end by themselves.
        let n_wanted = |(row, row_idx): (&DecodeRow<'_>, &Option<usize>)| {
            let first = row_idx.and_then(|idx| active_run.rows[idx].as_ref()).map_or(0, |row| row.first_step);
            row.n_wanted().saturating_add(first.saturating_sub(run.n_collected) as usize)
        };
        let longest = rows.iter().zip(row_idxs).map(n_wanted).max().unwrap_or(1);
        let max = active_run.max_in_flight.min(longest);
        if in_flight > 0 && (max <= in_flight || in_flight > active_run.max_in_flight / 2) {
            return Ok(());
        }
        // A loop on the device cannot be extended while it runs.
        if in_flight > 0 && active_run.is_repeated() {
            return Ok(());
        }
        let mut n = max - in_flight;
        // If the pool is small: as many steps as there are blocks for.
        while active_run.is_repeated()
            && n > 1
            && active_run.cover(rows, row_idxs, run.n_launched + n as u64).is_err()
        {
            n = n.div_ceil(2);
        }
        if let Err(error) = active_run.cover(rows, row_idxs, run.n_launched + n as u64) {
            // Other sequences hold the remaining blocks: make do with the steps in flight, or launch one at a
            // time.
            if in_flight > 0 {
                return Ok(());
            }
            if n == 1 {
                return Err(error);
            }
            n = 1;
            active_run.cover(rows, row_idxs, run.n_launched + n as u64)?;
        }
        for (row, idx) in rows.iter().zip(row_idxs).filter_map(|(row, idx)| Some((row, (*idx)?))) {
            self.runner.set_table(idx, row.sequence.table.blocks())?;
        }
        for (row, row_idx) in rows.iter_mut().zip(row_idxs) {
            let member = row_idx.and_then(|idx| active_run.rows[idx].as_ref());
            if let (Some(slots), Some(member)) = (row.sequence.table.slots_mut(), member) {
                slots.may_reach(member.n_positions(run.n_launched + n as u64));
            }
        }
        self.runner.launch(n)
    }

    /// Records why the device does not repeat the run's steps, if it was to.
    fn note_not_repeated(&mut self) {
        let Some(active_run) = &self.active_run else { return };
        let Some(reason) = self.runner.take_not_repeated() else { return };
        for row in active_run.rows.iter().flatten() {
            lock(&row.ledger).not_repeated(StepKind::Decode, reason.clone());
        }
        self.ledger.not_repeated(StepKind::Decode, reason);
    }

    /// Records a collected step, in the core's ledger and in that of each sequence.
    fn record_step(
        &mut self,
        rows: &[DecodeRow<'_>],
        choices: &[Option<Result<Chosen, EngineError>>],
        ran: Option<&Ran>,
        took: Duration,
    ) {
        let Some(ran) = ran else { return };
        let n_chosen = choices.iter().flatten().count();
        if n_chosen == 0 {
            return self.ledger.discarded(StepKind::Decode, 1);
        }
        self.ledger.ran(StepKind::Decode, n_chosen, took, ran);
        for (row, choice) in rows.iter().zip(choices) {
            match choice {
                Some(Ok(_)) => lock(&row.sequence.ledger).ran(StepKind::Decode, 1, took, ran),
                Some(Err(error)) => {
                    lock(&row.sequence.ledger).failed(StepKind::Decode, took, &error.reason());
                }
                None => {}
            }
        }
    }

    /// Records the uncollected steps of a finished run.
    fn record_discarded(&mut self, active_run: &ActiveRun, run: DecodeProgress, n: u64) {
        self.ledger.discarded(StepKind::Decode, n);
        for row in active_run.rows.iter().flatten() {
            lock(&row.ledger).discarded(StepKind::Decode, n.min(row.n_in_flight(run)));
        }
    }
}

impl ActiveRun {
    /// Allocates the blocks that the first `n_launched` steps of the run need.
    fn cover(
        &self,
        rows: &mut [DecodeRow<'_>],
        row_idxs: &[Option<usize>],
        n_launched: u64,
    ) -> Result<(), EngineError> {
        for (row, row_idx) in rows.iter_mut().zip(row_idxs) {
            if let Some(member) = row_idx.and_then(|idx| self.rows[idx].as_ref()) {
                row.sequence.table.cover(member.n_positions(n_launched))?;
            }
        }
        Ok(())
    }
}

/// Advances a sampling row past a token that its sequence does not hold yet.
fn advance(sequence: &mut SequenceState, token: u32, row: &mut SamplingRow) {
    sequence.tokens.push(token);
    row.advance(sequence.tokens.len(), &sequence.tokens);
    sequence.tokens.pop();
}
