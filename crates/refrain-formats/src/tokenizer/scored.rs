//! SentencePiece's algorithm: repeatedly merge the two neighbours whose merged token has the highest score.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use tokenizers::models::TrainerWrapper;
use tokenizers::{Model, Token};

use super::pieces::BLANK;
use super::spec::{TextIndex, TokenKind, Vocabulary};
use crate::gguf::StrArray;

/// End of the linked list.
const NONE: u32 = u32::MAX;

/// A vocabulary with scores. As in SentencePiece, two tokens merge if their concatenation is a token. A list of merges
/// would hold every way to make every token, half a million for 262,144 tokens.
pub(super) struct ScoredPieces {
    tokens: StrArray,
    kinds: Vec<TokenKind>,
    scores: Vec<f32>,
    ids: TextIndex,
    /// Ids of user-defined tokens spelled with [`BLANK`], by their text with plain spaces.
    plain: HashMap<String, u32>,
    byte_ids: Box<[Option<u32>; 256]>,
    unk: Option<u32>,
    longest: usize, // bytes of the longest token
}

impl ScoredPieces {
    /// Creates a model. There is one score per token, and none is NaN.
    pub(super) fn new(vocabulary: Vocabulary<'_>, scores: &[f32], unk: Option<u32>) -> Self {
        let Vocabulary { tokens, kinds, ids } = vocabulary;
        let mut plain = HashMap::new();
        for (id, (text, &kind)) in tokens.iter().zip(&kinds).enumerate() {
            if is_escaped(text, kind) {
                plain.entry(plain_blanks(text)).or_insert(id as u32);
            }
        }
        let mut model = Self {
            longest: tokens.iter().map(str::len).max().unwrap_or(0),
            tokens: tokens.clone(),
            scores: scores.to_vec(),
            byte_ids: Box::new([None; 256]),
            kinds,
            ids,
            plain,
            unk,
        };
        model.byte_ids = Box::new(std::array::from_fn(|byte| model.id(&format!("<0x{byte:02X}>"))));
        model
    }

