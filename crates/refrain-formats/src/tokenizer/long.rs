//! Tokenizes texts of any length in chunks on several threads, with the same ids as the whole text.
//!
//! Tokenizing a text at once takes some hundred times its memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::{Tokenizer, TokenizerError};

/// Sizes for splitting a text.
#[derive(Debug, Clone, Copy)]
pub struct CutSizes {
    /// Bytes per chunk. A tokenizer uses some hundred times as much memory while it works.
    pub chunk: usize,
    /// Bytes around a split point that are tokenized to check whether the split changes the tokens.
    pub window: usize,
}

impl Default for CutSizes {
    fn default() -> Self {
        Self { chunk: 256 << 10, window: 256 }
    }
}

/// A chunk of a document, with the end of the text before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextChunk {
    before: String,
    text: String,
    /// Whether the split before the chunk is in the middle of a word.
    in_word: bool,
    /// What follows the chunk.
    pub end: ChunkEnd,
}

impl TextChunk {
    /// The chunk itself.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Size of the chunk in bytes.
    pub fn n_bytes(&self) -> usize {
        self.text.len()
    }
}

/// What follows a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkEnd {
    /// The next chunk of the document.
    Open,
    /// A separator.
    Separator,
    /// The end of the text.
    Text,
}

/// Tokens of a chunk, and whether the split before it may have changed them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkTokens {
    /// Ids of the chunk.
    pub ids: Vec<u32>,
    /// Whether the split before the chunk may have changed the tokens around it.
    pub is_forced: bool,
}

/// Splits a text that arrives in parts into documents and chunks.
#[derive(Debug)]
pub struct Cutter<'a> {
    tokenizer: &'a Tokenizer,
    sizes: CutSizes,
    /// Separator between documents.
    separator: Option<String>,
    /// Whether newlines next to a separator belong to it.
    trim: bool,
    parse_special: bool,
    buffer: String,
    before: String, // the end of the previous chunk
    in_word: bool,  // whether it ended in the middle of a word
    after_separator: bool,
    at_start: bool, // at the start of a document
}

impl<'a> Cutter<'a> {
    /// A splitter into documents that `separator` ends; `trim` drops newlines next to a separator.
    pub fn new(tokenizer: &'a Tokenizer, sizes: CutSizes, separator: Option<String>, trim: bool) -> Self {
        Self {
            tokenizer,
            sizes,
            separator: separator.filter(|separator| !separator.is_empty()),
            trim,
            parse_special: false,
            buffer: String::new(),
            before: String::new(),
            in_word: false,
            after_separator: false,
            at_start: true,
        }
    }

    /// Buffer to append the next part of the text to.
    pub fn buffer(&mut self) -> &mut String {
        &mut self.buffer
    }

    /// Takes all complete chunks from the buffer; `is_end` says that no more text follows.
    pub fn chunks(&mut self, is_end: bool, out: &mut Vec<TextChunk>) -> Result<(), TokenizerError> {
        let mut at = 0; // text before this index is consumed
        while let Some(separator) = &self.separator
            && let Some(found) = self.buffer[at..].find(separator.as_str())
        {
            let (text, next) = (self.buffer[at..at + found].to_owned(), at + found + separator.len());
            self.document_end(&text, true, out);
            self.after_separator = true;
            at = next;
        }
        self.buffer.drain(..at);
        if is_end {
            let text = std::mem::take(&mut self.buffer);
            self.document_end(&text, false, out);
            return Ok(());
        }
        while self.buffer.len() > 2 * self.sizes.chunk {
            let (cut, in_word) = self.find_cut()?;
            let text: String = self.buffer.drain(..cut).collect();
            let context = tail(&text, self.sizes.window).to_owned();
            let trimmed = if self.trim && self.at_start && self.after_separator {
                text.trim_start_matches(['\n', '\r'])
            } else {
                &text
            };
            out.push(TextChunk {
                before: std::mem::replace(&mut self.before, context),
                text: trimmed.to_owned(),
                in_word: std::mem::replace(&mut self.in_word, in_word),
                end: ChunkEnd::Open,
            });
            self.at_start = false;
        }
        Ok(())
    }

