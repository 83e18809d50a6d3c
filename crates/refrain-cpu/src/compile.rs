//! Compilation of a plan's steps into kernel calls.

use crate::experts::{ExpertCall, ExpertEpilogue, MAX_GROUPS, ROUTE_FLOATS, RouteCall};
use crate::lora::LoraCall;
use crate::memory::MAX_OUTS;
use crate::recurrent::{DeltaOperands, MAX_K_DIM, MAX_WIDTH, SlotPaging};
use crate::simd::{ActKind, act_bytes, act_kind};
use crate::values::{ValueCall, value_call};
use refrain_graph::{
    Attention, AttentionInputs, Binary, Fusion, Gate, GatedDelta, GroupKind, GroupQuery, LoraOp, MoeOp, Op,
    Operand, Place, Plan, Products, Recurrent, Rope, Unary, Weight, WeightId,
};
use refrain_tensor::DType;
use std::ops::{Deref, Range};

/// Location of an operand. Ranges count 32-bit elements.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Loc {
    Arena(Range<usize>),
    Control(Range<usize>),
    Weight(WeightId),
}

/// One of several matrix products that share their activations.
#[derive(Clone, Debug)]
pub(crate) struct ProductOutput {
    pub weight: WeightId,
    pub out: Range<usize>, // [m, n]
}

/// Locations of each token's rows in the cache.
#[derive(Clone, Debug)]
pub(crate) struct Paging {
    pub positions: Range<usize>, // control: [n]
    pub seqs: Range<usize>,      // control: [n]
    pub tables: Range<usize>,    // control: [n_seqs, max_blocks]
    pub max_blocks: usize,
    pub n_blocks: usize,
    pub n_kv_heads: usize,
    pub kv_block: usize,
    pub head_dim: usize,
}

/// Layout of rows in the arena. Elements of a row are contiguous.
#[derive(Clone, Debug)]
pub(crate) struct ArenaRowLayout {
    pub start: usize,
    pub stride: usize,
    /// Elements per row.
    pub len: usize,
    pub n: usize,
}

impl ArenaRowLayout {
    /// Range from the first element to the last.
    pub(crate) fn range(&self) -> Range<usize> {
        let n_before = self.n.saturating_sub(1) * self.stride;
        self.start..self.start + if self.n == 0 { 0 } else { n_before + self.len }
    }
}

/// A kernel with its operands.
#[derive(Clone, Debug)]
pub(crate) enum Kernel {
    Products {
        x: Range<usize>,
        k: usize,
        kind: ActKind,
        prepared: bool,
        parts: Vec<ProductOutput>,
    },
    GatherWeight {
        table: WeightId,
        ids: Range<usize>,
        out: Range<usize>,
        d: usize,
    },
    GatherArena {
        table: Range<usize>,
        ids: Range<usize>,
        out: Range<usize>,
        d: usize,
    },
    RmsNorm {
        x: Range<usize>,
        w: WeightId,
        out: Range<usize>,
        eps: f32,
    },
    AddRmsNorm {
        a: Range<usize>,
        b: Range<usize>,
        w: WeightId,
        sum: Range<usize>,
        out: Range<usize>,
        eps: f32,
    },
    Unary {
        f: Unary,
        x: Range<usize>,
        out: Range<usize>,
    },
    /// `b` has the size of the output, or is one row that is broadcast.
    Binary {
        f: Binary,
        a: Range<usize>,
        b: Loc,
        out: Range<usize>,
        row: usize,
    },
    Gate {
        f: Gate,
        gate: Range<usize>,
        up: Range<usize>,
        out: Range<usize>,
    },
    Rope {
        rope: Rope,
        table: usize,
        x: Range<usize>,
        out: Range<usize>,
        n_heads: usize,
        head_dim: usize,
    },
    KvAppend {
        state: usize,
        /// Scales of an 8-bit cache.
        scales: Option<usize>,
        dtype: DType,
        x: Range<usize>,
        paging: Paging,
    },
    Attention {
        attention: Attention,
        q: Range<usize>,
        out: Range<usize>,
        states: [usize; 2],
        /// Scales of 8-bit caches.
        scales: Option<[usize; 2]>,
        dtype: DType,
        n_heads: usize,
        sinks: Option<WeightId>,
        paging: Paging,
    },
    ShortConv {
        state: usize,
        x: ArenaRowLayout,
        w: WeightId,
        silu: bool,
        out: Range<usize>,
        paging: SlotPaging,
    },
    GatedDelta {
        delta: GatedDelta,
        state: usize,
        operands: Box<DeltaOperands>,
        decay: WeightId,
        dt_bias: WeightId,
        out: Range<usize>,
        paging: SlotPaging,
    },
    Sample {
        logits: Range<usize>,
        control: [Range<usize>; 5],
        token: Range<usize>,
        logprob: Range<usize>,
        vocab: usize,
    },
    Route(Box<RouteCall>),
    Experts(Box<ExpertCall>),
    Lora(Box<LoraCall>),
    /// Operands of any float dtype, at any location.
    Value(Box<ValueCall>),
    /// The reference implementation of an op, or a host function.
    Reference,
}

