//! Common mistakes of captured training steps, each as a test on replays.

mod runs;

use refrain_cuda::{CudaBackend, Monitor};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_graph::{Op, Ran, SegmentKind, StateId, TrainOp};
use refrain_models::TrainSpec;
use refrain_tensor::DType;
use refrain_train::learner::{AdamSettings, BatchRows, Learner, StepOutcome};
use runs::{AHEAD, Bench, OwnRows, assert_same, backend, states};

const PLAIN: AdamSettings =
    AdamSettings { lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, clip: None };

const SPEC: TrainSpec = TrainSpec {
    n_tokens: 16,
    n_context: 16,
    dtype: DType::F32,
    masters: false,
    accumulates: false,
    dropout: 0.0,
    recompute: false,
};

/// A learner that requires every step to be a replay, and its initial states.
struct Replayed {
    learner: Learner<CudaBackend>,
    monitor: Monitor,
    saved: Vec<(String, Vec<u8>)>,
}

impl Replayed {
    fn new(spec: TrainSpec, n_batches: usize) -> Replayed {
        let bench = Bench::new();
        let sim = SimDriver::new(SimOptions { seed: 2, ..SimOptions::default() });
        let (_, backend) = backend(&sim, AHEAD);
        let monitor = backend.monitor();
        let learner = Learner::new(backend, bench.model(&bench.config("none")), spec, n_batches);
        let learner = learner.unwrap_or_else(|e| panic!("{e}: {e:?}"));
        let saved = states(&learner);
        Replayed { learner, monitor, saved }
    }

    fn put_back(&mut self) {
        for (i, (_, bytes)) in self.saved.iter().enumerate() {
            self.learner.set_state(StateId::from_idx(i), bytes).unwrap();
        }
    }

