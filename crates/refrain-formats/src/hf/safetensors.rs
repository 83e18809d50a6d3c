//! Parser of one safetensors file. The `safetensors` crate parses the header; the tensors stay in the mapping.

use super::fault::HfFault;
use crate::table::{FileIdx, TensorInfo};
use refrain_tensor::{DType, MAX_RANK, Shape};
use safetensors::{Dtype, tensor::Metadata};

/// The limit of the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// Tensors of a file. Those with unsupported dtypes are an error only when they are used.
#[derive(Debug, Default)]
pub(crate) struct ParsedHeader {
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) unsupported: Vec<(String, Dtype)>,
}

/// Reads the header and checks every tensor against the file.
pub(crate) fn parse(bytes: &[u8], file_idx: FileIdx) -> Result<ParsedHeader, HfFault> {
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
    let mut parsed = ParsedHeader::default();
    for (name, info) in metadata.tensors() {
        let Some(dtype) = dtype_of(info.dtype) else {
            parsed.unsupported.push((name, info.dtype));
            continue;
        };
        let rank = info.shape.len();
        if rank > MAX_RANK {
            return Err(HfFault::Rank { name, rank });
        }
        let Ok(shape) = Shape::new(&info.shape) else {
            return Err(HfFault::Header {
                message: format!("{name:?} has too many elements: {:?}", info.shape),
            });
        };
        let (start, end) = info.data_offsets;
        let (offset, n_bytes) = (data_start + start as u64, (end - start) as u64);
        parsed.tensors.push(TensorInfo { name: name.into(), dtype, shape, offset, n_bytes, file_idx });
    }
    // The crate iterates over a hash table. File order is the same on every run.
    parsed.tensors.sort_unstable_by(|a, b| (a.offset, &a.name).cmp(&(b.offset, &b.name)));
    Ok(parsed)
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
