//! Checks gradients against finite differences in double precision, over the table of op cases.

use refrain_graph::{
    Binary, GradError, Graph, GraphBuilder, GraphError, MoeOp, Op, Reduce, Route, RouteScore, State,
    TensorType, Unary, ValueId, ValueOrigin, Weight, WeightId,
};
use refrain_reference::exact::{self, F64Array};
use refrain_tensor::{DType, HostTensor};
use refrain_testkit::{Case, Feed, Rng, cases};
use std::collections::BTreeMap;

fn array(tensor: &HostTensor) -> F64Array {
    let values = match tensor.dtype() {
        DType::I32 => tensor
            .bytes()
            .as_slice()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| i32::from_le_bytes(*w).into())
            .collect(),
        DType::U32 => tensor
            .bytes()
            .as_slice()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| u32::from_le_bytes(*w).into())
            .collect(),
        _ => tensor.to_f32().unwrap().into_iter().map(f64::from).collect(),
    };
    F64Array::new(tensor.shape(), values)
}

/// Initial values of a graph: inputs, weights and states.
fn leaves(graph: &Graph, feed: &Feed) -> BTreeMap<ValueId, F64Array> {
    let leaf = |(idx, value): (usize, &refrain_graph::Value)| {
        let tensor = match value.origin {
            ValueOrigin::Input(id) => &feed.inputs[id.idx()],
            ValueOrigin::Weight(id) => &feed.weights[id.idx()],
            ValueOrigin::State(id) => &feed.states[id.idx()],
            ValueOrigin::Node { .. } => return None,
        };
        Some((ValueId::from_idx(idx), array(tensor)))
    };
    graph.values().iter().enumerate().filter_map(leaf).collect()
}

/// Evaluates every value of a graph in double precision.
fn evaluate(graph: &Graph, leaves: &BTreeMap<ValueId, F64Array>) -> Vec<Option<F64Array>> {
    let mut values: Vec<Option<F64Array>> = vec![None; graph.values().len()];
    leaves.iter().for_each(|(id, array)| values[id.idx()] = Some(array.clone()));
    for node in graph.nodes() {
        let inputs: Vec<F64Array> = node.inputs.iter().map(|v| values[v.idx()].clone().unwrap()).collect();
        let made = exact::evaluate(&node.op, &inputs).unwrap_or_else(|e| panic!("{}: {e}", node.label));
        node.outputs.iter().zip(made).for_each(|(id, array)| values[id.idx()] = Some(array));
    }
    values
}

/// Compares the gradients of half the sum of squares of a value with finite differences along random
/// directions.
fn check(
    name: &str,
    graph: Graph,
    feed: &Feed,
    output: ValueId,
    wrt: &[ValueId],
) -> Result<usize, GradError> {
    let mut builder = GraphBuilder::resume(graph);
    let loss = builder.binary(Binary::Mul, output, output)?;
    let gradients = builder.gradients(loss, wrt, &[])?;
    for (value, gradient) in wrt.iter().zip(&gradients) {
        if let Some(gradient) = gradient {
            assert_eq!(builder.ty(*gradient), builder.ty(*value), "{name}");
        }
    }
    let graph = builder.finish();
    let start = leaves(&graph, feed);
    let values = evaluate(&graph, &start);
    let total = |leaves: &BTreeMap<ValueId, F64Array>| -> f64 {
        evaluate(&graph, leaves)[loss.idx()].as_ref().unwrap().values.iter().sum()
    };
    // Finite differences are useless if values overflow, or if one is far larger than the others.
    if !total(&start).is_finite() || total(&start) > 1e12 {
        return Ok(0);
    }
    let mut rng = Rng::new(7);
    let mut n_checked = 0;
    for (&value, gradient) in wrt.iter().zip(gradients) {
        let n = start[&value].values.len();
        let direction: Vec<f64> = (0..n).map(|_| f64::from(rng.normal())).collect();
        let moved = |by: f64| {
            let mut leaves = start.clone();
            let array = leaves.get_mut(&value).unwrap();
            array.values.iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
            total(&leaves)
        };
        let step = 1e-5;
        // Two step sizes combined: the remaining error has the fifth power of the step.
        let slope = |h: f64| (moved(h) - moved(-h)) / (2.0 * h);
        let want = (4.0 * slope(step) - slope(2.0 * step)) / 3.0;
        let got = match gradient {
            Some(gradient) => {
                let gradient = values[gradient.idx()].as_ref().unwrap();
                gradient.values.iter().zip(&direction).map(|(g, d)| g * d).sum::<f64>()
            }
            None => 0.0,
        };
        let scale = want.abs().max(total(&start).abs() * 1e-2).max(1e-3);
        assert!(
            (got - want).abs() <= 2e-6 * scale,
            "{name}: {got:e} along input {value:?}, finite differences give {want:e}"
        );
        n_checked += 1;
    }
    Ok(n_checked)
}

