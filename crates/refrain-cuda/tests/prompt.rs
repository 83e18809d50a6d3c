//! Steps of many rows: which kernels run them, and that the results agree with the reference.

mod rig;

use refrain_cuda::{CacheOptions, CublasLt, CudaBackend, CudaOptions, GraphMode, PromptProducts};
use refrain_driver::sim::SimOptions;
use refrain_driver::{Device, DeviceKind, Method};
use refrain_engine::{BackendRunner, Chosen, Core, Runner, RunnerOptions, SamplingParams, SamplingRow};
use refrain_graph::{
    Attention, Backend, Gate, Graph, GraphBuilder, Io, State, StateId, TensorType, Weight, WeightId, fuse,
};
use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use refrain_testkit::{Feed, Fill, Tol, assert_close, evaluate, tensor};

const D: usize = 256;
const HIDDEN: usize = 512;
const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const KV_BLOCK: usize = 16;
const N_BLOCKS: usize = 8;

fn ty(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType::new(dtype, Shape::new(dims).unwrap())
}

/// One layer as models have it, without positions: attention over the cache, then gate, up and down.
fn layer(n: usize, dtype: DType, kv: DType) -> (Graph, Feed) {
    let kv_dim = N_KV_HEADS * HEAD_DIM;
    let n_blocks = N_BLOCKS.max(n.div_ceil(KV_BLOCK));
    let dims: [(&str, DType, &[usize]); 9] = [
        ("norm", DType::F32, &[D]),
        ("q", dtype, &[D, D]),
        ("k", dtype, &[kv_dim, D]),
        ("v", dtype, &[kv_dim, D]),
        ("o", dtype, &[D, D]),
        ("ffn_norm", DType::F32, &[D]),
        ("gate", dtype, &[HIDDEN, D]),
        ("up", dtype, &[HIDDEN, D]),
        ("down", dtype, &[D, HIDDEN]),
    ];
    let weights: Vec<Weight> = dims
        .iter()
        .map(|(name, dtype, dims)| Weight { name: (*name).into(), ty: ty(*dtype, dims) })
        .collect();
    let small = Fill::Uniform(-0.1, 0.1);
    let tensors = weights.iter().enumerate().map(|(i, w)| tensor(w.ty, &small, i as u64)).collect();
    let cache = ty(kv, &[n_blocks, N_KV_HEADS, KV_BLOCK, HEAD_DIM]);
    let states = ["k", "v"].map(|name| State::paged(name, cache));
    let mut b = GraphBuilder::new(weights, states.to_vec());
    let ints =
        |b: &mut GraphBuilder, name: &str, dims: &[usize]| b.input(name, ty(DType::I32, dims)).unwrap();
    let x = b.input("x", ty(DType::F32, &[n, D])).unwrap();
    let (positions, seqs) = (ints(&mut b, "positions", &[n]), ints(&mut b, "seqs", &[n]));
    let tables = ints(&mut b, "tables", &[1, n_blocks]);
    let w: Vec<_> = (0..9).map(|i| b.weight(WeightId::from_idx(i))).collect();
    let h = b.rms_norm(x, w[0], 1e-5, "norm").unwrap();
    let heads = |b: &mut GraphBuilder, h, w, n_heads: usize, name: &str| {
        let y = b.linear(h, w, None, name).unwrap();
        b.reshape(y, &[n, n_heads, HEAD_DIM]).unwrap()
    };
    let q = heads(&mut b, h, w[1], N_HEADS, "q");
    let k = heads(&mut b, h, w[2], N_KV_HEADS, "k");
    let v = heads(&mut b, h, w[3], N_KV_HEADS, "v");
    let [keys, values] = [0, 1].map(|i| b.state(StateId::from_idx(i)));
    let keys = b.kv_append(keys, k, [positions, seqs, tables]).unwrap();
    let values = b.kv_append(values, v, [positions, seqs, tables]).unwrap();
    let attention = Attention { scale: 0.125, window: None, softcap: None };
    let a = b.attention(attention, q, [keys, values], [positions, seqs, tables]).unwrap();
    let a = b.reshape(a, &[n, D]).unwrap();
    let o = b.linear(a, w[4], None, "o").unwrap();
    let x = b.add(x, o).unwrap();
    let h = b.rms_norm(x, w[5], 1e-5, "ffn_norm").unwrap();
    let gate = b.linear(h, w[6], None, "gate").unwrap();
    let up = b.linear(h, w[7], None, "up").unwrap();
    let act = b.gate(Gate::Silu, gate, up).unwrap();
    let down = b.linear(act, w[8], None, "down").unwrap();
    let x = b.add(x, down).unwrap();
    b.output("x", x).unwrap();
    let ints = |values: Vec<i32>, dims: &[usize]| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor::new(DType::I32, Shape::new(dims).unwrap(), Bytes::new(bytes)).unwrap()
    };
    let inputs = vec![
        tensor(ty(DType::F32, &[n, D]), &Fill::Normal, 99),
        ints((0..n as i32).collect(), &[n]),
        ints(vec![0; n], &[n]),
        ints((0..n_blocks as i32).rev().collect(), &[1, n_blocks]),
    ];
    let states = vec![tensor(cache, &Fill::Zero, 0); 2];
    (fuse(&b.finish()).unwrap(), Feed { weights: tensors, inputs, states })
}

