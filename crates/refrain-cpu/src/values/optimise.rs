//! The optimiser, gradient accumulation and norms.

use super::compile::SQUARES;
use super::spread::{CHUNK, ReadOperand, WriteOperand, spread};
use super::{Tools, ValueCall, ValueLoc, Values};
use crate::simd::{self, AdamStep};
use refrain_graph::{AdamParam, AdamW};
use refrain_tensor::DType;

impl Values<'_> {
    /// Sums blocks of [`SQUARES`] elements in F32, then adds the partial sums in order in F64.
    pub(super) fn sum_squares(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let mut total = 0f64;
        for (i, input) in call.ins.iter().enumerate() {
            let n_parts = input.len().div_ceil(SQUARES);
            let (parts, local) = scratch.split_at_mut(n_parts);
            let read = ops.read(call, i, SQUARES);
            let write = WriteOperand { dtype: DType::F32, bytes: bytemuck::cast_slice_mut(parts), chunk: 1 };
            spread(pool, level, [read], [write], local, |_, [x], [part]| {
                part[0] = simd::sum_squares(level, x)
            });
            total += parts.iter().map(|&part| f64::from(part)).sum::<f64>();
        }
        let [out, ..] = ops.carved.outs;
        out[0] = total as f32;
    }

    /// `state += x`
    pub(super) fn accumulate(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let ValueLoc::State(state) = call.outs[0].at else { unreachable!("accumulators are states") };
        let Values { pool, level, states, scratch, .. } = self;
        let level = *level;
        let dtype = call.ins[1].dtype;
        let apply = |to: &mut [u8], bytes: &[u8], local: &mut [f32]| {
            let held = ReadOperand { dtype: DType::F32, bytes: None, held: 0, chunk: CHUNK };
            let read = ReadOperand { dtype, bytes: Some(bytes), held: 0, chunk: CHUNK };
            let write = WriteOperand { dtype: DType::F32, bytes: to, chunk: CHUNK };
            spread(pool, level, [held, read], [write], local, |_, [sum, x], [out]| {
                simd::add(level, sum, x, out)
            });
        };
        match &call.ins[1].at {
            ValueLoc::Arena(words) => {
                let bytes: &[u8] = bytemuck::cast_slice(&arena[words.clone()]);
                apply(states.get_mut(state), &bytes[call.ins[1].span()], scratch);
            }
            ValueLoc::State(other) => {
                let Some([to, bytes]) = states.several_mut([state, *other]) else {
                    unreachable!("a state is not accumulated into itself")
                };
                apply(to, &bytes[call.ins[1].span()], scratch);
            }
            ValueLoc::Control(range) => {
                let bytes = &self.control[range.clone()];
                apply(states.get_mut(state), &bytes[call.ins[1].span()], scratch);
            }
            ValueLoc::Weight(_) => unreachable!("compiled for computed values and step inputs"),
        }
    }

    pub(super) fn adamw(&mut self, call: &ValueCall, adam: &AdamW, arena: &mut [f32]) {
        let (params, sum_squares) = {
            let (ops, _) = self.open(&[], arena);
            let floats =
                |i: usize| -> &[f32] { bytemuck::cast_slice(ops.dense(&call.ins[i]).unwrap_or(&[])) };
            let params: [f32; refrain_graph::ADAM_PARAMS] = std::array::from_fn(|i| floats(AdamW::PARAMS)[i]);
            (params, floats(AdamW::SUM_SQUARES)[0])
        };
        let of = |param: AdamParam| params[param as usize];
        let is_applied = sum_squares.is_finite();
        let ValueLoc::State(count) = call.ins[AdamW::COUNT].at else { unreachable!("the count is a state") };
        let count = bytemuck::cast_slice_mut::<u8, i32>(self.states.get_mut(count));
        count[0] = count[0].saturating_add(i32::from(is_applied));
        let n_applied = count[0] as f32;
        let clip = match of(AdamParam::MaxNorm) {
            0.0 => 1.0,
            max => (max / (sum_squares.sqrt() + 1e-6)).min(1.0),
        };
        let correction = |ln_beta: AdamParam| -(n_applied * of(ln_beta)).exp_m1();
        let step = AdamStep {
            clip,
            beta1: of(AdamParam::Beta1),
            one_minus_beta1: of(AdamParam::OneMinusBeta1),
            beta2: of(AdamParam::Beta2),
            one_minus_beta2: of(AdamParam::OneMinusBeta2),
            rate: of(AdamParam::Lr) / correction(AdamParam::LnBeta1),
            root: correction(AdamParam::LnBeta2).sqrt(),
            eps: of(AdamParam::Eps),
            decay: 1.0,
        };
        for (tensor, &decays) in adam.decays.iter().enumerate() {
            let decay = if decays { 1.0 - of(AdamParam::Lr) * of(AdamParam::WeightDecay) } else { 1.0 };
            let slots = adam.slots(tensor);
            if !is_applied {
                if let (true, ValueLoc::State(grad)) = (adam.clears, &call.ins[slots.grad].at) {
                    self.states.get_mut(*grad).fill(0);
                }
                continue;
            }
            let step = AdamStep { decay, ..step };
            let grad = adam.clears.then_some(slots.grad);
            match (grad, slots.master) {
                (None, None) => {
                    self.adam_tensor(call, slots.grad, [slots.weight, slots.m, slots.v], step, arena)
                }
                (None, Some(master)) => {
                    self.adam_tensor(call, slots.grad, [slots.weight, master, slots.m, slots.v], step, arena);
                }
                (Some(grad), None) => {
                    self.adam_tensor(call, grad, [grad, slots.weight, slots.m, slots.v], step, arena);
                }
                (Some(grad), Some(master)) => {
                    self.adam_tensor(call, grad, [grad, slots.weight, master, slots.m, slots.v], step, arena);
                }
            }
        }
    }

    /// Updates one tensor. `changed` lists the inputs that change: the gradient if it is cleared, the weight,
    /// the master if there is one, and the moments.
    fn adam_tensor<const O: usize>(
        &mut self,
        call: &ValueCall,
        grad: usize,
        changed: [usize; O],
        step: AdamStep,
        arena: &[f32],
    ) {
        let Values { pool, level, states, scratch, .. } = self;
        let level = *level;
        let ids = changed.map(|input| match call.ins[input].at {
            ValueLoc::State(idx) => idx,
            ValueLoc::Arena(_) | ValueLoc::Control(_) | ValueLoc::Weight(_) => {
                unreachable!("compiled for states")
            }
        });
        let clears = changed[0] == grad;
        let masters = O == 4 + usize::from(clears);
        // The gradient can be in a state that the optimiser does not clear; it is then copied.
        let grad_bytes: Option<&[u8]> = match &call.ins[grad].at {
            _ if clears => None,
            ValueLoc::Arena(words) => {
                Some(&bytemuck::cast_slice::<f32, u8>(&arena[words.clone()])[call.ins[grad].span()])
            }
            ValueLoc::Control(bytes) => Some(&self.control[bytes.clone()][call.ins[grad].span()]),
            ValueLoc::State(_) | ValueLoc::Weight(_) => {
                unreachable!("compiled for computed gradients")
            }
        };
        let Some(slices) = states.several_mut(ids) else { unreachable!("states of a tensor are distinct") };
        let mut slices = slices.into_iter();
        let outs = changed.map(|input| match slices.next() {
            Some(bytes) => WriteOperand { dtype: call.ins[input].dtype, bytes, chunk: CHUNK },
            None => unreachable!("one slice per state"),
        });
        let held = |from_end: usize| ReadOperand {
            dtype: call.ins[changed[O - from_end]].dtype,
            bytes: None,
            held: O - from_end,
            chunk: CHUNK,
        };
        let read = ReadOperand { dtype: call.ins[grad].dtype, bytes: grad_bytes, held: 0, chunk: CHUNK };
        spread(
            pool,
            level,
            [read, held(3), held(2), held(1)],
            outs,
            scratch,
            |_, [g, w0, m0, v0], mut outs| {
                if clears {
                    outs[0].fill(0.0);
                }
                let (before, last) = outs.split_at_mut(O - 3);
                let [w, m, v] = last else { unreachable!("three slices remain") };
                w.copy_from_slice(w0);
                m.copy_from_slice(m0);
                v.copy_from_slice(v0);
                simd::adam(level, step, g, [&mut **w, &mut **m, &mut **v]);
                if masters && let Some(weight) = before.last_mut() {
                    weight.copy_from_slice(w);
                }
            },
        );
    }
}
