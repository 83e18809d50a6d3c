//! Runs: decode steps whose choice is the next step's input.
//!
//! A step over one token that ends in a choice can feed itself: of its inputs only the token, its position, the random
//! position and the recent tokens change, and all of them follow from the choice. [`Feedback`] says where they lie,
//! [`Run`] holds one sequence's run of such steps. A backend that changes them on the device keeps several steps under
//! way; for any other, [`Run::commit`] changes them here, one step after the other.

use crate::control::ControlBlock;
use crate::op::Op;
use crate::plan::{Operand, Place, Plan, Step};
use crate::report::Ran;
use refrain_tensor::DType;
use std::collections::VecDeque;

/// A field of 32-bit words in the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Byte offset.
    pub offset: usize,
    /// Words.
    pub len: usize,
}

impl Field {
    /// Where a dense operand of 32-bit elements lies in the control block, if it does.
    pub fn of(plan: &Plan, operand: &Operand) -> Option<Field> {
        let Place::Control { offset, .. } = plan.buffer(operand.buffer).place else { return None };
        let dense = operand.layout.is_contiguous() && operand.dtype.block_bytes() == 4;
        let len = operand.layout.shape().n_elements();
        dense.then(|| Field { offset: offset + 4 * operand.layout.offset(), len })
    }

    /// Its bytes in the block.
    pub fn range(self) -> std::ops::Range<usize> {
        self.offset..self.offset + 4 * self.len
    }

    fn words(self) -> std::ops::Range<usize> {
        self.offset / 4..self.offset / 4 + self.len
    }
}

/// How the choice of a one-token step becomes the next step's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feedback {
    /// Which output of the plan is the choice.
    pub token: usize,
    /// Which is its log-probability.
    pub logprob: usize,
    /// The token that is evaluated.
    pub tokens: Field, // [1]
    /// Its position.
    pub positions: Field, // [1]
    /// Seed low, seed high, random position, unused.
    pub rng: Field, // [4]
    /// Recent tokens.
    pub history: Field, // [n_history]
    /// The sequence's KV blocks, which the host owns.
    pub tables: Field, // [max_blocks]
}

impl Feedback {
    /// What a plan's steps change for the next one; `None` for a plan that cannot feed itself: of several tokens or
    /// choices, or one whose token or position comes from elsewhere than the control block.
    pub fn of(plan: &Plan) -> Option<Feedback> {
        let mut choices = plan.steps().iter().filter(|step| matches!(step.op, Op::Sample));
        let (sample, None) = (choices.next()?, choices.next()) else { return None };
        let place = |i: usize| {
            let operand = &sample.outputs[i];
            let output = plan.outputs().iter().position(|o| o.buffer == operand.buffer)?;
            Some(output).filter(|_| operand.layout.shape().n_elements() == 1)
        };
        let found = Fields::of(plan)?;
        let feedback = Feedback {
            token: place(0)?,
            logprob: place(1)?,
            tokens: found.tokens?,
            positions: found.positions?,
            rng: Field::of(plan, &sample.inputs[2])?,
            history: Field::of(plan, &sample.inputs[3])?,
            tables: found.tables?,
        };
        let one = feedback.tokens.len == 1 && feedback.positions.len == 1 && feedback.rng.len == 4;
        (one && sample.inputs[2].dtype == DType::U32).then_some(feedback)
    }
}

/// What the steps of a plan read, each in one place.
#[derive(Default)]
struct Fields {
    tokens: Option<Field>,
    positions: Option<Field>,
    tables: Option<Field>,
}

impl Fields {
    /// `None` when two steps read the same thing from different places.
    fn of(plan: &Plan) -> Option<Fields> {
        let mut fields = Fields::default();
        for step in plan.steps() {
            fields.add(plan, step)?;
        }
        Some(fields)
    }

    fn add(&mut self, plan: &Plan, step: &Step) -> Option<()> {
        let ins = &step.inputs;
        let same = |known: &mut Option<Field>, operand: &Operand| {
            let field = Field::of(plan, operand)?;
            (*known.get_or_insert(field) == field).then_some(())
        };
        match &step.op {
            // Rows of a weight are those of tokens; other rows are picked by numbers that stay as they are.
            Op::GatherRows(_) if matches!(plan.buffer(ins[0].buffer).place, Place::Weight(_)) => {
                same(&mut self.tokens, &ins[1])
            }
            Op::Rope(_) => same(&mut self.positions, &ins[1]),
            Op::KvAppend => {
                same(&mut self.positions, &ins[2])?;
                same(&mut self.tables, &ins[4])
            }
            Op::Attention(_) => {
                same(&mut self.positions, &ins[3])?;
                same(&mut self.tables, &ins[5])
            }
            Op::GatherRows(_)
            | Op::Sample
            | Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce(_)
            | Op::Softmax
            | Op::MatMul
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::HostCall(_) => Some(()),
        }
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
    /// Whether the run ends with it.
    pub ended: bool,
    /// How the step ran.
    pub ran: Ran,
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
        let position = &mut words[feedback.positions.offset / 4];
        *position += 1;
        self.ended = limits.end.contains(&token) || *position as usize >= limits.n_positions;
        words[feedback.tokens.offset / 4] = token;
        let random = &mut words[feedback.rng.offset / 4 + 2];
        *random = random.wrapping_add(1);
        let window = limits.window.min(feedback.history.len);
        if window > 0 {
            let at = limits.history_next % window;
            words[feedback.history.offset / 4 + at] = token;
            limits.history_next = (at + 1) % window;
        }
        self.ready.push_back(Committed { token, logprob, ended: self.ended, ran });
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
