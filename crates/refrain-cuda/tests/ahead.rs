//! Steps launched ahead of the caller: the output is the same whatever is in flight when something else
//! happens.

mod rig;

use std::time::{Duration, Instant};

use refrain_cuda::{CudaOptions, GraphMode};
use refrain_driver::sim::{DriverCall, FaultScript, SimDriver};
use refrain_driver::{Device, Method};
use refrain_engine::{EngineError, Lookahead, SamplingParams, SamplingRow, SequenceState, StepKind};
use refrain_tensor::DType;
use rig::{PROMPTS, Rig, gpu, gpu_turn, options, sim};

const CONTEXT: usize = 320;
const MANY: Lookahead<'static> = Lookahead { n_tokens: usize::MAX, end: &[] };

fn with_ahead(ahead: usize, mode: GraphMode, method: Method) -> CudaOptions {
    CudaOptions { ahead, ..options(mode, method) }
}

fn rig_on(device: Device, ahead: usize) -> Rig {
    Rig::new(device, "llama", with_ahead(ahead, GraphMode::Require, Method::Stream), CONTEXT, DType::F16)
}

fn simulated(ahead: usize) -> (SimDriver, Rig) {
    let (sim, device) = sim("");
    (sim, rig_on(device, ahead))
}

fn rows() -> [SamplingRow; 2] {
    let all = SamplingParams {
        temperature: 1.1,
        top_k: 30,
        top_p: 0.95,
        min_p: 0.01,
        repeat_penalty: 1.2,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        penalty_window: 20,
        seed: 11,
        ..SamplingParams::default()
    };
    [SamplingParams::greedy(), all].map(|params| SamplingRow::new(&params))
}

type Said = Vec<(u32, u32)>;

/// A session in the middle of a generation.
struct Text {
    session: SequenceState,
    row: SamplingRow,
    last: u32,
    said: Said,
}

impl Text {
    fn begin(rig: &mut Rig, prompt: &[u32], row: &SamplingRow) -> Text {
        let (mut session, mut row) = (rig.engine.open(), row.clone());
        let first = rig.engine.prompt(&mut session, prompt, &mut row, |_| true).unwrap();
        Text { session, row, last: first.token, said: vec![(first.token, first.logprob.to_bits())] }
    }

    fn next(&mut self, rig: &mut Rig, ahead: &Lookahead<'_>) -> Result<u32, EngineError> {
        let chosen = rig.engine.decode_ahead(&mut self.session, self.last, &mut self.row, ahead)?;
        self.last = chosen.token;
        self.said.push((chosen.token, chosen.logprob.to_bits()));
        Ok(chosen.token)
    }

    /// The next turn: the same prompt, the output so far, and a question after it.
    fn next_turn(mut self, rig: &mut Rig, n_tokens: usize) -> Said {
        let mut prompt = self.session.tokens().to_vec();
        prompt.extend([self.last, 77, 3]);
        let first = rig.engine.prompt(&mut self.session, &prompt, &mut self.row, |_| true).unwrap();
        self.last = first.token;
        self.said = vec![(first.token, first.logprob.to_bits())];
        for n in (1..=n_tokens).rev() {
            self.next(rig, &Lookahead { n_tokens: n, end: &[] }).unwrap();
        }
        self.said
    }
}

/// Generates `n_tokens` after the prompt.
fn text(rig: &mut Rig, row: &SamplingRow, n_tokens: usize) -> Text {
    let mut text = Text::begin(rig, PROMPTS[0], row);
    for n in (1..=n_tokens).rev() {
        text.next(rig, &Lookahead { n_tokens: n, end: &[] }).unwrap();
    }
    text
}

fn the_output_does_not_depend_on_the_number_of_steps_in_flight(device: impl Fn() -> Device, n_tokens: usize) {
    for row in rows() {
        let mut alone = rig_on(device(), 1);
        let want = text(&mut alone, &row, n_tokens).said;
        let modes = [
            (GraphMode::Require, Method::Stream),
            (GraphMode::Require, Method::Nodes),
            (GraphMode::Off, Method::Stream),
        ];
        for (mode, method) in modes {
            let options = with_ahead(8, mode, method);
            let mut rig = Rig::new(device(), "llama", options, CONTEXT, DType::F16);
            assert_eq!(text(&mut rig, &row, n_tokens).said, want, "{mode} {method}");
            rig.engine.drain();
            let tally = rig.engine.ledger().tally(StepKind::Decode);
            let n = n_tokens as u64;
            assert_eq!((tally.steps(), tally.failed, tally.discarded), (n, 0, 0), "{tally}");
            assert_eq!(tally.replayed, if mode == GraphMode::Off { 0 } else { n }, "{tally}");
            assert!(rig.monitor.status().graphs.iter().all(|g| g.bit_exact));
            assert_eq!(rig.device.take_reports(), Vec::<String>::new());
        }
        // Explicitly committing the same tokens gives the same output.
        let mut text = Text::begin(&mut alone, PROMPTS[0], &row);
        for _ in 0..40 {
            text.next(&mut alone, &Lookahead::NONE).unwrap();
        }
        assert_eq!(text.said, want[..41]);
    }
}

