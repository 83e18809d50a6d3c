//! Prefill and decode speed of a model on a device, beside what the device's memory allows.

use crate::engines::{MonitoredEngine, Room, lone_engine};
use crate::error::Error;
use crate::examine::read_bandwidth;
use crate::model::Model;
use crate::session::{Device, SessionOptions};
use refrain_cpu::CpuBackend;
use refrain_cpu::pool::default_threads;
use refrain_cuda::{Status, Timeline};
use refrain_engine::{
    Engine, Request, RunnerOptions, SamplingParams, Sequence, StepKind, Tally, TokenEvent, TokenStream,
};
use refrain_formats::ModelFiles;
use refrain_graph::SegmentKind;
use refrain_models::{NamedShape, QuantMix};
use std::sync::Arc;
use std::time::Instant;

/// What to measure.
#[derive(Clone, Debug)]
pub enum BenchTarget<'a> {
    /// An open model.
    Model(&'a Model),
    /// Open files; they need no tokenizer.
    Files(&'a ModelFiles),
    /// Random weights of a well-known shape.
    Shape(&'a NamedShape, QuantMix),
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Where.
    pub session: SessionOptions,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens to decode.
    pub n_decode: usize,
    /// Tokens already in the context when decoding begins; decoding is measured at each of these depths.
    pub depths: Vec<usize>,
    /// Numbers of sequences that are decoded at once; speed is measured for each of these.
    pub seqs: Vec<usize>,
    /// How often.
    pub repeats: usize,
}

/// One quantity, measured several times.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(pub Vec<f64>);

impl Samples {
    /// The middle one.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// The smallest and the largest.
    pub fn range(&self) -> (f64, f64) {
        let fold = |f: fn(f64, f64) -> f64, from| self.0.iter().copied().fold(from, f);
        (fold(f64::min, f64::INFINITY), fold(f64::max, f64::NEG_INFINITY))
    }
}

/// Decoding with so much in the context.
#[derive(Clone, Debug)]
pub struct DecodeReport {
    /// Tokens in the context when decoding began.
    pub depth: usize,
    /// Tokens per second.
    pub speed: Samples,
    /// Bytes that a token reads, at the middle of the measured stretch.
    pub bytes_per_token: usize,
}

impl DecodeReport {
    /// Milliseconds of a token.
    pub fn ms(&self) -> f64 {
        1e3 / self.speed.median()
    }

    /// Bytes per second that decoding read.
    pub fn bandwidth(&self) -> f64 {
        self.speed.median() * self.bytes_per_token as f64
    }
}

/// Decoding so many sequences at once, each behind a prompt of its own.
#[derive(Clone, Debug)]
pub struct BatchReport {
    /// Sequences.
    pub n_seqs: usize,
    /// Tokens in the context of each when decoding began.
    pub depth: usize,
    /// Tokens per second of all together.
    pub speed: Samples,
}

/// Memory that the process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Bytes now.
    pub now: u64,
    /// Bytes at most so far.
    pub most: u64,
}

impl Resident {
    /// Of this process, where the system tells it.
    pub fn of_this_process() -> Option<Resident> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        };
        Some(Resident { now: field("VmRSS:")?, most: field("VmHWM:")? })
    }
}

/// What came out.
#[derive(Clone, Debug)]
pub struct BenchReport {
    /// Name of the model or shape.
    pub name: String,
    /// Name of the backend.
    pub backend: &'static str,
    /// Numbers in the weights.
    pub n_parameters: usize,
    /// Bytes of the weights.
    pub weight_bytes: usize,
    /// Tokens per second while a prompt is evaluated.
    pub prefill: Samples,
    /// Generating tokens, at each depth; empty if none were to be decoded.
    pub decode: Vec<DecodeReport>,
    /// Generating tokens of several sequences at once, for each number of them.
    pub batches: Vec<BatchReport>,
    /// Bytes per second that memory delivers at best; `None` where it was not measured.
    pub read_bandwidth: Option<f64>,
    /// Seconds from open files to a device that is ready.
    pub load_seconds: f64,
    /// Memory of the process when all was measured, where the system tells it.
    pub resident: Option<Resident>,
    /// How the decoded steps ran, as the ledger tells it, at all depths; those of the first round, which is not
    /// counted, too.
    pub decode_steps: Tally,
    /// Kernels of a decoded token, and launches by the host for them; `None` on the CPU, which calls its kernels.
    pub launches: Option<Launches>,
    /// Memory, graphs and timings of a CUDA device, with the timeline where it was profiled; `None` on the CPU.
    pub device: Option<(Status, Timeline)>,
    /// How weights lie in memory, with the bytes of each layout.
    pub layouts: Vec<(String, usize)>,
}

/// What a decoded token takes on a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    /// Calls of the host: one for each recorded segment, or one for each kernel where a step ran eagerly.
    pub by_host: usize,
    /// Kernels and copies.
    pub kernels: usize,
}

