//! With `CudaOptions::reproducible`, a request has the same bits in any load as alone.
//!
//! The twins of the simulated device round as the kernels do: activations to 8 or 16 bits, the sums of each split of
//! `k`, and the partial results of each split of a context. So they show a choice of kernels, splits or rounding that
//! depends on the number of rows. They add in f64 otherwise, so a different order of additions within one split shows
//! only on a GPU.

mod rig;

use refrain_cuda::{CublasLt, CudaBackend, CudaOptions, GraphMode};
use refrain_driver::{Device, Method};
use refrain_engine::{
    BackendRunner, Engine, EngineOptions, Pace, Request, RunnerOptions, SamplingParams, StepKind, TokenEvent,
    TokenStream,
};
use refrain_formats::params::Arch;
use refrain_models::{Model, NamedShape, QuantMix};
use refrain_tensor::DType;
use rig::{gpu, gpu_turn, model, options, sim};
use std::sync::Arc;

const KV_BLOCK: usize = 16;

/// A small generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

/// How a load is divided into steps.
struct Division {
    context: usize,
    n_positions: usize,
    max_tokens: usize,
    buckets: Vec<usize>,
    row_buckets: Vec<usize>,
}

/// Sizes of a load.
#[derive(Clone, Copy)]
struct Size {
    context: usize,
    n_requests: usize,
    most_prompt: usize,
    most_tokens: usize,
    n_loads: usize,
}

impl Size {
    /// One request at a time, in small chunks.
    fn alone(&self) -> Division {
        let (context, n_positions) = (self.context, self.context);
        Division { context, n_positions, max_tokens: 8, buckets: vec![1, 8], row_buckets: vec![1] }
    }

    /// Divisions of the same load that differ in everything that must not matter.
    fn together(&self) -> [Division; 3] {
        let context = self.context;
        let rows = |rows: &[usize]| rows.to_vec();
        [
            Division {
                context,
                n_positions: 5 * context / 2,
                max_tokens: 32,
                buckets: vec![1, 8, 32],
                row_buckets: rows(&[1, 2, 3, 4, 6, 8, 12, 24, 40]),
            },
            Division {
                context: context + 3 * KV_BLOCK,
                n_positions: 40 * context,
                max_tokens: 64,
                buckets: vec![1, 64],
                row_buckets: rows(&[1, 5, 17, 40]),
            },
            Division {
                context,
                n_positions: 12 * context,
                max_tokens: 20,
                buckets: vec![1, 4, 20],
                row_buckets: rows(&[1, 40]),
            },
        ]
    }
}

fn engine(model: &Arc<Model>, device: &Device, division: &Division, reproducible: bool) -> Engine {
    let options = CudaOptions {
        reproducible,
        buckets: division.buckets.clone(),
        row_buckets: division.row_buckets.clone(),
        cublaslt: CublasLt::IfFound,
        ..options(GraphMode::Require, Method::Stream)
    };
    let runner = RunnerOptions {
        context: division.context,
        n_positions: division.n_positions,
        kv_block: KV_BLOCK,
        kv_dtype: DType::F16,
        max_tokens: division.max_tokens,
        max_seqs: 40,
        n_recurrent: 40,
    };
    let backend = CudaBackend::on(device, options).unwrap();
    let runner = BackendRunner::new(backend, model.clone(), runner).unwrap();
    Engine::new(Box::new(runner), EngineOptions::default()).unwrap()
}

/// A request with random options. Some share a prefix that fills a block.
fn any_request(random: &mut Random, size: Size, vocab: usize) -> Request {
    let common = random.below(3);
    let prompt = (0..1 + random.below(size.most_prompt)).map(|i| match i < KV_BLOCK + 2 {
        true => (common + 3 * i) % vocab,
        false => random.below(vocab),
    });
    let mut request = Request::once(prompt.map(|token| token as u32).collect());
    request.max_tokens = 1 + random.below(size.most_tokens);
    let seed = random.below(1000) as u64;
    request.sampling = match random.below(3) {
        0 => SamplingParams::greedy(),
        1 => SamplingParams { temperature: 0.8, top_k: 15, seed, ..SamplingParams::greedy() },
        _ => SamplingParams { temperature: 1.0, top_p: 0.9, seed, ..SamplingParams::greedy() },
    };
    if random.below(5) == 0 {
        request.pace = Pace::OnDemand { lead: random.below(3) };
    }
    request
}

