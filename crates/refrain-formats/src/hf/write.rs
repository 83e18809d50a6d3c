//! Writing of Hugging Face folders.

use crate::{AtomicFile, FormatError};
use refrain_tensor::{DType, Shape};
use serde_json::{Map, Value, json};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A tensor to write to a safetensors file.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTensor {
    /// Name, unique in the file.
    pub name: String,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Shape,
}

/// Writes a safetensors file with `notes` as additional metadata. `fetch` returns the bytes of one tensor at a time, so
/// that only one is in memory. An existing file is replaced only after everything has been written; a failure leaves it
/// unchanged.
pub fn write_safetensors<E: From<FormatError>>(
    path: &Path,
    tensors: &[NewTensor],
    notes: &[(&str, &str)],
    mut fetch: impl FnMut(usize) -> Result<Vec<u8>, E>,
) -> Result<(), E> {
    let failed = |source: io::Error| E::from(FormatError::io("write", path, source));
    let mut file = AtomicFile::create(path)?;
    let mut out = BufWriter::new(&mut file);
    let header = header(tensors, notes);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(header.as_bytes()).map_err(failed)?;
    for (idx, tensor) in tensors.iter().enumerate() {
        let bytes = fetch(idx)?;
        if bytes.len() != n_bytes(tensor) {
            let reason = format!("tensor {} has the wrong size: {} bytes", tensor.name, bytes.len());
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, reason)));
        }
        out.write_all(&bytes).map_err(failed)?;
    }
    out.flush().map_err(failed)?;
    drop(out);
    Ok(file.commit()?)
}

/// Writes a small file atomically.
pub fn write_whole(path: &Path, content: &[u8]) -> Result<(), FormatError> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(content).map_err(|e| FormatError::io("write", path, e))?;
    file.commit()
}

fn n_bytes(tensor: &NewTensor) -> usize {
    tensor.dtype.bytes_for(tensor.shape.n_elements()).unwrap_or(0)
}

fn header(tensors: &[NewTensor], notes: &[(&str, &str)]) -> String {
    const ALIGNMENT: usize = 8;
    let mut metadata = Map::from_iter([("format".to_owned(), "pt".into())]);
    metadata.extend(notes.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())));
    let mut entries = Map::from_iter([("__metadata__".to_owned(), metadata.into())]);
    let mut start = 0;
    for tensor in tensors {
        let end = start + n_bytes(tensor);
        let (dtype, shape) = (tensor.dtype.name(), tensor.shape.dims());
        entries.insert(
            tensor.name.clone(),
            json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }),
        );
        start = end;
    }
    let mut header = Value::Object(entries).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(ALIGNMENT) - header.len()));
    header
}