impl Kernel {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Kernel::Products { .. } => "products",
            Kernel::GatherWeight { .. } | Kernel::GatherArena { .. } => "gather",
            Kernel::RmsNorm { .. } => "rms_norm",
            Kernel::AddRmsNorm { .. } => "add_rms_norm",
            Kernel::Unary { .. } => "unary",
            Kernel::Binary { .. } => "binary",
            Kernel::Gate { .. } => "gate",
            Kernel::Rope { .. } => "rope",
            Kernel::KvAppend { .. } => "kv_append",
            Kernel::Attention { .. } => "attention",
            Kernel::ShortConv { .. } => "short_conv",
            Kernel::GatedDelta { .. } => "gated_delta",
            Kernel::Sample { .. } => "sample",
            Kernel::Route(_) => "route",
            Kernel::Experts(_) => "experts",
            Kernel::Lora(call) => call.op.name(),
            Kernel::Value(call) => call.name(),
            Kernel::Reference => "reference",
        }
    }
}

/// A kernel, and the (first) step that it runs.
#[derive(Clone, Debug)]
pub(crate) struct KernelCall {
    pub kernel: Kernel,
    pub step: usize,
}

/// Sines and cosines for one set of frequencies, computed once per run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AngleTable {
    pub inv_freq: WeightId,
    pub positions: Range<usize>,
    pub magnitude: f32,
    pub n_dims: usize,
    /// Whether to negate the sines, which rotates back.
    pub back: bool,
}

impl AngleTable {
    /// Returns the index of a table, adding it if it is new.
    pub(crate) fn find(tables: &mut Vec<AngleTable>, table: AngleTable) -> usize {
        let known = tables.iter().position(|t| *t == table);
        known.unwrap_or_else(|| {
            tables.push(table);
            tables.len() - 1
        })
    }
}

/// The calls of a plan, and the scratch sizes they need.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuProgram {
    pub calls: Vec<KernelCall>,
    pub tables: Vec<AngleTable>,
    /// Size of the largest set of prepared activations.
    pub acts_bytes: usize,
    /// Maximum scratch floats of a value call or an expert call.
    pub value_floats: usize,
    /// Maximum number of expert choices of all rows, and maximum number of experts.
    pub choices: [usize; 2],
}

