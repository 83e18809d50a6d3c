//! Groups: which nodes become one unit regardless of build order, and what happens when a backend refuses.

use refrain_graph::{
    Attend, AttendStored, Attention, Binary, ExpertActivation, ExpertChain, ExpertGate, Fusion, Gate, Graph,
    GraphBuilder, GroupKind, GroupQuery, MoeOp, NodeId, Op, Plan, PlanOptions, Producer, Products, Rope,
    RopeAppend, RopeStyle, Route, RouteScore, State, StateId, TensorType, Unary, Weight, WeightId, fuse,
};
use refrain_tensor::{DType, Shape};
use refrain_testkit::{Rng, reordered};

const D: usize = 16;
const HEAD_DIM: usize = 8;

/// Optional parts of a layer.
#[derive(Clone, Copy, Default)]
struct Extras {
    norms: bool,
    biases: bool,
    post_norm: bool,
    // Marks these values as outputs.
    rows_are_output: bool,
    rope_is_output: bool,
    product_is_output: bool,
}

fn ty(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType::new(dtype, Shape::new(dims).unwrap())
}

/// Two typical model layers, for `n` tokens.
fn layers(n: usize, extras: Extras) -> Graph {
    let (mut weights, states) = (Vec::new(), ["k0", "v0", "k1", "v1"]);
    let f32 = |dims: &[usize]| ty(DType::F32, dims);
    for (name, dims) in [
        ("vector", &[D][..]),
        ("head", &[HEAD_DIM]),
        ("square", &[D, D]),
        ("kv", &[HEAD_DIM, D]),
        ("inv_freq", &[HEAD_DIM / 2]),
        ("kv bias", &[HEAD_DIM]),
    ] {
        weights.push(Weight { name: name.into(), ty: f32(dims) });
    }
    let cache = f32(&[4, 1, 4, HEAD_DIM]);
    let states = states.map(|name| State::paged(name, cache)).to_vec();
    let mut b = GraphBuilder::new(weights, states);
    let [vector, head, square, kv, inv_freq, kv_bias] =
        [0, 1, 2, 3, 4, 5].map(|i| b.weight(WeightId::from_idx(i)));
    let mut x = b.input("x", f32(&[n, D])).unwrap();
    let places = [("positions", &[n][..]), ("seqs", &[n]), ("tables", &[1, 4])]
        .map(|(name, dims)| b.input(name, ty(DType::I32, dims)).unwrap());
    let rope = Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 };
    let bias = |w| extras.biases.then_some(w);
    for layer in 0..2 {
        b.scope(format!("{layer}"));
        let h = b.rms_norm(x, vector, 1e-5, "norm").unwrap();
        if extras.rows_are_output {
            b.output(&format!("rows{layer}"), h).unwrap();
        }
        let mut q = b.linear(h, square, bias(vector), "q").unwrap();
        if extras.product_is_output {
            b.output(&format!("q{layer}"), q).unwrap();
        }
        let mut k = b.linear(h, kv, bias(kv_bias), "k").unwrap();
        let v = b.linear(h, kv, bias(kv_bias), "v").unwrap();
        q = b.reshape(q, &[n, 2, HEAD_DIM]).unwrap();
        k = b.reshape(k, &[n, 1, HEAD_DIM]).unwrap();
        let v = b.reshape(v, &[n, 1, HEAD_DIM]).unwrap();
        if extras.norms {
            q = b.rms_norm(q, head, 1e-5, "q_norm").unwrap();
            k = b.rms_norm(k, head, 1e-5, "k_norm").unwrap();
        }
        q = b.rope(rope, q, places[0], inv_freq).unwrap();
        k = b.rope(rope, k, places[0], inv_freq).unwrap();
        if extras.rope_is_output {
            b.output(&format!("turned{layer}"), q).unwrap();
        }
        let caches = [(2 * layer, k), (2 * layer + 1, v)].map(|(state, x)| {
            let cache = b.state(StateId::from_idx(state));
            b.kv_append(cache, x, places).unwrap()
        });
        let attention = Attention { scale: 0.5, window: None, softcap: None };
        let a = b.attention(attention, q, caches, places).unwrap();
        let a = b.reshape(a, &[n, D]).unwrap();
        let mut o = b.linear(a, square, None, "o").unwrap();
        if extras.post_norm {
            o = b.rms_norm(o, vector, 1e-5, "post").unwrap();
        }
        x = b.add(x, o).unwrap();
        let h = b.rms_norm(x, vector, 1e-5, "ffn_norm").unwrap();
        let up = b.linear(h, square, None, "up").unwrap();
        let gate = b.linear(h, square, None, "gate").unwrap();
        let gate = b.unary(Unary::Silu, gate).unwrap();
        let h = b.binary(Binary::Mul, gate, up).unwrap();
        let down = b.linear(h, square, None, "down").unwrap();
        x = b.add(x, down).unwrap();
    }
    b.scope("");
    b.output("x", x).unwrap();
    b.finish()
}

