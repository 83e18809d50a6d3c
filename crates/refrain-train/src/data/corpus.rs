//! All training tokens in memory, at four bytes each, document after document.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};

use super::encode::{EncodeFault, Encoded, Encoder, LEARN};
use super::error::DataError;
use super::read::{FileKind, JsonlLines, NumberedLine, TextChunks, kind_of};
use super::sample::{ChatSample, DataSample, SampleFault};
use crate::config::{OnLong, Order};
use refrain_formats::chat::Message;
use refrain_formats::tokenizer::long::{ChunkEnd, CutSizes, Cutter, TextChunk, encode_all, in_parallel};

/// How files are split into documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CorpusOptions {
    /// Tokens per row.
    pub context: usize,
    /// With [`Order::File`], a text file is tokenized unchanged; with [`Order::Shuffle`], documents start and
    /// end with the model's BOS and EOS tokens.
    pub order: Order,
    /// What happens to conversations longer than a row.
    pub on_long: OnLong,
    /// Number of tokenizer threads.
    pub n_threads: usize,
}

/// Statistics of reading the files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataReport {
    /// Files read.
    pub n_files: usize,
    /// Bytes read.
    pub n_bytes: u64,
    /// Documents: texts, conversations, pairs.
    pub n_documents: u64,
    /// Tokens.
    pub n_tokens: u64,
    /// Tokens that are targets.
    pub n_targets: u64,
    /// Conversations truncated at the context.
    pub n_truncated: u64,
    /// Conversations dropped because they are longer than the context.
    pub n_too_long: u64,
    /// Samples dropped because they have no target, or none within the context.
    pub n_without_target: u64,
    /// Conversations dropped because the chat template cannot render them.
    pub n_refused: u64,
    /// The first of those: file, line and reason.
    pub first_refused: Option<String>,
    /// Conversations split into one sample per turn, because the template rewrites earlier turns.
    pub n_split_by_turn: u64,
    /// Positions where a long text without a boundary was split, so that its tokens may differ from those of
    /// the whole text.
    pub n_forced_cuts: u64,
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = |n: u64| if n == 1 { "" } else { "s" };
        let (n_tokens, n_documents, n_files) = (self.n_tokens, self.n_documents, self.n_files as u64);
        write!(f, "{n_tokens} token{} in {n_documents} document{}", s(n_tokens), s(n_documents))?;
        write!(f, " of {n_files} file{}, {} trained on", s(n_files), self.n_targets)?;
        let notes = [
            (self.n_truncated, "truncated at the context"),
            (self.n_too_long, "dropped: longer than the context"),
            (self.n_without_target, "dropped: no target within the context"),
            (self.n_refused, "dropped: the chat template cannot render them"),
            (self.n_split_by_turn, "split by turn: the chat template rewrites earlier turns"),
            (self.n_forced_cuts, "splits inside long words"),
        ];
        for (n, what) in notes.into_iter().filter(|(n, _)| *n > 0) {
            write!(f, "\n{n} {what}")?;
        }
        match &self.first_refused {
            Some(first) => write!(f, "\nthe first one is {first}"),
            None => Ok(()),
        }
    }
}

/// End of a document, and whether it may be split into several rows. Texts may be split; a completion stays
/// with its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DocumentEnd(u64);

impl DocumentEnd {
    const WHOLE: u64 = 1 << 63;

    fn new(end: usize, may_cut: bool) -> Self {
        Self(end as u64 | if may_cut { 0 } else { Self::WHOLE })
    }

    fn end(self) -> usize {
        (self.0 & !Self::WHOLE) as usize
    }

    fn may_cut(self) -> bool {
        self.0 & Self::WHOLE == 0
    }
}

/// The tokens of all files.
pub struct Corpus {
    tokens: Vec<u32>, // targets are marked
    ends: Vec<DocumentEnd>,
    options: CorpusOptions,
    report: DataReport,
    fingerprint: OnceLock<String>,
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let corpus = &mut f.debug_struct("Corpus");
        corpus.field("options", &self.options).field("report", &self.report).finish_non_exhaustive()
    }
}

