//! `refrain train`: trains a model from scratch, or continues with an existing one.

use crate::bars::{Delayed, Phases};
use crate::cli::CliContext;
use crate::fail::{Hinted, Interrupted};
use crate::opts::{self, DeviceArg, DeviceOpts, ExpertsArg, GraphArg, KvArg, MethodArg, PleArg};
use crate::out::{DIM, Stdout, counted, short_count, short_rate, talk, thousands};
use crate::{profile, resolve};
use refrain::graph::Ran;
use refrain::train::{
    Checkpoint, Clip, ConfigOverlay, EvalSource, Export, ExportForm, Finished, GraphChoice, Masters,
    MemorySize, NewModel, OnLong, Order, Paths, Precision, Preparing, Resume, ScheduleKind, TokenizerSource,
    TrainConfig, TrainError, TrainEvent, TrainOptions, Training,
};
use refrain::{ModelFiles, SessionOptions};
use refrain_driver::DeviceKind;
use serde_json::json;
use std::io::IsTerminal;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

/// Output folder of a run that names none.
const USUAL_OUT: &str = "run";
/// Interval of progress lines if standard error is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Train a model, from scratch or from an existing one
///
/// A run is configured by a file, by flags, or by both; flags override the file. Checkpoints, the log, a page with curves
/// and the trained model go to the folder --out. Ctrl-C finishes the step and saves; --resume continues from there, bit
/// for bit.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain run --raw \"Once upon a time\" -n 300 --seed 1 > story.txt
  refrain train --new llama-1m --data story.txt --tokenizer train:512 --context 64 --batch 4 \\
    --steps 40 --lr 3e-3 --warmup 5 --sample-every 20 --sample-prompt \"She was\" --out story
  refrain run story/model.gguf \"She was\"            a text that the model has memorised

  refrain train run.toml --lr 1e-4 --out second     a file, with two keys changed
  refrain train --from smollm2 --data chats.jsonl --dtype bf16 --eval 0.05 --eval-every 100
  refrain train --resume=story --steps 80           forty more steps
  refrain train --new llama-110m --data big.txt --batch 16 --context 1024 --dry-run")]
