//! Expert layers: which kernels run them, and that the results agree with the reference.

mod rig;

use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode};
use refrain_driver::sim::SimOptions;
use refrain_driver::{Device, Method};
use refrain_graph::{
    Backend, ExpertActivation, ExpertGate, Graph, GraphBuilder, Io, MoeOp, Op, Route, RouteScore, TensorType,
    Weight, WeightId, fuse,
};
use refrain_models::{Head, KvSpec, StepSpec};
use refrain_tensor::{DType, Shape};
use refrain_testkit::{Feed, Fill, Tol, assert_close, evaluate, tensor};

const D: usize = 256;
const N_EXPERTS: usize = 6;
const N_CHOICES: usize = 2;

fn ty(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType::new(dtype, Shape::new(dims).unwrap())
}

/// Norm, router, experts and residual of `n` rows, as models have them. `read_inner` makes the values between
/// the halves an output of the step.
fn layer(n: usize, [first, second]: [DType; 2], inner: usize, read_inner: bool) -> (Graph, Feed) {
    let dims: [(&str, DType, &[usize]); 5] = [
        ("norm", DType::F32, &[D]),
        ("router", DType::F32, &[N_EXPERTS, D]),
        ("gate", first, &[N_EXPERTS, inner, D]),
        ("up", first, &[N_EXPERTS, inner, D]),
        ("down", second, &[N_EXPERTS, D, inner]),
    ];
    let weights: Vec<Weight> = dims
        .iter()
        .map(|(name, dtype, dims)| Weight { name: (*name).into(), ty: ty(*dtype, dims) })
        .collect();
    let small = Fill::Uniform(-0.1, 0.1);
    let tensors = weights.iter().enumerate().map(|(i, w)| tensor(w.ty, &small, i as u64)).collect();
    let mut b = GraphBuilder::new(weights, Vec::new());
    let x = b.input("x", ty(DType::F32, &[n, D])).unwrap();
    let w: Vec<_> = (0..5).map(|i| b.weight(WeightId::from_idx(i))).collect();
    let h = b.rms_norm(x, w[0], 1e-5, "norm").unwrap();
    let logits = b.linear(h, w[1], None, "router").unwrap();
    let route = Route {
        n_choices: N_CHOICES,
        score: RouteScore::Softmax,
        biased: false,
        scaled: false,
        groups: None,
        renormalise: true,
        scale: 1.0,
    };
    let chosen = b.node(Op::Moe(MoeOp::Route(route)), &[logits], "route").unwrap();
    let gate = ExpertGate { activation: ExpertActivation::Silu, joined: false, biased: false };
    let between = b.node(Op::Moe(MoeOp::Gated(gate)), &[h, chosen[0], w[2], w[3]], "gated").unwrap()[0];
    let sum = MoeOp::Summed { biased: false };
    let y = b.node(Op::Moe(sum), &[between, chosen[0], chosen[1], w[4]], "summed").unwrap()[0];
    let y = b.add(x, y).unwrap();
    b.output("y", y).unwrap();
    if read_inner {
        b.output("between", between).unwrap();
    }
    let inputs = vec![tensor(ty(DType::F32, &[n, D]), &Fill::Normal, 99)];
    (fuse(&b.finish()).unwrap(), Feed { weights: tensors, inputs, states: Vec::new() })
}

fn backend(device: &Device, mode: GraphMode, method: Method) -> CudaBackend {
    let graphs = CacheOptions { mode, method, ..CacheOptions::default() };
    let mut options = CudaOptions { graphs, ..CudaOptions::default() };
    options.kernels.cache = Some(std::env::temp_dir().join("refrain-test-kernels"));
    CudaBackend::on(device, options).unwrap()
}

/// The first output after two runs, and the kernels of a run.
fn run(backend: &mut CudaBackend, graph: &Graph, feed: &Feed) -> (Vec<f32>, Vec<String>) {
    let weights = backend.load(graph.weights(), feed.weights.clone()).unwrap();
    let mut states = backend.allocate(graph.states()).unwrap();
    let mut compiled = backend.compile(graph).unwrap();
    let control = feed.control(backend.plan(&compiled).control());
    for _ in 0..2 {
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        backend.run(&mut compiled, io).unwrap();
    }
    let mut got = vec![0_f32; backend.plan(&compiled).outputs()[0].layout.shape().n_elements()];
    backend.read(&compiled, 0, bytemuck::cast_slice_mut(&mut got)).unwrap();
    (got, backend.kernels(&compiled).into_iter().map(|(_, kernel)| kernel.into_owned()).collect())
}

fn sim() -> Device {
    refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap()
}

