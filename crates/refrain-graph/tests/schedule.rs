//! Step order, segments and states.

use proptest::prelude::*;
use refrain_graph::{
    Crossing, Fusion, Graph, GraphBuilder, GraphError, GroupQuery, HostBuf, HostCall, HostCallError, HostFn,
    NodeId, Op, Plan, PlanOptions, SegmentKind, State, StateId, TensorType, Unary, ValueId, ValueOrigin,
};
use refrain_tensor::DType;
use refrain_testkit::{NodeSeed, random_graph};
use std::sync::Arc;

/// The node that computes a value, with views resolved.
fn maker(graph: &Graph, value: ValueId) -> Option<NodeId> {
    match graph.value(value).origin {
        ValueOrigin::Node { node, .. } => match &graph.node(node).op {
            Op::View(_) => maker(graph, graph.node(node).inputs[0]),
            _ => Some(node),
        },
        ValueOrigin::Input(_) | ValueOrigin::Weight(_) | ValueOrigin::State(_) => None,
    }
}

/// Pairs (before, after) that every order must respect, derived from the graph alone.
fn edges(graph: &Graph) -> Vec<(NodeId, NodeId)> {
    let mut edges = Vec::new();
    let mut last_host = None;
    let steps: Vec<NodeId> = (0..graph.nodes().len())
        .map(NodeId::from_idx)
        .filter(|&n| !matches!(graph.node(n).op, Op::View(_)))
        .collect();
    for &id in &steps {
        let node = graph.node(id);
        edges.extend(node.inputs.iter().filter_map(|&v| Some((maker(graph, v)?, id))));
        if matches!(node.op, Op::HostCall(_)) {
            edges.extend(last_host.replace(id).map(|before| (before, id)));
        }
        if matches!(node.op, Op::KvAppend) {
            let state = graph.state_of(node.inputs[0]);
            let reads = |n: &NodeId| graph.node(*n).inputs.iter().any(|&v| graph.state_of(v) == state);
            edges.extend(steps.iter().filter(|&&n| n < id).filter(|n| reads(n)).map(|&n| (n, id)));
        }
    }
    edges
}

/// Minimum number of recordable segments of any order: device groups that host nodes separate on some path.
fn fewest_recordable(graph: &Graph) -> usize {
    let mut level = vec![0usize; graph.nodes().len()];
    let edges = edges(graph);
    let is_host = |n: NodeId| graph.node(n).not_capturable().is_some();
    let mut most = 0;
    for idx in 0..graph.nodes().len() {
        let id = NodeId::from_idx(idx);
        if matches!(graph.node(id).op, Op::View(_)) {
            continue;
        }
        let before = edges.iter().filter(|e| e.1 == id).map(|e| e.0);
        level[idx] = if is_host(id) {
            before.map(|b| level[b.idx()]).max().unwrap_or(0)
        } else {
            before.map(|b| level[b.idx()] + usize::from(is_host(b))).max().unwrap_or(0).max(1)
        };
        if !is_host(id) {
            most = most.max(level[idx]);
        }
    }
    most
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_order_respects_the_graph_and_is_cut_as_seldom_as_possible(
        choices in prop::collection::vec(any::<NodeSeed>(), 0..60),
        fused in any::<bool>(),
    ) {
        let graph = &random_graph(&choices, true).graph;
        let fuses = |_: &GroupQuery<'_>| if fused { Fusion::Staged } else { Fusion::Smaller };
        let plan = Plan::fused(graph, PlanOptions::default(), &fuses).unwrap();
        let mut step_of = vec![None; graph.nodes().len()];
        for (s, step) in plan.steps().iter().enumerate() {
            prop_assert_eq!(step_of[step.node.idx()].replace(s), None, "{} runs twice", step.label);
        }
        for (idx, node) in graph.nodes().iter().enumerate() {
            prop_assert_eq!(step_of[idx].is_none(), matches!(node.op, Op::View(_)), "{}", node.label);
        }
        for (before, after) in edges(graph) {
            prop_assert!(step_of[before.idx()] < step_of[after.idx()], "{:?} runs after {:?}", before, after);
        }
        let mut at = 0;
        for (i, segment) in plan.segments().iter().enumerate() {
            prop_assert_eq!(segment.steps.start, at);
            at = segment.steps.end;
            let host = |s: usize| graph.node(plan.steps()[s].node).not_capturable();
            match segment.kind {
                SegmentKind::Host(because) => {
                    prop_assert_eq!(segment.steps.len(), 1);
                    prop_assert_eq!(host(segment.steps.start), Some(because));
                }
                SegmentKind::Recordable => {
                    prop_assert!(segment.steps.clone().all(|s| host(s).is_none()) && !segment.steps.is_empty());
                    let next = plan.segments().get(i + 1).map(|s| s.kind);
                    prop_assert!(next != Some(SegmentKind::Recordable), "segment {} could be longer", i);
                }
            }
        }
        prop_assert_eq!(at, plan.steps().len());
        let n = plan.segments().iter().filter(|s| s.kind == SegmentKind::Recordable).count();
        prop_assert_eq!(n, fewest_recordable(graph));
    }
}

