//! A timeline as a self-contained page, with its script and its data.

use super::lines;
use crate::out::counted;
use refrain::{Status, Timeline};
use serde_json::{Value, json};
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The origin of a profile.
pub(super) struct ProfileOrigin {
    pub(super) command: String,
    pub(super) date: String,
    pub(super) device: String,
}

pub(super) fn page(title: &str, origin: &ProfileOrigin, status: &Status, timeline: &Timeline) -> String {
    let title = escape(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}: profile</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p><code>{}</code><br>{}, {}</p>\n\
         <p>{}, {}",
        escape(&origin.command),
        escape(&origin.device),
        origin.date,
        counted(timeline.steps.len(), "step"),
        counted(timeline.spans.len(), "launch"),
    );
    if timeline.n_steps_left_out > 0 {
        let _ =
            write!(out, "; {} only in the table", counted(timeline.n_steps_left_out as usize, "later step"));
    }
    out.push_str(
        ". Each launch was timed separately, so steps are slower than as one graph. Scroll to zoom, drag to move, \
         double-click to show everything.</p>\n<canvas id=\"lanes\" tabindex=\"0\" role=\"img\" \
         aria-label=\"timeline of launches\"></canvas>\n<pre id=\"hover\">Point at a launch for its details.</pre>\n",
    );
    table(&mut out, status);
    let data = data(status, timeline).to_string();
    // Nothing in the data may close the element that contains it.
    let data = data.replace('<', "\\u003c");
    let _ = writeln!(out, "<script type=\"application/json\" id=\"data\">{data}</script>");
    let _ = writeln!(out, "<script>{SCRIPT}</script>\n</body></html>");
    out
}

/// Totals by kernel, in descending order of time; each row expands to the steps that ran it.
fn table(out: &mut String, status: &Status) {
    let lines = lines(status);
    let total: f64 = lines.iter().map(|l| l.ms).sum::<f64>().max(f64::MIN_POSITIVE);
    out.push_str(
        "<table><thead><tr><th>kernel<th>launches<th>ms<th>\u{b5}s each<th>KB each<th>GB/s<th>of peak GB/s<th>share of time</tr>\
         </thead>\n",
    );
    let row = |out: &mut String, class: &str, name: &str, n: u64, ms: f64, bytes: u64| {
        let each = 1.0 / n.max(1) as f64;
        let rate = if ms > 0.0 { bytes as f64 / (ms * 1e-3) } else { 0.0 };
        let peak = status.peak_bytes_per_second;
        let of_peak = peak.map_or_else(String::new, |peak| format!("{:.1} %", 100.0 * rate / peak));
        let _ = writeln!(
            out,
            "<tr{class}><td>{}<td>{n}<td>{ms:.3}<td>{:.2}<td>{:.1}<td>{:.1}<td>{of_peak}<td>{:.1} %</tr>",
            escape(name),
            ms * 1e3 * each,
            bytes as f64 / 1e3 * each,
            rate / 1e9,
            100.0 * ms / total,
        );
    };
    for line in &lines {
        out.push_str("<tbody>\n");
        row(out, " class=\"kernel\"", line.kernel, line.n, line.ms, line.bytes);
        let mut of: Vec<_> = status.profile.iter().filter(|r| r.kernel == line.kernel).collect();
        of.sort_by(|a, b| b.total_ms.total_cmp(&a.total_ms));
        for r in of {
            row(out, " class=\"step\" hidden", &r.step, r.n, r.total_ms, r.bytes);
        }
        out.push_str("</tbody>\n");
    }
    out.push_str("</table>\n");
}

/// Rows as [step, kernel], spans as [row, start us, us, bytes], steps as [tokens, first span].
fn data(status: &Status, timeline: &Timeline) -> Value {
    let us = |ms: f64| (ms * 1e6).round() / 1e3;
    let rows: Vec<Value> = status.profile.iter().map(|r| json!([r.step, r.kernel])).collect();
    let spans: Vec<Value> =
        timeline.spans.iter().map(|s| json!([s.row, us(s.start_ms), us(s.ms), s.bytes])).collect();
    let steps: Vec<Value> = timeline.steps.iter().map(|s| json!([s.n_tokens, s.first_span])).collect();
    json!({ "rows": rows, "spans": spans, "steps": steps })
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain::{ProfileRow, ProfileSpan, ProfileStep};

    #[test]
    fn a_page_is_self_contained_and_labels_cannot_break_out_of_it() {
        let row = |step: &str, kernel: &str, total_ms| ProfileRow {
            step: step.into(),
            kernel: kernel.into(),
            n: 1,
            total_ms,
            bytes: 2_000_000,
        };
        let status = Status {
            profile: vec![row("</script><b>", "linear_bf16", 1.0), row("norm", "norm_f32", 2.0)],
            peak_bytes_per_second: Some(4e9),
            ..Status::default()
        };
        let span = |row, start_ms| ProfileSpan { row, start_ms, ms: 1.0, bytes: 2_000_000 };
        let timeline = Timeline {
            steps: vec![ProfileStep { n_tokens: 1, first_span: 0 }],
            spans: vec![span(0, 0.0), span(1, 1.0)],
            n_steps_left_out: 3,
        };
        let origin = ProfileOrigin {
            command: "refrain run '<p>'".into(),
            date: "2026-11-18 22:41 UTC".into(),
            device: "NVIDIA H200".into(),
        };
        let page = page("a & b", &origin, &status, &timeline);
        assert!(
            page.contains("refrain run '&lt;p&gt;'") && page.contains("NVIDIA H200, 2026-11-18"),
            "{page}"
        );
        assert!(page.contains("1 step, 2 launches"), "{page}");
        assert_eq!(page.matches("</script>").count(), 2, "{page}");
        assert!(!page.contains("http") && !page.contains("<b>"), "{page}");
        assert!(page.contains("a &amp; b") && page.contains("3 later steps only in the table"), "{page}");
        assert!(page.contains("[1,1000.0,1000.0,2000000]"), "{page}");
        let (norm, linear) = (page.find("<td>norm_f32"), page.find("<td>linear_bf16"));
        assert!(norm < linear, "the kernel with the most time comes first");
        assert!(page.contains("<td>2.0<td>50.0 %"), "2 MB in 1 ms are 2 GB/s, half of the peak: {page}");
    }
}
