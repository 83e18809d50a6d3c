//! What a grammar costs per token, with random weights of a well-known shape:
//!
//! ```sh
//! cargo run --release -p refrain --example constrained_cost -- llama-3.2-1b BF16 cuda
//! ```
//!
//! The device is `cpu`, `cuda` or `sim`. Texts are sampled at temperature 1 from random weights, so strings are long and hardly
//! any token is probable: harder for the parser than what a trained model writes. The vocabulary is made up of bytes and words.

use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
use refrain_driver::sim::SimOptions;
use refrain_driver::{DeviceKind, Method};
use refrain_engine::{
    BackendRunner, Constraint, Engine, EngineOptions, Request, Runner, RunnerOptions, SamplingParams,
    StepKind, TokenEvent,
};
use refrain_grammar::{Grammar, GrammarSource, Vocabulary};
use refrain_models::{Model, QuantMix, SHAPES};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

const SCHEMA: &str = include_str!("../../refrain-grammar/examples/realistic.json");
const CONTEXT: usize = 1024;
/// Texts at once, of which an eighth is constrained.
const BATCHES: [usize; 2] = [8, 32];
/// Rounds that count. Steps that are compiled late cost one of them.
const ROUNDS: usize = 5;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [shape, mix, device, n @ ..] = &args[..] else {
        panic!("usage: constrained_cost SHAPE MIX cpu|cuda|sim [TOKENS]")
    };
    let n_tokens = n.first().map_or(300, |n| n.parse().expect("a number of tokens"));
    let shape = SHAPES.iter().find(|known| known.name == shape).expect("a known shape");
    let mix = QuantMix::from_name(mix).expect("a type such as BF16 or Q4_K_M");
    let model = Arc::new(Model::random(shape, mix).expect("a model"));
    let n_vocab = model.config().n_vocab;
    let began = Instant::now();
    let vocabulary = Vocabulary::of_words(&words(n_vocab)).expect("a vocabulary");
    println!("vocabulary of {n_vocab} tokens: {:.0?}", began.elapsed());
    let began = Instant::now();
    let grammar = vocabulary.compile(&GrammarSource::JsonSchema(SCHEMA.into())).expect("a grammar");
    println!("schema compiled: {:.1?}", began.elapsed());
    // Texts that do not end: a new one begins with a prompt, which interrupts the others.
    let endless = format!(r#"{{"type": "array", "items": {SCHEMA}, "minItems": 40}}"#);
    let endless = vocabulary.compile(&GrammarSource::JsonSchema(endless)).expect("a grammar");
    let engine = Engine::new(runner(device, model), EngineOptions { max_requests: 64 }).expect("an engine");
    let of =
        |grammar: &Grammar, forces: bool| Some(Constraint { forces, ..Constraint::new(grammar.clone()) });
    let constrained = |forces: bool| of(&endless, forces);
    let mut table = Table::default();
    for _ in 0..=ROUNDS {
        let base = table.add("1 free text", &speed(&engine, &[None], n_tokens), None);
        for (what, constraint) in [
            ("1 constrained, every token chosen", constrained(false)),
            ("1 constrained, with forced tokens", constrained(true)),
            ("1 constrained, texts that end", of(&grammar, false)),
        ] {
            table.add(what, &speed(&engine, &[constraint], n_tokens), Some(base));
        }
        for n in BATCHES {
            let (n_few, n_free) = (n / 8, n - n / 8);
            let base = table.add(&format!("{n} free texts"), &speed(&engine, &vec![None; n], n_tokens), None);
            for (forces, how) in [(false, "every token chosen"), (true, "with forced tokens")] {
                let mut rows = vec![None; n_free];
                rows.resize_with(n, || constrained(forces));
                let all = speed(&engine, &rows, n_tokens);
                table.add(&format!("{n_free} free texts beside {n_few}, {how}"), &all[..n_free], Some(base));
                table.add(&format!("    these {n_few}, {how}"), &all[n_free..], Some(base));
            }
            let all = speed(&engine, &vec![constrained(false); n], n_tokens);
            table.add(&format!("{n} constrained"), &all, Some(base));
        }
    }
    table.print();
    let ledger = engine.ledger().expect("a ledger");
    for kind in [StepKind::Decode, StepKind::Prompt, StepKind::Mixed] {
        println!("{:7} {}", kind.name(), ledger.tally(kind));
    }
    masks(&grammar, n_vocab);
}

/// Results of all rounds, line by line.
#[derive(Default)]
struct Table {
    lines: Vec<Line>,
}

struct Line {
    what: String,
    /// Microseconds per token in each round.
    micros: Vec<f64>,
    /// The line to compare with.
    base: Option<usize>,
}

impl Table {
    /// Adds the mean over some requests to a line; returns its index.
    fn add(&mut self, what: &str, all: &[f64], base: Option<usize>) -> usize {
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let idx = self.lines.iter().position(|line| line.what == what).unwrap_or_else(|| {
            self.lines.push(Line { what: what.to_owned(), micros: Vec::new(), base });
            self.lines.len() - 1
        });
        self.lines[idx].micros.push(mean);
        idx
    }

