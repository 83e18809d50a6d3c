//! Streaming decoder: ids to text.

use std::sync::Arc;

use super::pieces::PieceTable;
use super::spec::TokenKind;

/// Decodes ids as they arrive.
///
/// A character may be spread over several tokens; its bytes are held back until it is complete. Concatenated, the deltas
/// equal the decoded whole: invalid bytes become U+FFFD at once, an incomplete character only at the end.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    pieces: Arc<PieceTable>,
    drop_space: bool, // remove the space that encoding prepended
    with_special: bool,
    pending: Vec<u8>,
    text: String,
}

impl DecodeStream {
    pub(super) fn new(pieces: Arc<PieceTable>, drop_space: bool, with_special: bool) -> Self {
        Self { pieces, drop_space, with_special, pending: Vec::new(), text: String::new() }
    }

    /// Returns the text that this id completes, possibly none. Ids outside the vocabulary have no text: a model may
    /// have more logits than its vocabulary has tokens.
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

    /// Returns the remaining text: an incomplete character as U+FFFD. The stream can be used again afterwards.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    /// Returns whether bytes of an incomplete character are held back.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Moves complete characters from `pending` to `text`.
    fn take_complete(&mut self) {
        let mut n_done = 0;
        loop {
            let bytes = &self.pending[n_done..];
            match std::str::from_utf8(bytes) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    n_done = self.pending.len();
                    break;
                }
                Err(error) => {
                    let (valid, _) = bytes.split_at(error.valid_up_to());
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    n_done += valid.len();
                    let Some(n_invalid) = error.error_len() else { break };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    n_done += n_invalid;
                }
            }
        }
        self.pending.drain(..n_done);
    }
}
