//! Values, nodes and states of a graph, and its builder.

use crate::infer::InferError;
use crate::inputs::StepInputs;
use crate::op::{Attention, Binary, Capture, Gate, HostCall, Op, Rope, TensorType, Unary, View};
use refrain_tensor::{DType, Shape, TensorError};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub(crate) u32);

        impl $name {
            /// Index in the graph's list of this kind.
            pub fn idx(self) -> usize {
                self.0 as usize
            }

            /// Returns the id for an index in the graph's list of this kind.
            pub fn from_idx(idx: usize) -> $name {
                $name(idx as u32)
            }
        }
    )*};
}

ids! {
    /// Id of a value.
    ValueId,
    /// Id of a node.
    NodeId,
    /// Id of a weight: constant, the same in every step.
    WeightId,
    /// Id of a state: persists across steps.
    StateId,
    /// Id of an input: set by the host before a step.
    InputId,
}

/// Origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// Step input, set before each step.
    Input(InputId),
    /// Weight, loaded once.
    Weight(WeightId),
    /// Content of a state at the start of the step.
    State(StateId),
    /// Output of a node.
    Node {
        /// The node.
        node: NodeId,
        /// Index among its outputs.
        output: usize,
    },
}

/// One SSA value.
#[derive(Clone, Copy, Debug)]
pub struct Value {
    /// Type.
    pub ty: TensorType,
    /// Origin.
    pub origin: ValueOrigin,
}

/// One operation of a graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Operation.
    pub op: Op,
    /// Values it reads.
    pub inputs: Vec<ValueId>,
    /// Values it computes.
    pub outputs: Vec<ValueId>,
    /// Readable name, such as `blk.3.attn_q`.
    pub label: String,
}

/// A step input: a slot in the control block.
#[derive(Clone, Debug)]
pub struct Input {
    /// Name.
    pub name: String,
    /// Type.
    pub ty: TensorType,
}

/// A weight, shared by all graphs of a model.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Name in the model file.
    pub name: String,
    /// Type.
    pub ty: TensorType,
}

/// A state, shared by all graphs of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Name.
    pub name: String,
    /// Type.
    pub ty: TensorType,
    /// How a step may change it.
    pub kind: StateKind,
}

/// How a step may change a state. Decides how verification saves, compares and restores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Blocks of a paged cache, `[n_blocks, n_kv_heads, kv_block, ..]`: rows of heads, or their scales. A
    /// step writes the rows that block tables name. Verified on spare blocks after the pool.
    Paged,
    /// Slots of recurrent layers, `[n_slots, ..]`, two per sequence: a step reads one and writes the other.
    /// Verified on spare slots after the pool.
    Slots,
    /// Parameters, moments, counters: a step may write all of it. Verified as a whole.
    Whole,
}

impl State {
    /// Returns a paged cache.
    pub fn paged(name: impl Into<String>, ty: TensorType) -> State {
        State { name: name.into(), ty, kind: StateKind::Paged }
    }

    /// Returns a state in slots.
    pub fn slots(name: impl Into<String>, ty: TensorType) -> State {
        State { name: name.into(), ty, kind: StateKind::Slots }
    }

    /// Returns a state that a step may change as a whole.
    pub fn whole(name: impl Into<String>, ty: TensorType) -> State {
        State { name: name.into(), ty, kind: StateKind::Whole }
    }
}

/// A value that the host reads after the step.
#[derive(Clone, Debug)]
pub struct Output {
    /// Name.
    pub name: String,
    /// The value.
    pub value: ValueId,
}

/// The computation of one step. Nodes are in a valid execution order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    values: Vec<Value>,
    nodes: Vec<Node>,
    inputs: Vec<Input>,
    weights: Vec<Weight>,
    states: Vec<State>,
    outputs: Vec<Output>,
    step: Option<StepInputs>,
    early: Vec<ValueId>,
}

