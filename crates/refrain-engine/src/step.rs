//! Shape and control block of a step.

use crate::error::EngineError;
use crate::request::AdapterId;
use crate::runner::RunShape;
use crate::sampling::{HISTORY, MAX_BIAS, MAX_TOP, SamplingRow};
use refrain_graph::{ControlBlock, Filler, SamplingInputs, StepInputs, StepKind, StepShape};
use refrain_models::{Head, SampleHead, StepSpec};
use refrain_tensor::DType;

/// Output to compute from a sequence's tokens, besides filling the cache.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// Nothing: a prompt chunk that is not the last.
    Nothing,
    /// The logits of the last `n_rows` tokens. Such a step has a single sequence.
    Logits {
        /// Number of rows, counted from the end.
        n_rows: usize,
    },
    /// A choice of the next token.
    Sample(&'a SamplingRow),
    /// A choice after each of the tokens: the first is the sequence's newest one, the others are guesses.
    Verify(&'a [SamplingRow]),
}

/// Tokens of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct StepRequest<'a> {
    /// The tokens, in order.
    pub tokens: &'a [u32],
    /// Position of the first token.
    pub start: usize,
    /// The sequence's KV blocks, in order of position. Leading entries are out of range if the attention window has left
    /// their blocks.
    pub table: &'a [u32],
    /// Its slots in recurrent states, in the format of [`refrain_graph::Recurrent`]; negative if it has none.
    pub slots: [i32; 2],
    /// Its adapter, if it has one.
    pub adapter: Option<AdapterId>,
    /// Requested output.
    pub want: Want<'a>,
}

impl StepRequest<'_> {
    /// Its adapter as steps take it.
    fn adapter(&self) -> i32 {
        self.adapter.map_or(-1, |AdapterId(id)| id as i32)
    }

    pub(crate) fn chooses(&self) -> bool {
        !self.sampled().is_empty()
    }

    /// How tokens are chosen after its last rows.
    pub(crate) fn sampled(&self) -> &[SamplingRow] {
        match self.want {
            Want::Nothing | Want::Logits { .. } => &[],
            Want::Sample(row) => std::slice::from_ref(row),
            Want::Verify(rows) => rows,
        }
    }

    /// Position of the last token.
    pub(crate) fn last_position(&self) -> usize {
        self.start + self.tokens.len().saturating_sub(1)
    }
}

