//! Lowers the tasks of a plan to launches.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_driver::{Buf, DriverError, Launch};
use refrain_graph::{
    AttentionInputs, Binary, BufferId, LoraOp, NodeId, Op, Operand, Place, Plan, Producer, Query, Recurrent,
    RopeAppend, Step, Support, TensorType, TrainOp,
};
use refrain_kernels::{
    AddRmsNormArgs, AttentionArgs, BinaryArgs, BlasLt, BufView, CastArgs, CopyArgs, DequantArgs, GateArgs,
    GatedDeltaArgs, GatherRowsArgs, KernelError, Kernels, KvAppendArgs, LINEAR_DTYPES, LinearArgs,
    LinearPart, LoraArgs, MAX_CONV_WIDTH, MAX_DELTA_KEY, PACKED_DTYPES, ReduceArgs, RmsNormArgs, RopeArgs,
    RopeKvArgs, SampleArgs, SampleTop, ShortConvArgs, SlotArgs, SoftmaxArgs, UnaryArgs,
    attention_scratch_bytes, sample_scratch_bytes, sample_state_bytes,
};
use refrain_tensor::DType;

use crate::error::CudaError;
use crate::experts;
use crate::prefill::{BatchProducts, PlacedAreas};
use crate::resident::{COUNTER_BYTES, ResidentMemory};
use crate::rules::ChoiceRules;
use crate::tasks::{KernelTask, SegmentTasks, splits};
use crate::train_products;
use crate::warm::{WarmPlan, Work};

/// Whether a kernel supports an op with these dtypes. Layouts are checked when the plan is lowered.
pub(crate) fn supports(query: &Query<'_>) -> Support {
    match unsupported(query) {
        None => Support::Yes,
        Some(because) => {
            let list =
                |types: &[TensorType]| types.iter().map(TensorType::to_string).collect::<Vec<_>>().join(", ");
            let [ins, outs] = [list(query.inputs), list(query.outputs)];
            Support::No(format!("{} x {ins} -> {outs}: {because}", query.op.name()))
        }
    }
}

fn unsupported(query: &Query<'_>) -> Option<&'static str> {
    let ins = query.inputs;
    // Weight vectors of any float type are converted to F32 at load. A vector that is not a weight keeps its
    // type and is refused later.
    let is =
        |i: usize, dtype: DType| ins[i].dtype == dtype || (dtype == DType::F32 && is_float_vector(&ins[i]));
    let no = |bad: bool, because| bad.then_some(because);
    match query.op {
        Op::View(_) | Op::HostCall(_) => None,
        Op::Copy => no(
            !matches!(ins[0].dtype.block_bytes(), 1 | 2 | 4) || ins[0].dtype.is_quantized(),
            "copied elements must have 1, 2 or 4 bytes",
        ),
        Op::Cast(to) if ins[0].dtype.is_quantized() => {
            no(*to != DType::BF16, "quantised weights can only be decoded to BF16")
                .or(no(!is_weight_dtype(ins[0].dtype), "no kernel reads this dtype"))
                .or(no(ins[0].shape.rank() != 2, "only matrices can be decoded"))
        }
        Op::Cast(_) => None,
        // Their dtypes were checked when the graph was built: floats of any type, and I32 where it makes
        // sense.
        Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::ScatterAddRows { .. }
        | Op::Unary(_)
        | Op::Reduce { .. }
        | Op::Softmax
        | Op::Binary(_)
        | Op::Gate(_)
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::Accumulate => None,
        Op::Moe(op) => experts::unsupported(op, ins),
        // Their dtypes were checked when the graph was built.
        Op::Lora(_) => None,
        Op::SpanAttention(_) => train_products::unsupported_attention(&ins[0]),
        Op::Train(TrainOp::SpanAttentionGrad(_)) => train_products::unsupported_attention(&ins[1]),
        Op::Train(TrainOp::AddProduct) => train_products::unsupported_product(&ins[1], &ins[2]),
        Op::Train(_) => None,
        Op::MatMul => train_products::unsupported_product(&ins[0], &ins[1]),
        Op::GatherRows(to) => no(
            *to != DType::F32 && !ins[0].dtype.is_float(),
            "rows of a quantised table can only be gathered as F32",
        )
        .or(no(!is_weight_dtype(ins[0].dtype), "no kernel reads this dtype"))
        .or(no(ins[1].dtype != DType::I32, "ids must be I32")),
        Op::Rope(_) => {
            no(!ins[0].dtype.is_float() || !is(2, DType::F32), "heads must be floats and frequencies F32")
                .or(no(ins[1].dtype != DType::I32, "positions must be I32"))
        }
        Op::KvAppendBytes => no(ins[2].dtype != DType::F32, "activations must be F32"),
        Op::KvAppend => no(!ins[0].dtype.is_float(), "the cache must be F16, BF16 or F32")
            .or(no(ins[1].dtype != DType::F32, "activations must be F32")),
        Op::Attention(_) => no(ins[0].dtype != DType::F32, "activations must be F32")
            .or(no(
                !(ins[1].dtype.is_float() || ins[1].dtype == DType::U8) || ins[1].dtype != ins[2].dtype,
                "both caches must be of one type: F16, BF16, F32 or bytes with scales",
            ))
            .or(no(
                !ins[0].shape.dim_back(0).is_multiple_of(2) || ins[0].shape.dim_back(0) > 512,
                "heads must have an even number of elements, at most 512",
            )),
        Op::Recurrent(op) => unsupported_recurrent(op, ins),
        Op::Sample(_) => no(ins[0].dtype != DType::F32, "logits must be F32")
            .or(no(ins[0].shape.dim_back(0) > 1 << 20, "the vocabulary has more than 2^20 tokens")),
    }
}

fn unsupported_recurrent(op: &Recurrent, ins: &[TensorType]) -> Option<&'static str> {
    let no = |bad: bool, because| bad.then_some(because);
    match op {
        Recurrent::ShortConv(_) => no(ins[1].dtype != DType::F32, "activations must be F32")
            .or(no(ins[2].shape.dims()[0] > MAX_CONV_WIDTH, "filters must be at most 8 wide")),
        Recurrent::GatedDelta(_) => {
            no(ins[1..6].iter().any(|x| x.dtype != DType::F32), "activations must be F32")
                .or(no(ins[1].shape.dim_back(0) > MAX_DELTA_KEY, "keys must have at most 256 elements"))
        }
    }
}

