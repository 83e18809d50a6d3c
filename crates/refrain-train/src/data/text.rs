//! Tokenizes large texts in chunks on several threads, with the same ids as the whole text.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use refrain_formats::tokenizer::{Tokenizer, TokenizerError};

/// Sizes for splitting a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct CutSizes {
    /// Bytes per chunk. A tokenizer uses some hundred times as much memory while it works.
    pub(super) chunk: usize,
    /// Bytes around a split point that are tokenized to check whether the split changes the tokens.
    pub(super) window: usize,
}

impl Default for CutSizes {
    fn default() -> Self {
        Self { chunk: 256 << 10, window: 256 }
    }
}

/// A chunk of a document, with the end of the text before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextChunk {
    before: String,
    text: String,
    pub(super) end: ChunkEnd,
}

impl TextChunk {
    pub(super) fn n_bytes(&self) -> usize {
        self.text.len()
    }
}

/// What follows a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkEnd {
    /// The next chunk of the document.
    Open,
    /// A separator.
    Separator,
    /// The end of the text.
    Text,
}

/// Tokens of a chunk, and whether the split before it may have changed them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChunkTokens {
    pub(super) ids: Vec<u32>,
    pub(super) is_forced: bool,
}

/// Splits a text that arrives in parts into documents and chunks.
pub(super) struct Cutter<'a> {
    tokenizer: &'a Tokenizer,
    sizes: CutSizes,
    /// Separator between documents.
    separator: Option<String>,
    /// Whether newlines next to a separator belong to it.
    trim: bool,
    buffer: String,
    before: String, // the end of the previous chunk
    after_separator: bool,
    at_start: bool, // at the start of a document
}

impl<'a> Cutter<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        sizes: CutSizes,
        separator: Option<String>,
        trim: bool,
    ) -> Self {
        Self {
            tokenizer,
            sizes,
            separator: separator.filter(|separator| !separator.is_empty()),
            trim,
            buffer: String::new(),
            before: String::new(),
            after_separator: false,
            at_start: true,
        }
    }

    /// Buffer to append the next part of the text to.
    pub(super) fn buffer(&mut self) -> &mut String {
        &mut self.buffer
    }

    /// Takes all complete chunks from the buffer; `is_end` says that no more text follows.
    pub(super) fn chunks(&mut self, is_end: bool, out: &mut Vec<TextChunk>) -> Result<(), TokenizerError> {
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
            let cut = self.find_cut()?;
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
        // An empty chunk still ends its document and, if nothing may be dropped, also represents a lone
        // separator.
        if !(self.at_start && text.is_empty()) || (before_separator && !self.trim) {
            let end = if before_separator { ChunkEnd::Separator } else { ChunkEnd::Text };
            out.push(TextChunk { before, text: text.to_owned(), end });
        }
        self.at_start = true;
    }

    /// Finds a position in the first chunk where splitting does not change the tokens, trying the best
    /// candidates first.
    fn find_cut(&self) -> Result<usize, TokenizerError> {
        const MAX_TRIES: usize = 16;
        let text = self.buffer.as_str();
        let end = floor_boundary(text, self.sizes.chunk).max(1);
        let start = floor_boundary(text, self.sizes.chunk / 2);
        let bytes = text.as_bytes();
        let is_blank = |at: usize| bytes[at].is_ascii_whitespace();
        let line_starts = (start.max(1)..end).rev().filter(|&at| bytes[at - 1] == b'\n' && !is_blank(at));
        for at in line_starts.take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok(at);
            }
        }
        let is_gap = |at: usize| bytes[at] == b' ' && !is_blank(at - 1) && !is_blank(at + 1);
        for at in (start.max(1)..end).rev().filter(|&at| is_gap(at)).take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok(at);
            }
        }
        let characters = (start.max(1)..=end).rev().filter(|&at| text.is_char_boundary(at));
        for at in characters.take(MAX_TRIES) {
            if self.is_seamless(at)? {
                return Ok(at);
            }
        }
        Ok(ceil_boundary(text, end))
    }

    /// Whether the tokens around a split equal those of its two sides.
    fn is_seamless(&self, at: usize) -> Result<bool, TokenizerError> {
        let left = tail(&self.buffer[..at], self.sizes.window);
        let right = &self.buffer[at..floor_boundary(&self.buffer, at + self.sizes.window)];
        let alone = self.tokenizer.encode(left, false, false)?;
        let joined = self.tokenizer.encode(&format!("{left}{right}"), false, false)?;
        Ok(joined.starts_with(&alone))
    }
}

