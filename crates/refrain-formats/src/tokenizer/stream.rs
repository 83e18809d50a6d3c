//! Ids to text, one at a time.

use std::sync::Arc;

use super::pieces::PieceTable;
use super::spec::TokenKind;

/// Turns ids into text as they come.
///
/// A character may be spread over several tokens: its bytes wait until it is complete. The texts returned, put
/// together, are those of the whole: bytes that can never be UTF-8 become U+FFFD, an unfinished character does so only
/// at the end.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    pieces: Arc<PieceTable>,
    drop_space: bool, // take away the blank that encoding put in front
    with_special: bool,
    pending: Vec<u8>,
    text: String,
}

impl DecodeStream {
    pub(super) fn new(pieces: Arc<PieceTable>, drop_space: bool, with_special: bool) -> Self {
        Self { pieces, drop_space, with_special, pending: Vec::new(), text: String::new() }
    }

    /// The text that is complete with this id, possibly none. An id outside the vocabulary gives none: models may
    /// have more outputs than the vocabulary has tokens.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        let hidden = matches!(self.pieces.kind(id), Some(TokenKind::Control | TokenKind::Unused))
            && !self.with_special;
        if !hidden
            && let Some(piece) = self.pieces.bytes(id)
            && !piece.is_empty()
        {
            let drop_space = std::mem::take(&mut self.drop_space);
            let piece = if drop_space { piece.strip_prefix(b" ").unwrap_or(piece) } else { piece };
            self.pending.extend_from_slice(piece);
            self.take_complete();
        }
        &self.text
    }

    /// What is left at the end: an unfinished character, as U+FFFD. The stream may be used again afterwards.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    /// Whether bytes of an unfinished character are waiting.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Moves whole characters from `pending` to `text`.
    fn take_complete(&mut self) {
        let mut at = 0;
        loop {
            let rest = &self.pending[at..];
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    at = self.pending.len();
                    break;
                }
                Err(error) => {
                    let (valid, _) = rest.split_at(error.valid_up_to());
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    at += valid.len();
                    let Some(n_invalid) = error.error_len() else { break };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    at += n_invalid;
                }
            }
        }
        self.pending.drain(..at);
    }
}
