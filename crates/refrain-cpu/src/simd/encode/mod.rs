//! Encoders of the quantised types for whole rows.
//!
//! The search is that of `refrain_tensor::quant::search`, computed for 16 sub-blocks at a time, one per lane. All
//! arithmetic is that of the simple version in the same order, so the bytes are the same at every level; tests compare
//! them.

mod group; // 16 sub-blocks, scaled and weighed
mod scale; // types without minima
mod line; // types with minima
mod plain; // Q8_0 and MXFP4

use super::Level;
use super::lanes::{GROUP, Simd, SimdKernel};
use group::Group;
use refrain_tensor::quant::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0,
    BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, quantize_weighted,
};
use refrain_tensor::{DType, TensorError};
use std::marker::PhantomData;

/// `refrain_tensor::quant::quantize_weighted`, with the same bytes and errors, by the instructions of a level.
pub fn encode_rows(
    level: Level,
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), TensorError> {
    let block_len = dtype.block_len();
    let is_whole = row_len > 0
        && row_len.is_multiple_of(block_len)
        && values.len().is_multiple_of(row_len)
        && dtype.bytes_for(values.len()) == Some(out.len())
        && importance.is_none_or(|importance| importance.len() == row_len);
    let job = Rows { values, row_len, importance };
    let is_done = is_whole
        && match dtype {
            DType::Q4_0 => level.dispatch_floats(Encode::<BlockQ4_0, 32, 1>::new(job, out)),
            DType::Q4_1 => level.dispatch_floats(Encode::<BlockQ4_1, 32, 1>::new(job, out)),
            DType::Q5_0 => level.dispatch_floats(Encode::<BlockQ5_0, 32, 1>::new(job, out)),
            DType::Q5_1 => level.dispatch_floats(Encode::<BlockQ5_1, 32, 1>::new(job, out)),
            DType::Q8_0 => level.dispatch_floats(Encode::<BlockQ8_0, 32, 1>::new(job, out)),
            DType::Q2_K => level.dispatch_floats(Encode::<BlockQ2K, 16, 16>::new(job, out)),
            DType::Q3_K => level.dispatch_floats(Encode::<BlockQ3K, 16, 16>::new(job, out)),
            DType::Q4_K => level.dispatch_floats(Encode::<BlockQ4K, 32, 8>::new(job, out)),
            DType::Q5_K => level.dispatch_floats(Encode::<BlockQ5K, 32, 8>::new(job, out)),
            DType::Q6_K => level.dispatch_floats(Encode::<BlockQ6K, 16, 16>::new(job, out)),
            DType::IQ4_NL => level.dispatch_floats(Encode::<BlockIq4Nl, 32, 1>::new(job, out)),
            DType::IQ4_XS => level.dispatch_floats(Encode::<BlockIq4Xs, 32, 8>::new(job, out)),
            DType::MXFP4 => level.dispatch_floats(Encode::<BlockMxfp4, 32, 1>::new(job, out)),
            DType::F32 | DType::F16 | DType::BF16 => false,
            DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => false,
            DType::I32 | DType::U32 | DType::I64 | DType::U8 => false,
        };
    match is_done {
        true => Ok(()),
        // Types without a fast version, and values that cannot be encoded: the simple version finds what is wrong.
        false => quantize_weighted(dtype, values, row_len, importance, out),
    }
}

/// Rows to encode.
#[derive(Clone, Copy)]
struct Rows<'a> {
    values: &'a [f32],
    row_len: usize,
    importance: Option<&'a [f32]>, // [row_len]
}

/// A block type of `SUBS` sub-blocks with `N` elements each, of which a group has 16.
trait GroupEncoder<const N: usize, const SUBS: usize>: bytemuck::Pod {
    /// Encodes the blocks of a group; `false` if a value is not finite or too large.
    fn encode<S: Simd>(s: S, group: &mut Group<N>, blocks: &mut [Self]) -> bool;

    /// Whether values are needed as they are, rather than scaled and with weights.
    const RAW: bool = false;
}

/// Encodes rows of one type; `false` if a value cannot be encoded.
struct Encode<'a, B, const N: usize, const SUBS: usize> {
    rows: Rows<'a>,
    out: &'a mut [u8],
    block: PhantomData<B>,
}

impl<'a, B, const N: usize, const SUBS: usize> Encode<'a, B, N, SUBS> {
    fn new(rows: Rows<'a>, out: &'a mut [u8]) -> Encode<'a, B, N, SUBS> {
        Encode { rows, out, block: PhantomData }
    }
}

impl<B: GroupEncoder<N, SUBS>, const N: usize, const SUBS: usize> SimdKernel for Encode<'_, B, N, SUBS> {
    type Out = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let Rows { values, row_len, importance } = self.rows;
        let (block_len, per_group) = (N * SUBS, GROUP / SUBS);
        let mut group = Group::<N>::new();
        let blocks: &mut [B] = bytemuck::cast_slice_mut(self.out);
        let mut first = 0;
        for blocks in blocks.chunks_mut(per_group) {
            let mut subs = [values; GROUP];
            let mut factors = [importance.unwrap_or(values); GROUP];
            for lane in 0..GROUP {
                // Lanes without a block repeat the first one.
                let block = if lane / SUBS < blocks.len() { first + lane / SUBS } else { first };
                let at = block * block_len + lane % SUBS * N;
                subs[lane] = &values[at..at + N];
                if let Some(importance) = importance {
                    factors[lane] = &importance[at % row_len..][..N];
                }
            }
            group.load(s, &subs);
            if !B::RAW {
                if !group.scale(s, SUBS) {
                    return false;
                }
                group.weigh(s, SUBS, importance.is_some().then_some(&factors));
            }
            if !B::encode(s, &mut group, blocks) {
                return false;
            }
            first += per_group;
        }
        true
    }
}
