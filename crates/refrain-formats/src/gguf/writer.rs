//! Writing GGUF version 3.

use super::fault::{GgufFault, GgufLocation};
use super::types;
use super::value::{Array, MetadataValue};
use crate::{AtomicFile, FormatError};
use refrain_tensor::{Bytes, DType, Shape};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Collects metadata and tensors and writes them to one file.
///
/// ```
/// use refrain_formats::gguf::{Gguf, GgufWriter};
/// use refrain_tensor::{Bytes, DType, Shape};
///
/// let mut writer = GgufWriter::new();
/// writer.set("general.architecture", "llama")?;
/// writer.tensor("output_norm.weight", DType::F32, Shape::from([2]), Bytes::new(vec![0; 8]))?;
/// let gguf = Gguf::from_bytes(Bytes::new(writer.to_vec()))?;
/// assert_eq!(gguf.metadata().str("general.architecture")?, "llama");
/// # Ok::<(), refrain_formats::FormatError>(())
/// ```
#[derive(Debug, Default)]
pub struct GgufWriter {
    entries: Vec<(String, MetadataValue)>,
    tensors: Vec<Tensor>,
    alignment: Option<u32>,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    number: u32,
    shape: Shape,
    n_bytes: u64,
    bytes: Option<Bytes>, // none: supplied while the file is written
}

const DEFAULT_ALIGNMENT: u32 = 32;

impl GgufWriter {
    /// Creates a writer without metadata and tensors.
    pub fn new() -> GgufWriter {
        GgufWriter::default()
    }

    /// Adds a key, which must be new. `general.alignment` also sets the alignment of the tensor data.
    pub fn set(
        &mut self,
        key: &str,
        value: impl Into<MetadataValue>,
    ) -> Result<&mut GgufWriter, FormatError> {
        let value = value.into();
        let blame = |fault| refuse(GgufLocation::Key(key.into()), fault);
        if self.entries.iter().any(|(k, _)| k == key) {
            return Err(blame(GgufFault::Duplicate));
        }
        if let MetadataValue::Array(array) = &value {
            check_depth(array, 1).map_err(blame)?;
        }
        if key == "general.alignment" {
            let alignment = <u32 as super::FromValue>::from_value(&value).map_err(blame)?;
            if alignment < 8 || !alignment.is_power_of_two() {
                return Err(blame(GgufFault::Alignment { found: alignment.into() }));
            }
            self.alignment = Some(alignment);
        }
        self.entries.push((key.into(), value));
        Ok(self)
    }

    /// Keys and values, in the order of the file.
    pub fn entries(&self) -> &[(String, MetadataValue)] {
        &self.entries
    }

