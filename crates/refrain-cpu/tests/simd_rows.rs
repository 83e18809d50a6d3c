//! Elementwise kernels and attention, at every level, against plain f64.

mod common;

use common::*;
use half::{bf16, f16};
use refrain_cpu::simd::{self, AttendState, KEY_CHUNK, KvBlock, KvRows, Level, Scores, attend_block};
use refrain_tensor::DType;

const LENGTHS: [usize; 9] = [0, 1, 7, 15, 16, 17, 64, 100, 577];

/// Runs `f` at every level, checks that all give the same bits, and returns them.
fn everywhere(f: impl Fn(Level) -> Vec<f32>) -> Vec<f32> {
    let want = f(Level::PORTABLE);
    for level in Level::available() {
        assert_eq!(bits(&f(level)), bits(&want), "{level}");
    }
    want
}

fn close(got: &[f32], want: impl IntoIterator<Item = f64>, relative: f64) {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= relative * want.abs() + 1e-30, "element {i}: got {got}, want {want}");
    }
}

#[test]
fn the_levels_of_this_processor_begin_with_the_portable_one() {
    let levels = Level::available();
    assert_eq!(levels[0], Level::PORTABLE);
    assert_eq!(levels.last(), Some(&Level::detect()));
    for level in levels {
        assert_eq!(Level::by_name(level.name()), Some(level));
    }
    assert_eq!(Level::by_name("sse9"), None);
}

#[test]
fn sums_products_and_gates_match_f64() {
    let mut random = Random(1);
    for n in LENGTHS {
        let (a, b) = (random.floats(n), random.floats(n));
        let pairs = || a.iter().zip(&b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
        let run = |f: fn(Level, &[f32], &[f32], &mut [f32])| {
            everywhere(|level| {
                let mut out = vec![f32::NAN; n];
                f(level, &a, &b, &mut out);
                out
            })
        };
        close(&run(simd::add), pairs().map(|(a, b)| f64::from((a + b) as f32)), 0.0);
        close(&run(simd::mul), pairs().map(|(a, b)| f64::from((a * b) as f32)), 0.0);
        close(&run(simd::silu_mul), pairs().map(|(a, b)| a / (1.0 + (-a).exp()) * b), 5e-7);
        let gelu = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh());
        close(&run(simd::gelu_tanh_mul), pairs().map(|(a, b)| gelu(a) * b), 2e-6);
        let inplace = everywhere(|level| {
            let mut x = a.clone();
            simd::silu_mul_inplace(level, &mut x, &b);
            x
        });
        assert_eq!(bits(&inplace), bits(&run(simd::silu_mul)));
        let axpy = everywhere(|level| {
            let mut y = a.clone();
            simd::axpy(level, &mut y, 0.3, &b);
            y
        });
        let want: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| 0.3f32.mul_add(b, a)).collect();
        assert_eq!(bits(&axpy), bits(&want));
    }
}

#[test]
fn gates_are_correct_for_extreme_inputs() {
    let x = [-1e30, -100.0, -20.0, 0.0, 20.0, 100.0, 1e30];
    let ones = [1.0; 7];
    for level in Level::available() {
        let mut out = [0.0; 7];
        simd::silu_mul(level, &x, &ones, &mut out);
        close(&out, [0.0, 0.0, -20.0 / (1.0 + 20f64.exp()), 0.0, 20.0, 100.0, 1e30], 3e-7);
        simd::gelu_tanh_mul(level, &x, &ones, &mut out);
        close(&out[1..], [0.0, 0.0, 0.0, 20.0, 100.0, 1e30], 3e-7);
        assert!(out[0].abs() < 1e-30);
    }
}

