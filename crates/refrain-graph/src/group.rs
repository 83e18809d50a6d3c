//! Groups of nodes that a backend may run as one unit, found from the data flow.
//!
//! The pass proposes the largest group around each attention, around the matrix products of each activation
//! with weights and around each sum of experts, and asks the backend. If the backend has no kernel, the pass proposes smaller
//! groups, down to single nodes. Members of a group are adjacent in the plan, and every buffer that one of
//! them touches stays alive while the group runs. So the result does not depend on the order in which a model
//! builds its nodes.

use crate::facts::{GraphFacts, Seen};
use crate::graph::{Graph, NodeId};
use crate::inputs::StepInputs;
use crate::lora::LoraOp;
use crate::moe::MoeOp;
use crate::op::{Binary, Op};
use crate::schedule::Dependencies;
use refrain_tensor::DType;
use std::collections::HashMap;
use std::ops::Range;

/// Why the reader of a matrix product is not in its group.
const ADAPTED: &str = "an adapter adds to it, and no kernel adds the result of a second product";

/// Steps of a plan that a backend runs as one unit. Each step is in exactly one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Kind of the group, with its members by role.
    pub kind: GroupKind,
    /// Steps of the plan, in the order of [`GroupKind::nodes`].
    pub steps: Range<usize>,
}

/// Kind of a group, with its members by role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// One node of any kind.
    One(NodeId),
    /// Matrix products of one activation with several weights.
    Products(Products),
    /// Attention with the norms, ropes and appends before it.
    Attend(Attend),
    /// Rope of queries, and attention over the caches as they are.
    AttendStored(AttendStored),
    /// Rope of queries and keys, and appends of keys and values to the caches.
    RopeAppend(RopeAppend),
    /// Both products of experts, with the router before them.
    Experts(ExpertChain),
}

/// Matrix products of one activation with weights, with the node before them and the nodes after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Products {
    /// Node that computes the activation, if it is a member.
    pub producer: Option<Producer>,
    /// At least one product, in the order in which later nodes read them. With a gate, the product that its
    /// function applies to comes first.
    pub parts: Vec<ProductPart>,
    /// Gate that is the only reader of two products.
    pub gate: Option<NodeId>,
}

/// One product of [`Products`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductPart {
    /// `MatMul` with a weight.
    pub product: NodeId,
    /// Sum with a vector of weights that is the only reader of the product.
    pub bias: Option<NodeId>,
}

/// Node that computes the activation of [`Products`]. It may have other readers: see
/// [`GroupQuery::is_internal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Producer {
    /// `RmsNorm`.
    Norm(NodeId),
    /// `AddRmsNorm`; the activation is its second output.
    AddNorm {
        /// `RmsNorm` that computes the second summand and has no other reader.
        inner: Option<NodeId>,
        /// The `AddRmsNorm`.
        add: NodeId,
    },
    /// `Gate`.
    Gate(NodeId),
    /// `Attention`.
    Attention(NodeId),
}

/// All nodes between the projections of queries, keys and values and the output projection. Nothing outside
/// reads the results of norms and ropes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attend {
    /// `RmsNorm` of queries and of keys.
    pub norms: Option<[NodeId; 2]>,
    /// `RmsNorm` of values, if queries and keys have norms too.
    pub value_norm: Option<NodeId>,
    /// `Rope` of queries and of keys.
    pub ropes: [NodeId; 2],
    /// `KvAppend` of keys and of values.
    pub appends: [NodeId; 2],
    /// `Attention` over both.
    pub attention: NodeId,
}

/// Attention over caches that other nodes fill, such as those of an earlier layer. Nothing outside reads the
/// results of norm and rope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendStored {
    /// `RmsNorm` of queries.
    pub norm: Option<NodeId>,
    /// `Rope` of queries.
    pub rope: NodeId,
    /// `Attention`.
    pub attention: NodeId,
}