    /// Median, best and worst of the rounds after the first, which compiles the steps.
    fn print(&self) {
        let sorted = |line: &Line| {
            let mut micros = line.micros[1..].to_vec();
            micros.sort_by(f64::total_cmp);
            micros
        };
        for line in &self.lines {
            let micros = sorted(line);
            let median = micros[micros.len() / 2];
            let more = line.base.map_or(String::new(), |base| {
                let than = sorted(&self.lines[base])[micros.len() / 2];
                format!(", {:+.1} us, {:+.1} %", median - than, 100.0 * (median / than - 1.0))
            });
            let (best, worst) = (micros[0], micros[micros.len() - 1]);
            println!("{:50} {median:8.1} us per token ({best:.1} to {worst:.1}){more}", line.what);
        }
    }
}

fn runner(device: &str, model: Arc<Model>) -> Box<dyn Runner> {
    let options = RunnerOptions {
        context: CONTEXT,
        n_positions: 33 * CONTEXT,
        max_seqs: 32,
        ..RunnerOptions::default()
    };
    let kind = match device {
        "cpu" => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let backend = CpuBackend::new(threads).expect("threads");
            return Box::new(BackendRunner::new(backend, model, options).expect("a runner"));
        }
        "cuda" => DeviceKind::Cuda(0),
        "sim" => DeviceKind::Sim(SimOptions::default()),
        other => panic!("{other} is no device: cpu, cuda or sim"),
    };
    let backend =
        CudaBackend::open(kind, CudaOptions::new(GraphMode::Require, Method::Stream)).expect("a device");
    Box::new(BackendRunner::new(backend, model, options).expect("a runner"))
}

/// Microseconds per token of each request, all of them at once. A text that ends early is followed by another one.
fn speed(engine: &Engine, constraints: &[Option<Constraint>], n_tokens: usize) -> Vec<f64> {
    let request = |seq: usize, seed: u64, constraint: &Option<Constraint>| {
        let mut request = Request::once((0..16).map(|i| (seq as u32 * 101 + i * 7) % 200 + 3).collect());
        request.sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
        (request.max_tokens, request.constraint) = (n_tokens, constraint.clone());
        request
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = constraints
            .iter()
            .enumerate()
            .map(|(seq, constraint)| {
                scope.spawn(move || {
                    let (mut seconds, mut n, mut seed) = (0.0, 0, 0);
                    while n < n_tokens - 1 {
                        seed += 1;
                        let stream = engine.submit(request(seq, seed, constraint)).expect("a stream");
                        let mut first = None;
                        for event in stream {
                            if let TokenEvent::Token { .. } = event.expect("a token") {
                                let now = Instant::now();
                                match first {
                                    None => first = Some((now, now)),
                                    Some((began, _)) => (first, n) = (Some((began, now)), n + 1),
                                }
                            }
                        }
                        seconds += first.map_or(0.0, |(began, last)| (last - began).as_secs_f64());
                    }
                    seconds * 1e6 / f64::from(u32::try_from(n).expect("few tokens"))
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("no panic")).collect()
    })
}

/// The cost of masks alone, on this machine.
fn masks(grammar: &Grammar, n_vocab: usize) {
    let (mut matcher, mut mask, mut rng) =
        (grammar.matcher(), vec![0; n_vocab.div_ceil(32)], fastrand::Rng::with_seed(1));
    let mut times = Vec::new();
    while times.len() < 2000 {
        if matcher.is_complete() || matcher.n_accepted() > 300 {
            matcher = grammar.matcher();
        }
        let began = Instant::now();
        matcher.mask(&[], &mut mask).expect("a mask");
        let took = began.elapsed();
        let n_set: u32 = mask.iter().map(|word| word.count_ones()).sum();
        let mut left = rng.u32(..n_set.max(1));
        let allowed = (0..n_vocab as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
        let token = allowed.into_iter().find(|_| {
            let is_it = left == 0;
            left = left.saturating_sub(1);
            is_it
        });
        let began = Instant::now();
        matcher.accept(token.expect("an allowed token")).expect("an allowed token");
        times.push(took + began.elapsed());
    }
    times.sort_unstable();
    let mean = times.iter().sum::<std::time::Duration>() / times.len() as u32;
    println!("a mask: mean {mean:.1?}, median {:.1?}, 99th percentile {:.1?}", times[1000], times[1980]);
}

/// Bytes, then words of letters, digits and punctuation, with and without a space in front.
fn words(n: usize) -> Vec<Vec<u8>> {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut words: Vec<Vec<u8>> = (0..n.min(255)).map(|byte| vec![byte as u8]).collect();
    let mut seen: BTreeSet<Vec<u8>> = words.iter().cloned().collect();
    while words.len() < n {
        let mut word: Vec<u8> = if rng.u8(..2) == 0 { b" ".to_vec() } else { Vec::new() };
        let n_chars = rng.usize(2..9);
        match rng.u8(..12) {
            0 => word.extend((0..n_chars.min(4)).map(|_| rng.u8(b'0'..=b'9'))),
            1 => {
                word.extend((0..n_chars.min(4)).map(|_| *rng.choice(b"{}[]\":,.!?()-_/\\\n").expect("some")))
            }
            2 => word.extend((0..n_chars).map(|_| rng.u8(b'A'..=b'Z'))),
            3 => word.extend(
                "äöüéßñ".chars().take(n_chars % 5 + 1).map(|c| c.to_string()).collect::<String>().bytes(),
            ),
            _ => word.extend((0..n_chars).map(|_| rng.u8(b'a'..=b'z'))),
        }
        if seen.insert(word.clone()) || words.len() > 200_000 {
            words.push(word);
        }
    }
    words
}