#[test]
fn exp_is_within_1_5_ulp() {
    let x: Vec<f32> = (0..400_000).map(|i| -103.9 + i as f32 * (192.6 / 400_000.0)).collect();
    let got = everywhere(|level| {
        let mut x = x.clone();
        simd::exp_inplace(level, &mut x);
        x
    });
    let mut worst = 0f64;
    for (&x, &got) in x.iter().zip(&got) {
        let want = f64::from(x).exp();
        if want > f64::from(f32::MAX) {
            assert!(got == f32::INFINITY || f64::from(got) > 3.4e38);
            continue;
        }
        let unit = f64::from(f32::MIN_POSITIVE).max(2f64.powi(want.log2().floor() as i32)) * 2f64.powi(-23);
        worst = worst.max((f64::from(got) - want).abs() / unit);
    }
    assert!(worst <= 1.5, "{worst} ulp");
    let mut ends = [f32::NEG_INFINITY, -200.0, 0.0, 200.0, f32::INFINITY, f32::NAN];
    simd::exp_inplace(Level::detect(), &mut ends);
    assert_eq!(ends[..5], [0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY]);
    assert!(ends[5].is_nan());
}

#[test]
fn reductions_match_f64_and_ignore_nan() {
    let mut random = Random(2);
    for n in LENGTHS {
        let (a, b) = (random.floats(n), random.floats(n));
        let got =
            everywhere(|level| vec![simd::dot(level, &a, &b), simd::sum(level, &a), simd::max(level, &a)]);
        let dot: f64 = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let sum: f64 = a.iter().map(|&a| f64::from(a)).sum();
        assert!((f64::from(got[0]) - dot).abs() < 1e-5 && (f64::from(got[1]) - sum).abs() < 1e-5, "{n}");
        assert_eq!(got[2], a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    }
    for level in Level::available() {
        assert_eq!(simd::argmax(level, &[]), 0);
        assert_eq!(simd::argmax(level, &[1.0, 3.0, f32::NAN, 3.0]), 1);
        assert_eq!(simd::argmax(level, &[f32::NAN; 20]), 0);
        assert_eq!(simd::max(level, &[f32::NAN, -2.0]), -2.0);
    }
}

#[test]
fn norms_match_f64_with_and_without_a_preceding_addition() {
    let mut random = Random(3);
    for n in [1, 16, 64, 576, 2048] {
        let (x, delta, w) = (random.floats(n), random.floats(n), random.floats(n));
        let norm = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / n as f64;
            x.iter().zip(&w).map(|(x, &w)| x / (mean + 1e-5).sqrt() * f64::from(w)).collect()
        };
        let got = everywhere(|level| {
            let mut out = vec![0.0; n];
            simd::rms_norm(level, &x, &w, 1e-5, &mut out);
            let mut inplace = x.clone();
            simd::rms_norm_inplace(level, &mut inplace, &w, 1e-5);
            assert_eq!(out, inplace);
            out
        });
        close(&got, norm(&x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()), 1e-6);
        let got = everywhere(|level| {
            let (mut residual, mut out) = (x.clone(), vec![0.0; n]);
            simd::add_rms_norm(level, &mut residual, &delta, &w, 1e-5, &mut out);
            assert!(residual.iter().zip(&x).zip(&delta).all(|((r, x), d)| *r == x + d));
            out
        });
        let summed: Vec<f64> = x.iter().zip(&delta).map(|(x, d)| f64::from(x + d)).collect();
        close(&got, norm(&summed), 1e-6);
    }
}

#[test]
fn rope_rotates_the_right_pairs() {
    let mut random = Random(4);
    for (head_dim, n) in [(2, 1), (64, 32), (128, 64), (96, 24), (20, 10)] {
        let x = random.floats(head_dim);
        let angles = random.floats(n);
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let neox = everywhere(|level| {
            let mut x = x.clone();
            simd::rope_neox(level, &mut x, &cos, &sin);
            x
        });
        let interleaved = everywhere(|level| {
            let mut x = x.clone();
            simd::rope_interleaved(level, &mut x, &cos, &sin);
            x
        });
        for i in 0..n {
            for (got, a, b) in [(&neox, i, i + n), (&interleaved, 2 * i, 2 * i + 1)] {
                assert_eq!(got[a], x[a] * cos[i] - x[b] * sin[i]);
                assert_eq!(got[b], x[a] * sin[i] + x[b] * cos[i]);
            }
        }
        assert_eq!(neox[2 * n..], x[2 * n..]);
        assert_eq!(interleaved[2 * n..], x[2 * n..]);
    }
}

