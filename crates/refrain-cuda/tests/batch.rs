//! Steps of several sequences: replay equals eager bit for bit, and both agree with each sequence alone.

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
        n_recurrent: N_SEQS,
    }
}

fn cuda_options(mode: GraphMode) -> CudaOptions {
    CudaOptions {
        buckets: vec![1, 8, 32],
        row_buckets: vec![1, 2, 3, 4, 6, 8, 12],
        ..options(mode, Method::Stream)
    }
}

/// A sequence driven by a test, with blocks of its own.
struct Seq {
    tokens: Vec<u32>,
    n_done: usize,
    table: Vec<u32>,
    /// Its slots, if the model has recurrent layers.
    slots: [i32; 2],
    row: SamplingRow,
    said: Vec<Chosen>,
}

impl Seq {
    fn new(idx: usize) -> Seq {
        let prompt = (0..3 + 5 * idx as u32).map(|i| (7 * idx as u32 + 11 * i) % 120).collect();
        // Scattered and out of order.
        let table = (0..MAX_BLOCKS).map(|b| ((MAX_BLOCKS - 1 - b) * N_SEQS + idx) as u32).collect();
        let greedy = SamplingParams::greedy();
        let params = match idx % 3 {
            0 => greedy,
            1 => SamplingParams { temperature: 0.9, top_k: 20, seed: idx as u64, ..greedy },
            _ => SamplingParams { temperature: 1.1, repeat_penalty: 1.2, seed: idx as u64, ..greedy },
        };
        let slots = [1, 0].map(|i| (2 * (N_SEQS - 1 - idx) + i) as i32);
        Seq { tokens: prompt, n_done: 0, table, slots, row: SamplingRow::new(&params), said: Vec::new() }
    }
}

/// One step over the next tokens of some sequences, with a maximum number for each.
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
            let (start, slots) = (seq.n_done, seq.slots);
            let (tokens, table) = (&seq.tokens[start..end], &seq.table[..]);
            StepRequest { tokens, start, table, slots, adapter: None, want }
        })
        .collect();
    let mut out = StepOut::default();
    let ran = runner.step(&requests, &mut out).unwrap();
    let n_tokens: Vec<usize> = requests.iter().map(|r| r.tokens.len()).collect();
    drop(requests);
    for ((&(idx, _), n), choice) in which.iter().zip(n_tokens).zip(out.choices) {
        let seq = &mut seqs[idx];
        seq.n_done += n;
        // The state after n tokens is in slot n % 2.
        if n.is_multiple_of(2) {
            seq.slots.swap(0, 1);
        }
        if let Some(choice) = choice {
            let chosen = choice.unwrap().chosen;
            seq.tokens.push(chosen.token);
            seq.said.push(chosen);
        }
    }
    ran
}