    /// Adds a tensor, whose name must be new. The shape is outermost first.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: Shape,
        bytes: Bytes,
    ) -> Result<&mut GgufWriter, FormatError> {
        self.declare(name, dtype, shape)?;
        let Some(tensor) = self.tensors.last_mut() else { return Ok(self) };
        let (need_bytes, got_bytes) = (tensor.n_bytes, bytes.as_slice().len() as u64);
        if need_bytes != got_bytes {
            self.tensors.pop();
            let fault = GgufFault::ByteCount { dtype, shape, need_bytes, got_bytes };
            return Err(refuse(GgufLocation::Tensor(name.into()), fault));
        }
        tensor.bytes = Some(bytes);
        Ok(self)
    }

    /// Adds a tensor, whose name must be new. Its bytes are supplied to [`GgufWriter::write_streamed`].
    pub fn declare(
        &mut self,
        name: &str,
        dtype: DType,
        shape: Shape,
    ) -> Result<&mut GgufWriter, FormatError> {
        let blame = |fault| refuse(GgufLocation::Tensor(name.into()), fault);
        let number = types::number_of(dtype).ok_or_else(|| blame(GgufFault::NotAGgufType { dtype }))?;
        if shape.rank() > types::MAX_DIMS as usize {
            return Err(blame(GgufFault::Rank { rank: shape.rank() as u32 }));
        }
        if shape.dims().contains(&0) {
            let dims = shape.dims().iter().rev().map(|&d| d as u64).collect();
            return Err(blame(GgufFault::ZeroDim { dims }));
        }
        let row = shape.dim_back(0);
        let need = dtype.bytes_for(shape.n_elements()).filter(|_| row.is_multiple_of(dtype.block_len()));
        let Some(need) = need else {
            return Err(blame(GgufFault::PartialBlocks {
                row: row as u64,
                block_len: dtype.block_len(),
                dtype,
            }));
        };
        if self.tensors.iter().any(|t| t.name == name) {
            return Err(blame(GgufFault::Duplicate));
        }
        self.tensors.push(Tensor { name: name.into(), number, shape, n_bytes: need as u64, bytes: None });
        Ok(self)
    }

    /// Returns the file as bytes. Tensors without bytes are zeros.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut head = self.head();
        let align = self.alignment.unwrap_or(DEFAULT_ALIGNMENT) as usize;
        for t in &self.tensors {
            head.resize(head.len().next_multiple_of(align), 0);
            match &t.bytes {
                Some(bytes) => head.extend_from_slice(bytes.as_slice()),
                None => head.resize(head.len() + t.n_bytes as usize, 0),
            }
        }
        head
    }

    /// Writes the file. An existing file is replaced only after everything has been written; a failure leaves it unchanged.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), FormatError> {
        self.write_streamed(path.as_ref(), |idx, _| {
            let location = GgufLocation::Tensor(self.tensors[idx].name.clone());
            Err(refuse(location, GgufFault::Missing))
        })
    }

    /// Writes the file, with tensors that `fetch` writes one after the other: those that were declared without bytes, by
    /// their index. An existing file is replaced only after everything is on the disk; a failure leaves it unchanged and
    /// nothing behind.
    pub fn write_streamed<E: From<FormatError>>(
        &self,
        path: &Path,
        mut fetch: impl FnMut(usize, &mut TensorSink<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = |e| E::from(FormatError::io("write", path, e));
        let mut file = AtomicFile::create(path)?;
        let mut out = BufWriter::new(&mut file);
        let head = self.head();
        let align = u64::from(self.alignment.unwrap_or(DEFAULT_ALIGNMENT));
        let mut offset = head.len() as u64;
        out.write_all(&head).map_err(failed)?;
        for (idx, t) in self.tensors.iter().enumerate() {
            let start = offset.next_multiple_of(align);
            io::copy(&mut io::Read::take(io::repeat(0), start - offset), &mut out).map_err(failed)?;
            let mut sink = TensorSink { out: &mut out, path, n_bytes: 0 };
            match &t.bytes {
                Some(bytes) => sink.write(bytes.as_slice())?,
                None => fetch(idx, &mut sink)?,
            }
            let (need_bytes, got_bytes) = (t.n_bytes, sink.n_bytes);
            if need_bytes != got_bytes {
                let reason = format!("tensor {} has {got_bytes} bytes instead of {need_bytes}", t.name);
                return Err(failed(io::Error::new(io::ErrorKind::InvalidData, reason)));
            }
            offset = start + t.n_bytes;
        }
        out.flush().map_err(failed)?;
        drop(out);
        Ok(file.commit()?)
    }

    /// Returns everything before the tensor data, without the final padding.
    fn head(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(b"GGUF");
        out.extend_from_slice(&3u32.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            put_str(&mut out, key);
            out.extend_from_slice(&value.type_number().to_le_bytes());
            put_value(&mut out, value);
        }
        let align = u64::from(self.alignment.unwrap_or(DEFAULT_ALIGNMENT));
        let mut offset = 0u64;
        for t in &self.tensors {
            put_str(&mut out, &t.name);
            out.extend_from_slice(&(t.shape.rank() as u32).to_le_bytes());
            for &dim in t.shape.dims().iter().rev() {
                out.extend_from_slice(&(dim as u64).to_le_bytes());
            }
            out.extend_from_slice(&t.number.to_le_bytes());
            out.extend_from_slice(&offset.to_le_bytes());
            offset = (offset + t.n_bytes).next_multiple_of(align);
        }
        out
    }
}

/// Takes the bytes of one tensor in any number of pieces.
#[allow(missing_debug_implementations)] // a writer has nothing to show
pub struct TensorSink<'a> {
    out: &'a mut dyn Write,
    path: &'a Path,
    n_bytes: u64,
}

impl TensorSink<'_> {
    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        self.n_bytes += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|e| FormatError::io("write", self.path, e))
    }
}

fn refuse(place: GgufLocation, fault: GgufFault) -> FormatError {
    FormatError::gguf(Path::new("file being written"), place, fault)
}

fn check_depth(array: &Array, depth: usize) -> Result<(), GgufFault> {
    if depth > types::MAX_ARRAY_DEPTH {
        return Err(GgufFault::ArrayDepth { depth });
    }
    match array {
        Array::Array(inner) => inner.iter().try_for_each(|a| check_depth(a, depth + 1)),
        _ => Ok(()),
    }
}

fn put_str(out: &mut Vec<u8>, s: &str) {
    out.extend_from_slice(&(s.len() as u64).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &MetadataValue) {
    match value {
        MetadataValue::U8(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::I8(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::Bool(v) => out.push((*v).into()),
        MetadataValue::String(v) => put_str(out, v),
        MetadataValue::Array(v) => put_array(out, v),
        MetadataValue::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
        MetadataValue::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    fn numbers<T: Copy, const N: usize>(out: &mut Vec<u8>, values: &[T], bytes: fn(T) -> [u8; N]) {
        values.iter().for_each(|&v| out.extend_from_slice(&bytes(v)));
    }
    out.extend_from_slice(&array.type_number().to_le_bytes());
    out.extend_from_slice(&(array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => numbers(out, v, i8::to_le_bytes),
        Array::U16(v) => numbers(out, v, u16::to_le_bytes),
        Array::I16(v) => numbers(out, v, i16::to_le_bytes),
        Array::U32(v) => numbers(out, v, u32::to_le_bytes),
        Array::I32(v) => numbers(out, v, i32::to_le_bytes),
        Array::F32(v) => numbers(out, v, f32::to_le_bytes),
        Array::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
        Array::String(v) => v.iter().for_each(|s| put_str(out, s)),
        Array::Array(v) => v.iter().for_each(|a| put_array(out, a)),
        Array::U64(v) => numbers(out, v, u64::to_le_bytes),
        Array::I64(v) => numbers(out, v, i64::to_le_bytes),
        Array::F64(v) => numbers(out, v, f64::to_le_bytes),
    }
}
