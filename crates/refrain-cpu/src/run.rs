//! Executes the calls of a compiled graph in order.

use crate::attention::{
    AttendHeads, BlockPages, Caches, attend, kv_append, kv_append_bytes, kv_append_scales,
};
use crate::backend::{CpuCompiled, CpuError};
use crate::compile::{AngleTable, Kernel, KernelCall, Loc};
use crate::experts::{ExpertCall, ExpertEpilogue, ExpertFault, ExpertRun, RouteCall, Sorted, route_row};
use crate::lora::LoraCall;
use crate::memory::{Carved, carve};
use crate::pool::Pool;
use crate::recurrent::{self, ArenaRows};
use crate::rows;
use crate::sample::{Candidates, choose};
use crate::simd::{self, ExpertBias, Level, LoraFactor, WeightProduct, matmul_parallel, prepare_parallel};
use crate::values::Values;
use crate::weights::{CpuStates, CpuWeights, WeightEntry};
use refrain_graph::{Place, Plan, RunError, SAMPLE_PARAMS, WeightId};
use refrain_reference::{In, Out, ReferenceError, Sampling};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Scratch memory shared by all calls. Persists across runs, so that no run allocates.
#[derive(Default)]
pub(crate) struct RunScratch {
    /// Prepared activations, aligned to cache lines.
    pub acts: Vec<AlignedLine>,
    /// Cosines and sines, one table per entry; `[n, n_dims]` each.
    pub angles: Vec<Vec<f32>>,
    pub candidates: Candidates,
    /// Scratch of value calls and expert calls.
    pub values: Vec<AlignedLine>,
    /// Rows sorted by expert.
    pub sorted: Sorted,
}

#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct AlignedLine([u32; 16]);

/// Everything that calls access besides the arena.
pub(crate) struct Executor<'a> {
    pub pool: &'a Pool,
    pub level: Level,
    pub weights: &'a CpuWeights,
    pub states: &'a mut CpuStates,
    pub control: &'a [u8],
}

// Below this many elements, waking threads costs more than it saves.
const PARALLEL_ELEMENTS: usize = 16 * 1024;