impl Corpus {
    /// Reads and tokenizes files. `progress` receives the bytes done and the total.
    pub fn read(
        files: &[PathBuf],
        encoder: &Encoder,
        options: CorpusOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DataError> {
        let size = |file: &PathBuf| std::fs::metadata(file).map_or(0, |meta| meta.len());
        let n_bytes = files.iter().map(size).sum();
        let corpus = Self::new(Vec::new(), Vec::new(), options);
        let mut reader = CorpusReader { corpus, encoder, sizes: CutSizes::default(), n_bytes, progress };
        for file in files {
            match kind_of(file) {
                FileKind::Text => reader.text(file)?,
                FileKind::Jsonl => reader.jsonl(file)?,
            }
            reader.corpus.report.n_files += 1;
        }
        let mut corpus = reader.corpus;
        corpus.tokens.shrink_to_fit();
        corpus.count();
        if corpus.report.n_targets == 0 {
            return Err(DataError::NothingLeft { dropped: corpus.report.to_string() });
        }
        Ok(corpus)
    }

    fn new(tokens: Vec<u32>, ends: Vec<DocumentEnd>, options: CorpusOptions) -> Self {
        Self { tokens, ends, options, report: DataReport::default(), fingerprint: OnceLock::new() }
    }

    /// Statistics of reading the files.
    pub fn report(&self) -> &DataReport {
        &self.report
    }

    /// How the files were split into documents.
    pub fn options(&self) -> CorpusOptions {
        self.options
    }

    /// All tokens in order, without marks.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = u32> {
        self.tokens.iter().map(|token| token & !LEARN)
    }

    /// Holds out about `share` of the tokens from the end: whole documents if that is close enough, otherwise
    /// part of the document at that point.
    pub fn hold_out(mut self, share: f64) -> Result<(Self, Self), DataError> {
        let n_tokens = self.tokens.len();
        let error = DataError::HeldOut { share, n_tokens: n_tokens as u64 };
        let held = n_tokens as f64 * share;
        let at = n_tokens - (held as usize).min(n_tokens);
        let starts = || self.ends.iter().map(|end| end.end());
        let after = starts().find(|&end| end >= at).unwrap_or(n_tokens);
        let before = starts().rev().find(|&end| end <= at).unwrap_or(0);
        let is_near = |boundary: &usize| {
            (boundary.abs_diff(at) as f64) <= held / 2.0 && (1..n_tokens).contains(boundary)
        };
        let mut boundaries = [before, after].into_iter().filter(is_near);
        let nearest = boundaries.by_ref().min_by_key(|boundary| boundary.abs_diff(at));
        let inside = self.ends.iter().find(|end| end.end() > at).filter(|end| end.may_cut()).map(|_| at);
        let Some(cut) = nearest.or(inside) else { return Err(error) };
        let held_ends = self.ends.iter().filter(|end| end.end() > cut);
        let held_ends: Vec<_> =
            held_ends.map(|end| DocumentEnd::new(end.end() - cut, end.may_cut())).collect();
        let last_may_cut = self.ends.iter().find(|end| end.end() >= cut).is_none_or(|end| end.may_cut());
        self.ends.retain(|end| end.end() < cut);
        self.ends.push(DocumentEnd::new(cut, last_may_cut));
        let tokens = self.tokens.split_off(cut);
        self.fingerprint = OnceLock::new();
        let mut held = Self::new(tokens, held_ends, self.options);
        self.count();
        held.count();
        if self.report.n_targets == 0 || held.report.n_targets == 0 {
            return Err(error);
        }
        Ok((self, held))
    }

    /// Short hash of the tokens and documents.
    pub fn fingerprint(&self) -> &str {
        self.fingerprint.get_or_init(|| {
            let mut hasher = Sha256::new();
            let mut bytes = Vec::with_capacity(1 << 16);
            for tokens in self.tokens.chunks(1 << 14) {
                bytes.clear();
                bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                hasher.update(&bytes);
            }
            self.ends.iter().for_each(|end| hasher.update(end.0.to_le_bytes()));
            hasher.update(format!("context {} order {}", self.options.context, self.options.order));
            hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
        })
    }

    /// All tokens with marks.
    pub(super) fn marked(&self) -> &[u32] {
        &self.tokens
    }

