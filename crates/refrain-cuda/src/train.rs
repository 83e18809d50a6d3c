//! Lowers ops of a training step, and other ops whose elements are not F32.

use refrain_driver::{Buf, Launch};
use refrain_graph::{AdamW, Op, Operand, Step, TrainOp};
use refrain_kernels::{
    AdamTensor, AdamWArgs, BufView, CrossEntropyArgs, Floats, KernelError, MapArgs, MapOp, NormWeights,
    PadArgs, PickArgs, PlaceColumnsArgs, RmsNormGradArgs, ScatterAddRowsArgs, SoftmaxGradArgs,
    SumSquaresArgs, TypedAddRmsNormArgs, TypedGatherArgs, TypedReduceArgs, TypedRmsNormArgs, TypedRopeArgs,
    TypedSoftmaxArgs, reduce_scratch_bytes, rms_norm_grad_scratch_bytes, scatter_scratch_bytes,
    sum_squares_scratch_bytes,
};
use refrain_tensor::DType;

use crate::group::n_rows;
use crate::lower::Lowering;

/// Scratch that the launches of a step share.
pub(crate) fn scratch_bytes(step: &Step) -> u64 {
    let shape = |i: usize| step.inputs[i].layout.shape();
    match &step.op {
        Op::Reduce { axis, .. } => reduce_scratch_bytes(shape(0).dims(), *axis),
        Op::ScatterAddRows { .. } => scatter_scratch_bytes(shape(0).n_elements()),
        Op::Train(TrainOp::RmsNormGrad { .. }) => {
            rms_norm_grad_scratch_bytes(n_rows(&step.inputs[1].layout), shape(1).dim_back(0))
        }
        Op::Train(TrainOp::SumSquares) => {
            sum_squares_scratch_bytes(step.inputs.iter().map(|x| x.layout.shape().n_elements()))
        }
        Op::Train(
            TrainOp::UnaryGrad(_)
            | TrainOp::GateGrad(_)
            | TrainOp::SoftmaxGrad
            | TrainOp::RopeGrad(_)
            | TrainOp::SpanAttentionGrad(_)
            | TrainOp::AddProduct
            | TrainOp::CrossEntropy
            | TrainOp::Dropout(_)
            | TrainOp::AdamW(_),
        )
        | Op::View(_)
        | Op::Copy
        | Op::Cast(_)
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Pick
        | Op::PlaceColumns { .. }
        | Op::Pad { .. }
        | Op::Softmax
        | Op::MatMul
        | Op::GatherRows(_)
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::Gate(_)
        | Op::Rope(_)
        | Op::KvAppend
        | Op::KvAppendBytes
        | Op::Attention(_)
        | Op::SpanAttention(_)
        | Op::Recurrent(_)
        | Op::Moe(_)
        | Op::Lora(_)
        | Op::Sample(_)
        | Op::Accumulate
        | Op::HostCall(_) => 0,
    }
}

