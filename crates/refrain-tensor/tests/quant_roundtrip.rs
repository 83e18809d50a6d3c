//! Guarantees of the encoders: a bounded error, and an error value for input that they cannot encode.

use proptest::prelude::*;
use refrain_tensor::quant::{
    Block, BlockQ4K, BlockQ5K, can_encode, dequantize, quantize, quantize_weighted, unpack_scales_and_mins,
};
use refrain_tensor::{Bytes, DType, HostTensor, Layout, Shape, TensorError};

/// Types with a decoder and an encoder.
fn codecs() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|&d| can_encode(d))
}

const INTEGERS: [DType; 4] = [DType::I32, DType::U32, DType::I64, DType::U8];

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xaa; dtype.bytes_for(values.len()).unwrap()];
    quantize(dtype, values, &mut bytes).unwrap();
    bytes
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    dequantize(dtype, bytes, &mut values).unwrap();
    values
}

fn round_trip(dtype: DType, values: &[f32]) -> Vec<f32> {
    decode(dtype, &encode(dtype, values))
}

/// Root mean square of the error and of the values.
fn rms(values: &[f32], decoded: &[f32]) -> (f64, f64) {
    let mean = |sum: f64| (sum / values.len() as f64).sqrt();
    let error = values.iter().zip(decoded).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    (mean(error), mean(values.iter().map(|&v| f64::from(v).powi(2)).sum()))
}

/// Normally distributed values from a fixed seed.
fn normal(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 + 0.5) / (1u64 << 31) as f64
    };
    (0..n)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect()
}

/// Bound on the error of one element relative to the largest magnitude of its block, for types with evenly spaced
/// levels: half a step, or a whole step where the highest positive level is missing, plus the rounding of f16
/// scales.
fn element_bound(dtype: DType) -> Option<f32> {
    match dtype {
        DType::F32 => Some(0.0),
        DType::F16 => Some(0.5 / 1024.0),
        DType::BF16 => Some(0.5 / 128.0),
        DType::Q4_0 => Some(1.0 / 8.0 + 0.001),
        DType::Q4_1 => Some(2.0 / 15.0 / 2.0 + 0.002),
        DType::Q5_0 => Some(1.0 / 16.0 + 0.001),
        DType::Q5_1 => Some(2.0 / 31.0 / 2.0 + 0.002),
        DType::Q8_0 => Some(1.0 / 127.0 / 2.0 + 0.001),
        _ => None,
    }
}

/// Bound on the root mean square error of a block relative to its largest magnitude, for any values.
fn block_bound(dtype: DType) -> Option<f64> {
    match dtype {
        DType::Q2_K => Some(0.25),
        DType::Q3_K => Some(0.15),
        DType::Q4_K => Some(0.06),
        DType::Q5_K => Some(0.035),
        DType::Q6_K => Some(0.02),
        DType::IQ4_NL => Some(0.09),
        DType::IQ4_XS => Some(0.09),
        // Values between 6 and 8 steps are clipped to 6.
        DType::MXFP4 => Some(0.25),
        _ => None,
    }
}

