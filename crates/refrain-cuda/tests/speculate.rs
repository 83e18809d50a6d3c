//! Verify steps on a device: replay equals eager bit for bit, and guesses never change a text.

mod rig;

use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
use refrain_driver::{Device, Method};
use refrain_engine::{
    BackendRunner, DraftSource, Drafter, Engine, EngineOptions, Request, RunnerOptions, SamplingParams,
    Speculation, StepKind, TokenEvent, TokenStream,
};
use refrain_tensor::DType;
use rig::goldens::CASES;
use rig::{gpu, gpu_turn, model, options, sim};
use std::sync::Arc;

/// Guesses what a known text says, with a wrong token after every third right one.
#[derive(Debug)]
struct Oracle {
    text: Vec<u32>,
    n_right: usize,
}

impl Drafter for Oracle {
    fn draft(&self, tokens: &[u32], n: usize) -> Vec<u32> {
        let known = self.text.get(tokens.len()..).unwrap_or_default().iter();
        known
            .take(n)
            .enumerate()
            .map(|(i, token)| if i == self.n_right { token ^ 1 } else { *token })
            .collect()
    }
}

fn engine(device: &Device, case: &str, options: CudaOptions) -> Engine {
    let options = CudaOptions { buckets: vec![1, 8, 32], row_buckets: vec![1, 2, 4, 8, 16, 32], ..options };
    let runner = |case| {
        let backend = CudaBackend::on(device, options.clone()).unwrap();
        let runner = RunnerOptions {
            context: 96,
            n_positions: 600,
            kv_block: 16,
            kv_dtype: DType::F32,
            max_tokens: 32,
            max_seqs: 8,
            n_recurrent: 0,
        };
        Box::new(BackendRunner::new(backend, model(case), runner).unwrap())
    };
    Engine::with_draft(runner(case), runner("llama"), EngineOptions::default()).unwrap()
}

/// Requests whose prompts repeat, greedy and with every kind of rule.
fn requests(n_tokens: usize) -> Vec<Request> {
    let greedy = SamplingParams::greedy();
    let rules = [
        greedy.clone(),
        SamplingParams { temperature: 0.9, top_k: 20, top_p: 0.95, seed: 7, ..greedy.clone() },
        SamplingParams {
            temperature: 1.1,
            repeat_penalty: 1.2,
            penalty_window: 9,
            logit_bias: vec![(5, 1.5), (6, f32::NEG_INFINITY)],
            seed: 8,
            ..greedy
        },
    ];
    let request = |(idx, sampling): (usize, SamplingParams)| {
        let mut request = Request::once((0..9).map(|i| (11 * idx as u32 + 5 * (i % 4)) % 120).collect());
        (request.sampling, request.max_tokens) = (sampling, n_tokens - idx);
        (request.end, request.min_tokens) = (vec![3], 12);
        request.n_top_logprobs = if idx == 1 { 2 } else { 0 };
        request
    };
    rules.into_iter().enumerate().map(request).collect()
}

/// A token with the bits of its log-probability.
type Token = (u32, u32);