impl Lowering<'_> {
    /// Adds the launches of a step if the typed kernels implement it: ops that only training has, and ops
    /// that are not all F32. Returns whether they do.
    pub(crate) fn typed(&self, step: &Step, launches: &mut Vec<Launch>) -> Result<bool, KernelError> {
        let is_f32 = || self.is_f32(step);
        match &step.op {
            Op::Cast(to) if *to == DType::I32 || step.inputs[0].dtype == DType::I32 => {
                launches.push(self.map(step, MapOp::Cast)?);
            }
            Op::Unary(f) if !is_f32() => launches.push(self.map(step, MapOp::Unary(*f))?),
            Op::Binary(f) if !is_f32() => launches.push(self.map(step, MapOp::Binary(*f))?),
            Op::Accumulate if !is_f32() => {
                launches.push(self.map(step, MapOp::Binary(refrain_graph::Binary::Add))?);
            }
            Op::Gate(kind) if !is_f32() => launches.push(self.map(step, MapOp::Gate(*kind))?),
            Op::Compare(kind) => launches.push(self.map(step, MapOp::Compare(*kind))?),
            Op::Select => launches.push(self.map(step, MapOp::Select)?),
            Op::Reduce { axis, .. } if !is_f32() || axis + 1 != step.inputs[0].layout.shape().rank() => {
                self.typed_reduce(step, launches)?;
            }
            Op::Softmax if !is_f32() => {
                let (x, [n_rows, n_cols]) = (self.view(&step.inputs[0])?, self.rows(&step.inputs[0]));
                let (y, step) = (self.out(step, 0)?, step.label.as_str());
                launches.push(self.kernels.typed_softmax(&TypedSoftmaxArgs {
                    x,
                    y,
                    n_rows,
                    n_cols,
                    step,
                })?);
            }
            Op::RmsNorm { eps } if !is_f32() => {
                let (x, [n_rows, n_cols]) = (self.view(&step.inputs[0])?, self.rows(&step.inputs[0]));
                let (w, y, eps) = (self.norm_weights(step, 1)?, self.out(step, 0)?, *eps);
                let args = TypedRmsNormArgs { x, w, y, n_rows, n_cols, eps, step: &step.label };
                launches.push(self.kernels.typed_rms_norm(&args)?);
            }
            Op::AddRmsNorm { eps } if !is_f32() => {
                let [n_rows, n_cols] = self.rows(&step.outputs[0]);
                launches.push(self.kernels.typed_add_rms_norm(&TypedAddRmsNormArgs {
                    a: self.view(&step.inputs[0])?,
                    b: self.view(&step.inputs[1])?,
                    w: self.norm_weights(step, 2)?,
                    sum: self.out(step, 0)?,
                    y: self.out(step, 1)?,
                    n_rows,
                    n_cols,
                    eps: *eps,
                    step: &step.label,
                })?);
            }
            Op::GatherRows(to) if *to != DType::F32 => launches.push(self.typed_gather(step, *to)?),
            Op::Rope(rope) if !is_f32() => launches.push(self.typed_rope(step, *rope, false)?),
            Op::Pick => launches.push(self.kernels.pick(&PickArgs {
                x: self.view(&step.inputs[0])?,
                ids: self.dense(step, &step.inputs[1])?,
                y: self.out(step, 0)?,
                step: &step.label,
            })?),
            Op::PlaceColumns { width } => launches.push(self.kernels.place_columns(&PlaceColumnsArgs {
                ids: self.dense(step, &step.inputs[0])?,
                x: self.dense(step, &step.inputs[1])?,
                dtype: self.dtype(&step.inputs[1]),
                y: self.out(step, 0)?,
                n_rows: step.inputs[0].layout.shape().n_elements(),
                width: *width,
                step: &step.label,
            })?),
            Op::Pad { axis, before, after } => launches.push(self.kernels.pad(&PadArgs {
                x: self.view(&step.inputs[0])?,
                axis: *axis,
                before: *before,
                after: *after,
                y: self.out(step, 0)?,
                step: &step.label,
            })?),
            Op::ScatterAddRows { n_rows } => self.kernels.scatter_add_rows(
                &ScatterAddRowsArgs {
                    ids: self.dense(step, &step.inputs[0])?,
                    x: self.view(&step.inputs[1])?,
                    y: self.out(step, 0)?,
                    scratch: self.own_scratch(step)?,
                    n_rows: *n_rows,
                    step: &step.label,
                },
                launches,
            )?,
            Op::Train(op) => return self.train(step, op, launches),
            Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce { .. }
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Attention(_)
            | Op::SpanAttention(_)
            | Op::Recurrent(_)
            | Op::Moe(_)
            | Op::Lora(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::HostCall(_) => return Ok(false),
        }
        Ok(true)
    }

    fn train(&self, step: &Step, op: &TrainOp, launches: &mut Vec<Launch>) -> Result<bool, KernelError> {
        match op {
            TrainOp::UnaryGrad(f) => launches.push(self.map(step, MapOp::UnaryGrad(*f))?),
            TrainOp::GateGrad(kind) => launches.push(self.map(step, MapOp::GateGrad(*kind))?),
            TrainOp::Dropout(dropout) => {
                let rng = self.dense(step, &step.inputs[1])?;
                launches.push(self.map(step, MapOp::Dropout { dropout: *dropout, rng })?);
            }
            TrainOp::SoftmaxGrad => {
                let [n_rows, n_cols] = self.rows(&step.outputs[0]);
                launches.push(self.kernels.softmax_grad(&SoftmaxGradArgs {
                    dy: self.view(&step.inputs[0])?,
                    y: self.view(&step.inputs[1])?,
                    dx: self.out(step, 0)?,
                    n_rows,
                    n_cols,
                    step: &step.label,
                })?);
            }
            TrainOp::RmsNormGrad { eps, adds } => {
                let [n_rows, n_cols] = self.rows(&step.outputs[0]);
                let args = RmsNormGradArgs {
                    dy: self.view(&step.inputs[0])?,
                    x: self.view(&step.inputs[1])?,
                    w: self.norm_weights(step, 2)?,
                    dx: self.out(step, 0)?,
                    more: if *adds { Some(self.dense(step, &step.inputs[3])?) } else { None },
                    dw: self.out(step, 1)?,
                    dw_dtype: step.outputs[1].dtype,
                    scratch: self.own_scratch(step)?,
                    n_rows,
                    n_cols,
                    eps: *eps,
                    step: &step.label,
                };
                self.kernels.rms_norm_grad(&args, launches)?;
            }
            TrainOp::RopeGrad(rope) => launches.push(self.typed_rope(step, *rope, true)?),
            TrainOp::CrossEntropy => launches.push(self.kernels.cross_entropy(&CrossEntropyArgs {
                logits: self.view(&step.inputs[0])?,
                targets: self.dense(step, &step.inputs[1])?,
                scale: self.dense(step, &step.inputs[2])?,
                loss: self.out(step, 0)?,
                dx: self.out(step, 1)?,
                step: &step.label,
            })?),
            TrainOp::SumSquares => {
                let tensor = |x: &Operand| Ok((self.floats(step, x)?, x.layout.shape().n_elements()));
                let tensors = step.inputs.iter().map(tensor).collect::<Result<Vec<_>, KernelError>>()?;
                let (sum, scratch) = (self.out(step, 0)?, self.own_scratch(step)?);
                let args = SumSquaresArgs { tensors: &tensors, sum, scratch, step: &step.label };
                self.kernels.sum_squares(&args, launches)?;
            }
            TrainOp::AdamW(adam) => self.adamw(step, adam, launches)?,
            TrainOp::SpanAttentionGrad(_) | TrainOp::AddProduct => return Ok(false),
        }
        Ok(true)
    }

    fn adamw(&self, step: &Step, adam: &AdamW, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let floats = |i: usize| self.floats(step, &step.inputs[i]);
        let tensor = |(i, &decays): (usize, &bool)| {
            let slots = adam.slots(i);
            Ok(AdamTensor {
                n: step.inputs[slots.weight].layout.shape().n_elements(),
                grad: floats(slots.grad)?,
                weight: floats(slots.weight)?,
                master: slots.master.map(|master| self.dense(step, &step.inputs[master])).transpose()?,
                m: floats(slots.m)?,
                v: floats(slots.v)?,
                decays,
            })
        };
        let tensors = adam.decays.iter().enumerate().map(tensor).collect::<Result<Vec<_>, KernelError>>()?;
        let args = AdamWArgs {
            count: self.dense(step, &step.inputs[AdamW::COUNT])?,
            params: self.dense(step, &step.inputs[AdamW::PARAMS])?,
            sum_squares: self.dense(step, &step.inputs[AdamW::SUM_SQUARES])?,
            tensors: &tensors,
            clears: adam.clears,
            step: &step.label,
        };
        self.kernels.adamw(&args, launches)
    }

    fn map(&self, step: &Step, op: MapOp) -> Result<Launch, KernelError> {
        let n_inputs = if matches!(op, MapOp::Dropout { .. }) { 1 } else { step.inputs.len() };
        let inputs = step.inputs[..n_inputs].iter().map(|input| self.view(input));
        let inputs = inputs.collect::<Result<Vec<BufView>, _>>()?;
        let outputs = (0..step.outputs.len()).map(|i| self.out(step, i)).collect::<Result<Vec<Buf>, _>>()?;
        self.kernels.map(&MapArgs {
            op,
            inputs: &inputs,
            outputs: &outputs,
            dtype: step.outputs[0].dtype,
            shape: step.outputs[0].layout.shape(),
            step: &step.label,
        })
    }

    fn typed_reduce(&self, step: &Step, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let Op::Reduce { kind, axis } = step.op else { unreachable!("called for reductions") };
        let args = TypedReduceArgs {
            kind,
            x: self.view(&step.inputs[0])?,
            axis,
            y: self.out(step, 0)?,
            scratch: self.own_scratch(step)?,
            step: &step.label,
        };
        self.kernels.typed_reduce(&args, launches)
    }

    fn typed_gather(&self, step: &Step, dtype: DType) -> Result<Launch, KernelError> {
        let table = step.inputs[0].layout.shape();
        self.kernels.typed_gather(&TypedGatherArgs {
            table: self.dense(step, &step.inputs[0])?,
            table_dtype: self.dtype(&step.inputs[0]),
            ids: self.dense(step, &step.inputs[1])?,
            y: self.out(step, 0)?,
            dtype,
            n_rows: table.dims()[0],
            d: table.dims()[1],
            n_ids: step.inputs[1].layout.shape().n_elements(),
            step: &step.label,
        })
    }

    fn typed_rope(
        &self,
        step: &Step,
        rope: refrain_graph::Rope,
        is_inverse: bool,
    ) -> Result<Launch, KernelError> {
        let shape = step.inputs[0].layout.shape();
        self.kernels.typed_rope(&TypedRopeArgs {
            rope,
            is_inverse,
            x: self.view(&step.inputs[0])?,
            positions: self.dense(step, &step.inputs[1])?,
            inv_freq: self.vector(step, 2)?,
            y: self.out(step, 0)?,
            n: shape.dims()[0],
            n_heads: shape.dims()[1],
            head_dim: shape.dims()[2],
            step: &step.label,
        })
    }

    /// Whether every float that a step reads or writes is F32 on the device.
    fn is_f32(&self, step: &Step) -> bool {
        let operands = step.inputs.iter().chain(&step.outputs);
        let mut dtypes = operands.map(|operand| self.dtype(operand));
        dtypes.all(|dtype| dtype == DType::F32 || !dtype.is_float())
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.resident.dtype(self.plan, operand)
    }

    fn out(&self, step: &Step, i: usize) -> Result<Buf, KernelError> {
        self.dense(step, &step.outputs[i])
    }

    fn floats(&self, step: &Step, operand: &Operand) -> Result<Floats, KernelError> {
        Ok(Floats { buf: self.dense(step, operand)?, dtype: self.dtype(operand) })
    }

    fn norm_weights(&self, step: &Step, i: usize) -> Result<NormWeights, KernelError> {
        let operand = &step.inputs[i];
        Ok(NormWeights { buf: self.dense(step, operand)?, dtype: self.dtype(operand) })
    }

    fn own_scratch(&self, step: &Step) -> Result<Buf, KernelError> {
        Ok(self.areas.own.slice(0, scratch_bytes(step))?)
    }
}