/// Rope and appends at the same positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeAppend {
    /// `Rope` of queries and of keys.
    pub ropes: [NodeId; 2],
    /// `KvAppend` of those keys and of values.
    pub appends: [NodeId; 2],
}

/// The products of the chosen experts. Nothing outside reads the result of the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertChain {
    /// `MoeOp::Route`, if it is a member. Others may read its results.
    pub route: Option<NodeId>,
    /// `MoeOp::Gated`.
    pub gated: NodeId,
    /// `MoeOp::Summed`.
    pub summed: NodeId,
}

impl Producer {
    /// Node whose output is the activation.
    pub fn node(&self) -> NodeId {
        match *self {
            Producer::Norm(node)
            | Producer::AddNorm { add: node, .. }
            | Producer::Gate(node)
            | Producer::Attention(node) => node,
        }
    }
}

impl GroupKind {
    /// Members in a valid execution order.
    pub fn nodes(&self) -> Vec<NodeId> {
        match self {
            GroupKind::One(node) => vec![*node],
            GroupKind::Products(Products { producer, parts, gate }) => {
                let inner = match producer {
                    Some(Producer::AddNorm { inner, .. }) => *inner,
                    Some(Producer::Norm(_) | Producer::Gate(_) | Producer::Attention(_)) | None => None,
                };
                let rows = inner.into_iter().chain(producer.map(|producer| producer.node()));
                let parts = parts.iter().flat_map(|part| [Some(part.product), part.bias]).flatten();
                rows.chain(parts).chain(*gate).collect()
            }
            GroupKind::Attend(Attend { norms, value_norm, ropes, appends, attention }) => {
                let norms = norms.iter().flatten().chain(value_norm).copied();
                norms.chain(*ropes).chain(*appends).chain([*attention]).collect()
            }
            GroupKind::AttendStored(AttendStored { norm, rope, attention }) => {
                norm.iter().chain([rope, attention]).copied().collect()
            }
            GroupKind::RopeAppend(RopeAppend { ropes, appends }) => {
                ropes.iter().chain(appends).copied().collect()
            }
            GroupKind::Experts(ExpertChain { route, gated, summed }) => {
                route.iter().chain([gated, summed]).copied().collect()
            }
        }
    }

    /// Numbers of members that run concurrently, stage by stage, if the producer of the rows finishes before
    /// the products start.
    pub fn stages(&self) -> Vec<usize> {
        let n = self.nodes().len();
        match self {
            GroupKind::Products(Products {
                producer: Some(Producer::AddNorm { inner: Some(_), .. }),
                ..
            }) => {
                vec![1, 1, n - 2]
            }
            GroupKind::Products(Products { producer: Some(_), .. }) => vec![1, n - 1],
            GroupKind::One(_)
            | GroupKind::Products(_)
            | GroupKind::Attend(_)
            | GroupKind::AttendStored(_)
            | GroupKind::RopeAppend(_) => vec![n],
            GroupKind::Experts(_) => vec![1; n],
        }
    }

    /// Member that names the group in reports.
    pub fn head(&self) -> NodeId {
        match self {
            GroupKind::One(node) => *node,
            GroupKind::Products(products) => products.parts[0].product,
            GroupKind::Attend(attend) => attend.attention,
            GroupKind::AttendStored(attend) => attend.attention,
            GroupKind::RopeAppend(group) => group.ropes[0],
            GroupKind::Experts(chain) => chain.gated,
        }
    }
}

/// Backend's answer for a group of several nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// Runs as one launch whose blocks do not wait for each other. All buffers of the group stay allocated
    /// while it runs, and no member overwrites what it reads.
    Joined,
    /// Runs in [`GroupKind::stages`]. Stages do not overlap, and a member may overwrite an input that only it
    /// reads, as it would on its own.
    Staged,
    /// Smaller groups are as good: they are proposed next, and no reason is kept.
    Smaller,
    /// No kernel for this group, for this reason. Smaller groups are proposed next; the plan keeps the
    /// reason.
    No(String),
}

