//! Alignment of tensor data.

use refrain_tensor::{Bytes, DType};

/// Returns the bytes if they are aligned for the elements of a dtype, otherwise an aligned copy.
///
/// Mapped GGUF files are always aligned. Bytes built into a program and tensors of some safetensors writers may not be.
pub(crate) fn aligned(bytes: Bytes, dtype: DType) -> Bytes {
    let align = if dtype.is_quantized() { 2 } else { dtype.block_bytes() };
    if bytes.as_slice().as_ptr().addr().is_multiple_of(align) {
        return bytes;
    }
    let from = bytes.as_slice();
    let mut words = vec![0u64; from.len().div_ceil(8)];
    bytemuck::cast_slice_mut(&mut words)[..from.len()].copy_from_slice(from);
    let n_bytes = from.len();
    let copy = Bytes::new(AlignedWords(words));
    copy.slice(0..n_bytes).unwrap_or(bytes)
}

/// Memory aligned for the widest element.
struct AlignedWords(Vec<u64>);

impl AsRef<[u8]> for AlignedWords {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
