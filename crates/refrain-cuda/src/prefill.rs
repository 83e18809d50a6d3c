//! Steps of many rows: products and attention on tensor cores.
//!
//! Products with weights of 16 bits take their rows in 16 bits; quantised weights are decoded into one workspace first,
//! matrix after matrix, so that there is never a second copy of all of them. F32 weights keep the exact kernels. Norms,
//! gates and attention write their rows in 16 bits at once where nothing but such products reads them.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use refrain_driver::{Buf, Context, DriverError, Lease, Stream};
use refrain_graph::{Op, Operand, Plan, Step};
use refrain_kernels::{
    AddRmsNormArgs, BlasLt, BlasLtShape, DequantArgs, GEMM_DTYPES, GateArgs, GemmArgs, GemmPlan, KernelError,
    LINEAR_DTYPES, LinearPart, Narrow, PACKED_DTYPES, RmsNormArgs,
};
use refrain_tensor::DType;

use crate::error::CudaError;
use crate::group::{Group, groups};
use crate::lower::Lowering;
use crate::options::CublasLt;
use crate::warm::{WarmPlan, Work};

/// From this many rows on, but for weights of 16 bits, which need no decoding. Fewer rows of quantised weights, and F32
/// ones, have kernels that read the weights once for some of them.
const MIN_ROWS: usize = 16;
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

/// Bytes of each kind of workspace; they lie one behind the other from the start of the scratch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Areas {
    /// Rows in 16 bits.
    rows: u64,
    /// A decoded matrix.
    weight: u64,
    /// Sums of splits, or a result that nobody reads.
    sums: u64,
    /// The library's own.
    library: u64,
}

impl Areas {
    /// What the products of a plan need. With `rows`, what they would need if every one but the last, which is the head,
    /// had that many rows.
    pub(crate) fn of(plan: &Plan, rows: Option<usize>, n_sms: u32, blas: bool) -> Areas {
        let mut areas = Areas::default();
        let is_product = |step: &&Step| matches!(step.op, Op::MatMul);
        let last = plan.steps().iter().rfind(is_product);
        let is_head = |step: &Step| rows.is_some() && last.is_some_and(|last| std::ptr::eq(last, step));
        for segment in plan.segments() {
            for group in groups(plan, &plan.steps()[segment.steps.clone()]) {
                let steps: Vec<&Step> = match &group {
                    Group::One(step) => vec![*step],
                    Group::Products(steps) => steps.clone(),
                    Group::Fused(run) => run.parts.iter().map(|part| part.step).collect(),
                    Group::RopeKv(_) | Group::Attend(_) => continue,
                };
                let shape = |step: &&Step| {
                    let shape = Shape::of(step, step.inputs[1].dtype)?;
                    Some(Shape { m: rows.unwrap_or(shape.m), ..shape })
                };
                if !is_product(&steps[0]) || steps.iter().any(|step| is_head(step)) {
                    continue;
                }
                if let Some(shapes) = steps.iter().map(shape).collect::<Option<Vec<_>>>() {
                    areas.add(&shapes, n_sms, blas);
                }
            }
        }
        areas
    }

    /// Products of the same rows.
    fn add(&mut self, shapes: &[Shape], n_sms: u32, blas: bool) {
        let Some(&Shape { dtype, m, k, .. }) = shapes.first().filter(|s| s.m >= s.min_rows()) else { return };
        let bytes = |a: usize, b: usize, size: u64| (a as u64 * b as u64 * size).next_multiple_of(ALIGN);
        self.rows = self.rows.max(bytes(m, k, 2));
        let ns: Vec<usize> = shapes.iter().map(|s| s.n).collect();
        let together: Vec<&[usize]> = match dtype.is_quantized() {
            true => ns.iter().map(std::slice::from_ref).collect(),
            false => vec![&ns],
        };
        for ns in together {
            let n: usize = ns.iter().sum();
            // The library may refuse any of them, and fewer columns are split further.
            let any: Vec<Vec<usize>> = if blas { subsets(ns) } else { vec![ns.to_vec()] };
            let sums = any.iter().map(|ns| GemmPlan::new(m, ns, k, n_sms).scratch_bytes(m, ns.iter().sum()));
            self.sums = self.sums.max(sums.max().unwrap_or(0).next_multiple_of(ALIGN));
            self.sums = self.sums.max(if blas { bytes(m, n, 4) } else { 0 });
            if dtype.is_quantized() {
                self.weight = self.weight.max(bytes(n, k, 2));
            }
        }
        self.library = if blas { BlasLt::WORKSPACE_BYTES } else { 0 };
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.rows + self.weight + self.sums + self.library
    }

