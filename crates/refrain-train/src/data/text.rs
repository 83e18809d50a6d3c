//! Large texts to tokens, in pieces and on several threads, with the ids that the whole would have.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use refrain_formats::tokenizer::{Tokenizer, TokenizerError};

/// How a text is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct CutSizes {
    /// Bytes of a piece. A tokenizer takes some hundred times as much memory while it works.
    pub(super) piece: usize,
    /// Bytes before and after a cut that decide whether it is seen in the tokens.
    pub(super) window: usize,
}

impl Default for CutSizes {
    fn default() -> Self {
        Self { piece: 256 << 10, window: 256 }
    }
}

/// A piece of a document with the end of what stands before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextPiece {
    before: String,
    text: String,
    pub(super) end: PieceEnd,
}

impl TextPiece {
    pub(super) fn n_bytes(&self) -> usize {
        self.text.len()
    }
}

/// What follows a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceEnd {
    /// The next piece of the document.
    Open,
    /// A separator.
    Separator,
    /// The end of the text.
    Text,
}

/// The tokens of a piece, and whether the cut before it may be seen in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PieceTokens {
    pub(super) ids: Vec<u32>,
    pub(super) is_forced: bool,
}

/// Cuts a text that comes in parts into documents and pieces.
pub(super) struct Cutter<'a> {
    tokenizer: &'a Tokenizer,
    sizes: CutSizes,
    /// What stands between two documents.
    separator: Option<String>,
    /// Whether line ends next to a separator belong to it.
    trim: bool,
    buffer: String,
    before: String, // the end of what was cut off the document
    after_separator: bool,
    at_start: bool, // of a document
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

    /// Where the next part of the text goes.
    pub(super) fn buffer(&mut self) -> &mut String {
        &mut self.buffer
    }

    /// Takes all pieces that can be cut from what is there; `is_end` says that no more comes.
    pub(super) fn pieces(&mut self, is_end: bool, out: &mut Vec<TextPiece>) -> Result<(), TokenizerError> {
        let mut at = 0; // what lies before is taken
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
        while self.buffer.len() > 2 * self.sizes.piece {
            let cut = self.find_cut()?;
            let text: String = self.buffer.drain(..cut).collect();
            let context = tail(&text, self.sizes.window).to_owned();
            let trimmed = if self.trim && self.at_start && self.after_separator {
                text.trim_start_matches(['\n', '\r'])
            } else {
                &text
            };
            out.push(TextPiece {
                before: std::mem::replace(&mut self.before, context),
                text: trimmed.to_owned(),
                end: PieceEnd::Open,
            });
            self.at_start = false;
        }
        Ok(())
    }

    fn document_end(&mut self, text: &str, before_separator: bool, out: &mut Vec<TextPiece>) {
        let mut text = text;
        if self.trim && self.at_start && self.after_separator {
            text = text.trim_start_matches(['\n', '\r']);
        }
        if self.trim && (before_separator || self.after_separator) {
            text = text.trim_end_matches(['\n', '\r']);
        }
        let before = std::mem::take(&mut self.before);
        // An empty piece still ends its document, and, where nothing may be left out, a separator without one.
        if !(self.at_start && text.is_empty()) || (before_separator && !self.trim) {
            let end = if before_separator { PieceEnd::Separator } else { PieceEnd::Text };
            out.push(TextPiece { before, text: text.to_owned(), end });
        }
        self.at_start = true;
    }

    /// A place in the first piece where the text can be cut without a trace, from the best to the least.
    fn find_cut(&self) -> Result<usize, TokenizerError> {
        const MAX_TRIES: usize = 16;
        let text = self.buffer.as_str();
        let end = floor_boundary(text, self.sizes.piece).max(1);
        let start = floor_boundary(text, self.sizes.piece / 2);
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

    /// Whether the tokens around a cut are those of the two sides.
    fn is_seamless(&self, at: usize) -> Result<bool, TokenizerError> {
        let left = tail(&self.buffer[..at], self.sizes.window);
        let right = &self.buffer[at..floor_boundary(&self.buffer, at + self.sizes.window)];
        let alone = self.tokenizer.encode(left, false, false)?;
        let joined = self.tokenizer.encode(&format!("{left}{right}"), false, false)?;
        Ok(joined.starts_with(&alone))
    }
}

/// Tokenizes one document, however long it is.
pub(super) fn encode_document(tokenizer: &Tokenizer, text: &str) -> Result<Vec<PieceTokens>, TokenizerError> {
    let (mut cutter, mut pieces) = (Cutter::new(tokenizer, CutSizes::default(), None, false), Vec::new());
    cutter.buffer().push_str(text);
    cutter.pieces(false, &mut pieces)?;
    cutter.pieces(true, &mut pieces)?;
    encode_all(tokenizer, &pieces, 1)
}