/// Values of one magnitude, with zeros, outliers, common offsets and repeated values.
fn any_values(n: usize) -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        6 => -1.0f32..1.0,
        1 => Just(0.0f32),
        1 => prop_oneof![Just(1.0f32), Just(-1.0)],
        1 => -0.01f32..0.01,
    ];
    let shift = prop_oneof![3 => Just(0.0f32), 1 => -3.0f32..3.0];
    // Not smaller, so that scales stay above the f16 subnormals, which have little precision.
    let magnitude = (-2i32..4).prop_map(|e| 10f32.powi(e));
    (proptest::collection::vec(value, n), shift, magnitude)
        .prop_map(|(values, shift, magnitude)| values.into_iter().map(|v| (v + shift) * magnitude).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_round_trip_stays_within_the_bound_of_the_type(values in any_values(512)) {
        for dtype in codecs() {
            let decoded = round_trip(dtype, &values);
            let block_len = dtype.block_len();
            for (values, decoded) in values.chunks(block_len).zip(decoded.chunks(block_len)) {
                let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
                if let Some(bound) = element_bound(dtype) {
                    for (v, d) in values.iter().zip(decoded) {
                        // In addition to the relative bound, f16 has a minimum step.
                        let bound = largest * bound + if dtype == DType::F16 { 3e-8 } else { 0.0 };
                        prop_assert!((v - d).abs() <= bound, "{dtype}: {v} came back as {d}, largest {largest}");
                    }
                }
                if let Some(bound) = block_bound(dtype) {
                    let (error, _) = rms(values, decoded);
                    prop_assert!(error <= f64::from(largest) * bound, "{dtype}: error {error}, largest {largest}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_encoded_independently(values in any_values(512)) {
        for dtype in codecs() {
            let halves = [encode(dtype, &values[..256]), encode(dtype, &values[256..])].concat();
            prop_assert_eq!(encode(dtype, &values), halves, "{}", dtype);
        }
    }

    #[test]
    fn only_matching_lengths_are_accepted(n in 0usize..1100, n_bytes in 0usize..1300) {
        for dtype in codecs() {
            let mut values = vec![0.0; n];
            let mut bytes = vec![0; n_bytes];
            let fits = dtype.bytes_for(n) == Some(n_bytes);
            for result in [dequantize(dtype, &bytes, &mut values), quantize(dtype, &values, &mut bytes)] {
                match result {
                    Ok(()) => prop_assert!(fits),
                    Err(TensorError::PartialBlocks { .. }) => prop_assert!(!n.is_multiple_of(dtype.block_len())),
                    Err(TensorError::ByteCount { need_bytes, got_bytes, .. }) => {
                        prop_assert_eq!((Some(need_bytes), got_bytes), (dtype.bytes_for(n), n_bytes));
                        prop_assert!(!fits);
                    }
                    Err(e) => prop_assert!(false, "{e}"),
                }
            }
        }
    }

    #[test]
    fn values_of_any_exponent_are_encoded_or_rejected(
        highest in 0u32..256,
        bits in proptest::collection::vec(any::<u32>(), 256),
    ) {
        // Exponent fields up to `highest`, so that every magnitude is covered; 255 is infinity and NaN.
        let exponent = |bits: u32| (bits >> 23 & 0xff).min(highest) << 23;
        let values: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b & 0x807f_ffff | exponent(b))).collect();
        for dtype in codecs() {
            let mut bytes = vec![0; dtype.bytes_for(256).unwrap()];
            match quantize(dtype, &values, &mut bytes) {
                Ok(()) => prop_assert!(decode(dtype, &bytes).iter().all(|v| v.is_finite())),
                Err(TensorError::NotFinite { index, .. }) => prop_assert!(!values[index].is_finite()),
                Err(TensorError::OutOfRange { index, .. }) => prop_assert!(values[index].abs() > 65504.0),
                Err(e) => prop_assert!(false, "{e}"),
            }
        }
    }
}

#[test]
fn normal_values_keep_the_precision_that_their_bits_allow() {
    // Relative to the root mean square of the values; about 3 % above the encoders' actual error.
    let limits = [
        (DType::Q8_0, 0.0055),
        (DType::Q6_K, 0.0176),
        (DType::Q5_K, 0.0359),
        (DType::Q5_1, 0.0388),
        (DType::Q5_0, 0.0438),
        (DType::Q4_K, 0.0717),
        (DType::IQ4_NL, 0.0750),
        (DType::IQ4_XS, 0.0756),
        (DType::Q4_1, 0.0798),
        (DType::Q4_0, 0.0880),
        (DType::MXFP4, 0.1180),
        (DType::Q3_K, 0.1470),
        (DType::Q2_K, 0.2665),
    ];
    let values = normal(64 * 256);
    for (dtype, limit) in limits {
        let (error, size) = rms(&values, &round_trip(dtype, &values));
        assert!(error <= size * limit, "{dtype}: {:.4}, limit {limit}", error / size);
    }
}

#[test]
fn zeros_and_constants_survive_a_round_trip() {
    // MXFP4 has no scale with which its levels reach any constant.
    for dtype in codecs().filter(|&d| d != DType::MXFP4) {
        assert!(round_trip(dtype, &[0.0; 256]).iter().all(|&v| v == 0.0), "{dtype}");
        for constant in [1.0, -1.0, 0.37, -250.0] {
            for v in round_trip(dtype, &[constant; 256]) {
                assert!(
                    (v - constant).abs() <= constant.abs() * 0.005,
                    "{dtype}: {constant} came back as {v}"
                );
            }
        }
    }
}

#[test]
fn values_below_the_smallest_scale_become_zero() {
    // MXFP4 has the exponents of F32: no value is below its scales.
    for dtype in codecs().filter(|&d| d.is_quantized() && d != DType::MXFP4) {
        for tiny in [1e-12, f32::MIN_POSITIVE, f32::from_bits(1)] {
            let values: Vec<f32> = (0..256).map(|i| if i % 3 == 0 { -tiny } else { tiny }).collect();
            assert!(round_trip(dtype, &values).iter().all(|&v| v == 0.0), "{dtype} {tiny}");
        }
    }
}

#[test]
fn values_that_are_not_finite_are_rejected_with_their_index() {
    for dtype in codecs() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 512];
            values[300] = bad;
            let mut bytes = vec![0; dtype.bytes_for(512).unwrap()];
            let error = quantize(dtype, &values, &mut bytes).unwrap_err();
            assert!(matches!(error, TensorError::NotFinite { index: 300, .. }), "{dtype}: {error}");
        }
    }
    let error = quantize(DType::Q4_0, &[f32::NAN; 32], &mut [0; 18]).unwrap_err();
    assert_eq!(error.to_string(), "element 0 is NaN; only finite values can be encoded as Q4_0");
}

