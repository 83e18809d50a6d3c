//! How well a model predicts a text.

use std::sync::{Mutex, PoisonError};

use crate::core::check_tokens;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::request::Sequence;

/// How a text is cut up.
#[derive(Clone, Copy, Debug)]
pub struct PerplexityOptions {
    /// Tokens in a window.
    pub window: usize,
    /// The most windows to score; all when `None`.
    pub max_windows: Option<usize>,
    /// The token put in the place of each window's first, where the model begins texts with one.
    pub bos: Option<u32>,
}

/// The result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// `e` to the mean negative logarithm of the probabilities.
    pub perplexity: f64,
    /// Tokens that were scored.
    pub n_scored: usize,
    /// Windows that were scored.
    pub n_windows: usize,
}

/// With fewer tokens nothing is left to score behind the first half of a window.
pub(crate) const MIN_WINDOW: usize = 3;

/// Scores the second half of each window of a text.
///
/// Each window is evaluated on its own, in `sequence`, which forgets what it holds; its first half gives the model
/// something to go on. `progress` hears the result so far after each window.
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
    // Also the last token of a window, which is scored but not evaluated.
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
        // The last token predicts nothing that is in the window.
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

/// Of each row the logarithm of its token's probability. A row of a large vocabulary takes longer here than the model takes
/// for it on a card, so many of them are shared among threads; what comes out does not depend on how many there are.
fn log_probabilities(rows: &[f32], vocab: usize, tokens: &[u32]) -> Vec<f64> {
    const WORTH_A_THREAD: usize = 1 << 20;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let n_threads = (rows.len() / WORTH_A_THREAD).clamp(1, cores);
    let mut out = vec![0.0; tokens.len()];
    let work = Mutex::new(out.iter_mut().zip(tokens).zip(rows.chunks_exact(vocab)));
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    let score = || {
        while let Some(((out, token), row)) = next() {
            *out = log_probability(row, *token as usize);
        }
    };
    std::thread::scope(|scope| {
        // A thread that cannot be had leaves its rows to the others, this one among them.
        for _ in 1..n_threads {
            if std::thread::Builder::new().spawn_scoped(scope, score).is_err() {
                break;
            }
        }
        score();
    });
    out
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
    fn many_rows_are_scored_as_each_by_itself() {
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