/// Joins, ends, prompts together with decodes, and decodes of every bucket. Returns the choices and how each
/// step ran.
fn load(runner: &mut dyn Runner) -> (Vec<Vec<Chosen>>, Vec<Ran>) {
    let mut seqs: Vec<Seq> = (0..N_SEQS).map(Seq::new).collect();
    let all = |range: std::ops::Range<usize>| range.map(|idx| (idx, 1)).collect::<Vec<_>>();
    let mut steps: Vec<Vec<(usize, usize)>> = vec![
        vec![(0, 8)],
        // Whole prompts together, and chunks next to a decoded token.
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

/// Output of a sequence that runs alone.
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
    for case in ["llama", "qwen3", "gemma3", "qwen35", "lfm2"] {
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
        // Decode steps of 1, 2, 3, 4, 6, 8 and 12 rows; prompts of one sequence; mixed steps of 8 and 32
        // tokens.
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

/// Keys and values in bytes, with their scales as part of the verified state.
fn a_cache_in_bytes_is_replayed_as_it_runs_eagerly(device: impl Fn() -> Device) {
    for case in ["llama", "gemma3", "gemma4-e2b"] {
        let run = |mode, kv_dtype| {
            let device = device();
            let backend = CudaBackend::on(&device, cuda_options(mode)).unwrap();
            let runner = RunnerOptions { kv_dtype, ..runner_options() };
            let mut runner = BackendRunner::new(backend, model(case), runner).unwrap();
            let (said, ran) = load(&mut runner);
            assert_eq!(device.take_reports(), Vec::<String>::new());
            (bits(&said), ran)
        };
        let (eager, _) = run(GraphMode::Off, DType::U8);
        let (replayed, ran) = run(GraphMode::Require, DType::U8);
        assert!(ran.iter().all(|ran| *ran == Ran::REPLAYED), "{case}: {ran:?}");
        assert_eq!(replayed, eager, "{case}");
        assert_ne!(replayed, run(GraphMode::Off, DType::F32).0, "{case}: the rounding shows");
    }
}

#[test]
fn a_cache_in_bytes_replays() {
    a_cache_in_bytes_is_replayed_as_it_runs_eagerly(|| sim("").1);
}

fn an_engine_serves_many(device: Device, case: &str) {
    let backend = CudaBackend::on(&device, cuda_options(GraphMode::Require)).unwrap();
    let runner = RunnerOptions { n_positions: 12 * KV_BLOCK, n_recurrent: 7, ..runner_options() };
    let runner = BackendRunner::new(backend, model(case), runner).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let request = |idx: u32| {
        let mut request = Request::once((0..3 + idx % 7).map(|i| (idx + 5 * i) % 100).collect());
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 4 + idx as usize % 9);
        if idx.is_multiple_of(5) {
            request.pace = Pace::OnDemand { lead: 1 };
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
    // Float weights and greedy sampling give the same tokens whatever else runs.
    for (idx, together) in together.iter().enumerate() {
        assert_eq!(&collect(engine.submit(request(idx as u32)).unwrap()), together, "{case}, request {idx}");
    }
    let load = engine.load().unwrap();
    assert_eq!((load.blocks.used, load.n_running, load.n_waiting), (0, 0, 0));
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

/// A conversation whose answer comes back changed continues from the state after its prompt, and one that was
/// cut off before its end starts from the beginning. Decode steps are launched ahead, and every third is
/// compared with its eager run.
fn a_conversation_continues(device: Device, case: &str) {
    let options = CudaOptions {
        ahead: 5,
        verify_every: std::num::NonZeroU32::new(3),
        ..cuda_options(GraphMode::Require)
    };
    let backend = CudaBackend::on(&device, options).unwrap();
    let monitor = backend.monitor();
    let runner = BackendRunner::new(backend, model(case), runner_options()).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let ask = |sequence: &refrain_engine::Sequence, prompt: &[u32], n: usize| -> Vec<(u32, f32)> {
        let mut request = Request::new(sequence, prompt.to_vec());
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 12);
        let mut stream = engine.submit(request).unwrap();
        let mut said = Vec::new();
        while said.len() < n {
            if let TokenEvent::Token { token, logprob, .. } = stream.next().unwrap().unwrap() {
                said.push((token, logprob));
            }
        }
        // The sequence is released only after the stream has ended.
        while n == 12 && stream.next().is_some() {}
        said
    };
    let n_evaluated = |sequence: &refrain_engine::Sequence| {
        let ledger = sequence.ledger();
        sequence.reset_ledger();
        ledger.tally(StepKind::Prompt).tokens
    };
    let [one, fresh] = [(); 2].map(|()| engine.open(KV_BLOCK * MAX_BLOCKS).unwrap());
    let mut prompt: Vec<u32> = (0..11).map(|i| 3 + 9 * i).collect();
    let first = ask(&one, &prompt, 12);
    assert_eq!(n_evaluated(&one), 11);
    // The same first token, then different ones.
    prompt.extend([first[0].0, (first[1].0 + 1) % 120, 5, 6]);
    for n in [12, 4] {
        // The second time it stops in the middle, with steps in flight.
        let got = ask(&one, &prompt, n);
        let want = ask(&fresh, &prompt, n);
        for ((token, logprob), (want, want_logprob)) in got.iter().zip(&want) {
            assert_eq!(token, want, "{case}: {got:?}");
            assert!((logprob - want_logprob).abs() < 2e-3, "{case}: {got:?}");
        }
        let expected = [(4, 15), (15, 15)][usize::from(n == 4)];
        assert_eq!((n_evaluated(&one), n_evaluated(&fresh)), expected, "{case}");
    }
    let compared = monitor.status().compared;
    assert!(compared.n_steps > 5, "{compared:?}");
    assert_eq!(compared.n_mismatches, 0);
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

/// Some requests ask for the most probable tokens, others in the same batch do not.
fn the_most_probable_tokens_come_with_each_choice(device: Device) {
    let backend = CudaBackend::on(&device, cuda_options(GraphMode::Require)).unwrap();
    let runner = BackendRunner::new(backend, model("llama"), runner_options()).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let request = |idx: usize| {
        let mut request =
            Request::once((0..3 + idx as u32).map(|i| (7 * idx as u32 + 3 * i) % 100).collect());
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 6 + idx);
        request.n_top_logprobs = [5, 0, 20, 1][idx % 4];
        request
    };
    type Event = (u32, f32, Vec<(u32, f32)>);
    let collect = |stream: refrain_engine::TokenStream| -> Vec<Event> {
        let tokens = stream.filter_map(|event| match event.unwrap() {
            TokenEvent::Token { token, logprob, top, .. } => Some((token, logprob, top)),
            TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
        });
        tokens.collect()
    };
    let streams: Vec<_> = (0..6).map(|idx| engine.submit(request(idx)).unwrap()).collect();
    for (idx, together) in streams.into_iter().map(collect).enumerate() {
        let alone = collect(engine.submit(request(idx)).unwrap());
        assert_eq!(together.len(), 6 + idx);
        for ((token, logprob, top), (want, _, want_top)) in together.iter().zip(&alone) {
            assert_eq!((token, top.len()), (want, request(idx).n_top_logprobs));
            // Greedy sampling picks the most probable token.
            assert!(top.first().is_none_or(|best| best.0 == *token && (best.1 - logprob).abs() < 1e-4));
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1));
            assert!(top.iter().map(|(_, p)| p.exp()).sum::<f32>() < 1.0001);
            for (got, want) in top.iter().zip(want_top) {
                assert!((got.1 - want.1).abs() < 2e-3, "request {idx}: {got:?} and {want:?}");
            }
        }
    }
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn requests_for_the_most_probable_tokens_get_them_with_each_choice() {
    the_most_probable_tokens_come_with_each_choice(sim("").1);
}

/// Every block is used by several requests, some of which leave only NaN in it.
fn nan_stays_with_its_request(device: Device) {
    const POISON: u32 = 7;
    let backend = CudaBackend::on(&device, cuda_options(GraphMode::Require)).unwrap();
    let runner = RunnerOptions { n_positions: 12 * KV_BLOCK, ..runner_options() };
    let model = goldens::poisoned_model("llama", POISON as usize);
    let runner = BackendRunner::new(backend, model, runner).unwrap();
    let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
    let request = |idx: u32, poisoned: bool| {
        // No other token selects the poisoned row.
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
fn non_finite_logits_fail_one_request_and_do_not_affect_later_ones() {
    nan_stays_with_its_request(sim("").1);
}

#[test]
fn steps_of_several_sequences_equal_their_eager_runs_and_each_sequence_alone() {
    replayed_equals_eager_and_each_alone(|| sim("").1);
}

#[test]
fn a_conversation_with_a_recurrent_model_continues_from_the_state_after_its_prompt() {
    for case in ["qwen35", "lfm2"] {
        a_conversation_continues(sim("").1, case);
    }
}

#[test]
fn an_engine_serves_many_requests_with_every_step_replayed() {
    for case in ["llama", "qwen35", "lfm2"] {
        an_engine_serves_many(sim("").1, case);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn requests_for_the_most_probable_tokens_get_them_with_each_choice() {
        let _turn = gpu_turn();
        the_most_probable_tokens_come_with_each_choice(gpu());
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn any_load_gives_each_request_the_tokens_that_it_gets_alone() {
        let _turn = gpu_turn();
        any_load(gpu, "llama", 6);
        any_load(gpu, "mistral-window", 3);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn a_cache_in_bytes_replays() {
        let _turn = gpu_turn();
        a_cache_in_bytes_is_replayed_as_it_runs_eagerly(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn non_finite_logits_fail_one_request() {
        let _turn = gpu_turn();
        nan_stays_with_its_request(gpu());
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn steps_of_several_sequences_equal_their_eager_runs() {
        let _turn = gpu_turn();
        replayed_equals_eager_and_each_alone(gpu);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn a_conversation_with_a_recurrent_model_continues_from_the_state_after_its_prompt() {
        let _turn = gpu_turn();
        for case in ["qwen35", "lfm2"] {
            a_conversation_continues(gpu(), case);
        }
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn an_engine_serves_many_requests_with_every_step_replayed() {
        let _turn = gpu_turn();
        for case in ["llama", "qwen35", "lfm2"] {
            an_engine_serves_many(gpu(), case);
        }
    }
}

/// Faults that a device may have. All but the last leave it usable.
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

/// A small generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

/// A request with random options. Some share a prefix that fills a block.
fn any_request(random: &mut Random) -> Request {
    let common = random.below(3) as u32;
    let prompt = (0..1 + random.below(26)).map(|i| match i < KV_BLOCK + 2 {
        true => (common + 3 * i as u32) % 100,
        false => random.below(100) as u32,
    });
    let mut request = Request::once(prompt.collect());
    request.max_tokens = 1 + random.below(36);
    let greedy = SamplingParams::greedy();
    let seed = random.below(1000) as u64;
    request.sampling = match random.below(4) {
        0 | 1 => greedy,
        2 => SamplingParams { temperature: 0.8, top_k: 15, seed, ..greedy },
        _ => {
            let penalty_window = 1 + random.below(30);
            SamplingParams { temperature: 1.0, repeat_penalty: 1.2, penalty_window, seed, ..greedy }
        }
    };
    request.end = (0..4).map(|_| random.below(120) as u32).collect();
    request.min_tokens = random.below(request.max_tokens.min(8));
    (request.user, request.priority) = (random.below(3) as u64, random.below(2) as i32);
    if random.below(4) == 0 {
        request.pace = Pace::OnDemand { lead: random.below(3) };
    }
    request
}

/// Joins, ends, cancellations, pauses, forks, preemptions and prefix hits, with 1 to 40 requests at once.
fn any_load(device: impl Fn() -> Device, case: &str, n_rounds: u64) {
    let engine_of = |n_positions: usize, row_buckets: Vec<usize>| {
        let device = device();
        let options = CudaOptions { row_buckets, ..cuda_options(GraphMode::Require) };
        let runner = RunnerOptions { n_positions, ..runner_options() };
        let runner =
            BackendRunner::new(CudaBackend::on(&device, options).unwrap(), model(case), runner).unwrap();
        (Engine::new(Box::new(runner), EngineOptions::default()).unwrap(), device)
    };
    let token = |event: Result<TokenEvent, EngineError>| match event.unwrap() {
        TokenEvent::Token { token, .. } => Some(token),
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    };
    let (alone, _device) = engine_of(KV_BLOCK * MAX_BLOCKS, vec![1]);
    let (mut n_preempted, mut n_ahead) = (0, 0);
    for round in 0..n_rounds {
        let mut random = Random(round);
        let requests: Vec<Request> = (0..40).map(|_| any_request(&mut random)).collect();
        let want: Vec<Vec<u32>> = requests
            .iter()
            .map(|request| {
                let mut request = request.clone();
                request.sequence = Some(alone.open(KV_BLOCK * MAX_BLOCKS).unwrap());
                alone.submit(request).unwrap().filter_map(token).collect()
            })
            .collect();
        let (n_blocks, most_open) = [(9, 12), (40, 40), (100, 3)][round as usize % 3];
        let (engine, device) = engine_of(n_blocks * KV_BLOCK, vec![1, 2, 3, 4, 6, 8, 12, 24, 40]);
        let mut open = Vec::new();
        let finish = |(idx, stream, mut got): (usize, refrain_engine::TokenStream, Vec<u32>)| {
            got.extend(stream.filter_map(token));
            assert_eq!(got, want[idx], "round {round}, request {idx}");
        };
        for (idx, request) in requests.iter().enumerate() {
            open.push((idx, engine.submit(request.clone()).unwrap(), Vec::new()));
            for (_, stream, got) in &mut open {
                got.extend(stream.try_next().and_then(token));
            }
            let at = random.below(open.len());
            match random.below(10) {
                0 => drop(open.swap_remove(at)),
                1 => open.swap_remove(at).1.stop(),
                2 => finish(open.swap_remove(at)),
                _ if open.len() >= most_open => finish(open.swap_remove(at)),
                _ => {}
            }
        }
        open.into_iter().for_each(finish);
        // A sequence, and a fork that continues from the same blocks at the same time.
        let one = engine.open(KV_BLOCK * MAX_BLOCKS).unwrap();
        let ask = |sequence: &refrain_engine::Sequence, last: u32| {
            let mut request = Request::new(sequence, (0..20).chain([last]).collect());
            (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 20);
            request
        };
        let first: Vec<u32> = engine.submit(ask(&one, 1)).unwrap().filter_map(token).collect();
        let two = engine.fork(&one, KV_BLOCK * MAX_BLOCKS).unwrap();
        let both = [engine.submit(ask(&one, 1)).unwrap(), engine.submit(ask(&two, 2)).unwrap()];
        let [again, forked] = both.map(|stream| stream.filter_map(token).collect::<Vec<u32>>());
        let fresh = alone.open(KV_BLOCK * MAX_BLOCKS).unwrap();
        let want: Vec<u32> = alone.submit(ask(&fresh, 2)).unwrap().filter_map(token).collect();
        assert_eq!((again, forked), (first, want));
        drop((one, two));
        let (load, ledger) = (engine.load().unwrap(), engine.ledger().unwrap());
        n_preempted += load.n_preempted;
        n_ahead += ledger.tally(StepKind::Decode).discarded;
        let tallies = StepKind::ALL.map(|kind| ledger.tally(kind));
        assert!(tallies.iter().all(|tally| tally.eager + tally.failed == 0), "{tallies:?}");
        assert_eq!((load.blocks.used, load.n_running, load.n_waiting), (0, 0, 0), "round {round}");
        assert_eq!(device.take_reports(), Vec::<String>::new());
    }
    assert!(n_preempted > 0 && n_ahead > 0, "the load was too light: {n_preempted}, {n_ahead}");
}

#[test]
fn any_load_gives_each_request_the_tokens_that_it_gets_alone() {
    any_load(|| sim("").1, "llama", 6);
    any_load(|| sim("").1, "mistral-window", 3);
}

#[test]
fn faults_in_a_batch_leave_every_request_answered_and_leak_no_block() {
    let mut n_tokens = 0;
    let mut random = Random(1);
    for round in 0.. {
        if n_tokens >= 20_000 {
            break;
        }
        // Each fault alone, then several at once.
        let n_faults = if round < FAULTS.len() { 1 } else { 1 + random.below(2) };
        let faults: Vec<&str> = (0..n_faults)
            .map(|i| match round < FAULTS.len() {
                true => FAULTS[round],
                // The last one makes the device unusable, so it is rare.
                false => FAULTS[random.below(FAULTS.len() - usize::from(i + round % 4 > 0))],
            })
            .collect();
        let faults = faults.join("\n");
        let (_, device) = sim(&faults);
        let backend = CudaBackend::on(&device, cuda_options(GraphMode::Auto)).unwrap();
        let n_positions = [9, 20, 40][round % 3] * KV_BLOCK;
        let runner = RunnerOptions { n_positions, ..runner_options() };
        let runner = BackendRunner::new(backend, model("llama"), runner).unwrap();
        let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
        let mut streams = Vec::new();
        for idx in 0..80u32 {
            let mut request = Request::once((0..2 + idx % 11).map(|i| (7 * idx + 5 * i) % 100).collect());
            request.max_tokens = 20 + (idx as usize * 7 + round) % 32;
            if let Ok(stream) = engine.submit(request) {
                streams.push(stream);
            }
            if idx % 7 == 3 && random.below(2) == 0 {
                engine.cancel(streams[random.below(streams.len())].id());
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
}
