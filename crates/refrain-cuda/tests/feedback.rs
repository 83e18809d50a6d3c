//! Runs on the backend itself, of a small decode step with and without a host step.

mod small_step;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use refrain_cuda::{
    CacheOptions, CudaBackend, CudaCompiled, CudaError, CudaOptions, CudaStates, CudaWeights, GraphMode,
};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_graph::{
    Backend, CompileError, ControlBlock, Feedback, Graph, Io, Plan, PlanOptions, Ran, Reason, RowLimits, Run,
    RunError, StateEdit, StateId, StatePart,
};
use refrain_tensor::{Bytes, DType, HostTensor};
use refrain_testkit::{Fill, tensor};
use small_step::{D, KV_BLOCK, N_BLOCKS, N_HISTORY, SmallStep};

const VOCAB: usize = 24;

fn step(n_tokens: usize, on_host: bool) -> Graph {
    SmallStep { vocab: VOCAB, n_tokens, n_seqs: 1, is_masked: false, on_host }.graph()
}

fn limits(n_positions: usize) -> RowLimits {
    RowLimits { n_positions, n_choices: usize::MAX, window: 5, ..RowLimits::default() }
}

struct Bed {
    backend: CudaBackend,
    weights: CudaWeights,
    states: CudaStates,
    compiled: CudaCompiled,
}

impl Bed {
    fn new(graph: &Graph, mode: GraphMode) -> Bed {
        let device = refrain_kernels::simulated(SimOptions { seed: 8, ..SimOptions::default() }).unwrap();
        Bed::on(&device, graph, mode, Duration::from_secs(60))
    }

    fn on(device: &Device, graph: &Graph, mode: GraphMode, step_limit: Duration) -> Bed {
        let graphs = CacheOptions { mode, method: Method::Stream, ..CacheOptions::default() };
        Bed::with(device, graph, CudaOptions { graphs, ahead: 5, step_limit, ..CudaOptions::default() })
    }

    fn with(device: &Device, graph: &Graph, options: CudaOptions) -> Bed {
        let backend = CudaBackend::on(device, options).unwrap();
        let tensors = vec![tensor(graph.weights()[0].ty, &Fill::Normal, 4)];
        let weights = backend.load(graph.weights(), tensors).unwrap();
        let states = backend.allocate(graph.states()).unwrap();
        let compiled = backend.compile(graph).unwrap();
        Bed { backend, weights, states, compiled }
    }

    /// Inputs of the first step.
    fn control(&self) -> ControlBlock {
        let layout = self.backend.plan(&self.compiled).control();
        let mut control = ControlBlock::new(layout);
        let mut set = |name: &str, values: &[i32]| {
            control.set_i32(layout.find(name).unwrap(), values).unwrap();
        };
        set("tokens", &[3]);
        set("positions", &[0]);
        set("tables", &[5, 2, 7, 0, 1, 3, 4, 6]);
        set("history", &[-1; N_HISTORY]);
        set("bias_ids", &[-1; N_HISTORY]);
        let params = layout.find("params").unwrap();
        control.set_f32(params, &[1.0, 0.0, 1.0, 0.0, 1.3, 0.2, 0.1, 0.0]).unwrap();
        control.set_u32(layout.find("rng").unwrap(), &[9, 9, 1, 0]).unwrap();
        control
    }

    fn run(&self) -> Run {
        let feedback = Feedback::of(self.backend.plan(&self.compiled)).unwrap();
        Run::new(feedback, self.control(), vec![Some(limits(N_BLOCKS * KV_BLOCK))])
    }

    fn send(&mut self, run: &mut Run, n: usize) {
        self.backend.send(&mut self.compiled, &self.weights, &mut self.states, run, n).unwrap();
    }

