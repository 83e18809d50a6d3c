//! Writes the files of a checkpoint.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};
use std::path::Path;

use refrain_tensor::DType;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::error::CheckpointError;
use super::{FileRecord, FileSpec, NO_SEAL, RunState, STATE, StateFile, TensorSpec, VERSION, hex};
use crate::storage::Storage;

/// Provides the bytes of a tensor when it is written, little-endian and in row-major order.
pub type Fetch<'a> = dyn FnMut(&FileSpec, &TensorSpec) -> io::Result<Cow<'a, [u8]>> + 'a;

/// Validates what is to be saved before anything is written, and returns the total size.
pub(super) fn check(files: &[FileSpec]) -> Result<u64, CheckpointError> {
    let mut names = HashSet::from([STATE]);
    let mut n_bytes = 0u64;
    for file in files {
        let is_plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
        if !is_plain || file.name.starts_with('.') || !names.insert(&file.name) {
            return Err(CheckpointError::BadName { name: file.name.clone() });
        }
        let mut tensors = HashSet::new();
        for tensor in &file.tensors {
            let bad = |reason: &str| CheckpointError::BadTensor {
                file: file.name.clone(),
                tensor: tensor.name.clone(),
                reason: reason.to_owned(),
            };
            if !tensors.insert(&tensor.name) {
                return Err(bad("the name is not unique"));
            }
            if tensor.name == METADATA {
                return Err(bad("the name is reserved"));
            }
            dtype_name(tensor.dtype).ok_or_else(|| bad("its type is quantised"))?;
            n_bytes += tensor.n_bytes().ok_or_else(|| bad("its size overflows"))? as u64;
        }
    }
    Ok(n_bytes)
}

/// Writes all files of a checkpoint into an empty folder.
pub(super) fn write_folder(
    storage: &dyn Storage,
    folder: &Path,
    state: &RunState,
    files: &[FileSpec],
    fetch: &mut Fetch<'_>,
    n_bytes: u64,
) -> Result<(), CheckpointError> {
    let mut records = Vec::new();
    for file in files {
        let path = folder.join(&file.name);
        let written = write_tensors(storage, &path, file, fetch);
        let (n_bytes, sha256) = written.map_err(CheckpointError::write(&path, n_bytes))?;
        records.push(FileRecord { name: file.name.clone(), n_bytes, sha256 });
    }
    let path = folder.join(STATE);
    let text = sealed(state, records)
        .map_err(|error| CheckpointError::State { path: path.clone(), reason: error.to_string() })?;
    let write = || {
        let mut file = storage.create(&path)?;
        file.write_all(text.as_bytes())?;
        file.sync()
    };
    write().map_err(CheckpointError::write(&path, n_bytes))
}

fn sealed(state: &RunState, files: Vec<FileRecord>) -> serde_json::Result<String> {
    let unsealed = StateFile { version: VERSION, seal: NO_SEAL.to_owned(), state: state.clone(), files };
    let text = serde_json::to_string_pretty(&unsealed)?;
    let seal = hex(Sha256::digest(&text));
    Ok(text.replacen(NO_SEAL, &seal, 1))
}

const METADATA: &str = "__metadata__";

/// Writes a safetensors file and returns its size and checksum.
fn write_tensors(
    storage: &dyn Storage,
    path: &Path,
    file: &FileSpec,
    fetch: &mut Fetch<'_>,
) -> io::Result<(u64, String)> {
    // Larger element types first, so that all tensors are aligned.
    let mut tensors: Vec<&TensorSpec> = file.tensors.iter().collect();
    tensors.sort_by_key(|tensor| (std::cmp::Reverse(tensor.dtype.block_bytes()), &tensor.name));
    let mut out = Hashing { file: storage.create(path)?, hasher: Sha256::new(), n_bytes: 0 };
    let header = header(&tensors);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for tensor in tensors {
        let bytes = fetch(file, tensor)?;
        if Some(bytes.len()) != tensor.n_bytes() {
            let (found, name) = (bytes.len(), &tensor.name);
            let reason = format!("{name} ({tensor}) has {found} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        out.write_all(&bytes)?;
    }
    out.file.flush()?;
    out.file.sync()?;
    Ok((out.n_bytes, hex(out.hasher.finalize())))
}

fn header(tensors: &[&TensorSpec]) -> String {
    const ALIGNMENT: usize = 8;
    let mut entries = serde_json::Map::from_iter([(METADATA.to_owned(), json!({ "format": "pt" }))]);
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.n_bytes().unwrap_or_default();
        let dtype = dtype_name(tensor.dtype).unwrap_or_default();
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        entries.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut header = serde_json::Value::Object(entries).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(ALIGNMENT) - header.len()));
    header
}

fn dtype_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("F32"),
        DType::F16 => Some("F16"),
        DType::BF16 => Some("BF16"),
        DType::I32 => Some("I32"),
        DType::U32 => Some("U32"),
        DType::I64 => Some("I64"),
        DType::U8 => Some("U8"),
        DType::Q4_0
        | DType::Q4_1
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q8_0
        | DType::Q2_K
        | DType::Q3_K
        | DType::Q4_K
        | DType::Q5_K
        | DType::Q6_K
        | DType::IQ4_NL
        | DType::IQ4_XS
        | DType::MXFP4
        | DType::IQ2_XXS
        | DType::IQ2_XS
        | DType::IQ2_S
        | DType::IQ3_XXS
        | DType::IQ3_S => None,
    }
}

/// A file that hashes what is written to it.
struct Hashing {
    file: Box<dyn crate::storage::StorageFile>,
    hasher: Sha256,
    n_bytes: u64,
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.n_bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