/// Whether kernels read matrices of this dtype, in their file layout or packed.
fn is_weight_dtype(dtype: DType) -> bool {
    LINEAR_DTYPES.contains(&dtype) || PACKED_DTYPES.contains(&dtype)
}

fn is_float_vector(ty: &TensorType) -> bool {
    ty.shape.rank() < 2 && ty.dtype.is_float()
}

/// Lowers the tasks of one plan to launches over one memory.
pub(crate) struct Lowering<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) plan: &'a Plan,
    pub(crate) resident: &'a ResidentMemory,
    /// Outputs outside the arena.
    pub(crate) results: &'a HashMap<BufferId, Buf>,
    pub(crate) rules: ChoiceRules<'a>,
    /// Whether launches may overlap; false when each of them is timed.
    pub(crate) overlaps: bool,
    /// cuBLASLt for products of many rows, if available.
    pub(crate) blas: Option<&'a Arc<BlasLt>>,
    /// Scratch areas of the launches.
    pub(crate) areas: PlacedAreas,
}

/// The launches of a task, and for a long product how much it still has to read of its weights.
#[derive(Default)]
struct Made {
    work: Vec<Work>,
    left: Option<usize>,
}

impl From<Launch> for Made {
    fn from(launch: Launch) -> Made {
        Made { work: vec![launch.into()], left: None }
    }
}

impl From<Vec<Launch>> for Made {
    fn from(launches: Vec<Launch>) -> Made {
        Made { work: launches.into_iter().map(Work::from).collect(), left: None }
    }
}

