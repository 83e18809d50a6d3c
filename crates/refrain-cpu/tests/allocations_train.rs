//! A compiled training step does not allocate. In a separate file, because allocations of all threads count.

use refrain_cpu::CpuBackend;
use refrain_graph::{Backend, ControlBlock, Io};
use refrain_models::{Model, NamedShape, QuantMix, TrainPhase, TrainSpec};
use refrain_tensor::DType;
use refrain_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn a_training_step_allocates_nothing_and_has_a_kernel_for_every_call() {
    let model = Model::random(NamedShape::find("llama-10m").unwrap(), QuantMix::All(DType::F32)).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let n_tokens = 32;
        let spec = TrainSpec {
            n_tokens,
            n_context: n_tokens,
            dtype,
            masters: dtype != DType::F32,
            accumulates: true,
            dropout: 0.1,
            recompute: false,
        };
        let mut backend = CpuBackend::new(2).unwrap();
        let step = model.train_graph(&spec, TrainPhase::Update).unwrap();
        let (weights, tensors) = model.frozen();
        let weights = backend.load(&weights, tensors).unwrap();
        let mut states = backend.allocate(&model.train_states(&spec).states).unwrap();
        let mut compiled = backend.compile(&step.graph).unwrap();
        let slow: Vec<_> = compiled.kernels().filter(|(_, kernel)| *kernel == "reference").collect();
        assert!(slow.is_empty(), "{dtype}: {slow:?} run their reference implementation");
        let mut control = ControlBlock::new(backend.plan(&compiled).control());
        let ids: Vec<i32> = (0..n_tokens as i32).collect();
        for input in [step.inputs.tokens, step.inputs.targets, step.inputs.positions] {
            control.set_i32(input, &ids).unwrap();
        }
        control.set_i32(step.inputs.spans, &[0, n_tokens as i32].repeat(n_tokens)).unwrap();
        let mut run = || {
            let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
            backend.run(&mut compiled, io).unwrap();
        };
        run();
        let ((), n) = ALLOCATOR.count(|| (0..2).for_each(|_| run()));
        assert_eq!(n, 0, "{dtype}: two steps made {n} allocations");
    }
}