/// A session after a turn that ended with steps in flight equals one without any.
fn an_end_of_turn_discards_steps_in_flight(device: impl Fn() -> Device) {
    for row in rows() {
        let want = text(&mut rig_on(device(), 1), &row, 60).said;
        // A token that first occurs well after the start.
        let said: Vec<u32> = want.iter().map(|(token, _)| *token).collect();
        let fresh = (10..50).find(|&i| !said[..i].contains(&said[i]));
        let Some(at) = fresh else { continue };
        let end = [u32::MAX, said[at]];
        let turn = |ahead: usize| {
            let mut rig = rig_on(device(), ahead);
            let mut text = Text::begin(&mut rig, PROMPTS[0], &row);
            while text.next(&mut rig, &Lookahead { n_tokens: 1000, end: &end }).unwrap() != said[at] {}
            rig.engine.drain();
            let tally = rig.engine.ledger().tally(StepKind::Decode).clone();
            assert_eq!((tally.steps(), text.said.len()), (at as u64, at + 1));
            assert!(if ahead == 1 { tally.discarded == 0 } else { tally.discarded > 0 }, "{tally}");
            assert_eq!(text.said, want[..=at]);
            let tokens = text.session.tokens().to_vec();
            (tokens, text.next_turn(&mut rig, 30))
        };
        assert_eq!(turn(8), turn(1));
    }
}

mod on_the_simulated_device {
    use super::*;

    #[test]
    fn the_output_does_not_depend_on_run_ahead() {
        the_output_does_not_depend_on_the_number_of_steps_in_flight(|| sim("").1, 200);
    }

