//! Training steps that are launched before earlier losses are known: the same bits, the same log, the same endings.

mod runs;

use std::cell::Cell;
use std::sync::Arc;

use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::Method;
use refrain_driver::sim::{DriverCall, SimDriver, SimOptions};
use refrain_graph::Ran;
use refrain_models::{Model, TrainSpec};
use refrain_tensor::DType;
use refrain_train::config::{EvalSource, Precision, ScheduleKind};
use refrain_train::learner::{AdamSettings, LearnError, Learner};
use refrain_train::log::LogLine;
use refrain_train::trainer::TrainEvent;
use refrain_train::{TrainConfig, TrainError};
use runs::{AHEAD, Bench, How, ONE_BY_ONE, OwnRows, assert_same, backend, ends_with, states};

const HELD_OUT: Option<f64> = Some(0.1);

fn plain(bench: &Bench, out: &str) -> TrainConfig {
    let eval = Some(EvalSource::Share(0.1));
    TrainConfig { eval, eval_every: Some(5), save_every: Some(4), ..bench.config(out) }
}

/// Everything that makes steps differ: micro-steps, dropout, recomputed layers, f32.
fn varied(bench: &Bench, out: &str) -> TrainConfig {
    let (dtype, dropout, accumulate) = (Precision::F32, 0.1, 2);
    TrainConfig { dtype, dropout, accumulate, checkpoint_activations: true, steps: 7, ..plain(bench, out) }
}

#[test]
fn replayed_steps_in_flight_equal_eager_steps_one_by_one() {
    let bench = Bench::new();
    let nodes = How { method: Method::Nodes, ..AHEAD };
    let eager = How { mode: GraphMode::Off, ..AHEAD };
    for (name, config) in [("plain", plain as fn(&Bench, &str) -> TrainConfig), ("varied", varied)] {
        let out = format!("{name}-want");
        let mut want = bench.start(&config(&bench, &out), ONE_BY_ONE, HELD_OUT);
        want.finish();
        assert_eq!(want.monitor.status().queued.most_in_flight, 1);
        let (want_states, want_log) = (want.states(), bench.log(&out));
        want.end();
        for (i, how) in [AHEAD, nodes, eager].into_iter().enumerate() {
            let out = format!("{name}-{i}");
            let config = config(&bench, &out);
            let mut run = bench.start(&config, how, HELD_OUT);
            let summary = run.finish();
            let n = config.steps * config.accumulate as u64;
            let replayed = if how.mode == GraphMode::Off { (0, n) } else { (n, 0) };
            assert_eq!((summary.n_replayed, summary.n_eager), replayed, "{name} {how:?}");
            let queued = run.monitor.status().queued;
            assert_eq!((queued.n_steps, queued.most_in_flight), (n, 3), "{name} {how:?}");
            assert_same(&run.states(), &want_states, &format!("{name} {how:?}"));
            assert_eq!(bench.log(&out), want_log, "{name} {how:?}");
            run.end();
        }
    }
}

#[test]
fn the_host_waits_only_for_the_oldest_step() {
    let bench = Bench::new();
    let mut run = bench.start(&TrainConfig { steps: 30, ..bench.config("run") }, AHEAD, None);
    run.trainer.advance(&mut |_| {}).unwrap();
    let waits = |run: &runs::Run| {
        let stats = run.sim.stats();
        [DriverCall::StreamQuery, DriverCall::StreamSynchronize, DriverCall::EventSynchronize]
            .map(|call| stats.n_calls(call))
    };
    let before = waits(&run);
    for _ in 0..20 {
        run.trainer.advance(&mut |_| {}).unwrap();
    }
    assert_eq!(waits(&run), before, "nothing waits for the whole stream");
    assert_eq!(run.trainer.learner().n_queued(), 2);
    run.finish();
    run.end();
}