fn backend(
    device: &Device,
    mode: GraphMode,
    method: Method,
    profile: bool,
    cublaslt: CublasLt,
) -> CudaBackend {
    let graphs = CacheOptions { mode, method, ..CacheOptions::default() };
    let mut options = CudaOptions { graphs, profile, cublaslt, ..CudaOptions::default() };
    options.kernels.cache = Some(std::env::temp_dir().join("refrain-test-kernels"));
    CudaBackend::on(device, options).unwrap()
}

fn run(backend: &mut CudaBackend, graph: &Graph, feed: &Feed) -> Vec<f32> {
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
    got
}

/// A prompt through an engine: the choice after it, and the sizes of the steps recorded for it, smallest
/// first.
fn prompt(n_tokens: usize, buckets: Vec<usize>) -> (Chosen, Vec<usize>) {
    let options = CudaOptions { buckets, ..rig::options(GraphMode::Require, Method::Stream) };
    let backend = CudaBackend::on(&rig::sim("").1, options).unwrap();
    let monitor = backend.monitor();
    let runner = RunnerOptions {
        context: 520,
        kv_block: 16,
        kv_dtype: DType::F16,
        max_tokens: 512,
        ..RunnerOptions::default()
    };
    let runner = BackendRunner::new(backend, rig::model("llama"), runner).unwrap();
    let vocab = runner.model().config().n_vocab as u32;
    let mut engine = Core::new(Box::new(runner), 520);
    let tokens: Vec<u32> = (0..n_tokens as u32).map(|i| i * 31 % vocab).collect();
    let (mut session, mut row) = (engine.open(), SamplingRow::new(&SamplingParams::greedy()));
    let chosen = engine.prompt(&mut session, &tokens, &mut row, |_| true).unwrap();
    (chosen, monitor.status().graphs.iter().map(|graph| graph.n_tokens).collect())
}

#[test]
fn prompts_are_split_into_as_few_steps_as_possible_with_the_same_result() {
    let usual = CudaOptions::default().buckets;
    assert_eq!(usual, [1, 8, 32, 128, 256, 512]);
    for (n_tokens, steps) in [(200, &[256][..]), (256, &[256]), (260, &[512]), (514, &[8, 512])] {
        let (chosen, recorded) = prompt(n_tokens, usual.clone());
        assert_eq!(recorded, steps, "{n_tokens} tokens");
        let (want, _) = prompt(n_tokens, vec![1, 8]);
        assert_eq!(chosen.token, want.token, "{n_tokens} tokens");
        assert!((chosen.logprob - want.logprob).abs() < 2e-2, "{chosen:?}, {want:?}");
    }
}

/// Eager and replayed, by both methods: close to the reference, and bit-identical to each other.
fn agrees_and_replays(device: impl Fn() -> Device, cublaslt: &CublasLt) {
    let kinds = [
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
        (DType::Q8_0, DType::F16),
        (DType::Q4_K, DType::F16),
    ];
    for (dtype, kv) in kinds.into_iter().chain([(DType::F32, DType::F32), (DType::BF16, DType::F32)]) {
        let sizes: &[usize] = if dtype.is_quantized() { &[2, 11, 70] } else { &[8, 20, 70] };
        for &n in sizes {
            let (graph, feed) = layer(n, dtype, kv);
            let want = evaluate(&graph, &feed).unwrap()[0].to_f32().unwrap();
            let mut eager = backend(&device(), GraphMode::Off, Method::Stream, false, cublaslt.clone());
            let plain = run(&mut eager, &graph, &feed);
            let exact = dtype == DType::F32;
            assert_close(&plain, &want, Tol::Whole(if exact { 1e-5 } else { 1e-2 }));
            drop(eager);
            for method in [Method::Stream, Method::Nodes] {
                let mut graphs = backend(&device(), GraphMode::Require, method, false, cublaslt.clone());
                let replayed = run(&mut graphs, &graph, &feed);
                let same = plain.iter().zip(&replayed).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtype} {kv} {n} rows, {method}");
                assert_eq!(graphs.device().take_reports(), Vec::<String>::new());
            }
        }
    }
}