fn everything(_: &GroupQuery<'_>) -> Fusion {
    Fusion::Joined
}

/// Labels of each group, in execution order.
fn groups(graph: &Graph, fuses: &dyn Fn(&GroupQuery<'_>) -> Fusion) -> Vec<String> {
    let plan = Plan::fused(&fuse(graph).unwrap(), PlanOptions::default(), fuses).unwrap();
    let labels = |steps: std::ops::Range<usize>| {
        plan.steps()[steps].iter().map(|s| s.label.as_str()).collect::<Vec<_>>().join(" ")
    };
    plan.groups().iter().map(|group| labels(group.steps.clone())).collect()
}

#[test]
fn a_layer_is_five_groups() {
    let want = [
        "0.norm 0.q 0.k 0.v",
        "0.rope 0.rope 0.kv_append 0.kv_append 0.attention",
        "0.o",
        "0.add 0.gate 0.up 0.mul",
        "0.down",
        "0.add 1.q 1.k 1.v",
        "1.rope 1.rope 1.kv_append 1.kv_append 1.attention",
        "1.o",
        "1.add 1.gate 1.up 1.mul",
        "1.down",
        "1.add",
    ];
    assert_eq!(groups(&layers(1, Extras::default()), &everything), want);
    let all = Extras { norms: true, biases: true, post_norm: true, ..Extras::default() };
    let got = groups(&layers(1, all), &everything);
    assert_eq!(got.len(), want.len(), "{got:?}");
    assert_eq!(got[0], "0.norm 0.q 0.add 0.k 0.add 0.v 0.add", "bias sums are members");
    assert_eq!(got[1], "0.q_norm 0.k_norm 0.rope 0.rope 0.kv_append 0.kv_append 0.attention");
    assert_eq!(got[3], "0.post 0.add 0.gate 0.up 0.mul", "the norm before the sum is a member");
}

#[test]
fn the_build_order_of_nodes_changes_neither_groups_nor_execution_order() {
    let mut rng = Rng::new(4);
    for extras in [
        Extras::default(),
        Extras { norms: true, biases: true, ..Extras::default() },
        Extras { norms: true, post_norm: true, ..Extras::default() },
        Extras { rows_are_output: true, rope_is_output: true, ..Extras::default() },
    ] {
        let graph = layers(3, extras);
        let bare = |_: &GroupQuery<'_>| Fusion::Smaller;
        let want = [groups(&graph, &everything), groups(&graph, &bare)];
        for _ in 0..100 {
            let other = reordered(&graph, &mut rng).unwrap();
            assert_eq!([groups(&other, &everything), groups(&other, &bare)], want);
        }
    }
}

#[test]
fn nodes_with_other_readers_stay_outside_a_chain() {
    // Ropes and appends are still a group; the attention becomes the producer of the next product.
    let got = groups(&layers(1, Extras { rope_is_output: true, ..Extras::default() }), &everything);
    assert_eq!(got[1..3], ["0.rope 0.rope 0.kv_append 0.kv_append", "0.attention 0.o"]);
    let with_norms = Extras { rope_is_output: true, norms: true, ..Extras::default() };
    let got = groups(&layers(1, with_norms), &everything);
    assert_eq!(got[1..4], ["0.q_norm", "0.k_norm", "0.rope 0.rope 0.kv_append 0.kv_append"]);
    // A bias is a member only if nothing reads the product without it.
    let biased = Extras { biases: true, ..Extras::default() };
    assert!(groups(&layers(1, biased), &everything)[0].contains("add"));
    let mut b = GraphBuilder::new(
        vec![
            Weight { name: "w".into(), ty: ty(DType::F32, &[D, D]) },
            Weight { name: "bias".into(), ty: ty(DType::F32, &[D]) },
        ],
        vec![],
    );
    let x = b.input("x", ty(DType::F32, &[1, D])).unwrap();
    let [w, bias] = [0, 1].map(|i| b.weight(WeightId::from_idx(i)));
    let y = b.linear(x, w, None, "y").unwrap();
    let sum = b.add(y, bias).unwrap();
    b.output("y", y).unwrap();
    b.output("sum", sum).unwrap();
    assert_eq!(groups(&b.finish(), &everything), ["y", "add"]);
}

#[test]
fn a_backend_knows_about_other_readers_of_the_rows_and_may_refuse_them() {
    let exclusive = |q: &GroupQuery<'_>| match q.kind {
        GroupKind::Products(Products { producer: Some(producer @ Producer::Norm(_)), .. }) => {
            match q.is_internal(producer.node(), 0) {
                true => Fusion::Joined,
                false => Fusion::No("others read the rows".into()),
            }
        }
        _ => Fusion::Joined,
    };
    assert_eq!(groups(&layers(1, Extras::default()), &exclusive)[0], "0.norm 0.q 0.k 0.v");
    let shared = layers(1, Extras { rows_are_output: true, ..Extras::default() });
    assert_eq!(groups(&shared, &exclusive)[..2], ["0.norm", "0.q 0.k 0.v"]);
    let plan = Plan::fused(&fuse(&shared).unwrap(), PlanOptions::default(), &exclusive).unwrap();
    let told: Vec<_> =
        plan.refusals().iter().map(|r| (plan.step(r.node).label.as_str(), &*r.because)).collect();
    assert_eq!(told, [("0.q", "others read the rows")], "the second norm is part of a sum");
}

