//! The golden models as GGUF files: other names, adjacent rotary pairs, norm weights with one added.

mod common;

use common::{CASES, engine, gguf, golden, logits, relative_error};
use refrain_tensor::DType;

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
