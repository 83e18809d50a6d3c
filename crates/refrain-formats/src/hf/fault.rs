//! Faults of Hugging Face folders.

use crate::error::{listing, quoted};
use refrain_tensor::MAX_RANK;

/// A fault in a file of a Hugging Face folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields appear in the messages above them.
pub enum HfFault {
    #[error("invalid JSON: {message}")]
    Json { message: String },
    #[error("{n_bytes} bytes, at most {most} are allowed")]
    TooLarge { n_bytes: u64, most: u64 },
    #[error("expected a JSON object, found {found}")]
    NotAnObject { found: &'static str },
    #[error("key {} is missing", quoted(key))]
    MissingKey { key: String },
    #[error("key {}: expected {expected}, found {found}", quoted(key))]
    WrongType { key: String, expected: &'static str, found: String },
    #[error("the safetensors header of {header_bytes} bytes does not fit in the file of {file_bytes} bytes")]
    HeaderLength { header_bytes: u64, file_bytes: u64 },
    #[error("{n_bytes} bytes cannot be a safetensors file, which starts with 8 bytes of header length")]
    NoHeader { n_bytes: u64 },
    #[error("a safetensors header of {header_bytes} bytes, at most {most} are allowed")]
    HeaderTooLarge { header_bytes: u64, most: u64 },
    #[error("invalid safetensors header: {message}")]
    Header { message: String },
    #[error("the header describes {expected_bytes} bytes of tensors, the file holds {found_bytes}")]
    DataLength { expected_bytes: u64, found_bytes: u64 },
    #[error(
        "tensor {}: dtype {found} is not supported, F32, F16, BF16, I32, U32, I64 and U8 are",
        quoted(name)
    )]
    Dtype { name: String, found: String },
    #[error("tensor {}: {rank} dimensions, at most {MAX_RANK} are supported", quoted(name))]
    Rank { name: String, rank: usize },
    #[error("tensor {} is missing", quoted(name))]
    MissingTensor { name: String },
    #[error("tensor {} is in this file and in {}", quoted(name), quoted(other))]
    Duplicate { name: String, other: String },
    #[error("names {} for tensor {}, but that file does not exist", quoted(shard), quoted(name))]
    MissingShard { shard: String, name: String },
    #[error("names {} for tensor {}, but that file does not contain it", quoted(shard), quoted(name))]
    NotInShard { shard: String, name: String },
    #[error("names {} for tensor {}, but that is not a plain file name", quoted(shard), quoted(name))]
    ShardName { shard: String, name: String },
    #[error("no config.json in this folder")]
    NoConfig,
    #[error(
        "no weights: looked for model.safetensors, model.safetensors.index.json and a single *.safetensors"
    )]
    NoWeights,
    #[error("no weights in safetensors, only {}", quoted(found))]
    OtherWeights { found: String },
    #[error("no adapter_config.json in this folder, which holds {}", listing(found))]
    NoAdapter { found: Vec<String> },
    #[error("no adapter_model.safetensors in this folder")]
    NoAdapterWeights,
    #[error("{} is {}: {because}", quoted(key), quoted(found))]
    Adapter { key: String, found: String, because: &'static str },
    #[error(
        "weights quantised as {found} are not supported; fp8 (per tensor or block), compressed-tensors (fp8, int8, int4, \
         MXFP4), AWQ (int4, gemm), GPTQ (int4, int8) and MXFP4 experts are"
    )]
    Quantization { found: String },
    #[error("tensor {} is quantised, but its {} is missing", quoted(name), quoted(part))]
    MissingPart { name: String, part: String },
    #[error(
        "tensor {} is quantised, but no group of quantization_config fits it: it has dtype {found}",
        quoted(name)
    )]
    NoGroup { name: String, found: String },
    #[error(
        "tensor {} has shape {found:?}, but {} for a weight of {n_out} x {n_in} {form}",
        quoted(name),
        wanted(expected)
    )]
    PartShape {
        name: String,
        found: Vec<usize>,
        expected: Vec<Vec<usize>>,
        n_out: usize,
        n_in: usize,
        form: String,
    },
    #[error("tensor {} has dtype {found}, expected {expected}", quoted(name))]
    PartType { name: String, found: String, expected: &'static str },
    #[error("tensor {}: rows of {n_in} elements are not whole groups of {group}", quoted(name))]
    PartialGroups { name: String, n_in: usize, group: usize },
    #[error("tensor {} puts column {column} into group {found}, but there are {n_groups}", quoted(name))]
    GroupIndex { name: String, column: usize, found: i32, n_groups: usize },
    #[error(
        "tensor {} says that the weight is {found:?}, but its codes are for {n_out} x {n_in}",
        quoted(name)
    )]
    WeightShape { name: String, found: Vec<i64>, n_out: usize, n_in: usize },
    #[error("tensor {}: {source}", quoted(name))]
    Packed { name: String, source: refrain_tensor::TensorError },
    #[error("{n_files} *.safetensors files without model.safetensors.index.json")]
    NoIndex { n_files: usize },
}

impl HfFault {
    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        use HfFault as F;
        let hint = match self {
            F::Json { .. } | F::NotAnObject { .. } | F::WrongType { .. } | F::MissingKey { .. } => {
                "fetch the file again, or fix it by hand"
            }
            F::TooLarge { .. } => "check that this is the right file",
            F::HeaderLength { .. }
            | F::NoHeader { .. }
            | F::HeaderTooLarge { .. }
            | F::Header { .. }
            | F::DataLength { .. } => "the file is damaged or incomplete; fetch it again",
            F::Dtype { .. } | F::Rank { .. } => "get the model in bfloat16, or as a GGUF file",
            F::MissingTensor { .. } | F::Duplicate { .. } | F::NotInShard { .. } | F::ShardName { .. } => {
                "config.json, the index and the weights belong to different models; fetch the folder again"
            }
            F::Quantization { .. } => "get the model in bfloat16, in one of these forms, or as a GGUF file",
            F::MissingPart { .. }
            | F::NoGroup { .. }
            | F::PartShape { .. }
            | F::PartType { .. }
            | F::PartialGroups { .. }
            | F::GroupIndex { .. }
            | F::WeightShape { .. }
            | F::Packed { .. } => {
                "the weights do not match quantization_config in config.json; fetch the folder again"
            }
            F::MissingShard { .. } => "fetch the missing file into the folder of the index",
            F::NoConfig => "fetch config.json of the model into the folder",
            F::NoWeights => "fetch the *.safetensors files of the model into the folder",
            F::OtherWeights { .. } => "convert the weights to safetensors, or get the model as a GGUF file",
            F::NoAdapter { .. } => "use the folder of a LoRA adapter in the format of peft",
            F::NoAdapterWeights => "fetch adapter_model.safetensors into the folder",
            F::Adapter { .. } => {
                "merge the adapter with peft (merge_and_unload) and use the merged model, or train a plain LoRA adapter"
            }
            F::NoIndex { .. } => "fetch model.safetensors.index.json into the folder",
        };
        Some(hint.into())
    }
}

fn wanted(shapes: &[Vec<usize>]) -> String {
    let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
    format!("{} is needed", shapes.join(" or "))
}
