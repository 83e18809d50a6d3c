//! Errors as people see them: what failed, because of what, and the way out.

use crate::out::{ClosedPipe, talk};
use anstyle::{AnsiColor, Style};
use refrain::graph::RunError;
use refrain_driver::DriverError;
use refrain_hub::HubError;
use std::borrow::Cow;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

const ERROR: Style = AnsiColor::Red.on_default().bold();
const HINT: Style = AnsiColor::Cyan.on_default().bold();

/// The device was lost: nothing runs on it in this process any more, a new one may do.
const DEVICE_LOST: u8 = 3;
/// What a shell expects after Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

/// An error of the command line itself, with a way out.
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

    /// What the system refused to do with a file of the person's own.
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

/// Ctrl-C ended what was being done, after it was told. There is nothing left to say but the status.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken off by Ctrl-C")
    }
}

impl std::error::Error for Interrupted {}

/// Prints an error that ends the program and says how it ends.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<ClosedPipe>() {
        return ExitCode::SUCCESS;
    }
    if error.is::<Interrupted>() {
        return ExitCode::from(INTERRUPTED);
    }
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        return usage(error);
    }
    print(error);
    if error.chain().any(is_lost_device) {
        return ExitCode::from(DEVICE_LOST);
    }
    match error.downcast_ref::<HubError>() {
        Some(HubError::Cancelled) => ExitCode::from(INTERRUPTED),
        _ => ExitCode::FAILURE,
    }
}

fn is_lost_device(error: &(dyn std::error::Error + 'static)) -> bool {
    use refrain::train::{LearnError, TrainError};
    let of_a_step = match error.downcast_ref::<refrain::Error>() {
        Some(refrain::Error::Train(TrainError::Learn(LearnError::Run(error)))) => Some(error),
        _ => error.downcast_ref::<RunError>(),
    };
    matches!(of_a_step, Some(RunError::ContextLost { .. }))
        || matches!(error.downcast_ref::<DriverError>(), Some(DriverError::ContextLost(_)))
}

/// Prints an error, its causes and a hint.
pub(crate) fn print(error: &anyhow::Error) {
    let mut said = error.to_string();
    talk!("{ERROR}error:{ERROR:#} {said}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Some messages end in their cause.
        if !said.contains(&cause) {
            talk!("  because {cause}");
            said = cause;
        }
    }
    if let Some(hint) = error.chain().find_map(hint) {
        talk!("{HINT}hint:{HINT:#} {hint}");
    }
}

/// The one place that knows which errors have a way out. Where a flag is the way out, it is named here: the library knows
/// none.
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

fn flag_hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let engine = match error.downcast_ref::<refrain::Error>() {
        Some(refrain::Error::Engine(engine)) => Some(engine),
        _ => error.downcast_ref::<refrain::EngineError>(),
    };
    match engine? {
        refrain::EngineError::NonFinite { kv_dtype: refrain::DType::F16, .. } => Some(
            "a KV cache of F16 overflows above 65504: try --kv bf16; if that does not help, the weights are damaged"
                .into(),
        ),
        _ => None,
    }
}

/// Prints what clap has to say: help to standard output, mistakes to standard error.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // It fails when nobody reads any more, as in `refrain --help | head -1`.
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// A panic is a bug of Refrain. It asks for a report in place of a stack of internal names.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let what =
            text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        let place = panic.location().map_or_else(String::new, |l| format!(" ({}:{})", l.file(), l.line()));
        talk!("{ERROR}error:{ERROR:#} refrain has a bug: {what}{place}");
        talk!(
            "{HINT}hint:{HINT:#} please report this, with the command and the version ({})",
            env!("CARGO_PKG_VERSION")
        );
    }));
}
