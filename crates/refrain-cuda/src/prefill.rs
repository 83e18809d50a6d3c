//! Steps of many rows: matrix products and attention on tensor cores.
//!
//! Products with 16-bit weights take their rows in 16 bits. Quantised weights are first decoded into one
//! workspace, matrix after matrix, so that there is never a second copy of all of them. F32 weights keep the
//! exact kernels. Norms, gates and attention write their rows in 16 bits directly if only such products read
//! them.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

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
use crate::rules::ChoiceRules;
use crate::warm::{Rehearsal, WarmPlan};

/// Largest matrix that is decoded as a whole. Larger ones, such as a vocabulary's, are multiplied a few rows
/// at a time.
const MAX_DECODED: u64 = 512 << 20;
/// Rows of a weight from which it counts as a vocabulary's.
const MIN_VOCABULARY: usize = 1 << 15;
const ALIGN: u64 = 256;

/// What runs the matrix products of prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptProducts {
    /// NVIDIA's cuBLASLt.
    CublasLt {
        /// Version of the library.
        version: (usize, usize),
        /// File it was loaded from.
        file: String,
    },
    /// Refrain's own kernels.
    Own {
        /// Why cuBLASLt is not used.
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

/// cuBLASLt, if available, and the choice to report.
#[derive(Debug)]
pub(crate) struct ProductLibrary {
    pub(crate) blas: Option<Arc<BlasLt>>,
    pub(crate) choice: PromptProducts,
}

impl ProductLibrary {
    pub(crate) fn open(ctx: &Context, options: &CublasLt) -> ProductLibrary {
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
        tracing::info!("matrix products of prompts: {choice}");
        ProductLibrary { blas, choice }
    }
}

/// Bytes of each kind of workspace, over all launches of a plan. The areas are consecutive, except that `own`
/// overlaps the decoded matrix and the areas after it: rows in 16 bits must outlive the launch that writes
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Areas {
    /// Private scratch of one or two launches.
    pub(crate) own: u64,
    /// Rows in 16 bits.
    rows: u64,
    /// Rows in 16 bits that a launch writes while it reads others.
    gated: u64,
    /// A decoded matrix.
    weight: u64,
    /// Partial sums of splits, or the output of a rehearsal.
    sums: u64,
    /// Workspace of cuBLASLt.
    library: u64,
}

/// Buffers of the areas.
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
    /// What the products of a plan would need if all of them except the last, which is the head, had `m`
    /// rows. Sizes the memory of prompts when only a small step of the model is known.
    pub(crate) fn of_prompts(plan: &Plan, m: usize, rules: ChoiceRules<'_>, blas: bool) -> Areas {
        let mut areas = Areas::default();
        let is_product = |step: &&Step| matches!(step.op, Op::MatMul);
        let head = plan.steps().iter().rfind(is_product).map(|step| step.node);
        for group in plan.groups() {
            let GroupKind::Products(products) = &group.kind else { continue };
            let steps = products.parts.iter().filter(|part| Some(part.product) != head);
            let shapes = steps.filter_map(|part| GemmShape::of(plan.step(part.product)));
            let mut sets: Vec<Vec<GemmShape>> = Vec::new();
            for shape in shapes.map(|shape| GemmShape { m, ..shape }).filter(|shape| shape.is_many(rules)) {
                match sets.iter_mut().find(|set| set[0].dtype == shape.dtype && set.len() < MAX_PRODUCTS) {
                    Some(set) => set.push(shape),
                    None => sets.push(vec![shape]),
                }
            }
            sets.iter().for_each(|set| areas.add_all(set, rules, blas));
        }
        areas
    }

    /// Adds products of the same rows with weights of one dtype, for any subset that cuBLASLt may refuse.
    fn add_all(&mut self, shapes: &[GemmShape], rules: ChoiceRules<'_>, blas: bool) {
        let GemmShape { dtype, m, k, .. } = shapes[0];
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
                self.add_sums(rules.gemm_plan(m, &ns, k).scratch_bytes(m, ns.iter().sum()));
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

    /// Adds cuBLASLt's workspace, and the output of a rehearsal.
    pub(crate) fn add_library(&mut self, m: usize, n: usize) {
        self.add_workspace();
        self.add_sums(area(m, n, 4));
    }

    /// Adds cuBLASLt's workspace alone.
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

/// All non-empty subsets of at most four sizes, in order.
fn subsets(ns: &[usize]) -> Vec<Vec<usize>> {
    let chosen = |mask: usize| (0..ns.len()).filter(|i| mask >> i & 1 == 1).map(|i| ns[i]).collect();
    (1..1_usize << ns.len()).map(chosen).collect()
}

/// Shape of a product that tensor cores can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmShape {
    dtype: DType,
    pub(crate) m: usize,
    n: usize,
    pub(crate) k: usize,
}

impl GemmShape {
    fn new(m: usize, w: &Layout, dtype: DType) -> Option<GemmShape> {
        let w = w.shape();
        let &[k, n] = w.dims() else { return None };
        let decodable =
            dtype.is_quantized() && (LINEAR_DTYPES.contains(&dtype) || PACKED_DTYPES.contains(&dtype));
        let known = GEMM_DTYPES.contains(&dtype) || decodable;
        (known && k.is_multiple_of(8) && n > 0 && k > 0).then_some(GemmShape { dtype, m, n, k })
    }

    pub(crate) fn of(step: &Step) -> Option<GemmShape> {
        let w = &step.inputs[1];
        GemmShape::new(n_rows(&step.outputs[0].layout), &w.layout, w.dtype)
    }

    /// Shape of a product that has enough rows for tensor cores.
    pub(crate) fn of_many(step: &Step, rules: ChoiceRules<'_>) -> Option<GemmShape> {
        GemmShape::of(step).filter(|shape| shape.is_many(rules))
    }

    /// Whether there are enough rows to decode the weight for them, if it needs decoding, and the weight is
    /// small enough.
    fn is_many(&self, rules: ChoiceRules<'_>) -> bool {
        let bytes = 2 * (self.n as u64).saturating_mul(self.k as u64);
        rules.min_rows(self.dtype).is_some_and(|min| self.m >= min)
            && (!self.dtype.is_quantized() || bytes <= MAX_DECODED)
    }

    /// Whether there are as many rows as in a step of several sequences, and the device has kernels for that.
    pub(crate) fn is_batch(&self, rules: ChoiceRules<'_>) -> bool {
        rules.by_rows() && self.m > 1 && has_batch(self.dtype, self.m, self.k, rules.card)
    }

    /// Whether some products of the same rows, of which this is one, run as a batch if there is a kernel for it.
    /// With 16-bit weights, measurements decide (`docs/performance.md`): cuBLASLt is faster with a single weight and
    /// more than eight rows, with large weights and more than eight rows, and with a vocabulary.
    pub(crate) fn is_faster_as_batch(&self, n_products: usize) -> bool {
        let most = match self.m {
            ..=8 => MIN_VOCABULARY - 1,
            9..=32 => 8192,
            _ => 2048,
        };
        !GEMM_DTYPES.contains(&self.dtype) || ((n_products > 1 || self.m <= 8) && self.n <= most)
    }

    /// Dtype that the rows are converted to.
    pub(crate) fn rows_dtype(&self) -> DType {
        if self.dtype == DType::F16 { DType::F16 } else { DType::BF16 }
    }
}

/// Whether products of many rows are fused with the producer of their rows, which then writes rows in 16 bits
/// if they take those. Biases and gates are separate launches.
pub(crate) fn fuses(query: &GroupQuery<'_>, products: &ProductGroup, rules: ChoiceRules<'_>) -> Fusion {
    if products.parts.iter().any(|part| part.bias.is_some()) {
        return Fusion::Smaller;
    }
    if products.gate.is_some() && !joins_gate(query, products, rules) {
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
        GemmShape::new(n_rows(&y.layout), &w.layout, w.dtype)
    });
    match products.gate.is_some() || shapes.any(|shape| shape.is_many(rules) || shape.is_batch(rules)) {
        true => Fusion::Staged,
        false => Fusion::Smaller,
    }
}

