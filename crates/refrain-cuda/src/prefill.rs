//! Steps of many rows: products and attention on tensor cores.
//!
//! Products with weights of 16 bits take their rows in 16 bits; quantised weights are decoded into one workspace first,
//! matrix after matrix, so that there is never a second copy of all of them. F32 weights keep the exact kernels. Norms,
//! gates and attention write their rows in 16 bits at once where nothing but such products reads them.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use refrain_driver::api::DeviceInfo;
use refrain_driver::{Buf, Context, DriverError, Launch, Lease, Stream};
use refrain_graph::{
    Fusion, GroupKind, GroupQuery, NodeId, Op, Plan, Producer, Products as ProductGroup, Step,
};
use refrain_kernels::{
    AddRmsNormArgs, BatchArgs, BatchPlan, BlasLt, BlasLtShape, DequantArgs, GEMM_DTYPES, GateArgs, GemmArgs,
    GemmPlan, KernelError, LINEAR_DTYPES, LinearPart, MAX_PRODUCTS, Narrow, PACKED_DTYPES, RmsNormArgs,
    has_batch, unaligned_rows,
};
use refrain_tensor::{DType, Layout};

use crate::error::CudaError;
use crate::group::n_rows;
use crate::lower::Lowering;
use crate::options::CublasLt;
use crate::warm::{Rehearsal, WarmPlan};

/// From this many rows on, but for weights of 16 bits, which need no decoding. Fewer rows of quantised weights, and F32
/// ones, have kernels that read the weights once for some of them.
pub(crate) const MIN_ROWS: usize = 16;
/// The largest matrix that is decoded as a whole; larger ones (a vocabulary's) are multiplied a few rows at a time.
const MAX_DECODED: u64 = 512 << 20;
const ALIGN: u64 = 256;

/// What multiplies the rows of prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptProducts {
    /// NVIDIA's library.
    CublasLt {
        /// Its version.
        version: (usize, usize),
        /// Where it was found.
        file: String,
    },
    /// The kernels of this engine.
    Own {
        /// Why not the library.
        because: String,
    },
}

impl fmt::Display for PromptProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PromptProducts::CublasLt { version: (major, minor), .. } => write!(f, "cuBLASLt {major}.{minor}"),
            PromptProducts::Own { because } => write!(f, "own tensor-core kernels: {because}"),
        }
    }
}

/// The library, if there is one, and what to say about it.
#[derive(Debug)]
pub(crate) struct Products {
    pub(crate) blas: Option<Arc<BlasLt>>,
    pub(crate) choice: PromptProducts,
}

impl Products {
    pub(crate) fn open(ctx: &Context, options: &CublasLt) -> Products {
        let opened = match options {
            CublasLt::Never => Err("cuBLASLt is switched off".to_owned()),
            CublasLt::IfFound if ctx.device().backend() != "cuda" => {
                Err("the device is simulated".to_owned())
            }
            CublasLt::IfFound => BlasLt::open(ctx, None).map_err(|e| e.to_string()),
            CublasLt::At(path) => BlasLt::open(ctx, Some(path)).map_err(|e| e.to_string()),
        };
        let (blas, choice) = match opened {
            Ok(blas) => {
                let choice =
                    PromptProducts::CublasLt { version: blas.version(), file: blas.file().to_owned() };
                (Some(blas), choice)
            }
            Err(because) => (None, PromptProducts::Own { because }),
        };
        tracing::info!("products of prompts: {choice}");
        Products { blas, choice }
    }
}

/// Bytes of each kind of workspace, over all launches of a plan. They lie one behind the other, but for what launches need
/// to themselves, which lies where decoded matrices and what follows these do: rows in 16 bits outlast the launch that makes
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Areas {
    /// What a launch or two need to themselves.
    pub(crate) own: u64,
    /// Rows in 16 bits.
    rows: u64,
    /// Rows in 16 bits that a launch makes while it reads others.
    gated: u64,
    /// A decoded matrix.
    weight: u64,
    /// Sums of splits, or a result that nobody reads.
    sums: u64,
    /// The library's own.
    library: u64,
}

/// The areas where they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedAreas {
    pub(crate) own: Buf,
    pub(crate) rows: Buf,
    pub(crate) gated: Buf,
    pub(crate) weight: Buf,
    pub(crate) sums: Buf,
    pub(crate) library: Buf,
}

