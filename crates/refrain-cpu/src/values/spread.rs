//! Parallel loops over chunks of operands: widened to F32, computed, and rounded.

use crate::pool::{Pool, Zipped};
use crate::simd::{Level, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use half::{bf16, f16};
use refrain_tensor::DType;

/// A contiguous operand to read, `chunk` elements per iteration.
pub(super) struct ReadOperand<'a> {
    pub dtype: DType,
    /// `None` if output `held` overwrites the operand: the output holds it until it is written.
    pub bytes: Option<&'a [u8]>,
    pub held: usize,
    pub chunk: usize,
}

/// A contiguous operand to write, `chunk` elements per iteration.
pub(super) struct WriteOperand<'a> {
    pub dtype: DType,
    pub bytes: &'a mut [u8],
    pub chunk: usize,
}

/// Below this many elements, waking threads costs more than it saves.
const PARALLEL_ELEMENTS: usize = 16 * 1024;

/// Default number of elements per chunk.
pub(super) const CHUNK: usize = 2048;

/// Returns a multiple of the row length, about the default chunk size.
pub(super) fn chunk_of_rows(d: usize) -> usize {
    (CHUNK / d.max(1)).max(1) * d.max(1)
}

/// Floats of scratch for chunks of these sizes.
pub(super) fn scratch_floats(chunks: &[usize], n_threads: usize) -> usize {
    chunks.iter().sum::<usize>() * n_threads
}

/// Returns elements as floats: in place if they are F32, otherwise widened into `buf`.
pub(super) fn floats<'b>(level: Level, dtype: DType, bytes: &'b [u8], buf: &'b mut [f32]) -> &'b [f32] {
    if dtype == DType::F32
        && let Ok(floats) = bytemuck::try_cast_slice(bytes)
    {
        return floats;
    }
    widen(level, dtype, bytes, buf);
    buf
}

/// Widens elements to floats.
pub(super) fn widen(level: Level, dtype: DType, bytes: &[u8], to: &mut [f32]) {
    if dtype == DType::F32 {
        bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
    } else if dtype == DType::F16 {
        f16_to_f32(level, bytemuck::cast_slice::<u8, f16>(bytes), to);
    } else {
        bf16_to_f32(level, bytemuck::cast_slice::<u8, bf16>(bytes), to);
    }
}

/// Rounds floats to elements, to nearest even.
pub(super) fn round(level: Level, dtype: DType, from: &[f32], to: &mut [u8]) {
    if dtype == DType::F32 {
        to.copy_from_slice(bytemuck::cast_slice(from));
    } else if dtype == DType::F16 {
        f32_to_f16(level, from, bytemuck::cast_slice_mut::<u8, f16>(to));
    } else {
        f32_to_bf16(level, from, bytemuck::cast_slice_mut::<u8, bf16>(to));
    }
}

/// A chunk of an output during computation.
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

/// Calls `f(chunk_idx, inputs, outputs)` for every chunk, in parallel. Outputs are uninitialised on entry.
/// `local` holds [`scratch_floats`] floats for the chunks of all operands.
pub(super) fn spread<const I: usize, const O: usize>(
    pool: &Pool,
    level: Level,
    ins: [ReadOperand<'_>; I],
    outs: [WriteOperand<'_>; O],
    local: &mut [f32],
    f: impl Fn(usize, [&[f32]; I], [&mut [f32]; O]) + Sync,
) {
    let kinds: [(DType, usize); O] = std::array::from_fn(|i| (outs[i].dtype, outs[i].chunk));
    let n_bytes = outs.iter().map(|out| out.bytes.len()).max().unwrap_or(0);
    let slices = outs.map(|out| (out.bytes, out.chunk * out.dtype.block_bytes()));
    let run_chunk = |idx: usize, chunks: [&mut [u8]; O], local: &mut [f32]| {
        let mut left = local;
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
    if n_bytes < 4 * PARALLEL_ELEMENTS {
        let zipped = Zipped::new(slices);
        while let Some((idx, chunks)) = zipped.next() {
            run_chunk(idx, chunks, local);
        }
        return;
    }
    pool.zip_chunks(slices, local, run_chunk);
}