impl CpuProgram {
    pub(crate) fn new(plan: &Plan, weights: &[Weight], n_threads: usize) -> CpuProgram {
        let mut program = CpuProgram::default();
        let is_training = plan.steps().iter().any(|step| matches!(step.op, Op::Train(_)));
        let plan = &Shaped { plan, weights, is_training };
        for group in plan.groups() {
            let n_calls = program.calls.len();
            for step in group.steps.clone() {
                let tables = &mut program.tables;
                let of_values = |tables| {
                    let call = value_call(plan, weights, step, tables)?;
                    Some(Kernel::Value(Box::new(call)))
                };
                let kernel =
                    kernel(plan, step, tables).or_else(|| of_values(tables)).unwrap_or(Kernel::Reference);
                if let Kernel::Value(call) = &kernel {
                    program.value_floats = program.value_floats.max(call.scratch(n_threads));
                }
                if let Kernel::Route(call) = &kernel {
                    program.value_floats = program.value_floats.max(ROUTE_FLOATS * call.n_experts);
                }
                if let Kernel::Experts(call) = &kernel {
                    program.reserve(call);
                }
                program.push(KernelCall { kernel, step }, n_calls);
            }
        }
        program
    }

    fn reserve(&mut self, call: &ExpertCall) {
        let act_bytes = act_bytes(call.kind, call.k).unwrap_or(0);
        self.acts_bytes = self.acts_bytes.max(call.n_acts() * act_bytes);
        self.value_floats = self.value_floats.max(call.floats());
        self.choices[0] = self.choices[0].max(call.n_pairs());
        self.choices[1] = self.choices[1].max(call.n_experts);
    }

    /// Merges matrix products of one group into one call, or lets a call reuse the activations that the
    /// previous one prepared. Calls of the group start at index `first`.
    fn push(&mut self, mut call: KernelCall, first: usize) {
        let Kernel::Products { x, k, kind, prepared, parts } = &mut call.kernel else {
            self.calls.push(call);
            return;
        };
        let m = x.len() / (*k).max(1);
        self.acts_bytes = self.acts_bytes.max(m * act_bytes(*kind, *k).unwrap_or(0));
        if let Some(KernelCall {
            kernel: Kernel::Products { x: x0, kind: kind0, parts: parts0, .. }, ..
        }) = self.calls[first..].last_mut()
        {
            debug_assert_eq!(x0, x, "products of one group have the same rows");
            if kind0 == kind && parts0.len() < MAX_OUTS {
                parts0.append(parts);
                return;
            }
            *prepared = kind0 == kind;
        }
        self.calls.push(call);
    }
}

/// Matrix products of the same rows share a call. Everything else runs one step at a time.
pub(crate) fn fuses(query: &GroupQuery<'_>) -> Fusion {
    match query.kind {
        GroupKind::Products(Products { producer: None, parts, gate: None })
            if parts.iter().all(|part| part.bias.is_none()) =>
        {
            Fusion::Staged
        }
        GroupKind::One(_)
        | GroupKind::Products(_)
        | GroupKind::Attend(_)
        | GroupKind::AttendStored(_)
        | GroupKind::RopeAppend(_)
        | GroupKind::Experts(_) => Fusion::Smaller,
    }
}

/// A plan with the shapes of its weights.
struct Shaped<'a> {
    plan: &'a Plan,
    weights: &'a [Weight],
    /// Whether this is a training step, whose matrix products have many rows.
    is_training: bool,
}

impl Deref for Shaped<'_> {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        self.plan
    }
}

/// Location of a contiguous operand; `None` for other layouts.
fn dense(plan: &Shaped<'_>, operand: &Operand) -> Option<Loc> {
    if !operand.layout.is_contiguous() || operand.dtype.block_bytes() != 4 {
        return None;
    }
    let (start, len) = (operand.layout.offset(), operand.layout.shape().n_elements());
    match plan.buffer(operand.buffer).place {
        Place::Arena { offset } => Some(Loc::Arena(offset / 4 + start..offset / 4 + start + len)),
        Place::Control { offset, .. } => Some(Loc::Control(offset / 4 + start..offset / 4 + start + len)),
        Place::Weight(_) | Place::State(_) => None,
    }
}

fn arena(plan: &Shaped<'_>, operand: &Operand) -> Option<Range<usize>> {
    match dense(plan, operand)? {
        Loc::Arena(range) => Some(range),
        Loc::Control(_) | Loc::Weight(_) => None,
    }
}

