//! Sentinel bytes around a buffer: who writes past an end is found out.

use std::fmt;

// A whole 256-byte line on each side keeps the buffer as aligned as a planned one.
const GUARD: usize = 256;
const SENTINEL: u8 = 0xA5;

/// A buffer between two guards.
#[derive(Clone, Debug)]
pub struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

/// A write outside a guarded buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trespass {
    /// Where, counted from the buffer's first byte; negative in front of it.
    pub offset: isize,
    /// Size of the buffer.
    pub len: usize,
}

impl fmt::Display for Trespass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a byte at {} was written, outside a buffer of {} bytes", self.offset, self.len)
    }
}

impl std::error::Error for Trespass {}

impl Guarded {
    /// A buffer of `len` bytes, each `poison`, aligned to 256.
    pub fn new(len: usize, poison: u8) -> Guarded {
        let mut bytes = vec![SENTINEL; len + 3 * GUARD];
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(GUARD);
        bytes[start..start + len].fill(poison);
        Guarded { bytes, start, len }
    }

    /// The buffer.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The buffer, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// The first byte of the buffer, for code that is given a pointer.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        // From the whole vector, so that a stray write within the guards is seen and is not undefined.
        self.bytes.as_mut_ptr().wrapping_add(self.start)
    }

    /// Whether both guards are untouched.
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
    fn a_write_past_either_end_is_found() {
        let mut guarded = Guarded::new(10, 0xFF);
        guarded.as_mut_slice().fill(1);
        assert_eq!(guarded.check(), Ok(()));
        assert_eq!(guarded.as_mut_slice().as_ptr() as usize % 256, 0);
        let (start, len) = (guarded.start, guarded.len);
        guarded.bytes[start + len] = 0;
        assert_eq!(guarded.check().unwrap_err().offset, 10);
        guarded.bytes[start - 1] = 0;
        let text = "a byte at -1 was written, outside a buffer of 10 bytes";
        assert_eq!(guarded.check().unwrap_err().to_string(), text);
    }
}
