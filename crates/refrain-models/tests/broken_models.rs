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
    folder_of("llama", at, change)
}

/// The same for any golden.
fn folder_of(
    case: &str,
    at: &Path,
    change: impl for<'t> Fn(&str, TensorView<'t>) -> Option<TensorView<'t>>,
) -> Result<Model, ModelError> {
    let bytes = std::fs::read(folder(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors =
        file.tensors().into_iter().filter_map(|(name, view)| change(&name, view).map(|view| (name, view)));
    std::fs::write(at.join("model.safetensors"), serialize(tensors, None).unwrap()).unwrap();
    std::fs::copy(folder(case).join("config.json"), at.join("config.json")).unwrap();
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

/// Cuts experts off the end of a tensor, or repeats the first ones.
fn resize(tensor: &mut Tensor, n_experts: usize) {
    let each = tensor.bytes.len() / tensor.dims[0];
    tensor.bytes = tensor.bytes.iter().copied().cycle().take(each * n_experts).collect();
    tensor.dims[0] = n_experts;
}

#[test]
fn experts_of_a_gguf_file_that_are_not_as_many_as_declared_are_refused_with_both_shapes() {
    let refusal = |case: &str, change: &dyn Fn(&mut Vec<Tensor>)| {
        Model::load(&convert(case, |tensors| change(tensors))).unwrap_err().to_string()
    };
    // Experts are declared in the metadata; the router and the matrices each must agree with it.
    for (name, n, want) in [
        ("blk.1.ffn_up_exps.weight", 11, "[11, 40, 64], the model's hyperparameters require [12, 40, 64]"),
        ("blk.0.ffn_gate_inp.weight", 13, "[13, 64], the model's hyperparameters require [12, 64]"),
        ("blk.0.ffn_down_exps.weight", 13, "[13, 64, 40], the model's hyperparameters require [12, 64, 40]"),
    ] {
        let message = refusal("qwen3moe", &|tensors| resize(find(tensors, name), n));
        assert_eq!(message, format!("tensor {name:?} has shape {want}"));
    }
    let message = refusal("qwen3moe", &|tensors| {
        let gate = find(tensors, "blk.0.ffn_gate_exps.weight");
        gate.dims.swap(1, 2);
    });
    assert!(message.contains("has shape [12, 64, 40], the model's hyperparameters require [12, 40, 64]"));
    let message = refusal("gpt-oss", &|tensors| resize(find(tensors, "blk.2.ffn_up_exps.bias"), 4));
    assert_eq!(
        message,
        "tensor \"blk.2.ffn_up_exps.bias\" has shape [4, 33], the model's hyperparameters require [5, 33]"
    );
    let message = refusal("qwen35moe", &|tensors| {
        tensors.retain(|t| t.name != "blk.0.ffn_up_shexp.weight");
    });
    assert!(message.starts_with("the model has no tensor \"blk.0.ffn_up_shexp.weight\""), "{message}");
    let message = refusal("qwen35moe", &|tensors| resize(find(tensors, "blk.1.ffn_gate_shexp.weight"), 20));
    assert!(
        message.contains("has shape [20, 48], the model's hyperparameters require [28, 48]"),
        "{message}"
    );
}

#[test]
fn experts_of_a_folder_that_differ_in_shape_or_number_are_refused_by_name() {
    let expert = |n: usize| format!("model.layers.1.mlp.experts.{n}.up_proj.weight");
    let refusal = |case: &str, change: &dyn for<'t> Fn(&str, TensorView<'t>) -> Option<TensorView<'t>>| {
        let at = tempfile::tempdir().unwrap();
        folder_of(case, at.path(), change).unwrap_err().to_string()
    };
    let (third, last) = (expert(3), expert(11));
    let message = refusal("qwen3moe", &|name, view| match name == third {
        true => Some(TensorView::new(Dtype::F32, vec![20, 128], view.data()).unwrap()),
        false => Some(view),
    });
    let want = format!("tensor {third:?} has shape [20, 128], the model's hyperparameters require [40, 64]");
    assert_eq!(message, want);
    let message = refusal("qwen3moe", &|name, view| (name != last).then_some(view));
    assert!(message.starts_with(&format!("the model has no tensor {last:?}")), "{message}");
    let message = refusal("qwen3moe", &|name, view| match name == third {
        true => {
            let half = &view.data()[..view.data().len() / 2];
            let half: &'static [u8] = Vec::leak(half.to_vec());
            Some(TensorView::new(Dtype::BF16, vec![40, 64], half).unwrap())
        }
        false => Some(view),
    });
    assert_eq!(
        message,
        format!("tensor {third:?} has type BF16, the first expert of its layer has type F32")
    );
    let message = refusal("qwen3moe", &|name, view| match name {
        "model.layers.0.mlp.gate.weight" => {
            Some(TensorView::new(Dtype::F32, vec![16, 48], view.data()).unwrap())
        }
        _ => Some(view),
    });
    assert!(
        message.contains("has shape [16, 48], the model's hyperparameters require [12, 64]"),
        "{message}"
    );
    let message = refusal("qwen35moe-joined", &|name, view| match name {
        "model.layers.0.mlp.experts.down_proj" => {
            Some(TensorView::new(Dtype::F32, vec![4, 20, 48], view.data()).unwrap())
        }
        _ => Some(view),
    });
    assert!(message.contains("has shape [4, 20, 48], the model's hyperparameters require [4, 48, 20]"));
    let message = refusal("gpt-oss-mxfp4", &|name, view| {
        (name != "model.layers.1.mlp.experts.down_proj_scales").then_some(view)
    });
    assert!(message.contains("no tensor \"model.layers.1.mlp.experts.down_proj_scales\""), "{message}");
}
