//! The sampler chooses the same tokens as the reference.

use proptest::prelude::*;
use refrain_cpu::sample_row;
use refrain_cpu::simd::Level;
use refrain_graph::SAMPLE_PARAMS;
use refrain_reference::{Sampling, sample_row as reference};

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_logits_and_parameters_give_the_reference_token(
        logits in prop::collection::vec(prop_oneof![-20f32..20.0, Just(f32::NEG_INFINITY), Just(1.0), Just(f32::NAN)], 1..1500),
        temperature in prop_oneof![Just(0.0f32), Just(f32::NAN), 0.05f32..3.0],
        top_k in prop_oneof![Just(0.0f32), (1usize..900).prop_map(|k| k as f32)],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
        penalties in (0.5f32..2.0, -1f32..1.0, -1f32..1.0),
        history in prop::collection::vec(-1i32..800, 0..20),
        seed in any::<u64>(),
        position in any::<u32>(),
    ) {
        let mut params = [0.0; SAMPLE_PARAMS];
        params[..7].copy_from_slice(&[temperature, top_k, top_p, min_p, penalties.0, penalties.1, penalties.2]);
        let sampling = Sampling { params: &params, history: &history, bias_ids: &[3, -1], bias: &[0.5, 9.0], seed, position };
        let got = sample_row(Level::detect(), &logits, &sampling);
        let mut changed = logits;
        let want = reference(&mut changed, &sampling);
        prop_assert_eq!(got.0, want.0);
        let close = (got.1 - want.1).abs() <= 1e-4 * want.1.abs().max(1.0);
        prop_assert!(close || (got.1.is_nan() && want.1.is_nan()) || got.1 == want.1, "{} for {}", got.1, want.1);
    }
}
