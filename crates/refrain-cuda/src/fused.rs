//! Fused matrix products of one row: the norm before them, their biases, and the gate after them.
//!
//! Blocks of such a launch do not wait for each other, so its buffers may not overlap those of other steps in
//! the group.

use refrain_driver::api::DeviceInfo;
use refrain_driver::{Buf, Launch};
use refrain_graph::{Fusion, GroupQuery, Op, Operand, Place, Plan, Producer, ProductPart, Products, Step};
use refrain_kernels::{
    ExpertLogitsArgs, KernelError, MAX_EXPERTS, MAX_PARTS, MAX_ROUTED_ROW, ProductArgs,
    ProductWeight as Part, has_product, product_too_long, products_join,
};
use refrain_tensor::{DType, Layout};

use crate::group::{eps, is_vector_weight, n_rows};
use crate::lower::Lowering;

/// Whether a row is contiguous and can be read with 16-byte loads.
fn is_aligned_row(layout: &Layout) -> bool {
    layout.is_contiguous()
        && layout.offset().is_multiple_of(4)
        && layout.shape().dim_back(0).is_multiple_of(4)
}

/// The reason why [`refrain_kernels::Kernels::product`] cannot multiply a row of layout `x` with a whole
/// weight, whose layout `w` is transposed.
fn misfit(x: &Layout, w: &Layout, dtype: DType) -> Option<String> {
    if !has_product(dtype) {
        return Some(format!("no fused single-row kernel supports {dtype} weights"));
    }
    // Rows that a kernel can read with 16-byte loads.
    let whole = w.shape().rank() == 2
        && w.shape().dims()[0].is_multiple_of(8)
        && w.transpose().is_ok_and(|l| l.is_contiguous() && l.offset() == 0);
    if !whole {
        return Some(format!(
            "the weight is a partial view {}, or its rows are not a multiple of 8 elements",
            w.shape()
        ));
    }
    (!is_aligned_row(x)).then(|| format!("the row {} is not 16-byte aligned and contiguous", x.shape()))
}

/// Whether one launch per set of dtypes runs a whole group of one row.
pub(crate) fn fuses(query: &GroupQuery<'_>, products: &Products, card: &DeviceInfo) -> Fusion {
    if products.producer.is_none() && products.gate.is_none() {
        // Each part has a kernel that does not depend on the others.
        return Fusion::Joined;
    }
    match &products.producer {
        // The preceding launch produces the rows.
        Some(Producer::Gate(_) | Producer::Attention(_)) => return Fusion::Smaller,
        Some(Producer::Norm(_) | Producer::AddNorm { .. }) | None => {}
    }
    if joins_router(query, products) {
        return Fusion::Joined;
    }
    match obstacle(query, products, card) {
        Some(because) => Fusion::No(because),
        None => Fusion::Joined,
    }
}

/// Whether one launch runs a norm and a small F32 product of its result, as before a router. Other steps may
/// read the norm's output.
fn joins_router(query: &GroupQuery<'_>, products: &Products) -> bool {
    let ([part], None) = (&products.parts[..], products.gate) else { return false };
    let w = query.input(part.product, 1);
    let Ok(rows) = w.layout.transpose() else { return false };
    let fits = part.bias.is_none()
        && w.is_weight()
        && w.dtype == DType::F32
        && rows.is_contiguous()
        && rows.offset() == 0
        && rows.shape().rank() == 2
        && rows.shape().dims()[0] <= MAX_EXPERTS
        && rows.shape().dims()[1] <= MAX_ROUTED_ROW;
    let aligned =
        |node, i| is_aligned_row(&query.input(node, i).layout) && query.input(node, i).dtype == DType::F32;
    let rows_fit = match products.producer {
        Some(Producer::Norm(norm)) => aligned(norm, 0) && is_vector_weight(&query.input(norm, 1)),
        Some(Producer::AddNorm { inner: None, add }) => {
            aligned(add, 0) && aligned(add, 1) && is_vector_weight(&query.input(add, 2))
        }
        Some(Producer::AddNorm { inner: Some(_), .. } | Producer::Gate(_) | Producer::Attention(_))
        | None => false,
    };
    let made = products
        .producer
        .map(|producer| (producer.node(), usize::from(matches!(producer, Producer::AddNorm { .. }))));
    fits && rows_fit && made.is_some_and(|(node, i)| n_rows(&query.output(node, i).layout) == 1)
}

/// Whether products of one row, grouped with their norm, run as the logits of a router.
pub(crate) fn is_router(plan: &Plan, products: &Products) -> bool {
    let is_f32 = |part: &ProductPart| plan.step(part.product).inputs[1].dtype == DType::F32;
    products.producer.is_some() && products.parts.iter().all(is_f32)
}

