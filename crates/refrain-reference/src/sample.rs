//! Sampling: bias, penalties, top-k, top-p, min-p, temperature, and one uniform number.

use crate::dense::{In, Out, ReferenceError};
use crate::philox::uniform;
use refrain_graph::{SAMPLE_PARAMS, Sample, SampleParam};

/// Sampling parameters of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling<'a> {
    /// One row of `params`, indexed by [`SampleParam`].
    pub params: &'a [f32],
    /// Tokens that penalties apply to; negative slots are empty.
    pub history: &'a [i32],
    /// Tokens with a logit bias; negative slots are empty.
    pub bias_ids: &'a [i32],
    /// Bias per token in `bias_ids`.
    pub bias: &'a [f32],
    /// Random seed.
    pub seed: u64,
    /// Position of the sampled token.
    pub position: u32,
}

impl Sampling<'_> {
    fn param(&self, param: SampleParam) -> f32 {
        self.params[param as usize]
    }
}

pub(crate) fn sample(op: Sample, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    let vocab = inputs[0].dim(1);
    let (logits, params) = (inputs[0].to_f32()?, inputs[1].to_f32()?);
    let (rng, history) = (inputs[2].to_u32()?, inputs[3].to_i32()?);
    let (bias_ids, bias) = (inputs[4].to_i32()?, inputs[5].to_f32()?);
    let (width, n_bias) = (inputs[3].dim(1), inputs[4].dim(1));
    let mask = if op.masked { inputs[6].to_u32()? } else { Vec::new() };
    let (chosen, top) = outputs.split_at_mut(2);
    let [tokens, logprobs] = chosen else { unreachable!("sample has two outputs or four") };
    for row in 0..inputs[0].dim(0) {
        let mut logits = logits[row * vocab..][..vocab].to_vec();
        if op.masked {
            apply_mask(&mut logits, &mask[row * vocab.div_ceil(32)..][..vocab.div_ceil(32)]);
        }
        let sampling = Sampling {
            params: &params[row * SAMPLE_PARAMS..][..SAMPLE_PARAMS],
            history: &history[row * width..][..width],
            bias_ids: &bias_ids[row * n_bias..][..n_bias],
            bias: &bias[row * n_bias..][..n_bias],
            seed: u64::from(rng[row * 4]) | u64::from(rng[row * 4 + 1]) << 32,
            position: rng[row * 4 + 2],
        };
        let (token, logprob) = sample_row(&mut logits, &sampling);
        tokens.bytes[row * 4..][..4].copy_from_slice(&(token as i32).to_le_bytes());
        logprobs.bytes[row * 4..][..4].copy_from_slice(&logprob.to_le_bytes());
        if let [ids, probabilities] = top {
            for (i, (id, p)) in most_probable(&logits, op.n_top).into_iter().enumerate() {
                let at = 4 * (row * op.n_top + i);
                ids.bytes[at..][..4].copy_from_slice(&(id as i32).to_le_bytes());
                probabilities.bytes[at..][..4].copy_from_slice(&p.to_le_bytes());
            }
        }
    }
    Ok(())
}

/// Forbids tokens whose bit is 0, before biases and penalties.
pub fn apply_mask(logits: &mut [f32], mask: &[u32]) {
    for (id, l) in logits.iter_mut().enumerate() {
        // NaN is kept, so that it is reported whatever the mask.
        if mask[id / 32] >> (id % 32) & 1 == 0 && !l.is_nan() {
            *l = f32::NEG_INFINITY;
        }
    }
}

/// Returns the `n` most probable tokens with their log-probabilities, best first; NaN if the row has no
/// probabilities.
pub fn most_probable(logits: &[f32], n: usize) -> Vec<(usize, f32)> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let max = logits[ids[0]];
    let total: f64 = logits.iter().map(|&l| weight(l, max)).sum();
    let logprob = |id: usize| (f64::from(logits[id]) - f64::from(max) - total.ln()) as f32;
    ids.into_iter().take(n).map(|id| (id, if total.is_finite() { logprob(id) } else { f32::NAN })).collect()
}

