//! Hugging Face folders.

use crate::common::{llama_config, open, refused, write_safetensors};
use refrain_formats::ModelFiles;
use refrain_formats::hf::HfFolder;
use refrain_tensor::{DType, Shape};
use serde_json::json;
use std::fs;
use std::path::Path;
use tempfile::{TempDir, tempdir};

/// A folder with a configuration but no weights.
fn folder() -> TempDir {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("config.json"), llama_config().to_string()).unwrap();
    folder
}

fn one_file(folder: &Path) {
    write_safetensors(&folder.join("model.safetensors"), &[("a", &[2, 3]), ("b", &[4])]);
}

/// Returns a file with a header and a number of bytes of data.
fn raw_safetensors(folder: &Path, header: &str, n_data: usize) {
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; n_data]].concat();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

fn refused_here(folder: &TempDir) -> String {
    refused(HfFolder::open(folder.path())).replace(&folder.path().display().to_string(), "DIR")
}

#[test]
fn a_single_weight_file_is_read() {
    let folder = folder();
    one_file(folder.path());
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let ModelFiles::Hf(model) = open(folder.path()).unwrap() else { panic!("not a folder") };
    let tensor = model.tensor("a").unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, Shape::from([2, 3])));
    assert_eq!(model.tensors().len(), 2);
    assert!(
        model.tokenizer().is_some() && model.tokenizer_config().is_none() && model.chat_template().is_none()
    );
    assert!(model.generation_config().is_none());
    assert_eq!(model.config().required::<usize>("hidden_size").unwrap(), 64);
    assert!(refused(model.tensor("c")).ends_with("tensor \"c\" is missing"));
    assert!(matches!(open(&folder.path().join("config.json")), Ok(ModelFiles::Hf(_))));
}

#[test]
fn shards_are_found_through_the_index() {
    let folder = folder();
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    write_safetensors(&folder.path().join(one), &[("a", &[2, 3])]);
    write_safetensors(&folder.path().join(two), &[("b", &[4])]);
    let index = |map: serde_json::Value| {
        let index = json!({ "metadata": { "total_size": 40 }, "weight_map": map });
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    };
    assert_eq!(refused_here(&folder), "DIR: 2 *.safetensors files without model.safetensors.index.json");
    index(json!({ "a": one, "b": two }));
    let model = HfFolder::open(folder.path()).unwrap();
    assert_eq!(model.file_of(model.tensor_info("b").unwrap()), folder.path().join(two));
    assert_eq!(model.tensor("b").unwrap().shape(), Shape::from([4]));

    index(json!({ "a": one, "b": "model-00003-of-00003.safetensors" }));
    assert_eq!(
        refused_here(&folder),
        "DIR/model.safetensors.index.json: names \"model-00003-of-00003.safetensors\" for tensor \"b\", \
         but that file does not exist"
    );
    index(json!({ "a": two, "b": two }));
    assert_eq!(
        refused_here(&folder),
        "DIR/model.safetensors.index.json: names \"model-00002-of-00002.safetensors\" for tensor \"a\", but that \
         file does not contain it"
    );
    for outside in ["../x.safetensors", "/etc/passwd", "..", ""] {
        index(json!({ "a": outside }));
        assert!(refused_here(&folder).ends_with("but that is not a plain file name"), "{outside}");
    }
    write_safetensors(&folder.path().join(two), &[("a", &[4])]);
    index(json!({ "a": one, "b": two }));
    assert!(refused_here(&folder).contains("tensor \"a\" is in this file and in"));
}

#[test]
fn a_single_weight_file_may_have_any_name() {
    let folder = folder();
    write_safetensors(&folder.path().join("weights.safetensors"), &[("a", &[2])]);
    assert!(HfFolder::open(folder.path()).unwrap().has_tensor("a"));
}

#[test]
fn missing_parts_of_a_folder_are_named() {
    let folder = folder();
    assert!(refused_here(&folder).starts_with("DIR: no weights: looked for model.safetensors, "));
    fs::write(folder.path().join("pytorch_model.bin"), "x").unwrap();
    assert_eq!(refused_here(&folder), "DIR: no weights in safetensors, only \"pytorch_model.bin\"");
    one_file(folder.path());
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert_eq!(refused_here(&folder), "DIR: no config.json in this folder");
}

#[test]
fn broken_json_is_refused_with_line_and_column() {
    let folder = folder();
    one_file(folder.path());
    let config = |text: &str| {
        fs::write(folder.path().join("config.json"), text).unwrap();
        refused_here(&folder)
    };
    let message = config("{\n  \"hidden_size\": 64,\n  oops\n}");
    assert_eq!(message, "DIR/config.json: invalid JSON: key must be a string at line 3 column 3");
    assert_eq!(config("[1]"), "DIR/config.json: expected a JSON object, found an array");
    assert_eq!(config(""), "DIR/config.json is empty (0 bytes)");
    assert!(config(&"[".repeat(100_000)).contains("recursion limit exceeded"));
}

#[test]
fn broken_safetensors_are_refused() {
    let folder = folder();
    let file = folder.path().join("model.safetensors");
    let raw = |header: &str, n_data| {
        raw_safetensors(folder.path(), header, n_data);
        refused_here(&folder)
    };
    let f32s =
        |shape: &str, end| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
    assert_eq!(
        raw(&f32s("[2,3]", 24), 16),
        "DIR/model.safetensors: the header describes 24 bytes of tensors, the file holds 16"
    );
    assert!(raw(&f32s("[2,4]", 24), 24).contains("invalid safetensors header"), "a shape that lies");
    assert!(raw("{", 0).contains("invalid safetensors header: EOF while parsing"));
    assert!(
        raw(r#"{"a":{"dtype":"F99","shape":[],"data_offsets":[0,0]}}"#, 0).contains("unknown variant `F99`")
    );
    assert!(
        raw(&f32s("[1,1,1,1,1,1,1]", 4), 4).ends_with("tensor \"a\": 7 dimensions, at most 6 are supported")
    );
    fs::write(&file, [0xff; 100]).unwrap();
    assert!(
        refused_here(&folder)
            .ends_with("of 18446744073709551615 bytes does not fit in the file of 100 bytes")
    );
    fs::write(&file, [1, 2]).unwrap();
    assert!(refused_here(&folder).contains("2 bytes cannot be a safetensors file"));
    fs::write(&file, []).unwrap();
    assert!(refused_here(&folder).ends_with("is empty (0 bytes)"));
}

#[test]
fn an_unsupported_dtype_fails_only_when_it_is_used() {
    let folder = folder();
    let header = r#"{"f8":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},"u8":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    raw_safetensors(folder.path(), header, 8);
    let model = HfFolder::open(folder.path()).unwrap();
    assert!(model.tensor("u8").is_ok());
    let message = refused(model.tensor("f8"));
    assert!(message.contains("tensor \"f8\": dtype F8_E4M3 is not supported, F32, F16"), "{message}");
}

#[test]
fn unaligned_tensors_are_copied() {
    let folder = folder();
    let header = r#"{"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#;
    raw_safetensors(folder.path(), header, 9);
    let tensor = HfFolder::open(folder.path()).unwrap().tensor("f").unwrap();
    assert_eq!(bytemuck::try_cast_slice::<u8, f32>(tensor.bytes().as_slice()).unwrap(), [0.0; 2]);
}
