//! Reads text files in chunks and JSONL files line by line, and reports the location of every error.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::error::DataError;

/// Kind of a file, by its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    Text,
    Jsonl,
}

pub(super) fn kind_of(path: &Path) -> FileKind {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending.to_ascii_lowercase().as_str() {
        "jsonl" | "ndjson" | "json" => FileKind::Jsonl,
        _ => FileKind::Text,
    }
}

/// Opens a file and returns its size. Its type is checked first: opening a pipe blocks until its other end is
/// opened.
fn open(path: &Path) -> Result<(File, u64), DataError> {
    let failed = |source| DataError::Read { path: path.to_owned(), source };
    let meta = std::fs::metadata(path).map_err(failed)?;
    if !meta.is_file() {
        return Err(DataError::NotAFile { path: path.to_owned() });
    }
    Ok((File::open(path).map_err(failed)?, meta.len()))
}

const BOM: &[u8] = b"\xef\xbb\xbf";

/// A text file in chunks of whole characters.
#[derive(Debug)]
pub(super) struct TextChunks {
    path: PathBuf,
    file: File,
    chunk_bytes: usize,
    offset: u64,      // offset of the first byte of `pending`
    pending: Vec<u8>, // prefix of an incomplete character
    at_end: bool,
    any_text: bool,
}

impl TextChunks {
    pub(super) fn open(path: &Path, chunk_bytes: usize) -> Result<Self, DataError> {
        let (file, _) = open(path)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            chunk_bytes,
            offset: 0,
            pending: Vec::new(),
            at_end: false,
            any_text: false,
        })
    }

    /// Appends the next chunk to `text`; returns `false` at the end of the file.
    pub(super) fn read_into(&mut self, text: &mut String) -> Result<bool, DataError> {
        if self.at_end {
            return Ok(false);
        }
        let mut bytes = std::mem::take(&mut self.pending);
        let want = self.chunk_bytes as u64;
        let n = (&mut self.file)
            .take(want)
            .read_to_end(&mut bytes)
            .map_err(|source| DataError::Read { path: self.path.clone(), source })?;
        self.at_end = n == 0;
        if self.offset == 0 && bytes.starts_with(BOM) {
            bytes.drain(..BOM.len());
            self.offset = BOM.len() as u64;
        }
        let whole = match std::str::from_utf8(&bytes) {
            Ok(whole) => whole,
            // A character may be completed by the next chunk, unless there is none.
            Err(error) if error.error_len().is_none() && !self.at_end => {
                std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(self.binary(&bytes, error.valid_up_to())),
        };
        if let Some(at) = whole.bytes().position(|byte| byte == 0) {
            return Err(self.binary(&bytes, at));
        }
        self.any_text |= !whole.trim().is_empty();
        text.push_str(whole);
        let used = whole.len();
        self.offset += used as u64;
        self.pending = bytes.split_off(used); // at most an incomplete character
        if self.at_end && !self.any_text {
            return Err(DataError::Empty { path: self.path.clone(), bytes: self.offset });
        }
        Ok(!self.at_end)
    }

    fn binary(&self, bytes: &[u8], at: usize) -> DataError {
        DataError::Binary { path: self.path.clone(), byte: bytes[at], offset: self.offset + at as u64 }
    }

    /// Number of bytes read so far.
    pub(super) fn n_bytes(&self) -> u64 {
        self.offset
    }
}

/// A line and its number, counted from 1.
pub(super) struct NumberedLine {
    pub(super) number: u64,
    pub(super) text: String,
}

/// The non-blank lines of a JSONL file.
#[derive(Debug)]
pub(super) struct JsonlLines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
    n_bytes: u64,
    any_line: bool,
}

