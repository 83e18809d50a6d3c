//! Rotary embedding frequencies and their scaling.

use refrain_formats::params::{RopeScaling, Yarn};
use std::f64::consts::TAU;

/// Angle per position of each of the `dims / 2` pairs of elements.
///
/// `factors` divide the frequencies individually, for files with such a table.
pub fn inverse_frequencies(
    theta: f32,
    dims: usize,
    scaling: RopeScaling,
    factors: Option<&[f32]>,
) -> Vec<f32> {
    let base = |i: usize| f64::from(theta).powf(-2.0 * i as f64 / dims as f64);
    let scaled = |i: usize| match scaling {
        RopeScaling::Linear { factor } => base(i) / f64::from(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, n_original_context } => {
            let turns = n_original_context as f64 * base(i) / TAU;
            let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
            // 0 below `low` rotations over the original context, 1 above `high`, linear in between.
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            base(i) * (keep + (1.0 - keep) / f64::from(factor))
        }
        RopeScaling::Yarn(yarn) => {
            let keep = 1.0 - yarn_ramp(i, f64::from(theta), dims, &yarn);
            base(i) * (keep + (1.0 - keep) / f64::from(yarn.factor))
        }
        RopeScaling::Proportional { share, factor } => {
            // Rounded down to whole pairs, as in `transformers`.
            let n_pairs = (f64::from(share) * dims as f64 / 2.0).floor() as usize;
            if i < n_pairs { base(i) / f64::from(factor) } else { 0.0 }
        }
        // The divisors of long RoPE are in `factors`.
        RopeScaling::None | RopeScaling::Long { .. } => base(i),
    };
    let divisor = |i: usize| factors.and_then(|f| f.get(i)).map_or(1.0, |&f| f64::from(f));
    (0..dims / 2).map(|i| (scaled(i) / divisor(i)) as f32).collect()
}

/// 0 where a frequency is kept, 1 where it is divided, linear in between.
fn yarn_ramp(i: usize, theta: f64, dims: usize, yarn: &Yarn) -> f64 {
    // Index of the pair that makes `turns` rotations over the original context.
    let pair = |turns: f32| {
        let wave = yarn.n_original_context as f64 / (f64::from(turns) * TAU);
        dims as f64 * wave.ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let last = dims as f64 - 1.0;
    (low, high) = (low.max(0.0), high.min(last));
    if low == high {
        high += 0.001;
    }
    ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscaled_frequencies_fall_from_one_by_a_constant_ratio() {
        let f = inverse_frequencies(10_000.0, 8, RopeScaling::None, None);
        assert_eq!(f, [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            n_original_context: 8192,
        };
        let plain = inverse_frequencies(500_000.0, 128, RopeScaling::None, None);
        let scaled = inverse_frequencies(500_000.0, 128, scaling, None);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        let ratios: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
        assert!(ratios.windows(2).all(|w| w[0] <= w[1] + 1e-6), "{ratios:?}");
    }

    #[test]
    fn a_table_of_factors_divides_each_frequency() {
        let f = inverse_frequencies(10_000.0, 4, RopeScaling::None, Some(&[1.0, 4.0]));
        assert_eq!(f, [1.0, 0.0025]);
    }

    #[test]
    fn yarn_matches_transformers() {
        // Qwen's recipe for 131,072 positions; `transformers` 5.17 gives these for pairs 0, 23, 24, 30, 39, 40 and 63.
        let pairs = [0, 23, 24, 30, 39, 40, 63];
        let whole =
            [1.0, 6.978_306e-3, 5.375_321_5e-3, 1.064_361e-3, 6.490_394e-5, 4.445_698_5e-5, 3.102_344_4e-7];
        let exact = [
            1.0,
            6.978_306e-3,
            5.517_270_4e-3,
            1.079_237_7e-3,
            6.187_807_6e-5,
            4.445_698_5e-5,
            3.102_344_4e-7,
        ];
        for (truncate, want) in [(true, whole), (false, exact)] {
            let yarn = Yarn {
                factor: 4.0,
                n_original_context: 32_768,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 1.0,
                truncate,
            };
            let f = inverse_frequencies(1e6, 128, RopeScaling::Yarn(yarn), None);
            for (pair, want) in pairs.into_iter().zip(want) {
                let got = f[pair];
                assert!((got / want - 1.0f32).abs() < 1e-5, "pair {pair}: {got}, transformers has {want}");
            }
        }
    }
}
