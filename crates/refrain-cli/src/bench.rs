//! `refrain bench`: prefill and decode speed, compared with the memory bandwidth.

mod load; // many requests of random lengths

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::opts::{DeviceOpts, LoopOpts};
use crate::out::{Stdout, counted, short_count, short_rate, short_time, talk, thousands};
use crate::speculate::{SpeculateArg, SpeculateOpts};
use crate::{profile, resolve, speculate, stats};
use refrain::train::{
    LoraBench, LoraSpec, Masters, Precision, Targets, TrainBench, TrainBenchReport, bench_steps,
};
use refrain::{
    BenchOptions, BenchReport, BenchTarget, DType, DecodeReport, DraftWeights, GuessSource, LoadEvent,
    LoadListener, NamedShape, QuantMix, SHAPES, Samples, SessionOptions, SpeculationOptions, bench,
};
use refrain_hub::ByteSize;
use serde_json::json;
use std::num::NonZeroUsize;

/// Tokens in a row of a measured training step.
const TRAIN_CONTEXT: usize = 256;

/// Measure the speed of prefill, decode or training
///
/// Takes a model, or the shape of a well-known one with random weights, which needs no download. Decoding reads every
/// weight once per token, so its speed is compared with the read bandwidth, which is measured before the model is
/// loaded.
#[derive(clap::Args, Debug)]
#[command(override_usage = "\
refrain bench [OPTIONS] MODEL
       refrain bench [OPTIONS] --shape NAME        random weights
       refrain bench [OPTIONS] --train SHAPE       training steps
       refrain bench [OPTIONS] --load --url URL    a server")]
