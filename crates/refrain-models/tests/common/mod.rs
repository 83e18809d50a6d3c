//! The golden models as folders and GGUF files, and their expected logits.
#![allow(dead_code)] // Each test file uses a part of it.

pub(crate) mod bank;
pub(crate) mod gguf;
pub(crate) mod train;

use refrain_cpu::CpuBackend;
use refrain_engine::{BackendRunner, Core, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_models::Model;
use refrain_tensor::DType;
use safetensors::SafeTensors;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) const CASES: [&str; 33] = [
    "llama",
    "llama-rope3",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "gemma3",
    "gemma3-linear",
    "gemma4-e2b",
    "gemma4-e4b",
    "gemma4-dense",
    "gemma4-heads",
    "gemma4-experts",
    "qwen3moe",
    "qwen3moe-plain",
    "phi3",
    "phi3-short",
    "mistral3",
    "gemma2",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "qwen3vl",
    "glm4",
    "cohere2",
    "qwen35",
    "qwen35-odd",
    "qwen35moe",
    "qwen35moe-joined",
    "lfm2",
    "gpt-oss",
];

pub(crate) struct Golden {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<f32>, // [n_tokens, vocab]
}

pub(crate) fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case)
}

pub(crate) fn golden(case: &str) -> Golden {
    let bytes = std::fs::read(folder(case).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = file.tensor("tokens").unwrap();
    let logits = file.tensor("logits").unwrap();
    Golden {
        tokens: tokens
            .data()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
            .collect(),
        logits: logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

pub(crate) fn engine(files: &ModelFiles, max_tokens: usize, kv_dtype: DType, n_threads: usize) -> Core {
    let model = Arc::new(Model::load(files).unwrap());
    let options =
        RunnerOptions { context: 64, kv_block: 32, kv_dtype, max_tokens, ..RunnerOptions::default() };
    let runner = BackendRunner::new(CpuBackend::new(n_threads).unwrap(), model, options).unwrap();
    Core::new(Box::new(runner), 64)
}

/// All logits, in chunks of at most `max_tokens`.
pub(crate) fn logits(engine: &mut Core, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.open();
    let mut all = Vec::new();
    for piece in tokens.chunks(engine.max_tokens()) {
        all.extend_from_slice(engine.logits(&mut session, piece, piece.len()).unwrap());
    }
    all
}

pub(crate) fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut want.iter().map(|b| f64::from(*b)))
}
