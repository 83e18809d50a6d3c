//! What works on this machine: the checks behind `refrain doctor`.
//!
//! Each check is one [`DoctorRow`] with a verdict in plain words. All of them run on a device thread with a deadline, so a
//! driver that hangs is a row too, and nothing a check makes is left behind.

mod checks;

use std::time::Duration;

use crate::device::{Device, DeviceKind};
use crate::error::DriverError;
use crate::trial::Finding;

/// How long one check may take.
const CHECK_LIMIT: Duration = Duration::from_secs(30);

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoctorRow {
    /// What was checked.
    pub name: &'static str,
    /// How it went.
    pub verdict: CheckVerdict,
    /// The figures, short.
    pub measured: String,
    /// What that means.
    pub words: String,
    /// What to do about it.
    pub advice: Option<String>,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckVerdict {
    /// As it should be.
    Good,
    /// Works, with something to know.
    Note,
    /// Does not work.
    Bad,
    /// Not checked, since something before it failed.
    Skipped,
}

impl CheckVerdict {
    /// In one word.
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

/// In this order: what a launch costs is measured before anything is broken off on purpose, and again behind it.
const CHECKS: &[(&str, DoctorCheck)] = &[
    ("launch cost", checks::launch_cost),
    ("record by stream capture", checks::record_stream),
    ("record by explicit nodes", checks::record_nodes),
    ("results without waiting", checks::ring),
    ("allocate while recording", checks::allocate_under_capture),
    ("break a recording off", checks::watchdog),
    ("context survived", checks::survived),
    ("launch cost at the end", checks::launch_cost_at_the_end),
    ("read bandwidth", checks::bandwidth),
];

/// Examines a device. Never panics and never hangs: what cannot be opened is a row that says why.
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

/// Bytes per second that a device reads from its memory at best. It takes 4 GiB of memory for that, or a quarter of what
/// is free; no other thread may own the device.
pub fn read_bandwidth(kind: DeviceKind) -> Result<f64, DriverError> {
    let worker = Device::open(kind)?.spawn(CHECK_LIMIT, checks::Bench::new)?;
    worker.call("read bandwidth", CHECK_LIMIT, checks::read_rate).map(|(rate, _)| rate)
}

/// Captures a small step and looks whether the context survives; see [`crate::trial`].
pub(crate) fn try_capture(kind: DeviceKind) -> Result<Finding, DriverError> {
    let device = Device::open(kind)?;
    let worker = device.spawn(CHECK_LIMIT, checks::Bench::new)?;
    // Without a capture, so that a device that is no good at all is not taken for a capture that is none.
    worker.call("record by explicit nodes", CHECK_LIMIT, checks::record_nodes)?;
    let captured = worker.call("record by stream capture", CHECK_LIMIT, checks::record_stream);
    let what = match captured {
        Ok(DoctorRow { verdict: CheckVerdict::Bad, words, measured, .. }) => {
            return Ok(Finding::Harmful { because: format!("{words} ({measured})") });
        }
        Ok(_) => "a capture was made".to_owned(),
        Err(DriverError::Driver { call, code, .. }) => format!("{call} returned {code}"),
        Err(error) => error.to_string(),
    };
    let after = worker.call("context survived", CHECK_LIMIT, checks::survived);
    match (after, device.lost()) {
        (Ok(_), None) => Ok(Finding::Usable),
        (_, Some(_)) => Ok(Finding::Harmful { because: format!("{what}, and the context was lost") }),
        (Err(error), None) => Ok(Finding::Harmful { because: format!("{what}, and then: {error}") }),
    }
}

/// Examines an open device that no other thread owns.
#[must_use]
pub fn examine_device(device: &Device) -> Vec<DoctorRow> {
    let mut rows = vec![checks::driver(device), checks::card(device)];
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
    DoctorRow::new(name, CheckVerdict::Skipped, String::new(), "not checked: something before it failed")
}
