//! Matrix products of two values.

use super::{Operands, Tools, ValueCall, ValueOperand, Values};
use crate::simd::{Factor, Rounded, gemm};

impl Values<'_> {
    pub(super) fn matmul(
        &mut self,
        call: &ValueCall,
        [m, k, n]: [usize; 3],
        batch: &[[usize; 2]],
        arena: &mut [f32],
    ) {
        let (mut ops, tools) = self.open(&call.outs, arena);
        let Tools { pool, level, scratch, .. } = tools;
        let (a, b, out) = (&call.ins[0], &call.ins[1], &call.outs[0]);
        let (Some(a_bytes), Some(b_bytes)) = (ops.buffer(a), ops.buffer(b)) else {
            unreachable!("a matrix product never overwrites its input")
        };
        let size = out.dtype.block_bytes();
        let [write] = Operands::writes(&mut ops.carved.outs, call, [m * n]);
        for (&[at_a, at_b], bytes) in batch.iter().zip(write.bytes.chunks_exact_mut((m * n * size).max(1))) {
            let left = factor(a, a_bytes, at_a, [m, k], 0);
            let right = factor(b, b_bytes, at_b, [n, k], 1);
            gemm(pool, level, &left, &right, Rounded { dtype: out.dtype, bytes }, scratch);
        }
    }
}

/// An operand of a matrix product. `k` is its last dimension, unless it is `turned`.
pub(super) fn factor<'a>(
    value: &ValueOperand,
    bytes: &'a [u8],
    offset: usize,
    [len, k]: [usize; 2],
    turned: usize,
) -> Factor<'a> {
    let strides = value.layout.strides();
    let rank = strides.len();
    let (stride, k_stride) = match turned {
        0 => (strides[rank - 2], strides[rank - 1]),
        _ => (strides[rank - 1], strides[rank - 2]),
    };
    Factor { dtype: value.dtype, bytes, offset, len, stride, k, k_stride }
}
