//! Steps in two parts: the body is launched ahead, the choice once its masks are known.

mod small_step;

use std::num::NonZeroU32;

use refrain_cuda::{
    CacheOptions, CudaBackend, CudaCompiled, CudaOptions, CudaStates, CudaWeights, GraphMode,
};
use refrain_driver::Device;
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_graph::{
    Backend, CommittedStep, ControlBlock, Feedback, Graph, Io, LateRows, Op, Ran, Reason, RowLimits, Run,
    RunError, SegmentKind,
};
use refrain_testkit::{Fill, tensor};
use small_step::{KV_BLOCK, N_BLOCKS, N_HISTORY, SmallStep};

const VOCAB: usize = 40;
const N_ROWS: usize = 3;
const N_WORDS: usize = VOCAB.div_ceil(32);

/// A decode step of three sequences with masks.
fn step(on_host: bool) -> Graph {
    SmallStep { vocab: VOCAB, n_tokens: N_ROWS, n_seqs: N_ROWS, is_masked: true, on_host }.graph()
}

struct Bed {
    sim: SimDriver,
    backend: CudaBackend,
    weights: CudaWeights,
    states: CudaStates,
    compiled: CudaCompiled,
}

fn bed(on_host: bool, mode: GraphMode, ahead: usize, verify_every: Option<NonZeroU32>) -> Bed {
    let sim = SimDriver::new(SimOptions { seed: 8, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let graphs = CacheOptions { mode, allow_host_steps: true, first_backoff: 2, ..CacheOptions::default() };
    let options = CudaOptions { graphs, ahead, verify_every, ..CudaOptions::default() };
    let (backend, graph) = (CudaBackend::on(&device, options).unwrap(), step(on_host));
    let weights =
        backend.load(graph.weights(), vec![tensor(graph.weights()[0].ty, &Fill::Normal, 4)]).unwrap();
    let states = backend.allocate(graph.states()).unwrap();
    let compiled = backend.compile(&graph).unwrap();
    Bed { sim, backend, weights, states, compiled }
}

/// The mask of a row's `nth` choice: about a third of the tokens, others each time.
fn mask(row: usize, nth: usize) -> Vec<u32> {
    let bit = |token: usize| u32::from((token * 7 + row * 5 + nth * 11) % 13 < 4);
    let word = |word: usize| (0..32).map(|i| bit(32 * word + i) << i).sum();
    (0..N_WORDS).map(word).collect()
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// What each row chose, with its log-probability, and how the steps ran.
type Said = (Vec<Vec<(u32, u32)>>, Vec<Ran>);

impl Bed {
    /// Inputs of the first step: the last sequence has no mask.
    fn control(&self) -> ControlBlock {
        let layout = self.backend.plan(&self.compiled).control();
        let mut control = ControlBlock::new(layout);
        let find = |name: &str| layout.find(name).unwrap();
        control.set_i32(find("tokens"), &[3, 7, 11]).unwrap();
        control.set_i32(find("positions"), &[0; N_ROWS]).unwrap();
        control.set_i32(find("seqs"), &[0, 1, 2]).unwrap();
        let tables: Vec<i32> = (0..(N_ROWS * N_BLOCKS) as i32).rev().collect();
        control.set_i32(find("tables"), &tables).unwrap();
        control.set_i32(find("history"), &[-1; N_ROWS * N_HISTORY]).unwrap();
        control.set_i32(find("bias_ids"), &[-1; N_ROWS * N_HISTORY]).unwrap();
        control.set_f32(find("params"), &[1.0, 0.0, 1.0, 0.0, 1.3, 0.2, 0.1, 0.0].repeat(N_ROWS)).unwrap();
        let rng: Vec<u32> = (0..N_ROWS as u32).flat_map(|row| [9 + row, 9, 1, 0]).collect();
        control.set_u32(find("rng"), &rng).unwrap();
        control.set_u32(find("mask"), &[u32::MAX; N_ROWS * N_WORDS]).unwrap();
        control
    }

    fn run(&self) -> Run {
        let feedback = Feedback::of(self.backend.plan(&self.compiled)).unwrap();
        let n_positions = N_BLOCKS * KV_BLOCK;
        let limits = RowLimits { n_positions, n_choices: usize::MAX, window: 5, ..RowLimits::default() };
        Run::new(feedback, self.control(), vec![Some(limits); N_ROWS])
    }

    fn send(&mut self, run: &mut Run, n: usize) -> Result<(), RunError> {
        self.backend.send(&mut self.compiled, &self.weights, &mut self.states, run, n)
    }

    fn supply(&mut self, run: &mut Run, late: LateRows) -> Result<(), RunError> {
        self.backend.supply(&mut self.compiled, &self.weights, &mut self.states, run, late)
    }

    fn take(&mut self, run: &mut Run) -> Result<CommittedStep, RunError> {
        self.backend.take(&mut self.compiled, run)
    }

    fn finish(&mut self, run: &mut Run) -> Result<usize, RunError> {
        self.backend.finish(&mut self.compiled, run)
    }

    /// Runs until each row has made `n` choices. `held` says which rows a step holds. Returns what each row chose, with its
    /// log-probability, and how the steps ran.
    fn says(
        &mut self,
        run: &mut Run,
        n: usize,
        held: impl Fn(usize) -> Vec<usize>,
    ) -> Result<Said, RunError> {
        let ahead = self.backend.ahead(&self.compiled);
        let (mut said, mut ran) = (vec![Vec::new(); N_ROWS], Vec::new());
        let mut n_sent = 0;
        while said.iter().any(|row| row.len() < n) {
            self.send(run, ran.len() + ahead - n_sent)?;
            n_sent = ran.len() + ahead;
            let held = held(ran.len());
            let masked = (0..2).filter(|row| !held.contains(row));
            let masks: Vec<(usize, Vec<u32>)> = masked.map(|row| (row, mask(row, said[row].len()))).collect();
            self.supply(run, LateRows { masks: masks.clone(), held: held.clone() })?;
            let step = self.take(run)?;
            for (row, committed) in step.rows.iter().enumerate() {
                assert_eq!(committed.is_none(), held.contains(&row), "step {} row {row}", ran.len());
                let Some(c) = committed else { continue };
                assert_eq!(c.position, said[row].len());
                assert!(c.logprob <= 0.0);
                if let Some((_, mask)) = masks.iter().find(|(of, _)| *of == row) {
                    assert!(allows(mask, c.token), "step {} row {row}: {}", ran.len(), c.token);
                }
                said[row].push((c.token, c.logprob.to_bits()));
            }
            ran.push(step.ran);
        }
        said.iter_mut().for_each(|row| row.truncate(n));
        Ok((said, ran))
    }
}

const TWICE: Ran = Ran::Replayed { n_launches: 2, n_host_steps: 0 };

fn nobody(_: usize) -> Vec<usize> {
    Vec::new()
}

/// Holds every row now and then, and all of them at once too.
fn now_and_then(step: usize) -> Vec<usize> {
    (0..N_ROWS).filter(|row| (step + row).is_multiple_of(3) || step % 11 == 5).collect()
}

#[test]
fn a_plan_is_cut_before_choices_with_masks() {
    let bed = bed(false, GraphMode::Require, 4, None);
    let plan = bed.backend.plan(&bed.compiled);
    let [body, choice] = plan.segments() else { panic!("{:?}", plan.segments()) };
    assert_eq!((body.kind, choice.kind), (SegmentKind::Recordable, SegmentKind::Recordable));
    let is_sample = |step: &refrain_graph::Step| matches!(step.op, Op::Sample(_));
    assert!(!plan.steps()[body.steps.clone()].iter().any(is_sample));
    assert!(is_sample(&plan.steps()[choice.steps.start]));
    let status = bed.backend.monitor().status();
    assert_eq!(status.graphs.len(), 2);
    assert!(status.graphs.iter().all(|graph| graph.bit_exact && graph.feeds_itself));
}

#[test]
fn bodies_launched_ahead_give_the_choices_of_single_steps_and_are_two_launches_each() {
    let want = {
        let mut bed = bed(true, GraphMode::Require, 4, None);
        assert_eq!(bed.backend.ahead(&bed.compiled), 1);
        let mut run = bed.run();
        bed.says(&mut run, 40, nobody).unwrap().0
    };
    for (mode, ahead, every) in [
        (GraphMode::Require, 4, None),
        (GraphMode::Require, 1, None),
        (GraphMode::Off, 4, None),
        (GraphMode::Require, 4, NonZeroU32::new(3)),
    ] {
        let mut bed = bed(false, mode, ahead, every);
        assert_eq!(bed.backend.ahead(&bed.compiled), ahead.min(2));
        let mut run = bed.run();
        let (said, ran) = bed.says(&mut run, 40, nobody).unwrap();
        assert_eq!(said, want, "{mode} {ahead}");
        match mode {
            GraphMode::Off => assert!(ran.iter().all(|ran| *ran == Ran::Eager(Reason::SwitchedOff))),
            GraphMode::Auto | GraphMode::Require => assert!(ran.iter().all(|ran| *ran == TWICE), "{ran:?}"),
        }
        // The body of one more step was launched for nothing.
        assert_eq!(bed.finish(&mut run).unwrap(), ahead.min(2) - 1);
        let compared = bed.backend.monitor().status().compared;
        assert_eq!((compared.n_steps > 10, compared.n_mismatches), (every.is_some(), 0));
    }
}

#[test]
fn rows_without_a_mask_in_time_repeat_their_token_and_choose_the_same() {
    for (on_host, every) in [(true, None), (false, None), (false, NonZeroU32::new(2))] {
        let mut bed = bed(on_host, GraphMode::Require, 4, every);
        let mut run = bed.run();
        let (want, steps) = bed.says(&mut run, 25, nobody).unwrap();
        bed.finish(&mut run).unwrap();
        let mut run = bed.run();
        let (said, more_steps) = bed.says(&mut run, 25, now_and_then).unwrap();
        assert_eq!(said, want);
        assert!(more_steps.len() > steps.len() + 5);
        assert_eq!(bed.backend.monitor().status().compared.n_mismatches, 0);
    }
}

#[test]
fn a_single_step_runs_as_two_graphs_with_the_masks_of_its_control_block() {
    let mut bed = bed(false, GraphMode::Require, 4, None);
    let mut run = bed.run();
    let (want, _) = bed.says(&mut run, 1, nobody).unwrap();
    let mut control = bed.control();
    let find = |name: &str| bed.backend.plan(&bed.compiled).control().find(name).unwrap();
    let mask_input = find("mask");
    (0..2).for_each(|row| control.set_row(mask_input, row, &mask(row, 0)).unwrap());
    let io = Io { weights: &bed.weights, states: &mut bed.states, control: control.bytes() };
    assert_eq!(bed.backend.run(&mut bed.compiled, io).unwrap(), TWICE);
    let mut tokens = [0u32; N_ROWS];
    bed.backend.read(&bed.compiled, 0, bytemuck::cast_slice_mut(&mut tokens)).unwrap();
    assert_eq!(tokens.to_vec(), want.iter().map(|row| row[0].0).collect::<Vec<_>>());
}

#[test]
fn a_fault_in_either_launch_changes_no_choice() {
    let want = {
        let mut bed = bed(false, GraphMode::Require, 4, None);
        let mut run = bed.run();
        bed.says(&mut run, 12, now_and_then).unwrap().0
    };
    for replay in 1..=6 {
        // Odd replays are bodies, even ones choices.
        let mut bed = bed(false, GraphMode::Auto, 4, None);
        bed.sim.inject(FaultScript::parse(&format!("on {replay}th replay: fail 701")).unwrap());
        let mut run = bed.run();
        let (said, ran) = bed.says(&mut run, 12, now_and_then).unwrap();
        assert_eq!(said, want, "replay {replay}");
        let at = (replay - 1) / 2;
        assert_eq!(ran[at], Ran::Eager(Reason::ReplayFailed { code: 701 }), "replay {replay}");
        assert!(ran[..at].iter().all(|ran| *ran == TWICE), "replay {replay}: {ran:?}");
        assert_eq!(ran.last(), Some(&TWICE), "both graphs are in service again");
    }
}

#[test]
fn a_required_graph_that_fails_ends_the_run_and_leaves_the_device_usable() {
    for replay in 1..=4 {
        let mut bed = bed(false, GraphMode::Require, 4, None);
        let mut run = bed.run();
        let (want, _) = bed.says(&mut run, 10, nobody).unwrap();
        bed.finish(&mut run).unwrap();
        bed.sim.inject(FaultScript::parse(&format!("on {replay}th replay: fail 701")).unwrap());
        let mut run = bed.run();
        let error = bed.says(&mut run, 10, nobody).unwrap_err();
        assert!(format!("{error:?}").contains("ReplayFailed"), "replay {replay}: {error:?}");
        let _ = bed.finish(&mut run);
        // The steps before it were collected, and the failed one starts again: the graph is recorded again after a pause.
        for _ in 0..8 {
            let mut run = bed.run();
            let again = bed.says(&mut run, 10, nobody);
            let _ = bed.finish(&mut run);
            if let Ok((said, ran)) = again {
                assert_eq!(said, want);
                assert!(ran.iter().all(|ran| *ran == TWICE));
                break;
            }
        }
        let mut run = bed.run();
        assert_eq!(bed.says(&mut run, 10, nobody).unwrap().0, want, "replay {replay}");
    }
}

#[test]
fn rows_that_leave_or_join_while_a_body_is_in_flight_do_so_after_its_choice() {
    let mut bed = bed(false, GraphMode::Require, 4, None);
    let mut run = bed.run();
    let (want, _) = bed.says(&mut run, 20, nobody).unwrap();
    bed.finish(&mut run).unwrap();
    let mut run = bed.run();
    let mut said = vec![Vec::new(); N_ROWS];
    bed.send(&mut run, 2).unwrap();
    for step in 0..20 {
        if step == 6 {
            // Both steps in flight still have the row.
            run.clear_row(1);
        }
        if step == 10 {
            // The same sequence joins again where it left, with a mask that is not known yet.
            let (token, position) = (*said[1].last().unwrap(), said[1].len());
            let limits = RowLimits {
                n_positions: N_BLOCKS * KV_BLOCK,
                n_choices: usize::MAX,
                window: 5,
                history_next: position % 5,
                ..RowLimits::default()
            };
            let recent: Vec<i32> = (0..5)
                .map(|i| {
                    let latest = (0..position).rev().find(|at| at % 5 == i).unwrap();
                    said[1][latest] as i32
                })
                .collect();
            let layout = bed.backend.plan(&bed.compiled).control().clone();
            let find = |name: &str| layout.find(name).unwrap();
            run.set_row(1, limits, |control| {
                control.set_row(find("tokens"), 1, &[token as i32])?;
                control.set_row(find("positions"), 1, &[position as i32])?;
                control.set_row(find("history"), 1, &[&recent[..], &[-1; 3]].concat())?;
                control.set_row(find("rng"), 1, &[10u32, 9, 1 + position as u32, 0])
            })
            .unwrap();
        }
        bed.send(&mut run, 1).unwrap();
        let masks = (0..2).map(|row| (row, mask(row, said[row].len()))).collect();
        bed.supply(&mut run, LateRows { masks, held: Vec::new() }).unwrap();
        let rows = bed.take(&mut run).unwrap().rows;
        let is_away = (8..12).contains(&step);
        assert_eq!(
            rows.iter().map(Option::is_some).collect::<Vec<_>>(),
            [true, !is_away, true],
            "step {step}"
        );
        for (said, row) in said.iter_mut().zip(&rows) {
            said.extend(row.map(|c| c.token));
        }
    }
    let tokens = |row: usize, n: usize| want[row][..n].iter().map(|c| c.0).collect::<Vec<_>>();
    assert_eq!(said, [tokens(0, 20), tokens(1, 16), tokens(2, 20)]);
    // Two bodies were requested, one of them was launched.
    assert_eq!(bed.finish(&mut run).unwrap(), 1);
}

#[test]
fn a_step_cannot_be_collected_before_it_has_its_masks() {
    for on_host in [false, true] {
        let mut bed = bed(on_host, GraphMode::Require, 4, None);
        let mut run = bed.run();
        assert!(bed.supply(&mut run, LateRows::default()).is_err(), "nothing was launched");
        bed.send(&mut run, 1).unwrap();
        assert!(run.awaits_masks());
        assert!(bed.take(&mut run).is_err());
        bed.supply(&mut run, LateRows::default()).unwrap();
        assert!(!run.awaits_masks() && bed.take(&mut run).is_ok());
        assert_eq!(bed.finish(&mut run).unwrap(), 0);
    }
}
