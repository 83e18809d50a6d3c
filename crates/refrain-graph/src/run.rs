//! Runs: decode steps whose choices become the next step's inputs.
//!
//! A decode step feeds itself: only tokens, positions, random positions, recent tokens and lapsing biases
//! change between steps, and all of them follow from the choices. [`Feedback`] describes where they are. A
//! [`Run`] is a sequence of such steps over a fixed number of rows. It alone owns the host-side state: which
//! rows are in use, where each ends, which steps were launched and which collected. A backend that updates the
//! inputs on the device keeps several steps in flight. For other backends, [`Run::commit`] updates them on the
//! host, one step at a time.
//!
//! Rows may join and leave during a run. [`Run::set_row`] and [`Run::clear_row`] take effect after the steps
//! already launched and before all later ones. A row that ends, on its own or because it is cleared, is padding
//! from then on.
//!
//! The choices of some runs depend on masks that the host computes from the choices before them. A step of such a run
//! is launched in two parts: everything before the masks are needed, and the rest once [`LateRows`] has them. A row
//! whose mask takes long is *held*: it sits out the choice, and its token is evaluated again in the next step.

use crate::bounds::{Bounds, OutOfBounds};
use crate::control::ControlBlock;
use crate::inputs::Field;
use crate::plan::Plan;
use crate::report::Ran;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Flags that a step reports with each choice: one word, the same on every device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct StepFlags(pub u32);

impl StepFlags {
    /// The token ends the sequence.
    pub const ENDED: StepFlags = StepFlags(1);
    /// The sequence has no tokens or positions left.
    pub const LENGTH: StepFlags = StepFlags(2);
    /// The sequence had already ended, or the row is padding: nothing was committed.
    pub const PAST_END: StepFlags = StepFlags(4);
    /// The row's logits were not finite: the token is meaningless.
    pub const NON_FINITE: StepFlags = StepFlags(8);

    /// Whether a flag is set.
    pub fn has(self, flag: StepFlags) -> bool {
        self.0 & flag.0 != 0
    }

    /// Returns the flags, with another one added if `set`.
    #[must_use]
    pub fn with(self, flag: StepFlags, set: bool) -> StepFlags {
        StepFlags(self.0 | if set { flag.0 } else { 0 })
    }
}

impl fmt::Debug for StepFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (StepFlags::ENDED, "ended"),
            (StepFlags::LENGTH, "length"),
            (StepFlags::PAST_END, "past_end"),
            (StepFlags::NON_FINITE, "non_finite"),
        ];
        f.debug_set().entries(names.iter().filter(|(flag, _)| self.has(*flag)).map(|(_, name)| name)).finish()
    }
}

/// Where a step reports the most probable tokens of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopLists {
    /// Index of the output with the tokens, best first.
    pub ids: usize, // [n_rows, n]
    /// Index of the output with their log-probabilities.
    pub logprobs: usize, // [n_rows, n]
    /// Tokens per row.
    pub n: usize,
}

/// Locations of the inputs that a decode step's choices update for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feedback {
    /// Rows: sequences decoded together.
    pub n_rows: usize,
    /// Index of the plan's output with the choices.
    pub token: usize, // [n_rows]
    /// Index of the output with their log-probabilities.
    pub logprob: usize, // [n_rows]
    /// Evaluated tokens.
    pub tokens: Field, // [n_rows]
    /// Their positions.
    pub positions: Field, // [n_rows]
    /// Seed low, seed high, random position, unused.
    pub rng: Field, // [n_rows, 4]
    /// Recent tokens.
    pub history: Field, // [n_rows, n_history]
    /// Tokens with a bias.
    pub bias_ids: Field, // [n_rows, n_bias]
    /// KV blocks of the sequences; only the host changes them.
    pub tables: Field, // [n_seqs, max_blocks]
    /// Recurrent slots of the sequences; only the host changes them.
    pub slots: Option<Field>, // [n_seqs, 2]
    /// Lists of the most probable tokens, if they are reported.
    pub top: Option<TopLists>,
    /// Tokens that may be chosen, for a run whose steps are launched in two parts.
    pub mask: Option<Field>, // [n_rows, n_words]
    /// Adapters of the sequences; only the host changes them.
    pub adapters: Option<Field>, // [n_seqs]
    /// Number of sequences with block tables, at least `n_rows`.
    pub n_seqs: usize,
}