fn control(plan: &Shaped<'_>, operand: &Operand) -> Option<Range<usize>> {
    match dense(plan, operand)? {
        Loc::Control(range) => Some(range),
        Loc::Arena(_) | Loc::Weight(_) => None,
    }
}

/// A weight in its original shape and layout.
fn whole_weight(plan: &Shaped<'_>, operand: &Operand) -> Option<WeightId> {
    let Place::Weight(id) = plan.buffer(operand.buffer).place else { return None };
    let whole = operand.layout.is_contiguous() && operand.layout.offset() == 0;
    (whole && operand.layout.shape() == plan.weights[id.idx()].ty.shape).then_some(id)
}

fn vector_weight(plan: &Shaped<'_>, operand: &Operand) -> Option<WeightId> {
    whole_weight(plan, operand).filter(|_| operand.layout.shape().rank() == 1)
}

/// A weight vector in any shape.
fn flat_weight(plan: &Shaped<'_>, operand: &Operand) -> Option<WeightId> {
    let Place::Weight(id) = plan.buffer(operand.buffer).place else { return None };
    let shape = plan.weights[id.idx()].ty.shape;
    let whole = operand.layout.is_contiguous() && operand.layout.shape().n_elements() == shape.n_elements();
    (whole && shape.rank() == 1).then_some(id)
}

/// F32 rows in the arena, each contiguous.
fn rows_at(plan: &Shaped<'_>, operand: &Operand) -> Option<ArenaRowLayout> {
    let Place::Arena { offset } = plan.buffer(operand.buffer).place else { return None };
    let shape = operand.layout.shape();
    let (&n, inner) = shape.dims().split_first()?;
    let row = if n == 0 { operand.layout } else { operand.layout.slice(0, 0, 1).ok()? };
    let is_row = operand.dtype == DType::F32 && row.is_contiguous();
    let stride = operand.layout.strides()[0];
    let start = offset / 4 + operand.layout.offset();
    is_row.then(|| ArenaRowLayout { start, stride, len: inner.iter().product(), n })
}

fn slot_paging(
    plan: &Shaped<'_>,
    state: &Operand,
    [positions, seqs, slots]: [&Operand; 3],
) -> Option<SlotPaging> {
    Some(SlotPaging {
        positions: control(plan, positions)?,
        seqs: control(plan, seqs)?,
        slots: control(plan, slots)?,
        n_slots: state.layout.shape().dims()[0],
    })
}

fn state(plan: &Shaped<'_>, operand: &Operand) -> Option<usize> {
    let Place::State(id) = plan.buffer(operand.buffer).place else { return None };
    (operand.layout.is_contiguous() && is_cache_dtype(operand.dtype)).then(|| id.idx())
}