/// Eager and replayed, by both methods: close to the reference, and bit-identical to each other.
fn agrees_and_replays(device: impl Fn() -> Device) {
    for (dtypes, inner, tol) in [
        ([DType::F32; 2], 96, 1e-5),
        ([DType::BF16; 2], 72, 1e-2),
        ([DType::Q4_K, DType::Q6_K], 256, 1e-2),
        ([DType::Q4_K, DType::Q5_0], 96, 1e-2),
    ] {
        for n in [1, 5, 16, 40] {
            let (graph, feed) = layer(n, dtypes, inner, false);
            let want = evaluate(&graph, &feed).unwrap()[0].to_f32().unwrap();
            let mut eager = backend(&device(), GraphMode::Off, Method::Stream);
            let (plain, kernels) = run(&mut eager, &graph, &feed);
            assert_close(&plain, &want, Tol::Whole(tol));
            let is_grouped = kernels.iter().any(|kernel| kernel.starts_with("grouped_m"));
            assert_eq!(is_grouped, n >= 16 && dtypes[0] != DType::F32, "{dtypes:?}, {n} rows: {kernels:?}");
            // A few rows are routed by the launch of the gate; the router's product norms a single row.
            let has = |name: &str| kernels.iter().any(|kernel| kernel.starts_with(name));
            assert_eq!(has("expert_route"), n >= 16, "{n} rows: {kernels:?}");
            assert_eq!(has("expert_logits"), n == 1, "{n} rows: {kernels:?}");
            assert_eq!(has("rms_norm"), n > 1, "{n} rows: {kernels:?}");
            let told = eager.monitor().status().unfused;
            assert_eq!(told, Vec::<String>::new(), "{dtypes:?}, {n} rows");
            drop(eager);
            for method in [Method::Stream, Method::Nodes] {
                let mut graphs = backend(&device(), GraphMode::Require, method);
                let (replayed, _) = run(&mut graphs, &graph, &feed);
                let same = plain.iter().zip(&replayed).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtypes:?} {n} rows, {method}");
                assert_eq!(graphs.device().take_reports(), Vec::<String>::new());
            }
        }
    }
}

#[test]
fn an_expert_layer_agrees_with_the_reference_on_the_simulated_device() {
    agrees_and_replays(sim);
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn an_expert_layer_agrees_with_the_reference_on_a_gpu() {
    let _turn = rig::gpu_turn();
    agrees_and_replays(rig::gpu);
}

#[test]
fn experts_that_tensor_cores_cannot_multiply_use_other_kernels_with_a_note() {
    let told = |dtypes, inner, read_inner| {
        let (graph, feed) = layer(20, dtypes, inner, read_inner);
        let mut backend = backend(&sim(), GraphMode::Off, Method::Stream);
        let (got, kernels) = run(&mut backend, &graph, &feed);
        assert!(!kernels.iter().any(|kernel| kernel.starts_with("grouped")), "{kernels:?}");
        assert_close(&got, &evaluate(&graph, &feed).unwrap()[0].to_f32().unwrap(), Tol::Whole(1e-2));
        backend.monitor().status().unfused.join("; ")
    };
    assert_eq!(
        told([DType::Q2_K, DType::Q4_K], 256, false),
        "gated runs without tensor cores: no kernel multiplies experts of Q2_K with 256 rows and 256 columns, and \
         of Q4_K"
    );
    assert_eq!(
        told([DType::BF16; 2], 20, false),
        "gated runs without tensor cores: no kernel multiplies experts of BF16 with 20 rows and 256 columns, and \
         of BF16"
    );
    assert_eq!(
        told([DType::Q4_K; 2], 256, true),
        "gated runs without tensor cores: another step reads the rows between the products of the experts"
    );
}

#[test]
fn a_decoded_token_takes_three_launches_for_the_experts_of_a_layer() {
    const KV: KvSpec = KvSpec { n_blocks: 16, kv_block: 32, max_blocks: 16, n_slots: 4, dtype: DType::F16 };
    for case in ["qwen3moe", "gemma4-experts"] {
        let model = rig::goldens::model(case);
        let options = rig::options(GraphMode::Off, Method::Stream);
        let backend = CudaBackend::on(&rig::sim("").1, options).unwrap();
        backend.load(model.weights(), model.tensors().to_vec()).unwrap();
        backend.allocate(&model.states(&KV)).unwrap();
        let graph = model.graph(&StepSpec::of_one(1, 1, Head::Logits), &KV).unwrap();
        let compiled = backend.compile(&fuse(&graph).unwrap()).unwrap();
        let kernels = backend.kernels(&compiled);
        let mut of_experts: Vec<&str> = kernels
            .iter()
            .map(|(_, kernel)| &**kernel)
            .filter(|kernel| kernel.starts_with("expert_"))
            .collect();
        let layer = ["expert_logits_f32", "expert_gate_f32", "expert_sum_f32"];
        // The head of a small F32 model is such a product too.
        of_experts.truncate(of_experts.len() / layer.len() * layer.len());
        assert!(!of_experts.is_empty(), "{case}: {kernels:?}");
        assert!(of_experts.chunks(3).all(|launches| launches == layer), "{case}: {of_experts:?}");
    }
}

#[test]
fn the_halves_of_the_experts_of_every_architecture_run_one_after_the_other() {
    const KV: KvSpec = KvSpec { n_blocks: 16, kv_block: 32, max_blocks: 16, n_slots: 4, dtype: DType::F16 };
    for case in ["qwen3moe", "gemma4-experts"] {
        let model = rig::goldens::model(case);
        let options = rig::options(GraphMode::Off, Method::Stream);
        let backend = CudaBackend::on(&rig::sim("").1, options).unwrap();
        backend.load(model.weights(), model.tensors().to_vec()).unwrap();
        backend.allocate(&model.states(&KV)).unwrap();
        let graph = model.graph(&StepSpec::of_one(32, 32, Head::Logits), &KV).unwrap();
        let compiled = backend.compile(&fuse(&graph).unwrap()).unwrap();
        let kernels: Vec<String> =
            backend.kernels(&compiled).into_iter().map(|(_, kernel)| kernel.into_owned()).collect();
        let joins: Vec<usize> =
            (0..kernels.len()).filter(|&i| kernels[i].starts_with("expert_join")).collect();
        assert!(!joins.is_empty(), "{kernels:?}");
        for i in joins {
            assert_eq!(kernels[i + 1], "expert_sort_i32", "{case}: {kernels:?}");
        }
    }
}