#[test]
fn smaller_groups_are_proposed_until_one_has_a_kernel() {
    use std::cell::RefCell;
    let asked = RefCell::new(Vec::new());
    let graph = layers(1, Extras { norms: true, biases: true, post_norm: true, ..Extras::default() });
    let refuse = |q: &GroupQuery<'_>| {
        let text = match q.kind {
            GroupKind::One(_) => "one".to_owned(),
            GroupKind::Attend(Attend { norms, .. }) => format!("attend {}", norms.is_some()),
            GroupKind::AttendStored(AttendStored { norm, .. }) => format!("attend stored {}", norm.is_some()),
            GroupKind::RopeAppend(RopeAppend { .. }) => "rope append".to_owned(),
            GroupKind::Experts(ExpertChain { route, .. }) => format!("experts {}", route.is_some()),
            GroupKind::Products(Products { producer, parts, gate }) => {
                let producer = match producer {
                    None => "plain",
                    Some(Producer::Norm(_)) => "norm",
                    Some(Producer::AddNorm { inner: None, .. }) => "sum",
                    Some(Producer::AddNorm { inner: Some(_), .. }) => "sum with a norm",
                    Some(Producer::Gate(_)) => "gate",
                    Some(Producer::Attention(_)) => "attention",
                };
                let biases = if parts.iter().any(|p| p.bias.is_some()) { ", biases" } else { "" };
                let gate = if gate.is_some() { ", gated" } else { "" };
                format!("{} of {producer}{biases}{gate}", parts.len())
            }
        };
        asked.borrow_mut().push(text);
        Fusion::No("no kernel".into())
    };
    let names = groups(&graph, &refuse);
    assert!(names.iter().all(|name| !name.contains(' ')), "{names:?}");
    let asked = asked.into_inner();
    let chain = ["attend true", "attend false", "rope append", "attend stored true", "attend stored false"];
    assert_eq!(asked[..5], chain);
    let first = &asked[10..];
    assert_eq!(first[..4], ["3 of norm, biases", "3 of plain, biases", "3 of norm", "3 of plain"]);
    assert_eq!(first[4], "1 of attention");
    let gated = ["2 of sum with a norm, gated", "2 of sum, gated", "2 of plain, gated"];
    assert_eq!(first[5..8], gated);
    assert_eq!(first[8..12], ["2 of sum with a norm", "2 of sum", "2 of plain", "1 of gate"]);
}

