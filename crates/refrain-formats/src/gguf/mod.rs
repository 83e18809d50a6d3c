//! GGUF files: metadata and tensors, used in place in the mapped file.
//!
//! Versions 2 and 3 are read, in one file or split over several; version 3 is written.

#[cfg(target_endian = "big")]
compile_error!("tensors are used in their file layout, which is little-endian");

mod cursor; // checked reading
mod fault; // errors
mod metadata; // keys and values
mod parse; // one file
mod split; // many files
mod types; // tensor type numbers
mod value; // metadata values
mod writer; // writing

pub use fault::{GgufFault, GgufLocation};
pub use metadata::Metadata;
pub use types::{dtype_of, number_of};
pub use value::{Array, FromValue, MetadataValue, StrArray};
pub use writer::{GgufWriter, TensorSink};

pub(crate) use parse::MAGIC;
pub(crate) use split::SplitName;

use crate::FormatError;
use crate::aligned::aligned;
use crate::mmap::Mapped;
use crate::table::{FileIdx, TensorInfo, TensorTable};
use parse::{ParsedGguf, parse};
use refrain_tensor::{Bytes, DType, HostTensor};
use std::path::{Path, PathBuf};

/// An open GGUF model: one file, or all parts of a split model.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    tensors: TensorTable,
    files: Vec<GgufPart>,
}

#[derive(Debug)]
struct GgufPart {
    path: PathBuf,
    bytes: Bytes,
    mapped: Option<Mapped>,
}