    fn step(&mut self, rows: &[BatchRows<'_>], adam: &AdamSettings, random: [u32; 4]) -> StepOutcome {
        let outcome = self.learner.step(rows, adam, random).unwrap_or_else(|e| panic!("{e}: {e:?}"));
        let replayed = |ran: &Ran| matches!(ran, Ran::Replayed { n_launches: 1, n_host_steps: 0 });
        assert!(outcome.ran.len() == rows.len() && outcome.ran.iter().all(replayed), "{outcome:?}");
        outcome
    }

    /// Distance of the first weight from its initial value.
    fn moved(&self) -> Vec<f64> {
        let value = self.learner.table().params[0].value;
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let (after, before) =
            (floats(&self.learner.state(value).unwrap()), floats(&self.saved[value.idx()].1));
        after.iter().zip(before).map(|(after, before)| f64::from(after - before).abs()).collect()
    }
}

#[test]
fn the_learning_rate_is_not_frozen_into_the_graph() {
    let mut bed = Replayed::new(SPEC, 1);
    let rows = OwnRows::new(2, 1, 30);
    let mut moved = |lr| {
        bed.put_back();
        bed.step(&[rows.rows()], &AdamSettings { lr, ..PLAIN }, [0; 4]);
        bed.moved().iter().sum::<f64>()
    };
    let (slow, fast, still) = (moved(1e-2), moved(4e-2), moved(0.0));
    assert!(still == 0.0 && slow > 0.0 && (fast / slow - 4.0).abs() < 1e-3, "{still} {slow} {fast}");
}

#[test]
fn the_count_of_steps_is_not_frozen_into_the_graph() {
    let mut bed = Replayed::new(SPEC, 1);
    let rows = OwnRows::new(2, 1, 30);
    let count = bed.learner.table().count;
    // The first moments of a gradient g are 0.1 g and 0.05 g²; their divisors depend on the step count.
    let corrected = |t: i32| 0.1 / (1.0 - 0.9f64.powi(t)) / (0.05 / (1.0 - 0.95f64.powi(t))).sqrt();
    for n_steps in [0, 1, 9, 99] {
        bed.put_back();
        bed.learner.set_state(count, &i32::to_le_bytes(n_steps)).unwrap();
        bed.step(&[rows.rows()], &PLAIN, [0; 4]);
        assert_eq!(bed.learner.state(count).unwrap(), (n_steps + 1).to_le_bytes());
        let (got, want) = (bed.moved().into_iter().fold(0.0, f64::max), 1e-3 * corrected(n_steps + 1));
        assert!((got / want - 1.0).abs() < 1e-2, "after {n_steps} steps: {got}, not {want}");
    }
}

#[test]
fn the_random_state_of_dropout_is_not_frozen_into_the_graph() {
    let mut bed = Replayed::new(TrainSpec { dropout: 0.3, ..SPEC }, 1);
    let rows = OwnRows::new(2, 1, 30);
    let still = AdamSettings { lr: 0.0, ..PLAIN };
    let mut loss = |random| bed.step(&[rows.rows()], &still, random).loss;
    let first = loss([7, 0, 0, 0]);
    assert_ne!(first, loss([7, 0, 1, 0]), "another step drops other elements");
    assert_ne!(first, loss([8, 0, 0, 0]), "another seed drops other elements");
    assert_eq!(first, loss([7, 0, 0, 0]), "the same numbers drop the same elements");
}

#[test]
fn accumulated_gradients_belong_to_one_step_and_are_cleared_after_it() {
    let mut bed = Replayed::new(TrainSpec { accumulates: true, ..SPEC }, 2);
    let rows: Vec<OwnRows> = (0..3).map(|salt| OwnRows::new(2, salt, 30)).collect();
    let both = [rows[0].rows(), rows[1].rows()];
    let first = bed.step(&both, &PLAIN, [0; 4]);
    let after = states(&bed.learner);
    let sums = bed.learner.table().params.iter().filter_map(|p| p.sum);
    for sum in sums {
        assert!(after[sum.idx()].1.iter().all(|b| *b == 0), "{} is not cleared", after[sum.idx()].0);
    }
    // The sums of another step in between must not matter.
    bed.step(&[rows[2].rows(), rows[0].rows()], &PLAIN, [0; 4]);
    bed.put_back();
    let again = bed.step(&both, &PLAIN, [0; 4]);
    assert_eq!((first.loss, first.grad_norm), (again.loss, again.grad_norm));
    assert_same(&states(&bed.learner), &after, "the same step from the same states");
    // The first of the two batches counts: another batch in its place gives another result.
    bed.put_back();
    let other = bed.step(&[rows[2].rows(), rows[1].rows()], &PLAIN, [0; 4]);
    assert_ne!(first.grad_norm, other.grad_norm);
}

#[test]
fn the_optimiser_is_inside_the_graph_which_contains_only_kernels() {
    for masters in [false, true] {
        let mut bed = Replayed::new(TrainSpec { dtype: DType::BF16, masters, ..SPEC }, 1);
        let plan = bed.learner.plan();
        let [segment] = plan.segments() else { panic!("{} segments", plan.segments().len()) };
        assert_eq!((segment.kind, segment.steps.len()), (SegmentKind::Recordable, plan.steps().len()));
        let is_adamw = |op: &Op| matches!(op, Op::Train(TrainOp::AdamW(_)));
        assert_eq!(plan.steps().iter().filter(|step| is_adamw(&step.op)).count(), 1);
        bed.step(&[OwnRows::new(2, 1, 30).rows()], &PLAIN, [0; 4]);
        assert_ne!(states(&bed.learner), bed.saved);
        let status = bed.monitor.status();
        let [graph] = &status.graphs[..] else { panic!("{:?}", status.graphs) };
        assert!(graph.n_nodes > 20 && graph.n_nodes == graph.n_kernels, "{graph:?}");
        assert!(graph.bit_exact);
    }
}

#[test]
fn a_step_with_a_non_finite_number_is_not_applied() {
    let mut bed = Replayed::new(SPEC, 1);
    let rows = OwnRows::new(2, 1, 30);
    let value = bed.learner.table().params[0].value;
    let mut bytes = bed.saved[value.idx()].1.clone();
    // Tokens that the rows have, so that it flows.
    bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = f32::INFINITY.to_le_bytes());
    bed.learner.set_state(value, &bytes).unwrap();
    let before = states(&bed.learner);
    let outcome = bed.step(&[rows.rows()], &PLAIN, [0; 4]);
    assert!(!outcome.loss.is_finite() && !outcome.is_applied(), "{outcome:?}");
    assert_same(&states(&bed.learner), &before, "weights, moments and step count");
}
