//! Models split over several files.

use crate::common::{llama_metadata, open, refused, zeroes};
use refrain_formats::gguf::{Gguf, GgufWriter};
use refrain_tensor::{Bytes, DType, Shape};
use std::path::{Path, PathBuf};

fn part_path(folder: &Path, no: u16, count: u16) -> PathBuf {
    folder.join(format!("tiny-{:05}-of-{count:05}.gguf", no + 1))
}

fn part(no: u16, count: u16, n_tensors: i32, name: &str) -> GgufWriter {
    let mut w = if no == 0 { llama_metadata() } else { GgufWriter::new() };
    w.set("split.no", no).unwrap().set("split.count", count).unwrap();
    w.set("split.tensors.count", n_tensors).unwrap();
    let shape = Shape::from([usize::from(no) + 1, 4]);
    w.tensor(name, DType::F32, shape, zeroes(DType::F32, shape)).unwrap();
    w
}

fn three_parts(folder: &Path) {
    for no in 0..3 {
        part(no, 3, 3, &format!("w{no}")).write(part_path(folder, no, 3)).unwrap();
    }
}

#[test]
fn any_part_opens_all() {
    let folder = tempfile::tempdir().unwrap();
    three_parts(folder.path());
    for no in 0..3 {
        let gguf = Gguf::open(part_path(folder.path(), no, 3)).unwrap();
        assert_eq!(gguf.metadata().str("general.name").unwrap(), "Tiny");
        assert_eq!(gguf.path(), part_path(folder.path(), 0, 3));
        assert_eq!(gguf.files().len(), 3);
        let names: Vec<_> = gguf.tensors().iter().map(|t| t.name()).collect();
        assert_eq!(names, ["w0", "w1", "w2"]);
        assert_eq!(gguf.tensor("w2").unwrap().shape(), Shape::from([3, 4]));
        let info = gguf.tensor_info("w1").unwrap();
        assert_eq!(gguf.file_of(info), part_path(folder.path(), 1, 3));
    }
    assert_eq!(open(folder.path()).unwrap().tensors().len(), 3, "the folder holds one model");
}

#[test]
fn a_missing_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    three_parts(folder.path());
    let gone = part_path(folder.path(), 1, 3);
    std::fs::remove_file(&gone).unwrap();
    let message = refused(Gguf::open(part_path(folder.path(), 0, 3)));
    assert_eq!(message, format!("{}: part 2 of 3 is missing", gone.display()));
}

#[test]
fn the_error_of_a_renamed_part_names_the_original() {
    let folder = tempfile::tempdir().unwrap();
    three_parts(folder.path());
    let renamed = folder.path().join("model.gguf");
    std::fs::rename(part_path(folder.path(), 1, 3), &renamed).unwrap();
    let message = refused(Gguf::open(&renamed));
    assert!(
        message.ends_with("this is part 2 of 3, but the name does not end in -00002-of-00003.gguf"),
        "{message}"
    );
}

#[test]
fn parts_of_different_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    three_parts(folder.path());
    std::fs::copy(part_path(folder.path(), 2, 3), part_path(folder.path(), 1, 3)).unwrap();
    let message = refused(Gguf::open(part_path(folder.path(), 0, 3)));
    assert!(message.ends_with("claims to be part 3 of 3, expected part 2 of 3"), "{message}");

    part(1, 3, 3, "w0").write(part_path(folder.path(), 1, 3)).unwrap();
    let message = refused(Gguf::open(part_path(folder.path(), 0, 3)));
    assert!(message.ends_with("tensor \"w0\" appears twice"), "{message}");

    part(0, 3, 7, "w0").write(part_path(folder.path(), 0, 3)).unwrap();
    part(1, 3, 7, "w1").write(part_path(folder.path(), 1, 3)).unwrap();
    let message = refused(Gguf::open(part_path(folder.path(), 1, 3)));
    assert!(message.ends_with("the parts hold 3 tensors in total, split.tensors.count is 7"), "{message}");
}

#[test]
fn one_part_in_memory_is_refused() {
    let bytes = Bytes::new(part(0, 3, 3, "w0").to_vec());
    let message = Gguf::from_bytes(bytes).err().unwrap().to_string();
    assert!(message.contains("one part of a model split into 3"), "{message}");
}