impl Graph {
    /// Values to compute as early as possible, in this order.
    pub fn early(&self) -> &[ValueId] {
        &self.early
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Step inputs.
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// Weights; the same list in all graphs of a model.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// States; the same list in all graphs of a model.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// Outputs, read after the step.
    pub fn outputs(&self) -> &[Output] {
        &self.outputs
    }

    /// Meaning of the inputs of a model's step; `None` for other graphs.
    pub fn step(&self) -> Option<&StepInputs> {
        self.step.as_ref()
    }

    /// Node with this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.idx()]
    }

    /// Value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.idx()]
    }

    /// Input with this name.
    pub fn input(&self, name: &str) -> Option<InputId> {
        self.inputs.iter().position(|i| i.name == name).map(InputId::from_idx)
    }

    /// Index of the output with this name.
    pub fn output(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|o| o.name == name)
    }

    /// Returns the state that a value is a version of, looking through views.
    pub fn state_of(&self, value: ValueId) -> Option<StateId> {
        let mut value = value;
        loop {
            match self.value(value).origin {
                ValueOrigin::State(id) => return Some(id),
                ValueOrigin::Input(_) | ValueOrigin::Weight(_) => return None,
                ValueOrigin::Node { node, output } => {
                    let node = self.node(node);
                    let updated = node.op.state_updates().into_iter().find(|(out, _)| *out == output);
                    value = match updated {
                        Some((_, input)) => node.inputs[input],
                        None if matches!(node.op, Op::View(_)) => node.inputs[0],
                        None => return None,
                    };
                }
            }
        }
    }

    /// Returns the state and the version that a value is, or is a view of.
    fn state_version(&self, value: ValueId) -> Option<(StateId, ValueId)> {
        let mut version = value;
        while let ValueOrigin::Node { node, .. } = self.value(version).origin
            && matches!(self.node(node).op, Op::View(_))
        {
            version = self.node(node).inputs[0];
        }
        self.state_of(version).map(|state| (state, version))
    }

    /// Types of a node's inputs.
    pub fn input_types(&self, node: &Node) -> Vec<TensorType> {
        node.inputs.iter().map(|&v| self.value(v).ty).collect()
    }

    /// Types of a node's outputs.
    pub fn output_types(&self, node: &Node) -> Vec<TensorType> {
        node.outputs.iter().map(|&v| self.value(v).ty).collect()
    }
}

/// Why a graph cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// An op refused its inputs.
    #[error("{label}: {source}")]
    Infer {
        /// Label of the node.
        label: String,
        /// Violated rule.
        source: InferError,
    },
    /// An invalid shape.
    #[error("{label}: {source}")]
    Shape {
        /// Label of the node.
        label: String,
        /// Cause.
        source: TensorError,
    },
    /// A node used an outdated version of a state, or would change a value that is not a state.
    #[error("{label}: its state is {because}")]
    State {
        /// Label of the node.
        label: String,
        /// Reason.
        because: &'static str,
    },
    /// Two inputs or two outputs have the same name.
    #[error("two values are named {name:?}")]
    Duplicate {
        /// Name.
        name: String,
    },
}

/// Builds a graph node by node and infers types.
#[derive(Clone, Debug)]
pub struct GraphBuilder {
    graph: Graph,
    scope: String,
    weight_values: Vec<ValueId>,
    // Latest version of each state. Older versions cannot be read, because states change in place.
    state_values: Vec<ValueId>,
}

impl GraphBuilder {
    /// Returns a builder over these weights and states. Graphs of one model use the same lists, so their ids
    /// agree.
    pub fn new(weights: Vec<Weight>, states: Vec<State>) -> GraphBuilder {
        let mut graph = Graph { weights, states, ..Graph::default() };
        let mut values = Vec::new();
        for (i, w) in graph.weights.iter().enumerate() {
            values.push(Value { ty: w.ty, origin: ValueOrigin::Weight(WeightId::from_idx(i)) });
        }
        for (i, s) in graph.states.iter().enumerate() {
            values.push(Value { ty: s.ty, origin: ValueOrigin::State(StateId::from_idx(i)) });
        }
        let n_weights = graph.weights.len();
        let ids: Vec<ValueId> = (0..values.len()).map(ValueId::from_idx).collect();
        graph.values = values;
        let (weight_values, state_values) = (ids[..n_weights].to_vec(), ids[n_weights..].to_vec());
        GraphBuilder { graph, scope: String::new(), weight_values, state_values }
    }

