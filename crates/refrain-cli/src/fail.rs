//! Errors as users see them: what failed, why, and a hint.

use crate::out::{ClosedPipe, printable, talk};
use crate::usage;
use anstyle::{AnsiColor, Style};
use refrain::graph::{Reason, RunError};
use refrain::{CudaError, EngineError, Stopped};
use refrain_driver::DriverError;
use refrain_hub::HubError;
use std::borrow::Cow;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

const ERROR: Style = AnsiColor::Red.on_default().bold();
/// The smallest window of `refrain perplexity` in tokens.
const MIN_WINDOW: usize = refrain::MIN_WINDOW;
const HINT: Style = AnsiColor::Cyan.on_default().bold();

/// Exit status for a lost device: this process cannot use it any more, a new one may.
const DEVICE_LOST: u8 = 3;
/// Exit status after Ctrl-C, as shells expect it.
pub(crate) const INTERRUPTED: u8 = 130;

/// An error of the command line itself, with a hint.
#[derive(Debug)]
pub(crate) struct Hinted {
    message: Cow<'static, str>,
    hint: Cow<'static, str>,
    source: Option<std::io::Error>,
}

impl Hinted {
    pub(crate) fn new(message: impl Into<Cow<'static, str>>, hint: impl Into<Cow<'static, str>>) -> Hinted {
        Hinted { message: message.into(), hint: hint.into(), source: None }
    }

    /// An error of the system about a file of the user.
    pub(crate) fn io(verb: &str, path: &Path, source: std::io::Error) -> Hinted {
        let hint = match source.kind() {
            ErrorKind::NotFound => "check the path",
            ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
            ErrorKind::IsADirectory => "name a file, not a folder",
            ErrorKind::StorageFull => "free some disk space",
            _ => "try another file",
        };
        Hinted {
            message: format!("cannot {verb} {}", path.display()).into(),
            hint: hint.into(),
            source: Some(source),
        }
    }
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Hinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// Interrupted by Ctrl-C; the message has already been printed.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted by Ctrl-C")
    }
}

impl std::error::Error for Interrupted {}

/// Prints the error that ends the program and returns the exit status.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<ClosedPipe>() {
        return ExitCode::SUCCESS;
    }
    if error.is::<Interrupted>() {
        return ExitCode::from(INTERRUPTED);
    }
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        return usage::report(error);
    }
    print(error);
    if is_of_a_lost_device(error) {
        return ExitCode::from(DEVICE_LOST);
    }
    match error.downcast_ref::<HubError>() {
        Some(HubError::Cancelled) => ExitCode::from(INTERRUPTED),
        _ => ExitCode::FAILURE,
    }
}

/// Whether this process cannot use its device any more.
pub(crate) fn is_of_a_lost_device(error: &anyhow::Error) -> bool {
    error.chain().any(is_lost_device)
}

fn is_lost_device(error: &(dyn std::error::Error + 'static)) -> bool {
    use refrain::train::{LearnError, TrainError};
    let of_an_engine = match error.downcast_ref::<refrain::Error>() {
        Some(refrain::Error::Engine(error)) => Some(error),
        _ => error.downcast_ref::<EngineError>(),
    };
    let of_a_step = match error.downcast_ref::<refrain::Error>() {
        Some(refrain::Error::Train(TrainError::Learn(LearnError::Run(error)))) => Some(error),
        _ => error.downcast_ref::<RunError>(),
    };
    of_an_engine.is_some_and(|error| matches!(error.stops(), Some(Stopped::DeviceLost { .. })))
        || matches!(of_a_step, Some(RunError::ContextLost { .. }))
        || matches!(error.downcast_ref::<DriverError>(), Some(DriverError::ContextLost(_)))
}

/// Prints an error, its causes and a hint.
pub(crate) fn print(error: &anyhow::Error) {
    let mut messages = messages(error);
    talk!("{ERROR}error:{ERROR:#} {}", printable(&messages.next().unwrap_or_default()));
    for cause in messages {
        talk!("  because {}", printable(&cause));
    }
    if let Some(hint) = error.chain().find_map(hint) {
        talk!("{HINT}hint:{HINT:#} {}", printable(&hint));
    }
}

/// An error and its causes in one line.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    messages(error).collect::<Vec<_>>().join(": ")
}

/// The messages of an error and of its causes, without causes that the message before ends in.
fn messages(error: &anyhow::Error) -> impl Iterator<Item = String> {
    let mut last = String::new();
    error.chain().map(ToString::to_string).filter(move |message| {
        let is_new = last.is_empty() || !last.contains(message.as_str());
        if is_new {
            last.clone_from(message);
        }
        is_new
    })
}

/// The hint for an error. Flags are named only here: the library knows none.
fn hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(hint) = flag_hint(error) {
        return Some(hint);
    }
    if let Some(e) = error.downcast_ref::<refrain::Error>() {
        return e.hint();
    }
    if let Some(e) = error.downcast_ref::<HubError>() {
        return e.hint();
    }
    if let Some(e) = error.downcast_ref::<refrain::FormatError>() {
        return e.hint();
    }
    if let Some(e) = error.downcast_ref::<refrain::EngineError>() {
        return e.hint();
    }
    if let Some(e) = error.downcast_ref::<refrain::FaultScriptError>() {
        return Some(e.hint());
    }
    error.downcast_ref::<Hinted>().map(|e| e.hint.to_string())
}