    fn document_end(&mut self, text: &str, before_separator: bool, out: &mut Vec<TextChunk>) {
        let mut text = text;
        if self.trim && self.at_start && self.after_separator {
            text = text.trim_start_matches(['\n', '\r']);
        }
        if self.trim && (before_separator || self.after_separator) {
            text = text.trim_end_matches(['\n', '\r']);
        }
        let before = std::mem::take(&mut self.before);
        let in_word = std::mem::take(&mut self.in_word);
        // An empty chunk still ends its document and, if nothing may be dropped, also represents a lone
        // separator.
        if !(self.at_start && text.is_empty()) || (before_separator && !self.trim) {
            let end = if before_separator { ChunkEnd::Separator } else { ChunkEnd::Text };
            out.push(TextChunk { before, text: text.to_owned(), in_word, end });
        }
        self.at_start = true;
    }

    /// Finds a position in the first chunk where splitting does not change the tokens, trying the best
    /// candidates first. Also returns whether it is in the middle of a word, where the tokens of the text before, as far
    /// as it was looked at, prove nothing: a long run of one character may be split anywhere.
    fn find_cut(&self) -> Result<(usize, bool), TokenizerError> {
        const MAX_TRIES: usize = 16;
        let text = self.buffer.as_str();
        let end = floor_boundary(text, self.sizes.chunk).max(1);
        let start = floor_boundary(text, self.sizes.chunk / 2);
        let bytes = text.as_bytes();
        let is_blank = |at: usize| bytes[at].is_ascii_whitespace();
        let line_starts = (start.max(1)..end).rev().filter(|&at| bytes[at - 1] == b'\n' && !is_blank(at));
        for at in line_starts.take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok((at, false));
            }
        }
        let is_gap = |at: usize| bytes[at] == b' ' && !is_blank(at - 1) && !is_blank(at + 1);
        for at in (start.max(1)..end).rev().filter(|&at| is_gap(at)).take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok((at, false));
            }
        }
        let characters = (start.max(1)..=end).rev().filter(|&at| text.is_char_boundary(at));
        for at in characters.take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok((at, true));
            }
        }
        Ok((ceil_boundary(text, end), true))
    }

    /// Whether the tokens around a split equal those of its two sides.
    fn is_seamless(&self, at: usize) -> Result<bool, TokenizerError> {
        let left = tail(&self.buffer[..at], self.sizes.window);
        let right = &self.buffer[at..floor_boundary(&self.buffer, at + self.sizes.window)];
        let encode = |text: &str| self.tokenizer.encode(text, false, self.parse_special);
        let (alone, joined) = (encode(left)?, encode(&format!("{left}{right}"))?);
        Ok(joined.starts_with(&alone))
    }
}

/// Tokenizes chunks on several threads; results are in order.
pub fn encode_all(
    tokenizer: &Tokenizer,
    chunks: &[TextChunk],
    parse_special: bool,
    n_threads: usize,
) -> Result<Vec<ChunkTokens>, TokenizerError> {
    let encode = |chunk: &TextChunk| encode(tokenizer, chunk, parse_special);
    in_parallel(chunks, n_threads, encode).into_iter().collect()
}

/// Applies `work` to all items on several threads.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], n_threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let n_threads = n_threads.clamp(1, items.len().max(1));
    if n_threads == 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        while let idx = next.fetch_add(1, Ordering::Relaxed)
            && let Some(item) = items.get(idx)
        {
            done.push((idx, work(item)));
        }
        done
    };
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(run)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().flat_map(join).collect()
    });
    results.sort_unstable_by_key(|(idx, _)| *idx);
    results.into_iter().map(|(_, result)| result).collect()
}

