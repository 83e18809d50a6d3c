//! Fused attention for one token of each sequence: one launch from the query, key and value projections to
//! the output projection.

use std::collections::HashSet;

use refrain_driver::Launch;
use refrain_driver::api::DeviceInfo;
use refrain_graph::{
    Attend, AttendStored, AttentionInputs, BufferId, Fusion, GroupKind, GroupQuery, NodeId, Op, Operand,
    Place, Step,
};
use refrain_kernels::{
    AttendArgs, AttendNorm, BufView, KernelError, MAX_ATTEND_ROWS, attend_counter_bytes,
    attend_scratch_bytes, attend_splits, has_product,
};
use refrain_tensor::Shape;

use crate::group::{eps, is_vector_weight};
use crate::lower::Lowering;
use crate::prefill::NarrowTo;
use crate::resident::COUNTER_BYTES;

/// Reported for a single-row attention outside any group when the backend was not asked to fuse more.
pub(crate) const NO_CHAIN: &str = "rope, appends and attention do not form a chain over the same positions with no \
                                   other readers of its values";

/// Reported for a single-row attention over an 8-bit cache.
pub(crate) const IN_BYTES: &str = "no fused kernel reads an 8-bit cache";

/// Sizes of an attention, under the names that kernels use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttendSizes {
    /// Rows, each from a different sequence.
    n: usize,
    pub(crate) n_heads: usize,
    n_kv_heads: usize,
    kv_block: usize,
    head_dim: usize,
    n_seqs: usize,
    max_blocks: usize,
}

/// Whether one launch can run a chain. It can for a single row, or for rows of different sequences, where no
/// row reads what another one appends.
pub(crate) fn fuses(query: &GroupQuery<'_>, attend: &Attend, card: &DeviceInfo) -> Fusion {
    let norms: Vec<NodeId> = attend.norms.iter().flatten().chain(&attend.value_norm).copied().collect();
    fuses_around(query, attend.attention, &norms, attend.ropes[0], card)
}

/// Like [`fuses`], over caches that other launches fill.
pub(crate) fn fuses_stored(query: &GroupQuery<'_>, attend: &AttendStored, card: &DeviceInfo) -> Fusion {
    fuses_around(query, attend.attention, attend.norm.as_slice(), attend.rope, card)
}

fn fuses_around(
    query: &GroupQuery<'_>,
    attention: NodeId,
    norms: &[NodeId],
    rope: NodeId,
    card: &DeviceInfo,
) -> Fusion {
    let shape = |i: usize| query.input(attention, i).layout.shape();
    let [q, cache, tables] = [0, 1, 5].map(shape);
    let are_apart = |sizes: &AttendSizes| sizes.n == 1 || query.step().is_some_and(|step| step.is_decode());
    // Rows of the same sequence are handled by separate kernels.
    let Some(sizes) = AttendSizes::of(q, cache, tables).filter(are_apart) else {
        return Fusion::Smaller;
    };
    let alike = norms.windows(2).all(|pair| eps(query.op(pair[0])) == eps(query.op(pair[1])));
    let because = if !alike || !norms.iter().all(|&norm| is_vector_weight(&query.input(norm, 1))) {
        Some("queries, keys and values use different norms".to_owned())
    } else if !is_vector_weight(&query.input(rope, 2)) {
        Some("its rope frequencies are not weights".to_owned())
    } else if query.n_inputs(attention) > 6 && !is_vector_weight(&query.input(attention, 6)) {
        Some("its sinks are not weights".to_owned())
    } else {
        sizes.misfit(card.n_sms)
    };
    because.map_or(Fusion::Joined, Fusion::No)
}

impl AttendSizes {
    /// Sizes from the shapes of queries, cache and block tables; `None` if the shapes are not those of an
    /// attention.
    fn of(q: Shape, cache: Shape, tables: Shape) -> Option<AttendSizes> {
        let (&[n, n_heads, head_dim], &[_, n_kv_heads, kv_block, _], &[n_seqs, max_blocks]) =
            (q.dims(), cache.dims(), tables.dims())
        else {
            return None;
        };
        Some(AttendSizes { n, n_heads, n_kv_heads, kv_block, head_dim, n_seqs, max_blocks })
    }

    /// Sizes of an attention step.
    pub(crate) fn of_step(attention: &Step) -> Option<AttendSizes> {
        let [q, cache, tables] = [0, 1, 5].map(|i| attention.inputs[i].layout.shape());
        AttendSizes::of(q, cache, tables)
    }

    /// The reason why no kernel supports these sizes.
    fn misfit(&self, n_sms: u32) -> Option<String> {
        let AttendSizes { n, n_heads, kv_block, head_dim, .. } = *self;
        if !kv_block.is_power_of_two() || kv_block < 16 {
            return Some(format!("KV blocks have {kv_block} positions, must be a power of two, 16 or more"));
        }
        if !head_dim.is_multiple_of(8) || !(8..=512).contains(&head_dim) {
            return Some(format!("heads have {head_dim} elements, must be a multiple of 8 up to 512"));
        }
        if n > MAX_ATTEND_ROWS {
            return Some(format!("one launch holds {MAX_ATTEND_ROWS} rows, got {n}"));
        }
        let counters = attend_counter_bytes(n, n_heads, self.splits(n_sms));
        (counters > COUNTER_BYTES).then(|| {
            format!(
                "{n_heads} heads of {n} rows need {counters} bytes of counters, {COUNTER_BYTES} are allocated"
            )
        })
    }

    fn splits(&self, n_sms: u32) -> usize {
        attend_splits(self.n, self.n_kv_heads, self.max_blocks * self.kv_block, n_sms)
    }

