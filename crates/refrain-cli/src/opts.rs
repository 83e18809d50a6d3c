//! Flags shared by several commands.

use crate::bars::{Phase, Phases};
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::talk;
use crate::stats;
use crate::trial;
use clap::{Args, ValueEnum};
use refrain::{
    DType, Device, ExpertPlacement, FaultScript, Generate, GraphMode, LoadEvent, LoadListener, LoopMode,
    Method, Model, SamplingParams, Session, SessionOptions, SpeculationOptions, TablePlacement,
};
use refrain_driver::DeviceKind;
use refrain_driver::trial::MethodChoice;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

/// Device flags.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceOpts {
    /// Device: auto, cpu, cuda, cuda:N or sim (a simulated CUDA device: slow, for trying out graphs)
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub(crate) device: DeviceArg,
    /// Whether steps must be replayed as recorded graphs
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub(crate) graph: GraphArg,
    /// How graphs are recorded
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    pub(crate) graph_method: MethodArg,
    /// Time limit for the trial of stream capture, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20_000, hide = true)]
    pub(crate) trial_limit: u64,
    /// Maximum number of decode steps in flight on a CUDA device, up to 32; 1 launches none ahead [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_ahead)]
    pub(crate) ahead: Option<u8>,
    /// Compare decode steps with their eager run: every:N compares every Nth. For a step that differs, the eager result
    /// is used, its graph is discarded, and the summary reports it
    #[arg(long, value_name = "every:N", value_parser = parse_verify)]
    pub(crate) verify: Option<NonZeroU32>,
    /// Give each request the same bits in any load: they depend neither on other requests nor on the number of sequences
    /// in a step nor on how prompts are divided. Always so on the CPU; on a CUDA device it costs speed
    #[arg(long)]
    pub(crate) reproducible: bool,
    /// Time every kernel: prints a table to standard error and writes a timeline page [default: refrain-profile.html];
    /// steps then run one kernel at a time
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub(crate) profile: Option<Option<PathBuf>>,
    /// Faults to inject on the simulated device, such as "on 3rd launch: illegal address"
    #[arg(long, value_name = "SCRIPT")]
    pub(crate) faults: Option<String>,
    /// Number of CPU threads [default: suits the machine]
    #[arg(short, long, value_name = "N", value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Placement of the per-layer embedding table, in models that have one (Gemma 4 E2B and E4B)
    #[arg(long, value_name = "PLACE", default_value = "auto")]
    pub(crate) ple: PleArg,
    /// Placement of the experts, in models that have some. In host memory they take none of the device's, but every
    /// token reads its experts over the bus
    #[arg(long, value_name = "PLACE", default_value = "device")]
    pub(crate) experts: ExpertsArg,
    /// Element type of the KV cache
    #[arg(long, alias = "kv-dtype", value_name = "TYPE", default_value = "f16")]
    pub(crate) kv: KvArg,
}

/// Where the steps of a reply are repeated.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Device")]
pub(crate) struct LoopOpts {
    /// Where the steps of a reply are repeated on a CUDA device
    #[arg(long = "loop", value_name = "WHERE", default_value = "host")]
    repeat: LoopArg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoopArg {
    /// The host launches each step, a few steps ahead
    Host,
    /// The device repeats the step by itself: a reply is one launch, and the host sleeps between tokens. Not with guesses, a
    /// grammar, --verify, --profile or --graph off
    Device,
}

impl LoopOpts {
    /// Whether the device is to repeat the steps.
    pub(crate) fn is_on(&self) -> bool {
        self.repeat == LoopArg::Device
    }

    pub(crate) fn mode(&self) -> LoopMode {
        match self.repeat {
            LoopArg::Host => LoopMode::Host,
            LoopArg::Device => LoopMode::Device,
        }
    }