#[command(after_help = "\
Examples:
  refrain bench smollm2
  refrain bench --shape llama-3.2-1b --quant Q4_K_M -n 32
  refrain bench ./model.gguf -p 128 -n 64 -r 3 --json
  refrain bench smollm2 -p 0 --depth 16,512,2048       the cost of a longer context
  refrain bench --shape smollm2-135m -p 0 --seqs 1,8,32   several sequences at once
  refrain bench smollm2 --speculate ngram                 guesses, and plain decoding for comparison
  refrain bench --shape llama-3.1-8b --quant BF16 --draft-shape llama-3.2-1b --draft-acceptance 0.7 -p 0
  refrain bench smollm2 --load --rate 80% --html load.html   requests that arrive at random times
  refrain bench --load --url http://127.0.0.1:8080 --clients 32
  refrain bench --train llama-10m --batch 32 --context 256 --dtype bf16 --device cuda
  refrain bench --train llama-3.1-8b --lora --base-type q4_k_m --batch 4 --context 2048 --dtype bf16 --device cuda")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL", required_unless_present_any = ["shape", "train", "url"], conflicts_with_all = ["shape", "train"])]
    model: Option<String>,
    /// Use random weights of a well-known shape, such as llama-3.2-1b
    #[arg(long, value_name = "NAME")]
    shape: Option<String>,
    /// Type of the random weights: BF16, Q8_0, Q4_K_M, ...
    #[arg(long, value_name = "TYPE", default_value = "Q4_K_M", conflicts_with = "model")]
    quant: String,
    /// Tokens in the prompt; 0 skips prefill
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to decode; 0 skips decoding
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Tokens in the context when decoding starts; several depths, separated by commas, are measured one by one
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    depth: Vec<usize>,
    /// Batch sizes to decode, separated by commas; the speed is that of all sequences together
    #[arg(long, value_name = "N", value_delimiter = ',')]
    seqs: Vec<NonZeroUsize>,
    /// Number of measurements
    #[arg(short, long, value_name = "N", default_value = "5")]
    repeats: NonZeroUsize,
    /// Attach N random LoRA adapters of rank 16 to all linear layers; the sequences of a batch take turns
    #[arg(long, value_name = "N", conflicts_with_all = ["train", "load"])]
    adapters: Option<usize>,
    /// Measure training steps of a fresh model of a well-known shape, such as llama-10m
    #[arg(long, value_name = "SHAPE", conflicts_with = "shape", help_heading = "Training")]
    train: Option<String>,
    /// Rows in a training step
    #[arg(long, value_name = "N", default_value = "32", requires = "train", help_heading = "Training")]
    batch: NonZeroUsize,
    /// Context size in tokens; with --train, tokens in a row [default: what -p, -n and --depth need; 256 with --train]
    #[arg(short, long, value_name = "N")]
    context: Option<NonZeroUsize>,
    /// Element type of weights and activations
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "train", help_heading = "Training")]
    dtype: Precision,
    /// Master weights for bf16 training: f32 or none
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "train", help_heading = "Training")]
    masters: Masters,
    /// Train a LoRA adapter on all linear layers, over frozen weights
    #[arg(long, requires = "train", help_heading = "Training")]
    lora: bool,
    /// Rank of the adapter
    #[arg(long, value_name = "N", default_value = "16", requires = "lora", help_heading = "Training")]
    rank: NonZeroUsize,
    /// Type of the frozen weights: BF16, Q8_0, Q4_K_M, ... [default: that of --dtype]
    #[arg(long, value_name = "TYPE", requires = "lora", help_heading = "Training")]
    base_type: Option<String>,
    /// Recompute activations in the backward pass
    #[arg(long, requires = "train", help_heading = "Training")]
    checkpoint_activations: bool,
    /// Number of measured training steps
    #[arg(long, value_name = "N", default_value = "20", requires = "train", help_heading = "Training")]
    steps: NonZeroUsize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    speculate: SpeculateOpts,
    /// Guess with random weights of a well-known shape, such as llama-3.2-1b
    #[arg(long, value_name = "NAME", conflicts_with = "draft", help_heading = "Speculation")]
    draft_shape: Option<String>,
    /// Type of the weights of --draft-shape
    #[arg(
        long,
        value_name = "TYPE",
        default_value = "Q4_K_M",
        requires = "draft_shape",
        help_heading = "Speculation"
    )]
    draft_quant: String,
    /// Keep each guess with this probability, whatever the model says: random weights agree on nothing
    #[arg(long, value_name = "P", value_parser = parse_acceptance, help_heading = "Speculation")]
    draft_acceptance: Option<f32>,
    #[command(flatten)]
    load: load::LoadArgs,
    #[command(flatten)]
    repeat: LoopOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let spinner = Delayed::spinner("measuring");
    let (bar, verbose) = (spinner.handle(), context.verbose);
    let on_load = LoadListener::new(move |event| match event {
        LoadEvent::Planned(memory) if verbose => talk!("memory   {}", stats::memory_line(&memory)),
        LoadEvent::Uploaded { done_bytes, total_bytes } => {
            bar.set_message(format!(
                "uploading weights, {} of {}",
                ByteSize(done_bytes),
                ByteSize(total_bytes)
            ));
        }
        LoadEvent::Compiling { n_done, n_total } => {
            bar.set_message(format!("compiling kernels, {n_done} of {n_total}"));
        }
        _ => {}
    });
    if (args.train.is_some() || args.load.load) && (args.speculate.is_on() || args.draft_shape.is_some()) {
        let message = "guesses are measured with one sequence and with --seqs, not with --train or --load";
        return Err(Hinted::new(message, "remove --speculate, --draft and --draft-shape").into());
    }
    args.repeat.check(&args.device, args.speculate.is_on() || args.draft_shape.is_some(), false)?;
    if args.repeat.is_on() && (args.train.is_some() || args.load.load) {
        let message = "--loop device is measured with one sequence, not with --train or --load";
        return Err(Hinted::new(message, "remove --loop").into());
    }
    if let Some(name) = &args.train {
        let shape = *find_shape(name)?;
        return measure_training(args, shape, on_load, &spinner, context);
    }
    if args.load.load {
        return load::measure(args, on_load, spinner, context);
    }
    let speculation = args.speculation(context)?;
    let options = BenchOptions {
        session: SessionOptions {
            on_load,
            speculation,
            loops: args.repeat.mode(),
            ..args.device.tried_session(args.context.map(NonZeroUsize::get), context)?
        },
        n_prompt: args.prompt_tokens,
        n_decode: args.max_tokens,
        depths: args.depth.clone(),
        seqs: args.seqs.iter().map(|n| n.get()).collect(),
        repeats: args.repeats.get(),
        adapters: args.adapters.unwrap_or(0),
    };
    let progress = |phase: &str| spinner.say(phase.to_owned());
    let report = match &args.shape {
        Some(name) => {
            let (shape, mix) = (find_shape(name)?, find_mix(&args.quant)?);
            bench(&BenchTarget::Shape(shape, mix), &options, progress)?
        }
        None => {
            let files = resolve::find(args.model.as_deref(), context)?.files()?;
            bench(&BenchTarget::Files(&files), &options, progress)?
        }
    };
    drop(spinner);
    if let Some((status, timeline)) = &report.device {
        profile::report(&format!("{} on {}", report.name, report.backend), status, timeline, &args.device)?;
    }
    let mut out = Stdout::new();
    if args.json {
        return out.json(&to_json(&report, args));
    }
    print(&mut out, &report, args)?;
    let status = report.device.as_ref().map(|(status, _)| status);
    if let Some(line) = stats::bits_line(args.device.reproducible, status) {
        out.line(line)?;
    }
    if context.verbose {
        if let Some((status, _)) = &report.device {
            stats::print_graphs(status);
        }
        for (layout, bytes) in &report.layouts {
            talk!("{layout}: {:.1} MiB of weights", *bytes as f64 / (1 << 20) as f64);
        }
    }
    Ok(())
}