/// Kind of a step over these requests.
pub fn step_kind(requests: &[StepRequest<'_>]) -> StepKind {
    match requests {
        _ if requests.iter().any(|r| matches!(r.want, Want::Verify(_))) => StepKind::Verify,
        _ if requests.iter().all(|r| r.tokens.len() == 1 && r.chooses()) => StepKind::Decode,
        [_] => StepKind::Prompt,
        _ => StepKind::Mixed,
    }
}

/// Returns the smallest bucket that holds `n_tokens`, or `n_tokens` itself if it exceeds all buckets.
pub(crate) fn bucket(buckets: &[usize], n_tokens: usize) -> usize {
    buckets.iter().copied().find(|&b| b >= n_tokens).unwrap_or(n_tokens)
}

pub(crate) fn sample_head(n_history: usize, n_top: usize, masked: bool) -> Head {
    // One list of top tokens serves all rows that need one.
    let n_top = if n_top > 0 { MAX_TOP } else { 0 };
    let n_history = history_capacity(n_history);
    Head::Sample(SampleHead { n_history, n_bias: MAX_BIAS, masked, n_top })
}

/// Capacity of a history of `n_tokens` tokens, rounded up to a few sizes so that few plans are needed.
pub(crate) fn history_capacity(n_tokens: usize) -> usize {
    let mut places = HISTORY;
    while places < n_tokens {
        places = places.saturating_mul(4);
    }
    places
}

/// Mixed steps are padded to multiples of this if the backend has no buckets: few sizes, little padding.
const MIXED_GRAIN: usize = 16;

/// Rows of a verify step over `n_tokens` tokens. The number of guesses varies from step to step, so a backend with
/// buckets gets powers of two only.
pub(crate) fn verify_rows(n_tokens: usize, row_buckets: &[usize]) -> usize {
    match row_buckets.last() {
        Some(&most) => n_tokens.next_power_of_two().min(most).max(n_tokens),
        None => n_tokens,
    }
}

/// Specification of the step for these requests, padded to the backend's buckets.
///
/// Decode steps have buckets of their own. Mixed steps of a backend with buckets use those for both tokens
/// and sequences, which bounds their number by the square of the number of buckets.
pub(crate) fn spec(requests: &[StepRequest<'_>], buckets: &[usize], row_buckets: &[usize]) -> StepSpec {
    let n_tokens = requests.iter().map(|r| r.tokens.len()).sum();
    let choosing = |of: fn(&SamplingRow) -> usize| {
        requests.iter().flat_map(StepRequest::sampled).map(of).max().unwrap_or(0)
    };
    let is_masked = choosing(|row| usize::from(row.is_masked())) > 0;
    let head = sample_head(choosing(|row| row.history.len()), choosing(|row| row.n_top), is_masked);
    let kind = step_kind(requests);
    let shape = match requests {
        _ if kind == StepKind::Verify => {
            let n = verify_rows(n_tokens, row_buckets);
            StepShape { kind, n_tokens: n, n_seqs: if requests.len() == 1 { 1 } else { n }, n_choices: n }
        }
        [one] => {
            let (n_choices, head) = match one.want {
                Want::Nothing => (0, Head::None),
                Want::Logits { n_rows } => (n_rows, Head::Logits),
                Want::Sample(_) => (1, head),
                Want::Verify(_) => unreachable!("a verify step has its own shape"),
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

/// Specification of the steps of a run of several rows.
pub(crate) fn decode_spec(shape: RunShape) -> StepSpec {
    let n_rows = shape.n_rows;
    let head = run_head(shape);
    let shape = StepShape { kind: StepKind::Decode, n_tokens: n_rows, n_seqs: n_rows, n_choices: n_rows };
    StepSpec { shape, head, act: DType::F32 }
}

/// Choices of the steps of a run.
pub(crate) fn run_head(RunShape { n_history, is_masked, has_top, .. }: RunShape) -> Head {
    sample_head(n_history, usize::from(has_top), is_masked)
}

/// Row of the step's choices for the first choice of each request that chooses, in order. If every row of the step
/// has a choice, it is the row of the first token that is followed by one.
pub(crate) fn choice_rows<'a>(
    inputs: &'a StepInputs,
    requests: &'a [StepRequest<'_>],
) -> impl Iterator<Item = usize> + 'a {
    let ends = requests.iter().scan((0, 0), |(end, n_choices), request| {
        *end += request.tokens.len();
        *n_choices += request.sampled().len();
        Some((request.sampled().len(), *end, *n_choices))
    });
    let choosing = ends.filter(|(n, ..)| *n > 0);
    choosing.map(|(n, end, n_choices)| if inputs.rows.is_some() { n_choices - n } else { end - n })
}

/// Fills the control block with the requests, one per sequence.
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
    // Padding rows name an existing sequence, but have no position in it.
    filler.padded(inputs.seqs, seqs.chain(std::iter::repeat_n(0, inputs.shape.n_tokens)))?;
    if let Some(tables) = inputs.tables {
        filler.padded_rows(tables, requests.iter().map(|r| r.table))?;
    }
    if let Some(slots) = inputs.slots {
        filler.padded(slots, requests.iter().flat_map(|r| r.slots))?;
    }
    if let Some(adapters) = inputs.adapters {
        filler.padded(adapters, requests.iter().map(StepRequest::adapter))?;
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
                Want::Verify(rows) => rows.len(),
            };
            (end - n_rows..end).map(|row| row as i32)
        });
        filler.padded(rows, wanted)?;
    }
    if let Some(sampling) = &inputs.sampling {
        let choosing = requests.iter().filter(|r| r.chooses());
        for (first, request) in choice_rows(inputs, requests).zip(choosing) {
            for (at, row) in (first..).zip(request.sampled()) {
                fill_sampling(&mut filler, sampling, at, row)?;
            }
        }
    }
    Ok(())
}