    #[test]
    fn an_end_of_turn_with_steps_in_flight_has_no_effect_on_the_next() {
        an_end_of_turn_discards_steps_in_flight(|| sim("").1);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn the_output_does_not_depend_on_run_ahead() {
        let _turn = gpu_turn();
        the_output_does_not_depend_on_the_number_of_steps_in_flight(gpu, 300);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn an_end_of_turn_with_steps_in_flight_has_no_effect_on_the_next() {
        let _turn = gpu_turn();
        an_end_of_turn_discards_steps_in_flight(gpu);
    }
}

/// A penalty that outweighs every logit: of a hundred tokens, the ones seen least often come next.
#[test]
fn penalties_cover_the_whole_window() {
    const N_ALLOWED: u32 = 100;
    let row = |penalty_window: usize| {
        let forbidden = (N_ALLOWED..128).map(|token| (token, f32::NEG_INFINITY));
        let (frequency_penalty, logit_bias) = (1e4, forbidden.collect());
        let greedy = SamplingParams::greedy();
        SamplingRow::new(&SamplingParams { frequency_penalty, penalty_window, logit_bias, ..greedy })
    };
    let spread = |text: &Text| {
        let mut times = [0; N_ALLOWED as usize];
        text.session.tokens().iter().for_each(|token| times[*token as usize] += 1);
        times.iter().max().unwrap() - times.iter().min().unwrap()
    };
    let (whole, window) = (row(usize::MAX), row(256));
    let fed = text(&mut simulated(8).1, &whole, 305);
    assert_eq!((fed.session.tokens().len(), spread(&fed)), (310, 1));
    assert_eq!(fed.said, text(&mut simulated(1).1, &whole, 305).said);
    // The first tokens leave the window and come again too early.
    assert!(spread(&text(&mut simulated(8).1, &window, 305)) > 1);
}

#[test]
fn a_caller_that_stops_or_changes_options_gets_the_same_output() {
    let [greedy, random] = rows();
    let turn = |ahead: usize| {
        let (_, mut rig) = simulated(ahead);
        let mut text = Text::begin(&mut rig, PROMPTS[2], &random);
        for _ in 0..20 {
            text.next(&mut rig, &MANY).unwrap();
        }
        // Another token than the chosen one, then other options, with steps in flight both times.
        text.last = 5;
        text.next(&mut rig, &MANY).unwrap();
        text.row = greedy.clone();
        for _ in 0..20 {
            text.next(&mut rig, &MANY).unwrap();
        }
        let (said, tokens) = (text.said.clone(), text.session.tokens().to_vec());
        let next = text.next_turn(&mut rig, 40);
        assert_eq!(rig.device.take_reports(), Vec::<String>::new());
        (said, tokens, next)
    };
    assert_eq!(turn(8), turn(1));
}

#[test]
fn sessions_that_alternate_do_not_see_each_others_steps() {
    let turn = |ahead: usize| {
        let (_, mut rig) = simulated(ahead);
        let mut texts: Vec<Text> =
            rows().iter().zip(PROMPTS).map(|(row, prompt)| Text::begin(&mut rig, prompt, row)).collect();
        for round in 0..30 {
            for text in &mut texts {
                for _ in 0..=round % 3 {
                    text.next(&mut rig, &MANY).unwrap();
                }
            }
        }
        texts.into_iter().map(|text| text.said).collect::<Vec<_>>()
    };
    assert_eq!(turn(8), turn(1));
}

#[test]
fn a_full_context_and_a_full_cache_end_a_run_as_without_steps_ahead() {
    let turn = |ahead: usize, context: usize| {
        let options = with_ahead(ahead, GraphMode::Require, Method::Stream);
        let mut rig = Rig::new(sim("").1, "llama", options, context, DType::F16);
        let mut text = Text::begin(&mut rig, PROMPTS[0], &rows()[1]);
        let error = loop {
            if let Err(error) = text.next(&mut rig, &MANY) {
                break error.to_string();
            }
        };
        rig.engine.drain();
        assert_eq!(rig.engine.ledger().tally(StepKind::Decode).discarded, 0);
        (text.said.clone(), text.session.tokens().len(), error)
    };
    for context in [24, 43, 64] {
        let (said, n_tokens, error) = turn(8, context);
        assert_eq!((n_tokens, said.len()), (context, context - PROMPTS[0].len() + 1));
        assert_eq!(error, format!("the context of {context} tokens is full"));
        assert_eq!((said, n_tokens, error), turn(1, context));
    }

    // Another session holds blocks: the last ones are used one position at a time until there are none.
    let turn = |ahead: usize| {
        let options = with_ahead(ahead, GraphMode::Require, Method::Stream);
        let mut rig = Rig::new(sim("").1, "llama", options, 64, DType::F16);
        let _other = Text::begin(&mut rig, &[1; 30], &rows()[0]);
        let mut text = Text::begin(&mut rig, PROMPTS[0], &rows()[0]);
        while text.next(&mut rig, &MANY).is_ok() {}
        (text.said.clone(), text.session.tokens().len())
    };
    let (said, n_tokens) = turn(8);
    assert_eq!(n_tokens, 32);
    assert_eq!((said, n_tokens), turn(1));
}

#[test]
fn a_failed_replay_with_steps_in_flight_loses_no_token_and_the_graph_returns() {
    for row in rows() {
        let want = text(&mut simulated(1).1, &row, 150).said;
        for script in
            ["on 20th replay: fail 701", "on every 30th replay: fail 1", "on every 9th replay: fail 701"]
        {
            let (sim, device) = sim("");
            let options = with_ahead(8, GraphMode::Auto, Method::Stream);
            let mut rig = Rig::new(device, "llama", options, CONTEXT, DType::F16);
            rig.engine.plan(1).unwrap();
            sim.inject(FaultScript::parse(script).unwrap());
            assert_eq!(text(&mut rig, &row, 150).said, want, "{script}");
            let tally = rig.engine.ledger().tally(StepKind::Decode);
            assert_eq!((tally.steps(), tally.failed, tally.discarded), (150, 0, 0), "{script}: {tally}");
            assert!(tally.eager > 0 && tally.replayed > tally.eager, "{script}: {tally}");
            assert!(rig.monitor.status().cache.promoted > 0, "{script}");
            assert_eq!(rig.device.take_reports(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_failed_replay_in_require_mode_is_reported_after_the_tokens_before_it() {
    let row = &rows()[1];
    let want = text(&mut simulated(1).1, row, 60).said;
    let (sim, mut rig) = simulated(8);
    let mut text = Text::begin(&mut rig, PROMPTS[0], row);
    text.next(&mut rig, &Lookahead::NONE).unwrap();
    sim.inject(FaultScript::parse("on 20th replay: fail 701").unwrap());
    let error = loop {
        if let Err(error) = text.next(&mut rig, &MANY) {
            break error;
        }
    };
    assert!(error.reason().to_string().contains("replay failed with error 701"), "{:?}", error.reason());
    assert_eq!(text.said, want[..21]);
    // The graph is out of service for two steps.
    for _ in 0..2 {
        text.next(&mut rig, &MANY).unwrap_err();
    }
    for n in (1..=39).rev() {
        text.next(&mut rig, &Lookahead { n_tokens: n, end: &[] }).unwrap();
    }
    assert_eq!(text.said, want[..60]);
    assert_eq!(rig.engine.ledger().tally(StepKind::Decode).failed, 3);
}

#[test]
fn a_lost_context_with_steps_in_flight_is_final_and_keeps_earlier_tokens() {
    let row = &rows()[0];
    let want = text(&mut simulated(1).1, row, 60).said;
    let (sim, mut rig) = simulated(8);
    let mut text = Text::begin(&mut rig, PROMPTS[0], row);
    text.next(&mut rig, &Lookahead::NONE).unwrap();
    sim.inject(FaultScript::parse("on 20th replay: illegal address").unwrap());
    let error = loop {
        if let Err(error) = text.next(&mut rig, &MANY) {
            break error;
        }
    };
    assert_eq!(text.said, want[..21]);
    let reason = error.reason().to_string();
    assert!(reason.contains("700") && reason.contains("step of 1 token"), "{reason}");
    assert!(error.hint().is_some_and(|hint| hint.contains("restart the program")));
    let began = Instant::now();
    text.next(&mut rig, &MANY).unwrap_err();
    rig.engine.drain();
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(rig.engine.ledger().tally(StepKind::Decode).failed, 2);
}

#[test]
fn a_device_that_hangs_with_steps_in_flight_is_reported_by_the_deadline() {
    let row = &rows()[0];
    let (sim, device) = sim("");
    let mut options = with_ahead(8, GraphMode::Auto, Method::Stream);
    options.step_limit = Duration::from_millis(300);
    let mut rig = Rig::new(device, "llama", options, CONTEXT, DType::F16);
    let mut text = Text::begin(&mut rig, PROMPTS[0], row);
    text.next(&mut rig, &Lookahead::NONE).unwrap();
    sim.inject(FaultScript::parse("on 10th replay: hang").unwrap());
    let began = Instant::now();
    while text.next(&mut rig, &MANY).is_ok() {}
    let n_said = text.said.len();
    assert!((3..=11).contains(&n_said), "{n_said}");
    // Later calls do not wait again.
    text.next(&mut rig, &MANY).unwrap_err();
    rig.engine.drain();
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    sim.release_hung();
}

#[test]
fn steps_ahead_are_one_launch_each_and_allocate_nothing() {
    let (sim, mut rig) = simulated(8);
    let mut text = Text::begin(&mut rig, PROMPTS[1], &rows()[1]);
    text.next(&mut rig, &MANY).unwrap();
    rig.engine.drain();
    let before = sim.stats();
    for n in (1..=100).rev() {
        text.next(&mut rig, &Lookahead { n_tokens: n, end: &[] }).unwrap();
    }
    let after = sim.stats();
    let sent = |call: DriverCall| after.n_calls(call) - before.n_calls(call);
    assert_eq!(sent(DriverCall::ExecLaunch), 100);
    // The control block once, then the table for each block of 16 positions.
    assert!(sent(DriverCall::MemcpyHtodAsync) <= 8, "{}", sent(DriverCall::MemcpyHtodAsync));
    for call in [
        DriverCall::Launch,
        DriverCall::Alloc,
        DriverCall::AllocHost,
        DriverCall::StreamBeginCapture,
        DriverCall::MemcpyDtohAsync,
    ] {
        assert_eq!(sent(call), 0, "{call:?}");
    }
    assert_eq!(before.live, after.live);
}

#[test]
fn dropping_everything_with_steps_in_flight_frees_all_memory() {
    let (sim, device) = sim("");
    let mut rig = rig_on(device, 8);
    let mut text = Text::begin(&mut rig, PROMPTS[0], &rows()[0]);
    text.next(&mut rig, &MANY).unwrap();
    drop(text);
    drop(rig);
    assert_eq!(sim.stats().live, refrain_driver::api::Census::default());
}