fn parse_acceptance(text: &str) -> Result<f32, String> {
    let p = text.parse().ok().filter(|p| (0.0..=1.0).contains(p));
    p.ok_or_else(|| "must be a probability from 0 to 1".to_owned())
}

impl Args {
    /// The guesses to measure.
    fn speculation(&self, context: &CliContext) -> anyhow::Result<SpeculationOptions> {
        let mut options = match &self.draft_shape {
            Some(name) => {
                if self.speculate.speculate == SpeculateArg::Ngram {
                    let hint = "remove --speculate ngram or --draft-shape";
                    return Err(Hinted::new(
                        "guesses come from n-grams or from a draft model, not from both",
                        hint,
                    )
                    .into());
                }
                let draft = DraftWeights::random(find_shape(name)?, find_mix(&self.draft_quant)?)?;
                let max_draft = self.speculate.draft_tokens;
                SpeculationOptions {
                    source: GuessSource::Model(draft),
                    max_draft,
                    ..SpeculationOptions::default()
                }
            }
            None => {
                self.speculate.check(self.device.verify.is_some())?;
                self.speculate.options(context)?
            }
        };
        options.forced_acceptance = self.draft_acceptance;
        if self.draft_acceptance.is_some() && !options.is_on() {
            let hint = "add --speculate ngram, --draft MODEL or --draft-shape NAME";
            return Err(Hinted::new("--draft-acceptance keeps guesses, and nothing guesses", hint).into());
        }
        Ok(options)
    }
}

