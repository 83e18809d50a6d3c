//! Plans: ordered steps with fixed addresses, cut into segments.

use crate::arena::{Arena, Span};
use crate::bounds::Bounds;
use crate::control::ControlLayout;
use crate::facts::GraphFacts;
use crate::graph::{Graph, InputId, NodeId, StateId, ValueId, ValueOrigin, WeightId};
use crate::group::{self, CheckedGroup, Fusion, Group, GroupQuery, Refusal};
use crate::inputs::{Field, StepInputs};
use crate::op::{Op, TensorType};
use crate::schedule::{self, Dependencies, Segment, SegmentKind};
use refrain_tensor::{DType, Layout, TensorError};

/// Index of a buffer in its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(u32);

impl BufferId {
    /// Index in [`Plan::buffers`].
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}

/// Location of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the plan's arena.
    Arena {
        /// Byte offset.
        offset: usize,
    },
    /// In the control block.
    Control {
        /// Step input in the buffer.
        input: InputId,
        /// Byte offset.
        offset: usize,
    },
    /// A weight.
    Weight(WeightId),
    /// A state.
    State(StateId),
}

/// Bytes shared by a value, its views, and values that overwrite it in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Location.
    pub place: Place,
    /// Size in bytes.
    pub bytes: usize,
    /// First step that touches it, including steps that run concurrently with that one; 0 if it exists before
    /// the first step.
    pub first: usize,
    /// Last step that touches it, including steps that run concurrently with that one; the number of steps if
    /// it is read afterwards.
    pub last: usize,
}

/// Input or output of a step: a buffer seen through a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// Buffer.
    pub buffer: BufferId,
    /// Element type.
    pub dtype: DType,
    /// Layout of the elements within the buffer.
    pub layout: Layout,
}

impl Operand {
    /// Type of the operand.
    pub fn ty(&self) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.layout.shape() }
    }
}

/// One operation of a plan.
#[derive(Clone, Debug)]
pub struct Step {
    /// Operation.
    pub op: Op,
    /// Node of the graph.
    pub node: NodeId,
    /// Label of the node.
    pub label: String,
    /// Operands it reads.
    pub inputs: Vec<Operand>,
    /// Operands it writes.
    pub outputs: Vec<Operand>,
}

/// Options of planning.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Alignment of every buffer in the arena and in the control block.
    pub align: usize,
    /// Whether ops may overwrite inputs that nothing reads afterwards.
    pub in_place: bool,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        // 256 bytes: the alignment that cudaMalloc guarantees, and a multiple of the cache line everywhere.
        PlanOptions { align: 256, in_place: true }
    }
}

/// Bytes that a step reads from data too large for any cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights, counted once per read.
    pub weight_bytes: usize,
    /// KV cache reads of attention, one entry per window size.
    pub kv: Vec<KvTraffic>,
}

/// KV cache reads of attention in all layers with the same window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTraffic {
    /// Maximum number of positions attended to; `None` for all.
    pub window: Option<usize>,
    /// Bytes per position attended to.
    pub bytes_per_position: usize,
}

impl Traffic {
    /// Returns the bytes of KV cache read to evaluate the last token of a sequence of `n_positions`.
    pub fn kv_bytes(&self, n_positions: usize) -> usize {
        self.kv
            .iter()
            .map(|kv| kv.bytes_per_position * kv.window.map_or(n_positions, |w| w.min(n_positions)))
            .sum()
    }

    fn add_kv(&mut self, window: Option<usize>, bytes_per_position: usize) {
        match self.kv.iter_mut().find(|kv| kv.window == window) {
            Some(kv) => kv.bytes_per_position += bytes_per_position,
            None => self.kv.push(KvTraffic { window, bytes_per_position }),
        }
    }
}

/// Why a graph could not be planned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A view that the layout of its source does not allow.
    #[error("{label}: {source}")]
    NotAView {
        /// Label of the node.
        label: String,
        /// Cause.
        source: TensorError,
    },
    /// A quantised value whose rows are not a whole number of blocks.
    #[error("{label}: {ty} is not whole blocks")]
    PartialBlocks {
        /// Label of the node.
        label: String,
        /// Type of the value.
        ty: TensorType,
    },
}

