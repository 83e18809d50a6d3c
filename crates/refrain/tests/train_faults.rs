//! A failure during a training run: either the run continues and ends with the same bits, or it stops with the reason,
//! and the run resumed from its checkpoint ends with the same bits.

mod runs;

use std::sync::OnceLock;
use std::time::Duration;

use refrain_cuda::GraphMode;
use refrain_driver::sim::FaultScript;
use refrain_graph::RunError;
use refrain_train::learner::LearnError;
use refrain_train::log::LogLine;
use refrain_train::{TrainConfig, TrainError};
use runs::{AHEAD, Bench, How, ONE_BY_ONE, Run, assert_same};

/// Number of steps of a run.
const STEPS: u64 = 200;
/// Number of completed steps at the failure: halfway between two checkpoints.
const FAILS_AFTER: u64 = 69;

struct Wanted {
    bench: Bench,
    states: Vec<(String, Vec<u8>)>,
    log: Vec<LogLine>,
}

fn config(bench: &Bench, out: &str) -> TrainConfig {
    TrainConfig { steps: STEPS, save_every: Some(50), keep: 2, dropout: 0.1, ..bench.config(out) }
}

/// A run of eager steps without a failure.
fn wanted() -> &'static Wanted {
    static WANTED: OnceLock<Wanted> = OnceLock::new();
    WANTED.get_or_init(|| {
        let bench = Bench::new();
        let mut run = bench.start(&config(&bench, "wanted"), ONE_BY_ONE, None);
        let summary = run.finish();
        assert_eq!((summary.n_eager, summary.n_replayed), (STEPS, 0));
        let (states, log) = (run.states(), bench.log("wanted"));
        run.end();
        Wanted { bench, states, log }
    })
}

fn start(out: &str, how: How, faults: &str) -> Run {
    let Wanted { bench, .. } = wanted();
    let run = bench.start(&config(bench, out), how, None);
    // Graphs are recorded and verified by now: calls are counted from the first step on.
    run.sim.inject(FaultScript::parse(faults).unwrap());
    run
}

fn goes_on(out: &str, how: How, faults: &str) {
    let Wanted { bench, states, log } = wanted();
    let mut run = start(out, how, faults);
    let summary = run.finish();
    assert_eq!(run.sim.unused_faults(), Vec::<String>::new(), "{out}");
    assert!(summary.n_eager > 0 && summary.n_replayed > STEPS / 2, "{out}: {summary:?}");
    assert_eq!(summary.n_eager + summary.n_replayed, STEPS, "{out}: every step is in the ledger");
    assert_same(&run.states(), states, out);
    assert_eq!(&bench.log(out), log, "{out}");
    run.end();
}

/// Returns the error that ended the run.
fn stops(out: &str, how: How, faults: &str) -> RunError {
    stops_after(start(out, how, faults), out, FAILS_AFTER)
}

/// The same for a run that ends after this many steps.
fn stops_after(mut run: Run, out: &str, n_done: u64) -> RunError {
    let Wanted { bench, states, log } = wanted();
    let error = run.try_finish().unwrap_err();
    assert_eq!(run.sim.unused_faults(), Vec::<String>::new(), "{out}: {error}");
    assert_eq!(run.trainer.n_done(), n_done, "{out}: earlier steps are complete, {error}");
    assert_eq!(bench.log(out), log[..n_done as usize], "{out}");
    let next = run.trainer.advance(&mut |_| {});
    assert!(matches!(next, Err(TrainError::Ended { step, .. }) if step == n_done), "{out}: {next:?}");
    run.sim.release_hung();
    drop(run);
    let mut again = bench.resume(&config(bench, out), AHEAD, None);
    assert_eq!(again.trainer.n_done(), 50, "{out}");
    again.finish();
    assert_same(&again.states(), states, out);
    assert_eq!(&bench.log(out), log, "{out}");
    again.end();
    match error {
        TrainError::Learn(LearnError::Run(error)) => error,
        other => panic!("{out}: {other}: {other:?}"),
    }
}

const AUTO: How = How { mode: GraphMode::Auto, ..AHEAD };

/// The messages of an error and all its causes.
fn reason(error: &RunError) -> String {
    format!("{}: {}", error, error.reason())
}

#[test]
fn a_failed_graph_launch_makes_the_step_eager_and_the_run_continues() {
    goes_on("launch-auto", AUTO, "on 70th replay: fail LAUNCH_OUT_OF_RESOURCES");
}

