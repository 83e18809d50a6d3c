//! Speculation changes how fast tokens come, never which.
//!
//! On the CPU, results do not depend on how work is divided, so a request with guesses has the bits of the same request
//! without, whatever is guessed.

mod common;

use common::{CASES, folder};
use refrain_cpu::CpuBackend;
use refrain_engine::{
    BackendRunner, Core, DraftSource, Drafter, Engine, EngineError, EngineOptions, MAX_DRAFT, Pace, Request,
    RunnerOptions, SamplingParams, Speculation, StepKind, TokenEvent, TokenStream,
};
use refrain_formats::ModelFiles;
use refrain_models::Model;
use refrain_tensor::DType;
use std::sync::Arc;

const CONTEXT: usize = 64;

/// A small random number generator (splitmix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

/// Guesses what a known text says, with a wrong token after a random number of right ones.
#[derive(Debug)]
struct Oracle {
    text: Vec<u32>,
    vocab: usize,
    most_right: usize,
}

impl Drafter for Oracle {
    fn draft(&self, tokens: &[u32], n: usize) -> Vec<u32> {
        let mut random = Random(tokens.len() as u64);
        let n_right = random.below(self.most_right + 1);
        let known = self.text.get(tokens.len()..).unwrap_or_default();
        let guesses = (0..n).map(|i| match known.get(i) {
            Some(&token) if i != n_right => token,
            Some(&token) => (token + 1) % self.vocab as u32,
            None => random.below(self.vocab) as u32,
        });
        guesses.collect()
    }
}

fn model(case: &str) -> Arc<Model> {
    Arc::new(Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap())
}

fn runner(model: &Arc<Model>, n_positions: usize, max_tokens: usize) -> Box<BackendRunner<CpuBackend>> {
    let options = RunnerOptions {
        context: CONTEXT,
        n_positions,
        kv_block: 8,
        kv_dtype: DType::F16,
        max_tokens,
        max_seqs: 40,
        n_recurrent: 0,
    };
    Box::new(BackendRunner::new(CpuBackend::shared(1).unwrap(), model.clone(), options).unwrap())
}

fn engine(model: &Arc<Model>, n_positions: usize, max_tokens: usize) -> Engine {
    Engine::new(runner(model, n_positions, max_tokens), EngineOptions::default()).unwrap()
}

/// A request with its own sampling rules. Some share a prefix, and some repeat themselves.
fn request(random: &mut Random, vocab: usize) -> Request {
    let (common, n_prompt, period) = (random.below(3) as u32, 1 + random.below(30), 3 + random.below(9));
    let other: Vec<u32> = (0..period).map(|_| random.below(vocab) as u32).collect();
    let prompt = (0..n_prompt).map(|i| match i < 12 {
        true => (common + i as u32) % vocab as u32,
        false => other[i % period],
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
            presence_penalty: 0.1,
            penalty_window: 1 + random.below(60),
            logit_bias: vec![(random.below(vocab) as u32, 2.0), (1, f32::NEG_INFINITY)],
            seed: random.below(1000) as u64,
            ..SamplingParams::default()
        },
    };
    request.end = vec![random.below(vocab) as u32];
    request.min_tokens = random.below(request.max_tokens.min(5));
    request
}

/// Speculation with guesses that are right, wrong, found in the text or made by a model.
fn speculation(random: &mut Random, text: Vec<u32>, vocab: usize, has_draft: bool) -> Speculation {
    let most_right = [0, 2, usize::MAX - 1][random.below(3)];
    let source = match random.below(if has_draft { 5 } else { 3 }) {
        0 => DraftSource::Ngram,
        1 | 2 => DraftSource::Custom(Arc::new(Oracle { text, vocab, most_right })),
        _ => DraftSource::Model,
    };
    let (max_draft, is_adaptive) = (1 + random.below(MAX_DRAFT), random.below(2) == 0);
    Speculation { max_draft, is_adaptive, ..Speculation::from(source) }
}

/// A token with the bits of its log-probability and the most probable ones.
type Token = (u32, u32, Vec<(u32, u32)>);

fn collect(stream: TokenStream) -> Vec<Token> {
    let tokens = stream.filter_map(|event| match event.unwrap() {
        TokenEvent::Token { token, logprob, top, .. } => {
            let top = top.into_iter().map(|(id, logprob)| (id, logprob.to_bits())).collect();
            Some((token, logprob.to_bits(), top))
        }
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    });
    tokens.collect()
}