/// Tokenizes one document of any length.
pub(super) fn encode_document(tokenizer: &Tokenizer, text: &str) -> Result<Vec<ChunkTokens>, TokenizerError> {
    let (mut cutter, mut chunks) = (Cutter::new(tokenizer, CutSizes::default(), None, false), Vec::new());
    cutter.buffer().push_str(text);
    cutter.chunks(false, &mut chunks)?;
    cutter.chunks(true, &mut chunks)?;
    encode_all(tokenizer, &chunks, 1)
}

/// Tokenizes chunks on several threads; results are in order.
pub(super) fn encode_all(
    tokenizer: &Tokenizer,
    chunks: &[TextChunk],
    n_threads: usize,
) -> Result<Vec<ChunkTokens>, TokenizerError> {
    let encode = |chunk: &TextChunk| encode(tokenizer, chunk);
    in_parallel(chunks, n_threads, encode).into_iter().collect()
}

/// Applies `work` to all items on several threads.
pub(super) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    n_threads: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
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

fn encode(tokenizer: &Tokenizer, chunk: &TextChunk) -> Result<ChunkTokens, TokenizerError> {
    if chunk.before.is_empty() {
        let ids = tokenizer.encode(&chunk.text, false, false)?;
        return Ok(ChunkTokens { ids, is_forced: false });
    }
    let before = tokenizer.encode(&chunk.before, false, false)?;
    let mut ids = tokenizer.encode(&format!("{}{}", chunk.before, chunk.text), false, false)?;
    if ids.starts_with(&before) {
        ids.drain(..before.len());
        return Ok(ChunkTokens { ids, is_forced: false });
    }
    Ok(ChunkTokens { ids: continued(tokenizer, &chunk.text)?, is_forced: true })
}