/// A token with the bits of its log-probability.
type Token = (u32, u32);

fn rest(stream: TokenStream) -> Vec<Token> {
    let tokens = stream.filter_map(|event| match event.unwrap() {
        TokenEvent::Token { token, logprob, .. } => Some((token, logprob.to_bits())),
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    });
    tokens.collect()
}

/// Runs random loads, and returns how many requests had other bits than alone, and how many there were.
fn n_changed(
    model: &Arc<Model>,
    device: impl Fn() -> Device,
    size: Size,
    reproducible: bool,
) -> (usize, usize) {
    let mut random = Random(11);
    let vocab = model.config().n_vocab;
    let requests: Vec<Request> =
        (0..size.n_requests).map(|_| any_request(&mut random, size, vocab)).collect();
    let alone_device = device();
    let alone = engine(model, &alone_device, &size.alone(), reproducible);
    let want: Vec<Vec<Token>> = requests
        .iter()
        .map(|request| {
            let mut request = request.clone();
            request.sequence = Some(alone.open(size.context).unwrap());
            rest(alone.submit(request).unwrap())
        })
        .collect();
    let (mut n_changed, mut n_compared) = (0, 0);
    for division in size.together().into_iter().take(size.n_loads) {
        let device = device();
        let engine = engine(model, &device, &division, reproducible);
        let mut open: Vec<(usize, TokenStream)> = Vec::new();
        let mut finish = |(idx, stream): (usize, TokenStream)| {
            let got = rest(stream);
            n_compared += 1;
            // Requests that were read in part are compared from where they were left.
            n_changed += usize::from(!want[idx].ends_with(&got) || got.is_empty());
        };
        for (idx, request) in requests.iter().enumerate() {
            open.push((idx, engine.submit(request.clone()).unwrap()));
            let at = random.below(open.len());
            match random.below(12) {
                0 => drop(open.swap_remove(at)),
                1 => finish(open.swap_remove(at)),
                _ => {}
            }
        }
        open.into_iter().for_each(finish);
        let ledger = engine.ledger().unwrap();
        let tallies = StepKind::ALL.map(|kind| ledger.tally(kind));
        assert!(tallies.iter().all(|tally| tally.eager + tally.failed == 0), "{tallies:?}");
        let decode = ledger.tally(StepKind::Decode);
        assert!(decode.tokens > decode.steps(), "no step had several rows: {decode:?}");
        assert_eq!(device.take_reports(), Vec::<String>::new());
    }
    (n_changed, n_compared)
}

fn random_model(arch: Arch, sizes: [usize; 4], heads: [usize; 3], mix: &str) -> Arc<Model> {
    let shape = NamedShape::new("test", arch, sizes, heads);
    let shape = if arch == Arch::Qwen3Moe { shape.with_experts([6, 2, sizes[2]]) } else { shape };
    Arc::new(Model::random(&shape, QuantMix::from_name(mix).unwrap()).unwrap())
}

const SMALL: Size = Size { context: 96, n_requests: 12, most_prompt: 44, most_tokens: 6, n_loads: 2 };

fn small(mix: &str) -> Arc<Model> {
    random_model(Arch::Llama, [64, 256, 512, 1], [4, 2, 64], mix)
}

#[test]
fn bits_depend_on_the_load_only_without_the_option() {
    for mix in ["BF16", "Q4_K_M"] {
        let model = small(mix);
        let (n_changed_by_load, n) = n_changed(&model, || sim("").1, SMALL, false);
        assert!(
            n_changed_by_load > 0,
            "{mix}: {n} requests have the same bits by chance, so the test is blind"
        );
        let (n_changed, n) = n_changed(&model, || sim("").1, SMALL, true);
        assert_eq!(n_changed, 0, "{mix}: of {n} requests");
    }
}

#[test]
fn every_kind_of_layer_is_reproducible() {
    let size = Size { n_requests: 6, n_loads: 1, ..SMALL };
    let experts = random_model(Arch::Qwen3Moe, [64, 256, 256, 1], [4, 2, 64], "Q4_K_M");
    let models = ["gemma3", "mistral-window", "lfm2"].map(|case| (case, model(case)));
    let others = [("experts", experts), ("Q2_K", small("Q2_K")), ("F32", small("F32"))];
    for (name, model) in models.into_iter().chain(others) {
        let context = size.context.min(model.config().n_context - 3 * KV_BLOCK);
        let size = Size { context, most_prompt: context / 2, most_tokens: 6, ..size };
        let (n_changed, n) = n_changed(&model, || sim("").1, size, true);
        assert_eq!(n_changed, 0, "{name}: of {n} requests");
    }
}

