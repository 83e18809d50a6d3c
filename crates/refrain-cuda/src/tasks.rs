//! Chooses the kernels of a plan's groups, once, before there is memory for them.
//!
//! This is the only walk over the groups. The result names nodes and scratch areas, not addresses: it
//! determines how much scratch the plan needs, and is lowered to launches each time memory is planned.

use std::ops::Range;

use refrain_graph::{
    Attend, AttendStored, BufferId, ExpertChain, Group, GroupKind, MoeOp, NodeId, Op, Operand, Place, Plan,
    Producer, ProductPart, Products, RopeAppend, Step, TrainOp, Weight,
};
use refrain_kernels::{
    BlasLt, BlasLtShape, GEMM_DTYPES, GemmPlan, GroupedPlan, Kernels, MAX_FEW_ROWS, MAX_PRODUCTS,
    attention_scratch_bytes, few_bytes, sample_scratch_bytes, sample_state_bytes, unaligned_rows,
};
use refrain_tensor::{DType, Layout};

use crate::attend::{AttendSizes, IN_BYTES, NO_CHAIN};
use crate::experts::{self, ExpertLayer};
use crate::fused::{SingleRowProducts, is_router, is_single, sets};
use crate::group::n_rows;
use crate::prefill::{Areas, BatchProducts, GemmShape, NarrowTo};
use crate::resident::packs;
use crate::rules::{ChoiceRules, MIN_ROWS};
use crate::train;
use crate::train_products::{attention_grad_scratch, multiplies_values, refused_by_library};

/// A unit of one or a few launches.
#[derive(Clone, Debug)]
pub(crate) enum KernelTask {
    /// The kernels of one op.
    Op(NodeId),
    /// Fused matrix products of one row.
    Row(SingleRowProducts),
    /// Matrix products of the same rows with weights of one dtype in their file layout.
    Linear(Vec<NodeId>),
    /// Matrix products of the same rows with packed weights of one dtype.
    Few(Vec<NodeId>),
    /// Everything from the query and key norms to attention, for rows of different sequences; writes 16 bits
    /// if the next products take that.
    Attend { attend: Attend, narrow: Option<NarrowTo> },
    /// Like `Attend`, over caches that other launches fill.
    AttendStored { attend: AttendStored, narrow: Option<NarrowTo> },
    /// Ropes and KV appends.
    RopeKv(RopeAppend),
    /// Attention of many rows, in F32.
    Flash(NodeId),
    /// A node that writes its rows in 16 bits for the next products.
    Narrowed { node: NodeId, to: NarrowTo },
    /// Conversion of rows of products to 16 bits.
    NarrowRows { products: Vec<NodeId>, to: NarrowTo },
    /// Decoding of a weight.
    Decode(NodeId),
    /// Matrix products on tensor cores; `decoded` if the weight is in the workspace.
    Gemm { products: Vec<NodeId>, rows: NarrowTo, decoded: bool, plan: GemmPlan },
    /// Matrix products of a batch: rows of several sequences.
    Batch(BatchProducts),
    /// A matrix product of many rows by cuBLASLt.
    Library { product: NodeId, rows: NarrowTo, decoded: bool },
    /// A matrix product of values by cuBLASLt.
    LibraryOfValues(NodeId),
    /// An expert layer of many rows, on tensor cores.
    Experts(ExpertLayer),
    /// Experts of a few rows, and their router.
    RoutedExperts(ExpertChain),
    /// A router's logits of one row, and the norm before them.
    RouterLogits(Products),
}

/// Tasks of one segment.
#[derive(Clone, Debug, Default)]
pub(crate) struct SegmentTasks {
    pub(crate) tasks: Vec<KernelTask>,
    /// Notes on work that could run better, with the reasons.
    pub(crate) notes: Vec<String>,
}

/// Tasks of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Tasks {
    /// One entry per segment of the plan.
    pub(crate) segments: Vec<SegmentTasks>,
    /// Scratch of the launches, which use the same bytes one after another.
    pub(crate) areas: Areas,
    /// State that sampling keeps between its launches, zero before and after.
    pub(crate) choice_bytes: u64,
}

