//! Block codecs: decoders and encoders of the quantised types.
//!
//! This is the reference that every fast implementation is tested against. Decoding matches the `gguf` package bit
//! for bit. Each type is one formula from an element's index to its value, with the block's layout drawn next to
//! it. The block structs consist of bytes only, so they have alignment 1 and can overlay any part of a file;
//! kernels that unpack blocks differently share their fields.

mod block;
pub mod grid;
mod iq2;
mod iq3;
mod iq4;
mod mxfp4;
mod plain;
mod q2_k;
mod q3_k;
mod q4;
mod q4_k;
mod q5;
mod q5_k;
mod q6_k;
mod q8;
pub mod search;

pub use block::{Block, F16Le, Weighing};
pub use iq2::{BlockIq2S, BlockIq2Xs, BlockIq2Xxs};
pub use iq3::{BlockIq3S, BlockIq3Xxs};
pub use iq4::{BlockIq4Nl, BlockIq4Xs, IQ4_NL_VALUES};
pub use mxfp4::{BlockMxfp4, MXFP4_VALUES, mxfp4_scale};
pub use q2_k::BlockQ2K;
pub use q3_k::BlockQ3K;
pub use q4::{BlockQ4_0, BlockQ4_1};
pub use q4_k::{BlockQ4K, unpack_scales_and_mins};
pub use q5::{BlockQ5_0, BlockQ5_1};
pub use q5_k::BlockQ5K;
pub use q6_k::BlockQ6K;
pub use q8::BlockQ8_0;

use crate::{DType, HostTensor, Shape, TensorError};

/// Decodes `bytes`, which hold exactly `out.len()` elements of `dtype`.
///
/// Integer types are not decoded: their values are indices, and f32 cannot hold all of them.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), TensorError> {
    check_lengths(dtype, out.len(), bytes.len())?;
    match dtype {
        DType::F32 => plain::decode_f32(bytes, out),
        DType::F16 => plain::decode_f16(bytes, out),
        DType::BF16 => plain::decode_bf16(bytes, out),
        DType::Q4_0 => decode_blocks::<BlockQ4_0, 32>(bytes, out),
        DType::Q4_1 => decode_blocks::<BlockQ4_1, 32>(bytes, out),
        DType::Q5_0 => decode_blocks::<BlockQ5_0, 32>(bytes, out),
        DType::Q5_1 => decode_blocks::<BlockQ5_1, 32>(bytes, out),
        DType::Q8_0 => decode_blocks::<BlockQ8_0, 32>(bytes, out),
        DType::Q2_K => decode_blocks::<BlockQ2K, 256>(bytes, out),
        DType::Q3_K => decode_blocks::<BlockQ3K, 256>(bytes, out),
        DType::Q4_K => decode_blocks::<BlockQ4K, 256>(bytes, out),
        DType::Q5_K => decode_blocks::<BlockQ5K, 256>(bytes, out),
        DType::Q6_K => decode_blocks::<BlockQ6K, 256>(bytes, out),
        DType::IQ4_NL => decode_blocks::<BlockIq4Nl, 32>(bytes, out),
        DType::IQ4_XS => decode_blocks::<BlockIq4Xs, 256>(bytes, out),
        DType::MXFP4 => decode_blocks::<BlockMxfp4, 32>(bytes, out),
        DType::IQ2_XXS => decode_with(bytes, out, BlockIq2Xxs::decode),
        DType::IQ2_XS => decode_with(bytes, out, BlockIq2Xs::decode),
        DType::IQ2_S => decode_with(bytes, out, BlockIq2S::decode),
        DType::IQ3_XXS => decode_with(bytes, out, BlockIq3Xxs::decode),
        DType::IQ3_S => decode_with(bytes, out, BlockIq3S::decode),
        DType::I32 | DType::U32 | DType::I64 | DType::U8 => {
            return Err(TensorError::Unsupported { dtype, verb: "decoded to F32" });
        }
    }
    Ok(())
}

/// Returns whether [`quantize`] encodes `dtype`. The IQ2 and IQ3 types are only decoded.
pub const fn can_encode(dtype: DType) -> bool {
    let is_integer = matches!(dtype, DType::I32 | DType::U32 | DType::I64 | DType::U8);
    let only_decodes =
        matches!(dtype, DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S);
    !is_integer && !only_decodes
}

