//! Logits of small random models against those of `transformers`, which `tools/goldens.py` recorded.

use refrain_cpu::CpuBackend;
use refrain_engine::{BackendRunner, Engine, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_models::Model;
use refrain_tensor::DType;
use safetensors::SafeTensors;
use std::path::PathBuf;
use std::sync::Arc;

const CASES: [&str; 9] = [
    "llama",
    "llama-rope3",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "gemma3",
    "gemma3-linear",
];

struct Golden {
    tokens: Vec<u32>,
    logits: Vec<f32>, // [n_tokens, vocab]
}

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case)
}

fn golden(case: &str) -> Golden {
    let bytes = std::fs::read(folder(case).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = file.tensor("tokens").unwrap();
    let logits = file.tensor("logits").unwrap();
    Golden {
        tokens: tokens.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect(),
        logits: logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

fn engine(path: PathBuf, max_tokens: usize, kv_dtype: DType, n_threads: usize) -> Engine {
    let files = ModelFiles::open(path).unwrap();
    let model = Arc::new(Model::load(&files).unwrap());
    let options = RunnerOptions { context: 64, kv_block: 32, kv_dtype, max_tokens };
    let runner = BackendRunner::new(CpuBackend::new(n_threads).unwrap(), model, options).unwrap();
    Engine::new(Box::new(runner), 64)
}

/// All logits, in pieces of at most `max_tokens`.
fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.open();
    let mut all = Vec::new();
    for piece in tokens.chunks(engine.max_tokens()) {
        all.extend_from_slice(engine.logits(&mut session, piece, piece.len()).unwrap());
    }
    all
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut want.iter().map(|b| f64::from(*b)))
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
fn a_config_in_the_older_spelling_gives_the_same_model() {
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
fn pieces_and_threads_do_not_change_a_bit() {
    for case in CASES {
        let golden = golden(case);
        let whole = logits(&mut engine(folder(case), 64, DType::F32, 1), &golden.tokens);
        for (max_tokens, n_threads) in [(1, 1), (7, 2), (64, 4)] {
            let pieces = logits(&mut engine(folder(case), max_tokens, DType::F32, n_threads), &golden.tokens);
            let same = whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{case}: pieces of {max_tokens} tokens on {n_threads} threads differ");
        }
    }
}

#[test]
fn a_cache_in_half_precision_stays_close() {
    for case in CASES {
        let golden = golden(case);
        let got = logits(&mut engine(folder(case), 64, DType::F16, 2), &golden.tokens);
        let error = relative_error(&got, &golden.logits);
        assert!(error < 5e-3, "{case}: relative error {error:.2e}");
    }
}