/// Inputs of the kernel choice.
#[derive(Clone, Copy)]
pub(crate) struct Chooser<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) blas: Option<&'a BlasLt>,
    /// The model's weights, which determine what is packed.
    pub(crate) weights: &'a [Weight],
    pub(crate) rules: ChoiceRules<'a>,
}

impl Chooser<'_> {
    /// cuBLASLt, if its choice of algorithms by shape is allowed.
    fn library(&self) -> Option<&BlasLt> {
        self.blas.filter(|_| self.rules.by_rows())
    }

    pub(crate) fn choose(&self, plan: &Plan) -> Tasks {
        let mut tasks = Tasks { segments: Vec::new(), areas: Areas::default(), choice_bytes: 0 };
        for segment in plan.segments() {
            let mut choice = SegmentChoice {
                by: self,
                plan,
                tasks: &mut tasks,
                out: SegmentTasks::default(),
                remarks: Vec::new(),
                held: None,
            };
            for refusal in plan.refusals() {
                let label = &plan.step(refusal.node).label;
                if plan.steps()[segment.steps.clone()].iter().any(|step| step.node == refusal.node) {
                    choice.remark(label, APART, refusal.because.clone());
                }
            }
            let groups = plan.groups_of(segment);
            for (i, group) in groups.iter().enumerate() {
                choice.group(group, groups.get(i + 1));
            }
            let out = choice.finish();
            tasks.segments.push(out);
        }
        tasks
    }
}

/// Ways in which a step runs worse than it could.
const APART: &str = "as separate steps instead of one launch";
const EXACT: &str = "without tensor cores";
const WIDE: &str = "in F32, with an additional launch that rounds the rows";
const OWN: &str = "on Refrain's own kernels instead of cuBLASLt";

/// The reason why some steps run worse than they could.
struct Remark {
    /// Label of the first of these steps.
    label: String,
    n: usize,
    how: &'static str,
    because: String,
}

struct SegmentChoice<'a> {
    by: &'a Chooser<'a>,
    plan: &'a Plan,
    tasks: &'a mut Tasks,
    out: SegmentTasks,
    remarks: Vec<Remark>,
    /// Rows that the previous group wrote in 16 bits for the next one, and their buffer.
    held: Option<(BufferId, NarrowTo)>,
}

impl<'a> SegmentChoice<'a> {
    fn finish(mut self) -> SegmentTasks {
        for Remark { label, n, how, because } in self.remarks {
            let others = if n > 1 { format!(" and {} more run", n - 1) } else { " runs".to_owned() };
            self.out.notes.push(format!("{label}{others} {how}: {because}"));
        }
        self.out
    }

    /// Records that a step runs worse than it could. Steps with the same reason share one remark.
    fn remark(&mut self, label: &str, how: &'static str, because: String) {
        match self.remarks.iter_mut().find(|known| known.how == how && known.because == because) {
            Some(known) => known.n += 1,
            None => self.remarks.push(Remark { label: label.to_owned(), n: 1, how, because }),
        }
    }

    fn push(&mut self, task: KernelTask) {
        self.out.tasks.push(task);
    }

