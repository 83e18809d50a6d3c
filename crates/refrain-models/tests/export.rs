//! Models written to files and read again have the same logits in every format.

mod common;

use common::{CASES, engine, folder, gguf, golden, logits, relative_error};
use refrain_formats::ModelFiles;
use refrain_formats::tokenizer::{TokenizerForm, VocabSpec};
use refrain_models::Model;
use refrain_tensor::{DType, HostTensor, Shape};
use std::path::Path;

/// A vocabulary of bytes and one end-of-text token, at most as large as the golden models' own.
fn vocabulary() -> VocabSpec {
    let letters: Vec<String> = ('!'..='~').map(String::from).collect();
    let tokens = letters.iter().map(String::as_str).chain(["<|endoftext|>"]);
    let mut types = vec![1; letters.len()];
    types.push(3);
    VocabSpec {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: tokens.collect(),
        token_types: Some(types),
        merges: Some(["a b", "c d"].iter().filter(|_| false).collect()),
        ..VocabSpec::default()
    }
}

fn all_logits(files: &ModelFiles, tokens: &[u32]) -> Vec<f32> {
    logits(&mut engine(files, 64, DType::F32, 2), tokens)
}

/// As a GGUF file and as a folder.
fn exported(model: &Model, at: &Path, dtype: DType) -> Vec<ModelFiles> {
    let gguf = at.join(format!("model-{}.gguf", dtype.name()));
    model.write_gguf(&gguf, dtype, &vocabulary()).unwrap();
    let mut files = vec![ModelFiles::open(gguf).unwrap()];
    let hf = at.join(format!("hf-{}", dtype.name()));
    std::fs::create_dir(&hf).unwrap();
    match model.write_hf(&hf, dtype) {
        Ok(()) => files.push(ModelFiles::open(hf).unwrap()),
        // Refused, not written in part.
        Err(refused) => assert_eq!(model.config().arch.name(), "qwen35moe", "{refused}"),
    }
    files
}

#[test]
fn a_folder_written_in_both_formats_has_the_same_logits() {
    for case in CASES {
        let golden = golden(case);
        let at = tempfile::tempdir().unwrap();
        let model = Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap();
        // Unscaled attention scores amplify the rounding of weights, and a rounded router may choose other experts.
        let rounded = match case {
            "qwen35moe" => 1e-1,
            "gpt-oss" => 6e-2,
            _ if case.starts_with("gemma4") => 6e-2,
            _ => 3e-2,
        };
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, rounded)] {
            for files in exported(&model, at.path(), dtype) {
                let error = relative_error(&all_logits(&files, &golden.tokens), &golden.logits);
                assert!(
                    error < tolerance,
                    "{case} as {}: relative error {error:.2e}",
                    files.path().display()
                );
            }
        }
    }
}

#[test]
fn a_gguf_file_written_in_both_formats_has_the_same_logits() {
    // config.json cannot represent Llama 3's frequency table, and llama.cpp's keys cannot represent YaRN.
    let experts = ["qwen3moe", "qwen3moe-plain", "gemma4-experts", "gpt-oss"];
    let recurrent = ["qwen35", "qwen35-odd", "lfm2"];
    let plain = ["llama", "llama-tied", "mistral-window", "qwen2", "qwen3", "gemma3"];
    for case in plain.into_iter().chain(experts).chain(recurrent) {
        let golden = golden(case);
        let at = tempfile::tempdir().unwrap();
        let model = Model::load(&gguf::convert(case, |_| {})).unwrap();
        for files in exported(&model, at.path(), DType::F32) {
            let error = relative_error(&all_logits(&files, &golden.tokens), &golden.logits);
            assert!(error < 1e-4, "{case} as {}: relative error {error:.2e}", files.path().display());
        }
    }
    let model = Model::load(&gguf::convert("llama-rope3", |_| {})).unwrap();
    let at = tempfile::tempdir().unwrap();
    let error = model.write_hf(at.path(), DType::F32).unwrap_err();
    assert!(error.to_string().contains("rotary frequencies") && error.hint().is_some(), "{error}");
    assert_eq!(std::fs::read_dir(at.path()).unwrap().count(), 0);
    let gguf = at.path().join("model.gguf");
    model.write_gguf(&gguf, DType::F32, &vocabulary()).unwrap();
    let golden = golden("llama-rope3");
    let error = relative_error(&all_logits(&ModelFiles::open(gguf).unwrap(), &golden.tokens), &golden.logits);
    assert!(error < 1e-4, "{error}");
}

#[test]
fn replaced_values_are_written() {
    let model = Model::load(&ModelFiles::open(folder("qwen3")).unwrap()).unwrap();
    let (idx, weight) =
        model.weights().iter().enumerate().find(|(_, w)| w.name == "output_norm.weight").unwrap();
    let (id, n) = (refrain_graph::WeightId::from_idx(idx), weight.ty.shape.n_elements());
    let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let changed =
        model.with_values([(id, HostTensor::from_f32(Shape::from([n]), &values).unwrap())]).unwrap();
    let at = tempfile::tempdir().unwrap();
    for files in exported(&changed, at.path(), DType::F32) {
        let name =
            if files.has_tensor("model.norm.weight") { "model.norm.weight" } else { "output_norm.weight" };
        assert_eq!(files.tensor(name).unwrap().to_f32().unwrap(), values);
    }
    let wrong = HostTensor::from_f32(Shape::from([n - 1]), &values[1..]).unwrap();
    let error = model.with_values([(id, wrong)]).unwrap_err();
    assert!(error.to_string().contains("output_norm.weight"), "{error}");
}

#[test]
fn a_gguf_vocabulary_is_padded_to_the_rows_of_the_embedding() {
    let at = tempfile::tempdir().unwrap();
    let model = Model::load(&ModelFiles::open(folder("llama")).unwrap()).unwrap();
    let files = exported(&model, at.path(), DType::F32);
    let ModelFiles::Gguf(gguf) = &files[0] else { panic!("a GGUF file") };
    let spec = VocabSpec::from_gguf(gguf.metadata()).unwrap();
    assert_eq!(spec.tokens.len(), model.config().n_vocab);
    let n = vocabulary().tokens.len();
    assert_eq!(spec.tokens.get(n), Some(format!("[PAD{n}]").as_str()));
    let form = TokenizerForm::Vocab(Box::new(spec));
    assert_eq!(form.build().unwrap().vocab_size(), model.config().n_vocab);
}