/// A proposed group, as passed to [`crate::Backend::fuses`].
#[derive(Clone, Copy)]
pub struct GroupQuery<'a> {
    /// Kind of the group.
    pub kind: &'a GroupKind,
    facts: &'a GraphFacts<'a>,
}

impl<'a> GroupQuery<'a> {
    /// Meaning of the graph's inputs, if it is a model's step.
    pub fn step(&self) -> Option<&'a StepInputs> {
        self.facts.graph.step()
    }

    /// Op of a node.
    pub fn op(&self, node: NodeId) -> &'a Op {
        &self.facts.graph.node(node).op
    }

    /// Number of inputs of a node.
    pub fn n_inputs(&self, node: NodeId) -> usize {
        self.facts.graph.node(node).inputs.len()
    }

    /// Input of a node, with views resolved.
    pub fn input(&self, node: NodeId, i: usize) -> Seen {
        self.facts.input(node, i)
    }

    /// Output of a node, with views resolved.
    pub fn output(&self, node: NodeId, i: usize) -> Seen {
        self.facts.output(node, i)
    }

    /// Whether only members of the group read this output.
    pub fn is_internal(&self, node: NodeId, output: usize) -> bool {
        let nodes = self.kind.nodes();
        !self.facts.is_output(node, output)
            && self.facts.readers(node, output).iter().all(|r| nodes.contains(r))
    }
}

/// A proposed group that the backend refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Member that names the group.
    pub node: NodeId,
    /// The backend's reason.
    pub because: String,
}

/// A group, and whether the backend runs it in stages.
pub(crate) struct CheckedGroup {
    pub(crate) kind: GroupKind,
    pub(crate) is_staged: bool,
}

/// Groups of all nodes except views, and the refusals of larger groups.
pub(crate) struct Grouping {
    pub(crate) groups: Vec<CheckedGroup>,
    pub(crate) refusals: Vec<Refusal>,
}

pub(crate) fn find(
    facts: &GraphFacts<'_>,
    dependencies: &Dependencies,
    fuses: &dyn Fn(&GroupQuery<'_>) -> Fusion,
) -> Grouping {
    let graph = facts.graph;
    let n = graph.nodes().len();
    let mut pass = Pass {
        facts,
        fuses,
        levels: dependencies.levels(graph),
        after: dependencies.after(),
        group_of: vec![None; n],
        found: Grouping { groups: Vec::new(), refusals: Vec::new() },
    };
    let order: Vec<NodeId> = dependencies.canonical().into_iter().map(NodeId::from_idx).collect();
    for &node in &order {
        pass.attention(node);
    }
    for products in products(facts, &order) {
        pass.products(&products);
    }
    for &node in &order {
        pass.propose(ExpertChain::of(facts, node).into_iter().map(GroupKind::Experts));
    }
    for &node in &order {
        if pass.is_free(node) {
            pass.take(GroupKind::One(node), true);
        }
    }
    pass.found
}

struct Pass<'a> {
    facts: &'a GraphFacts<'a>,
    fuses: &'a dyn Fn(&GroupQuery<'_>) -> Fusion,
    levels: Vec<usize>,
    after: Vec<Vec<usize>>,
    // Per node, the index of its group.
    group_of: Vec<Option<usize>>,
    found: Grouping,
}