#[test]
fn half_floats_convert_like_in_the_half_crate() {
    let mut random = Random(5);
    let mut x: Vec<f32> = random.floats(1000).iter().map(|x| x * 1e5).collect();
    x.extend([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 5.9e-8, 6.1e-5, f32::INFINITY, 2049.0, 2051.0]);
    let want: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    for level in Level::available() {
        let mut got = vec![f16::ZERO; x.len()];
        simd::f32_to_f16(level, &x, &mut got);
        assert_eq!(
            got.iter().map(|h| h.to_bits()).collect::<Vec<_>>(),
            want.iter().map(|h| h.to_bits()).collect::<Vec<_>>()
        );
        let every: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|h| !h.is_nan()).collect();
        let mut back = vec![0.0; every.len()];
        simd::f16_to_f32(level, &every, &mut back);
        assert!(every.iter().zip(&back).all(|(h, &f)| h.to_f32().to_bits() == f.to_bits()), "{level}");
    }
}

#[test]
fn softmax_sums_to_one() {
    let mut random = Random(6);
    let x: Vec<f32> = random.floats(1001).iter().map(|x| x * 30.0).collect();
    let got = everywhere(|level| {
        let mut x = x.clone();
        simd::softmax_inplace(level, &mut x);
        x
    });
    let total: f64 = x.iter().map(|&x| f64::from(x).exp()).sum();
    close(&got, x.iter().map(|&x| f64::from(x).exp() / total), 3e-6);
}

struct Case {
    head_dim: usize,
    n_keys: usize,
    /// Elements between keys.
    stride: usize,
    n_q: usize,
    dtype: DType,
    softcap: Option<f32>,
}

