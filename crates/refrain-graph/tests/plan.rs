//! The memory plan: live data is never overwritten, and live buffers share no byte.

mod machine;

use machine::Machine;
use proptest::prelude::*;
use refrain_graph::{
    Attention, Binary, BufferId, CompileError, Fusion, Graph, GraphBuilder, NodeId, Op, Place, Plan,
    PlanError, PlanOptions, Repeat, Segment, SegmentKind, State, StateId, TensorType, Unary, ValueId, View,
    Weight, WeightId,
};
use refrain_tensor::{DType, Shape};
use refrain_testkit::{Feed, Fill, NodeSeed, RandomGraph, Rng, random_graph, tensor};

fn float(dims: impl Into<Shape>) -> TensorType {
    TensorType::new(DType::F32, dims)
}

fn graphs(most: usize, with_host: bool) -> impl Strategy<Value = RandomGraph> {
    prop::collection::vec(any::<NodeSeed>(), 0..most)
        .prop_map(move |choices| random_graph(&choices, with_host))
}

fn options() -> impl Strategy<Value = PlanOptions> {
    (any::<bool>(), prop::sample::select(vec![1, 8, 64, 256]))
        .prop_map(|(in_place, align)| PlanOptions { in_place, align })
}

/// Forms every valid group, in one of two ways.
fn fused(graph: &Graph, options: PlanOptions, is_staged: bool) -> Plan {
    Plan::fused(graph, options, &|_| if is_staged { Fusion::Staged } else { Fusion::Joined }).unwrap()
}

/// Actual lifetime of each buffer, from the steps alone. All members of a group or of a stage may run
/// concurrently.
fn touched(plan: &Plan, is_staged: bool) -> Vec<Option<(usize, usize)>> {
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; plan.buffers().len()];
    let mut touch = |id: BufferId, step: usize| {
        let span = spans[id.idx()].get_or_insert((step, step));
        *span = (span.0.min(step), span.1.max(step));
    };
    for group in plan.groups() {
        let mut first = group.steps.start;
        for n in if is_staged { group.kind.stages() } else { vec![group.steps.len()] } {
            let steps = &plan.steps()[first..first + n];
            for operand in steps.iter().flat_map(|s| s.inputs.iter().chain(&s.outputs)) {
                touch(operand.buffer, first);
                touch(operand.buffer, first + n - 1);
            }
            first += n;
        }
        assert_eq!(first, group.steps.end, "{group:?}");
    }
    plan.outputs().iter().for_each(|o| touch(o.buffer, plan.steps().len()));
    spans
}

fn arena_range(plan: &Plan, i: usize) -> Option<std::ops::Range<usize>> {
    let buffer = &plan.buffers()[i];
    match buffer.place {
        Place::Arena { offset } => Some(offset..offset + buffer.bytes),
        Place::Control { .. } | Place::Weight(_) | Place::State(_) => None,
    }
}