    /// Start and end of every document.
    pub(super) fn documents(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|end| end.end()));
        starts.zip(self.ends.iter().map(|end| end.end())).map(|(start, end)| start..end)
    }

    fn count(&mut self) {
        self.report.n_documents = self.ends.len() as u64;
        self.report.n_tokens = self.tokens.len() as u64;
        let n_marked = |targets: std::ops::Range<usize>| {
            let targets = self.tokens.get(targets).unwrap_or_default();
            targets.iter().filter(|&&token| token & LEARN != 0).count() as u64
        };
        // The first token of a row is never a target.
        self.report.n_targets = match self.options.order {
            Order::File => n_marked(1..self.tokens.len()),
            Order::Shuffle => self.documents().map(|d| n_marked(d.start + 1..d.end)).sum(),
        };
    }

    fn end_document(&mut self, may_cut: bool) {
        let start = self.ends.last().map_or(0, |end| end.end());
        if self.tokens.len() > start {
            self.ends.push(DocumentEnd::new(self.tokens.len(), may_cut));
        }
    }

    /// Adds a sample that is not split.
    fn add_whole(&mut self, mut tokens: Vec<u32>) {
        let limit = self.options.context.saturating_add(1);
        let is_long = tokens.len() > limit;
        if is_long && self.options.on_long == OnLong::Drop {
            self.report.n_too_long += 1;
            return;
        }
        tokens.truncate(limit);
        // Tokens after the last target have no effect on training.
        let end = tokens.iter().rposition(|token| token & LEARN != 0).map_or(0, |last| last + 1);
        tokens.truncate(end);
        if tokens.len() < 2 {
            self.report.n_without_target += 1;
            return;
        }
        self.report.n_truncated += u64::from(is_long);
        self.tokens.extend(tokens);
        self.end_document(false);
    }
}

struct CorpusReader<'a> {
    corpus: Corpus,
    encoder: &'a Encoder,
    sizes: CutSizes,
    n_bytes: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl CorpusReader<'_> {
    fn text(&mut self, path: &Path) -> Result<(), DataError> {
        let (encoder, start_bytes) = (self.encoder, self.corpus.report.n_bytes);
        let refused = |source| DataError::Tokenize { path: path.to_owned(), source };
        let separator = encoder.tokenizer().special_texts().eos;
        let trim = self.corpus.options.order == Order::Shuffle;
        let mut cutter = Cutter::new(encoder.tokenizer(), self.sizes, separator, trim);
        let mut file = TextChunks::open(path, self.sizes.chunk)?;
        let (mut chunks, mut at_start) = (Vec::new(), true);
        loop {
            let more = file.read_into(cutter.buffer())?;
            cutter.chunks(!more, &mut chunks).map_err(refused)?;
            // Batches large enough to keep all threads busy, and no larger, to bound memory.
            let enough = self.corpus.options.n_threads.max(1) * 2 * self.sizes.chunk;
            if !more || chunks.iter().map(TextChunk::n_bytes).sum::<usize>() >= enough {
                self.add_chunks(path, &chunks, &mut at_start)?;
                chunks.clear();
                self.report_progress(start_bytes + file.n_bytes());
            }
            if !more {
                return Ok(());
            }
        }
    }

    fn add_chunks(
        &mut self,
        path: &Path,
        chunks: &[TextChunk],
        at_start: &mut bool,
    ) -> Result<(), DataError> {
        let (encoder, n_threads) = (self.encoder, self.corpus.options.n_threads);
        let refused = |source| DataError::Tokenize { path: path.to_owned(), source };
        let encoded = encode_all(encoder.tokenizer(), chunks, false, n_threads).map_err(refused)?;
        let corpus = &mut self.corpus;
        let is_plain = corpus.options.order == Order::File;
        for (chunk, tokens) in chunks.iter().zip(encoded) {
            if *at_start && !is_plain {
                corpus.tokens.extend(encoder.bos());
            }
            corpus.tokens.extend(tokens.ids.into_iter().map(|id| id | LEARN));
            corpus.report.n_forced_cuts += u64::from(tokens.is_forced);
            *at_start = chunk.end != ChunkEnd::Open;
            let ends = match chunk.end {
                ChunkEnd::Open => continue,
                ChunkEnd::Separator => true,
                ChunkEnd::Text => !is_plain,
            };
            corpus.tokens.extend(encoder.eos().filter(|_| ends).map(|id| id | LEARN));
            corpus.end_document(true);
        }
        Ok(())
    }

    fn jsonl(&mut self, path: &Path) -> Result<(), DataError> {
        /// Bytes of lines that are tokenized together.
        const TOGETHER_BYTES: usize = 4 << 20;
        let start_bytes = self.corpus.report.n_bytes;
        let mut file = JsonlLines::open(path)?;
        loop {
            let (mut lines, mut n_bytes) = (Vec::new(), 0);
            while n_bytes < TOGETHER_BYTES
                && let Some(line) = file.next_line()?
            {
                n_bytes += line.text.len();
                lines.push(line);
            }
            if lines.is_empty() {
                return Ok(());
            }
            let encoder = self.encoder;
            let encoded =
                in_parallel(&lines, self.corpus.options.n_threads, |line| encode_line(encoder, path, line));
            for (line, encoded) in lines.iter().zip(encoded) {
                self.add_line(path, line.number, encoded?);
            }
            self.report_progress(start_bytes + file.n_bytes());
        }
    }

    /// Reports progress, and reserves capacity for the remaining tokens, extrapolated from the part so far,
    /// to avoid reallocations.
    fn report_progress(&mut self, done: u64) {
        let corpus = &mut self.corpus;
        corpus.report.n_bytes = done;
        let expected = corpus.tokens.len() as f64 * (self.n_bytes as f64 / done.max(1) as f64) * 1.02;
        if corpus.tokens.capacity() == 0 || corpus.tokens.len() * 2 > corpus.tokens.capacity() {
            // At most one token per remaining byte.
            let left = (expected as u64).saturating_sub(corpus.tokens.len() as u64);
            let left = left.min(self.n_bytes.saturating_sub(done));
            corpus.tokens.reserve_exact(usize::try_from(left).unwrap_or(0));
        }
        (self.progress)(done, self.n_bytes);
    }

    fn add_line(&mut self, path: &Path, line: u64, encoded: EncodedLine) {
        let corpus = &mut self.corpus;
        match encoded {
            EncodedLine::Text { tokens, n_forced_cuts } => {
                corpus.report.n_forced_cuts += n_forced_cuts;
                corpus.tokens.extend(tokens);
                corpus.end_document(true);
            }
            EncodedLine::Samples(Encoded::Whole(tokens)) => corpus.add_whole(tokens),
            EncodedLine::Samples(Encoded::Turns(turns)) => {
                corpus.report.n_split_by_turn += 1;
                turns.into_iter().for_each(|tokens| corpus.add_whole(tokens));
            }
            EncodedLine::Refused(reason) => {
                corpus.report.n_refused += 1;
                let first = || format!("{}, line {line}: {reason}", path.display());
                corpus.report.first_refused.get_or_insert_with(first);
            }
        }
    }
}

