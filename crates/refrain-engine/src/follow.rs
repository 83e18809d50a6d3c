//! One token of each sequence after the other, with the next steps under way before they are asked for.
//!
//! A decode step feeds itself: what it chooses is the next step's input. So steps are sent before their tokens are asked
//! for, and nobody waits for the host between two tokens. Sequences join and leave between two steps: one that joins
//! waits for the steps that were sent before. Those that turn out not to be needed have only written KV behind what a
//! sequence holds. Its blocks can be given up all the same: whoever gets them writes to them in later steps, and steps run
//! in the order in which they were sent.
//!
//! The run with its rows is the runner's. This knows who is in which row.

use crate::core::{Chosen, Core, SequenceState, check_tokens};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::request::lock;
use crate::runner::{RunProgress, RunRow, RunShape};
use crate::sampling::SamplingRow;
use crate::step::Want;
use refrain_graph::{Committed, CommittedStep, Ran, StepFlags, StepKind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a caller is known to want, besides the next token: how far steps may be sent ahead of it.
#[derive(Clone, Copy, Debug)]
pub struct Ahead<'a> {
    /// The most tokens that will be asked for, the next one included.
    pub n_tokens: usize,
    /// Tokens after which none will be asked for.
    pub end: &'a [u32],
}

impl Ahead<'_> {
    /// The next token, and then perhaps something else.
    pub const NONE: Ahead<'static> = Ahead { n_tokens: 1, end: &[] };
}

/// A sequence whose next token is evaluated and followed by a choice.
#[derive(Debug)]
pub struct FollowRow<'a> {
    /// The sequence.
    pub sequence: &'a mut SequenceState,
    /// The token behind what it holds.
    pub token: u32,
    /// How the next one is chosen.
    pub row: &'a mut SamplingRow,
    /// What is wanted behind that.
    pub ahead: Ahead<'a>,
}

impl FollowRow<'_> {
    /// Choices that are wanted and have a position.
    fn n_wanted(&self) -> usize {
        self.ahead.n_tokens.max(1).min(self.sequence.context - self.sequence.tokens.len())
    }

    fn run_row(&self) -> RunRow<'_> {
        let tokens = std::slice::from_ref(&self.token);
        RunRow {
            request: self.sequence.request(tokens, Want::Sample(self.row)),
            n_positions: self.sequence.context,
            n_choices: self.n_wanted(),
            end: self.ahead.end,
        }
    }
}

/// Whether a step may be followed by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sends {
    /// As many as may be under way.
    Ahead,
    /// None: those under way are taken, because something else comes after them.
    Nothing,
}

/// What a step came to for each of the rows that were asked for.
#[derive(Debug)]
pub struct FollowedStep {
    /// The token that was chosen; the one before it is held by the sequence now. `None` for a row that joins behind the
    /// steps under way. Logits that make no sense fail their own row.
    pub choices: Vec<Option<Result<Chosen, EngineError>>>,
    /// The time that the ledger has for the step.
    pub took: Duration,
}

/// As [`FollowedStep`] has them.
type Choices = Vec<Option<Result<Chosen, EngineError>>>;

/// Who is in which row of the run. How far the run is the runner knows ([`RunProgress`]).
pub(crate) struct Following {
    rows: Vec<Option<FollowedRow>>,
    shape: RunShape,
    /// How many may be under way.
    most: usize,
    /// When the last result came, while others were under way.
    last: Option<Instant>,
}

/// A sequence in a row.
struct FollowedRow {
    sequence: u64,
    /// Where its steps are entered, besides the ledger of all steps.
    ledger: Arc<Mutex<Ledger>>,
    rules: SamplingRow,
    end: Vec<u32>,
    /// Which step of the run was its first.
    first: u64,
    /// Tokens that the sequence held then.
    start: usize,
    /// Behind the last position that it can have.
    end_at: usize,
    n_taken: usize,
    /// The input of its oldest step that was not taken.
    next: u32,
    has_ended: bool,
}

impl FollowedRow {
    fn new(of: &FollowRow<'_>, first: u64) -> FollowedRow {
        let start = of.sequence.tokens.len();
        FollowedRow {
            sequence: of.sequence.id,
            ledger: of.sequence.ledger.clone(),
            rules: of.row.clone(),
            end: of.ahead.end.to_vec(),
            first,
            start,
            end_at: start + of.n_wanted(),
            n_taken: 0,
            next: of.token,
            has_ended: false,
        }
    }

    /// Whether its next step evaluates that token of a sequence.
    fn is_at(&self, sequence: &SequenceState, token: u32) -> bool {
        !self.has_ended
            && self.sequence == sequence.id
            && self.start + self.n_taken == sequence.tokens.len()
            && self.next == token
    }

