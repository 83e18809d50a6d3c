//! Runs: decode steps whose choice is the next step's input.
//!
//! A decode step can feed itself: of its inputs only the token, its position, the random position and the recent tokens
//! change, and all of them follow from the choice. [`Feedback`] says where they lie, [`Run`] holds one sequence's run of
//! such steps. A backend that changes them on the device keeps several steps in flight; for any other, [`Run::commit`]
//! changes them here, one step after the other.

use crate::control::ControlBlock;
use crate::inputs::Field;
use crate::plan::Plan;
use crate::report::Ran;
use std::collections::VecDeque;
use std::fmt;

/// What a step reports besides its choice: one word, the same on every device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct StepFlags(pub u32);

impl StepFlags {
    /// The token is one that ends the sequence.
    pub const ENDED: StepFlags = StepFlags(1);
    /// The sequence has no tokens or positions left.
    pub const LENGTH: StepFlags = StepFlags(2);
    /// The sequence had ended before, or the row is padding: nothing was committed.
    pub const PAST_END: StepFlags = StepFlags(4);
    /// The row's logits were not finite: the token means nothing.
    pub const NON_FINITE: StepFlags = StepFlags(8);

    /// Whether a flag is set.
    pub fn has(self, flag: StepFlags) -> bool {
        self.0 & flag.0 != 0
    }

    /// With another flag set where `set` says so.
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

/// Where the inputs lie that a decode step's choice changes for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feedback {
    /// Rows: sequences that are decoded together.
    pub n_rows: usize,
    /// Which output of the plan is the choice.
    pub token: usize, // [n_rows]
    /// Which is its log-probability.
    pub logprob: usize, // [n_rows]
    /// The tokens that are evaluated.
    pub tokens: Field, // [n_rows]
    /// Their positions.
    pub positions: Field, // [n_rows]
    /// Seed low, seed high, random position, unused.
    pub rng: Field, // [n_rows, 4]
    /// Recent tokens.
    pub history: Field, // [n_rows, n_history]
    /// The sequences' KV blocks, which the host owns.
    pub tables: Field, // [n_seqs, max_blocks]
}

impl Feedback {
    /// What a plan's steps change for the next one; `None` for a plan that is not a decode step.
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
            tables: plan.field(tables),
        })
    }
}

/// Where a run ends by itself, and how far back its penalties look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunLimits {
    /// Positions of the sequence: the step at the last of them is the run's last.
    pub n_positions: usize,
    /// Tokens that end it.
    pub end: Vec<u32>,
    /// Places of the history in use, from the first.
    pub window: usize,
    /// Which of them the next token goes to.
    pub history_next: usize,
}

/// What one step of a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// The choice.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The position of the token that was evaluated.
    pub position: usize,
    /// Whether the run ends with it, and why.
    pub flags: StepFlags,
    /// How the step ran.
    pub ran: Ran,
}

impl Committed {
    /// Whether the run ends with this step.
    pub fn ended(&self) -> bool {
        self.flags != StepFlags::default()
    }
}

/// Steps of one sequence, each of which takes its input from the one before.
#[derive(Clone, Debug)]
pub struct Run {
    feedback: Feedback,
    limits: RunLimits,
    /// The inputs of the first step, with the newest block table; where steps go one by one, of the next.
    control: ControlBlock,
    tables_changed: bool,
    n_sent: u64,
    ended: bool,
    ready: VecDeque<Committed>,
}

impl Run {
    /// A run whose first step has the inputs in `control`. Nothing is sent yet.
    pub fn new(feedback: Feedback, control: ControlBlock, limits: RunLimits) -> Run {
        Run {
            feedback,
            limits,
            control,
            tables_changed: false,
            n_sent: 0,
            ended: false,
            ready: VecDeque::new(),
        }
    }

    /// Where its inputs lie.
    pub fn feedback(&self) -> &Feedback {
        &self.feedback
    }

    /// Where it ends.
    pub fn limits(&self) -> &RunLimits {
        &self.limits
    }

    /// The first step's inputs, or the next one's where steps go one by one, with the newest block table.
    pub fn control(&self) -> &[u8] {
        self.control.bytes()
    }

    /// Steps sent so far.
    pub fn n_sent(&self) -> u64 {
        self.n_sent
    }

    /// Counts steps that were sent.
    pub fn sent(&mut self, n: usize) {
        self.n_sent += n as u64;
    }

    /// Puts a new block table in place for the steps that are not sent yet; places behind it hold -1.
    pub fn set_table(&mut self, table: &[u32]) {
        let words = &mut self.control.words_mut()[self.feedback.tables.words()];
        let blocks = table.iter().copied().chain(std::iter::repeat(u32::MAX));
        for (word, block) in words.iter_mut().zip(blocks) {
            self.tables_changed |= *word != block;
            *word = block;
        }
    }

    /// The bytes of the block table if it has changed since this was last asked.
    pub fn changed_table(&mut self) -> Option<&[u8]> {
        std::mem::take(&mut self.tables_changed).then(|| &self.control.bytes()[self.feedback.tables.range()])
    }

    /// Makes a choice the next step's input, as a device does that feeds itself.
    pub fn commit(&mut self, token: u32, logprob: f32, ran: Ran) {
        let (feedback, limits) = (self.feedback, &mut self.limits);
        let words = self.control.words_mut();
        let next = &mut words[feedback.positions.offset / 4];
        let position = *next as usize;
        *next += 1;
        let flags = StepFlags::default()
            .with(StepFlags::ENDED, limits.end.contains(&token))
            .with(StepFlags::LENGTH, position + 1 >= limits.n_positions)
            .with(StepFlags::NON_FINITE, !logprob.is_finite());
        self.ended = flags != StepFlags::default();
        words[feedback.tokens.offset / 4] = token;
        let random = &mut words[feedback.rng.offset / 4 + 2];
        *random = random.wrapping_add(1);
        let window = limits.window.min(feedback.history.len);
        if window > 0 {
            let at = limits.history_next % window;
            words[feedback.history.offset / 4 + at] = token;
            limits.history_next = (at + 1) % window;
        }
        self.ready.push_back(Committed { token, logprob, position, flags, ran });
    }

    /// Whether the last step committed was the run's last.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The oldest step committed here that was not taken yet.
    pub fn take(&mut self) -> Option<Committed> {
        self.ready.pop_front()
    }

    /// Forgets the steps committed here that were not taken, and says how many they were.
    pub fn forget(&mut self) -> usize {
        let n = self.ready.len();
        self.ready.clear();
        n
    }
}