/// Hints that name flags, in place of the library's own.
fn flag_hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<refrain::Error>() {
        return library_hint(error);
    }
    if let Some(error) = error.downcast_ref::<EngineError>() {
        return engine_hint(error);
    }
    match error.downcast_ref::<HubError>()? {
        HubError::Offline { .. } => {
            Some("remove --offline, and unset REFRAIN_OFFLINE and HF_HUB_OFFLINE".into())
        }
        _ => None,
    }
}

fn library_hint(error: &refrain::Error) -> Option<String> {
    use refrain::Error;
    if let Some(hint) = error.cuda().and_then(cuda_hint) {
        return Some(hint);
    }
    Some(match error {
        Error::Encoder { .. } => "use `refrain embed MODEL TEXT`, or generate with another model".into(),
        Error::NoPooling { .. } => {
            "pass --pooling last or mean if it was trained to embed texts, or use an encoder such as all-MiniLM-L6-v2"
                .into()
        }
        Error::TextTooLong { .. } => "shorten the text, or omit --no-cut".into(),
        Error::Context { most, .. } => format!("pass -c with 1 to {most} tokens"),
        // Beyond the model's limit -c does not help, and the library's hint says so.
        Error::PromptTooLong { n_tokens, most, .. } if n_tokens < most => {
            format!("shorten the prompt, or raise the context to {} with -c", n_tokens + 1)
        }
        Error::BenchContext { needed, most, .. } if needed <= most => {
            format!("raise -c to {needed}, or lower -p, -n or --depth")
        }
        Error::BenchContext { .. } => "lower -p, -n or --depth".into(),
        Error::NoChatTemplate { .. } => {
            "use `refrain run` to continue a text, or chat with an instruction-tuned model".into()
        }
        Error::TableOnDevice { .. } => {
            "keep the table in pinned memory with --ple pinned, or in the mapped file with --ple host".into()
        }
        Error::ExpertsOnDevice { .. } => {
            "keep the experts in pinned host memory with --experts host; `refrain plan` shows the cost".into()
        }
        Error::Pool(refrain::PoolError::NoThreads) => "pass --threads with 1 or more, or omit it".into(),
        Error::Pool(refrain::PoolError::Spawn { .. }) => {
            "pass a smaller --threads, or raise the process limit".into()
        }
        Error::Chat(refrain::ChatError::Refused { .. }) => return None,
        Error::Chat(_) => "continue the prompt without the chat template: --raw".into(),
        Error::Occupied { .. } => "resume that run with --resume, or pass another --out".into(),
        Error::MergeType { .. } => "pass --type with f32, f16 or bf16".into(),
        Error::MergeExists { .. } => "remove it, or pass another path with -o".into(),
        Error::Engine(error) => return engine_hint(error),
        _ => return None,
    })
}

fn engine_hint(error: &EngineError) -> Option<String> {
    Some(match error {
        EngineError::NonFinite { kv_dtype: refrain::DType::F16, .. } => {
            "a KV cache of F16 overflows above 65504: try --kv bf16; if that does not help, the weights are damaged"
                .into()
        }
        EngineError::TextTooShort { n_tokens, .. } if *n_tokens >= MIN_WINDOW => {
            format!("give a longer text, or pass -c with at most {n_tokens} tokens")
        }
        EngineError::TextTooShort { window, .. } => {
            format!("give a text of at least {window} tokens, or of {MIN_WINDOW} with -c {MIN_WINDOW}")
        }
        EngineError::Window { context, .. } if *context <= MIN_WINDOW => {
            format!("pass -c with at least {MIN_WINDOW} tokens")
        }
        EngineError::Window { context, .. } => format!("pass -c with {MIN_WINDOW} to {context} tokens"),
        _ => return None,
    })
}

fn cuda_hint(error: &CudaError) -> Option<String> {
    Some(match error {
        CudaError::Required { reason: Reason::Profiling, .. } => {
            "profile with --graph auto: timing each kernel needs the eager path".into()
        }
        CudaError::Required { .. } => {
            "pass --graph auto to run such steps without a graph, or --graph off".into()
        }
        CudaError::DoesNotFit(_) => {
            "lower the context with -c, use a smaller or more quantised model, or free GPU memory".into()
        }
        CudaError::NoKernel { .. } => "pass --device cpu, or convert the weights to another type".into(),
        _ => return None,
    })
}

/// A panic is a bug in Refrain: ask for a report instead of printing a backtrace.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let message =
            text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        let location = panic.location().map_or_else(String::new, |l| format!(" ({}:{})", l.file(), l.line()));
        talk!("{ERROR}error:{ERROR:#} refrain has a bug: {message}{location}");
        talk!(
            "{HINT}hint:{HINT:#} please report this, with the command and the version ({})",
            env!("CARGO_PKG_VERSION")
        );
    }));
}