    fn step(&self, node: NodeId) -> &'a Step {
        self.plan.step(node)
    }

    fn is_packed(&self, operand: &Operand) -> bool {
        match self.plan.buffer(operand.buffer).place {
            Place::Weight(id) => self.by.weights.get(id.idx()).is_some_and(packs),
            Place::Arena { .. } | Place::Control { .. } | Place::State(_) => false,
        }
    }

    fn own(&mut self, bytes: u64) {
        self.tasks.areas.own = self.tasks.areas.own.max(bytes);
    }

    fn group(&mut self, group: &Group, next: Option<&Group>) {
        let held = self.held.take();
        match &group.kind {
            GroupKind::One(node) => {
                self.remark_lone_gate(*node);
                self.op(*node);
            }
            GroupKind::Experts(chain) => self.experts(chain),
            GroupKind::Products(products)
                if multiplies_values(self.plan, self.step(products.parts[0].product)) =>
            {
                products.parts.iter().for_each(|part| self.op(part.product));
            }
            GroupKind::Products(products) => {
                match n_rows(&self.step(products.parts[0].product).inputs[0].layout) {
                    1 if self.by.rules.by_rows() && is_router(self.plan, products) => {
                        self.push(KernelTask::RouterLogits(products.clone()));
                    }
                    1 if self.by.rules.by_rows() => self.one_row(products),
                    _ => self.many_rows(products, held, next),
                }
            }
            GroupKind::Attend(attend) => {
                let sizes = AttendSizes::of_step(self.step(attend.attention));
                self.own(sizes.map_or(0, |sizes| sizes.scratch_bytes(self.by.rules.card.n_sms)));
                let narrow = self.narrow_for_next(attend.attention, next, false);
                self.push(KernelTask::Attend { attend: *attend, narrow });
            }
            GroupKind::AttendStored(attend) => {
                let sizes = AttendSizes::of_step(self.step(attend.attention));
                self.own(sizes.map_or(0, |sizes| sizes.scratch_bytes(self.by.rules.card.n_sms)));
                let narrow = self.narrow_for_next(attend.attention, next, false);
                self.push(KernelTask::AttendStored { attend: *attend, narrow });
            }
            GroupKind::RopeAppend(group) => self.push(KernelTask::RopeKv(*group)),
        }
    }

    /// Remarks on experts of many rows whose products are not one group.
    fn remark_lone_gate(&mut self, node: NodeId) {
        let step = self.step(node);
        let is_many = |ids: &Layout| ids.shape().dims()[0] >= self.by.kernels.grouped_min_rows();
        let is_gate = matches!(step.op, Op::Moe(MoeOp::Gated(_))) && step.inputs[2].dtype != DType::F32;
        if is_gate && is_many(&step.inputs[1].layout) && self.by.rules.by_rows() {
            let because = "another step reads the rows between the products of the experts";
            self.remark(&step.label, EXACT, because.to_owned());
        }
    }

    fn experts(&mut self, chain: &ExpertChain) {
        let (gated, summed) = (self.step(chain.gated), self.step(chain.summed));
        if chain.route.is_some() {
            return self.push(KernelTask::RoutedExperts(*chain));
        }
        match self.grouped(gated, summed) {
            Ok(Some(plan)) => {
                self.own(plan.scratch_bytes().unwrap_or(u64::MAX));
                let (gated, summed) = (chain.gated, chain.summed);
                self.push(KernelTask::Experts(ExpertLayer { gated, summed, plan }));
            }
            answer => {
                answer.err().into_iter().for_each(|because| self.remark(&gated.label, EXACT, because));
                self.op(chain.gated);
                self.op(chain.summed);
            }
        }
    }

    /// Plans experts on tensor cores; `None` if they have too few rows, an error if there is no kernel.
    fn grouped(&self, gated: &Step, summed: &Step) -> Result<Option<GroupedPlan>, String> {
        let sizes = experts::layer_sizes(gated, summed, self.by.rules);
        let (first, second) = (&gated.inputs[2], &summed.inputs[3]);
        let placed = |w: &Operand| !w.dtype.is_quantized() || self.is_packed(w);
        if sizes.n_rows < self.by.kernels.grouped_min_rows() {
            return Ok(None);
        }
        let plan = match placed(first) && placed(second) {
            true => self.by.kernels.grouped_plan(sizes, first.dtype, second.dtype),
            false => None,
        };
        plan.map(Some).ok_or_else(|| {
            format!(
                "no kernel multiplies experts of {} with {} rows and {} columns, and of {}",
                first.dtype, sizes.inner, sizes.k, second.dtype
            )
        })
    }

    fn op(&mut self, node: NodeId) {
        let step = self.step(node);
        if step.outputs.iter().all(|o| o.layout.shape().n_elements() == 0) {
            return;
        }
        match &step.op {
            Op::View(_) | Op::HostCall(_) => {}
            Op::Train(TrainOp::AddProduct) => self.product_of_values(node),
            Op::MatMul if multiplies_values(self.plan, step) => self.product_of_values(node),
            Op::MatMul => self.wide(&[node]),
            Op::Attention(_) if self.takes_flash(step) => self.push(KernelTask::Flash(node)),
            Op::Attention(_) => self.attention(node),
            Op::Sample(_) => {
                let logits = step.inputs[0].layout.shape();
                let [n, vocab] = [logits.dims()[0], logits.dims()[1]];
                self.own(sample_scratch_bytes(n, vocab));
                self.tasks.choice_bytes = self.tasks.choice_bytes.max(sample_state_bytes(n));
                self.push(KernelTask::Op(node));
            }
            Op::Moe(op) => {
                self.own(experts::scratch_bytes(op, step, self.by.rules));
                self.push(KernelTask::Op(node));
            }
            Op::SpanAttention(_) => self.span_attention(node, 0..3),
            Op::Train(TrainOp::SpanAttentionGrad(_)) => {
                self.own(attention_grad_scratch(step));
                self.span_attention(node, 0..4);
            }
            Op::Copy
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
            | Op::Train(_)
            | Op::Lora(_)
            | Op::Softmax
            | Op::GatherRows(_)
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Recurrent(_)
            | Op::Accumulate => {
                self.own(train::scratch_bytes(step));
                self.push(KernelTask::Op(node));
            }
        }
    }

    fn product_of_values(&mut self, node: NodeId) {
        let step = self.step(node);
        match self.by.library().map(|blas| refused_by_library(blas, step)) {
            Some(None) => {
                self.tasks.areas.add_workspace();
                self.push(KernelTask::LibraryOfValues(node));
            }
            refused => {
                refused.flatten().into_iter().for_each(|because| self.remark(&step.label, OWN, because));
                self.push(KernelTask::Op(node));
            }
        }
    }

    /// Attention within documents or its gradient; `heads` are the inputs that hold heads.
    fn span_attention(&mut self, node: NodeId, heads: Range<usize>) {
        let step = self.step(node);
        let is_grad = heads.len() > 3;
        let layouts: Vec<Layout> = step.inputs[heads].iter().map(|operand| operand.layout).collect();
        let obstacle = self.by.kernels.span_obstacle(step.inputs[0].dtype, &layouts, is_grad);
        obstacle.into_iter().for_each(|because| self.remark(&step.label, EXACT, because));
        self.push(KernelTask::Op(node));
    }

    /// Destination of the rows of `node` in 16 bits, if the next group multiplies them on tensor cores.
    fn narrow_for_next(&mut self, node: NodeId, next: Option<&Group>, is_gated: bool) -> Option<NarrowTo> {
        let rows = self.step(node).outputs.last()?;
        let GroupKind::Products(Products { producer: None, parts, .. }) = &next?.kind else { return None };
        let products: Vec<NodeId> = parts.iter().map(|part| part.product).collect();
        let x = &self.step(products[0]).inputs[0];
        let is_one_row = self.by.rules.by_rows() && n_rows(&x.layout) == 1;
        if x.buffer != rows.buffer || !x.layout.is_contiguous() || is_one_row {
            return None;
        }
        let plane_rows = self.batch_rows(&products);
        let shape = |&node: &NodeId| match plane_rows {
            Some(_) => GemmShape::of(self.step(node)),
            None => GemmShape::of_many(self.step(node), self.by.rules),
        };
        let shapes: Option<Vec<GemmShape>> = products.iter().map(shape).collect();
        let shapes = shapes.filter(|s| s.windows(2).all(|w| w[0].rows_dtype() == w[1].rows_dtype()))?;
        let also_wide = self.is_read_by_others(node, &products);
        let to =
            NarrowTo { plane_rows: plane_rows.unwrap_or(0), also_wide, is_gated, ..self.rows_of(&shapes[0]) };
        self.add_rows(&to);
        self.held = Some((rows.buffer, to));
        Some(to)
    }

    /// Plane rows that batched products take, if all `products` can run batched.
    fn batch_rows(&self, products: &[NodeId]) -> Option<usize> {
        let shapes: Vec<GemmShape> =
            products.iter().map(|&node| GemmShape::of(self.step(node))).collect::<Option<_>>()?;
        let is_one = shapes
            .iter()
            .all(|shape| shape.rows_dtype() == shapes[0].rows_dtype() && shape.is_batch(self.by.rules));
        let rows = &self.step(products[0]).inputs[0];
        let is_placed = |&node: &NodeId| {
            let w = &self.step(node).inputs[1];
            !w.dtype.is_quantized() || self.is_packed(w)
        };
        let is_faster = shapes[0].is_faster_as_batch(products.len());
        if !is_one
            || !is_faster
            || self.unreadable(rows, shapes[0].m).is_some()
            || !products.iter().all(is_placed)
        {
            return None;
        }
        let plan = |&node: &NodeId| {
            let (dtype, n) = (self.step(node).inputs[1].dtype, self.n_columns(node));
            self.by.kernels.batch_plan(dtype, shapes[0].m, &[n], shapes[0].k, false)
        };
        products.iter().map(plan).collect::<Option<Vec<_>>>()?.first().map(|plan| plan.shape().0)
    }

    fn rows_of(&self, shape: &GemmShape) -> NarrowTo {
        let (dtype, m, k) = (shape.rows_dtype(), shape.m, shape.k);
        NarrowTo { dtype, m, k, plane_rows: 0, also_wide: false, is_gated: false }
    }

    fn add_rows(&mut self, to: &NarrowTo) {
        let m = to.n_placed();
        match to.is_gated {
            true => self.tasks.areas.add_gated(m, to.k),
            false => self.tasks.areas.add_rows(m, to.k),
        }
    }

    /// Attention by the kernel that splits a context among blocks.
    fn attention(&mut self, node: NodeId) {
        let step = self.step(node);
        let q = step.inputs[0].layout.shape();
        let [n, n_heads, head_dim] = [q.dims()[0], q.dims()[1], q.dims()[2]];
        self.own(attention_scratch_bytes(n, n_heads, head_dim, splits(step, self.by.rules)));
        if n == 1 && !self.plan.refusals().iter().any(|refusal| refusal.node == node) {
            let in_bytes = step.inputs[1].dtype == DType::U8;
            self.remark(&step.label, APART, if in_bytes { IN_BYTES } else { NO_CHAIN }.to_owned());
        }
        self.push(KernelTask::Op(node));
    }

    /// Whether attention runs on tensor cores: many rows, over a 16-bit cache.
    fn takes_flash(&mut self, step: &Step) -> bool {
        let (q, cache) = (&step.inputs[0], &step.inputs[1]);
        let head_dim = q.layout.shape().dim_back(0);
        let has_many = q.layout.shape().dims()[0] >= MIN_ROWS;
        if has_many && cache.dtype == DType::U8 {
            self.remark(&step.label, EXACT, "no tensor-core kernel reads an 8-bit cache".to_owned());
        }
        if !self.by.rules.by_rows() || !has_many || !GEMM_DTYPES.contains(&cache.dtype) {
            return false;
        }
        let because = match self.by.kernels.has_flash(cache.dtype, head_dim) {
            true => unaligned_rows(&q.layout),
            false => Some(format!("no kernel supports heads of {head_dim} elements on this GPU")),
        };
        let takes = because.is_none();
        because.into_iter().for_each(|because| self.remark(&step.label, EXACT, because));
        takes
    }

    fn one_row(&mut self, products: &Products) {
        let row = |parts: &[ProductPart]| -> Vec<KernelTask> {
            let dtype = |part: &ProductPart| self.step(part.product).inputs[1].dtype;
            let dtypes: Vec<DType> = parts.iter().map(dtype).collect();
            let launch = |(i, set): (usize, Vec<usize>)| {
                let parts = set.into_iter().map(|j| parts[j]).collect();
                KernelTask::Row(SingleRowProducts { group: products.clone(), parts, is_first: i == 0 })
            };
            sets(&dtypes).into_iter().enumerate().map(launch).collect()
        };
        // Groups with a producer or gate were checked as a whole.
        let is_joined = products.producer.is_some() || products.gate.is_some();
        let fits = |part: &&ProductPart| {
            is_joined || is_single(self.plan, self.step(part.product), self.by.rules.card)
        };
        let (fitting, others): (Vec<&ProductPart>, Vec<&ProductPart>) = products.parts.iter().partition(fits);
        let tasks = row(&fitting.into_iter().copied().collect::<Vec<_>>());
        tasks.into_iter().for_each(|task| self.push(task));
        self.wide(&others.iter().map(|part| part.product).collect::<Vec<_>>());
        others.iter().filter_map(|part| part.bias).for_each(|bias| self.op(bias));
    }

    /// Matrix products of F32 rows.
    fn wide(&mut self, products: &[NodeId]) {
        for set in self.by_dtype(products) {
            let step = self.step(set[0]);
            let w = &step.inputs[1];
            if !self.is_packed(w) {
                set.chunks(MAX_PRODUCTS).for_each(|set| self.push(KernelTask::Linear(set.to_vec())));
                continue;
            }
            let (m, k) = (n_rows(&step.outputs[0].layout), w.layout.shape().dims()[0]);
            let is_fixed = self.by.rules.reproducible;
            if m > 1 || is_fixed {
                let at_once = if is_fixed { MAX_FEW_ROWS } else { m.min(MAX_FEW_ROWS) };
                self.own(few_bytes(at_once, k).unwrap_or(0) as u64);
            }
            self.push(KernelTask::Few(set));
        }
    }

    /// Splits products into sets with weights of one dtype, in order.
    fn by_dtype(&self, products: &[NodeId]) -> Vec<Vec<NodeId>> {
        let dtype = |node: NodeId| self.step(node).inputs[1].dtype;
        let mut sets: Vec<Vec<NodeId>> = Vec::new();
        for &product in products {
            match sets.iter_mut().find(|set| dtype(set[0]) == dtype(product)) {
                Some(set) => set.push(product),
                None => sets.push(vec![product]),
            }
        }
        sets
    }

    /// Matrix products of a batch, the producer of their rows, and their gate.
    fn batch(
        &mut self,
        group: &Products,
        plane_rows: usize,
        held: Option<(BufferId, NarrowTo)>,
        next: Option<&Group>,
    ) {
        let products: Vec<NodeId> = group.parts.iter().map(|part| part.product).collect();
        let Some(shape) = GemmShape::of(self.step(products[0])) else {
            unreachable!("batch_rows checked the shapes")
        };
        let mut rows = NarrowTo { plane_rows, ..self.rows_of(&shape) };
        let ready = held.filter(|(buffer, to)| {
            *buffer == self.step(products[0]).inputs[0].buffer && to.plane_rows == plane_rows
        });
        let is_made = match (&group.producer, ready) {
            (Some(producer), _) => self.producer(producer, rows, true, &products),
            (None, Some((_, to))) => {
                rows = to;
                true
            }
            (None, None) => false,
        };
        if !is_made {
            self.add_rows(&rows);
            self.push(KernelTask::NarrowRows { products: products.clone(), to: rows });
        }
        let gate = group.gate.map(|gate| {
            let alone = NarrowTo { is_gated: true, also_wide: true, k: self.n_columns(products[0]), ..rows };
            let alone = NarrowTo { plane_rows: 0, ..alone };
            (gate, self.narrow_for_next(gate, next, true).unwrap_or(alone))
        });
        if let Some((_, to)) = &gate {
            self.add_rows(to);
        }
        for set in self.by_dtype(&products) {
            for set in set.chunks(MAX_PRODUCTS) {
                let (dtype, ns) = (
                    self.step(set[0]).inputs[1].dtype,
                    set.iter().map(|&node| self.n_columns(node)).collect::<Vec<usize>>(),
                );
                let plan = self.by.kernels.batch_plan(dtype, rows.m, &ns, rows.k, gate.is_some());
                let Some(plan) = plan else { unreachable!("batch_rows checked the shapes") };
                self.tasks.areas.add_sums(plan.scratch_bytes(rows.m, ns.iter().sum()));
                self.push(KernelTask::Batch(BatchProducts { products: set.to_vec(), rows, plan, gate }));
            }
        }
    }

    fn many_rows(&mut self, group: &Products, held: Option<(BufferId, NarrowTo)>, next: Option<&Group>) {
        let products: Vec<NodeId> = group.parts.iter().map(|part| part.product).collect();
        if let Some(plane_rows) = self.batch_rows(&products) {
            return self.batch(group, plane_rows, held, next);
        }
        let on_tensor_cores =
            |&node: &NodeId| GemmShape::of_many(self.step(node), self.by.rules).map(|shape| (node, shape));
        let narrow: Vec<(NodeId, GemmShape)> = products.iter().filter_map(on_tensor_cores).collect();
        let mut wide: Vec<NodeId> =
            products.iter().copied().filter(|node| narrow.iter().all(|(n, _)| n != node)).collect();
        let mut dtypes: Vec<DType> = narrow.iter().map(|(_, shape)| shape.rows_dtype()).collect();
        dtypes.sort_by_key(|d| narrow.iter().position(|(_, shape)| shape.rows_dtype() == *d));
        dtypes.dedup();
        let mut held = match (&group.producer, narrow.first()) {
            (Some(producer), Some((_, shape))) => {
                let all_alike = wide.is_empty() && dtypes.len() == 1;
                let rows = self.rows_of(shape);
                self.producer(producer, rows, all_alike, &products).then_some(rows)
            }
            (Some(producer), None) => {
                self.op(producer.node());
                None
            }
            (None, _) => {
                let rows = self.step(products[0]).inputs[0].buffer;
                held.filter(|(buffer, to)| *buffer == rows && to.plane_rows == 0).map(|(_, to)| to)
            }
        };
        for dtype in dtypes {
            let these: Vec<(NodeId, GemmShape)> =
                narrow.iter().copied().filter(|(_, shape)| shape.rows_dtype() == dtype).collect();
            let nodes: Vec<NodeId> = these.iter().map(|(node, _)| *node).collect();
            let shape = these[0].1;
            let ready = held.filter(|to| to.dtype == dtype);
            let to = ready.unwrap_or_else(|| self.rows_of(&shape));
            if ready.is_none() {
                if let Some(because) = self.unreadable(&self.step(nodes[0]).inputs[0], shape.m) {
                    nodes
                        .iter()
                        .for_each(|&node| self.remark(&self.step(node).label, EXACT, because.clone()));
                    wide.extend(nodes);
                    continue;
                }
                self.add_rows(&to);
                self.push(KernelTask::NarrowRows { products: nodes.clone(), to });
                held = Some(to);
            }
            for set in self.by_dtype(&nodes) {
                self.multiply(&set, NarrowTo { also_wide: false, ..to });
            }
        }
        self.wide(&wide);
        // The gate was to be fused, but this GPU has no kernel for these products.
        group.gate.into_iter().for_each(|gate| self.op(gate));
    }

    /// The reason why F32 rows cannot be read with 16-byte loads.
    fn unreadable(&self, rows: &Operand, n_rows: usize) -> Option<String> {
        let many = || (n_rows > 65_535).then(|| format!("one launch holds 65535 rows, got {n_rows}"));
        unaligned_rows(&rows.layout).or_else(many)
    }

    /// Adds the producer of the rows of products; returns whether it writes them in 16 bits.
    fn producer(
        &mut self,
        producer: &Producer,
        rows: NarrowTo,
        all_alike: bool,
        products: &[NodeId],
    ) -> bool {
        let node = producer.node();
        let step = self.step(node);
        let n_inputs = match producer {
            Producer::Attention(_) if self.takes_flash(step) => match rows.plane_rows {
                0 => 0,
                // Flash attention writes contiguous rows, not planes.
                _ => {
                    self.push(KernelTask::Flash(node));
                    return false;
                }
            },
            // The attention kernel for a few rows writes F32.
            Producer::Attention(_) => {
                self.attention(node);
                return false;
            }
            Producer::Norm(_) => 1,
            Producer::AddNorm { .. } | Producer::Gate(_) => 2,
        };
        let unreadable =
            step.inputs[..n_inputs].iter().find_map(|rows| self.unreadable(rows, n_rows(&rows.layout)));
        if let Some(because) = unreadable {
            self.remark(&step.label, WIDE, because);
            self.op(node);
            return false;
        }
        let also_wide = !all_alike || self.is_read_by_others(node, products);
        let to = NarrowTo { also_wide, ..rows };
        self.add_rows(&to);
        self.push(KernelTask::Narrowed { node, to });
        true
    }

    /// Whether anything other than `products` reads the last output of a node.
    fn is_read_by_others(&self, node: NodeId, products: &[NodeId]) -> bool {
        let Some(y) = self.step(node).outputs.last() else { return false };
        let later = self.plan.steps().iter().skip_while(|step| step.node != node).skip(1);
        let mut others = later.filter(|step| !products.contains(&step.node));
        others.any(|step| step.inputs.iter().any(|input| input.buffer == y.buffer))
            || self.plan.outputs().iter().any(|output| output.buffer == y.buffer)
    }

    /// Matrix products of rows in 16 bits with weights of one dtype.
    fn multiply(&mut self, products: &[NodeId], rows: NarrowTo) {
        let decoded = self.step(products[0]).inputs[1].dtype.is_quantized();
        // The workspace holds one decoded matrix at a time.
        let sets = if decoded { products.chunks(1) } else { products.chunks(MAX_PRODUCTS) };
        for set in sets {
            if decoded {
                let n = self.n_columns(set[0]);
                self.tasks.areas.add_weight(n, rows.k);
                self.push(KernelTask::Decode(set[0]));
            }
            let own: Vec<NodeId> =
                set.iter().copied().filter(|&node| !self.by_library(node, rows, decoded)).collect();
            if own.is_empty() {
                continue;
            }
            let ns: Vec<usize> = own.iter().map(|&node| self.n_columns(node)).collect();
            let plan = self.by.rules.gemm_plan(rows.m, &ns, rows.k);
            self.tasks.areas.add_sums(plan.scratch_bytes(rows.m, ns.iter().sum()));
            self.push(KernelTask::Gemm { products: own, rows, decoded, plan });
        }
    }

    fn n_columns(&self, product: NodeId) -> usize {
        self.step(product).inputs[1].layout.shape().dims()[1]
    }

    fn by_library(&mut self, product: NodeId, rows: NarrowTo, decoded: bool) -> bool {
        let Some(blas) = self.by.library() else { return false };
        let n = self.n_columns(product);
        let shape = BlasLtShape::of_rows(rows.dtype, rows.m, n, rows.k);
        if let Err(error) = blas.check(shape) {
            self.remark(&self.step(product).label, OWN, error.to_string());
            return false;
        }
        self.tasks.areas.add_library(rows.m, n);
        self.push(KernelTask::Library { product, rows, decoded });
        true
    }
}

/// Number of splits of an attention step, fixed when the plan is built and independent of sequence lengths.
pub(crate) fn splits(step: &Step, rules: ChoiceRules<'_>) -> usize {
    let (q, cache, tables) =
        (step.inputs[0].layout.shape(), step.inputs[1].layout.shape(), step.inputs[5].layout.shape());
    let context = tables.dims()[1] * cache.dims()[2];
    rules.attention_splits(q.dims()[0], cache.dims()[1], context)
}
