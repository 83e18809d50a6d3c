//! Experts on the device and in pinned host memory: the same bits, from one captured step.

mod rig;

use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_engine::{BackendRunner, Core, RunnerOptions, StepKind};
use refrain_formats::params::Arch;
use refrain_models::{Model, NamedShape, QuantMix};
use refrain_tensor::DType;
use rig::goldens::{golden, model, relative_error};
use rig::{Rig, generate, gpu, gpu_turn, n_decoded, options, sim};
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Device,
    Host,
}

fn rig(device: Device, model: &Arc<Model>, mode: GraphMode, place: Place, context: usize) -> Rig {
    let backend = CudaBackend::on(&device, options(mode, Method::Stream)).unwrap();
    let monitor = backend.monitor();
    if place == Place::Host {
        let names = model.expert_matrices();
        let names = names.iter().map(|id| model.weights()[id.idx()].name.clone()).collect();
        backend.keep_pinned(names).unwrap();
    }
    let options = RunnerOptions {
        context,
        kv_block: 16,
        kv_dtype: DType::F16,
        max_tokens: 64,
        n_recurrent: 4,
        ..RunnerOptions::default()
    };
    let runner = BackendRunner::new(backend, model.clone(), options).unwrap();
    Rig { engine: Core::new(Box::new(runner), context), monitor, device }
}

fn random(mix: &str, sizes: [usize; 4]) -> Arc<Model> {
    let shape = NamedShape::new("test", Arch::Qwen3Moe, sizes, [4, 2, 64]).with_experts([6, 2, 256]);
    Arc::new(Model::random(&shape, QuantMix::from_name(mix).unwrap()).unwrap())
}

/// Float experts, packed ones, ones that are multiplied as in the file, a dense part beside them, biases, and a shared one.
fn models() -> Vec<(&'static str, Arc<Model>)> {
    let goldens = ["qwen3moe", "gemma4-experts", "gpt-oss", "qwen35moe-joined"];
    let random = ["Q4_K_M", "Q8_0", "MXFP4", "Q2_K"].map(|mix| (mix, random(mix, [128, 256, 256, 2])));
    goldens.map(|case| (case, model(case))).into_iter().chain(random).collect()
}

fn both_placements_give_the_same_bits_replayed_and_eager(device: impl Fn() -> Device, n_tokens: usize) {
    let context = 2 * n_tokens + 64;
    for (name, model) in models() {
        let mut want = None;
        let mut bytes = Vec::new();
        for place in [Place::Device, Place::Host] {
            let mut eager = rig(device(), &model, GraphMode::Off, place, context);
            let said = generate(&mut eager, n_tokens);
            assert_eq!(want.get_or_insert_with(|| said.clone()), &said, "{name} {place:?}, eager");
            let mut replayed = rig(device(), &model, GraphMode::Require, place, context);
            assert_eq!(generate(&mut replayed, n_tokens), said, "{name} {place:?}, replayed");
            let tally = replayed.engine.ledger().tally(StepKind::Decode);
            assert_eq!((tally.replayed, tally.eager), (n_decoded(n_tokens), 0), "{name} {place:?}");
            let status = replayed.monitor.status();
            // One graph of kernels that feeds itself: nothing happens on the host within a step.
            assert!(status.graphs.iter().all(|g| g.bit_exact && g.n_nodes == g.n_kernels), "{status:?}");
            assert!(status.graphs.iter().filter(|g| g.n_tokens == 1).all(|g| g.feeds_itself), "{name}");
            bytes.push([status.memory.weight_bytes, status.memory.pinned_bytes]);
        }
        let [on_device, on_host] = bytes[..] else { unreachable!() };
        assert_eq!(on_device[1], 0, "{name}");
        assert_eq!(on_host[0] + on_host[1], on_device[0], "{name}: every weight has one place");
        let experts = model.expert_matrices();
        let experts: usize =
            experts.iter().map(|id| model.tensors()[id.idx()].bytes().as_slice().len()).sum();
        // Packed layouts and alignment take a little more than the file's bytes.
        assert!(on_host[1] >= experts as u64 && on_host[1] < 2 * experts as u64 + 8192, "{name}: {bytes:?}");
    }
}

fn golden_logits_come_out_of_both_placements(device: impl Fn() -> Device) {
    let (tokens, want) = golden("qwen3moe");
    let mut first: Option<Vec<f32>> = None;
    for place in [Place::Device, Place::Host] {
        let mut rig = rig(device(), &model("qwen3moe"), GraphMode::Require, place, 64);
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for piece in tokens.chunks(7) {
            got.extend_from_slice(rig.engine.logits(&mut session, piece, piece.len()).unwrap());
        }
        assert!(relative_error(&got, &want) < 5e-3, "{place:?}");
        let first = first.get_or_insert_with(|| got.clone());
        assert!(first.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{place:?}");
    }
}

#[test]
fn both_placements_give_the_same_bits() {
    both_placements_give_the_same_bits_replayed_and_eager(|| sim("").1, 12);
}

#[test]
fn a_device_too_small_for_the_experts_holds_the_rest() {
    let model = random("Q8_0", [128, 256, 256, 4]);
    let sim = SimDriver::new(SimOptions { memory_bytes: 6 << 20, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let started = |place: Place| {
        let device = Device::simulated(&sim).unwrap();
        let mut options = options(GraphMode::Require, Method::Stream);
        options.arena_reserve_bytes = 0;
        let backend = CudaBackend::on(&device, options).unwrap();
        if place == Place::Host {
            let names = model.expert_matrices();
            backend
                .keep_pinned(names.iter().map(|id| model.weights()[id.idx()].name.clone()).collect())
                .unwrap();
        }
        let options = RunnerOptions { context: 32, kv_block: 16, max_tokens: 8, ..RunnerOptions::default() };
        let runner = BackendRunner::new(backend, model.clone(), options)?;
        Core::new(Box::new(runner), 32).plan(1).map(drop)
    };
    let refused = started(Place::Device).unwrap_err();
    let message = std::iter::successors(Some(&refused as &dyn std::error::Error), |error| error.source());
    let message: Vec<String> = message.map(ToString::to_string).collect();
    assert!(message.iter().any(|text| text.contains("MiB") || text.contains("bytes")), "{message:?}");
    started(Place::Host).unwrap();
}

#[test]
fn golden_logits() {
    golden_logits_come_out_of_both_placements(|| sim("").1);
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn same_bits() {
        let _turn = gpu_turn();
        both_placements_give_the_same_bits_replayed_and_eager(gpu, 256);
        // Prompts of experts with rows long enough for the grouped kernels.
        let model = random("Q4_K_M", [512, 1024, 512, 2]);
        let [a, b] = [Place::Device, Place::Host]
            .map(|place| generate(&mut rig(gpu(), &model, GraphMode::Require, place, 320), 128));
        assert_eq!(a, b);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn golden_logits() {
        let _turn = gpu_turn();
        golden_logits_come_out_of_both_placements(gpu);
    }
}
