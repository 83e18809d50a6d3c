//! Reading of GGUF files.

use crate::common::{llama_metadata, read, small_gguf, use_all, zeroes};
use refrain_formats::gguf::{Array, Gguf, GgufWriter, MetadataValue, StrArray};
use refrain_tensor::{Bytes, DType, Shape};
use std::borrow::Cow;

fn fixture() -> Gguf {
    Gguf::open(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/every_type.gguf")).unwrap()
}

#[test]
fn metadata_of_every_type_from_the_python_package_is_read() {
    let gguf = fixture();
    let meta = gguf.metadata();
    assert_eq!(gguf.version(), 3);
    assert_eq!(meta.get("t.u8"), Some(&MetadataValue::U8(200)));
    assert_eq!(meta.get("t.i8"), Some(&MetadataValue::I8(-100)));
    assert_eq!(meta.get("t.u16"), Some(&MetadataValue::U16(60000)));
    assert_eq!(meta.get("t.i16"), Some(&MetadataValue::I16(-30000)));
    assert_eq!(meta.get("t.u32"), Some(&MetadataValue::U32(4_000_000_000)));
    assert_eq!(meta.get("t.i32"), Some(&MetadataValue::I32(-2_000_000_000)));
    assert_eq!(meta.get("t.f32"), Some(&MetadataValue::F32(0.5)));
    assert_eq!(meta.get("t.bool"), Some(&MetadataValue::Bool(true)));
    assert_eq!(meta.str("t.string").unwrap(), "grüß dich, 世界");
    assert_eq!(meta.get("t.u64"), Some(&MetadataValue::U64(18_000_000_000_000_000_000)));
    assert_eq!(meta.get("t.i64"), Some(&MetadataValue::I64(-9_000_000_000_000_000_000)));
    assert_eq!(meta.get("t.f64"), Some(&MetadataValue::F64(0.1)));
    assert_eq!(*meta.i32s("a.i32").unwrap(), [1, -2, 3]);
    assert_eq!(*meta.f32s("a.f32").unwrap(), [0.25, -0.5]);
    assert_eq!(meta.required::<&[bool]>("a.bool").unwrap(), [true, false, true]);
    let strings = meta.strings("a.string").unwrap();
    assert_eq!(strings.iter().collect::<Vec<_>>(), ["", "a", "ü", "two words"]);
    assert_eq!((strings.get(2), strings.get(4)), (Some("ü"), None));
    let Array::Array(nested) = meta.array("a.nested").unwrap() else { panic!("not nested") };
    assert_eq!(nested[2], Array::I32([4, 5, 6].into()));
    assert_eq!(meta.get("t.none"), None);
}

#[test]
fn tensors_of_every_type_from_the_python_package_are_read() {
    let gguf = fixture();
    let tensor = gguf.tensor("x.f32").unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, Shape::from([2, 3])));
    assert_eq!(bytemuck::cast_slice::<u8, f32>(tensor.bytes().as_slice()), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(gguf.tensor("x.f16").unwrap().shape(), Shape::from([3, 2]));
    assert_eq!(gguf.tensor("x.rank4").unwrap().shape(), Shape::from([2, 3, 2, 2]));
    let ints = gguf.tensor("x.i64").unwrap();
    assert_eq!(bytemuck::cast_slice::<u8, i64>(ints.bytes().as_slice()), [-2, -1, 0, 1]);
    let mut n_raw = 0;
    for dtype in DType::ALL {
        let Ok(tensor) = gguf.tensor(&format!("x.{dtype}")) else { continue };
        n_raw += 1;
        assert_eq!(tensor.dtype(), dtype);
        assert_eq!(tensor.shape().dims()[0], 2);
        let data = tensor.bytes().as_slice();
        assert!(
            data.iter().enumerate().all(|(i, &b)| usize::from(b) == (i * 7 + 1) % 251),
            "{dtype}: {data:?}"
        );
    }
    assert_eq!(n_raw, 19, "BF16 and eighteen quantised types are in the fixture");
    use_all(&gguf);
}