impl Pass<'_> {
    fn graph(&self) -> &Graph {
        self.facts.graph
    }

    fn is_free(&self, node: NodeId) -> bool {
        self.group_of[node.idx()].is_none()
    }

    fn take(&mut self, kind: GroupKind, is_staged: bool) {
        let group = self.found.groups.len();
        kind.nodes().iter().for_each(|node| self.group_of[node.idx()] = Some(group));
        self.found.groups.push(CheckedGroup { kind, is_staged });
    }

    /// Takes the first (largest) of these groups that is valid and that the backend accepts.
    fn propose(&mut self, kinds: impl IntoIterator<Item = GroupKind>) -> bool {
        let mut refused = None;
        let mut taken = None;
        for kind in kinds {
            if !self.can_be_one(&kind) {
                continue;
            }
            match (self.fuses)(&GroupQuery { kind: &kind, facts: self.facts }) {
                Fusion::Joined => {
                    taken = Some((kind, false));
                    break;
                }
                Fusion::Staged => {
                    taken = Some((kind, true));
                    break;
                }
                Fusion::Smaller => {}
                Fusion::No(because) => {
                    refused.get_or_insert(Refusal { node: kind.head(), because });
                }
            }
        }
        self.found.refusals.extend(refused);
        let is_taken = taken.is_some();
        if let Some((kind, is_staged)) = taken {
            self.take(kind, is_staged);
        }
        is_taken
    }

    /// Whether the nodes are free, lie between the same host steps, and no path between two of them leaves
    /// the group.
    fn can_be_one(&self, kind: &GroupKind) -> bool {
        let nodes = kind.nodes();
        let level = self.levels[nodes[0].idx()];
        if !nodes.iter().all(|&node| self.is_free(node) && self.levels[node.idx()] == level) {
            return false;
        }
        let mut is_member = vec![false; self.graph().nodes().len()];
        nodes.iter().for_each(|node| is_member[node.idx()] = true);
        let mut seen = is_member.clone();
        let behind = |idx: usize| self.after[idx].iter().copied();
        let mut stack: Vec<usize> =
            nodes.iter().flat_map(|node| behind(node.idx())).filter(|&idx| !is_member[idx]).collect();
        while let Some(idx) = stack.pop() {
            if std::mem::replace(&mut seen[idx], true) {
                continue;
            }
            // A node that depends on one member of a group depends on all of it.
            let together = match self.group_of[idx] {
                Some(group) => self.found.groups[group].kind.nodes(),
                None => vec![NodeId::from_idx(idx)],
            };
            for next in together.iter().flat_map(|node| behind(node.idx())) {
                if is_member[next] {
                    return false;
                }
                stack.push(next);
            }
        }
        true
    }

    fn attention(&mut self, node: NodeId) {
        if let Some(chain) = Chain::of(self.facts, node) {
            let attend = chain.attend(self.facts).into_iter().map(GroupKind::Attend);
            if self.propose(attend) {
                return;
            }
            let RopeAppend { ropes, appends } = chain.rope_append;
            self.propose([GroupKind::RopeAppend(RopeAppend { ropes, appends })]);
        }
        let stored = AttendStored::of(self.facts, node);
        self.propose(stored.into_iter().map(GroupKind::AttendStored));
    }

    fn products(&mut self, products: &[NodeId]) {
        let bare = |&product: &NodeId| ProductPart { product, bias: None };
        let with_bias = |&product: &NodeId| ProductPart { product, bias: self.bias(product) };
        let plain: Vec<ProductPart> = products.iter().map(bare).collect();
        let biased: Vec<ProductPart> = products.iter().map(with_bias).collect();
        let producers = self.producers(products);
        let mut kinds = Vec::new();
        if let Some((gate, parts)) = self.gate(&biased) {
            let gated = |producer| Products { producer, parts: parts.clone(), gate: Some(gate) };
            kinds.extend(producers.iter().copied().map(gated));
        }
        let variants = if biased == plain { vec![&plain] } else { vec![&biased, &plain] };
        for parts in variants {
            let only = |producer| Products { producer, parts: parts.clone(), gate: None };
            kinds.extend(producers.iter().copied().map(only));
        }
        let several = |products: &Products| {
            products.parts.len() > 1
                || products.producer.is_some()
                || products.gate.is_some()
                || products.parts[0].bias.is_some()
        };
        let kinds = kinds.into_iter().filter(several).map(GroupKind::Products);
        let adapted = products.iter().filter(|&&product| self.is_adapted(product));
        let refusal = |&node: &NodeId| Refusal { node, because: ADAPTED.to_owned() };
        let refusals: Vec<Refusal> = adapted.map(refusal).collect();
        self.found.refusals.extend(refusals);
        if !self.propose(kinds) {
            for part in plain {
                self.take(
                    GroupKind::Products(Products { producer: None, parts: vec![part], gate: None }),
                    true,
                );
            }
        }
    }

    /// Possible producers of the activation, largest group first, ending with none.
    fn producers(&self, products: &[NodeId]) -> Vec<Option<Producer>> {
        let x = self.facts.input(products[0], 0);
        let Some((node, output)) = self.facts.producer(&x) else { return vec![None] };
        match &self.graph().node(node).op {
            Op::RmsNorm { .. } => vec![Some(Producer::Norm(node)), None],
            Op::AddRmsNorm { .. } if output == 1 => {
                let producer = |inner| Some(Producer::AddNorm { inner, add: node });
                let inner = self.facts.producer_of_same(&self.facts.input(node, 1)).map(|made| made.0);
                let inner = inner.filter(|&inner| {
                    let is_norm = matches!(self.graph().node(inner).op, Op::RmsNorm { .. });
                    is_norm && self.facts.is_only_reader(node, inner, 0)
                });
                inner.map(|inner| producer(Some(inner))).into_iter().chain([producer(None), None]).collect()
            }
            Op::Gate(_) => vec![Some(Producer::Gate(node)), None],
            Op::Attention(_) => vec![Some(Producer::Attention(node)), None],
            Op::View(_)
            | Op::Copy
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
            | Op::SpanAttention(_)
            | Op::Moe(_)
            | Op::Lora(_)
            | Op::Train(_)
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::AddRmsNorm { .. }
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Recurrent(_)
            | Op::HostCall(_) => vec![None],
        }
    }

    /// Node that adds a vector of weights to a product, if it is the only reader.
    fn bias(&self, product: NodeId) -> Option<NodeId> {
        let &[reader] = self.facts.readers(product, 0) else { return None };
        let made = self.facts.output(product, 0);
        let adds = matches!(self.graph().node(reader).op, Op::Binary(Binary::Add))
            && self.facts.is_only_reader(reader, product, 0)
            && self.facts.input(reader, 0) == made;
        if !adds {
            return None;
        }
        let (bias, n) = (self.facts.input(reader, 1), made.layout.shape().dim_back(0));
        let fits = bias.is_weight()
            && bias.layout.shape().dims() == [n]
            && self.facts.output(reader, 0).layout == made.layout;
        fits.then_some(reader)
    }

    /// Whether the product of a second weight, or those of the rows' adapters, are added to that of the first: an adapter on
    /// a linear layer. No group covers this.
    fn is_adapted(&self, product: NodeId) -> bool {
        let &[reader] = self.facts.readers(product, 0) else { return false };
        if matches!(self.graph().node(reader).op, Op::Lora(LoraOp::Up)) {
            return true;
        }
        let is_sum = matches!(self.graph().node(reader).op, Op::Binary(Binary::Add));
        let is_product = |seen: Seen| {
            let made = self.facts.producer_of_same(&seen).map(|made| made.0);
            made.filter(|&node| {
                matches!(self.graph().node(node).op, Op::MatMul) && self.facts.input(node, 1).is_weight()
            })
        };
        is_sum
            && is_product(self.facts.input(reader, 0)) == Some(product)
            && is_product(self.facts.input(reader, 1)).is_some()
    }

    /// Gate that is the only reader of two products. The product that its function applies to comes first.
    fn gate(&self, parts: &[ProductPart]) -> Option<(NodeId, Vec<ProductPart>)> {
        let &[a, b] = parts else { return None };
        let result = |part: ProductPart| part.bias.unwrap_or(part.product);
        let &[reader] = self.facts.readers(result(a), 0) else { return None };
        if !matches!(self.graph().node(reader).op, Op::Gate(_)) {
            return None;
        }
        let sides = [self.facts.input(reader, 0), self.facts.input(reader, 1)];
        let is_all = [a, b].iter().all(|&part| self.facts.is_only_reader(reader, result(part), 0));
        let made = |part: ProductPart| self.facts.output(result(part), 0);
        match is_all {
            true if [made(a), made(b)] == sides => Some((reader, vec![a, b])),
            true if [made(b), made(a)] == sides => Some((reader, vec![b, a])),
            _ => None,
        }
    }
}