/// Samples a token, and returns it with its log-probability under the model (after bias and penalties, at
/// temperature 1).
///
/// Bias and penalties modify `logits`. All ties resolve to the smaller id. NaN counts as +inf: a row with
/// either has no probabilities, and its log-probability is NaN.
pub fn sample_row(logits: &mut [f32], sampling: &Sampling<'_>) -> (usize, f32) {
    apply_bias_and_penalties(logits, sampling);
    for l in logits.iter_mut().filter(|l| l.is_nan()) {
        *l = f32::INFINITY;
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| weight(l, max)).sum();
    let logprob = |id: usize| (f64::from(logits[id]) - f64::from(max) - total.ln()) as f32;

    let temperature = sampling.param(SampleParam::Temperature);
    let best = logits.iter().position(|&l| l == max).unwrap_or(0);
    if temperature.is_nan() || temperature <= 0.0 || !total.is_finite() || total <= 0.0 {
        return (best, if total.is_finite() && total > 0.0 { logprob(best) } else { f32::NAN });
    }

    // Candidates by decreasing probability.
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let top_k = sampling.param(SampleParam::TopK) as usize;
    let mut candidates_total = total;
    if top_k > 0 {
        ids.truncate(top_k);
        candidates_total = ids.iter().map(|&id| weight(logits[id], max)).sum();
    }
    keep_top_p(&mut ids, logits, max, candidates_total, sampling.param(SampleParam::TopP));
    let min_p = sampling.param(SampleParam::MinP);
    if min_p > 0.0 {
        let keep = ids.partition_point(|&id| weight(logits[id], max) >= f64::from(min_p));
        ids.truncate(keep.max(1));
    }

    let weights: Vec<f64> = ids
        .iter()
        .map(|&id| ((f64::from(logits[id]) - f64::from(max)) / f64::from(temperature)).exp())
        .collect();
    let target = f64::from(uniform(sampling.seed, sampling.position)) * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    for (&id, w) in ids.iter().zip(&weights) {
        sum += w;
        if sum > target {
            return (id, logprob(id));
        }
    }
    // Rounding can leave the target slightly above the last partial sum.
    let last = ids[ids.len() - 1];
    (last, logprob(last))
}

/// Probability relative to that of the most probable token.
fn weight(logit: f32, max: f32) -> f64 {
    (f64::from(logit) - f64::from(max)).exp()
}

/// Keeps the shortest prefix of candidates whose weights reach `top_p` of the candidates' `total`.
///
/// The rounding of the total is part of the definition: over the whole vocabulary it is summed by id, after
/// top-k by decreasing probability. Every backend sums in this order and therefore keeps the same candidates.
fn keep_top_p(ids: &mut Vec<usize>, logits: &[f32], max: f32, total: f64, top_p: f32) {
    if top_p >= 1.0 {
        return;
    }
    let mut sum = 0.0;
    let reached = ids.iter().position(|&id| {
        sum += weight(logits[id], max);
        sum >= f64::from(top_p) * total
    });
    ids.truncate(reached.map_or(ids.len(), |i| i + 1).max(1));
}

/// Adds the biases to the logits, then penalises recent tokens.
pub fn apply_bias_and_penalties(logits: &mut [f32], sampling: &Sampling<'_>) {
    let vocab = logits.len();
    let index = |id: i32| usize::try_from(id).ok().filter(|&i| i < vocab);
    for (&id, &bias) in sampling.bias_ids.iter().zip(sampling.bias) {
        if let Some(id) = index(id) {
            logits[id] += bias;
        }
    }
    let repeat = sampling.param(SampleParam::RepeatPenalty);
    let frequency = sampling.param(SampleParam::FrequencyPenalty);
    let presence = sampling.param(SampleParam::PresencePenalty);
    if repeat == 1.0 && frequency == 0.0 && presence == 0.0 {
        return;
    }
    for (i, &token) in sampling.history.iter().enumerate() {
        let Some(id) = index(token) else { continue };
        if sampling.history[..i].contains(&token) {
            continue;
        }
        let count = sampling.history.iter().filter(|&&t| t == token).count() as f32;
        let l = &mut logits[id];
        *l = if *l > 0.0 { *l / repeat } else { *l * repeat };
        *l -= count * frequency + presence;
    }
}