/// A node outside the group that depends on one member and that another member depends on.
#[test]
fn nodes_that_depend_on_each_other_through_an_outsider_form_no_group() {
    let cache = ty(DType::F32, &[4, 1, 4, HEAD_DIM]);
    let states = ["k", "v"].map(|name| State::paged(name, cache)).to_vec();
    let weights = vec![Weight { name: "inv_freq".into(), ty: ty(DType::F32, &[HEAD_DIM / 2]) }];
    let mut b = GraphBuilder::new(weights, states);
    let x = b.input("x", ty(DType::F32, &[1, 1, HEAD_DIM])).unwrap();
    let places = [("positions", &[1][..]), ("seqs", &[1]), ("tables", &[1, 4])]
        .map(|(name, dims)| b.input(name, ty(DType::I32, dims)).unwrap());
    let inv_freq = b.weight(WeightId::from_idx(0));
    let rope = Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 };
    let [q, k] = [0, 1].map(|_| b.rope(rope, x, places[0], inv_freq).unwrap());
    let [keys, values] = [0, 1].map(|i| b.state(StateId::from_idx(i)));
    let keys = b.kv_append(keys, k, places).unwrap();
    // Values are computed from the content of the key cache.
    let seen = b.slice(keys, 0, 0, 1).unwrap();
    let seen = b.slice(seen, 2, 0, 1).unwrap();
    let seen = b.reshape(seen, &[1, 1, HEAD_DIM]).unwrap();
    let v = b.unary(Unary::Tanh, seen).unwrap();
    let values = b.kv_append(values, v, places).unwrap();
    let attention = Attention { scale: 0.5, window: None, softcap: None };
    let y = b.attention(attention, q, [keys, values], places).unwrap();
    b.output("y", y).unwrap();
    let got = groups(&b.finish(), &everything);
    assert!(got.iter().all(|group| !group.contains(' ') || group == STORED), "{got:?}");
}

/// Queries and attention: a group wherever the caches are filled.
const STORED: &str = "rope attention";