/// Matrix products with weights, grouped by activation, in canonical order.
fn products(facts: &GraphFacts<'_>, order: &[NodeId]) -> Vec<Vec<NodeId>> {
    let mut sets: Vec<Vec<NodeId>> = Vec::new();
    let mut by_source: HashMap<_, Vec<usize>> = HashMap::new();
    for &node in order {
        let is_product = matches!(facts.graph.node(node).op, Op::MatMul);
        if !is_product || !facts.input(node, 1).is_weight() || is_empty(&facts.output(node, 0)) {
            continue;
        }
        let x = facts.input(node, 0);
        let known = by_source.entry(x.source).or_default();
        match known.iter().find(|&&set| facts.input(sets[set][0], 0) == x) {
            Some(&set) => sets[set].push(node),
            None => {
                known.push(sets.len());
                sets.push(vec![node]);
            }
        }
    }
    sets
}

fn is_empty(seen: &Seen) -> bool {
    seen.layout.shape().n_elements() == 0
}

/// An attention, the ropes of its queries and keys, and the appends to its caches, all with the same
/// positions and sequences.
struct Chain {
    rope_append: RopeAppend,
    attention: NodeId,
}

impl Chain {
    fn of(facts: &GraphFacts<'_>, attention: NodeId) -> Option<Chain> {
        let op = |node: NodeId| &facts.graph.node(node).op;
        if !matches!(op(attention), Op::Attention(_)) || is_empty(&facts.output(attention, 0)) {
            return None;
        }
        let made_by = |seen: Seen| facts.producer_of_same(&seen).map(|made| made.0);
        let append = |seen: Seen| made_by(seen).filter(|&node| matches!(op(node), Op::KvAppend));
        let rope = |seen: Seen| {
            let node = made_by(seen)?;
            if let Op::Rope(rope) = op(node) { Some((node, *rope)) } else { None }
        };
        let (q, turned) = rope(facts.input(attention, 0))?;
        let (keys, values) = (append(facts.input(attention, 1))?, append(facts.input(attention, 2))?);
        let (k, also_turned) = rope(facts.input(keys, 1))?;
        let places = facts.inputs_from(keys, 2);
        let state = |node: NodeId| facts.graph.state_of(facts.graph.node(node).inputs[0]);
        // Members run concurrently, so none may read another except along the chain.
        let made_outside = |seen: Seen| facts.producer(&seen).is_none_or(|(node, _)| node != q && node != k);
        let rows = [facts.input(q, 0), facts.input(k, 0), facts.input(values, 1)];
        let same = q != k
            && rows.into_iter().all(made_outside)
            && turned == also_turned
            && facts.inputs_from(q, 1) == facts.inputs_from(k, 1)
            && facts.input(q, 1) == places[0]
            && facts.inputs_from(values, 2) == places
            && facts.inputs_from(attention, 3)[..3] == places
            && facts.output(k, 0).layout.shape() == facts.input(values, 1).layout.shape()
            && facts.output(keys, 0).layout == facts.output(values, 0).layout
            && facts.output(keys, 0).dtype == facts.output(values, 0).dtype
            && state(keys) != state(values);
        let rope_append = RopeAppend { ropes: [q, k], appends: [keys, values] };
        same.then_some(Chain { rope_append, attention })
    }

