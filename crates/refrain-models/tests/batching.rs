//! A batched request gets, bit for bit, the same tokens as alone.
//!
//! On the CPU, results do not depend on how work is divided, so neither neighbours nor chunks nor preemptions
//! may change them.

mod common;

use common::bank::banked;
use common::{CASES, folder};
use refrain_cpu::CpuBackend;
use refrain_engine::{
    AdapterId, BackendRunner, Core, DecodeRow, Engine, EngineOptions, LaunchPolicy, Lookahead, Pace, Request,
    RunnerOptions, SamplingParams, SamplingRow, TokenEvent, TokenStream,
};
use refrain_formats::ModelFiles;
use refrain_formats::params::Arch;
use refrain_models::{Model, NamedShape, QuantMix};
use refrain_tensor::DType;
use std::sync::Arc;

const CONTEXT: usize = 64;

/// A small random number generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

fn engine(model: &Arc<Model>, n_positions: usize, max_tokens: usize) -> Engine {
    engine_with(model, n_positions, max_tokens, DType::F16)
}

fn engine_with(model: &Arc<Model>, n_positions: usize, max_tokens: usize, kv_dtype: DType) -> Engine {
    let options = RunnerOptions {
        context: CONTEXT,
        n_positions,
        kv_block: 8,
        kv_dtype,
        max_tokens,
        max_seqs: 40,
        n_recurrent: 0,
    };
    let runner = BackendRunner::new(CpuBackend::shared(1).unwrap(), model.clone(), options).unwrap();
    Engine::new(Box::new(runner), EngineOptions::default()).unwrap()
}

/// A request with its own sampling rules. Some share a prefix.
fn request(random: &mut Random, vocab: usize) -> Request {
    let common = random.below(3) as u32;
    let n_prompt = 1 + random.below(30);
    let prompt = (0..n_prompt).map(|i| match i < 18 {
        true => (common + i as u32) % vocab as u32,
        false => random.below(vocab) as u32,
    });
    let mut request = Request::once(prompt.collect());
    request.max_tokens = 1 + random.below(34);
    request.sampling = match random.below(3) {
        0 => SamplingParams::greedy(),
        1 => SamplingParams { seed: random.below(1000) as u64, ..SamplingParams::default() },
        _ => SamplingParams {
            temperature: 1.2,
            top_k: 0,
            repeat_penalty: 1.3,
            frequency_penalty: 0.2,
            penalty_window: 1 + random.below(60),
            logit_bias: vec![(random.below(vocab) as u32, 2.0), (1, f32::NEG_INFINITY)],
            seed: random.below(1000) as u64,
            ..SamplingParams::default()
        },
    };
    request.end = vec![random.below(vocab) as u32];
    request.min_tokens = random.below(request.max_tokens.min(5));
    (request.user, request.priority) = (random.below(3) as u64, random.below(2) as i32);
    if random.below(4) == 0 {
        request.pace = Pace::OnDemand { lead: random.below(3) };
    }
    request
}

/// A token with the bits of its log-probability.
type Token = (u32, u32);

fn token(event: TokenEvent) -> Option<Token> {
    match event {
        TokenEvent::Token { token, logprob, .. } => Some((token, logprob.to_bits())),
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    }
}

fn collect(stream: TokenStream) -> Vec<Token> {
    stream.filter_map(|event| token(event.unwrap())).collect()
}

/// A request in progress, and its tokens so far.
struct Open {
    idx: usize,
    stream: TokenStream,
    got: Vec<Token>,
}

impl Open {
    fn peek(&mut self) {
        self.got.extend(self.stream.try_next().and_then(|event| token(event.unwrap())));
    }

    fn finish(mut self) -> (usize, Vec<Token>) {
        self.got.extend(self.stream.filter_map(|event| token(event.unwrap())));
        (self.idx, self.got)
    }
}