/// Leaves with gradients: the floats.
fn float_leaves(graph: &Graph) -> Vec<ValueId> {
    let is_float = |(_, value): &(usize, &refrain_graph::Value)| {
        value.ty.dtype.is_float() && !matches!(value.origin, ValueOrigin::Node { .. })
    };
    graph.values().iter().enumerate().filter(is_float).map(|(i, _)| ValueId::from_idx(i)).collect()
}

fn runs_in_doubles(case: &Case) -> bool {
    let graph = &case.graph;
    let exact = |op: &Op| {
        !matches!(
            op,
            Op::KvAppend
                | Op::KvAppendBytes
                | Op::Attention(_)
                | Op::Sample(_)
                | Op::Accumulate
                | Op::Moe(_)
                | Op::Lora(_)
                | Op::Recurrent(_)
                | Op::HostCall(_)
        )
    };
    let plain = |w: &Weight| !w.ty.dtype.is_quantized();
    let small = graph.values().iter().map(|v| v.ty.shape.n_elements()).sum::<usize>() < 60_000;
    small && graph.nodes().iter().all(|n| exact(&n.op)) && graph.weights().iter().all(plain)
}

#[test]
fn every_op_of_the_table_has_the_gradient_of_finite_differences() {
    let mut checked: BTreeMap<&str, usize> = BTreeMap::new();
    let mut without: BTreeMap<&str, String> = BTreeMap::new();
    for case in cases().iter().filter(|case| runs_in_doubles(case)) {
        // Finite differences fail at a maximum of equal numbers and at a reciprocal root of zero.
        if ["Wild", "wild", "masked", "extreme"].iter().any(|odd| case.name.contains(odd)) {
            continue;
        }
        let output = case.graph.outputs()[0].value;
        if !case.graph.value(output).ty.dtype.is_float() {
            continue;
        }
        for leaf in float_leaves(&case.graph) {
            match check(&case.name, case.graph.clone(), &case.feed, output, &[leaf]) {
                Ok(0) => {}
                Ok(n) => *checked.entry(case.op.name()).or_default() += n,
                // RoPE frequencies, the scale of a loss.
                Err(GradError::NotDifferentiable { because, .. }) if because.ends_with("as constant") => {}
                Err(GradError::NotDifferentiable { because, .. }) => {
                    without.insert(case.op.name(), because.to_owned());
                }
                Err(other) => panic!("{}: {other}", case.name),
            }
        }
    }
    println!("checked: {checked:?}\nno gradient: {without:?}");
    for op in [
        "copy",
        "cast",
        "add",
        "sub",
        "mul",
        "div",
        "sum",
        "mean",
        "max",
        "softmax",
        "matmul",
        "gather_rows",
        "scatter_add_rows",
        "rms_norm",
        "add_rms_norm",
        "silu_gate",
        "gelu_gate",
        "rope",
        "span_attention",
        "select",
        "pick",
        "place_columns",
        "pad",
        "reshape",
        "permute",
        "slice",
        "broadcast",
        "dropout",
        "cross_entropy",
        "silu",
        "gelu_tanh",
        "gelu_erf",
        "tanh",
        "sigmoid",
        "exp",
        "neg",
        "affine",
        "softcap",
    ] {
        assert!(checked.contains_key(op), "{op} was not checked; {checked:?}");
    }
    // Only ops of a backward pass may lack a gradient.
    let backward = |op: &&str| op.ends_with("_grad") || ["adamw", "add_product", "sum_squares"].contains(op);
    assert!(without.keys().all(backward), "{without:?}");
}