/// Tokenizes pieces on several threads; the results are in their order.
pub(super) fn encode_all(
    tokenizer: &Tokenizer,
    pieces: &[TextPiece],
    n_threads: usize,
) -> Result<Vec<PieceTokens>, TokenizerError> {
    let encode = |piece: &TextPiece| encode(tokenizer, piece);
    in_parallel(pieces, n_threads, encode).into_iter().collect()
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

fn encode(tokenizer: &Tokenizer, piece: &TextPiece) -> Result<PieceTokens, TokenizerError> {
    if piece.before.is_empty() {
        let ids = tokenizer.encode(&piece.text, false, false)?;
        return Ok(PieceTokens { ids, is_forced: false });
    }
    let before = tokenizer.encode(&piece.before, false, false)?;
    let mut ids = tokenizer.encode(&format!("{}{}", piece.before, piece.text), false, false)?;
    if ids.starts_with(&before) {
        ids.drain(..before.len());
        return Ok(PieceTokens { ids, is_forced: false });
    }
    Ok(PieceTokens { ids: continued(tokenizer, &piece.text)?, is_forced: true })
}

/// Tokens of a text that goes on where another was cut: without the blank that some tokenizers put in front.
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

    /// Tokens of a text that comes in parts and is cut into small pieces, and how many cuts were forced.
    fn in_pieces(tokenizer: &Tokenizer, text: &str, part_bytes: usize) -> (Vec<u32>, usize, usize) {
        let sizes = CutSizes { piece: 64, window: 24 };
        let mut cutter = Cutter::new(tokenizer, sizes, None, false);
        let (mut pieces, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let at = ceil_boundary(rest, part_bytes);
            cutter.buffer().push_str(&rest[..at]);
            rest = &rest[at..];
            cutter.pieces(rest.is_empty(), &mut pieces).unwrap();
        }
        let joined: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(joined, text);
        let encoded = encode_all(tokenizer, &pieces, 3).unwrap();
        let n_forced = encoded.iter().filter(|tokens| tokens.is_forced).count();
        (encoded.into_iter().flat_map(|tokens| tokens.ids).collect(), n_forced, pieces.len())
    }

    fn tokenizers() -> &'static [Arc<Tokenizer>; 3] {
        static ALL: LazyLock<[Arc<Tokenizer>; 3]> = LazyLock::new(|| {
            [byte_level("gpt-2", None, false), byte_level("llama-bpe", None, false), sentence_piece()]
        });
        &ALL
    }

    #[test]
    fn a_text_in_pieces_has_the_tokens_of_the_whole() {
        let text = "Hello the hell.\n\n  and the  end. \nthe\tan\r\n   x\n\n\n".repeat(40);
        for tokenizer in tokenizers() {
            let whole = tokenizer.encode(&text, false, false).unwrap();
            let (ids, n_forced, n_pieces) = in_pieces(tokenizer, &text, 100);
            assert!(n_pieces > 15);
            assert_eq!(n_forced, 0);
            assert_eq!(ids, whole);
        }
    }

    #[test]
    fn a_text_without_a_gap_is_cut_all_the_same() {
        for tokenizer in tokenizers() {
            for text in ["€".repeat(500), "aaa".repeat(500), " ".repeat(1000), "\n".repeat(1000)] {
                let (ids, _, n_pieces) = in_pieces(tokenizer, &text, 90);
                assert!(n_pieces > 5);
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
            let sizes = CutSizes { piece: 64, window: 24 };
            let mut cutter = Cutter::new(&tokenizer, sizes, Some(EOS.to_owned()), false);
            let (mut pieces, mut rest) = (Vec::new(), text.as_str());
            while !rest.is_empty() {
                let at = ceil_boundary(rest, part_bytes);
                cutter.buffer().push_str(&rest[..at]);
                rest = &rest[at..];
                cutter.pieces(rest.is_empty(), &mut pieces).unwrap();
            }
            let mut documents = vec![String::new()];
            for piece in &pieces {
                documents.last_mut().unwrap().push_str(&piece.text);
                if piece.end == PieceEnd::Separator {
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
        fn any_text_in_pieces_has_the_tokens_of_the_whole_unless_a_cut_was_forced(
            words in prop::collection::vec("( |\n|the|hello|an|\\. |\n\n|aaaa|é|  )", 1..200),
            part_bytes in 1..300usize, which in 0..3usize,
        ) {
            let text = words.concat();
            let tokenizer = &tokenizers()[which];
            let (ids, n_forced, _) = in_pieces(tokenizer, &text, part_bytes);
            if n_forced == 0 {
                prop_assert_eq!(ids, tokenizer.encode(&text, false, false).unwrap());
            } else {
                prop_assert_eq!(tokenizer.decode(&ids).unwrap(), tokenizer.decode(&tokenizer.encode(&text, false, false).unwrap()).unwrap());
            }
        }
    }
}