#[test]
fn a_layer_of_many_rows_agrees_with_the_reference_on_the_simulated_device() {
    let device = || refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
    agrees_and_replays(device, &CublasLt::IfFound);
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_layer_of_many_rows_agrees_with_the_reference_on_a_gpu() {
    for cublaslt in [CublasLt::IfFound, CublasLt::Never] {
        agrees_and_replays(|| Device::open(DeviceKind::Cuda(0)).unwrap(), &cublaslt);
    }
}

#[test]
fn steps_of_many_rows_use_the_kernels_for_their_size_and_dtype() {
    let kernels = |n: usize, dtype: DType, kv: DType| {
        let device = refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
        let (graph, feed) = layer(n, dtype, kv);
        let mut backend = backend(&device, GraphMode::Off, Method::Stream, true, CublasLt::IfFound);
        run(&mut backend, &graph, &feed);
        let status = backend.monitor().status();
        let own = matches!(status.prompt_products, Some(PromptProducts::Own { .. }));
        assert!(own, "{:?}", status.prompt_products);
        let names: Vec<String> = status.profile.into_iter().map(|row| row.kernel).collect();
        names.iter().filter(|n| !n.contains("reduce") && !n.starts_with("kv_")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(
        kernels(72, DType::BF16, DType::F16),
        [
            "narrow_rms_norm_bf16",
            "gemm_m64_bf16",
            "flash_d64_f16",
            "gemm_m64_bf16",
            "narrow_add_rms_norm_bf16",
            "gemm_m64_bf16",
            "narrow_gate_silu_bf16",
            "gemm_m64_bf16",
            "binary_add_f32"
        ]
    );
    let quantised = kernels(260, DType::Q4_K, DType::F16);
    assert_eq!(quantised[..3], ["narrow_rms_norm_bf16", "dequant_q4_k_bf16", "gemm_m64_bf16"]);
    let wide = |names: &[String]| {
        names.iter().any(|n| n.starts_with("gemm") || n.starts_with("narrow") || n.starts_with("flash"))
    };
    let names = kernels(32, DType::F32, DType::F32);
    assert!(!wide(&names), "{names:?}");
    // Several 16-bit weights of the same rows are one launch, and of up to eight rows a single one too.
    for (n, dtype, batch, n_batch) in [
        (2, DType::BF16, "batch_plain_m8_h1_bf16", 4),
        (8, DType::F16, "batch_plain_m8_h1_f16", 4),
        (9, DType::BF16, "batch_plain_m16_h2_bf16", 2),
        (32, DType::BF16, "batch_plain_m32_bf16", 2),
        (33, DType::F16, "batch_plain_m64_f16", 2),
    ] {
        let names = kernels(n, dtype, DType::F16);
        let count = |start: &str| names.iter().filter(|name| name.starts_with(start)).count();
        assert_eq!(
            [count(batch), count("gemm_m64"), count("narrow_gate")],
            [n_batch, 4 - n_batch, 0],
            "{names:?}"
        );
    }
    for (n, dtype, batch) in [
        (2, DType::Q4_K, "batch_m8_q4_k"),
        (8, DType::Q8_0, "batch_m8_q8_0"),
        (15, DType::Q4_K, "batch_m16_q4_k"),
        (32, DType::Q8_0, "batch_m32_q8_0"),
        (64, DType::Q4_K, "batch_m64_q4_k"),
        (65, DType::Q8_0, "batch_m128_q8_0"),
        (140, DType::Q4_K, "batch_m128_q4_k"),
    ] {
        let names = kernels(n, dtype, DType::F16);
        // Queries, keys and values; the output; gate and up, fused; down: each reads its weights once.
        assert_eq!(names.iter().filter(|name| *name == batch).count(), 4, "{names:?}");
        assert!(!names.iter().any(|name| name.contains("gate") || name.starts_with("dequant")), "{names:?}");
    }
}

#[test]
fn rows_that_tensor_cores_cannot_read_use_other_kernels_with_a_note() {
    let n = 20;
    let weights = vec![Weight { name: "w".into(), ty: ty(DType::BF16, &[24, D]) }];
    let tensors = vec![tensor(weights[0].ty, &Fill::Uniform(-0.1, 0.1), 1)];
    let mut b = GraphBuilder::new(weights, Vec::new());
    let wide = ty(DType::F32, &[n, D + 2]);
    let x = b.input("x", wide).unwrap();
    // Rows that start at any multiple of eight bytes.
    let x = b.slice(x, 1, 2, D).unwrap();
    let w = b.weight(WeightId::from_idx(0));
    let y = b.linear(x, w, None, "w").unwrap();
    b.output("y", y).unwrap();
    let feed = Feed { weights: tensors, inputs: vec![tensor(wide, &Fill::Normal, 9)], states: Vec::new() };
    let graph = b.finish();
    let device = refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
    let mut backend = backend(&device, GraphMode::Require, Method::Stream, false, CublasLt::IfFound);
    let got = run(&mut backend, &graph, &feed);
    assert_close(&got, &evaluate(&graph, &feed).unwrap()[0].to_f32().unwrap(), Tol::Whole(1e-5));
    let told = backend.monitor().status().unfused;
    let [line] = &told[..] else { panic!("{told:?}") };
    assert!(
        line.starts_with("w runs without tensor cores: rows of 256 elements with strides [258, 0]"),
        "{line}"
    );
}
