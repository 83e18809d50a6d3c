//! A plan as a self-contained page, without scripts.

use super::{in_arena, kernel, shapes, writer};
use crate::out::counted;
use refrain::graph::{Plan, SegmentKind};
use refrain_hub::ByteSize;
use std::fmt::Write;

const MAP_WIDTH: usize = 1200;
const MAP_HEIGHT: usize = 480;

const STYLE: &str = "\
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1240px;padding:0 1rem;color:#222;background:#fff}\
svg{width:100%;height:auto;background:#f6f6f6;border:1px solid #ccc}\
rect{stroke:#fff;stroke-width:.5}rect:hover{stroke:#000;stroke-width:2}\
table{border-collapse:collapse;font-family:ui-monospace,monospace;font-size:12px}\
td,th{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #eee}tr:hover{background:#eef}\
.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.9em;height:.9em;margin-right:.3em}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}svg{background:#222;border-color:#444}\
rect{stroke:#161616}rect:hover{stroke:#fff}td,th{border-color:#333}tr:hover{background:#223}}";

pub(super) fn page(title: &str, origin: &str, plan: &Plan, bounds: &[String]) -> String {
    let title = escape(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>{}</p>\n<ul>\n",
        escape(origin)
    );
    for (i, segment) in plan.segments().iter().enumerate() {
        let how = match segment.kind {
            SegmentKind::Recordable => "can be recorded and replayed as one launch".to_owned(),
            SegmentKind::Host(because) => format!("runs on the host: {}", escape(because)),
        };
        let steps = counted(segment.steps.len(), "step");
        let _ = writeln!(out, "<li>segment {i}: {steps}, {how}</li>");
    }
    for line in bounds {
        let _ = writeln!(out, "<li>{}</li>", escape(line.trim()));
    }
    out.push_str("</ul>\n");
    arena(&mut out, plan);
    steps(&mut out, plan);
    out.push_str("</body></html>\n");
    out
}

/// Time to the right, addresses downwards, coloured by the op that writes first. Every range of addresses between two
/// ends of buffers has the same height, so that small buffers show next to large ones.
fn arena(out: &mut String, plan: &Plan) {
    let n_steps = plan.steps().len().max(1);
    let mut cuts: Vec<usize> = in_arena(plan).flat_map(|(_, at, b)| [at, at + b.bytes]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let n_ranges = cuts.len().saturating_sub(1).max(1);
    let size = ByteSize(plan.arena_bytes() as u64);
    let _ = writeln!(
        out,
        "<h2>Arena: {size}, {}</h2>\n<p>Steps run to the right, addresses downwards, not to scale. \
         The colour is the op that writes a buffer first. Point at a buffer for its details.</p>\n\
         <svg viewBox=\"0 0 {MAP_WIDTH} {MAP_HEIGHT}\" role=\"img\" aria-label=\"arena map\">",
        counted(in_arena(plan).count(), "buffer")
    );
    let mut ops: Vec<&str> = Vec::new();
    for (idx, offset, buffer) in in_arena(plan) {
        let (step, op, label) = match writer(plan, idx) {
            Some((i, step)) => (i, step.op.name(), step.label.as_str()),
            None => (buffer.first, "unwritten", ""),
        };
        let color = hue(&mut ops, op);
        let x = |step: usize| step as f64 * MAP_WIDTH as f64 / n_steps as f64;
        let y = |byte: usize| {
            cuts.partition_point(|&cut| cut < byte) as f64 * MAP_HEIGHT as f64 / n_ranges as f64
        };
        let (first, last) = (buffer.first, buffer.last.min(n_steps - 1));
        let (left, width) = (x(first), x(last + 1) - x(first));
        let (top, height) = (y(offset), (y(offset + buffer.bytes) - y(offset)).max(1.0));
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{color}\">\
             <title>{} ({op})\n{} at {offset:#x}\nwritten by step {step}, alive in steps {first} to {last}</title></rect>",
            escape(label),
            ByteSize(buffer.bytes as u64),
        );
    }
    out.push_str("</svg>\n<p class=\"key\">");
    for op in ops.clone() {
        let color = hue(&mut ops, op);
        let _ = write!(out, "<span><i style=\"background:{color}\"></i>{}</span>", escape(op));
    }
    out.push_str("</p>\n");
}

/// A colour for each op, in order of appearance, with well separated hues.
fn hue<'a>(ops: &mut Vec<&'a str>, op: &'a str) -> String {
    // Steps of the golden angle separate hues for any number of ops.
    const GOLDEN_ANGLE: f64 = 137.508;
    let idx = ops.iter().position(|known| *known == op).unwrap_or_else(|| {
        ops.push(op);
        ops.len() - 1
    });
    format!("hsl({:.0} 60% 55%)", idx as f64 * GOLDEN_ANGLE % 360.0)
}

fn steps(out: &mut String, plan: &Plan) {
    out.push_str("<h2>Steps</h2>\n<table><tr><th>step<th>label<th>op<th>outputs<th>types</tr>\n");
    for (i, step) in plan.steps().iter().enumerate() {
        let inputs: Vec<String> = step.inputs.iter().map(|o| format!("reads {}", o.ty())).collect();
        let outputs: Vec<String> = step.outputs.iter().map(|o| format!("writes {}", o.ty())).collect();
        let details = [inputs, outputs].concat().join("\n");
        let _ = writeln!(
            out,
            "<tr title=\"{}\"><td>{i}<td>{}<td>{}<td>{}<td>{}</tr>",
            escape(&details),
            escape(&step.label),
            step.op.name(),
            escape(&shapes(step)),
            escape(&kernel(step)),
        );
    }
    out.push_str("</table>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
