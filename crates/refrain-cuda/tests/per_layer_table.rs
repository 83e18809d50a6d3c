//! A table of per-layer embeddings on the device, in pinned memory and on the host: the same bits and the
//! same body.

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use refrain_cuda::{CacheOptions, CudaBackend, GraphMode, Status};
use refrain_driver::{Device, Method};
use refrain_engine::{BackendRunner, Core, EngineError, RunnerOptions, StepKind};
use refrain_formats::{FormatError, ModelFiles};
use refrain_graph::{
    Backend, ControlBlock, GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, Io, Ran, RunError,
    SegmentKind, TensorType, Weight,
};
use refrain_models::{Model, TensorSource};
use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use rig::goldens::{golden, model, model_files, relative_error};
use rig::{Rig, generate, gpu, gpu_turn, n_decoded, options, sim};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    Device,
    Pinned,
    Host,
}

const PLACEMENTS: [Placement; 3] = [Placement::Device, Placement::Pinned, Placement::Host];

fn rig(device: Device, model: &Model, mode: GraphMode, placement: Placement, context: usize) -> Rig {
    let mut options = options(mode, Method::Stream);
    let allow_host_steps = placement == Placement::Host;
    options.graphs = CacheOptions { allow_host_steps, ..options.graphs };
    let backend = CudaBackend::on(&device, options).unwrap();
    let monitor = backend.monitor();
    let table = model.token_table().unwrap();
    let model = match placement {
        Placement::Device => model.clone(),
        Placement::Pinned => {
            backend.keep_pinned(vec![model.weights()[table.idx()].name.clone()]).unwrap();
            model.clone()
        }
        Placement::Host => model.with_table_on_host(),
    };
    let runner = RunnerOptions {
        context,
        kv_block: 16,
        kv_dtype: DType::F16,
        max_tokens: 64,
        ..RunnerOptions::default()
    };
    let runner = BackendRunner::new(backend, Arc::new(model), runner).unwrap();
    Rig { engine: Core::new(Box::new(runner), context), monitor, device }
}

/// Replayed and eager steps of a rig, and its status.
fn decoded(rig: &Rig) -> (u64, u64, Status) {
    let tally = rig.engine.ledger().tally(StepKind::Decode);
    (tally.replayed, tally.eager, rig.monitor.status())
}

fn every_placement_gives_the_same_bits_replayed_and_eager(device: impl Fn() -> Device, n_tokens: usize) {
    let context = 2 * n_tokens + 64;
    for case in ["gemma4-e2b", "gemma4-heads"] {
        let model = model(case);
        let table = model.tensors()[model.token_table().unwrap().idx()].bytes().as_slice().len() as u64;
        let mut want = None;
        let mut weight_bytes = Vec::new();
        for placement in PLACEMENTS {
            let mut eager = rig(device(), &model, GraphMode::Off, placement, context);
            let said = generate(&mut eager, n_tokens);
            assert_eq!(want.get_or_insert_with(|| said.clone()), &said, "{case} {placement:?}, eager");
            let mut replayed = rig(device(), &model, GraphMode::Require, placement, context);
            assert_eq!(generate(&mut replayed, n_tokens), said, "{case} {placement:?}, replayed");
            let (n_replayed, n_eager, status) = decoded(&replayed);
            assert_eq!((n_replayed, n_eager), (n_decoded(n_tokens), 0), "{case} {placement:?}");
            // The body is a single graph of kernels only.
            assert!(status.graphs.iter().all(|g| g.bit_exact && g.n_nodes == g.n_kernels), "{status:?}");
            let feeds = status.graphs.iter().filter(|g| g.n_tokens == 1).all(|g| g.feeds_itself);
            assert_eq!(feeds, placement != Placement::Host, "{case} {placement:?}");
            let pinned = if placement == Placement::Pinned { table.next_multiple_of(256) } else { 0 };
            assert_eq!(status.memory.pinned_bytes, pinned, "{case} {placement:?}");
            weight_bytes.push(status.memory.weight_bytes);
        }
        let [on_device, pinned, host] = weight_bytes[..] else { unreachable!() };
        assert_eq!([pinned, host], [on_device - table.next_multiple_of(256); 2], "{case}");
    }
}

