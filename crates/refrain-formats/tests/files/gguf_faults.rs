//! Every fault has a message with the file, the location and the numbers.

use crate::common::{llama_metadata, read, refused, small_gguf, zeroes};
use refrain_formats::gguf::{Array, Gguf, GgufFault, GgufWriter};
use refrain_tensor::{Bytes, DType, Shape};

/// A file built byte by byte.
struct Raw(Vec<u8>);

impl Raw {
    fn new(n_tensors: u64, n_entries: u64) -> Raw {
        let mut raw = Raw(b"GGUF\x03\0\0\0".to_vec());
        raw.u64(n_tensors).u64(n_entries);
        raw
    }

    fn u32(&mut self, v: u32) -> &mut Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn u64(&mut self, v: u64) -> &mut Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn bytes(&mut self, v: &[u8]) -> &mut Raw {
        self.0.extend(v);
        self
    }

    fn string(&mut self, v: &[u8]) -> &mut Raw {
        self.u64(v.len() as u64).bytes(v)
    }

    fn tensor(&mut self, name: &str, dims: &[u64], number: u32, offset: u64) -> &mut Raw {
        self.string(name.as_bytes()).u32(dims.len() as u32);
        dims.iter().for_each(|&d| {
            self.u64(d);
        });
        self.u32(number).u64(offset)
    }

    /// Appends tensor data.
    fn data(&mut self, n: usize) -> &mut Raw {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + n, 0);
        self
    }

    fn refused(&self) -> String {
        refused(read(self.0.clone()))
    }
}

#[test]
fn a_file_that_is_not_gguf_is_named_with_its_first_bytes() {
    assert_eq!(
        refused(read(b"PK\x03\x04....".to_vec())),
        "m.gguf: byte 0: not a GGUF file: it starts with \"PK\\u{3}\\u{4}\", not \"GGUF\""
    );
    assert_eq!(
        refused(read(b"GG".to_vec())),
        "m.gguf: byte 0: the file ends inside the magic number: 4 bytes needed, 2 left"
    );
}

#[test]
fn other_versions_and_big_endian_are_refused() {
    let version = |v: u32| refused(read([b"GGUF", &v.to_le_bytes()[..], &[0; 16]].concat()));
    assert_eq!(version(1), "m.gguf: byte 4: GGUF version 1 is not supported, versions 2 and 3 are");
    assert_eq!(version(4), "m.gguf: byte 4: GGUF version 4 is not supported, versions 2 and 3 are");
    assert_eq!(version(3u32.swap_bytes()), "m.gguf: byte 4: big-endian GGUF is not supported");
    let hint = |found| GgufFault::Version { found }.hint().unwrap();
    assert!(hint(1).contains("obsolete") && hint(4).contains("newer"));
    for damaged in [0, 0x4000_0000] {
        assert!(hint(damaged).contains("damaged") && !hint(damaged).contains("newer"));
    }
}

#[test]
fn absurd_counts_and_lengths_are_refused_before_allocation() {
    assert_eq!(
        Raw::new(u64::MAX, 0).refused(),
        "m.gguf: byte 8: 18446744073709551615 tensors cannot fit in the 8 bytes left (at least 24 bytes each)"
    );
    assert!(
        Raw::new(0, 1 << 40)
            .refused()
            .starts_with("m.gguf: byte 16: 1099511627776 metadata entries cannot fit")
    );
    let long_key = Raw::new(0, 1).u64(1 << 50).bytes(&[0; 64]).refused();
    assert_eq!(
        long_key,
        "m.gguf: byte 24: a metadata key of 1125899906842624 bytes, at most 65535 are allowed"
    );
    let long_string = Raw::new(0, 1).string(b"k").u32(8).u64(1 << 50).bytes(&[0; 64]).refused();
    assert_eq!(
        long_string,
        "m.gguf: key \"k\" at byte 33: the file ends inside a string: 1125899906842624 bytes needed, 64 left"
    );
    let long_array = Raw::new(0, 1).string(b"k").u32(9).u32(12).u64(u64::MAX / 8).bytes(&[0; 64]).refused();
    assert!(
        long_array.contains("2305843009213693951 array elements cannot fit in the 64 bytes left"),
        "{long_array}"
    );
}

#[test]
fn bad_metadata_values_are_refused() {
    assert!(
        Raw::new(0, 1)
            .string(b"k")
            .u32(13)
            .bytes(&[0; 9])
            .refused()
            .contains("metadata type 13 does not exist")
    );
    assert!(Raw::new(0, 1).string(b"k").u32(7).bytes(&[2]).refused().contains("a bool of value 2"));
    assert!(
        Raw::new(0, 1)
            .string(b"k")
            .u32(8)
            .string(b"a\xff")
            .refused()
            .contains("not UTF-8 (valid up to byte 1")
    );
    assert!(
        Raw::new(0, 1)
            .string(b"\xff")
            .u32(7)
            .bytes(&[1])
            .refused()
            .contains("a metadata key that is not UTF-8")
    );
    let twice = Raw::new(0, 2).string(b"k").u32(7).bytes(&[1]).string(b"k").u32(7).bytes(&[1]).refused();
    assert_eq!(twice, "m.gguf: key \"k\" appears twice");
    let mut deep = Raw::new(0, 1);
    deep.string(b"k").u32(9);
    for _ in 0..40 {
        deep.u32(9).u64(1);
    }
    assert!(deep.bytes(&[0; 64]).refused().contains("arrays nested 9 deep, at most 8 are supported"));
    let alignment = |v: u32| Raw::new(0, 1).string(b"general.alignment").u32(4).u32(v).refused();
    assert!(alignment(0).contains("alignment 0 is not a power of two"));
    assert!(alignment(48).starts_with("m.gguf: key \"general.alignment\": alignment 48"));
    assert!(alignment(1 << 31).contains("alignment 2147483648"));
}

