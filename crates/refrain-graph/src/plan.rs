//! A plan: steps in order, each operand at a fixed place, cut into segments.

use crate::arena::{Arena, Span};
use crate::bounds::Bounds;
use crate::control::ControlLayout;
use crate::graph::{Graph, InputId, NodeId, Origin, StateId, ValueId, WeightId};
use crate::inputs::{Field, StepInputs};
use crate::op::{Op, TensorType};
use crate::schedule::{self, Segment, SegmentKind};
use refrain_tensor::{DType, Layout, TensorError};

/// Index of a buffer in its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(u32);

impl BufferId {
    /// Position in [`Plan::buffers`].
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the plan's arena.
    Arena {
        /// Byte offset.
        offset: usize,
    },
    /// In the control block.
    Control {
        /// The step input it holds.
        input: InputId,
        /// Byte offset.
        offset: usize,
    },
    /// A weight.
    Weight(WeightId),
    /// A state.
    State(StateId),
}

/// Bytes that one or more values share: a value, its views, and what overwrites it in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it lies.
    pub place: Place,
    /// Size.
    pub bytes: usize,
    /// The first step that touches it; 0 for what exists before the step.
    pub first: usize,
    /// The last step that touches it; the number of steps for what is read afterwards.
    pub last: usize,
}

/// An input or output of a step: a buffer, seen through a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// The bytes.
    pub buffer: BufferId,
    /// Element type.
    pub dtype: DType,
    /// Where each element lies in the buffer.
    pub layout: Layout,
}

impl Operand {
    /// The operand's type.
    pub fn ty(&self) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.layout.shape() }
    }
}

/// One thing to run.
#[derive(Clone, Debug)]
pub struct Step {
    /// What to compute.
    pub op: Op,
    /// The node it came from.
    pub node: NodeId,
    /// The node's label.
    pub label: String,
    /// Where it reads.
    pub inputs: Vec<Operand>,
    /// Where it writes.
    pub outputs: Vec<Operand>,
}

/// How to plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Alignment of every buffer in the arena and in the control block.
    pub align: usize,
    /// Let ops overwrite inputs that nobody reads afterwards.
    pub in_place: bool,
    /// How many steps after its last reader a value's memory stays as it is. A backend that runs neighbouring steps as
    /// one launch needs what the first of them reads until the last has written.
    pub linger: usize,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        // 256 bytes: what cudaMalloc promises, and whole cache lines everywhere.
        PlanOptions { align: 256, in_place: true, linger: 0 }
    }
}

/// What a step reads from memory that does not fit any cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights, each counted as often as it is read.
    pub weight_bytes: usize,
    /// What attention reads, one entry for each window that layers look back through.
    pub kv: Vec<KvTraffic>,
}

/// What attention reads of the KV cache in all layers of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTraffic {
    /// Positions that are looked back on at most; all when `None`.
    pub window: Option<usize>,
    /// Bytes for each position that is looked back on.
    pub bytes_per_position: usize,
}

impl Traffic {
    /// Bytes of KV cache that a sequence of `n_positions` reads to evaluate its last one.
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

/// Why a graph has no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A view of something that is itself laid out in a way that does not allow it.
    #[error("{label}: {source}")]
    NotAView {
        /// Label of the node.
        label: String,
        /// The layout's objection.
        source: TensorError,
    },
    /// Rows of a quantised value that are not whole blocks.
    #[error("{label}: {ty} is not whole blocks")]
    PartialBlocks {
        /// Label of the node.
        label: String,
        /// Type of the value.
        ty: TensorType,
    },
}

impl PlanError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            PlanError::NotAView { .. } => "insert a copy before the view",
            PlanError::PartialBlocks { .. } => "use a plain dtype for values whose rows are not whole blocks",
        }
    }
}

