//! Whether stream capture can be used on a driver: a trial, what it found, and a file that remembers it.
//!
//! On some drivers (570.207 and 590.48.01 are known) a capture loses the context, and a lost context is final in its
//! process. So the trial must run in a process of its own: a program starts itself again, calls [`run`] there, prints
//! the [`Finding`], and hands what it reads to [`choose`] as an [`Outcome`]. Nothing here starts a process or reads the
//! environment.
//!
//! ```
//! use refrain_driver::trial::{Finding, Findings, Outcome, Subject, choose, run};
//! use refrain_driver::{DeviceKind, Method, sim::SimOptions};
//!
//! # fn main() -> Result<(), refrain_driver::DriverError> {
//! let kind = DeviceKind::Sim(SimOptions::default());
//! let subject = Subject::of(&kind)?;
//! // A program would run this in a child process: here the simulated device cannot harm anybody.
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

/// A finding is a few lines; what is longer is none.
const MAX_FILE_BYTES: u64 = 16 << 10;

/// Which driver and device a finding is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The driver's version, as exact as it can be had.
    pub driver: String,
    /// The device's name.
    pub device: String,
}

impl Subject {
    /// Asks the driver. No context is made, so there is none to lose.
    pub fn of(kind: &DeviceKind) -> Result<Subject, DriverError> {
        let (api, ordinal) = match kind {
            DeviceKind::Cuda(ordinal) => (crate::real::load()?, *ordinal),
            // Faults are for the trial; those of a device that nothing is asked of would be reported as unused.
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

/// `570.207` of a library whose real name is `libcuda.so.570.207`.
fn release_of(library: &Path) -> Option<String> {
    let real = library.canonicalize().ok()?;
    let release = real.file_name()?.to_str()?.strip_prefix("libcuda.so.")?;
    release.contains('.').then(|| release.to_owned())
}

/// What a trial found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A capture leaves the context in order. It may still fail: then the recording that needs it says so.
    Usable,
    /// A capture loses the context, or its replays are wrong.
    Harmful {
        /// What happened, in one line.
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

/// A text that is no finding.
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

/// Captures a small step in this process, replays it and looks whether the context is still good. It may not be.
///
/// # Errors
/// When the device cannot be used at all, so that nothing is found about captures.
pub fn run(kind: DeviceKind) -> Result<Finding, DriverError> {
    doctor::try_capture(kind)
}

/// How a trial in a process of its own went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It printed what it found.
    Found(Finding),
    /// It had not ended after this long, and was ended.
    Hung(Duration),
    /// It ended in the middle of the trial; how, in words.
    Died(String),
    /// It could not be started, or found the device unusable; why, in words.
    NotRun(String),
}

/// How graphs are to be recorded, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodChoice {
    /// The method.
    pub method: Method,
    /// What is known of stream capture; `None` where no trial could be made.
    pub finding: Option<Finding>,
    /// Whether an earlier start found it.
    pub remembered: bool,
    /// Why, in one line.
    pub because: String,
}

impl MethodChoice {
    /// Whether no stream may be captured at all, not even for the calls of a library inside a recording.
    #[must_use]
    pub fn avoids_capture(&self) -> bool {
        matches!(self.finding, Some(Finding::Harmful { .. }))
    }
}

/// Chooses by what is remembered, or else by a trial, whose finding is then remembered.
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
                    tracing::warn!("what was found about stream capture is not remembered: {error}");
                }
                finding
            }
            Err(why) => {
                let because = format!("no trial of stream capture could be made: {why}");
                return MethodChoice { method: Method::Stream, finding: None, remembered, because };
            }
        },
    };
    let when = if remembered { "an earlier trial" } else { "a trial" };
    let (method, because) = match &finding {
        Finding::Usable => (Method::Stream, format!("{when} found it usable on driver {}", subject.driver)),
        Finding::Harmful { because } => (
            Method::Nodes,
            format!("{when} found stream capture harmful on driver {}: {because}", subject.driver),
        ),
    };
    MethodChoice { method, finding: Some(finding), remembered, because }
}

fn found(outcome: Outcome) -> Result<Finding, String> {
    let harmful = |because: String| Ok(Finding::Harmful { because: one_line(&because) });
    match outcome {
        Outcome::Found(finding) => Ok(finding),
        Outcome::Hung(limit) => harmful(format!("it did not end within {limit:?}")),
        Outcome::Died(how) => harmful(format!("its process ended with {how}")),
        Outcome::NotRun(why) => Err(one_line(&why)),
    }
}

/// A folder with a file for each driver, device and version of this crate.
#[derive(Clone, Debug)]
pub struct Findings {
    folder: PathBuf,
}

impl Findings {
    /// The findings in a folder, which need not exist.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Findings {
        Findings { folder: folder.into() }
    }

    /// What is remembered; `None` where nothing is, where it is of another subject, and where it cannot be read.
    #[must_use]
    pub fn read(&self, subject: &Subject) -> Option<Finding> {
        let mut text = String::new();
        let file = std::fs::File::open(self.file(subject)).ok()?;
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
        text.strip_prefix(&head(subject))?.parse().ok()
    }

    /// Remembers a finding. Readers see the old file or the new one, never a part.
    pub fn write(&self, subject: &Subject, finding: &Finding) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let file = self.file(subject);
        let fresh = file.with_extension(format!("{}.new", std::process::id()));
        let written = std::fs::File::create(&fresh)
            .and_then(|mut f| writeln!(f, "{}{finding}", head(subject)))
            .and_then(|()| std::fs::rename(&fresh, &file));
        if written.is_err() {
            // What could not be written whole is not left behind; the first error is the one to tell.
            let _ = std::fs::remove_file(&fresh);
        }
        written
    }

    /// Names are for people: the head of the file decides whether it is the right one.
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