    /// Continues an existing graph: new nodes read the latest version of each state.
    pub fn resume(graph: Graph) -> GraphBuilder {
        let mut builder = GraphBuilder::new(graph.weights.clone(), graph.states.clone());
        for node in &graph.nodes {
            for (output, input) in node.op.state_updates() {
                if let Some(state) = graph.state_of(node.inputs[input]) {
                    builder.state_values[state.idx()] = node.outputs[output];
                }
            }
        }
        builder.graph = graph;
        builder
    }

    /// Sets the prefix of subsequent labels, such as `blk.3`.
    pub fn scope(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// Sets another prefix and returns the previous one.
    pub(crate) fn replace_scope(&mut self, scope: String) -> String {
        std::mem::replace(&mut self.scope, scope)
    }

    /// Graph built so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Adds a step input.
    pub fn input(&mut self, name: &str, ty: TensorType) -> Result<ValueId, GraphError> {
        if self.graph.input(name).is_some() {
            return Err(GraphError::Duplicate { name: name.into() });
        }
        let id = InputId::from_idx(self.graph.inputs.len());
        self.graph.inputs.push(Input { name: name.into(), ty });
        Ok(self.push_value(ty, ValueOrigin::Input(id)))
    }

    /// Value of a weight.
    pub fn weight(&self, id: WeightId) -> ValueId {
        self.weight_values[id.idx()]
    }

    /// Latest version of a state.
    pub fn state(&self, id: StateId) -> ValueId {
        self.state_values[id.idx()]
    }

    /// Type of a value.
    pub fn ty(&self, value: ValueId) -> TensorType {
        self.graph.value(value).ty
    }

    /// Adds an output: a named value that is read after the step.
    pub fn output(&mut self, name: &str, value: ValueId) -> Result<(), GraphError> {
        if self.graph.output(name).is_some() {
            return Err(GraphError::Duplicate { name: name.into() });
        }
        self.refuse_older_version(value, name)?;
        self.graph.outputs.push(Output { name: name.into(), value });
        Ok(())
    }

    /// Marks a value to be computed as early as possible, after those marked before, because it needs less
    /// memory than its operands.
    pub fn compute_early(&mut self, value: ValueId) {
        self.graph.early.push(value);
    }

    /// Number of outputs so far.
    pub fn n_outputs(&self) -> usize {
        self.graph.outputs.len()
    }

    /// Declares the meaning of the inputs. All must be inputs of this graph, and all outputs must have been
    /// added.
    pub fn declare_step(&mut self, step: StepInputs) {
        self.graph.step = Some(step);
    }

    /// Whether a value is a step input.
    pub fn is_input(&self, value: ValueId) -> bool {
        matches!(self.graph.value(value).origin, ValueOrigin::Input(_))
    }

    /// Returns the input of a value.
    ///
    /// # Panics
    /// If the value is not a step input.
    pub fn input_id(&self, value: ValueId) -> InputId {
        match self.graph.value(value).origin {
            ValueOrigin::Input(id) => id,
            other @ (ValueOrigin::Weight(_) | ValueOrigin::State(_) | ValueOrigin::Node { .. }) => {
                panic!("{other:?} is not a step input")
            }
        }
    }

    /// Returns the finished graph.
    pub fn finish(self) -> Graph {
        self.graph
    }

    /// Adds a node with any number of outputs. The methods below are shorthands for common ops.
    pub fn node(&mut self, op: Op, inputs: &[ValueId], label: &str) -> Result<Vec<ValueId>, GraphError> {
        let label = match self.scope.as_str() {
            "" => label.to_string(),
            scope => format!("{scope}.{label}"),
        };
        let types: Vec<TensorType> = inputs.iter().map(|&v| self.ty(v)).collect();
        let out_types =
            op.infer(&types).map_err(|source| GraphError::Infer { label: label.clone(), source })?;
        for &input in inputs {
            self.refuse_older_version(input, &label)?;
        }
        let mut changed: Vec<(usize, StateId)> = Vec::new();
        for (output, input) in op.state_updates() {
            let state = self.changed_state(inputs[input], &label)?;
            if changed.iter().any(|(_, known)| *known == state) {
                let because = "changed twice by one op";
                return Err(GraphError::State { label, because });
            }
            changed.push((output, state));
        }
        let node = NodeId::from_idx(self.graph.nodes.len());
        let outputs: Vec<ValueId> = out_types
            .into_iter()
            .enumerate()
            .map(|(output, ty)| self.push_value(ty, ValueOrigin::Node { node, output }))
            .collect();
        for (output, state) in changed {
            self.state_values[state.idx()] = outputs[output];
        }
        self.graph.nodes.push(Node { op, inputs: inputs.to_vec(), outputs: outputs.clone(), label });
        Ok(outputs)
    }

    fn changed_state(&self, value: ValueId, label: &str) -> Result<StateId, GraphError> {
        let refuse = |because| GraphError::State { label: label.to_string(), because };
        let state = self.graph.state_of(value).ok_or_else(|| refuse("not a state"))?;
        if self.state_values[state.idx()] != value {
            return Err(refuse("accessed through a view; change the state itself"));
        }
        if self.graph.outputs.iter().any(|o| self.graph.state_version(o.value) == Some((state, value))) {
            return Err(refuse("already an output in this version; add the output after the change"));
        }
        Ok(state)
    }

    fn refuse_older_version(&self, value: ValueId, label: &str) -> Result<(), GraphError> {
        match self.graph.state_version(value) {
            Some((state, version)) if self.state_values[state.idx()] != version => {
                let because = "an outdated version: a later node has changed it";
                Err(GraphError::State { label: label.to_string(), because })
            }
            _ => Ok(()),
        }
    }

    fn push_value(&mut self, ty: TensorType, origin: ValueOrigin) -> ValueId {
        let id = ValueId::from_idx(self.graph.values.len());
        self.graph.values.push(Value { ty, origin });
        id
    }

    fn single(&mut self, op: Op, inputs: &[ValueId], label: &str) -> Result<ValueId, GraphError> {
        Ok(self.node(op, inputs, label)?[0])
    }

    /// Same elements, another shape.
    pub fn reshape(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, GraphError> {
        let shape =
            Shape::new(dims).map_err(|source| GraphError::Shape { label: self.scope.clone(), source })?;
        self.single(Op::View(View::Reshape(shape)), &[x], "reshape")
    }

    /// Permutes the dimensions.
    pub fn permute(&mut self, x: ValueId, order: &[usize]) -> Result<ValueId, GraphError> {
        self.single(Op::View(View::Permute(order.to_vec())), &[x], "permute")
    }

    /// A range of one dimension.
    pub fn slice(
        &mut self,
        x: ValueId,
        axis: usize,
        start: usize,
        len: usize,
    ) -> Result<ValueId, GraphError> {
        self.single(Op::View(View::Slice { axis, start, len }), &[x], "slice")
    }

    /// Contiguous copy.
    pub fn copy(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        self.single(Op::Copy, &[x], "copy")
    }

    /// Converts to another dtype.
    pub fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId, GraphError> {
        self.single(Op::Cast(to), &[x], "cast")
    }

    /// Elementwise function of one argument.
    pub fn unary(&mut self, op: Unary, x: ValueId) -> Result<ValueId, GraphError> {
        self.single(Op::Unary(op), &[x], op.name())
    }

    /// Elementwise function of two arguments.
    pub fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.single(Op::Binary(op), &[a, b], op.name())
    }

    /// `a + b`
    pub fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.binary(Binary::Add, a, b)
    }

