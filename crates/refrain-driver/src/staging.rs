//! Pinned slots through which bytes travel to and from the device.

use std::sync::Arc;

use crate::api::{DevicePtr, HostPtr};
use crate::device::Context;
use crate::error::DriverError;
use crate::event::Event;
use crate::shared::{Garbage, Shared};
use crate::stream::Stream;

/// A few pinned slots of equal size, used in turn. A slot is written again only when the copy out of it is done.
pub struct Staging {
    pinned: Arc<Pinned>,
    slot_bytes: usize,
    /// One per slot: set after the copy that last used it.
    events: Vec<Arc<Event>>,
    used: Vec<bool>,
    next: usize,
}

/// A pinned allocation, kept by whoever sent a copy that uses it.
struct Pinned {
    shared: Arc<Shared>,
    ptr: HostPtr,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shared.discard(Garbage::Host(self.ptr));
    }
}

impl Staging {
    /// Allocates `n_slots` slots of `slot_bytes`; at least one of at least one byte.
    pub fn new(ctx: &Context, n_slots: usize, slot_bytes: usize) -> Result<Staging, DriverError> {
        let shared = ctx.shared();
        let (n_slots, slot_bytes) = (n_slots.max(1), slot_bytes.max(1));
        let bytes = (n_slots as u64).checked_mul(slot_bytes as u64).filter(|&b| b <= i64::MAX as u64).ok_or(
            DriverError::OutOfRange {
                what: "the address space".to_owned(),
                offset: 0,
                len: u64::MAX,
                bytes: i64::MAX as u64,
            },
        )?;
        shared.refuse_while_recording("pinned allocation", bytes)?;
        let ptr = shared.call("cuMemAllocHost", |api| api.alloc_host(bytes))?;
        let pinned = Arc::new(Pinned { shared: Arc::clone(shared), ptr });
        let events =
            (0..n_slots).map(|_| Event::new(shared, false).map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(Staging { pinned, slot_bytes, events, used: vec![false; n_slots], next: 0 })
    }

    /// Bytes a slot holds.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Copies `bytes` into the next slot and from there, in stream order, to `to`.
    pub(crate) fn send(
        &mut self,
        stream: &mut Stream,
        to: DevicePtr,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        if bytes.len() > self.slot_bytes {
            return Err(DriverError::OutOfRange {
                what: "a staging slot".to_owned(),
                offset: 0,
                len: bytes.len() as u64,
                bytes: self.slot_bytes as u64,
            });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let (slot, from) = self.acquire(stream)?;
        // SAFETY: `from` is a slot of `slot_bytes >= bytes.len()` bytes of our pinned allocation, and `acquire` has
        // seen the event after its last copy, so neither the device nor anyone else uses it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from.as_ptr(), bytes.len()) };
        self.send_slot(stream, slot, from, to, bytes.len() as u64)
    }

    /// Copies the first `bytes` of an acquired slot, which is full, to `to`.
    pub(crate) fn send_slot(
        &self,
        stream: &mut Stream,
        slot: usize,
        from: HostPtr,
        to: DevicePtr,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let handle = stream.handle();
        stream.shared().call("cuMemcpyHtoDAsync", |api| {
            // SAFETY: the slot is not written before its event, recorded behind this copy, has passed (`acquire`), and
            // the stream keeps the allocation until it has waited for its work.
            unsafe { api.memcpy_htod_async(to, from, bytes, handle) }
        })?;
        self.release(stream, slot)
    }

    /// Copies device bytes to the host, through the slots, and waits for them.
    pub(crate) fn receive(
        &mut self,
        stream: &mut Stream,
        from: DevicePtr,
        bytes: &mut [u8],
    ) -> Result<(), DriverError> {
        let mut at = from;
        for part in bytes.chunks_mut(self.slot_bytes) {
            let (slot, to) = self.acquire(stream)?;
            let handle = stream.handle();
            // SAFETY: `acquire` has seen the slot idle, it is as large as `part`, and the stream keeps the
            // allocation until it has waited for its work.
            stream.shared().call("cuMemcpyDtoHAsync", |api| unsafe {
                api.memcpy_dtoh_async(to, at, part.len() as u64, handle)
            })?;
            self.release(stream, slot)?;
            self.events[slot].wait(stream.limit())?;
            // SAFETY: the copy into the slot is done (its event has passed) and nobody else writes the slot.
            unsafe { std::ptr::copy_nonoverlapping(to.as_ptr(), part.as_mut_ptr(), part.len()) };
            at = at.add(part.len() as u64);
        }
        stream.synchronize()
    }

    /// Slots there are.
    pub(crate) fn n_slots(&self) -> usize {
        self.events.len()
    }

    /// The next slot, once it is free: whoever acquired it before must have sent it.
    pub(crate) fn acquire(&mut self, stream: &mut Stream) -> Result<(usize, HostPtr), DriverError> {
        if !Arc::ptr_eq(&self.pinned.shared, stream.shared()) {
            return Err(DriverError::ForeignDevice { what: "the staging memory" });
        }
        let slot = self.next;
        if self.used[slot] {
            self.events[slot].wait(stream.limit())?;
        }
        self.next = (slot + 1) % self.events.len();
        // In use from here on, also when the copy fails half way.
        self.used[slot] = true;
        stream.keep.add(&self.pinned);
        Ok((slot, HostPtr(self.pinned.ptr.0 + (slot * self.slot_bytes) as u64)))
    }

    fn release(&self, stream: &mut Stream, slot: usize) -> Result<(), DriverError> {
        stream.record_event(&self.events[slot])
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging ({} slots of {} bytes)", self.events.len(), self.slot_bytes)
    }
}
