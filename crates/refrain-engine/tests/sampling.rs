//! Sampling parameters as given by users, and as a row of the control block.

use refrain_engine::{MAX_BIAS, SamplingParams, SamplingRow};
use refrain_graph::SampleParam;

#[test]
fn parameters_out_of_range_are_refused_with_their_bounds() {
    let p = SamplingParams::default;
    let nan = f32::NAN;
    let cases = [
        (SamplingParams { temperature: -0.1, ..p() }, "temperature is -0.1, must be 0 or more"),
        (SamplingParams { temperature: nan, ..p() }, "temperature is NaN, must be 0 or more"),
        (SamplingParams { temperature: f32::INFINITY, ..p() }, "temperature is inf, must be 0 or more"),
        (SamplingParams { top_p: 0.0, ..p() }, "top-p is 0, must be above 0 and at most 1"),
        (SamplingParams { top_p: 1.5, ..p() }, "top-p is 1.5, must be above 0 and at most 1"),
        (SamplingParams { top_p: nan, ..p() }, "top-p is NaN, must be above 0 and at most 1"),
        (SamplingParams { min_p: -1.0, ..p() }, "min-p is -1, must be between 0 and 1"),
        (SamplingParams { min_p: nan, ..p() }, "min-p is NaN, must be between 0 and 1"),
        (SamplingParams { repeat_penalty: 0.0, ..p() }, "repeat penalty is 0, must be above 0"),
        (SamplingParams { repeat_penalty: nan, ..p() }, "repeat penalty is NaN, must be above 0"),
        (
            SamplingParams { frequency_penalty: nan, ..p() },
            "frequency or presence penalty is NaN and 0, must be a number",
        ),
        (
            SamplingParams { logit_bias: vec![(0, 1.0); 257], ..p() },
            "logit bias is 257 entries, must be at most 256 entries",
        ),
        (
            SamplingParams { logit_bias: vec![(100, 1.0)], ..p() },
            "logit bias is for token 100, must be for tokens below 100",
        ),
        (SamplingParams { logit_bias: vec![(1, nan)], ..p() }, "logit bias is NaN, must be a number or -inf"),
        (
            SamplingParams { logit_bias: vec![(1, f32::INFINITY)], ..p() },
            "logit bias is inf, must be a number or -inf",
        ),
    ];
    for (params, want) in cases {
        assert_eq!(params.check(100).unwrap_err().to_string(), want);
    }
}

#[test]
fn boundary_values_are_allowed() {
    let low = SamplingParams {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        penalty_window: 0,
        // Minus infinity forbids a token.
        logit_bias: vec![(99, f32::NEG_INFINITY)],
        ..SamplingParams::default()
    };
    let high = SamplingParams {
        top_k: usize::MAX,
        min_p: 1.0,
        penalty_window: usize::MAX,
        logit_bias: vec![(0, 1.0); MAX_BIAS],
        ..SamplingParams::default()
    };
    for params in [low, high, SamplingParams::greedy(), SamplingParams::default()] {
        assert_eq!(params.check(100), Ok(()), "{params:?}");
    }
}

#[test]
fn a_row_holds_the_parameters_and_the_seed_at_their_indices() {
    let params = SamplingParams {
        temperature: 0.5,
        top_k: usize::MAX,
        seed: 0x0123_4567_89AB_CDEF,
        logit_bias: vec![(7, -2.0)],
        ..SamplingParams::default()
    };
    let row = SamplingRow::new(&params);
    assert_eq!(row.params[SampleParam::Temperature as usize], 0.5);
    assert_eq!(row.params[SampleParam::TopK as usize], (1 << 24) as f32);
    assert_eq!(row.rng, [0x89AB_CDEF, 0x0123_4567, 0, 0]);
    assert_eq!((row.bias_ids[0], row.bias[0], row.bias_ids[1]), (7, -2.0, -1));
    assert!(row.history.is_empty());
}

#[test]
fn advancing_keeps_the_last_tokens_of_the_window() {
    let with = |penalty_window: usize| {
        let params = SamplingParams { penalty_window, presence_penalty: 0.5, ..SamplingParams::default() };
        SamplingRow::new(&params)
    };
    let mut row = with(3);
    row.advance(5, &[1, 2, 3, 4, 5]);
    assert_eq!((&row.history[..], row.rng[2]), (&[3, 4, 5][..], 5));
    // A shorter sequence keeps nothing of the longer one.
    row.advance(1, &[9]);
    assert_eq!((&row.history[..], row.rng[2]), (&[9][..], 1));
    let mut none = with(0);
    none.advance(2, &[1, 2]);
    assert!(none.history.is_empty());
    let mut all = with(usize::MAX);
    all.advance(900, &(0..900).collect::<Vec<u32>>());
    assert_eq!(all.history, (0..900).collect::<Vec<i32>>());
    // Without penalties there is no history.
    let mut row = SamplingRow::new(&SamplingParams::default());
    row.advance(2, &[1, 2]);
    assert!(row.history.is_empty());
}
