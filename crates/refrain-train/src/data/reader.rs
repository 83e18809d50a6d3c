//! The texts of training files, without their form: what a tokenizer is trained on.

use std::path::PathBuf;

use super::error::DataError;
use super::read::{FileKind, Lines, TextPieces, kind_of};
use super::sample::{Sample, SampleFault};

/// Reads texts and lines of files one after the other. Of files larger than a bound, parts spread over them are taken.
#[derive(Debug)]
pub struct TextReader {
    files: std::vec::IntoIter<PathBuf>,
    open: Option<Open>,
    separators: Vec<String>, // special tokens, which are no text
    /// The share of parts to take, and how many there were.
    share: f64,
    n_parts: u64,
    ready: Vec<String>, // in reverse
}

#[derive(Debug)]
enum Open {
    Text { pieces: TextPieces, rest: String },
    Jsonl { lines: Lines, path: PathBuf },
}

impl TextReader {
    /// Bytes that are read at once.
    const PIECE_BYTES: usize = 256 << 10;

    /// Reads at most about `max_bytes` of the files.
    pub fn new(files: &[PathBuf], max_bytes: u64, separators: Vec<String>) -> Result<Self, DataError> {
        let mut n_bytes = 0u64;
        for path in files {
            let failed = |source| DataError::Read { path: path.clone(), source };
            n_bytes += std::fs::metadata(path).map_err(failed)?.len();
        }
        let share = (max_bytes as f64 / n_bytes.max(1) as f64).min(1.0);
        let files = Vec::from(files);
        Ok(Self { files: files.into_iter(), open: None, separators, share, n_parts: 0, ready: Vec::new() })
    }

    /// Fills `ready` with texts; `false` when all files are read.
    fn read(&mut self) -> Result<bool, DataError> {
        let Some(open) = &mut self.open else {
            let Some(path) = self.files.next() else { return Ok(false) };
            self.open = Some(match kind_of(&path) {
                FileKind::Text => {
                    Open::Text { pieces: TextPieces::open(&path, Self::PIECE_BYTES)?, rest: String::new() }
                }
                FileKind::Jsonl => Open::Jsonl { lines: Lines::open(&path)?, path },
            });
            return Ok(true);
        };
        let texts = match open {
            Open::Text { pieces, rest } => {
                let more = pieces.read_into(rest)?;
                // The last line may go on in the next piece. One without an end is not waited for.
                let end = match rest.rfind('\n') {
                    _ if !more => rest.len(),
                    Some(last) => last + 1,
                    None if rest.len() > 2 * Self::PIECE_BYTES => rest.len(),
                    None => 0,
                };
                let text: String = rest.drain(..end).collect();
                if !more {
                    self.open = None;
                }
                vec![text]
            }
            Open::Jsonl { lines, path } => match lines.next_line()? {
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

/// The parts of a text between special tokens.
fn without(text: &str, separators: &[String]) -> Vec<String> {
    let mut parts = vec![text];
    for separator in separators.iter().filter(|separator| !separator.is_empty()) {
        parts = parts.into_iter().flat_map(|part| part.split(separator.as_str())).collect();
    }
    parts.into_iter().filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn texts_of(line: &str) -> Result<Vec<String>, String> {
    match Sample::parse(line) {
        Ok(Sample::Text(text)) => Ok(vec![text]),
        Ok(Sample::Pair { plain, completion, .. }) => Ok(vec![plain, completion]),
        Ok(Sample::Chat(chat)) => Ok(chat.messages.into_iter().map(|message| message.content).collect()),
        Err(SampleFault::Bad(reason)) => Err(reason),
        Err(SampleFault::Unknown(found)) => Err(format!("no known kind of sample, it has {found:?}")),
        Err(SampleFault::NoAssistant { n_messages }) => {
            Err(format!("the conversation of {n_messages} messages has no assistant part"))
        }
    }
}
