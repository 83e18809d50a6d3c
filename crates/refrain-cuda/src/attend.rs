//! All between the products of queries, keys and values and the output's, for one token of each sequence, as one launch.

use std::collections::HashSet;

use refrain_driver::Launch;
use refrain_driver::api::DeviceInfo;
use refrain_graph::{Attend, BufferId, Fusion, GroupKind, GroupQuery, Op, Operand, Place, Step};
use refrain_kernels::{
    AttendArgs, AttendNorm, KernelError, MAX_ATTEND_ROWS, attend_counter_bytes, attend_scratch_bytes,
    attend_splits, has_product,
};
use refrain_tensor::Shape;

use crate::group::{eps, is_vector_weight};
use crate::lower::Lowering;
use crate::prefill::NarrowTo;
use crate::resident::COUNTER_BYTES;

/// What is said of an attention of one row that is in no group, where the backend was not asked for more.
pub(crate) const NO_CHAIN: &str = "rope, appends and attention are no chain over the same positions whose values nobody \
                                   else reads";

/// The sizes of an attention, as kernels name them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Rows, each of a sequence of its own.
    n: usize,
    pub(crate) n_heads: usize,
    n_kv_heads: usize,
    kv_block: usize,
    head_dim: usize,
    n_seqs: usize,
    max_blocks: usize,
}

/// Whether one launch does a chain: of a single row or of rows of different sequences, so that no row sees what another one
/// appends.
pub(crate) fn fuses(query: &GroupQuery<'_>, attend: &Attend, card: &DeviceInfo) -> Fusion {
    let shape = |i: usize| query.input(attend.attention, i).layout.shape();
    let [q, cache, tables] = [0, 1, 5].map(shape);
    let are_apart = |sizes: &Sizes| sizes.n == 1 || query.step().is_some_and(|step| step.is_decode());
    // Rows of the same sequences have kernels of their own for each of these.
    let Some(sizes) = Sizes::of(q, cache, tables).filter(are_apart) else {
        return Fusion::Smaller;
    };
    let norms = attend.norms.is_none_or(|[q, k]| {
        let weights = [q, k].map(|norm| query.input(norm, 1));
        eps(query.op(q)) == eps(query.op(k)) && weights.iter().all(is_vector_weight)
    });
    let because = if !norms {
        Some("queries and keys are normed in different ways".to_owned())
    } else if !is_vector_weight(&query.input(attend.ropes[0], 2)) {
        Some("the frequencies of its rotation are no weights".to_owned())
    } else {
        sizes.misfit(card.n_sms)
    };
    because.map_or(Fusion::Joined, Fusion::No)
}

impl Sizes {
    /// Those of queries, a cache and tables, when they have the shapes that attention gives them.
    fn of(q: Shape, cache: Shape, tables: Shape) -> Option<Sizes> {
        let (&[n, n_heads, head_dim], &[_, n_kv_heads, kv_block, _], &[n_seqs, max_blocks]) =
            (q.dims(), cache.dims(), tables.dims())
        else {
            return None;
        };
        Some(Sizes { n, n_heads, n_kv_heads, kv_block, head_dim, n_seqs, max_blocks })
    }

    /// Those of an attention step.
    pub(crate) fn of_step(attention: &Step) -> Option<Sizes> {
        let [q, cache, tables] = [0, 1, 5].map(|i| attention.inputs[i].layout.shape());
        Sizes::of(q, cache, tables)
    }

    /// Why there is no kernel for these.
    fn misfit(&self, n_sms: u32) -> Option<String> {
        let Sizes { n, n_heads, kv_block, head_dim, .. } = *self;
        if !kv_block.is_power_of_two() || kv_block < 16 {
            return Some(format!("KV blocks have {kv_block} positions, not 16, 32 or another power of two"));
        }
        if !head_dim.is_multiple_of(8) || !(8..=256).contains(&head_dim) {
            return Some(format!("heads have {head_dim} elements, not a multiple of 8 up to 256"));
        }
        if n > MAX_ATTEND_ROWS {
            return Some(format!("there are {n} rows, at most {MAX_ATTEND_ROWS} go in one launch"));
        }
        let counters = attend_counter_bytes(n, n_heads, self.splits(n_sms));
        (counters > COUNTER_BYTES)
            .then(|| format!("{n_heads} heads of {n} rows have more counters than there is room for"))
    }

    fn splits(&self, n_sms: u32) -> usize {
        attend_splits(self.n, self.n_kv_heads, self.max_blocks * self.kv_block, n_sms)
    }

    /// Scratch of the launch.
    pub(crate) fn scratch_bytes(&self, n_sms: u32) -> u64 {
        attend_scratch_bytes(self.n, self.n_heads, self.head_dim, self.splits(n_sms))
    }
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

    /// The launch of a chain. Its counters are zero before the first launch and used by nothing else.
    pub(crate) fn attend(&self, attend: &Attend, narrow: Option<&NarrowTo>) -> Result<Launch, KernelError> {
        let plan = self.plan;
        let [q, k] = attend.ropes.map(|node| plan.step(node));
        let [keys, values] = attend.appends.map(|node| plan.step(node));
        let last = plan.step(attend.attention);
        let (Op::Rope(rope), Op::Attention(attention), Some(s)) = (&q.op, &last.op, Sizes::of_step(last))
        else {
            unreachable!("a chain has these ops");
        };
        let ((k_cache, n_blocks), (v_cache, _)) =
            (self.cache(keys, &keys.inputs[0])?, self.cache(values, &values.inputs[0])?);
        let norms = attend.norms.map(|norms| norms.map(|node| plan.step(node)));
        let norm = match norms {
            None => None,
            Some([q, k]) => {
                let eps = eps(&q.op).unwrap_or_default();
                Some(AttendNorm { q: self.vector(q, 1)?, k: self.vector(k, 1)?, eps })
            }
        };
        let [q_from, k_from] = norms.unwrap_or([q, k]);
        let nodes = GroupKind::Attend(*attend).nodes();
        let labels: Vec<&str> = nodes.into_iter().map(|node| plan.step(node).label.as_str()).collect();
        self.kernels.attend(&AttendArgs {
            rope: *rope,
            attention: *attention,
            q: self.view(&q_from.inputs[0])?,
            k: self.view(&k_from.inputs[0])?,
            v: self.view(&values.inputs[1])?,
            norm,
            y: self.dense(last, &last.outputs[0])?,
            narrow: narrow.map(|to| to.narrow(&self.areas)).transpose()?,
            k_cache,
            v_cache,
            cache_dtype: keys.inputs[0].dtype,
            positions: self.dense(keys, &keys.inputs[2])?,
            seqs: self.dense(keys, &keys.inputs[3])?,
            tables: self.dense(keys, &keys.inputs[4])?,
            inv_freq: self.vector(q, 2)?,
            scratch: Some(self.areas.own.slice(0, s.scratch_bytes(self.n_sms))?),
            counters: Some(self.resident.counters),
            n: s.n,
            n_heads: s.n_heads,
            n_blocks,
            n_kv_heads: s.n_kv_heads,
            kv_block: s.kv_block,
            head_dim: s.head_dim,
            n_seqs: s.n_seqs,
            max_blocks: s.max_blocks,
            n_splits: s.splits(self.n_sms),
            fills: s.n == 1 && self.weight_bytes_per_attention() > FILL_BYTES,
            early: self.weight_bytes_per_attention() > EARLY_BYTES,
            step: &labels.join(" + "),
        })
    }
}