    /// The chain as one group, with and without the norms before it; empty if other nodes read intermediate
    /// results.
    fn attend(&self, facts: &GraphFacts<'_>) -> Vec<Attend> {
        let RopeAppend { ropes: [q, k], appends } = self.rope_append;
        let is_alone = facts.is_only_reader(self.attention, q, 0) && facts.is_only_reader(appends[0], k, 0);
        if !is_alone {
            return Vec::new();
        }
        let norm = |rope: NodeId| {
            let node = facts.producer_of_same(&facts.input(rope, 0))?.0;
            let is_norm = matches!(facts.graph.node(node).op, Op::RmsNorm { .. });
            (is_norm && facts.is_only_reader(rope, node, 0)).then_some(node)
        };
        let value_norm = facts.producer_of_same(&facts.input(appends[1], 1)).map(|made| made.0);
        let value_norm = value_norm.filter(|&node| {
            matches!(facts.graph.node(node).op, Op::RmsNorm { .. })
                && facts.is_only_reader(appends[1], node, 0)
        });
        let attend = |norms, value_norm| {
            let (ropes, attention) = ([q, k], self.attention);
            Attend { norms, value_norm, ropes, appends, attention }
        };
        let norms = norm(q).zip(norm(k)).map(|(q, k)| [q, k]);
        let all = norms.zip(value_norm).map(|(norms, value)| attend(Some(norms), Some(value)));
        let without_values = norms.map(|norms| attend(Some(norms), None));
        all.into_iter().chain(without_values).chain([attend(None, None)]).collect()
    }
}

