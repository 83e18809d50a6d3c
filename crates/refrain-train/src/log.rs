//! The log of a run: one JSON object per line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::storage::{RealStorage, write_atomically};

/// Log record of a step. Non-finite numbers are `null` in the file.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step, counted from 0.
    pub step: u64,
    /// Mean loss over the targets.
    #[serde(with = "nullable")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(with = "nullable")]
    pub grad_norm: f64,
    /// Learning rate.
    #[serde(with = "nullable")]
    pub lr: f64,
    /// Tokens per second.
    #[serde(with = "nullable")]
    pub tok_s: f64,
}

/// Log record of a held-out loss, measured after a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// The step it was measured after, counted from 0.
    pub step: u64,
    /// Mean loss over the targets of the held-out data.
    #[serde(with = "nullable")]
    pub eval_loss: f64,
}

/// A line of the log.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LogLine {
    /// A held-out loss.
    Eval(EvalRecord),
    /// A step.
    Step(StepRecord),
}

impl LogLine {
    fn step(&self) -> u64 {
        match self {
            Self::Eval(record) => record.step,
            Self::Step(record) => record.step,
        }
    }
}

/// JSON has no NaN.
mod nullable {
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() { serializer.serialize_f64(*value) } else { serializer.serialize_none() }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

/// Errors of a log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The log cannot be written.
    #[error("cannot write the log {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The log cannot be read.
    #[error("cannot read the log {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is not a record.
    #[error("{path}, line {line}: {reason}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// The cause.
        reason: String,
    },
}

impl LogError {
    /// An action for the user.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Write { .. } => "check the write permissions and the disk space",
            Self::Read { .. } => "check the path and the read permissions",
            Self::BadLine { .. } => "remove the line, or write to another log",
        };
        Some(text.to_owned())
    }
}

/// Writes a log. A line is in the file when the call returns.
#[derive(Debug)]
pub struct LogWriter {
    path: PathBuf,
    file: File,
    n_bytes: u64, // length of the complete lines
}

impl LogWriter {
    /// Creates a log, replacing an existing one.
    pub fn create(path: &Path) -> Result<Self, LogError> {
        let file = File::create(path).map_err(write_error(path))?;
        Ok(Self { path: path.to_owned(), file, n_bytes: 0 })
    }

    /// Continues a log after `n_steps` steps. Lines of later steps and an incomplete last line are removed.
    pub fn resume(path: &Path, n_steps: u64) -> Result<Self, LogError> {
        if path.exists() {
            // Lines are kept verbatim, since they may have unknown keys.
            let kept =
                LogLines::open(path)?.filter(|line| !matches!(line, Ok((line, _)) if line.step() >= n_steps));
            let text = kept.map(|line| Ok(line?.1)).collect::<Result<String, LogError>>()?;
            write_atomically(&RealStorage, path, text.as_bytes()).map_err(write_error(path))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(write_error(path))?;
        let n_bytes = file.metadata().map_err(write_error(path))?.len();
        Ok(Self { path: path.to_owned(), file, n_bytes })
    }

    /// Appends a line, or nothing on failure.
    pub fn write(&mut self, line: &LogLine) -> Result<(), LogError> {
        let text = text_of(line);
        self.file.write_all(text.as_bytes()).map_err(|source| {
            // An incomplete line would corrupt the next one.
            let _ = self.file.set_len(self.n_bytes);
            LogError::Write { path: self.path.clone(), source }
        })?;
        self.n_bytes += text.len() as u64;
        Ok(())
    }
}

fn text_of(line: &LogLine) -> String {
    // A record consists of numbers with fixed names, so it always serialises.
    format!("{}\n", serde_json::to_string(line).unwrap_or_default())
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> LogError + '_ {
    |source| LogError::Write { path: path.to_owned(), source }
}

/// Reads a log. An incomplete last line is ignored: its writer was interrupted.
pub fn read(path: &Path) -> Result<Vec<LogLine>, LogError> {
    LogLines::open(path)?.map(|line| Ok(line?.0)).collect()
}

/// The complete lines of a log, parsed and verbatim.
struct LogLines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
}

impl LogLines {
    /// Longer than any record.
    const MAX_BYTES: u64 = 1 << 16;