/// Runs random loads of a model, compares each request with itself alone, and returns the number of preemptions.
fn run_loads(case: &str, model: &Arc<Model>, kv_dtype: DType, seed: u64) -> u64 {
    let mut n_preempted = 0;
    let vocab = model.config().n_vocab;
    let mut random = Random(seed);
    let n_adapters = model.adapter_names().len();
    let requests: Vec<Request> = (0..24)
        .map(|_| {
            let mut request = request(&mut random, vocab);
            if n_adapters > 0 {
                request.adapter = random.below(n_adapters + 1).checked_sub(1).map(|id| AdapterId(id as u32));
            }
            request
        })
        .collect();
    let alone = engine_with(model, CONTEXT, 64, kv_dtype);
    let want: Vec<_> = requests
        .iter()
        .map(|request| {
            // Alone, everything is evaluated: cached prefixes must match what it would have computed.
            let sequence = alone.open_with(CONTEXT, request.adapter).unwrap();
            let mut request = request.clone();
            request.sequence = Some(sequence);
            collect(alone.submit(request).unwrap())
        })
        .collect();
    // Capacity for two to eight of them, and steps of few tokens or many.
    for (n_positions, max_tokens) in [(96, 7), (320, 48)] {
        let engine = engine_with(model, n_positions, max_tokens, kv_dtype);
        let mut open: Vec<Open> = Vec::new();
        let check = |(idx, got): (usize, Vec<Token>)| {
            assert_eq!(got, want[idx], "{case}, request {idx}, {n_positions} positions");
        };
        for (idx, request) in requests.iter().enumerate() {
            let stream = engine.submit(request.clone()).unwrap();
            open.push(Open { idx, stream, got: Vec::new() });
            open.iter_mut().for_each(Open::peek);
            // Some join while others are in progress, and some leave.
            let at = random.below(open.len());
            match random.below(8) {
                0 | 1 => drop(open.swap_remove(at)),
                2 => check(open.swap_remove(at).finish()),
                _ => {}
            }
        }
        open.into_iter().map(Open::finish).for_each(check);
        let load = engine.load().unwrap();
        n_preempted += load.n_preempted;
        assert_eq!(load.blocks.used, 0, "{case}: {load:?}");
    }
    n_preempted
}

#[test]
fn any_load_gives_each_request_the_tokens_it_gets_alone() {
    let runs = CASES.into_iter().enumerate().map(|(idx, case)| {
        let model = Arc::new(Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap());
        run_loads(case, &model, DType::F16, idx as u64)
    });
    let n_preempted: u64 = runs.sum();
    assert!(n_preempted > 20, "the load was too low: {n_preempted}");
}

#[test]
fn any_load_of_different_adapters_gives_each_request_the_tokens_it_gets_alone() {
    let mut n_preempted = 0;
    for (idx, case) in ["llama", "gemma3", "phi3-short", "qwen35"].into_iter().enumerate() {
        let model = Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap();
        n_preempted += run_loads(case, &Arc::new(banked(&model)), DType::F16, 50 + idx as u64);
    }
    assert!(n_preempted > 2, "the load was too low: {n_preempted}");
}

/// On the CPU this needs no option: activations are rounded alike for any number of rows.
#[test]
fn rounded_weights_give_the_same_bits_in_any_load() {
    for (idx, mix) in ["Q4_K_M", "Q8_0", "Q4_1", "BF16", "F16"].into_iter().enumerate() {
        let shape = NamedShape::new("test", Arch::Llama, [96, 256, 256, 2], [4, 2, 64]);
        let model = Model::random(&shape, QuantMix::from_name(mix).unwrap()).unwrap();
        run_loads(mix, &Arc::new(model), DType::F16, idx as u64);
    }
}

#[test]
fn a_cache_in_bytes_gives_the_same_bits_in_any_load_and_about_the_error_of_one_in_bf16() {
    for (idx, case) in ["llama", "mistral-window", "gemma3", "gemma4-e2b", "qwen35"].into_iter().enumerate() {
        let model = Arc::new(Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap());
        run_loads(case, &model, DType::U8, idx as u64);
        let logits = |kv_dtype| {
            let engine = engine_with(&model, CONTEXT, 64, kv_dtype);
            let (sequence, mut logits) = (engine.open(CONTEXT).unwrap(), Vec::new());
            let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 60).collect();
            engine.logits(&sequence, &tokens, 40, &mut logits).unwrap();
            logits
        };
        let exact = logits(DType::F32);
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let error = |kv_dtype| {
            let rounded = logits(kv_dtype);
            norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied())
        };
        // Half a step of 127 is about twice half a unit of BF16; how much that matters depends on the model.
        let (bytes, bf16) = (error(DType::U8), error(DType::BF16));
        println!("{case}: relative error {bytes:.5} in bytes, {bf16:.5} in BF16");
        assert!(bytes > 0.0 && bytes < 6.0 * bf16, "{case}: {bytes}, and {bf16} in BF16");
    }
}

#[test]
fn requests_of_a_windowed_model_run_in_a_pool_that_could_not_hold_their_texts() {
    let model = Arc::new(Model::load(&ModelFiles::open(folder("mistral-window")).unwrap()).unwrap());
    assert_eq!(model.attention_window(), Some(8));
    // Four times 60 positions need 32 blocks of 8 positions; the pool has 12.
    let (small, large) = (engine(&model, 96, 16), engine(&model, 640, 16));
    let ask = |engine: &Engine, seed: u32| {
        let mut request = Request::once((0..9).map(|i| (seed + 5 * i) % 60).collect());
        (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 52);
        engine.submit(request).unwrap()
    };
    let streams: Vec<TokenStream> = (0..4).map(|seed| ask(&small, seed)).collect();
    let together: Vec<Vec<Token>> = streams.into_iter().map(collect).collect();
    for (seed, got) in together.iter().enumerate() {
        assert_eq!((got.len(), got), (52, &collect(ask(&large, seed as u32))));
    }
    let load = small.load().unwrap();
    assert_eq!((load.n_preempted, load.blocks.used), (0, 0), "{load:?}");
    // A layer that attends to everything keeps every block.
    let mixed = Model::load(&ModelFiles::open(folder("gemma3")).unwrap()).unwrap();
    assert_eq!(mixed.attention_window(), None);
}