/// Whether one launch of a batch's products also runs their gate.
fn joins_gate(query: &GroupQuery<'_>, products: &ProductGroup, rules: ChoiceRules<'_>) -> bool {
    let shapes = products.parts.iter().map(|part| {
        let (y, w) = (query.output(part.product, 0), query.input(part.product, 1));
        GemmShape::new(n_rows(&y.layout), &w.layout, w.dtype)
    });
    let Some(shapes) = shapes.collect::<Option<Vec<GemmShape>>>() else { return false };
    let (first, readable) = (shapes[0], unaligned_rows(&query.input(products.parts[0].product, 0).layout));
    shapes.iter().all(|&shape| shape == first) && readable.is_none() && first.is_batch(rules)
}

/// Rows in 16 bits, at the start of their area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NarrowTo {
    pub(crate) dtype: DType,
    pub(crate) m: usize,
    pub(crate) k: usize,
    /// Rows of the planes that hold them; 0 if they are contiguous.
    pub(crate) plane_rows: usize,
    /// Whether they are in the area for a gate's output.
    pub(crate) is_gated: bool,
    /// Whether they are also written in F32.
    pub(crate) also_wide: bool,
}

impl NarrowTo {
    /// Number of allocated rows: planes are whole.
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

/// Matrix products of a batch: rows of several sequences with weights of one dtype.
#[derive(Clone, Debug)]
pub(crate) struct BatchProducts {
    pub(crate) products: Vec<NodeId>,
    /// The rows.
    pub(crate) rows: NarrowTo,
    pub(crate) plan: BatchPlan,
    /// The gate of both products, and the rows it writes.
    pub(crate) gate: Option<(NodeId, NarrowTo)>,
}

impl Lowering<'_> {
    /// Launch of a node that writes its rows in 16 bits.
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
            | Op::Lora(_)
            | Op::Train(_)
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Recurrent(_)
            | Op::Sample(_)
            | Op::Accumulate => unreachable!("{label} does not produce rows of products"),
        }
    }

    /// Converts rows of products to 16 bits.
    pub(crate) fn narrow_rows(&self, steps: &[&Step], to: &NarrowTo) -> Result<Launch, KernelError> {
        let x = self.view(&steps[0].inputs[0])?;
        self.kernels.narrow_rows(&x, to.m, to.k, &to.narrow(&self.areas)?, &labels(steps))
    }

    /// Decodes a weight into the workspace.
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

    /// Matrix products on tensor cores.
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

    /// Matrix products of a batch.
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

    /// A product by cuBLASLt, and its rehearsal: the same product into an output that nobody reads.
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
        let unused = self.areas.sums.slice(0, 4 * (rows.m * part.n) as u64)?;
        let product = blas.product(shape, [x, part.w, part.y, workspace], &step.label)?;
        let rehearsal = product.over([x, part.w, unused, workspace])?;
        Ok([product, rehearsal])
    }
}

pub(crate) fn labels(steps: &[&Step]) -> String {
    steps.iter().map(|step| step.label.as_str()).collect::<Vec<_>>().join(" + ")
}

/// Runs each cuBLASLt product once, into outputs that nobody reads: the library loads code at the first call
/// of a shape, which must not happen during a recording. Before that, it times the algorithms of products
/// that run in every training step.
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
    stream.synchronize().map_err(CudaError::driver("warming up matrix products"))
}
