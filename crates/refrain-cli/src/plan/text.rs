//! A plan for the terminal.

use super::{in_arena, kernel, shapes, writer};
use refrain::graph::{Buffer, Plan, Repeat, SegmentKind};
use refrain_hub::ByteSize;
use std::borrow::Cow;
use std::fmt::Write;

const MAP_COLUMNS: usize = 72;
const MAP_ROWS: usize = 20;
/// One letter per buffer, again from the start when they run out.
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

pub(super) fn segments(plan: &Plan) -> String {
    let mut out = String::new();
    for (i, segment) in plan.segments().iter().enumerate() {
        let how = match segment.kind {
            SegmentKind::Recordable => "can be recorded and replayed as one launch".to_owned(),
            SegmentKind::Host(because) => format!("runs on the host: {because}"),
        };
        let (first, n) = (segment.steps.start, segment.steps.len());
        let _ = writeln!(out, "segment {i}: steps {first} to {}, {how}", (first + n).saturating_sub(1));
    }
    out
}

/// A row per step. A step without its own kernel runs with the one above it. Of equal layers only the first is
/// listed.
pub(super) fn steps(plan: &Plan, kernels: &[(usize, Cow<'static, str>)]) -> String {
    let on_host =
        |i: usize| plan.segments().iter().any(|s| s.kind != SegmentKind::Recordable && s.steps.contains(&i));
    let kernel_of = |i: usize| match kernels {
        [] => String::new(),
        _ if on_host(i) => "(host)".to_owned(),
        _ => {
            let of: Vec<&str> = kernels.iter().filter(|(step, _)| *step == i).map(|(_, k)| &**k).collect();
            if of.is_empty() { "(as above)".to_owned() } else { of.join(", ") }
        }
    };
    let same_kernels = |r: &Repeat| r.folded().all(|i| kernel_of(i) == kernel_of(i - r.first.len()));
    let repeats: Vec<Repeat> = plan.repeats().into_iter().filter(same_kernels).collect();
    let listed: Vec<usize> = (0..plan.steps().len()).filter(|i| !is_folded(&repeats, *i)).collect();
    let rows = listed.iter().map(|&i| {
        let step = &plan.steps()[i];
        let (label, op) = (step.label.clone(), step.op.name().to_owned());
        [i.to_string(), label, op, shapes(step), kernel(step), kernel_of(i)]
    });
    let head = ["step", "label", "op", "outputs", "types", if kernels.is_empty() { "" } else { "kernel" }];
    let rows: Vec<[String; 6]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let (a, b, c, d, e) = (width(0), width(1), width(2), width(3), width(4));
    let line = |[i, label, op, shape, types, kernel]: &[String; 6]| {
        format!("{i:>a$}  {label:<b$}  {op:<c$}  {shape:<d$}  {types:<e$}  {kernel}").trim_end().to_owned()
            + "\n"
    };
    let mut out = line(&rows[0]);
    for (&i, row) in listed.iter().zip(&rows[1..]) {
        out.push_str(&line(row));
        if let Some(r) = repeats.iter().find(|r| r.first.end == i + 1) {
            let last = r.folded().end - 1;
            let _ = writeln!(
                out,
                "{:>a$}  steps {} to {i} repeat {} times, up to step {last}, {}",
                "...",
                r.first.start,
                r.n,
                plan.steps()[last].label
            );
        }
    }
    out
}

fn is_folded(repeats: &[Repeat], step: usize) -> bool {
    repeats.iter().any(|r| r.folded().contains(&step))
}

/// Addresses downwards, steps to the right, a letter for each buffer. Every line is a range of addresses in which no
/// buffer begins or ends, so that small buffers show next to large ones. Of equal layers only the first is drawn.
pub(super) fn arena(plan: &Plan) -> String {
    let (n_steps, bytes) = (plan.steps().len(), plan.arena_bytes());
    let mut out = format!("arena    {} for {} buffers\n", ByteSize(bytes as u64), in_arena(plan).count());
    let repeats = plan.repeats();
    let drawn: Vec<usize> = (0..n_steps).filter(|i| !is_folded(&repeats, *i)).collect();
    // The drawn steps in which a buffer is alive, as positions in `drawn`.
    let alive = |buffer: &Buffer| {
        drawn.partition_point(|&s| s < buffer.first)..drawn.partition_point(|&s| s <= buffer.last)
    };
    let buffers: Vec<(usize, usize, &Buffer)> =
        in_arena(plan).filter(|(_, _, buffer)| buffer.bytes > 0 && !alive(buffer).is_empty()).collect();
    let mut cuts: Vec<usize> = buffers.iter().flat_map(|(_, at, b)| [*at, at + b.bytes]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let n_ranges = cuts.len().saturating_sub(1);
    if n_ranges == 0 {
        return out;
    }
    let n_rows = n_ranges.min(MAP_ROWS);
    let row = |byte: usize| cuts.partition_point(|&cut| cut <= byte).saturating_sub(1) * n_rows / n_ranges;
    let columns = match MAP_COLUMNS / drawn.len() {
        0 => MAP_COLUMNS,
        wide => wide.min(4) * drawn.len(),
    };
    let mut map = vec![vec![b'.'; columns]; n_rows];
    for (n, (_, offset, buffer)) in buffers.iter().enumerate() {
        let steps = alive(buffer);
        let (left, right) = (steps.start * columns / drawn.len(), steps.end * columns / drawn.len());
        for line in &mut map[row(*offset)..=row(offset + buffer.bytes - 1)] {
            line[left..right.max(left + 1).min(columns)].fill(LETTERS[n % LETTERS.len()]);
        }
    }
    for (i, line) in map.iter().enumerate() {
        let from = ByteSize(cuts[(i * n_ranges).div_ceil(n_rows)] as u64).to_string();
        let _ = writeln!(out, "{from:>11} |{}|", String::from_utf8_lossy(line));
    }
    let _ = writeln!(out, "{:>11}  0{:>width$}", "step", n_steps - 1, width = columns.saturating_sub(1));
    for Repeat { first, n } in &repeats {
        let (from, to) = (first.start, first.end - 1);
        let _ = writeln!(out, "{:>11}  steps {from} to {to} stand for {n} equal layers", "");
    }
    let mut largest: Vec<_> = buffers.into_iter().enumerate().collect();
    largest.sort_by_key(|(_, (_, _, buffer))| std::cmp::Reverse(buffer.bytes));
    out.push_str("the largest:\n");
    for (n, (idx, offset, buffer)) in largest.into_iter().take(8) {
        let letter = char::from(LETTERS[n % LETTERS.len()]);
        let label = writer(plan, idx).map_or("", |(_, step)| step.label.as_str());
        let size = ByteSize(buffer.bytes as u64).to_string();
        let (first, last) = (buffer.first, buffer.last.min(n_steps - 1));
        let _ = writeln!(
            out,
            "  {letter}  {size:>10} at {offset:#x}, steps {first} to {last}, first written by {label}"
        );
    }
    out
}