#[test]
fn integers_convert_between_widths_when_they_fit() {
    let gguf = fixture();
    let meta = gguf.metadata();
    assert_eq!(meta.u64("t.u8").unwrap(), 200);
    assert_eq!(meta.required::<i64>("t.i8").unwrap(), -100);
    assert_eq!(meta.required::<usize>("t.u16").unwrap(), 60000);
    assert_eq!(meta.f64("t.f32").unwrap(), 0.5);
    assert_eq!(meta.f32("t.u8").unwrap(), 200.0);
    assert_eq!(meta.required::<Cow<'_, [i64]>>("a.i32").unwrap().into_owned(), [1, -2, 3]);
    assert!(meta.required::<Cow<'_, [u32]>>("a.i32").is_err());
    assert!(meta.u32("t.i8").is_err());
    assert!(meta.i32("t.u32").is_err());
    assert!(meta.bool("t.u8").is_err());
}

#[test]
fn written_files_round_trip() {
    let mut w = GgufWriter::new();
    let values: Vec<(&str, MetadataValue)> = vec![
        ("u8", 1u8.into()),
        ("i8", (-1i8).into()),
        ("u16", 2u16.into()),
        ("i16", (-2i16).into()),
        ("u32", 3u32.into()),
        ("i32", (-3i32).into()),
        ("f32", 1.5f32.into()),
        ("bool", false.into()),
        ("string", "ß".into()),
        ("u64", u64::MAX.into()),
        ("i64", i64::MIN.into()),
        ("f64", 2.5f64.into()),
        ("a.u8", Array::U8([1].into()).into()),
        ("a.i8", Array::I8([-1].into()).into()),
        ("a.u16", Array::U16([2].into()).into()),
        ("a.i16", Array::I16([-2].into()).into()),
        ("a.u32", Array::U32([3].into()).into()),
        ("a.i32", Array::I32([].into()).into()),
        ("a.f32", Array::F32([0.5].into()).into()),
        ("a.bool", Array::Bool([true].into()).into()),
        ("a.string", ["", "y"].iter().collect::<StrArray>().into()),
        ("a.u64", Array::U64([u64::MAX].into()).into()),
        ("a.i64", Array::I64([i64::MIN].into()).into()),
        ("a.f64", Array::F64([0.25].into()).into()),
        ("a.a", Array::Array([Array::Array([Array::U8([9].into())].into())].into()).into()),
        ("general.alignment", 64u32.into()),
    ];
    for (key, value) in &values {
        w.set(key, value.clone()).unwrap();
    }
    let data: Vec<u8> = (0..68).collect();
    w.tensor("one", DType::Q8_0, Shape::from([2, 32]), Bytes::new(data.clone())).unwrap();
    w.tensor("two", DType::I32, Shape::from([3]), zeroes(DType::I32, Shape::from([3]))).unwrap();

    let gguf = read(w.to_vec()).unwrap();
    let found: Vec<_> = gguf.metadata().iter().map(|(k, v)| (k, v.clone())).collect();
    assert_eq!(found, values);
    assert_eq!(gguf.tensor("one").unwrap().bytes().as_slice(), data);
    assert!(gguf.tensors().iter().all(|t| t.offset().is_multiple_of(64)));

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.gguf");
    w.write(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), w.to_vec());
    let mapped = Gguf::open(&path).unwrap();
    mapped.prefetch();
    assert_eq!(mapped.tensor("one").unwrap().bytes().as_slice(), data);
    assert_eq!(mapped.file_of(mapped.tensor_info("two").unwrap()), path);
}

#[test]
fn a_tensor_outlives_the_file_object() {
    let tensor = fixture().tensor("x.f32").unwrap();
    assert_eq!(tensor.bytes().as_slice().len(), 24);
}

#[test]
fn version_2_is_read_like_version_3() {
    let mut bytes = small_gguf();
    bytes[4] = 2;
    let gguf = read(bytes).unwrap();
    assert_eq!(gguf.version(), 2);
    use_all(&gguf);
}

#[test]
fn bytes_at_an_odd_address_are_read_with_aligned_tensors() {
    let mut shifted = vec![0u8];
    shifted.extend(small_gguf());
    let n = shifted.len();
    let gguf = Gguf::from_bytes(Bytes::new(shifted).slice(1..n).unwrap()).unwrap();
    let norm = gguf.tensor("output_norm.weight").unwrap();
    assert_eq!(bytemuck::try_cast_slice::<u8, f32>(norm.bytes().as_slice()).unwrap(), [0.0; 32]);
}

#[test]
fn a_vocabulary_without_tensors_is_a_valid_file() {
    let gguf = read(llama_metadata().to_vec()).unwrap();
    assert_eq!(gguf.tensors().len(), 0);
    assert_eq!(gguf.metadata().strings("tokenizer.ggml.tokens").unwrap().len(), 4);
}

#[test]
fn a_large_vocabulary_opens_fast() {
    let mut w = llama_metadata();
    w.set("big", (0..262_144).map(|i| format!("token {i}")).collect::<StrArray>()).unwrap();
    let bytes = Bytes::new(w.to_vec());
    let start = std::time::Instant::now();
    let gguf = Gguf::from_bytes(bytes).unwrap();
    // It takes a few milliseconds; the limit only catches a copy per string or worse.
    assert!(start.elapsed().as_millis() < 100, "{:?}", start.elapsed());
    assert_eq!(gguf.metadata().strings("big").unwrap().get(262_143), Some("token 262143"));
}
