//! Runs of steps around the products of one row that become one launch: the norm before them, biases, the gate behind.
//!
//! A run is taken only where nobody else reads what is no longer written, and where nothing that the launch reads lies
//! where it writes: its blocks do not wait for each other.

use std::collections::HashMap;

use refrain_graph::{Binary, BufferId, Gate, Op, Operand, Place, Plan, Step};
use refrain_kernels::{MAX_PARTS, has_product, products_join};
use refrain_tensor::DType;

/// How many steps a run has at most; a plan keeps what a run reads for so long.
pub(crate) const MAX_RUN: usize = 12;

/// One product with its bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    /// The product.
    pub(crate) step: &'a Step,
    /// The vector that is added.
    pub(crate) bias: Option<&'a Operand>,
    /// What is written: the sum with the bias, if there is one.
    pub(crate) out: &'a Operand,
}

/// What the row is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Row<'a> {
    /// As it is.
    Plain(&'a Operand),
    /// `RmsNorm`.
    Norm(&'a Step),
    /// `AddRmsNorm`, whose second summand may be an `RmsNorm` itself.
    AddNorm { inner: Option<&'a Step>, add: &'a Step },
}

/// Steps that become one launch, or one for each set of dtypes that go together.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) row: Row<'a>,
    pub(crate) parts: Vec<Part<'a>>,
    /// The gate behind two products: first the one that goes through the function.
    pub(crate) gate: Option<(Gate, &'a Step)>,
    /// The steps that it takes.
    pub(crate) steps: &'a [Step],
}

/// Who reads each buffer.
pub(crate) struct Readers(HashMap<BufferId, usize>);

impl Readers {
    pub(crate) fn of(plan: &Plan) -> Readers {
        let mut readers = HashMap::new();
        let steps = plan.steps().iter().flat_map(|step| &step.inputs);
        steps.chain(plan.outputs()).for_each(|operand| *readers.entry(operand.buffer).or_insert(0) += 1);
        Readers(readers)
    }

    fn count(&self, operand: &Operand) -> usize {
        self.0.get(&operand.buffer).copied().unwrap_or(0)
    }
}

fn n_rows(operand: &Operand) -> usize {
    let shape = operand.layout.shape();
    shape.n_elements() / shape.dim_back(0).max(1)
}

/// Whether a row lies in one piece that can be read sixteen bytes at a time.
fn is_aligned_row(x: &Operand) -> bool {
    x.layout.is_contiguous()
        && x.layout.offset().is_multiple_of(4)
        && x.layout.shape().dim_back(0).is_multiple_of(4)
}

fn is_vector_weight(plan: &Plan, operand: &Operand) -> bool {
    matches!(plan.buffer(operand.buffer).place, Place::Weight(_)) && operand.layout.shape().rank() == 1
}

/// The run that begins with the first of some steps, if there is one.
pub(crate) fn run<'a>(plan: &Plan, readers: &Readers, steps: &'a [Step]) -> Option<Run<'a>> {
    let (row, x, mut len) = row(plan, readers, steps)?;
    let mut parts: Vec<Part<'a>> = Vec::new();
    while let Some(step) = steps.get(len) {
        if !is_product(plan, step, x) || parts.len() == MAX_PARTS {
            break;
        }
        len += 1;
        let made = &step.outputs[0];
        match steps.get(len).and_then(|next| bias(plan, readers, made, next)) {
            Some((bias, out)) => {
                len += 1;
                parts.push(Part { step, bias: Some(bias), out });
            }
            None => parts.push(Part { step, bias: None, out: made }),
        }
    }
    let normed = !matches!(row, Row::Plain(_));
    // A normed row that others read too must be written by its own step.
    if parts.is_empty() || (normed && readers.count(x) != parts.len()) {
        return None;
    }
    let gate = steps.get(len).and_then(|step| gate(readers, &mut parts, step));
    let steps = &steps[..len + usize::from(gate.is_some())];
    let run = Run { row, parts, gate, steps };
    let worth_it = normed || run.parts.len() > 1 || steps.len() > 1;
    (worth_it && steps.len() <= MAX_RUN && run.is_apart(plan)).then_some(run)
}

/// A product alone: no longer than one step.
pub(crate) fn single<'a>(plan: &Plan, step: &'a Step) -> Option<Run<'a>> {
    let x = step.inputs.first()?;
    let part = Part { step, bias: None, out: step.outputs.first()? };
    let run = Run { row: Row::Plain(x), parts: vec![part], gate: None, steps: std::slice::from_ref(step) };
    (is_product(plan, step, x) && run.is_apart(plan)).then_some(run)
}

/// What makes the row, the row itself, and how many steps that takes.
fn row<'a>(plan: &Plan, readers: &Readers, steps: &'a [Step]) -> Option<(Row<'a>, &'a Operand, usize)> {
    let first = steps.first()?;
    // A norm's weights are asked for before the launch waits: nothing may write them. What it sums is read in one piece.
    let add_norm = |step: &'a Step| {
        matches!(step.op, Op::AddRmsNorm { .. })
            && n_rows(&step.outputs[1]) == 1
            && is_vector_weight(plan, &step.inputs[2])
            && step.inputs[..2].iter().all(is_aligned_row)
    };
    let found = if matches!(first.op, Op::MatMul) {
        (Row::Plain(&first.inputs[0]), &first.inputs[0], 0)
    } else if add_norm(first) {
        (Row::AddNorm { inner: None, add: first }, &first.outputs[1], 1)
    } else if let Op::RmsNorm { eps } = &first.op
        && is_vector_weight(plan, &first.inputs[1])
        && is_aligned_row(&first.inputs[0])
    {
        let second = steps.get(1).filter(|step| {
            let same_eps = matches!(&step.op, Op::AddRmsNorm { eps: other } if other == eps);
            same_eps && add_norm(step) && step.inputs[1] == first.outputs[0]
        });
        match second.filter(|_| readers.count(&first.outputs[0]) == 1) {
            Some(add) => (Row::AddNorm { inner: Some(first), add }, &add.outputs[1], 2),
            None => (Row::Norm(first), &first.outputs[0], 1),
        }
    } else {
        return None;
    };
    Some(found).filter(|(_, x, _)| n_rows(x) == 1)
}

