//! Elementwise and row ops.

use super::compile::ROW_BLOCK;
use super::spread::{CHUNK, WriteOperand, chunk_of_rows, floats, spread, widen};
use super::{Operands, Tools, ValueCall, ValueOperand, Values};
use crate::rows;
use crate::run::row_of;
use crate::simd;
use refrain_graph::{Binary, Dropout, Gate, Reduce, Rope, RunError, Unary};
use refrain_reference::philox4x32;
use refrain_tensor::{DType, quant};

/// Number of elements widened in a stack buffer.
const ON_STACK: usize = 512;

/// Elements per chunk of a scatter. Large, because every chunk scans all ids.
pub(super) fn scatter_chunk(d: usize) -> usize {
    (65_536 / d.max(1)).max(1) * d.max(1)
}

impl Values<'_> {
    pub(super) fn unary(&mut self, call: &ValueCall, f: Unary, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let ins = [ops.read(call, 0, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, ins, outs, scratch, |_, [x], [y]| {
            if let Unary::Affine { mul, add } = f {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = x * mul + add);
                return;
            }
            y.copy_from_slice(x);
            rows::unary(level, f, y);
        });
    }

    pub(super) fn unary_grad(&mut self, call: &ValueCall, f: Unary, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let ins = [ops.read(call, 0, CHUNK), ops.read(call, 1, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, ins, outs, scratch, |_, [dy, x], [dx]| {
            dx.iter_mut().zip(dy).zip(x).for_each(|((dx, dy), x)| *dx = dy * rows::derivative(f, *x));
        });
    }

    pub(super) fn binary(&mut self, call: &ValueCall, f: Binary, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let row = call.ins[1].len();
        if row == call.outs[0].len() {
            let ins = [ops.read(call, 0, CHUNK), ops.read(call, 1, CHUNK)];
            let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
            spread(pool, level, ins, outs, scratch, |_, [a, b], [y]| {
                rows::binary(level, f, Some(a), Some(b), y.len(), y);
            });
            return;
        }
        let (b, local) = scratch.split_at_mut(row);
        match ops.dense(&call.ins[1]) {
            Some(bytes) => widen(level, call.ins[1].dtype, bytes, b),
            None => unreachable!("a row is shorter than the output"),
        }
        let chunk = chunk_of_rows(row);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, local, |_, [a], [y]| {
            rows::binary(level, f, Some(a), Some(b), row, y);
        });
    }

    pub(super) fn binary_column(&mut self, call: &ValueCall, f: Binary, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let d = call.outs[0].width();
        let (column, local) = scratch.split_at_mut(call.ins[1].len());
        whole(level, &ops, &call.ins[1], column);
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, local, |idx, [x], [y]| {
            let column = &column[idx * (chunk / d)..];
            for ((x, y), b) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(column) {
                rows::with_scalar(f, x, *b, y);
            }
        });
    }

    pub(super) fn gate(&mut self, call: &ValueCall, f: Gate, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let ins = [ops.read(call, 0, CHUNK), ops.read(call, 1, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, ins, outs, scratch, |_, [gate, up], [y]| {
            rows::gate(level, f, Some(gate), Some(up), y);
        });
    }

    pub(super) fn gate_grad(&mut self, call: &ValueCall, f: Gate, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let ins = [ops.read(call, 0, CHUNK), ops.read(call, 1, CHUNK), ops.read(call, 2, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK; 2]);
        spread(pool, level, ins, outs, scratch, |_, ins, outs| {
            simd::gate_grad(level, f == Gate::GeluTanh, ins, outs);
        });
    }

    pub(super) fn rms_norm(&mut self, call: &ValueCall, eps: f32, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let d = call.ins[0].width();
        let (w, local) = scratch.split_at_mut(d);
        whole(level, &ops, &call.ins[1], w);
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, local, |_, [x], [y]| {
            let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
            rows.for_each(|(x, y)| simd::rms_norm(level, x, w, eps, y));
        });
    }

    /// Normalises the rounded sum, with the same result as two separate nodes.
    pub(super) fn add_rms_norm(&mut self, call: &ValueCall, eps: f32, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let (d, dtype) = (call.ins[0].width(), call.outs[0].dtype);
        let (w, local) = scratch.split_at_mut(d);
        whole(level, &ops, &call.ins[2], w);
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk), ops.read(call, 1, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk; 2]);
        spread(pool, level, ins, outs, local, |_, [a, b], [sum, y]| {
            simd::add(level, a, b, sum);
            if dtype == DType::F16 {
                sum.iter_mut().for_each(|v| *v = half::f16::from_f32(*v).to_f32());
            } else if dtype == DType::BF16 {
                sum.iter_mut().for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
            }
            let rows = sum.chunks_exact(d).zip(y.chunks_exact_mut(d));
            rows.for_each(|(sum, y)| simd::rms_norm(level, sum, w, eps, y));
        });
    }

    /// Each block of [`ROW_BLOCK`] rows sums its part of the weight gradient; the parts are added in order.
    pub(super) fn rms_norm_grad(&mut self, call: &ValueCall, eps: f32, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let d = call.ins[0].width();
        let n_blocks = (call.ins[0].len() / d.max(1)).div_ceil(ROW_BLOCK);
        let (w, rest) = scratch.split_at_mut(d);
        let (parts, local) = rest.split_at_mut(n_blocks * d);
        whole(level, &ops, &call.ins[2], w);
        let chunk = ROW_BLOCK * d;
        let ins = [ops.read(call, 0, chunk), ops.read(call, 1, chunk)];
        let [dx, dw] = Operands::writes(&mut ops.carved.outs, call, [chunk, d]);
        let part = WriteOperand { dtype: DType::F32, bytes: bytemuck::cast_slice_mut(&mut *parts), chunk: d };
        spread(pool, level, ins, [dx, part], local, |_, [dy, x], [dx, dw]| {
            dw.fill(0.0);
            let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(dx.chunks_exact_mut(d));
            rows.for_each(|((dy, x), dx)| simd::rms_norm_grad(level, [dy, x, w], eps, dx, dw));
        });
        spread(pool, level, [], [dw], local, |_, [], [dw]| {
            dw.fill(0.0);
            parts.chunks_exact(d).for_each(|part| simd::add_inplace(level, dw, part));
        });
    }

    pub(super) fn softmax(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let d = call.ins[0].width();
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, scratch, |_, [x], [y]| {
            y.copy_from_slice(x);
            y.chunks_exact_mut(d).for_each(|y| simd::softmax_inplace(level, y));
        });
    }

    pub(super) fn softmax_grad(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let d = call.ins[0].width();
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk), ops.read(call, 1, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, scratch, |_, [dy, y], [dx]| {
            let rows = dy.chunks_exact(d).zip(y.chunks_exact(d)).zip(dx.chunks_exact_mut(d));
            rows.for_each(|((dy, y), dx)| simd::softmax_grad(level, dy, y, dx));
        });
    }

    pub(super) fn rope(&mut self, call: &ValueCall, rope: &Rope, table: usize, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, angles, .. } = tools;
        let (positions, angles) = (ops.ints(&call.ins[1]), &angles[table]);
        let head_dim = call.ins[0].dim(2);
        let d = call.ins[0].dim(1) * head_dim;
        let chunk = chunk_of_rows(d);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, ins, outs, scratch, |idx, [x], [y]| {
            y.copy_from_slice(x);
            for (i, heads) in y.chunks_exact_mut(d.max(1)).enumerate() {
                let row = idx * (chunk / d.max(1)) + i;
                // Padding rows stay unchanged.
                if positions[row] >= 0 {
                    let angles = &angles[row * rope.n_dims..][..rope.n_dims];
                    rows::rope(level, rope, heads, head_dim, angles);
                }
            }
        });
    }

    pub(super) fn cross_entropy(&mut self, call: &ValueCall, arena: &mut [f32]) -> Result<(), RunError> {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, label, .. } = tools;
        let d = call.ins[0].width();
        let targets = ops.ints(&call.ins[1]);
        targets.iter().try_for_each(|&target| row_of(label, target, d).map(|_| ()))?;
        let mut scale = [0f32];
        whole(level, &ops, &call.ins[2], &mut scale);
        let chunk = chunk_of_rows(d);
        let n_rows = chunk / d.max(1);
        let ins = [ops.read(call, 0, chunk)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [n_rows, chunk]);
        spread(pool, level, ins, outs, scratch, |idx, [x], [loss, dx]| {
            dx.copy_from_slice(x);
            for (i, (loss, dx)) in loss.iter_mut().zip(dx.chunks_exact_mut(d.max(1))).enumerate() {
                *loss = match usize::try_from(targets[idx * n_rows + i]) {
                    Ok(target) => simd::cross_entropy(level, dx, target, scale[0]),
                    Err(_) => {
                        dx.fill(0.0);
                        0.0
                    }
                };
            }
        });
        Ok(())
    }

    pub(super) fn dropout(&mut self, call: &ValueCall, dropout: &Dropout, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let rng: [u32; 4] = match ops.dense(&call.ins[1]) {
            Some(bytes) => std::array::from_fn(|i| bytemuck::cast_slice::<u8, u32>(bytes)[i]),
            None => unreachable!("no output overwrites the random state"),
        };
        let kept = 1.0 - dropout.p;
        let ins = [ops.read(call, 0, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, ins, outs, scratch, |idx, [x], [y]| {
            for (i, (x, y)) in x.chunks(4).zip(y.chunks_mut(4)).enumerate() {
                let quad = (idx * (CHUNK / 4) + i) as u32;
                let words = philox4x32([quad, dropout.site, rng[2], rng[3]], [rng[0], rng[1]]);
                for ((x, y), word) in x.iter().zip(y).zip(words) {
                    let keeps = (word >> 8) as f32 * (1.0 / 16_777_216.0) >= dropout.p;
                    *y = if keeps { x / kept } else { 0.0 };
                }
            }
        });
    }

    pub(super) fn cast(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let ins = [ops.read(call, 0, CHUNK)];
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, ins, outs, scratch, |_, [x], [y]| y.copy_from_slice(x));
    }

    pub(super) fn decode(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let dtype = call.ins[0].dtype;
        let Some(bytes) = ops.buffer(&call.ins[0]) else { unreachable!("no output overwrites a weight") };
        let bytes_of = |n: usize| n / dtype.block_len() * dtype.block_bytes();
        let outs = Operands::writes(&mut ops.carved.outs, call, [CHUNK]);
        spread(pool, level, [], outs, scratch, |idx, [], [y]| {
            let blocks = &bytes[bytes_of(idx * CHUNK)..][..bytes_of(y.len())];
            // Sizes were checked when the weight was opened and when the step was compiled.
            quant::dequantize(dtype, blocks, y).unwrap_or_else(|e| panic!("{dtype}: {e}"));
        });
    }

    pub(super) fn gather(&mut self, call: &ValueCall, arena: &mut [f32]) -> Result<(), RunError> {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, label, .. } = tools;
        let (table, ids) = (&call.ins[0], ops.ints(&call.ins[1]));
        let (n_rows, d) = (table.dim(0), table.dim(1));
        ids.iter().try_for_each(|&id| row_of(label, id, n_rows).map(|_| ()))?;
        let Some(bytes) = ops.dense(table) else { unreachable!("a gather never overwrites its input") };
        let chunk = chunk_of_rows(d);
        let row_bytes = d * table.dtype.block_bytes();
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, [], outs, scratch, |idx, [], [y]| {
            for (i, y) in y.chunks_exact_mut(d.max(1)).enumerate() {
                match usize::try_from(ids[idx * (chunk / d.max(1)) + i]) {
                    Ok(row) => widen(level, table.dtype, &bytes[row * row_bytes..][..row_bytes], y),
                    Err(_) => y.fill(0.0),
                }
            }
        });
        Ok(())
    }

    /// A chunk covers some rows of the result and adds their inputs in order.
    pub(super) fn scatter(&mut self, call: &ValueCall, arena: &mut [f32]) -> Result<(), RunError> {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, label, .. } = tools;
        let (ids, x) = (ops.ints(&call.ins[0]), &call.ins[1]);
        let (n_rows, d) = (call.outs[0].dim(0), x.width());
        ids.iter().try_for_each(|&id| row_of(label, id, n_rows).map(|_| ()))?;
        let Some(bytes) = ops.dense(x) else { unreachable!("a scatter never overwrites its input") };
        let (chunk, row_bytes) = (scatter_chunk(d), d * x.dtype.block_bytes());
        let outs = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        spread(pool, level, [], outs, scratch, |idx, [], [y]| {
            y.fill(0.0);
            let first = idx * (chunk / d.max(1));
            let rows = first..first + y.len() / d.max(1);
            for (i, &id) in ids.iter().enumerate() {
                let Some(row) = usize::try_from(id).ok().filter(|row| rows.contains(row)) else { continue };
                let y = &mut y[(row - first) * d..][..d];
                add_elements(level, x.dtype, &bytes[i * row_bytes..][..row_bytes], y);
            }
        });
        Ok(())
    }

    /// Reduces rows directly along the last dimension. Along others, reduces blocks of [`ROW_BLOCK`] rows
    /// first, then their results in order.
    pub(super) fn reduce(
        &mut self,
        call: &ValueCall,
        kind: Reduce,
        [_, n, inner]: [usize; 3],
        arena: &mut [f32],
    ) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let finish = |sum: f32| if kind == Reduce::Mean { sum / n as f32 } else { sum };
        let x = &call.ins[0];
        if inner == 1 {
            let chunk = chunk_of_rows(n);
            let ins = [ops.read(call, 0, chunk)];
            let outs = Operands::writes(&mut ops.carved.outs, call, [chunk / n.max(1)]);
            spread(pool, level, ins, outs, scratch, |_, [x], [y]| {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = finish(simd::reduce(level, &x[i * n..][..n], kind == Reduce::Max));
                }
            });
            return;
        }
        let Some(bytes) = ops.dense(x) else { unreachable!("a reduction never overwrites its input") };
        let (n_blocks, size) = (n.div_ceil(ROW_BLOCK), x.dtype.block_bytes());
        let n_outer = x.len() / (n * inner).max(1);
        let (parts, local) = scratch.split_at_mut(n_outer * n_blocks * inner);
        let start = if kind == Reduce::Max { f32::NEG_INFINITY } else { 0.0 };
        let part =
            WriteOperand { dtype: DType::F32, bytes: bytemuck::cast_slice_mut(&mut *parts), chunk: inner };
        let join = |y: &mut [f32], bytes: &[u8], dtype: DType| match kind {
            Reduce::Max => max_elements(level, dtype, bytes, y),
            Reduce::Sum | Reduce::Mean => add_elements(level, dtype, bytes, y),
        };
        spread(pool, level, [], [part], local, |idx, [], [y]| {
            y.fill(start);
            let (outer, block) = (idx / n_blocks, idx % n_blocks);
            for row in block * ROW_BLOCK..n.min((block + 1) * ROW_BLOCK) {
                let at = (outer * n + row) * inner * size;
                join(y, &bytes[at..at + inner * size], x.dtype);
            }
        });
        let outs = Operands::writes(&mut ops.carved.outs, call, [inner]);
        let parts = &*parts;
        spread(pool, level, [], outs, local, |outer, [], [y]| {
            y.fill(start);
            for block in 0..n_blocks {
                let part = &parts[(outer * n_blocks + block) * inner..][..inner];
                join(y, bytemuck::cast_slice(part), DType::F32);
            }
            y.iter_mut().for_each(|y| *y = finish(*y));
        });
    }

    /// Copies elements of any layout unchanged.
    pub(super) fn copy(&mut self, call: &ValueCall, arena: &mut [f32]) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let (x, size) = (&call.ins[0], call.ins[0].dtype.block_bytes());
        let Some(bytes) = ops.buffer(x) else { unreachable!("a copy never overwrites its input") };
        let (d, shape, strides) = (x.width(), x.layout.shape(), x.layout.strides());
        let (outer, inner) = match shape.rank() {
            0 => (&[][..], 1),
            rank => (&shape.dims()[..rank - 1], strides[rank - 1]),
        };
        let chunk = chunk_of_rows(d);
        let [WriteOperand { bytes: out, .. }] = Operands::writes(&mut ops.carved.outs, call, [chunk]);
        tools.pool.zip_chunks([(out, chunk * size)], &mut [(); 0], |idx, [out], _| {
            for (i, out) in out.chunks_exact_mut((d * size).max(1)).enumerate() {
                let mut row = idx * (chunk / d.max(1)) + i;
                let mut at = x.layout.offset();
                for (&dim, &stride) in outer.iter().zip(strides).rev() {
                    at += row % dim * stride;
                    row /= dim;
                }
                if inner == 1 || d == 1 {
                    out.copy_from_slice(&bytes[at * size..(at + d) * size]);
                } else {
                    for (j, out) in out.chunks_exact_mut(size).enumerate() {
                        out.copy_from_slice(&bytes[(at + j * inner) * size..][..size]);
                    }
                }
            }
        });
    }
}

/// Converts a whole operand to floats.
fn whole(level: simd::Level, ops: &Operands<'_>, value: &ValueOperand, to: &mut [f32]) {
    match ops.dense(value) {
        Some(bytes) => widen(level, value.dtype, bytes, to),
        None => unreachable!("no output overwrites a weight"),
    }
}

/// `y += x`, element by element.
fn add_elements(level: simd::Level, dtype: DType, x: &[u8], y: &mut [f32]) {
    let size = dtype.block_bytes();
    let mut buf = [0f32; ON_STACK];
    for (x, y) in x.chunks(ON_STACK * size).zip(y.chunks_mut(ON_STACK)) {
        simd::add_inplace(level, y, floats(level, dtype, x, &mut buf[..x.len() / size]));
    }
}

/// `y = max(y, x)`, element by element, ignoring NaN.
fn max_elements(level: simd::Level, dtype: DType, x: &[u8], y: &mut [f32]) {
    let size = dtype.block_bytes();
    let mut buf = [0f32; ON_STACK];
    for (x, y) in x.chunks(ON_STACK * size).zip(y.chunks_mut(ON_STACK)) {
        let x = floats(level, dtype, x, &mut buf[..x.len() / size]);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = y.max(*x));
    }
}
