//! Flags that commands share.

use crate::bars::{Phase, Phases};
use crate::cli::Context;
use crate::fail::Hinted;
use crate::out::talk;
use crate::stats;
use crate::trial;
use clap::{Args, ValueEnum};
use refrain::{
    DType, Device, FaultScript, Generate, GraphMode, LoadEvent, LoadListener, Method, Model, SamplingParams,
    Session, SessionOptions, TablePlacement,
};
use refrain_driver::DeviceKind;
use refrain_driver::trial::Choice;
use std::hash::{BuildHasher, Hasher};
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

/// Where and how a model runs.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceOpts {
    /// Where to run: auto, cpu, cuda, cuda:N or sim (a simulated CUDA device: slow, for trying graphs out)
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub(crate) device: DeviceArg,
    /// Whether steps must be replayed as recorded graphs
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub(crate) graph: GraphArg,
    /// How graphs are recorded
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    pub(crate) graph_method: MethodArg,
    /// How long the trial of stream capture may take, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20_000, hide = true)]
    pub(crate) trial_limit: u64,
    /// Decode steps that a CUDA device may have under way at once, at most 32; 4 unless given, 1 sends none ahead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub(crate) ahead: Option<u8>,
    /// Compare decode steps with their eager run while a text goes on: every:N compares each Nth. A step that differs is
    /// delivered as the eager run has it, its graph is given up, and the summary says so
    #[arg(long, value_name = "every:N", value_parser = parse_verify)]
    pub(crate) verify: Option<NonZeroU32>,
    /// Time every kernel: a table on standard error, and a timeline as a page [default: refrain-profile.html]; steps then
    /// run one kernel at a time
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub(crate) profile: Option<Option<PathBuf>>,
    /// What shall go wrong on the simulated device, such as "on 3rd launch: illegal address"
    #[arg(long, value_name = "SCRIPT")]
    pub(crate) faults: Option<String>,
    /// CPU threads; as many as suit the machine unless given
    #[arg(short, long, value_name = "N", value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Where the table of per-layer embeddings lies, in models that have one (Gemma 4 E2B and E4B)
    #[arg(long, value_name = "PLACE", default_value = "auto")]
    pub(crate) ple: PleArg,
    /// Element type of the KV cache
    #[arg(long, alias = "kv-dtype", value_name = "TYPE", default_value = "f16")]
    pub(crate) kv: KvArg,
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
    /// Replay where the device can, and count what was not
    Auto,
    /// Fail rather than run a step in any other way
    Require,
    /// Never replay
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvArg {
    /// Half the bytes of f32, with 11 bits of precision; numbers up to 65,504
    F16,
    /// As many bytes as f16, with 8 bits of precision and the range of f32
    Bf16,
    /// Exact, and twice the bytes
    F32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PleArg {
    /// The first of the others that fits
    Auto,
    /// On the device
    Device,
    /// In pinned memory of the host, which the device reads over the bus
    Pinned,
    /// Where the file is mapped: the host gathers a token's row before each step
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodArg {
    /// By stream, unless a trial in a process of its own found that this driver loses its context by it; then by nodes
    Auto,
    /// The driver captures a stream
    Stream,
    /// Each call becomes a node of its own
    Nodes,
}

impl DeviceOpts {
    /// The one place that picks a backend.
    pub(crate) fn session(
        &self,
        n_context: Option<usize>,
        context: &Context,
    ) -> anyhow::Result<SessionOptions> {
        let kv_dtype = match self.kv {
            KvArg::F16 => DType::F16,
            KvArg::Bf16 => DType::BF16,
            KvArg::F32 => DType::F32,
        };
        let ahead = self.ahead.map(usize::from);
        Ok(SessionOptions {
            device: self.pick(context)?,
            context: n_context,
            kv_dtype,
            ahead,
            verify_every: self.verify,
            table: match self.ple {
                PleArg::Auto => TablePlacement::Auto,
                PleArg::Device => TablePlacement::Device,
                PleArg::Pinned => TablePlacement::Pinned,
                PleArg::Host => TablePlacement::Host,
            },
            ..SessionOptions::default()
        })
    }

    /// Brings a model to the device. Where auto found a card that cannot be used, it says why and takes the CPU.
    pub(crate) fn start(
        &self,
        model: &Model,
        n_context: Option<usize>,
        context: &Context,
    ) -> anyhow::Result<Session> {
        let session = self.start_with(n_context, context, |options| Session::new(model, options))?;
        if !context.quiet {
            say_what_is_elsewhere(&session, self.ple);
        }
        Ok(session)
    }

    /// As [`DeviceOpts::start`], with what a command makes of the device.
    pub(crate) fn start_with<T>(
        &self,
        n_context: Option<usize>,
        context: &Context,
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
                talk!("cuda:0 cannot be used, running on the CPU: {:#}", anyhow::Error::from(error));
                Ok(make(&SessionOptions { device: self.cpu(), ..options })?)
            }
            made => Ok(made?),
        }
    }

    /// As [`DeviceOpts::session`], with a trial of stream capture where the method is left to one. It takes a moment, so it
    /// is made when everything else was found in order.
    pub(crate) fn tried_session(
        &self,
        n_context: Option<usize>,
        context: &Context,
    ) -> anyhow::Result<SessionOptions> {
        let options = self.session(n_context, context)?;
        let graph_choice = self.graph_choice(&options.device, context);
        if let Some(choice) = graph_choice.as_ref().filter(|choice| choice.avoids_capture()) {
            talk!("graphs are recorded by {}: {}", choice.method, choice.because);
        }
        Ok(SessionOptions { graph_choice, ..options })
    }

    /// How graphs are recorded on a device where that is left to a trial.
    fn graph_choice(&self, device: &Device, context: &Context) -> Option<Choice> {
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

    fn pick(&self, context: &Context) -> anyhow::Result<Device> {
        if self.faults.is_some() && self.device != DeviceArg::Sim {
            return Err(Hinted::new("--faults is for the simulated device", "add --device sim").into());
        }
        if self.verify.is_some() && (self.graph == GraphArg::Off || self.profile.is_some()) {
            let message = "--verify compares replays with eager runs, and nothing is replayed here";
            return Err(Hinted::new(message, "leave out --graph off and --profile, or --verify").into());
        }
        let graph = match self.graph {
            GraphArg::Auto => GraphMode::Auto,
            GraphArg::Require => GraphMode::Require,
            GraphArg::Off => GraphMode::Off,
        };
        let method = match self.graph_method {
            // What a trial says about it is in the session's options.
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
            // Only looked for: the session opens it.
            DeviceArg::Auto if refrain_driver::Device::look(DeviceKind::Cuda(0)).is_ok() => Ok(cuda(0)),
            DeviceArg::Auto | DeviceArg::Cpu => self.only_cpu(),
        }
    }

    fn only_cpu(&self) -> anyhow::Result<Device> {
        let no_graphs = "the CPU calls its kernels directly and replays no graphs";
        if self.graph == GraphArg::Require {
            let message = format!("--graph require cannot be kept: {no_graphs}");
            return Err(Hinted::new(message, "use --graph auto, or --device cuda or sim").into());
        }
        if self.verify.is_some() {
            let message = format!("--verify compares replays with eager runs: {no_graphs}");
            return Err(Hinted::new(message, "leave it out, or use --device cuda or sim").into());
        }
        if self.profile.is_some() {
            let message = "--profile times the kernels of a CUDA device, this runs on the CPU";
            return Err(
                Hinted::new(message, "use --device cuda or sim, or `refrain bench` on the CPU").into()
            );
        }
        Ok(self.cpu())
    }

    fn cpu(&self) -> Device {
        Device::Cpu { threads: self.threads.map(NonZeroUsize::get) }
    }

    /// Says why the device was picked.
    pub(crate) fn explain(&self, session: &Session) {
        if self.device != DeviceArg::Auto {
            return;
        }
        let backend = session.backend();
        match refrain_driver::Device::look(DeviceKind::Cuda(0)) {
            Err(error) if backend == "cpu" => {
                let error = anyhow::Error::from(error);
                talk!(
                    "--device auto picked cpu, there is no CUDA device: {error:#}; `refrain doctor` tells more"
                );
            }
            // A card that is there and could not be used was named when it failed.
            _ => talk!("--device auto picked {backend}; `refrain doctor` tells what it looked at"),
        }
    }
}

/// Names parts of a model that are not used, and a table that is not where the other weights are.
fn say_what_is_elsewhere(session: &Session, asked: PleArg) {
    let left_out = &session.model().config().left_out;
    if !left_out.is_empty() {
        let parts = left_out.join(" and ");
        talk!("this is the text part of {}: what reads {parts} is left out", session.model().name());
    }
    match session.table_placement() {
        Some(TablePlacement::Pinned) => {
            talk!("the per-layer embeddings are in pinned memory, where the device reads a row a token");
        }
        Some(TablePlacement::Host) => {
            talk!("the per-layer embeddings stay in the file: the host reads a row before each token");
        }
        Some(TablePlacement::Device | TablePlacement::Auto) => {}
        None if asked == PleArg::Auto => {}
        None if session.backend() == "cpu" => {
            talk!("--ple is for CUDA devices: the CPU reads per-layer embeddings where the file is mapped");
        }
        None => talk!("--ple changes nothing: {} has no per-layer embeddings", session.model().name()),
    }
}

/// A bar while weights go to a device and while kernels are compiled, then or for a later prompt; and with -v what weights
/// take there, before any of it is allocated.
pub(crate) fn load_listener(phases: Phases, context: &Context) -> LoadListener {
    let verbose = context.verbose;
    LoadListener::new(move |event| match event {
        LoadEvent::Planned(memory) if verbose => talk!("memory   {}", stats::memory_line(&memory)),
        LoadEvent::Sent { done_bytes, total_bytes } => phases.set(Phase::Weights, done_bytes, total_bytes),
        LoadEvent::Compiling { n_done, n_total } => {
            phases.set(Phase::Kernels, n_done as u64, n_total as u64);
        }
        _ => {}
    })
}

pub(crate) fn parse_verify(text: &str) -> Result<NonZeroU32, String> {
    let n = text.strip_prefix("every:").and_then(|n| n.parse().ok());
    n.ok_or_else(|| "known is every:N, such as every:64, with N of 1 or more".to_owned())
}

pub(crate) fn parse_device(text: &str) -> Result<DeviceArg, String> {
    let number = |n: &str| n.parse().map_err(|_| format!("`{n}` is no device number, as in cuda:0"));
    match text {
        "auto" => Ok(DeviceArg::Auto),
        "cpu" => Ok(DeviceArg::Cpu),
        "cuda" => Ok(DeviceArg::Cuda(None)),
        "sim" => Ok(DeviceArg::Sim),
        _ => match text.strip_prefix("cuda:") {
            Some(n) => number(n).map(|n| DeviceArg::Cuda(Some(n))),
            None => Err("known are auto, cpu, cuda, cuda:N and sim".to_owned()),
        },
    }
}

pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<usize>() {
        Ok(0) => {
            Err("at least 1 thread is needed; leave --threads out to use what suits the machine".to_owned())
        }
        Ok(n) if n > most_threads() => Err(format!(
            "{n} threads would only get in each other's way; at most {} make sense on this machine",
            most_threads()
        )),
        Ok(n) => NonZeroUsize::new(n).ok_or_else(String::new),
        Err(error) => Err(error.to_string()),
    }
}

