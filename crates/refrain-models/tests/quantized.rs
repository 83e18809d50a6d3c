//! Folders with quantised weights, written and decoded by the formats' own libraries (`tools/quantized_goldens.py`).

mod common;

use common::{golden, logits, relative_error};
use refrain_cpu::CpuBackend;
use refrain_engine::{BackendRunner, Core, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_graph::WeightId;
use refrain_models::Model;
use refrain_tensor::{DType, HostTensor};
use safetensors::SafeTensors;
use std::sync::Arc;

/// Name, and what the projections become.
const CASES: [(&str, DType); 16] = [
    ("fp8-block", DType::F32),
    ("fp8-odd", DType::F32),
    ("fp8-tensor", DType::F32),
    ("ct-fp8-channel", DType::F32),
    ("ct-fp8-tensor", DType::F32),
    ("ct-int4", DType::Q4_0),
    ("ct-int4-zeros", DType::Q4_1),
    ("ct-int4-order", DType::F32),
    ("ct-int8", DType::Q8_0),
    ("ct-mixed", DType::Q8_0),
    ("ct-mxfp4", DType::MXFP4),
    ("awq", DType::Q4_1),
    ("gptq", DType::Q4_0),
    ("gptq-order", DType::F32),
    ("gptq-zeros", DType::Q4_1),
    ("gptq-int8", DType::Q8_0),
];

fn case(name: &str) -> String {
    format!("quantized/{name}")
}

fn open(name: &str) -> ModelFiles {
    ModelFiles::open(common::folder(&case(name))).unwrap()
}

/// What the library decodes `blk.0.ffn_down.weight` to.
fn decoded(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(common::folder(&case(name)).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("decoded").unwrap();
    data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn all_logits(model: Model, tokens: &[u32]) -> Vec<f32> {
    let options = RunnerOptions {
        context: 64,
        kv_block: 32,
        kv_dtype: DType::F32,
        max_tokens: 64,
        ..Default::default()
    };
    let runner = BackendRunner::new(CpuBackend::new(2).unwrap(), Arc::new(model), options).unwrap();
    logits(&mut Core::new(Box::new(runner), 64), tokens)
}

/// The same model with all weights decoded.
fn in_f32(model: &Model) -> Model {
    let decode = |(idx, tensor): (usize, &HostTensor)| {
        let values = tensor.to_f32().unwrap();
        (WeightId::from_idx(idx), HostTensor::from_f32(tensor.shape(), &values).unwrap())
    };
    model.with_values(model.tensors().iter().enumerate().map(decode).collect::<Vec<_>>()).unwrap()
}

#[test]
fn weights_decode_to_what_the_library_of_their_format_decodes() {
    for (name, dtype) in CASES {
        let model = Model::load(&open(name)).unwrap();
        let at = model.weights().iter().position(|weight| weight.name == "blk.0.ffn_down.weight").unwrap();
        let (got, want) = (model.tensors()[at].to_f32().unwrap(), decoded(name));
        assert_eq!(model.tensors()[at].dtype(), dtype, "{name}");
        if dtype == DType::Q4_1 {
            // The value of code 0 is rounded to F16.
            let largest = want.iter().fold(0_f32, |most, value| most.max(value.abs()));
            let allowed = 2.0 * largest * 2f32.powi(-11);
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= allowed), "{name}");
            assert_ne!(got, want, "{name}: nothing was rounded, so the comparison can be exact");
        } else {
            assert_eq!(got, want, "{name}");
        }
    }
}

#[test]
fn logits_agree_with_transformers() {
    for (name, dtype) in CASES {
        let (golden, model) = (golden(&case(name)), Model::load(&open(name)).unwrap());
        let error = relative_error(&all_logits(in_f32(&model), &golden.tokens), &golden.logits);
        let most = if dtype == DType::Q4_1 { 5e-3 } else { 1e-4 };
        assert!(error < most, "{name}: relative error {error:.2e} with decoded weights");
        // Products with blocks round activations to eight bits.
        let error = relative_error(&all_logits(model, &golden.tokens), &golden.logits);
        let most = if dtype == DType::F32 { 1e-4 } else { 5e-2 };
        assert!(error < most, "{name}: relative error {error:.2e}");
    }
}

#[test]
fn a_folder_says_what_its_weights_become() {
    let told = |name: &str| {
        let ModelFiles::Hf(folder) = open(name) else { panic!("not a folder") };
        let told = folder.quantized().unwrap().clone();
        assert_eq!(told.n_weights, 7, "{name}");
        let sizes = (told.file_bytes, told.memory_bytes);
        (told.stored_as, sizes, told.dtypes)
    };
    let n_elements = 64 * 64 * 2 + 16 * 64 * 2 + 3 * 64 * 96;
    assert_eq!(
        told("fp8-block"),
        ("fp8 in blocks of 32x32".into(), (n_elements + 4 * 30, 4 * n_elements), vec![DType::F32])
    );
    let blocks = 18 * n_elements / 32;
    assert_eq!(
        told("ct-int4"),
        (
            "compressed-tensors int4 in groups of 32".into(),
            (n_elements / 2 + 2 * n_elements / 32 + 7 * 16, blocks),
            vec![DType::Q4_0]
        )
    );
    let (stored_as, _, dtypes) = told("ct-mixed");
    assert_eq!(stored_as, "compressed-tensors int4 in groups of 32 and int8 in groups of 32");
    assert_eq!(dtypes, [DType::Q8_0, DType::Q4_0]);
    assert_eq!(told("awq").0, "AWQ int4 in groups of 32");
    assert_eq!(told("gptq-int8").0, "GPTQ int8 with a scale for each row");
}