    /// Refuses what needs the host between two steps, before any model is opened.
    pub(crate) fn check(
        &self,
        device: &DeviceOpts,
        speculates: bool,
        is_constrained: bool,
    ) -> anyhow::Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        let conflict = match () {
            () if device.verify.is_some() => ("--verify compares a step on the host", "remove --verify"),
            () if device.profile.is_some() => ("--profile times single kernels", "remove --profile"),
            () if device.graph == GraphArg::Off => ("--graph off records nothing", "remove --graph off"),
            () if speculates => {
                ("the host makes the guesses", "remove --speculate, --draft and --draft-shape")
            }
            () if is_constrained => (
                "the host computes which tokens may follow",
                "remove --json-schema, --json-object, --grammar or --regex",
            ),
            () if device.device == DeviceArg::Cpu => ("the CPU is the host", "choose --device cuda"),
            () => return Ok(()),
        };
        let message = format!("--loop device leaves the host no part in a step, but {}", conflict.0);
        Err(Hinted::new(message, format!("{}, or remove --loop device", conflict.1)).into())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Auto,
    Cpu,
    Cuda(Option<u32>),
    Sim,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GraphArg {
    /// Replay graphs where possible, and count the steps that were not replayed
    Auto,
    /// Fail instead of running a step without a graph
    Require,
    /// Never replay
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvArg {
    /// Half the size of f32, with 11 bits of precision; numbers up to 65,504
    F16,
    /// The size of f16, with 8 bits of precision and the range of f32
    Bf16,
    /// Exact, at twice the size
    F32,
    /// Half the size of f16: 8 bits per element, with a scale per head and position
    Q8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PleArg {
    /// The first of the other placements that fits
    Auto,
    /// On the device
    Device,
    /// In pinned host memory, which the device reads over the bus
    Pinned,
    /// In the mapped file: the host gathers a token's row before each step
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertsArg {
    /// On the device
    Device,
    /// In pinned host memory, which the device reads over the bus
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodArg {
    /// Stream capture, unless a trial in a separate process showed that this driver loses its context; then nodes
    Auto,
    /// Stream capture by the driver
    Stream,
    /// One explicit graph node per call
    Nodes,
}

impl DeviceOpts {
    /// The one place that picks a backend.
    pub(crate) fn session(
        &self,
        n_context: Option<usize>,
        context: &CliContext,
    ) -> anyhow::Result<SessionOptions> {
        let kv_dtype = match self.kv {
            KvArg::F16 => DType::F16,
            KvArg::Bf16 => DType::BF16,
            KvArg::F32 => DType::F32,
            KvArg::Q8 => DType::U8,
        };
        let ahead = self.ahead.map(usize::from);
        Ok(SessionOptions {
            device: self.pick(context)?,
            context: n_context,
            kv_dtype,
            ahead,
            verify_every: self.verify,
            reproducible: self.reproducible,
            table: match self.ple {
                PleArg::Auto => TablePlacement::Auto,
                PleArg::Device => TablePlacement::Device,
                PleArg::Pinned => TablePlacement::Pinned,
                PleArg::Host => TablePlacement::Host,
            },
            experts: match self.experts {
                ExpertsArg::Device => ExpertPlacement::Device,
                ExpertsArg::Host => ExpertPlacement::Host,
            },
            ..SessionOptions::default()
        })
    }

    /// Starts a session. If --device auto found a GPU that cannot be used, prints why and falls back to the CPU.
    pub(crate) fn start(
        &self,
        model: &Model,
        n_context: Option<usize>,
        context: &CliContext,
    ) -> anyhow::Result<Session> {
        self.start_guessing(model, n_context, &SpeculationOptions::default(), LoopMode::Host, context)
    }

    /// As [`DeviceOpts::start`], with guessed tokens or steps that the device repeats.
    pub(crate) fn start_guessing(
        &self,
        model: &Model,
        n_context: Option<usize>,
        speculation: &SpeculationOptions,
        loops: LoopMode,
        context: &CliContext,
    ) -> anyhow::Result<Session> {
        let session = self.start_with(n_context, context, |options| {
            let speculation = speculation.clone();
            Session::new(model, &SessionOptions { speculation, loops, ..options.clone() })
        })?;
        if !context.quiet {
            say_placement(&session, self.ple, self.experts);
        }
        Ok(session)
    }

    /// As [`DeviceOpts::start`], for commands that start something other than a session.
    pub(crate) fn start_with<T>(
        &self,
        n_context: Option<usize>,
        context: &CliContext,
        make: impl Fn(&SessionOptions) -> Result<T, refrain::Error>,
    ) -> anyhow::Result<T> {
        let phases = Phases::default();
        let on_load = load_listener(phases.clone(), context);
        let options = SessionOptions { on_load, ..self.tried_session(n_context, context)? };
        let needs_card = self.graph == GraphArg::Require || self.verify.is_some() || self.profile.is_some();
        let may_fall_back = self.device == DeviceArg::Auto && !needs_card;
        let made = make(&options);
        phases.end();
        match made {
            Err(error) if may_fall_back && matches!(options.device, Device::Cuda { .. }) => {
                talk!("cuda:0 cannot be used, falling back to the CPU: {:#}", anyhow::Error::from(error));
                Ok(make(&SessionOptions { device: self.cpu(), ..options })?)
            }
            made => Ok(made?),
        }
    }

    /// As [`DeviceOpts::session`], with a trial of stream capture if --graph-method is auto. The trial takes a moment, so
    /// call this after everything else was checked.
    pub(crate) fn tried_session(
        &self,
        n_context: Option<usize>,
        context: &CliContext,
    ) -> anyhow::Result<SessionOptions> {
        let options = self.session(n_context, context)?;
        let graph_choice = self.graph_choice(&options.device, context);
        if let Some(choice) = graph_choice.as_ref().filter(|choice| choice.avoids_capture()) {
            talk!("graphs are recorded by {}: {}", choice.method, choice.because);
        }
        Ok(SessionOptions { graph_choice, ..options })
    }

    /// The recording method that a trial chose for the device, if it is left to one.
    fn graph_choice(&self, device: &Device, context: &CliContext) -> Option<MethodChoice> {
        let records = self.graph != GraphArg::Off && self.profile.is_none();
        if self.graph_method != MethodArg::Auto || !records {
            return None;
        }
        let kind = match device {
            Device::Cuda { ordinal, .. } => DeviceKind::Cuda(*ordinal),
            Device::Sim { faults, .. } => trial::simulated(faults.clone()),
            _ => return None,
        };
        trial::choose(&kind, Duration::from_millis(self.trial_limit), context)
    }

    fn pick(&self, context: &CliContext) -> anyhow::Result<Device> {
        if self.faults.is_some() && self.device != DeviceArg::Sim {
            return Err(Hinted::new("--faults needs the simulated device", "add --device sim").into());
        }
        if self.verify.is_some() && (self.graph == GraphArg::Off || self.profile.is_some()) {
            let message = "--verify compares replays with eager runs, and nothing is replayed here";
            return Err(Hinted::new(message, "remove --graph off and --profile, or remove --verify").into());
        }
        let graph = match self.graph {
            GraphArg::Auto => GraphMode::Auto,
            GraphArg::Require => GraphMode::Require,
            GraphArg::Off => GraphMode::Off,
        };
        let method = match self.graph_method {
            // The result of a trial is a separate session option.
            MethodArg::Auto | MethodArg::Stream => Method::Stream,
            MethodArg::Nodes => Method::Nodes,
        };
        let profile = self.profile.is_some();
        let cuda = |ordinal| {
            let env = context.store.env();
            let kernel_cache = Some(env.refrain_home.join("kernels"));
            Device::Cuda { ordinal, graph, method, profile, kernel_cache, nvrtc: env.nvrtc.clone() }
        };
        match self.device {
            DeviceArg::Cuda(ordinal) => Ok(cuda(ordinal.unwrap_or(0))),
            DeviceArg::Sim => {
                let faults = FaultScript::parse(self.faults.as_deref().unwrap_or(""))?;
                Ok(Device::Sim { seed: 0, faults, graph, method, profile })
            }
            // This only queries the GPU; the session opens it.
            DeviceArg::Auto if refrain_driver::Device::query(DeviceKind::Cuda(0)).is_ok() => Ok(cuda(0)),
            DeviceArg::Auto | DeviceArg::Cpu => self.only_cpu(),
        }
    }

    fn only_cpu(&self) -> anyhow::Result<Device> {
        let no_graphs = "the CPU calls its kernels directly and replays no graphs";
        if self.graph == GraphArg::Require {
            let message = format!("--graph require is impossible: {no_graphs}");
            return Err(Hinted::new(message, "use --graph auto, or --device cuda or sim").into());
        }
        if self.verify.is_some() {
            let message = format!("--verify compares replays with eager runs: {no_graphs}");
            return Err(Hinted::new(message, "remove it, or use --device cuda or sim").into());
        }
        if self.profile.is_some() {
            let message = "--profile times the kernels of a CUDA device, and this runs on the CPU";
            return Err(
                Hinted::new(message, "use --device cuda or sim, or `refrain bench` on the CPU").into()
            );
        }
        Ok(self.cpu())
    }

    fn cpu(&self) -> Device {
        Device::Cpu { threads: self.threads.map(NonZeroUsize::get) }
    }

    /// Prints why the device was picked.
    pub(crate) fn explain(&self, session: &Session) {
        if self.device != DeviceArg::Auto {
            return;
        }
        let backend = session.backend();
        match refrain_driver::Device::query(DeviceKind::Cuda(0)) {
            Err(error) if backend == "cpu" => {
                let error = anyhow::Error::from(error);
                talk!(
                    "--device auto picked cpu, there is no CUDA device: {error:#}; `refrain doctor` explains more"
                );
            }
            // A GPU that exists but cannot be used was reported when it failed.
            _ => talk!("--device auto picked {backend}; `refrain doctor` examines it"),
        }
    }
}

/// Prints which parts of a model are not used, what quantised weights became, and where per-layer embeddings are.
fn say_placement(session: &Session, requested: PleArg, experts: ExpertsArg) {
    say_experts(session, experts);
    let left_out = &session.model().config().left_out;
    if !left_out.is_empty() {
        let parts = left_out.join(" and ");
        talk!("this runs the text part of {} only: {parts} cannot be read", session.model().name());
    }
    if let Some(line) = stats::quantized_line(session.model().files()) {
        talk!("{line}");
    }
    match session.table_placement() {
        Some(TablePlacement::Pinned) => {
            talk!("the per-layer embeddings are in pinned host memory: the device reads one row per token");
        }
        Some(TablePlacement::Host) => {
            talk!("the per-layer embeddings stay in the file: the host reads one row per token");
        }
        Some(TablePlacement::Device | TablePlacement::Auto) => {}
        None if requested == PleArg::Auto => {}
        None if session.backend() == "cpu" => {
            talk!("--ple is for CUDA devices: the CPU reads per-layer embeddings from the mapped file");
        }
        None => talk!("--ple has no effect: {} has no per-layer embeddings", session.model().name()),
    }
}

/// Prints where the experts are, if they are not on the device or should not have been.
fn say_experts(session: &Session, requested: ExpertsArg) {
    match (requested, session.expert_placement()) {
        (ExpertsArg::Device, _) => {}
        (ExpertsArg::Host, Some(ExpertPlacement::Host)) => {
            talk!("the experts are in pinned host memory: each token reads its own over the bus");
        }
        (ExpertsArg::Host, Some(ExpertPlacement::Device)) => {
            talk!("--experts host has no effect: the device shares the host's memory");
        }
        (ExpertsArg::Host, None) if session.backend() == "cpu" => {
            talk!("--experts is for CUDA devices: the CPU reads experts from host memory");
        }
        (ExpertsArg::Host, None) => {
            talk!("--experts has no effect: {} has no experts", session.model().name());
        }
    }
}

/// Shows progress while weights are uploaded and kernels are compiled, now or for a later prompt. With -v it prints the
/// memory plan before anything is allocated.
pub(crate) fn load_listener(phases: Phases, context: &CliContext) -> LoadListener {
    let verbose = context.verbose;
    LoadListener::new(move |event| match event {
        LoadEvent::Planned(memory) if verbose => talk!("memory   {}", stats::memory_line(&memory)),
        LoadEvent::Uploaded { done_bytes, total_bytes } => {
            phases.set(Phase::Weights, done_bytes, total_bytes)
        }
        LoadEvent::Compiling { n_done, n_total } => {
            phases.set(Phase::Kernels, n_done as u64, n_total as u64);
        }
        _ => {}
    })
}

fn parse_ahead(text: &str) -> Result<u8, String> {
    let n = text.parse().ok().filter(|n| (1..=32).contains(n));
    n.ok_or_else(|| "write a whole number from 1 to 32".to_owned())
}

pub(crate) fn parse_verify(text: &str) -> Result<NonZeroU32, String> {
    let n = text.strip_prefix("every:").and_then(|n| n.parse().ok());
    n.ok_or_else(|| "give every:N with N of 1 or more, such as every:64".to_owned())
}

pub(crate) fn parse_device(text: &str) -> Result<DeviceArg, String> {
    let number =
        |n: &str| n.parse().map_err(|_| format!("`{n}` is not a device number; an example is cuda:0"));
    match text {
        "auto" => Ok(DeviceArg::Auto),
        "cpu" => Ok(DeviceArg::Cpu),
        "cuda" => Ok(DeviceArg::Cuda(None)),
        "sim" => Ok(DeviceArg::Sim),
        _ => match text.strip_prefix("cuda:") {
            Some(n) => number(n).map(|n| DeviceArg::Cuda(Some(n))),
            None => Err("devices are auto, cpu, cuda, cuda:N and sim".to_owned()),
        },
    }
}

pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<usize>() {
        Ok(0) => {
            Err("at least 1 thread is needed; omit --threads to use a number that suits the machine"
                .to_owned())
        }
        Ok(n) if n > most_threads() => Err(format!(
            "{n} threads would only slow each other down; use at most {} on this machine",
            most_threads()
        )),
        Ok(n) => NonZeroUsize::new(n).ok_or_else(String::new),
        Err(_) => Err("write a whole number".to_owned()),
    }
}

/// As in other programs, -1 is "no limit".
fn parse_max_tokens(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "must be a number of tokens, or -1 for no limit".to_owned()),
    }
}

/// A seed, or a request for a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(Option<u64>);

/// As in other programs, -1 is "random".
fn parse_seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed(None)),
        _ => {
            let seed = text.parse().map_err(|_| "must be a whole number, or -1 for a random seed".to_owned());
            seed.map(|seed| Seed(Some(seed)))
        }
    }
}