impl Feedback {
    /// Returns the inputs that a plan's steps update for the next one; `None` for a plan that is not a decode
    /// step.
    pub fn of(plan: &Plan) -> Option<Feedback> {
        let step = plan.step_inputs().filter(|step| step.is_decode())?;
        let (sampling, tables) = (step.sampling.as_ref()?, step.tables?);
        Some(Feedback {
            n_rows: step.shape.n_choices,
            token: sampling.token,
            logprob: sampling.logprob,
            tokens: plan.field(step.tokens),
            positions: plan.field(step.positions),
            rng: plan.field(sampling.rng),
            history: plan.field(sampling.history),
            bias_ids: plan.field(sampling.bias_ids),
            tables: plan.field(tables),
            slots: step.slots.map(|slots| plan.field(slots)),
            top: sampling.top.map(|[ids, logprobs]| {
                let n = plan.outputs()[ids].layout.shape().n_elements() / step.shape.n_choices.max(1);
                TopLists { ids, logprobs, n }
            }),
            mask: sampling.mask.map(|mask| plan.field(mask)),
            adapters: step.adapters.map(|adapters| plan.field(adapters)),
            n_seqs: step.shape.n_seqs,
        })
    }

    /// Block table of a row.
    fn table(&self, row: usize) -> Field {
        self.tables.row(self.n_seqs, row)
    }
}

/// Biases that apply to the first choices only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapsingBias {
    /// Number of bias entries, from the first, that stay.
    pub n_kept: usize,
    /// Random position of the first choice without the others; not 0.
    pub until: u32,
}

/// Where a row ends on its own, and how its inputs change with each choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowLimits {
    /// Number of positions of the sequence: the step at the last one is the row's last.
    pub n_positions: usize,
    /// Number of choices that the row may make.
    pub n_choices: usize,
    /// Tokens that end the row.
    pub end: Vec<u32>,
    /// Number of history entries in use, from the first.
    pub window: usize,
    /// History entry that the next token is written to.
    pub history_next: usize,
    /// Biases that lapse.
    pub lapsing: Option<LapsingBias>,
}

/// Result of one step of a run for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Committed {
    /// Chosen token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// Position of the evaluated token.
    pub position: usize,
    /// Whether the row ends with this step, and why.
    pub flags: StepFlags,
}

impl Committed {
    /// Whether the row ends with this step.
    pub fn ended(&self) -> bool {
        self.flags != StepFlags::default()
    }
}

/// Result of one step of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct CommittedStep {
    /// Results by row; `None` for padding, for a row that had already ended, and for one that was held.
    pub rows: Vec<Option<Committed>>,
    /// The most probable tokens of each row and their log-probabilities, row by row; empty if they are not reported.
    pub top: Vec<(u32, f32)>,
    /// How the step ran.
    pub ran: Ran,
}

impl CommittedStep {
    /// The most probable tokens of a row, best first.
    pub fn top_of(&self, row: usize) -> &[(u32, f32)] {
        let n = self.top.len() / self.rows.len().max(1);
        self.top.get(row * n..(row + 1) * n).unwrap_or_default()
    }
}

/// Changes of a run's inputs that take effect between two steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunEdits {
    /// Fields of the control block with new values.
    pub fields: Vec<Field>,
    /// Rows with new limits, or with none: those have ended.
    pub rows: Vec<usize>,
}

impl RunEdits {
    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.rows.is_empty()
    }
}

/// What the rest of a step needs from the host, in a run with masks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LateRows {
    /// Rows with a new mask: one bit per token. Other rows keep theirs.
    pub masks: Vec<(usize, Vec<u32>)>,
    /// Rows whose mask is not known yet: they choose nothing, and the next step repeats their token.
    pub held: Vec<usize>,
}

/// A row in use.
#[derive(Clone, Debug)]
struct LiveRow {
    limits: RowLimits,
    /// Position of the next step to launch, assuming that only its length ends the row.
    next: usize,
    /// One past its last possible position.
    end: usize,
}

impl LiveRow {
    fn new(limits: RowLimits, start: usize) -> LiveRow {
        let end = limits.n_positions.min(start.saturating_add(limits.n_choices)).max(start);
        LiveRow { limits, next: start, end }
    }
}

/// Steps that take their inputs from the previous ones. See the module documentation.
#[derive(Clone, Debug)]
pub struct Run {
    id: u64,
    feedback: Feedback,
    rows: Vec<Option<LiveRow>>,
    /// Inputs of the first step, with the newest block tables and the inputs of rows that joined. If steps go
    /// one by one, the inputs of the next step.
    control: ControlBlock,
    edits: RunEdits,
    n_sent: u64,
    n_supplied: u64,
    n_taken: u64,
    /// Rows that choose nothing in the step that is supplied and not committed on the host.
    held: Vec<usize>,
    ready: VecDeque<CommittedStep>,
}

