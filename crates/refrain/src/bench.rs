//! Benchmarks: prefill and decode speed of a model, compared with the bandwidth of the device's memory.

use crate::engines::{EngineCapacity, MonitoredEngine, lone_engine};
use crate::error::Error;
use crate::examine::read_bandwidth;
use crate::model::{Model, one_line};
use crate::session::{Device, SessionOptions};
use refrain_cpu::CpuBackend;
use refrain_cpu::pool::default_threads;
use refrain_cuda::{Status, Timeline};
use refrain_engine::{
    AdapterId, Engine, Request, RunnerOptions, SamplingParams, Sequence, Speculation, SpeculationTally,
    StepKind, Tally, TokenEvent, TokenStream,
};
use refrain_formats::ModelFiles;
use refrain_graph::SegmentKind;
use refrain_models::{BankAdapter, LoraSpec, NamedShape, QuantMix, Targets};
use refrain_tensor::{Bytes, DType, HostTensor, quant};
use std::sync::Arc;
use std::time::Instant;

/// The model to measure.
#[derive(Clone, Debug)]
pub enum BenchTarget<'a> {
    /// An opened model.
    Model(&'a Model),
    /// Opened files, which need no tokenizer.
    Files(&'a ModelFiles),
    /// Random weights of a well-known shape.
    Shape(&'a NamedShape, QuantMix),
}

impl BenchTarget<'_> {
    /// Name and weights.
    pub(crate) fn load(
        &self,
        progress: &mut impl FnMut(&str),
    ) -> Result<(String, Arc<refrain_models::Model>), Error> {
        Ok(match self {
            BenchTarget::Model(model) => (model.name().to_string(), model.weights().clone()),
            BenchTarget::Files(files) => {
                let weights = refrain_models::Model::load(files)?;
                let name =
                    weights.config().name.clone().unwrap_or_else(|| files.path().display().to_string());
                (one_line(&name), Arc::new(weights))
            }
            BenchTarget::Shape(shape, mix) => {
                progress("making random weights");
                (shape.name.to_string(), Arc::new(refrain_models::Model::random(shape, *mix)?))
            }
        })
    }

    /// Gives back the memory of file pages that a device has copied.
    pub(crate) fn release(&self) {
        match self {
            BenchTarget::Model(model) => model.files().release(),
            BenchTarget::Files(files) => files.release(),
            BenchTarget::Shape(..) => {}
        }
    }
}

/// Options of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Device and cache. A context, if one is given, must hold the prompt and every depth; without one it is as small as
    /// possible.
    pub session: SessionOptions,
    /// Tokens in the prompt.
    pub n_prompt: usize,
    /// Tokens to decode.
    pub n_decode: usize,
    /// Depths at which decoding is measured: tokens in the context when it starts.
    pub depths: Vec<usize>,
    /// Batch sizes for which decoding is measured.
    pub seqs: Vec<usize>,
    /// Number of measurements of each.
    pub repeats: usize,
    /// Random LoRA adapters of rank 16 in BF16 on all linear layers, of which the sequences of a batch take turns; 0 for none.
    pub adapters: usize,
}

impl BenchOptions {
    /// The adapter of a sequence.
    fn adapter(&self, seq: usize) -> Option<AdapterId> {
        seq.checked_rem(self.adapters).map(|id| AdapterId(id as u32))
    }
}

/// Measurements of one quantity.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(pub Vec<f64>);

impl Samples {
    /// The median: of an even number of measurements, the mean of the middle two.
    pub fn median(&self) -> f64 {
        self.quantiles([0.5])[0]
    }

    /// Quantiles, with a share of the measurements below each; between two measurements, interpolated.
    pub fn quantiles<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else { return [f64::NAN; N] };
        shares.map(|share| {
            let at = share.clamp(0.0, 1.0) * last as f64;
            let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
            low + (high - low) * at.fract()
        })
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

/// Decode speed at one depth.
#[derive(Clone, Debug)]
pub struct DecodeReport {
    /// Tokens in the context when decoding started.
    pub depth: usize,
    /// Tokens per second, with guesses if the session speculates.
    pub speed: Samples,
    /// Tokens per second without guesses, measured in the same rounds if the session speculates.
    pub plain: Option<Samples>,
    /// CPU cores that the process kept busy meanwhile, if the system reports it.
    pub busy_cores: Option<Samples>,
    /// Bytes that a token reads without guesses, halfway through the measurement.
    pub bytes_per_token: usize,
}

impl DecodeReport {
    /// How many times as fast as without guesses; `None` if the session does not speculate.
    pub fn speedup(&self) -> Option<f64> {
        self.plain.as_ref().map(|plain| self.speed.median() / plain.median())
    }

    /// Milliseconds per token.
    pub fn ms(&self) -> f64 {
        1e3 / self.speed.median()
    }

