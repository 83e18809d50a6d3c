//! Choosing a token, with the reference's choice and without its full sort.

use refrain_graph::SampleParam;
use refrain_reference::{Sampling, sample_row as reference_row, uniform};

/// Room for the logits and candidates of a row, kept between tokens.
#[derive(Default)]
pub(crate) struct Candidates {
    logits: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f64>,
}

/// The token that [`refrain_reference::sample_row`] chooses, found without sorting the whole vocabulary.
pub fn sample_row(logits: &[f32], sampling: &Sampling<'_>) -> (usize, f32) {
    choose(logits, sampling, &mut Candidates::default())
}

/// Logits may be an output of the graph too, so they are changed in a copy.
pub(crate) fn choose(logits: &[f32], sampling: &Sampling<'_>, room: &mut Candidates) -> (usize, f32) {
    let Candidates { logits: copy, ids, weights } = room;
    copy.clear();
    copy.extend_from_slice(logits);
    let logits = &mut copy[..];
    let param = |p: SampleParam| sampling.params[p as usize];
    let (temperature, top_k) = (param(SampleParam::Temperature), param(SampleParam::TopK) as usize);
    let (top_p, min_p) = (param(SampleParam::TopP), param(SampleParam::MinP));
    let filtered = top_k > 0 || top_p < 1.0 || min_p > 0.0;
    // Without a filter every token is a candidate and the order of all of them counts; greedy needs none.
    let greedy = temperature.is_nan() || temperature <= 0.0;
    if greedy || !filtered {
        return reference_row(logits, sampling);
    }
    refrain_reference::apply_bias_and_penalties(logits, sampling);
    for l in logits.iter_mut().filter(|l| l.is_nan()) {
        *l = f32::NEG_INFINITY;
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |id: u32| (f64::from(logits[id as usize]) - f64::from(max)).exp();
    let total: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
    if !total.is_finite() || total <= 0.0 {
        // Nothing can be weighed: the first of the largest, as the reference does.
        let best = logits.iter().position(|&l| l == max).unwrap_or(0);
        return (best, f32::NAN);
    }
    let logprob = |id: u32| (f64::from(logits[id as usize]) - f64::from(max) - total.ln()) as f32;

    // Sorted prefixes of growing length, until one holds every token that the filters keep.
    let vocab = logits.len();
    let mut n_sorted = if top_k > 0 { top_k.min(vocab) } else { 64.min(vocab) };
    let by_rank = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    ids.clear();
    ids.extend(0..vocab as u32);
    let keep = loop {
        if n_sorted < vocab {
            ids.select_nth_unstable_by(n_sorted - 1, by_rank);
        }
        ids[..n_sorted].sort_unstable_by(by_rank);
        let whole = top_k > 0 || n_sorted == vocab;
        let candidates = &ids[..n_sorted];
        let among = if top_k > 0 { candidates.iter().map(|&id| weight(id)).sum() } else { total };
        if let Some(keep) = kept(candidates, weight, among, top_p, min_p, whole) {
            break keep;
        }
        n_sorted = (n_sorted * 8).min(vocab);
    };
    let ids = &ids[..keep];
    weights.clear();
    weights.extend(
        ids.iter().map(|&id| ((f64::from(logits[id as usize]) - f64::from(max)) / f64::from(temperature)).exp()),
    );
    let target = f64::from(uniform(sampling.seed, sampling.position)) * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    for (&id, w) in ids.iter().zip(&*weights) {
        sum += w;
        if sum > target {
            return (id as usize, logprob(id));
        }
    }
    let last = ids[ids.len() - 1];
    (last as usize, logprob(last))
}

/// How many of the sorted candidates top-p and min-p keep; `None` when candidates beyond these may be kept too.
fn kept(
    sorted: &[u32],
    weight: impl Fn(u32) -> f64,
    total: f64,
    top_p: f32,
    min_p: f32,
    whole: bool,
) -> Option<usize> {
    let mut sum = 0.0;
    let reached = sorted.iter().position(|&id| {
        sum += weight(id);
        sum >= f64::from(top_p) * total
    });
    let by_top_p = match (top_p < 1.0, reached) {
        (true, Some(i)) => Some(i + 1),
        _ => None,
    };
    let by_min_p = match min_p > 0.0 {
        true => Some(sorted.partition_point(|&id| weight(id) >= f64::from(min_p)).max(1)).filter(|&n| n < sorted.len()),
        false => None,
    };
    match (by_top_p, by_min_p) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (Some(a), None) | (None, Some(a)) => Some(a),
        (None, None) => whole.then_some(sorted.len()),
    }
}
