//! Queued steps: each has its own inputs and results, in order, and one that cannot be launched ends the
//! queue.

use refrain_cuda::{CudaBackend, CudaCompiled, CudaOptions, CudaStates, CudaWeights, GraphMode};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_graph::{
    Backend, ControlBlock, GraphBuilder, InputId, Io, Op, Ran, RunError, State, StateId, StepQueue,
    TensorType, Unary, Weight, WeightId,
};
use refrain_kernels::register_twins;
use refrain_tensor::{DType, HostTensor, Shape};

/// Rows and columns of the table.
const SHAPE: [usize; 2] = [8, 4];

/// A step that adds a row of a table to a state, and returns twice the row.
struct Bed {
    compiled: CudaCompiled,
    weights: CudaWeights,
    states: CudaStates,
    backend: CudaBackend,
    sim: SimDriver,
    id: InputId,
    queue: StepQueue,
}

fn bed(mode: GraphMode) -> Bed {
    let sim = SimDriver::new(SimOptions { seed: 8, ..SimOptions::default() });
    register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let backend = CudaBackend::on(&device, CudaOptions::new(mode, Method::Stream)).unwrap();
    let table = Weight { name: "table".into(), ty: TensorType::new(DType::F32, SHAPE) };
    let sum = State::whole("sum", TensorType::new(DType::F32, [1, SHAPE[1]]));
    let mut b = GraphBuilder::new(vec![table.clone()], vec![sum.clone()]);
    let ids = b.input("ids", TensorType::new(DType::I32, [1])).unwrap();
    let id = b.input_id(ids);
    let rows = b.weight(WeightId::from_idx(0));
    let row = b.gather_rows(rows, ids, DType::F32).unwrap();
    let state = b.state(StateId::from_idx(0));
    b.node(Op::Accumulate, &[state, row], "sum").unwrap();
    let twice = b.unary(Unary::Affine { mul: 2.0, add: 0.0 }, row).unwrap();
    b.output("twice", twice).unwrap();
    // An output larger than a slot, and one whose elements are not contiguous.
    let tall = b.unary(Unary::Neg, rows).unwrap();
    let turned = b.permute(tall, &[1, 0]).unwrap();
    b.output("turned", turned).unwrap();
    let graph = b.finish();
    let values: Vec<f32> = (0..SHAPE[0] * SHAPE[1]).map(|i| i as f32).collect();
    let table_values = HostTensor::from_f32(Shape::new(&SHAPE).unwrap(), &values).unwrap();
    let weights = backend.load(&[table], vec![table_values]).unwrap();
    let states = backend.allocate(&[sum]).unwrap();
    let compiled = backend.compile(&graph).unwrap();
    Bed { compiled, weights, states, backend, sim, id, queue: StepQueue::new() }
}

impl Bed {
    fn queue(&mut self, row: i32, outputs: &[usize]) -> Result<(), RunError> {
        let mut control = ControlBlock::new(self.backend.plan(&self.compiled).control());
        control.set_i32(self.id, &[row]).unwrap();
        let io = Io { weights: &self.weights, states: &mut self.states, control: control.bytes() };
        self.backend.queue(&mut self.compiled, io, outputs, &mut self.queue)
    }

    /// The first value that a step returns, which identifies its row.
    fn collect(&mut self) -> Result<(f32, Ran), RunError> {
        let step = self.backend.collect(&mut self.queue)?;
        let [output] = &step.outputs[..] else { panic!("{step:?}") };
        Ok((f32::from_le_bytes(*output.first_chunk().unwrap()), step.ran))
    }

    /// The accumulated sum of the first column.
    fn sum(&self) -> f32 {
        let mut bytes = [0; 4 * SHAPE[1]];
        self.backend.read_state(&self.states, StateId::from_idx(0), &mut bytes).unwrap();
        f32::from_le_bytes(*bytes.first_chunk().unwrap())
    }
}

