//! Checks of what works on this machine, as `refrain doctor` reports them.
//!
//! Each check yields one [`DoctorRow`] with a verdict in plain words. All checks run on a device thread with a
//! deadline, so a hanging driver is reported as a row too, and no check leaves anything behind.

mod checks;

use std::time::Duration;

use crate::device::{Device, DeviceKind};
use crate::error::DriverError;
use crate::trial::Finding;

/// Time limit of one check.
const CHECK_LIMIT: Duration = Duration::from_secs(30);

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoctorRow {
    /// Name of the check.
    pub name: &'static str,
    /// Verdict.
    pub verdict: CheckVerdict,
    /// Key figures.
    pub measured: String,
    /// What the figures mean.
    pub words: String,
    /// Suggested action.
    pub advice: Option<String>,
}

/// Verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckVerdict {
    /// Works as it should.
    Good,
    /// Works, with a caveat.
    Note,
    /// Does not work.
    Bad,
    /// Not run, because an earlier check failed.
    Skipped,
}

impl CheckVerdict {
    /// The verdict as one word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            CheckVerdict::Good => "good",
            CheckVerdict::Note => "note",
            CheckVerdict::Bad => "bad",
            CheckVerdict::Skipped => "skipped",
        }
    }
}

impl DoctorRow {
    fn new(name: &'static str, verdict: CheckVerdict, measured: String, words: &str) -> DoctorRow {
        DoctorRow { name, verdict, measured, words: words.to_owned(), advice: None }
    }

    fn failed(name: &'static str, error: &DriverError) -> DoctorRow {
        DoctorRow {
            name,
            verdict: CheckVerdict::Bad,
            measured: error.code().map_or_else(|| "failed".to_owned(), |c| c.to_string()),
            words: error.to_string(),
            advice: error.hint().map(str::to_owned),
        }
    }
}

type DoctorCheck = fn(&mut checks::Bench) -> Result<DoctorRow, DriverError>;

/// In this order: the cost of a launch is measured before any recording is aborted on purpose, and again
/// afterwards.
const CHECKS: &[(&str, DoctorCheck)] = &[
    ("launch cost", checks::launch_cost),
    ("record by stream capture", checks::record_stream),
    ("record by explicit nodes", checks::record_nodes),
    ("results without a wait", checks::ring),
    ("loop on the device", checks::device_loop),
    ("allocate while recording", checks::allocate_under_capture),
    ("abort a recording", checks::watchdog),
    ("context survived", checks::survived),
    ("launch cost at the end", checks::launch_cost_at_the_end),
    ("read bandwidth", checks::bandwidth),
];

/// Examines a device. Never panics and never hangs; a device that cannot be opened yields a row with the reason.
#[must_use]
pub fn examine(kind: DeviceKind) -> Vec<DoctorRow> {
    match Device::open(kind) {
        Ok(device) => examine_device(&device),
        Err(error) => {
            let mut rows = vec![DoctorRow::failed("driver", &error)];
            rows.extend(CHECKS.iter().map(|(name, _)| skipped(name)));
            rows
        }
    }
}

/// Measures a device's read bandwidth in bytes per second. Allocates 4 GiB for it, or a quarter of the free memory
/// if that is less. No other thread may own the device.
pub fn read_bandwidth(kind: DeviceKind) -> Result<f64, DriverError> {
    let worker = Device::open(kind)?.spawn(CHECK_LIMIT, checks::Bench::new)?;
    worker.call("read bandwidth", CHECK_LIMIT, checks::read_rate).map(|(rate, _)| rate)
}

/// Captures a small step and checks that the context survives; see [`crate::trial`].
pub(crate) fn try_capture(kind: DeviceKind) -> Result<Finding, DriverError> {
    let device = Device::open(kind)?;
    let worker = device.spawn(CHECK_LIMIT, checks::Bench::new)?;
    // First without a capture, so that a broken device is not mistaken for broken capture.
    worker.call("record by explicit nodes", CHECK_LIMIT, checks::record_nodes)?;
    let captured = worker.call("record by stream capture", CHECK_LIMIT, checks::record_stream);
    let what = match captured {
        Ok(DoctorRow { verdict: CheckVerdict::Bad, words, measured, .. }) => {
            return Ok(Finding::Harmful { because: format!("{words} ({measured})") });
        }
        Ok(_) => "a capture succeeded".to_owned(),
        Err(DriverError::Driver { call, code, .. }) => format!("{call} returned {code}"),
        Err(error) => error.to_string(),
    };
    let after = worker.call("context survived", CHECK_LIMIT, checks::survived);
    match (after, device.lost()) {
        (Ok(_), None) => Ok(Finding::Usable),
        (_, Some(_)) => Ok(Finding::Harmful { because: format!("{what}, and the context was lost") }),
        (Err(error), None) => Ok(Finding::Harmful { because: format!("{what}, and then {error}") }),
    }
}

/// Examines an open device that no other thread owns.
#[must_use]
pub fn examine_device(device: &Device) -> Vec<DoctorRow> {
    let mut rows = vec![checks::driver(device), checks::gpu(device)];
    let worker = match device.spawn(CHECK_LIMIT, checks::Bench::new) {
        Ok(worker) => worker,
        Err(error) => {
            rows.push(DoctorRow::failed("memory", &error));
            rows.extend(CHECKS.iter().map(|(name, _)| skipped(name)));
            return rows;
        }
    };
    let free = worker.call("memory", CHECK_LIMIT, checks::memory);
    rows.push(free.unwrap_or_else(|error| DoctorRow::failed("memory", &error)));
    for &(name, check) in CHECKS {
        if device.lost().is_some() {
            rows.push(skipped(name));
            continue;
        }
        let row = worker.call(name, CHECK_LIMIT, check);
        rows.push(row.unwrap_or_else(|error| DoctorRow::failed(name, &error)));
    }
    rows.extend(device.take_reports().into_iter().map(|report| DoctorRow {
        name: "report of the simulated device",
        verdict: CheckVerdict::Bad,
        measured: String::new(),
        words: report,
        advice: None,
    }));
    rows
}

fn skipped(name: &'static str) -> DoctorRow {
    DoctorRow::new(name, CheckVerdict::Skipped, String::new(), "not run: an earlier check failed")
}
