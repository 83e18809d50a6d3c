//! Matrix products at every level, in every layout, against dequantised weights in f64 and against each other.

mod common;

use common::*;
use refrain_cpu::pool::Pool;
use refrain_cpu::simd::{
    Acts, Level, OutTile, WeightError, WeightMatrix, WeightProduct, act_kind, matmul, matmul_parallel, pack,
    prepare_parallel,
};
use refrain_tensor::DType;

/// A row length of `n_blocks` blocks; for floats, an odd multiple of `n_blocks`.
fn length(dtype: DType, n_blocks: usize) -> usize {
    if dtype.is_quantized() { n_blocks * dtype.block_len() } else { 7 * n_blocks }
}

fn matrix(dtype: DType, bytes: &[u8], n_rows: usize, k: usize) -> WeightMatrix<'_> {
    WeightMatrix::new(dtype, bytes, n_rows, k, dtype.bytes_for(k).unwrap()).unwrap()
}

/// Largest magnitude of scale and minimum of a part, for scales of at most `d`.
fn magnitude(dtype: DType, d: f64) -> f64 {
    d * match dtype {
        DType::F32 | DType::F16 | DType::BF16 => 1.0,
        DType::Q4_0 | DType::Q4_1 => 16.0,
        DType::Q5_0 | DType::Q5_1 => 32.0,
        DType::Q8_0 | DType::IQ4_NL => 128.0,
        DType::MXFP4 => 12.0,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 31.0 * 43.0 / 8.0,
        DType::IQ3_XXS => 31.0 * 62.0 / 4.0,
        DType::IQ3_S => 31.0 * 15.0,
        DType::Q2_K => 15.0 * 4.0,
        DType::Q3_K => 32.0 * 4.0,
        DType::Q4_K => 63.0 * 16.0,
        DType::Q5_K => 63.0 * 32.0,
        DType::Q6_K | DType::IQ4_XS => 32.0 * 128.0,
        other => panic!("{other}"),
    }
}

#[test]
fn every_level_agrees_with_dequantised_weights_in_f64() {
    let mut random = Random(1);
    for dtype in WEIGHT_TYPES {
        for (n_blocks, n_rows, m) in [(1, 1, 1), (3, 5, 2), (5, 17, 9), (9, 33, 4)] {
            let k = length(dtype, n_blocks);
            let bytes = weights(dtype, n_rows * k, &mut random);
            let x = random.floats(m * k);
            let want = reference(dtype, &bytes, n_rows, k, &x);
            let got = product(Level::PORTABLE, &matrix(dtype, &bytes, n_rows, k), &x, m);
            // k rounded additions of terms below `magnitude`.
            let bound = magnitude(dtype, 0.03) * (k as f64) * f64::from(f32::EPSILON);
            for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= bound,
                    "{dtype} k={k} output {i}: got {got}, want {want}, off by {error:e} > {bound:e}"
                );
            }
        }
    }
}

#[test]
fn products_of_small_integers_are_exact() {
    let mut random = Random(2);
    for dtype in WEIGHT_TYPES {
        let k = length(dtype, 2);
        let (n_rows, m) = (19, 3);
        let bytes = weights_with(dtype, n_rows * k, &mut random, |_| 1.0);
        let mut x: Vec<f32> = (0..m * k).map(|_| (random.float() * 3.0).round()).collect();
        // With a largest magnitude of 127, the scale of a block of activations is exactly 1.
        for block in x.chunks_mut(act_kind(dtype).unwrap().block_len().max(2)) {
            block[1] = -127.0;
        }
        let want = reference(dtype, &bytes, n_rows, k, &x);
        for level in Level::available() {
            let got = product(level, &matrix(dtype, &bytes, n_rows, k), &x, m);
            let got: Vec<f64> = got.into_iter().map(f64::from).collect();
            assert_eq!(got, want, "{dtype} at {level}");
        }
    }
}

