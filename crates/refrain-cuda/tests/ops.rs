//! The table of op cases, eager and replayed, and plans with host steps.

use std::sync::Arc;

use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode};
use refrain_driver::sim::SimOptions;
use refrain_driver::{Device, DeviceKind, Method};
use refrain_graph::{
    Backend, CompileError, Graph, GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, Io, Op, Ran,
    SpanAttention, StateKind, TensorType, Unary, ValueId, Weight, WeightId,
};
use refrain_tensor::{Bytes, DType, HostTensor};
use refrain_testkit::{Case, Feed, Fill, Tol, cases, check_all, evaluate, tensor};

fn backend(mode: GraphMode, method: Method) -> CudaBackend {
    let device = refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap();
    backend_on(&device, mode, method)
}

fn backend_on(device: &Device, mode: GraphMode, method: Method) -> CudaBackend {
    let graphs = CacheOptions { mode, method, allow_host_steps: true, ..CacheOptions::default() };
    let mut options = CudaOptions { graphs, ..CudaOptions::default() };
    options.kernels.cache = Some(std::env::temp_dir().join("refrain-test-kernels"));
    CudaBackend::on(device, options).unwrap()
}

/// Runs a graph twice to cover a replay after a replay, or once if a state accumulates.
fn run(backend: &mut CudaBackend, graph: &Graph, feed: &Feed) -> Result<Vec<HostTensor>, String> {
    let weights = backend.load(graph.weights(), feed.weights.clone()).map_err(|e| e.to_string())?;
    let mut states = backend.allocate(graph.states()).map_err(|e| e.to_string())?;
    let mut compiled = backend.compile(graph).map_err(|e| format!("{e:?}"))?;
    let plan = backend.plan(&compiled);
    let control = feed.control(plan.control());
    let types: Vec<TensorType> = plan.outputs().iter().map(|o| o.ty()).collect();
    let goes_on = graph.states().iter().any(|state| state.kind == StateKind::Whole);
    for _ in 0..if goes_on { 1 } else { 2 } {
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        backend.run(&mut compiled, io).map_err(|e| format!("{e:?}"))?;
    }
    let read = |(i, ty): (usize, &TensorType)| {
        let mut bytes = vec![0; ty.dtype.bytes_for(ty.shape.n_elements()).unwrap()];
        backend.read(&compiled, i, &mut bytes).map_err(|e| format!("{e:?}"))?;
        HostTensor::new(ty.dtype, ty.shape, Bytes::new(bytes)).map_err(|e| e.to_string())
    };
    types.iter().enumerate().map(read).collect()
}

/// Products with quantised weights round their activations to 8 bits, which adds an error of about 0.7 % of a
/// typical output to each output. Cases have few outputs, all of which may be small. The kernels' own tests
/// round their inputs first.
fn on_this_backend(case: &Case) -> Case {
    let quantised = case.graph.weights().iter().any(|w| w.ty.dtype.is_quantized());
    let tol = match case.op {
        Op::MatMul if quantised => Tol::Whole(8e-2),
        // The gate multiplies two such products.
        Op::Moe(_) if quantised => Tol::Whole(1.5e-1),
        _ if on_tensor_cores(case) => Tol::Whole(1e-2),
        _ => case.tol,
    };
    Case { tol, ..case.clone() }
}

/// Products of many rows with weights of 16 bits or fewer round their rows to 16 bits.
fn on_tensor_cores(case: &Case) -> bool {
    let narrow = case.graph.weights().iter().any(|w| w.ty.shape.rank() == 2 && w.ty.dtype != DType::F32);
    matches!(case.op, Op::MatMul) && narrow && case.feed.inputs.iter().any(|x| x.shape().dims()[0] >= 16)
}

/// Ops whose kernels support everything that a training step may need.
fn is_always_there(case: &Case) -> bool {
    match case.op {
        Op::MatMul => case.graph.weights().is_empty(),
        Op::SpanAttention(_)
        | Op::Train(_)
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Reduce { .. }
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::Softmax
        | Op::ScatterAddRows { .. }
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::Gate(_)
        | Op::Rope(_)
        | Op::Accumulate => true,
        _ => false,
    }
}

