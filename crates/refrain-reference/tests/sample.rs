//! Checks which tokens sampling can return, and how often.

use refrain_graph::{SAMPLE_PARAMS, SampleParam};
use refrain_reference::{Sampling, sample_row, uniform};
use refrain_testkit::Rng;
use std::collections::BTreeSet;

const OFF: [f32; SAMPLE_PARAMS] = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0];

fn params(set: &[(SampleParam, f32)]) -> [f32; SAMPLE_PARAMS] {
    let mut params = OFF;
    set.iter().for_each(|&(param, value)| params[param as usize] = value);
    params
}

const PLAIN: Sampling<'static> =
    Sampling { params: &OFF, history: &[], bias_ids: &[], bias: &[], seed: 1, position: 0 };

fn pick(logits: &[f32], sampling: Sampling<'_>) -> (usize, f32) {
    sample_row(&mut logits.to_vec(), &sampling)
}

/// Counts how often each token is sampled over many positions.
fn counts(logits: &[f32], sampling: Sampling<'_>, n: u32) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    (0..n).for_each(|position| counts[pick(logits, Sampling { position, ..sampling }).0] += 1);
    counts
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let exps: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
    let total: f64 = exps.iter().sum();
    exps.iter().map(|e| e / total).collect()
}

/// Pearson's chi-square against `want`, limited to five standard deviations above its mean.
fn assert_distributed(counts: &[usize], want: &[f64]) {
    let n: usize = counts.iter().sum();
    let mut chi = 0.0;
    let mut freedom = -1.0;
    for (&got, &p) in counts.iter().zip(want) {
        if p == 0.0 {
            assert_eq!(got, 0, "an impossible token was sampled");
            continue;
        }
        let expected = p * n as f64;
        chi += (got as f64 - expected).powi(2) / expected;
        freedom += 1.0;
    }
    let limit = freedom + 5.0 * (2.0 * f64::max(freedom, 1.0)).sqrt();
    assert!(chi < limit, "chi-square {chi} of {freedom} degrees of freedom: {counts:?}");
}

const LOGITS: [f32; 6] = [0.5, 2.0, -1.0, 1.5, 0.0, 1.0];

#[test]
fn token_frequencies_match_the_model() {
    for temperature in [0.5f32, 1.0, 2.5] {
        let params = params(&[(SampleParam::Temperature, temperature)]);
        let counts = counts(&LOGITS, Sampling { params: &params, ..PLAIN }, 20_000);
        assert_distributed(&counts, &softmax(&LOGITS, f64::from(temperature)));
    }
}

#[test]
fn token_frequencies_over_seeds_match_those_over_positions() {
    let mut counts = vec![0; LOGITS.len()];
    for seed in 0..20_000u64 {
        let seed = seed * 0x1_0000_0001;
        counts[pick(&LOGITS, Sampling { seed, position: 17, ..PLAIN }).0] += 1;
    }
    assert_distributed(&counts, &softmax(&LOGITS, 1.0));
}

#[test]
fn temperature_applies_after_the_filters() {
    let set = [(SampleParam::TopK, 3.0), (SampleParam::Temperature, 2.0)];
    let counts = counts(&LOGITS, Sampling { params: &params(&set), ..PLAIN }, 20_000);
    let kept = softmax(&[2.0, 1.5, 1.0], 2.0);
    assert_distributed(&counts, &[0.0, kept[0], 0.0, kept[1], 0.0, kept[2]]);
}

/// Tokens that can be sampled.
fn kept(logits: &[f32], set: &[(SampleParam, f32)]) -> BTreeSet<usize> {
    // At a high temperature all remaining tokens are about equally likely.
    let params = params(&[&[(SampleParam::Temperature, 100.0)], set].concat());
    let counts = counts(logits, Sampling { params: &params, ..PLAIN }, 2_000);
    (0..logits.len()).filter(|&i| counts[i] > 0).collect()
}

