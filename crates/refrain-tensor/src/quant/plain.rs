//! F32, F16 and BF16: one little-endian number per element.

use super::OutOfRange;
use half::{bf16, f16};

pub(super) fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f32::from_le_bytes(*bytes);
    }
}

pub(super) fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}

pub(super) fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        // The upper half of an f32. Shifted manually, since `bf16::to_f32` changes the bits of signalling NaNs.
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

pub(super) fn encode_f32(values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
    for (value, out) in values.iter().zip(out.as_chunks_mut().0) {
        *out = value.to_le_bytes();
    }
    Ok(())
}

/// Rounds to nearest, ties to even.
pub(super) fn encode_f16(values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
    for (index, (&value, out)) in values.iter().zip(out.as_chunks_mut().0).enumerate() {
        let value = f16::from_f32(value);
        *out = value.is_finite().then(|| value.to_le_bytes()).ok_or(OutOfRange { index })?;
    }
    Ok(())
}

/// Rounds to nearest, ties to even.
pub(super) fn encode_bf16(values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
    for (index, (&value, out)) in values.iter().zip(out.as_chunks_mut().0).enumerate() {
        let value = bf16::from_f32(value);
        *out = value.is_finite().then(|| value.to_le_bytes()).ok_or(OutOfRange { index })?;
    }
    Ok(())
}