impl Executor<'_> {
    /// Runs all calls, and records the time of each if `times` is given.
    pub(crate) fn run(
        &mut self,
        compiled: &mut CpuCompiled,
        mut times: Option<&mut Vec<Duration>>,
    ) -> Result<(), RunError> {
        let CpuCompiled { plan, program, arena, scratch } = compiled;
        let arena: &mut [f32] = bytemuck::cast_slice_mut(arena);
        for (table, angles) in program.tables.iter().zip(&mut scratch.angles) {
            self.fill_angles(table, angles);
        }
        for call in &program.calls {
            let start = times.is_some().then(Instant::now);
            self.call(plan, call, arena, scratch)?;
            if let (Some(times), Some(start)) = (&mut times, start) {
                times.push(start.elapsed());
            }
        }
        Ok(())
    }

    fn words(&self) -> &[i32] {
        bytemuck::cast_slice(self.control)
    }

    fn vector(&self, id: refrain_graph::WeightId) -> &[f32] {
        match self.weights.entry(id) {
            WeightEntry::Vector(values) => values,
            WeightEntry::Matrix { .. } => {
                unreachable!("only weights of one dimension are compiled as vectors")
            }
        }
    }

    fn fill_angles(&self, table: &AngleTable, angles: &mut [f32]) {
        let inv_freq = self.vector(table.inv_freq);
        let positions = &self.words()[table.positions.clone()];
        let sign = if table.back { -1.0 } else { 1.0 };
        self.rows(angles, table.n_dims, |at, row| {
            let position = positions[at / table.n_dims.max(1)];
            rows::rope_angles(row, position.max(0), inv_freq, [table.magnitude, sign]);
        });
    }

    fn call(
        &mut self,
        plan: &Plan,
        call: &KernelCall,
        arena: &mut [f32],
        scratch: &mut RunScratch,
    ) -> Result<(), RunError> {
        let level = self.level;
        let label = &plan.steps()[call.step].label;
        match &call.kernel {
            Kernel::Products { x, k, kind, prepared, parts } => {
                let outs: [Range<usize>; 4] =
                    std::array::from_fn(|i| parts.get(i).map_or(0..0, |p| p.out.clone()));
                let carved = carve(arena, &outs[..parts.len()]);
                let Some(x) = carved.read(x) else {
                    unreachable!("a matrix product never overwrites its input")
                };
                let m = x.len() / k;
                let bytes = simd::act_bytes(*kind, *k).unwrap_or(0) * m;
                let acts = &mut bytemuck::cast_slice_mut(&mut scratch.acts)[..bytes];
                let acts = match prepared {
                    true => simd::Acts::new(*kind, m, *k, acts),
                    false => prepare_parallel(self.pool, level, *kind, x, *k, acts),
                };
                let acts = acts.map_err(|e| broken(label, CpuError::Acts(e)))?;
                let product = |i: usize, out| match self.weights.matrix(parts[i].weight) {
                    Some(w) => Ok(WeightProduct { w, out }),
                    None => Err(broken(label, CpuError::NotAMatrix)),
                };
                let run =
                    |products: &mut [WeightProduct<'_>]| matmul_parallel(self.pool, level, &acts, products);
                let [a, b, c, d] = carved.outs;
                match parts.len() {
                    1 => run(&mut [product(0, a)?]),
                    2 => run(&mut [product(0, a)?, product(1, b)?]),
                    3 => run(&mut [product(0, a)?, product(1, b)?, product(2, c)?]),
                    _ => run(&mut [product(0, a)?, product(1, b)?, product(2, c)?, product(3, d)?]),
                }
            }
            Kernel::GatherWeight { table, ids, out, d } => {
                self.gather_weight(label, *table, ids, *d, &mut arena[out.clone()])?;
            }
            Kernel::GatherArena { table, ids, out, d } => {
                let carved = carve(arena, std::slice::from_ref(out));
                let Some(table) = carved.read(table) else {
                    unreachable!("a gather never overwrites its input")
                };
                let ids = &self.words()[ids.clone()];
                for (out, &id) in carved.outs[0].chunks_exact_mut(*d).zip(ids) {
                    match row_of(label, id, table.len() / d)? {
                        Some(row) => out.copy_from_slice(&table[row * d..][..*d]),
                        None => out.fill(0.0),
                    }
                }
            }
            Kernel::RmsNorm { x, w, out, eps } => {
                let carved = carve(arena, std::slice::from_ref(out));
                let (w, eps) = (self.vector(*w), *eps);
                let x = carved.read(x);
                self.rows(carved.outs[0], w.len(), |at, out| match x {
                    Some(x) => simd::rms_norm(level, &x[at..at + out.len()], w, eps, out),
                    None => simd::rms_norm_inplace(level, out, w, eps),
                });
            }
            Kernel::AddRmsNorm { a, b, w, sum, out, eps } => {
                self.add_rms_norm(arena, [a, b, sum, out], self.vector(*w), *eps);
            }
            Kernel::Unary { f, x, out } => {
                let carved = carve(arena, std::slice::from_ref(out));
                if let Some(x) = carved.read(x) {
                    carved.outs[0].copy_from_slice(x);
                }
                self.rows(carved.outs[0], 1024, |_, out| rows::unary(level, *f, out));
            }
            Kernel::Binary { f, a, b, out, row } => {
                let carved = carve(arena, std::slice::from_ref(out));
                let a = carved.read(a);
                let b = match b {
                    Loc::Weight(id) => Some(self.vector(*id)),
                    Loc::Arena(range) => carved.read(range),
                    Loc::Control(_) => unreachable!("compiled for weights and the arena only"),
                };
                let chunk = if *row == carved.outs[0].len() { 1024 } else { *row };
                self.rows(carved.outs[0], chunk, |at, out| {
                    let range = at..at + out.len();
                    let b = if *row == chunk { b } else { b.map(|b| &b[range.clone()]) };
                    rows::binary(level, *f, a.map(|a| &a[range.clone()]), b, out.len(), out);
                });
            }
            Kernel::Gate { f, gate, up, out } => {
                let carved = carve(arena, std::slice::from_ref(out));
                let (gate, up) = (carved.read(gate), carved.read(up));
                self.rows(carved.outs[0], 1024, |at, out| {
                    let range = at..at + out.len();
                    rows::gate(
                        level,
                        *f,
                        gate.map(|g| &g[range.clone()]),
                        up.map(|u| &u[range.clone()]),
                        out,
                    );
                });
            }
            Kernel::Rope { rope, table, x, out, n_heads, head_dim } => {
                let carved = carve(arena, std::slice::from_ref(out));
                if let Some(x) = carved.read(x) {
                    carved.outs[0].copy_from_slice(x);
                }
                let angles = &scratch.angles[*table];
                let positions = self.words();
                let token = n_heads * head_dim;
                // Padding rows have a negative position and are left unchanged.
                let first = self.position_slot(plan, call.step);
                self.rows(carved.outs[0], token, |at, heads| {
                    let row = at / token;
                    if positions[first + row] >= 0 {
                        rows::rope(
                            level,
                            rope,
                            heads,
                            *head_dim,
                            &angles[row * rope.n_dims..][..rope.n_dims],
                        );
                    }
                });
            }
            Kernel::KvAppend { state, scales, dtype, x, paging } => {
                let words: &[i32] = bytemuck::cast_slice(self.control);
                let pages = BlockPages::new(paging, words, label, Some(1))?;
                let x = &arena[x.clone()];
                match *scales {
                    None => kv_append(level, &pages, *dtype, x, self.states.get_mut(*state)),
                    Some(scales) => {
                        kv_append_bytes(&pages, x, self.states.get_mut(*state));
                        kv_append_scales(&pages, x, bytemuck::cast_slice_mut(self.states.get_mut(scales)));
                    }
                }
            }
            Kernel::Attention { attention, q, out, states, scales, dtype, n_heads, sinks, paging } => {
                let pages = BlockPages::new(paging, self.words(), label, attention.window)?;
                let carved = carve(arena, std::slice::from_ref(out));
                let Some(q) = carved.read(q) else { unreachable!("attention never overwrites its input") };
                let caches = states.map(|s| self.states.get(s));
                let scales = scales.map(|scales| scales.map(|s| bytemuck::cast_slice(self.states.get(s))));
                let caches = Caches { dtype: *dtype, keys: caches[0], values: caches[1], scales };
                let sinks = sinks.map(|sinks| match self.weights.entry(sinks) {
                    WeightEntry::Vector(sinks) => sinks.as_slice(),
                    WeightEntry::Matrix { .. } => unreachable!("compiled for sinks in vectors"),
                });
                let heads = AttendHeads { q, n_heads: *n_heads, sinks };
                attend(self.pool, level, &pages, attention, heads, caches, carved.outs[0]);
            }
            Kernel::ShortConv { state, x, w, silu, out, paging } => {
                let words: &[i32] = bytemuck::cast_slice(self.control);
                let WeightEntry::Vector(w) = self.weights.entry(*w) else {
                    unreachable!("compiled for filters in vectors")
                };
                let carved = carve(arena, std::slice::from_ref(out));
                let x = ArenaRows::new(&carved, x);
                let [y, ..] = carved.outs;
                y.fill(0.0);
                let slots: &mut [f32] = bytemuck::cast_slice_mut(self.states.get_mut(*state));
                paging.each(words, label, |chunk| {
                    recurrent::short_conv(self.pool, level, chunk, (x, w, *silu), slots, y);
                })?;
            }
            Kernel::GatedDelta { delta, state, operands, decay, dt_bias, out, paging } => {
                let words: &[i32] = bytemuck::cast_slice(self.control);
                let vector = |id: WeightId| match self.weights.entry(id) {
                    WeightEntry::Vector(values) => &values[..],
                    WeightEntry::Matrix { .. } => unreachable!("compiled for vectors"),
                };
                let heads = [vector(*decay), vector(*dt_bias)];
                let carved = carve(arena, std::slice::from_ref(out));
                let o = &**operands;
                let rows = [&o.q, &o.k, &o.v, &o.a, &o.b].map(|at| ArenaRows::new(&carved, at));
                let [y, ..] = carved.outs;
                y.fill(0.0);
                let slots: &mut [f32] = bytemuck::cast_slice_mut(self.states.get_mut(*state));
                paging.each(words, label, |chunk| {
                    recurrent::gated_delta((self.pool, level), chunk, (delta, o), rows, heads, slots, y);
                })?;
            }
            Kernel::Sample { logits, control, token, logprob, vocab } => {
                self.sample(arena, logits, control, [token, logprob], *vocab, &mut scratch.candidates);
            }
            Kernel::Route(call) => self.route(call, arena, scratch),
            Kernel::Experts(call) => self.experts(label, call, arena, scratch)?,
            Kernel::Lora(call) => self.lora(label, call, arena)?,
            Kernel::Value(call) => {
                let mut values = Values {
                    pool: self.pool,
                    level,
                    weights: self.weights,
                    states: self.states,
                    control: self.control,
                    angles: &scratch.angles,
                    scratch: bytemuck::cast_slice_mut(&mut scratch.values),
                    label,
                };
                values.run(call, arena)?;
            }
            Kernel::Reference => self.reference(plan, call.step, arena)?,
        }
        Ok(())
    }

    /// Calls `f(first element, rows)` on whole rows of an output, in parallel if it is large enough.
    fn rows(&self, out: &mut [f32], row: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        if out.len() < PARALLEL_ELEMENTS {
            for (i, out) in out.chunks_mut(row.max(1)).enumerate() {
                f(i * row, out);
            }
            return;
        }
        self.pool.chunks_mut(out, row.max(1), |i, out| f(i * row, out));
    }

    fn position_slot(&self, plan: &Plan, step: usize) -> usize {
        let operand = &plan.steps()[step].inputs[1];
        match plan.buffer(operand.buffer).place {
            Place::Control { offset, .. } => offset / 4 + operand.layout.offset(),
            Place::Arena { .. } | Place::Weight(_) | Place::State(_) => {
                unreachable!("compiled for positions in the control block")
            }
        }
    }

    /// The sum may overwrite `a`, and the norm may overwrite `b`.
    fn add_rms_norm(&self, arena: &mut [f32], [a, b, sum, out]: [&Range<usize>; 4], w: &[f32], eps: f32) {
        let mut carved = carve(arena, &[sum.clone(), out.clone()]);
        let (a, b) = (carved.read(a), carved.read(b));
        let [sum, out, ..] = &mut carved.outs;
        if let Some(a) = a {
            sum.copy_from_slice(a);
        }
        match b {
            Some(b) => {
                let d = w.len().max(1);
                let rows = sum.chunks_exact_mut(d).zip(b.chunks_exact(d)).zip(out.chunks_exact_mut(d));
                rows.for_each(|((sum, b), out)| simd::add_rms_norm(self.level, sum, b, w, eps, out));
            }
            // `out` holds `b`.
            None => {
                simd::add_inplace(self.level, sum, out);
                let d = w.len().max(1);
                let rows = sum.chunks_exact(d).zip(out.chunks_exact_mut(d));
                rows.for_each(|(sum, out)| simd::rms_norm(self.level, sum, w, eps, out));
            }
        }
    }

    fn gather_weight(
        &self,
        label: &str,
        table: refrain_graph::WeightId,
        ids: &Range<usize>,
        d: usize,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let WeightEntry::Matrix { tensor, .. } = self.weights.entry(table) else {
            return Err(broken(label, CpuError::NotAMatrix));
        };
        let row_bytes = tensor.dtype().bytes_for(d).unwrap_or(0);
        let bytes = tensor.bytes().as_slice();
        for (out, &id) in out.chunks_exact_mut(d).zip(&self.words()[ids.clone()]) {
            match row_of(label, id, tensor.shape().dims()[0])? {
                Some(row) => {
                    let row = &bytes[row * row_bytes..][..row_bytes];
                    let decoded = refrain_tensor::quant::dequantize(tensor.dtype(), row, out);
                    decoded.map_err(|e| broken(label, CpuError::Tensor(e)))?;
                }
                None => out.fill(0.0),
            }
        }
        Ok(())
    }

    fn route(&self, call: &RouteCall, arena: &mut [f32], scratch: &mut RunScratch) {
        let vectors = [call.bias, call.scales].map(|id| id.map(|id| self.vector(id)));
        let numbers: &mut [f32] = bytemuck::cast_slice_mut(&mut scratch.values);
        let carved = carve(arena, &[call.ids.clone(), call.weights.clone()]);
        let logits = self.read(&carved, &call.logits);
        let [ids, weights, ..] = carved.outs;
        let k = call.route.n_choices;
        let rows = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        let positions = call.positions.as_ref().map(|range| &self.words()[range.clone()]);
        for (row, (logits, (ids, weights))) in logits.chunks_exact(call.n_experts).zip(rows).enumerate() {
            if positions.is_some_and(|positions| positions[row] < 0) {
                ids.fill(f32::from_bits((-1_i32).cast_unsigned()));
                weights.fill(0.0);
                continue;
            }
            route_row(&call.route, logits, vectors, numbers, ids, weights);
        }
    }

    fn lora(&self, label: &str, call: &LoraCall, arena: &mut [f32]) -> Result<(), RunError> {
        let carved = carve(arena, std::slice::from_ref(&call.out));
        let WeightEntry::Matrix { tensor, .. } = self.weights.entry(call.factors) else {
            return Err(broken(label, CpuError::NotAMatrix));
        };
        let (bytes, n_cols) = (tensor.bytes().as_slice(), call.dims[2]);
        let stack = LoraFactor { dtype: tensor.dtype(), bytes, n_cols };
        let x = ArenaRows::new(&carved, &call.x);
        let y = call.y.as_ref().and_then(|y| carved.read(y));
        let [out, ..] = carved.outs;
        if let Some(y) = y {
            out.copy_from_slice(y);
        }
        call.run((self.pool, self.level), label, self.words(), stack, &x, out)
    }

    fn experts(
        &self,
        label: &str,
        call: &ExpertCall,
        arena: &mut [f32],
        scratch: &mut RunScratch,
    ) -> Result<(), RunError> {
        let carved = carve(arena, std::slice::from_ref(&call.out));
        let bias = |id: &WeightId| match self.weights.entry(*id) {
            WeightEntry::Matrix { tensor, .. } => {
                Some(ExpertBias { dtype: tensor.dtype(), bytes: tensor.bytes().as_slice() })
            }
            WeightEntry::Vector(_) => None,
        };
        let acts = call.n_acts() * simd::act_bytes(call.kind, call.k).unwrap_or(0);
        let products: &mut [f32] = bytemuck::cast_slice_mut(&mut scratch.values);
        let run = ExpertRun {
            label,
            x: self.read(&carved, &call.x),
            ids: bytemuck::cast_slice(self.read(&carved, &call.ids)),
            factors: match &call.epilogue {
                ExpertEpilogue::Gated(_) => &[],
                ExpertEpilogue::Summed(factors) => self.read(&carved, factors),
            },
            weights: std::array::from_fn(|i| call.weights.get(i).and_then(|id| self.weights.matrix(*id))),
            biases: std::array::from_fn(|i| call.biases.get(i).and_then(bias)),
            acts: &mut bytemuck::cast_slice_mut(&mut scratch.acts)[..acts],
            products: &mut products[..call.floats()],
            sorted: &mut scratch.sorted,
        };
        let [out, ..] = carved.outs;
        run.run(self.pool, self.level, call, out).map_err(|fault| match fault {
            ExpertFault::Ids(error) => error,
            ExpertFault::Acts(error) => broken(label, CpuError::Acts(error)),
            ExpertFault::NotAMatrix => broken(label, CpuError::NotAMatrix),
        })
    }

    /// An operand of 4-byte elements that no output overlaps.
    fn read<'s>(&'s self, carved: &Carved<'s>, at: &Loc) -> &'s [f32] {
        match at {
            Loc::Arena(range) => match carved.read(range) {
                Some(values) => values,
                None => unreachable!("the output never overwrites an input"),
            },
            Loc::Control(range) => &bytemuck::cast_slice(self.control)[range.clone()],
            Loc::Weight(_) => unreachable!("compiled for the arena and the control block only"),
        }
    }

    fn sample(
        &self,
        arena: &mut [f32],
        logits: &Range<usize>,
        [params, rng, history, bias_ids, bias]: &[Range<usize>; 5],
        [token, logprob]: [&Range<usize>; 2],
        vocab: usize,
        candidates: &mut Candidates,
    ) {
        let floats: &[f32] = bytemuck::cast_slice(self.control);
        let words: &[u32] = bytemuck::cast_slice(self.control);
        let n_rows = logits.len() / vocab.max(1);
        let of = |range: &Range<usize>, row: usize| {
            let width = range.len() / n_rows;
            range.start + row * width..range.start + (row + 1) * width
        };
        for row in 0..n_rows {
            let seed = &words[of(rng, row)];
            let sampling = Sampling {
                params: &floats[params.start + row * SAMPLE_PARAMS..][..SAMPLE_PARAMS],
                history: &self.words()[of(history, row)],
                bias_ids: &self.words()[of(bias_ids, row)],
                bias: &floats[of(bias, row)],
                seed: u64::from(seed[0]) | u64::from(seed[1]) << 32,
                position: seed[2],
            };
            let at = logits.start + row * vocab;
            let (id, p) = choose(self.level, &arena[at..at + vocab], &sampling, candidates);
            arena[token.start + row] = f32::from_bits(id as u32);
            arena[logprob.start + row] = p;
        }
    }

    /// Runs the reference implementation, or a host function, on the inputs in place.
    fn reference(&mut self, plan: &Plan, step: usize, arena: &mut [f32]) -> Result<(), RunError> {
        let step = &plan.steps()[step];
        let updated = step.op.state_updates();
        let arena_bytes: &[u8] = bytemuck::cast_slice(arena);
        let mut inputs: Vec<(&refrain_graph::Operand, &[u8])> = Vec::new();
        // States that the step changes are passed as outputs with their current content.
        let read =
            step.inputs.iter().enumerate().filter(|(i, _)| updated.iter().all(|(_, input)| input != i));
        for (_, operand) in read {
            let buffer = plan.buffer(operand.buffer);
            let bytes = match buffer.place {
                Place::Arena { offset } => &arena_bytes[offset..offset + buffer.bytes],
                Place::Control { offset, .. } => &self.control[offset..offset + buffer.bytes],
                Place::State(id) => self.states.get(id.idx()),
                Place::Weight(id) => match self.weights.entry(id) {
                    WeightEntry::Matrix { tensor, .. } => tensor.bytes().as_slice(),
                    WeightEntry::Vector(values) => bytemuck::cast_slice(values),
                },
            };
            inputs.push((operand, bytes));
        }
        let dtype_of = |operand: &refrain_graph::Operand| match plan.buffer(operand.buffer).place {
            // Vectors were converted to F32 when loaded.
            Place::Weight(id) if matches!(self.weights.entry(id), WeightEntry::Vector(_)) => {
                refrain_tensor::DType::F32
            }
            Place::Weight(_) | Place::Arena { .. } | Place::Control { .. } | Place::State(_) => operand.dtype,
        };
        let ins: Vec<In<'_>> = inputs
            .iter()
            .map(|(operand, bytes)| In { dtype: dtype_of(operand), layout: operand.layout, bytes })
            .collect();
        let mut results: Vec<Vec<u8>> = Vec::new();
        for operand in &step.outputs {
            let buffer = plan.buffer(operand.buffer);
            results.push(match buffer.place {
                Place::State(id) => self.states.get(id.idx()).to_vec(),
                Place::Arena { .. } | Place::Weight(_) | Place::Control { .. } => vec![0; buffer.bytes],
            });
        }
        let mut outs: Vec<Out<'_>> =
            step.outputs.iter().zip(&mut results).map(|(o, bytes)| Out { ty: o.ty(), bytes }).collect();
        refrain_reference::run(&step.op, &ins, &mut outs).map_err(|e| refused(&step.label, e))?;
        let arena_bytes: &mut [u8] = bytemuck::cast_slice_mut(arena);
        for (operand, bytes) in step.outputs.iter().zip(&results) {
            match plan.buffer(operand.buffer).place {
                Place::Arena { offset } => arena_bytes[offset..offset + bytes.len()].copy_from_slice(bytes),
                Place::State(id) => self.states.get_mut(id.idx()).copy_from_slice(bytes),
                Place::Weight(_) | Place::Control { .. } => unreachable!("no step writes weights or inputs"),
            }
        }
        Ok(())
    }
}

/// Row that an id selects; `None` for padding.
pub(crate) fn row_of(label: &str, id: i32, n_rows: usize) -> Result<Option<usize>, RunError> {
    match usize::try_from(id) {
        Err(_) => Ok(None),
        Ok(row) if row < n_rows => Ok(Some(row)),
        Ok(_) => {
            Err(RunError::OutOfRange { label: label.into(), what: "row", got: id.into(), limit: n_rows })
        }
    }
}

fn refused(label: &str, error: ReferenceError) -> RunError {
    if let ReferenceError::Host(source) = error {
        return RunError::Host { label: label.into(), source };
    }
    broken(label, CpuError::Reference(error))
}

fn broken(label: &str, source: CpuError) -> RunError {
    RunError::Backend { backend: "cpu", label: label.into(), source: Box::new(source) }
}
