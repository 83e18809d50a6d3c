//! An op case: a small graph, its inputs, and the tolerance of its results.

use crate::compare::{Tol, compare_tensors};
use crate::eval::{Feed, evaluate};
use crate::fill::{Fill, tensor};
use refrain_graph::{
    Graph, GraphBuilder, GraphError, Op, State, StateId, TensorType, View, Weight, WeightId,
};
use refrain_tensor::{DType, HostTensor, Shape};
use std::fmt;

/// A named case. Most graphs contain a single node that is not a view; attention also has the appends that
/// fill its caches.
#[derive(Clone, Debug)]
pub struct Case {
    /// Op name, followed by what distinguishes the case.
    pub name: String,
    /// Tested op.
    pub op: Op,
    /// Graph whose outputs are compared.
    pub graph: Graph,
    /// Weights, inputs and states.
    pub feed: Feed,
    /// Tolerance for float results.
    pub tol: Tol,
}

/// An operand of a case's node.
#[derive(Clone, Debug)]
pub struct Arg {
    pub(crate) ty: TensorType,
    pub(crate) fill: Fill,
    pub(crate) kind: ArgKind,
    pub(crate) views: Vec<View>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ArgKind {
    Input,
    Weight,
    State,
    Slots,
}

impl Arg {
    /// A float operand: a step input if F32, else a weight, because a control block holds no other float
    /// dtype.
    pub fn float(dtype: DType, dims: impl Into<Shape>) -> Arg {
        let kind = if dtype == DType::F32 { ArgKind::Input } else { ArgKind::Weight };
        Arg { ty: TensorType::new(dtype, dims), fill: Fill::Normal, kind, views: vec![] }
    }

    /// A weight.
    pub fn weight(dtype: DType, dims: impl Into<Shape>) -> Arg {
        Arg { ty: TensorType::new(dtype, dims), fill: Fill::Normal, kind: ArgKind::Weight, views: vec![] }
    }

    /// Integers in the control block.
    pub fn ints(dims: impl Into<Shape>, values: Vec<i32>) -> Arg {
        let ty = TensorType::new(DType::I32, dims);
        Arg { ty, fill: Fill::Ints(values), kind: ArgKind::Input, views: vec![] }
    }

    /// A state, zero before the step.
    pub fn state(dtype: DType, dims: impl Into<Shape>) -> Arg {
        Arg { ty: TensorType::new(dtype, dims), fill: Fill::Zero, kind: ArgKind::State, views: vec![] }
    }

    /// A slotted state, zero before the step.
    pub fn slots(dims: impl Into<Shape>) -> Arg {
        Arg { kind: ArgKind::Slots, ..Arg::state(DType::F32, dims) }
    }

    /// Returns the operand with other values.
    pub fn fill(mut self, fill: Fill) -> Arg {
        self.fill = fill;
        self
    }

    /// Returns the operand in another dtype of the same size.
    pub fn dtype(mut self, dtype: DType) -> Arg {
        self.ty.dtype = dtype;
        self
    }

    /// Returns the operand seen through an additional view.
    pub fn view(mut self, view: View) -> Arg {
        self.views.push(view);
        self
    }
}

impl Case {
    /// Builds a case of one node, whose outputs are those of the graph.
    ///
    /// # Panics
    /// If the op refuses the operands: then the table is wrong.
    pub fn one_node(name: impl Into<String>, op: Op, tol: Tol, args: Vec<Arg>) -> Case {
        let label = op.name();
        let node = op.clone();
        Case::build(name, op, tol, args, move |b, values| b.node(node, values, label))
    }

