//! How well a model predicts a text.

use crate::error::EngineError;
use crate::session::Engine;

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
/// Each window is evaluated on its own; its first half gives the model something to go on. `progress` hears the
/// result so far after each window.
pub fn perplexity(
    engine: &mut Engine,
    tokens: &[u32],
    options: PerplexityOptions,
    mut progress: impl FnMut(usize, Perplexity),
) -> Result<Perplexity, EngineError> {
    let window = options.window;
    if window < MIN_WINDOW || window > engine.context() {
        return Err(EngineError::Window { window, context: engine.context() });
    }
    if tokens.len() < window {
        return Err(EngineError::TextTooShort { n_tokens: tokens.len(), window });
    }
    let n_windows = (tokens.len() / window).min(options.max_windows.unwrap_or(usize::MAX));
    // Also the last token of a window, which is scored but not evaluated.
    engine.check_tokens(&tokens[..n_windows * window])?;
    engine.check_tokens(options.bos.as_slice())?;
    let vocab = engine.model().config().n_vocab;
    let first = window / 2;
    let mut sum = 0.0;
    let mut so_far = Perplexity { perplexity: f64::NAN, n_scored: 0, n_windows: 0 };
    for (idx, text) in tokens.chunks_exact(window).take(n_windows).enumerate() {
        let mut text = text.to_vec();
        if let Some(bos) = options.bos {
            text[0] = bos;
        }
        let mut session = engine.open();
        let mut at = 0;
        // The last token predicts nothing that is in the window.
        while at < window - 1 {
            let end = (at + engine.max_tokens()).min(window - 1);
            let n_rows = end.saturating_sub(first.max(at));
            let rows = engine.logits(&mut session, &text[at..end], n_rows)?;
            for (i, row) in rows.chunks_exact(vocab).enumerate() {
                let next = text[end - n_rows + i + 1];
                sum -= log_probability(row, next as usize);
                so_far.n_scored += 1;
            }
            at = end;
        }
        so_far.n_windows = idx + 1;
        so_far.perplexity = (sum / so_far.n_scored as f64).exp();
        progress(n_windows, so_far);
    }
    Ok(so_far)
}

fn log_probability(logits: &[f32], token: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
    f64::from(logits[token]) - f64::from(max) - total.ln()
}