    /// Scratch bytes of the launch.
    pub(crate) fn scratch_bytes(&self, n_sms: u32) -> u64 {
        attend_scratch_bytes(self.n, self.n_heads, self.head_dim, self.splits(n_sms))
    }
}

/// Weight bytes per attention above which the products should occupy all SMs evenly: about 4 us of reading.
/// Smaller models gain more from an early start.
const FILL_BYTES: usize = 16 << 20;
/// Weight bytes per attention above which the preceding product reads for 3 us or more.
const EARLY_BYTES: usize = 96 << 20;

impl Lowering<'_> {
    /// Weight bytes read by products, per attention.
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

    /// Launch of a chain. Its counters are zero before the first launch and serve nothing else.
    pub(crate) fn attend(&self, attend: &Attend, narrow: Option<&NarrowTo>) -> Result<Launch, KernelError> {
        let plan = self.plan;
        let [q, k] = attend.ropes.map(|node| plan.step(node));
        let [keys, values] = attend.appends.map(|node| plan.step(node));
        let norms = attend.norms.map(|norms| norms.map(|node| plan.step(node)));
        let value_norm = attend.value_norm.map(|node| plan.step(node));
        let norm = match norms {
            None => None,
            Some([q, k]) => Some(AttendNorm {
                q: self.vector(q, 1)?,
                k: Some(self.vector(k, 1)?),
                v: value_norm.map(|v| self.vector(v, 1)).transpose()?,
                eps: eps(&q.op).unwrap_or_default(),
            }),
        };
        let [q_from, k_from] = norms.unwrap_or([q, k]);
        let v_from = value_norm.map_or(&values.inputs[1], |norm| &norm.inputs[0]);
        let kv = [self.view(&k_from.inputs[0])?, self.view(v_from)?];
        let caches = [(keys, &keys.inputs[0]), (values, &values.inputs[0])];
        let members = Members { q_from, rope: q, attention: plan.step(attend.attention), caches };
        self.attend_over(&members, GroupKind::Attend(*attend), norm, Some(kv), narrow)
    }

    /// Launch of an attention over caches that other launches fill.
    pub(crate) fn attend_stored(
        &self,
        attend: &AttendStored,
        narrow: Option<&NarrowTo>,
    ) -> Result<Launch, KernelError> {
        let plan = self.plan;
        let (rope, attention) = (plan.step(attend.rope), plan.step(attend.attention));
        let norm = attend.norm.map(|node| plan.step(node));
        let q_from = norm.unwrap_or(rope);
        let norm = match norm {
            None => None,
            Some(norm) => {
                let eps = eps(&norm.op).unwrap_or_default();
                Some(AttendNorm { q: self.vector(norm, 1)?, k: None, v: None, eps })
            }
        };
        let caches = [1, 2].map(|i| (attention, &attention.inputs[i]));
        let members = Members { q_from, rope, attention, caches };
        self.attend_over(&members, GroupKind::AttendStored(*attend), norm, None, narrow)
    }

    fn attend_over(
        &self,
        members: &Members<'_>,
        kind: GroupKind,
        norm: Option<AttendNorm>,
        kv: Option<[BufView; 2]>,
        narrow: Option<&NarrowTo>,
    ) -> Result<Launch, KernelError> {
        let Members { q_from, rope: q, attention: last, caches } = *members;
        let (Op::Rope(rope), Op::Attention(attention), Some(s)) =
            (&q.op, &last.op, AttendSizes::of_step(last))
        else {
            unreachable!("a chain has these ops");
        };
        let [(k_cache, n_blocks), (v_cache, _)] =
            [self.cache(caches[0].0, caches[0].1)?, self.cache(caches[1].0, caches[1].1)?];
        let nodes = kind.nodes();
        let labels: Vec<&str> = nodes.into_iter().map(|node| self.plan.step(node).label.as_str()).collect();
        self.kernels.attend(&AttendArgs {
            rope: *rope,
            attention: *attention,
            q: self.view(&q_from.inputs[0])?,
            kv,
            norm,
            sinks: AttentionInputs::of(last.inputs.len()).sinks.map(|i| self.vector(last, i)).transpose()?,
            y: self.dense(last, &last.outputs[0])?,
            narrow: narrow.map(|to| to.narrow(&self.areas)).transpose()?,
            k_cache,
            v_cache,
            cache_dtype: last.inputs[1].dtype,
            positions: self.dense(last, &last.inputs[3])?,
            seqs: self.dense(last, &last.inputs[4])?,
            tables: self.dense(last, &last.inputs[5])?,
            inv_freq: self.vector(q, 2)?,
            scratch: Some(self.areas.own.slice(0, s.scratch_bytes(self.rules.card.n_sms))?),
            counters: Some(self.resident.counters),
            n: s.n,
            n_heads: s.n_heads,
            n_blocks,
            n_kv_heads: s.n_kv_heads,
            kv_block: s.kv_block,
            head_dim: s.head_dim,
            n_seqs: s.n_seqs,
            max_blocks: s.max_blocks,
            n_splits: s.splits(self.rules.card.n_sms),
            fills: s.n == 1 && self.weight_bytes_per_attention() > FILL_BYTES,
            early: self.weight_bytes_per_attention() > EARLY_BYTES,
            step: &labels.join(" + "),
        })
    }
}

/// Steps of a launch: the producer of the queries, their rope, the attention, and each cache with the step
/// that names it.
#[derive(Clone, Copy)]
struct Members<'a> {
    q_from: &'a Step,
    rope: &'a Step,
    attention: &'a Step,
    caches: [(&'a Step, &'a Operand); 2],
}
