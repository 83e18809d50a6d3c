//! The log of a run: one JSON object a line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::storage::{RealStorage, write_atomically};

/// A step. Numbers that are not finite are `null` in the file.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step, counted from 0.
    pub step: u64,
    /// Mean loss over its targets.
    #[serde(with = "nullable")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(with = "nullable")]
    pub grad_norm: f64,
    /// Learning rate.
    #[serde(with = "nullable")]
    pub lr: f64,
    /// Tokens a second.
    #[serde(with = "nullable")]
    pub tok_s: f64,
}

/// A held-out loss, measured after a step.
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

/// What can go wrong with a log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// It cannot be written.
    #[error("cannot write the log {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be read.
    #[error("cannot read the log {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is no record.
    #[error("{path}, line {line}: {reason}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// What the parser says.
        reason: String,
    },
}

impl LogError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Write { .. } => "check that you may write there, and that the disk has room",
            Self::Read { .. } => "check the path, and that you may read the file",
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
}

impl LogWriter {
    /// Starts a log; what is there goes.
    pub fn create(path: &Path) -> Result<Self, LogError> {
        let file = File::create(path).map_err(write_error(path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Continues a log after `n_steps` steps. Lines of later steps, and a last line that is not whole, are cut off.
    pub fn resume(path: &Path, n_steps: u64) -> Result<Self, LogError> {
        if path.exists() {
            let lines = read(path)?;
            let kept = lines.iter().filter(|line| line.step() < n_steps);
            let text: String = kept.map(text_of).collect();
            write_atomically(&RealStorage, path, text.as_bytes()).map_err(write_error(path))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(write_error(path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends a line.
    pub fn write(&mut self, line: &LogLine) -> Result<(), LogError> {
        self.file.write_all(text_of(line).as_bytes()).map_err(write_error(&self.path))
    }
}

fn text_of(line: &LogLine) -> String {
    // A record is numbers under fixed names: it always has a text.
    format!("{}\n", serde_json::to_string(line).unwrap_or_default())
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> LogError + '_ {
    |source| LogError::Write { path: path.to_owned(), source }
}

/// Reads a log. A last line without its end is left out: its writer was interrupted.
pub fn read(path: &Path) -> Result<Vec<LogLine>, LogError> {
    /// Longer than any record.
    const MAX_LINE_BYTES: u64 = 1 << 16;
    let failed = |source| LogError::Read { path: path.to_owned(), source };
    let mut reader = BufReader::new(File::open(path).map_err(failed)?);
    let (mut lines, mut number) = (Vec::new(), 0);
    loop {
        let mut bytes = Vec::new();
        (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes).map_err(failed)?;
        number += 1;
        if bytes.len() as u64 == MAX_LINE_BYTES {
            let reason = format!("longer than {MAX_LINE_BYTES} bytes");
            return Err(LogError::BadLine { path: path.to_owned(), line: number, reason });
        }
        if bytes.last() != Some(&b'\n') {
            return Ok(lines);
        }
        let line = serde_json::from_slice(&bytes).map_err(|_| LogError::BadLine {
            path: path.to_owned(),
            line: number,
            reason: "neither a step (step, loss, grad_norm, lr, tok_s) nor a held-out loss (step, eval_loss)"
                .to_owned(),
        })?;
        lines.push(line);
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
    fn what_is_written_is_read_back_bit_for_bit() {
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
    fn a_line_has_the_keys_that_others_read() {
        let line = text_of(&step(7, 2.5));
        assert_eq!(line, "{\"step\":7,\"loss\":2.5,\"grad_norm\":1.5,\"lr\":0.0003,\"tok_s\":1000.0}\n");
        assert_eq!(text_of(&eval(7, 2.5)), "{\"step\":7,\"eval_loss\":2.5}\n");
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_null() {
        let line = text_of(&step(1, f64::NAN));
        assert!(line.contains("\"loss\":null"), "{line}");
        let Ok(LogLine::Step(back)) = serde_json::from_str(&line) else { panic!() };
        assert!(back.loss.is_nan());
    }

    #[test]
    fn resuming_cuts_the_log_to_the_steps_that_are_done() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = LogWriter::create(&path).unwrap();
        (0..10).for_each(|i| log.write(&step(i, i as f64)).unwrap());
        log.write(&eval(5, 1.0)).unwrap();
        log.write(&eval(6, 1.0)).unwrap();
        drop(log);
        // The run was interrupted while it wrote a line.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"step\":10,\"lo").unwrap();
        let mut log = LogWriter::resume(&path, 6).unwrap();
        log.write(&step(6, 0.5)).unwrap();
        let mut expected: Vec<LogLine> = (0..6).map(|i| step(i, i as f64)).collect();
        expected.extend([eval(5, 1.0), step(6, 0.5)]);
        assert_eq!(read(&path).unwrap(), expected);
        let fresh = folder.path().join("new.jsonl");
        LogWriter::resume(&fresh, 3).unwrap();
        assert_eq!(read(&fresh).unwrap(), []);
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        std::fs::write(&path, "{\"step\":0,\"eval_loss\":1}\n{\"a\":1}\n").unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.to_string().contains("line 2: neither a step"), "{error}");
        std::fs::write(&path, "x".repeat(1 << 17)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1: longer than 65536 bytes"));
        assert!(matches!(read(folder.path()), Err(LogError::Read { .. })));
    }
}
