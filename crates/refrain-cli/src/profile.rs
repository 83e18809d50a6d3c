//! Where the time on a device went: a table by kernel, and a page with a timeline.

mod page;

use crate::fail::Hinted;
use crate::opts::DeviceOpts;
use crate::out::talk;
use refrain::{Session, Status, Timeline};
use std::path::Path;

/// The page's name unless another is asked for.
pub(crate) const USUAL_PAGE: &str = "refrain-profile.html";

/// Prints the table and writes the page, where a profile was asked for.
pub(crate) fn finish(session: &Session, device: &DeviceOpts) -> anyhow::Result<()> {
    let (Some(status), Some(timeline)) = (session.device_status(), session.timeline()) else { return Ok(()) };
    let title = format!("{} on {}", session.model().name(), session.backend());
    tell(&title, &status, &timeline, device)
}

/// The same from what a bench reports.
pub(crate) fn tell(
    title: &str,
    status: &Status,
    timeline: &Timeline,
    device: &DeviceOpts,
) -> anyhow::Result<()> {
    let Some(path) = &device.profile else { return Ok(()) };
    if status.profile.is_empty() {
        talk!("there is no profile: nothing was launched");
        return Ok(());
    }
    table(status);
    let path = path.as_deref().unwrap_or(Path::new(USUAL_PAGE));
    let text = page::page(title, status, timeline);
    std::fs::write(path, text).map_err(|error| Hinted::io("write", path, error))?;
    talk!("written: {} (a timeline of every launch; open it in a browser)", path.display());
    Ok(())
}

/// All launches of one kernel.
struct Line<'a> {
    kernel: &'a str,
    n: u64,
    ms: f64,
    bytes: u64,
}

impl Line<'_> {
    fn bytes_per_second(&self) -> f64 {
        if self.ms > 0.0 { self.bytes as f64 / (self.ms * 1e-3) } else { 0.0 }
    }
}

/// By kernel, from the most time to the least.
fn lines(status: &Status) -> Vec<Line<'_>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for row in &status.profile {
        match lines.iter_mut().find(|l| l.kernel == row.kernel) {
            Some(l) => (l.n, l.ms, l.bytes) = (l.n + row.n, l.ms + row.total_ms, l.bytes + row.bytes),
            None => {
                lines.push(Line { kernel: &row.kernel, n: row.n, ms: row.total_ms, bytes: row.bytes });
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
        let said = format!(
            "{:<28} {:>9} {:>11.3} {us:>10.2} {kb:>10.1} {:>9.1} {share:>5.1} % {of_peak:>8}",
            line.kernel,
            line.n,
            line.ms,
            rate / 1e9
        );
        talk!("{}", said.trim_end());
    }
}