pub(crate) struct Args {
    /// Configuration file
    #[arg(value_name = "CONFIG.toml")]
    config: Option<PathBuf>,
    #[command(flatten)]
    source: SourceOpts,
    #[command(flatten)]
    data: DataOpts,
    #[command(flatten)]
    steps: StepOpts,
    #[command(flatten)]
    run: RunOpts,
    #[command(flatten)]
    device: TrainDeviceOpts,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model and data")]
struct SourceOpts {
    /// Model to start from: a GGUF file, a Hugging Face folder or a name
    #[arg(long, value_name = "MODEL", conflicts_with = "new")]
    from: Option<String>,
    /// Model to create: the name of a shape such as llama-10m, or a table of sizes such as
    /// '{ arch = "llama", n_layers = 2, hidden = 64, ffn = 192, n_heads = 4 }'
    #[arg(long, value_name = "SHAPE", value_parser = parse_new)]
    new: Option<NewModel>,
    /// Training files: text, or JSONL (messages, prompt and completion, instructions)
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Option<Vec<PathBuf>>,
    /// Tokenizer: a tokenizer.json, a model, or train:N to train one with N tokens [default: the tokenizer of --from, or
    /// one trained for --new]
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<TokenizerSource>,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model and data")]
pub(crate) struct DataOpts {
    /// Tokens per row [default: 256]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Order of the samples: shuffle packs documents into rows; file keeps the order of the text [default: shuffle]
    #[arg(long, value_name = "ORDER")]
    order: Option<Order>,
    /// What to do with a conversation longer than a row: truncate or drop [default: truncate]
    #[arg(long, value_name = "WHAT")]
    on_long: Option<OnLong>,
    /// Held-out data: a file, or the share of the training data to hold out, such as 0.05
    #[arg(long, value_name = "FILE|SHARE")]
    eval: Option<EvalSource>,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Steps")]
pub(crate) struct StepOpts {
    /// Optimiser steps [default: 1000]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Rows per micro-step [default: 8]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Micro-steps whose gradients are accumulated before the optimiser runs [default: 1]
    #[arg(long, value_name = "N")]
    accumulate: Option<usize>,
    /// Peak learning rate [default: 3e-4; finetune: 2e-4, with --full 2e-5]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    lr: Option<f64>,
    /// Learning rate that cosine and linear end at [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    min_lr: Option<f64>,
    /// Shape of the learning rate after warm-up: cosine, linear or constant [default: cosine]
    #[arg(long, value_name = "SHAPE")]
    schedule: Option<ScheduleKind>,
    /// Steps over which the learning rate rises to its peak [default: 0]
    #[arg(long, value_name = "N")]
    warmup: Option<u64>,
    /// AdamW's weight decay, on matrices and embeddings only [default: 0.1; finetune: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    weight_decay: Option<f64>,
    /// AdamW's decay rates of the first and second moment [default: 0.9,0.95]
    #[arg(long, value_name = "B1,B2", value_parser = parse_betas, allow_negative_numbers = true)]
    betas: Option<Betas>,
    /// Added to the denominator of AdamW's update [default: 1e-8]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    eps: Option<f64>,
    /// Largest global gradient norm, or none [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    clip: Option<Clip>,
    /// Fraction of activations that dropout zeroes [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    dropout: Option<f64>,
    /// Element type of weights and activations: f32 or bf16 [default: f32; finetune: bf16]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Precision>,
    /// Master weights for bf16 weights: f32 or none [default: f32]
    #[arg(long, value_name = "TYPE")]
    masters: Option<Masters>,
    /// Recompute a layer's activations in the backward pass: less memory, about a third more time
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    checkpoint_activations: Option<bool>,
    /// Seed of initial weights, shuffling and dropout [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Run")]
pub(crate) struct RunOpts {
    /// Folder for checkpoints, log, report and the trained model [default: run]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue from the latest checkpoint in --out, or in a folder, with its configuration
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    resume: Option<Option<PathBuf>>,
    /// Steps between two checkpoints; the last step is always saved
    #[arg(long, value_name = "N")]
    save_every: Option<u64>,
    /// Checkpoints to keep, besides the best one [default: 3]
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    /// Steps between two held-out losses
    #[arg(long, value_name = "N")]
    eval_every: Option<u64>,
    /// Steps between two sampled texts
    #[arg(long, value_name = "N")]
    sample_every: Option<u64>,
    /// Text that samples continue
    #[arg(long, value_name = "TEXT")]
    sample_prompt: Option<String>,
    /// How the trained model is written to --out: both, gguf, hf or none [default: both]
    #[arg(long, value_name = "FORM")]
    export: Option<Export>,
    /// JSONL log, one object per step [default: log.jsonl in --out]
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Read all input, print what the run would need, and stop
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object at the end of the run
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Device")]
pub(crate) struct TrainDeviceOpts {
    /// Device: auto, cpu, cuda, cuda:N or sim (a simulated CUDA device: slow) [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = known_device)]
    device: Option<String>,
    /// Whether steps must be replayed as recorded graphs: auto, require or off [default: require on a GPU]
    #[arg(long, value_name = "MODE")]
    graph: Option<GraphChoice>,
    /// How graphs are recorded
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    graph_method: MethodArg,
    /// Time limit of the stream-capture trial, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20_000, hide = true)]
    trial_limit: u64,
    /// Compare micro-steps with their eager run: every:N compares every Nth. For a micro-step that differs, the eager
    /// result is used; with --graph require the run ends, with auto its graph is not used for some steps
    #[arg(long, value_name = "every:N", value_parser = opts::parse_verify)]
    verify: Option<NonZeroU32>,
    /// Faults to inject on the simulated device, such as "on 3rd launch: illegal address"
    #[arg(long, value_name = "SCRIPT")]
    faults: Option<String>,
    /// Number of CPU threads [default: suits the machine]
    #[arg(short, long, value_name = "N", value_parser = opts::parse_threads)]
    threads: Option<NonZeroUsize>,
}

/// A run as requested by a command.
pub(crate) struct TrainRequest<'a> {
    /// Defaults of the command.
    pub(crate) usual: TrainConfig,
    /// Configuration file.
    pub(crate) file: Option<&'a Path>,
    /// Keys set by flags.
    pub(crate) overlay: ConfigOverlay,
    /// Whether all weights are trained, regardless of the configuration.
    pub(crate) is_full: bool,
    pub(crate) run: &'a RunOpts,
    pub(crate) device: &'a TrainDeviceOpts,
}

pub(crate) fn run(args: Args, context: &CliContext) -> anyhow::Result<()> {
    let mut overlay = overlay(&args.data, &args.steps, &args.run, &args.device);
    overlay.from = args.source.from.clone();
    overlay.new = args.source.new.clone();
    overlay.data = args.source.data.clone().map(Paths);
    overlay.tokenizer = args.source.tokenizer.clone();
    let (usual, file) = (TrainConfig::default(), args.config.as_deref());
    let (run, device) = (&args.run, &args.device);
    train(&TrainRequest { usual, file, overlay, is_full: false, run, device }, context)
}

/// Trains as requested.
pub(crate) fn train(request: &TrainRequest<'_>, context: &CliContext) -> anyhow::Result<()> {
    let config = request.configuration()?;
    config.validate().map_err(TrainError::from).map_err(refrain::Error::from)?;
    let options = request.options(&config, context)?;
    let is_dry = request.run.dry_run;
    // A dry run writes nothing.
    let out = if is_dry { None } else { config.out.clone() };
    let save_every = config.save_every.filter(|_| !is_dry);
    let training = prepare(TrainConfig { out, save_every, ..config }, options)?;
    if !context.quiet {
        print_start(&training);
    }
    if is_dry {
        return print_needs(&training);
    }
    let listening = context.interrupt.listen();
    let pressed = listening.flag();
    let mut progress = TrainProgress::new(&training, context);
    let out = training.config().out.clone().unwrap_or_default();
    let from = training.config().from.clone();
    let finished = training.run(&|| pressed.load(Ordering::Relaxed), &mut |event| progress.show(event));
    drop(progress);
    let finished = finished?;
    report_end(&finished, &out, from.as_deref(), request.run, context)
}

/// Keys set by the flags that commands share.
pub(crate) fn overlay(
    data: &DataOpts,
    steps: &StepOpts,
    run: &RunOpts,
    device: &TrainDeviceOpts,
) -> ConfigOverlay {
    ConfigOverlay {
        context: data.context,
        order: data.order,
        on_long: data.on_long,
        eval: data.eval.clone(),
        steps: steps.steps,
        batch: steps.batch,
        accumulate: steps.accumulate,
        lr: steps.lr,
        min_lr: steps.min_lr,
        schedule: steps.schedule,
        warmup: steps.warmup,
        weight_decay: steps.weight_decay,
        betas: steps.betas.map(|betas| betas.0),
        eps: steps.eps,
        clip: steps.clip,
        dropout: steps.dropout,
        dtype: steps.dtype,
        masters: steps.masters,
        checkpoint_activations: steps.checkpoint_activations,
        seed: steps.seed,
        out: run.out.clone(),
        resume: run.resume(),
        save_every: run.save_every,
        keep: run.keep,
        eval_every: run.eval_every,
        sample_every: run.sample_every,
        sample_prompt: run.sample_prompt.clone(),
        export: run.export,
        log: run.log.clone(),
        device: device.device.clone(),
        graph: device.graph,
        ..ConfigOverlay::default()
    }
}

impl RunOpts {
    /// Whether the run may continue from a checkpoint.
    pub(crate) fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    fn resume(&self) -> Option<Resume> {
        self.resume.as_ref().map(|folder| match folder {
            Some(folder) => Resume::From(folder.clone()),
            None => Resume::Switch(true),
        })
    }
}

impl TrainRequest<'_> {
    /// The configuration: of the checkpoint, if there is one, overridden by the file and then by the flags.
    fn configuration(&self) -> anyhow::Result<TrainConfig> {
        let refuse = |error: TrainError| anyhow::Error::from(refrain::Error::from(error));
        let file = self.file.map(ConfigOverlay::read).transpose();
        let file = file.map_err(|error| refuse(error.into()))?.unwrap_or_default();
        let out = self.run.out.clone().or_else(|| file.out.clone());
        let resume = self.run.resume().or_else(|| file.resume.clone());
        let folder = match &resume {
            Some(Resume::From(folder)) => Some(folder.clone()),
            Some(Resume::Switch(true)) => Some(out.clone().unwrap_or_else(|| USUAL_OUT.into())),
            Some(Resume::Switch(false)) | None => None,
        };
        // With `--resume` alone, a run without a checkpoint starts from the beginning.
        let may_start = resume == Some(Resume::Switch(true)) && self.names_model(&file);
        let mut config = self.usual.clone();
        if let Some(folder) = &folder {
            match Checkpoint::peek(folder) {
                Ok((path, state)) => {
                    config = state.config;
                    let is_run = path != *folder;
                    config.out = if is_run { Some(folder.clone()) } else { config.out };
                    config.resume = Resume::From(path);
                }
                Err(refrain::train::CheckpointError::NotFound { .. }) if may_start => {}
                Err(error) => return Err(refuse(error.into())),
            }
        }
        let resumed = config.resume.clone();
        let mut config = config.overlay(file).overlay(self.overlay.clone());
        config.resume = resumed;
        if self.is_full {
            config.lora = None;
        }
        if config.out.is_none() {
            config.out = Some(USUAL_OUT.into());
        }
        Ok(config)
    }

