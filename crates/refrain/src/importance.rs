//! Importance matrices: which columns of each weight matter for a text.

use crate::error::Error;
use crate::model::Model;
use crate::session::window_tokens;
use refrain_cpu::CpuBackend;
use refrain_engine::{ObservedWeight, PerplexityOptions, observe};
use refrain_quant::{Imatrix, ImatrixEntry};

/// How an importance matrix is made.
#[derive(Clone, Debug)]
pub struct ImportanceOptions {
    /// Name of the text.
    pub dataset: String,
    /// Tokens per window.
    pub window: usize,
    /// Maximum number of windows.
    pub max_windows: Option<usize>,
    /// Threads.
    pub n_threads: usize,
}

/// Makes an importance matrix on the CPU: evaluates a text, and sums the squares of the activations that each matrix
/// multiplies. `progress` receives the number of windows and how many are done.
pub fn importance(
    model: &Model,
    text: &str,
    options: &ImportanceOptions,
    progress: impl FnMut(usize, usize),
) -> Result<Imatrix, Error> {
    let tokenizer = model.tokenizer();
    let tokens = window_tokens(tokenizer, text, options.window, options.max_windows)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let windows = PerplexityOptions { window: options.window, max_windows: options.max_windows, bos };
    let backend = CpuBackend::shared(options.n_threads)?;
    let weights = model.weights();
    let (observed, n_windows) = observe(backend, weights, &tokens, windows, progress)?;
    let n_windows = u32::try_from(n_windows).unwrap_or(u32::MAX);
    let window = u32::try_from(options.window).unwrap_or(u32::MAX);
    let mut imatrix = Imatrix::new(vec![options.dataset.clone()], n_windows, window);
    for ObservedWeight { weight, sums, counts } in observed {
        let entry = ImatrixEntry {
            sums: sums.into_iter().map(|sum| sum as f32).collect(),
            counts: counts.into_iter().map(|count| count as f32).collect(),
        };
        for name in weights.gguf_names(weight) {
            imatrix.insert(&name, entry.clone());
        }
    }
    Ok(imatrix)
}
