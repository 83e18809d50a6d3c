//! Runs of several rows: sequences join, leave and end while steps are in flight, and each gives the same
//! output as alone.

mod rig;

use std::num::NonZeroU32;
use std::time::Duration;

use refrain_cuda::{CudaBackend, CudaOptions, GraphMode, Monitor};
use refrain_driver::sim::DriverCall;
use refrain_driver::{Device, Method};
use refrain_engine::{
    BackendRunner, Core, DecodeRow, LaunchPolicy, Lookahead, RunnerOptions, SamplingParams, SamplingRow,
    SequenceState, StepKind,
};
use refrain_tensor::DType;
use rig::{gpu, gpu_turn, model, options, sim};

const CONTEXT: usize = 64;

/// A small generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

fn cuda_options(mode: GraphMode, row_buckets: &[usize]) -> CudaOptions {
    CudaOptions { row_buckets: row_buckets.to_vec(), ahead: 4, ..options(mode, Method::Stream) }
}

fn core(device: &Device, options: CudaOptions, n_seqs: usize) -> (Core, Monitor) {
    let backend = CudaBackend::on(device, options).unwrap();
    let monitor = backend.monitor();
    let runner = RunnerOptions {
        context: CONTEXT,
        n_positions: CONTEXT * n_seqs,
        kv_block: 16,
        kv_dtype: DType::F32,
        max_tokens: 64,
        max_seqs: 64,
        n_recurrent: 0,
    };
    let runner = BackendRunner::new(backend, model("llama"), runner).unwrap();
    (Core::new(Box::new(runner), CONTEXT), monitor)
}

/// A sequence with its own options in the middle of its generation.
struct Text {
    session: SequenceState,
    row: SamplingRow,
    end: Vec<u32>,
    next: u32,
    said: Vec<(u32, f32)>,
    n_wanted: usize,
}

impl Text {
    fn begin(core: &mut Core, idx: usize, n_wanted: usize) -> Text {
        let greedy = SamplingParams::greedy();
        let seed = idx as u64;
        let mut row = SamplingRow::new(&match idx % 4 {
            0 => greedy,
            1 => SamplingParams { temperature: 0.9, top_k: 20, seed, ..greedy },
            2 => SamplingParams { temperature: 1.1, repeat_penalty: 1.3, penalty_window: 9, seed, ..greedy },
            _ => SamplingParams { temperature: 1.2, logit_bias: vec![(5, 1.5)], seed, ..greedy },
        });
        let prompt: Vec<u32> = (0..1 + idx as u32 % 7).map(|i| (7 * idx as u32 + 11 * i) % 120).collect();
        // Some tokens end some of them, and not all from the beginning.
        let end: Vec<u32> = (0..120).filter(|t| (t + idx as u32).is_multiple_of(40)).collect();
        if idx.is_multiple_of(2) {
            row.forbid(&end, prompt.len() + 5 + idx % 5).unwrap();
        }
        let mut session = core.open();
        let first = core.prompt(&mut session, &prompt, &mut row, |_| true).unwrap();
        Text { session, row, end, next: first.token, said: vec![(first.token, first.logprob)], n_wanted }
    }

    fn is_over(&self) -> bool {
        self.said.len() >= self.n_wanted || self.end.contains(&self.next)
    }

    fn row(&mut self) -> DecodeRow<'_> {
        let ahead = Lookahead { n_tokens: self.n_wanted - self.said.len(), end: &self.end };
        DecodeRow { sequence: &mut self.session, token: self.next, row: &mut self.row, ahead }
    }
}