#[test]
fn a_stop_finishes_the_steps_in_flight_and_the_resumed_run_equals_an_uninterrupted_one() {
    let bench = Bench::new();
    let mut whole = bench.start(&plain(&bench, "whole"), AHEAD, HELD_OUT);
    whole.finish();
    let want = (whole.states(), bench.log("whole"));
    whole.end();
    for stop_after in [1, 2, 6] {
        let out = format!("stop-{stop_after}");
        let config = plain(&bench, &out);
        let n_seen = Cell::new(0);
        let mut count = |event: &TrainEvent<'_>| {
            if let TrainEvent::Step { record, .. } = event {
                assert_eq!(record.step, n_seen.get(), "in order");
                n_seen.set(n_seen.get() + 1);
            }
        };
        let mut first = bench.start(&config, AHEAD, HELD_OUT);
        let summary = first.trainer.run(&|| n_seen.get() >= stop_after, &mut count).unwrap();
        // Two more were in flight, or as many as there are before the next checkpoint or held-out loss.
        let want_step = [3, 4, 8][[1, 2, 6].iter().position(|n| *n == stop_after).unwrap()];
        assert_eq!((summary.step, summary.interrupted, n_seen.get()), (want_step, true, want_step));
        assert_eq!(first.trainer.learner().n_queued(), 0);
        first.end();
        let mut second = bench.resume(&config, AHEAD, HELD_OUT);
        assert_eq!(second.trainer.n_done(), want_step);
        second.finish();
        assert_same(&second.states(), &want.0, &out);
        assert_eq!(bench.log(&out), want.1, "{out}");
        second.end();
    }
}

/// Steps that make a model overflow: with this rate, the weights are far too large after one step.
fn runaway(config: TrainConfig) -> TrainConfig {
    TrainConfig { lr: 1e30, warmup: 0, ..config }
}

#[test]
fn a_non_finite_loss_ends_the_run_and_names_its_step_despite_later_steps_in_flight() {
    let bench = Bench::new();
    let schedule = ScheduleKind::Constant;
    let config = |out: &str| TrainConfig { save_every: Some(4), schedule, ..bench.config(out) };
    let mut whole = bench.start(&config("whole"), AHEAD, None);
    whole.finish();
    let want = (whole.states(), bench.log("whole"));
    whole.end();
    let mut ends = Vec::new();
    for (out, how) in [("one-by-one", ONE_BY_ONE), ("ahead", AHEAD)] {
        let mut good = bench.start(&TrainConfig { steps: 4, ..config(out) }, how, None);
        good.finish();
        good.end();
        let mut run = bench.resume(&runaway(config(out)), how, None);
        let error = run.try_finish().unwrap_err();
        let TrainError::NotFinite { step, checkpoint, .. } = &error else { panic!("{error}: {error:?}") };
        assert!(ends_with(checkpoint.as_deref(), "step-00000004"), "{checkpoint:?}");
        assert!(error.hint().unwrap().contains("step-00000004"), "{error:?}");
        let log: Vec<String> = bench.log(out).iter().map(|line| format!("{line:?}")).collect();
        assert_eq!(log.len() as u64, step + 1, "no later step is logged");
        ends.push((*step, log));
        // The states are no longer those of the last good step.
        assert_eq!(run.trainer.learner().n_queued(), 0);
        assert!(matches!(run.trainer.save(false, &mut |_| {}), Err(TrainError::Ended { .. })));
        assert!(matches!(run.trainer.advance(&mut |_| {}), Err(TrainError::Ended { .. })));
        run.end();
        // The checkpoint is the last good one, and a run continues from it.
        let mut again = bench.resume(&config(out), how, None);
        assert_eq!(again.trainer.n_done(), 4);
        again.finish();
        assert_same(&again.states(), &want.0, out);
        assert_eq!(bench.log(out), want.1);
        again.end();
    }
    assert!(ends[0].0 >= 5, "the first step with that rate starts from good weights: {:?}", ends[0]);
    assert_eq!(ends[0], ends[1]);
}

const ADAM: AdamSettings =
    AdamSettings { lr: 1e-2, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };

fn learner(bench: &Bench, how: How) -> Learner<CudaBackend> {
    let config = bench.config("none");
    let sim = SimDriver::new(SimOptions { seed: 9, ..SimOptions::default() });
    let (_, backend) = backend(&sim, how);
    let spec = TrainSpec {
        n_tokens: 16,
        n_context: 16,
        dtype: DType::F32,
        masters: false,
        accumulates: false,
        dropout: 0.0,
        recompute: false,
    };
    let model: Arc<Model> = bench.model(&config);
    Learner::new(backend, model, spec, 1).unwrap_or_else(|e| panic!("{e}: {e:?}"))
}

/// A token whose embedding is NaN.
const BAD: i32 = 5;