fn obstacle(query: &GroupQuery<'_>, products: &Products, card: &DeviceInfo) -> Option<String> {
    let weight = |part: &ProductPart| query.input(part.product, 1);
    let x = query.input(products.parts[0].product, 0);
    let dtypes: Vec<DType> = products.parts.iter().map(|part| weight(part).dtype).collect();
    let k = x.layout.shape().dim_back(0);
    let misfit = |part: &ProductPart| misfit(&x.layout, &weight(part).layout, weight(part).dtype);
    if let Some(because) = products.parts.iter().find_map(misfit) {
        return Some(because);
    }
    if let Some(because) = sets(&dtypes).iter().find_map(|set| {
        let dtypes: Vec<DType> = set.iter().map(|&i| dtypes[i]).collect();
        product_too_long(&dtypes, k, card)
    }) {
        return Some(because);
    }
    if products.gate.is_some() {
        let types: Vec<_> =
            products.parts.iter().map(|p| (weight(p).dtype, weight(p).layout.shape())).collect();
        if types.windows(2).any(|w| w[0] != w[1]) {
            return Some("gate and up have different types or shapes".to_owned());
        }
    }
    let aligned = |seen: refrain_graph::Seen| is_aligned_row(&seen.layout);
    let fits = match products.producer {
        None => true,
        Some(Producer::Norm(norm)) => {
            aligned(query.input(norm, 0)) && is_vector_weight(&query.input(norm, 1))
        }
        Some(Producer::AddNorm { inner, add }) => {
            let inner_fits = inner.is_none_or(|inner| {
                eps(query.op(inner)) == eps(query.op(add))
                    && aligned(query.input(inner, 0))
                    && is_vector_weight(&query.input(inner, 1))
            });
            let b = if inner.is_some() { true } else { aligned(query.input(add, 1)) };
            inner_fits && b && aligned(query.input(add, 0)) && is_vector_weight(&query.input(add, 2))
        }
        Some(Producer::Gate(_) | Producer::Attention(_)) => false,
    };
    if !fits {
        return Some("the norm's rows are not aligned, or its weight is not a vector weight".to_owned());
    }
    let made = products.producer.as_ref().map(|producer| {
        let node = producer.node();
        let output = usize::from(matches!(producer, Producer::AddNorm { .. }));
        (n_rows(&query.output(node, output).layout), query.is_internal(node, output))
    });
    match made {
        Some((1, true)) | None => None,
        Some((1, false)) => Some("another step reads the norm's output".to_owned()),
        Some((n, _)) => Some(format!("the norm has {n} rows, the product has 1")),
    }
}

/// Partitions dtypes into few sets that one launch can multiply together; returns indices.
pub(crate) fn sets(dtypes: &[DType]) -> Vec<Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for i in 0..dtypes.len() {
        let joins = |set: &&mut Vec<usize>| {
            let joined: Vec<DType> = set.iter().chain([&i]).map(|&j| dtypes[j]).collect();
            set.len() < MAX_PARTS && products_join(&joined)
        };
        match sets.iter_mut().find(joins) {
            Some(set) => set.push(i),
            None => sets.push(vec![i]),
        }
    }
    sets
}

/// Whether a step is a product of one row that [`refrain_kernels::Kernels::product`] can run alone.
pub(crate) fn is_single(plan: &Plan, step: &Step, card: &DeviceInfo) -> bool {
    let [x, w] = [&step.inputs[0], &step.inputs[1]];
    let k = x.layout.shape().dim_back(0);
    matches!(step.op, Op::MatMul)
        && n_rows(&x.layout) == 1
        && matches!(plan.buffer(w.buffer).place, Place::Weight(_))
        && misfit(&x.layout, &w.layout, w.dtype).is_none()
        && product_too_long(&[w.dtype], k, card).is_none()
}

/// One launch of a group of one row.
#[derive(Clone, Debug)]
pub(crate) struct SingleRowProducts {
    /// The group, for the ops around the products.
    pub(crate) group: Products,
    /// The parts of the group that this launch multiplies.
    pub(crate) parts: Vec<ProductPart>,
    /// Whether this is the first launch of the group. All launches compute the same residual sum; the first
    /// one stores it.
    pub(crate) is_first: bool,
}

impl SingleRowProducts {
    /// Joined labels of the steps.
    fn label(&self, plan: &Plan) -> String {
        let biases: Vec<_> = self.group.parts.iter().filter_map(|part| part.bias).collect();
        let nodes = refrain_graph::GroupKind::Products(self.group.clone()).nodes();
        let named = nodes.into_iter().filter(|node| !biases.contains(node));
        named.map(|node| plan.step(node).label.as_str()).collect::<Vec<_>>().join(" + ")
    }

