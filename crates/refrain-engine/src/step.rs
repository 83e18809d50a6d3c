//! What a step is asked: its shape, and its control block.

use crate::error::EngineError;
use crate::sampling::{HISTORY, MAX_BIAS, MAX_TOP, SamplingRow};
use refrain_graph::{ControlBlock, Filler, SamplingInputs, StepInputs, StepKind, StepShape};
use refrain_models::{Head, SampleHead, StepSpec};
use refrain_tensor::DType;

/// What to compute from a sequence's tokens besides filling the cache.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// Nothing: a piece of a prompt that goes on.
    Nothing,
    /// The logits after the last `n_rows` tokens. A step that gives logits is of one sequence.
    Logits {
        /// How many rows, from the end.
        n_rows: usize,
    },
    /// The token after the last one.
    Sample(&'a SamplingRow),
}

/// Tokens of one sequence that go through the model in a step.
#[derive(Clone, Copy, Debug)]
pub struct StepRequest<'a> {
    /// The tokens, in order.
    pub tokens: &'a [u32],
    /// The position of the first.
    pub start: usize,
    /// The sequence's KV blocks.
    pub table: &'a [u32],
    /// Its slots in the states of recurrent layers, as [`refrain_graph::Recurrent`] reads them; negative where it has none.
    pub slots: [i32; 2],
    /// What to compute.
    pub want: Want<'a>,
}

impl StepRequest<'_> {
    pub(crate) fn chooses(&self) -> bool {
        matches!(self.want, Want::Sample(_))
    }

    /// Position of the last token.
    pub(crate) fn last_position(&self) -> usize {
        self.start + self.tokens.len().saturating_sub(1)
    }
}

/// What a step over these requests is.
pub fn step_kind(requests: &[StepRequest<'_>]) -> StepKind {
    match requests {
        _ if requests.iter().all(|r| r.tokens.len() == 1 && r.chooses()) => StepKind::Decode,
        [_] => StepKind::Prompt,
        _ => StepKind::Mixed,
    }
}

/// The smallest bucket that holds `n_tokens`; a step larger than all of them keeps its size.
pub(crate) fn bucket(buckets: &[usize], n_tokens: usize) -> usize {
    buckets.iter().copied().find(|&b| b >= n_tokens).unwrap_or(n_tokens)
}

pub(crate) fn sample_head(n_history: usize, n_top: usize) -> Head {
    // One list of the most probable tokens serves all who want some.
    let n_top = if n_top > 0 { MAX_TOP } else { 0 };
    let n_history = history_places(n_history);
    Head::Sample(SampleHead { n_history, n_bias: MAX_BIAS, masked: false, n_top })
}

/// Places of a history that holds so many tokens: of few sizes, so that few plans serve all.
pub(crate) fn history_places(n_tokens: usize) -> usize {
    let mut places = HISTORY;
    while places < n_tokens {
        places = places.saturating_mul(4);
    }
    places
}

/// Sizes of mixed steps are multiples of this where the backend takes any: few sizes, little padding.
const MIXED_GRAIN: usize = 16;

/// The step that these requests take part in, of a size that the backend likes.
///
/// Decoded rows have buckets of their own. Mixed steps of a backend with buckets take those for their tokens and for
/// their sequences, so that there are no more than their square.
pub(crate) fn spec(requests: &[StepRequest<'_>], buckets: &[usize], row_buckets: &[usize]) -> StepSpec {
    let n_tokens = requests.iter().map(|r| r.tokens.len()).sum();
    let choosing = |of: fn(&SamplingRow) -> usize| {
        let rows = requests.iter().map(|r| if let Want::Sample(row) = r.want { of(row) } else { 0 });
        rows.max().unwrap_or(0)
    };
    let head = sample_head(choosing(|row| row.history.len()), choosing(|row| row.n_top));
    let kind = step_kind(requests);
    let shape = match requests {
        [one] => {
            let (n_choices, head) = match one.want {
                Want::Nothing => (0, Head::None),
                Want::Logits { n_rows } => (n_rows, Head::Logits),
                Want::Sample(_) => (1, head),
            };
            return StepSpec::of_one(bucket(buckets, n_tokens), n_choices, head);
        }
        _ if kind == StepKind::Decode => {
            let n = bucket(row_buckets, requests.len());
            StepShape { kind, n_tokens: n, n_seqs: n, n_choices: n }
        }
        _ => {
            let n_choices = requests.iter().filter(|r| r.chooses()).count();
            let (n_tokens, n_seqs, n_choices) = match buckets.is_empty() {
                true => (n_tokens.next_multiple_of(MIXED_GRAIN), requests.len(), n_choices),
                false => {
                    let n_seqs = bucket(buckets, requests.len());
                    (bucket(buckets, n_tokens).max(n_seqs), n_seqs, n_seqs)
                }
            };
            StepShape { kind, n_tokens, n_seqs, n_choices }
        }
    };
    let head = if shape.n_choices == 0 { Head::None } else { head };
    StepSpec { shape, head, act: DType::F32 }
}

/// A decode step of so many sequences, with so many places for recent tokens.
pub(crate) fn decode_spec(n_rows: usize, n_history: usize) -> StepSpec {
    let shape = StepShape { kind: StepKind::Decode, n_tokens: n_rows, n_seqs: n_rows, n_choices: n_rows };
    StepSpec { shape, head: sample_head(n_history, 0), act: DType::F32 }
}

/// Which row of the step's choices belongs to each request that chooses, in order. Where every row of the step has one,
/// it is the row of the request's last token.
pub(crate) fn choice_rows<'a>(
    inputs: &'a StepInputs,
    requests: &'a [StepRequest<'_>],
) -> impl Iterator<Item = usize> + 'a {
    let ends = requests.iter().scan(0, |end, request| {
        *end += request.tokens.len();
        Some((request, *end))
    });
    let choosing = ends.filter(|(request, _)| request.chooses()).enumerate();
    choosing.map(|(idx, (_, end))| if inputs.rows.is_some() { idx } else { end - 1 })
}