/// One step of some of them; returns how many got a token.
fn step(core: &mut Core, texts: &mut [Text], present: &[bool]) -> usize {
    let is_there = |(text, present): &(&mut Text, &bool)| **present && !text.is_over();
    let mut there: Vec<&mut Text> =
        texts.iter_mut().zip(present).filter(is_there).map(|(text, _)| text).collect();
    let mut rows: Vec<DecodeRow<'_>> = there.iter_mut().map(|text| text.row()).collect();
    if rows.is_empty() {
        return 0;
    }
    let choices = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap().choices;
    drop(rows);
    let mut n = 0;
    for (text, choice) in there.iter_mut().zip(choices) {
        if let Some(chosen) = choice {
            let chosen = chosen.unwrap();
            text.next = chosen.token;
            text.said.push((chosen.token, chosen.logprob));
            n += 1;
        }
    }
    n
}

fn alone(core: &mut Core, idx: usize, n_wanted: usize) -> Vec<(u32, f32)> {
    let mut text = [Text::begin(core, idx, n_wanted)];
    while !text[0].is_over() {
        step(core, &mut text, &[true]);
    }
    core.drain();
    let [text] = text;
    text.said
}

fn assert_same(got: &[(u32, f32)], want: &[(u32, f32)], name: &str) {
    let tokens = |said: &[(u32, f32)]| said.iter().map(|(token, _)| *token).collect::<Vec<_>>();
    assert_eq!(tokens(got), tokens(want), "{name}");
    for ((_, got), (_, want)) in got.iter().zip(want) {
        assert!((got - want).abs() < 2e-3, "{name}: {got} and {want}");
    }
}

const N_TEXTS: usize = 13;

fn n_wanted(idx: usize) -> usize {
    20 + 3 * idx
}

/// Sequences join and leave at random; returns the output of each.
fn come_and_go(core: &mut Core) -> Vec<Vec<(u32, f32)>> {
    let mut random = Random(3);
    let mut texts: Vec<Text> = (0..N_TEXTS).map(|idx| Text::begin(core, idx, n_wanted(idx))).collect();
    let mut present: Vec<bool> = (0..N_TEXTS).map(|idx| idx < 2).collect();
    let mut calls_without_tokens = 0;
    while texts.iter().any(|text| !text.is_over()) {
        for (text, present) in texts.iter().zip(&mut present) {
            *present = match (*present, text.is_over()) {
                (_, true) => false,
                (true, _) => random.below(14) > 0,
                (false, _) => random.below(6) == 0,
            };
        }
        let any = present.iter().any(|present| *present);
        let n = step(core, &mut texts, &present);
        // A sequence that stays longer than the steps in flight gets tokens.
        calls_without_tokens = if any && n == 0 { calls_without_tokens + 1 } else { 0 };
        assert!(calls_without_tokens <= 4);
    }
    core.drain();
    texts.into_iter().map(|text| text.said).collect()
}

fn bits(said: &[Vec<(u32, f32)>]) -> Vec<Vec<(u32, u32)>> {
    said.iter().map(|said| said.iter().map(|(token, p)| (*token, p.to_bits())).collect()).collect()
}

fn rows_come_and_go(device: impl Fn() -> Device) {
    let buckets = [1, 2, 4, 8, 12, 16];
    let mut texts = Vec::new();
    let modes =
        [(GraphMode::Off, None), (GraphMode::Require, None), (GraphMode::Require, NonZeroU32::new(3))];
    for (mode, verify_every) in modes {
        let device = device();
        let options = CudaOptions { verify_every, ..cuda_options(mode, &buckets) };
        let (mut core, monitor) = core(&device, options, N_TEXTS);
        texts.push(come_and_go(&mut core));
        let decode = core.ledger().tally(StepKind::Decode);
        assert_eq!((decode.failed, decode.steps() > 60), (0, true), "{decode}");
        assert_eq!(decode.replayed, if mode == GraphMode::Off { 0 } else { decode.steps() }, "{decode}");
        assert!(decode.tokens > 3 * decode.steps(), "{decode}");
        let compared = monitor.status().compared;
        assert_eq!((compared.n_steps > 20, compared.n_mismatches), (verify_every.is_some(), 0));
        assert_eq!(device.take_reports(), Vec::<String>::new());
    }
    // Bit for bit, whichever way the steps ran.
    assert_eq!(bits(&texts[0]), bits(&texts[1]));
    assert_eq!(bits(&texts[0]), bits(&texts[2]));
    let (mut core, _) = core(&device(), cuda_options(GraphMode::Require, &[1]), N_TEXTS);
    for (idx, said) in texts[0].iter().enumerate() {
        assert_same(said, &alone(&mut core, idx, n_wanted(idx)), &format!("sequence {idx}"));
    }
}