    /// Outputs of the launch, each with its step.
    pub(crate) fn writes<'p>(&self, plan: &'p Plan) -> Vec<(&'p Step, &'p Operand)> {
        let mut writes = Vec::new();
        if let Some(Producer::AddNorm { add, .. }) = self.group.producer
            && self.is_first
        {
            writes.push((plan.step(add), &plan.step(add).outputs[0]));
        }
        match self.group.gate {
            Some(gate) => writes.push((plan.step(gate), &plan.step(gate).outputs[0])),
            None => writes.extend(self.parts.iter().map(|part| {
                let step = plan.step(part.bias.unwrap_or(part.product));
                (step, &step.outputs[0])
            })),
        }
        writes
    }
}

impl Lowering<'_> {
    /// Launch of a router's logits and the norm before them.
    pub(crate) fn router_logits(&self, products: &Products) -> Result<Launch, KernelError> {
        let plan = self.plan;
        let product = plan.step(products.parts[0].product);
        let (node, is_sum) = match products.producer {
            Some(Producer::Norm(norm)) => (norm, false),
            Some(Producer::AddNorm { inner: None, add }) => (add, true),
            Some(Producer::AddNorm { inner: Some(_), .. } | Producer::Gate(_) | Producer::Attention(_))
            | None => {
                unreachable!("no router follows these")
            }
        };
        let norm = plan.step(node);
        let dense = |step: &Step, operand: &Operand| self.dense(step, operand);
        self.kernels.expert_logits(&ExpertLogitsArgs {
            a: dense(norm, &norm.inputs[0])?,
            b: is_sum.then(|| dense(norm, &norm.inputs[1])).transpose()?,
            norm: self.vector(norm, if is_sum { 2 } else { 1 })?,
            w: self.weight(product)?,
            sum: is_sum.then(|| dense(norm, &norm.outputs[0])).transpose()?,
            x: dense(norm, &norm.outputs[usize::from(is_sum)])?,
            logits: dense(product, &product.outputs[0])?,
            n_experts: product.inputs[1].layout.shape().dims()[1],
            k: product.inputs[1].layout.shape().dims()[0],
            eps: eps(&norm.op).unwrap_or_default(),
            step: &crate::prefill::labels(&[norm, product]),
        })
    }

    /// Launch of some products of one row. For a launch with a gate, which is the longest of a layer, also
    /// returns how much it still has to read when its first weights have arrived.
    pub(crate) fn row_products(
        &self,
        run: &SingleRowProducts,
        previous_tail: Option<usize>,
    ) -> Result<(Launch, Option<usize>), KernelError> {
        let (plan, label) = (self.plan, run.label(self.plan));
        let first = plan.step(run.parts[0].product);
        let mut args = ProductArgs {
            a: self.dense(first, &first.inputs[0])?,
            b: None,
            inner: None,
            norm: None,
            eps: 0.0,
            sum: None,
            parts: &[],
            gate: None,
            k: first.inputs[1].layout.shape().dims()[0],
            previous_tail,
            step: &label,
        };
        let row = |step: &Step, operand: &Operand| -> Result<Buf, KernelError> { self.dense(step, operand) };
        match run.group.producer {
            None | Some(Producer::Gate(_) | Producer::Attention(_)) => {}
            Some(Producer::Norm(norm)) => {
                let norm = plan.step(norm);
                args.a = row(norm, &norm.inputs[0])?;
                (args.norm, args.eps) = (Some(self.vector(norm, 1)?), eps(&norm.op).unwrap_or_default());
            }
            Some(Producer::AddNorm { inner, add }) => {
                let (inner, add) = (inner.map(|inner| plan.step(inner)), plan.step(add));
                args.a = row(add, &add.inputs[0])?;
                (args.norm, args.eps) = (Some(self.vector(add, 2)?), eps(&add.op).unwrap_or_default());
                args.inner = inner.map(|inner| self.vector(inner, 1)).transpose()?;
                let (from, b) = inner.map_or((add, &add.inputs[1]), |inner| (inner, &inner.inputs[0]));
                args.b = Some(row(from, b)?);
                args.sum = run.is_first.then(|| row(add, &add.outputs[0])).transpose()?;
            }
        }
        let gate = run.group.gate.map(|gate| plan.step(gate));
        if let Some(Step { op: Op::Gate(kind), .. }) = gate {
            args.gate = Some(*kind);
        }
        let mut parts = Vec::with_capacity(run.parts.len());
        for part in &run.parts {
            let (step, bias) = (plan.step(part.product), part.bias.map(|bias| plan.step(bias)));
            let to = gate.or(bias).unwrap_or(step);
            parts.push(Part {
                w: self.weight(step)?,
                dtype: self.resident.dtype(plan, &step.inputs[1]),
                bias: bias.map(|bias| row(bias, &bias.inputs[1])).transpose()?,
                y: row(to, &to.outputs[0])?,
                n: step.inputs[1].layout.shape().dims()[1],
            });
        }
        args.parts = &parts;
        let left =
            if gate.is_some() && self.overlaps { self.kernels.product_tail_bytes(&args)? } else { None };
        Ok((self.kernels.product(&args)?, left))
    }
}