/// Reads a sampling parameter and checks its range, which is the same for all models.
fn parse_param(text: &str, set: impl FnOnce(&mut SamplingParams, f32)) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "must be a number".to_owned())?;
    let mut params = SamplingParams::default();
    set(&mut params, value);
    match params.check(usize::MAX) {
        Ok(()) => Ok(value),
        Err(error) => Err(format!("must be {}; {}", error.want, error.hint())),
    }
}

fn parse_temp(text: &str) -> Result<f32, String> {
    parse_param(text, |params, value| params.temperature = value)
}

fn parse_top_p(text: &str) -> Result<f32, String> {
    parse_param(text, |params, value| params.top_p = value)
}

fn parse_min_p(text: &str) -> Result<f32, String> {
    parse_param(text, |params, value| params.min_p = value)
}

fn parse_repeat_penalty(text: &str) -> Result<f32, String> {
    parse_param(text, |params, value| params.repeat_penalty = value)
}

fn parse_penalty(text: &str) -> Result<f32, String> {
    parse_param(text, |params, value| params.frequency_penalty = value)
}

fn parse_top_k(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| match text.parse::<i64>() {
        Ok(..0) => "must be 0 or more; 0 keeps all tokens".to_owned(),
        _ => "must be a number of tokens".to_owned(),
    })
}