    /// `x[.., m, k] * w[n, k]^T`, plus the bias `[n]` if there is one.
    pub fn linear(
        &mut self,
        x: ValueId,
        w: ValueId,
        bias: Option<ValueId>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let wt = self.permute(w, &[1, 0])?;
        let y = self.single(Op::MatMul, &[x, wt], label)?;
        match bias {
            Some(bias) => self.add(y, bias),
            None => Ok(y),
        }
    }

    /// RMS norm over the last dimension.
    pub fn rms_norm(&mut self, x: ValueId, w: ValueId, eps: f32, label: &str) -> Result<ValueId, GraphError> {
        self.single(Op::RmsNorm { eps }, &[x, w], label)
    }

    /// Gathers rows of a table.
    pub fn gather_rows(&mut self, table: ValueId, ids: ValueId, to: DType) -> Result<ValueId, GraphError> {
        self.single(Op::GatherRows(to), &[table, ids], "gather_rows")
    }

    /// Gated activation of a feed-forward.
    pub fn gate(&mut self, kind: Gate, gate: ValueId, up: ValueId) -> Result<ValueId, GraphError> {
        self.single(Op::Gate(kind), &[gate, up], "gate")
    }

    /// Rotary position embedding.
    pub fn rope(
        &mut self,
        rope: Rope,
        x: ValueId,
        positions: ValueId,
        inv_freq: ValueId,
    ) -> Result<ValueId, GraphError> {
        self.single(Op::Rope(rope), &[x, positions, inv_freq], "rope")
    }

