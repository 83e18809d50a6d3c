//! Whole models on the simulated device: golden logits, and replay against eager, token by token.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode, Monitor};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_engine::{BackendRunner, Chosen, Engine, RunnerOptions, SamplingParams, SamplingRow, Session, StepKind};
use refrain_formats::ModelFiles;
use refrain_models::Model;
use refrain_tensor::DType;
use safetensors::SafeTensors;

const CASES: [&str; 8] =
    ["llama", "llama-rope3", "llama-tied", "mistral-window", "qwen2", "qwen3", "gemma3", "gemma3-linear"];

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens").join(case)
}

fn model(case: &str) -> Arc<Model> {
    Arc::new(Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap())
}

struct Rig {
    engine: Engine,
    monitor: Monitor,
    sim: SimDriver,
    device: Device,
}

fn options(mode: GraphMode, method: Method) -> CudaOptions {
    let graphs = CacheOptions { mode, method, first_backoff: 2, ..CacheOptions::default() };
    CudaOptions { graphs, buckets: vec![1, 8], ..CudaOptions::default() }
}

fn rig_with(case: &str, options: CudaOptions, context: usize, kv_dtype: DType, script: &str) -> Rig {
    let faults = FaultScript::parse(script).unwrap();
    let sim = SimDriver::new(SimOptions { seed: 5, faults, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let backend = CudaBackend::on(&device, options).unwrap();
    let monitor = backend.monitor();
    let runner = RunnerOptions { context, kv_block: 16, kv_dtype, max_tokens: 64 };
    let runner = BackendRunner::new(backend, model(case), runner).unwrap();
    Rig { engine: Engine::new(Box::new(runner), context), monitor, sim, device }
}

fn rig(case: &str, mode: GraphMode, method: Method) -> Rig {
    rig_with(case, options(mode, method), 128, DType::F16, "")
}

fn golden(case: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(folder(case).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (tokens, logits) = (file.tensor("tokens").unwrap(), file.tensor("logits").unwrap());
    let tokens = tokens.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32);
    let logits = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (tokens.collect(), logits.collect())
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut want.iter().map(|b| f64::from(*b)))
}

#[test]
fn golden_logits_come_out_of_replays_token_by_token() {
    for case in CASES {
        let (tokens, want) = golden(case);
        let mut rig = rig_with(case, options(GraphMode::Require, Method::Stream), 64, DType::F32, "");
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for token in &tokens {
            got.extend_from_slice(rig.engine.logits(&mut session, &[*token], 1).unwrap());
        }
        let error = relative_error(&got, &want);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
        let tally = rig.engine.ledger().tally(StepKind::Prefill);
        assert_eq!((tally.replayed, tally.eager), (tokens.len() as u64, 0), "{case}");
        assert_eq!(rig.device.take_reports(), Vec::<String>::new());
    }
}

#[test]
fn golden_logits_come_out_of_padded_steps() {
    for case in CASES {
        let (tokens, want) = golden(case);
        let n_vocab = want.len() / tokens.len();
        let mut rig = rig_with(case, options(GraphMode::Require, Method::Nodes), 64, DType::F32, "");
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for piece in tokens.chunks(5) {
            got.extend_from_slice(rig.engine.logits(&mut session, piece, piece.len()).unwrap());
        }
        assert_eq!(got.len(), tokens.len() * n_vocab);
        let error = relative_error(&got, &want);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
    }
}