/// A conversation is tokenized as a whole, several times; one of this size exceeds any context.
const MAX_CHAT_BYTES: usize = 8 << 20;

enum EncodedLine {
    Text { tokens: Vec<u32>, n_forced_cuts: u64 },
    Samples(Encoded),
    Refused(String),
}

fn encode_line(encoder: &Encoder, path: &Path, line: &NumberedLine) -> Result<EncodedLine, DataError> {
    let (path, number) = (|| path.to_owned(), line.number);
    let refused = |source| DataError::Tokenize { path: path(), source };
    let sample = DataSample::parse(&line.text).map_err(|fault| match fault {
        SampleFault::Bad(reason) => DataError::BadLine { path: path(), line: number, reason },
        SampleFault::Unknown(found) => DataError::UnknownSample { path: path(), line: number, found },
        SampleFault::NoAssistant { n_messages } => {
            DataError::NoAssistant { path: path(), line: number, n_messages }
        }
    })?;
    let conversation = match sample {
        DataSample::Text(text) => {
            let (tokens, n_forced_cuts) = encoder.text(&text).map_err(refused)?;
            return Ok(EncodedLine::Text { tokens, n_forced_cuts });
        }
        _ if line.text.len() > MAX_CHAT_BYTES => {
            return Err(DataError::LongLine { path: path(), line: number, limit: MAX_CHAT_BYTES as u64 });
        }
        DataSample::Pair { plain, completion, .. } if !encoder.has_template() => {
            let tokens = encoder.pair(&plain, &completion).map_err(refused)?;
            return Ok(EncodedLine::Samples(Encoded::Whole(tokens)));
        }
        DataSample::Pair { prompt, completion, .. } => ChatSample {
            messages: vec![Message::new("user", prompt), Message::new("assistant", completion)],
            ..ChatSample::default()
        },
        DataSample::Chat(_) if !encoder.has_template() => {
            return Err(DataError::NoTemplate { path: path(), line: number });
        }
        DataSample::Chat(conversation) => conversation,
    };
    match encoder.conversation(&conversation) {
        Ok(encoded) => Ok(EncodedLine::Samples(encoded)),
        Err(EncodeFault::Tokenizer(source)) => Err(refused(source)),
        Err(EncodeFault::Template(error)) => Ok(EncodedLine::Refused(error.to_string())),
        Err(EncodeFault::Unaligned { turn }) => Ok(EncodedLine::Refused(format!(
            "the template renders message {} differently with and without the preceding messages",
            turn + 1
        ))),
    }
}
