//! A ring buffer in pinned memory, through which kernels pass results to the host without a synchronisation.
//!
//! # Layout
//!
//! ```text
//! byte 0     consumed: u64, written by the host: the number of entries it has read
//! byte 64    entry 0: seq: u64, payload, padded to a multiple of 16 bytes
//!            entry 1: ..
//! ```
//!
//! The `k`-th result (from 1) goes to entry `(k - 1) % n_entries`: the kernel writes the payload, then stores
//! `seq = k` with system-scope release. The host loads `seq` with acquire and then reads the payload.
//! Back-pressure: the host launches a step only if [`Ring::reserve`] succeeds, so an entry is never overwritten
//! before the host has read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::api::HostPtr;
use crate::error::DriverError;
use crate::memory::{Buf, BufAddress, Memory, Region};
use crate::pinned;
use crate::protocol::entries::{Entries, Next};
use crate::stream::Stream;

/// Offset of the first entry.
pub const RING_HEADER_BYTES: u64 = 64;

/// The host side of a ring.
#[derive(Debug)]
pub struct Ring {
    words: RingWords,
    buf: Buf,
    payload_bytes: usize,
    /// Distance between entries in bytes.
    stride: u64,
    n_entries: u64,
    entries: Entries,
}

/// The words of the pinned region, which host and device access concurrently.
#[derive(Debug)]
struct RingWords {
    memory: Arc<Memory>,
    base: HostPtr,
}

impl Ring {
    /// Distance between entries in bytes; `None` on overflow.
    #[must_use]
    pub const fn stride(payload_bytes: usize) -> Option<u64> {
        match (payload_bytes as u64).checked_add(8) {
            Some(bytes) => bytes.checked_next_multiple_of(16),
            None => None,
        }
    }

    /// Bytes that a ring needs, for the layout; `None` on overflow.
    #[must_use]
    pub const fn bytes(n_entries: u32, payload_bytes: usize) -> Option<u64> {
        let Some(stride) = Ring::stride(payload_bytes) else { return None };
        match stride.checked_mul(n_entries as u64) {
            Some(entries) => entries.checked_add(RING_HEADER_BYTES),
            None => None,
        }
    }

    /// Creates a ring over a pinned region that no other ring uses. Fails with [`DriverError::OutOfRange`] if the
    /// region is not pinned or too small.
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
        if !memory.reserve_region(buf) {
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

    /// Resets the ring to its initial state: pending results are forgotten, and the next result has number 1. No
    /// step that writes to the ring may be in flight, and the device's count of results must be reset to 0 before
    /// the next step.
    pub fn restart(&mut self) {
        self.entries = Entries::new(self.n_entries);
        self.clear();
    }

    /// Like [`Ring::restart`], with a new payload size. Fails with [`DriverError::OutOfRange`] if the ring would
    /// not fit; then nothing has changed.
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

    /// Payload size in bytes.
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

    /// Reserves an entry for one more result. False if the ring is full; then the step must not be launched.
    #[must_use]
    pub fn reserve(&mut self) -> bool {
        self.entries.reserve()
    }

    /// Number of results reserved but not yet read.
    #[must_use]
    pub fn n_pending(&self) -> u64 {
        self.entries.n_pending()
    }

    /// True if the next result has arrived.
    #[must_use]
    pub fn has_next(&self) -> bool {
        self.words.at(self.entry(self.entries.next_idx())).load(Ordering::Acquire) > self.entries.n_taken()
    }

    /// Reads the next result if it has arrived, and returns its number.
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

    /// Waits for the next result, for at most `limit`, and checks the stream for errors meanwhile.
    pub fn take(
        &mut self,
        stream: &mut Stream,
        limit: Duration,
        payload: &mut [u8],
    ) -> Result<u64, DriverError> {
        let start = Instant::now();
        let mut next_check = Duration::from_micros(100);
        loop {
            if let Some(seq) = self.try_take(payload)? {
                return Ok(seq);
            }
            let waited = start.elapsed();
            if waited >= next_check {
                let done = stream.is_done()?;
                if let Some(seq) = self.try_take(payload)? {
                    return Ok(seq);
                }
                if done || waited >= limit {
                    let origin = stream.shared().last();
                    return Err(DriverError::Timeout { what: "a ring entry", waited, origin });
                }
                next_check = waited + Duration::from_micros(100);
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
        // `Ring::restart_with` checked its size) and 8-byte aligned (the region is, and offsets are multiples of
        // 16). `self.memory` keeps it allocated, and the host touches pinned regions only through `pinned`.
        unsafe { pinned::word(HostPtr(self.base.0 + offset)) }
    }

    /// Reads bytes that a kernel may be writing.
    fn read(&self, offset: u64, to: &mut [u8]) {
        // SAFETY: as for `at`: `Ring::try_take` reads the payload of an entry, and regions consist of whole words.
        unsafe { pinned::read(HostPtr(self.base.0 + offset), to) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.words.memory.release_region(self.buf);
    }
}