#[test]
fn attention_over_caches_filled_by_another_layer_is_a_group_with_its_queries() {
    let cache = ty(DType::F32, &[4, 1, 4, HEAD_DIM]);
    let states = ["k", "v"].map(|name| State::paged(name, cache)).to_vec();
    let weights = vec![
        Weight { name: "inv_freq".into(), ty: ty(DType::F32, &[HEAD_DIM / 2]) },
        Weight { name: "norm".into(), ty: ty(DType::F32, &[HEAD_DIM]) },
    ];
    let mut b = GraphBuilder::new(weights, states);
    let x = b.input("x", ty(DType::F32, &[1, 1, HEAD_DIM])).unwrap();
    let places = [("positions", &[1][..]), ("seqs", &[1]), ("tables", &[1, 4])]
        .map(|(name, dims)| b.input(name, ty(DType::I32, dims)).unwrap());
    let [inv_freq, norm] = [0, 1].map(|i| b.weight(WeightId::from_idx(i)));
    let rope = Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 };
    let attention = Attention { scale: 0.5, window: None, softcap: None };
    let turned = |b: &mut GraphBuilder, x| {
        let x = b.rms_norm(x, norm, 1e-6, "norm").unwrap();
        b.rope(rope, x, places[0], inv_freq).unwrap()
    };
    let (q, k) = (turned(&mut b, x), turned(&mut b, x));
    let v = b.rms_norm(x, norm, 1e-6, "value_norm").unwrap();
    let [keys, values] = [0, 1].map(|i| b.state(StateId::from_idx(i)));
    let keys = b.kv_append(keys, k, places).unwrap();
    let values = b.kv_append(values, v, places).unwrap();
    let y = b.attention(attention, q, [keys, values], places).unwrap();
    // A later layer with its own queries.
    let q = turned(&mut b, y);
    let y = b.attention(attention, q, [keys, values], places).unwrap();
    b.output("y", y).unwrap();
    let got = groups(&b.finish(), &everything);
    let own = "norm norm value_norm rope rope kv_append kv_append attention";
    assert_eq!(got, [own, "norm rope attention"]);
}

/// Queries computed from rotated keys, and values that are rotated keys.
#[test]
fn members_that_read_each_other_outside_the_chain_form_no_group() {
    for values_are_keys in [false, true] {
        let cache = ty(DType::F32, &[4, 1, 4, HEAD_DIM]);
        let states = ["k", "v"].map(|name| State::paged(name, cache)).to_vec();
        let weights = vec![Weight { name: "inv_freq".into(), ty: ty(DType::F32, &[HEAD_DIM / 2]) }];
        let mut b = GraphBuilder::new(weights, states);
        let x = b.input("x", ty(DType::F32, &[1, 1, HEAD_DIM])).unwrap();
        let places = [("positions", &[1][..]), ("seqs", &[1]), ("tables", &[1, 4])]
            .map(|(name, dims)| b.input(name, ty(DType::I32, dims)).unwrap());
        let inv_freq = b.weight(WeightId::from_idx(0));
        let rope = Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 };
        let k = b.rope(rope, x, places[0], inv_freq).unwrap();
        let (of_query, v) = if values_are_keys { (x, k) } else { (k, x) };
        let q = b.rope(rope, of_query, places[0], inv_freq).unwrap();
        let [keys, values] = [0, 1].map(|i| b.state(StateId::from_idx(i)));
        let keys = b.kv_append(keys, k, places).unwrap();
        let values = b.kv_append(values, v, places).unwrap();
        let attention = Attention { scale: 0.5, window: None, softcap: None };
        let y = b.attention(attention, q, [keys, values], places).unwrap();
        b.output("y", y).unwrap();
        let got = groups(&b.finish(), &everything);
        assert!(got.iter().all(|group| !group.contains(' ') || group == STORED), "{got:?}");
    }
}

/// A router and its experts; `read` makes the rows between the products an output.
fn experts(read: bool) -> Graph {
    let f32 = |dims: &[usize]| ty(DType::F32, dims);
    let dims: [&[usize]; 3] = [&[6, D], &[6, 8, D], &[6, D, 8]];
    let weights = dims.iter().map(|dims| Weight { name: "w".into(), ty: f32(dims) }).collect();
    let mut b = GraphBuilder::new(weights, Vec::new());
    let x = b.input("x", f32(&[3, D])).unwrap();
    let [router, up, down] = [0, 1, 2].map(|i| b.weight(WeightId::from_idx(i)));
    let logits = b.linear(x, router, None, "router").unwrap();
    let route = Route {
        n_choices: 2,
        score: RouteScore::Softmax,
        biased: false,
        scaled: false,
        groups: None,
        renormalise: true,
        scale: 1.0,
    };
    let chosen = b.node(Op::Moe(MoeOp::Route(route)), &[logits], "route").unwrap();
    let gate = ExpertGate { activation: ExpertActivation::Silu, joined: false, biased: false };
    let inner = b.node(Op::Moe(MoeOp::Gated(gate)), &[x, chosen[0], up, up], "gated").unwrap()[0];
    let inputs = [inner, chosen[0], chosen[1], down];
    let y = b.node(Op::Moe(MoeOp::Summed { biased: false }), &inputs, "summed").unwrap()[0];
    b.output("y", y).unwrap();
    if read {
        b.output("inner", inner).unwrap();
    }
    b.finish()
}

