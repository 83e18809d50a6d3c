//! Replanned memory: evaluated tokens stay, and nothing runs on memory that is gone.

mod rig;

use refrain_cuda::{CudaBackend, CudaCompiled, CudaOptions, CudaStates, CudaWeights, GraphMode};
use refrain_driver::sim::{DriverCall, FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_graph::{
    Backend, CompileError, ControlBlock, Filler, GraphBuilder, Io, Plan, Ran, Reason, RunError,
};
use refrain_graph::{State, StateId, StepInputs, TensorType, fuse};
use refrain_models::{Head, KvSpec, StepSpec};
use refrain_tensor::DType;
use rig::{model, options};

const KV: KvSpec = KvSpec { n_blocks: 8, kv_block: 16, max_blocks: 8, n_slots: 0, dtype: DType::F16 };

/// Steps of the small llama without an engine, on a device with a given amount of memory.
struct Bed {
    sim: SimDriver,
    backend: CudaBackend,
    weights: CudaWeights,
    states: CudaStates,
    kv: KvSpec,
}

impl Bed {
    fn new(memory_bytes: u64, mode: GraphMode) -> Bed {
        let sim = SimDriver::new(SimOptions { memory_bytes, ..SimOptions::default() });
        refrain_kernels::register_twins(&sim);
        let device = Device::simulated(&sim).unwrap();
        let options = CudaOptions { arena_reserve_bytes: 0, ..options(mode, Method::Stream) };
        let (backend, model) = (CudaBackend::on(&device, options).unwrap(), model("llama"));
        let weights = backend.load(model.weights(), model.tensors().to_vec()).unwrap();
        let states = backend.allocate(&model.states(&KV)).unwrap();
        Bed { sim, backend, weights, states, kv: KV }
    }

    fn compile(&self, n_tokens: usize) -> Result<CudaCompiled, CompileError> {
        let spec = StepSpec::of_one(n_tokens, n_tokens, Head::Logits);
        let graph = fuse(&model("llama").graph(&spec, &self.kv).unwrap()).unwrap();
        self.backend.compile(&graph)
    }

    /// Bits of the logits after a token at a position.
    fn logits(&mut self, step: &mut CudaCompiled, position: i32) -> Result<Vec<u32>, RunError> {
        let plan: &Plan = self.backend.plan(step);
        let inputs: StepInputs = plan.step_inputs().unwrap().clone();
        let mut control = ControlBlock::new(plan.control());
        let mut filler = Filler::new(&mut control);
        filler.padded(inputs.tokens, [7 + 3 * position]).unwrap();
        filler.padded(inputs.positions, [position]).unwrap();
        filler.padded(inputs.seqs, [0]).unwrap();
        filler.padded(inputs.tables.unwrap(), [3, 1, 4, 0]).unwrap();
        let io = Io { weights: &self.weights, states: &mut self.states, control: control.bytes() };
        let ran = self.backend.run(step, io)?;
        assert_eq!(ran, Ran::REPLAYED);
        let n_vocab = model("llama").config().n_vocab;
        let mut logits = vec![0u32; n_vocab];
        self.backend.read(step, inputs.logits.unwrap(), bytemuck::cast_slice_mut(&mut logits))?;
        Ok(logits)
    }
}

/// Logits of eleven tokens, with something happening before the sixth and before the ninth.
fn evaluate(
    bed: &mut Bed,
    mut happens: impl FnMut(&mut Bed, &mut CudaCompiled, i32),
) -> Result<Vec<Vec<u32>>, RunError> {
    let mut step = bed.compile(1).unwrap();
    let mut out = Vec::new();
    for position in 0..11 {
        if position == 5 || position == 8 {
            happens(bed, &mut step, position);
        }
        out.push(bed.logits(&mut step, position)?);
    }
    Ok(out)
}

const PLENTY: u64 = 64 << 20;

#[test]
fn a_plan_that_does_not_fit_is_refused_and_the_cache_stays() {
    let mut roomy = Bed::new(PLENTY, GraphMode::Require);
    let want = evaluate(&mut roomy, |_, _, _| {}).unwrap();
    let needed = roomy.backend.monitor().status().memory.total();
    // No more memory than one step needs, apart from rounding, kernels and the driver's probe.
    let mut tight = Bed::new(needed + (512 << 10), GraphMode::Require);
    let got = evaluate(&mut tight, |bed, _, _| {
        let before = bed.sim.stats().n_calls(DriverCall::Alloc);
        let error = bed.compile(512).map(drop).unwrap_err();
        assert!(format!("{error:?}").contains("DoesNotFit"), "{error:?}");
        assert_eq!(
            bed.sim.stats().n_calls(DriverCall::Alloc),
            before,
            "refused before anything was released"
        );
    });
    assert_eq!(got.unwrap(), want);
}

#[test]
fn more_step_memory_moves_neither_weights_nor_cache() {
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let want = evaluate(&mut bed, |_, _, _| {}).unwrap();
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let mut larger = Vec::new();
    let got = evaluate(&mut bed, |bed, _, position| {
        let before = bed.backend.monitor().status();
        larger.push(bed.compile(if position == 5 { 24 } else { 48 }).unwrap());
        let after = bed.backend.monitor().status();
        assert!(after.memory.arena_bytes > before.memory.arena_bytes);
        assert_eq!(after.upload, before.upload, "weights were uploaded once");
    });
    assert_eq!(got.unwrap(), want);
}

#[test]
fn a_program_without_memory_reports_it_and_continues_once_memory_is_available() {
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let want = evaluate(&mut bed, |_, _, _| {}).unwrap();
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let mut kept = Vec::new();
    let got = evaluate(&mut bed, |bed, step, position| {
        if position == 5 {
            // Neither the larger step's memory nor the previous one can be allocated.
            let script = "on 1st allocation: out of memory; on 2nd allocation: out of memory";
            bed.sim.inject(FaultScript::parse(script).unwrap());
            assert!(bed.compile(48).is_err());
            let error = bed.logits(step, position).unwrap_err();
            assert!(format!("{error:?}").contains("OutOfMemory"), "{error:?}");
            kept.push(bed.compile(8).unwrap());
        } else {
            // The larger one cannot be allocated, the previous one can.
            bed.sim.inject(FaultScript::parse("on 1st allocation: out of memory").unwrap());
            assert!(bed.compile(48).is_err());
        }
    });
    assert_eq!(got.unwrap(), want);
}

#[test]
fn a_cache_that_grows_keeps_its_contents_and_one_that_cannot_is_unchanged() {
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let want = evaluate(&mut bed, |_, _, _| {}).unwrap();
    let mut bed = Bed::new(PLENTY, GraphMode::Require);
    let got = evaluate(&mut bed, |bed, step, position| {
        let grow = |bed: &mut Bed, n_blocks: usize| {
            let kv = KvSpec { n_blocks, max_blocks: n_blocks, ..KV };
            let to = model("llama").states(&kv);
            bed.backend.resize(&mut bed.states, &to).map(|()| bed.kv = kv)
        };
        if position == 5 {
            grow(bed, 21).unwrap();
            assert!(bed.logits(step, position).is_err(), "the old program used another cache");
            *step = bed.compile(1).unwrap();
        } else {
            let before = bed.backend.monitor().status().memory;
            let error = grow(bed, 1 << 20).unwrap_err();
            assert!(format!("{error:?}").contains("DoesNotFit"), "{error:?}");
            assert_eq!(bed.backend.monitor().status().memory.kv_bytes, before.kv_bytes);
            let other = model("llama").states(&KvSpec { kv_block: 32, ..KV });
            assert!(
                bed.backend.resize(&mut bed.states, &other).is_err(),
                "only the first dimension may change"
            );
        }
    });
    assert_eq!(got.unwrap(), want);
    assert!(bed.kv.n_blocks == 21 && bed.backend.monitor().status().upload.bytes > 0);
}

#[test]
fn weights_are_uploaded_under_the_load_limit_not_the_compile_limit() {
    let sim = SimDriver::new(SimOptions::default());
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    // A very slow disk, simulated by a listener that sleeps at each weight.
    let slow = refrain_cuda::LoadListener::new(|event| {
        if matches!(event, refrain_cuda::LoadEvent::Uploaded { .. }) {
            std::thread::sleep(std::time::Duration::from_millis(40));
        }
    });
    let options = CudaOptions {
        on_load: slow,
        compile_limit: std::time::Duration::from_secs(1),
        ..options(GraphMode::Off, Method::Stream)
    };
    let (backend, model) = (CudaBackend::on(&device, options).unwrap(), model("llama"));
    assert!(model.weights().len() > 25 / 2, "the sleeps must add up to more than the limit");
    let _weights = backend.load(model.weights(), model.tensors().to_vec()).unwrap();
    let _states = backend.allocate(&model.states(&KV)).unwrap();
    let spec = StepSpec::of_one(1, 1, Head::Logits);
    let began = std::time::Instant::now();
    backend.compile(&fuse(&model.graph(&spec, &KV).unwrap()).unwrap()).unwrap();
    assert!(began.elapsed() > std::time::Duration::from_millis(500));
}

/// `sum += x`, with twice the sum as output.
fn running_sum() -> refrain_graph::Graph {
    let ty = TensorType::new(DType::F32, [3, 5]);
    let mut b = GraphBuilder::new(vec![], vec![State::whole("sum", ty)]);
    let x = b.input("x", ty).unwrap();
    let state = b.state(StateId::from_idx(0));
    let sum = b.node(refrain_graph::Op::Accumulate, &[state, x], "accumulate").unwrap()[0];
    let twice = b.add(sum, sum).unwrap();
    b.output("twice", twice).unwrap();
    b.finish()
}

fn sums(script: &str, mode: GraphMode) -> (Vec<f32>, Vec<Ran>) {
    let (_sim, device) = rig::sim(script);
    let mut backend = CudaBackend::on(&device, options(mode, Method::Stream)).unwrap();
    let graph = running_sum();
    let weights = backend.load(graph.weights(), vec![]).unwrap();
    let mut states = backend.allocate(graph.states()).unwrap();
    let mut compiled = backend.compile(&graph).unwrap();
    let (mut out, mut how) = (Vec::new(), Vec::new());
    for step in 1..=6 {
        let mut control = ControlBlock::new(backend.plan(&compiled).control());
        let x = control.layout().find("x").unwrap();
        control.set_f32(x, &[step as f32; 15]).unwrap();
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        how.push(backend.run(&mut compiled, io).unwrap());
        let mut twice = [0f32; 15];
        backend.read(&compiled, 0, bytemuck::cast_slice_mut(&mut twice)).unwrap();
        assert!(twice.iter().all(|t| *t == twice[0]), "{twice:?}");
        out.push(twice[0]);
    }
    (out, how)
}

#[test]
fn a_whole_state_that_a_step_changes_is_verified_and_restored() {
    let want = [2.0, 6.0, 12.0, 20.0, 30.0, 42.0];
    // Verification runs the step six times; none of that may remain in the sum.
    let (replayed, how) = sums("", GraphMode::Require);
    assert_eq!(replayed, want);
    assert!(how.iter().all(|ran| *ran == Ran::REPLAYED));
    assert_eq!(sums("", GraphMode::Off).0, want);
    // The second replay belongs to verification: the wrong byte in the state is found, and the state is
    // restored.
    let (eager, how) = sums("on 2nd replay: wrong byte", GraphMode::Auto);
    assert_eq!(eager, want);
    let Ran::Eager(Reason::BackingOff { after, .. }) = &how[0] else { panic!("{how:?}") };
    assert!(matches!(**after, Reason::VerifyMismatch { .. }), "{how:?}");
}