fn area(a: usize, b: usize, size: u64) -> u64 {
    (a as u64 * b as u64 * size).next_multiple_of(ALIGN)
}

impl Areas {
    /// What the products of a plan would need if every one but the last, which is the head, had so many rows: room for
    /// the prompts of a model of which only a small step is known.
    pub(crate) fn of_prompts(plan: &Plan, m: usize, n_sms: u32, blas: bool) -> Areas {
        let mut areas = Areas::default();
        let is_product = |step: &&Step| matches!(step.op, Op::MatMul);
        let head = plan.steps().iter().rfind(is_product).map(|step| step.node);
        for group in plan.groups() {
            let GroupKind::Products(products) = &group.kind else { continue };
            let steps = products.parts.iter().filter(|part| Some(part.product) != head);
            let shapes = steps.filter_map(|part| Shape::of(plan.step(part.product)));
            let mut sets: Vec<Vec<Shape>> = Vec::new();
            for shape in shapes.map(|shape| Shape { m, ..shape }).filter(Shape::is_many) {
                match sets.iter_mut().find(|set| set[0].dtype == shape.dtype && set.len() < MAX_PRODUCTS) {
                    Some(set) => set.push(shape),
                    None => sets.push(vec![shape]),
                }
            }
            sets.iter().for_each(|set| areas.add_all(set, n_sms, blas));
        }
        areas
    }

    /// Products of the same rows with weights of one dtype, whatever the library refuses of them.
    fn add_all(&mut self, shapes: &[Shape], n_sms: u32, blas: bool) {
        let Shape { dtype, m, k, .. } = shapes[0];
        self.add_rows(m, k);
        let ns: Vec<usize> = shapes.iter().map(|shape| shape.n).collect();
        let together: Vec<&[usize]> = match dtype.is_quantized() {
            true => ns.iter().map(std::slice::from_ref).collect(),
            false => vec![&ns],
        };
        for ns in together {
            // Fewer columns are split further.
            let any: Vec<Vec<usize>> = if blas { subsets(ns) } else { vec![ns.to_vec()] };
            for ns in any {
                self.add_sums(GemmPlan::new(m, &ns, k, n_sms).scratch_bytes(m, ns.iter().sum()));
            }
            if blas {
                ns.iter().for_each(|&n| self.add_library(m, n));
            }
            if dtype.is_quantized() {
                self.add_weight(ns[0], k);
            }
        }
    }

    pub(crate) fn add_rows(&mut self, m: usize, k: usize) {
        self.rows = self.rows.max(area(m, k, 2));
    }

    pub(crate) fn add_gated(&mut self, m: usize, k: usize) {
        self.gated = self.gated.max(area(m, k, 2));
    }

    pub(crate) fn add_weight(&mut self, n: usize, k: usize) {
        self.weight = self.weight.max(area(n, k, 2));
    }

    pub(crate) fn add_sums(&mut self, bytes: u64) {
        self.sums = self.sums.max(bytes.next_multiple_of(ALIGN));
    }

    /// The library's workspace, and a result for the call that loads its code.
    pub(crate) fn add_library(&mut self, m: usize, n: usize) {
        self.add_workspace();
        self.add_sums(area(m, n, 4));
    }

    /// The library's workspace alone.
    pub(crate) fn add_workspace(&mut self) {
        self.library = BlasLt::WORKSPACE_BYTES;
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.rows + self.gated + self.own.max(self.weight + self.sums + self.library)
    }

    pub(crate) fn place(&self, scratch: Buf) -> Result<PlacedAreas, DriverError> {
        let weight = self.rows + self.gated;
        let sums = weight + self.weight;
        Ok(PlacedAreas {
            rows: scratch.slice(0, self.rows)?,
            gated: scratch.slice(self.rows, self.gated)?,
            own: scratch.slice(weight, self.own)?,
            weight: scratch.slice(weight, self.weight)?,
            sums: scratch.slice(sums, self.sums)?,
            library: scratch.slice(sums + self.sums, self.library)?,
        })
    }
}

/// Every choice of some of at most four sizes, in their order.
fn subsets(ns: &[usize]) -> Vec<Vec<usize>> {
    let chosen = |mask: usize| (0..ns.len()).filter(|i| mask >> i & 1 == 1).map(|i| ns[i]).collect();
    (1..1_usize << ns.len()).map(chosen).collect()
}