    /// Bytes per second that decoding reads.
    pub fn bandwidth(&self) -> f64 {
        self.speed.median() * self.bytes_per_token as f64
    }
}

/// Decode speed of a batch of sequences, each with its own prompt.
#[derive(Clone, Debug)]
pub struct BatchReport {
    /// Number of sequences.
    pub n_seqs: usize,
    /// Tokens in the context of each when decoding started.
    pub depth: usize,
    /// Tokens per second of all sequences together.
    pub speed: Samples,
}

/// Resident memory of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Current bytes.
    pub now: u64,
    /// Peak bytes.
    pub most: u64,
}

impl ProcessMemory {
    /// Reads that of this process, if the system reports it.
    pub fn of_this_process() -> Option<ProcessMemory> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        };
        Some(ProcessMemory { now: field("VmRSS:")?, most: field("VmHWM:")? })
    }
}

/// CPU time of all running threads of the process in seconds, if the system reports it.
fn cpu_seconds() -> Option<f64> {
    let of_task = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    // A thread that has just ended has no file any more.
    Some(1e-9 * tasks.filter_map(of_task).sum::<f64>()).filter(|seconds| *seconds > 0.0)
}

/// Result of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchReport {
    /// Name of the model or shape.
    pub name: String,
    /// Name of the backend.
    pub backend: &'static str,
    /// Number of parameters.
    pub n_parameters: usize,
    /// Size of the weights in bytes.
    pub weight_bytes: usize,
    /// Prefill speed in tokens per second.
    pub prefill: Samples,
    /// Decode speed at each depth; empty if decoding was not measured.
    pub decode: Vec<DecodeReport>,
    /// Decode speed for each batch size.
    pub batches: Vec<BatchReport>,
    /// Measured read bandwidth of the device's memory in bytes per second, before the model was loaded; `None` if it was
    /// not measured.
    pub read_bandwidth: Option<f64>,
    /// Seconds from opened files to a device that is ready.
    pub load_seconds: f64,
    /// Memory of the process at the end, if the system reports it.
    pub resident: Option<ProcessMemory>,
    /// How the decode steps at all depths ran, according to the ledger, including those of the warm-up round.
    pub decode_steps: Tally,
    /// The verify steps at all depths, likewise, if the session speculates.
    pub verify_steps: Option<Tally>,
    /// The guesses at all depths, likewise, if the session speculates.
    pub speculation: Option<SpeculationTally>,
    /// Kernels and host launches of a decode step; `None` on the CPU, which calls its kernels directly.
    pub launches: Option<Launches>,
    /// Memory, graphs and timings of a CUDA device, and the timeline if it was profiled; `None` on the CPU.
    pub device: Option<(Status, Timeline)>,
    /// The layouts of the weights in memory, with the bytes of each.
    pub layouts: Vec<(String, usize)>,
}

/// Launches of a decode step on a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    /// Host launches: one per recorded segment, or one per kernel if the step ran eagerly.
    pub by_host: usize,
    /// Kernels and copies.
    pub kernels: usize,
}

impl BenchReport {
    /// The bandwidth of decoding as a share of the measured one; `None` if that was not measured.
    pub fn bandwidth_share(&self, decode: &DecodeReport) -> Option<f64> {
        self.read_bandwidth.filter(|best| *best > 0.0).map(|best| decode.bandwidth() / best)
    }
}

/// Rank of random adapters.
const ADAPTER_RANK: usize = 16;

/// The model with adapters that have no effect but their cost.
fn with_random_adapters(
    weights: Arc<refrain_models::Model>,
    n: usize,
) -> Result<Arc<refrain_models::Model>, Error> {
    if n == 0 {
        return Ok(weights);
    }
    let (rank, alpha) = (ADAPTER_RANK, 2.0 * ADAPTER_RANK as f64);
    let spec = LoraSpec { rank, alpha, rslora: false, dropout: 0.0, targets: Targets::All };
    let mut bank = Vec::with_capacity(n);
    for id in 0..n {
        let mut adapter = weights.fresh_adapter(&spec, id as u64)?;
        for tensor in adapter.parts.iter_mut().flat_map(|part| [&mut part.a, &mut part.b]) {
            let mut bytes = vec![0; 2 * tensor.shape().n_elements()];
            let wrap =
                |source| refrain_models::ModelError::Tensor { name: "a random adapter".into(), source };
            quant::quantize(DType::BF16, &tensor.to_f32().map_err(wrap)?, &mut bytes).map_err(wrap)?;
            *tensor = HostTensor::new(DType::BF16, tensor.shape(), Bytes::new(bytes)).map_err(wrap)?;
        }
        bank.push(BankAdapter { name: format!("random {id}"), adapter, scale: 1.0 });
    }
    Ok(Arc::new(weights.with_adapter_bank(&bank)?))
}