impl BenchReport {
    /// What decoding read as a part of what memory delivers at best; `None` where that was not measured.
    pub fn bandwidth_share(&self, decode: &DecodeReport) -> Option<f64> {
        self.read_bandwidth.filter(|best| *best > 0.0).map(|best| decode.bandwidth() / best)
    }
}

/// Measures. `progress` hears what is going on.
pub fn bench(
    target: &BenchTarget<'_>,
    options: &BenchOptions,
    mut progress: impl FnMut(&str),
) -> Result<BenchReport, Error> {
    let (name, weights) = match target {
        BenchTarget::Model(model) => (model.name().to_string(), model.weights().clone()),
        BenchTarget::Files(files) => {
            let weights = refrain_models::Model::load(files)?;
            let name = weights.config().name.clone().unwrap_or_else(|| files.path().display().to_string());
            (name, Arc::new(weights))
        }
        BenchTarget::Shape(shape, mix) => {
            progress("making random weights");
            (shape.name.to_string(), Arc::new(refrain_models::Model::random(shape, *mix)?))
        }
    };
    let depths: &[usize] = if options.n_decode > 0 { &options.depths } else { &[] };
    let seqs: &[usize] = if options.n_decode > 0 { &options.seqs } else { &[] };
    let deepest =
        depths.iter().copied().max().unwrap_or(0).max(if seqs.is_empty() { 0 } else { BATCH_DEPTH });
    let context = options.n_prompt.max(deepest + options.n_decode + 1);
    let session = SessionOptions { context: Some(context), ..options.session.clone() };
    let began = Instant::now();
    progress("loading");
    let most_seqs = seqs.iter().copied().max().unwrap_or(0);
    let room = |context: usize| Room {
        // Whole blocks for each, and for the sequence that is measured alone.
        n_positions: (most_seqs + 1) * context.next_multiple_of(RunnerOptions::default().kv_block),
        max_seqs: most_seqs.max(1),
        n_recurrent: most_seqs + 1,
        max_requests: most_seqs.max(1),
        context,
    };
    let (MonitoredEngine { engine, monitor, .. }, Room { context, .. }) =
        lone_engine(&weights, &name, &session, room)?;
    let sequence = engine.open(context)?;
    let load_seconds = began.elapsed().as_secs_f64();
    match target {
        BenchTarget::Model(model) => model.files().release(),
        BenchTarget::Files(files) => files.release(),
        BenchTarget::Shape(..) => {}
    }

    let vocab = weights.config().n_vocab as u32;
    // Any tokens do; these avoid the first ones, which are often special.
    let tokens: Vec<u32> = (0..context as u32).map(|i| (1000 + i * 7919) % vocab).collect();
    let (prefill, decode) = measure(&engine, &sequence, options, depths, &tokens, &mut progress)?;
    let traffic = engine.plan(1)?.traffic();
    let decode = depths.iter().zip(decode).map(|(&depth, speed)| {
        let middle = depth.max(1) + options.n_decode / 2;
        let bytes_per_token = traffic.weight_bytes + traffic.kv_bytes(middle);
        DecodeReport { depth, speed, bytes_per_token }
    });
    let batches = measure_batches(&engine, options, seqs, vocab, &mut progress)?;
    let decode_steps = sequence.ledger().tally(StepKind::Decode).clone();
    let is_eager = decode_steps.eager > 0;
    let launches = match monitor {
        Some(_) => Some(count_launches(&engine, is_eager)?),
        None => None,
    };
    let device = monitor.map(|monitor| (monitor.status(), monitor.timeline()));
    let (layouts, backend) = (engine.layouts()?, engine.backend());
    let resident = Resident::of_this_process();
    // The device is free again, and its clocks are up.
    drop(engine);
    progress("measuring read bandwidth");
    let read_bandwidth = match &options.session.device {
        // What a simulated device reads says nothing.
        Device::Sim { .. } => None,
        device @ (Device::Cpu { .. } | Device::Cuda { .. }) => Some(read_bandwidth(device)?),
    };
    Ok(BenchReport {
        layouts,
        decode_steps,
        launches,
        device,
        name,
        backend,
        n_parameters: weights.n_parameters(),
        weight_bytes: weights.weight_bytes(),
        prefill,
        decode: decode.collect(),
        batches,
        read_bandwidth,
        load_seconds,
        resident,
    })
}

