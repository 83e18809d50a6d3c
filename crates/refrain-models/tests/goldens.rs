//! Logits of small random models against those of `transformers`, recorded by `tools/goldens.py`.

mod common;

use common::{CASES, folder, golden, logits, relative_error};
use refrain_engine::Core;
use refrain_formats::ModelFiles;
use refrain_tensor::DType;
use std::path::PathBuf;

fn engine(path: PathBuf, max_tokens: usize, kv_dtype: DType, n_threads: usize) -> Core {
    common::engine(&ModelFiles::open(path).unwrap(), max_tokens, kv_dtype, n_threads)
}

#[test]
fn logits_of_every_architecture_agree_with_transformers() {
    for case in CASES {
        let golden = golden(case);
        let got = logits(&mut engine(folder(case), 64, DType::F32, 2), &golden.tokens);
        let error = relative_error(&got, &golden.logits);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
    }
}

#[test]
fn a_config_in_the_old_format_gives_the_same_model() {
    for case in CASES {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(folder(case).join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        std::fs::copy(folder(case).join("config-v4.json"), copy.path().join("config.json")).unwrap();
        let golden = golden(case);
        let got = logits(&mut engine(copy.path().into(), 64, DType::F32, 1), &golden.tokens);
        let error = relative_error(&got, &golden.logits);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
    }
}

#[test]
fn chunks_and_threads_do_not_change_any_bit() {
    for case in CASES {
        let golden = golden(case);
        let whole = logits(&mut engine(folder(case), 64, DType::F32, 1), &golden.tokens);
        for (max_tokens, n_threads) in [(1, 1), (7, 2), (64, 4)] {
            let pieces = logits(&mut engine(folder(case), max_tokens, DType::F32, n_threads), &golden.tokens);
            let same = whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{case}: chunks of {max_tokens} tokens on {n_threads} threads differ");
        }
    }
}

#[test]
fn a_cache_in_half_precision_stays_close() {
    for case in CASES {
        let golden = golden(case);
        // BF16 has three fewer mantissa bits.
        for (dtype, most) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            let got = logits(&mut engine(folder(case), 64, dtype, 2), &golden.tokens);
            let error = relative_error(&got, &golden.logits);
            assert!(error < most, "{case} in {dtype}: relative error {error:.2e}");
        }
    }
}
