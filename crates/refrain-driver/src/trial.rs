//! Trials of stream capture: run one on a driver, choose the recording method by its finding, and store the
//! finding.
//!
//! On some drivers (570.207 and 590.48.01 are known) a stream capture loses the context, and a lost context is
//! final in its process. So the trial must run in a separate process: a program starts itself again, calls [`run`]
//! there and prints the [`Finding`]; the parent reads it and passes it to [`choose`] as an [`Outcome`]. Nothing in
//! this module starts a process or reads the environment.
//!
//! ```
//! use refrain_driver::trial::{Finding, Findings, Outcome, Subject, choose, run};
//! use refrain_driver::{DeviceKind, Method, sim::SimOptions};
//!
//! # fn main() -> Result<(), refrain_driver::DriverError> {
//! let kind = DeviceKind::Sim(SimOptions::default());
//! let subject = Subject::of(&kind)?;
//! // A real program runs this in a child process. Here the device is simulated, so nothing can be harmed.
//! let choice = choose(&subject, None, || Outcome::Found(run(kind).unwrap()));
//! assert_eq!((choice.method, choice.finding), (Method::Stream, Some(Finding::Usable)));
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::device::DeviceKind;
use crate::doctor;
use crate::error::DriverError;
use crate::record::Method;
use crate::sim::SimDriver;

/// Longer files are not findings, which are a few lines.
const MAX_FILE_BYTES: u64 = 16 << 10;

/// The driver and device that a finding is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The driver's version, as exact as available.
    pub driver: String,
    /// The device's name.
    pub device: String,
}

impl Subject {
    /// Queries the driver. Creates no context, so none can be lost.
    pub fn of(kind: &DeviceKind) -> Result<Subject, DriverError> {
        let (api, ordinal) = match kind {
            DeviceKind::Cuda(ordinal) => (crate::real::load()?, *ordinal),
            // Without the scripted faults, which are for the trial: this device would report them as unused.
            DeviceKind::Sim(_) => (SimDriver::default().interface(), 0),
        };
        let failed = |call| move |code| DriverError::Driver { call, code, origin: None };
        let version = api.driver_version().map_err(failed("cuDriverGetVersion"))?;
        let cuda = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        let driver = match kind {
            DeviceKind::Cuda(_) => match api.library_path().and_then(|path| release_of(&path)) {
                Some(release) => format!("{release}, {cuda}"),
                None => cuda,
            },
            DeviceKind::Sim(options) if options.faults.is_empty() => format!("{cuda}, simulated"),
            DeviceKind::Sim(options) => format!("{cuda}, simulated with \"{}\"", options.faults),
        };
        let device = api.device_info(ordinal).map_err(failed("cuDeviceGetAttribute"))?.name;
        Ok(Subject { driver: one_line(&driver), device: one_line(&device) })
    }
}

/// Returns `570.207` for a library whose real name is `libcuda.so.570.207`.
fn release_of(library: &Path) -> Option<String> {
    let real = library.canonicalize().ok()?;
    let release = real.file_name()?.to_str()?.strip_prefix("libcuda.so.")?;
    release.contains('.').then(|| release.to_owned())
}

/// Result of a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A capture leaves the context intact. It may still fail, which the recording that needs it then reports.
    Usable,
    /// A capture loses the context, or its replays give wrong results.
    Harmful {
        /// The reason, in one line.
        because: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Usable => f.write_str("stream capture is usable"),
            Finding::Harmful { because } => write!(f, "stream capture is harmful: {}", one_line(because)),
        }
    }
}

/// The text is not a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the finding of a trial")]
pub struct ParseFindingError;

impl FromStr for Finding {
    type Err = ParseFindingError;

    fn from_str(text: &str) -> Result<Finding, ParseFindingError> {
        let text = text.trim();
        if text == Finding::Usable.to_string() {
            return Ok(Finding::Usable);
        }
        let because = text.strip_prefix("stream capture is harmful: ").filter(|b| !b.contains('\n'));
        because.map(|because| Finding::Harmful { because: because.to_owned() }).ok_or(ParseFindingError)
    }
}

/// Captures a small step in this process, replays it and checks the context, which may be lost afterwards.
///
/// # Errors
/// If the device cannot be used at all, so that the trial finds nothing about capture.
pub fn run(kind: DeviceKind) -> Result<Finding, DriverError> {
    doctor::try_capture(kind)
}