/// Measures training.
fn measure_training(
    args: &Args,
    shape: NamedShape,
    on_load: LoadListener,
    spinner: &Delayed,
    context: &CliContext,
) -> anyhow::Result<()> {
    if args.device.reproducible {
        let message = "--reproducible is for generation: all steps of a training run divide their work alike";
        return Err(Hinted::new(message, "remove it, or remove --train").into());
    }
    let session = args.device.tried_session(None, context)?;
    let dtype = match args.dtype {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
    };
    let lora = match args.lora {
        true => {
            let base = args.base_type.as_deref().map_or(Ok(QuantMix::All(dtype)), find_mix)?;
            let rank = args.rank.get();
            let (alpha, targets) = (2.0 * rank as f64, Targets::All);
            let spec = LoraSpec { rank, alpha, rslora: false, dropout: 0.0, targets };
            Some(LoraBench { spec, base })
        }
        false => None,
    };
    let bench = TrainBench {
        device: session.device,
        ahead: session.ahead,
        verify_every: session.verify_every,
        graph_choice: session.graph_choice,
        shape,
        batch: args.batch.get(),
        context: args.context.map_or(TRAIN_CONTEXT, NonZeroUsize::get),
        dtype,
        masters: args.masters == Masters::F32,
        lora,
        recompute: args.checkpoint_activations,
        n_steps: args.steps.get(),
        on_load,
    };
    let report = bench_steps(&bench, |phase| spinner.say(phase.to_owned()))?;
    let mut out = Stdout::new();
    if args.json {
        return out.json(&training_json(&report, &bench, args));
    }
    let parameters = short_count(report.n_parameters as u64);
    let trained = match args.lora {
        true => {
            let stored = args.base_type.clone().unwrap_or_else(|| args.dtype.to_string()).to_uppercase();
            let n = short_count(report.n_trained as u64);
            format!(" in {stored}, {n} of an adapter of rank {}", args.rank)
        }
        false => String::new(),
    };
    out.line(format_args!(
        "{}: {parameters} parameters{trained}, {} x {} tokens in {}, on {}",
        report.name, bench.batch, bench.context, args.dtype, report.backend
    ))?;
    let (low, high) = report.seconds.range();
    out.line(format_args!(
        "step     {}  ({} to {}), {} tok/s",
        short_time(report.seconds.mean()),
        short_time(low),
        short_time(high),
        short_rate(report.tokens_per_second())
    ))?;
    let rate = report.step_flops / report.seconds.mean();
    let share = report.peak_share().zip(report.peak_flops).map_or_else(String::new, |(share, peak)| {
        format!(", {:.1} % of the {}FLOPS of {}", 100.0 * share, short_flops(peak), report.device_name)
    });
    let flops = short_flops(report.step_flops);
    out.line(format_args!("compute  {flops}FLOP per step, {}FLOPS{share}", short_flops(rate)))?;
    let launches = match report.launches {
        Some(n) => format!("{} replayed, {n} per step", counted(report.n_replayed, "step")),
        None => "none replayed".to_owned(),
    };
    out.line(format_args!("launches {launches}"))?;
    if !report.host_seconds.0.is_empty() {
        out.line(format_args!(
            "host     {:.0} us per step, {} in flight; ready in {:.2} s",
            report.host_us(),
            counted(report.in_flight, "step"),
            report.ready_seconds
        ))?;
    }
    let resident =
        report.resident.map_or_else(String::new, |r| format!(", {} resident at peak", ByteSize(r.most)));
    out.line(format_args!("memory   {} estimated{resident}", ByteSize(report.estimated_bytes)))?;
    if context.verbose
        && let Some(status) = &report.device
    {
        stats::print_graphs(status);
    }
    Ok(())
}

/// A short count of operations with the unit's prefix: `527 G`.
fn short_flops(flops: f64) -> String {
    match flops {
        f if f >= 1e14 => format!("{:.0} T", f / 1e12),
        f if f >= 1e12 => format!("{:.2} T", f / 1e12),
        f if f >= 1e11 => format!("{:.0} G", f / 1e9),
        f => format!("{:.2} G", f / 1e9),
    }
}

fn training_json(report: &TrainBenchReport, bench: &TrainBench, args: &Args) -> serde_json::Value {
    json!({
        "model": report.name,
        "backend": report.backend,
        "device": report.device_name,
        "parameters": report.n_parameters,
        "trained_parameters": report.n_trained,
        "lora_rank": bench.lora.as_ref().map(|lora| lora.spec.rank),
        "base_type": bench.lora.as_ref().map(|_| args.base_type.clone().unwrap_or_else(|| args.dtype.to_string())),
        "batch": bench.batch,
        "context": bench.context,
        "dtype": args.dtype.to_string(),
        "masters": args.masters.to_string(),
        "steps": report.seconds.0.len(),
        "ms_per_step": { "mean": report.ms(), "median": 1e3 * report.seconds.median(), "samples": report.seconds.0.iter().map(|s| 1e3 * s).collect::<Vec<_>>() },
        "tokens_per_second": report.tokens_per_second(),
        "flop_per_step": report.step_flops,
        "peak_flops": report.peak_flops,
        "peak_share": report.peak_share(),
        "host_us_per_step": (!report.host_seconds.0.is_empty()).then(|| report.host_us()),
        "sending_us_per_step": report.sending_seconds.map(|s| 1e6 * s),
        "steps_in_flight": report.in_flight,
        "ready_seconds": report.ready_seconds,
        "compared_steps": report.device.as_ref().map(|status| status.compared.n_steps),
        "replayed_steps": report.n_replayed,
        "launches_per_step": report.launches,
        "estimated_bytes": report.estimated_bytes,
        "arena_bytes": report.device.as_ref().map(|status| status.memory.arena_bytes),
        "workspace_bytes": report.device.as_ref().map(|status| status.memory.workspace_bytes),
        "resident_bytes_at_most": report.resident.map(|r| r.most),
        "first_loss": report.losses[0],
        "last_loss": report.losses[1],
    })
}

