//! What the inputs of a model's step mean.
//!
//! A step is rows: `n_tokens` tokens of `n_seqs` sequences, of which `n_choices` are followed by a choice of the next
//! token. One sequence is the case of one. The model builder declares each input here once, together with the graph;
//! the plan carries the declaration, and whoever fills, checks, feeds back or verifies a step reads it. Nothing
//! recovers the meaning of an input from its name.

use crate::control::{ControlBlock, ControlError, ControlLayout};
use crate::graph::InputId;

/// What a step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    /// One token of each sequence, each followed by a choice.
    Decode,
    /// A piece of one prompt.
    Prompt,
    /// Tokens of running sequences beside pieces of prompts.
    Mixed,
    /// Several proposed tokens of each sequence, to be accepted or not.
    Verify,
    /// Forward, loss, backward and update.
    Train,
}

impl StepKind {
    /// Every kind, in the order of [`StepKind::idx`].
    pub const ALL: [StepKind; 5] =
        [StepKind::Decode, StepKind::Prompt, StepKind::Mixed, StepKind::Verify, StepKind::Train];

    /// Position in [`StepKind::ALL`].
    pub fn idx(self) -> usize {
        match self {
            StepKind::Decode => 0,
            StepKind::Prompt => 1,
            StepKind::Mixed => 2,
            StepKind::Verify => 3,
            StepKind::Train => 4,
        }
    }

    /// The kind's name, for summaries and metrics.
    pub fn name(self) -> &'static str {
        match self {
            StepKind::Decode => "decode",
            StepKind::Prompt => "prompt",
            StepKind::Mixed => "mixed",
            StepKind::Verify => "verify",
            StepKind::Train => "train",
        }
    }
}

/// How many rows a step has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// What the step is for.
    pub kind: StepKind,
    /// Rows that are evaluated, padding included.
    pub n_tokens: usize,
    /// Sequences that the rows may belong to.
    pub n_seqs: usize,
    /// Rows that are followed by a choice.
    pub n_choices: usize,
}

/// The inputs of a model's step, by meaning. All are 32-bit words.
///
/// Rows beyond the tokens at hand are padding: their token and position are -1, and they write nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepInputs {
    /// Its rows.
    pub shape: StepShape,
    /// Token of each row.
    pub tokens: InputId, // [n_tokens] I32
    /// Position of each row in its sequence.
    pub positions: InputId, // [n_tokens] I32
    /// Sequence of each row: its row in `tables` and `adapters`.
    pub seqs: InputId, // [n_tokens] I32
    /// KV blocks of each sequence; -1 where there is none.
    pub tables: Option<InputId>, // [n_seqs, max_blocks] I32
    /// The two slots of each sequence in the states of recurrent layers, as [`crate::Recurrent`] reads them; -1 where
    /// there is none. Absent where no layer has such a state.
    pub slots: Option<InputId>, // [n_seqs, 2] I32
    /// Adapter of each sequence; -1 for none. Absent where the graph applies none.
    pub adapters: Option<InputId>, // [n_seqs] I32
    /// Rows whose logits are computed; absent where that is every row, in order.
    pub rows: Option<InputId>, // [n_logits] I32
    /// How the next tokens are chosen, where the step chooses.
    pub sampling: Option<SamplingInputs>,
    /// Which output of the graph holds the logits, where they are read back.
    pub logits: Option<usize>, // [n_logits, vocab] F32
}

/// Inputs and outputs of the choice behind each of `n_choices` rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplingInputs {
    /// Sampling parameters, laid out by [`crate::SampleParam`].
    pub params: InputId, // [n_choices, SAMPLE_PARAMS] F32
    /// Seed low, seed high, random position, unused.
    pub rng: InputId, // [n_choices, 4] U32
    /// Tokens that penalties look at; -1 where there is none.
    pub history: InputId, // [n_choices, n_history] I32
    /// Tokens with a bias; -1 where there is none. Tokens that may not be chosen at first have the last places in use: these
    /// lapse on the device, at the choice that [`crate::LapsingBias`] names.
    pub bias_ids: InputId, // [n_choices, n_bias] I32
    /// Their biases.
    pub bias: InputId, // [n_choices, n_bias] F32
    /// One bit for each token that may be chosen. Absent where every token may.
    pub mask: Option<InputId>, // [n_choices, vocab.div_ceil(32)] U32
    /// Which output of the graph is the chosen token.
    pub token: usize, // [n_choices] I32
    /// Which is its log-probability; not finite when the row's logits were not.
    pub logprob: usize, // [n_choices] F32
    /// Which outputs are the most probable tokens and their log-probabilities, where they are asked for.
    pub top: Option<[usize; 2]>, // [n_choices, n_top] I32 and F32
}

