//! Encoders at every level, against the simple version byte for byte.

mod common;

use common::*;
use proptest::prelude::*;
use refrain_cpu::simd::{Level, encode_rows};
use refrain_tensor::quant::{can_encode, quantize_weighted};
use refrain_tensor::{DType, TensorError};

fn types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|&dtype| can_encode(dtype))
}

/// Checks all types and levels; the buffers hold something else before.
fn check(values: &[f32], row_len: usize, importance: Option<&[f32]>) {
    for dtype in types().filter(|dtype| row_len.is_multiple_of(dtype.block_len())) {
        let n_bytes = dtype.bytes_for(values.len()).unwrap();
        let mut want = vec![0x55; n_bytes];
        let expected = quantize_weighted(dtype, values, row_len, importance, &mut want);
        for level in Level::available() {
            let mut got = vec![0xaa; n_bytes];
            let result = encode_rows(level, dtype, values, row_len, importance, &mut got);
            match (&expected, result) {
                (Ok(()), Ok(())) => {
                    let per_block = dtype.block_bytes();
                    for (b, (got, want)) in got.chunks(per_block).zip(want.chunks(per_block)).enumerate() {
                        let first = b * dtype.block_len();
                        let values = &values[first..first + dtype.block_len()];
                        assert_eq!(got, want, "{dtype} at {level}, block {b}: {values:?}");
                    }
                }
                (Err(want), Err(got)) => assert_eq!(got.to_string(), want.to_string(), "{dtype} at {level}"),
                (want, got) => panic!("{dtype} at {level}: {got:?}, want {want:?}"),
            }
        }
    }
}

#[test]
fn rows_of_any_number_of_blocks_have_the_bytes_of_the_simple_version() {
    let mut random = Random(7);
    for (n_rows, row_len) in [(1, 32), (3, 32), (1, 96), (5, 544), (1, 256), (2, 256), (3, 768), (2, 2304)] {
        let values = random.floats(n_rows * row_len);
        let importance: Vec<f32> = random.floats(row_len).iter().map(|v| v * v).collect();
        check(&values, row_len, None);
        check(&values, row_len, Some(&importance));
    }
}

#[test]
fn unusual_values_have_the_bytes_of_the_simple_version() {
    let mut random = Random(8);
    let mut cases = vec![vec![0.0; 512], vec![-0.0; 512], vec![3.5; 512], vec![-0.37; 512]];
    cases.extend([1e-12f32, 1e-9, 1e-30, f32::MIN_POSITIVE, f32::from_bits(1), 60000.0].map(|size| {
        let values = random.floats(512);
        values.iter().map(|v| v * size).collect::<Vec<f32>>()
    }));
    // Far from zero, few distinct values, one outlier, ties of every rounding.
    cases.push(random.floats(512).iter().map(|v| 3.0 + v * 1e-3).collect());
    cases.push(random.floats(512).iter().map(|v| -7.0 + v * 1e-6).collect());
    cases.push((0..512).map(|i| [0.5, -0.5, 0.0][i % 3]).collect());
    cases.push((0..512).map(|i| if i % 50 == 7 { 90.0 } else { -0.01 }).collect());
    cases.push((0..512).map(|i| ((i * 37) % 33) as f32 * 0.25 - 4.0).collect());
    cases.push((0..512).map(|i| if i < 256 { 0.0 } else { i as f32 }).collect());
    for values in &cases {
        check(values, 512, None);
    }
    let values = random.floats(512);
    let none = vec![0.0; 512];
    let some: Vec<f32> = (0..512).map(|i| if i % 5 == 0 { 1e30 } else { 1e-30 }).collect();
    let huge = vec![f32::MAX; 512];
    let tiny = vec![f32::from_bits(1); 512];
    for importance in [none, some, huge, tiny] {
        check(&values, 512, Some(&importance));
        check(&cases[1], 512, Some(&importance));
    }
}

#[test]
fn values_that_cannot_be_encoded_give_the_error_of_the_simple_version() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -1e9] {
        for at in [0, 300, 1023] {
            let mut values = vec![1.0; 1024];
            values[at] = bad;
            check(&values, 512, None);
        }
    }
}

#[test]
fn wrong_sizes_give_the_error_of_the_simple_version() {
    let level = Level::detect();
    let error = encode_rows(level, DType::Q4_0, &[1.0; 64], 32, None, &mut [0; 18]).unwrap_err();
    assert!(matches!(error, TensorError::ByteCount { need_bytes: 36, got_bytes: 18, .. }), "{error}");
    let error = encode_rows(level, DType::Q4_K, &[1.0; 64], 32, None, &mut [0; 36]).unwrap_err();
    assert!(matches!(error, TensorError::PartialBlocks { .. }), "{error}");
    let error = encode_rows(level, DType::IQ3_S, &[1.0; 256], 256, None, &mut [0; 110]).unwrap_err();
    assert!(matches!(error, TensorError::Unsupported { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn values_of_any_exponent_have_the_bytes_of_the_simple_version(
        highest in 90u32..256,
        bits in proptest::collection::vec(any::<u32>(), 512),
        importance in proptest::option::of(proptest::collection::vec(0f32..4.0, 256)),
    ) {
        let exponent = |bits: u32| (bits >> 23 & 0xff).min(highest) << 23;
        let values: Vec<f32> =
            bits.iter().map(|&b| f32::from_bits(b & 0x807f_ffff | exponent(b))).collect();
        check(&values, 256, importance.as_deref());
    }
}
