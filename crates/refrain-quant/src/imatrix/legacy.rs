//! llama.cpp's older importance matrices, which have no magic number.
//!
//! ```text
//! i32 n_entries
//! each entry:  i32 n, name [n]; i32 n_calls; i32 n_values, f32 values [n_values]: means, times n_calls
//! then, in some versions:  i32 n_chunks; i32 n, name of the text [n]
//! ```

use super::{Imatrix, ImatrixEntry};
use crate::error::{ImatrixFault, QuantError};
use refrain_formats::FormatError;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// More than any model has; other kinds of files are noticed by these.
const MOST_ENTRIES: usize = 1 << 20;
const MOST_NAME_BYTES: usize = 1 << 12;
const MOST_VALUES: usize = 1 << 28;

/// Reads a file; `None` for a GGUF file.
pub(super) fn open(path: &Path) -> Result<Option<Imatrix>, QuantError> {
    let io = |source| FormatError::Io { verb: "read", path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let left = file.metadata().map_err(io)?.len();
    let mut reader = Reader { path, file: BufReader::new(file), at: 0, left };
    if left < 4 {
        return Err(reader.blame("the end of the file"));
    }
    let first = reader.bytes(4)?;
    if first == b"GGUF" {
        return Ok(None);
    }
    let n_entries = i32::from_le_bytes([first[0], first[1], first[2], first[3]]);
    let n_entries = usize::try_from(n_entries).ok().filter(|n| (1..=MOST_ENTRIES).contains(n));
    let Some(n_entries) = n_entries else { return Err(reader.blame("an impossible number of entries")) };
    let mut imatrix = Imatrix { path: path.to_owned(), ..Imatrix::default() };
    for _ in 0..n_entries {
        let name = reader.name()?;
        if name.is_empty() {
            return Err(reader.blame("an empty name"));
        }
        let n_calls = reader.count(i32::MAX as usize, "an impossible number of calls")?;
        let n_values = reader.count(MOST_VALUES, "an impossible number of values")?;
        let bytes = reader.bytes(4 * n_values)?;
        let sums: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let entry = ImatrixEntry { sums, counts: vec![n_calls as f32] };
        if entry.sums.is_empty() || !entry.has_valid_values() {
            let fault = ImatrixFault::Value { tensor: name };
            return Err(QuantError::Imatrix { path: path.to_owned(), fault });
        }
        imatrix.entries.insert(name, entry);
    }
    if reader.left > 0 {
        let n_chunks = reader.count(i32::MAX as usize, "an impossible number of chunks")?;
        imatrix.n_chunks = u32::try_from(n_chunks).unwrap_or(u32::MAX);
    }
    if reader.left > 0 {
        imatrix.datasets.push(reader.name()?);
    }
    Ok(Some(imatrix))
}

struct Reader<'p> {
    path: &'p Path,
    file: BufReader<File>,
    at: u64,
    left: u64,
}

impl Reader<'_> {
    fn blame(&self, what: &'static str) -> QuantError {
        let fault = ImatrixFault::Binary { what, at: self.at };
        QuantError::Imatrix { path: self.path.to_owned(), fault }
    }

    /// Never more than the file has.
    fn bytes(&mut self, n: usize) -> Result<Vec<u8>, QuantError> {
        if n as u64 > self.left {
            return Err(self.blame("the end of the file"));
        }
        let mut bytes = vec![0; n];
        let io = |source| FormatError::Io { verb: "read", path: self.path.to_owned(), source };
        self.file.read_exact(&mut bytes).map_err(io)?;
        self.at += n as u64;
        self.left -= n as u64;
        Ok(bytes)
    }

    fn count(&mut self, most: usize, what: &'static str) -> Result<usize, QuantError> {
        let bytes = self.bytes(4)?;
        let count = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        usize::try_from(count).ok().filter(|&count| count <= most).ok_or_else(|| self.blame(what))
    }

    fn name(&mut self) -> Result<String, QuantError> {
        let n = self.count(MOST_NAME_BYTES, "an impossible length of a name")?;
        let bytes = self.bytes(n)?;
        String::from_utf8(bytes).map_err(|_| self.blame("a name that is not UTF-8"))
    }
}
