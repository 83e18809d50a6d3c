//! Guard zones around a buffer, which detect writes past either end.

use std::fmt;

// 256 bytes on each side keep the buffer as aligned as a planned one.
const GUARD: usize = 256;
const SENTINEL: u8 = 0xA5;

/// A buffer between two guard zones.
#[derive(Clone, Debug)]
pub struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

/// A write outside a guarded buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trespass {
    /// Offset from the buffer's first byte; negative before the buffer.
    pub offset: isize,
    /// Size of the buffer.
    pub len: usize,
}

impl fmt::Display for Trespass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} was written, outside a buffer of {} bytes", self.offset, self.len)
    }
}

impl std::error::Error for Trespass {}

impl Guarded {
    /// Creates a buffer of `len` bytes, filled with `poison` and 256-byte aligned.
    pub fn new(len: usize, poison: u8) -> Guarded {
        let mut bytes = vec![SENTINEL; len + 3 * GUARD];
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(GUARD);
        bytes[start..start + len].fill(poison);
        Guarded { bytes, start, len }
    }

    /// Contents of the buffer.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// Mutable contents of the buffer.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// Pointer to the buffer's first byte, for code that takes one.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        // Derived from the whole vector, so a stray write into the guard zones is detected instead of
        // undefined behaviour.
        self.bytes.as_mut_ptr().wrapping_add(self.start)
    }

    /// Checks that both guard zones are untouched.
    pub fn check(&self) -> Result<(), Trespass> {
        let outside = |i: &usize| *i < self.start || *i >= self.start + self.len;
        match (0..self.bytes.len()).filter(outside).find(|&i| self.bytes[i] != SENTINEL) {
            None => Ok(()),
            Some(i) => Err(Trespass { offset: i as isize - self.start as isize, len: self.len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_past_either_end_is_detected() {
        let mut guarded = Guarded::new(10, 0xFF);
        guarded.as_mut_slice().fill(1);
        assert_eq!(guarded.check(), Ok(()));
        assert_eq!(guarded.as_mut_slice().as_ptr() as usize % 256, 0);
        let (start, len) = (guarded.start, guarded.len);
        guarded.bytes[start + len] = 0;
        assert_eq!(guarded.check().unwrap_err().offset, 10);
        guarded.bytes[start - 1] = 0;
        let text = "byte -1 was written, outside a buffer of 10 bytes";
        assert_eq!(guarded.check().unwrap_err().to_string(), text);
    }
}