/// Puts requests in place, one sequence each.
pub(crate) fn fill(
    inputs: &StepInputs,
    control: &mut ControlBlock,
    requests: &[StepRequest<'_>],
) -> Result<(), EngineError> {
    let mut filler = Filler::new(control);
    let tokens = requests.iter().flat_map(|r| r.tokens.iter().map(|&t| t as i32));
    filler.padded(inputs.tokens, tokens)?;
    let positions = requests.iter().flat_map(|r| (r.start..r.start + r.tokens.len()).map(|p| p as i32));
    filler.padded(inputs.positions, positions)?;
    let seqs = requests.iter().enumerate().flat_map(|(seq, r)| r.tokens.iter().map(move |_| seq as i32));
    // Padding belongs to a sequence that exists; it has no position there.
    filler.padded(inputs.seqs, seqs.chain(std::iter::repeat_n(0, inputs.shape.n_tokens)))?;
    if let Some(tables) = inputs.tables {
        filler.padded_rows(tables, requests.iter().map(|r| r.table))?;
    }
    if let Some(slots) = inputs.slots {
        filler.padded(slots, requests.iter().flat_map(|r| r.slots))?;
    }
    if let Some(rows) = inputs.rows {
        let ends = requests.iter().scan(0, |end, r| {
            *end += r.tokens.len();
            Some((r, *end))
        });
        let wanted = ends.flat_map(|(r, end)| {
            let n_rows = match r.want {
                Want::Nothing => 0,
                Want::Logits { n_rows } => n_rows.min(r.tokens.len()),
                Want::Sample(_) => 1,
            };
            (end - n_rows..end).map(|row| row as i32)
        });
        filler.padded(rows, wanted)?;
    }
    if let Some(sampling) = &inputs.sampling {
        let choosing =
            requests.iter().filter_map(|r| if let Want::Sample(row) = r.want { Some(row) } else { None });
        for (at, row) in choice_rows(inputs, requests).zip(choosing) {
            fill_sampling(&mut filler, sampling, at, row)?;
        }
    }
    Ok(())
}

/// Puts a request for one token and a choice into a row of a decode step; the other rows stay as they are.
pub(crate) fn fill_row(
    inputs: &StepInputs,
    control: &mut ControlBlock,
    row: usize,
    request: &StepRequest<'_>,
) -> Result<(), EngineError> {
    let (Want::Sample(chosen_by), [token]) = (request.want, request.tokens) else {
        return Err(EngineError::NoRun);
    };
    let mut filler = Filler::new(control);
    filler.row(inputs.tokens, row, &[*token as i32])?;
    filler.row(inputs.positions, row, &[request.start as i32])?;
    filler.row(inputs.seqs, row, &[row as i32])?;
    if let Some(tables) = inputs.tables {
        filler.padded_row(tables, row, bytemuck::cast_slice(request.table))?;
    }
    if let Some(slots) = inputs.slots {
        filler.row(slots, row, &request.slots)?;
    }
    match &inputs.sampling {
        Some(sampling) => fill_sampling(&mut filler, sampling, row, chosen_by),
        None => Ok(()),
    }
}

fn fill_sampling(
    filler: &mut Filler<'_>,
    sampling: &SamplingInputs,
    at: usize,
    row: &SamplingRow,
) -> Result<(), EngineError> {
    filler.row(sampling.params, at, &row.params)?;
    filler.row(sampling.rng, at, &row.rng)?;
    filler.padded_row(sampling.history, at, &row.history)?;
    filler.row(sampling.bias_ids, at, &row.bias_ids)?;
    filler.row(sampling.bias, at, &row.bias)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::NO_SLOTS;
    use refrain_graph::{GraphBuilder, Plan, PlanOptions, TensorType};

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_it_or_its_own_size() {
        let buckets = [1, 8, 32];
        let sizes = [1, 2, 8, 9, 32, 33].map(|n| bucket(&buckets, n));
        assert_eq!(sizes, [1, 8, 8, 32, 32, 33]);
        assert_eq!(bucket(&[], 7), 7);
    }

    #[test]
    fn padding_has_neither_token_nor_position_and_the_wanted_rows_are_those_of_the_request() {
        let mut b = GraphBuilder::new(vec![], vec![]);
        let mut input = |name: &str, n: usize| {
            let value = b.input(name, TensorType::new(DType::I32, [n])).unwrap();
            b.input_id(value)
        };
        // Names mean nothing: what an input is for is declared.
        let (tokens, positions, seqs) = (input("a", 4), input("b", 4), input("c", 4));
        let rows = Some(input("d", 2));
        let shape = StepShape { kind: StepKind::Prompt, n_tokens: 4, n_seqs: 1, n_choices: 2 };
        let (tables, adapters, sampling, logits) = (None, None, None, None);
        let slots = None;
        let inputs =
            StepInputs { shape, tokens, positions, seqs, tables, slots, adapters, rows, sampling, logits };
        let plan = Plan::new(&b.finish(), PlanOptions { align: 16, ..PlanOptions::default() }).unwrap();
        let mut control = ControlBlock::new(plan.control());
        let want = Want::Logits { n_rows: 2 };
        let request = StepRequest { tokens: &[7, 8, 9], start: 20, table: &[0], slots: NO_SLOTS, want };
        fill(&inputs, &mut control, &[request]).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [7, 8, 9, -1]);
        assert_eq!(words[4..8], [20, 21, 22, -1]);
        assert_eq!(words[12..14], [1, 2]);
        // A piece of a prompt that goes on, and a decoded token behind it.
        let row = SamplingRow::new(&crate::SamplingParams::greedy());
        let piece =
            StepRequest { tokens: &[5, 6], start: 3, table: &[1], slots: NO_SLOTS, want: Want::Nothing };
        let last =
            StepRequest { tokens: &[4], start: 9, table: &[2], slots: NO_SLOTS, want: Want::Sample(&row) };
        fill(&inputs, &mut control, &[piece, last]).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [5, 6, 4, -1]);
        assert_eq!(words[4..8], [3, 4, 9, -1]);
        assert_eq!(words[8..12], [0, 0, 1, 0]);
        assert_eq!(words[12..14], [2, -1]);
        assert_eq!(choice_rows(&inputs, &[piece, last]).collect::<Vec<_>>(), [0]);
        let every = StepInputs { rows: None, ..inputs };
        assert_eq!(choice_rows(&every, &[piece, last]).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn decoded_rows_have_their_buckets_and_mixed_steps_no_more_than_the_square_of_theirs() {
        let row = SamplingRow::new(&crate::SamplingParams::greedy());
        let decode =
            StepRequest { tokens: &[4], start: 9, table: &[2], slots: NO_SLOTS, want: Want::Sample(&row) };
        let piece =
            StepRequest { tokens: &[5; 20], start: 0, table: &[1], slots: NO_SLOTS, want: Want::Nothing };
        let shape = |requests: &[StepRequest<'_>], buckets: &[usize], rows: &[usize]| {
            let StepShape { kind, n_tokens, n_seqs, n_choices } = spec(requests, buckets, rows).shape;
            (kind, [n_tokens, n_seqs, n_choices])
        };
        let (buckets, rows) = ([1, 8, 32], [1, 2, 3, 4, 6]);
        assert_eq!(shape(&[decode; 5], &buckets, &rows), (StepKind::Decode, [6, 6, 6]));
        assert_eq!(shape(&[decode; 5], &[], &[]), (StepKind::Decode, [5, 5, 5]));
        assert_eq!(shape(&[decode], &buckets, &rows), (StepKind::Decode, [1, 1, 1]));
        assert_eq!(shape(&[decode, piece, decode], &buckets, &rows), (StepKind::Mixed, [32, 8, 8]));
        assert_eq!(shape(&[decode, piece, decode], &[], &[]), (StepKind::Mixed, [32, 3, 2]));
        assert_eq!(shape(&[piece, piece], &[], &[]), (StepKind::Mixed, [48, 2, 0]));
        assert_eq!(spec(&[piece, piece], &[], &[]).head, Head::None);
    }
}