    fn id(&self, text: &str) -> Option<u32> {
        let written = self.ids.get(&self.tokens, text).filter(|&id| !is_escaped(text, self.kind(id)));
        let plain = if text.contains(' ') { self.plain.get(text).copied() } else { None };
        match (written, plain) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn kind(&self, id: u32) -> TokenKind {
        self.kinds[id as usize]
    }

    fn text(&self, id: u32) -> &str {
        self.tokens.get(id as usize).unwrap_or_default()
    }

    /// Returns the token that two neighbours merge into. Control and byte tokens are never merged, and user-defined
    /// tokens are matched before any merge.
    fn joint(&self, left: u32, right: u32, scratch: &mut String) -> Option<u32> {
        if self.kind(left) != TokenKind::Normal || self.kind(right) != TokenKind::Normal {
            return None;
        }
        let (left, right) = (self.text(left), self.text(right));
        if left.len() + right.len() > self.longest {
            return None;
        }
        scratch.clear();
        scratch.push_str(left);
        scratch.push_str(right);
        self.ids.get(&self.tokens, scratch).filter(|&id| self.kind(id) == TokenKind::Normal)
    }

    /// Returns one symbol per character, or per byte of a character without a token.
    fn symbols(&self, text: &str) -> Vec<Symbol> {
        let mut symbols = Vec::with_capacity(text.len());
        let mut unknown_until = None; // end of a run of unknown characters, which becomes one token
        for (start, c) in text.char_indices() {
            let end = start + c.len_utf8();
            let part = &text[start..end];
            let id = self.id(part);
            if id.is_none() && part.bytes().any(|byte| self.byte_ids[byte as usize].is_none()) {
                unknown_until = Some(end);
                continue;
            }
            let mut push = |id, end: usize| symbols.push(Symbol { id, end: end as u32, ..Symbol::default() });
            if let (Some(end), Some(unk)) = (unknown_until.take(), self.unk) {
                push(unk, end);
            }
            match id {
                Some(id) => push(id, end),
                None => {
                    let bytes = part.bytes().filter_map(|byte| self.byte_ids[byte as usize]);
                    bytes.zip(start + 1..).for_each(|(id, end)| push(id, end));
                }
            }
        }
        if let (Some(end), Some(unk)) = (unknown_until, self.unk) {
            symbols.push(Symbol { id: unk, end: end as u32, ..Symbol::default() });
        }
        let last = symbols.len().saturating_sub(1);
        for (at, symbol) in symbols.iter_mut().enumerate() {
            symbol.previous = if at == 0 { NONE } else { at as u32 - 1 };
            symbol.next = if at == last { NONE } else { at as u32 + 1 };
        }
        symbols
    }

    /// Returns the symbols of a text after all merges.
    fn join(&self, text: &str) -> Vec<Symbol> {
        let mut symbols = self.symbols(text);
        let mut scratch = String::with_capacity(self.longest);
        let mut candidate = |symbols: &[Symbol], idx: u32| {
            let left = symbols[idx as usize];
            let right = *symbols.get(left.next as usize)?;
            let joint = self.joint(left.id, right.id, &mut scratch)?;
            let order = descending(self.scores[joint as usize]);
            Some(Reverse(MergeCandidate { order, joint, left: left.id, symbol: idx, end: right.end }))
        };
        let all = 0..symbols.len() as u32;
        let mut queue: BinaryHeap<_> = all.filter_map(|idx| candidate(&symbols, idx)).collect();
        while let Some(Reverse(best)) = queue.pop() {
            let left = symbols[best.symbol as usize];
            // A candidate is stale if either of its symbols has been merged: the pair has another end or is gone.
            let Some(&right) = symbols.get(left.next as usize).filter(|right| right.end == best.end) else {
                continue;
            };
            symbols[left.next as usize].next = NONE;
            let joined = &mut symbols[best.symbol as usize];
            (joined.id, joined.end, joined.next) = (best.joint, right.end, right.next);
            if let Some(next) = symbols.get_mut(right.next as usize) {
                next.previous = best.symbol;
            }
            if left.previous != NONE {
                queue.extend(candidate(&symbols, left.previous));
            }
            queue.extend(candidate(&symbols, best.symbol));
        }
        symbols
    }
}

impl Model for ScoredPieces {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        if u32::try_from(sequence.len()).is_err() {
            return Err(format!("a text of {} bytes, the limit is {}", sequence.len(), u32::MAX).into());
        }
        let symbols = self.join(sequence);
        let (mut tokens, mut at, mut start) = (Vec::new(), 0, 0);
        while let Some(symbol) = symbols.get(at as usize) {
            let end = symbol.end as usize;
            tokens.push(Token::new(symbol.id, String::new(), (start, end)));
            (at, start) = (symbol.next, end);
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.tokens.iter().zip(0..).map(|(text, id)| (text.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a vocabulary with scores cannot be saved".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        tokenizers::ModelWrapper::BPE(Default::default()).get_trainer()
    }
}

impl fmt::Debug for ScoredPieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScoredPieces").field("n_tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// A token in a doubly linked list over the text.
#[derive(Clone, Copy, Default)]
struct Symbol {
    id: u32,
    end: u32, // bytes from the start of the text
    previous: u32,
    next: u32, // NONE for the last symbol and for one merged into its left neighbour
}

/// Two neighbours that can merge. The smallest candidate is merged first: the highest score, then the lowest ids, then
/// the leftmost.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    order: u32, // of the score, see `descending`
    joint: u32,
    left: u32,
    symbol: u32,
    end: u32, // end of the pair
}

/// Maps a score to a number so that higher scores sort first.
fn descending(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 0 { !(bits | 1 << 31) } else { bits }
}

/// Returns whether a token occurs in text with plain spaces: user-defined tokens are matched before spaces are replaced.
fn is_escaped(text: &str, kind: TokenKind) -> bool {
    kind == TokenKind::UserDefined && text.contains(BLANK)
}

/// Returns a token's text with plain spaces.
pub(super) fn plain_blanks(text: &str) -> String {
    text.replace(BLANK, " ")
}

#[cfg(test)]
mod tests {
    use super::descending;

    #[test]
    fn higher_scores_sort_first() {
        let scores = [f32::INFINITY, 3.5, 1.0, f32::MIN_POSITIVE, 0.0, -0.0, -1.0, -1e9, f32::NEG_INFINITY];
        assert!(scores.windows(2).all(|pair| descending(pair[0]) < descending(pair[1])));
    }
}