impl ExpertChain {
    /// Groups that end with `summed`, with and without the router.
    fn of(facts: &GraphFacts<'_>, summed: NodeId) -> Vec<ExpertChain> {
        let op = |node: NodeId| &facts.graph.node(node).op;
        if !matches!(op(summed), Op::Moe(MoeOp::Summed { .. })) || is_empty(&facts.output(summed, 0)) {
            return Vec::new();
        }
        let gated = facts.producer_of_same(&facts.input(summed, 0)).map(|made| made.0).filter(|&gated| {
            matches!(op(gated), Op::Moe(MoeOp::Gated(_)))
                && facts.is_only_reader(summed, gated, 0)
                && facts.input(gated, 1) == facts.input(summed, 1)
        });
        let Some(gated) = gated else { return Vec::new() };
        let made = |i: usize| facts.producer_of_same(&facts.input(summed, i));
        let route = made(1).filter(|&(route, output)| {
            matches!(op(route), Op::Moe(MoeOp::Route(_))) && output == 0 && made(2) == Some((route, 1))
        });
        let with = |route| ExpertChain { route, gated, summed };
        route.map(|(route, _)| with(Some(route))).into_iter().chain([with(None)]).collect()
    }
}

impl AttendStored {
    /// Groups around an attention, with and without the norm of its queries.
    fn of(facts: &GraphFacts<'_>, attention: NodeId) -> Vec<AttendStored> {
        let op = |node: NodeId| &facts.graph.node(node).op;
        if !matches!(op(attention), Op::Attention(_)) || is_empty(&facts.output(attention, 0)) {
            return Vec::new();
        }
        // No group reads an 8-bit cache.
        if facts.input(attention, 1).dtype == DType::U8 {
            return Vec::new();
        }
        let made_by = |seen: Seen| facts.producer_of_same(&seen).map(|made| made.0);
        let rope = made_by(facts.input(attention, 0)).filter(|&rope| {
            matches!(op(rope), Op::Rope(_))
                && facts.is_only_reader(attention, rope, 0)
                && facts.input(rope, 1) == facts.input(attention, 3)
        });
        let Some(rope) = rope else { return Vec::new() };
        let norm = made_by(facts.input(rope, 0))
            .filter(|&norm| matches!(op(norm), Op::RmsNorm { .. }) && facts.is_only_reader(rope, norm, 0));
        let with = |norm| AttendStored { norm, rope, attention };
        norm.map(|norm| with(Some(norm))).into_iter().chain([with(None)]).collect()
    }
}