#[test]
fn a_plan_says_that_it_is_reproducible_and_chooses_the_same_kernels_for_every_number_of_rows() {
    for mix in ["BF16", "Q4_K_M", "Q2_K", "F32"] {
        let model = small(mix);
        let (_, device) = sim("");
        let options = CudaOptions {
            reproducible: true,
            buckets: vec![1, 8, 32, 128],
            ..options(GraphMode::Require, Method::Stream)
        };
        let backend = CudaBackend::on(&device, options).unwrap();
        let monitor = backend.monitor();
        let runner = RunnerOptions { context: 128, n_positions: 128, ..RunnerOptions::default() };
        let runner = BackendRunner::new(backend, model, runner).unwrap();
        let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
        // Tiles of another height are the same kernel in all that changes a bit. A step that chooses after some of its
        // rows gathers these, which separates a sum from the norm after it.
        let kernels = |n_tokens: usize| -> Vec<String> {
            let kernels = engine.kernels(n_tokens).unwrap();
            let mut names: Vec<String> = kernels
                .into_iter()
                .map(|(_, name)| {
                    name.replace("gemm_m128", "gemm_m64").replace("m1c2", "m1").replace("m8", "m1")
                })
                .filter(|name| !["gather", "binary_add"].iter().any(|other| name.starts_with(other)))
                .collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        let one = kernels(1);
        for n_tokens in [8, 32, 128] {
            let missing: Vec<String> =
                kernels(n_tokens).into_iter().filter(|name| !one.contains(name)).collect();
            assert_eq!(missing, Vec::<String>::new(), "{mix}, {n_tokens} tokens; one token has {one:?}");
        }
        assert!(monitor.status().reproducible);
    }
}

mod on_a_gpu {
    use super::*;

    const LARGE: Size = Size { context: 512, n_requests: 40, most_prompt: 300, most_tokens: 60, n_loads: 3 };

    /// Real sizes: products are split, and heads have 64 or 128 elements.
    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn any_load_gives_each_request_the_bits_that_it_has_alone() {
        let _turn = gpu_turn();
        let llama = |mix| random_model(Arch::Llama, [4096, 1024, 2816, 4], [16, 4, 64], mix);
        let wide = |mix| random_model(Arch::Qwen3, [8192, 2048, 6144, 2], [16, 8, 128], mix);
        let experts = random_model(Arch::Qwen3Moe, [4096, 1024, 512, 2], [8, 2, 128], "Q4_K_M");
        let mixes = ["BF16", "F16", "F32", "Q4_K_M", "Q8_0", "Q4_0", "Q5_1", "Q2_K"];
        let models = mixes.into_iter().map(|mix| (mix, llama(mix)));
        let others = [("wide BF16", wide("BF16")), ("wide Q4_K_M", wide("Q4_K_M")), ("experts", experts)];
        let mut failures = Vec::new();
        for (name, model) in models.chain(others) {
            let (n_changed, n) = n_changed(&model, gpu, LARGE, true);
            println!("{name}: {n_changed} of {n} requests have other bits than alone");
            if n_changed > 0 {
                failures.push(format!("{name}: {n_changed} of {n}"));
            }
        }
        assert_eq!(failures, Vec::<String>::new());
    }

    #[test]
    #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
    fn every_golden_model_is_reproducible() {
        let _turn = gpu_turn();
        let mut failures = Vec::new();
        for case in rig::goldens::CASES {
            let model = model(case);
            // Below the context from which phi3-short has other frequencies, in the largest division too.
            let context = 80.min(model.config().n_context.saturating_sub(3 * KV_BLOCK));
            let size = Size {
                context,
                n_requests: 40,
                most_prompt: context / 2,
                most_tokens: context / 4,
                n_loads: 3,
            };
            let (n_changed, n) = n_changed(&model, gpu, size, true);
            if n_changed > 0 {
                failures.push(format!("{case}: {n_changed} of {n}"));
            }
        }
        assert_eq!(failures, Vec::<String>::new());
    }
}