/// A graph in running order, with every address fixed.
#[derive(Clone, Debug)]
pub struct Plan {
    steps: Vec<Step>,
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
    /// Orders a graph, cuts it into segments and gives every buffer its place.
    pub fn new(graph: &Graph, options: PlanOptions) -> Result<Plan, PlanError> {
        let order = schedule::order(graph);
        let control = ControlLayout::new(graph.inputs(), options.align)?;
        let mut placer = Placer::new(graph, &control, order.len())?;
        placer.add_nodes(&order, options.in_place)?;
        let steps = placer.steps(&order);
        let outputs: Vec<Operand> = graph.outputs().iter().map(|o| placer.operand(o.value)).collect();
        let mut buffers = placer.buffers;
        let segments = schedule::cut(graph, &order);
        let boundaries = boundaries(&steps, &segments, &buffers);
        for id in &boundaries {
            let buffer = &mut buffers[id.idx()];
            (buffer.first, buffer.last) = (0, steps.len());
        }
        let arena_bytes = place_arena(&mut buffers, options);
        let output_names = graph.outputs().iter().map(|o| o.name.clone()).collect();
        let mut plan = Plan {
            steps,
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

    /// What the inputs of a model's step mean; `None` for a plan that is no step of a model.
    pub fn step_inputs(&self) -> Option<&StepInputs> {
        self.step_inputs.as_ref()
    }

    /// What the numbers of the control block index.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Where an input of 32-bit elements lies in the control block.
    pub fn field(&self, input: InputId) -> Field {
        Field::of(&self.control, input)
    }

    /// Where a dense operand of 32-bit elements lies in the control block, if it does.
    pub fn field_of(&self, operand: &Operand) -> Option<Field> {
        let Place::Control { offset, .. } = self.buffer(operand.buffer).place else { return None };
        let dense = operand.layout.is_contiguous() && operand.dtype.block_bytes() == 4;
        let len = operand.layout.shape().n_elements();
        dense.then(|| Field { offset: offset + 4 * operand.layout.offset(), len })
    }

    /// What runs, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Runs of steps that can be recorded, and host steps between them.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Every buffer.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The buffer of that id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.idx()]
    }

    /// What is read after the step, in the order of the graph's outputs.
    pub fn outputs(&self) -> &[Operand] {
        &self.outputs
    }

    /// The position of the output of that name.
    pub fn output(&self, name: &str) -> Option<usize> {
        self.output_names.iter().position(|n| n == name)
    }

    /// Buffers that a host step and a recordable segment share. Each has its place to itself for the whole plan, so
    /// that what the host writes lands where the recording reads.
    pub fn boundaries(&self) -> &[BufferId] {
        &self.boundaries
    }

    /// Where each step input lies.
    pub fn control(&self) -> &ControlLayout {
        &self.control
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// What one run of the plan reads.
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
                    Place::Weight(_) => traffic.weight_bytes += distinct_bytes(operand),
                    Place::State(_) => {
                        if let Op::Attention(attention) = &step.op {
                            let rows = operand.layout.shape();
                            let per_position = rows.dims()[1] * rows.dims()[3] * operand.dtype.block_bytes();
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

/// Bytes of a value that is whole blocks.
pub(crate) fn whole_bytes(label: &str, ty: TensorType) -> Result<usize, PlanError> {
    let partial = || PlanError::PartialBlocks { label: label.into(), ty };
    ty.dtype.bytes_for(ty.shape.n_elements()).ok_or_else(partial)
}

/// Bytes that a view shows; what it repeats counts once.
fn distinct_bytes(operand: &Operand) -> usize {
    let dims = operand.layout.shape();
    let shown = dims.dims().iter().zip(operand.layout.strides()).filter(|(_, s)| **s != 0).map(|(d, _)| d);
    shown.product::<usize>().div_ceil(operand.dtype.block_len()) * operand.dtype.block_bytes()
}

struct Placer<'g> {
    graph: &'g Graph,
    n_steps: usize,
    buffers: Vec<Buffer>,
    // For each value, its bytes and how it sees them; views and state versions share their source's.
    values: Vec<Option<(BufferId, Layout)>>,
    // For each value, the last step that reads it or a view of it; the step count for outputs.
    last_use: Vec<usize>,
}

impl<'g> Placer<'g> {
    fn new(graph: &'g Graph, control: &ControlLayout, n_steps: usize) -> Result<Placer<'g>, PlanError> {
        let values = vec![None; graph.values().len()];
        let mut placer = Placer { graph, n_steps, buffers: Vec::new(), values, last_use: Vec::new() };
        for (idx, value) in graph.values().iter().enumerate() {
            let (place, name) = match value.origin {
                Origin::Input(input) => {
                    let offset = control.slot(input).offset;
                    (Place::Control { input, offset }, &graph.inputs()[input.idx()].name)
                }
                Origin::Weight(w) => (Place::Weight(w), &graph.weights()[w.idx()].name),
                Origin::State(s) => (Place::State(s), &graph.states()[s.idx()].name),
                Origin::Node { .. } => continue,
            };
            let bytes = whole_bytes(name, value.ty)?;
            let id = placer.push(Buffer { place, bytes, first: 0, last: n_steps });
            placer.values[idx] = Some((id, Layout::contiguous(value.ty.shape)));
        }
        Ok(placer)
    }

    fn push(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn operand(&self, value: ValueId) -> Operand {
        let Some((buffer, layout)) = self.values[value.idx()] else {
            panic!("value {value:?} is read before it is made");
        };
        Operand { buffer, dtype: self.graph.value(value).ty.dtype, layout }
    }

    fn add_nodes(&mut self, order: &[NodeId], in_place: bool) -> Result<(), PlanError> {
        self.last_use = self.last_uses(order);
        let step_of = self.step_of(order);
        for (idx, node) in self.graph.nodes().iter().enumerate() {
            if let Op::View(view) = &node.op {
                let (buffer, layout) = self.place_of(node.inputs[0]);
                let layout = view
                    .apply(&layout)
                    .map_err(|source| PlanError::NotAView { label: node.label.clone(), source })?;
                self.values[node.outputs[0].idx()] = Some((buffer, layout));
                continue;
            }
            let step = step_of[idx];
            let mut claimed = Vec::new();
            for output in 0..node.outputs.len() {
                self.place_output(idx, output, step, in_place, &mut claimed)?;
            }
        }
        Ok(())
    }

    fn place_of(&self, value: ValueId) -> (BufferId, Layout) {
        let operand = self.operand(value);
        (operand.buffer, operand.layout)
    }

    fn place_output(
        &mut self,
        node_idx: usize,
        output: usize,
        step: usize,
        in_place: bool,
        claimed: &mut Vec<BufferId>,
    ) -> Result<(), PlanError> {
        let node = &self.graph.nodes()[node_idx];
        let value = node.outputs[output];
        let ty = self.graph.value(value).ty;
        if let Some((_, input)) = node.op.state_updates().iter().find(|(out, _)| *out == output) {
            self.values[value.idx()] = Some(self.place_of(node.inputs[*input]));
            return Ok(());
        }
        let bytes = whole_bytes(&node.label, ty)?;
        let last = self.last_use[value.idx()].max(step);
        let reused = if in_place { self.overwritable(node_idx, output, step, bytes, claimed) } else { None };
        let buffer = match reused {
            Some(buffer) => {
                claimed.push(buffer);
                let b = &mut self.buffers[buffer.idx()];
                b.last = b.last.max(last);
                buffer
            }
            None => self.push(Buffer { place: Place::Arena { offset: 0 }, bytes, first: step, last }),
        };
        self.values[value.idx()] = Some((buffer, Layout::contiguous(ty.shape)));
        Ok(())
    }

    /// The buffer of an input that this output may overwrite: an arena buffer that dies in this step, seen whole (not
    /// a part of it that is broadcast to the output's size), and through no other input of the step.
    fn overwritable(
        &self,
        node_idx: usize,
        output: usize,
        step: usize,
        bytes: usize,
        claimed: &[BufferId],
    ) -> Option<BufferId> {
        let node = &self.graph.nodes()[node_idx];
        let candidates = node.op.may_overwrite().iter().filter(|(out, _)| *out == output);
        candidates.map(|&(_, input)| input).find_map(|input| {
            let operand = self.operand(node.inputs[input]);
            let buffer = &self.buffers[operand.buffer.idx()];
            let seen = operand.dtype.bytes_for(operand.layout.shape().n_elements());
            let whole = operand.layout.is_contiguous() && seen == Some(bytes) && buffer.bytes == bytes;
            let dies = matches!(buffer.place, Place::Arena { .. }) && buffer.last == step;
            let alone = node
                .inputs
                .iter()
                .enumerate()
                .all(|(i, &v)| i == input || self.operand(v).buffer != operand.buffer);
            (whole && dies && alone && !claimed.contains(&operand.buffer)).then_some(operand.buffer)
        })
    }

    fn steps(&self, order: &[NodeId]) -> Vec<Step> {
        let step = |&id: &NodeId| {
            let node = self.graph.node(id);
            Step {
                op: node.op.clone(),
                node: id,
                label: node.label.clone(),
                inputs: node.inputs.iter().map(|&v| self.operand(v)).collect(),
                outputs: node.outputs.iter().map(|&v| self.operand(v)).collect(),
            }
        };
        order.iter().map(step).collect()
    }

    fn step_of(&self, order: &[NodeId]) -> Vec<usize> {
        let mut step_of = vec![usize::MAX; self.graph.nodes().len()];
        for (step, id) in order.iter().enumerate() {
            step_of[id.idx()] = step;
        }
        step_of
    }

    /// A view's uses count as uses of what it views.
    fn last_uses(&self, order: &[NodeId]) -> Vec<usize> {
        let step_of = self.step_of(order);
        let mut last = vec![0; self.graph.values().len()];
        for output in self.graph.outputs() {
            last[output.value.idx()] = self.n_steps;
        }
        for (idx, node) in self.graph.nodes().iter().enumerate().rev() {
            let is_view = matches!(node.op, Op::View(_));
            for &input in &node.inputs {
                let used = if is_view { last[node.outputs[0].idx()] } else { step_of[idx] };
                last[input.idx()] = last[input.idx()].max(used);
            }
        }
        last
    }
}

fn place_arena(buffers: &mut [Buffer], options: PlanOptions) -> usize {
    let in_arena: Vec<usize> =
        (0..buffers.len()).filter(|&i| matches!(buffers[i].place, Place::Arena { .. })).collect();
    let spans: Vec<Span> = in_arena
        .iter()
        .map(|&i| {
            let Buffer { bytes, first, last, .. } = buffers[i];
            Span { bytes, first, last: last.saturating_add(options.linger) }
        })
        .collect();
    let arena = Arena::place(&spans, options.align);
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
