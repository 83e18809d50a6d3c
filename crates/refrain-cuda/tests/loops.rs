//! Replies that the device repeats by itself: the same tokens as step by step, in one launch, and reasons where that is
//! not possible.

mod rig;

use std::num::NonZeroU32;

use refrain_cuda::{CudaOptions, GraphMode, LoopMode};
use refrain_driver::sim::{DriverCall, FaultScript};
use refrain_driver::{Device, Method};
use refrain_engine::{EngineError, Lookahead, SamplingParams, SamplingRow, SequenceState, StepKind, Tally};
use refrain_tensor::DType;
use rig::{PROMPTS, Rig, gpu, gpu_turn, options, sim};

const CONTEXT: usize = 320;

type Said = Vec<(u32, u32)>;

fn looping(mode: GraphMode, method: Method) -> CudaOptions {
    CudaOptions { loops: LoopMode::Device, ..options(mode, method) }
}

fn stepping() -> CudaOptions {
    CudaOptions { ahead: 4, ..options(GraphMode::Require, Method::Stream) }
}

fn rig(device: Device, case: &str, options: CudaOptions) -> Rig {
    Rig::new(device, case, options, CONTEXT, DType::F16)
}

fn rows() -> [SamplingRow; 2] {
    let all = SamplingParams {
        temperature: 1.1,
        top_k: 30,
        top_p: 0.95,
        repeat_penalty: 1.2,
        penalty_window: 20,
        seed: 11,
        ..SamplingParams::default()
    };
    [SamplingParams::greedy(), all].map(|params| SamplingRow::new(&params))
}

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

    fn next(&mut self, rig: &mut Rig, n_tokens: usize, end: &[u32]) -> Result<u32, EngineError> {
        let ahead = Lookahead { n_tokens, end };
        let chosen = rig.engine.decode_ahead(&mut self.session, self.last, &mut self.row, &ahead)?;
        self.last = chosen.token;
        self.said.push((chosen.token, chosen.logprob.to_bits()));
        Ok(chosen.token)
    }

    fn go_on(&mut self, rig: &mut Rig, n_tokens: usize) {
        for n in (1..=n_tokens).rev() {
            self.next(rig, n, &[]).unwrap();
        }
    }

    /// The next turn: the same prompt, the output so far, and a question after it.
    fn next_turn(mut self, rig: &mut Rig, n_tokens: usize) -> (Vec<u32>, Said) {
        let mut prompt = self.session.tokens().to_vec();
        prompt.extend([self.last, 77, 3]);
        let first = rig.engine.prompt(&mut self.session, &prompt, &mut self.row, |_| true).unwrap();
        self.last = first.token;
        self.said = vec![(first.token, first.logprob.to_bits())];
        self.go_on(rig, n_tokens);
        (prompt, self.said)
    }
}

fn text(rig: &mut Rig, row: &SamplingRow, n_tokens: usize) -> Text {
    let mut text = Text::begin(rig, PROMPTS[0], row);
    text.go_on(rig, n_tokens);
    text
}

fn tally(rig: &mut Rig) -> Tally {
    rig.engine.drain();
    assert_eq!(rig.device.take_reports(), Vec::<String>::new());
    rig.engine.ledger().tally(StepKind::Decode).clone()
}

/// The whole reply in as few launches as the host's reading allows, and the same tokens.
fn a_reply_is_the_same_in_one_launch(device: impl Fn() -> Device, case: &str, lengths: &[usize]) {
    for row in rows() {
        for &n in lengths {
            let want = text(&mut rig(device(), case, stepping()), &row, n).said;
            for method in [Method::Stream, Method::Nodes] {
                let mut rig = rig(device(), case, looping(GraphMode::Require, method));
                assert_eq!(text(&mut rig, &row, n).said, want, "{case} {method}");
                let tally = tally(&mut rig);
                assert_eq!((tally.steps(), tally.replayed, tally.failed), (n as u64, n as u64, 0), "{tally}");
                assert_eq!(tally.not_repeated, None);
                assert_eq!(tally.launches + tally.repeated, n as u64);
                // The ring may fill: the host of a simulated device is as slow as the device, and the tiny model is
                // faster on a GPU than a host that is not scheduled.
                assert!((1..=4 + n as u64 / 20).contains(&tally.launches), "{tally}");
                assert!(tally.discarded <= 1, "{tally}");
            }
        }
    }
}

