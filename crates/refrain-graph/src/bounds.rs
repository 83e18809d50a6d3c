//! Limits of the index values in a control block.
//!
//! Kernels use these values as addresses. On a GPU an out-of-range value writes nothing or reads NaN, and
//! nothing reports it. So a plan collects the limits of each index from its ops ([`Op::indexing`]), a control
//! block is checked on the host before its step is launched, and verification generates blocks by the same
//! rules.

use crate::inputs::Field;
use crate::op::Indexing;
use crate::plan::{Operand, Place, Plan, Step};

/// Indices of rows; negative ones are unused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdBound {
    /// Location of the indices.
    pub field: Field,
    /// Number of rows.
    pub limit: usize,
    /// Whether an index beyond the limit is an error. If not, it is ignored.
    pub strict: bool,
    label: String,
}

/// Token rows in paged caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedBound {
    /// Position of each row.
    pub positions: Field, // [n]
    /// Sequence of each row.
    pub seqs: Field, // [n]
    /// Blocks of each sequence, in order.
    pub tables: Field, // [n_seqs, max_blocks]
    /// Number of sequences.
    pub n_seqs: usize,
    /// Maximum number of blocks in a sequence.
    pub max_blocks: usize,
    /// Number of blocks in the pool.
    pub n_blocks: usize,
    /// Positions per block.
    pub kv_block: usize,
    /// How many positions a row attends to, counting back from and including its own.
    reach: usize,
    label: String,
}

/// Slots of recurrent states that a step's rows read and write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotBound {
    /// Position of each row.
    pub positions: Field, // [n]
    /// Sequence of each row.
    pub seqs: Field, // [n]
    /// The two slots of each sequence.
    pub slots: Field, // [n_seqs, 2]
    /// Number of slots.
    pub n_slots: usize,
    label: String,
}

impl SlotBound {
    /// Number of sequences.
    pub fn n_seqs(&self) -> usize {
        self.slots.len / 2
    }

    /// Returns the slot that a sequence's rows write if the first of them has position `first`; negative if
    /// there is none.
    pub fn written(&self, control: &[u8], seq: usize, first: usize) -> i32 {
        self.slots.at(control, 2 * seq + (first + 1) % 2)
    }

    /// Returns the first violation: an index out of range, or rows of a sequence that are not contiguous.
    fn find_bad(&self, control: &[u8]) -> Option<(&'static str, i64, usize)> {
        let (mut before, mut highest) = (None, -1);
        for row in 0..self.positions.len {
            let (position, seq) = (self.positions.at(control, row), self.seqs.at(control, row));
            if position < 0 {
                before = None;
                continue;
            }
            if seq < 0 || seq as usize >= self.n_seqs() {
                return Some(("the sequence", seq.into(), self.n_seqs()));
            }
            let goes_on = before == Some((seq, position - 1));
            before = Some((seq, position));
            if goes_on {
                continue;
            }
            // Rows are usually in sequence order, so the search rarely runs.
            let is_row_of = |r: usize| self.positions.at(control, r) >= 0 && self.seqs.at(control, r) == seq;
            if seq <= highest && (0..row).any(is_row_of) {
                return Some(("the sequence of non-contiguous rows", seq.into(), self.n_seqs()));
            }
            highest = highest.max(seq);
            let slots = [0, 1].map(|version| self.slots.at(control, 2 * seq as usize + version));
            if let Some(slot) = slots.iter().find(|&&s| s < 0 || s as usize >= self.n_slots) {
                return Some(("the slot", (*slot).into(), self.n_slots));
            }
            if slots[0] == slots[1] {
                return Some(("the second slot of a sequence", slots[1].into(), self.n_slots));
            }
        }
        None
    }
}

/// Documents of a step's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanBound {
    /// First row and end of each row's document.
    pub spans: Field, // [n, 2]
    label: String,
}

