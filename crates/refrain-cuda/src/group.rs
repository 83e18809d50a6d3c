//! Which steps of a plan one launch does.

use refrain_graph::{Op, Operand, Place, Plan, Step};
use refrain_kernels::MAX_PRODUCTS;

use crate::attend::AttendRun;
use crate::fused::{self, Readers, Run};

/// Steps that follow each other in a plan and become one launch, or one step with launches of its own.
#[derive(Debug)]
pub(crate) enum Group<'a> {
    One(&'a Step),
    /// Products of the same rows with weights of one dtype.
    Products(Vec<&'a Step>),
    /// What is around the products of one row.
    Fused(Run<'a>),
    /// Queries and keys turned, then keys and values put into the cache.
    RopeKv(&'a [Step; 4]),
    /// All between the products of queries, keys and values and the output's, for one token.
    Attend(AttendRun<'a>),
}

/// Cuts steps into groups. Steps of a group neither read nor overwrite what another one of it writes, so that their order
/// does not matter; but for [`AttendRun`], which is one kernel for a chain of them.
pub(crate) fn groups<'a>(plan: &Plan, steps: &'a [Step]) -> Vec<Group<'a>> {
    let mut out = Vec::with_capacity(steps.len());
    let mut rest = steps;
    let readers = Readers::of(plan);
    while let Some(first) = rest.first() {
        if let Some(run) = AttendRun::find(plan, rest) {
            rest = &rest[run.steps.len()..];
            out.push(Group::Attend(run));
            continue;
        }
        let run = fused::run(plan, &readers, rest).or_else(|| fused::single(plan, first));
        if let Some(run) = run {
            rest = &rest[run.len..];
            out.push(Group::Fused(run));
            continue;
        }
        if let Some(steps) = rest.first_chunk().filter(|steps| is_rope_kv(plan, steps)) {
            out.push(Group::RopeKv(steps));
            rest = &rest[steps.len()..];
            continue;
        }
        match products(plan, rest) {
            0 | 1 => {
                out.push(Group::One(first));
                rest = &rest[1..];
            }
            n => {
                by_dtype(&rest[..n], &mut out);
                rest = &rest[n..];
            }
        }
    }
    out
}

/// Rope of queries, rope of keys, append of those keys, append of values: at the same positions, and nothing is read
/// from where another of them writes. Turning in place is allowed: whoever reads an element writes it.
fn is_rope_kv(plan: &Plan, [q, k, keys, values]: &[Step; 4]) -> bool {
    let (Op::Rope(left), Op::Rope(right)) = (&q.op, &k.op) else { return false };
    if !matches!((&keys.op, &values.op), (Op::KvAppend, Op::KvAppend)) {
        return false;
    }
    let shape = |operand: &Operand| operand.layout.shape();
    let (q_in, q_out, k_in, k_out) = (&q.inputs[0], &q.outputs[0], &k.inputs[0], &k.outputs[0]);
    let v_in = &values.inputs[1];
    let same = left == right
        && q.inputs[1..] == k.inputs[1..]
        && keys.inputs[2..] == values.inputs[2..]
        && keys.inputs[2] == k.inputs[1]
        && keys.inputs[1] == *k_out
        && shape(v_in) == shape(k_out)
        && keys.inputs[0].ty() == values.inputs[0].ty()
        && keys.inputs[0].buffer != values.inputs[0].buffer;
    let in_place_or_apart = |to: &Operand, from: &Operand| to == from || apart(plan, to, from);
    same && shape(q_out).n_elements() > 0
        && shape(k_out).n_elements() > 0
        && in_place_or_apart(q_out, q_in)
        && in_place_or_apart(k_out, k_in)
        && [k_in, k_out, v_in].iter().all(|other| apart(plan, q_out, other))
        && [q_in, v_in].iter().all(|other| apart(plan, k_out, other))
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
pub(crate) fn apart(plan: &Plan, a: &Operand, b: &Operand) -> bool {
    let (left, right) = (plan.buffer(a.buffer), plan.buffer(b.buffer));
    match (left.place, right.place) {
        (Place::Arena { offset: l }, Place::Arena { offset: r }) => {
            l + left.bytes <= r || r + right.bytes <= l
        }
        _ => a.buffer != b.buffer,
    }
}