impl Gguf {
    /// Opens a file. Any part of a split model opens all of them.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, FormatError> {
        let path = path.as_ref();
        let (part, parsed) = open_part(path, 0)?;
        let meta = &parsed.metadata;
        let count: u64 = meta.optional("split.count")?.unwrap_or(1);
        if count <= 1 {
            return Gguf::assemble(vec![(part, parsed)]);
        }
        let index = meta.required::<u64>("split.no")?.saturating_add(1);
        let in_file = |fault| FormatError::gguf(path, GgufLocation::File, fault);
        let name = SplitName::parse(path).filter(|name| name.count == count && name.index == index);
        let name = name.ok_or_else(|| in_file(GgufFault::SplitName { index, count }))?;
        let mut parts = Vec::new();
        let mut opened = Some((part, parsed));
        for index in 1..=count {
            let mut next = match opened.take_if(|_| index == name.index) {
                Some(part) => part,
                None => open_split(&name, index)?,
            };
            for tensor in &mut next.1.tensors {
                tensor.file_idx = (index - 1) as FileIdx;
            }
            parts.push(next);
        }
        let expected = parts[0].1.metadata.optional::<u64>("split.tensors.count")?;
        let gguf = Gguf::assemble(parts)?;
        match expected {
            Some(expected) if expected != gguf.tensors().len() as u64 => {
                Err(in_file(GgufFault::SplitTensors { found: gguf.tensors().len() as u64, expected }))
            }
            _ => Ok(gguf),
        }
    }

    /// Reads a model from memory, such as one built into the program.
    pub fn from_bytes(bytes: Bytes) -> Result<Gguf, FormatError> {
        Gguf::from_named_bytes("in memory", bytes)
    }

    /// Reads a model from memory. Messages call it `name`.
    pub fn from_named_bytes(name: impl Into<PathBuf>, bytes: Bytes) -> Result<Gguf, FormatError> {
        let path = name.into();
        let bytes = aligned(bytes, DType::I64);
        let parsed = parse(&path, 0, bytes.as_slice())?;
        if let Some(count) = parsed.metadata.optional::<u64>("split.count")?.filter(|&count| count > 1) {
            return Err(FormatError::gguf(&path, GgufLocation::File, GgufFault::SplitInMemory { count }));
        }
        Gguf::assemble(vec![(GgufPart { path, bytes, mapped: None }, parsed)])
    }

    /// Merges the parts of a model. The metadata is that of the first.
    fn assemble(parts: Vec<(GgufPart, ParsedGguf)>) -> Result<Gguf, FormatError> {
        let (mut files, mut tensors) = (Vec::with_capacity(parts.len()), Vec::new());
        let mut first = None;
        for (part, parsed) in parts {
            files.push(part);
            if tensors.is_empty() {
                tensors = parsed.tensors;
            } else {
                tensors.extend(parsed.tensors);
            }
            first.get_or_insert((parsed.version, parsed.metadata));
        }
        let (version, metadata) = first.unwrap_or_default();
        let tensors = TensorTable::new(tensors).map_err(|twice| {
            let [_, second] = *twice;
            let file = &files[second.file_idx as usize].path;
            FormatError::gguf(file, GgufLocation::Tensor(second.name.into()), GgufFault::Duplicate)
        })?;
        Ok(Gguf { version, metadata, tensors, files })
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Metadata of the first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The file, or the first part.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// All files of the model with their sizes in bytes.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, u64)> {
        self.files.iter().map(|f| (&*f.path, f.bytes.as_slice().len() as u64))
    }

    /// The tensor table, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.tensors.all()
    }

    /// Returns the file that holds a tensor.
    pub fn file_of(&self, info: &TensorInfo) -> &Path {
        &self.files[info.file_idx as usize].path
    }

    /// Returns the table entry of a tensor.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.find(name)
    }

    /// Returns whether a tensor of this name exists.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensor_info(name).is_some()
    }

    /// Returns a tensor as a view of its file.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, FormatError> {
        let blame = |fault| FormatError::gguf(self.path(), GgufLocation::Tensor(name.to_owned()), fault);
        let info = self.tensor_info(name).ok_or_else(|| blame(GgufFault::Missing))?;
        let bytes = &self.files[info.file_idx as usize].bytes;
        info.view(bytes).ok_or_else(|| {
            let (start, end) = (info.offset, info.offset + info.n_bytes);
            blame(GgufFault::OutsideFile { start, end, file_bytes: bytes.as_slice().len() as u64 })
        })
    }

    /// Asks the system to prefetch the files. Worthwhile before the weights are used, not for reading metadata.
    pub fn prefetch(&self) {
        self.files.iter().filter_map(|f| f.mapped.as_ref()).for_each(Mapped::prefetch);
    }

    /// Lets the system drop the resident pages of the files. Later reads load them again.
    pub fn release(&self) {
        self.files.iter().filter_map(|f| f.mapped.as_ref()).for_each(Mapped::release);
    }
}

fn open_part(path: &Path, file_idx: FileIdx) -> Result<(GgufPart, ParsedGguf), FormatError> {
    let mapped = Mapped::open(path)?;
    let bytes = mapped.bytes();
    if bytes.as_slice().is_empty() {
        return Err(FormatError::Empty { path: path.to_owned() });
    }
    let parsed = parse(path, file_idx, bytes.as_slice())?;
    Ok((GgufPart { path: path.to_owned(), bytes, mapped: Some(mapped) }, parsed))
}

/// Opens part `index` of a split model and checks it against its own metadata.
fn open_split(name: &SplitName, index: u64) -> Result<(GgufPart, ParsedGguf), FormatError> {
    let path = name.path(index);
    if !path.exists() {
        let fault = GgufFault::SplitMissing { index, count: name.count };
        return Err(FormatError::gguf(&path, GgufLocation::File, fault));
    }
    let (part, parsed) = open_part(&path, 0)?;
    let found = parsed.metadata.required::<u64>("split.no")?.saturating_add(1);
    let found_count = parsed.metadata.required("split.count")?;
    if (found, found_count) != (index, name.count) {
        let fault = GgufFault::SplitOrder { found, found_count, expected: index, expected_count: name.count };
        return Err(FormatError::gguf(&path, GgufLocation::File, fault));
    }
    Ok((part, parsed))
}