/// Runs a benchmark. `progress` receives a description of each phase.
pub fn bench(
    target: &BenchTarget<'_>,
    options: &BenchOptions,
    mut progress: impl FnMut(&str),
) -> Result<BenchReport, Error> {
    progress("measuring the read bandwidth");
    // Before the model is loaded: next to a large model there is too little free memory to measure it well.
    let read_bandwidth = match &options.session.device {
        // The host's speed says nothing about a simulated device.
        Device::Sim { .. } => None,
        device @ (Device::Cpu { .. } | Device::Cuda { .. }) => Some(read_bandwidth(device)?),
    };
    let (name, weights) = target.load(&mut progress)?;
    let weights = with_random_adapters(weights, options.adapters)?;
    let depths: &[usize] = if options.n_decode > 0 { &options.depths } else { &[] };
    let seqs: &[usize] = if options.n_decode > 0 { &options.seqs } else { &[] };
    let deepest =
        depths.iter().copied().max().unwrap_or(0).max(if seqs.is_empty() { 0 } else { BATCH_DEPTH });
    let needed = options.n_prompt.max(deepest.saturating_add(options.n_decode).saturating_add(1));
    let most = weights.config().n_context;
    let limit = options.session.context.unwrap_or(most).min(most);
    if needed > limit {
        return Err(Error::BenchContext { needed, limit, most });
    }
    let context = options.session.context.unwrap_or(needed);
    let session = SessionOptions { context: Some(context), ..options.session.clone() };
    let began = Instant::now();
    progress("loading the model");
    let most_seqs = seqs.iter().copied().max().unwrap_or(0);
    let room = |context: usize| EngineCapacity {
        // Whole blocks for each sequence, and for the one that is measured alone.
        n_positions: (most_seqs + 1) * context.next_multiple_of(RunnerOptions::default().kv_block),
        max_seqs: most_seqs.max(1),
        n_recurrent: most_seqs + 1,
        max_requests: most_seqs.max(1),
        context,
    };
    let (MonitoredEngine { engine, monitor, .. }, EngineCapacity { context, .. }) =
        lone_engine(&weights, &name, &session, room)?;
    let sequence = engine.open_with(context, options.adapter(0))?;
    let load_seconds = began.elapsed().as_secs_f64();
    target.release();

    let vocab = weights.config().n_vocab as u32;
    // The choice of tokens does not matter; these avoid the first ids, which are often special.
    let tokens: Vec<u32> = (0..context as u32).map(|i| (1000 + i * 7919) % vocab).collect();
    let (prefill, decode) = measure(&engine, &sequence, options, depths, &tokens, &mut progress)?;
    let traffic = engine.plan(1)?.traffic();
    let decode = depths.iter().zip(decode).map(|(&depth, ([speed, plain], busy_cores))| {
        let plain = options.session.speculation.is_on().then_some(plain);
        let busy_cores = Some(busy_cores).filter(|samples| !samples.0.is_empty());
        let middle = depth.max(1) + options.n_decode / 2;
        let bytes_per_token = traffic.weight_bytes + traffic.kv_bytes(middle);
        DecodeReport { depth, speed, plain, busy_cores, bytes_per_token }
    });
    let batches = measure_batches(&engine, options, seqs, vocab, &mut progress)?;
    let ledger = sequence.ledger();
    let decode_steps = ledger.tally(StepKind::Decode).clone();
    let is_on = options.session.speculation.is_on();
    let verify_steps = is_on.then(|| ledger.tally(StepKind::Verify).clone());
    let speculation = is_on.then(|| ledger.speculation().clone());
    let is_eager = decode_steps.eager > 0;
    let launches = match monitor {
        Some(_) => Some(count_launches(&engine, is_eager)?),
        None => None,
    };
    let device = monitor.map(|monitor| (monitor.status(), monitor.timeline()));
    let (layouts, backend) = (engine.layouts()?, engine.backend());
    let resident = ProcessMemory::of_this_process();
    Ok(BenchReport {
        layouts,
        decode_steps,
        verify_steps,
        speculation,
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

/// Speed with and without guesses, and busy cores.
type DecodeSamples = ([Samples; 2], Samples);

/// Measures prefill, and decoding at each depth.
fn measure(
    engine: &Engine,
    sequence: &Sequence,
    options: &BenchOptions,
    depths: &[usize],
    tokens: &[u32],
    progress: &mut impl FnMut(&str),
) -> Result<(Samples, Vec<DecodeSamples>), Error> {
    let none = || Samples(Vec::new());
    let (mut prefill, mut decode) = (none(), vec![([none(), none()], none()); depths.len()]);
    let speculation = &options.session.speculation;
    // The first round warms caches and compiles the steps, and is not counted.
    for round in 0..=options.repeats {
        progress(&format!("round {round} of {}", options.repeats));
        if options.n_prompt > 0 {
            let began = Instant::now();
            let mut stream = submit(engine, sequence, &tokens[..options.n_prompt], 1, None)?;
            wait_for_tokens(&mut stream, 1)?;
            let took = began.elapsed().as_secs_f64();
            stream.stop();
            if round > 0 {
                prefill.0.push(options.n_prompt as f64 / took);
            }
        }
        for (&depth, (decode, busy_cores)) in depths.iter().zip(&mut decode) {
            let plain = speculation.is_on().then_some(None);
            for (guesses, samples) in [Some(speculation.of_request()), plain].into_iter().zip(decode) {
                let Some(guesses) = guesses else { continue };
                let prompt = &tokens[..depth.max(1)];
                let mut stream = submit(engine, sequence, prompt, options.n_decode + 1, guesses)?;
                wait_for_tokens(&mut stream, 1)?;
                let (began, cpu) = (Instant::now(), cpu_seconds());
                wait_for_tokens(&mut stream, options.n_decode)?;
                let took = began.elapsed().as_secs_f64();
                let cpu = cpu.zip(cpu_seconds()).map(|(before, after)| after - before);
                stream.stop();
                if round > 0 {
                    samples.0.push(options.n_decode as f64 / took);
                    busy_cores.0.extend(cpu.map(|cpu| cpu / took));
                }
            }
        }
    }
    Ok((prefill, decode))
}

/// Depth at which batches are measured.
const BATCH_DEPTH: usize = 16;

/// Measures decoding for each batch size.
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
            // No two prompts have a common prefix, so that the prefix cache never hits.
            let first = |seq: usize| (1000 + ((round * n_seqs + seq) * 104_729) as u32) % vocab;
            let prompt = |seq| (0..BATCH_DEPTH as u32).map(|i| (first(seq) + i * 7919) % vocab).collect();
            let submit = |seq| {
                let mut request = Request::once(prompt(seq));
                (request.sampling, request.max_tokens) = (SamplingParams::greedy(), options.n_decode + 1);
                request.speculation = options.session.speculation.of_request();
                request.adapter = options.adapter(seq);
                engine.submit(request)
            };
            let mut streams = (0..n_seqs).map(submit).collect::<Result<Vec<_>, _>>()?;
            streams.iter_mut().try_for_each(|stream| wait_for_tokens(stream, 1))?;
            let began = Instant::now();
            // The sequences that started first have further tokens by now, and end first: until then, all of them decode.
            let Some((earliest, others)) = streams.split_first_mut() else { continue };
            let n_early = take_ready(earliest)?;
            others.iter_mut().try_for_each(|stream| take_ready(stream).map(drop))?;
            let n_left = options.n_decode.saturating_sub(n_early).max(1);
            wait_for_tokens(earliest, n_left)?;
            let n_others = others.iter_mut().map(take_ready).sum::<Result<usize, Error>>()?;
            let took = began.elapsed().as_secs_f64();
            streams.iter_mut().for_each(TokenStream::stop);
            if round > 0 {
                speed.0.push((n_left + n_others) as f64 / took);
            }
        }
        reports.push(BatchReport { n_seqs, depth: BATCH_DEPTH, speed });
    }
    Ok(reports)
}

