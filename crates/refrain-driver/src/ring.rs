//! A ring in pinned memory through which kernels hand results to the host without a wait.
//!
//! # Layout
//!
//! ```text
//! byte 0     consumed: u64, written by the host: how many entries it has taken
//! byte 64    entry 0: seq: u64, payload, padded to a multiple of 16 bytes
//!            entry 1: ..
//! ```
//!
//! The `k`-th result (from 1) goes to entry `(k - 1) % n_entries`: the kernel writes the payload, then stores
//! `seq = k` with system-scope release. The host loads `seq` with acquire and then reads the payload. Back-pressure:
//! the host sends no step for which [`Ring::reserve`] has no room, so an entry is never written before it was taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::api::HostPtr;
use crate::error::DriverError;
use crate::memory::{Buf, BufAddress, Memory, Region};
use crate::pinned;
use crate::protocol::entries::{Entries, Next};
use crate::stream::Stream;

/// Where the first entry starts.
pub const RING_HEADER_BYTES: u64 = 64;

/// The host's end of a ring.
#[derive(Debug)]
pub struct Ring {
    words: RingWords,
    buf: Buf,
    payload_bytes: usize,
    /// Bytes from one entry to the next.
    stride: u64,
    n_entries: u64,
    entries: Entries,
}

/// The pinned region, as the words in it that the host and the device both touch.
#[derive(Debug)]
struct RingWords {
    memory: Arc<Memory>,
    base: HostPtr,
}

impl Ring {
    /// Bytes from one entry to the next; `None` when no address space holds it.
    #[must_use]
    pub const fn stride(payload_bytes: usize) -> Option<u64> {
        match (payload_bytes as u64).checked_add(8) {
            Some(bytes) => bytes.checked_next_multiple_of(16),
            None => None,
        }
    }

    /// Bytes a ring needs, for the layout; `None` when no address space holds it.
    #[must_use]
    pub const fn bytes(n_entries: u32, payload_bytes: usize) -> Option<u64> {
        let Some(stride) = Ring::stride(payload_bytes) else { return None };
        match stride.checked_mul(n_entries as u64) {
            Some(entries) => entries.checked_add(RING_HEADER_BYTES),
            None => None,
        }
    }

    /// A ring over a pinned region that no other ring uses. [`DriverError::OutOfRange`] when the region is not pinned or too
    /// small, and when the ring would fit in none.
    pub fn new(
        memory: &Arc<Memory>,
        region: Region,
        n_entries: u32,
        payload_bytes: usize,
    ) -> Result<Ring, DriverError> {
        let buf = memory.buf(region);
        let (need, stride) = (Ring::bytes(n_entries, payload_bytes), Ring::stride(payload_bytes));
        let (base, stride) = match (memory.resolve(buf)?, need, stride) {
            (BufAddress::Host(base), Some(need), Some(stride)) if n_entries > 0 && need <= buf.len() => {
                (base, stride)
            }
            (BufAddress::Host(_) | BufAddress::Device(_), ..) => {
                return Err(DriverError::OutOfRange {
                    what: "the pinned region of a ring".to_owned(),
                    offset: 0,
                    len: need.unwrap_or(u64::MAX),
                    bytes: buf.len(),
                });
            }
        };
        if !memory.take_region(buf) {
            return Err(DriverError::LeaseTaken { name: "ring".to_owned() });
        }
        let ring = Ring {
            words: RingWords { memory: Arc::clone(memory), base },
            buf,
            payload_bytes,
            stride,
            n_entries: u64::from(n_entries),
            entries: Entries::new(u64::from(n_entries)),
        };
        ring.clear();
        Ok(ring)
    }

    /// Begins anew, as if it had just been made: what was on its way is forgotten, and the next result has number 1.
    /// No step may be under way that writes to it, and its count of results must become 0 before the next one.
    pub fn restart(&mut self) {
        self.entries = Entries::new(self.n_entries);
        self.clear();
    }

