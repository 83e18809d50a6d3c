//! A compiled step does not allocate.

use refrain_cpu::CpuBackend;
use refrain_graph::{Backend, ControlBlock, Io, SAMPLE_PARAMS, fuse};
use refrain_models::{Head, KvSpec, Model, NamedShape, QuantMix, SampleHead, StepSpec};
use refrain_tensor::DType;
use refrain_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn a_decoded_token_allocates_nothing() {
    let model = Model::random(NamedShape::find("smollm2-135m").unwrap(), QuantMix::All(DType::Q8_0)).unwrap();
    let kv = KvSpec { n_blocks: 4, kv_block: 32, max_blocks: 4, n_slots: 0, dtype: DType::F16 };
    let spec =
        StepSpec::of_one(1, 1, Head::Sample(SampleHead { n_history: 4, n_bias: 1, masked: false, n_top: 0 }));
    let mut backend = CpuBackend::new(2).unwrap();
    let weights = backend.load(model.weights(), model.tensors().to_vec()).unwrap();
    let mut states = backend.allocate(&model.states(&kv)).unwrap();
    let mut compiled = backend.compile(&fuse(&model.graph(&spec, &kv).unwrap()).unwrap()).unwrap();
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let find = |name| control.layout().find(name).unwrap();
    let [tokens, positions, tables] = ["tokens", "positions", "tables"].map(find);
    let [params, rng] = ["params", "rng"].map(find);
    control.set_i32(tables, &[0, 1, 2, 3]).unwrap();
    // Common values of temperature, top-k, top-p and min-p.
    let mut row = [0.0; SAMPLE_PARAMS];
    row[..5].copy_from_slice(&[0.8, 40.0, 0.95, 0.05, 1.0]);
    control.set_f32(params, &row).unwrap();
    let mut step = |i: i32, control: &mut ControlBlock| {
        control.set_i32(tokens, &[17 + i]).unwrap();
        control.set_i32(positions, &[i]).unwrap();
        control.set_u32(rng, &[1, 2, i as u32, 0]).unwrap();
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        backend.run(&mut compiled, io).unwrap();
    };
    // The first steps may grow buffers that persist across steps.
    (0..3).for_each(|i| step(i, &mut control));
    let ((), n) = ALLOCATOR.count(|| (3..40).for_each(|i| step(i, &mut control)));
    assert_eq!(n, 0, "37 steps made {n} allocations");
}