    fn said(&mut self, n: usize) -> Vec<(u32, u32, Ran)> {
        let (mut run, mut said) = (self.run(), Vec::new());
        let ahead = self.backend.ahead(&self.compiled);
        let mut left = n;
        while said.len() < n {
            let batch = ahead.min(left);
            self.send(&mut run, batch);
            left -= batch;
            for _ in 0..batch {
                let step = self.backend.take(&mut self.compiled, &mut run).unwrap();
                let c = step.rows[0].unwrap();
                said.push((c.token, c.logprob.to_bits(), step.ran));
            }
        }
        assert_eq!(self.backend.finish(&mut self.compiled, &mut run).unwrap(), 0);
        said
    }
}

#[test]
fn a_plan_with_a_host_step_runs_step_by_step_and_gives_the_same_tokens() {
    let (mut device, mut host) =
        (Bed::new(&step(1, false), GraphMode::Require), Bed::new(&step(1, true), GraphMode::Auto));
    assert_eq!(device.backend.ahead(&device.compiled), 5);
    assert_eq!(host.backend.ahead(&host.compiled), 1);
    let chosen = |said: &[(u32, u32, Ran)]| said.iter().map(|s| (s.0, s.1)).collect::<Vec<_>>();
    let (on_device, with_host) = (device.said(60), host.said(60));
    assert_eq!(chosen(&on_device), chosen(&with_host));
    // One launch, or two with a host step in between.
    assert!(on_device.iter().all(|s| s.2 == Ran::REPLAYED));
    assert!(with_host.iter().all(|s| s.2 == Ran::Replayed { n_launches: 2, n_host_steps: 1 }));
    // The caller can tell the two apart.
    let feeds = |bed: &Bed| bed.backend.monitor().status().graphs.iter().all(|g| g.feeds_itself);
    assert!(feeds(&device) && !feeds(&host));
}

#[test]
fn required_graphs_refuse_host_steps_unless_they_are_allowed() {
    let graph = step(1, true);
    let open = |allow_host_steps| {
        let device = refrain_kernels::simulated(SimOptions::default()).unwrap();
        let graphs = CacheOptions { mode: GraphMode::Require, allow_host_steps, ..CacheOptions::default() };
        let options = CudaOptions { graphs, ..CudaOptions::default() };
        let backend = CudaBackend::on(&device, options).unwrap();
        let weights = vec![tensor(graph.weights()[0].ty, &Fill::Normal, 4)];
        let (_weights, _states) =
            (backend.load(graph.weights(), weights).unwrap(), backend.allocate(graph.states()).unwrap());
        backend.compile(&graph).map(drop)
    };
    let CompileError::Backend { source, .. } = open(false).unwrap_err() else { panic!("another error") };
    let Some(CudaError::Required { reason, .. }) = source.downcast_ref() else { panic!("{source}") };
    let because = "it runs on the host";
    assert_eq!(*reason, Reason::NotCapturable { label: "same".into(), because });
    open(true).unwrap();
}

#[test]
fn only_a_step_of_one_token_whose_inputs_are_in_the_control_block_feeds_itself() {
    let plan = |graph: &Graph| Plan::new(graph, PlanOptions::default()).unwrap();
    assert!(Feedback::of(&plan(&step(1, false))).is_some());
    assert!(Feedback::of(&plan(&step(1, true))).is_some());
    assert_eq!(Feedback::of(&plan(&step(2, false))), None);
}

