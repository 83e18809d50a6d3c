//! Two models compared on a text: how far the second one's predictions are from the first one's.

use crate::core::check_tokens;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::perplexity::{MIN_WINDOW, PerplexityOptions, in_parallel};
use crate::request::Sequence;

/// What two models say about a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Perplexity of each.
    pub perplexity: [f64; 2],
    /// Mean Kullback-Leibler divergence of the second model's next-token distribution from the first one's, in nats.
    pub mean_kl: f64,
    /// 99 of 100 tokens have at most this divergence.
    pub p99_kl: f64,
    /// The largest divergence.
    pub worst_kl: f64,
    /// Index of its token in the text.
    pub worst_token: usize,
    /// Share of tokens for which both models find the same token most probable.
    pub same_top: f64,
    /// Tokens that were scored.
    pub n_scored: usize,
    /// Windows that were scored.
    pub n_windows: usize,
}

/// One model in a comparison: an engine, and a sequence whose content is cleared.
pub type Compared<'a> = (&'a Engine, &'a Sequence);

/// Compares two models on the second half of each window of a text, as [`crate::perplexity`] scores one.
pub fn compare(
    [first, second]: [Compared<'_>; 2],
    tokens: &[u32],
    options: PerplexityOptions,
    mut progress: impl FnMut(usize, &Comparison),
) -> Result<Comparison, EngineError> {
    let window = options.window;
    let context = first.1.context().min(second.1.context());
    if window < MIN_WINDOW || window > context {
        return Err(EngineError::Window { window, context });
    }
    if tokens.len() < window {
        return Err(EngineError::TextTooShort { n_tokens: tokens.len(), window });
    }
    let n_vocab = first.0.model().config().n_vocab;
    let other = second.0.model().config().n_vocab;
    if n_vocab != other {
        return Err(EngineError::Vocabularies { first: n_vocab, second: other });
    }
    let n_windows = (tokens.len() / window).min(options.max_windows.unwrap_or(usize::MAX));
    check_tokens(first.0.model(), &tokens[..n_windows * window])?;
    check_tokens(first.0.model(), options.bos.as_slice())?;
    let chunk = first.0.max_tokens().min(second.0.max_tokens());
    let mut scores = Scores::default();
    let (mut rows, mut other_rows) = (Vec::new(), Vec::new());
    for (idx, text) in tokens.chunks_exact(window).take(n_windows).enumerate() {
        let mut text = text.to_vec();
        if let Some(bos) = options.bos {
            text[0] = bos;
        }
        for (_, sequence) in [first, second] {
            sequence.clear()?;
        }
        let mut at = 0;
        // The last token predicts nothing inside the window.
        while at < window - 1 {
            let end = (at + chunk).min(window - 1);
            let n_rows = end.saturating_sub((window / 2).max(at));
            first.0.logits(first.1, &text[at..end], n_rows, &mut rows)?;
            second.0.logits(second.1, &text[at..end], n_rows, &mut other_rows)?;
            let next = &text[end - n_rows + 1..=end];
            let scored = score(&rows, &other_rows, n_vocab, next);
            if let Some(bad) = scored.iter().position(|s| !s.is_finite()) {
                let is_first = !scored[bad].log_probabilities[0].is_finite();
                let engine = if is_first { first.0 } else { second.0 };
                let position = end - n_rows + bad;
                return Err(EngineError::NonFinite { position, kv_dtype: engine.kv_dtype() });
            }
            scores.add(&scored, idx * window + end - n_rows + 1);
            at = end;
        }
        scores.n_windows = idx + 1;
        progress(n_windows, &scores.so_far());
    }
    for (_, sequence) in [first, second] {
        sequence.clear()?;
    }
    Ok(scores.so_far())
}

/// What both models say about one token.
#[derive(Clone, Copy, Debug, Default)]
struct TokenScore {
    log_probabilities: [f64; 2],
    kl: f64,
    same_top: bool,
}

impl TokenScore {
    fn is_finite(&self) -> bool {
        self.kl.is_finite() && self.log_probabilities.iter().all(|p| p.is_finite())
    }
}

#[derive(Debug, Default)]
struct Scores {
    sums: [f64; 2],
    divergences: Vec<f32>,
    sum_kl: f64,
    worst: (f64, usize),
    n_same: usize,
    n_windows: usize,
}

impl Scores {
    fn add(&mut self, scored: &[TokenScore], first_token: usize) {
        for (i, score) in scored.iter().enumerate() {
            for (sum, p) in self.sums.iter_mut().zip(score.log_probabilities) {
                *sum -= p;
            }
            self.sum_kl += score.kl;
            self.divergences.push(score.kl as f32);
            if score.kl > self.worst.0 || self.divergences.len() == 1 {
                self.worst = (score.kl, first_token + i);
            }
            self.n_same += usize::from(score.same_top);
        }
    }

    fn so_far(&self) -> Comparison {
        let n = self.divergences.len();
        let mean = |sum: f64| sum / n as f64;
        let mut sorted = self.divergences.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let p99 = sorted.get((n * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(f32::NAN);
        Comparison {
            perplexity: self.sums.map(|sum| mean(sum).exp()),
            mean_kl: mean(self.sum_kl),
            p99_kl: p99.into(),
            worst_kl: self.worst.0,
            worst_token: self.worst.1,
            same_top: mean(self.n_same as f64),
            n_scored: n,
            n_windows: self.n_windows,
        }
    }
}

fn score(rows: &[f32], others: &[f32], n_vocab: usize, next: &[u32]) -> Vec<TokenScore> {
    let mut out = vec![TokenScore::default(); next.len()];
    let pairs = rows.chunks_exact(n_vocab).zip(others.chunks_exact(n_vocab));
    let work = out.iter_mut().zip(next).zip(pairs);
    in_parallel(rows.len(), work, |((out, token), (row, other))| {
        *out = score_one(row, other, *token as usize);
    });
    out
}

fn score_one(row: &[f32], other: &[f32], token: usize) -> TokenScore {
    let (top, log_sum) = top_and_log_sum(row);
    let (other_top, other_log_sum) = top_and_log_sum(other);
    let kl: f64 = row
        .iter()
        .zip(other)
        .map(|(&a, &b)| {
            let p = f64::from(a) - log_sum;
            p.exp() * (p - (f64::from(b) - other_log_sum))
        })
        .sum();
    TokenScore {
        log_probabilities: [f64::from(row[token]) - log_sum, f64::from(other[token]) - other_log_sum],
        // Rounding can make the divergence of two equal rows slightly negative.
        kl: if kl < 0.0 { 0.0 } else { kl },
        same_top: top == other_top,
    }
}

fn top_and_log_sum(row: &[f32]) -> (usize, f64) {
    let mut top = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[top] {
            top = i;
        }
    }
    let max = f64::from(row[top]);
    (top, max + row.iter().map(|&v| (f64::from(v) - max).exp()).sum::<f64>().ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_definition() {
        // Distributions 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2.
        let row = [2f32.ln(), 0.0, 0.0];
        let other = [0.0, 0.0, 2f32.ln()];
        let score = score_one(&row, &other, 0);
        let want = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
        assert!((score.kl - want).abs() < 1e-7, "{}", score.kl);
        assert!((score.log_probabilities[0] - 0.5f64.ln()).abs() < 1e-7);
        assert!(!score.same_top);
        let same = score_one(&row, &row, 1);
        assert_eq!((same.kl, same.same_top), (0.0, true));
        assert!(!score_one(&row, &[f32::NAN, 0.0, 0.0], 1).is_finite());
    }

    #[test]
    fn percentile_and_worst_are_those_of_all_tokens() {
        let mut scores = Scores::default();
        let of = |kl: f64| TokenScore { kl, same_top: kl < 0.5, ..TokenScore::default() };
        let all: Vec<TokenScore> = (0..200).map(|i| of(f64::from(i) / 100.0)).collect();
        scores.add(&all[..100], 1000);
        scores.add(&all[100..], 2000);
        let so_far = scores.so_far();
        assert_eq!((so_far.worst_kl, so_far.worst_token, so_far.n_scored), (1.99, 2099, 200));
        assert!((so_far.p99_kl - 1.97).abs() < 1e-6 && (so_far.same_top - 0.25).abs() < 1e-12);
        assert!((so_far.mean_kl - 0.995).abs() < 1e-9);
    }
}
