//! Training steps as recorded graphs: replayed steps leave the same bits as eager ones.

use refrain_cpu::CpuBackend;
use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode};
use refrain_driver::sim::SimOptions;
use refrain_driver::{Device, DeviceKind, Method};
use refrain_formats::params::Arch;
use refrain_graph::Ran;
use refrain_models::{LoraSpec, Model, NamedShape, QuantMix, Targets, TrainSpec};
use refrain_tensor::{DType, HostTensor};
use refrain_train::learner::{AdamSettings, BatchRows, Learner};
use std::sync::Arc;

/// Training data of a step: documents of random tokens, and some padding.
struct Text {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    positions: Vec<i32>,
    spans: Vec<[i32; 2]>,
}

impl Text {
    fn new(n: usize, n_vocab: usize, seed: u64) -> Text {
        let mut state = seed;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut text = Text { tokens: vec![], targets: vec![], positions: vec![], spans: vec![] };
        let padded = n - n / 10;
        while text.tokens.len() < padded {
            let first = text.tokens.len();
            let end = (first + 1 + random(n / 2)).min(padded);
            for row in first..end {
                text.tokens.push(random(n_vocab) as i32);
                text.targets.push(if random(7) == 0 { -1 } else { random(n_vocab) as i32 });
                text.positions.push((row - first) as i32);
                text.spans.push([first as i32, end as i32]);
            }
        }
        for row in padded..n {
            text.tokens.push(-1);
            text.targets.push(-1);
            text.positions.push(-1);
            text.spans.push([row as i32; 2]);
        }
        text
    }

    fn rows(&self) -> BatchRows<'_> {
        BatchRows {
            tokens: &self.tokens,
            targets: &self.targets,
            positions: &self.positions,
            spans: &self.spans,
        }
    }
}

fn learner(
    device: &Device,
    mode: GraphMode,
    method: Method,
    model: &Arc<Model>,
    spec: TrainSpec,
    n: usize,
) -> Learner<CudaBackend> {
    let graphs = CacheOptions { mode, method, ..CacheOptions::default() };
    // Eager steps run one by one, replayed ones are queued.
    let ahead = if mode == GraphMode::Off { 1 } else { 4 };
    let mut options = CudaOptions { graphs, ahead, ..CudaOptions::default() };
    options.kernels.cache = Some(std::env::temp_dir().join("refrain-test-kernels"));
    let backend = CudaBackend::on(device, options).unwrap();
    Learner::new(backend, Arc::clone(model), spec, n).unwrap_or_else(|e| panic!("{e}: {e:?}"))
}

fn adam(step: usize) -> AdamSettings {
    let lr = 1e-3 / (1.0 + step as f64);
    AdamSettings { lr, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) }
}

/// Runs steps, as many in flight as allowed, and returns their losses and norms. Either every micro-step must be one
/// launch, or none.
fn run(
    learner: &mut Learner<CudaBackend>,
    n_steps: usize,
    n_batches: usize,
    replayed: bool,
) -> Vec<(u32, u32)> {
    let n_vocab = learner.model().config().n_vocab;
    let n = learner.spec().n_tokens;
    let mut n_sent = 0;
    let mut take = |step: usize| {
        while n_sent < n_steps.min(step + learner.depth()) {
            let seed = |i: usize| (n_sent * 31 + i) as u64;
            let texts: Vec<Text> = (0..n_batches).map(|i| Text::new(n, n_vocab, seed(i))).collect();
            let rows: Vec<BatchRows<'_>> = texts.iter().map(Text::rows).collect();
            let queued = learner.queue(&rows, &adam(n_sent), [7, 0, n_sent as u32, 0]);
            queued.unwrap_or_else(|e| panic!("{e}: {e:?}"));
            n_sent += 1;
        }
        let outcome = learner.collect().unwrap_or_else(|e| panic!("{e}: {e:?}"));
        assert!(outcome.is_applied(), "step {step}: {outcome:?}");
        assert_eq!(outcome.ran.len(), n_batches);
        let one_launch = |ran: &Ran| matches!(ran, Ran::Replayed { n_launches: 1, n_host_steps: 0 });
        assert!(outcome.ran.iter().all(|ran| one_launch(ran) == replayed), "step {step}: {outcome:?}");
        (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
    };
    (0..n_steps).map(&mut take).collect()
}

fn states(learner: &Learner<CudaBackend>) -> Vec<(String, Vec<u8>)> {
    let table = learner.table();
    let hold = |i: usize| learner.state(refrain_graph::StateId::from_idx(i)).unwrap();
    table.states.iter().enumerate().map(|(i, state)| (state.name.clone(), hold(i))).collect()
}

const PLAIN: TrainSpec = TrainSpec {
    n_tokens: 40,
    n_context: 40,
    dtype: DType::F32,
    masters: false,
    accumulates: false,
    dropout: 0.0,
    recompute: false,
};

fn replayed_equals_eager(device: impl Fn() -> Device, shape: &NamedShape, n_tokens: usize, n_steps: usize) {
    let mut config = shape.fresh_config(64);
    if n_tokens < 256 {
        // Small enough for the simulated device.
        (config.n_vocab, config.n_layers, config.hidden, config.ffn) = (67, 2, 32, 48);
        (config.n_heads, config.n_kv_heads, config.head_dim, config.rope.dims) = (4, 2, 8, 8);
        config.attn_scale = 8f32.powf(-0.5);
        config.layers.truncate(2);
    }
    let model = Arc::new(Model::fresh(config, 3).unwrap());
    let plain = TrainSpec { n_tokens, ..PLAIN };
    let cases = [
        (TrainSpec { dtype: DType::BF16, masters: true, ..plain }, 1),
        (TrainSpec { dropout: 0.1, recompute: true, ..plain }, 2),
        (TrainSpec { dtype: DType::BF16, dropout: 0.2, ..plain }, 1),
    ];
    for (spec, n_batches) in cases {
        same_bits(&device, &model, spec, n_batches, n_steps);
    }
}

/// Runs the same steps eagerly and as graphs of both methods: losses, norms and all states must have the same bits.
/// Returns the losses.
fn same_bits(
    device: impl Fn() -> Device,
    model: &Arc<Model>,
    spec: TrainSpec,
    n_batches: usize,
    n_steps: usize,
) -> Vec<f32> {
    let mut found = Vec::new();
    for (mode, method) in [
        (GraphMode::Off, Method::Stream),
        (GraphMode::Require, Method::Stream),
        (GraphMode::Require, Method::Nodes),
    ] {
        let device = device();
        let mut learner = learner(&device, mode, method, model, spec, n_batches);
        let losses = run(&mut learner, n_steps, n_batches, mode == GraphMode::Require);
        found.push((losses, states(&learner)));
        drop(learner);
        assert_eq!(device.take_reports(), Vec::<String>::new());
    }
    let first = f32::from_bits(found[0].0[0].0);
    assert!(first.is_finite() && first > 1.0, "{first}");
    for other in &found[1..] {
        assert_eq!(found[0].0, other.0, "losses and norms of {spec:?}");
        for ((name, eager), (_, replayed)) in found[0].1.iter().zip(&other.1) {
            assert!(eager == replayed, "{name} differs after {n_steps} steps of {spec:?}");
        }
    }
    found[0].0.iter().map(|(loss, _)| f32::from_bits(*loss)).collect()
}

/// A model with an adapter, both of whose factors have gradients.
fn adapted(shape: &NamedShape, mix: QuantMix, dropout: f64) -> Arc<Model> {
    let model = Model::random(shape, mix).unwrap();
    let spec = LoraSpec { rank: 8, alpha: 16.0, rslora: false, dropout, targets: Targets::All };
    let mut adapter = model.fresh_adapter(&spec, 5).unwrap();
    for part in &mut adapter.parts {
        let n = part.b.shape().n_elements();
        let values: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3).collect();
        part.b = HostTensor::from_f32(part.b.shape(), &values).unwrap();
    }
    Arc::new(model.with_adapter(&adapter).unwrap())
}

