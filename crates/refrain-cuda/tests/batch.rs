//! Steps of several sequences: replay against eager bit for bit, and both against each sequence alone.

mod rig;

use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
use refrain_driver::{Device, Method};
use refrain_engine::{
    BackendRunner, Chosen, Engine, EngineError, EngineOptions, Pace, Request, Runner, RunnerOptions,
    SamplingParams, SamplingRow, StepKind, StepOut, StepRequest, TokenEvent, Want,
};
use refrain_graph::{Ran, RunError};
use refrain_tensor::DType;
use rig::{goldens, gpu, gpu_turn, model, options, sim};

const KV_BLOCK: usize = 16;
const MAX_BLOCKS: usize = 4;
const N_SEQS: usize = 10;

fn runner_options() -> RunnerOptions {
    RunnerOptions {
        context: KV_BLOCK * MAX_BLOCKS,
        n_positions: KV_BLOCK * MAX_BLOCKS * N_SEQS,
        kv_block: KV_BLOCK,
        kv_dtype: DType::F32,
        max_tokens: 64,
        max_seqs: 64,
    }
}

fn cuda_options(mode: GraphMode) -> CudaOptions {
    CudaOptions {
        buckets: vec![1, 8, 32],
        row_buckets: vec![1, 2, 3, 4, 6, 8, 12],
        ..options(mode, Method::Stream)
    }
}

/// A sequence as a test drives it, with blocks that are nobody else's.
struct Seq {
    tokens: Vec<u32>,
    n_done: usize,
    table: Vec<u32>,
    row: SamplingRow,
    said: Vec<Chosen>,
}

impl Seq {
    fn new(idx: usize) -> Seq {
        let prompt = (0..3 + 5 * idx as u32).map(|i| (7 * idx as u32 + 11 * i) % 120).collect();
        // Scattered, and not in order.
        let table = (0..MAX_BLOCKS).map(|b| ((MAX_BLOCKS - 1 - b) * N_SEQS + idx) as u32).collect();
        let greedy = SamplingParams::greedy();
        let params = match idx % 3 {
            0 => greedy,
            1 => SamplingParams { temperature: 0.9, top_k: 20, seed: idx as u64, ..greedy },
            _ => SamplingParams { temperature: 1.1, repeat_penalty: 1.2, seed: idx as u64, ..greedy },
        };
        Seq { tokens: prompt, n_done: 0, table, row: SamplingRow::new(&params), said: Vec::new() }
    }
}

/// One step over the next tokens of some sequences, at most so many of each.
fn step(runner: &mut dyn Runner, seqs: &mut [Seq], which: &[(usize, usize)]) -> Ran {
    for &(idx, _) in which {
        let seq = &mut seqs[idx];
        seq.row.advance(seq.tokens.len(), &seq.tokens);
    }
    let requests: Vec<_> = which
        .iter()
        .map(|&(idx, most)| {
            let seq = &seqs[idx];
            let end = seq.tokens.len().min(seq.n_done + most);
            let want = if end == seq.tokens.len() { Want::Sample(&seq.row) } else { Want::Nothing };
            StepRequest { tokens: &seq.tokens[seq.n_done..end], start: seq.n_done, table: &seq.table, want }
        })
        .collect();
    let mut out = StepOut::default();
    let ran = runner.step(&requests, &mut out).unwrap();
    let n_tokens: Vec<usize> = requests.iter().map(|r| r.tokens.len()).collect();
    drop(requests);
    for ((&(idx, _), n), choice) in which.iter().zip(n_tokens).zip(out.choices) {
        let seq = &mut seqs[idx];
        seq.n_done += n;
        if let Some(choice) = choice {
            let chosen = choice.unwrap().chosen;
            seq.tokens.push(chosen.token);
            seq.said.push(chosen);
        }
    }
    ran
}

/// Joins, ends, prompts beside decodes, and decodes of every bucket; gives what was said and how each step ran.
fn load(runner: &mut dyn Runner) -> (Vec<Vec<Chosen>>, Vec<Ran>) {
    let mut seqs: Vec<Seq> = (0..N_SEQS).map(Seq::new).collect();
    let all = |range: std::ops::Range<usize>| range.map(|idx| (idx, 1)).collect::<Vec<_>>();
    let mut steps: Vec<Vec<(usize, usize)>> = vec![
        vec![(0, 8)],
        // Whole prompts together, and pieces beside a decoded token.
        vec![(1, 20), (2, 20)],
        vec![(0, 1), (3, 9), (1, 1)],
        vec![(3, 9), (0, 1), (4, 5)],
        vec![(4, 30), (5, 2)],
        vec![(5, 30), (2, 1), (1, 1), (0, 1)],
    ];
    for n in [2, 3, 4, 5, 6] {
        steps.push(all(0..n));
    }
    for idx in 6..N_SEQS {
        steps.push(vec![(idx, 25), (0, 1)]);
        steps.push(vec![(idx, 25), (1, 1), (2, 1)]);
    }
    // With and without padding, in another order, and fewer again.
    for n in [7, 8, 9, 10] {
        steps.push(all(0..n).into_iter().rev().collect());
    }
    for n in [3, 1, 2] {
        steps.push(all(4..4 + n));
    }
    let ran = steps.iter().map(|which| step(runner, &mut seqs, which)).collect();
    (seqs.into_iter().map(|seq| seq.said).collect(), ran)
}