    /// Appends rows to a paged cache; returns the cache's new version.
    pub fn kv_append(
        &mut self,
        cache: ValueId,
        x: ValueId,
        [positions, seqs, tables]: [ValueId; 3],
    ) -> Result<ValueId, GraphError> {
        self.single(Op::KvAppend, &[cache, x, positions, seqs, tables], "kv_append")
    }

    /// Appends rows to an 8-bit paged cache; returns the new versions of the cache and of its scales.
    pub fn kv_append_bytes(
        &mut self,
        [cache, scales]: [ValueId; 2],
        x: ValueId,
        [positions, seqs, tables]: [ValueId; 3],
    ) -> Result<[ValueId; 2], GraphError> {
        let inputs = [cache, scales, x, positions, seqs, tables];
        let made = self.node(Op::KvAppendBytes, &inputs, "kv_append")?;
        Ok([made[0], made[1]])
    }

    /// Attention over a paged cache.
    pub fn attention(
        &mut self,
        attention: Attention,
        q: ValueId,
        [k_cache, v_cache]: [ValueId; 2],
        [positions, seqs, tables]: [ValueId; 3],
    ) -> Result<ValueId, GraphError> {
        let caches = PagedCaches { rows: [k_cache, v_cache], scales: None };
        self.attention_over(attention, q, caches, [positions, seqs, tables], None)
    }

    /// Attention over a paged cache of any element type, with `sinks[n_heads]` if there are any.
    pub fn attention_over(
        &mut self,
        attention: Attention,
        q: ValueId,
        caches: PagedCaches,
        [positions, seqs, tables]: [ValueId; 3],
        sinks: Option<ValueId>,
    ) -> Result<ValueId, GraphError> {
        let [k_cache, v_cache] = caches.rows;
        let inputs = [q, k_cache, v_cache, positions, seqs, tables].into_iter();
        let inputs: Vec<ValueId> = inputs.chain(caches.scales.into_iter().flatten()).chain(sinks).collect();
        self.single(Op::Attention(attention), &inputs, "attention")
    }

    /// Calls a host function.
    pub fn host_call(&mut self, call: HostCall, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        let name = call.name;
        self.node(Op::HostCall(call), inputs, name)
    }
}

/// Keys and values that an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct PagedCaches {
    /// Caches of keys and values.
    pub rows: [ValueId; 2],
    /// Scales of 8-bit caches.
    pub scales: Option<[ValueId; 2]>,
}

impl Node {
    /// Returns why a recording cannot contain this node, if it cannot.
    pub fn not_capturable(&self) -> Option<&'static str> {
        match self.op.capture() {
            Capture::Safe => None,
            Capture::Unsafe(because) => Some(because),
        }
    }
}
