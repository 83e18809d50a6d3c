//! Perplexity, with a runner that gives every token the same probability.

mod common;

use common::{VOCAB, engine};
use refrain_engine::{EngineError, PerplexityOptions, perplexity};
use refrain_graph::RunError;

fn options(window: usize) -> PerplexityOptions {
    PerplexityOptions { window, max_windows: None, bos: None }
}

#[test]
fn equal_probabilities_have_the_perplexity_of_the_vocabulary_for_any_chunking() {
    let text: Vec<u32> = (0..50).collect();
    for (window, max_tokens) in [(3, 1), (16, 16), (16, 5), (15, 7), (16, 100)] {
        let (engine, script) = engine(16, max_tokens);
        let sequence = engine.open(16).unwrap();
        let mut heard = Vec::new();
        let result = perplexity(&engine, &sequence, &text, options(window), |n, so_far| {
            heard.push((n, so_far.n_windows))
        });
        let result = result.unwrap();
        let n_windows = 50 / window;
        assert!((result.perplexity - VOCAB as f64).abs() < 1e-6, "{result:?}");
        // All tokens of the second half except its first one are scored from a token before them.
        let scored = window - 1 - window / 2;
        assert_eq!((result.n_windows, result.n_scored), (n_windows, n_windows * scored));
        assert_eq!(heard, (1..=n_windows).map(|i| (n_windows, i)).collect::<Vec<_>>());
        let steps_in_window = (window - 1).div_ceil(max_tokens.min(window - 1));
        assert_eq!(script.seen().len(), n_windows * steps_in_window);
    }
}

#[test]
fn the_first_token_of_each_window_is_the_bos_token() {
    let (engine, script) = engine(8, 8);
    let sequence = engine.open(8).unwrap();
    let text: Vec<u32> = (10..42).collect();
    let options = PerplexityOptions { window: 8, max_windows: Some(3), bos: Some(1) };
    assert_eq!(perplexity(&engine, &sequence, &text, options, |_, _| {}).unwrap().n_windows, 3);
    let firsts: Vec<Vec<u32>> = script.seen().iter().map(|s| s.tokens[..2].to_vec()).collect();
    assert_eq!(firsts, [[1, 11], [1, 19], [1, 27]]);
}

#[test]
fn a_step_that_fails_keeps_no_blocks() {
    let (engine, script) = engine(16, 4);
    let sequence = engine.open(16).unwrap();
    let text: Vec<u32> = (0..32).collect();
    script.fail_after(5, RunError::Mismatch { what: "weights", because: "of a test".into() });
    assert!(perplexity(&engine, &sequence, &text, options(16), |_, _| {}).is_err());
    assert!(sequence.tokens().unwrap().len() < 16, "it is not busy");
    assert!(perplexity(&engine, &sequence, &text, options(16), |_, _| {}).is_ok());
    assert!(sequence.tokens().unwrap().is_empty());
}

#[test]
fn windows_that_score_nothing_or_do_not_fit_are_refused() {
    let (engine, script) = engine(16, 16);
    let sequence = engine.open(16).unwrap();
    let text: Vec<u32> = (0..64).collect();
    for window in [0, 1, 2, 17] {
        let error = perplexity(&engine, &sequence, &text, options(window), |_, _| {}).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("a window of {window} tokens was requested, it may have 3 to 16 tokens")
        );
    }
    let error = perplexity(&engine, &sequence, &text[..15], options(16), |_, _| {}).unwrap_err();
    assert_eq!(error.to_string(), "the text has 15 tokens, one window needs 16");
    assert!(script.seen().is_empty());
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_at_any_position() {
    let (engine, script) = engine(16, 16);
    let sequence = engine.open(16).unwrap();
    for place in [0, 7, 15] {
        let mut text = vec![1; 16];
        text[place] = VOCAB as u32;
        let error = perplexity(&engine, &sequence, &text, options(16), |_, _| {}).unwrap_err();
        assert!(matches!(error, EngineError::UnknownToken { token: 128, vocab: 128 }), "{error}");
    }
    let bos = PerplexityOptions { bos: Some(500), ..options(16) };
    assert!(perplexity(&engine, &sequence, &[1; 16], bos, |_, _| {}).is_err());
    assert!(script.seen().is_empty());
}
