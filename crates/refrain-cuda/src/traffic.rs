//! Bytes that a step's launches move, as far as its control block determines them.
//!
//! A launch names whole buffers, since a recording must serve every step. Of a cache it reads only the
//! positions of its sequences, and of a gathered table only the requested rows.

use std::collections::HashMap;

use refrain_driver::{Access, Buf, DriverError};
use refrain_graph::{Field, Op, Operand, Plan};

use crate::resident::ResidentMemory;
use crate::warm::Work;

/// Bytes that one step moves in buffers that launches only use in part.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    caches: Vec<Cache>,
    tables: Vec<GatherTable>,
}

#[derive(Debug)]
struct Cache {
    buf: Buf,
    read_bytes: u64,
    written_bytes: u64,
    /// Label of the attention that reads it.
    reader: String,
}

#[derive(Debug)]
struct GatherTable {
    label: String,
    buf: Buf,
    bytes: u64,
}

impl Moved {
    /// Bytes that a step of a plan moves with this control block.
    pub(crate) fn of(plan: &Plan, resident: &ResidentMemory, control: &[u8]) -> Result<Moved, DriverError> {
        let mut moved = Moved::default();
        for step in plan.steps() {
            let ins = &step.inputs;
            match &step.op {
                Op::Attention(attention) => {
                    let (Some(positions), Some(seqs)) = (plan.field_of(&ins[3]), plan.field_of(&ins[4]))
                    else {
                        continue;
                    };
                    let n = attended_positions(positions, seqs, attention.window, control);
                    for cache in ins[1..3].iter().chain(&ins[6..]) {
                        let seen = moved.cache(plan, resident, cache)?;
                        (seen.read_bytes, seen.reader) = (n * position_bytes(cache), step.label.clone());
                    }
                }
                Op::KvAppend => {
                    let Some(positions) = plan.field_of(&ins[2]) else { continue };
                    let n = positions.read(control).filter(|p| *p >= 0).count() as u64;
                    moved.cache(plan, resident, &ins[0])?.written_bytes = n * position_bytes(&ins[0]);
                }
                Op::KvAppendBytes => {
                    let Some(positions) = plan.field_of(&ins[3]) else { continue };
                    let n = positions.read(control).filter(|p| *p >= 0).count() as u64;
                    for cache in &ins[..2] {
                        moved.cache(plan, resident, cache)?.written_bytes = n * position_bytes(cache);
                    }
                }
                Op::GatherRows(_) => {
                    let n = match plan.field_of(&ins[1]) {
                        Some(ids) => ids.read(control).filter(|id| *id >= 0).count(),
                        None => ins[1].layout.shape().n_elements(),
                    };
                    let (buf, row) =
                        (resident.buffer(plan, ins[0].buffer)?, ins[0].layout.shape().dim_back(0));
                    let bytes = ins[0].dtype.bytes_for(n * row).unwrap_or(0) as u64;
                    moved.tables.push(GatherTable { label: step.label.clone(), buf, bytes });
                }
                Op::View(_)
                | Op::Copy
                | Op::Cast(_)
                | Op::Unary(_)
                | Op::Binary(_)
                | Op::Reduce { .. }
                | Op::Compare(_)
                | Op::Select
                | Op::Pick
                | Op::PlaceColumns { .. }
                | Op::Pad { .. }
                | Op::ScatterAddRows { .. }
                | Op::SpanAttention(_)
                | Op::Moe(_)
                | Op::Lora(_)
                | Op::Train(_)
                | Op::Softmax
                | Op::MatMul
                | Op::RmsNorm { .. }
                | Op::AddRmsNorm { .. }
                | Op::Gate(_)
                | Op::Rope(_)
                | Op::Recurrent(_)
                | Op::Sample(_)
                | Op::Accumulate
                | Op::HostCall(_) => {}
            }
        }
        Ok(moved)
    }

    fn cache(
        &mut self,
        plan: &Plan,
        resident: &ResidentMemory,
        operand: &Operand,
    ) -> Result<&mut Cache, DriverError> {
        let refrain_graph::Place::State(id) = plan.buffer(operand.buffer).place else {
            // A cache that is not a state has no scratch blocks.
            let buf = resident.buffer(plan, operand.buffer)?;
            return Ok(self.cache_of(buf));
        };
        Ok(self.cache_of(resident.state_buf(id.idx())?))
    }

    fn cache_of(&mut self, buf: Buf) -> &mut Cache {
        let idx = self.caches.iter().position(|c| c.buf == buf).unwrap_or_else(|| {
            self.caches.push(Cache { buf, read_bytes: 0, written_bytes: 0, reader: String::new() });
            self.caches.len() - 1
        });
        &mut self.caches[idx]
    }

    /// Bytes that one launch, copy or fill moves.
    pub(crate) fn bytes(&self, work: &Work) -> u64 {
        let label = work.step_and_kernel().0;
        // A fused launch carries the labels of all its steps, joined.
        let is_for = |step: &str| label.split(" + ").any(|l| l == step);
        let of = |(buf, access): (Buf, Access)| {
            if let Some(cache) = self.caches.iter().find(|c| c.buf == buf) {
                let (reads, writes) = (is_for(&cache.reader), access != Access::Read);
                return u64::from(reads) * cache.read_bytes + u64::from(writes) * cache.written_bytes;
            }
            let table = self.tables.iter().find(|t| t.buf == buf && is_for(&t.label));
            table.map_or(buf.len(), |t| t.bytes)
        };
        work.accesses().into_iter().map(of).sum()
    }
}

/// Bytes of one position in a cache `[n_blocks, n_kv_heads, kv_block, head_dim]`.
fn position_bytes(cache: &Operand) -> u64 {
    match cache.layout.shape().dims() {
        // Scales of an 8-bit cache.
        [_, n_kv_heads, _] => (n_kv_heads * cache.dtype.block_bytes()) as u64,
        [_, n_kv_heads, _, head_dim] => (n_kv_heads * head_dim * cache.dtype.block_bytes()) as u64,
        _ => 0,
    }
}

/// Positions that the rows of a step attend to. Positions shared by several rows of a sequence count once.
fn attended_positions(positions: Field, seqs: Field, window: Option<usize>, control: &[u8]) -> u64 {
    let mut ranges: HashMap<i32, (u64, u64)> = HashMap::new();
    for (row, position) in positions.read(control).enumerate().filter(|(_, p)| *p >= 0) {
        let end = position as u64 + 1;
        let start = end.saturating_sub(window.map_or(end, |w| w as u64));
        let range = ranges.entry(seqs.at(control, row)).or_insert((start, end));
        *range = (range.0.min(start), range.1.max(end));
    }
    ranges.values().map(|(start, end)| end - start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_attend_to_the_start_or_the_window_and_padding_attends_to_nothing() {
        let words = |values: &[i32]| bytemuck::cast_slice::<i32, u8>(values).to_vec();
        // Positions of three rows and a padding row, then their sequences.
        let control = [words(&[7, 8, 3, -1]), words(&[0, 0, 1, 0])].concat();
        let (positions, seqs) = (Field { offset: 0, len: 4 }, Field { offset: 16, len: 4 });
        assert_eq!(attended_positions(positions, seqs, None, &control), 9 + 4);
        assert_eq!(attended_positions(positions, seqs, Some(3), &control), 4 + 3);
    }
}