impl Run {
    /// Returns a run whose first step has the inputs in `control`. Rows without limits are padding. No step is
    /// launched yet.
    pub fn new(feedback: Feedback, control: ControlBlock, rows: Vec<Option<RowLimits>>) -> Run {
        static N_RUNS: AtomicU64 = AtomicU64::new(0);
        let mut run = Run {
            id: N_RUNS.fetch_add(1, Ordering::Relaxed),
            feedback,
            rows: Vec::new(),
            control,
            edits: RunEdits::default(),
            n_sent: 0,
            n_supplied: 0,
            n_taken: 0,
            held: Vec::new(),
            ready: VecDeque::new(),
        };
        let limits = rows.into_iter().chain(std::iter::repeat(None)).take(feedback.n_rows);
        let rows = limits.enumerate().map(|(row, limits)| Some(LiveRow::new(limits?, run.position(row)?)));
        run.rows = rows.collect();
        run
    }

    /// Id of the run, unique in the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Locations of its inputs.
    pub fn feedback(&self) -> &Feedback {
        &self.feedback
    }

    /// Limits of a row; `None` for padding.
    pub fn limits(&self, row: usize) -> Option<&RowLimits> {
        self.rows.get(row)?.as_ref().map(|row| &row.limits)
    }

    /// Inputs of the first step, or of the next one if steps go one by one, with all changes so far.
    pub fn control(&self) -> &[u8] {
        self.control.bytes()
    }

    /// Number of steps launched so far.
    pub fn n_sent(&self) -> u64 {
        self.n_sent
    }

    /// Number of steps collected so far.
    pub fn n_taken(&self) -> u64 {
        self.n_taken
    }

    /// Counts launched steps.
    pub fn sent(&mut self, n: usize) {
        self.n_sent += n as u64;
        for row in self.rows.iter_mut().flatten() {
            row.next = row.next.saturating_add(n).min(row.end);
        }
    }

    /// Whether steps are launched in two parts, the second once it has masks.
    pub fn is_late(&self) -> bool {
        self.feedback.mask.is_some()
    }

    /// Whether the step to collect next was launched and still needs its masks.
    pub fn awaits_masks(&self) -> bool {
        self.is_late() && self.n_supplied == self.n_taken && self.n_sent > self.n_taken
    }

    /// Whether some launched step still needs its masks.
    pub fn may_supply(&self) -> bool {
        self.is_late() && self.n_supplied < self.n_sent
    }

    /// Gives the oldest step without masks its masks.
    pub fn supply(&mut self, late: &LateRows) {
        self.n_supplied += 1;
        if let Some(mask) = self.feedback.mask {
            for (row, bits) in &late.masks {
                let words = &mut self.control.words_mut()[mask.row(self.feedback.n_rows, *row).words()];
                words.iter_mut().zip(bits).for_each(|(word, bits)| *word = *bits);
            }
        }
        self.held.clone_from(&late.held);
    }

    /// Whether each row ends with the steps launched so far, at the latest.
    pub fn is_requested_whole(&self) -> bool {
        self.rows.iter().flatten().all(|row| row.next >= row.end)
    }

    /// Counts a collected step.
    pub fn taken(&mut self) {
        self.n_taken += 1;
    }

    /// Assigns a sequence to a row, starting with the next launched step. `fill` writes its inputs.
    pub fn set_row<E>(
        &mut self,
        row: usize,
        limits: RowLimits,
        fill: impl FnOnce(&mut ControlBlock) -> Result<(), E>,
    ) -> Result<(), E> {
        fill(&mut self.control)?;
        self.rows[row] = self.position(row).map(|start| LiveRow::new(limits, start));
        let n_rows = self.feedback.n_rows;
        self.edits.fields.extend(self.control.layout().row_fields(n_rows, row));
        if self.feedback.n_seqs != n_rows {
            self.edits.fields.push(self.feedback.table(row));
            let n_seqs = self.feedback.n_seqs;
            let per_seq = [self.feedback.slots, self.feedback.adapters].into_iter().flatten();
            self.edits.fields.extend(per_seq.map(|field| field.row(n_seqs, row)));
        }
        self.edits.rows.push(row);
        Ok(())
    }

    /// Ends a row: it is padding starting with the next launched step.
    pub fn clear_row(&mut self, row: usize) {
        let Feedback { n_rows, n_seqs, tokens, positions, adapters, .. } = self.feedback;
        // Padding must not read the factors of an adapter.
        let adapter = adapters.map(|adapters| adapters.row(n_seqs, row));
        for field in [tokens, positions].map(|field| field.row(n_rows, row)).into_iter().chain(adapter) {
            self.control.words_mut()[field.words()].fill(u32::MAX);
            self.edits.fields.push(field);
        }
        self.rows[row] = None;
        self.edits.rows.push(row);
    }