/// More threads than cores only wait for each other; some are allowed for experiments.
fn most_threads() -> usize {
    4 * std::thread::available_parallelism().map_or(1, NonZeroUsize::get).max(4)
}

/// Sampling flags.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Generation")]
pub(crate) struct SamplingOpts {
    /// Maximum number of tokens; -1 is no limit [default: the end of the turn; 256 for raw text]
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = parse_max_tokens)]
    pub(crate) max_tokens: Option<usize>,
    /// Temperature; 0 always takes the most likely token [default: the model's, else 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = parse_temp)]
    temp: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all [default: the model's, else 40]
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = parse_top_k)]
    top_k: Option<usize>,
    /// Keep the most likely tokens that together reach this probability [default: the model's, else 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = parse_top_p)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely one [default: the model's, else 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = parse_min_p)]
    min_p: Option<f32>,
    /// Divide the logits of recent tokens by this [default: the model's, else 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_repeat_penalty)]
    repeat_penalty: Option<f32>,
    /// Subtract this from a token's logit for each recent occurrence [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_penalty)]
    frequency_penalty: Option<f32>,
    /// Subtract this once from the logit of a token that occurred recently [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_penalty)]
    presence_penalty: Option<f32>,
    /// Seed: the same seed gives the same text; -1 is random [default: random; --stats prints it]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_seed)]
    pub(crate) seed: Option<Seed>,
    /// End the reply before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl SamplingOpts {
    /// The flags, and the authors' recommendations where there are none.
    pub(crate) fn params(&self, model: &Model) -> SamplingParams {
        let usual = model.sampling();
        SamplingParams {
            temperature: self.temp.unwrap_or(usual.temperature),
            top_k: self.top_k.unwrap_or(usual.top_k),
            top_p: self.top_p.unwrap_or(usual.top_p),
            min_p: self.min_p.unwrap_or(usual.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(usual.repeat_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(usual.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(usual.presence_penalty),
            seed: self.seed.and_then(|seed| seed.0).unwrap_or(usual.seed),
            ..usual
        }
    }

    /// The limit on tokens, if there is one.
    pub(crate) fn max_tokens(&self) -> Option<usize> {
        self.max_tokens.filter(|n| *n != usize::MAX)
    }

    /// Options of a generation that nothing cancels.
    pub(crate) fn generate(&self, sampling: SamplingParams, usual_max_tokens: Option<usize>) -> Generate {
        Generate {
            sampling: Some(sampling),
            max_tokens: self.max_tokens.or(usual_max_tokens),
            stop: self.stop.clone(),
            ignore_end: false,
            adapter: None,
            cancel: None,
            grammar: None,
        }
    }
}

/// How to treat the thinking part of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Think {
    /// Show it, dimmed on a terminal
    Show,
    /// Ask the model to think, and show it; for models that think only on request, such as Gemma 4
    On,
    /// Let the model think, but show only the answer
    Hide,
    /// Ask the model not to think
    Off,
}

impl Think {
    /// Whether thinking is shown.
    pub(crate) fn shows(self) -> bool {
        matches!(self, Think::Show | Think::On)
    }

    /// The chat template's option.
    pub(crate) fn requested(self) -> Option<bool> {
        match self {
            Think::Show | Think::Hide => None,
            Think::On => Some(true),
            Think::Off => Some(false),
        }
    }
}

/// Adapter flags.
#[derive(clap::Args, Debug)]
pub(crate) struct LoraOpts {
    /// Apply a LoRA adapter without merging it; =SCALE multiplies its contribution
    #[arg(long, value_name = "DIR[=SCALE]")]
    pub(crate) lora: Option<LoraArg>,
}

impl LoraOpts {
    /// Adds the adapter to the model, if one is given.
    pub(crate) fn apply(&self, model: refrain::Model) -> anyhow::Result<refrain::Model> {
        match &self.lora {
            Some(lora) => Ok(model.with_lora(&lora.folder, lora.scale)?),
            None => Ok(model),
        }
    }
}

/// Folder and scale of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraArg {
    pub(crate) folder: std::path::PathBuf,
    pub(crate) scale: f64,
}

