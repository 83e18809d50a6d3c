//! Meaning of the inputs of a model's step.
//!
//! A step processes `n_tokens` rows, one per token, of `n_seqs` sequences, and samples a token after `n_choices`
//! of them. A single sequence is not a special case. The model builder declares each input here once, together with the
//! graph. The plan carries this declaration to all code that fills, checks, feeds back or verifies a step; no
//! code derives the meaning of an input from its name.

use crate::control::{ControlBlock, ControlError, ControlLayout};
use crate::graph::InputId;

/// Kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    /// One token per sequence, each followed by sampling.
    Decode,
    /// A chunk of one prompt.
    Prompt,
    /// Tokens of running sequences together with chunks of prompts.
    Mixed,
    /// Several proposed tokens per sequence, to accept or reject.
    Verify,
    /// Forward, loss, backward and update.
    Train,
    /// Whole texts, each reduced to one vector.
    Embed,
}

impl StepKind {
    /// All kinds, in the order of [`StepKind::idx`].
    pub const ALL: [StepKind; 6] = [
        StepKind::Decode,
        StepKind::Prompt,
        StepKind::Mixed,
        StepKind::Verify,
        StepKind::Train,
        StepKind::Embed,
    ];

    /// Index in [`StepKind::ALL`].
    pub fn idx(self) -> usize {
        match self {
            StepKind::Decode => 0,
            StepKind::Prompt => 1,
            StepKind::Mixed => 2,
            StepKind::Verify => 3,
            StepKind::Train => 4,
            StepKind::Embed => 5,
        }
    }

    /// Name of the kind, for summaries and metrics.
    pub fn name(self) -> &'static str {
        match self {
            StepKind::Decode => "decode",
            StepKind::Prompt => "prompt",
            StepKind::Mixed => "mixed",
            StepKind::Verify => "verify",
            StepKind::Train => "train",
            StepKind::Embed => "embed",
        }
    }
}

/// Kind and size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// Kind.
    pub kind: StepKind,
    /// Evaluated rows, including padding.
    pub n_tokens: usize,
    /// Maximum number of sequences.
    pub n_seqs: usize,
    /// Rows followed by sampling.
    pub n_choices: usize,
}

/// Inputs of a model's step, by meaning. All consist of 32-bit words.
///
/// Unused rows are padding: their token and position are -1, and they write nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepInputs {
    /// Kind and size of the step.
    pub shape: StepShape,
    /// Token of each row.
    pub tokens: InputId, // [n_tokens] I32
    /// Position of each row in its sequence.
    pub positions: InputId, // [n_tokens] I32
    /// Sequence of each row: its row in `tables` and `adapters`.
    pub seqs: InputId, // [n_tokens] I32
    /// KV blocks of each sequence; -1 for unused entries.
    pub tables: Option<InputId>, // [n_seqs, max_blocks] I32
    /// The two slots of each sequence in the states of recurrent layers, see [`crate::Recurrent`]; -1 for
    /// none. Absent if no layer has such a state.
    pub slots: Option<InputId>, // [n_seqs, 2] I32
    /// Adapter of each sequence; -1 for none. Absent if the graph has no adapters.
    pub adapters: Option<InputId>, // [n_seqs] I32
    /// Rows whose logits are computed. Absent if that is every row, in order.
    pub rows: Option<InputId>, // [n_logits] I32
    /// Inputs and outputs of sampling, if the step samples.
    pub sampling: Option<SamplingInputs>,
    /// Index of the output with the logits, if the host reads them.
    pub logits: Option<usize>, // [n_logits, vocab] F32
}

/// Inputs and outputs of sampling the next token of `n_choices` rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplingInputs {
    /// Sampling parameters, in the layout of [`crate::SampleParam`].
    pub params: InputId, // [n_choices, SAMPLE_PARAMS] F32
    /// Seed low, seed high, random position, unused.
    pub rng: InputId, // [n_choices, 4] U32
    /// Tokens that penalties apply to; -1 for unused entries.
    pub history: InputId, // [n_choices, n_history] I32
    /// Tokens with a bias; -1 for unused entries. Initially banned tokens come last; their ban lapses on the
    /// device, at the choice that [`crate::LapsingBias`] names.
    pub bias_ids: InputId, // [n_choices, n_bias] I32
    /// Their biases.
    pub bias: InputId, // [n_choices, n_bias] F32
    /// One bit per token: whether it may be chosen. Absent if every token may.
    pub mask: Option<InputId>, // [n_choices, vocab.div_ceil(32)] U32
    /// Index of the output with the chosen tokens.
    pub token: usize, // [n_choices] I32
    /// Index of the output with their log-probabilities; not finite if the row's logits were not.
    pub logprob: usize, // [n_choices] F32
    /// Indices of the outputs with the most probable tokens and their log-probabilities, if requested.
    pub top: Option<[usize; 2]>, // [n_choices, n_top] I32 and F32
}

impl StepInputs {
    /// Whether every row is the newest token of its sequence and is followed by sampling. Then choices can
    /// become the next step's inputs without the host.
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
    /// Number of words.
    pub len: usize,
}

impl Field {
    /// Field of an input of 32-bit elements.
    pub fn of(layout: &ControlLayout, input: InputId) -> Field {
        let slot = layout.slot(input);
        Field { offset: slot.offset, len: slot.bytes / 4 }
    }

    /// Byte range in the block.
    pub fn range(self) -> std::ops::Range<usize> {
        self.offset..self.offset + 4 * self.len
    }

    /// Field of one of `n_rows` rows of equal length.
    pub fn row(self, n_rows: usize, row: usize) -> Field {
        let len = self.len / n_rows.max(1);
        Field { offset: self.offset + 4 * row * len, len }
    }

    pub(crate) fn words(self) -> std::ops::Range<usize> {
        self.offset / 4..self.offset / 4 + self.len
    }

    /// Values of the field in a block; empty if the block is too short.
    pub fn read(self, control: &[u8]) -> impl Iterator<Item = i32> + '_ {
        let bytes = control.get(self.range()).unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w))
    }

    /// Value at index `i`; -1 outside the field or the block.
    pub fn at(self, control: &[u8], i: usize) -> i32 {
        let start = self.offset + 4 * i;
        let word = control.get(start..start + 4).filter(|_| i < self.len);
        word.map_or(-1, |w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]))
    }

    /// Writes values, as many as fit.
    pub fn put<T: bytemuck::Pod>(self, control: &mut [u8], values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(to) = control.get_mut(self.range()) {
            let n = to.len().min(bytes.len());
            to[..n].copy_from_slice(&bytes[..n]);
        }
    }
}

/// Fills inputs of a control block row by row; unused entries are -1.
pub struct Filler<'a> {
    control: &'a mut ControlBlock,
    scratch: Vec<i32>,
}

impl<'a> Filler<'a> {
    /// Returns a filler for this block.
    pub fn new(control: &'a mut ControlBlock) -> Filler<'a> {
        Filler { control, scratch: Vec::new() }
    }

    /// Sets a whole I32 input; unused entries are -1.
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

    /// Sets a whole I32 input, `[n, width]`, row by row; unused entries are -1.
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

    /// Sets one row of an I32 input, `[n, width]`; unused entries are -1.
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

    /// Sets one row of an input; the others are unchanged.
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