fn overlap(a: &std::ops::Range<usize>, b: &std::ops::Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

fn check_places(plan: &Plan, options: PlanOptions, is_staged: bool) -> Result<(), TestCaseError> {
    let spans = touched(plan, is_staged);
    for (i, span) in spans.iter().enumerate() {
        let (buffer, Some(range), Some(span)) = (&plan.buffers()[i], arena_range(plan, i), span) else {
            continue;
        };
        prop_assert!(
            buffer.first <= span.0 && buffer.last >= span.1,
            "{:?} is touched in {:?}",
            buffer,
            span
        );
        prop_assert!(range.end <= plan.arena_bytes());
        prop_assert!(range.start.is_multiple_of(options.align));
        for (j, other) in spans.iter().enumerate().take(i) {
            let (Some(other_range), Some(other)) = (arena_range(plan, j), other) else { continue };
            let together = span.0 <= other.1 && other.0 <= span.1;
            prop_assert!(!(together && overlap(&range, &other_range)), "buffers {} and {} overlap", i, j);
        }
    }
    for step in plan.steps() {
        for operand in step.inputs.iter().chain(&step.outputs) {
            let blocks = operand.layout.end().div_ceil(operand.dtype.block_len());
            prop_assert!(blocks * operand.dtype.block_bytes() <= plan.buffer(operand.buffer).bytes);
        }
        let shares = step.outputs.iter().any(|o| step.inputs.iter().any(|i| i.buffer == o.buffer));
        prop_assert!(
            options.in_place || !shares || matches!(step.op, Op::KvAppend),
            "{} overwrites an input",
            step.label
        );
    }
    Ok(())
}

fn check_boundaries(plan: &Plan) -> Result<(), TestCaseError> {
    let mut by = vec![[false; 2]; plan.buffers().len()];
    for segment in plan.segments() {
        let side = usize::from(segment.kind == SegmentKind::Recordable);
        for step in &plan.steps()[segment.steps.clone()] {
            step.inputs.iter().chain(&step.outputs).for_each(|o| by[o.buffer.idx()][side] = true);
        }
    }
    for (i, by) in by.iter().enumerate() {
        let Some(range) = arena_range(plan, i) else { continue };
        let declared = plan.boundaries().iter().any(|b| b.idx() == i);
        prop_assert_eq!(declared, by[0] && by[1], "buffer {}", i);
        for j in (0..plan.buffers().len()).filter(|&j| declared && j != i) {
            let clear = arena_range(plan, j).is_none_or(|other| !overlap(&range, &other));
            prop_assert!(clear, "boundary {} shares bytes with {}", i, j);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn buffers_that_live_together_never_overlap(random in graphs(60, true), options in options()) {
        let plan = Plan::new(&random.graph, options).unwrap();
        check_places(&plan, options, true)?;
        check_boundaries(&plan)?;
    }

    #[test]
    fn a_group_is_consecutive_steps_and_owns_its_memory_while_it_runs(
        random in graphs(60, true),
        options in options(),
        is_staged in any::<bool>(),
    ) {
        let plan = fused(&random.graph, options, is_staged);
        check_places(&plan, options, is_staged)?;
        check_boundaries(&plan)?;
        let mut at = 0;
        for group in plan.groups() {
            prop_assert_eq!(group.steps.start, at, "groups are consecutive");
            at = group.steps.end;
            let nodes: Vec<NodeId> = plan.steps()[group.steps.clone()].iter().map(|step| step.node).collect();
            prop_assert_eq!(&nodes, &group.kind.nodes());
            let whole = |s: &Segment| s.steps.start <= group.steps.start && group.steps.end <= s.steps.end;
            prop_assert!(plan.segments().iter().any(whole), "{:?} spans two segments", group);
            for step in plan.steps()[group.steps.clone()].iter().filter(|_| nodes.len() > 1 && !is_staged) {
                let shares = step.outputs.iter().any(|o| step.inputs.iter().any(|i| i.buffer == o.buffer));
                prop_assert!(!shares || matches!(step.op, Op::KvAppend), "{} overwrites an input", step.label);
            }
        }
        prop_assert_eq!(at, plan.steps().len());
        let by_segment: usize = plan.segments().iter().map(|s| plan.groups_of(s).len()).sum();
        prop_assert_eq!(by_segment, plan.groups().len());
        Machine::new(&plan, &random.feed).run(&random.graph)?;
    }

    #[test]
    fn a_plan_over_one_arena_computes_what_separate_memory_computes(
        random in graphs(50, true),
        options in options(),
    ) {
        let plan = Plan::new(&random.graph, options).unwrap();
        Machine::new(&plan, &random.feed).run(&random.graph)?;
    }

    #[test]
    fn overwriting_in_place_never_needs_more_buffers(random in graphs(50, false)) {
        let count = |in_place| {
            let plan = Plan::new(&random.graph, PlanOptions { in_place, align: 1 }).unwrap();
            (0..plan.buffers().len()).filter(|&i| arena_range(&plan, i).is_some()).count()
        };
        prop_assert!(count(true) <= count(false));
    }
}

#[test]
fn random_plans_contain_all_difficult_cases() {
    let mut rng = Rng::new(1);
    let [mut n_in_place, mut n_boundaries, mut n_views, mut n_appends, mut n_groups] = [0; 5];
    for _ in 0..100 {
        let choices: Vec<NodeSeed> = (0..50).map(|_| std::array::from_fn(|_| rng.word() as u16)).collect();
        let plan = fused(&random_graph(&choices, true).graph, PlanOptions::default(), true);
        n_groups += plan.groups().iter().filter(|group| group.steps.len() > 1).count();
        n_boundaries += plan.boundaries().len();
        for step in plan.steps() {
            let is_append = matches!(step.op, Op::KvAppend);
            let shares = step.outputs.iter().any(|o| step.inputs.iter().any(|i| i.buffer == o.buffer));
            n_in_place += usize::from(shares && !is_append);
            n_appends += usize::from(is_append);
            n_views += step.inputs.iter().filter(|i| !i.layout.is_contiguous()).count();
        }
    }
    assert!(
        n_in_place > 100 && n_boundaries > 20 && n_views > 100 && n_appends > 20 && n_groups > 20,
        "{n_in_place} in place, {n_boundaries} boundaries, {n_views} views, {n_appends} appends, {n_groups} groups"
    );
}

/// A graph over `x[4, 8]` and its plan, checked on a machine.
fn planned(build: impl FnOnce(&mut GraphBuilder, ValueId) -> ValueId) -> (Graph, Plan) {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let x = b.input("x", float([4, 8])).unwrap();
    let out = build(&mut b, x);
    b.output("out", out).unwrap();
    let graph = b.finish();
    let plan = Plan::new(&graph, PlanOptions::default()).unwrap();
    let feed = Feed { inputs: vec![tensor(float([4, 8]), &Fill::Normal, 1)], ..Feed::default() };
    Machine::new(&plan, &feed).run(&graph).unwrap();
    (graph, plan)
}

#[test]
fn a_chain_of_elementwise_ops_uses_one_buffer() {
    let (_, plan) = planned(|b, x| (0..5).fold(x, |x, _| b.unary(Unary::Tanh, x).unwrap()));
    assert_eq!(plan.arena_bytes(), PlanOptions::default().align, "128 bytes, rounded up");
    let control = plan.buffer(plan.steps()[0].inputs[0].buffer);
    assert!(matches!(control.place, Place::Control { .. }), "step inputs are never overwritten: {control:?}");
}

#[test]
fn a_broadcast_row_is_not_overwritten_by_a_result_computed_from_it() {
    let (_, plan) = planned(|b, x| {
        let y = b.unary(Unary::Tanh, x).unwrap();
        let row = b.slice(y, 0, 0, 1).unwrap();
        b.add(row, x).unwrap()
    });
    assert_ne!(plan.steps()[1].outputs[0].buffer, plan.steps()[1].inputs[0].buffer);
}

#[test]
fn a_value_used_twice_by_one_step_is_not_overwritten_by_it() {
    let (_, plan) = planned(|b, x| {
        let y = b.unary(Unary::Tanh, x).unwrap();
        let turned = b.reshape(y, &[8, 4]).unwrap();
        let turned = b.permute(turned, &[1, 0]).unwrap();
        b.add(y, turned).unwrap()
    });
    assert_ne!(plan.steps()[1].outputs[0].buffer, plan.steps()[1].inputs[0].buffer);
}

#[test]
fn a_later_use_through_a_view_keeps_a_value() {
    let (_, plan) = planned(|b, x| {
        let y = b.unary(Unary::Tanh, x).unwrap();
        let column = b.slice(y, 1, 3, 1).unwrap();
        let z = b.unary(Unary::Neg, y).unwrap();
        b.binary(Binary::Mul, z, column).unwrap()
    });
    assert_ne!(plan.steps()[1].outputs[0].buffer, plan.steps()[1].inputs[0].buffer);
    assert_eq!(plan.steps()[2].outputs[0].buffer, plan.steps()[2].inputs[0].buffer);
}

#[test]
fn views_without_elements_can_be_planned() {
    let (_, plan) = planned(|b, x| {
        let y = b.unary(Unary::Tanh, x).unwrap();
        let none = b.slice(y, 0, 4, 0).unwrap();
        b.unary(Unary::Neg, none).unwrap()
    });
    assert_eq!(plan.buffer(plan.outputs()[0].buffer).bytes, 0);
}

#[test]
fn a_reshape_that_needs_a_copy_is_an_error_with_a_hint() {
    let mut b = GraphBuilder::new(vec![], vec![]);
    b.scope("blk.3");
    let x = b.input("x", float([4, 8])).unwrap();
    let turned = b.permute(x, &[1, 0]).unwrap();
    let flat = b.reshape(turned, &[32]).unwrap();
    b.output("out", flat).unwrap();
    let error = Plan::new(&b.finish(), PlanOptions::default()).unwrap_err();
    assert!(matches!(error, PlanError::NotAView { .. }));
    let text = "blk.3.reshape: [32] is not a view of [8, 4] with strides [1, 8]; copy it first";
    assert_eq!(error.to_string(), text);
    assert_eq!(error.hint(), "insert a copy before the view");
    // Wrapping the error keeps its hint.
    assert_eq!(CompileError::from(error).hint().as_deref(), Some("insert a copy before the view"));
}

fn weight(name: &str, dtype: DType, dims: impl Into<Shape>) -> Weight {
    Weight { name: name.into(), ty: TensorType::new(dtype, dims) }
}

#[test]
fn traffic_counts_the_rows_and_parts_of_weights_that_are_read() {
    let cache = float([10, 2, 16, 32]);
    let states = ["k", "v", "near_k", "near_v"].map(|n| State::paged(n, cache)).into();
    let weights = vec![
        weight("table", DType::Q8_0, [100, 64]),
        weight("joined", DType::Q4_0, [96, 64]),
        weight("w", DType::F32, [64]),
    ];
    let mut b = GraphBuilder::new(weights, states);
    let ints = |b: &mut GraphBuilder, name: &str, dims: &[usize]| {
        b.input(name, TensorType { dtype: DType::I32, shape: Shape::new(dims).unwrap() }).unwrap()
    };
    let [ids, positions, seqs] = ["ids", "positions", "seqs"].map(|n| ints(&mut b, n, &[3]));
    let tables = ints(&mut b, "tables", &[1, 10]);
    let [table, joined, w] = [0, 1, 2].map(|i| b.weight(WeightId::from_idx(i)));
    let x = b.gather_rows(table, ids, DType::F32).unwrap();
    let x = b.rms_norm(x, w, 1e-5, "norm").unwrap();
    // Half of the joined weight, once.
    let half = b.slice(joined, 0, 0, 48).unwrap();
    b.linear(x, half, None, "half").unwrap();
    let q = b.reshape(x, &[3, 2, 32]).unwrap();
    let [k, v] = [0, 1].map(|i| b.state(StateId::from_idx(i)));
    let attention = Attention { scale: 1.0, window: None, softcap: None };
    let y = b.attention(attention, q, [k, v], [positions, seqs, tables]).unwrap();
    let near = Attention { window: Some(5), ..attention };
    let [k, v] = [2, 3].map(|i| b.state(StateId::from_idx(i)));
    let z = b.attention(near, q, [k, v], [positions, seqs, tables]).unwrap();
    b.output("y", y).unwrap();
    b.output("z", z).unwrap();
    let traffic = Plan::new(&b.finish(), PlanOptions::default()).unwrap().traffic();
    let (rows, norm, half) = (3 * 2 * 34, 64 * 4, 48 * 2 * 18);
    assert_eq!(traffic.weight_bytes, rows + norm + half);
    // A sliding-window layer reads at most its window, however long the sequence.
    let position = 2 * 2 * 32 * 4;
    assert_eq!([0, 5, 100].map(|n| traffic.kv_bytes(n)), [0, (5 + 5) * position, (100 + 5) * position]);
    let windows: Vec<_> = traffic.kv.iter().map(|kv| (kv.window, kv.bytes_per_position)).collect();
    assert_eq!(windows, [(None, position), (Some(5), position)]);
}

#[test]
fn a_weight_or_state_of_partial_blocks_is_refused_by_name() {
    let broken = TensorType::new(DType::Q4_0, [33]);
    let weights = GraphBuilder::new(vec![Weight { name: "w".into(), ty: broken }], vec![]).finish();
    let states = GraphBuilder::new(vec![], vec![State::whole("s", broken)]).finish();
    for (graph, name) in [(weights, "w"), (states, "s")] {
        let error = Plan::new(&graph, PlanOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), format!("{name}: Q4_0[33] is not whole blocks"));
    }
}

#[test]
fn a_weight_read_twice_counts_twice_and_a_repeated_row_once() {
    let mut b = GraphBuilder::new(vec![weight("w", DType::F32, [1, 8])], vec![]);
    let w = b.weight(WeightId::from_idx(0));
    let wide = b.node(Op::View(View::Broadcast(Shape::from([5, 8]))), &[w], "wide").unwrap()[0];
    let sum = b.add(wide, w).unwrap();
    b.output("sum", sum).unwrap();
    let traffic = Plan::new(&b.finish(), PlanOptions::default()).unwrap().traffic();
    assert_eq!(traffic.weight_bytes, 2 * 8 * 4);
}

proptest! {
    #[test]
    fn pictures_of_plans_are_balanced_and_show_every_step(random in graphs(40, true)) {
        let RandomGraph { graph, .. } = random;
        let plan = Plan::new(&graph, PlanOptions::default()).unwrap();
        let dot = plan.to_dot();
        let [opened, closed, quotes] = ['{', '}', '"'].map(|c| dot.matches(c).count());
        prop_assert_eq!(opened, closed);
        prop_assert!(quotes.is_multiple_of(2));
        let framed = dot.starts_with("digraph plan {") && dot.ends_with("}\n");
        prop_assert!(framed);
        for s in 0..plan.steps().len() {
            let line = format!("    s{s} [label=");
            prop_assert_eq!(dot.matches(&line).count(), 1, "step {}", s);
        }
        prop_assert_eq!(dot.matches("subgraph cluster_").count(), plan.segments().len());
    }
}

#[test]
fn quotes_in_labels_are_escaped_in_pictures() {
    let mut b = GraphBuilder::new(vec![], vec![]);
    b.scope("a\"b\\c");
    let x = b.input("x", float([2])).unwrap();
    let y = b.unary(Unary::Neg, x).unwrap();
    b.output("y", y).unwrap();
    let dot = Plan::new(&b.finish(), PlanOptions::default()).unwrap().to_dot();
    assert!(dot.contains(r#"[label="a\"b\\c.neg\nneg"]"#), "{dot}");
}

/// `n_layers` layers of two steps between two steps that are not part of a layer.
fn layered(n_layers: usize) -> Plan {
    let mut b = GraphBuilder::new(vec![], vec![]);
    let x = b.input("x", float([4, 8])).unwrap();
    let mut hidden = b.unary(Unary::Exp, x).unwrap();
    for layer in 0..n_layers {
        b.scope(format!("blk.{layer}"));
        let y = b.unary(Unary::Silu, hidden).unwrap();
        hidden = b.add(hidden, y).unwrap();
    }
    b.scope("");
    let y = b.unary(Unary::Log, hidden).unwrap();
    b.output("y", y).unwrap();
    Plan::new(&b.finish(), PlanOptions::default()).unwrap()
}

#[test]
fn equal_layers_are_one_repeat() {
    let plan = layered(5);
    assert_eq!(plan.steps().len(), 12);
    assert_eq!(plan.repeats(), [Repeat { first: 1..3, n: 5 }]);
    assert_eq!(plan.repeats()[0].folded(), 3..11);
    assert!(layered(1).repeats().is_empty(), "a single layer repeats nothing");
}

#[test]
fn a_picture_shows_equal_layers_once_with_their_number() {
    let dot = layered(5).to_dot();
    assert!(dot.contains("label=\"5 times: steps 1 to 10\""), "{dot}");
    for shown in ["blk.0.silu", "blk.0.add", "s2 -> s1 [", "s2 -> s11 ["] {
        assert!(dot.contains(shown), "{shown} in {dot}");
    }
    assert!(!dot.contains("blk.1"), "{dot}");
    assert_eq!(dot.matches('{').count(), dot.matches('}').count(), "{dot}");
}