/// Some programs take -1 for "no limit".
fn parse_max_tokens(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| match text.parse::<i64>() {
        Ok(..0) => "must be 0 or more; leave -n out to go on to the end of the turn".to_owned(),
        _ => "must be a number of tokens".to_owned(),
    })
}

/// Some programs take -1 for "all".
fn parse_top_k(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| match text.parse::<i64>() {
        Ok(..0) => "must be 0 or more; 0 chooses among all tokens".to_owned(),
        _ => "must be a number of tokens".to_owned(),
    })
}

/// Threads beyond the cores only wait for each other; some are allowed, to try things out.
fn most_threads() -> usize {
    4 * std::thread::available_parallelism().map_or(1, NonZeroUsize::get).max(4)
}

/// How tokens are chosen and where a reply ends.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Generation")]
pub(crate) struct SamplingOpts {
    /// Stop after that many tokens; by default at the end of the turn, raw texts after 256
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = parse_max_tokens)]
    pub(crate) max_tokens: Option<usize>,
    /// Temperature; 0 always takes the likeliest token [default: the model's, else 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Choose among the K likeliest tokens; 0 among all [default: the model's, else 40]
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = parse_top_k)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that reach this probability [default: the model's, else 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this part of the likeliest [default: the model's, else 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divide the logits of recent tokens [default: the model's, else 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Subtract for each recent appearance of a token [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Subtract once for each token that appeared recently [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Same seed, same text [default: drawn at random; --stats tells it]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// End the reply where this text appears; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl SamplingOpts {
    /// Refuses numbers that make no sense for any model, before one is opened.
    pub(crate) fn check(&self) -> Result<(), refrain::Error> {
        // What a model's authors recommend is checked with the model.
        Ok(self.over(SamplingParams::default()).check(usize::MAX)?)
    }

    /// What was asked for, over what the model's authors recommend.
    pub(crate) fn params(&self, model: &Model) -> SamplingParams {
        self.over(model.sampling())
    }

    fn over(&self, usual: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temp.unwrap_or(usual.temperature),
            top_k: self.top_k.unwrap_or(usual.top_k),
            top_p: self.top_p.unwrap_or(usual.top_p),
            min_p: self.min_p.unwrap_or(usual.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(usual.repeat_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(usual.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(usual.presence_penalty),
            seed: self.seed.unwrap_or_else(random_seed),
            ..usual
        }
    }

    /// How to generate, without a reason to stop from outside.
    pub(crate) fn generate(&self, sampling: SamplingParams, usual_max_tokens: Option<usize>) -> Generate {
        Generate {
            sampling: Some(sampling),
            max_tokens: self.max_tokens.or(usual_max_tokens),
            stop: self.stop.clone(),
            ignore_end: false,
            cancel: None,
        }
    }
}

/// What to do with the part of a reply in which a model thinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Think {
    /// Show it, dimmed on a terminal
    Show,
    /// Ask the model to think, and show it: for models that do so only when asked, such as Gemma 4
    On,
    /// Let the model think, show only the answer
    Hide,
    /// Ask the model not to think
    Off,
}

impl Think {
    /// Whether what the model thinks is shown.
    pub(crate) fn shows(self) -> bool {
        matches!(self, Think::Show | Think::On)
    }

    /// What the chat template is told.
    pub(crate) fn asked(self) -> Option<bool> {
        match self {
            Think::Show | Think::Hide => None,
            Think::On => Some(true),
            Think::Off => Some(false),
        }
    }
}

/// Short enough to be typed again.
fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

/// An adapter beside the model.
#[derive(clap::Args, Debug)]
pub(crate) struct LoraOpts {
    /// Use a LoRA adapter beside the model, unmerged; =SCALE multiplies what it adds
    #[arg(long, value_name = "DIR[=SCALE]")]
    pub(crate) lora: Option<LoraArg>,
}

impl LoraOpts {
    /// The model, with the adapter where one was named.
    pub(crate) fn apply(&self, model: refrain::Model) -> anyhow::Result<refrain::Model> {
        match &self.lora {
            Some(lora) => Ok(model.with_lora(&lora.folder, lora.scale)?),
            None => Ok(model),
        }
    }
}

/// A folder of an adapter, and a factor on it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraArg {
    pub(crate) folder: std::path::PathBuf,
    pub(crate) scale: f64,
}

impl std::str::FromStr for LoraArg {
    type Err = String;

    fn from_str(text: &str) -> Result<LoraArg, String> {
        // A folder may have an equals sign in its name; what stands behind a scale's is a number.
        match text.rsplit_once('=') {
            Some((folder, scale)) if !std::path::Path::new(text).exists() => match scale.parse::<f64>() {
                Ok(scale) if scale.is_finite() => Ok(LoraArg { folder: folder.into(), scale }),
                _ => Err(format!("`{scale}` is no finite number; a scale such as 0.5 follows the folder")),
            },
            _ => Ok(LoraArg { folder: text.into(), scale: 1.0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_a_folder_with_a_scale_or_without() {
        let arg = |text: &str| text.parse::<LoraArg>();
        assert_eq!(arg("a/b"), Ok(LoraArg { folder: "a/b".into(), scale: 1.0 }));
        assert_eq!(arg("a=b=-0.5"), Ok(LoraArg { folder: "a=b".into(), scale: -0.5 }));
        assert!(arg("a=b").unwrap_err().contains("`b` is no finite number"));
        assert!(arg("a=inf").is_err());
    }

    #[test]
    fn devices_are_read_with_their_number() {
        assert_eq!(parse_device("cuda:3"), Ok(DeviceArg::Cuda(Some(3))));
        assert_eq!(parse_device("sim"), Ok(DeviceArg::Sim));
        assert!(parse_device("cuda:x").is_err());
        assert!(parse_device("gpu").is_err());
    }
}