impl SpanBound {
    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.spans.len / 2
    }

    /// Document of a row.
    pub fn at(&self, control: &[u8], row: usize) -> [i32; 2] {
        [self.spans.at(control, 2 * row), self.spans.at(control, 2 * row + 1)]
    }

    /// Returns an offending value if documents are not contiguous, or rows of one document have different
    /// spans.
    fn find_bad(&self, control: &[u8]) -> Option<i64> {
        let rows = control.get(self.spans.range()).unwrap_or_default().as_chunks::<8>().0;
        let number = |span: &[u8; 8], i: usize| {
            let word = span.as_chunks::<4>().0[i];
            i64::from(i32::from_le_bytes(word))
        };
        let mut row = 0;
        while row < self.n_rows() {
            let Some(span) = rows.get(row) else { return Some(-1) };
            let (first, end) = (number(span, 0), number(span, 1));
            if first == end && (0..=self.n_rows() as i64).contains(&first) {
                row += 1;
                continue;
            }
            if first != row as i64 {
                return Some(first);
            }
            if end <= first || end > self.n_rows() as i64 {
                return Some(end);
            }
            let document = rows.get(row..end as usize).unwrap_or_default();
            if let Some(other) = document.iter().find(|other| *other != span) {
                return Some(number(other, 0));
            }
            row = end as usize;
        }
        None
    }
}

/// An index that is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfBounds {
    /// Label of the step that uses the index.
    pub label: String,
    /// Name of the index.
    pub what: &'static str,
    /// Its value.
    pub got: i64,
    /// Exclusive upper bound.
    pub limit: usize,
}

/// Limits of all indices in a plan's control block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Row indices.
    pub ids: Vec<IdBound>,
    /// Token rows in paged caches.
    pub paged: Vec<PagedBound>,
    /// Documents of rows.
    pub spans: Vec<SpanBound>,
    /// Slots of rows.
    pub slots: Vec<SlotBound>,
    /// States that are also indexed by values outside the control block.
    pub computed: Vec<usize>,
}

impl Bounds {
    /// Collects the limits of all index inputs of a plan.
    pub fn of(plan: &Plan) -> Bounds {
        let mut bounds = Bounds::default();
        for step in plan.steps() {
            for indexing in step.op.indexing() {
                bounds.add(plan, step, indexing);
            }
        }
        bounds
    }

    /// Number of token rows, as the caches see it; 1 for a plan without caches.
    pub fn n_tokens(&self) -> usize {
        let (paged, slots) = (self.paged.iter().map(|p| p.positions), self.slots.iter().map(|s| s.positions));
        paged.chain(slots).map(|positions| positions.len).max().unwrap_or(1)
    }

    fn add(&mut self, plan: &Plan, step: &Step, indexing: Indexing) {
        let ins = &step.inputs;
        match indexing {
            Indexing::Rows { ids, table, axis, strict } => {
                let limit = ins[table].layout.shape().dims()[axis];
                self.add_ids(plan, &ins[ids], limit, step, strict);
            }
            Indexing::Paged { cache, positions, reach } => {
                let places = [&ins[positions], &ins[positions + 1], &ins[positions + 2]];
                self.add_paged(plan, &ins[cache], places, reach, step);
            }
            Indexing::Slots { state, positions } => {
                let places = [&ins[positions], &ins[positions + 1], &ins[positions + 2]];
                self.add_slots(plan, &ins[state], places, step);
            }
            Indexing::Below { ids, limit } => self.add_ids(plan, &ins[ids], limit, step, true),
            Indexing::Spans { spans } => {
                if let Some(field) = plan.field_of(&ins[spans])
                    && self.spans.iter().all(|known| known.spans != field)
                {
                    self.spans.push(SpanBound { spans: field, label: step.label.clone() });
                }
            }
        }
    }

    fn add_ids(&mut self, plan: &Plan, ids: &Operand, limit: usize, step: &Step, strict: bool) {
        let Some(field) = plan.field_of(ids) else { return };
        match self.ids.iter_mut().find(|i| i.field == field) {
            Some(known) => {
                known.limit = known.limit.min(limit);
                known.strict |= strict;
            }
            None => self.ids.push(IdBound { field, limit, strict, label: step.label.clone() }),
        }
    }

