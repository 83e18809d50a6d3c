//! Profiles of a device: a table by kernel, and a page with a timeline.

mod page;

use crate::fail::Hinted;
use crate::opts::DeviceArg;
use crate::opts::DeviceOpts;
use crate::out::talk;
use refrain::{Session, Status, Timeline};
use refrain_driver::DeviceKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Default name of the page.
pub(crate) const USUAL_PAGE: &str = "refrain-profile.html";

/// Prints the table and writes the page, if --profile is on.
pub(crate) fn finish(session: &Session, device: &DeviceOpts) -> anyhow::Result<()> {
    let (Some(status), Some(timeline)) = (session.device_status(), session.timeline()) else { return Ok(()) };
    let title = format!("{} on {}", session.model().name(), session.backend());
    report(&title, &status, &timeline, device)
}

/// Prints the table and writes the page of a benchmark, if --profile is on.
pub(crate) fn report(
    title: &str,
    status: &Status,
    timeline: &Timeline,
    device: &DeviceOpts,
) -> anyhow::Result<()> {
    let Some(path) = &device.profile else { return Ok(()) };
    if status.profile.is_empty() {
        talk!("the profile is empty: nothing was launched");
        return Ok(());
    }
    table(status);
    let path = path.as_deref().unwrap_or(Path::new(USUAL_PAGE));
    let origin = page::ProfileOrigin {
        command: command(),
        date: date_utc(SystemTime::now()),
        device: device_name(device),
    };
    let text = page::page(title, &origin, status, timeline);
    std::fs::write(path, text).map_err(|error| Hinted::io("write", path, error))?;
    talk!("written: {} (a timeline of every launch; open it in a browser)", path.display());
    Ok(())
}

/// How and when a page was made.
pub(crate) fn origin() -> String {
    format!("Made by `{}`, {}", command(), date_utc(SystemTime::now()))
}

/// The command line, quoted where a shell needs it.
pub(crate) fn command() -> String {
    let quoted = |arg: String| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@+%".contains(c);
        if !arg.is_empty() && arg.chars().all(is_plain) {
            arg
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    let args = std::env::args_os().skip(1).map(|arg| quoted(arg.to_string_lossy().into_owned()));
    std::iter::once("refrain".to_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

pub(crate) fn device_name(device: &DeviceOpts) -> String {
    let ordinal = match device.device {
        DeviceArg::Sim => return "the simulated device".into(),
        DeviceArg::Cpu => return "the CPU".into(),
        DeviceArg::Cuda(ordinal) => ordinal.unwrap_or(0),
        DeviceArg::Auto => 0,
    };
    match (refrain_driver::Device::query(DeviceKind::Cuda(ordinal)), device.device) {
        (Ok(info), _) => info.name,
        (Err(_), DeviceArg::Auto) => "the CPU".into(),
        (Err(_), _) => format!("cuda:{ordinal}"),
    }
}

/// A time as `2026-11-18 22:40 UTC`.
pub(crate) fn date_utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    // Civil date from days since 1970 (H. Hinnant): years start in March, so that leap days come last.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// All launches of one kernel.
struct KernelRow<'a> {
    kernel: &'a str,
    n: u64,
    ms: f64,
    bytes: u64,
}

impl KernelRow<'_> {
    fn bytes_per_second(&self) -> f64 {
        if self.ms > 0.0 { self.bytes as f64 / (self.ms * 1e-3) } else { 0.0 }
    }
}

/// Totals by kernel, in descending order of time.
fn lines(status: &Status) -> Vec<KernelRow<'_>> {
    let mut lines: Vec<KernelRow<'_>> = Vec::new();
    for row in &status.profile {
        match lines.iter_mut().find(|l| l.kernel == row.kernel) {
            Some(l) => (l.n, l.ms, l.bytes) = (l.n + row.n, l.ms + row.total_ms, l.bytes + row.bytes),
            None => {
                lines.push(KernelRow { kernel: &row.kernel, n: row.n, ms: row.total_ms, bytes: row.bytes });
            }
        }
    }
    lines.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    lines
}

fn table(status: &Status) {
    let lines = lines(status);
    let total: f64 = lines.iter().map(|l| l.ms).sum();
    let peak = status.peak_bytes_per_second;
    let head = if peak.is_some() { "of peak" } else { "" };
    let head = format!(
        "{:<28} {:>9} {:>11} {:>10} {:>10} {:>9} {:>7} {head:>8}",
        "kernel", "launches", "ms", "us each", "KB each", "GB/s", "time"
    );
    talk!("{}", head.trim_end());
    for line in lines {
        let each = 1.0 / line.n.max(1) as f64;
        let (us, kb) = (line.ms * 1e3 * each, line.bytes as f64 / 1e3 * each);
        let (rate, share) = (line.bytes_per_second(), 100.0 * line.ms / total.max(f64::MIN_POSITIVE));
        let of_peak = peak.map_or_else(String::new, |peak| format!("{:.1} %", 100.0 * rate / peak));
        let text = format!(
            "{:<28} {:>9} {:>11.3} {us:>10.2} {kb:>10.1} {:>9.1} {share:>5.1} % {of_peak:>8}",
            line.kernel,
            line.n,
            line.ms,
            rate / 1e9
        );
        talk!("{}", text.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_civil_dates_in_utc() {
        let date = |seconds| date_utc(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_795_041_661), "2026-11-18 22:41 UTC");
    }
}