    fn place(&self, scratch: Buf) -> Result<Placed, DriverError> {
        let sums = self.rows + self.weight;
        Ok(Placed {
            rows: scratch.slice(0, self.rows)?,
            weight: scratch.slice(self.rows, self.weight)?,
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

#[derive(Clone, Copy, Debug)]
struct Placed {
    rows: Buf,
    weight: Buf,
    sums: Buf,
    library: Buf,
}

/// A product that tensor cores can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    dtype: DType,
    m: usize,
    n: usize,
    k: usize,
}

impl Shape {
    fn of(step: &Step, dtype: DType) -> Option<Shape> {
        let w = step.inputs[1].layout.shape();
        let &[k, n] = w.dims() else { return None };
        let m = step.outputs[0].layout.shape().n_elements() / n.max(1);
        let decodable =
            dtype.is_quantized() && (LINEAR_DTYPES.contains(&dtype) || PACKED_DTYPES.contains(&dtype));
        let fits = 2 * (n as u64).saturating_mul(k as u64) <= MAX_DECODED;
        let known = GEMM_DTYPES.contains(&dtype) || (decodable && fits);
        (known && k.is_multiple_of(8) && n > 0 && k > 0).then_some(Shape { dtype, m, n, k })
    }

    fn min_rows(&self) -> usize {
        if GEMM_DTYPES.contains(&self.dtype) { 2 } else { MIN_ROWS }
    }

    /// What the rows become.
    fn rows_dtype(&self) -> DType {
        if self.dtype == DType::F16 { DType::F16 } else { DType::BF16 }
    }
}

/// Whether an operand is the values of another, as they lie.
fn same_values(a: &Operand, b: &Operand) -> bool {
    let place = |o: &Operand| (o.buffer, o.dtype, o.layout.offset(), o.layout.shape().n_elements());
    place(a) == place(b) && a.layout.is_contiguous() && b.layout.is_contiguous()
}

/// Lowers groups of many rows, in their order.
pub(crate) struct Prefill<'a> {
    lowering: &'a Lowering<'a>,
    blas: Option<&'a Arc<BlasLt>>,
    placed: Placed,
    /// Which rows the workspace holds, and in which dtype.
    holds: Option<(Operand, DType)>,
}

impl<'a> Prefill<'a> {
    pub(crate) fn new(lowering: &'a Lowering<'a>) -> Result<Prefill<'a>, CudaError> {
        let blas = lowering.products.blas.as_ref();
        let areas = Areas::of(lowering.plan, None, lowering.n_sms, blas.is_some());
        let placed =
            areas.place(lowering.resident.scratch).map_err(CudaError::driver("placing workspaces"))?;
        Ok(Prefill { lowering, blas, placed, holds: None })
    }

    /// Lowers the first of these groups if it is one for tensor cores, or makes rows for one.
    pub(crate) fn lower(&mut self, groups: &[Group<'_>], warm: &mut WarmPlan) -> Result<bool, CudaError> {
        let Some((first, rest)) = groups.split_first() else { return Ok(false) };
        let steps: Vec<&Step> = match first {
            Group::One(step) => vec![step],
            Group::Products(steps) => steps.clone(),
            Group::RopeKv(_) | Group::Fused(_) | Group::Attend(_) => {
                self.holds = None;
                return Ok(false);
            }
        };
        let mut works = Vec::new();
        let done = match &steps[0].op {
            Op::MatMul => self.products(&steps, &mut works),
            Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::Gate(_) | Op::Attention(_) => {
                self.maker(steps[0], rest, &mut works)
            }
            Op::View(_)
            | Op::HostCall(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce(_)
            | Op::Softmax
            | Op::GatherRows(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::Sample(_)
            | Op::Accumulate => Ok(false),
        };
        let done = done.map_err(|e| self.lowering.refuse(steps[0], e))?;
        if done {
            steps.iter().try_for_each(|step| self.lowering.name_outputs(step, warm))?;
            works.into_iter().for_each(|work| warm.push(work));
        } else if !matches!(steps[0].op, Op::View(_)) {
            // A view launches nothing; anything else may use the workspace, or change what was read.
            self.holds = None;
        }
        Ok(done)
    }

    fn shape(&self, step: &Step) -> Option<Shape> {
        if !matches!(step.op, Op::MatMul) {
            return None;
        }
        let dtype = self.lowering.resident.dtype(self.lowering.plan, &step.inputs[1]);
        Shape::of(step, dtype).filter(|shape| shape.m >= shape.min_rows())
    }

    fn products(&mut self, steps: &[&Step], works: &mut Vec<Work>) -> Result<bool, KernelError> {
        let Some(shapes) = steps.iter().map(|step| self.shape(step)).collect::<Option<Vec<_>>>() else {
            return Ok(false);
        };
        let low = self.lowering;
        let (x, shape) = (&steps[0].inputs[0], shapes[0]);
        let (m, k, dtype) = (shape.m, shape.k, shape.rows_dtype());
        let label = steps.iter().map(|step| step.label.as_str()).collect::<Vec<_>>().join(" + ");
        let rows = self.rows(m, k)?;
        if !self.holds.as_ref().is_some_and(|(held, d)| same_values(held, x) && *d == dtype) {
            let to = Narrow { y: rows, dtype, also_wide: false };
            match low.kernels.narrow_rows(&low.view(x)?, m, k, &to, &label) {
                Ok(launch) => works.push(launch.into()),
                // Rows that do not lie at multiples of 16 bytes.
                Err(KernelError::Unsupported { .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
            self.holds = Some((*x, dtype));
        }
        let mut parts = steps.iter().map(|step| low.product(step)).collect::<Result<Vec<_>, _>>()?;
        if shape.dtype.is_quantized() {
            // One matrix at a time goes through the workspace.
            for ((part, shape), step) in parts.iter_mut().zip(&shapes).zip(steps) {
                let y = self.placed.weight.slice(0, 2 * (shape.n * k) as u64)?;
                let args = DequantArgs { w: part.w, dtype: shape.dtype, y, n: shape.n, k, step: &step.label };
                works.push(low.kernels.dequant(&args)?.into());
                part.w = y;
                self.multiply(rows, dtype, m, k, std::slice::from_ref(part), &step.label, works)?;
            }
            return Ok(true);
        }
        self.multiply(rows, dtype, m, k, &parts, &label, works)?;
        Ok(true)
    }

    fn rows(&self, m: usize, k: usize) -> Result<Buf, DriverError> {
        self.placed.rows.slice(0, 2 * (m * k) as u64)
    }

    #[expect(clippy::too_many_arguments, reason = "the sizes of one product")]
    fn multiply(
        &self,
        x: Buf,
        dtype: DType,
        m: usize,
        k: usize,
        parts: &[LinearPart],
        step: &str,
        works: &mut Vec<Work>,
    ) -> Result<(), KernelError> {
        let mut left = parts.to_vec();
        if let Some(blas) = self.blas {
            left.clear();
            for part in parts {
                let shape = BlasLtShape { dtype, m, n: part.n, k };
                match blas.product(shape, [x, part.w, part.y, self.placed.library], step) {
                    Ok(product) => works.push(Work::Library(product)),
                    Err(error @ KernelError::Unsupported { .. }) => {
                        tracing::debug!("{step}: {error}; our own kernel does it");
                        left.push(*part);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        let ns: Vec<usize> = left.iter().map(|part| part.n).collect();
        let plan = GemmPlan::new(m, &ns, k, self.lowering.n_sms);
        let scratch = self.placed.sums.slice(0, plan.scratch_bytes(m, ns.iter().sum()))?;
        let mut launches = Vec::new();
        let args = GemmArgs { x, dtype, parts: &left, m, k, plan, scratch: Some(scratch), step };
        self.lowering.kernels.gemm(&args, &mut launches)?;
        works.extend(launches.into_iter().map(Work::from));
        Ok(())
    }

    /// A step that writes rows in 16 bits for the products behind it.
    fn maker(&mut self, step: &Step, rest: &[Group<'_>], works: &mut Vec<Work>) -> Result<bool, KernelError> {
        let (low, label) = (self.lowering, step.label.as_str());
        let y = step.outputs.last().filter(|y| y.layout.shape().n_elements() > 0);
        let Some(y) = y else { return Ok(false) };
        let to = self.readers(y, rest)?;
        let view = |i: usize| low.view(&step.inputs[i]);
        let out = |i: usize| low.dense(step, &step.outputs[i]);
        let launch = match (&step.op, &to) {
            (Op::Attention(_), _) => {
                let args = low.attention_args(step)?;
                if args.n < MIN_ROWS || !low.kernels.has_flash(args.cache_dtype, args.head_dim) {
                    return Ok(false);
                }
                low.kernels.flash(&args, to.as_ref().map(|(_, narrow)| narrow))
            }
            (Op::RmsNorm { eps }, Some((_, to))) => {
                let [n_rows, n_cols] = low.rows(y);
                let (x, w, y, eps) = (view(0)?, low.vector(step, 1)?, out(0)?, *eps);
                let args = RmsNormArgs { x, w, y, n_rows, n_cols, eps, step: label };
                low.kernels.narrow_rms_norm(&args, to)
            }
            (Op::AddRmsNorm { eps }, Some((_, to))) => {
                let [n_rows, n_cols] = low.rows(y);
                let (a, b, w, sum, y) = (view(0)?, view(1)?, low.vector(step, 2)?, out(0)?, out(1)?);
                let args = AddRmsNormArgs { a, b, w, sum, y, n_rows, n_cols, eps: *eps, step: label };
                low.kernels.narrow_add_rms_norm(&args, to)
            }
            (Op::Gate(kind), Some((_, to))) => {
                let [n_rows, n_cols] = low.rows(y);
                let (gate, up, y) = (view(0)?, view(1)?, out(0)?);
                let args = GateArgs { kind: *kind, gate, up, y, n_rows, n_cols, step: label };
                low.kernels.narrow_gate(&args, to)
            }
            _ => return Ok(false),
        };
        match launch {
            Ok(launch) => works.push(launch.into()),
            // What these kernels do not take, the others do.
            Err(KernelError::Unsupported { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        self.holds = to.map(|(x, narrow)| (x, narrow.dtype));
        Ok(true)
    }

    /// Where rows go that the products right behind read, and as which operand; in F32 too if anything else reads them.
    fn readers(&self, y: &Operand, rest: &[Group<'_>]) -> Result<Option<(Operand, Narrow)>, KernelError> {
        let mut found: Option<(Operand, Shape)> = None;
        let mut n_readers = 0;
        for group in rest {
            let steps: &[&Step] = match group {
                Group::One(step) if matches!(step.op, Op::View(_)) => continue,
                Group::One(step) => std::slice::from_ref(step),
                Group::Products(steps) => steps,
                Group::RopeKv(_) | Group::Fused(_) | Group::Attend(_) => break,
            };
            let x = &steps[0].inputs[0];
            let shape = steps.iter().map(|step| self.shape(step)).collect::<Option<Vec<_>>>();
            let Some(shape) = shape.map(|s| s[0]).filter(|_| same_values(x, y)) else { break };
            let dtype = found.as_ref().map_or(shape.rows_dtype(), |(_, s)| s.rows_dtype());
            if shape.rows_dtype() != dtype {
                break;
            }
            found = found.or(Some((*x, shape)));
            n_readers += steps.len();
        }
        let Some((x, shape)) = found else { return Ok(None) };
        let plan = self.lowering.plan;
        let reads = |step: &&Step| {
            !matches!(step.op, Op::View(_)) && step.inputs.iter().any(|input| input.buffer == y.buffer)
        };
        let n_all = plan.steps().iter().filter(reads).count();
        let is_output = plan.outputs().iter().any(|output| output.buffer == y.buffer);
        let also_wide = is_output || n_all != n_readers;
        let narrow = Narrow { y: self.rows(shape.m, shape.k)?, dtype: shape.rows_dtype(), also_wide };
        Ok(Some((x, narrow)))
    }
}

/// Runs each of the library's products once, with results that nobody reads: it loads its code at the first call of a
/// shape, which must not be while something records.
pub(crate) fn warm_up(
    warm: &WarmPlan,
    stream: &mut Stream,
    lease: &mut Lease,
    known: &mut HashSet<BlasLtShape>,
    scratch: Buf,
) -> Result<(), CudaError> {
    for work in warm.work() {
        let Work::Library(product) = work else { continue };
        let shape = product.shape();
        if !known.insert(shape) {
            continue;
        }
        let failed = CudaError::driver(product.step().to_string());
        let [x, w, _, workspace] = product.accesses().map(|(buf, _)| buf);
        // The area before the library's is as large as any result.
        let bytes = 4 * (shape.m * shape.n) as u64;
        let end = workspace.offset() - scratch.offset();
        let y = scratch.slice(end.saturating_sub(bytes.next_multiple_of(ALIGN)), bytes);
        let y = y.map_err(CudaError::driver("placing workspaces"))?;
        let product = product.over([x, w, y, workspace]).map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        stream.run(lease, false, |q| product.enqueue(q)).map_err(failed)?;
    }
    stream.synchronize().map_err(CudaError::driver("warming up products"))
}
