//! A ring buffer in pinned memory, through which kernels pass results to the host without a synchronisation.
//!
//! # Layout
//!
//! ```text
//! byte 0     consumed: u64, written by the host: the number of entries it has read
//! byte 8     until: u64, written by the host: the number of entries after which a loop on the device ends
//! byte 16    left: u64, written by the device: the number of entries after which a loop has ended; 0 while it runs
//! byte 64    entry 0: seq: u64, payload, padded to a multiple of 16 bytes
//!            entry 1: ..
//! ```
//!
//! The `k`-th result (from 1) goes to entry `(k - 1) % n_entries`: the kernel writes the payload, then stores
//! `seq = k` with system-scope release. The host loads `seq` with acquire and then reads the payload.
//! Back-pressure: the host launches a step only if [`Ring::reserve`] succeeds, so an entry is never overwritten
//! before the host has read it.
//!
//! # Loops
//!
//! A loop on the device ([`Stream::record_loop`]) writes many results with one launch, so nobody can reserve their
//! entries. Its last kernel reads `consumed` and `until` in each body, at any time since the previous body. After it
//! has written result `k`, it repeats the body only if `k < until` and all results of another body have an entry:
//! `k + n_per_body <= consumed + n_entries`. Otherwise it stores `left = k` with system-scope release, after `seq`. The host ends a loop by
//! setting `until` to 0 ([`Ring::stop_loop`]): at most one more body runs after the one that is running.

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
/// Offset of the number of entries after which a loop ends.
const UNTIL: u64 = 8;
/// Offset of the number of entries after which a loop has ended.
const LEFT: u64 = 16;

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
    /// Whether a loop was prepared that the host has not ended.
    in_loop: bool,
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
            in_loop: false,
        };
        ring.clear();
        Ok(ring)
    }

    /// Resets the ring to its initial state: pending results are forgotten, and the next result has number 1. No
    /// step that writes to the ring may be in flight, and the device's count of results must be reset to 0 before
    /// the next step.
    pub fn restart(&mut self) {
        (self.entries, self.in_loop) = (Entries::new(self.n_entries), false);
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
        [UNTIL, LEFT].into_iter().for_each(|at| self.words.at(at).store(0, Ordering::Relaxed));
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

    /// Prepares a loop that writes `n_per_body` results in each body, and ends with the body that writes the `n`-th.
    /// False if the ring has no entries for the first body, or if another loop has not been ended; then the loop must
    /// not be launched.
    #[must_use]
    pub fn begin_loop(&mut self, n: u64, n_per_body: u32) -> bool {
        let before = self.entries.n_reserved();
        if n == 0 || self.in_loop || !self.entries.reserve_many(u64::from(n_per_body)) {
            return false;
        }
        let until = before.saturating_add(n);
        self.words.at(LEFT).store(0, Ordering::Relaxed);
        self.words.at(UNTIL).store(until, Ordering::Release);
        self.in_loop = true;
        true
    }

    /// Undoes [`Ring::begin_loop`] for a loop that was not launched.
    pub fn cancel_loop(&mut self, n_per_body: u32) {
        if std::mem::take(&mut self.in_loop) {
            self.entries.release(u64::from(n_per_body));
        }
    }

    /// Asks the loop on the device to end. It does so after the body that is running, or after the next one. The
    /// stream must still be waited for.
    pub fn stop_loop(&self) {
        self.words.at(UNTIL).store(0, Ordering::Release);
    }

    /// Whether a loop was prepared that the host has not ended.
    #[must_use]
    pub fn is_looping(&self) -> bool {
        self.in_loop
    }

    /// The number of results after which the loop has ended; `None` while it runs, and without a loop.
    #[must_use]
    pub fn loop_end(&self) -> Option<u64> {
        match self.words.at(LEFT).load(Ordering::Acquire) {
            n if self.in_loop && n > 0 => Some(n),
            _ => None,
        }
    }

    /// Ends the loop for the host if it has ended on the device; returns the number of results so far. From then on,
    /// steps and loops can be launched again.
    pub fn end_loop(&mut self) -> Option<u64> {
        let n = self.loop_end()?;
        self.in_loop = false;
        self.entries.reserve_up_to(n);
        Some(n)
    }

    /// Number of results reserved but not yet read; at least 1 while a loop runs.
    #[must_use]
    pub fn n_pending(&self) -> u64 {
        match self.loop_end() {
            Some(n) => n.saturating_sub(self.entries.n_taken()),
            None => self.entries.n_pending().max(u64::from(self.in_loop)),
        }
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
        // SAFETY: `offset` is a word of the header or an entry's start, so `offset + 8` is inside the pinned region (`Ring::new` and
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