fn find_shape(name: &str) -> anyhow::Result<&'static NamedShape> {
    let known = || SHAPES.map(|s| s.name).join(", ");
    NamedShape::find(name).ok_or_else(|| {
        Hinted::new(format!("there is no shape {name:?}"), format!("shapes are {}", known())).into()
    })
}

fn find_mix(name: &str) -> anyhow::Result<QuantMix> {
    QuantMix::from_name(name).ok_or_else(|| {
        let hint = "types are Q4_K_M and those of GGUF files: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K, ...";
        Hinted::new(format!("there is no weight type {name:?}"), hint).into()
    })
}

fn print(out: &mut Stdout, report: &BenchReport, args: &Args) -> anyhow::Result<()> {
    let gib = report.weight_bytes as f64 / (1u64 << 30) as f64;
    let parameters = short_count(report.n_parameters as u64);
    out.line(format_args!("{}: {parameters} parameters, {gib:.2} GiB, on {}", report.name, report.backend))?;
    let resident = report.resident.map_or_else(String::new, |r| {
        format!(", {} resident, {} at peak", ByteSize(r.now), ByteSize(r.most))
    });
    out.line(format_args!("ready in {:.2} s{resident}", report.load_seconds))?;
    if let Some((status, _)) = &report.device {
        out.line(format_args!("weights  {}", stats::upload_line(&status.upload)))?;
    }
    if !report.prefill.0.is_empty() {
        let tokens = counted(args.prompt_tokens, "token");
        out.line(format_args!("prefill  {tokens:>13}  {}", spread(&report.prefill)))?;
    }
    for decode in &report.decode {
        print_decode(out, report, decode, args)?;
        if let Some(cores) = &decode.busy_cores {
            out.line(format_args!("         {:.2} CPU cores busy", cores.median()))?;
        }
    }
    let alone = report.batches.iter().find(|batch| batch.n_seqs == 1).map(|batch| batch.speed.median());
    for batch in &report.batches {
        let times = alone.filter(|_| batch.n_seqs > 1).map(|one| batch.speed.median() / one);
        let times = times.map_or_else(String::new, |times| format!("  {times:.2} times one sequence"));
        let (n, speed) = (counted(batch.n_seqs, "sequence"), spread(&batch.speed));
        out.line(format_args!("batch    {n:>13}  {speed}{times}"))?;
    }
    if !report.decode.is_empty() {
        if let Some(launches) = report.launches {
            let (by_host, kernels) =
                (counted(launches.by_host, "launch"), counted(launches.kernels, "kernel"));
            out.line(format_args!("         {by_host} and {kernels} per token"))?;
        }
        out.line(format_args!("         {}", report.decode_steps))?;
        if let Some(verify) = &report.verify_steps {
            out.line(format_args!("verify   {verify}"))?;
        }
        if let Some(speculation) = &report.speculation {
            let drafting = speculation.drafting.as_secs_f64() * 1e3 / speculation.steps.max(1) as f64;
            out.line(format_args!("guesses  {speculation}; {drafting:.3} ms of drafting per step"))?;
        }
    }
    Ok(())
}