#[test]
fn top_k_keeps_the_k_most_probable_tokens_and_breaks_ties_by_id() {
    assert_eq!(kept(&LOGITS, &[(SampleParam::TopK, 1.0)]), [1].into());
    assert_eq!(kept(&LOGITS, &[(SampleParam::TopK, 4.0)]), [0, 1, 3, 5].into());
    assert_eq!(kept(&LOGITS, &[(SampleParam::TopK, 60.0)]).len(), 6);
    assert_eq!(kept(&LOGITS, &[(SampleParam::TopK, 0.0)]).len(), 6);
    assert_eq!(kept(&[1.0, 2.0, 1.0, 1.0], &[(SampleParam::TopK, 2.0)]), [0, 1].into());
}

#[test]
fn top_p_keeps_the_shortest_prefix_that_reaches_it() {
    // Probabilities 0.4, 0.3, 0.2 and 0.1, shuffled.
    let logits = [0.2f32, 0.4, 0.1, 0.3].map(f32::ln);
    let top_p = |p| kept(&logits, &[(SampleParam::TopP, p)]);
    assert_eq!(top_p(0.0), [1].into());
    assert_eq!(top_p(0.39), [1].into());
    assert_eq!(top_p(0.41), [1, 3].into());
    assert_eq!(top_p(0.69), [1, 3].into());
    assert_eq!(top_p(0.71), [0, 1, 3].into());
    assert_eq!(top_p(0.95).len(), 4);
    assert_eq!(top_p(1.0).len(), 4);
}

#[test]
fn top_p_after_top_k_is_relative_to_the_remaining_tokens() {
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    // Of the two remaining tokens, the first has 4/7.
    let both = |p| kept(&logits, &[(SampleParam::TopK, 2.0), (SampleParam::TopP, p)]);
    assert_eq!(both(0.56), [0].into());
    assert_eq!(both(0.58), [0, 1].into());
}

#[test]
fn min_p_keeps_tokens_close_to_the_best() {
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let min_p = |p| kept(&logits, &[(SampleParam::MinP, p)]);
    assert_eq!(min_p(0.0).len(), 4);
    assert_eq!(min_p(0.26), [0, 1, 2].into());
    assert_eq!(min_p(0.51), [0, 1].into());
    assert_eq!(min_p(1.0), [0].into());
    assert_eq!(min_p(2.0), [0].into());
}

/// The logits after bias and penalties.
fn shifted(logits: &[f32], sampling: Sampling<'_>) -> Vec<f32> {
    let mut logits = logits.to_vec();
    sample_row(&mut logits, &sampling);
    logits
}

#[test]
fn penalties_and_bias_shift_only_their_tokens() {
    let logits = [1.0, -1.0, 2.0, 0.5];
    let history = [2, -1, 1, 2, 77, 2];
    let with = |set: &[(SampleParam, f32)]| {
        shifted(&logits, Sampling { params: &params(set), history: &history, ..PLAIN })
    };
    assert_eq!(with(&[]), logits);
    assert_eq!(with(&[(SampleParam::RepeatPenalty, 2.0)]), [1.0, -2.0, 1.0, 0.5]);
    assert_eq!(with(&[(SampleParam::FrequencyPenalty, 0.25)]), [1.0, -1.25, 1.25, 0.5]);
    assert_eq!(with(&[(SampleParam::PresencePenalty, 0.5)]), [1.0, -1.5, 1.5, 0.5]);
    let all = [
        (SampleParam::RepeatPenalty, 2.0),
        (SampleParam::FrequencyPenalty, 0.25),
        (SampleParam::PresencePenalty, 0.5),
    ];
    assert_eq!(with(&all), [1.0, -2.75, -0.25, 0.5]);
    let biased = Sampling { bias_ids: &[3, -1, 0, 9, 3], bias: &[1.0, 9.0, -0.5, 9.0, 0.25], ..PLAIN };
    assert_eq!(shifted(&logits, biased), [0.5, -1.0, 2.0, 1.75]);
}

#[test]
fn bias_comes_before_penalties() {
    let params = params(&[(SampleParam::RepeatPenalty, 2.0)]);
    let sampling = Sampling { params: &params, history: &[0], bias_ids: &[0], bias: &[3.0], ..PLAIN };
    assert_eq!(shifted(&[-1.0, 0.0], sampling), [1.0, 0.0]);
}

