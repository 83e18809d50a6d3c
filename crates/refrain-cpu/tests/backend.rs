//! The op-case table on the CPU, against the reference.

use refrain_cpu::CpuBackend;
use refrain_cpu::simd::Level;
use refrain_graph::{
    Backend, CompileError, Graph, GraphBuilder, Io, Op, Place, Ran, Reason, StateKind, Unary, ValueId,
    ValueOrigin,
};
use refrain_tensor::{Bytes, DType, HostTensor};
use refrain_testkit::{Arg, Case, Feed, Tol, cases, check_all};
use std::collections::{BTreeSet, HashMap};

/// Why a case failed or was skipped.
enum Trouble {
    Unsupported,
    Other(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Unsupported => write!(f, "unsupported"),
            Trouble::Other(what) => write!(f, "{what}"),
        }
    }
}

/// Runs a graph twice over a poisoned arena; the second run continues with the states of the first where there
/// are any. Adds the kernels that ran to `seen`.
fn run(
    backend: &mut CpuBackend,
    graph: &Graph,
    feed: &Feed,
    seen: &mut BTreeSet<&'static str>,
) -> Result<Vec<HostTensor>, Trouble> {
    let other = |e: &dyn std::fmt::Debug| Trouble::Other(format!("{e:?}"));
    let weights = backend.load(graph.weights(), feed.weights.clone()).map_err(|e| other(&e))?;
    let mut states = backend.allocate(graph.states()).map_err(|e| other(&e))?;
    let mut compiled = match backend.compile(graph) {
        Ok(compiled) => compiled,
        Err(CompileError::Unsupported { .. }) => return Err(Trouble::Unsupported),
        Err(e) => return Err(other(&e)),
    };
    seen.extend(compiled.kernels().map(|(_, kernel)| kernel));
    let control = feed.control(backend.plan(&compiled).control());
    let goes_on = graph.states().iter().any(|state| state.kind == StateKind::Whole);
    for _ in 0..if goes_on { 1 } else { 2 } {
        compiled.poison(f32::NAN);
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        let ran = backend.run(&mut compiled, io).map_err(|e| other(&e))?;
        assert_eq!(ran, Ran::Eager(Reason::NoGraphsHere { backend: "cpu" }));
    }
    let plan = backend.plan(&compiled).clone();
    let mut outputs = Vec::new();
    for (i, operand) in plan.outputs().iter().enumerate() {
        let ty = operand.ty();
        let mut bytes = vec![0; ty.dtype.bytes_for(ty.shape.n_elements()).unwrap()];
        match plan.buffer(operand.buffer).place {
            Place::State(id) => bytes.copy_from_slice(states.bytes(id)),
            Place::Arena { .. } => backend.read(&compiled, i, &mut bytes).map_err(|e| other(&e))?,
            // An output that is a bare input needs no backend.
            Place::Weight(_) | Place::Control { .. } => return Err(Trouble::Unsupported),
        }
        outputs.push(HostTensor::new(ty.dtype, ty.shape, Bytes::new(bytes)).unwrap());
    }
    Ok(outputs)
}

