//! A plan as a picture, for Graphviz.

use crate::plan::{Place, Plan};
use crate::schedule::SegmentKind;
use std::fmt::Write;

impl Plan {
    /// The plan in Graphviz's language: a box per step, a frame per segment, an edge per buffer that is passed on.
    pub fn to_dot(&self) -> String {
        let mut out =
            String::from("digraph plan {\n  rankdir=TB; node [shape=box, fontname=\"monospace\"];\n");
        for (i, segment) in self.segments().iter().enumerate() {
            let title = match segment.kind {
                SegmentKind::Recordable => format!("segment {i}: one launch"),
                SegmentKind::Host(because) => format!("segment {i}: host, {because}"),
            };
            let _ = writeln!(out, "  subgraph cluster_{i} {{ label=\"{}\";", escape(&title));
            for s in segment.steps.clone() {
                let step = &self.steps()[s];
                let _ = writeln!(out, "    s{s} [label=\"{}\\n{}\"];", escape(&step.label), step.op.name());
            }
            out.push_str("  }\n");
        }
        // Each buffer's latest writer, so that edges show who a step really waits for.
        let mut writer = vec![None; self.buffers().len()];
        for (s, step) in self.steps().iter().enumerate() {
            for input in &step.inputs {
                let transient =
                    !matches!(self.buffer(input.buffer).place, Place::Weight(_) | Place::Control { .. });
                if let (true, Some(from)) = (transient, writer[input.buffer.idx()]) {
                    let _ = writeln!(out, "  s{from} -> s{s} [label=\"{}\"];", input.ty());
                }
            }
            for output in &step.outputs {
                writer[output.buffer.idx()] = Some(s);
            }
        }
        out.push_str("}\n");
        out
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