/// A product that tensor cores can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    dtype: DType,
    pub(crate) m: usize,
    n: usize,
    pub(crate) k: usize,
}

impl Shape {
    fn new(m: usize, w: &Layout, dtype: DType) -> Option<Shape> {
        let w = w.shape();
        let &[k, n] = w.dims() else { return None };
        let decodable =
            dtype.is_quantized() && (LINEAR_DTYPES.contains(&dtype) || PACKED_DTYPES.contains(&dtype));
        let known = GEMM_DTYPES.contains(&dtype) || decodable;
        (known && k.is_multiple_of(8) && n > 0 && k > 0).then_some(Shape { dtype, m, n, k })
    }

    pub(crate) fn of(step: &Step) -> Option<Shape> {
        let w = &step.inputs[1];
        Shape::new(n_rows(&step.outputs[0].layout), &w.layout, w.dtype)
    }

    /// The shape of a product that has enough rows for it.
    pub(crate) fn of_many(step: &Step) -> Option<Shape> {
        Shape::of(step).filter(Shape::is_many)
    }

    /// Whether there are enough rows to decode the weight for them, if it needs that, and it is small enough.
    fn is_many(&self) -> bool {
        let bytes = 2 * (self.n as u64).saturating_mul(self.k as u64);
        self.m >= self.min_rows() && (!self.dtype.is_quantized() || bytes <= MAX_DECODED)
    }

    /// Whether there are as many rows as in a step of many sequences, and a card has kernels for them.
    pub(crate) fn is_batch(&self, card: &DeviceInfo) -> bool {
        self.m > 1 && has_batch(self.dtype, self.m, self.k, card)
    }

    fn min_rows(&self) -> usize {
        if GEMM_DTYPES.contains(&self.dtype) { 2 } else { MIN_ROWS }
    }

    /// What the rows become.
    pub(crate) fn rows_dtype(&self) -> DType {
        if self.dtype == DType::F16 { DType::F16 } else { DType::BF16 }
    }
}

/// Whether products of many rows are a unit with what makes the rows: where they take them in 16 bits, that writes them
/// so at once. Biases and gates have launches of their own.
pub(crate) fn fuses(query: &GroupQuery<'_>, products: &ProductGroup, card: &DeviceInfo) -> Fusion {
    if products.parts.iter().any(|part| part.bias.is_some()) {
        return Fusion::Smaller;
    }
    if products.gate.is_some() && !joins_gate(query, products, card) {
        return Fusion::Smaller;
    }
    match products.producer {
        None => return Fusion::Staged,
        Some(Producer::AddNorm { inner: Some(_), .. }) => return Fusion::Smaller,
        Some(
            Producer::Norm(_)
            | Producer::AddNorm { inner: None, .. }
            | Producer::Gate(_)
            | Producer::Attention(_),
        ) => {}
    }
    let mut shapes = products.parts.iter().filter_map(|part| {
        let (y, w) = (query.output(part.product, 0), query.input(part.product, 1));
        Shape::new(n_rows(&y.layout), &w.layout, w.dtype)
    });
    match products.gate.is_some() || shapes.any(|shape| shape.is_many() || shape.is_batch(card)) {
        true => Fusion::Staged,
        false => Fusion::Smaller,
    }
}

/// Whether a launch of the products of many sequences does their gate as well.
fn joins_gate(query: &GroupQuery<'_>, products: &ProductGroup, card: &DeviceInfo) -> bool {
    let shapes = products.parts.iter().map(|part| {
        let (y, w) = (query.output(part.product, 0), query.input(part.product, 1));
        Shape::new(n_rows(&y.layout), &w.layout, w.dtype)
    });
    let Some(shapes) = shapes.collect::<Option<Vec<Shape>>>() else { return false };
    let (first, readable) = (shapes[0], unaligned_rows(&query.input(products.parts[0].product, 0).layout));
    shapes.iter().all(|&shape| shape == first) && readable.is_none() && first.is_batch(card)
}

/// Rows in 16 bits, at the start of their area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NarrowTo {
    pub(crate) dtype: DType,
    pub(crate) m: usize,
    pub(crate) k: usize,
    /// Rows of the planes they lie in; 0 where they are dense.
    pub(crate) plane_rows: usize,
    /// Whether they are in the area of rows that a gate makes.
    pub(crate) is_gated: bool,
    /// Whether they are written in F32 as well.
    pub(crate) also_wide: bool,
}

