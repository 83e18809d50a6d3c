//! Gemma 4 only: multimodal folders, and layers that attend to another layer's keys and values.

mod common;

use common::{engine, folder, golden, logits, relative_error};
use refrain_formats::ModelFiles;
use refrain_models::{Head, KvSpec, Model, StepSpec};
use refrain_tensor::DType;
use safetensors::{SafeTensors, serialize};

/// The `gemma4-e2b` golden as the text part of a multimodal folder.
fn multimodal() -> tempfile::TempDir {
    let (at, from) = (tempfile::tempdir().unwrap(), folder("gemma4-e2b"));
    let text: serde_json::Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    let config = serde_json::json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "text_config": text, "vision_config": { "hidden_size": 8 }, "audio_config": { "hidden_size": 8 }
    });
    std::fs::write(at.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let inner = |name: String| name.replacen("model.", "model.language_model.", 1);
    let tensors = file.tensors().into_iter().map(|(name, view)| (inner(name), view));
    std::fs::write(at.path().join("model.safetensors"), serialize(tensors, None).unwrap()).unwrap();
    at
}

#[test]
fn the_text_part_of_a_multimodal_folder_has_the_logits_of_the_text_model() {
    let (at, golden) = (multimodal(), golden("gemma4-e2b"));
    let files = ModelFiles::open(at.path()).unwrap();
    assert_eq!(files.config().unwrap().left_out, ["images", "sound"]);
    let got = logits(&mut engine(&files, 64, DType::F32, 2), &golden.tokens);
    assert!(relative_error(&got, &golden.logits) < 1e-4);
}

#[test]
fn layers_that_share_keys_have_no_cache_and_no_key_matrices() {
    let model = Model::load(&ModelFiles::open(folder("gemma4-e2b")).unwrap()).unwrap();
    let kv = KvSpec { n_blocks: 2, kv_block: 32, max_blocks: 2, n_slots: 0, dtype: DType::F32 };
    let caches: Vec<(String, Vec<usize>)> = model
        .states(&kv)
        .iter()
        .filter(|state| state.name.ends_with("k_cache"))
        .map(|state| (state.name.clone(), state.ty.shape.dims().to_vec()))
        .collect();
    let cache = |layer: usize, head_dim| (format!("blk.{layer}.k_cache"), vec![2, 1, 32, head_dim]);
    assert_eq!(caches, [cache(0, 16), cache(1, 16), cache(2, 32), cache(3, 16), cache(4, 32)]);
    assert!(!model.weights().iter().any(|w| w.name == "blk.5.attn_k.weight"));
    model.graph(&StepSpec::of_one(3, 1, Head::Logits), &kv).unwrap();
}