    fn names_model(&self, file: &ConfigOverlay) -> bool {
        let flags = &self.overlay;
        flags.from.is_some() || flags.new.is_some() || file.from.is_some() || file.new.is_some()
    }

    fn options(&self, config: &TrainConfig, context: &CliContext) -> anyhow::Result<TrainOptions> {
        let device = opts::parse_device(&config.device)
            .map_err(|known| Hinted::new(format!("device is `{}`", config.device), known))?;
        // A GPU must replay; the CPU has no graphs.
        let has_card = match device {
            DeviceArg::Cuda(_) | DeviceArg::Sim => true,
            DeviceArg::Auto => refrain_driver::Device::query(DeviceKind::Cuda(0)).is_ok(),
            DeviceArg::Cpu => false,
        };
        let graph = match config.graph {
            Some(GraphChoice::Require) => GraphArg::Require,
            Some(GraphChoice::Off) => GraphArg::Off,
            None if has_card => GraphArg::Require,
            None | Some(GraphChoice::Auto) => GraphArg::Auto,
        };
        let TrainDeviceOpts { graph_method, trial_limit, verify, faults, threads, .. } = self.device;
        let opts = DeviceOpts {
            device,
            graph,
            graph_method: *graph_method,
            trial_limit: *trial_limit,
            ahead: None,
            verify: *verify,
            reproducible: false,
            profile: None,
            faults: faults.clone(),
            threads: *threads,
            ple: PleArg::Auto,
            experts: ExpertsArg::Device,
            kv: KvArg::F16,
        };
        let files = config.from.as_deref().map(|name| open(name, context)).transpose()?;
        // A trial of stream capture starts a child process, which a dry run does not need.
        let SessionOptions { device, graph_choice, verify_every, .. } = match self.run.dry_run {
            true => opts.session(None, context)?,
            false => opts.tried_session(None, context)?,
        };
        let on_load = opts::load_listener(Phases::default(), context);
        let facts = vec![
            ("command".to_owned(), profile::command()),
            ("date".to_owned(), profile::date_utc(SystemTime::now())),
        ];
        Ok(TrainOptions { device, files, on_load, graph_choice, verify_every, facts })
    }
}

fn open(name: &str, context: &CliContext) -> anyhow::Result<ModelFiles> {
    resolve::find(Some(name), context)?.files()
}

fn prepare(config: TrainConfig, options: TrainOptions) -> anyhow::Result<Training> {
    let spinner = Delayed::spinner("opening the model");
    let mut progress = |what: Preparing| match what {
        Preparing::Tokenizer => spinner.say("training a tokenizer".into()),
        Preparing::Data { done_bytes, total_bytes } => {
            spinner.say(format!("reading data, {} of {}", MemorySize(done_bytes), MemorySize(total_bytes)));
        }
        Preparing::Memory => spinner.say("planning the step".into()),
        _ => spinner.say("opening the model".into()),
    };
    Ok(Training::prepare(config, options, &mut progress)?)
}

fn print_start(training: &Training) {
    let (config, model) = (training.config(), training.model());
    let report = training.data_report().to_string();
    for line in report.lines() {
        talk!("data     {line}");
    }
    if let Some(held_out) = training.held_out_report() {
        talk!("held out {}", counted(held_out.n_tokens as usize, "token"));
    }
    let trained = match &config.lora {
        Some(lora) => {
            let n = short_count(model.n_trained() as u64);
            format!(", {n} of them trained: LoRA of rank {}", lora.spec().rank)
        }
        None => String::new(),
    };
    talk!(
        "model    {} {}, {} parameters{trained}",
        config.from.as_deref().map_or("new", |_| "from"),
        config.from.as_deref().or(model.config().name.as_deref()).unwrap_or(model.config().arch.name()),
        short_count(model.n_parameters() as u64)
    );
    let memory = MemorySize(training.memory().total_bytes());
    let free = training.free_bytes().map_or_else(String::new, |free| format!(" of {}", MemorySize(free)));
    talk!("memory   about {memory}{free} on {}", training.device_name());
    talk!(
        "steps    {} of {} tokens, {} in all",
        thousands(config.steps),
        thousands(config.tokens_per_step()),
        short_count(config.steps.saturating_mul(config.tokens_per_step()))
    );
}

fn print_needs(training: &Training) -> anyhow::Result<()> {
    let free = training.free_bytes().unwrap_or(u64::MAX);
    Stdout::new().text(&training.memory().table(free))?;
    Ok(training.check_memory()?)
}

/// Progress of a run: a bar on a terminal, otherwise a line now and then.
struct TrainProgress {
    bar: Delayed,
    is_quiet: bool,
    lines: bool,
    last_line: Instant,
    n_steps: u64,
    step_flops: f64,
    tokens_per_step: f64,
    peak: Option<f64>,
    speed: Option<f64>,
}

impl TrainProgress {
    fn new(training: &Training, context: &CliContext) -> TrainProgress {
        let config = training.config();
        TrainProgress {
            bar: Delayed::steps(config.steps, 0),
            is_quiet: context.quiet,
            lines: !std::io::stderr().is_terminal(),
            last_line: Instant::now(),
            n_steps: config.steps,
            step_flops: training.step_flops(),
            tokens_per_step: config.tokens_per_step() as f64,
            peak: training.peak_flops(),
            speed: None,
        }
    }

