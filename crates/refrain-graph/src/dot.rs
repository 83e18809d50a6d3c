//! Plans as pictures, for Graphviz.

use crate::plan::{Place, Plan};
use crate::repeat::Repeat;
use crate::schedule::SegmentKind;
use std::collections::BTreeMap;
use std::fmt::Write;

impl Plan {
    /// Returns the plan in Graphviz's language: a box per step, a frame per segment, and an edge from the last writer of
    /// each buffer to its readers. Of equal layers only the first is drawn, in a frame that says how many there are.
    pub fn to_dot(&self) -> String {
        let mut out = String::from(
            "digraph plan {\n  rankdir=TB; node [shape=box, fontname=\"monospace\"]; edge [fontname=\"monospace\", fontsize=10];\n",
        );
        let repeats = self.repeats();
        for (i, segment) in self.segments().iter().enumerate() {
            let title = match segment.kind {
                SegmentKind::Recordable => format!("segment {i}: one launch"),
                SegmentKind::Host(because) => format!("segment {i}: host, {because}"),
            };
            let _ = writeln!(out, "  subgraph cluster_{i} {{ label=\"{}\";", escape(&title));
            for s in segment.steps.clone().filter(|&s| shown(&repeats, s) == s) {
                let frame = repeats.iter().position(|r| r.first.contains(&s));
                if let Some(r) = frame.filter(|&r| repeats[r].first.start == s) {
                    let Repeat { first, n } = &repeats[r];
                    let title = format!("{n} times: steps {s} to {}", first.start + n * first.len() - 1);
                    let _ =
                        writeln!(out, "    subgraph cluster_layer_{r} {{ style=dashed; label=\"{title}\";");
                }
                let step = &self.steps()[s];
                let _ = writeln!(out, "    s{s} [label=\"{}\\n{}\"];", escape(&step.label), step.op.name());
                if frame.is_some_and(|r| repeats[r].first.end == s + 1) {
                    out.push_str("    }\n");
                }
            }
            out.push_str("  }\n");
        }
        for ((from, to), types) in self.edges(&repeats) {
            // An edge that points back leads from one repetition to the next.
            let next = if from >= to { ", style=dashed, constraint=false" } else { "" };
            let _ = writeln!(out, "  s{from} -> s{to} [label=\"{}\"{next}];", types.join("\\n"));
        }
        out.push_str("}\n");
        out
    }

    /// The types that pass from one drawn step to another, one edge per pair.
    fn edges(&self, repeats: &[Repeat]) -> BTreeMap<(usize, usize), Vec<String>> {
        let mut edges: BTreeMap<(usize, usize), Vec<String>> = BTreeMap::new();
        // The latest writer of each buffer, so that edges show true dependencies.
        let mut writer = vec![None; self.buffers().len()];
        for (s, step) in self.steps().iter().enumerate() {
            for input in &step.inputs {
                let is_computed =
                    !matches!(self.buffer(input.buffer).place, Place::Weight(_) | Place::Control { .. });
                if let (true, Some(from)) = (is_computed, writer[input.buffer.idx()]) {
                    let types = edges.entry((shown(repeats, from), shown(repeats, s))).or_default();
                    let ty = input.ty().to_string();
                    if !types.contains(&ty) {
                        types.push(ty);
                    }
                }
            }
            for output in &step.outputs {
                writer[output.buffer.idx()] = Some(s);
            }
        }
        edges
    }
}

/// The step that is drawn for a step: itself, or its counterpart in the first repetition.
fn shown(repeats: &[Repeat], step: usize) -> usize {
    let folded = repeats.iter().find(|r| r.folded().contains(&step));
    folded.map_or(step, |r| r.first.start + (step - r.first.start) % r.first.len())
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