/// Tokenizes a text that continues after a split, without the leading space that some tokenizers add.
fn continued(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, TokenizerError> {
    for before in ["\n", ".", "0"] {
        let alone = tokenizer.encode(before, false, false)?;
        let mut ids = tokenizer.encode(&format!("{before}{text}"), false, false)?;
        if ids.starts_with(&alone) {
            ids.drain(..alone.len());
            return Ok(ids);
        }
    }
    tokenizer.encode(text, false, false)
}

fn tail(text: &str, n_bytes: usize) -> &str {
    &text[ceil_boundary(text, text.len().saturating_sub(n_bytes))..]
}

pub(super) fn floor_boundary(text: &str, at: usize) -> usize {
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

#[cfg(test)]
mod tests {
    use super::super::fixtures::{EOS, byte_level, sentence_piece};
    use super::*;
    use proptest::prelude::*;
    use std::sync::{Arc, LazyLock};

    /// Tokenizes a text that arrives in parts and is split into small chunks; also returns the number of
    /// forced splits.
    fn in_chunks(tokenizer: &Tokenizer, text: &str, part_bytes: usize) -> (Vec<u32>, usize, usize) {
        let sizes = CutSizes { chunk: 64, window: 24 };
        let mut cutter = Cutter::new(tokenizer, sizes, None, false);
        let (mut chunks, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let at = ceil_boundary(rest, part_bytes);
            cutter.buffer().push_str(&rest[..at]);
            rest = &rest[at..];
            cutter.chunks(rest.is_empty(), &mut chunks).unwrap();
        }
        let joined: String = chunks.iter().map(|chunk| chunk.text.as_str()).collect();
        assert_eq!(joined, text);
        let encoded = encode_all(tokenizer, &chunks, 3).unwrap();
        let n_forced = encoded.iter().filter(|tokens| tokens.is_forced).count();
        (encoded.into_iter().flat_map(|tokens| tokens.ids).collect(), n_forced, chunks.len())
    }

    fn tokenizers() -> &'static [Arc<Tokenizer>; 3] {
        static ALL: LazyLock<[Arc<Tokenizer>; 3]> = LazyLock::new(|| {
            [byte_level("gpt-2", None, false), byte_level("llama-bpe", None, false), sentence_piece()]
        });
        &ALL
    }

    #[test]
    fn a_chunked_text_has_the_tokens_of_the_whole() {
        let text = "Hello the hell.\n\n  and the  end. \nthe\tan\r\n   x\n\n\n".repeat(40);
        for tokenizer in tokenizers() {
            let whole = tokenizer.encode(&text, false, false).unwrap();
            let (ids, n_forced, n_chunks) = in_chunks(tokenizer, &text, 100);
            assert!(n_chunks > 15);
            assert_eq!(n_forced, 0);
            assert_eq!(ids, whole);
        }
    }

    #[test]
    fn a_text_without_boundaries_is_split_anyway() {
        for tokenizer in tokenizers() {
            for text in ["€".repeat(500), "aaa".repeat(500), " ".repeat(1000), "\n".repeat(1000)] {
                let (ids, _, n_chunks) = in_chunks(tokenizer, &text, 90);
                assert!(n_chunks > 5);
                let back = tokenizer.decode(&ids).unwrap();
                assert_eq!(back, text);
            }
        }
    }

    #[test]
    fn separators_are_found_across_parts() {
        let tokenizer = byte_level("gpt-2", None, false);
        let text = format!("one{EOS}{}{EOS}three", "two words ".repeat(30));
        for part_bytes in [1, 5, 7, 200] {
            let sizes = CutSizes { chunk: 64, window: 24 };
            let mut cutter = Cutter::new(&tokenizer, sizes, Some(EOS.to_owned()), false);
            let (mut chunks, mut rest) = (Vec::new(), text.as_str());
            while !rest.is_empty() {
                let at = ceil_boundary(rest, part_bytes);
                cutter.buffer().push_str(&rest[..at]);
                rest = &rest[at..];
                cutter.chunks(rest.is_empty(), &mut chunks).unwrap();
            }
            let mut documents = vec![String::new()];
            for chunk in &chunks {
                documents.last_mut().unwrap().push_str(&chunk.text);
                if chunk.end == ChunkEnd::Separator {
                    documents.push(String::new());
                }
            }
            assert_eq!(documents, ["one", "two words ".repeat(30).as_str(), "three"]);
        }
    }

    #[test]
    fn results_of_threads_are_in_order() {
        let items: Vec<usize> = (0..1000).collect();
        for n_threads in [0, 1, 2, 7, 5000] {
            assert!(in_parallel(&items, n_threads, |i| i * 2).into_iter().eq((0..1000).map(|i| i * 2)));
        }
        assert_eq!(in_parallel(&[0; 0], 4, |i| *i), [0; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_chunked_text_has_the_tokens_of_the_whole_unless_a_split_was_forced(
            words in prop::collection::vec("( |\n|the|hello|an|\\. |\n\n|aaaa|é|  )", 1..200),
            part_bytes in 1..300usize, which in 0..3usize,
        ) {
            let text = words.concat();
            let tokenizer = &tokenizers()[which];
            let (ids, n_forced, _) = in_chunks(tokenizer, &text, part_bytes);
            if n_forced == 0 {
                prop_assert_eq!(ids, tokenizer.encode(&text, false, false).unwrap());
            } else {
                prop_assert_eq!(tokenizer.decode(&ids).unwrap(), tokenizer.decode(&tokenizer.encode(&text, false, false).unwrap()).unwrap());
            }
        }
    }
}
