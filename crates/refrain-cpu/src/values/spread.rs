//! Pieces of operands, widened to F32 where they are shorter, computed on all threads, and rounded.

use crate::pool::{Pool, Zipped};
use crate::simd::{Level, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use half::{bf16, f16};
use refrain_tensor::DType;

/// A dense operand that is read, `chunk` elements for each piece.
pub(super) struct ReadOperand<'a> {
    pub dtype: DType,
    /// `None` when the output `held` has its place: it holds the operand until it is written.
    pub bytes: Option<&'a [u8]>,
    pub held: usize,
    pub chunk: usize,
}

/// A dense operand that is written, `chunk` elements for each piece.
pub(super) struct WriteOperand<'a> {
    pub dtype: DType,
    pub bytes: &'a mut [u8],
    pub chunk: usize,
}

/// Work on fewer elements than this is not worth waking threads for.
const ALONE: usize = 16 * 1024;

/// Elements of a piece where it does not matter.
pub(super) const PIECE: usize = 2048;

/// Whole rows that make a piece of about that size.
pub(super) fn piece_of_rows(d: usize) -> usize {
    (PIECE / d.max(1)).max(1) * d.max(1)
}

/// Floats of scratch for pieces of these sizes.
pub(super) fn own(chunks: &[usize], n_threads: usize) -> usize {
    chunks.iter().sum::<usize>() * n_threads
}

/// Elements as floats: themselves, or widened into `buf`.
pub(super) fn floats<'b>(level: Level, dtype: DType, bytes: &'b [u8], buf: &'b mut [f32]) -> &'b [f32] {
    if dtype == DType::F32
        && let Ok(floats) = bytemuck::try_cast_slice(bytes)
    {
        return floats;
    }
    widen(level, dtype, bytes, buf);
    buf
}

/// Elements into floats.
pub(super) fn widen(level: Level, dtype: DType, bytes: &[u8], to: &mut [f32]) {
    if dtype == DType::F32 {
        bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
    } else if dtype == DType::F16 {
        f16_to_f32(level, bytemuck::cast_slice::<u8, f16>(bytes), to);
    } else {
        bf16_to_f32(level, bytemuck::cast_slice::<u8, bf16>(bytes), to);
    }
}

/// Floats into elements, rounded to nearest even.
pub(super) fn round(level: Level, dtype: DType, from: &[f32], to: &mut [u8]) {
    if dtype == DType::F32 {
        to.copy_from_slice(bytemuck::cast_slice(from));
    } else if dtype == DType::F16 {
        f32_to_f16(level, from, bytemuck::cast_slice_mut::<u8, f16>(to));
    } else {
        f32_to_bf16(level, from, bytemuck::cast_slice_mut::<u8, bf16>(to));
    }
}

/// A piece of an output as it is computed.
enum WriteTarget<'a> {
    Floats(&'a mut [f32]),
    Rounded(DType, &'a mut [u8], &'a mut [f32]),
}

impl WriteTarget<'_> {
    fn floats(&mut self) -> &mut [f32] {
        match self {
            WriteTarget::Floats(floats) | WriteTarget::Rounded(_, _, floats) => floats,
        }
    }

    fn finish(self, level: Level) {
        match self {
            WriteTarget::Floats(_) => {}
            WriteTarget::Rounded(dtype, bytes, floats) => round(level, dtype, floats, bytes),
        }
    }
}

/// Calls `f(piece_idx, inputs, outputs)` for every piece, spread over the threads. What `f` finds in the outputs means
/// nothing. `own` has [`own`] floats for the chunks of all operands.
pub(super) fn spread<const I: usize, const O: usize>(
    pool: &Pool,
    level: Level,
    ins: [ReadOperand<'_>; I],
    outs: [WriteOperand<'_>; O],
    own: &mut [f32],
    f: impl Fn(usize, [&[f32]; I], [&mut [f32]; O]) + Sync,
) {
    let kinds: [(DType, usize); O] = std::array::from_fn(|i| (outs[i].dtype, outs[i].chunk));
    let n_bytes = outs.iter().map(|out| out.bytes.len()).max().unwrap_or(0);
    let slices = outs.map(|out| (out.bytes, out.chunk * out.dtype.block_bytes()));
    let piece = |idx: usize, chunks: [&mut [u8]; O], own: &mut [f32]| {
        let mut left = own;
        let mut take = |n: usize| -> &mut [f32] {
            let (buf, rest) = std::mem::take(&mut left).split_at_mut(n);
            left = rest;
            buf
        };
        let xs: [&[f32]; I] = std::array::from_fn(|i| {
            let ReadOperand { dtype, bytes, held, chunk } = &ins[i];
            let size = dtype.block_bytes();
            match bytes {
                Some(bytes) => {
                    let start = (idx * chunk * size).min(bytes.len());
                    let bytes = &bytes[start..bytes.len().min(start + chunk * size)];
                    match *dtype == DType::F32 && bytemuck::try_cast_slice::<u8, f32>(bytes).is_ok() {
                        true => bytemuck::cast_slice(bytes),
                        false => floats(level, *dtype, bytes, take(bytes.len() / size)),
                    }
                }
                None => {
                    let buf = take(chunks[*held].len() / size);
                    widen(level, *dtype, chunks[*held], buf);
                    buf
                }
            }
        });
        let mut kinds = kinds.iter();
        let mut targets = chunks.map(|bytes| match kinds.next() {
            Some((DType::F32, _)) | None => WriteTarget::Floats(bytemuck::cast_slice_mut(bytes)),
            Some((dtype, _)) => {
                let n = bytes.len() / dtype.block_bytes();
                WriteTarget::Rounded(*dtype, bytes, take(n))
            }
        });
        f(idx, xs, targets.each_mut().map(WriteTarget::floats));
        targets.into_iter().for_each(|target| target.finish(level));
    };
    if n_bytes < 4 * ALONE {
        let zipped = Zipped::new(slices);
        while let Some((idx, chunks)) = zipped.next() {
            piece(idx, chunks, own);
        }
        return;
    }
    pool.zip_chunks(slices, own, piece);
}