    /// Builds a case whose graph is created by a function from operands to outputs.
    ///
    /// # Panics
    /// If the graph cannot be built.
    pub fn build<F>(name: impl Into<String>, op: Op, tol: Tol, args: Vec<Arg>, nodes: F) -> Case
    where
        F: FnOnce(
            &mut GraphBuilder,
            &[refrain_graph::ValueId],
        ) -> Result<Vec<refrain_graph::ValueId>, GraphError>,
    {
        let name = format!("{}: {}", op.name(), name.into());
        match try_build(&args, seed_of(&name), nodes) {
            Ok((graph, feed)) => Case { name, op, graph, feed, tol },
            Err(e) => panic!("{name}: {e}"),
        }
    }
}

// Seeds depend only on the name, so cases keep their values when others are added or moved.
fn seed_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn try_build<F>(args: &[Arg], seed: u64, nodes: F) -> Result<(Graph, Feed), GraphError>
where
    F: FnOnce(
        &mut GraphBuilder,
        &[refrain_graph::ValueId],
    ) -> Result<Vec<refrain_graph::ValueId>, GraphError>,
{
    let of = |kind| args.iter().enumerate().filter(move |(_, a)| a.kind == kind);
    let name = |i: usize| format!("arg{i}");
    let weights = of(ArgKind::Weight).map(|(i, a)| Weight { name: name(i), ty: a.ty }).collect();
    let state = |(i, a): (usize, &Arg)| match (a.kind, a.ty.shape.rank()) {
        (ArgKind::Slots, _) => State::slots(name(i), a.ty),
        (_, 4) => State::paged(name(i), a.ty),
        _ => State::whole(name(i), a.ty),
    };
    let is_state = |(_, a): &(usize, &Arg)| matches!(a.kind, ArgKind::State | ArgKind::Slots);
    let states = args.iter().enumerate().filter(is_state).map(state).collect();
    let mut builder = GraphBuilder::new(weights, states);
    let mut feed = Feed::default();
    let mut values = Vec::with_capacity(args.len());
    for (i, arg) in args.iter().enumerate() {
        let (list, mut value) = match arg.kind {
            ArgKind::Input => (&mut feed.inputs, builder.input(&name(i), arg.ty)?),
            ArgKind::Weight => {
                let id = WeightId::from_idx(feed.weights.len());
                (&mut feed.weights, builder.weight(id))
            }
            ArgKind::State | ArgKind::Slots => {
                let id = StateId::from_idx(feed.states.len());
                (&mut feed.states, builder.state(id))
            }
        };
        list.push(tensor(arg.ty, &arg.fill, seed.wrapping_add(i as u64)));
        for view in &arg.views {
            value = builder.node(Op::View(view.clone()), &[value], "view")?[0];
        }
        values.push(value);
    }
    for (i, output) in nodes(&mut builder, &values)?.into_iter().enumerate() {
        builder.output(&format!("out{i}"), output)?;
    }
    Ok((builder.finish(), feed))
}

/// A case whose result differs from the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseFailure {
    /// Name of the case.
    pub case: String,
    /// Reason.
    pub because: String,
}

impl fmt::Display for CaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.case, self.because)
    }
}

/// Runs a case on a backend and compares its outputs with the reference's.
pub fn run_case<E: fmt::Display>(
    case: &Case,
    backend: impl FnOnce(&Graph, &Feed) -> Result<Vec<HostTensor>, E>,
) -> Result<(), CaseFailure> {
    let fail = |because: String| CaseFailure { case: case.name.clone(), because };
    let want = evaluate(&case.graph, &case.feed).map_err(|e| fail(format!("the reference failed: {e}")))?;
    let got = backend(&case.graph, &case.feed).map_err(|e| fail(e.to_string()))?;
    if got.len() != want.len() {
        return Err(fail(format!("got {} outputs, expected {}", got.len(), want.len())));
    }
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        compare_tensors(got, want, case.tol).map_err(|because| fail(format!("output {i}: {because}")))?;
    }
    Ok(())
}

/// Runs every case, then panics with all failures, one per line.
#[track_caller]
pub fn check_all<E: fmt::Display>(
    cases: &[Case],
    mut backend: impl FnMut(&Graph, &Feed) -> Result<Vec<HostTensor>, E>,
) {
    let failures: Vec<CaseFailure> = cases.iter().filter_map(|c| run_case(c, &mut backend).err()).collect();
    if !failures.is_empty() {
        let lines: Vec<String> = failures.iter().map(CaseFailure::to_string).collect();
        panic!("{} of {} cases failed:\n{}", failures.len(), cases.len(), lines.join("\n"));
    }
}