struct Pass;

impl HostFn for Pass {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(inputs.to_vec())
    }
    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        outputs.iter_mut().zip(inputs).for_each(|(to, from)| to.copy_from_slice(from.bytes));
        Ok(())
    }
}

fn on_host(b: &mut GraphBuilder, x: ValueId) -> ValueId {
    let call = HostCall { name: "pass", because: "the host must see it", function: Arc::new(Pass) };
    b.host_call(call, &[x]).unwrap()[0]
}

const N_LAYERS: usize = 5;

/// `H` or `R` for each segment of a plan with layers; `host` decides before which layers the host is called.
fn segments(host: impl Fn(usize) -> bool) -> String {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let mut x = b.input("x", TensorType::new(DType::F32, [8])).unwrap();
    for layer in 0..=N_LAYERS {
        if host(layer) {
            x = on_host(&mut b, x);
        }
        if layer < N_LAYERS {
            let y = b.unary(Unary::Tanh, x).unwrap();
            x = b.add(x, y).unwrap();
        }
    }
    b.output("x", x).unwrap();
    letters(&Plan::new(&b.finish(), PlanOptions::default()).unwrap())
}

fn letters(plan: &Plan) -> String {
    let letter = |kind| match kind {
        SegmentKind::Recordable => 'R',
        SegmentKind::Host(_) => 'H',
    };
    plan.segments().iter().map(|s| letter(s.kind)).collect()
}

#[test]
fn a_plan_is_cut_only_where_the_host_is_needed() {
    assert_eq!(segments(|_| false), "R");
    assert_eq!(segments(|layer| layer == 0), "HR");
    assert_eq!(segments(|layer| layer == 2), "RHR");
    assert_eq!(segments(|layer| layer == N_LAYERS), "RH");
    assert_eq!(segments(|layer| layer > 0 && layer < N_LAYERS), "RHRHRHRHR");
    assert_eq!(segments(|_| true), "HRHRHRHRHRH");
}

#[test]
fn host_calls_that_need_only_step_inputs_run_before_everything() {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let mut x = b.input("x", TensorType::new(DType::F32, [4, 2])).unwrap();
    let extra = b.input("extra", TensorType::new(DType::F32, [2, 4])).unwrap();
    for _ in 0..N_LAYERS {
        x = b.unary(Unary::Tanh, x).unwrap();
        // Each layer looks something up through a view, like a table on the host.
        let seen = b.permute(extra, &[1, 0]).unwrap();
        let looked_up = on_host(&mut b, seen);
        x = b.add(x, looked_up).unwrap();
    }
    b.output("x", x).unwrap();
    let plan = Plan::new(&b.finish(), PlanOptions::default()).unwrap();
    assert_eq!(letters(&plan), "HHHHHR");
    assert_eq!(plan.boundaries().len(), N_LAYERS);
}

#[test]
fn an_empty_graph_has_an_empty_plan() {
    let plan = Plan::new(&GraphBuilder::new(vec![], vec![]).finish(), PlanOptions::default()).unwrap();
    assert_eq!((plan.steps().len(), plan.segments().len(), plan.arena_bytes()), (0, 0, 0));
}

