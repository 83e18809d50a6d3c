//! Bytes of every token, for decoding.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::spec::TokenKind;

/// SentencePiece's character for a space.
pub(super) const BLANK: char = '\u{2581}';

/// How the texts of normal tokens encode bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One printable character per byte, as in GPT-2.
    ByteLevel,
    /// Text with [`BLANK`] for spaces.
    SentencePiece,
    /// Text with the prefix `##` on tokens that continue a word.
    WordPiece,
}

/// Bytes and kind of every id.
#[derive(Debug)]
pub(super) struct PieceTable {
    bytes: Vec<u8>,
    ends: Vec<usize>, // end of each token in `bytes`
    kinds: Vec<TokenKind>,
    space_in_front: bool,
}

impl PieceTable {
    /// Creates an empty table. `space_in_front`: encoding prepends a space to a text, which decoding removes.
    pub(super) fn new(space_in_front: bool) -> Self {
        Self { bytes: Vec::new(), ends: Vec::new(), kinds: Vec::new(), space_in_front }
    }

    /// Adds the next id.
    pub(super) fn push(&mut self, text: &str, kind: TokenKind, spelling: Spelling) {
        match (kind, spelling) {
            (TokenKind::Control | TokenKind::Unknown | TokenKind::Unused, _) => {
                self.bytes.extend_from_slice(text.as_bytes());
            }
            (TokenKind::Byte, _) => match byte_of(text) {
                Some(byte) => self.bytes.push(byte),
                None => self.bytes.extend_from_slice(text.as_bytes()),
            },
            (TokenKind::UserDefined, Spelling::SentencePiece)
            | (TokenKind::Normal, Spelling::SentencePiece) => {
                let mut parts = text.split(BLANK);
                self.bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
                for part in parts {
                    self.bytes.push(b' ');
                    self.bytes.extend_from_slice(part.as_bytes());
                }
            }
            (TokenKind::UserDefined, _) => self.bytes.extend_from_slice(text.as_bytes()),
            (TokenKind::Normal, Spelling::ByteLevel) => push_byte_level(&mut self.bytes, text),
            (TokenKind::Normal, Spelling::WordPiece) => match text.strip_prefix("##") {
                Some(suffix) if !suffix.is_empty() => self.bytes.extend_from_slice(suffix.as_bytes()),
                _ => {
                    self.bytes.push(b' ');
                    self.bytes.extend_from_slice(text.as_bytes());
                }
            },
        }
        self.ends.push(self.bytes.len());
        self.kinds.push(kind);
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn space_in_front(&self) -> bool {
        self.space_in_front
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start..end])
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn text(&self, id: u32) -> Option<String> {
        self.bytes(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

/// Returns the byte of a token such as `<0x0A>`.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_byte { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn push_byte_level(bytes: &mut Vec<u8>, text: &str) {
    for c in text.chars() {
        match BYTES.get(&c) {
            Some(&byte) => bytes.push(byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// GPT-2's character for each byte: printable bytes map to themselves, the others to characters from U+0100 on.
pub(super) static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return byte as u8 as char;
        }
        let c = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
        next += 1;
        c
    })
});

static BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| CHARS.iter().enumerate().map(|(byte, &c)| (c, byte as u8)).collect());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_characters_are_those_of_the_tokenizers_crate() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert_eq!(alphabet.len(), 256);
        assert!(CHARS.iter().all(|c| alphabet.contains(c)));
        assert_eq!(CHARS[b' ' as usize], 'Ġ');
        assert_eq!(CHARS[b'\n' as usize], 'Ċ');
    }

    #[test]
    fn byte_tokens_are_two_hexadecimal_digits() {
        assert_eq!(byte_of("<0x0A>"), Some(10));
        assert_eq!(byte_of("<0xA>"), None);
        assert_eq!(byte_of("<0x+A>"), None);
        assert_eq!(byte_of("0x0A"), None);
    }
}