#[test]
fn recomputed_values_give_the_same_gradients() -> Result<(), GraphError> {
    let build = |recompute: bool| -> Result<(Graph, Vec<Option<ValueId>>, ValueId), GraphError> {
        let f = |dims: &[usize]| TensorType::new(DType::F32, refrain_tensor::Shape::new(dims).unwrap());
        let weight = |name: &str, dims: &[usize]| Weight { name: name.into(), ty: f(dims) };
        let weights = vec![weight("w0", &[6, 6]), weight("w1", &[6, 6]), weight("n", &[6])];
        let mut b = GraphBuilder::new(weights, Vec::<State>::new());
        let mut x = b.input("x", f(&[5, 6]))?;
        let mut ranges = Vec::new();
        for layer in 0..2 {
            let first = b.graph().nodes().len();
            let norm = b.weight(WeightId::from_idx(2));
            let h = b.rms_norm(x, norm, 1e-5, "norm")?;
            let w = b.weight(WeightId::from_idx(layer));
            let h = b.linear(h, w, None, "linear")?;
            let h = b.unary(Unary::GeluTanh, h)?;
            x = b.add(x, h)?;
            ranges.push(first..b.graph().nodes().len());
        }
        let squares = b.binary(Binary::Mul, x, x)?;
        let loss = b.node(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[squares], "loss")?[0];
        let wrt: Vec<ValueId> = (0..3).map(|i| b.weight(WeightId::from_idx(i))).collect();
        let ranges = if recompute { ranges } else { Vec::new() };
        let gradients = b.gradients(loss, &wrt, &ranges).unwrap();
        Ok((b.finish(), gradients, loss))
    };
    let mut rng = Rng::new(3);
    let mut found = Vec::new();
    let (plain, ..) = build(false)?;
    let start: BTreeMap<ValueId, F64Array> = float_leaves(&plain)
        .into_iter()
        .map(|id| {
            let shape = plain.value(id).ty.shape;
            (id, F64Array::new(shape, (0..shape.n_elements()).map(|_| rng.normal().into()).collect()))
        })
        .collect();
    for recompute in [false, true] {
        let (graph, gradients, _) = build(recompute)?;
        let again = graph.nodes().iter().filter(|n| n.label.ends_with(".again")).count();
        assert_eq!(again > 0, recompute);
        let values = evaluate(&graph, &start);
        found.push(gradients.iter().map(|g| values[g.unwrap().idx()].clone().unwrap()).collect::<Vec<_>>());
    }
    assert_eq!(found[0], found[1]);
    Ok(())
}

#[test]
fn ops_without_gradient_report_the_reason() -> Result<(), GraphError> {
    let f = |dims: &[usize]| TensorType::new(DType::F32, refrain_tensor::Shape::new(dims).unwrap());
    let table = Weight { name: "table".into(), ty: TensorType::new(DType::Q8_0, [4, 32]) };
    let mut b = GraphBuilder::new(vec![table], Vec::new());
    let ids = b.input("ids", TensorType::new(DType::I32, [3]))?;
    let table = b.weight(WeightId::from_idx(0));
    let rows = b.gather_rows(table, ids, DType::F32)?;
    let error = b.gradients(rows, &[table], &[]).unwrap_err();
    assert_eq!(error.to_string(), "gather_rows: gather_rows has no gradient: its table is quantised");
    // A router, and everything that depends on it.
    let logits = b.input("logits", f(&[2, 5]))?;
    let route = Route {
        n_choices: 2,
        score: RouteScore::Softmax,
        biased: false,
        scaled: false,
        groups: None,
        renormalise: true,
        scale: 1.0,
    };
    let made = b.node(Op::Moe(MoeOp::Route(route)), &[logits], "router")?;
    let error = b.gradients(made[1], &[logits], &[]).unwrap_err();
    let text = "router: route has no gradient: training of mixtures of experts is not supported";
    assert_eq!(error.to_string(), text);
    // Values that the loss does not depend on have no gradient, which is not an error.
    let other = b.input("other", f(&[2]))?;
    assert_eq!(b.gradients(rows, &[other], &[]).unwrap(), [None]);
    Ok(())
}