impl std::str::FromStr for LoraArg {
    type Err = String;

    fn from_str(text: &str) -> Result<LoraArg, String> {
        // A folder's name may contain an equals sign; a scale is a number.
        match text.rsplit_once('=') {
            Some((folder, scale)) if !std::path::Path::new(text).exists() => match scale.parse::<f64>() {
                Ok(scale) if scale.is_finite() => Ok(LoraArg { folder: folder.into(), scale }),
                _ => Err(format!("`{scale}` is not a finite number; a scale such as 0.5 follows the folder")),
            },
            _ => Ok(LoraArg { folder: text.into(), scale: 1.0 }),
        }
    }
}

/// An adapter for every line of a batch, or one that lines choose by its name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LineLora {
    Every(LoraArg),
    Named { name: String, folder: std::path::PathBuf },
}

impl std::str::FromStr for LineLora {
    type Err = String;

    fn from_str(text: &str) -> Result<LineLora, String> {
        // A scale is a number, and a folder may contain an equals sign.
        match text.split_once('=') {
            Some((name, folder))
                if is_name(name)
                    && folder.parse::<f64>().is_err()
                    && !std::path::Path::new(text).exists() =>
            {
                Ok(LineLora::Named { name: name.to_owned(), folder: folder.into() })
            }
            _ => text.parse().map(LineLora::Every),
        }
    }
}