fn collect(stream: TokenStream) -> Vec<Token> {
    let tokens = stream.filter_map(|event| match event.unwrap() {
        TokenEvent::Token { token, logprob, .. } => Some((token, logprob.to_bits())),
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    });
    tokens.collect()
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

/// Output without guesses, one request after the other.
fn plain(device: &Device, case: &str, options: CudaOptions, n_tokens: usize) -> Vec<Vec<Token>> {
    let engine = engine(device, case, options);
    requests(n_tokens).into_iter().map(|request| collect(engine.submit(request).unwrap())).collect()
}

/// Outputs of [`guessed`] from a request that had every step for itself.
const N_ALONE: usize = 15;

/// Output with guesses: of each source alone, then of all together. Every step must run as `is_replayed` says.
fn guessed(
    device: &Device,
    case: &str,
    options: CudaOptions,
    n_tokens: usize,
    plain: &[Vec<Token>],
) -> Vec<Vec<Token>> {
    let is_replayed = options.graphs.mode == GraphMode::Require;
    let engine = engine(device, case, options);
    let sources = |request: &Request, plain: &[Token]| {
        let text: Vec<u32> = request.prompt.iter().copied().chain(ids(plain)).collect();
        let oracle = |n_right| DraftSource::Custom(Arc::new(Oracle { text: text.clone(), n_right }));
        [oracle(usize::MAX), oracle(0), oracle(2), DraftSource::Ngram, DraftSource::Model]
    };
    let with = |request: &Request, source, max_draft| {
        let speculation = Speculation { max_draft, is_adaptive: false, ..Speculation::from(source) };
        let mut request = request.clone();
        request.speculation = Some(speculation);
        request
    };
    let mut all = Vec::new();
    for (request, plain) in requests(n_tokens).iter().zip(plain) {
        for (source, max_draft) in sources(request, plain).into_iter().zip([7, 3, 5, 4, 3]) {
            all.push(collect(engine.submit(with(request, source, max_draft)).unwrap()));
        }
    }
    let mut streams = Vec::new();
    for (idx, (request, plain)) in requests(n_tokens).iter().zip(plain).enumerate() {
        let source = sources(request, plain).into_iter().nth([2, 4, 0][idx]).unwrap();
        streams.push(engine.submit(with(request, source, 4)).unwrap());
    }
    all.extend(streams.into_iter().map(collect));
    let ledger = engine.ledger().unwrap();
    let (verify, speculation) = (ledger.tally(StepKind::Verify), ledger.speculation());
    assert!(verify.steps() > 10 && verify.failed == 0, "{case}: {verify}");
    assert!(speculation.accepted > 0 && speculation.last_pause.is_none(), "{case}: {speculation}");
    match is_replayed {
        true => assert_eq!(
            (verify.replayed, verify.launches),
            (verify.steps(), verify.steps()),
            "{case}: {verify}"
        ),
        false => assert_eq!(verify.eager, verify.steps(), "{case}: {verify}"),
    }
    assert_eq!(device.take_reports(), Vec::<String>::new());
    all
}

fn speculates(case: &str) -> bool {
    !case.starts_with("qwen35") && case != "lfm2"
}

fn replayed_equals_eager_and_no_text_changes(device: impl Fn() -> Device, cases: &[&str], n_tokens: usize) {
    for case in cases.iter().filter(|case| speculates(case)) {
        let of = |mode| options(mode, Method::Stream);
        let want = plain(&device(), case, of(GraphMode::Require), n_tokens);
        let replayed = guessed(&device(), case, of(GraphMode::Require), n_tokens, &want);
        let eager = guessed(&device(), case, of(GraphMode::Off), n_tokens, &want);
        // Which requests share a step depends on when they arrive, and on a card the last bits depend on that.
        assert_eq!(replayed[..N_ALONE], eager[..N_ALONE], "{case}");
        for (idx, got) in replayed.iter().enumerate() {
            let want = &want[if idx < N_ALONE { idx / 5 } else { idx - N_ALONE }];
            assert_eq!(ids(got), ids(want), "{case}, output {idx}");
            let near = |(a, b): (&Token, &Token)| (f32::from_bits(a.1) - f32::from_bits(b.1)).abs() < 2e-3;
            assert!(got.iter().zip(want).all(near), "{case}, output {idx}");
        }
    }
}

fn reproducible_bits_do_not_depend_on_guesses(device: impl Fn() -> Device, cases: &[&str], n_tokens: usize) {
    for case in cases {
        let of = || CudaOptions { reproducible: true, ..options(GraphMode::Require, Method::Stream) };
        let want = plain(&device(), case, of(), n_tokens);
        for (idx, got) in guessed(&device(), case, of(), n_tokens, &want).iter().enumerate() {
            assert_eq!(
                got,
                &want[if idx < N_ALONE { idx / 5 } else { idx - N_ALONE }],
                "{case}, output {idx}"
            );
        }
    }
}

/// One request at a time with right and wrong guesses, after a fault was injected.
fn guessed_after(engine: &Engine, want: &[Vec<Token>]) {
    for (request, want) in requests(20).into_iter().zip(want) {
        let text = request.prompt.iter().copied().chain(ids(want)).collect();
        let source = DraftSource::Custom(Arc::new(Oracle { text, n_right: 2 }));
        let mut request = request;
        request.speculation =
            Some(Speculation { max_draft: 3, is_adaptive: false, ..Speculation::from(source) });
        assert_eq!(ids(&collect(engine.submit(request).unwrap())), ids(want));
    }
}

mod on_the_simulated_device {
    use super::*;
    use refrain_driver::sim::FaultScript;
    use refrain_engine::{EngineError, SpeculationPause, Stopped};

    #[test]
    fn a_recording_that_fails_runs_verify_steps_eagerly_with_the_reason() {
        let want = plain(&sim("").1, "llama", options(GraphMode::Auto, Method::Stream), 20);
        let (sim, device) = sim("");
        let engine = engine(&device, "llama", options(GraphMode::Auto, Method::Stream));
        // The prompt's and the decode step's graphs are recorded before the first verify step.
        let mut request = requests(20).swap_remove(0);
        (request.max_tokens, request.min_tokens) = (3, 0);
        collect(engine.submit(request).unwrap());
        sim.inject(FaultScript::parse("on 1st instantiate: out of memory").unwrap());
        guessed_after(&engine, &want);
        assert_eq!(sim.unused_faults(), [""; 0]);
        let ledger = engine.ledger().unwrap();
        let verify = ledger.tally(StepKind::Verify);
        assert!(verify.eager > 0 && verify.replayed > 0 && verify.failed == 0, "{verify}");
        assert!(verify.to_string().contains("instantiating the graph failed"), "{verify}");
    }

    #[test]
    fn a_verify_step_that_fails_is_decoded_without_guesses() {
        let of = || options(GraphMode::Require, Method::Stream);
        let want = plain(&sim("").1, "llama", of(), 20);
        let (sim, device) = sim("");
        let engine = engine(&device, "llama", of());
        guessed_after(&engine, &want);
        // Graphs are required, so the step that cannot be replayed fails.
        sim.inject(FaultScript::parse("on 4th replay: fail LAUNCH_OUT_OF_RESOURCES").unwrap());
        guessed_after(&engine, &want);
        assert_eq!(sim.unused_faults(), [""; 0]);
        let ledger = engine.ledger().unwrap();
        // The next one may come while the graph backs off.
        let verify = ledger.tally(StepKind::Verify);
        assert!((1..=2).contains(&verify.failed) && verify.replayed > 20, "{verify}");
        let pause = ledger.speculation().last_pause.clone();
        assert!(matches!(pause, Some(SpeculationPause::StepFailed { .. })), "{pause:?}");
    }

    #[test]
    fn a_lost_device_ends_requests_that_guess() {
        let (sim, device) = sim("");
        let engine = engine(&device, "llama", options(GraphMode::Auto, Method::Stream));
        let want = plain(&super::rig::sim("").1, "llama", options(GraphMode::Auto, Method::Stream), 20);
        guessed_after(&engine, &want);
        sim.inject(FaultScript::parse("on 3rd replay: illegal address").unwrap());
        let mut request = requests(20).swap_remove(0);
        let text = request.prompt.iter().copied().chain(ids(&want[0])).collect();
        let source = DraftSource::Custom(Arc::new(Oracle { text, n_right: 2 }));
        request.speculation = Some(Speculation::from(source));
        let last = engine.submit(request).unwrap().last().unwrap();
        let error = last.unwrap_err();
        assert!(matches!(error.stops(), Some(Stopped::DeviceLost { code: 700, .. })), "{error}");
        assert!(matches!(engine.load(), Err(EngineError::Stopped(_))));
    }

    #[test]
    fn replayed_equals_eager() {
        let cases = ["llama", "gemma3", "gemma4-e2b", "gpt-oss"];
        replayed_equals_eager_and_no_text_changes(|| sim("").1, &cases, 16);
    }

    #[test]
    fn reproducible_bits() {
        reproducible_bits_do_not_depend_on_guesses(|| sim("").1, &["llama", "gemma3"], 16);
    }
}

mod on_a_gpu {
    use super::*;

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn replayed_equals_eager() {
        let _turn = gpu_turn();
        replayed_equals_eager_and_no_text_changes(gpu, CASES, 80);
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn reproducible_bits() {
        let _turn = gpu_turn();
        reproducible_bits_do_not_depend_on_guesses(gpu, &["llama", "gemma3", "qwen3"], 80);
    }
}