impl PlanError {
    /// Suggested fix.
    pub fn hint(&self) -> &'static str {
        match self {
            PlanError::NotAView { .. } => "insert a copy before the view",
            PlanError::PartialBlocks { .. } => "use a plain dtype for values whose rows are not whole blocks",
        }
    }
}

/// A graph in execution order, with all addresses fixed.
#[derive(Clone, Debug)]
pub struct Plan {
    steps: Vec<Step>,
    step_of: Vec<usize>,
    groups: Vec<Group>,
    refusals: Vec<Refusal>,
    segments: Vec<Segment>,
    buffers: Vec<Buffer>,
    outputs: Vec<Operand>,
    output_names: Vec<String>,
    boundaries: Vec<BufferId>,
    control: ControlLayout,
    step_inputs: Option<StepInputs>,
    bounds: Bounds,
    arena_bytes: usize,
}

impl Plan {
    /// Plans steps that run one by one.
    pub fn new(graph: &Graph, options: PlanOptions) -> Result<Plan, PlanError> {
        Plan::fused(graph, options, &|_| Fusion::Smaller)
    }

    /// Forms groups that a backend runs as one unit, orders them, cuts the order into segments and places all
    /// buffers. `fuses` is the backend's answer for each group of several nodes, largest first: see
    /// [`crate::Backend::fuses`].
    pub fn fused(
        graph: &Graph,
        options: PlanOptions,
        fuses: &dyn Fn(&GroupQuery<'_>) -> Fusion,
    ) -> Result<Plan, PlanError> {
        let (facts, dependencies) = (GraphFacts::of(graph)?, Dependencies::of(graph));
        let group::Grouping { groups: found, refusals } = group::find(&facts, &dependencies, fuses);
        let units: Vec<Vec<NodeId>> = found.iter().map(|found| found.kind.nodes()).collect();
        let order = schedule::order(graph, &dependencies, &units);
        let control = ControlLayout::new(graph.inputs(), options.align)?;
        let run = RunOrder::new(graph, &order, &found, options.in_place);
        let mut placer = Placer::new(&facts, &run, &control)?;
        placer.add_nodes()?;
        let steps = placer.steps();
        let outputs: Vec<Operand> = graph.outputs().iter().map(|o| placer.operand(o.value)).collect();
        let mut buffers = placer.buffers;
        let segments = schedule::cut(graph, &order);
        let boundaries = boundaries(&steps, &segments, &buffers);
        for id in &boundaries {
            let buffer = &mut buffers[id.idx()];
            (buffer.first, buffer.last) = (0, steps.len());
        }
        let arena_bytes = place_arena(&mut buffers, options.align);
        let output_names = graph.outputs().iter().map(|o| o.name.clone()).collect();
        let step_of = run.step_of;
        let mut groups: Vec<Group> = found
            .into_iter()
            .zip(&units)
            .map(|(found, nodes)| {
                let first = step_of[nodes[0].idx()];
                Group { kind: found.kind, steps: first..first + nodes.len() }
            })
            .collect();
        groups.sort_by_key(|group| group.steps.start);
        let mut plan = Plan {
            steps,
            step_of,
            groups,
            refusals,
            segments,
            buffers,
            outputs,
            output_names,
            boundaries,
            control,
            step_inputs: graph.step().cloned(),
            bounds: Bounds::default(),
            arena_bytes,
        };
        plan.bounds = Bounds::of(&plan);
        Ok(plan)
    }

    /// Meaning of the inputs of a model's step; `None` for other plans.
    pub fn step_inputs(&self) -> Option<&StepInputs> {
        self.step_inputs.as_ref()
    }

    /// Limits of the index values in the control block.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Field of an input of 32-bit elements.
    pub fn field(&self, input: InputId) -> Field {
        Field::of(&self.control, input)
    }

    /// Field of a contiguous operand of 32-bit elements, if it is in the control block.
    pub fn field_of(&self, operand: &Operand) -> Option<Field> {
        let Place::Control { offset, .. } = self.buffer(operand.buffer).place else { return None };
        let dense = operand.layout.is_contiguous() && operand.dtype.block_bytes() == 4;
        let len = operand.layout.shape().n_elements();
        dense.then(|| Field { offset: offset + 4 * operand.layout.offset(), len })
    }

    /// Steps in execution order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Step of a node that is not a view.
    pub fn step(&self, node: NodeId) -> &Step {
        &self.steps[self.step_of[node.idx()]]
    }

    /// Groups in execution order. Each step is in one group, and no group spans two segments.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Groups of a segment.
    pub fn groups_of(&self, segment: &Segment) -> &[Group] {
        let at = |step: usize| self.groups.partition_point(|group| group.steps.start < step);
        &self.groups[at(segment.steps.start)..at(segment.steps.end)]
    }

    /// Groups that the backend has no kernel for; their members run in smaller groups.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Recordable segments and the host steps between them.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// All buffers.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.idx()]
    }