impl StepInputs {
    /// Whether each row is one sequence's newest token and is followed by its choice, so that choices can become the
    /// next step's inputs without the host.
    pub fn is_decode(&self) -> bool {
        let StepShape { kind, n_tokens, n_seqs, n_choices } = self.shape;
        kind == StepKind::Decode && n_tokens == n_choices && n_tokens <= n_seqs && self.sampling.is_some()
    }
}

/// A field of 32-bit words in the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Byte offset.
    pub offset: usize,
    /// Words.
    pub len: usize,
}

impl Field {
    /// Where an input of 32-bit elements lies.
    pub fn of(layout: &ControlLayout, input: InputId) -> Field {
        let slot = layout.slot(input);
        Field { offset: slot.offset, len: slot.bytes / 4 }
    }

    /// Its bytes in the block.
    pub fn range(self) -> std::ops::Range<usize> {
        self.offset..self.offset + 4 * self.len
    }

    /// One of `n_rows` rows of equal length.
    pub fn row(self, n_rows: usize, row: usize) -> Field {
        let len = self.len / n_rows.max(1);
        Field { offset: self.offset + 4 * row * len, len }
    }

    pub(crate) fn words(self) -> std::ops::Range<usize> {
        self.offset / 4..self.offset / 4 + self.len
    }

    /// Its values in a block; none when the block is too short.
    pub fn read(self, control: &[u8]) -> impl Iterator<Item = i32> + '_ {
        let bytes = control.get(self.range()).unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w))
    }

    /// One value; -1 outside of the field or the block.
    pub fn at(self, control: &[u8], i: usize) -> i32 {
        let start = self.offset + 4 * i;
        let word = control.get(start..start + 4).filter(|_| i < self.len);
        word.map_or(-1, |w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]))
    }

    /// Puts values in place, as many as there are or fit.
    pub fn put<T: bytemuck::Pod>(self, control: &mut [u8], values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(to) = control.get_mut(self.range()) {
            let n = to.len().min(bytes.len());
            to[..n].copy_from_slice(&bytes[..n]);
        }
    }
}

/// Fills inputs of a control block row by row, -1 behind the values given.
pub struct Filler<'a> {
    control: &'a mut ControlBlock,
    scratch: Vec<i32>,
}

impl<'a> Filler<'a> {
    /// A filler of that block.
    pub fn new(control: &'a mut ControlBlock) -> Filler<'a> {
        Filler { control, scratch: Vec::new() }
    }

    /// Sets a whole input of I32; places without a value hold -1.
    pub fn padded(
        &mut self,
        input: InputId,
        values: impl IntoIterator<Item = i32>,
    ) -> Result<&mut Self, ControlError> {
        let n = self.control.layout().slot(input).ty.shape.n_elements();
        self.scratch.clear();
        self.scratch.extend(values.into_iter().chain(std::iter::repeat(-1)).take(n));
        self.control.set_i32(input, &self.scratch)?;
        Ok(self)
    }

    /// Sets a whole input of I32, `[n, width]`, row by row; places without a value hold -1.
    pub fn padded_rows<'v>(
        &mut self,
        input: InputId,
        rows: impl IntoIterator<Item = &'v [u32]>,
    ) -> Result<&mut Self, ControlError> {
        let shape = self.control.layout().slot(input).ty.shape;
        let (n, width) = (shape.n_elements(), shape.dims().last().copied().unwrap_or(0));
        self.scratch.clear();
        self.scratch.resize(n, -1);
        for (to, row) in self.scratch.chunks_exact_mut(width.max(1)).zip(rows) {
            to.iter_mut().zip(row).for_each(|(to, value)| *to = *value as i32);
        }
        self.control.set_i32(input, &self.scratch)?;
        Ok(self)
    }

    /// Sets one row of an input of I32, `[n, width]`; places without a value hold -1.
    pub fn padded_row(
        &mut self,
        input: InputId,
        row: usize,
        values: &[i32],
    ) -> Result<&mut Self, ControlError> {
        let width = self.control.layout().slot(input).ty.shape.dims().last().copied().unwrap_or(0);
        self.scratch.clear();
        let padded = values.iter().copied().chain(std::iter::repeat(-1));
        self.scratch.extend(padded.take(width));
        self.control.set_row(input, row, &self.scratch)?;
        Ok(self)
    }

    /// Sets one row of an input; the others stay as they are.
    pub fn row<T: bytemuck::Pod>(
        &mut self,
        input: InputId,
        row: usize,
        values: &[T],
    ) -> Result<&mut Self, ControlError> {
        self.control.set_row(input, row, values)?;
        Ok(self)
    }
}