/// What a sequence says when nobody else is there.
fn alone(runner: &mut dyn Runner, idx: usize, n_tokens: usize) -> Vec<Chosen> {
    let mut seqs: Vec<Seq> = (0..=idx).map(Seq::new).collect();
    while seqs[idx].said.len() < n_tokens {
        step(runner, &mut seqs, &[(idx, 8)]);
    }
    std::mem::take(&mut seqs[idx].said)
}

fn bits(said: &[Vec<Chosen>]) -> Vec<Vec<(u32, u32)>> {
    said.iter().map(|said| said.iter().map(|c| (c.token, c.logprob.to_bits())).collect()).collect()
}

fn replayed_equals_eager_and_each_alone(device: impl Fn() -> Device) {
    for case in ["llama", "qwen3", "gemma3"] {
        let cuda = |mode| {
            let device = device();
            let backend = CudaBackend::on(&device, cuda_options(mode)).unwrap();
            let monitor = backend.monitor();
            let mut runner = BackendRunner::new(backend, model(case), runner_options()).unwrap();
            let out = load(&mut runner);
            assert_eq!(device.take_reports(), Vec::<String>::new());
            (out, monitor.status())
        };
        let ((eager, ran), _) = cuda(GraphMode::Off);
        assert!(ran.iter().all(|ran| matches!(ran, Ran::Eager(_))));
        let ((replayed, ran), status) = cuda(GraphMode::Require);
        assert!(ran.iter().all(|ran| *ran == Ran::REPLAYED), "{case}: {ran:?}");
        assert_eq!(bits(&replayed), bits(&eager), "{case}");
        // Decoded rows of 1, 2, 3, 4, 6, 8 and 12; prompts of one; mixed steps of 8 and 32 tokens.
        assert!((8..16).contains(&status.graphs.len()), "{case}: {} graphs", status.graphs.len());

        let backend = CudaBackend::on(&device(), cuda_options(GraphMode::Off)).unwrap();
        let mut runner = BackendRunner::new(backend, model(case), runner_options()).unwrap();
        let want: Vec<_> = (0..N_SEQS).map(|idx| alone(&mut runner, idx, replayed[idx].len())).collect();
        for (idx, (got, want)) in replayed.iter().zip(&want).enumerate() {
            assert_eq!(got.len(), want.len());
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                let place = format!("{case}, sequence {idx}, token {at}: {got:?} and {want:?}");
                assert_eq!(got.token, want.token, "{place}");
                assert!((got.logprob - want.logprob).abs() < 2e-3, "{place}");
            }
        }
    }
}

fn an_engine_serves_many(device: Device) {
    let backend = CudaBackend::on(&device, cuda_options(GraphMode::Require)).unwrap();
    let runner = RunnerOptions { n_positions: 12 * KV_BLOCK, ..runner_options() };
    let runner = BackendRunner::new(backend, model("llama"), runner).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let request = |idx: u32| {
        let mut request = Request::once((0..3 + idx % 7).map(|i| (idx + 5 * i) % 100).collect());
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 4 + idx as usize % 9);
        if idx.is_multiple_of(5) {
            request.pace = Pace::Asked { lead: 1 };
        }
        request
    };
    let collect = |stream: refrain_engine::TokenStream| -> Vec<u32> {
        let tokens = stream.filter_map(|event| match event.unwrap() {
            TokenEvent::Token { token, .. } => Some(token),
            TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
        });
        tokens.collect()
    };
    let streams: Vec<_> = (0..16).map(|idx| engine.submit(request(idx)).unwrap()).collect();
    let together: Vec<_> = streams.into_iter().map(collect).collect();
    let ledger = engine.ledger().unwrap();
    let tallies = StepKind::ALL.map(|kind| ledger.tally(kind));
    assert!(tallies.iter().all(|tally| tally.eager + tally.failed == 0), "{tallies:?}");
    assert!(ledger.tally(StepKind::Decode).tokens > 2 * ledger.tally(StepKind::Decode).steps());
    // Float weights and greedy choices: the same tokens, whoever else was there.
    for (idx, together) in together.iter().enumerate() {
        assert_eq!(&collect(engine.submit(request(idx as u32)).unwrap()), together, "request {idx}");
    }
    let load = engine.load().unwrap();
    assert_eq!((load.blocks.used, load.n_running, load.n_waiting), (0, 0, 0));
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