/// More rows at once than one message holds.
fn many_join_at_once(device: &Device) {
    const N: usize = 40;
    let (mut core, _) = core(device, cuda_options(GraphMode::Require, &[1, N]), N);
    let want: Vec<_> = (0..N).map(|idx| alone(&mut core, idx, 9)).collect();
    let mut texts: Vec<Text> = (0..N).map(|idx| Text::begin(&mut core, idx, 9)).collect();
    let present = |call: usize| (0..N).map(|idx| idx % 5 == 0 || call >= 2).collect::<Vec<_>>();
    for call in 0.. {
        if texts.iter().all(Text::is_over) {
            break;
        }
        step(&mut core, &mut texts, &present(call));
    }
    core.drain();
    assert_eq!(core.ledger().tally(StepKind::Decode).failed, 0);
    for (idx, text) in texts.iter().enumerate() {
        assert_same(&text.said, &want[idx], &format!("sequence {idx}"));
    }
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn sequences_that_join_and_leave_give_the_same_output_as_alone() {
    rows_come_and_go(|| sim("").1);
}

#[test]
fn more_rows_than_one_message_holds_join_at_once() {
    many_join_at_once(&sim("").1);
}

#[test]
fn steps_of_rows_are_one_launch_each_and_allocate_nothing() {
    let (driver, device) = sim("");
    let (mut core, _) = core(&device, cuda_options(GraphMode::Require, &[1, 4]), 4);
    let mut texts: Vec<Text> = [0, 1, 2].map(|idx| Text::begin(&mut core, 4 * idx, 50)).into();
    texts.iter_mut().for_each(|text| text.end.clear());
    step(&mut core, &mut texts, &[true; 3]);
    let before = driver.stats();
    for _ in 0..40 {
        assert_eq!(step(&mut core, &mut texts, &[true; 3]), 3);
    }
    let after = driver.stats();
    let sent = |call: DriverCall| after.n_calls(call) - before.n_calls(call);
    assert!((38..=42).contains(&sent(DriverCall::ExecLaunch)), "{}", sent(DriverCall::ExecLaunch));
    // Block tables alone: three sequences that each reach three more blocks.
    assert!(sent(DriverCall::MemcpyHtodAsync) <= 9, "{}", sent(DriverCall::MemcpyHtodAsync));
    assert!(sent(DriverCall::Launch) <= 9, "{}", sent(DriverCall::Launch));
    for call in [
        DriverCall::Alloc,
        DriverCall::AllocHost,
        DriverCall::StreamBeginCapture,
        DriverCall::MemcpyDtohAsync,
    ] {
        assert_eq!(sent(call), 0, "{call:?}");
    }
    assert_eq!(before.live, after.live);
    core.drain();
}

#[test]
fn a_run_that_fails_with_steps_in_flight_leaves_each_sequence_unchanged() {
    let (driver, device) = sim("");
    let mut options = cuda_options(GraphMode::Require, &[1, 4]);
    options.step_limit = Duration::from_secs(20);
    let (mut core, _) = core(&device, options, 8);
    let want: Vec<_> = (0..3).map(|idx| alone(&mut core, idx, 30)).collect();
    let mut texts: Vec<Text> = (0..3).map(|idx| Text::begin(&mut core, idx, 30)).collect();
    step(&mut core, &mut texts, &[true; 3]);
    driver.inject(refrain_driver::sim::FaultScript::parse("on 7th replay: fail 701").unwrap());
    let mut n_failed = 0;
    while texts.iter().any(|text| !text.is_over()) && n_failed < 10 {
        let mut rows: Vec<DecodeRow<'_>> =
            texts.iter_mut().filter(|text| !text.is_over()).map(Text::row).collect();
        let Ok(followed) = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead) else {
            n_failed += 1;
            continue;
        };
        drop(rows);
        let there = texts.iter_mut().filter(|text| !text.is_over());
        for (text, choice) in there.zip(followed.choices) {
            if let Some(Ok(chosen)) = choice {
                text.next = chosen.token;
                text.said.push((chosen.token, chosen.logprob));
            }
        }
    }
    // The graph is out of service for two more steps.
    assert_eq!(n_failed, 3);
    for (text, want) in texts.iter().zip(&want) {
        assert_same(&text.said, want, "after the failure");
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn sequences_that_join_and_leave_give_the_same_output_as_alone() {
        let _turn = gpu_turn();
        rows_come_and_go(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn more_rows_than_one_message_holds_join_at_once() {
        let _turn = gpu_turn();
        many_join_at_once(&gpu());
    }
}

/// The mask of a text's choice at a position: about two thirds of the tokens, others each time.
fn mask_at(idx: usize, position: usize) -> Vec<u32> {
    let bit = |token: usize| u32::from((token * 5 + idx * 3 + position * 7) % 11 < 7);
    (0..4).map(|word| (0..32).map(|i| bit(32 * word + i) << i).sum()).collect()
}

/// Sets the masks of every other text, some of which are late.
fn set_masks(texts: &mut [Text], idxs: &[usize], mut is_late: impl FnMut(usize) -> bool) {
    for (text, &idx) in texts.iter_mut().zip(idxs).filter(|(_, idx)| **idx % 2 == 1) {
        text.row.is_late = is_late(idx);
        let mask = mask_at(idx, text.session.tokens().len() + 1);
        text.row.mask = if text.row.is_late { Vec::new() } else { mask };
    }
}

/// Texts with masks and without share runs, join and leave. A late mask changes when a token comes, not which.
#[test]
fn texts_with_late_masks_give_what_they_give_alone() {
    const N: usize = 7;
    for (every, faults) in [(None, ""), (NonZeroU32::new(5), ""), (None, "on every 9th replay: fail 701")] {
        let mode = if faults.is_empty() { GraphMode::Require } else { GraphMode::Auto };
        let (_, device) = sim("");
        let (mut single, _) = core(&device, cuda_options(GraphMode::Require, &[1]), N);
        let wanted: Vec<Vec<(u32, f32)>> = (0..N)
            .map(|idx| {
                let mut text = [Text::begin(&mut single, idx, n_wanted(idx) / 2)];
                while !text[0].is_over() {
                    set_masks(&mut text, &[idx], |_| false);
                    step(&mut single, &mut text, &[true]);
                }
                single.drain();
                let [text] = text;
                text.said
            })
            .collect();
        let (_sim, device) = sim(faults);
        let options = CudaOptions { verify_every: every, ..cuda_options(mode, &[1, 2, 4, 8]) };
        let (mut core, monitor) = core(&device, options, N);
        let mut random = Random(3);
        let idxs: Vec<usize> = (0..N).collect();
        let mut texts: Vec<Text> =
            idxs.iter().map(|&idx| Text::begin(&mut core, idx, n_wanted(idx) / 2)).collect();
        let mut present = [true; N];
        let mut n_steps = 0;
        while texts.iter().any(|text| !text.is_over()) {
            if random.below(6) == 0 {
                present[random.below(N)] ^= true;
            }
            if !texts.iter().zip(present).any(|(text, present)| present && !text.is_over()) {
                present = [true; N];
            }
            set_masks(&mut texts, &idxs, |_| random.below(3) == 0);
            step(&mut core, &mut texts, &present);
            n_steps += 1;
            assert!(n_steps < 1000, "there is no progress");
        }
        core.drain();
        for (idx, (text, want)) in texts.iter().zip(&wanted).enumerate() {
            assert_same(&text.said, want, &format!("text {idx}, {faults:?}"));
            // The first token is that of the prompt, which has no mask.
            let start = text.session.tokens().len() + 1 - text.said.len();
            let masked = text.said.iter().enumerate().skip(1).filter(|_| idx % 2 == 1);
            for (nth, (token, _)) in masked {
                let mask = mask_at(idx, start + nth);
                assert_eq!(mask[*token as usize / 32] >> (token % 32) & 1, 1, "text {idx}, choice {nth}");
            }
        }
        let decode = core.ledger().tally(StepKind::Decode);
        assert!(decode.launches > decode.replayed && decode.failed == 0, "{decode}");
        assert_eq!(decode.eager > 0, !faults.is_empty(), "{decode}");
        assert_eq!(monitor.status().compared.n_mismatches, 0);
    }
}

/// Chosen tokens, each with the most probable ones.
type Listed = Vec<(u32, Vec<(u32, f32)>)>;

/// Decodes texts that want 5, no and 20 probable tokens, the second of them with masks.
fn listed(core: &mut Core, idxs: &[usize], n_wanted: usize) -> Vec<Listed> {
    let mut texts: Vec<Text> = idxs.iter().map(|&idx| Text::begin(core, idx, n_wanted)).collect();
    let mut all = vec![Listed::new(); texts.len()];
    while texts.iter().any(|text| !text.is_over()) {
        set_masks(&mut texts, idxs, |_| false);
        let mut there: Vec<(usize, &mut Text)> =
            texts.iter_mut().enumerate().filter(|(_, text)| !text.is_over()).collect();
        for (at, text) in &mut there {
            text.row.n_top = [5, 0, 20][idxs[*at] % 3];
        }
        let places: Vec<usize> = there.iter().map(|(at, _)| *at).collect();
        let mut rows: Vec<DecodeRow<'_>> = there.iter_mut().map(|(_, text)| text.row()).collect();
        let step = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap();
        drop(rows);
        for ((at, choice), top) in places.into_iter().zip(step.choices).zip(step.tops) {
            let Some(chosen) = choice.map(Result::unwrap) else { continue };
            texts[at].next = chosen.token;
            texts[at].said.push((chosen.token, chosen.logprob));
            assert_eq!(top.len(), [5, 0, 20][idxs[at] % 3]);
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1), "{top:?}");
            if idxs[at] == 0 {
                assert_eq!(top[0], (chosen.token, chosen.logprob), "a greedy choice is the most probable");
            }
            all[at].push((chosen.token, top));
        }
    }
    core.drain();
    all
}

#[test]
fn the_most_probable_tokens_come_with_steps_launched_ahead() {
    for idxs in [[0, 4, 2], [0, 1, 5]] {
        let (_sim, device) = sim("");
        let (mut single, _) = core(&device, cuda_options(GraphMode::Require, &[1]), 3);
        let want: Vec<Listed> = idxs.iter().map(|&idx| listed(&mut single, &[idx], 18).remove(0)).collect();
        let decode = single.ledger().tally(StepKind::Decode).clone();
        let n_launches = if idxs.iter().any(|idx| idx % 2 == 1) { decode.replayed } else { 0 };
        assert!(decode.eager == 0 && decode.launches <= decode.replayed + n_launches, "{decode}");
        let (_sim, device) = sim("");
        let (mut together, _) = core(&device, cuda_options(GraphMode::Require, &[1, 2, 4]), 3);
        let got = listed(&mut together, &idxs, 18);
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.len(), want.len());
            for ((token, top), (want_token, want_top)) in got.iter().zip(want) {
                assert_eq!(token, want_token);
                for ((id, logprob), (want_id, want_logprob)) in top.iter().zip(want_top) {
                    assert!(
                        id == want_id || (logprob - want_logprob).abs() < 1e-4,
                        "{top:?} and {want_top:?}"
                    );
                }
            }
        }
    }
}