/// Encodes `values` as `dtype` into `out`, which must have exactly the right size.
///
/// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, F16 and BF16 match the `gguf` package byte for byte. The K types and the IQ4 types
/// search for scales with a small squared error: from several starting points they alternate between the nearest
/// levels for the scales and the least-squares scales for the levels, then round the scales to values that the
/// block can store.
///
/// Encoding is deterministic and blocks are independent, so a large tensor may be split at block boundaries and
/// encoded by several threads.
///
/// NaN, infinities and values outside the range of the type are errors; `out` is then partially written.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), TensorError> {
    check_lengths(dtype, values.len(), out.len())?;
    if let Some(index) = values.iter().position(|v| !v.is_finite()) {
        return Err(TensorError::NotFinite { dtype, index, value: values[index] });
    }
    let encoded = match dtype {
        DType::F32 => plain::encode_f32(values, out),
        DType::F16 => plain::encode_f16(values, out),
        DType::BF16 => plain::encode_bf16(values, out),
        DType::Q4_0 => encode_blocks::<BlockQ4_0, 32>(values, out),
        DType::Q4_1 => encode_blocks::<BlockQ4_1, 32>(values, out),
        DType::Q5_0 => encode_blocks::<BlockQ5_0, 32>(values, out),
        DType::Q5_1 => encode_blocks::<BlockQ5_1, 32>(values, out),
        DType::Q8_0 => encode_blocks::<BlockQ8_0, 32>(values, out),
        DType::Q2_K => encode_blocks::<BlockQ2K, 256>(values, out),
        DType::Q3_K => encode_blocks::<BlockQ3K, 256>(values, out),
        DType::Q4_K => encode_blocks::<BlockQ4K, 256>(values, out),
        DType::Q5_K => encode_blocks::<BlockQ5K, 256>(values, out),
        DType::Q6_K => encode_blocks::<BlockQ6K, 256>(values, out),
        DType::IQ4_NL => encode_blocks::<BlockIq4Nl, 32>(values, out),
        DType::IQ4_XS => encode_blocks::<BlockIq4Xs, 256>(values, out),
        DType::MXFP4 => encode_blocks::<BlockMxfp4, 32>(values, out),
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => {
            return Err(TensorError::Unsupported { dtype, verb: "encoded from F32" });
        }
        DType::I32 | DType::U32 | DType::I64 | DType::U8 => {
            return Err(TensorError::Unsupported { dtype, verb: "encoded from F32" });
        }
    };
    encoded.map_err(|OutOfRange { index }| TensorError::OutOfRange { dtype, index, value: values[index] })
}

/// Encodes `values` as `dtype` into `out` with a small weighted squared error, for the best model rather than for known
/// bytes. Every block type searches for its scales, the simple ones too.
///
/// `values` are rows of `row_len` elements. `importance` has one factor per column, such as the mean squared activation
/// that multiplies it; without one, all columns count the same. Large values weigh somewhat more than small ones.
///
/// Rows are independent, so a large tensor may be split between rows and encoded by several threads.
///
/// NaN, infinities and values outside the range of the type are errors; `out` is then partially written.
pub fn quantize_weighted(
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), TensorError> {
    check_lengths(dtype, values.len(), out.len())?;
    let is_weighted = dtype.is_quantized() && can_encode(dtype) && row_len.is_multiple_of(dtype.block_len());
    let fits = values.len().is_multiple_of(row_len.max(1)) && importance.is_none_or(|i| i.len() == row_len);
    if !is_weighted || !fits {
        return quantize(dtype, values, out);
    }
    if let Some(index) = values.iter().position(|v| !v.is_finite()) {
        return Err(TensorError::NotFinite { dtype, index, value: values[index] });
    }
    let row_bytes = row_len / dtype.block_len() * dtype.block_bytes();
    for (row, (values, out)) in values.chunks_exact(row_len).zip(out.chunks_exact_mut(row_bytes)).enumerate()
    {
        let encoded = match dtype {
            DType::Q4_0 => encode_row::<BlockQ4_0, 32>(values, importance, out),
            DType::Q4_1 => encode_row::<BlockQ4_1, 32>(values, importance, out),
            DType::Q5_0 => encode_row::<BlockQ5_0, 32>(values, importance, out),
            DType::Q5_1 => encode_row::<BlockQ5_1, 32>(values, importance, out),
            DType::Q8_0 => encode_row::<BlockQ8_0, 32>(values, importance, out),
            DType::Q2_K => encode_row::<BlockQ2K, 256>(values, importance, out),
            DType::Q3_K => encode_row::<BlockQ3K, 256>(values, importance, out),
            DType::Q4_K => encode_row::<BlockQ4K, 256>(values, importance, out),
            DType::Q5_K => encode_row::<BlockQ5K, 256>(values, importance, out),
            DType::Q6_K => encode_row::<BlockQ6K, 256>(values, importance, out),
            DType::IQ4_NL => encode_row::<BlockIq4Nl, 32>(values, importance, out),
            DType::IQ4_XS => encode_row::<BlockIq4Xs, 256>(values, importance, out),
            DType::MXFP4 => encode_row::<BlockMxfp4, 32>(values, importance, out),
            DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => {
                return Err(TensorError::Unsupported { dtype, verb: "encoded with weights" });
            }
            DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::U32 | DType::I64 | DType::U8 => {
                return Err(TensorError::Unsupported { dtype, verb: "encoded with weights" });
            }
        };
        encoded.map_err(|OutOfRange { index }| {
            let index = row * row_len + index;
            TensorError::OutOfRange { dtype, index, value: values[index - row * row_len] }
        })?;
    }
    Ok(())
}