/// Every block is used by several requests, some of which leave nothing but NaN in it.
fn nan_stays_with_its_request(device: Device) {
    const POISON: u32 = 7;
    let backend = CudaBackend::on(&device, cuda_options(GraphMode::Require)).unwrap();
    let runner = RunnerOptions { n_positions: 12 * KV_BLOCK, ..runner_options() };
    let model = goldens::poisoned_model("llama", POISON as usize);
    let runner = BackendRunner::new(backend, model, runner).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let request = |idx: u32, poisoned: bool| {
        // Of all other tokens none is the one.
        let mut prompt: Vec<u32> = (0..5 + 3 * (idx % 8)).map(|i| 20 + (idx + 5 * i) % 80).collect();
        if poisoned {
            let middle = prompt.len() / 2;
            prompt[middle] = POISON;
        }
        let mut request = Request::once(prompt);
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 3 + idx as usize % 9);
        request.sampling.logit_bias = vec![(POISON, f32::NEG_INFINITY)];
        request
    };
    let collect = |stream: refrain_engine::TokenStream| {
        let mut tokens = Vec::new();
        for event in stream {
            match event {
                Ok(TokenEvent::Token { token, .. }) => tokens.push(token),
                Ok(TokenEvent::Prompt { .. } | TokenEvent::End(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tokens)
    };
    let want: Vec<_> =
        (0..20).map(|idx| collect(engine.submit(request(idx, false)).unwrap()).unwrap()).collect();
    for round in 0..3 {
        let submitted: Vec<_> = (0..20)
            .map(|idx| {
                let poisoned = (idx + round) % 3 == 0;
                (idx, poisoned, engine.submit(request(idx, poisoned)).unwrap())
            })
            .collect();
        for (idx, poisoned, stream) in submitted {
            match (poisoned, collect(stream)) {
                (true, Err(EngineError::NonFinite { .. })) => {}
                (false, Ok(tokens)) => assert_eq!(tokens, want[idx as usize], "request {idx}, round {round}"),
                (_, other) => panic!("request {idx}, round {round}: {other:?}"),
            }
        }
    }
    assert_eq!(engine.load().unwrap().blocks.used, 0);
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn logits_that_are_not_finite_fail_one_request_and_what_it_leaves_harms_nobody() {
    nan_stays_with_its_request(sim("").1);
}

#[test]
fn steps_of_several_sequences_replay_as_they_run_eagerly_and_say_what_each_says_alone() {
    replayed_equals_eager_and_each_alone(|| sim("").1);
}

#[test]
fn an_engine_on_the_device_serves_many_with_every_step_replayed() {
    an_engine_serves_many(sim("").1);
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn logits_that_are_not_finite_fail_one_request() {
        let _turn = gpu_turn();
        nan_stays_with_its_request(gpu());
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn steps_of_several_sequences_replay_as_they_run_eagerly() {
        let _turn = gpu_turn();
        replayed_equals_eager_and_each_alone(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn an_engine_serves_many_with_every_step_replayed() {
        let _turn = gpu_turn();
        an_engine_serves_many(gpu());
    }
}

/// What goes wrong now and then. All but the last leave a device that goes on.
const FAULTS: [&str; 8] = [
    "",
    "on every 3rd instantiate: out of memory",
    "on every 5th begin_capture: fail 900",
    "on every 40th replay: fail 1",
    "on every 300th launch: fail 1",
    "on every 2nd end_capture: fail 901",
    "on every 90th launch: invalidate",
    "on 900th launch: illegal address",
];

#[test]
fn faults_in_the_middle_of_a_batch_leave_no_request_without_an_answer_and_lose_no_block() {
    let mut n_tokens = 0;
    for (round, faults) in FAULTS.into_iter().enumerate() {
        let (_, device) = sim(faults);
        let backend = CudaBackend::on(&device, cuda_options(GraphMode::Auto)).unwrap();
        let runner = RunnerOptions { n_positions: 9 * KV_BLOCK, ..runner_options() };
        let runner = BackendRunner::new(backend, model("llama"), runner).unwrap();
        let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
        let mut streams = Vec::new();
        for idx in 0..30u32 {
            let mut request = Request::once((0..2 + idx % 11).map(|i| (7 * idx + 5 * i) % 100).collect());
            request.max_tokens = 3 + (idx as usize * 7 + round) % 25;
            if let Ok(stream) = engine.submit(request) {
                streams.push(stream);
            }
            if idx % 7 == 3 {
                engine.cancel(streams[idx as usize / 2].id());
            }
        }
        let mut n_lost = 0;
        for stream in streams {
            let mut last = None;
            for event in stream {
                n_tokens += usize::from(matches!(event, Ok(TokenEvent::Token { .. })));
                last = Some(event);
            }
            match last {
                Some(Ok(TokenEvent::End(_))) => {}
                Some(Err(EngineError::Stopped(_) | EngineError::Run(RunError::ContextLost { .. }))) => {
                    n_lost += 1
                }
                Some(Err(_)) => {}
                other => panic!("{faults:?}: {other:?}"),
            }
        }
        match engine.load() {
            Ok(load) => {
                assert_eq!((load.blocks.used, load.n_running, load.n_waiting), (0, 0, 0), "{faults:?}");
                assert_eq!(n_lost, 0, "{faults:?}");
            }
            Err(error) => assert!(faults.contains("illegal") && n_lost > 0, "{faults:?}: {error}"),
        }
    }
    assert!(n_tokens > 1500, "{n_tokens}");
}