#[test]
fn experts_are_one_group_with_their_router_or_without_it() {
    assert_eq!(groups(&experts(false), &everything), ["router", "route gated summed"]);
    let without = |q: &GroupQuery<'_>| match q.kind {
        GroupKind::Experts(ExpertChain { route: Some(_), .. }) => Fusion::Smaller,
        _ => Fusion::Joined,
    };
    assert_eq!(groups(&experts(false), &without), ["router", "route", "gated summed"]);
    let none = groups(&experts(true), &everything);
    assert_eq!(none, ["router", "route", "gated", "summed"], "another node reads the rows between");
}

#[test]
fn a_plan_without_a_backend_has_groups_of_one() {
    let graph = fuse(&layers(2, Extras::default())).unwrap();
    let plan = Plan::new(&graph, PlanOptions::default()).unwrap();
    assert_eq!(plan.groups().len(), plan.steps().len());
    let is_products = |kind: &GroupKind| matches!(kind, GroupKind::Products(_));
    for (group, step) in plan.groups().iter().zip(plan.steps()) {
        assert_eq!(is_products(&group.kind), matches!(step.op, Op::MatMul), "{}", step.label);
        assert_eq!(plan.step(group.kind.head()).label, step.label);
    }
    assert!(plan.refusals().is_empty(), "nothing was refused");
    let gates = plan.steps().iter().filter(|s| matches!(s.op, Op::Gate(Gate::Silu))).count();
    assert_eq!(gates, 2);
}

#[test]
fn roles_name_the_nodes() {
    let graph = fuse(&layers(1, Extras { norms: true, ..Extras::default() })).unwrap();
    let plan = Plan::fused(&graph, PlanOptions::default(), &everything).unwrap();
    let op = |node: NodeId| plan.step(node).op.name();
    let (mut attends, mut gated) = (0, 0);
    for group in plan.groups() {
        match &group.kind {
            GroupKind::Attend(Attend { norms: Some(norms), ropes, appends, attention, .. }) => {
                attends += 1;
                assert_eq!(norms.map(op), ["rms_norm"; 2]);
                assert_eq!(
                    (ropes.map(op), appends.map(op), op(*attention)),
                    (["rope"; 2], ["kv_append"; 2], "attention")
                );
                let made = |node: NodeId| plan.step(node).outputs[0];
                assert_eq!(plan.step(*attention).inputs[0], made(ropes[0]), "queries come first");
                assert_eq!(plan.step(*attention).inputs[1].buffer, made(appends[0]).buffer, "so do keys");
            }
            GroupKind::Products(Products { producer: Some(producer), parts, gate: Some(gate) }) => {
                gated += 1;
                assert_eq!((op(producer.node()), op(*gate)), ("add_rms_norm", "silu_gate"));
                let sides: Vec<_> = parts.iter().map(|p| plan.step(p.product).outputs[0]).collect();
                assert_eq!(sides, plan.step(*gate).inputs, "the operand of the function comes first");
            }
            GroupKind::One(_)
            | GroupKind::Products(_)
            | GroupKind::Attend(_)
            | GroupKind::AttendStored(_)
            | GroupKind::RopeAppend(_)
            | GroupKind::Experts(_) => {}
        }
    }
    assert_eq!((attends, gated), (2, 2));
}