#[test]
fn bias_can_force_and_forbid_a_token() {
    let forced = Sampling { bias_ids: &[2], bias: &[100.0], ..PLAIN };
    assert_eq!(counts(&LOGITS, forced, 500)[2], 500);
    let forbidden = Sampling { bias_ids: &[1], bias: &[f32::NEG_INFINITY], ..PLAIN };
    assert_eq!(counts(&LOGITS, forbidden, 2_000)[1], 0);
}

#[test]
fn greedy_takes_the_best_token_and_breaks_ties_by_id() {
    for temperature in [0.0, -1.0, f32::NAN] {
        let params = params(&[(SampleParam::Temperature, temperature)]);
        let greedy = Sampling { params: &params, ..PLAIN };
        assert_eq!(pick(&LOGITS, greedy).0, 1);
        assert_eq!(pick(&[0.0, 3.0, 3.0, 3.0], greedy).0, 1);
        assert_eq!(pick(&[-0.0, 0.0], greedy).0, 0);
    }
}

#[test]
fn the_probability_is_the_model_s_regardless_of_filters() {
    let set = [(SampleParam::TopK, 2.0), (SampleParam::Temperature, 0.3)];
    let p = softmax(&LOGITS, 1.0);
    for position in 0..50 {
        let (token, logprob) = pick(&LOGITS, Sampling { params: &params(&set), position, ..PLAIN });
        assert!((f64::from(logprob) - p[token].ln()).abs() < 1e-6);
    }
    let (_, sure) = pick(&[7.5], PLAIN);
    assert_eq!(sure, 0.0);
}

#[test]
fn a_row_with_one_nan_logit_has_no_probabilities() {
    let logits = [0.0, 1.0, f32::NAN, 0.5];
    for set in [(SampleParam::Temperature, 0.0), (SampleParam::TopK, 2.0), (SampleParam::TopP, 0.5)] {
        let params = params(&[set]);
        let (token, logprob) = pick(&logits, Sampling { params: &params, ..PLAIN });
        assert!(token == 2 && logprob.is_nan(), "{set:?}: {token} {logprob}");
    }
}

#[test]
fn an_all_nan_row_returns_the_first_token_with_a_nan_probability() {
    for nothing in [f32::NAN, f32::NEG_INFINITY] {
        for temperature in [0.0, 1.0] {
            let params = params(&[(SampleParam::Temperature, temperature), (SampleParam::TopK, 3.0)]);
            let (token, logprob) = pick(&[nothing; 5], Sampling { params: &params, ..PLAIN });
            assert!(token == 0 && logprob.is_nan());
        }
    }
    assert_eq!(pick(&[0.0, f32::INFINITY, 0.0], PLAIN).0, 1);
}

#[test]
fn masked_tokens_are_never_sampled() {
    let mut logits = [f32::NEG_INFINITY; 40];
    logits[17] = -3.0;
    logits[30] = -4.0;
    let set =
        params(&[(SampleParam::TopK, 20.0), (SampleParam::TopP, 0.999), (SampleParam::Temperature, 5.0)]);
    let counts = counts(&logits, Sampling { params: &set, ..PLAIN }, 1_000);
    assert_eq!(counts[17] + counts[30], 1_000);
    assert!(counts[17] > 0 && counts[30] > 0);
}

#[test]
fn the_same_seed_and_position_give_the_same_token() {
    let mut rng = Rng::new(3);
    let logits: Vec<f32> = (0..500).map(|_| rng.normal()).collect();
    let run = |seed| {
        (0..50).map(|position| pick(&logits, Sampling { seed, position, ..PLAIN }).0).collect::<Vec<_>>()
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
    // Both halves of the seed matter.
    assert_ne!(uniform(1, 0), uniform(1 << 32 | 1, 0));
}

#[test]
fn a_prefix_that_reaches_top_p_exactly_is_long_enough() {
    let logits = vec![0.0f32; 8];
    for (top_p, n) in [(0.125, 1), (0.25, 2), (0.5, 4), (0.875, 7)] {
        assert_eq!(kept(&logits, &[(SampleParam::TopP, top_p)]), (0..n).collect());
        assert_eq!(kept(&logits, &[(SampleParam::TopK, 8.0), (SampleParam::TopP, top_p)]), (0..n).collect());
    }
}