/// Fills one row of a decode step with a single-token request; the other rows stay unchanged.
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
    if let Some(adapters) = inputs.adapters {
        filler.row(adapters, row, &[request.adapter()])?;
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
    match sampling.mask {
        // A row without a mask in a step with masks: -1 sets every bit.
        Some(mask) => filler.padded_row(mask, at, bytemuck::cast_slice(&row.mask))?,
        None => filler,
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::NO_SLOTS;
    use refrain_graph::{GraphBuilder, Plan, PlanOptions, TensorType};

    #[test]
    fn a_step_uses_the_smallest_bucket_that_holds_it_or_its_own_size() {
        let buckets = [1, 8, 32];
        let sizes = [1, 2, 8, 9, 32, 33].map(|n| bucket(&buckets, n));
        assert_eq!(sizes, [1, 8, 8, 32, 32, 33]);
        assert_eq!(bucket(&[], 7), 7);
    }

    #[test]
    fn padding_has_no_token_and_no_position_and_the_rows_are_those_of_the_request() {
        let mut b = GraphBuilder::new(vec![], vec![]);
        let mut input = |name: &str, n: usize| {
            let value = b.input(name, TensorType::new(DType::I32, [n])).unwrap();
            b.input_id(value)
        };
        // Names have no meaning: the purpose of an input is declared.
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
        let request =
            StepRequest { tokens: &[7, 8, 9], start: 20, table: &[0], slots: NO_SLOTS, adapter: None, want };
        fill(&inputs, &mut control, &[request]).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [7, 8, 9, -1]);
        assert_eq!(words[4..8], [20, 21, 22, -1]);
        assert_eq!(words[12..14], [1, 2]);
        // A prompt chunk that is not the last, followed by a decoded token.
        let row = SamplingRow::new(&crate::SamplingParams::greedy());
        let chunk = StepRequest {
            tokens: &[5, 6],
            start: 3,
            table: &[1],
            slots: NO_SLOTS,
            adapter: None,
            want: Want::Nothing,
        };
        let last = StepRequest {
            tokens: &[4],
            start: 9,
            table: &[2],
            slots: NO_SLOTS,
            adapter: None,
            want: Want::Sample(&row),
        };
        fill(&inputs, &mut control, &[chunk, last]).unwrap();
        let words: &[i32] = bytemuck::cast_slice(control.bytes());
        assert_eq!(words[..4], [5, 6, 4, -1]);
        assert_eq!(words[4..8], [3, 4, 9, -1]);
        assert_eq!(words[8..12], [0, 0, 1, 0]);
        assert_eq!(words[12..14], [2, -1]);
        assert_eq!(choice_rows(&inputs, &[chunk, last]).collect::<Vec<_>>(), [0]);
        let every = StepInputs { rows: None, ..inputs };
        assert_eq!(choice_rows(&every, &[chunk, last]).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn decode_steps_use_row_buckets_and_mixed_steps_pairs_of_buckets() {
        let row = SamplingRow::new(&crate::SamplingParams::greedy());
        let decode = StepRequest {
            tokens: &[4],
            start: 9,
            table: &[2],
            slots: NO_SLOTS,
            adapter: None,
            want: Want::Sample(&row),
        };
        let chunk = StepRequest {
            tokens: &[5; 20],
            start: 0,
            table: &[1],
            slots: NO_SLOTS,
            adapter: None,
            want: Want::Nothing,
        };
        let shape = |requests: &[StepRequest<'_>], buckets: &[usize], rows: &[usize]| {
            let StepShape { kind, n_tokens, n_seqs, n_choices } = spec(requests, buckets, rows).shape;
            (kind, [n_tokens, n_seqs, n_choices])
        };
        let (buckets, rows) = ([1, 8, 32], [1, 2, 3, 4, 6]);
        assert_eq!(shape(&[decode; 5], &buckets, &rows), (StepKind::Decode, [6, 6, 6]));
        assert_eq!(shape(&[decode; 5], &[], &[]), (StepKind::Decode, [5, 5, 5]));
        assert_eq!(shape(&[decode], &buckets, &rows), (StepKind::Decode, [1, 1, 1]));
        assert_eq!(shape(&[decode, chunk, decode], &buckets, &rows), (StepKind::Mixed, [32, 8, 8]));
        assert_eq!(shape(&[decode, chunk, decode], &[], &[]), (StepKind::Mixed, [32, 3, 2]));
        assert_eq!(shape(&[chunk, chunk], &[], &[]), (StepKind::Mixed, [48, 2, 0]));
        assert_eq!(spec(&[chunk, chunk], &[], &[]).head, Head::None);
    }
}