    /// Whether its next step is the one that a caller asks for.
    fn is_for(&self, row: &FollowRow<'_>) -> bool {
        self.is_at(row.sequence, row.token) && self.end == row.ahead.end && self.rules.has_rules_of(row.row)
    }

    /// Steps under way that it takes part in.
    fn n_left(&self, run: RunProgress) -> u64 {
        run.n_sent.saturating_sub(run.n_taken.max(self.first))
    }

    /// Positions that it needs for `n_sent` steps of the run.
    fn n_positions(&self, n_sent: u64) -> usize {
        let n_steps = usize::try_from(n_sent.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.start.saturating_add(n_steps).min(self.end_at)
    }
}

impl Following {
    /// The row that a sequence is in, if its next step is the one that is asked for.
    fn find(&self, row: &FollowRow<'_>) -> Option<usize> {
        let at = row.sequence.run_row;
        self.rows.get(at)?.as_ref().is_some_and(|followed| followed.is_for(row)).then_some(at)
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
        self.follow(sequence, token, row, &Ahead::NONE)
    }

    /// Evaluates one token and chooses the next, and sends steps for those that the caller will want after it.
    ///
    /// They serve the next call if it asks for the token chosen here, by the same rules; any other call gets the same
    /// answer as without them. When no more is wanted, [`Core::settle`] waits for those under way.
    pub fn follow(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<Chosen, EngineError> {
        let mut rows = [FollowRow { sequence, token, row, ahead: *ahead }];
        let step = self.follow_rows(&mut rows, Sends::Ahead)?;
        step.choices.into_iter().next().flatten().unwrap_or(Err(EngineError::NoRun))
    }

    /// As [`Core::follow`], one step of several sequences: those that were not in the last one join, and those that were
    /// and are not given here leave. Whoever joins waits for the steps under way, of which there are few; the others get
    /// a token from every call.
    ///
    /// An error is one of the whole step; each sequence is as it was.
    pub fn follow_rows(
        &mut self,
        rows: &mut [FollowRow<'_>],
        sends: Sends,
    ) -> Result<FollowedStep, EngineError> {
        for row in rows.iter() {
            self.check_sequence(row.sequence)?;
            check_tokens(self.model(), &[row.token])?;
            if row.sequence.tokens.len() >= row.sequence.context {
                return Err(EngineError::ContextFull { context: row.sequence.context });
            }
        }
        let began = Instant::now();
        let began = self.following.as_ref().and_then(|f| f.last).unwrap_or(began);
        let step = self.try_follow(rows, sends);
        let took = began.elapsed();
        match step {
            Ok((choices, ran)) => {
                self.enter_step(rows, &choices, ran.as_ref(), took);
                Ok(FollowedStep { choices, took })
            }
            Err(error) => {
                let reason = error.reason();
                self.ledger.failed(StepKind::Decode, took, &reason);
                // Whose fault a step of several is shows when they run one by one.
                if let [row] = rows {
                    lock(&row.sequence.ledger).failed(StepKind::Decode, took, &reason);
                }
                let (following, run) = (self.following.take(), self.runner.progress());
                // A second error of the same run says nothing new; what it left under way is not in the ledger.
                if let (Ok(n), Some(following)) = (self.runner.finish(), following) {
                    self.enter_unused(&following, run, n as u64);
                }
                Err(error)
            }
        }
    }

    /// Waits until no step is under way that was sent ahead, and enters those that nobody needed in the ledger. Every
    /// other call of the core does so first.
    pub fn settle(&mut self) {
        let Some(following) = self.following.take() else { return };
        let run = self.runner.progress();
        match self.runner.finish() {
            Ok(n) => self.enter_unused(&following, run, n as u64),
            // Whoever goes on hears of it again if it still matters.
            Err(error) => {
                let reason = error.reason();
                self.ledger.failed(StepKind::Decode, Duration::ZERO, &reason);
                for row in following.rows.iter().flatten() {
                    lock(&row.ledger).failed(StepKind::Decode, Duration::ZERO, &reason);
                }
            }
        }
    }

    /// A sequence takes part in no more steps. Where it was the only one, no step is under way afterwards; otherwise those
    /// sent before go on for the others, and its row is padding in all that are sent from here on.
    pub(crate) fn leave(&mut self, sequence: &SequenceState) {
        let Some(following) = &mut self.following else { return };
        let is_of = |row: &Option<FollowedRow>| row.as_ref().is_some_and(|f| f.sequence == sequence.id);
        let Some(at) = following.rows.iter().position(is_of) else { return };
        let is_other = |row: &FollowedRow| !row.has_ended && row.sequence != sequence.id;
        if !following.rows.iter().flatten().any(is_other) || self.clear_row(at).is_err() {
            self.settle();
        }
    }

    /// Whether steps are under way that evaluate this token of a sequence.
    pub(crate) fn is_ahead_of(&self, sequence: &SequenceState, token: u32) -> bool {
        let under_way = self.following.as_ref().filter(|_| self.runner.progress().n_under_way() > 0);
        under_way.is_some_and(|f| f.rows.iter().flatten().any(|row| row.is_at(sequence, token)))
    }

    fn try_follow(
        &mut self,
        rows: &mut [FollowRow<'_>],
        sends: Sends,
    ) -> Result<(Choices, Option<Ran>), EngineError> {
        let (places, sends) = self.place(rows, sends)?;
        match sends {
            Sends::Ahead => self.top_up(rows, &places)?,
            Sends::Nothing if self.following.is_none() || self.runner.progress().n_under_way() == 0 => {
                return Ok((rows.iter().map(|_| None).collect(), None));
            }
            Sends::Nothing => {}
        }
        let step = self.runner.progress().n_taken;
        let CommittedStep { rows: committed, ran } = self.runner.take()?;
        let Some(following) = &mut self.following else { return Err(EngineError::NoRun) };
        following.last = (self.runner.progress().n_under_way() > 0).then(Instant::now);
        let kv_dtype = self.runner.kv().dtype;
        let mut choices = Vec::with_capacity(rows.len());
        for (of, place) in rows.iter_mut().zip(places) {
            let row = place.and_then(|at| Some((following.rows[at].as_mut()?, committed.get(at)?)));
            let Some((row, committed)) = row.filter(|(row, _)| row.first <= step) else {
                choices.push(None);
                continue;
            };
            let Some(Committed { token, logprob, position, flags }) = *committed else {
                return Err(EngineError::NoRun);
            };
            row.n_taken += 1;
            (row.next, row.has_ended) = (token, flags != StepFlags::default());
            choices.push(Some(match flags.has(StepFlags::NON_FINITE) {
                true => Err(EngineError::NonFinite { position, kv_dtype }),
                false => {
                    of.sequence.tokens.push(of.token);
                    // The device has not gone on behind its end.
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
        Ok((choices, Some(ran)))
    }

    /// Finds each sequence's row in the run, or gives it one; the others leave theirs. A run of another size begins once
    /// all steps of the last one were taken, so until then nothing may be sent.
    fn place(
        &mut self,
        rows: &mut [FollowRow<'_>],
        sends: Sends,
    ) -> Result<(Vec<Option<usize>>, Sends), EngineError> {
        let n_history = rows.iter().map(|row| row.row.n_history(row.sequence.context)).max().unwrap_or(0);
        let shape = self.runner.run_shape(rows.len(), n_history);
        if let Some(following) = &self.following {
            let mut places: Vec<Option<usize>> = rows.iter().map(|row| following.find(row)).collect();
            if places.iter().any(Option::is_some) {
                let mut is_there = vec![false; following.rows.len()];
                places.iter().flatten().for_each(|at| is_there[*at] = true);
                let is_stale = |at: &usize| following.rows[*at].is_some() && !is_there[*at];
                let stale: Vec<usize> = (0..following.rows.len()).filter(is_stale).collect();
                let (is_fitting, n_under_way) =
                    (following.shape == shape, self.runner.progress().n_under_way());
                stale.into_iter().try_for_each(|at| self.clear_row(at))?;
                // A recurrent state that steps of an earlier row have carried too far is put back when a run begins.
                let is_whole = |(row, place): (&FollowRow<'_>, &Option<usize>)| {
                    place.is_some() || row.sequence.table.holds_state(row.sequence.tokens.len())
                };
                let may_join = rows.iter().zip(&places).all(is_whole);
                if sends == Sends::Ahead && is_fitting && may_join {
                    for (row, place) in rows.iter_mut().zip(&mut places).filter(|(_, place)| place.is_none())
                    {
                        *place = Some(self.join(row)?);
                    }
                    return Ok((places, Sends::Ahead));
                }
                if sends == Sends::Nothing || n_under_way > 0 {
                    return Ok((places, Sends::Nothing));
                }
            }
        }
        self.settle();
        if sends == Sends::Nothing {
            return Ok((vec![None; rows.len()], sends));
        }
        for (at, FollowRow { sequence, row, token, .. }) in rows.iter_mut().enumerate() {
            sequence.table.fit(sequence.tokens.len() + 1)?;
            self.restore(sequence)?;
            sequence.run_row = at;
            advance(sequence, *token, row);
        }
        let run_rows: Vec<RunRow<'_>> = rows.iter().map(FollowRow::run_row).collect();
        let most = self.runner.begin(&run_rows, shape)?;
        let mut followed: Vec<_> = rows.iter().map(|row| Some(FollowedRow::new(row, 0))).collect();
        followed.resize_with(shape.n_rows.max(rows.len()), || None);
        self.following = Some(Following { rows: followed, shape, most, last: None });
        Ok(((0..rows.len()).map(Some).collect(), Sends::Ahead))
    }

    /// Gives a sequence a free row, behind the steps that were sent.
    fn join(&mut self, row: &mut FollowRow<'_>) -> Result<usize, EngineError> {
        let Some(following) = &mut self.following else { return Err(EngineError::NoRun) };
        let at = following.rows.iter().position(Option::is_none).ok_or(EngineError::NoRun)?;
        row.sequence.table.cover(row.sequence.tokens.len() + 1)?;
        advance(row.sequence, row.token, row.row);
        self.runner.set_row(at, &row.run_row())?;
        row.sequence.run_row = at;
        following.rows[at] = Some(FollowedRow::new(row, self.runner.progress().n_sent));
        Ok(at)
    }

    /// Makes a row padding. What is under way of it counts as unused.
    fn clear_row(&mut self, at: usize) -> Result<(), EngineError> {
        let Some(following) = &mut self.following else { return Ok(()) };
        let Some(row) = following.rows[at].take() else { return Ok(()) };
        lock(&row.ledger).unused(StepKind::Decode, row.n_left(self.runner.progress()));
        self.runner.clear_row(at)
    }

    /// Sends steps, in batches: half of what may be under way is left when the device is given more.
    fn top_up(&mut self, rows: &mut [FollowRow<'_>], places: &[Option<usize>]) -> Result<(), EngineError> {
        let Some(following) = &mut self.following else { return Err(EngineError::NoRun) };
        let run = self.runner.progress();
        let under_way = run.n_under_way();
        // Until the last of them has what it wants; those that want less end by themselves.
        let n_wanted = |(row, place): (&FollowRow<'_>, &Option<usize>)| {
            let first = place.and_then(|at| following.rows[at].as_ref()).map_or(0, |row| row.first);
            row.n_wanted().saturating_add(first.saturating_sub(run.n_taken) as usize)
        };
        let longest = rows.iter().zip(places).map(n_wanted).max().unwrap_or(1);
        let most = following.most.min(longest);
        if under_way > 0 && (most <= under_way || under_way > following.most / 2) {
            return Ok(());
        }
        let mut n = most - under_way;
        if let Err(error) = following.cover(rows, places, run.n_sent + n as u64) {
            // Others hold the rest: what is under way will do, or one step at a time.
            if under_way > 0 {
                return Ok(());
            }
            if n == 1 {
                return Err(error);
            }
            n = 1;
            following.cover(rows, places, run.n_sent + n as u64)?;
        }
        for (row, at) in rows.iter().zip(places).filter_map(|(row, at)| Some((row, (*at)?))) {
            self.runner.set_table(at, row.sequence.table.blocks())?;
        }
        for (row, place) in rows.iter_mut().zip(places) {
            let followed = place.and_then(|at| following.rows[at].as_ref());
            if let (Some(slots), Some(followed)) = (row.sequence.table.slots_mut(), followed) {
                slots.may_reach(followed.n_positions(run.n_sent + n as u64));
            }
        }
        self.runner.send(n)
    }

    /// Enters a step that was taken: for all, and for each whose it was.
    fn enter_step(
        &mut self,
        rows: &[FollowRow<'_>],
        choices: &[Option<Result<Chosen, EngineError>>],
        ran: Option<&Ran>,
        took: Duration,
    ) {
        let Some(ran) = ran else { return };
        let n_chosen = choices.iter().flatten().count();
        if n_chosen == 0 {
            return self.ledger.unused(StepKind::Decode, 1);
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

    /// Enters steps of a run that is over and that nobody took.
    fn enter_unused(&mut self, following: &Following, run: RunProgress, n: u64) {
        self.ledger.unused(StepKind::Decode, n);
        for row in following.rows.iter().flatten() {
            lock(&row.ledger).unused(StepKind::Decode, n.min(row.n_left(run)));
        }
    }
}

impl Following {
    /// Has blocks for the first `n_sent` steps of each.
    fn cover(
        &self,
        rows: &mut [FollowRow<'_>],
        places: &[Option<usize>],
        n_sent: u64,
    ) -> Result<(), EngineError> {
        for (row, place) in rows.iter_mut().zip(places) {
            if let Some(followed) = place.and_then(|at| self.rows[at].as_ref()) {
                row.sequence.table.cover(followed.n_positions(n_sent))?;
            }
        }
        Ok(())
    }
}

/// Brings a row to the choice behind a token that its sequence does not hold yet.
fn advance(sequence: &mut SequenceState, token: u32, row: &mut SamplingRow) {
    sequence.tokens.push(token);
    row.advance(sequence.tokens.len(), &sequence.tokens);
    sequence.tokens.pop();
}
