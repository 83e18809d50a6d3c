//! Which groups of nodes have kernels.

use refrain_graph::{Fusion, GroupKind, GroupQuery, Op, Products, Seen};
use refrain_tensor::Layout;

use crate::rules::{ChoiceRules, ONE_ATTENTION};
use crate::{attend, experts, fused, prefill, train_products};

/// Implements [`refrain_graph::Backend::fuses`].
pub(crate) fn fuses(query: &GroupQuery<'_>, rules: ChoiceRules<'_>) -> Fusion {
    let card = rules.card;
    match query.kind {
        GroupKind::One(_) => Fusion::Smaller,
        GroupKind::Products(products) if train_products::multiply_values(query, products) => Fusion::Smaller,
        GroupKind::Products(products) if rules.by_rows() && n_rows(&rows_of(query, products).layout) == 1 => {
            fused::fuses(query, products, card)
        }
        GroupKind::Products(products) => prefill::fuses(query, products, rules),
        GroupKind::Attend(_) | GroupKind::AttendStored(_) if !rules.by_rows() => {
            Fusion::No(ONE_ATTENTION.to_owned())
        }
        GroupKind::Attend(attend) => attend::fuses(query, attend, card),
        GroupKind::AttendStored(attend) => attend::fuses_stored(query, attend, card),
        // In-place rope is allowed: the thread that reads an element also writes it.
        GroupKind::RopeAppend(_) => Fusion::Staged,
        // Whether experts run as one group depends on the number of rows.
        GroupKind::Experts(_) if !rules.by_rows() => Fusion::Smaller,
        GroupKind::Experts(chain) => experts::fuses(query, chain),
    }
}

/// The rows to multiply.
fn rows_of(query: &GroupQuery<'_>, products: &Products) -> Seen {
    query.input(products.parts[0].product, 0)
}

pub(crate) fn n_rows(layout: &Layout) -> usize {
    let shape = layout.shape();
    shape.n_elements() / shape.dim_back(0).max(1)
}

/// Whether this is a weight vector. Kernels prefetch such vectors before they wait for their inputs, so
/// nothing may write them.
pub(crate) fn is_vector_weight(seen: &Seen) -> bool {
    seen.is_weight() && seen.layout.shape().rank() == 1
}

/// Epsilon that a norm adds to the mean square.
pub(crate) fn eps(op: &Op) -> Option<f32> {
    match op {
        Op::RmsNorm { eps } | Op::AddRmsNorm { eps } => Some(*eps),
        Op::View(_)
        | Op::Copy
        | Op::Cast(_)
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Reduce { .. }
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::ScatterAddRows { .. }
        | Op::SpanAttention(_)
        | Op::Moe(_)
        | Op::Lora(_)
        | Op::Train(_)
        | Op::Softmax
        | Op::MatMul
        | Op::GatherRows(_)
        | Op::Gate(_)
        | Op::Rope(_)
        | Op::KvAppend
        | Op::KvAppendBytes
        | Op::Attention(_)
        | Op::Recurrent(_)
        | Op::Sample(_)
        | Op::Accumulate
        | Op::HostCall(_) => None,
    }
}