    /// As [`Ring::restart`], with results of another size. [`DriverError::OutOfRange`] when they do not fit; then nothing has
    /// changed.
    pub fn restart_with(&mut self, payload_bytes: usize) -> Result<(), DriverError> {
        let need = u32::try_from(self.n_entries).ok().and_then(|n| Ring::bytes(n, payload_bytes));
        let fits = need.is_some_and(|need| need <= self.buf.len());
        let Some(stride) = Ring::stride(payload_bytes).filter(|_| fits) else {
            return Err(DriverError::OutOfRange {
                what: "the pinned region of a ring".to_owned(),
                offset: 0,
                len: need.unwrap_or(u64::MAX),
                bytes: self.buf.len(),
            });
        };
        (self.payload_bytes, self.stride) = (payload_bytes, stride);
        self.restart();
        Ok(())
    }

    /// Bytes of a result.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    fn clear(&self) {
        (0..self.n_entries).for_each(|i| self.words.at(self.entry(i)).store(0, Ordering::Relaxed));
        self.words.at(0).store(0, Ordering::Release);
    }

    /// The whole ring, as a kernel argument.
    #[must_use]
    pub fn buf(&self) -> Buf {
        self.buf
    }

    /// Counts one more result that will come; false when the ring has no room for it, and then nothing may be sent.
    #[must_use]
    pub fn reserve(&mut self) -> bool {
        self.entries.reserve()
    }

    /// Results that are on their way.
    #[must_use]
    pub fn n_pending(&self) -> u64 {
        self.entries.n_pending()
    }

    /// Whether the next result is there.
    #[must_use]
    pub fn has_next(&self) -> bool {
        self.words.at(self.entry(self.entries.next_idx())).load(Ordering::Acquire) > self.entries.n_taken()
    }

    /// Takes the next result if it is there, and returns its number.
    pub fn try_take(&mut self, payload: &mut [u8]) -> Result<Option<u64>, DriverError> {
        if payload.len() != self.payload_bytes {
            return Err(DriverError::SizeMismatch {
                what: "a ring entry".to_owned(),
                expected: self.payload_bytes as u64,
                given: payload.len() as u64,
            });
        }
        let entry = self.entry(self.entries.next_idx());
        let (seq, consumed) = (self.words.at(entry), self.words.at(0));
        match self.entries.take(seq, consumed, || self.words.read(entry + 8, payload)) {
            Next::Taken(seq) => Ok(Some(seq)),
            Next::Pending => Ok(None),
            Next::Overrun { expected, found } => Err(DriverError::RingOverrun { expected, found }),
        }
    }

    /// Waits for the next result, at most `limit`, and looks for errors of the stream meanwhile.
    pub fn take(
        &mut self,
        stream: &mut Stream,
        limit: Duration,
        payload: &mut [u8],
    ) -> Result<u64, DriverError> {
        let start = Instant::now();
        let mut next_look = Duration::from_micros(100);
        loop {
            if let Some(seq) = self.try_take(payload)? {
                return Ok(seq);
            }
            let waited = start.elapsed();
            if waited >= next_look {
                let done = stream.is_done()?;
                if let Some(seq) = self.try_take(payload)? {
                    return Ok(seq);
                }
                if done || waited >= limit {
                    let origin = stream.shared().last();
                    return Err(DriverError::Timeout { what: "a ring entry", waited, origin });
                }
                next_look = waited + Duration::from_micros(100);
            }
            std::hint::spin_loop();
        }
    }

    fn entry(&self, index: u64) -> u64 {
        RING_HEADER_BYTES + index * self.stride
    }
}

impl RingWords {
    fn at(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: `offset` is 0 or an entry's start, so `offset + 8` is inside the pinned region (`Ring::new` and
        // `Ring::restart_with` checked its size) and 8-byte aligned (the region is, and offsets are multiples of 16).
        // `self.memory` keeps it allocated, and the host touches pinned regions only through `pinned`.
        unsafe { pinned::word(HostPtr(self.base.0 + offset)) }
    }

    /// Reads the bytes at an offset, which a kernel may be writing.
    fn read(&self, offset: u64, to: &mut [u8]) {
        // SAFETY: as for `at`: `Ring::try_take` asks for the payload of an entry, and regions are of whole words.
        unsafe { pinned::read(HostPtr(self.base.0 + offset), to) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.words.memory.give_region(self.buf);
    }
}
