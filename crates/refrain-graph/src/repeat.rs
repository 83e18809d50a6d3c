//! Equal layers of a plan, for views that show one of them.

use crate::plan::{Operand, Place, Plan, Step};
use std::collections::HashMap;
use std::ops::Range;

/// Consecutive steps that repeat with only the layer numbers in their labels changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// Steps of the first repetition.
    pub first: Range<usize>,
    /// Number of repetitions, including the first; at least 2.
    pub n: usize,
}

impl Repeat {
    /// Steps of all repetitions after the first.
    pub fn folded(&self) -> Range<usize> {
        self.first.end..self.first.start + self.n * self.first.len()
    }
}

impl Plan {
    /// Finds equal layers: steps with the same ops, dtypes, shapes and memory, whose layer numbers differ by the same
    /// amount. A repetition lies within one segment, and repetitions do not overlap.
    pub fn repeats(&self) -> Vec<Repeat> {
        let mut ids = HashMap::new();
        let mut keys = Vec::with_capacity(self.steps().len());
        for (segment_idx, segment) in self.segments().iter().enumerate() {
            for step in &self.steps()[segment.steps.clone()] {
                let (label, layer) = split_layer(&step.label);
                let next_id = ids.len();
                let id = *ids.entry((segment_idx, label, self.signature(step))).or_insert(next_id);
                keys.push((id, layer));
            }
        }
        let mut repeats = Vec::new();
        let mut start = 0;
        while start < keys.len() {
            let longest = (1..=(keys.len() - start) / 2)
                .map(|len| (len, count(&keys[start..], len)))
                .filter(|&(_, n)| n > 1)
                // The shortest of equally long ones: one layer, not two.
                .max_by_key(|&(len, n)| (len * n, n));
            match longest {
                Some((len, n)) => {
                    repeats.push(Repeat { first: start..start + len, n });
                    start += len * n;
                }
                None => start += 1,
            }
        }
        repeats
    }

    fn signature(&self, step: &Step) -> String {
        let operand = |operand: &Operand| {
            let place = match self.buffer(operand.buffer).place {
                Place::Arena { .. } => "arena",
                Place::Control { .. } => "control",
                Place::Weight(_) => "weight",
                Place::State(_) => "state",
            };
            format!("{} {place}", operand.ty())
        };
        let [inputs, outputs] =
            [&step.inputs, &step.outputs].map(|list| list.iter().map(operand).collect::<Vec<_>>());
        format!("{:?} {inputs:?} {outputs:?}", step.op)
    }
}

/// How often the first `len` keys repeat, including the first time.
fn count(keys: &[(usize, Option<usize>)], len: usize) -> usize {
    let distance = |i: usize| {
        let ((id, layer), (next_id, next)) = (keys[i], keys[i + len]);
        (id == next_id).then_some(())?;
        next?.checked_sub(layer?).filter(|&d| d > 0)
    };
    let Some(step) = (len < keys.len()).then(|| distance(0)).flatten() else { return 1 };
    let n_equal = (0..keys.len() - len).take_while(|&i| distance(i) == Some(step)).count();
    1 + n_equal / len
}

/// A label without its first number between dots, and that number: the layer in `blk.3.attn_q`.
fn split_layer(label: &str) -> (String, Option<usize>) {
    let mut layer = None;
    let parts = label.split('.').map(|part| match part.parse() {
        Ok(number) if layer.is_none() => {
            layer = Some(number);
            "#"
        }
        _ => part,
    });
    (parts.collect::<Vec<_>>().join("."), layer)
}
