//! Parser of one GGUF file: header, metadata and tensor table, with the checks that make the table safe to use.

use super::cursor::{Cursor, FIRST_CAPACITY};
use super::fault::{GgufFault, GgufLocation};
use super::metadata::Metadata;
use super::types::{self, MAX_DIMS};
use crate::FormatError;
use crate::table::{FileIdx, TensorInfo};
use refrain_tensor::Shape;
use std::path::Path;

pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// The longest key and tensor name. The format allows keys of 2^16 - 1 bytes, and names of 64 that converters exceed.
const MAX_NAME_BYTES: u64 = 65535;

/// What one file says, with tensors in its order.
pub(crate) struct ParsedGguf {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A fault and its place; the file name is added by [`parse`].
struct LocatedFault(GgufLocation, GgufFault);

/// Reads everything but tensor data. Memory is bounded by a small multiple of the bytes in front of the tensor data.
pub(crate) fn parse(file: &Path, file_idx: FileIdx, bytes: &[u8]) -> Result<ParsedGguf, FormatError> {
    parse_at(file, file_idx, bytes)
        .map_err(|LocatedFault(place, fault)| FormatError::gguf(file, place, fault))
}

fn parse_at(file: &Path, file_idx: FileIdx, bytes: &[u8]) -> Result<ParsedGguf, LocatedFault> {
    let mut cur = Cursor::new(bytes);
    let version = header(&mut cur, bytes)?;
    // Minimum sizes. Tensor: name length, rank, type and offset. Metadata entry: key length, type and one byte.
    let n_tensors = at_byte(&mut cur, |c| c.entries("tensors", 24))?;
    let n_entries = at_byte(&mut cur, |c| c.entries("metadata entries", 13))?;

    let mut entries = Vec::with_capacity(n_entries.min(FIRST_CAPACITY));
    for _ in 0..n_entries {
        let key = at_byte(&mut cur, |c| c.name("metadata key", MAX_NAME_BYTES))?;
        let start = cur.pos() as u64;
        let value =
            cur.value().map_err(|fault| LocatedFault(GgufLocation::Value(key.to_string(), start), fault))?;
        entries.push((key, value));
    }
    let metadata = Metadata::new(file, entries)
        .map_err(|key| LocatedFault(GgufLocation::Key(key.into()), GgufFault::Duplicate))?;
    let alignment = alignment(&metadata)?;

    let mut tensors = Vec::with_capacity(n_tensors.min(FIRST_CAPACITY));
    for _ in 0..n_tensors {
        tensors.push(tensor_info(&mut cur, file_idx, alignment)?);
    }
    place_tensors(&mut tensors, cur.pos() as u64, alignment, bytes.len() as u64)?;
    check_overlaps(&tensors)?;
    Ok(ParsedGguf { version, metadata, tensors })
}

/// Runs a read; its fault is located at the byte where it began.
fn at_byte<'a, T>(
    cur: &mut Cursor<'a>,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, GgufFault>,
) -> Result<T, LocatedFault> {
    let start = cur.pos() as u64;
    read(cur).map_err(|fault| LocatedFault(GgufLocation::Byte(start), fault))
}

fn header(cur: &mut Cursor<'_>, bytes: &[u8]) -> Result<u32, LocatedFault> {
    if !bytes.starts_with(MAGIC) && !MAGIC.starts_with(bytes) {
        let magic = bytes[..bytes.len().min(4)].to_vec();
        return Err(LocatedFault(GgufLocation::Byte(0), GgufFault::Magic { magic }));
    }
    at_byte(cur, Cursor::magic)?;
    let version = at_byte(cur, |c| c.u32("the version"))?;
    match version {
        2 | 3 => Ok(version),
        _ if (1..=3).contains(&version.swap_bytes()) => {
            Err(LocatedFault(GgufLocation::Byte(4), GgufFault::BigEndian))
        }
        found => Err(LocatedFault(GgufLocation::Byte(4), GgufFault::Version { found })),
    }
}

/// Returns the alignment, at least 8 as the format demands. In a page-aligned mapping every element is then aligned.
fn alignment(metadata: &Metadata) -> Result<u64, LocatedFault> {
    const KEY: &str = "general.alignment";
    let blame = |fault| LocatedFault(GgufLocation::Key(KEY.into()), fault);
    let Some(value) = metadata.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let found = super::FromValue::from_value(value).map_err(blame)?;
    match found {
        8..=0x4000_0000 if u64::is_power_of_two(found) => Ok(found),
        _ => Err(blame(GgufFault::Alignment { found })),
    }
}

/// Reads one entry of the tensor table. Its `offset` is still relative to the start of the tensor data.
fn tensor_info(cur: &mut Cursor<'_>, file_idx: FileIdx, alignment: u64) -> Result<TensorInfo, LocatedFault> {
    let name = at_byte(cur, |c| c.name("tensor name", MAX_NAME_BYTES))?;
    let blame = |fault| LocatedFault(GgufLocation::Tensor(name.to_string()), fault);
    let rank = at_byte(cur, |c| c.u32("the tensor table"))?;
    if rank > MAX_DIMS {
        return Err(blame(GgufFault::Rank { rank }));
    }
    let mut dims = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        dims.push(at_byte(cur, |c| c.u64("the tensor table"))?);
    }
    let number = at_byte(cur, |c| c.u32("the tensor table"))?;
    let offset = at_byte(cur, |c| c.u64("the tensor table"))?;

    let dtype = types::dtype_of(number).ok_or_else(|| blame(GgufFault::TensorType { number }))?;
    if dims.contains(&0) {
        return Err(blame(GgufFault::ZeroDim { dims }));
    }
    let outermost_first: Option<Vec<usize>> = dims.iter().rev().map(|&d| usize::try_from(d).ok()).collect();
    let shape = outermost_first.and_then(|d| Shape::new(&d).ok());
    let Some(shape) = shape else {
        return Err(blame(GgufFault::TooLarge { dims }));
    };
    let row = shape.dim_back(0);
    if !row.is_multiple_of(dtype.block_len()) {
        return Err(blame(GgufFault::PartialBlocks { row: row as u64, block_len: dtype.block_len(), dtype }));
    }
    let Some(n_bytes) = dtype.bytes_for(shape.n_elements()) else {
        return Err(blame(GgufFault::TooLarge { dims }));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(blame(GgufFault::Unaligned { offset, alignment }));
    }
    Ok(TensorInfo { name, dtype, shape, offset, n_bytes: n_bytes as u64, file_idx })
}

/// Makes offsets absolute and checks that every tensor is inside the file.
fn place_tensors(
    tensors: &mut [TensorInfo],
    table_end: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<(), LocatedFault> {
    let data_start = table_end.next_multiple_of(alignment);
    for tensor in tensors {
        let start = data_start.saturating_add(tensor.offset);
        let end = start.saturating_add(tensor.n_bytes);
        if end > file_bytes {
            let fault = GgufFault::OutsideFile { start, end, file_bytes };
            return Err(LocatedFault(GgufLocation::Tensor(tensor.name.to_string()), fault));
        }
        tensor.offset = start;
    }
    Ok(())
}

fn check_overlaps(tensors: &[TensorInfo]) -> Result<(), LocatedFault> {
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by_key(|&i| tensors[i as usize].offset);
    for pair in order.windows(2) {
        let (a, b) = (&tensors[pair[0] as usize], &tensors[pair[1] as usize]);
        if a.offset + a.n_bytes > b.offset {
            let fault = GgufFault::Overlap { other: a.name.to_string() };
            return Err(LocatedFault(GgufLocation::Tensor(b.name.to_string()), fault));
        }
    }
    Ok(())
}