fn every_case_agrees_with_the_reference_or_is_refused_by_name(device: impl Fn() -> Device) {
    // What is supported does not depend on how it runs.
    let mut supported = Vec::new();
    for (mode, method) in [
        (GraphMode::Off, Method::Stream),
        (GraphMode::Require, Method::Stream),
        (GraphMode::Require, Method::Nodes),
    ] {
        let mut backend = backend_on(&device(), mode, method);
        let unknown = if mode == GraphMode::Off { cases() } else { Vec::new() };
        for case in unknown.iter().map(on_this_backend) {
            let loaded = backend.load(case.graph.weights(), case.feed.weights.clone());
            loaded.unwrap_or_else(|e| panic!("{}: {e}", case.name));
            backend.allocate(case.graph.states()).unwrap();
            match backend.compile(&case.graph) {
                Ok(_) => supported.push(case),
                Err(CompileError::Unsupported { op, because, .. }) => {
                    assert!(!is_always_there(&case), "{}: {because}", case.name);
                    assert!(!op.is_empty() && because.contains(':'), "{}: {because}", case.name);
                }
                Err(other) => panic!("{}: {other:?}", case.name),
            }
        }
        assert!(supported.len() > 500, "{} of {} cases", supported.len(), cases().len());
        check_all(&supported, |graph, feed| run(&mut backend, graph, feed));
        let stats = backend.monitor().status().cache;
        assert_eq!(stats.recorded > 100, mode == GraphMode::Require, "{stats:?}");
        assert_eq!(backend.device().take_reports(), Vec::<String>::new());
    }
}

#[test]
fn every_case_of_the_table_agrees_with_the_reference_on_the_simulated_device() {
    every_case_agrees_with_the_reference_or_is_refused_by_name(|| {
        refrain_kernels::simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap()
    });
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn every_case_of_the_table_agrees_with_the_reference_on_a_gpu() {
    every_case_agrees_with_the_reference_or_is_refused_by_name(|| Device::open(DeviceKind::Cuda(0)).unwrap());
}

/// `x / 2 + 1`, element by element.
struct Half;

impl HostFn for Half {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(vec![inputs[0]])
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        for (to, from) in outputs[0].as_chunks_mut::<4>().0.iter_mut().zip(inputs[0].bytes.as_chunks::<4>().0)
        {
            *to = (f32::from_le_bytes(*from) / 2.0 + 1.0).to_le_bytes();
        }
        Ok(())
    }
}

fn host_call() -> HostCall {
    HostCall { name: "half", because: "it runs on the host", function: Arc::new(Half) }
}

const D: usize = 32;
const N_LAYERS: usize = 3;

/// Layers of norm, product and residual, with host steps before the layers in `at` (`N_LAYERS`: after the
/// last).
fn layered(at: &[usize]) -> (Graph, Feed) {
    let weight = |name: &str, dtype, dims: &[usize]| Weight {
        name: name.into(),
        ty: TensorType::new(dtype, refrain_tensor::Shape::new(dims).unwrap()),
    };
    let weights: Vec<Weight> = (0..N_LAYERS)
        .flat_map(|_| [weight("norm", DType::F32, &[D]), weight("proj", DType::F32, &[D, D])])
        .collect();
    let tensors = weights.iter().enumerate().map(|(i, w)| tensor(w.ty, &Fill::Normal, i as u64)).collect();
    let mut b = GraphBuilder::new(weights, Vec::new());
    let ty = TensorType::new(DType::F32, [2, D]);
    let mut x = b.input("x", ty).unwrap();
    let on_host = |b: &mut GraphBuilder, x: ValueId| b.host_call(host_call(), &[x]).unwrap()[0];
    for layer in 0..N_LAYERS {
        b.scope(format!("blk.{layer}"));
        if at.contains(&layer) {
            x = on_host(&mut b, x);
        }
        let norm = b.weight(WeightId::from_idx(2 * layer));
        let h = b.rms_norm(x, norm, 1e-5, "norm").unwrap();
        let proj = b.weight(WeightId::from_idx(2 * layer + 1));
        let h = b.linear(h, proj, None, "proj").unwrap();
        let h = b.unary(Unary::Tanh, h).unwrap();
        x = b.add(x, h).unwrap();
    }
    if at.contains(&N_LAYERS) {
        x = on_host(&mut b, x);
    }
    b.output("x", x).unwrap();
    let feed = Feed { weights: tensors, inputs: vec![tensor(ty, &Fill::Normal, 99)], states: Vec::new() };
    (b.finish(), feed)
}

#[test]
fn host_steps_anywhere_between_layers_replay_as_they_run_eagerly() {
    let places: [(&[usize], u64); 5] =
        [(&[], 1), (&[0], 1), (&[1], 2), (&[N_LAYERS], 1), (&[0, 1, 2, N_LAYERS], 3)];
    for (at, n_segments) in places {
        let (graph, feed) = layered(at);
        let want = evaluate(&graph, &feed).unwrap();
        let mut eager = backend(GraphMode::Off, Method::Stream);
        let plain = run(&mut eager, &graph, &feed).unwrap();
        refrain_testkit::assert_close(
            &plain[0].to_f32().unwrap(),
            &want[0].to_f32().unwrap(),
            Tol::Whole(1e-5),
        );
        for method in [Method::Stream, Method::Nodes] {
            let mut graphs = backend(GraphMode::Require, method);
            let replayed = run(&mut graphs, &graph, &feed).unwrap();
            assert_eq!(replayed[0].bytes().as_slice(), plain[0].bytes().as_slice(), "{at:?}, {method}");
            let stats = graphs.monitor().status().cache;
            assert_eq!(stats.recorded, n_segments, "{at:?}");
        }
    }
}