/// Outcome of a trial in a separate process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It printed a finding.
    Found(Finding),
    /// It did not end within this time and was killed.
    Hung(Duration),
    /// It died during the trial; the text says how.
    Died(String),
    /// It could not be started, or the device was unusable; the text says why.
    NotRun(String),
}

/// The method for recording graphs, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodChoice {
    /// The method.
    pub method: Method,
    /// The finding about stream capture; `None` if no trial could be run.
    pub finding: Option<Finding>,
    /// True if the finding was stored by an earlier run.
    pub remembered: bool,
    /// The reason, in one line.
    pub because: String,
}

impl MethodChoice {
    /// True if no stream may be captured at all, not even for library calls inside a recording.
    #[must_use]
    pub fn avoids_capture(&self) -> bool {
        matches!(self.finding, Some(Finding::Harmful { .. }))
    }
}

/// Chooses a method by the stored finding, or else by running `trial` and storing what it finds.
pub fn choose(
    subject: &Subject,
    findings: Option<&Findings>,
    trial: impl FnOnce() -> Outcome,
) -> MethodChoice {
    let known = findings.and_then(|findings| findings.read(subject));
    let remembered = known.is_some();
    let finding = match known {
        Some(finding) => finding,
        None => match found(trial()) {
            Ok(finding) => {
                if let Some(Err(error)) = findings.map(|findings| findings.write(subject, &finding)) {
                    tracing::warn!("cannot store the finding about stream capture: {error}");
                }
                finding
            }
            Err(why) => {
                let because = format!("stream capture could not be tried: {why}");
                return MethodChoice { method: Method::Stream, finding: None, remembered, because };
            }
        },
    };
    let source = if remembered { "an earlier trial" } else { "a trial" };
    let (method, because) = match &finding {
        Finding::Usable => {
            (Method::Stream, format!("{source} found stream capture usable on driver {}", subject.driver))
        }
        Finding::Harmful { because } => (
            Method::Nodes,
            format!("{source} found stream capture harmful on driver {}: {because}", subject.driver),
        ),
    };
    MethodChoice { method, finding: Some(finding), remembered, because }
}

fn found(outcome: Outcome) -> Result<Finding, String> {
    let harmful = |because: String| Ok(Finding::Harmful { because: one_line(&because) });
    match outcome {
        Outcome::Found(finding) => Ok(finding),
        Outcome::Hung(limit) => harmful(format!("the trial did not end within {limit:?}")),
        Outcome::Died(how) => harmful(format!("the process of the trial ended with {how}")),
        Outcome::NotRun(why) => Err(one_line(&why)),
    }
}

/// A folder of stored findings, one file per driver, device and version of this crate.
#[derive(Clone, Debug)]
pub struct Findings {
    folder: PathBuf,
}

impl Findings {
    /// Uses a folder, which need not exist.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Findings {
        Findings { folder: folder.into() }
    }

    /// Reads the stored finding; `None` if there is none, if it is about another subject, or if it cannot be read.
    #[must_use]
    pub fn read(&self, subject: &Subject) -> Option<Finding> {
        let mut text = String::new();
        let file = std::fs::File::open(self.file(subject)).ok()?;
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
        text.strip_prefix(&head(subject))?.parse().ok()
    }

    /// Stores a finding. Readers see either the old file or the new one, never part of one.
    pub fn write(&self, subject: &Subject, finding: &Finding) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let file = self.file(subject);
        let fresh = file.with_extension(format!("{}.new", std::process::id()));
        let written = std::fs::File::create(&fresh)
            .and_then(|mut f| writeln!(f, "{}{finding}", head(subject)))
            .and_then(|()| std::fs::rename(&fresh, &file));
        if written.is_err() {
            // Remove a partial file; only the first error is worth reporting.
            let _ = std::fs::remove_file(&fresh);
        }
        written
    }

    /// File names are for people; the header inside the file identifies the subject.
    fn file(&self, subject: &Subject) -> PathBuf {
        let name = format!("capture {} {} {}", subject.driver, subject.device, env!("CARGO_PKG_VERSION"));
        let plain =
            |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
        let name: String = name.chars().map(plain).take(160).collect();
        self.folder.join(format!("{name}.txt"))
    }
}

fn head(subject: &Subject) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("refrain {version}\ndriver {}\ndevice {}\n", subject.driver, subject.device)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