fn encode(
    tokenizer: &Tokenizer,
    chunk: &TextChunk,
    parse_special: bool,
) -> Result<ChunkTokens, TokenizerError> {
    let encode = |text: &str| tokenizer.encode(text, false, parse_special);
    if chunk.before.is_empty() {
        return Ok(ChunkTokens { ids: encode(&chunk.text)?, is_forced: false });
    }
    if let Some(ids) = continued(encode, &chunk.before, &chunk.text)? {
        return Ok(ChunkTokens { ids, is_forced: chunk.in_word });
    }
    // Some tokenizers add a space in front of a text, but not after these characters.
    for before in ["\n", ".", "0"] {
        if let Some(ids) = continued(encode, before, &chunk.text)? {
            return Ok(ChunkTokens { ids, is_forced: true });
        }
    }
    Ok(ChunkTokens { ids: encode(&chunk.text)?, is_forced: true })
}

/// Tokens of a text that continues another one; `None` if a token crosses the split.
fn continued(
    encode: impl Fn(&str) -> Result<Vec<u32>, TokenizerError>,
    before: &str,
    text: &str,
) -> Result<Option<Vec<u32>>, TokenizerError> {
    let alone = encode(before)?;
    let mut ids = encode(&format!("{before}{text}"))?;
    if !ids.starts_with(&alone) {
        return Ok(None);
    }
    ids.drain(..alone.len());
    Ok(Some(ids))
}

/// Tokens of a text of any length, in order and in parts, so that neither time nor memory is spent on tokens that are not
/// asked for.
#[derive(Debug)]
pub struct LongEncoder<'a> {
    cutter: Cutter<'a>,
    rest: &'a str,
    n_threads: usize,
    /// Ids before the text; taken by the first part.
    prefix: &'a [u32],
    suffix: &'a [u32],
    is_done: bool,
    n_forced: usize,
}

impl<'a> LongEncoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, text: &'a str, parse_special: bool) -> Self {
        let mut cutter = Cutter::new(tokenizer, CutSizes::default(), None, false);
        cutter.parse_special = parse_special;
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        Self { cutter, rest: text, n_threads, prefix: &[], suffix: &[], is_done: false, n_forced: 0 }
    }

    pub(super) fn with_special(self, prefix: &'a [u32], suffix: &'a [u32]) -> Self {
        Self { prefix, suffix, ..self }
    }

    /// Uses a number of threads instead of all cores.
    pub fn with_threads(self, n_threads: usize) -> Self {
        Self { n_threads, ..self }
    }

    /// How often a chunk ended in a place where that may have changed the tokens around it, as in 256 KiB without a space.
    pub fn n_forced(&self) -> usize {
        self.n_forced
    }

    /// The first tokens of the text: at least `n_tokens` if there are as many.
    pub fn at_least(&mut self, n_tokens: usize) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        while ids.len() < n_tokens
            && let Some(part) = self.next().transpose()?
        {
            ids.extend(part);
        }
        Ok(ids)
    }

    fn part(&mut self) -> Result<Vec<u32>, TokenizerError> {
        let n_bytes = (self.n_threads + 2) * self.cutter.sizes.chunk;
        let (part, rest) = self.rest.split_at(floor_boundary(self.rest, n_bytes));
        self.rest = rest;
        self.cutter.buffer().push_str(part);
        let mut chunks = Vec::new();
        self.is_done = rest.is_empty();
        self.cutter.chunks(false, &mut chunks)?;
        if self.is_done {
            self.cutter.chunks(true, &mut chunks)?;
        }
        let mut ids = std::mem::take(&mut self.prefix).to_vec();
        for chunk in encode_all(self.cutter.tokenizer, &chunks, self.cutter.parse_special, self.n_threads)? {
            self.n_forced += usize::from(chunk.is_forced);
            ids.extend(chunk.ids);
        }
        if self.is_done {
            ids.extend(self.suffix);
        }
        Ok(ids)
    }
}

impl Iterator for LongEncoder<'_> {
    type Item = Result<Vec<u32>, TokenizerError>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.is_done).then(|| {
            let part = self.part();
            self.is_done |= part.is_err();
            part
        })
    }
}

fn tail(text: &str, n_bytes: usize) -> &str {
    &text[ceil_boundary(text, text.len().saturating_sub(n_bytes))..]
}

/// The last character boundary at or before an index.
pub fn floor_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn ceil_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}