/// A bed with a fault, where every third step is compared.
fn compared(script: &str, mode: GraphMode) -> Bed {
    let sim = SimDriver::new(SimOptions { seed: 8, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let graphs = CacheOptions { mode, ..CacheOptions::default() };
    let options =
        CudaOptions { graphs, ahead: 5, verify_every: NonZeroU32::new(3), ..CudaOptions::default() };
    let bed = Bed::with(&device, &step(1, false), options);
    sim.inject(FaultScript::parse(script).unwrap());
    bed
}

#[test]
fn every_nth_step_is_compared_and_a_wrong_replay_changes_no_token() {
    let want = Bed::new(&step(1, false), GraphMode::Require).said(30);
    let mut good = compared("", GraphMode::Require);
    assert_eq!(good.said(30), want);
    let status = good.backend.monitor().status();
    assert_eq!((status.compared.n_steps, status.compared.n_mismatches), (10, 0));
    // Each step is one replay, the compared ones too. The fault picks a random byte that the replay writes; a
    // byte of scratch memory does no harm.
    let chosen = |said: &[(u32, u32, Ran)]| said.iter().map(|s| (s.0, s.1)).collect::<Vec<_>>();
    let mut found = Vec::new();
    for replay in (3..=24).step_by(3) {
        let mut bad = compared(&format!("on {replay}th replay: wrong byte"), GraphMode::Auto);
        let got = bad.said(30);
        assert_eq!(chosen(&got), chosen(&want), "replay {replay}");
        assert_eq!(got.last().unwrap().2, Ran::REPLAYED, "the graph is in service again");
        let (at, n) = (replay - 1, bad.backend.monitor().status().compared.n_mismatches);
        if n > 0 {
            assert!(matches!(got[at].2, Ran::Eager(Reason::VerifyMismatch { .. })), "{:?}", got[at].2);
            assert!(matches!(got[at + 1].2, Ran::Eager(Reason::BackingOff { .. })), "{:?}", got[at + 1].2);
            found.push(replay);
        }
    }
    assert!(!found.is_empty());
    let script = format!("on {}th replay: wrong byte", found[0]);
    let mut strict = compared(&script, GraphMode::Require);
    let mut run = strict.run();
    for _ in 1..found[0] {
        strict.send(&mut run, 1);
        strict.backend.take(&mut strict.compiled, &mut run).unwrap();
    }
    strict.send(&mut run, 1);
    let error = strict.backend.take(&mut strict.compiled, &mut run).unwrap_err();
    assert!(format!("{error:?}").contains("VerifyMismatch"), "{error:?}");
}

#[test]
fn non_finite_logits_end_a_run_with_a_flag() {
    let graph = step(1, false);
    for mode in [GraphMode::Require, GraphMode::Off] {
        let device = refrain_kernels::simulated(SimOptions { seed: 8, ..SimOptions::default() }).unwrap();
        let mut bed = Bed::on(&device, &graph, mode, Duration::from_secs(60));
        let table = tensor(graph.weights()[0].ty, &Fill::Normal, 4);
        let mut values = table.to_f32().unwrap();
        // One value of one token, which is also a row of the head: one logit of each step.
        values[17 * D] = f32::NAN;
        let bytes = Bytes::new(bytemuck::cast_slice::<f32, u8>(&values).to_vec());
        let spoiled_table = HostTensor::new(DType::F32, table.shape(), bytes).unwrap();
        bed.weights = bed.backend.load(graph.weights(), vec![spoiled_table]).unwrap();
        bed.states = bed.backend.allocate(graph.states()).unwrap();
        bed.compiled = bed.backend.compile(&graph).unwrap();
        let mut run = bed.run();
        bed.send(&mut run, 5);
        let first = bed.backend.take(&mut bed.compiled, &mut run).unwrap().rows[0].unwrap();
        assert!(first.flags.has(refrain_graph::StepFlags::NON_FINITE), "{first:?}");
        assert!(first.ended() && first.logprob.is_nan() && first.position == 0, "{first:?}");
        // Steps launched ahead of it commit nothing. Steps that are still queued on the device thread when
        // the end is seen are not launched.
        assert!(bed.backend.finish(&mut bed.compiled, &mut run).unwrap() <= 4);
    }
}

#[test]
fn state_edits_keep_their_position_among_the_steps_of_a_run() {
    const ROW: usize = 4 * D;
    const BLOCK: usize = KV_BLOCK * ROW;
    let k = StateId::from_idx(0);
    let block = |bed: &Bed, at: usize| {
        let mut bytes = vec![0; BLOCK];
        bed.backend.read_state(&bed.states, StatePart::slots(k, at..at + 1), &mut bytes).unwrap();
        bytes
    };
    // The second bed is compared every other step, and such a step is not launched while others are in
    // flight. The third ends while steps still have to be launched.
    for (verify_every, n_taken) in [(None, 5), (NonZeroU32::new(2), 5), (NonZeroU32::new(2), 1)] {
        let device = refrain_kernels::simulated(SimOptions { seed: 8, ..SimOptions::default() }).unwrap();
        let graphs = CacheOptions { mode: GraphMode::Require, ..CacheOptions::default() };
        let options = CudaOptions { graphs, ahead: 5, verify_every, ..CudaOptions::default() };
        let mut bed = Bed::with(&device, &step(1, false), options);
        let full = vec![7; BLOCK];
        bed.backend.write_state(&mut bed.states, StatePart::slots(k, 6..7), &full).unwrap();
        let mut run = bed.run();
        bed.send(&mut run, 3);
        let copy = StateEdit::Copy { state: k, from: 5..6, to: 0 };
        let clear = StateEdit::Clear(StatePart::slots(k, 6..7));
        bed.backend.edit_states(&mut bed.states, &[copy, clear]).unwrap();
        bed.send(&mut run, 2);
        for _ in 0..n_taken {
            let step = bed.backend.take(&mut bed.compiled, &mut run).unwrap();
            assert_eq!(step.ran, Ran::REPLAYED);
        }
        bed.backend.finish(&mut bed.compiled, &mut run).unwrap();
        let (written, copied) = (block(&bed, 5), block(&bed, 0));
        let n_rows = |bytes: &[u8]| bytes.chunks(ROW).take_while(|row| row.iter().any(|b| *b != 0)).count();
        // Three rows were there at the copy, or as many as had been launched.
        let n_copied = n_rows(&copied);
        assert!(if n_taken == 5 { n_copied == 3 } else { (1..=3).contains(&n_copied) }, "{n_copied}");
        assert_eq!(copied[..n_copied * ROW], written[..n_copied * ROW]);
        if n_taken == 5 {
            assert_eq!(n_rows(&written), 5);
        }
        assert_eq!(block(&bed, 6), vec![0; BLOCK]);
    }
}

#[test]
fn edits_of_missing_slots_change_nothing() {
    let mut bed = Bed::new(&step(1, false), GraphMode::Require);
    let k = StateId::from_idx(0);
    let full = vec![7; 4 * N_BLOCKS * KV_BLOCK * D];
    bed.backend.write_state(&mut bed.states, k, &full).unwrap();
    let good = StateEdit::Clear(k.into());
    let beyond = StateEdit::Copy { state: k, from: 0..1, to: N_BLOCKS };
    let onto_itself = StateEdit::Copy { state: k, from: 0..3, to: 2 };
    let of_none = StateEdit::Clear(StateId::from_idx(2).into());
    for bad in [beyond, onto_itself, of_none] {
        let refused = bed.backend.edit_states(&mut bed.states, &[good.clone(), bad]);
        assert!(matches!(refused, Err(RunError::Mismatch { what: "states", .. })), "{refused:?}");
    }
    let mut found = vec![0; full.len()];
    bed.backend.read_state(&bed.states, k, &mut found).unwrap();
    assert_eq!(found, full);
    // While steps are in flight, the contents of a state are undefined.
    let mut run = bed.run();
    bed.send(&mut run, 2);
    let refused = bed.backend.read_state(&bed.states, k, &mut found);
    assert!(matches!(refused, Err(RunError::Mismatch { what: "runs", .. })), "{refused:?}");
    assert!(bed.backend.take(&mut bed.compiled, &mut run).is_ok(), "the run continues");
}

#[test]
fn other_work_waits_for_the_steps_in_flight_or_is_refused() {
    let graph = step(1, false);
    let mut bed = Bed::new(&graph, GraphMode::Require);
    let want = bed.said(20);
    let mut run = bed.run();
    bed.send(&mut run, 5);
    bed.backend.take(&mut bed.compiled, &mut run).unwrap();
    // Verifying a graph at this point would write to the ring.
    let error = format!("{:?}", bed.backend.compile(&graph).err().unwrap());
    assert!(error.contains("must be finished first"), "{error}");
    // A single step ends the run.
    let control = bed.control();
    let io = Io { weights: &bed.weights, states: &mut bed.states, control: control.bytes() };
    assert_eq!(bed.backend.run(&mut bed.compiled, io).unwrap(), Ran::REPLAYED);
    let mut token = [0; 4];
    let output = bed.backend.plan(&bed.compiled).output("token").unwrap();
    bed.backend.read(&bed.compiled, output, &mut token).unwrap();
    assert_eq!(u32::from_le_bytes(token), want[0].0);
    let error = bed.backend.take(&mut bed.compiled, &mut run).unwrap_err().to_string();
    assert!(error.contains("none has started"), "{error}");
    assert!(bed.backend.compile(&graph).is_ok());
    assert_eq!(bed.said(20), want);
}

#[test]
fn a_run_that_reaches_its_end_reports_it_and_runs_no_more_steps() {
    let mut bed = Bed::new(&step(1, false), GraphMode::Require);
    let want = bed.said(20);
    let feedback = Feedback::of(bed.backend.plan(&bed.compiled)).unwrap();
    let mut run = Run::new(feedback, bed.control(), vec![Some(limits(3))]);
    bed.send(&mut run, 5);
    for (i, want) in want.iter().take(3).enumerate() {
        let c = bed.backend.take(&mut bed.compiled, &mut run).unwrap().rows[0].unwrap();
        assert_eq!((c.token, c.logprob.to_bits(), c.ended()), (want.0, want.1, i == 2));
    }
    assert_eq!(bed.backend.take(&mut bed.compiled, &mut run).unwrap().rows, [None]);
    assert_eq!(bed.backend.finish(&mut bed.compiled, &mut run).unwrap(), 1);
    assert_eq!(bed.said(20), want);
}

#[test]
fn a_table_without_a_block_for_a_later_step_is_refused_before_upload() {
    let mut bed = Bed::new(&step(1, false), GraphMode::Require);
    let mut run = bed.run();
    run.set_table(0, &[5]);
    bed.send(&mut run, 5);
    for _ in 0..5 {
        bed.backend.take(&mut bed.compiled, &mut run).unwrap();
    }
    bed.send(&mut run, 4);
    let error = bed.backend.take(&mut bed.compiled, &mut run).unwrap_err().to_string();
    assert!(error.contains("the KV block is -1"), "{error}");
    assert_eq!(bed.backend.finish(&mut bed.compiled, &mut run).unwrap(), 0);
}

#[test]
fn a_driver_call_that_hangs_blocks_the_caller_no_longer_than_the_step_limit() {
    for call in ["replay", "stream_query"] {
        let sim = SimDriver::new(SimOptions::default());
        refrain_kernels::register_twins(&sim);
        let device = Device::simulated(&sim).unwrap();
        let mut bed = Bed::on(&device, &step(1, false), GraphMode::Auto, Duration::from_millis(200));
        let (mut run, control) = (bed.run(), bed.control());
        sim.inject(FaultScript::parse(&format!("on 1st {call}: hang")).unwrap());
        let began = Instant::now();
        let io = Io { weights: &bed.weights, states: &mut bed.states, control: control.bytes() };
        bed.backend.run(&mut bed.compiled, io).unwrap_err();
        // The device thread is stuck; all other calls report that at once.
        let (compiled, weights, states) = (&mut bed.compiled, &bed.weights, &mut bed.states);
        let sent = bed.backend.send(compiled, weights, states, &mut run, 3);
        assert!(sent.is_err() || bed.backend.take(compiled, &mut run).is_err(), "{call}");
        let _ = bed.backend.finish(compiled, &mut run);
        assert!(began.elapsed() < Duration::from_secs(2), "{call}: {:?}", began.elapsed());
        sim.release_hung();
    }
}
