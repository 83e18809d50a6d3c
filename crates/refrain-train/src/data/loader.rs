//! Batches in order, prepared ahead by a dedicated thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use serde::{Deserialize, Serialize};

use super::batch::Batch;
use super::corpus::Corpus;
use super::error::DataError;
use super::pack::{DocumentSlice, PackedRow, PackedWindow, Packer};
use crate::config::Order;

/// Position of a run in its data. A loader that starts here continues exactly like the one that was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// Completed passes over the data.
    pub epoch: u64,
    /// First slice of the current window; 0 with [`Order::File`].
    pub window: u64,
    /// Rows of the window that were read; with [`Order::File`], samples of the epoch.
    pub row: u64,
    /// Hash of tokens, documents, context, order and seed.
    pub fingerprint: String,
}

/// How often the data is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// Epoch after epoch, for training.
    Endless,
    /// Once, in file order, for held-out loss; the last batch may be padded.
    Once,
}

/// Options of a loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Rows of `context` tokens per batch.
    pub n_seqs: usize,
    /// Seed of the shuffle.
    pub seed: u64,
    /// How often the data is read.
    pub passes: Passes,
    /// Number of batches to prepare ahead.
    pub n_ahead: usize,
}

/// Iterator over batches.
#[derive(Debug)]
pub struct Batches {
    corpus: Arc<Corpus>,
    rows: RowSource,
    n_seqs: usize,
    fingerprint: String,
}

/// Source of rows.
#[derive(Debug)]
enum RowSource {
    /// Sample i is tokens i·T to i·T + T.
    File {
        n_samples: u64,
        epoch: u64,
        next: u64,
        passes: Passes,
    },
    Packed {
        packer: Packer,
        epoch: u64,
        start: u64,
        next: usize,
        window: PackedWindow,
        passes: Passes,
    },
}

impl Batches {
    /// Starts at the beginning, or at the position of an earlier run.
    pub fn new(
        corpus: Arc<Corpus>,
        options: LoaderOptions,
        from: Option<&DataPosition>,
    ) -> Result<Self, DataError> {
        let fingerprint = format!("{}-{}", corpus.fingerprint(), options.seed);
        let fresh = DataPosition { epoch: 0, window: 0, row: 0, fingerprint: fingerprint.clone() };
        let from = from.unwrap_or(&fresh);
        if from.fingerprint != fingerprint {
            return Err(DataError::OtherData { found: from.fingerprint.clone(), expected: fingerprint });
        }
        let context = corpus.options().context;
        let rows = match corpus.options().order {
            Order::File => {
                let n_tokens = corpus.marked().len() as u64;
                let n_samples = n_tokens.saturating_sub(1) / context as u64;
                if n_samples == 0 {
                    return Err(DataError::TooShort { n_tokens, context });
                }
                within(from.row, n_samples)?;
                RowSource::File { n_samples, epoch: from.epoch, next: from.row, passes: options.passes }
            }
            Order::Shuffle => {
                let seed = Some(options.seed).filter(|_| options.passes == Passes::Endless);
                let packer = Packer::new(&corpus, context, seed);
                within(from.window, packer.n_slices())?;
                let window = packer.window(from.epoch, from.window);
                within(from.row, window.rows.len() as u64)?;
                RowSource::Packed {
                    packer,
                    epoch: from.epoch,
                    start: from.window,
                    next: from.row as usize,
                    window,
                    passes: options.passes,
                }
            }
        };
        Ok(Self { corpus, rows, n_seqs: options.n_seqs, fingerprint })
    }

    /// Position of the next batch.
    pub fn position(&self) -> DataPosition {
        let (epoch, window, row) = match &self.rows {
            RowSource::File { epoch, next, .. } => (*epoch, 0, *next),
            RowSource::Packed { epoch, start, next, .. } => (*epoch, *start, *next as u64),
        };
        DataPosition { epoch, window, row, fingerprint: self.fingerprint.clone() }
    }
}

fn within(position: u64, limit: u64) -> Result<(), DataError> {
    if position <= limit { Ok(()) } else { Err(DataError::Position { position, limit }) }
}