    /// Writes a row's block table for the steps not launched yet; unused entries are -1.
    pub fn set_table(&mut self, row: usize, table: &[u32]) {
        let field = self.feedback.table(row);
        let words = &mut self.control.words_mut()[field.words()];
        let blocks = table.iter().copied().chain(std::iter::repeat(u32::MAX));
        let mut changed: Option<(usize, usize)> = None;
        for (i, (word, block)) in words.iter_mut().zip(blocks).enumerate() {
            if *word != block {
                *word = block;
                changed = Some((changed.map_or(i, |(first, _)| first), i));
            }
        }
        if let Some((first, last)) = changed {
            self.edits.fields.push(Field { offset: field.offset + 4 * first, len: last + 1 - first });
        }
    }

    /// Returns the changes since the last call.
    pub fn take_edits(&mut self) -> RunEdits {
        std::mem::take(&mut self.edits)
    }

    /// Refuses to launch `n` more steps if one of them would exceed the limits of its index inputs. Checks each
    /// row up to the last position that its length allows.
    pub fn check(&mut self, bounds: &Bounds, n: usize) -> Result<(), OutOfBounds> {
        let field = self.feedback.positions;
        let words = &mut self.control.words_mut()[field.words()];
        let before = words.to_vec();
        for (word, row) in words.iter_mut().zip(&self.rows) {
            let row = row.as_ref().filter(|row| row.next < row.end && n > 0);
            *word = row.map_or(u32::MAX, |row| (row.next.saturating_add(n).min(row.end) - 1) as u32);
        }
        let checked = bounds.check(self.control.bytes());
        self.control.words_mut()[field.words()].copy_from_slice(&before);
        checked
    }

    /// Makes the choices the next step's inputs, as a device does for steps that feed themselves.
    pub fn commit(&mut self, tokens: &[u32], logprobs: &[f32], top: Vec<(u32, f32)>, ran: Ran) {
        let rows = (0..self.feedback.n_rows).map(|row| self.commit_row(row, tokens[row], logprobs[row]));
        let rows = rows.collect();
        self.ready.push_back(CommittedStep { rows, top, ran });
    }

    fn commit_row(&mut self, row: usize, token: u32, logprob: f32) -> Option<Committed> {
        let position = self.position(row)?;
        if self.held.contains(&row) {
            return None;
        }
        let Feedback { n_rows, tokens, positions, rng, history, bias_ids, .. } = self.feedback;
        let LiveRow { limits, end, .. } = self.rows[row].as_mut()?;
        let flags = StepFlags::default()
            .with(StepFlags::ENDED, limits.end.contains(&token))
            .with(StepFlags::LENGTH, position + 1 >= *end)
            .with(StepFlags::NON_FINITE, !logprob.is_finite());
        let words = self.control.words_mut();
        let at = |field: Field| field.row(n_rows, row).words();
        words[at(tokens).start] = token;
        words[at(positions).start] =
            if flags == StepFlags::default() { position as u32 + 1 } else { u32::MAX };
        let random = &mut words[at(rng).start + 2];
        *random = random.wrapping_add(1);
        if limits.lapsing.is_some_and(|lapsing| *random >= lapsing.until)
            && let Some(lapsing) = limits.lapsing.take()
        {
            let places = &mut words[at(bias_ids)];
            let n_kept = lapsing.n_kept.min(places.len());
            places[n_kept..].fill(u32::MAX);
        }
        let places = &mut words[at(history)];
        let window = limits.window.min(places.len());
        if window > 0 {
            let next = limits.history_next % window;
            places[next] = token;
            limits.history_next = (next + 1) % window;
        }
        Some(Committed { token, logprob, position, flags })
    }

    /// Whether all rows have ended: further steps would contain only padding.
    pub fn has_ended(&self) -> bool {
        (0..self.feedback.n_rows).all(|row| self.position(row).is_none())
    }

    /// Removes the oldest step committed on the host and not yet collected.
    pub fn take(&mut self) -> Option<CommittedStep> {
        let step = self.ready.pop_front()?;
        self.taken();
        Some(step)
    }

    /// Discards the steps committed on the host and not yet collected; returns how many there were.
    pub fn forget(&mut self) -> usize {
        let n = self.ready.len();
        self.ready.clear();
        n
    }

    /// Position of a row in the control block; `None` for padding.
    fn position(&self, row: usize) -> Option<usize> {
        usize::try_from(self.feedback.positions.at(self.control.bytes(), row)).ok()
    }
}

#[cfg(test)]
mod tests;