/// Runs random requests with guesses, several at a time in a small cache, and compares each with itself without guesses,
/// alone. Returns the number of preemptions.
fn compare(case: &str, draft: Option<&Arc<Model>>, seed: u64) -> u64 {
    let model = model(case);
    let (vocab, mut random) = (model.config().n_vocab, Random(seed));
    let mut requests: Vec<Request> = (0..8).map(|_| request(&mut random, vocab)).collect();
    // For all or none: steps with lists of top tokens round log-probabilities in another way.
    let n_top = if seed.is_multiple_of(3) { 3 } else { 0 };
    requests.iter_mut().for_each(|request| request.n_top_logprobs = n_top);
    requests[0].max_tokens = 30;
    requests[0].end.clear();
    let alone = engine(&model, CONTEXT, 256);
    let want: Vec<_> =
        requests.iter().map(|request| collect(alone.submit(request.clone()).unwrap())).collect();
    let runner = runner(&model, 3 * CONTEXT, 48);
    let options = EngineOptions::default();
    let engine = match draft {
        Some(draft) => Engine::with_draft(runner, self::runner(draft, 2 * CONTEXT, 32), options).unwrap(),
        None => Engine::new(runner, options).unwrap(),
    };
    let streams: Vec<_> = requests
        .iter()
        .zip(&want)
        .enumerate()
        .map(|(idx, (request, want))| {
            let text = request.prompt.iter().copied().chain(want.iter().map(|token| token.0)).collect();
            let speculation = match idx {
                0 => Speculation {
                    is_adaptive: false,
                    ..Speculation::from(DraftSource::Custom(Arc::new(Oracle { text, vocab, most_right: 3 })))
                },
                _ => speculation(&mut random, text, vocab, draft.is_some()),
            };
            let mut request = request.clone();
            request.speculation = Some(speculation);
            if random.below(4) == 0 {
                request.pace = Pace::OnDemand { lead: random.below(9) };
            }
            engine.submit(request).unwrap()
        })
        .collect();
    for (idx, (stream, want)) in streams.into_iter().zip(&want).enumerate() {
        assert_eq!(&collect(stream), want, "{case}, request {idx}");
    }
    let ledger = engine.ledger().unwrap();
    let (verify, speculation) = (ledger.tally(StepKind::Verify), ledger.speculation());
    assert!(verify.steps() > 0 && verify.failed == 0, "{case}: {verify}");
    assert!(speculation.accepted > 0 && speculation.accepted < speculation.drafted, "{case}: {speculation}");
    assert_eq!(engine.load().unwrap().blocks.used, 0, "{case}");
    engine.load().unwrap().n_preempted
}

fn is_recurrent(case: &str) -> bool {
    case.starts_with("qwen35") || case == "lfm2"
}

#[test]
fn guesses_never_change_a_text() {
    let mut n_preempted = 0;
    for (idx, case) in CASES.into_iter().filter(|case| !is_recurrent(case)).enumerate() {
        n_preempted += compare(case, None, idx as u64);
    }
    assert!(n_preempted > 0, "no request was preempted");
}

#[test]
fn guesses_of_a_model_never_change_a_text() {
    // The same vocabulary size; as good as random, equal to the target, and with other caches.
    for (idx, (case, draft)) in
        [("qwen3", "llama"), ("llama", "llama"), ("gemma3", "qwen2")].iter().enumerate()
    {
        compare(case, Some(&model(draft)), 100 + idx as u64);
    }
}

#[test]
fn a_model_that_drafts_for_itself_guesses_everything_right() {
    let llama = model("llama");
    let runners = [(); 2].map(|()| runner(&llama, 4 * CONTEXT, 48));
    let [target, draft] = runners;
    let engine = Engine::with_draft(target, draft, EngineOptions::default()).unwrap();
    for temperature in [0.0, 0.9] {
        let mut request = Request::once(vec![1, 17, 5, 90]);
        request.max_tokens = 41;
        request.sampling = SamplingParams { temperature, seed: 3, ..SamplingParams::default() };
        request.speculation =
            Some(Speculation { max_draft: 4, is_adaptive: false, ..Speculation::from(DraftSource::Model) });
        assert_eq!(collect(engine.submit(request).unwrap()).len(), 41);
    }
    let ledger = engine.ledger().unwrap();
    let speculation = ledger.speculation();
    assert_eq!(speculation.drafted, speculation.accepted, "{speculation}");
    assert_eq!((speculation.steps, speculation.emitted), (16, 80), "{speculation}");
    let draft = engine.draft_ledger().unwrap().unwrap();
    // A step per guess, and one for the last guess of the step before, unless it is the first of a request.
    assert_eq!(draft.tally(StepKind::Decode).discarded, 0);
    assert_eq!(draft.tally(StepKind::Decode).tokens, 16 * 4);
    assert_eq!(draft.tally(StepKind::Prompt).tokens, 2 * (4 + 7));
}

