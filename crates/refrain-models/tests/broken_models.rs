//! Files whose tensors do not match their architecture: messages use the tensor names of the files at hand.

mod common;

use common::folder;
use common::gguf::{Tensor, convert};
use refrain_formats::ModelFiles;
use refrain_models::{Model, ModelError};
use refrain_tensor::DType;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use std::path::Path;

fn find<'t>(tensors: &'t mut [Tensor], name: &str) -> &'t mut Tensor {
    tensors.iter_mut().find(|t| t.name == name).unwrap()
}

/// The `llama` golden as a folder, with tensors changed by `change`.
fn folder_with(
    at: &Path,
    change: impl for<'t> Fn(&str, TensorView<'t>) -> Option<TensorView<'t>>,
) -> Result<Model, ModelError> {
    let bytes = std::fs::read(folder("llama").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors =
        file.tensors().into_iter().filter_map(|(name, view)| change(&name, view).map(|view| (name, view)));
    std::fs::write(at.join("model.safetensors"), serialize(tensors, None).unwrap()).unwrap();
    std::fs::copy(folder("llama").join("config.json"), at.join("config.json")).unwrap();
    Model::load(&ModelFiles::open(at).unwrap())
}

#[test]
fn a_missing_tensor_is_reported_by_its_name_in_the_files() {
    let files = convert("llama", |tensors| tensors.retain(|t| t.name != "blk.1.ffn_up.weight"));
    let error = Model::load(&files).unwrap_err();
    let text = "the model has no tensor \"blk.1.ffn_up.weight\", which a llama model of 2 layers needs";
    assert_eq!(error.to_string(), text);

    let at = tempfile::tempdir().unwrap();
    let missing = "model.layers.1.mlp.up_proj.weight";
    let error = folder_with(at.path(), |name, view| (name != missing).then_some(view)).unwrap_err();
    let text = format!("the model has no tensor {missing:?}, which a llama model of 2 layers needs");
    assert_eq!(error.to_string(), text);
    assert!(error.hint().is_some_and(|hint| hint.contains("again")));
}

#[test]
fn a_tensor_of_another_shape_is_refused_with_both_shapes() {
    let files = convert("llama", |tensors| {
        let up = find(tensors, "blk.0.ffn_up.weight");
        up.dims = vec![48, 64];
        up.bytes.truncate(48 * 64 * 4);
    });
    let error = Model::load(&files).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor \"blk.0.ffn_up.weight\" has shape [48, 64], the model's hyperparameters require [96, 64]"
    );

    let at = tempfile::tempdir().unwrap();
    let error = folder_with(at.path(), |name, view| match name {
        "model.norm.weight" => Some(TensorView::new(Dtype::F32, vec![8, 8], view.data()).unwrap()),
        _ => Some(view),
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, ModelError::TensorShape { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "tensor \"model.norm.weight\" has shape [8, 8], the model's hyperparameters require [64]"
    );
}

#[test]
fn an_integer_weight_is_refused() {
    let files = convert("qwen3", |tensors| find(tensors, "blk.1.attn_k_norm.weight").dtype = DType::I32);
    let error = Model::load(&files).unwrap_err();
    assert!(matches!(&error, ModelError::TensorType { dtype: DType::I32, .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "tensor \"blk.1.attn_k_norm.weight\" has type I32, which is not a valid type for weights"
    );

    let at = tempfile::tempdir().unwrap();
    let error = folder_with(at.path(), |name, view| match name {
        "lm_head.weight" => Some(TensorView::new(Dtype::I32, vec![128, 64], view.data()).unwrap()),
        _ => Some(view),
    });
    assert_eq!(
        error.unwrap_err().to_string(),
        "tensor \"lm_head.weight\" has type I32, which is not a valid type for weights"
    );
}
