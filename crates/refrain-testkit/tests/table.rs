//! Checks that the table is complete, unique and runnable.

use refrain_graph::{Op, Recurrent, View};
use refrain_tensor::{Bytes, DType, HostTensor};
use refrain_testkit::{Case, Rng, cases, check_all, evaluate, random_graph, run_case};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;

/// Families that the table must cover. A new op does not compile here until it is listed.
fn family(op: &Op) -> &'static str {
    match op {
        Op::View(View::Reshape(_)) => "reshape",
        Op::View(View::Permute(_)) => "permute",
        Op::View(View::Slice { .. }) => "slice",
        Op::View(View::Broadcast(_)) => "broadcast",
        Op::Copy => "copy",
        Op::Cast(_) => "cast",
        Op::Unary(_) => "unary",
        Op::Binary(_) => "binary",
        Op::Reduce { .. } => "reduce",
        Op::Compare(_) => "compare",
        Op::Select => "select",
        Op::Pick => "pick",
        Op::PlaceColumns { .. } => "place_columns",
        Op::Pad { .. } => "pad",
        Op::ScatterAddRows { .. } => "scatter_add_rows",
        Op::SpanAttention(_) => "span_attention",
        Op::Moe(op) => op.name(),
        Op::Lora(op) => op.name(),
        Op::Train(op) => op.name(),
        Op::Softmax => "softmax",
        Op::MatMul => "matmul",
        Op::GatherRows(_) => "gather_rows",
        Op::RmsNorm { .. } => "rms_norm",
        Op::AddRmsNorm { .. } => "add_rms_norm",
        Op::Gate(_) => "gate",
        Op::Rope(_) => "rope",
        Op::KvAppend => "kv_append",
        Op::KvAppendBytes => "kv_append_bytes",
        Op::Attention(_) => "attention",
        Op::Sample(_) => "sample",
        Op::Accumulate => "accumulate",
        Op::Recurrent(Recurrent::ShortConv(_)) => "short_conv",
        Op::Recurrent(Recurrent::GatedDelta(_)) => "gated_delta",
        Op::HostCall(_) => "host_call",
    }
}

const N_FAMILIES: usize = 47;
/// Families that only training uses.
const N_TRAINING: usize = 18;
/// Routers and experts, which random graphs omit: a near tie in routing may resolve either way.
const N_EXPERTS: usize = 3;
/// Families that need slots, which random graphs omit.
const N_RECURRENT: usize = 2;

#[test]
fn every_op_has_cases_and_every_case_has_a_unique_name() {
    let cases = cases();
    let families: BTreeSet<&str> = cases.iter().map(|c| family(&c.op)).collect();
    assert_eq!(families.len(), N_FAMILIES, "{families:?}");
    let mut names = BTreeMap::<&str, usize>::new();
    cases.iter().for_each(|c| *names.entry(&c.name).or_default() += 1);
    let twice: Vec<_> = names.iter().filter(|(_, n)| **n > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    let states_are_zero =
        |c: &Case| c.feed.states.iter().all(|s| s.bytes().as_slice().iter().all(|&b| b == 0));
    assert!(cases.iter().all(states_are_zero));
}

#[test]
fn every_dtype_of_weights_is_multiplied_gathered_and_copied() {
    let cases = cases();
    for dtype in DType::ALL.into_iter().filter(|d| d.is_quantized() || d.is_float()) {
        for op in ["matmul", "gather_rows", "cast"] {
            let has = |c: &Case| family(&c.op) == op && c.feed.weights.iter().any(|w| w.dtype() == dtype);
            assert!(dtype == DType::F32 && op == "cast" || cases.iter().any(has), "{op} with {dtype}");
        }
    }
}

#[test]
fn the_reference_passes_its_own_table() {
    check_all(&cases(), evaluate);
}

#[test]
fn failures_are_reported_together_and_by_name() {
    let some: Vec<Case> = cases().into_iter().filter(|c| c.name.starts_with("softmax: F32")).collect();
    let worse = |graph: &refrain_graph::Graph, feed: &refrain_testkit::Feed| {
        let out = evaluate(graph, feed).map_err(|e| e.to_string())?;
        let spoil = |t: &HostTensor| {
            let mut bytes = t.bytes().as_slice().to_vec();
            bytes[3] ^= 0x40;
            HostTensor::new(t.dtype(), t.shape(), Bytes::new(bytes)).map_err(|e| e.to_string())
        };
        out.iter().map(spoil).collect::<Result<Vec<_>, String>>()
    };
    let failure = run_case(&some[0], worse).unwrap_err();
    assert_eq!(failure.case, some[0].name);
    assert!(failure.because.starts_with("output 0: element 0 is "), "{failure}");
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| check_all(&some, worse))).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.starts_with(&format!("{0} of {0} cases failed:\n", some.len())), "{text}");
    assert!(some.iter().all(|c| text.contains(&c.name)), "{text}");
    let refused = run_case(&some[0], |_, _| Err::<Vec<HostTensor>, _>("no kernel")).unwrap_err();
    assert_eq!(refused.to_string(), format!("{}: no kernel", some[0].name));
}

#[test]
fn random_graphs_contain_every_op_that_can_run_twice() {
    let mut rng = Rng::new(1);
    let mut seen = BTreeSet::new();
    for _ in 0..40 {
        let choices: Vec<_> = (0..60).map(|_| std::array::from_fn(|_| rng.word() as u16)).collect();
        let random = random_graph(&choices, true);
        seen.extend(random.graph.nodes().iter().map(|n| family(&n.op)));
        let outputs = evaluate(&random.graph, &random.feed).unwrap();
        let finite = |t: &HostTensor| t.to_f32().unwrap().iter().all(|v| v.is_finite());
        assert!(outputs.iter().all(finite));
    }
    // All but sampling and accumulators, which continue from the previous run, 8-bit caches, routers and experts,
    // recurrent layers, and training-only ops.
    assert_eq!(seen.len(), N_FAMILIES - 3 - N_TRAINING - N_EXPERTS - N_RECURRENT, "{seen:?}");
}