#[test]
fn each_step_has_its_own_inputs_and_results_and_states_carry_over() {
    for mode in [GraphMode::Require, GraphMode::Off] {
        let mut bed = bed(mode);
        assert_eq!(bed.backend.queue_depth(), 3);
        let rows = [3, 0, 7, 1, 1, 6, 2, 5];
        let mut found = Vec::new();
        for (i, row) in rows.into_iter().enumerate() {
            if i >= 3 {
                found.push(bed.collect().unwrap());
            }
            bed.queue(row, &[0]).unwrap();
        }
        assert_eq!(bed.queue.len(), 3);
        // Reading a state waits for the queued steps and consumes none of them.
        let sum: i32 = rows.iter().map(|row| 4 * row).sum();
        assert_eq!(bed.sum(), sum as f32);
        found.extend((0..3).map(|_| bed.collect().unwrap()));
        let firsts: Vec<f32> = found.iter().map(|(first, _)| *first).collect();
        assert_eq!(firsts, rows.map(|row| 8.0 * row as f32));
        assert!(found.iter().all(|(_, ran)| (*ran == Ran::REPLAYED) == (mode == GraphMode::Require)));
        assert!(matches!(bed.collect(), Err(RunError::Mismatch { what: "queues", .. })));
        assert_eq!(bed.sim.reports(), Vec::<String>::new());
    }
}

#[test]
fn an_invalid_step_is_refused_and_leaves_the_queue_unchanged() {
    let mut bed = bed(GraphMode::Require);
    let refused = |result: Result<(), RunError>| match result {
        Err(RunError::Mismatch { what, because }) => format!("{what}: {because}"),
        other => panic!("{other:?}"),
    };
    bed.queue(1, &[0]).unwrap();
    assert!(refused(bed.queue(2, &[1])).contains("strided"), "the elements are not contiguous");
    assert!(refused(bed.queue(2, &[7])).contains("no output 7"));
    let many = vec![0; 257];
    assert!(refused(bed.queue(2, &many)).contains("4112 bytes are requested, at most 4096 can be"));
    bed.queue(2, &[0]).unwrap();
    bed.queue(3, &[0]).unwrap();
    assert!(refused(bed.queue(4, &[0])).contains("3 steps are in flight"));
    let firsts = [(); 3].map(|()| bed.collect().unwrap().0);
    assert_eq!((firsts, bed.sum()), ([8.0, 16.0, 24.0], 24.0));
}

#[test]
fn a_step_that_cannot_be_launched_ends_the_queue_after_earlier_steps() {
    let mut bed = bed(GraphMode::Require);
    for row in [1, 9, 2] {
        bed.queue(row, &[0]).unwrap();
    }
    assert_eq!(bed.collect().unwrap().0, 8.0);
    let error = bed.collect().unwrap_err();
    assert!(matches!(error, RunError::OutOfRange { got: 9, limit: 8, .. }), "{error:?}");
    assert!(bed.queue.is_empty(), "later steps are discarded");
    assert_eq!(bed.sum(), 4.0, "and did not run");
    bed.queue(5, &[0]).unwrap();
    assert_eq!((bed.collect().unwrap().0, bed.sum()), (40.0, 24.0), "a new queue starts");
}

#[test]
fn a_failed_replay_in_a_queue_runs_eagerly_or_ends_the_queue() {
    let mut auto = bed(GraphMode::Auto);
    auto.sim.inject(FaultScript::parse("on 2nd replay: fail LAUNCH_OUT_OF_RESOURCES").unwrap());
    (1..4).for_each(|row| auto.queue(row, &[0]).unwrap());
    let found = [(); 3].map(|()| auto.collect().unwrap());
    assert_eq!(found.each_ref().map(|(first, _)| *first), [8.0, 16.0, 24.0]);
    assert!(matches!(found.map(|(_, ran)| ran), [Ran::Replayed { .. }, Ran::Eager(_), Ran::Eager(_)]));
    assert_eq!(auto.sum(), 24.0);

    let mut require = bed(GraphMode::Require);
    require.sim.inject(FaultScript::parse("on 2nd replay: fail LAUNCH_OUT_OF_RESOURCES").unwrap());
    (1..4).for_each(|row| require.queue(row, &[0]).unwrap());
    assert_eq!(require.collect().unwrap().0, 8.0);
    assert!(matches!(require.collect(), Err(RunError::Backend { .. })));
    assert_eq!((require.queue.len(), require.sum()), (0, 4.0));
}

#[test]
fn abandoned_steps_run_and_their_results_are_discarded() {
    let mut bed = bed(GraphMode::Require);
    (1..3).for_each(|row| bed.queue(row, &[0]).unwrap());
    assert_eq!(bed.backend.abandon(&mut bed.queue).unwrap(), 2);
    assert!(matches!(bed.collect(), Err(RunError::Mismatch { .. })));
    bed.queue(3, &[0]).unwrap();
    assert_eq!((bed.collect().unwrap().0, bed.sum()), (24.0, 24.0));
}