    /// Outputs, in the order of the graph's outputs.
    pub fn outputs(&self) -> &[Operand] {
        &self.outputs
    }

    /// Index of the output with this name.
    pub fn output(&self, name: &str) -> Option<usize> {
        self.output_names.iter().position(|n| n == name)
    }

    /// Buffers that a host step and a recordable segment share. Each keeps its address to itself throughout the
    /// plan, so the host writes where the recording reads.
    pub fn boundaries(&self) -> &[BufferId] {
        &self.boundaries
    }

    /// Layout of the control block.
    pub fn control(&self) -> &ControlLayout {
        &self.control
    }

    /// Size of the arena in bytes.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Bytes that one run of the plan reads.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for step in &self.steps {
            for (i, operand) in step.inputs.iter().enumerate() {
                let buffer = self.buffer(operand.buffer);
                match buffer.place {
                    Place::Weight(_) if matches!(step.op, Op::GatherRows(_)) && i == 0 => {
                        let n = step.outputs[0].layout.shape().n_elements();
                        traffic.weight_bytes += n / operand.dtype.block_len() * operand.dtype.block_bytes();
                    }
                    // The device reads only the result of a host lookup, not the table.
                    Place::Weight(_) if matches!(step.op, Op::HostCall(_)) => {}
                    // Experts: at most one read of each chosen expert, for all rows.
                    Place::Weight(_)
                        if matches!(step.op, Op::Moe(_)) && operand.layout.shape().rank() > 1 =>
                    {
                        let n_experts = operand.layout.shape().dims()[0].max(1);
                        let n_choices = step.inputs[1].layout.shape().n_elements().min(n_experts);
                        traffic.weight_bytes += distinct_bytes(operand) / n_experts * n_choices;
                    }
                    // Adapters: at most one read of each sequence's.
                    Place::Weight(_) if matches!(step.op, Op::Lora(_)) => {
                        let n_adapters = operand.layout.shape().dims()[0].max(1);
                        let n_seqs = step.inputs.last().map_or(0, |seqs| seqs.layout.shape().n_elements());
                        traffic.weight_bytes += distinct_bytes(operand) / n_adapters * n_seqs.min(n_adapters);
                    }
                    Place::Weight(_) => traffic.weight_bytes += distinct_bytes(operand),
                    Place::State(_) => {
                        if let Op::Attention(attention) = &step.op {
                            let rows = operand.layout.shape();
                            // The scales of an 8-bit cache have no elements per head.
                            let per_head = rows.dims().get(3).copied().unwrap_or(1);
                            let per_position = rows.dims()[1] * per_head * operand.dtype.block_bytes();
                            traffic.add_kv(attention.window, per_position);
                        }
                    }
                    Place::Arena { .. } | Place::Control { .. } => {}
                }
            }
        }
        traffic
    }
}

/// Bytes of a value that is a whole number of blocks.
pub(crate) fn whole_bytes(label: &str, ty: TensorType) -> Result<usize, PlanError> {
    let partial = || PlanError::PartialBlocks { label: label.into(), ty };
    ty.dtype.bytes_for(ty.shape.n_elements()).ok_or_else(partial)
}

/// Bytes that a view covers; broadcast bytes count once.
fn distinct_bytes(operand: &Operand) -> usize {
    let dims = operand.layout.shape();
    let shown = dims.dims().iter().zip(operand.layout.strides()).filter(|(_, s)| **s != 0).map(|(d, _)| d);
    shown.product::<usize>().div_ceil(operand.dtype.block_len()) * operand.dtype.block_bytes()
}

/// Step of each node, and which steps run concurrently.
struct RunOrder<'a> {
    order: &'a [NodeId],
    /// Per node, its step.
    step_of: Vec<usize>,
    /// Per step, the first and last step that run concurrently with it.
    span_of: Vec<(usize, usize)>,
    /// Per step, whether it may overwrite inputs that only it reads.
    in_place: Vec<bool>,
}