impl Iterator for Batches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let context = self.corpus.options().context;
        let mut batch = Batch::padding(self.n_seqs, context);
        for seq_idx in 0..self.n_seqs {
            match self.rows.next(context) {
                Some(row) => batch.set(seq_idx, context, self.corpus.marked(), &row),
                None if seq_idx == 0 => return None,
                None => break,
            }
        }
        Some(batch)
    }
}

impl RowSource {
    fn next(&mut self, context: usize) -> Option<PackedRow> {
        match self {
            Self::File { n_samples, epoch, next, passes } => {
                if *next == *n_samples {
                    if *passes == Passes::Once {
                        return None;
                    }
                    (*epoch, *next) = (epoch.wrapping_add(1), 0);
                }
                let start = *next as usize * context;
                *next += 1;
                Some(vec![DocumentSlice { start, len: context as u32 }])
            }
            Self::Packed { packer, epoch, start, next, window, passes } => {
                while *next == window.rows.len() {
                    (*start, *next) = (window.next, 0);
                    if *start == packer.n_slices() {
                        if *passes == Passes::Once {
                            // Stays at the end of the window, so that further calls also return `None`.
                            *next = window.rows.len();
                            return None;
                        }
                        (*epoch, *start) = (epoch.wrapping_add(1), 0);
                    }
                    *window = packer.window(*epoch, *start);
                }
                *next += 1;
                Some(window.rows[*next - 1].clone())
            }
        }
    }
}

/// A batch, and the position of the next one.
pub type PreparedBatch = (Batch, DataPosition);

/// Returns batches that a thread prepares ahead, so that the next one is ready while a step runs.
#[derive(Debug)]
pub struct Loader {
    prepared: Option<Receiver<Result<PreparedBatch, DataError>>>,
    thread: Option<JoinHandle<()>>,
    position: DataPosition,
}

impl Loader {
    /// Starts the thread.
    pub fn new(
        corpus: Arc<Corpus>,
        options: LoaderOptions,
        from: Option<&DataPosition>,
    ) -> Result<Self, DataError> {
        let mut batches = Batches::new(corpus, options, from)?;
        let position = batches.position();
        let source = std::iter::from_fn(move || batches.next().map(|batch| Ok((batch, batches.position()))));
        Self::start(source, position, options.n_ahead)
    }

    /// Starts the thread with a different, fallible source of batches.
    pub fn start(
        source: impl Iterator<Item = Result<PreparedBatch, DataError>> + Send + 'static,
        position: DataPosition,
        n_ahead: usize,
    ) -> Result<Self, DataError> {
        let (sender, prepared) = sync_channel(n_ahead.max(1));
        let thread = Builder::new().name("refrain-data".to_owned()).spawn(move || send_all(source, &sender));
        let thread =
            thread.map_err(|error| DataError::Thread { what: format!("cannot be started: {error}") })?;
        Ok(Self { prepared: Some(prepared), thread: Some(thread), position })
    }

    /// Position after the last returned batch.
    pub fn position(&self) -> &DataPosition {
        &self.position
    }
}

fn send_all(
    source: impl Iterator<Item = Result<PreparedBatch, DataError>>,
    sender: &SyncSender<Result<PreparedBatch, DataError>>,
) {
    for prepared in source {
        let failed = prepared.is_err();
        // Either the loader was dropped, or the run ends with the error.
        if sender.send(prepared).is_err() || failed {
            return;
        }
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.prepared.as_ref()?.recv() {
            Ok(Ok((batch, position))) => {
                self.position = position;
                Some(Ok(batch))
            }
            Ok(Err(error)) => {
                self.prepared = None;
                Some(Err(error))
            }
            Err(_) => {
                self.prepared = None;
                // The thread has ended: its source is exhausted, or it panicked.
                let ended = self.thread.take()?.join();
                ended.err().map(|_| Err(DataError::Thread { what: "panicked".to_owned() }))
            }
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver, the thread's next send fails and it ends.
        self.prepared = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
