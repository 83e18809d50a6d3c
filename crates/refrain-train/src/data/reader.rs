//! Reads the plain texts of training files, for training a tokenizer.

use std::collections::VecDeque;
use std::path::PathBuf;

use super::error::DataError;
use super::read::{FileKind, JsonlLines, TextChunks, kind_of};
use super::sample::{DataSample, SampleFault};
use refrain_formats::tokenizer::long::floor_boundary;

/// Reads the texts of several files in sequence. If they are larger than the bound, evenly spread parts are
/// sampled.
#[derive(Debug)]
pub struct TextReader {
    files: VecDeque<PathBuf>,
    open: Option<OpenTextFile>,
    separators: Vec<String>, // special tokens, which are not text
    /// Fraction of parts to keep, and number of parts so far.
    share: f64,
    n_parts: u64,
    ready: Vec<String>, // in reverse order
}

#[derive(Debug)]
enum OpenTextFile {
    Text { chunks: TextChunks, rest: String },
    Jsonl { lines: JsonlLines, path: PathBuf },
}

impl TextReader {
    /// Size of a read in bytes.
    const CHUNK_BYTES: usize = 256 << 10;

    /// Reads at most about `max_bytes` of the files.
    pub fn new(files: &[PathBuf], max_bytes: u64, separators: Vec<String>) -> Result<Self, DataError> {
        let mut n_bytes = 0u64;
        for path in files {
            let failed = |source| DataError::Read { path: path.clone(), source };
            n_bytes += std::fs::metadata(path).map_err(failed)?.len();
        }
        let share = (max_bytes as f64 / n_bytes.max(1) as f64).min(1.0);
        let files = files.iter().cloned().collect();
        Ok(Self { files, open: None, separators, share, n_parts: 0, ready: Vec::new() })
    }

    /// Refills `ready`; returns `false` when all files are read.
    fn read(&mut self) -> Result<bool, DataError> {
        let Some(open) = &mut self.open else {
            let Some(path) = self.files.pop_front() else { return Ok(false) };
            self.open = Some(match kind_of(&path) {
                FileKind::Text => OpenTextFile::Text {
                    chunks: TextChunks::open(&path, Self::CHUNK_BYTES)?,
                    rest: String::new(),
                },
                FileKind::Jsonl => OpenTextFile::Jsonl { lines: JsonlLines::open(&path)?, path },
            });
            return Ok(true);
        };
        let texts = match open {
            OpenTextFile::Text { chunks, rest } => {
                let more = chunks.read_into(rest)?;
                // The last line may continue in the next chunk; a line without an end is not waited for.
                let end = match rest.rfind('\n') {
                    _ if !more => rest.len(),
                    Some(last) => last + 1,
                    None if rest.len() > 2 * Self::CHUNK_BYTES => rest.len(),
                    None => 0,
                };
                let text: String = rest.drain(..end).collect();
                if !more {
                    self.open = None;
                }
                vec![text]
            }
            OpenTextFile::Jsonl { lines, path } => match lines.next_line()? {
                Some(line) => texts_of(&line.text).map_err(|reason| DataError::BadLine {
                    path: path.clone(),
                    line: line.number,
                    reason,
                })?,
                None => {
                    self.open = None;
                    Vec::new()
                }
            },
        };
        let before = (self.n_parts as f64 * self.share).floor();
        self.n_parts += 1;
        if (self.n_parts as f64 * self.share).floor() > before {
            self.ready = texts.iter().flat_map(|text| without(text, &self.separators)).rev().collect();
        }
        Ok(true)
    }
}

impl Iterator for TextReader {
    type Item = Result<String, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(text) = self.ready.pop() {
                return Some(Ok(text));
            }
            match self.read() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Splits a text at special tokens.
fn without(text: &str, separators: &[String]) -> Vec<String> {
    let mut parts = vec![text];
    for separator in separators.iter().filter(|separator| !separator.is_empty()) {
        parts = parts.into_iter().flat_map(|part| part.split(separator.as_str())).collect();
    }
    let parts = parts.into_iter().flat_map(in_chunks);
    parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Splits a long text into parts that end at a line or word boundary if possible: a tokenizer uses some
/// hundred times the memory of its input.
fn in_chunks(mut text: &str) -> Vec<&str> {
    let mut chunks = Vec::new();
    while text.len() > 2 * TextReader::CHUNK_BYTES {
        let end = floor_boundary(text, TextReader::CHUNK_BYTES);
        let gap = text[..end].rfind('\n').or_else(|| text[..end].rfind(' ')).filter(|&gap| gap > 0);
        let (chunk, rest) = text.split_at(gap.unwrap_or(end));
        chunks.push(chunk);
        text = rest;
    }
    chunks.push(text);
    chunks
}

fn texts_of(line: &str) -> Result<Vec<String>, String> {
    match DataSample::parse(line) {
        Ok(DataSample::Text(text)) => Ok(vec![text]),
        Ok(DataSample::Pair { plain, completion, .. }) => Ok(vec![plain, completion]),
        Ok(DataSample::Chat(chat)) => Ok(chat.messages.into_iter().map(|message| message.content).collect()),
        Err(SampleFault::Bad(reason)) => Err(reason),
        Err(SampleFault::Unknown(found)) => Err(format!("unknown kind of sample with {found:?}")),
        Err(SampleFault::NoAssistant { n_messages }) => {
            Err(format!("the conversation has no assistant message, {n_messages} in total"))
        }
    }
}
