//! Perplexity of a text under a model.

use std::sync::{Mutex, PoisonError};

use crate::core::check_tokens;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::request::Sequence;

/// How a text is split into windows.
#[derive(Clone, Copy, Debug)]
pub struct PerplexityOptions {
    /// Tokens per window.
    pub window: usize,
    /// Maximum number of windows to score; `None` scores all.
    pub max_windows: Option<usize>,
    /// Token that replaces the first one of each window, for models whose texts begin with a BOS token.
    pub bos: Option<u32>,
}

/// Result of a perplexity run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// `e` to the power of the mean negative log-probability.
    pub perplexity: f64,
    /// Tokens that were scored.
    pub n_scored: usize,
    /// Windows that were scored.
    pub n_windows: usize,
}

/// Tokens of the shortest window: a shorter one has no token to score after its first half.
pub const MIN_WINDOW: usize = 3;

/// Scores the second half of each window of a text.
///
/// Each window is evaluated on its own in `sequence`, whose content is cleared first; the first half only
/// provides context. `progress` receives the number of windows and the result so far after each window.
pub fn perplexity(
    engine: &Engine,
    sequence: &Sequence,
    tokens: &[u32],
    options: PerplexityOptions,
    mut progress: impl FnMut(usize, Perplexity),
) -> Result<Perplexity, EngineError> {
    let window = options.window;
    let context = sequence.context();
    if window < MIN_WINDOW || window > context {
        return Err(EngineError::Window { window, context });
    }
    if tokens.len() < window {
        return Err(EngineError::TextTooShort { n_tokens: tokens.len(), window });
    }
    let n_windows = (tokens.len() / window).min(options.max_windows.unwrap_or(usize::MAX));
    // Includes the last token of each window, which is scored but not evaluated.
    check_tokens(engine.model(), &tokens[..n_windows * window])?;
    check_tokens(engine.model(), options.bos.as_slice())?;
    let vocab = engine.model().config().n_vocab;
    let first = window / 2;
    let (mut sum, mut rows) = (0.0, Vec::new());
    let mut so_far = Perplexity { perplexity: f64::NAN, n_scored: 0, n_windows: 0 };
    for (idx, text) in tokens.chunks_exact(window).take(n_windows).enumerate() {
        let mut text = text.to_vec();
        if let Some(bos) = options.bos {
            text[0] = bos;
        }
        sequence.clear()?;
        let mut at = 0;
        // The last token predicts nothing inside the window.
        while at < window - 1 {
            let end = (at + engine.max_tokens()).min(window - 1);
            let n_rows = end.saturating_sub(first.max(at));
            engine.logits(sequence, &text[at..end], n_rows, &mut rows)?;
            let scored = log_probabilities(&rows, vocab, &text[end - n_rows + 1..=end]);
            if let Some(bad) = scored.iter().position(|p| !p.is_finite()) {
                return Err(EngineError::NonFinite {
                    position: end - n_rows + bad,
                    kv_dtype: engine.kv_dtype(),
                });
            }
            sum = scored.iter().fold(sum, |sum, p| sum - p);
            so_far.n_scored += scored.len();
            at = end;
        }
        so_far.n_windows = idx + 1;
        so_far.perplexity = (sum / so_far.n_scored as f64).exp();
        progress(n_windows, so_far);
    }
    sequence.clear()?;
    Ok(so_far)
}

/// Log-probability of each row's token. For a large vocabulary, one row takes longer here than on the GPU, so
/// the rows are distributed over threads; the result does not depend on the number of threads.
fn log_probabilities(rows: &[f32], vocab: usize, tokens: &[u32]) -> Vec<f64> {
    let mut out = vec![0.0; tokens.len()];
    let work = out.iter_mut().zip(tokens).zip(rows.chunks_exact(vocab));
    in_parallel(rows.len(), work, |((out, token), row)| *out = log_probability(row, *token as usize));
    out
}

/// Processes all items, with as many threads as `n_logits` are worth.
pub(crate) fn in_parallel<T>(
    n_logits: usize,
    work: impl Iterator<Item = T> + Send,
    process: impl Fn(T) + Sync,
) {
    const WORTH_A_THREAD: usize = 1 << 20;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let n_threads = (n_logits / WORTH_A_THREAD).clamp(1, cores);
    let work = Mutex::new(work);
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    let score = || {
        while let Some(item) = next() {
            process(item);
        }
    };
    std::thread::scope(|scope| {
        // If a thread cannot be started, the remaining threads, including this one, score its rows.
        for _ in 1..n_threads {
            if std::thread::Builder::new().spawn_scoped(scope, score).is_err() {
                break;
            }
        }
        score();
    });
}

fn log_probability(logits: &[f32], token: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
    f64::from(logits[token]) - f64::from(max) - total.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_scored_in_parallel_match_rows_scored_alone() {
        for (n, vocab) in [(1, 5), (7, 5), (37, 100_003), (64, 40_000)] {
            let rows: Vec<f32> = (0..n * vocab).map(|i| ((i * 7919) % 1013) as f32 * 0.01).collect();
            let tokens: Vec<u32> = (0..n).map(|i| ((i * 31) % vocab) as u32).collect();
            let alone =
                rows.chunks(vocab).zip(&tokens).map(|(row, token)| log_probability(row, *token as usize));
            assert_eq!(log_probabilities(&rows, vocab, &tokens), alone.collect::<Vec<_>>(), "{n} x {vocab}");
        }
        assert!(log_probabilities(&[], 5, &[]).is_empty());
    }
}