/// Adapters over frozen weights: in the type of the activations, in another float type, and quantised, which the graph
/// decodes.
fn adapters_replayed_equal_eager(
    device: impl Fn() -> Device,
    shape: &NamedShape,
    n_tokens: usize,
    n_steps: usize,
) {
    let f32 = TrainSpec { n_tokens, ..PLAIN };
    let bf16 = TrainSpec { dtype: DType::BF16, masters: true, ..f32 };
    let cases = [
        (QuantMix::All(DType::F32), f32, 0.0, 1),
        (QuantMix::All(DType::BF16), bf16, 0.0, 1),
        (QuantMix::All(DType::F16), bf16, 0.0, 1),
        (QuantMix::All(DType::Q8_0), TrainSpec { recompute: true, ..bf16 }, 0.1, 2),
        (QuantMix::Q4KM, bf16, 0.0, 1),
    ];
    for (mix, spec, dropout, n_batches) in cases {
        let model = adapted(shape, mix, dropout);
        let losses = same_bits(&device, &model, spec, n_batches, n_steps);
        if dropout > 0.0 {
            continue;
        }
        // The CPU gives the same result.
        let cpu = CpuBackend::new(2).unwrap().with_repacking(false);
        let mut cpu = Learner::new(cpu, Arc::clone(&model), spec, n_batches).unwrap();
        for (step, loss) in losses.iter().enumerate().take(3) {
            let text = Text::new(n_tokens, model.config().n_vocab, (step * 31) as u64);
            let want = cpu.step(&[text.rows()], &adam(step), [7, 0, step as u32, 0]).unwrap().loss;
            let most = if spec.dtype == DType::F32 { 1e-4 } else { 1e-2 };
            assert!((loss - want).abs() < most * want, "{mix:?}, step {step}: {loss}, CPU: {want}");
        }
    }
}

/// A few rows of whole blocks of 256.
const THIN: NamedShape = NamedShape::new("thin", Arch::Llama, [96, 256, 256, 2], [4, 2, 64]);

#[test]
fn replayed_training_of_adapters_equals_eager_on_the_simulated_device() {
    let device = || refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
    adapters_replayed_equal_eager(device, &THIN, 20, 2);
}

#[test]
fn a_device_refuses_to_decode_weights_to_f32_by_name() {
    let device = refrain_kernels::simulated(SimOptions::default()).unwrap();
    let backend = CudaBackend::on(&device, CudaOptions::default()).unwrap();
    let made = Learner::new(backend, adapted(&THIN, QuantMix::Q4KM, 0.0), PLAIN, 1);
    let error = made.err().expect("no kernel decodes to F32").to_string();
    assert!(
        error.contains("quantised weights can only be decoded to BF16") && error.contains("decode"),
        "{error}"
    );
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn replayed_training_of_adapters_equals_eager_on_a_gpu() {
    let device = || Device::open(DeviceKind::Cuda(0)).unwrap();
    adapters_replayed_equal_eager(device, NamedShape::find("smollm2-135m").unwrap(), 512, 20);
}

#[test]
fn replayed_training_equals_eager_on_the_simulated_device() {
    let device = || refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
    replayed_equals_eager(device, NamedShape::find("llama-10m").unwrap(), 40, 6);
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn replayed_training_equals_eager_over_200_steps_on_a_gpu() {
    let device = || Device::open(DeviceKind::Cuda(0)).unwrap();
    replayed_equals_eager(device, NamedShape::find("llama-10m").unwrap(), 1024, 200);
}