/// Whether KV caches support this element type.
pub(crate) fn is_cache_dtype(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// Returns the kernel of a step; `None` if none supports its layouts.
fn kernel(plan: &Shaped<'_>, step_idx: usize, tables: &mut Vec<AngleTable>) -> Option<Kernel> {
    let step = &plan.steps()[step_idx];
    let (ins, outs) = (&step.inputs, &step.outputs);
    let out = |i: usize| arena(plan, &outs[i]);
    match &step.op {
        Op::MatMul => products(plan, ins, out(0)?),
        Op::GatherRows(_) => {
            let (ids, d) = (control(plan, &ins[1])?, ins[0].layout.shape().dims()[1]);
            let out = out(0)?;
            match whole_weight(plan, &ins[0]) {
                Some(table) => Some(Kernel::GatherWeight { table, ids, out, d }),
                None => Some(Kernel::GatherArena { table: arena(plan, &ins[0])?, ids, out, d }),
            }
        }
        Op::RmsNorm { eps } => {
            let (x, w) = (arena(plan, &ins[0])?, vector_weight(plan, &ins[1])?);
            Some(Kernel::RmsNorm { x, w, out: out(0)?, eps: *eps })
        }
        Op::AddRmsNorm { eps } => {
            let (a, b, w) = (arena(plan, &ins[0])?, arena(plan, &ins[1])?, vector_weight(plan, &ins[2])?);
            Some(Kernel::AddRmsNorm { a, b, w, sum: out(0)?, out: out(1)?, eps: *eps })
        }
        Op::Unary(f) => Some(Kernel::Unary { f: *f, x: arena(plan, &ins[0])?, out: out(0)? }),
        Op::Binary(f) => binary(plan, *f, ins, out(0)?),
        Op::Gate(f) => {
            let (gate, up) = (arena(plan, &ins[0])?, arena(plan, &ins[1])?);
            Some(Kernel::Gate { f: *f, gate, up, out: out(0)? })
        }
        Op::Rope(rope) => {
            let x = arena(plan, &ins[0])?;
            let table = AngleTable {
                inv_freq: vector_weight(plan, &ins[2])?,
                positions: control(plan, &ins[1])?,
                magnitude: rope.magnitude,
                n_dims: rope.n_dims,
                back: false,
            };
            let dims = ins[0].layout.shape();
            let (n_heads, head_dim) = (dims.dims()[1], dims.dims()[2]);
            let table = AngleTable::find(tables, table);
            Some(Kernel::Rope { rope: *rope, table, x, out: out(0)?, n_heads, head_dim })
        }
        Op::KvAppend => {
            let (state, x) = (state(plan, &ins[0])?, arena(plan, &ins[1])?);
            let paging = paging(plan, &ins[0], [&ins[2], &ins[3], &ins[4]])?;
            Some(Kernel::KvAppend { state, scales: None, dtype: ins[0].dtype, x, paging })
        }
        Op::KvAppendBytes => {
            let (cache, scales) = (state(plan, &ins[0])?, Some(state(plan, &ins[1])?));
            let x = arena(plan, &ins[2])?;
            let paging = paging(plan, &ins[0], [&ins[3], &ins[4], &ins[5]])?;
            Some(Kernel::KvAppend { state: cache, scales, dtype: ins[0].dtype, x, paging })
        }
        Op::Attention(attention) => {
            let states = [state(plan, &ins[1])?, state(plan, &ins[2])?];
            let AttentionInputs { scales, sinks } = AttentionInputs::of(ins.len());
            let scales = match scales {
                Some([k, v]) => Some([state(plan, &ins[k])?, state(plan, &ins[v])?]),
                None => None,
            };
            let paging = paging(plan, &ins[1], [&ins[3], &ins[4], &ins[5]])?;
            let (q, out) = (arena(plan, &ins[0])?, out(0)?);
            let n_heads = ins[0].layout.shape().dims()[1];
            let sinks = match sinks {
                Some(sinks) => Some(vector_weight(plan, &ins[sinks])?),
                None => None,
            };
            Some(Kernel::Attention {
                attention: *attention,
                q,
                out,
                states,
                scales,
                dtype: ins[1].dtype,
                n_heads,
                sinks,
                paging,
            })
        }
        Op::Recurrent(Recurrent::ShortConv(conv)) => {
            let (x, w) = (rows_at(plan, &ins[1])?, flat_weight(plan, &ins[2])?);
            let paging = slot_paging(plan, &ins[0], [&ins[3], &ins[4], &ins[5]])?;
            let fits = ins[2].layout.shape().dims()[0] <= MAX_WIDTH;
            let state = state(plan, &ins[0])?;
            fits.then_some(Kernel::ShortConv { state, x, w, silu: conv.silu, out: out(0)?, paging })
        }
        Op::Recurrent(Recurrent::GatedDelta(delta)) => {
            let rows = |i: usize| rows_at(plan, &ins[i]);
            let (keys, heads) = (ins[1].layout.shape(), ins[3].layout.shape());
            let operands = DeltaOperands {
                q: rows(1)?,
                k: rows(2)?,
                v: rows(3)?,
                a: rows(4)?,
                b: rows(5)?,
                n_key_heads: keys.dims()[1],
                n_heads: heads.dims()[1],
            };
            let (decay, dt_bias) = (vector_weight(plan, &ins[6])?, vector_weight(plan, &ins[7])?);
            let paging = slot_paging(plan, &ins[0], [&ins[8], &ins[9], &ins[10]])?;
            let (delta, state, operands, out) = (*delta, state(plan, &ins[0])?, Box::new(operands), out(0)?);
            let fits = keys.dims()[2] <= MAX_K_DIM;
            fits.then_some(Kernel::GatedDelta { delta, state, operands, decay, dt_bias, out, paging })
        }
        Op::Moe(op) => experts(plan, op, ins, outs),
        Op::Lora(op) => lora(plan, *op, ins, out(0)?),
        // Sampling with a mask or with the most probable tokens runs the reference implementation.
        Op::Sample(sample) if *sample != refrain_graph::Sample::default() => None,
        Op::Sample(_) => {
            let inputs = [&ins[1], &ins[2], &ins[3], &ins[4], &ins[5]];
            let mut control_at: [Range<usize>; 5] = std::array::from_fn(|_| 0..0);
            for (at, operand) in control_at.iter_mut().zip(inputs) {
                *at = control(plan, operand)?;
            }
            let vocab = ins[0].layout.shape().dims()[1];
            let logits = arena(plan, &ins[0])?;
            Some(Kernel::Sample { logits, control: control_at, token: out(0)?, logprob: out(1)?, vocab })
        }
        Op::View(_)
        | Op::Copy
        | Op::Cast(_)
        | Op::Reduce { .. }
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::ScatterAddRows { .. }
        | Op::SpanAttention(_)
        | Op::Train(_)
        | Op::Softmax
        | Op::Accumulate
        | Op::HostCall(_) => None,
    }
}

/// Matrix product of contiguous rows with a whole, transposed weight. Training steps multiply float weights
/// like states, which is faster for many rows.
fn products(plan: &Shaped<'_>, ins: &[Operand], out: Range<usize>) -> Option<Kernel> {
    if plan.is_training && ins[1].dtype.is_float() {
        return None;
    }
    let x = arena(plan, &ins[0])?;
    let w = Operand { layout: ins[1].layout.transpose().ok()?, ..ins[1] };
    let weight = whole_weight(plan, &w).filter(|_| w.layout.shape().rank() == 2)?;
    let k = w.layout.shape().dims()[1];
    let kind = act_kind(w.dtype)?;
    act_bytes(kind, k)?;
    Some(Kernel::Products { x, k, kind, prepared: false, parts: vec![ProductOutput { weight, out }] })
}

/// Products with the adapter of each row's sequence.
fn lora(plan: &Shaped<'_>, op: LoraOp, ins: &[Operand], out: Range<usize>) -> Option<Kernel> {
    let factors = op.factors();
    let &[n_adapters, n_rows, n_cols] = ins[factors].layout.shape().dims() else { return None };
    let y = match op {
        LoraOp::Down => None,
        LoraOp::Up => Some(arena(plan, &ins[0])?),
    };
    Some(Kernel::Lora(Box::new(LoraCall {
        op,
        x: rows_at(plan, &ins[factors - 1])?,
        y,
        out,
        factors: whole_weight(plan, &ins[factors])?,
        dims: [n_adapters, n_rows, n_cols],
        seqs: control(plan, &ins[factors + 1])?,
        adapters: control(plan, &ins[factors + 2])?,
    })))
}

/// A router, or matrix products with experts.
fn experts(plan: &Shaped<'_>, op: &MoeOp, ins: &[Operand], outs: &[Operand]) -> Option<Kernel> {
    let vectors = |operands: &[Operand]| -> Option<Vec<WeightId>> {
        operands.iter().map(|operand| whole_weight(plan, operand)).collect()
    };
    match op {
        MoeOp::Route(route) => {
            if route.groups.is_some_and(|groups| groups.n_groups > MAX_GROUPS) {
                return None;
            }
            let mut vectors = vectors(&ins[1..=route.n_vectors()])?.into_iter();
            let bias = if route.biased { vectors.next() } else { None };
            Some(Kernel::Route(Box::new(RouteCall {
                route: *route,
                logits: dense(plan, &ins[0])?,
                n_experts: ins[0].layout.shape().dims()[1],
                bias,
                scales: vectors.next(),
                positions: match route.positions(ins.len()) {
                    Some(i) => Some(control(plan, &ins[i])?),
                    None => None,
                },
                ids: arena(plan, &outs[0])?,
                weights: arena(plan, &outs[1])?,
            })))
        }
        MoeOp::Gated(gate) => {
            let (weights, biases) = ins[2..].split_at(gate.n_weights());
            expert_call(plan, ins, [weights, biases], &outs[0], ExpertEpilogue::Gated(*gate))
        }
        MoeOp::Summed { .. } => {
            let (weights, biases) = ins[3..].split_at(1);
            let factors = dense(plan, &ins[2])?;
            expert_call(plan, ins, [weights, biases], &outs[0], ExpertEpilogue::Summed(factors))
        }
    }
}

/// Matrix products of F32 rows with the weights of experts.
fn expert_call(
    plan: &Shaped<'_>,
    ins: &[Operand],
    [weights, biases]: [&[Operand]; 2],
    out: &Operand,
    epilogue: ExpertEpilogue,
) -> Option<Kernel> {
    let whole = |operands: &[Operand]| -> Option<Vec<WeightId>> {
        operands.iter().map(|operand| whole_weight(plan, operand)).collect()
    };
    let w = weights[0].layout.shape();
    let &[n_experts, n_rows, k] = w.dims() else { return None };
    let kind = act_kind(weights[0].dtype)?;
    act_bytes(kind, k)?;
    let is_float = ins[0].dtype == DType::F32 && out.dtype == DType::F32;
    let is_one_kind = weights.iter().all(|w| act_kind(w.dtype) == Some(kind));
    if !is_float || !is_one_kind || k == 0 {
        return None;
    }
    let call = ExpertCall {
        x: dense(plan, &ins[0])?,
        ids: dense(plan, &ins[1])?,
        kind,
        n_choices: ins[1].layout.shape().dims()[1],
        k,
        weights: whole(weights)?,
        biases: whole(biases)?,
        n_experts,
        n_rows,
        out: arena(plan, out)?,
        epilogue,
    };
    Some(Kernel::Experts(Box::new(call)))
}

fn binary(plan: &Shaped<'_>, f: Binary, ins: &[Operand], out: Range<usize>) -> Option<Kernel> {
    let a = arena(plan, &ins[0]).filter(|a| a.len() == out.len())?;
    let (b, row) = match vector_weight(plan, &ins[1]) {
        Some(id) => (Loc::Weight(id), ins[1].layout.shape().n_elements()),
        None => (Loc::Arena(arena(plan, &ins[1])?), ins[1].layout.shape().n_elements()),
    };
    // Same size as the output, or a broadcast last dimension with all outer dimensions 1.
    let (a_shape, b_shape) = (ins[0].layout.shape(), ins[1].layout.shape());
    let is_row = b_shape.dim_back(0) == row && a_shape.dim_back(0) == row;
    (row == out.len() || is_row).then_some(Kernel::Binary { f, a, b, out, row })
}

fn paging(plan: &Shaped<'_>, cache: &Operand, [positions, seqs, tables]: [&Operand; 3]) -> Option<Paging> {
    let shape = cache.layout.shape();
    let dims = shape.dims();
    Some(Paging {
        positions: control(plan, positions)?,
        seqs: control(plan, seqs)?,
        tables: control(plan, tables)?,
        max_blocks: tables.layout.shape().dims()[1],
        n_blocks: dims[0],
        n_kv_heads: dims[1],
        kv_block: dims[2],
        head_dim: dims[3],
    })
}