impl Lowering<'_> {
    /// Adds the launches of a segment, the names of their outputs, and the notes on work that could not be
    /// fused.
    pub(crate) fn push(&self, segment: &SegmentTasks, warm: &mut WarmPlan) -> Result<(), CudaError> {
        segment.notes.iter().for_each(|note| warm.note(note.clone()));
        // Bytes that the preceding launch still has to read, if it is a long product.
        let mut bytes_before = None;
        for task in &segment.tasks {
            let made = self.task(task, bytes_before.take(), warm);
            let made = made.map_err(|e| self.refuse(self.writes(task)[0].0, e))?;
            bytes_before = made.left;
            for (step, operand) in self.writes(task) {
                self.name_output(step, operand, warm)?;
            }
            made.work.into_iter().for_each(|work| warm.push(work));
        }
        Ok(())
    }

    fn task(
        &self,
        task: &KernelTask,
        bytes_before: Option<usize>,
        warm: &mut WarmPlan,
    ) -> Result<Made, KernelError> {
        let plan = self.plan;
        let steps = |nodes: &[NodeId]| nodes.iter().map(|&node| plan.step(node)).collect::<Vec<_>>();
        let mut launches = Vec::new();
        Ok(match task {
            KernelTask::Op(node) => {
                self.step(plan.step(*node), &mut launches)?;
                launches.into()
            }
            KernelTask::Row(run) => {
                let (launch, left) = self.row_products(run, bytes_before)?;
                Made { left, ..launch.into() }
            }
            KernelTask::Linear(products) => self.products(&steps(products))?.into(),
            KernelTask::Few(products) => {
                self.few(&steps(products), self.areas.own, &mut launches)?;
                launches.into()
            }
            KernelTask::Attend { attend, narrow } => self.attend(attend, narrow.as_ref())?.into(),
            KernelTask::AttendStored { attend, narrow } => {
                self.attend_stored(attend, narrow.as_ref())?.into()
            }
            KernelTask::RopeKv(group) => self.rope_kv(group)?.into(),
            KernelTask::Flash(node) => {
                self.kernels.flash(&self.attention_args(plan.step(*node))?, None)?.into()
            }
            KernelTask::Narrowed { node, to } => self.narrowed(plan.step(*node), to)?.into(),
            KernelTask::NarrowRows { products, to } => self.narrow_rows(&steps(products), to)?.into(),
            KernelTask::Batch(batch) => self.batch(batch)?.into(),
            KernelTask::Decode(product) => self.decode(plan.step(*product))?.into(),
            KernelTask::Gemm { products, rows, decoded, plan } => {
                self.gemm(&steps(products), rows, *decoded, *plan)?.into()
            }
            KernelTask::Library { product, rows, decoded } => {
                let Some(blas) = self.blas else { unreachable!("chosen with a library") };
                let [product, rehearsal] = self.library(blas, plan.step(*product), rows, *decoded)?;
                warm.rehearse(rehearsal);
                Made { work: vec![Work::Library(product)], left: None }
            }
            KernelTask::Experts(layer) => {
                self.expert_layer(layer, &mut launches)?;
                launches.into()
            }
            KernelTask::RoutedExperts(chain) => {
                self.routed_experts(chain, &mut launches)?;
                launches.into()
            }
            KernelTask::RouterLogits(products) => self.router_logits(products)?.into(),
            KernelTask::LibraryOfValues(product) => {
                let Some(blas) = self.blas else { unreachable!("chosen with a library") };
                let product = self.library_product_of_values(blas, plan.step(*product))?;
                warm.measure(product.clone());
                Made { work: vec![Work::Library(product)], left: None }
            }
        })
    }

    /// Operands that a task writes or prepares, at least one, each with its step.
    fn writes(&self, task: &KernelTask) -> Vec<(&Step, &Operand)> {
        let plan = self.plan;
        let of = |node: &NodeId| {
            let step = plan.step(*node);
            step.outputs.iter().map(move |operand| (step, operand))
        };
        match task {
            KernelTask::Op(node)
            | KernelTask::Flash(node)
            | KernelTask::Narrowed { node, .. }
            | KernelTask::Decode(node) => of(node).collect(),
            KernelTask::Row(run) => run.writes(plan),
            KernelTask::Batch(BatchProducts { gate: Some((gate, _)), .. }) => of(gate).collect(),
            KernelTask::Batch(BatchProducts { products, gate: None, .. }) => {
                products.iter().flat_map(of).collect()
            }
            KernelTask::Linear(nodes)
            | KernelTask::Few(nodes)
            | KernelTask::NarrowRows { products: nodes, .. }
            | KernelTask::Gemm { products: nodes, .. } => nodes.iter().flat_map(of).collect(),
            KernelTask::Library { product, .. } | KernelTask::LibraryOfValues(product) => {
                of(product).collect()
            }
            KernelTask::Attend { attend, .. } => {
                attend.appends.iter().chain([&attend.attention]).flat_map(of).collect()
            }
            KernelTask::AttendStored { attend, .. } => of(&attend.attention).collect(),
            KernelTask::Experts(layer) => of(&layer.summed).collect(),
            KernelTask::RoutedExperts(chain) => {
                let members = chain.route.iter().chain([&chain.gated, &chain.summed]);
                members.flat_map(of).collect()
            }
            KernelTask::RouterLogits(products) => {
                let producer = products.producer.iter().map(Producer::node);
                producer.chain([products.parts[0].product]).flat_map(|node| of(&node)).collect()
            }
            KernelTask::RopeKv(group) => group.ropes.iter().chain(&group.appends).flat_map(of).collect(),
        }
    }

    pub(crate) fn name_output(
        &self,
        step: &Step,
        operand: &Operand,
        warm: &mut WarmPlan,
    ) -> Result<(), CudaError> {
        let buf = match self.plan.buffer(operand.buffer).place {
            Place::State(s) => self.resident.state_buf(s.idx()),
            Place::Arena { .. } | Place::Control { .. } | Place::Weight(_) => self.buffer(operand.buffer),
        };
        let size = operand.dtype.block_bytes() as u64;
        warm.name_buffer(buf.map_err(CudaError::driver(&step.label))?, &step.label, size);
        Ok(())
    }

    pub(crate) fn refuse(&self, step: &Step, error: KernelError) -> CudaError {
        if let KernelError::Driver(source) = error {
            return CudaError::Driver { step: step.label.clone(), source };
        }
        CudaError::NoKernel { op: step.op.name(), label: step.label.clone(), because: error.to_string() }
    }

    fn buffer(&self, id: BufferId) -> Result<Buf, DriverError> {
        self.results.get(&id).map_or_else(|| self.resident.buffer(self.plan, id), |buf| Ok(*buf))
    }

    pub(crate) fn view(&self, operand: &Operand) -> Result<BufView, KernelError> {
        if self.resident.is_packed(self.plan, operand) {
            return Err(KernelError::Unsupported {
                op: "view",
                dtype: operand.dtype,
                shape: operand.layout.shape().to_string(),
                because: "this weight is packed, and only products and lookups read packed weights"
                    .to_owned(),
            });
        }
        let buf = self.buffer(operand.buffer)?;
        Ok(BufView { buf, dtype: self.resident.dtype(self.plan, operand), layout: operand.layout })
    }

    /// Bytes of a contiguous operand.
    pub(crate) fn dense(&self, step: &Step, operand: &Operand) -> Result<Buf, KernelError> {
        let view = self.view(operand)?;
        let strided = || KernelError::Unsupported {
            op: step.op.name(),
            dtype: view.dtype,
            shape: view.layout.shape().to_string(),
            because: format!("its strides are {:?}, it must be contiguous", view.layout.strides()),
        };
        if !view.layout.is_contiguous() {
            return Err(strided());
        }
        let start = view.dtype.bytes_for(view.layout.offset()).ok_or_else(strided)?;
        let len = view.dtype.bytes_for(view.layout.shape().n_elements()).ok_or_else(strided)?;
        Ok(view.buf.slice(start as u64, len as u64)?)
    }

    fn step(&self, step: &Step, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        if self.typed(step, launches)? {
            return Ok(());
        }
        let (k, label) = (self.kernels, step.label.as_str());
        let view = |i: usize| self.view(&step.inputs[i]);
        let dense = |i: usize| self.dense(step, &step.inputs[i]);
        let out = |i: usize| self.dense(step, &step.outputs[i]);
        match &step.op {
            Op::View(_) | Op::HostCall(_) => {}
            Op::Copy => launches.push(k.copy(&CopyArgs { x: view(0)?, y: out(0)?, step: label })?),
            Op::Cast(_) if step.inputs[0].dtype.is_quantized() => launches.push(self.decoded_weight(step)?),
            Op::Cast(to) => {
                launches.push(k.cast(&CastArgs { x: view(0)?, y: out(0)?, to: *to, step: label })?)
            }
            Op::Unary(f) => {
                launches.push(k.unary(&UnaryArgs { f: *f, x: view(0)?, y: out(0)?, step: label })?)
            }
            Op::Binary(f) => launches.push(k.binary(&BinaryArgs {
                f: *f,
                a: view(0)?,
                b: view(1)?,
                y: out(0)?,
                shape: step.outputs[0].layout.shape(),
                step: label,
            })?),
            Op::Reduce { kind, .. } => {
                let (x, [n_rows, n_cols]) = (view(0)?, self.rows(&step.inputs[0]));
                launches.push(k.reduce(&ReduceArgs {
                    kind: *kind,
                    x,
                    y: out(0)?,
                    n_rows,
                    n_cols,
                    step: label,
                })?);
            }
            Op::Softmax => {
                let (x, [n_rows, n_cols]) = (view(0)?, self.rows(&step.inputs[0]));
                launches.push(k.softmax(&SoftmaxArgs { x, y: out(0)?, n_rows, n_cols, step: label })?);
            }
            // Products of F32 rows with a weight are separate tasks.
            Op::MatMul | Op::Train(TrainOp::AddProduct) => launches.push(self.product_of_values(step)?),
            Op::GatherRows(_) => {
                let table = step.inputs[0].layout.shape();
                let packed = self.resident.is_packed(self.plan, &step.inputs[0]);
                let whole = || self.packed(step, &step.inputs[0], step.inputs[0].layout);
                launches.push(k.gather_rows(&GatherRowsArgs {
                    packed,
                    table: if packed { whole() } else { dense(0) }?,
                    dtype: self.resident.dtype(self.plan, &step.inputs[0]),
                    ids: dense(1)?,
                    y: out(0)?,
                    n_rows: table.dims()[0],
                    d: table.dims()[1],
                    n_ids: step.inputs[1].layout.shape().n_elements(),
                    step: label,
                })?);
            }
            Op::RmsNorm { eps } => {
                let (x, [n_rows, n_cols]) = (view(0)?, self.rows(&step.inputs[0]));
                let (w, y, eps) = (self.vector(step, 1)?, out(0)?, *eps);
                launches.push(k.rms_norm(&RmsNormArgs { x, w, y, n_rows, n_cols, eps, step: label })?);
            }
            Op::AddRmsNorm { eps } => {
                let [n_rows, n_cols] = self.rows(&step.outputs[0]);
                let (w, eps) = (self.vector(step, 2)?, *eps);
                let (a, b, sum, y) = (view(0)?, view(1)?, out(0)?, out(1)?);
                launches.push(k.add_rms_norm(&AddRmsNormArgs {
                    a,
                    b,
                    w,
                    sum,
                    y,
                    n_rows,
                    n_cols,
                    eps,
                    step: label,
                })?);
            }
            Op::Gate(kind) => {
                let [n_rows, n_cols] = self.rows(&step.outputs[0]);
                let (gate, up, y) = (view(0)?, view(1)?, out(0)?);
                launches.push(k.gate(&GateArgs { kind: *kind, gate, up, y, n_rows, n_cols, step: label })?);
            }
            Op::Rope(rope) => {
                let shape = step.inputs[0].layout.shape();
                launches.push(k.rope(&RopeArgs {
                    rope: *rope,
                    x: view(0)?,
                    positions: dense(1)?,
                    inv_freq: self.vector(step, 2)?,
                    y: out(0)?,
                    n: shape.dims()[0],
                    n_heads: shape.dims()[1],
                    head_dim: shape.dims()[2],
                    step: label,
                })?);
            }
            Op::KvAppend => launches.push(self.kv_append(step, None)?),
            Op::KvAppendBytes => {
                let (scales, _) = self.cache(step, &step.inputs[1])?;
                launches.push(self.kv_append(step, Some(scales))?);
            }
            Op::Attention(_) => self.attention(step, launches)?,
            Op::Recurrent(op) => launches.push(self.recurrent(step, op)?),
            Op::Sample(_) => self.sample(step, launches)?,
            Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::ScatterAddRows { .. } => unreachable!("lowered by `typed`"),
            Op::Moe(op) => self.experts(step, op, launches)?,
            Op::Lora(op) => launches.push(self.lora(step, *op)?),
            Op::SpanAttention(attention) => launches.push(self.span_attention(step, *attention)?),
            Op::Train(TrainOp::SpanAttentionGrad(attention)) => {
                self.span_attention_grad(step, *attention, launches)?;
            }
            Op::Train(_) => unreachable!("lowered by `typed`"),
            // The output is the state itself. That is safe: each element is read before it is written.
            Op::Accumulate => launches.push(k.binary(&BinaryArgs {
                f: Binary::Add,
                a: view(0)?,
                b: view(1)?,
                y: out(0)?,
                shape: step.outputs[0].layout.shape(),
                step: label,
            })?),
        }
        Ok(())
    }

    pub(crate) fn rows(&self, operand: &Operand) -> [usize; 2] {
        let shape = operand.layout.shape();
        let n_cols = shape.dim_back(0);
        [shape.n_elements() / n_cols.max(1), n_cols]
    }

    /// A contiguous F32 vector such as a norm's weight.
    pub(crate) fn vector(&self, step: &Step, i: usize) -> Result<Buf, KernelError> {
        let operand = &step.inputs[i];
        let dtype = self.resident.dtype(self.plan, operand);
        if dtype != DType::F32 {
            let (op, shape) = (step.op.name(), operand.layout.shape().to_string());
            let because = format!("input {i} must be F32 on the device");
            return Err(KernelError::Unsupported { op, dtype, shape, because });
        }
        self.dense(step, operand)
    }

    /// Bytes of a product's whole weight `[n, k]`, which the step sees transposed.
    pub(crate) fn weight(&self, step: &Step) -> Result<Buf, KernelError> {
        let operand = &step.inputs[1];
        let Ok(rows) = operand.layout.transpose() else {
            return Err(self.partial_view(step, operand));
        };
        match self.resident.is_packed(self.plan, operand) {
            true => self.packed(step, operand, rows),
            // An unpacked quantised weight has the file layout, which the kernels of its dtype do not read.
            false if PACKED_DTYPES.contains(&operand.dtype) => Err(self.partial_view(step, operand)),
            false if rows.is_contiguous() && rows.offset() == 0 => Ok(self.buffer(operand.buffer)?),
            false => Err(self.partial_view(step, operand)),
        }
    }

    /// Decodes a quantised weight to a BF16 value.
    fn decoded_weight(&self, step: &Step) -> Result<Launch, KernelError> {
        let operand = &step.inputs[0];
        let layout = operand.layout;
        let w = match self.resident.is_packed(self.plan, operand) {
            true => self.packed(step, operand, layout)?,
            false if PACKED_DTYPES.contains(&operand.dtype) => return Err(self.partial_view(step, operand)),
            false => self.dense(step, operand)?,
        };
        let &[n, k] = layout.shape().dims() else { return Err(self.partial_view(step, operand)) };
        let (dtype, y) = (operand.dtype, self.dense(step, &step.outputs[0])?);
        self.kernels.dequant(&DequantArgs { w, dtype, y, n, k, step: &step.label })
    }

    /// Bytes of a packed weight in its declared shape: tiles cannot be viewed in any other way.
    pub(crate) fn packed(
        &self,
        step: &Step,
        operand: &Operand,
        rows: refrain_tensor::Layout,
    ) -> Result<Buf, KernelError> {
        let declared = self.resident.packed_shape(self.plan, operand);
        let whole = rows.is_contiguous() && rows.offset() == 0 && Some(rows.shape()) == declared;
        if !whole {
            return Err(self.partial_view(step, operand));
        }
        Ok(self.buffer(operand.buffer)?)
    }

    fn partial_view(&self, step: &Step, operand: &Operand) -> KernelError {
        KernelError::Unsupported {
            op: step.op.name(),
            dtype: operand.dtype,
            shape: operand.layout.shape().to_string(),
            because: "the weight is a partial view or has another shape than declared".to_owned(),
        }
    }

    /// Matrix products of the same rows with weights of one dtype, as one launch.
    fn products(&self, steps: &[&Step]) -> Result<Launch, KernelError> {
        let parts = steps.iter().map(|step| self.product(step)).collect::<Result<Vec<_>, _>>()?;
        let labels: Vec<&str> = steps.iter().map(|step| step.label.as_str()).collect();
        let (step, [m, _]) = (steps[0], self.rows(&steps[0].outputs[0]));
        let is_weight = |s: &&Step| matches!(self.plan.buffer(s.inputs[1].buffer).place, Place::Weight(_));
        self.kernels.linear(&LinearArgs {
            x: self.view(&step.inputs[0])?,
            w_dtype: self.resident.dtype(self.plan, &step.inputs[1]),
            parts: &parts,
            m,
            k: step.inputs[1].layout.shape().dims()[0],
            w_is_fixed: steps.iter().all(is_weight),
            step: &labels.join(" + "),
        })
    }

    /// The right operand must be a weight or value `[n, k]`, seen transposed.
    pub(crate) fn product(&self, step: &Step) -> Result<LinearPart, KernelError> {
        if self.resident.is_packed(self.plan, &step.inputs[1]) {
            let n = step.inputs[1].layout.shape().dims()[1];
            return Ok(LinearPart { w: self.weight(step)?, y: self.dense(step, &step.outputs[0])?, n });
        }
        if PACKED_DTYPES.contains(&step.inputs[1].dtype) {
            return Err(self.partial_view(step, &step.inputs[1]));
        }
        let (x, w) = (self.view(&step.inputs[0])?, self.view(&step.inputs[1])?);
        let refuse = || KernelError::Unsupported {
            op: "matmul",
            dtype: w.dtype,
            shape: format!("{} by {}", x.layout.shape(), w.layout.shape()),
            because: format!(
                "the right operand has strides {:?}, must be a transposed [n, k] matrix",
                w.layout.strides()
            ),
        };
        let &[k, n] = w.layout.shape().dims() else { return Err(refuse()) };
        let transposed =
            w.layout.transpose().ok().filter(refrain_tensor::Layout::is_contiguous).ok_or_else(refuse)?;
        let start = w.dtype.bytes_for(transposed.offset()).ok_or_else(refuse)?;
        let bytes = w.dtype.bytes_for(n * k).ok_or_else(refuse)?;
        let y = self.dense(step, &step.outputs[0])?;
        Ok(LinearPart { w: w.buf.slice(start as u64, bytes as u64)?, y, n })
    }

    /// A cache including its scratch blocks, and the number of its blocks.
    pub(crate) fn cache(&self, step: &Step, operand: &Operand) -> Result<(Buf, usize), KernelError> {
        let refuse = |because: &str| KernelError::Unsupported {
            op: step.op.name(),
            dtype: operand.dtype,
            shape: operand.layout.shape().to_string(),
            because: because.to_owned(),
        };
        let Place::State(id) = self.plan.buffer(operand.buffer).place else {
            return Err(refuse("the cache is not a state"));
        };
        if !operand.layout.is_contiguous() || operand.layout.offset() != 0 {
            return Err(refuse("the cache must not be a view"));
        }
        let state = self.resident.state(id.idx());
        let n_blocks = operand.layout.shape().dims()[0];
        Ok((self.resident.state_buf(id.idx())?, n_blocks + state.n_scratch))
    }

    /// Appends rows to a cache; an 8-bit one has scales as its second input.
    fn kv_append(&self, step: &Step, scales: Option<Buf>) -> Result<Launch, KernelError> {
        let (cache, n_blocks) = self.cache(step, &step.inputs[0])?;
        // From the rows on.
        let ins = &step.inputs[if scales.is_some() { 2 } else { 1 }..];
        let (shape, tables) = (step.inputs[0].layout.shape(), ins[3].layout.shape());
        self.kernels.kv_append(&KvAppendArgs {
            cache,
            cache_dtype: step.inputs[0].dtype,
            scales,
            x: self.view(&ins[0])?,
            positions: self.dense(step, &ins[1])?,
            seqs: self.dense(step, &ins[2])?,
            tables: self.dense(step, &ins[3])?,
            n: ins[0].layout.shape().dims()[0],
            n_blocks,
            n_kv_heads: shape.dims()[1],
            kv_block: shape.dims()[2],
            head_dim: shape.dims()[3],
            n_seqs: tables.dims()[0],
            max_blocks: tables.dims()[1],
            step: &step.label,
        })
    }

    /// A state in slots, including those for verification, and the inputs that map rows to slots.
    fn slots(&self, step: &Step, positions: usize) -> Result<SlotArgs, KernelError> {
        let ins = &step.inputs;
        let (state, n_slots) = self.cache(step, &ins[0])?;
        Ok(SlotArgs {
            state,
            positions: self.dense(step, &ins[positions])?,
            seqs: self.dense(step, &ins[positions + 1])?,
            slots: self.dense(step, &ins[positions + 2])?,
            n_tokens: ins[positions].layout.shape().dims()[0],
            n_seqs: ins[positions + 2].layout.shape().dims()[0],
            n_slots,
        })
    }

    fn lora(&self, step: &Step, op: LoraOp) -> Result<Launch, KernelError> {
        let ins = &step.inputs;
        let (at, dims) = (op.factors(), ins[op.factors()].layout.shape());
        let args = LoraArgs {
            factors: self.dense(step, &ins[at])?,
            dtype: self.resident.dtype(self.plan, &ins[at]),
            seqs: self.dense(step, &ins[at + 1])?,
            adapters: self.dense(step, &ins[at + 2])?,
            n: ins[at + 1].layout.shape().n_elements(),
            n_seqs: ins[at + 2].layout.shape().n_elements(),
            n_adapters: dims.dims()[0],
            rank: dims.dims()[1],
            width: dims.dims()[2],
            step: step.label.as_str(),
        };
        let (x, out) = (self.view(&ins[at - 1])?, self.dense(step, &step.outputs[0])?);
        match op {
            LoraOp::Down => self.kernels.lora_down(&args, &x, out),
            LoraOp::Up => self.kernels.lora_up(&args, &x, &self.view(&ins[0])?, out),
        }
    }

    fn recurrent(&self, step: &Step, op: &Recurrent) -> Result<Launch, KernelError> {
        let (ins, label) = (&step.inputs, step.label.as_str());
        let slots = self.slots(step, op.positions())?;
        let y = self.dense(step, &step.outputs[0])?;
        match op {
            Recurrent::ShortConv(conv) => {
                let filter = ins[2].layout.shape();
                let [width, d] = [filter.dims()[0], filter.dims()[1]];
                let (x, w) = (self.view(&ins[1])?, self.dense(step, &ins[2])?);
                self.kernels.short_conv(&ShortConvArgs { slots, x, w, y, d, width, conv: *conv, step: label })
            }
            Recurrent::GatedDelta(delta) => {
                let (keys, values) = (ins[1].layout.shape(), ins[3].layout.shape());
                self.kernels.gated_delta(&GatedDeltaArgs {
                    slots,
                    q: self.view(&ins[1])?,
                    k: self.view(&ins[2])?,
                    v: self.view(&ins[3])?,
                    a: self.view(&ins[4])?,
                    b: self.view(&ins[5])?,
                    decay: self.vector(step, 6)?,
                    dt_bias: self.vector(step, 7)?,
                    y,
                    n_key_heads: keys.dims()[1],
                    n_heads: values.dims()[1],
                    k_dim: keys.dims()[2],
                    v_dim: values.dims()[2],
                    delta: *delta,
                    step: label,
                })
            }
        }
    }

    fn rope_kv(&self, group: &RopeAppend) -> Result<Launch, KernelError> {
        let [q, k] = group.ropes.map(|node| self.plan.step(node));
        let [keys, values] = group.appends.map(|node| self.plan.step(node));
        let Op::Rope(rope) = q.op else { unreachable!("called for rope") };
        let ((k_cache, n_blocks), (v_cache, _)) =
            (self.cache(keys, &keys.inputs[0])?, self.cache(values, &values.inputs[0])?);
        let (heads, cache) = (q.inputs[0].layout.shape(), keys.inputs[0].layout.shape());
        let tables = keys.inputs[4].layout.shape();
        let labels = [q, k, keys, values].map(|step| step.label.as_str());
        self.kernels.rope_kv(&RopeKvArgs {
            rope,
            q: self.view(&q.inputs[0])?,
            k: self.view(&k.inputs[0])?,
            v: self.view(&values.inputs[1])?,
            q_out: self.dense(q, &q.outputs[0])?,
            k_out: self.dense(k, &k.outputs[0])?,
            k_cache,
            v_cache,
            cache_dtype: keys.inputs[0].dtype,
            positions: self.dense(q, &q.inputs[1])?,
            seqs: self.dense(keys, &keys.inputs[3])?,
            tables: self.dense(keys, &keys.inputs[4])?,
            inv_freq: self.vector(q, 2)?,
            n: heads.dims()[0],
            n_heads: heads.dims()[1],
            n_blocks,
            n_kv_heads: cache.dims()[1],
            kv_block: cache.dims()[2],
            head_dim: heads.dims()[2],
            n_seqs: tables.dims()[0],
            max_blocks: tables.dims()[1],
            step: &labels.join(" + "),
        })
    }

    fn attention(&self, step: &Step, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let args = self.attention_args(step)?;
        let bytes = attention_scratch_bytes(args.n, args.n_heads, args.head_dim, args.n_splits);
        let scratch = Some(self.areas.own.slice(0, bytes)?);
        self.kernels.attention(&AttentionArgs { scratch, ..args }, launches)
    }

    /// Arguments of an attention, without scratch.
    pub(crate) fn attention_args<'s>(&self, step: &'s Step) -> Result<AttentionArgs<'s>, KernelError> {
        let Op::Attention(attention) = step.op else { unreachable!("called for attention") };
        let ins = &step.inputs;
        let ((k_cache, n_blocks), (v_cache, _)) = (self.cache(step, &ins[1])?, self.cache(step, &ins[2])?);
        let (q, cache, tables) = (ins[0].layout.shape(), ins[1].layout.shape(), ins[5].layout.shape());
        let [n, n_heads, head_dim] = [q.dims()[0], q.dims()[1], q.dims()[2]];
        let n_splits = splits(step, self.rules);
        let AttentionInputs { scales, sinks } = AttentionInputs::of(ins.len());
        let scales = match scales {
            Some([k, v]) => Some([self.cache(step, &ins[k])?.0, self.cache(step, &ins[v])?.0]),
            None => None,
        };
        Ok(AttentionArgs {
            attention,
            q: self.view(&ins[0])?,
            k_cache,
            v_cache,
            cache_dtype: ins[1].dtype,
            scales,
            positions: self.dense(step, &ins[3])?,
            seqs: self.dense(step, &ins[4])?,
            tables: self.dense(step, &ins[5])?,
            sinks: sinks.map(|sinks| self.vector(step, sinks)).transpose()?,
            y: self.dense(step, &step.outputs[0])?,
            scratch: None,
            n,
            n_heads,
            n_blocks,
            n_kv_heads: cache.dims()[1],
            kv_block: cache.dims()[2],
            head_dim,
            n_seqs: tables.dims()[0],
            max_blocks: tables.dims()[1],
            n_splits,
            step: &step.label,
        })
    }

    fn sample(&self, step: &Step, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let ins = &step.inputs;
        let logits = ins[0].layout.shape();
        let [n, vocab] = [logits.dims()[0], logits.dims()[1]];
        let top = match &step.outputs[..] {
            [_, _, ids, logprobs] => Some(SampleTop {
                ids: self.dense(step, ids)?,
                logprobs: self.dense(step, logprobs)?,
                n_top: ids.layout.shape().dim_back(0),
            }),
            _ => None,
        };
        let args = SampleArgs {
            logits: self.view(&ins[0])?,
            params: self.dense(step, &ins[1])?,
            rng: self.dense(step, &ins[2])?,
            history: self.dense(step, &ins[3])?,
            bias_ids: self.dense(step, &ins[4])?,
            bias: self.dense(step, &ins[5])?,
            mask: ins.get(6).map(|mask| self.dense(step, mask)).transpose()?,
            token: self.dense(step, &step.outputs[0])?,
            logprob: self.dense(step, &step.outputs[1])?,
            scratch: self.areas.own.slice(0, sample_scratch_bytes(n, vocab))?,
            state: self.resident.counters.slice(COUNTER_BYTES, sample_state_bytes(n))?,
            n,
            vocab,
            n_history: ins[3].layout.shape().dim_back(0),
            n_bias: ins[4].layout.shape().dim_back(0),
            top,
            step: &step.label,
        };
        self.kernels.sample(&args, launches)
    }
}