fn is_product(plan: &Plan, step: &Step, x: &Operand) -> bool {
    // The whole weight, seen transposed, in rows that a kernel can read sixteen bytes at a time.
    let whole = |w: &Operand| {
        w.layout.shape().rank() == 2
            && w.layout.shape().dims()[0].is_multiple_of(8)
            && w.layout.transpose().is_ok_and(|l| l.is_contiguous() && l.offset() == 0)
    };
    matches!(step.op, Op::MatMul)
        && step.inputs[0] == *x
        && n_rows(x) == 1
        && is_aligned_row(x)
        && whole(&step.inputs[1])
        && has_product(step.inputs[1].dtype)
        && matches!(plan.buffer(step.inputs[1].buffer).place, Place::Weight(_))
        && step.outputs[0].layout.shape().n_elements() > 0
}

/// The vector that a step adds to a product nobody else reads, and the sum.
fn bias<'a>(
    plan: &Plan,
    readers: &Readers,
    made: &Operand,
    step: &'a Step,
) -> Option<(&'a Operand, &'a Operand)> {
    let adds = matches!(step.op, Op::Binary(Binary::Add)) && step.inputs[0] == *made;
    let fits = adds
        && readers.count(made) == 1
        && is_vector_weight(plan, &step.inputs[1])
        && step.outputs[0].layout.shape() == made.layout.shape()
        && step.inputs[1].layout.shape().n_elements() == step.outputs[0].layout.shape().n_elements();
    fits.then(|| (&step.inputs[1], &step.outputs[0]))
}

/// A gate over exactly two products of one shape and dtype that nobody else reads; puts its left side first.
fn gate<'a>(readers: &Readers, parts: &mut [Part<'a>], step: &'a Step) -> Option<(Gate, &'a Step)> {
    let (Op::Gate(kind), [a, b]) = (&step.op, parts) else { return None };
    let sides = [&step.inputs[0], &step.inputs[1]];
    let swapped = [b.out, a.out] == sides;
    let same = a.step.inputs[1].ty() == b.step.inputs[1].ty();
    if !same || !(swapped || [a.out, b.out] == sides) || sides.iter().any(|s| readers.count(s) != 1) {
        return None;
    }
    if swapped {
        std::mem::swap(a, b);
    }
    Some((*kind, step))
}

impl<'a> Run<'a> {
    /// Parts in as few sets as can be launched together.
    pub(crate) fn sets(&self, dtype: impl Fn(&Step) -> DType) -> Vec<Vec<Part<'a>>> {
        let mut sets: Vec<Vec<Part<'a>>> = Vec::new();
        for part in &self.parts {
            let joins = |set: &Vec<Part<'a>>| {
                let dtypes: Vec<DType> =
                    set.iter().map(|p| dtype(p.step)).chain([dtype(part.step)]).collect();
                products_join(&dtypes)
            };
            match sets.iter_mut().find(|set| joins(set)) {
                Some(set) => set.push(*part),
                None => sets.push(vec![*part]),
            }
        }
        sets
    }

    /// What the launch reads besides weights.
    fn reads(&self) -> Vec<&'a Operand> {
        match self.row {
            Row::Plain(x) => vec![x],
            Row::Norm(step) => vec![&step.inputs[0]],
            Row::AddNorm { inner, add } => {
                vec![&add.inputs[0], inner.map_or(&add.inputs[1], |i| &i.inputs[0])]
            }
        }
    }

    /// What the launch writes.
    pub(crate) fn writes(&self) -> Vec<&'a Operand> {
        let mut writes: Vec<&Operand> = match self.gate {
            Some((_, step)) => vec![&step.outputs[0]],
            None => self.parts.iter().map(|p| p.out).collect(),
        };
        if let Row::AddNorm { add, .. } = self.row {
            writes.push(&add.outputs[0]);
        }
        writes
    }

    fn is_apart(&self, plan: &Plan) -> bool {
        let (reads, writes) = (self.reads(), self.writes());
        let clash = |w: &&Operand| reads.iter().any(|r| !crate::group::apart(plan, w, r));
        let twice = |i: usize| writes[..i].iter().any(|other| !crate::group::apart(plan, writes[i], other));
        !writes.iter().any(clash) && !(0..writes.len()).any(twice)
    }

    /// The steps' names.
    pub(crate) fn label(&self) -> String {
        let mut labels: Vec<&str> = match self.row {
            Row::Plain(_) => Vec::new(),
            Row::Norm(step) => vec![&step.label],
            Row::AddNorm { inner, add } => {
                inner.map(|i| i.label.as_str()).into_iter().chain([add.label.as_str()]).collect()
            }
        };
        labels.extend(self.parts.iter().map(|p| p.step.label.as_str()));
        labels.extend(self.gate.map(|(_, step)| step.label.as_str()));
        labels.join(" + ")
    }
}