    fn open(path: &Path) -> Result<Self, LogError> {
        let file = File::open(path).map_err(|source| LogError::Read { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), reader: BufReader::new(file), number: 0 })
    }

    fn parse(&self, bytes: Vec<u8>) -> Result<(LogLine, String), LogError> {
        let bad = |reason: String| LogError::BadLine { path: self.path.clone(), line: self.number, reason };
        if bytes.len() as u64 == Self::MAX_BYTES {
            return Err(bad(format!("the line is longer than {} bytes", Self::MAX_BYTES)));
        }
        let text = String::from_utf8(bytes).map_err(|_| bad("not valid UTF-8".to_owned()))?;
        let unknown =
            "neither a step (step, loss, grad_norm, lr, tok_s) nor a held-out loss (step, eval_loss)";
        let line = serde_json::from_str(&text).map_err(|_| bad(unknown.to_owned()))?;
        Ok((line, text))
    }
}

impl Iterator for LogLines {
    type Item = Result<(LogLine, String), LogError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut bytes = Vec::new();
        self.number += 1;
        match (&mut self.reader).take(Self::MAX_BYTES).read_until(b'\n', &mut bytes) {
            Err(source) => Some(Err(LogError::Read { path: self.path.clone(), source })),
            Ok(n) if n as u64 != Self::MAX_BYTES && bytes.last() != Some(&b'\n') => None,
            Ok(_) => Some(self.parse(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> LogLine {
        LogLine::Step(StepRecord { step, loss, grad_norm: 1.5, lr: 3e-4, tok_s: 1000.0 })
    }

    fn eval(step: u64, eval_loss: f64) -> LogLine {
        LogLine::Eval(EvalRecord { step, eval_loss })
    }

    #[test]
    fn records_round_trip_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let lines: Vec<LogLine> = (0..100)
            .flat_map(|i| [step(i, 1.0 / (i as f64 + 3.0)), eval(i, (i as f64).sqrt() * 0.1)])
            .collect();
        let mut log = LogWriter::create(&path).unwrap();
        lines.iter().for_each(|line| log.write(line).unwrap());
        assert_eq!(read(&path).unwrap(), lines);
    }

    #[test]
    fn a_line_has_the_documented_keys() {
        let line = text_of(&step(7, 2.5));
        assert_eq!(line, "{\"step\":7,\"loss\":2.5,\"grad_norm\":1.5,\"lr\":0.0003,\"tok_s\":1000.0}\n");
        assert_eq!(text_of(&eval(7, 2.5)), "{\"step\":7,\"eval_loss\":2.5}\n");
    }

    #[test]
    fn a_nan_loss_is_null() {
        let line = text_of(&step(1, f64::NAN));
        assert!(line.contains("\"loss\":null"), "{line}");
        let Ok(LogLine::Step(back)) = serde_json::from_str(&line) else { panic!() };
        assert!(back.loss.is_nan());
    }

    #[test]
    fn resuming_truncates_the_log_to_the_completed_steps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = LogWriter::create(&path).unwrap();
        (0..10).for_each(|i| log.write(&step(i, i as f64)).unwrap());
        log.write(&eval(5, 1.0)).unwrap();
        log.write(&eval(6, 1.0)).unwrap();
        drop(log);
        // The run was interrupted while writing a line.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        let extra = "{\"step\":5,\"eval_loss\":2.0,\"note\":\"kept\"}\n";
        file.write_all(extra.as_bytes()).unwrap();
        file.write_all(b"{\"step\":10,\"lo").unwrap();
        let mut log = LogWriter::resume(&path, 6).unwrap();
        log.write(&step(6, 0.5)).unwrap();
        let mut expected: Vec<LogLine> = (0..6).map(|i| step(i, i as f64)).collect();
        expected.extend([eval(5, 1.0), eval(5, 2.0), step(6, 0.5)]);
        assert!(std::fs::read_to_string(&path).unwrap().contains(extra), "unknown keys are kept");
        assert_eq!(read(&path).unwrap(), expected);
        let fresh = folder.path().join("new.jsonl");
        LogWriter::resume(&fresh, 3).unwrap();
        assert_eq!(read(&fresh).unwrap(), []);
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        std::fs::write(&path, "{\"step\":0,\"eval_loss\":1}\n{\"a\":1}\n").unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.to_string().contains("line 2: neither a step"), "{error}");
        std::fs::write(&path, "x".repeat(1 << 17)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1: the line is longer than 65536 bytes"));
        assert!(matches!(read(folder.path()), Err(LogError::Read { .. })));
    }
}
