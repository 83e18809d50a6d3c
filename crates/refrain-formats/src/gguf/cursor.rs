//! Checked reading of numbers and strings from untrusted bytes.

use super::fault::GgufFault;
use super::types::MAX_ARRAY_DEPTH;
use super::value::{Array, MetadataValue, StrArray};

/// Initial capacity of tables whose entries are larger in memory than in the file. They grow as entries are read: in a
/// file of many gigabytes a damaged count can be absurd and still fit.
pub(crate) const FIRST_CAPACITY: usize = 1024;

/// Limit on keys and tensors, far above any model's.
const MAX_ENTRIES: usize = 1 << 24;

/// A position in the bytes of a file. Every read is checked against the remaining length.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
}

type ReadResult<T> = Result<T, GgufFault>;

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, pos: 0 }
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.pos
    }

    fn take(&mut self, n: u64, what: &'static str) -> ReadResult<&'a [u8]> {
        let left = self.left();
        match usize::try_from(n) {
            Ok(n) if n <= left => {
                let bytes = &self.bytes[self.pos..self.pos + n];
                self.pos += n;
                Ok(bytes)
            }
            _ => Err(GgufFault::Truncated { what, need_bytes: n, left_bytes: left as u64 }),
        }
    }

    fn number<const N: usize>(&mut self, what: &'static str) -> ReadResult<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn magic(&mut self) -> ReadResult<[u8; 4]> {
        self.number("the magic number")
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> ReadResult<u32> {
        self.number(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> ReadResult<u64> {
        self.number(what).map(u64::from_le_bytes)
    }

    /// Reads a count of items of at least `each_bytes` bytes. It is an error if they cannot all be in the file.
    pub(crate) fn count(&mut self, what: &'static str, each_bytes: u64) -> ReadResult<usize> {
        let count = self.u64(what)?;
        let left_bytes = self.left() as u64;
        match usize::try_from(count) {
            Ok(n) if count <= left_bytes / each_bytes => Ok(n),
            _ => Err(GgufFault::Count { what, count, each_bytes, left_bytes }),
        }
    }

    /// Reads a count of table entries, at most [`MAX_ENTRIES`].
    pub(crate) fn entries(&mut self, what: &'static str, each_bytes: u64) -> ReadResult<usize> {
        match self.count(what, each_bytes)? {
            n if n > MAX_ENTRIES => {
                Err(GgufFault::TooMany { what, count: n as u64, most: MAX_ENTRIES as u64 })
            }
            n => Ok(n),
        }
    }

    /// Reads a string of at most `most` bytes.
    pub(crate) fn name(&mut self, what: &'static str, most: u64) -> ReadResult<Box<str>> {
        let n_bytes = self.u64(what)?;
        if n_bytes > most {
            return Err(GgufFault::NameLength { what, n_bytes, most });
        }
        text(self.take(n_bytes, what)?, what)
    }

    fn string(&mut self) -> ReadResult<Box<str>> {
        let n_bytes = self.u64("a string")?;
        text(self.take(n_bytes, "a string")?, "string")
    }

    /// Reads a metadata value after its type.
    pub(crate) fn value(&mut self) -> ReadResult<MetadataValue> {
        const WHAT: &str = "a metadata value";
        Ok(match self.u32("the type of a metadata value")? {
            0 => MetadataValue::U8(u8::from_le_bytes(self.number(WHAT)?)),
            1 => MetadataValue::I8(i8::from_le_bytes(self.number(WHAT)?)),
            2 => MetadataValue::U16(u16::from_le_bytes(self.number(WHAT)?)),
            3 => MetadataValue::I16(i16::from_le_bytes(self.number(WHAT)?)),
            4 => MetadataValue::U32(u32::from_le_bytes(self.number(WHAT)?)),
            5 => MetadataValue::I32(i32::from_le_bytes(self.number(WHAT)?)),
            6 => MetadataValue::F32(f32::from_le_bytes(self.number(WHAT)?)),
            7 => MetadataValue::Bool(bool_of(self.number::<1>(WHAT)?[0])?),
            8 => MetadataValue::String(self.string()?),
            9 => MetadataValue::Array(self.array(1)?),
            10 => MetadataValue::U64(u64::from_le_bytes(self.number(WHAT)?)),
            11 => MetadataValue::I64(i64::from_le_bytes(self.number(WHAT)?)),
            12 => MetadataValue::F64(f64::from_le_bytes(self.number(WHAT)?)),
            found => return Err(GgufFault::ValueType { found }),
        })
    }

    fn array(&mut self, depth: usize) -> ReadResult<Array> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(GgufFault::ArrayDepth { depth });
        }
        Ok(match self.u32("the element type of an array")? {
            0 => Array::U8(self.numbers(u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(f32::from_le_bytes)?),
            7 => {
                let n = self.count("array elements", 1)? as u64;
                let bytes = self.take(n, "an array")?;
                let mut bools = reserve(bytes.len())?;
                for &byte in bytes {
                    bools.push(bool_of(byte)?);
                }
                Array::Bool(bools.into())
            }
            8 => Array::String(self.strings()?),
            9 => {
                let n = self.count("nested arrays", 12)?;
                let mut arrays = Vec::with_capacity(n.min(FIRST_CAPACITY));
                for _ in 0..n {
                    arrays.push(self.array(depth + 1)?);
                }
                Array::Array(arrays.into())
            }
            10 => Array::U64(self.numbers(u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(f64::from_le_bytes)?),
            found => return Err(GgufFault::ValueType { found }),
        })
    }

    fn numbers<T, const N: usize>(&mut self, parse: fn([u8; N]) -> T) -> ReadResult<Box<[T]>> {
        let n = self.count("array elements", N as u64)? as u64;
        let (chunks, _) = self.take(n * N as u64, "an array")?.as_chunks::<N>();
        let mut numbers = reserve(chunks.len())?;
        numbers.extend(chunks.iter().map(|&c| parse(c)));
        Ok(numbers.into())
    }

    /// Reads strings in two passes: the first checks and sums the lengths, so that the second copies into one exact
    /// allocation.
    fn strings(&mut self) -> ReadResult<StrArray> {
        let n = self.count("strings", 8)?;
        let first = self.pos;
        let mut n_bytes = 0;
        for _ in 0..n {
            let len = self.u64("a string")?;
            n_bytes += self.take(len, "a string")?.len();
        }
        let end = self.pos;
        self.pos = first;
        let (mut bytes, mut ends) = (reserve(n_bytes)?, reserve(n)?);
        for _ in 0..n {
            // Checked again: the file may have changed under the mapping.
            let len = self.u64("a string")?;
            let part = self.take(len, "a string")?;
            if part.len() > n_bytes - bytes.len() {
                return Err(GgufFault::Truncated { what: "a string", need_bytes: len, left_bytes: 0 });
            }
            let start = bytes.len();
            bytes.extend_from_slice(part);
            check_utf8(&bytes[start..], "string")?;
            ends.push(bytes.len());
        }
        let text = String::from_utf8(bytes).map_err(|e| not_utf8(e.utf8_error(), e.as_bytes(), "string"))?;
        self.pos = end;
        Ok(StrArray::from_pushed(text, ends))
    }
}

/// Allocates space for `n` elements. A damaged length may exceed the available memory.
fn reserve<T>(n: usize) -> ReadResult<Vec<T>> {
    let mut reserved = Vec::new();
    let need_bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    reserved.try_reserve_exact(n).map_err(|_| GgufFault::NoMemory { need_bytes })?;
    Ok(reserved)
}

fn bool_of(byte: u8) -> ReadResult<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(GgufFault::Bool { found }),
    }
}

/// Copies bytes to text. The copy is checked, not the source: the file may change under the mapping.
fn text(bytes: &[u8], what: &'static str) -> ReadResult<Box<str>> {
    let mut copy = reserve(bytes.len())?;
    copy.extend_from_slice(bytes);
    let text = String::from_utf8(copy).map_err(|e| not_utf8(e.utf8_error(), e.as_bytes(), what))?;
    Ok(text.into())
}

fn check_utf8(bytes: &[u8], what: &'static str) -> ReadResult<()> {
    std::str::from_utf8(bytes).map(drop).map_err(|e| not_utf8(e, bytes, what))
}

fn not_utf8(error: std::str::Utf8Error, bytes: &[u8], what: &'static str) -> GgufFault {
    GgufFault::Utf8 { what, valid_up_to: error.valid_up_to(), n_bytes: bytes.len() }
}