/// A reply that ends by a token equals one without anything in flight, and so does the next turn.
fn an_end_of_turn_ends_the_loop(device: impl Fn() -> Device) {
    for row in rows() {
        let want = text(&mut rig(device(), "llama", stepping()), &row, 60).said;
        let said: Vec<u32> = want.iter().map(|(token, _)| *token).collect();
        for parity in [0, 1] {
            let fresh = (10..50).find(|&i| i % 2 == parity && !said[..i].contains(&said[i]));
            let Some(at) = fresh else { continue };
            let end = [u32::MAX, said[at]];
            let turn = |options: CudaOptions| {
                let mut rig = rig(device(), "llama", options);
                let mut text = Text::begin(&mut rig, PROMPTS[0], &row);
                while text.next(&mut rig, 1000, &end).unwrap() != said[at] {}
                let tally = tally(&mut rig);
                assert_eq!((tally.steps(), text.said.len()), (at as u64, at + 1));
                assert_eq!(text.said, want[..=at]);
                (tally, text.next_turn(&mut rig, 30))
            };
            let (ended, next) = turn(looping(GraphMode::Require, Method::Stream));
            assert!(ended.discarded <= 1, "the loop ends with the body of the last token: {ended}");
            assert_eq!(next, turn(stepping()).1);
        }
    }
}

/// A caller that stops in the middle, or changes its mind.
fn a_stop_ends_the_loop(device: impl Fn() -> Device) {
    let [greedy, random] = rows();
    let turn = |options: CudaOptions| {
        let mut rig = rig(device(), "llama", options);
        let mut text = Text::begin(&mut rig, PROMPTS[2], &random);
        for _ in 0..20 {
            text.next(&mut rig, 250, &[]).unwrap();
        }
        // Another token than the chosen one, then other options, with a loop in flight both times.
        text.last = 5;
        text.next(&mut rig, 250, &[]).unwrap();
        text.row = greedy.clone();
        for _ in 0..20 {
            text.next(&mut rig, 200, &[]).unwrap();
        }
        let said = text.said.clone();
        let tally = tally(&mut rig);
        // No more than the ring holds, of what could have been hundreds.
        assert!(tally.discarded <= 3 * 66, "{tally}");
        (said, text.next_turn(&mut rig, 40))
    };
    assert_eq!(turn(looping(GraphMode::Require, Method::Stream)), turn(stepping()));
}

mod on_the_simulated_device {
    use super::*;

    #[test]
    fn a_reply_is_one_launch() {
        a_reply_is_the_same_in_one_launch(|| sim("").1, "llama", &[120, 61, 2, 1]);
    }

    #[test]
    fn a_reply_of_a_recurrent_model_is_one_launch() {
        a_reply_is_the_same_in_one_launch(|| sim("").1, "qwen35", &[41]);
    }

    #[test]
    fn an_end_of_turn_ends_it() {
        an_end_of_turn_ends_the_loop(|| sim("").1);
    }

