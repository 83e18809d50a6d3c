//! The golden models as GGUF files: other names, adjacent rotary pairs, norm weights with one added.

mod common;

use common::gguf::{Tensor, convert};
use common::{CASES, engine, gguf, golden, logits, relative_error};
use refrain_formats::ModelFiles;
use refrain_models::Model;
use refrain_tensor::DType;
use refrain_tensor::quant::dequantize;

#[test]
fn a_model_converted_to_gguf_has_the_same_logits() {
    for case in CASES {
        let golden = golden(case);
        let files = gguf::convert(case, |_| {});
        let got = logits(&mut engine(&files, 64, DType::F32, 2), &golden.tokens);
        let error = relative_error(&got, &golden.logits);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
    }
}

#[test]
fn a_wrong_row_order_of_queries_is_detected() {
    let golden = golden("llama");
    let files = gguf::convert("llama", |tensors| {
        // Swap two rows of one head.
        let q = tensors.iter_mut().find(|t| t.name == "blk.0.attn_q.weight").unwrap();
        let row = q.dims[1] * 4;
        let (a, b) = q.bytes[row..].split_at_mut(row);
        a[..row].swap_with_slice(&mut b[..row]);
    });
    let got = logits(&mut engine(&files, 64, DType::F32, 1), &golden.tokens);
    assert!(relative_error(&got, &golden.logits) > 1e-2);
}

/// The packed experts are multiplied with activations of eight bits, so the exact comparison is of decoded ones.
#[test]
fn experts_in_mxfp4_are_the_same_in_a_folder_and_in_a_gguf_file() {
    let case = "gpt-oss-mxfp4";
    let golden = golden(case);
    let decoded = gguf::convert(case, |tensors| {
        for t in tensors.iter_mut().filter(|t| t.dtype == DType::MXFP4) {
            let mut values = vec![0.0; t.dims.iter().product()];
            dequantize(t.dtype, &t.bytes, &mut values).unwrap();
            (t.dtype, t.bytes) = (DType::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
    });
    let got = logits(&mut engine(&decoded, 64, DType::F32, 2), &golden.tokens);
    let error = relative_error(&got, &golden.logits);
    assert!(error < 1e-4, "decoded: relative error {error:.2e}");

    let files = [ModelFiles::open(common::folder(case)).unwrap(), gguf::convert(case, |_| {})];
    let [folder, file] = files.each_ref().map(|files| Model::load(files).unwrap());
    let packed = folder.weights().iter().filter(|w| w.ty.dtype == DType::MXFP4).count();
    assert_eq!(packed, 3 * 2, "three matrices in each of two layers");
    for ((w, a), b) in folder.weights().iter().zip(folder.tensors()).zip(file.tensors()) {
        assert!(a.dtype() == b.dtype() && a.bytes().as_slice() == b.bytes().as_slice(), "{}", w.name);
    }
    let both = files.each_ref().map(|files| logits(&mut engine(files, 64, DType::F32, 2), &golden.tokens));
    assert_eq!(both[0], both[1]);
    let error = relative_error(&both[0], &golden.logits);
    assert!(error < 3e-2, "packed: relative error {error:.2e}");
}

#[test]
fn joined_gate_and_up_tensors_of_experts_give_the_same_logits() {
    for case in ["gpt-oss", "gpt-oss-mxfp4", "qwen3moe", "qwen35moe"] {
        let golden = golden(case);
        let joined = convert(case, |tensors| {
            for kind in ["weight", "bias"] {
                let gates: Vec<_> = tensors
                    .iter()
                    .filter(|t| t.name.contains("ffn_gate_exps.") && t.name.ends_with(kind))
                    .cloned()
                    .collect();
                for gate in gates {
                    let up_name = gate.name.replace("ffn_gate_exps", "ffn_up_exps");
                    let up = tensors.iter().find(|t| t.name == up_name).unwrap().clone();
                    tensors.retain(|t| t.name != gate.name && t.name != up_name);
                    let each = gate.bytes.len() / gate.dims[0];
                    let pairs = gate.bytes.chunks(each).zip(up.bytes.chunks(each));
                    let bytes = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
                    let mut dims = gate.dims.clone();
                    dims[1] *= 2;
                    let name = gate.name.replace("ffn_gate_exps", "ffn_gate_up_exps");
                    tensors.push(Tensor { name, dtype: gate.dtype, dims, bytes });
                }
            }
            assert!(tensors.iter().any(|t| t.name == "blk.0.ffn_gate_up_exps.weight"), "{case}");
        });
        let error =
            relative_error(&logits(&mut engine(&joined, 64, DType::F32, 2), &golden.tokens), &golden.logits);
        let most = if case == "gpt-oss-mxfp4" { 3e-2 } else { 1e-4 };
        assert!(error < most, "{case}: relative error {error:.2e}");
    }
}
