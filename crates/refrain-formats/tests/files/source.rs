//! Opening of models by path.

use crate::common::{open, refused, small_gguf};
use refrain_formats::{FormatError, ModelFiles};
use std::fs;
use tempfile::tempdir;

#[test]
fn a_gguf_file_opens_under_any_name() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.bin");
    fs::write(&path, small_gguf()).unwrap();
    let model = open(&path).unwrap();
    assert!(matches!(model, ModelFiles::Gguf(_)));
    assert_eq!((model.path(), model.files().len()), (path.as_path(), 1));
    assert!(model.has_tensor("output_norm.weight") && model.tensor("output_norm.weight").is_ok());
    assert_eq!(model.config().unwrap().n_layers, 2);
    assert_eq!(model.generation_defaults().unwrap().eos, [1]);
    model.prefetch();
}

#[test]
fn a_folder_with_one_gguf_opens_and_several_are_listed() {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("a.gguf"), small_gguf()).unwrap();
    fs::write(folder.path().join("README.md"), "x").unwrap();
    assert!(matches!(open(folder.path()), Ok(ModelFiles::Gguf(_))));
    fs::write(folder.path().join("b.gguf"), small_gguf()).unwrap();
    let message = refused(open(folder.path()));
    assert_eq!(message, format!("{} holds 2 models: a.gguf, b.gguf", folder.path().display()));
    let hint = open(folder.path()).err().unwrap().hint().unwrap();
    assert!(hint.ends_with("a.gguf"), "{hint}");
}

#[test]
fn the_error_of_a_folder_without_a_model_lists_expected_files() {
    let folder = tempdir().unwrap();
    let message = refused(open(folder.path()));
    assert!(
        message.ends_with("looked for config.json with model.safetensors, and for *.gguf; found nothing")
    );
    for i in 0..20 {
        fs::write(folder.path().join(format!("{i:02}.txt")), "x").unwrap();
    }
    let message = refused(open(folder.path()));
    assert!(
        message.ends_with("found 00.txt, 01.txt, 02.txt, 03.txt, 04.txt, 05.txt, 06.txt, 07.txt and 12 more")
    );
}

#[test]
fn other_file_types_are_recognised() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("f");
    for (bytes, hint) in [
        (&b"PK\x03\x04rest"[..], "zip archive"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"tjgg....", "predecessor of GGUF"),
        (b"hello", "use a .gguf file"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = open(&path).err().unwrap();
        assert!(matches!(error, FormatError::NotAModel { .. }), "{error}");
        assert!(error.hint().unwrap().contains(hint), "{error}");
    }
    fs::write(&path, "").unwrap();
    assert!(refused(open(&path)).ends_with("is empty (0 bytes)"));
    fs::write(&path, "GGU").unwrap();
    assert!(refused(open(&path)).contains("the file ends inside the magic number"));
    assert!(refused(open(&folder.path().join("none"))).starts_with("cannot open "));
}

#[test]
fn missing_read_permission_has_a_hint_with_the_command() {
    // Constructed, because root may read everything and tests often run as root.
    let source = std::io::ErrorKind::PermissionDenied.into();
    let error = FormatError::Io { verb: "open", path: "m.gguf".into(), source };
    assert_eq!(error.to_string(), "cannot open m.gguf");
    assert_eq!(error.hint().unwrap(), "give yourself read permission: chmod u+r m.gguf");
}

#[cfg(unix)]
#[test]
fn pipes_and_devices_are_refused_without_waiting() {
    assert_eq!(refused(open(std::path::Path::new("/dev/null"))), "/dev/null is not a regular file");
}