/// Collects the tokens that are ready and returns their number.
fn take_ready(stream: &mut TokenStream) -> Result<usize, Error> {
    let mut n = 0;
    while let Some(event) = stream.try_next() {
        n += usize::from(matches!(event?, TokenEvent::Token { .. }));
    }
    Ok(n)
}

/// Submits a prompt that is evaluated from its start.
fn submit(
    engine: &Engine,
    sequence: &Sequence,
    prompt: &[u32],
    max_tokens: usize,
    speculation: Option<Speculation>,
) -> Result<TokenStream, Error> {
    sequence.clear()?;
    let mut request = Request::new(sequence, prompt.to_vec());
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), max_tokens);
    request.speculation = speculation;
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

/// The CPU as the CPU backend sees it.
#[derive(Clone, Debug)]
pub struct CpuInfo {
    /// Instruction set in use.
    pub level: String,
    /// Number of threads in use.
    pub threads: usize,
    /// Measured read bandwidth of these threads in bytes per second.
    pub read_bandwidth: f64,
}

impl CpuInfo {
    /// Detects and measures it.
    pub fn measure() -> Result<CpuInfo, Error> {
        let backend = CpuBackend::new(default_threads())?;
        let level = backend.level().to_string();
        Ok(CpuInfo { level, threads: backend.n_threads(), read_bandwidth: backend.read_bandwidth() })
    }
}