#[test]
fn a_graph_that_cannot_be_recorded_again_is_retried_later_and_the_run_continues() {
    let faults = "on 70th replay: fail LAUNCH_OUT_OF_RESOURCES; on 1st instantiate: out of memory";
    goes_on("lost-auto", AUTO, faults);
}

#[test]
fn a_wrong_replay_is_caught_by_verification_and_the_eager_result_is_used() {
    goes_on("wrong-auto", How { verify_every: Some(70), ..AUTO }, "on 70th replay: wrong byte");
}

#[test]
fn a_failed_launch_ends_a_run_that_requires_graphs() {
    let error = stops("launch-require", AHEAD, "on 70th replay: fail LAUNCH_OUT_OF_RESOURCES");
    assert!(reason(&error).contains("701"), "{}", reason(&error));
}

#[test]
fn a_wrong_replay_ends_a_run_that_requires_graphs() {
    let how = How { verify_every: Some(70), ..AHEAD };
    let error = stops("wrong-require", how, "on 70th replay: wrong byte");
    assert!(reason(&error).contains("differ"), "{}", reason(&error));
}

#[test]
fn a_lost_context_ends_a_run_in_any_graph_mode() {
    for (out, how) in [("lost", AHEAD), ("lost-eager", AUTO)] {
        let error = stops(out, how, "on 70th replay: illegal address");
        assert!(matches!(error, RunError::ContextLost { code: 700, .. }), "{out}: {}", reason(&error));
    }
}

#[test]
fn a_failed_upload_of_inputs_ends_a_run() {
    let error = stops("upload", AUTO, "on 70th memcpy_htod_async: fail 999");
    assert!(reason(&error).contains("999"), "{}", reason(&error));
}

#[test]
fn a_failed_readback_of_results_ends_a_run() {
    let mut run = start("results", AUTO, "");
    // Saving reads states back, too: there is no checkpoint between here and the failure.
    (0..60).for_each(|_| run.trainer.advance(&mut |_| {}).unwrap());
    let n_sent = 60 + run.trainer.learner().n_queued() as u64;
    let nth = 2 * (FAILS_AFTER - n_sent) + 1;
    run.sim.inject(FaultScript::parse(&format!("on {nth}th memcpy_dtoh_async: fail 999")).unwrap());
    let error = stops_after(run, "results", FAILS_AFTER);
    assert!(reason(&error).contains("999"), "{}", reason(&error));
}

#[test]
fn a_launch_that_does_not_return_is_reported_after_its_deadline() {
    let how = How { call_limit: Some(Duration::from_millis(300)), ..AHEAD };
    let run = start("hang", how, "on 70th replay: hang");
    // The device thread is inside that call, so the two earlier steps in flight are never reported.
    let error = stops_after(run, "hang", FAILS_AFTER - 2);
    assert!(reason(&error).contains("did not reply"), "{}", reason(&error));
}

#[test]
fn a_failure_between_micro_steps_leaves_no_partial_gradients() {
    let bench = Bench::new();
    let config =
        |out: &str| TrainConfig { steps: 30, accumulate: 2, save_every: Some(10), ..bench.config(out) };
    let mut want = bench.start(&config("want"), ONE_BY_ONE, None);
    want.finish();
    let (states, log) = (want.states(), bench.log("want"));
    want.end();
    // The second micro-step of the thirteenth step: gradients of the first are in the accumulators.
    let faults = FaultScript::parse("on 26th replay: fail LAUNCH_OUT_OF_RESOURCES").unwrap();
    let mut auto = bench.start(&config("auto"), AUTO, None);
    auto.sim.inject(faults.clone());
    assert!(auto.finish().n_eager > 0);
    assert_same(&auto.states(), &states, "auto");
    assert_eq!(bench.log("auto"), log);
    auto.end();
    let mut require = bench.start(&config("require"), AHEAD, None);
    require.sim.inject(faults);
    assert!(require.try_finish().is_err());
    assert_eq!(require.trainer.n_done(), 12);
    drop(require);
    let mut again = bench.resume(&config("require"), AHEAD, None);
    assert_eq!(again.trainer.n_done(), 10);
    again.finish();
    assert_same(&again.states(), &states, "resumed");
    assert_eq!(bench.log("require"), log);
    again.end();
}
