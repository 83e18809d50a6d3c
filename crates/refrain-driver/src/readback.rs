//! Pinned slots through which a few bytes of each step return to the host, without a wait between steps.

use std::sync::Arc;
use std::time::Duration;

use crate::api::{DevicePtr, HostPtr};
use crate::device::Context;
use crate::error::DriverError;
use crate::event::Event;
use crate::memory::{Buf, BufAddress, Lease};
use crate::pinned;
use crate::staging::PinnedSlots;
use crate::stream::Stream;

/// A few pinned slots of equal size, used in turn. [`Stream::start_readback`] fills the next one in stream order,
/// and [`Readback::take`] waits for the oldest. A slot is reused only after it has been taken.
pub struct Readback {
    pinned: Arc<PinnedSlots>,
    slot_bytes: usize,
    slots: Vec<ReadbackSlot>,
    n_sent: u64,
    n_taken: u64,
}

struct ReadbackSlot {
    /// Recorded after the copies into the slot.
    event: Event,
    n_bytes: usize,
}

impl Readback {
    /// Allocates `n_slots` slots of `slot_bytes`, rounded up to whole words; at least one slot of one word.
    pub fn new(ctx: &Context, n_slots: usize, slot_bytes: usize) -> Result<Readback, DriverError> {
        let shared = ctx.shared();
        let n_slots = n_slots.max(1);
        let slot_bytes = usize::try_from(pinned::whole_words(slot_bytes.max(1) as u64)).unwrap_or(usize::MAX);
        let pinned = PinnedSlots::new(shared, n_slots, slot_bytes)?;
        let slot = |_| Ok(ReadbackSlot { event: Event::new(shared, false)?, n_bytes: 0 });
        let slots = (0..n_slots).map(slot).collect::<Result<_, DriverError>>()?;
        Ok(Readback { pinned, slot_bytes, slots, n_sent: 0, n_taken: 0 })
    }

    /// Slot size in bytes.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Number of slots in flight or not yet taken.
    #[must_use]
    pub fn n_pending(&self) -> usize {
        (self.n_sent - self.n_taken) as usize
    }

    /// Waits for the oldest slot, for at most `limit`, and returns its bytes. After an error the slot can be taken
    /// again.
    pub fn take(&mut self, limit: Duration) -> Result<Vec<u8>, DriverError> {
        if self.n_pending() == 0 {
            return Err(DriverError::Timeout {
                what: "a readback that was never started",
                waited: Duration::ZERO,
                origin: None,
            });
        }
        let idx = self.idx(self.n_taken);
        let slot = &self.slots[idx];
        slot.event.wait(limit)?;
        let mut bytes = vec![0; slot.n_bytes];
        // SAFETY: the slot lies in our pinned allocation, starts at a whole word, and the host accesses it only
        // here.
        unsafe { pinned::read(self.address(idx), &mut bytes) };
        self.n_taken += 1;
        Ok(bytes)
    }

    fn idx(&self, n: u64) -> usize {
        (n % self.slots.len() as u64) as usize
    }

    fn address(&self, idx: usize) -> HostPtr {
        HostPtr(self.pinned.ptr().0 + (idx * self.slot_bytes) as u64)
    }
}

impl Stream {
    /// Copies buffers, one after the other, to the next slot of `readback` in stream order, without waiting for
    /// them.
    ///
    /// Fails with [`DriverError::OutOfRange`] if they exceed a slot, or if no slot is free.
    pub fn start_readback(
        &mut self,
        lease: &mut Lease,
        readback: &mut Readback,
        from: &[Buf],
    ) -> Result<(), DriverError> {
        let n_bytes = from.iter().fold(0u64, |sum, buf| sum.saturating_add(buf.len()));
        self.check_usable("readback", n_bytes)?;
        self.same_device(readback.pinned.shared(), "the readback slots")?;
        let out_of_range = |what: &str, len: u64, bytes: usize| DriverError::OutOfRange {
            what: what.to_owned(),
            offset: 0,
            len,
            bytes: bytes as u64,
        };
        if n_bytes > readback.slot_bytes as u64 {
            return Err(out_of_range("a readback slot", n_bytes, readback.slot_bytes));
        }
        if readback.n_pending() == readback.slots.len() {
            return Err(out_of_range(
                "the readback slots",
                readback.n_pending() as u64 + 1,
                readback.slots.len(),
            ));
        }
        let from: Vec<(BufAddress, u64)> = from
            .iter()
            .map(|buf| Ok((lease.memory().resolve(*buf)?, buf.len())))
            .collect::<Result<_, DriverError>>()?;
        self.begin_use(lease)?;
        self.keep.add(&readback.pinned);
        let idx = readback.idx(readback.n_sent);
        let (mut to, handle) = (readback.address(idx), self.handle());
        for (from, bytes) in from.into_iter().filter(|(_, bytes)| *bytes > 0) {
            self.shared().call("cuMemcpyDtoHAsync", |api| match from {
                // SAFETY: the slot holds all buffers (checked above) and is not read before its event has
                // completed; the stream keeps the allocation alive until it has waited for its work.
                BufAddress::Device(from) => unsafe { api.memcpy_dtoh_async(to, from, bytes, handle) },
                BufAddress::Host(from) => {
                    let (to, from): (DevicePtr, DevicePtr) = (to.device(), from.device());
                    api.memcpy_dtod_async(to, from, bytes, handle)
                }
            })?;
            to = HostPtr(to.0 + bytes);
        }
        let slot = &mut readback.slots[idx];
        slot.n_bytes = n_bytes as usize;
        self.record_event(&slot.event)?;
        readback.n_sent += 1;
        Ok(())
    }
}

impl std::fmt::Debug for Readback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n, n_slots, bytes) = (self.n_pending(), self.slots.len(), self.slot_bytes);
        write!(f, "Readback ({n} of {n_slots} slots of {bytes} bytes pending)")
    }
}