/// The same case with its float inputs copied to the arena first, where a model's values are.
fn through_arena(case: &Case) -> Case {
    let graph = &case.graph;
    let mut builder = GraphBuilder::new(graph.weights().to_vec(), graph.states().to_vec());
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for (idx, value) in graph.values().iter().enumerate() {
        let id = ValueId::from_idx(idx);
        let made = match value.origin {
            ValueOrigin::Input(i) => {
                let input = &graph.inputs()[i.idx()];
                let made = builder.input(&input.name, input.ty).unwrap();
                // Sampling parameters stay in the control block; only the logits are computed.
                let moved =
                    input.ty.dtype == DType::F32 && (i.idx() == 0 || !matches!(case.op, Op::Sample(_)));
                if moved { builder.unary(Unary::Affine { mul: 1.0, add: 0.0 }, made).unwrap() } else { made }
            }
            ValueOrigin::Weight(w) => builder.weight(w),
            ValueOrigin::State(s) => builder.state(s),
            ValueOrigin::Node { .. } => continue,
        };
        map.insert(id, made);
    }
    for node in graph.nodes() {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = builder.node(node.op.clone(), &inputs, &node.label).unwrap();
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    for output in graph.outputs() {
        builder.output(&output.name, map[&output.value]).unwrap();
    }
    Case { graph: builder.finish(), ..case.clone() }
}

/// Adjusts tolerances. Matrix products with quantised weights round their activations to 8 bits, an error of
/// about 0.7 % of a typical output, and cases have few outputs, all of which may be small. The kernels' own
/// tests check that the integer part is exact. Products with BF16 weights round activations to BF16, an error
/// of at most 2^-9 each.
fn on_this_backend(case: &Case) -> Case {
    let has = |is: fn(DType) -> bool| case.graph.weights().iter().any(|w| is(w.ty.dtype));
    let tol = match case.op {
        Op::MatMul if has(DType::is_quantized) => Tol::Whole(8e-2),
        Op::MatMul if has(|d| d == DType::BF16) => Tol::Whole(1e-2),
        // The gate multiplies two such products.
        Op::Moe(_) if has(DType::is_quantized) => Tol::Whole(1.5e-1),
        Op::Moe(_) if has(|d| d == DType::BF16) => Tol::Whole(4e-2),
        _ => case.tol,
    };
    Case { tol, ..through_arena(case) }
}

#[test]
fn every_case_agrees_with_the_reference_at_every_level() {
    for level in Level::available() {
        let mut backend = CpuBackend::new(2).unwrap().with_level(level);
        let mut seen = BTreeSet::new();
        let (mut supported, mut n_unsupported) = (Vec::new(), 0);
        for case in cases() {
            let case = on_this_backend(&case);
            match run(&mut backend, &case.graph, &case.feed, &mut seen) {
                Err(Trouble::Unsupported) => n_unsupported += 1,
                _ => supported.push(case),
            }
        }
        // The others have an output that is a bare input, or values of a dtype that only weights have.
        assert!(supported.len() >= 600, "{} ran, {n_unsupported} did not", supported.len());
        check_all(&supported, |graph, feed| run(&mut backend, graph, feed, &mut seen));
        let kernels = [
            "products",
            "gather",
            "rms_norm",
            "add_rms_norm",
            "unary",
            "binary",
            "gate",
            "rope",
            "kv_append",
            "attention",
            "sample",
            "route",
            "experts",
            "matmul",
            "span_attention",
            "span_attention_grad",
            "scatter_add_rows",
            "rms_norm_grad",
            "unary_grad",
            "gate_grad",
            "softmax",
            "softmax_grad",
            "rope_grad",
            "cross_entropy",
            "dropout",
            "reduce",
            "copy",
            "cast",
            "accumulate",
            "sum_squares",
            "adamw",
            "reference",
        ];
        let missing: Vec<_> = kernels.iter().filter(|k| !seen.contains(*k)).collect();
        assert!(missing.is_empty(), "no case ran {missing:?}");
    }
}

#[test]
fn thread_counts_and_levels_give_the_same_bits() {
    let reference_level = Level::available()[0];
    for case in cases() {
        let case = on_this_backend(&case);
        let mut results = Vec::new();
        for (threads, level) in [(1, reference_level), (3, Level::detect())] {
            let mut backend = CpuBackend::new(threads).unwrap().with_level(level);
            results.push(run(&mut backend, &case.graph, &case.feed, &mut BTreeSet::new()));
        }
        let [Ok(a), Ok(b)] = &results[..] else { continue };
        for (a, b) in a.iter().zip(b) {
            assert_eq!(a.bytes().as_slice(), b.bytes().as_slice(), "{}", case.name);
        }
    }
}

/// The backward pass of a matrix product with a quantised weight reads that weight untransposed.
#[test]
fn products_with_untransposed_quantised_weights_decode_them() {
    let mut quantised = Vec::new();
    for dtype in DType::ALL.into_iter().filter(|d| d.is_quantized()) {
        for (m, k, n) in [(37, 40, 512), (3, 700, 256)] {
            let args = vec![Arg::float(DType::F32, [m, k]), Arg::weight(dtype, [k, n])];
            let name = format!("{dtype} {m} x {k} x {n}, not transposed");
            quantised.push(through_arena(&Case::one_node(name, Op::MatMul, Tol::Whole(1e-5), args)));
        }
    }
    assert!(quantised.len() >= 20);
    let mut seen = BTreeSet::new();
    for (n_threads, level) in [(1, Level::PORTABLE), (2, Level::detect())] {
        let mut backend = CpuBackend::new(n_threads).unwrap().with_level(level);
        check_all(&quantised, |graph, feed| run(&mut backend, graph, feed, &mut seen));
    }
    assert!(seen.contains("matmul") && !seen.contains("reference"), "{seen:?}");
}