fn golden_logits_come_out_of_every_placement(device: impl Fn() -> Device) {
    let (tokens, want) = golden("gemma4-e2b");
    let mut first: Option<Vec<f32>> = None;
    for placement in PLACEMENTS {
        let mut rig = rig(device(), &model("gemma4-e2b"), GraphMode::Require, placement, 64);
        let mut session = rig.engine.open();
        let mut got = Vec::new();
        for piece in tokens.chunks(7) {
            got.extend_from_slice(rig.engine.logits(&mut session, piece, piece.len()).unwrap());
        }
        assert!(relative_error(&got, &want) < 5e-3, "{placement:?}");
        let first = first.get_or_insert_with(|| got.clone());
        let same = first.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{placement:?}");
    }
}

#[test]
fn a_table_on_the_host_is_one_step_before_one_captured_body() {
    let model = model("gemma4-e2b");
    for (placement, n_segments) in [(Placement::Device, 1), (Placement::Pinned, 1), (Placement::Host, 2)] {
        let mut rig = rig(sim("").1, &model, GraphMode::Require, placement, 64);
        let plan = rig.engine.plan(1).unwrap();
        let kinds: Vec<bool> = plan.segments().iter().map(|s| s.kind == SegmentKind::Recordable).collect();
        assert_eq!(kinds.len(), n_segments, "{placement:?}");
        assert!(kinds[n_segments - 1], "{placement:?}");
        if placement == Placement::Host {
            let crossing = plan.crossing(&plan.segments()[0]);
            // It reads one row of the table and nothing from the device: the step depends on the token alone.
            assert_eq!((crossing.to_host_bytes, crossing.to_device_bytes), (0, 9 * 8 * 4));
        }
    }
}

/// The model of a case with fewer rows in its second embedding.
struct ShortTable {
    files: ModelFiles,
    n_rows: usize,
}

impl TensorSource for ShortTable {
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError> {
        let found = self.files.find(gguf_name, hf_name)?;
        let Some(tensor) = found.filter(|_| gguf_name == "per_layer_token_embd.weight") else {
            return self.files.find(gguf_name, hf_name);
        };
        let (width, values) = (tensor.shape().dims()[1], tensor.to_f32().unwrap());
        let bytes = values[..self.n_rows * width].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let shape = Shape::from([self.n_rows, width]);
        Ok(Some(HostTensor::new(tensor.dtype(), shape, Bytes::new(bytes)).unwrap()))
    }

    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str {
        self.files.name(gguf_name, hf_name)
    }
}

#[test]
fn a_token_outside_the_table_is_refused_and_the_session_continues() {
    let files = model_files("gemma4-e2b");
    let mut config = files.config().unwrap();
    // First all rows of the file, then fewer.
    let mut short = config.per_layer.unwrap();
    short.n_vocab = 100;
    config.per_layer = Some(short);
    assert!(Model::from_source(config.clone(), &files).is_err(), "the file's table is longer");
    let model = Model::from_source(config, &ShortTable { files, n_rows: 100 }).unwrap();
    let mut want: Option<Vec<f32>> = None;
    for placement in PLACEMENTS {
        let mut rig = rig(sim("").1, &model, GraphMode::Require, placement, 64);
        let mut session = rig.engine.open();
        rig.engine.logits(&mut session, &[1, 99], 1).unwrap();
        let error = rig.engine.logits(&mut session, &[110], 1).unwrap_err();
        match (placement, &error) {
            (Placement::Host, EngineError::Run(RunError::Host { source, .. })) => {
                assert_eq!(source.0, "token 110 is outside the table, which has 100 rows");
            }
            (_, EngineError::Run(RunError::OutOfRange { got: 110, limit: 100, .. })) => {}
            _ => panic!("{placement:?}: {error:?}"),
        }
        let got = rig.engine.logits(&mut session, &[42], 1).unwrap().to_vec();
        let want = want.get_or_insert_with(|| got.clone());
        assert!(want.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{placement:?}");
        assert_eq!(rig.device.take_reports(), Vec::<String>::new());
    }
}

/// Gathers rows, and fails once.
struct FailsOnce {
    n_calls: AtomicUsize,
    at: usize,
}

impl HostFn for FailsOnce {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(vec![TensorType::new(DType::F32, [1, inputs[0].shape.dims()[1]])])
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        let id = i32::from_le_bytes(inputs[1].bytes[..4].try_into().unwrap()) as usize;
        let (first, second) = outputs[0].split_at_mut(16);
        first.copy_from_slice(&inputs[0].bytes[32 * id..][..16]);
        if self.n_calls.fetch_add(1, Ordering::Relaxed) == self.at {
            return Err(HostCallError("the disk is gone".into()));
        }
        second.copy_from_slice(&inputs[0].bytes[32 * id + 16..][..16]);
        Ok(())
    }
}