    fn add_slots(
        &mut self,
        plan: &Plan,
        state: &Operand,
        [positions, seqs, slots]: [&Operand; 3],
        step: &Step,
    ) {
        let found = (plan.field_of(positions), plan.field_of(seqs), plan.field_of(slots));
        let (Some(positions), Some(seqs), Some(slots)) = found else {
            if let Place::State(id) = plan.buffer(state.buffer).place {
                self.computed.push(id.idx());
            }
            return;
        };
        let n_slots = state.layout.shape().dims()[0];
        let same = |s: &&mut SlotBound| (s.positions, s.seqs, s.slots) == (positions, seqs, slots);
        match self.slots.iter_mut().find(same) {
            Some(known) => known.n_slots = known.n_slots.min(n_slots),
            None => {
                self.slots.push(SlotBound { positions, seqs, slots, n_slots, label: step.label.clone() });
            }
        }
    }

    fn add_paged(
        &mut self,
        plan: &Plan,
        cache: &Operand,
        [positions, seqs, tables]: [&Operand; 3],
        reach: usize,
        step: &Step,
    ) {
        let found = (plan.field_of(positions), plan.field_of(seqs), plan.field_of(tables));
        let (Some(positions), Some(seqs), Some(table_field)) = found else {
            if let Place::State(id) = plan.buffer(cache.buffer).place {
                self.computed.push(id.idx());
            }
            return;
        };
        let (cache, tables) = (cache.layout.shape(), tables.layout.shape());
        let [n_blocks, kv_block] = [cache.dims()[0], cache.dims()[2]];
        let same = |p: &&mut PagedBound| {
            (p.positions, p.seqs, p.tables, p.kv_block) == (positions, seqs, table_field, kv_block)
        };
        if let Some(known) = self.paged.iter_mut().find(same) {
            known.reach = known.reach.max(reach);
            known.n_blocks = known.n_blocks.min(n_blocks);
            return;
        }
        let (n_seqs, max_blocks) = (tables.dims()[0], tables.dims()[1]);
        let (tables, label) = (table_field, step.label.clone());
        let bound =
            PagedBound { positions, seqs, tables, n_seqs, max_blocks, n_blocks, kv_block, reach, label };
        self.paged.push(bound);
    }

    /// Refuses a control block with an index out of range.
    pub fn check(&self, control: &[u8]) -> Result<(), OutOfBounds> {
        let out = |label: &str, what, got: i64, limit| {
            Err(OutOfBounds { label: label.to_owned(), what, got, limit })
        };
        for ids in self.ids.iter().filter(|ids| ids.strict) {
            // Checks only the maximum, which needs no branch per id.
            let most = ids.field.read(control).fold(-1, i32::max);
            if most >= 0 && most as usize >= ids.limit {
                return out(&ids.label, "row", most.into(), ids.limit);
            }
        }
        for spans in &self.spans {
            if let Some(got) = spans.find_bad(control) {
                return out(&spans.label, "the end of a document's span", got, spans.n_rows());
            }
        }
        for slots in &self.slots {
            if let Some((what, got, limit)) = slots.find_bad(control) {
                return out(&slots.label, what, got, limit);
            }
        }
        for p in &self.paged {
            for (row, position) in p.positions.read(control).enumerate().filter(|(_, pos)| *pos >= 0) {
                let seq = p.seqs.at(control, row);
                if seq < 0 || seq as usize >= p.n_seqs {
                    return out(&p.label, "the sequence", seq.into(), p.n_seqs);
                }
                let (position, table) = (position as usize, seq as usize * p.max_blocks);
                if position / p.kv_block >= p.max_blocks {
                    return out(&p.label, "the position", position as i64, p.max_blocks * p.kv_block);
                }
                let first = (position + 1).saturating_sub(p.reach) / p.kv_block;
                let mut blocks = (first..=position / p.kv_block).map(|b| p.tables.at(control, table + b));
                if let Some(block) = blocks.find(|&b| b < 0 || b as usize >= p.n_blocks) {
                    return out(&p.label, "the KV block", block.into(), p.n_blocks);
                }
            }
        }
        Ok(())
    }
}