    fn show(&mut self, event: &TrainEvent<'_>) {
        match event {
            TrainEvent::Resumed { path, step } => {
                self.bar.set(*step);
                self.bar.handle().reset_eta();
                self.say(&format!("continuing after step {} from {}", thousands(*step), path.display()));
            }
            TrainEvent::Step { record, outcome } => {
                let n_done = record.step + 1;
                // Smoothed to be readable.
                let speed = self.speed.map_or(record.tok_s, |speed| 0.9 * speed + 0.1 * record.tok_s);
                self.speed = Some(speed);
                let line = self.line(record.loss, speed, &outcome.ran);
                self.bar.set(n_done);
                self.bar.say(line.clone());
                let skipped =
                    if outcome.is_applied() { "" } else { ", not applied: its gradients are not finite" };
                let is_due = n_done == 1 || n_done == self.n_steps || self.last_line.elapsed() >= LINE_EVERY;
                if (self.lines && is_due) || !skipped.is_empty() {
                    self.last_line = Instant::now();
                    let left = (self.n_steps.saturating_sub(n_done)) as f64 * self.tokens_per_step / speed;
                    let left = Duration::from_secs_f64(if left.is_finite() { left.min(1e9) } else { 0.0 });
                    let (n_steps, left) = (thousands(self.n_steps), short_duration(left));
                    self.say(&format!("step {}/{n_steps}  {line}, {left} left{skipped}", thousands(n_done)));
                }
            }
            TrainEvent::Evaluated { record, is_best } => {
                let best = if *is_best { ", the lowest so far" } else { "" };
                let n_done = thousands(record.step + 1);
                self.say(&format!("step {n_done}  held-out loss {:.4}{best}", record.eval_loss));
            }
            TrainEvent::Sampled { step, text } => {
                self.say(&format!("step {}  {DIM}{}{DIM:#}", thousands(*step), text.trim_end()));
            }
            TrainEvent::Saved { path } => self.say(&format!("saved {}", path.display())),
            _ => {}
        }
    }