impl NarrowTo {
    /// Rows that there is room for: planes are whole.
    pub(crate) fn n_placed(&self) -> usize {
        self.m.next_multiple_of(self.plane_rows.max(1))
    }

    fn buf(&self, areas: &PlacedAreas) -> Result<Buf, DriverError> {
        let area = if self.is_gated { areas.gated } else { areas.rows };
        area.slice(0, 2 * (self.n_placed() * self.k) as u64)
    }

    pub(crate) fn narrow(&self, areas: &PlacedAreas) -> Result<Narrow, DriverError> {
        let NarrowTo { dtype, plane_rows, also_wide, .. } = *self;
        Ok(Narrow { y: self.buf(areas)?, dtype, plane_rows, also_wide })
    }
}

/// Products of the rows of many sequences with weights of one dtype.
#[derive(Clone, Debug)]
pub(crate) struct BatchProducts {
    pub(crate) products: Vec<NodeId>,
    /// The rows.
    pub(crate) rows: NarrowTo,
    pub(crate) plan: BatchPlan,
    /// The gate that joins both of them, and the rows that come of it.
    pub(crate) gate: Option<(NodeId, NarrowTo)>,
}

impl Lowering<'_> {
    /// A node that writes its rows in 16 bits.
    pub(crate) fn narrowed(&self, step: &Step, to: &NarrowTo) -> Result<Launch, KernelError> {
        let (k, label, to) = (self.kernels, step.label.as_str(), to.narrow(&self.areas)?);
        let view = |i: usize| self.view(&step.inputs[i]);
        let out = |i: usize| self.dense(step, &step.outputs[i]);
        let rows = |i: usize| self.rows(&step.outputs[i]);
        match &step.op {
            Op::Attention(_) => k.flash(&self.attention_args(step)?, Some(&to)),
            Op::RmsNorm { eps } => {
                let ([n_rows, n_cols], eps) = (rows(0), *eps);
                let (x, w, y) = (view(0)?, self.vector(step, 1)?, out(0)?);
                k.narrow_rms_norm(&RmsNormArgs { x, w, y, n_rows, n_cols, eps, step: label }, &to)
            }
            Op::AddRmsNorm { eps } => {
                let ([n_rows, n_cols], eps) = (rows(1), *eps);
                let (a, b, w, sum, y) = (view(0)?, view(1)?, self.vector(step, 2)?, out(0)?, out(1)?);
                let args = AddRmsNormArgs { a, b, w, sum, y, n_rows, n_cols, eps, step: label };
                k.narrow_add_rms_norm(&args, &to)
            }
            Op::Gate(kind) => {
                let [n_rows, n_cols] = rows(0);
                let (gate, up, y) = (view(0)?, view(1)?, out(0)?);
                k.narrow_gate(&GateArgs { kind: *kind, gate, up, y, n_rows, n_cols, step: label }, &to)
            }
            Op::View(_)
            | Op::HostCall(_)
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
            | Op::Train(_)
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::Recurrent(_)
            | Op::Sample(_)
            | Op::Accumulate => unreachable!("{label} makes no rows of products"),
        }
    }

    /// The rows of products into 16 bits.
    pub(crate) fn narrow_rows(&self, steps: &[&Step], to: &NarrowTo) -> Result<Launch, KernelError> {
        let x = self.view(&steps[0].inputs[0])?;
        self.kernels.narrow_rows(&x, to.m, to.k, &to.narrow(&self.areas)?, &labels(steps))
    }

    /// A weight into the workspace.
    pub(crate) fn decode(&self, step: &Step) -> Result<Launch, KernelError> {
        let part = self.product(step)?;
        let (k, n) = (step.inputs[1].layout.shape().dims()[0], part.n);
        let (dtype, y) = (self.resident.dtype(self.plan, &step.inputs[1]), self.decoded(n, k)?);
        self.kernels.dequant(&DequantArgs { w: part.w, dtype, y, n, k, step: &step.label })
    }

    fn decoded(&self, n: usize, k: usize) -> Result<Buf, DriverError> {
        self.areas.weight.slice(0, 2 * (n * k) as u64)
    }

    fn part(&self, step: &Step, rows: &NarrowTo, decoded: bool) -> Result<LinearPart, KernelError> {
        let part = self.product(step)?;
        let w = if decoded { self.decoded(part.n, rows.k)? } else { part.w };
        Ok(LinearPart { w, ..part })
    }

    /// Products on tensor cores.
    pub(crate) fn gemm(
        &self,
        steps: &[&Step],
        rows: &NarrowTo,
        decoded: bool,
        plan: GemmPlan,
    ) -> Result<Vec<Launch>, KernelError> {
        let parts = steps.iter().map(|step| self.part(step, rows, decoded)).collect::<Result<Vec<_>, _>>()?;
        let n = parts.iter().map(|part| part.n).sum();
        let scratch = Some(self.areas.sums.slice(0, plan.scratch_bytes(rows.m, n))?);
        let (x, dtype, m, k) = (rows.buf(&self.areas)?, rows.dtype, rows.m, rows.k);
        let mut launches = Vec::new();
        let args = GemmArgs { x, dtype, parts: &parts, m, k, plan, scratch, step: &labels(steps) };
        self.kernels.gemm(&args, &mut launches)?;
        Ok(launches)
    }

    /// Products of the rows of many sequences.
    pub(crate) fn batch(&self, task: &BatchProducts) -> Result<Vec<Launch>, KernelError> {
        let BatchProducts { products, rows, plan, gate } = task;
        let steps: Vec<&Step> = products.iter().map(|&node| self.plan.step(node)).collect();
        let mut parts = steps.iter().map(|step| self.product(step)).collect::<Result<Vec<_>, _>>()?;
        let gate = match gate {
            None => None,
            Some((node, to)) => {
                let step = self.plan.step(*node);
                let Op::Gate(kind) = step.op else { unreachable!("a gate") };
                parts[0].y = self.dense(step, &step.outputs[0])?;
                Some((kind, to.narrow(&self.areas)?))
            }
        };
        let n = parts.iter().map(|part| part.n).sum();
        let dtype = self.resident.dtype(self.plan, &steps[0].inputs[1]);
        let scratch = Some(self.areas.sums.slice(0, plan.scratch_bytes(rows.m, n))?);
        let (x, m, k) = (rows.buf(&self.areas)?, rows.m, rows.k);
        let mut launches = Vec::new();
        let args =
            BatchArgs { x, dtype, parts: &parts, m, k, plan: *plan, scratch, gate, step: &labels(&steps) };
        self.kernels.batch(&args, &mut launches)?;
        Ok(launches)
    }

    /// A product by the library, and the same into a result that nobody reads.
    pub(crate) fn library(
        &self,
        blas: &Arc<BlasLt>,
        step: &Step,
        rows: &NarrowTo,
        decoded: bool,
    ) -> Result<[refrain_kernels::BlasLtProduct; 2], KernelError> {
        let part = self.part(step, rows, decoded)?;
        let shape = BlasLtShape::of_rows(rows.dtype, rows.m, part.n, rows.k);
        let (x, workspace) = (rows.buf(&self.areas)?, self.areas.library);
        let nowhere = self.areas.sums.slice(0, 4 * (rows.m * part.n) as u64)?;
        let product = blas.product(shape, [x, part.w, part.y, workspace], &step.label)?;
        let rehearsal = product.over([x, part.w, nowhere, workspace])?;
        Ok([product, rehearsal])
    }
}

pub(crate) fn labels(steps: &[&Step]) -> String {
    steps.iter().map(|step| step.label.as_str()).collect::<Vec<_>>().join(" + ")
}

/// Runs each of the library's products once, with results that nobody reads: it loads its code at the first call of a
/// shape, which must not be while something records. Before it, the algorithms of products that run in every step of a
/// training are timed.
pub(crate) fn warm_up(
    warm: &WarmPlan,
    stream: &mut Stream,
    lease: &mut Lease,
    known: &mut HashSet<BlasLtShape>,
) -> Result<(), CudaError> {
    let memory = warm.space().memory();
    for Rehearsal { product, is_measured } in warm.rehearsals() {
        let shape = product.shape();
        if !known.insert(shape) {
            continue;
        }
        let failed = || CudaError::driver(product.step().to_string());
        if *is_measured && let Some(times) = product.measure(stream, memory, lease).map_err(failed())? {
            tracing::debug!("{}: algorithm {} of {:?} ms, {shape:?}", product.step(), times.chosen, times.ms);
        }
        stream.run(lease, false, |q| product.enqueue(q)).map_err(failed())?;
    }
    stream.synchronize().map_err(CudaError::driver("warming up products"))
}