    #[test]
    fn a_caller_that_stops_ends_it() {
        a_stop_ends_the_loop(|| sim("").1);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn a_reply_is_one_launch() {
        let _turn = gpu_turn();
        a_reply_is_the_same_in_one_launch(gpu, "llama", &[300, 61, 2, 1]);
        a_reply_is_the_same_in_one_launch(gpu, "qwen35", &[41]);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn an_end_of_turn_ends_it() {
        let _turn = gpu_turn();
        an_end_of_turn_ends_the_loop(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn a_caller_that_stops_ends_it() {
        let _turn = gpu_turn();
        a_stop_ends_the_loop(gpu);
    }
}

#[test]
fn where_a_loop_is_not_possible_the_ledger_has_the_reason() {
    let [greedy, _] = rows();
    let want = text(&mut rig(sim("").1, "llama", stepping()), &greedy, 100).said;
    let on = looping(GraphMode::Auto, Method::Nodes);
    let verified = CudaOptions { verify_every: NonZeroU32::new(7), ..on.clone() };
    let profiled = CudaOptions { profile: true, ..on.clone() };
    let off = looping(GraphMode::Off, Method::Stream);
    let cases = [
        (verified, "", "compared with their eager run"),
        (profiled, "", "profiling"),
        (off, "", "switched off"),
        (on.clone(), "on every graph_add_loop: fail 801", "801"),
        (on.clone(), "on every graph_condition: fail 801", "801"),
        // Three replays verify the graph of the prompt, which then runs, and three that of a step.
        (on.clone(), "on 8th replay: wrong byte", "differs from eager"),
    ];
    for (options, script, reason) in cases {
        let (sim, device) = sim(script);
        let mut rig = rig(device, "llama", options);
        assert_eq!(text(&mut rig, &greedy, 100).said, want, "{reason}");
        let tally = tally(&mut rig);
        // After a passing fault the loop is recorded again a few steps later.
        let is_passing = script.contains("8th");
        assert_eq!((tally.steps(), tally.failed), (100, 0), "{tally}");
        assert!(tally.repeated == 0 || is_passing, "{tally}");
        assert!(tally.to_string().contains(reason), "{tally}");
        assert_eq!(sim.unused_faults(), Vec::<String>::new());
    }
}

#[test]
fn several_sequences_are_launched_step_by_step() {
    let [greedy, random] = rows();
    let mut alone = rig(sim("").1, "llama", stepping());
    let mut rig = rig(sim("").1, "llama", looping(GraphMode::Require, Method::Stream));
    let both = [&mut alone, &mut rig].map(|rig| {
        let mut texts = [&greedy, &random].map(|row| Text::begin(rig, PROMPTS[0], row));
        for _ in 0..6 {
            let rows = texts.iter_mut().map(|text| refrain_engine::DecodeRow {
                sequence: &mut text.session,
                token: text.last,
                row: &mut text.row,
                ahead: Lookahead { n_tokens: 50, end: &[] },
            });
            let mut rows: Vec<_> = rows.collect();
            let step = rig.engine.decode_rows(&mut rows, refrain_engine::LaunchPolicy::LaunchAhead).unwrap();
            for (text, choice) in texts.iter_mut().zip(step.choices) {
                let chosen = choice.unwrap().unwrap();
                text.last = chosen.token;
                text.said.push((chosen.token, chosen.logprob.to_bits()));
            }
        }
        texts.map(|text| text.said)
    });
    assert_eq!(both[0], both[1]);
    let tally = tally(&mut rig);
    assert_eq!(tally.repeated, 0);
    assert!(tally.to_string().contains("several sequences"), "{tally}");
}

#[test]
fn a_device_lost_in_a_loop_is_reported_after_the_tokens_before_it() {
    let [greedy, _] = rows();
    let (sim, device) = sim("");
    let mut rig = rig(device, "llama", looping(GraphMode::Require, Method::Stream));
    let mut text = text(&mut rig, &greedy, 10);
    rig.engine.drain();
    sim.inject(FaultScript::parse("on 1st replay: illegal address").unwrap());
    let error = text.next(&mut rig, 40, &[]).unwrap_err();
    assert!(error.to_string().contains("700") || format!("{error:?}").contains("700"), "{error:?}");
}

#[test]
fn a_loop_saves_the_launches_of_a_reply() {
    let [greedy, _] = rows();
    let launches = |options: CudaOptions| {
        let (sim, device) = sim("");
        let mut rig = rig(device, "llama", options);
        text(&mut rig, &greedy, 1);
        rig.engine.drain();
        let before = sim.stats().n_calls(DriverCall::ExecLaunch);
        text(&mut rig, &greedy, 60);
        rig.engine.drain();
        sim.stats().n_calls(DriverCall::ExecLaunch) - before
    };
    assert!(launches(stepping()) >= 60);
    assert!(launches(looping(GraphMode::Require, Method::Stream)) <= 4);
}