    fn line(&self, loss: f64, speed: f64, ran: &[Ran]) -> String {
        let share = self.peak.map_or_else(String::new, |peak| {
            format!("  {:.1} % of peak", 100.0 * self.step_flops * speed / self.tokens_per_step / peak)
        });
        let is_replayed = ran.iter().all(|ran| matches!(ran, Ran::Replayed { .. }));
        let how = if is_replayed { "replayed" } else { "eager" };
        format!("loss {loss:.4}  {} tok/s{share}  {how}", short_rate(speed))
    }

    fn say(&self, line: &str) {
        if !self.is_quiet {
            self.bar.above(|| talk!("{line}"));
        }
    }
}

fn short_duration(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

fn report_end(
    finished: &Finished,
    out: &Path,
    from: Option<&str>,
    run: &RunOpts,
    context: &CliContext,
) -> anyhow::Result<()> {
    let summary = &finished.summary;
    let mut stdout = Stdout::new();
    if run.json {
        stdout.json(&to_json(finished))?;
    } else {
        for export in &finished.exports {
            stdout.line(export.path.display())?;
        }
    }
    if !context.quiet {
        for error in &finished.not_exported {
            let hint = error.hint().map_or_else(String::new, |hint| format!("; {hint}"));
            talk!("not exported: {error}{hint}");
        }
        let loss = summary.progress.loss.map_or_else(String::new, |loss| format!(", loss {loss:.4}"));
        let best = summary.progress.best.map_or_else(String::new, |best| {
            format!(", lowest held-out loss {:.4} after step {}", best.loss, thousands(best.step))
        });
        let ran = match (summary.n_replayed, summary.n_eager) {
            (0, _) => String::new(),
            (n, 0) => format!(", {} replayed", thousands(n)),
            (n, eager) => format!(", {} replayed and {} eager", thousands(n), thousands(eager)),
        };
        talk!("{}{loss}{best}{ran}", counted(summary.step as usize, "step"));
        if let Some(compared) =
            finished.device.as_ref().map(|status| status.compared).filter(|c| c.n_steps > 0)
        {
            talk!(
                "verify   {} compared with eager, {} differed",
                counted(compared.n_steps as usize, "micro-step"),
                compared.n_mismatches
            );
        }
        say_other_best(finished);
        if let Some(report) = &finished.report {
            talk!("curves   {}", report.display());
        }
        if summary.interrupted {
            talk!("resume   refrain train --resume={}", out.display());
        } else if let Some(export) = finished.exports.first() {
            let prompt = run.sample_prompt.as_deref().unwrap_or("Once upon a time");
            let path = export.path.display();
            match (export.form, from) {
                (ExportForm::Adapter, Some(from)) => {
                    talk!("try it   refrain run --lora {path} {from} {prompt:?}");
                }
                (ExportForm::Hf, _) => talk!("try it   refrain run --raw {path} {prompt:?}"),
                (ExportForm::Gguf | ExportForm::Adapter, _) => {
                    talk!("try it   refrain run {path} {prompt:?}")
                }
            }
        }
    }
    if summary.interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// Says that the export is not the best model of the run, and how to export that one.
fn say_other_best(finished: &Finished) {
    let summary = &finished.summary;
    let (Some(best), Some(path)) = (summary.progress.best, &summary.best_checkpoint) else { return };
    if best.step != summary.step && !finished.exports.is_empty() {
        let (n, path) = (best.step, path.display());
        talk!("best     the export has the weights of the last step; export those of step {n} with:");
        talk!("         refrain train --resume={path} --steps {n} --out {path}-export");
    }
}

fn to_json(finished: &Finished) -> serde_json::Value {
    let summary = &finished.summary;
    let progress = &summary.progress;
    let path = |form: ExportForm| {
        let export = finished.exports.iter().find(|export| export.form == form);
        export.map(|export| export.path.display().to_string())
    };
    json!({
        "steps": summary.step,
        "interrupted": summary.interrupted,
        "loss": progress.loss,
        "best_step": progress.best.map(|best| best.step),
        "best_eval_loss": progress.best.map(|best| best.loss),
        "tokens": progress.n_tokens,
        "seconds": progress.seconds,
        "skipped_steps": summary.n_skipped,
        "replayed": summary.n_replayed,
        "eager": summary.n_eager,
        "compared": finished.device.as_ref().map(|status| status.compared.n_steps),
        "differed": finished.device.as_ref().map(|status| status.compared.n_mismatches),
        "best_checkpoint": summary.best_checkpoint.as_ref().map(|path| path.display().to_string()),
        "checkpoint": summary.checkpoint.as_ref().map(|path| path.display().to_string()),
        "report": finished.report.as_ref().map(|path| path.display().to_string()),
        "gguf": path(ExportForm::Gguf),
        "hf": path(ExportForm::Hf),
        "adapter": path(ExportForm::Adapter),
        "not_exported": finished.not_exported.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

/// The name of a shape, or a table as in a configuration file.
fn parse_new(text: &str) -> Result<NewModel, String> {
    if !text.trim_start().starts_with('{') {
        return Ok(NewModel::Named(text.to_owned()));
    }
    let overlay = ConfigOverlay::from_toml(&format!("new = {text}"));
    let overlay = overlay.map_err(|error| match error.hint() {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    })?;
    overlay.new.ok_or_else(|| "the table is empty".to_owned())
}

#[derive(Debug, Clone, Copy)]
struct Betas([f64; 2]);

fn parse_betas(text: &str) -> Result<Betas, String> {
    let numbers: Result<Vec<f64>, _> = text.split(',').map(|part| part.trim().parse()).collect();
    match numbers.as_deref() {
        Ok(&[first, second]) => Ok(Betas([first, second])),
        _ => Err("must be two numbers, such as 0.9,0.95".to_owned()),
    }
}

fn known_device(text: &str) -> Result<String, String> {
    opts::parse_device(text).map(|_: DeviceArg| text.to_owned())
}
