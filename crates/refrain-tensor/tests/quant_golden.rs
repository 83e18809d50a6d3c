//! Compares decoding and encoding with the `gguf` package, bit for bit. tools/quant_goldens.py generates the data.

use refrain_tensor::DType;
use refrain_tensor::quant::{can_encode, dequantize, quantize, quantize_weighted};
use safetensors::SafeTensors;

static DATA: &[u8] = include_bytes!("data/quant.safetensors");

/// Types with a decoder.
fn codecs() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| d.is_float() || d.is_quantized())
}

const ENCODED: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::MXFP4,
];

fn golden_bytes<'a>(file: &SafeTensors<'a>, name: &str) -> &'a [u8] {
    file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data()
}

fn golden_f32(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    golden_bytes(file, name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn every_type_decodes_to_the_bits_of_the_gguf_package() {
    let file = SafeTensors::deserialize(DATA).unwrap();
    for dtype in codecs() {
        let blocks = golden_bytes(&file, &format!("{dtype}.blocks"));
        let expected = golden_f32(&file, &format!("{dtype}.values"));
        assert!(expected.len() >= 20 * dtype.block_len(), "{dtype}: too few blocks");
        let mut got = vec![f32::NAN; expected.len()];
        dequantize(dtype, blocks, &mut got).unwrap();
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got.to_bits(), expected.to_bits(), "{dtype} element {i}: {got} is not {expected}");
        }
    }
}

#[test]
fn simple_types_encode_to_the_bytes_of_the_gguf_package() {
    let file = SafeTensors::deserialize(DATA).unwrap();
    let values = golden_f32(&file, "encode.values");
    for dtype in ENCODED {
        let expected = golden_bytes(&file, &format!("encode.{dtype}"));
        let mut got = vec![0xaa; expected.len()];
        quantize(dtype, &values, &mut got).unwrap();
        let bytes_of_32 = dtype.bytes_for(32).unwrap();
        for (b, (got, expected)) in got.chunks(bytes_of_32).zip(expected.chunks(bytes_of_32)).enumerate() {
            assert_eq!(got, expected, "{dtype} block {b} of {:?}", &values[32 * b..32 * b + 32]);
        }
    }
}

#[test]
fn the_golden_file_names_its_generator() {
    let (_, header) = SafeTensors::read_metadata(DATA).unwrap();
    let made_by = &header.metadata().as_ref().unwrap()["made_by"];
    assert!(made_by.contains("gguf "), "{made_by}");
}

#[test]
fn every_f16_and_bf16_pattern_decodes_to_its_value() {
    for bits in 0..=u16::MAX {
        let mut got = [0.0];
        dequantize(DType::BF16, &bits.to_le_bytes(), &mut got).unwrap();
        assert_eq!(got[0].to_bits(), u32::from(bits) << 16);

        dequantize(DType::F16, &bits.to_le_bytes(), &mut got).unwrap();
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let mantissa = f64::from(bits & 0x3ff);
        let expected = match i32::from(bits >> 10 & 0x1f) {
            0 => sign * mantissa * 2f64.powi(-24),
            31 if mantissa == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            exponent => sign * (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        assert!(
            got[0].to_bits() == (expected as f32).to_bits() || got[0].is_nan() && expected.is_nan(),
            "{bits:04x}: {} is not {expected}",
            got[0]
        );
    }
}

/// Made by tools/quant_roundtrip.py: blocks of `refrain quantize` and their values according to the `gguf` package.
static ROUND_TRIP: &[u8] = include_bytes!("data/roundtrip.safetensors");

#[test]
fn searched_blocks_mean_the_same_to_the_gguf_package() {
    let file = SafeTensors::deserialize(ROUND_TRIP).unwrap();
    let (values, importance) = (golden_f32(&file, "values"), golden_f32(&file, "importance"));
    let types: Vec<DType> = DType::ALL.into_iter().filter(|&d| d.is_quantized() && can_encode(d)).collect();
    assert_eq!(types.len(), 13);
    for dtype in types {
        for (suffix, importance) in [("blocks", None), ("weighted", Some(&importance[..]))] {
            let expected = golden_bytes(&file, &format!("{dtype}.{suffix}"));
            let mut blocks = vec![0xaa; expected.len()];
            quantize_weighted(dtype, &values, 512, importance, &mut blocks).unwrap();
            assert!(
                blocks == expected,
                "{dtype} {suffix}: run tools/quant_roundtrip.py if the search changed"
            );
        }
        let mut decoded = vec![f32::NAN; values.len()];
        dequantize(dtype, golden_bytes(&file, &format!("{dtype}.blocks")), &mut decoded).unwrap();
        let expected = golden_f32(&file, &format!("{dtype}.values"));
        assert!(decoded.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype}");
    }
}