#[test]
fn recurrent_models_are_refused_by_name() {
    for (case, arch) in [("qwen35", "qwen35"), ("lfm2", "lfm2")] {
        let engine = engine(&model(case), CONTEXT, 32);
        let mut request = Request::once(vec![1, 2, 3]);
        request.speculation = Some(Speculation::from(DraftSource::Ngram));
        let error = engine.submit(request).map(drop).unwrap_err();
        assert!(matches!(error, EngineError::CannotSpeculate { .. }) && error.hint().is_some());
        assert!(error.to_string().starts_with(arch), "{error}");
        let runners = [model("llama"), model(case)].map(|model| runner(&model, CONTEXT, 32));
        let [target, draft] = runners;
        let error = Engine::with_draft(target, draft, EngineOptions::default()).map(drop).unwrap_err();
        assert!(error.to_string().starts_with(arch), "{error}");
    }
}

/// Probabilities of the token after `tokens` at this temperature, among the `k` most probable.
fn probabilities(core: &mut Core, tokens: &[u32], temperature: f32, k: usize) -> Vec<(u32, f64)> {
    let mut sequence = core.open();
    let logits = core.logits(&mut sequence, tokens, 1).unwrap();
    let mut weights: Vec<(u32, f64)> =
        (0..).zip(logits.iter().map(|l| f64::from(l / temperature).exp())).collect();
    weights.sort_by(|a, b| b.1.total_cmp(&a.1));
    weights.truncate(k);
    let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
    weights.into_iter().map(|(id, weight)| (id, weight / sum)).collect()
}

/// Chi-square of counts against probabilities.
fn chi_square(counts: &[usize], probabilities: &[f64]) -> f64 {
    let n: usize = counts.iter().sum();
    let terms = counts.iter().zip(probabilities).map(|(&count, p)| {
        let expected = p * n as f64;
        (count as f64 - expected).powi(2) / expected
    });
    terms.sum()
}

#[test]
fn tokens_after_guesses_have_the_distribution_of_the_model() {
    const TEMPERATURE: f32 = 1.5;
    const KEPT: usize = 6;
    const N: u64 = 3000;
    let llama = model("llama");
    let mut core = Core::new(runner(&llama, CONTEXT, 64), CONTEXT);
    let prompt = vec![1, 17, 5, 90, 3];
    // The second token is checked against the guess; the third is chosen in the same step where the guess was right.
    let first = probabilities(&mut core, &prompt, 0.1, 1)[0].0;
    let start: Vec<u32> = prompt.iter().copied().chain([first]).collect();
    let second = probabilities(&mut core, &start, TEMPERATURE, KEPT);
    let guess = second[0].0;
    let after: Vec<u32> = start.iter().copied().chain([guess]).collect();
    let third = probabilities(&mut core, &after, TEMPERATURE, KEPT);
    let engine = engine(&llama, 8 * CONTEXT, 64);
    let mut text = after.clone();
    text.push(third[1].0);
    let oracle = Arc::new(Oracle { text, vocab: llama.config().n_vocab, most_right: usize::MAX - 1 });
    let streams = (0..N).map(|seed| {
        let mut request = Request::once(prompt.clone());
        // The first token is the same in all of them.
        request.prompt.push(first);
        request.prompt.truncate(6);
        request.max_tokens = 3;
        request.sampling = SamplingParams {
            temperature: TEMPERATURE,
            top_k: KEPT,
            top_p: 1.0,
            min_p: 0.0,
            seed,
            ..SamplingParams::default()
        };
        request.speculation = Some(Speculation {
            max_draft: 2,
            is_adaptive: false,
            ..Speculation::from(DraftSource::Custom(oracle.clone()))
        });
        collect(engine.submit(request).unwrap()).into_iter().map(|token| token.0).collect::<Vec<_>>()
    });
    let texts: Vec<Vec<u32>> = streams.collect();
    let count = |position: usize, among: &[(u32, f64)], given: &dyn Fn(&[u32]) -> bool| {
        let ids = texts.iter().filter(|text| given(text)).map(|text| text[position]).collect::<Vec<_>>();
        assert!(ids.iter().all(|id| among.iter().any(|(known, _)| known == id)));
        among.iter().map(|(known, _)| ids.iter().filter(|id| *id == known).count()).collect::<Vec<_>>()
    };
    let weights = |among: &[(u32, f64)]| among.iter().map(|(_, p)| *p).collect::<Vec<_>>();
    // The prompt's step chooses the first token, without a guess.
    let plain = chi_square(&count(0, &second, &|_| true), &weights(&second));
    let accepted = |text: &[u32]| text[0] == guess;
    let checked = chi_square(&count(1, &third, &accepted), &weights(&third));
    // 99.9 % of samples of 5 degrees of freedom are below this.
    assert!(plain < 20.5 && checked < 20.5, "chi-square {plain:.1} and {checked:.1}");
    let speculation = engine.ledger().unwrap().speculation().clone();
    assert!(speculation.accepted > N / 20 && speculation.drafted > speculation.accepted, "{speculation}");
}