#[test]
fn a_host_read_that_fails_in_the_middle_fails_its_step_alone() {
    let weights = vec![Weight { name: "table".into(), ty: TensorType::new(DType::F32, [5, 8]) }];
    let mut b = GraphBuilder::new(weights, vec![]);
    let ids = b.input("ids", TensorType::new(DType::I32, [1])).unwrap();
    let table = b.weight(refrain_graph::WeightId::from_idx(0));
    let function = Arc::new(FailsOnce { n_calls: AtomicUsize::new(0), at: 2 });
    let call = HostCall { name: "rows", because: "its table stays on the host", function };
    let rows = b.host_call(call, &[table, ids]).unwrap()[0];
    let y = b.unary(refrain_graph::Unary::Neg, rows).unwrap();
    b.output("y", y).unwrap();
    let graph = b.finish();
    let graphs = CacheOptions { mode: GraphMode::Require, allow_host_steps: true, ..CacheOptions::default() };
    let options = refrain_cuda::CudaOptions { graphs, ..options(GraphMode::Require, Method::Stream) };
    let mut backend = CudaBackend::on(&sim("").1, options).unwrap();
    let values: Vec<f32> = (0..40).map(|v| v as f32).collect();
    let tensor = HostTensor::from_f32(Shape::from([5, 8]), &values).unwrap();
    // A table of another length is refused.
    let longer = HostTensor::from_f32(Shape::from([6, 8]), &[0.0; 48]).unwrap();
    assert!(matches!(backend.load(graph.weights(), vec![longer]), Err(RunError::Mismatch { .. })));
    let weights = backend.load(graph.weights(), vec![tensor]).unwrap();
    let mut states = backend.allocate(graph.states()).unwrap();
    let mut compiled = backend.compile(&graph).unwrap();
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let input = graph.input("ids").unwrap();
    for (step, id) in [3, 1, 4, 4, 0].into_iter().enumerate() {
        control.set_i32(input, &[id]).unwrap();
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        let ran = backend.run(&mut compiled, io);
        if step == 2 {
            let Err(RunError::Host { source, .. }) = ran else { panic!("{ran:?}") };
            assert_eq!(source.0, "the disk is gone");
            continue;
        }
        assert_eq!(ran.unwrap(), Ran::Replayed { n_launches: 1, n_host_steps: 1 });
        let mut got = [0_f32; 8];
        backend.read(&compiled, 0, bytemuck::cast_slice_mut(&mut got)).unwrap();
        let want: Vec<f32> = (0..8).map(|i| -((8 * id + i) as f32)).collect();
        assert_eq!(got.to_vec(), want, "step {step}");
    }
    // The table is not on the device.
    assert_eq!(backend.monitor().status().memory.weight_bytes, 0);
}

mod on_the_simulated_device {
    use super::*;

    #[test]
    fn same_bits() {
        every_placement_gives_the_same_bits_replayed_and_eager(|| sim("").1, 24);
    }

    #[test]
    fn golden_logits() {
        golden_logits_come_out_of_every_placement(|| sim("").1);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn same_bits() {
        let _turn = gpu_turn();
        every_placement_gives_the_same_bits_replayed_and_eager(gpu, 512);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn golden_logits() {
        let _turn = gpu_turn();
        golden_logits_come_out_of_every_placement(gpu);
    }
}