impl<'a> RunOrder<'a> {
    fn new(graph: &Graph, order: &'a [NodeId], found: &[CheckedGroup], in_place: bool) -> RunOrder<'a> {
        let mut step_of = vec![usize::MAX; graph.nodes().len()];
        for (step, id) in order.iter().enumerate() {
            step_of[id.idx()] = step;
        }
        let (mut span_of, mut overwrites) = (vec![(0, 0); order.len()], vec![false; order.len()]);
        for CheckedGroup { kind, is_staged } in found {
            let nodes = kind.nodes();
            let mut first = step_of[nodes[0].idx()];
            for n in if *is_staged { kind.stages() } else { vec![nodes.len()] } {
                span_of[first..first + n].fill((first, first + n - 1));
                overwrites[first..first + n].fill(in_place && *is_staged);
                first += n;
            }
        }
        RunOrder { order, step_of, span_of, in_place: overwrites }
    }

    /// Nodes that run concurrently with a step.
    fn together(&self, step: usize) -> &'a [NodeId] {
        let (first, last) = self.span_of[step];
        &self.order[first..=last]
    }
}

struct Placer<'g> {
    facts: &'g GraphFacts<'g>,
    run: &'g RunOrder<'g>,
    buffers: Vec<Buffer>,
    // Per value that is not a view, its buffer; versions of a state share one.
    places: Vec<Option<BufferId>>,
    // Per value, the last step that runs concurrently with a reader of it or of a view of it; the step count
    // for outputs.
    last_use: Vec<usize>,
}