#[test]
fn levels_layouts_and_batch_sizes_give_the_same_bits() {
    let mut random = Random(3);
    let pool = Pool::new(2).unwrap();
    for dtype in WEIGHT_TYPES {
        for (n_blocks, n_rows) in [(1, 1), (3, 16), (2, 17), (40, 5), (7, 31)] {
            let k = length(dtype, n_blocks);
            let bytes = weights(dtype, n_rows * k, &mut random);
            let w = matrix(dtype, &bytes, n_rows, k);
            let m = 17;
            let x = random.floats(m * k);
            let want: Vec<u32> =
                x.chunks_exact(k).flat_map(|x| bits(&product(Level::PORTABLE, &w, x, 1))).collect();
            for level in Level::available() {
                let packed = pack(&pool, level, &w);
                for w in [Some(w), packed.as_ref().map(|p| p.matrix())].into_iter().flatten() {
                    for batch in [1, 2, 3, 5, 8, 9, 17] {
                        let got = product(level, &w, &x[..batch * k], batch);
                        assert_eq!(
                            bits(&got),
                            want[..batch * n_rows],
                            "{dtype} {level} {} m={batch}",
                            w.layout_name()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_large_batch_takes_several_passes() {
    let mut random = Random(4);
    for (dtype, k) in [(DType::Q4_K, 1024), (DType::Q8_0, 1024), (DType::BF16, 5003), (DType::F16, 3001)] {
        let (n_rows, m) = (18, 261);
        let bytes = weights(dtype, n_rows * k, &mut random);
        let w = matrix(dtype, &bytes, n_rows, k);
        let x = random.floats(m * k);
        let got = product(Level::detect(), &w, &x, m);
        for row in [0, 7, 127, 128, 255, 256, 260] {
            let alone = product(Level::PORTABLE, &w, &x[row * k..][..k], 1);
            assert_eq!(bits(&got[row * n_rows..][..n_rows]), bits(&alone), "{dtype} row {row}");
        }
    }
}

#[test]
fn bf16_products_round_only_the_activations_to_bf16() {
    // The definition, in scalars: 32 lanes of pairs, the odd element of a pair first, one rounding per
    // addition.
    let mut random = Random(13);
    let round = |x: f32| half::bf16::from_f32(x).to_f32();
    for k in [1, 2, 63, 64, 65, 200, 4100] {
        let n_rows = 7;
        let bytes = weights(DType::BF16, n_rows * k, &mut random);
        let x = random.floats(3 * k);
        let w: Vec<f32> =
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        let mut want = Vec::new();
        for x in x.chunks_exact(k) {
            for w in w.chunks_exact(k) {
                let mut lanes = [0f32; 32];
                for (i, (w, x)) in w.chunks(2).zip(x.chunks(2)).enumerate() {
                    for (w, x) in w.iter().zip(x).rev() {
                        lanes[i % 32] = w.mul_add(round(*x), lanes[i % 32]);
                    }
                }
                for half in [16, 8, 4, 2, 1] {
                    for i in 0..half {
                        lanes[i] += lanes[i + half];
                    }
                }
                want.push(lanes[0]);
            }
        }
        for level in Level::available() {
            let got = product(level, &matrix(DType::BF16, &bytes, n_rows, k), &x, 3);
            assert_eq!(bits(&got), bits(&want), "k={k} {level}");
        }
    }
}

#[test]
fn subnormal_bf16_values_may_be_flushed_to_zero() {
    // Processors with BF16 dot products flush them to zero, others do not; the difference is negligible.
    let (n_rows, k) = (3, 130);
    for (w, x) in [(1e-39f32, 1.0f32), (1.0, 1e-39), (1e-20, 1e-20), (-1e-39, 1e38), (3e-39, 3e-39)] {
        let bytes: Vec<u8> = (0..n_rows * k).flat_map(|_| half::bf16::from_f32(w).to_le_bytes()).collect();
        for level in Level::available() {
            for y in product(level, &matrix(DType::BF16, &bytes, n_rows, k), &vec![x; 2 * k], 2) {
                let most = f64::from(w.abs().max(x.abs())) * 1.2e-38 * k as f64 + 1.2e-38 * k as f64;
                let exact = f64::from(w) * f64::from(x) * k as f64;
                assert!(
                    (f64::from(y) - exact).abs() <= most,
                    "{w:e} by {x:e} at {level}: got {y:e}, want {exact:e}"
                );
            }
        }
    }
}

#[test]
fn row_ranges_give_the_same_rows_as_the_whole() {
    let mut random = Random(5);
    let pool = Pool::new(1).unwrap();
    for dtype in [DType::Q4_1, DType::Q6_K, DType::F16] {
        let (n_rows, m, k) = (45, 3, 256);
        let bytes = weights(dtype, n_rows * k, &mut random);
        let w = matrix(dtype, &bytes, n_rows, k);
        let x = random.floats(m * k);
        let level = Level::detect();
        let whole = product(level, &w, &x, m);
        let prepared = prepare(level, w.act_kind(), &x, k);
        let acts = Acts::new(w.act_kind(), m, k, &prepared).unwrap();
        let packed = pack(&pool, level, &w);
        for w in [Some(w), packed.as_ref().map(|p| p.matrix())].into_iter().flatten() {
            for rows in [0..0, 0..1, 3..20, 15..17, 16..32, 31..45, 44..45] {
                let mut out = vec![f32::NAN; m * rows.len()];
                matmul(level, &w, &acts, rows.clone(), &mut OutTile::new(&mut out, m, rows.len()));
                for i in 0..m {
                    let want = &whole[i * n_rows..][rows.clone()];
                    assert_eq!(bits(&out[i * rows.len()..][..rows.len()]), bits(want), "{dtype} {rows:?}");
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut random = Random(6);
    let (n_rows, m, k) = (70, 5, 512);
    let bytes = weights(DType::Q5_K, n_rows * k, &mut random);
    let w = matrix(DType::Q5_K, &bytes, n_rows, k);
    let x = random.floats(m * k);
    let want = product(Level::PORTABLE, &w, &x, m);
    for n_threads in [1, 2, 3, 4, 7] {
        let pool = Pool::new(n_threads).unwrap();
        let level = Level::detect();
        let mut prepared = vec![0; m * refrain_cpu::simd::act_bytes(w.act_kind(), k).unwrap()];
        let acts = prepare_parallel(&pool, level, w.act_kind(), &x, k, &mut prepared).unwrap();
        let mut outs: Vec<Vec<f32>> = (0..6).map(|_| vec![f32::NAN; m * n_rows]).collect();
        let mut products: Vec<WeightProduct> = outs.iter_mut().map(|out| WeightProduct { w, out }).collect();
        matmul_parallel(&pool, level, &acts, &mut products);
        for out in outs {
            assert_eq!(bits(&out), bits(&want), "{n_threads} threads");
        }
    }
}

#[test]
fn extreme_blocks_stay_exact_in_integers() {
    let mut random = Random(7);
    for dtype in WEIGHT_TYPES.into_iter().filter(|d| d.is_quantized()) {
        let k = 2 * dtype.block_len().max(64);
        let n_rows = 17;
        for fill in [0x00, 0xff, 0x80, 0x7f, 0x01] {
            // All quants and part scales at an extreme, with the largest or the smallest half float as the
            // scale.
            for scale in [65504.0, -65504.0, 6e-8, 0.0] {
                let mut bytes = weights_with(dtype, n_rows * k, &mut random, |_| scale);
                let kept = weights_with(dtype, n_rows * k, &mut Random(8), |_| 1.0);
                let other = weights_with(dtype, n_rows * k, &mut Random(8), |_| 2.0);
                for (i, byte) in bytes.iter_mut().enumerate() {
                    let is_scale = kept[i] != other[i];
                    // The low byte of a half float differs in neither; it precedes the high one.
                    let is_low = kept.get(i + 1).zip(other.get(i + 1)).is_some_and(|(a, b)| a != b);
                    if !is_scale && !is_low {
                        *byte = fill;
                    }
                }
                for sign in [1.0f32, -1.0] {
                    let x: Vec<f32> = (0..k).map(|i| if i % 3 == 0 { sign } else { -sign }).collect();
                    let w = matrix(dtype, &bytes, n_rows, k);
                    let want = product(Level::PORTABLE, &w, &x, 1);
                    let exact = reference(dtype, &bytes, n_rows, k, &x);
                    for (&got, &exact) in want.iter().zip(&exact) {
                        // The smallest scale of MXFP4 is a subnormal number, whose products are rounded.
                        let bound = magnitude(dtype, f64::from(scale.abs()) + 1e-38) * k as f64 * 1e-6;
                        assert!(
                            (f64::from(got) - exact).abs() <= bound,
                            "{dtype} fill {fill:#x}: got {got}, want {exact}"
                        );
                    }
                    for level in Level::available() {
                        assert_eq!(
                            bits(&product(level, &w, &x, 1)),
                            bits(&want),
                            "{dtype} {level} fill {fill:#x}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bytes_between_rows_are_not_read() {
    let mut random = Random(9);
    for dtype in WEIGHT_TYPES {
        let k = length(dtype, 3);
        let (n_rows, used) = (18, dtype.bytes_for(k).unwrap());
        let dense = weights(dtype, n_rows * k, &mut random);
        let x = random.floats(2 * k);
        let want = product(Level::PORTABLE, &matrix(dtype, &dense, n_rows, k), &x, 2);
        let stride = used + 24;
        let mut padded = vec![0xff; n_rows * stride - 24];
        for (row, src) in dense.chunks_exact(used).enumerate() {
            padded[row * stride..][..used].copy_from_slice(src);
        }
        let w = WeightMatrix::new(dtype, &padded, n_rows, k, stride).unwrap();
        for level in Level::available() {
            assert_eq!(bits(&product(level, &w, &x, 2)), bits(&want), "{dtype} {level}");
        }
    }
}

#[test]
fn activations_that_are_not_finite_give_nan_and_zeros_give_zero() {
    let mut random = Random(10);
    for dtype in WEIGHT_TYPES {
        let k = length(dtype, 3);
        let bytes = weights(dtype, 4 * k, &mut random);
        let w = matrix(dtype, &bytes, 4, k);
        for level in Level::available() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = random.floats(k);
                x[k / 2] = bad;
                let got = product(level, &w, &x, 1);
                assert!(got.iter().all(|y| !y.is_finite()), "{dtype} {level} {bad}: {got:?}");
            }
            assert!(product(level, &w, &vec![0.0; k], 1).iter().all(|&y| y == 0.0), "{dtype} {level}");
            assert!(product(level, &w, &vec![1e-40; k], 1).iter().all(|y| y.is_finite()), "{dtype} {level}");
        }
    }
}

#[test]
fn preparing_a_row_is_the_same_at_every_level_and_rounds_to_even() {
    use refrain_cpu::simd::{ActKind, act_bytes, quantize_row};
    let mut random = Random(11);
    let mut x = random.floats(512);
    // With a largest magnitude of 127, the quants are the values themselves.
    x[..4].copy_from_slice(&[127.0, 0.5, 1.5, -2.5]);
    for kind in [ActKind::F32, ActKind::Bf16, ActKind::Q8, ActKind::Q8K] {
        let want = prepare(Level::PORTABLE, kind, &x, 512);
        for level in Level::available() {
            assert_eq!(prepare(level, kind, &x, 512), want, "{kind:?} {level}");
        }
        if matches!(kind, ActKind::Q8 | ActKind::Q8K) {
            assert_eq!(want[..4].iter().map(|&q| q as i8).collect::<Vec<_>>(), [127, 0, 2, -2]);
        }
    }
    assert_eq!(act_bytes(ActKind::Q8, 33), None);
    assert!(quantize_row(Level::PORTABLE, ActKind::Q8K, &x[..255], &mut [0; 512]).is_err());
    assert!(quantize_row(Level::PORTABLE, ActKind::Q8, &x[..32], &mut [0; 3]).is_err());
}

#[test]
fn small_activations_next_to_large_ones_keep_finer_steps() {
    use refrain_cpu::simd::ActKind;
    let mut random = Random(14);
    let mut x = random.floats(256);
    // Parts of 32 with largest magnitudes of 1, 1/2, 1/4 and so on, and one part of zeros.
    let largest = |part: usize| if part == 7 { 0.0 } else { 0.5_f32.powi(part as i32) };
    for (part, x) in x.chunks_exact_mut(32).enumerate() {
        let most = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        x.iter_mut().for_each(|x| *x *= largest(part) / most);
    }
    let prepared = common::prepare(Level::PORTABLE, ActKind::Q8K, &x, 256);
    for (i, value) in common::prepared_values(ActKind::Q8K, 256, &prepared).into_iter().enumerate() {
        let step = f64::from(largest(i / 32).max(0.125)) / 127.0;
        let error = (value - f64::from(x[i])).abs();
        assert!(error <= 0.5001 * step, "{i}: got {value}, want {}, {error} of {step}", x[i]);
    }
}

#[test]
fn packing_loses_nothing() {
    let mut random = Random(12);
    let pool = Pool::new(2).unwrap();
    for dtype in WEIGHT_TYPES.into_iter().filter(|d| d.is_quantized()) {
        for level in Level::available() {
            let k = length(dtype, 3);
            let n_rows = 37;
            let bytes = weights(dtype, n_rows * k, &mut random);
            let w = matrix(dtype, &bytes, n_rows, k);
            let Some(packed) = pack(&pool, level, &w) else {
                assert!(w.is_decoded_for_each_use() && w.layout_name() == "file, decoded for each product");
                continue;
            };
            assert!(!w.is_decoded_for_each_use(), "{dtype}");
            let row_bytes = dtype.bytes_for(k).unwrap();
            let mut row = vec![0; row_bytes];
            for (i, want) in bytes.chunks_exact(row_bytes).enumerate() {
                packed.unpack_row(i, &mut row);
                assert_eq!(row, want, "{dtype} {level} row {i}");
            }
        }
    }
}

#[test]
fn mismatched_sizes_are_refused() {
    let refused = |dtype, n_bytes: usize, n_rows, k, row_bytes| {
        WeightMatrix::new(dtype, &vec![0; n_bytes], n_rows, k, row_bytes).err().unwrap()
    };
    assert_eq!(refused(DType::I32, 64, 1, 16, 64), WeightError::UnsupportedDType { dtype: DType::I32 });
    let short = refused(DType::Q4_0, 35, 2, 32, 18);
    assert_eq!(short.to_string(), "2 rows of 18 bytes at a stride of 18 do not fit in 35 bytes");
    assert_eq!(
        refused(DType::Q4_K, 144, 1, 255, 144).to_string(),
        "a Q4_K row of 255 elements is not whole blocks of 256"
    );
    assert!(matches!(refused(DType::Q8_0, 68, usize::MAX, 32, 34), WeightError::Size { .. }));
    assert!(matches!(refused(DType::F32, 4096, 2, 16, 60), WeightError::Size { .. }));
}