#[test]
fn attention_matches_a_plain_softmax_in_f64() {
    let mut random = Random(7);
    let cases = [
        Case { head_dim: 64, n_keys: 1, stride: 64, n_q: 1, dtype: DType::F16, softcap: None },
        Case { head_dim: 64, n_keys: 200, stride: 192, n_q: 9, dtype: DType::F16, softcap: None },
        Case { head_dim: 128, n_keys: 77, stride: 128, n_q: 4, dtype: DType::F32, softcap: None },
        Case { head_dim: 20, n_keys: 70, stride: 40, n_q: 6, dtype: DType::F16, softcap: Some(50.0) },
        Case { head_dim: 64, n_keys: 200, stride: 192, n_q: 9, dtype: DType::BF16, softcap: None },
        Case { head_dim: 20, n_keys: 70, stride: 40, n_q: 6, dtype: DType::BF16, softcap: Some(50.0) },
        Case { head_dim: 7, n_keys: 33, stride: 7, n_q: 5, dtype: DType::F32, softcap: None },
    ];
    for case in cases {
        let Case { head_dim, n_keys, stride, n_q, dtype, softcap } = case;
        let n = (n_keys - 1) * stride + head_dim;
        let (keys, values) = (random.floats(n), random.floats(n));
        let half = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
        let brain = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let halves = (half(&keys), half(&values));
        let brains = (brain(&keys), brain(&values));
        let read = |x: &[f32], i: usize| {
            f64::from(match dtype {
                DType::F16 => f16::from_f32(x[i]).to_f32(),
                DType::BF16 => bf16::from_f32(x[i]).to_f32(),
                _ => x[i],
            })
        };
        let q: Vec<f32> = random.floats(n_q * head_dim).iter().map(|x| x * 4.0).collect();
        // Query i attends to the keys up to its own position, the last query to all; some ranges begin late.
        let visible: Vec<_> = (0..n_q)
            .map(|i| {
                let end = n_keys - (n_q - 1 - i).min(n_keys);
                (if i % 2 == 1 { end / 3 } else { 0 })..end
            })
            .collect();
        let scores = Scores { scale: 0.3, softcap };
        let (key_rows, value_rows) = match dtype {
            DType::F16 => (KvRows::F16(&halves.0), KvRows::F16(&halves.1)),
            DType::BF16 => (KvRows::Bf16(&brains.0), KvRows::Bf16(&brains.1)),
            _ => (KvRows::F32(&keys), KvRows::F32(&values)),
        };
        let kv = KvBlock { keys: key_rows, values: value_rows, stride, n_keys };
        let run = |level, q: &[f32], visible: &[std::ops::Range<usize>]| {
            let n_q = visible.len();
            let (mut max, mut sum, mut acc) = (vec![9.0; n_q], vec![9.0; n_q], vec![9.0; n_q * head_dim]);
            let mut state = AttendState { max: &mut max, sum: &mut sum, acc: &mut acc };
            state.reset();
            attend_block(level, scores, q, head_dim, &kv, visible, &mut state);
            state.finish(level);
            acc
        };
        let got = everywhere(|level| run(level, &q, &visible));
        for i in 0..n_q {
            let q = &q[i * head_dim..][..head_dim];
            let alone = run(Level::detect(), q, &visible[i..=i]);
            assert_eq!(bits(&alone), bits(&got[i * head_dim..][..head_dim]), "query {i} alone");
            let weights: Vec<f64> = visible[i]
                .clone()
                .map(|key| {
                    let dot: f64 =
                        (0..head_dim).map(|d| f64::from(q[d]) * read(&keys, key * stride + d)).sum();
                    let score = dot * 0.3f32 as f64;
                    softcap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh()).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let want: f64 = visible[i]
                    .clone()
                    .zip(&weights)
                    .map(|(key, w)| w * read(&values, key * stride + d))
                    .sum();
                let want = if total == 0.0 { 0.0 } else { want / total };
                let got = f64::from(got[i * head_dim + d]);
                assert!((got - want).abs() < 3e-6, "query {i} element {d}: got {got}, want {want}");
            }
        }
    }
}

#[test]
fn attention_in_blocks_gives_the_bits_of_one_block_and_reads_only_visible_keys() {
    let mut random = Random(8);
    let (head_dim, n_keys, n_q) = (64, 5 * KEY_CHUNK + 9, 4);
    let mut keys = random.floats(n_keys * head_dim);
    let mut values = random.floats(n_keys * head_dim);
    let q = random.floats(n_q * head_dim);
    let seen = n_keys - 5;
    // Keys after the last visible one may hold anything.
    keys[seen * head_dim..].fill(f32::NAN);
    values[seen * head_dim..].fill(f32::NAN);
    let run = |block: usize| {
        let (mut max, mut sum, mut acc) = (vec![0.0; n_q], vec![0.0; n_q], vec![0.0; n_q * head_dim]);
        let mut state = AttendState { max: &mut max, sum: &mut sum, acc: &mut acc };
        state.reset();
        for begin in (0..n_keys).step_by(block) {
            let n = block.min(n_keys - begin);
            let rows = |x| KvRows::F32(&(x as &[f32])[begin * head_dim..][..n * head_dim]);
            let kv = KvBlock { keys: rows(&keys), values: rows(&values), stride: head_dim, n_keys: n };
            let end = seen.saturating_sub(begin).min(n);
            let scores = Scores { scale: 0.125, softcap: None };
            attend_block(Level::detect(), scores, &q, head_dim, &kv, &vec![0..end; n_q], &mut state);
        }
        state.finish(Level::detect());
        acc
    };
    let whole = run(n_keys);
    assert!(whole.iter().all(|x| x.is_finite()));
    assert_eq!(bits(&run(KEY_CHUNK)), bits(&whole));
    assert_eq!(bits(&run(2 * KEY_CHUNK)), bits(&whole));
}
