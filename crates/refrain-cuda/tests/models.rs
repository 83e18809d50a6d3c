//! Whole models: golden logits, and replay against eager, token by token, on the simulated device and on a
//! GPU.

mod rig;

use refrain_cuda::GraphMode;
use refrain_driver::{Device, DriverError, Memory, MemoryLayout, Method, RecordOptions};
use refrain_engine::StepKind;
use refrain_tensor::DType;
use rig::goldens::{CASES, golden, relative_error};
use rig::{Rig, generate, gpu, gpu_turn, n_decoded, options, sim};

fn golden_logits_come_out_of_replays_token_by_token(device: impl Fn() -> Device) {
    for case in CASES {
        let (tokens, want) = golden(case);
        let mut rig = Rig::new(device(), case, options(GraphMode::Require, Method::Stream), 64, DType::F32);
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for token in &tokens {
            got.extend_from_slice(rig.engine.logits(&mut session, &[*token], 1).unwrap());
        }
        let error = relative_error(&got, &want);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
        let tally = rig.engine.ledger().tally(StepKind::Prompt);
        assert_eq!((tally.replayed, tally.eager), (tokens.len() as u64, 0), "{case}");
        assert_eq!(rig.device.take_reports(), Vec::<String>::new());
    }
}

fn golden_logits_come_out_of_padded_steps(device: impl Fn() -> Device) {
    for case in CASES {
        let (tokens, want) = golden(case);
        let mut rig = Rig::new(device(), case, options(GraphMode::Require, Method::Nodes), 64, DType::F32);
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for piece in tokens.chunks(5) {
            got.extend_from_slice(rig.engine.logits(&mut session, piece, piece.len()).unwrap());
        }
        let error = relative_error(&got, &want);
        assert!(error < 1e-4, "{case}: relative error {error:.2e}");
    }
}

/// The third request is twice as long as the others, past every boundary between splits of attention.
fn replayed_equals_eager_bit_for_bit(device: impl Fn() -> Device, cases: &[&str], n_tokens: usize) {
    let context = 2 * n_tokens + 64;
    for case in cases {
        let rig = |mode, method| Rig::new(device(), case, options(mode, method), context, DType::F16);
        let mut eager = rig(GraphMode::Off, Method::Stream);
        let want = generate(&mut eager, n_tokens);
        let tally = eager.engine.ledger().tally(StepKind::Decode);
        assert_eq!((tally.replayed, tally.eager), (0, n_decoded(n_tokens)));
        for method in [Method::Stream, Method::Nodes] {
            let mut replayed = rig(GraphMode::Require, method);
            assert_eq!(generate(&mut replayed, n_tokens), want, "{case}, {method}");
            for kind in [StepKind::Prompt, StepKind::Decode] {
                let tally = replayed.engine.ledger().tally(kind);
                assert_eq!((tally.eager, tally.failed), (0, 0), "{case}, {method}");
            }
            assert_eq!(replayed.engine.ledger().tally(StepKind::Decode).replayed, n_decoded(n_tokens));
            let status = replayed.monitor.status();
            assert!(status.graphs.iter().all(|g| g.bit_exact && g.method == method), "{status:?}");
            // Prompts of 5, 1 and 11 tokens make steps of 8 and 1, with and without a choice at the end.
            assert_eq!(status.cache.recorded, 3, "{status:?}");
        }
    }
}

/// Recordings of both methods fail half-way on the device before a model records there.
fn replayed_equals_eager_after_failed_recordings(device: impl Fn() -> Device, n_tokens: usize) {
    let ctx = device().context().unwrap();
    let mut layout = MemoryLayout::new("aborted");
    let region = layout.device("words", 1024);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let mut stream = ctx.stream().unwrap();
    for method in [Method::Stream, Method::Nodes] {
        let failed = stream.record(&memory, method, &RecordOptions::named("aborted"), |q| {
            q.fill(memory.buf(region), 1)?;
            Err(DriverError::caller(std::io::Error::other("the model is not ready")))
        });
        assert!(matches!(failed, Err(DriverError::Caller(_))), "{failed:?}");
    }
    drop((stream, memory, ctx));
    replayed_equals_eager_bit_for_bit(device, &["llama"], n_tokens);
}

fn simulated() -> Device {
    sim("").1
}

mod on_the_simulated_device {
    use super::*;

    #[test]
    fn golden_logits_come_out_of_replays() {
        golden_logits_come_out_of_replays_token_by_token(simulated);
    }

    #[test]
    fn golden_logits_come_out_of_padding() {
        golden_logits_come_out_of_padded_steps(simulated);
    }

    #[test]
    fn replayed_equals_eager() {
        replayed_equals_eager_bit_for_bit(
            simulated,
            &[
                "llama",
                "gemma3",
                "qwen3",
                "gemma4-e2b",
                "gemma4-dense",
                "gemma4-experts",
                "qwen3moe",
                "phi3",
                "mistral3",
                "olmo3",
                "cohere2",
                "qwen35",
                "qwen35moe",
                "lfm2",
            ],
            70,
        );
    }

    #[test]
    fn replayed_equals_eager_after_recordings_that_failed() {
        let (sim, _) = sim("");
        replayed_equals_eager_after_failed_recordings(|| Device::simulated(&sim).unwrap(), 20);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn golden_logits_come_out_of_replays() {
        let _turn = gpu_turn();
        golden_logits_come_out_of_replays_token_by_token(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn golden_logits_come_out_of_padding() {
        let _turn = gpu_turn();
        golden_logits_come_out_of_padded_steps(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn replayed_equals_eager() {
        let _turn = gpu_turn();
        replayed_equals_eager_bit_for_bit(gpu, CASES, 512);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn replayed_equals_eager_after_recordings_that_failed() {
        let _turn = gpu_turn();
        replayed_equals_eager_after_failed_recordings(gpu, 512);
    }
}
