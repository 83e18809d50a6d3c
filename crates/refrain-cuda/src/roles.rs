//! What the numbers of a control block index, read off the ops that take them.
//!
//! Kernels trust these numbers: on a card one that points outside writes nothing or reads NaN, which nobody would
//! hear of. So each step's block is checked here, on the host, before it is sent; and verification makes its own
//! blocks by the same rules.

use refrain_graph::{Op, Operand, Place, Plan, Step};

use crate::error::CudaError;

/// A range of 32-bit words in the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) offset: usize, // bytes
    pub(crate) len: usize,    // words
}

impl Words {
    pub(crate) fn read(self, control: &[u8]) -> impl Iterator<Item = i32> + '_ {
        let bytes = control.get(self.offset..self.offset + 4 * self.len).unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w))
    }

    pub(crate) fn at(self, control: &[u8], i: usize) -> i32 {
        let start = self.offset + 4 * i;
        control.get(start..start + 4).map_or(-1, |w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]))
    }
}

/// Ids of rows of something; negative ones are empty places.
#[derive(Clone, Debug)]
pub(crate) struct Ids {
    pub(crate) words: Words,
    pub(crate) limit: usize,
    /// Whether an id beyond the limit is an error; where it is not, it is ignored.
    strict: bool,
    label: String,
}

/// Rows of tokens in a paged cache.
#[derive(Clone, Debug)]
pub(crate) struct Paging {
    pub(crate) positions: Words, // [n]
    pub(crate) seqs: Words,      // [n]
    pub(crate) tables: Words,    // [n_seqs, max_blocks]
    pub(crate) n_seqs: usize,
    pub(crate) max_blocks: usize,
    pub(crate) n_blocks: usize,
    pub(crate) kv_block: usize,
    /// How many positions back from its own a row looks; its own counts.
    reach: usize,
    label: String,
}

/// Parameters of a choice among logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) params: Words, // [n, SAMPLE_PARAMS]
    pub(crate) rng: Words,    // [n, 4]
}

/// What a plan's control block holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roles {
    pub(crate) ids: Vec<Ids>,
    pub(crate) paging: Vec<Paging>,
    pub(crate) choices: Vec<Choice>,
    /// States of which some rows are found through numbers that are not in the control block.
    pub(crate) elsewhere: Vec<usize>,
}

impl Roles {
    pub(crate) fn of(plan: &Plan) -> Roles {
        let mut roles = Roles::default();
        for step in plan.steps() {
            roles.add(plan, step);
        }
        roles
    }

    /// Tokens of the step, as far as a cache sees them; 1 for a plan without one.
    pub(crate) fn n_tokens(&self) -> usize {
        self.paging.iter().map(|p| p.positions.len).max().unwrap_or(1)
    }

    fn add(&mut self, plan: &Plan, step: &Step) {
        let ins = &step.inputs;
        match &step.op {
            Op::GatherRows(_) => self.add_ids(plan, &ins[1], ins[0].layout.shape().dims()[0], step, true),
            Op::KvAppend => self.add_paging(plan, &ins[0], [&ins[2], &ins[3], &ins[4]], 1, step),
            Op::Attention(attention) => {
                let reach = attention.window.unwrap_or(usize::MAX).max(1);
                self.add_paging(plan, &ins[1], [&ins[3], &ins[4], &ins[5]], reach, step);
            }
            Op::Sample => {
                let vocab = ins[0].layout.shape().dim_back(0);
                self.add_ids(plan, &ins[3], vocab, step, false);
                self.add_ids(plan, &ins[4], vocab, step, false);
                if let (Some(params), Some(rng)) = (words(plan, &ins[1]), words(plan, &ins[2])) {
                    self.choices.push(Choice { params, rng });
                }
            }
            Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce(_)
            | Op::Softmax
            | Op::MatMul
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::HostCall(_) => {}
        }
    }

    fn add_ids(&mut self, plan: &Plan, ids: &Operand, limit: usize, step: &Step, strict: bool) {
        let Some(words) = words(plan, ids) else { return };
        match self.ids.iter_mut().find(|i| i.words == words) {
            Some(known) => {
                known.limit = known.limit.min(limit);
                known.strict |= strict;
            }
            None => self.ids.push(Ids { words, limit, strict, label: step.label.clone() }),
        }
    }

    fn add_paging(
        &mut self,
        plan: &Plan,
        cache: &Operand,
        [positions, seqs, tables]: [&Operand; 3],
        reach: usize,
        step: &Step,
    ) {
        let found = (words(plan, positions), words(plan, seqs), words(plan, tables));
        let (Some(positions), Some(seqs), Some(table_words)) = found else {
            if let Place::State(id) = plan.buffer(cache.buffer).place {
                self.elsewhere.push(id.idx());
            }
            return;
        };
        let (cache, tables) = (cache.layout.shape(), tables.layout.shape());
        let [n_blocks, kv_block] = [cache.dims()[0], cache.dims()[2]];
        let same = |p: &&mut Paging| (p.positions, p.seqs, p.tables) == (positions, seqs, table_words);
        if let Some(known) = self.paging.iter_mut().find(same) {
            known.reach = known.reach.max(reach);
            known.n_blocks = known.n_blocks.min(n_blocks);
            return;
        }
        let (n_seqs, max_blocks) = (tables.dims()[0], tables.dims()[1]);
        let label = step.label.clone();
        let tables = table_words;
        self.paging.push(Paging {
            positions,
            seqs,
            tables,
            n_seqs,
            max_blocks,
            n_blocks,
            kv_block,
            reach,
            label,
        });
    }

    /// Refuses a control block that points outside what it indexes.
    pub(crate) fn check(&self, control: &[u8]) -> Result<(), CudaError> {
        let out = |label: &str, what, got: i64, limit| {
            Err(CudaError::OutOfRange { label: label.to_owned(), what, got, limit })
        };
        for ids in self.ids.iter().filter(|ids| ids.strict) {
            let bad = ids.words.read(control).find(|&id| id >= 0 && id as usize >= ids.limit);
            if let Some(id) = bad {
                return out(&ids.label, "row", id.into(), ids.limit);
            }
        }
        for p in &self.paging {
            for (row, position) in p.positions.read(control).enumerate().filter(|(_, pos)| *pos >= 0) {
                let seq = p.seqs.at(control, row);
                if seq < 0 || seq as usize >= p.n_seqs {
                    return out(&p.label, "a sequence", seq.into(), p.n_seqs);
                }
                let (position, table) = (position as usize, seq as usize * p.max_blocks);
                if position / p.kv_block >= p.max_blocks {
                    return out(&p.label, "a position", position as i64, p.max_blocks * p.kv_block);
                }
                let first = (position + 1).saturating_sub(p.reach) / p.kv_block;
                let blocks = (first..=position / p.kv_block).map(|b| p.tables.at(control, table + b));
                if let Some(block) = blocks.into_iter().find(|&b| b < 0 || b as usize >= p.n_blocks) {
                    return out(&p.label, "a KV block", block.into(), p.n_blocks);
                }
            }
        }
        Ok(())
    }
}

/// Where a dense operand of 32-bit elements lies in the control block, if it does.
pub(crate) fn words(plan: &Plan, operand: &Operand) -> Option<Words> {
    let Place::Control { offset, .. } = plan.buffer(operand.buffer).place else { return None };
    let dense = operand.layout.is_contiguous() && operand.dtype.block_bytes() == 4;
    let len = operand.layout.shape().n_elements();
    dense.then(|| Words { offset: offset + 4 * operand.layout.offset(), len })
}
