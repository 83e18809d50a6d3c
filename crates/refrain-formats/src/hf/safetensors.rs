//! Parser of one safetensors file. The `safetensors` crate parses the header; the tensors stay in the mapping.

use super::fault::HfFault;
use crate::table::{FileIdx, TensorInfo};
use refrain_tensor::{Bytes, DType, MAX_RANK, Shape};
use safetensors::tensor::{self, Dtype, Metadata};

/// The limit of the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// A tensor as the header describes it, of any dtype.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: Box<str>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) offset: u64,
    pub(crate) n_bytes: u64,
    pub(crate) file_idx: FileIdx,
}

impl Stored {
    /// The table entry of a plain weight; `None` if its dtype is not supported.
    pub(crate) fn info(&self) -> Result<Option<TensorInfo>, HfFault> {
        let Some(dtype) = dtype_of(self.dtype) else { return Ok(None) };
        let Stored { name, offset, n_bytes, file_idx, .. } = self.clone();
        let rank = self.shape.len();
        if rank > MAX_RANK {
            return Err(HfFault::Rank { name: name.into(), rank });
        }
        let Ok(shape) = Shape::new(&self.shape) else {
            return Err(HfFault::Header {
                message: format!("{name:?} has too many elements: {:?}", self.shape),
            });
        };
        Ok(Some(TensorInfo { name, dtype, shape, offset, n_bytes, file_idx }))
    }

    /// Its bytes; `None` if they are out of bounds.
    pub(crate) fn view(&self, file: &Bytes) -> Option<Bytes> {
        let start = usize::try_from(self.offset).ok()?;
        let end = start.checked_add(usize::try_from(self.n_bytes).ok()?)?;
        file.slice(start..end)
    }
}

/// Reads the header and checks every tensor against the file.
pub(crate) fn parse(bytes: &[u8], file_idx: FileIdx) -> Result<Vec<Stored>, HfFault> {
    let file_bytes = bytes.len() as u64;
    let Some((length, body)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(HfFault::NoHeader { n_bytes: file_bytes });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > body.len() as u64 {
        return Err(HfFault::HeaderLength { header_bytes, file_bytes });
    }
    if header_bytes > MAX_HEADER_BYTES {
        return Err(HfFault::HeaderTooLarge { header_bytes, most: MAX_HEADER_BYTES });
    }
    let (header, data) = body.split_at(header_bytes as usize);
    // Deserialising checks that offsets ascend without gaps and that each span fits its shape and dtype. The total is
    // compared here, because the crate's own comparison overflows on absurd values.
    // A copy is parsed: the file may change under the mapping.
    let header = header.to_vec();
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| HfFault::Header { message: e.to_string() })?;
    let (expected_bytes, found_bytes) = (metadata.data_len() as u64, data.len() as u64);
    if expected_bytes != found_bytes {
        return Err(HfFault::DataLength { expected_bytes, found_bytes });
    }

    let data_start = LENGTH_BYTES as u64 + header_bytes;
    let stored = |(name, info): (String, &tensor::TensorInfo)| {
        let (start, end) = info.data_offsets;
        let (offset, n_bytes) = (data_start + start as u64, (end - start) as u64);
        let (name, shape) = (name.into(), info.shape.clone());
        Stored { name, dtype: info.dtype, shape, offset, n_bytes, file_idx }
    };
    let mut tensors: Vec<Stored> = metadata.tensors().into_iter().map(stored).collect();
    // The crate iterates over a hash table. File order is the same on every run.
    tensors.sort_unstable_by(|a, b| (a.offset, &a.name).cmp(&(b.offset, &b.name)));
    Ok(tensors)
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}
