//! Embedding steps as graphs: the vectors of `transformers`, and the same bits replayed and eager.

mod rig;

use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
use refrain_driver::{Device, Method};
use refrain_engine::{Embedder, EmbedderOptions, Ledger, StepKind};
use refrain_models::Pooling;
use rig::goldens::{EMBED_CASES, embed_golden, model, relative_error};
use rig::{gpu, gpu_turn, options, sim};

/// Products of prompts run in 16 bits only with weights of 16 bits or fewer.
const TOLERANCE: f64 = 1e-4;

fn embed(
    device: &Device,
    case: &str,
    pooling: Pooling,
    options: CudaOptions,
    texts: &[Vec<u32>],
) -> (Vec<Vec<f32>>, Ledger) {
    let backend = CudaBackend::on(device, options).unwrap();
    let model = model(case);
    let max_tokens = model.config().n_context.min(64);
    let embed = EmbedderOptions { pooling, normalizes: true, max_tokens, step_tokens: 64 };
    let embedder = Embedder::new(backend, model, embed).unwrap();
    let mut vectors = embedder.embed(texts.to_vec()).unwrap();
    // The shortest texts again, in a step of another size, and once more as a replay of the same graph.
    for _ in 0..2 {
        vectors.extend(embedder.embed(texts[..2].to_vec()).unwrap());
    }
    (vectors, embedder.ledger())
}

fn embedding_steps_are_replayed_and_agree(device: &Device) {
    for case in EMBED_CASES {
        for pooling in [Pooling::Mean, Pooling::Last] {
            let (texts, want) = embed_golden(case, pooling);
            let mut found = Vec::new();
            for method in [Method::Stream, Method::Nodes] {
                let (got, ledger) = embed(device, case, pooling, options(GraphMode::Require, method), &texts);
                let tally = ledger.tally(StepKind::Embed);
                assert!(tally.replayed > 2 && tally.eager == 0 && tally.failed == 0, "{case}: {tally}");
                assert_eq!(tally.launches, tally.replayed, "{case}: one launch per step");
                for (text, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = relative_error(got, want);
                    assert!(error < TOLERANCE, "{case} {pooling}, text {text}: {error:.1e}");
                }
                found.push(got);
            }
            let (eager, ledger) =
                embed(device, case, pooling, options(GraphMode::Off, Method::Stream), &texts);
            assert_eq!(ledger.tally(StepKind::Embed).replayed, 0);
            assert!(found.iter().all(|replayed| *replayed == eager), "{case} {pooling}");
        }
    }
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn embedding_steps_are_replayed_and_agree_on_the_simulated_device() {
    embedding_steps_are_replayed_and_agree(&sim("").1);
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn embedding_steps_are_replayed_and_agree_on_the_gpu() {
    let _turn = gpu_turn();
    embedding_steps_are_replayed_and_agree(&gpu());
}