impl HostTensor {
    /// Decodes the elements in row-major order of the shape, for any layout.
    ///
    /// In addition to the result, allocates memory for all stored elements between the first and the last that the
    /// layout reaches.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        let (dtype, layout) = (self.dtype(), self.layout());
        let blocks = layout.offset() / dtype.block_len()..layout.end().div_ceil(dtype.block_len());
        // The end of an empty layout is 0, whatever its offset.
        let bytes = match blocks.is_empty() {
            true => &[],
            false => {
                &self.bytes().as_slice()[blocks.start * dtype.block_bytes()..blocks.end * dtype.block_bytes()]
            }
        };
        let mut stored = zeros(blocks.len() * dtype.block_len())?;
        dequantize(dtype, bytes, &mut stored)?;
        let first = blocks.start * dtype.block_len();
        let n = layout.shape().n_elements();
        if layout.is_contiguous() && n == stored.len() {
            return Ok(stored);
        }
        let mut values = Vec::new();
        values.try_reserve_exact(n).map_err(|_| TensorError::NoMemory { n_elements: n })?;
        values.extend(layout.indices().map(|i| stored[i - first]));
        Ok(values)
    }
}

/// Index of a value that the type cannot represent: an element, or the largest one of a block whose scale
/// overflows.
struct OutOfRange {
    index: usize,
}

fn check_lengths(dtype: DType, n_elements: usize, got_bytes: usize) -> Result<(), TensorError> {
    let shape = Shape::new(&[n_elements])?;
    let need_bytes = dtype.bytes_for(n_elements).ok_or(TensorError::PartialBlocks { dtype, shape })?;
    if need_bytes != got_bytes {
        return Err(TensorError::ByteCount { dtype, shape, need_bytes, got_bytes });
    }
    Ok(())
}

fn decode_blocks<B: Block<N>, const N: usize>(bytes: &[u8], out: &mut [f32]) {
    decode_with(bytes, out, B::decode);
}

fn decode_with<B: bytemuck::Pod, const N: usize>(bytes: &[u8], out: &mut [f32], decode: fn(&B) -> [f32; N]) {
    let blocks: &[B] = bytemuck::cast_slice(bytes);
    for (block, out) in blocks.iter().zip(out.as_chunks_mut::<N>().0) {
        *out = decode(block);
    }
}

fn encode_blocks<B: Block<N>, const N: usize>(values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
    let blocks: &mut [B] = bytemuck::cast_slice_mut(out);
    for (i, (values, block)) in values.as_chunks::<N>().0.iter().zip(blocks).enumerate() {
        *block = B::encode(values).ok_or_else(|| OutOfRange { index: i * N + search::peak_idx(values) })?;
    }
    Ok(())
}

fn encode_row<B: Block<N>, const N: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), OutOfRange> {
    let blocks: &mut [B] = bytemuck::cast_slice_mut(out);
    let importance = importance.map(|all| all.as_chunks::<N>().0);
    for (i, (values, block)) in values.as_chunks::<N>().0.iter().zip(blocks).enumerate() {
        let weighing = importance.map_or(Weighing::Size, |all| Weighing::Importance(&all[i]));
        let encoded = B::encode_weighted(values, weighing);
        *block = encoded.ok_or_else(|| OutOfRange { index: i * N + search::peak_idx(values) })?;
    }
    Ok(())
}

fn zeros(n_elements: usize) -> Result<Vec<f32>, TensorError> {
    let mut values = Vec::new();
    values.try_reserve_exact(n_elements).map_err(|_| TensorError::NoMemory { n_elements })?;
    values.resize(n_elements, 0.0);
    Ok(values)
}