#[test]
fn a_host_step_sees_what_changes_from_step_to_step() {
    let (graph, mut feed) = layered(&[1, N_LAYERS]);
    let mut backend = backend(GraphMode::Require, Method::Stream);
    let weights = backend.load(graph.weights(), feed.weights.clone()).unwrap();
    let mut states = backend.allocate(graph.states()).unwrap();
    let mut compiled = backend.compile(&graph).unwrap();
    for seed in 0..4 {
        feed.inputs = vec![tensor(TensorType::new(DType::F32, [2, D]), &Fill::Normal, seed)];
        let control = feed.control(backend.plan(&compiled).control());
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        assert!(matches!(backend.run(&mut compiled, io).unwrap(), Ran::Replayed { n_host_steps: 1.., .. }));
        let mut got = vec![0_f32; 2 * D];
        backend.read(&compiled, 0, bytemuck::cast_slice_mut(&mut got)).unwrap();
        let want = evaluate(&graph, &feed).unwrap();
        refrain_testkit::assert_close(&got, &want[0].to_f32().unwrap(), refrain_testkit::Tol::Whole(1e-5));
    }
}

#[test]
fn weights_or_states_of_another_model_are_refused() {
    let (graph, feed) = layered(&[]);
    let mut backend = backend(GraphMode::Auto, Method::Stream);
    let old = backend.load(graph.weights(), feed.weights.clone()).unwrap();
    let mut states = backend.allocate(graph.states()).unwrap();
    let mut compiled = backend.compile(&graph).unwrap();
    let control = feed.control(backend.plan(&compiled).control());
    let weights = backend.load(graph.weights(), feed.weights.clone()).unwrap();
    let mut step = |weights| {
        let io = Io { weights, states: &mut states, control: control.bytes() };
        backend.run(&mut compiled, io).unwrap_err().to_string()
    };
    assert_eq!(step(&old), "weights of the plan do not match: newer ones have been loaded");
    assert_eq!(step(&weights), "plans of the plan do not match: this one was compiled for other weights");
}

fn weight(name: &str, dtype: DType, dims: &[usize]) -> Weight {
    Weight { name: name.into(), ty: TensorType::new(dtype, refrain_tensor::Shape::new(dims).unwrap()) }
}

/// Compares a graph of one row with the reference, replayed.
fn agrees(weights: Vec<Weight>, k: usize, tol: Tol, build: impl Fn(&mut GraphBuilder, ValueId) -> ValueId) {
    let tensors = weights.iter().enumerate().map(|(i, w)| tensor(w.ty, &Fill::Normal, i as u64)).collect();
    let mut b = GraphBuilder::new(weights, Vec::new());
    let ty = TensorType::new(DType::F32, [1, k]);
    let x = b.input("x", ty).unwrap();
    let y = build(&mut b, x);
    b.output("y", y).unwrap();
    let (graph, feed) = (
        b.finish(),
        Feed { weights: tensors, inputs: vec![tensor(ty, &Fill::Normal, 99)], states: Vec::new() },
    );
    let want = evaluate(&graph, &feed).unwrap();
    let got = run(&mut backend(GraphMode::Require, Method::Stream), &graph, &feed).unwrap();
    refrain_testkit::assert_close(&got[0].to_f32().unwrap(), &want[0].to_f32().unwrap(), tol);
}

#[test]
fn rows_too_long_for_shared_memory_are_multiplied_by_other_kernels() {
    let k = 60_000;
    let weights = vec![weight("norm", DType::F32, &[k]), weight("w", DType::BF16, &[3, k])];
    agrees(weights, k, Tol::Whole(1e-4), |b, x| {
        let (norm, w) = (b.weight(WeightId::from_idx(0)), b.weight(WeightId::from_idx(1)));
        let h = b.rms_norm(x, norm, 1e-5, "norm").unwrap();
        b.linear(h, w, None, "w").unwrap()
    });
}