impl<'g> Placer<'g> {
    fn new(
        facts: &'g GraphFacts<'g>,
        run: &'g RunOrder<'g>,
        control: &ControlLayout,
    ) -> Result<Placer<'g>, PlanError> {
        let graph = facts.graph;
        let places = vec![None; graph.values().len()];
        let mut placer = Placer { facts, run, buffers: Vec::new(), places, last_use: Vec::new() };
        placer.last_use = placer.last_uses();
        for (idx, value) in graph.values().iter().enumerate() {
            let (place, name) = match value.origin {
                ValueOrigin::Input(input) => {
                    let offset = control.slot(input).offset;
                    (Place::Control { input, offset }, &graph.inputs()[input.idx()].name)
                }
                ValueOrigin::Weight(w) => (Place::Weight(w), &graph.weights()[w.idx()].name),
                ValueOrigin::State(s) => (Place::State(s), &graph.states()[s.idx()].name),
                ValueOrigin::Node { .. } => continue,
            };
            let bytes = whole_bytes(name, value.ty)?;
            placer.places[idx] = Some(placer.push(Buffer { place, bytes, first: 0, last: run.order.len() }));
        }
        Ok(placer)
    }

    fn push(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn operand(&self, value: ValueId) -> Operand {
        let seen = self.facts.value(value);
        let Some(buffer) = self.places[seen.source.idx()] else {
            panic!("value {value:?} is read before it is computed");
        };
        Operand { buffer, dtype: seen.dtype, layout: seen.layout }
    }

    fn add_nodes(&mut self) -> Result<(), PlanError> {
        for (step, &id) in self.run.order.iter().enumerate() {
            let mut claimed = Vec::new();
            for output in 0..self.facts.graph.node(id).outputs.len() {
                self.place_output(id, output, step, &mut claimed)?;
            }
        }
        Ok(())
    }

    fn place_output(
        &mut self,
        id: NodeId,
        output: usize,
        step: usize,
        claimed: &mut Vec<BufferId>,
    ) -> Result<(), PlanError> {
        let graph = self.facts.graph;
        let node = graph.node(id);
        let value = node.outputs[output];
        if let Some((_, input)) = node.op.state_updates().into_iter().find(|(out, _)| *out == output) {
            self.places[value.idx()] = Some(self.operand(node.inputs[input]).buffer);
            return Ok(());
        }
        let bytes = whole_bytes(&node.label, graph.value(value).ty)?;
        let (first, end) = self.run.span_of[step];
        let last = self.last_use[value.idx()].max(end);
        let reused = match self.run.in_place[step] {
            true => self.overwritable(id, output, step, bytes, claimed),
            false => None,
        };
        let buffer = match reused {
            Some(buffer) => {
                claimed.push(buffer);
                let b = &mut self.buffers[buffer.idx()];
                b.last = b.last.max(last);
                buffer
            }
            None => self.push(Buffer { place: Place::Arena { offset: 0 }, bytes, first, last }),
        };
        self.places[value.idx()] = Some(buffer);
        Ok(())
    }

    /// Returns the input buffer that this output may overwrite: an arena buffer that dies with this step, is
    /// read whole (not a part that is broadcast to the output's size), and is no other input of the concurrent
    /// steps.
    fn overwritable(
        &self,
        id: NodeId,
        output: usize,
        step: usize,
        bytes: usize,
        claimed: &[BufferId],
    ) -> Option<BufferId> {
        let graph = self.facts.graph;
        let node = graph.node(id);
        let candidates = node.op.may_overwrite().iter().filter(|(out, _)| *out == output);
        candidates.map(|&(_, input)| input).find_map(|input| {
            let operand = self.operand(node.inputs[input]);
            let buffer = &self.buffers[operand.buffer.idx()];
            let seen = operand.dtype.bytes_for(operand.layout.shape().n_elements());
            let whole = operand.layout.is_contiguous() && seen == Some(bytes) && buffer.bytes == bytes;
            let dies = matches!(buffer.place, Place::Arena { .. }) && buffer.last == self.run.span_of[step].1;
            // Members that run later may read values that have no buffer yet; those cannot conflict.
            let place = |v: ValueId| self.places[self.facts.value(v).source.idx()];
            let reads = |&member: &NodeId| {
                let inputs = graph.node(member).inputs.iter().enumerate();
                inputs.filter(|(_, v)| place(**v) == Some(operand.buffer)).map(move |(i, _)| (member, i))
            };
            let alone = self.run.together(step).iter().flat_map(reads).all(|read| read == (id, input));
            (whole && dies && alone && !claimed.contains(&operand.buffer)).then_some(operand.buffer)
        })
    }

    fn steps(&self) -> Vec<Step> {
        let step = |&id: &NodeId| {
            let node = self.facts.graph.node(id);
            Step {
                op: node.op.clone(),
                node: id,
                label: node.label.clone(),
                inputs: node.inputs.iter().map(|&v| self.operand(v)).collect(),
                outputs: node.outputs.iter().map(|&v| self.operand(v)).collect(),
            }
        };
        self.run.order.iter().map(step).collect()
    }

    /// Uses of a view count as uses of its source.
    fn last_uses(&self) -> Vec<usize> {
        let graph = self.facts.graph;
        let source = |value: ValueId| self.facts.value(value).source.idx();
        let mut last = vec![0; graph.values().len()];
        for output in graph.outputs() {
            last[source(output.value)] = self.run.order.len();
        }
        for (step, &id) in self.run.order.iter().enumerate() {
            let (_, end) = self.run.span_of[step];
            for &input in &graph.node(id).inputs {
                last[source(input)] = last[source(input)].max(end);
            }
        }
        last
    }
}

fn place_arena(buffers: &mut [Buffer], align: usize) -> usize {
    let in_arena: Vec<usize> =
        (0..buffers.len()).filter(|&i| matches!(buffers[i].place, Place::Arena { .. })).collect();
    let spans: Vec<Span> = in_arena
        .iter()
        .map(|&i| {
            let Buffer { bytes, first, last, .. } = buffers[i];
            Span { bytes, first, last }
        })
        .collect();
    let arena = Arena::place(&spans, align);
    for (&i, &offset) in in_arena.iter().zip(&arena.offsets) {
        buffers[i].place = Place::Arena { offset };
    }
    arena.bytes
}

fn boundaries(steps: &[Step], segments: &[Segment], buffers: &[Buffer]) -> Vec<BufferId> {
    let mut by_host = vec![false; buffers.len()];
    let mut by_device = vec![false; buffers.len()];
    for segment in segments {
        let touched = match segment.kind {
            SegmentKind::Host(_) => &mut by_host,
            SegmentKind::Recordable => &mut by_device,
        };
        for step in &steps[segment.steps.clone()] {
            for operand in step.inputs.iter().chain(&step.outputs) {
                touched[operand.buffer.idx()] = true;
            }
        }
    }
    (0..buffers.len())
        .filter(|&i| by_host[i] && by_device[i] && matches!(buffers[i].place, Place::Arena { .. }))
        .map(|i| BufferId(i as u32))
        .collect()
}