#[test]
fn bad_tensors_are_refused_by_name() {
    let one =
        |dims: &[u64], number, offset| Raw::new(1, 0).tensor("w", dims, number, offset).data(64).refused();
    assert!(
        one(&[4], 99, 0)
            .starts_with("m.gguf: tensor \"w\": tensor type 99 is unknown, supported are F32, F16")
    );
    assert!(one(&[4], 19, 0).contains("tensor type 19 (IQ1_S) is not supported, supported are F32"));
    assert!(one(&[1, 1, 1, 1, 1], 0, 0).contains("5 dimensions, at most 4 are supported"));
    assert!(one(&[4, 0], 0, 0).contains("dimensions [4, 0] (innermost first) include a zero"));
    assert!(one(&[1 << 40, 1 << 40], 0, 0).contains("too many elements to count"));
    assert!(one(&[1 << 62], 0, 0).contains("too many elements to count"));
    assert!(one(&[33], 8, 0).contains("rows of 33 elements are not whole blocks of 32 (Q8_0)"));
    assert!(one(&[4], 0, 8).contains("offset 8 is not a multiple of the alignment 32"));
    assert_eq!(one(&[4], 0, 64), "m.gguf: tensor \"w\": bytes 128..144 lie outside the file of 128 bytes");
    assert!(one(&[4], 0, !31).contains("lie outside the file"));
    let two = |a: (&str, u64), b: (&str, u64)| {
        Raw::new(2, 0).tensor(a.0, &[16], 0, a.1).tensor(b.0, &[16], 0, b.1).data(128).refused()
    };
    assert_eq!(two(("a", 32), ("b", 0)), "m.gguf: tensor \"a\": its bytes overlap those of tensor \"b\"");
    assert_eq!(two(("a", 0), ("a", 64)), "m.gguf: tensor \"a\" appears twice");
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let bytes = small_gguf();
    for n in 0..bytes.len() {
        let error = read(bytes[..n].to_vec())
            .err()
            .unwrap_or_else(|| panic!("accepted {n} of {} bytes", bytes.len()));
        assert!(error.to_string().starts_with("m.gguf: "), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
}

#[test]
fn getters_name_the_key_and_both_types() {
    let gguf = read(small_gguf()).unwrap();
    let meta = gguf.metadata();
    assert_eq!(refused(meta.u32("llama.nope")), "m.gguf: key \"llama.nope\" is missing");
    assert_eq!(refused(meta.str("t.f64")), "m.gguf: key \"t.f64\": expected a string, found f64");
    assert_eq!(
        refused(meta.u32("general.name")),
        "m.gguf: key \"general.name\": expected an integer (u32), found string"
    );
    assert_eq!(
        refused(meta.required::<u8>("tokenizer.ggml.tokens")),
        "m.gguf: key \"tokenizer.ggml.tokens\": expected an integer (u8), found array of strings"
    );
    assert_eq!(meta.optional::<u32>("llama.nope").unwrap(), None);
    assert_eq!(refused(gguf.tensor("nope")), "m.gguf: tensor \"nope\" is missing");
}

#[test]
fn long_names_are_shortened_in_messages() {
    let gguf = read(small_gguf()).unwrap();
    let message = refused(gguf.tensor(&"ü\n".repeat(5000)));
    assert!(message.len() < 400 && !message.contains('\n'), "{message}");
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut w = llama_metadata();
    let shape = Shape::from([2, 32]);
    assert!(w.set("general.name", "again").is_err());
    assert!(w.set("general.alignment", 12u32).is_err());
    assert!(w.tensor("u8", DType::U8, shape, zeroes(DType::U8, shape)).is_err());
    assert!(w.tensor("short", DType::F32, shape, Bytes::new(vec![0; 4])).is_err());
    assert!(w.tensor("odd", DType::Q8_0, Shape::from([32, 2]), Bytes::new(vec![0; 68])).is_err());
    assert!(w.tensor("zero", DType::F32, Shape::from([0]), Bytes::new(vec![])).is_err());
    assert!(w.tensor("rank", DType::F32, Shape::from([1; 5]), Bytes::new(vec![0; 4])).is_err());
    w.tensor("same", DType::F32, shape, zeroes(DType::F32, shape)).unwrap();
    assert!(w.tensor("same", DType::F32, shape, zeroes(DType::F32, shape)).is_err());
    let mut nested = Array::U8([].into());
    for _ in 0..8 {
        nested = Array::Array([nested].into());
    }
    assert!(w.set("deep", nested).is_err());
    assert!(read(w.to_vec()).is_ok());
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no such folder").join("w.gguf");
    let error = GgufWriter::new().write(&path).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot create {}", path.display()));
    assert_eq!(error.hint().as_deref(), Some("create the folder first, or choose another path"));
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("taken");
    std::fs::create_dir(&path).unwrap();
    assert!(llama_metadata().write(&path).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn an_empty_file_says_so() {
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(refused(Gguf::open(file.path())).ends_with("is empty (0 bytes)"));
    assert!(refused(Gguf::open(std::env::temp_dir())).ends_with("is not a regular file"));
}