/// Whether a text can be the name of a model or of an adapter.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_a_folder_with_or_without_a_scale() {
        let arg = |text: &str| text.parse::<LoraArg>();
        assert_eq!(arg("a/b"), Ok(LoraArg { folder: "a/b".into(), scale: 1.0 }));
        assert_eq!(arg("a=b=-0.5"), Ok(LoraArg { folder: "a=b".into(), scale: -0.5 }));
        assert!(arg("a=b").unwrap_err().contains("`b` is not a finite number"));
        assert!(arg("a=inf").is_err());
    }

    #[test]
    fn an_adapter_of_lines_has_a_name_and_that_of_all_lines_has_none() {
        let arg = |text: &str| text.parse::<LineLora>();
        let named =
            |name: &str, folder: &str| Ok(LineLora::Named { name: name.into(), folder: folder.into() });
        let every = |folder: &str, scale| Ok(LineLora::Every(LoraArg { folder: folder.into(), scale }));
        assert_eq!(arg("poems=./a=b"), named("poems", "./a=b"));
        assert_eq!(arg("./poems"), every("./poems", 1.0));
        assert_eq!(arg("./poems=0.5"), every("./poems", 0.5));
        assert!(arg("a b=c").is_err());
    }

    #[test]
    fn minus_one_is_no_limit_and_a_random_seed() {
        assert_eq!(parse_max_tokens("-1"), Ok(usize::MAX));
        assert!(parse_max_tokens("-2").is_err());
        assert_eq!((parse_seed("-1"), parse_seed("7")), (Ok(Seed(None)), Ok(Seed(Some(7)))));
        assert!(parse_seed("-2").is_err());
    }

    #[test]
    fn devices_are_parsed_with_their_number() {
        assert_eq!(parse_device("cuda:3"), Ok(DeviceArg::Cuda(Some(3))));
        assert_eq!(parse_device("sim"), Ok(DeviceArg::Sim));
        assert!(parse_device("cuda:x").is_err());
        assert!(parse_device("gpu").is_err());
    }
}
