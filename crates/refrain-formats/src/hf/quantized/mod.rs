//! Folders with quantised weights: fp8, compressed-tensors, AWQ and GPTQ.
//!
//! The files store such a weight in parts: codes, scales, sometimes zero points and the group of each column. They are
//! put together under the weight's own name, so the rest of the program sees an ordinary tensor. Integers of four and
//! eight bits become blocks of Q4_0, Q4_1 or Q8_0, which hold the same codes, and are multiplied from there. Others
//! are decoded to floats. Scales of activations and caches are ignored: activations are not rounded.

mod config; // quantization_config
mod decode; // values of a weight
mod parts; // tensors that make up a weight

pub(crate) use config::Scheme;
pub(crate) use parts::{Packed, assemble, is_part};

use refrain_tensor::DType;

/// How the quantised weights of a folder are stored, and what they become in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedWeights {
    /// The form in the files, such as "AWQ int4 in groups of 128".
    pub stored_as: String,
    /// Number of weights.
    pub n_weights: usize,
    /// Their size in the files.
    pub file_bytes: u64,
    /// Their size in memory.
    pub memory_bytes: u64,
    /// Their types in memory, in order of first use. A weight whose groups or scales do not fit in its type is decoded
    /// to floats instead, which only loading it shows.
    pub dtypes: Vec<DType>,
}

impl QuantizedWeights {
    pub(crate) fn of(scheme: &Scheme, packed: &[Packed]) -> QuantizedWeights {
        let mut dtypes: Vec<DType> = Vec::new();
        for dtype in packed.iter().map(|packed| packed.info.dtype()) {
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        QuantizedWeights {
            stored_as: scheme.label.clone(),
            n_weights: packed.len(),
            file_bytes: packed.iter().map(Packed::file_bytes).sum(),
            memory_bytes: packed.iter().map(|packed| packed.info.n_bytes()).sum(),
            dtypes,
        }
    }
}