#[test]
fn values_too_large_for_the_scale_are_rejected_with_their_index() {
    // MXFP4 has the exponents of F32, and clips.
    for dtype in codecs().filter(|d| ![DType::F32, DType::MXFP4].contains(d)) {
        let mut values = vec![1.0; 512];
        values[300] = -f32::MAX;
        let mut bytes = vec![0; dtype.bytes_for(512).unwrap()];
        let error = quantize(dtype, &values, &mut bytes).unwrap_err();
        assert!(matches!(error, TensorError::OutOfRange { index: 300, .. }), "{dtype}: {error}");
    }
    let error = quantize(DType::F16, &[65536.0], &mut [0; 2]).unwrap_err();
    assert_eq!(error.to_string(), "element 0 is 6.5536e4, too large for F16");
}

#[test]
fn integers_are_neither_decoded_nor_encoded() {
    for dtype in INTEGERS {
        let mut bytes = vec![0; dtype.block_bytes()];
        let error = dequantize(dtype, &bytes, &mut [0.0]).unwrap_err();
        assert_eq!(error.to_string(), format!("{dtype} cannot be decoded to F32"));
        let error = quantize(dtype, &[0.0], &mut bytes).unwrap_err();
        assert_eq!(error.to_string(), format!("{dtype} cannot be encoded from F32"));
        let tensor = HostTensor::new(dtype, Shape::from([1]), Bytes::new(bytes)).unwrap();
        assert!(matches!(tensor.to_f32(), Err(TensorError::Unsupported { .. })));
    }
}

#[test]
fn the_types_that_are_only_decoded_say_so() {
    let types = [DType::IQ2_XXS, DType::IQ2_XS, DType::IQ2_S, DType::IQ3_XXS, DType::IQ3_S];
    assert!(DType::ALL.into_iter().filter(|d| d.is_quantized()).all(|d| can_encode(d) != types.contains(&d)));
    for dtype in types {
        let error = quantize(dtype, &[0.0; 256], &mut vec![0; dtype.block_bytes()]).unwrap_err();
        assert_eq!(error.to_string(), format!("{dtype} cannot be encoded from F32"));
    }
}

#[test]
fn a_broadcast_view_larger_than_memory_is_an_error() {
    let tensor = HostTensor::from_f32(Shape::from([1]), &[1.0]).unwrap();
    let huge = Layout::contiguous(tensor.shape()).broadcast_to(Shape::from([usize::MAX / 2])).unwrap();
    let error = tensor.with_layout(huge).unwrap().to_f32().unwrap_err();
    assert_eq!(error, TensorError::NoMemory { n_elements: usize::MAX / 2 });
}

#[test]
fn other_crates_can_read_the_scales_of_a_block() {
    let values: Vec<f32> = normal(256);
    let q4 = BlockQ4K::encode(values.as_array().unwrap()).unwrap();
    let (scales, mins) = unpack_scales_and_mins(&q4.scales);
    assert!(scales.iter().chain(&mins).all(|&s| s < 64));
    assert_eq!(scales.iter().max(), Some(&63));
    let decoded = q4.decode();
    let first = q4.d.to_f32() * f32::from(scales[0]) * f32::from(q4.qs[0] & 15);
    assert_eq!(decoded[0], first - q4.dmin.to_f32() * f32::from(mins[0]));
    assert_eq!(BlockQ5K::DTYPE, DType::Q5_K);
}

#[test]
fn importance_moves_the_error_to_columns_that_matter_less() {
    const ROW: usize = 512;
    let values = normal(16 * ROW);
    let importance: Vec<f32> = (0..ROW).map(|i| if i % 5 == 0 { 25.0 } else { 1.0 }).collect();
    let error = |bytes: &[u8], dtype| -> f64 {
        let decoded = decode(dtype, bytes);
        let terms = values.iter().zip(&decoded).enumerate();
        terms
            .map(|(i, (&a, &b))| f64::from(importance[i % ROW]) * (f64::from(a) - f64::from(b)).powi(2))
            .sum()
    };
    for dtype in codecs().filter(|dtype| dtype.is_quantized() && *dtype != DType::Q8_0) {
        let encode = |importance: Option<&[f32]>| {
            let mut bytes = vec![0; dtype.bytes_for(values.len()).unwrap()];
            quantize_weighted(dtype, &values, ROW, importance, &mut bytes).unwrap();
            bytes
        };
        let (with, without) = (error(&encode(Some(&importance)), dtype), error(&encode(None), dtype));
        // A power of two leaves little to choose.
        let most = if dtype == DType::MXFP4 { 1.0 } else { 0.97 };
        assert!(with < most * without, "{dtype}: {with} with importance, {without} without");
        // A row by itself has the same bytes.
        let mut row = vec![0; dtype.bytes_for(ROW).unwrap()];
        quantize_weighted(dtype, &values[ROW..2 * ROW], ROW, Some(&importance), &mut row).unwrap();
        assert_eq!(&encode(Some(&importance))[row.len()..2 * row.len()], &row[..], "{dtype}");
    }
}