impl JsonlLines {
    /// Larger than any sample; a file without newlines must not be read as one line.
    pub(super) const MAX_BYTES: u64 = 64 << 20;

    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let (file, _) = open(path)?;
        let mut reader = BufReader::with_capacity(1 << 18, file);
        let start = reader.fill_buf().map_err(|source| DataError::Read { path: path.to_owned(), source })?;
        let start = start.strip_prefix(BOM).unwrap_or(start);
        if start.trim_ascii_start().starts_with(b"[") {
            return Err(DataError::JsonArray { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), reader, number: 0, n_bytes: 0, any_line: false })
    }

    /// Returns the next line; `None` at the end.
    pub(super) fn next_line(&mut self) -> Result<Option<NumberedLine>, DataError> {
        loop {
            let mut bytes = Vec::new();
            let n = (&mut self.reader)
                .take(Self::MAX_BYTES + 1)
                .read_until(b'\n', &mut bytes)
                .map_err(|source| DataError::Read { path: self.path.clone(), source })?;
            if n == 0 && !self.any_line {
                return Err(DataError::Empty { path: self.path.clone(), bytes: self.n_bytes });
            }
            if n == 0 {
                return Ok(None);
            }
            self.number += 1;
            if n as u64 > Self::MAX_BYTES {
                let (path, line) = (self.path.clone(), self.number);
                return Err(DataError::LongLine { path, line, limit: Self::MAX_BYTES });
            }
            if self.n_bytes == 0 && bytes.starts_with(BOM) {
                bytes.drain(..BOM.len());
            }
            let start = self.n_bytes;
            self.n_bytes += n as u64;
            let text = String::from_utf8(bytes).map_err(|error| {
                let at = error.utf8_error().valid_up_to();
                let (path, byte) = (self.path.clone(), error.as_bytes()[at]);
                DataError::Binary { path, byte, offset: start + at as u64 }
            })?;
            let text = text.trim();
            if !text.is_empty() {
                self.any_line = true;
                return Ok(Some(NumberedLine { number: self.number, text: text.to_owned() }));
            }
        }
    }

    /// Number of bytes read so far.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    fn text(content: &[u8], chunk_bytes: usize) -> Result<String, DataError> {
        let file = file(content);
        let mut chunks = TextChunks::open(file.path(), chunk_bytes)?;
        let mut text = String::new();
        while chunks.read_into(&mut text)? {}
        assert_eq!(chunks.n_bytes(), content.len() as u64);
        Ok(text)
    }

    #[test]
    fn chunks_join_to_the_text_wherever_characters_are_split() {
        let content = "a ä € 🦀 end\r\n".repeat(7);
        for chunk_bytes in 1..40 {
            assert_eq!(text(content.as_bytes(), chunk_bytes).unwrap(), content, "{chunk_bytes}");
        }
        assert_eq!(text(b"\xef\xbb\xbfabc", 64).unwrap(), "abc");
    }

    #[test]
    fn an_invalid_byte_is_reported_with_its_offset() {
        for (content, bad, at) in [
            (&b"abc\0def"[..], 0u8, 3u64),
            (b"0123456789\xffx", 0xff, 10),
            (b"cut off \xf0\x9f\xa6", 0xf0, 8),
            (b"PK\x03\x04\0\0", 0, 4),
        ] {
            for chunk_bytes in [1, 3, 64] {
                let error = text(content, chunk_bytes).unwrap_err();
                let DataError::Binary { byte, offset, .. } = error else { panic!("{error}") };
                assert_eq!((byte, offset), (bad, at));
            }
        }
    }

    #[test]
    fn a_file_of_whitespace_is_empty() {
        for content in [&b""[..], b" \n\t\n "] {
            assert!(matches!(text(content, 2), Err(DataError::Empty { .. })));
            let file = file(content);
            let lines = JsonlLines::open(file.path()).and_then(|mut lines| lines.next_line());
            assert!(matches!(lines, Err(DataError::Empty { .. })));
        }
    }

    #[test]
    fn lines_are_numbered_as_in_an_editor() {
        let file = file(b"\xef\xbb\xbf{}\n\n  \r\n{\"a\":1}\r\n{}");
        let mut lines = JsonlLines::open(file.path()).unwrap();
        let mut found = Vec::new();
        while let Some(line) = lines.next_line().unwrap() {
            found.push((line.number, line.text.trim().to_owned()));
        }
        assert_eq!(found, [(1, "{}".to_owned()), (4, "{\"a\":1}".to_owned()), (5, "{}".to_owned())]);
    }

    #[test]
    fn non_files_and_json_arrays_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(TextChunks::open(folder.path(), 9), Err(DataError::NotAFile { .. })));
        let missing = folder.path().join("missing.txt");
        assert!(matches!(TextChunks::open(&missing, 9), Err(DataError::Read { .. })));
        assert!(matches!(JsonlLines::open(file(b" \n [{}]").path()), Err(DataError::JsonArray { .. })));
    }
}
