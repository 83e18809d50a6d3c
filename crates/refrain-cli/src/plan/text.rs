//! A plan for the terminal.

use super::{in_arena, kernel, shapes, writer};
use refrain::graph::{Plan, SegmentKind};
use refrain_hub::Bytes;
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

/// A row per step. A step without a kernel of its own runs with the one above it.
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
    let rows = plan.steps().iter().enumerate().map(|(i, step)| {
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
    rows.iter().map(line).collect()
}

/// Addresses downwards, steps to the right, a letter for each buffer.
pub(super) fn arena(plan: &Plan) -> String {
    let (n_steps, bytes) = (plan.steps().len(), plan.arena_bytes());
    let mut out = format!("arena    {} for {} buffers\n", Bytes(bytes as u64), in_arena(plan).count());
    if n_steps == 0 || bytes == 0 {
        return out;
    }
    let columns = n_steps.min(MAP_COLUMNS);
    let mut map = vec![vec![b'.'; columns]; MAP_ROWS];
    for (n, (_, offset, buffer)) in in_arena(plan).enumerate() {
        let column = |step: usize| step.min(n_steps - 1) * columns / n_steps;
        let row = |byte: usize| byte * MAP_ROWS / bytes;
        let rows = row(offset)..=row(offset + buffer.bytes.max(1) - 1).min(MAP_ROWS - 1);
        for line in &mut map[rows] {
            line[column(buffer.first)..=column(buffer.last)].fill(LETTERS[n % LETTERS.len()]);
        }
    }
    for (i, line) in map.iter().enumerate() {
        let from = Bytes((bytes * i / MAP_ROWS) as u64).to_string();
        let _ = writeln!(out, "{from:>11} |{}|", String::from_utf8_lossy(line));
    }
    let _ = writeln!(out, "{:>11}  0{:>width$}", "step", n_steps - 1, width = columns.saturating_sub(1));
    let mut largest: Vec<_> = in_arena(plan).enumerate().collect();
    largest.sort_by_key(|(_, (_, _, buffer))| std::cmp::Reverse(buffer.bytes));
    out.push_str("the largest:\n");
    for (n, (idx, offset, buffer)) in largest.into_iter().take(8) {
        let letter = char::from(LETTERS[n % LETTERS.len()]);
        let label = writer(plan, idx).map_or("", |(_, step)| step.label.as_str());
        let size = Bytes(buffer.bytes as u64).to_string();
        let (first, last) = (buffer.first, buffer.last.min(n_steps - 1));
        let _ = writeln!(
            out,
            "  {letter}  {size:>10} at {offset:#x}, steps {first} to {last}, first written by {label}"
        );
    }
    out
}