fn with_a_bad_token(learner: &mut Learner<CudaBackend>) {
    let table = learner.table();
    let value = |p: &refrain_models::Param| p.value;
    let id = table.params.iter().map(value).find(|id| table.states[id.idx()].name == "token_embd.weight");
    let (id, hidden) = (id.unwrap(), learner.model().config().hidden);
    let mut bytes = learner.state(id).unwrap();
    let row = 4 * hidden * BAD as usize;
    bytes[row..row + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    learner.set_state(id, &bytes).unwrap();
}

#[test]
fn a_non_finite_step_changes_nothing_and_later_steps_run_as_if_it_had_not_happened() {
    let bench = Bench::new();
    assert!(!bench.model(&bench.config("none")).config().tied_embeddings);
    let rows = |salt: usize, first: i32| OwnRows::new(2, salt, first);
    let (a, bad, b) = (rows(1, 30), rows(2, BAD), rows(3, 31));
    let mut want = learner(&bench, ONE_BY_ONE);
    with_a_bad_token(&mut want);
    let alone = [&a, &b].map(|rows| want.step(&[rows.rows()], &ADAM, [0; 4]).unwrap());
    assert!(alone.iter().all(|outcome| outcome.is_applied() && outcome.loss.is_finite()), "{alone:?}");

    let mut ahead = learner(&bench, AHEAD);
    with_a_bad_token(&mut ahead);
    assert_eq!(ahead.depth(), 3);
    for rows in [&a, &bad, &b] {
        ahead.queue(&[rows.rows()], &ADAM, [0; 4]).unwrap();
    }
    // A fourth step must wait, and so must work that needs an empty queue.
    assert!(matches!(ahead.queue(&[a.rows()], &ADAM, [0; 4]), Err(LearnError::InFlight { n: 3 })));
    assert!(matches!(ahead.step(&[a.rows()], &ADAM, [0; 4]), Err(LearnError::InFlight { n: 3 })));
    let outcomes = [(); 3].map(|()| ahead.collect().unwrap());
    assert!(outcomes[1].loss.is_nan() && !outcomes[1].is_applied(), "{outcomes:?}");
    let bits = |o: &refrain_train::learner::StepOutcome| (o.loss.to_bits(), o.grad_norm.to_bits());
    assert_eq!([bits(&outcomes[0]), bits(&outcomes[2])], [bits(&alone[0]), bits(&alone[1])]);
    assert!(outcomes.iter().all(|o| matches!(o.ran[..], [Ran::Replayed { n_launches: 1, n_host_steps: 0 }])));
    assert_same(&states(&ahead), &states(&want), "one step of three was not applied");
    assert!(matches!(ahead.collect(), Err(LearnError::NothingQueued)));
}

#[test]
fn abandoned_steps_complete_before_any_later_work() {
    let bench = Bench::new();
    let rows: Vec<OwnRows> = (0..4).map(|salt| OwnRows::new(2, salt, 40)).collect();
    let (mut want, mut ahead) = (learner(&bench, ONE_BY_ONE), learner(&bench, AHEAD));
    for rows in &rows[..2] {
        want.step(&[rows.rows()], &ADAM, [0; 4]).unwrap();
        ahead.queue(&[rows.rows()], &ADAM, [0; 4]).unwrap();
    }
    // Held-out losses and states include the steps in flight.
    assert_eq!(ahead.evaluate(&rows[3].rows()).unwrap(), want.evaluate(&rows[3].rows()).unwrap());
    assert_same(&states(&ahead), &states(&want), "with two in flight");
    assert_eq!((ahead.n_queued(), ahead.abandon().unwrap(), ahead.n_queued()), (2, 2, 0));
    let next = |learner: &mut Learner<CudaBackend>| {
        learner.step(&[rows[2].rows()], &ADAM, [0; 4]).unwrap().loss.to_bits()
    };
    assert_eq!(next(&mut ahead), next(&mut want));
    assert_same(&states(&ahead), &states(&want), "after three");
}

#[test]
fn a_log_has_every_step_once_and_held_out_losses_between_them() {
    let bench = Bench::new();
    let mut run = bench.start(&plain(&bench, "run"), AHEAD, HELD_OUT);
    run.finish();
    run.end();
    let steps = bench.log("run").into_iter().map(|line| match line {
        LogLine::Step(record) => (record.step, false),
        LogLine::Eval(record) => (record.step, true),
    });
    let want = (0..12).flat_map(|n| [Some((n, false)), [4, 9, 11].contains(&n).then_some((n, true))]);
    assert_eq!(steps.collect::<Vec<_>>(), want.flatten().collect::<Vec<_>>());
}