/// Runs the rounds: how fast the prompt was read, and how fast tokens came at each depth.
fn measure(
    engine: &Engine,
    sequence: &Sequence,
    options: &BenchOptions,
    depths: &[usize],
    tokens: &[u32],
    progress: &mut impl FnMut(&str),
) -> Result<(Samples, Vec<Samples>), Error> {
    let (mut prefill, mut decode) = (Samples(Vec::new()), vec![Samples(Vec::new()); depths.len()]);
    // The first round warms caches and compiles the steps; it is not counted.
    for round in 0..=options.repeats {
        progress(&format!("round {round} of {}", options.repeats));
        if options.n_prompt > 0 {
            let began = Instant::now();
            let mut stream = submit(engine, sequence, &tokens[..options.n_prompt], 1)?;
            wait_for_tokens(&mut stream, 1)?;
            let took = began.elapsed().as_secs_f64();
            stream.stop();
            if round > 0 {
                prefill.0.push(options.n_prompt as f64 / took);
            }
        }
        for (&depth, decode) in depths.iter().zip(&mut decode) {
            let mut stream = submit(engine, sequence, &tokens[..depth.max(1)], options.n_decode + 1)?;
            wait_for_tokens(&mut stream, 1)?;
            let began = Instant::now();
            wait_for_tokens(&mut stream, options.n_decode)?;
            let took = began.elapsed().as_secs_f64();
            stream.stop();
            if round > 0 {
                decode.0.push(options.n_decode as f64 / took);
            }
        }
    }
    Ok((prefill, decode))
}

/// Tokens in the context of each of several sequences when decoding begins.
const BATCH_DEPTH: usize = 16;

/// How fast tokens come when so many sequences are decoded at once.
fn measure_batches(
    engine: &Engine,
    options: &BenchOptions,
    seqs: &[usize],
    vocab: u32,
    progress: &mut impl FnMut(&str),
) -> Result<Vec<BatchReport>, Error> {
    let mut reports = Vec::new();
    for &n_seqs in seqs {
        let mut speed = Samples(Vec::new());
        for round in 0..=options.repeats {
            progress(&format!("{n_seqs} sequences, round {round} of {}", options.repeats));
            // No two prompts begin alike, so that nothing is found in the cache.
            let first = |seq: usize| (1000 + ((round * n_seqs + seq) * 104_729) as u32) % vocab;
            let prompt = |seq| (0..BATCH_DEPTH as u32).map(|i| (first(seq) + i * 7919) % vocab).collect();
            let submit = |seq| {
                let mut request = Request::once(prompt(seq));
                (request.sampling, request.max_tokens) = (SamplingParams::greedy(), options.n_decode + 1);
                engine.submit(request)
            };
            let mut streams = (0..n_seqs).map(submit).collect::<Result<Vec<_>, _>>()?;
            streams.iter_mut().try_for_each(|stream| wait_for_tokens(stream, 1))?;
            let began = Instant::now();
            // Some of the first to begin are further by now.
            let n_before: usize = streams.iter_mut().map(take_ready).sum::<Result<usize, Error>>()?;
            streams.iter_mut().try_for_each(|stream| wait_for_tokens(stream, options.n_decode))?;
            let took = began.elapsed().as_secs_f64();
            streams.iter_mut().for_each(TokenStream::stop);
            if round > 0 {
                speed.0.push((n_seqs * options.n_decode - n_before) as f64 / took);
            }
        }
        reports.push(BatchReport { n_seqs, depth: BATCH_DEPTH, speed });
    }
    Ok(reports)
}

/// Takes the tokens that are there, and says how many they were.
fn take_ready(stream: &mut TokenStream) -> Result<usize, Error> {
    let mut n = 0;
    while let Some(event) = stream.try_next() {
        n += usize::from(matches!(event?, TokenEvent::Token { .. }));
    }
    Ok(n)
}

/// Tokens behind a prompt that is evaluated from its beginning.
fn submit(
    engine: &Engine,
    sequence: &Sequence,
    prompt: &[u32],
    max_tokens: usize,
) -> Result<TokenStream, Error> {
    sequence.clear()?;
    let mut request = Request::new(sequence, prompt.to_vec());
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), max_tokens);
    Ok(engine.submit(request)?)
}

fn wait_for_tokens(stream: &mut TokenStream, n: usize) -> Result<(), Error> {
    let mut n_left = n;
    while n_left > 0 {
        match stream.next().transpose()? {
            Some(TokenEvent::Token { .. }) => n_left -= 1,
            Some(TokenEvent::Prompt { .. }) => {}
            Some(TokenEvent::End(_)) | None => break,
        }
    }
    Ok(())
}

fn count_launches(engine: &Engine, is_eager: bool) -> Result<Launches, Error> {
    let kernels = engine.kernels(1)?.len();
    let plan = engine.plan(1)?;
    let recorded = plan.segments().iter().filter(|s| s.kind == SegmentKind::Recordable).count();
    Ok(Launches { by_host: if is_eager { kernels } else { recorded }, kernels })
}

/// What the CPU backend finds on this machine.
#[derive(Clone, Debug)]
pub struct CpuInfo {
    /// Instructions in use.
    pub level: String,
    /// Threads in use.
    pub threads: usize,
    /// Bytes per second that these threads read from memory, at best.
    pub read_bandwidth: f64,
}

impl CpuInfo {
    /// Looks, and measures.
    pub fn measure() -> Result<CpuInfo, Error> {
        let backend = CpuBackend::new(default_threads())?;
        let level = backend.level().to_string();
        Ok(CpuInfo { level, threads: backend.n_threads(), read_bandwidth: backend.read_bandwidth() })
    }
}
