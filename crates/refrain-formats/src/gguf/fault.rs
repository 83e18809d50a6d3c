//! Faults of GGUF files and their locations.

use super::types;
use crate::error::{first_bytes, quoted};
use std::fmt;

/// A location in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufLocation {
    /// The file as a whole.
    File,
    /// A byte offset.
    Byte(u64),
    /// A metadata key.
    Key(String),
    /// A byte offset in the value of a metadata key.
    Value(String, u64),
    /// A tensor.
    Tensor(String),
}

impl fmt::Display for GgufLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufLocation::File => f.write_str("the file"),
            GgufLocation::Byte(offset) => write!(f, "byte {offset}"),
            GgufLocation::Key(key) => write!(f, "key {}", quoted(key)),
            GgufLocation::Value(key, offset) => write!(f, "key {} at byte {offset}", quoted(key)),
            GgufLocation::Tensor(name) => write!(f, "tensor {}", quoted(name)),
        }
    }
}

/// A fault at a [`GgufLocation`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields appear in the messages above them.
pub enum GgufFault {
    #[error("not a GGUF file: it starts with {}, not \"GGUF\"", first_bytes(magic))]
    Magic { magic: Vec<u8> },
    #[error("GGUF version {found} is not supported, versions 2 and 3 are")]
    Version { found: u32 },
    #[error("big-endian GGUF is not supported")]
    BigEndian,
    #[error("the file ends inside {what}: {need_bytes} bytes needed, {left_bytes} left")]
    Truncated { what: &'static str, need_bytes: u64, left_bytes: u64 },
    #[error("{count} {what} cannot fit in the {left_bytes} bytes left (at least {each_bytes} bytes each)")]
    Count { what: &'static str, count: u64, each_bytes: u64, left_bytes: u64 },
    #[error("no memory for an array of {need_bytes} bytes")]
    NoMemory { need_bytes: u64 },
    #[error("{count} {what}, at most {most} are allowed")]
    TooMany { what: &'static str, count: u64, most: u64 },
    #[error("metadata type {found} does not exist, the types are 0 to 12")]
    ValueType { found: u32 },
    #[error("arrays nested {depth} deep, at most {} are supported", types::MAX_ARRAY_DEPTH)]
    ArrayDepth { depth: usize },
    #[error("a bool of value {found}, only 0 and 1 exist")]
    Bool { found: u8 },
    #[error("a {what} that is not UTF-8 (valid up to byte {valid_up_to} of {n_bytes})")]
    Utf8 { what: &'static str, valid_up_to: usize, n_bytes: usize },
    #[error("a {what} of {n_bytes} bytes, at most {most} are allowed")]
    NameLength { what: &'static str, n_bytes: u64, most: u64 },
    #[error("appears twice")]
    Duplicate,
    #[error("alignment {found} is not a power of two from 8 to 2^30")]
    Alignment { found: u64 },
    #[error("tensor type {}, supported are {}", types::describe(*number), types::supported())]
    TensorType { number: u32 },
    #[error("{rank} dimensions, at most {} are supported", types::MAX_DIMS)]
    Rank { rank: u32 },
    #[error("dimensions {dims:?} (innermost first) include a zero")]
    ZeroDim { dims: Vec<u64> },
    #[error("dimensions {dims:?} (innermost first) have too many elements to count")]
    TooLarge { dims: Vec<u64> },
    #[error("rows of {row} elements are not whole blocks of {block_len} ({dtype})")]
    PartialBlocks { row: u64, block_len: usize, dtype: refrain_tensor::DType },
    #[error("offset {offset} is not a multiple of the alignment {alignment}")]
    Unaligned { offset: u64, alignment: u64 },
    #[error("bytes {start}..{end} lie outside the file of {file_bytes} bytes")]
    OutsideFile { start: u64, end: u64, file_bytes: u64 },
    #[error("its bytes overlap those of tensor {}", quoted(other))]
    Overlap { other: String },
    #[error("is missing")]
    Missing,
    #[error("expected {expected}, found {found}")]
    WrongType { expected: &'static str, found: &'static str },
    #[error("expected {expected}, {found} is out of range")]
    OutOfRange { expected: &'static str, found: String },
    #[error("this is part {index} of {count}, but the name does not end in -{index:05}-of-{count:05}.gguf")]
    SplitName { index: u64, count: u64 },
    #[error("part {index} of {count} is missing")]
    SplitMissing { index: u64, count: u64 },
    #[error("claims to be part {found} of {found_count}, expected part {expected} of {expected_count}")]
    SplitOrder { found: u64, found_count: u64, expected: u64, expected_count: u64 },
    #[error("the parts hold {found} tensors in total, split.tensors.count is {expected}")]
    SplitTensors { found: u64, expected: u64 },
    #[error("bytes in memory hold one part of a model split into {count}; open it from its file")]
    SplitInMemory { count: u64 },
    #[error("{dtype} {shape} needs {need_bytes} bytes, got {got_bytes}")]
    ByteCount { dtype: refrain_tensor::DType, shape: refrain_tensor::Shape, need_bytes: u64, got_bytes: u64 },
    #[error("GGUF has no type for {dtype}")]
    NotAGgufType { dtype: refrain_tensor::DType },
}

impl GgufFault {
    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        use GgufFault as F;
        let hint = match self {
            F::Magic { .. } => "use a .gguf file, or a folder with config.json and *.safetensors",
            F::Version { found: 1 } => "version 1 is obsolete; convert the original model again",
            F::Version { found: 4..=99 } => {
                "the file is newer than this program; update it, or convert the model to version 3"
            }
            F::Version { .. } => "the file is damaged; fetch it again, or convert the original model again",
            F::BigEndian => "convert the model again, as little-endian",
            F::TensorType { .. } => "get the model in another quantisation, for example Q4_K_M or Q8_0",
            F::SplitName { .. } => "restore the original names of all parts",
            F::SplitMissing { .. } => "put all parts in one folder under their original names",
            F::SplitOrder { .. } | F::SplitTensors { .. } => {
                "the parts belong to different models; fetch them all again"
            }
            F::Truncated { .. }
            | F::NoMemory { .. }
            | F::TooMany { .. }
            | F::Count { .. }
            | F::OutsideFile { .. }
            | F::ValueType { .. }
            | F::ArrayDepth { .. }
            | F::Bool { .. }
            | F::Utf8 { .. }
            | F::NameLength { .. }
            | F::Duplicate
            | F::Alignment { .. }
            | F::Rank { .. }
            | F::ZeroDim { .. }
            | F::TooLarge { .. }
            | F::PartialBlocks { .. }
            | F::Unaligned { .. }
            | F::Overlap { .. } => "the file is damaged or incomplete; fetch it again",
            F::Missing | F::WrongType { .. } | F::OutOfRange { .. } => {
                "the file was converted for another program or by an old converter; convert it again"
            }
            F::SplitInMemory { .. } | F::ByteCount { .. } | F::NotAGgufType { .. } => return None,
        };
        Some(hint.into())
    }
}