#[test]
fn penalties_over_the_whole_sequence_do_not_depend_on_neighbours() {
    const N_WANTED: [usize; 4] = [40, 340, 90, 300];
    let model = Arc::new(Model::load(&ModelFiles::open(folder("llama")).unwrap()).unwrap());
    // More positions than the default history capacity.
    let options =
        RunnerOptions { context: 384, n_positions: 4 * 384, kv_block: 16, ..RunnerOptions::default() };
    let runner = BackendRunner::new(CpuBackend::shared(1).unwrap(), model, options).unwrap();
    let mut core = Core::new(Box::new(runner), 384);
    let mut texts = |which: &[usize]| -> Vec<Vec<Token>> {
        let mut open: Vec<_> = which
            .iter()
            .map(|&idx| {
                let mut row = SamplingRow::new(&SamplingParams {
                    temperature: 1.0,
                    presence_penalty: 3.0,
                    repeat_penalty: 1.3,
                    penalty_window: [64, usize::MAX, 20, usize::MAX][idx],
                    seed: idx as u64,
                    ..SamplingParams::default()
                });
                let mut session = core.open();
                let first =
                    core.prompt(&mut session, &[idx as u32, 3 * idx as u32 + 1], &mut row, |_| true).unwrap();
                (session, row, vec![(first.token, first.logprob.to_bits())], N_WANTED[idx])
            })
            .collect();
        while open.iter().any(|(_, _, said, n)| said.len() < *n) {
            let mut left: Vec<_> = open.iter_mut().filter(|(_, _, said, n)| said.len() < *n).collect();
            let mut rows: Vec<DecodeRow<'_>> = Vec::new();
            for (session, row, said, n) in left.iter_mut().map(|text| &mut **text) {
                let ahead = Lookahead { n_tokens: *n - said.len(), end: &[] };
                rows.push(DecodeRow { sequence: session, token: said[said.len() - 1].0, row, ahead });
            }
            let choices = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap().choices;
            drop(rows);
            for ((_, _, said, _), choice) in left.into_iter().zip(choices) {
                said.extend(choice.map(|chosen| chosen.unwrap()).map(|c| (c.token, c.logprob.to_bits())));
            }
        }
        core.drain();
        open.into_iter().map(|(_, _, said, _)| said).collect()
    };
    let want: Vec<Vec<Token>> = (0..4).flat_map(|idx| texts(&[idx])).collect();
    assert_eq!(want[1].len(), 340);
    assert_eq!(texts(&[0, 1, 2, 3]), want);
}

#[test]
fn a_fork_continues_like_a_sequence_that_evaluated_everything_itself() {
    let model = Arc::new(Model::load(&ModelFiles::open(folder("llama")).unwrap()).unwrap());
    let engine = engine(&model, 4 * CONTEXT, 16);
    let one = engine.open(CONTEXT).unwrap();
    let ask = |sequence: &refrain_engine::Sequence, prompt: Vec<u32>| {
        let mut request = Request::new(sequence, prompt);
        request.max_tokens = 12;
        collect(engine.submit(request).unwrap())
    };
    let prompt: Vec<u32> = (0..21).map(|i| i * 5 % 60).collect();
    let first = ask(&one, prompt.clone());
    let other: Vec<u32> = prompt.iter().copied().chain([9, 9]).collect();
    let fork = engine.fork(&one, CONTEXT).unwrap();
    let got = ask(&fork, other.clone());
    assert_eq!(got, ask(&engine.open(CONTEXT).unwrap(), other));
    // The first is unchanged.
    assert_eq!(ask(&one, prompt), first);
}

#[test]
fn top_logprobs_come_with_each_token_of_requests_that_ask_for_them() {
    let model = Arc::new(Model::load(&ModelFiles::open(folder("qwen2")).unwrap()).unwrap());
    let engine = engine(&model, 4 * CONTEXT, 16);
    let mut asks = Request::once(vec![3, 1, 4]);
    (asks.sampling, asks.max_tokens, asks.n_top_logprobs) = (SamplingParams::greedy(), 5, 4);
    let mut other = asks.clone();
    other.n_top_logprobs = 0;
    let (asks, other) = (engine.submit(asks).unwrap(), engine.submit(other).unwrap());
    let mut n = 0;
    for event in asks {
        if let TokenEvent::Token { token, logprob, top, .. } = event.unwrap() {
            assert_eq!(top.len(), 4);
            assert_eq!(top[0].0, token, "greedy takes the most probable token");
            assert!((top[0].1 - logprob).abs() < 1e-4);
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1));
            n += 1;
        }
    }
    assert_eq!((n, collect(other).len()), (5, 5));
}