struct Cache {
    b: GraphBuilder,
    x: ValueId,
    control: [ValueId; 3],
}

fn with_cache() -> Cache {
    let ty = TensorType::new(DType::F32, [4, 1, 2, 4]);
    let mut b = GraphBuilder::new(vec![], vec![State::paged("k", ty)]);
    let x = b.input("x", TensorType::new(DType::F32, [1, 1, 4])).unwrap();
    let ints = |b: &mut GraphBuilder, name: &str, ty| b.input(name, ty).unwrap();
    let row = TensorType::new(DType::I32, [1]);
    let control = [
        ints(&mut b, "positions", row),
        ints(&mut b, "seqs", row),
        ints(&mut b, "tables", TensorType::new(DType::I32, [1, 4])),
    ];
    Cache { b, x, control }
}

fn refused(error: GraphError) -> String {
    assert!(matches!(error, GraphError::State { .. }), "{error}");
    error.to_string()
}

#[test]
fn an_outdated_version_of_a_state_cannot_be_used() {
    let Cache { mut b, x, control } = with_cache();
    let old = b.state(StateId::from_idx(0));
    let seen = b.slice(old, 0, 1, 1).unwrap();
    let new = b.kv_append(old, x, control).unwrap();
    let text = |label| format!("{label}: its state is an outdated version: a later node has changed it");
    assert_eq!(refused(b.kv_append(old, x, control).unwrap_err()), text("kv_append"));
    assert_eq!(refused(b.copy(old).unwrap_err()), text("copy"));
    assert_eq!(refused(b.unary(Unary::Neg, seen).unwrap_err()), text("neg"));
    assert_eq!(refused(b.output("k", old).unwrap_err()), text("k"));
    assert_eq!(refused(b.output("k", seen).unwrap_err()), text("k"));
    b.copy(new).unwrap();
    b.output("k", new).unwrap();
}

#[test]
fn a_state_that_is_an_output_cannot_be_changed() {
    let Cache { mut b, x, control } = with_cache();
    let state = b.state(StateId::from_idx(0));
    b.output("k", state).unwrap();
    let text = "kv_append: its state is already an output in this version; add the output after the change";
    assert_eq!(refused(b.kv_append(state, x, control).unwrap_err()), text);
}

#[test]
fn only_a_state_itself_can_be_changed() {
    let Cache { mut b, x, control } = with_cache();
    let state = b.state(StateId::from_idx(0));
    let copy = b.copy(state).unwrap();
    let text = "kv_append: its state is not a state";
    assert_eq!(refused(b.kv_append(copy, x, control).unwrap_err()), text);
    let view = b.reshape(state, &[4, 1, 2, 4]).unwrap();
    let text = "kv_append: its state is accessed through a view; change the state itself";
    assert_eq!(refused(b.kv_append(view, x, control).unwrap_err()), text);
}

#[test]
fn names_of_inputs_and_outputs_are_unique() {
    let Cache { mut b, x, .. } = with_cache();
    let ty = TensorType::new(DType::F32, [1]);
    assert_eq!(b.input("x", ty).unwrap_err().to_string(), "two values are named \"x\"");
    b.output("y", x).unwrap();
    assert_eq!(b.output("y", x).unwrap_err(), GraphError::Duplicate { name: "y".into() });
}

#[test]
fn a_host_step_costs_its_copies_from_and_to_the_device() {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let x = b.input("x", TensorType::new(DType::F32, [8])).unwrap();
    // The first call reads a step input, which is already on the host. The second reads a value that the device
    // computed.
    let first = on_host(&mut b, x);
    let made = b.unary(Unary::Exp, first).unwrap();
    let second = on_host(&mut b, made);
    let last = b.unary(Unary::Exp, second).unwrap();
    b.output("y", last).unwrap();
    let plan = Plan::new(&b.finish(), PlanOptions::default()).unwrap();
    let crossings: Vec<_> = plan.segments().iter().map(|s| plan.crossing(s)).collect();
    let crossing = |to_host_bytes, n_copies| Crossing { to_host_bytes, to_device_bytes: 32, n_copies };
    assert_eq!(crossings, [crossing(0, 1), Crossing::default(), crossing(32, 2), Crossing::default()]);
}