/// Prints the decode speed at one depth in two lines, with the depth if there are several.
fn print_decode(
    out: &mut Stdout,
    report: &BenchReport,
    decode: &DecodeReport,
    args: &Args,
) -> anyhow::Result<()> {
    let depth = match report.decode.len() {
        1 => String::new(),
        _ => format!("  after {}", thousands(decode.depth)),
    };
    let tokens = counted(args.max_tokens, "token");
    out.line(format_args!("decode   {tokens:>13}  {}{depth}", spread(&decode.speed)))?;
    if let Some((plain, times)) = decode.plain.as_ref().zip(decode.speedup()) {
        let plain = spread(plain);
        out.line(format_args!("without guesses        {plain}; guessing is {times:.3} times as fast"))?;
    }
    let (per_token, rate) = (decode.bytes_per_token as f64 / 1e9, decode.bandwidth() / 1e9);
    let who = if report.backend == "cpu" { "this machine" } else { "this GPU" };
    let best = report.read_bandwidth.zip(report.bandwidth_share(decode));
    let share = best.map_or_else(String::new, |(best, share)| {
        format!(", {:.0} % of the {:.1} GB/s that {who} reads", 100.0 * share, best / 1e9)
    });
    let each = short_time(decode.ms() * 1e-3);
    out.line(format_args!("         {each} and {per_token:.3} GB per token, {rate:.1} GB/s{share}"))
}

fn spread(samples: &Samples) -> String {
    let (low, high) = samples.range();
    format!("{:>8} tok/s  ({} to {})", short_rate(samples.median()), short_rate(low), short_rate(high))
}

fn to_json(report: &BenchReport, args: &Args) -> serde_json::Value {
    let samples = |s: &Samples| json!({ "median": s.median(), "samples": s.0 });
    let decode = |d: &DecodeReport| {
        json!({
            "depth": d.depth,
            "tokens_per_second": samples(&d.speed),
            "ms_per_token": d.ms(),
            "bytes_per_token": d.bytes_per_token,
            "busy_cores": d.busy_cores.as_ref().map(samples),
            "bytes_per_second": d.bandwidth(),
            "read_bandwidth_share": report.bandwidth_share(d),
            "plain_tokens_per_second": d.plain.as_ref().map(samples),
            "speedup": d.speedup(),
        })
    };
    let memory = report.device.as_ref().map(|(status, _)| {
        let m = &status.memory;
        json!({
            "weight_bytes": m.weight_bytes,
            "kv_bytes": m.kv_bytes,
            "arena_bytes": m.arena_bytes,
            "workspace_bytes": m.workspace_bytes,
            "free_bytes": m.free_bytes,
            "device_bytes": m.device_bytes,
            "unified": m.unified,
            "host_weight_bytes": m.host_weight_bytes,
        })
    });
    json!({
        "model": report.name,
        "backend": report.backend,
        "reproducible": report.device.as_ref().is_none_or(|(status, _)| status.reproducible),
        "parameters": report.n_parameters,
        "weight_bytes": report.weight_bytes,
        "quant": args.shape.as_ref().map(|_| &args.quant),
        "prompt_tokens": args.prompt_tokens,
        "decode_tokens": args.max_tokens,
        "prefill_tokens_per_second": samples(&report.prefill),
        "decode": report.decode.iter().map(decode).collect::<Vec<_>>(),
        "batches": report.batches.iter().map(|batch| json!({
            "n_seqs": batch.n_seqs,
            "depth": batch.depth,
            "tokens_per_second": samples(&batch.speed),
        })).collect::<Vec<_>>(),
        "read_bytes_per_second": report.read_bandwidth,
        "launches_per_token": report.launches.map(|l| l.by_host),
        "kernels_per_token": report.launches.map(|l| l.kernels),
        "load_seconds": report.load_seconds,
        "upload_seconds": report.device.as_ref().map(|(s, _)| s.upload.took.as_secs_f64()),
        "upload_bytes": report.device.as_ref().map(|(s, _)| s.upload.bytes),
        "resident_bytes": report.resident.map(|r| r.now),
        "resident_bytes_at_most": report.resident.map(|r| r.most),
        "decode_steps": stats::tally_json(&report.decode_steps),
        "verify_steps": report.verify_steps.as_ref().map(stats::tally_json),
        "speculation": report.speculation.as_ref().map(speculate::tally_json),
        "memory": memory,
    })
}
