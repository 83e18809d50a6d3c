//! Which steps of a plan one launch does.

use refrain_graph::{Op, Operand, Place, Plan, Step};
use refrain_kernels::MAX_PRODUCTS;

/// Steps that follow each other in a plan and become one launch, or one step with launches of its own.
#[derive(Debug)]
pub(crate) enum Group<'a> {
    One(&'a Step),
    /// Products of the same rows with weights of one dtype.
    Products(Vec<&'a Step>),
}

/// Cuts steps into groups. Steps of a group neither read nor overwrite what another one of it writes, so that their order
/// does not matter.
pub(crate) fn groups<'a>(plan: &Plan, steps: &'a [Step]) -> Vec<Group<'a>> {
    let mut out = Vec::with_capacity(steps.len());
    let mut rest = steps;
    while let Some(first) = rest.first() {
        let n = products(plan, rest);
        if n < 2 {
            out.push(Group::One(first));
            rest = &rest[1..];
            continue;
        }
        by_dtype(&rest[..n], &mut out);
        rest = &rest[n..];
    }
    out
}

/// How many of the first steps are products of the same rows with weights.
fn products(plan: &Plan, steps: &[Step]) -> usize {
    let is_product = |step: &Step| {
        let is_weight = matches!(plan.buffer(step.inputs[1].buffer).place, Place::Weight(_));
        is_weight && step.outputs[0].layout.shape().n_elements() > 0
    };
    let x = |step: &Step| step.inputs[0];
    let joins = |i: usize| {
        let step = &steps[i];
        matches!(step.op, Op::MatMul)
            && is_product(step)
            && x(step) == x(&steps[0])
            && apart(plan, &step.outputs[0], &x(step))
            && steps[..i].iter().all(|other| apart(plan, &step.outputs[0], &other.outputs[0]))
    };
    (0..steps.len()).take_while(|&i| joins(i)).count()
}

/// Groups of weights of one dtype, each in its order.
fn by_dtype<'a>(steps: &'a [Step], out: &mut Vec<Group<'a>>) {
    let mut open: Vec<Vec<&Step>> = Vec::new();
    for step in steps {
        let dtype = step.inputs[1].dtype;
        match open.iter_mut().find(|g| g[0].inputs[1].dtype == dtype && g.len() < MAX_PRODUCTS) {
            Some(group) => group.push(step),
            None => open.push(vec![step]),
        }
    }
    out.extend(open.into_iter().map(|group| match group.as_slice() {
        [one] => Group::One(one),
        _ => Group::Products(group),
    }));
}

/// Whether two operands have no byte in common.
fn apart(plan: &Plan, a: &Operand, b: &Operand) -> bool {
    let (left, right) = (plan.buffer(a.buffer), plan.buffer(b.buffer));
    match (left.place, right.place) {
        (Place::Arena { offset: l }, Place::Arena { offset: r }) => {
            l + left.bytes <= r || r + right.bytes <= l
        }
        _ => a.buffer != b.buffer,
    }
}
