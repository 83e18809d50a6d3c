//! Sampling with the same choice as the reference implementation, but without sorting the whole vocabulary.

use crate::simd::{self, Level};
use refrain_graph::SampleParam;
use refrain_reference::{Sampling, apply_bias_and_penalties, uniform};

/// Scratch for one row, reused so that sampling does not allocate.
#[derive(Default)]
pub(crate) struct Candidates {
    logits: Vec<f32>,
    exps: Vec<f32>,
    maxima: Vec<f32>,
    sorted_maxima: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f64>,
}

/// Returns the token that [`refrain_reference::sample_row`] chooses, and its log-probability to about 1e-5.
pub fn sample_row(level: Level, logits: &[f32], sampling: &Sampling<'_>) -> (usize, f32) {
    choose(level, logits, sampling, &mut Candidates::default())
}

/// Works on a copy of the logits, which may also be an output of the graph.
pub(crate) fn choose(
    level: Level,
    logits: &[f32],
    sampling: &Sampling<'_>,
    room: &mut Candidates,
) -> (usize, f32) {
    room.load(logits);
    apply_bias_and_penalties(&mut room.logits, sampling);
    for l in room.logits.iter_mut().filter(|l| l.is_nan()) {
        *l = f32::INFINITY;
    }
    let best = simd::argmax(level, &room.logits);
    let max = room.logits.get(best).copied().unwrap_or(f32::NEG_INFINITY);
    let param = |p: SampleParam| sampling.params[p as usize];
    let temperature = param(SampleParam::Temperature);
    let greedy = temperature.is_nan() || temperature <= 0.0;
    // If the maximum is infinite or there are no logits, no distribution exists.
    if !max.is_finite() {
        return (best, f32::NAN);
    }
    let log_sum = room.log_sum_exp(level, max);
    let logprob = |logit: f32| logit - max - log_sum;
    if greedy {
        return (best, logprob(max));
    }
    let keep = room.keep(level, max, sampling);
    let Candidates { logits, ids, weights, .. } = room;
    let ids = &ids[..keep];
    weights.clear();
    weights.extend(ids.iter().map(|&id| {
        let below = f64::from(logits[id as usize]) - f64::from(max);
        (below / f64::from(temperature)).exp()
    }));
    let target = f64::from(uniform(sampling.seed, sampling.position)) * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let chosen = ids.iter().zip(&*weights).find(|(_, w)| {
        sum += **w;
        sum > target
    });
    // Rounding can leave the target slightly above the last sum.
    let id = chosen.map_or(ids[ids.len() - 1], |(&id, _)| id) as usize;
    (id, logprob(logits[id]))
}

/// Number of elements per entry of `maxima`.
const CHUNK: usize = 256;

impl Candidates {
    fn load(&mut self, logits: &[f32]) {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        // The number of candidates varies between tokens; reserve the maximum once.
        self.ids.clear();
        self.ids.reserve(logits.len());
        self.weights.clear();
        self.weights.reserve(logits.len());
    }

    /// Logarithm of the sum of `e^(logit - max)`.
    fn log_sum_exp(&mut self, level: Level, max: f32) -> f32 {
        self.exps.clear();
        self.exps.extend(self.logits.iter().map(|l| l - max));
        simd::exp_inplace(level, &mut self.exps);
        simd::sum(level, &self.exps).ln()
    }

    /// Leaves the candidates in `ids`, most probable first, and returns how many the filters keep.
    fn keep(&mut self, level: Level, max: f32, sampling: &Sampling<'_>) -> usize {
        let param = |p: SampleParam| sampling.params[p as usize];
        let (top_k, top_p) = (param(SampleParam::TopK) as usize, param(SampleParam::TopP));
        let (min_p, vocab) = (param(SampleParam::MinP), self.logits.len());
        let unfiltered = top_k == 0 && top_p >= 1.0 && min_p <= 0.0;
        // Sorts prefixes of increasing length, until one contains every token that the filters keep.
        let mut n_sorted = match top_k {
            _ if unfiltered => vocab,
            0 => 64.min(vocab),
            k => k.min(vocab),
        };
        loop {
            self.sort_top(level, n_sorted);
            let weight = |id: u32| (f64::from(self.logits[id as usize]) - f64::from(max)).exp();
            let among = match (top_k, top_p < 1.0) {
                (_, false) => 1.0,
                // Adds in the order of ids, like the reference.
                (0, true) => self.logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum(),
                (_, true) => self.ids.iter().map(|&id| weight(id)).sum(),
            };
            let whole = top_k > 0 || n_sorted == vocab;
            if let Some(keep) = kept(&self.ids, weight, among, top_p, min_p, whole) {
                return keep;
            }
            n_sorted = (n_sorted * 8).min(vocab);
        }
    }

    /// Puts the ids of the `n` largest logits into `ids`, sorted; ties go to the smaller id.
    fn sort_top(&mut self, level: Level, n: usize) {
        let Candidates { logits, maxima, sorted_maxima, ids, .. } = self;
        let by_rank = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        ids.clear();
        maxima.clear();
        maxima.extend(logits.chunks(CHUNK).map(|c| simd::max(level, c)));
        if maxima.len() > n {
            // Each chunk's maximum is one of the logits, so the n-th largest maximum is at most the n-th
            // largest logit: no logit below it can be among the top n.
            sorted_maxima.clear();
            sorted_maxima.extend_from_slice(maxima);
            let (_, least, _) = sorted_maxima.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a));
            let least = *least;
            for (chunk, _) in maxima.iter().enumerate().filter(|(_, m)| **m >= least) {
                let first = chunk * CHUNK;
                let some = &logits[first..logits.len().min(first + CHUNK)];
                let above = some.iter().enumerate().filter(|(_, l)| **l >= least);
                ids.extend(above.map(|(i, _)| (first + i) as u32));
            }
        } else {
            ids.extend(0..logits.len() as u32);
        }
        if ids.len() > n {
            ids.select_nth_unstable_by(n - 1, by_rank);
            ids.truncate(n);
        }
        ids.sort_unstable_by(by_rank);
    }
}

/// Number of sorted candidates that top-p and min-p keep; `None` if more candidates are needed to decide.
fn kept(
    sorted: &[u32],
    weight: impl Fn(u32) -> f64,
    total: f64,
    top_p: f32,
    min_p: f32,
    whole: bool,
) -> Option<usize> {
    let mut sum = 0.0;
    let mut reached = || {
        sorted.iter().position(|&id| {
            sum += weight(id);
            sum >= f64::from(top_p) * total
        })
    };
    let by_top_p = if top_p < 1.0 { reached().map(|i| i + 1) } else { None };
    let by_min_p = if min_p > 0.0 {
        let n = sorted.partition_point(|&id| weight(id) >= f64::from(min_p)).max(1);
        Some(n).filter(|&n| n < sorted.len())
    } else {
        None
    };
    match (by_top_p, by_min_p) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (Some(a), None) | (None, Some(a)) => Some(a),
        (None, None) => whole.then_some(sorted.len()),
    }
}