/// Rows in 16 bits times a model's weight, as stored and transposed, and times a state, as trained weights
/// are.
#[test]
fn rows_in_16_bits_are_multiplied_with_weights_and_states() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let state = |name: &str, dims: &[usize]| refrain_graph::State {
            name: name.into(),
            ty: TensorType::new(dtype, refrain_tensor::Shape::new(dims).unwrap()),
            kind: StateKind::Whole,
        };
        let weights = vec![weight("w", dtype, &[40, 24]), weight("norm", DType::F32, &[24])];
        let tensors: Vec<_> =
            weights.iter().enumerate().map(|(i, w)| tensor(w.ty, &Fill::Normal, i as u64)).collect();
        let states = vec![state("s", &[40, 24])];
        let zeros: Vec<_> = states.iter().map(|s| tensor(s.ty, &Fill::Uniform(0.0, 0.0), 7)).collect();
        let mut b = GraphBuilder::new(weights, states);
        let ty = TensorType::new(DType::F32, [17, 24]);
        let more = TensorType::new(DType::F32, [40, 24]);
        let (x, more_in) = (b.input("x", ty).unwrap(), b.input("more", more).unwrap());
        let x = b.cast(x, dtype).unwrap();
        let w = b.weight(WeightId::from_idx(0));
        let mut s = b.state(refrain_graph::StateId::from_idx(0));
        // States begin as zeros, and only F32 sums can be added to them here.
        if dtype == DType::F32 {
            s = b.node(Op::Accumulate, &[s, more_in], "more").unwrap()[0];
        }
        let turned = b.permute(s, &[1, 0]).unwrap();
        let forward = b.linear(x, w, None, "forward").unwrap();
        let back = b.node(Op::MatMul, &[forward, w], "back").unwrap()[0];
        let by_state = b.node(Op::MatMul, &[back, turned], "by_state").unwrap()[0];
        let across = b.permute(by_state, &[1, 0]).unwrap();
        let grad = b.node(Op::MatMul, &[across, x], "grad").unwrap()[0];
        for (name, value) in [("forward", forward), ("back", back), ("by_state", by_state), ("grad", grad)] {
            b.output(name, value).unwrap();
        }
        let feed = Feed {
            weights: tensors,
            inputs: vec![tensor(ty, &Fill::Normal, 99), tensor(more, &Fill::Normal, 98)],
            states: zeros,
        };
        let graph = b.finish();
        let want = evaluate(&graph, &feed).unwrap();
        for mode in [GraphMode::Off, GraphMode::Require] {
            let got = run(&mut backend(mode, Method::Stream), &graph, &feed).unwrap();
            for (got, want) in got.iter().zip(&want) {
                let tol = Tol::Whole(if dtype == DType::F32 { 1e-4 } else { 3e-2 });
                refrain_testkit::assert_close(&got.to_f32().unwrap(), &want.to_f32().unwrap(), tol);
            }
        }
    }
}

/// Heads of 16 bits that tensor cores do not support still run, with a note.
#[test]
fn attention_without_tensor_cores_is_reported() {
    let told = |head_dim: usize| {
        let mut b = GraphBuilder::new(Vec::new(), Vec::new());
        let ty = TensorType::new(DType::F32, [3, 2, head_dim]);
        let x = b.input("x", ty).unwrap();
        let spans = b.input("spans", TensorType::new(DType::I32, [3, 2])).unwrap();
        let x = b.cast(x, DType::BF16).unwrap();
        let op = SpanAttention { scale: 0.5, causal: true, window: None, softcap: None };
        let made = b.node(Op::SpanAttention(op), &[x, x, x, spans], "attention").unwrap();
        b.output("y", made[0]).unwrap();
        let backend = backend(GraphMode::Require, Method::Stream);
        backend.load(&[], Vec::new()).unwrap();
        backend.allocate(&[]).unwrap();
        backend.compile(&b.finish()).unwrap();
        backend.monitor().status().unfused
    };
    assert_eq!(told(64), Vec::<String>::new());
    let [line] = &told(20)[..] else { panic!("one reason") };
    assert!(
        line.contains("attention runs without tensor cores: this GPU has no kernel for heads of 20"),
        "{line}"
    );
}

#[test]
fn a_norm_with_computed_weights_is_not_fused() {
    let weights = vec![weight("norm", DType::F32, &[64]), weight("w", DType::BF16, &[9, 64])];
    agrees(weights, 64, Tol::Whole(1e-4), |b, x| {
        let (norm, w) = (b.weight(WeightId::from_idx(0)), b.weight(WeightId::from_idx(1)));
        let norm = b.unary(Unary::Tanh, norm).unwrap();
        let h = b.rms_norm(x, norm, 1e-5, "norm").unwrap();
        b.linear(h, w, None, "w").unwrap()
    });
}

#[test]
fn a_sum_larger_than_the_product_is_not_fused() {
    let weights = vec![weight("w", DType::BF16, &[1, 64]), weight("bias", DType::F32, &[5])];
    agrees(weights, 64, Tol::Whole(1e-4), |b, x| {
        let (w, bias) = (b.weight(WeightId::from_idx(0)), b.weight(WeightId::from_idx(1)));
        let y = b.linear(x, w, None, "w").unwrap();
        b.add(y, bias).unwrap()
    });
}
