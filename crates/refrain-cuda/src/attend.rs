//! Which steps of a one-token plan one launch does between the products of queries, keys and values and the output's.

use std::collections::HashSet;

use refrain_driver::{Buf, Launch};
use refrain_graph::{Attention, BufferId, Op, Operand, Place, Plan, Rope, Step};
use refrain_kernels::{
    AttendArgs, AttendNorm, KernelError, attend_counter_bytes, attend_scratch_bytes, attend_splits,
    has_product,
};

use crate::group::apart;
use crate::lower::Lowering;
use crate::resident::COUNTER_BYTES;

/// Steps that follow each other: norms of queries and keys, or none; their ropes; the appends; the attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttendRun<'a> {
    /// All of them, in the plan's order.
    pub(crate) steps: &'a [Step],
    /// Of queries and of keys.
    norms: Option<[&'a Step; 2]>,
    /// Of queries and of keys.
    ropes: [&'a Step; 2],
    /// Of keys and of values.
    appends: [&'a Step; 2],
    pub(crate) attention: &'a Step,
}

const NO_CHAIN: &str = "rope, append and attention do not follow each other over the same positions";
const NOT_ALONE: &str = "something else reads what lies between its steps, or its result overwrites an input";

fn eps_of(step: &Step) -> Option<f32> {
    if let Op::RmsNorm { eps } = step.op { Some(eps) } else { None }
}

/// The sizes of a run, as kernels name them.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    n_heads: usize,
    n_kv_heads: usize,
    kv_block: usize,
    head_dim: usize,
    n_seqs: usize,
    max_blocks: usize,
}

impl<'a> AttendRun<'a> {
    /// The run that `rest` begins with, when one launch can do it: a single row, so that no row sees what another one
    /// appends; nobody else reads the values in between, for the launch does not write them; and its result lies
    /// apart from what its blocks still read.
    pub(crate) fn find(plan: &Plan, rest: &'a [Step]) -> Option<AttendRun<'a>> {
        AttendRun::candidate(rest).filter(|run| run.obstacle(plan).is_none())
    }

    /// Why the attention of one row at `steps[idx]` is no part of a run; `None` when it is, or has more rows.
    pub(crate) fn why_not(plan: &Plan, steps: &[Step], idx: usize) -> Option<String> {
        let attention = &steps[idx];
        let is_one = attention.inputs.first().is_some_and(|q| q.layout.shape().dims().first() == Some(&1));
        if !matches!(attention.op, Op::Attention(_)) || !is_one {
            return None;
        }
        // Of a chain with norms the one without them is a part, and does not begin where the other does.
        let ends_here = |run: &AttendRun<'_>| std::ptr::eq(run.attention, attention);
        let run =
            [7, 5].into_iter().filter_map(|n| AttendRun::candidate(&steps[(idx + 1).checked_sub(n)?..]));
        match run.into_iter().find(ends_here) {
            Some(run) => run.obstacle(plan),
            None => Some(NO_CHAIN.to_owned()),
        }
    }

    /// The steps that would be a run.
    fn candidate(rest: &'a [Step]) -> Option<AttendRun<'a>> {
        let is_norm = |i: usize| rest.get(i).is_some_and(|s| matches!(s.op, Op::RmsNorm { .. }));
        let n_norms = if is_norm(0) && is_norm(1) { 2 } else { 0 };
        let steps = rest.get(..n_norms + 5)?;
        let (norms, rest) = steps.split_at(n_norms);
        let [q, k, keys, values, attention] = rest.first_chunk()?.each_ref();
        let norms = norms.first_chunk().map(|norms: &[Step; 2]| norms.each_ref());
        Some(AttendRun { steps, norms, ropes: [q, k], appends: [keys, values], attention })
    }

    /// Why one launch cannot do these steps.
    fn obstacle(&self, plan: &Plan) -> Option<String> {
        if !self.is_chain(plan) {
            return Some(NO_CHAIN.to_owned());
        }
        self.misfit().or_else(|| (!self.is_alone(plan)).then(|| NOT_ALONE.to_owned()))
    }

    fn rope(&self) -> Option<Rope> {
        match self.ropes.map(|step| &step.op) {
            [Op::Rope(q), Op::Rope(k)] if q == k => Some(*q),
            _ => None,
        }
    }

    fn attention(&self) -> Option<Attention> {
        if let Op::Attention(attention) = self.attention.op { Some(attention) } else { None }
    }

    /// What the first step of queries, the first step of keys and the append of values read.
    fn inputs(&self) -> [&'a Operand; 3] {
        let [q, k] = self.norms.unwrap_or(self.ropes);
        [&q.inputs[0], &k.inputs[0], &self.appends[1].inputs[1]]
    }

    /// Each step reads what the one before it made, all of them at the same positions of the same sequences.
    fn is_chain(&self, plan: &Plan) -> bool {
        if self.rope().is_none()
            || self.attention().is_none()
            || !self.appends.iter().all(|step| matches!(step.op, Op::KvAppend))
        {
            return false;
        }
        let ([q, k], [keys, values], attention) = (self.ropes, self.appends, self.attention);
        let is_weight = |operand: &Operand| matches!(plan.buffer(operand.buffer).place, Place::Weight(_));
        let norms = self.norms.is_none_or(|[q_norm, k_norm]| {
            eps_of(q_norm) == eps_of(k_norm)
                && q_norm.outputs[0] == q.inputs[0]
                && k_norm.outputs[0] == k.inputs[0]
                && is_weight(&q_norm.inputs[1])
                && is_weight(&k_norm.inputs[1])
        });
        norms
            && q.inputs[1..] == k.inputs[1..]
            && is_weight(&q.inputs[2])
            && keys.inputs[1] == k.outputs[0]
            && attention.inputs[0] == q.outputs[0]
            && keys.inputs[2] == q.inputs[1]
            && keys.inputs[2..] == values.inputs[2..]
            && keys.inputs[2..] == attention.inputs[3..]
            && keys.inputs[0].ty() == values.inputs[0].ty()
            && keys.inputs[0].buffer != values.inputs[0].buffer
            && attention.inputs[1] == keys.outputs[0]
            && attention.inputs[2] == values.outputs[0]
    }

    /// What there is no kernel for: more rows than one, and some sizes.
    fn misfit(&self) -> Option<String> {
        let one_row = self.inputs().iter().all(|x| x.layout.shape().dims().first() == Some(&1));
        let s = Sizes::of(self.attention).filter(|_| one_row);
        let Some(Sizes { n_heads, kv_block, head_dim, .. }) = s else {
            return Some("there is more than one row".to_owned());
        };
        if !kv_block.is_power_of_two() || kv_block < 16 {
            return Some(format!("KV blocks have {kv_block} positions, not 16, 32 or another power of two"));
        }
        if !head_dim.is_multiple_of(8) || !(8..=256).contains(&head_dim) {
            return Some(format!("heads have {head_dim} elements, not a multiple of 8 up to 256"));
        }
        if attend_counter_bytes(1, n_heads) > COUNTER_BYTES {
            return Some(format!("{n_heads} heads have more counters than there is room for"));
        }
        let is_empty = self.attention.outputs[0].layout.shape().n_elements() == 0;
        is_empty.then(|| "it computes nothing".to_owned())
    }

    /// Nobody but these steps reads the values between them, and the result overwrites no input, unless queries at their
    /// own places: a block has read them when it writes.
    fn is_alone(&self, plan: &Plan) -> bool {
        let Some(last) = plan.steps().iter().position(|step| step.node == self.attention.node) else {
            return false;
        };
        let between = self.norms.iter().flatten().chain(&self.ropes).map(|step| step.outputs[0].buffer);
        let is_read_later = |id: BufferId| plan.buffer(id).last > last;
        let y = &self.attention.outputs[0];
        let [q, k, v] = self.inputs();
        let in_place = y.buffer == q.buffer && y.layout == q.layout;
        between.into_iter().all(|id| !is_read_later(id))
            && (in_place || apart(plan, y, q))
            && apart(plan, y, k)
            && apart(plan, y, v)
    }

    /// The steps whose outputs the launch writes.
    pub(crate) fn written(&self) -> impl Iterator<Item = &'a Step> {
        self.appends.into_iter().chain([self.attention])
    }
}

impl Sizes {
    /// Those of an attention step, when its operands have the shapes that these ops give them.
    fn of(attention: &Step) -> Option<Sizes> {
        let [q, cache, tables] = [0, 1, 5].map(|i| attention.inputs[i].layout.shape());
        let (&[_, n_heads, head_dim], &[_, n_kv_heads, kv_block, _], &[n_seqs, max_blocks]) =
            (q.dims(), cache.dims(), tables.dims())
        else {
            return None;
        };
        Some(Sizes { n_heads, n_kv_heads, kv_block, head_dim, n_seqs, max_blocks })
    }

    fn splits(&self, n_sms: u32) -> usize {
        attend_splits(1, self.n_kv_heads, self.max_blocks * self.kv_block, n_sms)
    }

    fn scratch_bytes(&self, n_sms: u32) -> u64 {
        attend_scratch_bytes(1, self.n_heads, self.head_dim, self.splits(n_sms))
    }
}

/// Scratch that the run of an attention step needs; nothing when it has more rows than one.
pub(crate) fn scratch_bytes(attention: &Step, n_sms: u32) -> u64 {
    let one_row = attention.inputs[0].layout.shape().dims().first() == Some(&1);
    Sizes::of(attention).filter(|_| one_row).map_or(0, |sizes| sizes.scratch_bytes(n_sms))
}

/// Weights to an attention above which their products should have the card's multiprocessors evenly: about 4 us of
/// reading. Smaller models gain more from starting early.
const FILL_BYTES: usize = 16 << 20;
/// Weights to an attention above which the product before it reads for some 3 us and more.
const EARLY_BYTES: usize = 96 << 20;

impl Lowering<'_> {
    /// Bytes of weights that products read, for each attention.
    fn weight_bytes_per_attention(&self) -> usize {
        let operands = self.plan.steps().iter().flat_map(|step| &step.inputs);
        let is_one = |o: &&Operand| {
            has_product(o.dtype) && matches!(self.plan.buffer(o.buffer).place, Place::Weight(_))
        };
        let buffers: HashSet<BufferId> = operands.filter(is_one).map(|o| o.buffer).collect();
        let bytes: usize = buffers.into_iter().map(|id| self.plan.buffer(id).bytes).sum();
        let n = self.plan.steps().iter().filter(|step| matches!(step.op, Op::Attention(_))).count();
        bytes / n.max(1)
    }

    /// The launch of a run. Counters are zero before the first launch and used by nothing else.
    pub(crate) fn attend(&self, run: &AttendRun<'_>, counters: Buf) -> Result<Launch, KernelError> {
        let (Some(rope), Some(attention), Some(s)) = (run.rope(), run.attention(), Sizes::of(run.attention))
        else {
            unreachable!("a run has these ops");
        };
        let ([q, _], [keys, values]) = (run.ropes, run.appends);
        let ((k_cache, n_blocks), (v_cache, _)) =
            (self.cache(keys, &keys.inputs[0])?, self.cache(values, &values.inputs[0])?);
        let norm = match run.norms {
            None => None,
            Some([q, k]) => {
                let eps = eps_of(q).unwrap_or_default();
                Some(AttendNorm { q: self.vector(q, 1)?, k: self.vector(k, 1)?, eps })
            }
        };
        let [q_in, k_in, v_in] = run.inputs();
        let scratch = s.scratch_bytes(self.n_sms);
        let labels: Vec<&str> = run.steps.iter().map(|step| step.label.as_str()).collect();
        self.kernels.attend(&AttendArgs {
            rope,
            attention,
            q: self.view(q_in)?,
            k: self.view(k_in)?,
            v: self.view(v_in)?,
            norm,
            y: self.dense(run.attention, &run.attention.outputs[0])?,
            k_cache,
            v_cache,
            cache_dtype: keys.inputs[0].dtype,
            positions: self.dense(keys, &keys.inputs[2])?,
            seqs: self.dense(keys, &keys.inputs[3])?,
            tables: self.dense(keys, &keys.inputs[4])?,
            inv_freq: self.vector(q, 2)?,
            scratch: Some(self.resident.scratch.slice(0, scratch)?),
            counters: Some(counters),
            n: 1,
            n_heads: s.n_heads,
            n_blocks,
            n_kv_heads: s.n_kv_heads,
            kv_block: s.kv_block,
            head_dim: s.head_dim,
            n_seqs: s.n_seqs,
            max_blocks: s.max_blocks,
            n_splits: s.splits(self.n_sms),
            fills: self.weight_bytes_per_attention() > FILL_BYTES,
            early: self.weight_bytes_per_attention() > EARLY_BYTES,
            step: &labels.join(" + "),
        })
    }
}
